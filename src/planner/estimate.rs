//! Estimates how many rows a join gives, from the statistics of its keys.
//!
//! Equal values are counted as in Selinger et al. 1979, section 4. Values are spread evenly. Within
//! the range that both sides share, all values of the side with fewer distinct values occur on the
//! other (containment). If sketches of both key columns tell how many values are common, that
//! number replaces the assumption.
//!
//! Values with far more rows than others (heavy hitters) are counted apart, as in the end-biased
//! histograms of Ioannidis and Poosala 1995. A value known as heavy on both sides gives the product
//! of its rows as pairs. A value that is heavy on one side only is assumed to meet the mean rows of
//! the other side's values that are not heavy.
//!
//! The other side may have more of the frequent values than of the rare ones. For example, most
//! keys without a partner may be on one row each. So sketches count frequent and rare values apart.
//! Nulls that match nulls count as one more heavy value, with an exactly known number of rows.
//!
//! A value of several key columns is their combination. Nothing is known of combinations if a table
//! exists only as statistics. Then every combination that the columns could make is assumed, each
//! with equally many rows.
//!
//! These are assumptions. The numbers choose strategies, size reservations and fill `explain`;
//! correctness does not depend on them.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::rank_parts::RankParts;
use super::{BoundJoin, JoinKey, JoinKind, Side};
use crate::Result;
use crate::catalog::{Combination, HeavyValue, Overlap, Sketch, Table, Value};
use crate::memory::Interrupt;

/// A value is heavy if its rows exceed this multiple of the mean rows per value.
const HEAVY: f64 = 4.0;

/// Sizes that statistics predict.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Estimates {
    /// Rows of the left table that have a key (a null has none, unless nulls match).
    pub left_keyed: f64,
    pub right_keyed: f64,
    pub left_distinct: f64,
    pub right_distinct: f64,
    pub left_repeats: bool,
    pub right_repeats: bool,
    /// True if statistics tell the number of distinct keys of the left table.
    pub left_counted: bool,
    pub right_counted: bool,
    /// The most frequent first.
    pub left_frequent: Vec<HeavyValue>,
    /// The most frequent first.
    pub right_frequent: Vec<HeavyValue>,
    pub left_matched: f64,
    pub right_matched: f64,
    pub pairs: f64,
    /// Pairs of the key that has most of them, as far as it is known.
    #[serde(default)]
    pub heaviest_pairs: f64,
    pub rows: f64,
}

impl Estimates {
    /// Estimates a bound join. The first estimate for its key columns scans these columns.
    ///
    /// # Errors
    /// The errors of the interrupt.
    pub fn of(join: &BoundJoin, interrupt: &Interrupt) -> Result<Self> {
        let (left_keys, right_keys) = (Keys::of(join, Side::Left, interrupt)?, Keys::of(join, Side::Right, interrupt)?);
        let (left_keyed, left_distinct) = left_keys.keyed_and_distinct(join, Side::Left);
        let (right_keyed, right_distinct) = right_keys.keyed_and_distinct(join, Side::Right);
        let common = left_keys.sketch().zip(right_keys.sketch()).and_then(|(left, right)| left.shares_in_common(right));
        let (left_share, right_share) = common.unwrap_or_else(|| shared_ranges(join));
        let mut left = Spread::new(join, Side::Left, left_keys.frequent(), left_share, left_keyed, left_distinct);
        let mut right = Spread::new(join, Side::Right, right_keys.frequent(), right_share, right_keyed, right_distinct);
        if let (Some(_), Some(of_left), Some(of_right)) = (common, left_keys.sketch(), right_keys.sketch()) {
            left.look_up(of_left, of_right);
            right.look_up(of_right, of_left);
        }
        let (left_met, pairs) = left.meet(&right, common.is_some());
        let (right_met, _) = right.meet(&left, common.is_some());
        let mut estimates = Self {
            left_keyed,
            right_keyed,
            left_distinct,
            right_distinct,
            left_repeats: left_keys.repeat(join, Side::Left, left_keyed, left_distinct),
            right_repeats: right_keys.repeat(join, Side::Right, right_keyed, right_distinct),
            left_counted: left_keys.are_counted(),
            right_counted: right_keys.are_counted(),
            left_frequent: left_keys.frequent().to_vec(),
            right_frequent: right_keys.frequent().to_vec(),
            left_matched: left_met.min(left_keyed),
            right_matched: right_met.min(right_keyed),
            pairs,
            heaviest_pairs: left.heaviest_pairs(&right).min(pairs),
            rows: 0.0,
        };
        estimates.rows = estimates.rows_of(join, [1.0; 2]);
        Ok(estimates)
    }

    /// Returns the estimates of a result's part that the fullest rank makes. The numbers of both
    /// sides stay those of the whole join.
    pub(super) fn of_rank(&self, join: &BoundJoin, build_side: Side, parts: RankParts) -> Self {
        let of_side = |side: Side| if side == build_side { parts.build } else { parts.probe };
        let mut of_rank = Self { pairs: parts.pairs * self.pairs, ..self.clone() };
        of_rank.rows = of_rank.rows_of(join, [Side::Left, Side::Right].map(of_side));
        of_rank
    }

    /// Rows of the given side with a key.
    pub fn keyed(&self, side: Side) -> f64 {
        if side == Side::Left { self.left_keyed } else { self.right_keyed }
    }

    /// Distinct keys of the given side.
    pub fn distinct(&self, side: Side) -> f64 {
        if side == Side::Left { self.left_distinct } else { self.right_distinct }
    }

    /// Rows of the given side with a match.
    pub fn matched(&self, side: Side) -> f64 {
        if side == Side::Left { self.left_matched } else { self.right_matched }
    }

    /// True if keys of the given side repeat, as far as statistics tell. One repeated key suffices.
    pub fn repeats(&self, side: Side) -> bool {
        if side == Side::Left { self.left_repeats } else { self.right_repeats }
    }

    /// True if statistics tell the number of distinct keys of the given side.
    pub(super) fn are_counted(&self, side: Side) -> bool {
        if side == Side::Left { self.left_counted } else { self.right_counted }
    }

    /// Mean rows per key of the given side.
    pub(super) fn rows_of_key(&self, side: Side) -> f64 {
        self.keyed(side) / self.distinct(side).max(1.0)
    }

    /// The heavy keys of the given side with their rows, the most frequent first.
    pub(super) fn heavy(&self, join: &BoundJoin, side: Side) -> impl Iterator<Item = (&HeavyValue, f64)> {
        let (table_rows, average) = (join.table(side).rows as f64, self.rows_of_key(side));
        let values = if side == Side::Left { &self.left_frequent } else { &self.right_frequent };
        let rows = values.iter().map(move |heavy| (heavy, heavy.share * table_rows));
        rows.filter(move |(_, rows)| *rows > HEAVY * average)
    }

    /// Rows of the result, for parts of the left and the right side.
    fn rows_of(&self, join: &BoundJoin, [left, right]: [f64; 2]) -> f64 {
        let (left_matched, right_matched) = (left * self.left_matched, right * self.right_matched);
        let (left, right) = (left * join.left.rows as f64, right * join.right.rows as f64);
        match join.how {
            JoinKind::Inner => self.pairs,
            JoinKind::Left => self.pairs + left - left_matched,
            JoinKind::Right => self.pairs + right - right_matched,
            JoinKind::Full => self.pairs + left - left_matched + right - right_matched,
            JoinKind::LeftSemi => left_matched,
            JoinKind::LeftAnti => left - left_matched,
            JoinKind::RightSemi => right_matched,
            JoinKind::RightAnti => right - right_matched,
        }
    }
}

/// Distribution of one side's keyed rows over its values.
struct Spread {
    /// Each heavy value, by its hash. The map is ordered because sums in another order differ in
    /// their last bits, which would change the choice between equally good plans.
    heavy: BTreeMap<u64, Heavy>,
    /// Rows with a null key, if nulls match.
    nulls: f64,
    /// Rows of values that are not heavy, and the number of these values.
    rest_rows: f64,
    rest_distinct: f64,
    /// Share of these values in the range of both sides. If sketches tell, the share of them that
    /// the other side has.
    shared: f64,
    /// Share of `rest_rows` that have one of the values in `shared`.
    shared_rows: f64,
}

/// A value with far more rows than others.
#[derive(Clone, Copy)]
struct Heavy {
    rows: f64,
    /// Probability that the other side has the value, if it is not among the other side's heavy
    /// values.
    shared: f64,
}

impl Spread {
    fn new(join: &BoundJoin, side: Side, frequent: &[HeavyValue], shared: f64, keyed: f64, distinct: f64) -> Self {
        let even = Self {
            heavy: BTreeMap::new(),
            nulls: 0.0,
            rest_rows: keyed,
            rest_distinct: distinct,
            shared,
            shared_rows: shared,
        };
        let table = join.table(side);
        // A null in one of several columns makes no key of its own.
        let nulls = match &join.keys[..] {
            [key] if key.nulls_equal => table.statistics[key.column(side)].nulls as f64,
            _ => 0.0,
        };
        let values = (keyed - nulls).max(0.0);
        if known_unique(join, side) {
            return Self { nulls, rest_rows: values, rest_distinct: distinct.min(values), ..even };
        }
        let of_value = |heavy: &HeavyValue| (heavy.hash, Heavy { rows: heavy.share * table.rows as f64, shared });
        let heavy: BTreeMap<u64, Heavy> = frequent.iter().map(of_value).collect();
        // Samples and distinct counts err independently. So the remainder is clamped at zero, and
        // at most one value per row remains.
        let rest_rows = (values - heavy.values().map(|heavy| heavy.rows).sum::<f64>()).max(0.0);
        let rest_distinct = (distinct - heavy.len() as f64).max(0.0);
        match rest_distinct < 1.0 {
            true => Self { heavy, nulls, rest_rows: 0.0, rest_distinct: 0.0, ..even },
            false => Self { heavy, nulls, rest_rows, rest_distinct: rest_distinct.min(rest_rows), ..even },
        }
    }

    /// Learns from sketches of both sides which values and rows the other side shares.
    fn look_up(&mut self, own: &Sketch, other: &Sketch) {
        if self.rest_distinct < 1.0 && self.heavy.is_empty() {
            return;
        }
        let rare_rows_max = HEAVY * self.rest_rows_each().max(1.0);
        // If all values are shared, or each is on one row, the share of rows equals the share of
        // values. The rows need not be examined.
        let overlap = match self.shared >= 1.0 || !own.repeats() {
            true => Overlap { rare_rows: self.rest_rows, of_rare_rows: self.shared, of_frequent_values: self.shared },
            false => own.overlap(other, rare_rows_max, |hash| self.heavy.contains_key(&hash)),
        };
        // Rows without a rare value have a frequent one, which may have too few rows to be listed.
        let rare_rows = overlap.rare_rows.min(self.rest_rows);
        let shared = rare_rows * overlap.of_rare_rows + (self.rest_rows - rare_rows) * overlap.of_frequent_values;
        self.shared_rows = if self.rest_rows > 0.0 { (shared / self.rest_rows).min(1.0) } else { self.shared };
        for (&hash, heavy) in &mut self.heavy {
            heavy.shared = other.holds(hash).map_or(overlap.of_frequent_values, f64::from);
        }
    }

    /// Returns the rows of this side with a match in `other`, and the pairs of both.
    /// `is_in_common`: the `shared` values are known to be the other side's. Distinct counts err by
    /// a few per cent, so they alone cannot show that one side's values are all among the other's.
    fn meet(&self, other: &Self, is_in_common: bool) -> (f64, f64) {
        let (mut matched, mut pairs) = (0.0, self.nulls * other.nulls);
        if other.nulls > 0.0 {
            matched += self.nulls;
        }
        for (hash, heavy) in &self.heavy {
            if let Some(others) = other.heavy.get(hash) {
                matched += heavy.rows;
                pairs += heavy.rows * others.rows;
            }
        }
        let (own, others) = (self.only_here(other), other.only_here(self));
        matched += own.rows;
        pairs += own.rows * other.rest_rows_each() + others.rows * self.rest_rows_each();

        let (rest, other_rest) = (self.rest_distinct * self.shared, other.rest_distinct * other.shared);
        let (common, distinct_max) = (rest.min(other_rest), rest.max(other_rest));
        if rest > 0.0 {
            // Heavy values of the other side also meet some of this side's values that are not
            // heavy.
            let met = if is_in_common { 1.0 } else { (common + others.values).min(rest) / rest };
            matched += self.rest_rows * self.shared_rows * met;
            pairs += self.rest_rows * self.shared_rows * other.rest_rows * other.shared_rows / distinct_max;
        }
        (matched, pairs)
    }

    /// Returns the pairs of the value that has most of them, among nulls and the heavy values of
    /// either side; zero without any.
    fn heaviest_pairs(&self, other: &Self) -> f64 {
        let of_both = self.heavy.iter().filter_map(|(hash, own)| Some(own.rows * other.heavy.get(hash)?.rows));
        let only_in = |one: &Self, other: &Self| {
            let values = one.heavy.iter().filter(|(hash, _)| !other.heavy.contains_key(hash));
            values.map(|(_, heavy)| heavy.shared * heavy.rows * other.rest_rows_each()).fold(0.0, f64::max)
        };
        of_both.fold(self.nulls * other.nulls, f64::max).max(only_in(self, other)).max(only_in(other, self))
    }

    /// Heavy values of this side that are not heavy on the other side. Counts those in the range of
    /// both sides, while the other side has values left to meet.
    fn only_here(&self, other: &Self) -> OnlyHere {
        let only = || self.heavy.iter().filter(|(hash, _)| !other.heavy.contains_key(hash)).map(|(_, heavy)| heavy);
        let values: f64 = only().map(|heavy| heavy.shared).sum();
        let rows: f64 = only().map(|heavy| heavy.shared * heavy.rows).sum();
        let room = if values > 0.0 { (other.rest_distinct * other.shared / values).min(1.0) } else { 0.0 };
        OnlyHere { values: room * values, rows: room * rows }
    }

    fn rest_rows_each(&self) -> f64 {
        if self.rest_distinct > 0.0 { self.rest_rows / self.rest_distinct } else { 0.0 }
    }
}

/// Heavy values of one side that meet values which are not heavy on the other side, and their rows.
struct OnlyHere {
    values: f64,
    rows: f64,
}

/// Statistics of the keys of one side.
enum Keys<'a> {
    Column(&'a Table, usize, Option<&'a Sketch>),
    Combination(Arc<Combination>),
    /// Several key columns, with nothing known of their combination.
    Columns,
}

impl<'a> Keys<'a> {
    fn of(join: &'a BoundJoin, side: Side, interrupt: &Interrupt) -> Result<Self> {
        let table = join.table(side);
        if let [key] = &join.keys[..] {
            let column = key.column(side);
            return Ok(Self::Column(table, column, table.sketch(column, interrupt)?));
        }
        let columns: Vec<(usize, bool)> = join.keys.iter().map(|key| (key.column(side), key.nulls_equal)).collect();
        let known = table.combination(&columns, interrupt)?;
        Ok(known.map_or(Self::Columns, Self::Combination))
    }

    /// Sketch of the distinct keys, if known.
    fn sketch(&self) -> Option<&Sketch> {
        match self {
            Self::Column(_, _, sketch) => *sketch,
            Self::Combination(combination) => Some(combination.sketch()),
            Self::Columns => None,
        }
    }

    /// True if the number of distinct keys is known.
    fn are_counted(&self) -> bool {
        match self {
            Self::Column(table, column, _) => table.statistics[*column].distinct.is_some(),
            Self::Combination(_) => true,
            Self::Columns => false,
        }
    }

    fn frequent(&self) -> &[HeavyValue] {
        match self {
            Self::Column(table, column, _) => &table.statistics[*column].heavy,
            Self::Combination(combination) => combination.heavy(),
            Self::Columns => &[],
        }
    }

    /// Returns the rows with a key, and the distinct keys. A column without statistics is assumed
    /// to be distinct.
    fn keyed_and_distinct(&self, join: &BoundJoin, side: Side) -> (f64, f64) {
        let table = join.table(side);
        let rows = table.rows as f64;
        let of_column = |key: &JoinKey| table.statistics[key.column(side)].distinct.unwrap_or(rows).max(1.0);
        let valid = |key: &JoinKey| 1.0 - table.statistics[key.column(side)].nulls as f64 / rows.max(1.0);
        let keyed = rows * join.keys.iter().filter(|key| !key.nulls_equal).map(valid).product::<f64>();
        let product = || join.keys.iter().map(of_column).product();
        let distinct: f64 = match self {
            Self::Column(table, column, _) if table.statistics[*column].ascending => product(),
            _ => self.sketch().map_or_else(product, Sketch::distinct).max(1.0),
        };
        let distinct = if known_unique(join, side) { keyed } else { distinct.min(keyed) };
        (keyed, distinct)
    }

    /// True if keys repeat. Distinct counts err by a few per cent, so they cannot show a few keys
    /// on two rows each. A sketch shows these, but may miss single keys on many rows.
    fn repeat(&self, join: &BoundJoin, side: Side, keyed: f64, distinct: f64) -> bool {
        let few = distinct < 0.9 * keyed;
        if known_unique(join, side) {
            return false;
        }
        match self {
            // Both are exact, except for float rounding.
            Self::Column(table, column, _) if table.statistics[*column].ascending => distinct < keyed - 0.5,
            Self::Column(table, column, _) if join.keys[0].nulls_equal && table.statistics[*column].nulls > 1 => true,
            _ => {
                let rows = join.table(side).rows as f64;
                self.frequent().iter().any(|key| key.share * rows > 1.5) || self.sketch().map_or(few, Sketch::repeats)
            }
        }
    }
}

/// True if some key columns together are distinct, as seen in the rows or as the uploader declared.
fn known_unique(join: &BoundJoin, side: Side) -> bool {
    let keys: HashSet<usize> = join.keys.iter().map(|key| key.column(side)).collect();
    let are_keys = |columns: &Vec<usize>| !columns.is_empty() && columns.iter().all(|column| keys.contains(column));
    seen_unique(join, side) || join.table(side).unique.iter().any(are_keys)
}

/// True if keys of the given side certainly do not repeat, because a key column is strictly
/// ascending. The uploader's declaration is believed without a check, so memory must not depend on
/// it.
pub(super) fn seen_unique(join: &BoundJoin, side: Side) -> bool {
    join.keys.iter().any(|key| join.table(side).statistics[key.column(side)].unique_ascending)
}

/// Estimated rows of the most frequent key. Shares are known per column, so for several key columns
/// this is an upper bound, and zero if nothing is known. A null that matches nulls is a key too.
pub(super) fn heaviest_rows_max(join: &BoundJoin, side: Side) -> f64 {
    let table = join.table(side);
    let rows = join.keys.iter().map(|key| {
        let statistics = &table.statistics[key.column(side)];
        let nulls = if key.nulls_equal { statistics.nulls as f64 } else { 0.0 };
        nulls.max(statistics.heaviest_share.clamp(0.0, 1.0) * table.rows as f64)
    });
    rows.fold(table.rows as f64, f64::min)
}

impl BoundJoin {
    /// True if the rows of the given side are known to be in the order of the key columns, nulls
    /// first.
    pub fn is_sorted_by_key(&self, side: Side) -> bool {
        let table: &Table = self.table(side);
        let detected = self.keys.len() == 1 && table.statistics[self.keys[0].column(side)].ascending;
        let declared = table.sorted_by.len() >= self.keys.len()
            && table.sorted_by.iter().zip(&self.keys).all(|(sorted, key)| *sorted == key.column(side));
        detected || declared
    }
}

/// Share of each side's values in the range common to both sides.
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
