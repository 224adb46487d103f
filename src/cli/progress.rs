//! Progress bars on stderr, with rates and time left, for work that takes more than a second. With
//! `--json` there are none.
//!
//! The code that does the work tells a bar three things: the number of steps done, the bytes of
//! tables moved, and a message. A step is any unit: a row, a byte of a file, a part of a whole.

use std::io::IsTerminal;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressFinish, ProgressState, ProgressStyle};

use super::output;
use crate::human;
use crate::memory::human_bytes;

/// Progress of one piece of work. Several tasks can advance it cheaply. Dropping it clears the
/// line.
#[derive(Clone, Debug)]
pub struct Progress {
    bar: ProgressBar,
    /// Bytes of tables moved so far.
    moved: Arc<AtomicU64>,
    /// True if the moved bytes are also the steps.
    by_bytes: Arc<AtomicBool>,
}

/// Templates of a line with a known total, and of a line without one.
const WITH_TOTAL: &str = "{msg} {wide_bar} {percent:>3} %{moved}{left}";
const WITHOUT_TOTAL: &str = "{spinner} {msg}{moved}  {passed}";

/// Steps of work that only reports the fraction done.
const SHARE_STEPS: u64 = 10_000;

/// Delay before the bar is drawn: shorter work needs no bar.
const DRAWN_AFTER: Duration = Duration::from_secs(1);

/// Maximum redraw rate. A steady tick at this rate keeps the clock right while no data arrives.
const REDRAWS_PER_SECOND: u8 = 10;

impl Progress {
    /// Creates the progress of work with `total` steps. If the total is 0 or unknown, it shows the
    /// bytes moved and the elapsed time.
    pub fn of(what: &str, total: Option<u64>) -> Self {
        let total = total.filter(|total| *total > 0);
        let seen = std::io::stderr().is_terminal() && !output::is_json();
        let bar =
            ProgressBar::with_draw_target(total, ProgressDrawTarget::hidden()).with_finish(ProgressFinish::AndClear);
        bar.set_message(what.to_owned());
        let progress = Self { bar, moved: Arc::default(), by_bytes: Arc::default() };
        progress.restyle();
        if seen {
            let delayed = progress.bar.downgrade();
            std::thread::spawn(move || {
                std::thread::sleep(DRAWN_AFTER);
                if let Some(bar) = delayed.upgrade().filter(|bar| !bar.is_finished()) {
                    bar.set_draw_target(ProgressDrawTarget::stderr_with_hz(REDRAWS_PER_SECOND));
                    bar.enable_steady_tick(Duration::from_secs(1) / u32::from(REDRAWS_PER_SECOND));
                }
            });
        }
        progress
    }

    /// Creates the progress of a transfer, whose steps are the bytes of tables.
    pub fn transfer(what: &str, total_bytes: Option<u64>) -> Self {
        let progress = Self::of(what, total_bytes);
        progress.by_bytes.store(true, Ordering::Relaxed);
        progress
    }

    /// Creates the progress of work that reports its share done.
    pub fn share(what: &str) -> Self {
        Self::of(what, Some(SHARE_STEPS))
    }

    /// Adds `steps` to the steps done.
    pub fn advance(&self, steps: u64) {
        self.bar.inc(steps);
    }

    /// Adds `bytes` to the bytes of tables moved.
    pub fn moved(&self, bytes: u64) {
        self.moved.fetch_add(bytes, Ordering::Relaxed);
        if self.by_bytes.load(Ordering::Relaxed) {
            self.bar.inc(bytes);
        }
    }

    /// Sets the number of steps done.
    pub fn set_position(&self, steps: u64) {
        self.bar.set_position(steps);
    }

    /// Sets the share done, 0 to 1.
    pub fn set_share(&self, share: f64) {
        let steps = self.bar.length().unwrap_or(0);
        self.set_position((share.clamp(0.0, 1.0) * steps as f64) as u64);
    }

    /// Sets the bytes of tables moved.
    pub fn set_moved(&self, bytes: u64) {
        self.moved.store(bytes, Ordering::Relaxed);
    }

    /// Counts bytes moved as steps from now on, with `bytes` as the total.
    pub fn set_total_bytes(&self, bytes: u64) {
        self.by_bytes.store(true, Ordering::Relaxed);
        self.bar.set_length(bytes.max(1));
        self.bar.set_position(self.moved_bytes().min(bytes));
        // The estimate so far was for other work.
        self.bar.reset_eta();
        self.restyle();
    }

    /// Sets the description of the current work.
    pub fn set_message(&self, what: String) {
        self.bar.set_message(what);
    }

    /// Returns the bytes of tables moved so far.
    pub fn moved_bytes(&self) -> u64 {
        self.moved.load(Ordering::Relaxed)
    }

    /// Returns the share done, if the total is known.
    #[cfg(test)]
    pub fn done(&self) -> Option<f64> {
        self.bar.length().map(|total| (self.bar.position() as f64 / total as f64).min(1.0))
    }

    /// Hides the bar while `write` writes other lines.
    pub fn aside<T>(&self, write: impl FnOnce() -> T) -> T {
        self.bar.suspend(write)
    }

    /// Ends the work, successful or not, and clears the line.
    pub fn finish(&self) {
        self.bar.finish_and_clear();
    }

    fn restyle(&self) {
        let template = if self.bar.length().is_some() { WITH_TOTAL } else { WITHOUT_TOTAL };
        if let Ok(style) = ProgressStyle::with_template(template) {
            self.bar.set_style(with_units(style, self.moved.clone()));
        }
    }
}

fn with_units(style: ProgressStyle, moved: Arc<AtomicU64>) -> ProgressStyle {
    type Out<'a> = &'a mut dyn std::fmt::Write;
    // Ignore failed writes to the terminal.
    style
        .progress_chars("━╸ ")
        .with_key("moved", move |state: &ProgressState, out: Out<'_>| {
            let _ = out.write_str(&moved_and_rate(moved.load(Ordering::Relaxed), state.elapsed()));
        })
        .with_key("left", |state: &ProgressState, out: Out<'_>| {
            let _ = out.write_str(&time_left(state.pos(), state.eta()));
        })
        .with_key("passed", |state: &ProgressState, out: Out<'_>| {
            let _ = out.write_str(&human::whole_seconds(state.elapsed().as_secs()));
        })
}

/// Renders `  1.2 GiB  468.0 MiB/s`; nothing before the first byte.
fn moved_and_rate(bytes: u64, elapsed: Duration) -> String {
    match bytes {
        0 => String::new(),
        _ => {
            let rate = bytes as f64 / elapsed.as_secs_f64().max(1e-9);
            format!("  {}  {}/s", human_bytes(bytes), human_bytes(rate as u64))
        }
    }
}

/// Renders `  19 s left`; nothing before the first step, because the estimate needs one.
fn time_left(steps: u64, left: Duration) -> String {
    match steps {
        0 => String::new(),
        _ => format!("  {} left", human::whole_seconds(left.as_secs_f64().ceil() as u64)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_and_bytes_are_counted_separately() {
        let progress = Progress::of("uploading t", Some(200));
        assert_eq!(progress.done(), Some(0.0));
        let other = progress.clone();
        other.advance(50);
        other.moved(1 << 20);
        assert_eq!((progress.done(), progress.moved_bytes()), (Some(0.25), 1 << 20));
        progress.set_share(0.5);
        assert_eq!(progress.done(), Some(0.5));
    }

    #[test]
    fn a_total_may_become_known_later() {
        for progress in [Progress::of("t", None), Progress::share("t")] {
            progress.moved(30);
            progress.set_total_bytes(120);
            assert_eq!(progress.done(), Some(0.25));
            progress.moved(30);
            assert_eq!(progress.done(), Some(0.5));
        }
        let transfer = Progress::transfer("t", Some(100));
        transfer.moved(40);
        assert_eq!(transfer.done(), Some(0.4));
        assert_eq!(Progress::of("t", Some(0)).done(), None, "nothing to do is no total");
    }

    #[test]
    fn rates_and_times_are_shown_once_they_are_known() {
        assert_eq!(moved_and_rate(0, Duration::from_secs(2)), "");
        assert_eq!(moved_and_rate(64 << 20, Duration::from_secs(2)), "  64.0 MiB  32.0 MiB/s");
        assert_eq!(time_left(0, Duration::ZERO), "");
        assert_eq!(time_left(7, Duration::from_millis(18_200)), "  19 s left");
        assert_eq!(time_left(7, Duration::from_secs(200)), "  3 min 20 s left");
    }
}
