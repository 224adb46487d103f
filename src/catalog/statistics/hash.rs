//! Values of columns as numbers that are equal where the values are.

use arrow::array::{AnyDictionaryArray, Array, ArrayRef, AsArray, UInt64Array};
use arrow::compute::take;
use arrow::datatypes::*;
use arrow::downcast_primitive_array;
use xxhash_rust::xxh3::xxh3_64;

/// What a null has for a hash. No value has it.
pub(super) const NULL: u64 = 0;

/// A hash of each of those rows of an array of an ordered type. Values that are equal as keys of a join have equal hashes,
/// whatever widths and encodings their columns have: the integer 5 in 32 and in 64 bits, a string and a dictionary's.
pub(super) fn hashes_of(array: &ArrayRef, rows: &[usize]) -> Vec<u64> {
    let nulls = array.nulls().cloned();
    let is_null = |row: usize| nulls.as_ref().is_some_and(|nulls| nulls.is_null(row));
    let hashed = |hash: &dyn Fn(usize) -> u64| -> Vec<u64> {
        rows.iter().map(|&row| if is_null(row) { NULL } else { hash(row).max(NULL + 1) }).collect()
    };
    match array.data_type() {
        DataType::Boolean => hashed(&|row| xxh3_64(&[array.as_boolean().value(row).into()])),
        DataType::Float16 => hashed(&|row| hash_float(array.as_primitive::<Float16Type>().value(row).to_f64())),
        DataType::Float32 => hashed(&|row| hash_float(array.as_primitive::<Float32Type>().value(row).into())),
        DataType::Float64 => hashed(&|row| hash_float(array.as_primitive::<Float64Type>().value(row))),
        DataType::Utf8 => hashed(&|row| xxh3_64(array.as_string::<i32>().value(row).as_bytes())),
        DataType::LargeUtf8 => hashed(&|row| xxh3_64(array.as_string::<i64>().value(row).as_bytes())),
        DataType::Utf8View => hashed(&|row| xxh3_64(array.as_string_view().value(row).as_bytes())),
        DataType::Binary => hashed(&|row| xxh3_64(array.as_binary::<i32>().value(row))),
        DataType::LargeBinary => hashed(&|row| xxh3_64(array.as_binary::<i64>().value(row))),
        DataType::BinaryView => hashed(&|row| xxh3_64(array.as_binary_view().value(row))),
        DataType::FixedSizeBinary(_) => hashed(&|row| xxh3_64(array.as_fixed_size_binary().value(row))),
        DataType::Dictionary(..) => {
            let values = dictionary_values(array.as_any_dictionary(), rows);
            hashes_of(&values, &(0..rows.len()).collect::<Vec<_>>())
        }
        _ => {
            let is_unsigned = array.data_type().is_unsigned_integer();
            let array: &dyn Array = array;
            downcast_primitive_array!(
                array => hashed(&|row| hash_number(array.value(row).to_byte_slice(), is_unsigned)),
                other => unreachable!("{other} is not sampled")
            )
        }
    }
}

/// Hashes a number by its value: the stored bytes, the lowest first, extended to 128 bits, or to 256 where it takes more.
fn hash_number(bytes: &[u8], is_unsigned: bool) -> u64 {
    let sign = |bytes: &[u8]| if !is_unsigned && bytes[bytes.len() - 1] >= 0x80 { 0xff } else { 0 };
    let mut wide = [sign(bytes); 32];
    wide[..bytes.len()].copy_from_slice(bytes);
    let (low, high) = wide.split_at(16);
    if high == [sign(low); 16] { xxh3_64(low) } else { xxh3_64(&wide) }
}

/// Equal floats have equal hashes.
fn hash_float(value: f64) -> u64 {
    let canonical = if value.is_nan() { f64::NAN } else { value + 0.0 };
    xxh3_64(&canonical.to_bits().to_ne_bytes())
}

/// The values of those rows, without their dictionary.
fn dictionary_values(array: &dyn AnyDictionaryArray, rows: &[usize]) -> ArrayRef {
    let rows = UInt64Array::from_iter_values(rows.iter().map(|&row| row as u64));
    take(array.keys(), &rows, None)
        .and_then(|keys| take(array.values(), &keys, None))
        .expect("the rows are the array's, and its keys were validated")
}
