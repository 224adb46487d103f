//! What a join gives at the least, whatever statistics leave open: the ground on which one is refused before it runs.
//!
//! Estimates err, and a join that would have fitted must not be refused for that. Certain are the rows of each side, and pairs
//! that were counted: of values which the samples of both key columns hold, in all rows of both tables. Where few values make up
//! most pairs, as they do where a result is many times its inputs, samples of thousands of rows hold them. Counting passes over
//! both key columns, and so is done only for a join that is predicted not to fit.
//!
//! Of several key columns together nothing is counted: a pair that agrees in one column may differ in another.

use arrow::datatypes::DataType;

use super::{BoundJoin, JoinKind, OutputSource, Plan, Side};
use crate::columns::fixed_width;

/// What a join certainly gives.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AtLeast {
    /// Rows of the result.
    pub rows: u64,
    /// Bytes of their values, those of variable length as if they were empty.
    pub bytes: u64,
}

/// Pairs of equal keys that were counted, and the rows of each side that are in one.
#[derive(Clone, Copy, Debug, Default)]
struct Counted {
    pairs: u64,
    left: u64,
    right: u64,
}

impl Plan {
    /// What the join gives at the least. The first call for a table passes over its key column.
    pub fn at_least(&self) -> AtLeast {
        let join = &self.join;
        let Counted { pairs, left, right } = counted(join);
        let (left_rest, right_rest) = (join.left.rows - left, join.right.rows - right);
        // Rows that are sure to be there beside the pairs: each of them matches rows that were not counted, or none.
        let (pairs, left_more, right_more) = match join.spec.how {
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
        let bytes = |rows: u64, row_bytes: u64| rows.saturating_mul(row_bytes);
        AtLeast {
            rows: pairs.saturating_add(left_more).saturating_add(right_more),
            bytes: bytes(pairs, left_bytes.saturating_add(right_bytes))
                .saturating_add(bytes(left_more, left_bytes))
                .saturating_add(bytes(right_more, right_bytes)),
        }
    }
}

fn counted(join: &BoundJoin) -> Counted {
    let [key] = &join.keys[..] else { return Counted::default() };
    let (left, right) = (join.left.counted_values(key.left), join.right.counted_values(key.right));
    let nulls = (join.left.statistics[key.left].nulls, join.right.statistics[key.right].nulls);
    let of_nulls = (key.nulls_equal && nulls.0 > 0 && nulls.1 > 0).then_some(nulls);
    let of_values = left.iter().filter_map(|(hash, &rows)| Some((rows, *right.get(hash)?)));
    of_values.chain(of_nulls).fold(Counted::default(), |sum, (left, right)| Counted {
        pairs: sum.pairs.saturating_add(left.saturating_mul(right)),
        left: sum.left + left,
        right: sum.right + right,
    })
}

/// Bytes that each row of that side takes in the result. A key column that both sides give counts for the left side, and for the
/// right side where only that is there.
fn row_bytes(join: &BoundJoin, side: Side) -> u64 {
    let keys_of = if join.spec.how.only_side() == Some(Side::Right) { Side::Right } else { Side::Left };
    let of_output = join.output.iter().filter_map(|column| match column.source {
        OutputSource::Column { side: of, index } => (of == side).then_some(index),
        OutputSource::Key { index } => (keys_of == side).then(|| join.keys[index].column(side)),
    });
    of_output.map(|index| value_bytes(join.table(side).schema.field(index).data_type())).sum()
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
