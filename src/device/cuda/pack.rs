//! Packing of key columns to keys.

use std::ptr::null;
use std::sync::Arc;

use super::abi::{self, DOVETAIL_FIELDS_MAX};
use super::buffer::{CudaBuffer, pointer_of};
use super::select::{self, new_flags};
use super::work::Work;
use crate::Result;
use crate::device::{Column, DeviceBuffer, KeyEncoding, KeyField, KeyWidth, Keys, PackedKeys, Positions};

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
