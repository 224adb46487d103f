//! Ctrl-C, and the SIGTERM that a script's time limit sends: what was begun is undone before the process ends.
//!
//! A command line that waits for [`interrupted`] has its work dropped, says what became of it, and exits with 128 and the
//! number of the signal, as shells do. A second signal ends it at once, whatever it waits for. All others end at once, as any
//! process does.

use std::process::ExitCode;
use std::sync::Once;
use std::sync::atomic::{AtomicU8, Ordering};

use tokio::signal::unix::{SignalKind, signal};

use super::signals::{STATUS_BASE, exit_by_second};
use crate::{Error, Result};

/// The signal that came; 0 for none.
static SIGNAL: AtomicU8 = AtomicU8::new(0);

/// Comes back when somebody interrupts the process, with the word for it.
pub async fn interrupted() -> &'static str {
    static SECOND: Once = Once::new();
    SECOND.call_once(exit_by_second);
    let (number, name) = tokio::select! {
        () = received(SignalKind::interrupt()) => (SignalKind::interrupt().as_raw_value(), "interrupted"),
        () = received(SignalKind::terminate()) => (SignalKind::terminate().as_raw_value(), "told to end"),
    };
    SIGNAL.store(u8::try_from(number).unwrap_or(0), Ordering::Relaxed);
    name
}

async fn received(kind: SignalKind) {
    match signal(kind) {
        Ok(mut signals) => _ = signals.recv().await,
        // Then the system's own way to end the process stays in force.
        Err(_) => std::future::pending().await,
    }
}

/// The outcome of work, unless it is interrupted before.
///
/// # Errors
/// The work's, or [`Error::Cancelled`].
pub async fn unless_interrupted<T>(work: impl Future<Output = Result<T>>) -> Result<T> {
    tokio::select! {
        // Listens before the work begins.
        biased;
        how = interrupted() => Err(Error::Cancelled(how.into())),
        outcome = work => outcome,
    }
}

/// The status to exit with, of a process that was interrupted.
pub fn exit_code() -> Option<ExitCode> {
    match SIGNAL.load(Ordering::Relaxed) {
        0 => None,
        number => Some(ExitCode::from(STATUS_BASE + number)),
    }
}
