//! The scheduler: jobs from submission to result.
//!
//! ```text
//!   submit ─► bind, plan ─► Queued ─► (memory free, turn) ─► Running on a device ─► Complete ─► released by its lease
//!                              │                                 │                └► Failed      ─► history
//!                              └───────────── cancel ────────────┴────────────────► Cancelled
//!
//!   admission ── Job, places ──► queue ── turns ──► dispatch ── one worker thread per device ──► executor ──► join::run
//! ```
//!
//! It decides when a join runs and on which device; the planner has decided how. Each device has one thread and runs one job
//! at a time; a job holds its device only while it works, never while somebody reads a result that is kept. A job starts
//! when its device has the memory free that it needs, all of it or it waits. It fails alone: an error or a panic ends the
//! job, and a device that is lost is taken out of service and its job goes elsewhere.
//!
//! This room knows of the planner, the topology, devices and joins, and nothing of the wire.

mod admission;
mod clock;
mod dispatch;
mod executor;
mod job;
mod queue;
mod stats;
#[cfg(test)]
mod tests;

pub use clock::{Clock, SystemClock};
pub use dispatch::{Scheduler, SchedulerOptions, Submission};
pub use executor::{Executor, Runner};
pub use job::{Job, JobId, JobState, JobStatus};
pub use stats::{DeviceStats, SchedulerStats};
