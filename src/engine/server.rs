//! Server, as the process of a device sees it: it takes reports and batches, lends memory, and
//! gives rows.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Instant;

use arrow::array::RecordBatch;
use parking_lot::{Condvar, Mutex};

use super::channel::Sender;
use super::messages::{BatchParts, FromChild, HostRequest, HostResponse, Segment};
use crate::catalog::{Adopter, Table};
use crate::device::CancelFlag;
use crate::join::{BatchSink, RowSource};
use crate::memory::{Arena, Borrower, Lender, SlabViews, Span};
use crate::{Error, Result};

/// Most batches of a job that are sent and not yet pushed. A device's streams together make a few
/// less at a time.
const PUSHES_MAX: usize = 8;

/// Connection of this process to the server.
#[derive(Debug)]
pub(super) struct Server {
    sender: Arc<Sender>,
    /// Calls that wait for answers.
    waiting: Mutex<HashMap<u64, PendingReply>>,
    last_call: AtomicU64,
    is_cut: AtomicBool,
}

impl Server {
    pub(super) fn new(sender: Arc<Sender>) -> Self {
        Self { sender, waiting: Mutex::default(), last_call: AtomicU64::new(0), is_cut: AtomicBool::new(false) }
    }

    /// Sends a message that needs no answer. If the server cannot receive the message, the process
    /// is about to end.
    pub(super) fn send(&self, message: &FromChild) {
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

    pub(super) fn answered(&self, call: u64, answer: Result<HostResponse>) {
        let waiting = self.waiting.lock().remove(&call);
        if let Some(waiting) = waiting {
            waiting.answered(answer);
        }
    }

    pub(super) fn cut(&self) {
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
pub(super) struct JobLender {
    pub(super) job: u64,
    pub(super) server: Arc<Server>,
}

impl Lender for JobLender {
    fn lend(&self, len: usize, purpose: &str, unused: Vec<Span>) -> Result<Span> {
        match self.server.call(self.job, unused, HostRequest::Lend { len, purpose: purpose.into() })? {
            HostResponse::Lent(region) => Ok(region),
            other => Err(unexpected(&other)),
        }
    }

    fn reserve(&self, bytes: u64, purpose: &str, unused: Vec<Span>) -> Result<u64> {
        match self.server.call(self.job, unused, HostRequest::Reserve { bytes, purpose: purpose.into() })? {
            HostResponse::Reserved { reservation } => Ok(reservation),
            other => Err(unexpected(&other)),
        }
    }

    fn take_back(&self, unused: Vec<Span>) {
        self.server.send(&FromChild::GiveBack { job: self.job, unused });
    }

    fn release(&self, held: u64) {
        self.server.send(&FromChild::Release { reservation: held });
    }

    fn free_bytes(&self) -> u64 {
        match self.server.call(self.job, Vec::new(), HostRequest::FreeBytes) {
            Ok(HostResponse::FreeBytes(bytes)) => bytes,
            _ => 0,
        }
    }
}

impl Drop for JobLender {
    fn drop(&mut self) {
        self.server.send(&FromChild::EndLoans { job: self.job });
    }
}

/// Pushes a job's batches to the server.
pub(super) struct JobSink<'a> {
    job: u64,
    pushes: Arc<Pushes>,
    server: &'a Server,
    slabs: &'a SlabViews,
    borrower: &'a Borrower,
    /// Copies columns that are in no slab.
    adopter: Mutex<Adopter>,
}

impl<'a> JobSink<'a> {
    /// Creates the sink of a job whose memory comes from `arena`, by `borrower`.
    pub(super) fn new(
        job: u64,
        server: &'a Server,
        slabs: &'a SlabViews,
        borrower: &'a Borrower,
        arena: Arena,
    ) -> Self {
        Self { job, pushes: Arc::default(), server, slabs, borrower, adopter: Mutex::new(Adopter::new(arena)) }
    }

    fn send(&self, batch: RecordBatch, shared: Option<Vec<bool>>) -> Result<()> {
        // Dropped at the end, so that its pieces go back only after it was sent.
        let batch = self.adopter.lock().adopt(batch)?;
        self.pushes.begin()?;
        let parts = BatchParts::of(&batch, &|buffer| self.slabs.place_of(buffer));
        let mut places = Vec::new();
        parts.each_place(&mut |place| places.push(place));
        let (pieces, unused) = self.borrower.pieces_of(places);
        let push = HostRequest::Push { batch: parts, pieces, shared };
        self.server.ask(self.job, unused, push, PendingReply::Pushes(self.pushes.clone()))
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
        match self.server.call(self.job, self.borrower.take_unused(), HostRequest::ReadersMayHelp { waited_seconds })? {
            HostResponse::ReadersMayHelp(may) => Ok(may),
            other => Err(unexpected(&other)),
        }
    }
}

/// Rows of a job's source, which is in the server.
pub(super) struct ServerRows<'a> {
    pub(super) job: u64,
    pub(super) server: &'a Arc<Server>,
    pub(super) slabs: &'a SlabViews,
    /// Finds a table by its number.
    pub(super) stored: &'a (dyn Fn(u64) -> Result<Arc<Table>> + Sync),
    pub(super) total_rows: Option<u64>,
    pub(super) is_stored: bool,
    pub(super) is_numbered: bool,
}

impl RowSource for ServerRows<'_> {
    fn total_rows(&self) -> Option<u64> {
        self.total_rows
    }

    fn is_stored(&self) -> bool {
        self.is_stored
    }

    fn is_numbered(&self) -> bool {
        self.is_numbered
    }

    /// Waits for the server's answer, which comes soon after the job is cancelled or the source is
    /// stopped there.
    fn next_segment(&self, cancel: &CancelFlag) -> Result<Option<Arc<Table>>> {
        cancel.check()?;
        let parts = match self.server.call(self.job, Vec::new(), HostRequest::NextSegment)? {
            HostResponse::Segment(None) => return Ok(None),
            HostResponse::Segment(Some(Segment::Stored(number))) => return (self.stored)(number).map(Some),
            HostResponse::Segment(Some(Segment::Arriving(parts))) => parts,
            other => return Err(unexpected(&other)),
        };
        let (job, segment, server) = (self.job, parts.number, self.server.clone());
        let kept = Arc::new(KeptSegment { job, segment, server });
        Ok(Some(Arc::new(parts.restore(&|place| self.slabs.buffer_with(place, kept.clone()))?)))
    }

    fn stop(&self, error: &Error) {
        self.server.send(&FromChild::StopRows { job: self.job, error: error.clone() });
    }
}

/// Keeps a segment in the server's memory while this process has buffers of it.
struct KeptSegment {
    job: u64,
    segment: u64,
    server: Arc<Server>,
}

impl Drop for KeptSegment {
    fn drop(&mut self) {
        self.server.send(&FromChild::DropSegment { job: self.job, segment: self.segment });
    }
}
