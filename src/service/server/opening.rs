//! Opens the parts of a server from its settings.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use crate::catalog::{Catalog, Uploads};
use crate::device::DeviceKind;
use crate::doctor;
use crate::engine::{self, Engine};
use crate::memory::{Arena, Budget};
use crate::scheduler::{JobTrace, Scheduler, SchedulerOptions};
use crate::service::admin;
use crate::service::call_memory::{CallMemory, call_memory_bytes};
use crate::service::cpu_work::CpuWork;
use crate::service::credentials::Credentials;
use crate::service::deliveries::Deliveries;
use crate::service::incoming::{self, ConnectionLimits, OtherFiles};
use crate::service::metrics::Metrics;
use crate::service::readers::Readers;
use crate::service::sessions::Sessions;
use crate::service::settings::Settings;
use crate::service::shared::{Limits, Shared, tenant_limits, tenant_share};
use crate::service::tickets::Tickets;
use crate::service::transfers::Transfers;
use crate::topology::Topology;
use crate::{Error, Result};

/// Refuses settings that would admit strangers.
pub(super) fn refuse_unsafe(settings: &Settings) -> Result<()> {
    if settings.insecure {
        return Ok(());
    }
    let has_tls = settings.tls_cert.is_some() && settings.tls_key.is_some();
    let knows_callers = settings.token_file.is_some() || settings.tls_client_ca.is_some();
    if has_tls && knows_callers {
        return Ok(());
    }
    if !settings.listen.ip().is_loopback() {
        return Err(Error::Invalid(format!(
            "listening on {} would let every client on the network in: give --tls-cert and --tls-key, and --token-file or \
             --tls-client-ca; or listen on 127.0.0.1; or give --insecure if the network is yours alone",
            settings.listen
        )));
    }
    match parse_admin(settings)? {
        Some(admin) if !admin.ip().is_loopback() => Err(Error::Invalid(format!(
            "--admin-listen {admin} would show every client on the network the metrics of a server for this host alone: \
             give 127.0.0.1 or \"off\"; or give --insecure if the network is yours alone"
        ))),
        _ => Ok(()),
    }
}

/// Parts of a server that the settings describe, checked and opened. No device is measured and
/// nothing is started yet.
pub(super) struct Parts {
    limits: Limits,
    pub(super) credentials: Credentials,
    call_memory: CallMemory,
    catalog: Catalog,
    topology: Topology,
    devices: Vec<Box<dyn Engine>>,
    connections: ConnectionLimits,
}

pub(super) fn parts(settings: &Settings) -> Result<Parts> {
    let limits = Limits::new(settings)?;
    let credentials = Credentials::load(settings)?;
    let call_memory = CallMemory::new(call_memory_bytes(&settings.call_memory)?);
    let host_memory_bytes = engine::host_memory_bytes(&settings.host_memory)?;
    let of_devices = settings.of_devices();
    of_devices.test_options.clone().set();
    let topology = engine::topology(&of_devices)?;
    let budget = Budget::new("host memory", "the server's --host-memory", host_memory_bytes);
    let arena = Arena::with_backing(budget, engine::arena_backing(&of_devices, &topology, host_memory_bytes)?);
    // The memory of the GPUs is not known yet, and bounds the setting no further.
    engine::prefault_bytes(&settings.prefault, host_memory_bytes, 0)?;
    let catalog = Catalog::with_limits(arena, tenant_limits(settings, host_memory_bytes)?);
    let devices = engine::open_devices(&of_devices, &topology, catalog.arena())?;
    let other_files =
        OtherFiles { slabs: catalog.arena().open_files_max(), devices: devices.len(), admin: admin::CONNECTIONS_MAX };
    let connections = ConnectionLimits::new(settings, other_files)?;
    Ok(Parts { limits, credentials, call_memory, catalog, topology, devices, connections })
}

/// Opens the shared state of a server. `tell` receives the finished share of measuring the devices,
/// the slow part.
pub(super) fn open(settings: &Settings, tell: &dyn Fn(f64)) -> Result<Shared> {
    let Parts { limits, credentials, call_memory, catalog, topology, mut devices, connections } = parts(settings)?;
    let uploads = Uploads::new(catalog.clone(), limits.uploads);
    let of_devices = settings.of_devices();
    tracing::info!("{}", engine::gpus_used(&of_devices, &devices));
    // The arena has told of its memory. A server that asks for the CPU alone looks for no GPU.
    let rates_file = engine::rates_file(&of_devices.rates_file);
    let may_use_gpus =
        of_devices.devices == "auto" || devices.iter().any(|device| device.id().kind == DeviceKind::Cuda);
    let with_gpus = may_use_gpus && of_devices.topology.is_none();
    let facts = doctor::Facts::gather(Path::new("/"), rates_file.as_deref(), Ok(()), with_gpus);
    doctor::log_lines(&facts.findings()).iter().for_each(|line| tracing::warn!("{line}"));
    engine::set_rates(&of_devices, &topology, &mut devices, tell);
    let devices: Vec<Arc<dyn Engine>> = devices.into_iter().map(Arc::from).collect();
    let options = SchedulerOptions {
        queue_limit: settings.queue_limit,
        tenant_jobs: tenant_share(settings, settings.tenant_jobs, settings.queue_limit).unwrap_or(0),
        jobs_per_device: settings.jobs_per_device,
        memory_wait: Duration::from_secs(settings.memory_wait_seconds),
        retain: limits.retain,
        trace: settings.job_trace.as_deref().map(JobTrace::open).transpose()?,
        ..SchedulerOptions::default()
    };
    let scheduler = Scheduler::new(catalog.clone(), devices.clone(), options);
    for caller in credentials.authenticator().tenants() {
        scheduler.set_weight(&caller.tenant, caller.weight)?;
    }
    Ok(Shared {
        catalog,
        scheduler,
        topology,
        devices,
        limits,
        credentials,
        connections: Arc::new(connections),
        tickets: Tickets::default(),
        sessions: Sessions::new(Duration::from_secs(settings.session_idle_seconds)),
        metrics: Metrics::new(),
        started: SystemTime::now(),
        draining: false.into(),
        closing: CancellationToken::new(),
        deliveries: Deliveries::default(),
        ended: CancellationToken::new(),
        uploads,
        cpu_work: CpuWork::new(),
        call_memory,
        readers: Readers::default(),
        transfers: Transfers::default(),
    })
}

pub(super) async fn bind_admin(settings: &Settings) -> Result<Option<TcpListener>> {
    let Some(address) = parse_admin(settings)? else { return Ok(None) };
    incoming::listen(address, "--admin-listen").await.map(Some)
}

/// Parses the address of the admin port; `None` for no admin port.
pub(super) fn parse_admin(settings: &Settings) -> Result<Option<SocketAddr>> {
    if settings.admin_listen == "off" {
        return Ok(None);
    }
    settings.admin_listen.parse().map(Some).map_err(|_| {
        Error::Invalid(format!(
            "--admin-listen is {:?}; write an address and port such as 127.0.0.1:8816, or \"off\"",
            settings.admin_listen
        ))
    })
}
