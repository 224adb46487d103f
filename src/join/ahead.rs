//! The first chunks of the probe side cross the link while the last keys of the build side are indexed.
//!
//! ```text
//!   link in    build keys                  │ chunk 0 │ chunk 1 │ chunk 2 ...
//!   device       index as they arrive ...      │ match 0 │ match 1 ...
//! ```
//!
//! Streams begin when the build side is ready. By then these chunks are there, or on their way, each on a stream of its own, and rows
//! of the result leave as soon as they are matched.

use std::collections::VecDeque;
use std::ops::Range;

use parking_lot::Mutex;

use super::Task;
use super::arrange::{Arranged, CopyIn, Workshop, arrange};
use super::inputs::SideInput;
use super::probe::{chunk_rows, even_chunk_rows, only_copies, streams_of};
use super::turns::Turns;
use crate::columns::KeyLayout;
use crate::device::Stream;
use crate::device::host::TableBytes;
use crate::{Error, Result};

/// As many as the link carries while the last 32 MiB of keys are indexed and streams begin, which is about a millisecond: a chunk of 2^27
/// rows of 16 bytes takes 0.8 ms, and of 12 bytes 0.6.
const CHUNKS: usize = 2;

/// Chunks that were queued before the build side was ready.
pub(super) struct Ahead {
    chunks: Mutex<VecDeque<AheadChunk>>,
    /// The first row after them.
    pub(super) next_row: u64,
}

/// A chunk whose copies were queued on a stream of its own.
pub(super) struct AheadChunk {
    pub(super) stream: Stream,
    pub(super) rows: Range<u64>,
    pub(super) arranged: Arranged,
}

/// What chunks are made of.
pub(super) struct Probes<'a> {
    pub(super) task: &'a Task,
    pub(super) build: &'a SideInput,
    pub(super) probe: &'a SideInput,
    pub(super) layout: &'a KeyLayout,
    pub(super) copy_in: CopyIn,
}

impl Ahead {
    pub(super) fn none() -> Self {
        Self { chunks: Mutex::default(), next_row: 0 }
    }

    /// Queues the copies of a few chunks behind those of the build side, which both of the workshop's streams were given. None where
    /// something has to be waited for before a chunk is there, or the index of the build side might want for memory: `held_back` bytes
    /// for more than its keys.
    ///
    /// # Errors
    /// The device's.
    pub(super) fn queue(of: &Probes<'_>, shop: &Workshop<'_>, turns: &Turns, held_back: u64) -> Result<Self> {
        let mut ahead = Self::none();
        let (device, total) = (shop.device, of.probe.table.rows);
        let streams = streams_of(of.task, of.probe, device);
        let waits = of.probe.key_columns.iter().any(|&key| of.probe.has_nulls(key)) || of.layout.is_hashed();
        if streams <= 1 || waits || of.task.filter || !only_copies(of.task, of.layout) {
            return Ok(ahead);
        }
        let table = TableBytes::new(of.layout.width(), of.build.table.rows, of.task.expected.build_keys_repeat);
        let rows = even_chunk_rows(of.task, of.layout, total, streams);
        if chunk_rows(of.probe, of.layout, device, held_back + table.stays + table.building, streams) < rows {
            return Ok(ahead);
        }
        let of_build = [device.record_event(shop.stream)?, device.record_event(shop.copies)?];
        let chunks = ahead.chunks.get_mut();
        while chunks.len() < CHUNKS.min(streams) && ahead.next_row < total {
            let range = ahead.next_row..total.min(ahead.next_row + rows);
            let stream = device.stream(shop.monitor.cancel().clone())?;
            of_build.iter().try_for_each(|queued| device.wait_event(queued, &stream))?;
            match of.copy(shop, &stream, turns, range.clone()) {
                Ok(arranged) => chunks.push_back(AheadChunk { stream, rows: range.clone(), arranged }),
                Err(Error::Exhausted(_)) => break,
                Err(error) => return Err(error),
            }
            ahead.next_row = range.end;
        }
        Ok(ahead)
    }

    /// The next of them, if there are more.
    pub(super) fn take(&self) -> Option<AheadChunk> {
        self.chunks.lock().pop_front()
    }
}

impl Probes<'_> {
    fn copy(&self, shop: &Workshop<'_>, stream: &Stream, turns: &Turns, rows: Range<u64>) -> Result<Arranged> {
        let own = Workshop { stream, copies: stream, ..*shop };
        let rows = self.probe.rows(rows);
        // All rows have a key.
        let queue = || arrange(&own, self.probe, rows, self.layout, self.task.arrangement, false, None, self.copy_in);
        turns.take(shop.device, stream, queue).map(|(arranged, _)| arranged)
    }
}
