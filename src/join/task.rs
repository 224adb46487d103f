//! What a run is given: tables and columns by index, the way the join is composed, and what to expect of it.
//!
//! Whoever plans a join makes a task of it. A task is right whatever it expects: expectations choose sizes and steps of
//! progress, and no row depends on them.

use std::collections::BTreeSet;
use std::sync::Arc;

use arrow::datatypes::SchemaRef;
use serde::{Deserialize, Serialize};

use super::{JoinKind, Side};
use crate::Result;
use crate::catalog::Table;
use crate::columns::KeyFacts;
use crate::device::RadixBits;

/// A join that is ready to run on one device. `T` stands for a table: the table itself, or the number by which another process knows it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Task<T = Arc<Table>> {
    /// Which rows survive.
    pub how: JoinKind,
    /// The side that is indexed. Any kind of join may build on either side.
    pub build: TaskSide<T>,
    /// The side whose rows look for matches.
    pub probe: TaskSide<T>,
    /// The columns that must be equal.
    pub keys: Vec<JoinKey>,
    /// What is known of each pair of key columns, so that both sides make the same keys.
    pub key_facts: Vec<KeyFacts>,
    /// The columns of the result; none when rows are counted.
    pub output: Vec<OutputColumn>,
    /// Whether the result is the number of rows, in one row with one column of 64 bits, and not the rows.
    pub counts_rows: bool,
    /// The schema of the result.
    pub schema: SchemaRef,
    /// How both sides are arranged.
    pub arrangement: Arrangement,
    /// The smallest and the largest build key, where these are worth an array of that extent: one column of raw, unsigned
    /// integers. For rows that stay as they lie.
    pub dense_range: Option<(u128, u128)>,
    /// Whether probe rows pass over a filter of the build keys before they are arranged. A kind of join that keeps probe rows
    /// without a match goes without, and so does a device that has none.
    pub filter: bool,
    /// Rows per batch of the result, at most. `None`: about a message.
    pub batch_rows: Option<usize>,
    /// Rows that a chunk has at the least where several streams of a device work on chunks, or a part of the build side whose columns come
    /// last. `None`: so many that launching work costs little beside it.
    pub chunk_rows_min: Option<u64>,
    /// Whether the probe side comes in one chunk if that fits, also where several streams could work on chunks: what more chunks overlap is
    /// expected to be less than what their calls take, and going through the build side again.
    pub probe_at_once: bool,
    /// Whether the columns that the result takes from the build side, beyond its keys, come in after the probe side, so that rows begin to
    /// leave before. For inner joins of rows that stay as they lie.
    pub build_columns_last: bool,
    /// Whether the device makes keys of text, and hashes and compares what is too wide to be packed, if it is one that does so and can read
    /// them; the host does else.
    pub device_makes_keys: bool,
    /// What statistics say will happen.
    pub expected: Expected,
}

/// Rows that a chunk has at the least where several streams work on chunks, if nobody says otherwise: fewer would leave a GPU
/// waiting for launches.
pub(crate) const OVERLAPPED_CHUNK_ROWS_MIN: u64 = 1 << 20;

impl Task {
    /// Rows that a chunk has at the least where several streams work on chunks.
    pub(super) fn chunk_rows_min(&self) -> u64 {
        self.chunk_rows_min.unwrap_or(OVERLAPPED_CHUNK_ROWS_MIN).max(1)
    }
}

impl<T> Task<T> {
    /// The same task with what `map` makes of its tables, the build side's first.
    ///
    /// # Errors
    /// What `map` answers.
    pub(crate) fn map_tables<U>(self, mut map: impl FnMut(T) -> Result<U>) -> Result<Task<U>> {
        Ok(Task {
            build: self.build.map_table(&mut map)?,
            probe: self.probe.map_table(&mut map)?,
            how: self.how,
            keys: self.keys,
            key_facts: self.key_facts,
            output: self.output,
            counts_rows: self.counts_rows,
            schema: self.schema,
            arrangement: self.arrangement,
            dense_range: self.dense_range,
            filter: self.filter,
            batch_rows: self.batch_rows,
            chunk_rows_min: self.chunk_rows_min,
            probe_at_once: self.probe_at_once,
            build_columns_last: self.build_columns_last,
            device_makes_keys: self.device_makes_keys,
            expected: self.expected,
        })
    }
}

/// One side of a task.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct TaskSide<T = Arc<Table>> {
    /// Which side of the join it is.
    pub side: Side,
    /// Its rows.
    pub table: T,
    /// Key columns, in the order of the pairs.
    pub key_columns: Vec<usize>,
    /// Columns that the result takes from this side, each once, ascending.
    pub output_columns: Vec<usize>,
    /// Whether the result may share them with the table where all rows of a stretch are in it as they lie.
    pub shares: bool,
    /// Those of them that move with the keys when rows are arranged (gather from transformed relation, GFTR). The others
    /// are gathered by row number (GFUR), and so is a column that cannot move, should it be among these.
    pub carried: BTreeSet<usize>,
    /// Columns of values of variable length that the device gathers, if it is one that works on text, and the host does else.
    pub device_text: BTreeSet<usize>,
}

impl<T> TaskSide<T> {
    fn map_table<U>(self, map: &mut impl FnMut(T) -> Result<U>) -> Result<TaskSide<U>> {
        Ok(TaskSide {
            table: map(self.table)?,
            side: self.side,
            key_columns: self.key_columns,
            output_columns: self.output_columns,
            shares: self.shares,
            carried: self.carried,
            device_text: self.device_text,
        })
    }
}

/// How rows are to be arranged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Arrangement {
    /// As they lie.
    Original,
    /// By partition.
    Partitioned(RadixBits),
    /// By key.
    Sorted,
}

/// Two columns that must be equal, by index.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct JoinKey {
    /// In the left table.
    pub left: usize,
    /// In the right table.
    pub right: usize,
    /// Whether null matches null.
    pub nulls_equal: bool,
    /// Whether equal values look the same on both sides, type and bits, so that a result may show either. Floats do not:
    /// -0 equals 0, and one NaN another.
    pub alike: bool,
}

impl JoinKey {
    /// The column's index on that side.
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
    /// Its name in the result.
    pub name: String,
    /// Where its values come from.
    pub source: OutputSource,
}

/// Where a result's values come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum OutputSource {
    /// A column of one side; null where that side has no row.
    Column {
        /// Which side.
        side: Side,
        /// Which of its columns.
        index: usize,
    },
    /// A key pair: the left value where there is a left row, else the right value.
    Key {
        /// Which of the pairs.
        index: usize,
    },
}

impl OutputColumn {
    /// The columns that a result takes from a side when the tables are built on `build_side`, each once, ascending. A key
    /// whose values look alike on both sides is taken from the probe side, whose rows lie in order, and any other from the
    /// left; the other side gives it for its own rows without a match.
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

/// What statistics say will happen.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Expected {
    /// Whether build keys repeat, so that it is worth making equal ones adjacent before the first row is probed.
    pub build_keys_repeat: bool,
    /// Whether partitions are to be matched where a device could join them in one go, because it would give up: build keys repeat too
    /// often.
    pub matches_first: bool,
    /// Pairs per probe row that has a key.
    pub pairs_per_row: f64,
    /// Bytes per row of the result, on average.
    pub row_bytes: f64,
    /// Seconds of each stretch of the run.
    pub stretches: Stretches,
}

/// Seconds that each stretch of a run takes, one after the other; of the probe side's, all chunks together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Stretches {
    /// The build side is brought in and arranged.
    pub arrange_build: f64,
    /// Tables are built on it, or its keys are grouped and compared.
    pub index_build: f64,
    /// The probe side is brought in and arranged.
    pub arrange_probe: f64,
    /// Probe rows are matched, and the result leaves.
    pub results: f64,
    /// Build rows that the kind of join keeps leave at the end.
    pub kept_build: f64,
}
