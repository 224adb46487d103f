//! Summaries of dictionary arrays. They cover the values that rows use, and no other values of the
//! dictionary.

use std::cmp::Ordering;

use arrow::array::{AnyDictionaryArray, Array, BooleanArray, make_comparator};
use arrow::compute::{SortOptions, filter};

use super::summary::{self, Summary};

/// Summarises a dictionary array in which at least one row is not null. Checks the order if
/// `order_wanted`; nulls come first then.
pub(super) fn summarize(array: &dyn AnyDictionaryArray, order_wanted: bool) -> Summary {
    let keys = array.normalized_keys();
    let mut used = vec![false; array.values().len()];
    match array.keys().nulls().filter(|nulls| nulls.null_count() > 0) {
        None => keys.iter().for_each(|&key| used[key] = true),
        Some(nulls) => nulls.valid_indices().for_each(|row| used[keys[row]] = true),
    }
    let values_used = filter(array.values(), &BooleanArray::from(used)).expect("a flag for each value");
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

/// Returns the number of different values of `keys`, and true if no value repeats. `None` if the
/// values are out of order, and for all floats, because Arrow's comparison tells -0 from 0.
fn ascending_runs(array: &dyn AnyDictionaryArray, keys: &[usize]) -> Option<(u64, bool)> {
    let values = array.values();
    if values.data_type().is_floating() {
        return None;
    }
    let compare = make_comparator(values, values, SortOptions::default()).ok()?;
    let mut runs = 1;
    for pair in keys.windows(2) {
        match if pair[0] == pair[1] { Ordering::Equal } else { compare(pair[0], pair[1]) } {
            Ordering::Less => runs += 1,
            Ordering::Equal => (),
            Ordering::Greater => return None,
        }
    }
    Some((runs, runs == keys.len() as u64))
}
