//! What types are made of.

use arrow::datatypes::{DataType, Field};

/// The fields directly inside a type. The values of dictionaries have none of their own.
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

/// Whether that holds of a type, or of one that its values are made of. The values of dictionaries are not looked at.
pub fn any_part(data_type: &DataType, holds: &dyn Fn(&DataType) -> bool) -> bool {
    holds(data_type) || children(data_type).into_iter().any(|field| any_part(field.data_type(), holds))
}
