//! Build sides that mark their rows: bounds on their memory, and the end of streams that hold it
//! while other jobs wait.
//!
//! A join that emits rows of its table at the end marks on its device which of them were matched.
//! No other job can use such a build side, and it cannot leave the device before its job ends. Its
//! client decides when that is, so two rules keep clients from taking a device from others:
//!
//! * Together, such build sides take at most half of a device's memory, and those of a known tenant
//!   at most a quarter. A job that would take more is refused.
//! * While another job waits for the memory, a job without a turn for [`IDLE_MAX`] is ended. If the
//!   other job has waited for [`WAIT_MAX`], any such job may be ended. Until then the other job
//!   books no slot, so that the turns of streams go on.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use super::device_set::DeviceSet;
use super::ending::count_failure;
use super::feeds::Feed;
use super::job::{Job, JobId};
use super::placing::ScheduledStart;
use super::state::{Leftovers, Running, Shared, State};
use crate::Error;
use crate::human;
use crate::memory::human_bytes;

/// Part of a device's memory that all build sides with marks may take, and part of those of one
/// tenant.
const ALL_PART: u64 = 2;
const TENANT_PART: u64 = 4;

/// Time without a turn after which a job with marks is ended, if another job waits for its memory.
/// A result without a reader waits as long.
pub(super) const IDLE_MAX: Duration = Duration::from_secs(30);

/// Wait of a job for device memory after which jobs with marks are ended that still have turns.
pub(super) const WAIT_MAX: Duration = Duration::from_secs(300);

/// Job whose build side has marks on a device.
struct Marking {
    job: Arc<Job>,
    bytes: u64,
}

impl Shared {
    /// Returns the jobs whose build sides take memory of a device for marks, or are about to.
    fn marking_on(state: &State, device: usize) -> Vec<Marking> {
        let bytes_of = |job: &Job, feed: &Feed| match feed.resident().built() {
            Some(built) => (built.device == device).then_some(built.bytes),
            None => {
                let mut running = state.devices[device].running.iter();
                running.find(|running| running.job.id == job.id).and_then(|running| running.shared_bytes)
            }
        };
        let marking = |job: &Arc<Job>| {
            let feed = job.feed.as_ref().filter(|feed| !feed.resident().is_evictable())?;
            Some(Marking { job: job.clone(), bytes: bytes_of(job, feed)? })
        };
        state.live.values().filter_map(marking).collect()
    }

    /// Takes a place away from a waiting job if its build side would have marks there, and such
    /// build sides take as much of that device as they may. Without another place, the job fails.
    /// Returns true if the place was taken away.
    pub(super) fn bound_marking(
        &self,
        state: &mut State,
        job: &Arc<Job>,
        scheduled: &ScheduledStart,
        leftovers: &mut Vec<Leftovers>,
    ) -> bool {
        let place = &scheduled.place;
        let marks = job.feed.as_ref().is_some_and(|feed| !feed.resident().is_evictable());
        let (Some(bytes), false) = (place.shared_bytes.filter(|_| marks), place.is_prepared) else { return false };
        let device = place.devices.leader();
        let (id, limit_bytes) = (self.engines[device].id(), self.engines[device].memory().limit_bytes());
        let mut marking = Self::marking_on(state, device);
        let sum = |marking: &[Marking]| marking.iter().map(|one| one.bytes).sum::<u64>();
        let mut held = None;
        if sum(&marking) + bytes > limit_bytes / ALL_PART {
            held = Some((ALL_PART, "the build sides of all such joins together".to_owned()));
        } else if !job.owner.is_empty() {
            marking.retain(|one| one.job.owner == job.owner);
            if sum(&marking) + bytes > limit_bytes / TENANT_PART {
                held = Some((TENANT_PART, format!("those of tenant {:?}", job.owner)));
            }
        }
        let Some((part, of)) = held else { return false };
        if state.queue.leave_device(job.id, device) {
            return true;
        }
        let error = Error::Exhausted(format!(
            "job {} needs {} of the memory of {id} until its end, because it emits rows of its table then; {of} may take {}, and \
             {} are taken by {}; end one of these streams, try again when one has ended, use a kind that emits no rows of its \
             table at the end, or raise the server's --device-memory",
            job.id,
            human_bytes(bytes),
            human_bytes(limit_bytes / part),
            human_bytes(sum(&marking)),
            names(marking.iter().map(|one| one.job.id)),
        ));
        state.queue.remove(job.id);
        self.end_with(state, job, error, leftovers);
        true
    }

    /// True if a job lacks memory of these devices that only jobs with marks can give back, and
    /// nothing is about to be freed. No other job that runs there has memory.
    pub(super) fn waits_for_marks(
        state: &State,
        devices: &DeviceSet,
        missing_bytes: u64,
        leftovers: &[Leftovers],
    ) -> bool {
        let is_on = |device: usize| devices.iter().any(|member| member == device);
        let has_memory = |running: &Running| running.shared_bytes != Some(0);
        let evictable = state.residents.iter().filter(|resident| resident.is_evictable());
        let built = evictable.filter_map(|resident| resident.built()).filter(|built| is_on(built.device));
        let evictable_bytes = built.map(|built| built.bytes).sum::<u64>();
        devices.iter().any(|device| !Self::marking_on(state, device).is_empty())
            && evictable_bytes < missing_bytes
            && !devices.iter().any(|device| state.devices[device].running.iter().any(has_memory))
            && leftovers.iter().all(|left| left._prepared.is_none())
    }

    /// Returns the jobs with marks on these devices that may be ended for a job that has waited,
    /// with the bytes that they hold. Those without a turn for longest come first.
    pub(super) fn endable(&self, state: &State, devices: &DeviceSet, waited: Duration) -> Vec<(u64, Arc<Job>)> {
        let now = self.clock.now();
        let mut found = Vec::new();
        for Marking { job, bytes } in devices.iter().flat_map(|device| Self::marking_on(state, device)) {
            let Some(resident) = job.feed.as_ref().map(Feed::resident) else { continue };
            let idle = resident.idle_for(now);
            let may_end = idle.is_some_and(|idle| idle >= IDLE_MAX) || waited >= WAIT_MAX;
            let has_no_turn = state.open.contains_key(&job.id) || state.queue.contains(job.id);
            if may_end && has_no_turn && resident.built().is_some() {
                found.push((idle.unwrap_or_default(), bytes, job));
            }
        }
        found.sort_by_key(|(idle, _, job)| (std::cmp::Reverse(*idle), job.id));
        found.into_iter().map(|(_, bytes, job)| (bytes, job)).collect()
    }

    /// Ends a job with marks for a job that has waited for its memory.
    pub(super) fn end_marking(
        &self,
        state: &mut State,
        job: &Arc<Job>,
        bytes: u64,
        waited: Duration,
        leftovers: &mut Vec<Leftovers>,
    ) {
        let Some(resident) = job.feed.as_ref().map(Feed::resident) else { return };
        let on = resident.built().map_or_else(String::new, |built| format!(" of {}", self.engines[built.device].id()));
        let idle = resident.idle_for(self.clock.now()).filter(|idle| *idle >= IDLE_MAX);
        let because = match idle {
            Some(idle) => format!("and joined no rows for {}", human::seconds(idle.as_secs_f64())),
            None => format!("for which another job has waited for {}", human::seconds(waited.as_secs_f64())),
        };
        let error = Error::Exhausted(format!(
            "job {} was ended because other jobs need memory: it held {} of the memory{on}, {because}; a join that emits rows \
             of its table at the end cannot give that memory back before; start it again, send its rows and read its result \
             without long pauses, or use a kind that emits no rows of its table at the end",
            job.id,
            human_bytes(bytes),
        ));
        if Self::take_out_open(state, job) {
            self.end_with(state, job, error, leftovers);
        }
    }

    /// Says what a job with marks has lost with their device; `None` for a job that has none.
    pub(super) fn lost_marks(&self, job: &Job) -> Option<String> {
        let feed = job.feed.as_ref().filter(|feed| !feed.resident().is_evictable())?;
        let built = feed.resident().built()?;
        let (id, table) = (self.engines[built.device].id(), feed.resident().shape.names());
        Some(format!(
            "{id} has lost the marks of the rows of {table:?} that job {} had matched; start the stream again",
            job.id
        ))
    }

    fn end_with(&self, state: &mut State, job: &Arc<Job>, error: Error, leftovers: &mut Vec<Leftovers>) {
        leftovers.push(self.close(job, Err(error.clone())).1);
        count_failure(&mut state.totals, &error);
        self.ended.notify_all();
    }

    /// Names the jobs that hold memory of these devices, as a part of a sentence. Empty if there is
    /// none.
    pub(super) fn device_holders(state: &State, devices: &DeviceSet) -> String {
        let mut jobs = BTreeSet::new();
        for device in devices.iter() {
            jobs.extend(state.devices[device].running.iter().map(|running| running.job.id));
        }
        let on = |job: &&Arc<Job>| {
            let built = job.feed.as_ref().and_then(|feed| feed.resident().built());
            built.is_some_and(|built| devices.iter().any(|device| device == built.device))
        };
        jobs.extend(state.live.values().filter(on).map(|job| job.id));
        match jobs.len() {
            0 => String::new(),
            1 => format!("; {} holds memory there", names(jobs)),
            _ => format!("; {} hold memory there", names(jobs)),
        }
    }
}

/// Names jobs: `job 1`, or `jobs 1, 2, ...`.
pub(super) fn names(jobs: impl IntoIterator<Item = JobId>) -> String {
    const NAMED_MAX: usize = 5;
    let jobs: Vec<String> = jobs.into_iter().map(|id| id.to_string()).collect();
    let more = if jobs.len() > NAMED_MAX { ", ..." } else { "" };
    match &jobs[..] {
        [] => "no job".into(),
        [one] => format!("job {one}"),
        several => format!("jobs {}{more}", several[..several.len().min(NAMED_MAX)].join(", ")),
    }
}
