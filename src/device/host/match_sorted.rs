//! Matching of sorted keys against sorted keys.
//!
//! The work is divided by merge path (Green, McColl and Bader, "GPU Merge Path", ICS 2012). Both
//! sides together are cut into pieces of equal length. A binary search on each cut's diagonal finds
//! the number of rows of either side before it. A probe row comes before the build rows that equal
//! it. The build rows before a cut are therefore all smaller than the probe rows behind it. Each
//! piece finds the runs of its own probe rows. Within a piece, steps on the build side gallop, so
//! that a few probe rows cost no more than as many searches.

use std::ops::Range;

use rayon::prelude::*;

use super::buffer::{split_at_bounds, values_of};
use super::hash::Key;
use super::slots::Tally;
use super::table::matches;
use super::{MORSEL_ROWS, Run};
use crate::Result;
use crate::device::{Keys, Matches, NO_ROW};

pub(super) fn match_sorted<K: Key>(run: &Run<'_>, build: &Keys, probe: &Keys, rows: Range<usize>) -> Result<Matches> {
    let build_keys = values_of::<K>(&build.data, build.rows);
    let probe_keys = &values_of::<K>(&probe.data, probe.rows)[rows.clone()];
    let mut first = run.values::<u32>(rows.len(), "matches")?;
    let mut count = run.values::<u32>(rows.len(), "lengths of matches")?;

    // Only the build rows within the probe rows' range of keys take part.
    let from = probe_keys.first().map_or(0, |key| build_keys.partition_point(|build| build < key));
    let to = probe_keys.last().map_or(from, |key| build_keys.partition_point(|build| build <= key));
    let near = &build_keys[from..to];
    let length = probe_keys.len() + near.len();
    // A piece has at most a morsel of probe rows. If the build side is much longer, galloping
    // shortens it.
    let pieces = probe_keys.len().div_ceil(MORSEL_ROWS).max(length.div_ceil(8 * MORSEL_ROWS)).max(1);
    let cuts: Vec<(usize, usize)> = (0..=pieces)
        .into_par_iter()
        .map(|piece| cut(probe_keys, near, (length as u128 * piece as u128 / pieces as u128) as usize))
        .collect();
    let probe_bounds: Vec<usize> = cuts.iter().map(|cut| cut.0).collect();
    let firsts = split_at_bounds(&mut first, &probe_bounds, 1);
    let counts = split_at_bounds(&mut count, &probe_bounds, 1);
    let tally = firsts
        .into_par_iter()
        .zip(counts)
        .zip(&cuts)
        .map(|((first, count), &(probe_start, build_start))| {
            let keys = &probe_keys[probe_start..probe_start + first.len()];
            let mut tally = Tally::default();
            let mut walk = Walk { build: build_keys, at: from + build_start };
            let morsels =
                keys.chunks(MORSEL_ROWS).zip(first.chunks_mut(MORSEL_ROWS)).zip(count.chunks_mut(MORSEL_ROWS));
            for ((keys, first), count) in morsels {
                run.cancel.check()?;
                tally = tally.add(walk.match_keys(keys, first, count));
            }
            Ok(tally)
        })
        .try_reduce(Tally::default, |a, b| Ok::<_, crate::Error>(a.add(b)))?;
    Ok(matches(first, Some(count), rows, tally))
}

/// Returns the number of probe and build rows among the first `diagonal` of both, merged.
fn cut<K: Key>(probe: &[K], build: &[K], diagonal: usize) -> (usize, usize) {
    let (mut low, mut high) = (diagonal.saturating_sub(build.len()), diagonal.min(probe.len()));
    while low < high {
        let middle = low + (high - low) / 2;
        // With `middle` probe rows, the next probe row would come before the last build row taken.
        // Take more probe rows.
        if probe[middle] <= build[diagonal - middle - 1] {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    (low, diagonal - low)
}

/// A walk along the build side.
struct Walk<'a, K> {
    build: &'a [K],
    /// Position in the build side. All earlier build rows are smaller than the next probe key.
    at: usize,
}

impl<K: Key> Walk<'_, K> {
    fn match_keys(&mut self, keys: &[K], first: &mut [u32], count: &mut [u32]) -> Tally {
        let mut tally = Tally::default();
        // The previous key and its run.
        let mut last: Option<(K, u32, u32)> = None;
        for ((&key, first), count) in keys.iter().zip(first).zip(count) {
            let (run_first, run) = match last {
                Some((last_key, run_first, run)) if last_key == key => (run_first, run),
                _ => {
                    self.at += gallop(&self.build[self.at..], |build| build < key);
                    let run = gallop(&self.build[self.at..], |build| build == key);
                    if run == 0 { (NO_ROW, 0) } else { (self.at as u32, run as u32) }
                }
            };
            last = Some((key, run_first, run));
            (*first, *count) = (run_first, run);
            tally.count(run);
        }
        tally
    }
}

/// Counts the first keys that satisfy a condition, which must hold for a prefix. Steps double, so
/// that the cost is logarithmic in the result.
#[inline(always)]
fn gallop<K: Copy>(keys: &[K], holds: impl Fn(K) -> bool) -> usize {
    let mut step = 1;
    let mut known = 0;
    while known + step <= keys.len() && holds(keys[known + step - 1]) {
        known += step;
        step *= 2;
    }
    let end = keys.len().min(known + step - 1);
    known + keys[known..end].partition_point(|&key| holds(key))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::Device;
    use crate::device::host::testing::{Bench, SIZES, THREADS, assert_matches, for_every_key, patterns, random};

    fn merges<K: Key>() {
        let mut random = random(61);
        for threads in THREADS {
            let bench = Bench::new(threads);
            for rows in SIZES {
                for (index, (pattern, mut build_numbers)) in patterns(rows, &mut random).into_iter().enumerate() {
                    if rows > 2000 && (index + threads) % 3 != 0 {
                        continue;
                    }
                    // Probe sides longer than, as long as, and much shorter than the build side.
                    for step in [1, 100] {
                        let mut probe_numbers: Vec<u32> =
                            build_numbers.iter().step_by(step).flat_map(|&n| [n, n ^ 0x55]).chain([0, 9]).collect();
                        let situation = format!("{rows} rows {pattern}, every {step}th twice, {threads} threads");
                        build_numbers.sort_unstable_by_key(|&n| crate::device::host::testing::key::<K>(n));
                        probe_numbers.sort_unstable_by_key(|&n| crate::device::host::testing::key::<K>(n));
                        let (build, values) = bench.keys::<K>(&build_numbers);
                        let (probe, probe_values) = bench.keys::<K>(&probe_numbers);
                        for range in [0..probe.rows, probe.rows / 3..probe.rows - 1, 1..1] {
                            let found =
                                bench.device.match_sorted(&build, &probe, range.clone(), &bench.stream).unwrap();
                            assert_eq!(found.rows, range);
                            assert_matches(&found, &values, &probe_values, &situation);
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn sorted_sides_are_matched() {
        for_every_key!(merges);
    }

    #[test]
    fn a_cut_has_the_rows_of_its_diagonal_and_all_smaller_build_rows_are_before_it() {
        let (probe, build) = ([1u32, 1, 4, 4, 4, 9], [0u32, 1, 1, 1, 4, 5, 10]);
        for diagonal in 0..=probe.len() + build.len() {
            let (probes, builds) = cut(&probe, &build, diagonal);
            assert_eq!(probes + builds, diagonal);
            assert!(build[..builds].iter().all(|b| probe[probes..].iter().all(|p| b < p)), "cut {diagonal}");
        }
    }
}
