//! Windows of host devices: memory of a file, so that peers may be in other processes.

use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::OnceLock;

use super::HostDevice;
use super::buffer::bytes_of;
use super::transfer::concat;
use crate::Result;
use crate::device::peers::MappedPeers;
use crate::device::{DeviceBuffer, DeviceId, PeerOps, PeerWindow, Stream};
use crate::memory::SharedWindow;

/// The window of a device, and those of its peers. Views of all jobs share them.
#[derive(Debug, Default)]
pub(super) struct Windows {
    own: OnceLock<SharedWindow>,
    of_peers: MappedPeers<SharedWindow>,
    /// Windows that peers write to in place of `own`.
    in_host: MappedPeers<SharedWindow>,
}

impl PeerOps for HostDevice {
    fn open_window(&self, bytes: usize) -> Result<()> {
        if self.windows.own.get().is_none() {
            // Another call may have set it meanwhile, which is as good.
            let _ = self.windows.own.set(SharedWindow::new(bytes)?);
        }
        Ok(())
    }

    fn window_bytes(&self) -> usize {
        self.windows.own.get().map_or(0, SharedWindow::bytes)
    }

    fn window_file(&self) -> Option<BorrowedFd<'_>> {
        self.windows.own.get().map(SharedWindow::file)
    }

    fn map_window(&self, peer: DeviceId, window: PeerWindow) -> Result<()> {
        let window = match window {
            PeerWindow::Device { file, bytes } => SharedWindow::of_file(file, bytes)?,
            PeerWindow::Host(window) => window,
        };
        self.windows.of_peers.insert(peer, window);
        Ok(())
    }

    fn unmap_window(&self, peer: DeviceId) {
        self.windows.of_peers.remove(peer);
    }

    fn take_from_host(&self, peer: DeviceId, window: Option<SharedWindow>) {
        self.windows.in_host.set(peer, window);
    }

    fn push(
        &self,
        peer: DeviceId,
        offset: usize,
        from: &DeviceBuffer,
        bytes: Range<usize>,
        stream: &Stream,
    ) -> Result<()> {
        let window = self.windows.of_peers.get(peer, self.id)?;
        self.run(stream, |_| {
            if self.faults.loses_push() {
                return Ok(());
            }
            window.write(offset, &bytes_of(from)[bytes]);
            Ok(())
        })
    }

    fn take(&self, peer: DeviceId, bytes: Range<usize>, stream: &Stream) -> Result<DeviceBuffer> {
        let own = || self.windows.own.get().expect("rows arrive only in a window that is open").clone();
        let window = self.windows.in_host.find(peer).unwrap_or_else(own);
        self.run(stream, |run| {
            let mut taken = run.values::<u8>(bytes.len(), "rows from a peer")?;
            window.read(bytes.start, &mut taken);
            Ok(taken.freeze())
        })
    }

    fn concat_bytes(&self, parts: &[(DeviceBuffer, Range<usize>)], stream: &Stream) -> Result<DeviceBuffer> {
        let parts = parts.iter().map(|(part, bytes)| (part, bytes.clone()));
        self.run(stream, |run| concat(run, parts, "joining pieces of rows together"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Error;
    use crate::device::{CancelFlag, Device, DeviceKind};
    use crate::memory::{Arena, Budget};

    fn device(index: u16) -> HostDevice {
        HostDevice::new(index, 2, Budget::new("device memory", "--device-memory", 1 << 20), None).unwrap()
    }

    #[test]
    fn bytes_pushed_to_a_peer_are_taken_from_its_window() {
        let (one, other) = (device(0), device(1));
        other.open_window(1 << 16).unwrap();
        other.open_window(1 << 20).unwrap();
        assert_eq!((one.window_bytes(), other.window_bytes()), (0, 1 << 16), "a window is made once");
        let file = other.window_file().unwrap().try_clone_to_owned().unwrap();
        one.map_window(other.id(), PeerWindow::Device { file, bytes: 1 << 16 }).unwrap();
        let stream = one.stream(CancelFlag::new()).unwrap();
        let bytes: Vec<u8> = (0..100).collect();
        let buffer = one.copy_in(&[bytes.clone().into()], &stream).unwrap();
        one.push(other.id(), 5000, &buffer, 10..40, &stream).unwrap();
        one.push(other.id(), 5030, &buffer, 90..100, &stream).unwrap();
        let stream = other.stream(CancelFlag::new()).unwrap();
        let taken = other.take(one.id(), 5000..5040, &stream).unwrap();
        let both = other.concat_bytes(&[(taken.clone(), 30..40), (taken, 0..30)], &stream).unwrap();
        let arena = Arena::new(Budget::new("host memory", "--host-memory", 1 << 20));
        let found = other.copy_out(&both, 40, &arena, &stream).unwrap();
        assert_eq!(found.as_slice(), [&bytes[90..100], &bytes[10..40]].concat());
    }

    #[test]
    fn a_peer_writes_into_host_memory_where_both_agree_on_it() {
        let (one, other) = (device(0), device(1));
        other.open_window(1 << 16).unwrap();
        let window = SharedWindow::new(1 << 16).unwrap();
        one.map_window(other.id(), PeerWindow::Host(window.clone())).unwrap();
        other.take_from_host(one.id(), Some(window));
        let stream = one.stream(CancelFlag::new()).unwrap();
        let buffer = one.copy_in(&[vec![7u8; 8].into()], &stream).unwrap();
        one.push(other.id(), 0, &buffer, 0..8, &stream).unwrap();
        let taken = other.take(one.id(), 0..8, &stream).unwrap();
        assert_eq!(bytes_of(&taken), [7; 8]);
        assert_eq!(bytes_of(&other.take(device(2).id(), 0..8, &stream).unwrap()), [0; 8], "another peer's");
        other.take_from_host(one.id(), None);
        assert_eq!(bytes_of(&other.take(one.id(), 0..8, &stream).unwrap()), [0; 8], "its own window");
    }

    #[test]
    fn a_peer_whose_window_is_not_mapped_is_unavailable() {
        let one = device(0);
        let stream = one.stream(CancelFlag::new()).unwrap();
        let buffer = one.copy_in(&[vec![0u8; 8].into()], &stream).unwrap();
        let peer = DeviceId { kind: DeviceKind::Host, index: 1 };
        let pushed = one.push(peer, 0, &buffer, 0..8, &stream);
        assert!(matches!(&pushed, Err(Error::Unavailable(message)) if message.contains("host:1")), "{pushed:?}");
        one.map_window(peer, PeerWindow::Host(SharedWindow::new(8).unwrap())).unwrap();
        one.push(peer, 0, &buffer, 0..8, &stream).unwrap();
        one.unmap_window(peer);
        assert!(one.push(peer, 0, &buffer, 0..8, &stream).is_err());
    }
}
