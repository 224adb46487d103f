//! Payload columns that move with the keys (gather from transformed relations, GFTR). The others
//! are gathered by row number from the table (gather from untransformed relations, GFUR): Wu et al.
//! 2024, section 4.

use std::collections::BTreeSet;

use super::inputs::{Input, Inputs};
use super::{Side, Strategy};

/// Columns that move with the keys.
#[derive(Clone, Debug, PartialEq, Eq)]
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

impl MovedPayload {
    /// Collects the columns that pricing a strategy marked as moved with the keys.
    pub(super) fn of(strategy: Strategy, inputs: &Inputs) -> Self {
        let sides = [&inputs.build, &inputs.probe];
        let all = || sides.into_iter().flat_map(|input| &input.columns);
        if !strategy.moves_payload() {
            return Self::Nothing;
        }
        if all().all(|column| column.is_moved || !column.can_move()) {
            return Self::Everything;
        }
        let of = |side: Side| {
            let columns =
                sides.into_iter().filter(|input: &&Input| input.side == side).flat_map(|input| &input.columns);
            columns.filter(|column| column.is_moved).map(|column| column.index).collect()
        };
        Self::Columns { left: of(Side::Left), right: of(Side::Right) }
    }

    /// Returns the columns that move, out of the columns that a result takes from a side.
    pub(super) fn of_side(&self, side: Side, output_columns: &[usize]) -> BTreeSet<usize> {
        let chosen = |column: &usize| match self {
            Self::Everything => true,
            Self::Nothing => false,
            Self::Columns { left, right } => if side == Side::Left { left } else { right }.contains(column),
        };
        output_columns.iter().copied().filter(chosen).collect()
    }
}
