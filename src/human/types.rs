//! Type names that people know.

use arrow::datatypes::{DataType, FieldRef, IntervalUnit, TimeUnit, UnionMode};

/// Returns the name of a type for people. If CSV can be read as the type, this is its name in
/// `--types` of the command line. The Python client uses the same names.
pub fn type_name(data_type: &DataType) -> String {
    use DataType as T;
    let unit = |unit: &TimeUnit| match unit {
        TimeUnit::Second => "s",
        TimeUnit::Millisecond => "ms",
        TimeUnit::Microsecond => "us",
        TimeUnit::Nanosecond => "ns",
    };
    let inner = |field: &FieldRef| type_name(field.data_type());
    let named = |fields: Vec<&FieldRef>| {
        let fields = fields.into_iter().map(|field| format!("{}: {}", field.name(), inner(field)));
        fields.collect::<Vec<_>>().join(", ")
    };
    match data_type {
        T::Utf8 => "string".into(),
        T::LargeUtf8 => "large_string".into(),
        T::Utf8View => "string_view".into(),
        T::LargeBinary => "large_binary".into(),
        T::BinaryView => "binary_view".into(),
        T::FixedSizeBinary(bytes) => format!("fixed_size_binary({bytes})"),
        T::Boolean => "bool".into(),
        T::Date32 => "date".into(),
        T::Timestamp(TimeUnit::Microsecond, None) => "timestamp".into(),
        T::Timestamp(of, None) => format!("timestamp({})", unit(of)),
        T::Timestamp(of, Some(zone)) => format!("timestamp({}, {zone})", unit(of)),
        T::Time32(of) => format!("time32({})", unit(of)),
        T::Time64(of) => format!("time64({})", unit(of)),
        T::Duration(of) => format!("duration({})", unit(of)),
        T::Interval(IntervalUnit::YearMonth) => "month_interval".into(),
        T::Interval(IntervalUnit::DayTime) => "day_time_interval".into(),
        T::Interval(IntervalUnit::MonthDayNano) => "month_day_nano_interval".into(),
        T::Decimal128(precision, scale) => format!("decimal({precision},{scale})"),
        T::Decimal32(precision, scale) => format!("decimal32({precision},{scale})"),
        T::Decimal64(precision, scale) => format!("decimal64({precision},{scale})"),
        T::Decimal256(precision, scale) => format!("decimal256({precision},{scale})"),
        T::List(field) => format!("list({})", inner(field)),
        T::LargeList(field) => format!("large_list({})", inner(field)),
        T::ListView(field) => format!("list_view({})", inner(field)),
        T::LargeListView(field) => format!("large_list_view({})", inner(field)),
        T::FixedSizeList(field, length) => format!("fixed_size_list({}, {length})", inner(field)),
        T::Struct(fields) => format!("struct({})", named(fields.iter().collect())),
        T::Union(fields, mode) => {
            let mode = if *mode == UnionMode::Sparse { "sparse" } else { "dense" };
            format!("{mode}_union({})", named(fields.iter().map(|(_, field)| field).collect()))
        }
        T::Map(entries, _) => match entries.data_type() {
            T::Struct(fields) => format!("map({})", fields.iter().map(inner).collect::<Vec<_>>().join(", ")),
            other => format!("map({})", type_name(other)),
        },
        T::RunEndEncoded(ends, values) => format!("run_end_encoded({}, {})", inner(ends), inner(values)),
        T::Dictionary(keys, values) => format!("dictionary({}, {})", type_name(keys), type_name(values)),
        // Null, Binary, Date64 and the numbers.
        other => other.to_string().to_lowercase(),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use arrow::datatypes::{Field, UnionFields};

    use super::*;

    /// The Python client uses the same names; the examples of its `name_of` contain them too.
    #[test]
    fn every_kind_of_type_has_a_name() {
        let list = DataType::new_list(DataType::Struct(vec![Field::new("a", DataType::Date32, true)].into()), true);
        let dictionary = DataType::Dictionary(DataType::Int32.into(), DataType::Utf8.into());
        let field = |name: &str, data_type: DataType| Arc::new(Field::new(name, data_type, true));
        let entries = vec![field("key", DataType::Utf8), field("value", DataType::Decimal128(9, 2))];
        let map = DataType::Map(field("entries", DataType::Struct(entries.into())), false);
        let union = UnionFields::try_new([0, 5], [field("a", DataType::Int32), field("b", DataType::Date32)]).unwrap();
        for (data_type, name) in [
            (map, "map(string, decimal(9,2))"),
            (DataType::Union(union.clone(), UnionMode::Sparse), "sparse_union(a: int32, b: date)"),
            (DataType::Union(union, UnionMode::Dense), "dense_union(a: int32, b: date)"),
            (DataType::Interval(IntervalUnit::YearMonth), "month_interval"),
            (DataType::Interval(IntervalUnit::MonthDayNano), "month_day_nano_interval"),
            (DataType::ListView(field("item", DataType::Int8)), "list_view(int8)"),
            (DataType::LargeListView(field("item", DataType::Date32)), "large_list_view(date)"),
            (
                DataType::RunEndEncoded(field("run_ends", DataType::Int32), field("values", DataType::Utf8)),
                "run_end_encoded(int32, string)",
            ),
            (DataType::Duration(TimeUnit::Second), "duration(s)"),
            (DataType::Decimal128(9, -2), "decimal(9,-2)"),
            (DataType::Binary, "binary"),
            (list, "list(struct(a: date))"),
            (dictionary, "dictionary(int32, string)"),
            (DataType::FixedSizeBinary(3), "fixed_size_binary(3)"),
            (DataType::Decimal256(40, 2), "decimal256(40,2)"),
            (DataType::Decimal64(9, 2), "decimal64(9,2)"),
            (DataType::Null, "null"),
        ] {
            assert_eq!(type_name(&data_type), name);
        }
    }
}
