//! Borrower of another process's slabs, which hands out pieces of what it has borrowed.
//!
//! ```text
//!   owner: Arena ── slabs with files ─────────► SlabViews: same pages, other addresses
//!          Loans ── lend a region ────────────► Borrower ─ allocate ─► ArenaBuffer over a view
//!                ◄─ unused bytes ────────────── with the next request, and at the end of the job
//! ```
//!
//! Pieces are handed out, shortened, freed and used again without a message. The borrower asks for
//! another region when none has room, and then gives back all bytes that it does not use. So a job
//! finds as much memory as it would in the owner's process, whatever its regions have left.
//!
//! The borrower never reuses a piece of a batch that was sent, because readers of the result have
//! it. It gives the piece back when the job has dropped it.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::Arc;

use parking_lot::Mutex;

use super::size_of_piece;
use super::{ArenaBuffer, FreeList, Home, Place, Reservation, SlabId, SlabViews, Span, ViewedPlace, holding};
use crate::Result;

/// Most bytes of results that wait for the next request after the job has dropped them.
const UNSENT_BYTES_MAX: usize = 1 << 20;

/// Lends memory of an arena that belongs to another process. Dropping the lender ends the loans.
pub trait Lender: Send + Sync + Debug {
    /// Takes back `unused`, and lends a region of at least `len` bytes.
    ///
    /// # Errors
    /// The errors of [`Arena::allocate`](super::Arena::allocate).
    fn lend(&self, len: usize, purpose: &str, unused: Vec<Span>) -> Result<Span>;

    /// Takes back `unused`, and reserves bytes for memory outside the arena. Returns the id that
    /// [`Lender::release`] takes.
    ///
    /// # Errors
    /// The errors of [`Arena::reserve`](super::Arena::reserve).
    fn reserve(&self, bytes: u64, purpose: &str, unused: Vec<Span>) -> Result<u64>;

    /// Takes back the bytes that [`Lender::reserve`] reserved.
    fn release(&self, held: u64);

    /// Takes back `unused`.
    fn take_back(&self, unused: Vec<Span>);

    /// Bytes that can still be lent, like [`Arena::free_bytes`](super::Arena::free_bytes).
    fn free_bytes(&self) -> u64;
}

/// Hands out pieces of borrowed regions to one job.
#[derive(Debug)]
pub struct Borrower {
    lender: Box<dyn Lender>,
    views: Arc<SlabViews>,
    /// Held while a request waits for its answer. The region that arrives may have room for other
    /// threads. Until then its bytes are missing from the promise, so another request could fail.
    asking: Mutex<()>,
    borrowed: Mutex<Borrowed>,
}

#[derive(Debug, Default)]
struct Borrowed {
    /// Free ranges, by the number of their region and their address in the owner.
    free: FreeList,
    last_region: SlabId,
    /// Pieces in use, by address in the owner.
    pieces: BTreeMap<u64, BorrowedPiece>,
    /// Pieces of results that the job does not use any more.
    unsent: Vec<Span>,
    unsent_bytes: usize,
}

#[derive(Clone, Copy, Debug)]
struct BorrowedPiece {
    region: SlabId,
    /// Bytes taken from the region.
    size: usize,
    /// True if a batch refers to the piece.
    is_sent: bool,
}

impl Borrower {
    /// Creates a borrower that asks `lender` for memory, and may have a first region already.
    pub fn new(lender: Box<dyn Lender>, views: Arc<SlabViews>, first: Option<Span>) -> Self {
        let mut borrowed = Borrowed::default();
        if let Some(Span { address, len }) = first {
            borrowed.free.give_back(0, address as usize, len);
        }
        Self { lender, views, asking: Mutex::default(), borrowed: Mutex::new(borrowed) }
    }

    /// Allocates a piece, like [`Arena::allocate`](super::Arena::allocate).
    pub(super) fn allocate(self: &Arc<Self>, len: usize, purpose: &str) -> Result<ArenaBuffer> {
        let size = size_of_piece(len);
        let address = self.take(size).map_or_else(|| self.borrow(size, purpose), Ok)?;
        match self.views.view(address, size) {
            Ok(ViewedPlace { start, memory }) => {
                Ok(ArenaBuffer { start, len, home: Home::Borrowed(address, self.clone()), memory })
            }
            Err(error) => {
                self.give_back(address);
                Err(error)
            }
        }
    }

    /// Takes `size` bytes of a region that has room. Returns their address in the owner.
    fn take(&self, size: usize) -> Option<u64> {
        let mut borrowed = self.borrowed.lock();
        let (region, address) = borrowed.free.take(size)?;
        borrowed.pieces.insert(address as u64, BorrowedPiece { region, size, is_sent: false });
        Some(address as u64)
    }

    /// Takes `size` bytes of a region that is borrowed for them, if still none has room.
    fn borrow(&self, size: usize, purpose: &str) -> Result<u64> {
        let _asking = self.asking.lock();
        if let Some(address) = self.take(size) {
            return Ok(address);
        }
        let Span { address, len } = self.lender.lend(size, purpose, self.take_unused())?;
        let mut borrowed = self.borrowed.lock();
        borrowed.last_region += 1;
        let region = borrowed.last_region;
        borrowed.pieces.insert(address, BorrowedPiece { region, size, is_sent: false });
        if size < len {
            borrowed.free.give_back(region, address as usize + size, len - size);
        }
        Ok(address)
    }

    /// Reserves bytes, like [`Arena::reserve`](super::Arena::reserve).
    pub(super) fn reserve(self: &Arc<Self>, bytes: u64, purpose: &str) -> Result<ArenaReservation> {
        let _asking = self.asking.lock();
        let held = self.lender.reserve(bytes, purpose, self.take_unused())?;
        Ok(ArenaReservation { _from: HeldFrom::Owner { held, borrower: self.clone() } })
    }

    /// Bytes that pieces can still take, here and in the owner.
    pub(super) fn free_bytes(&self) -> u64 {
        let here = self.borrowed.lock().free.free_bytes() as u64;
        here + self.lender.free_bytes()
    }

    /// True if the address is in a slab of the owner.
    pub(super) fn owns(&self, address: *const u8) -> bool {
        self.views.contain(address)
    }

    /// Splits the piece at `address` in two. The second begins `at` bytes later.
    pub(super) fn split(&self, address: u64, at: usize) {
        let mut borrowed = self.borrowed.lock();
        let Some(piece) = borrowed.pieces.get_mut(&address) else { return };
        let rest = BorrowedPiece { size: piece.size - at, ..*piece };
        piece.size = at;
        borrowed.pieces.insert(address + at as u64, rest);
    }

    /// Frees the piece at `address`.
    pub(super) fn give_back(&self, address: u64) {
        let mut borrowed = self.borrowed.lock();
        let Some(BorrowedPiece { region, size, is_sent }) = borrowed.pieces.remove(&address) else { return };
        if !is_sent {
            borrowed.free.give_back(region, address as usize, size);
            return;
        }
        borrowed.unsent.push(Span { address, len: size });
        borrowed.unsent_bytes += size;
        if borrowed.unsent_bytes > UNSENT_BYTES_MAX {
            let unused = borrowed.take_unsent();
            drop(borrowed);
            self.lender.take_back(unused);
        }
    }

    /// Returns all bytes that the job does not use. The caller sends them to the owner.
    pub fn take_unused(&self) -> Vec<Span> {
        let mut borrowed = self.borrowed.lock();
        let mut unused = borrowed.take_unsent();
        unused.extend(borrowed.free.take_all().map(|(_, address, len)| Span { address: address as u64, len }));
        unused
    }

    /// Marks the pieces at the places of a batch, so that they are not used again. Returns them,
    /// for [`Loans::cut_out`](super::Loans::cut_out). Also returns the pieces of earlier batches
    /// that the job has dropped. The caller keeps the batch until all are sent.
    pub fn pieces_of<'a>(&self, places: impl IntoIterator<Item = &'a Place>) -> (Vec<Span>, Vec<Span>) {
        let mut borrowed = self.borrowed.lock();
        let mut pieces = BTreeMap::new();
        for place in places {
            let Place::Slab { address, len } = place else { continue };
            let found = holding(&borrowed.pieces, *address, *len as usize, |piece| piece.size);
            let piece = found.and_then(|(start, _)| Some((start, borrowed.pieces.get_mut(&start)?)));
            if let Some((start, piece)) = piece {
                piece.is_sent = true;
                pieces.insert(start, piece.size);
            }
        }
        let pieces = pieces.into_iter().map(|(address, len)| Span { address, len }).collect();
        (pieces, borrowed.take_unsent())
    }
}

impl Borrowed {
    fn take_unsent(&mut self) -> Vec<Span> {
        self.unsent_bytes = 0;
        std::mem::take(&mut self.unsent)
    }
}

/// Bytes reserved like a piece, for memory outside the arena. They go back when this value is
/// dropped.
#[derive(Debug)]
pub struct ArenaReservation {
    _from: HeldFrom,
}

#[derive(Debug)]
enum HeldFrom {
    Budget { _reservation: Reservation },
    Owner { held: u64, borrower: Arc<Borrower> },
}

impl ArenaReservation {
    pub(super) fn reserved(reservation: Reservation) -> Self {
        Self { _from: HeldFrom::Budget { _reservation: reservation } }
    }
}

impl Drop for HeldFrom {
    fn drop(&mut self) {
        if let Self::Owner { held, borrower } = self {
            borrower.lender.release(*held);
        }
    }
}
