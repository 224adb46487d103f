//! The flag that stops a job's work on a device.

use std::sync::Arc;
#[cfg(test)]
use std::sync::atomic::AtomicU64;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::memory::Interrupt;
use crate::{Error, Result};

/// Stops a job once any thread raises it. Workers read the flag between morsels. Clones share one
/// flag.
#[derive(Clone, Debug, Default)]
pub struct CancelFlag {
    raised: Arc<AtomicBool>,
    /// Further reason to stop the work that has this clone.
    also: Interrupt,
    #[cfg(test)]
    looks: Arc<Looks>,
}

/// Count of reads of a flag. Tests use it to find work that never checks the flag.
#[cfg(test)]
#[derive(Debug, Default)]
struct Looks {
    count: AtomicU64,
    /// The read that raises the flag, counted from 1. 0: no read raises it.
    raising: u64,
}

#[cfg(test)]
impl CancelFlag {
    /// Returns a flag that its `look`-th read raises, counting from 1. The stop is then at a fixed
    /// place in the work, at any speed.
    pub(crate) fn raised_at_look(look: u64) -> Self {
        Self { looks: Arc::new(Looks { raising: look, ..Looks::default() }), ..Self::default() }
    }

    /// Number of reads of the flag so far.
    pub(crate) fn looks(&self) -> u64 {
        self.looks.count.load(Ordering::Relaxed)
    }

    fn count_look(&self) {
        crate::turns::step();
        if self.looks.count.fetch_add(1, Ordering::Relaxed) + 1 == self.looks.raising {
            self.raise();
        }
    }
}

impl CancelFlag {
    /// Returns a flag that is not raised.
    pub fn new() -> Self {
        Self::default()
    }

    /// Asks the work to stop. Work stops at its next check. A raised flag stays raised.
    pub fn raise(&self) {
        self.raised.store(true, Ordering::Release);
    }

    /// Returns a clone of the flag for work that `also` stops. Work with other clones goes on then.
    #[must_use]
    pub fn or(&self, also: Interrupt) -> Self {
        Self { also: self.also.or(also), ..self.clone() }
    }

    /// True if the work should stop.
    pub fn is_raised(&self) -> bool {
        self.check().is_err()
    }

    /// Returns the interrupt that ends waits for memory once the flag is raised.
    pub fn interrupt(&self) -> Interrupt {
        let flag = self.clone();
        Interrupt::by(move || flag.check())
    }

    /// # Errors
    /// [`Error::Cancelled`] once the flag is raised, and the error of a further reason to stop.
    pub fn check(&self) -> Result<()> {
        #[cfg(test)]
        self.count_look();
        if self.raised.load(Ordering::Acquire) {
            return Err(Error::Cancelled("the job was cancelled".into()));
        }
        self.also.check()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_further_reason_stops_only_the_work_that_has_it() {
        let (flag, reason) = (CancelFlag::new(), CancelFlag::new());
        let with_reason = flag.or(reason.interrupt());
        assert_eq!([flag.is_raised(), with_reason.is_raised()], [false, false]);
        reason.raise();
        assert_eq!([flag.is_raised(), with_reason.is_raised()], [false, true]);
        flag.raise();
        assert!(flag.is_raised());
        let both = CancelFlag::new();
        let other = both.or(CancelFlag::new().interrupt());
        both.raise();
        assert!(other.is_raised());
    }
}
