//! DoExchange: joins a table with rows that the client sends in the call, while they arrive.
//!
//! ```text
//!   client ─► schema + command ─► submit, with a feed
//!             batches ─► decoder ─► arena ─► feed ─► turns of the job ─► result ─► client
//!             end ─────────────────► end of rows ──► rows that the kind keeps ─┘
//! ```
//!
//! Both directions hold each other back. The server reads the next batch when the job has room for
//! it, and the job takes the next rows when its result has room. A client that goes away cancels
//! its job. A batch that cannot be read fails the job, and with it the call.
//!
//! A batch with `app_metadata` is answered: after the last of its rows, and of all rows sent before
//! it, comes a batch without rows that has the same `app_metadata`. So a client can send a question
//! and wait for its answer. Batches without it may be joined together. Some libraries repeat the
//! `app_metadata` of a batch in the messages of its schema and its dictionaries. That means nothing
//! more.

use std::sync::Arc;

use arrow::datatypes::SchemaRef;
use arrow_flight::FlightDescriptor;
use arrow_flight::flight_descriptor::DescriptorType;
use bytes::Bytes;
use futures::Stream;
use tonic::body::Body;

use super::answer_memory::Answer;
use super::commands::{self, JoinCommand};
use super::get_data;
use super::get_info::{self, Asker};
use super::ingest::{Content, Source, Wire};
use super::shared::Shared;
use crate::catalog::Table;
use crate::columns::fixed_width;
use crate::human::asked;
use crate::memory::Interrupt;
use crate::planner::{self, BoundJoin, Input, JoinSpec, Side};
use crate::scheduler::{Job, JobId, TURN_ROWS};
use crate::{Context, Error, Result};

/// Assumed bytes of a value of variable length, for the plan.
const VARIABLE_BYTES: u64 = 16;

/// Memory of the piece of the rows that is being copied, in bytes: about a frame of HTTP/2.
const PIECE_BYTES: u64 = 1 << 20;

/// Header of the answer that has the number of the job.
pub const JOB_HEADER: &str = "dovetail-job";

/// Runs a join of a table with the rows in `request`. Returns its number, and the messages of its
/// result.
///
/// # Errors
/// Faults of the command and of the first messages, and refusals of the scheduler.
pub async fn join(
    shared: &Arc<Shared>,
    asker: Asker,
    request: Body,
) -> Result<(JobId, impl Stream<Item = Result<Answer>> + use<>)> {
    asker.memory.hold(PIECE_BYTES, "the stream of rows")?;
    let (arena, limits) = (shared.catalog.arena().clone(), shared.limits.of_uploads());
    let bounds = asker.memory.bounds().clone();
    let worker = shared.worker(&asker.caller);
    let mut rows = Wire::with_pauses(request, arena, limits, worker.cpu_work().clone(), bounds);
    let Begun { descriptor, schema, note } = begin(&mut rows).await?;
    let (record, memory, of_feeder) = (asker.record.clone(), asker.memory.clone(), shared.clone());
    // If the call ends meanwhile, the feeder is dropped, which cancels its job.
    let submitted = worker.work(move |shared, interrupt| {
        let job = submit(shared, &asker, &descriptor, schema, interrupt)?;
        Ok(Feeder { shared: of_feeder, job, has_ended: false })
    });
    let feeder = submitted.await?;
    let (id, result) = (feeder.job.id, get_data::of_job(shared, &worker, &feeder.job, record, &memory));
    tokio::spawn(feeder.feed(rows, note));
    Ok((id, result.await?))
}

/// Plans and queues the join of a command.
fn submit(
    shared: &Shared,
    asker: &Asker,
    descriptor: &FlightDescriptor,
    schema: SchemaRef,
    interrupt: &Interrupt,
) -> Result<Arc<Job>> {
    if descriptor.r#type != DescriptorType::Cmd as i32 {
        return Err(Error::Invalid(
            "DoExchange takes a join command, and the descriptor has none; upload rows with DoPut".into(),
        ));
    }
    let command = commands::decode(&descriptor.cmd, &shared.sessions.defaults(asker.session))?;
    let in_words = command.to_string();
    asker.record.set_command(&in_words);
    let JoinCommand { mut spec, mut options } = command;
    let Some(streamed) = options.streamed else {
        return Err(Error::Invalid(
            "the join command does not say which side arrives in the call; write \"stream\": \"right\" or \"left\", or send it \
             to GetFlightInfo to join two tables"
                .into(),
        ));
    };
    let refused = [
        (options.into.is_some(), "\"into\": the result goes to the client as it is made"),
        (spec.count, "\"count\": rows are not counted while they arrive"),
        (options.retain_seconds.is_some_and(|seconds| seconds > 0), "\"retain_seconds\": the result is not kept"),
    ];
    if let Some((_, what)) = refused.iter().find(|(is_set, _)| *is_set) {
        return Err(Error::Unsupported(format!("a join with \"stream\" takes no {what}; leave it out")));
    }
    options.retain_seconds = Some(0);
    let input = streamed_input(&mut spec, streamed);
    *input = rows_to_arrive(input.name(), schema).into();
    let in_words = format!("{in_words}, {streamed} side streamed");
    get_info::submit_join(shared, asker, &in_words, JoinCommand { spec, options }, interrupt)
}

fn streamed_input(spec: &mut JoinSpec, streamed: Side) -> &mut Input {
    match streamed {
        Side::Left => &mut spec.left,
        Side::Right => &mut spec.right,
    }
}

/// Returns a table that stands for rows with these columns that arrive.
fn rows_to_arrive(name: &str, schema: SchemaRef) -> Arc<Table> {
    let row_bytes = schema
        .fields()
        .iter()
        .map(|field| fixed_width(field.data_type()).map_or(VARIABLE_BYTES, |width| width.bytes() as u64));
    let row_bytes = row_bytes.sum();
    Arc::new(Table::to_arrive(name, schema, TURN_ROWS, row_bytes))
}

/// Binds a join that is explained without rows. If one side is to arrive, its columns are those of
/// the table with its name.
///
/// # Errors
/// The errors of binding; [`Error::NotFound`] without such a table.
pub fn bind_to_explain(shared: &Shared, command: &JoinCommand, interrupt: &Interrupt) -> Result<BoundJoin> {
    let JoinCommand { spec, options } = command;
    let Some(streamed) = options.streamed else {
        return planner::bind_interruptible(spec, &shared.catalog, interrupt);
    };
    let mut spec = spec.clone();
    let input = streamed_input(&mut spec, streamed);
    let like = shared.catalog.table(input.name()).context(|| {
        "an explanation of rows that arrive takes their columns from the table of that name; upload one, or explain the \
         job of a stream with {\"job\": N}"
    })?;
    *input = rows_to_arrive(input.name(), like.schema.clone()).into();
    planner::bind_interruptible(&spec, &shared.catalog, interrupt)
}

/// Content of the first messages of a call.
struct Begun {
    descriptor: FlightDescriptor,
    schema: SchemaRef,
    /// Note of the schema's message, which the first batch must repeat.
    note: Option<Bytes>,
}

/// Reads messages up to the schema.
async fn begin(rows: &mut Wire) -> Result<Begun> {
    let mut descriptor = None;
    while let Some(message) = rows.next().await? {
        descriptor = descriptor.or(message.descriptor);
        let note = Some(message.app_metadata).filter(|note| !note.is_empty());
        if let Content::Schema(schema) = message.content {
            let missing = || Error::Invalid("the first message has no flight descriptor, which has the command".into());
            return Ok(Begun { descriptor: descriptor.ok_or_else(missing)?, schema, note });
        }
        if note.is_some() {
            return Err(misplaced_note());
        }
    }
    Err(Error::Invalid("the call ended before the schema of its rows arrived".into()))
}

fn misplaced_note() -> Error {
    Error::Invalid(
        "a message without a batch has app_metadata, which comes back after the rows of a batch, and the next batch does not \
         repeat it; send it with a batch, which may be empty"
            .into(),
    )
}

/// Job whose rows arrive. If this is dropped before the end of the rows, the job is cancelled.
struct Feeder {
    shared: Arc<Shared>,
    job: Arc<Job>,
    has_ended: bool,
}

impl Feeder {
    /// Gives all rows to the job, until the client ends them or the job ends. `note` is that of the
    /// schema's message.
    async fn feed(mut self, mut rows: Wire, note: Option<Bytes>) {
        let job = self.job.clone();
        let fed = tokio::select! {
            fed = self.feed_all(&mut rows, note) => fed,
            () = job.ended() => Ok(()),
        };
        self.has_ended = true;
        if let Err(error) = fed {
            self.shared.scheduler.fail(&self.job, error.context(format!("the rows of {}", asked(&self.name()))));
        }
    }

    async fn feed_all(&self, rows: &mut Wire, mut announced: Option<Bytes>) -> Result<()> {
        while let Some(message) = rows.next().await? {
            let note = Some(message.app_metadata).filter(|note| !note.is_empty());
            if announced.is_some() && announced != note {
                return Err(misplaced_note());
            }
            match message.content {
                Content::Batch(batch) => {
                    announced = None;
                    self.shared.metrics.received_rows.inc_by(batch.num_rows() as u64);
                    self.shared.scheduler.feed(&self.job, batch, note).await?;
                }
                Content::Dictionary => announced = note,
                _ => note.map_or(Ok(()), |_| Err(misplaced_note()))?,
            }
        }
        announced.map_or(Ok(()), |_| Err(misplaced_note()))?;
        self.shared.scheduler.end_rows(&self.job)
    }

    fn name(&self) -> String {
        let join = &self.job.plan.join;
        self.job.options.streamed.map_or_else(String::new, |side| join.table(side).name.clone())
    }
}

impl Drop for Feeder {
    fn drop(&mut self) {
        if !self.has_ended {
            self.shared.scheduler.fail(&self.job, Error::Cancelled("the call ended before its rows did".into()));
        }
    }
}
