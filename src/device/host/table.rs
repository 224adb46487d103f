//! One table over all keys: hashed, or an array of positions when distinct keys are dense.
//!
//! A large hashed table is built region by region: rows are first partitioned by the region of the table that they fall
//! into, and threads then fill regions, each of which fits in their cache. Filling it in the order of the rows would miss
//! the cache, and need atomics, at each of them.
//!
//! Where keys repeat, the rows of each key get a run of consecutive places in `order`, and the table holds runs.

use std::any::Any;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rayon::prelude::*;

use super::buffer::{Values, as_atomic_u32, split_at_bounds, values_of};
use super::hash::{Key, with_key};
use super::partition::scatter;
use super::slots::{Addressing, SLOTS_MIN, Slot, Tally, probe as probe_slots, probe_morsels, slot_count};
use super::{MORSEL_ROWS, Run};
use crate::device::{Carry, DeviceMemory, KeyWidth, Keys, Matches, NO_ROW, Positions, Table};
use crate::{Error, Result};

/// Slots of a region: its slots, and the rows that fill them, fit in the second cache for every width of key.
const REGION_SLOTS: usize = 1 << 15;

/// The most slots of a region: [`fill_runs`] keeps the slot of each row in 32 bits.
const REGION_SLOTS_MAX: usize = 1 << 32;

/// Bytes of device memory that a table over hashed keys takes. It stands beside the code that takes them, so that whoever
/// plans a join reckons with what will happen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TableBytes {
    /// For as long as the table lives: its slots and, where keys repeat, the list of their rows.
    pub stays: u64,
    /// On top of that while it is built: keys arranged by region, and the slot of each row.
    pub building: u64,
}

impl TableBytes {
    /// Of a table over `rows` keys of that width, which all are distinct or may repeat.
    pub fn new(width: KeyWidth, rows: u64, repeats: bool) -> Self {
        let slots = (2 * rows).next_power_of_two().max(SLOTS_MIN as u64);
        let (unique_bytes, run_bytes, key_bytes) =
            with_key!(width, K => (size_of::<<K as Key>::Unique>(), size_of::<<K as Key>::Run>(), size_of::<K>()));
        // Keys and their row numbers, by region, stay through the attempt with distinct keys and the one with runs.
        let by_region = if slots >= 2 * REGION_SLOTS as u64 { rows * (key_bytes as u64 + 4) } else { 0 };
        match repeats {
            false => Self { stays: slots * unique_bytes as u64, building: by_region },
            true => Self { stays: slots * run_bytes as u64 + 4 * rows, building: by_region + 4 * rows },
        }
    }
}

/// The device's own form of a table.
#[derive(Debug)]
enum HostTable<K: Key> {
    /// Hashed, all keys distinct.
    Unique(Values<K::Unique>, Addressing),
    /// Hashed, with runs.
    Runs(Values<K::Run>, Addressing),
    /// The position of `key_min + index`, or [`NO_ROW`].
    Dense { positions: Values<u32>, key_min: K },
}

impl<K: Key> DeviceMemory for HostTable<K> {
    fn size_bytes(&self) -> usize {
        match self {
            Self::Unique(slots, _) => size_of_val(&slots[..]),
            Self::Runs(slots, _) => size_of_val(&slots[..]),
            Self::Dense { positions, .. } => size_of_val(&positions[..]),
        }
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

pub(super) fn build<K: Key>(run: &Run<'_>, keys: &Keys) -> Result<Table> {
    let slots = slot_count(keys.rows);
    let digits = (slots / REGION_SLOTS).clamp(1, 1 << run.info.pass_bits_max);
    let regions = Regions::new::<K>(run, keys, slots, digits)?;
    if let Some(table) = regions.build::<K>(run, keys)? {
        return Ok(table);
    }
    // More distinct keys fell into one region than it has slots, against all odds or by design of the keys. The table as
    // one region has room for all.
    drop(regions);
    if slots > REGION_SLOTS_MAX {
        return Err(Error::Unsupported(format!(
            "a hash table over {} keys cannot be divided, because too many of them fall into one part of it, and undivided \
             it holds {} at most; join by a strategy that partitions or sorts",
            keys.rows,
            REGION_SLOTS_MAX / 2
        )));
    }
    let table = Regions::new::<K>(run, keys, slots, 1)?.build::<K>(run, keys)?;
    Ok(table.expect("a table has twice as many slots as there are keys"))
}

/// Keys arranged by region.
struct Regions {
    keys: Keys,
    /// The row of each key; `None` when they lie as they were given.
    rows: Option<crate::device::DeviceBuffer>,
    bounds: Vec<usize>,
    addressing: Addressing,
}

impl Regions {
    fn new<K: Key>(run: &Run<'_>, keys: &Keys, slots: usize, digits: usize) -> Result<Self> {
        let addressing = Addressing { mask: slots - 1, region_mask: slots / digits - 1 };
        if digits == 1 {
            return Ok(Self { keys: keys.clone(), rows: None, bounds: vec![0, keys.rows], addressing });
        }
        let shift = (slots / digits).trailing_zeros();
        let digit = |key: K| addressing.start(key) >> shift;
        let mut scattered = scatter::<K>(run, keys, &[Carry::RowNumber], digits, digit)?;
        let rows = scattered.columns.pop().map(|(_, rows)| rows.freeze());
        let keys = Keys { data: scattered.keys.freeze(), ..keys.clone() };
        Ok(Self { keys, rows, bounds: scattered.bounds, addressing })
    }

    /// `None` when a region has no room for its keys.
    fn build<K: Key>(&self, run: &Run<'_>, keys: &Keys) -> Result<Option<Table>> {
        let rows = keys.rows;
        if let Some(table) = self.build_unique::<K>(run)? {
            return Ok(Some(Table { state: Arc::new(table), order: None, rows }));
        }
        let Some((table, order)) = self.build_runs::<K>(run)? else { return Ok(None) };
        let order = Positions::List { data: order.freeze(), rows, may_miss: false };
        Ok(Some(Table { state: Arc::new(table), order: Some(order), rows }))
    }

    fn rows(&self) -> Option<&[u32]> {
        self.rows.as_ref().map(|rows| values_of::<u32>(rows, self.keys.rows))
    }

    /// `None` when keys repeat, or may: more of them fall into a region than distinct ones should.
    fn build_unique<K: Key>(&self, run: &Run<'_>) -> Result<Option<HostTable<K>>> {
        let mut slots = run.values::<K::Unique>(self.addressing.mask + 1, "a hash table")?;
        let repeated = AtomicBool::new(false);
        let keys = values_of::<K>(&self.keys.data, self.keys.rows);
        let addressing = Addressing::whole(self.addressing.region_mask + 1);
        slots.par_chunks_mut(addressing.mask + 1).zip(self.bounds.par_windows(2)).try_for_each(|(slots, bounds)| {
            clear(run, slots)?;
            if !repeated.load(Ordering::Relaxed)
                && !fill_unique(run, slots, addressing, &keys[bounds[0]..bounds[1]], bounds[0], self.rows())?
            {
                repeated.store(true, Ordering::Relaxed);
            }
            Ok::<_, Error>(())
        })?;
        Ok((!repeated.into_inner()).then_some(HostTable::Unique(slots, self.addressing)))
    }

    /// `None` when a region has no room.
    fn build_runs<K: Key>(&self, run: &Run<'_>) -> Result<Option<(HostTable<K>, Values<u32>)>> {
        let mut slots = run.values::<K::Run>(self.addressing.mask + 1, "a hash table of runs")?;
        let mut order = run.values::<u32>(self.keys.rows, "the rows of a hash table")?;
        let full = AtomicBool::new(false);
        let keys = values_of::<K>(&self.keys.data, self.keys.rows);
        let addressing = Addressing::whole(self.addressing.region_mask + 1);
        let order_pieces = split_at_bounds(&mut order, &self.bounds, 1);
        let tasks = slots.par_chunks_mut(addressing.mask + 1).zip(order_pieces).zip(self.bounds.par_windows(2));
        tasks.try_for_each(|((slots, order), bounds)| {
            clear(run, slots)?;
            let keys = &keys[bounds[0]..bounds[1]];
            if !full.load(Ordering::Relaxed) && !fill_runs(run, slots, addressing, keys, bounds[0], self.rows(), order)?
            {
                full.store(true, Ordering::Relaxed);
            }
            Ok::<_, Error>(())
        })?;
        Ok((!full.into_inner()).then_some((HostTable::Runs(slots, self.addressing), order)))
    }
}

fn clear<K: Key, S: Slot<K>>(run: &Run<'_>, slots: &mut [S]) -> Result<()> {
    run.fill(slots, |_, slots| slots.fill(S::empty()))
}

/// Distinct keys that a region takes: one slot in eight stays empty, so that searches end, and soon.
fn room(slots: usize) -> usize {
    slots - slots / 8
}

/// Enters distinct keys; `start` is the place of the first of them among all, and `rows` translates places to rows. False
/// when a key repeats, or there are too many to be sure of an empty slot.
fn fill_unique<K: Key, S: Slot<K>>(
    run: &Run<'_>,
    slots: &mut [S],
    addressing: Addressing,
    keys: &[K],
    start: usize,
    rows: Option<&[u32]>,
) -> Result<bool> {
    if keys.len() > room(slots.len()) {
        return Ok(false);
    }
    let mut place = start;
    for keys in keys.chunks(MORSEL_ROWS) {
        run.cancel.check()?;
        for &key in keys {
            let slot = &mut slots[addressing.find(slots, key, addressing.start(key))];
            if !slot.is_empty() {
                return Ok(false);
            }
            *slot = S::new(key, rows.map_or(place as u32, |rows| rows[place]), 1);
            place += 1;
        }
    }
    Ok(true)
}

/// Enters keys that may repeat, and puts their rows into `order`, equal keys adjacent. False when there is no room.
fn fill_runs<K: Key, S: Slot<K>>(
    run: &Run<'_>,
    slots: &mut [S],
    addressing: Addressing,
    keys: &[K],
    start: usize,
    rows: Option<&[u32]>,
    order: &mut [u32],
) -> Result<bool> {
    // The slot of each row, so that the second pass need not search again.
    let mut slot_of = run.values::<u32>(keys.len(), "the slots of a hash table's rows")?;
    let mut distinct = 0;
    for (keys, slot_of) in keys.chunks(MORSEL_ROWS).zip(slot_of.chunks_mut(MORSEL_ROWS)) {
        run.cancel.check()?;
        for (&key, slot_of) in keys.iter().zip(slot_of) {
            let index = addressing.find(slots, key, addressing.start(key));
            let slot = &mut slots[index];
            if slot.is_empty() {
                if distinct == room(slots.len()) {
                    return Ok(false);
                }
                distinct += 1;
                slots[index] = S::new(key, 0, 1);
            } else {
                *slot = S::new(key, 0, slot.count() + 1);
            }
            *slot_of = index as u32;
        }
    }
    // `first` is where the run's next row goes, counted from this region's start, until all are placed.
    let mut next = 0;
    for slots in slots.chunks_mut(MORSEL_ROWS) {
        run.cancel.check()?;
        for slot in slots.iter_mut().filter(|slot| !slot.is_empty()) {
            let count = slot.count();
            *slot = S::new(slot.key(), next, count);
            next += count;
        }
    }
    let mut place = start;
    for slot_of in slot_of.chunks(MORSEL_ROWS) {
        run.cancel.check()?;
        for &index in slot_of {
            let slot = &mut slots[index as usize];
            order[slot.first() as usize] = rows.map_or(place as u32, |rows| rows[place]);
            *slot = S::new(slot.key(), slot.first() + 1, slot.count());
            place += 1;
        }
    }
    for slots in slots.chunks_mut(MORSEL_ROWS) {
        run.cancel.check()?;
        for slot in slots.iter_mut().filter(|slot| !slot.is_empty()) {
            *slot = S::new(slot.key(), start as u32 + slot.first() - slot.count(), slot.count());
        }
    }
    Ok(true)
}

pub(super) fn build_dense<K: Key>(run: &Run<'_>, keys: &Keys, key_min: u128, key_max: u128) -> Result<Option<Table>> {
    assert!(key_min <= key_max || keys.rows == 0, "a range of keys from {key_min} to {key_max}");
    let span = key_max.saturating_sub(key_min).saturating_add(1);
    if key_max > u128::MAX >> (128 - K::BITS) || span < keys.rows as u128 {
        // Keys beyond their width cannot occur, and more rows than keys must repeat; either way there is no such table.
        return Ok(None);
    }
    let Ok(span) = usize::try_from(span) else { return Ok(None) };
    let key_min = K::truncate(key_min);
    let values = values_of::<K>(&keys.data, keys.rows);
    let mut positions = run.values::<u32>(span, "a table of dense keys")?;
    run.fill(&mut positions, |_, positions| positions.fill(NO_ROW))?;
    let sound = AtomicBool::new(true);
    {
        // Each row is written down, then each looks whether it is still there: quicker than exchanging atomically.
        let positions = as_atomic_u32(&mut positions);
        let slot = |key: K| positions.get(dense_index(key, key_min));
        run.map(0..keys.rows, |range| {
            for (row, &key) in range.clone().zip(&values[range]) {
                match slot(key) {
                    Some(position) => position.store(row as u32, Ordering::Relaxed),
                    None => sound.store(false, Ordering::Relaxed),
                }
            }
        })?;
        if sound.load(Ordering::Relaxed) {
            run.map(0..keys.rows, |range| {
                let kept = |(row, &key)| slot(key).is_some_and(|kept| kept.load(Ordering::Relaxed) == row as u32);
                if !range.clone().zip(&values[range]).all(kept) {
                    sound.store(false, Ordering::Relaxed);
                }
            })?;
        }
    }
    let table = HostTable::Dense { positions, key_min };
    Ok(sound.into_inner().then(|| Table { state: Arc::new(table), order: None, rows: keys.rows }))
}

/// Where a key lies in a dense table; beyond its end for a key outside the table's range.
#[inline(always)]
fn dense_index<K: Key>(key: K, key_min: K) -> usize {
    let offset = key.wrapping_sub(key_min);
    // A difference that does not fit is far beyond the end of every table.
    if size_of::<K>() > size_of::<usize>() && offset.bits_from(K::BITS / 2) != 0 { usize::MAX } else { offset.low() }
}

pub(super) fn probe<K: Key>(run: &Run<'_>, table: &Table, probe: &Keys, rows: Range<usize>) -> Result<Matches> {
    let table = table.state.as_any().downcast_ref::<HostTable<K>>();
    let table = table.expect("a table of another device, or over keys of another width");
    let keys = &values_of::<K>(&probe.data, probe.rows)[rows.clone()];
    let mut first = run.values::<u32>(rows.len(), "matches")?;
    let mut count = match table {
        HostTable::Runs(..) => Some(run.values::<u32>(rows.len(), "lengths of matches")?),
        _ => None,
    };
    let tally = probe_morsels(run, keys, &mut first, count.as_deref_mut(), |keys, first, count| match table {
        HostTable::Unique(slots, addressing) => probe_slots::<K, _>(slots, *addressing, keys, first, None),
        HostTable::Runs(slots, addressing) => probe_slots::<K, _>(slots, *addressing, keys, first, count),
        HostTable::Dense { positions, key_min } => probe_dense(positions, *key_min, keys, first),
    })?;
    Ok(matches(first, count, rows, tally))
}

fn probe_dense<K: Key>(positions: &[u32], key_min: K, keys: &[K], first: &mut [u32]) -> Tally {
    let mut matched = 0;
    for (first, &key) in first.iter_mut().zip(keys) {
        *first = positions.get(dense_index(key, key_min)).copied().unwrap_or(NO_ROW);
        matched += usize::from(*first != NO_ROW);
    }
    Tally { matched_rows: matched, total: matched as u64, longest: u32::from(matched > 0) }
}

/// Puts matches together; lengths are kept only if one is above one.
pub(super) fn matches(first: Values<u32>, count: Option<Values<u32>>, rows: Range<usize>, tally: Tally) -> Matches {
    Matches {
        first: first.freeze(),
        count: count.filter(|_| tally.longest > 1).map(Values::freeze),
        rows,
        matched_rows: tally.matched_rows,
        total: tally.total,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::Device;
    use crate::device::host::testing::{
        Bench, SIZES, THREADS, assert_matches, for_every_key, numbers, patterns, random,
    };

    /// Numbers to look up: some that the build side has, some that it has not.
    fn probe_numbers(build: &[u32]) -> Vec<u32> {
        build.iter().flat_map(|&number| [number, number ^ 0x55, number]).chain([0, 1, u32::MAX]).collect()
    }

    fn finds_all<K: Key>() {
        let mut random = random(41);
        for threads in THREADS {
            let bench = Bench::new(threads);
            for rows in SIZES {
                for (index, (pattern, build_numbers)) in patterns(rows, &mut random).into_iter().enumerate() {
                    if rows > 2000 && (index + threads) % 3 != 0 {
                        continue;
                    }
                    let situation = format!("{rows} rows {pattern}, {threads} threads");
                    let (build, values) = bench.keys::<K>(&build_numbers);
                    let (probe, probe_values) = bench.keys::<K>(&probe_numbers(&build_numbers));
                    let table = bench.device.build_table(&build, &bench.stream).unwrap();
                    let order = table.order.as_ref().map(numbers);
                    let distinct = values.iter().collect::<std::collections::HashSet<_>>().len();
                    assert_eq!(order.is_some(), distinct < rows, "{situation}");
                    let order = order.unwrap_or((0..rows as u32).collect());
                    let by_position: Vec<K> = order.iter().map(|&row| values[row as usize]).collect();
                    for range in [0..probe.rows, probe.rows / 3..probe.rows - 1, 1..1] {
                        let found = bench.device.probe_table(&table, &probe, range.clone(), &bench.stream).unwrap();
                        assert_eq!(found.rows, range);
                        assert_matches(&found, &by_position, &probe_values, &situation);
                    }
                }
            }
        }
    }

    #[test]
    fn a_table_finds_all_that_it_holds_and_nothing_else() {
        for_every_key!(finds_all);
    }

    fn dense<K: Key>() {
        let mut random = random(42);
        for threads in THREADS {
            let bench = Bench::new(threads);
            for rows in SIZES.into_iter().filter(|&rows| rows > 0) {
                let numbers = patterns(rows, &mut random).remove(0).1;
                for (min, gap) in [(0u128, 1u128), (1000, 3), (u128::MAX >> (128 - K::BITS + 1), 1)] {
                    let values: Vec<K> = numbers.iter().map(|&n| K::truncate(min + gap * u128::from(n))).collect();
                    let width = KeyWidth::for_bits(K::BITS).unwrap();
                    let keys = |values: &[K]| Keys { data: bench.buffer(values), width, rows: values.len() };
                    let max = min + gap * (rows as u128 - 1);
                    let build = |values: &[K], min, max| {
                        bench.device.build_dense_table(&keys(values), min, max, &bench.stream).unwrap()
                    };
                    let table = build(&values, min, max).expect("distinct keys in range");
                    let probe: Vec<K> = values
                        .iter()
                        .flat_map(|&key| [key, K::truncate(1).wrapping_sub(key), key.wrapping_sub(K::truncate(1))])
                        .collect();
                    let all = 0..probe.len();
                    let found = bench.device.probe_table(&table, &keys(&probe), all, &bench.stream).unwrap();
                    assert_matches(&found, &values, &probe, &format!("{rows} rows from {min} by {gap}"));
                    assert!(build(&[&values[..], &values[..1]].concat(), min, max + 1).is_none(), "a key repeats");
                    if rows > 1 {
                        assert!(build(&values, min + 1, max + 1).is_none(), "a key is below the range");
                        assert!(build(&values, min, max - 1).is_none(), "a key is above the range");
                    }
                }
            }
        }
    }

    #[test]
    fn a_dense_table_is_built_of_distinct_keys_in_range_only() {
        for_every_key!(dense);
    }

    #[test]
    fn keys_that_all_fall_into_one_region_are_found() {
        // Keys chosen so that the lowest bits of their mixed form agree but for a few: against the odds, one region of the
        // table gets all of them.
        let bench = Bench::new(2);
        let wanted = slot_count(60_000) - 1;
        let region = wanted & !(REGION_SLOTS - 1);
        let chosen: Vec<u64> = (0..).filter(|key: &u64| key.mix().low() & wanted & region == 0).take(60_000).collect();
        let keys = Keys { data: bench.buffer(&chosen), width: KeyWidth::W8, rows: chosen.len() };
        let table = bench.device.build_table(&keys, &bench.stream).unwrap();
        assert!(table.order.is_none());
        let found = bench.device.probe_table(&table, &keys, 0..chosen.len(), &bench.stream).unwrap();
        assert_matches(&found, &chosen, &chosen, "one region");
    }

    fn takes_what_was_reckoned<K: Key>() {
        let bench = Bench::new(2);
        let width = KeyWidth::for_bits(K::BITS).unwrap();
        for rows in [1u32, 100, 16_384, 16_385, 100_003] {
            for (repeats, numbers) in
                [(false, (0..rows).collect::<Vec<_>>()), (true, (0..rows).map(|n| n / 2).collect())]
            {
                let (keys, values) = bench.keys::<K>(&numbers);
                let repeats = repeats && rows > 1;
                let reckoned = TableBytes::new(width, u64::from(rows), repeats);
                // A device with that much memory has enough, whichever attempt fails first...
                let enough = reckoned.stays + reckoned.building + PIECES_ROUNDED_UP;
                let exact = Bench::with_memory(2, enough);
                let situation = format!("{rows} keys of {width:?}, repeats {repeats}");
                let table =
                    exact.device.build_table(&keys, &exact.stream).unwrap_or_else(|e| panic!("{situation}: {e}"));
                // ...and no more stays than was said, nor much less.
                let used = exact.used_bytes();
                assert!(used <= reckoned.stays + PIECES_ROUNDED_UP, "{used} of {reckoned:?}, {situation}");
                assert!(used >= reckoned.stays, "{used} of {reckoned:?}, {situation}");
                // Regions need not be filled at the same time, and so neither need the slots of their rows.
                let peak = exact.device.memory().used_bytes_max() + 4 * u64::from(rows);
                assert!(peak + PIECES_ROUNDED_UP >= enough, "{peak} of {reckoned:?}, {situation}");
                assert_eq!(table.order.is_some(), repeats, "{situation}");
                drop(values);
            }
        }
    }

    /// Each piece of memory is rounded up to a cache line.
    const PIECES_ROUNDED_UP: u64 = 64 * 64;

    #[test]
    fn a_table_takes_the_memory_that_was_reckoned_with() {
        for_every_key!(takes_what_was_reckoned);
    }
}
