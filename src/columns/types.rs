//! What types are made of.

use arrow::datatypes::{DataType, FieldRef};

/// Whether that holds of a type, or of one that its values are made of. The values of dictionaries are not looked at.
pub fn any_part(data_type: &DataType, holds: &dyn Fn(&DataType) -> bool) -> bool {
    let inside = |field: &FieldRef| any_part(field.data_type(), holds);
    if holds(data_type) {
        return true;
    }
    match data_type {
        DataType::List(field)
        | DataType::LargeList(field)
        | DataType::ListView(field)
        | DataType::LargeListView(field)
        | DataType::FixedSizeList(field, _)
        | DataType::Map(field, _) => inside(field),
        DataType::Struct(fields) => fields.iter().any(inside),
        DataType::Union(fields, _) => fields.iter().any(|(_, field)| inside(field)),
        DataType::RunEndEncoded(ends, values) => inside(ends) || inside(values),
        _ => false,
    }
}
