//! Panics: in one line of the log, or the error of whoever catches them.

use std::any::Any;
use std::backtrace::{Backtrace, BacktraceStatus};
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, PanicHookInfo, catch_unwind};
use std::sync::Once;

use tracing::Level;

use crate::lines;

thread_local! {
    /// Whether this thread runs what [`caught`] runs.
    static IS_CAUGHT: Cell<bool> = const { Cell::new(false) };
}

/// From now on, panics are events of the log, with a backtrace if `RUST_BACKTRACE` asks for one. A panic in what tells of them would
/// abort the process.
pub fn log() {
    // Nobody else is asked any more.
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

/// Tells of panics but for those that [`caught`] catches.
fn tell_uncaught(tell: impl Fn(&PanicHookInfo<'_>) + Send + Sync + 'static) {
    std::panic::set_hook(Box::new(move |panic| {
        if !IS_CAUGHT.get() {
            tell(panic);
        }
    }));
}

/// Whether that is so already.
static TELLS_UNCAUGHT: Once = Once::new();

/// What a panic says.
pub fn message(payload: &dyn Any) -> &str {
    let said = payload.downcast_ref::<&str>().copied();
    said.or_else(|| payload.downcast_ref::<String>().map(String::as_str)).unwrap_or_default()
}

/// What `work` answers, or what it panicked with: for libraries that panic on input which they cannot read. Nothing is logged.
/// What the work has changed must not be used after a panic.
pub fn caught<T>(work: impl FnOnce() -> T) -> Result<T, String> {
    // A command line has no log, and would print what is caught here.
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
    fn what_is_caught_says_why() {
        assert_eq!(caught(|| 1), Ok(1));
        assert_eq!(caught(|| panic!("a {} reason", "good")), Err::<(), _>("a good reason".into()));
        assert_eq!(caught(|| caught(|| panic!("inside"))), Ok(Err::<(), _>("inside".into())));
        assert!(!IS_CAUGHT.get());
    }
}
