//! Numbers and types as people read them, in one form wherever one is shown. Bytes are in [`memory`](crate::memory::human_bytes).

use arrow::datatypes::{DataType, FieldRef, IntervalUnit, TimeUnit, UnionMode};

/// A whole number with thousands apart: `6,001,215`.
pub fn count(number: u64) -> String {
    let digits = number.to_string();
    let groups = digits.as_bytes().rchunks(3).rev();
    groups.map(|group| std::str::from_utf8(group).unwrap_or_default()).collect::<Vec<_>>().join(",")
}

/// A number of things: `1 partition`, `4,096 partitions`.
pub fn counted(number: u64, thing: &str) -> String {
    counted_as(number, thing, &format!("{thing}s"))
}

/// As [`counted`], of things whose plural is not made with an s at the end: `1 job that runs`, `2 jobs that run`.
pub fn counted_as(number: u64, one: &str, many: &str) -> String {
    format!("{} {}", count(number), if number == 1 { one } else { many })
}

/// A span of time in the unit a person would choose: `850 µs`, `12.3 ms`, `4.56 s`, `3 min 20 s`.
pub fn seconds(seconds: f64) -> String {
    match seconds {
        s if s <= 0.0 => "0 s".into(),
        s if s < 0.999_5e-3 => format!("{:.0} µs", (s * 1e6).max(1.0)),
        s if s < 0.999_5 => format!("{:.1} ms", s * 1e3),
        s if s < 99.5 => format!("{s:.2} s"),
        s if s.is_finite() => whole_seconds(s as u64),
        _ => "forever".into(),
    }
}

/// A span of time that is not known better than to the second: `7 s`, `3 min 20 s`, `2 h 5 min`.
pub fn whole_seconds(seconds: u64) -> String {
    match seconds {
        s if s < 60 => format!("{s} s"),
        s if s < 3600 => format!("{} min {} s", s / 60, s % 60),
        s => format!("{} h {} min", count(s / 3600), s % 3600 / 60),
    }
}

/// The name by which people are told a type: the one by which `--types` of the command line knows it, if CSV is
/// read as it. The Python client tells the same.
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

    #[test]
    fn counts_have_their_thousands_apart() {
        let counts = [
            (0, "0"),
            (999, "999"),
            (1000, "1,000"),
            (6_001_215, "6,001,215"),
            (u64::MAX, "18,446,744,073,709,551,615"),
        ];
        for (number, text) in counts {
            assert_eq!(count(number), text);
        }
        assert_eq!(counted(1, "row"), "1 row");
        assert_eq!(counted(0, "row"), "0 rows");
        assert_eq!(counted(1200, "row"), "1,200 rows");
        assert_eq!(counted_as(1, "job that runs", "jobs that run"), "1 job that runs");
        assert_eq!(counted_as(2, "job that runs", "jobs that run"), "2 jobs that run");
    }

    #[test]
    fn spans_are_in_the_unit_a_person_would_choose() {
        let spans = [
            (0.0, "0 s"),
            (1e-9, "1 µs"),
            (850e-6, "850 µs"),
            (0.0123, "12.3 ms"),
            (4.56, "4.56 s"),
            (99.6, "1 min 39 s"),
            (200.0, "3 min 20 s"),
            (7500.0, "2 h 5 min"),
            (f64::INFINITY, "forever"),
        ];
        for (number, text) in spans {
            assert_eq!(seconds(number), text);
        }
        assert_eq!(whole_seconds(7), "7 s");
    }

    /// The Python client tells the same names; the examples of its `name_of` have them, too.
    #[test]
    fn types_have_names_of_their_kind() {
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
