//! Which types can be keys, and which can be compared with which.

use arrow::datatypes::{DataType, TimeUnit};

use crate::{Error, Result};

/// Types whose values can be equal. Two key columns fit when their classes are equal.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum KeyClass {
    /// Integers of any width and sign, compared by value.
    Integer,
    /// IEEE 754 floats of one width in bytes; NaN equals NaN, -0 equals 0.
    Float {
        /// 2, 4 or 8.
        bytes: u8,
    },
    /// Decimals of one scale, of any precision.
    Decimal {
        /// Digits after the point.
        scale: i8,
    },
    /// Booleans.
    Boolean,
    /// Days since the epoch.
    Date32,
    /// Milliseconds since the epoch.
    Date64,
    /// Time of day.
    Time(TimeUnit),
    /// Instants, with a zone or without; zones do not change an instant.
    Timestamp {
        /// Of the stored number.
        unit: TimeUnit,
        /// Whether the type names a zone.
        zoned: bool,
    },
    /// Elapsed time.
    Duration(TimeUnit),
    /// UTF-8 strings of any layout.
    String,
    /// Binaries of any layout.
    Binary,
}

/// The class of a key type; a dictionary's class is that of its values.
///
/// # Errors
/// [`Error::Invalid`] for a type that cannot be a key, naming those that can.
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
                "type {other} cannot be a join key; keys are integers, floats, decimals, dates, times, timestamps, durations, \
                 booleans, strings, binaries, and dictionaries of these"
            )));
        }
    })
}
