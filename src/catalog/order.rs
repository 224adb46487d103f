//! Check that rows are in the order that their uploader declared.

use std::cmp::Ordering;

use arrow::array::{Array, ArrayRef, AsArray, DynComparator, RecordBatch, make_comparator};
use arrow::compute::SortOptions;
use arrow::datatypes::{DataType, Float16Type, Float32Type, Float64Type, SchemaRef};

use crate::memory::Interrupt;
use crate::{Context, Error, Result, listed};

/// Fails unless the rows are in ascending order of those columns. A later column decides only
/// between rows that are equal in all columns before it. Nulls come before values.
///
/// # Errors
/// [`Error::Invalid`] names the first row that is less than the row before it, and gives the values
/// of both; the interrupt's.
pub(super) fn check_order(
    schema: &SchemaRef,
    batches: &[RecordBatch],
    columns: &[usize],
    interrupt: &Interrupt,
) -> Result<()> {
    let mut before: Option<&RecordBatch> = None;
    let mut row = 0;
    for batch in batches.iter().filter(|batch| batch.num_rows() > 0) {
        interrupt.check()?;
        if let Some(before) = before {
            let last = before.num_rows() - 1;
            if !is_seam_in_order(before, batch, columns)? {
                return Err(out_of_order(schema, columns, row, (before, last), (batch, 0)));
            }
        }
        let compare = row_comparator(batch, batch, columns)?;
        if let Some(at) = (1..batch.num_rows()).find(|&at| compare(at - 1, at).is_gt()) {
            return Err(out_of_order(schema, columns, row + at as u64, (batch, at - 1), (batch, at)));
        }
        row += batch.num_rows() as u64;
        before = Some(batch);
    }
    Ok(())
}

/// True if the last row of `before` is no greater than the first row of `after`, by those columns.
///
/// # Errors
/// [`Error::Invalid`] for a column of a type without order.
pub(super) fn is_seam_in_order(before: &RecordBatch, after: &RecordBatch, columns: &[usize]) -> Result<bool> {
    let (last, first) = (before.slice(before.num_rows() - 1, 1), after.slice(0, 1));
    Ok(row_comparator(&last, &first, columns)?(0, 0).is_le())
}

/// Returns a comparator of rows of `a` with rows of `b`.
fn row_comparator(a: &RecordBatch, b: &RecordBatch, columns: &[usize]) -> Result<DynComparator> {
    let compare_column = |&column: &usize| {
        comparator(a.column(column), b.column(column)).context(|| {
            format!("rows cannot be sorted by column {:?}, of type {}", a.schema_ref().field(column).name(), {
                a.column(column).data_type()
            })
        })
    };
    let comparators = columns.iter().map(compare_column).collect::<Result<Vec<_>>>()?;
    Ok(Box::new(move |i, j| {
        comparators.iter().map(|compare| compare(i, j)).find(|order| order.is_ne()).unwrap_or(Ordering::Equal)
    }))
}

/// Returns a comparator that puts nulls first, then values in the order that statistics use. It
/// differs from Arrow's order only for floats: here -0 equals 0, and every NaN is the greatest
/// value.
fn comparator(a: &ArrayRef, b: &ArrayRef) -> Result<DynComparator> {
    let options = SortOptions { descending: false, nulls_first: true };
    let widened = |array: &ArrayRef| -> Option<Vec<f64>> {
        Some(match array.data_type() {
            DataType::Float16 => array.as_primitive::<Float16Type>().values().iter().map(|v| v.to_f64()).collect(),
            DataType::Float32 => array.as_primitive::<Float32Type>().values().iter().map(|&v| v.into()).collect(),
            DataType::Float64 => array.as_primitive::<Float64Type>().values().to_vec(),
            _ => return None,
        })
    };
    match (widened(a), widened(b)) {
        (Some(a_values), Some(b_values)) => {
            let (a_nulls, b_nulls) = (a.nulls().cloned(), b.nulls().cloned());
            Ok(Box::new(move |i, j| {
                let a_valid = a_nulls.as_ref().is_none_or(|nulls| nulls.is_valid(i));
                let b_valid = b_nulls.as_ref().is_none_or(|nulls| nulls.is_valid(j));
                let (x, y) = (a_values[i], b_values[j]);
                match a_valid && b_valid {
                    true => x.partial_cmp(&y).unwrap_or_else(|| x.is_nan().cmp(&y.is_nan())),
                    false => a_valid.cmp(&b_valid),
                }
            }))
        }
        _ => make_comparator(a, b, options).map_err(|error| Error::Invalid(error.to_string())),
    }
}

fn out_of_order(
    schema: &SchemaRef,
    columns: &[usize],
    row: u64,
    before: (&RecordBatch, usize),
    after: (&RecordBatch, usize),
) -> Error {
    let names: Vec<_> = columns.iter().map(|&column| schema.field(column).name().as_str()).collect();
    let show = |(batch, row): (&RecordBatch, usize)| {
        let value = |&column: &usize| {
            arrow::util::display::array_value_to_string(batch.column(column), row)
                .map(|text| if batch.column(column).is_null(row) { "null".into() } else { text })
                .unwrap_or_else(|_| "?".into())
        };
        columns.iter().map(value).collect::<Vec<String>>().join(", ")
    };
    Error::Invalid(format!(
        "the rows are not sorted by {}, contrary to sorted_by: row {} ({}) is less than the row before it ({}); rows are counted from \
         1, and the order is ascending with nulls first",
        listed(names.iter()),
        row + 1,
        show(after),
        show(before),
    ))
}
