//! Chains: rows that probe several prepared joins in one pass on the device, such as the fact rows
//! of a star that probe its dimensions.
//!
//! ```text
//!   chunk ─► key columns of all joins ─► on the device
//!     all rows ─► keys of the 1st join ─► match ─┐
//!     ┌───────── rows that it keeps ◄────────────┘   row numbers: of the chunk, of build side 1
//!     └─► keys of the 2nd join ─► match ─┐
//!     ┌── rows that it keeps ◄───────────┘           of the chunk, of build sides 1 and 2
//!     └─► ... ─► gather the columns of the chunk and of all build sides ─► batches
//! ```
//!
//! Every join has keys of its own among the columns of the probed rows, so the joins may run in any
//! order. Between two joins only row numbers change. Each join gathers its key columns for the rows
//! that are left, on the device, and looks up the row numbers so far. The columns of the result are
//! gathered once, at the end. No column leaves the device before that.
//!
//! A join that keeps few rows saves work for those after it. So the join that keeps the smallest
//! share of its rows comes first, then the next. The first chunk has the order that statistics
//! suggest. Later chunks have the order of the shares that were seen. The result has the same rows
//! and columns in every order.
//!
//! Each join must drop, repeat or keep rows of the probe side alone: it is an inner join, or an
//! outer, semi or anti join that keeps no row of its build side for itself.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use arrow::datatypes::SchemaRef;
use parking_lot::Mutex;

use super::batch_sizes::BatchSizes;
use super::chain_report::{ChainReport, PassedRows, kept_share, order_of};
use super::chunks::{
    Chunk, ProbeRows, chunk_row_bytes, chunk_rows, even_chunk_rows, fitting_probe_batch_rows, streams_of,
};
use super::column_gather::SideRows;
use super::context::{CallStreams, JoinContext};
use super::inputs::SideInput;
use super::matching::{BuildSide, probe_batches};
use super::materialize::{ChainPart, Materializer};
use super::numbered::with_number;
use super::prepared::PreparedJoin;
use super::progress::Progress;
use super::semantics::{expanded_pairs, match_exactly};
use super::source::{RowSource, or_stop};
use super::threads::{on_device_pool, on_stream_threads, run_on_device_pool};
use super::transform::{TransformedSide, rows_without_key};
use super::{BatchSink, Monitor, OutputSource, RowLayout, Task};
use crate::columns::{CopiedColumns, KeyColumns, Role, Rows};
use crate::device::{Device, Phase, Positions};
use crate::memory::Arena;
use crate::{Error, Result};

/// Least number of pairs that a join of a chain expands at once.
const PAIRS_MIN: usize = 256;

/// Several prepared joins of one device that the same rows probe.
pub struct Chain {
    joins: Vec<Arc<PreparedJoin>>,
    /// Build side of each join. Its rows are in the order of other rows, so none is shared.
    builds: Vec<SideInput>,
    columns: Vec<(usize, usize)>,
    /// Task of the first join, with the columns of the chain's result.
    task: Task,
    sizes: BatchSizes,
    /// Shared with the chain of numbered rows.
    shares: Arc<Mutex<Vec<f64>>>,
}

impl Chain {
    /// Makes a chain of prepared joins of one device. The rows to probe have the columns of the
    /// probe side of every join. The result has the columns of `schema`. `columns` has the join of
    /// each column, and the column's number in the result of that join. The first join gives all
    /// columns of the probe side, and each later join gives columns of its build side only.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for joins that cannot be part of a chain. [`Error::Internal`] for
    /// joins and columns that do not belong together.
    pub fn new(
        joins: Vec<Arc<PreparedJoin>>,
        schema: SchemaRef,
        columns: Vec<(usize, usize)>,
        device: &dyn Device,
    ) -> Result<Self> {
        let first = joins.first().ok_or_else(|| Error::Internal("a chain has no join".into()))?;
        check_columns(&joins, &schema, &columns)?;
        joins.iter().try_for_each(|join| check_join(join))?;
        let row_bytes = joins.iter().map(|join| join.task.expected.row_bytes).sum();
        let sizes = BatchSizes::new(first.task.batch_rows, row_bytes, device.tuning().gather_bytes);
        let sizes = sizes.of_columns(&schema);
        let task = Task { schema, ..(*first.task).clone() };
        let shares = joins.iter().map(|join| expected_share(join)).collect();
        let shares = Arc::new(Mutex::new(shares));
        let builds = joins.iter().map(|join| join.build.unshared()).collect();
        Ok(Self { joins, builds, columns, task, sizes, shares })
    }

    /// Returns the same chain for rows with a number, which is the last column of its result.
    ///
    /// # Errors
    /// The errors of [`PreparedJoin::numbered`].
    pub fn numbered(&self, device: &dyn Device) -> Result<Self> {
        let numbered = |(at, join): (usize, &Arc<PreparedJoin>)| Ok(Arc::new(join.numbered(at == 0, device)?));
        let joins: Vec<Arc<PreparedJoin>> = self.joins.iter().enumerate().map(numbered).collect::<Result<_>>()?;
        let (schema, of_first) = (with_number(&self.task.schema), joins[0].task.schema.fields().len());
        let columns = self.columns.iter().copied().chain([(0, of_first - 1)]).collect();
        Ok(Self {
            builds: self.builds.clone(),
            columns,
            task: Task { schema: schema.clone(), ..(*joins[0].task).clone() },
            sizes: self.sizes.of_columns(&schema),
            shares: self.shares.clone(),
            joins,
        })
    }

    /// Returns, for each join, the share of its rows that it keeps: at first the expected share,
    /// then mostly what the last rows have shown. A join that repeats rows may keep more than 1.
    pub fn kept_shares(&self) -> Vec<f64> {
        self.shares.lock().clone()
    }

    /// Returns the order in which the next chunk probes the joins.
    pub fn order(&self) -> Vec<usize> {
        order_of(&self.kept_shares())
    }

    /// Probes all joins with all rows of a source, and pushes the rows that they give. `device` is
    /// the device that prepared the joins, or a view of it. The monitor counts the probed rows.
    ///
    /// # Errors
    /// Errors of the device, the source, the sink, and gathering. The source gets the error, too.
    pub fn probe(
        &self,
        source: &dyn RowSource,
        device: &dyn Device,
        arena: &Arena,
        sink: &dyn BatchSink,
        monitor: &Monitor,
    ) -> Result<()> {
        or_stop(source, || {
            let progress = Progress::of_unknown_total(monitor);
            let first = &self.joins[0];
            let rows = ProbeRows::new(source, &first.task, &first.probe_shape, device);
            let streams = streams_of(&first.task, rows.total_of_rank(), device);
            let take_chunks = |failed: &AtomicBool| -> Result<()> {
                let own = CallStreams::new(device, monitor)?;
                let cx = own.context(device, arena, monitor);
                let cx = JoinContext { copies: cx.stream, ..cx };
                self.joins.iter().try_for_each(|join| device.wait_event(&join.ready, cx.stream))?;
                while !failed.load(Ordering::Relaxed)
                    && let Some(chunk) = self.next_chunk(&rows, &cx, streams)?
                {
                    run_on_device_pool(device, || self.join_chunk(&cx, &chunk, streams, sink))?;
                }
                Ok(())
            };
            match streams {
                ..=1 => take_chunks(&AtomicBool::new(false))?,
                _ => on_stream_threads(device, streams, &take_chunks, &|error| rows.stop(error))?,
            }
            progress.finish();
            Ok(())
        })
    }

    fn next_chunk(&self, rows: &ProbeRows<'_>, cx: &JoinContext<'_>, streams: usize) -> Result<Option<Chunk>> {
        let PreparedJoin { task, layout, .. } = &*self.joins[0];
        // Key columns, keys, and two row numbers of each further join.
        let of_join = |join: &Arc<PreparedJoin>| {
            4 * join.layout.width().bytes() + join.layout.value_row_bytes(Role::Probe) + 2 * size_of::<u64>()
        };
        let further_bytes: usize = self.joins[1..].iter().map(of_join).sum();
        rows.take(
            |segment, left| {
                let most = match streams > 1 {
                    true => even_chunk_rows(task, layout, segment.table.rows, streams, 1),
                    false => segment.table.rows,
                };
                let row_bytes = (chunk_row_bytes(segment, layout) + further_bytes) as u64;
                let of = left.start..left.end.min(left.start + most);
                chunk_rows(segment, layout, row_bytes, cx.device, 0, streams, of)
            },
            cx.monitor.cancel(),
        )
    }

    fn join_chunk(&self, cx: &JoinContext<'_>, chunk: &Chunk, streams: usize, sink: &dyn BatchSink) -> Result<()> {
        let segment = &*chunk.segment;
        for join in &self.joins {
            join.task.check_rows(Role::Probe, &join.probe_shape.table, &segment.table)?;
        }
        let rows = segment.rows(chunk.rows.clone());
        let mut copied = CopiedColumns::default();
        let mut keys = Vec::with_capacity(self.joins.len());
        for PreparedJoin { layout, probe_shape, .. } in self.joins.iter().map(|join| &**join) {
            let columns = &probe_shape.key_columns;
            let mut copy = || layout.copy_in(Role::Probe, &rows, columns, &mut copied, cx.device, cx.arena, cx.stream);
            let bytes = (rows.len() * layout.width().bytes()) as u64;
            keys.push(cx.monitor.phase(Phase::PackKeys, bytes, || match layout.is_made_on_host() {
                true => on_device_pool(cx.device, &mut copy),
                false => copy(),
            })?);
        }
        let CopiedColumns { mut fixed, mut bytes } = copied;
        fixed.retain(|&column, _| segment.movable(column).is_some());
        bytes.retain(|&column, _| segment.text(column).is_some());
        let all = ChainRows { facts: Positions::Range(0..rows.len()), builds: vec![None; self.joins.len()] };
        let order = self.order();
        let mut of_chunk = ChainChunk {
            chain: self,
            cx,
            segment,
            keys,
            built: self.joins.iter().map(|join| join.built.current()).collect(),
            facts: None,
            probe_batch_rows: fitting_probe_batch_rows(cx.device, 0, streams),
            streams,
            sink,
            passed: vec![PassedRows::default(); self.joins.len()],
        };
        let probe = of_chunk.side_of(order[0], &all, &rows)?;
        of_chunk.facts = Some(probe.side.part(rows, fixed, bytes));
        let outcome = of_chunk.join_side(&order, &all, &probe);
        // The columns of the chunk are dropped next, and queued work may still read them.
        let settled = cx.device.synchronize(&cx.stream.uncancelled());
        self.learn(&of_chunk.passed);
        outcome.and(settled)?;
        cx.monitor.add_probed_rows(chunk.len());
        let passed = std::mem::take(&mut of_chunk.passed);
        cx.monitor.add_chain_rows(&ChainReport::of(order, passed));
        Ok(())
    }

    /// Adjusts the kept shares to what the rows of a chunk have shown.
    fn learn(&self, passed: &[PassedRows]) {
        /// Number of rows that count as much as all that was seen before. Fewer would follow
        /// chance, and more would be slow to follow rows that change.
        const MEMORY_ROWS: f64 = 4096.0;
        let mut shares = self.shares.lock();
        for (share, PassedRows { rows, kept }) in shares.iter_mut().zip(passed) {
            if *rows > 0 {
                let (rows, kept) = (*rows as f64, *kept as f64);
                *share += (kept / rows - *share) * rows / (rows + MEMORY_ROWS);
            }
        }
    }
}

/// Rows of a chunk that all joins so far have kept, perhaps repeated.
#[derive(Clone)]
struct ChainRows {
    /// Row numbers in the chunk.
    facts: Positions,
    /// Build position for each join. `None` for joins that come later, and where no row has any.
    builds: Vec<Option<Positions>>,
}

impl ChainRows {
    /// Returns the rows at `positions` of these rows.
    fn at(&self, positions: &Positions, cx: &JoinContext<'_>) -> Result<Self> {
        let part = |of: &Positions| cx.device.compose(of, positions, cx.stream);
        let builds = self.builds.iter().map(|build| build.as_ref().map(part).transpose()).collect::<Result<_>>()?;
        Ok(Self { facts: part(&self.facts)?, builds })
    }
}

/// Rows with the keys of one join.
struct KeyedRows {
    side: TransformedSide,
    /// Number of the row behind each key; `None` if all rows have a key.
    kept: Option<Positions>,
}

/// Chunk on its way through a chain.
struct ChainChunk<'a> {
    chain: &'a Chain,
    cx: &'a JoinContext<'a>,
    segment: &'a SideInput,
    /// Columns that the keys of each join are packed from, for all rows of the chunk.
    keys: Vec<KeyColumns>,
    built: Vec<Arc<BuildSide>>,
    /// Rows of the chunk with the columns that were copied in so far.
    facts: Option<TransformedSide>,
    probe_batch_rows: usize,
    streams: usize,
    sink: &'a dyn BatchSink,
    passed: Vec<PassedRows>,
}

impl ChainChunk<'_> {
    /// Passes rows through the joins in `order`, and emits those that are left.
    fn join(&mut self, order: &[usize], rows: &ChainRows) -> Result<()> {
        if rows.facts.is_empty() {
            return Ok(());
        }
        let Some(&join) = order.first() else { return self.emit(rows) };
        let of_chunk = self.facts().rows.clone();
        let probe = self.side_of(join, rows, &of_chunk)?;
        self.join_side(order, rows, &probe)
    }

    /// Returns rows with the keys of a join. `of_chunk` are all rows of the chunk.
    fn side_of(&self, join: usize, rows: &ChainRows, of_chunk: &Rows) -> Result<KeyedRows> {
        let JoinContext { device, stream, monitor, .. } = *self.cx;
        let PreparedJoin { layout, filter, .. } = &*self.chain.joins[join];
        let count = rows.facts.len();
        let key_bytes = (count * layout.width().bytes()) as u64;
        let is_whole = matches!(&rows.facts, Positions::Range(range) if *range == (0..of_chunk.len()));
        let mut keys = monitor.phase(Phase::PackKeys, 2 * key_bytes, || match is_whole {
            true => self.keys[join].pack(device, stream),
            false => self.keys[join].at(&rows.facts, device, stream)?.pack(device, stream),
        })?;
        if let Some(filter) = filter {
            let packed = keys.packed.clone();
            keys.packed = monitor.phase(Phase::Filter, key_bytes, || device.filter_keys(filter, &packed, stream))?;
        }
        let kept = keys.packed.rows_kept.clone();
        let to_rows = match &kept {
            Some(kept) => Some(device.compose(&rows.facts, kept, stream)?),
            None => (!is_whole).then(|| rows.facts.clone()),
        };
        Ok(KeyedRows { side: TransformedSide::of_keys(of_chunk.clone(), keys, to_rows), kept })
    }

    /// Joins rows that have the keys of the first join in `order`, and passes what it keeps to the
    /// others.
    fn join_side(&mut self, order: &[usize], rows: &ChainRows, probe: &KeyedRows) -> Result<()> {
        let Some((&join, later)) = order.split_first() else { return Ok(()) };
        let cx = self.cx;
        let JoinContext { device, stream, monitor, .. } = *cx;
        let prepared = self.chain.joins[join].clone();
        let (semantics, built) = (&prepared.semantics, self.built[join].clone());
        let count = rows.facts.len();
        self.passed[join].rows += count as u64;
        let go_on = |chunk: &mut Self, rows: ChainRows| {
            chunk.passed[join].kept += rows.facts.len() as u64;
            chunk.join(later, &rows)
        };
        if let Some(kept) = &probe.kept
            && kept.len() < count
            && semantics.keeps_probe_without_key()
        {
            let without = monitor.phase(Phase::PackKeys, count as u64, || rows_without_key(cx, kept, count))?;
            go_on(self, rows.at(&without, cx)?)?;
        }
        // Positions among the rows, of positions among the keys.
        let numbered = |positions: &Positions| match &probe.kept {
            Some(kept) => device.compose(kept, positions, stream),
            None => Ok(positions.clone()),
        };
        for probe_batch in probe_batches(&probe.side, self.probe_batch_rows)? {
            let matches = match_exactly(&built, &probe.side, probe_batch, &prepared.layout, cx)?;
            let matches = matches.ok_or_else(|| Error::Internal("a table has no groups of keys".into()))?;
            if semantics.only_keeps_probe() {
                let positions = numbered(&semantics.kept_probe_rows(&matches, cx)?)?;
                go_on(self, rows.at(&positions, cx)?)?;
                continue;
            }
            let unmatched = semantics.unmatched();
            let total = matches.pair_count(unmatched);
            let at_once = expanded_pairs(device, self.chain.sizes.gather_rows).min(self.pairs_that_fit(order));
            for start in (0..total).step_by(at_once) {
                let range = start..total.min(start + at_once as u64);
                let bytes = 12 * (range.end - range.start);
                let pairs =
                    monitor.phase(Phase::Expand, bytes, || device.expand(&matches, range, unmatched, stream))?;
                let mut paired = rows.at(&numbered(&pairs.probe)?, cx)?;
                paired.builds[join] = Some(pairs.build);
                go_on(self, paired)?;
            }
        }
        Ok(())
    }

    /// Returns the pairs that a join may expand at once. The joins after it expand theirs while
    /// these are there, so each takes an equal part of half of the free memory.
    fn pairs_that_fit(&self, order: &[usize]) -> usize {
        let chain = self.chain;
        let key_bytes = |&join: &usize| {
            let layout = &chain.joins[join].layout;
            4 * layout.width().bytes() + layout.value_row_bytes(Role::Probe)
        };
        // Pairs as they are made, the row numbers of all sides, and keys of the next join.
        let pair_bytes = 32 + 8 * (1 + chain.joins.len()) + order.iter().map(key_bytes).max().unwrap_or(0);
        let parts = 2 * order.len() * self.streams.max(1);
        (self.cx.device.memory().free_bytes() as usize / parts / pair_bytes).max(PAIRS_MIN)
    }

    fn facts(&self) -> &TransformedSide {
        self.facts.as_ref().expect("the rows of the chunk have arrived")
    }

    /// Emits rows that all joins have kept.
    fn emit(&self, rows: &ChainRows) -> Result<()> {
        let Chain { joins, builds, columns, task, sizes, .. } = self.chain;
        let of_join = |join: usize| Materializer {
            build: &builds[join],
            ..joins[join].materializer(self.cx, self.segment, self.sink)
        };
        let part = |join: usize| ChainPart {
            materializer: of_join(join),
            build: match &rows.builds[join] {
                Some(positions) => SideRows::Transformed(&self.built[join].transformed, positions.clone()),
                None => SideRows::Missing,
            },
            probe: match join {
                0 => SideRows::Numbered(self.facts(), rows.facts.clone()),
                _ => SideRows::Missing,
            },
        };
        let parts: Vec<ChainPart<'_>> = (0..joins.len()).map(part).collect();
        Materializer { task, sizes: *sizes, ..of_join(0) }.emit_parts(&parts, columns, rows.facts.len())
    }
}

/// Returns the share of its rows that a join is expected to keep.
fn expected_share(join: &PreparedJoin) -> f64 {
    kept_share(join.task.expected.pairs_per_row, join.task.how, join.probe_shape.side)
}

/// Refuses a join that cannot be part of a chain.
fn check_join(join: &PreparedJoin) -> Result<()> {
    let (name, how) = (&join.build.table.name, join.task.how);
    let refused = match () {
        () if join.semantics.build_rows_kept.is_some() || join.semantics.keeps_build_without_key() => {
            format!("is a {how} join, which keeps rows of that table for themselves")
        }
        () if join.task.composition.row_layout != RowLayout::Original => {
            format!(
                "has strategy {}, and a chain takes {} only",
                join.task.composition.strategy(),
                super::Strategy::Hash
            )
        }
        () if join.layout.is_hashed_by_device() => "has keys that the device hashes".into(),
        () => return Ok(()),
    };
    Err(Error::Unsupported(format!("the join with table {name:?} cannot be part of a chain: it {refused}")))
}

/// Refuses joins of different rows, and columns that no join gives or that come from a join that
/// lacks their rows.
fn check_columns(joins: &[Arc<PreparedJoin>], schema: &SchemaRef, columns: &[(usize, usize)]) -> Result<()> {
    let facts = &joins[0].probe_shape.table.schema;
    if joins.iter().any(|join| join.probe_shape.table.schema.fields() != facts.fields()) {
        return Err(Error::Internal("the joins of a chain probe rows with different columns".into()));
    }
    let is_of_build = |join: &PreparedJoin| {
        let is_build = |source| matches!(source, OutputSource::Column { side, .. } if side == join.build.side);
        join.task.output.iter().all(|output| is_build(output.source))
    };
    if !joins[1..].iter().all(|join| is_of_build(join)) {
        return Err(Error::Internal("a later join of a chain gives columns of the probed rows".into()));
    }
    let given = |&(join, at): &(usize, usize)| Some(joins.get(join)?.task.schema.fields().get(at)?.data_type());
    let types = schema.fields().iter().map(|field| Some(field.data_type()));
    let are_given = columns.iter().map(given).eq(types);
    let mut once = columns.to_vec();
    once.sort_unstable();
    once.dedup();
    if once.len() != columns.len() || !are_given {
        return Err(Error::Internal("the columns of a chain are not those of its joins".into()));
    }
    Ok(())
}
