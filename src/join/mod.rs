//! Strategies: joins composed of a device's primitives, each written once for every kind of device.
//!
//! Every strategy arranges both sides, matches probe rows with build rows in waves, and turns each wave's matches into
//! batches of the result:
//!
//! ```text
//!                     build side                      probe side, a chunk at a time
//!   hash              as it lies, one table           as it lies
//!   radix-hash        partitioned, columns carried    partitioned, columns carried          ┐ a wave: match ─► expand ─►
//!   radix-hash-gfur   partitioned, rows carried       partitioned, rows carried             ├ gather straight into the
//!   sort-merge        sorted, columns carried         sorted, columns carried               │ arena ─► push to the sink
//!   sort-merge-gfur   sorted, rows carried            sorted, rows carried                  ┘
//! ```
//!
//! Which columns are carried is said for each ([`TaskSide::carried`]): all or none in a strategy that was asked for by name, and as
//! the cost model prices it where the planner chooses. Where few probe rows will match, their keys pass over a Bloom filter of the build
//! keys, which also knows their range, before anything of them is moved. More partitions than one pass resolves well take two.
//!
//! Matching gives, for each probe row, a run of build positions with its key (`first`, `count`), because every arrangement keeps equal
//! build keys adjacent. Runs make duplicates, outer, semi and anti joins, and results of any size the same code: pairs are
//! expanded from runs in ranges of a batch each, and counted in 64 bits. Keys of up to 128 bits are packed exactly
//! (`columns/layout.rs`); wider ones are hashed to 128 bits, and the real values are compared before a row is emitted (`verify.rs`), by
//! the device if it can do both, and else by the host.
//!
//! A GPU joins partitions in one go, where each pair of rows is all that is wanted of them (`fused.rs`). Where every column of a large
//! result is written, the build side's columns may cross the link last (`late.rs`). The first chunks of the probe side are on their way
//! before the build side is ready (`ahead.rs`).
//!
//! Where only the number of rows is wanted, a wave ends with its matches (`count.rs`). Columns of rows that are in the result one after
//! the other as they lie in their table are shared with it (`emit.rs`).
//!
//! What is to be run comes as a [`Task`]; who chose it, and why, is not asked here. This room knows of tables, devices,
//! columns and memory, and nothing of plans, jobs, queues or the wire.

mod ahead;
mod arrange;
mod batch_sizes;
mod count;
mod emit;
mod fused;
mod gatherer;
mod inputs;
mod kind;
mod late;
mod matching;
mod monitor;
mod outcome;
mod probe;
mod progress;
mod run;
mod strategy;
mod task;
#[cfg(test)]
mod tests;
mod turns;
mod verify;

use std::time::Instant;

use arrow::array::RecordBatch;

pub(crate) use batch_sizes::{BatchSizes, MESSAGE_BYTES};
pub use kind::{JoinKind, Side};
pub use monitor::{Monitor, PhaseRecord, Report};
pub(crate) use probe::chunks_per_stream;
pub(crate) use run::CHUNK_ROWS_MIN;
pub use run::run;
pub use strategy::Strategy;
pub(crate) use task::OVERLAPPED_CHUNK_ROWS_MIN;
pub use task::{Arrangement, Expected, JoinKey, OutputColumn, OutputSource, Stretches, Task, TaskSide};

use crate::Result;

/// Where the batches of a result go.
pub trait BatchSink: Sync {
    /// Takes the next batch. May block while the reader catches up.
    ///
    /// # Errors
    /// Whatever makes it pointless to go on.
    fn push(&self, batch: RecordBatch) -> Result<()>;

    /// As [`push`](Self::push), of a batch whose columns marked in `shared` lie in the tables that were joined, and take no memory
    /// as long as these are there.
    ///
    /// # Errors
    /// As [`push`](Self::push).
    fn push_sharing(&self, batch: RecordBatch, _shared: &[bool]) -> Result<()> {
        self.push(batch)
    }

    /// There is no memory for the next batch, and none has come since `since`: waits a little for readers to be done with some.
    /// Answers whether trying again may help.
    ///
    /// # Errors
    /// As [`push`](Self::push).
    fn wait_for_readers(&self, _since: Instant) -> Result<bool> {
        Ok(false)
    }
}
