//! Bytes, bits and positions between host memory and the device.

use std::ops::Range;

use arrow::buffer::Buffer;
use arrow::util::bit_mask;
use rayon::prelude::*;

use super::Run;
use super::buffer::{HostBuffer, bytes_of, split_at_bounds, values_of};
use crate::Result;
use crate::device::cache::CachedPart;
use crate::device::{BitSlice, DeviceBuffer, Positions};
use crate::memory::Arena;

/// Bytes that a thread copies at a time.
const COPY_BYTES: usize = 1 << 20;

/// Copies parts into one buffer. A single part is used in place, unless a link requires it to be
/// `copied`.
pub(super) fn copy_in(run: &Run<'_>, parts: &[Buffer], copied: bool) -> Result<DeviceBuffer> {
    if let ([part], false) = (parts, copied) {
        return Ok(HostBuffer::shared(part.clone()));
    }
    let mut bounds = vec![0];
    bounds.extend(parts.iter().scan(0, |end, part| {
        *end += part.len();
        Some(*end)
    }));
    let mut values = run.values::<u8>(bounds[parts.len()], "copying a column to the device")?;
    let pieces = split_at_bounds(&mut values, &bounds, 1);
    parts.par_iter().zip(pieces).try_for_each(|(part, piece)| copy_bytes(run, part, piece))?;
    Ok(values.freeze())
}

/// Copies in parallel, in pieces, and checks for cancellation before each piece.
fn copy_bytes(run: &Run<'_>, from: &[u8], to: &mut [u8]) -> Result<()> {
    to.par_chunks_mut(COPY_BYTES).zip(from.par_chunks(COPY_BYTES)).try_for_each(|(to, from)| {
        run.cancel.check()?;
        to.copy_from_slice(from);
        Ok(())
    })
}

/// Concatenates parts of buffers that the device has already.
pub(super) fn concat<'a>(
    run: &Run<'_>,
    parts: impl Iterator<Item = (&'a DeviceBuffer, Range<usize>)> + Clone,
    purpose: &str,
) -> Result<DeviceBuffer> {
    let mut values = run.values::<u8>(parts.clone().map(|(_, bytes)| bytes.len()).sum(), purpose)?;
    let mut rest = &mut values[..];
    for (part, bytes) in parts {
        let (to, after) = rest.split_at_mut(bytes.len());
        run.copy(&bytes_of(part)[bytes], to)?;
        rest = after;
    }
    Ok(values.freeze())
}

/// Concatenates parts of cached buffers.
pub(super) fn put_together(run: &Run<'_>, parts: &[CachedPart]) -> Result<DeviceBuffer> {
    concat(run, parts.iter().map(|part| (&part.buffer, part.bytes.clone())), "concatenating a column")
}

pub(super) fn copy_in_bits(run: &Run<'_>, parts: &[BitSlice]) -> Result<DeviceBuffer> {
    let total: usize = parts.iter().map(BitSlice::len).sum();
    let mut bitmap = run.values::<u8>(total.div_ceil(8), "copying a bitmap to the device")?;
    bitmap.fill(0);
    let mut start = 0;
    for part in parts {
        run.cancel.check()?;
        match part {
            BitSlice::Bits { buffer, offset, len } => {
                bit_mask::set_bits(&mut bitmap, buffer, start, *offset, *len);
            }
            BitSlice::Ones { len } => set_ones(&mut bitmap, start, *len),
        }
        start += part.len();
    }
    Ok(bitmap.freeze())
}

/// Sets the bits `start..start + len`.
fn set_ones(bitmap: &mut [u8], start: usize, len: usize) {
    let end = start + len;
    let whole = start.div_ceil(8)..end / 8;
    if whole.start > whole.end {
        (start..end).for_each(|bit| bitmap[bit / 8] |= 1 << (bit % 8));
        return;
    }
    (start..8 * whole.start).chain(8 * whole.end..end).for_each(|bit| bitmap[bit / 8] |= 1 << (bit % 8));
    bitmap[whole].fill(0xff);
}

pub(super) fn copy_out(run: &Run<'_>, buffer: &DeviceBuffer, len: usize, arena: &Arena) -> Result<Buffer> {
    let mut copy = arena.allocate(len, "copying a column from the device")?;
    copy_bytes(run, &bytes_of(buffer)[..len], &mut copy)?;
    Ok(copy.freeze())
}

pub(super) fn copy(run: &Run<'_>, buffer: &DeviceBuffer) -> Result<DeviceBuffer> {
    let from = bytes_of(buffer);
    let mut copy = run.values::<u8>(from.len(), "copying a buffer on the device")?;
    copy_bytes(run, from, &mut copy)?;
    Ok(copy.freeze())
}

pub(super) fn positions_to_host(run: &Run<'_>, positions: &Positions, arena: &Arena) -> Result<Buffer> {
    let mut copy = arena.allocate(positions.len() * size_of::<u32>(), "copying row positions to host memory")?;
    let out: &mut [u32] = bytemuck::cast_slice_mut(&mut copy);
    match positions {
        Positions::Range(range) => write_range(run, range.start, out)?,
        Positions::List { data, rows, .. } => run.copy(values_of::<u32>(data, *rows), out)?,
    }
    Ok(copy.freeze())
}

/// Writes `start`, `start + 1`, and so on.
pub(super) fn write_range(run: &Run<'_>, start: usize, out: &mut [u32]) -> Result<()> {
    run.fill(out, |morsel_start, morsel| {
        let first = (start + morsel_start) as u32;
        morsel.iter_mut().zip(0..).for_each(|(out, offset)| *out = first + offset);
    })
}

#[cfg(test)]
mod tests {
    use arrow::buffer::BooleanBuffer;

    use super::*;
    use crate::device::Device;
    use crate::device::host::testing::{Bench, random};

    #[test]
    fn a_single_part_is_used_without_a_copy_and_several_are_concatenated() {
        let bench = Bench::new(2);
        let part = Buffer::from_vec((0..100_000u32).collect::<Vec<_>>());
        let one = bench.device.copy_in(std::slice::from_ref(&part), &bench.stream).unwrap();
        assert_eq!(bytes_of(&one).as_ptr(), part.as_ptr());
        assert_eq!(bench.used_bytes(), 0);
        let parts = [part.slice_with_length(4, 12), Buffer::from_vec(Vec::<u8>::new()), part.clone()];
        let joined = bench.device.copy_in(&parts, &bench.stream).unwrap();
        assert_eq!(bytes_of(&joined), [&part[4..16], &part[..]].concat());
        assert!(bench.used_bytes() >= part.len() as u64);
        let back = bench.device.copy_out(&joined, 20, &bench.arena, &bench.stream).unwrap();
        assert_eq!(back.as_slice(), &bytes_of(&joined)[..20]);
        assert_eq!(bench.device.copy_in(&[], &bench.stream).unwrap().size_bytes(), 0);
    }

    #[test]
    fn a_copy_on_the_device_has_its_own_memory() {
        let bench = Bench::new(2);
        let values = Buffer::from_vec((0..2 * COPY_BYTES as u32 / 4 + 5).collect::<Vec<_>>());
        let original = bench.device.copy_in(std::slice::from_ref(&values), &bench.stream).unwrap();
        let copy = bench.device.copy(&original, &bench.stream).unwrap();
        assert_eq!(bytes_of(&copy), values.as_slice());
        assert_ne!(bytes_of(&copy).as_ptr(), values.as_ptr());
        assert!(bench.used_bytes() >= values.len() as u64);
    }

    #[test]
    fn bits_at_any_offset_are_concatenated() {
        let bench = Bench::new(2);
        let mut random = random(11);
        use rand::Rng;
        for _ in 0..200 {
            let mut expected = Vec::new();
            let mut parts = Vec::new();
            for _ in 0..random.random_range(0..5) {
                let len = random.random_range(0..200);
                if random.random_bool(0.3) {
                    parts.push(BitSlice::Ones { len });
                    expected.extend(std::iter::repeat_n(true, len));
                } else {
                    let offset = random.random_range(0..100);
                    let bits: Vec<bool> = (0..offset + len).map(|_| random.random()).collect();
                    let buffer = BooleanBuffer::from(bits.clone()).into_inner();
                    parts.push(BitSlice::Bits { buffer, offset, len });
                    expected.extend(&bits[offset..]);
                }
            }
            let joined = bench.device.copy_in_bits(&parts, &bench.stream).unwrap();
            let found = BooleanBuffer::new(Buffer::from(bytes_of(&joined)), 0, expected.len());
            assert_eq!(found.iter().collect::<Vec<_>>(), expected, "parts {parts:?}");
        }
    }
}
