//! A prepared join: a build side that is ready on its device, and can be probed any number of
//! times.
//!
//! ```text
//!   prepare(build) ─► probe(rows)* ─► finish
//!
//!   prepare: build side ─► transform ─► index ─► (compare; hash again if two differ) ─► (filter)
//!   probe:   chunk ─► (filter) ─► transform ─► probe batch ─► match ─► (compare) ─► batches
//!   finish:  build rows that the kind of join keeps: without a key, with a match, or without one
//! ```
//!
//! A prepared join owns what it knows of the build side. It borrows nothing from the call that made
//! it, knows nothing of a sink or of progress, and several threads may probe it at once, each with
//! the rows of a source of its own ([`probe`](PreparedJoin::probe), in `probe.rs`). Each call gets
//! the device, or a view of it for a job, with the arena and the monitor of the call.

use std::sync::Arc;

use super::batch_sizes::BatchSizes;
use super::column_gather::SideRows;
use super::context::{CallStreams, JoinContext};
use super::fused::Fused;
use super::inputs::{SideInput, check_build_rows};
use super::matching::{BuildSide, SharedBuild};
use super::materialize::Materializer;
use super::semantics::JoinSemantics;
use super::source::{RowSource, or_stop, take_all};
use super::threads::{compare_where_values_are, run_on_device_pool};
use super::transform::{CopyIn, Transform, TransformedSide, transform};
use super::verify::build_runs_are_exact;
use super::{BatchSink, Monitor, Task};
use crate::catalog::Table;
use crate::columns::{KeyLayout, Role};
use crate::device::{CancelFlag, Device, DeviceBuffer, Event, Filter, Phase};
use crate::memory::Arena;
use crate::{Error, Result};

/// Number of seeds to hash keys with, one after the other, until no two different keys have the
/// same hash. One seed is almost certainly enough.
const SEEDS_MAX: usize = 8;

/// Build side of a join, ready to be probed.
pub struct PreparedJoin {
    pub(super) task: Arc<Task>,
    pub(super) layout: KeyLayout,
    pub(super) build: Arc<SideInput>,
    /// The rows that are probed may be those of other tables.
    pub(super) probe_shape: Arc<SideInput>,
    pub(super) semantics: JoinSemantics,
    pub(super) sizes: BatchSizes,
    pub(super) built: Arc<SharedBuild>,
    /// Flags of the build rows that were matched, if they decide which rows are emitted at the end.
    pub(super) flags: Option<DeviceBuffer>,
    /// Filter that drops most probe rows without a match, if many such rows are expected.
    pub(super) filter: Option<Filter>,
    /// Marks the end of the work that prepared the join. Other streams wait for it.
    pub(super) ready: Event,
}

/// Inputs of a join that is to be prepared.
#[derive(Clone)]
pub(super) struct Preparation {
    pub(super) task: Arc<Task>,
    /// Its seed may be replaced.
    pub(super) layout: KeyLayout,
    pub(super) build: Arc<SideInput>,
    pub(super) probe_shape: Arc<SideInput>,
    pub(super) sizes: BatchSizes,
    pub(super) defers_payload: bool,
}

impl Preparation {
    /// Returns the inputs with a layout and sizes that suit the device, and no payload deferred.
    pub(super) fn new(
        task: Arc<Task>,
        build: Arc<SideInput>,
        probe_shape: Arc<SideInput>,
        device: &dyn Device,
    ) -> Self {
        let layout = KeyLayout::new(task.key_facts.clone(), rand::random());
        let layout = match task.composition.device_makes_keys && device.strings().is_some() {
            true => layout.made_by_device(),
            false => layout,
        };
        let sizes = BatchSizes::new(task.batch_rows, task.expected.row_bytes, device.tuning().gather_bytes);
        let sizes = sizes.of_columns(&task.schema);
        Self { task, layout, build, probe_shape, sizes, defers_payload: false }
    }
}

impl PreparedJoin {
    /// Prepares a join of all rows of `build`, which have the columns of the task's build table.
    /// The rows to probe have the columns of the task's probe table. Rows of other tables than
    /// these two need a task [with unknown rows](Task::with_unknown_rows).
    ///
    /// # Errors
    /// Errors of the device and of the source. [`Error::Unsupported`] for a build side that
    /// positions cannot address. The source gets the error, too.
    pub fn prepare(
        task: Arc<Task>,
        build: &dyn RowSource,
        device: &dyn Device,
        arena: &Arena,
        monitor: &Monitor,
    ) -> Result<Self> {
        or_stop(build, || {
            let streams = CallStreams::new(device, monitor)?;
            let cx = streams.context(device, arena, monitor);
            let table = take_build(&task, build, monitor.cancel())?;
            let supports_text = device.strings().is_some();
            let input = SideInput::new(&task, Role::Build, table, supports_text);
            let input = if build.is_stored() { input } else { input.arriving() };
            let probe_shape = Arc::new(SideInput::of_task(&task, Role::Probe, supports_text));
            let of = Preparation::new(task.clone(), Arc::new(input), probe_shape, device);
            Self::prepare_with(of, &cx, &mut |_| Ok(()))
        })
    }

    /// Transforms and indexes the build side. Calls `transformed` when the build side's copies are
    /// queued and its keys are about to be indexed, once for each seed of the layout.
    ///
    /// # Errors
    /// Errors of the device and of `transformed`. [`Error::Unsupported`] for a build side that
    /// positions cannot address.
    pub(super) fn prepare_with(
        of: Preparation,
        cx: &JoinContext<'_>,
        transformed: &mut (dyn FnMut(&KeyLayout) -> Result<()> + Send),
    ) -> Result<Self> {
        let (build, row_layout) = (of.build.clone(), of.task.composition.row_layout);
        check_build_rows(&build.table.name, build.table.rows)?;
        let copy_in = if of.defers_payload { CopyIn::WhenNeeded } else { CopyIn::Prefetch };
        let keeps_null_keys = JoinSemantics::new(&of.task, &build, &of.probe_shape, None).keeps_build_without_key();
        Self::prepare_side(of, cx, &mut |layout| {
            let rows = build.rows(0..build.table.rows);
            let side =
                transform(cx, &build, rows, Transform { layout, row_layout, keeps_null_keys, filter: None, copy_in })?;
            transformed(layout)?;
            Ok(side)
        })
    }

    /// Indexes the build side that `side_of` lays out, once for each seed of the layout.
    ///
    /// # Errors
    /// Errors of the device and of `side_of`. [`Error::Unsupported`] for a build side that
    /// positions cannot address.
    pub(super) fn prepare_side(
        of: Preparation,
        cx: &JoinContext<'_>,
        side_of: &mut (dyn FnMut(&KeyLayout) -> Result<TransformedSide> + Send),
    ) -> Result<Self> {
        let Preparation { task, mut layout, build, probe_shape, sizes, defers_payload } = of;
        let fused = Fused::of(&task, &build, &probe_shape, &layout, cx.device);
        let joins_at_once = fused.is_some();
        let semantics = JoinSemantics::new(&task, &build, &probe_shape, fused);
        let indexed = |layout: &KeyLayout, side: TransformedSide| {
            let repeats = task.expected.build_keys_repeat;
            let adjacent = layout.is_hashed() || semantics.build_rows_kept.is_some() || (repeats && !joins_at_once);
            BuildSide::new(side, task.dense_range, layout, repeats, adjacent, cx)
        };
        let built = run_on_device_pool(cx.device, || {
            for _ in 0..SEEDS_MAX {
                let built = indexed(&layout, side_of(&layout)?)?;
                let compare = || build_runs_are_exact(&built, &layout, cx);
                let is_exact = || cx.monitor.phase(Phase::CompareKeys, 0, compare);
                if !layout.is_hashed() || compare_where_values_are(&layout, cx.device, is_exact)? {
                    return Ok(built);
                }
                layout = layout.clone().with_another_seed(rand::random());
            }
            Err(Error::Internal(format!(
                "different keys of table {:?} had the same hash with each of {SEEDS_MAX} seeds",
                build.table.name
            )))
        })?;
        // The other columns of the build side must also arrive before anything is gathered from
        // them. Moving rows has waited only for the columns that moved with them.
        if !defers_payload {
            cx.device.wait_event(&cx.device.record_event(cx.copies)?, cx.stream)?;
            built.transformed.record_stream_of_originals(cx);
        }
        let filter = match task.composition.filter && task.how.drops_unmatched(probe_shape.side) {
            true => build_filter(&built, cx)?,
            false => None,
        };
        let flags = match semantics.build_rows_kept {
            Some(_) => Some(cx.device.new_flags(built.transformed.len(), cx.stream)?),
            None => None,
        };
        let (built, ready) = (Arc::new(SharedBuild::new(built)), cx.device.record_event(cx.stream)?);
        Ok(Self { task, layout, build, probe_shape, semantics, sizes, built, flags, filter, ready })
    }

    /// Returns the materializer of build rows and rows of `probe`.
    pub(super) fn materializer<'e>(
        &'e self,
        cx: &'e JoinContext<'_>,
        probe: &'e SideInput,
        sink: &'e dyn BatchSink,
    ) -> Materializer<'e> {
        let Self { task, layout, build, sizes, .. } = self;
        Materializer { cx, task, layout, build, probe, sink, sizes: *sizes }
    }

    /// Emits the build rows that the kind of join keeps at the end, once all rows are probed.
    ///
    /// # Errors
    /// Errors of the device, the sink, and gathering.
    pub fn finish(&self, device: &dyn Device, arena: &Arena, sink: &dyn BatchSink, monitor: &Monitor) -> Result<()> {
        let streams = CallStreams::new(device, monitor)?;
        let cx = streams.context(device, arena, monitor);
        device.wait_event(&self.ready, cx.stream)?;
        self.finish_with(&cx, sink, &mut |_| {})
    }

    /// Emits the build rows as [`finish`](Self::finish) does. Calls `done` with the share of these
    /// rows that has left.
    ///
    /// # Errors
    /// The errors of [`finish`](Self::finish).
    pub(super) fn finish_with(
        &self,
        cx: &JoinContext<'_>,
        sink: &dyn BatchSink,
        done: &mut (dyn FnMut(f64) + Send),
    ) -> Result<()> {
        let (built, materializer) = (self.built.current(), self.materializer(cx, &self.probe_shape, sink));
        if let Some(null_keys) = &built.transformed.null_keys {
            let rows = SideRows::Numbered(&built.transformed, null_keys.clone());
            let emit = || materializer.emit(&rows, &SideRows::Missing, null_keys.len(), &mut |_| {});
            run_on_device_pool(cx.device, emit)?;
        }
        if let Some(flags) = &self.flags {
            let emit = || self.semantics.emit_kept_build(&materializer, &built.transformed, flags, done);
            run_on_device_pool(cx.device, emit)?;
        }
        cx.device.synchronize(cx.stream)
    }
}

/// Takes all rows of the build side of a task as one table. Waits for the last row.
///
/// # Errors
/// Errors of the source. [`Error::Unsupported`] for a build side that positions cannot address,
/// before its last row. [`Error::Internal`] for rows that the task was not planned for.
pub fn take_build(task: &Task, source: &dyn RowSource, cancel: &CancelFlag) -> Result<Arc<Table>> {
    let shape = &task.build.table;
    let table = take_all(source, shape, |rows| check_build_rows(&shape.name, rows), cancel)?;
    task.check_rows(Role::Build, shape, &table)?;
    Ok(table)
}

/// Builds a filter of the build keys. Returns `None` if the device has no memory for a filter,
/// because the join is right without it.
fn build_filter(built: &BuildSide, cx: &JoinContext<'_>) -> Result<Option<Filter>> {
    let keys = built.transformed.transformed_keys();
    let bytes = (keys.rows * keys.width.bytes()) as u64;
    match cx.monitor.phase(Phase::Filter, bytes, || cx.device.build_filter(keys, cx.stream)) {
        Err(Error::Exhausted(_)) => Ok(None),
        outcome => outcome.map(Some),
    }
}
