//! What a join reads: for each side its table, its key columns, and the columns that the result needs of it.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use crate::catalog::{ColumnStatistics, Table, Value};
use crate::columns::{KeyFacts, Movable, Role, Rows, key_class, movable};
use crate::planner::{BoundJoin, Plan, Side};
use crate::{Error, Result};

/// One side of a join, by the role that the plan gave it.
#[derive(Debug)]
pub(super) struct SideInput {
    pub(super) role: Role,
    pub(super) side: Side,
    pub(super) table: Arc<Table>,
    /// Key columns, in the order of the pairs.
    pub(super) key_columns: Vec<usize>,
    /// Columns that the result takes from this side, each once, ascending.
    pub(super) output_columns: Vec<usize>,
    /// How devices move those columns; without an entry, a column is gathered on the host.
    movable: BTreeMap<usize, Movable>,
}

impl SideInput {
    pub(super) fn new(plan: &Plan, role: Role) -> Self {
        let join = &plan.join;
        let side = plan.side(role);
        let output_columns = join.output_columns(side, plan.build_side);
        let key_columns = join.keys.iter().map(|key| key.column(side)).collect();
        let table = join.table(side).clone();
        let movable_column = |&column: &usize| Some((column, movable(&table.schema, &table.batches, column)?));
        let movable = output_columns.iter().filter_map(movable_column).collect();
        Self { role, side, table, key_columns, output_columns, movable }
    }

    /// Some rows of this side.
    pub(super) fn rows(&self, range: Range<u64>) -> Rows {
        Rows::of(&self.table.schema, &self.table.batches, range)
    }

    /// How devices move a column of the result, or `None`.
    pub(super) fn movable(&self, column: usize) -> Option<&Movable> {
        self.movable.get(&column)
    }

    /// Whether a column has nulls anywhere in the table.
    pub(super) fn has_nulls(&self, column: usize) -> bool {
        self.table.batches.iter().any(|batch| batch.column(column).null_count() > 0)
    }

    /// Bytes per row of the columns that the result takes and devices can move.
    pub(super) fn device_row_bytes(&self) -> usize {
        self.movable.values().map(|movable| movable.width.bytes()).sum()
    }
}

/// What the statistics say about each pair of key columns.
///
/// # Errors
/// [`Error::Invalid`] for a type that cannot be a key; binding has refused those before.
pub(super) fn key_facts(build: &SideInput, probe: &SideInput, join: &BoundJoin) -> Result<Vec<KeyFacts>> {
    let facts = |(at, key): (usize, &crate::planner::BoundKey)| {
        let (build_column, probe_column) = (build.key_columns[at], probe.key_columns[at]);
        let build_type = build.table.schema.field(build_column).data_type().clone();
        let probe_type = probe.table.schema.field(probe_column).data_type().clone();
        let statistics = [&build.table.statistics[build_column], &probe.table.statistics[probe_column]];
        Ok(KeyFacts {
            class: key_class(&build_type)?,
            build_type,
            probe_type,
            range: integer_range(&statistics),
            bytes_max: longest_value(&statistics),
            nulls_equal: key.nulls_equal,
            sorted: join.is_sorted_by_key(Side::Left) || join.is_sorted_by_key(Side::Right),
        })
    };
    join.keys.iter().enumerate().map(facts).collect()
}

/// The smallest and largest of both columns, when both are known.
fn integer_range(statistics: &[&ColumnStatistics; 2]) -> Option<(i128, i128)> {
    let bound = |value: &Option<Value>| match value {
        Some(Value::Integer(number)) => Some(*number),
        _ => None,
    };
    let [a, b] = statistics;
    Some((bound(&a.min)?.min(bound(&b.min)?), bound(&a.max)?.max(bound(&b.max)?)))
}

/// The longest string or binary of both columns, in bytes, when both are known.
fn longest_value(statistics: &[&ColumnStatistics; 2]) -> Option<usize> {
    let [a, b] = statistics.map(|statistics| statistics.max_value_bytes);
    usize::try_from(a?.max(b?)).ok()
}

/// Refuses a build side that 32-bit positions cannot address.
pub(super) fn check_build_rows(build: &SideInput) -> Result<usize> {
    let rows_max = crate::device::ROWS_MAX as u64;
    if build.table.rows > rows_max {
        return Err(Error::Unsupported(format!(
            "table {:?} has {} rows, and the smaller side of a join may have {rows_max} on one device; join it in parts",
            build.table.name, build.table.rows
        )));
    }
    Ok(build.table.rows as usize)
}
