//! Types that columns of Parquet are read as. A file says what it stores, and may contain the Arrow
//! schema of its writer. The libraries of the command line (parquet 59.3) and of the Python client
//! (pyarrow) apply these in different ways. This module leads to the types of the Python client:
//!
//! * Times of twelve bytes (INT96) are timestamps in microseconds, without a zone. They reach
//!   further than 64 bits of nanoseconds: the year 9999 would become the year 1816.
//! * A timestamp of an instant has the zone of the Arrow schema, or else UTC. Others have no zone.
//! * Only text and bytes are dictionaries, with the keys of the Arrow schema.
//! * Days are `date`, also if they were milliseconds.
//! * Numbers and bytes that the file calls nothing else stay so, also if the Arrow schema calls
//!   them days, times or text. The library of the command line writes whole seconds so.
//! * Intervals are refused.

use std::io::Cursor;
use std::ops::Deref;
use std::sync::Arc;

use arrow::datatypes::{DataType, Field, FieldRef, Schema, SchemaRef, TimeUnit};
use arrow::ipc::reader::StreamReader;
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use parquet::arrow::ARROW_SCHEMA_META_KEY;
use parquet::arrow::arrow_reader::ArrowReaderMetadata;
use parquet::basic::{ConvertedType, LogicalType, Type};
use parquet::schema::types::ColumnDescriptor;

use crate::columns::children;
use crate::{Error, Result};

/// Refuses the intervals of Parquet. The library would drop their months, and pyarrow makes bytes of
/// them.
pub(super) fn check_intervals(file: &ArrowReaderMetadata) -> Result<()> {
    let columns = file.parquet_schema().columns();
    match columns.iter().find(|column| column.converted_type() == ConvertedType::INTERVAL) {
        None => Ok(()),
        Some(column) => Err(Error::Invalid(format!(
            "column {:?} is an INTERVAL of Parquet, for which there is no type; write a duration, a number or text \
             instead",
            column.path().parts().first().map_or("", String::as_str)
        ))),
    }
}

/// Returns the schema to read a file with, if it differs from the library's.
pub(super) fn read_schema(file: &ArrowReaderMetadata) -> Option<SchemaRef> {
    let schema = file.schema();
    let arrow = arrow_schema(file);
    let mut columns = file.parquet_schema().columns().iter().map(Deref::deref);
    let fields = schema.fields().iter().enumerate().map(|(at, field)| {
        let original = arrow.as_ref().and_then(|arrow| arrow.fields().get(at));
        read_field(field, original.map(AsRef::as_ref), &mut columns)
    });
    let read = Schema::new_with_metadata(fields.collect::<Vec<_>>(), schema.metadata().clone());
    (read != **schema).then(|| Arc::new(read))
}

/// Returns the Arrow schema that the file contains, if there is one.
fn arrow_schema(file: &ArrowReaderMetadata) -> Option<SchemaRef> {
    let entries = file.metadata().file_metadata().key_value_metadata()?;
    let text = entries.iter().find(|entry| entry.key == ARROW_SCHEMA_META_KEY)?.value.as_ref()?;
    let message = Cursor::new(BASE64_STANDARD.decode(text).ok()?);
    Some(StreamReader::try_new(message, None).ok()?.schema())
}

/// Returns the field with its type when read. `columns` has the file's columns from this field on:
/// the leaves of both schemas are in the same order.
fn read_field<'a>(
    field: &FieldRef,
    original: Option<&Field>,
    columns: &mut impl Iterator<Item = &'a ColumnDescriptor>,
) -> FieldRef {
    use DataType as T;
    let originals = original.map_or_else(Vec::new, |original| children(original.data_type()));
    let mut inside = |at: usize, field: &FieldRef| read_field(field, originals.get(at).copied(), columns);
    let data_type = match field.data_type() {
        T::List(item) => T::List(inside(0, item)),
        T::LargeList(item) => T::LargeList(inside(0, item)),
        T::ListView(item) => T::ListView(inside(0, item)),
        T::LargeListView(item) => T::LargeListView(inside(0, item)),
        T::FixedSizeList(item, length) => T::FixedSizeList(inside(0, item), *length),
        T::Map(entries, is_sorted) => T::Map(inside(0, entries), *is_sorted),
        T::Struct(fields) => T::Struct(fields.iter().enumerate().map(|(at, field)| inside(at, field)).collect()),
        leaf => columns.next().map_or(leaf.clone(), |column| read_leaf(leaf, original.map(Field::data_type), column)),
    };
    Arc::new(field.as_ref().clone().with_data_type(data_type))
}

fn read_leaf(data_type: &DataType, original: Option<&DataType>, column: &ColumnDescriptor) -> DataType {
    use DataType as T;
    let is_plain = column.logical_type_ref().is_none() && column.converted_type() == ConvertedType::NONE;
    let is_local =
        matches!(column.logical_type_ref(), Some(LogicalType::Timestamp(stored)) if !stored.is_adjusted_to_u_t_c);
    match (data_type, original, column.physical_type()) {
        (_, _, Type::INT96) => T::Timestamp(TimeUnit::Microsecond, None),
        (T::Time32(_) | T::Timestamp(..), _, Type::INT32) if is_plain => T::Int32,
        (T::Date64 | T::Time64(_) | T::Timestamp(..), _, Type::INT64) if is_plain => T::Int64,
        (T::Utf8 | T::LargeUtf8, _, Type::BYTE_ARRAY) if is_plain => T::Binary,
        (T::Date64, ..) => T::Date32,
        (T::Timestamp(unit, Some(_)), ..) if is_local => T::Timestamp(*unit, None),
        (T::Timestamp(unit, Some(_)), Some(T::Timestamp(_, Some(zone))), _) => T::Timestamp(*unit, Some(zone.clone())),
        (T::Dictionary(keys, values), ..) => match **values {
            T::Utf8 | T::LargeUtf8 if is_plain => T::Dictionary(keys.clone(), T::Binary.into()),
            T::Utf8 | T::Binary | T::Utf8View | T::BinaryView => data_type.clone(),
            T::LargeUtf8 => T::Dictionary(keys.clone(), T::Utf8.into()),
            T::LargeBinary => T::Dictionary(keys.clone(), T::Binary.into()),
            _ => read_leaf(values, None, column),
        },
        (other, ..) => other.clone(),
    }
}
