//! Jobs whose ends have reached their clients, so that a draining server knows what it still owes.

use std::collections::{BTreeMap, BTreeSet};

use dashmap::DashMap;

use crate::catalog::SpoolState;
use crate::scheduler::{Job, JobId, JobState, Scheduler};

/// Record of what clients have received of each job.
#[derive(Debug, Default)]
pub struct Deliveries {
    by_job: DashMap<JobId, Delivered>,
}

/// Part of a result that an endpoint serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Share {
    /// Endpoint of GetFlightInfo: one of `parts` endpoints, which clients may read while the join
    /// runs.
    Endpoint { part: usize, parts: usize },
    /// Endpoint of PollFlightInfo: a range of batches.
    Part {
        first: usize,
        /// Batch after the last.
        end: usize,
    },
}

#[derive(Debug, Default)]
struct Delivered {
    /// Endpoints whose rows were read to the end, by the number of endpoints of the result. Clients
    /// that ask before and after the end of a join may get different numbers.
    parts: BTreeMap<usize, BTreeSet<usize>>,
    all_parts: bool,
    /// Ranges of batches that were read: the first batch, and the batch after the last.
    ranges: BTreeSet<(usize, usize)>,
    /// True if a poll has reported how the job ended.
    told: bool,
}

impl Deliveries {
    /// Records that a client has read an endpoint to its end, or to the job's error. Returns true
    /// if the whole result was read.
    pub fn read(&self, job: &Job, share: Share) -> bool {
        let (batches, spool) = job.result.progress();
        let mut delivered = self.by_job.entry(job.id).or_default();
        delivered.add(share);
        spool == SpoolState::Complete && delivered.has_all(batches)
    }

    /// Records that a client was told how the job ended.
    pub fn told(&self, job: JobId) {
        self.by_job.entry(job).or_default().told = true;
    }

    /// Forgets jobs that the scheduler has dropped.
    pub fn sweep(&self, scheduler: &Scheduler) {
        let live: BTreeSet<JobId> = scheduler.jobs().iter().map(|job| job.id).collect();
        self.by_job.retain(|job, _| live.contains(job));
    }

    /// True if a client has received all that the job owes: its rows, or the way in which it ended.
    pub fn is_settled(&self, job: &Job) -> bool {
        let (batches, spool) = job.result.progress();
        let had =
            |check: &dyn Fn(&Delivered) -> bool| self.by_job.get(&job.id).is_some_and(|delivered| check(&delivered));
        match (job.state(), spool) {
            (JobState::Cancelled, _) | (_, SpoolState::Released) => true,
            (JobState::Queued | JobState::Running, _) => false,
            (JobState::Failed(_), _) => had(&|delivered| delivered.told || delivered.has_begun()),
            // A client whose result becomes a table need not read it.
            (JobState::Complete, _) if job.options.into.is_some() => {
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
                let read = self.parts.entry(parts).or_default();
                read.insert(part);
                self.all_parts |= read.len() >= parts;
            }
            Share::Part { first, end } => {
                self.ranges.insert((first, end));
            }
        }
    }

    /// True if any endpoint was read.
    fn has_begun(&self) -> bool {
        !self.parts.is_empty() || !self.ranges.is_empty()
    }

    /// True if all of a result of `batches` batches was read.
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
    fn a_result_is_read_when_every_endpoint_or_every_batch_was_read() {
        let mut delivered = Delivered::default();
        assert!(!delivered.has_all(0), "nobody has read the schema yet");
        delivered.add(Share::Part { first: 0, end: 3 });
        delivered.add(Share::Part { first: 5, end: 8 });
        assert!(!delivered.has_all(8), "3 and 4 are missing");
        delivered.add(Share::Part { first: 3, end: 5 });
        assert!(delivered.has_all(8) && !delivered.has_all(9));
        delivered.add(Share::Endpoint { part: 0, parts: 2 });
        delivered.add(Share::Endpoint { part: 1, parts: 3 });
        assert!(!delivered.has_all(9), "an endpoint of two, and another of three");
        delivered.add(Share::Endpoint { part: 1, parts: 2 });
        assert!(delivered.has_all(9));
    }
}
