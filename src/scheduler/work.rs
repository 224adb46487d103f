//! Worker threads: each takes a job of its device, runs it, and handles its end.

use std::sync::Arc;
use std::time::{Instant, SystemTime};

use arrow::array::RecordBatch;
use parking_lot::MutexGuard;

use super::ending::count_failure;
use super::feeds::{Feed, Turn};
use super::job::{Job, QueueForecast};
use super::placing::RETRY;
use super::state::{Leftovers, Shared, State, Taken};
use crate::catalog::ResultSpool;
use crate::engine::{Grant, run_gang};
use crate::join::{BatchSink, Monitor};
use crate::memory::{Budget, Interrupt, human_bytes};
use crate::{Error, Result, panics};

impl Shared {
    /// Runs the jobs of a device in one of its threads. A device has as many threads as it runs
    /// jobs at a time; `worker` is the thread's number.
    pub(super) fn work(&self, device: usize, worker: usize) {
        while let Some(taken) = self.take(device, worker) {
            let Some(grants) = self.grant_or_put_back(&taken) else { continue };
            let outcome = self.run(&taken, &grants);
            // The job's memory is freed before another job gets a turn.
            drop(grants);
            taken.job.host_memory.close();
            match outcome {
                Ok(Turn::Open) => self.leave_open(&taken),
                outcome => self.end(&taken, outcome.map(|_| ())),
            }
        }
    }

    /// Waits for the next job of a device. `None` if the scheduler is dropped.
    fn take(&self, device: usize, worker: usize) -> Option<Taken> {
        let mut state = self.state.lock();
        loop {
            // A spurious wakeup leaves the worker in the list.
            state.devices[device].idle.retain(|&idle| idle != worker);
            if let Some(taken) = state.take_placed(device) {
                return Some(taken);
            }
            if state.shutdown {
                return None;
            }
            state.devices[device].idle.push(worker);
            self.work[device][worker].wait(&mut state);
        }
    }

    /// Reserves the job's memory as [`grant`](Self::grant) does. `None` if that failed: the job
    /// waits again, or has ended because it was stopped meanwhile.
    pub(super) fn grant_or_put_back(&self, taken: &Taken) -> Option<Vec<Grant>> {
        match self.grant(taken) {
            Ok(grants) => Some(grants),
            Err(error) => {
                taken.job.host_memory.close();
                if !self.put_back(taken, &error) {
                    self.end(taken, Err(error));
                }
                None
            }
        }
    }

    /// Reserves the parts of the devices' memory that the job was promised: all of them, or none.
    /// Returns a grant for each device, the leader's first. This may wait until cached columns are
    /// evicted. So the worker does it, and no other job waits meanwhile.
    ///
    /// # Errors
    /// Returns [`Error::Exhausted`] if the promised memory is in use by now, for example by a
    /// column that another job reads.
    fn grant(&self, taken: &Taken) -> Result<Vec<Grant>> {
        let grant = |device_memory| Grant { device_memory, host_memory: taken.job.host_memory.clone() };
        let Some(bytes) = taken.shared_bytes else { return Ok(taken.devices.iter().map(|_| grant(None)).collect()) };
        let purpose = format!("job {}", taken.job.id);
        let parts = taken.devices.iter().map(|device| self.engines[device].memory().reserve(bytes, &purpose));
        let parts = parts.collect::<Result<Vec<_>>>()?;
        let (mut state, mut leftovers) = (self.state.lock(), Vec::new());
        for device in taken.devices.iter() {
            let running = state.devices[device].running.iter_mut().find(|running| running.job.id == taken.job.id);
            running.expect("a job that was taken is on its devices").promised_bytes = 0;
        }
        // Until now these bytes counted twice, so another job may be waiting for them.
        if state.queue.len() > 0 {
            self.dispatch(&mut state, &mut leftovers);
        }
        drop(state);
        self.free_leftovers(leftovers);
        Ok(parts.into_iter().map(|part| grant(Some(Budget::within(part)))).collect())
    }

    /// Puts a job back in the queue because its memory could not be reserved. The job holds no
    /// memory there. Returns `false` if the job was stopped meanwhile. The job is tried again with
    /// the next turns, at most a second later.
    fn put_back(&self, taken: &Taken, error: &Error) -> bool {
        let (mut state, mut leftovers) = (self.state.lock(), Vec::new());
        {
            let mut life = taken.job.life.lock();
            if life.stop.is_some() {
                return false;
            }
            life.wait_again("not placed yet".into());
            let waiting_for = error.message().to_string();
            life.forecast = Some(QueueForecast { position: 0, start: SystemTime::now() + RETRY, waiting_for });
        }
        self.take_off(&mut state, taken);
        state.totals.waited_seconds_total -= taken.started.saturating_sub(taken.entry.submitted).as_secs_f64();
        state.queue.push_back(taken.entry.clone(), taken.charged_seconds());
        if let Some(kept) = &taken.job.kept {
            kept.resident().end_turn(taken.job.id);
        }
        if let Some(feed) = taken.job.feed.as_ref().filter(|feed| feed.has_no_build()) {
            state.queue.replace_places(taken.job.id, feed.places());
        }
        self.fail_unplaceable(&mut state, &mut leftovers);
        self.ended.notify_all();
        drop(state);
        drop(leftovers);
        true
    }

    /// Runs a job on its devices, from its leader's thread. A panic fails the job, not the thread.
    fn run(&self, taken: &Taken, grants: &[Grant]) -> Result<Turn> {
        let (engine, job) = (&self.engines[taken.devices.leader()], &taken.job);
        job.check_stop()?;
        let mapped_bytes = || self.catalog.arena().mapped_bytes();
        let monitor = job.life.lock().begin(mapped_bytes());
        let id = engine.id();
        let work = job.runnable().ok_or_else(|| Error::Internal(format!("job {} has no tables for {id}", job.id)))?;
        let engines: Vec<_> = taken.devices.iter().map(|device| self.engines[device].clone()).collect();
        let said = |message: &str| {
            tracing::error!(job = job.id.0, device = %id, message, "a job panicked");
            format!("job {} panicked on {id}: {message}", job.id)
        };
        let outcome = panics::as_error(said, || match &job.feed {
            Some(feed) => self.take_turn(feed, &work, taken.devices.leader(), &grants[0], job, &monitor),
            None => match job.kept.as_ref().filter(|kept| kept.resident().has_turn(job.id)) {
                Some(kept) => self.probe_kept(kept, &work, job, &monitor).map(|()| Turn::Done),
                None => run_gang(&engines, work.task()?, grants, &job.result, &monitor).map(|()| Turn::Done),
            },
        });
        job.life.lock().memory.at_end_bytes = mapped_bytes();
        outcome.map_err(|error| self.with_advice(job, error))
    }

    /// Adds advice to the error of a job that found no host memory.
    fn with_advice(&self, job: &Job, error: Error) -> Error {
        if !matches!(error, Error::Exhausted(_)) || !error.message().contains(self.host_budget().setting()) {
            return error;
        }
        let (held, advice) = (human_bytes(job.result.held_bytes()), job.options.room_advice());
        error.context(format!("the join ran out of host memory after {held} of its result; {advice}"))
    }

    /// Handles the outcome of a run: the job is tried again elsewhere, or ends.
    pub(super) fn end(&self, taken: &Taken, outcome: Result<()>) {
        let (device, job) = (taken.devices.leader(), &taken.job);
        let outcome = job.settle(outcome);
        if let Err(error @ Error::Unavailable(_)) = &outcome {
            let (mut leftovers, mut state) = (Vec::new(), self.state.lock());
            // The same cause may have lost other devices too.
            self.note_lost(&mut state);
            let lost = taken.devices.iter().find(|&device| state.devices[device].lost.is_some());
            let id = self.engines[lost.unwrap_or(device)].id();
            match lost {
                Some(_) => tracing::error!(device = %id, job = job.id.0, %error, "device out of service"),
                None => tracing::warn!(device = %id, job = job.id.0, %error, "a transient device failure"),
            }
            if self.try_again(&mut state, taken, lost, &mut leftovers) {
                drop(state);
                return self.free_leftovers(leftovers);
            }
            if let Some(lost) = self.lost_marks(job) {
                let error = Error::Unavailable(format!("{}; {lost}", error.message()));
                drop(state);
                return self.conclude(job, Err(error), |state| self.release_devices(state, taken));
            }
        }
        if outcome.is_ok() && job.becomes_table() {
            return self.hand_to_publishers(taken);
        }
        self.conclude(job, outcome, |state| self.release_devices(state, taken));
    }

    /// Takes a job off its devices for good, and charges its tenant.
    pub(super) fn release_devices(&self, state: &mut State, taken: &Taken) {
        let seconds = self.free(state, taken);
        state.queue.end(&taken.entry.tenant, taken.charged_seconds(), seconds);
    }

    /// Ends a job, counts it, and gives turns to others. `leave` takes the job from its place in
    /// the scheduler's state.
    pub(super) fn conclude(&self, job: &Arc<Job>, outcome: Result<()>, leave: impl FnOnce(&mut State)) {
        let (outcome, leftovers) = self.close(job, outcome);
        drop(leftovers);
        if outcome.is_err() {
            // A thread that takes statistics may hold rows of the result for another moment. They
            // must be free before others get a turn.
            let _stopped = job.result.wait_for_statistics();
        }
        // The job was stopped while it ended.
        let is_unwanted = outcome.is_ok() && job.check_stop().is_err();
        if is_unwanted {
            job.result.release();
        }

        let mut state = self.state.lock();
        leave(&mut state);
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
        self.give_turns(state);
    }

    /// Gives the places that a job has left to others.
    pub(super) fn give_turns(&self, mut state: MutexGuard<'_, State>) {
        let mut leftovers = Vec::new();
        self.fail_unplaceable(&mut state, &mut leftovers);
        self.dispatch(&mut state, &mut leftovers);
        self.ended.notify_all();
        if state.shutdown {
            self.publish.notify_all();
        }
        drop(state);
        self.free_leftovers(leftovers);
    }

    /// Takes lost devices out of service. True if any of them was in service until now.
    pub(super) fn note_lost(&self, state: &mut State) -> bool {
        let mut is_one_more = false;
        for (device_state, engine) in state.devices.iter_mut().zip(&self.engines) {
            if let Err(lost) = engine.check() {
                is_one_more |= device_state.lost.is_none();
                // The message may have changed, as it tells whether the device will be back.
                device_state.lost = Some(lost);
            }
        }
        is_one_more
    }

    /// Puts lost devices that can work again back into service.
    pub(super) fn note_found(&self, state: &mut State) {
        for (device_state, engine) in state.devices.iter_mut().zip(&self.engines) {
            if device_state.lost.is_some() && engine.check().is_ok() {
                device_state.lost = None;
                tracing::info!(device = %engine.id(), "back in service");
            }
        }
    }

    /// Puts a job back in the queue if its device was lost, or failed in a way that may pass. The
    /// job needs a device in service, and must not have delivered any rows. It is tried again only
    /// once for each of the two causes, because the job itself may be the reason.
    fn try_again(&self, state: &mut State, taken: &Taken, lost: Option<usize>, leftovers: &mut Vec<Leftovers>) -> bool {
        let (job, is_lost) = (&taken.job, lost.is_some());
        let in_service = |device: usize| state.devices[device].lost.is_none();
        let places = job.feed.as_ref().map_or(&taken.entry.places[..], Feed::places);
        let has_place = places.iter().any(|place| place.devices.iter().all(in_service));
        let delivered = job.result.progress().0;
        let can_begin_again = match &job.feed {
            None => delivered == 0,
            Some(feed) => feed.put_rows_back(delivered),
        };
        if !has_place || !can_begin_again || state.shutdown {
            return false;
        }
        {
            let mut life = job.life.lock();
            if life.stop.is_some() || (if is_lost { life.lost_a_device } else { life.tried_again }) {
                return false;
            }
            let id = self.engines[lost.unwrap_or(taken.devices.leader())].id();
            life.wait_again(match is_lost {
                true => format!("{id} was lost; waiting for another"),
                false => format!("{id} had a transient failure; trying again"),
            });
            life.tried_again |= !is_lost;
            life.lost_a_device |= is_lost;
            life.monitor = Arc::new(Monitor::new(job.cancel.clone()));
        }
        self.free(state, taken);
        state.queue.push_back(taken.entry.clone(), taken.charged_seconds());
        if let Some(feed) = &job.feed {
            // It may be of a process that has ended, although the device is back in service.
            feed.forget_build(state, leftovers);
        }
        if let Some(kept) = &job.kept {
            if kept.resident().has_turn(job.id) {
                leftovers.extend(Self::unbuild(state, kept.resident()));
            }
            state.queue.remove_prepared_places(job.id);
        }
        self.fail_unplaceable(state, leftovers);
        self.dispatch(state, leftovers);
        self.ended.notify_all();
        true
    }

    /// Takes a job that ran off its devices. Returns the job's seconds of device time, summed over
    /// its devices.
    fn free(&self, state: &mut State, taken: &Taken) -> f64 {
        taken.devices.iter().for_each(|device| state.devices[device].jobs_total += 1);
        self.take_off(state, taken)
    }

    /// Like [`free`](Self::free), for a job that may not have run. The devices do not count it.
    fn take_off(&self, state: &mut State, taken: &Taken) -> f64 {
        let mut seconds = 0.0;
        for device in taken.devices.iter() {
            let device_state = &mut state.devices[device];
            device_state.count_time(self.clock.now());
            let at = device_state.running.iter().position(|running| running.job.id == taken.job.id);
            seconds += at.map_or(0.0, |at| device_state.running.swap_remove(at).device_seconds);
        }
        seconds
    }

    /// Fails the jobs whose devices are all lost. The caller must drop the leftovers without the
    /// lock.
    pub(super) fn fail_unplaceable(&self, state: &mut State, leftovers: &mut Vec<Leftovers>) {
        self.leave_lost_devices(state, leftovers);
        let loads = self.loads(state, self.clock.now());
        for entry in state.queue.remove_unplaceable(&loads) {
            let job = state.live[&entry.id].clone();
            let error = Error::Unavailable(self.lost_marks(&job).unwrap_or_else(|| {
                format!(
                    "every device that may run job {} is out of service; try again later, or on other devices",
                    job.id
                )
            }));
            leftovers.push(self.close(&job, Err(error.clone())).1);
            count_failure(&mut state.totals, &error);
        }
    }
}

impl BatchSink for ResultSpool {
    fn wait_for_readers(&self, since: Instant) -> Result<bool> {
        Self::wait_for_readers(self, since)
    }

    fn interrupted_by(&self, interrupt: Interrupt) -> Option<Box<dyn BatchSink>> {
        Some(Box::new(Self::interrupted_by(self, interrupt)))
    }

    fn push(&self, batch: RecordBatch) -> Result<()> {
        ResultSpool::push(self, batch)
    }

    fn push_sharing(&self, batch: RecordBatch, shared: &[bool]) -> Result<()> {
        ResultSpool::push_sharing(self, batch, shared)
    }
}
