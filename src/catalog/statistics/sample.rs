//! A bounded sample of a column's rows, for statistics too slow to count exactly during an upload.
//!
//! Each row is taken with the same probability, independently of all others (a Bernoulli sample).
//! When the sample is full, each of its rows stays with probability one half. The probability for
//! later rows is halved too. The cost is a few thousand rows times the logarithm of the column's
//! length.
//!
//! The estimators below assume independent rows. They infer how often values repeat from values
//! that occur on several rows of the sample. One row out of each stretch of equal length would be a
//! steadier sample. But it never has two neighbours. The items of an order are stored next to each
//! other, so sampled items would all seem to belong to different orders.
//!
//! Two samples with the same probability merge into a sample of the rows of both. So the number and
//! order of the parts in which rows come do not matter.

use std::cmp::Reverse;
use std::collections::HashMap;

use arrow::array::{Array, ArrayRef};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

use super::HeavyValue;
use super::hash::{NULL, hashes_of};

/// Maximum number of rows in the sample. The estimate of a share p is off by about sqrt(p / 8192):
/// a tenth of a percent for a share of 1 %.
const ROWS_MAX: usize = 8192;

/// Maximum sampled rows of a rare value.
const OFTEN: u64 = 50;

/// Maximum number of heavy values. In a Zipf distribution with exponent 1 over ten thousand values,
/// the first sixteen make up 96 % of the sum of squares. The size of a join of two such columns is
/// proportional to that sum.
const HEAVY_MAX: usize = 16;

/// Minimum sampled rows of a heavy value; fewer may be chance. The first number is for samples that
/// leave rows out, and the second for samples that hold all rows.
const HEAVY_ROWS_MIN: (u64, u64) = (4, 2);

#[derive(Clone, Copy, Debug)]
struct Picked {
    /// Hash of the row's value, or [`NULL`].
    hash: u64,
    /// Row number, counted from the first row ever seen.
    row: u64,
}

/// A sample of a column's rows.
#[derive(Clone, Debug)]
pub(super) struct Sample {
    /// In the order of the rows.
    picked: Vec<Picked>,
    /// Inverse of the sampling probability, a power of two: one row in `one_in` is taken.
    one_in: u64,
    /// Number of rows seen.
    rows: u64,
    /// The next row to take, counted from the first row ever seen.
    next: u64,
    random: SmallRng,
}

impl Sample {
    /// Makes an empty sample. Samples that will be merged need different seeds. With the same seed
    /// they take rows at the same places. Values that repeat from part to part then make all other
    /// values look repeated, too.
    pub(super) fn new(seed: u64) -> Self {
        Self { picked: Vec::new(), one_in: 1, rows: 0, next: 0, random: SmallRng::seed_from_u64(seed) }
    }

    /// Makes an empty sample that will be merged into a sample of at least `rows_before` rows.
    /// That sample takes one row in `rows_before / ROWS_MAX` at most, and merging would drop rows
    /// that were taken more often.
    pub(super) fn following(seed: u64, rows_before: u64) -> Self {
        let mut sample = Self::new(seed);
        sample.one_in = 1 << (rows_before / ROWS_MAX as u64).max(1).ilog2();
        sample.next = sample.first_from(0);
        sample
    }

    /// Returns about the heap memory of a sample of `rows` rows, in bytes.
    pub(super) fn bytes(rows: u64) -> u64 {
        rows.next_power_of_two().min(ROWS_MAX as u64) * size_of::<Picked>() as u64
    }

    /// Samples the next rows.
    pub(super) fn update(&mut self, array: &ArrayRef) {
        let end = self.rows + array.len() as u64;
        while self.next < end {
            let mut picks = Vec::new();
            let mut seen = self.next;
            while self.next < end && self.picked.len() + picks.len() < ROWS_MAX {
                picks.push((self.next - self.rows) as usize);
                seen = self.next + 1;
                self.next = self.first_from(seen);
            }
            let rows = picks.iter().map(|&pick| self.rows + pick as u64);
            self.picked.extend(hashes_of(array, &picks).into_iter().zip(rows).map(|(hash, row)| Picked { hash, row }));
            if self.picked.len() >= ROWS_MAX {
                self.halve();
                // Drawn again, because later rows are now taken with a lower probability.
                self.next = self.first_from(seen);
            }
        }
        self.rows = end;
    }

    /// Appends the sample of later rows.
    pub(super) fn merge(&mut self, later: &Self) {
        let mut later = later.clone();
        while self.one_in < later.one_in {
            self.halve();
        }
        while later.one_in < self.one_in {
            later.halve();
        }
        self.picked.extend(later.picked.iter().map(|&Picked { hash, row }| Picked { hash, row: self.rows + row }));
        self.rows += later.rows;
        while self.picked.len() >= ROWS_MAX {
            self.halve();
        }
        // Each row is taken independently of the rows before it, so a new draw is right.
        self.next = self.first_from(self.rows);
    }

    /// Estimates the number of different values among `values` rows that are not null.
    ///
    /// Haas and Stokes, "Estimating the number of classes in a finite population" (JASA 1998),
    /// estimator Duj1: `n d / (n - f1 + f1 n / N)`. The sample has `n` of `N` rows, and `d` values,
    /// and `f1` of these occur once in it. Values that occur often are counted separately, as in
    /// the estimator Duj2a of that paper. Otherwise a few values with many rows would hide how rare
    /// all other values are.
    pub(super) fn distinct(&self, values: u64) -> f64 {
        let counts = self.counts();
        let all = counts.values().sum::<u64>() as f64;
        if all == 0.0 {
            return (values as f64).min(1.0);
        }
        let rare = || counts.values().filter(|&&count| count <= OFTEN);
        let (sampled, distinct) = (rare().sum::<u64>() as f64, rare().count() as f64);
        let often = counts.len() as f64 - distinct;
        if sampled == 0.0 {
            return often;
        }
        let once = rare().filter(|&&count| count == 1).count() as f64;
        let share = (all / values as f64).min(1.0);
        let estimate = often + sampled * distinct / (sampled - once + once * share);
        estimate.clamp(often + distinct, (values as f64).max(often + distinct))
    }

    /// Returns the share of all sampled rows that have the most frequent value.
    pub(super) fn heaviest_share(&self) -> f64 {
        let heaviest = self.counts().into_values().max().unwrap_or(0);
        heaviest as f64 / self.picked.len().max(1) as f64
    }

    /// Returns the most frequent values of the sample, the most frequent first. A sample that holds
    /// all rows and has few values returns all of them. Otherwise values that may be frequent only
    /// by chance are left out.
    pub(super) fn heavy_values(&self) -> Vec<HeavyValue> {
        let mut counts: Vec<(u64, u64)> = self.counts().into_iter().collect();
        let holds_all = self.picked.len() as u64 == self.rows;
        if !(holds_all && counts.len() <= HEAVY_MAX) {
            let rows_min = if holds_all { HEAVY_ROWS_MIN.1 } else { HEAVY_ROWS_MIN.0 };
            counts.retain(|&(_, count)| count >= rows_min);
        }
        // Hashes break ties, so that equal samples name the same values.
        counts.sort_unstable_by_key(|&(hash, count)| (Reverse(count), hash));
        counts.truncate(HEAVY_MAX);
        let heavy = |(hash, count): (u64, u64)| {
            let picked = self.picked.iter().find(|picked| picked.hash == hash);
            let share = count as f64 / self.picked.len() as f64;
            HeavyValue { hash, share, row: picked.expect("it was counted in the sample").row }
        };
        counts.into_iter().map(heavy).collect()
    }

    /// Counts the sampled rows of each value.
    fn counts(&self) -> HashMap<u64, u64> {
        let mut counts = HashMap::with_capacity(self.picked.len());
        for picked in self.picked.iter().filter(|picked| picked.hash != NULL) {
            *counts.entry(picked.hash).or_default() += 1;
        }
        counts
    }

    /// Halves the sample and the probability for later rows.
    fn halve(&mut self) {
        self.picked.retain(|_| self.random.random());
        self.one_in *= 2;
    }

    /// Draws the first row, from `row` on, that is taken.
    fn first_from(&mut self, row: u64) -> u64 {
        if self.one_in == 1 {
            return row;
        }
        // The number of rows left out is distributed geometrically.
        let left_out = (1.0 - self.random.random::<f64>()).ln() / (-1.0 / self.one_in as f64).ln_1p();
        row.saturating_add(left_out as u64)
    }
}
