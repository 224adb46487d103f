//! Progress bars on stderr: rates and time left for work that takes more than a second; none for machines.

use std::io::IsTerminal;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressState, ProgressStyle};

use super::output;
use crate::memory::human_bytes;

/// How far one piece of work is. Cheap to advance from several tasks; dropping it clears the line.
#[derive(Clone, Debug)]
pub struct Progress {
    bar: ProgressBar,
}

impl Progress {
    /// Bytes on their way, out of a total when it is known.
    pub fn bytes(what: &str, total: Option<u64>) -> Self {
        let template = match total {
            Some(_) => "{msg} {wide_bar} {bytes_human} of {total_human}  {rate}  {left}",
            None => "{spinner} {msg} {bytes_human}  {rate}  {elapsed}",
        };
        Self::new(what, total, template)
    }

    /// Work that does not say how far it is.
    pub fn spinner(what: &str) -> Self {
        Self::new(what, None, "{spinner} {msg}  {elapsed}")
    }

    /// The share of some work that is done.
    pub fn share(what: &str) -> Self {
        Self::new(what, Some(SHARE_STEPS), "{msg} {wide_bar} {percent:>3} %  {left}")
    }

    fn new(what: &str, total: Option<u64>, template: &str) -> Self {
        let seen = std::io::stderr().is_terminal() && !output::is_json();
        // Redrawn ten times a second at most, and a steady tick keeps the clock honest while nothing arrives.
        let target = if seen { ProgressDrawTarget::stderr_with_hz(10) } else { ProgressDrawTarget::hidden() };
        let bar = ProgressBar::with_draw_target(total, target).with_message(what.to_owned());
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(with_units(style));
        }
        if seen {
            // Nothing is drawn in the first second: work that is done by then needs no bar.
            let (delayed, start) = (bar.downgrade(), Duration::from_secs(1));
            bar.set_draw_target(ProgressDrawTarget::hidden());
            std::thread::spawn(move || {
                std::thread::sleep(start);
                if let Some(bar) = delayed.upgrade().filter(|bar| !bar.is_finished()) {
                    bar.set_draw_target(ProgressDrawTarget::stderr_with_hz(10));
                    bar.enable_steady_tick(Duration::from_millis(100));
                }
            });
        }
        Self { bar }
    }

    /// More bytes have passed.
    pub fn advance(&self, bytes: u64) {
        self.bar.inc(bytes);
    }

    /// The share that is done, 0 to 1.
    pub fn set_share(&self, share: f64) {
        self.bar.set_position((share.clamp(0.0, 1.0) * SHARE_STEPS as f64) as u64);
    }

    /// What is being done now.
    pub fn set_message(&self, what: String) {
        self.bar.set_message(what);
    }

    /// Since it began.
    pub fn elapsed(&self) -> Duration {
        self.bar.elapsed()
    }

    /// The work is over, well or not; the line disappears.
    pub fn finish(&self) {
        self.bar.finish_and_clear();
    }
}

/// Resolution of a share.
const SHARE_STEPS: u64 = 10_000;

fn with_units(style: ProgressStyle) -> ProgressStyle {
    type Out<'a> = &'a mut dyn std::fmt::Write;
    style
        .progress_chars("━╸ ")
        .with_key("bytes_human", |state: &ProgressState, out: Out<'_>| {
            let _ = write!(out, "{}", human_bytes(state.pos()));
        })
        .with_key("total_human", |state: &ProgressState, out: Out<'_>| {
            let _ = write!(out, "{}", human_bytes(state.len().unwrap_or(0)));
        })
        .with_key("rate", |state: &ProgressState, out: Out<'_>| {
            let _ = write!(out, "{}/s", human_bytes(state.per_sec() as u64));
        })
        .with_key("left", |state: &ProgressState, out: Out<'_>| {
            let _ = write!(out, "{} left", output::seconds(state.eta().as_secs_f64().ceil()));
        })
}
