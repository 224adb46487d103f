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

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use parking_lot::Mutex;

use super::copy_order::CopyOrder;
use super::deferred::{DeferredChunk, DeferredPayload};
use super::inputs::SideInput;
use super::materialize::{Materializer, SideRows};
use super::prefetch::{Prefetch, PrefetchedChunk};
use super::prepared::PreparedJoin;
use super::progress::{Progress, Stage};
use super::threads::run_on_device_pool;
use super::transform::{CopyIn, JoinContext, TransformedSide, transform};
use super::{BatchSink, RowLayout, Task, TransferOrder};
use crate::Result;
use crate::columns::KeyLayout;
use crate::device::{Device, ROWS_MAX};

/// Chunks per stream if several streams work on the probe side. The first copy in and the last copy
/// out overlap with nothing. Twice as many chunks pay if each reads only its own rows and their
/// matches, and copies [`COPY_BYTES`] of keys. A `hash` join of 2^27 rows of 16 bytes with 2^27
/// such rows takes 90 ms with 5 chunks per stream. It takes 89 ms with 8 and 88.6 ms with 12. The
/// factor is two so that each larger chunk is two smaller ones. Columns cached in chunks of one
/// size then serve both sizes.
const CHUNKS_PER_STREAM: u64 = 5;

/// Rows of the smallest chunk of a probe side. Fewer rows would cost more in calls than they save
/// in memory.
pub(crate) const CHUNK_ROWS_MIN: u64 = 1024;

/// Bytes that one copy should carry.
const COPY_BYTES: u64 = 16 << 20;

/// Returns the number of chunks per stream, for a probe side with the given rows and bytes per key.
/// `is_looked_up` is true if the probe side stays in table order, so that no chunk goes through all
/// of the build side.
pub(crate) fn chunks_per_stream(rows: u64, key_bytes: usize, streams: u64, is_looked_up: bool) -> u64 {
    let copies = rows.saturating_mul(key_bytes as u64) / COPY_BYTES;
    let twice = 2 * CHUNKS_PER_STREAM;
    if is_looked_up && copies >= twice * streams { twice } else { CHUNKS_PER_STREAM }
}

/// Rows in one word of a bitmap. Chunks start at whole words of their columns' bitmaps, so the
/// bitmaps can be copied as they are.
const BITMAP_ROWS: u64 = 64;

/// One probe of a prepared join, with all rows of a table. Shared by all streams.
pub(super) struct Probing<'a> {
    join: &'a PreparedJoin,
    /// The rows that are probed.
    probe: &'a SideInput,
    sink: &'a dyn BatchSink,
    /// Deferred columns of the build side, if any.
    deferred: Option<DeferredPayload<'a>>,
    /// Chunks that were queued before the build side was ready.
    prefetch: Prefetch,
    /// Makes chunks cross the link one after the other.
    copy_order: CopyOrder,
    /// First row of the next chunk.
    next_row: Mutex<u64>,
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
    /// Begins with the chunks that `prefetch` has queued.
    #[allow(clippy::too_many_arguments)]
    pub(super) fn new(
        join: &'a PreparedJoin,
        probe: &'a SideInput,
        sink: &'a dyn BatchSink,
        deferred: Option<DeferredPayload<'a>>,
        prefetch: Prefetch,
        copy_order: CopyOrder,
        columns_needed: bool,
        progress: Progress<'a>,
    ) -> Self {
        Self {
            join,
            probe,
            sink,
            deferred,
            next_row: Mutex::new(prefetch.next_row),
            prefetch,
            copy_order,
            columns_needed: AtomicBool::new(columns_needed),
            progress: Mutex::new(ProbeProgress { inner: progress, transformed_rows: 0.0, emitted_rows: 0.0 }),
        }
    }

    /// Probes with all rows, and returns the progress. `cx` is a context of the device that
    /// prepared the join.
    ///
    /// # Errors
    /// The first error of any stream: of the device, the sink, or gathering.
    pub(super) fn run(self, cx: &JoinContext<'_>) -> Result<Progress<'a>> {
        cx.device.wait_event(&self.join.ready, cx.stream)?;
        self.probe_all(cx)?;
        Ok(self.progress.into_inner().inner)
    }

    fn probe_all(&self, cx: &JoinContext<'_>) -> Result<()> {
        let device = cx.device;
        let streams = streams_of(&self.join.task, self.probe, device);
        if streams <= 1 {
            // Copy on the main stream, because probing does not wait for the caller's `copies`.
            let cx = JoinContext { copies: cx.stream, ..*cx };
            let never = AtomicBool::new(false);
            return run_on_device_pool(device, || {
                self.take_chunks(&cx, None, 1, &never)?;
                self.complete_deferred(&cx, 0, 1)
            });
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
            deferred.copy_deferred(self.copy_order.last().as_ref(), cx)?;
            let (materializer, to_come) = (self.materializer(own, None), to_come.fetch_sub(1, Ordering::Relaxed));
            deferred.complete_share(&materializer, &self.join.built.current().transformed, to_come)
        })?;
        if deferred.is_complete() {
            return Ok(());
        }
        let next = AtomicUsize::new(0);
        self.on_streams(cx, streams, |own, _, _| {
            self.complete_deferred(own, next.fetch_add(1, Ordering::Relaxed), streams)
        })
    }

    /// Runs `work` on `streams` new streams in parallel, until it is done on all, or has failed on
    /// one. The streams begin when the work queued so far on the caller's stream is done. A stream
    /// on which a chunk was queued ahead begins with that chunk.
    fn on_streams(
        &self,
        cx: &JoinContext<'_>,
        streams: usize,
        work: impl Fn(&JoinContext<'_>, Option<PrefetchedChunk>, &AtomicBool) -> Result<()> + Sync,
    ) -> Result<()> {
        let device = cx.device;
        let built = device.record_event(cx.stream)?;
        let on_new_stream = |failed: &AtomicBool| {
            let first = self.prefetch.take();
            let stream = match &first {
                Some(first) => first.stream.clone(),
                None => device.stream(cx.monitor.cancel().clone())?,
            };
            device.wait_event(&built, &stream)?;
            work(&JoinContext { stream: &stream, copies: &stream, ..*cx }, first, failed)
        };
        let failed = AtomicBool::new(false);
        let failure = Mutex::new(None);
        // Do not run this on the device's CPU threads: a thread that waits for its parts takes up
        // other work. That work may be another stream's, and wait for something that this stream
        // holds.
        device.on_stream_threads(streams, &|| {
            if let Err(error) = on_new_stream(&failed) {
                failed.store(true, Ordering::Relaxed);
                failure.lock().get_or_insert(error);
            }
        })?;
        failure.into_inner().map_or(Ok(()), Err)
    }

    /// Takes chunks until none is left, or another stream has failed. A chunk that was queued ahead
    /// comes first.
    fn take_chunks(
        &self,
        cx: &JoinContext<'_>,
        first: Option<PrefetchedChunk>,
        streams: usize,
        failed: &AtomicBool,
    ) -> Result<()> {
        if let Some(PrefetchedChunk { rows, transformed, .. }) = first {
            self.join_chunk(cx, streams, rows, &transformed)?;
        }
        while !failed.load(Ordering::Relaxed)
            && let Some(rows) = self.next_chunk(cx.device, streams)
        {
            self.probe_chunk(cx, streams, rows)?;
        }
        Ok(())
    }

    /// Completes one stream's share of the rows that wait for columns of the build side.
    fn complete_deferred(&self, cx: &JoinContext<'_>, number: usize, streams: usize) -> Result<()> {
        let Some(deferred) = &self.deferred else { return Ok(()) };
        deferred.complete(&self.materializer(cx, None), &self.join.built.current().transformed, number, streams)
    }

    fn materializer<'e>(
        &'e self,
        cx: &'e JoinContext<'_>,
        deferred: Option<&'e DeferredChunk<'e>>,
    ) -> Materializer<'e> {
        self.join.materializer(cx, self.probe, self.sink, deferred)
    }

    fn next_chunk(&self, device: &dyn Device, streams: usize) -> Option<Range<u64>> {
        let total = self.probe.table.rows;
        let mut next = self.next_row.lock();
        let start = *next;
        if start == total {
            return None;
        }
        let most = match streams > 1 {
            true => even_chunk_rows(&self.join.task, &self.join.layout, total, streams),
            false => total,
        };
        let rows = start..total.min(start + most);
        let rows = chunk_rows(self.probe, &self.join.layout, device, self.held_back_bytes(device), streams, rows);
        *next = total.min(start + rows);
        Some(start..*next)
    }

    fn probe_chunk(&self, cx: &JoinContext<'_>, streams: usize, range: Range<u64>) -> Result<()> {
        let rows = self.probe.rows(range.clone());
        let null_keys = self.join.semantics.keeps_probe_without_key();
        // Copies overlap with other chunks' work only if there are several streams.
        let copy_in = match streams > 1 && self.columns_needed.load(Ordering::Relaxed) {
            true => CopyIn::Prefetch,
            false => CopyIn::WhenNeeded,
        };
        let filter = self.join.filter.as_ref();
        let transform = || {
            transform(
                cx,
                self.probe,
                rows,
                &self.join.layout,
                self.join.task.composition.row_layout,
                null_keys,
                filter,
                copy_in,
            )
        };
        let transformed = match streams > 1 && only_copies(&self.join.task, &self.join.layout) {
            true => self.copy_order.take(cx.device, cx.stream, transform)?.0,
            false => transform()?,
        };
        self.join_chunk(cx, streams, range, &transformed)
    }

    /// Matches a chunk and emits its rows.
    fn join_chunk(
        &self,
        cx: &JoinContext<'_>,
        streams: usize,
        range: Range<u64>,
        transformed: &TransformedSide,
    ) -> Result<()> {
        let chunk_rows = (range.end - range.start) as f64;
        let deferred = self.deferred.as_ref().map(DeferredChunk::new);
        let materializer = self.materializer(cx, deferred.as_ref());
        self.transformed(chunk_rows);
        if let Some(null_keys) = &transformed.null_keys {
            let rows = SideRows::Numbered(transformed, null_keys.clone());
            materializer.emit(&SideRows::Missing, &rows, null_keys.len(), &mut |_| {})?;
        }
        let probe_batch_rows = probe_batch_rows(cx.device, self.held_back_bytes(cx.device), streams);
        let mut emitted = 0.0;
        self.join.semantics.join_chunk(
            &materializer,
            &self.join.built,
            self.join.flags.as_ref(),
            transformed,
            probe_batch_rows,
            &mut |rows| {
                self.emitted(rows);
                emitted += rows;
            },
        )?;
        deferred.as_ref().map_or(Ok(()), |deferred| deferred.finish(&materializer))?;
        self.columns_needed.store(transformed.used_originals(), Ordering::Relaxed);
        // Rows without a key take part in no probe batch.
        self.emitted(chunk_rows - emitted);
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
        let share = progress.transformed_rows / self.probe.table.rows as f64;
        progress.inner.reach(Stage::TransformProbe, share);
    }

    fn emitted(&self, rows: f64) {
        let mut progress = self.progress.lock();
        progress.emitted_rows += rows;
        let share = progress.emitted_rows / self.probe.table.rows as f64;
        progress.inner.reach(Stage::Results, share);
    }
}

/// Returns the number of streams that work on chunks.
pub(super) fn streams_of(task: &Task, probe: &SideInput, device: &dyn Device) -> usize {
    let chunks = probe.table.rows.div_ceil(task.chunk_rows_min());
    if task.composition.transfer_order == TransferOrder::ProbeAtOnce {
        1
    } else {
        (device.tuning().streams as u64).min(chunks) as usize
    }
}

/// True if chunks are ready to be matched once they are copied in.
pub(super) fn only_copies(task: &Task, layout: &KeyLayout) -> bool {
    task.composition.row_layout == RowLayout::Original && !layout.is_made_on_host()
}

/// Returns the rows of each chunk except the last, for a probe side of `total` rows and enough
/// memory for several streams.
pub(super) fn even_chunk_rows(task: &Task, layout: &KeyLayout, total: u64, streams: usize) -> u64 {
    let is_looked_up = task.composition.row_layout == RowLayout::Original;
    let chunks = chunks_per_stream(total, layout.width().bytes(), streams as u64, is_looked_up);
    let halves = chunks / CHUNKS_PER_STREAM;
    let even = total.div_ceil(CHUNKS_PER_STREAM * streams as u64);
    let even = if even > CHUNK_ROWS_MIN { even.next_multiple_of(halves * BITMAP_ROWS) / halves } else { even };
    even.max(task.chunk_rows_min())
}

/// Returns the bytes of device memory that a row of a chunk takes. Keys are packed and transformed
/// (and stored once more while sorting). Columns are copied in, moved, and sorted. Row numbers,
/// matches and pairs take 32 bytes.
pub(super) fn chunk_row_bytes(probe: &SideInput, layout: &KeyLayout) -> usize {
    let gathered: usize = text_beside_keys(probe, layout).map(|column| probe.text_row_bytes(column)).sum();
    let of_text = layout.value_row_bytes(probe.role) + gathered;
    3 * layout.width().bytes() + 3 * probe.device_row_bytes() + of_text + 32
}

/// Returns the bytes of variable-length values in the given rows, if the device makes keys of them
/// or gathers them. They come in addition to the bytes of [each row](chunk_row_bytes).
pub(super) fn value_bytes(probe: &SideInput, layout: &KeyLayout, rows: Range<u64>) -> u64 {
    if !layout.is_made_by_device() && probe.text_columns().next().is_none() {
        // Avoids a needless pass over the rows.
        return 0;
    }
    let rows = probe.rows(rows);
    layout.value_bytes(&rows, &probe.key_columns) + rows.value_bytes(text_beside_keys(probe, layout))
}

/// Returns the columns of text that the device gathers and that were not copied in as keys.
fn text_beside_keys<'a>(probe: &'a SideInput, layout: &'a KeyLayout) -> impl Iterator<Item = usize> + 'a {
    let came_as_key = |column: usize| layout.is_made_by_device() && probe.key_columns.contains(&column);
    probe.text_columns().filter(move |&column| !came_as_key(column))
}

/// Returns how many of the first probe rows in `of` have a working set that fits next to the build
/// side. It may take a stream's share of half of the free memory, without `held_back`.
fn chunk_rows(
    probe: &SideInput,
    layout: &KeyLayout,
    device: &dyn Device,
    held_back: u64,
    streams: usize,
    of: Range<u64>,
) -> u64 {
    let half = device.memory().free_bytes().saturating_sub(held_back) / streams as u64 / 2;
    let row_bytes = chunk_row_bytes(probe, layout) as u64;
    let fit = (half / row_bytes).clamp(CHUNK_ROWS_MIN, ROWS_MAX as u64);
    let mut rows = (fit - fit % BITMAP_ROWS).min((of.end - of.start).max(CHUNK_ROWS_MIN));
    // Text of these rows may be longer than average, so look at it.
    let value_bytes = |rows: u64| value_bytes(probe, layout, of.start..of.end.min(of.start + rows));
    while rows > CHUNK_ROWS_MIN && rows * row_bytes + value_bytes(rows) > half {
        rows = (rows / 2).max(CHUNK_ROWS_MIN).next_multiple_of(BITMAP_ROWS);
    }
    rows
}

/// Returns the probe batch size that the device prefers, limited to an eighth of a stream's share
/// of free memory. Matches, pairs and row numbers take about 64 bytes per row.
fn probe_batch_rows(device: &dyn Device, held_back: u64, streams: usize) -> usize {
    let fit = (device.memory().free_bytes().saturating_sub(held_back) / streams as u64 / 8 / 64) as usize;
    device.tuning().probe_batch_rows.min(fit).max(CHUNK_ROWS_MIN as usize)
}

#[cfg(test)]
mod tests {
    use super::chunks_per_stream;

    #[test]
    fn the_number_of_chunks_follows_the_cost_of_their_copies() {
        const ROWS: u64 = 1 << 27;
        let chunks =
            [(ROWS, 4, true), (ROWS, 8, true), (ROWS, 16, true), (ROWS, 8, false), (1 << 20, 8, true), (0, 4, true)];
        let found = chunks.map(|(rows, key_bytes, is_looked_up)| chunks_per_stream(rows, key_bytes, 5, is_looked_up));
        assert_eq!(found, [5, 10, 10, 5, 5, 5]);
    }
}
