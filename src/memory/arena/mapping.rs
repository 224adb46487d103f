//! Ranges of memory that slabs are made of.

use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::{Arc, OnceLock};

use parking_lot::{Condvar, Mutex, MutexGuard};
use rayon::{ThreadPool, ThreadPoolBuilder};
use rustix::fs::{FallocateFlags, fallocate};
use rustix::io::Errno;

use super::Pin;
use super::backing::{Backing, HUGE_PAGE_BYTES, out_of_memory, page_bytes_of};
use crate::memory::Interrupt;
use crate::{Error, Result};

/// Most bytes that the calling thread populates by itself: a few milliseconds of work, which the
/// threads of a pool would hardly shorten.
const POPULATED_BY_CALLER_MAX: usize = 8 << 20;

/// Bytes that a thread populates with one call. During the call, no other thread of the process can
/// map memory.
const POPULATED_AT_ONCE: usize = 2 * HUGE_PAGE_BYTES;

/// Haste of populating a range. Each has standing threads of its own, so a slab that a join waits
/// for never waits for one that is prepared.
#[derive(Clone, Copy, Debug)]
pub(super) enum Populating {
    /// A thread waits for the range.
    Urgent,
    /// The range is prepared in advance.
    Ahead,
}

impl Populating {
    /// Returns the standing threads; `None` if the system gave none. More than eight threads wait
    /// for each other: on a host with an H100, 1, 4, 8 and 16 of them populate 7, 23, 31 and 28
    /// GB/s of huge pages.
    fn pool(self) -> Option<&'static ThreadPool> {
        static URGENT: OnceLock<Option<ThreadPool>> = OnceLock::new();
        static AHEAD: OnceLock<Option<ThreadPool>> = OnceLock::new();
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let (pool, name, threads) = match self {
            Self::Urgent => (&URGENT, "populate", cores.min(8)),
            // Joins run at the same time.
            Self::Ahead => (&AHEAD, "prepare", (cores / 4).clamp(1, 4)),
        };
        let start = || {
            let threads = ThreadPoolBuilder::new().num_threads(threads);
            let pool = threads.thread_name(move |number| format!("{name}-{number}")).build();
            pool.inspect_err(|error| tracing::warn!("host memory is populated by one thread: {error}")).ok()
        };
        pool.get_or_init(start).as_ref()
    }
}

/// Range of memory whose pages are present. Unmapped on drop.
#[derive(Debug)]
pub(super) struct Mapping {
    pub(super) start: NonNull<u8>,
    pub(super) len: usize,
    file: Option<Arc<OwnedFd>>,
    /// NUMA node from which the system was asked to take the pages.
    pub(super) node: Option<u32>,
    /// Pin to release before the range is unmapped.
    pinned_by: OnceLock<Arc<dyn Pin>>,
}

impl Mapping {
    /// Maps new memory. Waits until it is populated.
    pub(super) fn new(len: usize, backing: &Backing, interrupt: &Interrupt, populating: Populating) -> Result<Self> {
        Self::on_node(None, len, backing, interrupt, populating)
    }

    /// Maps new memory as [`new`](Self::new) does, from the memory of a NUMA node. Other nodes give
    /// the rest when this one is full.
    pub(super) fn on_node(
        node: Option<u32>,
        len: usize,
        backing: &Backing,
        interrupt: &Interrupt,
        populating: Populating,
    ) -> Result<Self> {
        let mut mapping = Self::over(backing.file(len)?.map(Arc::new), len)?;
        // SAFETY: the range was just mapped, and its pages are not there yet.
        mapping.node = node.filter(|&node| unsafe { prefer_node(mapping.start.as_ptr(), len, node) }.is_ok());
        mapping.populate(interrupt, populating, true)?;
        Ok(mapping)
    }

    /// Maps another process's memory. The file is needed only while mapping it.
    pub(super) fn of_file(file: OwnedFd, len: usize) -> Result<Self> {
        let mut mapping = Self::over(Some(Arc::new(file)), len)?;
        mapping.populate(&Interrupt::default(), Populating::Urgent, false)?;
        mapping.file = None;
        Ok(mapping)
    }

    fn over(file: Option<Arc<OwnedFd>>, len: usize) -> Result<Self> {
        // Reserve addresses for a range long enough to contain an aligned one, and give the rest
        // back.
        let granule = file.as_ref().map_or(0, |file| page_bytes_of(file)).max(HUGE_PAGE_BYTES);
        let taken = take_range(len + granule)?;
        let address = taken.as_ptr() as usize;
        let before = address.next_multiple_of(granule) - address;
        // SAFETY: `before` is less than the granule, and the range is longer than that by `len`.
        let start = unsafe { taken.add(before) };
        // SAFETY: this function reserved the parts around the aligned range, and they are empty.
        unsafe {
            unmap(taken, before);
            unmap(start.add(len), granule - before);
        }
        let mapping = Self { start, len, file, node: None, pinned_by: OnceLock::new() };
        // SAFETY: the aligned range was just taken for this, and nothing points into it.
        unsafe { map_over(start, len, mapping.file.as_ref()) }?;
        Ok(mapping)
    }

    /// Returns the file that another process can map; `None` for anonymous memory, and for memory
    /// of another process.
    pub(super) fn file(&self) -> Option<&Arc<OwnedFd>> {
        self.file.as_ref()
    }

    pub(super) fn pin_by(&self, pin: &Arc<dyn Pin>) {
        if self.pinned_by.get().is_none() && pin.pin(self.start.as_ptr(), self.len, self.file.as_ref()) {
            // A mapping is pinned once, by the pin that the arena got first.
            let _ = self.pinned_by.set(pin.clone());
        }
    }

    /// Populates all pages, with huge pages if possible. Several threads do this, because the
    /// system clears each page. The threads work in steps. Between two steps, other threads may map
    /// memory and an interrupt may end the work.
    fn populate(&self, interrupt: &Interrupt, populating: Populating, is_new: bool) -> Result<()> {
        // SAFETY: advice on this mapping; without huge pages for it, the call changes nothing.
        unsafe { libc::madvise(self.start.as_ptr().cast(), self.len, libc::MADV_HUGEPAGE) };
        let steps = Arc::new(Steps {
            start: self.start.as_ptr() as usize,
            len: self.len,
            touched: is_new.then(|| self.file.clone()),
            interrupt: interrupt.clone(),
            progress: Mutex::default(),
            changed: Condvar::new(),
        });
        match if self.len > POPULATED_BY_CALLER_MAX { populating.pool() } else { None } {
            Some(pool) => (0..pool.current_num_threads()).for_each(|_| {
                let steps = steps.clone();
                pool.spawn(move || steps.work());
            }),
            None => steps.work(),
        }
        steps.wait()
    }
}

/// Populating of a mapping in steps, which threads take in turn. A thread that comes when no step
/// is left does not touch the mapping, which may be gone.
#[derive(Debug)]
struct Steps {
    start: usize,
    len: usize,
    /// File of a mapping that nothing else has, if any; `None` if others have the mapping's pages.
    touched: Option<Option<Arc<OwnedFd>>>,
    interrupt: Interrupt,
    progress: Mutex<Progress>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Progress {
    /// Bytes that were given to threads.
    taken: usize,
    /// Threads that populate.
    working: usize,
    failed: Option<Error>,
}

impl Steps {
    /// Takes steps until none is left or one has failed.
    fn work(&self) {
        let mut progress = self.progress.lock();
        while self.are_left(&progress) {
            let start = progress.taken;
            let len = POPULATED_AT_ONCE.min(self.len - start);
            progress.taken += len;
            progress.working += 1;
            let outcome = MutexGuard::unlocked(&mut progress, || {
                self.interrupt.check()?;
                self.populate(start, len)
            });
            progress.working -= 1;
            progress.failed = progress.failed.take().or(outcome.err());
        }
        self.changed.notify_all();
    }

    fn are_left(&self, progress: &Progress) -> bool {
        progress.failed.is_none() && progress.taken < self.len
    }

    /// Waits until no thread uses the mapping any more.
    fn wait(&self) -> Result<()> {
        let mut progress = self.progress.lock();
        self.changed.wait_while(&mut progress, |progress| progress.working > 0 || self.are_left(progress));
        progress.failed.take().map_or(Ok(()), Err)
    }

    fn populate(&self, start: usize, len: usize) -> Result<()> {
        let address = (self.start + start) as *mut u8;
        // SAFETY: a part of the mapping, whose pages become present as if each were written.
        let answer = unsafe { libc::madvise(address.cast(), len, libc::MADV_POPULATE_WRITE) };
        if answer == 0 {
            return Ok(());
        }
        match (last_error(), &self.touched) {
            // Kernels before 5.14 do not know this advice. Others may use the pages of a view.
            (Errno::INVAL, None) => Ok(()),
            (Errno::INVAL, Some(file)) => {
                // A touch without memory would raise a signal.
                if let Some(file) = file {
                    let allocated = fallocate(file, FallocateFlags::empty(), start as u64, len as u64);
                    allocated.map_err(|error| out_of_memory("fallocate", error))?;
                }
                // SAFETY: a part of the mapping, which nothing else uses yet.
                unsafe { touch(address, len) };
                Ok(())
            }
            (error, _) => Err(out_of_memory("madvise", error)),
        }
    }
}

/// Asks the system to take the pages of a range from a NUMA node while that has some. The file of a
/// range keeps the request for other processes that map it.
///
/// # Safety
/// The range must be mapped.
pub(super) unsafe fn prefer_node(start: *mut u8, len: usize, node: u32) -> Result<(), Errno> {
    const NODES_MAX: usize = 1024;
    const BITS: usize = libc::c_ulong::BITS as usize;
    let mut nodes: [libc::c_ulong; NODES_MAX / BITS] = [0; NODES_MAX / BITS];
    let node = node as usize;
    *nodes.get_mut(node / BITS).ok_or(Errno::INVAL)? = 1 << (node % BITS);
    // The system reads one bit less than it is told.
    let (mode, bits, flags) = (libc::MPOL_PREFERRED, NODES_MAX + 1, 0);
    // SAFETY: the caller mapped the range, and the bits are read during the call.
    let answer = unsafe { libc::syscall(libc::SYS_mbind, start, len, mode, nodes.as_ptr(), bits, flags) };
    if answer == 0 { Ok(()) } else { Err(last_error()) }
}

/// Makes the pages of a range present.
///
/// # Safety
/// The range must be mapped, and nothing else may use it.
unsafe fn touch(start: *mut u8, len: usize) {
    const PAGE_BYTES: usize = 4 << 10;
    for page in (0..len).step_by(PAGE_BYTES) {
        // SAFETY: in the range, as the caller promises.
        unsafe { start.add(page).write_volatile(0) };
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        if let Some(pin) = self.pinned_by.get() {
            pin.unpin(self.start.as_ptr());
        }
        // SAFETY: exactly the range that `over` made. No piece points into it any more, since each
        // piece holds an Arc of this mapping.
        unsafe { unmap(self.start, self.len) };
    }
}

// SAFETY: a mapping is an address range; the pieces decide which bytes may be read and written.
unsafe impl Send for Mapping {}
// SAFETY: as for `Send`.
unsafe impl Sync for Mapping {}

// A panic cannot leave a mapping half changed: only the pin changes, and only once.
impl std::panic::RefUnwindSafe for Mapping {}

const PRIVATE: libc::c_int = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;

/// Reserves a range of addresses, without memory.
fn take_range(len: usize) -> Result<NonNull<u8>> {
    // SAFETY: without MAP_FIXED, no mapping that exists is touched.
    let address = unsafe { libc::mmap(std::ptr::null_mut(), len, libc::PROT_NONE, PRIVATE, -1, 0) };
    if address == libc::MAP_FAILED {
        return Err(out_of_memory("mmap", last_error()));
    }
    Ok(NonNull::new(address.cast()).expect("mmap does not return the null page"))
}

/// Maps memory over a reserved range: the file's memory, if given, or anonymous memory.
///
/// # Safety
/// The caller must own the range, and nothing may point into it.
unsafe fn map_over(start: NonNull<u8>, len: usize, file: Option<&Arc<OwnedFd>>) -> Result<()> {
    let (flags, descriptor) = file.map_or((PRIVATE, -1), |file| (libc::MAP_SHARED, file.as_raw_fd()));
    let (access, flags) = (libc::PROT_READ | libc::PROT_WRITE, flags | libc::MAP_FIXED);
    // SAFETY: the caller answers for the range.
    let address = unsafe { libc::mmap(start.as_ptr().cast(), len, access, flags, descriptor, 0) };
    if address == libc::MAP_FAILED {
        return Err(out_of_memory("mmap", last_error()));
    }
    Ok(())
}

/// Gives a range of addresses back to the system.
///
/// # Safety
/// The caller must own the range, and nothing may point into it.
unsafe fn unmap(start: NonNull<u8>, len: usize) {
    if len > 0 {
        // SAFETY: the caller answers for the range.
        unsafe { libc::munmap(start.as_ptr().cast(), len) };
    }
}

/// Returns the error of a system call that has failed.
fn last_error() -> Errno {
    Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn touched_pages_are_present() {
        let mapping = Mapping::over(None, HUGE_PAGE_BYTES).unwrap();
        let present = || {
            let mut pages = [0u8; 512];
            // SAFETY: the call writes a byte for each page of the mapping.
            let answer =
                unsafe { libc::mincore(mapping.start.as_ptr().cast(), HUGE_PAGE_BYTES, pages.as_mut_ptr().cast()) };
            assert_eq!(answer, 0);
            pages.iter().filter(|page| **page & 1 == 1).count()
        };
        assert_eq!(present(), 0);
        // SAFETY: nothing else uses the mapping.
        unsafe { touch(mapping.start.as_ptr(), HUGE_PAGE_BYTES) };
        assert_eq!(present(), 512);
    }

    /// Rates on this machine, to compare backings: `cargo test --release -- --ignored --nocapture
    /// populate_rates`.
    #[test]
    #[ignore = "a measurement"]
    fn populate_rates() {
        const BYTES: usize = 1 << 30;
        let tmpfs = Backing::own_tmpfs().inspect_err(|error| println!("{error}")).ok();
        for backing in [Backing::Anonymous, Backing::Memfd].into_iter().chain(tmpfs) {
            for populating in [Populating::Urgent, Populating::Ahead, Populating::Urgent] {
                let since = std::time::Instant::now();
                let mapping = Mapping::new(BYTES, &backing, &Interrupt::default(), populating).unwrap();
                let rate = BYTES as f64 / since.elapsed().as_secs_f64() / 1e9;
                drop(mapping);
                println!("{}, {populating:?}: {rate:.1} GB/s", backing.describe());
            }
        }
    }
}
