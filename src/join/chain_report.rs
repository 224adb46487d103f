//! Report of a chain: the rows that each join has let pass, and the order of the joins.

use serde::{Deserialize, Serialize};

use super::{JoinKind, Side};

/// Rows that have passed through a chain so far.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChainReport {
    /// Rows of each join, by its number in the chain.
    pub joins: Vec<PassedRows>,
    /// Numbers of the joins in the order in which the first rows probed them. Empty before any
    /// rows.
    pub first_order: Vec<usize>,
    /// Numbers of the joins in the order in which the last rows probed them.
    pub order: Vec<usize>,
    /// Number of times that the order changed.
    pub changes: u64,
}

/// Rows that reached a join of a chain, and rows that it made of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PassedRows {
    pub rows: u64,
    pub kept: u64,
}

impl ChainReport {
    /// Returns the report of rows that probed the joins in one order.
    pub(super) fn of(order: Vec<usize>, joins: Vec<PassedRows>) -> Self {
        Self { joins, first_order: order.clone(), order, changes: 0 }
    }

    /// Adds the report of later rows.
    pub(super) fn extend(&mut self, later: &Self) {
        if self.order.is_empty() {
            self.clone_from(later);
        } else if !later.order.is_empty() {
            self.changes += later.changes + u64::from(self.order != later.first_order);
            self.order.clone_from(&later.order);
            for (join, later) in self.joins.iter_mut().zip(&later.joins) {
                join.rows += later.rows;
                join.kept += later.kept;
            }
        }
    }
}

/// Returns the share of its rows that a join of a chain is expected to keep. `probe_side` is the
/// side of the rows. A join that repeats rows may keep more than 1.
pub(crate) fn kept_share(pairs_per_row: f64, how: JoinKind, probe_side: Side) -> f64 {
    let share = match () {
        () if how.is_anti() => 1.0 - pairs_per_row.min(1.0),
        () if how.only_side() == Some(probe_side) => pairs_per_row.min(1.0),
        () if how.keeps_unmatched(probe_side) => pairs_per_row.max(1.0),
        () => pairs_per_row,
    };
    if share.is_finite() { share } else { 1.0 }
}

/// Returns the order of joins that keep these shares of their rows: those that keep least come
/// first.
pub(crate) fn order_of(shares: &[f64]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..shares.len()).collect();
    order.sort_by(|&a, &b| shares[a].total_cmp(&shares[b]));
    order
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reports_of_later_rows_are_added_and_changes_of_the_order_are_counted() {
        let of = |order: [usize; 2], rows: [u64; 2], kept: [u64; 2]| {
            let joins = rows.into_iter().zip(kept).map(|(rows, kept)| PassedRows { rows, kept });
            ChainReport::of(order.to_vec(), joins.collect())
        };
        let mut all = ChainReport::default();
        all.extend(&ChainReport::default());
        assert_eq!(all, ChainReport::default());
        let mut of_one_turn = of([0, 1], [10, 5], [5, 1]);
        of_one_turn.extend(&of([1, 0], [1, 10], [1, 1]));
        all.extend(&of_one_turn);
        all.extend(&ChainReport::default());
        all.extend(&of([1, 0], [2, 20], [0, 2]));
        all.extend(&of([0, 1], [7, 0], [0, 0]));
        assert_eq!((&all.first_order[..], &all.order[..], all.changes), (&[0, 1][..], &[0, 1][..], 2));
        assert_eq!(all.joins, [PassedRows { rows: 20, kept: 6 }, PassedRows { rows: 35, kept: 4 }]);
    }
}
