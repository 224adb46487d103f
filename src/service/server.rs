//! Server lifecycle: start, serve, drain.
//!
//! ```text
//!   start   settings ─► arena, catalog, devices, scheduler ─► listeners ─► ready
//!   drain   signal ─► not ready, no new work ─► jobs end, results read ─► connections close
//!                                               └ at most drain_seconds; second signal: at once ┘
//! ```
//!
//! A drain waits for admitted jobs, and for uploads and calls under way. It also waits for results
//! that a client reads or has just asked for ([`readers`](super::readers)). It drops other results
//! at once, because only their lease keeps them.

mod opening;

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant, SystemTime};

use arrow_flight::flight_service_server::FlightServiceServer;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio::time::MissedTickBehavior;
use tonic::codec::CompressionEncoding;
use tonic::service::Routes;
use tonic_health::server::HealthReporter;
use tower::Layer;

use opening::{bind_admin, open, parse_admin, parts, refuse_unsafe};

use super::access::{CallLayer, REQUEST_BYTES_MAX};
use super::connections::{FlightPort, TimeLimits};
use super::credentials::LOOK_INTERVAL;
use super::do_get::DoGetLayer;
use super::flight::Flight;
use super::ingest::{DoPutLayer, UploadHandler};
use super::readers::FETCHED_WITHIN;
use super::settings::Settings;
use super::shared::Shared;
use super::table_upload::TableUploads;
use super::windows::Windows;
use super::{admin, health, incoming};
use crate::memory::{BackgroundGrowth, human_bytes};
use crate::{Error, Result, engine, human};

/// Memory that is kept mapped ahead of need, in bytes. It covers a fraction of a second of an
/// upload at 3 GB/s, during which the next slab gets its pages. [`GROWN_AHEAD_SHARE`] limits it on
/// small hosts.
const GROWN_AHEAD_BYTES: u64 = 512 << 20;

/// Limits [`GROWN_AHEAD_BYTES`] to the host memory divided by this number.
const GROWN_AHEAD_SHARE: u64 = 16;

/// Time between checks whether a draining server is done.
const DRAIN_INTERVAL: Duration = Duration::from_millis(50);

/// Time between sweeps of expired entries.
const SWEEP_INTERVAL: Duration = Duration::from_secs(1);

/// Time that an ending server waits until its last statuses are sent. It is longer than a round
/// trip, and too short for an operator to notice.
const LAST_WORDS: Duration = Duration::from_millis(300);

/// A running server. Dropping it ends it at once.
#[derive(Debug)]
pub struct Server {
    shared: Arc<Shared>,
    flight_address: SocketAddr,
    admin_address: Option<SocketAddr>,
    drain_limit: Duration,
    reporter: HealthReporter,
    serving: JoinHandle<Result<()>>,
    background: Vec<JoinHandle<()>>,
    growing: BackgroundGrowth,
}

impl Server {
    /// Starts a server. It takes calls when this returns.
    ///
    /// # Errors
    /// [`Error::Invalid`] for settings that contradict each other or are unsafe;
    /// [`Error::Unavailable`] for addresses that cannot be listened on.
    pub async fn start(settings: &Settings) -> Result<Self> {
        Self::start_telling(settings, &|_| ()).await
    }

    /// Starts a server like [`Server::start`], and reports progress. `tell` receives the finished
    /// share of measuring the devices, which takes a second or two.
    ///
    /// # Errors
    /// As [`Server::start`].
    pub async fn start_telling(settings: &Settings, tell: &(dyn Fn(f64) + Sync)) -> Result<Self> {
        refuse_unsafe(settings)?;
        incoming::can_listen(settings.listen, "--listen")?;
        let admin = parse_admin(settings)?;
        admin.map_or(Ok(()), |address| incoming::can_listen(address, "--admin-listen"))?;
        let shared = Arc::new(open(settings, tell)?);
        let arena = shared.catalog.arena();
        let gpus_bytes = engine::gpus_bytes(shared.devices.iter().map(|device| &**device));
        let prefault_bytes = engine::prefault_bytes(&settings.prefault, arena.budget().limit_bytes(), gpus_bytes)?;
        let growing = arena.grow_ahead(GROWN_AHEAD_BYTES.min(arena.budget().limit_bytes() / GROWN_AHEAD_SHARE));
        let listener = incoming::listen(settings.listen, "--listen").await?;
        let flight_address = listener.local_addr()?;
        let windows = Windows::new(shared.call_memory.whole().limit_bytes());
        let admin = bind_admin(settings).await?;
        let admin_address = admin.as_ref().map(TcpListener::local_addr).transpose()?;

        let (reporter, health_service) = tonic_health::server::health_reporter();
        let reflected = |error| health::reflection_error(&error);
        let reflection = health::reflection().build_v1().map_err(reflected)?;
        let reflection_alpha = health::reflection().build_v1alpha().map_err(reflected)?;
        // Responses are not limited here, because clients limit what they accept. The server's
        // messages are small (see `encode`).
        let uploads: Arc<dyn UploadHandler> = Arc::new(TableUploads::new(shared.clone()));
        let (limits, cpu_work) = (shared.limits.of_uploads(), shared.cpu_work.clone());
        let do_put = DoPutLayer::new(uploads.clone(), shared.catalog.arena().clone(), limits, cpu_work);
        let flight = FlightServiceServer::new(Flight::new(shared.clone(), uploads))
            // The layer around all calls decompresses messages. These are named to clients that use
            // another compression.
            .accept_compressed(CompressionEncoding::Gzip)
            .accept_compressed(CompressionEncoding::Zstd)
            // Layers in front take uploads and limit all other messages.
            .max_decoding_message_size(REQUEST_BYTES_MAX as usize)
            .max_encoding_message_size(usize::MAX);
        shared.credentials.remarks().iter().for_each(|remark| tracing::warn!("{remark}"));
        let routes = Routes::new(DoGetLayer::new(shared.clone()).layer(do_put.layer(flight)))
            .add_service(health_service)
            .add_service(reflection)
            .add_service(reflection_alpha)
            .prepare();
        let service = CallLayer::new(shared.clone()).layer(routes);
        let flight_port = FlightPort::new(shared.clone(), service, settings, windows);
        health::set_ready(&reporter, true).await;
        health::set_alive(&reporter).await;

        let serving = tokio::spawn(async move {
            flight_port.serve(listener).await;
            Ok(())
        });
        let mut background = vec![tokio::spawn(sweep(shared.clone(), reporter.clone()))];
        if shared.credentials.has_files() {
            background.push(tokio::spawn(watch_files(shared.clone())));
        }
        if let Some(listener) = admin {
            // The admin port stays open while calls end, so that probes see the drain.
            let head_limit = TimeLimits::new(settings).handshake;
            background.push(tokio::spawn(admin::serve(listener, shared.clone(), head_limit)));
        }
        let drain_limit = Duration::from_secs(settings.drain_seconds);
        tracing::info!(
            version = env!("CARGO_PKG_VERSION"),
            revision = env!("DOVETAIL_COMMIT"),
            flight = %flight_address,
            admin = admin_address.map(|address| address.to_string()),
            devices = shared.topology.devices.iter().map(|device| device.name.as_str()).collect::<Vec<_>>().join(","),
            host_memory = human_bytes(shared.catalog.arena().budget().limit_bytes()),
            slabs = shared.catalog.arena().backing().describe(),
            "serving"
        );
        growing.prepare(prefault_bytes);
        Ok(Self { shared, flight_address, admin_address, drain_limit, reporter, serving, background, growing })
    }

    /// Checks settings without listening: allowed values, contradictions, and the content of the
    /// files that they name. Opens the devices and closes them again. Returns warnings: faults that
    /// do not keep the server from starting.
    ///
    /// # Errors
    /// As [`Server::start`].
    pub fn check(settings: &Settings) -> Result<Vec<String>> {
        refuse_unsafe(settings)?;
        let parts = parts(settings)?;
        parse_admin(settings)?;
        Ok(parts.credentials.remarks())
    }

    /// Returns the address of the Flight service, with the port that it listens on.
    pub fn flight_address(&self) -> SocketAddr {
        self.flight_address
    }

    /// Returns the address of the admin port, if there is one.
    pub fn admin_address(&self) -> Option<SocketAddr> {
        self.admin_address
    }

    /// Returns the state that the server's calls share: its catalog, scheduler and counters.
    pub fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// Serves until `drain` is ready, then ends in two steps. First, admitted work is served as
    /// before, over new connections too: clients poll, fetch and commit. This step lasts while jobs
    /// run, uploads are under way, or a client is expected to fetch a result. Then connections
    /// close as their calls end. Both steps end after `drain_seconds` in all, at the latest, or
    /// when `end` is ready.
    ///
    /// # Errors
    /// When the listener broke off.
    pub async fn serve_until(mut self, drain: impl Future<Output = ()>, end: impl Future<Output = ()>) -> Result<()> {
        tokio::select! {
            outcome = &mut self.serving => return joined(outcome),
            () = drain => (),
        }
        self.shared.draining.store(true, Ordering::Release);
        self.shared.scheduler.drain();
        self.growing.stop_preparing();
        health::set_ready(&self.reporter, false).await;
        let left = self.shared.work_left();
        tracing::info!(
            waiting_for = left,
            seconds_max = self.drain_limit.as_secs(),
            "draining: new work is refused, and a second signal ends the work in progress"
        );
        let limit = tokio::time::sleep(self.drain_limit);
        let outcome = tokio::select! {
            biased;
            () = end => {
                tracing::warn!("second signal: ending the work in progress");
                Ok(())
            }
            outcome = close_when_done(&self.shared, &mut self.serving) => outcome,
            // The transport may wait for connections for ever (a peer that never closes), so the
            // server limits the wait.
            () = limit => {
                let left = self.shared.work_left().unwrap_or_else(|| "connections".into());
                tracing::warn!(seconds = self.drain_limit.as_secs(), "the drain limit has passed: ending {left}");
                Ok(())
            }
        };
        self.end_calls();
        if !self.serving.is_finished() {
            // Clients that still read receive the status that ends their calls.
            let _ = tokio::time::timeout(LAST_WORDS, &mut self.serving).await;
        }
        outcome
    }

    /// Ends all calls that are still under way, with a status.
    fn end_calls(&self) {
        self.shared.draining.store(true, Ordering::Release);
        self.growing.stop_preparing();
        self.shared.closing.cancel();
        self.shared.ended.cancel();
        self.shared.scheduler.abort_all("the server is shutting down");
    }

    /// Ends the server at once.
    fn end(&self) {
        self.end_calls();
        self.serving.abort();
        for task in &self.background {
            task.abort();
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.end();
    }
}

/// Waits until no admitted work is left, and then until the connections are closed.
async fn close_when_done(shared: &Shared, serving: &mut JoinHandle<Result<()>>) -> Result<()> {
    let mut looks = tokio::time::interval(DRAIN_INTERVAL);
    while shared.work_left().is_some() {
        tokio::select! {
            outcome = &mut *serving => return joined(outcome),
            _ = looks.tick() => (),
        }
    }
    let unclaimed = shared.unclaimed_results();
    if unclaimed > 0 {
        let results = human::counted_as(unclaimed as u64, "result that no client", "results that no client");
        tracing::info!("dropping {results} has asked for within {} s", FETCHED_WITHIN.as_secs());
    }
    tracing::info!("no work is left: closing connections");
    shared.closing.cancel();
    joined(serving.await)
}

fn joined(outcome: Result<Result<()>, tokio::task::JoinError>) -> Result<()> {
    outcome.unwrap_or_else(|error| Err(Error::Internal(format!("the listener's task ended: {error}"))))
}

/// Reads the token file and the certificates again when they change.
async fn watch_files(shared: Arc<Shared>) {
    let mut looks = tokio::time::interval(LOOK_INTERVAL);
    looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        looks.tick().await;
        let shared = shared.clone();
        // A file system over a network may take long. A panic is logged.
        let _ = tokio::task::spawn_blocking(move || shared.credentials.look(&shared.scheduler)).await;
    }
}

/// Drops expired entries. It takes long if they have many rows.
fn drop_expired(shared: &Shared) {
    shared.sessions.sweep();
    shared.deliveries.sweep(&shared.scheduler);
    shared.readers.sweep(&shared.scheduler);
    shared.transfers.sweep(&shared.scheduler);
    for (owner, id) in shared.uploads.forget_idle(Instant::now()) {
        tracing::info!(tenant = owner, upload = id, "no rows arrived for the upload, so it is dropped");
    }
    for table in shared.catalog.drop_expired(SystemTime::now()) {
        tracing::info!(tenant = table.owner, table = table.name, "the time of a temporary table is over");
    }
}

/// Drops expired entries, and reports to the health service when the server becomes ready or not
/// ready.
async fn sweep(shared: Arc<Shared>, reporter: HealthReporter) {
    let mut ticks = tokio::time::interval(SWEEP_INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut was_ready = true;
    loop {
        ticks.tick().await;
        let of_sweep = shared.clone();
        // A panic is logged.
        let _ = tokio::task::spawn_blocking(move || drop_expired(&of_sweep)).await;
        let readiness = shared.readiness();
        if readiness.is_ok() != was_ready {
            was_ready = readiness.is_ok();
            health::set_ready(&reporter, was_ready).await;
            if let Err(why) = readiness {
                tracing::warn!("not ready: {why}");
            }
        }
    }
}
