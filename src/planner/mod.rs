//! The planner: decides how a requested join runs, and why.
//!
//! ```text
//!   JoinSpec (names, or rows) ── bind: catalog ──► BoundJoin (columns, types)
//!      ── plan: statistics, rates ──► Plan (strategy, sides, phases with predicted bytes, seconds)
//!         └─► Task (the input of the join room)
//! ```
//!
//! Binding finds every name and checks every type, so that the server refuses a bad request before
//! it queues anything. Planning predicts rows from statistics ([`Estimates`]) and prices every
//! strategy on both build sides. Prices are roofline arithmetic on the device's [`Rates`], measured
//! once and kept in a [`RatesFile`]. The planner takes the cheapest strategy that fits in the
//! device's memory. An [`Explanation`] gives the chosen strategy and why the others lost, and
//! compares prediction with measurement.
//!
//! This room knows the catalog's statistics, key packing, the composition of joins, and a device's
//! sizes and rates. It runs only the calibration, and knows nothing of jobs or the wire.

mod bind;
mod calibrate;
mod chain;
mod cost;
mod deviation;
mod divide;
mod estimate;
mod explain;
mod explain_chain;
mod filter;
mod gang_rates;
mod inputs;
mod kept_build;
mod overrides;
mod plan;
mod rank_parts;
mod rates;
mod saved_rates;
mod spec;
mod target;
mod task;
#[cfg(test)]
mod tests;
mod value_sizes;

pub use bind::{BoundJoin, bind, bind_interruptible};
pub use calibrate::{calibrate, calibrate_telling, measure_rates};
pub use chain::BoundThen;
pub use cost::{Demand, MemoryNeed, PredictedPhase, Resource};
pub use deviation::Measured;
pub(crate) use divide::needs_several_devices;
pub use estimate::Estimates;
pub use explain::{
    ExplainedAlternative, ExplainedDevice, ExplainedExchange, ExplainedHeavyKey, ExplainedPhase, ExplainedResult,
    ExplainedSet, ExplainedSide, Explanation, Skew, deviation_from,
};
pub use explain_chain::ExplainedChainJoin;
pub use gang_rates::{GangRates, LinkRates};
pub use kept_build::KeptBuild;
pub use overrides::PlanOverrides;
pub use plan::{Alternative, Plan, plan, plan_on, plan_with_overrides, propose};
pub use rates::Rates;
pub use saved_rates::{DeviceModel, RatesFile, SavedLinkRates, SavedRates};
pub use spec::{Input, JoinSpec, KeyPair, ThenSpec};
pub use target::Target;

pub use crate::join::{
    Composition, Distribution, JoinKey, JoinKind, MovedPayload, OutputColumn, OutputSource, Side, Strategy,
    TransferOrder,
};
