//! Options of a scheduler.

use std::time::Duration;

use super::trace::JobTrace;
use crate::engine::Engine;

/// Rules for the order of jobs and for their places.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Policy {
    /// Tenants share by weight, jobs age, and no job takes what others need. Servers use this.
    #[default]
    Fair,
    /// First come, first placed: each job takes the devices on which it ends first. Any later job
    /// may use an idle slot before the job that waits for it. Only simulations use this, for
    /// comparison.
    Greedy,
}

/// Options of a scheduler.
#[derive(Clone, Debug)]
pub struct SchedulerOptions {
    pub policy: Policy,
    pub queue_limit: usize,
    /// Jobs that one tenant may have waiting or running, not counting stopped jobs. 0: no limit.
    pub tenant_jobs: usize,
    /// Most short jobs that a device runs at a time. A long job has the device alone.
    pub jobs_per_device: usize,
    /// Time that a job may wait only for host memory before it fails.
    pub memory_wait: Duration,
    /// Time that a result is kept, unless the join sets another.
    pub retain: Duration,
    /// Bytes that may accumulate of a result that is consumed as it is read. Then the join waits
    /// for its reader.
    pub window_bytes: u64,
    /// Ended jobs that are remembered after their result was released.
    pub history: usize,
    /// True if threads run the jobs on their engines. Otherwise the caller takes each job that is
    /// placed, and ends it: see [`Scheduler::take_placed`](super::Scheduler::take_placed).
    pub workers: bool,
    /// Threads that make tables of results. Each waits for the statistics of one job's result at a
    /// time, and takes part in them. 0: none; tests call [`Scheduler::publish`] themselves.
    ///
    /// [`Scheduler::publish`]: super::Scheduler::publish
    pub publishers: usize,
    /// Trace of the submitted jobs; `None`: none is written.
    pub trace: Option<JobTrace>,
    /// True if a timer thread calls [`Scheduler::tick`](super::Scheduler::tick). Tests call it
    /// themselves.
    pub timer: bool,
}

impl Default for SchedulerOptions {
    fn default() -> Self {
        Self {
            policy: Policy::Fair,
            queue_limit: 1000,
            tenant_jobs: 0,
            // A join alternates between phases: it copies in, matches, gathers on the host, waits
            // for the result's memory. Four joins keep the device busy through these phases. More
            // would not make it busier, and each leaves less memory to the others. A join whose
            // part is too small takes the whole device instead.
            jobs_per_device: 4,
            // Equal to `retain`: by then every result without a renewed lease has freed its memory.
            memory_wait: Duration::from_secs(300),
            retain: Duration::from_secs(300),
            window_bytes: 256 << 20,
            history: 1000,
            workers: true,
            // With a second thread, a table of few rows need not wait for one of many.
            publishers: 2,
            trace: None,
            timer: true,
        }
    }
}

impl SchedulerOptions {
    /// Returns the most jobs that a device runs at a time.
    pub(super) fn slots(&self, engine: &dyn Engine) -> usize {
        engine.jobs_max().min(self.jobs_per_device).max(1)
    }
}
