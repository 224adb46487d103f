//! Channel from one rank to another: a ring of slots in the receiver's window.
//!
//! ```text
//!   sender    waits until a slot is released ─► pushes rows into it ─► counts it as sent
//!   receiver  waits until a slot is sent ─► takes its rows ─► counts it as released
//! ```
//!
//! Both counters, and the header of each slot, are on the board of the gang. A slot is never
//! written before it is released, so more rows than fit take more rounds and no more memory. A slot
//! without rows ends a sequence.

use std::ops::Range;
use std::sync::atomic::Ordering;

use parking_lot::Mutex;

use crate::device::{Device, DeviceBuffer, DeviceId, PeerOps, Stream};
use crate::join::rank::{GangBoard, RELEASED, SLOT_HEADERS};
use crate::memory::SharedCounters;
use crate::{Error, Result};

/// Slots of a channel. One is filled and one is emptied, while one is on its way.
pub(super) const SLOTS: usize = 3;

/// Alignment of the columns in a slot, in bytes.
const ALIGNMENT: usize = 256;

/// Columns of the rows that cross an exchange, by the bytes of a value.
#[derive(Clone, Debug)]
pub(super) struct SlotLayout {
    pub(super) widths: Vec<usize>,
}

impl SlotLayout {
    /// Returns the most rows that fit in a slot.
    fn rows_max(&self, slot_bytes: usize) -> usize {
        let row_bytes: usize = self.widths.iter().sum();
        slot_bytes.saturating_sub(ALIGNMENT * self.widths.len()) / row_bytes.max(1)
    }

    /// Returns the place of each column of `rows` rows in a slot.
    fn places(&self, rows: usize) -> Vec<Range<usize>> {
        let mut start = 0;
        let place = |width: &usize| {
            let bytes = start..start + rows * width;
            start = bytes.end.next_multiple_of(ALIGNMENT);
            bytes
        };
        self.widths.iter().map(place).collect()
    }
}

/// Rows that cross an exchange together. All are of one chunk of a table.
#[derive(Clone, Debug)]
pub(super) struct Piece {
    pub(super) rows: usize,
    /// Table row at which the chunk starts.
    pub(super) chunk_start: u64,
    /// Buffer of each column.
    pub(super) columns: Vec<DeviceBuffer>,
}

/// Rows of a buffer's columns to send.
pub(super) struct Outgoing<'a> {
    pub(super) columns: &'a [DeviceBuffer],
    pub(super) rows: Range<usize>,
    pub(super) chunk_start: u64,
}

/// One direction between two ranks, at either end.
pub(super) struct Channel {
    /// Device of the receiver.
    to: DeviceId,
    counters: SharedCounters,
    /// First counter of the channel.
    at: usize,
    /// First byte of the slots in the receiver's window.
    window_start: usize,
    slot_bytes: usize,
    /// Slots that this end has sent or released.
    done: Mutex<u64>,
}

impl Channel {
    /// Returns the channel between two different ranks. All windows have `window_bytes`.
    pub(super) fn new(board: &GangBoard, from: usize, to: usize, window_bytes: usize) -> Self {
        let (counters, at) = board.channel(from, to);
        // Each sender has an equal part of the window.
        let slot_bytes = window_bytes / (board.ranks() - 1) / SLOTS / ALIGNMENT * ALIGNMENT;
        let part = if from < to { from } else { from - 1 };
        Self {
            to: board.devices()[to],
            counters,
            at,
            window_start: part * SLOTS * slot_bytes,
            slot_bytes,
            done: Mutex::new(0),
        }
    }

    /// Sends rows in as many slots as they need. Waits for slots. Any number of threads may send.
    ///
    /// # Errors
    /// The error of `check`, errors of the device, and [`Error::Exhausted`] if a slot is too small
    /// for a row.
    pub(super) fn send(
        &self,
        layout: &SlotLayout,
        outgoing: &Outgoing<'_>,
        (device, stream): (&dyn Device, &Stream),
        check: &dyn Fn() -> Result<()>,
    ) -> Result<()> {
        let rows_max = layout.rows_max(self.slot_bytes);
        if rows_max == 0 {
            return Err(Error::Exhausted(format!(
                "the exchange window of {} is too small for rows of {} bytes",
                self.to,
                layout.widths.iter().sum::<usize>()
            )));
        }
        for start in outgoing.rows.clone().step_by(rows_max) {
            let rows = start..outgoing.rows.end.min(start + rows_max);
            let mut sent = self.done.lock();
            let slot = self.slot_for(*sent, check)?;
            let places = layout.places(rows.len());
            for ((buffer, place), width) in outgoing.columns.iter().zip(places).zip(&layout.widths) {
                let bytes = rows.start * width..rows.end * width;
                peers_of(device)?.push(self.to, self.slot_start(slot) + place.start, buffer, bytes, stream)?;
            }
            device.synchronize(stream)?;
            self.publish(&mut sent, slot, rows.len() as u64, outgoing.chunk_start);
        }
        Ok(())
    }

    /// Ends the sequence of slots.
    ///
    /// # Errors
    /// The error of `check`.
    pub(super) fn end(&self, check: &dyn Fn() -> Result<()>) -> Result<()> {
        let mut sent = self.done.lock();
        let slot = self.slot_for(*sent, check)?;
        self.publish(&mut sent, slot, 0, 0);
        Ok(())
    }

    /// Takes the rows of the next slot. Returns `None` at the end of a sequence. One thread
    /// receives.
    ///
    /// # Errors
    /// The error of `check`, and errors of the device.
    pub(super) fn receive(
        &self,
        layout: &SlotLayout,
        (device, stream): (&dyn Device, &Stream),
        check: &dyn Fn() -> Result<()>,
    ) -> Result<Option<Piece>> {
        let mut released = self.done.lock();
        self.counters.wait(self.at, *released + 1, check)?;
        let slot = (*released % SLOTS as u64) as usize;
        let header = self.at + SLOT_HEADERS + 2 * slot;
        let (rows, chunk_start) = (self.counters.get(header) as usize, self.counters.get(header + 1));
        let start = self.slot_start(slot);
        let peers = peers_of(device)?;
        let take = |place: Range<usize>| peers.take(start + place.start..start + place.end, stream);
        let columns = layout.places(rows).into_iter().map(take).collect::<Result<Vec<_>>>()?;
        device.synchronize(stream)?;
        *released += 1;
        self.counters.add(self.at + RELEASED, 1);
        Ok((rows > 0).then_some(Piece { rows, chunk_start, columns }))
    }

    /// Waits until the slot for the next rows is released, and returns it.
    fn slot_for(&self, sent: u64, check: &dyn Fn() -> Result<()>) -> Result<usize> {
        self.counters.wait(self.at + RELEASED, (sent + 1).saturating_sub(SLOTS as u64), check)?;
        Ok((sent % SLOTS as u64) as usize)
    }

    fn publish(&self, sent: &mut u64, slot: usize, rows: u64, chunk_start: u64) {
        let header = self.at + SLOT_HEADERS + 2 * slot;
        self.counters.counter(header).store(rows, Ordering::Relaxed);
        self.counters.counter(header + 1).store(chunk_start, Ordering::Relaxed);
        *sent += 1;
        self.counters.add(self.at, 1);
    }

    fn slot_start(&self, slot: usize) -> usize {
        self.window_start + slot * self.slot_bytes
    }
}

/// Returns a device's access to the memory of others.
///
/// # Errors
/// [`Error::Unavailable`] if it has no window.
pub(super) fn peers_of(device: &dyn Device) -> Result<&dyn PeerOps> {
    let peers = device.peers().filter(|peers| peers.window_bytes() > 0);
    peers.ok_or_else(|| Error::Unavailable(format!("{} shares no memory with other devices", device.id())))
}

const _: () = assert!(2 * SLOTS <= 8, "the headers of all slots fit in a line");
