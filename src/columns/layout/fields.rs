//! Place of each key column's value in a packed key, and the source of its bits.

use arrow::datatypes::DataType;

use super::super::KeyClass;
use super::super::rows::fixed_width;
use super::KeyFacts;
use crate::device::{KeyWidth, SHORT_BYTES_MAX, length_bits};

/// Place of one pair of columns in a packed key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Field {
    pub(super) source: Source,
    pub(super) shift: u32,
    pub(super) bits: u32,
    pub(super) null_bit: Option<u32>,
}

/// Source of a field's bits: the component that converts values, and how.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Source {
    /// The device converts the stored column. The encoding of each side follows from its type.
    Device { min: i128 },
    /// The device copies the bits unchanged, because both sides have the same width and sign.
    Raw,
    /// The device converts floats.
    Float,
    /// The host subtracts `min` from numbers.
    HostNumber { min: i128 },
    /// The host converts floats as the device would.
    HostFloat { bits: u32 },
    /// The host, or a device that makes keys, packs the bytes with the first one on top, and then
    /// their length.
    Bytes { bytes_max: usize },
}

/// Places all fields next to each other. Returns `None` when they need more than 128 bits, or an
/// unknown number of bits.
pub(super) fn packed_fields(facts: &[KeyFacts]) -> Option<(KeyWidth, Vec<Field>)> {
    let mut fields = Vec::with_capacity(facts.len());
    let mut next_bit = 0;
    // Place fields from the last to the first, because the first decides the order and has the
    // highest bits.
    for fact in facts.iter().rev() {
        let (source, bits) = field_bits(fact, facts.len() == 1)?;
        let null_bit = fact.nulls_equal.then_some(next_bit + bits);
        fields.push(Field { source, shift: next_bit, bits, null_bit });
        next_bit += bits + u32::from(fact.nulls_equal);
    }
    fields.reverse();
    Some((KeyWidth::for_bits(next_bit)?, fields))
}

fn field_bits(fact: &KeyFacts, alone: bool) -> Option<(Source, u32)> {
    let on_device = [&fact.build_type, &fact.probe_type].into_iter().all(|data_type| fixed_width(data_type).is_some());
    let bits_of_range = |(min, max): (i128, i128)| (128 - (max.wrapping_sub(min) as u128).leading_zeros()).max(1);
    Some(match &fact.class {
        KeyClass::String | KeyClass::Binary => {
            let bytes_max = fact.bytes_max.filter(|&bytes| bytes <= SHORT_BYTES_MAX)?;
            (Source::Bytes { bytes_max }, (8 * bytes_max as u32 + length_bits(bytes_max)).max(1))
        }
        _ if fact.is_wide_decimal() => return None,
        KeyClass::Boolean => (Source::HostNumber { min: 0 }, 1),
        KeyClass::Float { bytes } if on_device => (Source::Float, 8 * u32::from(*bytes)),
        KeyClass::Float { bytes } => {
            let bits = 8 * u32::from(*bytes);
            (Source::HostFloat { bits }, bits)
        }
        // A single column of the same width on both sides is a key as stored, and needs no pass
        // over it. Stored bits lose the order of negative numbers. When rows are sorted, their
        // order is worth more than the saved pass.
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

/// True if equal values have equal bits without any conversion.
fn same_integers(a: &DataType, b: &DataType) -> bool {
    fixed_width(a) == fixed_width(b) && a.is_unsigned_integer() == b.is_unsigned_integer()
}

/// Returns the range that the stored numbers of two types can have.
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
