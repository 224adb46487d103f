//! Types that Parquet does not have, and the types that take their place.

use std::sync::Arc;

use arrow::array::{Array, ArrayRef, RecordBatch, RecordBatchOptions};
use arrow::compute::{CastOptions, cast_with_options};
use arrow::datatypes::{DataType, Field, FieldRef, Schema, SchemaRef, TimeUnit};
use arrow::util::display::FormatOptions;

use super::Format;
use super::supported::{advice, holds};
use crate::cli::times::Times;
use crate::columns::map_leaves;
use crate::human::type_name;
use crate::{Error, Result, panics};

/// Returns the schema with types that Parquet has. Parquet has no times in whole seconds and no
/// days in milliseconds; other readers would find numbers instead. The Parquet library has no
/// dictionaries of some types.
pub(super) fn parquet_schema(schema: &Schema) -> SchemaRef {
    let field = |field: &FieldRef| {
        Arc::new(field.as_ref().clone().with_data_type(map_leaves(field.data_type(), &mut parquet_leaf)))
    };
    let fields: Vec<FieldRef> = schema.fields().iter().map(field).collect();
    Arc::new(Schema::new_with_metadata(fields, schema.metadata().clone()))
}

fn parquet_leaf(data_type: &DataType) -> DataType {
    match data_type {
        DataType::Timestamp(TimeUnit::Second, zone) => DataType::Timestamp(TimeUnit::Millisecond, zone.clone()),
        DataType::Time32(TimeUnit::Second) => DataType::Time32(TimeUnit::Millisecond),
        DataType::Date64 => DataType::Date32,
        DataType::Dictionary(_, values) => {
            let values_type = parquet_leaf(values);
            let holds_it = || holds(Format::Parquet, &Field::new("c", data_type.clone(), true));
            if values_type == **values && holds_it() { data_type.clone() } else { values_type }
        }
        // The library writes the values of runs.
        DataType::RunEndEncoded(_, values) => match map_leaves(values.data_type(), &mut parquet_leaf) {
            written if written == *values.data_type() => data_type.clone(),
            written => written,
        },
        other => other.clone(),
    }
}

/// Casts the batch to the types of [`parquet_schema`].
///
/// # Errors
/// [`Error::Invalid`] with the column, for a value that its type in Parquet does not hold.
pub(super) fn in_parquet(batch: &RecordBatch, schema: &SchemaRef) -> Result<RecordBatch> {
    let columns = batch.columns().iter().zip(schema.fields());
    let columns = columns.map(|(column, field)| cast_exactly(column, field)).collect::<Result<Vec<_>>>()?;
    let rows = RecordBatchOptions::new().with_row_count(Some(batch.num_rows()));
    Ok(RecordBatch::try_new_with_options(schema.clone(), columns, &rows)?)
}

fn cast_exactly(column: &ArrayRef, field: &Field) -> Result<ArrayRef> {
    if column.data_type() == field.data_type() {
        return Ok(column.clone());
    }
    if let Some(values) = exact(column, field.data_type()) {
        return Ok(values);
    }
    let unfit = (0..column.len()).find(|row| exact(&column.slice(*row, 1), field.data_type()).is_none());
    let row = unfit.unwrap_or(0);
    let shown = Times::Shown.formatter(column, &FormatOptions::default())?.value(row).try_to_string()?;
    Err(Error::Invalid(format!(
        "column {:?} is {} and becomes {} in Parquet, which cannot hold {shown}, in row {} of a batch of {} rows; {}",
        field.name(),
        type_name(column.data_type()),
        type_name(field.data_type()),
        row + 1,
        column.len(),
        advice([Format::Arrow].into_iter())
    )))
}

/// Returns the values as another type; `None` if a value would become another one. Arrow's cast
/// from milliseconds to days drops the time of day.
fn exact(column: &ArrayRef, data_type: &DataType) -> Option<ArrayRef> {
    let options = CastOptions { safe: false, ..CastOptions::default() };
    let cast = |values: &ArrayRef, data_type: &DataType| {
        panics::caught(|| cast_with_options(values, data_type, &options)).ok()?.ok()
    };
    let values = cast(column, data_type)?;
    let mut has_days = false;
    let plain = map_leaves(column.data_type(), &mut |leaf| {
        let plain = match leaf {
            DataType::Dictionary(_, values) => &**values,
            DataType::RunEndEncoded(_, values) => values.data_type(),
            leaf => leaf,
        };
        has_days |= *plain == DataType::Date64;
        plain.clone()
    });
    let is_exact = || Some(cast(&values, &plain)? == cast(column, &plain)?);
    (!has_days || is_exact().unwrap_or(false)).then_some(values)
}
