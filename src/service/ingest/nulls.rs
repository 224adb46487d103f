//! Nulls in fields that may not be null.
//!
//! Arrow validates the bitmaps of arrays. Dictionary values, run values and the children of unions
//! can be null as well. Such a null counts only if a row refers to it. A row that is null itself
//! hides the nulls below it.

use std::sync::Arc;

use arrow::array::{Array, ArrayRef, AsArray, UnionArray};
use arrow::buffer::{BooleanBuffer, NullBuffer};
use arrow::datatypes::{DataType, Field, Int16Type, Int32Type, Int64Type, UnionFields};

use crate::columns::children;
use crate::human::type_name;
use crate::{Context, Error, Result};

/// Refuses a null that a row has in a field that may not be null: `field` or a field inside of it.
///
/// # Errors
/// [`Error::Invalid`] names the row and the field.
pub(super) fn check_nulls(field: &Field, array: &ArrayRef) -> Result<()> {
    if needs_check(field) { check(field, array, None) } else { Ok(()) }
}

/// True if Arrow's own validation of bitmaps does not cover the field.
fn needs_check(field: &Field) -> bool {
    use DataType as T;
    let own = match field.data_type() {
        T::Null | T::Dictionary(..) | T::RunEndEncoded(..) | T::Union(..) => !field.is_nullable(),
        _ => false,
    };
    own || match field.data_type() {
        T::ListView(item) | T::LargeListView(item) if !item.is_nullable() => true,
        T::RunEndEncoded(_, values) if !values.is_nullable() => true,
        T::Union(fields, _) if fields.iter().any(|(_, field)| !field.is_nullable()) => true,
        T::Dictionary(_, values) => children(values).into_iter().any(needs_check),
        other => children(other).into_iter().any(needs_check),
    }
}

/// Checks an array. The nulls of `hidden` mark rows that a null further up hides, or that no row
/// refers to.
fn check(field: &Field, array: &ArrayRef, hidden: Option<&NullBuffer>) -> Result<()> {
    let nulls = array.logical_nulls().filter(|nulls| nulls.null_count() > 0);
    if let Some(nulls) = nulls.as_ref().filter(|_| !field.is_nullable())
        && let Some(row) =
            (0..nulls.len()).find(|&row| nulls.is_null(row) && hidden.is_none_or(|hidden| hidden.is_valid(row)))
    {
        return Err(Error::Invalid(format!(
            "field {:?} of type {} is declared not null, and its value {row} is null; fill in a value, or declare the field nullable",
            field.name(),
            type_name(field.data_type()),
        )));
    }
    check_children(array, NullBuffer::union(nulls.as_ref(), hidden).as_ref())
        .context(|| format!("inside {:?}", field.name()))
}

fn check_children(array: &ArrayRef, hidden: Option<&NullBuffer>) -> Result<()> {
    use DataType as T;
    match array.data_type() {
        T::Struct(fields) => {
            let mut columns = fields.iter().zip(array.as_struct().columns());
            columns.try_for_each(|(field, column)| check(field, column, hidden))
        }
        T::FixedSizeList(field, size) => {
            let hidden = hidden.map(|hidden| hidden.expand(*size as usize));
            check(field, array.as_fixed_size_list().values(), hidden.as_ref())
        }
        T::List(field) => check(field, array.as_list::<i32>().values(), None),
        T::LargeList(field) => check(field, array.as_list::<i64>().values(), None),
        T::ListView(field) => check(field, array.as_list_view::<i32>().values(), None),
        T::LargeListView(field) => check(field, array.as_list_view::<i64>().values(), None),
        T::Map(field, _) => check(field, &(Arc::new(array.as_map().entries().clone()) as ArrayRef), None),
        T::Union(fields, _) => check_union(fields, array.as_union(), hidden),
        T::RunEndEncoded(ends, field) => match ends.data_type() {
            T::Int16 => check(field, array.as_run::<Int16Type>().values(), None),
            T::Int32 => check(field, array.as_run::<Int32Type>().values(), None),
            _ => check(field, array.as_run::<Int64Type>().values(), None),
        },
        T::Dictionary(..) => check_children(array.as_any_dictionary().values(), None),
        _ => Ok(()),
    }
}

/// Checks the children of a union. In a sparse union, only rows that select the child are checked;
/// in a dense union, all values.
fn check_union(fields: &UnionFields, union: &UnionArray, hidden: Option<&NullBuffer>) -> Result<()> {
    for (id, field) in fields.iter() {
        let is_selected = || NullBuffer::new(BooleanBuffer::from_iter(union.type_ids().iter().map(|&own| own == id)));
        let hidden = match union.offsets() {
            None => NullBuffer::union(hidden, Some(&is_selected())),
            Some(_) => None,
        };
        check(field, union.child(id), hidden.as_ref())?;
    }
    Ok(())
}
