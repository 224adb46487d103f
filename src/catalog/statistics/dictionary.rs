//! Summaries of dictionary arrays. They cover the values that rows use, and no other values of the
//! dictionary.

use std::cmp::Ordering;
use std::collections::HashMap;

use arrow::array::{AnyDictionaryArray, Array, ArrayRef, BooleanArray, UInt64Array, make_comparator};
use arrow::compute::{SortOptions, filter, take};

use super::hash;
use super::summary::{self, Summary};

/// Summarises a dictionary array in which at least one row is not null. Checks the order if
/// `order_wanted`; nulls come first then.
pub(super) fn summarize(array: &dyn AnyDictionaryArray, order_wanted: bool) -> Summary {
    let keys = array.normalized_keys();
    let values_used = if array.len() < array.values().len() {
        used_values(array, &keys).1
    } else {
        let mut used = vec![false; array.values().len()];
        match array.keys().nulls().filter(|nulls| nulls.null_count() > 0) {
            None => keys.iter().for_each(|&key| used[key] = true),
            Some(nulls) => nulls.valid_indices().for_each(|row| used[keys[row]] = true),
        }
        filter(array.values(), &BooleanArray::from(used)).expect("a flag for each value")
    };
    let mut summary = summary::summarize(&values_used, values_used.logical_null_count(), false);
    // `summarize` was not asked to check the order, but it reports values that are all null as
    // ascending.
    (summary.ascending, summary.strict, summary.runs) = (false, false, 0);
    if order_wanted && let Some((runs, strict)) = ascending_runs(array, &keys[array.logical_null_count()..]) {
        summary.ascending = true;
        summary.strict = strict;
        summary.runs = runs;
    }
    summary
}

/// Returns the used keys of a dictionary array, in order and each once, and the values that they
/// stand for. The cost depends on the rows, because many small batches may share a large
/// dictionary. No value is copied twice, because many rows may share a large value. `keys` are the
/// array's, normalized.
pub(super) fn used_values(array: &dyn AnyDictionaryArray, keys: &[usize]) -> (Vec<usize>, ArrayRef) {
    let mut used: Vec<usize> = match array.keys().nulls().filter(|nulls| nulls.null_count() > 0) {
        None => keys.to_vec(),
        Some(nulls) => nulls.valid_indices().map(|row| keys[row]).collect(),
    };
    used.sort_unstable();
    used.dedup();
    let places = UInt64Array::from_iter_values(used.iter().map(|&key| key as u64));
    let values = take(array.values(), &places, None).expect("the keys were validated");
    (used, values)
}

/// Returns the number of different values of `keys`, and true if no value repeats. `None` if the
/// values are out of order, and for all floats, because Arrow's comparison tells -0 from 0.
fn ascending_runs(array: &dyn AnyDictionaryArray, keys: &[usize]) -> Option<(u64, bool)> {
    let values = array.values();
    if values.data_type().is_floating() {
        return None;
    }
    let compare = make_comparator(values, values, SortOptions::default()).ok()?;
    match Ascent::of(keys.iter().copied(), values.len(), &compare) {
        Ascent::Runs(runs) => Some((runs, runs == keys.len() as u64)),
        Ascent::Not => None,
        Ascent::Unknown => {
            let same = first_equals(values, &compare);
            match Ascent::of(keys.iter().map(|&key| same[key]), values.len(), &compare) {
                Ascent::Runs(runs) => Some((runs, runs == keys.len() as u64)),
                Ascent::Not | Ascent::Unknown => None,
            }
        }
    }
}

/// Order of a list of keys.
enum Ascent {
    /// The values ascend. The number is that of different values.
    Runs(u64),
    Not,
    /// The key changed more often than there are values. So the values do not ascend, or some are
    /// equal under different keys. Comparing equal values is slow if they are long.
    Unknown,
}

impl Ascent {
    fn of(mut keys: impl Iterator<Item = usize>, values: usize, compare: &dyn Fn(usize, usize) -> Ordering) -> Self {
        let Some(mut before) = keys.next() else { return Self::Runs(0) };
        let (mut runs, mut changes) = (1, 0);
        for key in keys {
            if key == before {
                continue;
            }
            changes += 1;
            if changes > values {
                return Self::Unknown;
            }
            match compare(before, key) {
                Ordering::Less => runs += 1,
                Ordering::Equal => (),
                Ordering::Greater => return Self::Not,
            }
            before = key;
        }
        Self::Runs(runs)
    }
}

/// Returns the first key with an equal value, for each key.
fn first_equals(values: &ArrayRef, compare: &dyn Fn(usize, usize) -> Ordering) -> Vec<usize> {
    let mut first: HashMap<u64, usize> = HashMap::new();
    let find = |(key, hash): (usize, u64)| {
        let other = *first.entry(hash).or_insert(key);
        if compare(other, key).is_eq() { other } else { key }
    };
    hash::hashes(values).into_iter().enumerate().map(find).collect()
}
