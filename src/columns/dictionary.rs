//! Dictionaries of a result: one for each batch, where the batches of a table have dictionaries of their own.
//!
//! ```text
//!   table     batch 0: [red, green]   batch 1: [green, blue]      one dictionary each
//!   result    gathered as values ── encode ──► keys 0 1 1 2 of [red, green, blue]
//! ```
//!
//! A batch's dictionary holds the values of its rows, in the order in which they come, so it is not ordered, whatever those of the
//! table were. Its keys are of the table's type; where all values together are too many for that, of the next wider one that
//! can number them, so that no batch of the result can fail for its values.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use arrow::array::{Array, ArrayData, ArrayRef, UInt32Array, UInt64Array, make_array};
use arrow::compute::{CastOptions, cast_with_options, take};
use arrow::datatypes::DataType;
use arrow::row::{RowConverter, SortField};

use crate::{Error, Result};

/// The type of a dictionary column that is gathered from batches of those dictionaries: `data_type`, or that with wider keys.
pub fn encoded_type(data_type: &DataType, dictionaries: &[&ArrayRef]) -> DataType {
    let DataType::Dictionary(key_type, value_type) = data_type else { return data_type.clone() };
    let mut apart: Vec<&ArrayRef> = Vec::new();
    for dictionary in dictionaries {
        // What batches share lies next to each other.
        if apart
            .last()
            .is_none_or(|last| !Arc::ptr_eq(last, dictionary) && !last.to_data().ptr_eq(&dictionary.to_data()))
        {
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
        // Narrow keys are worth counting for: the same few values may have come with every part of an upload.
        sum <= room || (room <= u16::MAX as u64 + 1 && are_at_most(&apart, value_type, room as usize))
    };
    let fitting = ladder[own..].iter().find(|(_, room)| holds(*room)).map_or(&**key_type, |(step, _)| step);
    DataType::Dictionary(Box::new(fitting.clone()), value_type.clone())
}

/// Whether dictionaries have so many different values together, or fewer.
fn are_at_most(dictionaries: &[&ArrayRef], value_type: &DataType, count_max: usize) -> bool {
    let Ok(converter) = RowConverter::new(vec![SortField::new(value_type.clone())]) else { return false };
    let mut seen: HashSet<Box<[u8]>> = HashSet::new();
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

/// Plain values as a dictionary column of that type.
///
/// # Errors
/// [`Error::Internal`] when its keys cannot number them, which [`encoded_type`] rules out.
pub fn encode(values: &ArrayRef, data_type: &DataType) -> Result<ArrayRef> {
    let DataType::Dictionary(key_type, value_type) = data_type else {
        return Err(Error::Internal(format!("{data_type} is no dictionary type")));
    };
    let failed = |error| {
        Error::Internal(format!(
            "making a dictionary of {} rows of {}, as {data_type}: {error}",
            values.len(),
            values.data_type()
        ))
    };
    let strict = CastOptions { safe: false, ..CastOptions::default() };
    if is_packed_by_arrow(value_type) {
        return cast_with_options(values, data_type, &strict).map_err(failed);
    }
    let (keys, values) = distinct(&cast_with_options(values, value_type, &strict).map_err(failed)?).map_err(failed)?;
    let keys = cast_with_options(&keys, key_type, &strict).map_err(failed)?.to_data();
    let data = ArrayData::builder(data_type.clone()).len(keys.len()).add_buffer(keys.buffers()[0].clone());
    let data = data.nulls(keys.nulls().cloned()).add_child_data(values.to_data()).build().map_err(failed)?;
    Ok(make_array(data))
}

/// Whether Arrow's cast makes dictionaries of the type's values. (`can_cast_types` says so of every type.)
fn is_packed_by_arrow(value_type: &DataType) -> bool {
    use DataType as T;
    match value_type {
        T::Utf8 | T::LargeUtf8 | T::Utf8View | T::Binary | T::LargeBinary | T::BinaryView => true,
        T::Duration(_) | T::Interval(_) => false,
        other => other.is_primitive(),
    }
}

/// Which of the different values each row has, and these in the order in which they come.
fn distinct(values: &ArrayRef) -> Result<(ArrayRef, ArrayRef), arrow::error::ArrowError> {
    let converter = RowConverter::new(vec![SortField::new(values.data_type().clone())])?;
    let rows = converter.convert_columns(&[Arc::clone(values)])?;
    let nulls = values.logical_nulls();
    let mut numbers: HashMap<&[u8], u64> = HashMap::new();
    let mut firsts: Vec<u32> = Vec::new();
    let mut number = |at: usize| {
        if nulls.as_ref().is_some_and(|nulls| nulls.is_null(at)) {
            return None;
        }
        Some(*numbers.entry(rows.row(at).data()).or_insert_with(|| {
            firsts.push(at as u32);
            firsts.len() as u64 - 1
        }))
    };
    let keys: UInt64Array = (0..values.len()).map(&mut number).collect();
    Ok((Arc::new(keys), take(values, &UInt32Array::from(firsts), None)?))
}

#[cfg(test)]
mod tests {
    use arrow::array::{
        AsArray, BooleanArray, DurationSecondArray, FixedSizeBinaryArray, Int8Array, ListArray, StringArray,
        StringViewArray,
    };
    use arrow::compute::cast;
    use arrow::datatypes::Int32Type;

    use super::*;

    fn dictionary_of(key_type: DataType, value_type: &DataType) -> DataType {
        DataType::Dictionary(Box::new(key_type), Box::new(value_type.clone()))
    }

    fn texts(range: std::ops::Range<usize>) -> ArrayRef {
        Arc::new(StringArray::from_iter_values(range.map(|number| format!("value {number}"))))
    }

    /// The key type for dictionaries of texts.
    fn key_type(own: DataType, dictionaries: &[&ArrayRef]) -> DataType {
        let DataType::Dictionary(key_type, _) = encoded_type(&dictionary_of(own, &DataType::Utf8), dictionaries) else {
            panic!("it stays a dictionary")
        };
        *key_type
    }

    #[test]
    fn keys_are_wider_only_where_the_different_values_are_too_many() {
        use DataType as T;
        let (low, high, same) = (texts(0..100), texts(100..200), texts(0..100));
        assert_eq!(key_type(T::Int8, &[]), T::Int8);
        assert_eq!(key_type(T::Int8, &[&low, &same, &low, &same]), T::Int8, "the same values in several dictionaries");
        assert_eq!(key_type(T::Int8, &[&low, &high]), T::Int16);
        assert_eq!(key_type(T::UInt8, &[&low, &high]), T::UInt8);
        assert_eq!(key_type(T::UInt8, &[&low, &high, &texts(200..256)]), T::UInt8, "0 is a key, too");
        assert_eq!(key_type(T::UInt8, &[&low, &high, &texts(200..257)]), T::UInt16);
        assert_eq!(key_type(T::Int8, &[&texts(0..128)]), T::Int8);
        assert_eq!(key_type(T::Int8, &[&texts(0..40_000)]), T::Int32, "two steps at once");
        assert_eq!(key_type(T::UInt32, &[&texts(0..70_000), &low]), T::UInt32);
    }

    #[test]
    fn values_of_every_type_become_a_dictionary_and_are_the_same() {
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
        }
        let too_many = encode(&texts(0..300), &dictionary_of(DataType::Int8, &DataType::Utf8));
        assert!(matches!(too_many, Err(Error::Internal(text)) if text.contains("300 rows")));
    }
}
