//! Bytes of values: of a column, and of a row of the result.

use super::{BoundJoin, OutputSource, Side};
use crate::catalog::Table;
use crate::columns::fixed_width;

/// Sizes of the values of a table's columns.
pub(super) struct ValueSizes<'a> {
    table: &'a Table,
    /// Mean bytes of a value over all columns of variable width.
    variable_bytes: f64,
}

impl<'a> ValueSizes<'a> {
    pub(super) fn of(table: &'a Table) -> Self {
        let widths =
            table.schema.fields().iter().map(|field| fixed_width(field.data_type()).map(|width| width.bytes()));
        let fixed: usize = widths.clone().flatten().sum();
        let variable_columns = widths.filter(Option::is_none).count();
        let row_bytes = table.bytes as f64 / table.rows.max(1) as f64;
        Self { table, variable_bytes: (row_bytes - fixed as f64).max(1.0) / variable_columns.max(1) as f64 }
    }

    /// Mean bytes of a value of a column: its fixed width, or the table's average.
    pub(super) fn mean_bytes(&self, column: usize) -> f64 {
        let width = fixed_width(self.table.schema.field(column).data_type());
        width.map_or(self.variable_bytes, |width| width.bytes() as f64)
    }
}

/// Bytes per row of the result: fixed widths, and the table's averages for other columns.
pub(super) fn result_row_bytes(join: &BoundJoin) -> f64 {
    let (left, right) = (ValueSizes::of(&join.left), ValueSizes::of(&join.right));
    let output = join.output.iter().map(|column| match column.source {
        OutputSource::Column { side: Side::Left, index } => left.mean_bytes(index),
        OutputSource::Column { side: Side::Right, index } => right.mean_bytes(index),
        OutputSource::Key { index } => left.mean_bytes(join.keys[index].left),
    });
    output.sum()
}
