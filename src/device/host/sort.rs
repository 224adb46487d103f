//! Sorting by key: one pass that divides rows into ranges of keys, then radix sorts of the ranges
//! in cache.
//!
//! ```text
//!   rows ── scatter by leading bits (or by splitters) ──► [ range 0 | range 1 | ... ]
//!           all threads, keys and payload
//!   each range ── radix sort of (key, row of the range) ── permute payload columns, in place
//!           a range per thread
//! ```
//!
//! The leading bits are the highest in which any two keys differ, so that small numbers in wide
//! keys lose no precision. If a sample shows that bits would divide badly (clustered keys), ranges
//! are bounded by splitters from the sample instead. Digits in which no two keys of a range differ
//! are skipped. Sorted input and sorted ranges are not moved.

use std::sync::atomic::{AtomicBool, Ordering};

use bytemuck::Pod;
use rayon::prelude::*;

use super::buffer::{split_at_bounds, values_of};
use super::hash::{Key, with_cell, with_key};
use super::partition::{Scattered, payload_as_is, scatter};
use super::slots::Slot;
use super::{MORSEL_ROWS, Run};
use crate::Result;
use crate::device::{Column, KeyWidth, Keys, Payload, Sorted, Width};

/// Rows that a range should have. Two copies of its keys and row numbers, and one column, then stay
/// in the second-level cache.
const RANGE_ROWS: usize = 1 << 14;

/// Ranges shorter than this are sorted by comparison, because counters would cost more than the
/// rows.
const COMPARED_ROWS_MAX: usize = 256;

/// Bits that one pass over a range resolves. Its counters and the lines that it writes stay in the
/// first-level cache.
const DIGIT_BITS_MAX: u32 = 11;

/// Maximum size of a range relative to the average. If a range is larger, splitters bound the
/// ranges instead.
const CROWDED: usize = 8;

/// Returns the bytes that sorting takes in addition to the sorted keys and payload columns. For
/// each range being sorted, these are two copies of its keys and row numbers, and one of its widest
/// column.
pub fn sort_scratch_bytes(width: KeyWidth, rows: u64, payload_bytes_max: u64, threads: usize) -> u64 {
    let row_bytes = with_key!(width, K => 2 * size_of::<<K as Key>::Unique>()) as u64 + payload_bytes_max;
    rows.min((threads * (CROWDED + 1) * RANGE_ROWS) as u64) * row_bytes
}

pub(super) fn is_sorted<K: Key>(run: &Run<'_>, keys: &Keys) -> Result<bool> {
    let values = values_of::<K>(&keys.data, keys.rows);
    let disorder = AtomicBool::new(false);
    run.map(0..keys.rows, |range| {
        if disorder.load(Ordering::Relaxed) {
            return;
        }
        // One row of overlap with the next morsel.
        let end = keys.rows.min(range.end + 1);
        if !values[range.start..end].is_sorted() {
            disorder.store(true, Ordering::Relaxed);
        }
    })?;
    Ok(!disorder.into_inner())
}

/// The keys of one range, and its piece of each column.
type SortRange<'a, K> = (&'a mut [K], Vec<(Width, &'a mut [u8])>);

pub(super) fn sort<K: Key>(run: &Run<'_>, keys: &Keys, payload: &[Payload]) -> Result<Sorted> {
    if is_sorted::<K>(run, keys)? {
        let payload = payload.iter().map(|payload| payload_as_is(run, payload, keys.rows)).collect::<Result<_>>()?;
        return Ok(Sorted { keys: keys.clone(), payload });
    }
    let rows = keys.rows;
    let Scattered { keys: mut sorted, mut columns, bounds } = divide::<K>(run, keys, payload)?;
    let mut ranges: Vec<SortRange<'_, K>> =
        split_at_bounds(&mut sorted, &bounds, 1).into_iter().map(|keys| (keys, Vec::new())).collect();
    for (width, column) in &mut columns {
        let pieces = split_at_bounds(column, &bounds, width.bytes());
        ranges.iter_mut().zip(pieces).for_each(|(range, piece)| range.1.push((*width, piece)));
    }
    ranges.into_par_iter().try_for_each(|(keys, columns)| sort_range(run, keys, columns))?;
    let payload =
        columns.into_iter().map(|(width, column)| Column { data: column.freeze(), width, rows, validity: None });
    Ok(Sorted { keys: Keys { data: sorted.freeze(), width: keys.width, rows }, payload: payload.collect() })
}

/// Moves rows into ranges of ascending keys.
fn divide<K: Key>(run: &Run<'_>, keys: &Keys, payload: &[Payload]) -> Result<Scattered<K>> {
    let values = values_of::<K>(&keys.data, keys.rows);
    let bits = (keys.rows / RANGE_ROWS).next_power_of_two().trailing_zeros().min(run.tuning.pass_bits_max);
    let differing = run.map(0..keys.rows, |range| differing_bits(values[0], &values[range]))?;
    let differing = differing.into_iter().fold(K::default(), K::or);
    let bits_used = K::BITS - differing.leading_zeros();
    let bits = bits.min(bits_used);
    if bits == 0 {
        return scatter::<K>(run, keys, payload, 1, |_| 0);
    }
    let (shift, mask) = (bits_used - bits, (1usize << bits) - 1);
    let digit = |key: K| key.bits_from(shift) & mask;

    // Takes sixteen keys per range, spread over all rows.
    let ranges = 1usize << bits;
    let step = (keys.rows / (SAMPLES_PER_RANGE * ranges)).max(1);
    let mut sample: Vec<K> = values.iter().step_by(step).copied().collect();
    let mut counts = vec![0usize; ranges];
    sample.iter().for_each(|&key| counts[digit(key)] += 1);
    let crowded = counts.iter().any(|&count| count > CROWDED * sample.len() / ranges + SAMPLES_PER_RANGE);
    if !crowded {
        return scatter(run, keys, payload, ranges, digit);
    }
    sample.sort_unstable();
    let splitters = splitters_of(&sample, ranges);
    scatter(run, keys, payload, splitters.len() + 1, |key| splitters.partition_point(|&splitter| splitter <= key))
}

/// Returns the first keys of all ranges except the first, from a sorted sample. A key that would be
/// the first of several ranges is heavy. It gets a range of its own, which ends before the next
/// larger key, so that its rows need no sorting.
fn splitters_of<K: Key>(sample: &[K], ranges: usize) -> Vec<K> {
    let all: Vec<K> = (1..ranges).map(|range| sample[range * sample.len() / ranges]).collect();
    let mut splitters = Vec::with_capacity(2 * ranges);
    for equal in all.chunk_by(|a, b| a == b) {
        let key = equal[0];
        splitters.push(key);
        let next = key.wrapping_sub(K::truncate(u128::MAX));
        if equal.len() > 1 && next > key {
            splitters.push(next);
        }
    }
    splitters.dedup();
    splitters
}

/// Keys per range in the sample that decides how to divide.
const SAMPLES_PER_RANGE: usize = 16;

/// Returns the bits in which any of `keys` differs from `reference`.
fn differing_bits<K: Key>(reference: K, keys: &[K]) -> K {
    keys.iter().fold(K::default(), |bits, &key| bits.or(key.xor(reference)))
}

/// Sorts one range and its payload columns, in place.
fn sort_range<K: Key>(run: &Run<'_>, keys: &mut [K], columns: Vec<(Width, &mut [u8])>) -> Result<()> {
    if is_range_sorted(run, keys)? {
        return Ok(());
    }
    // The slot's `first` field holds the position within the range.
    let mut rows = run.values::<K::Unique>(keys.len(), "sorting a range of rows")?;
    let mut index = 0;
    for (rows, keys) in rows.chunks_mut(MORSEL_ROWS).zip(keys.chunks(MORSEL_ROWS)) {
        run.cancel.check()?;
        for (row, &key) in rows.iter_mut().zip(keys) {
            *row = K::Unique::new(key, index, 0);
            index += 1;
        }
    }
    if keys.len() <= COMPARED_ROWS_MAX {
        rows.sort_unstable_by_key(|row| row.key());
        return put(run, &rows, keys, columns);
    }
    let mut spare = run.values::<K::Unique>(keys.len(), "sorting a range of rows")?;
    let (mut from, mut to) = (&mut rows[..], &mut spare[..]);
    let mut differing = K::default();
    for morsel in keys.chunks(MORSEL_ROWS) {
        run.cancel.check()?;
        differing = differing.or(differing_bits(keys[0], morsel));
    }
    let end = K::BITS - differing.leading_zeros();
    let mut shift = differing.trailing_zeros();
    // Digits of equal width: 22 bits are two digits of 11, not one of 11, one of 8 and one of 3.
    let digit_bits = (end - shift).div_ceil((end - shift).div_ceil(DIGIT_BITS_MAX));
    while shift < end {
        let mask = (1usize << digit_bits.min(end - shift)) - 1;
        if differing.bits_from(shift) & mask != 0 {
            move_by_digit::<K, _>(run, from, to, |key| key.bits_from(shift) & mask)?;
            (from, to) = (to, from);
        }
        shift += digit_bits;
    }
    put(run, from, keys, columns)
}

/// True if a range is in order. Runs on this thread.
fn is_range_sorted<K: Key>(run: &Run<'_>, keys: &[K]) -> Result<bool> {
    for start in (0..keys.len()).step_by(MORSEL_ROWS) {
        run.cancel.check()?;
        // One row of overlap with the next morsel.
        if !keys[start..keys.len().min(start + MORSEL_ROWS + 1)].is_sorted() {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Does one stable pass of a radix sort.
fn move_by_digit<K: Key, S: Slot<K>>(
    run: &Run<'_>,
    from: &[S],
    to: &mut [S],
    digit: impl Fn(K) -> usize,
) -> Result<()> {
    const DIGITS: usize = 1 << DIGIT_BITS_MAX;
    let mut places = [0u32; DIGITS];
    for rows in from.chunks(MORSEL_ROWS) {
        run.cancel.check()?;
        rows.iter().for_each(|row| places[digit(row.key()) & (DIGITS - 1)] += 1);
    }
    let mut start = 0;
    for place in &mut places {
        start += std::mem::replace(place, start);
    }
    for rows in from.chunks(MORSEL_ROWS) {
        run.cancel.check()?;
        for row in rows {
            let place = &mut places[digit(row.key()) & (DIGITS - 1)];
            to[*place as usize] = *row;
            *place += 1;
        }
    }
    Ok(())
}

/// Writes the sorted keys, and the columns in the same order.
fn put<K: Key, S: Slot<K>>(run: &Run<'_>, rows: &[S], keys: &mut [K], columns: Vec<(Width, &mut [u8])>) -> Result<()> {
    for (keys, rows) in keys.chunks_mut(MORSEL_ROWS).zip(rows.chunks(MORSEL_ROWS)) {
        run.cancel.check()?;
        keys.iter_mut().zip(rows).for_each(|(key, row)| *key = row.key());
    }
    for (width, column) in columns {
        let mut before = run.values::<u8>(column.len(), "transforming a payload column")?;
        with_cell!(width, T => {
            let (before, column) = (bytemuck::cast_slice_mut(&mut before), bytemuck::cast_slice_mut(column));
            permute::<K, S, T>(run, rows, before, column)?;
        });
    }
    Ok(())
}

/// Puts the values of `column` into the order of `rows`. `before` is room for a copy.
fn permute<K, S: Slot<K>, T: Pod>(run: &Run<'_>, rows: &[S], before: &mut [T], column: &mut [T]) -> Result<()> {
    for (before, column) in before.chunks_mut(MORSEL_ROWS).zip(column.chunks(MORSEL_ROWS)) {
        run.cancel.check()?;
        before.copy_from_slice(column);
    }
    for (column, rows) in column.chunks_mut(MORSEL_ROWS).zip(rows.chunks(MORSEL_ROWS)) {
        run.cancel.check()?;
        column.iter_mut().zip(rows).for_each(|(value, row)| *value = before[row.first() as usize]);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::Device;
    use crate::device::host::testing::{Bench, SIZES, THREADS, assert_transformed, for_every_key, patterns, random};

    fn sorts_what_it_is_given<K: Key>() {
        let mut random = random(31);
        for threads in THREADS {
            let bench = Bench::new(threads);
            for rows in SIZES {
                let payload = bench.payload_of_every_width(rows);
                for (index, (pattern, numbers)) in patterns(rows, &mut random).into_iter().enumerate() {
                    if rows > 2000 && (index + threads) % 3 != 0 {
                        continue;
                    }
                    let (keys, mut values) = bench.keys::<K>(&numbers);
                    let situation = format!("{rows} rows {pattern}, {threads} threads");
                    let found = bench.device.sort(&keys, &payload, &bench.stream).unwrap();
                    assert_transformed(&found.keys, &found.payload, &values, &situation);
                    let was_sorted = values.is_sorted();
                    assert_eq!(bench.device.is_sorted(&keys, &bench.stream).unwrap(), was_sorted, "{situation}");
                    values.sort_unstable();
                    assert!(values == values_of::<K>(&found.keys.data, rows), "{situation}");
                }
            }
        }
    }

    #[test]
    fn rows_are_sorted_with_their_payload() {
        for_every_key!(sorts_what_it_is_given);
    }

    #[test]
    fn a_heavy_key_has_its_own_range() {
        // A third of the rows have one key, and its neighbours a few rows each. In one range, a
        // single thread would sort all of them, with a copy of their keys and row numbers.
        let rows = 1_000_000u32;
        let heavy = 0x4000_0000;
        let numbers: Vec<u32> = (0..rows).map(|row| if row % 3 == 0 { heavy } else { heavy - 400_000 + row }).collect();
        let bench = Bench::new(2);
        let (keys, mut values) = bench.keys::<u32>(&numbers);
        let sorted = bench.device.sort(&keys, &[], &bench.stream).unwrap();
        values.sort_unstable();
        assert!(values == values_of::<u32>(&sorted.keys.data, values.len()));
        let scratch = bench.device.memory().used_bytes_max() - 4 * u64::from(rows);
        assert!(scratch < 4 * u64::from(rows) / 3, "{scratch} B in addition to the sorted keys");

        for sample in [vec![5u32; 64], vec![0; 64], vec![u32::MAX; 64], (0..64).map(|n| n.clamp(7, 9)).collect()] {
            let splitters = splitters_of(&sample, 16);
            assert!(splitters.windows(2).all(|pair| pair[0] < pair[1]), "{splitters:?}");
            let range = |key| splitters.partition_point(|&splitter| splitter <= key);
            let heaviest = sample[32];
            assert!(heaviest == 0 || range(heaviest - 1) < range(heaviest), "{splitters:?}");
            assert!(heaviest == u32::MAX || range(heaviest) < range(heaviest + 1), "{splitters:?}");
        }
    }

    #[test]
    fn sorted_keys_are_not_copied() {
        let bench = Bench::new(2);
        let (keys, _) = bench.keys::<u32>(&(0..100_000).collect::<Vec<_>>());
        let sorted = bench.device.sort(&keys, &[], &bench.stream).unwrap();
        assert!(std::sync::Arc::ptr_eq(&keys.data, &sorted.keys.data));
    }

    #[test]
    fn one_row_out_of_order_is_detected_at_any_position() {
        let bench = Bench::new(3);
        let rows = 2 * MORSEL_ROWS + 10;
        for place in [1, 2, MORSEL_ROWS - 1, MORSEL_ROWS, MORSEL_ROWS + 1, 2 * MORSEL_ROWS, rows - 1] {
            let mut numbers: Vec<u32> = (10..rows as u32 + 10).collect();
            numbers[place] = numbers[place - 1] - 1;
            let (keys, _) = bench.keys::<u32>(&numbers);
            assert!(
                !bench.device.is_sorted(&keys, &bench.stream).unwrap(),
                "row {place} is smaller than the one before"
            );
        }
    }
}
