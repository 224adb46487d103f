//! Connection to the process of a device, and the memory that the process has borrowed.
//!
//! ```text
//!   run() ── one thread per job: pushes batches, reports progress ──────────┐
//!   rows ── one thread per probe: waits for rows of a source ────────────────┤
//!   allocation workers ── lend memory that has to be waited for ────────────┤◄── reader ◄── socket
//!   questions: cached rows, rates ──────────────────────────────────────────┘
//! ```
//!
//! The reader waits only for the process, which always reads its socket. The reader lends memory
//! that is available at once, and leaves the rest to the allocation workers. It also takes memory
//! back, in the order of the messages, and may unmap a slab for that. A process gives the pieces of
//! a batch back when the batch is sent. So the reader first hands those pieces to the job's thread,
//! with the batch.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak, mpsc};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::Trial;
use super::channel::{Receiver, Sender};
use super::child::{ChildGuard, KILLED_WAIT};
use super::messages::{BatchParts, FromChild, HostRequest, HostResponse, State, ToChild};
use super::restored::{PushSources, TableBuffers};
use crate::catalog::Table;
use crate::join::Report;
use crate::memory::{Arena, ArenaBuffer, ArenaReservation, Loans, Pin, ReservedPool, Span};
use crate::{Error, Result, panics};

/// Slabs of an arena, for processes that come and go. Each process pins its own view, so this
/// replaces the object that pins slabs.
#[derive(Debug, Default)]
pub struct SharedSlabs {
    inner: Mutex<ShownSlabs>,
}

/// Longest region that is lent if less is asked for. The process gives back what it does not use
/// with its next request, so a long region keeps nothing from the job.
const LOAN_BYTES_MAX: usize = 64 << 20;

/// Number of such regions that each rank of a gang may take of the gang's promise. A rank does not
/// see what other ranks have borrowed and do not use, so the regions are small.
const LOANS_OF_RANK: usize = 16;

/// Regions have whole pages, so that no piece at the end of a region is cut short.
const PAGE_BYTES: usize = 4 << 10;

/// Length and file of each slab, by address.
type Slabs = BTreeMap<u64, (u64, Arc<OwnedFd>)>;

#[derive(Debug, Default)]
struct ShownSlabs {
    slabs: Slabs,
    to: Vec<Weak<Link>>,
}

impl SharedSlabs {
    /// Shows a process all slabs, present and future. The process maps and pins them in the
    /// background, which may take seconds in total.
    pub(super) fn show_to(&self, link: &Arc<Link>) -> Result<()> {
        let mut shown = self.inner.lock();
        for (&address, (len, file)) in &shown.slabs {
            link.sender.send(&ToChild::Slab { address, len: *len }, Some(file.as_fd()))?;
        }
        shown.to.push(Arc::downgrade(link));
        Ok(())
    }
}

impl Pin for SharedSlabs {
    fn pin(&self, start: *mut u8, len: usize, file: Option<&Arc<OwnedFd>>) -> bool {
        let Some(file) = file else {
            tracing::warn!(
                "a slab of host memory has no file, so the processes of devices cannot join the tables in it"
            );
            return false;
        };
        let (address, len) = (start as u64, len as u64);
        let mut shown = self.inner.lock();
        let tell = |link: &Weak<Link>| {
            let Some(link) = link.upgrade() else { return false };
            // Ignore send errors; the reader reports a process that has ended.
            let _ = link.sender.send(&ToChild::Slab { address, len }, Some(file.as_fd()));
            true
        };
        shown.to.retain(tell);
        shown.slabs.insert(address, (len, file.clone()));
        true
    }

    fn unpin(&self, start: *mut u8) {
        let address = start as u64;
        // Drop the links without the lock: the last reference to a link frees its pieces, and those
        // may free a slab.
        let links: Vec<Arc<Link>>;
        {
            let mut shown = self.inner.lock();
            shown.slabs.remove(&address);
            links = shown.to.iter().filter_map(Weak::upgrade).collect();
            for link in &links {
                // The tables of this slab are gone, but the process still has them mapped.
                link.forget_gone_tables();
                let _ = link.sender.send(&ToChild::Unmapped { address }, None);
            }
        }
    }
}

/// Tables that a process knows, by address. The address is not reused while a task can name the
/// table.
pub(super) type Tables = HashMap<usize, (u64, Weak<Table>)>;

/// Receiver of an answer, and what is held until the answer.
#[derive(Debug)]
pub(super) struct Asker {
    pub(super) sender: mpsc::SyncSender<FromChild>,
    pub(super) _trial: Option<Arc<Trial>>,
}

/// Connection to a process, and the memory lent to it.
#[derive(Debug)]
pub(super) struct Link {
    pub(super) sender: Sender,
    jobs_max: usize,
    jobs: Mutex<HashMap<u64, JobChannel>>,
    /// Askers of questions without an answer, by question.
    pub(super) questions: Mutex<HashMap<u64, Asker>>,
    lent: Mutex<LentMemory>,
    pub(super) tables: Mutex<Tables>,
    /// True if the server has no more use for the process.
    pub(super) is_hung_up: AtomicBool,
    pub(super) state: Mutex<State>,
    /// Reason why the device is out of service.
    pub(super) lost: OnceLock<Error>,
}

/// Memory of the server that the process has borrowed.
#[derive(Debug, Default)]
struct LentMemory {
    loans: HashMap<u64, Loans>,
    /// Segments that each job has taken from its source and may still read, by number.
    segments: HashMap<u64, HashMap<u64, Arc<TableBuffers>>>,
    held: HashMap<u64, ArenaReservation>,
    last_held: u64,
    /// True if the process has ended, so that nothing more is lent to it.
    is_closed: bool,
}

/// Destination of a job's messages.
#[derive(Clone, Debug)]
pub(super) struct JobChannel {
    /// Arena that the job's memory comes from.
    pub(super) arena: Arena,
    /// Longest region that is lent if less is asked for.
    loan_bytes_max: usize,
    pub(super) messages: mpsc::Sender<JobEvent>,
    /// Takes calls for the next segment, if the job has a source.
    pub(super) segment_calls: Option<mpsc::Sender<u64>>,
}

impl JobChannel {
    /// Creates the channel of a rank, whose gang draws on `memory`. Also returns its other end.
    pub(super) fn new(
        arena: Arena,
        memory: &ReservedPool,
        ranks: usize,
        segment_calls: Option<mpsc::Sender<u64>>,
    ) -> (Self, mpsc::Receiver<JobEvent>) {
        let (messages, of_job) = mpsc::channel();
        let loan_bytes_max = match ranks {
            1 => LOAN_BYTES_MAX,
            _ => {
                let share = memory.promised_bytes() as usize / (ranks * LOANS_OF_RANK);
                share.clamp(PAGE_BYTES, LOAN_BYTES_MAX).next_multiple_of(PAGE_BYTES)
            }
        };
        (Self { arena, loan_bytes_max, messages, segment_calls }, of_job)
    }
}

/// Message of a job to its thread.
#[derive(Debug)]
pub(super) enum JobEvent {
    Push { call: u64, batch: BatchParts, sources: PushSources, shared: Option<Vec<bool>> },
    ReadersMayHelp { call: u64, waited: Duration },
    StopRows(Error),
    Progress(Report),
    Ended { outcome: Result<()>, report: Report },
}

/// Task for an allocation worker.
pub(super) enum AllocRequest {
    Lend {
        call: u64,
        job: u64,
        arena: Arena,
        len: usize,
        purpose: String,
    },
    Reserve {
        call: u64,
        arena: Arena,
        bytes: u64,
        purpose: String,
    },
    FreeBytes {
        call: u64,
        arena: Arena,
    },
    /// Refuses the call, because the job has no listener any more.
    Refuse {
        call: u64,
    },
}

impl AllocRequest {
    fn call(&self) -> u64 {
        match self {
            Self::Lend { call, .. }
            | Self::Reserve { call, .. }
            | Self::FreeBytes { call, .. }
            | Self::Refuse { call } => *call,
        }
    }
}

/// Keeps a job's channel open until it is dropped.
pub(super) struct JobListener<'a> {
    link: &'a Link,
    pub(super) job: u64,
    pub(super) messages: mpsc::Receiver<JobEvent>,
}

impl<'a> JobListener<'a> {
    /// Opens the channel of a job.
    ///
    /// # Errors
    /// [`Exhausted`](Error::Exhausted) if as many jobs run as the process has threads for: one more
    /// would leave none to read. [`Unavailable`](Error::Unavailable) if the device is lost.
    pub(super) fn begin(
        link: &'a Link,
        job: u64,
        channel: JobChannel,
        messages: mpsc::Receiver<JobEvent>,
    ) -> Result<Self> {
        let mut jobs = link.jobs.lock();
        if jobs.len() >= link.jobs_max {
            return Err(Error::Exhausted(format!(
                "the device runs {} jobs, which is the most; try again when one of them has ended",
                jobs.len()
            )));
        }
        jobs.insert(job, channel);
        drop(jobs);
        let listener = Self { link, job, messages };
        // A link records that the device is lost before it closes its channels.
        link.check()?;
        Ok(listener)
    }
}

impl Drop for JobListener<'_> {
    fn drop(&mut self) {
        self.link.jobs.lock().remove(&self.job);
        // The process waits for the answers to messages that arrived since.
        for said in self.messages.try_iter() {
            if let JobEvent::Push { call, .. } | JobEvent::ReadersMayHelp { call, .. } = said {
                self.link.work(AllocRequest::Refuse { call });
            }
        }
    }
}

impl Link {
    pub(super) fn new(sender: Sender, jobs_max: usize) -> Self {
        Self {
            sender,
            jobs_max,
            jobs: Mutex::default(),
            questions: Mutex::default(),
            lent: Mutex::default(),
            tables: Mutex::default(),
            is_hung_up: AtomicBool::new(false),
            state: Mutex::default(),
            lost: OnceLock::new(),
        }
    }

    pub(super) fn check(&self) -> Result<()> {
        self.lost.get().map_or(Ok(()), |lost| Err(lost.clone()))
    }

    /// Tells the process which tables are gone. Otherwise it would keep their memory.
    pub(super) fn forget_gone_tables(&self) {
        let mut gone = Vec::new();
        let mut known = self.tables.lock();
        known.retain(|_, (number, table)| {
            let is_here = table.strong_count() > 0;
            gone.extend((!is_here).then_some(*number));
            is_here
        });
        if !gone.is_empty() {
            // Ignore send errors; the reader reports a process that has ended.
            let _ = self.sender.send(&ToChild::Forget { tables: gone }, None);
        }
    }

    /// Waits until the process has ended, at most as long as the kernel may take to end it.
    pub(super) fn wait_until_lost(&self) {
        let since = Instant::now();
        while self.lost.get().is_none() && since.elapsed() < 2 * KILLED_WAIT {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Reads messages until the process ends or stalls, or its device is lost. Then closes the
    /// link.
    pub(super) fn read(&self, mut messages: Receiver, work: &mpsc::Sender<AllocRequest>, mut child: ChildGuard) {
        let lost = loop {
            match messages.receive() {
                // The process is of no more use once its device is lost.
                Ok(Some(FromChild::Ended { lost: Some(lost), .. })) => break Some(lost),
                Ok(Some(message)) => self.take(message, work),
                Ok(None) => break None,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    if let Some(stalled) = child.kill_if_stalled(messages.idle_reads()) {
                        break Some(stalled);
                    }
                }
                Err(error) => {
                    tracing::warn!(device = %child.id, "a message of the process cannot be read: {error}");
                    break None;
                }
            }
        };
        let has_ended = child.end();
        let lost = lost.unwrap_or_else(|| child.failure());
        if !has_ended {
            // Waiting jobs need not wait for the process, but its GPU may still write to borrowed
            // memory.
            tracing::error!(device = %child.id, "the process does not end; memory that it borrowed stays in use until it ends");
            self.close(lost.clone());
            child.wait();
        }
        let lent = std::mem::replace(&mut *self.lent.lock(), LentMemory { is_closed: true, ..LentMemory::default() });
        drop(lent);
        self.close(lost);
    }

    /// Reports to all jobs and questions that the device is lost.
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

    fn take(&self, message: FromChild, work: &mpsc::Sender<AllocRequest>) {
        let request = |request: AllocRequest| work.send(request).expect("allocation workers end after the reader");
        match message {
            FromChild::Opened(_) | FromChild::Heartbeat => {}
            FromChild::Call { call, job, unused, want } => {
                self.take_back(job, &unused);
                let channel = self.jobs.lock().get(&job).cloned();
                let Some(JobChannel { arena, loan_bytes_max, messages, segment_calls }) = channel else {
                    return request(AllocRequest::Refuse { call });
                };
                // A listener that is gone answers no more.
                let say = |said: JobEvent| {
                    if messages.send(said).is_err() {
                        request(AllocRequest::Refuse { call });
                    }
                };
                match want {
                    HostRequest::Lend { len, purpose } => match arena.allocate_at_once(len..=len.max(loan_bytes_max)) {
                        Some(region) => self.answer(call, self.lend(job, region).map(HostResponse::Lent)),
                        None => request(AllocRequest::Lend { call, job, arena, len, purpose }),
                    },
                    HostRequest::Reserve { bytes, purpose } => {
                        request(AllocRequest::Reserve { call, arena, bytes, purpose })
                    }
                    HostRequest::FreeBytes => request(AllocRequest::FreeBytes { call, arena }),
                    HostRequest::Push { batch, pieces, shared } => {
                        let sources = self.lent.lock().sources_of(job, &pieces);
                        say(JobEvent::Push { call, batch, sources, shared });
                    }
                    HostRequest::NextSegment => {
                        // The receiver answers all calls that reach it.
                        if segment_calls.is_none_or(|calls| calls.send(call).is_err()) {
                            request(AllocRequest::Refuse { call });
                        }
                    }
                    HostRequest::ReadersMayHelp { waited_seconds } => {
                        let waited = Duration::try_from_secs_f64(waited_seconds).unwrap_or_default();
                        say(JobEvent::ReadersMayHelp { call, waited });
                    }
                }
            }
            // Freed by the reader, so that the next request of this job or the next job finds the
            // memory free.
            FromChild::GiveBack { job, unused } => self.take_back(job, &unused),
            FromChild::EndLoans { job } => {
                let loans = self.lent.lock().loans.remove(&job);
                drop(loans);
            }
            FromChild::Release { reservation: held } => {
                let held = self.lent.lock().held.remove(&held);
                drop(held);
            }
            FromChild::DropSegment { job, segment } => {
                let dropped = self.lent.lock().segments.get_mut(&job).and_then(|taken| taken.remove(&segment));
                drop(dropped);
            }
            FromChild::StopRows { job, error } => self.tell(job, JobEvent::StopRows(error)),
            FromChild::Progress { job, report } => self.tell(job, JobEvent::Progress(report)),
            FromChild::State(state) => *self.state.lock() = state,
            FromChild::CachedRows { question, .. }
            | FromChild::Settled { question }
            | FromChild::Rates { question, .. }
            | FromChild::BytesPerSecond { question, .. }
            | FromChild::WindowChecked { question, .. } => {
                self.answered(question, message);
            }
            FromChild::Dropped { question, state } => {
                *self.state.lock() = state;
                self.answered(question, message);
            }
            FromChild::Ended { job, outcome, report, state, .. } => {
                *self.state.lock() = state;
                let segments = self.lent.lock().segments.remove(&job);
                drop(segments);
                self.tell(job, JobEvent::Ended { outcome, report });
            }
        }
    }

    /// Passes the answer to a question to the asker, which may have stopped waiting.
    fn answered(&self, question: u64, message: FromChild) {
        if let Some(asker) = self.questions.lock().remove(&question) {
            let _ = asker.sender.send(message);
        }
    }

    fn tell(&self, job: u64, said: JobEvent) {
        if let Some(channel) = self.jobs.lock().get(&job) {
            let _ = channel.messages.send(said);
        }
    }

    /// Serves a request and answers its call.
    fn work(&self, request: AllocRequest) {
        let (call, answer) = match request {
            AllocRequest::Lend { call, job, arena, len, purpose } => {
                let region = arena.allocate(len, &purpose).and_then(|region| self.lend(job, region));
                (call, region.map(HostResponse::Lent))
            }
            AllocRequest::Reserve { call, arena, bytes, purpose } => {
                let held = arena.reserve(bytes, &purpose).and_then(|reserved| {
                    let mut lent = self.lent.lock();
                    let lent = lent.open()?;
                    lent.last_held += 1;
                    lent.held.insert(lent.last_held, reserved);
                    Ok(HostResponse::Reserved { reservation: lent.last_held })
                });
                (call, held)
            }
            AllocRequest::FreeBytes { call, arena } => (call, Ok(HostResponse::FreeBytes(arena.free_bytes()))),
            AllocRequest::Refuse { call } => (call, Err(Error::Cancelled("the job no longer has a listener".into()))),
        };
        self.answer(call, answer);
    }

    /// Lends a job its first region, if promised memory is available at once.
    pub(super) fn lend_first(&self, job: u64) -> Option<Span> {
        let JobChannel { arena, loan_bytes_max, .. } = self.jobs.lock().get(&job).cloned()?;
        let region = arena.allocate_at_once(1..=loan_bytes_max)?;
        self.lend(job, region).ok()
    }

    fn lend(&self, job: u64, region: ArenaBuffer) -> Result<Span> {
        Ok(self.lent.lock().open()?.loans.entry(job).or_default().lend(region))
    }

    /// Keeps a segment's rows until the job has no more use for them.
    ///
    /// # Errors
    /// [`Cancelled`](Error::Cancelled) if the process has ended.
    pub(super) fn lend_segment(&self, job: u64, number: u64, rows: Arc<Table>) -> Result<()> {
        let rows = Arc::new(TableBuffers::new(vec![rows]));
        self.lent.lock().open()?.segments.entry(job).or_default().insert(number, rows);
        Ok(())
    }

    fn take_back(&self, job: u64, unused: &[Span]) {
        let freed = self.lent.lock().loans.get_mut(&job).map(|loans| loans.take_back(unused));
        // Freed without the lock, because a slab may be unmapped.
        drop(freed);
    }

    pub(super) fn answer(&self, call: u64, answer: Result<HostResponse>) {
        // Ignore send errors; the reader reports a process that has ended.
        let _ = self.sender.send(&ToChild::HostResponse { call, answer }, None);
    }
}

pub(super) fn work_off(link: &Weak<Link>, alloc_workers: &Mutex<mpsc::Receiver<AllocRequest>>) {
    loop {
        let request = alloc_workers.lock().recv();
        let (Ok(request), Some(link)) = (request, link.upgrade()) else { return };
        let call = request.call();
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| link.work(request))) {
            tracing::error!("lending memory panicked: {}", panics::message(&*panic));
            link.work(AllocRequest::Refuse { call });
        }
    }
}

impl LentMemory {
    /// Returns what a batch may refer to that a job has pushed: `pieces` of its loans, and segments
    /// of its source.
    fn sources_of(&mut self, job: u64, pieces: &[Span]) -> PushSources {
        PushSources {
            pieces: self.loans.get_mut(&job).map(|loans| loans.cut_out(pieces)).unwrap_or_default(),
            segments: self.segments.get(&job).map(|taken| taken.values().cloned().collect()).unwrap_or_default(),
        }
    }

    /// Returns itself for additions; an error if the process has ended.
    fn open(&mut self) -> Result<&mut Self> {
        match self.is_closed {
            true => Err(Error::Cancelled("the process has ended".into())),
            false => Ok(self),
        }
    }
}
