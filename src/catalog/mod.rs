//! The catalog: named tables and the results of joins, and what is known about their columns.
//!
//! ```text
//!   Uploads ── open ──► UploadStream ─ append ─► Upload (invisible) ── commit ──► Table (immutable, shared) ◄── by name
//!      └─ several streams, one upload ID              └─ adopt: into the arena; statistics; the tenant's quota
//!
//!   join ── push batches ──► ResultSpool ── read by many, released by lease ──► (into) Table
//! ```
//!
//! A table is a list of record batches whose buffers live in the arena, with statistics taken on the way in. It is
//! immutable: `append` and `replace` make a new table under the same name, and whoever reads the old one keeps it until
//! done. A table appears in whole, or not at all. A name can be reserved while its table is made.
//!
//! What a tenant holds (tables, uploads under way, results) is charged to it, and the charge ends when the memory does.
//! Nothing here runs by itself: whoever owns the clock calls [`Uploads::forget_idle`] and [`ResultSpool::is_expired`].
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
pub use quota::{Charge, TenantLimits, TenantUsage};
pub use result::{GiveWay, ResultReader, ResultSpool, Spending, SpentResults, SpoolOptions, SpoolState};
pub use statistics::{ColumnStatistics, Combination, HeavyValue, Overlap, Sketch, StatisticsCollector, Value};
pub use table::Table;
pub use upload::{Upload, UploadMode, UploadOptions};
pub use uploads::{Finished, UploadStream, Uploads, UploadsLimits};
