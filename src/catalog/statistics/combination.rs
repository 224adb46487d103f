//! Statistics of several columns together: their combinations of values, and the most frequent
//! combinations. Statistics of single columns do not tell these. Each value of one column may occur
//! with all values of another column, or with only one.

use std::sync::Arc;

use arrow::array::{ArrayRef, RecordBatch, UInt64Array};
use arrow::buffer::NullBuffer;
use rayon::prelude::*;

use super::hash::{self, NULL};
use super::sample::Sample;
use super::sketch::LowestBound;
use super::{HeavyValue, PIECE_ROWS, Sketch, pieces_each};
use crate::Result;
use crate::memory::Interrupt;

/// The combinations of values that rows have in some columns.
#[derive(Clone, Debug)]
pub struct Combination {
    sketch: Sketch,
    sample: Sample,
    heavy: Vec<HeavyValue>,
}

impl Combination {
    /// Collects the combinations of those columns, all of ordered types. Each column has a flag:
    /// true if its nulls are values. A row with any other null has no combination.
    pub(in crate::catalog) fn of(batches: &[RecordBatch], columns: &[(usize, bool)]) -> Self {
        Self::of_interruptible(batches, columns, &Interrupt::default()).expect("nothing interrupts it")
    }

    /// Same as [`of`](Self::of), unless it is interrupted.
    ///
    /// # Errors
    /// The interrupt's.
    pub(in crate::catalog) fn of_interruptible(
        batches: &[RecordBatch],
        columns: &[(usize, bool)],
        interrupt: &Interrupt,
    ) -> Result<Self> {
        let pieces: Vec<(&RecordBatch, usize)> = batches
            .iter()
            .flat_map(|batch| (0..batch.num_rows()).step_by(PIECE_ROWS).map(move |start| (batch, start)))
            .collect();
        let lowest = LowestBound::default();
        let of_some = |(part, pieces): (usize, &[(&RecordBatch, usize)])| {
            let (mut sketch, mut sample) = (Sketch::default(), Sample::new(part as u64));
            for &(batch, start) in pieces {
                interrupt.check()?;
                let rows = PIECE_ROWS.min(batch.num_rows() - start);
                let piece = |&(column, nulls): &(usize, bool)| (batch.column(column).slice(start, rows), nulls);
                let hashes = hashes(columns.iter().map(piece));
                sketch.insert(&hashes);
                sketch.lower_with(&lowest);
                sample.update(&array_of(hashes));
            }
            Ok((sketch, sample))
        };
        let parts = pieces.par_chunks(pieces_each(pieces.len())).enumerate().map(of_some);
        let parts: Vec<(Sketch, Sample)> = parts.collect::<Result<_>>()?;
        let (mut sketch, mut sample) = (Sketch::default(), Sample::new(parts.len() as u64));
        for (of_part, sample_of_part) in parts {
            sketch = sketch.merge(of_part);
            sample.merge(&sample_of_part);
        }
        Ok(Self { heavy: sample.heavy_values(), sketch, sample })
    }

    /// Appends the rows of `later`.
    pub(in crate::catalog) fn merge(self, later: &Self) -> Self {
        let mut sample = self.sample;
        sample.merge(&later.sample);
        Self { heavy: sample.heavy_values(), sketch: self.sketch.merge(later.sketch.clone()), sample }
    }

    /// Returns a sketch of the different combinations.
    pub fn sketch(&self) -> &Sketch {
        &self.sketch
    }

    /// Returns the most frequent combinations, the most frequent first. Combinations that are
    /// frequent in the sample only by chance are left out. Equal combinations of two tables have
    /// equal hashes if their columns were given in the same order.
    pub fn heavy(&self) -> &[HeavyValue] {
        &self.heavy
    }
}

/// Returns a hash of each row's values in those columns. A column's flag is true if its nulls are
/// values.
fn hashes(columns: impl Iterator<Item = (ArrayRef, bool)>) -> Vec<u64> {
    /// Hash of a null that is a value.
    const OF_NULL: u64 = 1;
    let of_column = |(column, with_nulls): (ArrayRef, bool)| {
        let mut hashes = hash::hashes(&column);
        if with_nulls {
            hashes.iter_mut().for_each(|hash| *hash = (*hash).max(OF_NULL));
        }
        hashes
    };
    let combined = |mut before: Vec<u64>, of_column: Vec<u64>| {
        for (hash, of_column) in before.iter_mut().zip(of_column) {
            *hash = if *hash == NULL || of_column == NULL { NULL } else { hash::combined(*hash, of_column) };
        }
        before
    };
    columns.map(of_column).reduce(combined).unwrap_or_default()
}

fn array_of(hashes: Vec<u64>) -> ArrayRef {
    let nulls = NullBuffer::from_iter(hashes.iter().map(|&hash| hash != NULL));
    Arc::new(UInt64Array::new(hashes.into(), Some(nulls)))
}
