//! Pieces that another process lends: an arena without slabs of its own.
//!
//! ```text
//!   owner: Arena ── slabs of memfds ──────────► borrower: SlabViews, the same pages at other addresses
//!          piece at address A, len ── lend ───► ArenaBuffer over its view of A
//!          the piece goes back  ◄── give back ─ when that, and every Arrow buffer made of it, is dropped
//! ```
//!
//! Between the two, addresses are the owner's.

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

/// Lends pieces of an arena that is another process's.
pub trait Lender: Send + Sync + Debug {
    /// A piece of `len` bytes.
    ///
    /// # Errors
    /// As [`Arena::allocate`].
    fn lend(&self, len: usize, purpose: &str) -> Result<LentPiece>;

    /// Bytes for what is not in the arena; the answer is the name under which they are let go of.
    ///
    /// # Errors
    /// As [`Arena::reserve`].
    fn hold(&self, bytes: u64, purpose: &str) -> Result<u64>;

    /// Takes back all but the first `len` bytes of the piece at that address.
    fn shorten(&self, address: u64, len: usize);

    /// Takes back the piece at that address.
    fn give_back(&self, address: u64);

    /// Takes back bytes that were held.
    fn let_go(&self, held: u64);

    /// As [`Arena::free_bytes`].
    fn free_bytes(&self) -> u64;
}

/// A piece that was lent.
#[derive(Debug)]
pub struct LentPiece {
    /// Where it is in the owner.
    pub(super) address: u64,
    /// Where it is here.
    pub(super) start: NonNull<u8>,
    pub(super) memory: Arc<Mapping>,
}

// SAFETY: it names a place, and keeps it mapped; only the piece that is made of it reads and writes there.
unsafe impl Send for LentPiece {}

/// Bytes that are paid for without a piece; they go back when this is dropped.
#[derive(Debug)]
pub struct Held {
    _from: HeldFrom,
}

#[derive(Debug)]
enum HeldFrom {
    Budget { _reservation: Reservation },
    Lender { held: u64, lender: Arc<dyn Lender> },
}

impl Held {
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
            lender.let_go(*held);
        }
    }
}

/// Where bytes are, for another process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Place {
    /// In a slab of the owner's arena.
    Slab {
        /// The first byte, as the owner addresses it.
        address: u64,
        /// How many.
        len: u64,
    },
    /// Here, because they are in no slab that both can see.
    Bytes(Vec<u8>),
}

impl Place {
    /// Bytes that came along, aligned as Arrow wants them.
    pub fn aligned(bytes: &[u8]) -> Buffer {
        let mut aligned = MutableBuffer::with_capacity(bytes.len());
        aligned.extend_from_slice(bytes);
        aligned.into()
    }
}

impl Arena {
    /// Where a buffer is, for a process that sees the slabs of this arena.
    pub fn place_of(&self, buffer: &Buffer) -> Place {
        match !buffer.is_empty() && self.owns(buffer.as_ptr()) {
            true => Place::Slab { address: buffer.as_ptr() as u64, len: buffer.len() as u64 },
            false => Place::Bytes(buffer.to_vec()),
        }
    }
}

/// The slabs of another process's arena, as they are seen from this one.
#[derive(Debug, Default)]
pub struct SlabViews {
    views: RwLock<Views>,
    pin: Option<Arc<dyn Pin>>,
}

#[derive(Debug, Default)]
struct Views {
    /// By where they are in the owner.
    by_owner: BTreeMap<u64, Arc<Mapping>>,
    /// Where they are in the owner, by where they are here.
    by_view: BTreeMap<u64, u64>,
}

/// Of what lies at these addresses, side by side, where that begins which has all of the `len` bytes at `address`, and where in it these
/// are.
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
    /// Views that are pinned, if there is something to pin by.
    pub fn pinned_by(pin: Option<Arc<dyn Pin>>) -> Self {
        Self { pin, ..Self::default() }
    }

    /// Maps a slab that is at `address` in its owner, and made of that file.
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

    /// Forgets a slab that its owner has unmapped. Whatever still has a buffer in it keeps the view.
    pub fn remove(&self, address: u64) {
        let mut views = self.views.write();
        let view = views.by_owner.remove(&address);
        if let Some(view) = &view {
            views.by_view.remove(&(view.start.as_ptr() as u64));
        }
        drop(views);
    }

    /// The view of `len` bytes at an address of the owner's.
    ///
    /// # Errors
    /// [`Error::Internal`] when they are in no slab that is known here.
    pub fn borrow(&self, address: u64, len: usize) -> Result<LentPiece> {
        let views = self.views.read();
        let Some((start, offset)) = holding(&views.by_owner, address, len, |memory| memory.len) else {
            return Err(Error::Internal(format!(
                "{len} bytes at {address:#x} are in no slab that this process was shown"
            )));
        };
        let memory = views.by_owner[&start].clone();
        // SAFETY: the offset was just found to be in the mapping.
        let start = unsafe { memory.start.add(offset) };
        Ok(LentPiece { address, start, memory })
    }

    /// The bytes at a place.
    ///
    /// # Errors
    /// As [`SlabViews::borrow`].
    pub fn buffer(&self, place: &Place) -> Result<Buffer> {
        match place {
            Place::Bytes(bytes) => Ok(Place::aligned(bytes)),
            Place::Slab { address, len } => {
                let LentPiece { start, memory, .. } = self.borrow(*address, *len as usize)?;
                // SAFETY: the bytes stay mapped as long as the mapping lives; and their owner, who told of them, lets nobody write
                // to them as long as a job reads them.
                Ok(unsafe { Buffer::from_custom_allocation(start, *len as usize, memory) })
            }
        }
    }

    /// Where a buffer is, for the owner.
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
