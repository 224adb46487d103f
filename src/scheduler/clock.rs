//! Clock of the scheduler, which tests can set.

use std::fmt::Debug;
use std::time::{Duration, Instant};

/// Clock that never goes back.
pub trait Clock: Send + Sync + Debug {
    /// Returns the time since some fixed moment.
    fn now(&self) -> Duration;
}

/// The machine's clock, from the server's start.
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

/// Clock that stands still until a test advances it.
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
