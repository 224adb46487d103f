//! How many rows a join has, counted on the client with plain hash maps: slow, simple, and without a line of the engine.

use std::collections::HashMap;
use std::hash::Hash;

use arrow::array::{Array, AsArray};
use arrow::datatypes::Int64Type;

use super::tables::Local;

/// How often each key occurs.
pub type Frequencies<K> = HashMap<K, u64>;

/// The keys of a column of 64-bit integers.
pub fn integers(table: &Local, column: &str) -> Vec<i64> {
    let values = |column: &dyn Array| column.as_primitive::<Int64Type>().iter().flatten().collect::<Vec<_>>();
    table.column(column).flat_map(|column| values(column)).collect()
}

/// The keys of two columns of 64-bit integers together.
pub fn integer_pairs(table: &Local, first: &str, second: &str) -> Vec<(i64, i64)> {
    integers(table, first).into_iter().zip(integers(table, second)).collect()
}

/// The keys of a column of strings.
pub fn strings(table: &Local, column: &str) -> Vec<String> {
    let values = |column: &dyn Array| column.as_string::<i32>().iter().flatten().map(str::to_owned).collect::<Vec<_>>();
    table.column(column).flat_map(|column| values(column)).collect()
}

/// How often each of them occurs.
pub fn frequencies<K: Eq + Hash>(keys: impl IntoIterator<Item = K>) -> Frequencies<K> {
    let mut frequencies = HashMap::new();
    for key in keys {
        *frequencies.entry(key).or_insert(0) += 1;
    }
    frequencies
}

/// Rows of the inner join.
pub fn inner<K: Eq + Hash>(left: impl IntoIterator<Item = K>, right: impl IntoIterator<Item = K>) -> u64 {
    let left = frequencies(left);
    right.into_iter().map(|key| left.get(&key).copied().unwrap_or(0)).sum()
}

/// Rows of the left anti join.
pub fn left_anti<K: Eq + Hash>(left: impl IntoIterator<Item = K>, right: impl IntoIterator<Item = K>) -> u64 {
    let right = frequencies(right);
    left.into_iter().filter(|key| !right.contains_key(key)).count() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_those_of_the_definition() {
        let (left, right) = ([1, 1, 2, 3], [1, 1, 1, 3, 4]);
        assert_eq!(inner(left, right), 7);
        assert_eq!(left_anti(left, right), 1);
        assert_eq!(left_anti(right, left), 1);
        assert_eq!(inner(left, []), 0);
        assert_eq!(left_anti(left, []), 4);
    }
}
