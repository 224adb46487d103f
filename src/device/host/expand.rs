//! From matches to pairs of positions.
//!
//! ```text
//!   first   count          pairs (build, probe)
//!   7       2              (7, 0) (8, 0)
//!   NO_ROW  0              with Emit: (NO_ROW, 1)
//!   3       1              (3, 2)
//! ```
//!
//! First, the pairs before each block of rows are counted. Then the output is cut into chunks of
//! pairs, and each chunk finds its first row from the counts. One row with a billion pairs is as
//! well divided as a billion rows with one pair.

use std::ops::Range;

use rayon::prelude::*;

use super::buffer::values_of;
use super::{MORSEL_ROWS, Run};
use crate::Result;
use crate::device::{Matches, NO_ROW, Pairs, Positions, Unmatched};

pub(super) fn expand(run: &Run<'_>, matches: &Matches, pairs: Range<u64>, unmatched: Unmatched) -> Result<Pairs> {
    let pair_count = matches.pair_count(unmatched);
    assert!(pairs.start <= pairs.end && pairs.end <= pair_count, "pairs {pairs:?} of {pair_count}");
    let rows = matches.rows.len();
    let first = values_of::<u32>(&matches.first, rows);
    let count = matches.count.as_ref().map(|count| values_of::<u32>(count, rows));
    let missing = rows - matches.matched_rows;
    let nullable = unmatched == Unmatched::Emit && missing > 0;
    let len = (pairs.end - pairs.start) as usize;

    if count.is_none() && (unmatched == Unmatched::Emit || missing == 0) {
        // One pair per row: the matches are the build positions.
        let range = pairs.start as usize..pairs.end as usize;
        let data = if len == rows {
            matches.first.clone()
        } else {
            let mut build = run.values::<u32>(len, "pairs of matched rows")?;
            run.copy(&first[range.clone()], &mut build)?;
            build.freeze()
        };
        let start = matches.rows.start;
        return Ok(Pairs {
            build: Positions::List { data, rows: len, nullable },
            probe: Positions::Range(start + range.start..start + range.end),
        });
    }

    let source = Source { first, count, emit: unmatched == Unmatched::Emit, row_start: matches.rows.start as u32 };
    // Pairs before each block of rows.
    let mut before: Vec<u64> = run
        .map(0..rows, |range| range.step_by(BLOCK_ROWS).map(|row| source.pairs_of_block(row)).collect::<Vec<u64>>())?
        .concat();
    let mut sum = 0;
    for block in &mut before {
        sum += std::mem::replace(block, sum);
    }
    assert_eq!(sum, pair_count, "matches have the lengths of their pairs");

    let mut build = run.values::<u32>(len, "pairs of matched rows")?;
    let mut probe = run.values::<u32>(len, "pairs of matched rows")?;
    build.par_chunks_mut(MORSEL_ROWS).zip(probe.par_chunks_mut(MORSEL_ROWS)).enumerate().try_for_each(
        |(chunk, (build, probe))| {
            run.cancel.check()?;
            let pair = pairs.start + (chunk * MORSEL_ROWS) as u64;
            let block = before.partition_point(|&start| start <= pair) - 1;
            let (row, skip) = (block * BLOCK_ROWS, pair - before[block]);
            match source.count {
                // Without runs, rows without a match are left out here. The early return above
                // handles the other cases.
                None => source.write_matched(row, skip, build, probe),
                Some(_) => source.write(row, skip, build, probe),
            }
            Ok::<_, crate::Error>(())
        },
    )?;
    Ok(Pairs {
        build: Positions::List { data: build.freeze(), rows: len, nullable },
        probe: Positions::List { data: probe.freeze(), rows: len, nullable: false },
    })
}

/// Rows whose pairs are counted together. A chunk searches at most this many rows for its first
/// row.
const BLOCK_ROWS: usize = 1 << 10;

const _: () = assert!(MORSEL_ROWS.is_multiple_of(BLOCK_ROWS));

/// Input of the pairs.
struct Source<'a> {
    first: &'a [u32],
    count: Option<&'a [u32]>,
    emit: bool,
    row_start: u32,
}

impl Source<'_> {
    #[inline(always)]
    fn pairs_of(&self, row: usize) -> u64 {
        let run = match self.count {
            Some(count) => count[row],
            None => u32::from(self.first[row] != NO_ROW),
        };
        u64::from(if self.emit { run.max(1) } else { run })
    }

    fn pairs_of_block(&self, start: usize) -> u64 {
        (start..self.first.len().min(start + BLOCK_ROWS)).map(|row| self.pairs_of(row)).sum()
    }

    /// Does [`Source::write`] for rows with at most one pair. The presence of a pair is
    /// unpredictable, so the loop does not branch on it. Each row is written, and the next row
    /// overwrites it if it has no match.
    fn write_matched(&self, mut row: usize, skip: u64, build: &mut [u32], probe: &mut [u32]) {
        let mut skipped = 0;
        while skipped < skip {
            skipped += self.pairs_of(row);
            row += 1;
        }
        let mut written = 0;
        while written < build.len() {
            let first = self.first[row];
            build[written] = first;
            probe[written] = self.row_start + row as u32;
            written += usize::from(first != NO_ROW);
            row += 1;
        }
    }

    /// Writes the pairs from row `row` on, after skipping the first `skip` pairs.
    fn write(&self, mut row: usize, mut skip: u64, build: &mut [u32], probe: &mut [u32]) {
        let mut written = 0;
        while written < build.len() {
            let pairs = self.pairs_of(row);
            if skip >= pairs {
                skip -= pairs;
                row += 1;
                continue;
            }
            let len = (pairs - skip).min((build.len() - written) as u64) as usize;
            let (build, probe) = (&mut build[written..written + len], &mut probe[written..written + len]);
            probe.fill(self.row_start + row as u32);
            match self.first[row] {
                NO_ROW => build.fill(NO_ROW),
                first => build.iter_mut().zip(first + skip as u32..).for_each(|(out, position)| *out = position),
            }
            written += len;
            skip = 0;
            row += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use rand::Rng;

    use super::*;
    use crate::device::Device;
    use crate::device::host::testing::{Bench, SIZES, THREADS, numbers, random};

    /// Returns matches with the given run lengths, and all pairs that they give.
    fn matches_of(bench: &Bench, counts: &[u32], unmatched: Unmatched) -> (Matches, Vec<(u32, u32)>) {
        let row_start = 100;
        let first: Vec<u32> = (0..).zip(counts).map(|(row, &n)| if n == 0 { NO_ROW } else { row * 3 }).collect();
        let matches = Matches {
            first: bench.buffer(&first),
            count: counts.iter().any(|&n| n > 1).then(|| bench.buffer(counts)),
            rows: row_start..row_start + counts.len(),
            matched_rows: counts.iter().filter(|&&n| n > 0).count(),
            total: counts.iter().map(|&n| u64::from(n)).sum(),
        };
        let mut pairs = Vec::new();
        for ((&first, &count), row) in first.iter().zip(counts).zip(row_start as u32..) {
            pairs.extend((0..count).map(|offset| (first + offset, row)));
            if count == 0 && unmatched == Unmatched::Emit {
                pairs.push((NO_ROW, row));
            }
        }
        (matches, pairs)
    }

    #[test]
    fn any_range_of_pairs_equals_that_range_of_all_pairs() {
        let mut random = random(71);
        for threads in THREADS {
            let bench = Bench::new(threads);
            for rows in SIZES {
                let runs: [Vec<u32>; 5] = [
                    vec![1; rows],
                    vec![0; rows],
                    (0..rows).map(|_| random.random_range(0..2)).collect(),
                    (0..rows).map(|_| random.random_range(0..5)).collect(),
                    (0..rows).map(|row| if row % 777 == 3 { 5000 } else { 0 }).collect(),
                ];
                for counts in runs {
                    for unmatched in [Unmatched::Skip, Unmatched::Emit] {
                        let (matches, all) = matches_of(&bench, &counts, unmatched);
                        assert_eq!(matches.pair_count(unmatched), all.len() as u64);
                        let len = all.len();
                        for range in [0..len, len / 3..len - len / 4, len / 2..len / 2, 1.min(len)..2.min(len)] {
                            let pairs = range.start as u64..range.end as u64;
                            let found = bench.device.expand(&matches, pairs, unmatched, &bench.stream).unwrap();
                            let found_pairs: Vec<(u32, u32)> =
                                numbers(&found.build).into_iter().zip(numbers(&found.probe)).collect();
                            assert!(found_pairs == all[range.clone()], "{rows} rows, pairs {range:?} {unmatched:?}");
                            let misses = matches!(found.build, Positions::List { nullable: true, .. });
                            assert!(misses || found_pairs.iter().all(|pair| pair.0 != NO_ROW));
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn one_match_per_row_gives_a_range_of_probe_rows_and_the_unchanged_build_list() {
        let bench = Bench::new(2);
        let (matches, _) = matches_of(&bench, &[1; 1000], Unmatched::Skip);
        let found = bench.device.expand(&matches, 0..1000, Unmatched::Skip, &bench.stream).unwrap();
        assert!(matches!(found.probe, Positions::Range(Range { start: 100, end: 1100 })));
        let Positions::List { data, .. } = found.build else { panic!("build rows are a list") };
        assert!(std::sync::Arc::ptr_eq(&data, &matches.first));
    }

    #[test]
    fn pairs_at_positions_beyond_32_bits_are_expanded() {
        let bench = Bench::new(2);
        // Every row has the same run of 2^31 rows.
        let (rows, run) = (10usize, 1u64 << 31);
        let matches = Matches {
            first: bench.buffer(&vec![5u32; rows]),
            count: Some(bench.buffer(&vec![run as u32; rows])),
            rows: 0..rows,
            matched_rows: rows,
            total: rows as u64 * run,
        };
        let start = 7 * run - 2;
        let found = bench.device.expand(&matches, start..start + 4, Unmatched::Skip, &bench.stream).unwrap();
        assert_eq!(numbers(&found.probe), [6, 6, 7, 7]);
        assert_eq!(numbers(&found.build), [5 + run as u32 - 2, 5 + run as u32 - 1, 5, 6]);
    }
}
