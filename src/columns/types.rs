//! Component types of nested Arrow types.

use arrow::datatypes::{DataType, Field};

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

/// True if `holds` is true for a type or for any type inside it. Value types of dictionaries are
/// not checked.
pub fn any_part(data_type: &DataType, holds: &dyn Fn(&DataType) -> bool) -> bool {
    holds(data_type) || children(data_type).into_iter().any(|field| any_part(field.data_type(), holds))
}
