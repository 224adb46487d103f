//! The tables and joins of a case, and its expected result.
//!
//! A result is compared by its number of rows and a checksum: the sum, over all rows, of products
//! of a column of one side with a column of the other. Payloads are independent of keys, so a row
//! joined from the wrong partners changes the sum. The expected values follow from the generation
//! of the rows, by index, so that the check relies on no hash table and no sort.

use arrow::array::{ArrayRef, AsArray, RecordBatch};
use arrow::datatypes::{DataType, Int32Type, Int64Type};
use rayon::prelude::*;
use xxhash_rust::xxh3::xxh3_64;

use dovetail::{Error, Result};

/// The tables of a case, the joins to run, and the expected result of the last join.
#[derive(Debug)]
pub struct Prepared {
    pub tables: Vec<(String, Vec<RecordBatch>)>,
    /// In the order of execution.
    pub joins: Vec<Join>,
    /// Terms of the checksum.
    pub products: Vec<Product>,
    /// Expected summary of the last join's result.
    pub expected: Summary,
}

/// An inner join of two tables.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Join {
    pub left: String,
    pub right: String,
    pub on: Vec<(String, String)>,
    /// Empty: all.
    pub columns: Vec<String>,
    /// Name of the table that stores the result for a later join.
    pub into: Option<String>,
}

/// One term of the checksum: a column's values, or the products of two columns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Product {
    pub column: String,
    /// A second column, the other factor. `None`: the first column alone.
    pub by: Option<String>,
}

/// The compared properties of a result.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    pub rows: u64,
    /// The sum of all products over all rows, modulo 2^64.
    pub checksum: u64,
}

impl Prepared {
    /// Returns the rows of all build sides together, and of the first probe side.
    pub fn rows(&self) -> [u64; 2] {
        let rows = |wanted: &str| {
            let table = self.tables.iter().filter(|(name, _)| name == wanted);
            table.flat_map(|(_, batches)| batches).map(|batch| batch.num_rows() as u64).sum::<u64>()
        };
        [self.joins.iter().map(|join| rows(&join.left)).sum(), self.joins.first().map_or(0, |join| rows(&join.right))]
    }
}

impl Join {
    /// Makes the join of `build` with `probe` by key columns `k0`, `k1`, ... All cases with one
    /// join use it.
    pub fn of_two(key_columns: usize) -> Self {
        Self {
            left: "build".into(),
            right: "probe".into(),
            on: (0..key_columns).map(|at| (format!("k{at}"), format!("k{at}"))).collect(),
            columns: Vec::new(),
            into: None,
        }
    }
}

impl Summary {
    /// Summarizes a result.
    ///
    /// # Errors
    /// [`Error::Internal`] when a column is missing, null somewhere, or of a type that no case
    /// makes.
    pub fn of(batches: &[RecordBatch], products: &[Product]) -> Result<Self> {
        let summarize = |batch: &RecordBatch| {
            let mut summary = Self { rows: batch.num_rows() as u64, checksum: 0 };
            for product in products {
                let values = column_values(batch, &product.column)?;
                let sum = match &product.by {
                    None => values.into_iter().fold(0, u64::wrapping_add),
                    Some(by) => {
                        let factors = column_values(batch, by)?;
                        let products = values.into_iter().zip(factors).map(|(a, b)| a.wrapping_mul(b));
                        products.fold(0, u64::wrapping_add)
                    }
                };
                summary.checksum = summary.checksum.wrapping_add(sum);
            }
            Ok(summary)
        };
        let add = |a: Self, b: Self| Ok(Self { rows: a.rows + b.rows, checksum: a.checksum.wrapping_add(b.checksum) });
        batches.par_iter().map(summarize).try_reduce(Self::default, add)
    }
}

/// Returns the number that stands for a text in a checksum.
pub fn text_value(text: &str) -> u64 {
    xxh3_64(text.as_bytes())
}

/// Returns a column's values as numbers: integers with their sign, text by its hash.
fn column_values(batch: &RecordBatch, name: &str) -> Result<Vec<u64>> {
    let column = batch.column_by_name(name).filter(|column| column.null_count() == 0);
    let column = column.ok_or_else(|| Error::Internal(format!("the result has no column {name:?}, or nulls in it")))?;
    values(column).ok_or_else(|| Error::Internal(format!("column {name:?} is {}", column.data_type())))
}

fn values(column: &ArrayRef) -> Option<Vec<u64>> {
    match column.data_type() {
        DataType::Int32 => {
            Some(column.as_primitive::<Int32Type>().values().iter().map(|value| *value as u64).collect())
        }
        DataType::Int64 => {
            Some(column.as_primitive::<Int64Type>().values().iter().map(|value| *value as u64).collect())
        }
        DataType::Utf8 => Some(column.as_string::<i32>().iter().map(|text| text_value(text.unwrap_or(""))).collect()),
        _ => None,
    }
}

/// A term of a case's checksum before columns have names. Every column of the result is in a term.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Term {
    pub key: Option<usize>,
    /// A payload column of the build side.
    pub build: Option<usize>,
    /// A payload column of the probe side.
    pub probe: Option<usize>,
}

impl Term {
    /// Returns terms that pair each key column with a payload column, and each payload column with
    /// one of the other side. Columns without a partner stand alone.
    pub fn all(key_columns: usize, build: usize, probe: usize) -> Vec<Self> {
        let mut terms = Vec::new();
        for key in 0..key_columns {
            let by_probe = (probe > 0).then_some(0);
            let by_build = (probe == 0 && build > 0).then_some(0);
            terms.push(Self { key: Some(key), build: by_build, probe: by_probe });
        }
        for at in 0..build.max(probe) {
            let of = |count: usize| (count > 0).then(|| at % count);
            terms.push(Self { key: None, build: of(build), probe: of(probe) });
        }
        terms
    }

    /// Names the columns `k0`, `b0` and `p0`.
    pub fn product(self) -> Product {
        let name = |side: &str, at: Option<usize>| at.map(|at| format!("{side}{at}"));
        let mut names = [name("k", self.key), name("b", self.build), name("p", self.probe)].into_iter().flatten();
        let column = names.next().expect("a term has a column");
        Product { column, by: names.next() }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use arrow::array::{Int64Array, StringArray};

    use super::*;

    fn pair(b: [i64; 3], p: [i64; 3]) -> RecordBatch {
        let column = |values: [i64; 3]| Arc::new(Int64Array::from(values.to_vec())) as ArrayRef;
        let keys: ArrayRef = Arc::new(StringArray::from(vec!["x", "y", "z"]));
        RecordBatch::try_from_iter([("k0", keys), ("b0", column(b)), ("p0", column(p))]).unwrap()
    }

    #[test]
    fn a_wrong_partner_changes_the_checksum() {
        let products: Vec<Product> = Term::all(1, 1, 1).into_iter().map(Term::product).collect();
        let right = Summary::of(&[pair([5, 6, 7], [100, 200, 300])], &products).unwrap();
        let swapped = Summary::of(&[pair([6, 5, 7], [100, 200, 300])], &products).unwrap();
        let keys_astray = Summary::of(&[pair([5, 6, 7], [200, 100, 300])], &products[..1]).unwrap();
        assert_eq!(right.rows, swapped.rows);
        assert_ne!(right.checksum, swapped.checksum);
        assert_ne!(Summary::of(&[pair([5, 6, 7], [100, 200, 300])], &products[..1]).unwrap(), keys_astray);
    }

    #[test]
    fn every_column_is_in_the_checksum() {
        for (keys, build, probe) in [(1, 0, 0), (1, 3, 0), (2, 0, 2), (2, 1, 5), (1, 16, 4)] {
            let terms = Term::all(keys, build, probe);
            let uses = |of: fn(&Term) -> Option<usize>, at: usize| terms.iter().any(|term| of(term) == Some(at));
            assert!((0..keys).all(|at| uses(|term| term.key, at)));
            assert!((0..build).all(|at| uses(|term| term.build, at)));
            assert!((0..probe).all(|at| uses(|term| term.probe, at)));
        }
    }
}
