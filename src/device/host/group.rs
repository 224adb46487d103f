//! Grouping: makes equal keys of each partition adjacent, with the payload.

use std::ops::Range;
use std::sync::atomic::Ordering;

use rayon::prelude::*;

use super::buffer::{Values, as_atomic_u32, bytes_of, split_at_bounds, values_of};
use super::hash::{Key, with_cell};
use super::slots::{GrowingTable, START_ROWS, Slot};
use super::{MORSEL_ROWS, Run};
use crate::device::{Column, Grouping, Keys, NO_ROW, Partitions};
use crate::{Error, Result};

/// Destination of a partition's keys, and of its piece of each payload column.
type GroupTask<'a, K> = (&'a mut [K], Vec<&'a mut [u8]>);

/// All threads may work on a partition of more rows than this, several times an ordinary one. They
/// do if it has a large share of all rows. With one thread on it, all others would wait for that
/// thread.
const HEAVY_ROWS_MIN: usize = 8 * MORSEL_ROWS;

/// Makes equal keys adjacent by counting. A table gives each distinct key of a partition a group,
/// groups get consecutive places, and rows move once.
pub(super) fn group<K: Key>(run: &Run<'_>, partitions: Partitions) -> Result<Partitions> {
    if partitions.is_grouped() {
        return Ok(partitions);
    }
    let Partitions { keys, payload, bounds: of_partitions, bits, .. } = partitions;
    let bounds = of_partitions.get()?;
    let mut keys_out = run.values::<K>(keys.rows, "grouping keys")?;
    let mut columns_out = Vec::with_capacity(payload.len());
    for column in &payload {
        columns_out.push(run.values::<u8>(column.rows * column.width.bytes(), "grouping a payload column")?);
    }
    let mut tasks: Vec<GroupTask<'_, K>> =
        split_at_bounds(&mut keys_out, bounds, 1).into_iter().map(|keys| (keys, Vec::new())).collect();
    for (column, out) in payload.iter().zip(&mut columns_out) {
        let pieces = split_at_bounds(out, bounds, column.width.bytes());
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
        // Working together takes more memory. If there is not enough, one thread orders the rows.
        match order_together(run, &values[range.clone()], run.threads) {
            Ok(order) => take_in_order(run, &order, values, &payload, range, task)?,
            Err(Error::Exhausted(_)) => group_alone(run, values, &payload, range, task)?,
            Err(error) => return Err(error),
        }
    }
    others.into_par_iter().try_for_each(|(partition, task)| {
        group_alone(run, values, &payload, bounds[partition]..bounds[partition + 1], task)
    })?;
    let payload = payload.iter().zip(columns_out);
    let payload = payload.map(|(column, out)| Column { data: out.freeze(), ..column.clone() }).collect();
    let keys = Keys { data: keys_out.freeze(), ..keys };
    Ok(Partitions { keys, payload, bounds: of_partitions, bits, grouping: Grouping::Adjacent { runs: None } })
}

/// Groups the rows of one partition on this thread.
fn group_alone<K: Key>(
    run: &Run<'_>,
    values: &[K],
    payload: &[Column],
    range: Range<usize>,
    (keys_out, columns_out): GroupTask<'_, K>,
) -> Result<()> {
    run.cancel.check()?;
    let places = group_places(run, &values[range.clone()])?;
    move_to(run, &places, &values[range.clone()], keys_out)?;
    for (column, out) in payload.iter().zip(columns_out) {
        with_cell!(column.width, T => {
            let from = bytemuck::cast_slice::<u8, T>(&bytes_of(&column.data)[..column.rows * size_of::<T>()]);
            move_to(run, &places, &from[range.clone()], bytemuck::cast_slice_mut::<u8, T>(out))?;
        });
    }
    Ok(())
}

/// Moves the rows of one partition into a given order, on all threads.
fn take_in_order<K: Key>(
    run: &Run<'_>,
    order: &[u32],
    values: &[K],
    payload: &[Column],
    range: Range<usize>,
    (keys_out, columns_out): GroupTask<'_, K>,
) -> Result<()> {
    take(run, order, &values[range.clone()], keys_out)?;
    for (column, out) in payload.iter().zip(columns_out) {
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

/// Returns the row at each place once equal keys are adjacent, in the order of [`group_places`].
/// Several threads find these rows.
///
/// ```text
///   rows    [  part 0  |  part 1  ]   1. each part numbers its own groups, and counts their rows
///   groups   a:2 b:1    b:3 c:1       2. groups of one key are merged, and get places:
///                                        a 0..2, b 2..3 and 3..6, c 6..7
///   places   0 2 1      3 6 4 5       3. each part gives its places to its rows
/// ```
fn order_together<K: Key>(run: &Run<'_>, keys: &[K], parts: usize) -> Result<Values<u32>> {
    let part_rows = keys.len().div_ceil(parts).max(1);
    // The tables of all parts together start no larger than the one table of a single thread.
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
    // For each part and each of its groups: the group among all, and the number of its rows in
    // earlier parts.
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
                    // No other thread writes this place, which the compiler cannot see.
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

/// Numbers the distinct keys in order of first appearance, and writes the number of each row's key.
/// Returns the keys with their row counts. `room`: distinct keys that the table has room for at
/// first.
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

/// Returns the place of each row once equal keys are adjacent, with groups in order of first
/// appearance.
fn group_places<K: Key>(run: &Run<'_>, keys: &[K]) -> Result<Values<u32>> {
    // Holds the group of each row first, then its place.
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
    use crate::device::host::testing::{
        Bench, SIZES, THREADS, assert_transformed, for_every_key, key, patterns, random,
    };
    use crate::device::{Device, Payload, RadixBits};

    fn equal_keys_are_adjacent<K: Key>() {
        let mut random = random(22);
        for threads in THREADS {
            let bench = Bench::new(threads);
            for rows in SIZES {
                let payload = bench.payload_of_every_width(rows);
                for (index, (pattern, numbers)) in patterns(rows, &mut random).into_iter().enumerate() {
                    if rows > 2000 && (index + threads) % 4 != 0 {
                        continue;
                    }
                    let (keys, values) = bench.keys::<K>(&numbers);
                    let situation = format!("{rows} rows {pattern}, {threads} threads");
                    let bits = RadixBits { skip: 0, bits: 3 };
                    let parted = bench.device.partition(&keys, &payload, bits, &bench.stream).unwrap();
                    let found = bench.device.group_partitions(parted.clone(), &bench.stream).unwrap();
                    assert!(found.is_grouped());
                    assert_eq!(found.bounds.get().unwrap(), parted.bounds.get().unwrap(), "{situation}");
                    assert_transformed(&found.keys, &found.payload, &values, &situation);
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
    fn grouping_by_several_threads_gives_the_order_of_one_thread() {
        for_every_key!(parts_give_the_order_of_the_whole);
    }

    #[test]
    fn a_heavy_partition_is_grouped_equally_by_any_number_of_threads_in_any_memory() {
        // Half of the rows have one key.
        let rows = 4 * HEAVY_ROWS_MIN;
        let numbers: Vec<u32> = (0..rows as u32).map(|row| if row % 2 == 0 { 7 } else { row / 3 }).collect();
        let bits = RadixBits { skip: 0, bits: 4 };
        let grouped = |bench: &Bench| {
            let (keys, _) = bench.keys::<u64>(&numbers);
            let payload = [Payload::RowNumber, Payload::Column(keys.as_column())];
            let parted = bench.device.partition(&keys, &payload, bits, &bench.stream)?;
            assert!(parted.bounds.get().unwrap().windows(2).any(|range| range[1] - range[0] > rows / 2));
            let found = bench.device.group_partitions(parted, &bench.stream)?;
            let order = values_of::<u32>(&found.payload[0].data, rows).to_vec();
            let keys = values_of::<u64>(&found.keys.data, rows).to_vec();
            assert_eq!(keys, values_of::<u64>(&found.payload[1].data, rows));
            Ok::<_, Error>((order, keys))
        };
        let alone = grouped(&Bench::new(1)).unwrap();
        for threads in [2, 3, 8] {
            assert!(grouped(&Bench::new(threads)).unwrap() == alone, "{threads} threads");
        }
        // Memory shrinks until even one thread has too little. The result never changes.
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
