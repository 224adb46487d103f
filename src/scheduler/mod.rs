//! Scheduler: runs jobs from submission to result.
//!
//! ```text
//!   submit ─► plan ─► Queued ─► (memory, turn) ─► Running ─┬─► Complete ─► its lease ends
//!                       │                            │     └─► Failed   ─► history
//!                       └────────── cancel ──────────┴───────► Cancelled
//!
//!   admission ── Job, places ──► queue, placing ── scheduled starts ──► dispatch
//!   dispatch ── worker threads of a device ──► engine
//!                           └── publishing ──► table
//! ```
//!
//! The scheduler decides when a bound join runs and on which devices. The planner decides how. A
//! device runs one long job at a time, or a few short ones in parallel. A job holds its device only
//! while it works, never while a client reads a result or while a result becomes a table. A job
//! fails alone: an error or a panic ends only that job. A lost device is taken out of service, and
//! its jobs go to other devices.
//!
//! # Memory
//! A job gets all the memory that it is predicted to take before it runs. Otherwise it waits and
//! holds none:
//!
//! * Device memory. A job that runs in parallel with others gets a part of its own. A job that runs
//!   alone gets all that is free, which must be at least what its plan needs. The scheduler
//!   promises a part when the job's turn comes. The worker that takes the job reserves the part
//!   without the scheduler's lock. It may have to wait until cached columns are evicted, and no
//!   other job should wait with it. If another job has taken the memory first, the job is put back
//!   and holds nothing.
//! * Host memory: the predicted bytes of the result and of the keys that the host makes. The job's
//!   pieces of the arena are drawn from that reservation, and from free memory if the prediction
//!   was too low. Unused bytes are given back at the job's end. A job that is predicted to take
//!   more than tables leave free reserves all of that. If less than that will become free, it
//!   reserves all that will. If the prediction was right, such a job fails when memory is full.
//!
//! # Why no job waits forever
//! Device memory is held by running jobs, and these end. It is also held by build sides of joins
//! whose rows arrive: those leave the device for a job that waits, or their jobs are ended
//! (`marking.rs`). Host memory is held by tables, by running
//! jobs, and by results until they are read or their lease ends. A job that waits for host memory
//! holds neither memory nor a device, only its tables and possibly a name. So no job waits for a
//! job that waits for memory. With one exception, all that the job waits for ends on its own:
//!
//! * A running job does not wait for memory. It has reserved memory, takes free memory, or fails.
//! * A retained result is freed when its lease ends, read or not. A client may read one result only
//!   after another is complete, and the other's job may wait for the memory of the first result.
//!   This delay is at most one lease. A result that was read completely counts as free memory.
//! * A result that is consumed as it is read makes its writer wait for the reader once memory is
//!   full. That is the exception, and it is bounded. The spool fails the job after 30 s without a
//!   read, and after 5 minutes in all. While others wait for the job's device, the limits are 5 s
//!   and 30 s.
//! * A lease that is renewed repeatedly, or tables that arrived meanwhile, may delay a job for
//!   long. The job fails after [`SchedulerOptions::memory_wait`]. It fails after a few seconds if
//!   running jobs and leases together do not hold what it needs. Until then jobs that need less
//!   memory may overtake it, but not forever: see `placing.rs`.
//!
//! This room knows the planner, the topology, engines and joins. It knows nothing of the wire.

mod admission;
mod arriving;
mod clock;
mod device_class;
mod device_set;
mod dispatch;
mod ending;
mod feeds;
mod handle;
mod job;
mod job_options;
mod kept;
mod marking;
mod options;
mod placing;
mod publishing;
mod queue;
mod residents;
mod shapes;
mod shared_turns;
mod state;
mod stats;
mod taking;
#[cfg(test)]
mod tests;
mod trace;
mod work;

pub use clock::{Clock, SystemClock};
pub(crate) use feeds::TURN_ROWS;
pub use handle::{Scheduler, Submission, no_job};
pub use job::{Job, JobId, JobState, JobStatus};
pub use job_options::{DeviceRequest, JobOptions};
pub use options::{Policy, SchedulerOptions};
pub use residents::{PreparedBuild, PreparedThen, no_prepared};
pub use stats::{DeviceStats, SchedulerStats};
pub use taking::{KeptResult, PlacedJob};
pub use trace::{DevicesWord, JobTrace, TracedDevices, TracedJob, TracedTable, TracedTimes};
