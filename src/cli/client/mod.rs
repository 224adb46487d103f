//! A small Flight client for `put`, `get`, `join` and the other commands. It uses the wire protocol
//! of any Flight client.
//!
//! ```text
//!   Client (one TCP connection, credentials) ── fresh() ──► Client (another TCP connection)
//!     ├─ put:   batches ─ encode ─► DoPut in one stream, or in several for one upload, then commit
//!     ├─ info:  table, join or job ─► FlightInfo ── fetch ─► batches from all endpoints at once
//!     └─ action: JSON in, JSON out
//! ```
//!
//! One TCP connection reaches at most about 3 GB/s and uses one core, so each parallel stream has
//! its own connection. This module does not depend on the server's code.

mod fetch;
mod upload;

use std::path::{Path, PathBuf};
use std::time::Duration;

use arrow_flight::flight_service_client::FlightServiceClient;
use arrow_flight::{Action, Criteria, FlightDescriptor, FlightInfo};
use futures::TryStreamExt;
use http::uri::Authority;
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::service::Interceptor;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity};
use tonic::{Code, Request, Status};

pub use crate::service::encode::batch_bytes;
pub use fetch::BatchStream;
pub use upload::{PutOptions, Uploaded};

use super::output;
use crate::human::{file_failure, system_words};
use crate::{Error, Result};

/// How a client finds and convinces a server; shared by all client commands.
#[derive(Clone, Debug, clap::Args)]
#[command(next_help_heading = "Connection")]
pub struct ConnectArgs {
    /// Address of the server: http://HOST:PORT, or https://HOST:PORT with TLS. The default port is
    /// 8815
    #[arg(long, env = "DOVETAIL_SERVER", default_value = "http://127.0.0.1:8815", value_name = "URI")]
    pub server: String,

    /// Bearer token, or @FILE to read it from a file
    #[arg(long, env = "DOVETAIL_TOKEN", hide_env_values = true, value_name = "TOKEN")]
    pub token: Option<String>,

    /// File with the certificates of the authorities that sign the server's certificate (PEM),
    /// instead of those of the system
    #[arg(long, env = "DOVETAIL_CA", value_name = "FILE")]
    pub ca: Option<PathBuf>,

    /// File with the certificate chain of this client (PEM), for mutual TLS
    #[arg(long, env = "DOVETAIL_CERT", value_name = "FILE", requires = "key")]
    pub cert: Option<PathBuf>,

    /// File with the private key of this client (PEM)
    #[arg(long, env = "DOVETAIL_KEY", value_name = "FILE", requires = "cert")]
    pub key: Option<PathBuf>,

    /// Seconds for the server to accept a connection and answer. The work itself has no time limit
    #[arg(long, env = "DOVETAIL_CONNECT_TIMEOUT", default_value = "10", value_name = "SECONDS", value_parser = parse_seconds)]
    pub connect_timeout: Duration,
}

impl ConnectArgs {
    /// Returns arguments for an address, without credentials.
    pub fn to(server: String) -> Self {
        Self { server, token: None, ca: None, cert: None, key: None, connect_timeout: CONNECT_TIMEOUT }
    }
}

/// Port that a server listens on by default.
const DEFAULT_PORT: u16 = 8815;

/// Default time limit for connecting: far longer than a server needs, and no longer than a person
/// waits.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// Interval of keep-alive pings while a call waits for the server. A healthy join may send nothing
/// for hours. A host that lost its power, or a firewall that forgot the connection, sends nothing
/// either.
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(30);

/// Time limit for the answer to a keep-alive ping.
const KEEP_ALIVE_TIMEOUT: Duration = Duration::from_secs(20);

/// HTTP/2 frame size: 1 MiB. With the default of 16 KiB, framing alone costs a third of a
/// transfer's CPU time.
const FRAME_BYTES: u32 = 1 << 20;

/// Flow-control window of a stream. With the default of 64 KiB, a stream mostly waits for the other
/// side.
const STREAM_WINDOW_BYTES: u32 = 16 << 20;

/// Flow-control window of a connection that carries several streams at once.
const CONNECTION_WINDOW_BYTES: u32 = 64 << 20;

type Service = FlightServiceClient<InterceptedService<Channel, Credentials>>;

/// A connection to a server. Clones share the connection.
#[derive(Clone, Debug)]
pub struct Client {
    endpoint: Endpoint,
    credentials: Credentials,
    channel: Channel,
    /// Largest message that the server accepts, in bytes.
    message_limit: usize,
}

/// Adds the token to every call.
#[derive(Clone, Debug)]
struct Credentials {
    header: Option<MetadataValue<Ascii>>,
}

impl Interceptor for Credentials {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        if let Some(header) = &self.header {
            request.metadata_mut().insert("authorization", header.clone());
        }
        Ok(request)
    }
}

impl Client {
    /// Connects, and checks that a server answers. A peer that accepts connections and never
    /// answers would otherwise block the first call for ever.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the address, the token or a certificate cannot be used.
    /// [`Error::Unavailable`] if no server answers in time. The server's error if it refuses the
    /// credentials.
    pub async fn connect(args: &ConnectArgs) -> Result<Self> {
        let endpoint = endpoint(args)?;
        let credentials = Credentials { header: args.token.as_deref().map(bearer).transpose()? };
        let address = address(&endpoint);
        let connect = async {
            let channel = open(&endpoint).await?;
            let client = Self { endpoint, credentials, channel, message_limit: usize::MAX };
            match client.action("server_info", &Value::Null).await {
                Ok(info) => {
                    let limit = info.first().and_then(|info| info["message_limit_bytes"].as_u64());
                    let message_limit = limit.and_then(|limit| limit.try_into().ok()).unwrap_or(usize::MAX);
                    Ok(Self { message_limit, ..client })
                }
                Err(Error::Unauthenticated(refusal)) => Err(Error::Unauthenticated(match &args.token {
                    None => format!(
                        "{refusal}; give a token with --token TOKEN, --token @FILE or DOVETAIL_TOKEN, or a \
                         certificate with --cert and --key"
                    ),
                    Some(_) => format!("{refusal}; check the token of --token or DOVETAIL_TOKEN"),
                })),
                // A TLS server reacts to a call without TLS by closing the connection or sending an
                // alert.
                Err(Error::Unavailable(_) | Error::Internal(_)) if speaks_tls(&address).await => {
                    Err(Error::Unavailable(format!(
                        "the server at {address} speaks TLS; write --server {}, and name the certificate of its \
                         authority with --ca unless the system knows it",
                        address.replacen("http://", "https://", 1)
                    )))
                }
                // The peer answers in another protocol, such as HTTP/1, or HTTP/2 without gRPC.
                Err(Error::Unavailable(said) | Error::Internal(said)) if is_of_no_flight(&said) => {
                    Err(Error::Unavailable(no_flight(&address)))
                }
                // The peer may close the connection before the client has read the peer's answer.
                Err(Error::Unavailable(broke)) if broke.starts_with(BROKE) && speaks_http1(&address).await => {
                    Err(Error::Unavailable(no_flight(&address)))
                }
                // With TLS 1.3, a server refuses a missing or invalid client certificate after the
                // client considers the handshake done. If the server then closes the connection
                // before the client reads the alert, the reason is lost.
                Err(Error::Unavailable(broke)) if broke.starts_with(BROKE) && address.starts_with("https:") => {
                    Err(Error::Unavailable(match (alert(&broke), &args.cert) {
                        (Some(told), _) => format!("cannot reach a server at {address}: {}", told.sentence()),
                        (None, None) => format!(
                            "the server at {address} probably admits only clients with certificates: give one with \
                             --cert and --key (or DOVETAIL_CERT and DOVETAIL_KEY). The connection error was: \
                             {broke}"
                        ),
                        (None, Some(_)) => format!(
                            "the server at {address} probably does not accept this client's certificate: \
                             {ANOTHER_CERT}. The connection error was: {broke}"
                        ),
                    }))
                }
                Err(error) => Err(error),
            }
        };
        tokio::time::timeout(args.connect_timeout, connect).await.unwrap_or_else(|_| {
            Err(Error::Unavailable(format!(
                "no answer from {address} within {}: the server there is unreachable, is stuck, or is not Dovetail; \
                 check --server, or wait longer with --connect-timeout",
                output::seconds(args.connect_timeout.as_secs_f64())
            )))
        })
    }

    /// Opens another TCP connection to the same server, with the same credentials.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    pub async fn fresh(&self) -> Result<Self> {
        let channel = open(&self.endpoint).await?;
        Ok(Self { channel, ..self.clone() })
    }

    /// Returns the RPC stub. Message sizes are unlimited here because the server limits them.
    fn service(&self) -> Service {
        FlightServiceClient::with_interceptor(self.channel.clone(), self.credentials.clone())
            .max_decoding_message_size(usize::MAX)
            .max_encoding_message_size(usize::MAX)
    }

    /// Asks where to read a table, or the result of a command. For a command, the server starts a
    /// job.
    ///
    /// # Errors
    /// The server's.
    pub async fn info(&self, descriptor: FlightDescriptor) -> Result<FlightInfo> {
        Ok(self.service().get_flight_info(descriptor).await.map_err(from_status)?.into_inner())
    }

    /// Lists all tables and live results.
    ///
    /// # Errors
    /// The server's.
    pub async fn list(&self) -> Result<Vec<FlightInfo>> {
        let flights = self.service().list_flights(Criteria::default()).await.map_err(from_status)?.into_inner();
        flights.try_collect().await.map_err(from_status)
    }

    /// Runs an action with a JSON body (none for `Null`), and returns its answers.
    ///
    /// # Errors
    /// The server's; [`Error::Internal`] if an answer is not JSON.
    pub async fn action(&self, name: &str, body: &Value) -> Result<Vec<Value>> {
        let body = if body.is_null() { Vec::new() } else { body.to_string().into_bytes() };
        let action = Action { r#type: name.into(), body: body.into() };
        let answers = self.service().do_action(action).await.map_err(from_status)?.into_inner();
        let answers: Vec<arrow_flight::Result> = answers.try_collect().await.map_err(from_status)?;
        let parse = |answer: &arrow_flight::Result| {
            serde_json::from_slice(&answer.body)
                .map_err(|error| Error::Internal(format!("the server's answer to {name} is not valid JSON: {error}")))
        };
        answers.iter().filter(|answer| !answer.body.is_empty()).map(parse).collect()
    }
}

/// Returns the descriptor of a table.
pub fn table_descriptor(name: &str) -> FlightDescriptor {
    FlightDescriptor::new_path(vec![name.to_owned()])
}

/// Returns the descriptor of a command in its JSON form.
pub fn command_descriptor(command: &Value) -> FlightDescriptor {
    FlightDescriptor::new_cmd(command.to_string())
}

/// Parses the address into a tonic endpoint, with windows and frames for bulk data.
fn endpoint(args: &ConnectArgs) -> Result<Endpoint> {
    let given = args.server.trim();
    let (scheme, rest) = given.split_once("://").unwrap_or(("http", given));
    let tls = match scheme {
        "http" | "grpc" | "grpc+tcp" => false,
        "https" | "grpc+tls" | "grpcs" => true,
        other => {
            return Err(Error::Invalid(format!(
                "server {given:?}: unknown scheme {other:?}; write http://HOST:PORT, or https://HOST:PORT for TLS"
            )));
        }
    };
    let no_address = |why: &dyn std::fmt::Display| {
        Error::Invalid(format!("server {given:?} is not an address: {why}; write one such as http://127.0.0.1:8815"))
    };
    let rest = rest.trim_end_matches('/');
    if let Some(at) = rest.find(['/', '?', '#']) {
        return Err(no_address(&format!("an address has no path; remove {:?}", &rest[at..])));
    }
    let authority = rest.parse::<Authority>().map_err(|error| no_address(&error))?;
    let behind_host = authority.as_str().rsplit_once(authority.host()).map_or("", |(_, behind)| behind);
    let port = match behind_host.strip_prefix(':') {
        Some(port) => port.parse::<u16>().map_err(|_| no_address(&format!("{port:?} is not a port")))?,
        None => DEFAULT_PORT,
    };
    let scheme = if tls { "https" } else { "http" };
    let endpoint = Endpoint::from_shared(format!("{scheme}://{}:{port}", authority.host()))
        .map_err(|error| no_address(&error))?
        .user_agent(concat!("dovetail-cli/", env!("CARGO_PKG_VERSION")))
        .map_err(|error| Error::Internal(error.to_string()))?
        .connect_timeout(args.connect_timeout)
        .http2_keep_alive_interval(KEEP_ALIVE_INTERVAL)
        .keep_alive_timeout(KEEP_ALIVE_TIMEOUT)
        .tcp_nodelay(true)
        .initial_stream_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .max_frame_size(FRAME_BYTES);
    if !tls {
        if args.ca.is_some() || args.cert.is_some() {
            return Err(Error::Invalid(format!(
                "server {given:?} is without TLS, and certificates need TLS; write https://"
            )));
        }
        return Ok(endpoint);
    }
    let mut config = ClientTlsConfig::new();
    config = match &args.ca {
        Some(path) => config.ca_certificate(Certificate::from_pem(read_certificates("--ca", path)?)),
        None => config.with_native_roots(),
    };
    if let (Some(cert), Some(key)) = (&args.cert, &args.key) {
        config = config.identity(Identity::from_pem(read_certificates("--cert", cert)?, read_key("--key", key)?));
    }
    endpoint.tls_config(config).map_err(|error| {
        let cause = chain(&error);
        match (&args.cert, &args.key) {
            (Some(cert), Some(key)) if cause.contains("KeyMismatch") => Error::Invalid(format!(
                "--key names {}, which is not the private key of the certificate in {}, which --cert names; give a \
                 certificate and its own key",
                key.display(),
                cert.display()
            )),
            _ => Error::Invalid(format!("the certificates for TLS to {given} cannot be used: {cause}")),
        }
    })
}

fn read_pem(flag: &str, path: &Path) -> Result<Vec<u8>> {
    std::fs::read(path).map_err(|error| {
        let why = file_failure(path, &error);
        Error::Invalid(format!("{flag} names {}, which cannot be read: {why}", path.display()))
    })
}

/// Reads a file that must contain a private key.
fn read_key(flag: &str, path: &Path) -> Result<Vec<u8>> {
    let pem = read_pem(flag, path)?;
    match pem.windows(PEM_KEY.len()).any(|words| words == PEM_KEY.as_bytes()) {
        true => Ok(pem),
        false => Err(Error::Invalid(format!(
            "there is no private key in {}, which {flag} names; it takes PEM, where a key begins with \"-----BEGIN \
             {PEM_KEY}\"",
            path.display()
        ))),
    }
}

/// Reads a file that must contain certificates. The TLS library accepts a file without certificates
/// as an empty list.
fn read_certificates(flag: &str, path: &Path) -> Result<Vec<u8>> {
    let pem = read_pem(flag, path)?;
    match pem.windows(PEM_CERTIFICATE.len()).any(|words| words == PEM_CERTIFICATE.as_bytes()) {
        true => Ok(pem),
        false => Err(Error::Invalid(format!(
            "there is no certificate in {}, which {flag} names; it takes PEM, where a certificate begins with \
             \"{PEM_CERTIFICATE}\" (to convert DER: openssl x509 -inform DER -in FILE)",
            path.display()
        ))),
    }
}

/// First line of a PEM certificate.
const PEM_CERTIFICATE: &str = "-----BEGIN CERTIFICATE-----";

/// End of the first line of a PEM private key; the text before it names the kind of key.
const PEM_KEY: &str = "PRIVATE KEY-----";

fn bearer(token: &str) -> Result<MetadataValue<Ascii>> {
    let (token, whose) = match token.strip_prefix('@') {
        Some(path) => {
            let token = std::fs::read_to_string(path).map_err(|error| {
                let why = file_failure(Path::new(path), &error);
                Error::Invalid(format!("--token names the file {path}, which cannot be read: {why}"))
            })?;
            (token, format!("the token in {path}, which --token names,"))
        }
        None => (token.to_owned(), "the token of --token or DOVETAIL_TOKEN".to_owned()),
    };
    let refuse = |why: &str| Error::Invalid(format!("{whose} {why}"));
    let token = token.trim();
    if token.is_empty() {
        return Err(refuse("is empty; give a token, or remove the option if the server needs none"));
    }
    if token.contains('\n') {
        return Err(refuse("has more than one line; give a single token, not a server's token file"));
    }
    let header = format!("Bearer {token}").parse::<MetadataValue<Ascii>>();
    let mut header =
        header.map_err(|_| refuse("has characters that are not allowed in a header; a token is printable ASCII"))?;
    header.set_sensitive(true);
    Ok(header)
}

async fn open(endpoint: &Endpoint) -> Result<Channel> {
    endpoint.connect().await.map_err(|error| {
        let cause = chain(&error);
        let told = TLS.iter().find(|told| cause.contains(told.words));
        let sentence = match told {
            Some(told) => told.of(&cause),
            None if is_refused(&error) => format!("{}; `dovetail serve` starts one", system_words(&cause)),
            None if cause.contains("HTTP/2 was not negotiated") => {
                return Error::Unavailable(no_flight(&address(endpoint)));
            }
            None => system_words(&cause),
        };
        Error::Unavailable(format!("cannot reach a server at {}: {sentence}", address(endpoint)))
    })
}

/// True if nothing listens at the address.
fn is_refused(error: &(dyn std::error::Error + 'static)) -> bool {
    let causes = std::iter::successors(Some(error), |error| error.source());
    let mut systems = causes.filter_map(|cause| cause.downcast_ref::<std::io::Error>());
    systems.any(|error| error.kind() == std::io::ErrorKind::ConnectionRefused)
}

/// Error of TLS or of the system, recognized by words of its message, with advice for the user.
struct Told {
    words: &'static str,
    /// Meaning of the error, if the library's message is an internal code.
    meaning: Option<&'static str>,
    advice: &'static str,
}

impl Told {
    const fn new(words: &'static str, advice: &'static str) -> Self {
        Self { words, meaning: None, advice }
    }

    const fn meaning(words: &'static str, meaning: &'static str, advice: &'static str) -> Self {
        Self { words, meaning: Some(meaning), advice }
    }

    /// Returns the sentence for the user; `cause` is the library's message.
    fn of(&self, cause: &str) -> String {
        format!("{}; {}", self.meaning.unwrap_or(cause), self.advice)
    }

    fn sentence(&self) -> String {
        self.of(self.words)
    }
}

/// Advice about this client's certificate.
const ANOTHER_CERT: &str = "give one with --cert and --key (or DOVETAIL_CERT and DOVETAIL_KEY), of an authority that \
                            the setting tls-client-ca of the server names";

/// The first entry whose words occur in the message applies.
const TLS: [Told; 18] = [
    Told::meaning(
        "CertificateRequired",
        "it admits only clients with certificates, and this client presented none",
        "give one with --cert and --key (or DOVETAIL_CERT and DOVETAIL_KEY), of an authority that the server knows",
    ),
    Told::meaning(
        "alert: UnknownCA",
        "it does not accept this client's certificate, whose authority it does not know",
        ANOTHER_CERT,
    ),
    Told::meaning("alert: DecryptError", "it does not accept this client's certificate", ANOTHER_CERT),
    Told::meaning("alert: BadCertificate", "it does not accept this client's certificate", ANOTHER_CERT),
    Told::meaning("alert: CertificateUnknown", "it does not accept this client's certificate", ANOTHER_CERT),
    Told::meaning("alert: UnsupportedCertificate", "it does not accept this client's certificate", ANOTHER_CERT),
    Told::meaning("alert: CertificateExpired", "this client's certificate has expired", ANOTHER_CERT),
    Told::meaning("alert: CertificateRevoked", "this client's certificate has been revoked", ANOTHER_CERT),
    Told::meaning("alert: AccessDenied", "it denies access to this client's certificate", ANOTHER_CERT),
    // The TLS library reports this for an answer that is not TLS.
    Told::meaning("InvalidContentType", "it does not speak TLS there", "write http://"),
    Told::meaning(
        "failed to lookup address",
        "its host cannot be found",
        "check the name in --server, and that this machine can resolve it",
    ),
    Told::meaning(
        "UnsupportedCertVersion",
        "its certificate is of version 1 of X.509, which is never accepted",
        "start the server with one of version 3, which has extensions, for example from: openssl req -x509 ... \
         -addext subjectAltName=DNS:HOST -addext basicConstraints=critical,CA:FALSE; and name it, or that of its \
         authority, with --ca",
    ),
    Told::new(
        "CaUsedAsEndEntity",
        "the server presents the certificate of an authority; start it with one that has basicConstraints=CA:FALSE, \
         and name it with --ca if it is self-signed",
    ),
    Told::new(
        "not valid for name",
        "write --server with a name or address from its certificate, or make a certificate for this name",
    ),
    Told::new(
        "UnknownIssuer",
        "name the authority of the server's certificate with --ca; for a self-signed certificate, name the certificate",
    ),
    Told::new("xpired", "renew the certificate of the server, or correct the clock of this machine"),
    Told::new("certificate", "name the authority of the server's certificate with --ca"),
    Told::new("alert: ", "the server refused the TLS of this client, and its log may say more"),
];

/// Finds the entry for a TLS alert about this client's certificate.
fn alert(said: &str) -> Option<&'static Told> {
    TLS.iter().find(|told| told.meaning.is_some() && said.contains(told.words) && said.contains("alert: "))
}

/// True if the peer at this plain address speaks TLS. The probe succeeds if the peer shows a
/// certificate, valid or not.
async fn speaks_tls(address: &str) -> bool {
    let Some(host) = address.strip_prefix("http://") else { return false };
    let endpoint = Endpoint::from_shared(format!("https://{host}"))
        .and_then(|endpoint| endpoint.tls_config(ClientTlsConfig::new().with_native_roots()));
    let Ok(endpoint) = endpoint else { return false };
    match endpoint.connect().await {
        Ok(_) => true,
        Err(error) => chain(&error).contains("peer certificate"),
    }
}

/// True if the peer at this plain address answers in HTTP/1 and is no Flight server. A Flight server
/// of Dovetail answers such a request with a sentence that names Arrow Flight.
async fn speaks_http1(address: &str) -> bool {
    const ANSWER_BYTES_MAX: u64 = 4 << 10;
    /// Some peers leave the connection open.
    const ANSWER_WAIT: Duration = Duration::from_secs(2);
    let Some(host) = address.strip_prefix("http://") else { return false };
    let mut answer = Vec::new();
    let read = async {
        let mut stream = TcpStream::connect(host).await?;
        stream.write_all(format!("GET / HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n").as_bytes()).await?;
        stream.take(ANSWER_BYTES_MAX).read_to_end(&mut answer).await
    };
    // A connection that breaks or stays open may have brought the answer before.
    let _ = tokio::time::timeout(ANSWER_WAIT, read).await;
    let answer = String::from_utf8_lossy(&answer);
    answer.starts_with("HTTP/1.") && !answer.contains("the Arrow Flight port of")
}

/// Returns the address in the form that a person writes.
fn address(endpoint: &Endpoint) -> String {
    endpoint.uri().to_string().trim_end_matches('/').to_owned()
}

fn parse_seconds(text: &str) -> Result<Duration, String> {
    let seconds = text.parse::<f64>().ok().filter(|seconds| (0.001..=1e6).contains(seconds));
    seconds.map(Duration::from_secs_f64).ok_or_else(|| "write a number of seconds, such as 10 or 0.5".into())
}

/// Returns the innermost cause, which is the specific one: "connection refused" under "transport
/// error".
fn chain(error: &dyn std::error::Error) -> String {
    let mut cause = error;
    while let Some(source) = cause.source() {
        cause = source;
    }
    cause.to_string()
}

/// Start of the sentence about a connection that was lost.
const BROKE: &str = "the connection to the server broke";

/// tonic's message for an HTTP answer that is not gRPC.
const NO_GRPC: &str = "grpc-status header missing";

/// tonic's message for an HTTP answer whose body is text.
const NO_MESSAGE: &str = "protocol error: received message with invalid compression flag";

/// h2's message for a stream that the peer, or a proxy, has reset.
const RESET: &str = "stream error received";

/// tonic's messages for a stream that ended without trailers, and for one that ended in a message.
const NO_END: [&str; 2] = ["protocol error: missing grpc-status trailer", "Unexpected EOF decoding stream"];

/// Placeholder for the address where the code does not know it.
const SOME_ADDRESS: &str = "the server's address";

/// tonic's message for an answer that is not HTTP/2.
const NO_HTTP2: &str = "h2 protocol error";

fn no_flight(address: &str) -> String {
    format!("there is no Flight server at {address}; check --server (the port of metrics and health is another port)")
}

/// True if the error of a first call says that the peer is no Flight server.
fn is_of_no_flight(said: &str) -> bool {
    said.starts_with(NO_HTTP2) || said == no_flight(SOME_ADDRESS)
}

/// Returns the sentence about a connection or a stream that broke off. The client cannot tell which
/// of the two has cut it.
fn broke(cause: &str) -> String {
    format!(
        "{BROKE}: {cause}; either the server has ended (its tables end with it), or a proxy between client and server has \
         cut the stream, at a limit of time or size; check both, and start again"
    )
}

/// Statuses of HTTP with which proxies answer for a server.
const OF_PROXIES: [u16; 8] = [408, 413, 429, 499, 502, 503, 504, 524];

/// Messages of statuses that Envoy makes itself, and proxies that are built on it.
const OF_ENVOY: [&str; 3] = ["upstream request timeout", "stream timeout", "upstream connect error"];

/// Returns the HTTP status of an answer that is not gRPC, from tonic's message about it.
fn http_status(message: &str) -> Option<u16> {
    let without_body = || message.strip_prefix(NO_GRPC)?.rsplit(' ').next();
    let with_body = || message.strip_prefix(NO_MESSAGE)?.split_once("with status: ")?.1.split(' ').next();
    without_body().or_else(with_body)?.parse().ok()
}

/// Returns the sentence about an answer of a proxy that could not reach the server.
fn of_proxy(message: &str) -> Option<String> {
    let in_place = |what: &str| {
        format!(
            "a proxy between client and server answered with {what}: the server has ended or cannot be reached, or the \
             proxy has a limit of time or size that is too low; check both, and start again"
        )
    };
    if OF_ENVOY.iter().any(|start| message.starts_with(start)) {
        return Some(in_place(&format!("{message:?}")));
    }
    let status = http_status(message)?;
    OF_PROXIES.contains(&status).then(|| {
        let reason = http::StatusCode::from_u16(status).ok().and_then(|status| status.canonical_reason());
        let reason = reason.map(|reason| format!(" ({reason})")).unwrap_or_default();
        in_place(&format!("HTTP status {status}{reason}"))
    })
}

/// Converts a status into the [`Error`] variant of its code, with the server's message.
pub fn from_status(status: Status) -> Error {
    // A status that the server sent has no local cause. A local status, such as "transport error"
    // or "operation was canceled", has one.
    let cause = std::error::Error::source(&status).map(chain);
    match (status.code(), cause) {
        (Code::Unavailable | Code::Unknown | Code::Cancelled, Some(cause)) => return Error::Unavailable(broke(&cause)),
        // The stream was reset, and the connection stays. A Dovetail server ends streams with a
        // status.
        (_, Some(cause)) if cause.starts_with(RESET) => return Error::Unavailable(broke(&cause)),
        _ if NO_END.iter().any(|start| status.message().starts_with(start)) => {
            return Error::Unavailable(broke("the stream ended without the server's status"));
        }
        _ => {}
    }
    if let Some(sentence) = of_proxy(status.message()) {
        return Error::Unavailable(sentence);
    }
    let message = match status.message() {
        "" => std::error::Error::source(&status).map_or_else(|| status.code().to_string(), chain),
        message if message.starts_with(NO_GRPC) || http_status(message).is_some() => {
            return Error::Unavailable(no_flight(SOME_ADDRESS));
        }
        message => message.to_owned(),
    };
    match status.code() {
        Code::InvalidArgument | Code::OutOfRange => Error::Invalid(message),
        Code::NotFound => Error::NotFound(message),
        Code::AlreadyExists => Error::AlreadyExists(message),
        Code::FailedPrecondition | Code::Aborted => Error::Precondition(message),
        Code::Unauthenticated => Error::Unauthenticated(message),
        Code::PermissionDenied => Error::Denied(message),
        Code::ResourceExhausted => Error::Exhausted(message),
        Code::Unavailable => Error::Unavailable(message),
        Code::Cancelled => Error::Cancelled(message),
        Code::DeadlineExceeded => Error::DeadlineExceeded(message),
        Code::Unimplemented => Error::Unsupported(message),
        Code::Ok | Code::Unknown | Code::Internal | Code::DataLoss => Error::Internal(message),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_without_certificates_is_refused_with_what_it_must_contain() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("ca.pem");
        for text in ["", "hello", "-----BEGIN PRIVATE KEY-----\n-----END PRIVATE KEY-----\n"] {
            std::fs::write(&path, text).unwrap();
            let args = ConnectArgs { ca: Some(path.clone()), ..ConnectArgs::to("https://localhost".into()) };
            let error = endpoint(&args).unwrap_err();
            assert!(error.message().contains("ca.pem, which --ca names; it takes PEM"), "{error}");
            let (cert, key) = (Some(path.clone()), Some(path.clone()));
            let args = ConnectArgs { cert, key, ..ConnectArgs::to("https://localhost".into()) };
            let error = endpoint(&args).unwrap_err();
            assert!(error.message().contains("ca.pem, which --cert names; it takes PEM"), "{error}");
        }
    }

    #[test]
    fn a_certificate_that_the_server_rejects_is_reported_with_the_remedy() {
        // Alert names as rustls writes them.
        for said in [
            "CertificateRequired",
            "UnknownCA",
            "BadCertificate",
            "CertificateExpired",
            "CertificateRevoked",
            "AccessDenied",
        ] {
            let told = alert(&broke(&format!("received fatal alert: {said}"))).unwrap();
            let sentence = told.sentence();
            assert!(sentence.contains("--cert and --key") && !sentence.contains(said), "{sentence}");
        }
        for other in ["connection reset by peer", "received fatal alert: HandshakeFailure"] {
            assert!(alert(&format!("{BROKE}: {other}")).is_none(), "{other}");
        }
    }

    #[tokio::test]
    async fn starting_a_server_is_advised_only_if_nothing_listens_at_the_address() {
        let folder = tempfile::tempdir().unwrap();
        let ca = folder.path().join("ca.pem");
        let key = rcgen::KeyPair::generate().unwrap();
        std::fs::write(&ca, rcgen::CertificateParams::default().self_signed(&key).unwrap().pem()).unwrap();
        // TLS 1.2 alert records: the record type, the version, the length (2 bytes), the level
        // "fatal", and the alert number.
        for (alert, words) in [
            (44, "this client's certificate has been revoked; give one with --cert and --key"),
            (49, "it denies access to this client's certificate; give one with --cert and --key"),
            (40, "received fatal alert: HandshakeFailure; the server refused the TLS"),
        ] {
            let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
            let server = format!("https://{}", listener.local_addr().unwrap());
            let args = ConnectArgs { ca: Some(ca.clone()), ..ConnectArgs::to(server) };
            let answer = async {
                let (mut stream, _) = listener.accept().await.unwrap();
                // Read the client's first message; otherwise the system would reset the connection.
                assert!(stream.read(&mut [0; 4096]).await.unwrap() > 0);
                stream.write_all(&[21, 3, 3, 0, 2, 2, alert]).await.unwrap();
                stream
            };
            let (told, _stream) = tokio::join!(Client::connect(&args), answer);
            let said = told.unwrap_err().to_string();
            assert!(said.contains(words) && !said.contains("dovetail serve"), "{said}");
        }
        let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        for (scheme, ca) in [("http", None), ("https", Some(ca))] {
            let args = ConnectArgs { ca, ..ConnectArgs::to(format!("{scheme}://{free}")) };
            let said = Client::connect(&args).await.unwrap_err().to_string();
            assert!(said.contains("refused") && said.ends_with("; `dovetail serve` starts one"), "{said}");
        }
    }

    #[test]
    fn a_stream_that_was_cut_is_blamed_on_the_server_or_a_proxy() {
        let both = |error: &Error| {
            let text = error.message();
            assert!(matches!(error, Error::Unavailable(_)), "{error:?}");
            assert!(text.contains("server has ended") && text.contains("a proxy between client and server"), "{text}");
            text.to_owned()
        };
        both(&from_status(Status::unknown("protocol error: missing grpc-status trailer, stream was terminated")));
        both(&from_status(Status::internal("Unexpected EOF decoding stream.")));
        for status in [413, 502, 504] {
            let message = format!("grpc-status header missing, mapped from HTTP status code {status}");
            assert!(both(&from_status(Status::unavailable(message))).contains(&format!("HTTP status {status} (")));
        }
        both(&from_status(Status::deadline_exceeded("upstream request timeout")));
        let text = |status: &str| {
            let flag = "protocol error: received message with invalid compression flag: 60 (valid flags are 0 and 1)";
            from_status(Status::internal(format!("{flag} while receiving response with status: {status}")))
        };
        assert!(both(&text("504 Gateway Timeout")).contains("HTTP status 504 (Gateway Timeout)"));
        assert!(text("404 Not Found").message().starts_with("there is no Flight server"));
        let other = Status::unknown("grpc-status header missing, mapped from HTTP status code 404");
        assert!(from_status(other).message().starts_with("there is no Flight server"));
        assert_eq!(from_status(Status::internal("a defect")), Error::Internal("a defect".into()));
    }

    #[test]
    fn the_scheme_and_port_of_an_address_are_optional() {
        let read = |server: &str| endpoint(&ConnectArgs::to(server.into())).map(|endpoint| address(&endpoint));
        for (given, expected) in [
            ("gpu-host", "http://gpu-host:8815"),
            ("gpu-host:9000", "http://gpu-host:9000"),
            ("grpc://127.0.0.1/", "http://127.0.0.1:8815"),
            ("grpc+tcp://[::1]", "http://[::1]:8815"),
            ("https://gpu-host", "https://gpu-host:8815"),
            ("grpcs://gpu-host:443", "https://gpu-host:443"),
        ] {
            assert_eq!(read(given).unwrap(), expected, "{given}");
        }
        for wrong in ["", "http://", "a b", "http://host:", "host:port", "http://host:99999", "http://host/path"] {
            let error = read(wrong).unwrap_err();
            assert!(error.message().contains("is not an address"), "{wrong}: {error}");
        }
        for path in ["/path", "/a/b", "?a=b"] {
            let said = read(&format!("http://127.0.0.1:8815{path}")).unwrap_err().to_string();
            assert!(said.contains(&format!("an address has no path; remove {path:?}")), "{said}");
        }
    }

    #[test]
    fn a_token_file_without_exactly_one_word_is_named_in_the_error() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tokens");
        let given = format!("@{}", path.display());
        for (text, words) in [
            ("one ann writer\ntwo bob reader\n", "tokens, which --token names, has more than one line"),
            (" \n", "tokens, which --token names, is empty"),
            (
                "a\u{1}b\n",
                "tokens, which --token names, has characters that are not allowed in a header; a token is printable \
                 ASCII",
            ),
        ] {
            std::fs::write(&path, text).unwrap();
            let said = bearer(&given).unwrap_err().to_string();
            assert!(said.contains(words), "{said}");
        }
        std::fs::write(&path, "secret\n").unwrap();
        assert_eq!(bearer(&given).unwrap(), "Bearer secret");
        for empty in ["", "  "] {
            let said = bearer(empty).unwrap_err().to_string();
            assert!(said.contains("the token of --token or DOVETAIL_TOKEN is empty"), "{said}");
        }
    }
}
