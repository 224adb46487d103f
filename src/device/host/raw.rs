//! The unsafe code of the host device: blocks of memory, the memory layout of table slots, atomic
//! views, and the three instructions that safe Rust does not name.
//!
//! Every function here is safe to call with any arguments. A comment at each block gives the
//! reason.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::atomic::AtomicU32;

use bytemuck::{Pod, Zeroable};

/// Size of a cache line. Every block starts at a multiple of it.
pub(super) const LINE_BYTES: usize = 64;

/// Size and alignment of a huge page. Blocks of at least this size are mapped, so that the kernel
/// can back them with huge pages. Random access into 4 KiB pages would miss the translation buffer
/// at almost every step.
const HUGE_PAGE_BYTES: usize = 2 << 20;

/// Owned, initialised memory, aligned to [`LINE_BYTES`]. Fresh blocks are zero.
#[derive(Debug)]
pub(super) struct Block {
    start: NonNull<u8>,
    len: usize,
}

impl Block {
    /// Allocates a block of at least `len` bytes, or `None` when the system has no memory.
    pub(super) fn new(len: usize) -> Option<Self> {
        let len = Self::rounded(len)?;
        if len >= HUGE_PAGE_BYTES {
            return Self::map(len);
        }
        let layout = Layout::from_size_align(len, LINE_BYTES).ok()?;
        // SAFETY: the layout has a size above zero.
        let start = NonNull::new(unsafe { alloc_zeroed(layout) })?;
        Some(Self { start, len })
    }

    /// Returns the size of a new block for `len` bytes: whole huge pages, or whole lines. `None` on
    /// overflow.
    pub(super) fn rounded(len: usize) -> Option<usize> {
        let unit = if len >= HUGE_PAGE_BYTES { HUGE_PAGE_BYTES } else { LINE_BYTES };
        len.max(1).checked_next_multiple_of(unit)
    }

    /// True if the block has pages of its own.
    fn is_mapped(&self) -> bool {
        self.len >= HUGE_PAGE_BYTES
    }

    fn map(len: usize) -> Option<Self> {
        // One page more than needed, with both ends unmapped again: mmap does not align.
        let mapped_len = len.checked_add(HUGE_PAGE_BYTES)?;
        // SAFETY: a fresh private mapping at an address of the kernel's choice.
        let address = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                mapped_len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        if address == libc::MAP_FAILED {
            return None;
        }
        let head = (address as usize).next_multiple_of(HUGE_PAGE_BYTES) - address as usize;
        let tail = HUGE_PAGE_BYTES - head;
        let start = address.cast::<u8>().wrapping_add(head);
        // SAFETY: head, block and tail make up the mapping just made, which no other code knows of.
        // The advice does not change the bytes.
        unsafe {
            if head > 0 {
                libc::munmap(address, head);
            }
            if tail > 0 {
                libc::munmap(start.add(len).cast(), tail);
            }
            libc::madvise(start.cast(), len, libc::MADV_HUGEPAGE);
        }
        Some(Self { start: NonNull::new(start)?, len })
    }
}

impl Deref for Block {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: `start..start + len` is owned by this block and initialised (zero or written).
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl DerefMut for Block {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as `deref`, and `&mut self` excludes every other access.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        if self.is_mapped() {
            // SAFETY: exactly the range that `map` left mapped; slices of it borrow this block and
            // are gone.
            unsafe { libc::munmap(self.start.as_ptr().cast(), self.len) };
        } else {
            let layout = Layout::from_size_align(self.len, LINE_BYTES).expect("the layout it was allocated with");
            // SAFETY: allocated by `new` with this very layout.
            unsafe { dealloc(self.start.as_ptr(), layout) };
        }
    }
}

// SAFETY: a block owns its bytes exclusively, and memory may be used and freed by any thread.
unsafe impl Send for Block {}
// SAFETY: `&Block` only reads.
unsafe impl Sync for Block {}

/// A slot of a hash table over distinct 4-byte keys. `first` is the position of the key's row, or
/// `NO_ROW` in an empty slot.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Slot4 {
    pub(super) key: u32,
    pub(super) first: u32,
}

/// A slot of a hash table over 4-byte keys that may repeat: `count` rows from `first`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct RunSlot4 {
    pub(super) key: u32,
    pub(super) first: u32,
    pub(super) count: u32,
    pub(super) padding: u32,
}

/// A slot of a hash table over 8-byte keys. The run length uses bytes that alignment would leave
/// empty.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Slot8 {
    pub(super) key: u64,
    pub(super) first: u32,
    pub(super) count: u32,
}

/// A slot of a hash table over 16-byte keys.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Slot16 {
    pub(super) key: u128,
    pub(super) first: u32,
    pub(super) count: u32,
    pub(super) padding: u64,
}

// SAFETY: for this and the next seven: plain integers, all bit patterns valid. The sizes of the
// fields add up, so there is no padding. The assertions below would fail to compile otherwise.
unsafe impl Zeroable for Slot4 {}
// SAFETY: as above.
unsafe impl Pod for Slot4 {}
// SAFETY: as above.
unsafe impl Zeroable for RunSlot4 {}
// SAFETY: as above.
unsafe impl Pod for RunSlot4 {}
// SAFETY: as above.
unsafe impl Zeroable for Slot8 {}
// SAFETY: as above.
unsafe impl Pod for Slot8 {}
// SAFETY: as above.
unsafe impl Zeroable for Slot16 {}
// SAFETY: as above.
unsafe impl Pod for Slot16 {}

const _: () = assert!(size_of::<Slot4>() == 8 && size_of::<RunSlot4>() == 16);
const _: () = assert!(size_of::<Slot8>() == 16 && size_of::<Slot16>() == 32);

/// Returns the numbers as atomics, so that several threads can write them at once.
pub(super) fn as_atomic_u32(values: &mut [u32]) -> &[AtomicU32] {
    // SAFETY: same size and alignment (asserted below). The exclusive borrow is given up for the
    // lifetime of the result, so that every access is atomic.
    unsafe { std::slice::from_raw_parts(values.as_mut_ptr().cast(), values.len()) }
}

const _: () = assert!(align_of::<AtomicU32>() == align_of::<u32>());

/// Prefetches the cache line of `values[index]`. An index outside the slice prefetches an unused
/// line.
#[inline(always)]
pub(super) fn prefetch<T>(values: &[T], index: usize) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a prefetch never faults, whatever the address, and SSE is part of x86-64.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(values.as_ptr().wrapping_add(index).cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (values, index);
}

/// Copies one cache line of values to a line-aligned place, bypassing the caches. The line is not
/// read first, and displaces no cached data. Call [`fence`] before another thread reads.
///
/// # Panics
/// When either slice is not one line long, or the destination is not aligned to a line.
#[inline(always)]
pub(super) fn stream_line<T: Pod>(to: &mut [T], from: &[T]) {
    let (to, from): (&mut [u8], &[u8]) = (bytemuck::cast_slice_mut(to), bytemuck::cast_slice(from));
    assert!(to.len() == LINE_BYTES && from.len() == LINE_BYTES && (to.as_ptr() as usize).is_multiple_of(LINE_BYTES));
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_stream_si128};
        for part in 0..LINE_BYTES / 16 {
            // SAFETY: both slices have 64 bytes and the destination is aligned, as asserted; SSE2
            // is part of x86-64.
            unsafe {
                let value = _mm_loadu_si128(from.as_ptr().cast::<__m128i>().add(part));
                _mm_stream_si128(to.as_mut_ptr().cast::<__m128i>().add(part), value);
            }
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    to.copy_from_slice(from);
}

/// Makes lines written by [`stream_line`] visible in order before later writes of this thread.
pub(super) fn fence() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: SSE is part of x86-64.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
}
