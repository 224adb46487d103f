//! State that all calls of a server share.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime};

use tokio_util::sync::CancellationToken;

use super::auth::Caller;
use super::call_memory::CallMemory;
use super::cpu_work::CpuWork;
use super::credentials::Credentials;
use super::deliveries::Deliveries;
use super::incoming::ConnectionLimits;
use super::ingest;
use super::metrics::Metrics;
use super::readers::Readers;
use super::sessions::Sessions;
use super::settings::Settings;
use super::tickets::Tickets;
use super::transfers::Transfers;
use crate::catalog::{Catalog, TenantLimits, Uploads, UploadsLimits};
use crate::engine::Engine;
use crate::human;
use crate::memory::{Interrupt, check_at_least, parse_bytes};
use crate::scheduler::Scheduler;
use crate::topology::Topology;
use crate::{Context, Error, Result};

/// Maximum number of columns, jobs or arrays that are written or dropped inline: a tenth of a
/// millisecond of work.
const FEW: usize = 256;

/// State that all calls of a server share.
#[derive(Debug)]
pub struct Shared {
    pub catalog: Catalog,
    pub scheduler: Scheduler,
    pub topology: Topology,
    pub devices: Vec<Arc<dyn Engine>>,
    pub limits: Limits,
    pub credentials: Credentials,
    pub connections: Arc<ConnectionLimits>,
    pub tickets: Tickets,
    pub sessions: Sessions,
    pub metrics: Metrics,
    pub started: SystemTime,
    pub draining: AtomicBool,
    /// Cancelled when the work under way has ended, and connections close.
    pub closing: CancellationToken,
    /// Cancelled when calls that are still under way must end.
    pub ended: CancellationToken,
    pub uploads: Uploads,
    pub cpu_work: CpuWork,
    pub call_memory: CallMemory,
    pub deliveries: Deliveries,
    pub readers: Readers,
    pub transfers: Transfers,
}

impl Shared {
    /// Returns the worker for calls of `caller`.
    pub fn worker(self: &Arc<Self>, caller: &Caller) -> Worker {
        Worker { shared: self.clone(), cpu_work: self.cpu_work.of(&caller.tenant) }
    }
}

/// Runs the CPU work of a tenant's calls, with access to the state that the server's calls share.
#[derive(Clone)]
pub struct Worker {
    shared: Arc<Shared>,
    cpu_work: CpuWork,
}

impl Worker {
    /// Returns the slots of the tenant's calls.
    pub fn cpu_work(&self) -> &CpuWork {
        &self.cpu_work
    }

    /// Runs work like [`CpuWork::run`].
    ///
    /// # Errors
    /// As [`CpuWork::run`].
    pub async fn work<T, W>(&self, work: W) -> Result<T>
    where
        T: Send + 'static,
        W: FnOnce(&Shared, &Interrupt) -> Result<T> + Send + 'static,
    {
        let shared = self.shared.clone();
        self.cpu_work.run(move |interrupt| work(&shared, interrupt)).await
    }

    /// Runs work on `bytes` bytes like [`CpuWork::run_on`].
    ///
    /// # Errors
    /// As [`CpuWork::run`].
    pub async fn work_on_bytes<T, W>(&self, bytes: usize, work: W) -> Result<T>
    where
        T: Send + 'static,
        W: FnOnce(&Interrupt) -> Result<T> + Send + 'static,
    {
        self.cpu_work.run_on(bytes, work).await
    }

    /// Runs work like [`Worker::work`] on `count` columns, jobs or arrays. Work on few of them runs
    /// inline.
    ///
    /// # Errors
    /// As [`CpuWork::run`].
    pub async fn work_on<T, W>(&self, count: usize, work: W) -> Result<T>
    where
        T: Send + 'static,
        W: FnOnce(&Shared) -> Result<T> + Send + 'static,
    {
        match count <= FEW {
            true => work(&self.shared),
            false => self.work(|shared, _| work(shared)).await,
        }
    }
}

impl Shared {
    /// Reads the token file and the certificates again because of `cause`, which the log names.
    /// Replaces all of them, or none. Calls in progress go on. Returns the changes.
    ///
    /// # Errors
    /// [`Error::Invalid`] with the file that cannot be used, and why.
    pub fn reload(&self, cause: &str) -> Result<Vec<String>> {
        self.credentials.reload(cause, &self.scheduler)
    }
}

/// Returns the error for new work while the server drains.
pub(super) fn shutting_down() -> Error {
    Error::Unavailable("the server is shutting down; call another server, or this one later".into())
}

/// Parsed settings that calls use.
#[derive(Clone, Debug)]
pub struct Limits {
    pub message_bytes: usize,
    pub uploads: UploadsLimits,
    pub upload_idle: Duration,
    /// Endpoints of every result and table; `None`: as many as their bytes are worth.
    endpoints: Option<usize>,
    pub retain: Duration,
    /// Maximum of the seconds that a join may set for keeping its result.
    pub retain_seconds_max: u32,
    pub ticket_life: Duration,
    pub keep_alive: Duration,
    /// URIs from which clients may fetch; empty: the address of the request.
    pub locations: Vec<String>,
}

/// Bytes that are worth an endpoint of their own. A client takes about half a millisecond to open
/// another stream, and one to two to fetch these bytes over it.
const ENDPOINT_BYTES: u64 = 4 << 20;

/// Maximum number of endpoints, unless the settings say another number. On 16 cores, 8 streams
/// fetch 1.4 times as fast as 4. On two cores, they are no slower.
const ENDPOINTS_MAX: usize = 8;

/// Returns the number of endpoints that `bytes` are worth.
fn endpoints_worth(bytes: u64) -> usize {
    bytes.div_ceil(ENDPOINT_BYTES).clamp(1, ENDPOINTS_MAX as u64) as usize
}

impl Limits {
    /// Returns the number of endpoints of a result or table of `bytes`.
    pub fn endpoints(&self, bytes: u64) -> usize {
        self.endpoints.unwrap_or_else(|| endpoints_worth(bytes))
    }

    /// Returns the maximum number of endpoints of a result or table.
    pub fn endpoints_max(&self) -> usize {
        self.endpoints(u64::MAX)
    }

    /// Returns the limits of an upload.
    pub fn of_uploads(&self) -> ingest::Limits {
        ingest::Limits { message_bytes: self.message_bytes, idle: self.upload_idle }
    }

    /// Parses the limits from the settings.
    ///
    /// # Errors
    /// [`Error::Invalid`] with the setting that is wrong.
    pub fn new(settings: &Settings) -> Result<Self> {
        for location in &settings.public_locations {
            check_location(location)?;
        }
        let message_bytes = parse_bytes(&settings.message_limit).context(|| "--message-limit")?;
        // HTTP/2 and gRPC count message lengths in 32 bits.
        if !(1024..=u64::from(u32::MAX) / 2).contains(&message_bytes) {
            return Err(Error::Invalid(format!(
                "--message-limit is {}; it must be from 1KiB to 2GiB less one byte",
                settings.message_limit
            )));
        }
        for (flag, is_zero, what) in [
            ("--queue-limit", settings.queue_limit == 0, "no join would ever run"),
            ("--jobs-per-device", settings.jobs_per_device == 0, "no join would ever run"),
            ("--connection-limit", settings.connection_limit == Some(0), "no client would ever be answered"),
            (
                "--address-connection-limit",
                settings.address_connection_limit == Some(0),
                "no client would ever be answered",
            ),
            ("--stream-limit", settings.stream_limit == 0, "no client would ever be answered"),
            ("--upload-limit", settings.upload_limit == 0, "no upload would ever be accepted"),
            ("--ticket-seconds", settings.ticket_seconds == 0, "no ticket would ever be valid"),
        ] {
            if is_zero {
                return Err(Error::Invalid(format!("{flag} is 0, so {what}; it must be at least 1")));
            }
        }
        if settings.retain_seconds > settings.retain_seconds_max {
            return Err(Error::Invalid(format!(
                "--retain-seconds is {} and --retain-seconds-max is {}; raise the second, or lower the first",
                settings.retain_seconds, settings.retain_seconds_max
            )));
        }
        if let Some(endpoints) = settings.endpoints.filter(|endpoints| !(1..=1024).contains(endpoints)) {
            return Err(Error::Invalid(format!("--endpoints is {endpoints}; it must be from 1 to 1024")));
        }
        let upload_idle = Duration::from_secs(settings.upload_idle_seconds.max(1));
        let of_tenant = tenant_share(settings, settings.tenant_uploads, settings.upload_limit);
        Ok(Self {
            message_bytes: message_bytes as usize,
            uploads: UploadsLimits { under_way: settings.upload_limit, of_tenant, idle: upload_idle },
            upload_idle,
            endpoints: settings.endpoints,
            retain: Duration::from_secs(settings.retain_seconds.into()),
            retain_seconds_max: settings.retain_seconds_max,
            ticket_life: Duration::from_secs(settings.ticket_seconds),
            keep_alive: Duration::from_secs(settings.keep_alive_seconds.max(1)),
            locations: settings.public_locations.clone(),
        })
    }
}

/// Divisor of what all tenants share. It gives the share that one tenant takes at most, by default:
/// no tenant can take all, and a busy tenant among idle ones still has much.
const TENANT_SHARE: usize = 2;

/// Returns the limit of each tenant, where all tenants together have at most `all`; `None` for no
/// limit.
pub(super) fn tenant_share(settings: &Settings, set: Option<usize>, all: usize) -> Option<usize> {
    match set {
        Some(limit) => (limit > 0).then_some(limit),
        None => settings.has_tenants().then_some(all.div_ceil(TENANT_SHARE)),
    }
}

/// Returns the limits on the holdings of each tenant.
///
/// # Errors
/// [`Error::Invalid`] with the setting that is wrong.
pub(super) fn tenant_limits(settings: &Settings, host_memory_bytes: u64) -> Result<TenantLimits> {
    let share = settings.has_tenants().then_some(host_memory_bytes / TENANT_SHARE as u64);
    Ok(TenantLimits {
        bytes: tenant_memory_bytes(&settings.tenant_memory)?,
        results_bytes: tenant_results_bytes(&settings.tenant_results, share)?,
        tables: (settings.tenant_tables > 0).then_some(settings.tenant_tables),
    })
}

/// Minimum memory limit of a tenant, in bytes, equal to the minimum of the host memory. A few
/// batches of a table and a few of a result fit into it.
const TENANT_MEMORY_MIN: u64 = 1 << 20;

/// Returns the bytes that a setting allows each tenant; `None` for no limit.
///
/// # Errors
/// [`Error::Invalid`] with the accepted forms; also when the size is less than the minimum.
pub fn tenant_memory_bytes(setting: &str) -> Result<Option<u64>> {
    tenant_bytes(setting).context(|| "--tenant-memory takes a size, or \"none\" for no limit")
}

/// Returns the bytes of results that a setting allows each tenant; `None` for no limit. `share` is
/// the value of "auto".
///
/// # Errors
/// As [`tenant_memory_bytes`].
pub fn tenant_results_bytes(setting: &str, share: Option<u64>) -> Result<Option<u64>> {
    match setting {
        "auto" => Ok(share),
        _ => tenant_bytes(setting).context(|| "--tenant-results takes a size, \"auto\", or \"none\" for no limit"),
    }
}

fn tenant_bytes(setting: &str) -> Result<Option<u64>> {
    if setting == "none" {
        return Ok(None);
    }
    let bytes = parse_bytes(setting);
    bytes.and_then(|bytes| check_at_least(setting, bytes, TENANT_MEMORY_MIN).map(|()| Some(bytes)))
}

/// Checks the form of a location. A location that no client can reach makes every fetch fail, with
/// an error that does not name the cause.
fn check_location(location: &str) -> Result<()> {
    let wrong = |why: &str| {
        Err(Error::Invalid(format!(
            "the public location {location:?} {why}; write a URI that clients reach, such as grpc://gpu-host-1:8815"
        )))
    };
    let Some((scheme, rest)) = location.split_once("://") else { return wrong("has no scheme") };
    let schemes = ["grpc", "grpc+tcp", "grpc+tls"];
    if !schemes.contains(&scheme) {
        return wrong("has a scheme other than grpc, grpc+tcp and grpc+tls");
    }
    let host = rest.rsplit_once(':').map_or(rest, |(host, _)| host);
    if host.is_empty() || host == "0.0.0.0" || host == "[::]" {
        return wrong("names every interface instead of a host");
    }
    Ok(())
}

impl Shared {
    /// True if new work is refused.
    pub fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Acquire)
    }

    /// Describes the work that keeps a draining server from closing its connections; `None` without
    /// such work.
    pub fn work_left(&self) -> Option<String> {
        let left = self.left();
        let parts = [
            (left.running, "job that waits or runs", "jobs that wait or run"),
            (left.awaited, "result that a client may fetch", "results that a client may fetch"),
            (self.uploads.under_way(), "upload", "uploads"),
            (self.cpu_work.calls(), "call in progress", "calls in progress"),
        ];
        let told = parts.into_iter().filter(|(count, ..)| *count > 0);
        let told = told.map(|(count, one, many)| human::counted_as(count as u64, one, many)).collect::<Vec<_>>();
        (!told.is_empty()).then(|| told.join(", "))
    }

    /// Returns the number of results that were not read in whole and that no client is expected to
    /// fetch. A draining server drops them.
    pub fn unclaimed_results(&self) -> usize {
        self.left().unclaimed
    }

    /// Counts the jobs whose output has not reached a client in whole.
    fn left(&self) -> JobsLeft {
        let mut left = JobsLeft::default();
        for job in self.scheduler.jobs().iter().filter(|job| !self.deliveries.is_settled(job)) {
            let count = match job.state().is_final() {
                false => &mut left.running,
                true if self.readers.are_expected(job) => &mut left.awaited,
                true => &mut left.unclaimed,
            };
            *count += 1;
        }
        left
    }

    /// Checks whether traffic should come here. The error is the reason why not.
    pub fn readiness(&self) -> Result<(), &'static str> {
        if self.is_draining() {
            return Err("draining");
        }
        match self.scheduler.stats().devices.iter().any(|device| device.lost.is_none()) {
            true => Ok(()),
            false => Err("no device is in service"),
        }
    }
}

/// Numbers of jobs.
#[derive(Debug, Default)]
struct JobsLeft {
    /// Jobs that wait or run.
    running: usize,
    /// Jobs that are over, and whose output a client is expected to fetch.
    awaited: usize,
    /// Jobs that are over, and whose output no client is expected to fetch.
    unclaimed: usize,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unreachable_locations_are_refused() {
        assert!(check_location("grpc://gpu-host-1:8815").is_ok());
        assert!(check_location("grpc+tls://[2001:db8::1]:8815").is_ok());
        for wrong in ["gpu-host-1:8815", "http://a:1", "grpc://0.0.0.0:8815", "grpc://[::]:8815", "grpc://:8815"] {
            assert!(check_location(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_few_rows_have_one_endpoint_and_many_have_several() {
        let mib = [0, 1, 4, 5, 8, 31, 33, u64::MAX >> 20].map(|mib| endpoints_worth(mib << 20));
        assert_eq!(mib, [1, 1, 1, 2, 2, 8, 8, 8]);
    }

    #[test]
    fn the_memory_limit_of_a_tenant_is_none_or_large_enough_to_work_with() {
        assert_eq!(tenant_memory_bytes("none"), Ok(None));
        assert_eq!(tenant_memory_bytes("5m"), Ok(Some(5 << 20)));
        let cases = [
            ("much", "\"much\" is not a size; write a number with"),
            ("1", "\"1\" is 1 B, and must not be less than 1.0 MiB; a number without a unit is bytes"),
            ("0.5", "did you mean 0.5GiB?"),
            ("0", "\"0\" is 0 B, and must not be less than 1.0 MiB"),
            ("64KiB", "64.0 KiB"),
        ];
        for (setting, expected) in cases {
            let refusal = tenant_memory_bytes(setting).unwrap_err();
            assert!(refusal.message().contains("--tenant-memory takes a size, or \"none\""), "{setting}: {refusal}");
            assert!(refusal.message().contains(expected), "{setting}: {refusal}");
            assert!(!refusal.message().contains(" 0GiB"), "{setting}: {refusal}");
        }
    }
}
