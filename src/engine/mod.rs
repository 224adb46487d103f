//! Engines: what runs the joins of one device, in this process or in one of its own.
//!
//! ```text
//!   scheduler ── Task, Grant ──► Engine ─┬─ InProcess   ────────────────────────────────────────► join::run on a Device
//!                                        └─ Restarting ─ OwnProcess ── socket ──► process::serve ─► join::run on a Device
//!                                                           │                        │
//!                                                tables, results: slabs of the arena, which both processes see (memfd)
//! ```
//!
//! A GPU that runs into an illegal access takes all of CUDA in its process along, with every other GPU that the process uses. So
//! where there are several, each has a process: that one ends, and what runs on other devices goes on.
//!
//! Between the two processes go messages (`messages`, over `channel`), and no bytes of columns: a table is told once by where its
//! buffers lie, and so is each batch of a result. Memory for results is the server's: the device's process borrows each piece
//! ([`Lender`](crate::memory::Lender)), so that budgets, promises to jobs and the wish to stop hold there as they do here.
//! What a process had borrowed goes back once the system says that it has ended, since until then its GPU may write there; then
//! another one is started in its place.
//!
//! This room knows of tasks, devices, their rates and memory, and nothing of queues or the wire.

mod channel;
mod child;
mod link;
mod messages;
mod own_process;
mod process;
mod restarting;
mod restored;
#[cfg(test)]
mod tests;

use std::fmt::Debug;
use std::sync::Arc;
use std::thread::JoinHandle;

pub use link::SharedSlabs;
pub use own_process::OwnProcess;
pub use process::run as run_process;
pub use restarting::Restarting;
use serde::{Deserialize, Serialize};

use crate::catalog::Table;
use crate::device::{CacheStats, ColumnRows, Device, DeviceId, DeviceInfo, open_device};
use crate::join::{self, BatchSink, Monitor, Task};
use crate::memory::{Arena, Budget, ReservedPool};
use crate::planner::{Rates, Target, measure_rates};
use crate::{Error, Result};

/// The memory that was reserved for a job before it runs.
#[derive(Debug)]
pub struct Grant {
    /// Its part of the device's memory, when it runs beside others. `None`: it has the device, and all of its memory, alone.
    pub device_memory: Option<Budget>,
    /// Host memory for its result and what it makes on the way.
    pub host_memory: ReservedPool,
}

/// Memory of a device that is in use, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryUse {
    /// Now.
    pub used_bytes: u64,
    /// At the most, ever.
    pub used_bytes_max: u64,
}

impl MemoryUse {
    fn of(budget: &Budget) -> Self {
        Self { used_bytes: budget.used_bytes(), used_bytes_max: budget.used_bytes_max() }
    }
}

/// Runs joins on one device.
pub trait Engine: Send + Sync + Debug {
    /// Which device.
    fn id(&self) -> DeviceId;

    /// What it is made of, and the sizes it works best with.
    fn info(&self) -> &DeviceInfo;

    /// The device's memory, of which jobs that run beside others are granted parts.
    fn memory(&self) -> &Budget;

    /// What of it is in use.
    fn memory_use(&self) -> MemoryUse;

    /// How many jobs it can run at a time.
    fn jobs_max(&self) -> usize;

    /// Runs a task to its end in the memory that was granted, pushing the result batch by batch.
    ///
    /// # Errors
    /// As [`join::run`](crate::join::run); [`Unavailable`](crate::Error::Unavailable) when the device is lost, which
    /// [`Engine::check`] says as well.
    fn run(&self, task: &Task, grant: &Grant, sink: &dyn BatchSink, monitor: &Monitor) -> Result<()>;

    /// Whether the device can still work, as far as is known without asking it for anything.
    ///
    /// # Errors
    /// [`Unavailable`](crate::Error::Unavailable) when it is lost.
    fn check(&self) -> Result<()>;

    /// How often the device was lost and brought back.
    fn restarts(&self) -> u64 {
        0
    }

    /// Lines of the log that its own processes dropped; `None` for a device of this process.
    fn dropped_lines(&self) -> Option<u64> {
        None
    }

    /// What of a table is on the device from earlier jobs.
    fn kept_rows(&self, table: &Arc<Table>) -> Vec<ColumnRows>;

    /// What its cache of columns has done and holds; `None` without one.
    fn cache_stats(&self) -> Option<CacheStats>;

    /// What the device does how fast, as [`measure_rates`] finds it now.
    fn measure_rates(&self, tell: &dyn Fn(f64)) -> Option<Rates>;

    /// The device, where it is in this process.
    #[cfg(test)]
    fn device(&self) -> Option<Arc<dyn Device>> {
        None
    }
}

/// An engine over a device of this process.
#[derive(Debug)]
pub struct InProcess {
    device: Arc<dyn Device>,
    arena: Arena,
}

impl InProcess {
    /// Runs joins on `device`, whose results lie in `arena`.
    pub fn new(device: Arc<dyn Device>, arena: Arena) -> Self {
        Self { device, arena }
    }
}

impl Engine for InProcess {
    fn id(&self) -> DeviceId {
        self.device.id()
    }

    fn info(&self) -> &DeviceInfo {
        self.device.info()
    }

    fn memory(&self) -> &Budget {
        self.device.memory()
    }

    fn memory_use(&self) -> MemoryUse {
        MemoryUse::of(self.device.memory())
    }

    fn jobs_max(&self) -> usize {
        self.device.jobs_max()
    }

    fn run(&self, task: &Task, grant: &Grant, sink: &dyn BatchSink, monitor: &Monitor) -> Result<()> {
        let arena = self.arena.drawing_on(grant.host_memory.clone()).interrupted_by(monitor.cancel().interrupt());
        run_within(grant.device_memory.clone(), &*self.device, task, &arena, sink, monitor)
    }

    fn check(&self) -> Result<()> {
        self.device.check()
    }

    fn kept_rows(&self, table: &Arc<Table>) -> Vec<ColumnRows> {
        Target::kept_rows(&*self.device, table)
    }

    fn cache_stats(&self) -> Option<CacheStats> {
        self.device.cache_stats()
    }

    fn measure_rates(&self, tell: &dyn Fn(f64)) -> Option<Rates> {
        measure_rates(&*self.device, tell)
    }

    #[cfg(test)]
    fn device(&self) -> Option<Arc<dyn Device>> {
        Some(self.device.clone())
    }
}

/// Runs a task in a part of the device's memory, or alone in all of it.
fn run_within(
    memory: Option<Budget>,
    device: &dyn Device,
    task: &Task,
    arena: &Arena,
    sink: &dyn BatchSink,
    monitor: &Monitor,
) -> Result<()> {
    let memory = memory.unwrap_or_else(|| device.memory().clone());
    join::run(task, &*device.for_job(memory)?, arena, sink, monitor)
}

fn spawn(name: String, body: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>> {
    let thread = std::thread::Builder::new().name(name).spawn(body);
    thread.map_err(|error| Error::Exhausted(format!("the system gives no thread: {error}")))
}

/// What it takes to open a device, here or in a process of its own.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Opening {
    /// Which device.
    pub id: DeviceId,
    /// CPU threads that it has.
    pub threads: usize,
    /// Bytes of its memory that joins have; `None`: all that is free of a GPU's.
    pub memory_bytes: Option<u64>,
    /// What that memory is called.
    pub memory_name: String,
    /// How the operator sets it.
    pub memory_knob: String,
}

impl Opening {
    /// Opens the device in this process.
    ///
    /// # Errors
    /// As [`open_device`].
    pub fn open(&self) -> Result<Arc<dyn Device>> {
        open_device(self.id, self.threads, |free| self.budget(free))
    }

    /// The budget over its memory, of which so many bytes are free where the device knows.
    pub fn budget(&self, free: Option<u64>) -> Budget {
        let bytes = self.memory_bytes.or(free).unwrap_or(0);
        Budget::new(self.memory_name.clone(), self.memory_knob.clone(), bytes)
    }
}
