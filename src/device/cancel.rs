//! The flag that stops a job's work on a device.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::{Error, Result};

/// Raised once, by anybody, to stop a job; read between morsels by whoever works for it. Clones are the same flag.
#[derive(Clone, Debug, Default)]
pub struct CancelFlag {
    raised: Arc<AtomicBool>,
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
        self.raised.load(Ordering::Acquire)
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
