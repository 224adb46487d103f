//! Server settings: one documented line each, which the flags, the environment, the file and
//! `--print-config` share.

use std::net::SocketAddr;
use std::path::PathBuf;

use crate::device::TestOptions;
use crate::engine::DeviceSettings;

/// All settings of the server. A flag wins over its environment variable (`DOVETAIL_` and the flag
/// in capitals). The variable wins over the line in the configuration file (the flag's name without
/// dashes in front), and that line wins over the default.
#[derive(Clone, Debug, clap::Args)]
pub struct Settings {
    /// Address and port of the Flight service. Port 0 selects a free port
    #[arg(long, env = "DOVETAIL_LISTEN", default_value = "127.0.0.1:8815", value_parser = parse_address)]
    pub listen: SocketAddr,

    /// Address and port of metrics and health over HTTP, or "off". The port serves counters, with
    /// the names of tenants and devices, without TLS or tokens. An address other than loopback
    /// needs --insecure, or TLS and authentication on --listen
    #[arg(long, env = "DOVETAIL_ADMIN_LISTEN", default_value = "127.0.0.1:8816")]
    pub admin_listen: String,

    /// URIs at which clients reach this server, separated by commas. Endpoints list them, so that
    /// clients open several connections
    #[arg(long, env = "DOVETAIL_PUBLIC_LOCATIONS", value_delimiter = ',')]
    pub public_locations: Vec<String>,

    /// File with the certificate chain of the server, PEM. The server reads this file and those of
    /// the next three settings again when they change, and at SIGHUP
    #[arg(long, env = "DOVETAIL_TLS_CERT")]
    pub tls_cert: Option<PathBuf>,

    /// File with the private key of the server, PEM
    #[arg(long, env = "DOVETAIL_TLS_KEY")]
    pub tls_key: Option<PathBuf>,

    /// File with the certificates of the authorities whose clients are admitted (mutual TLS), PEM.
    /// Without --token-file, each of these clients has the role writer, and its tenant is the
    /// common name of its certificate
    #[arg(long, env = "DOVETAIL_TLS_CLIENT_CA")]
    pub tls_client_ca: Option<PathBuf>,

    /// File of callers, with one "TOKEN TENANT ROLE [WEIGHT]" per line. ROLE is reader, writer or
    /// admin. For a client certificate, write "cert:NAME" instead of TOKEN, with its common name,
    /// DNS name or URI. All lines of a tenant have the same WEIGHT, 1 by default. Clients may send
    /// the token as the password of any user name
    #[allow(rustdoc::broken_intra_doc_links)]
    #[arg(long, env = "DOVETAIL_TOKEN_FILE")]
    pub token_file: Option<PathBuf>,

    /// Allow an address other than loopback without TLS and tokens, for --listen and
    /// --admin-listen. The server refuses such an address by default
    #[arg(long, env = "DOVETAIL_INSECURE")]
    pub insecure: bool,

    /// Host memory for tables and results: a size such as 64GiB, or a percentage of the memory that
    /// this process may use
    #[arg(long, env = "DOVETAIL_HOST_MEMORY", default_value = "60%")]
    pub host_memory: String,

    /// Directory that host memory comes from: one in a tmpfs (mounted with huge=always) or a
    /// hugetlbfs, with room for --host-memory. "auto" mounts a tmpfs of the server's own, if the
    /// system allows it. If not, and for "none", host memory has no directory. With a process for
    /// each GPU, its pages are then small on most systems, and fresh memory takes about five times
    /// as long
    #[arg(long, env = "DOVETAIL_ARENA_DIRECTORY", default_value = "auto", value_name = "DIRECTORY")]
    pub arena_directory: String,

    /// Host memory to map and pin in advance, in the background after the start: "auto", "all",
    /// "none", a size, or a percentage of --host-memory. A join whose result finds no such memory
    /// takes several times as long on a GPU. "auto" is a quarter of --host-memory, or the memory of
    /// the GPUs if that is less. It is nothing without a GPU. Preparing stops when the process may
    /// use little more memory
    #[arg(long, env = "DOVETAIL_PREFAULT", default_value = "auto", value_name = "BYTES")]
    pub prefault: String,

    /// Devices that run joins: "cuda" for all GPUs, "cuda:N" for the first N GPUs, "host:N" for the
    /// CPU in N slices, or both with a comma between ("cuda:1,host:1"). "auto" uses all GPUs, or
    /// the CPU if there is no GPU. With GPUs and CPU slices, each join runs where it is predicted
    /// to finish first. Small joins are often faster on the CPU, and the server keeps working if a
    /// GPU is lost. This costs host memory, and joins on the CPU compete with uploads, readers and
    /// the GPUs' own joins
    #[arg(long, env = "DOVETAIL_DEVICES", default_value = "auto")]
    pub devices: String,

    /// Memory of each device: a size such as 64MiB, "auto", or one value for each kind, such as
    /// "cuda=auto,host=8GiB". For a GPU, "auto" is all its free memory. For the CPU, "auto" is a
    /// quarter of --host-memory in addition to it, or what --host-memory leaves free if that is
    /// less. All slices of the CPU share that memory equally. The server refuses a size for CPU
    /// slices that, with --host-memory, exceeds the memory that this process may use
    #[arg(long, env = "DOVETAIL_DEVICE_MEMORY", default_value = "auto")]
    pub device_memory: String,

    /// Memory of each GPU for columns that stay cached between joins, until a job needs the memory:
    /// a size, or a percentage of the memory of the device. 0 caches no columns
    #[arg(long, env = "DOVETAIL_DEVICE_CACHE", default_value = "50%")]
    pub device_cache: String,

    /// Separate process for each device, so that a crash affects one device only: "on" for each
    /// device, "off", or "auto" for each GPU if there are several
    #[arg(long, env = "DOVETAIL_DEVICE_PROCESSES", default_value = "auto")]
    pub device_processes: String,

    /// Seconds before the server restarts a device whose process has ended. Each further restart
    /// within ten minutes takes twice as long, at most 300 seconds. 0 leaves the device out of
    /// service
    #[arg(long, env = "DOVETAIL_DEVICE_RESTART_SECONDS", default_value_t = 1)]
    pub device_restart_seconds: u64,

    /// Seconds after which the server kills the process of a device that does not answer, for
    /// example because it is stopped. A busy process answers. 0 waits forever
    #[arg(long, env = "DOVETAIL_DEVICE_STALL_SECONDS", default_value_t = 10)]
    pub device_stall_seconds: u64,

    /// Topology file (TOML) with devices and links to emulate, instead of the devices of the
    /// machine
    #[arg(long, env = "DOVETAIL_TOPOLOGY")]
    pub topology: Option<PathBuf>,

    /// File that stores the measured rates of each model of device, so that later starts need not
    /// measure. "auto" is dovetail/rates.json in the user's cache folder ($XDG_CACHE_HOME, or
    /// ~/.cache). "none" measures at each start
    #[arg(long, env = "DOVETAIL_RATES_FILE", default_value = "auto")]
    pub rates_file: String,

    /// Measure the rates of the devices again, even if rates are stored
    #[arg(long, env = "DOVETAIL_RECALIBRATE")]
    pub recalibrate: bool,

    /// Maximum size of a message from a client
    #[arg(long, env = "DOVETAIL_MESSAGE_LIMIT", default_value = "256MiB")]
    pub message_limit: String,

    /// Memory of calls outside of tables and results: requests as they arrive, and answers that are
    /// not sent yet. A size, a percentage of the memory that this process may use, or "auto": a
    /// sixteenth of that memory, from 64MiB to 4GiB. A tenant has at most half of it, and a
    /// connection a quarter
    #[arg(long, env = "DOVETAIL_CALL_MEMORY", default_value = "auto", value_name = "BYTES")]
    pub call_memory: String,

    /// Maximum number of connections to --listen. The server closes more at once, or the oldest
    /// without an accepted call. By default 10,000, or as many as the limit of open files allows if
    /// that is less
    #[arg(long, env = "DOVETAIL_CONNECTION_LIMIT", value_name = "COUNT")]
    pub connection_limit: Option<usize>,

    /// Maximum number of connections to --listen from one client address, or from one /64 network
    /// of IPv6. By default a quarter of --connection-limit, and no limit for loopback addresses
    #[arg(long, env = "DOVETAIL_ADDRESS_CONNECTION_LIMIT", value_name = "COUNT")]
    pub address_connection_limit: Option<usize>,

    /// Maximum number of connections with calls of one tenant. By default, half of
    /// --connection-limit, or no limit without --token-file and --tls-client-ca. 0 is no limit
    #[arg(long, env = "DOVETAIL_TENANT_CONNECTIONS", value_name = "COUNT")]
    pub tenant_connections: Option<usize>,

    /// Seconds without a call after which the server closes a connection to --listen. Clients then
    /// connect again with their next call. 0 keeps connections open
    #[arg(long, env = "DOVETAIL_CONNECTION_IDLE_SECONDS", default_value_t = 900)]
    pub connection_idle_seconds: u64,

    /// Maximum number of concurrent streams on a connection
    #[arg(long, env = "DOVETAIL_STREAM_LIMIT", default_value_t = 256)]
    pub stream_limit: u32,

    /// Maximum number of concurrent uploads
    #[arg(long, env = "DOVETAIL_UPLOAD_LIMIT", default_value_t = 256)]
    pub upload_limit: usize,

    /// Maximum number of concurrent uploads of a tenant. By default, half of --upload-limit, or no
    /// limit without --token-file and --tls-client-ca. 0 is no limit
    #[arg(long, env = "DOVETAIL_TENANT_UPLOADS", value_name = "COUNT")]
    pub tenant_uploads: Option<usize>,

    /// Seconds without rows after which the server aborts an upload and discards its rows
    #[arg(long, env = "DOVETAIL_UPLOAD_IDLE_SECONDS", default_value_t = 900)]
    pub upload_idle_seconds: u64,

    /// Maximum number of queued jobs. The server refuses more
    #[arg(long, env = "DOVETAIL_QUEUE_LIMIT", default_value_t = 1000)]
    pub queue_limit: usize,

    /// Maximum number of short joins that a device runs at once, if it has threads and memory for
    /// each. A long join has the device alone
    #[arg(long, env = "DOVETAIL_JOBS_PER_DEVICE", default_value_t = 4)]
    pub jobs_per_device: usize,

    /// File to append a JSON line to for each join that has ended, for `dovetail-bench simulate`:
    /// times, tenant, connection, sizes of the tables and columns, and the devices asked for
    #[arg(long, env = "DOVETAIL_JOB_TRACE", value_name = "FILE")]
    pub job_trace: Option<PathBuf>,

    /// Seconds that a job waits for host memory after its turn has come, before it fails
    #[arg(long, env = "DOVETAIL_MEMORY_WAIT_SECONDS", default_value_t = 300)]
    pub memory_wait_seconds: u64,

    /// Seconds that the server keeps a complete result, unless the join sets another time or a
    /// client renews the lease
    #[arg(long, env = "DOVETAIL_RETAIN_SECONDS", default_value_t = 300)]
    pub retain_seconds: u32,

    /// Maximum of the seconds that a join may set for keeping its result
    #[arg(long, env = "DOVETAIL_RETAIN_SECONDS_MAX", default_value_t = 86400)]
    pub retain_seconds_max: u32,

    /// Endpoints of a result or table, which clients fetch in parallel. By default, one for each 4
    /// MiB of rows, as predicted if the join is not complete, and at most 8
    #[arg(long, env = "DOVETAIL_ENDPOINTS", value_name = "COUNT")]
    pub endpoints: Option<usize>,

    /// Seconds that a ticket is valid. RenewFlightEndpoint gives a new ticket
    #[arg(long, env = "DOVETAIL_TICKET_SECONDS", default_value_t = 86400)]
    pub ticket_seconds: u64,

    /// Seconds between empty batches on a stream that waits for its first rows
    #[arg(long, env = "DOVETAIL_KEEP_ALIVE_SECONDS", default_value_t = 20)]
    pub keep_alive_seconds: u64,

    /// Maximum memory of the tables and results of a tenant: a size such as 64GiB, or "none" for no
    /// limit
    #[arg(long, env = "DOVETAIL_TENANT_MEMORY", default_value = "none")]
    pub tenant_memory: String,

    /// Maximum memory of the results of a tenant, which also count towards --tenant-memory: a size
    /// such as 64GiB, or "none" for no limit. "auto" is half of the host memory, or no limit
    /// without --token-file and --tls-client-ca
    #[arg(long, env = "DOVETAIL_TENANT_RESULTS", default_value = "auto")]
    pub tenant_results: String,

    /// Maximum number of tables of a tenant. 0 is no limit
    #[arg(long, env = "DOVETAIL_TENANT_TABLES", default_value_t = 0)]
    pub tenant_tables: usize,

    /// Maximum number of queued and running jobs of a tenant. By default, half of --queue-limit, or
    /// no limit without --token-file and --tls-client-ca. 0 is no limit
    #[arg(long, env = "DOVETAIL_TENANT_JOBS", value_name = "COUNT")]
    pub tenant_jobs: Option<usize>,

    /// Seconds after its last call until the server forgets a session
    #[arg(long, env = "DOVETAIL_SESSION_IDLE_SECONDS", default_value_t = 3600)]
    pub session_idle_seconds: u64,

    /// Seconds that the server may take to end after the first SIGTERM or SIGINT. In this time it
    /// finishes jobs, calls, uploads, and results that a client reads or has requested within the
    /// last 10 s. It drops other results at once. A second signal ends the server at once
    #[arg(long, env = "DOVETAIL_DRAIN_SECONDS", default_value_t = 30)]
    pub drain_seconds: u64,

    /// Format of the log: text or json
    #[arg(long, env = "DOVETAIL_LOG_FORMAT", default_value = "text", value_parser = ["text", "json"])]
    pub log_format: String,

    /// Log filter: off, error, warn, info, debug, trace, or a filter such as
    /// "info,dovetail::scheduler=debug". Each call is a line of dovetail::access at level info.
    /// Health probes and progress requests are lines of dovetail::access::poll, unless they fail.
    /// "info,dovetail::access::poll=warn" omits these lines
    #[arg(long, env = "DOVETAIL_LOG", default_value = "info")]
    pub log: String,

    /// File that requests failures of devices, for tests
    #[arg(long, env = "DOVETAIL_TEST_FAULT", hide = true)]
    pub test_fault: Option<PathBuf>,

    /// Seconds for each step of a connection until its first request, for tests
    #[arg(long, env = "DOVETAIL_TEST_HANDSHAKE_SECONDS", hide = true)]
    pub test_handshake_seconds: Option<u64>,

    /// Logical GPUs per physical GPU, for tests
    #[arg(long, env = "DOVETAIL_TEST_GPUS_OF_ONE", hide = true)]
    pub test_gpus_of_one: Option<u16>,
}

impl Settings {
    /// True if the server tells tenants apart.
    pub fn has_tenants(&self) -> bool {
        self.token_file.is_some() || self.tls_client_ca.is_some()
    }

    /// Returns the settings of the devices.
    pub fn of_devices(&self) -> DeviceSettings {
        DeviceSettings {
            devices: self.devices.clone(),
            topology: self.topology.clone(),
            arena_directory: self.arena_directory.clone(),
            device_memory: self.device_memory.clone(),
            device_cache: self.device_cache.clone(),
            device_processes: self.device_processes.clone(),
            device_restart_seconds: self.device_restart_seconds,
            device_stall_seconds: self.device_stall_seconds,
            rates_file: self.rates_file.clone(),
            recalibrate: self.recalibrate,
            log: self.log.clone(),
            log_format: self.log_format.clone(),
            test_options: TestOptions { fault_file: self.test_fault.clone(), gpus_of_one: self.test_gpus_of_one },
        }
    }
}

/// Parses a numeric address. Host names are refused, because a name may stand for several
/// addresses.
fn parse_address(text: &str) -> Result<SocketAddr, String> {
    text.parse().map_err(|_| "write an IP address and a port, such as 127.0.0.1:8815 or [::1]:8815".into())
}
