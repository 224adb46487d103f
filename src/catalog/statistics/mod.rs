//! Statistics of a column, taken batch by batch while it is uploaded or written by a join.
//!
//! ```text
//!   array ─┬─ numbers / strings / dictionary ─► Summary (min, max, order) ─┐
//!          └─ sample: at most 8192 rows of the column, hashed ─────────────┴─► StatisticsCollector
//!                                                                                      ▼
//!                                                                              ColumnStatistics
//! ```
//!
//! Minimum, maximum, nulls, order and the longest value are exact. The number of distinct values
//! and the shares of the most frequent values are estimates from the sample. The number of distinct
//! values is exact if the column is in order. If only its batches are in order, as when several
//! streams filled the table with ordered rows, there is an upper bound.
//!
//! The batches of a join's result are divided among threads (`collecting.rs`). A stream of an
//! upload takes the statistics of its own rows.
//!
//! Each column costs one pass over its values. The check for order ends at the first row that is
//! out of order.
//!
//! A sample of rows cannot tell a column of ten million values from one of twenty. A [`Sketch`]
//! knows a column's different values ([`Table::sketch`](super::Table::sketch)), and a
//! [`Combination`] those of several columns together
//! ([`Table::combination`](super::Table::combination)). Taking both from every column of every
//! upload would cost more time than all other work of an upload. So each is taken when the first
//! join that needs it is planned, and then cached.

mod collecting;
mod combination;
mod dictionary;
mod hash;
mod numbers;
mod sample;
mod sketch;
mod strings;
mod summary;
mod value;

use arrow::array::{Array, ArrayRef, AsArray, RunArray};
use arrow::datatypes::{ArrowNativeType, DataType, Int16Type, Int32Type, Int64Type, RunEndIndexType};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};

pub(super) use collecting::Collection;
pub use combination::Combination;
pub use sketch::{Overlap, Sketch};
pub use value::Value;

use sample::Sample;
use sketch::LowestBound;
use summary::Summary;

use crate::Result;
use crate::memory::Interrupt;

/// Statistics of a column.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ColumnStatistics {
    pub nulls: u64,
    /// The smallest value, exact; `None` when unknown (all null, or a type without order).
    pub min: Option<Value>,
    /// The largest value, exact; `None` when unknown.
    pub max: Option<Value>,
    /// Number of different values, estimated from a sample of rows. For columns of many values,
    /// [`Sketch`] is more accurate. `None` when unknown; exact when `ascending`.
    pub distinct: Option<f64>,
    /// True if the upload saw all rows in ascending order of this column, nulls first. Exact,
    /// except that it is false for dictionaries with float values. A column without rows is in
    /// order; a column of a type without order is not.
    pub ascending: bool,
    /// True if each row is greater than the row before it, with at most one null: `ascending`, and
    /// no value repeats.
    pub unique_ascending: bool,
    /// Share of sampled rows that have the most frequent value, 0 to 1; nulls do not count as a
    /// value. Near `1 / distinct` without skew.
    pub heaviest_share: f64,
    /// The most frequent values, the most frequent first. Values that are frequent in the sample
    /// only by chance are left out. For a column of few values, the list has all of them.
    pub heavy: Vec<HeavyValue>,
    /// Bytes of the longest value, for strings, binaries and dictionaries of them; `None` for other
    /// types.
    pub max_value_bytes: Option<u64>,
}

/// A value that many rows of a column have.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct HeavyValue {
    /// Hash of the value. Values that are equal as keys of a join have equal hashes, whatever their
    /// types.
    pub hash: u64,
    /// Share of sampled rows that have the value, 0 to 1; null rows count as rows.
    pub share: f64,
    /// Index of a row that has the value.
    pub row: u64,
}

/// Takes statistics of one column, batch after batch.
#[derive(Clone, Debug)]
pub struct StatisticsCollector {
    rows: u64,
    nulls: u64,
    /// `None` before the first value, for a type without order, and after a value that [`Value`]
    /// cannot hold.
    range: Option<(Value, Value)>,
    /// True if `range` covers all values so far.
    range_known: bool,
    ascending: bool,
    /// True if no value repeats, given that the rows are ascending.
    strict: bool,
    /// Runs of equal values so far; `None` once a piece of the column (batch, part) is not
    /// ascending. If all rows are ascending, the number of runs is the number of different values.
    /// Otherwise it is an upper bound of that number.
    runs: Option<u64>,
    max_value_bytes: Option<u64>,
    sample: Option<Sample>,
}

impl StatisticsCollector {
    /// Makes a collector for a column of that type.
    pub fn new(data_type: &DataType) -> Self {
        Self::seeded(data_type, 0)
    }

    /// Makes a collector whose sample is drawn with `seed`. Collectors of different seeds that see
    /// the same rows differ in their estimates. Collectors that will be merged should have
    /// different seeds.
    pub fn seeded(data_type: &DataType, seed: u64) -> Self {
        Self::following(data_type, seed, 0)
    }

    /// Same as [`seeded`](Self::seeded), for rows that follow `rows_before` rows of the column. Its
    /// sample leaves out rows that a sample of all rows would leave out.
    fn following(data_type: &DataType, seed: u64, rows_before: u64) -> Self {
        let ordered = summary::has_order(data_type);
        Self {
            rows: 0,
            nulls: 0,
            range: None,
            range_known: ordered,
            ascending: ordered,
            strict: ordered,
            runs: ordered.then_some(0),
            max_value_bytes: summary::has_value_bytes(data_type).then_some(0),
            sample: ordered.then(|| Sample::following(seed, rows_before)),
        }
    }

    /// Adds the next rows of the column, unless it is interrupted. An interrupt leaves the
    /// statistics of some of the rows.
    ///
    /// # Errors
    /// The interrupt's.
    pub(super) fn update_interruptible(&mut self, array: &ArrayRef, interrupt: &Interrupt) -> Result<()> {
        let rows = unchecked_rows(array);
        for start in (0..array.len()).step_by(rows) {
            interrupt.check()?;
            self.update(&array.slice(start, rows.min(array.len() - start)));
        }
        Ok(())
    }

    /// Returns about the heap memory of the sample of a column of `rows` rows, in bytes.
    pub(super) fn sample_bytes(rows: u64) -> u64 {
        Sample::bytes(rows)
    }

    /// Adds the next rows of the column.
    pub fn update(&mut self, array: &ArrayRef) {
        let nulls = null_count(array);
        if !array.is_empty() && self.sample.is_some() {
            let summary = summary::summarize(array, nulls as usize, self.runs.is_some());
            let runs = summary.ascending.then_some(summary.runs);
            self.add(nulls, summary, runs, array.len() as u64);
            self.sample.as_mut().expect("checked above").update(array);
        } else {
            self.nulls += nulls;
            self.rows += array.len() as u64;
        }
    }

    /// Appends the rows that `later` saw to the rows that this collector saw.
    pub fn merge(&mut self, later: &Self) {
        if later.rows == 0 {
            return;
        }
        let summary = Summary {
            range: later.range.clone(),
            range_known: later.range_known,
            ascending: later.ascending,
            strict: later.strict,
            runs: later.runs.unwrap_or(0),
            max_value_bytes: later.max_value_bytes,
        };
        self.add(later.nulls, summary, later.runs, later.rows);
        if let (Some(sample), Some(later)) = (&mut self.sample, &later.sample) {
            sample.merge(later);
        }
    }

    /// Returns the statistics of the rows so far.
    pub fn finish(&self) -> ColumnStatistics {
        let values = self.rows - self.nulls;
        let (min, max) = self.range.clone().unzip();
        let known = if self.ascending { self.runs.map(|runs| runs as f64) } else { None };
        let estimated = |estimate: f64| {
            known.unwrap_or_else(|| {
                within_range(estimate, &self.range).min(self.runs.map_or(f64::INFINITY, |runs| runs as f64))
            })
        };
        let distinct = self.sample.as_ref().map(|sample| estimated(sample.distinct(values)));
        ColumnStatistics {
            nulls: self.nulls,
            min,
            max,
            distinct,
            ascending: self.ascending,
            unique_ascending: self.ascending && self.strict && self.nulls <= 1,
            heaviest_share: self.sample.as_ref().map_or(0.0, Sample::heaviest_share),
            heavy: self.sample.as_ref().map_or_else(Vec::new, Sample::heavy_values),
            max_value_bytes: self.max_value_bytes,
        }
    }

    /// Returns a sketch of the values of `arrays`, which are the whole column; `None` for a type
    /// that is not sampled.
    pub(super) fn sketch<'a>(&self, arrays: impl Iterator<Item = &'a ArrayRef>) -> Option<Sketch> {
        self.sketch_interruptible(arrays, &Interrupt::default()).unwrap_or_default()
    }

    /// Same as [`sketch`](Self::sketch), unless it is interrupted.
    ///
    /// # Errors
    /// The interrupt's.
    pub(super) fn sketch_interruptible<'a>(
        &self,
        arrays: impl Iterator<Item = &'a ArrayRef>,
        interrupt: &Interrupt,
    ) -> Result<Option<Sketch>> {
        if self.sample.is_none() {
            return Ok(None);
        }
        let pieces: Vec<ArrayRef> = arrays.flat_map(pieces).collect();
        let lowest = LowestBound::default();
        let of_some = |pieces: &[ArrayRef]| {
            let mut sketch = Sketch::default();
            for piece in pieces {
                interrupt.check()?;
                sketch.insert(&hash::hashes(piece));
                sketch.lower_with(&lowest);
            }
            Ok(sketch)
        };
        let sketches = pieces.par_chunks(pieces_each(pieces.len())).map(of_some);
        sketches.try_reduce(Sketch::default, |one, other| Ok(one.merge(other))).map(Some)
    }

    /// True if the column's values are sampled: its type has an order.
    pub(super) fn is_sampled(&self) -> bool {
        self.sample.is_some()
    }

    fn add(&mut self, nulls: u64, later: Summary, runs: Option<u64>, rows: u64) {
        let seen_values = self.rows > self.nulls;
        self.ascending &= later.ascending && !(nulls > 0 && seen_values);
        self.runs = self.runs.zip(runs).map(|(before, after)| before + after);
        if self.ascending
            && let (Some((_, last)), Some((first, _))) = (&self.range, &later.range)
        {
            // In a column that is in order so far, the last value is the largest.
            self.ascending = last <= first;
            self.strict &= last < first;
            self.runs = self.runs.map(|runs| runs - u64::from(last == first));
        }
        self.strict &= later.strict;
        self.range_known &= later.range_known;
        self.range = match (self.range.take(), later.range) {
            _ if !self.range_known => None,
            (Some((a_min, a_max)), Some((b_min, b_max))) => Some((a_min.min(b_min), a_max.max(b_max))),
            (one, other) => one.or(other),
        };
        self.max_value_bytes = self.max_value_bytes.max(later.max_value_bytes);
        self.nulls += nulls;
        self.rows += rows;
        // Without a range there is no value to compare the next batch's first value with.
        self.ascending &= self.range_known;
    }
}

/// Returns the statistics of each column, computed on all processors.
///
/// # Errors
/// The interrupt's.
pub(super) fn finished(collectors: &[StatisticsCollector], interrupt: &Interrupt) -> Result<Vec<ColumnStatistics>> {
    let finish = |collector: &StatisticsCollector| interrupt.check().map(|()| collector.finish());
    collectors.par_iter().map(finish).collect()
}

/// Returns the number of rows of an array whose statistics are taken between two checks of an
/// interrupt. It is at least 1. Types whose slices cost as much as the whole are not cut.
fn unchecked_rows(array: &ArrayRef) -> usize {
    /// About a millisecond of work.
    const BYTES: usize = 4 << 20;
    let bytes = match array.data_type() {
        DataType::Utf8View => array.as_string_view().total_buffer_bytes_used() + array.len() * size_of::<u128>(),
        DataType::BinaryView => array.as_binary_view().total_buffer_bytes_used() + array.len() * size_of::<u128>(),
        flat if summary::has_order(flat) && !matches!(flat, DataType::Dictionary(..)) => {
            array.to_data().get_slice_memory_size().unwrap_or(0)
        }
        _ => 0,
    };
    array.len().div_ceil(bytes.div_ceil(BYTES).max(1)).max(1)
}

/// Returns the number of rows that are null. Runs are counted without making a bit for each row: a
/// few bytes may stand for thousands of millions of rows.
fn null_count(array: &ArrayRef) -> u64 {
    fn of_runs<R: RunEndIndexType>(runs: &RunArray<R>) -> u64 {
        let Some(nulls) = runs.values().logical_nulls().filter(|nulls| nulls.null_count() > 0) else { return 0 };
        let (start, end) = (runs.offset(), runs.offset() + runs.len());
        let mut before = start;
        let mut count = 0;
        for (run, run_end) in runs.run_ends().values().iter().enumerate() {
            let run_end = run_end.as_usize().clamp(before, end);
            count += if nulls.is_null(run) { run_end - before } else { 0 };
            before = run_end;
        }
        count as u64
    }
    match array.data_type() {
        DataType::RunEndEncoded(ends, _) => match ends.data_type() {
            DataType::Int16 => of_runs(array.as_run::<Int16Type>()),
            DataType::Int32 => of_runs(array.as_run::<Int32Type>()),
            _ => of_runs(array.as_run::<Int64Type>()),
        },
        _ => array.logical_null_count() as u64,
    }
}

/// Rows per piece, few enough that their hashes fit in a processor's cache.
const PIECE_ROWS: usize = 4096;

/// Cuts an array into pieces of `PIECE_ROWS` rows.
fn pieces(array: &ArrayRef) -> impl Iterator<Item = ArrayRef> {
    (0..array.len()).step_by(PIECE_ROWS).map(|start| array.slice(start, PIECE_ROWS.min(array.len() - start)))
}

/// Number of pieces per sketch, given the number of all pieces. Each thread fills only a few
/// sketches, because a new sketch has no bound and takes every hash.
fn pieces_each(pieces: usize) -> usize {
    pieces.div_ceil(4 * rayon::current_num_threads()).max(1)
}

/// Caps an estimate of distinct integers at the number of integers in `range`.
fn within_range(distinct: f64, range: &Option<(Value, Value)>) -> f64 {
    match range {
        Some((Value::Integer(min), Value::Integer(max))) => distinct.min(max.wrapping_sub(*min) as u128 as f64 + 1.0),
        _ => distinct,
    }
}

#[cfg(test)]
mod tests;
