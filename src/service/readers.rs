//! Clients that wait for each job, so that a job without waiting clients can be stopped.
//!
//! A DoGet stream counts as waiting for its job until the stream ends. A client that polls has no
//! call open most of the time, so it counts as waiting for a while after each poll. A job that no
//! client has read or polled yet is not stored here: its client may come later.
//!
//! A job that still runs is cancelled when the last stream that reads it is reset, is cut off, or
//! reaches its deadline. It is not cancelled if it counts as polled or its result becomes a table.
//! A complete result stays for its lease.
//!
//! A draining server is stricter about complete results. It waits for clients that read the result,
//! or have just asked for it. A result that is only kept for its lease does not delay the drain.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use dashmap::DashMap;

use crate::scheduler::{Job, JobId, Scheduler};

/// Time after a poll during which the client counts as waiting. It is several times as long as any
/// client waits between polls.
const POLLED_RECENTLY: Duration = Duration::from_secs(60);

/// Time after a request for a result during which its client is expected to fetch it, or the rest
/// of it. It is several times as long as clients wait between two polls, or between an answer and
/// the first read.
pub const FETCHED_WITHIN: Duration = Duration::from_secs(10);

/// Clients that wait for jobs.
#[derive(Debug, Default)]
pub struct Readers {
    by_job: DashMap<JobId, Waiting>,
}

#[derive(Debug, Default)]
struct Waiting {
    streams: usize,
    polled: Option<Instant>,
    /// Time of the last sign of a client: a poll, a renewed lease, or the begin or end of a stream.
    asked: Option<Instant>,
}

/// Clients that remain when a stream is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Left {
    Streams,
    Poller,
    Nobody,
}

impl Readers {
    /// Records that a stream begins to read the result of a job.
    pub fn enter(&self, job: JobId) {
        let mut waiting = self.by_job.entry(job).or_default();
        waiting.streams += 1;
        waiting.asked = Some(Instant::now());
    }

    /// Records that a stream is over. Returns the remaining clients.
    pub fn leave(&self, job: JobId) -> Left {
        let mut waiting = self.by_job.entry(job).or_default();
        waiting.streams = waiting.streams.saturating_sub(1);
        waiting.asked = Some(Instant::now());
        match waiting.streams {
            0 if waiting.polled.is_some_and(|polled| polled.elapsed() < POLLED_RECENTLY) => Left::Poller,
            0 => Left::Nobody,
            _ => Left::Streams,
        }
    }

    /// Records a poll of the job.
    pub fn polled(&self, job: JobId) {
        let mut waiting = self.by_job.entry(job).or_default();
        waiting.polled = Some(Instant::now());
        waiting.asked = waiting.polled;
    }

    /// Records that a client has extended the lease of the job's result.
    pub fn renewed(&self, job: JobId) {
        self.by_job.entry(job).or_default().asked = Some(Instant::now());
    }

    /// True if a client reads the output of a job that is over, or is likely to fetch it. A fetch
    /// is likely if a client asked for the job, or the job ended, less than [`FETCHED_WITHIN`] ago.
    pub fn are_expected(&self, job: &Job) -> bool {
        let has_just_ended = job
            .status()
            .finished
            .is_some_and(|finished| finished.elapsed().is_ok_and(|passed| passed < FETCHED_WITHIN));
        has_just_ended || self.by_job.get(&job.id).is_some_and(|waiting| waiting.is_expected(Instant::now()))
    }

    /// Forgets jobs that the scheduler has dropped.
    pub fn sweep(&self, scheduler: &Scheduler) {
        let live: BTreeSet<JobId> = scheduler.jobs().iter().map(|job| job.id).collect();
        self.by_job.retain(|job, waiting| waiting.streams > 0 || live.contains(job));
    }
}

impl Waiting {
    fn is_expected(&self, now: Instant) -> bool {
        self.streams > 0 || self.asked.is_some_and(|asked| now.saturating_duration_since(asked) < FETCHED_WITHIN)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reader_is_expected_while_it_reads_and_for_a_while_after_each_request() {
        let readers = Readers::default();
        let job = JobId(1);
        let is_expected = |after: Duration| {
            readers.by_job.get(&job).is_some_and(|waiting| waiting.is_expected(Instant::now() + after))
        };
        assert!(!is_expected(Duration::ZERO), "nobody has asked for it");
        for ask in [Readers::polled, Readers::renewed] {
            readers.by_job.clear();
            ask(&readers, job);
            assert!(is_expected(Duration::ZERO) && !is_expected(FETCHED_WITHIN));
        }
        readers.by_job.clear();
        readers.enter(job);
        assert!(is_expected(10 * FETCHED_WITHIN), "a stream may take as long as it takes");
        assert_eq!(readers.leave(job), Left::Nobody);
        assert!(is_expected(Duration::ZERO) && !is_expected(FETCHED_WITHIN));
    }

    #[test]
    fn a_job_has_no_reader_after_its_last_stream_unless_it_is_polled() {
        let readers = Readers::default();
        let (one, other) = (JobId(1), JobId(2));
        readers.enter(one);
        readers.enter(one);
        readers.enter(other);
        assert_eq!(readers.leave(one), Left::Streams);
        assert_eq!(readers.leave(one), Left::Nobody);
        readers.polled(other);
        assert_eq!(readers.leave(other), Left::Poller);
    }
}
