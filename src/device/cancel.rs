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

    /// True if the work should stop.
    pub fn is_raised(&self) -> bool {
        #[cfg(test)]
        self.count_look();
        self.raised.load(Ordering::Acquire)
    }

    /// Returns the interrupt that ends waits for memory once the flag is raised.
    pub fn interrupt(&self) -> Interrupt {
        let flag = self.clone();
        Interrupt::by(move || flag.check())
    }

    /// # Errors
    /// [`Error::Cancelled`] once the flag is raised.
    pub fn check(&self) -> Result<()> {
        if self.is_raised() {
            return Err(Error::Cancelled("the job was cancelled".into()));
        }
        Ok(())
    }
}
