//! Key layout: how the key columns of a join become one key of fixed width per row.
//!
//! Keys that fit in 128 bits are packed exactly, so that equal keys mean equal values. Integers
//! take as many bits as the range of both sides needs. Short strings take their bytes and their
//! length:
//!
//! ```text
//!   (o_custkey: 1..=150000, o_flag: strings of at most 3 bytes, o_day: 8035..=10591, nulls match)
//!   bit 57             39                       13      12               0
//!       | custkey - 1   | bytes, 24 ; length, 2 | null? | day - 8035, 12 |  57 bits: 8-byte key
//! ```
//!
//! The first column has the highest bits, strings have their first byte on top, and lesser values
//! pack to lesser keys. So rows that are sorted by these columns have sorted keys, and need not be
//! sorted again ([`KeyLayout::keeps_order`]).
//!
//! Wider keys become a 128-bit hash of all their values. The join compares the real values behind
//! equal hashes before it emits a row. A device that can do both makes hashes and compares values,
//! and has the values in its memory while it compares. Otherwise the host does both
//! ([`KeyLayout::differing`]).

mod fields;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::sync::Arc;

use arrow::datatypes::DataType;
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_128_with_seed;

use fields::{Field, Source, packed_fields};

use super::KeyClass;
use super::host_keys::{filled_column, host_column, number_bits, ordered_float_bits, short_bytes};
use super::reader::{KeyReader, KeyValue};
use super::rows::{Rows, are_bytes, fixed_width};
use crate::Result;
use crate::device::{
    BytesColumn, Column, Device, Hashing, KeyEncoding, KeyField, KeyValues, KeyWidth, PackedKeys, Positions, Stream,
    VALUE_FIELDS_MAX, ValueField, Width, strings,
};
use crate::memory::Arena;

/// Facts about one pair of key columns that are known before any value is read.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct KeyFacts {
    pub class: KeyClass,
    pub build_type: DataType,
    pub probe_type: DataType,
    /// Smallest and largest value of both sides, for types that are stored as integers.
    pub range: Option<(i128, i128)>,
    /// Length in bytes of the longest value of both sides, for strings and binaries.
    pub bytes_max: Option<usize>,
    pub nulls_equal: bool,
    /// True if the rows of a side are sorted by the join's keys, so that keeping their order is
    /// worth a pass.
    pub sorted: bool,
}

/// Role of a side in a join.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    Build,
    Probe,
}

/// Layout of keys, the same for both sides.
#[derive(Clone, Debug)]
pub struct KeyLayout {
    facts: Vec<KeyFacts>,
    form: Form,
    maker: Maker,
}

#[derive(Clone, Debug)]
enum Form {
    Packed { width: KeyWidth, fields: Vec<Field> },
    Hashed(Hashing),
}

/// Maker of keys from values that are not stored as numbers. It packs short text, and hashes and
/// compares wider values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Maker {
    Host,
    Device,
}

/// Longest value in bytes that a device hashes and compares. The device has a thread per value, and
/// the other threads wait for the thread of the longest value.
pub const DEVICE_BYTES_MAX: usize = 4096;

/// Keys of some rows of one side.
#[derive(Debug)]
pub struct SideKeys {
    pub packed: PackedKeys,
    values: Values,
}

/// Columns that were copied to the device for their keys, by their index in the table.
#[derive(Debug, Default)]
pub struct CopiedColumns {
    pub fixed: BTreeMap<usize, Column>,
    pub bytes: BTreeMap<usize, BytesColumn>,
}

impl CopiedColumns {
    fn fixed_of(&mut self, column: usize, rows: &Rows, device: &dyn Device, stream: &Stream) -> Result<Column> {
        if let Some(there) = self.fixed.get(&column) {
            return Ok(there.clone());
        }
        let copied = rows.copy_in(column, device, stream)?;
        self.fixed.insert(column, copied.clone());
        Ok(copied)
    }

    fn bytes_of(&mut self, column: usize, rows: &Rows, device: &dyn Device, stream: &Stream) -> Result<BytesColumn> {
        if let Some(there) = self.bytes.get(&column) {
            return Ok(there.clone());
        }
        let copied = rows.copy_in_bytes(column, device, stream)?;
        self.bytes.insert(column, copied.clone());
        Ok(copied)
    }
}

/// Real values behind hashes.
#[derive(Debug)]
enum Values {
    /// Packed keys need no comparison.
    InKeys,
    OnHost(Arc<[KeyReader]>),
    OnDevice(Vec<ValueField>),
}

/// Columns on a device that the keys of some rows are packed from.
#[derive(Debug)]
pub struct KeyColumns {
    fields: Vec<KeyField>,
    width: KeyWidth,
    /// Values of all rows that were copied in, if these columns are hashes.
    readers: Option<Arc<[KeyReader]>>,
}

impl KeyColumns {
    /// Returns the columns of the rows at `positions`, in their order. None of these is
    /// [`NO_ROW`](crate::device::NO_ROW).
    ///
    /// # Errors
    /// The errors of the device.
    pub fn at(&self, positions: &Positions, device: &dyn Device, stream: &Stream) -> Result<Self> {
        let gather = |field: &KeyField| {
            let column = device.gather(&field.column, positions, stream)?;
            Ok(KeyField { column, ..field.clone() })
        };
        let fields = self.fields.iter().map(gather).collect::<Result<_>>()?;
        Ok(Self { fields, width: self.width, readers: self.readers.clone() })
    }

    /// Packs the keys of the rows.
    ///
    /// # Errors
    /// The errors of the device.
    pub fn pack(&self, device: &dyn Device, stream: &Stream) -> Result<SideKeys> {
        let packed = device.pack_keys(&self.fields, self.width, stream)?;
        let values = self.readers.clone().map_or(Values::InKeys, Values::OnHost);
        Ok(SideKeys { packed, values })
    }
}

impl SideKeys {
    /// Returns keys that are packed exactly, so that no values have to be compared.
    pub fn packed(packed: PackedKeys) -> Self {
        Self { packed, values: Values::InKeys }
    }

    /// Returns the real values, if the device compares them.
    pub fn on_device(&self) -> Option<&[ValueField]> {
        match &self.values {
            Values::OnDevice(fields) => Some(fields),
            _ => None,
        }
    }

    fn readers(&self) -> &[KeyReader] {
        match &self.values {
            Values::OnHost(readers) => readers,
            _ => unreachable!("the host compares these values"),
        }
    }
}

impl KeyLayout {
    /// Creates the layout for the given key columns. `seed` seeds the hash, if the keys are too
    /// wide to pack.
    pub fn new(facts: Vec<KeyFacts>, seed: u64) -> Self {
        let form = match packed_fields(&facts) {
            Some((width, fields)) => Form::Packed { width, fields },
            None => Form::Hashed(Hashing { seed, mask: u128::MAX }),
        };
        Self { facts, form, maker: Maker::Host }
    }

    /// Creates a layout whose hashes have only the bits of `mask`, so that tests see collisions.
    #[cfg(test)]
    pub fn with_colliding_hashes(facts: Vec<KeyFacts>, mask: u128) -> Self {
        Self { facts, form: Form::Hashed(Hashing { seed: 0, mask }), maker: Maker::Host }
    }

    /// Returns the same layout with another seed for its hashes, after two different values had the
    /// same hash.
    pub fn with_another_seed(self, seed: u64) -> Self {
        let form = match self.form {
            Form::Hashed(_) => Form::Hashed(Hashing { seed, mask: u128::MAX }),
            packed => packed,
        };
        Self { form, ..self }
    }

    /// Lets a device that [supports text](crate::device::Device::strings) make the keys
    /// that the host would make, if the device can read all key columns. Otherwise returns the
    /// layout unchanged.
    #[must_use]
    pub fn made_by_device(self) -> Self {
        match self.is_made_on_host() && self.is_device_readable() {
            true => Self { maker: Maker::Device, ..self },
            false => self,
        }
    }

    /// True if a device can read all key columns of both sides. Their values have a fixed width, or
    /// are contiguous values of variable length that are known to be short.
    fn is_device_readable(&self) -> bool {
        let is_readable = |facts: &KeyFacts, data_type: &DataType| match facts.class {
            KeyClass::String | KeyClass::Binary => {
                are_bytes(data_type).is_some() && facts.bytes_max.is_some_and(|bytes| bytes <= DEVICE_BYTES_MAX)
            }
            _ => fixed_width(data_type).is_some_and(|width| width.bytes() <= 16),
        };
        self.facts.len() <= VALUE_FIELDS_MAX
            && self.facts.iter().all(|facts| {
                !facts.is_wide_decimal()
                    && [&facts.build_type, &facts.probe_type].into_iter().all(|side| is_readable(facts, side))
            })
    }

    /// True if the device makes keys of values that are not stored as numbers.
    pub fn is_made_by_device(&self) -> bool {
        self.maker == Maker::Device
    }

    /// True if the device hashes values and compares them.
    pub fn is_hashed_by_device(&self) -> bool {
        self.is_made_by_device() && self.is_hashed()
    }

    /// Bytes per row of a side that the device needs to make keys, without the bytes of
    /// variable-length values themselves. Each such value takes its start, an offset while the
    /// column comes in, and the number that a short value becomes.
    pub fn value_row_bytes(&self, role: Role) -> usize {
        if !self.is_made_by_device() {
            return 0;
        }
        let of_fixed = |facts: &KeyFacts| fixed_width(facts.type_of(role)).map_or(0, Width::bytes);
        let of_column = |facts: &KeyFacts| match are_bytes(facts.type_of(role)) {
            Some(offset_width) if self.is_hashed() => size_of::<u64>() + offset_width.bytes(),
            Some(offset_width) => size_of::<u64>() + offset_width.bytes() + KeyWidth::W16.bytes(),
            None if self.is_hashed() => of_fixed(facts),
            // The column is packed from where it is stored.
            None => 0,
        };
        self.facts.iter().map(of_column).sum()
    }

    /// Bytes of the variable-length values of some rows that the device makes keys of.
    pub fn value_bytes(&self, rows: &Rows, columns: &[usize]) -> u64 {
        if !self.is_made_by_device() {
            return 0;
        }
        rows.value_bytes(columns.iter().copied().filter(|&column| are_bytes(rows.data_type(column)).is_some()))
    }

    /// Bytes of the longest value of each column of variable length that the device makes keys of,
    /// summed over these columns.
    pub fn value_bytes_max(&self) -> usize {
        let longest = |facts: &KeyFacts| facts.bytes_max.filter(|_| are_bytes(&facts.build_type).is_some());
        if self.is_made_by_device() { self.facts.iter().filter_map(longest).sum() } else { 0 }
    }

    /// True if equal keys have to be compared by their real values.
    pub fn is_hashed(&self) -> bool {
        matches!(self.form, Form::Hashed(_))
    }

    /// Bytes per key.
    pub fn width(&self) -> KeyWidth {
        match &self.form {
            Form::Packed { width, .. } => *width,
            Form::Hashed(_) => KeyWidth::W16,
        }
    }

    /// True if the packed key is the one key column itself, bit for bit, on both sides. The
    /// original column then need not be gathered.
    pub fn is_raw(&self) -> bool {
        let Form::Packed { width, fields } = &self.form else { return false };
        let whole = |field: &Field| field.source == Source::Raw && field.bits as usize == 8 * width.bytes();
        fields.len() == 1 && whole(&fields[0]) && self.facts[0].build_type == self.facts[0].probe_type
    }

    /// True if rows in ascending order of the key columns have keys in ascending order. Nulls that
    /// match nulls come last among the keys, but first in a sorted table. If there are any, order
    /// is lost.
    pub fn keeps_order(&self) -> bool {
        let Form::Packed { fields, .. } = &self.form else { return false };
        fields.iter().zip(&self.facts).all(|(field, fact)| field.source != Source::Raw || fact.raw_keeps_order())
    }

    /// True if the key column of pair `at` is copied to the device unchanged, to be packed or
    /// hashed there.
    pub fn copies_column(&self, at: usize) -> bool {
        match &self.form {
            Form::Packed { fields, .. } => {
                matches!(fields[at].source, Source::Raw | Source::Float | Source::Device { .. })
            }
            Form::Hashed(_) => self.is_made_by_device() && fixed_width(&self.facts[at].build_type).is_some(),
        }
    }

    /// True if the host makes hashes, or keys of values that devices cannot read.
    pub fn is_made_on_host(&self) -> bool {
        !self.is_made_by_device() && (0..self.facts.len()).any(|at| !self.copies_column(at))
    }

    /// Makes the keys of `rows`. `columns[i]` is the column of the layout's i-th pair on this side.
    /// Also returns the columns that were [copied to the device unchanged](Self::copies_column),
    /// and the text that the device made keys of. A caller that needs such a column for more than
    /// its keys need not copy it again.
    ///
    /// # Errors
    /// The errors of the device; [`Exhausted`](crate::Error::Exhausted) when host memory for the
    /// hashes runs out.
    pub fn pack(
        &self,
        role: Role,
        rows: &Rows,
        columns: &[usize],
        device: &dyn Device,
        arena: &Arena,
        stream: &Stream,
    ) -> Result<(SideKeys, CopiedColumns)> {
        let mut copied = CopiedColumns::default();
        let keys = match &self.form {
            Form::Hashed(hashing) if self.is_made_by_device() => {
                let mut field = |at: usize| -> Result<ValueField> {
                    let column = columns[at];
                    let values = match are_bytes(self.facts[at].type_of(role)) {
                        Some(_) => KeyValues::Bytes(copied.bytes_of(column, rows, device, stream)?),
                        None => KeyValues::Fixed {
                            column: copied.fixed_of(column, rows, device, stream)?,
                            encoding: self.facts[at].whole_encoding(role),
                        },
                    };
                    Ok(ValueField { values, nulls_equal: self.facts[at].nulls_equal })
                };
                let fields = (0..columns.len()).map(&mut field).collect::<Result<Vec<_>>>()?;
                let packed = strings(device).hash_keys(&fields, *hashing, stream)?;
                SideKeys { packed, values: Values::OnDevice(fields) }
            }
            _ => self.copy_in(role, rows, columns, &mut copied, device, arena, stream)?.pack(device, stream)?,
        };
        Ok((keys, copied))
    }

    /// Brings the columns that keys are packed from to the device, for keys that the device does
    /// not hash. `columns[i]` is the column of the layout's i-th pair on this side. Columns that
    /// are in `copied` already are not copied again, and others are added to it.
    ///
    /// # Errors
    /// The errors of [`pack`](Self::pack).
    #[allow(clippy::too_many_arguments)]
    pub fn copy_in(
        &self,
        role: Role,
        rows: &Rows,
        columns: &[usize],
        copied: &mut CopiedColumns,
        device: &dyn Device,
        arena: &Arena,
        stream: &Stream,
    ) -> Result<KeyColumns> {
        let reader = |at: usize| KeyReader::new(rows, columns[at], self.facts[at].is_wide_decimal());
        let (width, fields) = match &self.form {
            Form::Packed { width, fields } => (width, fields),
            Form::Hashed(Hashing { seed, mask }) => {
                assert!(!self.is_made_by_device(), "the device hashes these keys");
                let readers = (0..columns.len()).map(reader).collect::<Result<Arc<[_]>>>()?;
                let hash = |row: usize| self.hash(&readers, row, *seed).map(|hash| hash & mask);
                let column = filled_column(rows.len(), Width::W16, hash, device, arena, stream)?;
                let field = KeyField { column, encoding: KeyEncoding::Unsigned, shift: 0, bits: 128, null_bit: None };
                return Ok(KeyColumns { fields: vec![field], width: KeyWidth::W16, readers: Some(readers) });
            }
        };
        let mut key_fields = Vec::with_capacity(fields.len());
        for (at, field) in fields.iter().enumerate() {
            let (column, encoding) = match field.source {
                Source::HostNumber { min } => (
                    host_column(&reader(at)?, field.bits, |value| number_bits(value, min), device, arena, stream)?,
                    KeyEncoding::Unsigned,
                ),
                Source::HostFloat { bits } => {
                    let pack = |value: KeyValue<'_>| ordered_float_bits(value, bits);
                    (host_column(&reader(at)?, bits, pack, device, arena, stream)?, KeyEncoding::Unsigned)
                }
                Source::Bytes { bytes_max } if self.is_made_by_device() => {
                    let bytes = copied.bytes_of(columns[at], rows, device, stream)?;
                    (strings(device).short_values(&bytes, bytes_max, stream)?, KeyEncoding::Unsigned)
                }
                Source::Bytes { bytes_max } => {
                    let pack = |value: KeyValue<'_>| short_bytes(value, bytes_max);
                    (host_column(&reader(at)?, field.bits, pack, device, arena, stream)?, KeyEncoding::Unsigned)
                }
                Source::Raw => (copied.fixed_of(columns[at], rows, device, stream)?, KeyEncoding::Unsigned),
                Source::Float => (copied.fixed_of(columns[at], rows, device, stream)?, KeyEncoding::Float),
                Source::Device { min } => {
                    let encoding = match self.facts[at].type_of(role).is_unsigned_integer() {
                        true => KeyEncoding::Offset { min: min as u128 },
                        false => KeyEncoding::Signed { min },
                    };
                    (copied.fixed_of(columns[at], rows, device, stream)?, encoding)
                }
            };
            let Field { shift, bits, null_bit, .. } = *field;
            key_fields.push(KeyField { column, encoding, shift, bits, null_bit });
        }
        Ok(KeyColumns { fields: key_fields, width: *width, readers: None })
    }

    /// Finds pairs of rows, one of `a` and one of `b`, with different values behind their hashes.
    /// Calls `found` with their indices in `pairs`, in ascending order. Only for keys that the host
    /// has hashed.
    ///
    /// Rows of at least one side are at random places. So the values of a block of pairs are looked
    /// up before any of them is read, which keeps many cache misses in flight. Each block is
    /// finished before the next.
    pub fn differing(&self, a: &SideKeys, b: &SideKeys, pairs: &[(u32, u32)], mut found: impl FnMut(usize)) {
        const BLOCK: usize = 128;
        let (mut of_a, mut of_b) = ([None; BLOCK], [None; BLOCK]);
        for (block, pairs) in pairs.chunks(BLOCK).enumerate() {
            let mut differs = [false; BLOCK];
            for ((a, b), facts) in a.readers().iter().zip(b.readers()).zip(&self.facts) {
                of_a.iter_mut().zip(pairs).for_each(|(value, &(row, _))| *value = a.value(row as usize));
                of_b.iter_mut().zip(pairs).for_each(|(value, &(_, row))| *value = b.value(row as usize));
                for (differs, (a, b)) in differs.iter_mut().zip(of_a.iter().zip(&of_b)).take(pairs.len()) {
                    *differs |= a != b || (a.is_none() && !facts.nulls_equal);
                }
            }
            (0..pairs.len()).filter(|&at| differs[at]).for_each(|at| found(block * BLOCK + at));
        }
    }

    /// Hashes a row's values. Returns `None` when the row has a null that matches nothing.
    fn hash(&self, readers: &[KeyReader], row: usize, seed: u64) -> Option<u128> {
        /// Odd, so that multiplying loses nothing. It is the multiplier of PCG's generators of 128
        /// bits.
        const FACTOR: u128 = 0x2360_ed05_1fc6_5da4_4385_df64_9fcc_f645;
        let mut hash = 0u128;
        for (place, (reader, facts)) in readers.iter().zip(&self.facts).enumerate() {
            let seed = seed.wrapping_add(place as u64);
            let field = match reader.value(row) {
                Some(KeyValue::Number(number)) => xxh3_128_with_seed(&number.to_le_bytes(), seed),
                Some(KeyValue::Bytes(bytes)) => xxh3_128_with_seed(bytes, seed),
                None if facts.nulls_equal => xxh3_128_with_seed(&[], !seed),
                None => return None,
            };
            // All 128 bits of the previous fields count, and so does each field's place: ("a", "b")
            // and ("b", "a") differ.
            hash = hash.wrapping_mul(FACTOR).wrapping_add(field);
        }
        Some(hash)
    }
}

impl KeyFacts {
    fn type_of(&self, role: Role) -> &DataType {
        match role {
            Role::Build => &self.build_type,
            Role::Probe => &self.probe_type,
        }
    }

    /// Returns the encoding that makes equal fixed-width values of both sides look the same to a
    /// device.
    fn whole_encoding(&self, role: Role) -> KeyEncoding {
        match self.class {
            KeyClass::Float { .. } => KeyEncoding::Float,
            _ if self.type_of(role).is_unsigned_integer() => KeyEncoding::Unsigned,
            _ => KeyEncoding::Signed { min: 0 },
        }
    }

    /// True if the stored bits of a column, read as an unsigned integer, have the order of its
    /// values.
    fn raw_keeps_order(&self) -> bool {
        self.build_type.is_unsigned_integer() || self.range.is_some_and(|(min, max)| min >= 0 || max < 0)
    }

    fn is_wide_decimal(&self) -> bool {
        let is_wide = |data_type: &DataType| match data_type {
            DataType::Dictionary(_, values) => matches!(**values, DataType::Decimal256(..)),
            other => matches!(other, DataType::Decimal256(..)),
        };
        is_wide(&self.build_type) || is_wide(&self.probe_type)
    }
}
