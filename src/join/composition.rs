//! Composition of a join: every decision about the way it runs that changes no row of its result.
//!
//! A [`Strategy`] names a row layout, and says if payload moves with the keys. Many compositions
//! share a strategy. The planner chooses a composition by its predicted cost, and a caller may
//! override parts of it. The join follows the composition as far as the device can.
//!
//! The planner applies `build_side`, `dense` and `device_gathers_text` when it makes a task
//! (`planner/task.rs`). Changing these three in a finished task has no effect.
//!
//! To add a decision:
//!
//! 1. Add a field here, and show it in `Display`.
//! 2. Decide it where the planner prices compositions (`planner/cost/choice.rs`). If it changes the
//!    predicted time, price it in `Model` (`planner/cost/phases.rs`).
//! 3. Add a field to [`PlanOverrides`](crate::planner::PlanOverrides), so that a caller can
//!    override it.
//! 4. If users should see it, tell it in `tree` of `planner/explain.rs`.
//! 5. Vary it in `Composed` of `tests/joins` and in `every_way` of `benches/src/overrides.rs`. Each
//!    decision doubles the ways that these run.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::kind::unknown;
use super::rank::BUCKET_BITS;
use super::{Side, Strategy};
use crate::device::RadixBits;
use crate::{Error, Result};

/// Decisions about the way a join runs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Composition {
    /// Any kind of join may build on either side.
    pub build_side: Side,
    pub row_layout: RowLayout,
    /// Only for layouts that move rows.
    pub moved_payload: MovedPayload,
    /// True if the build keys look distinct and dense, so that an array over their extent replaces
    /// the hash table. Only for rows that stay in table order.
    pub dense: bool,
    /// True if a filter of the build keys drops probe rows after their keys are made and before
    /// anything is moved. A kind of join that keeps probe rows without a match uses no filter.
    pub filter: bool,
    pub transfer_order: TransferOrder,
    /// True if the device makes keys of text, and hashes and compares keys too wide to be packed.
    /// Otherwise the host does so, and also if the device cannot, or cannot read the key columns.
    pub device_makes_keys: bool,
    /// True if the device gathers text of the result where it can. The host gathers all other text.
    pub device_gathers_text: bool,
    pub distribution: Distribution,
    /// True if each rank reads a share of the build side, and sends it to all other ranks.
    /// Otherwise each rank that needs all build rows reads all. Only for broadcast, with build rows
    /// that can cross whole: packed keys, and fixed-width columns without nulls.
    pub shares_build_read: bool,
}

/// Division of a join among the ranks of a gang.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Distribution {
    /// One device runs the join.
    #[default]
    Alone,
    /// Every rank has the whole build side. The ranks divide the probe side. Only for kinds of join
    /// that keep no build rows for the end, because no rank knows the matches of the others.
    Broadcast,
    /// Each rank joins all rows of its own keys. Rows of both sides cross to the rank of their key.
    /// Only for keys that are packed exactly.
    Hash,
}

impl Distribution {
    /// Distributions that a caller can ask for.
    pub const ALL: [Self; 2] = [Self::Broadcast, Self::Hash];

    /// Returns the name on the wire.
    pub fn name(self) -> &'static str {
        match self {
            Self::Alone => "alone",
            Self::Broadcast => "broadcast",
            Self::Hash => "hash",
        }
    }
}

impl FromStr for Distribution {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let found = Self::ALL.into_iter().find(|distribution| distribution.name() == text);
        found.ok_or_else(|| {
            let others = [("alone", "auto"), ("exchange", "hash"), ("repartition", "hash"), ("replicate", "broadcast")];
            unknown("distribution", text, &["auto", "broadcast", "hash"], &others)
        })
    }
}

/// Layout of rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum RowLayout {
    /// In table order.
    Original,
    Partitioned(RadixBits),
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
    Columns { left: BTreeSet<usize>, right: BTreeSet<usize> },
}

/// Order in which columns of both sides cross the link to the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum TransferOrder {
    /// The build side, then the probe side in chunks, on several streams.
    Chunks,
    /// The build side, then the probe side in one chunk if that fits. The overlap of more chunks
    /// would save less than their calls and further passes over the build side cost.
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

    /// True if rows cross from rank to rank.
    pub fn exchanges_rows(&self) -> bool {
        self.distribution == Distribution::Hash || self.shares_build_read
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

    /// Returns the layout for a distribution. An exchange has used the first bits of mixed keys.
    #[must_use]
    pub fn within(self, distribution: Distribution) -> Self {
        match (self, distribution) {
            (Self::Partitioned(bits), Distribution::Hash) => Self::Partitioned(RadixBits { skip: BUCKET_BITS, ..bits }),
            _ => self,
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
/// their compositions by this line (`planner/tests/recorded.rs`). At the value that all older
/// records have, a new decision prints nothing.
impl fmt::Display for Composition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Lists every field, so that the compiler finds a forgotten one.
        let Self {
            build_side,
            row_layout: _,
            moved_payload,
            dense,
            filter,
            transfer_order: _,
            device_makes_keys,
            device_gathers_text,
            distribution,
            shares_build_read,
        } = self;
        let flags = [
            (*filter, "filter"),
            (self.defers_build_payload(), "build columns last"),
            (*device_makes_keys, "keys by the device"),
            (*device_gathers_text, "text by the device"),
            (*distribution != Distribution::Alone, distribution.name()),
            (*shares_build_read, "build read in shares"),
        ];
        let flags: Vec<&str> = flags.into_iter().filter_map(|(is_set, name)| is_set.then_some(name)).collect();
        let (strategy, radix_bits, flags) = (self.strategy(), self.radix_bits(), flags.join(", "));
        write!(f, "{strategy} {build_side} {radix_bits:?} {dense} {moved_payload:?} [{flags}]")
    }
}
