//! Process of a device: it runs the server's jobs until the server hangs up.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Weak, mpsc};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::channel::{Receiver, Sender};
use super::messages::{FromChild, GangMember, Job, Opened, State, ToChild, Work};
use super::prepared::LocalJoin;
use super::server::{JobLender, JobSink, Server, ServerRows};
use super::windows::{map_and_write, take_and_check};
use super::{MemoryUse, Opening, run_within, spawn};
use crate::catalog::Table;
use crate::device::{self, CacheOps, CancelFlag, Copies, Device, DeviceId, DeviceInfo, Pattern, PeerOps, PeerWindow};
use crate::join::{GangBoard, Monitor, Rank, TableRows, Task};
use crate::memory::{Arena, Borrower, Budget, Reservation, SharedWindow, SlabViews};
use crate::planner::{Target, measure_rates};
use crate::{Error, Result, lines, panics};

/// Time between two checks for progress of running jobs.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(50);

/// Time that a job waits for device memory that it was promised. Meanwhile the device evicts cached
/// columns that other jobs no longer use.
const PROMISED_WAIT: Duration = Duration::from_secs(5);

/// Number of heartbeats within the stall limit. The server reads half as often.
const HEARTBEATS: u32 = 20;

/// Runs the process that [`ChildEngine`](super::ChildEngine) starts. Standard input is its socket.
///
/// # Errors
/// Returns [`Error::Invalid`] if the server did not start this process, or [`Error::Internal`] if
/// the server's messages cannot be decoded.
pub fn run() -> Result<()> {
    let socket = io::stdin().as_fd().try_clone_to_owned()?;
    let socket = UnixStream::from(socket);
    if socket.peer_addr().is_err() {
        return Err(Error::Invalid(
            "this command is only for the server, which starts it for a device with its own process".into(),
        ));
    }
    device::set_process_of_one_device();
    // Running jobs end with the process.
    serve(socket)
}

/// Opens a device and runs jobs on it, as the other end of the socket asks, until the socket
/// closes.
pub(super) fn serve(socket: UnixStream) -> Result<()> {
    let sender = Arc::new(Sender::new(socket.try_clone()?));
    let mut messages = Receiver::new(socket);
    let Some(ToChild::Open(opening)) = messages.receive()? else {
        return Err(Error::Internal("the server did not say which device to open".into()));
    };
    // The driver, and all threads of this process that start from now on, inherit the CPUs.
    device::bind_thread(&opening.place.cpus);
    let (slab_changes, changes) = mpsc::channel();
    let process = match Process::open(&opening, sender.clone(), slab_changes) {
        Ok((process, opened)) => {
            let file = process.device.peers().and_then(PeerOps::window_file);
            sender.send(&FromChild::Opened(Ok(opened)), file)?;
            Arc::new(process)
        }
        Err(error) => return Ok(sender.send(&FromChild::Opened(Err(error)), None)?),
    };
    if let Some(limit) = opening.stall_limit {
        let sender = Arc::downgrade(&sender);
        spawn(format!("{}/alive", opening.id), move || send_heartbeats(&sender, limit / HEARTBEATS))?;
    }
    let slabs = process.slabs.clone();
    let (questions, asked) = mpsc::channel();
    let answering = Arc::downgrade(&process);
    spawn(format!("{}/answer", opening.id), move || answer(&answering, &asked))?;
    spawn(format!("{}/map", opening.id), move || map_slabs(&slabs, &changes, &sender))?;
    let watched = Arc::downgrade(&process);
    spawn(format!("{}/tell", opening.id), move || tell_progress(&watched))?;
    let (ended, outcome) = mpsc::channel();
    let turn = Arc::new(Mutex::new(Some(messages)));
    // One thread for each job, and one that reads. The server refuses more jobs
    // (`JobListener::begin`).
    for at in 0..=process.device.jobs_max() {
        let reader = Reader {
            process: Arc::downgrade(&process),
            turn: turn.clone(),
            questions: questions.clone(),
            ended: ended.clone(),
        };
        spawn(format!("{}/{at}", opening.id), move || reader.serve())?;
    }
    drop(ended);
    let outcome =
        outcome.recv().map_err(|_| Error::Internal("no thread reads the messages of the server any more".into()))?;
    process.hang_up();
    outcome
}

/// Thread that reads messages in turn with others. The thread that reads a job runs it, while
/// another reads on. A small join is thus run without waking a second thread.
struct Reader {
    process: Weak<Process>,
    /// Receiver of messages; `None` once the socket is closed.
    turn: Arc<Mutex<Option<Receiver>>>,
    questions: mpsc::Sender<Question>,
    ended: mpsc::Sender<Result<()>>,
}

impl Reader {
    /// Serves until the socket is closed.
    fn serve(&self) {
        while let Some((job, rank)) = self.next_job() {
            let Some(process) = self.process.upgrade() else { return };
            process.run(job, rank);
        }
    }

    /// Waits for its turn, and takes messages up to the next job. `None` once the socket is
    /// closed or the process ends. A panic is an error that ends the process, as a lost message
    /// might leave its receiver waiting. A reader must not send or wait for anything during its
    /// turn, because the server may be waiting for room in the socket.
    fn next_job(&self) -> Option<RankJob> {
        let mut turn = self.turn.lock();
        let messages = turn.as_mut()?;
        let outcome = loop {
            match messages.receive() {
                Ok(Some(message)) => {
                    let process = self.process.upgrade()?;
                    let said = |panic: &str| format!("taking a message of the server panicked: {panic}");
                    match panics::as_error(said, || process.take(message, messages, &self.questions)) {
                        Ok(None) => {}
                        Ok(Some(job)) => return Some(job),
                        Err(error) => break Err(error),
                    }
                }
                Ok(None) => break Ok(()),
                Err(error) => break Err(error.into()),
            }
        };
        *turn = None;
        // The process may have stopped waiting for it.
        let _ = self.ended.send(outcome);
        None
    }
}

/// Job, and the rank to run it as, if the board of its gang could be mapped.
type RankJob = (Job, Result<Rank>);

/// Question whose answer is sent by a thread that does not read, and work that takes long. Dropping
/// a prepared join sends messages, too.
enum Question {
    CachedRows { question: u64, table: u64 },
    MeasureRates { question: u64 },
    MeasureCopies { question: u64, copies: Copies },
    MapWindow { question: u64, peer: DeviceId, file: OwnedFd, bytes: usize, is_host: bool, pattern: Pattern },
    UnmapWindow { peer: DeviceId },
    CheckWindow { question: u64, writer: DeviceId, in_host: Option<(OwnedFd, usize)>, pattern: Pattern },
    DropPrepared { question: u64, prepared: u64 },
}

/// Change of the server's slabs, for the thread that maps them. Mapping and pinning a slab takes
/// milliseconds, and messages of all jobs would wait behind it.
enum SlabChange {
    Add {
        address: u64,
        len: usize,
        file: OwnedFd,
    },
    Remove {
        address: u64,
    },
    /// Answers when all changes before it are done.
    Settle {
        question: u64,
    },
}

/// Device and the server's tables, slabs and jobs.
struct Process {
    device: Arc<dyn Device>,
    slabs: Arc<SlabViews>,
    slab_changes: mpsc::Sender<SlabChange>,
    /// Tables that the server has sent, or the error of a table that could not be decoded.
    tables: Mutex<HashMap<u64, Result<Arc<Table>>>>,
    /// Prepared joins, by the number of the job that prepared them.
    prepared: Mutex<HashMap<u64, Arc<LocalJoin>>>,
    /// Jobs that have not ended.
    jobs: Mutex<HashMap<u64, Arc<Monitor>>>,
    server: Arc<Server>,
}

impl Process {
    fn open(opening: &Opening, sender: Arc<Sender>, slab_changes: mpsc::Sender<SlabChange>) -> Result<(Self, Opened)> {
        let device = opening.open()?;
        let opened = Opened {
            info: DeviceInfo::of(&*device),
            memory_bytes: device.memory().limit_bytes(),
            jobs_max: device.jobs_max(),
            window_bytes: device.peers().map_or(0, PeerOps::window_bytes),
        };
        let process = Self {
            slabs: Arc::new(SlabViews::pinned_by(device.pin())),
            slab_changes,
            device,
            tables: Mutex::default(),
            prepared: Mutex::default(),
            jobs: Mutex::default(),
            server: Arc::new(Server::new(sender)),
        };
        Ok((process, opened))
    }

    /// Handles a message of the server, or returns the job that it asks for. Only a table in a slab
    /// that is being mapped takes long.
    fn take(
        &self,
        message: ToChild,
        messages: &mut Receiver,
        questions: &mpsc::Sender<Question>,
    ) -> Result<Option<RankJob>> {
        let ask = |question: Question| questions.send(question).expect("questions are answered until the end");
        let change = |change: SlabChange| self.slab_changes.send(change).expect("slabs are mapped until the end");
        match message {
            ToChild::Open(_) => return Err(Error::Internal("the device is open already".into())),
            ToChild::EnableCache { limit_bytes } => {
                let enabled = self.device.cache().map_or(Ok(()), |cache| cache.enable_cache(limit_bytes));
                if let Err(error) = enabled {
                    tracing::warn!(device = %self.device.id(), "columns are not cached: {error}");
                }
            }
            ToChild::Slab { address, len } => {
                let (len, file) = (len as usize, messages.file()?);
                self.slabs.announce(address, len);
                change(SlabChange::Add { address, len, file });
            }
            ToChild::Unmapped { address } => change(SlabChange::Remove { address }),
            ToChild::Settle { question } => change(SlabChange::Settle { question }),
            ToChild::MapWindow { question, peer, bytes, is_host, pattern } => {
                let file = messages.file()?;
                ask(Question::MapWindow { question, peer, file, bytes, is_host, pattern });
            }
            ToChild::CheckWindow { question, writer, host_bytes, pattern } => {
                let in_host = host_bytes.map(|bytes| Ok::<_, Error>((messages.file()?, bytes))).transpose()?;
                ask(Question::CheckWindow { question, writer, in_host, pattern });
            }
            ToChild::UnmapWindow { peer } => ask(Question::UnmapWindow { peer }),
            ToChild::Table(table) => {
                let number = table.number;
                let table = table.restore(&|place| self.slabs.buffer(place)).map(Arc::new);
                self.tables.lock().insert(number, table);
            }
            ToChild::Forget { tables } => {
                let mut known = self.tables.lock();
                let forgotten: Vec<_> = tables.iter().filter_map(|number| known.remove(number)).collect();
                drop(known);
                drop(forgotten);
            }
            ToChild::Job(job) => {
                let running = self.jobs.lock().len();
                if running >= self.device.jobs_max() {
                    // No thread would be left to read.
                    return Err(Error::Internal(format!(
                        "the server sent a job while {running} run, which is the most"
                    )));
                }
                let rank = match &job.member {
                    Some(GangMember { rank, devices, near }) => GangBoard::of_file(messages.file()?, devices)
                        .map(|board| Rank::of_gang(*rank, board).on_node(near.clone())),
                    None => Ok(Rank::alone()),
                };
                self.jobs.lock().insert(job.number, Arc::new(Monitor::new(CancelFlag::new())));
                return Ok(Some((*job, rank)));
            }
            ToChild::Cancel { job } => {
                if let Some(monitor) = self.jobs.lock().get(&job) {
                    monitor.cancel().raise();
                }
            }
            ToChild::HostResponse { call, answer } => self.server.answered(call, answer),
            ToChild::CachedRows { question, table } => ask(Question::CachedRows { question, table }),
            ToChild::MeasureRates { question } => ask(Question::MeasureRates { question }),
            ToChild::MeasureCopies { question, copies } => ask(Question::MeasureCopies { question, copies }),
            ToChild::DropPrepared { question, prepared } => ask(Question::DropPrepared { question, prepared }),
        }
        Ok(None)
    }

    /// Ends everything that waits for the server.
    fn hang_up(&self) {
        self.jobs.lock().values().for_each(|monitor| monitor.cancel().raise());
        self.server.cut();
    }

    fn answer(&self, question: Question) {
        match question {
            Question::CachedRows { question, table } => {
                let table = self.tables.lock().get(&table).cloned();
                let kept = table
                    .and_then(Result::ok)
                    .map_or_else(Vec::new, |table| Target::cached_rows(&*self.device, &table));
                let kept = kept.into_iter().map(|kept| (kept.column, kept.rows)).collect();
                self.server.send(&FromChild::CachedRows { question, kept });
            }
            Question::MeasureRates { question } => {
                let rates = measure_rates(&*self.device, &|_| ()).map(Box::new);
                self.server.send(&FromChild::Rates { question, rates });
            }
            Question::MeasureCopies { question, copies } => {
                let rate = copies.bytes_per_second(&*self.device);
                self.server.send(&FromChild::BytesPerSecond { question, rate });
            }
            Question::MapWindow { question, peer, file, bytes, is_host, pattern } => {
                let window = match is_host {
                    true => SharedWindow::of_file(file, bytes).map(PeerWindow::Host),
                    false => Ok(PeerWindow::Device { file, bytes }),
                };
                let outcome = window.and_then(|window| map_and_write(&*self.device, peer, window, pattern));
                self.server.send(&FromChild::WindowChecked { question, outcome });
            }
            Question::UnmapWindow { peer } => {
                self.device.peers().into_iter().for_each(|peers| peers.unmap_window(peer));
            }
            Question::CheckWindow { question, writer, in_host, pattern } => {
                let in_host = in_host.map(|(file, bytes)| SharedWindow::of_file(file, bytes)).transpose();
                let outcome = in_host.and_then(|in_host| take_and_check(&*self.device, writer, in_host, pattern));
                self.server.send(&FromChild::WindowChecked { question, outcome });
            }
            Question::DropPrepared { question, prepared } => {
                let join = self.prepared.lock().remove(&prepared);
                drop(join);
                self.server.send(&FromChild::Dropped { question, state: self.state() });
            }
        }
    }

    fn run(&self, job: Job, rank: Result<Rank>) {
        let number = job.number;
        let monitor = self.jobs.lock().get(&number).expect("a running job has a monitor").clone();
        // A panic fails the job, not the process.
        let said = |panic: &str| format!("the join panicked on {}: {panic}", self.device.id());
        let outcome = panics::as_error(said, || self.work(job, &rank?, &monitor));
        self.jobs.lock().remove(&number);
        let (report, lost) = (monitor.report(), self.device.check().err());
        self.server.send(&FromChild::Ended { job: number, outcome, report, state: self.state(), lost });
    }

    fn work(&self, job: Job, rank: &Rank, monitor: &Monitor) -> Result<()> {
        let Job { number, loan, member: _, work } = job;
        // Created first, so that the loan goes back whatever happens.
        let lender = Box::new(JobLender { job: number, server: self.server.clone() });
        let borrower = Arc::new(Borrower::new(lender, self.slabs.clone(), loan));
        let outcome = self.work_with(&borrower, number, work, rank, monitor);
        // A prepared join may keep pieces that were allocated by this job. All else goes back.
        if Arc::strong_count(&borrower) > 1 {
            self.server.send(&FromChild::GiveBack { job: number, unused: borrower.take_unused() });
        }
        outcome
    }

    fn work_with(&self, borrower: &Arc<Borrower>, job: u64, work: Work, rank: &Rank, monitor: &Monitor) -> Result<()> {
        let arena = Arena::borrowed(borrower.clone()).interrupted_by(monitor.cancel().interrupt());
        let sink = JobSink::new(job, &self.server, &self.slabs, borrower, arena.clone());
        let of_tables = |task: Task<u64>| task.map_tables(|table| self.table(table));
        match work {
            Work::Run { task, device_bytes } => {
                let (task, memory) = (of_tables(task)?, self.memory(device_bytes, monitor.cancel())?);
                run_within(memory, &*self.device, task, rank, &arena, &sink, monitor)
            }
            Work::Prepare { task, device_bytes, build, is_stored } => {
                let (task, memory) = (of_tables(task)?, self.memory(device_bytes, monitor.cancel())?);
                let rows = self.table(build)?;
                let rows = if is_stored { TableRows::new(rows) } else { TableRows::of_one_join(rows) };
                let join = LocalJoin::prepare(task, &rows, &self.device, memory, &arena, monitor)?;
                self.prepared.lock().insert(job, Arc::new(join));
                Ok(())
            }
            Work::Probe { prepared, total_rows, is_stored, is_numbered } => {
                let (server, slabs, stored) = (&self.server, &self.slabs, &|number| self.table(number));
                let rows = ServerRows { job, server, slabs, stored, total_rows, is_stored, is_numbered };
                self.prepared(prepared)?.probe(&rows, &arena, &sink, monitor)
            }
            Work::Finish { prepared } => self.prepared(prepared)?.finish(&arena, &sink, monitor),
        }
    }

    fn prepared(&self, number: u64) -> Result<Arc<LocalJoin>> {
        let known = self.prepared.lock().get(&number).cloned();
        known.ok_or_else(|| Error::Internal(format!("a job names prepared join {number}, which does not exist")))
    }

    fn table(&self, number: u64) -> Result<Arc<Table>> {
        let known = self.tables.lock().get(&number).cloned();
        known.unwrap_or_else(|| Err(Error::Internal(format!("a task names table {number}, which was not sent"))))
    }

    /// Returns the device memory that the server has promised to a job.
    fn memory(&self, device_bytes: Option<u64>, cancel: &CancelFlag) -> Result<Option<Budget>> {
        device_bytes.map(|bytes| self.promised(bytes, cancel).map(Budget::within)).transpose()
    }

    /// Reserves the device memory that the server has promised to a job. The promises fit in the
    /// memory, but a column that another job reads may take the space for a moment.
    fn promised(&self, bytes: u64, cancel: &CancelFlag) -> Result<Reservation> {
        let since = Instant::now();
        loop {
            cancel.check()?;
            match self.device.memory().reserve(bytes, "a job") {
                Err(Error::Exhausted(_)) if since.elapsed() < PROMISED_WAIT => {
                    std::thread::sleep(Duration::from_millis(1));
                }
                // `Unavailable`, so that the job is tried once more.
                Err(Error::Exhausted(message)) => {
                    return Err(Error::Unavailable(format!(
                        "columns that other joins read occupy memory that was promised to the job: {message}"
                    )));
                }
                reserved => return reserved,
            }
        }
    }

    fn state(&self) -> State {
        State {
            memory: MemoryUse::of(self.device.memory()),
            cache: self.device.cache().and_then(CacheOps::cache_stats),
            dropped_lines: lines::dropped(),
        }
    }
}

/// Maps and unmaps slabs, until the process ends.
fn map_slabs(slabs: &SlabViews, changes: &mpsc::Receiver<SlabChange>, sender: &Sender) {
    for change in changes {
        match change {
            SlabChange::Add { address, len, file } => {
                // Only joins of tables in this slab will fail.
                if let Err(error) = slabs.add(address, len, file) {
                    tracing::error!("a slab of host memory cannot be mapped: {error}");
                }
            }
            SlabChange::Remove { address } => slabs.remove(address),
            SlabChange::Settle { question } => {
                // If the server cannot receive the message, the process is about to end.
                let _ = sender.send(&FromChild::Settled { question }, None);
            }
        }
    }
}

fn answer(process: &Weak<Process>, asked: &mpsc::Receiver<Question>) {
    for question in asked {
        let Some(process) = process.upgrade() else { return };
        process.answer(question);
    }
}

/// Tells the server that the process is not stalled, until the socket is closed. This thread does
/// nothing else, so long work on the device does not delay it.
fn send_heartbeats(sender: &Weak<Sender>, interval: Duration) {
    while sender.upgrade().is_some_and(|sender| sender.send(&FromChild::Heartbeat, None).is_ok()) {
        std::thread::sleep(interval);
    }
}

/// Reports changes to the server while the process lives.
fn tell_progress(process: &Weak<Process>) {
    let mut told = HashMap::new();
    let mut told_state = State::default();
    while let Some(process) = process.upgrade() {
        let running: Vec<_> = process.jobs.lock().iter().map(|(&job, monitor)| (job, monitor.clone())).collect();
        told.retain(|job, _| running.iter().any(|(running, _)| running == job));
        for (job, monitor) in running {
            let report = monitor.report();
            if told.get(&job) != Some(&report) {
                told.insert(job, report.clone());
                process.server.send(&FromChild::Progress { job, report });
            }
        }
        let state = process.state();
        if state != told_state {
            told_state = state;
            process.server.send(&FromChild::State(state));
        }
        drop(process);
        std::thread::sleep(PROGRESS_INTERVAL);
    }
}
