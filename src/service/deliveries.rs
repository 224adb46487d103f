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

/// What an endpoint is of a result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Share {
    /// As GetFlightInfo lists them: one of so many that are read while the join runs.
    Endpoint {
        /// Which of them.
        part: usize,
        /// How many there are.
        parts: usize,
    },
    /// As PollFlightInfo lists them: these batches.
    Part {
        /// The first.
        first: usize,
        /// The one after the last.
        end: usize,
    },
}

#[derive(Debug, Default)]
struct Delivered {
    /// Endpoints whose rows were read to the end.
    parts: BTreeSet<usize>,
    /// Whether every endpoint was.
    all_parts: bool,
    /// Batches that were read part by part: first, and after the last.
    ranges: BTreeSet<(usize, usize)>,
    /// Whether a poll was told how it ended.
    told: bool,
}

impl Deliveries {
    /// A client has read an endpoint to its end, or to the job's error. Answers whether all that there is was read.
    pub fn read(&self, job: &Job, share: Share) -> bool {
        let (batches, spool) = job.result.progress();
        let mut delivered = self.by_job.entry(job.id).or_default();
        delivered.add(share);
        spool == SpoolState::Complete && delivered.has_all(batches)
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

    /// Whether everything that the job has to give has reached a client: its rows, or how it ended.
    pub fn is_settled(&self, job: &Job) -> bool {
        let (batches, spool) = job.result.progress();
        let had =
            |check: &dyn Fn(&Delivered) -> bool| self.by_job.get(&job.id).is_some_and(|delivered| check(&delivered));
        match (job.status().state, spool) {
            (JobState::Cancelled, _) | (_, SpoolState::Released) => true,
            (JobState::Queued | JobState::Running(_), _) => false,
            (JobState::Failed(_), _) => had(&|delivered| delivered.told || delivered.has_begun()),
            // Whose result becomes a table need not read it.
            (JobState::Complete, _) if job.plan.join.spec.into.is_some() => {
                had(&|delivered| delivered.told || delivered.has_begun())
            }
            (JobState::Complete, _) => had(&|delivered| delivered.has_all(batches)),
        }
    }
}

impl Delivered {
    fn add(&mut self, share: Share) {
        match share {
            Share::Endpoint { part, parts } => {
                self.parts.insert(part);
                self.all_parts |= self.parts.len() >= parts;
            }
            Share::Part { first, end } => {
                self.ranges.insert((first, end));
            }
        }
    }

    /// Whether any endpoint was read.
    fn has_begun(&self) -> bool {
        !self.parts.is_empty() || !self.ranges.is_empty()
    }

    /// Whether all of a result of so many batches was.
    fn has_all(&self, batches: usize) -> bool {
        let mut read = 0;
        for &(first, end) in &self.ranges {
            if first <= read {
                read = read.max(end);
            }
        }
        self.all_parts || (!self.ranges.is_empty() && read >= batches)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_is_read_when_every_endpoint_or_every_batch_was() {
        let mut delivered = Delivered::default();
        assert!(!delivered.has_all(0), "nobody has read the schema yet");
        delivered.add(Share::Part { first: 0, end: 3 });
        delivered.add(Share::Part { first: 5, end: 8 });
        assert!(!delivered.has_all(8), "3 and 4 are missing");
        delivered.add(Share::Part { first: 3, end: 5 });
        assert!(delivered.has_all(8) && !delivered.has_all(9));
        delivered.add(Share::Endpoint { part: 0, parts: 2 });
        assert!(!delivered.has_all(9));
        delivered.add(Share::Endpoint { part: 1, parts: 2 });
        assert!(delivered.has_all(9));
    }
}
