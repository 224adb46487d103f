//! The planner: from what was asked for to what will run, and why.
//!
//! ```text
//!   JoinSpec (names) ── bind: catalog ──► BoundJoin (columns, types) ── plan: statistics, rates ──► Plan (strategy, sides,
//!                                                                              phases with predicted bytes and seconds)
//!                                                                          └─► Task (what the join room runs)
//! ```
//!
//! Binding finds every name and checks every type, so that a bad request is refused before anything is queued. Planning
//! predicts rows from statistics ([`Estimates`]), prices every strategy on both build sides by roofline arithmetic on the
//! device's [`Rates`], measured once and kept in a [`RatesFile`], and takes the cheapest that fits in the device's memory. An [`Explanation`] says what was
//! chosen, why the others lost, and how the prediction compares with what was measured.
//!
//! This room knows of the catalog's statistics, of how keys are packed, of how joins are composed, and of a device's sizes and rates; it runs
//! nothing but the calibration, and knows nothing of jobs or the wire.

mod bind;
mod calibrate;
mod carried;
mod cost;
mod estimate;
mod explain;
mod filter;
mod forced;
mod inputs;
mod kept_rates;
mod plan;
mod rates;
mod spec;
mod target;
mod task;
#[cfg(test)]
mod tests;

pub use bind::{BoundJoin, bind, bind_interruptible};
pub use calibrate::{calibrate, calibrate_telling, measure_rates};
pub use carried::Carried;
pub use cost::{MemoryNeed, PredictedPhase};
pub use estimate::Estimates;
pub use explain::{
    ExplainedAlternative, ExplainedDevice, ExplainedHeavyKey, ExplainedPhase, ExplainedResult, ExplainedSide,
    Explanation, Measured,
};
pub use forced::Forced;
pub use kept_rates::{DeviceModel, KeptRates, RatesFile};
pub use plan::{Alternative, Plan, plan, plan_forced, plan_on, propose};
pub use rates::Rates;
pub use spec::{DeviceRequest, JoinSpec, KeyPair};
pub use target::Target;

pub use crate::join::{JoinKey, JoinKind, OutputColumn, OutputSource, Side, Strategy};
