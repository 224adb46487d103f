//! Checks that a format holds the columns and the values of a table.

use std::io::Cursor;

use arrow::array::{Array, ArrayData, ArrayRef, RecordBatch, UInt64Array, make_array, new_empty_array, new_null_array};
use arrow::buffer::Buffer;
use arrow::compute::take;
use arrow::datatypes::{DataType, Field, Schema, UnionMode};
use arrow::error::ArrowError;
use arrow::ipc::reader::FileReader;
use arrow::util::display::FormatOptions;
use bytes::Bytes;
use parquet::arrow::arrow_reader::ParquetRecordBatchReader;

use super::Format;
use super::encoder::Encoder;
use crate::cli::times::Times;
use crate::human::type_name;
use crate::{Error, Result, panics};

/// Refuses columns that a format does not hold. `written` has their types in the file.
///
/// # Errors
/// [`Error::Invalid`] with the column, its type and advice.
pub(super) fn check_columns(format: Format, schema: &Schema, written: &Schema) -> Result<()> {
    let mut fields = schema.fields().iter().zip(written.fields());
    match fields.find(|(_, field)| !holds(format, field)) {
        None => Ok(()),
        Some((field, _)) => Err(Error::Invalid(format!(
            "column {:?} is {}, which cannot be written as {}; {}",
            field.name(),
            type_name(field.data_type()),
            format.word(),
            advice([Format::Parquet, Format::Arrow, Format::Json].into_iter().filter(|other| holds(*other, field)))
        ))),
    }
}

/// Returns advice for a column that a format does not hold, but `others` do.
pub(super) fn advice(others: impl Iterator<Item = Format>) -> String {
    const SELECT: &str = "select other columns with --columns";
    let others: Vec<Format> = others.collect();
    let Some((last, rest)) = others.split_last() else { return SELECT.into() };
    let rest: Vec<_> = rest.iter().map(|format| format.word()).collect();
    let listed = match rest[..] {
        [] => last.word().to_owned(),
        _ => format!("{} or {}", rest.join(", "), last.word()),
    };
    let example = if others.contains(&Format::Arrow) { Format::Arrow } else { *last };
    format!("write {listed} instead, for example with -o FILE.{}, or {SELECT}", example.extensions()[0])
}

/// True if the libraries write one null and one value of the column, and read them back. For other
/// types, a library returns an error or panics. For some types it does so only when it writes a
/// batch, for some only if there is a value, and for some only when it reads.
pub(super) fn holds(format: Format, field: &Field) -> bool {
    let hold = |values: ArrayRef| -> Option<()> {
        let field = field.clone().with_nullable(true);
        let batch = RecordBatch::try_new(Schema::new(vec![field]).into(), vec![values]).ok()?;
        let mut encoder = Encoder::new(format, b',', batch.schema_ref(), Vec::new()).ok()?;
        encoder.write(&batch).ok()?;
        let bytes = encoder.finish().ok()?;
        match format {
            Format::Parquet => ParquetRecordBatchReader::try_new(Bytes::from(bytes), 1).ok()?.next()?.ok().map(drop),
            Format::Arrow => FileReader::try_new(Cursor::new(bytes), None).ok()?.next()?.ok().map(drop),
            // The stream has the same messages as the file.
            Format::ArrowStream | Format::Csv | Format::Json => Some(()),
        }
    };
    let data_type = field.data_type();
    let both = || hold(new_null_array(data_type, 1)).and_then(|()| hold(one_value(data_type).ok()?));
    panics::caught(both).is_ok_and(|held| held.is_some())
}

/// Returns an array of one value: zero, an empty text, or one value of each type inside.
fn one_value(data_type: &DataType) -> Result<ArrayRef, ArrowError> {
    let built = |buffers: Vec<Buffer>, children: Vec<ArrayRef>| {
        let children = children.iter().map(|child| child.to_data()).collect();
        let data = ArrayData::builder(data_type.clone()).len(1).buffers(buffers).child_data(children);
        Ok(make_array(data.build()?))
    };
    let of = |field: &Field| one_value(field.data_type());
    match data_type {
        DataType::List(item) | DataType::Map(item, _) => {
            built(vec![Buffer::from_slice_ref([0i32, 1])], vec![of(item)?])
        }
        DataType::LargeList(item) => built(vec![Buffer::from_slice_ref([0i64, 1])], vec![of(item)?]),
        DataType::ListView(item) => {
            built(vec![Buffer::from_slice_ref([0i32]), Buffer::from_slice_ref([1i32])], vec![of(item)?])
        }
        DataType::LargeListView(item) => {
            built(vec![Buffer::from_slice_ref([0i64]), Buffer::from_slice_ref([1i64])], vec![of(item)?])
        }
        DataType::FixedSizeList(item, length) => {
            let rows = UInt64Array::from(vec![0; usize::try_from(*length).unwrap_or(0)]);
            built(vec![], vec![take(&of(item)?, &rows, None)?])
        }
        DataType::Struct(fields) => built(vec![], fields.iter().map(|field| of(field)).collect::<Result<_, _>>()?),
        DataType::Union(fields, mode) => {
            let Some((id, first)) = fields.iter().next() else { return Ok(new_empty_array(data_type)) };
            let children = fields.iter().map(|(_, field)| match mode {
                UnionMode::Dense if field != first => Ok(new_empty_array(field.data_type())),
                _ => of(field),
            });
            let mut buffers = vec![Buffer::from_slice_ref([id])];
            buffers.extend((*mode == UnionMode::Dense).then(|| Buffer::from_slice_ref([0i32])));
            built(buffers, children.collect::<Result<_, _>>()?)
        }
        DataType::Dictionary(keys, values) => {
            built(one_value(keys)?.to_data().buffers().to_vec(), vec![one_value(values)?])
        }
        DataType::RunEndEncoded(ends, values) => {
            let one: ArrayRef = std::sync::Arc::new(UInt64Array::from(vec![1]));
            built(vec![], vec![arrow::compute::cast(&one, ends.data_type())?, of(values)?])
        }
        _ => Ok(make_array(new_null_array(data_type, 1).to_data().into_builder().nulls(None).build()?)),
    }
}

/// Refuses dates, times and durations that have no text. Arrow's JSON writer would write an error
/// message instead.
///
/// # Errors
/// [`Error::Invalid`] with the column, the row and advice.
pub(super) fn check_values(format: Format, batch: &RecordBatch) -> Result<()> {
    if !matches!(format, Format::Csv | Format::Json) {
        return Ok(());
    }
    // Otherwise a list would contain the words of an error.
    let options = FormatOptions::default().with_display_error(false);
    for (field, column) in batch.schema().fields().iter().zip(batch.columns()) {
        let times = Times::checked();
        let formatter = times.formatter(column, &options)?;
        if !times.may_lack_text() {
            continue;
        }
        let mut text = String::new();
        for row in 0..batch.num_rows() {
            text.clear();
            if formatter.value(row).write(&mut text).is_err() {
                let shown = Times::Shown.formatter(column, &options)?.value(row).try_to_string()?;
                return Err(without_text(field, &shown, row, batch.num_rows()));
            }
        }
    }
    Ok(())
}

fn without_text(field: &Field, shown: &str, row: usize, rows: usize) -> Error {
    Error::Invalid(format!(
        "column {:?} has a value without text, {shown}, in row {} of a batch of {rows} rows; {}",
        field.name(),
        row + 1,
        advice([Format::Arrow].into_iter())
    ))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use arrow::array::{DurationSecondArray, TimestampMillisecondArray};
    use arrow::datatypes::UnionFields;

    use super::*;

    #[test]
    fn columns_that_a_format_does_not_hold_are_named_with_their_types() {
        let number = Field::new("item", DataType::Int64, true);
        let list = Field::new("l", DataType::List(Arc::new(number.clone())), true);
        let of_either = DataType::Union(UnionFields::from_fields([number]), UnionMode::Dense);
        let union = Field::new("u", DataType::List(Arc::new(Field::new("item", of_either, true))), true);
        let zone = Field::new("t", "Timestamp(s, \"Nowhere/There\")".parse().unwrap(), true);
        let check = |format: Format, field: &Field| {
            let schema = Schema::new(vec![Field::new("k", DataType::Int64, true), field.clone()]);
            check_columns(format, &schema, &schema)
        };
        check(Format::Json, &list).unwrap();
        for (format, field, expected) in [
            (
                Format::Csv,
                &list,
                "column \"l\" is list(int64), which cannot be written as CSV; write Parquet, Arrow or JSON instead, for \
                 example with -o FILE.arrow, or select other columns with --columns",
            ),
            (
                Format::Json,
                &union,
                "column \"u\" is list(dense_union(item: int64)), which cannot be written as JSON; write Arrow instead, \
                 for example with -o FILE.arrow, or select other columns with --columns",
            ),
            (
                Format::Csv,
                &zone,
                "column \"t\" is timestamp(s, Nowhere/There), which cannot be written as CSV; write Parquet or Arrow \
                 instead, for example with -o FILE.arrow, or select other columns with --columns",
            ),
        ] {
            assert_eq!(check(format, field).unwrap_err().message(), expected);
        }
    }

    #[test]
    fn values_beyond_the_calendar_are_refused_with_their_row() {
        let times = TimestampMillisecondArray::from(vec![0, 1 << 62]).with_timezone("UTC");
        let durations = DurationSecondArray::from(vec![0, i64::MIN]);
        let columns: [(ArrayRef, &str); 2] =
            [(Arc::new(times), "4611686018427387904 ms"), (Arc::new(durations), "-9223372036854775808 s")];
        for (column, shown) in columns {
            let batch = RecordBatch::try_from_iter([("at", column)]).unwrap();
            check_values(Format::Parquet, &batch).unwrap();
            check_values(Format::Csv, &batch.slice(0, 1)).unwrap();
            let error = check_values(Format::Csv, &batch).unwrap_err();
            let expected = format!(
                "column \"at\" has a value without text, {shown}, in row 2 of a batch of 2 rows; write Arrow instead, \
                 for example with -o FILE.arrow, or select other columns with --columns"
            );
            assert_eq!(error.message(), expected);
        }
    }
}
