//! Values of variable length on a device that makes keys of them and gathers them itself.

use arrow::buffer::Buffer;

use super::types::{Column, DeviceBuffer, KeyEncoding};

/// Maximum size of a value that is packed with its length in 128 bits.
pub const SHORT_BYTES_MAX: usize = 15;

/// Bits for the length of values of at most `bytes_max` bytes.
pub fn length_bits(bytes_max: usize) -> u32 {
    usize::BITS - bytes_max.leading_zeros()
}

/// Maximum number of key columns that a device hashes.
pub const VALUE_FIELDS_MAX: usize = 8;

/// Values of variable length of some rows, in Arrow's layout.
#[derive(Clone, Debug)]
pub struct BytesPart {
    /// Start of each value in `data`, and the end of the last value: one entry more than rows, 4 or
    /// 8 bytes each.
    pub offsets: Buffer,
    /// Bytes of the values. Bytes before the first offset and beyond the last belong to other rows.
    pub data: Buffer,
}

/// A column of values of variable length on a device.
#[derive(Clone, Debug)]
pub struct BytesColumn {
    /// The values, one after the other, padded with zeros to a multiple of 8 bytes.
    pub data: DeviceBuffer,
    /// Start of each value, and the end of the last value: one 64-bit number more than rows.
    pub begins: DeviceBuffer,
    pub rows: usize,
    /// A bit per row, 1 for a value; `None` when there are no nulls.
    pub validity: Option<DeviceBuffer>,
}

/// Gathered values of variable length in host memory, in Arrow's layout.
#[derive(Clone, Debug)]
pub struct HostBytes {
    /// Start of each value, and the end of the last value: one entry more than rows.
    pub offsets: Buffer,
    /// The values, one after the other. Nulls have no bytes.
    pub data: Buffer,
    /// A bit per row, 1 for a value, and the number of nulls; `None` when there are none.
    pub validity: Option<(Buffer, usize)>,
    pub rows: usize,
}

/// The values of one key column.
#[derive(Clone, Debug)]
pub struct ValueField {
    pub values: KeyValues,
    /// False: a row that is null here has no key.
    pub nulls_equal: bool,
}

/// Values of a key column. Values of fixed width are equal exactly when their encodings are. Values
/// of variable length are equal exactly when their bytes are.
#[derive(Clone, Debug)]
pub enum KeyValues {
    Fixed {
        column: Column,
        /// Encoding of the values, with no minimum subtracted.
        encoding: KeyEncoding,
    },
    Bytes(BytesColumn),
}

impl ValueField {
    /// Number of values.
    pub fn rows(&self) -> usize {
        match &self.values {
            KeyValues::Fixed { column, .. } => column.rows,
            KeyValues::Bytes(bytes) => bytes.rows,
        }
    }

    /// A bit per row, 1 for a value; `None` when there are no nulls.
    pub fn validity(&self) -> Option<&DeviceBuffer> {
        match &self.values {
            KeyValues::Fixed { column, .. } => column.validity.as_ref(),
            KeyValues::Bytes(bytes) => bytes.validity.as_ref(),
        }
    }
}

/// Parameters of the hash of 128 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hashing {
    /// A random number, the same for both sides.
    pub seed: u64,
    /// Bits of the hash that are kept: all, except in tests that want collisions.
    pub mask: u128,
}
