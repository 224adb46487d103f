//! Component types of nested Arrow types.

use std::sync::Arc;

use arrow::datatypes::{DataType, Field, FieldRef};

/// Returns the fields directly inside a type. A dictionary type has none.
pub fn children(data_type: &DataType) -> Vec<&Field> {
    use DataType as T;
    match data_type {
        T::List(field)
        | T::LargeList(field)
        | T::ListView(field)
        | T::LargeListView(field)
        | T::FixedSizeList(field, _)
        | T::Map(field, _) => vec![field],
        T::Struct(fields) => fields.iter().map(AsRef::as_ref).collect(),
        T::Union(fields, _) => fields.iter().map(|(_, field)| field.as_ref()).collect(),
        T::RunEndEncoded(run_ends, values) => vec![run_ends, values],
        _ => Vec::new(),
    }
}

/// Returns a type with other leaves. Lists, maps and structs have leaves inside. All other types
/// are leaves themselves.
pub fn map_leaves(data_type: &DataType, leaf: &mut dyn FnMut(&DataType) -> DataType) -> DataType {
    use DataType as T;
    let mut inside =
        |field: &FieldRef| Arc::new(field.as_ref().clone().with_data_type(map_leaves(field.data_type(), leaf)));
    match data_type {
        T::List(field) => T::List(inside(field)),
        T::LargeList(field) => T::LargeList(inside(field)),
        T::ListView(field) => T::ListView(inside(field)),
        T::LargeListView(field) => T::LargeListView(inside(field)),
        T::FixedSizeList(field, length) => T::FixedSizeList(inside(field), *length),
        T::Map(field, is_sorted) => T::Map(inside(field), *is_sorted),
        T::Struct(fields) => T::Struct(fields.iter().map(inside).collect()),
        other => leaf(other),
    }
}

/// True if `holds` is true for a type or for any type inside it. Value types of dictionaries are
/// not checked.
pub fn any_part(data_type: &DataType, holds: &dyn Fn(&DataType) -> bool) -> bool {
    holds(data_type) || children(data_type).into_iter().any(|field| any_part(field.data_type(), holds))
}
