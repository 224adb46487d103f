//! Ranges of memory that slabs are made of.
//!
//! `memfd` memory can be mapped by another process, and shares its pages with it. Many systems give it no huge pages,
//! though, and random reads of pages of 4 KiB take 1.6 times as long (16.4 and 10.5 ns per read of 8 bytes out of 1 GiB, same
//! machine). [`Backing::best`] therefore takes `memfd` memory where it gets huge pages, and anonymous memory elsewhere.

use std::ops::Range;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::{Arc, OnceLock};

use super::Pin;
use crate::memory::Interrupt;
use crate::{Error, Result};

/// Slabs start and end at multiples of a huge page, in bytes.
pub(super) const HUGE_PAGE_BYTES: usize = 2 << 20;

/// A thread populates so many bytes at the least: some milliseconds' work, beside which starting it is nothing.
const POPULATED_BY_THREAD_MIN: usize = 8 << 20;

/// Bytes that a thread asks for by one call: the system lets nobody else in the process map memory meanwhile.
const POPULATED_AT_ONCE: usize = 2 * HUGE_PAGE_BYTES;

/// Threads that populate a slab at the most; more would wait for the memory, or for each other.
const POPULATING_MAX: usize = 8;

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

/// A range of memory whose pages are there. Unmapped on drop.
#[derive(Debug)]
pub(super) struct Mapping {
    pub(super) start: NonNull<u8>,
    pub(super) len: usize,
    file: Option<Arc<OwnedFd>>,
    /// What has pinned it, and must let go of it before it is unmapped.
    pinned_by: OnceLock<Arc<dyn Pin>>,
}

impl Mapping {
    pub(super) fn new(len: usize, backing: Backing, interrupt: &Interrupt) -> Result<Self> {
        let file = match backing {
            Backing::Memfd => Some(Arc::new(memfd(len)?)),
            Backing::Anonymous => None,
        };
        Self::over(file, len, interrupt)
    }

    /// Another process's memory; the file is needed no longer than it takes to map it.
    pub(super) fn of_file(file: OwnedFd, len: usize) -> Result<Self> {
        let mut mapping = Self::over(Some(Arc::new(file)), len, &Interrupt::default())?;
        mapping.file = None;
        Ok(mapping)
    }

    fn over(file: Option<Arc<OwnedFd>>, len: usize, interrupt: &Interrupt) -> Result<Self> {
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
        let mapping = Self { start, len, file, pinned_by: OnceLock::new() };
        // SAFETY: the aligned range was just taken for this, and nothing points into it.
        unsafe { map_over(start, len, mapping.file.as_ref()) }?;
        mapping.populate(interrupt)?;
        Ok(mapping)
    }

    pub(super) fn pin_by(&self, pin: &Arc<dyn Pin>) {
        if pin.pin(self.start.as_ptr(), self.len, self.file.as_ref()) {
            // A mapping is pinned once: by what the arena was told first.
            let _ = self.pinned_by.set(pin.clone());
        }
    }

    /// Asks for all pages, huge ones if possible, by several threads: the system clears each page. Where that is slow, a slab has
    /// been seen to take a third of a second, so it is done in steps: between them others may map memory, and work may be stopped.
    fn populate(&self, interrupt: &Interrupt) -> Result<()> {
        // SAFETY: advice on this mapping; where the kernel has no huge pages for it, the call changes nothing.
        unsafe { libc::madvise(self.start.as_ptr().cast(), self.len, libc::MADV_HUGEPAGE) };
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let threads = (self.len / POPULATED_BY_THREAD_MIN).clamp(1, cores.min(POPULATING_MAX));
        let share = (self.len / threads).next_multiple_of(HUGE_PAGE_BYTES);
        std::thread::scope(|scope| {
            let others = (share..self.len).step_by(share).map(|start| start..self.len.min(start + share));
            let others: Vec<_> = others.map(|part| scope.spawn(move || self.populate_part(part, interrupt))).collect();
            let own = self.populate_part(0..share.min(self.len), interrupt);
            others.into_iter().fold(own, |outcome, other| outcome.and(other.join().expect("it does not panic")))
        })
    }

    fn populate_part(&self, part: Range<usize>, interrupt: &Interrupt) -> Result<()> {
        for start in part.clone().step_by(POPULATED_AT_ONCE) {
            interrupt.check()?;
            let len = POPULATED_AT_ONCE.min(part.end - start);
            // SAFETY: a part of this mapping, whose pages are made present as writing to each would.
            let answer =
                unsafe { libc::madvise(self.start.as_ptr().add(start).cast(), len, libc::MADV_POPULATE_WRITE) };
            // Kernels before 5.14 do not know the advice; there, pages come with the first touch.
            if answer != 0 && std::io::Error::last_os_error().raw_os_error() != Some(libc::EINVAL) {
                return Err(out_of_memory("madvise"));
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
        // SAFETY: exactly the range that `new` made; no piece points into it any more, since each holds an Arc of it.
        unsafe { unmap(self.start, self.len) };
    }
}

// SAFETY: a mapping is an address range; what may be read and written in it is decided by the pieces.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

// A panic cannot leave it half changed: nothing of it changes but what it is pinned by, once.
impl std::panic::RefUnwindSafe for Mapping {}

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
unsafe fn map_over(start: NonNull<u8>, len: usize, file: Option<&Arc<OwnedFd>>) -> Result<()> {
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
    Error::Exhausted(format!(
        "{call} failed: {cause}; the system has less memory than the server's --host-memory promises"
    ))
}
