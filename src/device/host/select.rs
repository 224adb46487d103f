//! Lists of rows that satisfy a condition, and the flags that remember matched build rows.

use std::ops::Range;
use std::sync::atomic::{AtomicU8, Ordering};

use rayon::prelude::*;

use super::buffer::{flags_of, split_at_bounds, values_of};
use super::{MORSEL_ROWS, Run};
use crate::Result;
use crate::device::{DeviceBuffer, Matches, NO_ROW, Positions, Which};

/// The row is matched.
const MATCHED: u8 = 1;

/// The row is matched, and so is the whole run that starts with it. Another probe row of the same
/// key need not mark it.
const RUN_MATCHED: u8 = 2;

pub(super) fn matches(run: &Run<'_>, matches: &Matches, which: Which) -> Result<Positions> {
    let first = values_of::<u32>(&matches.first, matches.rows.len());
    let matched = which == Which::Matched;
    select(run, matches.rows.clone(), |row| (first[row - matches.rows.start] != NO_ROW) == matched)
}

pub(super) fn flags(run: &Run<'_>, flags: &DeviceBuffer, rows: usize, which: Which) -> Result<Positions> {
    let flags = flags_of(flags, rows);
    let matched = which == Which::Matched;
    select(run, 0..rows, |row| (flags[row].load(Ordering::Relaxed) != 0) == matched)
}

/// Returns the rows of a range that satisfy a condition, in ascending order.
fn select(run: &Run<'_>, rows: Range<usize>, condition: impl Fn(usize) -> bool + Sync) -> Result<Positions> {
    let counts = run.map(rows.clone(), |range| range.filter(|&row| condition(row)).count())?;
    let mut bounds = vec![0];
    bounds.extend(counts.iter().scan(0, |end, count| {
        *end += count;
        Some(*end)
    }));
    let selected = bounds[counts.len()];
    if selected == rows.len() {
        return Ok(Positions::Range(rows));
    }
    let mut positions = run.values::<u32>(selected, "positions of selected rows")?;
    let pieces = split_at_bounds(&mut positions, &bounds, 1);
    pieces.into_par_iter().enumerate().try_for_each(|(morsel, piece)| {
        run.cancel.check()?;
        let start = rows.start + morsel * MORSEL_ROWS;
        let mut filled = 0;
        for row in start..rows.end.min(start + MORSEL_ROWS) {
            // Every row is written to the next selected row's place, so that no branch has to be
            // predicted.
            if let Some(out) = piece.get_mut(filled) {
                *out = row as u32;
            }
            filled += usize::from(condition(row));
        }
        Ok::<_, crate::Error>(())
    })?;
    Ok(Positions::List { data: positions.freeze(), rows: selected, nullable: false })
}

pub(super) fn mark_build(run: &Run<'_>, matches: &Matches, flags: &DeviceBuffer) -> Result<()> {
    let rows = matches.rows.len();
    let flags = flags_of(flags, flags.size_bytes());
    let first = values_of::<u32>(&matches.first, rows);
    let count = matches.count.as_ref().map(|count| values_of::<u32>(count, rows));
    (0..rows.div_ceil(MORSEL_ROWS)).into_par_iter().try_for_each(|morsel| {
        run.cancel.check()?;
        let range = morsel * MORSEL_ROWS..rows.min((morsel + 1) * MORSEL_ROWS);
        for row in range.filter(|&row| first[row] != NO_ROW) {
            let first = first[row] as usize;
            match count {
                None => flags[first].store(MATCHED, Ordering::Relaxed),
                Some(count) => mark_run(run, &flags[first..first + count[row] as usize])?,
            }
        }
        Ok(())
    })
}

/// Marks a run, its first row last. A thread that sees that mark sees all marks.
fn mark_run(run: &Run<'_>, flags: &[AtomicU8]) -> Result<()> {
    let [first, rest @ ..] = flags else { return Ok(()) };
    if first.load(Ordering::Acquire) == RUN_MATCHED {
        return Ok(());
    }
    for rest in rest.chunks(MORSEL_ROWS) {
        run.cancel.check()?;
        rest.iter().for_each(|flag| flag.store(MATCHED, Ordering::Relaxed));
    }
    first.store(RUN_MATCHED, Ordering::Release);
    Ok(())
}

pub(super) fn mark(run: &Run<'_>, positions: &Positions, flags: &DeviceBuffer) -> Result<()> {
    let flags = flags_of(flags, flags.size_bytes());
    let set = |position: usize| flags[position].store(MATCHED, Ordering::Relaxed);
    match positions {
        Positions::Range(range) => run.map(range.clone(), |range| range.for_each(set)).map(|_| ()),
        Positions::List { data, rows, .. } => {
            let positions = values_of::<u32>(data, *rows);
            run.map(0..*rows, |range| {
                positions[range].iter().filter(|&&at| at != NO_ROW).for_each(|&at| set(at as usize));
            })
            .map(|_| ())
        }
    }
}

#[cfg(test)]
mod tests {
    use rand::Rng;

    use super::*;
    use crate::device::Device;
    use crate::device::host::testing::{Bench, SIZES, THREADS, numbers, random};

    #[test]
    fn rows_with_a_match_or_rows_without_a_match_are_selected() {
        let mut random = random(81);
        for threads in THREADS {
            let bench = Bench::new(threads);
            for rows in SIZES {
                for share in [0.0, 0.01, 0.5, 1.0] {
                    let first: Vec<u32> =
                        (0..rows).map(|_| if random.random_bool(share) { 7 } else { NO_ROW }).collect();
                    let matched_rows = first.iter().filter(|&&at| at != NO_ROW).count();
                    let rows = 50..50 + rows;
                    let total = matched_rows as u64;
                    let matches =
                        Matches { first: bench.buffer(&first), count: None, rows: rows.clone(), matched_rows, total };
                    for (which, wanted) in [(Which::Matched, true), (Which::Unmatched, false)] {
                        let found = bench.device.select_matches(&matches, which, &bench.stream).unwrap();
                        let expected: Vec<u32> = (50..)
                            .zip(&first)
                            .filter(|&(_, &at)| (at != NO_ROW) == wanted)
                            .map(|(row, _)| row)
                            .collect();
                        assert_eq!(numbers(&found), expected, "{rows:?} with {share} matched, {which:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn flags_are_set_for_every_marked_row() {
        let mut random = random(82);
        for threads in THREADS {
            let bench = Bench::new(threads);
            for rows in SIZES.into_iter().filter(|&rows| rows > 0) {
                let flags = bench.device.new_flags(rows, &bench.stream).unwrap();
                let mut expected = vec![false; rows];
                // Runs of equal keys. They do not overlap, and several probe rows may have the same
                // run.
                let mut heads = vec![0];
                while *heads.last().unwrap() < rows {
                    heads.push(rows.min(heads.last().unwrap() + random.random_range(1..40)));
                }
                for _ in 0..3 {
                    let runs: Vec<(u32, u32)> = (0..100)
                        .map(|_| match random.random_range(0..heads.len()) {
                            0 => (NO_ROW, 0),
                            run => (heads[run - 1] as u32, (heads[run] - heads[run - 1]) as u32),
                        })
                        .collect();
                    for &(first, count) in runs.iter().filter(|run| run.0 != NO_ROW) {
                        expected[first as usize..][..count as usize].fill(true);
                    }
                    let (first, count): (Vec<u32>, Vec<u32>) = runs.into_iter().unzip();
                    // The counts of the matches do not matter here.
                    let matches = Matches {
                        first: bench.buffer(&first),
                        count: Some(bench.buffer(&count)),
                        rows: 0..first.len(),
                        matched_rows: 0,
                        total: 0,
                    };
                    bench.device.mark_build(&matches, &flags, &bench.stream).unwrap();
                    let listed: Vec<u32> =
                        (0..5).map(|_| random.random_range(0..rows as u32)).chain([NO_ROW]).collect();
                    listed.iter().filter(|&&at| at != NO_ROW).for_each(|&at| expected[at as usize] = true);
                    bench.device.mark(&bench.list(&listed, true), &flags, &bench.stream).unwrap();
                    let range = rows / 2..rows.min(rows / 2 + 3);
                    expected[range.clone()].fill(true);
                    bench.device.mark(&Positions::Range(range), &flags, &bench.stream).unwrap();
                }
                let selected = |which| numbers(&bench.device.select_flags(&flags, rows, which, &bench.stream).unwrap());
                let marked: Vec<u32> = (0..rows as u32).filter(|&row| expected[row as usize]).collect();
                assert_eq!(selected(Which::Matched), marked, "{rows} rows");
                assert_eq!(marked.len() + selected(Which::Unmatched).len(), rows);
            }
        }
    }
}
