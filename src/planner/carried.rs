//! Which payload columns move with the keys (gather from transformed relations, GFTR) and which are gathered by row number
//! from where they lie (gather from untransformed relations, GFUR): Wu et al. 2024, section 4.

use std::collections::BTreeSet;

use super::inputs::{Input, Inputs};
use super::{Side, Strategy};

/// What moves with the keys.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Carried {
    /// Every column that can.
    Everything,
    /// None: row numbers do.
    Nothing,
    /// These of each table, by index; the others are gathered by row number.
    Columns {
        /// Of the left table.
        left: BTreeSet<usize>,
        /// Of the right table.
        right: BTreeSet<usize>,
    },
}

impl Carried {
    /// Those that were marked when a strategy was priced.
    pub(super) fn of(strategy: Strategy, inputs: &Inputs) -> Self {
        let sides = [&inputs.build, &inputs.probe];
        let all = || sides.into_iter().flat_map(|input| &input.columns);
        if !strategy.carries_payload() {
            return Self::Nothing;
        }
        if all().all(|column| column.carried || !column.can_be_carried()) {
            return Self::Everything;
        }
        let of = |side: Side| {
            let columns =
                sides.into_iter().filter(|input: &&Input| input.side == side).flat_map(|input| &input.columns);
            columns.filter(|column| column.carried).map(|column| column.index).collect()
        };
        Self::Columns { left: of(Side::Left), right: of(Side::Right) }
    }

    /// Of the columns that a result takes from a side, those that are to move.
    pub(super) fn of_side(&self, side: Side, output_columns: &[usize]) -> BTreeSet<usize> {
        let chosen = |column: &usize| match self {
            Self::Everything => true,
            Self::Nothing => false,
            Self::Columns { left, right } => if side == Side::Left { left } else { right }.contains(column),
        };
        output_columns.iter().copied().filter(chosen).collect()
    }
}
