//! Which different values a column has, in a few thousand hashes: how many there are, whether rows share any, and how many of
//! them another column has too.
//!
//! Hashes spread values evenly over 64 bits, so that of all of a column's values, those with the smallest hashes are a random
//! sample of the *different* ones, whatever the rows' shares of them, and the hash up to which `k` lie tells how many there
//! are (KMV: Bar-Yossef et al., "Counting distinct elements in a data stream", RANDOM 2002). Of two columns, the same values
//! fall into both samples, so that their intersection can be counted (Beyer et al., "On synopses for distinct-value estimation
//! under multiset operations", SIGMOD 2007). An estimate of `D` values is off by about `D / sqrt(k)`, which leaves open whether a
//! column has a value on each row, or some on two; but a value is in the sample with all of its rows, so that whether it repeats
//! is seen there.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::atomic::{AtomicU64, Ordering};

use super::hash::NULL;

/// Hashes kept: the number of different values is known to 1.6 %.
const K: usize = 4096;

/// Values of the smaller column that fall into both samples when it has all of them in common with the larger one: fewer
/// tell too little of how many they have.
const COMMON_MIN: f64 = 64.0;

/// Each with the number of rows that have it.
type Hashes = HashMap<u64, u64, BuildHasherDefault<AsItIs>>;

/// The hashes of a column's values that are below a bound: all of them where they are few.
#[derive(Clone, Debug)]
pub struct Sketch {
    hashes: Hashes,
    /// All hashes below are there; the largest number: all.
    bound: u64,
}

/// How much of a column another one has, too, by how many rows its values have.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Overlap {
    /// Rows of rare values, as far as the sample tells.
    pub rare_rows: f64,
    /// The share of these whose value the other column has.
    pub of_rare_rows: f64,
    /// The share of the frequent values that it has.
    pub of_frequent_values: f64,
}

/// The lowest bound of the sketches that are made of the parts of a column.
#[derive(Debug)]
pub(super) struct LowestBound(AtomicU64);

impl Default for LowestBound {
    fn default() -> Self {
        Self(AtomicU64::new(u64::MAX))
    }
}

impl Default for Sketch {
    /// Of no value.
    fn default() -> Self {
        Self { hashes: Hashes::default(), bound: u64::MAX }
    }
}

impl Sketch {
    /// Takes in hashes of values, however often each; nulls are none.
    pub(super) fn insert(&mut self, hashes: &[u64]) {
        // Most columns that matter have many values, and most of these are not below the bound.
        for &hash in hashes.iter().filter(|&&hash| hash != NULL) {
            if hash < self.bound && self.add(hash, 1) && self.hashes.len() > 2 * K {
                self.shrink();
            }
        }
    }

    /// Tells other parts of the column where this one's bound is, and takes the lowest of theirs: the column's is no higher.
    pub(super) fn lower_with(&mut self, lowest: &LowestBound) {
        self.lower(lowest.0.fetch_min(self.bound, Ordering::Relaxed));
    }

    /// Takes in the values of another part of the column.
    pub(in crate::catalog) fn merge(mut self, other: Self) -> Self {
        self.lower(other.bound);
        let bound = self.bound;
        for (hash, rows) in other.hashes.into_iter().filter(|&(hash, _)| hash < bound) {
            self.add(hash, rows);
        }
        if self.hashes.len() > 2 * K {
            self.shrink();
        }
        self
    }

    /// How many different values there are: exactly where they are few.
    pub fn distinct(&self) -> f64 {
        self.hashes.len() as f64 / self.share()
    }

    /// Whether values repeat: whether several rows have one of the values in the sample. Where that is so of one value in a
    /// thousand, it is found in 98 of 100 columns; where the sketch holds all values, it is exact.
    pub fn repeats(&self) -> bool {
        self.hashes.values().any(|&rows| rows > 1)
    }

    /// Which share of this column's different values the other one has too, and the other way round; `None` where the samples tell
    /// too little of it. What is a part of the other is found to be all of it, however roughly the number of values is known.
    pub fn shares_in_common(&self, other: &Self) -> Option<(f64, f64)> {
        let (own, others) = (self.share(), other.share());
        let is_all = self.bound == u64::MAX && other.bound == u64::MAX;
        if !is_all && self.distinct().min(other.distinct()) * own.min(others) < COMMON_MIN {
            return None;
        }
        let bound = self.bound.min(other.bound);
        let sampled = |hashes: &Hashes| hashes.keys().filter(|&&hash| is_all || hash < bound).count() as f64;
        let (fewer, more) = if self.hashes.len() < other.hashes.len() { (self, other) } else { (other, self) };
        let common = fewer.hashes.keys().filter(|hash| more.hashes.contains_key(hash)).count() as f64;
        // That a sample has no value in common does not say that there is none.
        let common = if is_all { common } else { common.max(0.5) };
        let share = |hashes| (common / sampled(hashes).max(1.0)).min(1.0);
        Some((share(&self.hashes), share(&other.hashes)))
    }

    /// Whether the column has a value of that hash; `None` where the sample does not tell.
    pub fn holds(&self, hash: u64) -> Option<bool> {
        (hash < self.bound || self.bound == u64::MAX).then(|| self.hashes.contains_key(&hash))
    }

    /// How much of this column the other one has. A value is frequent with more rows than `rare_rows_max`; those that are dealt with
    /// otherwise are no rare ones either. Of two columns of which [`shares_in_common`](Self::shares_in_common) knows something.
    ///
    /// A frequent value is in the sample by chance, with thousands of rows or without; so of frequent values it is known which share of
    /// them the other column has, but how many rows they have has to be known from elsewhere.
    pub fn overlap(&self, other: &Self, rare_rows_max: f64, is_apart: impl Fn(u64) -> bool) -> Overlap {
        let is_all = self.bound == u64::MAX && other.bound == u64::MAX;
        let bound = self.bound.min(other.bound);
        let (mut rare, mut frequent) = (Counted::default(), Counted::default());
        for (&hash, &rows) in self.hashes.iter().filter(|&(&hash, _)| is_all || hash < bound) {
            let is_common = other.hashes.contains_key(&hash);
            if rows as f64 > rare_rows_max {
                frequent.add(1.0, is_common);
            } else if !is_apart(hash) {
                rare.add(rows as f64, is_common);
            }
        }
        // As in `shares_in_common`: a sample without a value in common has half of one.
        let half = if is_all { 0.0 } else { 0.5 * rare.all / rare.values.max(1.0) };
        let of_rare_rows = if rare.all > 0.0 { rare.common.max(half) / rare.all } else { 0.5 };
        let of_frequent_values = match is_all && frequent.values > 0.0 {
            true => frequent.common / frequent.all,
            // Few of them may be in the sample. One more has as much in common as rare ones.
            false => (frequent.common + of_rare_rows) / (frequent.all + 1.0),
        };
        let sampled = if is_all { 1.0 } else { bound as f64 / 2f64.powi(64) };
        Overlap { rare_rows: rare.all / sampled, of_rare_rows, of_frequent_values }
    }

    /// Takes in a value on so many rows. Whether it is new.
    fn add(&mut self, hash: u64, rows: u64) -> bool {
        match self.hashes.entry(hash) {
            Entry::Occupied(mut known) => {
                *known.get_mut() += rows;
                false
            }
            Entry::Vacant(new) => {
                new.insert(rows);
                true
            }
        }
    }

    /// The share of all hashes that is below the bound.
    fn share(&self) -> f64 {
        self.bound as f64 / 2f64.powi(64)
    }

    /// Lowers the bound to the `K`-th hash.
    fn shrink(&mut self) {
        let mut hashes: Vec<u64> = self.hashes.keys().copied().collect();
        let (_, bound, _) = hashes.select_nth_unstable(K);
        self.lower(*bound);
    }

    fn lower(&mut self, bound: u64) {
        if bound < self.bound {
            self.bound = bound;
            self.hashes.retain(|&hash, _| hash < bound);
        }
    }
}

/// Values or rows of a column, and of these the ones that another column has in common with it.
#[derive(Default)]
struct Counted {
    values: f64,
    all: f64,
    common: f64,
}

impl Counted {
    /// Takes in a value that counts so much.
    fn add(&mut self, count: f64, is_common: bool) {
        self.values += 1.0;
        self.all += count;
        self.common += if is_common { count } else { 0.0 };
    }
}

/// Leaves hashes as they are.
#[derive(Clone, Copy, Debug, Default)]
struct AsItIs(u64);

impl Hasher for AsItIs {
    fn write(&mut self, _: &[u8]) {
        unreachable!("only 64-bit hashes are put there");
    }

    fn write_u64(&mut self, hash: u64) {
        // Those below a bound have the same highest bits, by which the table tells entries of one bucket apart.
        self.0 = hash.rotate_left(32);
    }

    fn finish(&self) -> u64 {
        self.0
    }
}
