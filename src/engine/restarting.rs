//! A device whose process is started again when it has ended.
//!
//! ```text
//!   in service ── its process ends, or its device is lost ──► out of service ── a delay ──► a process is started
//!       ▲                                                           ▲                           │        │
//!       └───────────────────────── it has opened the device ────────┼───────────────────────────┘        │
//!                                                                   └── it has not: twice the delay ◄────┘
//! ```
//!
//! Who runs joins sees one engine of the same sizes and memory, which is lost and is there again. Tables and results lie in the server's
//! arena and stay; the new process is told of each table when a join needs it. What the device had kept is gone.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, RwLock};

use super::{Engine, Grant, MemoryUse, OwnProcess, spawn};
use crate::catalog::Table;
use crate::device::{CacheStats, ColumnRows, DeviceId, DeviceInfo};
use crate::join::{BatchSink, Monitor, Task};
use crate::memory::Budget;
use crate::planner::Rates;
use crate::{Context, Error, Result};

/// Time between looks at whether the process still serves.
pub(super) const LOOK_INTERVAL: Duration = Duration::from_millis(100);

/// The longest delay. What ends its process time and again costs the jobs that it is given meanwhile.
const DELAY_MAX: Duration = Duration::from_secs(300);

/// A process that has served for so long had a good start: the next delay is the first one again.
const GOOD_AFTER: Duration = Duration::from_secs(600);

/// How long a server that ends waits for a process that is being started.
const END_WAIT: Duration = Duration::from_secs(2);

/// Opens the device in a process that is started for it, with so many bytes of its memory; `None`: as the settings say.
pub type Start = Box<dyn Fn(Option<u64>) -> Result<OwnProcess> + Send + Sync>;

/// An engine over a device that has a process of its own, which is started again when it has ended.
#[derive(Debug)]
pub struct Restarting {
    id: DeviceId,
    info: DeviceInfo,
    memory: Budget,
    jobs_max: usize,
    shared: Arc<Shared>,
    watch: Option<JoinHandle<()>>,
}

/// What is shared with the thread that starts processes.
struct Shared {
    start: Start,
    process: RwLock<Arc<OwnProcess>>,
    /// What comes of a process that has ended.
    outlook: Mutex<Outlook>,
    restarts: AtomicU64,
    /// What processes that have ended did and took.
    before: Mutex<Before>,
    /// Whether the server has no use for the device any more, and who is told.
    is_over: Mutex<bool>,
    over: Condvar,
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared").field("process", &self.process).field("outlook", &self.outlook).finish_non_exhaustive()
    }
}

#[derive(Clone, Copy, Default)]
struct Before {
    cache: CacheStats,
    used_bytes_max: u64,
    dropped_lines: u64,
}

/// When a process is started in the place of one that has ended.
#[derive(Clone, Debug, PartialEq)]
enum Outlook {
    Never,
    /// After the delay.
    Soon,
    /// So much later, because the last one did not open the device.
    After {
        delay: Duration,
        failure: String,
    },
}

impl Outlook {
    fn words(&self) -> String {
        match self {
            Self::Never => {
                "it is not started again (--device-restart-seconds is 0); restart the server to use the device".into()
            }
            Self::Soon => "it is started again by itself".into(),
            Self::After { delay, failure } => format!(
                "starting it again failed and is tried every {}: {failure}",
                humantime::format_duration(Duration::from_secs(delay.as_secs().max(1)))
            ),
        }
    }
}

impl Restarting {
    /// Starts the device's first process. `first_delay`: how long after its end the next one is started, for the first time; `None`: none is.
    ///
    /// # Errors
    /// Those of `start`.
    pub fn new(start: Start, first_delay: Option<Duration>) -> Result<Self> {
        let process = start(None)?;
        let (id, info) = (process.id(), process.info().clone());
        let (memory, jobs_max) = (process.memory().clone(), process.jobs_max());
        let shared = Arc::new(Shared {
            start,
            process: RwLock::new(Arc::new(process)),
            outlook: Mutex::new(if first_delay.is_some() { Outlook::Soon } else { Outlook::Never }),
            restarts: AtomicU64::new(0),
            before: Mutex::default(),
            is_over: Mutex::default(),
            over: Condvar::new(),
        });
        let watch = first_delay.map(|first_delay| {
            let (watched, info, memory) = (shared.clone(), info.clone(), memory.clone());
            spawn(format!("{id}/restart"), move || watched.watch(first_delay, &info, &memory))
        });
        Ok(Self { id, info, memory, jobs_max, shared, watch: watch.transpose()? })
    }

    fn process(&self) -> Arc<OwnProcess> {
        self.shared.process.read().clone()
    }
}

impl Engine for Restarting {
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

    fn run(&self, task: &Task, grant: &Grant, sink: &dyn BatchSink, monitor: &Monitor) -> Result<()> {
        self.process().run(task, grant, sink, monitor)
    }

    fn check(&self) -> Result<()> {
        self.process().check().map_err(|lost| {
            let outlook = self.shared.outlook.lock().words();
            Error::Unavailable(format!("{}; {outlook}", lost.message()))
        })
    }

    fn restarts(&self) -> u64 {
        self.shared.restarts.load(Ordering::Relaxed)
    }

    fn dropped_lines(&self) -> Option<u64> {
        // As for the cache.
        let before = self.shared.before.lock();
        Some(before.dropped_lines + self.process().dropped_lines()?)
    }

    fn kept_rows(&self, table: &Arc<Table>) -> Vec<ColumnRows> {
        self.process().kept_rows(table)
    }

    fn cache_stats(&self) -> Option<CacheStats> {
        // Not while another process comes in the place of this one.
        let before = self.shared.before.lock();
        Some(self.process().cache_stats()?.after(&before.cache))
    }

    fn measure_rates(&self, tell: &dyn Fn(f64)) -> Option<Rates> {
        self.process().measure_rates(tell)
    }
}

impl Drop for Restarting {
    fn drop(&mut self) {
        *self.shared.is_over.lock() = true;
        self.shared.over.notify_all();
        let Some(watch) = self.watch.take() else { return };
        // A driver may not answer a process that opens the device: that one ends when the server has.
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
    /// The life of the thread that starts processes.
    fn watch(&self, first_delay: Duration, info: &DeviceInfo, memory: &Budget) {
        let mut delay = first_delay;
        // Since when the process serves, while it does.
        let mut serves_since = Some(Instant::now());
        while !self.is_over_within(LOOK_INTERVAL) {
            let process = self.process.read().clone();
            // The GPU of one that the system has not ended yet may still write to memory that was lent.
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
                    *self.outlook.lock() = Outlook::Soon;
                    serves_since = Some(Instant::now());
                    tracing::info!(device = %process.id(), "its process was started again");
                }
                Err(error) => {
                    tracing::error!(device = %process.id(), %error, "its process could not be started again");
                    *self.outlook.lock() = Outlook::After { delay, failure: error.message().into() };
                }
            }
        }
    }

    fn start_again(&self, info: &DeviceInfo, memory: &Budget) -> Result<OwnProcess> {
        let next = (self.start)(Some(memory.limit_bytes())).context(|| "opening the device anew")?;
        // Plans and rates are of the device that was there.
        match next.info() == info {
            true => {
                // It has slabs to map and to pin, which jobs would wait for.
                next.settle();
                Ok(next)
            }
            false => Err(Error::Unavailable(format!(
                "{} is another one now, {} in the place of {}; restart the server to use it",
                next.id(),
                next.info().name,
                info.name
            ))),
        }
    }

    /// Waits so long; whether the server has no use for the device any more.
    fn is_over_within(&self, wait: Duration) -> bool {
        let mut is_over = self.is_over.lock();
        self.over.wait_while_for(&mut is_over, |is_over| !*is_over, wait);
        *is_over
    }
}
