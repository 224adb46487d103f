//! How many rows a join gives, from the statistics of its keys.
//!
//! Equal values are counted as in Selinger et al. 1979, section 4: values are spread evenly, and the side with fewer
//! different values has all of them in common with the other (containment), within the range that both sides share. A value
//! that far more rows have than others (a heavy hitter) is taken to meet as many rows as any value of the other side does.
//! All are assumptions; the numbers choose strategies and fill `explain`, and nothing depends on them for correctness.

use super::{BoundJoin, JoinKind, Side};
use crate::catalog::{Table, Value};

/// Sizes that statistics predict.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Estimates {
    /// Rows of the left table that have a key (a null has none, unless nulls match).
    pub left_keyed: f64,
    /// Rows of the right table that have a key.
    pub right_keyed: f64,
    /// Different keys of the left table.
    pub left_distinct: f64,
    /// Different keys of the right table.
    pub right_distinct: f64,
    /// Rows of the left table with a match.
    pub left_matched: f64,
    /// Rows of the right table with a match.
    pub right_matched: f64,
    /// Matching pairs.
    pub pairs: f64,
    /// Rows of the result.
    pub rows: f64,
}

impl Estimates {
    /// Estimates for a bound join.
    pub fn of(join: &BoundJoin) -> Self {
        let (left_keyed, left_distinct) = keyed_and_distinct(join, Side::Left);
        let (right_keyed, right_distinct) = keyed_and_distinct(join, Side::Right);
        let (left_share, right_share) = shared_ranges(join);
        let (left_common, right_common) = (left_distinct * left_share, right_distinct * right_share);
        let distinct_max = left_common.max(right_common);
        let common = left_common.min(right_common);
        let share = |of: f64| if of > 0.0 { common / of } else { 0.0 };
        let evenly = match distinct_max > 0.0 {
            true => left_keyed * left_share * right_keyed * right_share / distinct_max,
            false => 0.0,
        };
        // Rows of each side's heaviest value, if it lies in the range of both.
        let left_heavy = heaviest_rows(join, Side::Left).min(left_keyed) * left_share;
        let right_heavy = heaviest_rows(join, Side::Right).min(right_keyed) * right_share;
        let overlap = common > 0.0;
        let met = |heavy: f64, keyed: f64, distinct: f64| if overlap { heavy * keyed / distinct } else { 0.0 };
        let pairs =
            evenly.max(met(left_heavy, right_keyed, right_distinct)).max(met(right_heavy, left_keyed, left_distinct));
        let mut estimates = Self {
            left_keyed,
            right_keyed,
            left_distinct,
            right_distinct,
            left_matched: (left_keyed * left_share * share(left_common)).max(if overlap { left_heavy } else { 0.0 }),
            right_matched: (right_keyed * right_share * share(right_common)).max(if overlap {
                right_heavy
            } else {
                0.0
            }),
            pairs,
            rows: 0.0,
        };
        estimates.rows = estimates.rows_of(join);
        estimates
    }

    /// Rows of that side with a key.
    pub fn keyed(&self, side: Side) -> f64 {
        if side == Side::Left { self.left_keyed } else { self.right_keyed }
    }

    /// Different keys of that side.
    pub fn distinct(&self, side: Side) -> f64 {
        if side == Side::Left { self.left_distinct } else { self.right_distinct }
    }

    /// Rows of that side with a match.
    pub fn matched(&self, side: Side) -> f64 {
        if side == Side::Left { self.left_matched } else { self.right_matched }
    }

    /// Whether keys of that side repeat, as far as statistics tell. Estimates of distinct values err by a few per cent.
    pub fn repeats(&self, side: Side) -> bool {
        self.distinct(side) < 0.9 * self.keyed(side)
    }

    fn rows_of(&self, join: &BoundJoin) -> f64 {
        let (left, right) = (join.left.rows as f64, join.right.rows as f64);
        match join.spec.how {
            JoinKind::Inner => self.pairs,
            JoinKind::Left => self.pairs + left - self.left_matched,
            JoinKind::Right => self.pairs + right - self.right_matched,
            JoinKind::Full => self.pairs + left - self.left_matched + right - self.right_matched,
            JoinKind::LeftSemi => self.left_matched,
            JoinKind::LeftAnti => left - self.left_matched,
            JoinKind::RightSemi => self.right_matched,
            JoinKind::RightAnti => right - self.right_matched,
        }
    }
}

/// Rows that have a key, and how many different ones. A column of unknown statistics is taken to be distinct.
fn keyed_and_distinct(join: &BoundJoin, side: Side) -> (f64, f64) {
    let table = join.table(side);
    let rows = table.rows as f64;
    let (mut keyed, mut distinct) = (rows, 1.0f64);
    for key in &join.keys {
        let statistics = &table.statistics[key.column(side)];
        if !key.nulls_equal && rows > 0.0 {
            keyed *= 1.0 - statistics.nulls as f64 / rows;
        }
        distinct *= statistics.distinct.unwrap_or(rows).max(1.0);
    }
    let distinct = if known_unique(join, side) { keyed } else { distinct.min(keyed) };
    (keyed, distinct)
}

/// Whether some of the key columns together are distinct: because the rows were seen to be, or the uploader said so.
fn known_unique(join: &BoundJoin, side: Side) -> bool {
    let table = join.table(side);
    let is_key = |column: &usize| join.keys.iter().any(|key| key.column(side) == *column);
    let declared = table.unique.iter().any(|columns| !columns.is_empty() && columns.iter().all(is_key));
    declared || seen_unique(join, side)
}

/// Whether keys of that side certainly do not repeat, because a column of them is strictly ascending. What the uploader said
/// of distinct keys is believed and not checked, so memory must not be reckoned by it.
pub(super) fn seen_unique(join: &BoundJoin, side: Side) -> bool {
    join.keys.iter().any(|key| join.table(side).statistics[key.column(side)].unique_ascending)
}

/// Roughly how many rows have the most frequent key: exact shares are known of columns, so that of several key columns this
/// is an upper bound, and zero where nothing is known.
pub(super) fn heaviest_rows_max(join: &BoundJoin, side: Side) -> f64 {
    let table = join.table(side);
    let shares = join.keys.iter().map(|key| table.statistics[key.column(side)].heaviest_share.clamp(0.0, 1.0));
    shares.fold(1.0, f64::min) * table.rows as f64
}

/// Roughly how many rows have the most frequent key, at least.
fn heaviest_rows(join: &BoundJoin, side: Side) -> f64 {
    if join.keys.len() == 1 { heaviest_rows_max(join, side) } else { 0.0 }
}

impl BoundJoin {
    /// Whether the rows of that side are known to be in the order of the key columns, nulls first.
    pub fn is_sorted_by_key(&self, side: Side) -> bool {
        let table: &Table = self.table(side);
        let detected = self.keys.len() == 1 && table.statistics[self.keys[0].column(side)].ascending;
        let declared = table.sorted_by.len() >= self.keys.len()
            && table.sorted_by.iter().zip(&self.keys).all(|(sorted, key)| *sorted == key.column(side));
        detected || declared
    }
}

/// The share of each side's values that lies in the range which both sides have in common.
fn shared_ranges(join: &BoundJoin) -> (f64, f64) {
    let (mut left_share, mut right_share) = (1.0, 1.0);
    for key in &join.keys {
        let range = |side: Side| {
            let statistics = &join.table(side).statistics[key.column(side)];
            match (&statistics.min, &statistics.max) {
                (Some(Value::Integer(min)), Some(Value::Integer(max))) => Some((*min as f64, *max as f64 + 1.0)),
                (Some(Value::Float(min)), Some(Value::Float(max))) => Some((*min, *max)),
                _ => None,
            }
        };
        let (Some((left_min, left_max)), Some((right_min, right_max))) = (range(Side::Left), range(Side::Right)) else {
            continue;
        };
        let common = left_max.min(right_max) - left_min.max(right_min);
        let share = |min: f64, max: f64| match max - min {
            extent if common < 0.0 || !extent.is_finite() => f64::from(common >= 0.0),
            extent if extent > 0.0 => (common / extent).clamp(0.0, 1.0),
            _ => 1.0,
        };
        left_share *= share(left_min, left_max);
        right_share *= share(right_min, right_max);
    }
    (left_share, right_share)
}
