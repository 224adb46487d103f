//! Context of a primitive: memory, a stream, and the only functions that launch kernels and fill
//! memory.

use std::ffi::c_int;
use std::ops::Range;
use std::ptr::null_mut;
use std::sync::Arc;

use arrow::buffer::Buffer;
use cudarc::driver::result;

use super::CudaStream;
use super::abi::{self, DOVETAIL_WORDS_MAX, DovetailMatchTotals, DovetailStream, DovetailWriteWords};
use super::buffer::{Arrival, CudaBuffer};
use super::driver::{Mark, Queue};
use super::fault;
use super::observe::Watched;
use crate::Result;
use crate::device::CancelFlag;
use crate::memory::Budget;

/// Name of every fill for observers, regardless of its purpose: a fill is work of the GPU's memory
/// alone, and no copy.
pub(super) const FILL: &str = "filling memory";

/// Bytes of one copy of a large buffer: the link carries copies of 16 MiB and more at its full rate
/// (`link` in `benches/results/gpu_micro.jsonl`). Tests have small buffers.
pub(super) const PIECE_BYTES: usize = if cfg!(test) { 64 << 10 } else { 32 << 20 };

/// A primitive that is being run.
pub(super) struct Work<'a> {
    pub(super) memory: &'a Budget,
    pub(super) stream: &'a CudaStream,
    pub(super) queue: &'a Arc<Queue>,
    pub(super) cancel: &'a CancelFlag,
}

/// A buffer that is being copied in. If it is large, the arrival of each piece is marked.
pub(super) struct Arriving<'a> {
    queue: &'a Arc<Queue>,
    bytes: usize,
    is_marked: bool,
    pub(super) arrivals: Vec<Arrival>,
}

impl Arriving<'_> {
    /// Notes that all bytes before `end` have been queued.
    pub(super) fn reached(&mut self, end: usize) -> Result<()> {
        let marked = self.arrivals.last().map_or(0, |arrival| arrival.end);
        if self.is_marked && (end - marked >= PIECE_BYTES || end == self.bytes) {
            self.arrivals.push(Arrival { end, there: Mark::record(self.queue)? });
        }
        Ok(())
    }
}

impl Work<'_> {
    /// Allocates memory whose contents are unspecified.
    pub(super) fn buffer(&self, bytes: usize, purpose: &str) -> Result<CudaBuffer> {
        CudaBuffer::new(self.queue, self.memory, bytes, purpose)
    }

    /// Allocates memory for `count` values whose contents are unspecified.
    pub(super) fn values<T>(&self, count: usize, purpose: &str) -> Result<CudaBuffer> {
        self.buffer(count.saturating_mul(size_of::<T>()), purpose)
    }

    /// Allocates memory in which every byte is `byte`.
    pub(super) fn filled(&self, bytes: usize, byte: u8, purpose: &str) -> Result<CudaBuffer> {
        let buffer = self.buffer(bytes, purpose)?;
        self.fill(&buffer, 0..bytes, byte, purpose)?;
        Ok(buffer)
    }

    /// Queues a fill: the given bytes of a buffer become `byte`. Cancellation and observers apply
    /// as for launches.
    pub(super) fn fill(&self, buffer: &CudaBuffer, bytes: Range<usize>, byte: u8, purpose: &str) -> Result<()> {
        assert!(bytes.end <= buffer.size(), "bytes {bytes:?} of {}", buffer.size());
        if bytes.is_empty() {
            return Ok(());
        }
        self.cancel.check()?;
        let watched = self.watch(FILL, bytes.len());
        let start = buffer.pointer() + bytes.start as u64;
        // SAFETY: the buffer has those bytes, as was just asserted.
        let filled = unsafe { result::memset_d8_async(start, byte, bytes.len(), self.queue.raw()) };
        drop(watched);
        self.queue.gpu.check(filled, purpose)
    }

    /// Allocates as much scratch memory as a kernel's entry point asks for. Fails if all bits of
    /// `bytes` are set, because the entry point could not tell the size.
    pub(super) fn scratch(&self, bytes: u64, purpose: &str) -> Result<CudaBuffer> {
        if bytes == u64::MAX {
            return Err(self.queue.gpu.unprepared(purpose));
        }
        self.buffer(usize::try_from(bytes).unwrap_or(usize::MAX), purpose)
    }

    /// Queues a kernel. All launches go through here, except those of the kernel that reads numbers
    /// back. Stops a cancelled job, and converts errors.
    ///
    /// `entry` must be an entry point of the kernels. `args` must be as the entry point documents:
    /// pointers to memory of this device that has the stated length. The callers in this room
    /// ensure both.
    pub(super) fn launch<A>(
        &self,
        kernel: &'static str,
        entry: unsafe extern "C" fn(*const A, DovetailStream) -> c_int,
        args: &A,
    ) -> Result<()> {
        self.cancel.check()?;
        fault::before_launch(self.queue, kernel)?;
        let watched = self.watch(kernel, 0);
        // SAFETY: as above; the arguments are read during the call.
        let code = unsafe { entry(args, self.queue.handle()) };
        drop(watched);
        self.queue.gpu.check_launch(code, kernel)
    }

    /// Tells the GPU's observer of work that is queued until the returned value is dropped.
    pub(super) fn watch(&self, what: &'static str, bytes: usize) -> Watched<'_> {
        self.queue.gpu.observer.watch(self.queue, what, bytes as u64)
    }

    /// Queues copies of host memory, concatenating the parts in one buffer. The queue keeps each
    /// part until the copy has read it. A large buffer records the arrival of its pieces
    /// ([`CudaBuffer::take_arrivals`]).
    pub(super) fn copy_from_host(&self, parts: &[Buffer], purpose: &'static str) -> Result<CudaBuffer> {
        let buffer = self.buffer(parts.iter().map(Buffer::len).sum(), purpose)?;
        let _watched = self.watch(purpose, buffer.size());
        let (mut end, mut arriving) = (0, self.arriving(buffer.size()));
        for part in parts.iter().filter(|part| !part.is_empty()) {
            let pieces = if arriving.is_marked { part.len().div_ceil(PIECE_BYTES) } else { 1 };
            let piece_bytes = part.len().div_ceil(pieces);
            for start in (0..part.len()).step_by(piece_bytes) {
                self.cancel.check()?;
                let piece = part.slice_with_length(start, piece_bytes.min(part.len() - start));
                let bytes = piece.len();
                self.copy_part(piece, &buffer, end, purpose)?;
                end += bytes;
                arriving.reached(end)?;
            }
        }
        buffer.arrives(arriving.arrivals);
        Ok(buffer)
    }

    /// Prepares marks for a buffer of `bytes` bytes that is about to be copied in from start to
    /// end.
    pub(super) fn arriving(&self, bytes: usize) -> Arriving<'_> {
        Arriving { queue: self.queue, bytes, is_marked: bytes >= 2 * PIECE_BYTES, arrivals: Vec::new() }
    }

    /// Queues a copy of host memory to a buffer, from `offset` on. The queue keeps `part` until the
    /// copy has read it.
    pub(super) fn copy_part(&self, part: Buffer, to: &CudaBuffer, offset: usize, purpose: &'static str) -> Result<()> {
        assert!(offset + part.len() <= to.size(), "{} bytes to {offset} of {}", part.len(), to.size());
        // SAFETY: the buffer has room for the bytes, as was just asserted. The queue keeps them
        // even if the call failed.
        let copied =
            unsafe { result::memcpy_htod_async(to.pointer() + offset as u64, part.as_slice(), self.queue.raw()) };
        // Hold the part only once the copy is queued: otherwise another thread that waits for the
        // stream could release it.
        self.queue.hold(part);
        self.queue.gpu.check(copied, purpose)
    }

    /// Writes a few words to a buffer, from word `at` on.
    pub(super) fn write_words(&self, words: &[u32], to: &CudaBuffer, at: usize) -> Result<()> {
        assert!((at + words.len()) * size_of::<u32>() <= to.size(), "{} words to word {at}", words.len());
        let mut args = DovetailWriteWords { words: [0; DOVETAIL_WORDS_MAX], count: words.len() as u32, to: null_mut() };
        args.words[..words.len()].copy_from_slice(words);
        // SAFETY: the buffer has those words, as was just asserted.
        args.to = unsafe { to.as_mut_ptr::<u32>().add(at) };
        self.launch("writing a number", abi::dovetail_write_words, &args)
    }

    /// Copies bytes of one buffer to another, from `offset` on.
    pub(super) fn copy_to(
        &self,
        from: &CudaBuffer,
        bytes: Range<usize>,
        to: &CudaBuffer,
        offset: usize,
        purpose: &'static str,
    ) -> Result<()> {
        let fits = bytes.end <= from.size() && offset + bytes.len() <= to.size();
        assert!(fits, "bytes {bytes:?} of {} to {offset} of {}", from.size(), to.size());
        if bytes.is_empty() {
            return Ok(());
        }
        let _watched = self.watch(purpose, bytes.len());
        let (source, target) = (from.pointer() + bytes.start as u64, to.pointer() + offset as u64);
        // SAFETY: both buffers have these bytes, as was just asserted.
        let copied = unsafe { result::memcpy_dtod_async(target, source, bytes.len(), self.queue.raw()) };
        self.queue.gpu.check(copied, purpose)
    }

    /// Reads one number back. Waits.
    pub(super) fn read<T: bytemuck::Pod>(&self, buffer: &CudaBuffer, purpose: &str) -> Result<T> {
        self.read_at(buffer, 0, purpose)
    }

    /// Reads back the number at index `at`. Waits.
    pub(super) fn read_at<T: bytemuck::Pod>(&self, buffer: &CudaBuffer, at: usize, purpose: &str) -> Result<T> {
        let start = at * size_of::<T>();
        assert!(start + size_of::<T>() <= buffer.size(), "number {at} of {} bytes", buffer.size());
        let bytes = self.queue.read_small(buffer.pointer() + start as u64, size_of::<T>(), purpose)?;
        Ok(bytemuck::pod_read_unaligned(&bytes))
    }

    /// Allocates totals that start at zero.
    pub(super) fn totals(&self) -> Result<CudaBuffer> {
        self.filled(size_of::<DovetailMatchTotals>(), 0, "totals of matches")
    }
}
