//! Record of a call: data from its handler for its line in the log.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;

use super::describe::JobTimes;
use super::transfers::WriteTime;

/// Prepares a client's text for a line of the log: on one line, and not too long.
pub(super) fn printable(text: &str) -> String {
    const CHARACTERS_MAX: usize = 500;
    let mut printable: String =
        text.chars().take(CHARACTERS_MAX).map(|c| if c.is_control() { ' ' } else { c }).collect();
    if printable.len() < text.len() && text.chars().nth(CHARACTERS_MAX).is_some() {
        printable.push_str("...");
    }
    printable
}

/// Data from a handler for the access line of its call. Stored in the request's extensions.
#[derive(Clone, Debug, Default)]
pub struct CallRecord {
    inner: Arc<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    command: Mutex<String>,
    is_poll: AtomicBool,
    rows: AtomicU64,
    queue_micros: AtomicU64,
    run_micros: AtomicU64,
    writing: Option<WriteTime>,
}

impl CallRecord {
    /// Creates the record of a call on a connection with the given time of writes, if known.
    pub(super) fn new(writing: Option<WriteTime>) -> Self {
        Self { inner: Arc::new(Inner { writing, ..Inner::default() }) }
    }

    /// Returns the time of writes of the call's connection.
    pub(super) fn writing(&self) -> Option<WriteTime> {
        self.inner.writing.clone()
    }

    /// Sets a short form of the request: a table's name, `join orders lineitem`, an action.
    pub fn set_command(&self, command: impl Into<String>) {
        *self.inner.command.lock() = printable(&command.into());
    }

    /// Marks the call as one that only asks for the progress of a job. Clients do so several times
    /// a second, and a reader of the log may want to see only the other calls.
    pub fn set_poll(&self) {
        self.inner.is_poll.store(true, Ordering::Relaxed);
    }

    /// Adds rows that were received or sent.
    pub fn add_rows(&self, rows: u64) {
        self.inner.rows.fetch_add(rows, Ordering::Relaxed);
    }

    /// Sets the times that the call's job waited and ran.
    pub fn set_job_times(&self, times: JobTimes) {
        self.inner.queue_micros.store(times.queued.as_micros() as u64, Ordering::Relaxed);
        self.inner.run_micros.store(times.run.as_micros() as u64, Ordering::Relaxed);
    }
    pub(super) fn command(&self) -> String {
        self.inner.command.lock().clone()
    }

    pub(super) fn is_poll(&self) -> bool {
        self.inner.is_poll.load(Ordering::Relaxed)
    }

    pub(super) fn rows(&self) -> u64 {
        self.inner.rows.load(Ordering::Relaxed)
    }

    pub(super) fn job_times(&self) -> JobTimes {
        let time = |micros: &AtomicU64| Duration::from_micros(micros.load(Ordering::Relaxed));
        JobTimes { queued: time(&self.inner.queue_micros), run: time(&self.inner.run_micros) }
    }
}
