//! Matching within partitions, and of sorted keys.

use std::ops::Range;
use std::ptr::null;
use std::sync::Arc;

use super::abi::{self, DOVETAIL_TABLE_ROWS, DovetailMatchTotals, DovetailMatchUnit};
use super::buffer::CudaBuffer;
use super::keys::key_pointer;
use super::positions::select;
use super::work::Work;
use crate::Result;
use crate::device::{DeviceBuffer, Keys, Matches, PartitionMatches, Partitions};

/// Probe rows that a block matches at most: more, and a skewed partition keeps one block long after the others are done;
/// fewer, and the table is built again more often than it is worth.
const UNIT_ROWS: usize = 8 * DOVETAIL_TABLE_ROWS as usize;

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
    work.copy_to(&heads, &bounds, 0, runs * size_of::<u32>(), PURPOSE)?;
    let end = work.upload(&[keys.rows as u32], PURPOSE)?;
    work.copy_to(&end, &bounds, runs * size_of::<u32>(), size_of::<u32>(), PURPOSE)?;
    Ok((bounds, runs))
}

pub(super) fn match_partitions(
    work: &Work<'_>,
    build: &Partitions,
    probe: &Partitions,
    partitions: Range<usize>,
) -> Result<PartitionMatches> {
    const PURPOSE: &str = "matching partitions";
    let oversized = |bounds: &[usize]| bounds[1] - bounds[0] > DOVETAIL_TABLE_ROWS as usize;
    if !build.grouped && build.bounds[partitions.start..=partitions.end].windows(2).any(oversized) {
        // Its table takes several rounds, which would not see that a key of one is in another as well.
        return Ok(PartitionMatches::RepeatedBuildKeys);
    }
    let own_bounds: Vec<u32> =
        build.bounds[partitions.start..=partitions.end].iter().map(|&bound| bound as u32).collect();
    let own_bounds = work.upload(&own_bounds, PURPOSE)?;
    let (heads, build_bounds) = match build.grouped {
        false => (None, own_bounds),
        true => {
            let (heads, runs) = find_runs(work, &build.keys)?;
            let bounds = work.values::<u32>(partitions.len() + 1, PURPOSE)?;
            let args = abi::DovetailLowerBounds {
                positions: heads.as_ptr(),
                position_count: runs as u64,
                bounds: own_bounds.as_ptr(),
                bound_count: partitions.len() as u64 + 1,
                indices: bounds.as_mut_ptr(),
            };
            work.launch("finding the runs of partitions", abi::dovetail_lower_bounds, &args)?;
            (Some(heads), bounds)
        }
    };
    let bounds = &probe.bounds[partitions.start..=partitions.end];
    let rows = bounds[0]..bounds[partitions.len()];
    let units = units(bounds);
    let units_on_device = work.upload(&units, PURPOSE)?;
    let first = work.values::<u32>(rows.len(), "matches")?;
    let count = match heads {
        Some(_) => Some(work.values::<u32>(rows.len(), "lengths of matches")?),
        None => None,
    };
    let totals = work.totals()?;
    if !units.is_empty() {
        let args = abi::DovetailMatchPartitions {
            build_keys: key_pointer(&build.keys),
            heads: heads.as_ref().map_or(null(), CudaBuffer::as_ptr),
            build_bounds: build_bounds.as_ptr(),
            probe_keys: key_pointer(&probe.keys),
            units: units_on_device.as_ptr(),
            unit_count: units.len() as u32,
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

/// What blocks do: partitions without probe rows need none, and those with many have several.
fn units(bounds: &[usize]) -> Vec<DovetailMatchUnit> {
    let mut units = Vec::with_capacity(bounds.len());
    for (partition, bounds) in bounds.windows(2).enumerate() {
        for start in (bounds[0]..bounds[1]).step_by(UNIT_ROWS) {
            let end = bounds[1].min(start + UNIT_ROWS) as u32;
            units.push(DovetailMatchUnit { partition: partition as u32, start: start as u32, end });
        }
    }
    units
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
