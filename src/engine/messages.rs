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

use std::collections::{BTreeSet, HashSet};
use std::ops::Range;
use std::sync::Arc;

use arrow::array::{Array, ArrayData, ArrayRef, MutableArrayData, RecordBatch, RecordBatchOptions, make_array};
use arrow::buffer::Buffer;
use arrow_schema::{Schema, SchemaRef};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use super::{MemoryUse, Opening};
use crate::catalog::Table;
use crate::columns::KeyFacts;
use crate::device::{CacheStats, DeviceInfo};
use crate::join::{Arrangement, Expected, JoinKey, JoinKind, OutputColumn, PhaseRecord, Report, Side, Task, TaskSide};
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
    pub(super) task: TaskParts,
    /// The part of the device's memory that it has; `None`: it is alone.
    pub(super) device_bytes: Option<u64>,
}

/// From the process of a device to the server.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum FromDevice {
    /// The answer to [`ToDevice::Open`].
    Opened(Result<Opened>),
    /// A job wants something, and waits for the answer.
    Call { call: u64, job: u64, want: Want },
    /// A piece is no longer needed but for its first bytes.
    Shorten { address: u64, len: u64 },
    /// A piece is no longer needed.
    GiveBack { address: u64 },
    /// Bytes are no longer held.
    LetGo { held: u64 },
    /// What a job tells of itself.
    Progress { job: u64, report: ReportParts },
    /// What the device tells of itself, when that has changed.
    State(State),
    /// The answer to [`ToDevice::KeptRows`].
    KeptRows { question: u64, kept: Vec<(usize, Range<u64>)> },
    /// The answer to [`ToDevice::MeasureRates`].
    Rates { question: u64, rates: Option<Box<Rates>> },
    /// A job has come to its end, and holds nothing any more.
    Ended { job: u64, outcome: Result<()>, report: ReportParts, lost: Option<Error> },
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

/// [`Report`], whose phases have names of the program's.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct ReportParts {
    work_done: u64,
    work_total: u64,
    phases: Vec<PhaseParts>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct PhaseParts {
    name: String,
    seconds: f64,
    bytes: u64,
    kept_bytes: u64,
    in_place_bytes: u64,
}

impl From<Report> for ReportParts {
    fn from(report: Report) -> Self {
        let phase = |phase: PhaseRecord| {
            let PhaseRecord { name, seconds, bytes, kept_bytes, in_place_bytes } = phase;
            PhaseParts { name: name.into(), seconds, bytes, kept_bytes, in_place_bytes }
        };
        let Report { work_done, work_total, phases } = report;
        Self { work_done, work_total, phases: phases.into_iter().map(phase).collect() }
    }
}

impl From<ReportParts> for Report {
    fn from(parts: ReportParts) -> Self {
        let phase = |phase: PhaseParts| {
            let PhaseParts { name, seconds, bytes, kept_bytes, in_place_bytes } = phase;
            PhaseRecord { name: named(name), seconds, bytes, kept_bytes, in_place_bytes }
        };
        let ReportParts { work_done, work_total, phases } = parts;
        Self { work_done, work_total, phases: phases.into_iter().map(phase).collect() }
    }
}

/// A phase's name for good; there are a dozen or two.
fn named(name: String) -> &'static str {
    static NAMES: Mutex<Option<HashSet<&'static str>>> = Mutex::new(None);
    let mut names = NAMES.lock();
    let names = names.get_or_insert_default();
    match names.get(name.as_str()) {
        Some(known) => known,
        None => {
            let kept: &'static str = Box::leak(name.into_boxed_str());
            names.insert(kept);
            kept
        }
    }
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

/// A [`Task`] whose tables are numbers.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct TaskParts {
    how: JoinKind,
    build: SideParts,
    probe: SideParts,
    keys: Vec<JoinKey>,
    key_facts: Vec<KeyFacts>,
    output: Vec<OutputColumn>,
    counts_rows: bool,
    schema: Schema,
    arrangement: Arrangement,
    dense_range: Option<(u128, u128)>,
    filter: bool,
    batch_rows: Option<usize>,
    chunk_rows_min: Option<u64>,
    probe_at_once: bool,
    build_columns_last: bool,
    expected: Expected,
}

#[derive(Debug, Serialize, Deserialize)]
struct SideParts {
    side: Side,
    table: u64,
    key_columns: Vec<usize>,
    output_columns: Vec<usize>,
    shares: bool,
    carried: BTreeSet<usize>,
}

impl SideParts {
    fn of(side: &TaskSide, table: u64) -> Self {
        let TaskSide { side, table: _, key_columns, output_columns, shares, carried } = side.clone();
        Self { side, table, key_columns, output_columns, shares, carried }
    }

    fn restore(self, find: &dyn Fn(u64) -> Result<Arc<Table>>) -> Result<TaskSide> {
        let Self { side, table, key_columns, output_columns, shares, carried } = self;
        Ok(TaskSide { side, table: find(table)?, key_columns, output_columns, shares, carried })
    }
}

impl TaskParts {
    /// A task, and the numbers of its build and its probe side's table.
    pub(super) fn of(task: &Task, [build_table, probe_table]: [u64; 2]) -> Self {
        let Task {
            how,
            build,
            probe,
            keys,
            key_facts,
            output,
            counts_rows,
            schema,
            arrangement,
            dense_range,
            filter,
            batch_rows,
            chunk_rows_min,
            probe_at_once,
            build_columns_last,
            expected,
        } = task.clone();
        Self {
            how,
            build: SideParts::of(&build, build_table),
            probe: SideParts::of(&probe, probe_table),
            keys,
            key_facts,
            output,
            counts_rows,
            schema: Schema::clone(&schema),
            arrangement,
            dense_range,
            filter,
            batch_rows,
            chunk_rows_min,
            probe_at_once,
            build_columns_last,
            expected,
        }
    }

    pub(super) fn restore(self, find: &dyn Fn(u64) -> Result<Arc<Table>>) -> Result<Task> {
        let Self {
            how,
            build,
            probe,
            keys,
            key_facts,
            output,
            counts_rows,
            schema,
            arrangement,
            dense_range,
            filter,
            batch_rows,
            chunk_rows_min,
            probe_at_once,
            build_columns_last,
            expected,
        } = self;
        Ok(Task {
            how,
            build: build.restore(find)?,
            probe: probe.restore(find)?,
            keys,
            key_facts,
            output,
            counts_rows,
            schema: Arc::new(schema),
            arrangement,
            dense_range,
            filter,
            batch_rows,
            chunk_rows_min,
            probe_at_once,
            build_columns_last,
            expected,
        })
    }
}
