//! Dispatch: the worker threads, and everything that can happen to a job between submission and release.

use std::collections::{BTreeMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime};

use arrow::array::RecordBatch;
use parking_lot::{Condvar, Mutex, MutexGuard};

use super::admission::{Admitted, Terms, admit};
use super::clock::{Clock, SystemClock};
use super::executor::{Executor, Grant};
use super::job::{Job, JobId, JobState, QueueTurn};
use super::placing::{HostMemory, Load, Seated, Turn, Wait};
use super::queue::{Queue, Waiting};
use super::stats::{DeviceStats, SchedulerStats};
use crate::catalog::{Catalog, NameReservation, ResultSpool, SpoolOptions};
use crate::device::{CancelFlag, Device};
use crate::join::{BatchSink, Monitor};
use crate::memory::{Budget, ReservedPool, human_bytes};
use crate::planner::{Explanation, JoinSpec, Plan, Rates, calibrate};
use crate::{Context, Error, Result};

/// How a scheduler behaves.
#[derive(Clone, Debug)]
pub struct SchedulerOptions {
    /// Jobs that may wait; more are refused.
    pub queue_limit: usize,
    /// Jobs that one tenant may have waiting or running; 0 for no limit.
    pub tenant_jobs: usize,
    /// Short jobs that a device runs at a time, at the most; long ones have it alone.
    pub jobs_per_device: usize,
    /// How long a job may wait for nothing but host memory before it fails.
    pub memory_wait: Duration,
    /// How long a result is kept, unless the join says otherwise.
    pub retain: Duration,
    /// Bytes that a result which is consumed as it is read may pile up before the join waits for its reader.
    pub window_bytes: u64,
    /// Jobs that are remembered after their result was released.
    pub history: usize,
    /// Whether a thread keeps deadlines and leases; tests call [`Scheduler::tick`] instead.
    pub timer: bool,
}

impl Default for SchedulerOptions {
    fn default() -> Self {
        Self {
            queue_limit: 1000,
            tenant_jobs: 0,
            jobs_per_device: 4,
            memory_wait: Duration::from_secs(300),
            retain: Duration::from_secs(300),
            window_bytes: 256 << 20,
            history: 1000,
            timer: true,
        }
    }
}

/// Who submits a join, and on what terms.
#[derive(Clone, Debug, Default)]
pub struct Submission {
    /// The tenant's name; empty for anonymous.
    pub owner: String,
    /// How long the caller waits for the result at most; the job fails then.
    pub timeout: Option<Duration>,
}

/// Runs jobs on devices. Clones share the queue; when the last one is dropped, jobs are cancelled and threads end.
#[derive(Clone, Debug)]
pub struct Scheduler {
    handle: Arc<Handle>,
}

#[derive(Debug)]
struct Handle {
    shared: Arc<Shared>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

#[derive(Debug)]
struct Shared {
    catalog: Catalog,
    executors: Vec<Executor>,
    options: SchedulerOptions,
    clock: Arc<dyn Clock>,
    state: Mutex<State>,
    /// Wakes the worker of each device.
    work: Vec<Condvar>,
    /// Told whenever a job ends.
    ended: Condvar,
    /// Wakes the timer.
    timer: Condvar,
}

#[derive(Debug)]
struct State {
    queue: Queue,
    slots: Vec<Slot>,
    /// Jobs that wait, run, or have a result that is not released.
    live: BTreeMap<JobId, Arc<Job>>,
    /// Jobs that are over, oldest first.
    history: VecDeque<Arc<Job>>,
    last_id: u64,
    draining: bool,
    shutdown: bool,
    totals: SchedulerStats,
}

/// How long a job waits for host memory that nobody is known to give back: a client may still be reading what was dropped.
const HOPELESS_WAIT: Duration = Duration::from_secs(5);

/// What a device does.
#[derive(Debug, Default)]
struct Slot {
    running: Vec<Running>,
    lost: Option<Error>,
    jobs_total: u64,
    busy_seconds_total: f64,
    /// Until when the time of its jobs is counted, by the scheduler's clock.
    counted: Duration,
}

impl Slot {
    /// Counts the time until now: jobs that run side by side share it equally.
    fn count_time(&mut self, now: Duration) {
        let seconds = now.saturating_sub(self.counted).as_secs_f64();
        self.counted = now;
        let jobs = self.running.len();
        if jobs > 0 {
            self.busy_seconds_total += seconds;
            self.running.iter_mut().for_each(|running| running.device_seconds += seconds / jobs as f64);
        }
    }
}

/// What a job that is over held: tables that may have been dropped meanwhile, and a name that was kept for its result. Freeing
/// them may take long, so it is done without the scheduler's lock.
#[derive(Debug)]
#[must_use = "it is dropped without the scheduler's lock"]
struct Leftovers {
    _plans: BTreeMap<usize, Arc<Plan>>,
    _into: Option<NameReservation>,
}

#[derive(Debug)]
struct Running {
    job: Arc<Job>,
    entry: Waiting,
    started: Duration,
    predicted_seconds: f64,
    /// What it has had of the device's time.
    device_seconds: f64,
    /// Whether it has the device alone.
    alone: bool,
    /// `None` once a worker has taken it.
    grant: Option<Grant>,
}

/// A job on its way through a worker's hands.
#[derive(Debug)]
struct Taken {
    device: usize,
    job: Arc<Job>,
    entry: Waiting,
    predicted_seconds: f64,
}

impl Scheduler {
    /// A scheduler with default options over those devices, whose rates it measures first.
    pub fn new(catalog: Catalog, devices: Vec<Arc<dyn Device>>) -> Self {
        let measured = |device: Arc<dyn Device>| {
            let rates = calibrate(&*device);
            (device, rates)
        };
        Self::start(catalog, devices.into_iter().map(measured).collect(), SchedulerOptions::default())
    }

    /// A scheduler over devices of those rates.
    pub fn start(catalog: Catalog, devices: Vec<(Arc<dyn Device>, Rates)>, options: SchedulerOptions) -> Self {
        let arena = catalog.arena().clone();
        let executors =
            devices.into_iter().map(|(device, rates)| Executor::new(device, rates, arena.clone())).collect();
        Self::over(catalog, executors, options, Arc::new(SystemClock::default()))
    }

    /// A scheduler over executors, with a clock of the caller's.
    pub fn over(catalog: Catalog, executors: Vec<Executor>, options: SchedulerOptions, clock: Arc<dyn Clock>) -> Self {
        let state = State {
            queue: Queue::default(),
            slots: executors.iter().map(|_| Slot::default()).collect(),
            live: BTreeMap::new(),
            history: VecDeque::new(),
            last_id: 0,
            draining: false,
            shutdown: false,
            totals: SchedulerStats::default(),
        };
        let work = executors.iter().map(|_| Condvar::new()).collect();
        let has_timer = options.timer;
        let shared = Arc::new(Shared {
            catalog,
            executors,
            options,
            clock,
            state: Mutex::new(state),
            work,
            ended: Condvar::new(),
            timer: Condvar::new(),
        });
        let spawn = |name: String, body: Box<dyn FnOnce() + Send>| {
            std::thread::Builder::new().name(name).spawn(body).expect("the system gives a thread")
        };
        let mut threads: Vec<JoinHandle<()>> = Vec::new();
        for (device, executor) in shared.executors.iter().enumerate() {
            for _ in 0..shared.seats(executor) {
                let worker = shared.clone();
                threads.push(spawn(executor.id.to_string(), Box::new(move || worker.work(device))));
            }
        }
        if has_timer {
            let timer = shared.clone();
            threads.push(spawn("scheduler".into(), Box::new(move || timer.keep_time())));
        }
        Self { handle: Arc::new(Handle { shared, threads: Mutex::new(threads) }) }
    }

    fn shared(&self) -> &Shared {
        &self.handle.shared
    }

    /// Binds, plans and queues a join.
    ///
    /// # Errors
    /// As [`Scheduler::submit_with`].
    pub fn submit(&self, spec: JoinSpec, owner: &str) -> Result<Arc<Job>> {
        self.submit_with(spec, Submission { owner: owner.into(), timeout: None })
    }

    /// Binds, plans and queues a join on terms.
    ///
    /// # Errors
    /// What is wrong with the request; [`Error::Exhausted`] when it cannot fit, the queue is full, or the tenant has as many
    /// jobs as it may; [`Error::Unavailable`] when the server drains or has no device for it.
    pub fn submit_with(&self, spec: JoinSpec, terms: Submission) -> Result<Arc<Job>> {
        let submitted = self.shared().submit(spec, terms);
        if submitted.is_err() {
            self.shared().state.lock().totals.refused_total += 1;
        }
        submitted
    }

    /// Says what would run, and why, without running it.
    ///
    /// # Errors
    /// What is wrong with the request, as when it is submitted.
    pub fn explain(&self, spec: JoinSpec) -> Result<Explanation> {
        let shared = self.shared();
        let admitted = shared.admit(spec)?;
        let (plan, devices) = (admitted.plan(), admitted.plans.len());
        let reason = match devices {
            1 => "the only device that may run it".to_string(),
            _ => format!("predicted to run it fastest, of {devices}; when it is submitted, queues count as well"),
        };
        Ok(Explanation::new(plan, &plan.target.name, reason, None))
    }

    /// The job of that number, as long as it is remembered.
    ///
    /// # Errors
    /// [`Error::NotFound`].
    pub fn job(&self, id: JobId) -> Result<Arc<Job>> {
        let state = self.shared().state.lock();
        let remembered = || state.history.iter().rev().find(|job| job.id == id);
        let found = state.live.get(&id).or_else(remembered).cloned();
        found.ok_or_else(|| Error::NotFound(format!("there is no job {id}, or it was forgotten")))
    }

    /// All jobs that wait, run, or have a result that is not released yet, oldest first.
    pub fn jobs(&self) -> Vec<Arc<Job>> {
        self.shared().state.lock().live.values().cloned().collect()
    }

    /// The jobs that are over and still remembered, oldest first.
    pub fn history(&self) -> Vec<Arc<Job>> {
        self.shared().state.lock().history.iter().cloned().collect()
    }

    /// Stops a job, and releases its result. A job that is over already stays as it is.
    ///
    /// # Errors
    /// [`Error::NotFound`].
    pub fn cancel(&self, id: JobId) -> Result<()> {
        let job = self.job(id)?;
        self.shared().stop(&job, Error::Cancelled(format!("job {id} was cancelled")));
        Ok(())
    }

    /// Sets a tenant's share of device time relative to others'; it is 1 where nothing is set.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a weight that is not above 0.
    pub fn set_weight(&self, tenant: &str, weight: f64) -> Result<()> {
        if !(weight.is_finite() && weight > 0.0) {
            return Err(Error::Invalid(format!("the weight of tenant {tenant:?} is {weight}; it is a number above 0")));
        }
        self.shared().state.lock().queue.set_weight(tenant, weight);
        Ok(())
    }

    /// Refuses new jobs from now on; those that were admitted run on.
    pub fn drain(&self) {
        self.shared().state.lock().draining = true;
    }

    /// Waits until no job waits or runs. `false` when that takes longer than `limit`. Blocks its thread.
    pub fn wait_idle(&self, limit: Duration) -> bool {
        let end = Instant::now() + limit;
        let shared = self.shared();
        let mut state = shared.state.lock();
        loop {
            if state.queue.len() == 0 && state.slots.iter().all(|slot| slot.running.is_empty()) {
                return true;
            }
            if shared.ended.wait_until(&mut state, end).timed_out() {
                return false;
            }
        }
    }

    /// Cancels every job that waits or runs, and says why.
    pub fn abort_all(&self, reason: &str) {
        for job in self.jobs() {
            if !job.life.lock().state.is_final() {
                self.shared().stop(&job, Error::Cancelled(format!("job {}: {reason}", job.id)));
            }
        }
    }

    /// Keeps time: fails what is past its deadline, releases results whose lease ended, and starts what can start. The
    /// scheduler does so by itself unless [`SchedulerOptions::timer`] is off.
    pub fn tick(&self, now: SystemTime) {
        self.shared().tick(now);
    }

    /// Everything in numbers.
    pub fn stats(&self) -> SchedulerStats {
        let shared = self.shared();
        let now = shared.clock.now();
        let mut state = shared.state.lock();
        state.slots.iter_mut().for_each(|slot| slot.count_time(now));
        let running = state.slots.iter().map(|slot| slot.running.len()).sum();
        let devices = shared.executors.iter().zip(&state.slots).map(|(executor, slot)| DeviceStats {
            id: executor.id,
            lost: slot.lost.as_ref().map(|error| error.message().into()),
            running: slot.running.len(),
            jobs_total: slot.jobs_total,
            busy_seconds_total: slot.busy_seconds_total,
        });
        SchedulerStats {
            queued: state.queue.len(),
            running,
            retained: state.live.len() - state.queue.len() - running,
            devices: devices.collect(),
            ..state.totals.clone()
        }
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        let mut state = self.shared.state.lock();
        state.draining = true;
        state.shutdown = true;
        let jobs: Vec<Arc<Job>> = state.live.values().cloned().collect();
        drop(state);
        for job in jobs {
            if !job.life.lock().state.is_final() {
                self.shared.stop(&job, Error::Cancelled("the server is shutting down".into()));
            }
        }
        self.shared.work.iter().for_each(|wake| {
            wake.notify_all();
        });
        self.shared.timer.notify_all();
        let this = std::thread::current().id();
        for thread in self.threads.lock().drain(..) {
            // The last clone may be dropped by a worker; it ends by itself.
            if thread.thread().id() != this && thread.join().is_err() {
                tracing::error!("a thread of the scheduler panicked");
            }
        }
    }
}

impl Shared {
    fn admit(&self, spec: JoinSpec) -> Result<Admitted> {
        let lost: Vec<bool> = self.state.lock().slots.iter().map(|slot| slot.lost.is_some()).collect();
        let terms = Terms { jobs_per_device: self.options.jobs_per_device, window_bytes: self.window_bytes() };
        admit(spec, &self.catalog, &self.executors, terms, |device| !lost[device])
    }

    /// Jobs that a device runs at a time, at the most.
    fn seats(&self, executor: &Executor) -> usize {
        executor.jobs_max.min(self.options.jobs_per_device).max(1)
    }

    /// The memory that tables and results live in.
    fn host_budget(&self) -> &Budget {
        self.catalog.arena().budget()
    }

    /// What a result that is consumed as it is read may pile up: the option, or an eighth of host memory if that is less, so
    /// that several such results and the tables they come from fit side by side.
    fn window_bytes(&self) -> u64 {
        self.options.window_bytes.min(self.host_budget().limit_bytes() / 8)
    }

    fn submit(&self, spec: JoinSpec, terms: Submission) -> Result<Arc<Job>> {
        let Submission { owner, timeout } = terms;
        self.check_room(&self.state.lock(), &owner)?;
        // Planning takes its time, and is done without the lock.
        let admitted = self.admit(spec)?;
        let plan = admitted.plan();
        let (places, host_bytes) = (admitted.places.clone(), admitted.host_bytes);
        let mut state = self.state.lock();
        self.check_room(&state, &owner)?;
        let id = JobId(state.last_id + 1);
        let spec = &plan.join.spec;
        let name =
            spec.into.as_ref().map(|into| self.catalog.reserve(into, &owner, &format!("the result of job {id}")));
        let name = name.transpose()?;
        state.last_id = id.0;
        let cancel = CancelFlag::new();
        // What becomes a table is kept; the table holds the same memory anyway.
        let retain = match spec.retain_seconds {
            Some(0) if name.is_some() => self.options.retain,
            Some(seconds) => Duration::from_secs(seconds.into()),
            None => self.options.retain,
        };
        let interrupt = cancel.clone();
        let host_memory = ReservedPool::new(self.host_budget().clone());
        let options = SpoolOptions {
            retain,
            bytes_max: if retain.is_zero() { self.window_bytes() } else { u64::MAX },
            arena: Some(self.catalog.arena().drawing_on(host_memory.clone())),
            charge: Some(self.catalog.charge(&owner)),
            interrupt: Some(Arc::new(move || interrupt.check())),
            ..SpoolOptions::default()
        };
        let result = ResultSpool::with_options(plan.join.schema.clone(), options);
        let (now, priority) = (self.clock.now(), spec.priority);
        let deadline = timeout.map(|timeout| now.saturating_add(timeout));
        let job = Arc::new(Job::new(id, owner.clone(), admitted, result, host_memory, cancel, name, deadline));
        state.live.insert(id, job.clone());
        state.totals.submitted_total += 1;
        state.queue.push(Waiting {
            id,
            tenant: owner,
            priority,
            submitted: now,
            places,
            host_bytes,
            short_since: None,
            hopeless_since: None,
        });
        tracing::info!(job = id.0, strategy = %job.plan.strategy, predicted_seconds = job.plan.seconds, "queued");
        let mut leftovers = Vec::new();
        self.dispatch(&mut state, &mut leftovers);
        if deadline.is_some() {
            self.timer.notify_all();
        }
        drop(state);
        drop(leftovers);
        Ok(job)
    }

    fn check_room(&self, state: &State, owner: &str) -> Result<()> {
        if state.draining {
            return Err(Error::Unavailable("the server is shutting down and takes no new jobs; try another".into()));
        }
        if state.queue.len() >= self.options.queue_limit {
            return Err(Error::Exhausted(format!(
                "{} jobs wait already, and the queue takes no more; try again later, or raise --queue-limit",
                state.queue.len()
            )));
        }
        let active = state.queue.active(owner);
        if self.options.tenant_jobs > 0 && active >= self.options.tenant_jobs {
            return Err(Error::Exhausted(format!(
                "tenant {owner:?} has {active} jobs waiting or running, and may have no more; wait for one to end, or raise \
                 --tenant-jobs"
            )));
        }
        Ok(())
    }

    /// Starts what can start, and tells everybody else when it is their turn. Those that fail for want of memory leave
    /// something for the caller to drop without the lock.
    fn dispatch(&self, state: &mut State, leftovers: &mut Vec<Leftovers>) {
        // Whoever fails may have kept others waiting.
        while self.take_turns(state, leftovers) {}
    }

    /// Answers whether a job that waited has failed.
    fn take_turns(&self, state: &mut State, leftovers: &mut Vec<Leftovers>) -> bool {
        let now = self.clock.now();
        let loads = self.loads(state, now);
        let host = self.host_memory(state, now);
        let turns = state.queue.turns(now, &loads, host);
        let (mut position, mut failed) = (0, false);
        for turn in turns {
            let job = state.live[&turn.id].clone();
            let device = self.executors[turn.place.device].id;
            let waiting_for = match turn.wait {
                None if state.shutdown => "the server is shutting down".into(),
                None => match self.start(state, &job, &turn, now) {
                    Ok(()) => continue,
                    // Somebody took the memory a moment ago.
                    Err(error) => error.message().to_string(),
                },
                Some(Wait::Device) => device.to_string(),
                Some(Wait::DeviceMemory { needed_bytes, free_bytes }) => {
                    let (needed, free) = (human_bytes(needed_bytes), human_bytes(free_bytes));
                    format!("{needed} of the memory of {device}, of which {free} are free")
                }
                Some(Wait::HostMemory { needed_bytes, free_bytes, comes_back }) => {
                    let Some(short) = state.queue.note_short(turn.id, now, comes_back) else { continue };
                    let (needed, free) = (human_bytes(needed_bytes), human_bytes(free_bytes));
                    if short.waited >= self.options.memory_wait || short.hopeless >= HOPELESS_WAIT {
                        let error = self.out_of_host_memory(&job, &needed, &free, short.waited);
                        state.queue.remove(job.id);
                        leftovers.push(self.close(&job, Err(error.clone())).1);
                        count_failure(&mut state.totals, &error);
                        self.ended.notify_all();
                        failed = true;
                        continue;
                    }
                    format!("{needed} of host memory for its result, of which {free} are free")
                }
            };
            let start = SystemTime::now() + turn.start.saturating_sub(now);
            job.life.lock().turn = Some(QueueTurn { position, start, waiting_for });
            position += 1;
        }
        failed
    }

    fn out_of_host_memory(&self, job: &Job, needed: &str, free: &str, waited: Duration) -> Error {
        Error::Exhausted(format!(
            "job {} waited {:.0} s for {needed} of host memory for its result, and {free} of {} are free; drop tables, let go \
             of results that are no longer needed, ask for fewer columns, raise --host-memory, or fetch the result as it is \
             made with retain_seconds 0",
            job.id,
            waited.as_secs_f64(),
            human_bytes(self.host_budget().limit_bytes()),
        ))
    }

    fn loads(&self, state: &mut State, now: Duration) -> Vec<Load> {
        let seated = |running: &Running, beside: usize| {
            let left = running.predicted_seconds - running.device_seconds;
            // A job that is late is expected to stay a tenth of the time that it has been there.
            let late = 0.1 * now.saturating_sub(running.started).as_secs_f64();
            let ahead = if left > 0.0 { left * beside as f64 } else { late };
            let ahead = Duration::try_from_secs_f64(ahead).unwrap_or(Duration::MAX);
            Seated { until: now.saturating_add(ahead), alone: running.alone }
        };
        let load = |(slot, executor): (&mut Slot, &Executor)| {
            slot.count_time(now);
            match &slot.lost {
                Some(_) => Load::Lost,
                None => Load::InService {
                    seats: self.seats(executor),
                    free_bytes: executor.memory.free_bytes(),
                    running: slot.running.iter().map(|running| seated(running, slot.running.len())).collect(),
                },
            }
        };
        state.slots.iter_mut().zip(&self.executors).map(load).collect()
    }

    /// What is free, and, when somebody may have to wait for more, what comes back by itself: results whose lease ends, and
    /// what jobs that run have reserved. Tables do not.
    fn host_memory(&self, state: &State, now: Duration) -> HostMemory {
        let free_bytes = self.host_budget().free_bytes();
        if state.queue.host_bytes() <= free_bytes {
            return HostMemory { free_bytes, returns: Vec::new() };
        }
        let wall_now = SystemTime::now();
        let returns = state.live.values().filter_map(|job| {
            let is_queued = job.life.lock().state == JobState::Queued;
            let becomes_table = job.plan.join.spec.into.is_some();
            let held = if becomes_table { 0 } else { job.result.held_bytes() };
            let bytes = held.saturating_add(job.host_memory.free_bytes());
            // A job that runs is given a lease at its end, which is soon beside a lease.
            let lease = match job.result.expires() {
                Some(expires) => expires.duration_since(wall_now).unwrap_or_default(),
                None => job.result.retained_for(),
            };
            (!is_queued && bytes > 0).then(|| (now.saturating_add(lease), bytes))
        });
        HostMemory { free_bytes, returns: returns.collect() }
    }

    /// Reserves what the job needs, all of it or nothing, and gives it to the device's workers.
    ///
    /// # Errors
    /// [`Error::Exhausted`] when there is less; the job waits on then.
    fn start(&self, state: &mut State, job: &Arc<Job>, turn: &Turn, now: Duration) -> Result<()> {
        let (device, seconds) = (turn.place.device, turn.place.seconds);
        let Some(host_bytes) = state.queue.waiting(turn.id).map(|entry| entry.host_bytes) else { return Ok(()) };
        let purpose = format!("job {}", job.id);
        let part = turn.place.shared_bytes.map(|bytes| self.executors[device].memory.reserve(bytes, &purpose));
        let device_memory = part.transpose()?.map(Budget::within);
        job.host_memory.open(self.host_budget().reserve(host_bytes, &purpose)?);
        let grant = Grant { device_memory, host_memory: job.host_memory.clone() };

        let Some(entry) = state.queue.start(turn.id, seconds) else { return Ok(()) };
        state.totals.waited_seconds_total += now.saturating_sub(entry.submitted).as_secs_f64();
        let slot = &mut state.slots[device];
        slot.count_time(now);
        let beside = slot.running.len();
        {
            let mut life = job.life.lock();
            let id = self.executors[device].id;
            life.state = JobState::Running(id);
            life.turn = None;
            life.device = Some(id);
            life.place_on(device);
            life.started = Some(SystemTime::now());
            life.device_reason = match entry.places.len() {
                1 => "the only device that may run it".into(),
                count => format!("predicted to finish it first, of the {count} that may run it"),
            };
            if beside > 0 {
                life.device_reason += &format!("; it is short, and started beside {beside} more");
            }
        }
        let (job, alone) = (job.clone(), turn.place.shared_bytes.is_none());
        let grant = Some(grant);
        let running =
            Running { job, entry, started: now, predicted_seconds: seconds, device_seconds: 0.0, alone, grant };
        slot.running.push(running);
        self.work[device].notify_one();
        Ok(())
    }

    /// The life of a device's thread; there are as many as the device runs jobs at a time.
    fn work(&self, device: usize) {
        while let Some((taken, grant)) = self.take(device) {
            let outcome = self.run(&taken, &grant);
            // Before anybody else is given a turn.
            drop(grant);
            taken.job.host_memory.close();
            self.end(&taken, outcome);
        }
    }

    /// The next job of a device; waits for it. `None` when the scheduler is dropped.
    fn take(&self, device: usize) -> Option<(Taken, Grant)> {
        let mut state = self.state.lock();
        loop {
            for running in &mut state.slots[device].running {
                if let Some(grant) = running.grant.take() {
                    let (job, entry) = (running.job.clone(), running.entry.clone());
                    return Some((Taken { device, job, entry, predicted_seconds: running.predicted_seconds }, grant));
                }
            }
            if state.shutdown {
                return None;
            }
            self.work[device].wait(&mut state);
        }
    }

    /// Runs a job on the device's thread. A panic is the job's failure, not the thread's.
    fn run(&self, taken: &Taken, grant: &Grant) -> Result<()> {
        let (device, job) = (taken.device, &taken.job);
        job.check_stop()?;
        let (work, monitor) = {
            let life = job.life.lock();
            (life.plans.get(&device).cloned(), life.monitor.clone())
        };
        let device_id = self.executors[device].id;
        let work = work.ok_or_else(|| Error::Internal(format!("job {} has no plan for {device_id}", job.id)))?;
        let runner = &self.executors[device].runner;
        let caught = catch_unwind(AssertUnwindSafe(|| runner.run(&work, grant, &job.result, &monitor)));
        caught.unwrap_or_else(|panic| {
            let message = panic.downcast_ref::<&str>().map(ToString::to_string);
            let message = message.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default();
            tracing::error!(job = job.id.0, device = %self.executors[device].id, message, "a job panicked");
            Err(Error::Internal(format!("job {} panicked on {}: {message}", job.id, self.executors[device].id)))
        })
    }

    /// What follows a run: the next attempt elsewhere, or the job's end.
    fn end(&self, taken: &Taken, outcome: Result<()>) {
        let (device, job) = (taken.device, &taken.job);
        let mut leftovers = Vec::new();
        let outcome = job.settle(outcome);
        if let Err(error @ Error::Unavailable(_)) = &outcome {
            let mut state = self.state.lock();
            tracing::error!(device = %self.executors[device].id, job = job.id.0, %error, "device out of service");
            state.slots[device].lost = Some(error.clone());
            if self.try_elsewhere(&mut state, taken, &mut leftovers) {
                drop(state);
                return;
            }
        }
        let outcome = outcome.and_then(|()| self.keep_as_table(job));
        let (outcome, own_leftovers) = self.close(job, outcome);
        drop(own_leftovers);
        // Somebody let go of it while it came to its end.
        let is_unwanted = outcome.is_ok() && job.check_stop().is_err();
        if is_unwanted {
            job.result.release();
        }

        let mut state = self.state.lock();
        let seconds = self.free(&mut state, taken);
        state.queue.end(&taken.entry.tenant, taken.predicted_seconds, seconds);
        match &outcome {
            Ok(()) => {
                state.totals.completed_total += 1;
                state.totals.rows_total += job.result.pushed_rows();
                state.totals.bytes_total += job.result.pushed_bytes();
            }
            Err(error) => count_failure(&mut state.totals, error),
        }
        if is_unwanted {
            self.retire(&mut state, job);
        }
        self.fail_homeless(&mut state, &mut leftovers);
        self.dispatch(&mut state, &mut leftovers);
        self.ended.notify_all();
        drop(state);
        drop(leftovers);
    }

    /// Puts the job of a lost device back in the queue, if another device may run it and nothing was delivered yet.
    fn try_elsewhere(&self, state: &mut State, taken: &Taken, leftovers: &mut Vec<Leftovers>) -> bool {
        let job = &taken.job;
        let has_place = taken.entry.places.iter().any(|place| state.slots[place.device].lost.is_none());
        if !has_place || job.result.progress().0 > 0 || state.shutdown {
            return false;
        }
        {
            let mut life = job.life.lock();
            if life.stop.is_some() {
                return false;
            }
            life.state = JobState::Queued;
            life.device = None;
            life.started = None;
            life.device_reason = format!("{} was lost; waiting for another", self.executors[taken.device].id);
            life.monitor = Arc::new(Monitor::new(job.cancel.clone()));
        }
        self.free(state, taken);
        state.queue.push_back(taken.entry.clone(), taken.predicted_seconds);
        self.fail_homeless(state, leftovers);
        self.dispatch(state, leftovers);
        self.ended.notify_all();
        true
    }

    /// Takes a job off its device, and answers what it has had of the device's time.
    fn free(&self, state: &mut State, taken: &Taken) -> f64 {
        let slot = &mut state.slots[taken.device];
        slot.count_time(self.clock.now());
        slot.jobs_total += 1;
        let at = slot.running.iter().position(|running| running.job.id == taken.job.id);
        at.map_or(0.0, |at| slot.running.swap_remove(at).device_seconds)
    }

    /// Fails the jobs that wait for devices which are all lost. What they leave is for the caller to drop without the lock.
    fn fail_homeless(&self, state: &mut State, leftovers: &mut Vec<Leftovers>) {
        let loads = self.loads(state, self.clock.now());
        for entry in state.queue.remove_homeless(&loads) {
            let job = state.live[&entry.id].clone();
            let error = Error::Unavailable(format!(
                "every device that may run job {} is out of service; try again later, or on other devices",
                job.id
            ));
            leftovers.push(self.close(&job, Err(error.clone())).1);
            count_failure(&mut state.totals, &error);
        }
    }

    fn keep_as_table(&self, job: &Job) -> Result<()> {
        let name = job.life.lock().into.take();
        let Some(name) = name else { return Ok(()) };
        let into = name.name().to_string();
        job.result.into_table(name, &job.owner).context(|| format!("keeping the result as table {into:?}"))?;
        Ok(())
    }

    /// Gives a job its last state, and its readers the end. The state comes first: who sees the end may ask for the state.
    /// Answers the outcome, which is the reason to stop if there came one in time, and what is left to be dropped.
    fn close(&self, job: &Job, outcome: Result<()>) -> (Result<()>, Leftovers) {
        let mut life = job.life.lock();
        let outcome = match &life.stop {
            Some(reason) if !life.is_done => Err(reason.clone()),
            _ => outcome,
        };
        let state = match &outcome {
            Ok(()) => JobState::Complete,
            Err(Error::Cancelled(_)) => JobState::Cancelled,
            Err(error) => JobState::Failed(error.clone()),
        };
        let rows = job.result.pushed_rows();
        match &state {
            JobState::Failed(error) => tracing::warn!(job = job.id.0, %error, "failed"),
            state => tracing::info!(job = job.id.0, rows, ?state, "ended"),
        }
        life.state = state;
        life.finished = Some(SystemTime::now());
        life.turn = None;
        let leftovers = Leftovers { _plans: std::mem::take(&mut life.plans), _into: life.into.take() };
        drop(life);
        job.result.finish(outcome.clone());
        (outcome, leftovers)
    }

    /// Stops a job, in whatever state it is.
    fn stop(&self, job: &Arc<Job>, reason: Error) {
        let mut state = self.state.lock();
        // Jobs leave the queue under the scheduler's lock, and come to their end under their own.
        let mut life = job.life.lock();
        match &life.state {
            JobState::Queued => {
                drop(life);
                state.queue.remove(job.id);
                let mut leftovers = vec![self.close(job, Err(reason.clone())).1];
                count_failure(&mut state.totals, &reason);
                self.dispatch(&mut state, &mut leftovers);
                self.ended.notify_all();
                drop(state);
                drop(leftovers);
            }
            JobState::Running(_) => {
                let reason = life.stop.get_or_insert(reason).clone();
                let is_done = life.is_done;
                drop(life);
                drop(state);
                // One that is done stays so, and its result is released at its end.
                if !is_done {
                    job.cancel.raise();
                    // Readers need not wait until the device has noticed.
                    job.result.finish(Err(reason));
                }
            }
            JobState::Complete => {
                drop(life);
                self.retire(&mut state, job);
                drop(state);
                job.result.release();
                self.dispatch_now();
            }
            JobState::Failed(_) | JobState::Cancelled => {
                drop(life);
                self.retire(&mut state, job);
            }
        }
    }

    /// Moves a job that is over to the history.
    fn retire(&self, state: &mut State, job: &Arc<Job>) {
        if state.live.remove(&job.id).is_none() || self.options.history == 0 {
            return;
        }
        while state.history.len() >= self.options.history {
            state.history.pop_front();
        }
        state.history.push_back(job.clone());
    }

    fn tick(&self, now: SystemTime) {
        let clock_now = self.clock.now();
        let jobs: Vec<Arc<Job>> = self.state.lock().live.values().cloned().collect();
        for job in jobs {
            let (is_final, deadline) = {
                let life = job.life.lock();
                (life.state.is_final(), life.deadline.filter(|_| life.stop.is_none()))
            };
            if is_final {
                if job.result.is_expired(now) {
                    job.result.release();
                    self.retire(&mut self.state.lock(), &job);
                }
            } else if deadline.is_some_and(|deadline| deadline <= clock_now) {
                let message = format!("job {} was not done by the caller's deadline", job.id);
                self.stop(&job, Error::DeadlineExceeded(message));
            }
        }
        self.dispatch_now();
    }

    /// As [`Shared::dispatch`], for whoever holds no lock.
    fn dispatch_now(&self) {
        let mut leftovers = Vec::new();
        self.dispatch(&mut self.state.lock(), &mut leftovers);
        drop(leftovers);
    }

    /// The life of the timer's thread.
    fn keep_time(&self) {
        /// Leases are in seconds, and predictions for those who wait are refreshed as often.
        const INTERVAL: Duration = Duration::from_secs(1);
        loop {
            self.tick(SystemTime::now());
            let mut state = self.state.lock();
            if state.shutdown {
                return;
            }
            let wait = self.time_to_deadline(&state).unwrap_or(INTERVAL).min(INTERVAL);
            self.timer.wait_for(&mut state, wait.max(Duration::from_millis(1)));
        }
    }

    fn time_to_deadline(&self, state: &MutexGuard<'_, State>) -> Option<Duration> {
        let deadlines = state.live.values().filter_map(|job| {
            let life = job.life.lock();
            life.deadline.filter(|_| !life.state.is_final() && life.stop.is_none())
        });
        deadlines.min().map(|deadline| deadline.saturating_sub(self.clock.now()))
    }
}

fn count_failure(totals: &mut SchedulerStats, error: &Error) {
    match error {
        Error::Cancelled(_) => totals.cancelled_total += 1,
        _ => totals.failed_total += 1,
    }
}

impl BatchSink for ResultSpool {
    fn push(&self, batch: RecordBatch) -> Result<()> {
        ResultSpool::push(self, batch)
    }
}
