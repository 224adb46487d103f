//! Server settings: one documented line each, which the flags, the environment, the file and
//! `--print-config` share.

use std::net::SocketAddr;
use std::path::PathBuf;

/// All settings of the server. A flag wins over its environment variable (`DOVETAIL_` and the flag
/// in capitals). The variable wins over the line in the configuration file (the flag's name without
/// dashes in front), and that line wins over the default.
#[derive(Clone, Debug, clap::Args)]
pub struct Settings {
    /// Address and port of the Flight service; port 0 takes a free one
    #[arg(long, env = "DOVETAIL_LISTEN", default_value = "127.0.0.1:8815", value_parser = parse_address)]
    pub listen: SocketAddr,

    /// Address and port of metrics and health over HTTP; "off" for none. The port serves counters,
    /// with the names of tenants and devices, without TLS or tokens. An address other than loopback
    /// is refused, unless --listen's has TLS and knows its callers, or --insecure is set
    #[arg(long, env = "DOVETAIL_ADMIN_LISTEN", default_value = "127.0.0.1:8816")]
    pub admin_listen: String,

    /// URIs under which clients reach this server, put into endpoints so that clients open several
    /// connections
    #[arg(long, env = "DOVETAIL_PUBLIC_LOCATIONS", value_delimiter = ',')]
    pub public_locations: Vec<String>,

    /// Certificate chain of the server, PEM
    #[arg(long, env = "DOVETAIL_TLS_CERT")]
    pub tls_cert: Option<PathBuf>,

    /// Private key of the server, PEM
    #[arg(long, env = "DOVETAIL_TLS_KEY")]
    pub tls_key: Option<PathBuf>,

    /// Certificates of the authorities whose clients are admitted (mutual TLS), PEM. Without
    /// --token-file, each of those clients is a writer, and the common name of its certificate is
    /// its tenant
    #[arg(long, env = "DOVETAIL_TLS_CLIENT_CA")]
    pub tls_client_ca: Option<PathBuf>,

    /// File of callers: one "TOKEN TENANT ROLE [WEIGHT]" per line, ROLE one of reader, writer,
    /// admin; "cert:NAME" instead of TOKEN for a client certificate of that common name, DNS name
    /// or URI. All lines of a tenant have the same weight, 1 if omitted
    #[arg(long, env = "DOVETAIL_TOKEN_FILE")]
    pub token_file: Option<PathBuf>,

    /// Listen on a non-loopback address without TLS and tokens, and show metrics and health on one
    /// (--admin-listen): both are refused otherwise
    #[arg(long, env = "DOVETAIL_INSECURE")]
    pub insecure: bool,

    /// Host memory for tables and results: a size such as 64GiB, or a share of the memory this
    /// process may use
    #[arg(long, env = "DOVETAIL_HOST_MEMORY", default_value = "60%")]
    pub host_memory: String,

    /// Devices that joins run on: "cuda" for all GPUs, "cuda:N" for the first N, "host:N" for the
    /// CPU in N slices, GPUs and slices with a comma between ("cuda:1,host:1"), "auto" for the GPUs
    /// if there are any, else the CPU alone. With a mix, each join runs where it is predicted to
    /// finish first. A mix is for many small joins, which are quicker on the CPU, and keeps the
    /// server at work if a GPU is lost. It costs host memory for the CPU's work, and CPU: joins
    /// then take the threads that uploads, readers and the GPUs' own joins need
    #[arg(long, env = "DOVETAIL_DEVICES", default_value = "auto")]
    pub devices: String,

    /// Memory of each device: a size such as 64MiB, "auto", or one for each kind, such as
    /// "cuda=auto,host=8GiB". "auto" is all free memory of a GPU. Slices of the CPU share a quarter
    /// of --host-memory equally, in addition to it, or the memory that --host-memory leaves if that
    /// is less. Memory for slices of the CPU is refused if, with --host-memory, it is more than
    /// this process may use
    #[arg(long, env = "DOVETAIL_DEVICE_MEMORY", default_value = "auto")]
    pub device_memory: String,

    /// Memory of each device behind a link in which columns stay from join to join, while no job
    /// needs it: a size, or a share of the memory of the device; 0 keeps none
    #[arg(long, env = "DOVETAIL_DEVICE_CACHE", default_value = "50%")]
    pub device_cache: String,

    /// Process of its own for a device, so that a crash of the device ends no other: on (each
    /// device), off, or auto (each GPU, if there are several)
    #[arg(long, env = "DOVETAIL_DEVICE_PROCESSES", default_value = "auto")]
    pub device_processes: String,

    /// Seconds after which a device whose process has ended is opened anew in another process, the
    /// first time. Each further time in ten minutes takes twice as long, at most 300; 0 leaves the
    /// device out of service
    #[arg(long, env = "DOVETAIL_DEVICE_RESTART_SECONDS", default_value_t = 1)]
    pub device_restart_seconds: u64,

    /// Topology file (TOML): devices and links to emulate instead of those of the machine
    #[arg(long, env = "DOVETAIL_TOPOLOGY")]
    pub topology: Option<PathBuf>,

    /// File that keeps the measured rates of each model of device, so that later starts need not
    /// measure; "auto" for dovetail/rates.json in the user's cache folder ($XDG_CACHE_HOME, or
    /// ~/.cache), "none" to measure at each start
    #[arg(long, env = "DOVETAIL_RATES_FILE", default_value = "auto")]
    pub rates_file: String,

    /// Measure the devices' rates again, even if rates are kept
    #[arg(long, env = "DOVETAIL_RECALIBRATE")]
    pub recalibrate: bool,

    /// Largest message taken from a client
    #[arg(long, env = "DOVETAIL_MESSAGE_LIMIT", default_value = "256MiB")]
    pub message_limit: String,

    /// Concurrent streams on one connection
    #[arg(long, env = "DOVETAIL_STREAM_LIMIT", default_value_t = 256)]
    pub stream_limit: u32,

    /// Uploads under way at once
    #[arg(long, env = "DOVETAIL_UPLOAD_LIMIT", default_value_t = 256)]
    pub upload_limit: usize,

    /// Seconds without data after which an upload is given up with its rows
    #[arg(long, env = "DOVETAIL_UPLOAD_IDLE_SECONDS", default_value_t = 900)]
    pub upload_idle_seconds: u64,

    /// Jobs that may wait; more are refused
    #[arg(long, env = "DOVETAIL_QUEUE_LIMIT", default_value_t = 1000)]
    pub queue_limit: usize,

    /// Short joins that a device runs at a time, if it has threads and memory for each; a long join
    /// has the device alone
    #[arg(long, env = "DOVETAIL_JOBS_PER_DEVICE", default_value_t = 4)]
    pub jobs_per_device: usize,

    /// Seconds that a job waits for host memory, once its turn has come, before it fails
    #[arg(long, env = "DOVETAIL_MEMORY_WAIT_SECONDS", default_value_t = 300)]
    pub memory_wait_seconds: u64,

    /// Seconds that a result is kept after it is complete, unless the join says otherwise or the
    /// lease is renewed
    #[arg(long, env = "DOVETAIL_RETAIN_SECONDS", default_value_t = 300)]
    pub retain_seconds: u32,

    /// Endpoints of a result or table, which clients fetch in parallel
    #[arg(long, env = "DOVETAIL_ENDPOINTS", default_value_t = 4)]
    pub endpoints: usize,

    /// Seconds that a ticket is valid; RenewFlightEndpoint gives another
    #[arg(long, env = "DOVETAIL_TICKET_SECONDS", default_value_t = 86400)]
    pub ticket_seconds: u64,

    /// Seconds between empty batches on a stream that waits for its first rows
    #[arg(long, env = "DOVETAIL_KEEP_ALIVE_SECONDS", default_value_t = 20)]
    pub keep_alive_seconds: u64,

    /// Bytes of tables and results that one tenant may hold; "none" for no limit
    #[arg(long, env = "DOVETAIL_TENANT_MEMORY", default_value = "none")]
    pub tenant_memory: String,

    /// Tables that one tenant may hold; 0 for no limit
    #[arg(long, env = "DOVETAIL_TENANT_TABLES", default_value_t = 0)]
    pub tenant_tables: usize,

    /// Jobs that one tenant may have waiting or running; 0 for no limit
    #[arg(long, env = "DOVETAIL_TENANT_JOBS", default_value_t = 0)]
    pub tenant_jobs: usize,

    /// Seconds after the last call at which a session is forgotten
    #[arg(long, env = "DOVETAIL_SESSION_IDLE_SECONDS", default_value_t = 3600)]
    pub session_idle_seconds: u64,

    /// Seconds that a server may take to end after the first SIGTERM or SIGINT: for jobs, for calls
    /// and uploads under way, and for results that a client reads, or has asked for within 10 s.
    /// Other results are dropped at once. A second signal ends everything
    #[arg(long, env = "DOVETAIL_DRAIN_SECONDS", default_value_t = 30)]
    pub drain_seconds: u64,

    /// Form of the log: text or json
    #[arg(long, env = "DOVETAIL_LOG_FORMAT", default_value = "text", value_parser = ["text", "json"])]
    pub log_format: String,

    /// Log filter: off, error, warn, info, debug, trace, or a filter such as
    /// "info,dovetail::scheduler=debug". Each call is one line of dovetail::access at info. Health
    /// probes, and calls that only ask for the progress of a job, are lines of
    /// dovetail::access::poll unless they fail. "info,dovetail::access::poll=warn" leaves those
    /// lines out
    #[arg(long, env = "DOVETAIL_LOG", default_value = "info")]
    pub log: String,
}

/// Parses a numeric address. Host names are refused, because a name may stand for several
/// addresses.
fn parse_address(text: &str) -> Result<SocketAddr, String> {
    text.parse().map_err(|_| "write an IP address and a port, such as 127.0.0.1:8815 or [::1]:8815".into())
}
