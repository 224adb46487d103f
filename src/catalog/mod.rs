//! The catalog: named tables, results of joins, and statistics of their columns.
//!
//! ```text
//!   Uploads ─ open ─► UploadStream ─ append ─► Upload (invisible) ─ commit ─► Table (immutable,
//!      └─ several streams, one upload ID            │                         shared) ◄── by name
//!                                                   └─ adopt: into the arena; statistics; quota
//!
//!   join ── push batches ──► ResultSpool ── read by many, released by lease ──► (into) Table
//! ```
//!
//! A table is a list of record batches whose buffers live in the arena, with statistics taken on
//! the way in. It is immutable: `append` and `replace` make a new table under the same name.
//! Readers of the old table can finish reading it. A table appears in whole, or not at all. A name
//! can be reserved while its table is made.
//!
//! Everything that a tenant holds (tables, uploads under way, results, and tables of others that
//! are gone while it reads them) is charged to the tenant. The charge ends when the memory is
//! freed. The catalog has no timers: the server calls [`Uploads::forget_idle`] and
//! [`ResultSpool::is_expired`] at intervals.
//!
//! This room knows of memory, and nothing of devices, jobs or the wire.

mod adopt;
mod editor;
mod names;
mod order;
mod quota;
mod result;
mod statistics;
mod table;
#[cfg(test)]
mod tests;
mod upload;
mod uploads;

pub use adopt::Adopter;
pub use editor::{Editor, IntoMode};
pub use names::{Catalog, NameReservation, check_name};
pub use quota::{Charge, ChargeHold, TenantLimits, TenantUsage};
pub use result::{
    ArrivingRows, BackpressureLimits, EvictableResults, EvictionPermit, NotedBatch, ResultReader, ResultSpool,
    SpoolOptions, SpoolState,
};
pub use statistics::{ColumnStatistics, Combination, HeavyValue, Overlap, Sketch, StatisticsCollector, Value};
pub use table::Table;
pub use upload::{TEMPORARY_SECONDS_MAX, Upload, UploadMode, UploadOptions, temporary_life};
pub use uploads::{Finished, UploadStream, Uploads, UploadsLimits};
