//! The worker threads: each takes a job of its device, runs it, and sees to what follows.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use arrow::array::RecordBatch;

use super::ending::count_failure;
use super::executor::Grant;
use super::job::{Job, JobState};
use super::state::{Leftovers, Shared, State, Taken};
use crate::catalog::ResultSpool;
use crate::join::{BatchSink, Monitor};
use crate::{Context, Error, Result};

impl Shared {
    /// The life of a device's thread; there are as many as the device runs jobs at a time.
    pub(super) fn work(&self, device: usize) {
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
}

impl BatchSink for ResultSpool {
    fn push(&self, batch: RecordBatch) -> Result<()> {
        ResultSpool::push(self, batch)
    }
}
