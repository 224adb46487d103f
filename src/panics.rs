//! Panics: each becomes one line of the log, or an error for the caller that catches it.

use std::any::Any;
use std::backtrace::{Backtrace, BacktraceStatus};
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, PanicHookInfo, catch_unwind};
use std::sync::Once;

use tracing::Level;

use crate::{Error, Result, lines};

thread_local! {
    /// True while this thread runs the `work` of [`caught`].
    static IS_CAUGHT: Cell<bool> = const { Cell::new(false) };
}

/// Installs a panic hook that logs panics, with a backtrace if `RUST_BACKTRACE` asks for one. A
/// panic inside the hook would abort the process.
pub fn log() {
    // Keeps `caught` from replacing this hook.
    TELLS_UNCAUGHT.call_once(|| {});
    tell_uncaught(|panic| {
        let thread = std::thread::current();
        let place = panic.location().map(ToString::to_string).unwrap_or_default();
        let said = message(panic.payload());
        let name = thread.name().unwrap_or("without a name");
        let backtrace = Backtrace::capture();
        let trace = match backtrace.status() {
            BacktraceStatus::Captured => format!("\n{backtrace}"),
            _ => String::new(),
        };
        if tracing::enabled!(Level::ERROR) {
            lines::log_last_words(
                "ERROR",
                module_path!(),
                &format!("thread {name} panicked at {place}: {said}{trace}"),
            );
        }
    });
}

/// Installs a panic hook that prints panics as errors, for a command without a log.
pub fn tell(print: impl Fn(&Error) + Send + Sync + 'static) {
    // Keeps `caught` from replacing this hook.
    TELLS_UNCAUGHT.call_once(|| {});
    tell_uncaught(move |panic| {
        let place = panic.location().map(ToString::to_string).unwrap_or_default();
        let said = message(panic.payload());
        let backtrace = Backtrace::capture();
        let trace = match backtrace.status() {
            BacktraceStatus::Captured => format!("\n{backtrace}"),
            _ => String::new(),
        };
        print(&Error::Internal(format!("a fault in dovetail itself, at {place}: {said}{trace}")));
    });
}

/// Sets a panic hook that calls `tell` for all panics except those that [`caught`] catches.
fn tell_uncaught(tell: impl Fn(&PanicHookInfo<'_>) + Send + Sync + 'static) {
    std::panic::set_hook(Box::new(move |panic| {
        if !IS_CAUGHT.get() {
            tell(panic);
        }
    }));
}

/// Completed once [`log`], [`tell`] or [`caught`] has set the panic hook.
static TELLS_UNCAUGHT: Once = Once::new();

/// Runs `work`, and returns a panic in it as an error. `said` makes the error's text from the
/// panic's message.
///
/// # Errors
/// The errors of `work`, and [`Error::Internal`] for a panic.
pub fn as_error<T>(said: impl FnOnce(&str) -> String, work: impl FnOnce() -> Result<T>) -> Result<T> {
    let outcome = catch_unwind(AssertUnwindSafe(work));
    outcome.unwrap_or_else(|panic| Err(Error::Internal(said(message(&*panic)))))
}

/// Returns the message of a panic, or an empty string if the payload is not text.
pub fn message(payload: &dyn Any) -> &str {
    let said = payload.downcast_ref::<&str>().copied();
    said.or_else(|| payload.downcast_ref::<String>().map(String::as_str)).unwrap_or_default()
}

/// Runs `work` and returns its result, or the message of its panic. Logs nothing.
///
/// Some libraries panic on input that they cannot read. State that `work` has changed must not be
/// used after a panic.
pub fn caught<T>(work: impl FnOnce() -> T) -> Result<T, String> {
    // A command-line process has no log, and its default hook would print caught panics.
    TELLS_UNCAUGHT.call_once(|| tell_uncaught(std::panic::take_hook()));
    let outer = IS_CAUGHT.replace(true);
    let outcome = catch_unwind(AssertUnwindSafe(work));
    IS_CAUGHT.set(outer);
    outcome.map_err(|payload| message(&*payload).to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_caught_panic_has_its_reason() {
        assert_eq!(caught(|| 1), Ok(1));
        assert_eq!(caught(|| panic!("a {} reason", "good")), Err::<(), _>("a good reason".into()));
        assert_eq!(caught(|| caught(|| panic!("inside"))), Ok(Err::<(), _>("inside".into())));
        assert!(!IS_CAUGHT.get());
    }
}
