//! Probe side of a join: chunk by chunk, on as many streams as the device overlaps.
//!
//! ```text
//!   stream 0   copy in │ transform, match, gather │ copy out │ copy in │ ...
//!   stream 1             copy in                │ transform, match, gather │ copy out │ ...
//!   stream 2                                      copy in │ ...
//! ```
//!
//! One stream processes its chunks one after the other. The CPU has one stream, because its
//! primitives use all of its threads. A GPU with little to overlap has one, too. With more streams,
//! each has a thread that takes the next chunk until none is left. Copies of one chunk then cross
//! the link while another is matched, and the link is busy both ways. All streams share the build
//! side. The first streams to begin may find their first chunk queued already (`prefetch.rs`).

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use parking_lot::Mutex;

use super::chunks::{
    Chunk, ProbeRows, chunk_row_bytes, chunk_rows, even_chunk_rows, fitting_probe_batch_rows, only_copies, streams_of,
};
use super::column_gather::SideRows;
use super::context::{CallStreams, JoinContext};
use super::deferred::{DeferredChunk, DeferredPayload};
use super::prefetch::{Prefetch, PrefetchedChunk};
use super::prepared::PreparedJoin;
use super::progress::{Progress, Stage};
use super::semantics::ChunkOutput;
use super::source::{RowSource, or_stop};
use super::threads::{on_stream_threads, run_on_device_pool};
use super::transform::{CopyIn, Transform, TransformedSide, transform};
use super::{BatchSink, Monitor};
use crate::Result;
use crate::device::Device;
use crate::memory::Arena;

impl PreparedJoin {
    /// Probes the build side with all rows of a source, and pushes the rows that they give.
    /// `device` is the device that prepared the join, or a view of it. The monitor counts the
    /// probed rows. If the source knows their total, the monitor reports progress, too.
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
            let streams = CallStreams::new(device, monitor)?;
            let cx = streams.context(device, arena, monitor);
            let rows = ProbeRows::new(source, &self.task, &self.probe_shape, device);
            let progress = match source.total_rows() {
                Some(_) => Progress::new(&self.task.expected.stage_seconds.of_probe(), monitor),
                None => Progress::of_unknown_total(monitor),
            };
            Probing::new(self, rows, sink, progress).run(&cx)?.finish();
            Ok(())
        })
    }
}

/// One probe of a prepared join, with all rows of a source. Shared by all streams.
pub(super) struct Probing<'a> {
    join: &'a PreparedJoin,
    rows: ProbeRows<'a>,
    sink: &'a dyn BatchSink,
    deferred: Option<DeferredPayload<'a>>,
    /// Chunks that were queued before the build side was ready.
    prefetch: Prefetch,
    /// True if the last chunk needed columns besides its keys on the device. The next chunk will
    /// most likely need them too.
    columns_needed: AtomicBool,
    progress: Mutex<ProbeProgress<'a>>,
}

/// Number of probe rows that are transformed, and number of probe rows that are done.
struct ProbeProgress<'a> {
    inner: Progress<'a>,
    transformed_rows: f64,
    emitted_rows: f64,
}

impl<'a> Probing<'a> {
    pub(super) fn new(
        join: &'a PreparedJoin,
        rows: ProbeRows<'a>,
        sink: &'a dyn BatchSink,
        progress: Progress<'a>,
    ) -> Self {
        Self {
            join,
            rows,
            sink,
            deferred: None,
            prefetch: Prefetch::default(),
            columns_needed: AtomicBool::new(!join.probe_shape.shares),
            progress: Mutex::new(ProbeProgress { inner: progress, transformed_rows: 0.0, emitted_rows: 0.0 }),
        }
    }

    /// Begins with the chunks that `prefetch` has queued, and brings `deferred` columns of the
    /// build side in at the end.
    pub(super) fn continuing(self, prefetch: Prefetch, deferred: Option<DeferredPayload<'a>>) -> Self {
        let columns_needed = AtomicBool::new(deferred.is_some() || self.columns_needed.into_inner());
        Self { prefetch, deferred, columns_needed, ..self }
    }

    /// Probes with all rows, and returns the progress. `cx` is a context of the device that
    /// prepared the join.
    ///
    /// # Errors
    /// The first error of any stream: of the device, the source, the sink, or gathering. A panic of
    /// one of several streams is an error, too.
    pub(super) fn run(self, cx: &JoinContext<'_>) -> Result<Progress<'a>> {
        cx.device.wait_event(&self.join.ready, cx.stream)?;
        self.probe_all(cx)?;
        Ok(self.into_progress())
    }

    /// Returns the progress, once all chunks are joined.
    pub(super) fn into_progress(self) -> Progress<'a> {
        self.progress.into_inner().inner
    }

    fn probe_all(&self, cx: &JoinContext<'_>) -> Result<()> {
        let device = cx.device;
        let streams = streams_of(&self.join.task, self.rows.total_of_rank(), device);
        if streams <= 1 {
            // Copy on the main stream, because probing does not wait for the caller's `copies`.
            let cx = JoinContext { copies: cx.stream, ..*cx };
            self.take_chunks(&cx, None, 1, &AtomicBool::new(false))?;
            return match &self.deferred {
                Some(deferred) => run_on_device_pool(device, || self.complete_deferred(deferred, &cx, 0, 1)),
                None => Ok(()),
            };
        }
        let Some(deferred) = &self.deferred else {
            return self.on_streams(cx, streams, |own, first, failed| self.take_chunks(own, first, streams, failed));
        };
        let to_come = AtomicUsize::new(streams);
        self.on_streams(cx, streams, |own, first, failed| {
            self.take_chunks(own, first, streams, failed)?;
            if failed.load(Ordering::Relaxed) {
                return Ok(());
            }
            // The link stays busy both ways, while other streams work on their last chunk.
            deferred.copy_deferred(self.prefetch.copy_order.last().as_ref(), cx)?;
            let to_come = to_come.fetch_sub(1, Ordering::Relaxed);
            let materializer = self.join.materializer(own, &self.join.probe_shape, self.sink);
            deferred.complete_share(&materializer, &self.join.built.current().transformed, to_come)
        })?;
        if deferred.is_complete() {
            return Ok(());
        }
        let next = AtomicUsize::new(0);
        self.on_streams(cx, streams, |own, _, _| {
            self.complete_deferred(deferred, own, next.fetch_add(1, Ordering::Relaxed), streams)
        })
    }

    /// Runs `work` on `streams` new streams in parallel, until it is done on all, or has failed on
    /// one. The streams begin when the build side is ready. A stream on which a chunk was queued
    /// ahead begins with that chunk.
    fn on_streams(
        &self,
        cx: &JoinContext<'_>,
        streams: usize,
        work: impl Fn(&JoinContext<'_>, Option<PrefetchedChunk>, &AtomicBool) -> Result<()> + Sync,
    ) -> Result<()> {
        let device = cx.device;
        let on_new_stream = |failed: &AtomicBool| {
            let first = self.prefetch.take();
            let stream = match &first {
                Some(first) => first.stream.clone(),
                None => device.stream(cx.monitor.cancel().clone())?,
            };
            device.wait_event(&self.join.ready, &stream)?;
            work(&JoinContext { stream: &stream, copies: &stream, ..*cx }, first, failed)
        };
        on_stream_threads(device, streams, &on_new_stream, &|error| self.rows.stop(error))
    }

    /// Takes chunks until none is left, or another stream has failed. A chunk that was queued ahead
    /// comes first. Waits for rows outside of the device's threads, which other joins need.
    fn take_chunks(
        &self,
        cx: &JoinContext<'_>,
        first: Option<PrefetchedChunk>,
        streams: usize,
        failed: &AtomicBool,
    ) -> Result<()> {
        if let Some(PrefetchedChunk { chunk, transformed, .. }) = first {
            self.join_chunk(cx, streams, &chunk, &transformed)?;
        }
        while !failed.load(Ordering::Relaxed)
            && let Some(chunk) = self.next_chunk(cx, streams)?
        {
            run_on_device_pool(cx.device, || self.probe_chunk(cx, streams, &chunk))?;
        }
        Ok(())
    }

    /// Completes one stream's share of the rows that wait for columns of the build side.
    fn complete_deferred(
        &self,
        deferred: &DeferredPayload<'_>,
        cx: &JoinContext<'_>,
        number: usize,
        streams: usize,
    ) -> Result<()> {
        let materializer = self.join.materializer(cx, &self.join.probe_shape, self.sink);
        deferred.complete(&materializer, &self.join.built.current().transformed, number, streams)
    }

    fn next_chunk(&self, cx: &JoinContext<'_>, streams: usize) -> Result<Option<Chunk>> {
        let PreparedJoin { task, layout, .. } = self.join;
        let device = cx.device;
        self.rows.take(
            |segment, left| {
                let most = match streams > 1 || self.rows.are_shared() {
                    true => even_chunk_rows(task, layout, segment.table.rows, streams, self.rows.ranks()),
                    false => segment.table.rows,
                };
                let rows = left.start..left.end.min(left.start + most);
                let row_bytes = chunk_row_bytes(segment, layout) as u64;
                chunk_rows(segment, layout, row_bytes, device, self.held_back_bytes(device), streams, rows)
            },
            cx.monitor.cancel(),
        )
    }

    fn probe_chunk(&self, cx: &JoinContext<'_>, streams: usize, chunk: &Chunk) -> Result<()> {
        let rows = chunk.segment.rows(chunk.rows.clone());
        let null_keys = self.join.semantics.keeps_probe_without_key();
        // Copies overlap with other chunks' work only if there are several streams.
        let copy_in = match streams > 1 && self.columns_needed.load(Ordering::Relaxed) {
            true => CopyIn::Prefetch,
            false => CopyIn::WhenNeeded,
        };
        let PreparedJoin { task, layout, filter, .. } = self.join;
        let (row_layout, filter) = (task.composition.row_layout, filter.as_ref());
        let how = Transform { layout, row_layout, keeps_null_keys: null_keys, filter, copy_in };
        let transform = || transform(cx, &chunk.segment, rows, how);
        let transformed = match streams > 1 && only_copies(task, layout) {
            true => self.prefetch.copy_order.take(cx.device, cx.stream, transform)?.0,
            false => transform()?,
        };
        self.join_chunk(cx, streams, chunk, &transformed)
    }

    /// Matches a chunk and emits its rows.
    ///
    /// # Errors
    /// Errors of the device, the sink, and gathering.
    pub(super) fn join_chunk(
        &self,
        cx: &JoinContext<'_>,
        streams: usize,
        chunk: &Chunk,
        transformed: &TransformedSide,
    ) -> Result<()> {
        let deferred = self.deferred.as_ref().map(DeferredChunk::new);
        let materializer = self.join.materializer(cx, &chunk.segment, self.sink);
        self.transformed(chunk.len() as f64);
        if let Some(null_keys) = &transformed.null_keys {
            let rows = SideRows::Numbered(transformed, null_keys.clone());
            materializer.emit(&SideRows::Missing, &rows, null_keys.len(), &mut |_| {})?;
        }
        let probe_batch_rows = fitting_probe_batch_rows(cx.device, self.held_back_bytes(cx.device), streams);
        let mut emitted = 0.0;
        let output =
            ChunkOutput { materializer: &materializer, flags: self.join.flags.as_ref(), deferred: deferred.as_ref() };
        self.join.semantics.join_chunk(&output, &self.join.built, transformed, probe_batch_rows, &mut |rows| {
            self.emitted(rows);
            emitted += rows;
        })?;
        deferred.as_ref().map_or(Ok(()), |deferred| deferred.finish(&materializer))?;
        self.columns_needed.store(transformed.used_originals(), Ordering::Relaxed);
        // Rows without a key take part in no probe batch.
        self.emitted(chunk.len() as f64 - emitted);
        cx.monitor.add_probed_rows(chunk.len());
        Ok(())
    }

    /// Returns the device memory that the build side may still take.
    fn held_back_bytes(&self, device: &dyn Device) -> u64 {
        let columns = self.deferred.as_ref().map_or(0, DeferredPayload::bytes_to_come);
        self.join.built.current().grouping_bytes(device) + columns
    }

    fn transformed(&self, rows: f64) {
        let mut progress = self.progress.lock();
        progress.transformed_rows += rows;
        let done = progress.transformed_rows;
        self.reach(&mut progress.inner, Stage::TransformProbe, done);
    }

    fn emitted(&self, rows: f64) {
        let mut progress = self.progress.lock();
        progress.emitted_rows += rows;
        let done = progress.emitted_rows;
        self.reach(&mut progress.inner, Stage::Results, done);
    }

    fn reach(&self, progress: &mut Progress<'_>, stage: Stage, rows: f64) {
        if let Some(total) = self.rows.total_of_rank() {
            progress.reach(stage, rows / total as f64);
        }
    }
}
