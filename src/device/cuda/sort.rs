//! Sorting of keys by CUB's radix sort, and the check if keys are sorted.

use std::ops::Range;
use std::ptr::null;
use std::sync::Arc;

use super::abi;
use super::buffer::{CudaBuffer, key_pointer};
use super::gather::{move_payload, numbers, rearranged};
use super::work::Work;
use crate::device::{KeyWidth, Keys, Payload, Positions, Sorted};
use crate::{Error, Result};

pub(super) fn is_sorted(work: &Work<'_>, keys: &Keys) -> Result<bool> {
    const PURPOSE: &str = "checking the order of keys";
    let unsorted = work.filled(size_of::<u32>(), 0, PURPOSE)?;
    let args = abi::DovetailIsSorted {
        keys: key_pointer(keys),
        rows: keys.rows as u64,
        key_bytes: keys.width.bytes() as u32,
        unsorted: unsorted.as_mut_ptr(),
    };
    work.launch(PURPOSE, abi::dovetail_is_sorted, &args)?;
    Ok(work.read::<u32>(&unsorted, PURPOSE)? == 0)
}

/// Sorts the keys with row numbers, then gathers the payload columns by these numbers. Payload of 4
/// bytes in the radix sort itself would be moved by each pass, as often as the key.
pub(super) fn sort(work: &Work<'_>, keys: &Keys, payload: &[Payload]) -> Result<Sorted> {
    let (order, sorted) = sorted_order(work, keys, Image::Key)?;
    let keys = match sorted {
        Some(data) => Keys { data: Arc::new(data), ..keys.clone() },
        None => rearranged(work, keys, &order)?,
    };
    Ok(Sorted { payload: move_payload(work, payload, &order)?, keys })
}

/// Image by which keys are sorted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Image {
    Key,
    /// The mixed key without its first bits: partitions stay in order, and equal keys become
    /// adjacent.
    Mixed {
        skip: u32,
    },
}

/// Returns the row numbers in the order of the keys' images. Also returns the sorted images if they
/// are the keys themselves.
pub(super) fn sorted_order(work: &Work<'_>, keys: &Keys, image: Image) -> Result<(Positions, Option<CudaBuffer>)> {
    const PURPOSE: &str = "sorting keys";
    let rows = keys.rows;
    let numbers = numbers(work, rows)?;
    let width = keys.width.bytes().min(8);
    let images = |order: Option<&CudaBuffer>, upper: bool| -> Result<CudaBuffer> {
        let images = work.buffer(rows * width, PURPOSE)?;
        let (mixed, skip) = match image {
            Image::Key => (0, 0),
            Image::Mixed { skip } => (1, skip),
        };
        let args = abi::DovetailSortImage {
            keys: key_pointer(keys),
            order: order.map_or(null(), CudaBuffer::as_ptr),
            rows: rows as u64,
            key_bytes: keys.width.bytes() as u32,
            mixed,
            skip,
            upper: u32::from(upper),
            images: images.as_mut_ptr(),
        };
        work.launch("making sort keys", abi::dovetail_sort_image, &args)?;
        Ok(images)
    };
    let (order, sorted) = match (keys.width, image) {
        (KeyWidth::W4 | KeyWidth::W8, Image::Key) => {
            let (sorted, order) = sort_pass(work, key_pointer(keys), numbers, rows, all_bits(width))?;
            (order, Some(sorted))
        }
        (KeyWidth::W4 | KeyWidth::W8, Image::Mixed { .. }) => {
            let images = images(None, false)?;
            (sort_pass(work, images.as_ptr(), numbers, rows, all_bits(width))?.1, None)
        }
        (KeyWidth::W16, _) => {
            // The sort is stable: sort by the lower half first, then by the upper.
            let lower = images(None, false)?;
            let (_, order) = sort_pass(work, lower.as_ptr(), numbers, rows, all_bits(width))?;
            drop(lower);
            let upper = images(Some(&order), true)?;
            (sort_pass(work, upper.as_ptr(), order, rows, all_bits(width))?.1, None)
        }
    };
    Ok((Positions::List { data: Arc::new(order), rows, nullable: false }, sorted))
}

/// Bits by which integers are sorted.
#[derive(Clone, Debug)]
struct SortBits {
    /// Bytes of an integer, 4 or 8.
    width: usize,
    bits: Range<u32>,
}

fn all_bits(width: usize) -> SortBits {
    SortBits { width, bits: 0..8 * width as u32 }
}

fn sort_pass(
    work: &Work<'_>,
    keys_in: *const std::ffi::c_void,
    values_in: CudaBuffer,
    rows: usize,
    by: SortBits,
) -> Result<(CudaBuffer, CudaBuffer)> {
    const PURPOSE: &str = "sorting keys";
    let SortBits { width, bits } = by;
    let keys_out = work.buffer(rows * width, PURPOSE)?;
    let values_out = work.values::<u32>(rows, PURPOSE)?;
    // SAFETY: the call only computes a size from numbers. The size for all bits suffices for fewer.
    let scratch_bytes = unsafe { abi::dovetail_sort_scratch_bytes(width as u32, rows as u64) };
    let scratch = work.scratch(scratch_bytes, PURPOSE)?;
    let args = abi::DovetailSort {
        keys_in,
        values_in: values_in.as_ptr(),
        rows: rows as u64,
        width: width as u32,
        begin_bit: bits.start,
        end_bit: bits.end,
        scratch: scratch.as_mut_ptr(),
        scratch_bytes,
        keys_out: keys_out.as_mut_ptr(),
        values_out: values_out.as_mut_ptr(),
    };
    work.launch(PURPOSE, abi::dovetail_sort, &args)?;
    Ok((keys_out, values_out))
}

/// Rearranges keys of 4 or 8 bytes with their row numbers, by one pass of a radix sort. Keys that
/// agree in the eight bits below `end_bit` become adjacent. Returns `None` if wider keys are
/// passed, or if this takes over half of the unused memory, or if another job takes the memory
/// first.
pub(super) fn clustered(work: &Work<'_>, keys: &Keys, end_bit: u32) -> Result<Option<(Keys, CudaBuffer)>> {
    const PASS_BITS: u32 = 8;
    let (rows, width) = (keys.rows, keys.width.bytes());
    // SAFETY: the call only computes a size from numbers.
    let scratch_bytes = unsafe { abi::dovetail_sort_scratch_bytes(width as u32, rows as u64) };
    let takes = scratch_bytes.saturating_add((rows * (width + 2 * size_of::<u32>())) as u64);
    if width > 8 || takes.saturating_mul(2) > work.memory.unused_bytes() {
        return Ok(None);
    }
    let end_bit = end_bit.min(8 * width as u32);
    let by = SortBits { width, bits: end_bit.saturating_sub(PASS_BITS)..end_bit };
    match numbers(work, rows).and_then(|numbers| sort_pass(work, key_pointer(keys), numbers, rows, by)) {
        Ok((data, row_numbers)) => Ok(Some((Keys { data: Arc::new(data), ..keys.clone() }, row_numbers))),
        Err(Error::Exhausted(_)) => Ok(None),
        Err(error) => Err(error),
    }
}
