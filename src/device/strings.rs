//! Work of a device on values of variable length: strings and binaries.

use super::{
    BytesColumn, BytesPart, Column, Device, Hashing, HostBytes, Keys, PackedKeys, Pairs, Positions, Stream, ValueField,
    Width,
};
use crate::Result;
use crate::memory::Arena;

/// Operations on values of variable length, of a [device that has them](Device::strings).
pub trait StringOps {
    /// Brings values of variable length to the device, the parts one after the other, without their
    /// validity. `offset_width`: [`Width::W4`] or [`Width::W8`].
    fn copy_in_bytes(&self, parts: &[BytesPart], offset_width: Width, stream: &Stream) -> Result<BytesColumn>;

    /// Turns values of at most `bytes_max` bytes into numbers of the narrowest key width.
    /// `bytes_max` is at most [`SHORT_BYTES_MAX`](super::SHORT_BYTES_MAX). The first byte is the
    /// most significant. Zeros after the last byte fill up to `bytes_max` bytes. The length
    /// follows, in as few bits as `bytes_max` needs. Equal numbers are equal values, and smaller
    /// numbers are smaller values.
    fn short_values(&self, bytes: &BytesColumn, bytes_max: usize, stream: &Stream) -> Result<Column>;

    /// Hashes one to [`VALUE_FIELDS_MAX`](super::VALUE_FIELDS_MAX) key columns into one key of 16
    /// bytes per row. Rows with equal values have equal keys. Unequal values collide only by
    /// accident, and not by choice of the uploader, because the seed is secret. Rows without a key
    /// are left out as by [`pack_keys`](Device::pack_keys).
    fn hash_keys(&self, fields: &[ValueField], hashing: Hashing, stream: &Stream) -> Result<PackedKeys>;

    /// Returns the indices, ascending, of the pairs whose build and probe rows have different
    /// values. Pairs without a row of one side are passed over. Waits.
    fn differing_pairs(
        &self,
        build: &[ValueField],
        probe: &[ValueField],
        pairs: &Pairs,
        stream: &Stream,
    ) -> Result<Positions>;

    /// True if all rows of each run of equal keys have equal values. `keys` are the hashes of
    /// `rows`, one per row. Waits.
    fn are_runs_uniform(&self, fields: &[ValueField], rows: &Positions, keys: &Keys, stream: &Stream) -> Result<bool>;

    /// Gathers values like [`Device::gather_to_host`]. The width of offsets is [`Width::W4`] or
    /// [`Width::W8`]. Waits for the number of bytes.
    ///
    /// # Errors
    /// [`TooLong`](crate::Error::TooLong) if the values have more than `bytes_max` bytes, or more
    /// than the offsets can express.
    fn gather_bytes_to_host(
        &self,
        column: &BytesColumn,
        positions: &Positions,
        offset_width: Width,
        bytes_max: u64,
        arena: &Arena,
        stream: &Stream,
    ) -> Result<HostBytes>;
}

/// Returns the operations of a device that supports text.
///
/// # Panics
/// If the device does not. Callers look at [`Device::strings`] first.
pub fn strings(device: &dyn Device) -> &dyn StringOps {
    device.strings().expect("a device that supports text has its operations")
}
