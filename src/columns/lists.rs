//! Lists of values that may not be null, checked only for nulls that a row of the list has.
//!
//! Arrow's constructors refuse values that might have a null: a dictionary with a null that no
//! key refers to, or a sparse union with a null in a row that selects another child. Uploads with
//! such values are valid and are accepted.

use arrow::array::{Array, ArrayData, ArrayRef, GenericListArray, GenericListViewArray, OffsetSizeTrait};
use arrow::buffer::{Buffer, NullBuffer, OffsetBuffer, ScalarBuffer};
use arrow::datatypes::{DataType, FieldRef};
use arrow::error::ArrowError;

/// Builds a list array over the given parts.
///
/// # Errors
/// The errors of Arrow, for parts that do not fit together, and for a null among values that may
/// not be null.
pub fn list_array<O: OffsetSizeTrait>(
    field: &FieldRef,
    offsets: OffsetBuffer<O>,
    values: ArrayRef,
    nulls: Option<NullBuffer>,
) -> Result<GenericListArray<O>, ArrowError> {
    if !only_seems_null(field, &values) {
        return GenericListArray::try_new(field.clone(), offsets, values, nulls);
    }
    let data_type = GenericListArray::<O>::DATA_TYPE_CONSTRUCTOR(field.clone());
    let rows = offsets.len() - 1;
    Ok(GenericListArray::from(assemble(data_type, rows, vec![offsets.into_inner().into_inner()], &values, nulls)?))
}

/// Builds a list view array over the given parts.
///
/// # Errors
/// The errors of [`list_array`].
pub fn list_view_array<O: OffsetSizeTrait>(
    field: &FieldRef,
    offsets: ScalarBuffer<O>,
    sizes: ScalarBuffer<O>,
    values: ArrayRef,
    nulls: Option<NullBuffer>,
) -> Result<GenericListViewArray<O>, ArrowError> {
    if !only_seems_null(field, &values) {
        return GenericListViewArray::try_new(field.clone(), offsets, sizes, values, nulls);
    }
    let data_type = GenericListViewArray::<O>::DATA_TYPE_CONSTRUCTOR(field.clone());
    let rows = offsets.len();
    let buffers = vec![offsets.into_inner(), sizes.into_inner()];
    Ok(GenericListViewArray::from(assemble(data_type, rows, buffers, &values, nulls)?))
}

/// True if Arrow's constructors would refuse the values for nulls that no row has.
fn only_seems_null(field: &FieldRef, values: &ArrayRef) -> bool {
    !field.is_nullable() && values.is_nullable() && values.logical_null_count() == 0
}

fn assemble(
    data_type: DataType,
    rows: usize,
    buffers: Vec<Buffer>,
    values: &ArrayRef,
    nulls: Option<NullBuffer>,
) -> Result<ArrayData, ArrowError> {
    ArrayData::builder(data_type).len(rows).buffers(buffers).add_child_data(values.to_data()).nulls(nulls).build()
}
