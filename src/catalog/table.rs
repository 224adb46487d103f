//! Immutable tables.

use std::collections::HashMap;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime};

use arrow::array::{ArrayRef, RecordBatch};
use arrow::datatypes::{DataType, SchemaRef};
use arrow::util::display::array_value_to_string;
use parking_lot::Mutex;

use super::adopt::Meter;
use super::quota::{Charge, ChargeHold};
use super::statistics::finished;
use super::{ColumnStatistics, Combination, Sketch, StatisticsCollector};
use crate::human::{asked, did_you_mean};
use crate::memory::Interrupt;
use crate::{Error, Result, listed};

/// Facts about a column that are computed on first request.
#[derive(Debug, Default)]
pub(super) struct LazyFacts {
    /// Sketch of the column's values; `None` if the table has no rows to sketch, or the type has no
    /// order.
    sketch: OnceLock<Option<Sketch>>,
    /// The column's type in a result of this table alone.
    gathered_type: OnceLock<DataType>,
    /// Locked during a pass over the column. Other threads that need the same pass wait for it.
    passing: Mutex<()>,
}

impl LazyFacts {
    /// Returns the value of `cell`, or fills it by a pass over the column.
    ///
    /// # Errors
    /// The interrupt's, and those of the pass.
    fn once<'a, T>(
        &self,
        cell: &'a OnceLock<T>,
        interrupt: &Interrupt,
        pass: impl FnOnce() -> Result<T>,
    ) -> Result<&'a T> {
        const MOMENT: Duration = Duration::from_millis(5);
        let _passing = loop {
            if let Some(known) = cell.get() {
                return Ok(known);
            }
            if let Some(passing) = self.passing.try_lock_for(MOMENT) {
                break passing;
            }
            interrupt.check()?;
        };
        match cell.get() {
            Some(known) => Ok(known),
            None => pass().map(|found| cell.get_or_init(|| found)),
        }
    }
}

/// Columns in the requested order, each with a flag: true if its nulls are values.
type CombinedColumns = Vec<(usize, bool)>;

/// Maximum number of column sets whose combinations a table caches. Each set takes about 100 KB,
/// and every append passes over its rows for each set. Other sets are computed anew for each plan.
const COMBINATIONS_MAX: usize = 16;

/// Combinations of several columns, computed on first request.
#[derive(Debug, Default)]
pub(super) struct Combinations(Mutex<HashMap<CombinedColumns, Arc<Combination>>>);

/// An immutable table whose buffers live in the arena.
#[derive(Debug)]
pub struct Table {
    pub name: String,
    /// The tenant that created the table; empty for anonymous.
    pub owner: String,
    pub schema: SchemaRef,
    /// In the order of their upload. Every batch has this schema.
    pub batches: Vec<RecordBatch>,
    pub rows: u64,
    /// Bytes of the parts of all buffers that the rows refer to. A dictionary that several batches
    /// share counts once.
    pub bytes: u64,
    /// In the order of the schema.
    pub statistics: Vec<ColumnStatistics>,
    /// Columns by which the rows are sorted, ascending; empty if no order is known.
    pub sorted_by: Vec<usize>,
    /// Sets of columns whose values the uploader declared distinct. Only planning uses them.
    pub unique: Vec<Vec<usize>>,
    pub created: SystemTime,
    /// Time at which the catalog drops it; `None` for a table that stays.
    pub expires: Option<SystemTime>,
    /// True if it stands for rows that arrive while they are joined. Its number of rows is an
    /// assumption.
    pub arrives: bool,
    pub(super) collectors: Vec<StatisticsCollector>,
    /// One entry per column, computed on request.
    pub(super) lazy: Vec<LazyFacts>,
    pub(super) combinations: Combinations,
    /// Charges for the rows. Tables that share batches share them.
    pub(super) charges: Vec<Arc<Charge>>,
}

impl Table {
    /// Records that a tenant holds the table's rows, until the returned holds are dropped.
    pub fn hold(&self, tenant: &str) -> Vec<ChargeHold> {
        self.charges.iter().map(|charge| ChargeHold::new(charge.clone(), tenant)).collect()
    }

    /// Makes a table of those batches, with statistics. No tenant is charged.
    ///
    /// # Errors
    /// [`Error::Invalid`] when a batch has another schema.
    pub fn from_batches(name: &str, schema: SchemaRef, batches: Vec<RecordBatch>) -> Result<Self> {
        check_schemas(name, &schema, &batches)?;
        let mut collectors: Vec<_> =
            schema.fields().iter().map(|field| StatisticsCollector::new(field.data_type())).collect();
        let mut meter = Meter::default();
        let mut bytes = 0;
        for batch in &batches {
            for (collector, column) in collectors.iter_mut().zip(batch.columns()) {
                collector.update(column);
            }
            bytes += meter.referenced_bytes(batch);
        }
        let statistics = collectors.iter().map(StatisticsCollector::finish).collect();
        Ok(Self::of(name, schema, batches, bytes, collectors, statistics))
    }

    /// Makes a table of those batches, with the statistics that `collectors` took of them. `bytes`
    /// is [`Table::bytes`].
    ///
    /// # Errors
    /// [`Error::Invalid`] when a batch has another schema; the interrupt's.
    pub(super) fn collected(
        name: &str,
        schema: SchemaRef,
        batches: Vec<RecordBatch>,
        bytes: u64,
        collectors: Vec<StatisticsCollector>,
        interrupt: &Interrupt,
    ) -> Result<Self> {
        check_schemas(name, &schema, &batches)?;
        let statistics = finished(&collectors, interrupt)?;
        Ok(Self::of(name, schema, batches, bytes, collectors, statistics))
    }

    fn of(
        name: &str,
        schema: SchemaRef,
        batches: Vec<RecordBatch>,
        bytes: u64,
        collectors: Vec<StatisticsCollector>,
        statistics: Vec<ColumnStatistics>,
    ) -> Self {
        let rows = batches.iter().map(|batch| batch.num_rows() as u64).sum();
        Self {
            name: name.into(),
            owner: String::new(),
            schema,
            batches,
            rows,
            bytes,
            sorted_by: detected_order(&statistics, rows),
            statistics,
            unique: Vec::new(),
            created: SystemTime::now(),
            expires: None,
            arrives: false,
            lazy: no_lazy_facts(collectors.len()),
            combinations: Combinations::default(),
            collectors,
            charges: Vec::new(),
        }
    }

    /// Makes a table that stands for rows that arrive later, for a planner: `rows` of them, of
    /// `row_bytes` each. Nothing is known about their values.
    pub fn to_arrive(name: &str, schema: SchemaRef, rows: u64, row_bytes: u64) -> Self {
        let collectors: Vec<_> =
            schema.fields().iter().map(|field| StatisticsCollector::new(field.data_type())).collect();
        let statistics = vec![ColumnStatistics::default(); collectors.len()];
        let table = Self::of(name, schema, Vec::new(), rows.saturating_mul(row_bytes), collectors, statistics);
        Self { rows, arrives: true, ..table }
    }

    /// Makes a table without statistics, for a component that joins the table but does not plan.
    pub(crate) fn unknown(name: String, schema: SchemaRef, batches: Vec<RecordBatch>) -> Self {
        Self {
            name,
            owner: String::new(),
            schema,
            rows: batches.iter().map(|batch| batch.num_rows() as u64).sum(),
            batches,
            bytes: 0,
            statistics: Vec::new(),
            sorted_by: Vec::new(),
            unique: Vec::new(),
            created: SystemTime::now(),
            expires: None,
            arrives: false,
            lazy: Vec::new(),
            combinations: Combinations::default(),
            collectors: Vec::new(),
            charges: Vec::new(),
        }
    }

    /// Returns a sketch of a column's different values. `None` for a type without order, and for a
    /// table that has statistics only. The first call passes over the column on all processors.
    /// Each processor takes about a nanosecond per row of numbers.
    ///
    /// # Errors
    /// The interrupt's.
    pub fn sketch(&self, column: usize, interrupt: &Interrupt) -> Result<Option<&Sketch>> {
        let lazy = &self.lazy[column];
        let sketch = || {
            let sketch = self.collectors[column].sketch_interruptible(self.arrays(column), interrupt)?;
            Ok(sketch.filter(|_| self.is_here()))
        };
        Ok(lazy.once(&lazy.sketch, interrupt, sketch)?.as_ref())
    }

    /// Returns the combinations of values in those columns. Each column has a flag: true if its
    /// nulls are values. A row with any other null has no combination. `None` if a column's type
    /// has no order, and for a table that has statistics only. The first call passes over the
    /// columns on all processors.
    ///
    /// # Errors
    /// The interrupt's.
    pub fn combination(&self, columns: &[(usize, bool)], interrupt: &Interrupt) -> Result<Option<Arc<Combination>>> {
        if !self.is_here() || !columns.iter().all(|&(column, _)| self.collectors[column].is_sampled()) {
            return Ok(None);
        }
        let known = self.combinations.0.lock().get(columns).cloned();
        // No lock is held during the pass. While a thread waits for the other threads of the pass,
        // the thread pool may run another plan on it, which needs the lock.
        let found = match known {
            Some(known) => known,
            None => Arc::new(Combination::of_interruptible(&self.batches, columns, interrupt)?),
        };
        let mut kept = self.combinations.0.lock();
        if kept.len() < COMBINATIONS_MAX {
            return Ok(Some(kept.entry(columns.to_vec()).or_insert(found).clone()));
        }
        Ok(Some(found))
    }

    /// True if the rows are available; false if only statistics are.
    fn is_here(&self) -> bool {
        self.rows == 0 || !self.batches.is_empty()
    }

    /// Returns the cached combinations, updated for a table with the rows of `more` appended.
    pub(super) fn combinations_with(&self, more: &[RecordBatch]) -> Combinations {
        let known = self.combinations.0.lock().clone();
        let with = |(columns, combination): (Vec<(usize, bool)>, Arc<Combination>)| {
            let of_more = Combination::of(more, &columns);
            (columns, Arc::new(combination.as_ref().clone().merge(&of_more)))
        };
        Combinations(Mutex::new(known.into_iter().map(with).collect()))
    }

    /// Returns the columns' computed facts for a table with the rows of `more` appended. A sketch
    /// that was requested once will be requested again, so it is merged with a sketch of the new
    /// rows only.
    pub(super) fn lazy_facts_with(&self, collectors: &[StatisticsCollector], more: &[RecordBatch]) -> Vec<LazyFacts> {
        let with = |(column, (lazy, collector)): (usize, (&LazyFacts, &StatisticsCollector))| {
            let of_more = || collector.sketch(more.iter().map(|batch| batch.column(column)));
            let sketch = match lazy.sketch.get() {
                Some(Some(sketch)) => of_more().map(|of_more| OnceLock::from(Some(sketch.clone().merge(of_more)))),
                _ => None,
            };
            LazyFacts { sketch: sketch.unwrap_or_default(), ..LazyFacts::default() }
        };
        self.lazy.iter().zip(collectors).enumerate().map(with).collect()
    }

    fn arrays(&self, column: usize) -> impl Iterator<Item = &ArrayRef> {
        self.batches.iter().map(move |batch| batch.column(column))
    }

    /// Returns the column's type in a result of this table alone. `find` runs once, because the
    /// batches do not change. Comparing the dictionaries of thousands of batches in each join takes
    /// longer than the rest of binding.
    pub fn gathered_type(&self, column: usize, find: impl FnOnce() -> DataType) -> &DataType {
        self.lazy[column].gathered_type.get_or_init(find)
    }

    /// Returns the value of one row of a column as text; `None` beyond the last row.
    pub fn value_text(&self, column: usize, row: u64) -> Option<String> {
        let mut row = usize::try_from(row).ok()?;
        for batch in &self.batches {
            if row < batch.num_rows() {
                return array_value_to_string(batch.column(column), row).ok();
            }
            row -= batch.num_rows();
        }
        None
    }

    /// Returns the index of a column.
    ///
    /// # Errors
    /// [`Error::Invalid`] with the columns that exist.
    pub fn column_index(&self, column: &str) -> Result<usize> {
        let of = format!("table {:?}", self.name);
        column_index(&self.schema, column, &of)
    }
}

/// Fails if a batch has other columns than the table.
fn check_schemas(name: &str, schema: &SchemaRef, batches: &[RecordBatch]) -> Result<()> {
    let differs = |batch: &&RecordBatch| {
        !Arc::ptr_eq(batch.schema_ref(), schema) && batch.schema_ref().fields() != schema.fields()
    };
    let Some(batch) = batches.iter().find(differs) else { return Ok(()) };
    Err(Error::Invalid(format!(
        "table {name:?} has columns {:?}, and one of its batches has {:?}",
        schema.fields(),
        batch.schema_ref().fields()
    )))
}

/// Returns one empty entry per column.
pub(super) fn no_lazy_facts(columns: usize) -> Vec<LazyFacts> {
    (0..columns).map(|_| LazyFacts::default()).collect()
}

/// Returns the index of a column. The error message calls the schema's owner `of`.
pub(super) fn column_index(schema: &SchemaRef, column: &str, of: &str) -> Result<usize> {
    schema.index_of(column).map_err(|_| {
        let names = schema.fields().iter().map(|field| field.name());
        let meant = did_you_mean(column, names.clone().map(String::as_str));
        Error::Invalid(format!("{of} has no column {}; its columns are {}{meant}", asked(column), listed(names)))
    })
}

/// Returns the column by which the rows are sorted, if statistics found one. A strictly ascending
/// column is preferred, since it orders the rows completely. A column with one value is ignored.
pub(super) fn detected_order(statistics: &[ColumnStatistics], rows: u64) -> Vec<usize> {
    if rows < 2 {
        return Vec::new();
    }
    let strict = statistics.iter().position(|column| column.unique_ascending);
    let ascending = || statistics.iter().position(|column| column.ascending && column.distinct > Some(1.0));
    strict.or_else(ascending).into_iter().collect()
}
