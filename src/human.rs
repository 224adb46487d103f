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

/// `; did you mean "orders"?` where exactly one of the known names is close to one that is not known: equal but for case, or two
/// letters away at most, and no more than a third of them (or one of two). It goes to the end of a sentence, and is empty otherwise.
pub fn did_you_mean<'a>(name: &str, known: impl IntoIterator<Item = &'a str>) -> String {
    let lower = name.to_lowercase();
    let distance = |other: &str| strsim::osa_distance(&lower, &other.to_lowercase());
    let length = name.chars().count();
    let near = known.into_iter().map(|other| (distance(other), other));
    let is_near =
        |distance: usize| distance == 0 || (distance <= 2 && distance < length && 3 * distance <= length.max(3));
    let near: Vec<_> = near.filter(|&(distance, _)| is_near(distance)).collect();
    // Another spelling of the same name is closer than anything else.
    let same: Vec<_> = near.iter().filter(|(distance, _)| *distance == 0).collect();
    match (same.as_slice(), near.as_slice()) {
        ([(_, only)], _) | ([], [(_, only)]) => format!("; did you mean {only:?}?"),
        _ => String::new(),
    }
}

/// Why the system refuses a file, in plain words and without its numbers.
pub fn file_failure(path: &std::path::Path, error: &std::io::Error) -> String {
    use std::io::ErrorKind as K;
    let above = || path.ancestors().skip(1).filter(|above| !above.as_os_str().is_empty());
    match error.kind() {
        K::NotFound => match above().filter(|above| !above.exists()).last() {
            Some(missing) => format!("there is no such folder as {}", missing.display()),
            None => "there is no such file".into(),
        },
        K::NotADirectory => match above().find(|above| above.is_file()) {
            Some(file) => format!("{} is a file, and no folder", file.display()),
            None => "what should be a folder is none".into(),
        },
        K::IsADirectory => "it is a folder, and a file is needed".into(),
        K::PermissionDenied => "whoever runs this may not do that to it".into(),
        K::StorageFull => "the disk is full".into(),
        K::ReadOnlyFilesystem => "it is on a file system that is read only".into(),
        K::InvalidData => "it is not UTF-8 text".into(),
        _ => system_words(error),
    }
}

/// What the system says, without the number by which it knows it.
pub fn system_words(error: impl std::fmt::Display) -> String {
    let said = error.to_string();
    said.split_once(" (os error ").map_or(said.as_str(), |(words, _)| words).to_owned()
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
    fn one_name_that_is_close_is_meant() {
        for (name, known, meant) in [
            ("orders", &["order", "lineitem"][..], "; did you mean \"order\"?"),
            ("odrers", &["orders"], "; did you mean \"orders\"?"),
            ("G", &["a", "g"], "; did you mean \"g\"?"),
            // The same but for case counts before what has other letters.
            ("L_Tax", &["l_tax", "l_tag"], "; did you mean \"l_tax\"?"),
            // Which of two is meant, nobody knows.
            ("keys", &["key", "keyz"], ""),
            ("q", &["a", "b"], ""),
            ("q", &["a"], ""),
            ("id", &["k"], ""),
            ("orders", &[], ""),
        ] {
            assert_eq!(did_you_mean(name, known.iter().copied()), meant, "{name}");
        }
    }

    #[test]
    fn what_the_system_has_against_a_file_is_said_without_its_numbers() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        std::fs::write(at("file"), [0xff, 0xfe]).unwrap();
        let read = |name: &str| file_failure(&at(name), &std::fs::read_to_string(at(name)).unwrap_err());
        assert_eq!(read("none"), "there is no such file");
        assert_eq!(read("no/such/file"), format!("there is no such folder as {}", at("no").display()));
        assert_eq!(read("file/x"), format!("{} is a file, and no folder", at("file").display()));
        assert_eq!(read(""), "it is a folder, and a file is needed");
        assert_eq!(read("file"), "it is not UTF-8 text");
        assert_eq!(system_words(std::io::Error::from_raw_os_error(4)), "Interrupted system call");
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
