//! The result of a join: batches that are written once, read by several readers, and released by a lease.
//!
//! ```text
//!   retained:   push ─► 0 1 2 3 4 5 …      reader i of n clones i, i + n, …   all stay until the lease ends, or memory
//!                                          or a part of them, 0 1 2 (parts.rs)     is needed and all was read (spent.rs)
//!   consumed:   push ─► … 4 5 ─► queue ─►  each reader takes the next one     each goes with its reader
//! ```
//!
//! Batches may share memory with the tables that they were made of. Such columns are no bytes of the result's; but they keep the
//! tables' memory where it is, so whoever is charged for a table is charged until the result lets go of it.
//!
//! A result that is kept can be read again and in parallel, and is bounded: what does not fit is an error. A result that
//! is consumed as it is read (`retain_seconds` 0) can be of any size, and every batch goes to exactly one reader. A writer
//! that is faster than its readers writes on while memory has room, since it holds a device. When there is none left it
//! waits for them, but not for long, and less when others wait for the device: then the result fails, and they get it. (To give
//! the device back and take it again later, a join would have to leave what it has arranged in the device's memory, where the next
//! one needs the room, or arrange it anew.) Readers
//! share one queue rather than fixed shares of it, so that a client which reads its endpoints one after the other does
//! not wait for batches that are behind those of its later endpoints.

mod parts;
mod reading;
mod spent;

use std::collections::{BTreeSet, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant, SystemTime};

use arrow::array::RecordBatch;
use arrow::datatypes::SchemaRef;
use parking_lot::{Condvar, Mutex, MutexGuard};
use tokio::sync::watch;

use parts::Parts;
pub use reading::ResultReader;
use spent::Reading;
pub use spent::{Spending, SpentResults};

use super::adopt::{Adopter, Meter};
use super::{Charge, NameReservation, Table};
use crate::memory::{Arena, Budget, Interrupt, human_bytes};
use crate::{Context, Error, Result};

/// How often a writer that waits for a reader looks whether it should stop.
const INTERRUPT_INTERVAL: Duration = Duration::from_millis(20);

/// The share of the arena, one in this many, that results which wait for their readers leave to others: to tables, and to
/// the batches that joins are making.
const ROOM_LEFT_SHARE: u64 = 4;

/// How far a result is.
#[derive(Clone, Debug, PartialEq)]
pub enum SpoolState {
    /// More batches may come.
    Open,
    /// All batches are there, or were.
    Complete,
    /// The join failed; readers see this error.
    Failed(Error),
    /// The batches are gone: the lease ended, or somebody let go of them.
    Released,
}

/// How long a writer waits for readers while others wait for the device that it holds.
///
/// A reader that cannot keep up must not keep them waiting; but it may well be the better client, with a long result that
/// needs no memory, so it is given what a pause of a client that works takes, and not less.
#[derive(Clone, Debug)]
pub struct GiveWay {
    /// Whether others wait for the device now.
    pub is_wanted: Arc<AtomicBool>,
    /// How long it waits while readers take nothing.
    pub stall: Duration,
    /// How long it waits in all, counting the time during which others did.
    pub wait_max: Duration,
}

impl GiveWay {
    /// When the flag is raised: after 5 s without a read, which is longer than a client collects garbage or the network repairs
    /// a loss, and after 30 s in all, a tenth of what it has when nobody else wants the device.
    pub fn when(is_wanted: Arc<AtomicBool>) -> Self {
        Self { is_wanted, stall: Duration::from_secs(5), wait_max: Duration::from_secs(30) }
    }
}

/// How a result is kept.
pub struct SpoolOptions {
    /// How long it is kept once it is complete or was last read, whichever is later; zero: each batch until it is read.
    pub retain: Duration,
    /// Bytes that it may hold at a time. One that is consumed may hold more while the arena has room.
    pub bytes_max: u64,
    /// How long the writer of a result that is consumed waits for readers that take nothing before it fails.
    pub stall: Duration,
    /// How long it waits for readers in all, however much they take: it holds a device all the while.
    pub wait_max: Duration,
    /// When it waits less than that; `None`: never.
    pub give_way: Option<GiveWay>,
    /// Where batches are put that are not in an arena yet; `None` takes them as they come.
    pub arena: Option<Arena>,
    /// What its bytes are charged to.
    pub charge: Option<Charge>,
    /// The tables that it is made of, with which its batches may share memory.
    pub tables: Vec<Weak<Table>>,
    /// Looked at while the writer waits for a reader.
    pub interrupt: Interrupt,
    /// When its memory goes to whoever needs it once it was read; `None`: not before its lease ends.
    pub spending: Option<Spending>,
}

impl Default for SpoolOptions {
    fn default() -> Self {
        Self {
            retain: Duration::from_secs(300),
            bytes_max: u64::MAX,
            stall: Duration::from_secs(30),
            wait_max: Duration::from_secs(300),
            give_way: None,
            arena: None,
            charge: None,
            tables: Vec::new(),
            interrupt: Interrupt::default(),
            spending: None,
        }
    }
}

/// Batches between the join that writes them and the clients that read them. Clones share them.
#[derive(Clone)]
pub struct ResultSpool {
    inner: Arc<Inner>,
}

struct Inner {
    schema: SchemaRef,
    retain: Duration,
    bytes_max: u64,
    stall: Duration,
    wait_max: Duration,
    give_way: Option<GiveWay>,
    tables: Vec<Weak<Table>>,
    /// Of the arena that it is kept in.
    budget: Option<Budget>,
    interrupt: Interrupt,
    spending: Option<Spending>,
    held: Mutex<Held>,
    /// Told when batches were taken, or the result was released.
    room: Condvar,
    /// Number of batches pushed and state; readers wait on it. Changed while `held` is locked.
    progress: watch::Sender<(usize, SpoolState)>,
}

/// What the result holds.
#[derive(Default)]
struct Held {
    /// By index less `taken`, each with the bytes of its own. `None`: taken out of turn.
    batches: VecDeque<Option<(RecordBatch, u64)>>,
    /// Batches that were taken and are no longer in `batches`.
    taken: usize,
    bytes: u64,
    pushed_bytes: u64,
    rows: u64,
    /// Endpoints of a result that is consumed, which somebody has begun to read.
    begun: BTreeSet<usize>,
    parts: Parts,
    reading: Reading,
    adopter: Option<Adopter>,
    meter: Meter,
    charge: Option<Charge>,
    /// What the tables cost whose memory is shared; each once.
    shared: Vec<SharedRows>,
    /// Since when readers have taken nothing.
    last_taken: Option<Instant>,
    /// How long the writer has waited for readers.
    waited: Duration,
    /// For how much of that others waited for the device.
    waited_wanted: Duration,
    /// When the lease ends, once the result is complete.
    expires: Option<SystemTime>,
}

/// Rows of a table with which a result shares memory.
#[derive(Debug)]
struct SharedRows {
    table: Weak<Table>,
    charge: Arc<Charge>,
}

impl Held {
    /// Bytes of tables that are gone, and whose memory this result keeps.
    fn bytes_of_gone_tables(&self) -> u64 {
        let gone = self.shared.iter().filter(|rows| rows.table.strong_count() == 0);
        gone.map(|rows| rows.charge.bytes()).sum()
    }

    /// Forgets all batches and what they cost; the caller drops them once nothing is locked.
    fn let_go(&mut self) -> VecDeque<Option<(RecordBatch, u64)>> {
        let batches = std::mem::take(&mut self.batches);
        self.taken += batches.len();
        self.bytes = 0;
        self.charge = None;
        self.shared.clear();
        self.adopter = None;
        self.meter = Meter::default();
        batches
    }
}

impl ResultSpool {
    /// An empty result with the default options.
    pub fn new(schema: SchemaRef) -> Self {
        Self::with_options(schema, SpoolOptions::default())
    }

    /// An empty result.
    pub fn with_options(schema: SchemaRef, options: SpoolOptions) -> Self {
        let SpoolOptions { retain, bytes_max, stall, wait_max, give_way, arena, charge, tables, interrupt, spending } =
            options;
        let (progress, _) = watch::channel((0, SpoolState::Open));
        let budget = arena.as_ref().map(|arena| arena.budget().clone());
        let held = Mutex::new(Held { adopter: arena.map(Adopter::new), charge, ..Held::default() });
        let room = Condvar::new();
        let inner = Inner {
            schema,
            retain,
            bytes_max,
            stall,
            wait_max,
            give_way,
            tables,
            budget,
            interrupt,
            spending,
            held,
            room,
            progress,
        };
        Self { inner: Arc::new(inner) }
    }

    /// Columns and their types.
    pub fn schema(&self) -> &SchemaRef {
        &self.inner.schema
    }

    /// How long it is kept once it is complete or was last read.
    pub fn retained_for(&self) -> Duration {
        self.inner.retain
    }

    /// Whether each batch goes to one reader and is gone then.
    pub fn is_consumed_by_reading(&self) -> bool {
        self.inner.retain.is_zero()
    }

    /// Adds a batch. When the result is consumed as it is read, waits while there is no room.
    ///
    /// # Errors
    /// [`Error::Exhausted`] when there is no room for it, and when readers make none for too long;
    /// [`Error::Cancelled`] when the result was released; whatever the interrupt says.
    pub fn push(&self, batch: RecordBatch) -> Result<()> {
        self.push_sharing(batch, &[])
    }

    /// As [`ResultSpool::push`], of a batch whose columns marked in `shared` lie in [`SpoolOptions::tables`].
    ///
    /// # Errors
    /// As [`ResultSpool::push`].
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
            bytes += if shared.get(index) == Some(&true) { 0 } else { of_column };
        }
        if self.is_consumed_by_reading() {
            self.wait_for_room(&mut held, bytes)?;
        } else if held.bytes + bytes > self.inner.bytes_max {
            let limit = human_bytes(self.inner.bytes_max);
            return Err(Error::Exhausted(format!("the result is too large: it may take {limit}")));
        }
        self.check_not_released()?;
        if let (Some(charge), false) = (&mut held.charge, self.is_consumed_by_reading()) {
            charge.try_grow(bytes).context(|| "keeping the result of the join")?;
        }
        if shared.contains(&true) && held.shared.is_empty() {
            // The join that pushes has the tables.
            for table in self.inner.tables.iter().filter_map(Weak::upgrade) {
                for charge in &table.charges {
                    if !held.shared.iter().any(|rows| Arc::ptr_eq(&rows.charge, charge)) {
                        let charge = charge.clone();
                        held.shared.push(SharedRows { table: Arc::downgrade(&table), charge });
                    }
                }
            }
        }
        held.bytes += bytes;
        held.pushed_bytes += all_bytes;
        held.rows += batch.num_rows() as u64;
        held.batches.push_back(Some((batch, bytes)));
        let count = held.taken + held.batches.len();
        held.parts.push(count, all_bytes);
        self.inner.progress.send_modify(|progress| progress.0 = count);
        Ok(())
    }

    /// Says that no batch follows: the join is complete, or failed. A result that was released stays so. The lease begins.
    /// A part of a result is good for nothing: the batches of a join that failed go at once, and readers see its error.
    pub fn finish(&self, outcome: Result<()>) {
        let mut held = self.inner.held.lock();
        let state = outcome.map_or_else(SpoolState::Failed, |()| SpoolState::Complete);
        held.expires = Some(SystemTime::now() + self.inner.retain);
        // Nothing is counted any more, so nothing is held for that.
        let meter = std::mem::take(&mut held.meter);
        let batches = if matches!(state, SpoolState::Failed(_)) { held.let_go() } else { VecDeque::new() };
        self.inner.progress.send_modify(|progress| {
            if progress.1 == SpoolState::Open {
                progress.1 = state;
            }
        });
        drop(held);
        self.inner.room.notify_all();
        drop((batches, meter));
    }

    /// Lets go of all batches, now. Readers find them gone; a writer is stopped.
    pub fn release(&self) {
        self.release_held(self.inner.held.lock());
    }

    fn release_held(&self, mut held: MutexGuard<'_, Held>) {
        let batches = held.let_go();
        self.inner.progress.send_modify(|progress| progress.1 = SpoolState::Released);
        drop(held);
        self.inner.room.notify_all();
        drop(batches);
    }

    /// Number of batches that were pushed, and state.
    pub fn progress(&self) -> (usize, SpoolState) {
        self.inner.progress.borrow().clone()
    }

    /// Rows that were pushed.
    pub fn pushed_rows(&self) -> u64 {
        self.inner.held.lock().rows
    }

    /// Bytes that were pushed, with those that are shared with tables.
    pub fn pushed_bytes(&self) -> u64 {
        self.inner.held.lock().pushed_bytes
    }

    /// Bytes that the result holds now, beside those that it shares with tables.
    pub fn held_bytes(&self) -> u64 {
        self.inner.held.lock().bytes
    }

    /// Bytes that come free when the result goes: those that it holds, and those of tables that are gone and stay because it shares
    /// their memory.
    pub fn returning_bytes(&self) -> u64 {
        let held = self.inner.held.lock();
        held.bytes.saturating_add(held.bytes_of_gone_tables())
    }

    /// As [`ResultSpool::returning_bytes`], of a result whose batches wait for readers: it is complete and does not give way, or
    /// each batch goes with its reader. 0 of any other, and of one that somebody is at work on: who asks may be that one.
    pub fn waiting_bytes(&self) -> u64 {
        if !self.is_consumed_by_reading() && self.progress().1 != SpoolState::Complete {
            return 0;
        }
        let Some(held) = self.inner.held.try_lock() else { return 0 };
        match self.inner.gives_way(&held) {
            true => 0,
            false => held.bytes.saturating_add(held.bytes_of_gone_tables()),
        }
    }

    /// When the lease ends; `None` while the join runs. Reading extends it.
    pub fn expires(&self) -> Option<SystemTime> {
        self.inner.held.lock().expires
    }

    /// Extends the lease to `duration` from now; a lease that ends later stays as it is. From then on the result gives way to
    /// nobody. Answers when the lease ends; `None` while the join runs, since it has not begun.
    ///
    /// # Errors
    /// [`Error::NotFound`] when the result is released.
    pub fn renew(&self, duration: Duration) -> Result<Option<SystemTime>> {
        self.was_renewed();
        let mut held = self.inner.held.lock();
        self.check_readable()?;
        held.expires = held.expires.map(|expires| expires.max(SystemTime::now() + duration));
        Ok(held.expires)
    }

    /// Whether the result is good for nothing any more, so that its owner should [`ResultSpool::release`] and forget it: it
    /// was released, or its lease ended. One that is consumed has no lease; it stays for as long as a writer would wait for a
    /// reader, so that whoever reads its endpoints one after the other finds each of them, and what failed can be told.
    pub fn is_expired(&self, now: SystemTime) -> bool {
        let held = self.inner.held.lock();
        let grace = if self.is_consumed_by_reading() { self.inner.stall } else { Duration::ZERO };
        match self.inner.progress.borrow().1 {
            SpoolState::Released => true,
            SpoolState::Open => false,
            SpoolState::Complete | SpoolState::Failed(_) => held.expires.is_some_and(|expires| expires + grace <= now),
        }
    }

    /// Whether there is nothing to fetch any more: it was released, or it is consumed by reading and readers have taken all of it.
    /// Whoever has its endpoints is told so until [`ResultSpool::is_expired`].
    pub fn is_gone(&self) -> bool {
        let held = self.inner.held.lock();
        // One without rows is there until somebody has seen that it has none.
        let is_taken = held.batches.is_empty() && (held.taken > 0 || !held.begun.is_empty());
        match self.inner.progress.borrow().1 {
            SpoolState::Released => true,
            SpoolState::Complete => self.is_consumed_by_reading() && is_taken,
            SpoolState::Open | SpoolState::Failed(_) => false,
        }
    }

    /// Makes the result appear as a table, under a name that was reserved for it; the rows are not copied, and statistics
    /// are taken. The writer calls it after its last batch, and before it says that the result is complete, so that whoever
    /// sees the end of the result finds the table. The result can still be read for its lease.
    ///
    /// # Errors
    /// [`Error::Precondition`] when the result has failed or is gone, or its rows are consumed by reading; else as
    /// [`NameReservation::publish`].
    pub fn into_table(&self, mut name: NameReservation, owner: &str) -> Result<Arc<Table>> {
        let is_whole = matches!(self.progress().1, SpoolState::Open | SpoolState::Complete);
        if !is_whole || self.is_consumed_by_reading() {
            return Err(Error::Precondition(format!(
                "the result cannot become table {:?}: it failed, or is not kept",
                name.name()
            )));
        }
        let (batches, charge): (Vec<_>, _) = {
            let mut held = self.inner.held.lock();
            let batches = held.batches.iter().flatten().map(|(batch, _)| batch.clone());
            (batches.collect(), held.charge.take())
        };
        let mut table = Table::from_batches(name.name(), self.schema().clone(), batches)?;
        let charge = match charge {
            Some(charge) => charge,
            None => {
                let mut charge = name.catalog().charge(owner);
                charge.try_grow(table.bytes).context(|| format!("keeping the result as table {:?}", name.name()))?;
                charge
            }
        };
        table.owner = owner.into();
        table.charges = vec![Arc::new(charge)];
        name.publish(table)
    }

    /// Returns when there is room for those bytes, which are charged then.
    fn wait_for_room(&self, held: &mut MutexGuard<'_, Held>, bytes: u64) -> Result<()> {
        let started = Instant::now();
        loop {
            self.check_not_released()?;
            if self.has_room(held, bytes) {
                let Some(charge) = &mut held.charge else { return Ok(()) };
                match charge.try_grow(bytes) {
                    // Nothing is held that readers could make room with.
                    Err(error) if held.bytes == 0 => return Err(error.context("passing on the result of the join")),
                    Err(_) => (),
                    Ok(()) => return Ok(()),
                }
            }
            self.inner.interrupt.check()?;
            // What readers are done with makes room.
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
            return Err(Error::Exhausted(format!(
                "the reader of this result {slow} while {} waited for it and memory had no room for more{others}; read \
                 faster, let the server keep the result with retain_seconds (--retain-seconds), or raise the server's --host-memory",
                human_bytes(held.bytes),
            )));
        }
    }

    /// There is no memory for the next batch of a result that is consumed as it is read, and none has come since `since`: waits a
    /// little, since what readers have taken is free once it is sent. Answers whether it may still come: not when readers were given
    /// as long as they are by [`ResultSpool::push`].
    ///
    /// # Errors
    /// [`Error::Cancelled`] when the result was released; whatever the interrupt says.
    pub fn wait_for_readers(&self, since: Instant) -> Result<bool> {
        if !self.is_consumed_by_reading() {
            return Ok(false);
        }
        let mut held = self.inner.held.lock();
        self.check_not_released()?;
        self.inner.interrupt.check()?;
        self.inner.room.wait_for(&mut held, INTERRUPT_INTERVAL);
        held.meter.forget_unused();
        Ok(since.elapsed() < self.stall_now())
    }

    /// How long a writer waits for readers that take nothing: less when others wait for its device.
    fn stall_now(&self) -> Duration {
        self.wanted().map_or(self.inner.stall, |wanted| wanted.stall.min(self.inner.stall))
    }

    fn wanted(&self) -> Option<&GiveWay> {
        self.inner.give_way.as_ref().filter(|give_way| give_way.is_wanted.load(Ordering::Relaxed))
    }

    /// Within the bound there is; beyond it, while the arena keeps enough for others.
    fn has_room(&self, held: &Held, bytes: u64) -> bool {
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
         again, with retain_seconds (--retain-seconds) if it must stay"
            .into(),
    )
}
