//! The admin port: metrics and health over HTTP, for scrapers and probes.
//!
//! It serves counters and gauges, whose labels name devices, tenants and the build. It also tells
//! in one line if the server is alive and ready, or why it is not. A second line after `ready`
//! describes host memory, and a picture shows devices and links. The port serves no table names and
//! takes no orders, so it needs no token. Because it shows the names of tenants, it listens for
//! other hosts only where the Flight service may.
//!
//! The newest connection is always served. A probe of the server's health therefore has an answer,
//! whatever other clients of the port do.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use hyper::server::conn::{http1, http2};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;

use super::incoming::{Throttle, accept};
use super::shared::Shared;
use super::{describe, gauges};
use crate::memory::human_bytes;

/// Content of `/`, and of the answer to any other path.
const PATHS: &str = "This is the admin port of a Dovetail server. It has /metrics (Prometheus), /healthz (the process is \
                     alive), /readyz (traffic should come here) and /topology.svg (a picture of devices and links), each \
                     with GET. Tables and joins are on the Arrow \
                     Flight port (--listen).\n";

/// Maximum number of connections. A newer one closes the oldest.
pub(super) const CONNECTIONS_MAX: usize = 64;

/// Serves until the future is dropped. Closes a connection when the head of a request, the first or
/// the next, takes longer than `head_limit`.
pub(super) async fn serve(listener: TcpListener, shared: Arc<Shared>, head_limit: Duration) {
    let service = TowerToHyperService::new(routes(shared.clone()));
    let mut builder = http1::Builder::new();
    builder.timer(TokioTimer::new()).header_read_timeout(head_limit);
    let (mut connections, mut by_age, said) = (JoinSet::new(), VecDeque::new(), Throttle::default());
    loop {
        let (stream, _) = tokio::select! {
            Some(_) = connections.join_next() => continue,
            accepted = accept(&listener, "--admin-listen", &said) => accepted,
        };
        by_age.retain(|connection: &tokio::task::AbortHandle| !connection.is_finished());
        if by_age.len() >= CONNECTIONS_MAX
            && let Some(oldest) = by_age.pop_front()
        {
            oldest.abort();
            shared.metrics.connections_closed.with_label_values(&["admin_limit"]).inc();
        }
        let (service, http1) = (service.clone(), builder.clone());
        by_age.push_back(connections.spawn(async move {
            let served = match speaks_http2(&stream, head_limit).await {
                // A client that takes this port for the Flight port learns of its mistake.
                true => {
                    let http2 = http2::Builder::new(TokioExecutor::new());
                    let served = http2.serve_connection(TokioIo::new(stream), service);
                    tokio::time::timeout(head_limit, served).await.unwrap_or(Ok(()))
                }
                false => http1.serve_connection(TokioIo::new(stream), service).await,
            };
            if let Err(error) = served {
                tracing::debug!(%error, "a connection to the admin port broke off");
            }
        }));
    }
}

/// True if a client begins with HTTP/2. Waits for its first bytes, up to the limit.
async fn speaks_http2(stream: &TcpStream, limit: Duration) -> bool {
    /// Start of the preface of HTTP/2. No method of HTTP/1.1 begins like this.
    const START: &[u8] = b"PRI";
    /// Time until the rest of a start that came in parts is looked for.
    const PAUSE: Duration = Duration::from_millis(10);
    let compared = async {
        let mut begun = [0; START.len()];
        loop {
            match stream.peek(&mut begun).await {
                Ok(count) if count > 0 && count < START.len() && START.starts_with(&begun[..count]) => {
                    tokio::time::sleep(PAUSE).await;
                }
                Ok(count) => return begun[..count] == *START,
                Err(_) => return false,
            }
        }
    };
    tokio::time::timeout(limit, compared).await.unwrap_or(false)
}

/// Returns the routes: `/metrics`, `/healthz` (the process is alive), `/readyz` (traffic should
/// come here), `/topology.svg` (a picture of devices and links).
fn routes(shared: Arc<Shared>) -> Router {
    Router::new()
        .route("/", get(async || PATHS))
        .route("/metrics", get(serve_metrics))
        .route("/healthz", get(async || "alive\n"))
        .route("/readyz", get(serve_readiness))
        .route("/topology.svg", get(serve_topology))
        .fallback(async || (StatusCode::NOT_FOUND, PATHS))
        // Only for the routes before it.
        .method_not_allowed_fallback(async || (StatusCode::METHOD_NOT_ALLOWED, PATHS))
        .with_state(shared)
}

async fn serve_metrics(State(shared): State<Arc<Shared>>) -> Response {
    match gauges::render(&shared) {
        Ok(text) => ([(header::CONTENT_TYPE, prometheus::TEXT_FORMAT)], text).into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    }
}

async fn serve_readiness(State(shared): State<Arc<Shared>>) -> Response {
    match shared.readiness() {
        Ok(()) => format!("ready\n{}\n", host_memory(&shared)).into_response(),
        Err(why) => (StatusCode::SERVICE_UNAVAILABLE, format!("{why}\n")).into_response(),
    }
}

async fn serve_topology(State(shared): State<Arc<Shared>>) -> Response {
    ([(header::CONTENT_TYPE, "image/svg+xml")], describe::topology(&shared).to_svg()).into_response()
}

/// Describes the memory of tables and results, and what small pages cost.
fn host_memory(shared: &Shared) -> String {
    let backing = shared.catalog.arena().backing();
    let cost = backing.cost().map(|cost| format!(": {cost}")).unwrap_or_default();
    let arena = shared.catalog.arena();
    let (mapped, wanted) = (arena.mapped_bytes(), arena.prepared_bytes_wanted());
    let prepared = match wanted {
        0 => String::new(),
        wanted => format!("; {} of {} are prepared", human_bytes(mapped.min(wanted)), human_bytes(wanted)),
    };
    format!("host memory is {}{cost}{prepared}", backing.describe())
}
