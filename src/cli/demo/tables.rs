//! Tables of the demo: TPC-H tables from the generator, and the other tables that the demo's joins
//! need.

use std::collections::{BTreeSet, HashSet};
use std::sync::Arc;

use arrow::array::{ArrayRef, AsArray, BooleanArray, RecordBatch, StringArray, StructArray};
use arrow::compute::{cast, filter_record_batch};
use arrow::datatypes::{DataType, Date32Type, Field, FieldRef, Fields, Int64Type, SchemaRef};
use arrow::error::ArrowError;
use rayon::prelude::*;
use tpchgen::generators::{CustomerGenerator, LineItemGenerator, OrderGenerator, PartSuppGenerator, SupplierGenerator};
use tpchgen_arrow::{CustomerArrow, LineItemArrow, OrderArrow, PartSuppArrow, SupplierArrow};

use crate::cli::client::batch_bytes;
use crate::cli::progress::Progress;
use crate::{Error, Result};

/// Rows of a generated batch.
const ROWS_PER_BATCH: usize = 64 * 1024;

/// 1995-03-15, the date of TPC-H query 3, in days since 1970.
const Q3_DATE: i32 = 9204;

/// Generated tables of the benchmark.
pub const TPCH: [&str; 5] = ["customer", "orders", "lineitem", "supplier", "partsupp"];

/// Returns the number of rows to generate. Customers, orders, suppliers and parts of suppliers have
/// the row counts of the benchmark. Each order has four lines on average.
pub fn rows_to_generate(scale: f64) -> u64 {
    ((150_000.0 + 1_500_000.0 + 6_000_000.0 + 10_000.0 + 800_000.0) * scale) as u64
}

/// Table in the client's memory.
#[derive(Clone, Debug)]
pub struct Local {
    pub name: &'static str,
    pub schema: SchemaRef,
    pub batches: Vec<RecordBatch>,
}

impl Local {
    /// Creates a table from `batches`, which must contain at least one batch.
    pub fn of(name: &'static str, batches: Vec<RecordBatch>) -> Result<Self> {
        let first = batches.first().ok_or_else(|| Error::Invalid(format!("{name} has no rows at this scale")))?;
        Ok(Self { name, schema: first.schema(), batches })
    }

    /// Number of rows.
    pub fn rows(&self) -> u64 {
        self.batches.iter().map(|batch| batch.num_rows() as u64).sum()
    }

    /// Returns a column, batch by batch.
    pub fn column(&self, name: &str) -> impl Iterator<Item = &ArrayRef> + use<'_> {
        let at = self.schema.index_of(name).unwrap_or_else(|_| panic!("table {} has no column {name:?}", self.name));
        self.batches.iter().map(move |batch| batch.column(at))
    }

    /// Returns the rows that `keep` selects by the column `by`.
    fn filtered(&self, name: &'static str, by: &str, keep: impl Fn(&ArrayRef) -> BooleanArray) -> Result<Self> {
        let filter = |(batch, column)| Ok(filter_record_batch(batch, &keep(column))?);
        Self::of(name, self.batches.iter().zip(self.column(by)).map(filter).collect::<Result<_>>()?)
    }
}

/// Table that the demo's first join of query 3 keeps on the server.
const MADE_BY_JOIN: &str = "q3_customer_orders";

/// All tables of the demo.
#[derive(Debug)]
pub struct Tables {
    tables: Vec<Local>,
}

impl Tables {
    /// Generates the tables. The steps of `progress` are generated rows, [`rows_to_generate`] in
    /// total.
    ///
    /// # Errors
    /// [`Error::Internal`] if the generator and Arrow disagree.
    pub fn generate(scale: f64, progress: &Progress) -> Result<Self> {
        // Two parts per thread, so that no thread waits long for the last part.
        let parts = i32::try_from(rayon::current_num_threads() * 2).unwrap_or(8);
        macro_rules! generate {
            ($name:literal, $generator:ident, $arrow:ident) => {
                parts_of($name, parts, progress, |part| {
                    $arrow::new($generator::new(scale, part, parts)).with_batch_size(ROWS_PER_BATCH)
                })?
            };
        }
        let customer = generate!("customer", CustomerGenerator, CustomerArrow);
        let orders = generate!("orders", OrderGenerator, OrderArrow);
        let lineitem = generate!("lineitem", LineItemGenerator, LineItemArrow);
        let supplier = generate!("supplier", SupplierGenerator, SupplierArrow);
        let partsupp = generate!("partsupp", PartSuppGenerator, PartSuppArrow);
        let clerks = clerks(&orders)?;
        let is_building = |segment: Option<&str>| Some(segment == Some("BUILDING"));
        let q3_customer = customer.filtered("q3_customer", "c_mktsegment", |segments| {
            segments.as_string::<i32>().iter().map(is_building).collect()
        })?;
        let days = |days: &ArrayRef, keep: fn(i32) -> bool| {
            days.as_primitive::<Date32Type>().iter().map(|day| day.map(keep)).collect()
        };
        let q3_orders = orders.filtered("q3_orders", "o_orderdate", |dates| days(dates, |day| day < Q3_DATE))?;
        let q3_lineitem = lineitem.filtered("q3_lineitem", "l_shipdate", |dates| days(dates, |day| day > Q3_DATE))?;
        let customers: HashSet<i64> = q3_customer.column("c_custkey").flat_map(integers).collect();
        let made_by_join = q3_orders.filtered(MADE_BY_JOIN, "o_custkey", |keys| {
            integers(keys).map(|key| Some(customers.contains(&key))).collect()
        })?;
        let tables = vec![customer, orders, lineitem, supplier, partsupp, clerks, q3_customer, q3_orders, q3_lineitem];
        Ok(Self::of(tables.into_iter().chain([made_by_join]).collect()))
    }

    /// Wraps the given tables.
    pub fn of(tables: Vec<Local>) -> Self {
        Self { tables }
    }

    /// Returns the tables to upload, in order.
    pub fn uploads(&self) -> impl Iterator<Item = &Local> {
        self.tables.iter().filter(|table| table.name != MADE_BY_JOIN)
    }

    /// Returns the table with this name, which must be one of the demo's.
    pub fn get(&self, name: &str) -> &Local {
        self.tables.iter().find(|table| table.name == name).unwrap_or_else(|| panic!("the demo has no table {name:?}"))
    }
}

fn integers(keys: &ArrayRef) -> impl Iterator<Item = i64> {
    keys.as_primitive::<Int64Type>().values().iter().copied()
}

/// Generates the parts of a table on all threads, and concatenates them in order.
fn parts_of<I>(name: &'static str, parts: i32, progress: &Progress, part: impl Fn(i32) -> I + Sync) -> Result<Local>
where
    I: Iterator<Item = Result<RecordBatch, ArrowError>>,
{
    let plain = |batch: Result<RecordBatch, ArrowError>| {
        let batch = plain_strings(batch?)?;
        progress.advance(batch.num_rows() as u64);
        progress.moved(batch_bytes(&batch));
        Ok(batch)
    };
    let generate = |at: i32| part(at).map(plain).collect::<Result<Vec<_>>>();
    let batches: Vec<RecordBatch> =
        (1..=parts).into_par_iter().map(generate).collect::<Result<Vec<_>>>()?.into_iter().flatten().collect();
    Local::of(name, batches)
}

/// Casts the generator's string views to plain strings, which most clients send.
fn plain_strings(batch: RecordBatch) -> Result<RecordBatch> {
    let plain = |field: &FieldRef| match field.data_type() {
        DataType::Utf8View => Field::clone(field).with_data_type(DataType::Utf8),
        _ => Field::clone(field),
    };
    let plain: Fields = batch.schema_ref().fields().iter().map(plain).collect();
    let columns = cast(&StructArray::from(batch), &DataType::Struct(plain))?;
    Ok(columns.as_struct().into())
}

/// Makes a table with a string key: the clerks that occur in orders, each with a desk.
fn clerks(orders: &Local) -> Result<Local> {
    let mut names = BTreeSet::new();
    for column in orders.column("o_clerk") {
        names.extend(column.as_string::<i32>().iter().flatten().map(str::to_owned));
    }
    let desk = |at: usize| format!("{}-{:03}", ["North", "East", "South", "West"][at % 4], at / 4);
    let desks: StringArray = (0..names.len()).map(|at| Some(desk(at))).collect();
    let names = StringArray::from_iter_values(&names);
    let batch = RecordBatch::try_from_iter([("clerk", Arc::new(names) as ArrayRef), ("desk", Arc::new(desks) as _)])?;
    Local::of("clerks", vec![batch])
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks that the progress bar ends at the announced total, within 1 %.
    #[test]
    fn the_announced_number_of_rows_is_generated() {
        let scale = 0.01;
        let progress = Progress::of("generating", Some(rows_to_generate(scale)));
        let tables = Tables::generate(scale, &progress).unwrap();
        let generated = TPCH.map(|name| tables.get(name).rows());
        let generated = generated.iter().sum::<u64>() as f64;
        let announced = rows_to_generate(scale) as f64;
        assert!((0.99..1.01).contains(&(generated / announced)), "{generated} of {announced}");
        assert!(progress.done().unwrap() > 0.99, "{progress:?}");
        assert!(progress.moved_bytes() > generated as u64, "a row has more than a byte");
    }
}
