//! Describes tables, jobs, devices and the server as JSON: the one form that actions, listings and
//! `app_metadata` share.
//!
//! This is the JSON form of the messages in `proto/dovetail.proto` (`tests/service/answers.rs`
//! compares the two). The code that is generated from these messages is not used: it writes 64-bit
//! integers as strings, and leaves out empty and zero values.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use arrow::datatypes::FieldRef;
use serde_json::{Value, json};

use super::metrics::{code_name, state_name};
use super::shared::Shared;
use super::transfers::Transfer;
use crate::Result;
use crate::catalog::Table;
use crate::device::DeviceKind;
use crate::engine::{Engine, PeerAccess, peer_access};
use crate::human::type_name;
use crate::join::PhaseRecord;
use crate::memory::human_bytes;
use crate::planner::{self, Explanation, KeptBuild, KeyPair};
use crate::scheduler::{Job, JobState, JobStatus, PreparedBuild, PreparedThen};
use crate::topology::{DeviceNode, Topology};

/// Describes a table.
pub fn table(table: &Table) -> Value {
    let name = |index: &usize| table.schema.field(*index).name().clone();
    let names = |columns: &Vec<usize>| columns.iter().map(name).collect::<Vec<_>>();
    json!({
        "table": table.name,
        "owner": table.owner,
        "rows": table.rows,
        "bytes": table.bytes,
        "batches": table.batches.len(),
        "created": time(table.created),
        "expires": table.expires.map(time),
        "sorted_by": names(&table.sorted_by),
        "unique": table.unique.iter().map(names).collect::<Vec<_>>(),
    })
}

fn key_pair(pair: &KeyPair) -> Value {
    json!({"left": pair.left, "right": pair.right, "nulls_equal": pair.nulls_equal})
}

fn then(join: &PreparedThen) -> Value {
    let on: Vec<Value> = join.on.iter().map(key_pair).collect();
    json!({"table": join.table, "how": join.how.name(), "on": on})
}

/// Describes a column by its name and its type: `id: int64`.
fn column(field: &FieldRef) -> String {
    format!("{}: {}", field.name(), type_name(field.data_type()))
}

/// Describes a build side that is prepared.
pub fn prepared(build: &PreparedBuild) -> Value {
    json!({
        "prepared": build.number,
        "owner": build.owner,
        "table": build.table,
        "how": build.how.name(),
        "stream": build.streamed.to_string(),
        "on": build.on.iter().map(key_pair).collect::<Vec<_>>(),
        "then": build.then.iter().map(then).collect::<Vec<_>>(),
        "columns": build.columns,
        "arriving": build.arriving.fields().iter().map(column).collect::<Vec<_>>(),
        "batch_rows": build.batch_rows,
        "strategy": build.strategy.name(),
        "shared": build.is_shared,
        "created": time(build.created),
        "device": build.device.map(|device| device.to_string()),
        "prepared_since": build.since.map(time),
        "bytes": build.bytes,
        "streams": build.streams,
        "uses": build.uses,
        "keep_seconds": build.keep_seconds,
        "expires": build.expires.map(time),
    })
}

/// Describes a job. Times are RFC 3339 in UTC; values that are not known (yet) are null.
pub fn job(job: &Job) -> Value {
    let (status, plan) = (job.status(), job.planned());
    let (join, options) = (&plan.join, &job.options);
    let error = match &status.state {
        JobState::Failed(error) => {
            let code = tonic::Status::from(error.clone()).code();
            Some(json!({"code": code_name(code), "message": error.message()}))
        }
        _ => None,
    };
    let phase = |phase: &PhaseRecord| {
        json!({
            "name": phase.phase,
            "seconds": phase.seconds,
            "bytes": phase.bytes,
            "kept_bytes": phase.kept_bytes,
            "in_place_bytes": phase.in_place_bytes,
        })
    };
    let times = JobTimes::of(job.submitted, &status);
    json!({
        "job": job.id.0,
        "owner": job.owner,
        "state": state_name(&status.state),
        // The first of the devices, which leads the others.
        "device": status.devices.first().map(ToString::to_string),
        "devices": status.devices.iter().map(ToString::to_string).collect::<Vec<_>>(),
        "progress": status.progress,
        "queue_position": status.queue_position,
        "waiting_for": status.waiting_for,
        "predicted_start": status.predicted_start.map(time),
        "predicted_seconds": plan.seconds,
        "submitted": time(job.submitted),
        "started": status.started.map(time),
        "finished": status.finished.map(time),
        "queue_seconds": times.queued.as_secs_f64(),
        "run_seconds": times.run.as_secs_f64(),
        "left": join.left.name,
        "right": join.right.name,
        "how": join.how.name(),
        "into": options.into,
        "count": join.counts_rows,
        "priority": options.priority,
        "rows": status.rows,
        "bytes": status.bytes,
        "released": status.released,
        "strategy": plan.strategy().name(),
        "build_side": plan.composition.build_side.to_string(),
        "reason": plan.reason,
        "prepared": plan.kept_build.as_ref().map(|kept| kept.number),
        "prepared_since": plan.kept_build.as_ref().map(KeptBuild::since),
        "predicted_bytes": plan.result_bytes,
        "deviation": status.measured().and_then(|measured| planner::deviation_from(&plan, &measured)),
        "distribution": plan.composition.distribution.name(),
        "phases": status.phases.iter().map(phase).collect::<Vec<_>>(),
        "ranks": status.ranks,
        "error": error,
    })
}

/// Times that a job waited and ran, so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct JobTimes {
    pub queued: Duration,
    pub run: Duration,
}

impl JobTimes {
    /// Returns the times of a job that was submitted at `submitted`.
    pub fn of(submitted: SystemTime, status: &JobStatus) -> Self {
        let now = SystemTime::now();
        let end = status.finished.unwrap_or(now);
        let between = |from: SystemTime, to: SystemTime| to.duration_since(from).unwrap_or_default();
        Self {
            queued: between(submitted, status.started.unwrap_or(end)),
            run: status.started.map_or(Duration::ZERO, |started| between(started, end)),
        }
    }
}

/// Describes a plan and the transfer of the result to its clients: all values, and the same in
/// words for people.
///
/// # Errors
/// [`Error::Internal`](crate::Error::Internal) when it has no JSON form.
pub fn explanation(explanation: &Explanation, transfer: Option<&Transfer>) -> Result<Value> {
    let in_json = |error| crate::Error::Internal(format!("writing an explanation as JSON: {error}"));
    let mut json = serde_json::to_value(explanation).map_err(in_json)?;
    json["transfer"] = serde_json::to_value(transfer).map_err(in_json)?;
    let fetched = transfer.map_or_else(String::new, |transfer| format!("\n{transfer}"));
    json["text"] = format!("{explanation}{fetched}").into();
    Ok(json)
}

/// Describes the devices. Each has its service state, the rates that the planner uses, and the
/// origin of these rates.
pub fn devices(shared: &Shared) -> Vec<Value> {
    let served = shared.scheduler.stats().devices.into_iter().map(|served| served.lost);
    shared.devices.iter().zip(served).map(|(each, lost)| device(&**each, lost)).collect()
}

fn device(device: &dyn Engine, lost: Option<String>) -> Value {
    let (info, memory, in_use, rates) = (device.info(), device.memory(), device.memory_use(), device.rates());
    let origin = match (&rates.kept_in, rates.measured) {
        (Some(_), _) => "kept",
        (None, Some(_)) => "measured",
        (None, None) => "assumed",
    };
    json!({
        "device": device.id().to_string(),
        "kind": device.id().kind.to_string(),
        "name": info.facts.name,
        "uuid": info.facts.uuid,
        "parallelism": info.facts.parallelism,
        // Reason why the device is out of service; null while it serves.
        "lost": lost,
        "memory_bytes": memory.limit_bytes(),
        "memory_used_bytes": in_use.used_bytes,
        "memory_used_bytes_max": in_use.used_bytes_max,
        "rates": {
            "origin": origin,
            "measured": rates.measured.map(time),
            "file": rates.kept_in.as_ref().map(|file| file.display().to_string()),
            "values": rates.values,
        },
    })
}

/// Returns the topology, with the models and memory of the devices that were opened. Its links have
/// measured rates. Where none are described, it has links as measured.
pub fn topology(shared: &Shared) -> Topology {
    let engine = |node: &DeviceNode| {
        let is_it = |engine: &&Arc<dyn Engine>| engine.id().to_string() == node.name;
        shared.devices.iter().find(is_it).map(|engine| &**engine)
    };
    let of_host = |node: &DeviceNode| engine(node)?.rates().of_host_memory();
    let of_pair = |from: &DeviceNode, to: &DeviceNode| {
        let (from, to) = (engine(from)?, engine(to)?);
        let is_direct = matches!(peer_access(from, to), Ok(Some(PeerAccess::Direct)));
        from.rates().of_pair(from.id(), to.id()).filter(|_| is_direct)
    };
    let described = shared.devices.iter().find_map(|device| device.rates().topology()).unwrap_or(&shared.topology);
    let mut topology = described.with_measured_links(&of_host, &of_pair);
    for node in &mut topology.devices {
        let Some(engine) = engine(node) else { continue };
        node.memory_bytes = Some(engine.memory().limit_bytes());
        node.model = (engine.id().kind == DeviceKind::Cuda).then(|| engine.info().facts.name.clone());
    }
    topology
}

/// Describes the way of rows from each device to each other one of its kind, if a join of both
/// exchanges rows.
pub fn pairs(shared: &Shared) -> Vec<Value> {
    let devices = || shared.devices.iter().map(|device| &**device);
    let pairs = devices().flat_map(|from| devices().map(move |to| (from, to)));
    let can_join = |(from, to): &(&dyn Engine, &dyn Engine)| from.id() != to.id() && from.id().kind == to.id().kind;
    pairs.filter(can_join).map(|(from, to)| pair(from, to)).collect()
}

fn pair(from: &dyn Engine, to: &dyn Engine) -> Value {
    let (through, why) = match peer_access(from, to) {
        Ok(Some(PeerAccess::Direct)) => (Some("peer memory"), None),
        Ok(Some(PeerAccess::ThroughHost { why })) => (Some("host memory"), Some(why)),
        Ok(None) => (None, Some("not known before they first exchange rows".into())),
        Err(error) => (None, Some(error.message().to_string())),
    };
    let rate = from.rates().of_pair(from.id(), to.id());
    json!({
        "from": from.id().to_string(),
        "to": to.id().to_string(),
        "through": through,
        "why": why,
        "bytes_per_second": rate,
    })
}

/// Describes the server: its version, its resources, and the limits of clients.
pub fn server(shared: &Shared) -> Value {
    let arena = shared.catalog.arena();
    let reload = shared.credentials.last_reload();
    json!({
        "name": "dovetail",
        "version": env!("CARGO_PKG_VERSION"),
        "revision": env!("DOVETAIL_COMMIT"),
        "arrow": "59.3",
        "started": time(shared.started),
        "devices": devices(shared),
        "strategies": planner::Strategy::ALL.map(planner::Strategy::name),
        "host_memory_bytes": arena.budget().limit_bytes(),
        "host_memory_used_bytes": arena.budget().used_bytes(),
        "host_memory": human_bytes(arena.budget().limit_bytes()),
        "message_limit_bytes": shared.limits.message_bytes,
        "upload_limit": shared.limits.uploads.under_way,
        "endpoints": shared.limits.endpoints_max(),
        "retain_seconds": shared.limits.retain.as_secs(),
        "retain_seconds_max": shared.limits.retain_seconds_max,
        "ticket_seconds": shared.limits.ticket_life.as_secs(),
        "locations": shared.limits.locations,
        "needs_token": shared.credentials.authenticator().needs_token(),
        "last_reload": reload.as_ref().map(|reload| time(reload.at)),
        "last_reload_failed": reload.as_ref().map(|reload| reload.has_failed),
        "session_options": super::sessions::OPTIONS.map(|(name, _)| name),
    })
}

/// Writes a time as RFC 3339 in UTC, to the millisecond.
pub fn time(time: SystemTime) -> String {
    humantime::format_rfc3339_millis(time).to_string()
}
