//! Ends of jobs: complete, failed, or stopped by a client, the timer or the server.

use super::feeds::Feed;
use super::job::{Job, JobState};
use super::state::{Leftovers, Shared, State};
use super::stats::SchedulerStats;
use crate::catalog::SpoolState;
use crate::{Error, Result};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

impl Shared {
    /// Sets a job's last state, then ends its result for the readers, and then the waits for its
    /// end. The state comes first, because a reader that sees the end may ask for the state.
    /// Returns the outcome, and leftovers to drop. The outcome is the reason to stop, if the stop
    /// came before the work succeeded.
    pub(super) fn close(&self, job: &Job, outcome: Result<()>) -> (Result<()>, Leftovers) {
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
        let (rows, now) = (job.result.pushed_rows(), self.clock.now());
        let finished = SystemTime::now();
        life.state = state.clone();
        life.finished = Some(finished);
        life.forecast = None;
        if let (Some(trace), Some(mut traced)) = (&self.options.trace, life.traced.take()) {
            if let (JobState::Complete, Some(started)) = (&state, life.started) {
                traced.complete(job.submitted, started, finished);
            }
            trace.add(&traced);
        }
        let leftovers = Leftovers {
            _plans: std::mem::take(&mut life.plans),
            _tables: life.tables.take(),
            _table_holds: std::mem::take(&mut life.table_holds),
            _into: life.into.take(),
            _prepared: match (&job.feed, &job.kept) {
                (Some(feed), _) => feed.close(job.id, now),
                (None, Some(kept)) => kept.end(job.id, now).map(|built| built.join),
                (None, None) => None,
            },
        };
        drop(life);
        match state {
            JobState::Failed(error) => tracing::warn!(job = job.id.0, %error, "failed"),
            state => tracing::info!(job = job.id.0, rows, ?state, "ended"),
        }
        job.result.finish(outcome.clone());
        job.has_ended.send_replace(true);
        (outcome, leftovers)
    }

    /// Stops a job in any state.
    pub(super) fn stop(&self, job: &Arc<Job>, reason: Error) {
        let mut state = self.state.lock();
        // Jobs leave the queue under the scheduler's lock, and end under their own lock.
        let mut life = job.life.lock();
        let has_no_turn = Self::take_out_open(&mut state, job);
        let waits = match &life.state {
            JobState::Queued => true,
            JobState::Running => has_no_turn,
            _ => false,
        };
        match &life.state {
            _ if waits => {
                drop(life);
                state.queue.remove(job.id);
                let mut leftovers = vec![self.close(job, Err(reason.clone())).1];
                count_failure(&mut state.totals, &reason);
                self.dispatch(&mut state, &mut leftovers);
                self.ended.notify_all();
                drop(state);
                self.free_leftovers(leftovers);
            }
            JobState::Queued | JobState::Running => {
                let reason = life.stop.get_or_insert(reason).clone();
                let is_done = life.is_done;
                drop(life);
                drop(state);
                // A job that is done stays done, and its result is released at its end.
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

    /// Moves an ended job to the history.
    pub(super) fn retire(&self, state: &mut State, job: &Arc<Job>) {
        if state.live.remove(&job.id).is_none() || self.options.history == 0 {
            return;
        }
        while state.history.len() >= self.options.history {
            state.history.pop_front();
        }
        state.history.push_back(job.clone());
    }

    pub(super) fn tick(&self, now: SystemTime) {
        let jobs: Vec<Arc<Job>> = self.state.lock().live.values().cloned().collect();
        for job in jobs {
            let result = job.result.progress().1;
            let is_final = job.life.lock().state.is_final();
            if let Some(feed) = &job.feed {
                self.watch_reader(&job, feed, result, is_final);
            }
            if is_final && job.result.is_expired(now) {
                job.result.release();
                self.retire(&mut self.state.lock(), &job);
            }
        }
        // A device can be lost while idle, if its process ends. A lost device may be back by now.
        let mut leftovers = Vec::new();
        let mut state = self.state.lock();
        self.note_found(&mut state);
        self.note_lost(&mut state);
        // A turn may have been queued for a device that was lost before.
        self.fail_unplaceable(&mut state, &mut leftovers);
        self.ended.notify_all();
        self.let_go_of_unused(&mut state, &mut leftovers);
        let unmapped = Self::to_unmap(&mut state);
        drop(state);
        drop(leftovers);
        unmapped.into_iter().for_each(|device| self.unmap(device));
        self.dispatch_now();
    }

    /// Lets the memory of a stream that is left unread be taken for others, and ends its job once
    /// that has happened.
    fn watch_reader(&self, job: &Arc<Job>, feed: &Feed, result: SpoolState, is_final: bool) {
        job.result.list_if_unread();
        // The tenant may hold more than its limit.
        self.catalog.relieve(&job.owner);
        match result {
            SpoolState::Failed(error) if !is_final => self.stop(job, error),
            _ => feed.rows().may_have_room.notify_waiters(),
        }
    }

    /// Returns the lost devices whose windows the other devices have yet to unmap. A device of a
    /// gang that still runs is not among them.
    fn to_unmap(state: &mut State) -> Vec<usize> {
        let mut found = Vec::new();
        for device in 0..state.devices.len() {
            let device_state = &mut state.devices[device];
            device_state.is_unmapped &= device_state.lost.is_some();
            if device_state.lost.is_some() && !device_state.is_unmapped && device_state.running.is_empty() {
                device_state.is_unmapped = true;
                found.push(device);
            }
        }
        found
    }

    /// Lets the other devices unmap the window of a lost device, so that its memory is free when it
    /// is opened again. Not under the lock, because a device may be slow to take the request.
    fn unmap(&self, lost: usize) {
        if self.engines[lost].check().is_err() {
            let id = self.engines[lost].id();
            self.engines.iter().filter(|engine| engine.id() != id).for_each(|engine| engine.disconnect(id));
        }
    }

    /// Dispatches as [`Shared::dispatch`] does, for callers that hold no lock.
    fn dispatch_now(&self) {
        let mut leftovers = Vec::new();
        self.dispatch(&mut self.state.lock(), &mut leftovers);
        self.free_leftovers(leftovers);
    }

    /// Drops leftovers. If they held device memory, the job that waits for it gets a turn.
    pub(super) fn free_leftovers(&self, leftovers: Vec<Leftovers>) {
        let held_memory = leftovers.iter().any(|left| left._prepared.is_some());
        drop(leftovers);
        if held_memory {
            self.dispatch_now();
        }
    }

    /// Calls `tick` every second, until shutdown. Runs in the timer's thread.
    pub(super) fn keep_time(&self) {
        /// Leases are in seconds. Jobs that lack memory are tried again as often.
        const INTERVAL: Duration = Duration::from_secs(1);
        loop {
            self.tick(SystemTime::now());
            let mut state = self.state.lock();
            if state.shutdown {
                return;
            }
            self.timer.wait_for(&mut state, INTERVAL);
        }
    }
}

pub(super) fn count_failure(totals: &mut SchedulerStats, error: &Error) {
    match error {
        Error::Cancelled(_) => totals.cancelled_total += 1,
        _ => totals.failed_total += 1,
    }
}
