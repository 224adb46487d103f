//! Tables by name.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::SystemTime;

use arrow::array::RecordBatch;
use arrow::datatypes::Schema;
use parking_lot::RwLock;

use super::quota::{Charge, Ledger};
use super::{Adopter, Editor, EvictableResults, IntoMode, Table, TenantLimits, TenantUsage};
use crate::human;
use crate::memory::{Arena, schema_bytes};
use crate::{Error, Result};

/// Maximum length of a name, in bytes.
const NAME_BYTES_MAX: usize = 255;

/// All tables, by name. Clones share them.
#[derive(Clone, Debug)]
pub struct Catalog {
    arena: Arena,
    tables_max: Option<usize>,
    ledger: Ledger,
    results: Ledger,
    names: Arc<RwLock<Names>>,
    samples: Arc<AtomicU64>,
}

/// Tables and reservations by name. One lock guards both maps, because a name is free only if
/// neither map has it.
#[derive(Debug, Default)]
struct Names {
    tables: BTreeMap<String, Arc<Table>>,
    /// Reserved names. The purpose is reported to the next caller that asks for the name.
    reserved: HashMap<String, Reserved>,
}

#[derive(Debug)]
struct Reserved {
    owner: String,
    purpose: String,
}

impl Catalog {
    /// Makes an empty catalog whose tables live in `arena`.
    pub fn new(arena: Arena) -> Self {
        Self::with_limits(arena, TenantLimits::default())
    }

    /// Same as [`Catalog::new`], with a limit on each tenant's holdings.
    pub fn with_limits(arena: Arena, limits: TenantLimits) -> Self {
        let evictable = EvictableResults::default();
        arena.budget().reclaim_from(evictable.as_reclaim());
        Self {
            arena,
            tables_max: limits.tables,
            results: Ledger::of_results(limits, evictable.clone()),
            ledger: Ledger::new(limits, evictable),
            names: Arc::default(),
            samples: Arc::default(),
        }
    }

    /// Results whose memory is released when other work needs it.
    pub fn evictable_results(&self) -> &EvictableResults {
        self.ledger.evictable()
    }

    /// The arena of the tables' buffers.
    pub fn arena(&self) -> &Arena {
        &self.arena
    }

    /// Returns a new seed for a stream of rows. Each stream needs its own seed, because samples of
    /// several streams may be merged. The same streams in the same order get the same seeds, and so
    /// the same statistics.
    pub(super) fn sample_seed(&self) -> u64 {
        self.samples.fetch_add(1, Ordering::Relaxed)
    }

    /// Returns the table of that name.
    ///
    /// # Errors
    /// [`Error::NotFound`].
    pub fn table(&self, name: &str) -> Result<Arc<Table>> {
        let found = self.names.read().tables.get(name).cloned();
        found.ok_or_else(|| self.no_table(name))
    }

    /// Returns the error for a name that no table has.
    pub(super) fn no_table(&self, name: &str) -> Error {
        // The comparison runs without the lock, because it takes a while if there are many tables.
        let (known, is_being_made) = {
            let names = self.names.read();
            let known: Vec<String> = names.tables.keys().cloned().collect();
            (known, names.reserved.contains_key(name))
        };
        if is_being_made {
            return Error::NotFound(format!(
                "there is no table {} yet: it is being made; wait for the end of the upload or of the join that makes it",
                human::asked(name)
            ));
        }
        let meant = human::did_you_mean(name, known.iter().map(String::as_str));
        Error::NotFound(format!("there is no table {}{meant}", human::asked(name)))
    }

    /// Returns all tables, by name.
    pub fn tables(&self) -> Vec<Arc<Table>> {
        self.names.read().tables.values().cloned().collect()
    }

    /// Makes a table appear under a name that is free.
    ///
    /// # Errors
    /// [`Error::AlreadyExists`]; [`Error::Exhausted`] when the table's owner has as many tables as
    /// it may have; [`Error::Invalid`] for the name.
    pub fn create(&self, table: Table) -> Result<Arc<Table>> {
        self.reserve(&table.name, &table.owner, "being created")?.publish(table)
    }

    /// Makes a table appear. It replaces a table of the same name and keeps that table's owner.
    ///
    /// # Errors
    /// [`Error::Denied`] when the editor may not change the replaced table;
    /// [`Error::AlreadyExists`] when the name is reserved for a table that is being made;
    /// [`Error::Exhausted`] when the table's owner has as many tables as it may have;
    /// [`Error::Invalid`] for the name.
    pub fn replace(&self, table: Table, editor: &Editor) -> Result<Arc<Table>> {
        check_name(&table.name)?;
        let mut names = self.names.write();
        names.check_unreserved(&table.name, editor)?;
        let Inserted { table, _replaced } = self.insert(&mut names, table, editor)?;
        drop(names);
        Ok(table)
    }

    /// Replaces `expected` with `table`. Returns `None` if the name no longer stands for
    /// `expected`.
    ///
    /// # Errors
    /// See [`Catalog::replace`].
    pub(super) fn swap(
        &self,
        expected: Option<&Arc<Table>>,
        table: Table,
        editor: &Editor,
    ) -> Result<Option<Arc<Table>>> {
        check_name(&table.name)?;
        let mut names = self.names.write();
        names.check_unreserved(&table.name, editor)?;
        let unchanged = match (names.tables.get(&table.name), expected) {
            (Some(found), Some(expected)) => Arc::ptr_eq(found, expected),
            (None, None) => true,
            _ => false,
        };
        if !unchanged {
            return Ok(None);
        }
        let Inserted { table, _replaced } = self.insert(&mut names, table, editor)?;
        drop(names);
        Ok(Some(table))
    }

    /// Reserves a free name for a table that is being made, until the reservation is used or
    /// dropped. `purpose` tells other callers why the name is taken: `being uploaded`, `the result
    /// of job 7`.
    ///
    /// # Errors
    /// [`Error::AlreadyExists`], [`Error::Invalid`] for the name; [`Error::Exhausted`] when `owner`
    /// has as many tables as it may have, including its reservations.
    pub fn reserve(&self, name: &str, owner: &str, purpose: &str) -> Result<NameReservation> {
        self.reserve_unless(name, &owner.into(), purpose, |_| Err(exists(name)))
    }

    /// Same as [`Catalog::reserve`], for the result of a join. [`IntoMode::Replace`] also accepts
    /// the name of an existing table that the editor may change. That table can be read and dropped
    /// until the reservation is used. It stays if the reservation is never used.
    ///
    /// # Errors
    /// See [`Catalog::reserve`]; [`Error::Denied`] when the editor may not change the table.
    pub fn reserve_for_result(
        &self,
        name: &str,
        editor: &Editor,
        mode: IntoMode,
        purpose: &str,
    ) -> Result<NameReservation> {
        self.reserve_unless(name, editor, purpose, |found| match mode {
            IntoMode::Create => Err(Error::AlreadyExists(format!(
                "table {name:?} exists already; use into_mode replace (--into-mode replace) to replace it with the result, or \
                 another name"
            ))),
            IntoMode::Replace => editor.check(found, "replaced"),
        })
    }

    /// Reserves a name. If a table has the name, `in_the_way` decides whether that is an error.
    fn reserve_unless(
        &self,
        name: &str,
        editor: &Editor,
        purpose: &str,
        in_the_way: impl FnOnce(&Table) -> Result<()>,
    ) -> Result<NameReservation> {
        check_name(name)?;
        let mut names = self.names.write();
        names.check_unreserved(name, editor)?;
        match names.tables.get(name) {
            Some(found) => in_the_way(found)?,
            None => self.check_tables(&names, &editor.tenant)?,
        }
        names.reserved.insert(name.into(), Reserved { owner: editor.tenant.clone(), purpose: purpose.into() });
        Ok(NameReservation { catalog: self.clone(), name: name.into(), editor: editor.clone(), held: true })
    }

    /// Fails when the name is reserved for a table that is being made.
    ///
    /// # Errors
    /// [`Error::AlreadyExists`], [`Error::Invalid`] for the name.
    pub(super) fn check_unreserved(&self, name: &str, editor: &Editor) -> Result<()> {
        check_name(name)?;
        self.names.read().check_unreserved(name, editor)
    }

    /// Removes a table. Current readers keep it until they are done.
    ///
    /// # Errors
    /// [`Error::NotFound`]; [`Error::Denied`] when the editor may not change the table.
    pub fn drop_table(&self, name: &str, editor: &Editor) -> Result<Arc<Table>> {
        let mut names = self.names.write();
        match names.tables.get(name) {
            Some(found) => editor.check(found, "dropped")?,
            None => {
                drop(names);
                return Err(self.no_table(name));
            }
        }
        let table = names.tables.remove(name).expect("it was found under this lock");
        table.charges.iter().for_each(|charge| charge.was_unlisted());
        Ok(table)
    }

    /// Removes the tables whose time is over, and returns them. The caller should call it every few
    /// seconds. Current readers and jobs keep them until they are done.
    pub fn drop_expired(&self, now: SystemTime) -> Vec<Arc<Table>> {
        let is_over = |table: &Arc<Table>| table.expires.is_some_and(|expires| expires <= now);
        if !self.names.read().tables.values().any(is_over) {
            return Vec::new();
        }
        let mut names = self.names.write();
        let over: Vec<Arc<Table>> = names.tables.values().filter(|table| is_over(table)).cloned().collect();
        for table in &over {
            names.tables.remove(&table.name);
            table.charges.iter().for_each(|charge| charge.was_unlisted());
        }
        over
    }

    /// Returns a charge of zero bytes on the account of `owner`.
    pub fn charge(&self, owner: &str) -> Charge {
        self.ledger.charge(owner)
    }

    /// Returns a charge of a schema on the account of `owner`. Schemas are outside the arena, and
    /// may have megabytes of names and metadata.
    ///
    /// # Errors
    /// [`Error::Exhausted`] when the tenant or the server has too little memory for it.
    pub fn charge_schema(&self, owner: &str, schema: &Schema) -> Result<Charge> {
        let mut charge = self.charge(owner);
        charge.try_grow_heap(schema_bytes(schema), self.arena.budget(), "a schema")?;
        Ok(charge)
    }

    /// Counts the bytes of a charge towards the limit on its tenant's results, too.
    pub fn count_as_result(&self, charge: Charge) -> Charge {
        charge.with_result_in(&self.results)
    }

    /// Returns the bytes of results that a tenant may still add; `None` for no limit.
    pub fn room_of(&self, owner: &str) -> Option<u64> {
        let rooms = [self.ledger.room(owner), self.results.room(owner)];
        rooms.into_iter().flatten().min()
    }

    /// Same as [`Catalog::room_of`], with the bytes that results give back when they are needed.
    pub fn room_with_evictable(&self, owner: &str) -> Option<u64> {
        let rooms = [&self.ledger, &self.results].map(|ledger| ledger.room_with_evictable(owner));
        rooms.into_iter().flatten().min()
    }

    /// Releases results of a tenant that holds more than its limits, as far as they can be evicted.
    pub fn relieve(&self, owner: &str) {
        [&self.ledger, &self.results].into_iter().for_each(|ledger| ledger.relieve(owner));
    }

    /// Returns the bytes of all tables.
    pub fn table_bytes(&self) -> u64 {
        self.names.read().tables.values().map(|table| table.bytes).sum()
    }

    /// Returns the current holdings of a tenant.
    pub fn usage(&self, owner: &str) -> TenantUsage {
        let tables = self.names.read().tables.values().filter(|table| table.owner == owner).count();
        TenantUsage { bytes: self.ledger.bytes(owner), tables }
    }

    /// Returns the holdings of each tenant that holds anything, by name.
    pub fn usage_of_all(&self) -> BTreeMap<String, TenantUsage> {
        let mut owners = self.ledger.owners();
        owners.extend(self.names.read().tables.values().map(|table| table.owner.clone()));
        owners.into_iter().map(|owner| (owner.clone(), self.usage(&owner))).collect()
    }

    /// Copies buffers that are outside the arena into it, and returns the batch. See [`Adopter`]
    /// for batches that share dictionaries.
    ///
    /// # Errors
    /// [`Error::Exhausted`] when the arena has no room.
    pub fn adopt(&self, batch: RecordBatch) -> Result<RecordBatch> {
        Adopter::new(self.arena.clone()).adopt(batch)
    }

    /// Inserts a table, checking the editor under the same lock. Every replacement goes through
    /// here, so that the owner cannot change between the check and the replacement.
    fn insert(&self, names: &mut Names, mut table: Table, editor: &Editor) -> Result<Inserted> {
        match names.tables.get(&table.name) {
            Some(replaced) => {
                editor.check(replaced, "changed")?;
                table.owner.clone_from(&replaced.owner);
            }
            None => self.check_tables(names, &table.owner)?,
        }
        let table = Arc::new(table);
        // The new table may share rows with the replaced one, so it comes first.
        table.charges.iter().for_each(|charge| charge.was_listed());
        let _replaced = names.tables.insert(table.name.clone(), table.clone());
        _replaced.iter().flat_map(|table| &table.charges).for_each(|charge| charge.was_unlisted());
        Ok(Inserted { table, _replaced })
    }

    fn check_tables(&self, names: &Names, owner: &str) -> Result<()> {
        let Some(limit) = self.tables_max else { return Ok(()) };
        let tables = names.tables.values().filter(|table| table.owner == owner).count();
        // A reservation of an existing table's name is not counted: the table is counted already.
        let is_new = |name: &String| !names.tables.contains_key(name);
        let reserved = names.reserved.iter().filter(|(name, reserved)| reserved.owner == owner && is_new(name)).count();
        if tables + reserved >= limit {
            return Err(Error::Exhausted(format!(
                "tenant {owner:?} has {} and {reserved} being created, and its limit is {limit}; drop one, or raise the server's --tenant-tables",
                human::counted(tables as u64, "table")
            )));
        }
        Ok(())
    }
}

/// A table that has appeared, and the table that it replaced. Freeing the replaced table may take
/// long, so the caller drops it without the lock on the names.
struct Inserted {
    table: Arc<Table>,
    _replaced: Option<Arc<Table>>,
}

impl Names {
    fn check_unreserved(&self, name: &str, editor: &Editor) -> Result<()> {
        let Some(reserved) = self.reserved.get(name) else { return Ok(()) };
        // The purpose may name a job, and other tenants must not learn of jobs.
        let is_told = editor.is_admin || editor.tenant == reserved.owner;
        let purpose = if is_told { &reserved.purpose } else { "being made by another tenant" };
        Err(Error::AlreadyExists(format!(
            "the name {name:?} is taken: it is {purpose}; wait for that to end, or pick another name"
        )))
    }
}

/// A name that no other caller can give to a table. Dropping the reservation frees the name.
#[derive(Debug)]
pub struct NameReservation {
    catalog: Catalog,
    name: String,
    editor: Editor,
    /// False once the reservation is used up. Dropping the reservation frees the name only while
    /// true.
    held: bool,
}

impl NameReservation {
    /// The reserved name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The catalog of the reservation.
    pub fn catalog(&self) -> &Catalog {
        &self.catalog
    }

    /// Makes the table appear under the reserved name, replacing the table of that name if there is
    /// one. A success uses up the reservation, and after a failure the reservation stays.
    ///
    /// # Errors
    /// [`Error::Exhausted`] when the table's owner has as many tables as it may have, which is
    /// possible only if another tenant made the reservation; [`Error::Internal`] when the
    /// reservation is used up.
    pub fn publish(&mut self, mut table: Table) -> Result<Arc<Table>> {
        table.name.clone_from(&self.name);
        let mut names = self.catalog.names.write();
        // The reservation counts towards its owner's limit. Removing it makes room for the table.
        let Some(reserved) = names.reserved.remove(&self.name).filter(|_| self.held) else {
            return Err(Error::Internal(format!("the reservation of the name {:?} was used twice", self.name)));
        };
        let inserted = self.catalog.insert(&mut names, table, &self.editor);
        self.held = inserted.is_err();
        if self.held {
            names.reserved.insert(self.name.clone(), reserved);
        }
        drop(names);
        inserted.map(|inserted| inserted.table)
    }
}

impl Drop for NameReservation {
    fn drop(&mut self) {
        if self.held {
            self.catalog.names.write().reserved.remove(&self.name);
        }
    }
}

/// Fails for a name that a table cannot have.
///
/// # Errors
/// [`Error::Invalid`].
pub fn check_name(name: &str) -> Result<()> {
    let wrong = match name {
        "" => "is empty".into(),
        _ if name.len() > NAME_BYTES_MAX => format!("has {} bytes", name.len()),
        _ if name.chars().any(char::is_control) => "has a control character in it".into(),
        _ => return Ok(()),
    };
    let shown: String = name.chars().take(40).collect();
    Err(Error::Invalid(format!(
        "the table name {shown:?} {wrong}; a name has 1 to {NAME_BYTES_MAX} bytes and no control characters"
    )))
}

pub(super) fn exists(name: &str) -> Error {
    Error::AlreadyExists(format!("table {name:?} exists already; use mode replace or append, or another name"))
}
