//! Interrupts: a caller that waits for memory, or for long preparations, may be told to stop.

use std::sync::Arc;

use crate::Result;

/// Check between two short steps of a wait or of long work. An error ends the work. The default
/// interrupt never ends it.
#[derive(Clone, Default)]
pub struct Interrupt(Option<Arc<dyn Fn() -> Result<()> + Send + Sync>>);

impl Interrupt {
    /// Creates an interrupt that ends the work when `check` returns an error.
    pub fn by(check: impl Fn() -> Result<()> + Send + Sync + 'static) -> Self {
        Self(Some(Arc::new(check)))
    }

    /// Returns an interrupt that ends the work when one of the two does.
    pub fn or(&self, other: Self) -> Self {
        let first = self.clone();
        Self::by(move || first.check().and_then(|()| other.check()))
    }

    /// # Errors
    /// The error of the registered check.
    pub fn check(&self) -> Result<()> {
        self.0.as_ref().map_or(Ok(()), |check| check())
    }
}

impl std::fmt::Debug for Interrupt {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(if self.0.is_some() { "Interrupt" } else { "Interrupt(never)" })
    }
}
