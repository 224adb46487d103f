//! GetFlightInfo, PollFlightInfo, GetSchema and ListFlights: endpoints of data, and progress of
//! jobs.
//!
//! ```text
//!   path ["orders"]  ─► the table: endpoints are contiguous ranges of its batches, in order
//!   a join command   ─► submit the job
//!                       GetFlightInfo: endpoint i of n serves batches i, i+n, ... as they are made
//!                       PollFlightInfo: an endpoint for each whole part, more with every poll
//!   a poll token     ─► the job that an earlier PollFlightInfo or ListFlights named
//! ```
//!
//! GetFlightInfo returns at once, with all endpoints: it is DoGet that waits for rows.
//! PollFlightInfo lists endpoints that can be read without waiting: ranges of complete batches
//! (`catalog/result/parts.rs`), about 32 MiB or more. Every answer begins with the endpoints of the
//! answer before, in the order in which they became whole. The last answer has all endpoints.
//!
//! The exception is a result that is consumed as it is read (`retain_seconds` 0). Its readers share
//! the rows, and the join may wait for them. So its endpoints are listed from the start, and each
//! is a stream that ends when the join ends.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use arrow::datatypes::SchemaRef;
use arrow::ipc::writer::IpcWriteOptions;
use arrow_flight::flight_descriptor::DescriptorType;
use arrow_flight::{
    FlightDescriptor, FlightEndpoint, FlightInfo, Location, PollInfo, SchemaAsIpc, SchemaResult, Ticket,
};
use bytes::Bytes;
use futures::{Stream, StreamExt, future, stream};
use http::{Extensions, HeaderMap};
use prost_types::Timestamp;
use uuid::Uuid;

use super::auth::{Caller, Role};
use super::call_memory::{CallShare, LISTED_BYTES};
use super::call_record::CallRecord;
use super::commands::{self, JoinCommand};
use super::describe;
use super::incoming::ConnectionInfo;
use super::shared::Shared;
use super::tickets::{Target, Tickets, table_version};
use crate::catalog::{Editor, SpoolState, Table};
use crate::human;
use crate::memory::{Interrupt, schema_bytes};
use crate::planner::{self, BoundJoin, JoinSpec};
use crate::scheduler::{Job, JobId, JobState, Submission, no_job};
use crate::{Context, Error, Result};

/// Longest time that a poll waits for another part or the end of its job before it answers. It is
/// short enough for a progress bar.
const POLL_WAIT: Duration = Duration::from_millis(250);

/// Purpose of the memory of an answer, for errors.
const ANSWER: &str = "the answer";

/// Object that a descriptor names.
enum Asked {
    Table(Arc<Table>),
    Command(Bytes),
    Job(Arc<Job>),
}

/// Caller of an RPC, with its session and its access record.
#[derive(Clone, Debug)]
pub struct Asker {
    pub caller: Caller,
    pub session: Option<Uuid>,
    /// Number of the call's connection, if it came over one.
    pub connection: Option<u64>,
    pub record: CallRecord,
    pub memory: CallShare,
}

/// Returns the error of a call without a caller. The layer around every call sets the caller, and
/// no call may proceed without one.
pub(super) fn not_identified() -> Error {
    Error::Internal("the call reached the service without passing authentication".into())
}

impl Asker {
    /// Returns the caller of a call with these headers, as earlier layers have identified it.
    ///
    /// # Errors
    /// [`Error::Internal`] without such a layer.
    pub fn of(shared: &Shared, headers: &HeaderMap, extensions: &Extensions) -> Result<Self> {
        let caller = extensions.get::<Caller>().cloned().ok_or_else(not_identified)?;
        let session = shared.sessions.find(headers, &caller);
        let connection = extensions.get::<ConnectionInfo>().map(|info| info.number);
        let record = extensions.get::<CallRecord>().cloned().unwrap_or_default();
        let memory = extensions.get::<CallShare>().cloned().ok_or_else(not_identified)?;
        Ok(Self { caller, session, connection, record, memory })
    }

    /// Takes the memory of an answer with that schema, until the end of the call.
    fn hold_answer(&self, schema: &SchemaRef) -> Result<()> {
        self.memory.hold(schema_bytes(schema), ANSWER)
    }

    /// Notes that the call only asks for the progress of a job.
    pub fn polls(&self, shared: &Shared, job: JobId) {
        shared.readers.polled(job);
        self.record.set_poll();
    }
}

/// Returns the endpoints of a table's or a join's rows. Submits the join.
///
/// # Errors
/// Faults of the descriptor, and refusals of the scheduler.
pub async fn flight_info(shared: &Arc<Shared>, asker: Asker, descriptor: FlightDescriptor) -> Result<FlightInfo> {
    let worker = shared.worker(&asker.caller);
    let info = match asked(shared, &asker, &descriptor)? {
        Asked::Table(table) => {
            asker.hold_answer(&table.schema)?;
            let columns = columns_of(&table.schema);
            return worker.work_on(columns, move |shared| Ok(table_info(shared, &asker, &table))).await;
        }
        Asked::Command(command) => {
            let submit_and_tell = move |shared: &Shared, interrupt: &Interrupt| {
                let job = submit(shared, &asker, &command, interrupt)?;
                asker.hold_answer(&job.plan.join.schema)?;
                job_info(shared, &asker.caller, &job, Listing::All)
            };
            worker.work(submit_and_tell).await?
        }
        Asked::Job(job) => {
            asker.hold_answer(&job.plan.join.schema)?;
            let columns = columns_of(&job.plan.join.schema);
            worker.work_on(columns, move |shared| job_info(shared, &asker.caller, &job, Listing::All)).await?
        }
    };
    Ok(info.with_descriptor(descriptor))
}

/// Returns the effort of writing a schema, in columns. Metadata counts like columns.
fn columns_of(schema: &SchemaRef) -> usize {
    /// Size of a column that takes as long as this many bytes of metadata.
    const COLUMN_BYTES: usize = 256;
    let fields = schema.flattened_fields();
    let all = fields.iter().map(|field| field.metadata()).chain([schema.metadata()]);
    let bytes = all.flatten().map(|(key, value)| key.len() + value.len()).sum::<usize>();
    fields.len() + bytes / COLUMN_BYTES
}

/// Returns the progress of a join, and the endpoints that can be read. A command submits the join
/// and returns at once. The descriptor of the returned poll info is for the next poll, which waits
/// a little for another part or for the end. The flight info inside has the same descriptor. With
/// it, GetFlightInfo returns all endpoints, and CancelFlightInfo finds the job even if no endpoint
/// is listed yet.
///
/// # Errors
/// As [`flight_info`]; the job's own error once it has failed.
pub async fn poll(shared: &Arc<Shared>, asker: Asker, descriptor: FlightDescriptor) -> Result<PollInfo> {
    let worker = shared.worker(&asker.caller);
    let job = match asked(shared, &asker, &descriptor)? {
        Asked::Table(table) => {
            asker.hold_answer(&table.schema)?;
            let columns = columns_of(&table.schema);
            let info = worker.work_on(columns, move |shared| Ok(table_info(shared, &asker, &table))).await?;
            return Ok(PollInfo::new().with_info(info).try_with_progress(1.0)?);
        }
        Asked::Command(command) => {
            let asker = asker.clone();
            let submitted = worker.work(move |shared, interrupt| submit(shared, &asker, &command, interrupt));
            let job = submitted.await?;
            shared.readers.polled(job.id);
            job
        }
        Asked::Job(job) => {
            asker.polls(shared, job.id);
            // A timeout is an answer as well: no further part came in time.
            let _ = tokio::time::timeout(POLL_WAIT, job.result.next_part()).await;
            job
        }
    };
    let status = job.status();
    if status.state.is_final() {
        shared.deliveries.told(job.id);
    }
    match status.state {
        JobState::Failed(error) => return Err(error),
        JobState::Cancelled => return Err(Error::Cancelled(format!("job {} was cancelled", job.id))),
        JobState::Complete | JobState::Queued | JobState::Running => (),
    }
    // A job completes a moment before its result does. All parts are listed only once the result is
    // complete.
    let complete = status.state == JobState::Complete && job.result.progress().1 != SpoolState::Open;
    let descriptor = poll_descriptor(shared, &asker.caller, job.id);
    asker.hold_answer(&job.plan.join.schema)?;
    let columns = columns_of(&job.plan.join.schema);
    let info = worker.work_on(columns, move |shared| job_info(shared, &asker.caller, &job, Listing::Whole)).await?;
    let info = info.with_descriptor(descriptor.clone());
    let mut poll = PollInfo::new().with_info(info).try_with_progress(if complete { 1.0 } else { status.progress })?;
    if !complete {
        poll.flight_descriptor = Some(descriptor);
        poll.expiration_time = Some(timestamp(SystemTime::now() + shared.limits.ticket_life));
    }
    Ok(poll)
}

/// Returns the schema of a table or of a join's result. Runs nothing.
///
/// # Errors
/// Faults of the descriptor.
pub async fn schema(shared: &Arc<Shared>, asker: Asker, descriptor: FlightDescriptor) -> Result<SchemaResult> {
    let worker = shared.worker(&asker.caller);
    let written = |schema: &SchemaRef| Ok(SchemaAsIpc::new(schema, &IpcWriteOptions::default()).try_into()?);
    let schema: SchemaRef = match asked(shared, &asker, &descriptor)? {
        Asked::Table(table) => table.schema.clone(),
        Asked::Command(command) => {
            let bind_and_tell = move |shared: &Shared, interrupt: &Interrupt| {
                let JoinCommand { spec, .. } = read_command(shared, &asker, &command)?;
                let schema = planner::bind_interruptible(&spec, &shared.catalog, interrupt)?.schema;
                asker.hold_answer(&schema)?;
                written(&schema)
            };
            return worker.work(bind_and_tell).await;
        }
        Asked::Job(job) => job.plan.join.schema.clone(),
    };
    asker.hold_answer(&schema)?;
    worker.work_on(columns_of(&schema), move |_| written(&schema)).await
}

/// Entry of a list of flights.
enum Listed {
    Table(String),
    Result(JobId),
}

/// Lists all tables, and the caller's results that can be fetched now or once their join is done.
/// `prefix` filters tables by name. Each entry is made when the client has room for it. The list
/// holds names only, so a client that does not read it keeps no table and no result.
///
/// # Errors
/// [`Error::Exhausted`] when the memory of calls has no room for the names; in the stream, when it
/// has no room for an entry.
pub fn list(
    shared: &Arc<Shared>,
    asker: Asker,
    prefix: &str,
) -> Result<impl Stream<Item = Result<FlightInfo>> + use<>> {
    let tables = shared.catalog.tables();
    let tables = tables.iter().map(|table| &table.name).filter(|name| name.starts_with(prefix));
    let mut entries: Vec<_> = tables.cloned().map(Listed::Table).collect();
    if prefix.is_empty() {
        let jobs = shared.scheduler.jobs().into_iter().filter(|job| is_listed(job, &asker));
        entries.extend(jobs.map(|job| Listed::Result(job.id)));
    }
    let name_bytes = |entry: &Listed| if let Listed::Table(name) = entry { name.len() } else { 0 };
    let bytes: usize = entries.iter().map(|entry| size_of::<Listed>() + name_bytes(entry)).sum();
    asker.memory.hold(bytes as u64, "the list of flights")?;
    let shared = shared.clone();
    let infos = stream::iter(entries).then(move |entry| {
        let (shared, asker) = (shared.clone(), asker.clone());
        async move {
            asker.memory.room(LISTED_BYTES).await?;
            entry_info(&shared, asker, entry).await
        }
    });
    Ok(infos.filter_map(|info| future::ready(info.transpose())))
}

/// True if a result is listed: it is the caller's, and can be fetched now or later.
fn is_listed(job: &Job, asker: &Asker) -> bool {
    asker.caller.may_touch(&job.owner)
        && !matches!(job.state(), JobState::Failed(_) | JobState::Cancelled)
        && !job.result.is_gone()
}

/// Describes an entry; `None` if it has gone since the list was begun.
async fn entry_info(shared: &Arc<Shared>, asker: Asker, entry: Listed) -> Result<Option<FlightInfo>> {
    let worker = shared.worker(&asker.caller);
    match entry {
        Listed::Table(name) => {
            let Ok(table) = shared.catalog.table(&name) else { return Ok(None) };
            let _held = asker.memory.bounds().reserve(schema_bytes(&table.schema), ANSWER)?;
            let columns = columns_of(&table.schema);
            worker.work_on(columns, move |shared| Ok(Some(table_info(shared, &asker, &table)))).await
        }
        Listed::Result(id) => {
            let Ok(job) = shared.scheduler.job(id) else { return Ok(None) };
            if !is_listed(&job, &asker) {
                return Ok(None);
            }
            let schema = job.plan.join.schema.clone();
            let _held = asker.memory.bounds().reserve(schema_bytes(&schema), ANSWER)?;
            let described = move |shared: &Shared| {
                let descriptor = poll_descriptor(shared, &asker.caller, job.id);
                Ok(job_info(shared, &asker.caller, &job, Listing::All)?.with_descriptor(descriptor))
            };
            worker.work_on(columns_of(&schema), described).await.map(Some)
        }
    }
}

/// Returns the given endpoint with a ticket that is valid for longer.
///
/// # Errors
/// As [`Tickets::open`]; [`Error::NotFound`] when the table or result of the ticket is gone.
pub fn renew(shared: &Shared, caller: &Caller, endpoint: &FlightEndpoint) -> Result<FlightEndpoint> {
    let ticket = endpoint.ticket.clone().unwrap_or_default();
    let target = shared.tickets.open(&ticket.ticket, caller).context(|| "renewing an endpoint")?;
    let expires = match &target {
        Target::Table { name, version, .. } => {
            if table_version(shared.catalog.table(name)?.created) != *version {
                return Err(Error::Precondition(format!(
                    "renewing an endpoint: table {name:?} was replaced or appended to since then; call GetFlightInfo again"
                )));
            }
            None
        }
        Target::Result { job, .. } | Target::Part { job, .. } | Target::Poll { job } => {
            Some(shared.scheduler.job(JobId(*job))?)
        }
    };
    let expires = match expires {
        Some(job) => {
            shared.readers.renewed(job.id);
            job.result.renew(retain(shared, &job))?.unwrap_or_else(|| lease_end(shared, &job))
        }
        None => SystemTime::now() + shared.limits.ticket_life,
    };
    Ok(FlightEndpoint {
        ticket: Some(shared.tickets.issue(target, &caller.tenant, ticket_end(shared))),
        expiration_time: Some(timestamp(expires)),
        ..endpoint.clone()
    })
}

/// Returns the job of a flight info, from the tickets of its endpoints or from its descriptor.
///
/// # Errors
/// As [`Tickets::open`]; [`Error::Invalid`] when the info is not of a job.
pub fn job_of(shared: &Shared, caller: &Caller, info: &FlightInfo) -> Result<JobId> {
    let tickets = info.endpoint.iter().filter_map(|endpoint| endpoint.ticket.as_ref());
    let descriptor = info.flight_descriptor.as_ref().map(|descriptor| &descriptor.cmd);
    let token =
        tickets.map(|ticket| &ticket.ticket).chain(descriptor).find(|bytes| Tickets::looks_like(bytes)).ok_or_else(
            || Error::Invalid("the flight info has no ticket of this server; send it as it was received".into()),
        )?;
    let target = shared.tickets.open(token, caller)?;
    target.job().ok_or_else(|| Error::Invalid("the flight info is of a table, so there is no job to cancel".into()))
}

fn asked(shared: &Shared, asker: &Asker, descriptor: &FlightDescriptor) -> Result<Asked> {
    match DescriptorType::try_from(descriptor.r#type) {
        Ok(DescriptorType::Path) => {
            let name = table_name(&descriptor.path)?;
            asker.record.set_command(name);
            Ok(Asked::Table(shared.catalog.table(name)?))
        }
        Ok(DescriptorType::Cmd) if Tickets::looks_like(&descriptor.cmd) => {
            let target = shared.tickets.open(&descriptor.cmd, &asker.caller)?;
            let id = target.job().ok_or_else(|| Error::Invalid("this is a table's ticket; send it to DoGet".into()))?;
            asker.record.set_command(format!("job {id}"));
            Ok(Asked::Job(shared.scheduler.job(id)?))
        }
        Ok(DescriptorType::Cmd) => Ok(Asked::Command(descriptor.cmd.clone())),
        _ => Err(Error::Invalid(
            "the descriptor is neither a path nor a command; use path [\"table\"], or a join command".into(),
        )),
    }
}

/// Returns the table name of a path.
///
/// # Errors
/// [`Error::Invalid`] when the path does not have exactly one part.
pub fn table_name(path: &[String]) -> Result<&str> {
    match path {
        [name] if !name.is_empty() => Ok(name),
        _ => Err(Error::Invalid(format!("the path {path:?} names no table; a path has one part, the table's name"))),
    }
}

fn read_command(shared: &Shared, asker: &Asker, command: &[u8]) -> Result<JoinCommand> {
    let command = commands::decode(command, &shared.sessions.defaults(asker.session))?;
    asker.record.set_command(command.to_string());
    let seconds_max = shared.limits.retain_seconds_max;
    match command.options.retain_seconds {
        Some(seconds) if seconds > seconds_max => Err(Error::Invalid(format!(
            "\"retain_seconds\" is {seconds}, and this server keeps a result for at most {seconds_max} s; set fewer seconds and \
             renew the lease with RenewFlightEndpoint, or raise the server's --retain-seconds-max"
        ))),
        _ => command.of_tables(),
    }
}

fn submit(shared: &Shared, asker: &Asker, command: &[u8], interrupt: &Interrupt) -> Result<Arc<Job>> {
    let command = read_command(shared, asker, command)?;
    let in_words = command.to_string();
    if let Some(into) = &command.options.into {
        asker.caller.require(Role::Writer, &format!("keeping the result as table {}", human::asked(into)))?;
    }
    submit_join(shared, asker, &in_words, command, interrupt)
}

/// Binds and submits a join, and adds its job to the record of the call. `in_words` describes the
/// join there.
///
/// # Errors
/// Faults of the join, and refusals of the scheduler.
pub(super) fn submit_join(
    shared: &Shared,
    asker: &Asker,
    in_words: &str,
    join: JoinCommand,
    interrupt: &Interrupt,
) -> Result<Arc<Job>> {
    let JoinCommand { spec, options } = join;
    let Editor { tenant, is_admin } = asker.caller.editor();
    let submission = Submission { owner: tenant, is_admin, client: asker.connection, interrupt: interrupt.clone() };
    let bound = bind(shared, &spec, &submission);
    shared.scheduler.count_refusal(&bound, interrupt);
    let job = shared.scheduler.submit(bound?, options, submission)?;
    asker.record.set_command(format!("{in_words}: job {}", job.id));
    Ok(job)
}

/// Binds a join that is about to be submitted. A full queue refuses it before that work.
fn bind(shared: &Shared, spec: &JoinSpec, submission: &Submission) -> Result<BoundJoin> {
    shared.scheduler.check_room(&submission.owner)?;
    planner::bind_interruptible(spec, &shared.catalog, &submission.interrupt)
}

fn table_info(shared: &Shared, asker: &Asker, table: &Table) -> FlightInfo {
    let count = table.batches.len();
    let parts = shared.limits.endpoints(table.bytes).min(count).max(1);
    let expires = ticket_end(shared);
    let version = table_version(table.created);
    let targets = (0..parts).map(|part| Target::Table {
        name: table.name.clone(),
        version,
        first: count * part / parts,
        end: count * (part + 1) / parts,
    });
    let descriptor = FlightDescriptor::new_path(vec![table.name.clone()]);
    info(&table.schema)
        .with_endpoints(endpoints(shared, &asker.caller, targets, expires, expires))
        .with_descriptor(descriptor)
        .with_ordered(true)
        .with_total_records(table.rows as i64)
        .with_total_bytes(table.bytes as i64)
        .with_app_metadata(describe::table(table).to_string())
}

/// Selects the endpoints of a job that are listed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Listing {
    /// All endpoints; reading them waits for the join.
    All,
    /// Endpoints whose rows are complete.
    Whole,
}

fn job_info(shared: &Shared, caller: &Caller, job: &Job, listing: Listing) -> Result<FlightInfo> {
    if !caller.may_touch(&job.owner) {
        return Err(no_job(job.id));
    }
    let is_complete = job.result.progress().1 == SpoolState::Complete;
    // A result that is consumed as it is read has the same endpoints for every client.
    let is_known = is_complete && !job.result.is_consumed_by_reading();
    let bytes = if is_known { job.result.pushed_bytes() } else { job.plan.result_bytes };
    // Readers in parallel take rows of a gang as quickly as its ranks deliver them.
    let parts = shared.limits.endpoints(bytes).max(job.plan.target.ranks);
    let targets: Vec<Target> = match listing {
        Listing::Whole if !job.result.is_consumed_by_reading() => {
            let ranges = job.result.parts(parts).into_iter();
            ranges.map(|batches| Target::Part { job: job.id.0, first: batches.start, end: batches.end }).collect()
        }
        _ => (0..parts).map(|part| Target::Result { job: job.id.0, part, parts }).collect(),
    };
    let endpoints = endpoints(shared, caller, targets.into_iter(), ticket_end(shared), lease_end(shared, job));
    let mut info =
        info(&job.plan.join.schema).with_endpoints(endpoints).with_app_metadata(describe::job(job).to_string());
    if is_complete {
        info.total_records = job.result.pushed_rows() as i64;
        info.total_bytes = job.result.pushed_bytes() as i64;
    }
    Ok(info)
}

/// Returns a flight info with only a schema; unknown counts are -1.
fn info(schema: &SchemaRef) -> FlightInfo {
    let info = FlightInfo { total_records: -1, total_bytes: -1, ..FlightInfo::new() };
    info.try_with_schema(schema).expect("a schema that was decoded or bound can be encoded")
}

/// Builds endpoints, spread over the locations if there are any, so that a client opens a
/// connection for each location.
fn endpoints(
    shared: &Shared,
    caller: &Caller,
    targets: impl Iterator<Item = Target>,
    ticket_expires: SystemTime,
    data_expires: SystemTime,
) -> Vec<FlightEndpoint> {
    let locations = &shared.limits.locations;
    let endpoint = |(index, target): (usize, Target)| FlightEndpoint {
        ticket: Some(shared.tickets.issue(target, &caller.tenant, ticket_expires)),
        location: match locations.len() {
            0 => Vec::new(),
            count => vec![Location { uri: locations[index % count].clone() }],
        },
        expiration_time: Some(timestamp(data_expires.min(ticket_expires))),
        app_metadata: Bytes::new(),
    };
    targets.enumerate().map(endpoint).collect()
}

/// Returns the descriptor that polls a job.
fn poll_descriptor(shared: &Shared, caller: &Caller, job: JobId) -> FlightDescriptor {
    let Ticket { ticket } = shared.tickets.issue(Target::Poll { job: job.0 }, &caller.tenant, ticket_end(shared));
    FlightDescriptor::new_cmd(ticket)
}

fn ticket_end(shared: &Shared) -> SystemTime {
    SystemTime::now() + shared.limits.ticket_life
}

/// Returns the time at which a job's result may be released. For a job that is not complete, this
/// is the time that would apply if it completed now.
fn lease_end(shared: &Shared, job: &Job) -> SystemTime {
    job.result.expires().unwrap_or_else(|| SystemTime::now() + retain(shared, job))
}

fn retain(shared: &Shared, job: &Job) -> Duration {
    let seconds = job.options.retain_seconds;
    seconds.map_or(shared.limits.retain, |seconds| Duration::from_secs(seconds.into()))
}

fn timestamp(time: SystemTime) -> Timestamp {
    time.into()
}
