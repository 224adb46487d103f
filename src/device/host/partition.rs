//! Radix partitioning with software write-combining.
//!
//! ```text
//!   rows   [ chunk of thread 0 | chunk of thread 1 ]     1. each thread counts its rows per
//!                │ │ │               │ │ │                 partition
//!   lines  64 bytes per partition and column, in cache   2. offsets: by partition, then by thread
//!                ▼ ▼ ▼               ▼ ▼ ▼              3. each thread moves its rows through
//!   out    [ p0: t0 t1 | p1: t0 t1 | p2: t0 t1 | ... ]      the lines; each full line goes out at
//!                                                           once
//! ```
//!
//! Without the lines, every row would touch a different page and cache line of the output. Balkesen
//! et al., "Main-Memory Hash Joins on Multi-Core CPUs" (ICDE 2013), section III.C, describe the
//! technique. A thread's share of a partition is its own slice of the output, so that threads never
//! meet.
//!
//! More partitions than one pass resolves well take several passes, the lowest bits first. Each
//! pass leaves rows with equal digits in order, so the next pass finds each of its partitions
//! divided already.

#[cfg(test)]
mod tests;
mod writer;

use rayon::prelude::*;
pub(super) use writer::Cell;
use writer::{Source, Write, add_writers};

use super::buffer::{Values, values_of};
use super::hash::{Key, with_cell};
use super::raw;
use super::transfer::write_range;
use super::{MORSEL_ROWS, Run};
use crate::device::{Column, Grouping, Keys, Partitions, Payload, RadixBits, Width};
use crate::{Error, Result};

pub(super) fn partition<K: Key>(
    run: &Run<'_>,
    keys: &Keys,
    payload: &[Payload],
    bits: RadixBits,
) -> Result<Partitions> {
    assert!(bits.skip + bits.bits <= K::BITS, "keys of {} bits have no {bits:?}", K::BITS);
    if bits.bits == 0 {
        let payload = payload.iter().map(|payload| payload_as_is(run, payload, keys.rows)).collect::<Result<_>>()?;
        return Ok(Partitions {
            keys: keys.clone(),
            payload,
            bounds: vec![0, keys.rows].into(),
            bits,
            grouping: Grouping::Unknown,
        });
    }
    if bits.bits > run.tuning.pass_bits_max {
        return partition_in_passes::<K>(run, keys, payload, bits);
    }
    let digit = digit_of::<K>(bits);
    let mask = (1usize << bits.bits) - 1;
    let (rows, width) = (keys.rows, keys.width);
    let Scattered { keys, columns, bounds } = scatter(run, keys, payload, mask + 1, digit)?;
    let payload = columns.into_iter().map(|(width, out)| Column { data: out.freeze(), width, rows, validity: None });
    Ok(Partitions {
        payload: payload.collect(),
        keys: Keys { data: keys.freeze(), width, rows },
        bounds: bounds.into(),
        bits,
        grouping: Grouping::Unknown,
    })
}

/// Returns a function that gives the partition of a key.
fn digit_of<K: Key>(bits: RadixBits) -> impl Fn(K) -> usize + Sync {
    let (shift, mask) = (K::BITS - bits.skip - bits.bits, (1usize << bits.bits) - 1);
    move |key: K| key.mix().bits_from(shift) & mask
}

/// Makes two passes of half the bits each, or more if half is still too many.
fn partition_in_passes<K: Key>(run: &Run<'_>, keys: &Keys, payload: &[Payload], bits: RadixBits) -> Result<Partitions> {
    let high = RadixBits { skip: bits.skip, bits: bits.bits.div_ceil(2) };
    let low = RadixBits { skip: bits.skip + high.bits, bits: bits.bits - high.bits };
    let first = partition::<K>(run, keys, payload, low)?;
    let payload: Vec<Payload> = first.payload.into_iter().map(Payload::Column).collect();
    let second = partition::<K>(run, &first.keys, &payload, high)?;
    drop((first.keys, payload));

    // Within each partition of the second pass, the digits of the first are in ascending order.
    let values = values_of::<K>(&second.keys.data, second.keys.rows);
    let digit = digit_of::<K>(low);
    let starts = |range: &[usize]| -> Vec<usize> {
        let mut start = range[0];
        let mut next = |at: usize| {
            start += values[start..range[1]].partition_point(|&key| digit(key) < at);
            start
        };
        (0..1usize << low.bits).map(&mut next).collect()
    };
    let mut bounds: Vec<usize> = second.bounds.get()?.par_windows(2).map(starts).collect::<Vec<_>>().concat();
    bounds.push(second.keys.rows);
    Ok(Partitions { bounds: bounds.into(), ..second })
}

/// Returns payload data of a layout that moves no rows.
pub(super) fn payload_as_is(run: &Run<'_>, payload: &Payload, rows: usize) -> Result<Column> {
    match payload {
        Payload::Column(column) => {
            assert_eq!(column.rows, rows, "a payload column has as many rows as there are keys");
            Ok(Column { validity: None, ..column.clone() })
        }
        Payload::RowNumber => {
            let mut numbers = run.values::<u32>(rows, "numbering rows")?;
            write_range(run, 0, &mut numbers)?;
            Ok(Column { data: numbers.freeze(), width: Width::W4, rows, validity: None })
        }
    }
}

/// Rows moved by a digit of their key.
pub(super) struct Scattered<K> {
    pub(super) keys: Values<K>,
    pub(super) columns: Vec<(Width, Values<u8>)>,
    /// Start of each digit's rows, and the end of the last: one more entry than digits.
    pub(super) bounds: Vec<usize>,
}

/// Moves rows into the order of `digit(key)`, which is less than `digits`. Rows with equal digits
/// stay in order.
pub(super) fn scatter<K: Key>(
    run: &Run<'_>,
    keys: &Keys,
    payload: &[Payload],
    digits: usize,
    digit: impl Fn(K) -> usize + Sync,
) -> Result<Scattered<K>> {
    assert!(digits <= DIGITS_MAX, "{digits} partitions in one pass");
    let rows = keys.rows;
    let values = values_of::<K>(&keys.data, rows);
    let chunk_rows = rows.div_ceil(run.threads).next_multiple_of(MORSEL_ROWS);
    let chunks: Vec<&[K]> = values.chunks(chunk_rows.max(1)).collect();

    let counts: Vec<Vec<usize>> =
        chunks.par_iter().map(|chunk| count_digits(run, chunk, digits, &digit)).collect::<Result<_>>()?;
    // Start of each piece of the output, and the end. A piece is one thread's share of one
    // partition.
    let mut piece_bounds = Vec::with_capacity(digits * chunks.len() + 1);
    let mut bounds = Vec::with_capacity(digits + 1);
    let mut start = 0;
    for digit in 0..digits {
        bounds.push(start);
        for counts in &counts {
            piece_bounds.push(start);
            start += counts[digit];
        }
    }
    piece_bounds.push(start);
    bounds.push(start);
    drop(counts);

    // One output per column, and one writer per thread and column: the keys first, then the payload
    // columns.
    let mut keys_out = run.values::<K>(rows, "transforming keys")?;
    let mut columns_out = Vec::with_capacity(payload.len());
    for payload in payload {
        let width = payload_width(payload);
        columns_out.push(run.values::<u8>(rows * width.bytes(), "transforming a payload column")?);
    }
    let mut writers: Vec<Vec<Box<dyn Write + '_>>> =
        chunks.iter().map(|_| Vec::with_capacity(1 + payload.len())).collect();
    add_writers(&mut writers, Source::Values(values), &mut keys_out, &piece_bounds);
    for (payload, out) in payload.iter().zip(&mut columns_out) {
        match payload {
            Payload::RowNumber => {
                add_writers(&mut writers, Source::Numbers, bytemuck::cast_slice_mut::<u8, u32>(out), &piece_bounds);
            }
            Payload::Column(column) => {
                assert_eq!(column.rows, rows, "a payload column has as many rows as there are keys");
                with_cell!(column.width, T => {
                    let source = Source::Values(values_of::<T>(&column.data, rows));
                    add_writers(&mut writers, source, bytemuck::cast_slice_mut::<u8, T>(out), &piece_bounds);
                });
            }
        }
    }

    chunks.into_par_iter().zip(writers).enumerate().try_for_each(|(index, (chunk, mut writers))| {
        let mut block_digits = vec![0u16; BLOCK_ROWS.min(chunk.len())];
        for (block, keys) in chunk.chunks(BLOCK_ROWS).enumerate() {
            run.cancel.check()?;
            let block_digits = &mut block_digits[..keys.len()];
            block_digits.iter_mut().zip(keys).for_each(|(out, &key)| *out = digit(key) as u16);
            let first_row = index * chunk_rows + block * BLOCK_ROWS;
            writers.iter_mut().for_each(|writer| writer.write(block_digits, first_row));
        }
        writers.iter_mut().for_each(|writer| writer.finish());
        raw::fence();
        Ok::<_, Error>(())
    })?;

    let columns = payload.iter().map(payload_width).zip(columns_out).collect();
    Ok(Scattered { keys: keys_out, columns, bounds })
}

/// Digits are stored in 16 bits.
const DIGITS_MAX: usize = 1 << 16;

/// Rows whose digits are computed before their columns are moved, column by column. They are many
/// for each line of a column while its lines are in the first-level cache. They are few enough that
/// the digits fit there too.
const BLOCK_ROWS: usize = 1 << 13;

fn payload_width(payload: &Payload) -> Width {
    match payload {
        Payload::RowNumber => Width::W4,
        Payload::Column(column) => column.width,
    }
}

fn count_digits<K: Key>(run: &Run<'_>, keys: &[K], digits: usize, digit: impl Fn(K) -> usize) -> Result<Vec<usize>> {
    let mut counts = vec![0usize; digits];
    for morsel in keys.chunks(MORSEL_ROWS) {
        run.cancel.check()?;
        morsel.iter().for_each(|&key| counts[digit(key)] += 1);
    }
    Ok(counts)
}
