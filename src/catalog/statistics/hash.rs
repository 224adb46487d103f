//! Hashes of column values: equal values have equal hashes.

use arrow::array::{AnyDictionaryArray, Array, ArrayRef, AsArray, PrimitiveArray, UInt64Array};
use arrow::compute::take;
use arrow::datatypes::*;
use arrow::downcast_primitive_array;
use multiversion::multiversion;
use xxhash_rust::xxh3::xxh3_64;

use super::dictionary;

/// Hash of a null. No value has it.
pub(super) const NULL: u64 = 0;

/// Returns a hash of each row of an array of an ordered type, in row order. Values that are equal
/// as keys of a join have equal hashes, whatever their widths and encodings. Examples: the integer
/// 5 in 32 and in 64 bits, a string and a dictionary's string.
pub(super) fn hashes(array: &ArrayRef) -> Vec<u64> {
    let mut hashes = hashes_of_values(array);
    match array.nulls() {
        Some(nulls) if nulls.null_count() > 0 => {
            hashes.iter_mut().zip(nulls).filter(|(_, valid)| !valid).for_each(|(hash, _)| *hash = NULL);
        }
        _ => (),
    }
    hashes
}

/// Same as [`hashes`], for those rows only.
pub(super) fn hashes_of(array: &ArrayRef, rows: &[usize]) -> Vec<u64> {
    let rows = UInt64Array::from_iter_values(rows.iter().map(|&row| row as u64));
    hashes(&take(array, &rows, None).expect("the rows are the array's"))
}

/// Hashes of the values. The hash of a null row is unspecified, except that a dictionary's null
/// values give [`NULL`].
fn hashes_of_values(array: &ArrayRef) -> Vec<u64> {
    fn of<T>(values: impl Iterator<Item = T>, hash: impl Fn(T) -> u64) -> Vec<u64> {
        values.map(|value| hash(value).max(NULL + 1)).collect()
    }
    let rows = 0..array.len();
    match array.data_type() {
        DataType::Boolean => of(array.as_boolean().values().iter(), |value| mix(value.into())),
        DataType::Float16 => {
            of(array.as_primitive::<Float16Type>().values().iter(), |value| hash_float(value.to_f64()))
        }
        DataType::Float32 => of(array.as_primitive::<Float32Type>().values().iter(), |&value| hash_float(value.into())),
        DataType::Float64 => of(array.as_primitive::<Float64Type>().values().iter(), |&value| hash_float(value)),
        DataType::Utf8 => of(rows, |row| xxh3_64(array.as_string::<i32>().value(row).as_bytes())),
        DataType::LargeUtf8 => of(rows, |row| xxh3_64(array.as_string::<i64>().value(row).as_bytes())),
        DataType::Utf8View => of(rows, |row| xxh3_64(array.as_string_view().value(row).as_bytes())),
        DataType::Binary => of(rows, |row| xxh3_64(array.as_binary::<i32>().value(row))),
        DataType::LargeBinary => of(rows, |row| xxh3_64(array.as_binary::<i64>().value(row))),
        DataType::BinaryView => of(rows, |row| xxh3_64(array.as_binary_view().value(row))),
        DataType::FixedSizeBinary(_) => of(rows, |row| xxh3_64(array.as_fixed_size_binary().value(row))),
        DataType::Dictionary(..) => hashes_of_entries(array.as_any_dictionary()),
        _ => {
            let array: &dyn Array = array;
            downcast_primitive_array!(
                array => hashes_of_numbers(array),
                other => unreachable!("{other} is not sampled")
            )
        }
    }
}

/// Hashes the values that the keys stand for, each once. If there are more values than rows, hashes
/// only those that rows use.
fn hashes_of_entries(array: &dyn AnyDictionaryArray) -> Vec<u64> {
    let rows = array.keys().len();
    if array.values().is_empty() {
        // All keys are null.
        return vec![NULL; rows];
    }
    if rows < array.values().len() {
        let keys = array.normalized_keys();
        let (used, values) = dictionary::used_values(array, &keys);
        let of_used = hashes(&values);
        // A null row's key may be missing in `used`.
        return keys.iter().map(|key| used.binary_search(key).map_or(NULL, |place| of_used[place])).collect();
    }
    let of_values = hashes(array.values());
    // A key under a null may be anything.
    array.normalized_keys().into_iter().map(|key| of_values.get(key).copied().unwrap_or(NULL)).collect()
}

/// Hashes numbers by value, whatever their width. All widths agree on numbers that fit 64 signed
/// bits.
fn hashes_of_numbers<T: ArrowPrimitiveType>(array: &PrimitiveArray<T>) -> Vec<u64> {
    /// Mixed into unsigned 64-bit numbers that do not fit a signed one, and into wider numbers.
    const UPPER: u64 = 0x9e37_79b9_7f4a_7c15;
    let bytes = array.values().inner().as_slice();
    let mut hashes = vec![0; array.len()];
    let unsigned = array.data_type().is_unsigned_integer();
    match (size_of::<T::Native>(), unsigned) {
        (1, false) => mix_all(bytes.as_chunks().0, |value| i8::from_ne_bytes(value) as i64 as u64, &mut hashes),
        (2, false) => mix_all(bytes.as_chunks().0, |value| i16::from_ne_bytes(value) as i64 as u64, &mut hashes),
        (4, false) => mix_all(bytes.as_chunks().0, |value| i32::from_ne_bytes(value) as i64 as u64, &mut hashes),
        (8, false) => mix_all(bytes.as_chunks().0, u64::from_ne_bytes, &mut hashes),
        (1, true) => mix_all(bytes.as_chunks().0, |value| u8::from_ne_bytes(value).into(), &mut hashes),
        (2, true) => mix_all(bytes.as_chunks().0, |value| u16::from_ne_bytes(value).into(), &mut hashes),
        (4, true) => mix_all(bytes.as_chunks().0, |value| u32::from_ne_bytes(value).into(), &mut hashes),
        (8, true) => {
            let word = |value| u64::from_ne_bytes(value);
            let is_large = |value: u64| ((value as i64) >> 63) as u64;
            mix_all(bytes.as_chunks().0, |value| word(value) ^ (is_large(word(value)) & UPPER), &mut hashes);
        }
        _ => {
            for (hash, value) in hashes.iter_mut().zip(array.values().iter()) {
                let words = value.to_byte_slice().as_chunks::<8>().0.iter().map(|word| u64::from_ne_bytes(*word));
                let low = words.clone().next().unwrap_or(0);
                let sign = ((low as i64) >> 63) as u64;
                *hash = match words.clone().skip(1).all(|word| word == sign) {
                    true => mix(low),
                    false => words.fold(UPPER, |hash, word| mix(hash ^ word)),
                }
                .max(NULL + 1);
            }
        }
    }
    hashes
}

/// Hashes numbers of `N` bytes at the speed of memory. No hash is [`NULL`].
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
fn mix_all<const N: usize>(values: &[[u8; N]], widen: impl Fn([u8; N]) -> u64, hashes: &mut [u64]) {
    for (hash, value) in hashes.iter_mut().zip(values) {
        *hash = mix(widen(*value)).max(NULL + 1);
    }
}

/// Spreads numbers evenly over 64 bits, without collisions. It is the finalizer of SplitMix64
/// (Steele et al., "Fast splittable pseudorandom number generators", OOPSLA 2014), changed so that
/// zero does not map to zero.
#[inline(always)]
fn mix(value: u64) -> u64 {
    let mut hash = value ^ 0x5851_f42d_4c95_7f2d;
    hash = (hash ^ (hash >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    hash = (hash ^ (hash >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    hash ^ (hash >> 31)
}

/// Combines the hashes of two values. The order of the values matters.
pub(super) fn combined(first: u64, second: u64) -> u64 {
    mix(first.rotate_left(32) ^ second).max(NULL + 1)
}

/// Equal floats have equal hashes.
fn hash_float(value: f64) -> u64 {
    let canonical = if value.is_nan() { f64::NAN } else { value + 0.0 };
    mix(canonical.to_bits())
}
