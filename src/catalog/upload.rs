//! Tables that are being uploaded, invisible until they are committed.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use arrow::array::{Array, RecordBatch};
use arrow::datatypes::{Field, FieldRef, Schema, SchemaRef};
use serde::Deserialize;

use super::adopt::{Adopter, Meter};
use super::names::exists;
use super::order::{check_order, is_seam_in_order};
use super::quota::{Charge, batch_heap_bytes};
use super::statistics::finished;
use super::table::{Combinations, column_index, detected_order, no_lazy_facts};
use super::{Catalog, ColumnStatistics, Editor, NameReservation, StatisticsCollector, Table};
use crate::human::type_name;
use crate::memory::{Budget, Interrupt};
use crate::{Context, Error, Result};

/// Options of an upload, given as JSON in the first DoPut message.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(default, deny_unknown_fields)]
pub struct UploadOptions {
    pub mode: UploadMode,
    /// Columns by which the rows of this upload are sorted, ascending, nulls first. The commit
    /// checks the order.
    pub sorted_by: Vec<String>,
    /// Sets of columns whose values are distinct. Trusted for planning, never for correctness.
    pub unique: Vec<Vec<String>>,
    /// ID of an upload that several streams fill. Its table appears with the action
    /// `commit_upload`.
    pub upload: Option<String>,
    /// Position of this stream's rows among the streams of the same upload, lowest first. Streams
    /// without a number come after the numbered ones, in the order in which they were opened.
    pub part: Option<u64>,
    /// Seconds after which the catalog drops the table, counted from its appearance. Jobs and
    /// readers keep it until they are done. Not for rows that are added to a table.
    pub temporary_seconds: Option<u32>,
}

/// Longest life of a temporary table, in seconds.
pub const TEMPORARY_SECONDS_MAX: u32 = 86_400;

/// Handling of an existing table of the upload's name.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub enum UploadMode {
    /// The table must not exist. The name is reserved from the start of the upload.
    #[default]
    Create,
    /// Replaces the table that has the name at commit, or creates it.
    Replace,
    /// Adds to the table, which must exist.
    Append,
    /// Adds to the table, or creates it.
    CreateIfMissing,
}

/// A table that is being uploaded in one stream. Dropping the upload discards its rows. See
/// [`Uploads`](super::Uploads) for uploads that are counted, and for uploads in several streams.
#[derive(Debug)]
pub struct Upload {
    target: Target,
    rows: Rows,
}

impl Upload {
    /// Starts an upload of an anonymous tenant. Checks everything that can be checked before rows
    /// arrive.
    ///
    /// # Errors
    /// [`Error::AlreadyExists`], [`Error::NotFound`], [`Error::Denied`] (another tenant's table),
    /// [`Error::Invalid`] (name, schema, options), [`Error::Exhausted`] (the tenant's tables).
    pub fn begin(catalog: &Catalog, name: &str, schema: SchemaRef, options: UploadOptions) -> Result<Self> {
        Self::begin_for(catalog, "", name, schema, options)
    }

    /// Same as [`Upload::begin`], for that tenant or admin.
    ///
    /// # Errors
    /// See [`Upload::begin`].
    pub fn begin_for(
        catalog: &Catalog,
        editor: impl Into<Editor>,
        name: &str,
        schema: SchemaRef,
        options: UploadOptions,
    ) -> Result<Self> {
        let target = Target::new(catalog, editor.into(), name, schema, &options)?;
        let rows = Rows::new(&target);
        Ok(Self { target, rows })
    }

    /// Adds rows. Buffers outside the arena are copied into it.
    ///
    /// # Errors
    /// [`Error::Invalid`] when the batch has another schema, [`Error::Exhausted`] when the arena or
    /// the tenant's quota has no room for it. The upload is unusable after an error.
    pub fn append(&mut self, batch: RecordBatch) -> Result<()> {
        self.rows.append(batch, &Interrupt::default())
    }

    /// Rows so far.
    pub fn rows(&self) -> u64 {
        self.rows.rows
    }

    /// Makes the table appear, in whole.
    ///
    /// # Errors
    /// See [`Upload::begin`], when the catalog changed meanwhile; [`Error::Invalid`] when the rows
    /// are not in the order that `sorted_by` declares.
    pub fn commit(mut self) -> Result<Arc<Table>> {
        self.target.commit(&self.rows.done(), &Interrupt::default())
    }
}

/// Destination of an upload's rows.
#[derive(Debug)]
pub(super) struct Target {
    pub(super) catalog: Catalog,
    pub(super) editor: Editor,
    pub(super) name: String,
    pub(super) schema: SchemaRef,
    pub(super) mode: UploadMode,
    pub(super) sorted_by: Vec<usize>,
    pub(super) unique: Vec<Vec<usize>>,
    /// Life of the table; `None`: until it is dropped.
    life: Option<Duration>,
    /// The reserved name, in [`UploadMode::Create`].
    reservation: Option<NameReservation>,
    /// Charge for the schema, shared with the table that keeps the schema.
    schema_charge: Arc<Charge>,
}

impl Target {
    pub(super) fn new(
        catalog: &Catalog,
        editor: Editor,
        name: &str,
        schema: SchemaRef,
        options: &UploadOptions,
    ) -> Result<Self> {
        catalog.check_unreserved(name, &editor)?;
        let of = format!("the schema of {name:?}");
        check_columns(&schema, &of)?;
        let fields = schema.fields().iter().enumerate();
        let by_name: HashMap<&str, usize> = fields.map(|(index, field)| (field.name().as_str(), index)).collect();
        let index = |column: &String| match by_name.get(column.as_str()) {
            Some(&index) => Ok(index),
            None => column_index(&schema, column, &of),
        };
        let indexes = |columns: &Vec<String>| -> Result<Vec<usize>> {
            let mut named = HashSet::new();
            if let Some(column) = columns.iter().find(|column| !named.insert(*column)) {
                return Err(Error::Invalid(format!("column {column:?} is named twice; name each column once")));
            }
            columns.iter().map(index).collect()
        };
        let sorted_by = indexes(&options.sorted_by).context(|| "sorted_by")?;
        let unique: Vec<_> = options.unique.iter().map(indexes).collect::<Result<_>>().context(|| "unique")?;
        if unique.iter().any(Vec::is_empty) {
            return Err(Error::Invalid("unique: a set of columns is empty; write [[\"k\"], [\"a\", \"b\"]]".into()));
        }
        let life = life_of(options)?;
        // The commit repeats these checks. Checking now saves a client from sending rows in vain.
        let existing = catalog.table(name);
        if let (Ok(table), false) = (&existing, options.mode == UploadMode::Create) {
            editor.check(table, "changed")?;
        }
        match (options.mode, existing) {
            (UploadMode::Create | UploadMode::Replace, _) | (UploadMode::CreateIfMissing, Err(_)) => (),
            (UploadMode::Append | UploadMode::CreateIfMissing, existing) => check_appendable(&*existing?, &schema)?,
        }
        let schema_charge = Arc::new(catalog.charge_schema(&editor.tenant, &schema)?);
        let reservation = match options.mode {
            UploadMode::Create => Some(catalog.reserve(name, &editor.tenant, "being uploaded")?),
            _ => None,
        };
        let (catalog, name, mode) = (catalog.clone(), name.into(), options.mode);
        Ok(Self { catalog, editor, name, schema, mode, sorted_by, unique, life, reservation, schema_charge })
    }

    /// Makes the rows appear, unless interrupted before. After a failure the caller can try again.
    pub(super) fn commit(&mut self, rows: &DoneRows, interrupt: &Interrupt) -> Result<Arc<Table>> {
        self.check_declared_order(rows, interrupt)?;
        match self.mode {
            UploadMode::Create => {
                let table = self.table(rows, interrupt)?;
                match &mut self.reservation {
                    Some(reservation) => reservation.publish(table),
                    None => Err(exists(&self.name)),
                }
            }
            UploadMode::Replace => self.catalog.replace(self.table(rows, interrupt)?, &self.editor),
            UploadMode::Append | UploadMode::CreateIfMissing => self.append(rows, interrupt),
        }
    }

    /// Appends by compare and swap: the rows come after those of every append that committed
    /// earlier.
    fn append(&self, rows: &DoneRows, interrupt: &Interrupt) -> Result<Arc<Table>> {
        loop {
            let existing = self.catalog.table(&self.name).ok();
            let table = match &existing {
                Some(existing) => self.appended(existing, rows, interrupt)?,
                None if self.mode == UploadMode::Append => return Err(self.catalog.no_table(&self.name)),
                None => self.table(rows, interrupt)?,
            };
            if let Some(table) = self.catalog.swap(existing.as_ref(), table, &self.editor)? {
                return Ok(table);
            }
        }
    }

    fn check_declared_order(&self, rows: &DoneRows, interrupt: &Interrupt) -> Result<()> {
        let known = match self.sorted_by[..] {
            [] => true,
            [only] => rows.collectors[only].finish().ascending,
            [first, ..] => rows.collectors[first].finish().unique_ascending,
        };
        if known { Ok(()) } else { check_order(&self.schema, &rows.batches, &self.sorted_by, interrupt) }
    }

    /// Makes a table of these rows alone.
    fn table(&self, rows: &DoneRows, interrupt: &Interrupt) -> Result<Table> {
        let statistics = finished(&rows.collectors, interrupt)?;
        let sorted_by = match self.sorted_by.is_empty() {
            true => detected_order(&statistics, rows.rows),
            false => self.sorted_by.clone(),
        };
        Ok(Table {
            name: self.name.clone(),
            owner: self.editor.tenant.clone(),
            schema: self.schema.clone(),
            batches: rows.batches.clone(),
            rows: rows.rows,
            bytes: rows.bytes,
            statistics,
            sorted_by,
            unique: self.unique.clone(),
            created: SystemTime::now(),
            expires: self.life.map(|life| SystemTime::now() + life),
            arrives: false,
            collectors: rows.collectors.clone(),
            lazy: no_lazy_facts(rows.collectors.len()),
            combinations: Combinations::default(),
            charges: [&self.schema_charge].into_iter().chain(&rows.charges).cloned().collect(),
        })
    }

    /// Makes a table of the rows of `existing`, followed by these rows.
    fn appended(&self, existing: &Table, rows: &DoneRows, interrupt: &Interrupt) -> Result<Table> {
        check_appendable(existing, &self.schema)?;
        check_nulls(existing, &self.schema, rows)?;
        let schema = existing.schema.clone();
        // Metadata and nullability may differ between the two schemas.
        let relabel = |batch: &RecordBatch| RecordBatch::try_new(schema.clone(), batch.columns().to_vec());
        let mut collectors = existing.collectors.clone();
        collectors.iter_mut().zip(&rows.collectors).for_each(|(before, after)| before.merge(after));
        let statistics = finished(&collectors, interrupt)?;
        let mut batches = existing.batches.clone();
        batches.extend(rows.batches.iter().map(relabel).collect::<Result<Vec<_>, _>>()?);
        let sorted_by = match (existing.rows, rows.rows) {
            (0, _) => self.table(rows, interrupt)?.sorted_by,
            (_, 0) => existing.sorted_by.clone(),
            _ if self.stays_sorted(existing, rows, &statistics)? => existing.sorted_by.clone(),
            _ => detected_order(&statistics, existing.rows + rows.rows),
        };
        let both = |set: &&Vec<usize>| existing.rows == 0 || existing.unique.contains(set);
        let unique = match rows.rows {
            0 => existing.unique.clone(),
            _ => self.unique.iter().filter(both).cloned().collect(),
        };
        Ok(Table {
            name: self.name.clone(),
            owner: existing.owner.clone(),
            rows: existing.rows + rows.rows,
            bytes: existing.bytes + rows.bytes,
            created: SystemTime::now(),
            expires: existing.expires,
            arrives: false,
            charges: existing.charges.iter().chain(&rows.charges).cloned().collect(),
            schema,
            batches,
            statistics,
            sorted_by,
            unique,
            lazy: existing.lazy_facts_with(&collectors, &rows.batches),
            combinations: existing.combinations_with(&rows.batches),
            collectors,
        })
    }

    /// True if `rows` continue the order of `existing`: they are sorted by its columns, and so is
    /// the seam.
    fn stays_sorted(&self, existing: &Table, rows: &DoneRows, statistics: &[ColumnStatistics]) -> Result<bool> {
        match (&existing.sorted_by[..], existing.batches.last(), rows.batches.first()) {
            ([only], ..) => Ok(statistics[*only].ascending),
            (columns @ [_, ..], Some(before), Some(after)) if self.sorted_by.starts_with(columns) => {
                is_seam_in_order(before, after, columns)
            }
            _ => Ok(false),
        }
    }
}

/// Returns the life of the table of an upload; `None`: until it is dropped.
///
/// # Errors
/// [`Error::Invalid`] for a life that is too short or too long, or of rows that are added.
fn life_of(options: &UploadOptions) -> Result<Option<Duration>> {
    let Some(seconds) = options.temporary_seconds else { return Ok(None) };
    if !matches!(options.mode, UploadMode::Create | UploadMode::Replace) {
        return Err(Error::Invalid(
            "temporary_seconds: only an upload that creates or replaces a table sets its life; leave it out".into(),
        ));
    }
    temporary_life(seconds).map(Some)
}

/// Returns the life of a temporary table, counted from its appearance.
///
/// # Errors
/// [`Error::Invalid`] for a life that is too short or too long.
pub fn temporary_life(seconds: u32) -> Result<Duration> {
    if !(1..=TEMPORARY_SECONDS_MAX).contains(&seconds) {
        return Err(Error::Invalid(format!(
            "temporary_seconds is {seconds}; write a number from 1 to {TEMPORARY_SECONDS_MAX}"
        )));
    }
    Ok(Duration::from_secs(seconds.into()))
}

/// Rows received so far, with their statistics.
#[derive(Debug)]
pub(super) struct Rows {
    schema: SchemaRef,
    adopter: Adopter,
    meter: Meter,
    batches: Vec<RecordBatch>,
    collectors: Vec<StatisticsCollector>,
    pub(super) rows: u64,
    pub(super) bytes: u64,
    charge: Charge,
    heap: Heap,
}

/// Memory outside the arena that rows take: structures of their arrays, and statistics.
#[derive(Debug)]
struct Heap {
    host_memory: Budget,
    /// Arrays of a batch, including those inside of others.
    arrays: u64,
    columns: u64,
    batches: u64,
    charged_bytes: u64,
}

impl Heap {
    fn new(target: &Target) -> Self {
        let arrays = target.schema.flattened_fields().len() as u64;
        let host_memory = target.catalog.arena().budget().clone();
        Self { host_memory, arrays, columns: target.schema.fields().len() as u64, batches: 0, charged_bytes: 0 }
    }

    /// Charges the memory of another batch, after which there are `rows` rows.
    fn charge_batch(&mut self, rows: u64, charge: &mut Charge) -> Result<()> {
        /// Memory of the statistics of a column without its sample, about.
        const COLUMN_BYTES: u64 = 512;
        self.batches += 1;
        let of_column = COLUMN_BYTES + StatisticsCollector::sample_bytes(rows);
        let bytes = self.batches * batch_heap_bytes(self.arrays) + self.columns * of_column;
        charge.try_grow_heap(bytes - self.charged_bytes, &self.host_memory, "the structure of a table")?;
        self.charged_bytes = bytes;
        Ok(())
    }
}

impl Rows {
    pub(super) fn new(target: &Target) -> Self {
        let fields = target.schema.fields();
        let seed = target.catalog.sample_seed();
        Self {
            schema: target.schema.clone(),
            adopter: Adopter::new(target.catalog.arena().clone()),
            meter: Meter::default(),
            batches: Vec::new(),
            collectors: fields.iter().map(|field| StatisticsCollector::seeded(field.data_type(), seed)).collect(),
            rows: 0,
            bytes: 0,
            charge: target.catalog.charge(&target.editor.tenant),
            heap: Heap::new(target),
        }
    }

    pub(super) fn append(&mut self, batch: RecordBatch, interrupt: &Interrupt) -> Result<()> {
        if !Arc::ptr_eq(batch.schema_ref(), &self.schema) && batch.schema_ref() != &self.schema {
            return Err(Error::Invalid(format!(
                "the schema changed during the stream, after {} rows: {}; every batch must have the columns of the first \
                 message",
                self.rows,
                difference(&self.schema, batch.schema_ref()),
            )));
        }
        if batch.num_rows() == 0 {
            return Ok(());
        }
        let batch = match self.adopter.adopt(batch)? {
            batch if Arc::ptr_eq(batch.schema_ref(), &self.schema) => batch,
            // Each stream of an upload reads a schema of its own. Its metadata may be large, and
            // only that of the table is charged.
            batch => RecordBatch::try_new(self.schema.clone(), batch.columns().to_vec())?,
        };
        let bytes = self.meter.referenced_bytes(&batch);
        self.charge.try_grow(bytes)?;
        self.heap.charge_batch(self.rows + batch.num_rows() as u64, &mut self.charge)?;
        for (collector, column) in self.collectors.iter_mut().zip(batch.columns()) {
            collector.update_interruptible(column, interrupt)?;
        }
        self.rows += batch.num_rows() as u64;
        self.bytes += bytes;
        self.batches.push(batch);
        Ok(())
    }

    /// Ends the rows: none follow.
    pub(super) fn done(self) -> DoneRows {
        let Self { batches, collectors, rows, bytes, charge, .. } = self;
        DoneRows { batches, collectors, rows, bytes, charges: vec![Arc::new(charge)] }
    }
}

/// The rows of one or several streams that ended well.
#[derive(Debug)]
pub(super) struct DoneRows {
    pub(super) batches: Vec<RecordBatch>,
    pub(super) collectors: Vec<StatisticsCollector>,
    pub(super) rows: u64,
    pub(super) bytes: u64,
    pub(super) charges: Vec<Arc<Charge>>,
}

impl DoneRows {
    /// Appends the rows of `later`.
    pub(super) fn extend(&mut self, later: Self) {
        self.batches.extend(later.batches);
        self.collectors.iter_mut().zip(&later.collectors).for_each(|(before, after)| before.merge(after));
        self.rows += later.rows;
        self.bytes += later.bytes;
        self.charges.extend(later.charges);
    }
}

/// Fails if the schema has no columns, or two columns of one name.
fn check_columns(schema: &SchemaRef, of: &str) -> Result<()> {
    if schema.fields().is_empty() {
        return Err(Error::Invalid(format!("{of} has no columns; a table has at least one")));
    }
    let mut names = HashSet::new();
    match schema.fields().iter().find(|field| !names.insert(field.name())) {
        None => Ok(()),
        Some(field) => Err(Error::Invalid(format!(
            "{of} has two columns named {:?}; rename one, since joins find columns by name",
            field.name()
        ))),
    }
}

/// Fails unless names, order and types of the columns are equal. Metadata and nullability may
/// differ: the schema of a CSV file or a data frame allows nulls everywhere. So [`check_nulls`]
/// looks for actual nulls.
fn check_appendable(table: &Table, schema: &SchemaRef) -> Result<()> {
    let (fields, new) = (table.schema.fields(), schema.fields());
    let fits = fields.len() == new.len()
        && fields
            .iter()
            .zip(new)
            .all(|(field, new)| field.name() == new.name() && field.data_type() == new.data_type());
    if fits {
        return Ok(());
    }
    // For the message, the new fields get the table's nullability, because a difference in
    // nullability is no obstacle.
    let nullable_as = |(at, new): (usize, &FieldRef)| {
        let is_nullable = fields.get(at).map_or(new.is_nullable(), |field| field.is_nullable());
        new.as_ref().clone().with_nullable(is_nullable)
    };
    let new = Arc::new(Schema::new(new.iter().enumerate().map(nullable_as).collect::<Vec<_>>()));
    Err(Error::Invalid(format!(
        "the rows do not fit table {:?}: {}; upload the same columns, or use mode replace",
        table.name,
        difference(&table.schema, &new),
    )))
}

/// Refuses nulls in columns that the table declares not null.
fn check_nulls(table: &Table, schema: &SchemaRef, rows: &DoneRows) -> Result<()> {
    let columns = table.schema.fields().iter().enumerate();
    for (at, field) in columns.filter(|(at, field)| !field.is_nullable() && schema.field(*at).is_nullable()) {
        let mut row = 1;
        for batch in &rows.batches {
            let nulls = batch.column(at).logical_nulls();
            if let Some(null) = nulls.and_then(|nulls| nulls.iter().position(|is_valid| !is_valid)) {
                return Err(Error::Invalid(format!(
                    "the rows do not fit table {:?}: its column {:?} is declared not null, and row {} has a null in it; upload \
                     rows without nulls, or use mode replace",
                    table.name,
                    field.name(),
                    row + null
                )));
            }
            row += batch.num_rows();
        }
    }
    Ok(())
}

/// Describes the first difference between two schemas.
fn difference(before: &SchemaRef, after: &SchemaRef) -> String {
    let describe = |field: &Field, of_type: String| {
        let null = if field.is_nullable() { "" } else { " not null" };
        format!("{:?} of type {of_type}{null}", field.name())
    };
    let (fields, new) = (before.fields(), after.fields());
    for (index, (field, new)) in (1..).zip(fields.iter().zip(new)) {
        let named = [field, new].map(|field| describe(field, type_name(field.data_type())));
        // Arrow's own type names include details that `type_name` omits, such as the nullability of
        // list values.
        let [was, is] = match named[0] != named[1] {
            true => named,
            false => [field, new].map(|field| describe(field, field.data_type().to_string())),
        };
        if was != is {
            return format!("column {index} was {was} and is {is}");
        }
    }
    match fields.len() == new.len() {
        true => "the schemas' metadata differ".into(),
        false => format!("there were {} columns and there are {}", fields.len(), new.len()),
    }
}
