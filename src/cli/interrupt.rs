//! Handles Ctrl-C, and the SIGTERM that a script's time limit sends: a command undoes its work
//! before the process ends.
//!
//! A command that waits for [`interrupted`] drops its work at a signal, and reports what became of
//! the work. It exits with 128 plus the number of the signal, as shells do. A second signal ends
//! the command at once. Other commands end at the first signal.

use std::process::ExitCode;
use std::sync::Once;
use std::sync::atomic::{AtomicU8, Ordering};

use tokio::signal::unix::{SignalKind, signal};

use super::signals::{STATUS_BASE, exit_by_second};
use crate::{Error, Result};

/// Number of the received signal; 0 if none.
static SIGNAL: AtomicU8 = AtomicU8::new(0);

/// Waits for a signal that interrupts the process, and returns a word for what happened.
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
        // The system's default handling of the signal stays in force.
        Err(_) => std::future::pending().await,
    }
}

/// Runs work until it completes or a signal interrupts it.
///
/// # Errors
/// The work's, or [`Error::Cancelled`].
pub async fn unless_interrupted<T>(work: impl Future<Output = Result<T>>) -> Result<T> {
    tokio::select! {
        // Poll in order, to listen before the work begins.
        biased;
        how = interrupted() => Err(Error::Cancelled(how.into())),
        outcome = work => outcome,
    }
}

/// Returns the exit status if a signal interrupted the process.
pub fn exit_code() -> Option<ExitCode> {
    match SIGNAL.load(Ordering::Relaxed) {
        0 => None,
        number => Some(ExitCode::from(STATUS_BASE + number)),
    }
}
