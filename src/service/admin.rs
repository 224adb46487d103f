//! The admin port: metrics and health over HTTP, for scrapers and probes.
//!
//! It serves counters and gauges, whose labels name devices, tenants and the build. It also tells
//! in one line if the server is alive and ready, or why it is not. A second line after `ready`
//! describes host memory. The port serves no table names and takes no orders, so it needs no token.
//! Because it shows the names of tenants, it listens for other hosts only where the Flight service
//! may.

use std::sync::Arc;

use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;

use super::gauges;
use super::shared::Shared;
use crate::memory::human_bytes;

/// Content of `/`, and of the answer to any other path.
const PATHS: &str = "This is the admin port of a Dovetail server. It has /metrics (Prometheus), /healthz (the process is \
                     alive) and /readyz (traffic should come here), each with GET. Tables and joins are on the Arrow \
                     Flight port (--listen).\n";

/// Returns the routes: `/metrics`, `/healthz` (the process is alive), `/readyz` (traffic should
/// come here).
pub(super) fn routes(shared: Arc<Shared>) -> Router {
    Router::new()
        .route("/", get(async || PATHS))
        .route("/metrics", get(serve_metrics))
        .route("/healthz", get(async || "alive\n"))
        .route("/readyz", get(serve_readiness))
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
