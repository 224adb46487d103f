//! Key columns that the host makes because a device cannot: values of variable length,
//! dictionaries, booleans, and hashes.

use arrow::buffer::Buffer;
use bytemuck::Pod;
use rayon::prelude::*;

use super::reader::{KeyReader, KeyValue};
use crate::Result;
use crate::device::{BitSlice, Column, Device, KeyWidth, Stream, Width, length_bits};
use crate::memory::Arena;

pub(super) fn number_bits(value: KeyValue<'_>, min: i128) -> u128 {
    match value {
        KeyValue::Number(number) => number.wrapping_sub(min) as u128,
        KeyValue::Bytes(_) => unreachable!("number fields hold numbers"),
    }
}

/// Packs the bytes, padded with zeros to `bytes_max`, above their length. The length tells zero
/// bytes from padding. If one string begins with another, the longer string packs to the greater
/// key.
pub(super) fn short_bytes(value: KeyValue<'_>, bytes_max: usize) -> u128 {
    match value {
        KeyValue::Bytes(bytes) => {
            let mut padded = [0; 16];
            padded[16 - bytes_max..][..bytes.len()].copy_from_slice(bytes);
            u128::from_be_bytes(padded) << length_bits(bytes_max) | bytes.len() as u128
        }
        KeyValue::Number(_) => unreachable!("byte fields hold bytes"),
    }
}

/// Packs floats of `bits` bits so that lesser floats pack to lesser numbers, like
/// [`KeyEncoding::Float`](crate::device::KeyEncoding::Float). Negative floats are reversed, and the
/// others are above them.
pub(super) fn ordered_float_bits(value: KeyValue<'_>, bits: u32) -> u128 {
    match value {
        KeyValue::Number(number) => {
            let (number, sign) = (number as u128, 1u128 << (bits - 1));
            if number & sign != 0 { !number & (sign | (sign - 1)) } else { number | sign }
        }
        KeyValue::Bytes(_) => unreachable!("float fields hold numbers"),
    }
}

/// Packs the values of a host-made field into a device column of the narrowest key width.
pub(super) fn host_column(
    reader: &KeyReader,
    bits: u32,
    pack: impl Fn(KeyValue<'_>) -> u128 + Sync,
    device: &dyn Device,
    arena: &Arena,
    stream: &Stream,
) -> Result<Column> {
    let value = |row: usize| reader.value(row).map(&pack);
    match KeyWidth::for_bits(bits).expect("a field has at most 128 bits") {
        KeyWidth::W4 => {
            filled_column(reader.len(), Width::W4, |row| value(row).map(|bits| bits as u32), device, arena, stream)
        }
        KeyWidth::W8 => {
            filled_column(reader.len(), Width::W8, |row| value(row).map(|bits| bits as u64), device, arena, stream)
        }
        KeyWidth::W16 => filled_column(reader.len(), Width::W16, value, device, arena, stream),
    }
}

/// Rows that one task computes. A multiple of 8, so that tasks share no byte of the validity.
const TASK_ROWS: usize = 16 * 1024;

/// Computes a column on all cores, and copies it to the device.
pub(super) fn filled_column<T: Pod + Send + Sync>(
    rows: usize,
    width: Width,
    value: impl Fn(usize) -> Option<T> + Sync,
    device: &dyn Device,
    arena: &Arena,
    stream: &Stream,
) -> Result<Column> {
    let mut values = arena.allocate(rows * width.bytes(), "join keys")?;
    let mut validity = arena.allocate(rows.div_ceil(8), "the validity of join keys")?;
    let out: &mut [T] = bytemuck::cast_slice_mut(&mut values);
    let tasks = out.par_chunks_mut(TASK_ROWS).zip(validity.par_chunks_mut(TASK_ROWS / 8)).enumerate();
    let nulls: usize = tasks
        .map(|(task, (out, bits))| {
            stream.cancel.check()?;
            bits.fill(0);
            let mut nulls = 0;
            for (at, slot) in out.iter_mut().enumerate() {
                match value(task * TASK_ROWS + at) {
                    Some(found) => {
                        *slot = found;
                        bits[at / 8] |= 1 << (at % 8);
                    }
                    None => {
                        *slot = T::zeroed();
                        nulls += 1;
                    }
                }
            }
            Ok::<usize, crate::Error>(nulls)
        })
        .try_reduce(|| 0, |a, b| Ok(a + b))?;
    let data = device.copy_in(&[values.freeze()], stream)?;
    let bits = |buffer: Buffer| device.copy_in_bits(&[BitSlice::Bits { buffer, offset: 0, len: rows }], stream);
    let validity = (nulls > 0).then(|| bits(validity.freeze())).transpose()?;
    Ok(Column { data, width, rows, validity })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strings_of_different_lengths_never_pack_to_equal_keys() {
        // In ascending order, so that a longer string packs neither as nor below a string that it
        // begins with.
        let packed: Vec<u128> = [&b""[..], b"\0", b"\0\0", b"a", b"a\0", b"ab", b"b", b"\xff"]
            .iter()
            .map(|bytes| short_bytes(KeyValue::Bytes(bytes), 2))
            .collect();
        assert!(packed.windows(2).all(|pair| pair[0] < pair[1]), "{packed:x?}");
        let longest = short_bytes(KeyValue::Bytes(&[0xff; 15]), 15);
        assert!(longest > short_bytes(KeyValue::Bytes(&[0xff; 14]), 15));
        assert_eq!(longest.leading_zeros(), 4, "15 bytes and 4 bits of length are 124 bits");
        assert_eq!(short_bytes(KeyValue::Bytes(b""), 0), 0);
    }
}
