//! Dovetail: an Arrow Flight server that joins large tables on all the GPUs of its host, or on its CPU.
//!
//! The rooms, from the door to the cellar; each knows of those below it only:
//!
//! | room | what lives there |
//! |---|---|
//! | [`cli`] | the command line |
//! | [`service`] | what a client meets: Flight, authentication, limits, health, metrics |
//! | [`scheduler`] | jobs, the queue, placement, cancellation, progress |
//! | [`engine`] | what runs the joins of a device, in this process or in one of its own |
//! | [`planner`] | from a join specification to a plan, and why |
//! | [`join`] | strategies, composed of primitives |
//! | [`columns`] | Arrow to device columns and back |
//! | [`device`] | devices and their primitives |
//! | [`topology`] | what the host is made of, and how it is linked |
//! | [`catalog`] | tables and results |
//! | [`memory`] | budgets, reservations, the arena |
//! | `human` | numbers, types, names and files as people read of them |

pub mod catalog;
pub mod cli;
pub mod columns;
pub mod device;
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

pub use error::{Context, Error, Result};
pub(crate) use human::listed;
