//! Device whose process is started again after it has ended.
//!
//! ```text
//!   in service ── process ends, or device is lost ──► out of service ── delay ──► process starts
//!       ▲                                                   ▲                       │        │
//!       └───────────── it has opened the device ────────────┼───────────────────────┘        │
//!                                                           └── it has not: twice the delay ◄┘
//! ```
//!
//! The scheduler sees one engine of constant sizes and memory, which is lost and comes back. Tables
//! and results stay in the server's arena. The new process is told of each table when a join needs
//! it. Columns that the device had cached are gone.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, RwLock};

use super::{ChildEngine, DeviceRates, Engine, Grant, MemoryUse, Prepared, Trial, Window, spawn};
use crate::catalog::Table;
use crate::device::{CacheStats, ColumnRows, Copies, DeviceId, DeviceInfo, PeerWindow};
use crate::join::{BatchSink, Monitor, Rank, RowSource, Task};
use crate::memory::{Budget, SharedWindow};
use crate::planner::Rates;
use crate::{Context, Error, Result};

/// Time between two checks whether the process still serves.
pub(super) const LOOK_INTERVAL: Duration = Duration::from_millis(100);

/// Longest delay. If a cause ends the process repeatedly, each restart costs the jobs that run
/// there.
const DELAY_MAX: Duration = Duration::from_secs(300);

/// Time of service after which a process had a good start. The next delay is then the first one
/// again.
const GOOD_AFTER: Duration = Duration::from_secs(600);

/// Time for which a server that is ending waits for a process that is being started.
const END_WAIT: Duration = Duration::from_secs(2);

/// Function that starts a process and opens the device there, with the given bytes of its memory.
/// `None`: as the settings say.
pub type Start = Box<dyn Fn(Option<u64>) -> Result<ChildEngine> + Send + Sync>;

/// Engine over a device in a process of its own, which is started again after it has ended.
#[derive(Debug)]
pub struct SupervisedEngine {
    id: DeviceId,
    info: DeviceInfo,
    memory: Budget,
    jobs_max: usize,
    rates: DeviceRates,
    shared: Arc<Shared>,
    watch: Option<JoinHandle<()>>,
}

/// State that is shared with the thread that starts processes.
struct Shared {
    start: Start,
    process: RwLock<Arc<ChildEngine>>,
    /// Time at which a new process is started after the last one has ended.
    outlook: Mutex<RestartOutlook>,
    restarts: AtomicU64,
    /// Totals of processes that have ended.
    before: Mutex<EarlierTotals>,
    /// True if the server has no more use for the device. `over` signals the change.
    is_over: Mutex<bool>,
    over: Condvar,
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared").field("process", &self.process).field("outlook", &self.outlook).finish_non_exhaustive()
    }
}

#[derive(Clone, Copy, Default)]
struct EarlierTotals {
    cache: CacheStats,
    used_bytes_max: u64,
    dropped_lines: u64,
}

/// Time at which a new process replaces one that has ended.
#[derive(Clone, Debug, PartialEq)]
enum RestartOutlook {
    Never,
    /// After the next delay.
    Soon,
    /// After the given delay, because the last process did not open the device.
    After {
        delay: Duration,
        failure: String,
    },
}

impl RestartOutlook {
    fn words(&self) -> String {
        match self {
            Self::Never => {
                "it is not started again (--device-restart-seconds is 0); restart the server to use the device".into()
            }
            Self::Soon => "it is started again automatically".into(),
            Self::After { delay, failure } => format!(
                "starting it again failed and is tried every {}: {failure}",
                humantime::format_duration(Duration::from_secs(delay.as_secs().max(1)))
            ),
        }
    }
}

impl SupervisedEngine {
    /// Starts the device's first process. `first_delay`: time from the first end of the process to
    /// its restart. `None`: it is not restarted.
    ///
    /// # Errors
    /// Returns the errors of `start`.
    pub fn new(start: Start, first_delay: Option<Duration>) -> Result<Self> {
        let process = start(None)?;
        let (id, info) = (process.id(), process.info().clone());
        let (memory, jobs_max, rates) = (process.memory().clone(), process.jobs_max(), process.rates().clone());
        let shared = Arc::new(Shared {
            start,
            process: RwLock::new(Arc::new(process)),
            outlook: Mutex::new(if first_delay.is_some() { RestartOutlook::Soon } else { RestartOutlook::Never }),
            restarts: AtomicU64::new(0),
            before: Mutex::default(),
            is_over: Mutex::default(),
            over: Condvar::new(),
        });
        let watch = first_delay.map(|first_delay| {
            let (watched, info, memory) = (shared.clone(), info.clone(), memory.clone());
            spawn(format!("{id}/restart"), move || watched.watch(first_delay, &info, &memory))
        });
        Ok(Self { id, info, memory, jobs_max, rates, shared, watch: watch.transpose()? })
    }

    fn process(&self) -> Arc<ChildEngine> {
        self.shared.process.read().clone()
    }
}

impl Engine for SupervisedEngine {
    fn id(&self) -> DeviceId {
        self.id
    }

    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn memory(&self) -> &Budget {
        &self.memory
    }

    fn memory_use(&self) -> MemoryUse {
        let memory = self.process().memory_use();
        let used_bytes_max = memory.used_bytes_max.max(self.shared.before.lock().used_bytes_max);
        MemoryUse { used_bytes_max, ..memory }
    }

    fn jobs_max(&self) -> usize {
        self.jobs_max
    }

    fn rates(&self) -> &DeviceRates {
        &self.rates
    }

    fn set_rates(&mut self, rates: DeviceRates) {
        self.rates = rates;
    }

    fn run_rank(&self, task: Task, rank: &Rank, grant: &Grant, sink: &dyn BatchSink, monitor: &Monitor) -> Result<()> {
        self.process().run_rank(task, rank, grant, sink, monitor)
    }

    /// Prepares a join that belongs to the current process. After the process has ended, all calls
    /// of the join fail.
    fn prepare(
        &self,
        task: Task,
        build: &dyn RowSource,
        grant: &Grant,
        monitor: &Monitor,
    ) -> Result<Box<dyn Prepared>> {
        self.process().prepare(task, build, grant, monitor)
    }

    fn check(&self) -> Result<()> {
        self.process().check().map_err(|lost| {
            let outlook = self.shared.outlook.lock().words();
            Error::Unavailable(format!("{}; {outlook}", lost.message()))
        })
    }

    fn numa_node(&self) -> Option<u32> {
        self.process().numa_node()
    }

    fn node_of(&self, address: *const u8) -> Option<u32> {
        self.process().node_of(address)
    }

    fn window(&self) -> Option<Arc<Window>> {
        self.process().window()
    }

    fn connect(&self, peer: DeviceId, window: PeerWindow, trial: &Arc<Trial>) -> Result<()> {
        self.process().connect(peer, window, trial)
    }

    fn verify(&self, writer: DeviceId, in_host: Option<SharedWindow>, trial: &Arc<Trial>) -> Result<()> {
        self.process().verify(writer, in_host, trial)
    }

    fn disconnect(&self, peer: DeviceId) {
        self.process().disconnect(peer);
    }

    fn restarts(&self) -> u64 {
        self.shared.restarts.load(Ordering::Relaxed)
    }

    fn dropped_lines(&self) -> Option<u64> {
        // Locked first, as in `cache_stats`.
        let before = self.shared.before.lock();
        Some(before.dropped_lines + self.process().dropped_lines()?)
    }

    fn cached_rows(&self, table: &Arc<Table>) -> Vec<ColumnRows> {
        self.process().cached_rows(table)
    }

    fn cache_stats(&self) -> Option<CacheStats> {
        // Locked so that the process is not replaced meanwhile.
        let before = self.shared.before.lock();
        Some(self.process().cache_stats()?.after(&before.cache))
    }

    fn measure_rates(&self, tell: &dyn Fn(f64)) -> Option<Rates> {
        self.process().measure_rates(tell)
    }

    fn measure_copies(&self, copies: Copies) -> Result<f64> {
        self.process().measure_copies(copies)
    }
}

impl Drop for SupervisedEngine {
    fn drop(&mut self) {
        *self.shared.is_over.lock() = true;
        self.shared.over.notify_all();
        let Some(watch) = self.watch.take() else { return };
        // A driver may hang while a process opens the device. That process ends after the server.
        let since = Instant::now();
        while !watch.is_finished() && since.elapsed() < END_WAIT {
            std::thread::sleep(Duration::from_millis(1));
        }
        if watch.is_finished() && watch.join().is_err() {
            tracing::error!("the thread that starts processes of {} panicked", self.id);
        }
    }
}

impl Shared {
    /// Starts a new process whenever the last one has ended. Runs in the thread `watch`.
    fn watch(&self, first_delay: Duration, info: &DeviceInfo, memory: &Budget) {
        let mut delay = first_delay;
        // Start of service, while the process serves.
        let mut serves_since = Some(Instant::now());
        while !self.is_over_within(LOOK_INTERVAL) {
            let process = self.process.read().clone();
            // A process that the kernel has not ended yet may have a GPU that still writes to
            // borrowed memory.
            if process.check().is_ok() || !process.has_ended() {
                continue;
            }
            if serves_since.take().is_some_and(|since| since.elapsed() > GOOD_AFTER) {
                delay = first_delay;
            }
            if self.is_over_within(delay) {
                return;
            }
            delay = (2 * delay).min(DELAY_MAX.max(first_delay));
            match self.start_again(info, memory) {
                Ok(next) => {
                    if *self.is_over.lock() {
                        return;
                    }
                    {
                        let mut before = self.before.lock();
                        before.cache = process.cache_stats().unwrap_or_default().after(&before.cache);
                        before.used_bytes_max = before.used_bytes_max.max(process.memory_use().used_bytes_max);
                        before.dropped_lines += process.dropped_lines().unwrap_or_default();
                        *self.process.write() = Arc::new(next);
                    }
                    self.restarts.fetch_add(1, Ordering::Relaxed);
                    *self.outlook.lock() = RestartOutlook::Soon;
                    serves_since = Some(Instant::now());
                    tracing::info!(device = %process.id(), "its process was started again");
                }
                Err(error) => {
                    tracing::error!(device = %process.id(), %error, "its process could not be started again");
                    *self.outlook.lock() = RestartOutlook::After { delay, failure: error.message().into() };
                }
            }
        }
    }

    fn start_again(&self, info: &DeviceInfo, memory: &Budget) -> Result<ChildEngine> {
        let next = (self.start)(Some(memory.limit_bytes())).context(|| "opening the device again")?;
        // Plans and rates are for the earlier device.
        match next.info() == info {
            true => {
                // The process has slabs to map and pin. Jobs would have to wait for that.
                next.settle();
                Ok(next)
            }
            false => {
                let named = |info: &DeviceInfo| match &info.facts.uuid {
                    Some(uuid) => format!("{} ({uuid})", info.facts.name),
                    None => info.facts.name.clone(),
                };
                Err(Error::Unavailable(format!(
                    "{} is another device now, {} instead of {}; restart the server to use it",
                    next.id(),
                    named(next.info()),
                    named(info)
                )))
            }
        }
    }

    /// Waits for `wait`. True if the server has no more use for the device.
    fn is_over_within(&self, wait: Duration) -> bool {
        let mut is_over = self.is_over.lock();
        self.over.wait_while_for(&mut is_over, |is_over| !*is_over, wait);
        *is_over
    }
}
