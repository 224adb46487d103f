//! Results of streams: joins whose rows arrive while their result is read.
//!
//! A client that sends rows and reads none of their result makes the server hold both. That memory
//! is given to others when they need it: the stream ends with an error, once its client has read
//! nothing for some time. Until then it takes little, because a stream holds only a part of what is
//! free (`scheduler/feeds.rs`).

use std::fmt::Debug;
use std::time::{Instant, SystemTime};

use parking_lot::MutexGuard;

use super::{EvictionPermit, Inner, ResultSpool, SpoolContents, SpoolState};
use crate::Error;
use crate::memory::human_bytes;

/// Rows of a stream that have arrived, and whose result is not made yet.
pub trait ArrivingRows: Debug + Send + Sync {
    /// Bytes of the rows.
    fn bytes(&self) -> u64;

    /// Drops the rows that wait, and those that arrive later. Must wait for no memory.
    fn drop_all(&self);
}

impl Inner {
    /// Bytes of the rows that have arrived, for a stream.
    pub(super) fn arriving_bytes(&self) -> u64 {
        self.arriving.as_ref().map_or(0, |rows| rows.bytes())
    }

    /// True if rows of a stream wait to be read, and its client has read nothing for as long as a
    /// reader may take when others need the memory.
    pub(super) fn is_left_unread(&self, held: &SpoolContents) -> bool {
        let stall = self.when_wanted.as_ref().map_or(self.stall, |wanted| wanted.stall);
        held.unread_since.is_some_and(|since| since.elapsed() >= stall)
            && matches!(self.progress.borrow().1, SpoolState::Open | SpoolState::Complete)
    }
}

impl ResultSpool {
    /// Lets the memory of a stream be taken for others while it is left unread. To be called every
    /// second or so. Does nothing for any other result.
    pub fn list_if_unread(&self) {
        let (Some(_), Some(EvictionPermit { results, owner })) = (&self.inner.arriving, &self.inner.eviction) else {
            return;
        };
        let is_unread = {
            let mut held = self.inner.held.lock();
            let is_unread = self.inner.is_left_unread(&held);
            if std::mem::replace(&mut held.is_listed_unread, is_unread) == is_unread {
                return;
            }
            is_unread
        };
        match is_unread {
            true => results.add(&self.inner, owner),
            false => results.remove(&self.inner),
        }
    }

    /// Begins a turn of a stream. Batches that are pushed count until the last one of their turn
    /// was sent, because they share memory.
    pub fn begin_turn(&self) {
        self.inner.held.lock().turn += 1;
    }

    /// Ends the counting of rows of a stream that were taken, if they were the last of their turn.
    pub(super) fn was_sent(&self) {
        if self.inner.arriving.is_none() {
            return;
        }
        let mut held = self.inner.held.lock();
        let (bytes, turn) = held.sending;
        let next = held.batches.iter().flatten().next();
        if bytes > 0 && next.is_none_or(|next| next.turn != turn) {
            held.sending = (0, turn);
            held.count_out(bytes);
            self.inner.room.notify_all();
        }
    }

    /// Ends a stream that is left unread, and frees its rows. The job ends with the same error
    /// later, when the scheduler sees it. Returns the bytes that came free.
    pub(super) fn end_unread(&self, mut held: MutexGuard<'_, SpoolContents>) -> u64 {
        let (unread, arrived) = (held.bytes, self.inner.arriving_bytes());
        let silent = held.unread_since.map_or(0.0, |since| since.elapsed().as_secs_f64());
        let error = Error::Exhausted(format!(
            "the stream was ended: its client read nothing for {silent:.1} s, {} of joined rows waited to be read and {} of \
             rows to be joined, and others needed the memory; read the joined rows while sending, or raise the server's \
             --host-memory, --tenant-memory or --tenant-results",
            human_bytes(unread),
            human_bytes(arrived),
        ));
        tracing::warn!(unread, arrived, "ended a stream whose client does not read, because its memory is needed");
        let batches = held.take_all();
        held.expires = Some(SystemTime::now());
        self.inner.progress.send_modify(|progress| progress.1 = SpoolState::Failed(error));
        drop(held);
        self.inner.room.notify_all();
        drop(batches);
        if let Some(rows) = &self.inner.arriving {
            rows.drop_all();
        }
        if let Some(EvictionPermit { results, .. }) = &self.inner.eviction {
            results.remove(&self.inner);
        }
        unread + arrived
    }
}

impl SpoolContents {
    /// Counts bytes no longer.
    pub(super) fn count_out(&mut self, bytes: u64) {
        self.bytes -= bytes;
        if let Some(charge) = &mut self.charge {
            charge.shrink(bytes);
        }
    }

    /// Records that a batch was added or taken.
    pub(super) fn note_unread(&mut self, was_taken: bool) {
        match self.batches.is_empty() {
            true => self.unread_since = None,
            false if was_taken => self.unread_since = Some(Instant::now()),
            false => {
                self.unread_since.get_or_insert_with(Instant::now);
            }
        }
    }
}
