//! Packing of key columns to keys, and sorting of keys.

use std::ops::Range;
use std::ptr::null;
use std::sync::Arc;

use super::abi::{self, DOVETAIL_FIELDS_MAX};
use super::buffer::{CudaBuffer, pointer_of};
use super::gather::{gather, gather_cells};
use super::positions::{new_flags, select};
use super::work::Work;
use crate::device::{
    Column, DeviceBuffer, KeyEncoding, KeyField, KeyWidth, Keys, PackedKeys, Payload, Positions, Sorted, Width,
};
use crate::{Error, Result};

pub(super) fn pack(work: &Work<'_>, fields: &[KeyField], width: KeyWidth) -> Result<PackedKeys> {
    let rows = fields.first().expect("a key has at least one field").column.rows;
    assert!(fields.iter().all(|field| field.column.rows == rows), "key columns of unequal length");
    if let [field] = fields
        && lies_ready(field, width)
    {
        let keys = Keys { data: field.column.data.clone(), width, rows };
        return Ok(PackedKeys { keys, rows_kept: None });
    }
    let required: Vec<&DeviceBuffer> =
        fields.iter().filter(|field| field.null_bit.is_none()).filter_map(|f| f.column.validity.as_ref()).collect();
    let kept = rows_with_all(work, &required, rows)?;
    let count = kept.as_ref().map_or(rows, |(_, kept)| *kept);
    let keys = work.buffer(count * width.bytes(), "packing keys")?;
    for (call, fields) in fields.chunks(DOVETAIL_FIELDS_MAX).enumerate() {
        let mut args = abi::DovetailPackKeys {
            fields: [NO_FIELD; DOVETAIL_FIELDS_MAX],
            field_count: fields.len() as u32,
            key_bytes: width.bytes() as u32,
            kept: kept.as_ref().map_or(null(), |(rows, _)| rows.as_ptr()),
            rows: count as u64,
            accumulate: u32::from(call > 0),
            keys: keys.as_mut_ptr(),
        };
        for (to, field) in args.fields.iter_mut().zip(fields) {
            *to = key_field(field, rows, width);
        }
        work.launch("packing keys", abi::dovetail_pack_keys, &args)?;
    }
    let keys = Keys { data: Arc::new(keys), width, rows: count };
    let list = |(data, rows)| Positions::List { data: Arc::new(data) as DeviceBuffer, rows, nullable: false };
    Ok(PackedKeys { keys, rows_kept: kept.map(list) })
}

/// True if the column's own buffer is the keys.
fn lies_ready(field: &KeyField, width: KeyWidth) -> bool {
    field.encoding == KeyEncoding::Unsigned
        && field.shift == 0
        && field.bits as usize == 8 * width.bytes()
        && field.column.width.bytes() == width.bytes()
        && field.column.validity.is_none()
}

const NO_FIELD: abi::DovetailKeyField = abi::DovetailKeyField {
    data: null(),
    validity: null(),
    min_low: 0,
    min_high: 0,
    width: 0,
    encoding: abi::DOVETAIL_UNSIGNED,
    shift: 0,
    bits: 0,
    null_bit: -1,
};

fn key_field(field: &KeyField, rows: usize, width: KeyWidth) -> abi::DovetailKeyField {
    assert!(
        (field.shift + field.bits) as usize <= 8 * width.bytes() || field.bits == 0,
        "a key field reaches beyond the key: {field:?}"
    );
    let (encoding, min) = encoding_of(field.encoding);
    let Column { data, validity, width, .. } = &field.column;
    abi::DovetailKeyField {
        data: pointer_of::<u8>(data, rows * width.bytes()).cast(),
        validity: validity.as_ref().map_or(null(), |bits| pointer_of(bits, rows.div_ceil(8))),
        min_low: min as u64,
        min_high: (min >> 64) as u64,
        width: width.bytes() as u32,
        encoding,
        shift: field.shift,
        bits: field.bits,
        null_bit: field.null_bit.map_or(-1, |bit| bit as i32),
    }
}

/// Returns the kernels' code of an encoding, and the minimum that it subtracts.
pub(super) fn encoding_of(encoding: KeyEncoding) -> (u32, u128) {
    match encoding {
        KeyEncoding::Unsigned => (abi::DOVETAIL_UNSIGNED, 0),
        KeyEncoding::Signed { min } => (abi::DOVETAIL_SIGNED, min as u128),
        KeyEncoding::Offset { min } => (abi::DOVETAIL_OFFSET, min),
        KeyEncoding::Float => (abi::DOVETAIL_FLOAT, 0),
    }
}

/// Finds the rows that are valid in all bitmaps, and their number. Returns `None` if all are valid.
/// Waits if there are bitmaps.
pub(super) fn rows_with_all(
    work: &Work<'_>,
    required: &[&DeviceBuffer],
    rows: usize,
) -> Result<Option<(CudaBuffer, usize)>> {
    match required {
        [] => Ok(None),
        _ => Ok(Some(rows_valid_in_all(work, required, rows)?).filter(|(_, kept)| *kept < rows)),
    }
}

/// Finds the rows that are valid in all bitmaps, and their number. Waits.
fn rows_valid_in_all(work: &Work<'_>, required: &[&DeviceBuffer], rows: usize) -> Result<(CudaBuffer, usize)> {
    let bitmaps_that = |condition, bitmaps: &[&DeviceBuffer]| {
        let mut args = select::rows_that(condition, rows);
        args.bitmap_count = bitmaps.len() as u32;
        for (to, bitmap) in args.bitmaps.iter_mut().zip(bitmaps) {
            *to = pointer_of(bitmap, rows.div_ceil(8));
        }
        args
    };
    if required.len() <= DOVETAIL_FIELDS_MAX {
        return select::run(work, bitmaps_that(abi::DOVETAIL_VALID, required), None);
    }
    // More bitmaps than one call reads: flag the rows that are null in any bitmap, and select the
    // others.
    let flags = new_flags(work, rows, "flags of rows with nulls")?;
    for bitmaps in required.chunks(DOVETAIL_FIELDS_MAX) {
        let (nulls, count) = select::run(work, bitmaps_that(abi::DOVETAIL_INVALID, bitmaps), None)?;
        let (positions, flags) = (nulls.as_ptr(), flags.as_mut_ptr());
        let args = abi::DovetailMark { positions, start: 0, rows: count as u64, flags };
        work.launch("marking rows with nulls", abi::dovetail_mark, &args)?;
    }
    let mut args = select::rows_that(abi::DOVETAIL_FLAG_CLEAR, rows);
    args.flags = flags.as_ptr();
    select::run(work, args, None)
}

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

/// Sorts the keys with row numbers, then gathers the payload columns by these numbers. A payload of
/// 4 bytes of payload moved through the radix sort would be moved by each pass, as often as the
/// key.
pub(super) fn sort(work: &Work<'_>, keys: &Keys, payload: &[Payload]) -> Result<Sorted> {
    let (order, sorted) = sorted_order(work, keys, Image::Key)?;
    let keys = match sorted {
        Some(data) => Keys { data: Arc::new(data), ..keys.clone() },
        None => rearranged(work, keys, &order)?,
    };
    Ok(Sorted { payload: payload(work, payload, &order)?, keys })
}

/// Image by which keys are sorted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Image {
    /// The key itself.
    Key,
    /// The mixed key without its first bits: partitions stay in order, and equal keys become
    /// adjacent.
    Mixed {
        /// Bits that are skipped.
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

/// Returns the row numbers 0, 1, and so on.
pub(super) fn numbers(work: &Work<'_>, rows: usize) -> Result<CudaBuffer> {
    let numbers = work.values::<u32>(rows, "numbering rows")?;
    gather_cells(work, None, 0, Width::W4, &Positions::Range(0..rows), 0, &numbers)?;
    Ok(numbers)
}

/// Gathers the keys at the rows of `order`.
pub(super) fn rearranged(work: &Work<'_>, keys: &Keys, order: &Positions) -> Result<Keys> {
    Ok(Keys { data: gather(work, &keys.as_column(), order)?.data, ..keys.clone() })
}

/// Transforms the payload columns by the row numbers of `order`. Validity is not moved.
pub(super) fn payload(work: &Work<'_>, payload: &[Payload], order: &Positions) -> Result<Vec<Column>> {
    let Positions::List { data: numbers, rows, .. } = order else { unreachable!("rows are ordered by a list") };
    payload
        .iter()
        .map(|payload| match payload {
            Payload::RowNumber => Ok(Column { data: numbers.clone(), width: Width::W4, rows: *rows, validity: None }),
            Payload::Column(column) => gather(work, &Column { validity: None, ..column.clone() }, order),
        })
        .collect()
}

/// Returns the address of keys.
pub(super) fn key_pointer(keys: &Keys) -> *const std::ffi::c_void {
    pointer_of::<u8>(&keys.data, keys.rows * keys.width.bytes()).cast()
}
