//! Synthetic tables for one join. Their generation determines the number of result rows and a
//! checksum.
//!
//! ```text
//!   build row i ─ permute ─► slot s ─► number n = s / copies ─┐
//!                              └─► payloads hash(s)           ├─ permute in universe ─► keys
//!   probe row j ─ draw ──────────────► number n ──────────────┘
//!                 └─► payloads hash(j)  (rows without a partner: a number that no build row has)
//!   every pair with equal n is a result row:
//!     count = Σ_j copies(n_j),  checksum = Σ_j probe_j · Σ_{s: s / copies = n_j} build_s
//! ```
//!
//! Numbers are permuted before they become keys. Frequent keys are therefore not adjacent, and keys
//! without a partner are spread among the others.

use std::sync::Arc;

use arrow::array::{ArrayRef, Int32Array, Int64Array, RecordBatch, StringArray};
use arrow::datatypes::{DataType, Field, Schema, SchemaRef};
use rayon::prelude::*;
use serde_json::{Value, json};

use super::axes::{Keys, Payloads, ProbeKeys};
use super::check::{Join, Prepared, Summary, Term, text_value};
use super::random::{Permutation, below, hash, mix32, unit};
use super::zipf::Zipf;
use dovetail::{Error, Result};

/// Rows of a generated batch.
pub const ROWS_PER_BATCH: u64 = 1 << 20;

/// Number of a row whose key is null.
const NONE: u32 = u32::MAX;

/// Maximum number of keys without a partner for each key with a partner.
const STRANGERS_MAX: f64 = 15.0;

/// One synthetic join.
#[derive(Clone, Debug, PartialEq)]
pub struct Workload {
    pub keys: Keys,
    pub key_columns: usize,
    /// Bytes of each key column: 4 or 8.
    pub key_bytes: usize,
    pub build_rows: u64,
    pub probe_rows: u64,
    pub payloads: Payloads,
    /// The share of probe rows that have a partner, 0 to 1.
    pub match_ratio: f64,
    /// Build rows with the same key.
    pub copies: u64,
    pub probe_keys: ProbeKeys,
    /// The share of rows, on both sides, whose key is null, 0 to 1.
    pub nulls: f64,
    pub seed: u64,
}

/// One side of a workload during generation.
struct Side<'a> {
    name: &'static str,
    widths: Vec<usize>,
    /// The number of each row, or [`NONE`].
    numbers: &'a [u32],
    /// Source of each row's payload: the number that is hashed.
    payload_of: &'a (dyn Fn(u64) -> u64 + Sync),
}

impl Workload {
    /// Returns the reason why the workload cannot be made, or `None` if it can.
    pub fn impossible(&self) -> Option<String> {
        if self.build_rows == 0 || self.probe_rows == 0 {
            return Some("one side has no rows".into());
        }
        let universe = self.universe();
        let rows_max = self.build_rows.max(self.probe_rows).max(universe);
        if rows_max >= u64::from(NONE) {
            return Some(format!("{rows_max} rows or keys do not fit 32 bits"));
        }
        let key_bits = 8 * self.key_bytes as u32;
        // Keys use the non-negative half of the range.
        let bits = match self.keys {
            Keys::Text => 63,
            Keys::Multiples => key_bits - 17,
            Keys::Dense => key_bits - 1,
            Keys::Sparse => key_bits.min(63),
        };
        let digits = self.digits(universe);
        (digits > 1 << bits).then(|| format!("{digits} distinct {} keys do not fit {bits} bits", self.keys))
    }

    /// Returns the expected bytes of both tables and of the result.
    pub fn bytes(&self) -> u64 {
        let [key, build, probe] = self.row_bytes();
        let partners = self.copies.min(self.build_rows) as f64 * (1.0 - self.nulls);
        let result_rows = self.probe_rows as f64 * (1.0 - self.nulls) * self.match_ratio * partners;
        self.table_bytes() + (result_rows * (key + build + probe)) as u64
    }

    /// Returns the bytes of both tables.
    pub fn table_bytes(&self) -> u64 {
        let [key, build, probe] = self.row_bytes();
        (self.build_rows as f64 * (key + build) + self.probe_rows as f64 * (key + probe)) as u64
    }

    /// Returns the bytes per row: of the keys, of the build payload, of the probe payload.
    fn row_bytes(&self) -> [f64; 3] {
        let key = match self.keys {
            Keys::Text => 24,
            _ => self.key_bytes,
        };
        let payload = |widths: Vec<usize>| widths.iter().sum::<usize>() as f64;
        let [build, probe] = [&self.payloads.build, &self.payloads.probe].map(|of| payload(of.widths(self.key_bytes)));
        [(key * self.key_columns) as f64, build, probe]
    }

    /// Describes the workload, without its sizes.
    pub fn label(&self) -> String {
        let columns = if self.key_columns > 1 { format!("{} × ", self.key_columns) } else { String::new() };
        let mut label = match self.keys {
            Keys::Text => format!("{columns}text, {}", self.payloads),
            keys => format!("{keys} {columns}{} B, {}", self.key_bytes, self.payloads),
        };
        let mut add = |said: bool, text: String| {
            if said {
                label += &text;
            }
        };
        add(self.match_ratio < 1.0, format!(", {} match", self.match_ratio));
        add(self.copies > 1, format!(", {} copies", self.copies));
        add(self.probe_keys.zipf() > 0.0, format!(", {}", self.probe_keys));
        add(self.nulls > 0.0, format!(", {} null", self.nulls));
        label
    }

    /// Returns the axes, for a line of results.
    pub fn axes(&self) -> Vec<(&'static str, Value)> {
        vec![
            ("keys", json!(self.keys.to_string())),
            ("ratio", json!(self.probe_rows as f64 / self.build_rows as f64)),
            ("types", json!(format!("{} + {}", self.key_bytes, self.payloads))),
            ("key_columns", json!(self.key_columns)),
            ("key_bytes", json!(self.key_bytes)),
            ("payloads", json!(self.payloads.to_string())),
            ("payload_columns", json!(self.payloads.count_max())),
            ("match_ratio", json!(self.match_ratio)),
            ("copies", json!(self.copies)),
            ("probe_keys", json!(self.probe_keys.to_string())),
            ("zipf", json!(self.probe_keys.zipf())),
            ("nulls", json!(self.nulls)),
            ("seed", json!(self.seed)),
        ]
    }

    /// Makes both sides, on all threads. The same workload gives the same rows everywhere.
    ///
    /// # Errors
    /// [`Error::Invalid`] when the workload cannot be made.
    pub fn prepare(&self) -> Result<Prepared> {
        if let Some(reason) = self.impossible() {
            return Err(Error::Invalid(reason));
        }
        let permutation = Permutation::new(self.build_rows, self.seed);
        let slots: Vec<u32> = (0..self.build_rows).into_par_iter().map(|row| permutation.at(row) as u32).collect();
        let number_of = |slot: u32| match self.is_null(BUILD, u64::from(slot)) {
            true => NONE,
            false => (u64::from(slot) / self.copies) as u32,
        };
        let build_numbers: Vec<u32> = slots.par_iter().map(|&slot| number_of(slot)).collect();
        let build = Side {
            name: "b",
            widths: self.payloads.build.widths(self.key_bytes),
            numbers: &build_numbers,
            payload_of: &|row| u64::from(slots[row as usize]),
        };
        let probe_numbers = self.draw();
        let probe = Side {
            name: "p",
            widths: self.payloads.probe.widths(self.key_bytes),
            numbers: &probe_numbers,
            payload_of: &|row| row,
        };
        let tables =
            vec![("build".to_owned(), self.table(&build, BUILD)?), ("probe".to_owned(), self.table(&probe, PROBE)?)];
        let terms = Term::all(self.key_columns, build.widths.len(), probe.widths.len());
        Ok(Prepared {
            tables,
            joins: vec![Join::of_two(self.key_columns)],
            expected: self.expect(&terms, &probe_numbers),
            products: terms.into_iter().map(Term::product).collect(),
        })
    }

    /// Returns the number of distinct keys of the build side.
    fn numbers(&self) -> u64 {
        self.build_rows.div_ceil(self.copies)
    }

    /// Returns the number of distinct keys of both sides. It includes keys without a partner if
    /// only some probe rows match.
    fn universe(&self) -> u64 {
        let strangers = (1.0 / self.match_ratio - 1.0).min(STRANGERS_MAX);
        self.numbers() + (self.numbers() as f64 * strangers).ceil() as u64
    }

    /// Returns the number of distinct values of each key column.
    fn digits(&self, universe: u64) -> u64 {
        let root = (universe as f64).powf(1.0 / self.key_columns as f64).floor() as u64;
        let power = |root: u64| u128::from(root).pow(self.key_columns as u32);
        // Corrects the rounding of floating point, up or down.
        (root.saturating_sub(1)..).find(|&root| power(root) >= u128::from(universe)).unwrap_or(universe)
    }

    fn is_null(&self, salt: u64, row: u64) -> bool {
        self.nulls > 0.0 && unit(hash(hash(row ^ salt) ^ self.seed)) < self.nulls
    }

    /// Draws the number of each probe row.
    fn draw(&self) -> Vec<u32> {
        let numbers = self.numbers();
        let strangers = self.universe() - numbers;
        let zipf = match self.probe_keys {
            ProbeKeys::Zipf(exponent) => Some(Zipf::new(numbers, exponent)),
            _ => None,
        };
        let each = Permutation::new(self.probe_rows, hash(self.seed));
        let number_of = |row: u64| {
            if self.is_null(PROBE, row) {
                return NONE;
            }
            let draw = hash(row ^ self.seed.rotate_left(17));
            // A separate draw decides whether the row has a partner.
            if strangers > 0 && unit(hash(draw)) >= self.match_ratio {
                return (numbers + below(hash(draw ^ STRANGER), strangers)) as u32;
            }
            let number = match (&zipf, self.probe_keys) {
                (Some(zipf), _) => zipf.draw(draw),
                (_, ProbeKeys::Each) => each.at(row) % numbers,
                _ => below(draw, numbers),
            };
            number as u32
        };
        (0..self.probe_rows).into_par_iter().map(number_of).collect()
    }

    fn table(&self, side: &Side<'_>, salt: u64) -> Result<Vec<RecordBatch>> {
        let universe = self.universe();
        let (digits, places) = (self.digits(universe), Permutation::new(universe, self.seed ^ 0x5eed));
        let schema = self.schema(side);
        let rows = side.numbers.len() as u64;
        let starts: Vec<u64> = (0..rows).step_by(ROWS_PER_BATCH as usize).collect();
        let batch = |start: u64| {
            let range = start..rows.min(start + ROWS_PER_BATCH);
            let numbers = &side.numbers[range.start as usize..range.end as usize];
            let place_of = |&number: &u32| (number != NONE).then(|| places.at(u64::from(number)));
            let places: Vec<Option<u64>> = numbers.iter().map(place_of).collect();
            let mut columns = Vec::new();
            for at in 0..self.key_columns {
                let below = digits.pow(at as u32);
                columns.push(self.key_column(places.iter().map(|place| place.map(|place| place / below % digits))));
            }
            for (at, width) in side.widths.iter().enumerate() {
                let values = range.clone().map(|row| self.payload(salt, at, *width, (side.payload_of)(row)));
                columns.push(integers(*width, values));
            }
            Ok(RecordBatch::try_new(schema.clone(), columns)?)
        };
        starts.into_par_iter().map(batch).collect()
    }

    fn schema(&self, side: &Side<'_>) -> SchemaRef {
        let key_type = match self.keys {
            Keys::Text => DataType::Utf8,
            _ => integer_type(self.key_bytes),
        };
        let keys = (0..self.key_columns).map(|at| Field::new(format!("k{at}"), key_type.clone(), self.nulls > 0.0));
        let name = |at: usize| format!("{}{at}", side.name);
        let payloads =
            side.widths.iter().enumerate().map(|(at, width)| Field::new(name(at), integer_type(*width), false));
        Arc::new(Schema::new(keys.chain(payloads).collect::<Vec<_>>()))
    }

    fn key_column(&self, digits: impl Iterator<Item = Option<u64>>) -> ArrayRef {
        match (self.keys, self.key_bytes) {
            (Keys::Text, _) => Arc::new(StringArray::from_iter(digits.map(|digit| digit.map(key_text)))),
            (_, 4) => Arc::new(Int32Array::from_iter(digits.map(|digit| Some(self.key_integer(digit?) as i32)))),
            _ => Arc::new(Int64Array::from_iter(digits.map(|digit| Some(self.key_integer(digit?))))),
        }
    }

    fn key_integer(&self, digit: u64) -> i64 {
        match (self.keys, self.key_bytes) {
            (Keys::Sparse, 4) => i64::from(mix32(digit as u32) as i32),
            (Keys::Sparse, _) => hash(digit) as i64,
            (Keys::Multiples, _) => (digit << 16) as i64,
            _ => digit as i64,
        }
    }

    /// Returns a non-negative payload in the range of the width.
    fn payload(&self, salt: u64, column: usize, width: usize, of: u64) -> i64 {
        let value = hash(of ^ hash(self.seed ^ salt ^ column as u64));
        if width == 4 { i64::from((value >> 33) as i32) } else { (value >> 1) as i64 }
    }

    fn expect(&self, terms: &[Term], probe_numbers: &[u32]) -> Summary {
        let numbers = self.numbers();
        // Sums `value` over the build rows of each number, except rows with a null key.
        let over_partners = |value: &(dyn Fn(u64) -> u64 + Sync)| -> Vec<u64> {
            let of_number = |number: u64| {
                let slots = number * self.copies..((number + 1) * self.copies).min(self.build_rows);
                slots.filter(|&slot| !self.is_null(BUILD, slot)).map(value).fold(0, u64::wrapping_add)
            };
            (0..numbers).into_par_iter().map(of_number).collect()
        };
        let partners = over_partners(&|_| 1);
        let matched = |row: usize| {
            let number = probe_numbers[row];
            partners.get(number as usize).filter(|&&partners| partners > 0).map(|_| number as usize)
        };
        let rows = 0..probe_numbers.len();
        let partners_of = |row: usize| matched(row).map_or(0, |number| partners[number]);
        let mut expected = Summary { rows: rows.clone().into_par_iter().map(partners_of).sum(), checksum: 0 };
        let (digits, places) = (self.digits(self.universe()), Permutation::new(self.universe(), self.seed ^ 0x5eed));
        let (build_widths, probe_widths) =
            (self.payloads.build.widths(self.key_bytes), self.payloads.probe.widths(self.key_bytes));
        for term in terms {
            let sums =
                term.build.map(|at| over_partners(&|slot| self.payload(BUILD, at, build_widths[at], slot) as u64));
            let sums = sums.as_ref().unwrap_or(&partners);
            let product = |row: usize| {
                let number = matched(row)?;
                let key = term.key.map_or(1, |at| {
                    let digit = places.at(number as u64) / digits.pow(at as u32) % digits;
                    match self.keys {
                        Keys::Text => text_value(&key_text(digit)),
                        _ => self.key_integer(digit) as u64,
                    }
                });
                let probe = term.probe.map_or(1, |at| self.payload(PROBE, at, probe_widths[at], row as u64) as u64);
                Some(sums[number].wrapping_mul(key).wrapping_mul(probe))
            };
            let checksum = rows.clone().into_par_iter().filter_map(product).reduce(|| 0, u64::wrapping_add);
            expected.checksum = expected.checksum.wrapping_add(checksum);
        }
        expected
    }
}

/// Salts, so that hashes of the same row number differ by purpose.
const BUILD: u64 = 0xb << 32;
const PROBE: u64 = 0xa << 32;
const STRANGER: u64 = 0x57 << 32;

fn key_text(digit: u64) -> String {
    format!("key-{:016x}", hash(digit))
}

/// Returns the integer type of the given width in bytes.
pub fn integer_type(width: usize) -> DataType {
    if width == 4 { DataType::Int32 } else { DataType::Int64 }
}

/// Makes a column of integers of the given width in bytes, without nulls.
pub fn integers(width: usize, values: impl Iterator<Item = i64>) -> ArrayRef {
    match width {
        4 => Arc::new(Int32Array::from_iter_values(values.map(|value| value as i32))),
        _ => Arc::new(Int64Array::from_iter_values(values)),
    }
}

#[cfg(test)]
mod tests;
