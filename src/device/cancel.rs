//! The flag that stops a job's work on a device.

use std::sync::Arc;
#[cfg(test)]
use std::sync::atomic::AtomicU64;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::memory::Interrupt;
use crate::{Error, Result};

/// Raised once, by anybody, to stop a job; read between morsels by whoever works for it. Clones are the same flag.
#[derive(Clone, Debug, Default)]
pub struct CancelFlag {
    raised: Arc<AtomicBool>,
    #[cfg(test)]
    looks: Arc<Looks>,
}

/// How often a flag was looked at, by which tests tell what works without looking.
#[cfg(test)]
#[derive(Debug, Default)]
struct Looks {
    count: AtomicU64,
    /// The look that raises the flag; 0: none does.
    raising: u64,
}

#[cfg(test)]
impl CancelFlag {
    /// A flag that is raised when it is looked at for that time, counting from 1: at one place in the work, however fast it is.
    pub(crate) fn raised_at_look(look: u64) -> Self {
        Self { looks: Arc::new(Looks { raising: look, ..Looks::default() }), ..Self::default() }
    }

    /// How often it was looked at.
    pub(crate) fn looks(&self) -> u64 {
        self.looks.count.load(Ordering::Relaxed)
    }

    fn count_look(&self) {
        if self.looks.count.fetch_add(1, Ordering::Relaxed) + 1 == self.looks.raising {
            self.raise();
        }
    }
}

impl CancelFlag {
    /// A flag that is not raised.
    pub fn new() -> Self {
        Self::default()
    }

    /// Asks the work to stop. It does at its next check; there is no way back.
    pub fn raise(&self) {
        self.raised.store(true, Ordering::Release);
    }

    /// Whether the work should stop.
    pub fn is_raised(&self) -> bool {
        #[cfg(test)]
        self.count_look();
        self.raised.load(Ordering::Acquire)
    }

    /// What ends waits for memory once the flag is raised.
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
