//! Radix partitioning with software write-combining.
//!
//! ```text
//!   rows      [ chunk of thread 0 | chunk of thread 1 ]        1. each thread counts its rows per partition
//!                   │ │ │               │ │ │                  2. offsets: partition by partition, thread by thread
//!   lines      64 bytes per partition and column, in cache     3. each thread moves its rows through the lines; a
//!                   ▼ ▼ ▼               ▼ ▼ ▼                     full line goes to its place in one piece
//!   out       [ p0: t0 t1 | p1: t0 t1 | p2: t0 t1 | ... ]
//! ```
//!
//! Without the lines, every row would touch a different page and cache line of the output. Balkesen et al., "Main-Memory
//! Hash Joins on Multi-Core CPUs" (ICDE 2013), section III.C, describe the technique. A thread's share of a partition is
//! a slice of the output that nobody else has, so that threads never meet.
//!
//! More partitions than one pass resolves well take several: the lowest bits first, and because each pass leaves rows with
//! equal digits in order, the next one finds each of its partitions divided already.

use rayon::prelude::*;

use super::buffer::{Values, split_at_bounds, values_of};
use super::hash::{Key, with_cell};
use super::raw::{self, LINE_BYTES};
use super::transfer::write_range;
use super::{MORSEL_ROWS, Run};
use crate::device::{Carry, Column, Keys, Partitions, RadixBits, Width};
use crate::{Error, Result};

pub(super) fn partition<K: Key>(run: &Run<'_>, keys: &Keys, carry: &[Carry], bits: RadixBits) -> Result<Partitions> {
    assert!(bits.skip + bits.bits <= K::BITS, "keys of {} bits have no {bits:?}", K::BITS);
    if bits.bits == 0 {
        let carried = carry.iter().map(|carry| carried_as_is(run, carry, keys.rows)).collect::<Result<_>>()?;
        return Ok(Partitions { keys: keys.clone(), carried, bounds: [0, keys.rows].into(), bits, grouped: false });
    }
    if bits.bits > run.info.pass_bits_max {
        return partition_in_passes::<K>(run, keys, carry, bits);
    }
    let digit = digit_of::<K>(bits);
    let mask = (1usize << bits.bits) - 1;
    let (rows, width) = (keys.rows, keys.width);
    let Scattered { keys, columns, bounds } = scatter(run, keys, carry, mask + 1, digit)?;
    let carried = columns.into_iter().map(|(width, out)| Column { data: out.freeze(), width, rows, validity: None });
    Ok(Partitions {
        carried: carried.collect(),
        keys: Keys { data: keys.freeze(), width, rows },
        bounds: bounds.into(),
        bits,
        grouped: false,
    })
}

/// The partition of a key.
fn digit_of<K: Key>(bits: RadixBits) -> impl Fn(K) -> usize + Sync {
    let (shift, mask) = (K::BITS - bits.skip - bits.bits, (1usize << bits.bits) - 1);
    move |key: K| key.mix().bits_from(shift) & mask
}

/// Two passes of half the bits each, or more of them when half is still too many.
fn partition_in_passes<K: Key>(run: &Run<'_>, keys: &Keys, carry: &[Carry], bits: RadixBits) -> Result<Partitions> {
    let high = RadixBits { skip: bits.skip, bits: bits.bits.div_ceil(2) };
    let low = RadixBits { skip: bits.skip + high.bits, bits: bits.bits - high.bits };
    let first = partition::<K>(run, keys, carry, low)?;
    let carry: Vec<Carry> = first.carried.into_iter().map(Carry::Column).collect();
    let second = partition::<K>(run, &first.keys, &carry, high)?;
    drop((first.keys, carry));

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
    let mut bounds: Vec<usize> = second.bounds.par_windows(2).map(starts).collect::<Vec<_>>().concat();
    bounds.push(second.keys.rows);
    Ok(Partitions { bounds: bounds.into(), ..second })
}

/// What is carried by an arrangement that moves nothing.
pub(super) fn carried_as_is(run: &Run<'_>, carry: &Carry, rows: usize) -> Result<Column> {
    match carry {
        Carry::Column(column) => {
            assert_eq!(column.rows, rows, "a carried column has as many rows as there are keys");
            Ok(Column { validity: None, ..column.clone() })
        }
        Carry::RowNumber => {
            let mut numbers = run.values::<u32>(rows, "numbering rows")?;
            write_range(run, 0, &mut numbers)?;
            Ok(Column { data: numbers.freeze(), width: Width::W4, rows, validity: None })
        }
    }
}

/// Rows moved by a digit of their key.
pub(super) struct Scattered<K> {
    pub(super) keys: Values<K>,
    /// What was carried.
    pub(super) columns: Vec<(Width, Values<u8>)>,
    /// One more than digits.
    pub(super) bounds: Vec<usize>,
}

/// Moves rows into the order of `digit(key)`, which is less than `digits`; rows with equal digits stay in order.
pub(super) fn scatter<K: Key>(
    run: &Run<'_>,
    keys: &Keys,
    carry: &[Carry],
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
    // Where each piece of the output starts, a piece being one thread's share of one partition, and the end.
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

    // One output and, per thread, one writer for each column: the keys first, then what is carried.
    let mut keys_out = run.values::<K>(rows, "arranging keys")?;
    let mut columns_out = Vec::with_capacity(carry.len());
    for carry in carry {
        let width = carried_width(carry);
        columns_out.push(run.values::<u8>(rows * width.bytes(), "arranging a carried column")?);
    }
    let mut writers: Vec<Vec<Box<dyn Write + '_>>> =
        chunks.iter().map(|_| Vec::with_capacity(1 + carry.len())).collect();
    add_writers(&mut writers, Source::Values(values), &mut keys_out, &piece_bounds);
    for (carry, out) in carry.iter().zip(&mut columns_out) {
        match carry {
            Carry::RowNumber => {
                add_writers(&mut writers, Source::Numbers, bytemuck::cast_slice_mut::<u8, u32>(out), &piece_bounds);
            }
            Carry::Column(column) => {
                assert_eq!(column.rows, rows, "a carried column has as many rows as there are keys");
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

    let columns = carry.iter().map(carried_width).zip(columns_out).collect();
    Ok(Scattered { keys: keys_out, columns, bounds })
}

/// Digits are kept in 16 bits.
const DIGITS_MAX: usize = 1 << 16;

/// Rows whose digits are computed before the columns are moved one after the other: many rows per line of a column while its
/// lines are in the first cache, few enough for the digits to be there too.
const BLOCK_ROWS: usize = 1 << 13;

fn carried_width(carry: &Carry) -> Width {
    match carry {
        Carry::RowNumber => Width::W4,
        Carry::Column(column) => column.width,
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

/// Where a writer's values come from.
#[derive(Clone, Copy)]
enum Source<'a, T> {
    /// A column.
    Values(&'a [T]),
    /// The number of the row itself.
    Numbers,
}

/// Moves one column of one thread's rows.
trait Write: Send {
    /// Moves the rows from `first_row` on, whose digits these are.
    fn write(&mut self, digits: &[u16], first_row: usize);

    /// Writes what is left in the lines.
    fn finish(&mut self);
}

/// A value that can be a row number: only `u32` ever is one.
pub(super) trait Cell: bytemuck::Pod + Send + Sync {
    fn number(row: usize) -> Self;
}

macro_rules! not_a_number {
    ($($cell:ty),*) => {
        $(impl Cell for $cell {
            fn number(_row: usize) -> Self {
                unreachable!("row numbers are carried as u32")
            }
        })*
    };
}

impl Cell for u32 {
    #[inline(always)]
    fn number(row: usize) -> Self {
        row as u32
    }
}

not_a_number!(u64, u128, [u8; 1], [u8; 2], [u8; 4], [u8; 8], [u8; 16], [u8; 32]);

/// Gives each thread a writer of its pieces of `out`, which lie digit by digit, and thread by thread within a digit.
fn add_writers<'a, T: Cell>(
    writers: &mut [Vec<Box<dyn Write + 'a>>],
    source: Source<'a, T>,
    out: &'a mut [T],
    piece_bounds: &[usize],
) {
    let threads = writers.len();
    let mut pieces: Vec<Vec<&mut [T]>> = writers.iter().map(|_| Vec::new()).collect();
    let mut phases: Vec<Vec<usize>> = writers.iter().map(|_| Vec::new()).collect();
    for (index, piece) in split_at_bounds(out, piece_bounds, 1).into_iter().enumerate() {
        pieces[index % threads].push(piece);
        phases[index % threads].push(piece_bounds[index] & (lane_count::<T>() - 1));
    }
    for ((writers, pieces), phases) in writers.iter_mut().zip(pieces).zip(phases) {
        writers.push(Box::new(Writer::new(source, pieces, phases)));
    }
}

/// Values per cache line.
const fn lane_count<T>() -> usize {
    LINE_BYTES / size_of::<T>()
}

/// Moves one column through a line per partition.
struct Writer<'a, T> {
    source: Source<'a, T>,
    pieces: Vec<&'a mut [T]>,
    lines: Vec<T>,
    /// Values written so far, counted from the line boundary before the piece, so that the place in the line is the lowest
    /// bits.
    ends: Vec<usize>,
    /// Where in its first line each piece starts.
    phases: Vec<usize>,
}

impl<'a, T: Cell> Writer<'a, T> {
    fn new(source: Source<'a, T>, pieces: Vec<&'a mut [T]>, phases: Vec<usize>) -> Self {
        let lines = vec![T::zeroed(); pieces.len() * lane_count::<T>()];
        Self { source, pieces, lines, ends: phases.clone(), phases }
    }

    #[inline(always)]
    fn put(&mut self, digit: usize, value: T) {
        let lanes = lane_count::<T>();
        let end = self.ends[digit];
        let lane = end & (lanes - 1);
        self.lines[digit * lanes + lane] = value;
        self.ends[digit] = end + 1;
        if lane == lanes - 1 {
            self.flush(digit, end + 1);
        }
    }

    /// Writes the line that ends at `end`, which is full but for what lies before the piece.
    #[inline(always)]
    fn flush(&mut self, digit: usize, end: usize) {
        let lanes = lane_count::<T>();
        let line = &self.lines[digit * lanes..(digit + 1) * lanes];
        let written = end - self.phases[digit];
        if written >= lanes {
            raw::stream_line(&mut self.pieces[digit][written - lanes..written], line);
        } else {
            self.pieces[digit][..written].copy_from_slice(&line[lanes - written..]);
        }
    }
}

impl<T: Cell> Write for Writer<'_, T> {
    fn write(&mut self, digits: &[u16], first_row: usize) {
        match self.source {
            Source::Values(values) => {
                let values = &values[first_row..first_row + digits.len()];
                digits.iter().zip(values).for_each(|(&digit, &value)| self.put(usize::from(digit), value));
            }
            Source::Numbers => {
                digits.iter().zip(first_row..).for_each(|(&digit, row)| self.put(usize::from(digit), T::number(row)));
            }
        }
    }

    fn finish(&mut self) {
        let lanes = lane_count::<T>();
        for (digit, piece) in self.pieces.iter_mut().enumerate() {
            let (end, written) = (self.ends[digit], self.ends[digit] - self.phases[digit]);
            let filled = end & (lanes - 1);
            let left = filled.min(written);
            let line = &self.lines[digit * lanes..digit * lanes + filled];
            piece[written - left..].copy_from_slice(&line[filled - left..]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::Device;
    use crate::device::host::testing::{Bench, SIZES, THREADS, assert_arranged, for_every_key, key, patterns, random};

    fn rows_arrive_in_their_partition<K: Key>() {
        let mut random = random(21);
        for threads in THREADS {
            let bench = Bench::new(threads);
            for rows in SIZES {
                let carry = bench.carry_everything(rows);
                for (index, (pattern, numbers)) in patterns(rows, &mut random).into_iter().enumerate() {
                    // Every combination would take minutes: sizes, patterns and bits take turns.
                    if rows > 2000 && (index + threads) % 4 != 0 {
                        continue;
                    }
                    let (keys, values) = bench.keys::<K>(&numbers);
                    let bits = [(0, 0), (0, 1), (0, 6), (3, 5), (0, 11), (11, 9), (0, 12), (2, 13)][(index + rows) % 8];
                    let bits = RadixBits { skip: bits.0, bits: bits.1 };
                    let situation = format!("{rows} rows {pattern}, {bits:?}, {threads} threads");
                    let found = bench.device.partition(&keys, &carry, bits, &bench.stream).unwrap();
                    assert_eq!(found.bounds.len(), (1 << bits.bits) + 1, "{situation}");
                    assert_eq!((found.bounds[0], found.bounds[1 << bits.bits]), (0, rows), "{situation}");
                    let order = assert_arranged(&found.keys, &found.carried, &values, &situation);
                    for (partition, range) in found.bounds.windows(2).enumerate() {
                        for &row in &order[range[0]..range[1]] {
                            let digit = (K::BITS - bits.skip - bits.bits) % K::BITS;
                            let digit = values[row as usize].mix().bits_from(digit) & ((1 << bits.bits) - 1);
                            assert_eq!(digit, partition, "row {row}, {situation}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn every_row_arrives_in_its_partition_with_all_it_carries() {
        for_every_key!(rows_arrive_in_their_partition);
    }

    #[test]
    fn a_pass_more_changes_no_partition() {
        // Around what one, two and three passes resolve, with rows enough that most partitions have some.
        let bench = Bench::new(2);
        let max = bench.device.info().pass_bits_max;
        let numbers: Vec<u32> = (0..100_003).map(|row: u32| row.wrapping_mul(0x9e37_79b9) >> 4).collect();
        let (keys, _) = bench.keys::<u64>(&numbers);
        let carry = [Carry::RowNumber, Carry::Column(keys.as_column())];
        for bits in [max - 1, max, max + 1, 2 * max - 1, 2 * max, 2 * max + 1] {
            let bits = RadixBits { skip: 3, bits };
            let digit = digit_of::<u64>(bits);
            let found = bench.device.partition(&keys, &carry, bits, &bench.stream).unwrap();
            let values = values_of::<u64>(&found.keys.data, keys.rows);
            let rows = values_of::<u32>(&found.carried[0].data, keys.rows);
            assert_eq!(values, values_of::<u64>(&found.carried[1].data, keys.rows), "{bits:?}");
            assert!(
                rows.iter().zip(values).all(|(&row, &value)| value == key::<u64>(numbers[row as usize])),
                "{bits:?}"
            );
            assert_eq!(found.bounds.len(), (1 << bits.bits) + 1, "{bits:?}");
            assert_eq!(found.bounds[1 << bits.bits], keys.rows, "{bits:?}");
            let mut seen = 0;
            for (partition, range) in found.bounds.windows(2).enumerate() {
                seen += range[1] - range[0];
                assert!(values[range[0]..range[1]].iter().all(|&key| digit(key) == partition), "{partition}, {bits:?}");
            }
            assert_eq!(seen, keys.rows, "{bits:?}");
        }
    }
}
