//! Binding of chains: joins of the same rows with several tables.
//!
//! Each join of a chain is bound as a join of two tables. The first gives the columns of the common
//! rows and of its own table, and each later join those of its own table. The result has them in
//! the order that the caller asks for.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;

use arrow::datatypes::{Field, Schema, SchemaRef};

use super::bind::{Named, bind_interruptible, output_schema};
use super::{BoundJoin, Input, JoinSpec, ThenSpec};
use crate::catalog::Catalog;
use crate::human::{asked, did_you_mean};
use crate::join::{OutputColumn, OutputSource, Side};
use crate::memory::Interrupt;
use crate::{Context, Error, Result, listed};

/// Joins that follow the first of a chain, and the columns of their common result.
#[derive(Clone, Debug)]
pub struct BoundThen {
    pub joins: Vec<BoundJoin>,
    /// Columns of the first join alone. [`BoundJoin::schema`] has those of the chain.
    pub first_schema: SchemaRef,
    /// Join of each column of the result, and the column's number in the result of that join.
    pub columns: Vec<(usize, usize)>,
    /// Name of each join's table among the inputs, the first join's first.
    pub labels: Vec<String>,
}

/// Input of a chain: the common rows, or the table of one join.
struct Part<'a> {
    label: &'a str,
    named: Named<'a>,
    /// Join that gives the columns.
    join: usize,
    side: Side,
    keys: HashSet<usize>,
    /// False if the join shows no column of this input.
    is_shown: bool,
}

/// Column of the result, with its part and its number in the part's table.
struct Chosen {
    part: usize,
    index: usize,
    name: String,
}

/// Binds a join that others follow.
///
/// # Errors
/// The errors of [`bind`](super::bind()) for each join, and [`Error::Unsupported`] for a kind of
/// join that keeps rows of a table for themselves.
pub(super) fn bind_chain(spec: &JoinSpec, catalog: &Catalog, interrupt: &Interrupt) -> Result<BoundJoin> {
    if spec.count {
        return Err(Error::Unsupported("\"count\" cannot count the rows of several joins; leave \"then\" out".into()));
    }
    let common = if matches!(spec.left, Input::Rows(_)) { Side::Left } else { Side::Right };
    let alone = JoinSpec { columns: Vec::new(), count: true, then: Vec::new(), ..spec.clone() };
    let first = bind_interruptible(&alone, catalog, interrupt)?;
    let rows = first.table(common).clone();
    let mut joins = vec![first];
    for ThenSpec { table, on, how, .. } in &spec.then {
        let (table, rows) = (table.clone(), Input::Rows(rows.clone()));
        let (left, right) = if common == Side::Left { (rows, table) } else { (table, rows) };
        let spec = JoinSpec { left, right, on: on.clone(), how: *how, ..alone.clone() };
        let name = || format!("the join with table {}", asked(spec.table_name(common.other())));
        joins.push(bind_interruptible(&spec, catalog, interrupt).context(name)?);
    }
    for join in &joins {
        if join.how.build_rows_kept(common.other()).is_some() {
            return Err(Error::Unsupported(format!(
                "a {} join keeps rows of table {:?} for themselves, which a join with \"then\" cannot; keep rows of the {common} \
                 side only: inner, {common}, {common}_semi or {common}_anti",
                join.how,
                join.table(common.other()).name
            )));
        }
    }
    let parts = parts(spec, &joins, common)?;
    let chosen = match spec.columns.is_empty() {
        true => all_columns(&parts),
        false => spec.columns.iter().map(|column| find(&parts, column)).collect::<Result<_>>()?,
    };
    let chosen = with_free_names(chosen, &parts)?;
    let mut outputs: Vec<Vec<OutputColumn>> = joins.iter().map(|_| Vec::new()).collect();
    let mut columns = Vec::with_capacity(chosen.len());
    for Chosen { part, index, name } in &chosen {
        let Part { join, side, .. } = parts[*part];
        columns.push((join, outputs[join].len()));
        outputs[join].push(OutputColumn { name: name.clone(), source: OutputSource::Column { side, index: *index } });
    }
    let labels = parts[1..].iter().map(|part| part.label.to_owned()).collect();
    drop(parts);
    for (join, output) in joins.iter_mut().zip(outputs) {
        let BoundJoin { how, left, right, keys, .. } = &*join;
        // A join without columns decides which rows the result has.
        if !output.is_empty() {
            join.schema = output_schema(*how, left, right, keys, &output, interrupt)?;
            (join.output, join.counts_rows) = (output, false);
        }
    }
    let field = |&(join, at): &(usize, usize)| joins[join].schema.field(at).clone();
    let fields: Vec<Field> = columns.iter().map(field).collect();
    let mut first = joins.remove(0);
    let first_schema = std::mem::replace(&mut first.schema, Arc::new(Schema::new(fields)));
    first.then = Some(BoundThen { joins, first_schema, columns, labels });
    Ok(first)
}

fn parts<'a>(spec: &'a JoinSpec, joins: &'a [BoundJoin], common: Side) -> Result<Vec<Part<'a>>> {
    let labels = spec.then.iter().map(|then| then.label.as_deref().unwrap_or(then.table.name()));
    let labels: Vec<&str> = std::iter::once(spec.table_name(common.other())).chain(labels).collect();
    let part = |side: Side, label, join: usize| {
        let bound = &joins[join];
        let is_shown = bound.how.only_side().is_none_or(|only| only == side);
        let keys = bound.keys.iter().map(|key| key.column(side)).collect();
        Part { label, named: Named::columns_of(bound.table(side)), join, side, keys, is_shown }
    };
    let of_tables = labels.iter().enumerate().map(|(join, label)| part(common.other(), label, join));
    let parts: Vec<Part<'_>> = std::iter::once(part(common, spec.table_name(common), 0)).chain(of_tables).collect();
    let mut taken = HashSet::new();
    match parts.iter().find(|part| !taken.insert(part.label)) {
        None => Ok(parts),
        Some(twice) => Err(Error::Invalid(format!(
            "two inputs of the join are called {:?}; give the later one another name with \"label\" (--then \"TABLE as NAME on ...\")",
            twice.label
        ))),
    }
}

/// Returns the columns of the common rows, and those columns of each table that are no keys.
fn all_columns(parts: &[Part<'_>]) -> Vec<Chosen> {
    let of_part = |(part, input): (usize, &Part<'_>)| {
        let fields = input.named.table().schema.fields().clone();
        let is_wanted = |index: &usize| input.is_shown && (part == 0 || !input.keys.contains(index));
        let indices: Vec<usize> = (0..fields.len()).filter(is_wanted).collect();
        indices.into_iter().map(move |index| Chosen { part, index, name: fields[index].name().clone() })
    };
    parts.iter().enumerate().flat_map(of_part).collect()
}

/// Resolves `column`, or `label.column` for one of several inputs that have it. `left.column` and
/// `right.column` are those of the first join. The common rows give a column that the others have
/// as a key only.
fn find(parts: &[Part<'_>], column: &str) -> Result<Chosen> {
    let having: Vec<(usize, usize)> =
        parts.iter().enumerate().filter_map(|(at, part)| Some((at, part.named.find(column)?))).collect();
    let chosen = |part: usize, index: usize, name: &str| match parts[part].is_shown {
        true => Ok(Chosen { part, index, name: name.into() }),
        false => Err(Error::Invalid(format!(
            "column {column:?} belongs to {:?}, and a semi or anti join has no columns of it",
            parts[part].label
        ))),
    };
    match having[..] {
        [(part, index)] => return chosen(part, index, column),
        [(0, index), ref others @ ..] if others.iter().all(|(part, index)| parts[*part].keys.contains(index)) => {
            return chosen(0, index, column);
        }
        [] => {}
        _ => {
            let names: Vec<String> =
                having.iter().map(|(at, _)| format!("\"{}.{column}\"", parts[*at].label)).collect();
            return Err(Error::Invalid(format!(
                "several inputs of the join have a column {column:?}; write {}",
                names.join(" or ")
            )));
        }
    }
    let labels = parts.iter().map(|part| part.label.to_string());
    // The inputs of the first join are its sides, too, unless another input has that name.
    let sides = parts.iter().take(2).map(|part| part.side.to_string());
    for (label, (at, part)) in labels.chain(sides).zip(parts.iter().enumerate().cycle()) {
        let name = column.strip_prefix(&label).and_then(|rest| rest.strip_prefix('.'));
        if let Some((name, index)) = name.and_then(|name| Some((name, part.named.find(name)?))) {
            return chosen(at, index, name);
        }
    }
    let known: BTreeSet<&str> = parts.iter().flat_map(|part| part.named.names()).collect();
    let has = |part: &Part<'_>| {
        let fields = part.named.table().schema.fields();
        format!("{:?} has {}", part.label, listed(fields.iter().map(|field| field.name())))
    };
    let inputs: Vec<String> = parts.iter().map(has).collect();
    Err(Error::Invalid(format!(
        "no input of the join has a column {}; {}{}",
        asked(column),
        inputs.join(", "),
        did_you_mean(column, known)
    )))
}

/// Appends `_label` to the name of a column that an earlier column has. Refuses a column that was
/// chosen before, and a name that is still taken.
fn with_free_names(mut chosen: Vec<Chosen>, parts: &[Part<'_>]) -> Result<Vec<Chosen>> {
    let mut places = HashSet::new();
    if let Some(twice) = chosen.iter().find(|column| !places.insert((column.part, column.index))) {
        return Err(Error::Invalid(format!(
            "column {:?} of {:?} is among the columns of the join twice; name it once",
            twice.name, parts[twice.part].label
        )));
    }
    let mut taken: HashMap<String, usize> = HashMap::new();
    for column in &mut chosen {
        if taken.contains_key(&column.name) {
            column.name = format!("{}_{}", column.name, parts[column.part].label);
        }
        if let Some(earlier) = taken.insert(column.name.clone(), column.part) {
            return Err(Error::Invalid(format!(
                "columns of {:?} and {:?} would both be named {:?}; leave one of them out, or give one input another \"label\"",
                parts[earlier].label, parts[column.part].label, column.name
            )));
        }
    }
    Ok(chosen)
}
