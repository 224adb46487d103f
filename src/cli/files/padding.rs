//! Nulls that Parquet's reader makes for the rows of a null struct.
//!
//! A row of a null struct takes a place in the arrays below it. The reader (parquet 59.3) fills
//! some of these places with nulls: those of lists of a fixed size, and all places inside of lists
//! and maps. A struct or list that may not be null gets no bitmap. Where its values may not be null
//! either, nothing hides their nulls, and Arrow refuses the array. Here such structs and lists get
//! the nulls of the struct above them.

use arrow::array::{ArrayData, RecordBatch, RecordBatchOptions, make_array};
use arrow::buffer::NullBuffer;
use arrow::datatypes::{DataType, Field};
use arrow::error::ArrowError;

use crate::columns::{any_part, children};

/// True for types that the reader may give nulls that nothing hides.
pub(super) fn has_padding(data_type: &DataType) -> bool {
    any_part(
        data_type,
        &|part| matches!(part, DataType::Struct(fields) if fields.iter().any(|field| has_no_bitmap(field))),
    )
}

/// True for fields that take a place in each row of their parent and may not be null, with values
/// that may not be null.
fn has_no_bitmap(field: &Field) -> bool {
    let takes_place = matches!(field.data_type(), DataType::Struct(_) | DataType::FixedSizeList(..));
    takes_place && !field.is_nullable() && children(field.data_type()).into_iter().any(|value| !value.is_nullable())
}

/// Returns the batch with the nulls of structs in the fields that they hide.
///
/// # Errors
/// Arrow's, for a null in a field that may not be null, and that no struct hides.
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

/// Adds the nulls of the parent to the array, if its field may not be null. Values without parts
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
