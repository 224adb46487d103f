//! Work that takes long, on threads that many calls share.

use tokio::runtime::{Handle, RuntimeFlavor};

/// Work on less than this many bytes is done where it comes up; a few hundred microseconds hold nobody up.
const HEAVY_BYTES: usize = 4 << 20;

/// Does work that may take a while, and tells the runtime so, so that other calls of the same worker thread go on elsewhere.
pub(super) fn blocking<T>(work: impl FnOnce() -> T) -> T {
    let may_block = Handle::try_current().is_ok_and(|handle| handle.runtime_flavor() == RuntimeFlavor::MultiThread);
    if may_block { tokio::task::block_in_place(work) } else { work() }
}

/// Does work on `bytes` bytes, which takes a while when they are many.
pub(super) fn heavy<T>(bytes: usize, work: impl FnOnce() -> T) -> T {
    if bytes >= HEAVY_BYTES { blocking(work) } else { work() }
}
