//! A few thousand hashes that estimate how many different values a column has, whether they repeat,
//! and how many of them another column has too.
//!
//! Hashes spread values evenly over 64 bits. So a column's values with the smallest hashes are a
//! random sample of its *different* values, whatever the rows' shares of them. The hash up to which
//! `k` hashes are found tells the number of values (KMV: Bar-Yossef et al., "Counting distinct
//! elements in a data stream", RANDOM 2002).
//!
//! A value that two columns have in common falls into both samples. So the intersection can be
//! counted (Beyer et al., "On synopses for distinct-value estimation under multiset operations",
//! SIGMOD 2007).
//!
//! An estimate of `D` values is off by about `D / sqrt(k)`. That error hides whether a column's
//! values are unique, or some occur on two rows. But the sketch counts all rows of each sampled
//! value, so it shows whether the value repeats.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::atomic::{AtomicU64, Ordering};

use super::hash::NULL;

/// Number of smallest hashes that remain when a sketch of twice as many is cut. The number of
/// different values is then known to 1.6 %.
const K: usize = 4096;

/// Minimum number of common values that both samples should have, assuming that the larger column
/// has all values of the smaller one. With fewer, the samples tell too little about the values in
/// common.
const COMMON_MIN: f64 = 64.0;

/// Number of rows by hash.
type Hashes = HashMap<u64, u64, BuildHasherDefault<AsItIs>>;

/// The hashes of a column's values that are below a bound. A column of few values keeps all.
#[derive(Clone, Debug)]
pub struct Sketch {
    hashes: Hashes,
    /// All hashes below this bound are kept; `u64::MAX`: all hashes.
    bound: u64,
}

/// The part of a column that another column has too, separately for values on few rows (rare) and
/// on many rows (frequent).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Overlap {
    /// Estimated rows of rare values.
    pub rare_rows: f64,
    /// Share of the rows of rare values whose value the other column has.
    pub of_rare_rows: f64,
    /// Share of the frequent values that the other column has.
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
    /// Returns a sketch without values.
    fn default() -> Self {
        Self { hashes: Hashes::default(), bound: u64::MAX }
    }
}

impl Sketch {
    /// Adds hashes of values, once per row; nulls are ignored.
    pub(super) fn insert(&mut self, hashes: &[u64]) {
        // The bound is compared first: in columns of many values, which take the longest, most
        // hashes are not below it.
        for &hash in hashes.iter().filter(|&&hash| hash != NULL) {
            if hash < self.bound && self.add(hash, 1) && self.hashes.len() > 2 * K {
                self.shrink();
            }
        }
    }

    /// Publishes this part's bound to other parts of the column, and lowers it to the lowest bound
    /// of any part. The bound of the whole column is no higher than that.
    pub(super) fn lower_with(&mut self, lowest: &LowestBound) {
        self.lower(lowest.0.fetch_min(self.bound, Ordering::Relaxed));
    }

    /// Adds the values of another part of the column.
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

    /// Returns the number of different values, exact for a column of few values.
    pub fn distinct(&self) -> f64 {
        self.hashes.len() as f64 / self.share()
    }

    /// True if several rows have one of the sampled values. If one value in a thousand repeats, the
    /// sketch finds a repeated value in 98 of 100 columns. The answer is exact if the sketch holds
    /// all values.
    pub fn repeats(&self) -> bool {
        self.hashes.values().any(|&rows| rows > 1)
    }

    /// Returns the share of this column's different values that the other column has too, and the
    /// reverse. `None` if the samples tell too little. If all values of a column are in the other
    /// one, the share is one, however roughly the number of values is known.
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
        // A sample without a value in common does not prove that the columns have none.
        let common = if is_all { common } else { common.max(0.5) };
        let share = |hashes| (common / sampled(hashes).max(1.0)).min(1.0);
        Some((share(&self.hashes), share(&other.hashes)))
    }

    /// Returns true if the column has a value of that hash; `None` if the sample does not tell.
    pub fn holds(&self, hash: u64) -> Option<bool> {
        (hash < self.bound || self.bound == u64::MAX).then(|| self.hashes.contains_key(&hash))
    }

    /// Returns the part of this column that the other one has too. A value on more than
    /// `rare_rows_max` rows is frequent. Other values are rare, but those for which `is_apart` is
    /// true are left out. [`shares_in_common`](Self::shares_in_common) of the two columns must not
    /// be `None`.
    ///
    /// A frequent value is as likely to be in the sample as any other value, however many rows have
    /// it. So the sample tells the share of frequent values that the other column has, but not
    /// their number of rows. The caller must know that number from elsewhere.
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
        // As in `shares_in_common`, a sample without a value in common counts as half a value in
        // common.
        let half = if is_all { 0.0 } else { 0.5 * rare.all / rare.values.max(1.0) };
        let of_rare_rows = if rare.all > 0.0 { rare.common.max(half) / rare.all } else { 0.5 };
        let of_frequent_values = match is_all && frequent.values > 0.0 {
            true => frequent.common / frequent.all,
            // The sample may hold few frequent values. One value is added to them, whose share in
            // common is that of the rare values.
            false => (frequent.common + of_rare_rows) / (frequent.all + 1.0),
        };
        let sampled = if is_all { 1.0 } else { bound as f64 / 2f64.powi(64) };
        Overlap { rare_rows: rare.all / sampled, of_rare_rows, of_frequent_values }
    }

    /// Adds a value on `rows` rows. Returns true if the value is new.
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

    /// Returns the share of all hashes that is below the bound.
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

/// A column's values or rows, and the part that another column has in common with it.
#[derive(Default)]
struct Counted {
    values: f64,
    all: f64,
    common: f64,
}

impl Counted {
    /// Adds a value with weight `count`.
    fn add(&mut self, count: f64, is_common: bool) {
        self.values += 1.0;
        self.all += count;
        self.common += if is_common { count } else { 0.0 };
    }
}

/// A hasher that returns its input.
#[derive(Clone, Copy, Debug, Default)]
struct AsItIs(u64);

impl Hasher for AsItIs {
    fn write(&mut self, _: &[u8]) {
        unreachable!("only 64-bit hashes are put there");
    }

    fn write_u64(&mut self, hash: u64) {
        // The hash table tells entries of one bucket apart by their highest bits. Those are equal
        // for all hashes below a low bound, so other bits take their place.
        self.0 = hash.rotate_left(32);
    }

    fn finish(&self) -> u64 {
        self.0
    }
}
