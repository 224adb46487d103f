//! Host buffers: charged, typed pieces of memory while they are written, and bytes behind
//! [`DeviceBuffer`] afterwards.
//!
//! ```text
//!   Pool ── take ──► Piece ── Values<T> (being written) ── freeze ──► DeviceBuffer (read-only)
//!     ▲                │
//!     └──── drop ──────┘   large blocks are kept: touching fresh pages costs as much as a pass
//!                          over them
//! ```

use std::any::Any;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::sync::atomic::AtomicU8;

use arrow::buffer::Buffer;
use bytemuck::Pod;
use parking_lot::Mutex;

use super::raw::{self, Block, LINE_BYTES};
use crate::device::{DeviceBuffer, DeviceMemory};
use crate::memory::{Budget, Reservation, human_bytes};
use crate::{Error, Result};

/// Maximum bytes of free blocks that are kept, in total.
const KEPT_BYTES_MAX: u64 = 1 << 30;

/// Smaller blocks go back to the allocator, which is as quick with them.
const KEPT_BLOCK_BYTES_MIN: usize = 64 << 10;

/// Maximum number of kept blocks. A search through them costs much less than the use of one.
const KEPT_BLOCKS_MAX: usize = 128;

/// Charged memory. Clones share budget and kept blocks.
#[derive(Clone, Debug)]
pub(super) struct Pool {
    /// The budget to charge: the device's memory, or a job's part of it.
    pub(super) budget: Budget,
    /// All of the device's memory, which bounds the kept blocks.
    whole: Budget,
    kept: Arc<Mutex<Vec<Block>>>,
}

impl Pool {
    pub(super) fn new(budget: Budget) -> Self {
        Self { whole: budget.clone(), budget, kept: Arc::default() }
    }

    /// Returns a pool with the same blocks, charged to a job's part of the memory.
    pub(super) fn charged_to(&self, budget: Budget) -> Self {
        Self { budget, ..self.clone() }
    }

    /// Takes room for `rows` values with unspecified contents.
    ///
    /// # Errors
    /// [`Error::Exhausted`] when the budget refuses, or the system has no memory.
    pub(super) fn values<T: Pod>(&self, rows: usize, purpose: &str) -> Result<Values<T>> {
        let bytes = rows.checked_mul(size_of::<T>()).filter(|&bytes| bytes < isize::MAX as usize / 2);
        let bytes = bytes.ok_or_else(|| Error::Exhausted(format!("{purpose} needs more than can be addressed")))?;
        Ok(Values { piece: self.piece(bytes, purpose)?, rows, values: PhantomData })
    }

    fn piece(&self, bytes: usize, purpose: &str) -> Result<Piece> {
        let reservation = self.budget.reserve(bytes.max(1).next_multiple_of(LINE_BYTES) as u64, purpose)?;
        let kept = self.take_kept(bytes);
        self.trim();
        let block = match kept {
            Some(block) => block,
            None => Block::new(bytes).ok_or_else(|| {
                let size = human_bytes(bytes as u64);
                let setting = "the device's memory budget promises more than the system has; lower it";
                Error::Exhausted(format!("{purpose}: the system refused {size} of memory; {setting}"))
            })?,
        };
        Ok(Piece { block: Some(block), pool: self.clone(), reservation })
    }

    /// Takes the smallest kept block that is large enough and not wastefully large.
    fn take_kept(&self, bytes: usize) -> Option<Block> {
        // A kept block no larger than a new one is not wasteful. For a few megabytes, rounding up
        // to whole huge pages adds more than a quarter.
        let most = Block::rounded(bytes)?.saturating_add((bytes / 4).max(KEPT_BLOCK_BYTES_MIN));
        let fits = |block: &Block| block.len() >= bytes && block.len() <= most;
        let mut kept = self.kept.lock();
        let best = kept.iter().enumerate().filter(|(_, block)| fits(block)).min_by_key(|(_, block)| block.len())?.0;
        Some(kept.remove(best))
    }

    fn give_back(&self, block: Block) {
        if block.len() < KEPT_BLOCK_BYTES_MIN {
            return;
        }
        self.kept.lock().push(block);
        self.trim();
    }

    /// Frees blocks beyond the limits. Kept blocks are not charged. They may only take memory that
    /// the budget has free, so that the sum stays within the operator's limit.
    fn trim(&self) {
        let mut kept = self.kept.lock();
        let bound = self.whole.unused_bytes().min(KEPT_BYTES_MAX);
        while kept.len() > KEPT_BLOCKS_MAX || kept.iter().map(|block| block.len() as u64).sum::<u64>() > bound {
            // The oldest first: a size that no caller asks for any more must not stay forever.
            drop(kept.remove(0));
        }
    }
}

/// Memory that returns to its pool on drop.
#[derive(Debug)]
struct Piece {
    /// `Some` until dropped.
    block: Option<Block>,
    pool: Pool,
    reservation: Reservation,
}

impl Piece {
    fn block(&self) -> &Block {
        self.block.as_ref().expect("present until dropped")
    }
}

impl Drop for Piece {
    fn drop(&mut self) {
        self.pool.give_back(self.block.take().expect("dropped once"));
    }
}

/// `rows` values of one type, aligned to a cache line, owned.
#[derive(Debug)]
pub(super) struct Values<T> {
    piece: Piece,
    rows: usize,
    values: PhantomData<T>,
}

impl<T: Pod> Values<T> {
    /// Turns the values into a device buffer, no longer writable.
    pub(super) fn freeze(self) -> DeviceBuffer {
        let bytes = self.rows * size_of::<T>();
        Arc::new(HostBuffer { storage: Storage::Owned(self.piece), bytes })
    }
}

impl<T: Pod> Deref for Values<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        bytemuck::cast_slice(&self.piece.block()[..self.rows * size_of::<T>()])
    }
}

impl<T: Pod> DerefMut for Values<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        let block = self.piece.block.as_mut().expect("present until dropped");
        bytemuck::cast_slice_mut(&mut block[..self.rows * size_of::<T>()])
    }
}

/// Memory of a host device.
#[derive(Debug)]
pub(super) struct HostBuffer {
    storage: Storage,
    bytes: usize,
}

#[derive(Debug)]
enum Storage {
    /// Charged to the device.
    Owned(Piece),
    /// A buffer of another owner (a chunk of a table in the arena), used in place.
    Shared(Buffer),
    /// Bytes that several calls may write.
    Flags { values: Box<[AtomicU8]>, reservation: Reservation },
}

impl HostBuffer {
    /// Wraps an Arrow buffer without copying it.
    pub(super) fn shared(buffer: Buffer) -> DeviceBuffer {
        let bytes = buffer.len();
        Arc::new(Self { storage: Storage::Shared(buffer), bytes })
    }

    /// Creates `rows` flags, none set.
    pub(super) fn flags(rows: usize, pool: &Pool) -> Result<DeviceBuffer> {
        let reservation = pool.budget.reserve(rows as u64, "flags of matched rows")?;
        // Zeroed by the allocator: large blocks come as untouched pages, which are zero already.
        let values = bytemuck::allocation::try_zeroed_slice_box::<AtomicU8>(rows).map_err(|()| {
            let size = human_bytes(rows as u64);
            let setting = "the device's memory budget promises more than the system has; lower it";
            Error::Exhausted(format!("flags of matched rows: the system refused {size} of memory; {setting}"))
        })?;
        Ok(Arc::new(Self { storage: Storage::Flags { values, reservation }, bytes: rows }))
    }
}

impl DeviceMemory for HostBuffer {
    fn size_bytes(&self) -> usize {
        self.bytes
    }

    fn charged_bytes(&self) -> u64 {
        match &self.storage {
            Storage::Owned(piece) => piece.reservation.bytes(),
            Storage::Shared(_) => 0,
            Storage::Flags { reservation, .. } => reservation.bytes(),
        }
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

fn host(buffer: &DeviceBuffer) -> &HostBuffer {
    buffer.as_any().downcast_ref().expect("a buffer that a host device gets is a host buffer")
}

/// Returns the bytes of a buffer that does not hold flags.
pub(super) fn bytes_of(buffer: &DeviceBuffer) -> &[u8] {
    let buffer = host(buffer);
    match &buffer.storage {
        Storage::Owned(piece) => &piece.block()[..buffer.bytes],
        Storage::Shared(shared) => shared.as_slice(),
        Storage::Flags { .. } => panic!("the buffer must hold values, and holds flags"),
    }
}

/// Returns the first `rows` values of a buffer. Buffers that this device made are aligned for any
/// type, and keys and positions always are in such buffers. Columns are read as byte arrays, which
/// need no alignment.
pub(super) fn values_of<T: Pod>(buffer: &DeviceBuffer, rows: usize) -> &[T] {
    let bytes = bytes_of(buffer);
    let needed = rows.checked_mul(size_of::<T>()).expect("a buffer's size fits in usize");
    assert!(bytes.len() >= needed, "a buffer of {} bytes is too small for {needed}", bytes.len());
    bytemuck::try_cast_slice(&bytes[..needed])
        .unwrap_or_else(|error| panic!("a buffer of keys or positions is misaligned: {error}"))
}

/// Returns the first `rows` flags.
pub(super) fn flags_of(buffer: &DeviceBuffer, rows: usize) -> &[AtomicU8] {
    match &host(buffer).storage {
        Storage::Flags { values, .. } => &values[..rows],
        _ => panic!("the buffer must hold flags, and holds values"),
    }
}

/// Cuts a slice into consecutive pieces: piece `i` is `bounds[i]..bounds[i + 1]`, counted from
/// `bounds[0]`, in units of `width` elements.
pub(super) fn split_at_bounds<'a, T>(mut slice: &'a mut [T], bounds: &[usize], width: usize) -> Vec<&'a mut [T]> {
    let mut pieces = Vec::with_capacity(bounds.len().saturating_sub(1));
    for pair in bounds.windows(2) {
        let (piece, rest) = slice.split_at_mut((pair[1] - pair[0]) * width);
        pieces.push(piece);
        slice = rest;
    }
    pieces
}

/// A mutable view that several threads may write: see [`raw::as_atomic_u32`].
pub(super) use raw::as_atomic_u32;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_freed_block_is_reused_for_an_allocation_of_the_same_size() {
        for bytes in [KEPT_BLOCK_BYTES_MIN, 100_000, (2 << 20) - 64, 2 << 20, (2 << 20) + 1, 4_880_000, 20_000_000] {
            let pool = Pool::new(Budget::new("device memory", "--device-memory", 1 << 30));
            drop(pool.values::<u8>(bytes, "a test").unwrap());
            assert_eq!(pool.kept.lock().len(), 1, "{bytes} B are kept");
            let _again = pool.values::<u8>(bytes, "a test").unwrap();
            assert!(pool.kept.lock().is_empty(), "{bytes} B are taken again");
        }
    }
}
