//! Grouping: makes equal keys of each partition adjacent, with the payload.

use std::sync::Arc;

use super::abi;
use super::gather::{move_payload, rearranged};
use super::partition::{BoundsThere, bounds_of};
use super::select::find_runs;
use super::sort::{Image, sorted_order};
use super::work::Work;
use crate::Result;
use crate::device::{Grouping, Keys, Partitions, Payload, Runs};

/// Sorts by the mixed key. Partitions are ranges of the mixed key, so they stay as they are, and
/// equal keys become adjacent. Their runs are found once here, and not again for each chunk of
/// probe rows.
pub(super) fn group(work: &Work<'_>, partitions: &Partitions) -> Result<Partitions> {
    if partitions.is_grouped() {
        return Ok(partitions.clone());
    }
    let Partitions { keys, payload: columns, bounds, bits, .. } = partitions;
    let there = bounds_of(partitions);
    let (order, _) = sorted_order(work, keys, Image::Mixed { skip: bits.skip })?;
    let keys = rearranged(work, keys, &order)?;
    let payload: Vec<Payload> = columns.iter().cloned().map(Payload::Column).collect();
    let payload = move_payload(work, &payload, &order)?;
    let runs = runs_of(work, &keys, there)?;
    Ok(Partitions {
        keys,
        payload,
        bounds: bounds.clone(),
        bits: *bits,
        grouping: Grouping::Adjacent { runs: Some(runs) },
    })
}

/// Finds the runs of keys that are adjacent within their partitions. Waits.
fn runs_of(work: &Work<'_>, keys: &Keys, bounds: &BoundsThere) -> Result<Runs> {
    const PURPOSE: &str = "finding the runs of partitions";
    let (heads, count) = find_runs(work, keys)?;
    let bound_count = bounds.partitions + 1;
    let before = work.values::<u32>(bound_count, PURPOSE)?;
    let args = abi::DovetailLowerBounds {
        positions: heads.as_ptr(),
        position_count: count as u64,
        bounds: bounds.from(0),
        bound_count: bound_count as u64,
        indices: before.as_mut_ptr(),
    };
    work.launch(PURPOSE, abi::dovetail_lower_bounds, &args)?;
    Ok(Runs { heads: Arc::new(heads), count, before: Arc::new(before) })
}
