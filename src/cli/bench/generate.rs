//! Synthetic tables for joins, with the number of result rows and a checksum known from how they were made.
//!
//! ```text
//!   build row i ─ permute ─► number n ─► key(n), payloads hash(i)          key: dense, sparse, multiples, string
//!   probe row j ─ draw ────► number n, or one that no build row has ─► key(n), payloads hash(j)
//!   every pair with equal n is a result row:  count = Σ_j copies(n_j),  checksum = Σ_j probe_j · Σ_{i: n_i = n_j} build_i
//! ```
//!
//! Payloads do not depend on keys, so that a row put together from the wrong partners changes the checksum. The expected
//! values come from the numbers, by array index, and never from the keys: no hash table and no sort is trusted.

use std::sync::Arc;

use arrow::array::{ArrayRef, AsArray, Int32Array, Int64Array, RecordBatch, StringArray};
use arrow::datatypes::{DataType, Int32Type, Int64Type};
use rayon::prelude::*;

use super::random::{Permutation, below, hash, mix32, unit};
use super::zipf::Zipf;
use crate::{Error, Result};

/// Rows of a generated batch.
const ROWS_PER_BATCH: u64 = 1 << 20;

/// What the keys look like.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Keys {
    /// 0 to n - 1, shuffled.
    Dense,
    /// Distinct, hashed over the whole range of the type.
    Sparse,
    /// Multiples of 2^16, shuffled: the low bits, which a naive radix would partition by, are all zero.
    Multiples,
    /// Dense on the build side; the probe side draws them by Zipf's law with this exponent.
    Zipf(f64),
    /// Text of 20 bytes.
    Text,
}

/// One synthetic join.
#[derive(Clone, Debug, PartialEq)]
pub struct Workload {
    /// What the keys look like.
    pub keys: Keys,
    /// Bytes of a key and of each payload column: 4 or 8.
    pub width: usize,
    /// Rows of the build side.
    pub build_rows: u64,
    /// Rows of the probe side.
    pub probe_rows: u64,
    /// Payload columns of each side.
    pub payloads: usize,
    /// The share of probe rows that have a partner, 0 to 1.
    pub match_ratio: f64,
    /// Build rows with the same key.
    pub copies: u64,
    /// Everything random follows from it.
    pub seed: u64,
}

/// Both sides, and what their inner join must be.
#[derive(Debug)]
pub struct Generated {
    /// Columns `k`, `b0`, `b1`, ...
    pub build: Vec<RecordBatch>,
    /// Columns `k`, `p0`, `p1`, ...
    pub probe: Vec<RecordBatch>,
    /// Of the inner join.
    pub expected: Summary,
}

/// What is compared.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    /// Rows.
    pub rows: u64,
    /// Over all rows and all c, the sum of `b_c · p_c` modulo 2^64.
    pub checksum: u64,
}

impl Workload {
    /// Why it cannot be made; `None` when it can.
    pub fn impossible(&self) -> Option<String> {
        let numbers = self.build_rows / self.copies.max(1);
        let key_bits = match self.keys {
            Keys::Text => 64,
            Keys::Multiples => 8 * self.width as u32 - 16,
            _ => 8 * self.width as u32,
        };
        // Non-matching probe rows need as many numbers again; half of the range stays free of signs.
        if key_bits < 64 && numbers * 2 > 1 << (key_bits - 1) {
            return Some(format!("{} distinct keys do not fit {} bits", numbers * 2, key_bits - 1));
        }
        (numbers == 0).then(|| "there are no build rows".into())
    }

    /// Makes both sides, on all threads. The same workload gives the same rows everywhere.
    ///
    /// # Errors
    /// [`Error::Invalid`] when it cannot be made.
    pub fn generate(&self) -> Result<Generated> {
        if let Some(reason) = self.impossible() {
            return Err(Error::Invalid(reason));
        }
        let numbers = self.build_rows.div_ceil(self.copies);
        let permutation = Permutation::new(self.build_rows, self.seed);
        let build_number = |row: u64| permutation.at(row) / self.copies;
        let build = self.table(self.build_rows, "b", &build_number)?;

        let zipf = match self.keys {
            Keys::Zipf(exponent) => Some(Zipf::new(numbers, exponent)),
            _ => None,
        };
        let probe_number = |row: u64| {
            let draw = hash(row ^ self.seed.rotate_left(17));
            let number = match &zipf {
                Some(zipf) => zipf.draw(draw),
                None => below(draw, numbers),
            };
            // A draw of its own decides whether the row finds a partner.
            let matches = unit(hash(draw)) < self.match_ratio;
            if matches { number } else { number + numbers }
        };
        let probe = self.table(self.probe_rows, "p", &probe_number)?;
        let expected = self.expect(numbers, &build_number, &probe_number);
        Ok(Generated { build, probe, expected })
    }

    fn table(&self, rows: u64, side: &str, number: &(dyn Fn(u64) -> u64 + Sync)) -> Result<Vec<RecordBatch>> {
        let starts: Vec<u64> = (0..rows).step_by(ROWS_PER_BATCH as usize).collect();
        let batch = |start: u64| {
            let range = start..rows.min(start + ROWS_PER_BATCH);
            let mut columns = vec![("k".to_owned(), self.key_column(range.clone().map(number)))];
            for at in 0..self.payloads {
                let values = range.clone().map(|row| self.payload(side, at, row));
                columns.push((format!("{side}{at}"), integers(self.width, values)));
            }
            Ok(RecordBatch::try_from_iter(columns)?)
        };
        starts.into_par_iter().map(batch).collect()
    }

    fn key_column(&self, numbers: impl Iterator<Item = u64>) -> ArrayRef {
        let mixed = |number: u64| if self.width == 4 { mix32(number as u32).into() } else { hash(number) };
        match self.keys {
            Keys::Dense | Keys::Zipf(_) => integers(self.width, numbers.map(|number| number as i64)),
            Keys::Sparse => integers(self.width, numbers.map(|number| mixed(number) as i64)),
            Keys::Multiples => integers(self.width, numbers.map(|number| (number << 16) as i64)),
            Keys::Text => {
                Arc::new(StringArray::from_iter_values(numbers.map(|number| format!("key-{:016x}", hash(number)))))
            }
        }
    }

    /// Non-negative, and the same whether stored in 4 or 8 bytes is not asked for: the width decides its range.
    fn payload(&self, side: &str, column: usize, row: u64) -> i64 {
        let salt = u64::from(side.as_bytes()[0]) << 32 | column as u64;
        let value = hash(row ^ hash(self.seed ^ salt));
        if self.width == 4 { i64::from((value >> 33) as i32) } else { (value >> 1) as i64 }
    }

    fn expect(
        &self,
        numbers: u64,
        build_number: &(dyn Fn(u64) -> u64 + Sync),
        probe_number: &(dyn Fn(u64) -> u64 + Sync),
    ) -> Summary {
        let mut expected = Summary::default();
        let mut copies = vec![0u64; numbers as usize];
        (0..self.build_rows).for_each(|row| copies[build_number(row) as usize] += 1);
        let partners = |row: u64| copies.get(probe_number(row) as usize).copied().unwrap_or(0);
        expected.rows = (0..self.probe_rows).into_par_iter().map(partners).sum();
        for column in 0..self.payloads {
            let mut sums = vec![0u64; numbers as usize];
            for row in 0..self.build_rows {
                let sum = &mut sums[build_number(row) as usize];
                *sum = sum.wrapping_add(self.payload("b", column, row) as u64);
            }
            let product = |row: u64| {
                let sum = sums.get(probe_number(row) as usize).copied().unwrap_or(0);
                sum.wrapping_mul(self.payload("p", column, row) as u64)
            };
            let checksum = (0..self.probe_rows).into_par_iter().map(product).reduce(|| 0, u64::wrapping_add);
            expected.checksum = expected.checksum.wrapping_add(checksum);
        }
        expected
    }
}

impl Summary {
    /// Of batches with columns `b0`, `p0`, `b1`, ...
    ///
    /// # Errors
    /// [`Error::Internal`] when a column is missing or null.
    pub fn of(batches: &[RecordBatch], payloads: usize) -> Result<Self> {
        let summarize = |batch: &RecordBatch| {
            let mut summary = Self { rows: batch.num_rows() as u64, checksum: 0 };
            for at in 0..payloads {
                let (build, probe) = (column(batch, &format!("b{at}"))?, column(batch, &format!("p{at}"))?);
                summary.checksum = summary.checksum.wrapping_add(dot(build, probe));
            }
            Ok(summary)
        };
        let add = |a: Self, b: Self| Ok(Self { rows: a.rows + b.rows, checksum: a.checksum.wrapping_add(b.checksum) });
        batches.par_iter().map(summarize).try_reduce(Self::default, add)
    }
}

fn column<'a>(batch: &'a RecordBatch, name: &str) -> Result<&'a ArrayRef> {
    let column = batch.column_by_name(name).filter(|column| column.null_count() == 0);
    column.ok_or_else(|| Error::Internal(format!("the result has no column {name:?}, or nulls in it")))
}

fn dot(a: &ArrayRef, b: &ArrayRef) -> u64 {
    let sum = |sum: u64, (a, b): (u64, u64)| sum.wrapping_add(a.wrapping_mul(b));
    match a.data_type() {
        DataType::Int32 => {
            let (a, b) = (a.as_primitive::<Int32Type>().values(), b.as_primitive::<Int32Type>().values());
            a.iter().zip(b).map(|(a, b)| (*a as u64, *b as u64)).fold(0, sum)
        }
        _ => {
            let (a, b) = (a.as_primitive::<Int64Type>().values(), b.as_primitive::<Int64Type>().values());
            a.iter().zip(b).map(|(a, b)| (*a as u64, *b as u64)).fold(0, sum)
        }
    }
}

fn integers(width: usize, values: impl Iterator<Item = i64>) -> ArrayRef {
    match width {
        4 => Arc::new(Int32Array::from_iter_values(values.map(|value| value as i32))),
        _ => Arc::new(Int64Array::from_iter_values(values)),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    fn workload() -> Workload {
        let (build_rows, probe_rows) = (1_000, 3_000);
        Workload {
            keys: Keys::Dense,
            width: 8,
            build_rows,
            probe_rows,
            payloads: 2,
            match_ratio: 1.0,
            copies: 1,
            seed: 7,
        }
    }

    fn text_keys(batches: &[RecordBatch]) -> Vec<String> {
        let cast = |batch: &RecordBatch| arrow::compute::cast(batch.column(0), &DataType::Utf8).unwrap();
        let text =
            |column: ArrayRef| column.as_string::<i32>().iter().map(|key| key.unwrap().to_owned()).collect::<Vec<_>>();
        batches.iter().flat_map(|batch| text(cast(batch))).collect()
    }

    fn values(batches: &[RecordBatch], name: &str) -> Vec<u64> {
        let cast =
            |batch: &RecordBatch| arrow::compute::cast(batch.column_by_name(name).unwrap(), &DataType::Int64).unwrap();
        let list = |column: ArrayRef| {
            column.as_primitive::<Int64Type>().values().iter().map(|v| *v as u64).collect::<Vec<_>>()
        };
        batches.iter().flat_map(|batch| list(cast(batch))).collect()
    }

    /// The definition of a join, with hash maps.
    fn summary_by_hand(generated: &Generated, payloads: usize) -> Summary {
        let mut rows_of: HashMap<String, Vec<usize>> = HashMap::new();
        for (row, key) in text_keys(&generated.build).into_iter().enumerate() {
            rows_of.entry(key).or_default().push(row);
        }
        let mut summary = Summary::default();
        let columns: Vec<(Vec<u64>, Vec<u64>)> = (0..payloads)
            .map(|at| (values(&generated.build, &format!("b{at}")), values(&generated.probe, &format!("p{at}"))))
            .collect();
        for (probe, key) in text_keys(&generated.probe).into_iter().enumerate() {
            for &build in rows_of.get(&key).into_iter().flatten() {
                summary.rows += 1;
                for (b, p) in &columns {
                    summary.checksum = summary.checksum.wrapping_add(b[build].wrapping_mul(p[probe]));
                }
            }
        }
        summary
    }

    #[test]
    fn expectations_are_those_of_the_definition_for_every_kind_of_key() {
        for keys in [Keys::Dense, Keys::Sparse, Keys::Multiples, Keys::Zipf(1.2), Keys::Text] {
            for (match_ratio, copies, width) in [(1.0, 1, 8), (0.25, 1, 8), (1.0, 3, 8), (0.5, 8, 8), (0.5, 2, 4)] {
                let (build_rows, probe_rows) = (301, 1000);
                let workload = Workload { keys, width, match_ratio, copies, build_rows, probe_rows, ..workload() };
                if workload.impossible().is_some() {
                    continue;
                }
                let generated = workload.generate().unwrap();
                assert_eq!(summary_by_hand(&generated, 2), generated.expected, "{workload:?}");
                assert!(generated.expected.rows > 0, "{workload:?}");
            }
        }
    }

    #[test]
    fn the_match_ratio_is_what_was_asked_for() {
        let workload = Workload { match_ratio: 0.25, probe_rows: 100_000, ..workload() };
        let share = workload.generate().unwrap().expected.rows as f64 / 100_000.0;
        assert!((share - 0.25).abs() < 0.01, "{share}");
    }

    #[test]
    fn a_wrong_partner_changes_the_checksum() {
        let generated = workload().generate().unwrap();
        let (b, p) = (values(&generated.build, "b0"), values(&generated.probe, "p0"));
        let pair = |b: &[u64], p: &[u64]| {
            let column = |values: &[u64]| integers(8, values.iter().map(|value| *value as i64));
            RecordBatch::try_from_iter([("b0", column(b)), ("p0", column(p))]).unwrap()
        };
        let right = Summary::of(&[pair(&b[..3], &p[..3])], 1).unwrap();
        let swapped = Summary::of(&[pair(&[b[1], b[0], b[2]], &p[..3])], 1).unwrap();
        assert_eq!(right.rows, swapped.rows);
        assert_ne!(right.checksum, swapped.checksum);
    }

    #[test]
    fn keys_that_do_not_fit_their_type_are_refused() {
        let narrow = Workload { keys: Keys::Multiples, width: 4, build_rows: 1 << 20, ..workload() };
        assert!(narrow.impossible().is_some());
        assert!(narrow.generate().is_err());
        assert!(Workload { width: 8, ..narrow }.impossible().is_none());
    }
}
