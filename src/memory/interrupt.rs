//! Who waits for memory, or for what takes long to make ready, may be told to stop.

use std::sync::Arc;

use crate::Result;

/// Asked between two short steps of a wait, or of work that takes long: an error ends it. The default never does.
#[derive(Clone, Default)]
pub struct Interrupt(Option<Arc<dyn Fn() -> Result<()> + Send + Sync>>);

impl Interrupt {
    /// Ends what `check` ends.
    pub fn by(check: impl Fn() -> Result<()> + Send + Sync + 'static) -> Self {
        Self(Some(Arc::new(check)))
    }

    /// # Errors
    /// Whatever the one who is waited for says.
    pub fn check(&self) -> Result<()> {
        self.0.as_ref().map_or(Ok(()), |check| check())
    }
}

impl std::fmt::Debug for Interrupt {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(if self.0.is_some() { "Interrupt" } else { "Interrupt(never)" })
    }
}
