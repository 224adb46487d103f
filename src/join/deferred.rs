//! Build columns that cross the link last, so that rows of the result leave before all of the build
//! side has arrived.
//!
//! ```text
//!   link in    build keys │ probe chunks: keys and columns │ build columns, part by part
//!   link out              │ probe columns of the result ...│... build columns of the result
//! ```
//!
//! If all of the build side comes first, nothing leaves the device until that side has arrived, and
//! nothing comes in while the last rows leave. Here only the build keys come first. Each chunk's
//! pairs are divided by part: the range of build rows that they refer to. The pairs' columns of the
//! probe side leave at once. When the last chunk is in, the build side's other columns follow, part
//! by part. As soon as a part has arrived, the rows that refer to it get their columns and are
//! complete.
//!
//! Waiting rows take host memory for the whole result except the deferred columns, and one row
//! number per row on the device. If either memory runs short, the stream that notices completes the
//! waiting rows. The rest of the join then goes on with all of the build side on the device.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;

use super::batch_sizes::BatchSizes;
use super::column_gather::SideRows;
use super::context::JoinContext;
use super::copy_order::CopyOrder;
use super::inputs::SideInput;
use super::materialize::{Group, Materializer, PartialBatch, StoredPartialBatch};
use super::transform::{TransformedSide, copy_column, copy_text};
use super::{JoinKind, RowLayout, Task};
use crate::device::{BytesColumn, Column, Event, PARTS_MAX, Pairs, Phase, Positions};
use crate::memory::ArenaReservation;
use crate::{Error, Result};

/// Largest number of parts of a build side. With many parts, little is left to do when the last has
/// arrived. With few, each part is worth the cost of its calls.
const PARTS: u64 = 16;
const _: () = assert!(PARTS <= PARTS_MAX as u64, "devices divide pairs into at most PARTS_MAX parts");

/// Divisor of free host memory. Build columns are deferred only if the expected result takes at
/// most this share. All of the result is in host memory when the last of these columns arrives,
/// whatever readers have read.
const FREE_SHARE: u64 = 2;

/// Pairs divided at once, at most. Enough that the pairs of each part are worth a copy.
const PAIRS_AT_ONCE: usize = 1 << 24;

/// Returns the pairs to divide at once, if a device gathers text of `text_row_bytes` bytes per row
/// on average. All text of these pairs is in memory at once, so it is limited to a few times
/// `gather_bytes`.
pub(super) fn pairs_at_once(text_row_bytes: u64, gather_bytes: usize) -> usize {
    const GATHERS: u64 = 4;
    match (GATHERS * gather_bytes as u64).checked_div(text_row_bytes) {
        Some(pairs) => PAIRS_AT_ONCE.min(pairs as usize),
        None => PAIRS_AT_ONCE,
    }
}

/// Deferred columns of the build side, and the rows that wait for them.
pub(super) struct DeferredPayload<'a> {
    build: &'a SideInput,
    /// Columns that devices move.
    columns: Vec<usize>,
    /// Columns of text that the device gathers.
    text: Vec<usize>,
    text_bytes: u64,
    /// Base-2 logarithm of the rows of each part except the last.
    part_bits: u32,
    /// Ranges of the table's rows.
    parts: Vec<Range<u64>>,
    arriving: Mutex<Arriving>,
    /// Makes parts cross the link one after the other.
    copy_order: CopyOrder,
    /// Rows of chunks whose copies are done.
    waiting: Mutex<Vec<Arc<WaitingRows<StoredPartialBatch>>>>,
    /// True if memory ran short, so that no more rows wait.
    is_short: AtomicBool,
    /// True if all deferred columns are on the device, for rows that do not wait.
    whole: Mutex<bool>,
    /// Host memory reserved to complete some rows, however much memory the waiting rows take. It is
    /// given back when no more rows will wait.
    headroom: Mutex<Option<ArenaReservation>>,
    /// Rows whose deferred columns are gathered at once.
    rows_at_once: usize,
    /// Host memory that all streams together take for these gathers at a time, at most.
    at_once_bytes: u64,
}

/// Parts that have arrived or are on their way.
#[derive(Default)]
struct Arriving {
    asked_for: usize,
    there: BTreeMap<usize, (Part, Event)>,
}

/// Columns of a part on the device.
#[derive(Clone)]
struct Part {
    columns: BTreeMap<usize, Column>,
    text: BTreeMap<usize, BytesColumn>,
}

/// Rows whose columns of the build side come later.
struct WaitingRows<Columns> {
    partial: Columns,
    /// Row numbers in the build side, ordered by part. Each counts from the start of its part.
    build: Positions,
    /// Start of the rows of each part, and end of the last part.
    bounds: Vec<usize>,
}

impl<'a> DeferredPayload<'a> {
    /// Returns `None` if all of the build side comes first. Payload is deferred only if the task
    /// asks for it, for inner joins that emit rows in table order. The result must need columns of
    /// the build side that the device moves, and no key column of it. Host memory must have room
    /// for the whole result to wait.
    pub(super) fn of(
        task: &Task,
        build: &'a SideInput,
        probe: &SideInput,
        sizes: BatchSizes,
        cx: &JoinContext<'_>,
    ) -> Option<Self> {
        let is_plain =
            task.how == JoinKind::Inner && task.composition.row_layout == RowLayout::Original && !task.counts_rows;
        let output = &build.output_columns;
        let columns: Vec<usize> = output.iter().copied().filter(|&column| build.movable(column).is_some()).collect();
        let gives_keys = build.key_columns.iter().any(|key| output.binary_search(key).is_ok());
        let text: Vec<usize> = build.text_columns().collect();
        if !task.composition.defers_build_payload()
            || !is_plain
            || gives_keys
            || (columns.is_empty() && text.is_empty())
        {
            return None;
        }
        let result_rows = task.expected.pairs_per_row * probe.table.rows as f64;
        if result_rows * task.expected.row_bytes > (cx.arena.free_bytes() / FREE_SHARE) as f64 {
            return None;
        }
        // Each stream makes batches while its previous batches are on their way.
        let streams = cx.device.tuning().streams as u64;
        let row_bytes = mean_row_bytes(build);
        let rows_at_once = sizes.gather_rows_of(row_bytes);
        let headroom_bytes = 4 * (streams + 1) * (sizes.batch_rows as u64 * row_bytes).next_multiple_of(64);
        let headroom = cx.arena.reserve(headroom_bytes, "completing rows whose build columns are deferred").ok()?;
        let rows = build.table.rows;
        let table = build.rows(0..rows);
        let bytes_of = |&column: &usize| {
            let bits = rows * u64::from(build.has_nulls(column));
            table.value_bytes([column]) + rows * build.text_row_bytes(column) as u64 + bits.div_ceil(8)
        };
        let text_bytes = text.iter().map(bytes_of).sum();
        let part_bits = part_bits(rows, task.chunk_rows_min());
        let part_rows = 1u64 << part_bits;
        let parts = (0..rows.div_ceil(part_rows)).map(|part| part * part_rows..rows.min((part + 1) * part_rows));
        Some(Self {
            build,
            columns,
            text,
            text_bytes,
            part_bits,
            parts: parts.collect(),
            arriving: Mutex::default(),
            copy_order: CopyOrder::default(),
            waiting: Mutex::default(),
            is_short: AtomicBool::new(false),
            whole: Mutex::new(false),
            headroom: Mutex::new(Some(headroom)),
            rows_at_once,
            at_once_bytes: 2 * streams * rows_at_once as u64 * row_bytes,
        })
    }

    /// Returns the bytes that all deferred columns take on the device, or 0 once they are there. If
    /// memory runs short, all of these columns are needed at once.
    pub(super) fn bytes_to_come(&self) -> u64 {
        let row_bits = |&column: &usize| {
            let width = self.build.movable(column).map_or(0, |movable| movable.width.bytes() as u64);
            8 * width + u64::from(self.build.has_nulls(column))
        };
        let bits: u64 = self.columns.iter().map(row_bits).sum();
        if *self.whole.lock() { 0 } else { self.build.table.rows * bits / 8 + self.text_bytes }
    }

    /// Queues copies of all parts that were not queued yet, after `last`. The streams have taken
    /// all chunks by then. If there is no memory for a part, queues no more parts: the stream that
    /// completes the rows of a part queues its copies then.
    ///
    /// # Errors
    /// Errors of the device, except exhausted memory.
    pub(super) fn copy_deferred(&self, last: Option<&Event>, cx: &JoinContext<'_>) -> Result<()> {
        if let Some(last) = last {
            cx.device.wait_event(last, cx.copies)?;
        }
        let mut arriving = self.arriving.lock();
        let outcome =
            (arriving.asked_for..self.parts.len()).try_for_each(|part| self.copy_part(&mut arriving, part, cx));
        match outcome {
            Err(Error::Exhausted(_)) => Ok(()),
            outcome => outcome,
        }
    }

    fn copy_part(&self, arriving: &mut Arriving, part: usize, cx: &JoinContext<'_>) -> Result<()> {
        let rows = self.build.rows(self.parts[part].clone());
        let copy = |&column: &usize| Ok((column, copy_column(cx, cx.copies, &rows, column)?));
        let copy_text = |&column: &usize| Ok((column, copy_text(cx, cx.copies, &rows, column)?));
        let copies = || -> Result<Part> {
            let columns = self.columns.iter().map(copy).collect::<Result<_>>()?;
            Ok(Part { columns, text: self.text.iter().map(copy_text).collect::<Result<_>>()? })
        };
        let (columns, there) = self.copy_order.take(cx.device, cx.copies, copies)?;
        arriving.there.insert(part, (columns, there));
        arriving.asked_for = arriving.asked_for.max(part + 1);
        Ok(())
    }

    /// Returns the rows of a part with its columns. Work queued on the context's stream from now
    /// on may read them.
    fn part(&self, part: usize, build: &TransformedSide, cx: &JoinContext<'_>) -> Result<TransformedSide> {
        let mut arriving = self.arriving.lock();
        if !arriving.there.contains_key(&part) {
            self.copy_part(&mut arriving, part, &JoinContext { copies: cx.stream, ..*cx })?;
        }
        let (Part { columns, text }, there) = &arriving.there[&part];
        cx.device.wait_event(there, cx.stream)?;
        Ok(build.part(self.build.rows(self.parts[part].clone()), columns.clone(), text.clone()))
    }

    /// Completes a share of the waiting rows, part after part. Leaves equal shares to the streams
    /// that are yet to come. The completed rows leave while other streams work on their last chunk.
    /// Completes nothing unless memory is ample, because rows of those last chunks may have to wait
    /// in it first.
    ///
    /// # Errors
    /// Errors of the device, the sink, and gathering.
    pub(super) fn complete_share(
        &self,
        materializer: &Materializer<'_>,
        build: &TransformedSide,
        streams_to_come: usize,
    ) -> Result<()> {
        let are_parts_coming = self.arriving.lock().asked_for == self.parts.len();
        let is_ample = are_parts_coming && materializer.cx.arena.free_bytes() >= self.at_once_bytes;
        if !is_ample || self.is_short.load(Ordering::Relaxed) {
            return Ok(());
        }
        let share = {
            let mut waiting = self.waiting.lock();
            let others = waiting.len() - waiting.len().div_ceil(streams_to_come);
            waiting.split_off(others)
        };
        self.complete_these(&share.iter().collect::<Vec<_>>(), materializer, build)
    }

    /// True if no rows wait any more.
    pub(super) fn is_complete(&self) -> bool {
        self.waiting.lock().is_empty()
    }

    /// Completes the rows that still wait, part after part, once all chunks are joined. `streams`
    /// streams do so in parallel, and this call is for number `stream`. Each stream has a share of
    /// the rows of every part, because there may be few parts, or most rows may refer to one part.
    ///
    /// # Errors
    /// Errors of the device, the sink, and gathering.
    pub(super) fn complete(
        &self,
        materializer: &Materializer<'_>,
        build: &TransformedSide,
        stream: usize,
        streams: usize,
    ) -> Result<()> {
        *self.headroom.lock() = None;
        let waiting = self.waiting.lock().clone();
        let share: Vec<_> = waiting.iter().skip(stream).step_by(streams).collect();
        self.complete_these(&share, materializer, build)
    }

    /// Completes the rows that wait now, to give their memory back.
    fn complete_early(&self, materializer: &Materializer<'_>, build: &TransformedSide) -> Result<()> {
        *self.headroom.lock() = None;
        let waiting = std::mem::take(&mut *self.waiting.lock());
        self.complete_these(&waiting.iter().collect::<Vec<_>>(), materializer, build)?;
        self.arriving.lock().there.clear();
        Ok(())
    }

    fn complete_these(
        &self,
        waiting: &[&Arc<WaitingRows<StoredPartialBatch>>],
        materializer: &Materializer<'_>,
        build: &TransformedSide,
    ) -> Result<()> {
        let JoinContext { device, stream, .. } = *materializer.cx;
        let group_of = |part: usize| {
            waiting.iter().filter_map(move |rows| {
                let range = rows.bounds[part]..rows.bounds[part + 1];
                (!range.is_empty()).then_some(Group { partial: &rows.partial, build: &rows.build, part, range })
            })
        };
        let groups: Vec<Group<'_>> = (0..self.parts.len()).flat_map(group_of).collect();
        // A stream that completes rows early drops all parts, including parts that this stream
        // reads.
        let mut read = Vec::new();
        let outcome = materializer.emit_deferred(&groups, self.rows_at_once, &mut |part| {
            let part = self.part(part, build, materializer.cx)?;
            read.push(part.clone());
            Ok(part)
        });
        // The parts dropped next must not be read any more, whether or not gathering succeeded.
        let settled = device.synchronize(&stream.uncancelled());
        drop(read);
        outcome.and(settled)
    }

    /// Copies all deferred columns to the device, unless that was done. Rows that do not wait are
    /// gathered from there.
    fn bring_whole(&self, build: &TransformedSide, cx: &JoinContext<'_>) -> Result<()> {
        let mut whole = self.whole.lock();
        if !*whole {
            let columns = self.columns.iter().try_for_each(|&column| build.original(column, cx).map(drop));
            let bring_text = |&column: &usize| build.original_text(column, cx).map(drop);
            let brought = columns.and_then(|()| self.text.iter().try_for_each(bring_text));
            // Other streams read these columns without waiting for this stream's copies, even
            // columns that were queued before a copy failed.
            let settled = cx.device.synchronize(&cx.stream.uncancelled());
            brought.and(settled)?;
            *whole = true;
        }
        Ok(())
    }
}

/// Returns the bytes of a row in the columns that the result takes from a side. Columns without a
/// fixed width count with the mean row of the whole table.
fn mean_row_bytes(input: &SideInput) -> u64 {
    let is_moved = |&column: &usize| input.movable(column).is_some();
    let others = if input.output_columns.iter().all(is_moved) { 0 } else { input.table.bytes };
    input.device_row_bytes() as u64 + 1 + others / input.table.rows.max(1)
}

/// Returns the bits of the row numbers of a part, such that [`PARTS`] parts are enough. Each part
/// except the last has at least `part_rows_min` rows.
fn part_bits(rows: u64, part_rows_min: u64) -> u32 {
    rows.div_ceil(PARTS).max(part_rows_min).next_power_of_two().trailing_zeros()
}

/// Waiting rows of one chunk, whose copies may be under way.
pub(super) struct DeferredChunk<'a> {
    deferred: &'a DeferredPayload<'a>,
    waiting: Mutex<Vec<WaitingRows<PartialBatch>>>,
}

impl<'a> DeferredChunk<'a> {
    pub(super) fn new(deferred: &'a DeferredPayload<'a>) -> Self {
        Self { deferred, waiting: Mutex::default() }
    }

    /// Copies out the columns of the probe side of some pairs, to complete the rows later. Returns
    /// false if memory is short. Then no column of these pairs has left, all waiting rows are
    /// complete, and the build side has all of its columns.
    ///
    /// # Errors
    /// Errors of the device, the sink, and gathering.
    pub(super) fn defer(
        &self,
        materializer: &Materializer<'_>,
        build: &TransformedSide,
        probe: &TransformedSide,
        pairs: &Pairs,
    ) -> Result<bool> {
        if !self.deferred.is_short.load(Ordering::Relaxed) {
            let mut queued = Vec::new();
            match self.queue(materializer, build, probe, pairs, &mut queued) {
                Err(Error::Exhausted(_)) => self.deferred.is_short.store(true, Ordering::Relaxed),
                outcome => {
                    // All of the pairs wait, or none.
                    outcome?;
                    self.waiting.lock().extend(queued);
                    return Ok(true);
                }
            }
        }
        materializer.cx.device.synchronize(materializer.cx.stream)?;
        self.finish(materializer)?;
        self.deferred.complete_early(materializer, build)?;
        self.deferred.bring_whole(build, materializer.cx)?;
        Ok(false)
    }

    /// Queues pairs. Halves them if their text is too long for the offsets of its type, or far
    /// longer than expected.
    fn queue(
        &self,
        materializer: &Materializer<'_>,
        build: &TransformedSide,
        probe: &TransformedSide,
        pairs: &Pairs,
        queued: &mut Vec<WaitingRows<PartialBatch>>,
    ) -> Result<()> {
        let JoinContext { device, stream, .. } = *materializer.cx;
        let rows = pairs.probe.len();
        match self.partial_of(materializer, build, probe, pairs) {
            Ok(rows) => queued.push(rows),
            Err(Error::TooLong(_)) if rows > 1 => {
                for partial in [0..rows / 2, rows / 2..rows] {
                    let part = |of: &Positions| device.compose(of, &Positions::Range(partial.clone()), stream);
                    let pairs = Pairs { build: part(&pairs.build)?, probe: part(&pairs.probe)? };
                    self.queue(materializer, build, probe, &pairs, queued)?;
                }
            }
            Err(error) => return Err(error),
        }
        Ok(())
    }

    /// Queues the columns of the probe side of some pairs.
    fn partial_of(
        &self,
        materializer: &Materializer<'_>,
        build: &TransformedSide,
        probe: &TransformedSide,
        pairs: &Pairs,
    ) -> Result<WaitingRows<PartialBatch>> {
        let JoinContext { device, stream, monitor, .. } = *materializer.cx;
        let rows = pairs.probe.len();
        let deferred = self.deferred;
        let (split, bounds) = monitor.phase(Phase::Expand, 24 * rows as u64, || {
            let numbers = match &build.to_rows {
                Some(map) => device.compose(map, &pairs.build, stream)?,
                None => pairs.build.clone(),
            };
            let numbered = Pairs { build: numbers, probe: pairs.probe.clone() };
            device.split_pairs(&numbered, deferred.part_bits, deferred.parts.len(), stream)
        })?;
        let partial = materializer.queue_partial(SideRows::Transformed(probe, split.probe), rows)?;
        Ok(WaitingRows { partial, build: split.build, bounds })
    }

    /// Makes the waiting rows of the chunk available to all streams, once the chunk is joined and
    /// its copies are done.
    ///
    /// # Errors
    /// The errors of [`Materializer::finish_partial`].
    pub(super) fn finish(&self, materializer: &Materializer<'_>) -> Result<()> {
        let waiting = std::mem::take(&mut *self.waiting.lock());
        let there = waiting.into_iter().map(|WaitingRows { partial, build, bounds }| {
            Ok(Arc::new(WaitingRows { partial: materializer.finish_partial(partial)?, build, bounds }))
        });
        let there = there.collect::<Result<Vec<_>>>()?;
        self.deferred.waiting.lock().extend(there);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::part_bits;

    #[test]
    fn deferred_payload_is_divided_into_a_bounded_number_of_parts() {
        for (rows, bits) in [(0, 0), (1, 0), (16, 0), (17, 1), (32, 1), (33, 2), (1 << 27, 23), ((1 << 27) + 1, 24)] {
            assert_eq!(part_bits(rows, 1), bits, "{rows} rows");
            assert_eq!(part_bits(rows, 1000), bits.max(10), "{rows} rows");
        }
    }
}
