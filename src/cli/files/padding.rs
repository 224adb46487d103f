//! Nulls that Parquet's reader makes for the rows of a null struct.
//!
//! A null struct still takes a place in each of its child arrays. The reader (parquet 59.3) puts
//! nulls into some of these places: into lists of a fixed size, and everywhere inside of lists and
//! maps. A non-nullable struct or list gets no bitmap. If its values are non-nullable too, no
//! bitmap hides the nulls in these values, and Arrow refuses the array. This module gives such
//! structs and lists the nulls of the struct above them.

use arrow::array::{ArrayData, RecordBatch, RecordBatchOptions, make_array};
use arrow::buffer::NullBuffer;
use arrow::datatypes::{DataType, Field};
use arrow::error::ArrowError;

use crate::columns::{any_part, children};

/// True for types in which the reader may make nulls that no bitmap hides.
pub(super) fn has_padding(data_type: &DataType) -> bool {
    any_part(
        data_type,
        &|part| matches!(part, DataType::Struct(fields) if fields.iter().any(|field| has_no_bitmap(field))),
    )
}

/// True for non-nullable structs and lists of fixed size that contain non-nullable values.
fn has_no_bitmap(field: &Field) -> bool {
    let takes_place = matches!(field.data_type(), DataType::Struct(_) | DataType::FixedSizeList(..));
    takes_place && !field.is_nullable() && children(field.data_type()).into_iter().any(|value| !value.is_nullable())
}

/// Returns the batch, with the nulls of each struct added to the fields that the struct hides.
///
/// # Errors
/// Arrow's, for a null in a non-nullable field, if no struct hides the null.
pub(super) fn hide_padding(batch: &RecordBatch) -> Result<RecordBatch, ArrowError> {
    let schema = batch.schema();
    let columns =
        schema.fields().iter().zip(batch.columns()).map(|(field, column)| match has_padding(field.data_type()) {
            true => Ok(make_array(hidden(field, column.to_data(), None)?)),
            false => Ok(column.clone()),
        });
    let columns = columns.collect::<Result<_, ArrowError>>()?;
    let options = RecordBatchOptions::new().with_row_count(Some(batch.num_rows()));
    RecordBatch::try_new_with_options(schema.clone(), columns, &options)
}

/// Adds the nulls of the parent to the array, if `field` is non-nullable. Arrays without children
/// stay as they are.
fn hidden(field: &Field, array: ArrayData, parent: Option<&NullBuffer>) -> Result<ArrayData, ArrowError> {
    let fields = children(array.data_type());
    if fields.is_empty() {
        return Ok(array);
    }
    let parent = parent.filter(|_| !field.is_nullable());
    let nulls = NullBuffer::union(array.nulls(), parent);
    let below = match array.data_type() {
        DataType::Struct(_) => nulls.clone(),
        DataType::FixedSizeList(_, size) => nulls.as_ref().map(|nulls| nulls.expand(*size as usize)),
        // A null list of another kind has no values.
        _ => None,
    };
    let fields = fields.into_iter().zip(array.child_data());
    let values = fields.map(|(field, child)| hidden(field, child.clone(), below.as_ref())).collect::<Result<_, _>>()?;
    array.into_builder().nulls(nulls).child_data(values).build()
}
