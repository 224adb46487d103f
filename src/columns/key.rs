//! Classes of key types: the types that can be keys, and the types that can be compared.

use arrow::datatypes::{DataType, TimeUnit};
use serde::{Deserialize, Serialize};

use crate::human::type_name;
use crate::{Error, Result};

/// Types whose values can be equal. Two key columns fit when their classes are equal.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum KeyClass {
    /// Integers of any width and sign, and decimals of scale 0, compared by value. Where one column
    /// has the keys of both sides, signed and unsigned 64-bit integers become such decimals.
    Integer,
    /// IEEE 754 floats of one width in bytes; NaN equals NaN, -0 equals 0.
    Float {
        /// 2, 4 or 8.
        bytes: u8,
    },
    /// Decimals of one scale other than 0, of any precision.
    Decimal {
        scale: i8,
    },
    Boolean,
    /// Days since the epoch.
    Date32,
    /// Milliseconds since the epoch.
    Date64,
    Time(TimeUnit),
    /// Instants, with or without a zone. A zone does not change an instant.
    Timestamp {
        unit: TimeUnit,
        zoned: bool,
    },
    Duration(TimeUnit),
    /// UTF-8 strings of any layout.
    String,
    /// Binaries of any layout.
    Binary,
}

/// Returns the class of a key type. A dictionary's class is that of its values.
///
/// # Errors
/// [`Error::Invalid`] for a type that cannot be a key. The message names the types that can.
pub fn key_class(data_type: &DataType) -> Result<KeyClass> {
    Ok(match data_type {
        DataType::Int8
        | DataType::Int16
        | DataType::Int32
        | DataType::Int64
        | DataType::UInt8
        | DataType::UInt16
        | DataType::UInt32
        | DataType::UInt64 => KeyClass::Integer,
        DataType::Float16 => KeyClass::Float { bytes: 2 },
        DataType::Float32 => KeyClass::Float { bytes: 4 },
        DataType::Float64 => KeyClass::Float { bytes: 8 },
        DataType::Decimal32(_, 0)
        | DataType::Decimal64(_, 0)
        | DataType::Decimal128(_, 0)
        | DataType::Decimal256(_, 0) => KeyClass::Integer,
        DataType::Decimal32(_, scale)
        | DataType::Decimal64(_, scale)
        | DataType::Decimal128(_, scale)
        | DataType::Decimal256(_, scale) => KeyClass::Decimal { scale: *scale },
        DataType::Boolean => KeyClass::Boolean,
        DataType::Date32 => KeyClass::Date32,
        DataType::Date64 => KeyClass::Date64,
        DataType::Time32(unit) | DataType::Time64(unit) => KeyClass::Time(*unit),
        DataType::Timestamp(unit, zone) => KeyClass::Timestamp { unit: *unit, zoned: zone.is_some() },
        DataType::Duration(unit) => KeyClass::Duration(*unit),
        DataType::Utf8 | DataType::LargeUtf8 | DataType::Utf8View => KeyClass::String,
        DataType::Binary | DataType::LargeBinary | DataType::BinaryView | DataType::FixedSizeBinary(_) => {
            KeyClass::Binary
        }
        DataType::Dictionary(_, values) => key_class(values)?,
        other => {
            return Err(Error::Invalid(format!(
                "type {} cannot be a join key; keys are integers, floats, decimals, dates, times, timestamps, durations, \
                 booleans, strings, binaries, and dictionaries of these",
                type_name(other)
            )));
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Mirrors the table of docs/types.md.
    #[test]
    fn key_types_match_as_the_page_lists_them() {
        use DataType as T;
        let classes = [
            vec![T::Int8, T::UInt64, T::Decimal32(5, 0), T::Decimal128(20, 0), T::Decimal256(60, 0)],
            vec![T::Decimal64(9, 2), T::Decimal128(38, 2)],
            vec![T::Decimal64(9, 3)],
            vec![T::Decimal128(9, -2)],
            vec![T::Float16],
            vec![T::Float32],
            vec![T::Float64],
            vec![T::Utf8, T::LargeUtf8, T::Utf8View, T::Dictionary(T::Int8.into(), T::Utf8.into())],
            vec![T::Binary, T::LargeBinary, T::BinaryView, T::FixedSizeBinary(3), T::FixedSizeBinary(4)],
            vec![T::Timestamp(TimeUnit::Second, None)],
            vec![T::Timestamp(TimeUnit::Microsecond, None)],
            ["UTC", "Europe/Berlin"].map(|zone| T::Timestamp(TimeUnit::Microsecond, Some(zone.into()))).to_vec(),
            vec![T::Time32(TimeUnit::Second)],
            vec![T::Time64(TimeUnit::Nanosecond)],
            vec![T::Duration(TimeUnit::Nanosecond)],
            vec![T::Date32, T::Dictionary(T::Int8.into(), T::Date32.into())],
            vec![T::Date64],
            vec![T::Boolean],
        ];
        for (at, types) in classes.iter().enumerate() {
            for (other_at, others) in classes.iter().enumerate() {
                for (one, other) in types.iter().flat_map(|one| others.iter().map(move |other| (one, other))) {
                    let matches = key_class(one).unwrap() == key_class(other).unwrap();
                    assert_eq!(matches, at == other_at, "{one} and {other}");
                }
            }
        }
    }
}
