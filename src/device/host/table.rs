//! One table over all keys: hashed, or an array of positions when distinct keys are dense.
//!
//! A large hashed table is built region by region. Rows are first partitioned by their region of
//! the table. Threads then fill regions, each small enough for their cache. Filling in row order
//! would miss the cache at each row, and need atomics.
//!
//! If keys repeat, the rows of each key get a run of consecutive places in `order`, and the table
//! holds runs.

mod dense;
#[cfg(test)]
mod tests;

use std::any::Any;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

pub(super) use dense::build_dense;
use dense::probe_dense;
use rayon::prelude::*;

use super::buffer::{Values, split_at_bounds, values_of};
use super::hash::{Key, with_key};
use super::partition::scatter;
use super::slots::{Addressing, SLOTS_MIN, Slot, Tally, probe as probe_slots, probe_morsels, slot_count};
use super::{MORSEL_ROWS, Run};
use crate::device::{DeviceMemory, KeyWidth, Keys, Matches, Payload, Positions, Table};
use crate::{Error, Result};

/// Slots of a region. They and the rows that fill them fit in the second-level cache for every
/// width of key.
const REGION_SLOTS: usize = 1 << 15;

/// Maximum number of slots of a region, because [`fill_runs`] keeps the slot of each row in 32
/// bits.
const REGION_SLOTS_MAX: usize = 1 << 32;

/// Bytes of device memory that a table over hashed keys takes. The type is next to the code that
/// takes the memory, so that a plan reckons with the real use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TableBytes {
    /// Bytes while the table lives: its slots and, if keys repeat, the list of their rows.
    pub stays: u64,
    /// Further bytes while the table is built: keys transformed by region, and the slot of each
    /// row.
    pub building: u64,
}

impl TableBytes {
    /// Returns the bytes of a table over `rows` keys of the given width, which are all distinct or
    /// may repeat.
    pub fn new(width: KeyWidth, rows: u64, repeats: bool) -> Self {
        let slots = (2 * rows).next_power_of_two().max(SLOTS_MIN as u64);
        let (unique_bytes, run_bytes, key_bytes) =
            with_key!(width, K => (size_of::<<K as Key>::Unique>(), size_of::<<K as Key>::Run>(), size_of::<K>()));
        // Keys and their row numbers, by region, stay allocated through both attempts, with
        // distinct keys and with runs.
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
    /// Hashed, with distinct keys.
    Unique(Values<K::Unique>, Addressing),
    /// Hashed, with runs.
    Runs(Values<K::Run>, Addressing),
    /// The position of `key_min + index`, or [`NO_ROW`](crate::device::NO_ROW).
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
    let digits = (slots / REGION_SLOTS).clamp(1, 1 << run.tuning.pass_bits_max);
    let regions = Regions::new::<K>(run, keys, slots, digits)?;
    if let Some(table) = regions.build::<K>(run, keys)? {
        return Ok(table);
    }
    // More distinct keys fell into one region than it has slots, against all odds or by design of
    // the keys. One region for the whole table has room for all.
    drop(regions);
    if slots > REGION_SLOTS_MAX {
        return Err(Error::Unsupported(format!(
            "a hash table over {} keys cannot be divided, because too many of them fall into one part of it, and undivided \
             it holds at most {}; join with a strategy that partitions or sorts",
            keys.rows,
            REGION_SLOTS_MAX / 2
        )));
    }
    let table = Regions::new::<K>(run, keys, slots, 1)?.build::<K>(run, keys)?;
    Ok(table.expect("a table has twice as many slots as there are keys"))
}

/// Keys transformed by region.
struct Regions {
    keys: Keys,
    /// The row of each key. `None` when the keys are in their given order.
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
        let mut scattered = scatter::<K>(run, keys, &[Payload::RowNumber], digits, digit)?;
        let rows = scattered.columns.pop().map(|(_, rows)| rows.freeze());
        let keys = Keys { data: scattered.keys.freeze(), ..keys.clone() };
        Ok(Self { keys, rows, bounds: scattered.bounds, addressing })
    }

    /// Builds the table. `None` when a region has no room for its keys.
    fn build<K: Key>(&self, run: &Run<'_>, keys: &Keys) -> Result<Option<Table>> {
        let rows = keys.rows;
        if let Some(table) = self.build_unique::<K>(run)? {
            return Ok(Some(Table { state: Arc::new(table), order: None, rows }));
        }
        let Some((table, order)) = self.build_runs::<K>(run)? else { return Ok(None) };
        let order = Positions::List { data: order.freeze(), rows, nullable: false };
        Ok(Some(Table { state: Arc::new(table), order: Some(order), rows }))
    }

    fn rows(&self) -> Option<&[u32]> {
        self.rows.as_ref().map(|rows| values_of::<u32>(rows, self.keys.rows))
    }

    /// Builds a table of distinct keys. `None` when keys repeat. Also `None` when a region gets
    /// more keys than distinct keys should give, because keys may then repeat.
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

    /// Builds a table of runs. `None` when a region has no room.
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

/// Maximum number of distinct keys in a region. One slot in eight stays empty, so that searches end
/// soon.
fn room(slots: usize) -> usize {
    slots - slots / 8
}

/// Enters distinct keys. `start` is the place of the first key among all, and `rows` translates
/// places to rows. False when a key repeats, or there are too many keys to be sure of an empty
/// slot.
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

/// Enters keys that may repeat, and puts their rows into `order`, with equal keys adjacent. False
/// when there is no room.
fn fill_runs<K: Key, S: Slot<K>>(
    run: &Run<'_>,
    slots: &mut [S],
    addressing: Addressing,
    keys: &[K],
    start: usize,
    rows: Option<&[u32]>,
    order: &mut [u32],
) -> Result<bool> {
    // Holds the slot of each row, so that the second pass need not search again.
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
    // `first` is the place of the run's next row, counted from this region's start, until all are
    // placed.
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

pub(super) fn probe<K: Key>(run: &Run<'_>, table: &Table, probe: &Keys, rows: Range<usize>) -> Result<Matches> {
    let table = table.state.as_any().downcast_ref::<HostTable<K>>();
    let table = table.expect("a table is of this device and of the same key width");
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

/// Assembles matches. Run lengths are kept only if one is above one.
pub(super) fn matches(first: Values<u32>, count: Option<Values<u32>>, rows: Range<usize>, tally: Tally) -> Matches {
    Matches {
        first: first.freeze(),
        count: count.filter(|_| tally.longest > 1).map(Values::freeze),
        rows,
        matched_rows: tally.matched_rows,
        total: tally.total,
    }
}
