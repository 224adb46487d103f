//! Traces: the joins that a server was asked to run, one JSON line each, for the simulator.

use std::fs::OpenOptions;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use super::job::Job;
use super::job_options::DeviceRequest;
use crate::columns::Role;
use crate::human::file_failure;
use crate::lines::Lines;
use crate::planner::{Distribution, JoinKind, Plan, Side};
use crate::{Error, Result};

/// Join of a trace: its time, its submitter, and the sizes that a plan depends on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TracedJob {
    /// Seconds since any moment that all lines share. A server writes those since 1970.
    pub at: f64,
    /// Empty for anonymous callers.
    #[serde(default)]
    pub tenant: String,
    /// Number of the client: of its connection, in the line of a server. `None` if it is not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub client: Option<u64>,
    /// Share of the tenant relative to others.
    #[serde(default = "one")]
    pub weight: f64,
    #[serde(default)]
    pub priority: i32,
    #[serde(default = "inner")]
    pub how: String,
    pub left: TracedTable,
    pub right: TracedTable,
    /// True if rows are only counted. Otherwise the result has all columns of the trace.
    #[serde(default)]
    pub count: bool,
    #[serde(default)]
    pub devices: TracedDevices,
    /// Division among several devices that the caller asked for: `broadcast` or `hash`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub distribution: Option<String>,
    /// Times of a join that completed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub measured: Option<TracedTimes>,
}

/// Times of a join on the server that wrote the trace.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TracedTimes {
    /// Seconds from the submission to the start.
    pub waited: f64,
    /// Seconds from the start to the end.
    pub ran: f64,
}

/// Side of a traced join, with the columns that the join reads.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TracedTable {
    pub rows: u64,
    /// Mean bytes of a value of each key column.
    pub key_bytes: Vec<f64>,
    /// Mean bytes of a value of each other column of the result.
    #[serde(default)]
    pub payload_bytes: Vec<f64>,
    /// Distinct keys; `None` if unknown.
    #[serde(default)]
    pub distinct: Option<f64>,
}

/// Devices that a traced join asked for: `"any"`, `"all"`, a number, or a list of names.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum TracedDevices {
    Word(DevicesWord),
    Count(usize),
    Named(Vec<String>),
}

/// Word for devices without a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DevicesWord {
    Any,
    All,
}

fn one() -> f64 {
    1.0
}

fn inner() -> String {
    JoinKind::Inner.name().into()
}

impl Default for TracedDevices {
    fn default() -> Self {
        Self::Word(DevicesWord::Any)
    }
}

impl From<&DeviceRequest> for TracedDevices {
    fn from(request: &DeviceRequest) -> Self {
        match request {
            DeviceRequest::Any => Self::Word(DevicesWord::Any),
            DeviceRequest::All => Self::Word(DevicesWord::All),
            DeviceRequest::Count(count) => Self::Count(*count),
            DeviceRequest::Named(names) => Self::Named(names.clone()),
        }
    }
}

impl From<&TracedDevices> for DeviceRequest {
    fn from(devices: &TracedDevices) -> Self {
        match devices {
            TracedDevices::Word(DevicesWord::Any) => Self::Any,
            TracedDevices::Word(DevicesWord::All) => Self::All,
            TracedDevices::Count(count) => Self::Count(*count),
            TracedDevices::Named(names) => Self::Named(names.clone()),
        }
    }
}

impl TracedJob {
    /// Describes a job at its submission by a client. Its tenant has the given weight.
    pub(super) fn of(job: &Job, weight: f64, client: Option<u64>) -> Self {
        let plan = &job.plan;
        Self {
            at: job.submitted.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64(),
            tenant: job.owner.clone(),
            client,
            weight,
            priority: job.options.priority,
            how: plan.join.how.name().into(),
            left: TracedTable::of(plan, Side::Left),
            right: TracedTable::of(plan, Side::Right),
            count: plan.join.counts_rows,
            devices: (&job.options.devices).into(),
            distribution: job.options.distribution.map(|asked| asked.name().into()),
            measured: None,
        }
    }

    /// Adds the times of a job that completed.
    pub(super) fn complete(&mut self, submitted: SystemTime, started: SystemTime, finished: SystemTime) {
        let seconds = |from, to: SystemTime| to.duration_since(from).unwrap_or_default().as_secs_f64();
        self.measured = Some(TracedTimes { waited: seconds(submitted, started), ran: seconds(started, finished) });
    }

    /// Reads a line.
    ///
    /// # Errors
    /// [`Error::Invalid`] with the reason.
    pub fn parse(line: &str) -> Result<Self> {
        let job: Self = serde_json::from_str(line).map_err(|error| Error::Invalid(error.to_string()))?;
        let is_positive = |value: f64| value.is_finite() && value > 0.0;
        if !job.at.is_finite() || !is_positive(job.weight) {
            return Err(Error::Invalid("\"at\" is a number, and \"weight\" is a number above 0".into()));
        }
        let is_time = |seconds: f64| seconds.is_finite() && seconds >= 0.0;
        if job.measured.is_some_and(|times| !is_time(times.waited) || !is_time(times.ran)) {
            return Err(Error::Invalid("\"waited\" and \"ran\" are numbers of seconds, 0 or more".into()));
        }
        let _: JoinKind = job.how.parse()?;
        let _: Option<Distribution> = job.distribution.as_deref().map(str::parse).transpose()?;
        let widths = |table: &TracedTable| table.key_bytes.iter().chain(&table.payload_bytes).copied().all(is_positive);
        let is_joined = job.left.key_bytes.len() == job.right.key_bytes.len() && !job.left.key_bytes.is_empty();
        if !is_joined || ![&job.left, &job.right].into_iter().all(widths) {
            return Err(Error::Invalid(
                "both sides have the same number of \"key_bytes\", at least one, and all widths are above 0".into(),
            ));
        }
        Ok(job)
    }
}

impl TracedTable {
    /// Describes a side of a plan.
    fn of(plan: &Plan, side: Side) -> Self {
        let (join, table) = (&plan.join, plan.join.table(side));
        let keys: Vec<usize> = join.keys.iter().map(|key| key.column(side)).collect();
        let mut payload = join.output_columns(side, plan.side(Role::Build));
        payload.retain(|column| !keys.contains(column));
        let distinct = match &keys[..] {
            [key] => table.statistics[*key].distinct,
            _ => None,
        };
        Self {
            rows: table.rows,
            key_bytes: join.mean_bytes(side, &keys),
            payload_bytes: join.mean_bytes(side, &payload),
            distinct,
        }
    }
}

/// File that a server appends the line of each job to. A slow file or a full disk delays no job:
/// lines that cannot be written are dropped, and a line says how many.
#[derive(Clone, Debug)]
pub struct JobTrace {
    lines: Arc<Lines>,
}

/// How long the end of a server waits for lines to be written.
const FLUSH_MAX: Duration = Duration::from_millis(500);

impl JobTrace {
    /// Opens a file, to append to it.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the file cannot be opened.
    pub fn open(path: &Path) -> Result<Self> {
        let opened = OpenOptions::new().create(true).append(true).open(path);
        let gap = |dropped| format!("{{\"dropped\":{dropped}}}\n");
        let lines = opened.and_then(|file| Lines::to(file, "job-trace", gap));
        let lines = lines.map_err(|error| {
            let why = file_failure(path, &error);
            Error::Invalid(format!("the server's --job-trace {}: {why}", path.display()))
        })?;
        Ok(Self { lines })
    }

    /// Adds the line of a job.
    pub(super) fn add(&self, job: &TracedJob) {
        if let Ok(line) = serde_json::to_string(job) {
            self.lines.offer(format!("{line}\n").into_bytes());
        }
    }

    /// Waits a moment until all lines are written.
    pub(super) fn settle(&self) {
        self.lines.settle(FLUSH_MAX);
    }
}
