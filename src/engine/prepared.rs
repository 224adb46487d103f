//! Prepared joins of engines: prepared once, probed by several threads at once, and finished.

use std::sync::{Arc, OnceLock};

use crate::device::Device;
use crate::join::{BatchSink, Chain, Composition, Monitor, PreparedJoin, RowSource, TableRows, Task, Then};
use crate::memory::{Arena, Budget, ReservedPool};
use crate::{Error, Result};

/// Join that an engine has prepared. Dropping it frees its device memory.
///
/// Each call is a job of the device, also while it waits for rows. The caller bounds the number of
/// jobs by [`Engine::jobs_max`](super::Engine::jobs_max). A child engine refuses more with
/// [`Exhausted`](crate::Error::Exhausted), because its process has a thread for each job and one
/// that reads.
pub trait Prepared: Send + Sync {
    /// Returns the composition of the join, or of the first join of a chain.
    fn composition(&self) -> &Composition;

    /// Probes the build side with all rows of a source, as [`PreparedJoin::probe`] does. Host
    /// memory comes from `host_memory`. Several threads may call it at once. If the rows have a
    /// number ([`RowSource::is_numbered`]), the result has it as its last column.
    ///
    /// # Errors
    /// The errors of [`Engine::run`](super::Engine::run), and of the source. The source gets the
    /// error, too. Those of [`PreparedJoin::numbered`] for rows with a number.
    fn probe(
        &self,
        rows: &dyn RowSource,
        host_memory: &ReservedPool,
        sink: &dyn BatchSink,
        monitor: &Monitor,
    ) -> Result<()>;

    /// Emits the build rows that the kind of join keeps at the end, once all rows are probed.
    ///
    /// # Errors
    /// The errors of [`Engine::run`](super::Engine::run).
    fn finish(&self, host_memory: &ReservedPool, sink: &dyn BatchSink, monitor: &Monitor) -> Result<()>;
}

/// Prepared join with the device of this process that prepared it.
pub(super) struct LocalJoin {
    join: Join,
    /// Join for rows with a number, made when the first arrive.
    numbered: OnceLock<Result<Join>>,
    device: Arc<dyn Device>,
    /// Device memory of the join and of all its calls.
    memory: Budget,
}

/// Join, or several joins that the same rows probe.
enum Join {
    One(Box<PreparedJoin>),
    Chain(Box<Chain>),
}

impl Join {
    /// Prepares the join of a task, or all joins of a chain. `build` has the build side of the
    /// first.
    fn prepare(
        task: Task,
        build: &dyn RowSource,
        device: &dyn Device,
        arena: &Arena,
        monitor: &Monitor,
    ) -> Result<Self> {
        let prepare =
            |task: Task, build: &dyn RowSource| PreparedJoin::prepare(Arc::new(task), build, device, arena, monitor);
        let Some(Then { first_schema, joins, columns }) = task.then else {
            return Ok(Self::One(Box::new(prepare(task, build)?)));
        };
        let (schema, first) = (task.schema, Task { schema: first_schema, then: None, ..task });
        let mut prepared = vec![Arc::new(prepare(first, build)?)];
        for task in joins {
            let build = TableRows::new(task.build.table.clone());
            prepared.push(Arc::new(prepare(task, &build)?));
        }
        Ok(Self::Chain(Box::new(Chain::new(prepared, schema, columns, device)?)))
    }

    fn numbered(&self, device: &dyn Device) -> Result<Self> {
        Ok(match self {
            Self::One(join) => Self::One(Box::new(join.numbered(true, device)?)),
            Self::Chain(chain) => Self::Chain(Box::new(chain.numbered(device)?)),
        })
    }

    fn probe(
        &self,
        rows: &dyn RowSource,
        device: &dyn Device,
        arena: &Arena,
        sink: &dyn BatchSink,
        monitor: &Monitor,
    ) -> Result<()> {
        match self {
            Self::One(join) => join.probe(rows, device, arena, sink, monitor),
            Self::Chain(chain) => chain.probe(rows, device, arena, sink, monitor),
        }
    }
}

impl LocalJoin {
    /// Prepares a join, or the joins of a chain, in a part of the device's memory, or in all of it
    /// (`None`).
    ///
    /// # Errors
    /// The errors of [`PreparedJoin::prepare`] and [`Device::for_job`].
    pub(super) fn prepare(
        task: Task,
        build: &dyn RowSource,
        device: &Arc<dyn Device>,
        memory: Option<Budget>,
        arena: &Arena,
        monitor: &Monitor,
    ) -> Result<Self> {
        let memory = memory.unwrap_or_else(|| device.memory().clone());
        let view = view(&**device, &memory, build)?;
        let join = Join::prepare(task, build, &*view, arena, monitor)?;
        Ok(Self { join, numbered: OnceLock::new(), device: device.clone(), memory })
    }

    /// Probes as [`PreparedJoin::probe`] does.
    pub(super) fn probe(
        &self,
        rows: &dyn RowSource,
        arena: &Arena,
        sink: &dyn BatchSink,
        monitor: &Monitor,
    ) -> Result<()> {
        let view = view(&*self.device, &self.memory, rows)?;
        self.join_of(rows).inspect_err(|error| rows.stop(error))?.probe(rows, &*view, arena, sink, monitor)
    }

    /// Returns the join that these rows probe.
    fn join_of(&self, rows: &dyn RowSource) -> Result<&Join> {
        match rows.is_numbered() {
            true => self.numbered.get_or_init(|| self.join.numbered(&*self.device)).as_ref().map_err(Error::clone),
            false => Ok(&self.join),
        }
    }

    /// Finishes as [`PreparedJoin::finish`] does.
    pub(super) fn finish(&self, arena: &Arena, sink: &dyn BatchSink, monitor: &Monitor) -> Result<()> {
        match &self.join {
            Join::One(join) => join.finish(&*self.device.for_job(self.memory.clone())?, arena, sink, monitor),
            // No join of a chain keeps build rows.
            Join::Chain(_) => Ok(()),
        }
    }
}

/// Returns a view of the device for one call. If the device refuses, `rows` get the error.
fn view(device: &dyn Device, memory: &Budget, rows: &dyn RowSource) -> Result<Arc<dyn Device>> {
    device.for_job(memory.clone()).inspect_err(|error| rows.stop(error))
}

/// Prepared join of an engine over a device of this process.
pub(super) struct InProcessJoin {
    pub(super) composition: Composition,
    pub(super) join: LocalJoin,
    pub(super) arena: Arena,
}

impl Prepared for InProcessJoin {
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
        self.join.probe(rows, &arena_of_call(&self.arena, host_memory, monitor), sink, monitor)
    }

    fn finish(&self, host_memory: &ReservedPool, sink: &dyn BatchSink, monitor: &Monitor) -> Result<()> {
        self.join.finish(&arena_of_call(&self.arena, host_memory, monitor), sink, monitor)
    }
}

/// Returns the arena for one call: it draws on `host_memory`, and waits no longer than `monitor`
/// lets it.
pub(super) fn arena_of_call(arena: &Arena, host_memory: &ReservedPool, monitor: &Monitor) -> Arena {
    arena.drawing_on(host_memory.clone()).interrupted_by(monitor.cancel().interrupt())
}
