//! Tests of the client interface: a real server on a free port, in this process.

mod answers;
mod bad_requests;
mod call_memory;
mod cancelling;
mod connections;
mod exchange;
mod harness;
mod joins;
mod life;
mod planning;
mod polling;
mod probes;
mod security;
mod sessions;
mod tables;
mod tenants;
mod tickets;
mod unread;
mod uploads;
