//! Windows of devices: memory that the ranks of a gang write into each other's devices.
//!
//! Each engine shows its device's window as a file. Before a gang starts, each member maps the
//! windows of the others that it has not mapped yet. A device that was started again has a new
//! window, which the others map in place of the old one.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use parking_lot::Mutex;

use super::Engine;
use crate::device::{Device, DeviceId, shares_no_memory};
use crate::{Context, Result};

/// Window of a device. Another window of the same device is another object.
#[derive(Debug)]
pub struct Window {
    pub file: OwnedFd,
    pub bytes: usize,
}

impl Window {
    /// Returns the window of a device of this process; `None` if it is not open.
    ///
    /// # Errors
    /// Errors of the system.
    pub(super) fn of(device: &dyn Device) -> Result<Option<Arc<Self>>> {
        let Some(peers) = device.peers() else { return Ok(None) };
        let Some(file) = peers.window_file() else { return Ok(None) };
        Ok(Some(Arc::new(Self { file: file.try_clone_to_owned()?, bytes: peers.window_bytes() })))
    }
}

/// Windows of peers that a device has mapped.
#[derive(Debug, Default)]
pub(super) struct MappedWindows(Mutex<HashMap<DeviceId, Arc<Window>>>);

impl MappedWindows {
    /// Calls `map` unless this window of the peer is mapped already.
    ///
    /// # Errors
    /// The errors of `map`.
    pub(super) fn connect(&self, peer: DeviceId, window: &Arc<Window>, map: impl FnOnce() -> Result<()>) -> Result<()> {
        let mut mapped = self.0.lock();
        if mapped.get(&peer).is_some_and(|known| Arc::ptr_eq(known, window)) {
            return Ok(());
        }
        mapped.remove(&peer);
        map().context(|| format!("mapping the memory of {peer}"))?;
        mapped.insert(peer, window.clone());
        Ok(())
    }

    /// Calls `unmap` if a window of the peer is mapped.
    pub(super) fn disconnect(&self, peer: DeviceId, unmap: impl FnOnce()) {
        if self.0.lock().remove(&peer).is_some() {
            unmap();
        }
    }
}

/// Maps the windows of all engines in each other's devices.
///
/// # Errors
/// [`Unavailable`](crate::Error::Unavailable) if a device shares no memory, and the errors of
/// [`Engine::connect`].
pub(super) fn connect_all(engines: &[Arc<dyn Engine>]) -> Result<()> {
    let of =
        |engine: &Arc<dyn Engine>| Ok((engine.id(), engine.window().ok_or_else(|| shares_no_memory(engine.id()))?));
    let windows = engines.iter().map(of).collect::<Result<Vec<_>>>()?;
    for engine in engines {
        for (peer, window) in windows.iter().filter(|(peer, _)| *peer != engine.id()) {
            engine.connect(*peer, window)?;
        }
    }
    Ok(())
}

/// Unmaps the windows of devices that are lost, so that their memory can be freed. No rank may be
/// at work.
pub(super) fn disconnect_lost(engines: &[Arc<dyn Engine>]) {
    for lost in engines.iter().filter(|engine| engine.check().is_err()) {
        engines.iter().filter(|engine| engine.id() != lost.id()).for_each(|engine| engine.disconnect(lost.id()));
    }
}
