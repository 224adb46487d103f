//! One table over all build keys: hashed, or an array of positions when distinct keys are dense.
//!
//! Keys are entered in their given order, and a repeated key is detected at once. If a key repeats,
//! or if repeats are expected, keys are sorted by their mixed key instead. Equal keys are then
//! adjacent, and the table holds the runs.
//!
//! Keys that are still being copied in are entered piece by piece as each arrives, on a second
//! stream:
//!
//! ```text
//!   the job's stream   copy │ copy │ copy │ copy │
//!   second stream             enter │ enter │ enter │ enter │
//! ```

use std::any::Any;
use std::ops::Range;
use std::ptr::null;
use std::sync::Arc;

use super::CudaStream;
use super::abi::{self, DovetailMatchTotals};
use super::buffer::{Arrival, CudaBuffer, cuda, key_pointer, pointer_of};
use super::gather::rearranged;
use super::select::find_runs;
use super::sort::{Image, clustered, is_sorted, sorted_order};
use super::work::Work;
use crate::Result;
use crate::device::{DeviceBuffer, DeviceMemory, Keys, Matches, Table};

#[derive(Debug)]
enum CudaTable {
    Hashed {
        slots: CudaBuffer,
        slot_mask: u64,
        /// Keys in the order of `heads`.
        keys: Keys,
        /// Start of each run of equal keys, followed by the number of rows. `None` if all keys are
        /// distinct.
        heads: Option<CudaBuffer>,
    },
    /// Array that holds the position of key `key_min + index` at `index`, or `NO_ROW`.
    Dense { positions: CudaBuffer, key_min: u128, span: u64, key_bytes: usize },
}

impl DeviceMemory for CudaTable {
    fn size_bytes(&self) -> usize {
        match self {
            Self::Hashed { slots, heads, .. } => slots.size() + heads.as_ref().map_or(0, CudaBuffer::size),
            Self::Dense { positions, .. } => positions.size(),
        }
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

pub(super) fn build(work: &Work<'_>, keys: &Keys, repeats: bool) -> Result<Table> {
    if !repeats && let Some(table) = hashed(work, keys.clone(), None)? {
        return Ok(Table { state: Arc::new(table), order: None, rows: keys.rows });
    }
    let (order, _) = sorted_order(work, keys, Image::Mixed { skip: 0 })?;
    let sorted = rearranged(work, keys, &order)?;
    let runs = find_runs(work, &sorted)?;
    let table = hashed(work, sorted, Some(runs))?;
    let table = table.ok_or_else(|| crate::Error::Internal("equal keys were not adjacent after sorting".into()))?;
    Ok(Table { state: Arc::new(table), order: Some(order), rows: keys.rows })
}

/// Builds a hash table. Returns `None` if a key repeats that must not.
fn hashed(work: &Work<'_>, keys: Keys, runs: Option<(CudaBuffer, usize)>) -> Result<Option<CudaTable>> {
    const PURPOSE: &str = "a hash table";
    let entries = runs.as_ref().map_or(keys.rows, |(_, runs)| *runs);
    let slot_count = (2 * entries).next_power_of_two().max(2);
    let heads = runs.map(|(heads, _)| heads);
    let entering = Entering::of(&keys, work)?;
    let own = entering.work(work);
    // A slot with every bit set is empty. No entry has that value, because no run has the number
    // `NO_ROW`.
    let slots = own.filled(slot_count * size_of::<u64>(), 0xff, PURPOSE)?;
    let totals = own.totals()?;
    entering.each(entries, |runs| {
        let args = abi::DovetailTableInsert {
            keys: key_pointer(&keys),
            heads: heads.as_ref().map_or(null(), CudaBuffer::as_ptr),
            first: runs.start as u64,
            runs: runs.len() as u64,
            key_bytes: keys.width.bytes() as u32,
            slot_mask: slot_count as u64 - 1,
            slots: slots.as_mut_ptr(),
            totals: totals.as_mut_ptr(),
        };
        own.launch("building a hash table", abi::dovetail_table_insert, &args)
    })?;
    let totals: DovetailMatchTotals = own.read(&totals, PURPOSE)?;
    slots.record_stream(work.queue, None);
    let slot_mask = slot_count as u64 - 1;
    Ok((totals.unsound == 0).then_some(CudaTable::Hashed { slots, slot_mask, keys, heads }))
}

/// Way of entering keys: all at once, or piece by piece as they arrive.
struct Entering {
    key_bytes: usize,
    arrivals: Vec<Arrival>,
    /// Second stream, on which pieces are entered.
    beside: Option<CudaStream>,
}

impl Entering {
    fn of(keys: &Keys, work: &Work<'_>) -> Result<Self> {
        let (key_bytes, arrivals) = (keys.width.bytes(), cuda(&keys.data).take_arrivals());
        let beside = match arrivals.is_empty() {
            true => None,
            false => Some(CudaStream::new(work.queue.gpu.clone())?),
        };
        Ok(Self { key_bytes, arrivals, beside })
    }

    fn is_in_pieces(&self) -> bool {
        self.beside.is_some()
    }

    /// Returns the work with the stream on which the table is made.
    fn work<'a>(&'a self, work: &Work<'a>) -> Work<'a> {
        match &self.beside {
            Some(beside) => Work { stream: beside, queue: &beside.queue, ..*work },
            None => Work { ..*work },
        }
    }

    /// Calls `enter` for all `entries`, in one or several ranges. The stream waits for the keys of
    /// each range first.
    fn each(&self, entries: usize, mut enter: impl FnMut(Range<usize>) -> Result<()>) -> Result<()> {
        let Some(beside) = &self.beside else { return enter(0..entries) };
        let mut start = 0;
        for Arrival { end, there } in &self.arrivals {
            there.hold_back(&beside.queue)?;
            // A piece may end within a key.
            let end = (end / self.key_bytes).min(entries);
            enter(start..end)?;
            start = end;
        }
        assert_eq!(start, entries, "keys that are still copied in are entered in their order, each once");
        Ok(())
    }
}

pub(super) fn build_dense(work: &Work<'_>, keys: &Keys, key_min: u128, key_max: u128) -> Result<Option<Table>> {
    const PURPOSE: &str = "a table of dense keys";
    assert!(key_min <= key_max || keys.rows == 0, "a range of keys from {key_min} to {key_max}");
    let span = key_max.saturating_sub(key_min).saturating_add(1);
    let bits = 8 * keys.width.bytes() as u32;
    if key_max > u128::MAX >> (128 - bits) || span < keys.rows as u128 {
        // No key reaches a `key_max` beyond its width, and a key repeats if the range has fewer
        // keys than there are rows. In both cases there is no such table.
        return Ok(None);
    }
    let Ok(span) = u64::try_from(span) else { return Ok(None) };
    let entering = Entering::of(keys, work)?;
    let own = entering.work(work);
    let positions = own.filled(usize::try_from(span).unwrap_or(usize::MAX).saturating_mul(4), 0xff, PURPOSE)?;
    let totals = own.totals()?;
    // Unordered keys write to random places. If the array outgrows the cache, such writes take four
    // times as long as first clustering the keys by the part of the array that they write to. Keys
    // that arrive over PCIe are not clustered, because their arrival takes at least as long as
    // random writes.
    let is_random = !entering.is_in_pieces() && positions.size() as u64 > work.queue.gpu.cache_bytes / 2;
    let clustered = match is_random && !is_sorted(work, keys)? {
        true => clustered(work, keys, u64::BITS - (span - 1).leading_zeros())?,
        false => None,
    };
    let (keys, row_numbers) = clustered.map_or((keys.clone(), None), |(keys, numbers)| (keys, Some(numbers)));
    entering.each(keys.rows, |rows| {
        let args = abi::DovetailDenseInsert {
            keys: key_pointer(&keys),
            first: rows.start as u64,
            rows: rows.len() as u64,
            min_low: key_min as u64,
            min_high: (key_min >> 64) as u64,
            span,
            key_bytes: keys.width.bytes() as u32,
            row_numbers: row_numbers.as_ref().map_or(null(), CudaBuffer::as_ptr),
            positions: positions.as_mut_ptr(),
            totals: totals.as_mut_ptr(),
        };
        own.launch("building a table of dense keys", abi::dovetail_dense_insert, &args)
    })?;
    let totals: DovetailMatchTotals = own.read(&totals, PURPOSE)?;
    positions.record_stream(work.queue, None);
    let table = CudaTable::Dense { positions, key_min, span, key_bytes: keys.width.bytes() };
    Ok((totals.unsound == 0).then(|| Table { state: Arc::new(table), order: None, rows: keys.rows }))
}

pub(super) fn probe(work: &Work<'_>, table: &Table, probe: &Keys, rows: Range<usize>) -> Result<Matches> {
    let key_bytes = probe.width.bytes();
    let probe_keys = pointer_of::<u8>(&probe.data, probe.rows * key_bytes);
    assert!(rows.end <= probe.rows, "probe rows {rows:?} of {}", probe.rows);
    // SAFETY: the range is within the keys, as was just asserted.
    let probe_keys = unsafe { probe_keys.add(rows.start * key_bytes) }.cast();
    let first = work.values::<u32>(rows.len(), "matches")?;
    let totals = work.totals()?;
    let table = table.state.as_any().downcast_ref::<CudaTable>().expect("a table that a GPU gets is a GPU table");
    let mut count = None;
    match table {
        CudaTable::Hashed { slots, slot_mask, keys, heads } => {
            assert_eq!(keys.width, probe.width, "both sides of a match have keys of one width");
            if heads.is_some() {
                count = Some(work.values::<u32>(rows.len(), "lengths of matches")?);
            }
            let args = abi::DovetailTableProbe {
                slots: slots.as_ptr(),
                slot_mask: *slot_mask,
                build_keys: cuda(&keys.data).as_ptr(),
                heads: heads.as_ref().map_or(null(), CudaBuffer::as_ptr),
                probe_keys,
                rows: rows.len() as u64,
                key_bytes: key_bytes as u32,
                first: first.as_mut_ptr(),
                count: count.as_ref().map_or(std::ptr::null_mut(), CudaBuffer::as_mut_ptr),
                totals: totals.as_mut_ptr(),
            };
            work.launch("probing a hash table", abi::dovetail_table_probe, &args)?;
        }
        CudaTable::Dense { positions, key_min, span, key_bytes: table_key_bytes } => {
            assert_eq!(*table_key_bytes, key_bytes, "both sides of a match have keys of one width");
            let args = abi::DovetailDenseProbe {
                positions: positions.as_ptr(),
                span: *span,
                min_low: *key_min as u64,
                min_high: (*key_min >> 64) as u64,
                probe_keys,
                rows: rows.len() as u64,
                key_bytes: key_bytes as u32,
                first: first.as_mut_ptr(),
                totals: totals.as_mut_ptr(),
            };
            work.launch("probing a table of dense keys", abi::dovetail_dense_probe, &args)?;
        }
    }
    let totals = work.read(&totals, "totals of matches")?;
    Ok(matches(first, count, rows, totals))
}

/// Converts a kernel's output to matches.
pub(super) fn matches(
    first: CudaBuffer,
    count: Option<CudaBuffer>,
    rows: Range<usize>,
    totals: DovetailMatchTotals,
) -> Matches {
    Matches {
        first: Arc::new(first),
        count: count.filter(|_| totals.longest > 1).map(|count| Arc::new(count) as DeviceBuffer),
        rows,
        matched_rows: totals.matched_rows as usize,
        total: totals.total,
    }
}
