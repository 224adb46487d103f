//! The arena: large slabs of memory, handed out in aligned pieces.
//!
//! ```text
//!   slab 0 (64 MiB)  [ piece | piece |  free  | piece | free      ]
//!   slab 1 (64 MiB)  [ piece          |  free                     ]
//!   slab 2 (300 MiB) [ one piece larger than a slab               ]
//! ```
//!
//! A piece goes back to its slab when the last Arrow buffer over it is dropped. Slabs are large so
//! that a device driver registers few of them and the system can back them with huge pages.
//!
//! # What fresh memory costs
//! The system gives memory page by page at the first touch, which costs more than copying into it.
//! On the machine where this was written, copying 1 GiB takes 0.09 s into mapped memory and 0.6 s
//! into fresh memory. So the arena asks for all pages of a slab when it maps the slab (0.32 s for
//! pages of 4 KiB, 0.11 s for huge pages). Threads can map slabs ahead of need (`growth`). Empty
//! slabs are kept for reuse, up to half of the budget. Where such threads run, the arena also keeps
//! all memory that was in use during the last minute. If pages are unavailable, mapping the slab is
//! an error. No later touch raises a signal.
//!
//! # More than one process
//! Another Dovetail process can map slabs that have a file. That process has an arena without
//! slabs. It borrows regions of them (`loans`) and hands out pieces there (`borrower`). It reports
//! where columns are stored in the slabs instead of sending their bytes (`arrays`).
//!
//! `backing` says what slabs are made of. Only this room and the device room may use `unsafe`.

mod arrays;
mod backing;
mod borrower;
mod counters;
mod growth;
mod loans;
mod mapping;
mod views;
mod window;

use std::collections::{BTreeMap, HashMap};
use std::ops::{Deref, DerefMut, RangeInclusive};
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

pub(crate) use arrays::of_whole_values;
pub use arrays::{ArrayParts, describe, restore};
use arrow::buffer::Buffer;
pub use backing::{Backing, check_choice_of_node, mount_tmpfs_in_namespace};
pub use borrower::{ArenaReservation, Borrower, Lender};
pub use counters::SharedCounters;
pub use growth::BackgroundGrowth;
use growth::Growth;
pub use loans::{Loans, Span};
use mapping::Mapping;
use parking_lot::{Condvar, Mutex, RwLock};
use views::ViewedPlace;
pub use views::{Place, SlabViews, holding};
pub use window::SharedWindow;

use super::free_list::{FreeList, SlabId};
use super::{Budget, Interrupt, Reservation, ReservedPool};
use crate::Result;

/// Alignment of every piece, in bytes. It suits a GPU's copy engine and 64-byte vector loads.
pub const ALIGNMENT: usize = 256;

/// Size of an ordinary slab, in bytes. Registering a slab with a driver costs time per call and per
/// page, so slabs are large. They are small enough that an idle server holds little memory.
const SLAB_BYTES: usize = 64 << 20;

/// Bytes that may be mapped beyond the budget: an eighth of it, and a slab. Holes between pieces
/// may be too short for a later piece, yet reserved bytes must be available. The arena maps no more
/// than this.
fn slack_bytes(limit: u64) -> u64 {
    (limit / 8).saturating_add(SLAB_BYTES as u64)
}

/// Keeps memory in place, so that devices can copy from and to it at the rate of their link.
pub trait Pin: Send + Sync + std::fmt::Debug {
    /// Pins a slab. `file` is the slab's memory, if another process can map it. False if pinning is
    /// unavailable. The slab is then usable all the same, but copies are slower.
    fn pin(&self, start: *mut u8, len: usize, file: Option<&Arc<OwnedFd>>) -> bool;

    /// Unpins a pinned slab before it is unmapped.
    fn unpin(&self, start: *mut u8);
}

/// Hands out pieces of slabs, within a budget. Clones share slabs and budget.
#[derive(Clone, Debug)]
pub struct Arena {
    inner: Arc<Inner>,
    /// Pool that pieces are drawn from before the budget.
    pool: Option<ReservedPool>,
    interrupt: Interrupt,
    /// Hands out the pieces, if the slabs belong to another process.
    borrower: Option<Arc<Borrower>>,
}

#[derive(Debug)]
struct Inner {
    budget: Budget,
    backing: Backing,
    slab_bytes: usize,
    slabs: Mutex<Slabs>,
    /// Notified when a slab was mapped or could not be.
    grown: Condvar,
    /// Notified when a slab should be mapped ahead of need, or when growth should end.
    growth_wanted: Condvar,
    /// Nanoseconds that allocations have waited for slabs to be mapped.
    waited_nanos: AtomicU64,
    /// End address and NUMA node of each slab, by start address.
    ranges: RwLock<BTreeMap<usize, (usize, Option<u32>)>>,
    /// NUMA nodes that give the memory of slabs in turn, and the number of turns.
    nodes: OnceLock<Box<[u32]>>,
    turns: AtomicUsize,
    pin: OnceLock<Arc<dyn Pin>>,
}

#[derive(Debug, Default)]
struct Slabs {
    free: FreeList,
    mappings: HashMap<SlabId, Arc<Mapping>>,
    next_id: SlabId,
    mapped_bytes: usize,
    growth: Growth,
}

impl Arena {
    /// Creates an arena that never has more than the budget's bytes in use.
    pub fn new(budget: Budget) -> Self {
        Self::with_backing(budget, Backing::best())
    }

    /// Creates an arena like [`Arena::new`], over the given kind of memory.
    pub fn with_backing(budget: Budget, backing: Backing) -> Self {
        let limit = usize::try_from(budget.limit_bytes()).unwrap_or(usize::MAX);
        let slab_bytes = limit.clamp(1, SLAB_BYTES).next_multiple_of(backing.granule_bytes());
        let inner = Inner {
            budget,
            backing,
            slab_bytes,
            slabs: Mutex::default(),
            grown: Condvar::new(),
            growth_wanted: Condvar::new(),
            waited_nanos: AtomicU64::new(0),
            ranges: RwLock::default(),
            nodes: OnceLock::new(),
            turns: AtomicUsize::new(0),
            pin: OnceLock::new(),
        };
        Self { inner: Arc::new(inner), pool: None, interrupt: Interrupt::default(), borrower: None }
    }

    /// Creates an arena without slabs. `borrower` hands out pieces of another process's slabs.
    pub fn borrowed(borrower: Arc<Borrower>) -> Self {
        let none = Budget::new("host memory of this process", "the server's --host-memory", 0);
        Self { borrower: Some(borrower), ..Self::with_backing(none, Backing::Anonymous) }
    }

    /// Returns the maximum number of files that slabs keep open.
    pub fn open_files_max(&self) -> u64 {
        let limit = self.inner.budget.limit_bytes();
        match self.inner.backing {
            Backing::Anonymous => 0,
            _ => 1 + limit.saturating_add(slack_bytes(limit)).div_ceil(self.inner.slab_bytes as u64),
        }
    }

    /// Returns the same arena drawing pieces from `pool`, and from the budget when the pool is
    /// empty.
    pub fn drawing_on(&self, pool: ReservedPool) -> Self {
        Self { pool: Some(pool), ..self.clone() }
    }

    /// Returns the same arena for work that may be stopped. An allocation that waits for a slab,
    /// which can take tenths of a second, ends with the interrupt's error.
    pub fn interrupted_by(&self, interrupt: Interrupt) -> Self {
        Self { interrupt, ..self.clone() }
    }

    /// Allocates a piece of `len` bytes whose contents are unspecified.
    ///
    /// # Errors
    /// [`Exhausted`](crate::Error::Exhausted) when the budget refuses, when holes between pieces
    /// take too much of it, or when the system has no memory to map.
    pub fn allocate(&self, len: usize, purpose: &str) -> Result<ArenaBuffer> {
        match &self.borrower {
            Some(borrower) => borrower.allocate(len, purpose),
            None => self.allocate_reserved(len, self.draw(size_of_piece(len) as u64, purpose)?),
        }
    }

    /// Allocates as long a piece as promised bytes and a slab allow, in the range of `lens`.
    /// Returns `None` if that would need waiting or mapping.
    pub fn allocate_at_once(&self, lens: RangeInclusive<usize>) -> Option<ArenaBuffer> {
        let (size, size_max) = (size_of_piece(*lens.start()), size_of_piece(*lens.end()));
        let mut reservation = self.pool.as_ref()?.reserve_promised(size as u64..=size_max as u64)?;
        let size_max = reservation.bytes() as usize / ALIGNMENT * ALIGNMENT;
        let (size, place) = self.inner.slabs.lock().take_longest(size..=size_max, &self.inner)?;
        reservation.shrink_to(size as u64);
        Some(self.inner.piece_at(place, size.min(*lens.end()), reservation))
    }

    /// Reserves bytes for memory outside the arena. They come from the pool and the budget, as the
    /// arena's pieces do.
    ///
    /// # Errors
    /// [`Exhausted`](crate::Error::Exhausted) when the budget refuses.
    pub fn reserve(&self, bytes: u64, purpose: &str) -> Result<ArenaReservation> {
        match &self.borrower {
            Some(borrower) => borrower.reserve(bytes, purpose),
            None => self.draw(bytes, purpose).map(ArenaReservation::reserved),
        }
    }

    fn draw(&self, bytes: u64, purpose: &str) -> Result<Reservation> {
        match &self.pool {
            Some(pool) => pool.reserve(bytes, purpose),
            None => self.inner.budget.reserve(bytes, purpose),
        }
    }

    /// Allocates a piece of `len` bytes, paid for by an earlier reservation. The surplus of the
    /// reservation is given back.
    ///
    /// # Errors
    /// [`Exhausted`](crate::Error::Exhausted) when the reservation is too small and cannot grow, or
    /// when the system has no memory to map.
    pub fn allocate_reserved(&self, len: usize, mut reservation: Reservation) -> Result<ArenaBuffer> {
        let size = size_of_piece(len);
        if reservation.bytes() < size as u64 {
            let missing = size as u64 - reservation.bytes();
            reservation.try_grow(missing, "a piece of the arena")?;
        }
        reservation.shrink_to(size as u64);
        Ok(self.inner.piece_at(self.inner.place(size, &self.interrupt)?, len, reservation))
    }

    /// The budget that bounds this arena.
    pub fn budget(&self) -> &Budget {
        &self.inner.budget
    }

    /// Bytes that pieces can still take, from the pool and from the budget.
    pub fn free_bytes(&self) -> u64 {
        if let Some(borrower) = &self.borrower {
            return borrower.free_bytes();
        }
        self.pool.as_ref().map_or(0, ReservedPool::free_bytes) + self.inner.budget.free_bytes()
    }

    /// Kind of memory that the slabs are made of.
    pub fn backing(&self) -> &Backing {
        &self.inner.backing
    }

    /// Bytes of slabs that are mapped now, used or not.
    pub fn mapped_bytes(&self) -> u64 {
        self.inner.slabs.lock().mapped_bytes as u64
    }

    /// Longest piece that can be allocated without mapping another slab, in bytes.
    pub fn longest_free_bytes(&self) -> u64 {
        self.inner.slabs.lock().free.longest() as u64
    }

    /// Pins all present and future slabs while each is mapped. Only the first call with a pin
    /// counts.
    pub fn pin_by(&self, pin: Option<Arc<dyn Pin>>) {
        let Some(pin) = pin else { return };
        if self.inner.pin.set(pin.clone()).is_ok() {
            // Pinning takes long, so other threads do not wait for it. They pin slabs that are not
            // in the list yet.
            let mapped: Vec<_> = self.inner.slabs.lock().mappings.values().cloned().collect();
            mapped.iter().for_each(|memory| memory.pin_by(&pin));
        }
    }

    /// True if the address is in a slab.
    pub fn owns(&self, address: *const u8) -> bool {
        if let Some(borrower) = &self.borrower {
            return borrower.owns(address);
        }
        self.inner.slab_of(address).is_some()
    }

    /// Takes the memory of later slabs from the given NUMA nodes in turn. Only the first call with
    /// nodes counts. False, with a line in the log, if the system does not allow it. Containers
    /// often forbid the call, and slabs are then on the node whose thread touches them first.
    pub fn spread_over(&self, nodes: &[u32]) -> bool {
        let Some(&first) = nodes.first() else { return false };
        match check_choice_of_node(first) {
            Ok(()) => self.inner.nodes.set(nodes.into()).is_ok(),
            Err(why) => {
                tracing::warn!(
                    "host memory is not spread over the NUMA nodes of the GPUs: {}; in a container, allow it with \
                     --cap-add SYS_NICE",
                    why.message()
                );
                false
            }
        }
    }

    /// Returns the NUMA node of the slab at an address. `None` outside of slabs, and for a slab
    /// that was not taken from a chosen node.
    pub fn node_of(&self, address: *const u8) -> Option<u32> {
        self.inner.slab_of(address)?
    }
}

/// Room for a piece: the slab, the offset in the slab, and the slab's memory.
type Room = (SlabId, usize, Arc<Mapping>);

impl Inner {
    /// Returns the NUMA node of the slab at an address, if it is known. `None` outside of slabs.
    fn slab_of(&self, address: *const u8) -> Option<Option<u32>> {
        let address = address as usize;
        let ranges = self.ranges.read();
        ranges.range(..=address).next_back().filter(|(_, (end, _))| address < *end).map(|(_, (_, node))| *node)
    }

    /// Returns the NUMA node of the next slab.
    fn next_node(&self) -> Option<u32> {
        let nodes = self.nodes.get()?;
        Some(nodes[self.turns.fetch_add(1, Ordering::Relaxed) % nodes.len()])
    }

    /// Creates a piece of `len` bytes in room taken for it, paid for by `reservation`.
    fn piece_at(self: &Arc<Self>, (slab, offset, memory): Room, len: usize, reservation: Reservation) -> ArenaBuffer {
        // SAFETY: places are inside the mapping, which is never at address zero.
        let start = unsafe { NonNull::new_unchecked(memory.start.as_ptr().add(offset)) };
        let owned = Owned { size: size_of_piece(len), slab, offset, arena: self.clone(), reservation };
        ArenaBuffer { start, len, home: Home::Owned(owned), memory }
    }
}

impl Slabs {
    /// Takes the longest range with a size in `sizes`. Returns its size and place.
    fn take_longest(&mut self, sizes: RangeInclusive<usize>, inner: &Inner) -> Option<(usize, Room)> {
        let size = self.free.longest().min(*sizes.end());
        let place = if size < *sizes.start() { None } else { self.take(size, inner) };
        Some((size, place?))
    }
}

/// Bytes that a piece takes from its slab.
fn size_of_piece(len: usize) -> usize {
    len.max(1).next_multiple_of(ALIGNMENT)
}

/// Writable, owned piece of the arena. [`ArenaBuffer::freeze`] turns it into an Arrow buffer.
pub struct ArenaBuffer {
    start: NonNull<u8>,
    len: usize,
    home: Home,
    /// Keeps the slab mapped.
    memory: Arc<Mapping>,
}

/// Owner that a piece goes back to.
enum Home {
    Owned(Owned),
    /// The slab belongs to another process: the address there, and the borrower of the memory.
    Borrowed(u64, Arc<Borrower>),
}

/// Place in a slab of this process.
struct Owned {
    /// Bytes taken from the slab: the requested bytes, rounded up to [`ALIGNMENT`].
    size: usize,
    slab: SlabId,
    /// Start of the piece in its slab, in bytes.
    offset: usize,
    arena: Arc<Inner>,
    reservation: Reservation,
}

impl ArenaBuffer {
    /// Returns the piece as an immutable Arrow buffer. The memory goes back to the arena when the
    /// last clone or slice of the buffer is dropped.
    pub fn freeze(self) -> Buffer {
        let (start, len) = (self.start, self.len);
        // SAFETY: `start..start + len` stays mapped and unmodified while the Arc'd owner (this
        // piece) lives. Nothing writes to it any more, because the piece was moved into the owner.
        unsafe { Buffer::from_custom_allocation(start, len, Arc::new(self)) }
    }

    /// Shortens the piece to its first `len` bytes, and gives the rest back.
    pub fn truncate(&mut self, len: usize) {
        let (len, size) = (self.len.min(len), size_of_piece(self.len.min(len)));
        if size < size_of_piece(self.len) {
            drop(self.split_off(size));
        }
        self.len = len;
    }

    /// Splits the piece: keeps the first `at` bytes, and returns the others. Each part has its
    /// share of the reservation, and goes back by itself.
    ///
    /// # Panics
    /// Unless `at` is a multiple of [`ALIGNMENT`] inside the piece.
    pub(super) fn split_off(&mut self, at: usize) -> Self {
        let is_inside = 0 < at && at < self.len;
        assert!(is_inside && at.is_multiple_of(ALIGNMENT), "a piece of {} bytes is split at {at}", self.len);
        let home = match &mut self.home {
            Home::Owned(owned) => Home::Owned(owned.split_off(at)),
            Home::Borrowed(address, borrower) => {
                borrower.split(*address, at);
                Home::Borrowed(*address + at as u64, borrower.clone())
            }
        };
        // SAFETY: `at` was just found to be inside the piece.
        let start = unsafe { self.start.add(at) };
        let len = std::mem::replace(&mut self.len, at) - at;
        Self { start, len, home, memory: self.memory.clone() }
    }
}

impl Owned {
    fn split_off(&mut self, at: usize) -> Self {
        let size = self.size - at;
        let reservation = self.reservation.split(size as u64);
        self.size = at;
        Self { size, slab: self.slab, offset: self.offset + at, arena: self.arena.clone(), reservation }
    }
}

impl Deref for ArenaBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the piece is in a live mapping of readable bytes, zeroed or written.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl DerefMut for ArenaBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: like `deref`; pieces do not overlap, and `&mut self` is the only way to write to
        // this one.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

impl Drop for ArenaBuffer {
    fn drop(&mut self) {
        match &self.home {
            Home::Owned(owned) => owned.arena.give_back(owned.slab, owned.offset, owned.size),
            Home::Borrowed(address, borrower) => borrower.give_back(*address),
        }
    }
}

impl std::fmt::Debug for ArenaBuffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ArenaBuffer").field("len", &self.len).finish_non_exhaustive()
    }
}

// SAFETY: a piece owns its bytes exclusively; any thread may use the memory that it points into.
unsafe impl Send for ArenaBuffer {}
// SAFETY: `&ArenaBuffer` only reads.
unsafe impl Sync for ArenaBuffer {}

// A panic cannot leave a piece half changed: a part is split off before it is given back, and bytes
// have no invariants.
impl std::panic::RefUnwindSafe for ArenaBuffer {}
impl std::panic::UnwindSafe for ArenaBuffer {}

#[cfg(test)]
mod lending_tests;
#[cfg(test)]
mod tests;
