//! Consecutive rows of one side of a join in host memory, and their way to a device.

use std::any::Any;
use std::ops::Range;
use std::sync::{Arc, Weak};

use arrow::array::{Array, ArrayRef, AsArray, OffsetSizeTrait, RecordBatch, new_empty_array};
use arrow::buffer::{Buffer, OffsetBuffer};
use arrow::datatypes::{DataType, SchemaRef};

use super::types::any_part;
use crate::Result;
use crate::device::{BitSlice, BytesColumn, BytesPart, Column, ColumnRows, Device, Stream, Width, strings};

/// Consecutive rows of a table, as slices of its batches. Row numbers count from the first of these
/// rows.
#[derive(Clone, Debug)]
pub struct Rows {
    schema: SchemaRef,
    batches: Vec<RecordBatch>,
    rows: usize,
    /// The table of the rows, and the number of their first row in it.
    origin: Option<(Weak<dyn Any + Send + Sync>, u64)>,
}

impl Rows {
    /// Returns the rows `range` of the concatenated batches.
    ///
    /// # Panics
    /// When the range reaches past the last row.
    pub fn of(schema: &SchemaRef, batches: &[RecordBatch], range: Range<u64>) -> Self {
        let wanted = (range.end - range.start) as usize;
        let mut slices = Vec::new();
        let mut batch_start = 0u64;
        for batch in batches {
            let batch_end = batch_start + batch.num_rows() as u64;
            let (start, end) = (range.start.max(batch_start), range.end.min(batch_end));
            if start < end {
                slices.push(batch.slice((start - batch_start) as usize, (end - start) as usize));
            }
            batch_start = batch_end;
        }
        let rows = slices.iter().map(RecordBatch::num_rows).sum();
        assert_eq!(rows, wanted, "rows {range:?} of {batch_start}");
        Self { schema: schema.clone(), batches: slices, rows, origin: None }
    }

    /// Marks the rows as rows of `table` from row `start` on, so that a device recognizes them.
    #[must_use]
    pub fn of_table(mut self, table: Weak<dyn Any + Send + Sync>, start: u64) -> Self {
        self.origin = Some((table, start));
        self
    }

    /// Type of a column.
    pub fn data_type(&self, index: usize) -> &DataType {
        self.schema.field(index).data_type()
    }

    /// Number of rows.
    pub fn len(&self) -> usize {
        self.rows
    }

    /// True if there are no rows.
    pub fn is_empty(&self) -> bool {
        self.rows == 0
    }

    /// Arrays of a column, one per batch.
    pub fn column(&self, index: usize) -> impl Iterator<Item = &ArrayRef> {
        self.batches.iter().map(move |batch| batch.column(index))
    }

    /// True if any of the rows is null in the column, by the column's own validity.
    pub fn has_nulls(&self, index: usize) -> bool {
        self.column(index).any(|array| array.null_count() > 0)
    }

    /// Returns the slices of some rows: one for each batch that has any of them.
    pub fn slices(&self, range: Range<usize>) -> Vec<BatchSlice> {
        let mut slices = Vec::new();
        let mut batch_start = 0;
        for (batch, rows) in self.batches.iter().map(RecordBatch::num_rows).enumerate() {
            let (start, end) = (range.start.max(batch_start), range.end.min(batch_start + rows));
            if start < end {
                slices.push(BatchSlice { batch, rows: start - batch_start..end - batch_start });
            }
            batch_start += rows;
            if batch_start >= range.end {
                break;
            }
        }
        slices
    }

    /// Returns a slice of a column without copying it.
    pub fn stored(&self, index: usize, slice: &BatchSlice) -> ArrayRef {
        self.batches[slice.batch].column(index).slice(slice.rows.start, slice.rows.len())
    }

    /// Copies a fixed-width column to a device.
    ///
    /// # Errors
    /// The errors of the device.
    ///
    /// # Panics
    /// When the column is neither of fixed width nor a dictionary column ([`movable`]).
    pub fn copy_in(&self, index: usize, device: &dyn Device, stream: &Stream) -> Result<Column> {
        let moved_type = match self.data_type(index) {
            DataType::Dictionary(key_type, _) => key_type,
            other => other,
        };
        let width = fixed_width(moved_type).expect("only fixed-width columns go to a device");
        let part = |array: &ArrayRef| {
            let data = array.to_data();
            data.buffers()[0].slice_with_length(data.offset() * width.bytes(), data.len() * width.bytes())
        };
        let parts: Vec<_> = self.column(index).map(part).collect();
        let data = match &self.origin {
            Some((table, start)) => {
                let rows = *start..start + self.rows as u64;
                let rows = ColumnRows { table: table.clone(), column: index, rows };
                match device.cache() {
                    Some(cache) => cache.copy_in_column(&rows, &parts, stream)?,
                    None => device.copy_in(&parts, stream)?,
                }
            }
            None => device.copy_in(&parts, stream)?,
        };
        let validity = match self.has_nulls(index) {
            true => Some(device.copy_in_bits(&self.validity(index), stream)?),
            false => None,
        };
        Ok(Column { data, width, rows: self.rows, validity })
    }

    /// Copies a column of [values of variable length](are_bytes) to a device that works on them.
    ///
    /// # Errors
    /// The errors of the device.
    ///
    /// # Panics
    /// When the column has another type.
    pub fn copy_in_bytes(&self, index: usize, device: &dyn Device, stream: &Stream) -> Result<BytesColumn> {
        let offset_width = are_bytes(self.data_type(index)).expect("the column has values of variable length");
        let parts: Vec<BytesPart> = self.column(index).map(bytes_of).collect();
        let bytes = strings(device).copy_in_bytes(&parts, offset_width, stream)?;
        let validity = match self.has_nulls(index) {
            true => Some(device.copy_in_bits(&self.validity(index), stream)?),
            false => None,
        };
        Ok(BytesColumn { validity, ..bytes })
    }

    /// Bytes that a column of [variable length](are_bytes) takes on its way to a device: its
    /// values, and an offset for each.
    pub fn text_bytes(&self, index: usize) -> u64 {
        let offset_bytes = are_bytes(self.data_type(index)).map_or(0, Width::bytes);
        self.value_bytes([index]) + (self.rows * offset_bytes) as u64
    }

    /// Bytes of the values of columns of [variable length](are_bytes), including values under
    /// nulls.
    pub fn value_bytes(&self, columns: impl IntoIterator<Item = usize>) -> u64 {
        columns.into_iter().flat_map(|column| self.column(column)).map(value_bytes).sum()
    }

    /// Returns the validity of a column, batch by batch.
    pub fn validity(&self, index: usize) -> Vec<BitSlice> {
        let of_array = |array: &ArrayRef| match array.nulls() {
            Some(nulls) if nulls.null_count() > 0 => {
                BitSlice::Bits { buffer: nulls.buffer().clone(), offset: nulls.offset(), len: nulls.len() }
            }
            _ => BitSlice::Ones { len: array.len() },
        };
        self.column(index).map(of_array).collect()
    }
}

/// Consecutive rows of one batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BatchSlice {
    batch: usize,
    pub rows: Range<usize>,
}

/// Index that finds the batch of a row. A row's number, shifted, gives the first batch that may
/// hold it.
///
/// A binary search over the batches of a large table mispredicts at each step. Here only the
/// batches that share a bucket are searched, on average one. A table of one huge batch and
/// thousands of tiny ones has all tiny batches in a few buckets.
#[derive(Debug)]
pub(super) struct BatchIndex {
    /// First row of each batch, and the number of rows at the end.
    starts: Vec<usize>,
    /// Batch that holds the first row of each bucket of `1 << shift` rows. At the end, the last
    /// batch with rows.
    buckets: Vec<u32>,
    shift: u32,
}

impl BatchIndex {
    /// Builds the index for batches of the given lengths.
    pub(super) fn of(lengths: impl Iterator<Item = usize>) -> Self {
        let mut starts = vec![0];
        for length in lengths {
            starts.push(starts[starts.len() - 1] + length);
        }
        let (batches, rows) = (starts.len() - 1, starts[starts.len() - 1]);
        // Makes one or two buckets per batch.
        let shift = (rows / batches.max(1)).max(1).ilog2();
        let mut batch = 0;
        let first_batch = |bucket: usize| {
            while starts[batch + 1] <= bucket << shift {
                batch += 1;
            }
            batch as u32
        };
        let mut buckets: Vec<u32> = (0..rows.div_ceil(1 << shift)).map(first_batch).collect();
        buckets.extend(rows.checked_sub(1).map(|last| starts.partition_point(|&start| start <= last) as u32 - 1));
        Self { starts, buckets, shift }
    }

    /// Number of rows.
    pub(super) fn rows(&self) -> usize {
        self.starts[self.starts.len() - 1]
    }

    /// Returns the batch of a row, and the row's place in it.
    ///
    /// # Panics
    /// When `row` does not exist.
    #[inline]
    pub(super) fn find(&self, row: usize) -> (usize, usize) {
        if self.starts.len() == 2 {
            return (0, row);
        }
        let batch = self.search(row, |start| start <= row);
        (batch, row - self.starts[batch])
    }

    /// Number of rows of a batch.
    pub(super) fn len_of(&self, batch: usize) -> usize {
        self.starts[batch + 1] - self.starts[batch]
    }

    /// Returns the last batch whose first row satisfies `is_at_or_before`. It searches the batches
    /// that may hold `row`: from the first batch of the row's bucket to the first batch of the next
    /// bucket.
    #[inline]
    fn search(&self, row: usize, mut is_at_or_before: impl FnMut(usize) -> bool) -> usize {
        let bucket = row >> self.shift;
        let (first, last) = (self.buckets[bucket] as usize, self.buckets[bucket + 1] as usize);
        first + self.starts[first + 1..=last].partition_point(|&start| is_at_or_before(start))
    }
}

/// Form in which a device moves a column's values.
#[derive(Clone, Debug)]
pub struct Movable {
    /// Bytes per value, or per dictionary key.
    pub width: Width,
    /// The dictionary that the moved keys refer to, for dictionary columns.
    pub dictionary: Option<ArrayRef>,
}

/// Returns how a device can move a column of some batches. Fixed-width values move unchanged.
/// Dictionary columns move by their keys when all batches share one dictionary. `None` for other
/// columns. A device that works on columns [of variable length](are_bytes) gathers those, and the
/// host gathers the rest by row number.
pub fn movable(schema: &SchemaRef, batches: &[RecordBatch], index: usize) -> Option<Movable> {
    let data_type = schema.field(index).data_type();
    let DataType::Dictionary(key_type, value_type) = data_type else {
        return Some(Movable { width: fixed_width(data_type)?, dictionary: None });
    };
    let mut dictionaries = batches.iter().map(|batch| batch.column(index).as_any_dictionary().values());
    let dictionary = match dictionaries.next() {
        Some(first) => dictionaries
            .all(|other| Arc::ptr_eq(first, other) || first.to_data().ptr_eq(&other.to_data()))
            .then(|| first.clone())?,
        None => new_empty_array(value_type),
    };
    Some(Movable { width: fixed_width(key_type)?, dictionary: Some(dictionary) })
}

/// True if a slice of the rows is a part of the column's buffers. False for list views, unions and
/// run-end encoding: their rows are stored anywhere, so each of many slices would be as large as
/// the whole.
pub fn is_stored_by_row(data_type: &DataType) -> bool {
    use DataType as T;
    !any_part(data_type, &|part| {
        matches!(part, T::ListView(_) | T::LargeListView(_) | T::Union(..) | T::RunEndEncoded(..))
    })
}

/// Most rows that an array of the type can have. Run ends may have 16 bits only.
pub fn rows_max(data_type: &DataType) -> usize {
    match data_type {
        DataType::RunEndEncoded(ends, values) => {
            let ends_max = if *ends.data_type() == DataType::Int16 { i16::MAX as usize } else { usize::MAX };
            ends_max.min(rows_max(values.data_type()))
        }
        DataType::FixedSizeList(field, length) => rows_max(field.data_type()) / (*length).max(1) as usize,
        DataType::Struct(fields) => fields.iter().map(|field| rows_max(field.data_type())).min().unwrap_or(usize::MAX),
        DataType::Union(fields, _) => {
            fields.iter().map(|(_, field)| rows_max(field.data_type())).min().unwrap_or(usize::MAX)
        }
        _ => usize::MAX,
    }
}

/// Returns the width of the offsets of a type whose values have variable length and are contiguous.
/// A device can read such values. `None` for other types.
pub fn are_bytes(data_type: &DataType) -> Option<Width> {
    match data_type {
        DataType::Utf8 | DataType::Binary => Some(Width::W4),
        DataType::LargeUtf8 | DataType::LargeBinary => Some(Width::W8),
        _ => None,
    }
}

/// Bytes of the values of an array of [variable length](are_bytes).
pub fn value_bytes(array: &ArrayRef) -> u64 {
    fn between<O: OffsetSizeTrait>(offsets: &OffsetBuffer<O>) -> u64 {
        (offsets[offsets.len() - 1].as_usize() - offsets[0].as_usize()) as u64
    }
    match array.data_type() {
        DataType::Utf8 => between(array.as_string::<i32>().offsets()),
        DataType::LargeUtf8 => between(array.as_string::<i64>().offsets()),
        DataType::Binary => between(array.as_binary::<i32>().offsets()),
        DataType::LargeBinary => between(array.as_binary::<i64>().offsets()),
        other => unreachable!("values of {other} are not of variable length"),
    }
}

fn bytes_of(array: &ArrayRef) -> BytesPart {
    fn part<O: OffsetSizeTrait>(offsets: &OffsetBuffer<O>, data: &Buffer) -> BytesPart {
        BytesPart { offsets: offsets.inner().inner().clone(), data: data.clone() }
    }
    match array.data_type() {
        DataType::Utf8 => part(array.as_string::<i32>().offsets(), array.as_string::<i32>().values()),
        DataType::LargeUtf8 => part(array.as_string::<i64>().offsets(), array.as_string::<i64>().values()),
        DataType::Binary => part(array.as_binary::<i32>().offsets(), array.as_binary::<i32>().values()),
        DataType::LargeBinary => part(array.as_binary::<i64>().offsets(), array.as_binary::<i64>().values()),
        other => unreachable!("values of {other} are not of variable length"),
    }
}

/// Returns the width of a type's values if it is fixed and a whole number of bytes that a device
/// can move. `None` for other types.
pub fn fixed_width(data_type: &DataType) -> Option<Width> {
    match data_type {
        DataType::FixedSizeBinary(bytes) => Width::from_bytes(usize::try_from(*bytes).ok()?),
        DataType::Boolean => None,
        other => other.primitive_width().and_then(Width::from_bytes),
    }
}

#[cfg(test)]
mod tests {
    use arrow::array::{DictionaryArray, Int32Array, StringArray};
    use arrow::datatypes::{Field, Int8Type, Int32Type, Schema};

    use super::*;

    fn batches(lengths: &[i32]) -> Vec<RecordBatch> {
        let schema = Arc::new(Schema::new(vec![Field::new("v", DataType::Int32, true)]));
        let mut next = 0;
        let batch = |&length: &i32| {
            let values: Int32Array = (next..next + length).collect();
            next += length;
            RecordBatch::try_new(schema.clone(), vec![Arc::new(values)]).unwrap()
        };
        lengths.iter().map(batch).collect()
    }

    #[test]
    fn any_range_of_rows_is_found_across_batches() {
        let batches = batches(&[3, 0, 4, 1]);
        for start in 0..=8u64 {
            for end in start..=8 {
                let rows = Rows::of(&batches[0].schema(), &batches, start..end);
                let values: Vec<i32> = rows
                    .column(0)
                    .flat_map(|array| array.as_any().downcast_ref::<Int32Array>().unwrap().values().to_vec())
                    .collect();
                assert_eq!(values, (start as i32..end as i32).collect::<Vec<_>>());
                assert_eq!(rows.len() as u64, end - start);
                // Any range of those rows, without a copy.
                for part in (0..=rows.len()).flat_map(|from| (from..=rows.len()).map(move |to| from..to)) {
                    let slices = rows.slices(part.clone());
                    assert!(slices.iter().all(|slice| !slice.rows.is_empty()));
                    let stored: Vec<i32> = slices
                        .iter()
                        .flat_map(|slice| rows.stored(0, slice).as_primitive::<Int32Type>().values().to_vec())
                        .collect();
                    assert_eq!(stored, values[part]);
                }
            }
        }
    }

    #[test]
    fn every_row_is_found_in_its_batch() {
        for lengths in [vec![5], vec![0, 0, 1, 0], vec![1000, 1, 1, 1, 0, 1, 30], vec![1, 1, 1, 500], vec![64; 9]] {
            let index = BatchIndex::of(lengths.iter().copied());
            let expected =
                lengths.iter().enumerate().flat_map(|(batch, &length)| (0..length).map(move |at| (batch, at)));
            let found = (0..index.rows()).map(|row| index.find(row));
            assert!(found.eq(expected), "{lengths:?}");
        }
        assert_eq!(BatchIndex::of(std::iter::empty()).rows(), 0);
        assert_eq!(BatchIndex::of([0, 0].into_iter()).rows(), 0);
    }

    #[test]
    fn one_huge_batch_does_not_make_tiny_batches_slow_to_find() {
        // All tiny batches fall into one bucket.
        let (tiny, huge) = (4000, 10_000_000);
        for lengths in [vec![vec![1; tiny], vec![huge]], vec![vec![huge], vec![1; tiny]]] {
            let lengths = lengths.concat();
            let index = BatchIndex::of(lengths.iter().copied());
            let mut start = 0;
            for (batch, &length) in lengths.iter().enumerate() {
                for row in [start, start + length - 1] {
                    let mut steps = 0;
                    let found = index.search(row, |start| {
                        steps += 1;
                        start <= row
                    });
                    assert_eq!(found, batch, "row {row}");
                    assert!(steps <= 1 + tiny.ilog2(), "{steps} steps to row {row} in batch {batch}");
                }
                start += length;
            }
        }
    }

    #[test]
    fn only_whole_byte_types_of_device_widths_are_fixed() {
        assert_eq!(fixed_width(&DataType::Int16), Some(Width::W2));
        assert_eq!(fixed_width(&DataType::Decimal256(40, 2)), Some(Width::W32));
        assert_eq!(fixed_width(&DataType::FixedSizeBinary(16)), Some(Width::W16));
        assert_eq!(fixed_width(&DataType::FixedSizeBinary(5)), None);
        assert_eq!(fixed_width(&DataType::Boolean), None);
        assert_eq!(fixed_width(&DataType::Utf8), None);
    }

    #[test]
    fn types_with_list_views_are_not_stored_by_row() {
        let field = |data_type| Arc::new(Field::new("item", data_type, true));
        let view = DataType::ListView(field(DataType::Int64));
        for data_type in [view.clone(), DataType::Struct(vec![field(view.clone())].into()), DataType::List(field(view))]
        {
            assert!(!is_stored_by_row(&data_type), "{data_type}");
        }
        for data_type in [DataType::Utf8View, DataType::Boolean, DataType::List(field(DataType::Utf8))] {
            assert!(is_stored_by_row(&data_type), "{data_type}");
        }
    }

    #[test]
    fn run_ends_of_16_bits_bound_the_rows_of_an_array() {
        let field = |name: &str, data_type| Arc::new(Field::new(name, data_type, name != "run_ends"));
        let runs = |ends| DataType::RunEndEncoded(field("run_ends", ends), field("values", DataType::Utf8));
        assert_eq!(rows_max(&runs(DataType::Int16)), 32_767);
        assert_eq!(rows_max(&DataType::Struct(vec![field("r", runs(DataType::Int16))].into())), 32_767);
        assert_eq!(rows_max(&DataType::FixedSizeList(field("item", runs(DataType::Int16)), 3)), 10_922);
        assert_eq!(rows_max(&runs(DataType::Int32)), usize::MAX);
        assert_eq!(rows_max(&DataType::List(field("item", DataType::Utf8))), usize::MAX);
    }

    #[test]
    fn dictionary_columns_move_as_keys_if_all_batches_share_the_dictionary() {
        let values = Arc::new(StringArray::from(vec!["a", "b"]));
        let shared = |keys: Vec<i8>, values: &Arc<StringArray>| {
            let array = DictionaryArray::<Int8Type>::try_new(keys.into(), values.clone()).unwrap();
            RecordBatch::try_from_iter([("d", Arc::new(array) as ArrayRef)]).unwrap()
        };
        let mut batches = vec![shared(vec![0, 1], &values), shared(vec![1], &values)];
        let schema = batches[0].schema();
        let movable_now = movable(&schema, &batches, 0).unwrap();
        assert_eq!((movable_now.width, movable_now.dictionary.unwrap().len()), (Width::W1, 2));
        batches.push(shared(vec![0], &Arc::new(StringArray::from(vec!["b"]))));
        assert!(movable(&schema, &batches, 0).is_none());
        assert!(movable(&schema, &[], 0).is_some());
    }
}
