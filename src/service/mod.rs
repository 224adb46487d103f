//! Client-facing side of the server: Flight RPCs, authentication, limits, health and metrics.
//!
//! ```text
//!              ┌ access: who is it, how long may it take, one line in the log ┐
//!   client ───►│  flight ─┬─ get_info  GetFlightInfo, Poll, Schema, List ◄── commands, tickets
//!              │  do_get ─┼─ get_data  DoGet  ◄── encode, compact
//!              │  ingest ─┼───────────  DoPut  ──► table_upload ──► catalog
//!              │          └─ actions   DoAction ◄── sessions, describe
//!              └──────────────────────────────────────────────────────────────┘
//!   prober ───► health (gRPC), admin (HTTP) ◄── metrics
//! ```
//!
//! `server` starts and drains the server. `incoming` accepts the connections, within limits, and
//! `connections` serves them. `credentials` has the tokens and certificates, and reads them again.
//! `shared` has the state that all calls share. `call_memory` bounds what calls make the server
//! hold, and `answer_memory` what of it their answers take. `status` is the only place where
//! Dovetail's errors become gRPC statuses.
//!
//! This room depends on the scheduler, the planner and the catalog. It does not depend on how a
//! join runs.

mod access;
mod actions;
mod admin;
mod answer_memory;
mod auth;
mod call_memory;
mod call_record;
mod certificate;
mod commands;
pub(crate) mod compact;
mod connections;
pub mod cpu_work;
mod credentials;
mod deliveries;
mod describe;
mod do_get;
pub mod encode;
mod exchange;
mod flight;
mod gauges;
mod get_data;
mod get_info;
mod handshake;
mod health;
mod incoming;
pub mod ingest;
mod metrics;
mod readers;
mod server;
pub mod sessions;
pub mod settings;
mod shared;
mod status;
mod table_upload;
mod tickets;
mod tls;
mod transfers;
mod windows;

pub use exchange::JOB_HEADER;
pub(crate) use metrics::code_named;
pub use server::Server;
pub use settings::Settings;
pub use shared::Shared;
pub(crate) use shared::{tenant_memory_bytes, tenant_results_bytes};

/// The messages of `proto/dovetail.proto`, with their JSON form.
#[allow(unused_qualifications, clippy::all, clippy::pedantic)]
pub mod proto {
    include!(concat!(env!("OUT_DIR"), "/dovetail.v1.rs"));
    include!(concat!(env!("OUT_DIR"), "/dovetail.v1.serde.rs"));

    /// Compiled descriptors, for gRPC reflection.
    pub const DESCRIPTOR_SET: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/dovetail_descriptor.bin"));

    /// Compiled descriptors of Arrow Flight, for gRPC reflection.
    pub const FLIGHT_DESCRIPTOR_SET: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/flight_descriptor.bin"));
}
