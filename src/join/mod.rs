//! Strategies: joins composed of a device's primitives, each written once for every kind of device.
//!
//! Every strategy transforms both sides, matches probe rows with build rows in probe batches, and
//! turns the matches of each probe batch into batches of the result:
//!
//! ```text
//!                     build side                      probe side, a chunk at a time
//!   hash              in table order, one hash table  in table order
//!   radix-hash        partitioned with its columns    partitioned with its columns
//!   radix-hash-gfur   partitioned with row numbers    partitioned with row numbers
//!   sort-merge        sorted with its columns         sorted with its columns
//!   sort-merge-gfur   sorted with row numbers         sorted with row numbers
//!
//!   each probe batch: match ─► expand ─► gather straight into the arena ─► push to the sink
//! ```
//!
//! [`Composition`] has every decision about a run, among them the moved columns of each side. A
//! strategy that was asked for by name moves all columns or none. Otherwise the planner's cost
//! model chooses the columns. If few probe rows will match, their keys are tested against a Bloom
//! filter of the build keys before anything of these rows is moved. The filter also knows the range
//! of the build keys. If there are more partitions than one pass resolves well, partitioning takes
//! two passes.
//!
//! Matching gives each probe row the run of build positions that have its key (`first`, `count`).
//! It can, because every layout keeps equal build keys adjacent. With runs, the same code handles
//! duplicates, outer, semi and anti joins, and results of any size. Pairs are expanded from runs in
//! ranges of a few batches each, and counted in 64 bits. Keys of up to 128 bits are packed exactly
//! (`columns/layout.rs`). Wider keys are hashed to 128 bits, and the real values are compared
//! before a row is emitted (`verify.rs`). The device hashes and compares if it can do both,
//! otherwise the host does.
//!
//! The build side is prepared once. Any number of threads may then probe it, each with the rows of
//! a [`RowSource`]: a table, or batches that arrive while they are joined (`prepared.rs`).
//! [`run()`] does this for two tables:
//!
//! ```text
//!   prepare(build) ─► probe(rows)* ─► finish
//! ```
//!
//! The same rows may probe several prepared joins in one pass (`chain.rs`).
//!
//! A GPU joins partitions in one go if the result needs nothing except the pairs of rows
//! (`fused.rs`). If every column of a large result is written, the build side's columns may cross
//! the link last (`deferred.rs`). The first chunks of the probe side are on their way before the
//! build side is ready (`prefetch.rs`).
//!
//! If only the number of rows is wanted, a probe batch ends with its matches (`count.rs`). If rows
//! follow each other in the result as in their table, the result shares their columns with the
//! table (`materialize.rs`).
//!
//! A join arrives as a [`Task`]. This module does not ask which component chose the task, and why.
//! It knows of tables, devices, columns and memory, and nothing of plans, jobs, queues or the wire.

mod batch_sizes;
mod chain;
mod chain_report;
mod chunks;
mod column_gather;
mod composition;
mod context;
mod copy_order;
mod count;
mod deferred;
mod exchange;
mod fused;
mod helping;
mod inputs;
mod kind;
mod matching;
mod materialize;
mod monitor;
mod numbered;
mod prefetch;
mod prepared;
mod probe;
mod progress;
mod rank;
mod row_nodes;
mod run;
mod semantics;
mod source;
mod strategy;
mod task;
#[cfg(test)]
mod tests;
mod threads;
mod transform;
mod verify;

use std::time::Instant;

use arrow::array::RecordBatch;

pub(crate) use batch_sizes::{BatchSizes, MESSAGE_BYTES};
pub use chain::Chain;
pub use chain_report::{ChainReport, PassedRows};
pub(crate) use chain_report::{kept_share, order_of};
pub(crate) use chunks::{CHUNK_ROWS_MIN, chunks_per_stream};
pub use composition::{Composition, Distribution, MovedPayload, RowLayout, TransferOrder};
pub use kind::{JoinKind, Side};
pub use monitor::{Monitor, PhaseRecord, RankReport, Report, add_phases};
pub use numbered::with_number;
pub use prepared::{PreparedJoin, take_build};
pub(crate) use rank::BUCKET_BITS;
pub use rank::{GangBoard, Rank};
pub use row_nodes::{NearRows, RowNodes};
pub use run::{run, run_rank};
pub use source::{IncomingBatches, RowSource, TableRows, or_stop};
pub use strategy::Strategy;
pub(crate) use task::OVERLAPPED_CHUNK_ROWS_MIN;
pub use task::{Expected, JoinKey, OutputColumn, OutputSource, StageSeconds, Task, TaskSide, Then};

use crate::Result;
use crate::memory::Interrupt;

/// Destination of the batches of a result.
pub trait BatchSink: Sync {
    /// Takes the next batch. May block while the reader catches up.
    ///
    /// # Errors
    /// Any error that makes it pointless to go on.
    fn push(&self, batch: RecordBatch) -> Result<()>;

    /// Takes the next batch like [`push`](Self::push). Columns marked in `shared` are stored in the
    /// joined tables, and take no memory while these tables exist.
    ///
    /// # Errors
    /// The errors of [`push`](Self::push).
    fn push_sharing(&self, batch: RecordBatch, _shared: &[bool]) -> Result<()> {
        self.push(batch)
    }

    /// Waits briefly for readers to release memory. The next batch has lacked memory since `since`.
    /// Returns true if trying again may help.
    ///
    /// # Errors
    /// The errors of [`push`](Self::push).
    fn wait_for_readers(&self, _since: Instant) -> Result<bool> {
        Ok(false)
    }

    /// Returns this sink for a writer whose waits for readers also end with `interrupt`. `None`: no
    /// writer waits.
    fn interrupted_by(&self, _interrupt: Interrupt) -> Option<Box<dyn BatchSink>> {
        None
    }
}
