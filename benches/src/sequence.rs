//! Sequences of joins: a fact table with several foreign keys is joined with one dimension after
//! the other (Wu et al. 2024, 5.2.7).
//!
//! ```text
//!   fact (f0, fk1, fk2, ...) ⋈ dimension1 (k, p1)
//!     ─► (f0, fk2, ..., p1)  ⋈ dimension2 (k, p2)
//!     ─► (f0, ..., p1, p2) ...
//! ```
//!
//! Foreign keys of later joins are payload, until the join that uses and drops them. Wu et al.
//! fetch each foreign key by row number before its join. Here, such a fetch would be work outside
//! of a join.

use arrow::array::RecordBatch;
use rayon::prelude::*;
use serde_json::{Value, json};

use super::check::{Join, Prepared, Product, Summary};
use super::random::{Permutation, hash};
use super::workload::{ROWS_PER_BATCH, integers};
use dovetail::Result;
use dovetail::cli::output::counted;

/// Bytes of every column.
const WIDTH: usize = 4;

/// One sequence.
#[derive(Clone, Debug, PartialEq)]
pub struct Sequence {
    pub joins: usize,
    pub fact_rows: u64,
    /// Rows of each dimension.
    pub dimension_rows: u64,
    pub seed: u64,
}

impl Sequence {
    /// Returns the bytes of the tables and of all results.
    pub fn bytes(&self) -> u64 {
        // Each join drops a foreign key and adds a payload.
        self.table_bytes() + self.joins as u64 * self.fact_bytes()
    }

    /// Returns the bytes of the tables.
    pub fn table_bytes(&self) -> u64 {
        self.fact_bytes() + self.joins as u64 * self.dimension_rows * 2 * WIDTH as u64
    }

    fn fact_bytes(&self) -> u64 {
        self.fact_rows * (self.joins as u64 + 1) * WIDTH as u64
    }

    /// Describes the sequence, without its sizes.
    pub fn label(&self) -> String {
        format!("{} in sequence", counted(self.joins as u64, "join"))
    }

    /// Returns the axes, for a line of results.
    pub fn axes(&self) -> Vec<(&'static str, Value)> {
        vec![("joins", json!(self.joins)), ("key_bytes", json!(WIDTH)), ("seed", json!(self.seed))]
    }

    /// Makes all tables, on all threads.
    ///
    /// # Errors
    /// [`Error::Internal`](dovetail::Error::Internal) when Arrow refuses a batch.
    pub fn prepare(&self) -> Result<Prepared> {
        let mut tables = Vec::new();
        let mut keys: Vec<Permutation> = Vec::new();
        for at in 1..=self.joins {
            // Each dimension has a different order.
            let order = Permutation::new(self.dimension_rows, self.salt(at));
            let columns: [(String, Values<'_>); 2] = [
                ("k".into(), Box::new(|row| order.at(row) as i64)),
                (format!("p{at}"), Box::new(|row| self.dimension_payload(at, order.at(row)))),
            ];
            tables.push((format!("dimension{at}"), batches(self.dimension_rows, &columns)?));
            keys.push(Permutation::new(self.fact_rows, self.salt(at) ^ 0xfac7));
        }
        let key = |at: usize, row: u64| keys[at - 1].at(row) % self.dimension_rows;
        let mut columns: Vec<(String, Values<'_>)> = vec![("f0".into(), Box::new(|row| self.fact_payload(row)))];
        for at in 1..=self.joins {
            columns.push((format!("fk{at}"), Box::new(move |row| key(at, row) as i64)));
        }
        tables.push(("fact".into(), batches(self.fact_rows, &columns)?));

        let payload_sum = |row: u64| {
            let payloads = (1..=self.joins).map(|at| self.dimension_payload(at, key(at, row)) as u64);
            payloads.fold(0, u64::wrapping_add).wrapping_mul(self.fact_payload(row) as u64)
        };
        let checksum = (0..self.fact_rows).into_par_iter().map(payload_sum).reduce(|| 0, u64::wrapping_add);
        let product = |at: usize| Product { column: format!("p{at}"), by: Some("f0".into()) };
        Ok(Prepared {
            tables,
            joins: (1..=self.joins).map(|at| self.join(at)).collect(),
            products: (1..=self.joins).map(product).collect(),
            expected: Summary { rows: self.fact_rows, checksum },
        })
    }

    fn join(&self, at: usize) -> Join {
        let keys_to_come = (at + 1..=self.joins).map(|at| format!("fk{at}"));
        let payloads = (1..=at).map(|at| format!("p{at}"));
        Join {
            left: format!("dimension{at}"),
            right: if at == 1 { "fact".into() } else { format!("joined{}", at - 1) },
            on: vec![("k".into(), format!("fk{at}"))],
            columns: ["f0".to_owned()].into_iter().chain(keys_to_come).chain(payloads).collect(),
            into: (at < self.joins).then(|| format!("joined{at}")),
        }
    }

    fn salt(&self, at: usize) -> u64 {
        hash(self.seed ^ (at as u64) << 40)
    }

    fn dimension_payload(&self, at: usize, key: u64) -> i64 {
        (hash(key ^ self.salt(at)) >> 33) as i64
    }

    fn fact_payload(&self, row: u64) -> i64 {
        (hash(row ^ self.salt(0)) >> 33) as i64
    }
}

/// Values of a column, by row.
type Values<'a> = Box<dyn Fn(u64) -> i64 + Sync + 'a>;

fn batches(rows: u64, columns: &[(String, Values<'_>)]) -> Result<Vec<RecordBatch>> {
    let starts: Vec<u64> = (0..rows).step_by(ROWS_PER_BATCH as usize).collect();
    let batch = |start: u64| {
        let range = start..rows.min(start + ROWS_PER_BATCH);
        let column = |(name, value): &(String, Values<'_>)| (name.clone(), integers(WIDTH, range.clone().map(value)));
        Ok(RecordBatch::try_from_iter(columns.iter().map(column))?)
    };
    starts.into_par_iter().map(batch).collect()
}
