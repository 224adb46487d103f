//! How the key columns of a join become one key of fixed width per row.
//!
//! Keys that fit in 128 bits are packed exactly, so that equal keys mean equal values. Integers take as many bits as the
//! range of both sides needs, short strings their bytes and their length:
//!
//! ```text
//!   (o_custkey: 1..=150000, o_flag: strings of at most 3 bytes, o_day: 8035..=10591, nulls match)
//!   bit 57             39                       13      12               0
//!       | custkey - 1   | bytes, 24 ; length, 2 | null? | day - 8035, 12 |        57 bits: a key of 8 bytes
//! ```
//!
//! The first column has the highest bits, strings have their first byte on top, and what is less packs to less. So rows
//! that are sorted by these columns have sorted keys, and need not be sorted again ([`KeyLayout::keeps_order`]).
//!
//! Wider keys become a 128-bit hash of all their values. Whoever joins by such keys compares the real values behind equal
//! hashes ([`KeyLayout::differing`]) before a row is emitted.

use arrow::datatypes::DataType;
use xxhash_rust::xxh3::xxh3_128_with_seed;

use super::KeyClass;
use super::host_keys::{filled_column, host_column, length_bits, number_bits, ordered_float_bits, short_bytes};
use super::reader::{KeyReader, KeyValue};
use super::rows::{Rows, fixed_width};
use crate::Result;
use crate::device::{Device, KeyEncoding, KeyField, KeyWidth, PackedKeys, Stream, Width};
use crate::memory::Arena;

/// What is known of one pair of key columns before any value is read.
#[derive(Clone, Debug)]
pub struct KeyFacts {
    /// What both sides hold.
    pub class: KeyClass,
    /// The type on the build side.
    pub build_type: DataType,
    /// The type on the probe side.
    pub probe_type: DataType,
    /// The smallest and the largest value of both sides, for types that are stored as integers.
    pub range: Option<(i128, i128)>,
    /// The longest value of both sides in bytes, for strings and binaries.
    pub bytes_max: Option<usize>,
    /// Whether null matches null.
    pub nulls_equal: bool,
    /// Whether the rows of a side are sorted by the join's keys, so that it is worth a pass to keep their order.
    pub sorted: bool,
}

/// Which of the two roles a side has in a join.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Tables are built on it.
    Build,
    /// Its rows look for matches.
    Probe,
}

/// How keys are made, the same for both sides.
#[derive(Clone, Debug)]
pub struct KeyLayout {
    facts: Vec<KeyFacts>,
    form: Form,
}

#[derive(Clone, Debug)]
enum Form {
    /// All values exactly, in a key of that width.
    Packed { width: KeyWidth, fields: Vec<Field> },
    /// A hash of all values with that seed. `mask` is all ones, except in tests that want collisions.
    Hashed { seed: u64, mask: u128 },
}

/// One pair of columns in a packed key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Field {
    source: Source,
    shift: u32,
    bits: u32,
    null_bit: Option<u32>,
}

/// Who turns values into bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Source {
    /// The device, from the column as it is; the encoding of each side follows from its type.
    Device { min: i128 },
    /// The device, bits as they are: both sides have one width and sign.
    Raw,
    /// The device, floats.
    Float,
    /// The host: numbers minus `min`.
    HostNumber { min: i128 },
    /// The host: floats, as the device would.
    HostFloat { bits: u32 },
    /// The host: bytes, the first one on top, then their length.
    HostBytes { bytes_max: usize },
}

/// The keys of some rows of one side.
#[derive(Debug)]
pub struct SideKeys {
    /// On the device.
    pub packed: PackedKeys,
    /// The real values; empty for packed keys, which need no comparison.
    readers: Vec<KeyReader>,
}

impl KeyLayout {
    /// The layout for those key columns. `seed` is the hash's, should the keys be too wide to pack.
    pub fn new(facts: Vec<KeyFacts>, seed: u64) -> Self {
        let form = packed_form(&facts).unwrap_or(Form::Hashed { seed, mask: u128::MAX });
        Self { facts, form }
    }

    /// A layout whose hashes have only the bits of `mask`, so that tests see collisions.
    #[cfg(test)]
    pub fn with_colliding_hashes(facts: Vec<KeyFacts>, mask: u128) -> Self {
        Self { facts, form: Form::Hashed { seed: 0, mask } }
    }

    /// The same layout with another seed for its hashes, after two different values had the same.
    pub fn with_another_seed(self, seed: u64) -> Self {
        let form = match self.form {
            Form::Hashed { .. } => Form::Hashed { seed, mask: u128::MAX },
            packed => packed,
        };
        Self { facts: self.facts, form }
    }

    /// Whether equal keys have to be compared by their real values.
    pub fn is_hashed(&self) -> bool {
        matches!(self.form, Form::Hashed { .. })
    }

    /// Bytes per key.
    pub fn width(&self) -> KeyWidth {
        match &self.form {
            Form::Packed { width, .. } => *width,
            Form::Hashed { .. } => KeyWidth::W16,
        }
    }

    /// Whether the packed key is the one key column itself, bit for bit, on both sides: its type then needs no gathering of
    /// the original column.
    pub fn is_raw(&self) -> bool {
        let Form::Packed { width, fields } = &self.form else { return false };
        let whole = |field: &Field| field.source == Source::Raw && field.bits as usize == 8 * width.bytes();
        fields.len() == 1 && whole(&fields[0]) && self.facts[0].build_type == self.facts[0].probe_type
    }

    /// Whether rows that are in ascending order of the key columns have keys in ascending order. Nulls that match nulls come
    /// last among the keys, and first in a sorted table: where there are any, order is lost.
    pub fn keeps_order(&self) -> bool {
        let Form::Packed { fields, .. } = &self.form else { return false };
        fields.iter().zip(&self.facts).all(|(field, fact)| field.source != Source::Raw || fact.raw_keeps_order())
    }

    /// Makes the keys of `rows`; `columns[i]` is the column of the layout's i-th pair on this side.
    ///
    /// # Errors
    /// The device's; [`Exhausted`](crate::Error::Exhausted) when host memory for the hashes runs out.
    pub fn pack(
        &self,
        role: Role,
        rows: &Rows,
        columns: &[usize],
        device: &dyn Device,
        arena: &Arena,
        stream: &Stream,
    ) -> Result<SideKeys> {
        let reader = |at: usize| KeyReader::new(rows, columns[at], self.facts[at].is_wide_decimal());
        match &self.form {
            Form::Packed { width, fields } => {
                let mut key_fields = Vec::with_capacity(fields.len());
                for (at, field) in fields.iter().enumerate() {
                    let (column, encoding) = match field.source {
                        Source::HostNumber { min } => (
                            host_column(
                                &reader(at)?,
                                field.bits,
                                |value| number_bits(value, min),
                                device,
                                arena,
                                stream,
                            )?,
                            KeyEncoding::Unsigned,
                        ),
                        Source::HostFloat { bits } => {
                            let pack = |value: KeyValue<'_>| ordered_float_bits(value, bits);
                            (host_column(&reader(at)?, bits, pack, device, arena, stream)?, KeyEncoding::Unsigned)
                        }
                        Source::HostBytes { bytes_max } => {
                            let pack = |value: KeyValue<'_>| short_bytes(value, bytes_max);
                            (host_column(&reader(at)?, field.bits, pack, device, arena, stream)?, KeyEncoding::Unsigned)
                        }
                        Source::Raw => (rows.copy_in(columns[at], device, stream)?, KeyEncoding::Unsigned),
                        Source::Float => (rows.copy_in(columns[at], device, stream)?, KeyEncoding::Float),
                        Source::Device { min } => {
                            let encoding = match self.facts[at].type_of(role).is_unsigned_integer() {
                                true => KeyEncoding::Offset { min: min as u128 },
                                false => KeyEncoding::Signed { min },
                            };
                            (rows.copy_in(columns[at], device, stream)?, encoding)
                        }
                    };
                    let Field { shift, bits, null_bit, .. } = *field;
                    key_fields.push(KeyField { column, encoding, shift, bits, null_bit });
                }
                Ok(SideKeys { packed: device.pack_keys(&key_fields, *width, stream)?, readers: Vec::new() })
            }
            Form::Hashed { seed, mask } => {
                let readers = (0..columns.len()).map(reader).collect::<Result<Vec<_>>>()?;
                let hash = |row: usize| self.hash(&readers, row, *seed).map(|hash| hash & mask);
                let column = filled_column(rows.len(), Width::W16, hash, device, arena, stream)?;
                let field = KeyField { column, encoding: KeyEncoding::Unsigned, shift: 0, bits: 128, null_bit: None };
                Ok(SideKeys { packed: device.pack_keys(&[field], KeyWidth::W16, stream)?, readers })
            }
        }
    }

    /// Which pairs of rows, one of `a` and one of `b`, have different values behind their hashes: their indices in
    /// `pairs`, ascending, are handed to `found`. For hashed keys only.
    ///
    /// Rows of one side at least lie at random places. A block of pairs is therefore looked up before any value is read,
    /// and all values of the block before the next: many cache misses are in flight at once.
    pub fn differing(&self, a: &SideKeys, b: &SideKeys, pairs: &[(u32, u32)], mut found: impl FnMut(usize)) {
        const BLOCK: usize = 128;
        let (mut of_a, mut of_b) = ([None; BLOCK], [None; BLOCK]);
        for (block, pairs) in pairs.chunks(BLOCK).enumerate() {
            let mut differs = [false; BLOCK];
            for ((a, b), facts) in a.readers.iter().zip(&b.readers).zip(&self.facts) {
                of_a.iter_mut().zip(pairs).for_each(|(value, &(row, _))| *value = a.value(row as usize));
                of_b.iter_mut().zip(pairs).for_each(|(value, &(_, row))| *value = b.value(row as usize));
                for (differs, (a, b)) in differs.iter_mut().zip(of_a.iter().zip(&of_b)).take(pairs.len()) {
                    *differs |= a != b || (a.is_none() && !facts.nulls_equal);
                }
            }
            (0..pairs.len()).filter(|&at| differs[at]).for_each(|at| found(block * BLOCK + at));
        }
    }

    /// The hash of a row's values; `None` when it has a null that matches nothing.
    fn hash(&self, readers: &[KeyReader], row: usize, seed: u64) -> Option<u128> {
        /// Odd, so that multiplying loses nothing; the multiplier of PCG's generators of 128 bits.
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
            // All 128 bits of the fields before go in, and each field by its place: ("a", "b") and ("b", "a") differ.
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

    /// Whether the bits of a column as they lie, read as an unsigned integer, have the order of its values.
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

/// Places all fields side by side; `None` when they need more than 128 bits, or an unknown number.
fn packed_form(facts: &[KeyFacts]) -> Option<Form> {
    let mut fields = Vec::with_capacity(facts.len());
    let mut next_bit = 0;
    // From the last to the first, which decides the order and so comes on top.
    for fact in facts.iter().rev() {
        let (source, bits) = field_bits(fact, facts.len() == 1)?;
        let null_bit = fact.nulls_equal.then_some(next_bit + bits);
        fields.push(Field { source, shift: next_bit, bits, null_bit });
        next_bit += bits + u32::from(fact.nulls_equal);
    }
    fields.reverse();
    Some(Form::Packed { width: KeyWidth::for_bits(next_bit)?, fields })
}

fn field_bits(fact: &KeyFacts, alone: bool) -> Option<(Source, u32)> {
    let on_device = [&fact.build_type, &fact.probe_type].into_iter().all(|data_type| fixed_width(data_type).is_some());
    let bits_of_range = |(min, max): (i128, i128)| (128 - (max.wrapping_sub(min) as u128).leading_zeros()).max(1);
    Some(match &fact.class {
        KeyClass::String | KeyClass::Binary => {
            let bytes_max = fact.bytes_max.filter(|&bytes| bytes <= 15)?;
            (Source::HostBytes { bytes_max }, (8 * bytes_max as u32 + length_bits(bytes_max)).max(1))
        }
        KeyClass::Decimal { .. } if fact.is_wide_decimal() => return None,
        KeyClass::Boolean => (Source::HostNumber { min: 0 }, 1),
        KeyClass::Float { bytes } if on_device => (Source::Float, 8 * u32::from(*bytes)),
        KeyClass::Float { bytes } => {
            let bits = 8 * u32::from(*bytes);
            (Source::HostFloat { bits }, bits)
        }
        // One column of one width on both sides is a key as it lies: no pass over it is needed. It would lose the order of
        // negative numbers, which is worth more than the pass when rows are sorted.
        _ if alone
            && on_device
            && !fact.nulls_equal
            && same_integers(&fact.build_type, &fact.probe_type)
            && (!fact.sorted || fact.raw_keeps_order()) =>
        {
            (Source::Raw, 8 * fixed_width(&fact.build_type)?.bytes() as u32)
        }
        _ => {
            let range = fact.range.unwrap_or_else(|| range_of_types(&fact.build_type, &fact.probe_type));
            let source = if on_device { Source::Device { min: range.0 } } else { Source::HostNumber { min: range.0 } };
            (source, bits_of_range(range))
        }
    })
}

/// Whether equal values have equal bits without any conversion.
fn same_integers(a: &DataType, b: &DataType) -> bool {
    fixed_width(a) == fixed_width(b) && a.is_unsigned_integer() == b.is_unsigned_integer()
}

/// The range that the stored numbers of two types can have.
fn range_of_types(a: &DataType, b: &DataType) -> (i128, i128) {
    let range = |data_type: &DataType| match data_type {
        DataType::Dictionary(_, values) => fixed_width(values).map(|width| (width, values.is_unsigned_integer())),
        other => fixed_width(other).map(|width| (width, other.is_unsigned_integer())),
    };
    let bounds = |data_type: &DataType| match range(data_type) {
        Some((width, true)) if width.bytes() <= 8 => (0, (1i128 << (8 * width.bytes())) - 1),
        Some((width, false)) if width.bytes() <= 8 => {
            (-(1i128 << (8 * width.bytes() - 1)), (1i128 << (8 * width.bytes() - 1)) - 1)
        }
        _ => (i128::MIN, i128::MAX),
    };
    let ((a_min, a_max), (b_min, b_max)) = (bounds(a), bounds(b));
    (a_min.min(b_min), a_max.max(b_max))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use arrow::array::{
        ArrayRef, Decimal128Array, DictionaryArray, Float64Array, Int8Array, Int32Array, RecordBatch, StringArray,
    };
    use arrow::datatypes::Int8Type;

    use super::*;
    use crate::device::CancelFlag;
    use crate::device::host::HostDevice;
    use crate::memory::Budget;

    fn fact(class: KeyClass, data_type: DataType) -> KeyFacts {
        KeyFacts {
            class,
            build_type: data_type.clone(),
            probe_type: data_type,
            range: None,
            bytes_max: None,
            nulls_equal: false,
            sorted: false,
        }
    }

    #[test]
    fn one_integer_column_is_its_own_key() {
        for (data_type, width) in [(DataType::Int32, KeyWidth::W4), (DataType::UInt64, KeyWidth::W8)] {
            let layout = KeyLayout::new(vec![fact(KeyClass::Integer, data_type)], 0);
            assert!(layout.is_raw() && !layout.is_hashed());
            assert_eq!(layout.width(), width);
        }
        let narrow = KeyLayout::new(vec![fact(KeyClass::Integer, DataType::Int8)], 0);
        assert!(!narrow.is_raw(), "8 bits are widened to 32");
    }

    #[test]
    fn integers_of_two_widths_or_signs_share_their_range() {
        let mut mixed = fact(KeyClass::Integer, DataType::Int32);
        mixed.probe_type = DataType::UInt64;
        let layout = KeyLayout::new(vec![mixed.clone()], 0);
        assert_eq!(layout.width(), KeyWidth::W16, "from -2^31 to 2^64 takes 65 bits");
        mixed.range = Some((-5, 1000));
        assert_eq!(KeyLayout::new(vec![mixed], 0).width(), KeyWidth::W4);
    }

    #[test]
    fn composite_keys_take_the_bits_of_their_ranges() {
        let mut key = fact(KeyClass::Integer, DataType::Int64);
        key.range = Some((1, 150_000));
        let mut flag = fact(KeyClass::String, DataType::Utf8);
        flag.bytes_max = Some(3);
        let mut day = fact(KeyClass::Date32, DataType::Date32);
        day.range = Some((8035, 10591));
        day.nulls_equal = true;
        let layout = KeyLayout::new(vec![key, flag, day], 0);
        let Form::Packed { width, fields } = &layout.form else { panic!("57 bits are packed") };
        assert_eq!(*width, KeyWidth::W8);
        let places: Vec<_> = fields.iter().map(|field| (field.shift, field.bits, field.null_bit)).collect();
        assert_eq!(places, [(39, 18, None), (13, 26, None), (0, 12, Some(12))]);
    }

    #[test]
    fn wide_and_unbounded_keys_are_hashed() {
        assert!(KeyLayout::new(vec![fact(KeyClass::String, DataType::Utf8)], 0).is_hashed());
        let mut long = fact(KeyClass::Binary, DataType::Binary);
        long.bytes_max = Some(16);
        assert!(KeyLayout::new(vec![long], 0).is_hashed());
        assert!(KeyLayout::new(vec![fact(KeyClass::Decimal { scale: 2 }, DataType::Decimal256(50, 2))], 0).is_hashed());
        assert!(KeyLayout::new(vec![fact(KeyClass::Integer, DataType::Int64); 3], 0).is_hashed());
        assert!(!KeyLayout::new(vec![fact(KeyClass::Integer, DataType::Int64); 2], 0).is_hashed());
    }

    #[test]
    fn all_bits_of_all_fields_are_in_a_hash() {
        let strings = |values: [&str; 4]| Arc::new(StringArray::from(values.to_vec())) as ArrayRef;
        let columns = [strings(["a", "b", "a", "ab"]), strings(["b", "a", "a", ""])];
        let named = columns.into_iter().enumerate().map(|(at, column)| (format!("k{at}"), column));
        let batch = RecordBatch::try_from_iter(named).unwrap();
        let rows = Rows::of(&batch.schema(), std::slice::from_ref(&batch), 0..4);
        let readers: Vec<KeyReader> = (0..2).map(|at| KeyReader::new(&rows, at, false).unwrap()).collect();
        let layout = KeyLayout::new(vec![fact(KeyClass::String, DataType::Utf8); 2], 0);
        for seed in [0, 7, u64::MAX] {
            let hashes: Vec<u128> = (0..4).map(|row| layout.hash(&readers, row, seed).unwrap()).collect();
            for (at, hash) in hashes.iter().enumerate() {
                assert!(!hashes[..at].contains(hash), "row {at} of seed {seed}");
            }
            // The last field of rows 1 and 2 is the same: what differs is the first field's hash, all of which counts.
            let first = |row| {
                readers[0].value(row).map(|value| match value {
                    KeyValue::Bytes(bytes) => xxh3_128_with_seed(bytes, seed),
                    KeyValue::Number(_) => unreachable!("strings are bytes"),
                })
            };
            let difference = hashes[1].wrapping_sub(hashes[2]);
            let low_bits = (1u128 << 64) - 1;
            assert_ne!(difference & low_bits, 0);
            assert_ne!(difference >> 64, 0);
            assert_ne!(first(1), first(2));
        }
    }

    /// Whether keys made of those columns of one batch are in ascending order, and whether the layout says so.
    fn packed_in_order(columns: Vec<ArrayRef>, mut facts: Vec<KeyFacts>) -> (bool, bool) {
        facts.iter_mut().for_each(|fact| fact.sorted = true);
        let named = columns.into_iter().enumerate().map(|(at, column)| (format!("k{at}"), column));
        let batch = RecordBatch::try_from_iter(named).unwrap();
        let memory = Budget::new("memory of device host:0", "--device-memory", 1 << 20);
        let device = HostDevice::new(0, 1, memory, None).unwrap();
        let stream = device.stream(CancelFlag::new()).unwrap();
        let arena = Arena::new(Budget::new("host memory", "--host-memory", 64 << 20));
        let rows = Rows::of(&batch.schema(), std::slice::from_ref(&batch), 0..batch.num_rows() as u64);
        let indexes: Vec<usize> = (0..facts.len()).collect();
        let layout = KeyLayout::new(facts, 0);
        let keys = layout.pack(Role::Build, &rows, &indexes, &device, &arena, &stream).unwrap();
        (device.is_sorted(&keys.packed.keys, &stream).unwrap(), layout.keeps_order())
    }

    #[test]
    fn rows_in_order_have_keys_in_order() {
        let integer = |range| KeyFacts { range, ..fact(KeyClass::Integer, DataType::Int32) };
        let string = KeyFacts { bytes_max: Some(3), ..fact(KeyClass::String, DataType::Utf8) };
        let integers = |values: &[i32]| Arc::new(Int32Array::from(values.to_vec())) as ArrayRef;
        let strings = |values: &[&str]| Arc::new(StringArray::from(values.to_vec())) as ArrayRef;
        let wide = Decimal128Array::from(vec![i128::MIN, -1, 0, i128::MAX]).with_data_type(DataType::Decimal128(38, 0));
        let floats = [f64::NEG_INFINITY, -2.5, -0.0, 0.0, 1e-300, f64::INFINITY, f64::NAN];
        let float_type = DataType::Dictionary(Box::new(DataType::Int8), Box::new(DataType::Float64));
        let float_keys = Int8Array::from_iter_values(0..floats.len() as i8);
        let float_values = Arc::new(Float64Array::from(floats.to_vec()));
        let floats = DictionaryArray::<Int8Type>::try_new(float_keys, float_values).unwrap();
        let cases: Vec<(&str, Vec<ArrayRef>, Vec<KeyFacts>)> = vec![
            ("signed", vec![integers(&[i32::MIN, -7, -1, 0, 5])], vec![integer(Some((i32::MIN.into(), 5)))]),
            ("signed of unknown range", vec![integers(&[-7, -1, 0, 5])], vec![integer(None)]),
            ("negative", vec![integers(&[-7, -6, -6, -1])], vec![integer(Some((-7, -1)))]),
            ("wide", vec![Arc::new(wide)], vec![fact(KeyClass::Decimal { scale: 0 }, DataType::Decimal128(38, 0))]),
            ("strings", vec![strings(&["", "\0", "a", "ab", "abc", "b", "ba"])], vec![string.clone()]),
            ("floats of the host", vec![Arc::new(floats)], vec![fact(KeyClass::Float { bytes: 8 }, float_type)]),
            (
                "the first column decides",
                vec![integers(&[-2, -2, 1, 3]), strings(&["b", "ca", "a", ""]), integers(&[9, 1, 8, 0])],
                vec![integer(Some((-2, 3))), string, integer(Some((0, 9)))],
            ),
        ];
        for (name, columns, facts) in cases {
            assert_eq!(packed_in_order(columns, facts), (true, true), "{name}");
        }
        let nobody_sorted = KeyLayout::new(vec![integer(Some((-7, 5)))], 0);
        assert!(nobody_sorted.is_raw() && !nobody_sorted.keeps_order());
        assert!(!KeyLayout::new(vec![fact(KeyClass::String, DataType::Utf8)], 0).keeps_order(), "hashes have no order");
    }
}
