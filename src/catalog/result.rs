//! Result of a join: batches that are written once, read by several readers, and released by a
//! lease.
//!
//! ```text
//!   retained:   push ─► 0 1 2 3 4 5 …      reader i of n clones i, i + n, …   all stay until the
//!                                          or one part, 0 1 2 (parts.rs)      lease ends, or until
//!                                                                             read and memory is
//!                                                                             needed (eviction.rs)
//!   consumed:   push ─► … 4 5 ─► queue ─►  each reader takes the next one     a reader frees it
//!   a table:    push ─► 0 1 2 ─► Table     read from the table, as above      the catalog's table
//!                                                                             holds all of them
//! ```
//!
//! A result that becomes a table gives all its memory to the table. Until its lease ends it can be
//! read like any other result, unless the table is dropped or replaced. A reader that is open keeps
//! the table's memory until it is closed.
//!
//! Batches may share memory with the tables from which they were made. Shared columns do not count
//! as bytes of the result. They keep the tables' memory allocated. If a table is dropped or
//! replaced, the tenant of the result is charged for its rows until the result is released.
//!
//! A retained result can be read again and in parallel. Its size is bounded: pushing beyond the
//! bound is an error. A result that is consumed as it is read (`retain_seconds` 0) can be of any
//! size, and each batch goes to exactly one reader.
//!
//! The writer of a consumed result holds a device, so it keeps writing while memory has room.
//! Without room it waits for its readers for a limited time. The limit is shorter if other joins
//! wait for the device. When the limit is exceeded the result fails, and the device is free for
//! them. (Returning the device and resuming later would need the join's transformed data. Either it
//! stays in device memory, where the next join needs the room, or it is transformed anew.)
//!
//! Readers share one queue instead of fixed shares of it. So a client that reads its endpoints one
//! after the other does not wait for batches that are behind those of its later endpoints.

mod eviction;
mod parts;
mod reading;
mod streams;

use std::collections::{BTreeSet, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant, SystemTime};

use arrow::array::RecordBatch;
use arrow::datatypes::SchemaRef;
use bytes::Bytes;
use parking_lot::{Condvar, Mutex, MutexGuard};
use tokio::sync::watch;

use eviction::Reading;
pub use eviction::{EvictableResults, EvictionPermit};
use parts::Parts;
pub use reading::ResultReader;
pub use streams::ArrivingRows;

use super::adopt::{Adopter, Meter};
use super::statistics::Collection;
use super::{Catalog, Charge, ChargeHold, NameReservation, Table};
use crate::memory::{Arena, Budget, Interrupt, human_bytes};
use crate::{Context, Error, Result};

/// Interval at which a writer that waits for a reader checks for interrupts.
const INTERRUPT_INTERVAL: Duration = Duration::from_millis(20);

/// Divisor of the arena's size. It gives the share that consumed results leave free for tables and
/// for batches that joins are making.
const ROOM_LEFT_SHARE: u64 = 4;

/// State of a result.
#[derive(Clone, Debug, PartialEq)]
pub enum SpoolState {
    Open,
    Complete,
    Failed(Error),
    /// The batches are gone: the result was released, at the end of its lease or earlier.
    Released,
}

/// Limits on a writer that waits for readers while other joins wait for its device.
///
/// A slow reader must not keep other joins waiting. But a long result that needs no memory may have
/// the better claim to the device. So the limits are no shorter than the pauses of a working
/// client.
#[derive(Clone, Debug)]
pub struct BackpressureLimits {
    pub is_wanted: Arc<AtomicBool>,
    pub stall: Duration,
    /// Maximum total time that the writer waits while other joins wait for the device.
    pub wait_max: Duration,
}

impl BackpressureLimits {
    /// Returns limits that hold while `is_wanted` is true: 5 s without a read, and 30 s in all. 5 s
    /// is longer than a client's garbage collection, or the network's repair of a loss. 30 s is a
    /// tenth of the limit that holds when no other join wants the device.
    pub fn when(is_wanted: Arc<AtomicBool>) -> Self {
        Self { is_wanted, stall: Duration::from_secs(5), wait_max: Duration::from_secs(30) }
    }
}

/// Options for keeping a result.
pub struct SpoolOptions {
    /// Time for which the result is kept after it is complete or was last read, whichever is later.
    /// Zero: each batch is kept until it is read.
    pub retain: Duration,
    /// Maximum bytes that the result holds at a time. A consumed result may hold more while the
    /// arena has room.
    pub bytes_max: u64,
    /// Maximum time that the writer of a consumed result waits while readers take nothing. After
    /// that the result fails.
    pub stall: Duration,
    /// Maximum total time that the writer waits, however much readers take. The writer holds a
    /// device meanwhile.
    pub wait_max: Duration,
    /// Shorter limits while other joins want the device; `None`: the limits are never shortened.
    pub when_wanted: Option<BackpressureLimits>,
    /// Arena into which batches from elsewhere are copied; `None` leaves batches where they are.
    pub arena: Option<Arena>,
    pub charge: Option<Charge>,
    /// The tables from which the result is made. Its batches may share memory with them.
    pub tables: Vec<Weak<Table>>,
    pub interrupt: Interrupt,
    /// Permits the release of the result's memory once it was read, or of a stream's while it is
    /// left unread. `None`: not before its lease ends.
    pub eviction: Option<EvictionPermit>,
    /// Rows from which the result is made while they arrive, for the result of a stream.
    pub arriving: Option<Arc<dyn ArrivingRows>>,
    /// Catalog in which the result will become a table; `None` if it will not. Statistics of the
    /// table are taken while batches arrive.
    pub becomes_table_in: Option<Catalog>,
}

impl Default for SpoolOptions {
    fn default() -> Self {
        Self {
            retain: Duration::from_secs(300),
            bytes_max: u64::MAX,
            stall: Duration::from_secs(30),
            wait_max: Duration::from_secs(300),
            when_wanted: None,
            arena: None,
            charge: None,
            tables: Vec::new(),
            interrupt: Interrupt::default(),
            eviction: None,
            arriving: None,
            becomes_table_in: None,
        }
    }
}

/// Batches between the join that writes them and the clients that read them. Clones share them.
#[derive(Clone)]
pub struct ResultSpool {
    inner: Arc<Inner>,
    /// Ends the waits of this clone's writer.
    interrupt: Interrupt,
}

struct Inner {
    schema: SchemaRef,
    retain: Duration,
    bytes_max: u64,
    stall: Duration,
    wait_max: Duration,
    when_wanted: Option<BackpressureLimits>,
    tables: Vec<Weak<Table>>,
    budget: Option<Budget>,
    eviction: Option<EvictionPermit>,
    arriving: Option<Arc<dyn ArrivingRows>>,
    held: Mutex<SpoolContents>,
    /// Notified when batches were taken, and when the result ends or is released.
    room: Condvar,
    /// Number of batches pushed, and the state. Readers wait for a change of either. Both change
    /// only while `held` is locked.
    progress: watch::Sender<(usize, SpoolState)>,
}

/// Batch with its note, the `app_metadata` of its message. A batch with a note has no rows.
pub type NotedBatch = (RecordBatch, Option<Bytes>);

/// Batch of a result, with the bytes that it holds.
#[derive(Debug)]
struct HeldBatch {
    batch: RecordBatch,
    bytes: u64,
    note: Option<Bytes>,
    turn: u64,
}

/// Batches of the result, with their accounting.
#[derive(Default)]
struct SpoolContents {
    /// Batches, indexed by batch number minus `taken`. `None`: taken out of turn.
    batches: VecDeque<Option<HeldBatch>>,
    /// Number of batches that were taken and are no longer in `batches`.
    taken: usize,
    bytes: u64,
    pushed_bytes: u64,
    rows: u64,
    /// Endpoints of a consumed result from which a reader has begun to read.
    begun: BTreeSet<usize>,
    parts: Parts,
    reading: Reading,
    /// Table that holds the batches, once the result has become one.
    given_to: Option<GivenTo>,
    adopter: Option<Adopter>,
    meter: Meter,
    charge: Option<Charge>,
    /// Statistics of the batches, if the result will become a table.
    statistics: Option<Collection>,
    /// Charges of the tables whose memory is shared, each once.
    shared: Vec<SharedRows>,
    last_taken: Option<Instant>,
    /// Time from which batches wait and none was taken. `None`: none waits.
    unread_since: Option<Instant>,
    /// Number of the turn of a stream that pushes.
    turn: u64,
    /// Bytes of batches of a stream that were taken and still count, and their turn. Batches of a
    /// turn share memory, which is free after the last of them was sent.
    sending: (u64, u64),
    /// True if the result of a stream is in the list of results that can be evicted.
    is_listed_unread: bool,
    waited: Duration,
    /// Part of `waited` during which other joins waited for the device.
    waited_wanted: Duration,
    /// End of the lease, once the result is complete.
    expires: Option<SystemTime>,
}

/// Table that a result has become.
#[derive(Debug)]
struct GivenTo {
    name: String,
    table: Weak<Table>,
    /// The table, while the result has open readers.
    read: Option<Arc<Table>>,
}

impl GivenTo {
    /// Returns the table.
    ///
    /// # Errors
    /// [`Error::NotFound`] when the table was dropped or replaced and no reader keeps it.
    fn table(&self) -> Result<Arc<Table>> {
        self.table.upgrade().ok_or_else(|| {
            Error::NotFound(format!(
                "the result is gone: it became table {:?}, which was dropped or replaced since; run the join again",
                self.name
            ))
        })
    }
}

/// Rows of a table with which a result shares memory.
#[derive(Debug)]
struct SharedRows {
    table: Weak<Table>,
    /// Charge for the rows. The result's tenant holds them.
    held: ChargeHold,
}

impl SharedRows {
    fn charge(&self) -> &Arc<Charge> {
        self.held.charge()
    }
}

impl SpoolContents {
    /// Bytes of dropped or replaced tables whose memory this result keeps allocated.
    fn bytes_of_gone_tables(&self) -> u64 {
        let gone = self.shared.iter().filter(|rows| rows.table.strong_count() == 0);
        gone.map(|rows| rows.charge().bytes()).sum()
    }

    /// Removes all batches and their charges. The caller drops the batches once no lock is held.
    fn take_all(&mut self) -> VecDeque<Option<HeldBatch>> {
        let batches = std::mem::take(&mut self.batches);
        self.taken += batches.len();
        self.bytes = 0;
        self.sending = (0, 0);
        self.unread_since = None;
        self.charge = None;
        self.shared.clear();
        self.given_to = None;
        self.adopter = None;
        self.meter = Meter::default();
        if let Some(statistics) = &self.statistics {
            statistics.stop();
        }
        batches
    }

    /// Keeps the table that the result has become while readers are open. Returns a table that no
    /// reader needs any more, which the caller drops without the lock.
    fn keep_table_while_read(&mut self) -> Option<Arc<Table>> {
        let is_read = self.reading.readers > 0;
        let given_to = self.given_to.as_mut()?;
        if !is_read {
            return given_to.read.take();
        }
        if given_to.read.is_none() {
            given_to.read = given_to.table.upgrade();
        }
        None
    }

    /// True if the table that the result has become is gone, with all rows.
    fn has_lost_table(&self) -> bool {
        self.given_to.as_ref().is_some_and(|given_to| given_to.table.strong_count() == 0)
    }
}

impl ResultSpool {
    /// Makes an empty result with the default options.
    pub fn new(schema: SchemaRef) -> Self {
        Self::with_options(schema, SpoolOptions::default())
    }

    /// Makes an empty result.
    pub fn with_options(schema: SchemaRef, options: SpoolOptions) -> Self {
        let SpoolOptions {
            retain,
            bytes_max,
            stall,
            wait_max,
            when_wanted,
            arena,
            charge,
            tables,
            interrupt,
            eviction,
            arriving,
            becomes_table_in,
        } = options;
        let (progress, _) = watch::channel((0, SpoolState::Open));
        let budget = arena.as_ref().map(|arena| arena.budget().clone());
        let statistics = becomes_table_in.map(|catalog| Collection::new(&schema, catalog.sample_seed()));
        let held = SpoolContents { adopter: arena.map(Adopter::new), charge, statistics, ..SpoolContents::default() };
        let held = Mutex::new(held);
        let room = Condvar::new();
        let inner = Inner {
            schema,
            retain,
            bytes_max,
            stall,
            wait_max,
            when_wanted,
            tables,
            budget,
            eviction,
            arriving,
            held,
            room,
            progress,
        };
        Self { inner: Arc::new(inner), interrupt }
    }

    /// Returns the same result for a writer whose waits for readers also end with `interrupt`.
    pub fn interrupted_by(&self, interrupt: Interrupt) -> Self {
        Self { inner: self.inner.clone(), interrupt: self.interrupt.or(interrupt) }
    }

    /// Columns and their types.
    pub fn schema(&self) -> &SchemaRef {
        &self.inner.schema
    }

    /// Time for which the result is kept after it is complete or was last read.
    pub fn retained_for(&self) -> Duration {
        self.inner.retain
    }

    /// True if each batch goes to one reader and is removed then.
    pub fn is_consumed_by_reading(&self) -> bool {
        self.inner.retain.is_zero()
    }

    /// Adds a batch. If the result is consumed as it is read, waits while there is no room.
    ///
    /// # Errors
    /// [`Error::Exhausted`] when there is no room for the batch, or when readers make no room
    /// within the limits of [`SpoolOptions`]; [`Error::Cancelled`] when the result was released;
    /// the interrupt's.
    pub fn push(&self, batch: RecordBatch) -> Result<()> {
        self.push_sharing(batch, &[])
    }

    /// Same as [`ResultSpool::push`]. The columns that are marked in `shared` are stored in
    /// [`SpoolOptions::tables`].
    ///
    /// # Errors
    /// See [`ResultSpool::push`].
    pub fn push_sharing(&self, batch: RecordBatch, shared: &[bool]) -> Result<()> {
        if batch.num_rows() == 0 {
            return Ok(());
        }
        let mut held = self.inner.held.lock();
        let batch = match &mut held.adopter {
            Some(adopter) => adopter.adopt(batch)?,
            None => batch,
        };
        if self.is_consumed_by_reading() {
            held.meter.forget_unused();
        }
        let (mut all_bytes, mut bytes) = (0, 0);
        for (index, column) in batch.columns().iter().enumerate() {
            let of_column = held.meter.referenced_bytes_of(column);
            all_bytes += of_column;
            // Rows that arrive are in no table. The result of a stream keeps their memory.
            let is_in_table = shared.get(index) == Some(&true) && self.inner.arriving.is_none();
            bytes += if is_in_table { 0 } else { of_column };
        }
        if self.is_consumed_by_reading() {
            self.wait_for_room(&mut held, bytes)?;
        } else if held.bytes + bytes > self.inner.bytes_max {
            let limit = human_bytes(self.inner.bytes_max);
            return Err(Error::Exhausted(format!("the result is too large: its limit is {limit}")));
        }
        self.check_not_released()?;
        if let (Some(charge), false) = (&mut held.charge, self.is_consumed_by_reading()) {
            charge.try_grow(bytes).context(|| "keeping the result of the join")?;
        }
        if shared.contains(&true) && held.shared.is_empty() {
            let tenant = held.charge.as_ref().map(|charge| charge.owner().to_owned()).unwrap_or_default();
            // The upgrade succeeds, because the join that pushes holds the tables.
            for table in self.inner.tables.iter().filter_map(Weak::upgrade) {
                for charge in &table.charges {
                    if !held.shared.iter().any(|rows| Arc::ptr_eq(rows.charge(), charge)) {
                        let rows = ChargeHold::new(charge.clone(), &tenant);
                        held.shared.push(SharedRows { table: Arc::downgrade(&table), held: rows });
                    }
                }
            }
        }
        held.bytes += bytes;
        held.pushed_bytes += all_bytes;
        held.rows += batch.num_rows() as u64;
        if let Some(statistics) = &held.statistics {
            statistics.add(&batch);
        }
        let turn = held.turn;
        self.add(&mut held, HeldBatch { batch, bytes, note: None, turn }, all_bytes);
        Ok(())
    }

    /// Adds a batch without rows and with a note, for the reader of a result that is consumed as it
    /// is read. The note comes after all batches that were pushed before.
    ///
    /// # Errors
    /// See [`ResultSpool::push`]. [`Error::Internal`] for a result that is kept.
    pub fn push_note(&self, note: Bytes) -> Result<()> {
        if !self.is_consumed_by_reading() {
            return Err(Error::Internal("a note in a result that is kept".into()));
        }
        let batch = RecordBatch::new_empty(self.inner.schema.clone());
        // A note of a byte takes as much as the arrays of its batch.
        let bytes = (note.len() + batch.get_array_memory_size() + size_of::<Option<HeldBatch>>()) as u64;
        let mut held = self.inner.held.lock();
        self.wait_for_room(&mut held, bytes)?;
        self.check_not_released()?;
        held.bytes += bytes;
        let turn = held.turn;
        self.add(&mut held, HeldBatch { batch, bytes, note: Some(note), turn }, 0);
        Ok(())
    }

    fn add(&self, held: &mut SpoolContents, batch: HeldBatch, all_bytes: u64) {
        held.batches.push_back(Some(batch));
        held.note_unread(false);
        let count = held.taken + held.batches.len();
        held.parts.push(count, all_bytes);
        self.inner.progress.send_modify(|progress| progress.0 = count);
    }

    /// Ends the result: the join is complete, or failed. Starts the lease. A result that was
    /// released stays released. Batches of a failed join are freed at once, because a part of a
    /// result is useless. Readers of a failed result get the join's error.
    pub fn finish(&self, outcome: Result<()>) {
        let mut held = self.inner.held.lock();
        let state = outcome.map_or_else(SpoolState::Failed, |()| SpoolState::Complete);
        held.expires = Some(SystemTime::now() + self.inner.retain);
        // No batch follows, so the memory and the dictionaries of the last one can be freed.
        let (meter, adopter) = (std::mem::take(&mut held.meter), held.adopter.take());
        let batches = if matches!(state, SpoolState::Failed(_)) { held.take_all() } else { VecDeque::new() };
        self.inner.progress.send_modify(|progress| {
            if progress.1 == SpoolState::Open {
                progress.1 = state;
            }
        });
        drop(held);
        self.inner.room.notify_all();
        drop((batches, meter, adopter));
    }

    /// Frees all batches now. Readers get an error, and a waiting writer stops.
    pub fn release(&self) {
        self.release_held(self.inner.held.lock());
    }

    fn release_held(&self, mut held: MutexGuard<'_, SpoolContents>) {
        let (given_to, batches) = (held.given_to.take(), held.take_all());
        self.inner.progress.send_modify(|progress| progress.1 = SpoolState::Released);
        drop(held);
        self.inner.room.notify_all();
        drop((given_to, batches));
    }

    /// Returns the number of batches that were pushed, and the state.
    pub fn progress(&self) -> (usize, SpoolState) {
        self.inner.progress.borrow().clone()
    }

    /// Rows that were pushed.
    pub fn pushed_rows(&self) -> u64 {
        self.inner.held.lock().rows
    }

    /// Bytes that were pushed, including bytes shared with tables.
    pub fn pushed_bytes(&self) -> u64 {
        self.inner.held.lock().pushed_bytes
    }

    /// Bytes that the result holds now, except bytes shared with tables. A result that has become a
    /// table holds none.
    pub fn held_bytes(&self) -> u64 {
        self.inner.held.lock().bytes
    }

    /// Bytes that come free when the result is released. They include the bytes of dropped or
    /// replaced tables whose memory the result shares, and of rows that arrive for it.
    pub fn returning_bytes(&self) -> u64 {
        let held = self.inner.held.lock();
        held.bytes.saturating_add(held.bytes_of_gone_tables()).saturating_add(self.inner.arriving_bytes())
    }

    /// Same as [`ResultSpool::returning_bytes`], for a result whose batches wait for readers. Such
    /// a result is complete and cannot be evicted, or it is consumed. Returns 0 for any other
    /// result, and for a locked result: the calling thread may hold the lock.
    pub fn waiting_bytes(&self) -> u64 {
        if !self.is_consumed_by_reading() && self.progress().1 != SpoolState::Complete {
            return 0;
        }
        let Some(held) = self.inner.held.try_lock() else { return 0 };
        match self.inner.is_evictable(&held) {
            true => 0,
            false => held.bytes.saturating_add(held.bytes_of_gone_tables()).saturating_add(self.inner.arriving_bytes()),
        }
    }

    /// End of the lease; `None` while the join runs. Reading extends it.
    pub fn expires(&self) -> Option<SystemTime> {
        self.inner.held.lock().expires
    }

    /// Extends the lease to `duration` from now. A lease that ends later stays as it is. After this
    /// call the result cannot be evicted. Returns the end of the lease; `None` while the join runs,
    /// since the lease has not begun.
    ///
    /// # Errors
    /// [`Error::NotFound`] when the result is released, or its table is gone.
    pub fn renew(&self, duration: Duration) -> Result<Option<SystemTime>> {
        self.was_renewed();
        let mut held = self.inner.held.lock();
        self.check_readable()?;
        held.given_to.as_ref().map_or(Ok(()), |given_to| given_to.table().map(drop))?;
        held.expires = held.expires.map(|expires| expires.max(SystemTime::now() + duration));
        Ok(held.expires)
    }

    /// True if the result was released or its lease ended. Its owner should then
    /// [`ResultSpool::release`] and forget it. A consumed result has no lease: after its end and
    /// its last read, it stays for as long as a writer would wait for a reader (`stall`). So a
    /// client that reads the endpoints one after the other finds each endpoint, and a failure can
    /// be reported.
    pub fn is_expired(&self, now: SystemTime) -> bool {
        let held = self.inner.held.lock();
        let grace = if self.is_consumed_by_reading() { self.inner.stall } else { Duration::ZERO };
        match self.inner.progress.borrow().1 {
            SpoolState::Released => true,
            SpoolState::Open => false,
            SpoolState::Complete | SpoolState::Failed(_) => held.expires.is_some_and(|expires| expires + grace <= now),
        }
    }

    /// True if nothing is left to fetch: the result was released, readers have consumed all of it,
    /// or the table that it became is gone. Clients that read an endpoint again are told so until
    /// [`ResultSpool::is_expired`].
    pub fn is_gone(&self) -> bool {
        let held = self.inner.held.lock();
        if held.has_lost_table() {
            return true;
        }
        // A result without rows stays until a reader has seen that it is empty.
        let is_taken = held.batches.is_empty() && (held.taken > 0 || !held.begun.is_empty());
        match self.inner.progress.borrow().1 {
            SpoolState::Released => true,
            SpoolState::Complete => self.is_consumed_by_reading() && is_taken,
            SpoolState::Open | SpoolState::Failed(_) => false,
        }
    }

    /// True if the rows were freed before they were all read: the result was released or has
    /// failed, or the table that it became is gone.
    pub fn is_released(&self) -> bool {
        let held = self.inner.held.lock();
        held.has_lost_table() || matches!(self.inner.progress.borrow().1, SpoolState::Released | SpoolState::Failed(_))
    }

    /// Waits until the statistics of all batches are taken, and takes part in that. The writer
    /// calls this after its last batch and before [`ResultSpool::into_table`]. Does nothing for a
    /// result that becomes no table. After an error, no thread holds any batch for statistics.
    ///
    /// # Errors
    /// The interrupt's; [`Error::Cancelled`] when the result has failed or is gone.
    pub fn wait_for_statistics(&self) -> Result<()> {
        let statistics = self.inner.held.lock().statistics.clone();
        statistics.map_or(Ok(()), |statistics| statistics.wait(&self.interrupt))
    }

    /// Makes the result appear as a table under a reserved name. The rows are not copied. The
    /// writer calls this after its last batch and before [`ResultSpool::finish`]. So a client that
    /// sees the end of the result finds the table. From then on the table holds the rows, and the
    /// result only refers to it. The result can be read during its lease, while the table is in the
    /// catalog. The catalog drops the table after `life`, if it has one.
    ///
    /// # Errors
    /// [`Error::Precondition`] when the result has failed or is gone, is consumed as it is read, or
    /// was not made to become a table; the interrupt's; and the errors of
    /// [`NameReservation::publish`].
    pub fn into_table(&self, mut name: NameReservation, owner: &str, life: Option<Duration>) -> Result<Arc<Table>> {
        let is_whole = matches!(self.progress().1, SpoolState::Open | SpoolState::Complete);
        let (statistics, batches, bytes, charge) = {
            let mut held = self.inner.held.lock();
            let is_kept = is_whole && !self.is_consumed_by_reading();
            let Some(statistics) = held.statistics.take().filter(|_| is_kept) else {
                return Err(Error::Precondition(format!(
                    "the result cannot become table {:?}: it failed, or is not kept",
                    name.name()
                )));
            };
            let batches: Vec<_> = held.batches.iter().flatten().map(|held| held.batch.clone()).collect();
            (statistics, batches, held.pushed_bytes, held.charge.take())
        };
        let collectors = statistics.finish(&self.interrupt)?;
        let mut table =
            Table::collected(name.name(), self.schema().clone(), batches, bytes, collectors, &self.interrupt)?;
        let mut charge = match charge {
            Some(charge) => charge,
            None => {
                let mut charge = name.catalog().charge(owner);
                charge.try_grow(table.bytes).context(|| format!("keeping the result as table {:?}", name.name()))?;
                charge
            }
        };
        charge.becomes_table();
        table.owner = owner.into();
        table.expires = life.map(|life| SystemTime::now() + life);
        table.charges = vec![Arc::new(charge)];
        let table = name.publish(table)?;
        self.give_to(&table);
        Ok(table)
    }

    /// Leaves the batches to the table that holds them.
    fn give_to(&self, table: &Arc<Table>) {
        let mut held = self.inner.held.lock();
        // A client may have released the result meanwhile.
        if self.check_readable().is_err() {
            return;
        }
        let batches = std::mem::take(&mut held.batches);
        held.bytes = 0;
        held.given_to = Some(GivenTo { name: table.name.clone(), table: Arc::downgrade(table), read: None });
        held.keep_table_while_read();
        drop(held);
        drop(batches);
    }

    /// Waits until there is room for those bytes, and charges them.
    fn wait_for_room(&self, held: &mut MutexGuard<'_, SpoolContents>, bytes: u64) -> Result<()> {
        let started = Instant::now();
        loop {
            self.check_not_released()?;
            if self.has_room(held, bytes) {
                let Some(charge) = &mut held.charge else { return Ok(()) };
                if self.inner.arriving.is_some() {
                    // A stream has to end its turn, and others may wait for it. The scheduler keeps
                    // turns small while the tenant has little room.
                    charge.grow(bytes);
                    return Ok(());
                }
                match charge.try_grow(bytes) {
                    // The result holds no bytes, so readers cannot make room.
                    Err(error) if held.bytes == 0 => return Err(error.context("streaming the result of the join")),
                    Err(_) => (),
                    Ok(()) => return Ok(()),
                }
            }
            self.interrupt.check()?;
            // Batches that readers have dropped make room.
            held.meter.forget_unused();
            let idle = held.last_taken.map_or(started, |taken| taken.max(started)).elapsed();
            let (wanted, stall) = (self.wanted(), self.stall_now());
            let is_over = held.waited >= self.inner.wait_max
                || wanted.is_some_and(|wanted| held.waited_wanted >= wanted.wait_max);
            let slow = match (idle >= stall, is_over) {
                (true, _) => format!("took nothing for {:.1} s", idle.as_secs_f64()),
                (_, true) => format!("made the join wait for {:.1} s in all", held.waited.as_secs_f64()),
                _ => {
                    let before = Instant::now();
                    self.inner.room.wait_for(held, INTERRUPT_INTERVAL);
                    held.waited += before.elapsed();
                    if wanted.is_some() {
                        held.waited_wanted += before.elapsed();
                    }
                    continue;
                }
            };
            let others = if wanted.is_some() { ", and other joins waited for its device" } else { "" };
            let advice = match &self.inner.arriving {
                Some(_) => "read the joined rows while sending",
                None => "read faster, let the server keep the result with retain_seconds (--retain-seconds)",
            };
            return Err(Error::Exhausted(format!(
                "the result was dropped: its reader {slow}, {} waited to be read, and memory was full{others}; {advice}, or \
                 raise the server's --host-memory",
                human_bytes(held.bytes),
            )));
        }
    }

    /// Waits a little for memory for the next batch of a consumed result. Batches that readers have
    /// taken free memory once they are sent. Memory has been missing since `since`. Returns true if
    /// memory may still come, and false after the time limit or if no reader can free any.
    ///
    /// # Errors
    /// [`Error::Cancelled`] when the result was released; the interrupt's.
    pub fn wait_for_readers(&self, since: Instant) -> Result<bool> {
        if !self.is_consumed_by_reading() {
            return Ok(false);
        }
        let mut held = self.inner.held.lock();
        self.check_not_released()?;
        self.interrupt.check()?;
        self.inner.room.wait_for(&mut held, INTERRUPT_INTERVAL);
        held.meter.forget_unused();
        Ok(since.elapsed() < self.stall_now())
    }

    /// Maximum time that a writer waits while readers take nothing. Shorter if other joins want its
    /// device.
    fn stall_now(&self) -> Duration {
        self.wanted().map_or(self.inner.stall, |wanted| wanted.stall.min(self.inner.stall))
    }

    fn wanted(&self) -> Option<&BackpressureLimits> {
        self.inner.when_wanted.as_ref().filter(|when_wanted| when_wanted.is_wanted.load(Ordering::Relaxed))
    }

    /// True if the result is empty, if the bytes fit its bound, or if the arena has enough free for
    /// other work.
    fn has_room(&self, held: &SpoolContents, bytes: u64) -> bool {
        let leaves_enough = |budget: &Budget| budget.free_bytes() >= budget.limit_bytes() / ROOM_LEFT_SHARE;
        held.bytes == 0
            || held.bytes + bytes <= self.inner.bytes_max
            || self.inner.budget.as_ref().is_some_and(leaves_enough)
    }

    fn check_not_released(&self) -> Result<()> {
        match &self.inner.progress.borrow().1 {
            SpoolState::Released => Err(Error::Cancelled("the result was released while it was being written".into())),
            SpoolState::Failed(error) => Err(error.clone()),
            _ => Ok(()),
        }
    }

    fn check_readable(&self) -> Result<()> {
        match &self.inner.progress.borrow().1 {
            SpoolState::Released => Err(released()),
            SpoolState::Failed(error) => Err(error.clone()),
            _ => Ok(()),
        }
    }
}

impl std::fmt::Debug for ResultSpool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (batches, state) = self.progress();
        f.debug_struct("ResultSpool").field("batches", &batches).field("state", &state).finish_non_exhaustive()
    }
}

fn released() -> Error {
    Error::NotFound(
        "the result is gone: its lease ended, its job was cancelled, or it had been read and its memory was needed; run the join \
         again, with retain_seconds (--retain-seconds) to keep it"
            .into(),
    )
}
