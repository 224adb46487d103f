//! Rows of a table by the NUMA node of their memory, so that each rank of a gang takes those of its
//! own node first.
//!
//! ```text
//!   rows of a table   [ node 0 | node 1 |  node 0  | node 1 ]      runs, in the order of the rows
//!   counter of node 0 ────────►        ──────────►                 rows of the node that are taken
//!   counter of node 1           ───────►            ───────►
//! ```

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use arrow::array::{Array, ArrayData};
use serde::{Deserialize, Serialize};

use crate::catalog::Table;

/// Maximum nodes with a counter of their own. Tables on more nodes are taken in the order of rows.
pub(super) const NODES_MAX: usize = 8;

/// Maximum runs of a table, and least rows of a run on average. Chunks end with their run, so short
/// runs would cost more calls than near memory saves.
const RUNS_MAX: usize = 512;
const RUN_ROWS_MIN: u64 = 1 << 20;

/// Runs of a table's rows on several nodes. Without runs, all rows are alike.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RowNodes {
    /// Runs of each node, in the order of the nodes' numbers.
    by_node: Vec<(u32, Vec<Range<u64>>)>,
}

/// NUMA node of a rank, and the nodes of both sides' rows. All ranks of a gang have the same rows.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NearRows {
    pub node: Option<u32>,
    pub build: Arc<RowNodes>,
    pub probe: Arc<RowNodes>,
}

impl RowNodes {
    /// Finds the runs of a table. `node_of` returns the NUMA node of an address, if it is known.
    pub fn of(table: &Table, node_of: &dyn Fn(*const u8) -> Option<u32>) -> Self {
        let batches = table.batches.iter().map(|batch| {
            let mut bytes: BTreeMap<u32, usize> = BTreeMap::new();
            for column in batch.columns() {
                add_bytes(&column.to_data(), node_of, &mut bytes);
            }
            // Memory that no node was chosen for counts for the first node.
            let most = bytes.into_iter().max_by_key(|&(node, bytes)| (bytes, u32::MAX - node));
            (batch.num_rows() as u64, most.map_or(0, |(node, _)| node))
        });
        Self::of_batches(batches, RUN_ROWS_MIN)
    }

    /// Finds the runs of batches with the given rows and nodes.
    fn of_batches(batches: impl Iterator<Item = (u64, u32)>, run_rows_min: u64) -> Self {
        let (mut runs, mut rows): (Vec<(Range<u64>, u32)>, u64) = (Vec::new(), 0);
        for (more, node) in batches.filter(|(rows, _)| *rows > 0) {
            let end = rows + more;
            match runs.last_mut() {
                Some((run, of)) if *of == node => run.end = end,
                _ => runs.push((rows..end, node)),
            }
            rows = end;
        }
        let mut by_node: BTreeMap<u32, Vec<Range<u64>>> = BTreeMap::new();
        let is_short = runs.len() > RUNS_MAX || rows < run_rows_min.saturating_mul(runs.len() as u64);
        for (run, node) in runs {
            by_node.entry(node).or_default().push(run);
        }
        match is_short || by_node.len() < 2 || by_node.len() > NODES_MAX {
            true => Self::default(),
            false => Self { by_node: by_node.into_iter().collect() },
        }
    }

    /// True if no node has rows of its own.
    pub(super) fn are_alike(&self) -> bool {
        self.by_node.is_empty()
    }

    /// Returns the counters in the order in which a rank on a node takes rows: its own node's
    /// first, then the others, from the next one on.
    pub(super) fn order(&self, node: Option<u32>) -> impl Iterator<Item = usize> + use<> {
        let count = self.by_node.len().max(1);
        let own = self.by_node.iter().position(|(of, _)| Some(*of) == node).unwrap_or(0);
        (0..count).map(move |step| (own + step) % count)
    }

    /// Returns the rows that are left of a run, given the number of a node's rows that are taken.
    /// `None` once all are taken. `total`: the rows of the table.
    pub(super) fn left(&self, counter: usize, taken: u64, total: u64) -> Option<Range<u64>> {
        let Some((_, runs)) = self.by_node.get(counter) else {
            return (taken < total).then_some(taken..total);
        };
        let mut before = 0;
        for run in runs {
            let rows = run.end - run.start;
            if taken < before + rows {
                return Some(run.start + (taken - before)..run.end);
            }
            before += rows;
        }
        None
    }

    /// Makes rows of which each node has two runs, for tests.
    #[cfg(test)]
    pub(crate) fn of_two_nodes(total: u64) -> Self {
        let quarter = total / 4;
        let batches = [(quarter, 0), (quarter, 1), (quarter, 0), (total - 3 * quarter, 1)];
        Self::of_batches(batches.into_iter(), 1)
    }
}

fn add_bytes(data: &ArrayData, node_of: &dyn Fn(*const u8) -> Option<u32>, bytes: &mut BTreeMap<u32, usize>) {
    for buffer in data.buffers() {
        *bytes.entry(node_of(buffer.as_ptr()).unwrap_or(0)).or_default() += buffer.len();
    }
    data.child_data().iter().for_each(|child| add_bytes(child, node_of, bytes));
}

#[cfg(test)]
mod tests {
    use arrow::array::{Int64Array, RecordBatch};
    use arrow::datatypes::{DataType, Field, Schema};

    use super::*;

    fn of_batches(batches: &[(u64, u32)], run_rows_min: u64) -> RowNodes {
        RowNodes::of_batches(batches.iter().copied(), run_rows_min)
    }

    /// Returns the runs of all nodes.
    fn runs(rows: &RowNodes) -> Vec<(u32, Range<u64>)> {
        let of_node =
            |(node, runs): &(u32, Vec<Range<u64>>)| runs.iter().map(|run| (*node, run.clone())).collect::<Vec<_>>();
        rows.by_node.iter().flat_map(of_node).collect()
    }

    #[test]
    fn batches_of_a_node_that_follow_each_other_are_one_run() {
        let rows = of_batches(&[(10, 1), (5, 1), (0, 0), (20, 0), (7, 1)], 1);
        assert_eq!(runs(&rows), [(0, 15..35), (1, 0..15), (1, 35..42)]);
        assert_eq!(rows.order(Some(1)).collect::<Vec<_>>(), [1, 0]);
        assert_eq!(rows.order(Some(9)).collect::<Vec<_>>(), [0, 1]);
        let of_node_1 = |taken| rows.left(1, taken, 42);
        assert_eq!(
            [of_node_1(0), of_node_1(14), of_node_1(15), of_node_1(22)],
            [Some(0..15), Some(14..15), Some(35..42), None]
        );
    }

    #[test]
    fn rows_of_one_node_or_in_short_runs_are_taken_in_their_order() {
        let one = of_batches(&[(10, 1), (5, 1)], 1);
        let short = of_batches(&[(10, 1), (10, 0), (10, 1)], 11);
        let many = of_batches(&(0..20).map(|node| (10, node)).collect::<Vec<_>>(), 1);
        for rows in [one, short, many, of_batches(&[], 1)] {
            assert_eq!(rows, RowNodes::default());
            assert_eq!(rows.order(Some(1)).collect::<Vec<_>>(), [0]);
            assert_eq!(
                [rows.left(0, 0, 15), rows.left(0, 14, 15), rows.left(0, 15, 15)],
                [Some(0..15), Some(14..15), None]
            );
        }
    }

    #[test]
    fn a_batch_is_on_the_node_of_most_of_its_bytes() {
        let schema = Arc::new(Schema::new(vec![
            Field::new("a", DataType::Int64, false),
            Field::new("b", DataType::Int64, false),
        ]));
        let rows = RUN_ROWS_MIN as usize;
        let column = |value: i64| Arc::new(Int64Array::from(vec![value; rows]));
        let batches: Vec<RecordBatch> =
            (0..2).map(|_| RecordBatch::try_new(schema.clone(), vec![column(1), column(2)]).unwrap()).collect();
        let address = |batch: usize, column: usize| batches[batch].column(column).to_data().buffers()[0].as_ptr();
        // Both columns of the second batch are on node 3, and no node was chosen for the first.
        let far = [address(1, 0), address(1, 1)];
        let node_of = move |address: *const u8| far.contains(&address).then_some(3);
        let table = Table::unknown("t".into(), schema, batches.clone());
        let found = RowNodes::of(&table, &node_of);
        assert_eq!(runs(&found), [(0, 0..RUN_ROWS_MIN), (3, RUN_ROWS_MIN..2 * RUN_ROWS_MIN)]);
        assert_eq!(RowNodes::of(&table, &|_| None), RowNodes::default());
    }
}
