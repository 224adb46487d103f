//! DoGet: the rows of a ticket.
//!
//! A table's batches are available at once. A result's batches may still be missing, and the stream
//! waits for them. While the stream waits, it sends empty batches: proxies cut streams that are
//! silent for long, even if HTTP/2 pings are answered.
//!
//! A reader that goes away in mid-stream cancels its job if no other client waits for it. This
//! holds for a job that still runs, unless its result becomes a table. It also holds for a job
//! whose result is consumed as it is read, because no client can then read it in whole any more.
//!
//! A complete result stays for its lease, so that a client whose connection broke can try again. A
//! job that no client has read yet runs on: its reader may come later.

use std::sync::Arc;
use std::time::Duration;

use arrow::array::{Array, AsArray, RecordBatch};
use arrow::compute::concat_batches;
use arrow::datatypes::{DataType, SchemaRef};
use futures::{FutureExt, Stream, StreamExt};
use tokio::time::timeout;

use super::answer_memory::{Answer, AnswerMemory};
use super::auth::Caller;
use super::call_memory::CallShare;
use super::call_record::CallRecord;
use super::commands;
use super::deliveries::Share;
use super::describe::JobTimes;
use super::encode::{Encoder, Message, batch_bytes, effort_bytes};
use super::readers::Left;
use super::shared::{Shared, Worker};
use super::tickets::{Target, table_version};
use super::transfers::Encoding;
use crate::catalog::{ChargeHold, NotedBatch, ResultReader, Table};
use crate::columns::any_part;
use crate::memory::{Interrupt, schema_bytes};
use crate::scheduler::{Job, JobId};
use crate::{Error, Result};

/// A batch of fewer bytes is joined with the available batches after it, so that messages have
/// about this size or more.
const JOINED_BYTES: u64 = 1 << 20;

/// Returns the messages of a ticket.
///
/// # Errors
/// As [`Tickets::open`](super::tickets::Tickets::open); [`Error::NotFound`] when the table or
/// result is gone, [`Error::Precondition`] when the table was replaced.
pub async fn read(
    shared: &Arc<Shared>,
    caller: &Caller,
    ticket: &[u8],
    record: CallRecord,
    memory: &CallShare,
) -> Result<impl Stream<Item = Result<Answer>> + use<>> {
    let target = shared.tickets.open(ticket, caller);
    let target = target.map_err(|error| commands::flight_sql_refusal(ticket).unwrap_or(error))?;
    let source = match target {
        Target::Table { name, version, first, end } => {
            record.set_command(&name);
            open_table(shared, caller, &name, version, first, end)?
        }
        Target::Result { job, part, parts } => {
            record.set_command(format!("job {job}"));
            open_result(shared, JobId(job), Share::Endpoint { part, parts })?
        }
        Target::Part { job, first, end } => {
            record.set_command(format!("job {job}"));
            open_result(shared, JobId(job), Share::Part { first, end })?
        }
        Target::Poll { job } => {
            return Err(Error::Invalid(format!(
                "this token is for polling job {job}; send it to PollFlightInfo, and the tickets of the endpoints to DoGet"
            )));
        }
    };
    memory.hold(schema_bytes(&source.schema()), "the answer")?;
    let (job, writing) = (source.job(), record.writing());
    let encoding = Encoding::default();
    let memory = AnswerMemory::new(shared, memory.clone());
    let worker = shared.worker(caller);
    let messages = messages(shared.clone(), worker, source, record, encoding.clone(), memory).await?;
    Ok(match job {
        Some(job) => shared.transfers.measure(job, writing, encoding, messages).left_stream(),
        None => messages.right_stream(),
    })
}

/// Returns the messages of the whole result of a job. If they are dropped before the end, a job
/// whose result is consumed as it is read is cancelled, as by a reader of its ticket.
///
/// # Errors
/// [`Error::NotFound`] for a job that is forgotten, [`Error::Exhausted`] when the memory of calls
/// has no room for the schema.
pub fn of_job(
    shared: &Arc<Shared>,
    worker: &Worker,
    job: &Arc<Job>,
    record: CallRecord,
    memory: &CallShare,
) -> impl Future<Output = Result<impl Stream<Item = Result<Answer>> + use<>>> + use<> {
    let (shared, worker, id) = (shared.clone(), worker.clone(), job.id);
    let source = memory
        .hold(schema_bytes(job.result.schema()), "the answer")
        .and_then(|()| open_result(&shared, id, Share::Endpoint { part: 0, parts: 1 }));
    let memory = AnswerMemory::new(&shared, memory.clone());
    async move {
        let writing = record.writing();
        let encoding = Encoding::default();
        let messages = messages(shared.clone(), worker, source?, record, encoding.clone(), memory).await?;
        Ok(shared.transfers.measure(id, writing, encoding, messages))
    }
}

enum Source {
    Table { table: Arc<Table>, next: usize, end: usize, _held: Vec<ChargeHold> },
    Result { job: Arc<Job>, rows: ResultReader, leaving: Reader, delivery: Delivery },
}

impl Source {
    fn job(&self) -> Option<JobId> {
        match self {
            Self::Table { .. } => None,
            Self::Result { job, .. } => Some(job.id),
        }
    }

    fn schema(&self) -> SchemaRef {
        match self {
            Self::Table { table, .. } => table.schema.clone(),
            Self::Result { job, .. } => job.result.schema().clone(),
        }
    }

    /// Returns the maximum number of rows of a message that the join's `batch_rows` sets.
    fn batch_rows_max(&self) -> usize {
        match self {
            Self::Table { .. } => usize::MAX,
            Self::Result { job, .. } => job.plan.join.batch_rows.unwrap_or(usize::MAX),
        }
    }

    /// Returns the next batch; `None` at the end. A batch with a note has no rows.
    async fn next(&mut self) -> Result<Option<NotedBatch>> {
        match self {
            Self::Table { table, next, end, .. } => {
                let index = *next;
                *next += 1;
                Ok((index < *end).then(|| (table.batches[index].clone(), None)))
            }
            Self::Result { rows, leaving, delivery, .. } => {
                // A join whose rows arrive may have waited for this room.
                rows.was_sent();
                delivery.shared.scheduler.resume(&delivery.job);
                let batch = rows.next_noted().await;
                if matches!(batch, Ok(None) | Err(_)) {
                    delivery.has_ended = true;
                    leaving.has_finished = true;
                }
                batch
            }
        }
    }
}

fn open_table(shared: &Shared, caller: &Caller, name: &str, version: u64, first: usize, end: usize) -> Result<Source> {
    let table = shared.catalog.table(name)?;
    if table_version(table.created) != version || end > table.batches.len() {
        return Err(Error::Precondition(format!(
            "table {name:?} was replaced or appended to since this ticket was made; call GetFlightInfo again"
        )));
    }
    let _held = table.hold(&caller.tenant);
    Ok(Source::Table { table, next: first, end, _held })
}

fn open_result(shared: &Arc<Shared>, id: JobId, share: Share) -> Result<Source> {
    let job = shared.scheduler.job(id)?;
    let rows = match share {
        Share::Endpoint { part, parts } => job.result.reader(part, parts),
        Share::Part { first, end } => job.result.part_reader(first..end),
    };
    let leaving = Reader::new(shared, job.clone());
    let delivery = Delivery { shared: shared.clone(), job: job.clone(), share, has_ended: false };
    Ok(Source::Result { rows, job, leaving, delivery })
}

/// Records that an endpoint was read to its end. It does so when the stream is dropped, because the
/// last messages are sent by then.
struct Delivery {
    shared: Arc<Shared>,
    job: Arc<Job>,
    share: Share,
    has_ended: bool,
}

impl Drop for Delivery {
    fn drop(&mut self) {
        if self.has_ended && self.shared.deliveries.read(&self.job, self.share) {
            self.job.result.was_read();
        }
    }
}

/// Reader of a result. If the last reader leaves before the end, the job is cancelled, unless it is
/// still wanted.
struct Reader {
    shared: Arc<Shared>,
    job: Arc<Job>,
    has_finished: bool,
}

impl Reader {
    fn new(shared: &Arc<Shared>, job: Arc<Job>) -> Self {
        shared.readers.enter(job.id);
        Self { shared: shared.clone(), job, has_finished: false }
    }

    /// True if the job is of no use without this reader.
    fn takes_job_along(&self, left: Left) -> bool {
        let is_consumed = self.job.result.is_consumed_by_reading();
        let is_wanted = || self.job.options.into.is_some() || self.job.state().is_final();
        match left {
            Left::Streams => false,
            // Rows that this reader took are gone, so a polling client cannot read the whole result
            // any more.
            Left::Poller => is_consumed,
            Left::Nobody => is_consumed || !is_wanted(),
        }
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        let left = self.shared.readers.leave(self.job.id);
        if self.has_finished || !self.takes_job_along(left) {
            return;
        }
        // A job that is gone already needs no cancelling. A job that completes at this moment is
        // released: its only reader left while it ran.
        if self.shared.scheduler.cancel(self.job.id).is_ok() {
            tracing::info!(job = self.job.id.0, "the last reader left before the end, so the job is cancelled");
        }
    }
}

async fn messages(
    shared: Arc<Shared>,
    worker: Worker,
    source: Source,
    record: CallRecord,
    encoding: Encoding,
    memory: AnswerMemory,
) -> Result<impl Stream<Item = Result<Answer>> + use<>> {
    let schema = source.schema();
    let (encoder, schema) = worker.work_on(schema.fields().len(), move |_| Encoder::new(schema)).await?;
    let (encoder, schema) = (Some(encoder), Some(memory.counted(schema)?));
    let state = State { shared, worker, source, encoder, schema, ahead: None, record, encoding, memory };
    Ok(futures::stream::try_unfold(state, |mut state| async move {
        Ok(state.next_message().await?.map(|answer| (answer, state)))
    }))
}

struct State {
    shared: Arc<Shared>,
    worker: Worker,
    source: Source,
    /// `None` while it works on a thread of its own, and after an error.
    encoder: Option<Encoder>,
    /// Schema message, until it is sent.
    schema: Option<Answer>,
    /// Batch that was taken from the source and could not be joined with the batches before it.
    ahead: Option<NotedBatch>,
    record: CallRecord,
    encoding: Encoding,
    memory: AnswerMemory,
}

impl State {
    /// Returns the next message; `None` at the end. Messages are encoded one at a time, when the
    /// client is ready for them. So a large batch delays no other call, and its remaining rows wait
    /// unencoded.
    async fn next_message(&mut self) -> Result<Option<Answer>> {
        if let Some(schema) = self.schema.take() {
            return Ok(Some(schema));
        }
        loop {
            if let Some(effort) = self.encoder.as_ref().and_then(Encoder::next_effort_bytes)
                && let Some(message) = self.encode(effort, Encoder::next_message).await?
            {
                return Ok(Some(message));
            }
            let keep_alive: Duration = self.shared.limits.keep_alive;
            let first = match self.ahead.take() {
                Some(batch) => Ok(Ok(Some(batch))),
                None => timeout(keep_alive, self.source.next()).await,
            };
            match first {
                Ok(Ok(Some((_, Some(note))))) => {
                    let noted = |encoder: &mut Encoder| Ok(Some(encoder.keep_alive()?.with_app_metadata(note)));
                    return self.encode(0, noted).await;
                }
                Ok(Ok(Some((batch, None)))) => {
                    let batch = self.join_small(batch)?;
                    let (rows, effort) = (batch.num_rows() as u64, effort_bytes(&batch));
                    self.record.add_rows(rows);
                    self.shared.metrics.sent_rows.inc_by(rows);
                    let begun = move |encoder: &mut Encoder| {
                        encoder.begin(batch);
                        encoder.next_message()
                    };
                    if let Some(message) = self.encode(effort, begun).await? {
                        return Ok(Some(message));
                    }
                }
                Ok(Ok(None)) => {
                    self.record_job_times();
                    return Ok(None);
                }
                Ok(Err(error)) => {
                    self.record_job_times();
                    return Err(error);
                }
                // The batch of this message has no rows, and few bytes.
                Err(_) => return self.encode(0, |encoder| encoder.keep_alive().map(Some)).await,
            }
        }
    }

    /// Lets the encoder work when there is room for a message, on a thread of its own if that may
    /// take long.
    async fn encode<W>(&mut self, effort_bytes: usize, work: W) -> Result<Option<Answer>>
    where
        W: FnOnce(&mut Encoder) -> Result<Option<Message>> + Send + 'static,
    {
        let room = self.memory.room().await?;
        let mut encoder = self.encoder.take().ok_or_else(failed_before)?;
        let worked = move |_: &Interrupt| {
            let message = work(&mut encoder)?.map(|message| room.counted(message)).transpose()?;
            Ok((encoder, message))
        };
        self.encoding.set(true);
        let encoded = self.worker.work_on_bytes(effort_bytes, worked).await;
        self.encoding.set(false);
        let (encoder, message) = encoded?;
        self.encoder = Some(encoder);
        Ok(message)
    }

    fn record_job_times(&self) {
        if let Source::Result { job, .. } = &self.source {
            self.record.set_job_times(JobTimes::of(job.submitted, &job.status()));
        }
    }

    /// Joins a small batch with those after it that are already available, so that many small
    /// batches do not become as many messages.
    fn join_small(&mut self, first: RecordBatch) -> Result<RecordBatch> {
        let mut bytes = batch_bytes(&first);
        if bytes >= JOINED_BYTES {
            return Ok(first);
        }
        let mut small = vec![first];
        // If the source must wait or fails, the next call sees it: polling the source here loses
        // nothing.
        let mut rows = small[0].num_rows();
        while let Some(Ok(Some((batch, note)))) = self.source.next().now_or_never() {
            bytes += batch_bytes(&batch);
            rows += batch.num_rows();
            let is_large = bytes > 2 * JOINED_BYTES || rows > self.source.batch_rows_max();
            if is_large || note.is_some() || !may_join(&small[0], &batch) {
                self.ahead = Some((batch, note));
                break;
            }
            small.push(batch);
            if bytes >= JOINED_BYTES {
                break;
            }
        }
        match small.len() {
            1 => Ok(small.remove(0)),
            _ => Ok(concat_batches(small[0].schema_ref(), &small)?),
        }
    }
}

fn failed_before() -> Error {
    Error::Internal("a stream went on after an error".into())
}

/// True if batches can be joined without touching dictionaries.
fn may_join(one: &RecordBatch, other: &RecordBatch) -> bool {
    let same_dictionary = |(one, other): (&Arc<dyn Array>, &Arc<dyn Array>)| match (
        one.as_any_dictionary_opt(),
        other.as_any_dictionary_opt(),
    ) {
        (Some(one), Some(other)) => one.values().to_data().ptr_eq(&other.values().to_data()),
        // Nested dictionaries are not compared. The ends of runs may have 16 bits, which are too
        // few for the rows of several batches.
        _ => !any_part(one.data_type(), &|part| matches!(part, DataType::Dictionary(..) | DataType::RunEndEncoded(..))),
    };
    one.columns().iter().zip(other.columns()).all(same_dictionary)
}
