//! Comparison of the real values behind equal hashes, for keys too wide to be packed.
//!
//! Two comparisons make every match exact, and neither looks at a pair twice:
//!
//! 1. The build side, once. Rows with equal hashes are adjacent, and all rows of a run must have
//!    equal values. If two differ (2^-128 for random values), the whole build side is hashed again
//!    with another seed, before anything is emitted.
//! 2. The probe side, batch by batch. A probe row is compared with the first row of the run it
//!    found. If the two differ, the probe row has no match, because no other run has its hash.

use arrow::buffer::{Buffer, ScalarBuffer};
use rayon::prelude::*;

use super::context::JoinContext;
use super::matching::BuildSide;
use super::transform::TransformedSide;
use crate::Result;
use crate::columns::KeyLayout;
use crate::device::{Matches, NO_ROW, Pairs, Positions, Unmatched, strings};

/// Rows that one task compares: a few tenths of a millisecond between two looks at the cancel flag.
const TASK_ROWS: usize = 1 << 13;

/// True if rows of the build side with equal hashes have equal values.
///
/// # Errors
/// Errors of the device.
pub(super) fn build_runs_are_exact(build: &BuildSide, layout: &KeyLayout, cx: &JoinContext<'_>) -> Result<bool> {
    if build.has_distinct_keys() {
        return Ok(true);
    }
    let transformed = &build.transformed;
    let rows = transformed.len();
    let all = Positions::Range(0..rows);
    if let Some(values) = transformed.keys.on_device() {
        let hashes = build.run_keys(cx)?;
        return strings(cx.device).are_runs_uniform(values, &device_rows(transformed, &all, cx)?, &hashes, cx.stream);
    }
    let numbers = row_numbers(transformed, &all, cx)?;
    let hashes = build.run_keys_on_host(cx)?;
    let hashes: &[u128] = bytemuck::cast_slice(&hashes[..16 * rows]);
    let cancel = cx.monitor.cancel();
    let exact = |start: usize| {
        cancel.check()?;
        let pairs: Vec<(u32, u32)> = (start..rows.min(start + TASK_ROWS))
            .filter(|&at| at > 0 && hashes[at - 1] == hashes[at])
            .map(|at| (numbers.at(at - 1), numbers.at(at)))
            .collect();
        let mut exact = true;
        layout.differing(&transformed.keys, &transformed.keys, &pairs, |_| exact = false);
        Ok(exact)
    };
    (0..rows).into_par_iter().step_by(TASK_ROWS).map(exact).try_reduce(|| true, |a, b| Ok(a && b))
}

/// Returns the matches of a probe batch without the matches whose values differ.
///
/// # Errors
/// Errors of the device.
pub(super) fn exact_matches(
    matches: Matches,
    build: &BuildSide,
    probe: &TransformedSide,
    layout: &KeyLayout,
    cx: &JoinContext<'_>,
) -> Result<Matches> {
    if matches.matched_rows == 0 {
        return Ok(matches);
    }
    let first = first_matches(&matches, cx)?;
    let false_matches = match (build.transformed.keys.on_device(), probe.keys.on_device()) {
        (Some(of_build), Some(of_probe)) => {
            let build_rows = device_rows(&build.transformed, &first.build, cx)?;
            let pairs = Pairs { build: build_rows, probe: device_rows(probe, &first.probe, cx)? };
            let differing = strings(cx.device).differing_pairs(of_build, of_probe, &pairs, cx.stream)?;
            let places = Numbers::of(&differing, cx)?;
            (0..differing.len()).map(|index| places.at(index) as usize).collect()
        }
        _ => differing_on_host(&first, build, probe, layout, cx)?,
    };
    if false_matches.is_empty() {
        return Ok(matches);
    }
    let positions = Numbers::of(&first.probe, cx)?;
    let start = matches.rows.start;
    let in_probe_batch: Vec<usize> = false_matches.into_iter().map(|at| positions.at(at) as usize - start).collect();
    without(matches, &in_probe_batch, cx)
}

/// Returns the indices of the pairs of rows whose values differ.
fn differing_on_host(
    first: &Pairs,
    build: &BuildSide,
    probe: &TransformedSide,
    layout: &KeyLayout,
    cx: &JoinContext<'_>,
) -> Result<Vec<usize>> {
    let build_rows = row_numbers(&build.transformed, &first.build, cx)?;
    let probe_rows = row_numbers(probe, &first.probe, cx)?;
    let rows = first.probe.len();
    let cancel = cx.monitor.cancel();
    let differing = |start: usize| {
        cancel.check()?;
        let range = start..rows.min(start + TASK_ROWS);
        let matched: Vec<usize> = range.filter(|&at| build_rows.at(at) != NO_ROW).collect();
        let pairs: Vec<(u32, u32)> = matched.iter().map(|&at| (build_rows.at(at), probe_rows.at(at))).collect();
        let mut differing = Vec::new();
        layout.differing(&build.transformed.keys, &probe.keys, &pairs, |at| differing.push(matched[at]));
        Ok(differing)
    };
    let false_matches: Vec<Vec<usize>> =
        (0..rows).into_par_iter().step_by(TASK_ROWS).map(differing).collect::<Result<_>>()?;
    Ok(false_matches.concat())
}

/// Pairs each matched probe row of the probe batch with the first row of the run it found. If most
/// rows have a match, the result also has the other probe rows, without a build row. That saves
/// selecting the matched rows. If few rows have a match, the others need not leave the device.
fn first_matches(matches: &Matches, cx: &JoinContext<'_>) -> Result<Pairs> {
    let rows = matches.rows.len();
    if matches.matched_rows > rows / 2 {
        let build = Positions::List { data: matches.first.clone(), rows, nullable: true };
        return Ok(Pairs { build, probe: Positions::Range(matches.rows.clone()) });
    }
    let once = Matches { count: None, total: matches.matched_rows as u64, ..matches.clone() };
    cx.device.expand(&once, 0..once.total, Unmatched::Skip, cx.stream)
}

/// Returns the matches without the matches of some probe rows, given by their index in the probe
/// batch.
fn without(matches: Matches, unmatched: &[usize], cx: &JoinContext<'_>) -> Result<Matches> {
    let rows = matches.rows.len();
    let to_host = |buffer| -> Result<Vec<u32>> {
        let copied = cx.device.copy_out(buffer, 4 * rows, cx.arena, cx.stream)?;
        Ok(bytemuck::cast_slice(&copied[..4 * rows]).to_vec())
    };
    let mut first = to_host(&matches.first)?;
    let mut count = matches.count.as_ref().map(to_host).transpose()?;
    let mut total = matches.total;
    for &at in unmatched {
        first[at] = NO_ROW;
        total -= count.as_mut().map_or(1, |count| u64::from(std::mem::take(&mut count[at])));
    }
    let to_device = |numbers: Vec<u32>| cx.device.copy_in(&[Buffer::from_vec(numbers)], cx.stream);
    Ok(Matches {
        first: to_device(first)?,
        count: count.map(to_device).transpose()?,
        matched_rows: matches.matched_rows - unmatched.len(),
        total,
        rows: matches.rows,
    })
}

/// Positions or row numbers that the CPU reads.
enum Numbers {
    /// First of consecutive numbers.
    From(u32),
    List(ScalarBuffer<u32>),
}

impl Numbers {
    fn of(positions: &Positions, cx: &JoinContext<'_>) -> Result<Self> {
        Ok(match positions {
            Positions::Range(range) => Self::From(range.start as u32),
            Positions::List { .. } => Self::List(cx.device.positions_to_host(positions, cx.arena, cx.stream)?.into()),
        })
    }

    fn at(&self, index: usize) -> u32 {
        match self {
            Self::From(first) => first + index as u32,
            Self::List(numbers) => numbers[index],
        }
    }
}

/// Returns the row numbers at transformed positions, for the CPU.
fn row_numbers(transformed: &TransformedSide, positions: &Positions, cx: &JoinContext<'_>) -> Result<Numbers> {
    Numbers::of(&device_rows(transformed, positions, cx)?, cx)
}

/// Returns the row numbers at transformed positions.
fn device_rows(transformed: &TransformedSide, positions: &Positions, cx: &JoinContext<'_>) -> Result<Positions> {
    match &transformed.to_rows {
        Some(map) => cx.device.compose(map, positions, cx.stream),
        None => Ok(positions.clone()),
    }
}
