//! A bounded sample of a column's rows, for what cannot be counted exactly at the speed of an upload.
//!
//! Each row is taken with the same probability, independently of all others (a Bernoulli sample). When the sample is full, each
//! of its rows stays with probability one half, and so does the chance of those that follow. The cost is thus a few
//! thousand rows, and a logarithm of the column's length times that, whatever the length.
//!
//! The estimators below take rows for independent, and tell how often values repeat from rows that were taken together. One
//! row out of each stretch of equal length would be a steadier sample, but it never takes two neighbours: the items of an order,
//! which lie side by side, would all look as if they belonged to different orders. Two samples with one probability make
//! one of the rows of both, so that it does not matter in how many parts rows come, nor in which order.

use std::cmp::Reverse;
use std::collections::HashMap;

use arrow::array::{Array, ArrayRef};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

use super::HeavyValue;
use super::hash::{NULL, hashes_of};

/// Rows kept at most. The share of a value with share p is off by sqrt(p / 8192): a tenth of a percent for one of 1 %.
const ROWS_MAX: usize = 8192;

/// Values that were sampled more often than this are not rare.
const OFTEN: u64 = 50;

/// Values that are named as heavy, at most: of a Zipf distribution with exponent 1 over ten thousand values, the first sixteen
/// make up 96 % of the sum of squares, which is what a join of two such columns gives.
const HEAVY_MAX: usize = 16;

/// Fewer rows of a sample with one value are chance: where it leaves rows out, and where it holds all.
const HEAVY_ROWS_MIN: (u64, u64) = (4, 2);

/// A row of the sample.
#[derive(Clone, Copy, Debug)]
struct Picked {
    /// Of its value, or [`NULL`].
    hash: u64,
    /// Counted from the first ever seen.
    row: u64,
}

/// Some rows of a column.
#[derive(Clone, Debug)]
pub(super) struct Sample {
    /// In row order.
    picked: Vec<Picked>,
    /// One row of so many is taken: a power of two.
    one_in: u64,
    /// Rows seen.
    rows: u64,
    /// The row, counted from the first ever seen, that is taken next.
    next: u64,
    random: SmallRng,
}

impl Sample {
    /// An empty sample. Those that will be merged need different seeds: with the same one they take rows at the same places,
    /// and values that repeat from part to part look as if all others did, too.
    pub(super) fn new(seed: u64) -> Self {
        Self { picked: Vec::new(), one_in: 1, rows: 0, next: 0, random: SmallRng::seed_from_u64(seed) }
    }

    /// Takes what falls to it out of the next rows.
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
                // Drawn anew, as the rows from there on are now taken less often.
                self.next = self.first_from(seen);
            }
        }
        self.rows = end;
    }

    /// Adds the sample of the rows that came after.
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
        // Whether a row is taken does not depend on those before it.
        self.next = self.first_from(self.rows);
    }

    /// An estimate of the number of different values among `values` rows that are not null.
    ///
    /// Haas and Stokes, "Estimating the number of classes in a finite population" (JASA 1998), estimator Duj1: with `d`
    /// values in a sample of `n` rows, `f1` of which were seen once, `n d / (n - f1 + f1 n / N)`. Values that were seen often are
    /// counted apart, as in their Duj2a: where a few values have many rows, they hide how rare all others are.
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

    /// The share of all sampled rows that the most frequent value has.
    pub(super) fn heaviest_share(&self) -> f64 {
        let heaviest = self.counts().into_values().max().unwrap_or(0);
        heaviest as f64 / self.picked.len().max(1) as f64
    }

    /// The most frequent values of the sample, the most frequent first: all where there are few, else those that chance does not
    /// account for.
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

    /// How often each value was sampled.
    fn counts(&self) -> HashMap<u64, u64> {
        let mut counts = HashMap::with_capacity(self.picked.len());
        for picked in self.picked.iter().filter(|picked| picked.hash != NULL) {
            *counts.entry(picked.hash).or_default() += 1;
        }
        counts
    }

    /// Takes half as many rows, of those in the sample and of those to come.
    fn halve(&mut self) {
        self.picked.retain(|_| self.random.random());
        self.one_in *= 2;
    }

    /// The first row from that one on that is taken.
    fn first_from(&mut self, row: u64) -> u64 {
        if self.one_in == 1 {
            return row;
        }
        // How many rows are left out is distributed geometrically.
        let left_out = (1.0 - self.random.random::<f64>()).ln() / (-1.0 / self.one_in as f64).ln_1p();
        row.saturating_add(left_out as u64)
    }
}
