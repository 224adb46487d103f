//! The arena: large slabs of memory, handed out in aligned pieces.
//!
//! ```text
//!   slab 0 (64 MiB)  [ piece | piece |  free  | piece | free      ]
//!   slab 1 (64 MiB)  [ piece          |  free                     ]
//!   slab 2 (300 MiB) [ one piece larger than a slab               ]
//! ```
//!
//! A piece goes back to its slab when the last Arrow buffer over it is dropped. Slabs are large so that a device driver
//! registers few of them and the system can back them with huge pages.
//!
//! # What fresh memory costs
//! The system gives memory page by page, at the first touch, and that costs more than copying into it: on the machine
//! where this was written, copying 1 GiB into mapped memory takes 0.09 s, and into fresh memory 0.6 s. So a slab's pages
//! are asked for at once when it is mapped (0.32 s for pages of 4 KiB, 0.11 s for huge ones), a thread can do that ahead of
//! need ([`Arena::grow_ahead`]), and empty slabs are kept for reuse up to half of the budget. Pages that cannot be
//! had are an error at that point, and no signal at some later touch.
//!
//! # Kinds of memory
//! `memfd` memory can be mapped by another process, and shares its pages with it. Many systems give it no huge pages,
//! though, and random reads of pages of 4 KiB take 1.6 times as long (16.4 and 10.5 ns per read of 8 bytes out of 1 GiB, same
//! machine). [`Backing::best`] therefore takes `memfd` memory where it gets huge pages, and anonymous memory elsewhere.
//!
//! With the device room, this is the only place that is allowed `unsafe`.

use std::collections::{BTreeMap, HashMap};
use std::ops::{Deref, DerefMut};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::{Arc, OnceLock};

use arrow::buffer::Buffer;
use parking_lot::{Condvar, Mutex, RwLock};

use super::free_list::{FreeList, SlabId};
use super::{Budget, Reservation, ReservedPool, human_bytes};
use crate::{Context, Error, Result};

/// Every piece starts at a multiple of this many bytes: what a GPU's copy engine and 64-byte vector loads both like.
pub const ALIGNMENT: usize = 256;

/// Size of an ordinary slab, in bytes: large enough that registering one with a driver is worth the call (its cost is
/// per call and per page), small enough that an idle server holds little.
const SLAB_BYTES: usize = 64 << 20;

/// Slabs start and end at multiples of a huge page, in bytes.
const HUGE_PAGE_BYTES: usize = 2 << 20;

/// Empty slabs kept for reuse, in bytes in total: half of the budget, and these at the least. More than this goes back to the
/// system at once.
const EMPTY_SLAB_BYTES_KEPT_MIN: usize = 2 << 30;

/// A server that has once needed its memory needs it again: tables are replaced, results come and go, and a table of half
/// the budget that is uploaded anew would otherwise pay for fresh pages each time, four times the cost of the copy.
fn empty_slab_bytes_kept(limit: u64) -> usize {
    usize::try_from(limit / 2).unwrap_or(usize::MAX).max(EMPTY_SLAB_BYTES_KEPT_MIN)
}

/// What may be mapped beyond the budget, in bytes: an eighth of it, and a slab. Pieces leave holes between them that no later
/// piece fits, and what the budget promises must be there all the same; but no more than this.
fn slack_bytes(limit: u64) -> u64 {
    (limit / 8).saturating_add(SLAB_BYTES as u64)
}

/// Keeps memory where it is, so that devices copy from and to it by themselves, at the rate of their link.
pub trait Pin: Send + Sync + std::fmt::Debug {
    /// Pins a slab. False when that cannot be had; it then works as before, and copies are slower.
    fn pin(&self, start: *mut u8, len: usize) -> bool;

    /// Lets go of a slab that was pinned and will be unmapped.
    fn unpin(&self, start: *mut u8);
}

/// What slabs are made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backing {
    /// Memory of a `memfd`, which another process can map.
    Memfd,
    /// Memory of this process alone.
    Anonymous,
}

impl Backing {
    /// The kind that gets huge pages on this system; `Memfd` when both do, or neither.
    pub fn best() -> Self {
        let chosen = |file: &str| {
            let text = std::fs::read_to_string(format!("/sys/kernel/mm/transparent_hugepage/{file}"));
            let text = text.unwrap_or_default();
            text.split_once('[').and_then(|(_, rest)| Some(rest.split_once(']')?.0.to_string())).unwrap_or_default()
        };
        let shared_huge = ["always", "within_size", "advise", "force"].contains(&chosen("shmem_enabled").as_str());
        let anonymous_huge = ["always", "madvise"].contains(&chosen("enabled").as_str());
        if anonymous_huge && !shared_huge { Self::Anonymous } else { Self::Memfd }
    }
}

/// Hands out pieces of slabs, within a budget. Clones share slabs and budget.
#[derive(Clone, Debug)]
pub struct Arena {
    inner: Arc<Inner>,
    /// What pieces are drawn from before the budget.
    pool: Option<ReservedPool>,
}

#[derive(Debug)]
struct Inner {
    budget: Budget,
    backing: Backing,
    slab_bytes: usize,
    slabs: Mutex<Slabs>,
    /// Held while a slab is made, so that threads which find no room together do not make one each.
    growing: Mutex<()>,
    /// Told when less is free than should be, or growth should end.
    growth_wanted: Condvar,
    /// Where slabs start and end, by start.
    ranges: RwLock<BTreeMap<usize, usize>>,
    /// What pins slabs, once there is something.
    pin: OnceLock<Arc<dyn Pin>>,
}

#[derive(Debug, Default)]
struct Slabs {
    free: FreeList,
    mappings: HashMap<SlabId, Arc<Mapping>>,
    next_id: SlabId,
    mapped_bytes: usize,
    /// Bytes that should be free ahead of need; zero when nobody grows the arena ahead.
    free_bytes_wanted: usize,
}

impl Arena {
    /// An arena that never has more than the budget's bytes in use.
    pub fn new(budget: Budget) -> Self {
        Self::with_backing(budget, Backing::best())
    }

    /// As [`Arena::new`], over that kind of memory.
    pub fn with_backing(budget: Budget, backing: Backing) -> Self {
        let limit = usize::try_from(budget.limit_bytes()).unwrap_or(usize::MAX);
        let slab_bytes = limit.clamp(1, SLAB_BYTES).next_multiple_of(HUGE_PAGE_BYTES);
        let inner = Inner {
            budget,
            backing,
            slab_bytes,
            slabs: Mutex::default(),
            growing: Mutex::default(),
            growth_wanted: Condvar::new(),
            ranges: RwLock::default(),
            pin: OnceLock::new(),
        };
        Self { inner: Arc::new(inner), pool: None }
    }

    /// The same arena for one who was promised memory: pieces are drawn from `pool`, and from the budget when it is empty.
    pub fn drawing_on(&self, pool: ReservedPool) -> Self {
        Self { inner: self.inner.clone(), pool: Some(pool) }
    }

    /// A piece of `len` bytes whose contents are unspecified.
    ///
    /// # Errors
    /// [`Error::Exhausted`] when the budget refuses, when too much of it is lost between pieces, or when the system has no
    /// memory to map.
    pub fn allocate(&self, len: usize, purpose: &str) -> Result<ArenaBuffer> {
        let bytes = size_of_piece(len) as u64;
        let reservation = match &self.pool {
            Some(pool) => pool.reserve(bytes, purpose)?,
            None => self.inner.budget.reserve(bytes, purpose)?,
        };
        self.allocate_reserved(len, reservation)
    }

    /// A piece of `len` bytes, paid for by a share of a reservation that was made before. What the piece does not need of
    /// it is given back.
    ///
    /// # Errors
    /// [`Error::Exhausted`] when the reservation is too small, or when the system has no memory to map.
    pub fn allocate_reserved(&self, len: usize, mut reservation: Reservation) -> Result<ArenaBuffer> {
        let size = size_of_piece(len);
        if reservation.bytes() < size as u64 {
            let missing = size as u64 - reservation.bytes();
            reservation.try_grow(missing, "a piece of the arena")?;
        }
        reservation.shrink_to(size as u64);
        let (slab, offset, memory) = self.inner.place(size)?;
        // SAFETY: places are inside the mapping, which is never at address zero.
        let start = unsafe { NonNull::new_unchecked(memory.start.as_ptr().add(offset)) };
        Ok(ArenaBuffer { start, len, size, slab, offset, _memory: memory, arena: self.inner.clone(), reservation })
    }

    /// The budget that bounds this arena.
    pub fn budget(&self) -> &Budget {
        &self.inner.budget
    }

    /// What its slabs are made of.
    pub fn backing(&self) -> Backing {
        self.inner.backing
    }

    /// Bytes of slabs that are mapped now, used or not.
    pub fn mapped_bytes(&self) -> u64 {
        self.inner.slabs.lock().mapped_bytes as u64
    }

    /// The longest piece that can be had without mapping another slab, in bytes.
    pub fn longest_free_bytes(&self) -> u64 {
        self.inner.slabs.lock().free.longest() as u64
    }

    /// Pins all slabs, those that are mapped and those to come, for as long as each is mapped. Only the first call counts.
    pub fn pin_by(&self, pin: Arc<dyn Pin>) {
        let _growing = self.inner.growing.lock();
        if self.inner.pin.set(pin.clone()).is_ok() {
            self.inner.slabs.lock().mappings.values().for_each(|memory| memory.pin_by(&pin));
        }
    }

    /// Whether that address is in a slab.
    pub fn owns(&self, address: *const u8) -> bool {
        let address = address as usize;
        self.inner.ranges.read().range(..=address).next_back().is_some_and(|(_, &end)| address < end)
    }

    /// Starts a thread that maps slabs ahead of need, so that `free_bytes` are free at most times, within the budget. Only
    /// one is of use at a time. It ends when the answer is dropped.
    pub fn grow_ahead(&self, free_bytes: u64) -> GrowingAhead {
        self.inner.slabs.lock().free_bytes_wanted = usize::try_from(free_bytes).unwrap_or(usize::MAX);
        let inner = self.inner.clone();
        let thread = std::thread::Builder::new()
            .name("arena-growth".into())
            .spawn(move || inner.grow_while_wanted())
            .inspect_err(|error| tracing::warn!("the arena grows on demand only: no thread: {error}"))
            .ok();
        GrowingAhead { inner: self.inner.clone(), thread }
    }
}

impl Inner {
    /// A place of `size` bytes, in a slab that has it or in a new one.
    fn place(&self, size: usize) -> Result<(SlabId, usize, Arc<Mapping>)> {
        if let Some(place) = self.slabs.lock().take(size, &self.growth_wanted) {
            return Ok(place);
        }
        let _growing = self.growing.lock();
        if let Some(place) = self.slabs.lock().take(size, &self.growth_wanted) {
            return Ok(place);
        }
        let len = size.next_multiple_of(HUGE_PAGE_BYTES).max(self.slab_bytes);
        self.make_room(len, size)?;
        let memory = self.map_slab(len)?;
        let mut slabs = self.slabs.lock();
        slabs.add(memory);
        let place = slabs.take(size, &self.growth_wanted);
        Ok(place.expect("a new slab is at least as large as the piece that it was made for"))
    }

    /// Gives empty slabs back until one of `len` bytes may be mapped: those that are too small for the piece of `size` bytes
    /// it is for, since it found no place in them.
    fn make_room(&self, len: usize, size: usize) -> Result<()> {
        let limit = self.budget.limit_bytes();
        let mapped_max = limit.saturating_add(slack_bytes(limit));
        let mut given_back = Vec::new();
        let mut slabs = self.slabs.lock();
        while (slabs.mapped_bytes + len) as u64 > mapped_max {
            let Some(slab) = slabs.free.empty_slab() else {
                let free = slabs.free.free_bytes() as u64;
                return Err(Error::Exhausted(format!(
                    "{} of host memory are free, but in pieces of which none has {}; drop tables that are no longer \
                     needed, or raise --host-memory",
                    human_bytes(free),
                    human_bytes(size as u64),
                )));
            };
            given_back.push(self.forget(&mut slabs, slab));
        }
        // Unmapping takes long; others need not wait for it.
        drop(slabs);
        drop(given_back);
        Ok(())
    }

    /// Takes an empty slab out of the books; dropping it unmaps it.
    fn forget(&self, slabs: &mut Slabs, slab: SlabId) -> Arc<Mapping> {
        slabs.free.remove_slab(slab);
        let memory = slabs.mappings.remove(&slab).expect("its slab was added");
        slabs.mapped_bytes -= memory.len;
        self.ranges.write().remove(&(memory.start.as_ptr() as usize));
        memory
    }

    fn map_slab(&self, len: usize) -> Result<Arc<Mapping>> {
        let memory = Mapping::new(len, self.backing)
            .context(|| format!("mapping a slab of {} for the arena", human_bytes(len as u64)))?;
        if let Some(pin) = self.pin.get() {
            memory.pin_by(pin);
        }
        let start = memory.start.as_ptr() as usize;
        self.ranges.write().insert(start, start + len);
        Ok(Arc::new(memory))
    }

    fn give_back(&self, slab: SlabId, offset: usize, size: usize) {
        let mut slabs = self.slabs.lock();
        if !slabs.free.give_back(slab, offset, size) {
            return;
        }
        let kept_max = empty_slab_bytes_kept(self.budget.limit_bytes()).max(slabs.free_bytes_wanted);
        if slabs.free.empty_slab_bytes() <= kept_max {
            return;
        }
        let memory = self.forget(&mut slabs, slab);
        // Unmapping takes long; others need not wait for it.
        drop(slabs);
        drop(memory);
    }

    fn grow_while_wanted(&self) {
        loop {
            {
                let mut slabs = self.slabs.lock();
                while !slabs.wants_growth(self) {
                    if slabs.free_bytes_wanted == 0 {
                        return;
                    }
                    self.growth_wanted.wait(&mut slabs);
                }
            }
            let _growing = self.growing.lock();
            match self.map_slab(self.slab_bytes) {
                Ok(memory) => self.slabs.lock().add(memory),
                Err(error) => {
                    tracing::warn!("the arena grows on demand only from here on: {error}");
                    return;
                }
            }
        }
    }
}

impl Slabs {
    fn add(&mut self, memory: Arc<Mapping>) {
        let id = self.next_id;
        self.next_id += 1;
        self.mapped_bytes += memory.len;
        self.free.add_slab(id, memory.len);
        self.mappings.insert(id, memory);
    }

    fn take(&mut self, size: usize, growth_wanted: &Condvar) -> Option<(SlabId, usize, Arc<Mapping>)> {
        let place = self.free.take(size);
        if self.free.free_bytes() < self.free_bytes_wanted {
            growth_wanted.notify_one();
        }
        place.map(|(slab, offset)| (slab, offset, self.mappings[&slab].clone()))
    }

    fn wants_growth(&self, inner: &Inner) -> bool {
        let fits = (self.mapped_bytes + inner.slab_bytes) as u64 <= inner.budget.limit_bytes();
        fits && self.free.free_bytes() < self.free_bytes_wanted
    }
}

/// An arena that grows ahead of need for as long as this lives. See [`Arena::grow_ahead`].
#[derive(Debug)]
pub struct GrowingAhead {
    inner: Arc<Inner>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Drop for GrowingAhead {
    fn drop(&mut self) {
        self.inner.slabs.lock().free_bytes_wanted = 0;
        self.inner.growth_wanted.notify_all();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the thread that grows the arena panicked");
        }
    }
}

/// Bytes that a piece takes from its slab.
fn size_of_piece(len: usize) -> usize {
    len.max(1).next_multiple_of(ALIGNMENT)
}

/// One piece of the arena, writable and owned. [`ArenaBuffer::freeze`] turns it into an Arrow buffer.
pub struct ArenaBuffer {
    start: NonNull<u8>,
    /// Bytes asked for.
    len: usize,
    /// Bytes taken from the slab: `len` rounded up to [`ALIGNMENT`].
    size: usize,
    slab: SlabId,
    /// Where the piece starts in its slab, in bytes.
    offset: usize,
    /// Keeps the slab mapped.
    _memory: Arc<Mapping>,
    arena: Arc<Inner>,
    reservation: Reservation,
}

impl ArenaBuffer {
    /// The piece as an immutable Arrow buffer of its first `len` bytes; the memory goes back to the arena when the last
    /// clone or slice of the buffer is dropped.
    pub fn freeze(self) -> Buffer {
        let (start, len) = (self.start, self.len);
        // SAFETY: `start..start + len` stays mapped and unmodified for as long as the Arc'd owner (this piece) lives,
        // and nothing writes to it any more because the piece was moved into the owner.
        unsafe { Buffer::from_custom_allocation(start, len, Arc::new(self)) }
    }

    /// Shortens the piece to its first `len` bytes, and gives the rest back.
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
        let size = size_of_piece(self.len);
        if size < self.size {
            self.arena.give_back(self.slab, self.offset + size, self.size - size);
            self.size = size;
            self.reservation.shrink_to(size as u64);
        }
    }
}

impl Deref for ArenaBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the piece is inside a live mapping of readable, initialised (zero-filled or written) bytes.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl DerefMut for ArenaBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as `deref`; pieces do not overlap, and `&mut self` is the only way to write to this one.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

impl Drop for ArenaBuffer {
    fn drop(&mut self) {
        self.arena.give_back(self.slab, self.offset, self.size);
    }
}

impl std::fmt::Debug for ArenaBuffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ArenaBuffer").field("len", &self.len).finish_non_exhaustive()
    }
}

// SAFETY: a piece owns its bytes exclusively; the pointer is into shared memory that any thread may use.
unsafe impl Send for ArenaBuffer {}
// SAFETY: `&ArenaBuffer` only reads.
unsafe impl Sync for ArenaBuffer {}

// A panic cannot leave a piece half changed: its fields are set once, and its bytes have no invariants.
impl std::panic::RefUnwindSafe for ArenaBuffer {}
impl std::panic::UnwindSafe for ArenaBuffer {}

/// A range of memory whose pages are there. Unmapped on drop.
#[derive(Debug)]
struct Mapping {
    start: NonNull<u8>,
    len: usize,
    _file: Option<OwnedFd>,
    /// What has pinned it, and must let go of it before it is unmapped.
    pinned_by: OnceLock<Arc<dyn Pin>>,
}

impl Mapping {
    fn new(len: usize, backing: Backing) -> Result<Self> {
        let file = match backing {
            Backing::Memfd => Some(memfd(len)?),
            Backing::Anonymous => None,
        };
        // A range that is long enough to hold an aligned one is taken without memory, and all but that is given back.
        let taken = take_range(len + HUGE_PAGE_BYTES)?;
        let address = taken.as_ptr() as usize;
        let before = address.next_multiple_of(HUGE_PAGE_BYTES) - address;
        // SAFETY: `before` is less than a huge page, and the range is longer than that by `len`.
        let start = unsafe { taken.add(before) };
        // SAFETY: the parts of the range before and after the aligned one are this function's, and hold nothing.
        unsafe {
            unmap(taken, before);
            unmap(start.add(len), HUGE_PAGE_BYTES - before);
        }
        let mapping = Self { start, len, _file: file, pinned_by: OnceLock::new() };
        // SAFETY: the aligned range was just taken for this, and nothing points into it.
        unsafe { map_over(start, len, mapping._file.as_ref()) }?;
        mapping.populate()?;
        Ok(mapping)
    }

    fn pin_by(&self, pin: &Arc<dyn Pin>) {
        if pin.pin(self.start.as_ptr(), self.len) {
            // A mapping is pinned once: by what the arena was told first.
            let _ = self.pinned_by.set(pin.clone());
        }
    }

    /// Asks for all pages at once, huge ones if possible.
    fn populate(&self) -> Result<()> {
        // SAFETY: advice on this mapping; where the kernel has no huge pages for it, the call changes nothing.
        unsafe { libc::madvise(self.start.as_ptr().cast(), self.len, libc::MADV_HUGEPAGE) };
        // SAFETY: makes the pages of this mapping present, as writing to each would.
        let answer = unsafe { libc::madvise(self.start.as_ptr().cast(), self.len, libc::MADV_POPULATE_WRITE) };
        // Kernels before 5.14 do not know the advice; there, pages come with the first touch.
        if answer != 0 && std::io::Error::last_os_error().raw_os_error() != Some(libc::EINVAL) {
            return Err(out_of_memory("madvise"));
        }
        Ok(())
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        if let Some(pin) = self.pinned_by.get() {
            pin.unpin(self.start.as_ptr());
        }
        // SAFETY: exactly the range that `new` made; no piece points into it any more, since each holds an Arc of it.
        unsafe { unmap(self.start, self.len) };
    }
}

// SAFETY: a mapping is an address range; what may be read and written in it is decided by the pieces.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

const PRIVATE: libc::c_int = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;

/// Takes a range of addresses, without memory.
fn take_range(len: usize) -> Result<NonNull<u8>> {
    // SAFETY: without MAP_FIXED, no mapping that exists is touched.
    let address = unsafe { libc::mmap(std::ptr::null_mut(), len, libc::PROT_NONE, PRIVATE, -1, 0) };
    if address == libc::MAP_FAILED {
        return Err(out_of_memory("mmap"));
    }
    Ok(NonNull::new(address.cast()).expect("mmap does not return the null page"))
}

/// Puts memory, of the file if there is one, in the place of a range that was taken.
///
/// # Safety
/// The range must be the caller's, and nothing may point into it.
unsafe fn map_over(start: NonNull<u8>, len: usize, file: Option<&OwnedFd>) -> Result<()> {
    let (flags, descriptor) = file.map_or((PRIVATE, -1), |file| (libc::MAP_SHARED, file.as_raw_fd()));
    let (access, flags) = (libc::PROT_READ | libc::PROT_WRITE, flags | libc::MAP_FIXED);
    // SAFETY: the caller answers for the range.
    let address = unsafe { libc::mmap(start.as_ptr().cast(), len, access, flags, descriptor, 0) };
    if address == libc::MAP_FAILED {
        return Err(out_of_memory("mmap"));
    }
    Ok(())
}

/// Gives a range of addresses back to the system.
///
/// # Safety
/// The range must be the caller's, and nothing may point into it.
unsafe fn unmap(start: NonNull<u8>, len: usize) {
    if len > 0 {
        // SAFETY: the caller answers for the range.
        unsafe { libc::munmap(start.as_ptr().cast(), len) };
    }
}

fn memfd(len: usize) -> Result<OwnedFd> {
    // SAFETY: a C string literal and a documented flag; the result is checked.
    let descriptor = unsafe { libc::memfd_create(c"dovetail-arena".as_ptr(), libc::MFD_CLOEXEC) };
    if descriptor < 0 {
        return Err(out_of_memory("memfd_create"));
    }
    // SAFETY: the descriptor is open and nobody else owns it.
    let file = unsafe { OwnedFd::from_raw_fd(descriptor) };
    // SAFETY: sets the size of a file that we own.
    if unsafe { libc::ftruncate(file.as_raw_fd(), len as libc::off_t) } != 0 {
        return Err(out_of_memory("ftruncate"));
    }
    Ok(file)
}

fn out_of_memory(call: &str) -> Error {
    let cause = std::io::Error::last_os_error();
    Error::Exhausted(format!("{call} failed: {cause}; the system has less memory than --host-memory promises"))
}

#[cfg(test)]
mod tests {
    use rand::rngs::StdRng;
    use rand::{Rng, SeedableRng};

    use super::*;

    fn arena(limit: u64) -> Arena {
        Arena::new(Budget::new("host memory", "--host-memory", limit))
    }

    /// Remembers which slabs are pinned.
    #[derive(Debug, Default)]
    struct PinnedSlabs(Mutex<Vec<usize>>);

    impl Pin for PinnedSlabs {
        fn pin(&self, start: *mut u8, _len: usize) -> bool {
            self.0.lock().push(start as usize);
            true
        }

        fn unpin(&self, start: *mut u8) {
            let mut pinned = self.0.lock();
            let at = pinned.iter().position(|&slab| slab == start as usize).expect("it was pinned");
            pinned.remove(at);
        }
    }

    #[test]
    fn slabs_are_pinned_while_they_are_mapped() {
        let arena = Arena::new(Budget::new("host memory", "--host-memory", 256 << 20));
        let before = arena.allocate(10 << 20, "test").unwrap();
        let pinned = Arc::new(PinnedSlabs::default());
        arena.pin_by(pinned.clone());
        assert_eq!(pinned.0.lock().len(), 1);
        let after = arena.allocate(100 << 20, "test").unwrap();
        assert_eq!(pinned.0.lock().len(), 2);
        drop((before, after, arena));
        assert!(pinned.0.lock().is_empty());
    }

    #[test]
    fn pieces_are_aligned_and_do_not_overlap() {
        let arena = arena(1 << 20);
        let mut pieces: Vec<_> =
            [1, 255, 256, 257, 4096, 0].iter().map(|&len| arena.allocate(len, "test").unwrap()).collect();
        for (value, piece) in pieces.iter_mut().enumerate() {
            assert_eq!(piece.as_ptr() as usize % ALIGNMENT, 0);
            piece.fill(value as u8);
        }
        for (value, piece) in pieces.iter().enumerate() {
            assert!(piece.iter().all(|&byte| byte == value as u8));
        }
    }

    #[test]
    fn a_frozen_piece_lives_as_long_as_its_last_slice() {
        let arena = arena(1 << 20);
        let mut piece = arena.allocate(1000, "test").unwrap();
        piece.fill(7);
        let slice = piece.freeze().slice_with_length(500, 10);
        assert_eq!(arena.budget().used_bytes(), 1024);
        assert_eq!(slice.as_slice(), [7; 10]);
        drop(slice);
        assert_eq!(arena.budget().used_bytes(), 0);
    }

    #[test]
    fn freed_neighbours_merge_and_the_slab_is_reused() {
        let arena = arena(1 << 30);
        let thirds: Vec<_> = (0..3).map(|_| arena.allocate(SLAB_BYTES / 4, "test").unwrap()).collect();
        let [first, second, third] = <[_; 3]>::try_from(thirds).unwrap();
        drop(first);
        drop(third);
        drop(second);
        let _whole = arena.allocate(SLAB_BYTES, "test").unwrap();
        assert_eq!(arena.mapped_bytes(), SLAB_BYTES as u64);
    }

    #[test]
    fn a_piece_larger_than_a_slab_gets_one_of_its_own() {
        let arena = arena(1 << 30);
        let piece = arena.allocate(SLAB_BYTES + 1, "test").unwrap();
        assert_eq!(piece.len(), SLAB_BYTES + 1);
        assert_eq!(arena.mapped_bytes(), (SLAB_BYTES + HUGE_PAGE_BYTES) as u64);
    }

    #[test]
    fn a_truncated_piece_gives_its_end_back() {
        let arena = arena(1 << 20);
        let mut piece = arena.allocate(10_000, "test").unwrap();
        piece.fill(3);
        piece.truncate(300);
        assert_eq!((piece.len(), arena.budget().used_bytes()), (300, 512));
        let after = arena.allocate(9_000, "test").unwrap();
        assert_eq!(after.as_ptr() as usize - piece.as_ptr() as usize, 512, "the end was not given back");
        assert!(piece.iter().all(|&byte| byte == 3));
        drop((piece, after));
        assert_eq!(arena.budget().used_bytes(), 0);
        assert_eq!(arena.longest_free_bytes(), arena.mapped_bytes());
    }

    #[test]
    fn a_piece_takes_no_more_of_a_reservation_than_it_needs() {
        let arena = arena(1 << 20);
        let reservation = arena.budget().reserve(100_000, "a join").unwrap();
        let piece = arena.allocate_reserved(1000, reservation).unwrap();
        assert_eq!(arena.budget().used_bytes(), 1024);
        drop(piece);
    }

    #[test]
    fn an_arena_draws_on_what_was_promised_and_its_pieces_outlive_the_promise() {
        let arena = arena(1 << 20);
        let pool = ReservedPool::new(arena.budget().clone());
        pool.open(arena.budget().reserve(4096, "a join").unwrap());
        let of_job = arena.drawing_on(pool.clone());
        let _others = arena.allocate((1 << 20) - 4096, "others").unwrap();
        let mut piece = of_job.allocate(4096, "a result").unwrap();
        assert!(matches!(of_job.allocate(1, "one more").unwrap_err(), Error::Exhausted(_)));
        piece.truncate(1000);
        assert_eq!((pool.free_bytes(), arena.budget().used_bytes()), (3072, 1 << 20));
        let result = piece.freeze();
        pool.close();
        assert_eq!(arena.budget().free_bytes(), 3072);
        drop(result);
        assert_eq!(arena.budget().free_bytes(), 4096);
    }

    #[test]
    fn empty_slabs_make_room_for_larger_ones_within_the_budget() {
        let limit = 4 * SLAB_BYTES as u64;
        let arena = arena(limit);
        // All of it in ordinary slabs, then all of it in one piece, and back: twice the budget, were none given back.
        for _ in 0..2 {
            drop((0..4).map(|_| arena.allocate(SLAB_BYTES, "test").unwrap()).collect::<Vec<_>>());
            drop(arena.allocate(4 * SLAB_BYTES, "test").unwrap());
            assert!(arena.mapped_bytes() <= limit + slack_bytes(limit), "{} bytes are mapped", arena.mapped_bytes());
        }
    }

    #[test]
    fn memory_that_is_lost_between_pieces_is_not_mapped_again() {
        let limit = 4 * SLAB_BYTES as u64;
        let arena = arena(limit);
        let mut pieces: Vec<_> = (0..16).map(|_| arena.allocate(SLAB_BYTES / 4, "test").unwrap()).collect();
        // Every slab keeps a piece; half of the budget is free, in holes of half a slab at most.
        let mut place = 0;
        pieces.retain(|_| {
            place += 1;
            place % 2 == 0
        });
        let first = arena.allocate(SLAB_BYTES, "test").expect("the slack is for this");
        let refused = arena.allocate(SLAB_BYTES, "test").unwrap_err();
        let Error::Exhausted(text) = &refused else { panic!("{refused:?}") };
        assert!(text.contains("in pieces") && text.contains("--host-memory"), "{text}");
        assert!(arena.mapped_bytes() <= limit + slack_bytes(limit));
        drop((first, pieces));
        assert_eq!(arena.budget().used_bytes(), 0, "a refusal takes nothing");
        arena.allocate(2 * SLAB_BYTES, "test").unwrap();
    }

    #[test]
    fn an_arena_knows_its_own_addresses() {
        let arena = arena(1 << 20);
        let piece = arena.allocate(1000, "test").unwrap();
        let elsewhere = [0u8; 8];
        assert!(arena.owns(piece.as_ptr()) && arena.owns(&piece[999]));
        assert!(!arena.owns(elsewhere.as_ptr()) && !arena.owns(std::ptr::null()));
    }

    #[test]
    fn both_kinds_of_memory_can_be_written_and_come_aligned_to_huge_pages() {
        for backing in [Backing::Memfd, Backing::Anonymous] {
            let arena = Arena::with_backing(Budget::new("host memory", "--host-memory", 8 << 20), backing);
            let mut piece = arena.allocate(5 << 20, "test").unwrap();
            piece.fill(9);
            assert_eq!(piece.as_ptr() as usize % HUGE_PAGE_BYTES, 0);
            assert_eq!((arena.backing(), arena.mapped_bytes()), (backing, 8 << 20));
        }
    }

    #[test]
    fn growth_ahead_keeps_bytes_free_within_the_budget_and_ends_when_dropped() {
        let arena = arena(160 << 20);
        let growing = arena.grow_ahead(100 << 20);
        // Two slabs make up the bytes wanted; a third would exceed the budget.
        crate::testing::wait_until("two slabs to be mapped ahead", || arena.mapped_bytes() >= 2 * SLAB_BYTES as u64);
        let _piece = arena.allocate(SLAB_BYTES, "test").unwrap();
        drop(growing);
        assert_eq!(arena.mapped_bytes(), 2 * SLAB_BYTES as u64);
    }

    /// Threads allocate, write, check and free; whoever finds another's bytes has shared a piece with it.
    #[test]
    fn pieces_of_many_threads_never_overlap_and_all_come_back() {
        let seed = crate::testing::seed();
        let arena = arena(256 << 20);
        std::thread::scope(|scope| {
            for thread in 0..8u8 {
                let arena = &arena;
                scope.spawn(move || {
                    let mut random = StdRng::seed_from_u64(seed.wrapping_add(u64::from(thread)));
                    let mut pieces: Vec<ArenaBuffer> = Vec::new();
                    for _ in 0..500 {
                        if random.random_bool(0.6) {
                            let exponent = random.random_range(0..20);
                            let mut piece = arena.allocate(random.random_range(0..1 << exponent), "test").unwrap();
                            piece.fill(thread);
                            if random.random_bool(0.2) {
                                piece.truncate(random.random_range(0..=piece.len()));
                            }
                            pieces.push(piece);
                        } else if !pieces.is_empty() {
                            let piece = pieces.swap_remove(random.random_range(0..pieces.len()));
                            assert!(piece.iter().all(|&byte| byte == thread), "another thread wrote here");
                        }
                    }
                });
            }
        });
        assert_eq!(arena.budget().used_bytes(), 0);
        let slabs = arena.inner.slabs.lock();
        assert_eq!(slabs.free.empty_slab_bytes(), slabs.mapped_bytes, "all slabs are whole again");
    }

    #[test]
    fn a_refused_piece_leaves_the_budget_as_it_was() {
        let arena = arena(1024);
        assert!(matches!(arena.allocate(4096, "a table").unwrap_err(), Error::Exhausted(_)));
        assert_eq!(arena.budget().used_bytes(), 0);
        assert_eq!(arena.mapped_bytes(), 0);
    }
}
