//! Ranges of memory that slabs are made of.

use std::ops::Range;
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::{Arc, OnceLock};

use rustix::io::Errno;

use super::Pin;
use super::backing::{Backing, HUGE_PAGE_BYTES, out_of_memory, page_bytes_of};
use crate::Result;
use crate::memory::Interrupt;

/// Least bytes that a thread populates: a few milliseconds of work, which hides the cost of
/// starting the thread.
const POPULATED_BY_THREAD_MIN: usize = 8 << 20;

/// Bytes that a thread populates with one call. During the call, no other thread of the process can
/// map memory.
const POPULATED_AT_ONCE: usize = 2 * HUGE_PAGE_BYTES;

/// Most threads that populate a slab. More would wait for the memory or for each other.
const POPULATING_MAX: usize = 8;

/// Range of memory whose pages are present. Unmapped on drop.
#[derive(Debug)]
pub(super) struct Mapping {
    pub(super) start: NonNull<u8>,
    pub(super) len: usize,
    file: Option<Arc<OwnedFd>>,
    /// Pin to release before the range is unmapped.
    pinned_by: OnceLock<Arc<dyn Pin>>,
}

impl Mapping {
    pub(super) fn new(len: usize, backing: &Backing, interrupt: &Interrupt) -> Result<Self> {
        Self::over(backing.file(len)?.map(Arc::new), len, interrupt)
    }

    /// Maps another process's memory. The file is needed only while mapping it.
    pub(super) fn of_file(file: OwnedFd, len: usize) -> Result<Self> {
        let mut mapping = Self::over(Some(Arc::new(file)), len, &Interrupt::default())?;
        mapping.file = None;
        Ok(mapping)
    }

    fn over(file: Option<Arc<OwnedFd>>, len: usize, interrupt: &Interrupt) -> Result<Self> {
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
        let mapping = Self { start, len, file, pinned_by: OnceLock::new() };
        // SAFETY: the aligned range was just taken for this, and nothing points into it.
        unsafe { map_over(start, len, mapping.file.as_ref()) }?;
        mapping.populate(interrupt)?;
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
    /// system clears each page. Where clearing is slow, a slab took a third of a second. So the
    /// threads work in steps. Between two steps, other threads may map memory and an interrupt may
    /// end the work.
    fn populate(&self, interrupt: &Interrupt) -> Result<()> {
        // SAFETY: advice on this mapping; without huge pages for it, the call changes nothing.
        unsafe { libc::madvise(self.start.as_ptr().cast(), self.len, libc::MADV_HUGEPAGE) };
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let threads = (self.len / POPULATED_BY_THREAD_MIN).clamp(1, cores.min(POPULATING_MAX));
        let share = (self.len / threads).next_multiple_of(HUGE_PAGE_BYTES);
        std::thread::scope(|scope| {
            let others = (share..self.len).step_by(share).map(|start| start..self.len.min(start + share));
            let others: Vec<_> = others.map(|part| scope.spawn(move || self.populate_part(part, interrupt))).collect();
            let own = self.populate_part(0..share.min(self.len), interrupt);
            others.into_iter().fold(own, |outcome, other| outcome.and(other.join().expect("no part panics")))
        })
    }

    fn populate_part(&self, part: Range<usize>, interrupt: &Interrupt) -> Result<()> {
        for start in part.clone().step_by(POPULATED_AT_ONCE) {
            interrupt.check()?;
            let len = POPULATED_AT_ONCE.min(part.end - start);
            // SAFETY: a part of this mapping, whose pages become present as if each were written.
            let answer =
                unsafe { libc::madvise(self.start.as_ptr().add(start).cast(), len, libc::MADV_POPULATE_WRITE) };
            // Kernels before 5.14 do not know this advice. There, pages become present at the first
            // touch.
            if answer != 0 && last_error() != Errno::INVAL {
                return Err(out_of_memory("madvise", last_error()));
            }
        }
        Ok(())
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
