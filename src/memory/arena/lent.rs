//! Pieces that another process lends: an arena without its own slabs.
//!
//! ```text
//!   owner: Arena ── slabs of memfds ──────────► borrower: SlabViews, same pages, other addresses
//!          piece at address A, len ── lend ───► ArenaBuffer over its view of A
//!          the piece goes back  ◄── give back ─ when it and all its Arrow buffers are dropped
//! ```
//!
//! Addresses in messages between the two processes are the owner's.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::Arc;

use arrow::buffer::{Buffer, MutableBuffer};
use parking_lot::RwLock;
use serde::{Deserialize, Serialize};

use super::{Arena, Mapping, Pin, Reservation};
use crate::{Error, Result};

/// Lends pieces of an arena that belongs to another process.
pub trait Lender: Send + Sync + Debug {
    /// Lends a piece of `len` bytes.
    ///
    /// # Errors
    /// The errors of [`Arena::allocate`].
    fn lend(&self, len: usize, purpose: &str) -> Result<LentPiece>;

    /// Reserves bytes for memory outside the arena. Returns the id that [`Lender::release`] takes.
    ///
    /// # Errors
    /// The errors of [`Arena::reserve`].
    fn reserve(&self, bytes: u64, purpose: &str) -> Result<u64>;

    /// Takes back all bytes of the piece at `address` except the first `len`.
    fn shorten(&self, address: u64, len: usize);

    /// Takes back the piece at `address`.
    fn give_back(&self, address: u64);

    /// Takes back the bytes that [`Lender::reserve`] reserved.
    fn release(&self, held: u64);

    /// Bytes that pieces can still take, like [`Arena::free_bytes`].
    fn free_bytes(&self) -> u64;
}

/// Piece that was lent.
#[derive(Debug)]
pub struct LentPiece {
    /// Address in the owner.
    pub(super) address: u64,
    /// Address in this process.
    pub(super) start: NonNull<u8>,
    pub(super) memory: Arc<Mapping>,
}

// SAFETY: the piece names a place and keeps it mapped; only the buffer made from it reads and
// writes there.
unsafe impl Send for LentPiece {}

/// Bytes reserved like a piece, for memory outside the arena. They go back when this value is
/// dropped.
#[derive(Debug)]
pub struct ArenaReservation {
    _from: HeldFrom,
}

#[derive(Debug)]
enum HeldFrom {
    Budget { _reservation: Reservation },
    Lender { held: u64, lender: Arc<dyn Lender> },
}

impl ArenaReservation {
    pub(super) fn reserved(reservation: Reservation) -> Self {
        Self { _from: HeldFrom::Budget { _reservation: reservation } }
    }

    pub(super) fn lent(held: u64, lender: Arc<dyn Lender>) -> Self {
        Self { _from: HeldFrom::Lender { held, lender } }
    }
}

impl Drop for HeldFrom {
    fn drop(&mut self) {
        if let Self::Lender { held, lender } = self {
            lender.release(*held);
        }
    }
}

/// Place of bytes, for another process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Place {
    /// In a slab of the owner's arena.
    Slab {
        /// Address of the first byte in the owner.
        address: u64,
        /// Number of bytes.
        len: u64,
    },
    /// Bytes by value, because no slab that both processes see has them.
    Bytes(Vec<u8>),
}

impl Place {
    /// Copies bytes that came by value into a buffer with Arrow's alignment.
    pub fn aligned(bytes: &[u8]) -> Buffer {
        let mut aligned = MutableBuffer::with_capacity(bytes.len());
        aligned.extend_from_slice(bytes);
        aligned.into()
    }
}

impl Arena {
    /// Returns the place of a buffer, for a process that sees the slabs of this arena.
    pub fn place_of(&self, buffer: &Buffer) -> Place {
        match !buffer.is_empty() && self.owns(buffer.as_ptr()) {
            true => Place::Slab { address: buffer.as_ptr() as u64, len: buffer.len() as u64 },
            false => Place::Bytes(buffer.to_vec()),
        }
    }
}

/// Slabs of another process's arena, mapped in this process.
#[derive(Debug, Default)]
pub struct SlabViews {
    views: RwLock<Views>,
    pin: Option<Arc<dyn Pin>>,
}

#[derive(Debug, Default)]
struct Views {
    /// Mapping by its address in the owner.
    by_owner: BTreeMap<u64, Arc<Mapping>>,
    /// Address in the owner by address in this process.
    by_view: BTreeMap<u64, u64>,
}

/// Finds the entry that contains `address..address + len`. Returns its start and the offset of
/// `address` in it. Entries do not overlap.
pub fn holding<T>(
    entries: &BTreeMap<u64, T>,
    address: u64,
    len: usize,
    len_of: impl Fn(&T) -> usize,
) -> Option<(u64, usize)> {
    let (&start, entry) = entries.range(..=address).next_back()?;
    let offset = usize::try_from(address - start).ok()?;
    let is_inside = offset.checked_add(len).is_some_and(|end| end <= len_of(entry));
    is_inside.then_some((start, offset))
}

impl SlabViews {
    /// Creates views that `pin` pins, if given.
    pub fn pinned_by(pin: Option<Arc<dyn Pin>>) -> Self {
        Self { pin, ..Self::default() }
    }

    /// Maps the slab that is at `address` in its owner and consists of `file`.
    ///
    /// # Errors
    /// [`Error::Exhausted`] when the system refuses.
    pub fn add(&self, address: u64, len: usize, file: OwnedFd) -> Result<()> {
        let view = Mapping::of_file(file, len)?;
        if let Some(pin) = &self.pin {
            view.pin_by(pin);
        }
        let mut views = self.views.write();
        views.by_view.insert(view.start.as_ptr() as u64, address);
        views.by_owner.insert(address, Arc::new(view));
        Ok(())
    }

    /// Removes a slab that its owner has unmapped. Buffers in the slab keep its view mapped.
    pub fn remove(&self, address: u64) {
        let mut views = self.views.write();
        let view = views.by_owner.remove(&address);
        if let Some(view) = &view {
            views.by_view.remove(&(view.start.as_ptr() as u64));
        }
        drop(views);
    }

    /// Returns the view of `len` bytes at the owner's `address`.
    ///
    /// # Errors
    /// [`Error::Internal`] when no slab known here contains the bytes.
    pub fn borrow(&self, address: u64, len: usize) -> Result<LentPiece> {
        let views = self.views.read();
        let Some((start, offset)) = holding(&views.by_owner, address, len, |memory| memory.len) else {
            return Err(Error::Internal(format!(
                "{len} bytes at {address:#x} are in no slab that is shared with this process"
            )));
        };
        let memory = views.by_owner[&start].clone();
        // SAFETY: the offset was just found to be in the mapping.
        let start = unsafe { memory.start.add(offset) };
        Ok(LentPiece { address, start, memory })
    }

    /// Returns the bytes at a place.
    ///
    /// # Errors
    /// The errors of [`SlabViews::borrow`].
    pub fn buffer(&self, place: &Place) -> Result<Buffer> {
        match place {
            Place::Bytes(bytes) => Ok(Place::aligned(bytes)),
            Place::Slab { address, len } => {
                let LentPiece { start, memory, .. } = self.borrow(*address, *len as usize)?;
                // SAFETY: the bytes stay mapped while the mapping lives. Their owner lets no other
                // code write to them while a job reads them.
                Ok(unsafe { Buffer::from_custom_allocation(start, *len as usize, memory) })
            }
        }
    }

    /// Returns the place of a buffer, for the owner.
    pub fn place_of(&self, buffer: &Buffer) -> Place {
        let (start, len) = (buffer.as_ptr() as u64, buffer.len());
        let views = self.views.read();
        match holding(&views.by_view, start, len, |owner| views.by_owner[owner].len) {
            Some((view, offset)) if len > 0 => {
                Place::Slab { address: views.by_view[&view] + offset as u64, len: len as u64 }
            }
            _ => Place::Bytes(buffer.to_vec()),
        }
    }
}
