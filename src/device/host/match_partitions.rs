//! Matching within partitions, each with a table that stays in the cache of its thread.
//!
//! Partitions are worked on in parallel. So are the probe rows of one partition if there are many
//! (a heavy key), with one shared table. If many build rows have few keys, several threads search
//! for the runs of equal keys. If a build partition outgrows the cache, its table only gets slower
//! to read.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

use rayon::prelude::*;

use super::buffer::{Values, split_at_bounds, values_of};
use super::hash::Key;
use super::slots::{Addressing, GrowingTable, Slot, Tally, probe, probe_morsels, slot_count};
use super::table::matches;
use super::{MORSEL_ROWS, Run};
use crate::Result;
use crate::device::{NO_ROW, PartitionMatches, Partitions};

pub(super) fn match_partitions<K: Key>(
    run: &Run<'_>,
    build: &Partitions,
    probe: &Partitions,
    partitions: Range<usize>,
) -> Result<PartitionMatches> {
    let (build_bounds, probe_bounds) = (build.bounds.get()?, probe.bounds.get()?);
    let bounds = &probe_bounds[partitions.start..=partitions.end];
    let rows = bounds[0]..bounds[partitions.len()];
    let mut first = run.values::<u32>(rows.len(), "matches")?;
    let mut count = match build.is_grouped() {
        true => Some(run.values::<u32>(rows.len(), "lengths of matches")?),
        false => None,
    };
    let counts: Vec<Option<&mut [u32]>> = match &mut count {
        Some(count) => split_at_bounds(count, bounds, 1).into_iter().map(Some).collect(),
        None => partitions.clone().map(|_| None).collect(),
    };
    let build_keys = values_of::<K>(&build.keys.data, build.keys.rows);
    let probe_keys = values_of::<K>(&probe.keys.data, probe.keys.rows);
    let repeated = AtomicBool::new(false);
    let tally = split_at_bounds(&mut first, bounds, 1)
        .into_par_iter()
        .zip(counts)
        .zip(partitions)
        .map(|((first, count), partition)| {
            run.cancel.check()?;
            if repeated.load(Ordering::Relaxed) {
                return Ok(Tally::default());
            }
            let start = build_bounds[partition];
            let build_keys = &build_keys[start..build_bounds[partition + 1]];
            let probe_keys = &probe_keys[probe_bounds[partition]..probe_bounds[partition + 1]];
            if build_keys.is_empty() || probe_keys.is_empty() {
                first.fill(NO_ROW);
                count.into_iter().for_each(|count| count.fill(0));
                return Ok(Tally::default());
            }
            match count {
                None => {
                    let Some(table) = enter_distinct(run, build_keys, start)? else {
                        repeated.store(true, Ordering::Relaxed);
                        return Ok(Tally::default());
                    };
                    probe_partition(run, &table.slots, probe_keys, first, None)
                }
                Some(count) => {
                    let slots = enter_runs(run, build_keys, start)?;
                    probe_partition(run, &slots, probe_keys, first, Some(count))
                }
            }
        })
        .try_reduce(Tally::default, |a, b| Ok(a.add(b)))?;
    if repeated.into_inner() {
        return Ok(PartitionMatches::RepeatedBuildKeys);
    }
    Ok(PartitionMatches::Matched(matches(first, count, rows, tally)))
}

/// Builds a table of the positions of distinct keys, counted from `start`. `None` when a key
/// repeats.
fn enter_distinct<K: Key>(run: &Run<'_>, keys: &[K], start: usize) -> Result<Option<GrowingTable<K::Unique>>> {
    let mut table = GrowingTable::<K::Unique>::new(run, keys.len(), TABLE)?;
    let mut position = start as u32;
    for keys in keys.chunks(MORSEL_ROWS) {
        run.cancel.check()?;
        table.make_room(run, keys.len())?;
        for &key in keys {
            let slot = table.slot(key);
            if !slot.is_empty() {
                return Ok(None);
            }
            *slot = Slot::new(key, position, 1);
            position += 1;
        }
    }
    Ok(Some(table))
}

/// Purpose of the memory of a partition's table, for errors.
const TABLE: &str = "a partition's hash table";

/// Builds a table of the runs of adjacent equal keys, with positions counted from `start`. Its size
/// depends on the runs and not on the rows, because a heavy key has many rows.
fn enter_runs<K: Key>(run: &Run<'_>, keys: &[K], start: usize) -> Result<Values<K::Run>> {
    if keys.len() > HEAVY_ROWS_MIN
        && run.threads > 1
        && let Some(starts) = few_run_starts(run, keys)?
    {
        return enter_runs_at(run, keys, start, &starts);
    }
    let mut runs = 0;
    for_each_run(run, keys, |_, _| runs += 1)?;
    let mut slots = run.values::<K::Run>(slot_count(runs), TABLE)?;
    slots.fill(Slot::<K>::empty());
    let addressing = Addressing::whole(slots.len());
    for_each_run(run, keys, |key, range| {
        let index = addressing.find(&slots, key, addressing.start(key));
        debug_assert!(slots[index].is_empty(), "equal keys of grouped partitions are adjacent");
        slots[index] = Slot::new(key, (start + range.start) as u32, range.len() as u32);
    })?;
    Ok(slots)
}

/// Partitions of more rows than this, several times an ordinary one, are searched by all threads.
const HEAVY_ROWS_MIN: usize = 8 * MORSEL_ROWS;

/// Returns the starts of runs of equal keys if they are few. The list is then small compared with
/// the table that the runs will need. All threads search.
fn few_run_starts<K: Key>(run: &Run<'_>, keys: &[K]) -> Result<Option<Vec<u32>>> {
    let few = keys.len() / 8;
    let starts_run = |row: usize| row == 0 || keys[row] != keys[row - 1];
    let counts = run.map(0..keys.len(), |rows| rows.filter(|&row| starts_run(row)).count())?;
    if counts.iter().sum::<usize>() > few {
        return Ok(None);
    }
    let starts =
        |rows: Range<usize>| -> Vec<u32> { rows.filter(|&row| starts_run(row)).map(|row| row as u32).collect() };
    Ok(Some(run.map(0..keys.len(), starts)?.concat()))
}

/// Does [`enter_runs`] for runs with the given starts.
fn enter_runs_at<K: Key>(run: &Run<'_>, keys: &[K], start: usize, starts: &[u32]) -> Result<Values<K::Run>> {
    let mut slots = run.values::<K::Run>(slot_count(starts.len()), TABLE)?;
    slots.fill(Slot::<K>::empty());
    let addressing = Addressing::whole(slots.len());
    for (at, &first) in starts.iter().enumerate() {
        if at % MORSEL_ROWS == 0 {
            run.cancel.check()?;
        }
        let end = starts.get(at + 1).map_or(keys.len(), |&next| next as usize);
        let key = keys[first as usize];
        let index = addressing.find(&slots, key, addressing.start(key));
        debug_assert!(slots[index].is_empty(), "equal keys of grouped partitions are adjacent");
        slots[index] = Slot::new(key, start as u32 + first, (end - first as usize) as u32);
    }
    Ok(slots)
}

/// Calls `each` with every run of adjacent equal keys.
fn for_each_run<K: Key>(run: &Run<'_>, keys: &[K], mut each: impl FnMut(K, Range<usize>)) -> Result<()> {
    let mut run_start = 0;
    for row in 1..keys.len() {
        if row % MORSEL_ROWS == 0 {
            run.cancel.check()?;
        }
        if keys[row] != keys[run_start] {
            each(keys[run_start], run_start..row);
            run_start = row;
        }
    }
    if let Some(&key) = keys.get(run_start) {
        each(key, run_start..keys.len());
    }
    Ok(())
}

fn probe_partition<K: Key, S: Slot<K>>(
    run: &Run<'_>,
    slots: &[S],
    keys: &[K],
    first: &mut [u32],
    count: Option<&mut [u32]>,
) -> Result<Tally> {
    let addressing = Addressing::whole(slots.len());
    if keys.len() <= 2 * MORSEL_ROWS {
        return Ok(probe(slots, addressing, keys, first, count));
    }
    probe_morsels(run, keys, first, count, |keys, first, count| probe(slots, addressing, keys, first, count))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::host::testing::{Bench, SIZES, THREADS, assert_matches, for_every_key, patterns, random};
    use crate::device::{Device, RadixBits};

    fn matches_within_partitions<K: Key>() {
        let mut random = random(51);
        for threads in THREADS {
            let bench = Bench::new(threads);
            for rows in SIZES {
                for (index, (pattern, numbers)) in patterns(rows, &mut random).into_iter().enumerate() {
                    if rows > 2000 && (index + threads) % 3 != 0 {
                        continue;
                    }
                    let bits = RadixBits { skip: 0, bits: [0, 1, 4][index % 3] };
                    let situation = format!("{rows} rows {pattern}, {bits:?}, {threads} threads");
                    let probe_numbers: Vec<u32> = numbers.iter().flat_map(|&n| [n, n ^ 0x55, n]).chain([0]).collect();
                    let (build, _) = bench.keys::<K>(&numbers);
                    let (probe, _) = bench.keys::<K>(&probe_numbers);
                    let [build, probe] =
                        [build, probe].map(|keys| bench.device.partition(&keys, &[], bits, &bench.stream).unwrap());
                    let distinct = numbers.iter().collect::<std::collections::HashSet<_>>().len();
                    let find = |build: &Partitions, range| {
                        bench.device.match_partitions(build, &probe, range, &bench.stream).unwrap()
                    };
                    let probe_values = values_of::<K>(&probe.keys.data, probe.keys.rows);
                    let all = 0..1usize << bits.bits;
                    match find(&build, all.clone()) {
                        PartitionMatches::Matched(found) => {
                            assert_eq!(distinct, rows, "{situation}");
                            let values = values_of::<K>(&build.keys.data, rows);
                            assert_matches(&found, values, probe_values, &situation);
                        }
                        PartitionMatches::RepeatedBuildKeys => assert!(distinct < rows, "{situation}"),
                    }
                    let grouped = bench.device.group_partitions(build, &bench.stream).unwrap();
                    for range in [all.clone(), all.end / 2..all.end, 0..0] {
                        let PartitionMatches::Matched(found) = find(&grouped, range.clone()) else {
                            panic!("grouped keys were reported as repeated, {situation}");
                        };
                        let bounds = probe.bounds.get().unwrap();
                        assert_eq!(found.rows, bounds[range.start]..bounds[range.end], "{situation}");
                        let values = values_of::<K>(&grouped.keys.data, rows);
                        assert_matches(&found, values, probe_values, &situation);
                    }
                }
            }
        }
    }

    #[test]
    fn probe_rows_find_the_build_rows_of_their_partition() {
        for_every_key!(matches_within_partitions);
    }

    /// Returns the bytes that two partitions of `rows` build rows with one key each take, without
    /// input and output.
    fn bytes_for_a_heavy_key<K: Key>(rows: usize, grouped: bool) -> u64 {
        let bench = Bench::new(2);
        let (build, _) = bench.keys::<K>(&vec![7; rows]);
        let (probe, _) = bench.keys::<K>(&[7, 8, 9]);
        let bits = RadixBits { skip: 0, bits: 1 };
        let [mut build, probe] =
            [build, probe].map(|keys| bench.device.partition(&keys, &[], bits, &bench.stream).unwrap());
        let mut row_bytes = 0;
        if grouped {
            build = bench.device.group_partitions(build, &bench.stream).unwrap();
            // Grouping moved all keys, and stored the place of each.
            row_bytes = size_of::<K>() + 4;
        }
        let found = bench.device.match_partitions(&build, &probe, 0..2, &bench.stream).unwrap();
        assert_eq!(matches!(found, PartitionMatches::Matched(_)), grouped);
        bench.device.memory().used_bytes_max() - ((size_of::<K>() + row_bytes) * rows) as u64
    }

    fn heavy_keys_take_little<K: Key>() {
        // A table by rows would have two to four million slots of at least eight bytes.
        for grouped in [false, true] {
            let bytes = bytes_for_a_heavy_key::<K>(1_000_000, grouped);
            assert!(bytes < 8 << 20, "{bytes} B for one key of {} bits, grouped {grouped}", K::BITS);
        }
    }

    #[test]
    fn the_table_of_a_heavy_key_does_not_grow_with_its_rows() {
        for_every_key!(heavy_keys_take_little);
    }

    #[test]
    fn probe_rows_find_the_runs_of_a_heavy_partition() {
        // Half of the build rows have one key, and the others one of a thousand keys: few runs in
        // two large partitions.
        let rows = 4 * HEAVY_ROWS_MIN as u32;
        let build_numbers: Vec<u32> = (0..rows).map(|row| if row % 2 == 0 { 7 } else { row % 1000 }).collect();
        let probe_numbers: Vec<u32> = (0..3000).chain([7; 50_000]).collect();
        for threads in [1, 2, 3] {
            let bench = Bench::new(threads);
            let bits = RadixBits { skip: 0, bits: 1 };
            let parted = |numbers: &[u32]| {
                bench.device.partition(&bench.keys::<u64>(numbers).0, &[], bits, &bench.stream).unwrap()
            };
            let build = bench.device.group_partitions(parted(&build_numbers), &bench.stream).unwrap();
            let probe = parted(&probe_numbers);
            let values = values_of::<u64>(&build.keys.data, build.keys.rows);
            let largest = build
                .bounds
                .get()
                .unwrap()
                .windows(2)
                .map(|bounds| &values[bounds[0]..bounds[1]])
                .max_by_key(|keys| keys.len());
            let starts = bench.device.run(&bench.stream, |run| few_run_starts(run, largest.unwrap())).unwrap().unwrap();
            assert!(starts.len() < 1000 && starts.is_sorted_by(|a, b| a < b), "{} runs", starts.len());
            let found = bench.device.match_partitions(&build, &probe, 0..2, &bench.stream).unwrap();
            let PartitionMatches::Matched(found) = found else { panic!("grouped keys were reported as repeated") };
            let probe_values = values_of::<u64>(&probe.keys.data, probe.keys.rows);
            assert_matches(&found, values, probe_values, &format!("{threads} threads"));
        }
    }

    #[test]
    fn a_large_partition_of_distinct_keys_gets_the_table_that_it_needs() {
        let bench = Bench::new(2);
        let numbers: Vec<u32> = (0..300_000).collect();
        let (build, _) = bench.keys::<u64>(&numbers);
        let bits = RadixBits { skip: 0, bits: 1 };
        let parted = bench.device.partition(&build, &[], bits, &bench.stream).unwrap();
        let grouped = bench.device.group_partitions(parted.clone(), &bench.stream).unwrap();
        for build in [&parted, &grouped] {
            let found = bench.device.match_partitions(build, &parted, 0..2, &bench.stream).unwrap();
            let PartitionMatches::Matched(found) = found else { panic!("distinct keys were reported as repeated") };
            let values = |partitions: &Partitions| values_of::<u64>(&partitions.keys.data, 300_000).to_vec();
            assert_matches(&found, &values(build), &values(&parted), "150,000 keys in each of two partitions");
        }
    }
}
