//! Random types and arrays of them: every type that Arrow can put on the wire.

use std::sync::Arc;

use arrow::array::{ArrayData, RecordBatch, RecordBatchOptions, make_array};
use arrow::buffer::{BooleanBuffer, Buffer, NullBuffer};
use arrow::datatypes::{
    DataType, Field, FieldRef, Fields, IntervalUnit, Schema, SchemaRef, TimeUnit, UnionFields, UnionMode,
};
use rand::Rng;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;

/// Every type without children, and one of each family that has parameters.
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
        T::Utf8,
        T::LargeUtf8,
        T::Utf8View,
        T::Decimal32(9, 2),
        T::Decimal64(18, -3),
        T::Decimal128(38, 10),
        T::Decimal256(76, 0),
    ]
}

/// Every kind of nesting, around the given type.
pub fn nested_types(inner: &DataType) -> Vec<DataType> {
    use DataType as T;
    let item = || Arc::new(Field::new("item", inner.clone(), true));
    let entries = Fields::from(vec![Field::new("key", T::Int16, false), Field::new("value", inner.clone(), true)]);
    let run_ends = Arc::new(Field::new("run_ends", T::Int32, false));
    let union = || UnionFields::try_new([3, 7], [Field::new("a", inner.clone(), true), Field::new("b", T::Int8, true)]);
    vec![
        T::List(item()),
        T::LargeList(item()),
        T::ListView(item()),
        T::LargeListView(item()),
        T::FixedSizeList(item(), 3),
        T::Struct(Fields::from(vec![item(), Arc::new(Field::new("n", T::Int64, true))])),
        T::Map(Arc::new(Field::new("entries", T::Struct(entries), false)), false),
        T::RunEndEncoded(run_ends, Arc::new(Field::new("values", inner.clone(), true))),
        T::Union(union().unwrap(), UnionMode::Sparse),
        T::Union(union().unwrap(), UnionMode::Dense),
    ]
}

pub fn random_type(rng: &mut StdRng, depth: usize) -> DataType {
    let leaf = leaf_types().choose(rng).unwrap().clone();
    match rng.random_range(0..4) {
        0 if depth > 0 => {
            let inner = random_type(rng, depth - 1);
            nested_types(&inner).choose(rng).unwrap().clone()
        }
        1 if !matches!(leaf, DataType::Null) => {
            let keys = [DataType::Int8, DataType::Int32, DataType::UInt16, DataType::Int64];
            DataType::Dictionary(Box::new(keys.choose(rng).unwrap().clone()), Box::new(leaf))
        }
        _ => leaf,
    }
}

pub fn random_schema(rng: &mut StdRng, depth: usize) -> SchemaRef {
    let columns = rng.random_range(0..6);
    let fields: Vec<_> =
        (0..columns).map(|column| Field::new(format!("c{column}"), random_type(rng, depth), true)).collect();
    Arc::new(Schema::new_with_metadata(fields, [("origin".into(), "random".into())].into()))
}

/// A batch of the schema, which may be a slice of a larger one.
pub fn random_batch(rng: &mut StdRng, schema: &SchemaRef, rows: usize) -> RecordBatch {
    let (before, after) = (rng.random_range(0..10), rng.random_range(0..10));
    let (before, after) = if rng.random() { (before, after) } else { (0, 0) };
    let all = before + rows + after;
    let columns = schema.fields().iter().map(|field| make_array(random_array(rng, field, all))).collect();
    let options = RecordBatchOptions::new().with_row_count(Some(all));
    RecordBatch::try_new_with_options(schema.clone(), columns, &options).unwrap().slice(before, rows)
}

fn random_array(rng: &mut StdRng, field: &FieldRef, rows: usize) -> ArrayData {
    use DataType as T;
    let data_type = field.data_type();
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
            let offsets: Vec<i64> = offsets.into_iter().map(i64::from).collect();
            builder.add_buffer(Buffer::from_vec(offsets)).add_buffer(values)
        }
        T::Utf8View | T::BinaryView => {
            let (offsets, values) = random_strings(rng, rows);
            builder.add_buffer(Buffer::from_vec(views(&offsets, &values))).add_buffer(values)
        }
        T::FixedSizeBinary(width) => builder.add_buffer(random_bytes(rng, rows * *width as usize)),
        T::List(child) | T::Map(child, _) => {
            let offsets = random_offsets(rng, rows);
            let elements = random_array(rng, child, *offsets.last().unwrap() as usize);
            builder.add_buffer(Buffer::from_vec(offsets)).add_child_data(elements)
        }
        T::LargeList(child) => {
            let offsets: Vec<i64> = random_offsets(rng, rows).into_iter().map(i64::from).collect();
            let elements = random_array(rng, child, *offsets.last().unwrap() as usize);
            builder.add_buffer(Buffer::from_vec(offsets)).add_child_data(elements)
        }
        T::ListView(child) | T::LargeListView(child) => {
            let elements = 20;
            let offsets: Vec<i32> = (0..rows).map(|_| rng.random_range(0..elements)).collect();
            let sizes: Vec<i32> = offsets.iter().map(|offset| rng.random_range(0..=elements - offset)).collect();
            let wide = |values: Vec<i32>| Buffer::from_vec(values.into_iter().map(i64::from).collect::<Vec<_>>());
            let buffers = match data_type {
                T::ListView(_) => vec![Buffer::from_vec(offsets), Buffer::from_vec(sizes)],
                _ => vec![wide(offsets), wide(sizes)],
            };
            builder.buffers(buffers).add_child_data(random_array(rng, child, elements as usize))
        }
        T::FixedSizeList(child, len) => builder.add_child_data(random_array(rng, child, rows * *len as usize)),
        T::Struct(fields) => builder.child_data(fields.iter().map(|field| random_array(rng, field, rows)).collect()),
        T::RunEndEncoded(_, values) => {
            let mut ends: Vec<i32> = Vec::new();
            while ends.last().map_or(0, |&end| end as usize) < rows {
                ends.push(ends.last().copied().unwrap_or(0) + rng.random_range(1..5));
            }
            let values = random_array(rng, values, ends.len());
            let ends = ArrayData::builder(T::Int32).len(ends.len()).add_buffer(Buffer::from_vec(ends));
            builder.add_child_data(ends.build().unwrap()).add_child_data(values)
        }
        T::Union(fields, mode) => {
            let ids: Vec<i8> = fields.iter().map(|(id, _)| id).collect();
            let chosen: Vec<i8> = (0..rows).map(|_| *ids.choose(rng).unwrap()).collect();
            let children = fields.iter().map(|(_, field)| random_array(rng, field, rows)).collect();
            let offsets: Vec<i32> = (0..rows as i32).collect();
            let builder = builder.add_buffer(Buffer::from_vec(chosen)).child_data(children);
            if *mode == UnionMode::Dense { builder.add_buffer(Buffer::from_vec(offsets)) } else { builder }
        }
        T::Dictionary(keys, values) => {
            let len = rng.random_range(1..20);
            let values = random_array(rng, &Arc::new(Field::new("values", *values.clone(), true)), len);
            let width = keys.primitive_width().unwrap();
            let keys = (0..rows).flat_map(|_| rng.random_range(0..len as i64).to_le_bytes().into_iter().take(width));
            let buffer = Buffer::from(keys.collect::<Vec<u8>>().as_slice());
            builder.add_buffer(buffer).add_child_data(values)
        }
        fixed => builder.add_buffer(random_bytes(rng, rows * fixed.primitive_width().unwrap())),
    };
    let may_have_nulls = field.is_nullable() && !matches!(data_type, T::Null | T::Union(_, _) | T::RunEndEncoded(_, _));
    let nulls = (may_have_nulls && rng.random())
        .then(|| NullBuffer::new(BooleanBuffer::from_iter((0..rows).map(|_| rng.random_bool(0.7)))));
    builder.nulls(nulls).build().unwrap()
}

/// Up to 40 bytes of text in each, with gaps of nothing; every prefix is UTF-8.
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

/// Strings as views: short ones in place, long ones in the one data buffer.
fn views(offsets: &[i32], values: &[u8]) -> Vec<u128> {
    let view = |pair: &[i32]| {
        let (start, end) = (pair[0] as usize, pair[1] as usize);
        arrow::array::make_view(&values[start..end], 0, start as u32)
    };
    offsets.windows(2).map(view).collect()
}

fn random_offsets(rng: &mut StdRng, rows: usize) -> Vec<i32> {
    let mut offsets = vec![0];
    for _ in 0..rows {
        offsets.push(offsets.last().unwrap() + rng.random_range(0..4));
    }
    offsets
}

fn random_bytes(rng: &mut StdRng, len: usize) -> Buffer {
    Buffer::from((0..len).map(|_| rng.random()).collect::<Vec<u8>>().as_slice())
}
