//! Binding: finds every name, checks every type and derives the result's schema.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;

use arrow::array::{ArrayRef, AsArray};
use arrow::datatypes::{DataType, Field, Schema, SchemaRef};

use super::chain::{BoundThen, bind_chain};
use super::value_sizes::ValueSizes;
use super::{Input, JoinSpec};
use crate::catalog::{Catalog, Table};
use crate::columns::{encoded_type, key_class, movable};
use crate::human::{asked, did_you_mean, type_name};
use crate::join::{JoinKey, JoinKind, OutputColumn, OutputSource, Side};
use crate::memory::Interrupt;
use crate::{Context, Error, Result, listed};

/// A join whose names are found and whose types match.
#[derive(Clone, Debug)]
pub struct BoundJoin {
    pub left: Arc<Table>,
    pub right: Arc<Table>,
    pub how: JoinKind,
    pub keys: Vec<JoinKey>,
    /// Empty if the rows are counted.
    pub output: Vec<OutputColumn>,
    pub counts_rows: bool,
    pub schema: SchemaRef,
    /// Maximum rows per batch of the result. `None`: messages of 1 to 4 MB.
    pub batch_rows: Option<usize>,
    /// True if the result becomes a table, and may live long. Binding leaves it false, and the
    /// caller that stores the result sets it.
    pub result_is_stored: bool,
    /// Side whose rows were unknown when the join was prepared, or will be. Its statistics decide
    /// nothing about keys. Binding leaves it `None`, and the caller that prepares the join sets it.
    pub unknown_rows: Option<Side>,
    /// Further joins of the same rows, if this is the first of a chain.
    pub then: Option<BoundThen>,
}

impl BoundJoin {
    /// Returns the table on the given side.
    pub fn table(&self, side: Side) -> &Arc<Table> {
        match side {
            Side::Left => &self.left,
            Side::Right => &self.right,
        }
    }

    /// True if the result may share the given columns of a side with its table. Sharing any part
    /// keeps all of the table's memory alive. So a result that is stored does not share. Nor does
    /// one whose columns are a small part of the table.
    pub fn may_share(&self, side: Side, columns: &[usize]) -> bool {
        /// Sharing requires at least `1 / PART` of a table's bytes.
        const PART: f64 = 4.0;
        let table = self.table(side);
        let sizes = ValueSizes::of(table);
        let bytes: f64 = columns.iter().map(|&column| sizes.mean_bytes(column)).sum();
        !self.result_is_stored && PART * bytes * table.rows as f64 >= table.bytes as f64
    }

    /// Returns the mean bytes of a value of each of the given columns of a side.
    pub fn mean_bytes(&self, side: Side, columns: &[usize]) -> Vec<f64> {
        let sizes = ValueSizes::of(self.table(side));
        columns.iter().map(|&column| sizes.mean_bytes(column)).collect()
    }

    /// Returns the columns that the result takes from a side for the given `build_side`, each once,
    /// ascending.
    pub fn output_columns(&self, side: Side, build_side: Side) -> Vec<usize> {
        OutputColumn::taken_from(side, build_side, self.how, &self.output, &self.keys)
    }
}

/// Finds the tables and columns of a join and checks their types.
///
/// # Errors
/// [`Error::NotFound`] for a table. [`Error::Invalid`] for a column, a key type, or a clash of
/// names in the result.
pub fn bind(spec: &JoinSpec, catalog: &Catalog) -> Result<BoundJoin> {
    bind_interruptible(spec, catalog, &Interrupt::default())
}

/// Binds a join as [`bind`] does, unless interrupted.
///
/// # Errors
/// The errors of [`bind`] and of the interrupt.
pub fn bind_interruptible(spec: &JoinSpec, catalog: &Catalog, interrupt: &Interrupt) -> Result<BoundJoin> {
    if !spec.then.is_empty() {
        return bind_chain(spec, catalog, interrupt);
    }
    let left = rows_of(&spec.left, catalog).context(|| "the left side of the join")?;
    let right = rows_of(&spec.right, catalog).context(|| "the right side of the join")?;
    let (left_named, right_named) = (Named::columns_of(&left), Named::columns_of(&right));
    let keys = bind_keys(spec, &left_named, &right_named)?;
    let (output, schema) = match spec.count {
        true => (Vec::new(), Arc::new(Schema::new(vec![Field::new("count", DataType::Int64, false)]))),
        false => {
            let output = match spec.columns.is_empty() {
                true => default_output(spec.how, &left, &right, &keys),
                false => Finder::new(spec.how, left_named, right_named, &keys).chosen_output(&spec.columns)?,
            };
            let output = disambiguate(output)?;
            let schema = output_schema(spec.how, &left, &right, &keys, &output, interrupt)?;
            (output, schema)
        }
    };
    let JoinSpec { how, count, batch_rows, .. } = *spec;
    Ok(BoundJoin {
        left,
        right,
        how,
        keys,
        output,
        counts_rows: count,
        schema,
        batch_rows,
        result_is_stored: false,
        unknown_rows: None,
        then: None,
    })
}

/// Returns the rows of an input.
fn rows_of(input: &Input, catalog: &Catalog) -> Result<Arc<Table>> {
    match input {
        Input::Table(name) => catalog.table(name),
        Input::Rows(table) => Ok(table.clone()),
    }
}

/// A table with an index of its columns by name, because a join may name thousands of columns.
pub(super) struct Named<'a> {
    table: &'a Table,
    columns: HashMap<&'a str, usize>,
}

impl<'a> Named<'a> {
    pub(super) fn columns_of(table: &'a Table) -> Self {
        let fields = table.schema.fields().iter().enumerate();
        Self { table, columns: fields.map(|(index, field)| (field.name().as_str(), index)).collect() }
    }

    pub(super) fn table(&self) -> &'a Table {
        self.table
    }

    /// Returns the names of all columns, in no order.
    pub(super) fn names(&self) -> impl Iterator<Item = &'a str> {
        self.columns.keys().copied()
    }

    pub(super) fn find(&self, column: &str) -> Option<usize> {
        self.columns.get(column).copied()
    }

    /// Returns the index of a column.
    ///
    /// # Errors
    /// The errors of [`Table::column_index`].
    fn index_of(&self, column: &str) -> Result<usize> {
        self.find(column).map_or_else(|| self.table.column_index(column), Ok)
    }
}

fn bind_keys(spec: &JoinSpec, left_named: &Named<'_>, right_named: &Named<'_>) -> Result<Vec<JoinKey>> {
    let (left, right) = (left_named.table, right_named.table);
    if spec.on.is_empty() {
        return Err(Error::Invalid(
            "a join needs at least one pair of key columns: \"on\": [{\"left\": \"...\", \"right\": \"...\"}]".into(),
        ));
    }
    let bind_pair = |pair: &super::KeyPair| {
        let (left_index, right_index) = (left_named.index_of(&pair.left)?, right_named.index_of(&pair.right)?);
        let (left_type, right_type) =
            (left.schema.field(left_index).data_type(), right.schema.field(right_index).data_type());
        let left_class =
            key_class(left_type).context(|| format!("key column {:?} of table {:?}", pair.left, left.name))?;
        let right_class =
            key_class(right_type).context(|| format!("key column {:?} of table {:?}", pair.right, right.name))?;
        if left_class != right_class {
            return Err(Error::Invalid(format!(
                "key column {:?} of table {:?} is {}, and {:?} of table {:?} is {}; values of these types are never compared, so \
                 cast one side to the other's type before sending it",
                pair.left,
                left.name,
                type_name(left_type),
                pair.right,
                right.name,
                type_name(right_type)
            )));
        }
        let is_float = matches!(left_class, crate::columns::KeyClass::Float { .. });
        Ok(JoinKey {
            left: left_index,
            right: right_index,
            nulls_equal: pair.nulls_equal.unwrap_or(spec.nulls_equal),
            // Each dictionary has its own order.
            alike: !is_float
                && !has_ordered_dictionary(left, left_index)
                && gathered_type(&[(left, left_index)]) == gathered_type(&[(right, right_index)]),
        })
    };
    spec.on.iter().map(bind_pair).collect()
}

/// Returns the keys once, then the rest of left, then the rest of right. Semi and anti joins: the
/// columns of their side.
fn default_output(how: JoinKind, left: &Table, right: &Table, keys: &[JoinKey]) -> Vec<OutputColumn> {
    let columns_of = |side: Side, table: &Table, skip: &HashSet<usize>| -> Vec<OutputColumn> {
        let fields = table.schema.fields().iter().enumerate().filter(|(index, _)| !skip.contains(index));
        fields
            .map(|(index, field)| OutputColumn {
                name: field.name().clone(),
                source: OutputSource::Column { side, index },
            })
            .collect()
    };
    if let Some(side) = how.only_side() {
        return columns_of(side, if side == Side::Left { left } else { right }, &HashSet::new());
    }
    let mut output = Vec::new();
    let (mut left_shown, mut right_shown) = (HashSet::new(), HashSet::new());
    for (index, key) in keys.iter().enumerate() {
        // A left column that is compared with several right columns is one key of the result.
        let is_first = left_shown.insert(key.left);
        if is_first {
            let name = left.schema.field(key.left).name().clone();
            output.push(OutputColumn { name, source: OutputSource::Key { index } });
        }
        // In an unmatched right row, a second right column has a value of its own.
        if is_first || !how.keeps_unmatched(Side::Right) {
            right_shown.insert(key.right);
        }
    }
    output.extend(columns_of(Side::Left, left, &left_shown));
    output.extend(columns_of(Side::Right, right, &right_shown));
    output
}

/// Finds the columns that a join names.
struct Finder<'a> {
    how: JoinKind,
    left: Named<'a>,
    right: Named<'a>,
    /// The first key of each pair of columns, and the first key of each left column.
    keys_by_pair: HashMap<(usize, usize), usize>,
    keys_by_left: HashMap<usize, usize>,
}

impl<'a> Finder<'a> {
    fn new(how: JoinKind, left: Named<'a>, right: Named<'a>, keys: &[JoinKey]) -> Self {
        // Reversed, so that the first of several keys is entered last.
        let keys = || keys.iter().enumerate().rev();
        let keys_by_pair = keys().map(|(index, key)| ((key.left, key.right), index)).collect();
        let keys_by_left = keys().map(|(index, key)| (key.left, index)).collect();
        Self { how, left, right, keys_by_pair, keys_by_left }
    }

    fn side(&self, side: Side) -> &Named<'a> {
        if side == Side::Left { &self.left } else { &self.right }
    }

    /// Resolves the columns that the join names, and refuses duplicates.
    fn chosen_output(&self, columns: &[String]) -> Result<Vec<OutputColumn>> {
        let mut output: Vec<OutputColumn> = Vec::with_capacity(columns.len());
        let mut places: HashMap<OutputSource, usize> = HashMap::with_capacity(columns.len());
        for (at, column) in columns.iter().enumerate() {
            let found = self.find(column)?;
            if let Some(earlier) = places.insert(found.source, at) {
                let how = match columns[earlier] == *column {
                    true => "twice".into(),
                    false => format!("as {:?}, too", columns[earlier]),
                };
                return Err(Error::Invalid(format!(
                    "column {column:?} is among the columns of the join {how}; name it once"
                )));
            }
            output.push(found);
        }
        Ok(output)
    }

    /// Resolves `column`, `left.column` or `right.column`. A bare name of a key in the default
    /// result is that key. Any other bare name that both sides have is ambiguous.
    fn find(&self, column: &str) -> Result<OutputColumn> {
        let key = |index: usize| Ok(OutputColumn { name: column.into(), source: OutputSource::Key { index } });
        match (self.left.find(column), self.right.find(column)) {
            (Some(in_left), Some(in_right)) => {
                match (self.how.only_side(), self.keys_by_pair.get(&(in_left, in_right))) {
                    (Some(side), _) => self.on_side(column, side, column),
                    (None, Some(&index)) => key(index),
                    (None, None) => Err(Error::Invalid(format!(
                        "column {column:?} is in both {:?} and {:?}; write \"left.{column}\" or \"right.{column}\"",
                        self.left.table.name, self.right.table.name
                    ))),
                }
            }
            (Some(in_left), None) => match self.keys_by_left.get(&in_left) {
                Some(&index) if self.how.only_side().is_none() => key(index),
                _ => self.on_side(column, Side::Left, column),
            },
            (None, Some(_)) => self.on_side(column, Side::Right, column),
            (None, None) => match column.split_once('.') {
                Some(("left", name)) => self.on_side(column, Side::Left, name),
                Some(("right", name)) => self.on_side(column, Side::Right, name),
                _ => Err(self.unknown(column)),
            },
        }
    }

    /// Resolves `name` on the given side; `column` is the name that the join wrote.
    fn on_side(&self, column: &str, side: Side, name: &str) -> Result<OutputColumn> {
        if self.how.only_side().is_some_and(|only| only != side) {
            return Err(Error::Invalid(format!(
                "column {column:?} belongs to the {side} table, and a {} join has columns of the {} table only",
                self.how,
                side.other()
            )));
        }
        let index = self.side(side).index_of(name).map_err(|error| match self.side(side.other()).find(name) {
            Some(_) if self.how.only_side().is_none() => {
                Error::Invalid(format!("{error}; the {} table has it: \"{}.{name}\"", side.other(), side.other()))
            }
            _ => error,
        })?;
        Ok(OutputColumn { name: name.into(), source: OutputSource::Column { side, index } })
    }

    fn unknown(&self, column: &str) -> Error {
        let names = |table: &Table| listed(table.schema.fields().iter().map(|field| field.name()));
        // SQL writes `table.column`. A column name may contain a point, and both sides may be the
        // same table.
        let by_table = [Side::Right, Side::Left].into_iter().find_map(|side| {
            let named = self.side(side);
            let name = column.strip_prefix(&named.table.name)?.strip_prefix('.')?;
            let is_shown = self.how.only_side().is_none_or(|only| only == side);
            (is_shown && named.find(name).is_some()).then(|| format!("; write \"{side}.{name}\""))
        });
        let bare = column.strip_suffix("_right").filter(|_| self.how.only_side().is_none());
        let hint = match bare.filter(|name| self.right.find(name).is_some()) {
            Some(name) => {
                format!("; write \"right.{name}\", which the result calls {column:?} if its name is taken")
            }
            None => by_table.unwrap_or_else(|| {
                let known: BTreeSet<&str> =
                    self.left.columns.keys().chain(self.right.columns.keys()).copied().collect();
                did_you_mean(column, known)
            }),
        };
        Error::Invalid(format!(
            "neither table has a column {}; left has {}, right has {}{hint}",
            asked(column),
            names(self.left.table),
            names(self.right.table)
        ))
    }
}

/// Suffix of a right column whose name is taken.
const SUFFIX: &str = "_right";

/// Appends the suffix `_right` to a right column whose name is taken, more than once if a table is
/// itself a result. Refuses any other clash, which the client has to resolve.
fn disambiguate(mut output: Vec<OutputColumn>) -> Result<Vec<OutputColumn>> {
    let mut names = TakenNames::of(&output);
    let suffixes_more = output.iter().map(|column| match column.source {
        OutputSource::Column { side: Side::Right, .. } => names.free(&column.name),
        _ => 0,
    });
    let suffixes_more: Vec<usize> = suffixes_more.collect();
    if let Some(column) = output.iter().find(|column| names.is_shared(&column.name)) {
        return Err(Error::Invalid(format!(
            "two columns of the result would be named {:?}; leave one of them out of its columns, or rename one before sending it",
            column.name
        )));
    }
    for (column, more) in output.iter_mut().zip(suffixes_more) {
        column.name.push_str(&SUFFIX.repeat(more));
    }
    Ok(output)
}

/// Names of the result, split into base and number of suffixes. A result may have thousands of
/// names, and a name thousands of suffixes.
struct TakenNames<'a> {
    /// Number of columns of each name.
    columns: HashMap<(&'a str, usize), usize>,
    /// For a taken name, a higher number of suffixes. All numbers between the two are taken.
    taken_until: HashMap<(&'a str, usize), usize>,
}

impl<'a> TakenNames<'a> {
    fn of(output: &'a [OutputColumn]) -> Self {
        let mut columns: HashMap<_, usize> = HashMap::with_capacity(output.len());
        output.iter().for_each(|column| *columns.entry(parts_of(&column.name)).or_default() += 1);
        Self { columns, taken_until: HashMap::new() }
    }

    fn is_shared(&self, name: &'a str) -> bool {
        self.columns.get(&parts_of(name)).is_some_and(|columns| *columns > 1)
    }

    /// Gives a column a unique name. Returns the number of suffixes to append.
    fn free(&mut self, name: &'a str) -> usize {
        let (base, own) = parts_of(name);
        let Some(sharing) = self.columns.get_mut(&(base, own)).filter(|columns| **columns > 1) else { return 0 };
        *sharing -= 1;
        let (mut free, mut passed) = (own, Vec::new());
        while self.columns.contains_key(&(base, free)) {
            passed.push(free);
            free = self.taken_until.get(&(base, free)).map_or(free + 1, |until| *until);
        }
        self.columns.insert((base, free), 1);
        passed.into_iter().for_each(|suffixes| _ = self.taken_until.insert((base, suffixes), free));
        free - own
    }
}

/// Splits a name into its base and its number of suffixes.
fn parts_of(name: &str) -> (&str, usize) {
    let base = name.trim_end_matches(SUFFIX);
    (base, (name.len() - base.len()) / SUFFIX.len())
}

pub(super) fn output_schema(
    how: JoinKind,
    left: &Table,
    right: &Table,
    keys: &[JoinKey],
    output: &[OutputColumn],
    interrupt: &Interrupt,
) -> Result<SchemaRef> {
    let field = |column: &OutputColumn| {
        interrupt.check()?;
        let (source, nullable): (&Field, bool) = match column.source {
            OutputSource::Column { side: Side::Left, index } => {
                (left.schema.field(index), how.keeps_unmatched(Side::Right))
            }
            OutputSource::Column { side: Side::Right, index } => {
                (right.schema.field(index), how.keeps_unmatched(Side::Left))
            }
            OutputSource::Key { index } => {
                let key = keys[index];
                (
                    left.schema.field(key.left),
                    how.keeps_unmatched(Side::Right) && right.schema.field(key.right).is_nullable(),
                )
            }
        };
        let data_type = match column.source {
            OutputSource::Column { side: Side::Left, index } => gathered_type(&[(left, index)]),
            OutputSource::Column { side: Side::Right, index } => gathered_type(&[(right, index)]),
            // Unmatched right rows bring values that the left type may not hold.
            OutputSource::Key { index } if how.keeps_unmatched(Side::Right) => {
                let sides = [(left, keys[index].left), (right, keys[index].right)];
                match sides.map(|(table, index)| table.schema.field(index).data_type()) {
                    [DataType::Dictionary(_, one), DataType::Dictionary(_, other)] if one == other => {
                        gathered_type(&sides)
                    }
                    _ => common_key_type(&gathered_type(&sides[..1]), &gathered_type(&sides[1..])),
                }
            }
            OutputSource::Key { index } => gathered_type(&[(left, keys[index].left)]),
        };
        let has_ordered_dictionary = match column.source {
            OutputSource::Column { side: Side::Left, index } => has_ordered_dictionary(left, index),
            OutputSource::Column { side: Side::Right, index } => has_ordered_dictionary(right, index),
            OutputSource::Key { index } => {
                !how.keeps_unmatched(Side::Right) && has_ordered_dictionary(left, keys[index].left)
            }
        };
        let field = Field::new(&column.name, data_type, source.is_nullable() || nullable);
        Ok(field.with_dict_is_ordered(has_ordered_dictionary).with_metadata(source.metadata().clone()))
    };
    Ok(Arc::new(Schema::new(output.iter().map(field).collect::<Result<Vec<_>>>()?)))
}

/// True if the order of a column's dictionary has a meaning. The result's dictionary then has the
/// same order.
fn has_ordered_dictionary(table: &Table, index: usize) -> bool {
    table.schema.field(index).dict_is_ordered() == Some(true) && is_as_it_lies(&[(table, index)])
}

/// Type in which one column, or two columns that become one, are gathered: the type of the first.
/// Dictionary columns whose batches have different dictionaries get a key type that can number the
/// values of all batches.
fn gathered_type(columns: &[(&Table, usize)]) -> DataType {
    match columns {
        &[(table, index)] => table.gathered_type(index, || find_gathered_type(columns)).clone(),
        _ => find_gathered_type(columns),
    }
}

fn find_gathered_type(columns: &[(&Table, usize)]) -> DataType {
    let (first, first_index) = columns[0];
    let data_type = first.schema.field(first_index).data_type();
    if !matches!(data_type, DataType::Dictionary(..)) || is_as_it_lies(columns) {
        return data_type.clone();
    }
    let dictionaries_of = |&(table, index): &(&'_ Table, usize)| {
        table
            .batches
            .iter()
            .map(move |batch| batch.column(index).as_any_dictionary().values().clone())
            .collect::<Vec<_>>()
    };
    let dictionaries: Vec<ArrayRef> = columns.iter().flat_map(dictionaries_of).collect();
    encoded_type(data_type, &dictionaries.iter().collect::<Vec<_>>())
}

/// True if the column is a dictionary column of one table whose batches all have the same
/// dictionary. The result then has that dictionary too.
fn is_as_it_lies(columns: &[(&Table, usize)]) -> bool {
    matches!(columns, [(table, index)] if movable(&table.schema, &table.batches, *index).is_some())
}

/// Returns a type that holds the values of both key types, which are of one class.
fn common_key_type(left: &DataType, right: &DataType) -> DataType {
    use DataType as T;
    let values = |data_type: &DataType| match data_type {
        T::Dictionary(_, values) => values.as_ref().clone(),
        other => other.clone(),
    };
    // Values of two dictionaries may be too many for the key type of one.
    let (left, right) = (values(left), values(right));
    let integer = |data_type: &DataType| match data_type {
        T::Int8 => Some((true, 8)),
        T::Int16 => Some((true, 16)),
        T::Int32 => Some((true, 32)),
        T::Int64 => Some((true, 64)),
        T::UInt8 => Some((false, 8)),
        T::UInt16 => Some((false, 16)),
        T::UInt32 => Some((false, 32)),
        T::UInt64 => Some((false, 64)),
        _ => None,
    };
    match (integer(&left), integer(&right)) {
        (Some((a_signed, a_bits)), Some((b_signed, b_bits))) => {
            // An unsigned type combined with a signed one takes one more bit.
            let bits = |signed: bool, bits: u32| if (a_signed || b_signed) && !signed { bits + 1 } else { bits };
            match (a_signed || b_signed, bits(a_signed, a_bits).max(bits(b_signed, b_bits))) {
                (true, ..=8) => T::Int8,
                (true, ..=16) => T::Int16,
                (true, ..=32) => T::Int32,
                (true, ..=64) => T::Int64,
                (true, _) => T::Decimal128(20, 0),
                (false, ..=8) => T::UInt8,
                (false, ..=16) => T::UInt16,
                (false, ..=32) => T::UInt32,
                (false, _) => T::UInt64,
            }
        }
        (Some((is_signed, bits)), None) | (None, Some((is_signed, bits))) => {
            let decimal = if left.is_integer() { right } else { left };
            wide_enough(decimal, digits(is_signed, bits))
        }
        _ if left == right => left,
        _ => match (&left, &right) {
            (T::Utf8 | T::LargeUtf8 | T::Utf8View, _) => T::LargeUtf8,
            (T::Binary | T::LargeBinary | T::BinaryView | T::FixedSizeBinary(_), _) => T::LargeBinary,
            (_, T::Decimal256(_, scale)) | (T::Decimal256(_, scale), _) => T::Decimal256(76, *scale),
            (_, T::Decimal128(_, scale)) | (T::Decimal128(_, scale), _) => T::Decimal128(38, *scale),
            (_, T::Decimal64(_, scale)) | (T::Decimal64(_, scale), _) => T::Decimal64(18, *scale),
            (T::Decimal32(_, scale), _) => T::Decimal32(9, *scale),
            // Times of one unit have one type, and instants differ only in the name of their zone.
            _ => left,
        },
    }
}

/// Decimal digits of the largest integer with the given number of bits.
fn digits(is_signed: bool, bits: u32) -> u8 {
    let largest = if is_signed { (1u128 << (bits - 1)) - 1 } else { (1u128 << bits) - 1 };
    largest.ilog10() as u8 + 1
}

/// Returns a decimal type of scale 0 that holds the values of `decimal` and all numbers of the
/// given digits.
fn wide_enough(decimal: DataType, digits: u8) -> DataType {
    use DataType as T;
    match decimal {
        T::Decimal32(precision, _) | T::Decimal64(precision, _) | T::Decimal128(precision, _) if precision < digits => {
            T::Decimal128(38, 0)
        }
        T::Decimal256(precision, _) if precision < digits => T::Decimal256(76, 0),
        // A column of this type needs no conversion.
        wide => wide,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::{Arena, Budget};
    use crate::planner::KeyPair;

    /// A join of `l (k, v)` and `r (a, b, w)` on `k = a` and `k = b`.
    fn bound(how: JoinKind, columns: &[&str]) -> Result<BoundJoin> {
        let catalog = Catalog::new(Arena::new(Budget::new("host memory", "--host-memory", 1 << 20)));
        for (table, columns) in [("l", &["k", "v"][..]), ("r", &["a", "b", "w"])] {
            let fields = columns.iter().map(|name| Field::new(*name, DataType::Int32, false));
            let schema = Arc::new(Schema::new(fields.collect::<Vec<_>>()));
            catalog.create(Table::from_batches(table, schema, Vec::new()).unwrap()).unwrap();
        }
        let pair = |right: &str| KeyPair::new("k", right);
        let columns = columns.iter().map(|name| (*name).to_owned()).collect();
        bind(&JoinSpec { how, columns, ..JoinSpec::inner("l", "r", vec![pair("a"), pair("b")]) }, &catalog)
    }

    #[test]
    fn a_side_is_a_table_of_the_catalog_or_the_given_rows() {
        let catalog = Catalog::new(Arena::new(Budget::new("host memory", "--host-memory", 1 << 20)));
        let of = |name: &str| {
            let fields = ["k", "v"].map(|column| Field::new(column, DataType::Int32, false));
            Table::from_batches(name, Arc::new(Schema::new(fields.to_vec())), Vec::new()).unwrap()
        };
        catalog.create(of("named")).unwrap();
        let rows = Arc::new(of("made"));
        let joined = |left: Input, key: &str| {
            let spec = JoinSpec::inner(left, rows.clone(), vec![KeyPair::new("k", key)]);
            bind(&spec, &catalog)
        };
        let with_named = joined("named".into(), "k").unwrap();
        assert!(Arc::ptr_eq(&with_named.left, &catalog.table("named").unwrap()));
        assert!(Arc::ptr_eq(&with_named.right, &rows));
        let alone = joined(rows.clone().into(), "k").unwrap();
        assert!(Arc::ptr_eq(&alone.left, &rows));
        assert_eq!((&alone.schema, &alone.output), (&with_named.schema, &with_named.output));
        let message = |left: &str, key| joined(left.into(), key).unwrap_err().to_string();
        assert!(message("named", "w").contains("\"made\""), "{}", message("named", "w"));
        // A name is looked up in the catalog only, even if the other side has that label.
        assert!(message("made", "k").contains("the left side of the join"), "{}", message("made", "k"));
    }

    fn names(how: JoinKind) -> Vec<String> {
        bound(how, &[]).unwrap().output.into_iter().map(|column| column.name).collect()
    }

    #[test]
    fn an_unknown_column_is_refused_with_the_name_of_the_existing_column() {
        let refused = |column: &str, how| bound(how, &[column]).unwrap_err().message().to_owned();
        let said = refused("w_right", JoinKind::Inner);
        assert!(said.contains("has a, b, w; write \"right.w\", which the result calls \"w_right\" if"), "{said}");
        assert!(refused("w_left", JoinKind::Inner).ends_with("right has a, b, w"));
        assert!(refused("left.w", JoinKind::Inner).ends_with("columns are k, v; the right table has it: \"right.w\""));
        assert!(refused("right.v", JoinKind::Left).ends_with("the left table has it: \"left.v\""));
        // Sides are left and right, whatever the names of their tables. The hint for a key of the
        // right table names its side too.
        assert!(refused("r.a", JoinKind::Inner).ends_with("right has a, b, w; write \"right.a\""));
        assert!(refused("l.v", JoinKind::Full).ends_with("; write \"left.v\""));
        assert!(refused("r.w", JoinKind::LeftSemi).ends_with("right has a, b, w"));
        let shown = |columns: &[&str]| bound(JoinKind::Inner, columns).unwrap().schema.fields().len();
        assert_eq!(shown(&["k", "right.a", "right.b", "w"]), 4);
        // A semi join has columns of one side only.
        assert!(refused("left.w", JoinKind::LeftSemi).ends_with("columns are k, v"));
        assert!(refused("w_right", JoinKind::LeftSemi).ends_with("right has a, b, w"));
    }

    #[test]
    fn a_named_key_is_the_key_of_the_result() {
        let source = |how, column: &str| bound(how, &[column]).unwrap().output.remove(0).source;
        for how in [JoinKind::Inner, JoinKind::Left, JoinKind::Right, JoinKind::Full] {
            assert_eq!(source(how, "k"), bound(how, &[]).unwrap().output[0].source, "{how}");
            assert_eq!(source(how, "k"), OutputSource::Key { index: 0 }, "{how}");
            assert_eq!(source(how, "left.k"), OutputSource::Column { side: Side::Left, index: 0 }, "{how}");
            assert_eq!(source(how, "a"), OutputSource::Column { side: Side::Right, index: 0 }, "{how}");
        }
        assert_eq!(source(JoinKind::LeftSemi, "k"), OutputSource::Column { side: Side::Left, index: 0 });
    }

    #[test]
    fn a_column_that_is_named_twice_is_refused() {
        let refused = |columns: &[&str]| bound(JoinKind::Inner, columns).unwrap_err().message().to_owned();
        assert_eq!(refused(&["v", "v"]), "column \"v\" is among the columns of the join twice; name it once");
        // The join used to accept the second one, because the first had been given another name.
        assert!(refused(&["right.w", "k", "right.w"]).starts_with("column \"right.w\" is among"));
        assert_eq!(
            refused(&["w", "right.w"]),
            "column \"right.w\" is among the columns of the join as \"w\", too; name it once"
        );
    }

    #[test]
    fn a_column_that_is_compared_twice_is_shown_once() {
        assert_eq!(names(JoinKind::Inner), ["k", "v", "w"]);
        assert_eq!(names(JoinKind::Left), ["k", "v", "w"]);
        // An unmatched right row shows `a` as `k`, and its `b` may differ.
        assert_eq!(names(JoinKind::Right), ["k", "v", "b", "w"]);
        assert_eq!(names(JoinKind::LeftSemi), ["k", "v"]);
    }

    #[test]
    fn integers_and_decimals_have_a_common_type() {
        use DataType as T;
        for (left, right, common) in [
            (T::Int32, T::Int64, T::Int64),
            (T::UInt32, T::Int32, T::Int64),
            (T::Int64, T::UInt64, T::Decimal128(20, 0)),
            // The common type is joined with both types again.
            (T::Int64, T::Decimal128(20, 0), T::Decimal128(20, 0)),
            (T::Decimal128(20, 0), T::UInt64, T::Decimal128(20, 0)),
            (T::UInt64, T::Decimal128(19, 0), T::Decimal128(38, 0)),
            (T::Int64, T::Decimal128(19, 0), T::Decimal128(19, 0)),
            (T::Int8, T::Decimal32(3, 0), T::Decimal32(3, 0)),
            (T::Int32, T::Decimal32(9, 0), T::Decimal128(38, 0)),
            (T::Decimal256(10, 0), T::Int64, T::Decimal256(76, 0)),
            (T::Dictionary(T::Int8.into(), T::Int64.into()), T::Decimal64(18, 0), T::Decimal128(38, 0)),
            (T::Decimal128(9, 0), T::Decimal128(11, 0), T::Decimal128(38, 0)),
        ] {
            assert_eq!(common_key_type(&left, &right), common, "{left} and {right}");
        }
    }

    #[test]
    fn the_type_of_the_merged_dictionaries_of_a_table_is_computed_once() {
        use arrow::array::{DictionaryArray, Int8Array, RecordBatch, StringArray};
        let catalog = Catalog::new(Arena::new(Budget::new("host memory", "--host-memory", 1 << 20)));
        let batch = |part: i32| {
            let values = StringArray::from_iter_values((0..100).map(|number| format!("value {}", 100 * part + number)));
            let dictionary = DictionaryArray::new(Int8Array::from_iter_values(0..100), Arc::new(values));
            RecordBatch::try_from_iter([("d", Arc::new(dictionary) as ArrayRef)]).unwrap()
        };
        let batches = vec![batch(0), batch(1)];
        catalog.create(Table::from_batches("t", batches[0].schema(), batches).unwrap()).unwrap();
        let bound = bind(&JoinSpec::inner("t", "t", vec![KeyPair::new("d", "d")]), &catalog).unwrap();
        let found = bound.left.gathered_type(0, || unreachable!("binding stored the type"));
        assert_eq!(found, &DataType::Dictionary(Box::new(DataType::Int16), Box::new(DataType::Utf8)));
        assert_eq!(bound.schema.field(0).data_type(), found);
    }
}
