//! The scheduler as others see it: what it is told, and what it tells.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime};

use parking_lot::{Condvar, Mutex};

use super::admission::Proposed;
use super::clock::{Clock, SystemClock};
use super::executor::Executor;
use super::job::{Job, JobId};
use super::queue::Queue;
use super::state::{Shared, Slot, State};
use super::stats::{DeviceStats, SchedulerStats};
use crate::catalog::Catalog;
use crate::device::Device;
use crate::engine::{Engine, InProcess};
use crate::memory::{Holders, Interrupt};
use crate::planner::{Explanation, JoinSpec, Rates, calibrate};
use crate::{Error, Result};

/// How a scheduler behaves.
#[derive(Clone, Debug)]
pub struct SchedulerOptions {
    /// Jobs that may wait; more are refused.
    pub queue_limit: usize,
    /// Jobs that one tenant may have waiting or running, those that were stopped left out; 0 for no limit.
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
    /// Whether a thread keeps leases; tests call [`Scheduler::tick`] instead.
    pub timer: bool,
}

impl Default for SchedulerOptions {
    fn default() -> Self {
        Self {
            queue_limit: 1000,
            tenant_jobs: 0,
            // A join uses its device in turns: it copies in, matches, gathers on the host, waits for the result's memory. Four
            // keep it busy through these. More would not make it busier, and each leaves less memory to the others: a join
            // whose part is too small for it takes the whole device instead.
            jobs_per_device: 4,
            // As long as a lease: by then every result that nobody renews has given its memory back.
            memory_wait: Duration::from_secs(300),
            retain: Duration::from_secs(300),
            window_bytes: 256 << 20,
            history: 1000,
            timer: true,
        }
    }
}

impl SchedulerOptions {
    /// Jobs that a device runs at a time, at the most.
    pub(super) fn seats(&self, executor: &Executor) -> usize {
        executor.jobs_max.min(self.jobs_per_device).max(1)
    }
}

/// Who submits a join, and on what terms.
#[derive(Clone, Debug, Default)]
pub struct Submission {
    /// The tenant's name; empty for anonymous.
    pub owner: String,
    /// Whether its result may take the place of tables of others.
    pub is_admin: bool,
    /// Ends the planning; a job that was queued runs on.
    pub interrupt: Interrupt,
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

impl Scheduler {
    /// A scheduler with default options over those devices, whose rates it measures first.
    pub fn new(catalog: Catalog, devices: Vec<Arc<dyn Device>>) -> Self {
        let measured = |device: Arc<dyn Device>| {
            let rates = calibrate(&*device);
            (device, rates)
        };
        Self::start(catalog, devices.into_iter().map(measured).collect(), SchedulerOptions::default())
    }

    /// A scheduler over devices of this process, of those rates.
    pub fn start(catalog: Catalog, devices: Vec<(Arc<dyn Device>, Rates)>, options: SchedulerOptions) -> Self {
        let arena = catalog.arena().clone();
        let engine = |(device, rates)| (Arc::new(InProcess::new(device, arena.clone())) as Arc<dyn Engine>, rates);
        let engines = devices.into_iter().map(engine).collect();
        Self::over_engines(catalog, engines, options)
    }

    /// A scheduler over engines of those rates.
    pub fn over_engines(catalog: Catalog, engines: Vec<(Arc<dyn Engine>, Rates)>, options: SchedulerOptions) -> Self {
        let executors = engines.into_iter().map(|(engine, rates)| Executor::new(engine, rates)).collect();
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
        let has_timer = options.timer;
        let seats: Vec<usize> = executors.iter().map(|executor| options.seats(executor)).collect();
        let shared = Arc::new(Shared {
            catalog,
            executors,
            options,
            clock,
            state: Mutex::new(state),
            work: seats.iter().map(|&seats| (0..seats).map(|_| Condvar::new()).collect()).collect(),
            ended: Condvar::new(),
            timer: Condvar::new(),
        });
        let known: Weak<dyn Holders> = Arc::downgrade(&shared) as _;
        shared.host_budget().held_by(known);
        let spawn = |name: String, body: Box<dyn FnOnce() + Send>| {
            std::thread::Builder::new().name(name).spawn(body).expect("the system gives a thread")
        };
        let mut threads: Vec<JoinHandle<()>> = Vec::new();
        for (device, executor) in shared.executors.iter().enumerate() {
            for worker in 0..seats[device] {
                let shared = shared.clone();
                threads.push(spawn(executor.id.to_string(), Box::new(move || shared.work(device, worker))));
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
        self.submit_with(spec, Submission { owner: owner.into(), ..Submission::default() })
    }

    /// Binds, plans and queues a join on terms.
    ///
    /// # Errors
    /// What is wrong with the request; [`Error::Exhausted`] when it cannot fit, the queue is full, or the tenant has as many
    /// jobs as it may; [`Error::Unavailable`] when the server drains or has no device for it.
    pub fn submit_with(&self, spec: JoinSpec, terms: Submission) -> Result<Arc<Job>> {
        let interrupt = terms.interrupt.clone();
        let submitted = self.shared().submit(spec, terms);
        // A submission that its caller gave up does not count as refused.
        if submitted.is_err() && interrupt.check().is_ok() {
            self.shared().state.lock().totals.refused_total += 1;
        }
        submitted
    }

    /// Says what would run, and why, without running it. Of a join that would be refused because it does not fit, also that, and
    /// what would let it run.
    ///
    /// # Errors
    /// What is wrong with the request, as when it is submitted; the interrupt's.
    pub fn explain(&self, spec: JoinSpec, interrupt: &Interrupt) -> Result<Explanation> {
        let Proposed { plan, device_reason, refusal } = self.shared().propose(spec, interrupt)?;
        Ok(Explanation::new(&plan, &plan.target.name, device_reason, None).refused(refusal.as_ref()))
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

    /// Keeps time: releases results whose lease ended, and starts what can start. The
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
        self.shared.work.iter().flatten().for_each(|wake| {
            wake.notify_one();
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
