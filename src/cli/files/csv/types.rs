//! Types of columns, as people name them.

use std::str::FromStr;
use std::sync::Arc;

use arrow::array::timezone::Tz;
use arrow::datatypes::{DataType, TimeUnit};

use super::records::{is_zoned, plain_decimal};
use crate::cli::names::Words;
use crate::human::type_name;
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
                        type_name(other),
                        type_name(data_type)
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
        const WRITE: &str = "write COLUMN=TYPE, such as id=int64,name=string";
        let (mut rest, mut types) = (Words::with_parentheses(text), Vec::new());
        loop {
            let name = rest.name(&[',', '='], WRITE)?;
            if !rest.pass('=') {
                return Err(WRITE.into());
            }
            types.push((name.text, parse(rest.before(&[',']).trim())?));
            if !rest.next_is(',')? {
                return Ok(Self(types));
            }
        }
    }
}

/// A type by the name that people give it, or by Arrow's own. The Python client knows the same
/// (`clients/python/src/dovetail/_types.py`).
fn parse(text: &str) -> Result<DataType, String> {
    let unknown = || {
        format!(
            "{text:?} is no type that CSV is read as; write one such as int64, float64, decimal(15,2), bool, string, date or \
             timestamp"
        )
    };
    let (name, inside) = match text.strip_suffix(')').and_then(|text| text.split_once('(')) {
        Some((name, inside)) => (name.trim(), Some(inside.trim())),
        None => (text, None),
    };
    let known = match (name.to_ascii_lowercase().as_str(), inside) {
        ("int8", None) => DataType::Int8,
        ("int16", None) => DataType::Int16,
        ("int32" | "int", None) => DataType::Int32,
        ("int64" | "bigint", None) => DataType::Int64,
        ("uint8", None) => DataType::UInt8,
        ("uint16", None) => DataType::UInt16,
        ("uint32", None) => DataType::UInt32,
        ("uint64", None) => DataType::UInt64,
        ("float16", None) => DataType::Float16,
        ("float32" | "float", None) => DataType::Float32,
        ("float64" | "double", None) => DataType::Float64,
        ("bool" | "boolean", None) => DataType::Boolean,
        ("string" | "utf8" | "text", None) => DataType::Utf8,
        ("large_string" | "largeutf8", None) => DataType::LargeUtf8,
        ("string_view" | "utf8view", None) => DataType::Utf8View,
        ("date" | "date32", None) => DataType::Date32,
        ("date64", None) => DataType::Date64,
        ("timestamp", None) => DataType::Timestamp(TimeUnit::Microsecond, None),
        ("timestamp", Some(inside)) => {
            let (unit, zone) = inside.split_once(',').map_or((inside, None), |(unit, zone)| (unit, Some(zone)));
            let zone = zone.map(time_zone).transpose()?.flatten();
            DataType::Timestamp(unit_named(unit.trim()).ok_or_else(unknown)?, zone)
        }
        ("time32", Some(unit)) => match unit_named(unit) {
            Some(unit @ (TimeUnit::Second | TimeUnit::Millisecond)) => DataType::Time32(unit),
            _ => return Err(unknown()),
        },
        ("time64", Some(unit)) => match unit_named(unit) {
            Some(unit @ (TimeUnit::Microsecond | TimeUnit::Nanosecond)) => DataType::Time64(unit),
            _ => return Err(unknown()),
        },
        ("decimal" | "decimal128", Some(digits)) => return decimal(text, digits),
        _ => return Err(unknown()),
    };
    Ok(known)
}

/// Whether CSV is read as a type: whether somebody could say it.
pub(in crate::cli::files) fn is_read_as(data_type: &DataType) -> bool {
    parse(&type_name(data_type)).is_ok_and(|known| known == *data_type)
}

fn decimal(text: &str, digits: &str) -> Result<DataType, String> {
    let number = |text: &str| text.trim().parse::<u8>().ok();
    let digits = digits.split_once(',').and_then(|(precision, scale)| Some((number(precision)?, number(scale)?)));
    match digits {
        Some((precision @ 1..=38, scale)) if scale <= precision => Ok(DataType::Decimal128(precision, scale as i8)),
        _ => Err(format!(
            "{text:?} is no type that CSV is read as; a decimal(PRECISION,SCALE) has a precision of 1 to 38, and a scale of 0 to \
             that"
        )),
    }
}

/// Types that may have a value, and have those of another type: none where only text has both. The Python client advises the same
/// (`taking` in `clients/python/src/dovetail/_types.py`).
pub(super) fn taking(data_type: &DataType, value: &str) -> Vec<DataType> {
    use DataType as T;
    use TimeUnit as U;
    let is_number = data_type.is_numeric();
    let value = if is_number { value.trim_matches([' ', '\t']) } else { value };
    let number = if is_number { plain_decimal(value) } else { None };
    let float = || if value.parse::<f64>().is_ok_and(f64::is_finite) { vec![T::Float64] } else { Vec::new() };
    let fraction = || {
        let behind = value.split_once('.').map_or("", |(_, fraction)| fraction);
        behind.bytes().take_while(u8::is_ascii_digit).count()
    };
    match data_type {
        _ if data_type.is_integer() => {
            let is_whole = value.trim_start_matches(['+', '-']).bytes().all(|byte| byte.is_ascii_digit());
            let number =
                number.filter(|_| is_whole).and_then(|number| number.trim_end_matches('.').parse::<i128>().ok());
            let wide = T::Decimal128(38, 0);
            match (data_type, number.filter(|number| number.unsigned_abs() < 10_u128.pow(38))) {
                (_, None) => float(),
                (_, Some(number)) if i64::try_from(number).is_ok() => vec![T::Int64],
                (T::UInt64, Some(_)) => vec![wide],
                (_, Some(number)) if u64::try_from(number).is_ok() => vec![T::UInt64, wide],
                (_, Some(_)) => vec![wide, T::Float64],
            }
        }
        T::Decimal128(precision, scale) => {
            let Some(number) = number else { return float() };
            let (whole, fraction) = number.split_once('.').unwrap_or((&number, ""));
            let (scale, whole) = (usize::from(scale.unsigned_abs()), whole.trim_start_matches(['+', '-', '0']).len());
            let (whole, scale) = (whole.max(usize::from(*precision) - scale), fraction.len().max(scale));
            match whole + scale {
                digits @ ..=38 => vec![T::Decimal128(digits as u8, scale as i8)],
                _ => float(),
            }
        }
        T::Float16 | T::Float32 => float(),
        T::Date32 | T::Date64 if value.len() > "2026-01-31".len() && !is_zoned(value) => {
            vec![T::Timestamp(if fraction() > 6 { U::Nanosecond } else { U::Microsecond }, None)]
        }
        T::Timestamp(U::Second | U::Millisecond, zone) if fraction() <= 6 => {
            vec![T::Timestamp(U::Microsecond, zone.clone())]
        }
        T::Timestamp(unit, zone) if *unit != U::Nanosecond => vec![T::Timestamp(U::Nanosecond, zone.clone())],
        T::Time32(_) if fraction() <= 6 => vec![T::Time64(U::Microsecond)],
        T::Time32(_) | T::Time64(U::Microsecond) => vec![T::Time64(U::Nanosecond)],
        _ => Vec::new(),
    }
}

fn unit_named(text: &str) -> Option<TimeUnit> {
    match text.to_lowercase().as_str() {
        "s" => Some(TimeUnit::Second),
        "ms" => Some(TimeUnit::Millisecond),
        "us" | "µs" => Some(TimeUnit::Microsecond),
        "ns" => Some(TimeUnit::Nanosecond),
        _ => None,
    }
}

/// A zone as Arrow knows it, by its name or its hours and minutes; `None` for the word by which Arrow says that there is none.
fn time_zone(text: &str) -> Result<Option<Arc<str>>, String> {
    let text = text.trim().trim_matches('"');
    let digits: String = text.chars().filter(|c| c.is_ascii_digit()).collect();
    let is_offset = text.starts_with(['+', '-']) && matches!(text.len() - 1, 2 | 4 | 5);
    let zone = match text.to_ascii_lowercase().as_str() {
        "none" => return Ok(None),
        "utc" | "z" => "UTC".to_owned(),
        _ if is_offset && digits.len() == 2 => format!("{}{digits}:00", &text[..1]),
        _ if is_offset && digits.len() == 4 => format!("{}{}:{}", &text[..1], &digits[..2], &digits[2..]),
        _ => text.to_owned(),
    };
    match zone.parse::<Tz>() {
        Ok(_) => Ok(Some(zone.into())),
        Err(_) => Err(format!("there is no time zone {text:?}; write one such as UTC, Europe/Berlin or +02:00")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn types_are_read_as_people_and_as_arrow_write_them() {
        let types: ColumnTypes =
            r#"a=int64, b=decimal(15, 2),c=Timestamp,d=timestamp(ns),e=Utf8,f=Utf8View,"g=,h"=date"#.parse().unwrap();
        let names: Vec<_> = types.0.iter().map(|(name, data_type)| format!("{name} {data_type:?}")).collect();
        let expected = [
            "a Int64",
            "b Decimal128(15, 2)",
            "c Timestamp(Microsecond, None)",
            "d Timestamp(Nanosecond, None)",
            "e Utf8",
            "f Utf8View",
            "g=,h Date32",
        ];
        assert_eq!(names, expected);
        for (wrong, words) in [
            ("a", "COLUMN=TYPE"),
            ("a=", "is no type"),
            ("a=integerish", "\"integerish\""),
            ("a=decimal(2,5)", "a precision of 1 to 38, and a scale of 0 to that"),
            ("a=decimal(40,2)", "\"decimal(40,2)\" is no type that CSV is read as; a decimal(PRECISION,SCALE) has"),
            ("a=decimal128(0,0)", "a precision of 1 to 38"),
            ("a=timestamp(h)", "\"timestamp(h)\" is no type"),
            ("a=timestamp(us, Nowhere)", "there is no time zone \"Nowhere\"; write one such as UTC"),
            ("a=time32(us)", "is no type"),
            ("a=time64(s)", "is no type"),
            ("a=time32", "is no type"),
            ("a=decimal(9,-2)", "a scale of 0 to that"),
            ("a=Decimal128(9, -2)", "a scale of 0 to that"),
            ("a=Decimal256(40, 2)", "no type that CSV is read as"),
            ("a=decimal(9,2", "\"decimal(9\" is no type"),
            ("\"a\"b=date", "COLUMN=TYPE"),
            ("a=LargeBinary", "no type that CSV is read as"),
        ] {
            let error = wrong.parse::<ColumnTypes>().unwrap_err();
            assert!(error.contains(words), "{wrong}: {error}");
        }
    }

    #[test]
    fn a_name_may_have_parentheses() {
        for (text, columns) in [
            ("x)=int64", &["x)"][..]),
            ("(x=int64", &["(x"]),
            ("x)=decimal(9,2),(y=date", &["x)", "(y"]),
            ("f(x,y)=decimal(9,2),)(=date", &["f(x,y)", ")("]),
            ("f(x=decimal(9,2),z=date", &["f(x", "z"]),
            (")),x=y(=date", &[]),
        ] {
            let names = text.parse::<ColumnTypes>().map(|types| types.0.into_iter().map(|(name, _)| name).collect());
            assert_eq!(names.unwrap_or_else(|_| Vec::new()), columns, "{text}");
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
        for name in [
            "int8",
            "uint64",
            "float16",
            "float32",
            "bool",
            "string",
            "large_string",
            "string_view",
            "date",
            "date64",
            "time32(ms)",
            "time64(us)",
            "timestamp",
            "timestamp(ns)",
            "timestamp(us, UTC)",
            "timestamp(s, Europe/Berlin)",
            "timestamp(us, +02:00)",
            "decimal(9,2)",
        ] {
            assert_eq!(type_name(&parse(name).unwrap()), name);
        }
        for written in [
            "Utf8View",
            "LargeUtf8",
            "Date64",
            "Time32(s)",
            "Time64(ns)",
            "Timestamp(ms, \"UTC\")",
            "Decimal128(9, 2)",
            "Float16",
        ] {
            let read = parse(written).unwrap_or_else(|error| panic!("{error}"));
            assert_eq!(parse(&type_name(&read)), Ok(read), "{written}");
        }
        let utc = parse("timestamp(us, UTC)").unwrap();
        for also in ["Timestamp(µs, \"UTC\")", "timestamp(us,utc)", "TIMESTAMP(US, Z)"] {
            assert_eq!(parse(also).as_ref(), Ok(&utc), "{also}");
        }
        assert_eq!(parse("timestamp(us, +0200)"), parse("timestamp(us,+02)"));
    }
}
