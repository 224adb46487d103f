//! Keys of text on the GPU. Short values become numbers, to be packed. Longer values are hashed,
//! and the values behind equal hashes are compared.

use std::ptr::{null, null_mut};
use std::sync::Arc;

use arrow::buffer::Buffer;

use super::abi::{self, DOVETAIL_FIELDS_MAX, DOVETAIL_WORDS_MAX};
use super::buffer::{CudaBuffer, pointer_of};
use super::fault;
use super::gather::list;
use super::pack::{encoding_of, rows_with_all};
use super::select::{new_flags, select_flags};
use super::work::Work;
use crate::Result;
use crate::device::{
    BytesColumn, BytesPart, Column, DeviceBuffer, Hashing, KeyValues, KeyWidth, Keys, PackedKeys, Pairs, Positions,
    SHORT_BYTES_MAX, VALUE_FIELDS_MAX, ValueField, Which, Width, length_bits,
};

const _: () = assert!(VALUE_FIELDS_MAX <= DOVETAIL_FIELDS_MAX, "one call hashes all keys");

/// Size of the words in which bytes of values are read.
const WORD_BYTES: usize = size_of::<u64>();

/// Copies values of variable length in, concatenating all parts. `offset_width`: bytes of their
/// offsets.
pub(super) fn copy_in(work: &Work<'_>, parts: &[BytesPart], offset_width: Width) -> Result<BytesColumn> {
    const PURPOSE: &str = "copying text to the device";
    fault::before_copy(work.queue, PURPOSE)?;
    let rows_of = |part: &BytesPart| part.offsets.len() / offset_width.bytes() - 1;
    let parts: Vec<&BytesPart> = parts.iter().filter(|part| rows_of(part) > 0).collect();
    let rows = parts.iter().map(|part| rows_of(part)).sum();
    if rows == 0 {
        let begins = Arc::new(work.filled(WORD_BYTES, 0, PURPOSE)?);
        return Ok(BytesColumn { data: Arc::new(work.buffer(0, PURPOSE)?), begins, rows, validity: None });
    }

    let (mut part_rows, mut part_bases) = (Vec::with_capacity(parts.len()), Vec::with_capacity(parts.len()));
    let (mut row, mut end) = (0u64, 0u64);
    let mut bytes = Vec::with_capacity(parts.len());
    for part in &parts {
        let (first, last) = (offset_at(part, 0, offset_width), offset_at(part, rows_of(part), offset_width));
        bytes.push(part.data.slice_with_length(first as usize, (last - first) as usize));
        part_rows.push(row);
        part_bases.push(end.wrapping_sub(first));
        row += rows_of(part) as u64;
        end += last - first;
    }
    let total = end as usize;
    let data = work.buffer(total.next_multiple_of(WORD_BYTES), PURPOSE)?;
    work.fill(&data, total..data.size(), 0, PURPOSE)?;
    let mut at = 0;
    for part in bytes.into_iter().filter(|part| !part.is_empty()) {
        work.cancel.check()?;
        let len = part.len();
        let _watched = work.watch(PURPOSE, len);
        work.copy_part(part, &data, at, PURPOSE)?;
        at += len;
    }

    let offsets: Vec<Buffer> = parts.iter().map(|part| part.offsets.clone()).collect();
    let offsets = work.copy_from_host(&offsets, PURPOSE)?;
    let places = places_of_parts(work, [part_rows, part_bases].concat(), PURPOSE)?;
    let begins = work.values::<u64>(rows + 1, PURPOSE)?;
    let args = abi::DovetailValueBegins {
        offsets: offsets.as_ptr(),
        offset_bytes: offset_width.bytes() as u32,
        parts: parts.len() as u32,
        part_rows: places.as_ptr(),
        // SAFETY: the first half of the array just written holds the rows.
        part_bases: unsafe { places.as_ptr::<u64>().add(parts.len()) },
        rows: rows as u64,
        begins: begins.as_mut_ptr(),
    };
    work.launch("finding where text begins", abi::dovetail_value_begins, &args)?;
    Ok(BytesColumn { data: Arc::new(data), begins: Arc::new(begins), rows, validity: None })
}

/// Writes a few numbers to the GPU. If they fit in a call's arguments, they do not queue behind the
/// columns on the link.
fn places_of_parts(work: &Work<'_>, numbers: Vec<u64>, purpose: &'static str) -> Result<CudaBuffer> {
    let words: &[u32] = bytemuck::cast_slice(&numbers);
    if words.len() > DOVETAIL_WORDS_MAX {
        return work.copy_from_host(&[Buffer::from_vec(numbers)], purpose);
    }
    let places = work.values::<u64>(numbers.len(), purpose)?;
    work.write_words(words, &places, 0)?;
    Ok(places)
}

fn offset_at(part: &BytesPart, at: usize, width: Width) -> u64 {
    let bytes = &part.offsets[at * width.bytes()..][..width.bytes()];
    match width {
        Width::W4 => bytemuck::pod_read_unaligned::<u32>(bytes).into(),
        Width::W8 => bytemuck::pod_read_unaligned(bytes),
        other => unreachable!("offsets of {other:?}"),
    }
}

pub(super) fn short(work: &Work<'_>, bytes: &BytesColumn, bytes_max: usize) -> Result<Column> {
    const PURPOSE: &str = "packing short text";
    assert!(bytes_max <= SHORT_BYTES_MAX, "values of up to {bytes_max} bytes are not short");
    let length_bits = length_bits(bytes_max);
    let width = KeyWidth::for_bits(8 * bytes_max as u32 + length_bits).expect("short values fit in a key");
    let numbers = work.buffer(bytes.rows * width.bytes(), PURPOSE)?;
    let args = abi::DovetailShortValues {
        data: pointer_of::<u8>(&bytes.data, 0).cast(),
        begins: pointer_of(&bytes.begins, bytes.rows + 1),
        rows: bytes.rows as u64,
        bytes_max: bytes_max as u32,
        length_bits,
        number_bytes: width.bytes() as u32,
        numbers: numbers.as_mut_ptr(),
    };
    work.launch(PURPOSE, abi::dovetail_short_values, &args)?;
    let width = Width::from_bytes(width.bytes()).expect("every key width is a column width");
    Ok(Column { data: Arc::new(numbers), width, rows: bytes.rows, validity: bytes.validity.clone() })
}

pub(super) fn hash(work: &Work<'_>, fields: &[ValueField], hashing: Hashing) -> Result<PackedKeys> {
    let rows = fields.first().expect("a key has at least one field").rows();
    assert!(fields.iter().all(|field| field.rows() == rows), "key columns of unequal length");
    let required = fields.iter().filter(|field| !field.nulls_equal).filter_map(ValueField::validity);
    let kept = rows_with_all(work, &required.collect::<Vec<_>>(), rows)?;
    let count = kept.as_ref().map_or(rows, |(_, kept)| *kept);
    let width = KeyWidth::W16;
    let keys = work.buffer(count * width.bytes(), "hashing keys")?;
    let (fields, field_count) = value_fields(fields);
    let args = abi::DovetailHashKeys {
        fields,
        field_count,
        kept: kept.as_ref().map_or(null(), |(rows, _)| rows.as_ptr()),
        rows: count as u64,
        seed: hashing.seed,
        mask_low: hashing.mask as u64,
        mask_high: (hashing.mask >> 64) as u64,
        keys: keys.as_mut_ptr(),
    };
    work.launch("hashing keys", abi::dovetail_hash_keys, &args)?;
    let list = |(data, rows)| Positions::List { data: Arc::new(data) as DeviceBuffer, rows, nullable: false };
    Ok(PackedKeys { keys: Keys { data: Arc::new(keys), width, rows: count }, rows_kept: kept.map(list) })
}

pub(super) fn differing(
    work: &Work<'_>,
    build: &[ValueField],
    probe: &[ValueField],
    pairs: &Pairs,
) -> Result<Positions> {
    assert_eq!(pairs.build.len(), pairs.probe.len(), "each pair has a row of each side");
    let count = pairs.build.len();
    let mut args = comparison(build, probe, &pairs.build, &pairs.probe);
    if run(work, &mut args)? == 0 {
        return Ok(Positions::Range(0..0));
    }
    // Unequal values rarely share a hash, so a second run to list the pairs is affordable.
    let flags = new_flags(work, count, "flags of differing keys")?;
    args.flags = flags.as_mut_ptr();
    run(work, &mut args)?;
    select_flags(work, &(Arc::new(flags) as DeviceBuffer), count, Which::Matched)
}

pub(super) fn are_runs_uniform(work: &Work<'_>, fields: &[ValueField], rows: &Positions, keys: &Keys) -> Result<bool> {
    assert_eq!((rows.len(), keys.width), (keys.rows, KeyWidth::W16), "each row has its hash");
    let mut args = comparison(fields, fields, rows, rows);
    // Compare each row with the next one.
    match rows {
        Positions::Range(_) => args.b_start += 1,
        // SAFETY: the last row has no next row, and is in no pair.
        Positions::List { .. } => args.b_rows = unsafe { args.b_rows.add(usize::from(!rows.is_empty())) },
    }
    args.pairs = args.pairs.saturating_sub(1);
    args.keys = pointer_of::<u128>(&keys.data, keys.rows).cast();
    Ok(run(work, &mut args)? == 0)
}

/// Returns arguments that compare the rows at the same places of two lists.
fn comparison(
    a: &[ValueField],
    b: &[ValueField],
    a_rows: &Positions,
    b_rows: &Positions,
) -> abi::DovetailCompareValues {
    let ((a, a_count), (b, b_count)) = (value_fields(a), value_fields(b));
    assert_eq!(a_count, b_count, "both sides have the same number of key columns");
    let ((a_rows, a_start), (b_rows, b_start), pairs) = (list(a_rows), list(b_rows), a_rows.len() as u64);
    let (flags, differing) = (null_mut(), null_mut());
    abi::DovetailCompareValues {
        a,
        b,
        field_count: a_count,
        a_rows,
        a_start,
        b_rows,
        b_start,
        keys: null(),
        pairs,
        flags,
        differing,
    }
}

/// Counts the pairs that differ. Waits.
fn run(work: &Work<'_>, args: &mut abi::DovetailCompareValues) -> Result<u32> {
    const PURPOSE: &str = "comparing keys";
    let differing: CudaBuffer = work.filled(size_of::<u32>(), 0, PURPOSE)?;
    args.differing = differing.as_mut_ptr();
    work.launch(PURPOSE, abi::dovetail_compare_values, args)?;
    work.read(&differing, PURPOSE)
}

const NO_FIELD: abi::DovetailValueField = abi::DovetailValueField {
    data: null(),
    begins: null(),
    validity: null(),
    width: 0,
    encoding: abi::DOVETAIL_UNSIGNED,
    nulls_equal: 0,
};

fn value_fields(fields: &[ValueField]) -> ([abi::DovetailValueField; DOVETAIL_FIELDS_MAX], u32) {
    assert!(fields.len() <= DOVETAIL_FIELDS_MAX, "{} key columns at once", fields.len());
    let mut all = [NO_FIELD; DOVETAIL_FIELDS_MAX];
    for (to, field) in all.iter_mut().zip(fields) {
        let rows = field.rows();
        let validity = field.validity().map_or(null(), |bits| pointer_of(bits, rows.div_ceil(8)));
        let nulls_equal = u32::from(field.nulls_equal);
        *to = match &field.values {
            KeyValues::Fixed { column, encoding } => abi::DovetailValueField {
                data: pointer_of::<u8>(&column.data, rows * column.width.bytes()).cast(),
                width: column.width.bytes() as u32,
                encoding: encoding_of(*encoding).0,
                validity,
                nulls_equal,
                ..NO_FIELD
            },
            KeyValues::Bytes(bytes) => abi::DovetailValueField {
                data: pointer_of::<u8>(&bytes.data, 0).cast(),
                begins: pointer_of(&bytes.begins, rows + 1),
                validity,
                nulls_equal,
                ..NO_FIELD
            },
        };
    }
    (all, fields.len() as u32)
}
