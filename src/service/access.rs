//! Layer around every call: authentication, deadline and outcome.
//!
//! ```text
//!   request ─► draining? refuse work ─► authenticate ─► service ─► body ─► access line, metrics
//!     └── not gRPC: a sentence                              └── deadline, end of server: status
//! ```
//!
//! A call ends when its last byte is sent or when it is given up. For a long stream, this is much
//! later than the return of the handler. So the wrapper of the response body writes the line. Every
//! call has a line, at level info. Health probes and polls of jobs are frequent and uninteresting
//! when they succeed. Their lines have a target of their own, so that a filter can drop them.

mod body;
mod messages;
mod not_grpc;

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::{HeaderMap, Request, Response};
use http_body::{Body as _, Frame};
use tonic::body::Body;
use tonic::{Code, Status};
use tower::{Layer, Service};

use body::{CallBody, CallLimits, RequestBody, deadline_passed, server_ended};
use messages::{Encoding, Owner, Rules};

use super::auth::{Caller, presented_token};
use super::call_memory::CallShare;
use super::call_record::{CallRecord, printable};
use super::commands::COMMAND_BYTES_MAX;
use super::cpu_work::CpuWork;
use super::incoming::{CallUnderWay, ConnectionInfo};
use super::ingest::timeout;
use super::metrics::code_name;
use super::shared::{Shared, shutting_down};
use super::table_upload::OptionsHeader;
use crate::Error;

/// RPC that identifies its caller by its message.
const HANDSHAKE: &str = "Handshake";

/// RPCs that the server serves, by the names under which metrics count them. All unknown paths
/// share one name, so that strangers cannot fill the memory with names.
const RPCS: [&str; 14] = [
    HANDSHAKE,
    "ListFlights",
    "GetFlightInfo",
    "PollFlightInfo",
    "GetSchema",
    "DoGet",
    "DoPut",
    "DoExchange",
    "DoAction",
    "ListActions",
    "grpc.health.v1.Health/Check",
    "grpc.health.v1.Health/Watch",
    "grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
    "grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
];

/// Service of the RPCs that are named without their service.
const FLIGHT: &str = "arrow.flight.protocol.FlightService";

/// Name of all other paths.
const UNKNOWN_RPC: &str = "unknown";

/// RPCs that are served while the server drains, because admitted work is served to its end. Jobs
/// are polled, results are fetched, and uploads under way get their other streams. Only actions
/// that do not begin new work are run.
const SERVED_WHILE_DRAINING: [&str; 4] = ["PollFlightInfo", "DoGet", "DoPut", "DoAction"];

/// RPCs whose requests are streams of rows. They count what they hold themselves.
const TAKE_ROWS: [&str; 2] = ["DoPut", "DoExchange"];

/// RPCs whose answers are streams. They count what they hold themselves.
const ANSWER_STREAMS: [&str; 3] = ["DoGet", "DoPut", "DoExchange"];

/// Maximum size of an action, in bytes. Most are a few hundred bytes. CancelFlightInfo sends back a
/// schema and its endpoints, which take a few million bytes if the schema is large.
pub(super) const REQUEST_BYTES_MAX: u64 = 16 << 20;

/// Maximum size of requests that have a token, a ticket or a few words, in bytes.
const SMALL_REQUEST_BYTES_MAX: u64 = 64 << 10;

/// Returns the maximum size of a request that is not a stream of rows, in bytes.
fn request_bytes_max(rpc: &str) -> u64 {
    match rpc {
        "DoAction" => REQUEST_BYTES_MAX,
        "GetFlightInfo" | "PollFlightInfo" | "GetSchema" => COMMAND_BYTES_MAX as u64 + SMALL_REQUEST_BYTES_MAX,
        _ => SMALL_REQUEST_BYTES_MAX,
    }
}

/// Ends the error for a message over the limit of a stream of rows.
const SMALLER_BATCHES: &str = "send smaller batches, or raise the server's --message-limit";

/// Ends the error for a message over the limit of another call.
const ONLY_ROWS: &str = "only DoPut and DoExchange take more";

/// Starts of tonic's messages for requests that it cannot read, and what they mean.
const UNREADABLE: [(&str, &str); 3] = [
    ("Unexpected EOF decoding stream", "ends inside a message; send all bytes of the message that its prefix declares"),
    ("Missing request message", "has no message; send one"),
    ("protocol error: received message with", "does not begin with a message of gRPC"),
];

/// Puts [`CallService`] around a service.
#[derive(Clone, Debug)]
pub struct CallLayer {
    shared: Arc<Shared>,
}

impl CallLayer {
    /// Creates the layer of a server.
    pub fn new(shared: Arc<Shared>) -> Self {
        Self { shared }
    }
}

impl<S> Layer<S> for CallLayer {
    type Service = CallService<S>;

    fn layer(&self, inner: S) -> Self::Service {
        CallService { shared: self.shared.clone(), inner }
    }
}

/// Authenticates, limits, measures and logs every call of the service inside.
#[derive(Clone, Debug)]
pub struct CallService<S> {
    shared: Arc<Shared>,
    inner: S,
}

impl<S> Service<Request<Body>> for CallService<S>
where
    S: Service<Request<Body>, Response = Response<Body>>,
    S::Future: Send + 'static,
    S::Error: Send + 'static,
{
    type Response = Response<Body>;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, S::Error>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, mut request: Request<Body>) -> Self::Future {
        let mut call = Call::start(&self.shared, &request);
        if let Some(response) = not_grpc::answer(&request) {
            call.outcome = Some((Code::Unimplemented, "the request is not gRPC over HTTP/2".into()));
            return Box::pin(std::future::ready(Ok(response)));
        }
        let admitted = call.admit(&request).and_then(|caller| {
            let share = call.share(&request, caller.as_ref())?;
            call.take_place(&request, caller.as_ref())?;
            Ok((share, caller))
        });
        let (share, caller) = match admitted {
            Ok(admitted) => admitted,
            Err(error) => {
                let response = call.wrap(Status::from(error).into_http());
                return Box::pin(std::future::ready(Ok(response)));
            }
        };
        call.memory = Some(share.clone());
        if let Some(caller) = caller {
            call.tenant.clone_from(&caller.tenant);
            request.extensions_mut().insert(caller);
        }
        request.extensions_mut().insert(call.record.clone());
        if let Some(options) = OptionsHeader::of(request.headers()) {
            request.extensions_mut().insert(options);
        }
        let encoding = take_encoding(request.headers_mut());
        request.extensions_mut().insert(share.bounds().clone());
        request.extensions_mut().insert(share.clone());
        let cpu_work = call.shared.cpu_work.of(&call.tenant);
        request.extensions_mut().insert(cpu_work.clone());
        let request = request.map(|body| Body::new(call.request_body(body, encoding, share, cpu_work)));
        let mut limits = call.limits();
        let response = self.inner.call(request);
        Box::pin(async move {
            tokio::select! {
                biased;
                response = response => Ok(call.answer(response?).await),
                status = poll_fn(|cx| limits.poll(cx)) => Ok(call.wrap(status.into_http())),
            }
        })
    }
}

/// Call, from its head to its last byte. Dropping it writes the access line.
struct Call {
    shared: Arc<Shared>,
    /// One of [`RPCS`], or [`UNKNOWN_RPC`].
    rpc: &'static str,
    is_health: bool,
    peer: String,
    tenant: String,
    record: CallRecord,
    started: Instant,
    deadline: Option<Instant>,
    /// `None` until the call is admitted.
    memory: Option<CallShare>,
    received: Arc<AtomicU64>,
    sent: u64,
    /// Status with which the call ended; `None` until then. On drop, `None` means that the client
    /// gave the call up, or that its deadline or the server's end cut it off.
    outcome: Option<(Code, String)>,
    /// Keeps the connection from being closed as idle.
    _on_connection: Option<CallUnderWay>,
}

impl Call {
    fn start(shared: &Arc<Shared>, request: &Request<Body>) -> Self {
        let path = request.uri().path();
        let whole = path.trim_start_matches('/');
        let name = whole.strip_prefix(FLIGHT).and_then(|rest| rest.strip_prefix('/')).unwrap_or(whole);
        let rpc = RPCS.into_iter().find(|known| *known == name).unwrap_or(UNKNOWN_RPC);
        let record = CallRecord::new(connection(request).map(|info| info.writing.clone()));
        if rpc == UNKNOWN_RPC {
            record.set_command(path);
        }
        let started = Instant::now();
        shared.metrics.call_started();
        Self {
            shared: shared.clone(),
            rpc,
            is_health: path.starts_with("/grpc.health.v1."),
            peer: peer(request),
            tenant: String::new(),
            record,
            started,
            deadline: timeout(request.headers()).and_then(|timeout| started.checked_add(timeout)),
            memory: None,
            received: Arc::default(),
            sent: 0,
            outcome: None,
            _on_connection: connection(request).map(|info| info.activity.start_call()),
        }
    }

    /// Returns the caller, unless the call is refused. Health probes carry no token, and are
    /// answered until the server ends. A handshake may have its token in its message, and has no
    /// caller then.
    fn admit(&self, request: &Request<Body>) -> crate::Result<Option<Caller>> {
        if self.is_health {
            return Ok(Some(Caller::anonymous()));
        }
        if self.shared.is_draining() && !SERVED_WHILE_DRAINING.contains(&self.rpc) {
            return Err(shutting_down());
        }
        let certificate = connection(request).and_then(|info| info.certificate.as_deref());
        let has_token = !matches!(presented_token(request.headers()), Ok(None));
        match self.shared.credentials.authenticator().authenticate(request.headers(), certificate) {
            Err(_) if self.rpc == HANDSHAKE && !has_token => Ok(None),
            caller => caller.map(Some),
        }
    }

    /// Returns the memory of the call of `caller`.
    fn share(&self, request: &Request<Body>, caller: Option<&Caller>) -> crate::Result<CallShare> {
        let memory = &self.shared.call_memory;
        let connection = connection(request).map(|info| info.memory.get_or_init(|| memory.connection()).clone());
        // Health probes carry no token.
        memory.call(connection, caller.filter(|_| !self.is_health).map(|caller| caller.tenant.as_str()))
    }

    /// Notes on the connection that the call of `caller` is accepted. A handshake without a caller
    /// is not: the client's next call is.
    fn take_place(&self, request: &Request<Body>, caller: Option<&Caller>) -> crate::Result<()> {
        let (Some(info), Some(caller)) = (connection(request), caller) else { return Ok(()) };
        if !self.is_health {
            info.place.take(&caller.tenant)?;
        }
        info.activity.accept_call();
        Ok(())
    }

    fn request_body(&self, body: Body, encoding: Option<Encoding>, share: CallShare, cpu_work: CpuWork) -> RequestBody {
        let received = self.received.clone();
        if TAKE_ROWS.contains(&self.rpc) {
            let limit = self.shared.limits.message_bytes;
            let rules = Rules { memory: share, owner: Owner::Bytes, encoding, limit, advice: SMALLER_BATCHES };
            return match encoding {
                None => RequestBody::passing(body, received, cpu_work),
                Some(_) => RequestBody::of_messages(body, received, cpu_work, rules),
            };
        }
        let limit = request_bytes_max(self.rpc);
        let rules = Rules { memory: share, owner: Owner::Call, encoding, limit: limit as usize, advice: ONLY_ROWS };
        let body = RequestBody::of_messages(body, received, cpu_work, rules).at_most(limit);
        // Reflection is a conversation of any length.
        if self.rpc.starts_with("grpc.reflection") { body } else { body.in_time() }
    }

    /// Returns the response with its first frame made, so that its memory is counted even if the
    /// client has no room for it.
    async fn answer(self, response: Response<Body>) -> Response<Body> {
        if ANSWER_STREAMS.contains(&self.rpc) {
            return self.wrap(response);
        }
        let (parts, mut body) = response.into_parts();
        let first = poll_fn(|cx| Poll::Ready(Pin::new(&mut body).poll_frame(cx))).await;
        match first {
            Poll::Ready(Some(Ok(frame))) => match self.counted(frame) {
                Ok(frame) => self.wrap_after(Some(frame), Response::from_parts(parts, body)),
                Err(full) => self.wrap(Status::from(full).into_http()),
            },
            Poll::Ready(Some(Err(status))) => self.wrap(status.into_http()),
            Poll::Ready(None) | Poll::Pending => self.wrap(Response::from_parts(parts, body)),
        }
    }

    /// Counts the memory of a frame until it is sent.
    fn counted(&self, frame: Frame<Bytes>) -> crate::Result<Frame<Bytes>> {
        let memory = self.memory.as_ref().filter(|_| !ANSWER_STREAMS.contains(&self.rpc));
        let Some(memory) = memory else { return Ok(frame) };
        match frame.into_data() {
            Ok(bytes) => memory.counted(bytes, "the answer").map(Frame::data),
            Err(trailers) => Ok(trailers),
        }
    }

    /// Returns the limits that end the call from outside. Calls of other services than Flight end
    /// when connections close, because some never end by themselves: a health watch lasts for ever.
    fn limits(&self) -> CallLimits {
        let end = if self.rpc.contains('/') { &self.shared.closing } else { &self.shared.ended };
        CallLimits::new(end, self.deadline)
    }

    fn wrap(self, response: Response<Body>) -> Response<Body> {
        self.wrap_after(None, response)
    }

    /// Wraps a response whose first frame has been taken from its body.
    fn wrap_after(mut self, first: Option<Frame<Bytes>>, mut response: Response<Body>) -> Response<Body> {
        // A call that fails at once has its status in the head of the response.
        self.outcome = outcome(response.headers());
        if let Some(status) = self.outcome.as_ref().and_then(|(code, message)| self.reworded(*code, message)) {
            self.outcome = Some((status.code(), status.message().to_owned()));
            response = status.into_http();
        }
        let limits = self.limits();
        response.map(|body| Body::new(CallBody::new(first, body, limits, self)))
    }

    /// Rewords an error of tonic that is the caller's mistake but does not say so.
    fn reworded(&self, code: Code, message: &str) -> Option<Status> {
        if code == Code::Internal
            && let Some((_, why)) = UNREADABLE.iter().find(|(said, _)| message.starts_with(said))
        {
            return Some(Error::Invalid(format!("the request of {} {why}", self.rpc)).into());
        }
        match (code, message.strip_prefix("failed to decode Protobuf message: ")) {
            (Code::Internal, Some(why)) => {
                Some(Error::Invalid(format!("the request is not a message of {}: {why}", self.rpc)).into())
            }
            (Code::Unimplemented, _) if message.is_empty() && self.rpc == UNKNOWN_RPC => {
                let path = self.record.command();
                Some(
                    Error::Unsupported(format!("there is no method {path:?}; the methods are those of {FLIGHT}"))
                        .into(),
                )
            }
            _ => None,
        }
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        let has_expired = self.deadline.is_some_and(|deadline| deadline <= Instant::now());
        let (code, message) = self.outcome.take().unwrap_or_else(|| match has_expired {
            true => (Code::DeadlineExceeded, deadline_passed().message().to_owned()),
            false if self.shared.ended.is_cancelled() => (Code::Unavailable, server_ended().message().to_owned()),
            false => (Code::Cancelled, "the client cancelled the call".into()),
        });
        let message = printable(&message);
        let duration = self.started.elapsed();
        let received = self.received.load(Ordering::Relaxed);
        self.shared.metrics.call_ended(self.rpc, code, duration, received, self.sent);
        let times = self.record.job_times();
        let millis = |time: Duration| time.as_micros() as f64 / 1000.0;
        macro_rules! line {
            ($target:literal) => {
                tracing::info!(
                    target: $target,
                    peer = self.peer,
                    tenant = self.tenant,
                    rpc = self.rpc,
                    command = self.record.command(),
                    rows = self.record.rows(),
                    received_bytes = received,
                    sent_bytes = self.sent,
                    queue_ms = millis(times.queued),
                    exec_ms = millis(times.run),
                    duration_ms = millis(duration),
                    status = code_name(code),
                    message,
                )
            };
        }
        let is_answered_poll = self.record.is_poll() && code == Code::Ok;
        match self.is_health || is_answered_poll {
            true => line!("dovetail::access::poll"),
            false => line!("dovetail::access"),
        }
    }
}

/// Removes the header that says how messages are compressed, if this layer decompresses them. The
/// service inside refuses others.
fn take_encoding(headers: &mut HeaderMap) -> Option<Encoding> {
    const NAME: &str = "grpc-encoding";
    let encoding = headers.get(NAME).and_then(|name| Encoding::named(name.as_bytes()));
    if encoding.is_some() {
        headers.remove(NAME);
    }
    encoding
}

fn peer(request: &Request<Body>) -> String {
    connection(request).map_or_else(|| "unknown".into(), |info| info.peer.to_string())
}

fn connection(request: &Request<Body>) -> Option<&ConnectionInfo> {
    request.extensions().get::<ConnectionInfo>()
}

/// Returns the status among headers or trailers.
fn outcome(headers: &HeaderMap) -> Option<(Code, String)> {
    let status = Status::from_header_map(headers)?;
    Some((status.code(), status.message().to_owned()))
}
