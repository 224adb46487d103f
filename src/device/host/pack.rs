//! Packs key columns into keys of one width.

use std::ops::Range;

use rayon::prelude::*;

use super::buffer::{bytes_of, split_at_bounds, values_of};
use super::hash::{Key, with_cell};
use super::{MORSEL_ROWS, Run};
use crate::Result;
use crate::device::{Column, DeviceBuffer, KeyEncoding, KeyField, KeyWidth, Keys, PackedKeys, Positions, Width};

pub(super) fn pack_keys<K: Key>(run: &Run<'_>, fields: &[KeyField], width: KeyWidth) -> Result<PackedKeys> {
    let rows = fields.first().expect("a key has at least one field").column.rows;
    assert!(fields.iter().all(|field| field.column.rows == rows), "key columns of unequal length");
    if let [field] = fields
        && lies_ready::<K>(field)
    {
        let keys = Keys { data: field.column.data.clone(), width, rows };
        return Ok(PackedKeys { keys, rows_kept: None });
    }

    let required: Vec<&DeviceBuffer> =
        fields.iter().filter(|field| field.null_bit.is_none()).filter_map(|f| f.column.validity.as_ref()).collect();
    let kept_in = |range: Range<usize>| match &required[..] {
        [] => range.len(),
        _ => kept_words(&required, range).map(|word| word.count_ones() as usize).sum(),
    };
    let mut bounds = vec![0];
    bounds.extend(run.map(0..rows, kept_in)?.into_iter().scan(0, |end, kept| {
        *end += kept;
        Some(*end)
    }));
    let kept = *bounds.last().expect("bounds start with a zero");
    let mut keys = run.values::<K>(kept, "packing keys")?;
    if kept == rows {
        run.fill(&mut keys, |start, out| pack_rows(fields, start, out))?;
        return Ok(PackedKeys { keys: Keys { data: keys.freeze(), width, rows }, rows_kept: None });
    }

    let mut numbers = run.values::<u32>(kept, "numbering rows that have a key")?;
    let key_pieces = split_at_bounds(&mut keys, &bounds, 1);
    let number_pieces = split_at_bounds(&mut numbers, &bounds, 1);
    key_pieces.into_par_iter().zip(number_pieces).enumerate().try_for_each(|(morsel, (keys, numbers))| {
        run.cancel.check()?;
        let start = morsel * MORSEL_ROWS;
        let end = rows.min(start + MORSEL_ROWS);
        let mut packed = vec![K::default(); end - start];
        pack_rows(fields, start, &mut packed);
        let mut out = 0;
        for (word_index, mut word) in kept_words(&required, start..end).enumerate() {
            while word != 0 {
                let row = 64 * word_index + word.trailing_zeros() as usize;
                (keys[out], numbers[out]) = (packed[row], (start + row) as u32);
                out += 1;
                word &= word - 1;
            }
        }
        Ok::<_, crate::Error>(())
    })?;
    Ok(PackedKeys {
        keys: Keys { data: keys.freeze(), width, rows: kept },
        rows_kept: Some(Positions::List { data: numbers.freeze(), rows: kept, nullable: false }),
    })
}

/// True if the column's own buffer is the keys. Keys are read as integers and must be aligned. A
/// slice of another owner's buffer may not be.
fn lies_ready<K: Key>(field: &KeyField) -> bool {
    field.encoding == KeyEncoding::Unsigned
        && field.shift == 0
        && field.bits == K::BITS
        && field.column.width.bytes() == size_of::<K>()
        && field.column.validity.is_none()
        && (bytes_of(&field.column.data).as_ptr() as usize).is_multiple_of(align_of::<K>())
}

/// Returns the words of a bitmap of the rows of `range` that have a key, because they are valid in
/// every column. `range` starts at a multiple of 64.
fn kept_words<'a>(required: &'a [&DeviceBuffer], range: Range<usize>) -> impl Iterator<Item = u64> + 'a {
    range.clone().step_by(64).map(move |start| {
        let len = range.end.min(start + 64) - start;
        let all = if len == 64 { u64::MAX } else { (1 << len) - 1 };
        required.iter().fold(all, |word, validity| word & validity_word(bytes_of(validity), start, len))
    })
}

/// Returns bits `start..start + len` of a bitmap. `start` is a multiple of 8, and `len` at most 64.
fn validity_word(bitmap: &[u8], start: usize, len: usize) -> u64 {
    let bytes = &bitmap[start / 8..(start + len).div_ceil(8)];
    let mut word = [0; 8];
    word[..bytes.len()].copy_from_slice(bytes);
    u64::from_le_bytes(word)
}

/// Packs the rows from `start` on.
fn pack_rows<K: Key>(fields: &[KeyField], start: usize, out: &mut [K]) {
    out.fill(K::default());
    for field in fields {
        if field.bits > 0 {
            assert!(field.shift + field.bits <= K::BITS, "a key field reaches beyond the key: {field:?}");
            encode_rows(field, start, out);
        }
        if let (Some(null_bit), Some(validity)) = (field.null_bit, &field.column.validity) {
            mark_nulls(field, null_bit, bytes_of(validity), start, out);
        }
    }
}

/// Ors the field's bits into `out`. One loop per combination of column width and encoding. It uses
/// 64-bit arithmetic if the lowest bits equal those of the 128-bit result.
fn encode_rows<K: Key>(field: &KeyField, start: usize, out: &mut [K]) {
    let KeyField { column, encoding, bits, .. } = field;
    let narrow = column.width != Width::W16 && *bits <= 64;
    match (*encoding, narrow) {
        (KeyEncoding::Unsigned, true) => add(field, start, out, |bytes| K::truncate_64(unsigned_64(bytes))),
        (KeyEncoding::Unsigned, false) => add(field, start, out, |bytes| K::truncate(unsigned(bytes))),
        (KeyEncoding::Offset { min }, true) => {
            add(field, start, out, |bytes| K::truncate_64(unsigned_64(bytes).wrapping_sub(min as u64)))
        }
        (KeyEncoding::Offset { min }, false) => {
            add(field, start, out, |bytes| K::truncate(unsigned(bytes).wrapping_sub(min)))
        }
        (KeyEncoding::Signed { min }, true) => {
            add(field, start, out, |bytes| K::truncate_64(signed_64(bytes).wrapping_sub(min as i64) as u64))
        }
        (KeyEncoding::Signed { min }, false) => {
            add(field, start, out, |bytes| K::truncate(signed(bytes).wrapping_sub(min) as u128))
        }
        (KeyEncoding::Float, _) => add(field, start, out, |bytes| K::truncate_64(float_bits(bytes))),
    }
}

/// Ors `encode(value)`, cut to the field's bits, into `out`.
#[inline(always)]
fn add<K: Key>(field: &KeyField, start: usize, out: &mut [K], encode: impl Fn(&[u8]) -> K) {
    let mask = K::truncate(u128::MAX >> (128 - field.bits));
    let Column { data, width, rows, .. } = &field.column;
    with_cell!(width, T => {
        let values = &values_of::<T>(data, *rows)[start..start + out.len()];
        for (key, value) in out.iter_mut().zip(values) {
            *key = key.or(encode(value).and(mask).shifted(field.shift));
        }
    });
}

/// Sets the null bit of null rows, and zeros for the value.
fn mark_nulls<K: Key>(field: &KeyField, null_bit: u32, validity: &[u8], start: usize, out: &mut [K]) {
    let value_bits = if field.bits == 0 { 0 } else { (u128::MAX >> (128 - field.bits)) << field.shift };
    let (keep, mark) = (K::truncate(!value_bits), K::truncate(1 << null_bit));
    for (word_index, keys) in out.chunks_mut(64).enumerate() {
        let all = if keys.len() == 64 { u64::MAX } else { (1 << keys.len()) - 1 };
        let mut nulls = !validity_word(validity, start + 64 * word_index, keys.len()) & all;
        while nulls != 0 {
            let key = &mut keys[nulls.trailing_zeros() as usize];
            *key = key.and(keep).or(mark);
            nulls &= nulls - 1;
        }
    }
}

#[inline(always)]
fn unsigned_64(bytes: &[u8]) -> u64 {
    match *bytes {
        [a] => u64::from(a),
        [a, b] => u64::from(u16::from_le_bytes([a, b])),
        [a, b, c, d] => u64::from(u32::from_le_bytes([a, b, c, d])),
        [a, b, c, d, e, f, g, h] => u64::from_le_bytes([a, b, c, d, e, f, g, h]),
        _ => unreachable!("wider columns take the 128-bit path"),
    }
}

#[inline(always)]
fn signed_64(bytes: &[u8]) -> i64 {
    match bytes.len() {
        1 => i64::from(unsigned_64(bytes) as i8),
        2 => i64::from(unsigned_64(bytes) as i16),
        4 => i64::from(unsigned_64(bytes) as i32),
        _ => unsigned_64(bytes) as i64,
    }
}

#[inline(always)]
fn unsigned(bytes: &[u8]) -> u128 {
    match <[u8; 16]>::try_from(bytes) {
        Ok(bytes) => u128::from_le_bytes(bytes),
        Err(_) => u128::from(unsigned_64(bytes)),
    }
}

#[inline(always)]
fn signed(bytes: &[u8]) -> i128 {
    match <[u8; 16]>::try_from(bytes) {
        Ok(bytes) => i128::from_le_bytes(bytes),
        Err(_) => i128::from(signed_64(bytes)),
    }
}

/// Returns an integer in the float's order: negatives reversed, positives above them, one NaN above
/// all.
#[inline(always)]
fn float_bits(bytes: &[u8]) -> u64 {
    let (exponent_bits, mantissa_bits) = match bytes.len() {
        2 => (5, 10),
        4 => (8, 23),
        8 => (11, 52),
        other => panic!("a float key of {other} bytes"),
    };
    let sign = 1u64 << (exponent_bits + mantissa_bits);
    let infinity = ((1u64 << exponent_bits) - 1) << mantissa_bits;
    let bits = unsigned_64(bytes);
    let magnitude = bits & (sign - 1);
    if magnitude > infinity {
        return sign | infinity | (1 << (mantissa_bits - 1));
    }
    if bits & sign != 0 && magnitude != 0 { !bits & (sign | (sign - 1)) } else { sign | magnitude }
}

#[cfg(test)]
mod tests {
    use arrow::buffer::BooleanBuffer;
    use half::f16;
    use rand::Rng;

    use super::*;
    use crate::device::host::testing::{Bench, SIZES, THREADS, buffer_of, numbers, random};
    use crate::device::{BitSlice, Device};

    fn column<T: bytemuck::Pod>(bench: &Bench, values: &[T]) -> Column {
        let width = Width::from_bytes(size_of::<T>()).unwrap();
        Column { data: bench.buffer(values), width, rows: values.len(), validity: None }
    }

    fn with_nulls(bench: &Bench, column: Column, valid: &[bool]) -> Column {
        let buffer = BooleanBuffer::from(valid.to_vec()).into_inner();
        let bits = BitSlice::Bits { buffer, offset: 0, len: valid.len() };
        Column { validity: Some(bench.device.copy_in_bits(&[bits], &bench.stream).unwrap()), ..column }
    }

    fn field(column: Column, encoding: KeyEncoding, shift: u32, bits: u32) -> KeyField {
        KeyField { column, encoding, shift, bits, null_bit: None }
    }

    fn packed(bench: &Bench, fields: &[KeyField], width: KeyWidth) -> (Vec<u128>, Option<Vec<u32>>) {
        let packed = bench.device.pack_keys(fields, width, &bench.stream).unwrap();
        let Keys { data, rows, width: found } = &packed.keys;
        assert_eq!(*found, width);
        let keys = match width {
            KeyWidth::W4 => values_of::<u32>(data, *rows).iter().map(|&key| u128::from(key)).collect(),
            KeyWidth::W8 => values_of::<u64>(data, *rows).iter().map(|&key| u128::from(key)).collect(),
            KeyWidth::W16 => values_of::<u128>(data, *rows).to_vec(),
        };
        (keys, packed.rows_kept.as_ref().map(numbers))
    }

    #[test]
    fn an_unsigned_column_of_the_key_width_is_used_without_a_copy() {
        let bench = Bench::new(2);
        let values = column(&bench, &[3u32, 1, u32::MAX]);
        let data = values.data.clone();
        let keys = field(values, KeyEncoding::Unsigned, 0, 32);
        let packed = bench.device.pack_keys(&[keys], KeyWidth::W4, &bench.stream).unwrap();
        assert!(std::sync::Arc::ptr_eq(&data, &packed.keys.data));
        assert!(packed.rows_kept.is_none());
    }

    #[test]
    fn a_misaligned_column_is_copied_into_keys() {
        let bench = Bench::new(2);
        let part = buffer_of(&[1u64, 2, 3]).slice(4);
        let data = bench.device.copy_in(&[part], &bench.stream).unwrap();
        let values = Column { data, width: Width::W8, rows: 2, validity: None };
        let keys = packed(&bench, &[field(values, KeyEncoding::Unsigned, 0, 64)], KeyWidth::W8).0;
        assert_eq!(keys, [2 << 32, 3 << 32]);
    }

    #[test]
    fn integers_are_packed_as_their_distance_from_the_minimum() {
        let bench = Bench::new(1);
        let key = |column: Column, encoding, bits, width| packed(&bench, &[field(column, encoding, 0, bits)], width).0;
        let signed = |min| KeyEncoding::Signed { min };
        let offset = |min| KeyEncoding::Offset { min };
        assert_eq!(key(column(&bench, &[-128i8, 0, 127]), signed(-128), 8, KeyWidth::W4), [0, 128, 255]);
        assert_eq!(key(column(&bench, &[-5i16, 7]), signed(-5), 4, KeyWidth::W4), [0, 12]);
        assert_eq!(
            key(column(&bench, &[i32::MIN, i32::MAX]), signed(i32::MIN.into()), 32, KeyWidth::W4),
            [0, u32::MAX.into()]
        );
        assert_eq!(
            key(column(&bench, &[i64::MIN, i64::MAX]), signed(i64::MIN.into()), 64, KeyWidth::W16),
            [0, u64::MAX.into()]
        );
        assert_eq!(key(column(&bench, &[i128::MIN, i128::MAX]), signed(i128::MIN), 128, KeyWidth::W16), [0, u128::MAX]);
        assert_eq!(key(column(&bench, &[i128::MAX - 3, i128::MAX]), signed(i128::MAX - 3), 2, KeyWidth::W4), [0, 3]);
        assert_eq!(key(column(&bench, &[200u8, 255]), offset(200), 6, KeyWidth::W4), [0, 55]);
        assert_eq!(
            key(column(&bench, &[u64::MAX - 1, u64::MAX]), offset(u64::MAX as u128 - 1), 1, KeyWidth::W8),
            [0, 1]
        );
        assert_eq!(key(column(&bench, &[u128::MAX]), offset(1 << 127), 127, KeyWidth::W16), [u128::MAX >> 1]);
        // A minimum outside the column's type: the difference still has 128 bits.
        assert_eq!(key(column(&bench, &[5i64]), signed(i128::MIN), 128, KeyWidth::W16), [(1 << 127) + 5]);
        assert_eq!(
            key(column(&bench, &[[9u8; 16]]), KeyEncoding::Unsigned, 128, KeyWidth::W16),
            [u128::from_le_bytes([9; 16])]
        );
    }

    #[test]
    fn packed_floats_keep_their_order_and_have_one_zero_and_one_nan() {
        let bench = Bench::new(1);
        let ascending = [f64::NEG_INFINITY, -1e30, -1.0, -1e-40, 0.0, 1e-40, 1.0, 1e30, f64::INFINITY, f64::NAN];
        let wide: Vec<f64> = ascending.to_vec();
        let narrow: Vec<f32> = ascending.iter().map(|&value| value as f32).collect();
        let half = [f16::NEG_INFINITY, -f16::ONE, f16::ZERO, f16::MIN_POSITIVE, f16::ONE, f16::INFINITY, f16::NAN];
        let half: Vec<u16> = half.iter().map(|value| value.to_bits()).collect();
        for (values, bits) in [(column(&bench, &wide), 64), (column(&bench, &narrow), 32), (column(&bench, &half), 16)]
        {
            let keys = packed(&bench, &[field(values, KeyEncoding::Float, 0, bits)], KeyWidth::W8).0;
            assert!(keys.is_sorted_by(|a, b| a < b), "{bits} bits: {keys:x?}");
        }
        let same = [0.0, -0.0, f64::NAN, -f64::NAN, f64::from_bits(0x7ff0_0000_0000_0001)];
        let keys = packed(&bench, &[field(column(&bench, &same), KeyEncoding::Float, 0, 64)], KeyWidth::W8).0;
        assert_eq!((keys[0], keys[2], keys[2]), (keys[1], keys[3], keys[4]));
    }

    #[test]
    fn rows_with_nulls_are_left_out_unless_nulls_have_a_bit() {
        let mut random = random(95);
        for threads in THREADS {
            let bench = Bench::new(threads);
            for rows in SIZES {
                for share in [0.0, 0.5, 0.99, 1.0] {
                    let [first, second]: [Vec<bool>; 2] =
                        std::array::from_fn(|_| (0..rows).map(|_| random.random_bool(share)).collect());
                    let a: Vec<i32> = (0..rows).map(|_| random.random_range(-1000..1000)).collect();
                    let b: Vec<u8> = (0..rows).map(|_| random.random()).collect();
                    let left_out = field(
                        with_nulls(&bench, column(&bench, &a), &first),
                        KeyEncoding::Signed { min: -1000 },
                        9,
                        11,
                    );
                    let marked = KeyField {
                        null_bit: Some(8),
                        ..field(with_nulls(&bench, column(&bench, &b), &second), KeyEncoding::Unsigned, 0, 8)
                    };
                    let expected: Vec<(u32, u128)> = (0..rows)
                        .filter(|&row| first[row])
                        .map(|row| {
                            let low = if second[row] { u128::from(b[row]) } else { 1 << 8 };
                            (row as u32, ((a[row] + 1000) as u128) << 9 | low)
                        })
                        .collect();
                    for width in [KeyWidth::W4, KeyWidth::W8, KeyWidth::W16] {
                        let (keys, kept) = packed(&bench, &[left_out.clone(), marked.clone()], width);
                        assert_eq!(kept.is_none(), expected.len() == rows, "{rows} rows, {share} valid");
                        let kept = kept.unwrap_or((0..rows as u32).collect());
                        let found: Vec<(u32, u128)> = kept.into_iter().zip(keys).collect();
                        assert!(found == expected, "{rows} rows, {share} valid, {width:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn a_constant_field_takes_no_bits() {
        let bench = Bench::new(1);
        let constant = KeyField {
            null_bit: Some(31),
            ..field(
                with_nulls(&bench, column(&bench, &[9i8, 9]), &[true, false]),
                KeyEncoding::Signed { min: 9 },
                32,
                0,
            )
        };
        let other = field(column(&bench, &[5u8, 6]), KeyEncoding::Unsigned, 0, 8);
        assert_eq!(packed(&bench, &[constant, other], KeyWidth::W4).0, [5, 6 | 1 << 31]);
    }
}
