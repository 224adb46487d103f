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
//!
//! More partitions than one pass resolves well take several: the lowest bits first, and because each pass leaves rows with
//! equal digits in order, the next one finds each of its partitions divided already.

use std::ops::Range;
use std::sync::atomic::Ordering;

use rayon::prelude::*;

use super::buffer::{Values, as_atomic_u32, bytes_of, split_at_bounds, values_of};
use super::hash::{Key, with_cell};
use super::raw::{self, LINE_BYTES};
use super::slots::{GrowingTable, START_ROWS, Slot};
use super::transfer::write_range;
use super::{MORSEL_ROWS, Run};
use crate::device::{Carry, Column, Keys, NO_ROW, Partitions, RadixBits, Width};
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

/// Where the keys of a partition, and its piece of each carried column, go.
type GroupTask<'a, K> = (&'a mut [K], Vec<&'a mut [u8]>);

/// Partitions of more rows than this, several times those of an ordinary one, are worked on by all threads together when
/// they are a large share of all rows: others would wait for the one thread that has it.
const HEAVY_ROWS_MIN: usize = 8 * MORSEL_ROWS;

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
    let mut tasks: Vec<GroupTask<'_, K>> =
        split_at_bounds(&mut keys_out, &bounds, 1).into_iter().map(|keys| (keys, Vec::new())).collect();
    for (column, out) in carried.iter().zip(&mut columns_out) {
        let pieces = split_at_bounds(out, &bounds, column.width.bytes());
        tasks.iter_mut().zip(pieces).for_each(|(task, piece)| task.1.push(piece));
    }
    let values = values_of::<K>(&keys.data, keys.rows);
    let is_heavy = |(partition, _): &(usize, GroupTask<'_, K>)| {
        let rows = bounds[partition + 1] - bounds[*partition];
        rows > HEAVY_ROWS_MIN && 2 * run.threads * rows > keys.rows && run.threads > 1
    };
    let (heavy, others): (Vec<_>, Vec<_>) = tasks.into_iter().enumerate().partition(is_heavy);
    for (partition, task) in heavy {
        let range = bounds[partition]..bounds[partition + 1];
        // Working together takes more memory; where there is none, one thread does it.
        match order_together(run, &values[range.clone()], run.threads) {
            Ok(order) => take_in_order(run, &order, values, &carried, range, task)?,
            Err(Error::Exhausted(_)) => group_alone(run, values, &carried, range, task)?,
            Err(error) => return Err(error),
        }
    }
    others.into_par_iter().try_for_each(|(partition, task)| {
        group_alone(run, values, &carried, bounds[partition]..bounds[partition + 1], task)
    })?;
    let carried = carried.iter().zip(columns_out);
    let carried = carried.map(|(column, out)| Column { data: out.freeze(), ..column.clone() }).collect();
    Ok(Partitions { keys: Keys { data: keys_out.freeze(), ..keys }, carried, bounds, bits, grouped: true })
}

/// Groups the rows of one partition on this thread.
fn group_alone<K: Key>(
    run: &Run<'_>,
    values: &[K],
    carried: &[Column],
    range: Range<usize>,
    (keys_out, columns_out): GroupTask<'_, K>,
) -> Result<()> {
    run.cancel.check()?;
    let places = group_places(run, &values[range.clone()])?;
    move_to(run, &places, &values[range.clone()], keys_out)?;
    for (column, out) in carried.iter().zip(columns_out) {
        with_cell!(column.width, T => {
            let from = bytemuck::cast_slice::<u8, T>(&bytes_of(&column.data)[..column.rows * size_of::<T>()]);
            move_to(run, &places, &from[range.clone()], bytemuck::cast_slice_mut::<u8, T>(out))?;
        });
    }
    Ok(())
}

/// Takes the rows of one partition in an order, on all threads.
fn take_in_order<K: Key>(
    run: &Run<'_>,
    order: &[u32],
    values: &[K],
    carried: &[Column],
    range: Range<usize>,
    (keys_out, columns_out): GroupTask<'_, K>,
) -> Result<()> {
    take(run, order, &values[range.clone()], keys_out)?;
    for (column, out) in carried.iter().zip(columns_out) {
        with_cell!(column.width, T => {
            let from = bytemuck::cast_slice::<u8, T>(&bytes_of(&column.data)[..column.rows * size_of::<T>()]);
            take(run, order, &from[range.clone()], bytemuck::cast_slice_mut::<u8, T>(out))?;
        });
    }
    Ok(())
}

fn take<T: bytemuck::Pod + Send + Sync>(run: &Run<'_>, order: &[u32], from: &[T], to: &mut [T]) -> Result<()> {
    run.fill(to, |start, to| to.iter_mut().zip(&order[start..]).for_each(|(to, &row)| *to = from[row as usize]))
}

/// The row at each place once equal keys are adjacent, in the order that [`group_places`] gives, found by several threads.
///
/// ```text
///   rows    [  part 0  |  part 1  ]   1. each part numbers its own groups, and counts their rows
///   groups   a:2 b:1    b:3 c:1       2. groups of one key are put together, and places dealt out: a 0..2, b 2..3 and
///                                        3..6, c 6..7
///   places   0 2 1      3 6 4 5       3. each part deals its places to its rows
/// ```
fn order_together<K: Key>(run: &Run<'_>, keys: &[K], parts: usize) -> Result<Values<u32>> {
    let part_rows = keys.len().div_ceil(parts).max(1);
    // The tables of all parts together start no larger than the one table of a thread alone.
    let room = START_ROWS / parts;
    // The group of each row, counted within its part.
    let mut groups = run.values::<u32>(keys.len(), "the groups of grouped keys")?;
    let parts: Vec<Vec<(K, u32)>> = keys
        .par_chunks(part_rows)
        .zip(groups.par_chunks_mut(part_rows))
        .map(|(keys, groups)| number_groups(run, keys, groups, room))
        .collect::<Result<_>>()?;

    let largest = parts.iter().map(Vec::len).max().unwrap_or(0);
    let mut table = GrowingTable::<K::Run>::new(run, largest, "a table to group keys by")?;
    let mut sizes: Vec<u32> = Vec::with_capacity(largest);
    // For each part and group of it: the group among all, and how many rows of it lie in the parts before.
    let mut next: Vec<Vec<(u32, u32)>> = Vec::with_capacity(parts.len());
    for part in parts {
        run.cancel.check()?;
        table.make_room(run, part.len())?;
        let of_all = |(key, rows): (K, u32)| {
            let slot = table.slot(key);
            if slot.is_empty() {
                *slot = K::Run::new(key, sizes.len() as u32, 1);
                sizes.push(0);
            }
            let group = slot.first();
            let before = sizes[group as usize];
            sizes[group as usize] += rows;
            (group, before)
        };
        next.push(part.into_iter().map(of_all).collect());
    }
    drop(table);
    let mut starts = sizes;
    let mut start = 0;
    for size in &mut starts {
        start += std::mem::replace(size, start);
    }

    let mut order = run.values::<u32>(keys.len(), "the order of grouped keys")?;
    {
        let order = as_atomic_u32(&mut order);
        groups.par_chunks(part_rows).zip(next).enumerate().try_for_each(|(part, (groups, next))| {
            let mut next: Vec<u32> = next.into_iter().map(|(group, before)| starts[group as usize] + before).collect();
            let mut row = (part * part_rows) as u32;
            for groups in groups.chunks(MORSEL_ROWS) {
                run.cancel.check()?;
                for &group in groups {
                    let place = &mut next[group as usize];
                    // Nobody else has this place; that the compiler cannot see.
                    order[*place as usize].store(row, Ordering::Relaxed);
                    *place += 1;
                    row += 1;
                }
            }
            Ok::<_, Error>(())
        })?;
    }
    Ok(order)
}

/// Numbers the distinct keys in order of first appearance, writes the number of each row's, and answers the keys with how
/// many rows each has. `room`: distinct keys that the table starts with room for.
fn number_groups<K: Key>(run: &Run<'_>, keys: &[K], groups: &mut [u32], room: usize) -> Result<Vec<(K, u32)>> {
    let mut table = GrowingTable::<K::Run>::new(run, keys.len().min(room), "a table to group keys by")?;
    let mut found: Vec<(K, u32)> = Vec::new();
    for (keys, groups) in keys.chunks(MORSEL_ROWS).zip(groups.chunks_mut(MORSEL_ROWS)) {
        run.cancel.check()?;
        table.make_room(run, keys.len())?;
        for (&key, group) in keys.iter().zip(groups) {
            let slot = table.slot(key);
            if slot.is_empty() {
                *slot = K::Run::new(key, found.len() as u32, 1);
                found.push((key, 0));
            }
            *group = slot.first();
            found[*group as usize].1 += 1;
        }
    }
    Ok(found)
}

/// The place of each row once equal keys are adjacent, groups being in order of first appearance.
fn group_places<K: Key>(run: &Run<'_>, keys: &[K]) -> Result<Values<u32>> {
    // First the group of each row, then its place.
    let mut places = run.values::<u32>(keys.len(), "the places of grouped keys")?;
    let mut next: Vec<u32> =
        number_groups(run, keys, &mut places, START_ROWS)?.into_iter().map(|(_, rows)| rows).collect();
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

    fn parts_give_the_order_of_the_whole<K: Key>() {
        let mut random = random(23);
        let bench = Bench::new(3);
        for rows in SIZES {
            for (pattern, numbers) in patterns(rows, &mut random) {
                let values: Vec<K> = numbers.iter().map(|&number| key(number)).collect();
                for parts in [1, 2, 3, 7] {
                    let find = |run: &Run<'_>| -> Result<(Vec<u32>, Vec<u32>)> {
                        let places = group_places(run, &values)?;
                        let mut expected = vec![NO_ROW; rows];
                        places.iter().zip(0..).for_each(|(&place, row)| expected[place as usize] = row);
                        Ok((order_together(run, &values, parts)?.to_vec(), expected))
                    };
                    let (found, expected) = bench.device.run(&bench.stream, find).unwrap();
                    assert!(found == expected, "{rows} rows {pattern}, {parts} parts");
                }
            }
        }
    }

    #[test]
    fn threads_that_group_together_give_the_order_of_one() {
        for_every_key!(parts_give_the_order_of_the_whole);
    }

    #[test]
    fn a_heavy_partition_is_grouped_alike_by_any_number_of_threads_in_any_memory() {
        // Half of the rows have one key.
        let rows = 4 * HEAVY_ROWS_MIN;
        let numbers: Vec<u32> = (0..rows as u32).map(|row| if row % 2 == 0 { 7 } else { row / 3 }).collect();
        let bits = RadixBits { skip: 0, bits: 4 };
        let grouped = |bench: &Bench| {
            let (keys, _) = bench.keys::<u64>(&numbers);
            let carry = [Carry::RowNumber, Carry::Column(keys.as_column())];
            let parted = bench.device.partition(&keys, &carry, bits, &bench.stream)?;
            assert!(parted.bounds.windows(2).any(|range| range[1] - range[0] > rows / 2));
            let found = bench.device.group_partitions(parted, &bench.stream)?;
            let order = values_of::<u32>(&found.carried[0].data, rows).to_vec();
            let keys = values_of::<u64>(&found.keys.data, rows).to_vec();
            assert_eq!(keys, values_of::<u64>(&found.carried[1].data, rows));
            Ok::<_, Error>((order, keys))
        };
        let alone = grouped(&Bench::new(1)).unwrap();
        for threads in [2, 3, 8] {
            assert!(grouped(&Bench::new(threads)).unwrap() == alone, "{threads} threads");
        }
        // With less and less memory, until one thread has not enough either: the result never changes.
        let mut memory = 40 << 20;
        let (mut done, mut refused) = (0, 0);
        while refused < 3 {
            match grouped(&Bench::with_memory(2, memory)) {
                Ok(found) => {
                    assert!(found == alone, "{memory} B");
                    done += 1;
                }
                Err(Error::Exhausted(_)) => refused += 1,
                Err(error) => panic!("{memory} B: {error}"),
            }
            memory -= 1 << 20;
        }
        assert!(done > 3);
    }
}
