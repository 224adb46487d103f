//! Slices without the values that their rows do not refer to.
//!
//! A slice of most arrays can be sent as it is. Some types refer to their values by place (views,
//! list views, dense unions), and Arrow's writer sends all these values with every slice. A batch
//! sent in a hundred messages would carry its values a hundred times. For a sparse union inside a
//! list, Arrow's writer (59.3) sends the children from their first row on, whatever the slice.
//! Receivers would then see the values of other rows. Here each slice gets children of its own.
//!
//! A value to which two rows refer is not copied twice, so no slice gets larger. All slices of a
//! batch share its dictionaries, so that each dictionary is sent once.

use std::sync::Arc;

use arrow::array::{
    Array, ArrayDataBuilder, ArrayRef, AsArray, FixedSizeListArray, GenericListArray, GenericListViewArray, MapArray,
    MutableArrayData, OffsetSizeTrait, PrimitiveArray, RecordBatch, RecordBatchOptions, RunArray, StructArray,
    UnionArray, make_array,
};
use arrow::buffer::{OffsetBuffer, ScalarBuffer};
use arrow::datatypes::{
    ArrowNativeType, BinaryViewType, ByteViewType, DataType, Int16Type, Int32Type, Int64Type, RunEndIndexType,
    StringViewType,
};

use crate::columns::{any_part, is_stored_by_row, list_array, list_view_array};
use crate::human::type_name;
use crate::{Error, Result};

/// Returns the batch with the values that its rows refer to, and few others. The values of
/// dictionaries stay as they are: they are sent once, however many slices there are.
///
/// # Errors
/// Arrow's, which would be a defect here.
pub(crate) fn compact(batch: &RecordBatch) -> Result<RecordBatch> {
    if !batch.columns().iter().any(|column| refers_by_place(column.data_type())) {
        return Ok(batch.clone());
    }
    let options = RecordBatchOptions::new().with_row_count(Some(batch.num_rows()));
    let columns = batch.columns().iter().map(compact_array).collect::<Result<_>>()?;
    Ok(RecordBatch::try_new_with_options(batch.schema(), columns, &options)?)
}

/// True if slices of the type hold values of other rows.
fn refers_by_place(data_type: &DataType) -> bool {
    any_part(data_type, &is_by_place)
}

/// True if slices of the type hold values of other rows, whatever the types inside of it.
pub(super) fn is_by_place(data_type: &DataType) -> bool {
    use DataType as T;
    match data_type {
        T::Utf8View | T::BinaryView | T::ListView(_) | T::LargeListView(_) | T::Union(..) => true,
        // Arrow's writer sends an empty slice of some runs as one run that ends at 0, which is
        // invalid.
        T::RunEndEncoded(..) => true,
        _ => false,
    }
}

fn compact_array(array: &ArrayRef) -> Result<ArrayRef> {
    use DataType as T;
    if !refers_by_place(array.data_type()) {
        return Ok(array.clone());
    }
    Ok(match array.data_type() {
        T::Utf8View => compact_views::<StringViewType>(array),
        T::BinaryView => compact_views::<BinaryViewType>(array),
        T::ListView(_) => Arc::new(compact_list_view(array.as_list_view::<i32>())?),
        T::LargeListView(_) => Arc::new(compact_list_view(array.as_list_view::<i64>())?),
        T::Union(..) => Arc::new(compact_union(array.as_union())?),
        T::List(_) => Arc::new(compact_list(array.as_list::<i32>())?),
        T::LargeList(_) => Arc::new(compact_list(array.as_list::<i64>())?),
        T::Map(field, ordered) => {
            let map = array.as_map();
            let (offsets, first, len) = own_offsets(map.offsets());
            let entries: ArrayRef = Arc::new(map.entries().slice(first, len));
            let entries = compact_array(&entries)?.as_struct().clone();
            Arc::new(MapArray::try_new(field.clone(), offsets, entries, map.nulls().cloned(), *ordered)?)
        }
        // Lists of size 0 have no values to drop, and their length cannot be derived from values.
        T::FixedSizeList(_, 0) => array.clone(),
        T::FixedSizeList(field, size) => {
            let values = compact_array(array.as_fixed_size_list().values())?;
            Arc::new(FixedSizeListArray::try_new(field.clone(), *size, values, array.nulls().cloned())?)
        }
        T::Struct(fields) => {
            let columns = array.as_struct().columns().iter().map(compact_array).collect::<Result<_>>()?;
            Arc::new(StructArray::try_new(fields.clone(), columns, array.nulls().cloned())?)
        }
        T::RunEndEncoded(ends, _) => match ends.data_type() {
            T::Int16 => compact_runs(array.as_run::<Int16Type>())?,
            T::Int32 => compact_runs(array.as_run::<Int32Type>())?,
            _ => compact_runs(array.as_run::<Int64Type>())?,
        },
        _ => array.clone(),
    })
}

/// Drops unused bytes of views. The copy has each value once per view that refers to it. If the
/// copy would not be smaller, the buffers stay as they are.
fn compact_views<T: ByteViewType>(array: &ArrayRef) -> ArrayRef {
    let views = array.as_byte_view::<T>();
    let held: usize = views.data_buffers().iter().map(|buffer| buffer.len()).sum();
    if views.total_buffer_bytes_used() < held { Arc::new(views.gc()) } else { array.clone() }
}

fn compact_list<O: OffsetSizeTrait>(list: &GenericListArray<O>) -> Result<GenericListArray<O>> {
    let (DataType::List(field) | DataType::LargeList(field)) = list.data_type() else {
        return Err(Error::Internal(format!("{} is not a list", type_name(list.data_type()))));
    };
    let (offsets, first, len) = own_offsets(list.offsets());
    let values = compact_array(&list.values().slice(first, len))?;
    Ok(list_array(field, offsets, values, list.nulls().cloned())?)
}

/// Returns the offsets minus the first offset, the first offset itself, and the number of values
/// that the offsets span.
fn own_offsets<O: OffsetSizeTrait>(offsets: &OffsetBuffer<O>) -> (OffsetBuffer<O>, usize, usize) {
    let (first, last) = (offsets[0], offsets[offsets.len() - 1]);
    let own: ScalarBuffer<O> = offsets.iter().map(|&offset| offset - first).collect();
    (OffsetBuffer::new(own), first.as_usize(), (last - first).as_usize())
}

fn compact_list_view<O: OffsetSizeTrait>(list: &GenericListViewArray<O>) -> Result<GenericListViewArray<O>> {
    let (DataType::ListView(field) | DataType::LargeListView(field)) = list.data_type() else {
        return Err(Error::Internal(format!("{} is not a list view", type_name(list.data_type()))));
    };
    // A null row may refer to any place, and needs no values.
    let places = list.offsets().iter().zip(list.sizes()).enumerate();
    let places: Vec<(usize, usize)> = places
        .map(|(row, (offset, size))| if list.is_null(row) { (0, 0) } else { (offset.as_usize(), size.as_usize()) })
        .collect();
    let used = Used::of(places.iter().copied(), list.values());
    let offsets = places.iter().map(|&(start, len)| if len == 0 { O::zero() } else { O::usize_as(used.place(start)) });
    let sizes = places.iter().map(|&(_, len)| O::usize_as(len));
    let values = compact_array(&used.values(list.values())?)?;
    let nulls = list.nulls().cloned();
    Ok(list_view_array(field, offsets.collect(), sizes.collect(), values, nulls)?)
}

fn compact_union(union: &UnionArray) -> Result<UnionArray> {
    let DataType::Union(fields, _) = union.data_type() else {
        return Err(Error::Internal(format!("{} is not a union", type_name(union.data_type()))));
    };
    let type_ids = union.type_ids();
    let Some(offsets) = union.offsets() else {
        let children = fields.iter().map(|(id, _)| compact_array(union.child(id))).collect::<Result<_>>()?;
        return Ok(UnionArray::try_new(fields.clone(), type_ids.clone(), None, children)?);
    };
    let mut placed = vec![0; offsets.len()];
    let mut children = Vec::with_capacity(fields.len());
    for (id, _) in fields.iter() {
        let child = union.child(id);
        let rows = || (0..offsets.len()).filter(|&row| type_ids[row] == id);
        let used = Used::of(rows().map(|row| (offsets[row] as usize, 1)), child);
        // The new place fits an `i32`, because it is not greater than the old offset.
        rows().for_each(|row| placed[row] = used.place(offsets[row] as usize) as i32);
        children.push(compact_array(&used.values(child)?)?);
    }
    Ok(UnionArray::try_new(fields.clone(), type_ids.clone(), Some(placed.into()), children)?)
}

/// Keeps the values of the runs that the slice touches.
fn compact_runs<R: RunEndIndexType>(runs: &RunArray<R>) -> Result<ArrayRef> {
    let data = runs.to_data();
    if runs.is_empty() {
        // The values' dictionaries stay: other slices of the batch refer to them.
        let (ends, values) = (PrimitiveArray::<R>::from_iter_values([]), compact_array(&runs.values().slice(0, 0))?);
        let builder = ArrayDataBuilder::new(data.data_type().clone()).len(0);
        return Ok(make_array(builder.child_data(vec![ends.to_data(), values.to_data()]).build()?));
    }
    let (first, last) = (runs.get_start_physical_index(), runs.get_end_physical_index());
    let (offset, len) = (runs.offset(), runs.len());
    let ends = runs.run_ends().values()[first..=last].iter();
    let ends = ends.map(|end| R::Native::usize_as((end.as_usize() - offset).min(len)));
    let ends = PrimitiveArray::<R>::from_iter_values(ends);
    let values = compact_array(&runs.values().slice(first, last + 1 - first))?;
    let builder = ArrayDataBuilder::new(data.data_type().clone()).len(len);
    Ok(make_array(builder.child_data(vec![ends.to_data(), values.to_data()]).build()?))
}

/// Ranges of an array's values that are referred to.
struct Used {
    /// Old start, old end, and new start of each range, in order and disjoint. The new start
    /// applies once the other values are dropped.
    ranges: Vec<(usize, usize, usize)>,
    keeps_gaps: bool,
}

impl Used {
    /// Collects the ranges of the given places (start, length).
    fn of(places: impl Iterator<Item = (usize, usize)>, values: &ArrayRef) -> Self {
        let mut places: Vec<(usize, usize)> = places.filter(|&(_, len)| len > 0).collect();
        places.sort_unstable();
        let mut ranges: Vec<(usize, usize, usize)> = Vec::new();
        for (start, len) in places {
            match ranges.last_mut() {
                Some((_, end, _)) if start <= *end => *end = (start + len).max(*end),
                Some(&mut (before, end, place)) => ranges.push((start, start + len, place + end - before)),
                None => ranges.push((start, start + len, 0)),
            }
        }
        // For the types that keep gaps, copying ranges would duplicate a value that several rows
        // share.
        let keeps_gaps = !is_stored_by_row(values.data_type());
        if let (true, [(start, ..), .., (_, end, _)]) = (keeps_gaps, &ranges[..]) {
            ranges = vec![(*start, *end, 0)];
        }
        Self { ranges, keeps_gaps }
    }

    /// Returns the new place of the value at `place`, which is in one of the ranges.
    fn place(&self, place: usize) -> usize {
        let range = self.ranges.partition_point(|&(start, ..)| start <= place) - 1;
        let (start, _, moved) = self.ranges[range];
        moved + place - start
    }

    /// Returns the values of the ranges.
    fn values(&self, values: &ArrayRef) -> Result<ArrayRef> {
        Ok(match self.ranges[..] {
            [] => values.slice(0, 0),
            [(start, end, _)] => values.slice(start, end - start),
            _ => {
                debug_assert!(!self.keeps_gaps, "such values have one range");
                let data = values.to_data();
                let len = self.ranges.iter().map(|(start, end, _)| end - start).sum();
                let mut left = MutableArrayData::new(vec![&data], false, len);
                self.ranges.iter().try_for_each(|&(start, end, _)| left.try_extend(0, start, end))?;
                make_array(left.freeze())
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use arrow::array::{
        Int16Array, Int32Array, Int64Array, ListViewArray, MapBuilder, StringArray, StringBuilder, StringViewArray,
        StringViewBuilder, UInt32Array,
    };
    use arrow::compute::take;
    use arrow::datatypes::{Field, UnionFields};

    use super::*;

    fn field(array: &ArrayRef) -> Arc<Field> {
        Arc::new(Field::new("item", array.data_type().clone(), true))
    }

    fn text(rows: usize) -> ArrayRef {
        Arc::new(StringViewArray::from_iter_values((0..rows).map(|row| format!("a value of some length, {row:08}"))))
    }

    /// Returns the bytes of a message of these rows.
    fn sent_bytes(array: &ArrayRef) -> usize {
        let batch = RecordBatch::try_from_iter_with_nullable([("c", array.clone(), true)]).unwrap();
        let (mut encoder, _) = crate::service::encode::Encoder::new(batch.schema()).unwrap();
        encoder.begin(batch);
        encoder.next_message().unwrap().expect("a batch gives a message").body_bytes()
    }

    /// Checks that every slice keeps its rows, and that small slices take few bytes.
    fn check(array: &ArrayRef, slice_bytes_max: usize) {
        let rows = array.len();
        for (start, len) in [(0, rows), (0, 0), (rows, 0), (3, 5), (rows / 2, 7), (rows - 4, 4)] {
            let slice = array.slice(start, len);
            let compacted = compact_array(&slice).unwrap();
            assert_eq!(&compacted, &slice, "rows {start}..{}", start + len);
            compacted.to_data().validate_full().unwrap();
            if (1..10).contains(&len) {
                let bytes = sent_bytes(&slice);
                assert!(bytes <= slice_bytes_max, "{} takes {bytes} bytes for {len} rows", array.data_type());
            }
        }
    }

    #[test]
    fn slices_of_views_at_any_depth_are_compacted_to_their_own_rows() {
        let views = text(3000);
        check(&views, 1000);
        let structs: ArrayRef = Arc::new(StructArray::from(vec![(field(&views), views.clone())]));
        check(&structs, 1000);
        let offsets = OffsetBuffer::from_lengths(std::iter::repeat_n(3, 1000));
        let nulls = (0..1000).map(|row| row % 4 != 0).collect::<Vec<_>>().into();
        let lists: ArrayRef =
            Arc::new(GenericListArray::<i32>::new(field(&structs), offsets, structs.clone(), Some(nulls)));
        check(&lists, 3000);
        let fixed: ArrayRef = Arc::new(FixedSizeListArray::new(field(&lists), 2, lists, None));
        check(&fixed, 6000);
    }

    #[test]
    fn maps_and_runs_of_views_are_compacted() {
        let mut maps = MapBuilder::new(None, StringBuilder::new(), StringViewBuilder::new());
        for row in 0..1000 {
            maps.keys().append_value(format!("key {row}"));
            maps.values().append_value(format!("a value of some length, {row:08}"));
            maps.append(true).unwrap();
        }
        check(&(Arc::new(maps.finish()) as ArrayRef), 1500);
        let ends = Int32Array::from_iter_values((1..=1000).map(|run| run * 3));
        check(&(Arc::new(RunArray::<Int32Type>::try_new(&ends, &text(1000)).unwrap()) as ArrayRef), 1000);
    }

    #[test]
    fn an_empty_slice_of_runs_has_no_runs() {
        let values: ArrayRef = Arc::new(Int32Array::from(vec![1, 2, 3]));
        let ends = Int32Array::from(vec![2, 4, 6]);
        let runs: ArrayRef = Arc::new(RunArray::<Int32Type>::try_new(&ends, &values).unwrap());
        let lists = GenericListArray::<i32>::new(field(&runs), OffsetBuffer::from_lengths([3, 0, 3]), runs, None);
        let none = compact_array(&(Arc::new(lists) as ArrayRef).slice(1, 1)).unwrap();
        assert!(none.as_list::<i32>().values().as_run::<Int32Type>().run_ends().values().is_empty());
    }

    #[test]
    fn a_value_shared_by_many_views_is_not_duplicated() {
        let value = StringViewArray::from_iter_values(["y".repeat(1 << 20)]);
        let shared = take(&value, &UInt32Array::from(vec![0; 100_000]), None).unwrap();
        let compacted = compact_array(&shared).unwrap();
        assert!(compacted.as_string_view().data_buffers().iter().map(|buffer| buffer.len()).sum::<usize>() < 4 << 20);
    }

    #[test]
    fn compacted_dense_unions_leave_out_the_values_of_other_rows() {
        let (numbers, texts): (ArrayRef, ArrayRef) =
            (Arc::new(Int64Array::from_iter_values(0..2000)), Arc::new(text(2000)));
        let fields = UnionFields::try_new(
            [5, 9],
            [Field::new("n", DataType::Int64, true), Field::new("t", DataType::Utf8View, true)],
        )
        .unwrap();
        let type_ids: ScalarBuffer<i8> = (0..4000).map(|row| if row % 2 == 0 { 5 } else { 9 }).collect();
        // The second half refers to the values of the first half again, from the last to the first.
        let offsets = (0..4000).map(|row| if row < 2000 { row / 2 } else { (3999 - row) / 2 });
        let union = UnionArray::try_new(fields, type_ids, Some(offsets.collect()), vec![numbers, texts]).unwrap();
        check(&(Arc::new(union) as ArrayRef), 1000);
    }

    #[test]
    fn compacted_list_views_leave_out_the_values_of_other_rows() {
        // Places are out of order and overlap, and null rows refer to all values.
        let offsets = (0..1000).map(|row: i32| if row % 7 == 0 { 0 } else { (997 * row) % 2900 });
        let sizes = (0..1000).map(|row: i32| if row % 7 == 0 { 3000 } else { row % 5 });
        let nulls: Vec<bool> = (0..1000).map(|row| row % 7 != 0).collect();
        for values in [text(3000), Arc::new(StringArray::from_iter_values((0..3000).map(|row| row.to_string()))) as _] {
            let lists = ListViewArray::new(
                field(&values),
                offsets.clone().collect(),
                sizes.clone().collect(),
                values,
                Some(nulls.clone().into()),
            );
            check(&(Arc::new(lists) as ArrayRef), 2500);
        }
        let inner = Int16Array::from_iter_values(0..3000);
        let inner: ArrayRef = Arc::new(inner);
        let one =
            ListViewArray::new(field(&inner), (0..3000).collect(), std::iter::repeat_n(1, 3000).collect(), inner, None);
        let one: ArrayRef = Arc::new(one);
        // Adjacent rows refer to adjacent values.
        let outer =
            ListViewArray::new(field(&one), (0..2000).collect(), (0..2000).map(|row| row % 3).collect(), one, None);
        check(&(Arc::new(outer) as ArrayRef), 1000);
    }
}
