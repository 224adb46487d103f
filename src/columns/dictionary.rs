//! Dictionaries of a result: one for each batch, if the batches of a table have different
//! dictionaries.
//!
//! ```text
//!   table     batch 0: [red, green]   batch 1: [green, blue]      one dictionary each
//!   result    keys 0 1 1 2 of [red, green, blue]              gathered by key, and each value once
//! ```
//!
//! Values are not gathered row by row, because a value that a million rows share would be stored a
//! million times. The one exception is a key that an outer join puts together from both sides.
//! [`decoded_bytes`] gives its cost.
//!
//! The dictionary of a result batch has the values of its rows, in the order in which the rows
//! first have them. So the dictionary is not ordered, even if the table's dictionaries are. Its
//! keys have the table's key type, or the next wider type that can number all values together. So
//! no batch of the result can fail because of its values.

use std::collections::{HashMap, HashSet};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::Arc;

use arrow::array::{
    Array, ArrayAccessor, ArrayData, ArrayRef, AsArray, DictionaryArray, UInt32Array, UInt64Array, make_array,
};
use arrow::compute::{CastOptions, cast, cast_with_options, take};
use arrow::datatypes::{DataType, UInt32Type, UInt64Type};
use arrow::error::ArrowError;
use arrow::row::{RowConverter, SortField};
use arrow::util::display::FormatOptions;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::human::type_name;
use crate::{Error, Result};

/// Returns the type of a dictionary column gathered from batches with the given dictionaries:
/// `data_type`, or the same with wider keys.
pub fn encoded_type(data_type: &DataType, dictionaries: &[&ArrayRef]) -> DataType {
    let DataType::Dictionary(key_type, value_type) = data_type else { return data_type.clone() };
    let mut apart: Vec<&ArrayRef> = Vec::new();
    for dictionary in dictionaries {
        // Batches that share a dictionary are adjacent.
        if apart.last().is_none_or(|last| !is_same(last, dictionary)) {
            apart.push(dictionary);
        }
    }
    let sum = apart.iter().map(|dictionary| dictionary.len() as u64).sum::<u64>();
    let is_signed = key_type.is_signed_integer();
    let ladder: &[(DataType, u64)] = match is_signed {
        true => &[
            (DataType::Int8, i8::MAX as u64 + 1),
            (DataType::Int16, i16::MAX as u64 + 1),
            (DataType::Int32, i32::MAX as u64 + 1),
            (DataType::Int64, u64::MAX),
        ],
        false => &[
            (DataType::UInt8, u8::MAX as u64 + 1),
            (DataType::UInt16, u16::MAX as u64 + 1),
            (DataType::UInt32, u32::MAX as u64 + 1),
            (DataType::UInt64, u64::MAX),
        ],
    };
    let own = ladder.iter().position(|(step, _)| step == &**key_type).unwrap_or(ladder.len() - 1);
    let holds = |room: u64| {
        // For narrow keys, count the distinct values, because every part of an upload may have
        // brought the same few values.
        sum <= room || (room <= u16::MAX as u64 + 1 && are_at_most(&apart, value_type, room as usize))
    };
    let fitting = ladder[own..].iter().find(|(_, room)| holds(*room)).map_or(&**key_type, |(step, _)| step);
    DataType::Dictionary(Box::new(fitting.clone()), value_type.clone())
}

/// True if two dictionaries have the same values in the same memory.
pub(super) fn is_same(one: &ArrayRef, other: &ArrayRef) -> bool {
    Arc::ptr_eq(one, other) || one.to_data().ptr_eq(&other.to_data())
}

/// True if the dictionaries together have at most `count_max` different values.
fn are_at_most(dictionaries: &[&ArrayRef], value_type: &DataType, count_max: usize) -> bool {
    let Ok(converter) = RowConverter::new(vec![SortField::new(value_type.clone())]) else { return false };
    let mut seen: HashSet<Box<[u8]>, Seeded> = HashSet::default();
    for dictionary in dictionaries {
        let Ok(rows) = converter.convert_columns(&[Arc::clone(dictionary)]) else { return false };
        for row in &rows {
            if !seen.contains(row.as_ref()) {
                seen.insert(row.as_ref().into());
            }
        }
        if seen.len() > count_max {
            return false;
        }
    }
    true
}

/// Encodes plain values as a dictionary column of the given type.
///
/// # Errors
/// [`Error::Internal`] when the keys cannot number the values, which [`encoded_type`] rules out.
pub fn encode(values: &ArrayRef, data_type: &DataType) -> Result<ArrayRef> {
    let DataType::Dictionary(_, value_type) = data_type else {
        return Err(Error::Internal(format!("{} is not a dictionary type", type_name(data_type))));
    };
    if is_packed_by_arrow(value_type) {
        return cast_with_options(values, data_type, &STRICT).map_err(|error| failed(values, data_type, &error));
    }
    let encode = || {
        let values = cast_with_options(values, value_type, &STRICT)?;
        let Distinct { number_of, firsts } = Distinct::of(&values)?;
        with_keys(&UInt32Array::from(number_of), &take(&values, &UInt32Array::from(firsts), None)?, data_type)
    };
    encode().map_err(|error| failed(values, data_type, &error))
}

/// Converts a dictionary column to another dictionary type. The new dictionary has the values of
/// the column's rows, each once.
///
/// # Errors
/// [`Error::Internal`] when the keys of `data_type` cannot number the values, which
/// [`encoded_type`] rules out.
pub fn encode_again(array: &ArrayRef, data_type: &DataType) -> Result<ArrayRef> {
    let encode = || {
        let dictionary = array.as_any_dictionary();
        let keys = cast(dictionary.keys(), &DataType::UInt64)?;
        let mut numbers: HashMap<u64, u32, Seeded> = HashMap::default();
        let mut used: Vec<u64> = Vec::new();
        let mut number = |key: u64| {
            *numbers.entry(key).or_insert_with(|| {
                used.push(key);
                used.len() as u32 - 1
            })
        };
        let keys: UInt32Array = keys.as_primitive::<UInt64Type>().iter().map(|key| key.map(&mut number)).collect();
        let values = take(dictionary.values(), &UInt64Array::from(used), None)?;
        let Distinct { number_of, firsts } = Distinct::of(&values)?;
        let keys: UInt32Array = keys.iter().map(|key| number_of[key? as usize]).collect();
        with_keys(&keys, &take(&values, &UInt32Array::from(firsts), None)?, data_type)
    };
    encode().map_err(|error| failed(array, data_type, &error))
}

/// Converts a dictionary column to another key type, with the same dictionary.
///
/// # Errors
/// [`Error::Internal`] when keys of that type cannot number the dictionary.
pub fn with_wanted_keys(array: &DictionaryArray<UInt32Type>, data_type: &DataType) -> Result<ArrayRef> {
    with_keys(array.keys(), array.values(), data_type).map_err(|error| failed(array, data_type, &error))
}

/// Returns the bytes that a dictionary column takes as plain values. Zero for any other column.
pub fn decoded_bytes(array: &ArrayRef) -> u64 {
    let Some(dictionary) = array.as_any_dictionary_opt().filter(|dictionary| !dictionary.values().is_empty()) else {
        return 0;
    };
    let value_bytes = value_sizes(dictionary.values());
    let keys = dictionary.normalized_keys();
    let of_row = |(row, &key): (usize, &usize)| if array.is_null(row) { 0 } else { value_bytes(key) };
    keys.iter().enumerate().map(of_row).sum()
}

/// Returns the bytes of each value, by its index. Nested values count with their average.
fn value_sizes(values: &ArrayRef) -> Box<dyn Fn(usize) -> u64 + '_> {
    match values.data_type() {
        DataType::Utf8 => Box::new(move |at| 4 + values.as_string::<i32>().value_length(at) as u64),
        DataType::LargeUtf8 => Box::new(move |at| 8 + values.as_string::<i64>().value_length(at) as u64),
        DataType::Binary => Box::new(move |at| 4 + values.as_binary::<i32>().value_length(at) as u64),
        DataType::LargeBinary => Box::new(move |at| 8 + values.as_binary::<i64>().value_length(at) as u64),
        // Views share the bytes of their values, however many views there are.
        DataType::Utf8View | DataType::BinaryView => Box::new(|_| 16),
        other => {
            let average = || (values.get_array_memory_size() / values.len().max(1)) as u64;
            let bytes = other.primitive_width().map_or_else(average, |width| width as u64);
            Box::new(move |_| bytes)
        }
    }
}

const STRICT: CastOptions<'static> = CastOptions { safe: false, format_options: FormatOptions::new() };

fn failed(array: &dyn Array, data_type: &DataType, error: &ArrowError) -> Error {
    Error::Internal(format!(
        "making a dictionary of {} rows of {}, as {}: {error}",
        array.len(),
        type_name(array.data_type()),
        type_name(data_type)
    ))
}

/// Builds the dictionary column of the given keys and values.
pub(super) fn with_keys(keys: &UInt32Array, values: &ArrayRef, data_type: &DataType) -> Result<ArrayRef, ArrowError> {
    let DataType::Dictionary(key_type, _) = data_type else {
        return Err(ArrowError::CastError("the type is not a dictionary type".into()));
    };
    let keys = cast_with_options(keys, key_type, &STRICT)?.to_data();
    let data = ArrayData::builder(data_type.clone()).len(keys.len()).add_buffer(keys.buffers()[0].clone());
    Ok(make_array(data.nulls(keys.nulls().cloned()).add_child_data(values.to_data()).build()?))
}

/// True if Arrow's cast makes dictionaries of the type's values. (`can_cast_types` is true for
/// every type.)
fn is_packed_by_arrow(value_type: &DataType) -> bool {
    use DataType as T;
    match value_type {
        T::Utf8 | T::LargeUtf8 | T::Utf8View | T::Binary | T::LargeBinary | T::BinaryView => true,
        T::Duration(_) | T::Interval(_) => false,
        other => other.is_primitive(),
    }
}

/// Distinct values of an array, and the value of each row.
pub(super) struct Distinct {
    /// The number of each row's value; `None` for a null.
    pub(super) number_of: Vec<Option<u32>>,
    /// The first row of each value, by number.
    pub(super) firsts: Vec<u32>,
}

impl Distinct {
    pub(super) fn of(values: &ArrayRef) -> Result<Self, ArrowError> {
        Ok(match values.data_type() {
            DataType::Utf8 => Self::of_bytes(values, values.as_string::<i32>()),
            DataType::LargeUtf8 => Self::of_bytes(values, values.as_string::<i64>()),
            DataType::Utf8View => Self::of_bytes(values, values.as_string_view()),
            DataType::Binary => Self::of_bytes(values, values.as_binary::<i32>()),
            DataType::LargeBinary => Self::of_bytes(values, values.as_binary::<i64>()),
            DataType::BinaryView => Self::of_bytes(values, values.as_binary_view()),
            other => {
                let converter = RowConverter::new(vec![SortField::new(other.clone())])?;
                let rows = converter.convert_columns(&[Arc::clone(values)])?;
                Self::by(values, |at| rows.row(at).data())
            }
        })
    }

    fn of_bytes<'a, A: ArrayAccessor<Item = &'a T>, T: AsRef<[u8]> + ?Sized + 'a>(values: &ArrayRef, typed: A) -> Self {
        Self::by(values, |at| typed.value(at).as_ref())
    }

    fn by<'a>(values: &ArrayRef, bytes_of: impl Fn(usize) -> &'a [u8]) -> Self {
        let nulls = values.logical_nulls();
        let mut numbers: HashMap<&[u8], u32, Seeded> = HashMap::default();
        let mut firsts: Vec<u32> = Vec::new();
        let mut number = |at: usize| {
            if nulls.as_ref().is_some_and(|nulls| nulls.is_null(at)) {
                return None;
            }
            Some(*numbers.entry(bytes_of(at)).or_insert_with(|| {
                firsts.push(at as u32);
                firsts.len() as u32 - 1
            }))
        };
        let number_of = (0..values.len()).map(&mut number).collect();
        Self { number_of, firsts }
    }
}

/// Hasher for maps that are read for every row, at a fraction of the cost of the standard hasher.
/// Each map has its own seed, so that no client can choose values that all collide.
#[derive(Clone, Debug)]
pub(super) struct Seeded(u64);

impl Default for Seeded {
    fn default() -> Self {
        Self(RandomState::new().hash_one(0))
    }
}

impl BuildHasher for Seeded {
    type Hasher = SeededHasher;

    fn build_hasher(&self) -> SeededHasher {
        SeededHasher(self.0)
    }
}

/// See [`Seeded`].
#[derive(Debug)]
pub(super) struct SeededHasher(u64);

impl Hasher for SeededHasher {
    fn write(&mut self, bytes: &[u8]) {
        self.0 = xxh3_64_with_seed(bytes, self.0);
    }

    fn write_u32(&mut self, number: u32) {
        self.write_u64(number.into());
    }

    /// Mixes both halves of the product, so that every bit of the number reaches every bit of the
    /// hash.
    fn write_u64(&mut self, number: u64) {
        let product = u128::from(number ^ self.0) * 0x9e37_79b9_7f4a_7c15;
        self.0 = (product >> 64) as u64 ^ product as u64;
    }

    fn write_usize(&mut self, number: usize) {
        self.write_u64(number as u64);
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use arrow::array::{
        BooleanArray, DurationSecondArray, FixedSizeBinaryArray, Int8Array, ListArray, StringArray, StringViewArray,
    };
    use arrow::datatypes::Int32Type;

    use super::*;

    fn dictionary_of(key_type: DataType, value_type: &DataType) -> DataType {
        DataType::Dictionary(Box::new(key_type), Box::new(value_type.clone()))
    }

    fn texts(range: std::ops::Range<usize>) -> ArrayRef {
        Arc::new(StringArray::from_iter_values(range.map(|number| format!("value {number}"))))
    }

    /// Returns the key type for dictionaries of texts.
    fn key_type(own: DataType, dictionaries: &[&ArrayRef]) -> DataType {
        let DataType::Dictionary(key_type, _) = encoded_type(&dictionary_of(own, &DataType::Utf8), dictionaries) else {
            panic!("it stays a dictionary")
        };
        *key_type
    }

    #[test]
    fn keys_are_widened_only_if_the_distinct_values_exceed_their_range() {
        use DataType as T;
        let (low, high, same) = (texts(0..100), texts(100..200), texts(0..100));
        assert_eq!(key_type(T::Int8, &[]), T::Int8);
        assert_eq!(key_type(T::Int8, &[&low, &same, &low, &same]), T::Int8, "the same values in several dictionaries");
        assert_eq!(key_type(T::Int8, &[&low, &high]), T::Int16);
        assert_eq!(key_type(T::UInt8, &[&low, &high]), T::UInt8);
        assert_eq!(key_type(T::UInt8, &[&low, &high, &texts(200..256)]), T::UInt8, "0 is also a key");
        assert_eq!(key_type(T::UInt8, &[&low, &high, &texts(200..257)]), T::UInt16);
        assert_eq!(key_type(T::Int8, &[&texts(0..128)]), T::Int8);
        assert_eq!(key_type(T::Int8, &[&texts(0..40_000)]), T::Int32, "two steps at once");
        assert_eq!(key_type(T::UInt32, &[&texts(0..70_000), &low]), T::UInt32);
    }

    #[test]
    fn values_of_every_type_become_a_dictionary_unchanged() {
        let numbers = [Some(3), None, Some(3), Some(5), Some(3), None];
        let lists = numbers.map(|number| number.map(|number| vec![Some(number), None]));
        let bytes = numbers.map(|number| number.map(|number| [number as u8; 4]));
        let arrays: [ArrayRef; 7] = [
            Arc::new(StringArray::from_iter(numbers.map(|number| number.map(|number| number.to_string())))),
            Arc::new(StringViewArray::from_iter(numbers.map(|number| number.map(|number| number.to_string())))),
            Arc::new(BooleanArray::from_iter(numbers.map(|number| number.map(|number| number == 3)))),
            Arc::new(DurationSecondArray::from_iter(numbers.map(|number| number.map(i64::from)))),
            Arc::new(Int8Array::from_iter(numbers.map(|number| number.map(|number| number as i8)))),
            Arc::new(FixedSizeBinaryArray::try_from_sparse_iter_with_size(bytes.into_iter(), 4).unwrap()),
            Arc::new(ListArray::from_iter_primitive::<Int32Type, _, _>(lists)),
        ];
        for array in arrays {
            let wanted = dictionary_of(DataType::Int8, array.data_type());
            let encoded = encode(&array, &wanted).unwrap();
            encoded.to_data().validate_full().unwrap();
            assert_eq!(encoded.data_type(), &wanted);
            let dictionary = encoded.as_any_dictionary();
            assert_eq!(dictionary.values().len(), 2, "{wanted}");
            let values = take(dictionary.values(), &cast(dictionary.keys(), &DataType::UInt32).unwrap(), None).unwrap();
            assert_eq!(&values, &array, "{wanted}");
            assert_eq!(encode(&array.slice(0, 0), &wanted).unwrap().len(), 0);
            // Encode the same values from a dictionary with one unused value and one duplicate.
            let all = take(&array, &UInt32Array::from(vec![1, 5, 3, 0, 2]), None).unwrap();
            let keys = UInt32Array::from(vec![Some(3), None, Some(4), Some(2), Some(3), Some(0)]);
            let wordy: ArrayRef = Arc::new(DictionaryArray::try_new(keys, all).unwrap());
            let again = encode_again(&wordy, &wanted).unwrap();
            again.to_data().validate_full().unwrap();
            assert_eq!(again.data_type(), &wanted);
            assert_eq!(&again.to_data(), &encoded.to_data(), "{wanted}");
        }
        let too_many = encode(&texts(0..300), &dictionary_of(DataType::Int8, &DataType::Utf8));
        assert!(matches!(too_many, Err(Error::Internal(text)) if text.contains("300 rows")));
    }
}
