//! Results that were read in whole, whose memory is released when other work needs it.
//!
//! A lease lets a client read a result again, but few clients do. So a result gives up its memory
//! before a table, a join or another result is refused memory. This needs three conditions: the
//! server kept the result only by default, every row has reached a client, and no reader is open.
//! The result that was read longest ago is released first. A result stays if its client set the
//! time for which it is kept, or renewed the lease.
//!
//! A stream whose client sends and does not read gives up its memory, too (`streams.rs`), after all
//! results that were read. The one that was left unread first ends first.
//!
//! The release also frees the memory of a dropped or replaced table, if the result is the last
//! holder of that memory. A result that only shares memory with current tables frees nothing, and
//! stays.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Weak};
use std::time::Instant;

use parking_lot::Mutex;

use super::{Inner, ResultSpool, SharedRows, SpoolContents, SpoolState};
use crate::memory::{Interrupt, Reclaim};

/// The results that can be evicted, ordered from the one that was read longest ago. Clones share
/// them.
#[derive(Clone, Debug, Default)]
pub struct EvictableResults(Arc<List>);

#[derive(Debug, Default)]
struct List(Mutex<VecDeque<Entry>>);

struct Entry {
    spool: Weak<Inner>,
    owner: String,
}

/// Memory that comes free when a result is released.
struct Holding {
    inner: Arc<Inner>,
    /// For a stream, the time from which it was left unread.
    unread_since: Option<Instant>,
    own_bytes: u64,
    shared: Vec<Share>,
}

/// Rows of tables that a result shares.
struct Share {
    /// Address of the charge for these rows, which identifies them.
    charge: usize,
    bytes: u64,
    /// Number of tables, jobs and results that hold these rows.
    holders: usize,
}

impl std::fmt::Debug for Entry {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Entry").field("owner", &self.owner).finish_non_exhaustive()
    }
}

/// Registration of a result that may be evicted.
#[derive(Clone, Debug)]
pub struct EvictionPermit {
    /// The list that the result joins once it becomes evictable.
    pub results: EvictableResults,
    pub owner: String,
}

impl EvictableResults {
    /// Returns a handle through which a budget reclaims memory of these results, while the list
    /// exists.
    pub(in crate::catalog) fn as_reclaim(&self) -> Weak<dyn Reclaim> {
        let list: Weak<List> = Arc::downgrade(&self.0);
        list
    }

    /// Releases results of `owner` until `bytes` bytes have come free. Returns the bytes that came
    /// free.
    pub(in crate::catalog) fn give_back_of(&self, owner: &str, bytes: u64) -> u64 {
        self.0.give_back(bytes, |entry| entry.owner == owner)
    }

    /// Returns the bytes that results of `owner` would give back.
    pub(in crate::catalog) fn bytes_of(&self, owner: &str) -> u64 {
        self.0.holdings(|entry| entry.owner == owner).iter().map(|holding| holding.own_bytes).sum()
    }

    pub(super) fn add(&self, spool: &Arc<Inner>, owner: &str) {
        let mut entries = self.0.0.lock();
        entries.retain(|entry| entry.spool.strong_count() > 0 && !Weak::ptr_eq(&entry.spool, &Arc::downgrade(spool)));
        entries.push_back(Entry { spool: Arc::downgrade(spool), owner: owner.into() });
    }

    pub(super) fn remove(&self, spool: &Arc<Inner>) {
        self.0.0.lock().retain(|entry| !Weak::ptr_eq(&entry.spool, &Arc::downgrade(spool)));
    }
}

impl List {
    /// Returns the holdings of the results that can be evicted, ordered from the one read longest
    /// ago, and then those of streams.
    fn holdings(&self, is_wanted: impl Fn(&Entry) -> bool) -> Vec<Holding> {
        let spools: Vec<_> = {
            let entries = self.0.lock();
            entries.iter().filter(|entry| is_wanted(entry)).filter_map(|entry| entry.spool.upgrade()).collect()
        };
        let mut holdings: Vec<Holding> = spools.into_iter().filter_map(Holding::of).collect();
        holdings.sort_by_key(|holding| holding.unread_since);
        holdings
    }

    fn give_back(&self, bytes: u64, is_wanted: impl Fn(&Entry) -> bool) -> u64 {
        let holdings = self.holdings(is_wanted);
        let shared = held_by_nobody_else(&holdings);
        let mut given = 0;
        for Holding { inner, own_bytes, shared: shares, .. } in holdings {
            if given >= bytes {
                break;
            }
            if own_bytes > 0 || shares.iter().any(|share| shared.contains_key(&share.charge)) {
                given += ResultSpool { inner, interrupt: Interrupt::default() }.evict();
            }
        }
        given
    }
}

impl Holding {
    /// Returns `None` for a result that is locked: a reader, a writer or a release is at work on
    /// it. Also for a stream that is being read.
    fn of(inner: Arc<Inner>) -> Option<Self> {
        // Waiting for the lock could deadlock: the thread that holds it may be asking for memory.
        let held = inner.held.try_lock()?;
        let unread_since = held.unread_since.filter(|_| inner.arriving.is_some());
        if inner.arriving.is_some() && !inner.is_left_unread(&held) {
            return None;
        }
        let share = |rows: &SharedRows| Share {
            charge: Arc::as_ptr(rows.charge()).addr(),
            bytes: rows.charge().bytes(),
            holders: Arc::strong_count(rows.charge()),
        };
        let own_bytes = held.bytes + inner.arriving_bytes();
        let shared = held.shared.iter().map(share).collect();
        drop(held);
        Some(Self { inner, unread_since, own_bytes, shared })
    }
}

/// Returns the bytes of shared table rows that only results in `holdings` hold, by address of the
/// charge.
fn held_by_nobody_else(holdings: &[Holding]) -> HashMap<usize, u64> {
    let mut known: HashMap<usize, (usize, &Share)> = HashMap::new();
    for share in holdings.iter().flat_map(|holding| &holding.shared) {
        known.entry(share.charge).or_insert((0, share)).0 += 1;
    }
    let free = known.into_iter().filter(|(_, (count, share))| *count == share.holders);
    free.map(|(charge, (_, share))| (charge, share.bytes)).collect()
}

impl Reclaim for List {
    fn reclaimable_bytes(&self) -> u64 {
        let holdings = self.holdings(|_| true);
        let own: u64 = holdings.iter().map(|holding| holding.own_bytes).sum();
        own.saturating_add(held_by_nobody_else(&holdings).values().sum())
    }

    fn reclaim(&self, bytes: u64) -> u64 {
        self.give_back(bytes, |_| true)
    }
}

/// Facts about the readers and the lease of a result that decide whether it can be evicted.
#[derive(Debug, Default)]
pub(super) struct Reading {
    pub(super) readers: usize,
    /// True if every row has reached a client.
    is_whole: bool,
    /// True if a client has renewed the lease.
    is_renewed: bool,
}

impl ResultSpool {
    /// Records that every row has reached a client. From then on the result becomes evictable while
    /// no reader is open, if its options allow it.
    pub fn was_read(&self) {
        self.change_reading(|reading| reading.is_whole = true);
    }

    /// True if the result's memory may be released when other work needs it.
    pub fn is_evictable(&self) -> bool {
        self.inner.is_evictable(&self.inner.held.lock())
    }

    pub(super) fn reader_opened(&self) {
        self.change_reading(|reading| reading.readers += 1);
    }

    pub(super) fn reader_closed(&self) {
        self.change_reading(|reading| reading.readers -= 1);
    }

    pub(super) fn was_renewed(&self) {
        self.change_reading(|reading| reading.is_renewed = true);
    }

    fn change_reading(&self, change: impl FnOnce(&mut Reading)) {
        let (is_evictable, unread) = {
            let mut held = self.inner.held.lock();
            change(&mut held.reading);
            let unread = held.keep_table_while_read();
            (self.inner.is_evictable(&held), unread)
        };
        drop(unread);
        let Some(EvictionPermit { results, owner }) = &self.inner.eviction else { return };
        // See `list_if_unread`.
        if self.inner.arriving.is_some() {
            return;
        }
        if is_evictable {
            results.add(&self.inner, owner);
        } else {
            results.remove(&self.inner);
        }
    }

    /// Releases all batches, unless the result is no longer evictable, for example because a reader
    /// has opened it. Returns the bytes that came free.
    fn evict(&self) -> u64 {
        // The writer of a stream may hold the lock, and wait for memory.
        let Some(held) = self.inner.held.try_lock().filter(|held| self.inner.is_evictable(held)) else { return 0 };
        if self.inner.arriving.is_some() {
            return self.end_unread(held);
        }
        let last = held.shared.iter().filter(|rows| Arc::strong_count(rows.charge()) == 1);
        let bytes = held.bytes + last.map(|rows| rows.charge().bytes()).sum::<u64>();
        self.release_held(held);
        if let Some(EvictionPermit { results, .. }) = &self.inner.eviction {
            results.remove(&self.inner);
        }
        tracing::info!(bytes, "released a result that was read, because its memory is needed");
        bytes
    }
}

impl Inner {
    pub(super) fn is_evictable(&self, held: &SpoolContents) -> bool {
        if self.arriving.is_some() {
            return self.is_left_unread(held);
        }
        let Reading { readers, is_whole, is_renewed } = held.reading;
        self.eviction.is_some()
            && is_whole
            && readers == 0
            && !is_renewed
            && !held.batches.is_empty()
            && self.progress.borrow().1 == SpoolState::Complete
    }
}
