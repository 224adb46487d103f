//! Row sources: the rows of one side of a join, from a table or as they arrive.
//!
//! ```text
//!   TableRows        a table ────────────────────────────────► one segment
//!   IncomingBatches  push(batch) ─► queue, bounded in bytes ─► segments of what has arrived
//! ```
//!
//! A source gives its rows in segments, each a table. `probe.rs` cuts segments into chunks that
//! suit the device. Any number of threads may take segments at once. A push waits while the queue
//! is full.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use arrow::array::{AsArray, RecordBatch};
use arrow::datatypes::{DataType, SchemaRef};
use parking_lot::{Condvar, Mutex};

use crate::catalog::Table;
use crate::device::CancelFlag;
use crate::{Error, Result};

/// Time between checks whether a job should stop, while it waits for rows or for room.
const CANCEL_INTERVAL: Duration = Duration::from_millis(5);

/// Rows of one side of a join.
///
/// Streams of a device wait for one another's turn in [`next_segment`](Self::next_segment), so it
/// returns soon after `cancel` is raised or the source is stopped, and `stop` does not wait for it.
pub trait RowSource: Send + Sync {
    /// Returns the number of all rows, if it is known before the last segment is taken.
    fn total_rows(&self) -> Option<u64>;

    /// True if the rows are stored in a table that other joins may read, so that a device may cache
    /// their columns.
    fn is_stored(&self) -> bool;

    /// True if the rows have a [number](super::with_number). The joined rows have it, too.
    fn is_numbered(&self) -> bool {
        false
    }

    /// Takes the next segment, which has rows. Waits until rows arrive. After the last row, each
    /// call returns `None`, because each stream of a device makes one.
    ///
    /// # Errors
    /// [`Cancelled`](crate::Error::Cancelled) once `cancel` is raised, the error that the writer
    /// failed with, or the error of [`stop`](Self::stop).
    fn next_segment(&self, cancel: &CancelFlag) -> Result<Option<Arc<Table>>>;

    /// Ends the source early, because its rows cannot be joined. Threads that wait for rows or for
    /// room get the error.
    fn stop(&self, error: &Error);
}

/// The rows of a table.
#[derive(Debug)]
pub struct TableRows {
    table: Arc<Table>,
    is_stored: bool,
    is_taken: AtomicBool,
}

impl TableRows {
    /// Creates a source of all rows of `table`.
    pub fn new(table: Arc<Table>) -> Self {
        Self { table, is_stored: true, is_taken: AtomicBool::new(false) }
    }

    /// Creates a source of all rows of a table that no other join reads.
    pub fn of_one_join(table: Arc<Table>) -> Self {
        Self { is_stored: false, ..Self::new(table) }
    }
}

impl RowSource for TableRows {
    fn total_rows(&self) -> Option<u64> {
        Some(self.table.rows)
    }

    fn is_stored(&self) -> bool {
        self.is_stored
    }

    fn next_segment(&self, _: &CancelFlag) -> Result<Option<Arc<Table>>> {
        let is_left = self.table.rows > 0 && !self.is_taken.swap(true, Ordering::Relaxed);
        Ok(is_left.then(|| self.table.clone()))
    }

    fn stop(&self, _: &Error) {}
}

/// Batches of unknown number, joined as they arrive. The writer waits while the queue is full, so a
/// slow join or a slow reader of its result holds the writer back.
#[derive(Debug)]
pub struct IncomingBatches {
    name: String,
    schema: SchemaRef,
    queued_bytes_max: usize,
    is_numbered: bool,
    queue: Mutex<Queue>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Queue {
    batches: VecDeque<RecordBatch>,
    bytes: usize,
    /// `None` while more batches may come.
    end: Option<Result<()>>,
}

impl IncomingBatches {
    /// Creates an empty source of batches of `schema`. Errors call it `name`. The queue takes a
    /// batch of any size while it is empty, and at most `queued_bytes_max` bytes otherwise.
    pub fn new(name: &str, schema: SchemaRef, queued_bytes_max: usize) -> Self {
        let (queue, changed) = (Mutex::default(), Condvar::new());
        Self { name: name.into(), schema, queued_bytes_max, is_numbered: false, queue, changed }
    }

    /// Returns the source for rows with a [number](super::with_number), which `schema` has as its
    /// last column.
    #[must_use]
    pub fn numbered(self) -> Self {
        Self { is_numbered: true, ..self }
    }

    /// Adds a batch, once the queue has room for it.
    ///
    /// # Errors
    /// [`Invalid`](crate::Error::Invalid) for a batch with other columns.
    /// [`Cancelled`](crate::Error::Cancelled) once `cancel` is raised. The error of
    /// [`stop`](RowSource::stop) if the join takes no more rows.
    ///
    /// # Panics
    /// If the source was finished.
    pub fn push(&self, batch: RecordBatch, cancel: &CancelFlag) -> Result<()> {
        if batch.schema_ref().fields() != self.schema.fields() {
            return Err(Error::Invalid(format!(
                "the rows of {:?} have columns {:?}, and one of its batches has {:?}",
                self.name,
                self.schema.fields(),
                batch.schema_ref().fields()
            )));
        }
        let bytes = batch.get_array_memory_size();
        let mut queue = self.queue.lock();
        let has_room =
            |queue: &Queue| queue.batches.is_empty() || queue.bytes.saturating_add(bytes) <= self.queued_bytes_max;
        while queue.end.is_none() && !has_room(&queue) {
            self.changed.wait_for(&mut queue, CANCEL_INTERVAL);
            cancel.check()?;
        }
        match &queue.end {
            None => {}
            Some(Err(stopped)) => return Err(stopped.clone()),
            Some(Ok(())) => panic!("a batch arrived after the last"),
        }
        if batch.num_rows() > 0 {
            queue.batches.push_back(batch);
            queue.bytes += bytes;
            self.changed.notify_all();
        }
        Ok(())
    }

    /// Ends the source after the batches that were pushed.
    pub fn finish(&self) {
        self.end(Ok(()));
    }

    fn end(&self, end: Result<()>) {
        let mut queue = self.queue.lock();
        let is_failure = end.is_err();
        queue.end.get_or_insert(end);
        if is_failure {
            (queue.batches, queue.bytes) = (VecDeque::new(), 0);
        }
        self.changed.notify_all();
    }
}

impl RowSource for IncomingBatches {
    fn total_rows(&self) -> Option<u64> {
        None
    }

    fn is_stored(&self) -> bool {
        false
    }

    fn is_numbered(&self) -> bool {
        self.is_numbered
    }

    /// Takes all batches that have arrived, up to the first with another dictionary: devices move
    /// dictionary columns by their keys, which one dictionary must explain.
    fn next_segment(&self, cancel: &CancelFlag) -> Result<Option<Arc<Table>>> {
        let mut queue = self.queue.lock();
        while queue.batches.is_empty() {
            match &queue.end {
                Some(end) => return end.clone().map(|()| None),
                None => self.changed.wait_for(&mut queue, CANCEL_INTERVAL),
            };
            cancel.check()?;
        }
        let first = &queue.batches[0];
        let count = queue.batches.iter().take_while(|batch| have_same_dictionaries(first, batch)).count();
        let batches: Vec<RecordBatch> = queue.batches.drain(..count).collect();
        queue.bytes -= batches.iter().map(RecordBatch::get_array_memory_size).sum::<usize>();
        drop(queue);
        self.changed.notify_all();
        Ok(Some(Arc::new(Table::unknown(self.name.clone(), self.schema.clone(), batches))))
    }

    fn stop(&self, error: &Error) {
        self.end(Err(error.clone()));
    }
}

/// True if every dictionary column of two batches with the same schema has one dictionary.
fn have_same_dictionaries(one: &RecordBatch, other: &RecordBatch) -> bool {
    one.columns().iter().zip(other.columns()).all(|(one, other)| {
        !matches!(one.data_type(), DataType::Dictionary(..))
            || one.as_any_dictionary().values().to_data().ptr_eq(&other.as_any_dictionary().values().to_data())
    })
}

/// Does work on the rows of a source, and stops the source if the work fails.
///
/// # Errors
/// The errors of `work`.
pub fn or_stop<T>(source: &dyn RowSource, work: impl FnOnce() -> Result<T>) -> Result<T> {
    work().inspect_err(|error| source.stop(error))
}

/// Takes all rows of a source as one table, which gets the name and the columns of `shape`. Calls
/// `check` with the number of rows so far. Waits for the last row.
///
/// # Errors
/// The errors of [`RowSource::next_segment`] and of `check`.
pub(super) fn take_all(
    source: &dyn RowSource,
    shape: &Table,
    check: impl Fn(u64) -> Result<()>,
    cancel: &CancelFlag,
) -> Result<Arc<Table>> {
    let (mut segments, mut rows) = (Vec::new(), 0);
    while let Some(segment) = source.next_segment(cancel)? {
        rows += segment.rows;
        check(rows)?;
        segments.push(segment);
    }
    if let [segment] = &segments[..] {
        return Ok(segment.clone());
    }
    let batches = segments.iter().flat_map(|segment| segment.batches.iter().cloned()).collect();
    Ok(Arc::new(Table::unknown(shape.name.clone(), shape.schema.clone(), batches)))
}

#[cfg(test)]
mod tests {
    use arrow::array::{ArrayRef, DictionaryArray, Int32Array};
    use arrow::datatypes::{Field, Int8Type, Schema};

    use super::*;

    fn words(words: &[&str]) -> RecordBatch {
        let column: DictionaryArray<Int8Type> = words.iter().copied().collect();
        RecordBatch::try_from_iter([("word", Arc::new(column) as ArrayRef)]).unwrap()
    }

    fn rows_of(source: &IncomingBatches) -> Option<u64> {
        source.next_segment(&CancelFlag::new()).unwrap().map(|segment| segment.rows)
    }

    #[test]
    fn a_segment_has_the_batches_so_far_that_share_their_dictionaries() {
        let (first, other, cancel) = (words(&["a", "b", "a"]), words(&["c"]), CancelFlag::new());
        let source = IncomingBatches::new("stream", first.schema(), 1 << 20);
        for batch in [first.slice(0, 1), first.slice(0, 0), first.slice(1, 2), other.clone(), first] {
            source.push(batch, &cancel).unwrap();
        }
        assert_eq!([rows_of(&source), rows_of(&source), rows_of(&source)], [Some(3), Some(1), Some(3)]);
        source.push(other, &cancel).unwrap();
        source.finish();
        assert_eq!([rows_of(&source), rows_of(&source), rows_of(&source)], [Some(1), None, None]);
    }

    #[test]
    fn a_full_queue_holds_its_writer_back() {
        let batch = words(&["a", "b"]);
        let source = IncomingBatches::new("stream", batch.schema(), 1);
        source.push(batch.clone(), &CancelFlag::new()).unwrap();
        let stopped = CancelFlag::new();
        stopped.raise();
        assert!(matches!(source.push(batch.clone(), &stopped), Err(Error::Cancelled(_))));
        std::thread::scope(|scope| {
            let writer = scope.spawn(|| source.push(batch.clone(), &CancelFlag::new()));
            assert_eq!(rows_of(&source), Some(2));
            writer.join().unwrap().unwrap();
        });
        assert_eq!(rows_of(&source), Some(2));
    }

    #[test]
    fn a_batch_with_other_columns_is_refused_and_the_stream_goes_on() {
        let batch = words(&["a"]);
        let source = IncomingBatches::new("stream", batch.schema(), 1 << 20);
        let field = Field::new("number", DataType::Int32, true);
        let numbers = Arc::new(Int32Array::from(vec![1]));
        let other = RecordBatch::try_new(Arc::new(Schema::new(vec![field])), vec![numbers]).unwrap();
        let refused = source.push(other, &CancelFlag::new());
        assert!(matches!(&refused, Err(Error::Invalid(message)) if message.contains("\"stream\"")), "{refused:?}");
        source.push(batch, &CancelFlag::new()).unwrap();
        assert_eq!(rows_of(&source), Some(1));
    }

    #[test]
    fn the_error_of_a_writer_ends_the_source_at_once() {
        let batch = words(&["a"]);
        let source = IncomingBatches::new("stream", batch.schema(), 1 << 20);
        source.push(batch.clone(), &CancelFlag::new()).unwrap();
        source.stop(&Error::Unavailable("the client has gone".into()));
        let ended = source.next_segment(&CancelFlag::new()).map(|_| ());
        assert_eq!(ended, Err(Error::Unavailable("the client has gone".into())));
        assert_eq!(source.push(batch, &CancelFlag::new()), ended);
    }
}
