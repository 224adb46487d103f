//! From matches to positions: pairs, selections, and the flags of matched build rows.

use std::ptr::null;
use std::sync::{Arc, Weak};

use super::abi;
use super::buffer::{CudaBuffer, cuda, pointer_of};
use super::gather::{compose, list};
use super::work::Work;
use crate::Result;
use crate::device::{DeviceBuffer, DeviceMemory, Matches, PARTS_MAX, Pairs, Positions, Unmatched, Which};

/// Lists of rows that satisfy a condition.
pub(super) mod select {
    use super::*;

    /// Selects the rows that meet a condition, among the first `rows` rows. The caller fills in the
    /// inputs of the condition.
    pub(in super::super) fn rows_that(condition: u32, rows: usize) -> abi::DovetailSelect {
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

    /// Rows of one call.
    fn rows_at_once() -> usize {
        // Under sanitizers, tests reach this path with few rows.
        match cfg!(test) && std::env::var_os("DOVETAIL_TEST_ROWS_MAX").is_some() {
            true => 1000,
            false => abi::DOVETAIL_SELECT_ROWS_MAX,
        }
    }

    /// Runs a selection. `expected`: the number of rows to be selected, if known. Otherwise the
    /// number is read back, which waits.
    pub(in super::super) fn run(
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
    let mut args = select::rows_that(condition, rows);
    args.base = matches.rows.start as u32;
    args.first = pointer_of(&matches.first, rows);
    let (data, rows) = select::run(work, args, Some(expected))?;
    Ok(Positions::List { data: Arc::new(data), rows, nullable: false })
}

pub(super) fn select_flags(work: &Work<'_>, flags: &DeviceBuffer, rows: usize, which: Which) -> Result<Positions> {
    let condition = match which {
        Which::Matched => abi::DOVETAIL_FLAG_SET,
        Which::Unmatched => abi::DOVETAIL_FLAG_CLEAR,
    };
    let mut args = select::rows_that(condition, rows);
    args.flags = pointer_of(flags, rows);
    let (data, rows) = select::run(work, args, None)?;
    Ok(Positions::List { data: Arc::new(data), rows, nullable: false })
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

/// Pairs of some matches, or the starts of their pairs, kept because they are expanded in several
/// calls.
#[derive(Debug)]
pub(super) struct KnownPairs {
    /// The matches that they belong to.
    first: Weak<dyn DeviceMemory>,
    unmatched: Unmatched,
    pairs: PairList,
}

#[derive(Clone, Debug)]
enum PairList {
    /// Start of the pairs of each probe row.
    Starts(Arc<CudaBuffer>),
    /// All pairs: at most one for each probe row.
    Pairs(Pairs),
}

pub(super) fn expand(
    work: &Work<'_>,
    matches: &Matches,
    pairs: std::ops::Range<u64>,
    unmatched: Unmatched,
) -> Result<Pairs> {
    const PURPOSE: &str = "pairs of matched rows";
    let pair_count = matches.pair_count(unmatched);
    assert!(pairs.start <= pairs.end && pairs.end <= pair_count, "pairs {pairs:?} of {pair_count}");
    let rows = matches.rows.len();
    let missing = rows - matches.matched_rows;
    let nullable = unmatched == Unmatched::Emit && missing > 0;
    let len = (pairs.end - pairs.start) as usize;
    if matches.count.is_none() && (unmatched == Unmatched::Emit || missing == 0) {
        // Each row has one pair: the matches are the build positions.
        let range = pairs.start as usize..pairs.end as usize;
        let matched = Positions::List { data: matches.first.clone(), rows, nullable };
        let start = matches.rows.start;
        return Ok(Pairs {
            build: compose(work, &matched, &Positions::Range(range.clone()))?,
            probe: Positions::Range(start + range.start..start + range.end),
        });
    }
    let starts = match known_pairs(work, matches, unmatched)? {
        PairList::Starts(starts) => starts,
        PairList::Pairs(all) => {
            let range = Positions::Range(pairs.start as usize..pairs.end as usize);
            return Ok(Pairs { build: compose(work, &all.build, &range)?, probe: compose(work, &all.probe, &range)? });
        }
    };
    let build = work.values::<u32>(len, PURPOSE)?;
    let probe = work.values::<u32>(len, PURPOSE)?;
    let args = abi::DovetailExpand {
        first: pointer_of(&matches.first, rows),
        starts: starts.as_ptr(),
        rows: rows as u64,
        first_row: matches.rows.start as u32,
        first_pair: pairs.start,
        pairs: len as u64,
        build: build.as_mut_ptr(),
        probe: probe.as_mut_ptr(),
    };
    work.launch(PURPOSE, abi::dovetail_expand, &args)?;
    Ok(Pairs {
        build: Positions::List { data: Arc::new(build), rows: len, nullable },
        probe: Positions::List { data: Arc::new(probe), rows: len, nullable: false },
    })
}

pub(super) fn split_pairs(work: &Work<'_>, pairs: &Pairs, part_bits: u32, parts: usize) -> Result<(Pairs, Vec<usize>)> {
    const PURPOSE: &str = "dividing pairs by build rows";
    const COUNTS_BYTES: usize = PARTS_MAX * size_of::<u32>();
    const _: () = assert!(PARTS_MAX == abi::DOVETAIL_PARTS_MAX, "the kernels have room for PARTS_MAX parts");
    let rows = pairs.build.len();
    assert!(parts <= PARTS_MAX && pairs.probe.len() == rows, "{parts} parts, {rows} and {} rows", pairs.probe.len());
    let Positions::List { data: build, nullable: false, .. } = &pairs.build else {
        unreachable!("each pair has a build row, in the list that the match wrote")
    };
    let (probe, probe_start) = list(&pairs.probe);
    let [taken, counts] = [0; 2].map(|zero| work.filled(COUNTS_BYTES, zero, PURPOSE));
    let (taken, counts) = (taken?, counts?);
    let [build_split, probe_split] = [(); 2].map(|()| work.values::<u32>(rows, PURPOSE));
    let (build_split, probe_split) = (build_split?, probe_split?);
    let args = abi::DovetailSplit {
        build: pointer_of(build, rows),
        probe,
        probe_start,
        pairs: rows as u64,
        part_bits,
        taken: taken.as_mut_ptr(),
        counts: counts.as_mut_ptr(),
        build_split: build_split.as_mut_ptr(),
        probe_split: probe_split.as_mut_ptr(),
    };
    work.launch(PURPOSE, abi::dovetail_split, &args)?;
    let counts: [u32; PARTS_MAX] = work.read(&counts, PURPOSE)?;
    let ends = counts[..parts].iter().scan(0, |end, &count| {
        *end += count as usize;
        Some(*end)
    });
    let bounds: Vec<usize> = std::iter::once(0).chain(ends).collect();
    assert_eq!(bounds[parts], rows, "build rows are in {parts} parts of 2^{part_bits}");
    let listed = |data| Positions::List { data: Arc::new(data), rows, nullable: false };
    Ok((Pairs { build: listed(build_split), probe: listed(probe_split) }, bounds))
}

/// Returns the pairs or their starts, found once for all calls that expand the same matches.
fn known_pairs(work: &Work<'_>, matches: &Matches, unmatched: Unmatched) -> Result<PairList> {
    let mut remembered = work.stream.known_pairs.lock();
    let first = Arc::downgrade(&matches.first);
    if let Some(known) = &*remembered
        && Weak::ptr_eq(&known.first, &first)
        // First matches without their counts are stored in the same memory.
        && matches!(known.pairs, PairList::Starts(_)) == matches.count.is_some()
        && known.unmatched == unmatched
    {
        return Ok(known.pairs.clone());
    }
    *remembered = None;
    let pairs = match matches.count {
        // A row is in one pair or in none. The caller has handled the case of one pair for every
        // row.
        None => PairList::Pairs(matched_rows(work, matches)?),
        Some(_) => PairList::Starts(Arc::new(pair_starts(work, matches, unmatched)?)),
    };
    *remembered = Some(KnownPairs { first, unmatched, pairs: pairs.clone() });
    Ok(pairs)
}

/// Returns the rows that have a match, paired with it.
fn matched_rows(work: &Work<'_>, matches: &Matches) -> Result<Pairs> {
    let rows = matches.rows.len();
    let mut args = select::rows_that(abi::DOVETAIL_MATCHED, rows);
    args.first = pointer_of(&matches.first, rows);
    let (selected, len) = select::run(work, args, Some(matches.matched_rows))?;
    let selected = Positions::List { data: Arc::new(selected), rows: len, nullable: false };
    let first = Positions::List { data: matches.first.clone(), rows, nullable: false };
    Ok(Pairs {
        build: compose(work, &first, &selected)?,
        probe: compose(work, &Positions::Range(matches.rows.clone()), &selected)?,
    })
}

fn pair_starts(work: &Work<'_>, matches: &Matches, unmatched: Unmatched) -> Result<CudaBuffer> {
    const PURPOSE: &str = "counting pairs of matched rows";
    let rows = matches.rows.len();
    let starts = work.values::<u64>(rows, PURPOSE)?;
    // SAFETY: the call only computes a size from a number.
    let scratch_bytes = unsafe { abi::dovetail_pair_starts_scratch_bytes(rows as u64) };
    let scratch = work.scratch(scratch_bytes, PURPOSE)?;
    let args = abi::DovetailPairStarts {
        first: pointer_of(&matches.first, rows),
        count: matches.count.as_ref().map_or(null(), |count| pointer_of(count, rows)),
        rows: rows as u64,
        emit_unmatched: u32::from(unmatched == Unmatched::Emit),
        scratch: scratch.as_mut_ptr(),
        scratch_bytes,
        starts: starts.as_mut_ptr(),
    };
    work.launch(PURPOSE, abi::dovetail_pair_starts, &args)?;
    Ok(starts)
}
