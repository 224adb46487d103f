//! How many rows a join gives, from the statistics of its keys.
//!
//! Equal values are counted as in Selinger et al. 1979, section 4: values are spread evenly, and the side with fewer
//! different values has all of them in common with the other (containment), within the range that both sides share. Where
//! sketches of both key columns tell how many values they have in common, that is taken instead. Values that far more rows
//! have than others (heavy hitters) are taken out of that, as in the end-biased histograms of Ioannidis and Poosala 1995: where
//! both sides know of one, its pairs are the product of its rows, and where one side does, it is taken to meet as many rows as
//! any other value of the other side does. Frequent values may have more in common with the other side than rare ones, as where most
//! keys without a partner are on one row: sketches tell of both apart. Nulls that match nulls are one more such value, of which the rows are known
//! exactly. A value of several key columns is their combination; where nothing is known of these, because a table is there as
//! statistics only, there are as many as the columns could make, each on as many rows as any other.
//!
//! All are assumptions; the numbers choose strategies, size reservations and fill `explain`, and nothing depends on them for
//! correctness.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::{BoundJoin, JoinKey, JoinKind, Side};
use crate::Result;
use crate::catalog::{Combination, HeavyValue, Overlap, Sketch, Table, Value};
use crate::memory::Interrupt;

/// A value is far more frequent than others when so many times as many rows have it as have one on average.
const HEAVY: f64 = 4.0;

/// Sizes that statistics predict.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Estimates {
    /// Rows of the left table that have a key (a null has none, unless nulls match).
    pub left_keyed: f64,
    /// Rows of the right table that have a key.
    pub right_keyed: f64,
    /// Different keys of the left table.
    pub left_distinct: f64,
    /// Different keys of the right table.
    pub right_distinct: f64,
    /// Whether keys of the left table repeat.
    pub left_repeats: bool,
    /// Whether keys of the right table repeat.
    pub right_repeats: bool,
    /// Whether statistics tell how many different keys the left table has.
    pub left_counted: bool,
    /// The same of the right table.
    pub right_counted: bool,
    /// The most frequent keys of the left table, the most frequent first.
    pub left_frequent: Vec<HeavyValue>,
    /// The same of the right table.
    pub right_frequent: Vec<HeavyValue>,
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
    /// Estimates for a bound join. The first ones for its key columns pass over these.
    ///
    /// # Errors
    /// The interrupt's.
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
            rows: 0.0,
        };
        estimates.rows = estimates.rows_of(join);
        Ok(estimates)
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

    /// Whether keys of that side repeat, as far as statistics tell: one that does is enough.
    pub fn repeats(&self, side: Side) -> bool {
        if side == Side::Left { self.left_repeats } else { self.right_repeats }
    }

    /// Whether statistics tell how many different keys that side has.
    pub(super) fn are_counted(&self, side: Side) -> bool {
        if side == Side::Left { self.left_counted } else { self.right_counted }
    }

    /// Rows of that side with the same key, on average.
    pub(super) fn rows_of_key(&self, side: Side) -> f64 {
        self.keyed(side) / self.distinct(side).max(1.0)
    }

    /// The keys of that side that far more rows have than others, and how many do, the most frequent first.
    pub(super) fn heavy(&self, join: &BoundJoin, side: Side) -> impl Iterator<Item = (&HeavyValue, f64)> {
        let (table_rows, average) = (join.table(side).rows as f64, self.rows_of_key(side));
        let values = if side == Side::Left { &self.left_frequent } else { &self.right_frequent };
        let rows = values.iter().map(move |heavy| (heavy, heavy.share * table_rows));
        rows.filter(move |(_, rows)| *rows > HEAVY * average)
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

/// How the rows of one side that have a key are spread over its values.
struct Spread {
    /// Each heavy value, by its hash: in one order, because sums in another differ in their last bits, and with them the choice
    /// between plans that are equally good.
    heavy: BTreeMap<u64, Heavy>,
    /// Rows whose key is null, where nulls match.
    nulls: f64,
    /// The other rows, and the different values that they have.
    rest_rows: f64,
    rest_distinct: f64,
    /// The share of these values that lies in the range of both sides or, where sketches tell, that the other side has.
    shared: f64,
    /// The share of these rows that have such a value.
    shared_rows: f64,
}

/// A value that far more rows have than others.
#[derive(Clone, Copy)]
struct Heavy {
    rows: f64,
    /// How likely it is that the other side has it, where that does not know of it.
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
        // Samples and counts of distinct values err apart: what is left is never less than nothing, and rows have values.
        let rest_rows = (values - heavy.values().map(|heavy| heavy.rows).sum::<f64>()).max(0.0);
        let rest_distinct = (distinct - heavy.len() as f64).max(0.0);
        match rest_distinct < 1.0 {
            true => Self { heavy, nulls, rest_rows: 0.0, rest_distinct: 0.0, ..even },
            false => Self { heavy, nulls, rest_rows, rest_distinct: rest_distinct.min(rest_rows), ..even },
        }
    }

    /// Learns from sketches of both sides which of the values, and of the rows, the other side shares.
    fn look_up(&mut self, own: &Sketch, other: &Sketch) {
        if self.rest_distinct < 1.0 && self.heavy.is_empty() {
            return;
        }
        let rare_rows_max = HEAVY * self.rest_rows_each().max(1.0);
        // Where all values are shared, or each is on one row, rows are shared as values are, and need not be looked at one by one.
        let overlap = match self.shared >= 1.0 || !own.repeats() {
            true => Overlap { rare_rows: self.rest_rows, of_rare_rows: self.shared, of_frequent_values: self.shared },
            false => own.overlap(other, rare_rows_max, |hash| self.heavy.contains_key(&hash)),
        };
        // What is no rare value's has a frequent one, of which there may be too few to be named.
        let rare_rows = overlap.rare_rows.min(self.rest_rows);
        let shared = rare_rows * overlap.of_rare_rows + (self.rest_rows - rare_rows) * overlap.of_frequent_values;
        self.shared_rows = if self.rest_rows > 0.0 { (shared / self.rest_rows).min(1.0) } else { self.shared };
        for (&hash, heavy) in &mut self.heavy {
            heavy.shared = other.holds(hash).map_or(overlap.of_frequent_values, f64::from);
        }
    }

    /// Rows of this side with a match in `other`, and the pairs of both. `is_in_common`: the values that are `shared` are known to be the
    /// other side's. How many values a side has is known to a few per cent only, so that the numbers of both cannot tell that all of
    /// one are among the other's.
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
            // Heavy values of the other side meet some of the rest, too.
            let met = if is_in_common { 1.0 } else { (common + others.values).min(rest) / rest };
            matched += self.rest_rows * self.shared_rows * met;
            pairs += self.rest_rows * self.shared_rows * other.rest_rows * other.shared_rows / distinct_max;
        }
        (matched, pairs)
    }

    /// Heavy values of this side that are none of the other side's, as far as they lie in the range of both, and the other side
    /// has values left for them to meet.
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

/// Heavy values of one side that meet values of the other side's rest, and the rows that have them.
struct OnlyHere {
    values: f64,
    rows: f64,
}

/// What is known of the keys of one side.
enum Keys<'a> {
    /// In one column, with its sketch.
    Column(&'a Table, usize, Option<&'a Sketch>),
    /// In several, together.
    Combination(Arc<Combination>),
    /// In several, of which nothing is known together.
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

    /// Which different keys there are, where that is known.
    fn sketch(&self) -> Option<&Sketch> {
        match self {
            Self::Column(_, _, sketch) => *sketch,
            Self::Combination(combination) => Some(combination.sketch()),
            Self::Columns => None,
        }
    }

    /// Whether it is known how many different ones there are.
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

    /// Rows that have a key, and how many different ones. A column of unknown statistics is taken to be distinct.
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

    /// Whether keys repeat. Estimates of distinct values err by a few per cent, and so do not tell whether a few keys are on two rows
    /// each, which a sketch does; of single keys on many rows, it may hold none.
    fn repeat(&self, join: &BoundJoin, side: Side, keyed: f64, distinct: f64) -> bool {
        let few = distinct < 0.9 * keyed;
        if known_unique(join, side) {
            return false;
        }
        match self {
            // Both are exact, but for how floats are rounded.
            Self::Column(table, column, _) if table.statistics[*column].ascending => distinct < keyed - 0.5,
            Self::Column(table, column, _) if join.keys[0].nulls_equal && table.statistics[*column].nulls > 1 => true,
            _ => {
                let rows = join.table(side).rows as f64;
                self.frequent().iter().any(|key| key.share * rows > 1.5) || self.sketch().map_or(few, Sketch::repeats)
            }
        }
    }
}

/// Whether some of the key columns together are distinct: because the rows were seen to be, or the uploader said so.
fn known_unique(join: &BoundJoin, side: Side) -> bool {
    let keys: HashSet<usize> = join.keys.iter().map(|key| key.column(side)).collect();
    let are_keys = |columns: &Vec<usize>| !columns.is_empty() && columns.iter().all(|column| keys.contains(column));
    seen_unique(join, side) || join.table(side).unique.iter().any(are_keys)
}

/// Whether keys of that side certainly do not repeat, because a column of them is strictly ascending. What the uploader said
/// of distinct keys is believed and not checked, so memory must not be reckoned by it.
pub(super) fn seen_unique(join: &BoundJoin, side: Side) -> bool {
    join.keys.iter().any(|key| join.table(side).statistics[key.column(side)].unique_ascending)
}

/// Roughly how many rows have the most frequent key: shares are known of columns, so that of several key columns this is an
/// upper bound, and zero where nothing is known. A null that matches nulls is a key, too.
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
