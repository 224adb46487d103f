//! Opens the parts of a server from its settings.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use rustls_pki_types::CertificateDer;
use rustls_pki_types::pem::PemObject;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tonic::transport::{Certificate, Identity, ServerTlsConfig};

use crate::catalog::{Catalog, Uploads, UploadsLimits};
use crate::engine::{self, Engine};
use crate::human::file_failure;
use crate::memory::{Arena, Budget};
use crate::scheduler::{Scheduler, SchedulerOptions};
use crate::service::auth::Authenticator;
use crate::service::cpu_work::CpuWork;
use crate::service::deliveries::Deliveries;
use crate::service::metrics::Metrics;
use crate::service::readers::Readers;
use crate::service::sessions::Sessions;
use crate::service::settings::Settings;
use crate::service::shared::{Limits, Shared, tenant_limits};
use crate::service::tickets::Tickets;
use crate::service::transfers::Transfers;
use crate::service::{certificate, incoming};
use crate::topology::Topology;
use crate::{Context, Error, Result};

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
    authenticator: Authenticator,
    catalog: Catalog,
    topology: Topology,
    devices: Vec<Box<dyn Engine>>,
}

pub(super) fn parts(settings: &Settings) -> Result<Parts> {
    let limits = Limits::new(settings)?;
    let authenticator = match &settings.token_file {
        Some(path) => Authenticator::from_file(path)?,
        None => Authenticator::open(),
    };
    let authenticator = authenticator.with_certificates(settings.tls_client_ca.is_some())?;
    let host_memory_bytes = engine::host_memory_bytes(&settings.host_memory)?;
    let of_devices = settings.of_devices();
    of_devices.test_options.clone().set();
    let topology = engine::topology(&of_devices)?;
    let budget = Budget::new("host memory", "the server's --host-memory", host_memory_bytes);
    let arena = Arena::with_backing(budget, engine::arena_backing(&of_devices, &topology, host_memory_bytes)?);
    // The memory of the GPUs is not known yet, and bounds the setting no further.
    engine::prefault_bytes(&settings.prefault, host_memory_bytes, 0)?;
    let catalog = Catalog::with_limits(arena, tenant_limits(settings)?);
    let devices = engine::open_devices(&of_devices, &topology, catalog.arena())?;
    Ok(Parts { limits, authenticator, catalog, topology, devices })
}

/// Opens the shared state of a server. `tell` receives the finished share of measuring the devices,
/// the slow part.
pub(super) fn open(settings: &Settings, tell: &dyn Fn(f64)) -> Result<Shared> {
    let Parts { limits, authenticator, catalog, topology, mut devices } = parts(settings)?;
    let uploads_limits = UploadsLimits { under_way: limits.uploads, idle: limits.upload_idle };
    let uploads = Uploads::new(catalog.clone(), uploads_limits);
    let of_devices = settings.of_devices();
    tracing::info!("{}", engine::gpus_used(&of_devices, &devices));
    engine::set_rates(&of_devices, &topology, &mut devices, tell);
    let devices: Vec<Arc<dyn Engine>> = devices.into_iter().map(Arc::from).collect();
    let options = SchedulerOptions {
        queue_limit: settings.queue_limit,
        tenant_jobs: settings.tenant_jobs,
        jobs_per_device: settings.jobs_per_device,
        memory_wait: Duration::from_secs(settings.memory_wait_seconds),
        retain: limits.retain,
        ..SchedulerOptions::default()
    };
    let scheduler = Scheduler::new(catalog.clone(), devices.clone(), options);
    for caller in authenticator.tenants() {
        scheduler.set_weight(&caller.tenant, caller.weight)?;
    }
    Ok(Shared {
        catalog,
        scheduler,
        topology,
        devices,
        limits,
        authenticator,
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
        readers: Readers::default(),
        transfers: Transfers::default(),
    })
}

/// Returns the error for files that TLS cannot use, although they contain PEM blocks of the right
/// kinds.
pub(super) fn unusable_tls(settings: &Settings, error: &tonic::transport::Error) -> Error {
    let mut cause: &dyn std::error::Error = error;
    while let Some(source) = cause.source() {
        cause = source;
    }
    let cause = cause.to_string();
    if cause.contains("UnsupportedCertVersion") {
        return Error::Invalid(
            "the certificate of --tls-cert is of version 1 of X.509, which clients do not accept; make one of version 3, which has \
             extensions, as with: openssl req -x509 ... -addext subjectAltName=DNS:HOST -addext \
             basicConstraints=critical,CA:FALSE"
                .into(),
        );
    }
    let file = |path: &Option<PathBuf>| path.as_deref().unwrap_or(Path::new("")).display().to_string();
    let (cert, key) = (file(&settings.tls_cert), file(&settings.tls_key));
    if cause.contains("KeyMismatch") {
        return Error::Invalid(format!(
            "--tls-key names {key}, which is not the private key of the certificate in {cert}, which --tls-cert names; the first \
             certificate of the chain must be the one that was made for that key"
        ));
    }
    // TLS skips certificates that it cannot read, and only reports that none is left.
    if cause.contains("no root trust anchors") {
        return Error::Invalid(format!(
            "--tls-client-ca names {}, which holds no certificate of an authority that TLS can read",
            file(&settings.tls_client_ca)
        ));
    }
    Error::Invalid(format!(
        "the certificate in {cert}, which --tls-cert names, cannot be used with the private key in {key}, which --tls-key names: \
         {cause}"
    ))
}

/// Path and content of a file.
type NamedFile<'a> = (&'a Path, &'a [u8]);

/// Kinds of PEM block: the end of the block's first line, and its name in messages.
const CERTIFICATE: (&str, &str) = ("CERTIFICATE-----", "a certificate");
const PRIVATE_KEY: (&str, &str) = ("PRIVATE KEY-----", "a private key");

fn has(pem: &[u8], what: (&str, &str)) -> bool {
    let text = String::from_utf8_lossy(pem);
    text.lines().any(|line| line.starts_with("-----BEGIN ") && line.trim_end().ends_with(what.0))
}

/// Refuses a file without the `wanted` kind of PEM block. The error says if the file has the
/// `other` kind.
fn check_holds(flag: &str, (path, pem): NamedFile<'_>, wanted: (&str, &str), other: (&str, &str)) -> Result<()> {
    if has(pem, wanted) {
        return Ok(());
    }
    let held = if has(pem, other) { format!(", but {}", other.1) } else { String::new() };
    let wanted = wanted.1.trim_start_matches("a ");
    Err(Error::Invalid(format!("{flag} names {}, which holds no {wanted} in PEM{held}", path.display())))
}

/// Refuses swapped files, and files that are neither a certificate nor a key.
fn check_pem(cert: NamedFile<'_>, key: NamedFile<'_>) -> Result<()> {
    if has(cert.1, PRIVATE_KEY) && has(key.1, CERTIFICATE) && !(has(cert.1, CERTIFICATE) && has(key.1, PRIVATE_KEY)) {
        return Err(Error::Invalid(format!(
            "--tls-cert and --tls-key have each other's file: {} holds the private key, and {} the certificate",
            cert.0.display(),
            key.0.display()
        )));
    }
    check_holds("--tls-cert", cert, CERTIFICATE, PRIVATE_KEY)?;
    check_holds("--tls-key", key, PRIVATE_KEY, CERTIFICATE)
}

/// Reads the certificates of a file.
fn certificates(flag: &str, (path, pem): NamedFile<'_>) -> Result<Vec<CertificateDer<'static>>> {
    let read: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    read.map_err(|_| {
        Error::Invalid(format!(
            "{flag} names {}, in which a certificate is damaged or cut short; check that it was copied in whole",
            path.display()
        ))
    })
}

/// Describes the server's certificates that are out of date: TLS starts with them, but clients
/// refuse them.
fn out_of_date(path: &Path, certificates: &[CertificateDer<'_>]) -> Vec<String> {
    let now = SystemTime::now();
    let remarks = certificates.iter().enumerate().filter_map(|(at, certificate)| {
        let why = certificate::out_of_date(certificate, now)?;
        let which = match at {
            0 => "the certificate of the server".to_owned(),
            _ => format!("certificate {} of the server's chain", at + 1),
        };
        Some(format!(
            "{which}, in {}, {why}, and it is {} now: clients refuse it, so start the server with another",
            path.display(),
            humantime::format_rfc3339_seconds(now)
        ))
    });
    remarks.collect()
}

pub(super) async fn bind_admin(settings: &Settings) -> Result<Option<TcpListener>> {
    let Some(address) = parse_admin(settings)? else { return Ok(None) };
    let listener = TcpListener::bind(address).await;
    listener.map(Some).map_err(|error| incoming::cannot_listen(address, "--admin-listen", &error))
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

/// TLS configuration from the settings.
pub(super) struct Tls {
    pub(super) config: ServerTlsConfig,
    /// Warnings: faults that do not keep the server from starting.
    pub(super) remarks: Vec<String>,
}

pub(super) fn tls(settings: &Settings) -> Result<Option<Tls>> {
    let (cert, key) = match (&settings.tls_cert, &settings.tls_key) {
        (Some(cert), Some(key)) => (cert, key),
        (None, None) if settings.tls_client_ca.is_none() => return Ok(None),
        _ => return Err(Error::Invalid("TLS needs both --tls-cert and --tls-key".into())),
    };
    let read = |path: &Path| {
        let read = std::fs::read(path).map_err(|error| Error::Invalid(file_failure(path, &error)));
        read.context(|| format!("reading {}", path.display()))
    };
    let (cert_pem, key_pem) = (read(cert)?, read(key)?);
    check_pem((cert, &cert_pem), (key, &key_pem))?;
    let remarks = out_of_date(cert, &certificates("--tls-cert", (cert, &cert_pem))?);
    let mut config =
        ServerTlsConfig::new().identity(Identity::from_pem(cert_pem, key_pem)).timeout(Duration::from_secs(10));
    if let Some(authority) = &settings.tls_client_ca {
        let pem = read(authority)?;
        check_holds("--tls-client-ca", (authority, &pem), CERTIFICATE, PRIVATE_KEY)?;
        certificates("--tls-client-ca", (authority, &pem))?;
        config = config.client_ca_root(Certificate::from_pem(pem));
    }
    Ok(Some(Tls { config, remarks }))
}
