//! From matches to pairs of positions.

use std::ptr::null;
use std::sync::{Arc, Weak};

use super::abi;
use super::buffer::{CudaBuffer, pointer_of};
use super::gather::compose;
use super::select;
use super::work::Work;
use crate::Result;
use crate::device::{DeviceMemory, Matches, Pairs, Positions, Unmatched};

/// Pairs of some matches, or the starts of their pairs, cached because several calls expand the
/// same matches.
#[derive(Debug)]
pub(super) struct KnownPairs {
    /// Memory of the matches that the pairs belong to.
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

/// Returns the pairs or their starts, found once for all calls that expand the same matches.
fn known_pairs(work: &Work<'_>, matches: &Matches, unmatched: Unmatched) -> Result<PairList> {
    let mut remembered = work.stream.known_pairs.lock();
    let first = Arc::downgrade(&matches.first);
    if let Some(known) = &*remembered
        && Weak::ptr_eq(&known.first, &first)
        // The same matches without counts are in the same memory, but have other pairs.
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
