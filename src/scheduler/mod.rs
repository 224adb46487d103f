//! The scheduler: jobs from submission to result.
//!
//! ```text
//!   submit ─► bind, plan ─► Queued ─► (memory free, turn) ─► Running on a device ─► Complete ─► released by its lease
//!                              │                                 │                └► Failed      ─► history
//!                              └───────────── cancel ────────────┴────────────────► Cancelled
//!
//!   admission ── Job, places ──► queue, placing ── turns ──► dispatch ── worker threads of a device ──► executor ──► engine
//! ```
//!
//! It decides when a join runs and on which device; the planner has decided how. A device runs one long job at a time, or
//! a few short ones side by side; a job holds its device only while it works, never while somebody reads a result that is kept.
//! It fails alone: an error or a panic ends the job, and a device that is lost is taken out of service and its jobs go
//! elsewhere.
//!
//! # Memory
//! A job is given all the memory that it is predicted to take before it runs, or it waits and holds none:
//!
//! * of its device, a part that nobody else draws on, when it runs beside others; and all that is free, which must be what
//!   its plan needs at the least, when it is alone, since nobody else draws on the device then. A part is promised with the
//!   turn, and reserved by the worker that takes the job: columns that the device keeps may have to give way first, and to
//!   wait for that with the scheduler's lock would hold up everybody. Should somebody have been quicker, the job is put back
//!   and holds nothing;
//! * of the host, what its result and the keys that the host makes are predicted to take. Its pieces of the arena are
//!   drawn from that, and from what is free beyond it when the prediction was too low; what it did not use goes back at its
//!   end. A prediction of more than there is beside the tables is given all of that, or of what comes back by itself if that
//!   is less. The job fails when memory is full, if the prediction was right.
//!
//! # Why nobody waits for ever
//! Device memory is held by jobs that run, and these end. Host memory is held by tables, by jobs that run, and by results until
//! they are read or their lease ends. Who waits for it holds neither memory nor a device (only its tables and, maybe, a
//! name), so nobody waits for somebody who waits for memory; with one exception, all that memory waits for ends by itself:
//!
//! * A job that runs does not wait for memory: it was given it, or takes what is free, or fails.
//! * A result that is kept goes when its lease ends, read or not, so a client that reads one result only after another
//!   is complete, which waits for its memory, holds that up for a lease at most. One that was read in whole counts as free memory.
//! * A result that is consumed as it is read makes its writer wait for the reader once memory is full. That is the exception, and it
//!   is bounded: the spool fails the job after 30 s without a read, and after 5 minutes in all; after 5 s and 30 s while others
//!   wait for the job's device.
//! * A lease that is renewed again and again, or tables that came meanwhile, may keep a job waiting longer than anybody
//!   likes. It fails after [`SchedulerOptions::memory_wait`], and after a few seconds when jobs and leases together do not
//!   hold what it needs. Until then others may overtake it with less memory, but not for
//!   ever: see `placing.rs`.
//!
//! This room knows of the planner, the topology, engines and joins, and nothing of the wire.

mod admission;
mod clock;
mod dispatch;
mod ending;
mod executor;
mod handle;
mod job;
mod placing;
mod queue;
mod state;
mod stats;
#[cfg(test)]
mod tests;
mod work;

pub use clock::{Clock, SystemClock};
pub use executor::{Executor, Runner};
pub use handle::{Scheduler, SchedulerOptions, Submission};
pub use job::{Job, JobId, JobState, JobStatus};
pub use stats::{DeviceStats, SchedulerStats};
