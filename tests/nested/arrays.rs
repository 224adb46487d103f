//! Random types and arrays: every type that Arrow can put on the wire, nested, sliced at odd
//! places, with nulls at every level. The unit tests of the upload path and `tests/nested` share
//! them.

use std::sync::Arc;

use arrow::array::{Array, ArrayData, ArrayDataBuilder, RecordBatch, RecordBatchOptions, make_array};
use arrow::buffer::{BooleanBuffer, Buffer, NullBuffer};
use arrow::datatypes::{DataType, Field, FieldRef, Fields, IntervalUnit, SchemaRef, TimeUnit, UnionFields, UnionMode};
use rand::Rng;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;

/// Returns every type without children. Types with parameters have one or a few examples.
pub fn leaf_types() -> Vec<DataType> {
    use DataType as T;
    vec![
        T::Null,
        T::Boolean,
        T::Int8,
        T::Int16,
        T::Int32,
        T::Int64,
        T::UInt8,
        T::UInt16,
        T::UInt32,
        T::UInt64,
        T::Float16,
        T::Float32,
        T::Float64,
        T::Timestamp(TimeUnit::Second, None),
        T::Timestamp(TimeUnit::Nanosecond, Some("Europe/Berlin".into())),
        T::Date32,
        T::Date64,
        T::Time32(TimeUnit::Second),
        T::Time32(TimeUnit::Millisecond),
        T::Time64(TimeUnit::Microsecond),
        T::Time64(TimeUnit::Nanosecond),
        T::Duration(TimeUnit::Millisecond),
        T::Interval(IntervalUnit::YearMonth),
        T::Interval(IntervalUnit::DayTime),
        T::Interval(IntervalUnit::MonthDayNano),
        T::Binary,
        T::LargeBinary,
        T::BinaryView,
        T::FixedSizeBinary(5),
        T::FixedSizeBinary(0),
        T::Utf8,
        T::LargeUtf8,
        T::Utf8View,
        T::Decimal32(9, 2),
        T::Decimal64(18, -3),
        T::Decimal128(38, 10),
        T::Decimal256(76, 0),
    ]
}

/// Returns a type for every kind of nesting around `inner`. `is_nullable` applies to the inner
/// field.
pub fn nested_types(inner: &DataType, is_nullable: bool) -> Vec<DataType> {
    use DataType as T;
    let item = || Arc::new(Field::new("item", inner.clone(), is_nullable));
    let entries =
        Fields::from(vec![Field::new("key", T::Int16, false), Field::new("value", inner.clone(), is_nullable)]);
    let run_ends = Arc::new(Field::new("run_ends", T::Int32, false));
    let union =
        || UnionFields::try_new([3, 7], [Field::new("a", inner.clone(), is_nullable), Field::new("b", T::Int8, true)]);
    vec![
        T::List(item()),
        T::LargeList(item()),
        T::ListView(item()),
        T::LargeListView(item()),
        T::FixedSizeList(item(), 3),
        T::FixedSizeList(item(), 0),
        T::Struct(Fields::from(vec![item(), Arc::new(Field::new("n", T::Int64, true))])),
        T::Struct(Fields::empty()),
        T::Map(Arc::new(Field::new("entries", T::Struct(entries), false)), false),
        T::RunEndEncoded(run_ends, Arc::new(Field::new("values", inner.clone(), is_nullable))),
        T::Union(union().unwrap(), UnionMode::Sparse),
        T::Union(union().unwrap(), UnionMode::Dense),
    ]
}

/// Makes a type of at most `depth` levels above its leaves.
pub fn random_type(rng: &mut StdRng, depth: usize) -> DataType {
    random_type_of(rng, depth, &leaf_types())
}

/// Makes a random type like [`random_type`], with the given leaves.
pub fn random_type_of(rng: &mut StdRng, depth: usize, leaves: &[DataType]) -> DataType {
    let leaf = leaves.choose(rng).unwrap().clone();
    match rng.random_range(0..if depth > 1 { 12 } else { 4 }) {
        0 => leaf,
        1 if !matches!(leaf, DataType::Null) => dictionary_of(rng, leaf),
        2 if depth > 0 => {
            let values = random_type_of(rng, depth - 1, leaves);
            // No Arrow library writes dictionaries of dictionaries, and Arrow's Rust writer
            // confuses the rows of unions in dictionaries.
            let name = values.to_string();
            let is_plain = !name.contains("Dictionary") && !name.contains("Union") && values != DataType::Null;
            if is_plain { dictionary_of(rng, values) } else { values }
        }
        _ if depth > 0 => {
            let inner = random_type_of(rng, depth - 1, leaves);
            let is_nullable = has_null_rows(&inner) || rng.random_bool(0.7);
            nested_types(&inner, is_nullable).choose(rng).unwrap().clone()
        }
        _ => leaf,
    }
}

/// True for types with rows that are null regardless of their buffers.
pub fn has_null_rows(data_type: &DataType) -> bool {
    match data_type {
        DataType::Null => true,
        DataType::RunEndEncoded(_, values) => has_null_rows(values.data_type()),
        DataType::Dictionary(_, values) => has_null_rows(values),
        DataType::Union(fields, _) => fields.iter().any(|(_, field)| has_null_rows(field.data_type())),
        _ => false,
    }
}

fn dictionary_of(rng: &mut StdRng, values: DataType) -> DataType {
    let keys = [DataType::Int8, DataType::Int32, DataType::UInt16, DataType::Int64];
    DataType::Dictionary(Box::new(keys.choose(rng).unwrap().clone()), Box::new(values))
}

/// Makes a batch of the schema, sometimes as a slice of a larger batch.
pub fn random_batch(rng: &mut StdRng, schema: &SchemaRef, rows: usize) -> RecordBatch {
    let (before, after) = around(rng);
    let all = before + rows + after;
    let columns =
        schema.fields().iter().map(|field| make_array(random_array(rng, field, all, &Nulls::of(field)))).collect();
    let options = RecordBatchOptions::new().with_row_count(Some(all));
    RecordBatch::try_new_with_options(schema.clone(), columns, &options).unwrap().slice(before, rows)
}

/// Draws the numbers of rows before and after a slice.
fn around(rng: &mut StdRng) -> (usize, usize) {
    if rng.random() { (rng.random_range(0..10), rng.random_range(0..10)) } else { (0, 0) }
}

/// An array's rows that may be null.
enum Nulls {
    All,
    None,
    /// The marked rows, whose values no reader sees: for example, below a null.
    Some(Vec<bool>),
}

impl Nulls {
    fn of(field: &Field) -> Self {
        if field.is_nullable() { Self::All } else { Self::None }
    }

    /// Returns the rows that may be null in a field below an array with the nulls `hidden`. Each
    /// row of the array has `times` rows in the field.
    fn below(field: &Field, hidden: Option<&NullBuffer>, times: usize) -> Self {
        match hidden {
            _ if field.is_nullable() => Self::All,
            Some(nulls) => {
                Self::Some(nulls.iter().flat_map(|is_valid| std::iter::repeat_n(!is_valid, times)).collect())
            }
            None => Self::None,
        }
    }

    fn allows(&self, row: usize) -> bool {
        match self {
            Self::All => true,
            Self::None => false,
            Self::Some(rows) => rows[row],
        }
    }
}

/// Makes the elements of lists and maps, sometimes as a slice of a longer array.
fn random_child(rng: &mut StdRng, field: &Field, rows: usize) -> ArrayData {
    let (before, after) = around(rng);
    let all = random_array(rng, field, before + rows + after, &Nulls::of(field));
    make_array(all).slice(before, rows).to_data()
}

fn random_array(rng: &mut StdRng, field: &Field, rows: usize, nulls: &Nulls) -> ArrayData {
    use DataType as T;
    let data_type = field.data_type();
    let has_bitmap = !matches!(data_type, T::Null | T::Union(_, _) | T::RunEndEncoded(_, _));
    let bitmap = (has_bitmap && !matches!(nulls, Nulls::None) && rng.random()).then(|| {
        NullBuffer::new(BooleanBuffer::from_iter((0..rows).map(|row| !nulls.allows(row) || rng.random_bool(0.7))))
    });
    let builder = ArrayData::builder(data_type.clone()).len(rows);
    let builder = match data_type {
        T::Null => builder,
        T::Boolean => builder.add_buffer(random_bytes(rng, rows.div_ceil(8))),
        T::Utf8 | T::Binary => {
            let (offsets, values) = random_strings(rng, rows);
            builder.add_buffer(Buffer::from_vec(offsets)).add_buffer(values)
        }
        T::LargeUtf8 | T::LargeBinary => {
            let (offsets, values) = random_strings(rng, rows);
            builder.add_buffer(wide(offsets)).add_buffer(values)
        }
        T::Utf8View | T::BinaryView => {
            let (offsets, values) = random_strings(rng, rows);
            builder.add_buffer(Buffer::from_vec(views(&offsets, &values))).add_buffer(values)
        }
        T::FixedSizeBinary(width) => builder.add_buffer(random_bytes(rng, rows * *width as usize)),
        T::List(child) | T::Map(child, _) => {
            let offsets = random_offsets(rng, rows);
            let elements = random_child(rng, child, *offsets.last().unwrap() as usize);
            builder.add_buffer(Buffer::from_vec(offsets)).add_child_data(elements)
        }
        T::LargeList(child) => {
            let offsets = random_offsets(rng, rows);
            let elements = random_child(rng, child, *offsets.last().unwrap() as usize);
            builder.add_buffer(wide(offsets)).add_child_data(elements)
        }
        T::ListView(child) | T::LargeListView(child) => {
            let elements = 20;
            let offsets: Vec<i32> = (0..rows).map(|_| rng.random_range(0..elements)).collect();
            let sizes: Vec<i32> =
                offsets.iter().map(|offset| rng.random_range(0..=(elements - offset).min(4))).collect();
            let buffers = match data_type {
                T::ListView(_) => vec![Buffer::from_vec(offsets), Buffer::from_vec(sizes)],
                _ => vec![wide(offsets), wide(sizes)],
            };
            builder.buffers(buffers).add_child_data(random_child(rng, child, elements as usize))
        }
        T::FixedSizeList(child, len) => {
            let below = Nulls::below(child, bitmap.as_ref(), *len as usize);
            builder.add_child_data(random_array(rng, child, rows * *len as usize, &below))
        }
        T::Struct(fields) => {
            let child = |field: &FieldRef| {
                let below = Nulls::below(field, bitmap.as_ref(), 1);
                random_array(rng, field, rows, &below)
            };
            builder.child_data(fields.iter().map(child).collect())
        }
        T::RunEndEncoded(_, values) => random_runs(rng, builder, values, rows, nulls),
        T::Union(fields, mode) => random_union(rng, builder, fields, *mode, rows, nulls),
        T::Dictionary(keys, values) => random_dictionary(rng, builder, keys, values, rows, nulls),
        fixed => builder.add_buffer(random_bytes(rng, rows * fixed.primitive_width().unwrap())),
    };
    builder.nulls(bitmap).build().unwrap_or_else(|error| panic!("{data_type}: {error}"))
}

/// Makes the field non-nullable unless `nulls` is `Nulls::All`.
fn as_strict(field: &Field, nulls: &Nulls) -> Field {
    field.clone().with_nullable(field.is_nullable() && matches!(nulls, Nulls::All))
}

fn random_runs(
    rng: &mut StdRng,
    builder: ArrayDataBuilder,
    values: &Field,
    rows: usize,
    nulls: &Nulls,
) -> ArrayDataBuilder {
    let mut ends: Vec<i32> = Vec::new();
    while ends.last().map_or(0, |&end| end as usize) < rows {
        ends.push(ends.last().copied().unwrap_or(0) + rng.random_range(1..5));
    }
    let values = random_array(rng, values, ends.len(), &Nulls::of(&as_strict(values, nulls)));
    let ends = ArrayData::builder(DataType::Int32).len(ends.len()).add_buffer(Buffer::from_vec(ends));
    builder.add_child_data(ends.build().unwrap()).add_child_data(values)
}

fn random_union(
    rng: &mut StdRng,
    builder: ArrayDataBuilder,
    fields: &UnionFields,
    mode: UnionMode,
    rows: usize,
    nulls: &Nulls,
) -> ArrayDataBuilder {
    let ids: Vec<i8> = fields.iter().map(|(id, _)| id).collect();
    let chosen: Vec<i8> = (0..rows).map(|_| *ids.choose(rng).unwrap()).collect();
    let builder = builder.add_buffer(Buffer::from_vec(chosen.clone()));
    if mode == UnionMode::Sparse {
        let child = |(id, field): (i8, &FieldRef)| {
            let strict = as_strict(field, nulls);
            let unselected = chosen.iter().map(|&own| own != id).collect();
            let nulls = if strict.is_nullable() { Nulls::All } else { Nulls::Some(unselected) };
            random_array(rng, field, rows, &nulls)
        };
        return builder.child_data(fields.iter().map(child).collect());
    }
    // Values that no row selects are before and between the values of the rows.
    let mut lengths = [0i32; i8::MAX as usize + 1];
    let mut place = |id: i8| {
        let length = &mut lengths[id as usize];
        *length += rng.random_range(1..3);
        *length - 1
    };
    let offsets: Vec<i32> = chosen.iter().map(|&id| place(id)).collect();
    let child = |(id, field): (i8, &FieldRef)| {
        let nulls = Nulls::of(&as_strict(field, nulls));
        random_array(rng, field, lengths[id as usize] as usize, &nulls)
    };
    let children = fields.iter().map(child).collect();
    builder.add_buffer(Buffer::from_vec(offsets)).child_data(children)
}

/// Makes a dictionary. If rows may not be null, only the last value may be, and no row uses it.
fn random_dictionary(
    rng: &mut StdRng,
    builder: ArrayDataBuilder,
    keys: &DataType,
    values: &DataType,
    rows: usize,
    nulls: &Nulls,
) -> ArrayDataBuilder {
    let len = rng.random_range(2..20);
    let (of_values, used) = match nulls {
        Nulls::All => (Nulls::All, len),
        _ => (Nulls::Some((0..len).map(|value| value == len - 1).collect()), len - 1),
    };
    let values = random_array(rng, &Field::new("values", values.clone(), true), len, &of_values);
    let width = keys.primitive_width().unwrap();
    let keys = (0..rows).flat_map(|_| rng.random_range(0..used as i64).to_le_bytes().into_iter().take(width));
    let buffer = Buffer::from(keys.collect::<Vec<u8>>().as_slice());
    builder.add_buffer(buffer).add_child_data(values)
}

fn wide(values: Vec<i32>) -> Buffer {
    Buffer::from_vec(values.into_iter().map(i64::from).collect::<Vec<_>>())
}

/// Makes strings of up to 44 bytes, about half of them empty. Every offset is between characters.
fn random_strings(rng: &mut StdRng, rows: usize) -> (Vec<i32>, Buffer) {
    let mut text = String::new();
    let mut offsets = vec![0];
    for _ in 0..rows {
        let letters = if rng.random() { rng.random_range(0..12) } else { 0 };
        text.extend((0..letters).map(|_| *['a', 'b', 'ß', '€', '🦀'].choose(rng).unwrap()));
        offsets.push(text.len() as i32);
    }
    (offsets, Buffer::from(text.as_bytes()))
}

/// Makes views of strings: short strings inside the view, long strings in the single data buffer.
fn views(offsets: &[i32], values: &[u8]) -> Vec<u128> {
    let view = |pair: &[i32]| {
        let (start, end) = (pair[0] as usize, pair[1] as usize);
        arrow::array::make_view(&values[start..end], 0, start as u32)
    };
    offsets.windows(2).map(view).collect()
}

fn random_offsets(rng: &mut StdRng, rows: usize) -> Vec<i32> {
    let mut offsets = vec![if rng.random() { rng.random_range(0..3) } else { 0 }];
    for _ in 0..rows {
        offsets.push(offsets.last().unwrap() + rng.random_range(0..4));
    }
    offsets
}

fn random_bytes(rng: &mut StdRng, len: usize) -> Buffer {
    Buffer::from((0..len).map(|_| rng.random()).collect::<Vec<u8>>().as_slice())
}
