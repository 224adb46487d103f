//! Key values on the host: one canonical value per row. They serve to hash keys, to pack keys that
//! a device cannot pack, and to compare the real values behind two equal hashes.

use arrow::array::{
    Array, ArrayRef, AsArray, BinaryArray, BinaryViewArray, BooleanArray, FixedSizeBinaryArray, Float16Array,
    Float32Array, Float64Array, LargeBinaryArray, LargeStringArray, StringArray, StringViewArray,
};
use arrow::compute::cast;
use arrow::datatypes::{DataType, Decimal256Type, Int64Type};
use rayon::prelude::*;

use super::rows::{BatchIndex, Rows};
use crate::human::type_name;
use crate::{Error, Result};

/// One key value in canonical form. Two values of one class are equal exactly when their canonical
/// forms are equal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyValue<'a> {
    /// Numbers: two's complement of integers, canonical bits of floats, 0 or 1 of booleans.
    Number(i128),
    /// Strings and binaries. Also decimals of 256 bits, and the numbers compared with them, as 32
    /// bytes in little-endian order.
    Bytes(&'a [u8]),
}

/// Reads the key values of one column of some rows.
#[derive(Debug)]
pub struct KeyReader {
    parts: Vec<Part>,
    index: BatchIndex,
}

/// The values of one array, ready to be read by index.
#[derive(Debug)]
enum Part {
    Integer(ArrayRef, Vec<i64>),
    Unsigned(ArrayRef),
    Wide(ArrayRef),
    Half(Float16Array),
    Single(Float32Array),
    Double(Float64Array),
    Boolean(BooleanArray),
    String(StringArray),
    LargeString(LargeStringArray),
    StringView(StringViewArray),
    Binary(BinaryArray),
    LargeBinary(LargeBinaryArray),
    BinaryView(BinaryViewArray),
    FixedBinary(FixedSizeBinaryArray),
    Decimal256(ArrayRef, Vec<[u8; 32]>),
    /// Index into the values of a dictionary, per row.
    Dictionary {
        keys: ArrayRef,
        indices: Vec<usize>,
        values: Box<Part>,
    },
}

impl KeyReader {
    /// Creates a reader of column `index` of `rows`. `wide_decimal`: one side has decimals of 256
    /// bits, so read this side as 256 bits, too.
    ///
    /// # Errors
    /// [`Error::Internal`] when Arrow cannot widen a type that it should.
    pub fn new(rows: &Rows, index: usize, wide_decimal: bool) -> Result<Self> {
        // Some types are widened, batch by batch.
        let arrays: Vec<&ArrayRef> = rows.column(index).collect();
        let parts = arrays.par_iter().map(|array| Part::new(array, wide_decimal)).collect::<Result<_>>()?;
        Ok(Self { parts, index: BatchIndex::of(arrays.iter().map(|array| array.len())) })
    }

    /// Number of rows.
    pub fn len(&self) -> usize {
        self.index.rows()
    }

    /// Returns the value of a row, or `None` for a null.
    pub fn value(&self, row: usize) -> Option<KeyValue<'_>> {
        let (part, index) = self.index.find(row);
        self.parts[part].value(index)
    }
}

impl Part {
    fn new(array: &ArrayRef, wide_decimal: bool) -> Result<Self> {
        let widen = |target: &DataType| {
            cast(array, target)
                .map_err(|error| Error::Internal(format!("reading keys of {}: {error}", type_name(array.data_type()))))
        };
        Ok(match array.data_type() {
            DataType::Decimal32(precision, scale)
            | DataType::Decimal64(precision, scale)
            | DataType::Decimal128(precision, scale)
                if wide_decimal =>
            {
                Self::decimal256(widen(&DataType::Decimal256(*precision, *scale))?)
            }
            DataType::Decimal256(..) => Self::decimal256(array.clone()),
            // Integers have up to 20 digits.
            integer if wide_decimal && integer.is_integer() => Self::decimal256(widen(&DataType::Decimal256(20, 0))?),
            DataType::Decimal32(precision, scale) | DataType::Decimal64(precision, scale) => {
                Self::Wide(widen(&DataType::Decimal128(*precision, *scale))?)
            }
            DataType::Decimal128(..) => Self::Wide(array.clone()),
            DataType::UInt64 => Self::Unsigned(array.clone()),
            DataType::Float16 => Self::Half(array.as_primitive().clone()),
            DataType::Float32 => Self::Single(array.as_primitive().clone()),
            DataType::Float64 => Self::Double(array.as_primitive().clone()),
            DataType::Boolean => Self::Boolean(array.as_boolean().clone()),
            DataType::Utf8 => Self::String(array.as_string().clone()),
            DataType::LargeUtf8 => Self::LargeString(array.as_string().clone()),
            DataType::Utf8View => Self::StringView(array.as_string_view().clone()),
            DataType::Binary => Self::Binary(array.as_binary().clone()),
            DataType::LargeBinary => Self::LargeBinary(array.as_binary().clone()),
            DataType::BinaryView => Self::BinaryView(array.as_binary_view().clone()),
            DataType::FixedSizeBinary(_) => Self::FixedBinary(array.as_fixed_size_binary().clone()),
            DataType::Dictionary(..) => {
                let dictionary = array.as_any_dictionary();
                let values = Box::new(Self::new(dictionary.values(), wide_decimal)?);
                let indices = match dictionary.values().is_empty() {
                    true => vec![0; array.len()],
                    false => dictionary.normalized_keys(),
                };
                Self::Dictionary { keys: array.clone(), indices, values }
            }
            // All other key types are stored as integers of at most 64 bits, and Arrow casts them.
            // A type that it does not cast needs an arm of its own.
            _ => {
                let numbers = widen(&DataType::Int64)?;
                let values = numbers.as_primitive::<Int64Type>().values().to_vec();
                Self::Integer(array.clone(), values)
            }
        })
    }

    fn decimal256(array: ArrayRef) -> Self {
        let values = array.as_primitive::<Decimal256Type>().values().iter().map(|value| value.to_le_bytes()).collect();
        Self::Decimal256(array, values)
    }

    fn value(&self, index: usize) -> Option<KeyValue<'_>> {
        let present = |array: &dyn Array| !array.is_null(index);
        match self {
            Self::Integer(array, values) => present(array).then(|| KeyValue::Number(values[index].into())),
            Self::Unsigned(array) => present(array)
                .then(|| KeyValue::Number(array.as_primitive::<arrow::datatypes::UInt64Type>().value(index).into())),
            Self::Wide(array) => present(array)
                .then(|| KeyValue::Number(array.as_primitive::<arrow::datatypes::Decimal128Type>().value(index))),
            Self::Half(array) => present(array).then(|| KeyValue::Number(canonical_half(array.value(index)).into())),
            Self::Single(array) => {
                present(array).then(|| KeyValue::Number(canonical_single(array.value(index)).into()))
            }
            Self::Double(array) => {
                present(array).then(|| KeyValue::Number(canonical_double(array.value(index)).into()))
            }
            Self::Boolean(array) => present(array).then(|| KeyValue::Number(array.value(index).into())),
            Self::String(array) => present(array).then(|| KeyValue::Bytes(array.value(index).as_bytes())),
            Self::LargeString(array) => present(array).then(|| KeyValue::Bytes(array.value(index).as_bytes())),
            Self::StringView(array) => present(array).then(|| KeyValue::Bytes(array.value(index).as_bytes())),
            Self::Binary(array) => present(array).then(|| KeyValue::Bytes(array.value(index))),
            Self::LargeBinary(array) => present(array).then(|| KeyValue::Bytes(array.value(index))),
            Self::BinaryView(array) => present(array).then(|| KeyValue::Bytes(array.value(index))),
            Self::FixedBinary(array) => present(array).then(|| KeyValue::Bytes(array.value(index))),
            Self::Decimal256(array, values) => present(array).then(|| KeyValue::Bytes(&values[index])),
            Self::Dictionary { keys, indices, values } => match keys.is_null(index) {
                true => None,
                false => values.value(indices[index]),
            },
        }
    }
}

/// Canonicalizes a float: -0 becomes 0, and every NaN the same NaN. Other values keep their bits.
fn canonical_half(value: half::f16) -> u16 {
    match () {
        () if value.is_nan() => 0x7e00,
        () if value == half::f16::ZERO => 0,
        () => value.to_bits(),
    }
}

fn canonical_single(value: f32) -> u32 {
    match () {
        () if value.is_nan() => 0x7fc0_0000,
        () if value == 0.0 => 0,
        () => value.to_bits(),
    }
}

fn canonical_double(value: f64) -> u64 {
    match () {
        () if value.is_nan() => 0x7ff8_0000_0000_0000,
        () if value == 0.0 => 0,
        () => value.to_bits(),
    }
}
