//! Who waits for each job, so that one which nobody waits for any more can be stopped.
//!
//! A stream waits for its job from its DoGet to its end. A client that polls has no call open most of the time; it counts
//! as waiting for a while after each poll. A job that nobody has read or polled yet is not known here: its client may
//! come later. A job that still runs is cancelled when the last stream that reads it is reset, is cut off, or reaches its
//! deadline, unless it counts as polled or its result becomes a table; a result that is complete stays for its lease.
//!
//! A server that drains asks more strictly who will come for a result that is complete: whoever reads it, or has just asked
//! for it. One that lies there until its lease ends holds nobody up.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use dashmap::DashMap;

use crate::scheduler::{Job, JobId, Scheduler};

/// How long after a poll its client is taken to be still there: several times as long as any client waits between polls.
const POLLED_RECENTLY: Duration = Duration::from_secs(60);

/// How long after a client has asked for a result it is expected to come for it, or for the rest of it: several times as long
/// as clients wait between two polls, and between an answer and the first read.
pub const FETCHED_WITHIN: Duration = Duration::from_secs(10);

/// The clients that wait for jobs.
#[derive(Debug, Default)]
pub struct Readers {
    by_job: DashMap<JobId, Waiting>,
}

#[derive(Debug, Default)]
struct Waiting {
    /// Streams that read the result.
    streams: usize,
    /// When it was polled last.
    polled: Option<Instant>,
    /// When somebody last polled it, renewed its lease, or began or ended a stream that reads it.
    asked: Option<Instant>,
}

/// Who is left when a stream is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Left {
    /// Other streams.
    Streams,
    /// No stream, and somebody who polls.
    Poller,
    /// Nobody.
    Nobody,
}

impl Readers {
    /// A stream begins to read the result of a job.
    pub fn enter(&self, job: JobId) {
        let mut waiting = self.by_job.entry(job).or_default();
        waiting.streams += 1;
        waiting.asked = Some(Instant::now());
    }

    /// The stream is over.
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

    /// Somebody has asked how far the job is.
    pub fn polled(&self, job: JobId) {
        let mut waiting = self.by_job.entry(job).or_default();
        waiting.polled = Some(Instant::now());
        waiting.asked = waiting.polled;
    }

    /// Somebody has extended the lease of its result.
    pub fn renewed(&self, job: JobId) {
        self.by_job.entry(job).or_default().asked = Some(Instant::now());
    }

    /// Whether somebody reads what a job that is over has to give, or is likely to come for it: it was asked for, or came to
    /// its end, within [`FETCHED_WITHIN`].
    pub fn are_expected(&self, job: &Job) -> bool {
        let has_just_ended = job
            .status()
            .finished
            .is_some_and(|finished| finished.elapsed().is_ok_and(|passed| passed < FETCHED_WITHIN));
        has_just_ended || self.by_job.get(&job.id).is_some_and(|waiting| waiting.is_expected(Instant::now()))
    }

    /// Forgets jobs that the scheduler has let go of.
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
    fn a_reader_is_expected_while_it_reads_and_for_a_while_after_each_sign_of_it() {
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
    fn the_last_stream_leaves_nobody_unless_somebody_polls() {
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
