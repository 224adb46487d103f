//! Composition of a join: every decision about the way it runs that changes no row of its result.
//!
//! A [`Strategy`] is the name of some compositions: those with one row layout that move payload, or
//! that do not. The planner chooses a composition by its price, a caller may override parts of it,
//! and the join follows it as far as its device can.
//!
//! The planner applies the build side, the dense array and the gathering of text when it makes a
//! task (`planner/task.rs`).
//!
//! A new decision is a field here. The planner takes it where it prices a composition
//! (`planner/cost/choice.rs`), and a caller overrides it by a field of
//! [`PlanOverrides`](crate::planner::PlanOverrides). `Composed` in `tests/joins` and `every_way` in
//! `benches/src/overrides.rs` vary it.

use std::collections::BTreeSet;
use std::fmt;

use serde::{Deserialize, Serialize};

use super::{Side, Strategy};
use crate::device::RadixBits;

/// Decisions about the way a join runs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Composition {
    /// Side that is indexed. Any kind of join may build on either side.
    pub build_side: Side,
    /// Layout of the rows of both sides.
    pub row_layout: RowLayout,
    /// Columns that move with the keys, for layouts that move rows.
    pub moved_payload: MovedPayload,
    /// True if the build keys look distinct and dense, so that an array over their extent replaces
    /// the hash table. For rows that stay in table order.
    pub dense: bool,
    /// True if a filter of the build keys drops probe rows after their keys are made and before
    /// anything is moved. A kind of join that keeps probe rows without a match uses no filter.
    pub filter: bool,
    /// Order in which columns of both sides cross the link.
    pub transfer_order: TransferOrder,
    /// True if the device makes keys of text, and hashes and compares keys too wide to be packed.
    /// Otherwise, or if the device cannot do so or cannot read them, the host does.
    pub device_makes_keys: bool,
    /// True if the device gathers text of the result, for the columns that it can. Otherwise the
    /// host does.
    pub device_gathers_text: bool,
}

/// Layout of rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum RowLayout {
    /// In table order.
    Original,
    /// By partition.
    Partitioned(RadixBits),
    /// By key.
    Sorted,
}

/// Payload columns that move with the keys (gather from transformed relations, GFTR). The others
/// are gathered by row number from the table (gather from untransformed relations, GFUR): Wu et al.
/// 2024, section 4.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum MovedPayload {
    /// Every column that can move.
    Everything,
    /// No column: row numbers move instead.
    Nothing,
    /// The given columns of each table, by index; the others are gathered by row number.
    Columns {
        /// Columns of the left table.
        left: BTreeSet<usize>,
        /// Columns of the right table.
        right: BTreeSet<usize>,
    },
}

/// Order in which columns of both sides cross the link to the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum TransferOrder {
    /// The build side, then the probe side in chunks, on several streams.
    Chunks,
    /// The build side, then the probe side in one chunk if that fits. More chunks would overlap
    /// less than they cost in calls and in further passes over the build side.
    ProbeAtOnce,
    /// The build keys, then the probe side in chunks, then the build side's payload, so that rows
    /// begin to leave earlier. For inner joins of rows that stay in table order; others run as
    /// [`Chunks`](Self::Chunks).
    DeferBuildPayload,
}

impl Composition {
    /// Returns the name of the strategy with this layout and payload.
    pub fn strategy(&self) -> Strategy {
        match (self.row_layout, self.moved_payload == MovedPayload::Nothing) {
            (RowLayout::Original, _) => Strategy::Hash,
            (RowLayout::Partitioned(_), false) => Strategy::RadixHash,
            (RowLayout::Partitioned(_), true) => Strategy::RadixHashGfur,
            (RowLayout::Sorted, false) => Strategy::SortMerge,
            (RowLayout::Sorted, true) => Strategy::SortMergeGfur,
        }
    }

    /// Returns the base-2 logarithm of the number of partitions of both sides; `None` without
    /// partitions.
    pub fn radix_bits(&self) -> Option<u32> {
        match self.row_layout {
            RowLayout::Partitioned(RadixBits { bits, .. }) => Some(bits),
            RowLayout::Original | RowLayout::Sorted => None,
        }
    }

    /// True if the build side's payload crosses the link after the probe side.
    pub fn defers_build_payload(&self) -> bool {
        self.transfer_order == TransferOrder::DeferBuildPayload
    }
}

impl RowLayout {
    /// Returns the layout of a strategy. A strategy with partitions has `1 << radix_bits` of them.
    pub fn of(strategy: Strategy, radix_bits: Option<u32>) -> Self {
        match strategy {
            Strategy::Hash => Self::Original,
            Strategy::RadixHash | Strategy::RadixHashGfur => {
                Self::Partitioned(RadixBits { skip: 0, bits: radix_bits.unwrap_or(0) })
            }
            Strategy::SortMerge | Strategy::SortMergeGfur => Self::Sorted,
        }
    }
}

impl MovedPayload {
    /// Returns the columns that move, out of the columns that a result takes from a side.
    pub fn of_side(&self, side: Side, output_columns: &[usize]) -> BTreeSet<usize> {
        let moves = |column: &usize| match self {
            Self::Everything => true,
            Self::Nothing => false,
            Self::Columns { left, right } => if side == Side::Left { left } else { right }.contains(column),
        };
        output_columns.iter().copied().filter(moves).collect()
    }
}

/// All decisions on one line, except whether the probe side comes at once. Recorded joins name
/// their compositions by this line, so a new decision prints nothing at its former value
/// (`planner/tests/recorded.rs`).
impl fmt::Display for Composition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { build_side, dense, moved_payload, .. } = self;
        let flags = [
            (self.filter, "filter"),
            (self.defers_build_payload(), "build columns last"),
            (self.device_makes_keys, "keys by the device"),
            (self.device_gathers_text, "text by the device"),
        ];
        let flags: Vec<&str> = flags.into_iter().filter_map(|(is_set, name)| is_set.then_some(name)).collect();
        let (strategy, radix_bits, flags) = (self.strategy(), self.radix_bits(), flags.join(", "));
        write!(f, "{strategy} {build_side} {radix_bits:?} {dense} {moved_payload:?} [{flags}]")
    }
}
