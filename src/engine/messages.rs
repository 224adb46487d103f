//! What the server's process and a device's say to each other.
//!
//! ```text
//!   server                                        process of a device
//!   Open, slabs as they come and go ────────────► opens the device          ──► Opened
//!   tables, each once ──────────────────────────► keeps them until it is told to forget
//!   Run ────────────────────────────────────────► runs the task
//!         ◄── Call: a piece of memory, a batch to be pushed, ... ── answered by Answer
//!         ◄── Progress, and at the end Ended
//!   Ask: what is kept of a table, rates ────────► answered by Reply
//! ```
//!
//! Addresses are the server's.

use std::ops::Range;
use std::sync::Arc;

use arrow::array::{Array, ArrayData, ArrayRef, MutableArrayData, RecordBatch, RecordBatchOptions, make_array};
use arrow::buffer::Buffer;
use arrow_schema::{Schema, SchemaRef};
use serde::{Deserialize, Serialize};

use super::{MemoryUse, Opening};
use crate::catalog::Table;
use crate::device::{CacheStats, DeviceInfo};
use crate::join::{Report, Task};
use crate::memory::{ArrayParts, Place, describe, restore};
use crate::planner::Rates;
use crate::{Error, Result};

/// From the server to the process of a device.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum ToDevice {
    /// The first message: what device to open.
    Open(Opening),
    /// Keep columns of joins, in so many bytes of the device's memory.
    KeepColumns { limit_bytes: u64 },
    /// A slab of the arena; its file comes along.
    Slab { address: u64, len: u64 },
    /// A slab is no more.
    Unmapped { address: u64 },
    /// A table that tasks will name by its number.
    Table(TableParts),
    /// No task will name these any more.
    Forget { tables: Vec<u64> },
    /// Run a join.
    Run(Box<Run>),
    /// Stop a join.
    Cancel { job: u64 },
    /// What became of a call.
    Answer { call: u64, answer: Result<Answer> },
    /// What of a table the device keeps.
    KeptRows { question: u64, table: u64 },
    /// What the device does how fast, measured now.
    MeasureRates { question: u64 },
}

/// A join to run.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Run {
    pub(super) job: u64,
    pub(super) task: Task<u64>,
    /// The part of the device's memory that it has; `None`: it is alone.
    pub(super) device_bytes: Option<u64>,
}

/// From the process of a device to the server.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum FromDevice {
    /// The answer to [`ToDevice::Open`].
    Opened(Result<Opened>),
    /// A job wants something, and waits for the answer, but to a push: what it says next is heard when that was done.
    Call { call: u64, job: u64, want: Want },
    /// A piece is no longer needed but for its first bytes.
    Shorten { address: u64, len: u64 },
    /// A piece is no longer needed.
    GiveBack { address: u64 },
    /// Bytes are no longer held.
    LetGo { held: u64 },
    /// What a job tells of itself.
    Progress { job: u64, report: Report },
    /// What the device tells of itself, when that has changed.
    State(State),
    /// The answer to [`ToDevice::KeptRows`].
    KeptRows { question: u64, kept: Vec<(usize, Range<u64>)> },
    /// The answer to [`ToDevice::MeasureRates`].
    Rates { question: u64, rates: Option<Box<Rates>> },
    /// A job has come to its end, and holds nothing any more.
    Ended { job: u64, outcome: Result<()>, report: Report, lost: Option<Error> },
}

/// A device that was opened.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Opened {
    pub(super) info: DeviceInfo,
    pub(super) memory_bytes: u64,
    pub(super) jobs_max: usize,
}

/// What a device tells of itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct State {
    pub(super) memory: MemoryUse,
    pub(super) cache: Option<CacheStats>,
    /// Lines of its log.
    pub(super) dropped_lines: u64,
}

/// What a job wants of the server.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Want {
    Piece { len: u64, purpose: String },
    Hold { bytes: u64, purpose: String },
    FreeBytes,
    Push { batch: BatchParts, shared: Option<Vec<bool>> },
    ReadersMayHelp { waited_seconds: f64 },
}

/// What it is given.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Answer {
    Piece { address: u64 },
    Held { held: u64 },
    FreeBytes(u64),
    Pushed,
    ReadersMayHelp(bool),
}

/// Bytes that may be sent in vain rather than copied first.
const SLICE_BYTES_MIN: usize = 4 << 10;

/// The same values in buffers of their own; `None` where Arrow makes none.
fn copied(array: &ArrayData) -> Option<ArrayData> {
    let mut copy = MutableArrayData::new(vec![array], false, array.len());
    copy.try_extend(0, 0, array.len()).ok()?;
    Some(copy.freeze())
}

/// A batch but for its schema.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct BatchParts {
    rows: usize,
    columns: Vec<ArrayParts>,
}

impl BatchParts {
    pub(super) fn of(batch: &RecordBatch, place_of: &dyn Fn(&Buffer) -> Place) -> Self {
        let columns = batch.columns().iter().map(|column| {
            let column = column.to_data();
            let parts = describe(&column, place_of);
            // Of a slice of what has to be sent, only the slice is.
            let needed = column.get_slice_memory_size().unwrap_or(usize::MAX);
            let is_wasteful = parts.sent_bytes() / 2 > needed.saturating_add(SLICE_BYTES_MIN);
            let copy = if is_wasteful { copied(&column) } else { None };
            copy.map_or(parts, |copy| describe(&copy, place_of))
        });
        Self { rows: batch.num_rows(), columns: columns.collect() }
    }

    #[cfg(test)]
    pub(super) fn sent_bytes(&self) -> usize {
        self.columns.iter().map(ArrayParts::sent_bytes).sum()
    }

    /// Shows every place that it has.
    pub(super) fn each_place(&self, show: &mut dyn FnMut(&Place)) {
        self.columns.iter().for_each(|column| column.each_place(show));
    }

    pub(super) fn restore(&self, schema: &SchemaRef, find: &dyn Fn(&Place) -> Result<Buffer>) -> Result<RecordBatch> {
        let columns = schema.fields().iter().zip(&self.columns);
        let columns = columns.map(|(field, parts)| restore(field.data_type(), parts, find).map(make_array));
        let columns: Vec<ArrayRef> = columns.collect::<Result<_>>()?;
        let options = RecordBatchOptions::new().with_row_count(Some(self.rows));
        RecordBatch::try_new_with_options(schema.clone(), columns, &options)
            .map_err(|error| Error::Internal(format!("a batch of another process: {error}")))
    }
}

/// A table, as far as a join reads it.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct TableParts {
    pub(super) number: u64,
    name: String,
    schema: Schema,
    batches: Vec<BatchParts>,
}

impl TableParts {
    pub(super) fn of(number: u64, table: &Table, place_of: &dyn Fn(&Buffer) -> Place) -> Self {
        let batches = table.batches.iter().map(|batch| BatchParts::of(batch, place_of)).collect();
        Self { number, name: table.name.clone(), schema: Schema::clone(&table.schema), batches }
    }

    pub(super) fn restore(self, find: &dyn Fn(&Place) -> Result<Buffer>) -> Result<Table> {
        let schema = Arc::new(self.schema);
        let batches = self.batches.iter().map(|batch| batch.restore(&schema, find)).collect::<Result<_>>()?;
        Ok(Table::unknown(self.name, schema, batches))
    }
}
