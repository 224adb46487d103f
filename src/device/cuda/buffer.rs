//! Device memory: charged to the budget, taken from the stream-ordered pool and given back in stream order.

use std::any::Any;
use std::ops::Range;
use std::sync::Arc;

use cudarc::driver::{result, sys};
use parking_lot::Mutex;

use super::driver::{Mark, Queue};
use super::fault;
use crate::device::{DeviceBuffer, DeviceMemory};
use crate::memory::{Budget, Reservation};
use crate::{Error, Result};

/// What the pool hands out begins at a multiple of this many bytes, and is as long as one; kernels that move whole words rely on it.
pub(super) const GRANULE_BYTES: usize = 256;

/// Memory of a GPU. Dropping it frees it behind the work queued so far on the stream it was made for, or that it was
/// [handed over](Self::hand_over) to.
#[derive(Debug)]
pub(super) struct CudaBuffer {
    pointer: sys::CUdeviceptr,
    bytes: usize,
    /// Where it is freed.
    queue: Mutex<Arc<Queue>>,
    /// What of it is there when, if it was copied in piece by piece.
    arrivals: Mutex<Vec<Arrival>>,
    memory: Memory,
}

/// Whose the memory of a buffer is.
#[derive(Debug)]
enum Memory {
    /// Its own, charged so.
    Own(Reservation),
    /// That of another buffer, which stays as long as this one does.
    PartOf(#[expect(dead_code, reason = "held, not read")] DeviceBuffer),
}

/// A piece of a buffer that is being copied in.
#[derive(Debug)]
pub(super) struct Arrival {
    /// Where in the buffer it ends. It begins where the one before ends.
    pub(super) end: usize,
    pub(super) there: Mark,
}

impl CudaBuffer {
    /// `bytes` bytes whose contents are unspecified.
    pub(super) fn new(queue: &Arc<Queue>, budget: &Budget, bytes: usize, purpose: &str) -> Result<Self> {
        let taken = bytes.max(1).checked_next_multiple_of(GRANULE_BYTES);
        let taken = taken.ok_or_else(|| Error::Exhausted(format!("{purpose} needs more than can be addressed")))?;
        let reservation = budget.reserve(taken as u64, purpose)?;
        queue.gpu.bind()?;
        fault::before_allocation(queue, purpose)?;
        // SAFETY: the memory is freed once, on drop.
        let allocated = unsafe { result::malloc_async(queue.raw(), taken) };
        let mut pointer = 0;
        queue.gpu.check(allocated.map(|allocated| pointer = allocated), purpose)?;
        let (queue, memory) = (Mutex::new(queue.clone()), Memory::Own(reservation));
        Ok(Self { pointer, bytes, queue, arrivals: Mutex::default(), memory })
    }

    /// Those bytes of another buffer, where they lie.
    pub(super) fn part_of(whole: &DeviceBuffer, bytes: Range<usize>) -> Self {
        let CudaBuffer { pointer, bytes: whole_bytes, queue, .. } = cuda(whole);
        assert!(bytes.end <= *whole_bytes, "bytes {bytes:?} of {whole_bytes}");
        Self {
            pointer: pointer + bytes.start as u64,
            bytes: bytes.len(),
            queue: Mutex::new(queue.lock().clone()),
            arrivals: Mutex::default(),
            memory: Memory::PartOf(whole.clone()),
        }
    }

    /// Says what of it is there when. The last piece ends where the buffer does.
    pub(super) fn arrives(&self, arrivals: Vec<Arrival>) {
        *self.arrivals.lock() = arrivals;
    }

    /// Whether it is being copied in, piece by piece, and most of it is not there yet.
    pub(super) fn is_arriving(&self) -> bool {
        let arrivals = self.arrivals.lock();
        arrivals.get(arrivals.len() / 2).is_some_and(|middle| !middle.there.is_done())
    }

    /// The pieces that it is copied in by, for the first who asks; none once half of it is there.
    pub(super) fn take_arrivals(&self) -> Vec<Arrival> {
        let is_arriving = self.is_arriving();
        let arrivals = std::mem::take(&mut *self.arrivals.lock());
        if is_arriving { arrivals } else { Vec::new() }
    }

    /// From now on it is freed on that stream, so that the one it was made for need not live as long, unless that would be on
    /// `but_from`. What else uses it is done, or waited for by that stream, before it is dropped.
    pub(super) fn hand_over(&self, queue: &Arc<Queue>, but_from: Option<&Arc<Queue>>) {
        let mut current = self.queue.lock();
        if !but_from.is_some_and(|other| Arc::ptr_eq(other, &current)) {
            *current = queue.clone();
        }
    }

    /// Bytes that may be used.
    pub(super) fn size(&self) -> usize {
        self.bytes
    }

    /// Where it is, on the device.
    pub(super) fn pointer(&self) -> sys::CUdeviceptr {
        self.pointer
    }

    /// Where it is, for kernels that read it.
    pub(super) fn as_ptr<T>(&self) -> *const T {
        self.pointer as *const T
    }

    /// Where it is, for kernels that write it.
    pub(super) fn as_mut_ptr<T>(&self) -> *mut T {
        self.pointer as *mut T
    }
}

impl Drop for CudaBuffer {
    fn drop(&mut self) {
        if let Memory::PartOf(_) = self.memory {
            return;
        }
        // On a lost device there is nothing to be freed.
        let queue = self.queue.get_mut();
        if queue.gpu.bind().is_ok() {
            // SAFETY: work that uses it was queued before, on this stream or one that this stream waits for, or is done.
            let _ = unsafe { result::free_async(self.pointer, queue.raw()) };
        }
    }
}

impl DeviceMemory for CudaBuffer {
    fn size_bytes(&self) -> usize {
        self.bytes
    }

    fn charged_bytes(&self) -> u64 {
        match &self.memory {
            Memory::Own(reservation) => reservation.bytes(),
            Memory::PartOf(_) => 0,
        }
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// The concrete buffer behind a handle.
pub(super) fn cuda(buffer: &DeviceBuffer) -> &CudaBuffer {
    buffer.as_any().downcast_ref().expect("a buffer of another device was given to a GPU")
}

/// Where a buffer is, which must have at least `count` values.
pub(super) fn pointer_of<T>(buffer: &DeviceBuffer, count: usize) -> *const T {
    let buffer = cuda(buffer);
    assert!(
        buffer.bytes / size_of::<T>() >= count,
        "a buffer of {} bytes was said to hold {count} values",
        buffer.bytes
    );
    buffer.as_ptr()
}
