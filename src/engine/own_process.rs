//! The server's side of a device that has a process of its own.
//!
//! ```text
//!   run() ── one thread per job: pushes batches, hands on progress ──────────┐
//!   clerks ── lend what has to be waited for ────────────────────────────────┤◄── reader ◄── socket
//!   whoever asks: what is kept, rates ───────────────────────────────────────┘
//! ```
//!
//! The reader waits for nobody but the process, which always takes what it is sent. What is there it lends itself. What is given back it takes
//! back itself, in the order in which it hears of it, and it may unmap a slab for it: a process gives the pieces of a batch back as soon as
//! it has sent it, so the reader holds them for whoever is to push it.

use std::collections::{BTreeMap, HashMap};
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use arrow::array::{Array, ArrayData, RecordBatch};
use arrow::buffer::Buffer;
use parking_lot::Mutex;

use super::channel::{Receiver, Sender};
use super::messages::{Answer, BatchParts, FromDevice, Opened, Run, State, TableParts, ToDevice, Want};
use super::{Engine, Grant, MemoryUse, Opening, spawn};
use crate::catalog::Table;
use crate::device::{CacheStats, ColumnRows, DeviceId, DeviceInfo};
use crate::human::system_words;
use crate::join::{BatchSink, Monitor, Report, Task};
use crate::memory::{Arena, ArenaBuffer, Budget, Held, Pin, Place, holding};
use crate::planner::Rates;
use crate::{Context, Error, Result, panics};

/// Threads that lend memory: one may wait for a slab, which takes tenths of a second, while others find room.
const CLERKS: usize = 3;

/// Time between looks at whether a job should stop.
const CANCEL_INTERVAL: Duration = Duration::from_millis(5);

/// How long a process may take to open its device.
const OPENING_WAIT: Duration = Duration::from_secs(120);

/// A process that takes nothing from its socket for so long is stuck, and is ended: others wait for it meanwhile.
const STUCK_AFTER: Duration = Duration::from_secs(10);

/// How long a process that was hung up on has to end by itself.
const ENDING_WAIT: Duration = Duration::from_secs(1);

/// How long a question waits for its answer, whose lack is no failure.
const QUESTION_WAIT: Duration = Duration::from_millis(200);

/// How long the system may take to bury a process, with the contexts of its GPU.
const BURIAL_WAIT: Duration = Duration::from_secs(10);

/// How long rates may take to be measured.
const RATES_WAIT: Duration = Duration::from_secs(120);

/// The slabs of an arena, for processes that come and go. It takes the place of what pins slabs: each process pins its view.
#[derive(Debug, Default)]
pub struct SharedSlabs {
    inner: Mutex<Shown>,
}

/// Length and file of each slab, by its address.
type Slabs = BTreeMap<u64, (u64, Arc<OwnedFd>)>;

/// A process is shown so few slabs while whoever takes one, or gives one back, waits.
const LAST_SLABS: usize = 8;

#[derive(Debug, Default)]
struct Shown {
    slabs: Slabs,
    to: Vec<Weak<Link>>,
}

impl SharedSlabs {
    /// Shows all slabs to a process, those that are there and those to come. It maps and pins each before it takes the next, which may take
    /// seconds for all of them: nobody who takes a slab, or gives one back, waits for more than the last few.
    fn show_to(&self, link: &Arc<Link>) -> Result<()> {
        let mut seen = Slabs::new();
        loop {
            let now = self.inner.lock().slabs.clone();
            if now.len().abs_diff(seen.len()) <= LAST_SLABS {
                break;
            }
            link.show(&mut seen, &now)?;
        }
        let mut shown = self.inner.lock();
        link.show(&mut seen, &shown.slabs)?;
        shown.to.push(Arc::downgrade(link));
        Ok(())
    }
}

impl Pin for SharedSlabs {
    fn pin(&self, start: *mut u8, len: usize, file: Option<&Arc<OwnedFd>>) -> bool {
        let Some(file) = file else {
            tracing::warn!(
                "a slab of host memory has no file, so that processes of devices cannot join what lies in it"
            );
            return false;
        };
        let (address, len) = (start as u64, len as u64);
        let mut shown = self.inner.lock();
        let tell = |link: &Weak<Link>| {
            let Some(link) = link.upgrade() else { return false };
            // Of a process that does not hear, its reader will tell.
            let _ = link.sender.send(&ToDevice::Slab { address, len }, Some(file.as_fd()));
            true
        };
        shown.to.retain(tell);
        shown.slabs.insert(address, (len, file.clone()));
        true
    }

    fn unpin(&self, start: *mut u8) {
        let address = start as u64;
        // Links are let go of without the lock: with the last of one go pieces, and with these maybe a slab.
        let links: Vec<Arc<Link>>;
        {
            let mut shown = self.inner.lock();
            shown.slabs.remove(&address);
            links = shown.to.iter().filter_map(Weak::upgrade).collect();
            for link in &links {
                // What lay in it was a table's that is gone, which the process has still mapped.
                link.forget_gone_tables();
                let _ = link.sender.send(&ToDevice::Unmapped { address }, None);
            }
        }
    }
}

/// An engine over a device that has a process of its own.
#[derive(Debug)]
pub struct OwnProcess {
    id: DeviceId,
    info: DeviceInfo,
    memory: Budget,
    jobs_max: usize,
    arena: Arena,
    link: Arc<Link>,
    reader: Option<JoinHandle<()>>,
    last_number: AtomicU64,
}

/// Tables that a process knows, by their address, which is not used again while the table can be named.
type Tables = HashMap<usize, (u64, Weak<Table>)>;

impl OwnProcess {
    /// Starts the process, this program with `device-process` and those arguments, and opens the device there. `slabs` are those of
    /// `arena`.
    ///
    /// # Errors
    /// What opening the device answers; [`Error::Unavailable`] when the process cannot be started, or does not answer.
    pub fn start(opening: &Opening, arguments: &[&str], arena: Arena, slabs: &SharedSlabs) -> Result<Self> {
        let (here, there) = UnixStream::pair()?;
        // What runs now, whatever file has its name since.
        let mut command = Command::new("/proc/self/exe");
        command.arg0(std::env::args_os().next().unwrap_or_else(|| "dovetail".into()));
        // Ctrl-C in a terminal is for the server, which lets its jobs end.
        command
            .arg("device-process")
            .args(arguments)
            .stdin(OwnedFd::from(there))
            .stdout(Stdio::null())
            .process_group(0);
        let child = command.spawn().map_err(|error| {
            Error::Unavailable(format!("starting the process of {}: {}", opening.id, system_words(&error)))
        })?;
        // It holds the other end, which only the process is to hold: its end is the socket's.
        drop(command);
        Self::over(opening, arena, slabs, here, Some(child))
    }

    /// The same with a process that runs already at the other end of a socket.
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
        let mut grave = Grave { id: opening.id, socket, child, status: None };
        let sent = sender.send(&ToDevice::Open(opening.clone()), None);
        let opened = match sent.and_then(|()| messages.receive()) {
            Ok(Some(FromDevice::Opened(opened))) => opened?,
            Ok(Some(other)) => {
                return Err(Error::Internal(format!("the process of {} begins with {other:?}", opening.id)));
            }
            Ok(None) | Err(_) => {
                grave.bury();
                return Err(grave.inscription().context("it did not open its device"));
            }
        };
        grave.socket.set_read_timeout(None)?;
        let Opened { info, memory_bytes, jobs_max } = opened;
        let (work, clerks) = mpsc::channel();
        let link = Arc::new(Link {
            sender,
            jobs: Mutex::default(),
            questions: Mutex::default(),
            lent: Mutex::default(),
            tables: Mutex::default(),
            is_hung_up: AtomicBool::new(false),
            state: Mutex::default(),
            lost: OnceLock::new(),
        });
        let clerks = Arc::new(Mutex::new(clerks));
        for _ in 0..CLERKS {
            let (link, clerks) = (Arc::downgrade(&link), clerks.clone());
            spawn(format!("{}/clerk", opening.id), move || work_off(&link, &clerks))?;
        }
        let read = link.clone();
        let reader = spawn(format!("{}/reader", opening.id), move || read.read(messages, &work, grave))?;
        slabs.show_to(&link).context(|| format!("showing host memory to the process of {}", opening.id))?;
        let memory = Budget::new(opening.memory_name.clone(), opening.memory_knob.clone(), memory_bytes);
        let (reader, last_number) = (Some(reader), AtomicU64::new(0));
        Ok(Self { id: opening.id, info, memory, jobs_max, arena, link, reader, last_number })
    }

    /// Has the device keep columns of joins, in so many bytes of its memory.
    ///
    /// # Errors
    /// As [`Engine::check`].
    pub fn keep_columns(&self, limit_bytes: u64) -> Result<()> {
        self.send(&ToDevice::KeepColumns { limit_bytes })
    }

    /// Waits until the process has taken in what it was sent so far, for as long as opening a device may take.
    pub(super) fn settle(&self) {
        self.ask(OPENING_WAIT, |question| ToDevice::KeptRows { question, table: 0 }, |_| Some(()));
    }

    /// Whether the process has ended and the system has buried it.
    pub(super) fn has_ended(&self) -> bool {
        self.reader.as_ref().is_none_or(JoinHandle::is_finished)
    }

    fn send(&self, message: &ToDevice) -> Result<()> {
        self.check()?;
        self.link.sender.send(message, None).map_err(|error| {
            // The reader comes to know of it, too, and what has become of the process.
            self.link.wait_until_lost();
            let why = system_words(&error);
            let unheard = || Error::Unavailable(format!("the process of {} does not hear: {why}", self.id));
            self.check().err().unwrap_or_else(unheard)
        })
    }

    fn number(&self) -> u64 {
        self.last_number.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// The number by which the process knows a table; it is told of those that are new, and of those that are gone.
    fn table(&self, table: &Arc<Table>) -> Result<u64> {
        self.link.forget_gone_tables();
        let mut known = self.link.tables.lock();
        let address = Arc::as_ptr(table) as usize;
        if let Some((number, _)) = known.get(&address) {
            return Ok(*number);
        }
        let number = self.number();
        let parts = TableParts::of(number, table, &|buffer| self.arena.place_of(buffer));
        self.send(&ToDevice::Table(parts))?;
        known.insert(address, (number, Arc::downgrade(table)));
        Ok(number)
    }

    /// How many tables the process is thought to know.
    #[cfg(test)]
    pub(super) fn known_tables(&self) -> usize {
        self.link.tables.lock().len()
    }

    /// Asks the process something; `None` when it does not answer in time.
    fn ask<T>(
        &self,
        wait: Duration,
        message: impl FnOnce(u64) -> ToDevice,
        answer: impl Fn(FromDevice) -> Option<T>,
    ) -> Option<T> {
        let question = self.number();
        let (sender, answered) = mpsc::sync_channel(1);
        self.link.questions.lock().insert(question, sender);
        let answer = self.send(&message(question)).ok().and_then(|()| answer(answered.recv_timeout(wait).ok()?));
        self.link.questions.lock().remove(&question);
        answer
    }

    /// Does what a job wants, or takes in what it tells, until it ends.
    fn attend(&self, listening: &Listening<'_>, task: &Task, sink: &dyn BatchSink, monitor: &Monitor) -> Result<()> {
        let job = listening.job;
        let mut is_told_to_stop = false;
        // Why a batch could not be pushed. Others may be on their way that follow on it.
        let mut refused = None;
        let tables = TableBuffers::new(task);
        loop {
            if monitor.cancel().is_raised() && !is_told_to_stop {
                is_told_to_stop = true;
                self.send(&ToDevice::Cancel { job })?;
            }
            match listening.messages.recv_timeout(CANCEL_INTERVAL) {
                Ok(OfJob::Push { call, batch, pieces, shared }) => {
                    let push = || {
                        restored(task, &tables, &pieces, &batch).and_then(|batch| match &shared {
                            Some(shared) => sink.push_sharing(batch, shared),
                            None => sink.push(batch),
                        })
                    };
                    if refused.is_none() {
                        // The job hears of it, whatever comes of it here.
                        let pushed = catch_unwind(AssertUnwindSafe(push)).unwrap_or_else(|panic| {
                            let message = panics::message(&*panic);
                            Err(Error::Internal(format!("taking a batch of the result panicked: {message}")))
                        });
                        refused = pushed.err();
                    }
                    let answer = refused.clone().map_or(Ok(Answer::Pushed), Err);
                    self.send(&ToDevice::Answer { call, answer })?;
                }
                Ok(OfJob::ReadersMayHelp { call, waited }) => {
                    let since = Instant::now().checked_sub(waited).unwrap_or_else(Instant::now);
                    let answer = sink.wait_for_readers(since).map(Answer::ReadersMayHelp);
                    self.send(&ToDevice::Answer { call, answer })?;
                }
                Ok(OfJob::Progress(report)) => monitor.take_over(report),
                Ok(OfJob::Ended { outcome, report }) => {
                    monitor.take_over(report);
                    return refused.map_or(outcome, Err);
                }
                Err(mpsc::RecvTimeoutError::Timeout) => {}
                Err(mpsc::RecvTimeoutError::Disconnected) => {
                    self.check()?;
                    return Err(Error::Internal(format!("nobody listens to the process of {}", self.id)));
                }
            }
        }
    }
}

impl Engine for OwnProcess {
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
        self.link.state.lock().memory
    }

    fn jobs_max(&self) -> usize {
        self.jobs_max
    }

    fn run(&self, task: &Task, grant: &Grant, sink: &dyn BatchSink, monitor: &Monitor) -> Result<()> {
        self.check()?;
        let numbered = task.clone().map_tables(|table| self.table(&table))?;
        let job = self.number();
        let arena = self.arena.drawing_on(grant.host_memory.clone()).interrupted_by(monitor.cancel().interrupt());
        let (messages, of_job) = mpsc::channel();
        let listening = Listening::begin(&self.link, job, Door { arena, messages }, of_job)?;
        let device_bytes = grant.device_memory.as_ref().map(Budget::limit_bytes);
        self.send(&ToDevice::Run(Box::new(Run { job, task: numbered, device_bytes })))?;
        self.attend(&listening, task, sink, monitor)
    }

    fn check(&self) -> Result<()> {
        self.link.check()
    }

    fn kept_rows(&self, table: &Arc<Table>) -> Vec<ColumnRows> {
        // What was never sent is not there.
        let Some(number) = self.link.tables.lock().get(&(Arc::as_ptr(table) as usize)).map(|(number, _)| *number)
        else {
            return Vec::new();
        };
        if self.link.state.lock().cache.is_none() {
            return Vec::new();
        }
        let kept = self.ask(
            QUESTION_WAIT,
            |question| ToDevice::KeptRows { question, table: number },
            |answer| match answer {
                FromDevice::KeptRows { kept, .. } => Some(kept),
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
        self.link.state.lock().cache
    }

    fn dropped_lines(&self) -> Option<u64> {
        Some(self.link.state.lock().dropped_lines)
    }

    fn measure_rates(&self, tell: &dyn Fn(f64)) -> Option<Rates> {
        let rates = self.ask(
            RATES_WAIT,
            |question| ToDevice::MeasureRates { question },
            |answer| match answer {
                FromDevice::Rates { rates, .. } => rates,
                _ => None,
            },
        );
        tell(1.0);
        rates.map(|rates| *rates)
    }
}

impl Drop for OwnProcess {
    fn drop(&mut self) {
        // The process ends when the server hangs up, and the reader when the process has.
        self.link.is_hung_up.store(true, Ordering::Relaxed);
        self.link.sender.hang_up();
        if let Some(reader) = self.reader.take()
            && reader.join().is_err()
        {
            tracing::error!("the reader of the process of {} panicked", self.id);
        }
    }
}

/// The connection to a process, and what was lent to it.
#[derive(Debug)]
struct Link {
    sender: Sender,
    /// Who listens to which job.
    jobs: Mutex<HashMap<u64, Door>>,
    /// Who waits for which answer.
    questions: Mutex<HashMap<u64, mpsc::SyncSender<FromDevice>>>,
    lent: Mutex<Lent>,
    tables: Mutex<Tables>,
    /// Whether the server has no use for it any more.
    is_hung_up: AtomicBool,
    state: Mutex<State>,
    /// Why the device is out of service.
    lost: OnceLock<Error>,
}

/// What the process has of the server's memory.
#[derive(Debug, Default)]
struct Lent {
    /// Pieces by their address.
    pieces: BTreeMap<u64, Piece>,
    held: HashMap<u64, Held>,
    last_held: u64,
    /// Whether the process has ended, so that nothing is lent to it any more.
    is_closed: bool,
}

/// A piece that was lent.
#[derive(Debug)]
enum Piece {
    /// The process writes to it.
    Open(ArenaBuffer),
    /// It is part of a batch.
    Written(Buffer),
}

impl Piece {
    fn len(&self) -> usize {
        match self {
            Self::Open(open) => open.len(),
            Self::Written(written) => written.len(),
        }
    }
}

/// Where what a job says goes.
#[derive(Clone, Debug)]
struct Door {
    /// What the job's pieces come from.
    arena: Arena,
    messages: mpsc::Sender<OfJob>,
}

/// Pieces that nobody writes to any more, by where they begin.
type Pieces = BTreeMap<u64, Buffer>;

/// What a job says.
#[derive(Debug)]
enum OfJob {
    Push { call: u64, batch: BatchParts, pieces: Pieces, shared: Option<Vec<bool>> },
    ReadersMayHelp { call: u64, waited: Duration },
    Progress(Report),
    Ended { outcome: Result<()>, report: Report },
}

/// What clerks do.
enum Chore {
    Piece {
        call: u64,
        arena: Arena,
        len: usize,
        purpose: String,
    },
    Hold {
        call: u64,
        arena: Arena,
        bytes: u64,
        purpose: String,
    },
    FreeBytes {
        call: u64,
        arena: Arena,
    },
    /// Nobody listens to the job any more.
    Refuse {
        call: u64,
    },
}

impl Chore {
    /// The call that it is for.
    fn call(&self) -> u64 {
        match self {
            Self::Piece { call, .. }
            | Self::Hold { call, .. }
            | Self::FreeBytes { call, .. }
            | Self::Refuse { call } => *call,
        }
    }
}

/// A door that is open as long as this lives.
struct Listening<'a> {
    link: &'a Link,
    job: u64,
    messages: mpsc::Receiver<OfJob>,
}

impl<'a> Listening<'a> {
    fn begin(link: &'a Link, job: u64, door: Door, messages: mpsc::Receiver<OfJob>) -> Result<Self> {
        link.jobs.lock().insert(job, door);
        let listening = Self { link, job, messages };
        // Whoever closes the doors has said before that the device is lost.
        link.check()?;
        Ok(listening)
    }
}

impl Drop for Listening<'_> {
    fn drop(&mut self) {
        self.link.jobs.lock().remove(&self.job);
        // Whatever it has said and nobody has heard, it waits for the answer.
        for said in self.messages.try_iter() {
            if let OfJob::Push { call, .. } | OfJob::ReadersMayHelp { call, .. } = said {
                self.link.work(Chore::Refuse { call });
            }
        }
    }
}

impl Link {
    /// Tells the process in what way there are other slabs now than it has seen.
    fn show(&self, seen: &mut Slabs, now: &Slabs) -> Result<()> {
        let is_same = |slabs: &Slabs, address: u64, file: &Arc<OwnedFd>| {
            slabs.get(&address).is_some_and(|(_, other)| Arc::ptr_eq(file, other))
        };
        for (&address, _) in seen.iter().filter(|&(&address, (_, file))| !is_same(now, address, file)) {
            self.sender.send(&ToDevice::Unmapped { address }, None)?;
        }
        for (&address, (len, file)) in now.iter().filter(|&(&address, (_, file))| !is_same(seen, address, file)) {
            self.sender.send(&ToDevice::Slab { address, len: *len }, Some(file.as_fd()))?;
        }
        seen.clone_from(now);
        Ok(())
    }

    fn check(&self) -> Result<()> {
        self.lost.get().map_or(Ok(()), |lost| Err(lost.clone()))
    }

    /// Tells the process of the tables that are gone, whose memory it would otherwise keep.
    fn forget_gone_tables(&self) {
        let mut gone = Vec::new();
        let mut known = self.tables.lock();
        known.retain(|_, (number, table)| {
            let is_here = table.strong_count() > 0;
            gone.extend((!is_here).then_some(*number));
            is_here
        });
        if !gone.is_empty() {
            // Of a process that does not hear, its reader will tell.
            let _ = self.sender.send(&ToDevice::Forget { tables: gone }, None);
        }
    }

    /// Waits, for as long as the system takes to bury a process.
    fn wait_until_lost(&self) {
        let since = Instant::now();
        while self.lost.get().is_none() && since.elapsed() < 2 * BURIAL_WAIT {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// The reader's life.
    fn read(&self, mut messages: Receiver, work: &mpsc::Sender<Chore>, mut grave: Grave) {
        let lost = loop {
            match messages.receive() {
                // Of a process whose device is lost nothing more is wanted.
                Ok(Some(FromDevice::Ended { lost: Some(lost), .. })) => break Some(lost),
                Ok(Some(message)) => self.take(message, work),
                Ok(None) => break None,
                Err(error) => {
                    tracing::warn!(device = %grave.id, "the process is not understood any more: {error}");
                    break None;
                }
            }
        };
        let is_buried = grave.bury();
        let lost = lost.unwrap_or_else(|| grave.inscription());
        if !is_buried {
            // Who waits for it need not wait for ever, but its GPU may yet write where it was told to.
            tracing::error!(device = %grave.id, "the process does not end; what it had borrowed stays taken until it does");
            self.close(lost.clone());
            grave.wait();
        }
        let lent = std::mem::replace(&mut *self.lent.lock(), Lent { is_closed: true, ..Lent::default() });
        drop(lent);
        self.close(lost);
    }

    /// Tells everybody that the device is lost.
    fn close(&self, lost: Error) {
        if self.lost.set(lost).is_ok() && !self.is_hung_up.load(Ordering::Relaxed) {
            tracing::error!("{}", self.lost.get().map_or("", |lost| lost.message()));
        }
        self.jobs.lock().clear();
        self.questions.lock().clear();
        let mut state = self.state.lock();
        state.memory.used_bytes = 0;
        state.cache.iter_mut().for_each(|cache| cache.bytes = 0);
    }

    /// Hands a message to whom it is for.
    fn take(&self, message: FromDevice, work: &mpsc::Sender<Chore>) {
        let chore = |chore: Chore| work.send(chore).expect("clerks end after the reader");
        match message {
            FromDevice::Opened(_) => {}
            FromDevice::Call { call, job, want } => {
                let Some(Door { arena, messages }) = self.jobs.lock().get(&job).cloned() else {
                    return chore(Chore::Refuse { call });
                };
                let say = |said: OfJob| drop(messages.send(said));
                match want {
                    Want::Piece { len, purpose } => match arena.allocate_at_once(len as usize) {
                        Some(piece) => self.answer(call, self.lend(piece)),
                        None => chore(Chore::Piece { call, arena, len: len as usize, purpose }),
                    },
                    Want::Hold { bytes, purpose } => chore(Chore::Hold { call, arena, bytes, purpose }),
                    Want::FreeBytes => chore(Chore::FreeBytes { call, arena }),
                    Want::Push { batch, shared } => {
                        let pieces = self.lent.lock().pieces_of(&batch);
                        say(OfJob::Push { call, batch, pieces, shared });
                    }
                    Want::ReadersMayHelp { waited_seconds } => {
                        let waited = Duration::try_from_secs_f64(waited_seconds).unwrap_or_default();
                        say(OfJob::ReadersMayHelp { call, waited });
                    }
                }
            }
            // A piece that becomes shorter leaves its slab in use: nothing is unmapped.
            FromDevice::Shorten { address, len } => {
                if let Some(Piece::Open(piece)) = self.lent.lock().pieces.get_mut(&address) {
                    piece.truncate(len as usize);
                }
            }
            // Here, so that what a job does next, or the next job, finds it free.
            FromDevice::GiveBack { address } => {
                let piece = self.lent.lock().pieces.remove(&address);
                drop(piece);
            }
            FromDevice::LetGo { held } => {
                let held = self.lent.lock().held.remove(&held);
                drop(held);
            }
            FromDevice::Progress { job, report } => self.tell(job, OfJob::Progress(report)),
            FromDevice::State(state) => *self.state.lock() = state,
            FromDevice::KeptRows { question, .. } | FromDevice::Rates { question, .. } => {
                if let Some(asker) = self.questions.lock().remove(&question) {
                    // It may have waited long enough.
                    let _ = asker.send(message);
                }
            }
            FromDevice::Ended { job, outcome, report, .. } => self.tell(job, OfJob::Ended { outcome, report }),
        }
    }

    fn tell(&self, job: u64, said: OfJob) {
        if let Some(door) = self.jobs.lock().get(&job) {
            let _ = door.messages.send(said);
        }
    }

    /// Does a chore and answers the call that it is for.
    fn work(&self, chore: Chore) {
        let (call, answer) = match chore {
            Chore::Piece { call, arena, len, purpose } => {
                (call, arena.allocate(len, &purpose).and_then(|piece| self.lend(piece)))
            }
            Chore::Hold { call, arena, bytes, purpose } => {
                let held = arena.reserve(bytes, &purpose).and_then(|reserved| {
                    let mut lent = self.lent.lock();
                    let lent = lent.open()?;
                    lent.last_held += 1;
                    lent.held.insert(lent.last_held, reserved);
                    Ok(Answer::Held { held: lent.last_held })
                });
                (call, held)
            }
            Chore::FreeBytes { call, arena } => (call, Ok(Answer::FreeBytes(arena.free_bytes()))),
            Chore::Refuse { call } => (call, Err(Error::Cancelled("nobody waits for the job any more".into()))),
        };
        self.answer(call, answer);
    }

    fn lend(&self, piece: ArenaBuffer) -> Result<Answer> {
        let address = piece.as_ptr() as u64;
        self.lent.lock().open()?.pieces.insert(address, Piece::Open(piece));
        Ok(Answer::Piece { address })
    }

    fn answer(&self, call: u64, answer: Result<Answer>) {
        // Of a process that does not hear, the reader will tell.
        let _ = self.sender.send(&ToDevice::Answer { call, answer }, None);
    }
}

/// A batch of a task's result, of lent pieces and what lies in both tables.
fn restored(task: &Task, tables: &TableBuffers<'_>, pieces: &Pieces, parts: &BatchParts) -> Result<RecordBatch> {
    let find = |place: &Place| match place {
        Place::Bytes(bytes) => Ok(Place::aligned(bytes)),
        Place::Slab { address, len } => {
            let (address, len) = (*address, *len as usize);
            slice_of(pieces, address, len).or_else(|| tables.find(address, len)).ok_or_else(|| {
                Error::Internal(format!("{len} bytes at {address:#x} were not lent, and are in neither table"))
            })
        }
    };
    parts.restore(&task.schema, &find)
}

/// The buffer's part that is at an address.
fn slice_of(buffers: &BTreeMap<u64, Buffer>, address: u64, len: usize) -> Option<Buffer> {
    let (start, offset) = holding(buffers, address, len, Buffer::len)?;
    Some(buffers[&start].slice_with_length(offset, len))
}

fn work_off(link: &Weak<Link>, clerks: &Mutex<mpsc::Receiver<Chore>>) {
    loop {
        let chore = clerks.lock().recv();
        let (Ok(chore), Some(link)) = (chore, link.upgrade()) else { return };
        let call = chore.call();
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| link.work(chore))) {
            tracing::error!("lending memory panicked: {}", panics::message(&*panic));
            link.work(Chore::Refuse { call });
        }
    }
}

impl Lent {
    /// What is lent, to be added to.
    fn open(&mut self) -> Result<&mut Self> {
        match self.is_closed {
            true => Err(Error::Cancelled("the process has ended".into())),
            false => Ok(self),
        }
    }

    /// The pieces that a batch is made of, to which nobody writes from now on.
    fn pieces_of(&mut self, batch: &BatchParts) -> Pieces {
        let mut found = Pieces::new();
        batch.each_place(&mut |place| {
            let Place::Slab { address, len } = place else { return };
            let Some((start, _)) = holding(&self.pieces, *address, *len as usize, Piece::len) else { return };
            let Some(piece) = self.pieces.remove(&start) else { return };
            let written = match piece {
                Piece::Open(open) => open.freeze(),
                Piece::Written(written) => written,
            };
            found.insert(start, written.clone());
            self.pieces.insert(start, Piece::Written(written));
        });
        found
    }
}

/// The buffers of both tables of a task, by their addresses: a result may share them.
pub(super) struct TableBuffers<'a> {
    task: &'a Task,
    buffers: OnceLock<BTreeMap<u64, Buffer>>,
}

impl<'a> TableBuffers<'a> {
    pub(super) fn new(task: &'a Task) -> Self {
        Self { task, buffers: OnceLock::new() }
    }

    pub(super) fn find(&self, address: u64, len: usize) -> Option<Buffer> {
        let buffers = self.buffers.get_or_init(|| {
            let mut buffers = BTreeMap::new();
            for table in [&self.task.build.table, &self.task.probe.table] {
                for column in table.batches.iter().flat_map(|batch| batch.columns()) {
                    collect(&column.to_data(), &mut buffers);
                }
            }
            // One that lies within another, as a table's may that was the result of a join, would hide it.
            let mut end = 0;
            buffers.retain(|&start, buffer| {
                let is_outside = start + buffer.len() as u64 > end;
                end = end.max(start + buffer.len() as u64);
                is_outside
            });
            buffers
        });
        slice_of(buffers, address, len)
    }
}

/// All buffers of an array, by their addresses; of several that begin at one, the longest.
fn collect(array: &ArrayData, buffers: &mut BTreeMap<u64, Buffer>) {
    let mut add = |buffer: &Buffer| {
        let known = buffers.entry(buffer.as_ptr() as u64).or_insert_with(|| buffer.clone());
        if known.len() < buffer.len() {
            *known = buffer.clone();
        }
    };
    array.buffers().iter().for_each(&mut add);
    if let Some(nulls) = array.nulls() {
        add(nulls.buffer());
    }
    array.child_data().iter().for_each(|child| collect(child, buffers));
}

/// What is left to do when a process has ended, or must.
#[derive(Debug)]
struct Grave {
    id: DeviceId,
    socket: UnixStream,
    child: Option<Child>,
    /// What the system said when it had ended.
    status: Option<ExitStatus>,
}

impl Grave {
    /// Hangs up, ends the process if it does not end by itself, and answers whether the system has buried it.
    fn bury(&mut self) -> bool {
        // It may have hung up first.
        let _ = self.socket.shutdown(Shutdown::Both);
        self.has_ended(ENDING_WAIT) || {
            if let Some(child) = &mut self.child {
                let _ = child.kill();
            }
            self.has_ended(BURIAL_WAIT)
        }
    }

    /// Whether the process ends within that time.
    fn has_ended(&mut self, wait: Duration) -> bool {
        let Some(child) = &mut self.child else { return true };
        let since = Instant::now();
        loop {
            match child.try_wait() {
                Ok(Some(status)) => {
                    (self.status, self.child) = (Some(status), None);
                    return true;
                }
                Ok(None) if since.elapsed() < wait => std::thread::sleep(Duration::from_millis(1)),
                _ => return false,
            }
        }
    }

    /// Waits for as long as it takes.
    fn wait(&mut self) {
        if let Some(mut child) = self.child.take() {
            self.status = child.wait().ok();
        }
    }

    /// What to say of the process.
    fn inscription(&self) -> Error {
        let how = self.status.map(|status| format!(" ({status})")).unwrap_or_default();
        Error::Unavailable(format!("the process of {} has ended{how}; joins on other devices go on", self.id))
    }
}

impl Drop for Grave {
    fn drop(&mut self) {
        self.bury();
    }
}
