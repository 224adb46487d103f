//! What a join gives at the least, whatever statistics leave open: the ground on which one is refused before it runs.
//!
//! Estimates err, and a join that would have fitted must not be refused for that. Certain are the rows of each side, and
//!
//! - pairs that were counted: of values which the samples of both key columns hold, in all rows of both tables. Where few values
//!   make up most pairs, as they do where a result is many times its inputs, samples of thousands of rows hold them. Counting
//!   passes over both key columns, and so is done only for a join that is predicted not to fit;
//! - that each row of a table which is joined with itself, by the same columns, matches itself;
//! - that a row matches exactly one row of a side whose key has each integer of a range once (a numbered table that was uploaded
//!   in order), when its own key is in the range.
//!
//! Of several key columns together nothing is counted: a pair that agrees in one column may differ in another.

use std::sync::Arc;

use arrow::array::{Array, ArrayRef, AsArray, OffsetSizeTrait, RecordBatch};
use arrow::datatypes::DataType;

use super::plan::result_row_bytes;
use super::{BoundJoin, JoinKind, OutputSource, Plan, Side};
use crate::Result;
use crate::catalog::Value;
use crate::columns::fixed_width;
use crate::join::BatchSizes;
use crate::memory::Interrupt;

/// What a join certainly gives.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AtLeast {
    /// Rows of the result.
    pub rows: u64,
    /// Bytes of their values, without those of a table that the result may share. Those of variable length are counted where all
    /// rows of a side are in the result, else as if they were empty.
    pub bytes: u64,
}

/// Pairs of equal keys that are certainly there, and how many rows of each side those pairs have.
#[derive(Clone, Copy, Debug, Default)]
struct Counted {
    pairs: u64,
    left: u64,
    right: u64,
    /// The side of which that is the number of rows at the most, and not exactly.
    at_most: Option<Side>,
}

impl Plan {
    /// Lower bounds of the join's result. The first call for a table passes over its key column.
    ///
    /// # Errors
    /// The interrupt's.
    pub fn at_least(&self, interrupt: &Interrupt) -> Result<AtLeast> {
        let join = &self.join;
        let counted = counted(join, interrupt)?;
        let grounds = [Some(counted), counted_by_range(join, Side::Left), counted_by_range(join, Side::Right)];
        let found = grounds.into_iter().flatten().filter_map(|counted| at_least(join, counted));
        Ok(found.max_by_key(|at_least| at_least.bytes).unwrap_or_default())
    }
}

/// What a join gives at the least, given those pairs; `None` where they do not tell.
fn at_least(join: &BoundJoin, counted: Counted) -> Option<AtLeast> {
    let Counted { pairs, left, right, at_most } = counted;
    let how = join.spec.how;
    if at_most.is_some() && how.only_side() == at_most {
        return None;
    }
    let (left_rest, right_rest) = (join.left.rows - left, join.right.rows - right);
    // Rows that are sure to be there beside the pairs: each of them matches rows that were not counted, or none.
    let (pairs, left_more, right_more) = match how {
        JoinKind::Inner => (pairs, 0, 0),
        JoinKind::Left => (pairs, left_rest, 0),
        JoinKind::Right => (pairs, 0, right_rest),
        // They may match each other.
        JoinKind::Full if left_rest >= right_rest => (pairs, left_rest, 0),
        JoinKind::Full => (pairs, 0, right_rest),
        JoinKind::LeftSemi => (0, left, 0),
        JoinKind::RightSemi => (0, 0, right),
        JoinKind::LeftAnti | JoinKind::RightAnti => (0, 0, 0),
    };
    let (left_bytes, right_bytes) = (row_bytes(join, Side::Left), row_bytes(join, Side::Right));
    // A row is shared with its table where it is in the result once, so that no more rows than the table has are not written: those
    // of the side that looks for matches, and at the end those of the other that are kept.
    let sharing = [Side::Left, Side::Right].map(|side| shares(join, side).then_some(side));
    let [left_shared, right_shared] =
        sharing.map(|side| side.map_or(0, |side| join.table(side).rows * shared_row_bytes(join, side)));
    let shared_bytes = match how {
        JoinKind::Inner => left_shared.max(right_shared),
        _ => left_shared.saturating_add(right_shared),
    };
    let shares_any = sharing.iter().any(Option::is_some);
    // Whether every row of a side is in the result.
    let has_all = |side: Side, rest: u64| match how {
        JoinKind::LeftAnti | JoinKind::RightAnti => false,
        _ if how.only_side().is_some_and(|only| only != side) => false,
        _ => how.keeps_unmatched(side) || (rest == 0 && at_most != Some(side)),
    };
    let values =
        |side: Side, rest: u64| if !shares_any && has_all(side, rest) { variable_bytes(join, side) } else { 0 };
    let bytes = |rows: u64, row_bytes: u64| rows.saturating_mul(row_bytes);
    Some(AtLeast {
        rows: pairs.saturating_add(left_more).saturating_add(right_more),
        bytes: bytes(pairs, left_bytes.saturating_add(right_bytes))
            .saturating_add(bytes(left_more, left_bytes))
            .saturating_add(bytes(right_more, right_bytes))
            .saturating_sub(shared_bytes)
            .saturating_add(values(Side::Left, left_rest))
            .saturating_add(values(Side::Right, right_rest)),
    })
}

fn counted(join: &BoundJoin, interrupt: &Interrupt) -> Result<Counted> {
    let sampled = counted_of_samples(join, interrupt)?;
    let is_with_itself = Arc::ptr_eq(&join.left, &join.right) && join.keys.iter().all(|key| key.left == key.right);
    if !is_with_itself {
        return Ok(sampled);
    }
    let without_key = join.keys.iter().filter(|key| !key.nulls_equal).map(|key| join.left.statistics[key.left].nulls);
    let rows = join.left.rows.saturating_sub(without_key.sum()).max(sampled.left);
    Ok(Counted { pairs: sampled.pairs.saturating_add(rows - sampled.left), left: rows, right: rows, at_most: None })
}

fn counted_of_samples(join: &BoundJoin, interrupt: &Interrupt) -> Result<Counted> {
    let [key] = &join.keys[..] else { return Ok(Counted::default()) };
    let left = join.left.counted_values(key.left, interrupt)?;
    let right = join.right.counted_values(key.right, interrupt)?;
    let nulls = (join.left.statistics[key.left].nulls, join.right.statistics[key.right].nulls);
    let of_nulls = (key.nulls_equal && nulls.0 > 0 && nulls.1 > 0).then_some(nulls);
    let of_values = left.iter().filter_map(|(hash, &rows)| Some((rows, *right.get(hash)?)));
    Ok(of_values.chain(of_nulls).fold(Counted::default(), |sum, (left, right)| Counted {
        pairs: sum.pairs.saturating_add(left.saturating_mul(right)),
        left: sum.left + left,
        right: sum.right + right,
        at_most: None,
    }))
}

/// All pairs there are, where `numbered` has each integer of a range once, and the other side's keys are all in the range.
fn counted_by_range(join: &BoundJoin, numbered: Side) -> Option<Counted> {
    let [key] = &join.keys[..] else { return None };
    let range = |side: Side| match &join.table(side).statistics[key.column(side)] {
        known if known.nulls == join.table(side).rows => None,
        known => match (&known.min, &known.max) {
            (Some(Value::Integer(min)), Some(Value::Integer(max))) => Some((*min, *max)),
            _ => None,
        },
    };
    let ((first, last), (min, max)) = (range(numbered)?, range(numbered.other())?);
    let (table, known) = (join.table(numbered), &join.table(numbered).statistics[key.column(numbered)]);
    let has_all = known.unique_ascending && known.nulls == 0 && last.checked_sub(first)? + 1 == i128::from(table.rows);
    if !(has_all && first <= min && max <= last) {
        return None;
    }
    let other = join.table(numbered.other());
    let pairs = other.rows - other.statistics[key.column(numbered.other())].nulls;
    let at_most = pairs.min(table.rows);
    let (left, right) = if numbered == Side::Left { (at_most, pairs) } else { (pairs, at_most) };
    Some(Counted { pairs, left, right, at_most: Some(numbered) })
}

/// Whether the result might share columns of a side with its table: where one of its batches is long enough, as the join room
/// wants it.
fn shares(join: &BoundJoin, side: Side) -> bool {
    let longest = join.table(side).batches.iter().map(RecordBatch::num_rows).max().unwrap_or(0);
    let sizes = BatchSizes::new(join.spec.batch_rows, result_row_bytes(join), 0);
    let may = |build_side: Side| join.may_share(side, &join.output_columns(side, build_side));
    longest >= sizes.stretch_rows_min() && (may(Side::Left) || may(Side::Right))
}

/// Bytes that each row of that side takes in the columns that the result might share with it, keys among them, values of variable
/// length excepted.
fn shared_row_bytes(join: &BoundJoin, side: Side) -> u64 {
    let of_output = join.output.iter().filter_map(|column| match column.source {
        OutputSource::Column { side: of, index } => (of == side).then_some(index),
        OutputSource::Key { index } => Some(join.keys[index].column(side)),
    });
    of_output.map(|index| value_bytes(join.table(side).schema.field(index).data_type())).sum()
}

/// Bytes that each row of that side takes in the result, values of variable length excepted.
fn row_bytes(join: &BoundJoin, side: Side) -> u64 {
    columns_of(join, side).map(|index| value_bytes(join.table(side).schema.field(index).data_type())).sum()
}

/// Bytes of the values of variable length that all rows of that side have in the result's columns.
fn variable_bytes(join: &BoundJoin, side: Side) -> u64 {
    let batches = &join.table(side).batches;
    columns_of(join, side).flat_map(|index| batches.iter().map(move |batch| text_bytes(batch.column(index)))).sum()
}

/// The columns that the result has of that side. A key column that both sides give counts for the left side, and for the
/// right side where only that is there.
fn columns_of(join: &BoundJoin, side: Side) -> impl Iterator<Item = usize> {
    let keys_of = if join.spec.how.only_side() == Some(Side::Right) { Side::Right } else { Side::Left };
    join.output.iter().filter_map(move |column| match column.source {
        OutputSource::Column { side: of, index } => (of == side).then_some(index),
        OutputSource::Key { index } => (keys_of == side).then(|| join.keys[index].column(side)),
    })
}

/// Bytes of all values of a string or binary array; of other types nothing is said, nor of one with nulls, under which there may be
/// bytes that no result has.
fn text_bytes(array: &ArrayRef) -> u64 {
    if array.null_count() > 0 {
        return 0;
    }
    let of = |offsets: Option<(u64, u64)>| offsets.map_or(0, |(first, last)| last - first);
    match array.data_type() {
        DataType::Utf8 => of(ends(array.as_string::<i32>().value_offsets())),
        DataType::LargeUtf8 => of(ends(array.as_string::<i64>().value_offsets())),
        DataType::Binary => of(ends(array.as_binary::<i32>().value_offsets())),
        DataType::LargeBinary => of(ends(array.as_binary::<i64>().value_offsets())),
        _ => 0,
    }
}

/// The first and the last offset.
fn ends<O: OffsetSizeTrait>(offsets: &[O]) -> Option<(u64, u64)> {
    Some((offsets.first()?.as_usize() as u64, offsets.last()?.as_usize() as u64))
}

/// Bytes that a value takes at the least.
fn value_bytes(data_type: &DataType) -> u64 {
    match data_type {
        DataType::Utf8 | DataType::Binary | DataType::List(_) | DataType::Map(..) => 4,
        DataType::LargeUtf8 | DataType::LargeBinary | DataType::LargeList(_) => 8,
        DataType::Utf8View | DataType::BinaryView => 16,
        other => fixed_width(other).map_or(0, |width| width.bytes() as u64),
    }
}
