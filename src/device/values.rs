//! Values of variable length on a device that works on them itself: makes keys of them, and gathers them.

use arrow::buffer::Buffer;

use super::types::{Column, DeviceBuffer, KeyEncoding};

/// The most bytes of a value that is packed with its length in 128 bits.
pub const SHORT_BYTES_MAX: usize = 15;

/// Bits for the length of values of at most that many bytes.
pub fn length_bits(bytes_max: usize) -> u32 {
    usize::BITS - bytes_max.leading_zeros()
}

/// The most key columns that a device hashes.
pub const VALUE_FIELDS_MAX: usize = 8;

/// Values of variable length of some rows, in Arrow's layout.
#[derive(Clone, Debug)]
pub struct BytesPart {
    /// Where in `data` each value begins and, one entry more than rows, the last one ends; in 4 or 8 bytes each.
    pub offsets: Buffer,
    /// What the offsets refer to; what lies before the first of them, and beyond the last, is of other rows.
    pub data: Buffer,
}

/// A column of values of variable length on a device.
#[derive(Clone, Debug)]
pub struct BytesColumn {
    /// The values, one after the other, and zeros up to a multiple of 8 bytes.
    pub data: DeviceBuffer,
    /// Where each value begins and, one entry more than rows, the last one ends: numbers of 64 bits.
    pub begins: DeviceBuffer,
    /// Number of values.
    pub rows: usize,
    /// A bit per row, 1 for a value; `None` when there are no nulls.
    pub validity: Option<DeviceBuffer>,
}

/// Gathered values of variable length in host memory, in Arrow's layout.
#[derive(Clone, Debug)]
pub struct HostBytes {
    /// Where each value begins and, one entry more than rows, the last one ends.
    pub offsets: Buffer,
    /// The values, one after the other. Nulls have no bytes.
    pub data: Buffer,
    /// A bit per row, 1 for a value, and the number of nulls; `None` when there are none.
    pub validity: Option<(Buffer, usize)>,
    /// Number of values.
    pub rows: usize,
}

/// The values of one key column.
#[derive(Clone, Debug)]
pub struct ValueField {
    /// Where they are.
    pub values: KeyValues,
    /// Whether null matches null; else a row that is null here has no key.
    pub nulls_equal: bool,
}

/// Values that are equal exactly when they look the same: of fixed width in their encoding, of variable length byte by byte.
#[derive(Clone, Debug)]
pub enum KeyValues {
    /// Of fixed width.
    Fixed {
        /// The values.
        column: Column,
        /// How they are read, with nothing taken off.
        encoding: KeyEncoding,
    },
    /// Of variable length.
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

/// How values become a hash of 128 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hashing {
    /// A random number, the same for both sides.
    pub seed: u64,
    /// The bits of the hash that are kept: all of them, but for tests that want collisions.
    pub mask: u128,
}
