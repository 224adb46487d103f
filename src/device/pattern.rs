//! Patterns: bytes by which a device learns that what a peer writes into its window arrives.
//!
//! Drivers report that a GPU can write to another, and some machines still lose or change the bytes
//! on their way. So the owner of a window reads a pattern back before it trusts a peer's rows.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use arrow::buffer::Buffer;
use serde::{Deserialize, Serialize};

use super::{CancelFlag, Device, DeviceId, peers};
use crate::memory::{Arena, Budget};
use crate::{Error, Result};

/// Parts of a window that have the pattern: the first and the last bytes, and two between.
const PARTS: usize = 4;

/// Bytes of a part. A window that is smaller is one part.
const PART_BYTES: usize = 1 << 20;

/// Bytes that are made at once.
const WORD: usize = size_of::<u64>();

/// Contents for parts of a window. Two patterns differ in every word.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pattern(u64);

impl Pattern {
    /// Returns a pattern that this process has not used, so that no window has it from an earlier
    /// check.
    pub fn unused() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }

    /// Writes the pattern into the mapped window of a peer. Waits.
    ///
    /// # Errors
    /// The errors of [`PeerOps::push`](super::PeerOps::push).
    pub fn write(self, device: &dyn Device, peer: DeviceId, window_bytes: usize) -> Result<()> {
        let stream = device.stream(CancelFlag::new())?;
        for part in parts(window_bytes) {
            let buffer = device.copy_in(&[Buffer::from_vec(self.bytes(&part))], &stream)?;
            peers(device)?.push(peer, part.start, &buffer, 0..part.len(), &stream)?;
        }
        device.synchronize(&stream)
    }

    /// Reads the pattern back from the window that a peer writes to. Waits.
    ///
    /// # Errors
    /// [`Unavailable`](Error::Unavailable) if other bytes are there, and the errors of every call
    /// of [`Device`].
    pub fn check(self, device: &dyn Device, writer: DeviceId, window_bytes: usize) -> Result<()> {
        let stream = device.stream(CancelFlag::new())?;
        let budget = Budget::new("memory to check a window in", "no setting", 2 * PART_BYTES as u64);
        let arena = Arena::new(budget);
        for part in parts(window_bytes) {
            let taken = peers(device)?.take(writer, part.clone(), &stream)?;
            let found = device.copy_out(&taken, part.len(), &arena, &stream)?;
            if found.as_slice() != self.bytes(&part) {
                return Err(Error::Unavailable(format!("bytes that {writer} writes to {} do not arrive", device.id())));
            }
        }
        Ok(())
    }

    /// Returns the bytes of a part, which starts at a word.
    fn bytes(self, part: &Range<usize>) -> Vec<u8> {
        let words = part.start / WORD..part.end.div_ceil(WORD);
        let word = |at: usize| {
            let mixed = (self.0 << 40 ^ at as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            (mixed ^ mixed >> 32).to_le_bytes()
        };
        let mut bytes: Vec<u8> = words.flat_map(word).collect();
        bytes.truncate(part.len());
        bytes
    }
}

/// Returns the parts of a window. They start at words, and the last one ends with the window.
fn parts(window_bytes: usize) -> Vec<Range<usize>> {
    let last = window_bytes.saturating_sub(PART_BYTES);
    let mut starts: Vec<usize> = (0..PARTS).map(|at| last * at / (PARTS - 1) / WORD * WORD).collect();
    starts.dedup();
    starts.into_iter().map(|start| start..window_bytes.min(start + PART_BYTES + WORD)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::host::HostDevice;
    use crate::device::{PeerOps, PeerWindow};
    use crate::memory::SharedWindow;

    fn device(index: u16) -> HostDevice {
        HostDevice::new(index, 1, Budget::new("device memory", "--device-memory", 16 << 20), None).unwrap()
    }

    #[test]
    fn parts_are_at_both_ends_and_between() {
        for bytes in [1, 8, 100_003, PART_BYTES, PART_BYTES + 7, 3 * PART_BYTES + 5, 256 << 20] {
            let parts = parts(bytes);
            assert_eq!((parts[0].start, parts[parts.len() - 1].end), (0, bytes));
            assert!(parts.iter().all(|part| !part.is_empty() && part.start % WORD == 0 && part.end <= bytes));
            assert_eq!(parts.len(), if bytes > 2 * PART_BYTES { PARTS } else { parts.len() });
        }
        assert_eq!(parts(PART_BYTES / 2).len(), 1);
    }

    #[test]
    fn a_changed_byte_or_an_earlier_pattern_is_noticed() {
        let bytes = 5 * PART_BYTES + 3;
        let (writer, owner) = (device(0), device(1));
        [&writer, &owner].iter().for_each(|device| device.open_window(bytes).unwrap());
        let file = owner.window_file().unwrap().try_clone_to_owned().unwrap();
        let window = SharedWindow::of_file(file.try_clone().unwrap(), bytes).unwrap();
        writer.map_window(owner.id(), PeerWindow::Device { file, bytes }).unwrap();
        let pattern = Pattern::unused();
        assert!(pattern.check(&owner, writer.id(), bytes).is_err(), "nothing was written");
        pattern.write(&writer, owner.id(), bytes).unwrap();
        pattern.check(&owner, writer.id(), bytes).unwrap();
        assert!(Pattern::unused().check(&owner, writer.id(), bytes).is_err(), "it has another's");
        for changed in [0, PART_BYTES - 1, bytes - 1] {
            let mut byte = [0];
            window.read(changed, &mut byte);
            window.write(changed, &[!byte[0]]);
            let refused = pattern.check(&owner, writer.id(), bytes).unwrap_err();
            assert!(matches!(&refused, Error::Unavailable(words) if words.contains("host:0 writes to host:1")));
            window.write(changed, &byte);
        }
        pattern.check(&owner, writer.id(), bytes).unwrap();
    }
}
