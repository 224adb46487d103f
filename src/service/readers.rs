//! Who waits for each job, so that one which nobody waits for any more can be stopped.
//!
//! A stream waits for its job from its DoGet to its end. A client that polls has no call open most of the time; it counts
//! as waiting for a while after each poll. A job that nobody has read or polled yet is not known here: its client may
//! come later.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use dashmap::DashMap;

use crate::scheduler::{JobId, Scheduler};

/// How long after a poll its client is taken to be still there: several times as long as any client waits between polls.
const POLLED_RECENTLY: Duration = Duration::from_secs(60);

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
        self.by_job.entry(job).or_default().streams += 1;
    }

    /// The stream is over.
    pub fn leave(&self, job: JobId) -> Left {
        let mut waiting = self.by_job.entry(job).or_default();
        waiting.streams = waiting.streams.saturating_sub(1);
        match waiting.streams {
            0 if waiting.polled.is_some_and(|polled| polled.elapsed() < POLLED_RECENTLY) => Left::Poller,
            0 => Left::Nobody,
            _ => Left::Streams,
        }
    }

    /// Somebody has asked how far the job is.
    pub fn polled(&self, job: JobId) {
        self.by_job.entry(job).or_default().polled = Some(Instant::now());
    }

    /// Forgets jobs that the scheduler has let go of.
    pub fn sweep(&self, scheduler: &Scheduler) {
        let live: BTreeSet<JobId> = scheduler.jobs().iter().map(|job| job.id).collect();
        self.by_job.retain(|job, waiting| waiting.streams > 0 || live.contains(job));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
