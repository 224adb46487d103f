//! Scheduler handle: the calls that other rooms make.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime};

use parking_lot::{Condvar, Mutex};

use super::admission::Proposed;
use super::clock::{Clock, SystemClock};
use super::job::{Job, JobId};
use super::job_options::JobOptions;
use super::options::SchedulerOptions;
use super::queue::Queue;
use super::state::{DeviceState, Forecasts, Shared, State};
use super::stats::{DeviceStats, SchedulerStats};
use super::trace::JobTrace;
use crate::catalog::Catalog;
use crate::engine::Engine;
use crate::memory::{Holders, Interrupt};
use crate::planner::{BoundJoin, Explanation};
use crate::{Error, Result};

/// Submitter of a join, and terms of the submission.
#[derive(Clone, Debug, Default)]
pub struct Submission {
    /// Tenant's name; empty for anonymous.
    pub owner: String,
    /// True if the result may replace tables of other tenants.
    pub is_admin: bool,
    /// Number of the connection that the join came over, for the trace.
    pub client: Option<u64>,
    /// Ends the planning. A job that is queued runs on.
    pub interrupt: Interrupt,
}

/// Runs jobs on devices. Clones share the queue. When the last clone is dropped, jobs are cancelled
/// and threads end.
#[derive(Clone, Debug)]
pub struct Scheduler {
    pub(super) handle: Arc<Handle>,
}

#[derive(Debug)]
pub(super) struct Handle {
    pub(super) shared: Arc<Shared>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl Scheduler {
    /// Creates a scheduler over the engines of its devices.
    pub fn new(catalog: Catalog, engines: Vec<Arc<dyn Engine>>, options: SchedulerOptions) -> Self {
        Self::with_clock(catalog, engines, options, Arc::new(SystemClock::default()))
    }

    /// Creates a scheduler over the engines of its devices, with the given clock.
    pub fn with_clock(
        catalog: Catalog,
        engines: Vec<Arc<dyn Engine>>,
        options: SchedulerOptions,
        clock: Arc<dyn Clock>,
    ) -> Self {
        let state = State {
            queue: Queue::new(options.policy),
            devices: engines.iter().map(|_| DeviceState::default()).collect(),
            publishing: Vec::new(),
            open: BTreeMap::new(),
            residents: Vec::new(),
            live: BTreeMap::new(),
            history: VecDeque::new(),
            last_id: 0,
            last_resident: 0,
            draining: false,
            shutdown: false,
            totals: SchedulerStats::default(),
            forecasts: Forecasts::default(),
        };
        let (has_timer, publishers) = (options.timer, options.publishers);
        let workers_of = |engine: &Arc<dyn Engine>| if options.workers { options.slots(&**engine) } else { 0 };
        let workers: Vec<usize> = engines.iter().map(workers_of).collect();
        let shared = Arc::new(Shared {
            catalog,
            engines,
            options,
            clock,
            state: Mutex::new(state),
            work: workers.iter().map(|&workers| (0..workers).map(|_| Condvar::new()).collect()).collect(),
            publish: Condvar::new(),
            ended: Condvar::new(),
            timer: Condvar::new(),
        });
        let known: Weak<dyn Holders> = Arc::downgrade(&shared) as _;
        shared.host_budget().held_by(known);
        let spawn = |name: String, body: Box<dyn FnOnce() + Send>| {
            std::thread::Builder::new().name(name).spawn(body).expect("the system starts a thread")
        };
        let mut threads: Vec<JoinHandle<()>> = Vec::new();
        for (device, engine) in shared.engines.iter().enumerate() {
            for worker in 0..workers[device] {
                let shared = shared.clone();
                threads.push(spawn(engine.id().to_string(), Box::new(move || shared.work(device, worker))));
            }
        }
        for publisher in 0..publishers {
            let shared = shared.clone();
            threads.push(spawn(format!("tables-{publisher}"), Box::new(move || shared.keep_publishing())));
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

    /// Plans and queues a join on the given terms. Tables that were dropped since it was bound are
    /// still joined.
    ///
    /// # Errors
    /// Returns the error in the request. [`Error::Exhausted`]: the join cannot fit, the queue is
    /// full, or the tenant has as many jobs as it may have. [`Error::Unavailable`]: the server
    /// drains, or has no device for the join.
    pub fn submit(&self, join: BoundJoin, options: JobOptions, terms: Submission) -> Result<Arc<Job>> {
        let interrupt = terms.interrupt.clone();
        let submitted = self.handle.shared.submit(join, options, terms);
        self.count_refusal(&submitted, &interrupt);
        submitted
    }

    /// Refuses a submission that has no room in the queue. [`Scheduler::submit`] checks the same,
    /// so this only saves the work of binding the join.
    ///
    /// # Errors
    /// [`Error::Exhausted`]: the queue is full, or the tenant has as many jobs as it may have.
    /// [`Error::Unavailable`]: the server drains.
    pub fn check_room(&self, owner: &str) -> Result<()> {
        let shared = self.shared();
        shared.check_room(&shared.state.lock(), owner)
    }

    /// Counts a submission that was refused before it became a job, here or when it was bound. One
    /// that its caller has given up does not count.
    pub fn count_refusal<T>(&self, submitted: &Result<T>, interrupt: &Interrupt) {
        if submitted.is_err() && interrupt.check().is_ok() {
            self.shared().state.lock().totals.refused_total += 1;
        }
    }

    /// Explains the plan that a join of a tenant would run with, without running it. If the join
    /// would be refused because it does not fit, also explains that, and what would let it run.
    ///
    /// # Errors
    /// Returns the error in the request, as at submission, or the error of the interrupt.
    pub fn explain(
        &self,
        join: BoundJoin,
        options: &JobOptions,
        owner: &str,
        interrupt: &Interrupt,
    ) -> Result<Explanation> {
        let Proposed { plan, device_reason, sets, refusal } = self.shared().propose(join, options, owner, interrupt)?;
        Ok(Explanation::new(&plan, &plan.target.name, device_reason, None).among(sets).refused(refusal.as_ref()))
    }

    /// Returns the job with the given number, while it is remembered.
    ///
    /// # Errors
    /// Returns [`Error::NotFound`] for an unknown job.
    pub fn job(&self, id: JobId) -> Result<Arc<Job>> {
        let state = self.shared().state.lock();
        let remembered = || state.history.iter().rev().find(|job| job.id == id);
        let found = state.live.get(&id).or_else(remembered).cloned();
        found.ok_or_else(|| no_job(id))
    }

    /// Returns all jobs that wait, run, or have a result that is not released yet, oldest first.
    pub fn jobs(&self) -> Vec<Arc<Job>> {
        self.shared().state.lock().live.values().cloned().collect()
    }

    /// Returns the ended jobs that are still remembered, oldest first.
    pub fn history(&self) -> Vec<Arc<Job>> {
        self.shared().state.lock().history.iter().cloned().collect()
    }

    /// Stops a job and releases its result. A job that has ended keeps its state.
    ///
    /// # Errors
    /// Returns [`Error::NotFound`] for an unknown job.
    pub fn cancel(&self, id: JobId) -> Result<()> {
        let job = self.job(id)?;
        self.shared().stop(&job, Error::Cancelled(format!("job {id} was cancelled")));
        Ok(())
    }

    /// Sets a tenant's share of device time relative to other tenants. The default is 1.
    ///
    /// # Errors
    /// Returns [`Error::Invalid`] for a weight that is not above 0.
    pub fn set_weight(&self, tenant: &str, weight: f64) -> Result<()> {
        if !(weight.is_finite() && weight > 0.0) {
            return Err(Error::Invalid(format!("the weight of tenant {tenant:?} is {weight}; use a number above 0")));
        }
        self.shared().state.lock().queue.set_weight(tenant, weight);
        Ok(())
    }

    /// Refuses new jobs from now on. Admitted jobs run on.
    pub fn drain(&self) {
        self.shared().state.lock().draining = true;
    }

    /// Waits until no job waits or runs. Returns `false` if that takes longer than `limit`. Blocks
    /// its thread.
    pub fn wait_idle(&self, limit: Duration) -> bool {
        let end = Instant::now() + limit;
        let shared = self.shared();
        let mut state = shared.state.lock();
        loop {
            let are_free = state.devices.iter().all(|device_state| device_state.running.is_empty());
            if state.queue.len() == 0 && are_free && state.publishing.is_empty() && state.open.is_empty() {
                return true;
            }
            if shared.ended.wait_until(&mut state, end).timed_out() {
                return false;
            }
        }
    }

    /// Cancels every job that waits or runs, with the given reason.
    pub fn abort_all(&self, reason: &str) {
        for job in self.jobs() {
            if !job.life.lock().state.is_final() {
                self.shared().stop(&job, Error::Cancelled(format!("job {}: {reason}", job.id)));
            }
        }
    }

    /// Keeps time: releases results whose lease has ended, and starts jobs that can start. A timer
    /// thread calls this, unless [`SchedulerOptions::timer`] is off.
    pub fn tick(&self, now: SystemTime) {
        self.shared().tick(now);
    }

    /// Makes tables of the results that wait for that. The scheduler's own threads do the same,
    /// unless there are none ([`SchedulerOptions::publishers`]).
    pub fn publish(&self) {
        while self.shared().publish_next() {}
    }

    /// Returns the scheduler's counters and gauges.
    pub fn stats(&self) -> SchedulerStats {
        let shared = self.shared();
        let now = shared.clock.now();
        let mut state = shared.state.lock();
        state.devices.iter_mut().for_each(|device_state| device_state.count_time(now));
        let led = |(device, device_state): (usize, &DeviceState)| {
            device_state.running.iter().filter(|running| running.devices.leader() == device).count()
        };
        let on_devices = state.devices.iter().enumerate().map(led).sum::<usize>();
        let running = on_devices + state.publishing.len() + state.open.len();
        let devices = shared.engines.iter().zip(&state.devices).map(|(engine, device_state)| DeviceStats {
            id: engine.id(),
            lost: device_state.lost.as_ref().map(|error| error.message().into()),
            running: device_state.running.len(),
            jobs_total: device_state.jobs_total,
            busy_seconds_total: device_state.busy_seconds_total,
        });
        SchedulerStats { queued: state.queue.len(), running, devices: devices.collect(), ..state.totals.clone() }
    }
}

/// Returns the error for a job that does not exist. Callers get the same error for a job of another
/// tenant, so that they do not learn of it.
pub fn no_job(id: JobId) -> Error {
    Error::NotFound(format!("there is no job {id}, or it was forgotten"))
}

impl Drop for Handle {
    fn drop(&mut self) {
        let mut state = self.shared.state.lock();
        state.draining = true;
        state.shutdown = true;
        let jobs: Vec<Arc<Job>> = state.live.values().cloned().collect();
        let residents = std::mem::take(&mut state.residents);
        drop(state);
        drop(residents);
        for job in jobs {
            if !job.life.lock().state.is_final() {
                self.shared.stop(&job, Error::Cancelled("the server is shutting down".into()));
            }
        }
        self.shared.work.iter().flatten().for_each(|wake| {
            wake.notify_one();
        });
        self.shared.publish.notify_all();
        self.shared.timer.notify_all();
        let this = std::thread::current().id();
        for thread in self.threads.lock().drain(..) {
            // A worker may drop the last clone. That worker's thread ends on its own.
            if thread.thread().id() != this && thread.join().is_err() {
                tracing::error!("a thread of the scheduler panicked");
            }
        }
        self.shared.options.trace.iter().for_each(JobTrace::settle);
    }
}
