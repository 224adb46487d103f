//! Types of columns, as people name them.

use std::str::FromStr;

use arrow::datatypes::{DataType, TimeUnit};

use crate::{Error, Result};

/// Types by the names of columns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ColumnTypes(pub(super) Vec<(String, DataType)>);

impl ColumnTypes {
    /// What several say, of each column once.
    ///
    /// # Errors
    /// [`Error::Invalid`] when they say different types of one column.
    pub(super) fn together(all: &[Self]) -> Result<Vec<(String, DataType)>> {
        let mut together: Vec<(String, DataType)> = Vec::new();
        for (name, data_type) in all.iter().flat_map(|types| &types.0) {
            match together.iter().find(|(other, _)| other == name) {
                None => together.push((name.clone(), data_type.clone())),
                Some((_, other)) if other == data_type => {}
                Some((_, other)) => {
                    return Err(Error::Invalid(format!(
                        "--types says {} of column {name:?}, and {}; say one of them",
                        name_of(other),
                        name_of(data_type)
                    )));
                }
            }
        }
        Ok(together)
    }
}

impl FromStr for ColumnTypes {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut depth = 0;
        // Types may have commas of their own, in parentheses.
        let parts = text.split(|c: char| {
            depth += i32::from(c == '(') - i32::from(c == ')');
            c == ',' && depth == 0
        });
        let column = |part: &str| -> Result<(String, DataType), String> {
            let (name, text) = part.split_once('=').ok_or("write COLUMN=TYPE, such as id=int64,name=string")?;
            let data_type = parse(text.trim()).ok_or_else(|| {
                format!(
                    "{:?} is no type that CSV is read as; write one such as int64, float64, decimal(15,2), bool, string, \
                     date or timestamp",
                    text.trim()
                )
            })?;
            Ok((name.trim().to_owned(), data_type))
        };
        parts.map(column).collect::<Result<_, String>>().map(Self)
    }
}

/// A type by the name that people give it, or by Arrow's own.
fn parse(text: &str) -> Option<DataType> {
    let lower = text.to_ascii_lowercase();
    let (name, inside) = match lower.strip_suffix(')').and_then(|text| text.split_once('(')) {
        Some((name, inside)) => (name.trim(), Some(inside.trim())),
        None => (lower.as_str(), None),
    };
    let known = match (name, inside) {
        ("int8", None) => DataType::Int8,
        ("int16", None) => DataType::Int16,
        ("int32" | "int", None) => DataType::Int32,
        ("int64" | "bigint", None) => DataType::Int64,
        ("uint8", None) => DataType::UInt8,
        ("uint16", None) => DataType::UInt16,
        ("uint32", None) => DataType::UInt32,
        ("uint64", None) => DataType::UInt64,
        ("float32" | "float", None) => DataType::Float32,
        ("float64" | "double", None) => DataType::Float64,
        ("bool" | "boolean", None) => DataType::Boolean,
        ("string" | "utf8" | "text", None) => DataType::Utf8,
        ("date" | "date32", None) => DataType::Date32,
        ("timestamp", None | Some("us")) => DataType::Timestamp(TimeUnit::Microsecond, None),
        ("timestamp", Some("s")) => DataType::Timestamp(TimeUnit::Second, None),
        ("timestamp", Some("ms")) => DataType::Timestamp(TimeUnit::Millisecond, None),
        ("timestamp", Some("ns")) => DataType::Timestamp(TimeUnit::Nanosecond, None),
        ("decimal", Some(digits)) => {
            let (precision, scale) = digits.split_once(',')?;
            let (precision, scale) = (precision.trim().parse().ok()?, scale.trim().parse().ok()?);
            let is_sound = (1..=38).contains(&precision) && (0..=i8::try_from(precision).ok()?).contains(&scale);
            return is_sound.then_some(DataType::Decimal128(precision, scale));
        }
        _ => return text.parse().ok().filter(can_be_read),
    };
    Some(known)
}

/// Whether Arrow's reader of CSV makes this type of text.
fn can_be_read(data_type: &DataType) -> bool {
    match data_type {
        DataType::Utf8 | DataType::Utf8View | DataType::Boolean | DataType::Timestamp(..) => true,
        DataType::Decimal128(..) | DataType::Date32 | DataType::Date64 | DataType::Time32(_) | DataType::Time64(_) => {
            true
        }
        numbers => numbers.is_integer() || numbers.is_floating(),
    }
}

/// The name by which [`ColumnTypes`] knows a type.
pub fn name_of(data_type: &DataType) -> String {
    match data_type {
        DataType::Utf8 => "string".into(),
        DataType::Boolean => "bool".into(),
        DataType::Date32 => "date".into(),
        DataType::Timestamp(TimeUnit::Microsecond, None) => "timestamp".into(),
        DataType::Timestamp(TimeUnit::Second, None) => "timestamp(s)".into(),
        DataType::Timestamp(TimeUnit::Millisecond, None) => "timestamp(ms)".into(),
        DataType::Timestamp(TimeUnit::Nanosecond, None) => "timestamp(ns)".into(),
        DataType::Decimal128(precision, scale) if *scale >= 0 => format!("decimal({precision},{scale})"),
        other => {
            let name = other.to_string();
            // Int64 and its like; the names of others keep the capitals by which Arrow knows them.
            let lower = name.to_lowercase();
            if parse(&lower).as_ref() == Some(other) { lower } else { name }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn types_are_read_as_people_and_as_arrow_write_them() {
        let types: ColumnTypes =
            "a=int64, b=decimal(15, 2),c=Timestamp,d=timestamp(ns),e=Utf8,f=Utf8View".parse().unwrap();
        let names: Vec<_> = types.0.iter().map(|(name, data_type)| format!("{name} {data_type:?}")).collect();
        let expected = [
            "a Int64",
            "b Decimal128(15, 2)",
            "c Timestamp(Microsecond, None)",
            "d Timestamp(Nanosecond, None)",
            "e Utf8",
            "f Utf8View",
        ];
        assert_eq!(names, expected);
        for (wrong, words) in [
            ("a", "COLUMN=TYPE"),
            ("a=", "is no type"),
            ("a=integerish", "\"integerish\""),
            ("a=decimal(2,5)", "decimal"),
            ("a=LargeBinary", "no type that CSV is read as"),
        ] {
            let error = wrong.parse::<ColumnTypes>().unwrap_err();
            assert!(error.contains(words), "{wrong}: {error}");
        }
    }

    #[test]
    fn a_column_has_one_type_however_often_it_is_said() {
        let together = |all: &[&str]| {
            let all: Vec<ColumnTypes> = all.iter().map(|types| types.parse().unwrap()).collect();
            ColumnTypes::together(&all).map(|types| types.into_iter().map(|(name, _)| name).collect::<Vec<_>>())
        };
        assert_eq!(together(&["a=int64,b=date", "c=string,a=bigint"]).unwrap(), ["a", "b", "c"]);
        for wrong in [&["a=int64,a=string"][..], &["a=int64", "b=date,a=string"]] {
            let error = together(wrong).unwrap_err();
            assert!(error.message().contains("says int64 of column \"a\", and string"), "{error}");
        }
    }

    #[test]
    fn the_name_of_a_type_is_read_as_that_type() {
        for name in
            ["int8", "uint64", "float32", "bool", "string", "date", "timestamp", "timestamp(ns)", "decimal(9,2)"]
        {
            assert_eq!(name_of(&parse(name).unwrap()), name);
        }
        for written in
            ["Utf8View", "Date64", "Time32(s)", "Time64(ns)", "Timestamp(ms, \"UTC\")", "Decimal128(9, -2)", "Float16"]
        {
            let read = parse(written).unwrap_or_else(|| panic!("{written}"));
            assert_eq!(parse(&name_of(&read)), Some(read), "{written}");
        }
    }
}
