//! Messages between the server's process and a device's process.
//!
//! ```text
//!   server                                        process of a device
//!   Open, slabs as they come and go ────────────► opens the device          ──► Opened
//!   tables, each once ──────────────────────────► keeps them until told to forget them
//!   Job, with a first loan of memory ───────────► works on it
//!         ◄── Call: push a batch, lend more memory, ... ─── answered by HostResponse
//!         ◄── Call: more rows of a source ── answered with a segment ── DropSegment
//!         ◄── Progress, and at the end EndLoans and Ended
//!   DropPrepared ───────────────────────────────► frees a prepared join     ──► Dropped
//!   CachedRows, MeasureRates ───────────────────► answered by CachedRows, Rates
//!   Settle, once all slabs so far are mapped ───► answered by Settled
//!         ◄── Heartbeat, whatever jobs do
//!   MapWindow, CheckWindow ─────────────────────► answered by WindowChecked
//!   MeasureCopies ──────────────────────────────► answered by BytesPerSecond
//! ```
//!
//! Addresses are addresses in the server's process.

use std::ops::Range;
use std::sync::Arc;

use arrow::array::{Array, ArrayData, ArrayRef, MutableArrayData, RecordBatch, RecordBatchOptions, make_array};
use arrow::buffer::Buffer;
use arrow_schema::{Schema, SchemaRef};
use serde::{Deserialize, Serialize};

use super::{MemoryUse, Opening};
use crate::catalog::Table;
use crate::device::{CacheStats, Copies, DeviceId, DeviceInfo, Pattern};
use crate::join::{NearRows, Report, Task};
use crate::memory::{ArrayParts, Place, Span, describe, restore};
use crate::planner::Rates;
use crate::{Error, Result};

/// Message from the server to the process of a device.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum ToChild {
    /// The first message.
    Open(Opening),
    /// Caches columns of joins, in at most `limit_bytes` of the device's memory.
    EnableCache {
        limit_bytes: u64,
    },
    /// The file of the slab comes with the message.
    Slab {
        address: u64,
        len: u64,
    },
    Unmapped {
        address: u64,
    },
    /// Describes a table, which tasks will name by its number.
    Table(TableParts),
    /// Forgets tables that no task will name again.
    Forget {
        tables: Vec<u64>,
    },
    /// Lets the device write into the window of a peer, and writes a pattern there. The window's
    /// file comes with the message.
    MapWindow {
        question: u64,
        peer: DeviceId,
        bytes: usize,
        is_host: bool,
        pattern: Pattern,
    },
    /// Takes a peer's rows from a window in host memory, whose file comes with the message, or from
    /// the device's own. Looks for the peer's pattern there.
    CheckWindow {
        question: u64,
        writer: DeviceId,
        host_bytes: Option<usize>,
        pattern: Pattern,
    },
    UnmapWindow {
        peer: DeviceId,
    },
    /// Gives a job. The file of the gang's board comes with the message of a rank.
    Job(Box<Job>),
    Cancel {
        job: u64,
    },
    HostResponse {
        call: u64,
        answer: Result<HostResponse>,
    },
    /// Asks when all slabs so far are mapped.
    Settle {
        question: u64,
    },
    CachedRows {
        question: u64,
        table: u64,
    },
    MeasureRates {
        question: u64,
    },
    MeasureCopies {
        question: u64,
        copies: Copies,
    },
    DropPrepared {
        question: u64,
        prepared: u64,
    },
}

/// Job to work on.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Job {
    pub(super) number: u64,
    /// `None`: the device runs the job alone.
    pub(super) member: Option<GangMember>,
    /// First loan of host memory, if some is available at once.
    pub(super) loan: Option<Span>,
    pub(super) work: Work,
}

/// Work of a job. `device_bytes` is the part of the device's memory that the join may use. `None`:
/// all of it.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Work {
    Run {
        task: Task<u64>,
        device_bytes: Option<u64>,
    },
    /// Prepares a join with all rows of the table `build`. Later jobs name the join by the number
    /// of this job.
    Prepare {
        task: Task<u64>,
        device_bytes: Option<u64>,
        build: u64,
        is_stored: bool,
    },
    /// Probes with the rows that the job asks for.
    Probe {
        prepared: u64,
        total_rows: Option<u64>,
        is_stored: bool,
        is_numbered: bool,
    },
    Finish {
        prepared: u64,
    },
}

/// Number of a rank, and the devices of all ranks of its gang.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct GangMember {
    pub(super) rank: usize,
    pub(super) devices: Vec<DeviceId>,
    /// NUMA node of the rank, and those of the rows.
    pub(super) near: NearRows,
}

/// Message from the process of a device to the server.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum FromChild {
    Opened(Result<Opened>),
    /// Shows that the process is not stalled.
    Heartbeat,
    /// Asks for something on behalf of a job. The job waits for the answer, except to a push. After
    /// a push, the job may send more messages before the server has pushed the batch. First, the
    /// job gives back lent bytes that it does not use.
    Call {
        call: u64,
        job: u64,
        unused: Vec<Span>,
        want: HostRequest,
    },
    /// Gives back lent bytes that a job does not use.
    GiveBack {
        job: u64,
        unused: Vec<Span>,
    },
    /// Gives back all that is lent to a job.
    EndLoans {
        job: u64,
    },
    Release {
        reservation: u64,
    },
    /// Reports that a job has no more use for the buffers of a segment.
    DropSegment {
        job: u64,
        segment: u64,
    },
    /// Stops the source of a job's rows, because its rows cannot be joined.
    StopRows {
        job: u64,
        error: Error,
    },
    Progress {
        job: u64,
        report: Report,
    },
    /// Reports the state of the device, if it has changed.
    State(State),
    Settled {
        question: u64,
    },
    CachedRows {
        question: u64,
        kept: Vec<(usize, Range<u64>)>,
    },
    Rates {
        question: u64,
        rates: Option<Box<Rates>>,
    },
    WindowChecked {
        question: u64,
        outcome: Result<()>,
    },
    BytesPerSecond {
        question: u64,
        rate: Result<f64>,
    },
    /// Reports that a prepared join is dropped.
    Dropped {
        question: u64,
        state: State,
    },
    Ended {
        job: u64,
        outcome: Result<()>,
        report: Report,
        state: State,
        lost: Option<Error>,
    },
}

/// Properties of a device that was opened.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Opened {
    pub(super) info: DeviceInfo,
    pub(super) memory_bytes: u64,
    pub(super) jobs_max: usize,
    /// Bytes of the device's window. If there are any, its file comes with the message.
    pub(super) window_bytes: usize,
}

/// State that a device reports.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct State {
    pub(super) memory: MemoryUse,
    pub(super) cache: Option<CacheStats>,
    /// Lines that the log of the device's process dropped.
    pub(super) dropped_lines: u64,
}

/// Request of a job to the server.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum HostRequest {
    /// Lends a region of at least `len` bytes.
    Lend {
        len: usize,
        purpose: String,
    },
    Reserve {
        bytes: u64,
        purpose: String,
    },
    FreeBytes,
    /// Pushes a batch. `pieces` are the lent bytes that it refers to, and the job does not write to
    /// them any more.
    Push {
        batch: BatchParts,
        pieces: Vec<Span>,
        shared: Option<Vec<bool>>,
    },
    /// Takes the next segment of the job's rows, once some have arrived.
    NextSegment,
    ReadersMayHelp {
        waited_seconds: f64,
    },
}

/// Answer of the server to a [`HostRequest`].
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum HostResponse {
    Lent(Span),
    Reserved {
        reservation: u64,
    },
    FreeBytes(u64),
    Pushed,
    /// Answers [`HostRequest::NextSegment`]; `None` after the last row.
    Segment(Option<Segment>),
    ReadersMayHelp(bool),
}

/// Segment of the rows of a source.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Segment {
    /// Number of a table that the process knows.
    Stored(u64),
    /// Rows that no other job reads.
    Arriving(TableParts),
}

/// Unused bytes that may be sent with a slice, because copying the slice would cost more.
const SLICE_BYTES_MIN: usize = 4 << 10;

/// Copies the values of `array` to buffers of their own; `None` if Arrow cannot copy the type.
fn copied(array: &ArrayData) -> Option<ArrayData> {
    let mut copy = MutableArrayData::new(vec![array], false, array.len());
    copy.try_extend(0, 0, array.len()).ok()?;
    Some(copy.freeze())
}

/// Batch without its schema.
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
            // If the bytes of a slice have to be sent, send only the slice and not all of its
            // buffers.
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

    /// Calls `show` with every place of the batch.
    pub(super) fn each_place<'a>(&'a self, show: &mut dyn FnMut(&'a Place)) {
        self.columns.iter().for_each(|column| column.each_place(show));
    }

    pub(super) fn restore(&self, schema: &SchemaRef, find: &dyn Fn(&Place) -> Result<Buffer>) -> Result<RecordBatch> {
        let columns = schema.fields().iter().zip(&self.columns);
        let columns = columns.map(|(field, parts)| restore(field.data_type(), parts, find).map(make_array));
        let columns: Vec<ArrayRef> = columns.collect::<Result<_>>()?;
        let options = RecordBatchOptions::new().with_row_count(Some(self.rows));
        RecordBatch::try_new_with_options(schema.clone(), columns, &options)
            .map_err(|error| Error::Internal(format!("a batch from another process is invalid: {error}")))
    }
}

/// Parts of a table that a join reads.
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
