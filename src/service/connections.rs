//! Serving of connections to the Flight port, from the first byte to the last.
//!
//! ```text
//!   accept ─► within limits? ─► TLS handshake ─► HTTP/2 preface ─► first call ─► calls ─► closed
//!               └ no: closed      └─────────── too late: closed ──────┘            └ idle for
//!                                                                 long, or the server ends: GOAWAY
//! ```
//!
//! Until the first call of a tenant is accepted, a newer connection may take the place of this one
//! (`incoming/limits.rs`).
//!
//! Each connection has a task, so that a slow handshake delays no other client. A peer that
//! answers no ping is closed by HTTP/2 itself.

use std::convert::Infallible;
use std::future;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use http::{Request, Response};
use hyper::body::Incoming;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto::Builder;
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio_rustls::LazyConfigAcceptor;
use tokio_rustls::rustls::server::Acceptor;
use tokio_rustls::server::TlsStream;
use tokio_util::sync::CancellationToken;
use tonic::body::Body;
use tower::{Service, ServiceExt};

use super::incoming::{Connection, Permit, Socket, Throttle, accept};
use super::settings::Settings;
use super::shared::Shared;
use super::tls::Tls;
use super::windows::{self, Window, Windows};

/// Time between pings of HTTP/2, and for their answer.
const PING_INTERVAL: Duration = Duration::from_secs(30);

/// Time for a TLS handshake, and again for the preface of HTTP/2 or the head of a request of
/// HTTP/1.1. It is longer than several lost packets.
const HANDSHAKE_LIMIT: Duration = Duration::from_secs(10);

/// Time for the first accepted call. A client that connects early opens another connection for a
/// later call.
const FIRST_CALL_LIMIT: Duration = HANDSHAKE_LIMIT.saturating_mul(3);

/// Time limits of connections.
#[derive(Clone, Copy, Debug)]
pub(super) struct TimeLimits {
    /// For each step until the first request.
    pub(super) handshake: Duration,
    /// For the first accepted call.
    first_call: Duration,
    /// Without a call.
    idle: Duration,
}

impl TimeLimits {
    pub(super) fn new(settings: &Settings) -> Self {
        let idle = match settings.connection_idle_seconds {
            0 => Duration::MAX,
            seconds => Duration::from_secs(seconds),
        };
        let for_tests = settings.test_handshake_seconds.map(Duration::from_secs);
        Self {
            handshake: for_tests.unwrap_or(HANDSHAKE_LIMIT),
            first_call: for_tests.map_or(FIRST_CALL_LIMIT, |handshake| 3 * handshake),
            idle,
        }
    }
}

/// Flight port: what each of its connections needs.
pub(super) struct FlightPort<S> {
    shared: Arc<Shared>,
    service: S,
    times: TimeLimits,
    windows: Windows,
    /// HTTP/2 with each window, of [`windows::KINDS`].
    builders: Vec<Builder<TokioExecutor>>,
}

impl<S> FlightPort<S>
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Infallible> + Clone + Send + Sync + 'static,
    S::Future: Send + 'static,
{
    pub(super) fn new(shared: Arc<Shared>, service: S, settings: &Settings, windows: Windows) -> Self {
        let times = TimeLimits::new(settings);
        let builders = windows::KINDS.iter().map(|window| builder(settings, times, *window)).collect();
        Self { shared, service, times, windows, builders }
    }

    /// Serves until the server closes its connections, and these have ended. Dropping the future
    /// ends them at once.
    pub(super) async fn serve(self, listener: TcpListener) {
        let (port, said) = (Arc::new(self), Throttle::default());
        let mut connections = JoinSet::new();
        loop {
            let (stream, peer) = tokio::select! {
                () = port.shared.closing.cancelled() => break,
                Some(_) = connections.join_next() => continue,
                accepted = accept(&listener, "--listen", &said) => accepted,
            };
            match port.shared.connections.admit(peer.ip()).await {
                Ok(permit) => drop(connections.spawn(port.clone().connection(stream, peer, permit))),
                Err(refusal) => port.count_closed(refusal.name()),
            }
        }
        // New clients are refused from now on, instead of waiting for an answer.
        drop(listener);
        while connections.join_next().await.is_some() {}
    }

    async fn connection(self: Arc<Self>, stream: TcpStream, peer: SocketAddr, permit: Permit) {
        let socket = Socket::new(stream);
        let is_same_host = socket.is_same_host;
        let (connection, superseded) = match self.shared.credentials.tls() {
            None => (Connection::plain(socket), CancellationToken::new()),
            Some(tls) => {
                let handshake = tokio::time::timeout(self.times.handshake, handshake(socket, &tls, &permit.handshakes));
                let outcome = tokio::select! {
                    () = self.shared.closing.cancelled() => return,
                    () = permit.place.lost.cancelled() => return self.count_closed("replaced"),
                    outcome = handshake => outcome,
                };
                match outcome {
                    Ok(Ok(stream)) => (Connection::over_tls(stream), tls.superseded.clone()),
                    Ok(Err(error)) => {
                        tracing::debug!(%peer, %error, "a TLS handshake failed");
                        return self.count_closed("tls_failed");
                    }
                    Err(_) => return self.count_closed("tls_timeout"),
                }
            }
        };
        let info = connection.info(peer, permit.place.clone());
        let activity = info.activity.clone();
        let service = self.service.clone().map_request(move |mut request: Request<Incoming>| {
            request.extensions_mut().insert(info.clone());
            request.map(Body::new)
        });
        let (window, _held) = self.windows.open(is_same_host);
        let kind = windows::KINDS.iter().position(|kind| *kind == window).expect("every window is of a kind");
        let builder = &self.builders[kind];
        let served = builder.serve_connection(TokioIo::new(connection), TowerToHyperService::new(service));
        let mut served = pin!(served);
        let closed_as = tokio::select! {
            outcome = served.as_mut() => return self.log_end(peer, outcome),
            () = permit.place.lost.cancelled() => return self.count_closed("replaced"),
            () = activity.preface_overdue(self.times.handshake) => return self.count_closed("silent"),
            () = activity.call_overdue(self.times.first_call) => Some("no_call"),
            () = activity.idle_for(self.times.idle) => Some("idle"),
            () = self.shared.closing.cancelled() => None,
            () = superseded.cancelled() => None,
        };
        served.as_mut().graceful_shutdown();
        let overdue = async {
            tokio::time::sleep(self.times.handshake).await;
            // A call that began in the meantime is served.
            if closed_as.is_none() || !activity.is_idle() {
                future::pending::<()>().await;
            }
        };
        if let Some(reason) = closed_as {
            self.count_closed(reason);
        }
        tokio::select! {
            outcome = served => self.log_end(peer, outcome),
            () = overdue => {}
        }
    }

    /// Logs how a connection ended. Counts one that HTTP closed because the peer said too little:
    /// no whole head of a request of HTTP/1.1, or no answer to a ping.
    fn log_end(&self, peer: SocketAddr, outcome: Result<(), Box<dyn std::error::Error + Send + Sync>>) {
        let Err(error) = outcome else { return };
        if error.downcast_ref::<hyper::Error>().is_some_and(hyper::Error::is_timeout) {
            self.count_closed("silent");
        }
        tracing::debug!(%peer, %error, "a connection broke off");
    }

    /// Counts a connection that the server closed.
    fn count_closed(&self, reason: &str) {
        self.shared.metrics.connections_closed.with_label_values(&[reason]).inc();
    }
}

fn builder(settings: &Settings, times: TimeLimits, window: Window) -> Builder<TokioExecutor> {
    let mut builder = Builder::new(TokioExecutor::new());
    builder
        .http2()
        .timer(TokioTimer::new())
        .max_frame_size(window.frame_bytes)
        .initial_stream_window_size(window.stream_bytes)
        .initial_connection_window_size(window.connection_bytes)
        .max_concurrent_streams(settings.stream_limit)
        .keep_alive_interval(PING_INTERVAL)
        .keep_alive_timeout(PING_INTERVAL);
    // HTTP/1.1 is served only to answer such a request in a sentence.
    builder.http1().timer(TokioTimer::new()).header_read_timeout(times.handshake);
    builder
}

async fn handshake(socket: Socket, tls: &Tls, slots: &Semaphore) -> std::io::Result<TlsStream<Socket>> {
    let hello = LazyConfigAcceptor::new(Acceptor::default(), socket).await?;
    // A client that sends nothing takes no slot. The semaphore is never closed.
    let _slot = slots.acquire().await;
    hello.into_stream(tls.config.clone()).await
}
