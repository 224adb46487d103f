//! Splits pairs by the part of the build side that they refer to. Each morsel counts its own pairs,
//! and has its own place in every part.

use std::ops::Range;

use rayon::prelude::*;

use super::buffer::{split_at_bounds, values_of};
use super::{MORSEL_ROWS, Run};
use crate::Result;
use crate::device::{PARTS_MAX, Pairs, Positions};

pub(super) fn split_pairs(run: &Run<'_>, pairs: &Pairs, part_bits: u32, parts: usize) -> Result<(Pairs, Vec<usize>)> {
    const PURPOSE: &str = "pairs by build rows";
    let rows = pairs.build.len();
    assert!(parts <= PARTS_MAX && pairs.probe.len() == rows, "{parts} parts, {rows} and {} rows", pairs.probe.len());
    let build = |row| at(&pairs.build, row);
    let part_of = |row| (build(row) >> part_bits) as usize;
    let counts = run.map(0..rows, |morsel| {
        let mut counts = vec![0; parts];
        morsel.for_each(|row| counts[part_of(row)] += 1);
        counts
    })?;
    // Start of each morsel in each part, part after part, and the end of the last.
    let mut starts = vec![0];
    let mut bounds = vec![0];
    for part in 0..parts {
        for counts in &counts {
            starts.push(starts[starts.len() - 1] + counts[part]);
        }
        bounds.push(starts[starts.len() - 1]);
    }
    let [build_split, probe_split] = [(); 2].map(|()| run.values::<u32>(rows, PURPOSE));
    let (mut build_split, mut probe_split) = (build_split?, probe_split?);
    let morsels = counts.len();
    let places = of_morsels(split_at_bounds(&mut build_split, &starts, 1), morsels)
        .into_iter()
        .zip(of_morsels(split_at_bounds(&mut probe_split, &starts, 1), morsels))
        .collect::<Vec<_>>();
    places.into_par_iter().enumerate().try_for_each(|(morsel, (mut build_places, mut probe_places))| {
        run.cancel.check()?;
        let mut filled = vec![0; parts];
        let range: Range<usize> = morsel * MORSEL_ROWS..rows.min((morsel + 1) * MORSEL_ROWS);
        for row in range {
            let part = part_of(row);
            build_places[part][filled[part]] = build(row) - ((part as u32) << part_bits);
            probe_places[part][filled[part]] = at(&pairs.probe, row);
            filled[part] += 1;
        }
        Ok::<_, crate::Error>(())
    })?;
    let listed = |data| Positions::List { data, rows, nullable: false };
    Ok((Pairs { build: listed(build_split.freeze()), probe: listed(probe_split.freeze()) }, bounds))
}

fn at(positions: &Positions, row: usize) -> u32 {
    match positions {
        Positions::Range(range) => (range.start + row) as u32,
        Positions::List { data, rows, .. } => values_of::<u32>(data, *rows)[row],
    }
}

/// Regroups places, ordered by part and by morsel within a part, as the places of each morsel.
fn of_morsels(places: Vec<&mut [u32]>, morsels: usize) -> Vec<Vec<&mut [u32]>> {
    let mut of_morsels: Vec<Vec<&mut [u32]>> = (0..morsels).map(|_| Vec::new()).collect();
    for (number, place) in places.into_iter().enumerate() {
        of_morsels[number % morsels].push(place);
    }
    of_morsels
}

#[cfg(test)]
mod tests {
    use rand::Rng;

    use super::*;
    use crate::device::Device;
    use crate::device::host::testing::{Bench, SIZES, THREADS, numbers, random};

    #[test]
    fn pairs_are_partitioned_by_their_build_rows() {
        let mut random = random(83);
        for threads in THREADS {
            let bench = Bench::new(threads);
            for rows in SIZES {
                for (part_bits, build_rows) in [(3, 1), (3, 8), (3, 9), (3, 8 * 32), (10, 20_000), (31, 1 << 31)] {
                    let parts = ((build_rows - 1) as usize >> part_bits) + 1;
                    let build: Vec<u32> = (0..rows).map(|_| random.random_range(0..build_rows)).collect();
                    let list = Positions::List { data: bench.buffer(&build), rows, nullable: false };
                    let pairs = Pairs { build: list, probe: Positions::Range(7..7 + rows) };
                    let (split, bounds) = bench.device.split_pairs(&pairs, part_bits, parts, &bench.stream).unwrap();
                    let (found_build, found_probe) = (numbers(&split.build), numbers(&split.probe));
                    assert_eq!((bounds.len(), bounds[0], bounds[parts]), (parts + 1, 0, rows));
                    let mut found: Vec<(u32, u32)> = Vec::new();
                    for (part, bounds) in bounds.windows(2).enumerate() {
                        let range = bounds[0]..bounds[1];
                        let of_part = found_build[range.clone()].iter().zip(&found_probe[range]);
                        found.extend(of_part.map(|(&build, &probe)| {
                            assert!(build < 1 << part_bits, "row {build} of a part of 2^{part_bits}");
                            (probe, build + ((part as u32) << part_bits))
                        }));
                    }
                    found.sort_unstable();
                    let expected: Vec<(u32, u32)> = (7..).zip(build).collect();
                    assert_eq!(found, expected, "{rows} pairs in {parts} parts of 2^{part_bits}");
                }
            }
        }
    }
}
