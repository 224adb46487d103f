//! Jobs and questions of the server to the process of a device.

use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use arrow::datatypes::SchemaRef;

use super::link::{Asker, JobChannel, JobEvent, JobListener, Link};
use super::messages::{FromChild, GangMember, HostResponse, Job, Segment, TableParts, ToChild, Work};
use super::prepared::arena_of_call;
use super::restored::{TableBuffers, restored};
use super::{Trial, spawn_in};
use crate::catalog::Table;
use crate::device::{CancelFlag, DeviceId};
use crate::human::system_words;
use crate::join::{BatchSink, GangBoard, Monitor, Rank, RowSource, or_stop};
use crate::memory::{Arena, Interrupt, ReservedPool};
use crate::{Error, Result, panics};

/// Time between two checks whether a job should stop.
pub(super) const CANCEL_INTERVAL: Duration = Duration::from_millis(5);

/// Sends jobs and questions to a process, and serves them.
#[derive(Debug)]
pub(super) struct ChildJobs {
    pub(super) id: DeviceId,
    pub(super) link: Arc<Link>,
    pub(super) arena: Arena,
    last_number: AtomicU64,
}

/// Job, as its caller sees it.
#[derive(Clone, Copy)]
pub(super) struct JobCall<'a> {
    /// Schema of the batches that the job pushes.
    pub(super) schema: &'a SchemaRef,
    /// Buffers of tables, which these batches may share.
    pub(super) buffers: &'a TableBuffers,
    pub(super) host_memory: &'a ReservedPool,
    /// Rank that the job is, in its gang.
    pub(super) rank: &'a Rank,
    /// Source of the rows that the job asks for.
    pub(super) rows: Option<&'a dyn RowSource>,
    pub(super) sink: &'a dyn BatchSink,
    pub(super) monitor: &'a Monitor,
}

impl ChildJobs {
    /// Creates jobs of a process that sees the slabs of `arena`.
    pub(super) fn new(id: DeviceId, link: Arc<Link>, arena: Arena) -> Self {
        Self { id, link, arena, last_number: AtomicU64::new(0) }
    }

    pub(super) fn check(&self) -> Result<()> {
        self.link.check()
    }

    pub(super) fn send(&self, message: &ToChild) -> Result<()> {
        self.send_with(message, None)
    }

    /// Sends a message, with a file if it has one.
    pub(super) fn send_with(&self, message: &ToChild, file: Option<BorrowedFd<'_>>) -> Result<()> {
        self.check()?;
        self.link.sender.send(message, file).map_err(|error| {
            // The reader notices the failure too, and learns how the process ended.
            self.link.wait_until_lost();
            let why = system_words(&error);
            let unheard = || Error::Unavailable(format!("the process of {} cannot be reached: {why}", self.id));
            self.check().err().unwrap_or_else(unheard)
        })
    }

    pub(super) fn number(&self) -> u64 {
        self.last_number.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Returns the number by which the process knows a table. Tells the process of a new table, and
    /// of tables that are gone.
    pub(super) fn table(&self, table: &Arc<Table>) -> Result<u64> {
        self.link.forget_gone_tables();
        let mut known = self.link.tables.lock();
        let address = Arc::as_ptr(table) as usize;
        if let Some((number, _)) = known.get(&address) {
            return Ok(*number);
        }
        let number = self.number();
        let parts = TableParts::of(number, table, &|buffer| self.arena.place_of(buffer));
        self.send(&ToChild::Table(parts))?;
        known.insert(address, (number, Arc::downgrade(table)));
        Ok(number)
    }

    /// Asks the process a question; `None` if it does not answer in time.
    pub(super) fn ask<T>(
        &self,
        wait: Duration,
        message: impl FnOnce(u64) -> ToChild,
        answer: impl Fn(FromChild) -> Option<T>,
    ) -> Option<T> {
        let (question, answered) = self.pose(message, None, None).ok()?;
        let answer = answered.recv_timeout(wait).ok().and_then(answer);
        self.link.questions.lock().remove(&question);
        answer
    }

    /// Sends a question, with a file if it has one. Returns its number, and the receiver of the
    /// answer. `trial` is held until the process has answered or ended.
    pub(super) fn pose(
        &self,
        message: impl FnOnce(u64) -> ToChild,
        file: Option<BorrowedFd<'_>>,
        trial: Option<Arc<Trial>>,
    ) -> Result<(u64, mpsc::Receiver<FromChild>)> {
        let question = self.number();
        let (sender, answered) = mpsc::sync_channel(1);
        self.link.questions.lock().insert(question, Asker { sender, _trial: trial });
        let sent = self.send_with(&message(question), file);
        sent.inspect_err(|_| drop(self.link.questions.lock().remove(&question)))?;
        Ok((question, answered))
    }

    /// Gives a job to the process, and serves the job to its end. Returns its number.
    ///
    /// # Errors
    /// The errors of the job, [`Exhausted`](Error::Exhausted) for more jobs than the device can run
    /// at a time, and [`Unavailable`](Error::Unavailable) if the device is lost. The source of rows
    /// gets the error, too.
    pub(super) fn run(&self, work: Work, call: &JobCall<'_>) -> Result<u64> {
        let number = self.number();
        match call.rows {
            Some(rows) => self.run_with_rows(number, work, rows, call)?,
            None => self.begin(number, work, None, call)?,
        }
        Ok(number)
    }

    /// Runs a job with a thread that waits for its rows. So neither the reader of the link nor the
    /// thread that pushes the job's batches waits for them, and a sink that waits holds back no
    /// rows.
    fn run_with_rows(&self, job: u64, work: Work, rows: &dyn RowSource, call: &JobCall<'_>) -> Result<()> {
        let (calls, called) = mpsc::channel();
        let cancel = call.monitor.cancel();
        std::thread::scope(|scope| {
            // The thread ends after the listener of the job. If the job fails, its error ends the
            // wait of the source. If the job succeeds, no call is left unanswered.
            or_stop(rows, || {
                let answer_calls =
                    move || called.iter().for_each(|call| self.answer_with_rows(job, call, rows, cancel));
                spawn_in(scope, format!("{}/rows", self.id), answer_calls)?;
                self.begin(job, work, Some(calls), call)
            })
        })
    }

    fn begin(
        &self,
        number: u64,
        work: Work,
        segment_calls: Option<mpsc::Sender<u64>>,
        call: &JobCall<'_>,
    ) -> Result<()> {
        let arena = arena_of_call(&self.arena, call.host_memory, call.monitor);
        let (channel, of_job) = JobChannel::new(arena, call.host_memory, call.rank.ranks(), segment_calls);
        let listener = JobListener::begin(&self.link, number, channel, of_job)?;
        let loan = self.link.lend_first(number);
        let board = call.rank.board();
        // A batch that waits for a reader must not hide that the process has ended.
        let link = self.link.clone();
        let interrupted = call.sink.interrupted_by(Interrupt::by(move || link.check()));
        let call = &JobCall { sink: interrupted.as_deref().unwrap_or(call.sink), ..*call };
        let member = board.map(|board| GangMember {
            rank: call.rank.number(),
            devices: board.devices().to_vec(),
            near: call.rank.near().clone(),
        });
        let job = ToChild::Job(Box::new(Job { number, loan, member, work }));
        self.send_with(&job, board.map(GangBoard::file))?;
        self.serve(&listener, call)
    }

    /// Answers a call with the next segment of a job's rows.
    fn answer_with_rows(&self, job: u64, call: u64, rows: &dyn RowSource, cancel: &CancelFlag) {
        let said = |panic: &str| format!("waiting for rows of a join panicked: {panic}");
        let segment = panics::as_error(said, || self.next_segment(job, rows, cancel));
        self.link.answer(call, segment.map(HostResponse::Segment));
    }

    /// Takes the next segment, and keeps its buffers while the job reads them.
    fn next_segment(&self, job: u64, rows: &dyn RowSource, cancel: &CancelFlag) -> Result<Option<Segment>> {
        let Some(table) = rows.next_segment(cancel)? else { return Ok(None) };
        let (number, segment) = if rows.is_stored() {
            let number = self.table(&table)?;
            (number, Segment::Stored(number))
        } else {
            let number = self.number();
            (number, Segment::Arriving(TableParts::of(number, &table, &|buffer| self.arena.place_of(buffer))))
        };
        self.link.lend_segment(job, number, table)?;
        Ok(Some(segment))
    }

    /// Serves the requests of a job and takes its reports, until the job ends.
    fn serve(&self, listener: &JobListener<'_>, call: &JobCall<'_>) -> Result<()> {
        let (job, JobCall { schema, buffers, rows, sink, monitor, .. }) = (listener.job, *call);
        let mut is_told_to_stop = false;
        // The process reports this call alone, and the job may have made others.
        let before = monitor.report();
        // Error of the batch that could not be pushed. Later batches may already be on their way.
        let mut refused = None;
        loop {
            if monitor.cancel().is_raised() && !is_told_to_stop {
                is_told_to_stop = true;
                self.send(&ToChild::Cancel { job })?;
            }
            match listener.messages.recv_timeout(CANCEL_INTERVAL) {
                Ok(JobEvent::Push { call, batch, sources, shared }) => {
                    let push = || {
                        restored(schema, buffers, &sources, &batch).and_then(|batch| match &shared {
                            Some(shared) => sink.push_sharing(batch, shared),
                            None => sink.push(batch),
                        })
                    };
                    if refused.is_none() {
                        // The job gets an answer, even if the push panics here.
                        let said = |panic: &str| format!("taking a batch of the result panicked: {panic}");
                        refused = panics::as_error(said, push).err();
                    }
                    let answer = refused.clone().map_or(Ok(HostResponse::Pushed), Err);
                    self.send(&ToChild::HostResponse { call, answer })?;
                }
                Ok(JobEvent::ReadersMayHelp { call, waited }) => {
                    let since = Instant::now().checked_sub(waited).unwrap_or_else(Instant::now);
                    let said = |panic: &str| format!("waiting for readers of the result panicked: {panic}");
                    let may = panics::as_error(said, || sink.wait_for_readers(since));
                    let answer = may.map(HostResponse::ReadersMayHelp);
                    self.send(&ToChild::HostResponse { call, answer })?;
                }
                Ok(JobEvent::StopRows(error)) => {
                    if let Some(rows) = rows {
                        rows.stop(&error);
                    }
                }
                Ok(JobEvent::Progress(report)) => monitor.take_over(report.following(&before)),
                Ok(JobEvent::Ended { outcome, report }) => {
                    monitor.take_over(report.following(&before));
                    return refused.map_or(outcome, Err);
                }
                Err(mpsc::RecvTimeoutError::Timeout) => {}
                Err(mpsc::RecvTimeoutError::Disconnected) => {
                    self.check()?;
                    return Err(Error::Internal(format!("the reader of the process of {} has ended", self.id)));
                }
            }
        }
    }
}
