//! Metrics in the Prometheus text form: cost of calls, use of memory, state of jobs.
//!
//! Names start with `dovetail_`, units are seconds and bytes. Counters are updated where the events
//! happen. Gauges are read from the other rooms at each scrape (`gauges.rs`). Labels never carry
//! names of tables or commands, because their number has no bound.

use std::time::Duration;

use parking_lot::Mutex;
use prometheus::{
    Counter, CounterVec, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry,
};
use tonic::Code;

use crate::scheduler::JobState;

/// Upper bounds of the call duration histogram, in seconds: from a listing to a long join.
const DURATION_BUCKETS: &[f64] = &[0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0];

/// Counters and gauges of one server.
#[derive(Debug)]
pub struct Metrics {
    pub(super) registry: Registry,
    pub(super) calls: IntCounterVec,
    pub(super) call_seconds: HistogramVec,
    pub(super) calls_in_flight: IntGauge,
    pub(super) connections: IntGauge,
    pub(super) connections_closed: IntCounterVec,
    pub(super) last_reload_seconds: IntGauge,
    pub(super) last_reload_failed: IntGauge,
    pub(super) received_bytes: IntCounterVec,
    pub(super) sent_bytes: IntCounterVec,
    /// Rows of uploads, acknowledged or not.
    pub received_rows: IntCounter,
    pub sent_rows: IntCounter,
    pub(super) arena_bytes: IntGaugeVec,
    pub(super) arena_info: IntGaugeVec,
    pub(super) call_memory_bytes: IntGaugeVec,
    pub(super) arena_wait_seconds: Counter,
    pub(super) device_memory_bytes: IntGaugeVec,
    pub(super) jobs: IntGaugeVec,
    pub(super) jobs_total: IntCounterVec,
    pub(super) job_wait_seconds: Counter,
    pub(super) result_rows: IntCounter,
    pub(super) result_bytes: IntCounter,
    pub(super) shared_questions: IntCounter,
    pub(super) queue_length: IntGauge,
    pub(super) device_up: IntGaugeVec,
    pub(super) device_restarts: IntCounterVec,
    pub(super) device_jobs: IntCounterVec,
    pub(super) device_cache: IntCounterVec,
    pub(super) device_cache_hit_bytes: IntCounterVec,
    pub(super) device_busy_seconds: CounterVec,
    pub(super) log_lines_dropped: IntCounterVec,
    /// Locked while counters of other components are copied. Otherwise two scrapes could add the
    /// same increment twice.
    pub(super) reading: Mutex<()>,
    pub(super) tables: IntGauge,
    pub(super) table_bytes: IntGauge,
    pub(super) sessions: IntGauge,
    pub(super) uploads: IntGauge,
    pub(super) cpu_work: IntGaugeVec,
    pub(super) cpu_work_interrupted: IntCounter,
    pub(super) tenant_bytes: IntGaugeVec,
    pub(super) tenant_connections: IntGaugeVec,
}

impl Metrics {
    /// Creates metrics that are all zero.
    ///
    /// # Panics
    /// When two metrics have one name: a mistake in this file.
    pub fn new() -> Self {
        let registry = Registry::new();
        let add = |metric: Box<dyn prometheus::core::Collector>| {
            registry.register(metric).expect("every metric has its own name");
        };
        let counters = |name: &str, help: &str, labels: &[&str]| {
            let metric =
                IntCounterVec::new(Opts::new(name, help), labels).expect("the name and labels are well-formed");
            add(Box::new(metric.clone()));
            metric
        };
        let counter = |name: &str, help: &str| {
            let metric = IntCounter::new(name, help).expect("the name is well-formed");
            add(Box::new(metric.clone()));
            metric
        };
        let gauges = |name: &str, help: &str, labels: &[&str]| {
            let metric = IntGaugeVec::new(Opts::new(name, help), labels).expect("the name and labels are well-formed");
            add(Box::new(metric.clone()));
            metric
        };
        let gauge = |name: &str, help: &str| {
            let metric = IntGauge::new(name, help).expect("the name is well-formed");
            add(Box::new(metric.clone()));
            metric
        };
        let seconds = |name: &str, help: &str| {
            let metric = Counter::new(name, help).expect("the name is well-formed");
            add(Box::new(metric.clone()));
            metric
        };
        let device_busy_seconds = CounterVec::new(
            Opts::new("dovetail_device_busy_seconds_total", "Time that a device was busy"),
            &["device"],
        )
        .expect("the name and labels are well-formed");
        add(Box::new(device_busy_seconds.clone()));
        let call_seconds = HistogramVec::new(
            HistogramOpts::new("dovetail_call_duration_seconds", "Duration of calls, up to their last byte")
                .buckets(DURATION_BUCKETS.to_vec()),
            &["rpc"],
        )
        .expect("the name and labels are well-formed");
        add(Box::new(call_seconds.clone()));
        gauges("dovetail_build_info", "Version and revision of the build; always 1", &["version", "revision"])
            .with_label_values(&[env!("CARGO_PKG_VERSION"), env!("DOVETAIL_COMMIT")])
            .set(1);

        Self {
            calls: counters("dovetail_calls_total", "Calls that ended, by RPC and status code", &["rpc", "code"]),
            call_seconds,
            calls_in_flight: gauge("dovetail_calls_in_flight", "Calls under way"),
            connections: gauge("dovetail_connections", "Open connections to the Flight port"),
            connections_closed: counters(
                "dovetail_connections_closed_total",
                "Connections that the server refused or closed, by reason: limit (of all), address_limit, replaced (by a \
                 newer one at the limit of all, before a tenant's call), tls_failed, tls_timeout, silent (no whole \
                 preface, head or answer to a ping in time), no_call (none accepted in time), idle, or admin_limit",
                &["reason"],
            ),
            last_reload_seconds: gauge(
                "dovetail_last_reload_timestamp_seconds",
                "Time of the last reload of tokens and certificates, in seconds since 1970; 0 before the first",
            ),
            last_reload_failed: gauge(
                "dovetail_last_reload_failed",
                "1 if the last reload failed, so that the previous tokens and certificates stay in use",
            ),
            received_bytes: counters("dovetail_received_bytes_total", "Bytes of request bodies", &["rpc"]),
            sent_bytes: counters("dovetail_sent_bytes_total", "Bytes of response bodies", &["rpc"]),
            received_rows: counter("dovetail_received_rows_total", "Rows uploaded"),
            sent_rows: counter("dovetail_sent_rows_total", "Rows sent"),
            arena_bytes: gauges(
                "dovetail_arena_bytes",
                "Host memory for tables and results: used, the most ever used, mapped from the system, to be mapped in \
                 advance (prefault), and the limit",
                &["kind"],
            ),
            arena_info: gauges(
                "dovetail_arena_info",
                "Kind of memory that host memory consists of, and the bytes of its pages; always 1",
                &["backing", "page_bytes"],
            ),
            call_memory_bytes: gauges(
                "dovetail_call_memory_bytes",
                "Memory of requests and of answers that are not sent yet: used, the most ever used, and the limit",
                &["kind"],
            ),
            arena_wait_seconds: seconds(
                "dovetail_arena_wait_seconds_total",
                "Time that joins and uploads waited for host memory to be mapped, over all their threads",
            ),
            device_memory_bytes: gauges(
                "dovetail_device_memory_bytes",
                "Memory of devices: used by jobs, kept for cached columns, the most ever taken by both, and the limit",
                &["device", "kind"],
            ),
            jobs: gauges(
                "dovetail_jobs",
                "Jobs that wait, run, or have a result that is not released yet, by state",
                &["state"],
            ),
            jobs_total: counters(
                "dovetail_jobs_total",
                "Jobs by outcome: submitted, refused, completed, failed or cancelled",
                &["outcome"],
            ),
            job_wait_seconds: seconds("dovetail_job_wait_seconds_total", "Time that jobs waited for a device"),
            result_rows: counter("dovetail_result_rows_total", "Rows of results"),
            result_bytes: counter("dovetail_result_bytes_total", "Bytes of results"),
            shared_questions: counter(
                "dovetail_shared_questions_total",
                "Questions of streams that were answered in one pass with others",
            ),
            queue_length: gauge("dovetail_queue_length", "Jobs that wait for a device"),
            device_up: gauges("dovetail_device_up", "1 while the device is in service", &["device"]),
            device_restarts: counters(
                "dovetail_device_restarts_total",
                "Times that a device was reopened in a new process, after its process had ended",
                &["device"],
            ),
            device_jobs: counters("dovetail_device_jobs_total", "Jobs that a device ran", &["device"]),
            device_busy_seconds,
            device_cache: counters(
                "dovetail_device_cache_columns_total",
                "Columns, or ranges of their rows, that a GPU had cached, had to copy, or evicted for others",
                &["device", "outcome"],
            ),
            device_cache_hit_bytes: counters(
                "dovetail_device_cache_hit_bytes_total",
                "Bytes that were not copied to a GPU, because it had cached them",
                &["device"],
            ),
            log_lines_dropped: counters(
                "dovetail_log_lines_dropped_total",
                "Lines for standard error or standard output that could not be written, by process: server or device",
                &["process"],
            ),
            reading: Mutex::default(),
            tables: gauge("dovetail_tables", "Tables"),
            table_bytes: gauge("dovetail_table_bytes", "Bytes of all tables"),
            cpu_work_interrupted: counter(
                "dovetail_cpu_work_interrupted_total",
                "CPU work outside the queue that was stopped, because its call was cancelled or had to end",
            ),
            sessions: gauge("dovetail_sessions", "Open sessions"),
            uploads: gauge("dovetail_uploads_under_way", "Uploads under way"),
            cpu_work: gauges(
                "dovetail_cpu_work",
                "CPU work outside the queue, such as planning: calls that wait for a slot or for their work, and slots in use",
                &["kind"],
            ),
            tenant_bytes: gauges(
                "dovetail_tenant_bytes",
                "Bytes of tables, uploads and results, by tenant",
                &["tenant"],
            ),
            tenant_connections: gauges(
                "dovetail_tenant_connections",
                "Open connections on which a call of the tenant was accepted",
                &["tenant"],
            ),
            registry,
        }
    }

    /// Counts a call that began.
    pub(super) fn call_started(&self) {
        self.calls_in_flight.inc();
    }

    /// Counts a call that ended.
    pub(super) fn call_ended(&self, rpc: &str, code: Code, duration: Duration, received: u64, sent: u64) {
        self.calls_in_flight.dec();
        self.calls.with_label_values(&[rpc, code_name(code)]).inc();
        self.call_seconds.with_label_values(&[rpc]).observe(duration.as_secs_f64());
        self.received_bytes.with_label_values(&[rpc]).inc_by(received);
        self.sent_bytes.with_label_values(&[rpc]).inc_by(sent);
    }
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}

/// Returns the state's name in metrics, JSON and logs.
pub fn state_name(state: &JobState) -> &'static str {
    match state {
        JobState::Queued => "queued",
        JobState::Running => "running",
        JobState::Complete => "complete",
        JobState::Failed(_) => "failed",
        JobState::Cancelled => "cancelled",
    }
}

/// Returns a status code's name, as the gRPC specification writes it.
pub(super) fn code_name(code: Code) -> &'static str {
    match code {
        Code::Ok => "OK",
        Code::Cancelled => "CANCELLED",
        Code::Unknown => "UNKNOWN",
        Code::InvalidArgument => "INVALID_ARGUMENT",
        Code::DeadlineExceeded => "DEADLINE_EXCEEDED",
        Code::NotFound => "NOT_FOUND",
        Code::AlreadyExists => "ALREADY_EXISTS",
        Code::PermissionDenied => "PERMISSION_DENIED",
        Code::ResourceExhausted => "RESOURCE_EXHAUSTED",
        Code::FailedPrecondition => "FAILED_PRECONDITION",
        Code::Aborted => "ABORTED",
        Code::OutOfRange => "OUT_OF_RANGE",
        Code::Unimplemented => "UNIMPLEMENTED",
        Code::Internal => "INTERNAL",
        Code::Unavailable => "UNAVAILABLE",
        Code::DataLoss => "DATA_LOSS",
        Code::Unauthenticated => "UNAUTHENTICATED",
    }
}

/// Returns the status code of the given name, the inverse of `code_name`.
pub(crate) fn code_named(name: &str) -> Option<Code> {
    const CODES: std::ops::RangeInclusive<i32> = Code::Ok as i32..=Code::Unauthenticated as i32;
    CODES.map(Code::from).find(|&code| code_name(code) == name)
}
