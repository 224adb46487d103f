//! Jobs that the caller runs instead of worker threads: in a simulation, on a clock of its own.
//!
//! ```text
//!   dispatch ─► Scheduler::take_placed ─► PlacedJob ─ the caller's time ─► PlacedJob::end
//!                                                                            └─► KeptResult
//! ```
//!
//! Such a scheduler has no workers ([`SchedulerOptions::workers`]). Everything except the work of a
//! job is as in a server: queue, places, memory, failures and second tries.
//!
//! [`SchedulerOptions::workers`]: super::SchedulerOptions::workers

use std::sync::Arc;

use super::handle::Scheduler;
use super::job::{Job, JobState};
use super::state::{Shared, Taken};
use crate::engine::Grant;
use crate::memory::human_bytes;
use crate::{Error, Result};

/// Job on its devices, with the memory that it was promised.
#[derive(Debug)]
pub struct PlacedJob {
    shared: Arc<Shared>,
    taken: Taken,
    grants: Vec<Grant>,
}

/// Host memory of a result that a client has yet to read.
#[derive(Debug)]
pub struct KeptResult {
    shared: Arc<Shared>,
    job: Arc<Job>,
}

impl Scheduler {
    /// Takes a job that was placed on its devices, and that no thread runs. `None` if there is none
    /// now.
    pub fn take_placed(&self) -> Option<PlacedJob> {
        let shared = &self.handle.shared;
        loop {
            let taken = {
                let mut state = shared.state.lock();
                (0..shared.engines.len()).find_map(|device| state.take_placed(device))?
            };
            if let Some(grants) = shared.grant_or_put_back(&taken) {
                return Some(PlacedJob { shared: shared.clone(), taken, grants });
            }
        }
    }
}

impl PlacedJob {
    /// Returns the job.
    pub fn job(&self) -> &Arc<Job> {
        &self.taken.job
    }

    /// Returns the devices of the job by index, the leader first.
    pub fn devices(&self) -> impl Iterator<Item = usize> + '_ {
        self.taken.devices.iter()
    }

    /// True if no other job may run on the devices at the same time.
    pub fn is_alone(&self) -> bool {
        self.taken.shared_bytes.is_none()
    }

    /// Returns the bytes of host memory that the job has reserved.
    pub fn host_bytes(&self) -> u64 {
        self.taken.job.host_memory.promised_bytes()
    }

    /// Ends the job's work, and gives its devices to others. The result of a job that succeeded
    /// takes `result_bytes` of host memory until it is released, and is returned. As in a server,
    /// the job fails if it was promised less and memory is full, and a job whose device was lost
    /// may be tried again.
    pub fn end(self, outcome: Result<()>, result_bytes: u64) -> Option<KeptResult> {
        let Self { shared, taken, grants } = self;
        let job = taken.job.clone();
        // The job's memory is freed before another job gets a turn.
        drop(grants);
        job.host_memory.close();
        let outcome = outcome.and_then(|()| shared.keep(&job, result_bytes));
        let is_kept = outcome.is_ok();
        shared.end(&taken, outcome);
        if !is_kept {
            return None;
        }
        let is_complete = job.life.lock().state == JobState::Complete;
        if !is_complete {
            // It was stopped before its end.
            job.host_memory.close();
        }
        is_complete.then_some(KeptResult { shared, job })
    }
}

impl KeptResult {
    /// Returns the bytes of host memory that the result takes.
    pub fn bytes(&self) -> u64 {
        self.job.host_memory.promised_bytes()
    }

    /// Releases the result, as a client does that has read it.
    pub fn release(self) {
        self.job.host_memory.close();
        self.shared.stop(&self.job, Error::Cancelled(format!("job {} was released", self.job.id)));
    }
}

impl Shared {
    /// Reserves the host memory of a result without rows, until it is released.
    fn keep(&self, job: &Job, result_bytes: u64) -> Result<()> {
        let reserved = self.host_budget().try_reserve(result_bytes).map_err(|used| {
            let free = human_bytes(self.host_budget().limit_bytes().saturating_sub(used));
            Error::Exhausted(format!(
                "the result takes {} of host memory, and {free} are free",
                human_bytes(result_bytes)
            ))
        })?;
        job.host_memory.open(reserved);
        Ok(())
    }
}
