//! Results that were read in whole, and whose memory goes to whoever needs it.
//!
//! A lease lets a client read a result again; few do. So a result that was kept only because the server keeps all of them gives
//! its memory up before a table, a join or another result is refused for want of it: once every row has reached a client,
//! while nobody reads it, and the one that was read longest ago first. Whoever said how long it is to be kept, or has renewed
//! its lease, was promised that it stays.

use std::collections::VecDeque;
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use super::{Held, Inner, ResultSpool, SpoolState};
use crate::memory::Reclaim;

/// The results that give way, the one that was read longest ago first. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct SpentResults(Arc<List>);

#[derive(Debug, Default)]
struct List(Mutex<VecDeque<Entry>>);

struct Entry {
    spool: Weak<Inner>,
    owner: String,
    bytes: u64,
}

impl std::fmt::Debug for Entry {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Entry").field("owner", &self.owner).field("bytes", &self.bytes).finish_non_exhaustive()
    }
}

/// What a result that may give way is known by.
#[derive(Clone, Debug)]
pub struct Spending {
    /// Where it is listed once it does.
    pub results: SpentResults,
    /// Whose it is.
    pub owner: String,
}

impl SpentResults {
    /// Who asks for memory is given theirs, for as long as the list is there.
    pub(in crate::catalog) fn as_reclaim(&self) -> Weak<dyn Reclaim> {
        let list: Weak<List> = Arc::downgrade(&self.0);
        list
    }

    /// Takes the memory of results of that owner's until it is so many bytes; how many it were.
    pub(in crate::catalog) fn give_back_of(&self, owner: &str, bytes: u64) -> u64 {
        self.0.give_back(bytes, |entry| entry.owner == owner)
    }

    fn add(&self, spool: &Arc<Inner>, owner: &str, bytes: u64) {
        let mut entries = self.0.0.lock();
        entries.retain(|entry| entry.spool.strong_count() > 0 && !Weak::ptr_eq(&entry.spool, &Arc::downgrade(spool)));
        entries.push_back(Entry { spool: Arc::downgrade(spool), owner: owner.into(), bytes });
    }

    fn remove(&self, spool: &Arc<Inner>) {
        self.0.0.lock().retain(|entry| !Weak::ptr_eq(&entry.spool, &Arc::downgrade(spool)));
    }
}

impl List {
    fn give_back(&self, bytes: u64, is_wanted: impl Fn(&Entry) -> bool) -> u64 {
        let mut given = 0;
        while given < bytes {
            let first = {
                let mut entries = self.0.lock();
                let place = entries.iter().position(&is_wanted);
                place.and_then(|place| entries.remove(place))
            };
            // Not while the list is locked: a result is listed by whoever is done with it.
            let Some(entry) = first else { break };
            given += entry.spool.upgrade().map_or(0, |inner| ResultSpool { inner }.give_up());
        }
        given
    }
}

impl Reclaim for List {
    fn reclaimable_bytes(&self) -> u64 {
        self.0.lock().iter().map(|entry| entry.bytes).sum()
    }

    fn reclaim(&self, bytes: u64) -> u64 {
        self.give_back(bytes, |_| true)
    }
}

/// Who has read a result, and what was promised to them.
#[derive(Debug, Default)]
pub(super) struct Reading {
    /// Readers that are open.
    readers: usize,
    /// Whether every row has reached a client.
    is_whole: bool,
    /// Whether somebody has renewed the lease.
    is_renewed: bool,
}

impl ResultSpool {
    /// Every row of it has reached a client. From now on it gives way while nobody reads it, if it may at all.
    pub fn was_read(&self) {
        self.change_reading(|reading| reading.is_whole = true);
    }

    /// Whether its memory goes to whoever needs it.
    pub fn gives_way(&self) -> bool {
        self.inner.gives_way(&self.inner.held.lock())
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
        let Some(Spending { results, owner }) = &self.inner.spending else { return };
        let (gives_way, bytes) = {
            let mut held = self.inner.held.lock();
            change(&mut held.reading);
            (self.inner.gives_way(&held), held.bytes)
        };
        if gives_way {
            results.add(&self.inner, owner, bytes);
        } else {
            results.remove(&self.inner);
        }
    }

    /// Lets go of all batches, unless somebody came to read them. How many bytes it were.
    fn give_up(&self) -> u64 {
        let held = self.inner.held.lock();
        if !self.inner.gives_way(&held) {
            return 0;
        }
        let bytes = held.bytes;
        self.release_held(held);
        tracing::info!(bytes, "the memory of a result that was read is needed");
        bytes
    }
}

impl Inner {
    fn gives_way(&self, held: &Held) -> bool {
        let Reading { readers, is_whole, is_renewed } = held.reading;
        self.spending.is_some()
            && is_whole
            && readers == 0
            && !is_renewed
            && held.bytes > 0
            && self.progress.borrow().1 == SpoolState::Complete
    }
}
