//! Engine over a device in a process of its own: it sends requests to the process, and serves the
//! jobs there.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::Ordering;
use std::sync::mpsc::RecvTimeoutError;
use std::sync::{Arc, Weak, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::Mutex;

use super::channel::{Receiver, Sender};
use super::child::ChildGuard;
use super::child_jobs::{CANCEL_INTERVAL, ChildJobs, JobCall};
use super::child_join::ChildJoin;
use super::link::{Link, SharedSlabs, work_off};
use super::messages::{FromChild, Opened, ToChild, Work};
use super::restored::TableBuffers;
use super::{DeviceRates, Engine, Grant, MemoryUse, Opening, Prepared, Trial, Window, spawn};
use crate::catalog::Table;
use crate::device::{CacheStats, ColumnRows, Copies, DeviceId, DeviceInfo, PeerWindow, VISIBLE_GPUS};
use crate::human::system_words;
use crate::join::{BatchSink, Monitor, Rank, RowSource, Task};
use crate::memory::{Arena, Budget, SharedWindow};
use crate::planner::Rates;
use crate::{Context, Error, Result};

/// Time that a process may take to open its device.
const OPENING_WAIT: Duration = Duration::from_secs(120);

/// Time after which a process that reads nothing from its socket counts as stuck and is ended.
/// Meanwhile all threads that send to the process wait.
const STUCK_AFTER: Duration = Duration::from_secs(10);

/// Time that a question waits for its answer. A missing answer is not an error.
const QUESTION_WAIT: Duration = Duration::from_millis(200);

/// Time that the measurement of rates may take.
const RATES_WAIT: Duration = Duration::from_secs(120);

/// Engine over a device in a process of its own.
#[derive(Debug)]
pub struct ChildEngine {
    id: DeviceId,
    numa_node: Option<u32>,
    info: DeviceInfo,
    memory: Budget,
    jobs_max: usize,
    rates: DeviceRates,
    jobs: Arc<ChildJobs>,
    window: Option<Arc<Window>>,
    reader: Option<JoinHandle<()>>,
}

impl ChildEngine {
    /// Starts the process and opens the device there. The process is this program, run with
    /// `device-process` and the given arguments. `slabs` are the slabs of `arena`.
    ///
    /// # Errors
    /// Returns the error of opening the device, or [`Error::Unavailable`] if the process cannot be
    /// started or does not answer.
    pub fn start(opening: &Opening, arguments: &[&str], arena: Arena, slabs: &SharedSlabs) -> Result<Self> {
        let (here, there) = UnixStream::pair()?;
        // The program that runs now, even if another file has its name since.
        let mut command = Command::new("/proc/self/exe");
        command.arg0(std::env::args_os().next().unwrap_or_else(|| "dovetail".into()));
        // Ctrl-C in a terminal is for the server, which lets its jobs end.
        command
            .arg("device-process")
            .args(arguments)
            .stdin(OwnedFd::from(there))
            .stdout(Stdio::null())
            .process_group(0);
        if let Some(gpus) = &opening.visible_gpus {
            command.env(VISIBLE_GPUS, gpus);
        }
        let child = command.spawn().map_err(|error| {
            Error::Unavailable(format!("starting the process of {}: {}", opening.id, system_words(&error)))
        })?;
        // The command holds the other end of the socket. Only the child may hold that end, so that
        // the socket closes when the child ends.
        drop(command);
        Self::over(opening, arena, slabs, here, Some(child))
    }

    /// Opens a device in a process that runs already, at the other end of `socket`.
    pub(super) fn over(
        opening: &Opening,
        arena: Arena,
        slabs: &SharedSlabs,
        socket: UnixStream,
        child: Option<Child>,
    ) -> Result<Self> {
        let sender = Sender::new(socket.try_clone()?);
        let mut messages = Receiver::new(socket.try_clone()?);
        socket.set_write_timeout(Some(STUCK_AFTER))?;
        socket.set_read_timeout(Some(OPENING_WAIT))?;
        let mut child = ChildGuard::new(opening, socket, child);
        let sent = sender.send(&ToChild::Open(opening.clone()), None);
        let opened = match sent.and_then(|()| messages.receive()) {
            Ok(Some(FromChild::Opened(opened))) => opened?,
            Ok(Some(other)) => {
                return Err(Error::Internal(format!("the process of {} began with {other:?}, not Opened", opening.id)));
            }
            Ok(None) | Err(_) => {
                child.end();
                return Err(child.failure().context("the process did not open its device"));
            }
        };
        child.watch()?;
        let Opened { info, memory_bytes, jobs_max, window_bytes: bytes } = opened;
        let host_memory = arena.budget().clone();
        let window = if bytes > 0 { Some(Arc::new(Window::new(messages.file()?, bytes, host_memory))) } else { None };
        let (work, alloc_workers) = mpsc::channel();
        let link = Arc::new(Link::new(sender, jobs_max));
        let alloc_workers = Arc::new(Mutex::new(alloc_workers));
        // Threads that lend memory, one for each job: a job makes one request at a time, and waits
        // for no memory of another job.
        for _ in 0..jobs_max.max(1) {
            let (link, alloc_workers) = (Arc::downgrade(&link), alloc_workers.clone());
            spawn(format!("{}/alloc_worker", opening.id), move || work_off(&link, &alloc_workers))?;
        }
        let read = link.clone();
        let reader = spawn(format!("{}/reader", opening.id), move || read.read(messages, &work, child))?;
        slabs.show_to(&link).context(|| format!("sharing host memory with the process of {}", opening.id))?;
        let memory = Budget::new(opening.memory_name.clone(), opening.memory_setting.clone(), memory_bytes);
        let jobs = Arc::new(ChildJobs::new(opening.id, link, arena));
        let (id, rates) = (opening.id, DeviceRates::assumed(opening.id, &info));
        let (numa_node, reader) = (opening.place.numa_node, Some(reader));
        Ok(Self { id, numa_node, info, memory, jobs_max, rates, jobs, window, reader })
    }

    /// Lets the device cache columns of joins, in at most `limit_bytes` of its memory.
    ///
    /// # Errors
    /// Returns the errors of [`Engine::check`].
    pub fn enable_cache(&self, limit_bytes: u64) -> Result<()> {
        self.jobs.send(&ToChild::EnableCache { limit_bytes })
    }

    /// Waits until the process has mapped all slabs so far, at most `OPENING_WAIT`.
    pub(super) fn settle(&self) {
        self.jobs.ask(OPENING_WAIT, |question| ToChild::Settle { question }, |_| Some(()));
    }

    /// Sends a request that concerns a window, with a file if it has one, and waits for its outcome
    /// or until the trial is cancelled. Holds the trial until the process has answered or ended.
    fn check_window(
        &self,
        trial: &Arc<Trial>,
        file: Option<BorrowedFd<'_>>,
        message: impl FnOnce(u64) -> ToChild,
    ) -> Result<()> {
        trial.ask(self.id);
        let (_, answered) = self.jobs.pose(message, file, Some(trial.clone()))?;
        loop {
            trial.cancel.check()?;
            match answered.recv_timeout(CANCEL_INTERVAL) {
                Ok(FromChild::WindowChecked { outcome, .. }) => return outcome,
                Err(RecvTimeoutError::Timeout) => trial.check_time().or_else(|late| self.check().and(Err(late)))?,
                _ => {
                    self.check()?;
                    return Err(Error::Unavailable(format!("the process of {} does not answer", self.id)));
                }
            }
        }
    }

    pub(super) fn has_ended(&self) -> bool {
        self.reader.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Returns the number of tables that the process should know.
    #[cfg(test)]
    pub(super) fn known_tables(&self) -> usize {
        self.jobs.link.tables.lock().len()
    }
}

impl Engine for ChildEngine {
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
        self.jobs.link.state.lock().memory
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
        self.check()?;
        let buffers = TableBuffers::new(vec![task.build.table.clone(), task.probe.table.clone()]);
        let (schema, host_memory) = (&task.schema.clone(), &grant.host_memory);
        let task = task.map_tables(|table| self.jobs.table(&table))?;
        let device_bytes = grant.device_memory.as_ref().map(Budget::limit_bytes);
        let call = JobCall { schema, buffers: &buffers, host_memory, rank, rows: None, sink, monitor };
        self.jobs.run(Work::Run { task, device_bytes }, &call).map(drop)
    }

    fn prepare(
        &self,
        task: Task,
        build: &dyn RowSource,
        grant: &Grant,
        monitor: &Monitor,
    ) -> Result<Box<dyn Prepared>> {
        Ok(Box::new(ChildJoin::prepare(&self.jobs, task, build, grant, monitor)?))
    }

    fn check(&self) -> Result<()> {
        self.jobs.check()
    }

    fn numa_node(&self) -> Option<u32> {
        self.numa_node
    }

    fn node_of(&self, address: *const u8) -> Option<u32> {
        self.jobs.arena.node_of(address)
    }

    fn window(&self) -> Option<Arc<Window>> {
        self.window.clone()
    }

    fn connect(&self, peer: DeviceId, window: PeerWindow, trial: &Arc<Trial>) -> Result<()> {
        let pattern = trial.pattern;
        let (bytes, is_host) = (window.bytes(), matches!(window, PeerWindow::Host(_)));
        let file = match &window {
            PeerWindow::Device { file, .. } => file.as_fd(),
            PeerWindow::Host(window) => window.file(),
        };
        let map = |question| ToChild::MapWindow { question, peer, bytes, is_host, pattern };
        self.check_window(trial, Some(file), map)
    }

    fn verify(&self, writer: DeviceId, in_host: Option<SharedWindow>, trial: &Arc<Trial>) -> Result<()> {
        let pattern = trial.pattern;
        let (file, host_bytes) = (in_host.as_ref().map(SharedWindow::file), in_host.as_ref().map(SharedWindow::bytes));
        self.check_window(trial, file, |question| ToChild::CheckWindow { question, writer, host_bytes, pattern })
    }

    fn disconnect(&self, peer: DeviceId) {
        // A process that cannot be reached is about to end.
        let _ = self.jobs.send(&ToChild::UnmapWindow { peer });
    }

    fn cached_rows(&self, table: &Arc<Table>) -> Vec<ColumnRows> {
        // The process has cached no rows of a table that it does not know.
        let Some(number) = self.jobs.link.tables.lock().get(&(Arc::as_ptr(table) as usize)).map(|(number, _)| *number)
        else {
            return Vec::new();
        };
        if self.jobs.link.state.lock().cache.is_none() {
            return Vec::new();
        }
        let kept = self.jobs.ask(
            QUESTION_WAIT,
            |question| ToChild::CachedRows { question, table: number },
            |answer| match answer {
                FromChild::CachedRows { kept, .. } => Some(kept),
                _ => None,
            },
        );
        let rows_of = |(column, rows)| {
            let table: Weak<Table> = Arc::downgrade(table);
            ColumnRows { table, column, rows }
        };
        kept.unwrap_or_default().into_iter().map(rows_of).collect()
    }

    fn cache_stats(&self) -> Option<CacheStats> {
        self.jobs.link.state.lock().cache
    }

    fn dropped_lines(&self) -> Option<u64> {
        Some(self.jobs.link.state.lock().dropped_lines)
    }

    fn measure_rates(&self, tell: &dyn Fn(f64)) -> Option<Rates> {
        let rates = self.jobs.ask(
            RATES_WAIT,
            |question| ToChild::MeasureRates { question },
            |answer| match answer {
                FromChild::Rates { rates, .. } => rates,
                _ => None,
            },
        );
        tell(1.0);
        rates.map(|rates| *rates)
    }

    fn measure_copies(&self, copies: Copies) -> Result<f64> {
        let rate = self.jobs.ask(
            RATES_WAIT,
            |question| ToChild::MeasureCopies { question, copies },
            |answer| match answer {
                FromChild::BytesPerSecond { rate, .. } => Some(rate),
                _ => None,
            },
        );
        rate.unwrap_or_else(|| Err(Error::Unavailable(format!("{} has not measured its links", self.id))))
    }
}

impl Drop for ChildEngine {
    fn drop(&mut self) {
        // The process ends when the server hangs up. The reader ends when the process has ended.
        self.jobs.link.is_hung_up.store(true, Ordering::Relaxed);
        self.jobs.link.sender.hang_up();
        if let Some(reader) = self.reader.take()
            && reader.join().is_err()
        {
            tracing::error!("the reader of the process of {} panicked", self.id);
        }
    }
}
