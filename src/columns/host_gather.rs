//! Gathering on the host: columns that a device does not move (variable length, nested, booleans), by row number.

use std::collections::HashMap;
use std::sync::Arc;

use arrow::array::{
    AnyDictionaryArray, Array, ArrayData, ArrayRef, AsArray, DictionaryArray, GenericByteArray, UInt32Array,
    new_empty_array, new_null_array,
};
use arrow::buffer::{BooleanBuffer, NullBuffer, OffsetBuffer, ScalarBuffer};
use arrow::compute::interleave;
use arrow::datatypes::{
    ArrowDictionaryKeyType, ArrowNativeType, ByteArrayType, DataType, GenericBinaryType, GenericStringType, Int8Type,
    Int16Type, Int32Type, Int64Type, UInt8Type, UInt16Type, UInt32Type, UInt64Type,
};
use arrow::error::ArrowError;
use rayon::prelude::*;

use super::dictionary::{Distinct, is_same, value_sizes};
use super::rows::{BatchIndex, Rows};
use crate::device::{HostColumn, NO_ROW};
use crate::memory::Arena;
use crate::{Error, Result};

/// The rows `numbers` of a column, in that order; [`NO_ROW`] gives a null. Strings and binaries are written straight into
/// the arena; what else there is goes through Arrow's own kernels. A dictionary column comes as one with 32-bit keys, whose
/// dictionary has the values of these rows, each once.
///
/// # Errors
/// [`Error::Exhausted`] when the arena refuses; [`Error::Invalid`] when strings gathered into one batch exceed what
/// their 32-bit offsets can address (fewer rows per batch help, or the type's large variant).
pub fn gather_on_host(rows: &Rows, column: usize, numbers: &[u32], arena: &Arena) -> Result<ArrayRef> {
    let data_type = rows.data_type(column);
    if let DataType::Dictionary(key_type, value_type) = data_type {
        return gather_dictionary(rows, column, numbers, key_type, value_type, arena);
    }
    let arrays: Vec<&ArrayRef> = rows.column(column).collect();
    let index = BatchIndex::of(arrays.iter().map(|array| array.len()));
    let place = |at: usize| (numbers[at] != NO_ROW).then(|| index.find(numbers[at] as usize));
    gather_places(&arrays, data_type, numbers.len(), place, arena)
}

/// For each of `count` rows, the value at its place (array, index); a null where there is none.
fn gather_places(
    arrays: &[&ArrayRef],
    data_type: &DataType,
    count: usize,
    place: impl Fn(usize) -> Option<(usize, usize)> + Sync,
    arena: &Arena,
) -> Result<ArrayRef> {
    match data_type {
        DataType::Utf8 => gather_bytes::<GenericStringType<i32>>(arrays, count, place, arena),
        DataType::LargeUtf8 => gather_bytes::<GenericStringType<i64>>(arrays, count, place, arena),
        DataType::Binary => gather_bytes::<GenericBinaryType<i32>>(arrays, count, place, arena),
        DataType::LargeBinary => gather_bytes::<GenericBinaryType<i64>>(arrays, count, place, arena),
        _ => gather_any(arrays, data_type, count, place),
    }
}

/// An array over gathered values of a fixed-width type, or over gathered keys of `dictionary`.
///
/// # Errors
/// [`Error::Internal`] when the buffers do not make an array of that type.
pub fn fixed_array(data_type: &DataType, column: HostColumn, dictionary: Option<&ArrayRef>) -> Result<ArrayRef> {
    let mut data = ArrayData::builder(data_type.clone()).len(column.rows).add_buffer(column.data);
    if let Some((validity, null_count)) = column.validity {
        data = data.null_bit_buffer(Some(validity)).null_count(null_count);
    }
    if let Some(dictionary) = dictionary {
        data = data.add_child_data(dictionary.to_data());
    }
    let data = data.build().map_err(|error| Error::Internal(format!("assembling a {data_type} column: {error}")))?;
    Ok(arrow::array::make_array(data))
}

/// Rows that one task gathers; a multiple of 8, so that tasks share no byte of the validity.
const TASK_ROWS: usize = 16 * 1024;

fn gather_bytes<T: ByteArrayType>(
    arrays: &[&ArrayRef],
    count: usize,
    place: impl Fn(usize) -> Option<(usize, usize)> + Sync,
    arena: &Arena,
) -> Result<ArrayRef>
where
    T::Offset: bytemuck::Pod,
{
    let arrays: Vec<&GenericByteArray<T>> = arrays.iter().map(|array| array.as_bytes::<T>()).collect();
    let value = |row: usize| -> Option<&[u8]> {
        let (array, at) = place(row)?;
        let array = arrays[array];
        (!array.is_null(at)).then(|| AsRef::<[u8]>::as_ref(array.value(at)))
    };

    // Where each value lies, and how many bytes each task writes, so that tasks know where to start. Looking all places
    // up before any value is read keeps many reads from random places in flight.
    let found: Vec<(Vec<Option<&[u8]>>, usize)> = (0..count.div_ceil(TASK_ROWS))
        .into_par_iter()
        .map(|task| {
            let values: Vec<_> = (task * TASK_ROWS..count.min((task + 1) * TASK_ROWS)).map(&value).collect();
            let length = values.iter().map(|value| value.map_or(0, <[u8]>::len)).sum();
            (values, length)
        })
        .collect();
    let total: usize = found.iter().map(|(_, length)| length).sum();
    let too_long = || {
        Error::Invalid(format!(
            "{total} bytes of strings in one batch of {count} rows exceed the 32-bit offsets of type {}; ask for smaller batches \
             with batch_rows, or upload the column with 64-bit offsets",
            T::DATA_TYPE
        ))
    };
    T::Offset::from_usize(total).ok_or_else(too_long)?;

    let mut offsets = arena.allocate((count + 1) * size_of::<T::Offset>(), "string offsets of a result")?;
    let mut bytes = arena.allocate(total, "strings of a result")?;
    let mut validity = arena.allocate(count.div_ceil(8), "the validity of a result")?;
    let (first, ends) = bytemuck::cast_slice_mut::<u8, T::Offset>(&mut offsets).split_at_mut(1);
    first[0] = T::Offset::default();
    let mut pieces: Vec<(usize, &mut [u8])> = Vec::with_capacity(found.len());
    let (mut start, mut rest): (usize, &mut [u8]) = (0, &mut bytes);
    for &(_, length) in &found {
        let (piece, after) = rest.split_at_mut(length);
        pieces.push((start, piece));
        (start, rest) = (start + length, after);
    }
    let tasks: Vec<_> =
        pieces.into_iter().zip(ends.chunks_mut(TASK_ROWS)).zip(validity.chunks_mut(TASK_ROWS / 8)).zip(found).collect();
    let nulls: usize = tasks
        .into_par_iter()
        .map(|((((start, piece), ends), bits), (values, _))| {
            bits.fill(0);
            let (mut written, mut nulls) = (0, 0);
            for (at, value) in values.into_iter().enumerate() {
                match value {
                    Some(bytes) => {
                        piece[written..written + bytes.len()].copy_from_slice(bytes);
                        written += bytes.len();
                        bits[at / 8] |= 1 << (at % 8);
                    }
                    None => nulls += 1,
                }
                ends[at] = T::Offset::from_usize(start + written).expect("the total fits");
            }
            nulls
        })
        .sum();
    let nulls = (nulls > 0).then(|| NullBuffer::new(BooleanBuffer::new(validity.freeze(), 0, count)));
    let offsets = OffsetBuffer::new(ScalarBuffer::new(offsets.freeze(), 0, count + 1));
    Ok(Arc::new(GenericByteArray::<T>::try_new(offsets, bytes.freeze(), nulls)?))
}

/// Dictionary columns whose batches do not share a dictionary. (The batches' dictionaries together may have more values than
/// the key type can number.) Each value that a row has is gathered once, so that what this takes is what the result takes, however
/// many rows share a value.
fn gather_dictionary(
    rows: &Rows,
    column: usize,
    numbers: &[u32],
    key_type: &DataType,
    value_type: &DataType,
    arena: &Arena,
) -> Result<ArrayRef> {
    fn value_index<K: ArrowDictionaryKeyType>(keys: &dyn Array, row: usize) -> Option<usize> {
        let keys = keys.as_primitive::<K>();
        (!keys.is_null(row)).then(|| keys.value(row).as_usize())
    }
    let value_index = match key_type {
        DataType::Int8 => value_index::<Int8Type>,
        DataType::Int16 => value_index::<Int16Type>,
        DataType::Int32 => value_index::<Int32Type>,
        DataType::Int64 => value_index::<Int64Type>,
        DataType::UInt8 => value_index::<UInt8Type>,
        DataType::UInt16 => value_index::<UInt16Type>,
        DataType::UInt32 => value_index::<UInt32Type>,
        _ => value_index::<UInt64Type>,
    };
    let batches: Vec<&dyn AnyDictionaryArray> = rows.column(column).map(|array| array.as_any_dictionary()).collect();
    let index = BatchIndex::of(batches.iter().map(|batch| batch.len()));
    // What batches share lies next to each other.
    let mut dictionaries: Vec<&ArrayRef> = Vec::new();
    let mut dictionary_of: Vec<usize> = Vec::with_capacity(batches.len());
    for batch in &batches {
        if dictionaries.last().is_none_or(|last| !is_same(last, batch.values())) {
            dictionaries.push(batch.values());
        }
        dictionary_of.push(dictionaries.len() - 1);
    }
    let mut places: Vec<(usize, usize)> = Vec::new();
    let mut number_at: HashMap<(usize, usize), u32> = HashMap::new();
    let mut key_of = |&number: &u32| {
        if number == NO_ROW {
            return None;
        }
        let (batch, at) = index.find(number as usize);
        let place = (dictionary_of[batch], value_index(batches[batch].keys(), at)?);
        Some(*number_at.entry(place).or_insert_with(|| {
            places.push(place);
            places.len() as u32 - 1
        }))
    };
    let mut keys: UInt32Array = numbers.iter().map(&mut key_of).collect();
    let mut values = gather_values(&dictionaries, value_type, &places, arena)?;
    // Several dictionaries may have the same value, or one of them a null.
    let failed = |error| Error::Internal(format!("making one dictionary of several of type {value_type}: {error}"));
    let Distinct { number_of, firsts } = Distinct::of(&values).map_err(failed)?;
    if firsts.len() < values.len() {
        keys = keys.iter().map(|key| number_of[key? as usize]).collect();
        let places: Vec<(usize, usize)> = firsts.iter().map(|&first| (0, first as usize)).collect();
        values = gather_values(&[&values], value_type, &places, arena)?;
    }
    Ok(Arc::new(DictionaryArray::<UInt32Type>::try_new(keys, values)?))
}

/// The values at those places (dictionary, index). Those that do not lie in the arena are paid for while they are made.
fn gather_values(
    dictionaries: &[&ArrayRef],
    value_type: &DataType,
    places: &[(usize, usize)],
    arena: &Arena,
) -> Result<ArrayRef> {
    let _paid = match value_type {
        DataType::Utf8 | DataType::LargeUtf8 | DataType::Binary | DataType::LargeBinary => None,
        _ => {
            let sizes: Vec<_> = dictionaries.iter().map(|dictionary| value_sizes(dictionary)).collect();
            let bytes = places.iter().map(|&(dictionary, at)| sizes[dictionary](at)).sum();
            Some(arena.reserve(bytes, "the values of a result's dictionary")?)
        }
    };
    gather_places(dictionaries, value_type, places.len(), |at| Some(places[at]), arena)
}

fn gather_any(
    arrays: &[&ArrayRef],
    data_type: &DataType,
    count: usize,
    place: impl Fn(usize) -> Option<(usize, usize)>,
) -> Result<ArrayRef> {
    if count == 0 {
        return Ok(new_empty_array(data_type));
    }
    // A row that does not exist is row 0 of an array of one null.
    let null = new_null_array(data_type, 1);
    let missing = (arrays.len(), 0);
    let arrays: Vec<&dyn Array> = arrays.iter().copied().chain([&null]).map(|array| &**array).collect();
    let places: Vec<_> = (0..count).map(|row| place(row).unwrap_or(missing)).collect();
    interleave(&arrays, &places).map_err(|error| match error {
        ArrowError::DictionaryKeyOverflowError => Error::Invalid(format!(
            "the batches of a column of type {data_type} have dictionaries of their own inside, with more values together than \
             their keys can number in one batch of the result; upload it with wider dictionary keys, or ask for smaller batches \
             with batch_rows"
        )),
        // As with strings, whoever asked may ask for fewer rows at a time.
        ArrowError::OffsetOverflowError(_) => Error::Invalid(format!(
            "values of a column of type {data_type} are so long that one batch of the result cannot hold them; ask for smaller \
             batches with batch_rows"
        )),
        error => Error::Internal(format!("gathering a {data_type} column: {error}")),
    })
}

#[cfg(test)]
mod tests {
    use arrow::array::{Int32Array, ListArray, RecordBatch, StringArray};
    use arrow::datatypes::{Field, Schema};

    use super::*;
    use crate::memory::Budget;

    fn arena() -> Arena {
        Arena::new(Budget::new("host memory", "--host-memory", 1 << 30))
    }

    fn rows_of(parts: Vec<ArrayRef>) -> Rows {
        let schema = Arc::new(Schema::new(vec![Field::new("v", parts[0].data_type().clone(), true)]));
        let batches: Vec<_> =
            parts.into_iter().map(|part| RecordBatch::try_new(schema.clone(), vec![part]).unwrap()).collect();
        let count = batches.iter().map(|batch| batch.num_rows() as u64).sum();
        Rows::of(&schema, &batches, 0..count)
    }

    #[test]
    fn strings_are_gathered_across_batches_with_nulls_and_missing_rows() {
        let first: ArrayRef = Arc::new(StringArray::from(vec![Some("zero"), None, Some("")]));
        let second: ArrayRef = Arc::new(StringArray::from(vec![Some("drei"), Some("vier und mehr")]));
        let rows = rows_of(vec![first, second]);
        let gathered = gather_on_host(&rows, 0, &[4, 4, 1, NO_ROW, 2, 0, 3], &arena()).unwrap();
        let expected = StringArray::from(vec![
            Some("vier und mehr"),
            Some("vier und mehr"),
            None,
            None,
            Some(""),
            Some("zero"),
            Some("drei"),
        ]);
        assert_eq!(gathered.as_string::<i32>(), &expected);
    }

    #[test]
    fn tasks_meet_without_a_seam() {
        let values: Vec<String> = (0..3 * TASK_ROWS + 5).map(|row| format!("value {}", row % 1013)).collect();
        let rows = rows_of(vec![Arc::new(StringArray::from_iter_values(&values))]);
        let numbers: Vec<u32> = (0..values.len() as u32).rev().collect();
        let gathered = gather_on_host(&rows, 0, &numbers, &arena()).unwrap();
        let expected = StringArray::from_iter_values(values.iter().rev());
        assert_eq!(gathered.as_string::<i32>(), &expected);
    }

    #[test]
    fn nested_columns_and_missing_rows_are_gathered() {
        let lists =
            ListArray::from_iter_primitive::<Int32Type, _, _>(vec![Some(vec![Some(1), None]), None, Some(vec![])]);
        let rows = rows_of(vec![Arc::new(lists)]);
        let gathered = gather_on_host(&rows, 0, &[2, NO_ROW, 0, 1], &arena()).unwrap();
        let expected = ListArray::from_iter_primitive::<Int32Type, _, _>(vec![
            Some(vec![]),
            None,
            Some(vec![Some(1), None]),
            None,
        ]);
        assert_eq!(gathered.as_list::<i32>(), &expected);
    }

    fn dictionary(keys: Vec<Option<i8>>, values: Vec<Option<&str>>) -> ArrayRef {
        Arc::new(DictionaryArray::<Int8Type>::try_new(keys.into(), Arc::new(StringArray::from(values))).unwrap())
    }

    #[test]
    fn rows_of_several_dictionaries_get_one_with_each_of_their_values_once() {
        let first = dictionary(vec![Some(1), Some(0), None], vec![Some("green"), Some("red"), Some("unused")]);
        let second = dictionary(vec![Some(0), Some(1), Some(2)], vec![Some("blue"), Some("green"), None]);
        let rows = rows_of(vec![first.clone(), first, second]);
        let gathered = gather_on_host(&rows, 0, &[8, 7, 0, 4, NO_ROW, 2, 3, 6, 1], &arena()).unwrap();
        let gathered = gathered.as_dictionary::<UInt32Type>();
        let values: Vec<_> = gathered.values().as_string::<i32>().iter().collect();
        assert_eq!(values, [Some("green"), Some("red"), Some("blue")]);
        let keys: Vec<_> = gathered.keys().iter().collect();
        assert_eq!(keys, [None, Some(0), Some(1), Some(0), None, None, Some(1), Some(2), Some(0)]);
        assert_eq!(gather_on_host(&rows, 0, &[], &arena()).unwrap().len(), 0);
    }

    /// Such rows were once gathered as plain values on the heap: 3 GB of them here, whatever the budget.
    #[test]
    fn a_value_that_many_rows_share_is_paid_for_once_and_never_gathered_for_each() {
        const VALUE_BYTES: usize = 1 << 20;
        let long = ["a", "b", "c"].map(|text| text.repeat(VALUE_BYTES));
        let own = |at: usize| dictionary(vec![Some(0); 1000], vec![Some(long[at].as_str())]);
        let rows = rows_of((0..3).map(own).collect());
        let numbers: Vec<u32> = (0..3000).collect();
        let budget = |bytes: usize| Budget::new("host memory", "--host-memory", bytes as u64);
        let (enough, little) = (budget(16 * VALUE_BYTES), budget(2 * VALUE_BYTES));
        let gathered = gather_on_host(&rows, 0, &numbers, &Arena::new(enough.clone())).unwrap();
        assert_eq!(gathered.as_dictionary::<UInt32Type>().values().len(), 3);
        assert!((3 * VALUE_BYTES..4 * VALUE_BYTES).contains(&(enough.used_bytes() as usize)), "the budget knows of it");
        let refused = gather_on_host(&rows, 0, &numbers, &Arena::new(little)).unwrap_err();
        assert!(matches!(&refused, Error::Exhausted(text) if text.contains("--host-memory")), "{refused}");
    }

    #[test]
    fn gathering_nothing_gives_an_empty_column() {
        let rows = rows_of(vec![Arc::new(Int32Array::from(vec![1]))]);
        assert_eq!(gather_on_host(&rows, 0, &[], &arena()).unwrap().len(), 0);
    }
}
