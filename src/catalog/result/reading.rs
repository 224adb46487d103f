//! Readers of a result: in shares while it is retained, from one queue when it is consumed.

use std::ops::Range;
use std::time::{Instant, SystemTime};

use arrow::array::RecordBatch;

use super::{HeldBatch, NotedBatch, ResultSpool, SpoolContents, SpoolState, released};
use crate::{Error, Result};

/// Reads a share of a result. See [`ResultSpool::reader`].
#[derive(Debug)]
pub struct ResultReader {
    spool: ResultSpool,
    next: usize,
    step: usize,
    /// Index after the last batch of the share; `usize::MAX` if the share ends with the result.
    end: usize,
    /// True once this reader of a consumed result was asked for a batch.
    begun: bool,
}

impl ResultReader {
    fn open(spool: &ResultSpool, next: usize, step: usize, end: usize) -> Self {
        spool.reader_opened();
        Self { spool: spool.clone(), next, step, end, begun: false }
    }

    /// Waits for the next batch of the share and returns it; `None` after the last.
    ///
    /// Dropping the future before it is ready loses nothing.
    ///
    /// # Errors
    /// See [`ResultSpool::batch`]; [`Error::Precondition`] when the result is consumed as it is
    /// read, and this endpoint was read before.
    pub async fn next(&mut self) -> Result<Option<RecordBatch>> {
        Ok(self.next_noted().await?.map(|(batch, _)| batch))
    }

    /// Ends the counting of rows of a stream that this reader has taken, if it has taken the last
    /// of their turn. Their messages are made.
    pub fn was_sent(&self) {
        self.spool.was_sent();
    }

    /// Returns the next batch as [`next`](Self::next) does, with its note. A batch with a note has
    /// no rows.
    ///
    /// # Errors
    /// The errors of [`next`](Self::next).
    pub async fn next_noted(&mut self) -> Result<Option<NotedBatch>> {
        if self.spool.is_consumed_by_reading() {
            // Without this check, a second reader of an endpoint would be told that it has no rows.
            if !self.begun && !self.spool.inner.held.lock().begun.insert(self.next) {
                return Err(consumed());
            }
            self.begun = true;
            self.was_sent();
            return self.spool.next_of_all().await;
        }
        if self.next >= self.end {
            self.spool.check_readable()?;
            return Ok(None);
        }
        let batch = self.spool.batch(self.next).await?;
        if batch.is_some() {
            self.next += self.step;
        }
        Ok(batch.map(|batch| (batch, None)))
    }
}

impl Drop for ResultReader {
    fn drop(&mut self) {
        self.spool.reader_closed();
    }
}

impl ResultSpool {
    /// Waits for the batch of that index and returns it; `None` after the last. A batch of a
    /// consumed result is removed and goes to the caller alone.
    ///
    /// Dropping the future before it is ready loses nothing.
    ///
    /// # Errors
    /// The join's own error; [`Error::NotFound`] when the result was released;
    /// [`Error::Precondition`] when the batch was consumed.
    pub async fn batch(&self, index: usize) -> Result<Option<RecordBatch>> {
        let mut progress = self.inner.progress.subscribe();
        let reached = progress.wait_for(|(count, state)| *count > index || *state != SpoolState::Open).await;
        let (count, state) = reached.map_err(|_| Error::Internal("a result lost its writer".into()))?.clone();
        match state {
            SpoolState::Open | SpoolState::Complete if count > index => self.take(index).map(Some),
            state => end_of(state),
        }
    }

    /// Returns a reader of share `endpoint` of `endpoints` equal shares. One endpoint reads all
    /// batches.
    ///
    /// # Panics
    /// When `endpoint` is not less than `endpoints`.
    pub fn reader(&self, endpoint: usize, endpoints: usize) -> ResultReader {
        assert!(endpoint < endpoints, "endpoint {endpoint} of {endpoints}");
        ResultReader::open(self, endpoint, endpoints, usize::MAX)
    }

    /// Returns a reader of those batches of a retained result, which are one of its
    /// [parts](Self::parts).
    pub fn part_reader(&self, batches: Range<usize>) -> ResultReader {
        ResultReader::open(self, batches.start, 1, batches.end)
    }

    /// Waits for the first batch that no reader has taken, and returns it.
    async fn next_of_all(&self) -> Result<Option<NotedBatch>> {
        let mut progress = self.inner.progress.subscribe();
        loop {
            // The state is read before the batches: if the writer had finished by then, `take_next`
            // sees all of its batches.
            let state = progress.borrow_and_update().1.clone();
            if let Some(batch) = self.take_next() {
                return Ok(Some(batch));
            }
            if state != SpoolState::Open {
                return end_of(state);
            }
            progress.changed().await.map_err(|_| Error::Internal("a result lost its writer".into()))?;
        }
    }

    /// Returns a batch that was pushed, and removes it from a consumed result.
    fn take(&self, index: usize) -> Result<RecordBatch> {
        let mut held = self.inner.held.lock();
        self.check_readable()?;
        if !self.is_consumed_by_reading() {
            if let Some(expires) = held.expires {
                held.expires = Some(expires.max(SystemTime::now() + self.inner.retain));
            }
            let batch = match &held.given_to {
                Some(given_to) => given_to.table()?.batches.get(index).cloned(),
                None => held.batches.get(index).and_then(Option::as_ref).map(|held| held.batch.clone()),
            };
            return batch.ok_or_else(|| Error::Internal(format!("batch {index} of a result is missing")));
        }
        let slot = index.checked_sub(held.taken).and_then(|place| held.batches.get_mut(place)).and_then(Option::take);
        let HeldBatch { batch, bytes, turn, .. } = slot.ok_or_else(consumed)?;
        self.taken(&mut held, bytes, turn);
        Ok(batch)
    }

    /// Returns the first batch that no reader has taken.
    fn take_next(&self) -> Option<NotedBatch> {
        let mut held = self.inner.held.lock();
        let HeldBatch { batch, bytes, note, turn } = held.batches.iter_mut().find_map(Option::take)?;
        self.taken(&mut held, bytes, turn);
        Some((batch, note))
    }

    fn taken(&self, held: &mut SpoolContents, bytes: u64, turn: u64) {
        while held.batches.front().is_some_and(Option::is_none) {
            held.batches.pop_front();
            held.taken += 1;
        }
        held.note_unread(true);
        held.last_taken = Some(Instant::now());
        match self.inner.arriving.is_some() {
            true => held.sending = (held.sending.0 + bytes, turn),
            false => held.count_out(bytes),
        }
        if let Some(expires) = held.expires {
            held.expires = Some(expires.max(SystemTime::now()));
        }
        self.inner.room.notify_all();
    }
}

/// Returns the answer for a reader after the last batch.
fn end_of<T>(state: SpoolState) -> Result<Option<T>> {
    match state {
        SpoolState::Failed(error) => Err(error),
        SpoolState::Released => Err(released()),
        SpoolState::Open | SpoolState::Complete => Ok(None),
    }
}

fn consumed() -> Error {
    Error::Precondition(
        "this part of the result was read already, and retain_seconds 0 keeps nothing; run the join again, with retain_seconds \
         (--retain-seconds) to read it twice"
            .into(),
    )
}
