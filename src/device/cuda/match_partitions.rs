//! Matching within partitions, and the units of probe rows that blocks work on.

use std::ops::Range;
use std::ptr::null;

use super::abi::{self, DOVETAIL_TABLE_ROWS, DovetailMatchTotals, DovetailMatchUnit};
use super::buffer::{CudaBuffer, key_pointer, pointer_of};
use super::partition::{any_above, bounds_of};
use super::table::matches;
use super::work::Work;
use crate::Result;
use crate::device::{Grouping, PartitionMatches, Partitions};

/// Distribution of the probe rows of partitions among blocks. A partition with far more probe rows
/// than others is divided. If its units are too large, one block is busy long after the others. If
/// its units are too small, its table is rebuilt too often.
pub(super) struct UnitRows {
    /// Largest number of rows of a partition that is one unit.
    whole: usize,
    /// Rows per unit of larger partitions.
    unit: usize,
}

impl UnitRows {
    /// Computes the unit sizes for a build side and all, or a chunk, of the probe side.
    pub(super) fn of(build: &Partitions, probe: &Partitions) -> Self {
        Self::new(build.bounds.rows(), probe.bounds.rows(), probe.bounds.partitions())
    }

    /// Computes the unit sizes for `partitions` partitions with `build` and `probe` rows in total.
    fn new(build: usize, probe: usize, partitions: usize) -> Self {
        /// The largest unit.
        const MAX: usize = 8 * DOVETAIL_TABLE_ROWS as usize;
        /// The smallest unit: at most two tiles of a block.
        const MIN: usize = 1024;
        /// Number of units from which each is a small part of the whole, so that the wait for the
        /// last one is short.
        const UNITS: usize = 4096;
        /// Probe rows of a unit, at least, per build row of its table. With fewer, building tables
        /// would take most of the time.
        const OF_BUILD_ROW: usize = 4;
        /// Multiple of the average size above which a partition is divided.
        const OF_AVERAGE: usize = 2;
        let average = |rows: usize| rows / partitions.max(1);
        let unit = (probe / UNITS).max(OF_BUILD_ROW * average(build)).clamp(MIN, MAX);
        Self { whole: (OF_AVERAGE * average(probe)).clamp(unit, MAX), unit }
    }

    /// True if a partition with `rows` probe rows is divided.
    pub(super) fn divides(&self, rows: usize) -> bool {
        rows > self.whole
    }
}

pub(super) fn match_partitions(
    work: &Work<'_>,
    build: &Partitions,
    probe: &Partitions,
    partitions: Range<usize>,
) -> Result<PartitionMatches> {
    const PURPOSE: &str = "matching partitions";
    if !build.is_grouped() && any_above(DOVETAIL_TABLE_ROWS as usize, build, partitions.clone())? {
        // Such a partition takes several rounds. A round would not detect that a key repeats in
        // another round.
        return Ok(PartitionMatches::RepeatedBuildKeys);
    }
    // The table holds the keys of a partition or, if grouped, the first key of each of its runs.
    let (heads, build_bounds) = match &build.grouping {
        Grouping::Unknown => (null(), bounds_of(build).from(partitions.start)),
        Grouping::Adjacent { runs } => {
            let runs = runs.as_ref().expect("grouping on this device has found the runs");
            let before = pointer_of::<u32>(&runs.before, build.bounds.partitions() + 1);
            // SAFETY: `before` has as many entries as there are bounds, as was just asserted. The
            // range of partitions is within these.
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
        let (units, unit_count) = units(work, probe, &partitions, &UnitRows::of(build, probe), PURPOSE)?;
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

/// Lists the units that blocks work on, for the probe rows of those partitions. Returns the list
/// and its length. The last units may be empty.
pub(super) fn units(
    work: &Work<'_>,
    probe: &Partitions,
    partitions: &Range<usize>,
    unit_rows: &UnitRows,
    purpose: &'static str,
) -> Result<(CudaBuffer, usize)> {
    // A partition's last unit may have any number of rows; all others are full.
    let count = partitions.len() + probe.bounds.rows() / unit_rows.unit;
    let units = work.values::<DovetailMatchUnit>(count, purpose)?;
    // SAFETY: the call only computes a size from a number.
    let scratch_bytes = unsafe { abi::dovetail_list_units_scratch_bytes(partitions.len() as u32) };
    let scratch = work.scratch(scratch_bytes, purpose)?;
    let args = abi::DovetailListUnits {
        probe_bounds: bounds_of(probe).from(partitions.start),
        partitions: partitions.len() as u32,
        whole_rows: unit_rows.whole as u32,
        unit_rows: unit_rows.unit as u32,
        scratch: scratch.as_mut_ptr(),
        scratch_bytes,
        units: units.as_mut_ptr(),
        unit_count: count as u32,
    };
    work.launch(purpose, abi::dovetail_list_units, &args)?;
    Ok((units, count))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn partitions_far_larger_than_others_are_divided() {
        let of = |build: usize, probe: usize, partitions: usize| {
            let UnitRows { whole, unit } = UnitRows::new(build, probe, partitions);
            (whole, unit)
        };
        // With few rows, units have the smallest size.
        assert_eq!(of(0, 0, 1), (1024, 1024));
        assert_eq!(of(40_000, 230_000, 256), (1796, 1024));
        // With more build rows, a unit must be large enough to be worth a table.
        assert_eq!(of(2_300_000, 15_400_000, 2048), (15_038, 4492));
        // With many rows, units have the largest size.
        assert_eq!(of(1 << 27, 1 << 28, 1 << 16), (32_768, 32_768));
        // With few partitions, all are divided.
        assert_eq!(of(200_000, 1 << 24, 256), (32_768, 4096));
    }
}
