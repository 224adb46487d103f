//! Time as the scheduler sees it, so that tests decide how much of it passes.

use std::fmt::Debug;
use std::time::{Duration, Instant};

/// Time since some fixed moment; never goes back.
pub trait Clock: Send + Sync + Debug {
    /// The time since that moment.
    fn now(&self) -> Duration;
}

/// The machine's clock, since the server's start.
#[derive(Debug)]
pub struct SystemClock {
    start: Instant,
}

impl Default for SystemClock {
    fn default() -> Self {
        Self { start: Instant::now() }
    }
}

impl Clock for SystemClock {
    fn now(&self) -> Duration {
        self.start.elapsed()
    }
}

/// A clock that stands still until it is told otherwise.
#[cfg(test)]
#[derive(Debug, Default)]
pub(super) struct ManualClock {
    now: parking_lot::Mutex<Duration>,
}

#[cfg(test)]
impl ManualClock {
    pub(super) fn advance(&self, by: Duration) {
        *self.now.lock() += by;
    }
}

#[cfg(test)]
impl Clock for ManualClock {
    fn now(&self) -> Duration {
        *self.now.lock()
    }
}
