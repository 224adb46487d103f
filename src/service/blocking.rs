//! Long work, on threads that many calls share.

use tokio::runtime::{Handle, RuntimeFlavor};

/// Work on fewer bytes runs inline. It takes a few hundred microseconds, too short to delay other
/// calls.
const HEAVY_BYTES: usize = 4 << 20;

/// Runs work that may take a while. Tells the runtime, so that other calls of the same worker
/// thread move to another.
pub(super) fn blocking<T>(work: impl FnOnce() -> T) -> T {
    let may_block = Handle::try_current().is_ok_and(|handle| handle.runtime_flavor() == RuntimeFlavor::MultiThread);
    if may_block { tokio::task::block_in_place(work) } else { work() }
}

/// Runs work on `bytes` bytes, which takes a while if they are many.
pub(super) fn heavy<T>(bytes: usize, work: impl FnOnce() -> T) -> T {
    if bytes >= HEAVY_BYTES { blocking(work) } else { work() }
}
