//! Chunks: the rows of a probe, cut so that each fits in device memory next to the build side, and
//! streams have enough to overlap.

use std::ops::Range;
use std::sync::Arc;

use parking_lot::Mutex;

use super::helping::{HelpedRows, helping_rows_min};
use super::inputs::SideInput;
use super::rank::Rank;
use super::source::RowSource;
use super::{RowLayout, Task, TransferOrder};
use crate::catalog::Table;
use crate::columns::{KeyLayout, Role};
use crate::device::{CancelFlag, Device, ROWS_MAX};
use crate::{Error, Result};

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

/// Rows of the smallest chunk that ranks with one stream each take in turn: a few milliseconds of
/// work.
const BALANCED_CHUNK_ROWS_MIN: u64 = 1 << 16;

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

/// Rows of a probe that no stream has taken yet.
pub(super) struct ProbeRows<'a> {
    source: &'a dyn RowSource,
    task: &'a Task,
    /// Input of the task's own table. Segments of the source have its columns.
    shape: &'a Arc<SideInput>,
    supports_text: bool,
    /// Rank that takes the rows. Ranks of a gang divide the rows of the task's table.
    rank: Rank,
    left: Mutex<RowsLeft>,
}

/// Rows that were taken from the source, and that no stream has taken yet.
#[derive(Default)]
struct RowsLeft {
    /// Segment that chunks are cut from, and its next row.
    segment: Option<(Arc<SideInput>, u64)>,
    put_back: Option<Chunk>,
    /// Chunks of a rank that helps.
    helped: HelpedRows,
}

/// Consecutive rows of one segment.
#[derive(Clone)]
pub(super) struct Chunk {
    pub(super) segment: Arc<SideInput>,
    pub(super) rows: Range<u64>,
}

impl Chunk {
    /// Number of rows.
    pub(super) fn len(&self) -> u64 {
        self.rows.end - self.rows.start
    }
}

impl<'a> ProbeRows<'a> {
    /// Starts with the first segment of `source`. `shape` is the input of the task's own table.
    pub(super) fn new(
        source: &'a dyn RowSource,
        task: &'a Task,
        shape: &'a Arc<SideInput>,
        device: &dyn Device,
    ) -> Self {
        let (supports_text, rank) = (device.strings().is_some(), Rank::alone());
        Self { source, task, shape, supports_text, rank, left: Mutex::default() }
    }

    /// Takes the rows of the task's table in turn with the other ranks of a gang.
    pub(super) fn of_rank(self, rank: &Rank) -> Self {
        Self { rank: rank.clone(), ..self }
    }

    /// True if other ranks take rows too.
    pub(super) fn are_shared(&self) -> bool {
        self.rank.shares_rows()
    }

    /// Returns the number of ranks that divide the rows evenly. A rank that helps takes other
    /// chunks. So GPUs take the chunks that they would take without it, which they may have cached.
    pub(super) fn ranks(&self) -> usize {
        self.rank.even_ranks()
    }

    /// Returns the number of rows that this rank will take if all take equally many. `None` if the
    /// number of all rows is unknown before the end.
    pub(super) fn total_of_rank(&self) -> Option<u64> {
        self.source.total_rows().map(|total| total.div_ceil(self.ranks() as u64))
    }

    /// Takes the next chunk. `rows_of` returns its number of rows, given a segment and the rows
    /// that are left of it. Waits for rows that have not arrived. Returns `None` after the last
    /// row.
    ///
    /// # Errors
    /// The errors of [`RowSource::next_segment`] and of [`Task::check_rows`].
    pub(super) fn take(
        &self,
        rows_of: impl Fn(&SideInput, Range<u64>) -> u64,
        cancel: &CancelFlag,
    ) -> Result<Option<Chunk>> {
        let mut left = self.left.lock();
        if let Some(chunk) = left.put_back.take() {
            return Ok(Some(chunk));
        }
        if self.rank.shares_rows() {
            let (helped, total) = (&mut left.helped, self.shape.table.rows);
            let take = |rows_of: &dyn Fn(Range<u64>) -> u64| self.rank.take_rows(Role::Probe, total, rows_of);
            let rows_of = |left| rows_of(self.shape, left);
            let rows = match self.rank.helps_gpus() {
                true => helped.take(self.rank.left_rows(Role::Probe, total), helping_rows_min(self.task), |most| {
                    take(&|left| rows_of(left).min(most))
                }),
                false => take(&rows_of),
            };
            return Ok(rows.map(|rows| Chunk { segment: self.shape.clone(), rows }));
        }
        let (segment, start) = match left.segment.take() {
            Some(segment) => segment,
            None => {
                let Some(table) = self.source.next_segment(cancel)? else { return Ok(None) };
                (self.input_of(table)?, 0)
            }
        };
        let end = segment.table.rows;
        let rows = start..end.min(start + rows_of(&segment, start..end).max(1));
        left.segment = (rows.end < end).then(|| (segment.clone(), rows.end));
        Ok(Some(Chunk { segment, rows }))
    }

    /// Gives a chunk back, which the next call of [`take`](Self::take) returns.
    pub(super) fn put_back(&self, chunk: Chunk) {
        self.left.lock().put_back = Some(chunk);
    }

    /// Tells the source that its rows cannot be joined.
    pub(super) fn stop(&self, error: &Error) {
        self.source.stop(error);
    }

    fn input_of(&self, table: Arc<Table>) -> Result<Arc<SideInput>> {
        self.task.check_rows(Role::Probe, &self.shape.table, &table)?;
        if Arc::ptr_eq(&table, &self.shape.table) {
            return Ok(self.shape.clone());
        }
        let input = SideInput::new(self.task, Role::Probe, table, self.supports_text);
        Ok(Arc::new(if self.source.is_stored() { input } else { input.arriving() }))
    }
}

/// Returns the number of streams that work on chunks of `total` rows; `None` if the number of rows
/// is unknown.
pub(super) fn streams_of(task: &Task, total: Option<u64>, device: &dyn Device) -> usize {
    let chunks = total.map_or(u64::MAX, |total| total.div_ceil(task.chunk_rows_min()));
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

/// Returns the rows of each chunk except the last, if the ranks share `total` rows of a side
/// equally and each has enough memory for several streams.
pub(super) fn even_chunk_rows(task: &Task, layout: &KeyLayout, total: u64, streams: usize, ranks: usize) -> u64 {
    let total = total.div_ceil(ranks as u64);
    let is_looked_up = task.composition.row_layout == RowLayout::Original;
    let chunks = chunks_per_stream(total, layout.width().bytes(), streams as u64, is_looked_up);
    let halves = chunks / CHUNKS_PER_STREAM;
    let even = total.div_ceil(CHUNKS_PER_STREAM * streams as u64);
    let even = if even > CHUNK_ROWS_MIN { even.next_multiple_of(halves * BITMAP_ROWS) / halves } else { even };
    // One stream has nothing to overlap, so its chunks only have to balance the ranks.
    even.max(if streams > 1 { task.chunk_rows_min() } else { task.chunk_rows_min.unwrap_or(BALANCED_CHUNK_ROWS_MIN) })
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
/// side. It may take a stream's share of half of the free memory, without `held_back`. A row takes
/// `row_bytes` in addition to its text.
pub(super) fn chunk_rows(
    probe: &SideInput,
    layout: &KeyLayout,
    row_bytes: u64,
    device: &dyn Device,
    held_back: u64,
    streams: usize,
    of: Range<u64>,
) -> u64 {
    let half = device.memory().free_bytes().saturating_sub(held_back) / streams as u64 / 2;
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
/// of free memory, but at least [`CHUNK_ROWS_MIN`]. Matches, pairs and row numbers take about 64
/// bytes per row.
pub(super) fn fitting_probe_batch_rows(device: &dyn Device, held_back: u64, streams: usize) -> usize {
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
