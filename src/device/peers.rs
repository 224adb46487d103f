//! Peer memory: windows that the other devices of a gang write into.
//!
//! ```text
//!   this device  ── push ──► window of a peer      copies queued on a stream
//!   own window   ── take ──► buffer                once the peer says that its bytes are there
//! ```
//!
//! Each device has one window of its own memory, made when it is opened and mapped by its peers. A
//! peer that cannot write there writes into a window in host memory, which both map. Nothing here
//! says which bytes are in use: the ranks of a join agree on that.

use std::collections::HashMap;
use std::ops::Range;
use std::os::fd::{BorrowedFd, OwnedFd};

use parking_lot::RwLock;

use super::{Device, DeviceBuffer, DeviceId, DeviceKind, Stream};
use crate::memory::SharedWindow;
use crate::{Error, Result};

/// Window of a peer that a device can map.
#[derive(Debug)]
pub enum PeerWindow {
    /// Memory of the peer, by its [file](PeerOps::window_file).
    Device { file: OwnedFd, bytes: usize },
    /// Host memory.
    Host(SharedWindow),
}

impl PeerWindow {
    /// Returns the number of bytes.
    pub fn bytes(&self) -> usize {
        match self {
            Self::Device { bytes, .. } => *bytes,
            Self::Host(window) => window.bytes(),
        }
    }
}

/// Windows that a device has mapped, by peer. Clones of a window share its mapping.
#[derive(Debug)]
pub(super) struct MappedPeers<W>(RwLock<HashMap<DeviceId, W>>);

impl<W> Default for MappedPeers<W> {
    fn default() -> Self {
        Self(RwLock::default())
    }
}

impl<W: Clone> MappedPeers<W> {
    /// Puts a window in place of an earlier one of the same peer.
    pub(super) fn insert(&self, peer: DeviceId, window: W) {
        // Unmapped without the lock.
        let earlier = self.0.write().insert(peer, window);
        drop(earlier);
    }

    pub(super) fn remove(&self, peer: DeviceId) {
        let window = self.0.write().remove(&peer);
        drop(window);
    }

    /// Puts a window in place of an earlier one of the same peer, or takes that away.
    pub(super) fn set(&self, peer: DeviceId, window: Option<W>) {
        match window {
            Some(window) => self.insert(peer, window),
            None => self.remove(peer),
        }
    }

    pub(super) fn find(&self, peer: DeviceId) -> Option<W> {
        self.0.read().get(&peer).cloned()
    }

    /// Returns the window of a peer that `device` writes to.
    ///
    /// # Errors
    /// [`Unavailable`](Error::Unavailable) if it is not mapped.
    pub(super) fn get(&self, peer: DeviceId, device: DeviceId) -> Result<W> {
        self.find(peer).ok_or_else(|| Error::Unavailable(format!("the memory of {peer} is not mapped by {device}")))
    }
}

/// Returns the peer operations of a device that has a window.
///
/// # Errors
/// [`Unavailable`](Error::Unavailable) if it has none.
pub fn peers(device: &dyn Device) -> Result<&dyn PeerOps> {
    let peers = device.peers().filter(|peers| peers.window_bytes() > 0);
    peers.ok_or_else(|| shares_no_memory(device.id()))
}

/// Returns the error of an exchange with a device that has no window.
pub fn shares_no_memory(device: DeviceId) -> Error {
    let how = match device.kind {
        DeviceKind::Host => "",
        DeviceKind::Cuda => {
            "; GPUs do if each has a process of its own (--device-processes), and slices of a GPU (MIG) never do"
        }
    };
    Error::Unavailable(format!("{device} shares no memory with other devices{how}"))
}

/// Memory that devices share.
pub trait PeerOps: Send + Sync {
    /// Makes the device's window, once. Later calls change nothing.
    ///
    /// # Errors
    /// [`Exhausted`](crate::Error::Exhausted) when there is no memory for it.
    fn open_window(&self, bytes: usize) -> Result<()>;

    /// Returns the bytes of the device's window; 0 before it is opened.
    fn window_bytes(&self) -> usize;

    /// Returns the file by which peers map the device's window; `None` before it is opened.
    fn window_file(&self) -> Option<BorrowedFd<'_>>;

    /// Maps the window of a peer, in place of an earlier one of the same peer.
    ///
    /// # Errors
    /// Errors of the system and the driver.
    fn map_window(&self, peer: DeviceId, window: PeerWindow) -> Result<()>;

    /// Unmaps the window of a peer. No work that writes there may be queued.
    fn unmap_window(&self, peer: DeviceId);

    /// Takes what a peer writes from a window in host memory. `None`: from the device's own window,
    /// as at first. No work that takes from the peer may be queued.
    fn take_from_host(&self, peer: DeviceId, window: Option<SharedWindow>);

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

    /// Copies bytes of the window that a peer writes to into a new buffer.
    ///
    /// # Errors
    /// The errors of every call of [`Device`](super::Device).
    fn take(&self, peer: DeviceId, bytes: Range<usize>, stream: &Stream) -> Result<DeviceBuffer>;

    /// Copies byte ranges of buffers into a new buffer, one after the other.
    ///
    /// # Errors
    /// The errors of every call of [`Device`](super::Device).
    fn concat_bytes(&self, parts: &[(DeviceBuffer, Range<usize>)], stream: &Stream) -> Result<DeviceBuffer>;
}
