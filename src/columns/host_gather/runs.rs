//! Columns of any type, gathered by runs of rows into the arena.
//!
//! ```text
//!   runs of rows ── list ──► offsets, and runs of the lists' values ──► their child, likewise
//!                ── struct ► the same runs for each child
//!                ── union ─► type ids, and for each child the runs of its rows
//!                ── runs ──► their ends, and runs of their values
//!                ── values ► bytes, bits, views: one copy each, from the source to the result
//! ```
//!
//! A run is any number of consecutive rows of one array. Most runs of a result have one row. The
//! values of a list are one run, so one copy and one run in memory are enough. Arrow gathers types
//! without values (lists of no values, structs of no columns).

use std::collections::HashMap;
use std::sync::Arc;

use arrow::array::{
    Array, ArrayData, ArrayRef, AsArray, BooleanArray, ByteView, FixedSizeListArray, GenericByteArray,
    GenericByteViewArray, GenericListArray, GenericListViewArray, MapArray, OffsetSizeTrait, PrimitiveArray, RunArray,
    StructArray, UnionArray, make_array, new_empty_array, new_null_array,
};
use arrow::buffer::{BooleanBuffer, NullBuffer, OffsetBuffer, ScalarBuffer};
use arrow::compute::interleave;
use arrow::datatypes::{
    ArrowNativeType, BinaryViewType, ByteArrayType, ByteViewType, DataType, FieldRef, Fields, GenericBinaryType,
    GenericStringType, Int16Type, Int32Type, Int64Type, RunEndIndexType, StringViewType, UnionFields, UnionMode,
};
use arrow::error::ArrowError;

use super::super::dictionary::{Seeded, is_same, with_keys};
use super::super::lists::{list_array, list_view_array};
use super::{anywhere, gather_bytes, gather_values_once};
use crate::human::type_name;
use crate::memory::Arena;
use crate::{Error, Result};

/// Consecutive rows of one array, or missing rows, which become nulls.
#[derive(Clone, Copy, Debug)]
pub(super) struct Run {
    array: u32,
    start: usize,
    len: usize,
}

/// Array number of a missing row.
const MISSING: u32 = u32::MAX;

/// Longest value in bytes that a view stores itself.
const INLINE_BYTES: usize = 12;

impl Run {
    /// Creates a run of the row at a place (array, index), or of one missing row.
    pub(super) fn of_row(place: Option<(usize, usize)>) -> Self {
        match place {
            Some((array, start)) => Self { array: array as u32, start, len: 1 },
            None => Self { array: MISSING, start: 0, len: 1 },
        }
    }

    /// Returns the array's number and the rows in the array. `None` for missing rows.
    fn rows(self) -> Option<(usize, std::ops::Range<usize>)> {
        (self.array != MISSING).then_some((self.array as usize, self.start..self.start + self.len))
    }
}

/// Gathers the rows of all runs, in order.
///
/// # Errors
/// [`Error::Exhausted`] when the arena refuses. [`Error::TooLong`] when the values together exceed
/// the range of the type's offsets.
pub(super) fn gather_runs(arrays: &[&ArrayRef], data_type: &DataType, runs: &[Run], arena: &Arena) -> Result<ArrayRef> {
    use DataType as T;
    let rows = runs.iter().map(|run| run.len).sum();
    if rows == 0 {
        return Ok(new_empty_array(data_type));
    }
    let job = Job { arrays, data_type, runs, rows, arena };
    match data_type {
        T::Null => Ok(new_null_array(data_type, rows)),
        T::Boolean => job.booleans(),
        T::Utf8 => job.bytes::<GenericStringType<i32>>(),
        T::LargeUtf8 => job.bytes::<GenericStringType<i64>>(),
        T::Binary => job.bytes::<GenericBinaryType<i32>>(),
        T::LargeBinary => job.bytes::<GenericBinaryType<i64>>(),
        T::Utf8View => job.views::<StringViewType>(),
        T::BinaryView => job.views::<BinaryViewType>(),
        T::List(field) => job.lists::<i32>(field),
        T::LargeList(field) => job.lists::<i64>(field),
        T::ListView(field) => job.list_views::<i32>(field),
        T::LargeListView(field) => job.list_views::<i64>(field),
        T::Map(field, is_sorted) => job.maps(field, *is_sorted),
        T::FixedSizeList(field, length) if *length > 0 => job.fixed_size_lists(field, *length),
        T::Struct(fields) if !fields.is_empty() => job.structs(fields),
        T::Union(fields, mode) if !fields.is_empty() => job.unions(fields, *mode),
        T::RunEndEncoded(ends, values) => match ends.data_type() {
            T::Int16 => job.run_ends::<Int16Type>(values),
            T::Int32 => job.run_ends::<Int32Type>(values),
            _ => job.run_ends::<Int64Type>(values),
        },
        T::Dictionary(key_type, _) if job.have_one_dictionary() => {
            job.values_of(key_type.primitive_width().expect("dictionary keys are integers"))
        }
        T::FixedSizeBinary(width) => job.values_of(*width as usize),
        T::Dictionary(_, value_type) => job.dictionaries(value_type),
        T::FixedSizeList(..) | T::Struct(_) => job.by_arrow(),
        other => match other.primitive_width() {
            Some(width) => job.values_of(width),
            None => job.by_arrow(),
        },
    }
}

/// One gathering: its source arrays, rows and target.
struct Job<'a> {
    arrays: &'a [&'a ArrayRef],
    data_type: &'a DataType,
    runs: &'a [Run],
    rows: usize,
    arena: &'a Arena,
}

impl Job<'_> {
    /// Returns the validity of the rows. `None` when all rows have a value.
    fn validity(&self) -> Result<Option<NullBuffer>> {
        let nulls: Vec<Option<&NullBuffer>> =
            self.arrays.iter().map(|array| array.nulls().filter(|nulls| nulls.null_count() > 0)).collect();
        let may_be_null = |run: &Run| run.rows().is_none_or(|(array, _)| nulls[array].is_some());
        if !self.runs.iter().any(may_be_null) {
            return Ok(None);
        }
        let is_valid = |array: usize, row| nulls[array].is_none_or(|nulls| nulls.is_valid(row));
        let nulls = NullBuffer::new(self.bits("the validity of a result", is_valid)?);
        Ok((nulls.null_count() > 0).then_some(nulls))
    }

    /// Builds a bit for each row: the answer of `is_set` for its array and row, and 0 for a missing
    /// row.
    fn bits(&self, purpose: &str, is_set: impl Fn(usize, usize) -> bool) -> Result<BooleanBuffer> {
        let mut bits = self.arena.allocate(self.rows.div_ceil(8), purpose)?;
        bits.fill(0);
        let mut at = 0;
        for run in self.runs {
            if let Some((array, rows)) = run.rows() {
                for (at, row) in (at..).zip(rows) {
                    bits[at / 8] |= u8::from(is_set(array, row)) << (at % 8);
                }
            }
            at += run.len;
        }
        Ok(BooleanBuffer::new(bits.freeze(), 0, self.rows))
    }

    /// Gathers values of `width` bytes each, or keys of a dictionary that all arrays share.
    fn values_of(&self, width: usize) -> Result<ArrayRef> {
        let sources: Vec<ArrayData> = self.arrays.iter().map(|array| array.to_data()).collect();
        let bytes_of = |data: &ArrayData| data.buffers()[0].slice(data.offset() * width);
        let buffers: Vec<_> = sources.iter().map(bytes_of).collect();
        let mut values = self.arena.allocate(self.rows * width, "values of a result")?;
        let mut at = 0;
        for run in self.runs {
            let target = &mut values[at * width..(at + run.len) * width];
            match run.rows() {
                Some((array, rows)) => target.copy_from_slice(&buffers[array][rows.start * width..rows.end * width]),
                None => target.fill(0),
            }
            at += run.len;
        }
        let mut data = ArrayData::builder(self.data_type.clone()).len(self.rows).add_buffer(values.freeze());
        if let (DataType::Dictionary(..), Some(source)) = (self.data_type, sources.first()) {
            data = data.add_child_data(source.child_data()[0].clone());
        }
        self.assembled(data.nulls(self.validity()?).build()).map(make_array)
    }

    fn have_one_dictionary(&self) -> bool {
        let mut dictionaries = self.arrays.iter().map(|array| array.as_any_dictionary().values());
        let Some(first) = dictionaries.next() else { return false };
        dictionaries.all(|other| is_same(first, other))
    }

    /// Gathers rows of several dictionaries, with one dictionary of their values. The result's keys
    /// have the column's key type.
    fn dictionaries(&self, value_type: &DataType) -> Result<ArrayRef> {
        let (keys, values) = gather_values_once(self.arrays, self.places(), value_type, self.arena)?;
        with_keys(&keys, &values, self.data_type).map_err(|error| {
            Error::TooLong(format!(
                "the batches of a column of type {} have separate dictionaries inside, with {} values together in one batch of \
                 the result, and its keys cannot number that many ({error}); upload it with wider dictionary keys, or ask for \
                 smaller batches with batch_rows",
                type_name(self.data_type),
                values.len(),
            ))
        })
    }

    fn booleans(&self) -> Result<ArrayRef> {
        let sources: Vec<&BooleanBuffer> = self.arrays.iter().map(|array| array.as_boolean().values()).collect();
        let values = self.bits("values of a result", |array, row| sources[array].value(row))?;
        Ok(Arc::new(BooleanArray::new(values, self.validity()?)))
    }

    fn bytes<T: ByteArrayType>(&self) -> Result<ArrayRef>
    where
        T::Offset: bytemuck::Pod,
    {
        if self.runs.len() == self.rows {
            // Single rows at any places gather like rows of a plain column.
            let place = |at: usize| self.runs[at].rows().map(|(array, rows)| (array, rows.start));
            return gather_bytes::<T>(self.arrays, self.rows, place, anywhere, self.arena);
        }
        let sources: Vec<&GenericByteArray<T>> = self.arrays.iter().map(|array| array.as_bytes::<T>()).collect();
        let offsets_of = |array: usize| sources[array].value_offsets();
        let (offsets, runs) = self.inner::<T::Offset>(offsets_of)?;
        let total = offsets.last().map_or(0, |end| end.as_usize());
        let mut bytes = self.arena.allocate(total, "strings of a result")?;
        let mut at = 0;
        for run in runs {
            let Some((array, rows)) = run.rows() else { continue };
            bytes[at..at + run.len].copy_from_slice(&sources[array].value_data()[rows]);
            at += run.len;
        }
        self.assembled(GenericByteArray::<T>::try_new(offsets, bytes.freeze(), self.validity()?)).map(array)
    }

    fn lists<O: OffsetSizeTrait + bytemuck::Pod>(&self, field: &FieldRef) -> Result<ArrayRef> {
        let sources: Vec<&GenericListArray<O>> = self.arrays.iter().map(|array| array.as_list::<O>()).collect();
        let (offsets, runs) = self.inner::<O>(|array| sources[array].value_offsets())?;
        let children: Vec<&ArrayRef> = sources.iter().map(|source| source.values()).collect();
        let values = gather_runs(&children, field.data_type(), &runs, self.arena)?;
        self.assembled(list_array(field, offsets, values, self.validity()?)).map(array)
    }

    fn maps(&self, field: &FieldRef, is_sorted: bool) -> Result<ArrayRef> {
        let sources: Vec<&MapArray> = self.arrays.iter().map(|array| array.as_map()).collect();
        let (offsets, runs) = self.inner::<i32>(|array| sources[array].value_offsets())?;
        let entries: Vec<ArrayRef> = sources.iter().map(|source| array(source.entries().clone())).collect();
        let entries =
            gather_runs(&entries.iter().collect::<Vec<_>>(), field.data_type(), &runs, self.arena)?.as_struct().clone();
        self.assembled(MapArray::try_new(field.clone(), offsets, entries, self.validity()?, is_sorted)).map(array)
    }

    fn fixed_size_lists(&self, field: &FieldRef, length: i32) -> Result<ArrayRef> {
        let times = length as usize;
        let children: Vec<&ArrayRef> = self.arrays.iter().map(|array| array.as_fixed_size_list().values()).collect();
        let inner = |run: &Run| Run { array: run.array, start: run.start * times, len: run.len * times };
        let runs: Vec<Run> = self.runs.iter().map(inner).collect();
        let values = gather_runs(&children, field.data_type(), &runs, self.arena)?;
        self.assembled(FixedSizeListArray::try_new(field.clone(), length, values, self.validity()?)).map(array)
    }

    fn structs(&self, fields: &Fields) -> Result<ArrayRef> {
        let column = |(index, field): (usize, &FieldRef)| {
            let children: Vec<&ArrayRef> = self.arrays.iter().map(|array| array.as_struct().column(index)).collect();
            gather_runs(&children, field.data_type(), self.runs, self.arena)
        };
        let columns = fields.iter().enumerate().map(column).collect::<Result<Vec<_>>>()?;
        self.assembled(StructArray::try_new(fields.clone(), columns, self.validity()?)).map(array)
    }

    /// Gathers list views. Several list views may share values. The result shares them, too, if all
    /// values of the arrays are fewer than one copy per row.
    fn list_views<O: OffsetSizeTrait + bytemuck::Pod>(&self, field: &FieldRef) -> Result<ArrayRef> {
        let sources: Vec<&GenericListViewArray<O>> =
            self.arrays.iter().map(|array| array.as_list_view::<O>()).collect();
        // Null rows have no values.
        let place = |array: usize, row: usize| {
            let source = sources[array];
            match source.is_valid(row) {
                true => (source.offsets()[row].as_usize(), source.sizes()[row].as_usize()),
                false => (0, 0),
            }
        };
        let held = |run: &Run| run.rows().map_or(0, |(array, rows)| rows.map(|row| place(array, row).1).sum());
        let there_are: usize = sources.iter().map(|source| source.values().len()).sum();
        let are_shared = self.runs.iter().map(held).sum::<usize>() > there_are;
        let mut runs: Vec<Run> = Vec::new();
        let mut total = 0;
        // Start of each array's values in the result, if all values are copied.
        let mut starts = Vec::with_capacity(sources.len());
        if are_shared {
            for (array, source) in sources.iter().enumerate() {
                let len = source.values().len();
                starts.push(total);
                total += len;
                if len > 0 {
                    runs.push(Run { array: array as u32, start: 0, len });
                }
            }
        }
        let mut offsets = self.arena.allocate(self.rows * size_of::<O>(), "offsets of a result")?;
        let mut sizes = self.arena.allocate(self.rows * size_of::<O>(), "sizes of a result")?;
        let targets = bytemuck::cast_slice_mut::<u8, O>(&mut offsets)
            .iter_mut()
            .zip(bytemuck::cast_slice_mut::<u8, O>(&mut sizes));
        for ((offset, size), source) in targets.zip(self.places()) {
            let (start, len) = source.map_or((0, 0), |(array, row)| place(array, row));
            let at = match (source, are_shared) {
                (Some((array, _)), true) if len > 0 => starts[array] + start,
                (Some((array, _)), false) if len > 0 => {
                    push_run(&mut runs, Run { array: array as u32, start, len });
                    total += len;
                    total - len
                }
                _ => 0,
            };
            *offset = O::from_usize(at).ok_or_else(|| self.too_long())?;
            *size = O::from_usize(len).ok_or_else(|| self.too_long())?;
        }
        let children: Vec<&ArrayRef> = sources.iter().map(|source| source.values()).collect();
        let values = gather_runs(&children, field.data_type(), &runs, self.arena)?;
        let offsets = ScalarBuffer::<O>::new(offsets.freeze(), 0, self.rows);
        let sizes = ScalarBuffer::<O>::new(sizes.freeze(), 0, self.rows);
        self.assembled(list_view_array(field, offsets, sizes, values, self.validity()?)).map(array)
    }

    /// Gathers unions. A missing row becomes a null of the first nullable child, or else of the
    /// first child.
    fn unions(&self, fields: &UnionFields, mode: UnionMode) -> Result<ArrayRef> {
        let sources: Vec<&UnionArray> = self.arrays.iter().map(|array| array.as_union()).collect();
        let mut missing = fields.iter().filter(|(_, field)| field.is_nullable()).chain(fields.iter());
        let missing = missing.next().map_or(0, |(id, _)| id);
        let id_of = |place: Option<(usize, usize)>| place.map_or(missing, |(array, row)| sources[array].type_id(row));
        let mut ids = self.arena.allocate(self.rows, "type ids of a result")?;
        let targets = bytemuck::cast_slice_mut::<u8, i8>(&mut ids);
        targets.iter_mut().zip(self.places()).for_each(|(id, place)| *id = id_of(place));
        let ids = ScalarBuffer::<i8>::new(ids.freeze(), 0, self.rows);
        let gather = |id: i8, field: &FieldRef, runs: &[Run]| {
            let children: Vec<&ArrayRef> = sources.iter().map(|source| source.child(id)).collect();
            gather_runs(&children, field.data_type(), runs, self.arena)
        };
        let (offsets, children) = match mode {
            UnionMode::Sparse => {
                (None, fields.iter().map(|(id, field)| gather(id, field, self.runs)).collect::<Result<Vec<_>>>()?)
            }
            UnionMode::Dense => {
                let mut offsets = self.arena.allocate(self.rows * size_of::<i32>(), "offsets of a result")?;
                let targets = bytemuck::cast_slice_mut::<u8, i32>(&mut offsets);
                let mut children = Vec::with_capacity(fields.len());
                for (id, field) in fields.iter() {
                    let (mut runs, mut count) = (Vec::new(), 0usize);
                    for ((offset, _), place) in
                        targets.iter_mut().zip(ids.iter()).zip(self.places()).filter(|((_, own), _)| **own == id)
                    {
                        *offset = i32::try_from(count).map_err(|_| self.too_long())?;
                        count += 1;
                        push_run(
                            &mut runs,
                            Run::of_row(place.map(|(array, row)| (array, sources[array].value_offset(row)))),
                        );
                    }
                    children.push(gather(id, field, &runs)?);
                }
                (Some(ScalarBuffer::new(offsets.freeze(), 0, self.rows)), children)
            }
        };
        self.assembled(UnionArray::try_new(fields.clone(), ids, offsets, children)).map(array)
    }

    /// Gathers run-end encoded rows. Adjacent rows of one run become one run in the result.
    fn run_ends<R: RunEndIndexType>(&self, values: &FieldRef) -> Result<ArrayRef>
    where
        R::Native: bytemuck::Pod,
    {
        let sources: Vec<&RunArray<R>> = self.arrays.iter().map(|array| array.as_run::<R>()).collect();
        let of_row = |place: Option<(usize, usize)>| {
            Run::of_row(place.map(|(array, row)| (array, sources[array].get_physical_index(row))))
        };
        let (mut runs, mut ends): (Vec<Run>, Vec<usize>) = (Vec::new(), Vec::new());
        let mut last = None;
        for (at, run) in self.places().map(of_row).enumerate() {
            if last.replace((run.array, run.start)) == Some((run.array, run.start)) {
                ends.pop();
            } else {
                push_run(&mut runs, run);
            }
            ends.push(at + 1);
        }
        R::Native::from_usize(self.rows).ok_or_else(|| self.too_long())?;
        let mut buffer = self.arena.allocate(ends.len() * size_of::<R::Native>(), "run ends of a result")?;
        let targets = bytemuck::cast_slice_mut::<u8, R::Native>(&mut buffer);
        targets.iter_mut().zip(&ends).for_each(|(target, &end)| *target = R::Native::usize_as(end));
        let ends = PrimitiveArray::<R>::new(ScalarBuffer::new(buffer.freeze(), 0, ends.len()), None);
        let children: Vec<&ArrayRef> = sources.iter().map(|source| source.values()).collect();
        let values = gather_runs(&children, values.data_type(), &runs, self.arena)?;
        let data = ArrayData::builder(self.data_type.clone()).len(self.rows);
        self.assembled(data.child_data(vec![ends.to_data(), values.to_data()]).build()).map(make_array)
    }

    /// Returns the place (array, index) of each row. `None` for a missing row.
    fn places(&self) -> impl Iterator<Item = Option<(usize, usize)>> {
        self.runs.iter().flat_map(|run| {
            let place = move |at: usize| run.rows().map(|(array, rows)| (array, rows.start + at));
            (0..run.len).map(place)
        })
    }

    /// Returns the offsets of the values in each row, and the runs of those values. Null rows have
    /// no values.
    fn inner<'o, O: OffsetSizeTrait + bytemuck::Pod>(
        &self,
        offsets_of: impl Fn(usize) -> &'o [O],
    ) -> Result<(OffsetBuffer<O>, Vec<Run>)> {
        let mut offsets = self.arena.allocate((self.rows + 1) * size_of::<O>(), "offsets of a result")?;
        let (first, ends) = bytemuck::cast_slice_mut::<u8, O>(&mut offsets).split_at_mut(1);
        first[0] = O::default();
        let mut runs: Vec<Run> = Vec::with_capacity(self.runs.len());
        let (mut at, mut total) = (0, 0);
        for run in self.runs {
            let Some((array, rows)) = run.rows() else {
                ends[at..at + run.len].fill(O::usize_as(total));
                at += run.len;
                continue;
            };
            let (source, nulls) = (offsets_of(array), self.arrays[array].nulls());
            for row in rows {
                let (start, end) = (source[row].as_usize(), source[row + 1].as_usize());
                let len = if nulls.is_none_or(|nulls| nulls.is_valid(row)) { end - start } else { 0 };
                if len > 0 {
                    push_run(&mut runs, Run { array: run.array, start, len });
                }
                total += len;
                ends[at] = O::from_usize(total).ok_or_else(|| self.too_long())?;
                at += 1;
            }
        }
        Ok((OffsetBuffer::new(ScalarBuffer::new(offsets.freeze(), 0, self.rows + 1)), runs))
    }

    /// Gathers views. One new buffer has their long values and no others, because the tables'
    /// buffers have the values of all rows.
    fn views<T: ByteViewType>(&self) -> Result<ArrayRef> {
        let sources: Vec<&GenericByteViewArray<T>> =
            self.arrays.iter().map(|array| array.as_byte_view::<T>()).collect();
        let view_at = |array: usize, row: usize| {
            let source = sources[array];
            let view = source.views()[row];
            (view as u32 as usize > INLINE_BYTES && source.is_valid(row)).then(|| ByteView::from(view))
        };
        let long = || {
            self.runs.iter().filter_map(|run| run.rows()).flat_map(|(array, rows)| rows.map(move |row| (array, row)))
        };
        let long = || long().filter_map(|(array, row)| Some((array, view_at(array, row)?)));
        let mut total: usize = long().map(|(_, view)| view.length as usize).sum();
        // Rows that share a value share it in the result, too. That takes a look-up per row, so it
        // happens only where it can save much.
        let there_are: usize = sources.iter().flat_map(|source| source.data_buffers()).map(|buffer| buffer.len()).sum();
        let mut placed: Option<HashMap<(usize, u32), u32, Seeded>> = (total > there_are).then(HashMap::default);
        let address = |array: usize, view: &ByteView| {
            (
                sources[array].data_buffers()[view.buffer_index as usize].as_ptr() as usize + view.offset as usize,
                view.length,
            )
        };
        if let Some(placed) = &mut placed {
            total = 0;
            for (array, view) in long() {
                placed.entry(address(array, &view)).or_insert_with(|| {
                    total += view.length as usize;
                    u32::MAX
                });
            }
        }
        // The specification makes offsets in views signed.
        i32::try_from(total).map_err(|_| self.too_long())?;
        let mut views = self.arena.allocate(self.rows * size_of::<u128>(), "views of a result")?;
        let mut bytes = self.arena.allocate(total, "strings of a result")?;
        let targets = bytemuck::cast_slice_mut::<u8, u128>(&mut views);
        let (mut at, mut end) = (0, 0);
        for run in self.runs {
            let Some((array, rows)) = run.rows() else {
                targets[at..at + run.len].fill(0);
                at += run.len;
                continue;
            };
            for row in rows {
                targets[at] = match view_at(array, row) {
                    Some(view) => {
                        let length = view.length as usize;
                        let known = placed.as_mut().and_then(|placed| placed.get_mut(&address(array, &view)));
                        let offset = match known {
                            Some(offset) if *offset != u32::MAX => *offset,
                            known => {
                                let offset = end as u32;
                                let value = sources[array].data_buffers()[view.buffer_index as usize]
                                    .slice_with_length(view.offset as usize, length);
                                bytes[end..end + length].copy_from_slice(&value);
                                end += length;
                                if let Some(known) = known {
                                    *known = offset;
                                }
                                offset
                            }
                        };
                        ByteView { buffer_index: 0, offset, ..view }.as_u128()
                    }
                    None if sources[array].is_valid(row) => sources[array].views()[row],
                    None => 0,
                };
                at += 1;
            }
        }
        let buffers = if total > 0 { vec![bytes.freeze()] } else { Vec::new() };
        let views = ScalarBuffer::new(views.freeze(), 0, self.rows);
        self.assembled(GenericByteViewArray::<T>::try_new(views, buffers, self.validity()?)).map(array)
    }

    /// Gathers types without values with Arrow's own kernel.
    fn by_arrow(&self) -> Result<ArrayRef> {
        // A missing row is row 0 of an array of one null.
        let null = new_null_array(self.data_type, 1);
        let missing = (self.arrays.len(), 0);
        let arrays: Vec<&dyn Array> = self.arrays.iter().copied().chain([&null]).map(|array| &**array).collect();
        let places: Vec<_> = self.places().map(|place| place.unwrap_or(missing)).collect();
        let data_type = type_name(self.data_type);
        interleave(&arrays, &places)
            .map_err(|error| Error::Internal(format!("gathering a column of {data_type}: {error}")))
    }

    /// Error for values that are too long for one batch. As with strings, the caller can ask for
    /// fewer rows at a time.
    fn too_long(&self) -> Error {
        Error::TooLong(format!(
            "values of a column of type {} are so long that one batch of the result cannot hold them; ask for smaller batches with \
             batch_rows",
            self.data_type
        ))
    }

    fn assembled<T>(&self, made: Result<T, ArrowError>) -> Result<T> {
        made.map_err(|error| {
            Error::Internal(format!("assembling a gathered column of {}: {error}", type_name(self.data_type)))
        })
    }
}

/// Adds a run, or extends the previous run if the new one follows it.
fn push_run(runs: &mut Vec<Run>, run: Run) {
    match runs.last_mut() {
        Some(last) if last.array == run.array && (run.array == MISSING || last.start + last.len == run.start) => {
            last.len += run.len;
        }
        _ => runs.push(run),
    }
}

fn array(array: impl Array + 'static) -> ArrayRef {
    Arc::new(array)
}
