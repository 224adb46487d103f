//! Number of rows of a result that are processed together.

use arrow::datatypes::SchemaRef;

use crate::columns::rows_max;

/// Bytes of a message that is so large that its overhead does not count.
pub(crate) const MESSAGE_BYTES: usize = 4 << 20;

/// Number of rows that are processed together on their way out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BatchSizes {
    /// Rows per batch, at most.
    pub(super) batch_rows: usize,
    /// Rows gathered at once: as many whole batches as fit in `gather_bytes`, but at least one.
    pub(super) gather_rows: usize,
    gather_bytes: usize,
    /// Rows of one array, at most.
    rows_max: usize,
}

impl BatchSizes {
    /// Sizes batches to about one wire message, or to the number of rows that the client asked for.
    /// `row_bytes` is the mean size of a row. `gather_bytes` limits the batches that are gathered
    /// at once.
    pub(crate) fn new(asked_for: Option<usize>, row_bytes: f64, gather_bytes: usize) -> Self {
        const ROWS_MAX: usize = 1 << 20;
        let rows_of = |bytes: usize| (bytes as f64 / row_bytes.max(1.0)) as usize;
        let batch_rows = asked_for.unwrap_or(rows_of(MESSAGE_BYTES)).clamp(1, ROWS_MAX);
        let gather_rows = batch_rows * (rows_of(gather_bytes) / batch_rows).max(1);
        Self { batch_rows, gather_rows, gather_bytes, rows_max: usize::MAX }
    }

    /// Limits the sizes so that each column of `schema` fits in one array.
    pub(super) fn of_columns(self, schema: &SchemaRef) -> Self {
        let rows_max = schema.fields().iter().map(|field| rows_max(field.data_type())).min().unwrap_or(usize::MAX);
        let batch_rows = self.batch_rows.min(rows_max).max(1);
        let gather_rows = batch_rows * (self.gather_rows.min(rows_max) / batch_rows).max(1);
        Self { batch_rows, gather_rows, rows_max, ..self }
    }

    /// Returns the rows to gather at once if only some columns are gathered, with `row_bytes` bytes
    /// per row. They take half of `gather_bytes`, but are at least `gather_rows`.
    pub(super) fn gather_rows_of(&self, row_bytes: u64) -> usize {
        let rows = self.gather_bytes / 2 / (row_bytes as usize).max(1);
        rows.clamp(self.gather_rows, self.rows_max.max(self.gather_rows))
    }

    /// Returns the least mean length, in rows, at which a result shares slices of a table. The
    /// first and the last slice gathered at once do not count. Batches of less than a quarter of a
    /// message would be merged on their way to the client, which costs as much as gathering them.
    pub(crate) fn slice_rows_min(&self) -> usize {
        self.batch_rows.div_ceil(4)
    }
}
