//! Peer memory: windows that the other devices of a gang write into.
//!
//! ```text
//!   this device  ── push ──► window of a peer      copies queued on a stream
//!   own window   ── take ──► buffer                once the peer says that its bytes are there
//! ```
//!
//! Each device has one window, made when it is opened and mapped by all its peers. Nothing here
//! says which bytes are in use: the ranks of a join agree on that.

use std::ops::Range;
use std::os::fd::{BorrowedFd, OwnedFd};

use super::{DeviceBuffer, DeviceId, Stream};
use crate::Result;

/// Memory that devices share.
pub trait PeerOps: Send + Sync {
    /// Makes the device's window, once. Later calls change nothing.
    ///
    /// # Errors
    /// [`Exhausted`](crate::Error::Exhausted) when there is no memory for it.
    fn open_window(&self, bytes: usize) -> Result<()>;

    /// Returns the bytes of the device's window; 0 before it is opened.
    fn window_bytes(&self) -> usize;

    /// Calls `show` with the file by which peers map the device's window, if it has one.
    fn show_window(&self, show: &mut dyn FnMut(BorrowedFd<'_>));

    /// Maps the window of a peer, in place of an earlier one of the same peer.
    ///
    /// # Errors
    /// Errors of the system and the driver.
    fn map_window(&self, peer: DeviceId, file: OwnedFd, bytes: usize) -> Result<()>;

    /// Unmaps the window of a peer. No work that writes there may be queued.
    fn unmap_window(&self, peer: DeviceId);

    /// Copies bytes of a buffer into the window of a peer.
    ///
    /// # Errors
    /// [`Unavailable`](crate::Error::Unavailable) if the peer's window is not mapped. The errors of
    /// every call of [`Device`](super::Device).
    fn push(
        &self,
        peer: DeviceId,
        offset: usize,
        from: &DeviceBuffer,
        bytes: Range<usize>,
        stream: &Stream,
    ) -> Result<()>;

    /// Copies bytes of the device's own window into a new buffer.
    ///
    /// # Errors
    /// The errors of every call of [`Device`](super::Device).
    fn take(&self, bytes: Range<usize>, stream: &Stream) -> Result<DeviceBuffer>;

    /// Copies byte ranges of buffers into a new buffer, one after the other.
    ///
    /// # Errors
    /// The errors of every call of [`Device`](super::Device).
    fn concat_bytes(&self, parts: &[(DeviceBuffer, Range<usize>)], stream: &Stream) -> Result<DeviceBuffer>;
}
