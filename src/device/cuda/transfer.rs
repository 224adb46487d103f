//! Copies of bytes, bits and positions between host memory and the GPU.
//!
//! Memory of the arena is registered with the driver, so that copies are asynchronous and run at
//! the rate of the link.

use std::ops::Range;
use std::sync::Arc;

use arrow::buffer::Buffer;
use arrow::util::bit_mask;
use cudarc::driver::result;

use super::buffer::{CudaBuffer, GRANULE_BYTES, cuda};
use super::fault;
use super::work::Work;
use crate::Result;
use crate::device::cache::CachedPart;
use crate::device::{BitSlice, DeviceBuffer, Positions};
use crate::memory::{Arena, ArenaBuffer};

const COPY_IN: &str = "copying a column to the device";

pub(super) fn copy_in(work: &Work<'_>, parts: &[Buffer]) -> Result<DeviceBuffer> {
    fault::before_copy(work.queue, COPY_IN)?;
    Ok(Arc::new(work.copy_from_host(parts, COPY_IN)?))
}

/// Concatenates parts that are already on the GPU. A single part is used in place if it begins
/// where a buffer could.
pub(super) fn put_together(work: &Work<'_>, parts: &[CachedPart]) -> Result<DeviceBuffer> {
    const PURPOSE: &str = "concatenating a column";
    if let [part] = parts
        && part.bytes.start.is_multiple_of(GRANULE_BYTES)
    {
        return Ok(Arc::new(CudaBuffer::part_of(&part.buffer, part.bytes.clone())));
    }
    concat(work, parts.iter().map(|part| (&part.buffer, part.bytes.clone())), PURPOSE)
}

/// Concatenates parts of buffers.
pub(super) fn concat<'a>(
    work: &Work<'_>,
    parts: impl Iterator<Item = (&'a DeviceBuffer, Range<usize>)> + Clone,
    purpose: &'static str,
) -> Result<DeviceBuffer> {
    let buffer = work.buffer(parts.clone().map(|(_, bytes)| bytes.len()).sum(), purpose)?;
    let mut start = 0;
    for (part, bytes) in parts {
        work.copy_to(cuda(part), bytes.clone(), &buffer, start, purpose)?;
        start += bytes.len();
    }
    Ok(Arc::new(buffer))
}

const COPY_BITS_IN: &str = "copying a bitmap to the device";

pub(super) fn copy_in_bits(work: &Work<'_>, parts: &[BitSlice]) -> Result<DeviceBuffer> {
    let bitmap = if are_whole_bytes(parts) { copy_in_bytes(work, parts)? } else { copy_in_joined(work, parts)? };
    Ok(Arc::new(bitmap))
}

/// True if all parts begin at a byte, both in their source and in the bitmap.
fn are_whole_bytes(parts: &[BitSlice]) -> bool {
    let mut start = 0;
    parts.iter().filter(|part| !part.is_empty()).all(|part| {
        let offset = match part {
            BitSlice::Bits { offset, .. } => *offset,
            BitSlice::Ones { .. } => 0,
        };
        let is_whole = start % 8 == 0 && offset % 8 == 0;
        start += part.len();
        is_whole
    })
}

/// Copies parts of whole bytes from pinned memory without waiting.
fn copy_in_bytes(work: &Work<'_>, parts: &[BitSlice]) -> Result<CudaBuffer> {
    fault::before_copy(work.queue, COPY_BITS_IN)?;
    let total: usize = parts.iter().map(BitSlice::len).sum();
    let bitmap = work.buffer(total.div_ceil(8), COPY_BITS_IN)?;
    let mut start = 0;
    for part in parts.iter().filter(|part| !part.is_empty()) {
        work.cancel.check()?;
        // Only the last part may end within a byte. The remaining bits of that byte are zero.
        let (whole, rest) = (part.len() / 8, part.len() % 8);
        let mut last = 0xff;
        match part {
            BitSlice::Bits { buffer, offset, .. } => {
                let bytes = buffer.slice(offset / 8);
                if rest > 0 {
                    last = bytes[whole];
                }
                if whole > 0 {
                    let _watched = work.watch(COPY_BITS_IN, whole);
                    work.copy_part(bytes.slice_with_length(0, whole), &bitmap, start, COPY_BITS_IN)?;
                }
            }
            BitSlice::Ones { .. } => work.fill(&bitmap, start..start + whole, 0xff, COPY_BITS_IN)?,
        }
        if rest > 0 {
            work.fill(&bitmap, start + whole..start + whole + 1, last & ((1 << rest) - 1), COPY_BITS_IN)?;
        }
        start += whole;
    }
    Ok(bitmap)
}

/// Joins parts that begin within a byte on the CPU, then copies them in.
fn copy_in_joined(work: &Work<'_>, parts: &[BitSlice]) -> Result<CudaBuffer> {
    let total: usize = parts.iter().map(BitSlice::len).sum();
    let mut bitmap = vec![0u8; total.div_ceil(8)];
    let mut start = 0;
    for part in parts {
        work.cancel.check()?;
        match part {
            BitSlice::Bits { buffer, offset, len } => {
                bit_mask::set_bits(&mut bitmap, buffer, start, *offset, *len);
            }
            BitSlice::Ones { len } => {
                let ones = vec![0xffu8; len.div_ceil(8)];
                bit_mask::set_bits(&mut bitmap, &ones, start, 0, *len);
            }
        }
        start += part.len();
    }
    work.copy_from_host(&[Buffer::from_vec(bitmap)], COPY_BITS_IN)
}

pub(super) fn copy(work: &Work<'_>, from: &DeviceBuffer) -> Result<DeviceBuffer> {
    const PURPOSE: &str = "copying a buffer on the device";
    let from = cuda(from);
    let buffer = work.buffer(from.size(), PURPOSE)?;
    work.copy_to(from, 0..from.size(), &buffer, 0, PURPOSE)?;
    Ok(Arc::new(buffer))
}

pub(super) fn copy_out(work: &Work<'_>, buffer: &DeviceBuffer, len: usize, arena: &Arena) -> Result<Buffer> {
    const PURPOSE: &str = "copying a column from the device";
    let host = arena.allocate(len, PURPOSE)?;
    let host = copy_to_host(work, cuda(buffer), 0, host, PURPOSE)?;
    work.queue.synchronize(PURPOSE)?;
    Ok(host)
}

/// Queues a copy of a buffer's bytes from `start` on to a piece of the arena. The bytes have
/// arrived after the next synchronization.
pub(super) fn copy_to_host(
    work: &Work<'_>,
    from: &CudaBuffer,
    start: usize,
    mut to: ArenaBuffer,
    purpose: &'static str,
) -> Result<Buffer> {
    let len = to.len();
    assert!(start + len <= from.size(), "{len} bytes from {start} on of a buffer of {}", from.size());
    if len == 0 {
        return Ok(to.freeze());
    }
    let _watched = work.watch(purpose, len);
    // SAFETY: the piece is as long as the copy, and the buffer has its bytes, as was just asserted.
    // The queue keeps the piece until the copy is done, even after an error.
    let copied = unsafe { result::memcpy_dtoh_async(&mut to[..], from.pointer() + start as u64, work.queue.raw()) };
    let host = to.freeze();
    work.queue.hold(host.clone());
    work.queue.gpu.check(fault::of_copy_out(work.queue, copied), purpose)?;
    Ok(host)
}

pub(super) fn positions_to_host(work: &Work<'_>, positions: &Positions, arena: &Arena) -> Result<Buffer> {
    const PURPOSE: &str = "copying row positions to host memory";
    let mut host = arena.allocate(positions.len() * size_of::<u32>(), PURPOSE)?;
    match positions {
        Positions::Range(range) => {
            let out: &mut [u32] = bytemuck::cast_slice_mut(&mut host);
            out.iter_mut().zip(range.start as u32..).for_each(|(out, position)| *out = position);
            Ok(host.freeze())
        }
        Positions::List { data, .. } => {
            let host = copy_to_host(work, cuda(data), 0, host, PURPOSE)?;
            work.queue.synchronize(PURPOSE)?;
            Ok(host)
        }
    }
}
