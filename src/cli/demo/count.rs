//! How many rows a join has, counted on the client with plain hash maps: slow, simple, and without a line of the engine.

use std::collections::HashMap;
use std::hash::Hash;

use arrow::array::{Array, ArrayRef, AsArray};
use arrow::datatypes::Int64Type;

use super::tables::Tables;
use crate::cli::progress::Progress;

/// How often each key occurs.
pub type Frequencies<K> = HashMap<K, u64>;

/// The tables that are counted, column by column while their keys are taken.
pub struct Counted<'a> {
    tables: &'a Tables,
    /// Told of the bytes of the columns.
    progress: &'a Progress,
}

impl<'a> Counted<'a> {
    /// These tables, of which `progress` is told.
    pub fn new(tables: &'a Tables, progress: &'a Progress) -> Self {
        Self { tables, progress }
    }

    /// The keys of a column of 64-bit integers.
    pub fn integers(&self, table: &str, column: &str) -> impl Iterator<Item = i64> + use<'a> {
        self.batches(table, column).flat_map(|values| values.as_primitive::<Int64Type>().iter().flatten())
    }

    /// The keys of two columns of 64-bit integers together.
    pub fn integer_pairs(&self, table: &str, first: &str, second: &str) -> impl Iterator<Item = (i64, i64)> + use<'a> {
        let batches = self.batches(table, first).zip(self.batches(table, second));
        let pairs = batches.flat_map(|(first, second)| {
            first.as_primitive::<Int64Type>().iter().zip(second.as_primitive::<Int64Type>().iter())
        });
        pairs.filter_map(|(first, second)| Some((first?, second?)))
    }

    /// The keys of a column of strings.
    pub fn strings(&self, table: &str, column: &str) -> impl Iterator<Item = &'a str> + use<'a> {
        self.batches(table, column).flat_map(|values| values.as_string::<i32>().iter().flatten())
    }

    /// A column, batch by batch.
    fn batches(&self, table: &str, column: &str) -> impl Iterator<Item = &'a ArrayRef> + use<'a> {
        let progress = self.progress;
        self.tables.get(table).column(column).inspect(move |values| progress.moved(bytes_of(values)))
    }
}

/// Bytes of some columns of tables, each table with one of its columns.
pub fn bytes(tables: &Tables, columns: &[(&str, &str)]) -> u64 {
    columns.iter().flat_map(|(table, column)| tables.get(table).column(column)).map(bytes_of).sum()
}

fn bytes_of(values: &ArrayRef) -> u64 {
    values.get_array_memory_size() as u64
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
