//! Joins of two tables whose build side is on a device already.
//!
//! ```text
//!   submit ─┬─► places as usual ───────────────────────► read and index the build side, probe
//!           └─► one more: the device of a resident ─► its turn ─► probe
//! ```
//!
//! A job of the same tenant whose rows arrive has prepared the build side (`residents.rs`). A join
//! of the same two sides may probe it with the rows of a table. It uses no memory except the
//! resident's, so it takes turns with the other jobs of the resident. The queue decides whether the
//! job starts there or elsewhere. A job that waits for its turn books no slot, because the job with
//! the turn may need the slot. If the resident is evicted first, the job runs as usual.
//!
//! A result that becomes a table shares no columns with the tables it is made of, and the resident
//! was prepared to share them. So such a join runs as usual. So does a join that counts rows.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use super::admission::{Admitted, Proposed, Terms, host_need};
use super::device_class::DeviceClass;
use super::device_set::DeviceSet;
use super::job::Job;
use super::job_options::JobOptions;
use super::placing::{Place, ScheduledStart, Wait, Waiting};
use super::queue::Queue;
use super::residents::{Resident, ResidentUse};
use super::state::{Leftovers, Shared, State};
use crate::device::DeviceId;
use crate::join::{Composition, Monitor, Side, TableRows};
use crate::planner::{self, BoundJoin, KeptBuild, Plan, PlanOverrides};
use crate::{Error, Result};

/// Resident that a join may probe.
struct Found {
    resident: Arc<Resident>,
    device: usize,
    since: SystemTime,
    streamed: Side,
    /// Decisions with which it was prepared.
    composition: Composition,
}

impl Shared {
    /// Adds the device of a resident that the join may probe to its places. Returns the use of that
    /// resident.
    ///
    /// # Errors
    /// The errors of planning.
    pub(super) fn place_on_kept(
        &self,
        admitted: &mut Admitted,
        options: &JobOptions,
        owner: &str,
        terms: Terms<'_>,
    ) -> Result<Option<ResidentUse>> {
        let join = &admitted.plan().join;
        let Some(found) = self.find_kept(join, options, owner) else { return Ok(None) };
        let Some(plan) = self.plan_on_kept(&found, join, terms)? else { return Ok(None) };
        let Ok(host) = host_need(&plan, options, &self.catalog, terms) else { return Ok(None) };
        if !found.resident.enter(Duration::ZERO) {
            return Ok(None);
        }
        let number = admitted.plans.len();
        admitted.places.push(Place {
            devices: DeviceSet::new([found.device]),
            plan: number,
            seconds: plan.seconds,
            memory_bytes: 0,
            shared_bytes: Some(0),
            is_prepared: true,
            host,
        });
        if plan.seconds < admitted.plan().seconds {
            admitted.fastest = number;
        }
        admitted.plans.push(plan);
        Ok(Some(ResidentUse::new(found.resident, self.clock.now())))
    }

    /// Replaces a proposed plan with that of a resident, if the join is predicted to end sooner
    /// there.
    ///
    /// # Errors
    /// The errors of planning.
    pub(super) fn propose_on_kept(
        &self,
        proposed: Proposed,
        join: &BoundJoin,
        options: &JobOptions,
        owner: &str,
        terms: Terms<'_>,
    ) -> Result<Proposed> {
        let Some(found) = self.find_kept(join, options, owner) else { return Ok(proposed) };
        let plan = self.plan_on_kept(&found, join, terms)?;
        Ok(match plan {
            Some(plan) if proposed.refusal.is_none() && plan.seconds < proposed.plan.seconds => Proposed {
                plan,
                device_reason: "its build side is kept there; when it is submitted, queues count as well".into(),
                ..proposed
            },
            _ => proposed,
        })
    }

    /// Finds a resident of the tenant that is on a device in service, and that the join may probe.
    fn find_kept(&self, join: &BoundJoin, options: &JobOptions, owner: &str) -> Option<Found> {
        let is_usual = options.streamed.is_some() || options.into.is_some() || options.distribution.is_some();
        if is_usual || join.counts_rows {
            return None;
        }
        let candidates = self.kept_of(owner);
        if candidates.is_empty() {
            return None;
        }
        let ids: Vec<DeviceId> = self.engines.iter().map(|engine| engine.id()).collect();
        let allowed = options.devices.sets(&ids).unwrap_or_default();
        // Joins may have thousands of columns, so they are compared without the lock.
        candidates.into_iter().find(|found| {
            allowed.contains(&DeviceSet::new([found.device]))
                && options.strategy.is_none_or(|strategy| strategy == found.composition.strategy())
                && found.resident.shape.serves(join)
        })
    }

    /// Returns the residents of a tenant that are on a device in service, and that others may use.
    fn kept_of(&self, owner: &str) -> Vec<Found> {
        let state = self.state.lock();
        let found = |resident: &Arc<Resident>| {
            let streamed = resident.shape.streamed;
            let built = resident.built().filter(|built| state.devices[built.device].lost.is_none())?;
            let (resident, composition) = (resident.clone(), built.join.composition().clone());
            Some(Found { resident, device: built.device, since: built.since, streamed, composition })
        };
        let may_use = |resident: &&Arc<Resident>| resident.owner == owner && resident.is_evictable();
        state.residents.iter().filter(may_use).filter_map(found).collect()
    }

    /// Plans the join on the device of a resident, as it was prepared there: without statistics of
    /// the rows that probe it. `None` if the planner knows no such plan.
    fn plan_on_kept(&self, found: &Found, join: &BoundJoin, terms: Terms<'_>) -> Result<Option<Plan>> {
        let join = BoundJoin { unknown_rows: Some(found.streamed), ..join.clone() };
        let overrides = PlanOverrides::of_prepared(&found.composition);
        let classes = DeviceClass::group(vec![DeviceSet::new([found.device])], &self.engines, &join);
        let kept = KeptBuild::new(found.resident.number, found.since);
        match planner::propose(join, &overrides, classes[0].0.target(), terms.interrupt) {
            Ok((plan, _)) => {
                let plan = Plan { composition: found.composition.clone(), ..plan };
                Ok(Some(plan.on_kept_build(kept)))
            }
            Err(Error::Invalid(_) | Error::Unsupported(_)) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Lets others have the turn that a waiting job has been given, if the job waits for anything
    /// except the device of its resident. The job asks for a turn again when it can start there.
    /// Returns true if another job can have the turn now.
    pub(super) fn give_up_turn(job: &Job, scheduled: &ScheduledStart) -> bool {
        let keeps = scheduled.place.is_prepared && matches!(scheduled.wait, None | Some(Wait::Device));
        let has_turn = |kept: &&ResidentUse| kept.resident().has_turn(job.id);
        let Some(kept) = job.kept.as_ref().filter(has_turn).filter(|_| !keeps) else { return false };
        kept.resident().end_turn(job.id);
        kept.resident().has_next()
    }

    /// True if the job would start at its prepared place, and another job has the turn there.
    pub(super) fn must_await_turn(
        &self,
        state: &mut State,
        job: &Job,
        scheduled: &ScheduledStart,
        now: Duration,
    ) -> bool {
        let kept = job.kept.as_ref().filter(|_| scheduled.place.is_prepared);
        let waits = kept.is_some_and(|kept| !kept.resident().begin_turn(job.id, now));
        if let Some(kept) = kept.filter(|_| waits) {
            let before = kept.resident().waiting().iter().take_while(|&&id| id != job.id).count();
            state.queue.set_turns_ahead(job.id, Some(1 + before));
        }
        waits
    }

    /// Removes the prepared place of a waiting job if the build side is no longer on that device.
    /// Returns true then. The build side may leave while the job is being submitted, or while it
    /// is put back, when [`leave_unbuilt`](Self::leave_unbuilt) does not see it in the queue.
    pub(super) fn leave_stale_place(state: &mut State, job: &Job, scheduled: &ScheduledStart) -> bool {
        let Some(kept) = job.kept.as_ref().filter(|_| scheduled.place.is_prepared) else { return false };
        if kept.resident().built().is_some_and(|built| built.device == scheduled.place.devices.leader()) {
            return false;
        }
        Self::leave_prepared_place(&mut state.queue, job, kept.resident());
        true
    }

    /// Lets a waiting job run as usual, because the build side is not on the device of its prepared
    /// place.
    fn leave_prepared_place(queue: &mut Queue, job: &Job, resident: &Resident) {
        resident.end_turn(job.id);
        queue.remove_prepared_places(job.id);
    }

    /// Ends the use of a resident by a job that starts elsewhere. `entry` keeps no place there, in
    /// case the job is put back. Returns what is not kept after the last job.
    pub(super) fn leave_kept(job: &Job, entry: &mut Waiting, now: Duration) -> Option<Leftovers> {
        let kept = job.kept.as_ref()?;
        entry.places.retain(|place| !place.is_prepared);
        kept.end(job.id, now).map(Leftovers::of_build)
    }

    /// Probes the build side of a resident with the other table of the join.
    pub(super) fn probe_kept(&self, kept: &ResidentUse, work: &Plan, job: &Job, monitor: &Monitor) -> Result<()> {
        let streamed = kept.resident().shape.streamed;
        let Some(built) = kept.resident().built() else {
            return Err(Error::Unavailable("the build side left its device before the join began; try again".into()));
        };
        let rows = TableRows::new(work.join.table(streamed).clone());
        built.join.probe(&rows, &job.host_memory, &job.result, monitor)?;
        built.join.finish(&job.host_memory, &job.result, monitor)
    }

    /// Lets the joins of tables that wait for a resident run as usual, because it leaves its
    /// device.
    pub(super) fn leave_unbuilt(state: &mut State, resident: &Resident) {
        for job in state.live.values() {
            let uses = job.kept.as_ref().is_some_and(|kept| std::ptr::eq(Arc::as_ptr(kept.resident()), resident));
            if uses && state.queue.contains(job.id) {
                Self::leave_prepared_place(&mut state.queue, job, resident);
            }
        }
    }
}
