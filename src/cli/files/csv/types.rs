//! Column types of CSV: their names, the forms of their values, and casts from text.

use std::str::FromStr;

use arrow::array::timezone::Tz;
use arrow::array::{Array, ArrayRef, AsArray};
use arrow::compute::kernels::regexp::regexp_is_match_scalar;
use arrow::compute::{CastOptions, cast_with_options};
use arrow::datatypes::{DataType, TimeUnit};

use crate::cli::names::Words;
use crate::human::type_name;
use crate::{Error, Result};

/// Types by column name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ColumnTypes(Vec<(String, DataType)>);

impl ColumnTypes {
    /// Merges several arguments, with one type per column.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the arguments give one column different types.
    pub(super) fn together(all: &[Self]) -> Result<Vec<(String, DataType)>> {
        let mut together: Vec<(String, DataType)> = Vec::new();
        for (name, data_type) in all.iter().flat_map(|types| &types.0) {
            match together.iter().find(|(other, _)| other == name) {
                None => together.push((name.clone(), data_type.clone())),
                Some((_, other)) if other == data_type => {}
                Some((_, other)) => {
                    return Err(Error::Invalid(format!(
                        "--types gives the type {} to column {name:?}, and also {}; give only one of them",
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

/// Types without parameters. The Python client has the same list
/// (`clients/python/src/dovetail/_types.py`).
const SIMPLE: [DataType; 17] = {
    use DataType::*;
    [
        Int8, Int16, Int32, Int64, UInt8, UInt16, UInt32, UInt64, Float16, Float32, Float64, Boolean, Utf8, LargeUtf8,
        Utf8View, Date32, Date64,
    ]
};

/// Types that are inferred, narrower types first. A column that fits none of them is text.
pub(super) const INFERRED: [DataType; 6] = [
    DataType::Boolean,
    DataType::Int64,
    DataType::Float64,
    DataType::Date32,
    DataType::Timestamp(TimeUnit::Microsecond, None),
    DataType::Timestamp(TimeUnit::Nanosecond, None),
];

/// Parses a type from the name that [`type_name`] gives it.
fn parse(text: &str) -> Result<DataType, String> {
    let simple = SIMPLE.into_iter().find(|data_type| type_name(data_type) == text);
    simple.or_else(|| parse_parameters(text)).ok_or_else(|| {
        format!(
            "{text:?} is not a type that CSV is read as; write one such as int64, float64, bool, string, date, \
             timestamp, \"timestamp(us, UTC)\" with a known zone, or decimal(15,2) with at most 38 digits"
        )
    })
}

fn parse_parameters(text: &str) -> Option<DataType> {
    if text == "timestamp" {
        return Some(DataType::Timestamp(TimeUnit::Microsecond, None));
    }
    let (name, inside) = text.strip_suffix(')')?.split_once('(')?;
    let (first, second) = inside.split_once(',').map_or((inside, None), |(first, second)| (first, Some(second.trim())));
    match name {
        "decimal" => {
            let (precision, scale) = (first.trim().parse().ok()?, second?.parse().ok()?);
            let is_sound = (1..=38).contains(&precision) && (0..=precision as i8).contains(&scale);
            is_sound.then_some(DataType::Decimal128(precision, scale))
        }
        "timestamp" => {
            let zone = second.map(|zone| zone.parse::<Tz>().map(|_| zone.into())).transpose().ok()?;
            Some(DataType::Timestamp(unit_named(first.trim())?, zone))
        }
        _ => match (name, unit_named(inside)?) {
            ("time32", unit @ (TimeUnit::Second | TimeUnit::Millisecond)) => Some(DataType::Time32(unit)),
            ("time64", unit @ (TimeUnit::Microsecond | TimeUnit::Nanosecond)) => Some(DataType::Time64(unit)),
            _ => None,
        },
    }
}

fn unit_named(text: &str) -> Option<TimeUnit> {
    match text {
        "s" => Some(TimeUnit::Second),
        "ms" => Some(TimeUnit::Millisecond),
        "us" => Some(TimeUnit::Microsecond),
        "ns" => Some(TimeUnit::Nanosecond),
        _ => None,
    }
}

/// True if CSV is read as this type.
pub(in crate::cli::files) fn is_read_as(data_type: &DataType) -> bool {
    form(data_type).is_some()
}

/// Returns the form of a type's values as a regular expression, or `None` if CSV is not read as the
/// type. The Python client has the same forms (`clients/python/src/dovetail/_types.py`).
fn form(data_type: &DataType) -> Option<String> {
    use DataType as T;
    const DATE: &str = "[0-9]{4}-[0-9]{2}-[0-9]{2}";
    /// Dates in the years that nanoseconds cover completely, 1678 to 2261. pyarrow before 23 wraps
    /// around beyond them.
    const NEAR_DATE: &str =
        "(1(6(7[89]|[89][0-9])|[7-9][0-9]{2})|2([01][0-9]{2}|2([0-5][0-9]|6[01])))-[0-9]{2}-[0-9]{2}";
    const ZONE: &str = "(Z|[+-]([01][0-9]|2[0-3])(:?[0-5][0-9])?)";
    let time = |unit: &TimeUnit| {
        let fraction = match unit {
            TimeUnit::Second => "",
            TimeUnit::Millisecond => r"(\.[0-9]{1,3})?",
            TimeUnit::Microsecond => r"(\.[0-9]{1,6})?",
            TimeUnit::Nanosecond => r"(\.[0-9]{1,9})?",
        };
        format!("([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]{fraction}")
    };
    Some(match data_type {
        T::Utf8 | T::LargeUtf8 | T::Utf8View => String::new(),
        T::Boolean => "^(?i:true|false)$".into(),
        // Limit the digits: pyarrow turns a number with more than 38 digits into another number.
        T::Decimal128(precision, scale @ 0..) => {
            let whole = precision.saturating_sub(scale.unsigned_abs());
            format!(r"^-?0*[0-9]{{0,{whole}}}(\.[0-9]{{0,{scale}}})?$")
        }
        T::Date32 | T::Date64 => format!("^{DATE}$"),
        T::Time32(unit) | T::Time64(unit) => format!("^{}$", time(unit)),
        T::Timestamp(unit, zone) => {
            let date = if *unit == TimeUnit::Nanosecond { NEAR_DATE } else { DATE };
            let time = time(unit);
            if zone.is_some() { format!("^{date}[T ]{time}{ZONE}$") } else { format!("^{date}([T ]{time})?$") }
        }
        _ if data_type.is_unsigned_integer() => "^[0-9]+$".into(),
        _ if data_type.is_integer() => "^-?[0-9]+$".into(),
        _ if data_type.is_floating() => "^-?([0-9.]+([eE][-+]?[0-9]+)?|(?i:nan|inf|infinity))$".into(),
        _ => return None,
    })
}

/// Casts a column of text to a type. Returns the values, and the first row whose text does not fit
/// the type.
pub(super) fn convert(text: &ArrayRef, data_type: &DataType) -> Result<(ArrayRef, Option<usize>)> {
    let form = form(data_type).ok_or_else(|| Error::Internal(format!("CSV is not read as {data_type}")))?;
    let formed = regexp_is_match_scalar(text.as_string::<i32>(), &form, None)?;
    // Values that cannot be cast become null.
    let values = cast_with_options(text, data_type, &CastOptions::default())?;
    let is_unfit = |row: &usize| text.is_valid(*row) && (values.is_null(*row) || !formed.value(*row));
    let unfit = (0..text.len()).find(is_unfit);
    Ok((values, unfit))
}

/// Returns the type that fits all values of a column of text, or `None` if the column has no value.
pub(super) fn infer(text: &ArrayRef) -> Result<Option<DataType>> {
    if text.null_count() == text.len() {
        return Ok(None);
    }
    // A float cannot hold all digits of an integer beyond int64.
    let has_long = regexp_is_match_scalar(text.as_string::<i32>(), "^-?[0-9]{19,}$", None)?.true_count() > 0;
    let zoned = |unit| DataType::Timestamp(unit, Some("UTC".into()));
    let inferred = INFERRED.into_iter().chain([zoned(TimeUnit::Microsecond), zoned(TimeUnit::Nanosecond)]);
    for data_type in inferred.filter(|data_type| *data_type != DataType::Float64 || !has_long) {
        if convert(text, &data_type)?.1.is_none() {
            return Ok(Some(data_type));
        }
    }
    Ok(Some(DataType::Utf8))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn types_parse_from_the_names_that_they_are_shown_with() {
        let types: ColumnTypes =
            "a=time32(s), b=decimal(15, 2),c=time64(us),\"g=,h\"=date,f(z)=timestamp(s, Europe/Berlin)"
                .parse()
                .unwrap();
        let names: Vec<_> =
            types.0.iter().map(|(name, data_type)| format!("{name}={}", type_name(data_type))).collect();
        let expected =
            ["a=time32(s)", "b=decimal(15,2)", "c=time64(us)", "g=,h=date", "f(z)=timestamp(s, Europe/Berlin)"];
        assert_eq!(names, expected);
        for data_type in SIMPLE.into_iter().chain(INFERRED) {
            assert_eq!(parse(&type_name(&data_type)), Ok(data_type.clone()));
            assert!(is_read_as(&data_type), "{data_type}");
        }
        for (wrong, words) in [
            ("a", "write COLUMN=TYPE, such as id=int64"),
            ("a=", "\"\" is not a type"),
            ("a=integerish", "\"integerish\" is not a type"),
            ("a=decimal(2,5)", "decimal(15,2) with at most 38 digits"),
            ("a=decimal(40,2)", "\"decimal(40,2)\" is not a type that CSV is read as"),
            ("a=timestamp(h)", "\"timestamp(h)\" is not a type"),
            ("a=timestamp(us, Nowhere)", "with a known zone"),
            ("a=time32(us)", "is not a type"),
            ("a=list(int64)", "is not a type"),
            ("\"a\"b=date", "COLUMN=TYPE"),
        ] {
            let error = wrong.parse::<ColumnTypes>().unwrap_err();
            assert!(error.contains(words), "{wrong}: {error}");
        }
        assert!(!is_read_as(&DataType::LargeBinary) && !is_read_as(&DataType::Decimal128(9, -2)));
    }

    #[test]
    fn a_column_that_is_given_twice_must_have_one_type() {
        let together = |all: &[&str]| {
            let all: Vec<ColumnTypes> = all.iter().map(|types| types.parse().unwrap()).collect();
            ColumnTypes::together(&all).map(|types| types.into_iter().map(|(name, _)| name).collect::<Vec<_>>())
        };
        assert_eq!(together(&["a=int64,b=date", "c=string,a=int64"]).unwrap(), ["a", "b", "c"]);
        let error = together(&["a=int64", "b=date,a=string"]).unwrap_err();
        assert!(error.message().contains("gives the type int64 to column \"a\", and also string"), "{error}");
    }
}
