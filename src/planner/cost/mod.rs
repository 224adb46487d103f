//! Prices strategies: roofline arithmetic on a device's measured rates.
//!
//! Each phase takes the longer of two times: its bytes over the rate of their boundary, and its
//! rows over the rate of its primitive. This is the roofline of Williams et al. 2009, with one roof
//! per boundary. Random reads beyond the cache, and the fixed time of each call, are added. Phases
//! add up, except where copies run in parallel with primitives. Then the busiest [`Resource`]
//! bounds the time.
//!
//! ```text
//!   choice: passes, filter, moved columns ─► Model ─┬─ memory: minimum and whole ─► chunks
//!                                                   └─ phases: steps, bytes and seconds of each
//!                                                      resource ─► total
//! ```
//!
//! A running join records its time under the same phase names.

mod choice;
mod links;
mod memory;
mod phases;
mod resource;
mod steps;

pub(super) use choice::Question;
pub(super) use links::Links;
pub(super) use memory::Chunks;
pub use memory::MemoryNeed;
pub use resource::{Demand, Resource};
pub use steps::PredictedPhase;

use super::inputs::{Input, Inputs};
use super::rates::of_width;
use super::{BoundJoin, Estimates, JoinKind, Rates, Strategy, Target};
use crate::columns::Role;
use crate::device::host::{FilterBytes, TableBytes};
use crate::join::Composition;

/// A composition with its price.
#[derive(Debug)]
pub(super) struct Costed {
    pub(super) composition: Composition,
    pub(super) phases: Vec<PredictedPhase>,
    /// Seconds of all phases. Time in which copies run in parallel with primitives counts once.
    pub(super) seconds: f64,
    pub(super) demand: Demand,
    pub(super) memory: MemoryNeed,
    /// Probe rows predicted to pass the filter of the build keys; `None` without a filter.
    pub(super) filtered_rows: Option<f64>,
    /// Bytes that a rank is predicted to send to the others.
    pub(super) sent_bytes: f64,
}

/// Strategy, passes and filter on a build side, from which phases and memory are computed. The
/// transfer order is decided last.
struct Model<'a> {
    join: &'a BoundJoin,
    strategy: Strategy,
    inputs: &'a Inputs,
    links: &'a Links,
    estimates: &'a Estimates,
    target: &'a Target,
    rates: &'a Rates,
    passes: f64,
    partitions: f64,
    filter: Option<Filter>,
}

/// A filter of the build keys, which probe rows pass before they are transformed.
struct Filter {
    /// Probe rows that pass the filter.
    passing: f64,
    bytes: FilterBytes,
}

impl Model<'_> {
    /// Rows of a side that are transformed and matched: rows with a key. On the probe side, only
    /// those that pass the filter.
    fn transformed(&self, role: Role) -> f64 {
        match (role, &self.filter) {
            (Role::Probe, Some(filter)) => filter.passing,
            _ => self.inputs.of(role).keyed,
        }
    }

    /// True if the device joins partitions in one go (`join/fused.rs`). If a key has many build
    /// rows, the device may give up the fused join, and group and match the rows.
    fn fuses_partition_join(&self) -> bool {
        /// Maximum mean rows per key. Beyond it, listing runs of equal keys is the better way.
        const ROWS_OF_KEY_MAX: f64 = 32.0;
        /// Maximum rows of a heavy key: half of what a GPU goes through in one bucket of its table
        /// (`CHAIN_MAX` of `kernels/join_partitions.cu`).
        const ROWS_OF_HEAVY_KEY_MAX: f64 = 512.0;
        // Rows have to be written one by one with or without fusing. Without it, a run of rows is
        // counted at once.
        let heavy_max = if self.join.counts_rows { ROWS_OF_KEY_MAX } else { ROWS_OF_HEAVY_KEY_MAX };
        self.strategy.is_partitioned()
            && self.join.how == JoinKind::Inner
            && !self.inputs.hashed
            && self.estimates.rows_of_key(self.inputs.build.side) <= ROWS_OF_KEY_MAX
            && self.estimates.heavy(self.join, self.inputs.build.side).all(|(_, rows)| rows <= heavy_max)
            && of_width(self.rates.join_rows, self.inputs.key_width) > 0.0
    }

    /// Bytes per row that move with the key.
    fn payload_bytes(&self, input: &Input) -> f64 {
        if self.strategy == Strategy::Hash {
            return 0.0;
        }
        input.moved_row_bytes() + if input.needs_row_numbers() || self.inputs.hashed { 4.0 } else { 0.0 }
    }

    /// Bytes per row that cross an exchange: the key, columns without nulls, and a row number if
    /// the host gathers any other column.
    fn exchanged_row_bytes(&self, input: &Input) -> f64 {
        let crossing = input.columns.iter().filter(|column| column.can_move());
        let numbers = if input.crosses_whole() { 0.0 } else { 4.0 };
        self.inputs.key_bytes() + crossing.map(|column| column.bytes).sum::<f64>() + numbers
    }

    /// Rows of the result that include a row of the given side.
    fn rows_with(&self, input: &Input) -> f64 {
        let how = self.join.how;
        let unmatched = if how.keeps_unmatched(input.side) { input.rows - input.matched } else { 0.0 };
        match how.only_side() {
            Some(side) if side == input.side => self.estimates.rows,
            Some(_) => 0.0,
            None => self.estimates.pairs + unmatched,
        }
    }

    fn table(&self, rows: f64, repeats: bool) -> TableBytes {
        TableBytes::new(self.inputs.key_width, rows as u64, repeats)
    }
}
