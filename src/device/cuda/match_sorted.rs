//! Matching of sorted keys against sorted keys.

use std::ops::Range;

use super::abi;
use super::buffer::key_pointer;
use super::table::matches;
use super::work::Work;
use crate::Result;
use crate::device::{Keys, Matches};

pub(super) fn match_sorted(work: &Work<'_>, build: &Keys, probe: &Keys, rows: Range<usize>) -> Result<Matches> {
    let key_bytes = probe.width.bytes();
    assert!(rows.end <= probe.rows, "probe rows {rows:?} of {}", probe.rows);
    let first = work.values::<u32>(rows.len(), "matches")?;
    let count = work.values::<u32>(rows.len(), "lengths of matches")?;
    let totals = work.totals()?;
    let args = abi::DovetailMatchSorted {
        build_keys: key_pointer(build),
        build_rows: build.rows as u64,
        // SAFETY: the range is within the keys, as was just asserted.
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
