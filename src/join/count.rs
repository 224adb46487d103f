//! Joins that only count the rows of their result. They run up to the matches, which give the
//! number of rows. They make no pairs, and read no column except the keys.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use arrow::array::{Int64Array, RecordBatch};
use arrow::datatypes::SchemaRef;

use super::BatchSink;
use crate::{Error, Result};

/// Takes batches without columns, and adds up their rows.
#[derive(Debug, Default)]
pub(super) struct RowCount(AtomicU64);

impl BatchSink for RowCount {
    fn push(&self, batch: RecordBatch) -> Result<()> {
        self.0.fetch_add(batch.num_rows() as u64, Ordering::Relaxed);
        Ok(())
    }
}

impl RowCount {
    /// Returns the number of rows so far.
    pub(super) fn rows(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Returns the result of a join that counts rows: one row, with the number.
pub(super) fn batch_of_count(rows: u64, schema: SchemaRef) -> Result<RecordBatch> {
    let rows = i64::try_from(rows)
        .map_err(|_| Error::Unsupported("the join has more rows than a signed 64-bit integer can count".into()))?;
    RecordBatch::try_new(schema, vec![Arc::new(Int64Array::from(vec![rows]))])
        .map_err(|error| Error::Internal(format!("returning the row count of a join: {error}")))
}
