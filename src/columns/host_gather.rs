//! Gathering by row number on the host, for columns that a device does not move (variable length,
//! nested, booleans).

mod runs;

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use arrow::array::{
    AnyDictionaryArray, Array, ArrayData, ArrayRef, AsArray, DictionaryArray, GenericByteArray, UInt32Array, make_array,
};
use arrow::datatypes::{
    ArrowDictionaryKeyType, ArrowNativeType, ByteArrayType, DataType, GenericBinaryType, GenericStringType, Int8Type,
    Int16Type, Int32Type, Int64Type, UInt8Type, UInt16Type, UInt32Type, UInt64Type,
};
use rayon::prelude::*;

use runs::{Run, gather_runs};

use super::dictionary::{Distinct, Seeded, is_same};
use super::rows::{BatchIndex, Rows};
use crate::device::{HostBytes, HostColumn, NO_ROW};
use crate::human::type_name;
use crate::memory::{Arena, of_whole_values};
use crate::{Error, Result};

/// Number of a row, or the mark of a missing row.
pub trait RowNumber: Copy + Sync {
    /// Returns the row; `None` for the mark.
    fn row(self) -> Option<usize>;
}

/// [`NO_ROW`] marks a missing row.
impl RowNumber for u32 {
    fn row(self) -> Option<usize> {
        (self != NO_ROW).then_some(self as usize)
    }
}

/// Rows of tables of any length. [`u64::MAX`] marks a missing row.
impl RowNumber for u64 {
    fn row(self) -> Option<usize> {
        (self != Self::MAX).then_some(self as usize)
    }
}

/// Gathers the rows `numbers` of a column, in that order. A missing row gives a null. All values
/// are written straight into the arena, except for a few rare types; see [`runs`]. A dictionary
/// column comes back with 32-bit keys, and its dictionary has the values of these rows, each once.
///
/// # Errors
/// [`Error::Exhausted`] when the arena refuses. [`Error::TooLong`] when strings gathered into one
/// batch exceed the range of their 32-bit offsets. Fewer rows per batch help, or the type's large
/// variant.
pub fn gather_on_host<N: RowNumber>(rows: &Rows, column: usize, numbers: &[N], arena: &Arena) -> Result<ArrayRef> {
    let data_type = rows.data_type(column);
    if let DataType::Dictionary(_, value_type) = data_type {
        return gather_dictionary(rows, column, numbers, value_type, arena);
    }
    let arrays: Vec<&ArrayRef> = rows.column(column).collect();
    let index = BatchIndex::of(arrays.iter().map(|array| array.len()));
    let place = |at: usize| numbers[at].row().map(|row| index.find(row));
    let slices = |rows: Range<usize>| slices(&numbers[rows], &index, |array| arrays[array].null_count() > 0);
    gather_places(&arrays, data_type, numbers.len(), place, slices, arena)
}

/// Gathers the value at the place (array, index) of each of `count` rows. A row without a place
/// gives a null. `slices` returns a range of rows as slices of the arrays. It returns `None` if
/// rows are missing or null, if few are consecutive, or if their order is unknown.
fn gather_places(
    arrays: &[&ArrayRef],
    data_type: &DataType,
    count: usize,
    place: impl Fn(usize) -> Option<(usize, usize)> + Sync,
    slices: impl Fn(Range<usize>) -> Option<Vec<ArraySlice>> + Sync,
    arena: &Arena,
) -> Result<ArrayRef> {
    match data_type {
        DataType::Utf8 => gather_bytes::<GenericStringType<i32>>(arrays, count, place, slices, arena),
        DataType::LargeUtf8 => gather_bytes::<GenericStringType<i64>>(arrays, count, place, slices, arena),
        DataType::Binary => gather_bytes::<GenericBinaryType<i32>>(arrays, count, place, slices, arena),
        DataType::LargeBinary => gather_bytes::<GenericBinaryType<i64>>(arrays, count, place, slices, arena),
        _ => {
            let runs: Vec<Run> = (0..count).map(|row| Run::of_row(place(row))).collect();
            gather_runs(arrays, data_type, &runs, arena)
        }
    }
}

/// Builds an array over gathered values of a fixed-width type, or over gathered keys of
/// `dictionary`.
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
    let failed = |error| Error::Internal(format!("assembling a column of {}: {error}", type_name(data_type)));
    let data = data.build().map_err(failed)?;
    Ok(make_array(data))
}

/// Builds an array over values of variable length that a device gathered unchanged from a table.
///
/// # Errors
/// [`Error::Internal`] when the buffers do not make an array of that type.
pub(crate) fn bytes_array(data_type: &DataType, column: HostBytes) -> Result<ArrayRef> {
    let HostBytes { offsets, data, validity, rows } = column;
    Ok(make_array(of_whole_values(data_type, rows, offsets, data, validity)?))
}

/// Rows that one task gathers. A multiple of 8, so that tasks share no byte of the validity.
const TASK_ROWS: usize = 16 * 1024;

fn gather_bytes<T: ByteArrayType>(
    arrays: &[&ArrayRef],
    count: usize,
    place: impl Fn(usize) -> Option<(usize, usize)> + Sync,
    slices: impl Fn(Range<usize>) -> Option<Vec<ArraySlice>> + Sync,
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
    let bytes_of = |slice: &ArraySlice| {
        let offsets = arrays[slice.array].value_offsets();
        offsets[slice.rows.start].as_usize()..offsets[slice.rows.end].as_usize()
    };

    // Find the values of each task and the bytes that it writes, so that tasks know where to start.
    // Looking up all places before any value is read keeps many random reads in flight.
    let found: Vec<(Found<'_>, usize)> = (0..count.div_ceil(TASK_ROWS))
        .into_par_iter()
        .map(|task| {
            let rows = task * TASK_ROWS..count.min((task + 1) * TASK_ROWS);
            if let Some(slices) = slices(rows.clone()) {
                let length = slices.iter().map(|slice| bytes_of(slice).len()).sum();
                return (Found::Slices(slices), length);
            }
            let values: Vec<_> = rows.map(&value).collect();
            let length = values.iter().map(|value| value.map_or(0, <[u8]>::len)).sum();
            (Found::Values(values), length)
        })
        .collect();
    let total: usize = found.iter().map(|(_, length)| length).sum();
    let too_long = || {
        Error::TooLong(format!(
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
        .map(|((((start, piece), ends), bits), (found, _))| {
            let (mut written, mut nulls) = (0, 0);
            match found {
                Found::Slices(slices) => {
                    bits.fill(u8::MAX);
                    let mut ends = ends.iter_mut();
                    for slice in slices {
                        let (array, stored) = (arrays[slice.array], bytes_of(&slice));
                        piece[written..written + stored.len()].copy_from_slice(&array.value_data()[stored.clone()]);
                        // The total fits in the offset type, so each offset fits, too.
                        let offsets = &array.value_offsets()[slice.rows.start + 1..=slice.rows.end];
                        for (offset, end) in offsets.iter().zip(ends.by_ref()) {
                            *end = T::Offset::usize_as(start + written + offset.as_usize() - stored.start);
                        }
                        written += stored.len();
                    }
                }
                Found::Values(values) => {
                    bits.fill(0);
                    for (at, value) in values.into_iter().enumerate() {
                        match value {
                            Some(bytes) => {
                                piece[written..written + bytes.len()].copy_from_slice(bytes);
                                written += bytes.len();
                                bits[at / 8] |= 1 << (at % 8);
                            }
                            None => nulls += 1,
                        }
                        ends[at] = T::Offset::usize_as(start + written);
                    }
                }
            }
            nulls
        })
        .sum();
    let nulls = (nulls > 0).then(|| (validity.freeze(), nulls));
    Ok(make_array(of_whole_values(&T::DATA_TYPE, count, offsets.freeze(), bytes.freeze(), nulls)?))
}

/// Values of some rows in the source arrays.
enum Found<'a> {
    /// At any places.
    Values(Vec<Option<&'a [u8]>>),
    /// In slices of at least four rows on average. No value is null.
    Slices(Vec<ArraySlice>),
}

/// Consecutive rows of an array.
struct ArraySlice {
    array: usize,
    rows: Range<usize>,
}

/// Returns no slices, for rows in unknown order.
fn anywhere(_: Range<usize>) -> Option<Vec<ArraySlice>> {
    None
}

/// Returns the slices of numbered rows, if all rows exist, none is null, and most follow each
/// other.
fn slices<N: RowNumber>(
    numbers: &[N],
    index: &BatchIndex,
    has_nulls: impl Fn(usize) -> bool,
) -> Option<Vec<ArraySlice>> {
    /// Least rows per slice on average, because a copy takes as long as several single rows.
    const ROWS_MIN: usize = 4;
    let mut slices = Vec::new();
    let mut at = 0;
    while at < numbers.len() {
        let row = numbers[at].row()?;
        if slices.len() > at / ROWS_MIN + ROWS_MIN {
            return None;
        }
        let (array, start) = index.find(row);
        if has_nulls(array) {
            return None;
        }
        let most = (index.len_of(array) - start).min(numbers.len() - at);
        let followed = numbers[at..at + most].iter().zip(row..);
        let len = followed.take_while(|(found, expected)| found.row() == Some(*expected)).count();
        slices.push(ArraySlice { array, rows: start..start + len });
        at += len;
    }
    Some(slices)
}

/// Gathers dictionary columns whose batches do not share a dictionary, with 32-bit keys. The
/// batches' dictionaries together may have more values than the key type can number.
fn gather_dictionary<N: RowNumber>(
    rows: &Rows,
    column: usize,
    numbers: &[N],
    value_type: &DataType,
    arena: &Arena,
) -> Result<ArrayRef> {
    let arrays: Vec<&ArrayRef> = rows.column(column).collect();
    let index = BatchIndex::of(arrays.iter().map(|array| array.len()));
    let places = numbers.iter().map(|number| number.row().map(|row| index.find(row)));
    let (keys, values) = gather_values_once(&arrays, places, value_type, arena)?;
    Ok(Arc::new(DictionaryArray::<UInt32Type>::try_new(keys, values)?))
}

/// Returns keys and values of one dictionary, for rows of several dictionaries given by their
/// places (array, index). Each value that a row has is gathered once, so a value that rows share is
/// stored once.
fn gather_values_once(
    arrays: &[&ArrayRef],
    places: impl Iterator<Item = Option<(usize, usize)>>,
    value_type: &DataType,
    arena: &Arena,
) -> Result<(UInt32Array, ArrayRef)> {
    let batches: Vec<&dyn AnyDictionaryArray> = arrays.iter().map(|array| array.as_any_dictionary()).collect();
    let value_index = value_index_of(batches.first().map(|batch| batch.keys().data_type()));
    // Batches that share a dictionary are adjacent.
    let mut dictionaries: Vec<&ArrayRef> = Vec::new();
    let mut dictionary_of: Vec<usize> = Vec::with_capacity(batches.len());
    for batch in &batches {
        if dictionaries.last().is_none_or(|last| !is_same(last, batch.values())) {
            dictionaries.push(batch.values());
        }
        dictionary_of.push(dictionaries.len() - 1);
    }
    let mut found: Vec<(usize, usize)> = Vec::new();
    let mut number_at: HashMap<(usize, usize), u32, Seeded> = HashMap::default();
    let mut key_of = |place: Option<(usize, usize)>| {
        let (batch, at) = place?;
        let place = (dictionary_of[batch], value_index(batches[batch].keys(), at)?);
        Some(*number_at.entry(place).or_insert_with(|| {
            found.push(place);
            found.len() as u32 - 1
        }))
    };
    let mut keys: UInt32Array = places.map(&mut key_of).collect();
    let mut values = gather_places(&dictionaries, value_type, found.len(), |at| Some(found[at]), anywhere, arena)?;
    // Several dictionaries may have the same value, or one of them may have a null.
    let failed =
        |error| Error::Internal(format!("merging the different dictionaries of {}: {error}", type_name(value_type)));
    let Distinct { number_of, firsts } = Distinct::of(&values).map_err(failed)?;
    if firsts.len() < values.len() {
        keys = keys.iter().map(|key| number_of[key? as usize]).collect();
        let first = |at: usize| Some((0, firsts[at] as usize));
        values = gather_places(&[&values], value_type, firsts.len(), first, anywhere, arena)?;
    }
    Ok((keys, values))
}

/// Returns a function that reads the key of a row as a dictionary index, and returns `None` for a
/// null.
fn value_index_of(key_type: Option<&DataType>) -> fn(&dyn Array, usize) -> Option<usize> {
    fn value_index<K: ArrowDictionaryKeyType>(keys: &dyn Array, row: usize) -> Option<usize> {
        let keys = keys.as_primitive::<K>();
        keys.is_valid(row).then(|| keys.value(row).as_usize())
    }
    match key_type {
        Some(DataType::Int8) => value_index::<Int8Type>,
        Some(DataType::Int16) => value_index::<Int16Type>,
        Some(DataType::Int32) => value_index::<Int32Type>,
        Some(DataType::Int64) => value_index::<Int64Type>,
        Some(DataType::UInt8) => value_index::<UInt8Type>,
        Some(DataType::UInt16) => value_index::<UInt16Type>,
        Some(DataType::UInt32) => value_index::<UInt32Type>,
        _ => value_index::<UInt64Type>,
    }
}

#[cfg(test)]
mod tests {
    use arrow::array::{
        BooleanArray, FixedSizeBinaryArray, FixedSizeListArray, Int32Array, LargeListArray, ListArray, ListViewArray,
        MapArray, NullArray, RecordBatch, RunArray, StringArray, StringViewArray, StructArray, UnionArray,
        new_null_array,
    };
    use arrow::buffer::{NullBuffer, OffsetBuffer};
    use arrow::compute::{cast, interleave};
    use arrow::datatypes::{Field, Fields, Schema, UnionFields};
    use rand::rngs::StdRng;
    use rand::{Rng, SeedableRng};

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
    fn the_rows_of_several_tasks_are_gathered_without_gaps() {
        let values: Vec<String> = (0..3 * TASK_ROWS + 5).map(|row| format!("value {}", row % 1013)).collect();
        let rows = rows_of(vec![Arc::new(StringArray::from_iter_values(&values))]);
        let numbers: Vec<u32> = (0..values.len() as u32).rev().collect();
        let gathered = gather_on_host(&rows, 0, &numbers, &arena()).unwrap();
        let expected = StringArray::from_iter_values(values.iter().rev());
        assert_eq!(gathered.as_string::<i32>(), &expected);
    }

    #[test]
    fn consecutive_rows_are_gathered_like_any_others() {
        // Two batches without a null and one with a null, as slices whose first bytes belong to
        // other rows.
        let batch = |start: usize, len: usize, null_at: Option<usize>| -> ArrayRef {
            let value = |row: usize| (Some(row) != null_at).then(|| "x".repeat(row % 7) + &row.to_string());
            Arc::new((start..start + len + 9).map(value).collect::<StringArray>().slice(9, len))
        };
        let parts = [batch(0, TASK_ROWS, None), batch(70_000, 40_000, None), batch(200_000, 30_000, Some(200_100))];
        let total = parts.iter().map(Array::len).sum::<usize>() as u32;
        let whole = arrow::compute::concat(&parts.iter().map(|part| part.as_ref()).collect::<Vec<_>>()).unwrap();
        let rows = rows_of(parts.to_vec());
        let all: Vec<u32> = (0..total).collect();
        let every = |at: u32| all.iter().copied().filter(|row| row % at != 0).collect::<Vec<_>>();
        let with_missing: Vec<u32> = all.iter().map(|&row| if row == 30_000 { NO_ROW } else { row }).collect();
        for numbers in [all.clone(), all[5..total as usize - 3].to_vec(), every(100), every(5), every(2), with_missing]
        {
            let gathered = gather_on_host(&rows, 0, &numbers, &arena()).unwrap();
            let taken: UInt32Array = numbers.iter().map(|&row| (row != NO_ROW).then_some(row)).collect();
            let expected = arrow::compute::take(&whole, &taken, None).unwrap();
            assert_eq!(&gathered, &expected);
        }
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

    /// Values of every type that a device does not move, with nulls, in batches that are slices of
    /// larger ones.
    fn batches_of_every_type() -> Vec<Vec<ArrayRef>> {
        let count = 40;
        let numbers = |start: i32| Int32Array::from_iter((0..count).map(|row| (row % 5 > 0).then_some(start + row)));
        let text = |row: i32| (row % 4 > 0).then(|| format!("{row}").repeat(row as usize % 9));
        let lists = |start: i32| {
            let list = |row: i32| (row % 6 > 0).then(|| (0..row % 4).map(move |at| (at != 2).then_some(start + at)));
            ListArray::from_iter_primitive::<Int32Type, _, _>((0..count).map(list))
        };
        let strings = |start: i32| StringArray::from_iter((start..start + count).map(text));
        let nested = |start: i32| {
            let field = |name: &str, array: &ArrayRef| Field::new(name, array.data_type().clone(), true);
            let children: [ArrayRef; 3] = [Arc::new(lists(start)), Arc::new(strings(start)), Arc::new(numbers(start))];
            let fields: Vec<_> =
                ["a", "b", "c"].iter().zip(&children).map(|(name, array)| field(name, array)).collect();
            let nulls = NullBuffer::from_iter((0..count).map(|row| row % 7 > 0));
            Arc::new(StructArray::new(fields.into(), children.into(), Some(nulls))) as ArrayRef
        };
        let list_of = |values: ArrayRef, is_large: bool| -> ArrayRef {
            let field = Arc::new(Field::new("item", values.data_type().clone(), true));
            let lengths = [3, 0, 5, 2, 7, 1, 0, 9, 6, 7];
            let nulls = Some(NullBuffer::from_iter((0..10).map(|row| row != 4)));
            match is_large {
                false => Arc::new(ListArray::new(field, OffsetBuffer::from_lengths(lengths), values, nulls)),
                true => Arc::new(LargeListArray::new(field, OffsetBuffer::from_lengths(lengths), values, nulls)),
            }
        };
        let fixed_list = |values: ArrayRef| -> ArrayRef {
            let field = Arc::new(Field::new("item", values.data_type().clone(), true));
            let nulls = Some(NullBuffer::from_iter((0..10).map(|row| row != 3)));
            Arc::new(FixedSizeListArray::new(field, 4, values, nulls))
        };
        let map = |start: i32| -> ArrayRef {
            let keys: ArrayRef = Arc::new(Int32Array::from_iter_values(start..start + count));
            let values: ArrayRef = Arc::new(strings(start));
            let fields = Fields::from(vec![
                Field::new("keys", DataType::Int32, false),
                Field::new("values", DataType::Utf8, true),
            ]);
            let entries = StructArray::new(fields.clone(), vec![keys, values], None);
            let field = Arc::new(Field::new("entries", DataType::Struct(fields), false));
            let lengths = [3, 0, 5, 2, 7, 1, 0, 9, 6, 7];
            Arc::new(MapArray::new(field, OffsetBuffer::from_lengths(lengths), entries, None, false))
        };
        // In any order, and with values that other rows share.
        let list_views = |values: ArrayRef, len: i32| -> ArrayRef {
            let field = Arc::new(Field::new("item", values.data_type().clone(), true));
            let offsets = (0..count).map(|row| row * 7 % (count - len)).collect();
            let sizes = (0..count).map(|row| row % len).collect();
            let nulls = Some(NullBuffer::from_iter((0..count).map(|row| row % 6 != 4)));
            Arc::new(ListViewArray::new(field, offsets, sizes, values, nulls))
        };
        let union = |start: i32, is_dense: bool| -> ArrayRef {
            let children: Vec<ArrayRef> = vec![Arc::new(numbers(start)), Arc::new(strings(start))];
            let field = |name, array: &ArrayRef| Field::new(name, array.data_type().clone(), true);
            let fields = [field("number", &children[0]), field("text", &children[1])];
            let fields = UnionFields::try_new([3, 7], fields).unwrap();
            let ids = (0..count).map(|row| if row % 3 == 0 { 3 } else { 7 }).collect();
            let offsets = is_dense.then(|| (0..count).map(|row| count - 1 - row).collect());
            Arc::new(UnionArray::try_new(fields, ids, offsets, children).unwrap())
        };
        // Three rows for each value.
        let runs = |values: ArrayRef| -> ArrayRef {
            let ends = Int32Array::from_iter_values((1..=values.len() as i32).map(|run| run * 3));
            Arc::new(RunArray::<Int32Type>::try_new(&ends, &values).unwrap())
        };
        let dictionary =
            |start: i32| cast(&strings(start), &DataType::Dictionary(DataType::Int8.into(), DataType::Utf8.into()));
        let as_type = |start: i32, data_type: &DataType| cast(&strings(start), data_type).unwrap();
        let of = |start: i32| -> Vec<ArrayRef> {
            vec![
                Arc::new(BooleanArray::from_iter(
                    (0..count).map(|row| (row % 3 > 0).then_some((row + start) % 2 == 0)),
                )),
                as_type(start, &DataType::Utf8View),
                as_type(start, &DataType::BinaryView),
                as_type(start, &DataType::LargeBinary),
                Arc::new(lists(start)),
                nested(start),
                list_of(nested(start), false),
                list_of(as_type(start, &DataType::Utf8View), true),
                list_of(dictionary(start).unwrap(), false),
                list_of(Arc::new(lists(start)), false),
                fixed_list(Arc::new(numbers(start))),
                fixed_list(nested(start)),
                map(start),
                list_views(nested(start), 9),
                list_views(Arc::new(numbers(start)), 5),
                list_views(dictionary(start).unwrap(), 9),
                union(start, false),
                union(start, true),
                runs(nested(start)),
                list_of(runs(as_type(start, &DataType::Utf8View)).slice(0, count as usize), false),
                Arc::new(NullArray::new(count as usize)),
                cast(&numbers(start), &DataType::Decimal256(40, 2)).unwrap(),
                Arc::new(
                    FixedSizeBinaryArray::try_from_sparse_iter_with_size(
                        (0..count).map(|row| (row % 3 > 0).then_some([row as u8; 20])),
                        20,
                    )
                    .unwrap(),
                ),
            ]
        };
        let (first, second) = (of(0), of(1000));
        let cut = |array: &ArrayRef| array.slice(array.len().min(1), array.len().saturating_sub(2));
        first.iter().zip(&second).map(|(first, second)| vec![cut(first), cut(second), cut(first)]).collect()
    }

    #[test]
    fn values_of_every_type_are_gathered_as_by_arrow_and_stored_in_the_arena() {
        let random = &mut StdRng::seed_from_u64(crate::testing::seed());
        for parts in batches_of_every_type() {
            let data_type = parts[0].data_type().clone();
            let rows = rows_of(parts.clone());
            let pick = |random: &mut StdRng| match random.random_range(0..=rows.len()) {
                number if number < rows.len() => number as u32,
                _ => NO_ROW,
            };
            let numbers: Vec<u32> = (0..500).map(|_| pick(random)).collect();
            let all: Vec<&dyn Array> = parts.iter().map(|part| &**part).collect();
            let index = BatchIndex::of(parts.iter().map(|part| part.len()));
            let null = new_null_array(&data_type, 1);
            let arrays: Vec<&dyn Array> = all.iter().copied().chain([&*null]).collect();
            let place = |&number: &u32| if number == NO_ROW { (parts.len(), 0) } else { index.find(number as usize) };
            let expected = interleave(&arrays, &numbers.iter().map(place).collect::<Vec<_>>()).unwrap();
            let arena = arena();
            let gathered = gather_on_host(&rows, 0, &numbers, &arena).unwrap();
            gathered.to_data().validate_full().unwrap();
            assert_eq!(&gathered, &expected, "{data_type}");
            // If dictionaries inside another type differ, Arrow makes their keys, outside the
            // arena.
            if !data_type.to_string().contains("Dictionary") {
                assert_stored_in(&arena, &gathered.to_data());
            }
        }
    }

    fn assert_stored_in(arena: &Arena, data: &ArrayData) {
        let buffers = data.buffers().iter().chain(data.nulls().map(|nulls| nulls.buffer()));
        for buffer in buffers.filter(|buffer| !buffer.is_empty()) {
            assert!(
                arena.owns(buffer.as_ptr()),
                "a buffer of {} bytes of {} is stored elsewhere",
                buffer.len(),
                data.data_type()
            );
        }
        data.child_data().iter().for_each(|child| assert_stored_in(arena, child));
    }

    /// Guards against gathering views with all buffers of the table, which once made each batch of
    /// a result that large.
    #[test]
    fn gathered_views_have_only_the_values_of_their_rows_and_share_repeated_values() {
        let long = |row: usize| format!("a string that is too long for a view, number {row:06}");
        let part =
            |start: usize| Arc::new(StringViewArray::from_iter_values((start..start + 1000).map(long))) as ArrayRef;
        let rows = rows_of((0..20).map(|at| part(at * 1000)).collect());
        let arena = arena();
        let numbers: Vec<u32> = (0..100).map(|at| at * 199).collect();
        let gathered = gather_on_host(&rows, 0, &numbers, &arena).unwrap();
        let taken = arena.budget().used_bytes();
        let values = 100 * (16 + long(0).len() as u64);
        assert!((values..values + 1024).contains(&taken), "{taken} B for {values} B");
        drop(gathered);
        // Gather each row 50 times: more values than all rows of the table have.
        let numbers: Vec<u32> = (0..5000).flat_map(|at| [at * 3; 50]).collect();
        let gathered = gather_on_host(&rows, 0, &numbers, &arena).unwrap();
        let taken = arena.budget().used_bytes();
        let values = 5000 * (50 * 16 + long(0).len() as u64);
        assert!((values..values + 1024).contains(&taken), "{taken} B for {values} B");
        let gathered = gathered.as_string_view();
        assert!(numbers.iter().zip(gathered.iter()).all(|(&row, value)| value == Some(&long(row as usize))));
    }

    #[test]
    fn nested_values_that_do_not_fit_the_budget_are_refused() {
        let values = Int32Array::from_iter_values(0..1 << 20);
        let field = Arc::new(Field::new("item", DataType::Int32, false));
        let lists = ListArray::new(field, OffsetBuffer::from_lengths([1 << 18; 4]), Arc::new(values), None);
        let rows = rows_of(vec![Arc::new(lists)]);
        let little = Arena::new(Budget::new("host memory", "--host-memory", 3 << 20));
        let refused = gather_on_host(&rows, 0, &[0u32, 1, 2, 3], &little).unwrap_err();
        assert!(matches!(&refused, Error::Exhausted(text) if text.contains("--host-memory")), "{refused}");
        assert!(gather_on_host(&rows, 0, &[0u32, 1], &little).is_ok());
    }

    fn dictionary(keys: Vec<Option<i8>>, values: Vec<Option<&str>>) -> ArrayRef {
        Arc::new(DictionaryArray::<Int8Type>::try_new(keys.into(), Arc::new(StringArray::from(values))).unwrap())
    }

    #[test]
    fn rows_of_several_dictionaries_are_gathered_with_one_without_duplicate_values() {
        let first = dictionary(vec![Some(1), Some(0), None], vec![Some("green"), Some("red"), Some("unused")]);
        let second = dictionary(vec![Some(0), Some(1), Some(2)], vec![Some("blue"), Some("green"), None]);
        let rows = rows_of(vec![first.clone(), first, second]);
        let gathered = gather_on_host(&rows, 0, &[8, 7, 0, 4, NO_ROW, 2, 3, 6, 1], &arena()).unwrap();
        let gathered = gathered.as_dictionary::<UInt32Type>();
        let values: Vec<_> = gathered.values().as_string::<i32>().iter().collect();
        assert_eq!(values, [Some("green"), Some("red"), Some("blue")]);
        let keys: Vec<_> = gathered.keys().iter().collect();
        assert_eq!(keys, [None, Some(0), Some(1), Some(0), None, None, Some(1), Some(2), Some(0)]);
        assert_eq!(gather_on_host(&rows, 0, &[0u32; 0], &arena()).unwrap().len(), 0);
    }

    /// Guards against gathering such rows as plain values on the heap: here that took 3 GB,
    /// whatever the budget.
    #[test]
    fn a_value_shared_by_many_rows_is_gathered_and_charged_once() {
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
        assert_eq!(gather_on_host(&rows, 0, &[0u32; 0], &arena()).unwrap().len(), 0);
    }
}
