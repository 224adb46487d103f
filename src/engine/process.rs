//! Process of a device: it runs the server's jobs until the server hangs up.

use std::collections::HashMap;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak, mpsc};
use std::time::{Duration, Instant};

use arrow::array::RecordBatch;
use parking_lot::{Condvar, Mutex};

use super::channel::{Receiver, Sender};
use super::messages::{BatchParts, FromChild, GangMember, HostRequest, HostResponse, Opened, Run, State, ToChild};
use super::{MemoryUse, Opening, Window, run_within, spawn};
use crate::catalog::{Adopter, Table};
use crate::device::{self, CacheOps, CancelFlag, Device, DeviceInfo, PeerOps};
use crate::join::{BatchSink, GangBoard, Monitor, Rank};
use crate::memory::{Arena, Borrower, Budget, Lender, Reservation, SlabViews, Span};
use crate::planner::{Target, measure_rates};
use crate::{Error, Result, lines, panics};

/// Time between two checks for progress of running jobs.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(50);

/// Time that a job waits for device memory that it was promised. Meanwhile the device evicts cached
/// columns that other jobs no longer use.
const PROMISED_WAIT: Duration = Duration::from_secs(5);

/// Most batches of a job that are sent and not yet pushed. A device's streams together make a few
/// less at a time.
const PUSHES_MAX: usize = 8;

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
    let process = match Process::open(&opening, sender.clone()) {
        Ok((process, opened)) => {
            let window = Window::of(&*process.device)?;
            let file = window.as_ref().map(|window| window.file.as_fd());
            sender.send(&FromChild::Opened(Ok(opened)), file)?;
            Arc::new(process)
        }
        Err(error) => return Ok(sender.send(&FromChild::Opened(Err(error)), None)?),
    };
    let (questions, asked) = mpsc::channel();
    let answering = Arc::downgrade(&process);
    spawn(format!("{}/answer", opening.id), move || answer(&answering, &asked))?;
    let watched = Arc::downgrade(&process);
    spawn(format!("{}/tell", opening.id), move || tell_progress(&watched))?;
    let (ended, outcome) = mpsc::channel();
    let turn = Arc::new(Mutex::new(Some(messages)));
    // One thread for each job, and one that reads. The server sends no more jobs at once.
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
        while let Some((run, rank)) = self.next_run() {
            let Some(process) = self.process.upgrade() else { return };
            process.run(run, rank);
        }
    }

    /// Waits for its turn, and handles messages up to the next job. `None` once the socket is
    /// closed or the process ends. A panic is an error that ends the process, as a lost message
    /// might leave its receiver waiting. A reader must not send or wait for anything during its
    /// turn, because the server may be waiting for room in the socket.
    fn next_run(&self) -> Option<RankRun> {
        let mut turn = self.turn.lock();
        let messages = turn.as_mut()?;
        let outcome = loop {
            match messages.receive() {
                Ok(Some(message)) => {
                    let process = self.process.upgrade()?;
                    let said = |panic: &str| format!("taking a message of the server panicked: {panic}");
                    match panics::as_error(said, || process.take(message, messages, &self.questions)) {
                        Ok(None) => {}
                        Ok(Some(run)) => return Some(run),
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

/// Join to run, and the rank to run it as, if the board of its gang could be mapped.
type RankRun = (Run, Result<Rank>);

/// Question whose answer is sent by a thread that does not read.
enum Question {
    CachedRows { question: u64, table: u64 },
    MeasureRates { question: u64 },
}

/// Device and the server's tables, slabs and jobs.
#[derive(Debug)]
struct Process {
    device: Arc<dyn Device>,
    slabs: Arc<SlabViews>,
    /// Tables that the server has sent, or the error of a table that could not be decoded.
    tables: Mutex<HashMap<u64, Result<Arc<Table>>>>,
    /// Jobs that have not ended.
    jobs: Mutex<HashMap<u64, Arc<Monitor>>>,
    line: Arc<ServerConnection>,
}

impl Process {
    fn open(opening: &Opening, sender: Arc<Sender>) -> Result<(Self, Opened)> {
        let device = opening.open()?;
        let opened = Opened {
            info: DeviceInfo::of(&*device),
            memory_bytes: device.memory().limit_bytes(),
            jobs_max: device.jobs_max(),
            window_bytes: device.peers().map_or(0, PeerOps::window_bytes),
        };
        let process = Self {
            slabs: Arc::new(SlabViews::pinned_by(device.pin())),
            device,
            tables: Mutex::default(),
            jobs: Mutex::default(),
            line: Arc::new(ServerConnection {
                sender,
                waiting: Mutex::default(),
                last_call: AtomicU64::new(0),
                is_cut: AtomicBool::new(false),
            }),
        };
        Ok((process, opened))
    }

    /// Handles a message of the server, or returns the job that it asks for. Only mapping and
    /// unmapping a slab take long.
    fn take(
        &self,
        message: ToChild,
        messages: &mut Receiver,
        questions: &mpsc::Sender<Question>,
    ) -> Result<Option<RankRun>> {
        let ask = |question: Question| questions.send(question).expect("questions are answered until the end");
        match message {
            ToChild::Open(_) => return Err(Error::Internal("the device is open already".into())),
            ToChild::EnableCache { limit_bytes } => {
                let enabled = self.device.cache().map_or(Ok(()), |cache| cache.enable_cache(limit_bytes));
                if let Err(error) = enabled {
                    tracing::warn!(device = %self.device.id(), "columns are not cached: {error}");
                }
            }
            ToChild::Slab { address, len } => {
                // Only joins of tables in this slab will fail.
                if let Err(error) = self.slabs.add(address, len as usize, messages.file()?) {
                    tracing::error!(device = %self.device.id(), "a slab of host memory cannot be mapped: {error}");
                }
            }
            ToChild::Unmapped { address } => self.slabs.remove(address),
            ToChild::MapWindow { peer, bytes } => {
                let file = messages.file()?;
                let mapped = self.device.peers().map_or(Ok(()), |peers| peers.map_window(peer, file, bytes));
                // Only gangs with this peer will fail.
                if let Err(error) = mapped {
                    tracing::error!(device = %self.device.id(), %peer, "the memory of a peer cannot be mapped: {error}");
                }
            }
            ToChild::UnmapWindow { peer } => {
                self.device.peers().into_iter().for_each(|peers| peers.unmap_window(peer));
            }
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
            ToChild::Run(run) => {
                let running = self.jobs.lock().len();
                if running >= self.device.jobs_max() {
                    // No thread would be left to read.
                    return Err(Error::Internal(format!(
                        "the server sent a job while {running} run, which is the most"
                    )));
                }
                let rank = match &run.member {
                    Some(GangMember { rank, devices }) => {
                        GangBoard::of_file(messages.file()?, devices).map(|board| Rank::of_gang(*rank, board))
                    }
                    None => Ok(Rank::alone()),
                };
                self.jobs.lock().insert(run.job, Arc::new(Monitor::new(CancelFlag::new())));
                return Ok(Some((*run, rank)));
            }
            ToChild::Cancel { job } => {
                if let Some(monitor) = self.jobs.lock().get(&job) {
                    monitor.cancel().raise();
                }
            }
            ToChild::HostResponse { call, answer } => self.line.answered(call, answer),
            ToChild::CachedRows { question, table } => ask(Question::CachedRows { question, table }),
            ToChild::MeasureRates { question } => ask(Question::MeasureRates { question }),
        }
        Ok(None)
    }

    /// Ends everything that waits for the server.
    fn hang_up(&self) {
        self.jobs.lock().values().for_each(|monitor| monitor.cancel().raise());
        self.line.cut();
    }

    fn answer(&self, question: Question) {
        match question {
            Question::CachedRows { question, table } => {
                let table = self.tables.lock().get(&table).cloned();
                let kept = table
                    .and_then(Result::ok)
                    .map_or_else(Vec::new, |table| Target::cached_rows(&*self.device, &table));
                let kept = kept.into_iter().map(|kept| (kept.column, kept.rows)).collect();
                self.line.send(&FromChild::CachedRows { question, kept });
            }
            Question::MeasureRates { question } => {
                let rates = measure_rates(&*self.device, &|_| ()).map(Box::new);
                self.line.send(&FromChild::Rates { question, rates });
            }
        }
    }

    fn run(&self, run: Run, rank: Result<Rank>) {
        let job = run.job;
        let monitor = self.jobs.lock().get(&job).expect("a running job has a monitor").clone();
        // A panic fails the job, not the process.
        let said = |panic: &str| format!("the join panicked on {}: {panic}", self.device.id());
        let outcome = panics::as_error(said, || self.join(run, &rank?, &monitor));
        self.jobs.lock().remove(&job);
        let (report, lost) = (monitor.report(), self.device.check().err());
        self.line.send(&FromChild::Ended { job, outcome, report, state: self.state(), lost });
    }

    fn join(&self, run: Run, rank: &Rank, monitor: &Monitor) -> Result<()> {
        let Run { job, task, member: _, device_bytes, loan } = run;
        // Created first, so that the loan goes back whatever happens.
        let lender = Box::new(JobLender { job, line: self.line.clone() });
        let borrower = Arc::new(Borrower::new(lender, self.slabs.clone(), loan));
        let find = |number: u64| -> Result<Arc<Table>> {
            let known = self.tables.lock().get(&number).cloned();
            known.unwrap_or_else(|| Err(Error::Internal(format!("a task names table {number}, which was not sent"))))
        };
        let task = task.map_tables(find)?;
        let arena = Arena::borrowed(borrower.clone()).interrupted_by(monitor.cancel().interrupt());
        let adopter = Mutex::new(Adopter::new(arena.clone()));
        let (pushes, line, slabs) = (Arc::default(), &*self.line, &*self.slabs);
        let sink = JobSink { job, pushes, line, slabs, borrower: &borrower, adopter };
        let promised = device_bytes.map(|bytes| self.promised(bytes, monitor.cancel())).transpose()?;
        run_within(promised.map(Budget::within), &*self.device, task, rank, &arena, &sink, monitor)
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

fn answer(process: &Weak<Process>, asked: &mpsc::Receiver<Question>) {
    for question in asked {
        let Some(process) = process.upgrade() else { return };
        process.answer(question);
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
                process.line.send(&FromChild::Progress { job, report });
            }
        }
        let state = process.state();
        if state != told_state {
            told_state = state;
            process.line.send(&FromChild::State(state));
        }
        drop(process);
        std::thread::sleep(PROGRESS_INTERVAL);
    }
}

/// Connection to the server.
#[derive(Debug)]
struct ServerConnection {
    sender: Arc<Sender>,
    /// Calls that wait for answers.
    waiting: Mutex<HashMap<u64, PendingReply>>,
    last_call: AtomicU64,
    is_cut: AtomicBool,
}

impl ServerConnection {
    /// Sends a message that needs no answer. If the server cannot receive the message, the process
    /// is about to end.
    fn send(&self, message: &FromChild) {
        if let Err(error) = self.sender.send(message, None) {
            tracing::debug!("a message to the server was not sent: {error}");
        }
    }

    /// Gives back `unused`, makes a request and waits for its answer.
    fn call(&self, job: u64, unused: Vec<Span>, want: HostRequest) -> Result<HostResponse> {
        let (answer, answered) = mpsc::sync_channel(1);
        self.ask(job, unused, want, PendingReply::Caller(answer))?;
        answered.recv().unwrap_or_else(|_| Err(hung_up()))
    }

    /// Makes a request whose answer goes to `waiting`.
    fn ask(&self, job: u64, unused: Vec<Span>, want: HostRequest, waiting: PendingReply) -> Result<()> {
        let call = self.last_call.fetch_add(1, Ordering::Relaxed) + 1;
        self.waiting.lock().insert(call, waiting);
        if self.is_cut.load(Ordering::Acquire) {
            self.cut();
        }
        Ok(self.sender.send(&FromChild::Call { call, job, unused, want }, None)?)
    }

    fn answered(&self, call: u64, answer: Result<HostResponse>) {
        let waiting = self.waiting.lock().remove(&call);
        if let Some(waiting) = waiting {
            waiting.answered(answer);
        }
    }

    fn cut(&self) {
        self.is_cut.store(true, Ordering::Release);
        let waiting = std::mem::take(&mut *self.waiting.lock());
        waiting.into_values().for_each(|waiting| waiting.answered(Err(hung_up())));
    }
}

fn hung_up() -> Error {
    Error::Cancelled("the server has closed the connection".into())
}

/// Receiver of an answer.
#[derive(Debug)]
enum PendingReply {
    Caller(mpsc::SyncSender<Result<HostResponse>>),
    Pushes(Arc<Pushes>),
}

impl PendingReply {
    fn answered(self, answer: Result<HostResponse>) {
        match self {
            // The caller is waiting for the answer.
            Self::Caller(caller) => drop(caller.send(answer)),
            Self::Pushes(pushes) => pushes.answered(answer.err()),
        }
    }
}

/// Batches of a job that are sent and not yet pushed.
#[derive(Debug, Default)]
struct Pushes {
    state: Mutex<PushesInFlight>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct PushesInFlight {
    count: usize,
    /// Reason why a batch was refused, which ends the job.
    refused: Option<Error>,
}

impl Pushes {
    /// Waits until another batch may be sent.
    fn begin(&self) -> Result<()> {
        let mut state = self.state.lock();
        self.changed.wait_while(&mut state, |state| state.refused.is_none() && state.count >= PUSHES_MAX);
        if let Some(refused) = &state.refused {
            return Err(refused.clone());
        }
        state.count += 1;
        Ok(())
    }

    fn answered(&self, refused: Option<Error>) {
        let mut state = self.state.lock();
        state.count -= 1;
        state.refused = state.refused.take().or(refused);
        self.changed.notify_all();
    }
}

fn unexpected(answer: &HostResponse) -> Error {
    Error::Internal(format!("the server sent {answer:?}, which answers another kind of request"))
}

/// Lends the server's memory to a job.
#[derive(Debug)]
struct JobLender {
    job: u64,
    line: Arc<ServerConnection>,
}

impl Lender for JobLender {
    fn lend(&self, len: usize, purpose: &str, unused: Vec<Span>) -> Result<Span> {
        match self.line.call(self.job, unused, HostRequest::Lend { len, purpose: purpose.into() })? {
            HostResponse::Lent(region) => Ok(region),
            other => Err(unexpected(&other)),
        }
    }

    fn reserve(&self, bytes: u64, purpose: &str, unused: Vec<Span>) -> Result<u64> {
        match self.line.call(self.job, unused, HostRequest::Reserve { bytes, purpose: purpose.into() })? {
            HostResponse::Reserved { reservation } => Ok(reservation),
            other => Err(unexpected(&other)),
        }
    }

    fn take_back(&self, unused: Vec<Span>) {
        self.line.send(&FromChild::GiveBack { job: self.job, unused });
    }

    fn release(&self, held: u64) {
        self.line.send(&FromChild::Release { reservation: held });
    }

    fn free_bytes(&self) -> u64 {
        match self.line.call(self.job, Vec::new(), HostRequest::FreeBytes) {
            Ok(HostResponse::FreeBytes(bytes)) => bytes,
            _ => 0,
        }
    }
}

impl Drop for JobLender {
    fn drop(&mut self) {
        self.line.send(&FromChild::EndLoans { job: self.job });
    }
}

/// Pushes a job's batches to the server.
struct JobSink<'a> {
    job: u64,
    pushes: Arc<Pushes>,
    line: &'a ServerConnection,
    slabs: &'a SlabViews,
    borrower: &'a Borrower,
    /// Copies columns that are in no slab.
    adopter: Mutex<Adopter>,
}

impl JobSink<'_> {
    fn send(&self, batch: RecordBatch, shared: Option<Vec<bool>>) -> Result<()> {
        // Dropped at the end, so that its pieces go back only after it was sent.
        let batch = self.adopter.lock().adopt(batch)?;
        self.pushes.begin()?;
        let parts = BatchParts::of(&batch, &|buffer| self.slabs.place_of(buffer));
        let mut places = Vec::new();
        parts.each_place(&mut |place| places.push(place));
        let (pieces, unused) = self.borrower.pieces_of(places);
        let push = HostRequest::Push { batch: parts, pieces, shared };
        self.line.ask(self.job, unused, push, PendingReply::Pushes(self.pushes.clone()))
    }
}

impl BatchSink for JobSink<'_> {
    fn push(&self, batch: RecordBatch) -> Result<()> {
        self.send(batch, None)
    }

    fn push_sharing(&self, batch: RecordBatch, shared: &[bool]) -> Result<()> {
        self.send(batch, Some(shared.to_vec()))
    }

    fn wait_for_readers(&self, since: Instant) -> Result<bool> {
        let waited_seconds = since.elapsed().as_secs_f64();
        match self.line.call(self.job, self.borrower.take_unused(), HostRequest::ReadersMayHelp { waited_seconds })? {
            HostResponse::ReadersMayHelp(may) => Ok(may),
            other => Err(unexpected(&other)),
        }
    }
}
