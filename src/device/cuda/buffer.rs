//! Device memory: charged to the budget, allocated from the stream-ordered pool and freed in stream
//! order.

use std::any::Any;
use std::ops::Range;
use std::sync::Arc;

use cudarc::driver::{result, sys};
use parking_lot::Mutex;

use super::driver::{Mark, Queue};
use super::fault;
use crate::device::{DeviceBuffer, DeviceMemory, Keys};
use crate::memory::{Budget, Reservation};
use crate::{Error, Result};

/// Alignment of the pool's memory, in bytes. Lengths are also multiples of it. Kernels that move
/// whole words rely on both.
pub(super) const GRANULE_BYTES: usize = 256;

/// Memory of a GPU. Dropping the buffer frees it after the work queued so far on its stream. That
/// is the stream it was made for, or the last [recorded](Self::record_stream) stream.
#[derive(Debug)]
pub(super) struct CudaBuffer {
    pointer: sys::CUdeviceptr,
    bytes: usize,
    /// Stream on which the buffer is freed.
    queue: Mutex<Arc<Queue>>,
    /// Arrivals of the buffer's pieces, if it was copied in piece by piece.
    arrivals: Mutex<Vec<Arrival>>,
    memory: Memory,
}

/// Ownership of a buffer's memory.
#[derive(Debug)]
enum Memory {
    Own(Reservation),
    /// Memory of another buffer, which lives as long as this one does.
    PartOf(#[expect(dead_code, reason = "held, not read")] DeviceBuffer),
}

/// A piece of a buffer that is being copied in.
#[derive(Debug)]
pub(super) struct Arrival {
    /// End of the piece in the buffer. The piece begins at the end of the one before.
    pub(super) end: usize,
    pub(super) there: Mark,
}

impl CudaBuffer {
    /// Allocates `bytes` bytes whose contents are unspecified.
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

    /// Returns a view of a range of another buffer's bytes.
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

    /// Records the arrivals of the buffer's pieces. The last piece ends at the end of the buffer.
    pub(super) fn arrives(&self, arrivals: Vec<Arrival>) {
        *self.arrivals.lock() = arrivals;
    }

    /// True if the buffer is being copied in piece by piece, and its middle piece has not arrived.
    pub(super) fn is_arriving(&self) -> bool {
        let arrivals = self.arrivals.lock();
        arrivals.get(arrivals.len() / 2).is_some_and(|middle| !middle.there.is_done())
    }

    /// Takes the pieces by which the buffer is copied in. Returns none to later callers, or once
    /// the middle piece has arrived.
    pub(super) fn take_arrivals(&self) -> Vec<Arrival> {
        let is_arriving = self.is_arriving();
        let arrivals = std::mem::take(&mut *self.arrivals.lock());
        if is_arriving { arrivals } else { Vec::new() }
    }

    /// Makes `queue` the stream on which the buffer is freed, so that the stream it was made for
    /// may end earlier. A buffer whose current stream is `but_from` stays there. Before the buffer
    /// is dropped, other uses must be done, or the buffer's stream must wait for them.
    pub(super) fn record_stream(&self, queue: &Arc<Queue>, but_from: Option<&Arc<Queue>>) {
        let mut current = self.queue.lock();
        if !but_from.is_some_and(|other| Arc::ptr_eq(other, &current)) {
            *current = queue.clone();
        }
    }

    /// Returns the number of usable bytes.
    pub(super) fn size(&self) -> usize {
        self.bytes
    }

    /// Returns the buffer's address on the device.
    pub(super) fn pointer(&self) -> sys::CUdeviceptr {
        self.pointer
    }

    /// Returns the address for kernels that read the buffer.
    pub(super) fn as_ptr<T>(&self) -> *const T {
        self.pointer as *const T
    }

    /// Returns the address for kernels that write the buffer.
    pub(super) fn as_mut_ptr<T>(&self) -> *mut T {
        self.pointer as *mut T
    }
}

impl Drop for CudaBuffer {
    fn drop(&mut self) {
        if let Memory::PartOf(_) = self.memory {
            return;
        }
        let queue = self.queue.get_mut();
        if let Some(_visit) = queue.gpu.visit_unless_lost() {
            // SAFETY: work that uses the memory is done, or was queued before, on this stream or on
            // one that this stream waits for.
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

/// Returns the concrete buffer behind a handle.
pub(super) fn cuda(buffer: &DeviceBuffer) -> &CudaBuffer {
    buffer.as_any().downcast_ref().expect("a buffer that a GPU gets is a GPU buffer")
}

/// Returns the address of a buffer, which must hold at least `count` values.
pub(super) fn pointer_of<T>(buffer: &DeviceBuffer, count: usize) -> *const T {
    let buffer = cuda(buffer);
    assert!(
        buffer.bytes / size_of::<T>() >= count,
        "a buffer of {} bytes is too small for {count} values",
        buffer.bytes
    );
    buffer.as_ptr()
}

/// Returns the address of keys.
pub(super) fn key_pointer(keys: &Keys) -> *const std::ffi::c_void {
    pointer_of::<u8>(&keys.data, keys.rows * keys.width.bytes()).cast()
}
