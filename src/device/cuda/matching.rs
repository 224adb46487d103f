//! Matching within partitions, and of sorted keys.

use std::ops::Range;
use std::ptr::null;
use std::sync::Arc;

use super::abi::{self, DOVETAIL_TABLE_ROWS, DovetailMatchTotals, DovetailMatchUnit};
use super::buffer::{CudaBuffer, pointer_of};
use super::keys::key_pointer;
use super::partition::{any_above, bounds_of};
use super::positions::select;
use super::work::Work;
use crate::Result;
use crate::device::{DeviceBuffer, Grouping, Keys, Matches, PartitionMatches, Partitions};

/// Probe rows that a block matches at most: more, and a skewed partition keeps one block long after the others are done;
/// fewer, and the table is built again more often than it is worth.
pub(super) const UNIT_ROWS: usize = 8 * DOVETAIL_TABLE_ROWS as usize;

/// What a kernel found, as matches.
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

/// Where each run of equal keys starts, and at the end the number of rows; and how many runs there are. Waits.
pub(super) fn find_runs(work: &Work<'_>, keys: &Keys) -> Result<(CudaBuffer, usize)> {
    const PURPOSE: &str = "finding runs of equal keys";
    let mut args = select::rows_that(abi::DOVETAIL_RUN_HEADS, keys.rows);
    args.keys = key_pointer(keys);
    args.key_bytes = keys.width.bytes() as u32;
    let (heads, runs) = select::run(work, args, None)?;
    let bounds = work.values::<u32>(runs + 1, PURPOSE)?;
    work.copy_to(&heads, 0..runs * size_of::<u32>(), &bounds, 0, PURPOSE)?;
    work.write_words(&[keys.rows as u32], &bounds, runs)?;
    Ok((bounds, runs))
}

pub(super) fn match_partitions(
    work: &Work<'_>,
    build: &Partitions,
    probe: &Partitions,
    partitions: Range<usize>,
) -> Result<PartitionMatches> {
    const PURPOSE: &str = "matching partitions";
    if !build.is_grouped() && any_above(DOVETAIL_TABLE_ROWS as usize, build, partitions.clone())? {
        // Its table takes several rounds, which would not see that a key of one is in another as well.
        return Ok(PartitionMatches::RepeatedBuildKeys);
    }
    // Either the keys of a partition are entered into its table, or the first ones of its runs.
    let (heads, build_bounds) = match &build.grouping {
        Grouping::Unknown => (null(), bounds_of(build).from(partitions.start)),
        Grouping::Adjacent { runs } => {
            let runs = runs.as_ref().expect("grouping on this device has found the runs");
            let before = pointer_of::<u32>(&runs.before, build.bounds.partitions() + 1);
            // SAFETY: there are as many as bounds, as was just asserted, and the range of partitions lies within these.
            (pointer_of::<u32>(&runs.heads, runs.count + 1), unsafe { before.add(partitions.start) })
        }
    };
    let rows = probe.bounds.rows_of(partitions.clone())?;
    let first = work.values::<u32>(rows.len(), "matches")?;
    let count = match build.is_grouped() {
        true => Some(work.values::<u32>(rows.len(), "lengths of matches")?),
        false => None,
    };
    let totals = work.totals()?;
    if !rows.is_empty() {
        let (units, unit_count) = units(work, probe, &partitions, PURPOSE)?;
        let args = abi::DovetailMatchPartitions {
            build_keys: key_pointer(&build.keys),
            heads,
            build_bounds,
            probe_keys: key_pointer(&probe.keys),
            units: units.as_ptr(),
            unit_count: unit_count as u32,
            key_bytes: build.keys.width.bytes() as u32,
            first_row: rows.start as u32,
            first: first.as_mut_ptr(),
            count: count.as_ref().map_or(std::ptr::null_mut(), CudaBuffer::as_mut_ptr),
            totals: totals.as_mut_ptr(),
        };
        work.launch(PURPOSE, abi::dovetail_match_partitions, &args)?;
    }
    let totals: DovetailMatchTotals = work.read(&totals, PURPOSE)?;
    if totals.unsound != 0 {
        return Ok(PartitionMatches::RepeatedBuildKeys);
    }
    Ok(PartitionMatches::Matched(matches(first, count, rows, totals)))
}

/// What blocks do with the probe rows of those partitions: a list of units, and how long it is. The last ones may have nothing to do.
pub(super) fn units(
    work: &Work<'_>,
    probe: &Partitions,
    partitions: &Range<usize>,
    purpose: &'static str,
) -> Result<(CudaBuffer, usize)> {
    // A partition's last unit may have any number of rows; all others are full.
    let count = partitions.len() + probe.keys.rows / UNIT_ROWS;
    let units = work.values::<DovetailMatchUnit>(count, purpose)?;
    // SAFETY: it computes a size from a number.
    let scratch_bytes = unsafe { abi::dovetail_list_units_scratch_bytes(partitions.len() as u32) };
    let scratch = work.scratch(scratch_bytes, purpose)?;
    let args = abi::DovetailListUnits {
        probe_bounds: bounds_of(probe).from(partitions.start),
        partitions: partitions.len() as u32,
        unit_rows: UNIT_ROWS as u32,
        scratch: scratch.as_mut_ptr(),
        scratch_bytes,
        units: units.as_mut_ptr(),
        unit_count: count as u32,
    };
    work.launch(purpose, abi::dovetail_list_units, &args)?;
    Ok((units, count))
}

pub(super) fn match_sorted(work: &Work<'_>, build: &Keys, probe: &Keys, rows: Range<usize>) -> Result<Matches> {
    let key_bytes = probe.width.bytes();
    assert!(rows.end <= probe.rows, "probe rows {rows:?} of {}", probe.rows);
    let first = work.values::<u32>(rows.len(), "matches")?;
    let count = work.values::<u32>(rows.len(), "lengths of matches")?;
    let totals = work.totals()?;
    let args = abi::DovetailMatchSorted {
        build_keys: key_pointer(build),
        build_rows: build.rows as u64,
        // SAFETY: the range lies within the keys, as was just asserted.
        probe_keys: unsafe { key_pointer(probe).cast::<u8>().add(rows.start * key_bytes) }.cast(),
        rows: rows.len() as u64,
        key_bytes: key_bytes as u32,
        first: first.as_mut_ptr(),
        count: count.as_mut_ptr(),
        totals: totals.as_mut_ptr(),
    };
    work.launch("matching sorted keys", abi::dovetail_match_sorted, &args)?;
    let totals = work.read(&totals, "totals of matches")?;
    Ok(matches(first, Some(count), rows, totals))
}
