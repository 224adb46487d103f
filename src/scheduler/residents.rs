//! Build sides that stay on a device while rows arrive for them.
//!
//! ```text
//!   job ─┐               ┌─► prepared on a device ── evicted, or the device is lost ─┐
//!   job ─┼─► Resident ───┤                                                           │
//!   job ─┘               └─◄──────────── prepared again, by the next turn ◄──────────┘
//! ```
//!
//! Jobs of one tenant that join arriving rows with one table in the same way share a resident: it
//! is prepared once, and takes device memory once. Jobs of other tenants have one of their own, so
//! that no tenant waits for another's readers. A join that marks the rows of its table is not
//! shared.
//!
//! The jobs of a resident take their turns one after the other. A turn plans with all memory of
//! the resident that is free, so two at once would run out of it. A resident whose turn does not
//! run may be evicted when another job needs the device's memory. It is freed when its last job
//! ends, or a time after that for which a job asked. If its table is dropped or replaced, it is
//! freed at the end of the last job.
//!
//! A join of two tables may take a turn, too (`kept.rs`).

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Weak};
use std::time::{Duration, SystemTime};

use arrow::datatypes::SchemaRef;
use parking_lot::Mutex;

use super::admission::Admitted;
use super::device_set::DeviceSet;
use super::feeds::is_evictable;
use super::handle::Scheduler;
use super::job::JobId;
use super::job_options::JobOptions;
use super::shapes::{FurtherJoin, Shape};
use super::state::{Leftovers, Shared, State};
use crate::catalog::Table;
use crate::device::DeviceId;
use crate::engine::Prepared;
use crate::join::Side;
use crate::planner::{JoinKind, KeyPair, Strategy};
use crate::{Error, Result};

/// Maximum number of build sides that a tenant keeps.
const KEPT_MAX: usize = 64;

/// Build side for the jobs of one join whose rows arrive.
pub(super) struct Resident {
    pub(super) number: u64,
    /// Tenant whose job made it.
    pub(super) owner: String,
    pub(super) shape: Shape,
    created: SystemTime,
    /// False if its rows are marked as they are matched. No other job may use it then.
    is_shared: bool,
    held: Mutex<Held>,
}

#[derive(Default)]
struct Held {
    built: Option<Built>,
    /// Number of jobs that use it.
    users: usize,
    /// Job whose turn waits in the queue or runs.
    turn: Option<JobId>,
    /// Jobs whose turns come next.
    next: VecDeque<JobId>,
    last_used: Duration,
    /// Time for which it is kept without jobs, as the last job that set it wants.
    keep: Duration,
    /// Time on the scheduler's clock until which it is kept, once it has no jobs.
    expires: Option<Duration>,
    /// Number of jobs that have entered so far.
    uses: u64,
    /// True if it was given up. No job may enter any more.
    is_gone: bool,
    /// True if questions that shared a pass had to be answered one by one (`shared_turns.rs`).
    sharing_failed: bool,
}

/// Prepared join, on its device.
#[derive(Clone)]
pub(super) struct Built {
    pub(super) join: Arc<dyn Prepared>,
    pub(super) device: usize,
    /// Bytes of device memory that it holds.
    pub(super) bytes: u64,
    pub(super) since: SystemTime,
}

/// Build side that is on a device, or will be again with the next stream.
#[derive(Clone, Debug)]
pub struct PreparedBuild {
    pub number: u64,
    /// Tenant whose stream made it.
    pub owner: String,
    /// Name of the table, or the names of all tables of a chain.
    pub table: String,
    pub how: JoinKind,
    /// Side whose rows arrive.
    pub streamed: Side,
    pub on: Vec<KeyPair>,
    /// Further joins of a chain.
    pub then: Vec<PreparedThen>,
    /// Columns of the result.
    pub columns: Vec<String>,
    /// Columns of the rows that arrive.
    pub arriving: SchemaRef,
    /// Maximum rows per batch of the result, if a stream has set it.
    pub batch_rows: Option<usize>,
    /// Strategy with which it is prepared, or is going to be.
    pub strategy: Strategy,
    /// False if only the stream that made it can use it.
    pub is_shared: bool,
    pub created: SystemTime,
    /// `None` if another job took its memory.
    pub device: Option<DeviceId>,
    /// Time at which it was prepared there.
    pub since: Option<SystemTime>,
    /// Device memory, in bytes.
    pub bytes: u64,
    /// Number of streams and of joins of tables that have used it so far.
    pub uses: u64,
    /// Seconds for which it is kept after its last use.
    pub keep_seconds: u64,
    /// Number of streams, and of joins of tables, that use it.
    pub streams: usize,
    /// End of the time for which it is kept; `None` while it is used.
    pub expires: Option<SystemTime>,
}

/// Further join of a [`PreparedBuild`].
#[derive(Clone, Debug)]
pub struct PreparedThen {
    pub table: String,
    pub how: JoinKind,
    pub on: Vec<KeyPair>,
}

impl fmt::Debug for Resident {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let held = self.held.lock();
        f.debug_struct("Resident").field("users", &held.users).field("turn", &held.turn).finish_non_exhaustive()
    }
}

impl Resident {
    /// True if the device memory can be given up between turns: nothing about the rows so far is
    /// kept on the device.
    pub(super) fn is_evictable(&self) -> bool {
        self.is_shared
    }

    pub(super) fn built(&self) -> Option<Built> {
        self.held.lock().built.clone()
    }

    pub(super) fn set_built(&self, built: Built) {
        self.held.lock().built = Some(built);
    }

    /// Takes the prepared join away from its device. The caller drops it without the scheduler's
    /// lock.
    pub(super) fn take_built(&self) -> Option<Built> {
        self.held.lock().built.take()
    }

    /// True if it stays after its last job.
    fn is_kept(&self) -> bool {
        !self.held.lock().keep.is_zero()
    }

    /// True if the job has the turn.
    pub(super) fn has_turn(&self, job: JobId) -> bool {
        self.held.lock().turn == Some(job)
    }

    /// Adds a job. Returns `false` if the resident is gone.
    pub(super) fn enter(&self, keep: Duration) -> bool {
        let mut held = self.held.lock();
        if !held.is_gone {
            held.users += 1;
            held.uses += 1;
            held.expires = None;
            if !keep.is_zero() {
                held.keep = keep;
            }
        }
        !held.is_gone
    }

    /// Ends the use by one job. Returns what is not kept after the last job, which the caller drops
    /// without the scheduler's lock.
    fn leave(&self, now: Duration) -> Option<Built> {
        let mut held = self.held.lock();
        held.users -= 1;
        if held.users == 0 {
            held.expires = Some(now + held.keep);
            held.is_gone = held.keep.is_zero() || held.built.is_none();
        }
        if held.is_gone { held.built.take() } else { None }
    }

    /// Gives up a resident that no job uses, if its time is over or it `must_go`.
    fn let_go(&self, now: Duration, must_go: bool) -> Option<Built> {
        let mut held = self.held.lock();
        held.is_gone |= held.users == 0 && (must_go || held.expires.is_some_and(|expires| expires <= now));
        if held.is_gone { held.built.take() } else { None }
    }

    /// Lets a resident go with its last job.
    fn keep_no_longer(&self) {
        let mut held = self.held.lock();
        (held.keep, held.expires) = (Duration::ZERO, held.expires.map(|_| Duration::ZERO));
    }

    /// Gives a job the next turn. Returns `false`, and remembers the job, if another has it.
    pub(super) fn begin_turn(&self, job: JobId, now: Duration) -> bool {
        let mut held = self.held.lock();
        held.last_used = now;
        match held.turn {
            None => {
                // It may come before others, and waits no longer.
                held.turn = Some(job);
                held.next.retain(|&waiting| waiting != job);
            }
            Some(_) if !held.next.contains(&job) => held.next.push_back(job),
            Some(_) => {}
        }
        held.turn == Some(job)
    }

    pub(super) fn note_used(&self, now: Duration) {
        self.held.lock().last_used = now;
    }

    /// Returns the time since the last turn; `None` while a job has a turn.
    pub(super) fn idle_for(&self, now: Duration) -> Option<Duration> {
        let held = self.held.lock();
        held.turn.is_none().then(|| now.saturating_sub(held.last_used))
    }

    /// Ends the turn of a job, if it has one, and its wait for another.
    pub(super) fn end_turn(&self, job: JobId) {
        let mut held = self.held.lock();
        held.next.retain(|&waiting| waiting != job);
        held.turn = held.turn.filter(|&with_turn| with_turn != job);
    }

    /// True if jobs wait for their turn.
    pub(super) fn has_next(&self) -> bool {
        !self.held.lock().next.is_empty()
    }

    /// Returns the jobs that wait for their turn, in order.
    pub(super) fn waiting(&self) -> Vec<JobId> {
        self.held.lock().next.iter().copied().collect()
    }

    /// True if questions may share a pass: no marks of rows are kept, and sharing has not failed.
    pub(super) fn shares_turns(&self) -> bool {
        self.is_evictable() && !self.held.lock().sharing_failed
    }

    pub(super) fn share_turns_no_longer(&self) {
        self.held.lock().sharing_failed = true;
    }

    /// Returns the job whose turn comes next, if no job has one.
    fn take_next(&self) -> Option<JobId> {
        let mut held = self.held.lock();
        if held.turn.is_none() { held.next.pop_front() } else { None }
    }
}

/// Use of a resident by one job.
#[derive(Debug)]
pub(super) struct ResidentUse {
    resident: Arc<Resident>,
    entered: Duration,
    has_left: Mutex<bool>,
}

impl ResidentUse {
    /// Creates the use by a job that has entered the resident.
    pub(super) fn new(resident: Arc<Resident>, entered: Duration) -> Self {
        Self { resident, entered, has_left: Mutex::new(false) }
    }

    pub(super) fn resident(&self) -> &Arc<Resident> {
        &self.resident
    }

    /// Ends the use. Returns what the last job leaves, which the caller drops without the
    /// scheduler's lock.
    pub(super) fn end(&self, job: JobId, now: Duration) -> Option<Built> {
        self.resident.end_turn(job);
        let has_left = std::mem::replace(&mut *self.has_left.lock(), true);
        if has_left { None } else { self.resident.leave(now) }
    }
}

impl Drop for ResidentUse {
    fn drop(&mut self) {
        // The job was refused.
        if !*self.has_left.get_mut() {
            self.resident.leave(self.entered);
        }
    }
}

impl Shared {
    /// Returns the resident of a join whose rows arrive: that of earlier jobs, or a new one.
    pub(super) fn resident(
        &self,
        admitted: &Admitted,
        streamed: Side,
        options: &JobOptions,
        owner: &str,
    ) -> Result<ResidentUse> {
        let keep = Duration::from_secs(options.keep_seconds.into());
        let is_shared = is_evictable(&admitted.plan().join, streamed);
        if !is_shared && !keep.is_zero() {
            return Err(Error::Unsupported(
                "\"keep_seconds\" keeps the build side for other streams, and this kind of join marks rows of its table; \
                 leave it out, or use a kind that keeps no rows of the table at the end"
                    .into(),
            ));
        }
        let shape = Shape::new(admitted, streamed, options);
        let mut state = self.state.lock();
        state.residents.retain(|resident| !resident.held.lock().is_gone);
        let is_like = |resident: &&Arc<Resident>| {
            is_shared && resident.is_shared && resident.owner == owner && resident.shape.is_like(&shape)
        };
        let like = state.residents.iter().find(is_like).cloned();
        if !keep.is_zero() && !like.as_ref().is_some_and(|resident| resident.is_kept()) {
            check_kept(&state, owner)?;
        }
        let resident = like.filter(|resident| resident.enter(keep)).unwrap_or_else(|| {
            state.last_resident += 1;
            let held = Mutex::new(Held { users: 1, uses: 1, keep, ..Held::default() });
            let (number, owner) = (state.last_resident, owner.to_owned());
            let made = Arc::new(Resident { number, owner, shape, created: SystemTime::now(), is_shared, held });
            state.residents.push(made.clone());
            made
        });
        Ok(ResidentUse::new(resident, self.clock.now()))
    }

    /// Gives up residents without jobs whose time is over, or whose table is dropped or replaced.
    pub(super) fn let_go_of_unused(&self, state: &mut State, leftovers: &mut Vec<Leftovers>) {
        let now = self.clock.now();
        for resident in &state.residents {
            let is_table = |(name, known): (&str, &Weak<Table>)| {
                let table = self.catalog.table(name);
                table.is_ok_and(|table| std::ptr::eq(Arc::as_ptr(&table), known.as_ptr()))
            };
            let must_go = !resident.shape.tables().all(is_table);
            leftovers.extend(resident.let_go(now, must_go).map(Leftovers::of_build));
        }
        state.residents.retain(|resident| !resident.held.lock().is_gone);
    }

    /// Queues the next turn of each resident that has none, and tells the jobs in the queue how
    /// many turns come before theirs.
    pub(super) fn queue_next_turns(&self, state: &mut State) {
        for resident in state.residents.clone() {
            while let Some(id) = resident.take_next() {
                // A join of tables waits in the queue, and has the turn once it starts there.
                if state.queue.contains(id) {
                    resident.begin_turn(id, self.clock.now());
                    state.queue.set_turns_ahead(id, None);
                    break;
                }
                let Some(job) = state.open.get(&id).map(|open| open.job.clone()) else { continue };
                if self.wants_a_turn(&job) && self.queue_turn(state, &job) {
                    break;
                }
            }
            for (ahead, id) in (1..).zip(resident.waiting()) {
                state.queue.set_turns_ahead(id, Some(ahead));
            }
        }
    }

    /// Takes at least `missing_bytes` of device memory away from residents, for a job that has
    /// `waited` for the given devices. Those that have been idle for longest come first. If they
    /// have too little, jobs whose residents cannot leave are ended, where they may be. The memory
    /// is free after [`free_leftovers`](Self::free_leftovers).
    pub(super) fn evict_residents(
        &self,
        state: &mut State,
        devices: &DeviceSet,
        missing_bytes: u64,
        waited: Duration,
        leftovers: &mut Vec<Leftovers>,
    ) {
        // One job at a time: what it gets may be enough for the next.
        if leftovers.iter().any(|left| left._prepared.is_some()) {
            return;
        }
        let is_on = |built: &Built| devices.iter().any(|device| device == built.device);
        let (mut victims, mut all_bytes) = (Vec::new(), 0);
        for resident in state.residents.iter().filter(|resident| resident.is_evictable()) {
            let held = resident.held.lock();
            let runs = held.turn.is_some_and(|id| !state.queue.contains(id));
            if let Some(built) = held.built.as_ref().filter(|built| !runs && is_on(built)) {
                all_bytes += built.bytes;
                victims.push((held.last_used, resident.clone()));
            }
        }
        // Without enough for the job, they would be prepared again in vain with every turn.
        let endable = if all_bytes < missing_bytes { self.endable(state, devices, waited) } else { Vec::new() };
        if all_bytes + endable.iter().map(|(bytes, _)| bytes).sum::<u64>() < missing_bytes {
            return;
        }
        victims.sort_by_key(|(last_used, _): &(Duration, _)| *last_used);
        let mut freed_bytes = 0;
        for (_, resident) in victims {
            let Some(bytes) = resident.built().map(|built| built.bytes) else { continue };
            tracing::info!("a build side leaves its device for another job, until rows arrive");
            leftovers.extend(Self::unbuild(state, &resident));
            freed_bytes += bytes;
            if freed_bytes >= missing_bytes {
                return;
            }
        }
        for (bytes, job) in endable {
            if freed_bytes >= missing_bytes {
                return;
            }
            self.end_marking(state, &job, bytes, waited, leftovers);
            freed_bytes += bytes;
        }
    }

    /// Takes the residents of lost devices away from them. They are prepared again elsewhere. Jobs
    /// of those that cannot be prepared again have no place left, and go to the queue to be failed.
    pub(super) fn leave_lost_devices(&self, state: &mut State, leftovers: &mut Vec<Leftovers>) {
        for resident in state.residents.clone() {
            if resident.built().is_none_or(|built| state.devices[built.device].lost.is_none()) {
                continue;
            }
            if resident.is_evictable() {
                leftovers.extend(Self::unbuild(state, &resident));
                continue;
            }
            // It has one job.
            let mut jobs = state.open.values().map(|open| &open.job);
            let job = jobs.find(|job| job.feed.as_ref().is_some_and(|feed| feed.uses(&resident))).cloned();
            if let Some(job) = job {
                self.queue_turn(state, &job);
            }
        }
    }

    /// Takes a build side away from its device, if it is on one. A turn that waits in the queue
    /// will prepare it.
    pub(super) fn unbuild(state: &mut State, resident: &Resident) -> Option<Leftovers> {
        let turn = resident.held.lock().turn;
        if let Some((id, feed)) = turn.and_then(|id| Some((id, state.live.get(&id)?.feed.as_ref()?))) {
            state.queue.replace_places(id, feed.places());
        }
        Self::leave_unbuilt(state, resident);
        resident.take_built().map(Leftovers::of_build)
    }
}

impl Scheduler {
    /// Returns the build sides of joins whose rows arrive, oldest first.
    pub fn prepared(&self) -> Vec<PreparedBuild> {
        let shared = &self.handle.shared;
        let (now, wall_now) = (shared.clock.now(), SystemTime::now());
        let state = shared.state.lock();
        let described = |resident: &Arc<Resident>| {
            let (shape, held) = (&resident.shape, resident.held.lock());
            if held.is_gone {
                return None;
            }
            let built = held.built.as_ref();
            let then =
                |join: &FurtherJoin| PreparedThen { table: join.name.clone(), how: join.how, on: join.on.clone() };
            Some(PreparedBuild {
                number: resident.number,
                owner: resident.owner.clone(),
                table: shape.names(),
                how: shape.how,
                streamed: shape.streamed,
                on: shape.on.clone(),
                then: shape.then.iter().map(then).collect(),
                columns: shape.schema.fields().iter().map(|field| field.name().clone()).collect(),
                arriving: shape.arriving.clone(),
                batch_rows: shape.batch_rows,
                strategy: built.map_or(shape.planned.strategy(), |built| built.join.composition().strategy()),
                is_shared: resident.is_shared,
                created: resident.created,
                device: built.map(|built| shared.engines[built.device].id()),
                since: built.map(|built| built.since),
                bytes: built.map_or(0, |built| built.bytes),
                uses: held.uses,
                keep_seconds: held.keep.as_secs(),
                streams: held.users,
                expires: held.expires.map(|expires| wall_now + expires.saturating_sub(now)),
            })
        };
        state.residents.iter().filter_map(described).collect()
    }

    /// Frees a build side that is kept, at once or with its last stream.
    ///
    /// # Errors
    /// [`Error::NotFound`] for an unknown number.
    pub fn release_prepared(&self, number: u64) -> Result<()> {
        let shared = &self.handle.shared;
        let (mut state, mut leftovers) = (shared.state.lock(), Vec::new());
        let found = state.residents.iter().find(|resident| resident.number == number);
        found.ok_or_else(|| no_prepared(number))?.keep_no_longer();
        shared.let_go_of_unused(&mut state, &mut leftovers);
        drop(state);
        shared.free_leftovers(leftovers);
        Ok(())
    }
}

/// Returns the error for a build side that does not exist. Callers get the same error for that of
/// another tenant, so that they do not learn of it.
pub fn no_prepared(number: u64) -> Error {
    Error::NotFound(format!("there is no prepared build side {number}, or it is no longer kept"))
}

/// Refuses one more build side of a tenant that keeps as many as it may.
fn check_kept(state: &State, owner: &str) -> Result<()> {
    let is_kept = |resident: &&Arc<Resident>| resident.owner == owner && resident.is_kept();
    match state.residents.iter().filter(is_kept).count() {
        KEPT_MAX.. => Err(Error::Exhausted(format!(
            "tenant {owner:?} keeps {KEPT_MAX} build sides, and may keep no more; release some with the action \
             release_prepared, or leave \"keep_seconds\" out"
        ))),
        _ => Ok(()),
    }
}
