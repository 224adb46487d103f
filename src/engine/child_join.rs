//! Prepared join in the process of a device.
//!
//! The server takes all rows of the build side and describes them as a table, as it describes the
//! tables of a catalog. The rows of a probe cross in segments, as the join asks for them.

use std::sync::Arc;
use std::time::Duration;

use arrow::array::RecordBatch;
use arrow::datatypes::SchemaRef;

use super::child_jobs::{ChildJobs, JobCall};
use super::messages::{FromChild, ToChild, Work};
use super::restored::TableBuffers;
use super::{Grant, Prepared};
use crate::catalog::Table;
use crate::join::{BatchSink, Composition, Monitor, Rank, RowSource, Task, or_stop, take_build, with_number};
use crate::memory::{Budget, ReservedPool};
use crate::{Error, Result};

/// Time that the process may take to free the device memory of a join. A later job waits for
/// promised memory as long (`PROMISED_WAIT`).
const DROP_WAIT: Duration = Duration::from_secs(5);

/// Join that a process has prepared. After the process has ended, all calls fail.
pub(super) struct ChildJoin {
    jobs: Arc<ChildJobs>,
    /// Number by which the process knows the join.
    number: u64,
    composition: Composition,
    schema: SchemaRef,
    /// Columns of the result for rows with a number.
    numbered_schema: SchemaRef,
    /// Tables that the process reads.
    tables: TableBuffers,
    /// Prepared joins are of one device.
    rank: Rank,
    /// Keeps the memory from other jobs.
    _device_memory: Option<Budget>,
}

impl ChildJoin {
    /// Prepares a join, as [`Engine::prepare`](super::Engine::prepare) does.
    pub(super) fn prepare(
        jobs: &Arc<ChildJobs>,
        task: Task,
        build: &dyn RowSource,
        grant: &Grant,
        monitor: &Monitor,
    ) -> Result<Self> {
        jobs.check().inspect_err(|lost| build.stop(lost))?;
        let rows = or_stop(build, || take_build(&task, build, monitor.cancel()))?;
        let further = task.then.iter().flat_map(|then| &then.joins).flat_map(tables_of);
        let tables = [rows.clone()].into_iter().chain(tables_of(&task)).chain(further).collect();
        let tables = TableBuffers::new(tables);
        let (schema, composition) = (task.schema.clone(), task.composition.clone());
        let task = task.map_tables(|table| jobs.table(&table))?;
        let device_bytes = grant.device_memory.as_ref().map(Budget::limit_bytes);
        let work = Work::Prepare { task, device_bytes, build: jobs.table(&rows)?, is_stored: build.is_stored() };
        let (host_memory, rank) = (&grant.host_memory, Rank::alone());
        let (schema_of, buffers) = (&schema, &tables);
        let call = JobCall { schema: schema_of, buffers, host_memory, rank: &rank, rows: None, sink: &NoSink, monitor };
        let number = jobs.run(work, &call)?;
        let (jobs, numbered_schema, _device_memory) = (jobs.clone(), with_number(&schema), grant.device_memory.clone());
        Ok(Self { jobs, number, composition, schema, numbered_schema, tables, rank, _device_memory })
    }

    fn call<'a>(
        &'a self,
        host_memory: &'a ReservedPool,
        rows: Option<&'a dyn RowSource>,
        sink: &'a dyn BatchSink,
        monitor: &'a Monitor,
    ) -> JobCall<'a> {
        let schema = match rows.is_some_and(RowSource::is_numbered) {
            true => &self.numbered_schema,
            false => &self.schema,
        };
        JobCall { schema, buffers: &self.tables, host_memory, rank: &self.rank, rows, sink, monitor }
    }
}

impl Prepared for ChildJoin {
    fn composition(&self) -> &Composition {
        &self.composition
    }

    fn probe(
        &self,
        rows: &dyn RowSource,
        host_memory: &ReservedPool,
        sink: &dyn BatchSink,
        monitor: &Monitor,
    ) -> Result<()> {
        let (total_rows, is_stored, is_numbered) = (rows.total_rows(), rows.is_stored(), rows.is_numbered());
        let work = Work::Probe { prepared: self.number, total_rows, is_stored, is_numbered };
        self.jobs.run(work, &self.call(host_memory, Some(rows), sink, monitor)).map(drop)
    }

    fn finish(&self, host_memory: &ReservedPool, sink: &dyn BatchSink, monitor: &Monitor) -> Result<()> {
        let work = Work::Finish { prepared: self.number };
        self.jobs.run(work, &self.call(host_memory, None, sink, monitor)).map(drop)
    }
}

impl Drop for ChildJoin {
    fn drop(&mut self) {
        let prepared = self.number;
        let has_ended = |answer| matches!(answer, FromChild::Dropped { .. }).then_some(());
        let dropped = self.jobs.ask(DROP_WAIT, |question| ToChild::DropPrepared { question, prepared }, has_ended);
        if dropped.is_none() && self.jobs.check().is_ok() {
            tracing::warn!(device = %self.jobs.id, "a prepared join still has device memory after {DROP_WAIT:?}");
        }
        // The process may have copies of rows that only this join read.
        self.tables = TableBuffers::new(Vec::new());
        self.jobs.link.forget_gone_tables();
    }
}

fn tables_of(task: &Task) -> [Arc<Table>; 2] {
    [task.build.table.clone(), task.probe.table.clone()]
}

/// Sink of a call that gives no rows.
struct NoSink;

impl BatchSink for NoSink {
    fn push(&self, _: RecordBatch) -> Result<()> {
        Err(Error::Internal("a join gave rows while it was prepared".into()))
    }
}
