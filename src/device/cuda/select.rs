//! Lists of rows that satisfy a condition, such as the starts of runs of equal keys, and the flags
//! of matched build rows.

use std::ptr::null;
use std::sync::Arc;

use super::abi;
use super::buffer::{CudaBuffer, cuda, key_pointer, pointer_of};
use super::gather::list;
use super::work::Work;
use crate::Result;
use crate::device::{DeviceBuffer, Keys, Matches, Positions, Which};

/// Selects the rows that meet a condition, among the first `rows` rows. The caller fills in the
/// inputs of the condition.
pub(super) fn rows_that(condition: u32, rows: usize) -> abi::DovetailSelect {
    abi::DovetailSelect {
        condition,
        base: 0,
        start: 0,
        rows: rows as u64,
        flags: null(),
        first: null(),
        bitmaps: [null(); abi::DOVETAIL_FIELDS_MAX],
        bitmap_count: 0,
        key_bytes: 0,
        keys: null(),
        filter_words: null(),
        filter_mask: 0,
        scratch: std::ptr::null_mut(),
        scratch_bytes: 0,
        positions: std::ptr::null_mut(),
        selected: std::ptr::null_mut(),
    }
}

/// Maximum number of rows of one call.
fn rows_at_once() -> usize {
    // Under sanitizers, tests reach this path with few rows.
    match cfg!(test) && std::env::var_os("DOVETAIL_TEST_ROWS_MAX").is_some() {
        true => 1000,
        false => abi::DOVETAIL_SELECT_ROWS_MAX,
    }
}

/// Runs a selection. `expected`: the number of rows to be selected, if known. Otherwise the
/// number is read back, which waits.
pub(super) fn run(
    work: &Work<'_>,
    mut args: abi::DovetailSelect,
    expected: Option<usize>,
) -> Result<(CudaBuffer, usize)> {
    const PURPOSE: &str = "selecting rows";
    let rows = args.rows as usize;
    let positions = work.values::<u32>(expected.unwrap_or(rows), PURPOSE)?;
    let selected = work.buffer(size_of::<u64>(), PURPOSE)?;
    let at_once = rows_at_once();
    // SAFETY: the call only computes a size from a number.
    args.scratch_bytes = unsafe { abi::dovetail_select_scratch_bytes(rows.min(at_once) as u64) };
    let scratch = work.scratch(args.scratch_bytes, PURPOSE)?;
    args.scratch = scratch.as_mut_ptr();
    args.selected = selected.as_mut_ptr();
    let mut count = 0;
    for start in (0..rows.max(1)).step_by(at_once) {
        let end = rows.min(start + at_once);
        (args.start, args.rows) = (start as u32, (end - start) as u64);
        // SAFETY: `count` rows were selected so far, and there is room for all.
        args.positions = unsafe { positions.as_mut_ptr::<u32>().add(count) };
        work.launch(PURPOSE, abi::dovetail_select, &args)?;
        match expected {
            Some(expected) if end == rows => count = expected,
            _ => count += work.read::<u64>(&selected, PURPOSE)? as usize,
        }
    }
    if expected.is_some() {
        return Ok((positions, count));
    }
    if count > rows / 2 || rows < 1 << 16 {
        return Ok((positions, count));
    }
    // Most of the memory was not needed, and the list may live long.
    let exact = work.values::<u32>(count, PURPOSE)?;
    work.copy_to(&positions, 0..count * size_of::<u32>(), &exact, 0, PURPOSE)?;
    Ok((exact, count))
}

pub(super) fn select_matches(work: &Work<'_>, matches: &Matches, which: Which) -> Result<Positions> {
    let rows = matches.rows.len();
    let (condition, expected) = match which {
        Which::Matched => (abi::DOVETAIL_MATCHED, matches.matched_rows),
        Which::Unmatched => (abi::DOVETAIL_UNMATCHED, rows - matches.matched_rows),
    };
    if expected == rows {
        return Ok(Positions::Range(matches.rows.clone()));
    }
    let mut args = rows_that(condition, rows);
    args.base = matches.rows.start as u32;
    args.first = pointer_of(&matches.first, rows);
    let (data, rows) = run(work, args, Some(expected))?;
    Ok(Positions::List { data: Arc::new(data), rows, nullable: false })
}

pub(super) fn select_flags(work: &Work<'_>, flags: &DeviceBuffer, rows: usize, which: Which) -> Result<Positions> {
    let condition = match which {
        Which::Matched => abi::DOVETAIL_FLAG_SET,
        Which::Unmatched => abi::DOVETAIL_FLAG_CLEAR,
    };
    let mut args = rows_that(condition, rows);
    args.flags = pointer_of(flags, rows);
    let (data, rows) = run(work, args, None)?;
    Ok(Positions::List { data: Arc::new(data), rows, nullable: false })
}

/// Finds the start of each run of equal keys, followed by the number of rows, and the number of
/// runs. Waits.
pub(super) fn find_runs(work: &Work<'_>, keys: &Keys) -> Result<(CudaBuffer, usize)> {
    const PURPOSE: &str = "finding runs of equal keys";
    let mut args = rows_that(abi::DOVETAIL_RUN_HEADS, keys.rows);
    args.keys = key_pointer(keys);
    args.key_bytes = keys.width.bytes() as u32;
    let (heads, runs) = run(work, args, None)?;
    let bounds = work.values::<u32>(runs + 1, PURPOSE)?;
    work.copy_to(&heads, 0..runs * size_of::<u32>(), &bounds, 0, PURPOSE)?;
    work.write_words(&[keys.rows as u32], &bounds, runs)?;
    Ok((bounds, runs))
}

/// Allocates a zeroed byte per row, in whole words.
pub(super) fn new_flags(work: &Work<'_>, rows: usize, purpose: &str) -> Result<CudaBuffer> {
    work.filled(rows.next_multiple_of(size_of::<u32>()), 0, purpose)
}

pub(super) fn mark_build(work: &Work<'_>, matches: &Matches, flags: &DeviceBuffer) -> Result<()> {
    const PURPOSE: &str = "marking matched rows";
    let rows = matches.rows.len();
    // Each long run takes two words of the list, and runs do not share rows.
    let long_runs = match matches.count {
        Some(_) => cuda(flags).size() / abi::DOVETAIL_LONG_RUN as usize + 1,
        None => 0,
    };
    let list = work.values::<[u32; 2]>(long_runs, PURPOSE)?;
    let count = work.filled(size_of::<u32>(), 0, PURPOSE)?;
    let args = abi::DovetailMarkRuns {
        first: pointer_of(&matches.first, rows),
        count: matches.count.as_ref().map_or(null(), |count| pointer_of(count, rows)),
        rows: rows as u64,
        long_runs: list.as_mut_ptr(),
        long_run_count: count.as_mut_ptr(),
        flags: cuda(flags).as_mut_ptr(),
    };
    work.launch(PURPOSE, abi::dovetail_mark_runs, &args)
}

pub(super) fn mark(work: &Work<'_>, positions: &Positions, flags: &DeviceBuffer) -> Result<()> {
    let (list, start) = list(positions);
    let flags = cuda(flags).as_mut_ptr();
    let args = abi::DovetailMark { positions: list, start, rows: positions.len() as u64, flags };
    work.launch("marking rows", abi::dovetail_mark, &args)
}
