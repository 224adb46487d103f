//! Engines: each runs the joins of one device, in this process or in a process of its own.
//!
//! ```text
//!   scheduler ── Task, Grant ──► Engine: run, or prepare ─► probe(rows)* ─► finish
//!   Engine ─┬─ InProcess ────────────────────────────────────────────────► join on a Device
//!           └─ SupervisedEngine ─ ChildEngine ─ socket ─► process::serve ─► join on a Device
//!                                      │                        │
//!                          tables, results: slabs of the arena, which both processes map
//! ```
//!
//! An illegal access on a GPU breaks all of CUDA in its process, with every other GPU that the
//! process uses. So each of several GPUs has a process of its own. After an illegal access, only
//! that process ends, and other devices go on.
//!
//! The two processes exchange messages (`messages`, over `channel`), and no bytes of columns. The
//! server describes each table once, by the addresses of its buffers. The device's process
//! describes each batch of a result in the same way. After the device's process has ended, the
//! server starts another process. A process that stands still sends no heartbeats, and the server
//! kills it.
//!
//! # Memory
//! Host memory belongs to the server, and jobs of a device's process borrow it
//! ([`Borrower`](crate::memory::Borrower), [`Loans`](crate::memory::Loans)):
//!
//! ```text
//!   Run ───── with a first region, of the bytes that the job was promised
//!   pieces    allocated, freed and used again in the region, without a message
//!   Lend ──── another region, when none has room; all unused bytes go back with the request
//!   Push ──── names the pieces of a batch: the server cuts them out, and they belong to the result
//!   EndLoans  the rest goes back when the job has dropped its last piece
//! ```
//!
//! A region beyond the length asked for consists of promised bytes only. What a job does not use
//! goes back before it asks for more. So budgets, promises to jobs and cancellation work as they do
//! for a device in the server's process. If the device's process ends, the server takes all
//! regions back. It waits until the system reports the end, because the GPU may write there until
//! then.
//!
//! # Prepared joins
//! A prepared join ([`Prepared`]) stays in the process that made it, with the device memory of its
//! grant. Each call of it is a job: it borrows memory, pushes batches, reports progress and stops
//! as a whole join does. The build side crosses as a table. The rows of a probe cross in segments,
//! at the request of the child:
//!
//! ```text
//!   NextSegment ── a thread of the job waits for rows of the source, so nothing else waits
//!   Segment ────── its batches, described as those of a table; or the number of a stored table
//!   DropSegment ── once the child has dropped the last buffer: the rows may be freed
//!   StopRows ───── stops the source, whose writer may wait
//! ```
//!
//! This room knows tasks, devices, their rates and memory. It knows nothing of queues or the wire.

mod channel;
mod child;
mod child_engine;
mod child_jobs;
mod child_join;
mod device_rates;
mod devices;
mod gang;
mod gang_rates;
mod link;
mod messages;
mod prepared;
mod process;
mod restored;
mod server;
mod simulated;
mod supervised;
#[cfg(test)]
mod tests;
mod tmpfs;
mod windows;

use std::fmt::Debug;
use std::io;
use std::sync::Arc;
use std::thread::{JoinHandle, Scope, ScopedJoinHandle};
use std::time::Duration;

pub use child_engine::ChildEngine;
pub use device_rates::{DeviceRates, rates_file, set_rates};
pub use devices::{
    DeviceSettings, arena_backing, check_own_tmpfs, gpus_bytes, gpus_used, host_memory_bytes, open_devices,
    prefault_bytes, topology,
};
pub(crate) use devices::{cache_bytes, device_memory_bytes};
pub use gang::run_gang;
pub use link::SharedSlabs;
pub use prepared::Prepared;
use prepared::{InProcessJoin, LocalJoin, arena_of_call};
pub use process::run as run_process;
use serde::{Deserialize, Serialize};
pub use simulated::SimulatedDevice;
pub use supervised::SupervisedEngine;
pub use tmpfs::run as run_tmpfs_process;
pub use windows::{PeerAccess, Trial, Window, peer_access};
use windows::{map_and_write, take_and_check};

use crate::catalog::Table;
use crate::device::{
    CacheOps, CacheStats, ColumnRows, Copies, Device, DeviceId, DeviceInfo, GpuPlace, PeerWindow, TestOptions,
    open_device_at, shares_no_memory,
};
use crate::join::{self, BatchSink, Monitor, Rank, RowSource, Task};
use crate::memory::{Arena, Budget, ReservedPool, SharedWindow};
use crate::planner::{Rates, Target, measure_rates};
use crate::{Error, Result};

/// Memory that is reserved for a job before it runs.
#[derive(Debug)]
pub struct Grant {
    /// The job's part of the device's memory, if other jobs may run at the same time. `None`: the
    /// job has the device and all its memory alone.
    pub device_memory: Option<Budget>,
    /// Host memory for the result and for intermediate data.
    pub host_memory: ReservedPool,
}

/// Memory of a device that is in use, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryUse {
    pub used_bytes: u64,
    pub used_bytes_max: u64,
}

impl MemoryUse {
    fn of(budget: &Budget) -> Self {
        Self { used_bytes: budget.used_bytes(), used_bytes_max: budget.used_bytes_max() }
    }
}

/// Runs joins on one device.
pub trait Engine: Send + Sync + Debug {
    /// Returns the id of the device.
    fn id(&self) -> DeviceId;

    /// Returns the facts, tuning and capabilities of the device.
    fn info(&self) -> &DeviceInfo;

    /// Returns the device's memory. Jobs that run in parallel are granted parts of it.
    fn memory(&self) -> &Budget;

    /// Returns how much of the device's memory is in use.
    fn memory_use(&self) -> MemoryUse;

    /// Returns the number of jobs that the device can run at a time. The calls of prepared joins
    /// are jobs, too.
    fn jobs_max(&self) -> usize;

    /// Returns the rates that joins are planned with. They are assumed until others are set.
    fn rates(&self) -> &DeviceRates;

    /// Sets the rates that joins are planned with.
    fn set_rates(&mut self, rates: DeviceRates);

    /// Runs one rank of a task to its end in the granted memory, and pushes the rank's share of the
    /// result batch by batch. [`run_gang`] runs all ranks of a gang.
    ///
    /// # Errors
    /// Returns the errors of [`join::run_rank`], and
    /// [`Unavailable`](crate::Error::Unavailable) if the device is lost. [`Engine::check`] reports
    /// a lost device too.
    fn run_rank(&self, task: Task, rank: &Rank, grant: &Grant, sink: &dyn BatchSink, monitor: &Monitor) -> Result<()>;

    /// Runs a task alone, as [`run_rank`](Self::run_rank) does.
    ///
    /// # Errors
    /// Returns the errors of [`run_rank`](Self::run_rank).
    fn run(&self, task: Task, grant: &Grant, sink: &dyn BatchSink, monitor: &Monitor) -> Result<()> {
        self.run_rank(task, &Rank::alone(), grant, sink, monitor)
    }

    /// Prepares a join of all rows of `build`, which have the columns of the task's build table, as
    /// [`PreparedJoin::prepare`](join::PreparedJoin::prepare) does. The granted device memory is
    /// the join's until it is dropped.
    ///
    /// # Errors
    /// The errors of [`run`](Self::run), and of the source. The source gets the error, too.
    fn prepare(&self, task: Task, build: &dyn RowSource, grant: &Grant, monitor: &Monitor)
    -> Result<Box<dyn Prepared>>;

    /// Checks that the device can still work, as far as is known without a request to it.
    ///
    /// # Errors
    /// Returns [`Unavailable`](crate::Error::Unavailable) if the device is lost.
    fn check(&self) -> Result<()>;

    /// Returns the window through which other devices write to this one; `None` if it has none.
    fn window(&self) -> Option<Arc<Window>> {
        None
    }

    /// Lets the device write into the window of a peer, in place of an earlier one, and writes the
    /// pattern there. No join that writes there may be running. If the trial is cancelled, the
    /// device may write the pattern later, and holds the trial until then.
    ///
    /// # Errors
    /// [`Cancelled`](crate::Error::Cancelled) if the trial is cancelled meanwhile. Errors of the
    /// system and the driver, and [`Unavailable`](crate::Error::Unavailable) if the
    /// device is lost.
    fn connect(&self, _peer: DeviceId, _window: PeerWindow, _trial: &Arc<Trial>) -> Result<()> {
        Err(shares_no_memory(self.id()))
    }

    /// Takes the rows of a peer from a window in host memory, or else (`None`) from the device's
    /// own window. Checks that the peer's pattern is there.
    ///
    /// # Errors
    /// [`Cancelled`](crate::Error::Cancelled) if the trial is cancelled meanwhile.
    /// [`Unavailable`](crate::Error::Unavailable) if other bytes are there or the device is lost.
    fn verify(&self, _writer: DeviceId, _in_host: Option<SharedWindow>, _trial: &Arc<Trial>) -> Result<()> {
        Err(shares_no_memory(self.id()))
    }

    /// Unmaps the window of a peer. No join that writes there may be running.
    fn disconnect(&self, _peer: DeviceId) {}

    /// Returns the NUMA node of the device; `None` on a machine of one node, or if it is not known.
    fn numa_node(&self) -> Option<u32> {
        None
    }

    /// Returns the NUMA node of host memory at an address, if the server has chosen one.
    fn node_of(&self, _address: *const u8) -> Option<u32> {
        None
    }

    /// Returns how often the device was lost and brought back.
    fn restarts(&self) -> u64 {
        0
    }

    /// Returns the number of log lines that the device's own processes dropped; `None` for a device
    /// of this process.
    fn dropped_lines(&self) -> Option<u64> {
        None
    }

    /// Returns the rows of a table that are on the device from earlier jobs.
    fn cached_rows(&self, table: &Arc<Table>) -> Vec<ColumnRows>;

    /// Returns what the device's cache of columns has done and holds; `None` without a cache.
    fn cache_stats(&self) -> Option<CacheStats>;

    /// Measures the device's rates now, by [`measure_rates`].
    fn measure_rates(&self, tell: &dyn Fn(f64)) -> Option<Rates>;

    /// Makes copies for a short time, and returns their bytes per second. No job may be running.
    ///
    /// # Errors
    /// The errors of [`Copies::bytes_per_second`], and [`Unavailable`](crate::Error::Unavailable)
    /// for a device that is lost or copies nothing.
    fn measure_copies(&self, _copies: Copies) -> Result<f64> {
        Err(shares_no_memory(self.id()))
    }

    /// Returns the device, if it is in this process.
    #[cfg(test)]
    fn device(&self) -> Option<Arc<dyn Device>> {
        None
    }
}

/// Engine over a device of this process.
#[derive(Debug)]
pub struct InProcess {
    device: Arc<dyn Device>,
    info: DeviceInfo,
    rates: DeviceRates,
    arena: Arena,
    window: Option<Arc<Window>>,
}

impl InProcess {
    /// Runs joins on `device`, with their results in `arena`.
    pub fn new(device: Arc<dyn Device>, arena: Arena) -> Self {
        let (info, window) = (DeviceInfo::of(&*device), Window::of(&*device, arena.budget()));
        let window = window.unwrap_or_else(|error| {
            tracing::warn!(device = %device.id(), %error, "the device forms no gangs that exchange rows");
            None
        });
        let rates = DeviceRates::assumed(device.id(), &info);
        Self { device, info, rates, arena, window }
    }
}

impl Engine for InProcess {
    fn id(&self) -> DeviceId {
        self.device.id()
    }

    fn info(&self) -> &DeviceInfo {
        &self.info
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

    fn rates(&self) -> &DeviceRates {
        &self.rates
    }

    fn set_rates(&mut self, rates: DeviceRates) {
        self.rates = rates;
    }

    fn run_rank(&self, task: Task, rank: &Rank, grant: &Grant, sink: &dyn BatchSink, monitor: &Monitor) -> Result<()> {
        let arena = arena_of_call(&self.arena, &grant.host_memory, monitor);
        run_within(grant.device_memory.clone(), &*self.device, task, rank, &arena, sink, monitor)
    }

    fn prepare(
        &self,
        task: Task,
        build: &dyn RowSource,
        grant: &Grant,
        monitor: &Monitor,
    ) -> Result<Box<dyn Prepared>> {
        let arena = arena_of_call(&self.arena, &grant.host_memory, monitor);
        let composition = task.composition.clone();
        let join = LocalJoin::prepare(task, build, &self.device, grant.device_memory.clone(), &arena, monitor)?;
        Ok(Box::new(InProcessJoin { composition, join, arena: self.arena.clone() }))
    }

    fn check(&self) -> Result<()> {
        self.device.check()
    }

    fn window(&self) -> Option<Arc<Window>> {
        self.window.clone()
    }

    fn connect(&self, peer: DeviceId, window: PeerWindow, trial: &Arc<Trial>) -> Result<()> {
        map_and_write(&*self.device, peer, window, trial.pattern)
    }

    fn verify(&self, writer: DeviceId, in_host: Option<SharedWindow>, trial: &Arc<Trial>) -> Result<()> {
        take_and_check(&*self.device, writer, in_host, trial.pattern)
    }

    fn disconnect(&self, peer: DeviceId) {
        self.device.peers().into_iter().for_each(|peers| peers.unmap_window(peer));
    }

    fn cached_rows(&self, table: &Arc<Table>) -> Vec<ColumnRows> {
        Target::cached_rows(&*self.device, table)
    }

    fn cache_stats(&self) -> Option<CacheStats> {
        self.device.cache().and_then(CacheOps::cache_stats)
    }

    fn measure_rates(&self, tell: &dyn Fn(f64)) -> Option<Rates> {
        measure_rates(&*self.device, tell)
    }

    fn measure_copies(&self, copies: Copies) -> Result<f64> {
        copies.bytes_per_second(&*self.device)
    }

    #[cfg(test)]
    fn device(&self) -> Option<Arc<dyn Device>> {
        Some(self.device.clone())
    }
}

/// Runs one rank of a task in a part of the device's memory, or alone in all of it (`None`).
fn run_within(
    memory: Option<Budget>,
    device: &dyn Device,
    task: Task,
    rank: &Rank,
    arena: &Arena,
    sink: &dyn BatchSink,
    monitor: &Monitor,
) -> Result<()> {
    let memory = memory.unwrap_or_else(|| device.memory().clone());
    join::run_rank(&Arc::new(task), rank, &*device.for_job(memory)?, arena, sink, monitor)
}

/// Starts a thread that may borrow what outlives `scope`.
fn spawn_in<'scope, T: Send + 'scope>(
    scope: &'scope Scope<'scope, '_>,
    name: String,
    body: impl FnOnce() -> T + Send + 'scope,
) -> Result<ScopedJoinHandle<'scope, T>> {
    let thread = std::thread::Builder::new().name(name).spawn_scoped(scope, body);
    thread.map_err(|error| no_thread(&error))
}

fn spawn(name: String, body: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>> {
    std::thread::Builder::new().name(name).spawn(body).map_err(|error| no_thread(&error))
}

fn no_thread(error: &io::Error) -> Error {
    Error::Exhausted(format!("the system starts no thread: {error}"))
}

/// Parameters to open a device, in this process or in a process of its own.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Opening {
    pub id: DeviceId,
    pub place: GpuPlace,
    /// GPUs that CUDA shows to a process of its own, as a value of
    /// [`VISIBLE_GPUS`](crate::device::VISIBLE_GPUS). `None`: those
    /// that it shows to the server.
    pub visible_gpus: Option<String>,
    pub threads: usize,
    /// Bytes of device memory for joins. `None`: all free memory of a GPU.
    pub memory_bytes: Option<u64>,
    pub memory_name: String,
    /// Setting by which the operator sizes that memory.
    pub memory_setting: String,
    /// Bytes of the window that other devices write into; 0 for a device that forms no gangs.
    pub window_bytes: usize,
    /// Time after which a process of its own that sends nothing is killed; `None`: never.
    pub stall_limit: Option<Duration>,
    pub test_options: TestOptions,
}

impl Opening {
    /// Opens the device in this process.
    ///
    /// # Errors
    /// Returns the errors of [`open_device_at`].
    pub fn open(&self) -> Result<Arc<dyn Device>> {
        self.test_options.clone().set();
        let device = open_device_at(self.id, &self.place, self.threads, |free| self.budget(free))?;
        let peers = device.peers().filter(|_| self.window_bytes > 0);
        // Some GPUs cannot export memory, such as slices of one GPU.
        if let Some(Err(error)) = peers.map(|peers| peers.open_window(self.window_bytes)) {
            tracing::warn!(device = %self.id, "the device exchanges no rows with others: {error}");
        }
        Ok(device)
    }

    /// Returns a budget of `memory_bytes`, or else of the `free` bytes that the device reports,
    /// rounded down. The free bytes of equal GPUs differ a little. With equal budgets, these GPUs
    /// share their plans.
    pub fn budget(&self, free: Option<u64>) -> Budget {
        let bytes = self.memory_bytes.or(free.map(rounded_down)).unwrap_or(0);
        Budget::new(self.memory_name.clone(), self.memory_setting.clone(), bytes)
    }
}

/// Rounds a number of bytes down by less than a 128th: 80 GB to a multiple of 256 MiB.
fn rounded_down(bytes: u64) -> u64 {
    let step = (bytes.checked_next_power_of_two().unwrap_or(1 << 63) / 512).max(1);
    bytes - bytes % step
}
