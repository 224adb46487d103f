//! Matching within partitions, each with a table that stays in the cache of the thread that works on it.
//!
//! Partitions are worked on in parallel, and so are the probe rows of one partition if there are many (a heavy key), all
//! of them with the same table. A build partition that outgrew the cache makes its table slower to reach, nothing else.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

use rayon::prelude::*;

use super::buffer::{split_at_bounds, values_of};
use super::hash::Key;
use super::slots::{Addressing, Slot, Tally, probe, slot_count};
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
    let bounds = &probe.bounds[partitions.start..=partitions.end];
    let rows = bounds[0]..bounds[partitions.len()];
    let mut first = run.values::<u32>(rows.len(), "matches")?;
    let mut count = match build.grouped {
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
            let start = build.bounds[partition];
            let build_keys = &build_keys[start..build.bounds[partition + 1]];
            let probe_keys = &probe_keys[probe.bounds[partition]..probe.bounds[partition + 1]];
            if build_keys.is_empty() || probe_keys.is_empty() {
                first.fill(NO_ROW);
                count.into_iter().for_each(|count| count.fill(0));
                return Ok(Tally::default());
            }
            let slots = slot_count(build_keys.len());
            match count {
                None => {
                    let mut slots = run.values::<K::Unique>(slots, "a partition's hash table")?;
                    if !enter_distinct(run, &mut slots, build_keys, start)? {
                        repeated.store(true, Ordering::Relaxed);
                        return Ok(Tally::default());
                    }
                    probe_partition(run, &slots, probe_keys, first, None)
                }
                Some(count) => {
                    let mut slots = run.values::<K::Run>(slots, "a partition's hash table")?;
                    enter_runs(run, &mut slots, build_keys, start)?;
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

/// Fills an empty table with the positions of distinct keys, counted from `start`. False when a key repeats.
fn enter_distinct<K: Key, S: Slot<K>>(run: &Run<'_>, slots: &mut [S], keys: &[K], start: usize) -> Result<bool> {
    slots.fill(S::empty());
    let addressing = Addressing::whole(slots.len());
    let mut position = start as u32;
    for keys in keys.chunks(MORSEL_ROWS) {
        run.cancel.check()?;
        for &key in keys {
            let slot = &mut slots[addressing.find(slots, key, addressing.start(key))];
            if !slot.is_empty() {
                return Ok(false);
            }
            *slot = S::new(key, position, 1);
            position += 1;
        }
    }
    Ok(true)
}

/// Fills an empty table with the runs of adjacent equal keys, their positions counted from `start`.
fn enter_runs<K: Key, S: Slot<K>>(run: &Run<'_>, slots: &mut [S], keys: &[K], start: usize) -> Result<()> {
    slots.fill(S::empty());
    let addressing = Addressing::whole(slots.len());
    let mut run_start = 0;
    let mut enter = |key: K, range: Range<usize>| {
        let index = addressing.find(slots, key, addressing.start(key));
        debug_assert!(slots[index].is_empty(), "equal keys of grouped partitions are adjacent");
        slots[index] = S::new(key, (start + range.start) as u32, range.len() as u32);
    };
    for row in 1..keys.len() {
        if row % MORSEL_ROWS == 0 {
            run.cancel.check()?;
        }
        if keys[row] != keys[run_start] {
            enter(keys[run_start], run_start..row);
            run_start = row;
        }
    }
    if let Some(&key) = keys.get(run_start) {
        enter(key, run_start..keys.len());
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
    let morsels = first.len().div_ceil(MORSEL_ROWS);
    let counts: Vec<Option<&mut [u32]>> = match count {
        Some(count) => count.chunks_mut(MORSEL_ROWS).map(Some).collect(),
        None => (0..morsels).map(|_| None).collect(),
    };
    keys.par_chunks(MORSEL_ROWS)
        .zip(first.par_chunks_mut(MORSEL_ROWS))
        .zip(counts)
        .map(|((keys, first), count)| {
            run.cancel.check()?;
            Ok(probe(slots, addressing, keys, first, count))
        })
        .try_reduce(Tally::default, |a, b| Ok(a.add(b)))
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
                        assert_eq!(found.rows, probe.bounds[range.start]..probe.bounds[range.end], "{situation}");
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
}
