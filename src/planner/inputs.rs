//! Inputs of the cost model for each side: rows, widths and orders.

use std::collections::{BTreeSet, HashSet};
use std::sync::Arc;

use super::estimate::{Estimates, heaviest_rows_max, seen_unique};
use super::rank_parts::RankParts;
use super::value_sizes::result_row_bytes;
use super::{BoundJoin, Distribution, JoinKey, OutputSource, Side};
use crate::Result;
use crate::catalog::{ColumnStatistics, Table, Value};
use crate::columns::{
    DEVICE_BYTES_MAX, KeyFacts, KeyLayout, Role, are_bytes, fixed_width, key_class, movable, value_bytes,
};
use crate::device::{KeyWidth, Width};
use crate::join::BatchSizes;

/// Both sides with their roles.
#[derive(Clone, Debug)]
pub(super) struct Inputs {
    pub(super) build: Input,
    pub(super) probe: Input,
    pub(super) key_width: KeyWidth,
    /// True if the join must compare the values of keys whose packed keys are equal.
    pub(super) hashed: bool,
    /// True if the device makes keys from values that are not plain numbers. It then also hashes
    /// and compares keys too wide to be packed.
    pub(super) device_makes_keys: bool,
    /// True if the packed key is the key column itself.
    pub(super) raw: bool,
    /// Slots of the perfect-hash array; `None` unless the build keys are distinct and dense.
    pub(super) dense_slots: Option<f64>,
    /// Source column of each column of the result, in the result's order. Clones share the list.
    pub(super) given: Arc<[Given]>,
    pub(super) distribution: Distribution,
    /// Parts of the whole join that these inputs are.
    pub(super) parts: RankParts,
    /// True if each rank reads a share of the build side and sends it to the others.
    pub(super) shares_build_read: bool,
}

/// Source of a column of the result.
#[derive(Clone, Copy, Debug)]
pub(super) struct Given {
    pub(super) role: Role,
    pub(super) place: Place,
}

/// Position of a column in the lists of [`Input`].
#[derive(Clone, Copy, Debug)]
pub(super) enum Place {
    /// In [`Input::columns`].
    Fixed(usize),
    /// In [`Input::text_columns`].
    Text(usize),
    /// Not in a list: the host gathers the column.
    Host,
}

/// One side of the join.
#[derive(Clone, Debug)]
pub(super) struct Input {
    pub(super) side: Side,
    pub(super) rows: f64,
    /// Rows that the device reads from the host. The others come from other ranks.
    pub(super) rows_read: f64,
    pub(super) keyed: f64,
    pub(super) matched: f64,
    pub(super) repeats: bool,
    pub(super) seen_unique: bool,
    /// Estimated upper bound on the rows of the most frequent key.
    pub(super) heaviest_rows: f64,
    /// Share of keyed rows whose key is heavy: one of a few keys with far more rows than others.
    /// The entries that heavy rows meet on the other side are read repeatedly, so they stay in the
    /// cache.
    pub(super) hot: f64,
    /// True if the packed keys are in ascending order in table order.
    pub(super) sorted: bool,
    /// Bytes per row of the key columns as stored; zero for columns that the host reads.
    pub(super) key_source_bytes: f64,
    pub(super) key_columns: usize,
    pub(super) host_keys: bool,
    pub(super) values: ValueBytes,
    /// Columns of the result that the device moves: of fixed width, or dictionary keys.
    pub(super) columns: Vec<FixedColumn>,
    pub(super) text_columns: Vec<TextColumn>,
    pub(super) host_gathers: bool,
    /// True if the table is stored in one piece, so that a device that reads host memory copies
    /// nothing.
    pub(super) one_piece: bool,
    /// True if the table's batches are long enough for the result to share them.
    pub(super) long_batches: bool,
    pub(super) may_be_shared: bool,
}

/// Work that a device does on variable-length values, if it can.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct TextWork {
    pub(super) makes_keys: bool,
    pub(super) gathers: bool,
}

/// A variable-length column that a device gathers.
#[derive(Clone, Copy, Debug)]
pub(super) struct TextColumn {
    pub(super) index: usize,
    pub(super) bytes: f64,
    pub(super) offset_bytes: f64,
    pub(super) bytes_max: f64,
    /// True if the column was copied in as a key and need not come in again.
    pub(super) came_as_key: bool,
    /// True if it stays on the device to compare keys.
    pub(super) stays_as_key: bool,
}

impl TextColumn {
    /// Bytes on the device for the given rows, beyond those for keys: values, their starts, the
    /// offsets that the starts come from, and a validity bit.
    pub(super) fn held_bytes(&self, rows: f64) -> f64 {
        if self.stays_as_key { 0.0 } else { self.bytes + rows * self.beside_value() }
    }

    /// Bytes on the device per value, in addition to the value.
    fn beside_value(&self) -> f64 {
        8.0 + self.offset_bytes + 0.125
    }

    /// Upper bound on the bytes of one row.
    pub(super) fn row_max(&self) -> f64 {
        self.bytes_max + self.beside_value()
    }

    /// Bytes that cross the link.
    pub(super) fn crossing_bytes(&self, rows: f64) -> f64 {
        if self.came_as_key { 0.0 } else { self.bytes + rows * self.offset_bytes }
    }
}

/// Bytes, over all rows, of key values that a device makes keys of; zero if it makes none.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ValueBytes {
    /// Bytes on the device while values may still be compared.
    pub(super) stays: f64,
    /// Bytes on the device until keys are made of them.
    pub(super) arriving: f64,
    /// Bytes that cross the link: variable-length values and their offsets.
    pub(super) crossing: f64,
    /// Upper bound on the bytes of one row while it comes in.
    pub(super) row_max: f64,
}

impl ValueBytes {
    fn of(table: &Table, columns: &[usize], layout: &KeyLayout, role: Role) -> Self {
        if !layout.is_made_by_device() {
            return Self::default();
        }
        let rows = table.rows as f64;
        let type_of = |column: usize| table.schema.field(column).data_type();
        let of_bytes = || columns.iter().copied().filter_map(|column| Some((column, are_bytes(type_of(column))?)));
        let text: u64 = of_bytes().map(|(column, _)| text_bytes(table, column)).sum();
        let offsets = rows * of_bytes().map(|(_, width)| width.bytes()).sum::<usize>() as f64;
        // Each value has an offset, a number of 64 bits, and a validity bit.
        let row_bytes = layout.value_row_bytes(role) as f64 + columns.len() as f64 / 8.0;
        let arriving = text as f64 + rows * row_bytes;
        Self {
            stays: if layout.is_hashed() { arriving - offsets } else { 0.0 },
            arriving,
            crossing: text as f64 + offsets,
            row_max: row_bytes + layout.value_bytes_max() as f64,
        }
    }
}

/// True if text keys have more bytes than their values can have. Nulls then have bytes too, in
/// unknown places, and these bytes would be copied to a device with the values.
fn hides_bytes(join: &BoundJoin, facts: &[KeyFacts]) -> bool {
    let of_side = |side: Side, key: &JoinKey, bytes_max: u64| {
        let (table, column) = (join.table(side), key.column(side));
        are_bytes(table.schema.field(column).data_type()).is_some()
            && text_bytes(table, column) > table.rows.saturating_mul(bytes_max)
    };
    join.keys.iter().zip(facts).any(|(key, facts)| {
        let bytes_max = facts.bytes_max.map_or(u64::MAX, |bytes| bytes as u64);
        [Side::Left, Side::Right].into_iter().any(|side| of_side(side, key, bytes_max))
    })
}

/// Bytes of the values of a variable-length column.
fn text_bytes(table: &Table, column: usize) -> u64 {
    table.batches.iter().map(|batch| value_bytes(batch.column(column))).sum()
}

/// A column that a device moves.
#[derive(Clone, Copy, Debug)]
pub(super) struct FixedColumn {
    pub(super) index: usize,
    pub(super) bytes: f64,
    pub(super) nullable: bool,
    /// True for the only key column if it equals the packed key bit for bit. Partitioned and sorted
    /// rows have it already.
    pub(super) raw_key: bool,
    /// True if the column was copied in as a key and need not come in again.
    pub(super) came_as_key: bool,
    /// False until a strategy is priced.
    pub(super) is_moved: bool,
}

/// Maximum slots per row of a perfect-hash array. A slot takes 4 bytes, and a slot of the general
/// table at least 16 at half load. So at this limit the array is no larger.
const DENSE_SLOTS_PER_ROW_MAX: i128 = 4;

impl Inputs {
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) for a type that cannot be a key. Binding has
    /// refused such types before.
    pub(super) fn new(join: &BoundJoin, build_side: Side, estimates: &Estimates, text: TextWork) -> Result<Self> {
        let facts = join.key_facts(build_side)?;
        let device_makes_keys = text.makes_keys && join.unknown_rows.is_none() && !hides_bytes(join, &facts);
        let layout = KeyLayout::new(facts, 0);
        let layout = if device_makes_keys { layout.made_by_device() } else { layout };
        let raw = layout.is_raw();
        let hashed = layout.is_hashed();
        let input = |side: Side| Input::new(join, side, build_side, estimates, &layout, text.gathers);
        let (build, probe) = (input(build_side), input(build_side.other()));
        let dense_slots = if raw { dense_slots(join, build_side, estimates) } else { None };
        let device_makes_keys = layout.is_made_by_device();
        let given = join.output.iter().map(|output| Given::of(output.source, join, &build, &probe)).collect();
        let (key_width, distribution) = (layout.width(), Distribution::Alone);
        let shares_build_read = false;
        Ok(Self {
            build,
            probe,
            key_width,
            hashed,
            device_makes_keys,
            raw,
            dense_slots,
            given,
            distribution,
            parts: RankParts::ALONE,
            shares_build_read,
        })
    }

    /// Returns the inputs of the fullest rank of a gang that gets these parts of both sides.
    pub(super) fn of_rank(mut self, distribution: Distribution, parts: RankParts) -> Self {
        (self.distribution, self.parts) = (distribution, parts);
        match distribution {
            Distribution::Alone => {}
            Distribution::Broadcast => {
                self.probe.divide(parts.equal, parts.equal);
                self.probe.heaviest_rows *= parts.equal;
            }
            // No rank has a part of the rows of a key.
            Distribution::Hash => {
                for (input, part) in [(&mut self.build, parts.build), (&mut self.probe, parts.probe)] {
                    input.divide(parts.equal, part);
                    // Rows are in the order of their arrival.
                    input.sorted = false;
                }
            }
        }
        self
    }

    /// Returns these inputs with the build side read in shares, if whole build rows can cross.
    pub(super) fn sharing_build_read(&self) -> Option<Self> {
        let may_share = self.distribution == Distribution::Broadcast && !self.hashed && self.build.crosses_whole();
        may_share.then(|| {
            let mut inputs = Self { shares_build_read: true, ..self.clone() };
            // Rows are in the order of their arrival.
            inputs.build.sorted = false;
            inputs
        })
    }

    pub(super) fn key_bytes(&self) -> f64 {
        self.key_width.bytes() as f64
    }

    /// True if the device gathers a variable-length column.
    pub(super) fn device_gathers_text(&self) -> bool {
        [&self.build, &self.probe].into_iter().any(|input| !input.text_columns.is_empty())
    }

    /// Returns the side with the given role.
    pub(super) fn of(&self, role: Role) -> &Input {
        match role {
            Role::Build => &self.build,
            Role::Probe => &self.probe,
        }
    }

    /// Returns the side with the given role, mutably.
    pub(super) fn of_mut(&mut self, role: Role) -> &mut Input {
        match role {
            Role::Build => &mut self.build,
            Role::Probe => &mut self.probe,
        }
    }

    /// True if a column of either side moves with the keys.
    pub(super) fn moves_payload(&self) -> bool {
        [&self.build, &self.probe].into_iter().any(|input| input.columns.iter().any(|column| column.is_moved))
    }
}

impl Given {
    fn of(source: OutputSource, join: &BoundJoin, build: &Input, probe: &Input) -> Self {
        let (giver, index) = match source {
            OutputSource::Column { side, index } => (side, index),
            // The probe side gives keys if both sides' values are alike, because its rows are in
            // order.
            OutputSource::Key { index } => {
                let key = &join.keys[index];
                let giver = if key.alike { probe.side } else { Side::Left };
                (giver, key.column(giver))
            }
        };
        let (role, input) = if giver == build.side { (Role::Build, build) } else { (Role::Probe, probe) };
        Self { role, place: input.place_of(index) }
    }
}

impl FixedColumn {
    /// True if the column can move with the keys. Validity bits do not move well, and a raw key
    /// need not move.
    pub(super) fn can_move(&self) -> bool {
        !self.nullable && !self.raw_key
    }
}

impl Input {
    fn new(
        join: &BoundJoin,
        side: Side,
        build_side: Side,
        estimates: &Estimates,
        layout: &KeyLayout,
        gathers_text: bool,
    ) -> Self {
        let (raw, hashed) = (layout.is_raw(), layout.is_hashed());
        let table = join.table(side);
        let key_columns: Vec<usize> = join.keys.iter().map(|key| key.column(side)).collect();
        let keys: HashSet<usize> = key_columns.iter().copied().collect();
        let copied = key_columns.iter().enumerate().filter(|&(at, _)| layout.copies_column(at));
        let copied: HashSet<usize> = copied.map(|(_, &column)| column).collect();
        let output_columns = join.output_columns(side, build_side);
        let may_be_shared = join.may_share(side, &output_columns);
        let mut columns = Vec::new();
        let mut text_columns = Vec::new();
        let mut host_gathers = false;
        for index in output_columns {
            let is_key = keys.contains(&index);
            match movable(&table.schema, &table.batches, index).map(|movable| movable.width) {
                Some(width) => {
                    let nullable = table.statistics[index].nulls > 0;
                    let raw_key = raw && join.keys[0].column(side) == index && !nullable;
                    let (bytes, came_as_key) = (width.bytes() as f64, copied.contains(&index));
                    let column = FixedColumn { index, bytes, nullable, raw_key, came_as_key, is_moved: false };
                    columns.push(column);
                }
                None => match join.device_text(side, index).filter(|_| gathers_text) {
                    Some(text) => {
                        let came_as_key = is_key && layout.is_made_by_device();
                        text_columns.push(TextColumn { came_as_key, stays_as_key: came_as_key && hashed, ..text });
                    }
                    None => host_gathers = true,
                },
            }
        }
        let key_widths = join.keys.iter().map(|key| fixed_width(table.schema.field(key.column(side)).data_type()));
        let host_keys = layout.is_made_on_host();
        let slice_rows_min = BatchSizes::new(join.batch_rows, result_row_bytes(join), 0).slice_rows_min();
        let is_read_by_host = hashed && !layout.is_hashed_by_device();
        let key_source_bytes = if is_read_by_host { 0 } else { key_widths.flatten().map(Width::bytes).sum() };
        let role = if side == build_side { Role::Build } else { Role::Probe };
        Self {
            side,
            rows: table.rows as f64,
            rows_read: table.rows as f64,
            keyed: estimates.keyed(side),
            matched: estimates.matched(side),
            repeats: estimates.repeats(side),
            seen_unique: seen_unique(join, side),
            heaviest_rows: heaviest_rows_max(join, side),
            hot: hot_share(join, side, estimates),
            sorted: sorted_keys(join, side, layout),
            key_source_bytes: key_source_bytes as f64,
            key_columns: join.keys.len(),
            host_keys,
            values: ValueBytes::of(table, &key_columns, layout, role),
            columns,
            text_columns,
            host_gathers,
            one_piece: table.batches.len() <= 1,
            long_batches: table.batches.len() <= 1 || table.rows as usize / table.batches.len() >= slice_rows_min,
            may_be_shared,
        }
    }

    /// Takes the part of the rows that the device reads, and of the rows with a key the part that
    /// it joins. Rows without a key stay where they are read.
    fn divide(&mut self, read: f64, joined: f64) {
        self.rows_read *= read;
        self.rows = (self.rows - self.keyed) * read + self.keyed * joined;
        self.keyed *= joined;
        self.matched *= joined;
        let ValueBytes { stays, arriving, crossing, row_max: _ } = &mut self.values;
        for number in [stays, arriving, crossing] {
            *number *= read;
        }
        self.text_columns.iter_mut().for_each(|text| text.bytes *= joined);
    }

    /// True if an exchange moves all columns of the rows. The host gathers other columns by row
    /// number.
    pub(super) fn crosses_whole(&self) -> bool {
        !self.host_gathers && self.text_columns.is_empty() && self.columns.iter().all(|column| !column.nullable)
    }

    /// Position of a column that the result takes from this side. Each list is in the order of the
    /// table.
    fn place_of(&self, index: usize) -> Place {
        if let Ok(at) = self.columns.binary_search_by_key(&index, |column| column.index) {
            return Place::Fixed(at);
        }
        if let Ok(at) = self.text_columns.binary_search_by_key(&index, |column| column.index) {
            return Place::Text(at);
        }
        Place::Host
    }

    /// Bytes per row of the columns that are on the device in addition to the keys. A column that
    /// equals the key bit for bit was copied in to be packed.
    pub(super) fn copied_row_bytes(&self) -> f64 {
        self.columns.iter().filter(|column| !column.raw_key).map(|column| column.bytes).sum()
    }

    /// Bytes per row of the moved columns.
    pub(super) fn moved_row_bytes(&self) -> f64 {
        self.columns.iter().filter(|column| column.is_moved).map(|column| column.bytes).sum()
    }

    /// True if some rows have no key, so that rows with a key are numbered.
    pub(super) fn is_partly_keyed(&self) -> bool {
        self.keyed < self.rows
    }

    /// Bytes on the device of text that it gathers, beyond those for keys.
    pub(super) fn text_held_bytes(&self) -> f64 {
        self.text_columns.iter().map(|text| text.held_bytes(self.rows)).sum()
    }

    /// True if any column is gathered by row number.
    pub(super) fn needs_row_numbers(&self) -> bool {
        self.host_gathers
            || !self.text_columns.is_empty()
            || self.columns.iter().any(|column| !column.is_moved && !column.raw_key)
    }
}

fn hot_share(join: &BoundJoin, side: Side, estimates: &Estimates) -> f64 {
    let rows: f64 = estimates.heavy(join, side).map(|(_, rows)| rows).sum();
    (rows / estimates.keyed(side).max(1.0)).min(1.0)
}

/// True if the packed keys of a side are in ascending order in table order.
fn sorted_keys(join: &BoundJoin, side: Side, layout: &KeyLayout) -> bool {
    // Nulls come first in a sorted table. Nulls that match nothing have no key, so they do not
    // disturb the order. Nulls that match come last among packed keys.
    let matched_nulls = |key: &JoinKey| key.nulls_equal && join.table(side).statistics[key.column(side)].nulls > 0;
    join.is_sorted_by_key(side) && layout.keeps_order() && !join.keys.iter().any(matched_nulls)
}

fn integer_range(a: &ColumnStatistics, b: &ColumnStatistics) -> Option<(i128, i128)> {
    let (a_min, a_max) = integers(a)?;
    let (b_min, b_max) = integers(b)?;
    Some((a_min.min(b_min), a_max.max(b_max)))
}

/// Maximum bytes of a value on both sides, if known.
fn longest(a: &ColumnStatistics, b: &ColumnStatistics) -> Option<usize> {
    usize::try_from(a.max_value_bytes?.max(b.max_value_bytes?)).ok()
}

pub(super) fn integers(statistics: &ColumnStatistics) -> Option<(i128, i128)> {
    match (&statistics.min, &statistics.max) {
        (Some(Value::Integer(min)), Some(Value::Integer(max))) => Some((*min, *max)),
        _ => None,
    }
}

/// Extent of the build keys, if they look distinct and dense. Raw keys are compared as unsigned
/// integers, so a range that crosses zero has no dense image.
fn dense_slots(join: &BoundJoin, build_side: Side, estimates: &Estimates) -> Option<f64> {
    let table = join.table(build_side);
    let (min, max) = integers(&table.statistics[join.keys[0].column(build_side)])?;
    let slots = max.checked_sub(min)?.checked_add(1)?;
    let dense = min >= 0 && slots <= DENSE_SLOTS_PER_ROW_MAX * i128::from(table.rows.max(1));
    (dense && !estimates.repeats(build_side)).then_some(slots as f64)
}

impl BoundJoin {
    /// True if a device that supports text could gather a column of the result, for the given build
    /// side.
    pub(super) fn has_device_text(&self, build_side: Side) -> bool {
        let of_side = |side| !self.device_text_columns(side, build_side).is_empty();
        !self.counts_rows && [Side::Left, Side::Right].into_iter().any(of_side)
    }

    /// Columns of a side of the result that a device that supports text could gather.
    pub(super) fn device_text_columns(&self, side: Side, build_side: Side) -> BTreeSet<usize> {
        let columns = self.output_columns(side, build_side).into_iter();
        columns.filter(|&column| self.device_text(side, column).is_some()).collect()
    }

    /// Returns a variable-length column if a device that supports text could gather it. Its values
    /// must be known to be short, and together have no more bytes than short values can have. Nulls
    /// may have bytes too, in unknown places.
    fn device_text(&self, side: Side, index: usize) -> Option<TextColumn> {
        if self.unknown_rows == Some(side) {
            return None;
        }
        let table = self.table(side);
        let offset_width = are_bytes(table.schema.field(index).data_type())?;
        let bytes_max = table.statistics[index].max_value_bytes.filter(|&bytes| bytes <= DEVICE_BYTES_MAX as u64)?;
        let bytes = text_bytes(table, index);
        (bytes <= table.rows.saturating_mul(bytes_max)).then(|| TextColumn {
            index,
            bytes: bytes as f64,
            offset_bytes: offset_width.bytes() as f64,
            bytes_max: bytes_max as f64,
            came_as_key: false,
            stays_as_key: false,
        })
    }

    /// Returns the statistics of each pair of key columns for the given build side. The plan, and
    /// the run after it, make keys by these statistics. If the rows of a side are
    /// [unknown](Self::unknown_rows), keys are made for all values of their types, in any order.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) for a type that cannot be a key. Binding has
    /// refused such types before.
    pub fn key_facts(&self, build_side: Side) -> Result<Vec<KeyFacts>> {
        let are_known = self.unknown_rows.is_none();
        let sorted = are_known && (self.is_sorted_by_key(Side::Left) || self.is_sorted_by_key(Side::Right));
        let facts = |key: &JoinKey| {
            let column_type = |side: Side| self.table(side).schema.field(key.column(side)).data_type().clone();
            let statistics = |side: Side| &self.table(side).statistics[key.column(side)];
            let (build_type, probe_type) = (column_type(build_side), column_type(build_side.other()));
            Ok(KeyFacts {
                class: key_class(&build_type)?,
                build_type,
                probe_type,
                range: integer_range(statistics(Side::Left), statistics(Side::Right)).filter(|_| are_known),
                bytes_max: longest(statistics(Side::Left), statistics(Side::Right)).filter(|_| are_known),
                nulls_equal: key.nulls_equal,
                sorted,
            })
        };
        self.keys.iter().map(facts).collect()
    }
}
