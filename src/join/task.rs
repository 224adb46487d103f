//! Input of a run: tables and columns by index, the composition of the join, and expectations.
//!
//! The planner turns a join into a task. Expectations may be wrong: they change sizes, steps of
//! progress and ways to match, but no row of the result.

use std::collections::BTreeSet;
use std::sync::Arc;

use arrow::datatypes::SchemaRef;
use serde::{Deserialize, Serialize};

use super::{Composition, JoinKind, Side};
use crate::catalog::Table;
use crate::columns::{KeyFacts, Role};
use crate::{Error, Result};

/// Join that is ready to run on one device. `T` stands for a table: the table itself, or the number
/// by which another process knows it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Task<T = Arc<Table>> {
    pub how: JoinKind,
    pub build: TaskSide<T>,
    pub probe: TaskSide<T>,
    pub keys: Vec<JoinKey>,
    /// Facts about each pair of key columns, so that both sides make the same keys.
    pub key_facts: Vec<KeyFacts>,
    /// Empty if rows are counted.
    pub output: Vec<OutputColumn>,
    /// True if the result is the number of rows instead of the rows: one row with one column of 64
    /// bits.
    pub counts_rows: bool,
    /// Columns of the result.
    pub schema: SchemaRef,
    /// Further joins of the same rows, if this is the first of a [`Chain`](super::Chain).
    pub then: Option<Then<T>>,
    pub composition: Composition,
    /// Smallest and largest build key, if the keys are worth an array of that extent. The keys must
    /// be one column of raw, unsigned integers. Only for rows that stay in table order.
    pub dense_range: Option<(u128, u128)>,
    /// Rows per batch of the result, at most. `None`: about a message.
    pub batch_rows: Option<usize>,
    /// Fewest rows of a chunk if several streams of a device work on chunks. Also the fewest rows
    /// of a part of a build side whose payload is deferred. `None`: as many as make the cost of
    /// launching work small.
    pub chunk_rows_min: Option<u64>,
    pub expected: Expected,
}

/// Joins that follow the first of a chain.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Then<T = Arc<Table>> {
    /// Columns of the first join alone. The first task has those of the chain's result.
    pub first_schema: SchemaRef,
    pub joins: Vec<Task<T>>,
    /// Join of each column of the result, and the column's number in the result of that join.
    pub columns: Vec<(usize, usize)>,
}

/// Fewest rows of a chunk if several streams work on chunks and the task sets no number. Fewer rows
/// would leave a GPU waiting for launches.
pub(crate) const OVERLAPPED_CHUNK_ROWS_MIN: u64 = 1 << 20;

impl Task {
    /// Returns the task for rows of one side that no statistics describe, such as rows that arrive
    /// later. Keys are packed for all values of their types, and the host works on text of any
    /// length. The side's table keeps its name and its columns only.
    #[must_use]
    pub fn with_unknown_rows(mut self, role: Role) -> Self {
        for facts in &mut self.key_facts {
            (facts.range, facts.bytes_max, facts.sorted) = (None, None, false);
        }
        self.composition.device_makes_keys = false;
        let side = match role {
            Role::Build => {
                (self.dense_range, self.composition.dense) = (None, false);
                self.expected.build_keys_repeat = true;
                &mut self.build
            }
            Role::Probe => &mut self.probe,
        };
        side.device_text.clear();
        let (name, schema) = (side.table.name.clone(), side.table.schema.clone());
        side.table = Arc::new(Table::unknown(name, schema, Vec::new()));
        if let Some(then) = &mut self.then {
            let joins = std::mem::take(&mut then.joins).into_iter();
            then.joins = joins.map(|task| task.with_unknown_rows(role)).collect();
        }
        self
    }

    /// Refuses rows of another table than the side's own if the task relies on statistics of keys.
    /// Keys outside of their range would be packed as other keys. The dense range is that of the
    /// build keys, and probe keys outside of it match nothing.
    ///
    /// # Errors
    /// [`Internal`](Error::Internal), because callers know their rows.
    pub(super) fn check_rows(&self, role: Role, own: &Arc<Table>, table: &Arc<Table>) -> Result<()> {
        let relies = |facts: &KeyFacts| facts.range.is_some() || facts.bytes_max.is_some();
        let relies = self.key_facts.iter().any(relies) || (role == Role::Build && self.dense_range.is_some());
        if Arc::ptr_eq(own, table) || table.rows == 0 || !relies {
            return Ok(());
        }
        Err(Error::Internal(format!(
            "a join that was planned for the keys of table {:?} is given other rows; make its task with unknown rows",
            own.name
        )))
    }

    /// Returns the fewest rows of a chunk if several streams work on chunks.
    pub(super) fn chunk_rows_min(&self) -> u64 {
        self.chunk_rows_min.unwrap_or(OVERLAPPED_CHUNK_ROWS_MIN).max(1)
    }
}

impl<T> Task<T> {
    /// Replaces the task's tables with the results of `map`, which is called for the build side's
    /// table first.
    ///
    /// # Errors
    /// The errors of `map`.
    pub(crate) fn map_tables<U>(self, mut map: impl FnMut(T) -> Result<U>) -> Result<Task<U>> {
        self.map_all_tables(&mut map)
    }

    fn map_all_tables<U>(self, map: &mut dyn FnMut(T) -> Result<U>) -> Result<Task<U>> {
        Ok(Task {
            build: self.build.map_table(map)?,
            probe: self.probe.map_table(map)?,
            how: self.how,
            keys: self.keys,
            key_facts: self.key_facts,
            output: self.output,
            counts_rows: self.counts_rows,
            schema: self.schema,
            then: match self.then {
                None => None,
                Some(Then { first_schema, joins, columns }) => {
                    let joins = joins.into_iter().map(|task| task.map_all_tables(map)).collect::<Result<_>>()?;
                    Some(Then { first_schema, joins, columns })
                }
            },
            composition: self.composition,
            dense_range: self.dense_range,
            batch_rows: self.batch_rows,
            chunk_rows_min: self.chunk_rows_min,
            expected: self.expected,
        })
    }
}

/// One side of a task.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct TaskSide<T = Arc<Table>> {
    pub side: Side,
    pub table: T,
    /// In the order of [`Task::keys`].
    pub key_columns: Vec<usize>,
    /// Columns that the result takes from this side, each once, ascending.
    pub output_columns: Vec<usize>,
    /// True if the result may share these columns with the table, provided that the
    /// result has all rows of a slice in table order.
    pub shares: bool,
    /// Columns of values of variable length that the device gathers, if it supports text. Otherwise
    /// the host gathers them.
    pub device_text: BTreeSet<usize>,
}

impl<T> TaskSide<T> {
    fn map_table<U>(self, map: &mut dyn FnMut(T) -> Result<U>) -> Result<TaskSide<U>> {
        Ok(TaskSide {
            table: map(self.table)?,
            side: self.side,
            key_columns: self.key_columns,
            output_columns: self.output_columns,
            shares: self.shares,
            device_text: self.device_text,
        })
    }
}

/// Two columns that must be equal, by index.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct JoinKey {
    /// Index in the left table.
    pub left: usize,
    /// Index in the right table.
    pub right: usize,
    pub nulls_equal: bool,
    /// True if equal values have the same type and bits on both sides, so that a result may show
    /// either. Floats do not: -0 equals 0, and one NaN equals another.
    pub alike: bool,
}

impl JoinKey {
    /// Returns the column's index on the given side.
    pub fn column(&self, side: Side) -> usize {
        match side {
            Side::Left => self.left,
            Side::Right => self.right,
        }
    }
}

/// A column of the result.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OutputColumn {
    pub name: String,
    pub source: OutputSource,
}

/// Source of the values of a column of the result.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum OutputSource {
    /// Column of one side, null where that side has no row.
    Column { side: Side, index: usize },
    /// Key pair: the left value where there is a left row, else the right value.
    Key { index: usize },
}

impl OutputColumn {
    /// Returns the columns that a result takes from a side when the join builds on `build_side`,
    /// each once, ascending. A key whose values look alike on both sides is taken from the probe
    /// side, whose rows are in order. Any other key is taken from the left side. For rows that only
    /// the other side has, that side gives the key.
    pub fn taken_from(
        side: Side,
        build_side: Side,
        how: JoinKind,
        output: &[OutputColumn],
        keys: &[JoinKey],
    ) -> Vec<usize> {
        if how.only_side().is_some_and(|only| only != side) {
            return Vec::new();
        }
        let column = |output: &OutputColumn| match output.source {
            OutputSource::Column { side: of, index } => (of == side).then_some(index),
            OutputSource::Key { index } => {
                let key = &keys[index];
                let giver = if key.alike { build_side.other() } else { Side::Left };
                (side == giver || how.keeps_unmatched(side)).then_some(key.column(side))
            }
        };
        let columns: BTreeSet<usize> = output.iter().filter_map(column).collect();
        columns.into_iter().collect()
    }
}

/// Expectations from statistics.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Expected {
    /// True if build keys repeat, so that it is worth making equal keys adjacent before the first
    /// row is probed.
    pub build_keys_repeat: bool,
    /// True if build keys repeat so often that a device would give up joining partitions in one go.
    /// The join then matches partitions without trying.
    pub matches_first: bool,
    /// Pairs per probe row that has a key.
    pub pairs_per_row: f64,
    /// Bytes per row of the result, on average.
    pub row_bytes: f64,
    pub stage_seconds: StageSeconds,
}

/// Seconds of each stage of a run. Stages follow each other. The stages of the probe side
/// count all chunks together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StageSeconds {
    pub transform_build: f64,
    pub index_build: f64,
    pub transform_probe: f64,
    pub results: f64,
    pub kept_build: f64,
}

impl StageSeconds {
    /// Returns the stages of a probe alone.
    pub(super) fn of_probe(&self) -> Self {
        Self { transform_build: 0.0, index_build: 0.0, kept_build: 0.0, ..*self }
    }
}
