//! Joins of a table with rows that arrive while they run.
//!
//! ```text
//!   queue ─► prepare ─► open ──── rows ────► queue ─► probe ─► open
//!                        │ └───── the end ─► queue ─► probe, finish ─► Complete
//!                        └─ evicted: the device's memory goes to another job ─► queue ─► prepare
//! ```
//!
//! The table is the build side. It stays on its device, in memory of its own, for all jobs that
//! join it in the same way (`residents.rs`). The *feed* is the other side: rows that a caller
//! adds. The job takes a slot of the device only for a *turn*, which joins the rows that have
//! arrived. Between turns the job is *open*: it waits for rows, for its reader, or for the turn of
//! another job with the same build side, and holds no slot. So a slow client never holds a device,
//! and small batches share the cost of a turn, also those of several jobs (`shared_turns.rs`).
//!
//! # Memory
//! A stream holds rows that wait for a turn, and joined rows that wait for its reader. Both are
//! charged to its tenant, and together they are at most a part of the host memory that is free. A
//! batch of any size is taken while the stream holds nothing, so every stream goes on. The sender
//! waits otherwise. A turn begins only while the result has room, and takes rows whose result is
//! predicted to fit, so it seldom waits for the reader. It waits for no host memory, because other
//! jobs with the same build side wait for it. A stream whose client reads nothing for long is ended
//! when others need its memory (`catalog/result/streams.rs`).
//!
//! Another job may need the device memory of an open job. The open job then gives it up, and
//! prepares its join again when rows arrive. A join that emits build rows at its end cannot: its
//! device knows which build rows were matched. So such a join may take only a smaller part of a
//! device's memory, and is ended if it holds that without turns while others need it
//! (`marking.rs`).
//!
//! # Loss of a device
//! A join that could give up its memory goes on elsewhere, unless rows of its present turn have
//! left already. Until a turn ends, the job keeps the rows that it joins.

use std::fmt;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant, SystemTime};

use arrow::array::RecordBatch;
use arrow::datatypes::SchemaRef;
use bytes::Bytes;
use parking_lot::Mutex;

use super::admission::Admitted;
use super::arriving::{Arrived, Rows};
use super::device_set::DeviceSet;
use super::handle::Scheduler;
use super::job::{Job, JobId, JobState, QueueForecast};
use super::job_options::JobOptions;
use super::placing::{HostNeed, Place, Waiting};
use super::residents::{Built, Resident, ResidentUse};
use super::state::{Leftovers, Shared, State, Taken};
use crate::catalog::{ArrivingRows, Charge};
use crate::columns::Role;
use crate::engine::{Engine, Grant, Prepared};
use crate::join::{Monitor, Side, TableRows};
use crate::memory::{Budget, human_bytes};
use crate::planner::{BoundJoin, KeptBuild, Plan};
use crate::{Error, Result};

/// Number of rows that a turn is planned for. A million rows keep a GPU busy for longer than it
/// takes to launch work on them.
pub(crate) const TURN_ROWS: u64 = 1 << 20;

/// Bytes of rows that may wait for a turn.
const WAITING_BYTES_MAX: u64 = 64 << 20;

/// Part of the free host memory that a stream may hold: an eighth.
const FREE_PART: u64 = 8;

/// Longest time for which a stream that holds nothing waits for host memory before it takes the
/// next batch. It is as long as a reader may take, and then fails if there is none.
const SCARCE_WAIT: Duration = Duration::from_secs(30);

/// Part of a device's memory that one join may take: a half, or a quarter if it cannot give it up
/// to others.
const EVICTABLE_PART: u64 = 2;
const KEPT_PART: u64 = 4;

/// Part of a device's memory for the chunks of a turn, in addition to the build side: a sixteenth.
const CHUNK_PART: u64 = 16;

/// Side of a join whose rows arrive, with the prepared join of the other side.
pub(super) struct Feed {
    side: Side,
    schema: SchemaRef,
    name: String,
    rows: Arc<Rows>,
    build: ResidentUse,
    /// Places at admission, for a turn that must prepare the build side.
    places: Vec<Place>,
    /// Rows of the turn that runs, and the number of batches of the result at its beginning.
    in_turn: Mutex<(Vec<Arrived>, usize)>,
    /// Plan with the build side that earlier jobs have prepared, known from the first turn on.
    /// `None`: this job has prepared it.
    on_kept: OnceLock<Option<Arc<Plan>>>,
    /// Predicted seconds and result bytes of a row.
    row_seconds: f64,
    row_bytes: f64,
}

/// Job between two turns.
#[derive(Debug)]
pub(super) struct Open {
    pub(super) job: Arc<Job>,
    /// Entry of the queue at the last turn.
    entry: Waiting,
}

/// State of a job at the end of a turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Turn {
    Open,
    Done,
}

impl fmt::Debug for Feed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Feed").field("side", &self.side).field("rows", &self.rows).finish_non_exhaustive()
    }
}

impl Feed {
    /// Creates the feed of a join. The bytes of rows that arrive are added to `charge`.
    pub(super) fn new(side: Side, plan: &Plan, places: Vec<Place>, build: ResidentUse, charge: Charge) -> Self {
        let table = plan.join.table(side);
        let rows = TURN_ROWS as f64;
        // A turn gives no rows that are kept for the end.
        let result_rows = match plan.join.how.build_rows_kept(side.other()) {
            None => plan.estimates.rows,
            Some(_) => plan.estimates.pairs,
        };
        Self {
            side,
            schema: table.schema.clone(),
            name: table.name.clone(),
            rows: Arc::new(Rows::new(charge)),
            build,
            places,
            in_turn: Mutex::default(),
            on_kept: OnceLock::new(),
            row_seconds: plan.seconds / rows,
            row_bytes: plan.row_bytes * (result_rows / rows).max(1.0),
        }
    }

    /// Puts the rows of a turn that failed back, before those that have arrived since. Returns
    /// `false` if rows of their result have left, or if the build side knows of them.
    pub(super) fn put_rows_back(&self, result_batches: usize) -> bool {
        let (rows, batches_before) = std::mem::take(&mut *self.in_turn.lock());
        if !self.build.resident().is_evictable() || batches_before != result_batches {
            return false;
        }
        self.rows.put_back(rows);
        true
    }

    /// Drops the rows that wait, and ends the use of the build side. Returns the prepared join that
    /// no other job uses. The caller must drop it without the scheduler's lock.
    pub(super) fn close(&self, job: JobId, now: Duration) -> Option<Arc<dyn Prepared>> {
        self.rows.drop_all();
        std::mem::take(&mut *self.in_turn.lock());
        self.build.end(job, now).map(|built| built.join)
    }

    pub(super) fn uses(&self, resident: &Arc<Resident>) -> bool {
        Arc::ptr_eq(self.build.resident(), resident)
    }

    /// Takes the build side away from its device. A turn that waits in the queue will prepare it.
    pub(super) fn forget_build(&self, state: &mut State, leftovers: &mut Vec<Leftovers>) {
        leftovers.extend(Shared::unbuild(state, self.build.resident()));
    }

    /// True if a turn with this place lacks the prepared join, which was evicted.
    pub(super) fn lacks_join(&self, place: &Place) -> bool {
        place.is_prepared && self.has_no_build()
    }

    pub(super) fn has_no_build(&self) -> bool {
        self.build.resident().built().is_none()
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn schema(&self) -> &SchemaRef {
        &self.schema
    }

    /// Returns the rows that have arrived.
    pub(super) fn rows(&self) -> &Arc<Rows> {
        &self.rows
    }

    /// Returns the number of rows whose result is predicted to take as many bytes.
    fn rows_giving(&self, bytes: u64) -> u64 {
        (bytes as f64 / self.row_bytes.max(1.0)) as u64
    }

    /// Returns the predicted bytes of the result of some rows.
    pub(super) fn result_bytes(&self, rows: u64) -> u64 {
        (rows as f64 * self.row_bytes) as u64
    }

    /// Returns the build side, which other jobs may use too.
    pub(super) fn resident(&self) -> &Resident {
        self.build.resident()
    }

    /// True if other jobs wait for the turn of their common build side.
    pub(super) fn keeps_others_waiting(&self) -> bool {
        self.build.resident().has_next()
    }

    /// Returns the plan with the build side that earlier jobs have prepared. `None` if this job has
    /// prepared it, or will.
    pub(super) fn plan_on_kept(&self) -> Option<Arc<Plan>> {
        self.on_kept.get().cloned().flatten()
    }

    /// Returns the places of a turn that must prepare the build side.
    pub(super) fn places(&self) -> &[Place] {
        &self.places
    }
}

/// True if nothing about the rows so far is kept on the device.
pub(super) fn is_evictable(join: &BoundJoin, streamed: Side) -> bool {
    join.how.build_rows_kept(streamed.other()).is_none() && !join.how.keeps_unmatched(streamed.other())
}

/// Adjusts the places of a join whose rows of one side arrive: it has a part of its device's
/// memory, and runs in parallel with other jobs.
///
/// # Errors
/// [`Error::Exhausted`] for a join that takes too much of every device, and
/// [`Error::Unsupported`] for a gang.
pub(super) fn place_feed(
    admitted: &mut Admitted,
    streamed: Side,
    options: &JobOptions,
    engines: &[Arc<dyn Engine>],
) -> Result<()> {
    if options.distribution.is_some() || admitted.places.iter().all(|place| place.devices.len() > 1) {
        return Err(Error::Unsupported(
            "a join whose rows arrive in the call runs on one device; leave \"devices\" and \"distribution\" out, or \
             name one device"
                .into(),
        ));
    }
    let evictable = is_evictable(&admitted.plan().join, streamed);
    let part = if evictable { EVICTABLE_PART } else { KEPT_PART };
    let mut nearest: Option<(u64, u64)> = None;
    let plans = &admitted.plans;
    admitted.places.retain_mut(|place| {
        let (memory, limit) = (plans[place.plan].memory, engines[place.devices.leader()].memory().limit_bytes());
        if place.devices.len() > 1 || memory.minimum_bytes > limit / part {
            nearest = nearest.or(Some((memory.minimum_bytes, limit)));
            return false;
        }
        // A turn with more rows takes several chunks.
        let enough = (memory.resident_bytes + limit / CHUNK_PART).max(2 * memory.minimum_bytes);
        place.shared_bytes = Some(memory.whole_bytes.min(enough).min(limit / part));
        place.host.takes_less = true;
        true
    });
    match nearest {
        Some((need, limit)) if admitted.places.is_empty() => Err(Error::Exhausted(format!(
            "the build side takes {} of device memory as long as rows arrive, and such a join may take {} of {}; stream \
             the larger side, ask for fewer columns, or raise the server's --device-memory",
            human_bytes(need),
            human_bytes(limit / part),
            human_bytes(limit),
        ))),
        _ => Ok(()),
    }
}

impl Scheduler {
    /// Returns the bytes of device memory that the build side of a join may take while rows arrive
    /// for it, on the device with the most memory.
    pub fn build_bytes_max(&self) -> u64 {
        let engines = self.handle.shared.engines.iter();
        engines.map(|engine| engine.memory().limit_bytes() / EVICTABLE_PART).max().unwrap_or(0)
    }

    /// Adds rows to a join whose rows arrive ([`JobOptions::streamed`]). Waits until there is room
    /// for the next batch, or until the job has ended. A `note` comes back in the result after the
    /// rows of this batch and of those before it.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a batch with other columns. [`Error::Internal`] for another job.
    pub async fn feed(&self, job: &Arc<Job>, batch: RecordBatch, note: Option<Bytes>) -> Result<()> {
        let feed = feed_of(job)?;
        if batch.schema_ref().fields() != feed.schema.fields() {
            return Err(Error::Invalid(format!(
                "a batch of the stream has other columns than its schema message: {:?} instead of {:?}",
                batch.schema_ref().fields(),
                feed.schema.fields()
            )));
        }
        if batch.num_rows() == 0 && note.is_none() {
            return Ok(());
        }
        let arrived = Arrived { batch, note };
        let last_bytes = arrived.bytes() as u64;
        feed.rows.push(arrived);
        self.resume(job);
        tokio::select! {
            () = self.handle.shared.wait_for_room(job, feed, last_bytes) => {}
            () = job.ended() => {}
        }
        Ok(())
    }

    /// Ends the rows of a join whose rows arrive. The job completes once all are joined.
    ///
    /// # Errors
    /// [`Error::Internal`] for another job.
    pub fn end_rows(&self, job: &Arc<Job>) -> Result<()> {
        feed_of(job)?.rows.end();
        self.resume(job);
        Ok(())
    }

    /// Gives a join whose rows arrive a turn, if it has rows to join and its result has room. The
    /// reader of the result calls this when it has taken rows.
    pub fn resume(&self, job: &Arc<Job>) {
        let shared = &self.handle.shared;
        if let Some(feed) = &job.feed {
            feed.rows.may_have_room.notify_waiters();
        }
        if !shared.may_take_a_turn(job) {
            return;
        }
        let (mut state, mut leftovers) = (shared.state.lock(), Vec::new());
        if shared.queue_turn(&mut state, job) {
            shared.dispatch(&mut state, &mut leftovers);
        }
        drop(state);
        shared.free_leftovers(leftovers);
    }

    /// Fails a job for a reason that its caller has met.
    pub fn fail(&self, job: &Arc<Job>, reason: Error) {
        self.handle.shared.stop(job, reason);
    }
}

fn feed_of(job: &Job) -> Result<&Feed> {
    job.feed.as_ref().ok_or_else(|| Error::Internal(format!("no rows arrive for job {}", job.id)))
}

impl Shared {
    /// Returns the most bytes that a stream of the tenant should hold now, of rows that wait to be
    /// joined and of joined rows that wait to be read: an eighth of what is free of host memory,
    /// and of what the tenant may still add. So streams that are not read always leave room for
    /// others, however many they are (dynamic thresholds, Choudhury and Hahne 1998). Streams that
    /// are left unread for long count as free, because they can be ended.
    fn stream_window_bytes(&self, owner: &str) -> u64 {
        self.window_of(self.host_budget().free_bytes(), self.catalog.room_with_evictable(owner))
    }

    fn window_of(&self, free: u64, room: Option<u64>) -> u64 {
        self.options.window_bytes.min(free.min(room.unwrap_or(u64::MAX)) / FREE_PART)
    }

    /// True if a stream of the tenant may hold that number of bytes now.
    fn may_hold(&self, owner: &str, bytes: u64) -> bool {
        // Mostly there is room without what others would give back, which takes longer to find.
        bytes <= self.window_of(self.host_budget().unused_bytes(), self.catalog.room_of(owner))
            || bytes <= self.stream_window_bytes(owner)
    }

    /// Waits until a stream may hold another batch, which is expected to have as many bytes as the
    /// last one. A stream that holds nothing waits only for host memory, and for a limited time.
    async fn wait_for_room(&self, job: &Job, feed: &Feed, last_bytes: u64) {
        let began = Instant::now();
        loop {
            // The next tick wakes it, if nothing else does.
            let may_have_room = feed.rows.may_have_room.notified();
            let (waiting, held) = (feed.rows.waiting_bytes(), feed.rows.bytes() + job.result.held_bytes());
            let has_room = match held {
                0 => {
                    let budget = self.host_budget();
                    let is_enough = |free: u64| free >= last_bytes;
                    is_enough(budget.unused_bytes()) || is_enough(budget.free_bytes()) || began.elapsed() >= SCARCE_WAIT
                }
                _ => waiting < WAITING_BYTES_MAX && self.may_hold(&job.owner, held + last_bytes),
            };
            if has_room {
                return;
            }
            may_have_room.await;
        }
    }

    /// True if a stream has work for a turn, and its result has room. Without room it waits for its
    /// reader, and for nothing that others wait for.
    pub(super) fn may_take_a_turn(&self, job: &Job) -> bool {
        let has_room = || match job.result.held_bytes() {
            0 => true,
            unread => self.may_hold(&job.owner, 2 * unread),
        };
        job.feed.as_ref().is_some_and(|feed| feed.rows.has_work()) && has_room()
    }

    /// Returns the most rows that the next turn of a stream should take: those whose result fits
    /// into half of what the stream may hold.
    fn turn_rows_max(&self, job: &Job, feed: &Feed) -> u64 {
        let all = feed.rows.next_rows(u64::MAX);
        if self.may_hold(&job.owner, 2 * feed.result_bytes(all)) {
            return all;
        }
        feed.rows_giving(self.stream_window_bytes(&job.owner) / 2)
    }

    /// True if a turn of an open job has work to do. The first turn prepares the build side.
    pub(super) fn wants_a_turn(&self, job: &Job) -> bool {
        job.life.lock().state == JobState::Queued || self.may_take_a_turn(job)
    }

    /// Adds a new job, and gives it its first turn.
    pub(super) fn open_new(&self, state: &mut State, job: &Arc<Job>, entry: Waiting) {
        let (position, start) = (0, SystemTime::now());
        let waiting_for = "the turn of another join with the same build side".into();
        job.life.lock().forecast = Some(QueueForecast { position, start, waiting_for });
        state.open.insert(job.id, Open { job: job.clone(), entry });
        self.queue_turn(state, job);
    }

    /// Puts an open job in the queue. Returns `false` if it is not open, or if another job has the
    /// turn of its build side. It gets its turn later then.
    pub(super) fn queue_turn(&self, state: &mut State, job: &Arc<Job>) -> bool {
        let Some(feed) = job.feed.as_ref().filter(|_| state.open.contains_key(&job.id)) else { return false };
        let now = self.clock.now();
        if !feed.build.resident().begin_turn(job.id, now) {
            return false;
        }
        let Some(Open { entry, .. }) = state.open.remove(&job.id) else { return false };
        let rows = feed.rows.next_rows(self.turn_rows_max(job, feed));
        let bytes = feed.result_bytes(rows).min(self.window_bytes());
        let host = HostNeed { bytes, least_bytes: 0, takes_less: true };
        // The prepared join has its memory.
        let places = match feed.build.resident().built() {
            None => feed.places().iter().map(|place| Place { host, ..place.clone() }).collect(),
            Some(built) => vec![Place {
                devices: DeviceSet::new([built.device]),
                plan: job.life.lock().plan_number(),
                seconds: rows as f64 * feed.row_seconds,
                memory_bytes: 0,
                shared_bytes: Some(0),
                is_prepared: true,
                host,
            }],
        };
        state.queue.push(Waiting { places, submitted: now, starved_since: None, unsatisfiable_since: None, ..entry });
        true
    }

    /// Gives a job its turn: prepares its join if that was not done, and joins the rows that have
    /// arrived.
    pub(super) fn take_turn(
        &self,
        feed: &Feed,
        work: &Plan,
        device: usize,
        grant: &Grant,
        job: &Job,
        monitor: &Monitor,
    ) -> Result<Turn> {
        job.result.begin_turn();
        *feed.in_turn.lock() = (Vec::new(), job.result.progress().0);
        let built = feed.build.resident().built();
        feed.on_kept.get_or_init(|| {
            let kept = KeptBuild::new(feed.build.resident().number, built.as_ref()?.since);
            // This plan has no rows, and so may outlive the job's work.
            Some(Arc::new(Plan::clone(&job.life.lock().planned()).on_kept_build(kept)))
        });
        let prepared = match built {
            Some(built) => built.join,
            None => {
                let build = work.join.table(feed.side.other()).clone();
                let task = work.task()?.with_unknown_rows(Role::Probe);
                let bytes = grant.device_memory.as_ref().map_or(0, Budget::limit_bytes);
                if bytes == 0 {
                    let why = "the build side left its device before the turn began; try again";
                    return Err(Error::Unavailable(why.into()));
                }
                let engine = &self.engines[device];
                let join: Arc<dyn Prepared> = engine.prepare(task, &TableRows::new(build), grant, monitor)?.into();
                feed.build.resident().set_built(Built { join: join.clone(), device, bytes, since: SystemTime::now() });
                join
            }
        };
        let (arrived, has_ended) = feed.rows.take(self.turn_rows_max(job, feed));
        feed.in_turn.lock().0.clone_from(&arrived);
        if !self.answer_together(feed, job, &arrived, &*prepared, monitor)? {
            Self::answer_one_by_one(feed, job, &arrived, &*prepared, monitor)?;
        }
        feed.rows.joined(&arrived);
        *feed.in_turn.lock() = (Vec::new(), job.result.progress().0);
        if !has_ended {
            return Ok(Turn::Open);
        }
        prepared.finish(&job.host_memory, &job.result, monitor)?;
        Ok(Turn::Done)
    }

    /// Takes a job off its device until its next turn. A job that was stopped meanwhile ends.
    pub(super) fn leave_open(&self, taken: &Taken) {
        let job = &taken.job;
        let mut state = self.state.lock();
        // Jobs are stopped under the scheduler's lock.
        if let Err(reason) = job.check_stop() {
            drop(state);
            return self.conclude(job, Err(reason), |state| self.release_devices(state, taken));
        }
        self.release_devices(&mut state, taken);
        state.open.insert(job.id, Open { job: job.clone(), entry: taken.entry.clone() });
        if let Some(feed) = &job.feed {
            feed.build.resident().end_turn(job.id);
            feed.build.resident().note_used(self.clock.now());
        }
        self.queue_next_turns(&mut state);
        if self.may_take_a_turn(job) {
            self.queue_turn(&mut state, job);
        }
        self.give_turns(state);
    }

    /// Takes a job that has no turn out of the scheduler's state. Returns `false` for a job that
    /// has one, or has no feed.
    pub(super) fn take_out_open(state: &mut State, job: &Job) -> bool {
        job.feed.is_some() && (state.open.remove(&job.id).is_some() || state.queue.remove(job.id).is_some())
    }
}
