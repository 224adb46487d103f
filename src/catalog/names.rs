//! Tables by name.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use arrow::array::RecordBatch;
use parking_lot::RwLock;

use super::quota::{Charge, Ledger};
use super::{Adopter, Editor, IntoMode, SpentResults, Table, TenantLimits, TenantUsage};
use crate::human;
use crate::memory::Arena;
use crate::{Error, Result};

/// Bytes that a name may have.
const NAME_BYTES_MAX: usize = 255;

/// All tables, by name. Clones share them.
#[derive(Clone, Debug)]
pub struct Catalog {
    arena: Arena,
    tables_max: Option<usize>,
    ledger: Ledger,
    names: Arc<RwLock<Names>>,
    samples: Arc<AtomicU64>,
}

/// What names stand for. One lock over both maps: whether a name is free is a question to both.
#[derive(Debug, Default)]
struct Names {
    tables: BTreeMap<String, Arc<Table>>,
    /// What the name is kept for, to be told to the next who asks.
    reserved: HashMap<String, Reserved>,
}

#[derive(Debug)]
struct Reserved {
    owner: String,
    purpose: String,
}

impl Catalog {
    /// An empty catalog whose tables live in `arena`.
    pub fn new(arena: Arena) -> Self {
        Self::with_limits(arena, TenantLimits::default())
    }

    /// As [`Catalog::new`], with a limit to what each tenant may hold.
    pub fn with_limits(arena: Arena, limits: TenantLimits) -> Self {
        let spent = SpentResults::default();
        arena.budget().reclaim_from(spent.as_reclaim());
        Self {
            arena,
            tables_max: limits.tables,
            ledger: Ledger::new(limits, spent),
            names: Arc::default(),
            samples: Arc::default(),
        }
    }

    /// Results whose memory goes to whoever needs it.
    pub fn spent_results(&self) -> &SpentResults {
        self.ledger.spent()
    }

    /// Where the tables' buffers live.
    pub fn arena(&self) -> &Arena {
        &self.arena
    }

    /// Another seed for each stream of rows, since the samples of several may be put together. The same streams in the same
    /// order have the same seeds, and so the same statistics.
    pub(super) fn sample_seed(&self) -> u64 {
        self.samples.fetch_add(1, Ordering::Relaxed)
    }

    /// The table of that name.
    ///
    /// # Errors
    /// [`Error::NotFound`].
    pub fn table(&self, name: &str) -> Result<Arc<Table>> {
        let found = self.names.read().tables.get(name).cloned();
        found.ok_or_else(|| self.no_table(name))
    }

    /// What is said of a name that no table has.
    pub(super) fn no_table(&self, name: &str) -> Error {
        // Compared without the lock: it takes a while where there are many.
        let known: Vec<String> = self.names.read().tables.keys().cloned().collect();
        let meant = human::did_you_mean(name, known.iter().map(String::as_str));
        Error::NotFound(format!("there is no table {}{meant}", human::asked(name)))
    }

    /// All tables, by name.
    pub fn tables(&self) -> Vec<Arc<Table>> {
        self.names.read().tables.values().cloned().collect()
    }

    /// Makes a table appear under a name that is free.
    ///
    /// # Errors
    /// [`Error::AlreadyExists`]; [`Error::Exhausted`] when its owner has as many tables as it may; [`Error::Invalid`] for the
    /// name.
    pub fn create(&self, table: Table) -> Result<Arc<Table>> {
        self.reserve(&table.name, &table.owner, "being created")?.publish(table)
    }

    /// Makes a table appear, in the place of one of that name if there is one, whose owner it keeps.
    ///
    /// # Errors
    /// [`Error::Denied`] when the one in its place is not the editor's to change; [`Error::AlreadyExists`] when the name is
    /// reserved for a table that is being made; [`Error::Exhausted`] when its owner has as many tables as it may;
    /// [`Error::Invalid`] for the name.
    pub fn replace(&self, table: Table, editor: &Editor) -> Result<Arc<Table>> {
        check_name(&table.name)?;
        let mut names = self.names.write();
        names.check_unreserved(&table.name)?;
        self.insert(&mut names, table, editor)
    }

    /// Makes a table appear in the place of `expected`; `None` when something else has happened to the name meanwhile.
    ///
    /// # Errors
    /// As [`Catalog::replace`].
    pub(super) fn swap(
        &self,
        expected: Option<&Arc<Table>>,
        table: Table,
        editor: &Editor,
    ) -> Result<Option<Arc<Table>>> {
        check_name(&table.name)?;
        let mut names = self.names.write();
        names.check_unreserved(&table.name)?;
        let unchanged = match (names.tables.get(&table.name), expected) {
            (Some(found), Some(expected)) => Arc::ptr_eq(found, expected),
            (None, None) => true,
            _ => false,
        };
        if !unchanged {
            return Ok(None);
        }
        self.insert(&mut names, table, editor).map(Some)
    }

    /// Keeps a free name for a table that is being made, until the reservation is used or dropped. `purpose` tells others
    /// why they cannot have the name: `being uploaded`, `the result of job 7`.
    ///
    /// # Errors
    /// [`Error::AlreadyExists`], [`Error::Invalid`] for the name; [`Error::Exhausted`] when `owner` has as many tables as it
    /// may, counting its reservations.
    pub fn reserve(&self, name: &str, owner: &str, purpose: &str) -> Result<NameReservation> {
        self.reserve_unless(name, &owner.into(), purpose, |_| Err(exists(name)))
    }

    /// As [`Catalog::reserve`], for the result of a join: with [`IntoMode::Replace`] also where there is a table of that name, if
    /// the editor may change it. That table can be read and dropped until its name is used, and stays if that never happens.
    ///
    /// # Errors
    /// As [`Catalog::reserve`]; [`Error::Denied`] when the table is not the editor's to change.
    pub fn reserve_for_result(
        &self,
        name: &str,
        editor: &Editor,
        mode: IntoMode,
        purpose: &str,
    ) -> Result<NameReservation> {
        self.reserve_unless(name, editor, purpose, |found| match mode {
            IntoMode::Create => Err(Error::AlreadyExists(format!(
                "table {name:?} exists already; use into_mode replace (--into-mode replace) to put the result in its place, or \
                 another name"
            ))),
            IntoMode::Replace => editor.check(found, "replaced"),
        })
    }

    /// Keeps a name, unless the table that has it already is in the way.
    fn reserve_unless(
        &self,
        name: &str,
        editor: &Editor,
        purpose: &str,
        in_the_way: impl FnOnce(&Table) -> Result<()>,
    ) -> Result<NameReservation> {
        check_name(name)?;
        let mut names = self.names.write();
        names.check_unreserved(name)?;
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
    pub(super) fn check_unreserved(&self, name: &str) -> Result<()> {
        check_name(name)?;
        self.names.read().check_unreserved(name)
    }

    /// Removes a table. Those who read it keep it until they are done.
    ///
    /// # Errors
    /// [`Error::NotFound`]; [`Error::Denied`] when it is not the editor's to change.
    pub fn drop_table(&self, name: &str, editor: &Editor) -> Result<Arc<Table>> {
        let mut names = self.names.write();
        match names.tables.get(name) {
            Some(found) => editor.check(found, "dropped")?,
            None => {
                drop(names);
                return Err(self.no_table(name));
            }
        }
        Ok(names.tables.remove(name).expect("it was found under this lock"))
    }

    /// An account of `owner` that bytes can be charged to.
    pub fn charge(&self, owner: &str) -> Charge {
        self.ledger.charge(owner)
    }

    /// Bytes that a tenant may hold beside what it does; `None` for no limit.
    pub fn room_of(&self, owner: &str) -> Option<u64> {
        self.ledger.room(owner)
    }

    /// Bytes of all tables.
    pub fn table_bytes(&self) -> u64 {
        self.names.read().tables.values().map(|table| table.bytes).sum()
    }

    /// What a tenant holds.
    pub fn usage(&self, owner: &str) -> TenantUsage {
        let tables = self.names.read().tables.values().filter(|table| table.owner == owner).count();
        TenantUsage { bytes: self.ledger.bytes(owner), tables }
    }

    /// What each tenant holds that holds anything, by name.
    pub fn usage_of_all(&self) -> BTreeMap<String, TenantUsage> {
        let mut owners = self.ledger.owners();
        owners.extend(self.names.read().tables.values().map(|table| table.owner.clone()));
        owners.into_iter().map(|owner| (owner.clone(), self.usage(&owner))).collect()
    }

    /// The batch with all its buffers in the arena: those that are elsewhere are copied. See [`Adopter`] for batches that
    /// share dictionaries.
    ///
    /// # Errors
    /// [`Error::Exhausted`] when the arena has no room.
    pub fn adopt(&self, batch: RecordBatch) -> Result<RecordBatch> {
        Adopter::new(self.arena.clone()).adopt(batch)
    }

    /// The one place where a table takes another's, so that whose it is cannot change between question and deed.
    fn insert(&self, names: &mut Names, mut table: Table, editor: &Editor) -> Result<Arc<Table>> {
        match names.tables.get(&table.name) {
            Some(replaced) => {
                editor.check(replaced, "changed")?;
                table.owner.clone_from(&replaced.owner);
            }
            None => self.check_tables(names, &table.owner)?,
        }
        let table = Arc::new(table);
        names.tables.insert(table.name.clone(), table.clone());
        Ok(table)
    }

    fn check_tables(&self, names: &Names, owner: &str) -> Result<()> {
        let Some(limit) = self.tables_max else { return Ok(()) };
        let tables = names.tables.values().filter(|table| table.owner == owner).count();
        // A table that is to be replaced has its place already.
        let is_new = |name: &String| !names.tables.contains_key(name);
        let reserved = names.reserved.iter().filter(|(name, reserved)| reserved.owner == owner && is_new(name)).count();
        if tables + reserved >= limit {
            return Err(Error::Exhausted(format!(
                "tenant {owner:?} has {} and {reserved} on the way, and may have {limit}; drop one, or raise the server's --tenant-tables",
                human::counted(tables as u64, "table")
            )));
        }
        Ok(())
    }
}

impl Names {
    fn check_unreserved(&self, name: &str) -> Result<()> {
        match self.reserved.get(name) {
            None => Ok(()),
            Some(reserved) => Err(Error::AlreadyExists(format!(
                "the name {name:?} is taken: it is {}; wait for that to end, or pick another name",
                reserved.purpose
            ))),
        }
    }
}

/// A name that nobody else can give to a table. Dropping it frees the name.
#[derive(Debug)]
pub struct NameReservation {
    catalog: Catalog,
    name: String,
    editor: Editor,
    /// Whether the name is still this reservation's to free.
    held: bool,
}

impl NameReservation {
    /// The name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The catalog that keeps it.
    pub fn catalog(&self) -> &Catalog {
        &self.catalog
    }

    /// Makes the table appear, under the name that was kept for it; in the place of the table that has it, if there is one. The
    /// reservation is used up then, and stays after a failure.
    ///
    /// # Errors
    /// [`Error::Exhausted`] when its owner has as many tables as it may, which can only be when somebody else's reservation
    /// is used; [`Error::Internal`] when the reservation is used up.
    pub fn publish(&mut self, mut table: Table) -> Result<Arc<Table>> {
        table.name.clone_from(&self.name);
        let mut names = self.catalog.names.write();
        // The owner's place for a table that the reservation took is the one that the table gets.
        let Some(reserved) = names.reserved.remove(&self.name).filter(|_| self.held) else {
            return Err(Error::Internal(format!("the reservation of the name {:?} was used twice", self.name)));
        };
        let published = self.catalog.insert(&mut names, table, &self.editor);
        self.held = published.is_err();
        if self.held {
            names.reserved.insert(self.name.clone(), reserved);
        }
        published
    }
}

impl Drop for NameReservation {
    fn drop(&mut self) {
        if self.held {
            self.catalog.names.write().reserved.remove(&self.name);
        }
    }
}

/// Fails for a name that no table can have.
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
