//! Statistics of batches, taken by several threads while more batches arrive.
//!
//! ```text
//!   add ─► pieces of at most a million values ─┬─► threads of the pool ─┬─► merged in their order
//!                                              └─► thread that waits ───┘
//! ```
//!
//! The result of a join that becomes a table is written on the time of its devices. So its
//! statistics are taken in parallel, and few of them are left to take when the last batch is
//! written. The thread that waits for them takes part, so that it makes progress even if all
//! threads of the pool are busy.
//!
//! Seeds and probabilities of a piece's samples follow from its place among the rows. So the
//! statistics do not depend on the threads.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use arrow::array::{ArrayRef, RecordBatch};
use arrow::datatypes::{DataType, Schema};
use parking_lot::{Condvar, Mutex};
use rayon::{ThreadPool, ThreadPoolBuilder};

use super::StatisticsCollector;
use crate::memory::Interrupt;
use crate::{Error, Result, panics};

/// Values of a piece, in all its columns. A thread takes a few milliseconds for them.
const PIECE_VALUES: usize = 1 << 20;

/// Minimum rows of a piece, if its batch has as many. With fewer rows, the bookkeeping per column
/// would take longer than the pass over the values.
const PIECE_ROWS_MIN: usize = 4096;

/// Interval at which a thread that waits for the others checks for interrupts.
const INTERRUPT_INTERVAL: Duration = Duration::from_millis(20);

/// Threads for all collections. They are half as many as processors: the memory's rate limits
/// them, and joins need the other processors. `None` if the system refuses threads.
///
/// Rayon's own pool will not do. Batches arrive on threads of devices' pools, and a spawned task
/// goes to the pool of the thread that spawns it.
static POOL: LazyLock<Option<ThreadPool>> = LazyLock::new(|| {
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    let builder = ThreadPoolBuilder::new().num_threads(processors.div_ceil(2));
    builder.thread_name(|thread| format!("statistics-{thread}")).build().ok()
});

/// Statistics of a table whose batches arrive one after the other. Clones share them.
#[derive(Clone, Debug)]
pub(in crate::catalog) struct Collection(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    types: Vec<DataType>,
    seed: u64,
    is_stopped: AtomicBool,
    state: Mutex<State>,
    /// Notified when no thread works on a piece any more.
    at_rest: Condvar,
}

#[derive(Debug)]
struct State {
    pending: VecDeque<Piece>,
    /// Number of pieces and of rows that were added.
    added: u64,
    added_rows: u64,
    /// Threads that work on a piece.
    working: usize,
    /// Statistics of the first `merged_pieces` pieces, by column.
    merged: Vec<StatisticsCollector>,
    merged_pieces: u64,
    /// Pieces that were done before a piece in front of them, by number.
    early: BTreeMap<u64, Vec<StatisticsCollector>>,
    failure: Option<Error>,
}

/// Consecutive rows of a batch.
#[derive(Debug)]
struct Piece {
    number: u64,
    /// Rows in front of this piece.
    rows_before: u64,
    columns: Vec<ArrayRef>,
}

impl Collection {
    /// Makes a collection without rows. `seed` is of [`Catalog::sample_seed`].
    ///
    /// [`Catalog::sample_seed`]: crate::catalog::Catalog::sample_seed
    pub(in crate::catalog) fn new(schema: &Schema, seed: u64) -> Self {
        let types: Vec<DataType> = schema.fields().iter().map(|field| field.data_type().clone()).collect();
        let state = State {
            pending: VecDeque::new(),
            added: 0,
            added_rows: 0,
            working: 0,
            merged: types.iter().map(|data_type| StatisticsCollector::seeded(data_type, seed)).collect(),
            merged_pieces: 0,
            early: BTreeMap::new(),
            failure: None,
        };
        let (state, at_rest) = (Mutex::new(state), Condvar::new());
        Self(Arc::new(Inner { types, seed, is_stopped: AtomicBool::default(), state, at_rest }))
    }

    /// Adds the next rows. Does not wait for their statistics.
    pub(in crate::catalog) fn add(&self, batch: &RecordBatch) {
        let rows_max = (PIECE_VALUES / batch.num_columns().max(1)).max(PIECE_ROWS_MIN);
        let mut pieces = 0;
        {
            let mut state = self.0.state.lock();
            if self.0.is_stopped.load(Ordering::Relaxed) {
                return;
            }
            for start in (0..batch.num_rows()).step_by(rows_max) {
                let rows = rows_max.min(batch.num_rows() - start);
                let columns = batch.slice(start, rows).columns().to_vec();
                let piece = Piece { number: state.added, rows_before: state.added_rows, columns };
                state.pending.push_back(piece);
                state.added += 1;
                state.added_rows += rows as u64;
                pieces += 1;
            }
        }
        let Some(pool) = &*POOL else { return };
        for _ in 0..pieces {
            let inner = self.0.clone();
            pool.spawn(move || {
                inner.take_part();
            });
        }
    }

    /// Ends the work. A piece that a thread works on ends soon.
    pub(in crate::catalog) fn stop(&self) {
        self.0.stop(Error::Cancelled("the statistics of the result were stopped".into()));
    }

    /// Waits until the statistics of all rows so far are taken, and takes part in that. After an
    /// error, no thread holds any of the rows.
    ///
    /// # Errors
    /// The interrupt's; [`Error::Cancelled`] after [`Collection::stop`]; [`Error::Internal`] when a
    /// piece panicked.
    pub(in crate::catalog) fn wait(&self, interrupt: &Interrupt) -> Result<()> {
        loop {
            let interrupted = interrupt.check();
            if let Err(reason) = &interrupted {
                self.0.stop(reason.clone());
            }
            if self.0.take_part() {
                continue;
            }
            let mut state = self.0.state.lock();
            if state.working == 0 && state.pending.is_empty() {
                interrupted?;
                return state.failure.clone().map_or(Ok(()), Err);
            }
            self.0.at_rest.wait_for(&mut state, INTERRUPT_INTERVAL);
        }
    }

    /// Waits like [`Collection::wait`], and returns the collectors of the columns.
    ///
    /// # Errors
    /// See [`Collection::wait`].
    pub(in crate::catalog) fn finish(self, interrupt: &Interrupt) -> Result<Vec<StatisticsCollector>> {
        self.wait(interrupt)?;
        Ok(std::mem::take(&mut self.0.state.lock().merged))
    }
}

impl Inner {
    /// Takes the statistics of the next piece. Returns `false` if no piece is pending.
    fn take_part(&self) -> bool {
        let piece = {
            let mut state = self.state.lock();
            let Some(piece) = state.pending.pop_front() else { return false };
            state.working += 1;
            piece
        };
        let number = piece.number;
        let said = |panic: &str| format!("taking statistics panicked: {panic}");
        let collected = panics::as_error(said, || Ok(self.collect(&piece)));
        // Once no thread works, none holds rows.
        drop(piece);
        let collectors = collected.unwrap_or_else(|panic| {
            self.stop(panic);
            None
        });
        let mut state = self.state.lock();
        if let (Some(collectors), false) = (collectors, self.is_stopped.load(Ordering::Relaxed)) {
            state.put(number, collectors);
        }
        state.working -= 1;
        if state.working == 0 {
            self.at_rest.notify_all();
        }
        true
    }

    /// Ends the work, for the first reason that is given.
    fn stop(&self, reason: Error) {
        let mut state = self.state.lock();
        self.is_stopped.store(true, Ordering::Relaxed);
        state.failure.get_or_insert(reason);
        let unused = (std::mem::take(&mut state.pending), std::mem::take(&mut state.early));
        state.merged.clear();
        drop(state);
        drop(unused);
    }

    /// Returns the statistics of a piece's columns; `None` once the collection is stopped.
    fn collect(&self, piece: &Piece) -> Option<Vec<StatisticsCollector>> {
        // Other streams of rows have the seeds that follow this one.
        let seed = self.seed.rotate_right(32) ^ (piece.number + 1);
        let of_column = |(data_type, column): (&DataType, &ArrayRef)| {
            if self.is_stopped.load(Ordering::Relaxed) {
                return None;
            }
            let mut collector = StatisticsCollector::following(data_type, seed, piece.rows_before);
            collector.update(column);
            Some(collector)
        };
        self.types.iter().zip(&piece.columns).map(of_column).collect()
    }
}

impl State {
    /// Merges a piece, and the pieces that waited for it.
    fn put(&mut self, number: u64, collectors: Vec<StatisticsCollector>) {
        self.early.insert(number, collectors);
        while let Some(next) = self.early.remove(&self.merged_pieces) {
            self.merged.iter_mut().zip(&next).for_each(|(before, after)| before.merge(after));
            self.merged_pieces += 1;
        }
    }
}
