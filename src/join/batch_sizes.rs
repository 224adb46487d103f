//! How many rows of a result are treated together.

use arrow::datatypes::SchemaRef;

use crate::columns::rows_max;

/// Bytes of a message that is large enough for its overhead not to count.
pub(crate) const MESSAGE_BYTES: usize = 4 << 20;

/// How many rows are treated together on their way out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BatchSizes {
    /// Rows per batch, at most.
    pub(super) batch_rows: usize,
    /// Rows that are gathered at once: as many batches as make up what a device gathers at once, and at least one.
    pub(super) gather_rows: usize,
    /// Bytes that a device gathers at once.
    gather_bytes: usize,
    /// Rows of one array, at most.
    rows_max: usize,
}

impl BatchSizes {
    /// Batches of about one wire message, or of as many rows as the client asked for, for rows of that many bytes on average;
    /// and as many of them at once as make up `gather_bytes`.
    pub(crate) fn new(asked_for: Option<usize>, row_bytes: f64, gather_bytes: usize) -> Self {
        const ROWS_MAX: usize = 1 << 20;
        let rows_of = |bytes: usize| (bytes as f64 / row_bytes.max(1.0)) as usize;
        let batch_rows = asked_for.unwrap_or(rows_of(MESSAGE_BYTES)).clamp(1, ROWS_MAX);
        let gather_rows = batch_rows * (rows_of(gather_bytes) / batch_rows).max(1);
        Self { batch_rows, gather_rows, gather_bytes, rows_max: usize::MAX }
    }

    /// The same, of no more rows than an array of each of these columns can have.
    pub(super) fn of_columns(self, schema: &SchemaRef) -> Self {
        let rows_max = schema.fields().iter().map(|field| rows_max(field.data_type())).min().unwrap_or(usize::MAX);
        let batch_rows = self.batch_rows.min(rows_max).max(1);
        let gather_rows = batch_rows * (self.gather_rows.min(rows_max) / batch_rows).max(1);
        Self { batch_rows, gather_rows, rows_max, ..self }
    }

    /// Rows that are gathered at once where only some of their columns are, of that many bytes a row: as many as elsewhere, or as make up half
    /// as many bytes.
    pub(super) fn gather_rows_of(&self, row_bytes: u64) -> usize {
        let rows = self.gather_bytes / 2 / (row_bytes as usize).max(1);
        rows.clamp(self.gather_rows, self.rows_max.max(self.gather_rows))
    }

    /// Rows of a stretch of a table, on average and at the least, that a result shares, but for those at both ends of what is gathered
    /// at once. Batches of less than a quarter of what makes a message would be put together on their way to the client, which costs
    /// as much as gathering them.
    pub(crate) fn stretch_rows_min(&self) -> usize {
        self.batch_rows.div_ceil(4)
    }
}
