//! A blocked Bloom filter over build keys. It rejects most keys without a match, for one cache line
//! each.
//!
//! ```text
//!   mixed key ──┬─ highest bits: which line of 64 bytes
//!               └─ lowest bits:  [ w0 | w1 | w2 | w3 ][ w4 | w5 | w6 | w7 ]
//!                                three bits of one word in each half
//! ```
//!
//! All bits of a key are in one line, as in Putze, Sanders and Singler, "Cache-, Hash- and
//! Space-Efficient Bloom Filters" (2007). They are in few words of it, as in Lang et al.,
//! "Performance-Optimal Filtering" (VLDB 2019), section 3.2. The filter also knows the smallest and
//! the largest key, and rejects keys outside this range.
//!
//! Several threads fill a large filter region by region, with keys that were transformed by region
//! first. The threads share no line.

use std::any::Any;
use std::sync::Arc;

use rayon::prelude::*;

use super::buffer::{Values, split_at_bounds, values_of};
use super::hash::{Key, with_key};
use super::partition::scatter;
use super::raw::prefetch;
use super::{MORSEL_ROWS, Run};
use crate::Result;
use crate::device::{DeviceMemory, Filter, KeyWidth, Keys, PackedKeys, Positions};

/// Approximate share of keys without a match that still pass. A test counts them.
pub const FILTER_FALSE_POSITIVES: f64 = 0.015;

/// With three bits in each of two words, eight bits per key would let twice as many keys through.
/// More bits would make the filter outgrow caches.
const BITS_PER_KEY: usize = 10;

/// One cache line.
type Line = [u64; 8];

const LINE_BITS: usize = 512;

/// Lines that one thread fills at a time, so that they stay in its second-level cache.
const REGION_LINES: usize = 1 << 12;

/// Bytes of device memory that a filter takes. The type is next to the code that takes the memory,
/// so that a plan reckons with the real use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FilterBytes {
    /// Bytes while the filter lives.
    pub stays: u64,
    /// Further bytes while the filter is built: keys transformed by region.
    pub building: u64,
}

impl FilterBytes {
    /// Returns the bytes of a filter over `rows` keys of the given width, built by `threads`
    /// threads.
    pub fn new(width: KeyWidth, rows: u64, threads: usize) -> Self {
        let lines = line_count(rows as usize);
        let key_bytes = with_key!(width, K => size_of::<K>()) as u64;
        let building = if threads > 1 && lines > REGION_LINES { rows * key_bytes } else { 0 };
        Self { stays: (lines * size_of::<Line>()) as u64, building }
    }
}

fn line_count(rows: usize) -> usize {
    (rows * BITS_PER_KEY).div_ceil(LINE_BITS).max(1)
}

/// The device's own form of a filter.
#[derive(Debug)]
struct HostFilter<K: Key> {
    lines: Values<Line>,
    /// The smallest and the largest key. The smallest is greater than the largest when there are no
    /// keys.
    range: (K, K),
}

impl<K: Key> DeviceMemory for HostFilter<K> {
    fn size_bytes(&self) -> usize {
        size_of_val(&self.lines[..])
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// Returns 64 bits that locate a key in a filter. Keys of 32 bits are spread over all of them.
#[inline(always)]
fn hash<K: Key>(key: K) -> u64 {
    /// 2^64 over the golden ratio. Odd, so that multiplication is a bijection.
    const FACTOR: u64 = 0x9e37_79b9_7f4a_7c15;
    let mixed = key.mix();
    match K::BITS {
        32 => (mixed.low() as u64).wrapping_mul(FACTOR),
        64 => mixed.low() as u64,
        _ => mixed.low() as u64 ^ mixed.bits_from(64) as u64,
    }
}

/// Returns the line of a hash: its upper half, scaled to the number of lines.
#[inline(always)]
fn line_of(hash: u64, lines: usize) -> usize {
    (((hash >> 32) * lines as u64) >> 32) as usize
}

/// Returns one word of each half of the line, and the bits to be set in it.
#[inline(always)]
fn bits_of(hash: u64) -> [(usize, u64); 2] {
    let bit = |at: u32| 1u64 << (hash >> at & 63);
    [((hash & 3) as usize, bit(4) | bit(10) | bit(16)), (4 + (hash >> 2 & 3) as usize, bit(22) | bit(28) | bit(34))]
}

pub(super) fn build<K: Key>(run: &Run<'_>, keys: &Keys) -> Result<Filter> {
    let line_count = line_count(keys.rows);
    let mut lines = run.values::<Line>(line_count, "a filter")?;
    run.fill(&mut lines, |_, lines| lines.fill([0; 8]))?;
    let values = values_of::<K>(&keys.data, keys.rows);
    let ranges = run.map(0..keys.rows, |rows| {
        let keys = &values[rows];
        let (mut min, mut max) = (keys[0], keys[0]);
        keys.iter().for_each(|&key| (min, max) = (min.min(key), max.max(key)));
        (min, max)
    })?;
    let range = ranges.into_iter().reduce(|a, b| (a.0.min(b.0), a.1.max(b.1)));
    // Without keys, the range is empty.
    let range = range.unwrap_or((K::truncate(u128::MAX), K::default()));

    if run.threads == 1 || line_count <= REGION_LINES {
        enter(run, &mut lines, 0, line_count, values)?;
    } else {
        let regions = line_count.div_ceil(REGION_LINES).min(1 << run.tuning.pass_bits_max);
        let region_lines = line_count.div_ceil(regions);
        let region = |key: K| line_of(hash(key), line_count) / region_lines;
        let by_region = scatter::<K>(run, keys, &[], regions, region)?;
        lines.par_chunks_mut(region_lines).zip(by_region.bounds.par_windows(2)).enumerate().try_for_each(
            |(region, (lines, bounds))| {
                enter(run, lines, region * region_lines, line_count, &by_region.keys[bounds[0]..bounds[1]])
            },
        )?;
    }
    Ok(Filter { state: Arc::new(HostFilter { lines, range }), rows: keys.rows })
}

/// Enters keys whose lines are among `lines`. The first line is number `first` of `line_count`.
fn enter<K: Key>(run: &Run<'_>, lines: &mut [Line], first: usize, line_count: usize, keys: &[K]) -> Result<()> {
    for keys in keys.chunks(MORSEL_ROWS) {
        run.cancel.check()?;
        for &key in keys {
            let hash = hash(key);
            let line = &mut lines[line_of(hash, line_count) - first];
            for (word, bits) in bits_of(hash) {
                line[word] |= bits;
            }
        }
    }
    Ok(())
}

pub(super) fn filter_keys<K: Key>(run: &Run<'_>, filter: &Filter, given: &PackedKeys) -> Result<PackedKeys> {
    let filter = filter.state.as_any().downcast_ref::<HostFilter<K>>();
    let filter = filter.expect("a filter is of this device and of the same key width");
    let (keys, rows) = (&given.keys, given.keys.rows);
    let values = values_of::<K>(&keys.data, rows);
    // One bit per key, set if the key passes.
    let mut passing = run.values::<u64>(rows.div_ceil(64), "keys that pass a filter")?;
    let counts: Vec<usize> = passing
        .par_chunks_mut(MORSEL_ROWS / 64)
        .zip(values.par_chunks(MORSEL_ROWS))
        .map(|(words, keys)| {
            run.cancel.check()?;
            words.iter_mut().zip(keys.chunks(64)).for_each(|(word, keys)| *word = filter.test(keys));
            Ok::<_, crate::Error>(words.iter().map(|word| word.count_ones() as usize).sum())
        })
        .collect::<Result<_>>()?;
    let mut bounds = vec![0];
    bounds.extend(counts.iter().scan(0, |end, count| {
        *end += count;
        Some(*end)
    }));
    let kept = bounds[counts.len()];
    if kept == rows {
        return Ok(given.clone());
    }

    let mut kept_keys = run.values::<K>(kept, "keys that passed a filter")?;
    let mut numbers = run.values::<u32>(kept, "numbering rows that passed a filter")?;
    let given_numbers = match &given.rows_kept {
        Some(Positions::List { data, rows, .. }) => Some(values_of::<u32>(data, *rows)),
        Some(Positions::Range(range)) => panic!("rows {range:?} that have a key are a range instead of a list"),
        None => None,
    };
    let pieces = split_at_bounds(&mut kept_keys, &bounds, 1).into_par_iter();
    let pieces = pieces.zip(split_at_bounds(&mut numbers, &bounds, 1)).zip(passing.par_chunks(MORSEL_ROWS / 64));
    pieces.enumerate().try_for_each(|(morsel, ((keys, numbers), words))| {
        run.cancel.check()?;
        let mut out = 0;
        for (word_index, &word) in words.iter().enumerate() {
            let mut word = word;
            while word != 0 {
                let at = morsel * MORSEL_ROWS + 64 * word_index + word.trailing_zeros() as usize;
                keys[out] = values[at];
                numbers[out] = given_numbers.map_or(at as u32, |numbers| numbers[at]);
                out += 1;
                word &= word - 1;
            }
        }
        Ok::<_, crate::Error>(())
    })?;
    Ok(PackedKeys {
        keys: Keys { data: kept_keys.freeze(), width: keys.width, rows: kept },
        rows_kept: Some(Positions::List { data: numbers.freeze(), rows: kept, nullable: false }),
    })
}

impl<K: Key> HostFilter<K> {
    /// Returns a bit for each of at most 64 keys, set if the key passes. All lines are prefetched
    /// before the first is read.
    #[inline(always)]
    fn test(&self, keys: &[K]) -> u64 {
        let lines = &self.lines[..];
        let (min, max) = self.range;
        let mut hashes = [0u64; 64];
        for (hash_of, &key) in hashes.iter_mut().zip(keys) {
            *hash_of = hash(key);
            prefetch(lines, line_of(*hash_of, lines.len()));
        }
        let mut passing = 0;
        for (at, (&hash, &key)) in hashes.iter().zip(keys).enumerate() {
            let line = &lines[line_of(hash, lines.len())];
            let [(a, a_bits), (b, b_bits)] = bits_of(hash);
            // No branch, because the result is unpredictable.
            let passes = (line[a] & a_bits == a_bits) & (line[b] & b_bits == b_bits) & (key >= min) & (key <= max);
            passing |= u64::from(passes) << at;
        }
        passing
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;
    use crate::device::Device;
    use crate::device::host::testing::{Bench, SIZES, THREADS, for_every_key, numbers, patterns, random};

    fn passes_all_that_match<K: Key>() {
        let mut random = random(61);
        for threads in THREADS {
            let bench = Bench::new(threads);
            for rows in SIZES {
                for (index, (pattern, build_numbers)) in patterns(rows, &mut random).into_iter().enumerate() {
                    if rows > 2000 && (index + threads) % 4 != 0 {
                        continue;
                    }
                    let situation = format!("{rows} rows {pattern}, {threads} threads");
                    let (build, build_values) = bench.keys::<K>(&build_numbers);
                    let filter = bench.device.build_filter(&build, &bench.stream).unwrap();
                    assert_eq!(filter.rows, rows);
                    let probe_numbers: Vec<u32> =
                        build_numbers.iter().flat_map(|&n| [n ^ 0x5555, n]).chain([0]).collect();
                    let (probe, values) = bench.keys::<K>(&probe_numbers);
                    // Every third row has no key, so that key numbers differ from row numbers.
                    let all: fn(usize) -> u32 = |at| at as u32;
                    let some: fn(usize) -> u32 = |at| (at + at / 2) as u32;
                    let rows_kept = bench.list(&(0..probe.rows).map(some).collect::<Vec<_>>(), false);
                    for (rows_kept, row_of) in [(None, all), (Some(rows_kept), some)] {
                        let given = PackedKeys { keys: probe.clone(), rows_kept };
                        let found = bench.device.filter_keys(&filter, &given, &bench.stream).unwrap();
                        let kept = match &found.rows_kept {
                            Some(kept) => numbers(kept),
                            None => (0..probe.rows).map(row_of).collect(),
                        };
                        let kept_keys = values_of::<K>(&found.keys.data, found.keys.rows);
                        let known: HashSet<K> = build_values.iter().copied().collect();
                        let (mut next, mut passed) = (0, 0);
                        for (at, key) in values.iter().enumerate() {
                            if kept.get(next) == Some(&row_of(at)) {
                                assert_eq!(kept_keys[next], *key, "row {at}, {situation}");
                                next += 1;
                                passed += usize::from(!known.contains(key));
                            } else {
                                assert!(!known.contains(key), "row {at} was dropped, {situation}");
                            }
                        }
                        assert_eq!((next, kept_keys.len()), (kept.len(), kept.len()), "{situation}");
                        let others = values.iter().filter(|key| !known.contains(key)).count();
                        assert!(passed <= 20 + others / 10, "{passed} of {others} passed, {situation}");
                    }
                }
            }
        }
    }

    #[test]
    fn every_matching_key_passes_the_filter_and_few_others_do() {
        for_every_key!(passes_all_that_match);
    }

    fn false_positives<K: Key>() {
        let rows = 200_000u32;
        let bench = Bench::new(2);
        // Even and odd numbers: the range drops none of them.
        let (build, _) = bench.keys::<K>(&(0..rows).map(|n| 2 * n).collect::<Vec<_>>());
        let (probe, _) = bench.keys::<K>(&(0..rows - 1).map(|n| 2 * n + 1).collect::<Vec<_>>());
        let filter = bench.device.build_filter(&build, &bench.stream).unwrap();
        let given = PackedKeys { keys: probe, rows_kept: None };
        let passed = bench.device.filter_keys(&filter, &given, &bench.stream).unwrap().keys.rows;
        let share = passed as f64 / f64::from(rows);
        println!("{passed} of {rows} keys of {} bits pass: {share:.4}", K::BITS);
        let expected = FILTER_FALSE_POSITIVES;
        assert!(share < 1.3 * expected && share > 0.3 * expected, "{share} of keys of {} bits", K::BITS);
    }

    #[test]
    fn the_false_positive_rate_is_the_predicted_one() {
        for_every_key!(false_positives);
    }

    #[test]
    fn keys_outside_the_range_of_the_build_keys_never_pass() {
        let bench = Bench::new(2);
        let keys = |values: Vec<u64>| Keys { data: bench.buffer(&values), width: KeyWidth::W8, rows: values.len() };
        let build = keys((1000..2000).collect());
        let filter = bench.device.build_filter(&build, &bench.stream).unwrap();
        let probe = keys((0..1000).chain(2000..100_000).collect());
        let given = PackedKeys { keys: probe, rows_kept: None };
        assert_eq!(bench.device.filter_keys(&filter, &given, &bench.stream).unwrap().keys.rows, 0);
    }

    fn takes_what_was_reckoned<K: Key>() {
        for threads in [1, 3] {
            for rows in [0u32, 1, 1000, 100_000, 300_000] {
                let bench = Bench::new(threads);
                let (keys, _) = bench.keys::<K>(&(0..rows).collect::<Vec<_>>());
                let before = bench.used_bytes();
                let filter = bench.device.build_filter(&keys, &bench.stream).unwrap();
                let reckoned = FilterBytes::new(KeyWidth::for_bits(K::BITS).unwrap(), rows.into(), threads);
                assert_eq!(bench.used_bytes() - before, reckoned.stays, "{rows} keys, {threads} threads");
                let peak = bench.device.memory().used_bytes_max() - before;
                let all = reckoned.stays + reckoned.building;
                assert!(peak >= all && peak <= all + 64, "{peak} of {reckoned:?} for {rows} keys, {threads} threads");
                drop(filter);
            }
        }
    }

    #[test]
    fn a_filter_takes_the_predicted_memory() {
        for_every_key!(takes_what_was_reckoned);
    }
}
