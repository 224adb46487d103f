//! Inputs of a join: for each side its table, its key columns, and the columns that the result
//! needs.

use std::any::Any;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;

use super::{Side, Task};
use crate::catalog::Table;
use crate::columns::{Movable, Role, Rows, are_bytes, movable, value_bytes};
use crate::device::Width;
use crate::{Error, Result};

/// One side of a join, by its role.
#[derive(Clone, Debug)]
pub(super) struct SideInput {
    pub(super) role: Role,
    pub(super) side: Side,
    pub(super) table: Arc<Table>,
    /// Key columns, in the order of `Task::keys`.
    pub(super) key_columns: Vec<usize>,
    /// Key columns whose nulls match nothing.
    pub(super) unmatched_nulls: BTreeSet<usize>,
    /// Columns that the result takes from this side, each once, ascending.
    pub(super) output_columns: Vec<usize>,
    /// True if the result may share columns with the table.
    pub(super) shares: bool,
    pub(super) moved_columns: BTreeSet<usize>,
    /// Description of how devices move each column of the result. A column without an entry here or
    /// in `text` is gathered on the host.
    movable: BTreeMap<usize, Movable>,
    /// Columns of the result with values of variable length that the device gathers.
    text: BTreeMap<usize, TextColumn>,
    /// True if other joins may read the rows, so that a device may cache their columns.
    is_stored: bool,
}

/// Column of values of variable length that the device gathers.
#[derive(Clone, Copy, Debug)]
pub(super) struct TextColumn {
    pub(super) offset_width: Width,
    /// Bytes of a value and its offset, on average.
    pub(super) mean_bytes: u64,
}

impl SideInput {
    /// Makes the input of one role from the task's table. `supports_text` is true if the device
    /// supports text.
    pub(super) fn of_task(task: &Task, role: Role, supports_text: bool) -> Self {
        let table = match role {
            Role::Build => &task.build.table,
            Role::Probe => &task.probe.table,
        };
        Self::new(task, role, table.clone(), supports_text)
    }

    /// Makes the input of one role from a table with the schema of the task's table.
    pub(super) fn new(task: &Task, role: Role, table: Arc<Table>, supports_text: bool) -> Self {
        let of_task = match role {
            Role::Build => &task.build,
            Role::Probe => &task.probe,
        };
        let unmatched = task.keys.iter().filter(|key| !key.nulls_equal);
        let movable_column = |&column: &usize| Some((column, movable(&table.schema, &table.batches, column)?));
        let movable = of_task.output_columns.iter().filter_map(movable_column).collect();
        let text_column = |&column: &usize| {
            let offset_width = are_bytes(table.schema.field(column).data_type())?;
            let bytes: u64 = table.batches.iter().map(|batch| value_bytes(batch.column(column))).sum();
            let mean_bytes = bytes / table.rows.max(1) + offset_width.bytes() as u64;
            Some((column, TextColumn { offset_width, mean_bytes }))
        };
        let text = match supports_text {
            true => of_task.device_text.iter().filter_map(text_column).collect(),
            false => BTreeMap::new(),
        };
        Self {
            role,
            side: of_task.side,
            table,
            key_columns: of_task.key_columns.clone(),
            unmatched_nulls: unmatched.map(|key| key.column(of_task.side)).collect(),
            output_columns: of_task.output_columns.clone(),
            shares: of_task.shares,
            moved_columns: task.composition.moved_payload.of_side(of_task.side, &of_task.output_columns),
            movable,
            text,
            is_stored: true,
        }
    }

    /// Marks the rows as rows that only this join reads.
    pub(super) fn arriving(self) -> Self {
        Self { is_stored: false, ..self }
    }

    /// Returns the input without columns that the result may share with the table.
    pub(super) fn unshared(&self) -> Self {
        Self { shares: false, ..self.clone() }
    }

    /// Returns the input whose rows come from an exchange. Only columns without nulls move with
    /// their rows; the host gathers the others from the table.
    pub(super) fn exchanged(&self) -> Self {
        let mut input = Self { shares: false, text: BTreeMap::new(), ..self.clone() };
        input.movable.retain(|&column, _| !self.has_nulls(column));
        input
    }

    /// Returns some rows of this side.
    pub(super) fn rows(&self, range: Range<u64>) -> Rows {
        let start = range.start;
        let rows = Rows::of(&self.table.schema, &self.table.batches, range);
        if !self.is_stored {
            return rows;
        }
        let table: Arc<dyn Any + Send + Sync> = self.table.clone();
        rows.of_table(Arc::downgrade(&table), start)
    }

    /// Returns how devices move a column of the result, or `None` if they cannot.
    pub(super) fn movable(&self, column: usize) -> Option<&Movable> {
        self.movable.get(&column)
    }

    /// Returns a column of the result with values of variable length, if the device gathers it.
    pub(super) fn text(&self, column: usize) -> Option<TextColumn> {
        self.text.get(&column).copied()
    }

    /// Returns the columns of text that the device gathers.
    pub(super) fn text_columns(&self) -> impl Iterator<Item = usize> {
        self.text.keys().copied()
    }

    /// Returns the bytes per row of the text that the device gathers, with offsets, on average.
    pub(super) fn text_mean_bytes(&self) -> u64 {
        self.text.values().map(|text| text.mean_bytes).sum()
    }

    /// True if a column has nulls anywhere in the table.
    pub(super) fn has_nulls(&self, column: usize) -> bool {
        self.table.batches.iter().any(|batch| batch.column(column).null_count() > 0)
    }

    /// Returns the bytes per row of the columns that the result takes and devices can move.
    pub(super) fn device_row_bytes(&self) -> usize {
        self.movable.values().map(|movable| movable.width.bytes()).sum()
    }

    /// Returns the bytes per row that a text column takes on the device in addition to its values.
    /// These are the start of each value, and an offset while the column is copied in.
    pub(super) fn text_row_bytes(&self, column: usize) -> usize {
        self.text(column).map_or(0, |text| size_of::<u64>() + text.offset_width.bytes())
    }
}

#[cfg(test)]
thread_local! {
    /// Limit in place of [`ROWS_MAX`](crate::device::ROWS_MAX), for this thread.
    pub(super) static BUILD_ROWS_MAX: std::cell::Cell<Option<u64>> = const { std::cell::Cell::new(None) };
}

/// Returns the most build rows of a device: 32-bit positions address them.
fn build_rows_max() -> u64 {
    #[cfg(test)]
    if let Some(rows_max) = BUILD_ROWS_MAX.get() {
        return rows_max;
    }
    crate::device::ROWS_MAX as u64
}

/// Refuses the build rows of a rank that positions cannot address. `name` is their table's.
pub(super) fn check_rank_build_rows(name: &str, rows: u64) -> Result<()> {
    let rows_max = build_rows_max();
    if rows > rows_max {
        return Err(Error::Unsupported(format!(
            "one of the devices would index {rows} rows of table {name:?}, and may index at most {rows_max}; join the table in parts, or on more devices if no key has most of the rows"
        )));
    }
    Ok(())
}

/// Refuses a build side that positions cannot address. `name` is its table's.
pub(super) fn check_build_rows(name: &str, rows: u64) -> Result<()> {
    let rows_max = build_rows_max();
    if rows > rows_max {
        return Err(Error::Unsupported(format!(
            "table {name:?} has {rows} rows, and the smaller side of a join may have at most {rows_max} on one device; join it in parts"
        )));
    }
    Ok(())
}
