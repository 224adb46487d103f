//! Radix partitioning with software write-combining, and grouping of equal keys within partitions.
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

use rayon::prelude::*;

use super::buffer::{Values, bytes_of, split_at_bounds, values_of};
use super::hash::{Key, with_cell};
use super::raw::{self, LINE_BYTES};
use super::slots::{GrowingTable, Slot};
use super::transfer::write_range;
use super::{MORSEL_ROWS, Run};
use crate::Result;
use crate::device::{Carry, Column, Keys, NO_ROW, Partitions, RadixBits, Width};

pub(super) fn partition<K: Key>(run: &Run<'_>, keys: &Keys, carry: &[Carry], bits: RadixBits) -> Result<Partitions> {
    assert!(bits.skip + bits.bits <= K::BITS, "keys of {} bits have no {bits:?}", K::BITS);
    if bits.bits == 0 {
        let carried = carry.iter().map(|carry| carried_as_is(run, carry, keys.rows)).collect::<Result<_>>()?;
        return Ok(Partitions { keys: keys.clone(), carried, bounds: [0, keys.rows].into(), bits, grouped: false });
    }
    let (shift, mask) = (K::BITS - bits.skip - bits.bits, (1usize << bits.bits) - 1);
    let digit = |key: K| key.mix().bits_from(shift) & mask;
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
        Ok::<_, crate::Error>(())
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

/// Makes equal keys adjacent by counting: a table gives each distinct key of a partition a group, groups get consecutive
/// places, and rows move once.
pub(super) fn group<K: Key>(run: &Run<'_>, partitions: Partitions) -> Result<Partitions> {
    let Partitions { keys, carried, bounds, bits, grouped } = partitions;
    if grouped {
        return Ok(Partitions { keys, carried, bounds, bits, grouped });
    }
    let mut keys_out = run.values::<K>(keys.rows, "grouping keys")?;
    let mut columns_out = Vec::with_capacity(carried.len());
    for column in &carried {
        columns_out.push(run.values::<u8>(column.rows * column.width.bytes(), "grouping a carried column")?);
    }
    let mut tasks: Vec<(&mut [K], Vec<&mut [u8]>)> =
        split_at_bounds(&mut keys_out, &bounds, 1).into_iter().map(|keys| (keys, Vec::new())).collect();
    for (column, out) in carried.iter().zip(&mut columns_out) {
        let pieces = split_at_bounds(out, &bounds, column.width.bytes());
        tasks.iter_mut().zip(pieces).for_each(|(task, piece)| task.1.push(piece));
    }
    let values = values_of::<K>(&keys.data, keys.rows);
    tasks.into_par_iter().enumerate().try_for_each(|(partition, (keys_out, columns_out))| {
        run.cancel.check()?;
        let (start, end) = (bounds[partition], bounds[partition + 1]);
        let places = group_places(run, &values[start..end])?;
        move_to(run, &places, &values[start..end], keys_out)?;
        for (column, out) in carried.iter().zip(columns_out) {
            with_cell!(column.width, T => {
                let from = bytemuck::cast_slice::<u8, T>(&bytes_of(&column.data)[..column.rows * size_of::<T>()]);
                move_to(run, &places, &from[start..end], bytemuck::cast_slice_mut::<u8, T>(out))?;
            });
        }
        Ok::<_, crate::Error>(())
    })?;
    let carried = carried.iter().zip(columns_out);
    let carried = carried.map(|(column, out)| Column { data: out.freeze(), ..column.clone() }).collect();
    Ok(Partitions { keys: Keys { data: keys_out.freeze(), ..keys }, carried, bounds, bits, grouped: true })
}

/// The place of each row once equal keys are adjacent, groups being in order of first appearance.
fn group_places<K: Key>(run: &Run<'_>, keys: &[K]) -> Result<Values<u32>> {
    let mut table = GrowingTable::<K::Run>::new(run, keys.len(), "a table to group keys by")?;
    // First the group of each row, then its place.
    let mut places = run.values::<u32>(keys.len(), "the places of grouped keys")?;
    let mut group_sizes: Vec<u32> = Vec::new();
    for (keys, groups) in keys.chunks(MORSEL_ROWS).zip(places.chunks_mut(MORSEL_ROWS)) {
        run.cancel.check()?;
        table.make_room(run, keys.len())?;
        for (&key, group) in keys.iter().zip(groups) {
            let slot = table.slot(key);
            if slot.is_empty() {
                *slot = K::Run::new(key, group_sizes.len() as u32, 1);
                group_sizes.push(0);
            }
            *group = slot.first();
            group_sizes[*group as usize] += 1;
        }
    }
    let mut next = group_sizes;
    let mut start = 0;
    for size in &mut next {
        start += std::mem::replace(size, start);
    }
    for places in places.chunks_mut(MORSEL_ROWS) {
        run.cancel.check()?;
        for place in places {
            let group = &mut next[*place as usize];
            *place = *group;
            *group += 1;
        }
    }
    debug_assert!(!places.contains(&NO_ROW));
    Ok(places)
}

fn move_to<T: bytemuck::Pod>(run: &Run<'_>, places: &[u32], from: &[T], to: &mut [T]) -> Result<()> {
    for (places, from) in places.chunks(MORSEL_ROWS).zip(from.chunks(MORSEL_ROWS)) {
        run.cancel.check()?;
        places.iter().zip(from).for_each(|(&place, &value)| to[place as usize] = value);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::Device;
    use crate::device::host::testing::{Bench, SIZES, THREADS, assert_arranged, for_every_key, patterns, random};

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
                    let bits = [(0, 0), (0, 1), (0, 6), (3, 5), (0, 11), (11, 9)][(index + rows) % 6];
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

    fn equal_keys_are_adjacent<K: Key>() {
        let mut random = random(22);
        for threads in THREADS {
            let bench = Bench::new(threads);
            for rows in SIZES {
                let carry = bench.carry_everything(rows);
                for (index, (pattern, numbers)) in patterns(rows, &mut random).into_iter().enumerate() {
                    if rows > 2000 && (index + threads) % 4 != 0 {
                        continue;
                    }
                    let (keys, values) = bench.keys::<K>(&numbers);
                    let situation = format!("{rows} rows {pattern}, {threads} threads");
                    let bits = RadixBits { skip: 0, bits: 3 };
                    let parted = bench.device.partition(&keys, &carry, bits, &bench.stream).unwrap();
                    let found = bench.device.group_partitions(parted.clone(), &bench.stream).unwrap();
                    assert!(found.grouped);
                    assert_eq!(found.bounds, parted.bounds, "{situation}");
                    assert_arranged(&found.keys, &found.carried, &values, &situation);
                    let found_keys = values_of::<K>(&found.keys.data, rows);
                    let runs = found_keys.chunk_by(|a, b| a == b).count();
                    let distinct = values.iter().collect::<std::collections::HashSet<_>>().len();
                    assert_eq!(runs, distinct, "each key is one run, {situation}");
                }
            }
        }
    }

    #[test]
    fn grouping_makes_equal_keys_adjacent() {
        for_every_key!(equal_keys_are_adjacent);
    }
}
