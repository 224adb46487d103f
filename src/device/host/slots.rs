//! Open addressing: the one hash table of the host device. `table` uses one for all keys, and
//! `match_partitions` one per partition.
//!
//! A table is a slice of slots, a power of two in number and at most half full. It is probed
//! linearly from the slot that the lowest bits of the mixed key name. It may be divided into
//! regions of equal size, each a power of two, in which probing wraps around. Different threads can
//! then fill the regions.

use bytemuck::Pod;
use rayon::prelude::*;

use super::buffer::Values;
use super::hash::Key;
use super::raw::{RunSlot4, Slot4, Slot8, Slot16, prefetch};
use super::{MORSEL_ROWS, Run};
use crate::Result;
use crate::device::NO_ROW;

/// One entry of a table. It is empty while `first` is [`NO_ROW`].
pub(super) trait Slot<K>: Pod + Send + Sync + std::fmt::Debug {
    /// Creates a slot. A slot type without run lengths ignores `count`.
    fn new(key: K, first: u32, count: u32) -> Self;
    fn key(&self) -> K;
    fn first(&self) -> u32;
    fn count(&self) -> u32;

    /// A slot without a key.
    fn empty() -> Self
    where
        K: Key,
    {
        Self::new(K::default(), NO_ROW, 0)
    }

    fn is_empty(&self) -> bool {
        self.first() == NO_ROW
    }
}

impl Slot<u32> for Slot4 {
    #[inline(always)]
    fn new(key: u32, first: u32, _count: u32) -> Self {
        Self { key, first }
    }

    #[inline(always)]
    fn key(&self) -> u32 {
        self.key
    }

    #[inline(always)]
    fn first(&self) -> u32 {
        self.first
    }

    #[inline(always)]
    fn count(&self) -> u32 {
        1
    }
}

macro_rules! run_slot {
    ($name:ident, $key:ty $(, $padding:ident)?) => {
        impl Slot<$key> for $name {
            #[inline(always)]
            fn new(key: $key, first: u32, count: u32) -> Self {
                Self { key, first, count $(, $padding: 0)? }
            }

            #[inline(always)]
            fn key(&self) -> $key {
                self.key
            }

            #[inline(always)]
            fn first(&self) -> u32 {
                self.first
            }

            #[inline(always)]
            fn count(&self) -> u32 {
                self.count
            }
        }
    };
}

run_slot!(RunSlot4, u32, padding);
run_slot!(Slot8, u64);
run_slot!(Slot16, u128, padding);

/// Slots of the smallest table.
pub(super) const SLOTS_MIN: usize = 16;

/// Returns the number of slots of a table of `rows` distinct keys: two to four per key.
pub(super) fn slot_count(rows: usize) -> usize {
    (2 * rows).next_power_of_two().max(SLOTS_MIN)
}

/// Mapping from keys to slots of a table.
#[derive(Clone, Copy, Debug)]
pub(super) struct Addressing {
    /// Slots in the whole table, less one.
    pub(super) mask: usize,
    /// Slots in a region, less one; `mask` for a table of one region.
    pub(super) region_mask: usize,
}

impl Addressing {
    /// A table of one region.
    pub(super) fn whole(slot_count: usize) -> Self {
        Self { mask: slot_count - 1, region_mask: slot_count - 1 }
    }

    #[inline(always)]
    pub(super) fn start<K: Key>(self, key: K) -> usize {
        key.mix().low() & self.mask
    }

    #[inline(always)]
    fn next(self, index: usize) -> usize {
        (index & !self.region_mask) | ((index + 1) & self.region_mask)
    }

    /// Returns the slot of `key`, or the empty slot where it belongs. Its region must have an empty
    /// slot.
    #[inline(always)]
    pub(super) fn find<K: Key, S: Slot<K>>(self, slots: &[S], key: K, start: usize) -> usize {
        let mut index = start;
        loop {
            let slot = &slots[index];
            if slot.is_empty() || slot.key() == key {
                return index;
            }
            index = self.next(index);
        }
    }
}

/// A table over the keys of one partition, sized by its distinct keys and not its rows: a key on
/// millions of rows is one key. It starts with room for [`START_ROWS`] and doubles when there are
/// more distinct keys.
#[derive(Debug)]
pub(super) struct GrowingTable<S> {
    pub(super) slots: Values<S>,
    purpose: &'static str,
    entered: usize,
}

/// Initial room: twice the rows of an ordinary partition, so that only extraordinary partitions
/// ever grow.
pub(super) const START_ROWS: usize = 1 << 16;

impl<S: Pod> GrowingTable<S> {
    /// Creates an empty table for keys of `rows` rows.
    pub(super) fn new<K: Key>(run: &Run<'_>, rows: usize, purpose: &'static str) -> Result<Self>
    where
        S: Slot<K>,
    {
        let mut slots = run.values::<S>(slot_count(rows.min(START_ROWS)), purpose)?;
        slots.fill(S::empty());
        Ok(Self { slots, purpose, entered: 0 })
    }

    /// Ensures room for `rows` more keys, which may all be distinct.
    pub(super) fn make_room<K: Key>(&mut self, run: &Run<'_>, rows: usize) -> Result<()>
    where
        S: Slot<K>,
    {
        let wanted = slot_count(self.entered + rows);
        if wanted <= self.slots.len() {
            return Ok(());
        }
        let mut slots = run.values::<S>(wanted, self.purpose)?;
        slots.fill(S::empty());
        let addressing = Addressing::whole(wanted);
        for entered in self.slots.chunks(MORSEL_ROWS) {
            run.cancel.check()?;
            for slot in entered.iter().filter(|slot| !slot.is_empty()) {
                let index = addressing.find(&slots, slot.key(), addressing.start(slot.key()));
                slots[index] = *slot;
            }
        }
        self.slots = slots;
        Ok(())
    }

    /// Returns the slot of `key`. It is empty if the key is new, and the caller then fills it.
    #[inline(always)]
    pub(super) fn slot<K: Key>(&mut self, key: K) -> &mut S
    where
        S: Slot<K>,
    {
        let addressing = Addressing::whole(self.slots.len());
        let index = addressing.find(&self.slots, key, addressing.start(key));
        let slot = &mut self.slots[index];
        self.entered += usize::from(slot.is_empty());
        slot
    }
}

/// Statistics of the matches of a range of probe rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Tally {
    pub(super) matched_rows: usize,
    /// The sum of run lengths.
    pub(super) total: u64,
    pub(super) longest: u32,
}

impl Tally {
    pub(super) fn add(self, other: Self) -> Self {
        Self {
            matched_rows: self.matched_rows + other.matched_rows,
            total: self.total + other.total,
            longest: self.longest.max(other.longest),
        }
    }

    #[inline(always)]
    pub(super) fn count(&mut self, run: u32) {
        self.matched_rows += usize::from(run > 0);
        self.total += u64::from(run);
        self.longest = self.longest.max(run);
    }
}

/// Looks keys up in parallel, one morsel at a time. `look_up` writes each key's result to its place
/// in `first` and, if given, in `count`.
pub(super) fn probe_morsels<K: Key>(
    run: &Run<'_>,
    keys: &[K],
    first: &mut [u32],
    count: Option<&mut [u32]>,
    look_up: impl Fn(&[K], &mut [u32], Option<&mut [u32]>) -> Tally + Sync,
) -> Result<Tally> {
    let counts: Vec<Option<&mut [u32]>> = match count {
        Some(count) => count.chunks_mut(MORSEL_ROWS).map(Some).collect(),
        None => (0..keys.len().div_ceil(MORSEL_ROWS)).map(|_| None).collect(),
    };
    keys.par_chunks(MORSEL_ROWS)
        .zip(first.par_chunks_mut(MORSEL_ROWS))
        .zip(counts)
        .map(|((keys, first), count)| {
            run.cancel.check()?;
            Ok(look_up(keys, first, count))
        })
        .try_reduce(Tally::default, |a, b| Ok(a.add(b)))
}

/// Looks `keys` up and writes each result to `first` and, if given, `count`.
pub(super) fn probe<K: Key, S: Slot<K>>(
    slots: &[S],
    addressing: Addressing,
    keys: &[K],
    first: &mut [u32],
    count: Option<&mut [u32]>,
) -> Tally {
    match count {
        None => probe_with(slots, addressing, keys, first, |_, _| ()),
        Some(count) => {
            let count = &mut count[..keys.len()];
            probe_with(slots, addressing, keys, first, |row, run| count[row] = run)
        }
    }
}

#[inline(always)]
fn probe_with<K: Key, S: Slot<K>>(
    slots: &[S],
    addressing: Addressing,
    keys: &[K],
    first: &mut [u32],
    mut put_count: impl FnMut(usize, u32),
) -> Tally {
    /// Keys in flight at once: enough to cover the latency of memory, few enough for the line fill
    /// buffers.
    const BATCH: usize = 32;
    let mut tally = Tally::default();
    let mut starts = [0usize; BATCH];
    for (batch, (keys, first)) in keys.chunks(BATCH).zip(first.chunks_mut(BATCH)).enumerate() {
        for (start, &key) in starts.iter_mut().zip(keys) {
            *start = addressing.start(key);
            prefetch(slots, *start);
        }
        for (row, (&key, first)) in keys.iter().zip(first).enumerate() {
            let slot = &slots[addressing.find(slots, key, starts[row])];
            *first = slot.first();
            let run = if slot.is_empty() { 0 } else { slot.count() };
            put_count(batch * BATCH + row, run);
            tally.count(run);
        }
    }
    tally
}
