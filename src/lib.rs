//! Dovetail: an Arrow Flight server that joins large tables on all GPUs of its host, or on its CPU.
//!
//! The rooms, from top to bottom. Each room uses only the rooms below it:
//!
//! | room | contents |
//! |---|---|
//! | [`cli`] | the command line |
//! | [`service`] | the client's interface: Flight, authentication, limits, health, metrics |
//! | [`scheduler`] | jobs, the queue, placement, cancellation, progress |
//! | [`doctor`] | checks the host and the limits of the container |
//! | [`engine`] | runs the joins of a device, in this process or in a child process |
//! | [`planner`] | turns a join specification into a plan, with reasons |
//! | [`join`] | strategies, composed of primitives |
//! | [`columns`] | Arrow to device columns and back |
//! | [`device`] | devices and their primitives |
//! | [`topology`] | the host's devices and the links between them |
//! | [`catalog`] | tables and results |
//! | [`memory`] | budgets, reservations, the arena |
//! | `human` | numbers, types, names and files in text for people |

pub mod catalog;
pub mod cli;
pub mod columns;
pub mod device;
pub mod doctor;
pub mod engine;
mod error;
mod human;
pub mod join;
mod lines;
pub mod memory;
mod panics;
pub mod planner;
#[cfg(test)]
mod rooms;
pub mod scheduler;
pub mod service;
#[cfg(test)]
mod testing;
pub mod topology;
#[cfg(test)]
mod turns;

pub use error::{Context, Error, Result};
pub(crate) use human::listed;
