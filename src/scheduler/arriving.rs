//! Rows of a stream that have arrived: in a line until a turn takes them, and charged to the tenant
//! until they are joined.
//!
//! ```text
//!   sender ─► push ─► line ─► take ─► turn ─► joined      the charge ends
//!                       ◄──── put_back ◄┘                 the turn failed
//! ```

use std::collections::VecDeque;

use arrow::array::RecordBatch;
use bytes::Bytes;
use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::catalog::{ArrivingRows, Charge};

/// Rows that have arrived. A note is the last part of their answer.
#[derive(Clone, Debug)]
pub(super) struct Arrived {
    pub(super) batch: RecordBatch,
    pub(super) note: Option<Bytes>,
}

impl Arrived {
    pub(super) fn bytes(&self) -> usize {
        self.batch.get_array_memory_size() + self.note.as_ref().map_or(0, Bytes::len)
    }
}

/// Returns the rows and the bytes of rows that have arrived.
pub(super) fn size(arrived: &[Arrived]) -> (u64, u64) {
    let rows = arrived.iter().map(|arrived| arrived.batch.num_rows() as u64).sum();
    (rows, arrived.iter().map(|arrived| arrived.bytes() as u64).sum())
}

/// The rows of a stream.
#[derive(Debug)]
pub(super) struct Rows {
    line: Mutex<Line>,
    /// Wakes the sender, which looks whether the stream may hold more.
    pub(super) may_have_room: Notify,
}

#[derive(Debug)]
struct Line {
    batches: VecDeque<Arrived>,
    /// Bytes and rows of the batches.
    bytes: u64,
    rows: u64,
    /// Bytes of these rows, and of those that a turn has taken.
    charge: Charge,
    has_ended: bool,
    /// True if the stream has ended. Further rows are dropped.
    is_closed: bool,
}

impl Line {
    fn add(&mut self, arrived: &Arrived) {
        self.bytes += arrived.bytes() as u64;
        self.rows += arrived.batch.num_rows() as u64;
    }

    /// Takes rows from the front, as many as `rows_max`, and at least a batch.
    fn take(&mut self, rows_max: u64) -> Vec<Arrived> {
        let count = self.next(rows_max).0;
        let taken: Vec<Arrived> = self.batches.drain(..count).collect();
        let (rows, bytes) = size(&taken);
        (self.rows, self.bytes) = (self.rows - rows, self.bytes - bytes);
        taken
    }

    /// Returns the number of batches that [`take`](Self::take) takes, and of their rows.
    fn next(&self, rows_max: u64) -> (usize, u64) {
        let mut rows = 0;
        for (count, arrived) in self.batches.iter().enumerate() {
            let with_it = rows + arrived.batch.num_rows() as u64;
            if count > 0 && with_it > rows_max {
                return (count, rows);
            }
            rows = with_it;
        }
        (self.batches.len(), rows)
    }
}

impl Rows {
    /// Creates the rows of a stream. Their bytes are added to `charge`.
    pub(super) fn new(charge: Charge) -> Self {
        let batches = VecDeque::new();
        let line = Line { batches, bytes: 0, rows: 0, charge, has_ended: false, is_closed: false };
        Self { line: Mutex::new(line), may_have_room: Notify::new() }
    }

    /// Adds rows, whatever the limits of the tenant: they are in memory.
    pub(super) fn push(&self, arrived: Arrived) {
        let mut line = self.line.lock();
        if line.is_closed {
            return;
        }
        line.charge.grow(arrived.bytes() as u64);
        line.add(&arrived);
        line.batches.push_back(arrived);
    }

    /// Records that no rows follow.
    pub(super) fn end(&self) {
        self.line.lock().has_ended = true;
    }

    /// True if a turn has work to do.
    pub(super) fn has_work(&self) -> bool {
        let line = self.line.lock();
        line.has_ended || !line.batches.is_empty()
    }

    /// Returns the bytes of the rows that no turn has taken.
    pub(super) fn waiting_bytes(&self) -> u64 {
        self.line.lock().bytes
    }

    /// Returns the number of rows that [`take`](Self::take) takes.
    pub(super) fn next_rows(&self, rows_max: u64) -> u64 {
        self.line.lock().next(rows_max).1
    }

    /// Takes rows for a turn: as many as `rows_max`, and at least a batch. Returns true with them
    /// if they are the last.
    pub(super) fn take(&self, rows_max: u64) -> (Vec<Arrived>, bool) {
        let mut line = self.line.lock();
        let taken = line.take(rows_max);
        (taken, line.has_ended && line.batches.is_empty())
    }

    /// Takes all rows, if there are some, and at most as many rows and bytes as there is `room`
    /// for.
    pub(super) fn take_all_within(&self, room: (u64, u64)) -> Option<Vec<Arrived>> {
        let mut line = self.line.lock();
        if line.batches.is_empty() || line.rows > room.0 || line.bytes > room.1 {
            return None;
        }
        Some(line.take(u64::MAX))
    }

    /// Puts rows that were taken back, before those that have arrived since.
    pub(super) fn put_back(&self, rows: Vec<Arrived>) {
        let mut line = self.line.lock();
        if line.is_closed {
            return;
        }
        for arrived in rows.into_iter().rev() {
            line.add(&arrived);
            line.batches.push_front(arrived);
        }
    }

    /// Ends the charge of rows that were taken, once their result is made.
    pub(super) fn joined(&self, rows: &[Arrived]) {
        self.line.lock().charge.shrink(size(rows).1);
        self.may_have_room.notify_waiters();
    }
}

impl ArrivingRows for Rows {
    fn bytes(&self) -> u64 {
        self.line.lock().charge.bytes()
    }

    fn drop_all(&self) {
        let dropped = {
            let mut line = self.line.lock();
            line.is_closed = true;
            line.charge.shrink(u64::MAX);
            line.take(u64::MAX)
        };
        drop(dropped);
        self.may_have_room.notify_waiters();
    }
}
