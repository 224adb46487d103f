//! Which jobs' ends have reached their clients, so that a server that drains knows what it still owes.

use std::collections::BTreeSet;

use dashmap::DashMap;

use crate::catalog::SpoolState;
use crate::scheduler::{Job, JobId, JobState, Scheduler};

/// What clients have had of each job.
#[derive(Debug, Default)]
pub struct Deliveries {
    by_job: DashMap<JobId, Delivered>,
}

#[derive(Debug, Default)]
struct Delivered {
    /// Endpoints whose rows were read to the end.
    parts: BTreeSet<usize>,
    /// Whether every endpoint was.
    all_parts: bool,
    /// Whether a poll was told how it ended.
    told: bool,
}

impl Deliveries {
    /// A client has read endpoint `part` of `parts` to its end, or to the job's error.
    pub fn read(&self, job: JobId, part: usize, parts: usize) {
        let mut delivered = self.by_job.entry(job).or_default();
        delivered.parts.insert(part);
        delivered.all_parts |= delivered.parts.len() >= parts;
    }

    /// A client was told how the job ended.
    pub fn told(&self, job: JobId) {
        self.by_job.entry(job).or_default().told = true;
    }

    /// Forgets jobs that the scheduler has let go of.
    pub fn sweep(&self, scheduler: &Scheduler) {
        let live: BTreeSet<JobId> = scheduler.jobs().iter().map(|job| job.id).collect();
        self.by_job.retain(|job, _| live.contains(job));
    }

    /// Whether nobody waits for the job any more.
    pub fn is_settled(&self, job: &Job) -> bool {
        let had = |check: fn(&Delivered) -> bool| self.by_job.get(&job.id).is_some_and(|delivered| check(&delivered));
        match (job.status().state, job.result.progress().1) {
            (JobState::Cancelled, _) | (_, SpoolState::Released) => true,
            (JobState::Queued | JobState::Running(_), _) => false,
            (JobState::Failed(_), _) => had(|delivered| delivered.told || !delivered.parts.is_empty()),
            // Whose result becomes a table need not read it.
            (JobState::Complete, _) if job.plan.join.spec.into.is_some() => {
                had(|delivered| delivered.told || !delivered.parts.is_empty())
            }
            (JobState::Complete, _) => had(|delivered| delivered.all_parts),
        }
    }
}
