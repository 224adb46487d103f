//! Actions: operations that have no RPC of their own.
//!
//! The bodies of actions and of their results are JSON objects. Unknown fields are refused.
//! `proto/dovetail.proto` describes the answers that have more than a few fields. The standard
//! Flight actions carry their protobuf messages.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use arrow_flight::{
    Action, ActionType, CancelFlightInfoRequest, CancelFlightInfoResult, CancelStatus, RenewFlightEndpointRequest,
};
use bytes::Bytes;
use futures::stream::{self, BoxStream};
use futures::{StreamExt, future};
use http::HeaderValue;
use prost::Message;
use prost::encoding::{DecodeContext, WireType, decode_key, decode_varint, skip_field};
use serde::Deserialize;
use serde::de::{DeserializeOwned, IgnoredAny};
use serde_json::{Value, json};

use super::auth::Role;
use super::call_memory::LISTED_BYTES;
use super::get_info::{self, Asker};
use super::sessions::{self, CloseSessionResult, CloseStatus, SetSessionOptionsRequest};
use super::shared::{Shared, shutting_down};
use super::{commands, describe, exchange};
use crate::human::asked;
use crate::memory::{Interrupt, human_bytes};
use crate::scheduler::{Job, JobId, PreparedBuild, no_job, no_prepared};
use crate::{Context, Error, Result};

/// Every action, with its purpose.
const ACTIONS: &[(&str, &str)] = &[
    (
        "drop_table",
        r#"Removes a table; its current readers finish. Body {"name": "orders"}. Result {"table": ..., "rows": ...}"#,
    ),
    (
        "list_jobs",
        "Lists your jobs (all jobs for an admin), oldest first, with ended jobs that are still remembered. No body. One result for each, as of `job`",
    ),
    (
        "job",
        r#"Describes a job: state, progress, queue position, phases measured so far. Body {"job": 7}. Body {"job": 7, "wait_seconds": 10} waits for the end of the job for at most that time, and at most 10 s"#,
    ),
    ("cancel_job", r#"Stops a job and releases its result. Body {"job": 7}"#),
    (
        "explain",
        r#"Explains the plan of a join without running it, body {"join": {...}}, or of a job with measured times and the transfer to its clients, body {"job": 7}. With "stream", the columns of the rows are those of the table with that side's name. "refusal" says why the join does not fit, if it does not"#,
    ),
    (
        "topology",
        "Lists the devices, their memory, their measured rates, their links, and the ways of rows between them. No body",
    ),
    (
        "list_prepared",
        "Lists the build sides of your joins whose rows arrive (all for an admin), oldest first: those of open streams, and those kept by keep_seconds. No body",
    ),
    (
        "release_prepared",
        r#"Frees a build side that is kept, at once or with its last stream. Body {"prepared": 3}. Its description is the result"#,
    ),
    ("server_info", "Reports version, devices, memory and the limits for clients. No body"),
    ("commit_upload", r#"Completes an upload in several streams; its table appears. Body {"upload": "ID"}"#),
    ("abort_upload", r#"Drops an upload in several streams, with its rows. Body {"upload": "ID"}"#),
    ("CancelFlightInfo", "Stops the job of a FlightInfo and releases its result. Flight's own messages"),
    ("RenewFlightEndpoint", "Extends an endpoint's ticket and its result's lease. Flight's own messages"),
    (
        "SetSessionOptions",
        "Sets options of the session in the cookie arrow_flight_session_id; opens one without that cookie. Flight's own messages",
    ),
    ("GetSessionOptions", "Returns the options of the session. Flight's own messages"),
    ("CloseSession", "Closes the session. Flight's own messages"),
];

/// Actions that end work under way, or report on it.
const SERVED_WHILE_DRAINING: [&str; 12] = [
    "list_prepared",
    "release_prepared",
    "list_jobs",
    "job",
    "explain",
    "cancel_job",
    "server_info",
    "commit_upload",
    "abort_upload",
    "CancelFlightInfo",
    "RenewFlightEndpoint",
    "CloseSession",
];

/// Longest time that the action `job` waits before it answers. Proxies end calls without an answer
/// after a time, some of them after 15 s.
const WAIT_MAX: Duration = Duration::from_secs(10);

/// Answer of an action: results, and a cookie to set.
#[derive(Default)]
pub struct Answer {
    pub results: Vec<Bytes>,
    /// Further results, each made when the client has room for it.
    pub more: Option<BoxStream<'static, Result<Bytes>>>,
    pub cookie: Option<HeaderValue>,
}

impl Answer {
    fn json(value: &Value) -> Self {
        Self { results: vec![value.to_string().into()], ..Self::default() }
    }

    fn message(message: &impl Message) -> Self {
        Self { results: vec![message.encode_to_vec().into()], ..Self::default() }
    }
}

/// Actions of Flight SQL.
const FLIGHT_SQL: [&str; 8] = [
    "CreatePreparedStatement",
    "ClosePreparedStatement",
    "CreatePreparedSubstraitPlan",
    "CancelQuery",
    "BeginTransaction",
    "EndTransaction",
    "BeginSavepoint",
    "EndSavepoint",
];

/// Returns the actions, for ListActions.
pub fn list() -> impl Iterator<Item = ActionType> {
    ACTIONS.iter().map(|&(name, description)| ActionType { r#type: name.into(), description: description.into() })
}

/// Runs an action.
///
/// # Errors
/// [`Error::Invalid`] for an unknown action or an invalid body, and the errors of the action
/// itself.
pub async fn run(shared: &Arc<Shared>, asker: &Asker, action: Action) -> Result<Answer> {
    asker.record.set_command(&action.r#type);
    if shared.is_draining() && !SERVED_WHILE_DRAINING.contains(&action.r#type.as_str()) {
        return Err(shutting_down());
    }
    match action.r#type.as_str() {
        "drop_table" => drop_table(shared, asker, body(&action)?).await,
        "list_jobs" => {
            no_body(&action)?;
            list_jobs(shared, asker)
        }
        "job" => job(shared, asker, body(&action)?).await,
        "cancel_job" => cancel_job(shared, asker, body(&action)?),
        "explain" => explain(shared, asker.clone(), action).await,
        "topology" => no_body(&action).map(|()| topology(shared)),
        "list_prepared" => no_body(&action).map(|()| list_prepared(shared, asker)),
        "release_prepared" => release_prepared(shared, asker, &body(&action)?),
        "server_info" => no_body(&action).map(|()| Answer::json(&describe::server(shared))),
        "commit_upload" => commit_upload(shared, asker, body(&action)?).await,
        "abort_upload" => abort_upload(shared, asker, body(&action)?).await,
        "CancelFlightInfo" => cancel_flight_info(shared, asker, &message(&action)?),
        "RenewFlightEndpoint" => renew(shared, asker, &message(&action)?),
        "SetSessionOptions" => set_session_options(shared, asker, message(&action)?),
        "GetSessionOptions" => get_session_options(shared, asker),
        "CloseSession" => close_session(shared, asker),
        other if FLIGHT_SQL.contains(&other) => Err(commands::no_flight_sql(other)),
        other => {
            let names: Vec<String> = list().map(|action| action.r#type).collect();
            Err(Error::Invalid(format!("there is no action {}; the actions are {}", asked(other), names.join(", "))))
        }
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct NameBody {
    #[serde(alias = "table")]
    name: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct JobBody {
    job: u64,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct JobWaitBody {
    job: u64,
    #[serde(default)]
    wait_seconds: f64,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PreparedBody {
    prepared: u64,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct UploadBody {
    upload: String,
}

/// Largest JSON body of an action that is read inline, in bytes: a few milliseconds of work. Only
/// `explain` takes more, and reads it as CPU work. Protobuf messages refer to the body's bytes.
const BODY_BYTES_MAX: usize = 4 << 20;

fn check_body(action: &Action) -> Result<()> {
    match action.body.len() <= BODY_BYTES_MAX {
        true => Ok(()),
        false => Err(Error::Invalid(format!(
            "the body of action {:?} has {}, and the limit is {}",
            action.r#type,
            human_bytes(action.body.len() as u64),
            human_bytes(BODY_BYTES_MAX as u64)
        ))),
    }
}

fn body<T: DeserializeOwned>(action: &Action) -> Result<T> {
    check_body(action)?;
    serde_json::from_slice(&action.body).map_err(|error| {
        let usage = ACTIONS.iter().find(|(name, _)| *name == action.r#type).map_or("", |(_, description)| description);
        Error::Invalid(format!("the body of action {:?} cannot be read: {error}. {usage}", action.r#type))
    })
}

fn no_body(action: &Action) -> Result<()> {
    if matches!(action.body.trim_ascii(), b"" | b"{}") {
        return Ok(());
    }
    Err(Error::Invalid(format!("action {:?} takes no body", action.r#type)))
}

fn message<T: Message + Default>(action: &Action) -> Result<T> {
    let name = &action.r#type;
    // Some clients wrap the message into an `Any`, and others send it unwrapped.
    let prefix = format!("type.googleapis.com/arrow.flight.protocol.{name}Request");
    let wrapped = pbjson_types::Any::decode(&*action.body).ok().filter(|any| any.type_url == prefix);
    let bytes = wrapped.map_or(action.body.clone(), |any| any.value);
    if count_fields(&bytes, messages_inside(name)) > FIELDS_MAX {
        return Err(Error::Exhausted(format!("the body of action {name:?} has more than {FIELDS_MAX} fields")));
    }
    T::decode(bytes)
        .map_err(|error| Error::Invalid(format!("the body of action {name:?} is not a {name}Request: {error}")))
}

/// Maximum number of fields of a message in an action's body. Each may be sent in two bytes, and
/// takes a hundred or more when it is decoded. Flight infos have a few for each endpoint.
const FIELDS_MAX: usize = 100_000;

/// Returns the tags of the repeated messages in an action's message, from the outside in.
fn messages_inside(action: &str) -> &'static [u32] {
    match action {
        // The info, its endpoints, and their locations.
        "CancelFlightInfo" => &[1, 3, 2],
        // The endpoint, and its locations.
        "RenewFlightEndpoint" => &[1, 2],
        // The options, their values, and the texts of a list.
        "SetSessionOptions" => &[1, 2, 5],
        _ => &[],
    }
}

/// Counts the fields of a protobuf message, and of the messages inside it with those tags. Stops
/// where the bytes are malformed, which the decoder reports.
fn count_fields(mut bytes: &[u8], inside: &[u32]) -> usize {
    let mut count = 0;
    while let Ok((tag, wire_type)) = decode_key(&mut bytes) {
        count += 1;
        if inside.first() != Some(&tag) || wire_type != WireType::LengthDelimited {
            if skip_field(wire_type, tag, &mut bytes, DecodeContext::default()).is_err() {
                break;
            }
            continue;
        }
        let len = decode_varint(&mut bytes).ok().and_then(|len| usize::try_from(len).ok());
        let Some((message, rest)) = len.and_then(|len| bytes.split_at_checked(len)) else { break };
        count += count_fields(message, &inside[1..]);
        bytes = rest;
    }
    count
}

async fn drop_table(shared: &Arc<Shared>, asker: &Asker, body: NameBody) -> Result<Answer> {
    asker.record.set_command(format!("drop_table {}", body.name));
    asker.caller.require(Role::Writer, &format!("dropping table {}", asked(&body.name)))?;
    let table = shared.catalog.drop_table(&body.name, &asker.caller.editor())?;
    let answer = Answer::json(&json!({"table": table.name, "rows": table.rows, "bytes": table.bytes}));
    // This call may be the last owner of the table's arrays. Dropping many arrays takes long, so it
    // runs as CPU work.
    let arrays = table.schema.fields().len() * table.batches.len();
    let let_go = move |_: &Shared| {
        drop(table);
        Ok(answer)
    };
    shared.worker(&asker.caller).work_on(arrays, let_go).await
}

/// Lists jobs. The list holds their numbers only, and each job is described when there is room for
/// it. So a client that does not read the list keeps no job, and a list of any length is answered
/// in little memory.
fn list_jobs(shared: &Arc<Shared>, asker: &Asker) -> Result<Answer> {
    // A job may be in both lists for a moment; the set keeps it once.
    let all = shared.scheduler.history().into_iter().chain(shared.scheduler.jobs());
    let mine: BTreeSet<JobId> = all.filter(|job| asker.caller.may_touch(&job.owner)).map(|job| job.id).collect();
    asker.memory.hold((mine.len() * size_of::<JobId>()) as u64, "the list of jobs")?;
    let (shared, memory) = (shared.clone(), asker.memory.clone());
    let described = stream::iter(mine).then(move |id| {
        let (shared, memory) = (shared.clone(), memory.clone());
        async move {
            memory.room(LISTED_BYTES).await?;
            // A job that has been forgotten since is left out.
            Ok(shared.scheduler.job(id).ok().map(|job| describe::job(&job).to_string().into()))
        }
    });
    let more = described.filter_map(|described: Result<_>| future::ready(described.transpose()));
    Ok(Answer { more: Some(more.boxed()), ..Answer::default() })
}

fn find_job(shared: &Shared, asker: &Asker, id: JobId) -> Result<Arc<Job>> {
    let job = shared.scheduler.job(id)?;
    match asker.caller.may_touch(&job.owner) {
        true => Ok(job),
        false => Err(no_job(id)),
    }
}

/// Describes a job, at its end or when the time to wait is over. The wait ends with the call.
async fn job(shared: &Shared, asker: &Asker, body: JobWaitBody) -> Result<Answer> {
    asker.record.set_command(format!("job {}", body.job));
    let wait = Duration::try_from_secs_f64(body.wait_seconds).map_err(|_| {
        Error::Invalid(format!("wait_seconds is {}; use a number of seconds from 0 to 10", body.wait_seconds))
    })?;
    let job = find_job(shared, asker, JobId(body.job))?;
    asker.polls(shared, job.id);
    if !wait.is_zero() {
        // A timeout is an answer as well: the job has not ended yet.
        let _ = tokio::time::timeout(wait.min(WAIT_MAX), job.ended()).await;
    }
    if job.state().is_final() {
        // This answer tells the client the outcome, so a drain need not wait for that.
        shared.deliveries.told(job.id);
    }
    Ok(Answer::json(&describe::job(&job)))
}

fn prepared_of(shared: &Shared, asker: &Asker) -> impl Iterator<Item = PreparedBuild> {
    shared.scheduler.prepared().into_iter().filter(|build| asker.caller.may_touch(&build.owner))
}

fn list_prepared(shared: &Shared, asker: &Asker) -> Answer {
    let results = prepared_of(shared, asker).map(|build| describe::prepared(&build).to_string().into()).collect();
    Answer { results, ..Answer::default() }
}

fn release_prepared(shared: &Shared, asker: &Asker, body: &PreparedBody) -> Result<Answer> {
    asker.record.set_command(format!("release_prepared {}", body.prepared));
    let found = prepared_of(shared, asker).find(|build| build.number == body.prepared);
    let found = found.ok_or_else(|| no_prepared(body.prepared))?;
    shared.scheduler.release_prepared(found.number)?;
    Ok(Answer::json(&describe::prepared(&found)))
}

fn cancel_job(shared: &Shared, asker: &Asker, body: JobBody) -> Result<Answer> {
    asker.record.set_command(format!("cancel_job {}", body.job));
    let job = find_job(shared, asker, JobId(body.job))?;
    shared.scheduler.cancel(job.id)?;
    Ok(Answer::json(&describe::job(&job)))
}

async fn explain(shared: &Arc<Shared>, asker: Asker, action: Action) -> Result<Answer> {
    let worker = shared.worker(&asker.caller);
    let explained = move |shared: &Shared, interrupt: &Interrupt| {
        let (explanation, transfer) = match job_to_explain(&action)? {
            Some(job) => (find_job(shared, &asker, job)?.explanation(), shared.transfers.of(job)),
            None => {
                let command = commands::decode(&action.body, &shared.sessions.defaults(asker.session))?;
                asker.record.set_command(format!("explain {command}"));
                let join = exchange::bind_to_explain(shared, &command, interrupt)?;
                (shared.scheduler.explain(join, &command.options, &asker.caller.tenant, interrupt)?, None)
            }
        };
        Ok(Answer::json(&describe::explanation(&explanation, transfer.as_ref())?))
    };
    worker.work(explained).await
}

/// Returns the job to explain; `None` for a join.
fn job_to_explain(action: &Action) -> Result<Option<JobId>> {
    /// The only key of a body that is read. Other values would take many times their size.
    #[derive(Deserialize)]
    struct Key {
        job: Option<IgnoredAny>,
    }
    let is_object = action.body.trim_ascii_start().starts_with(b"{");
    match is_object && serde_json::from_slice(&action.body).is_ok_and(|key: Key| key.job.is_some()) {
        true => body(action).map(|JobBody { job }| Some(JobId(job))),
        false => Ok(None),
    }
}

fn topology(shared: &Shared) -> Answer {
    let topology = describe::topology(shared);
    Answer::json(&json!({
        "devices": describe::devices(shared),
        "topology": topology,
        "text": topology.to_string(),
        "pairs": describe::pairs(shared),
    }))
}

async fn commit_upload(shared: &Arc<Shared>, asker: &Asker, body: UploadBody) -> Result<Answer> {
    asker.caller.require(Role::Writer, "committing an upload")?;
    let tenant = asker.caller.tenant.clone();
    let commit = move |shared: &Shared, interrupt: &Interrupt| {
        let table = shared.uploads.commit(&tenant, &body.upload, interrupt);
        table.context(|| format!("committing upload {}", asked(&body.upload)))
    };
    let table = shared.worker(&asker.caller).work(commit).await?;
    asker.record.set_command(format!("commit_upload {}", table.name));
    Ok(Answer::json(&describe::table(&table)))
}

async fn abort_upload(shared: &Arc<Shared>, asker: &Asker, body: UploadBody) -> Result<Answer> {
    asker.caller.require(Role::Writer, "aborting an upload")?;
    let tenant = asker.caller.tenant.clone();
    // Dropping many rows takes long, so it runs as CPU work.
    let abort = move |shared: &Shared, _: &Interrupt| {
        shared.uploads.abort(&tenant, &body.upload)?;
        Ok(Answer::json(&json!({"upload": body.upload, "state": "aborted"})))
    };
    shared.worker(&asker.caller).work(abort).await
}

fn cancel_flight_info(shared: &Shared, asker: &Asker, request: &CancelFlightInfoRequest) -> Result<Answer> {
    let info =
        request.info.as_ref().ok_or_else(|| Error::Invalid("the request to cancel has no flight info".into()))?;
    let job = get_info::job_of(shared, &asker.caller, info)?;
    asker.record.set_command(format!("CancelFlightInfo job {job}"));
    shared.scheduler.cancel(job)?;
    Ok(Answer::message(&CancelFlightInfoResult::new(CancelStatus::Cancelled)))
}

fn renew(shared: &Shared, asker: &Asker, request: &RenewFlightEndpointRequest) -> Result<Answer> {
    let endpoint =
        request.endpoint.as_ref().ok_or_else(|| Error::Invalid("the request to renew has no endpoint".into()))?;
    Ok(Answer::message(&get_info::renew(shared, &asker.caller, endpoint)?))
}

fn set_session_options(shared: &Shared, asker: &Asker, request: SetSessionOptionsRequest) -> Result<Answer> {
    let (id, cookie) = match asker.session {
        Some(id) => (id, None),
        None => {
            let id = shared.sessions.open(&asker.caller)?;
            (id, HeaderValue::try_from(format!("{}={id}", sessions::COOKIE)).ok())
        }
    };
    let answer = Answer::message(&shared.sessions.set(id, request));
    Ok(Answer { cookie, ..answer })
}

fn get_session_options(shared: &Shared, asker: &Asker) -> Result<Answer> {
    let id = asker.session.ok_or_else(no_session)?;
    Ok(Answer::message(&shared.sessions.get(id)))
}

fn close_session(shared: &Shared, asker: &Asker) -> Result<Answer> {
    let id = asker.session.ok_or_else(no_session)?;
    shared.sessions.close(id);
    let answer = Answer::message(&CloseSessionResult { status: CloseStatus::Closed.into() });
    Ok(Answer { cookie: HeaderValue::try_from(format!("{}=; Max-Age=0", sessions::COOKIE)).ok(), ..answer })
}

fn no_session() -> Error {
    Error::Precondition(format!(
        "the call is in no session; send the cookie {} that SetSessionOptions returned",
        sessions::COOKIE
    ))
}

#[cfg(test)]
mod tests {
    use arrow_flight::{FlightEndpoint, FlightInfo, Location};

    use super::*;

    #[test]
    fn fields_are_counted_in_repeated_messages_and_no_deeper() {
        let locations = vec![Location::default(); 3];
        let endpoint = FlightEndpoint { location: locations, app_metadata: vec![8; 100].into(), ..Default::default() };
        let info = FlightInfo { endpoint: vec![endpoint; 10], schema: vec![8; 1000].into(), ..Default::default() };
        let bytes = CancelFlightInfoRequest { info: Some(info) }.encode_to_vec();
        // The info; its schema and ten endpoints; in each, three locations and its metadata.
        assert_eq!(count_fields(&bytes, messages_inside("CancelFlightInfo")), 1 + 11 + 40);
        assert_eq!(count_fields(&bytes[..bytes.len() / 2], messages_inside("CancelFlightInfo")), 1);
        assert_eq!(count_fields(&[2 << 3; 1000], &[]), 500);
    }

    #[test]
    fn a_body_of_too_many_fields_is_refused_before_it_is_decoded() {
        let info = FlightInfo { endpoint: vec![FlightEndpoint::default(); FIELDS_MAX], ..Default::default() };
        let body = CancelFlightInfoRequest { info: Some(info) }.encode_to_vec();
        let refused = message::<CancelFlightInfoRequest>(&Action::new("CancelFlightInfo", body)).unwrap_err();
        assert!(matches!(&refused, Error::Exhausted(text) if text.contains("more than 100000 fields")), "{refused}");
    }
}
