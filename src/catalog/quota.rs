//! Memory and tables that each tenant holds, and the limits on both.
//!
//! Rows of a table are charged to the owner of the table while the table is in the catalog. Rows of
//! a table that was dropped or replaced are charged to a tenant that still holds them: a reader, a
//! job or a result. So a reader that stops in mid-stream takes memory from its own account.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use parking_lot::Mutex;

use super::EvictableResults;
use crate::memory::{Budget, Reservation, human_bytes};
use crate::{Error, Result};

/// Limits on the holdings of a tenant. All tenants have the same limits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TenantLimits {
    /// Bytes of tables, uploads under way and results; `None` for no limit.
    pub bytes: Option<u64>,
    /// Bytes of results alone, without those that become tables; `None` for no limit.
    pub results_bytes: Option<u64>,
    /// `None` for no limit.
    pub tables: Option<usize>,
}

/// Current holdings of a tenant.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TenantUsage {
    /// Bytes of tables, uploads under way and results. A table that was dropped or replaced counts
    /// until its last reader is done with it. It then counts for the reader's tenant.
    pub bytes: u64,
    pub tables: usize,
}

/// The bytes of every tenant. Clones share them.
#[derive(Clone, Debug)]
pub(super) struct Ledger {
    counted: Counted,
    bytes_limit: Option<u64>,
    bytes: Arc<Mutex<HashMap<String, u64>>>,
    evictable: EvictableResults,
}

/// Objects whose bytes a ledger counts.
#[derive(Clone, Copy, Debug)]
enum Counted {
    All,
    Results,
}

impl Ledger {
    /// Returns an empty ledger of all that tenants hold. Results in `evictable` are released before
    /// a tenant is refused memory.
    pub(super) fn new(limits: TenantLimits, evictable: EvictableResults) -> Self {
        Self { counted: Counted::All, bytes_limit: limits.bytes, bytes: Arc::default(), evictable }
    }

    /// Returns an empty ledger of the results of tenants, like [`Ledger::new`].
    pub(super) fn of_results(limits: TenantLimits, evictable: EvictableResults) -> Self {
        Self { counted: Counted::Results, bytes_limit: limits.results_bytes, bytes: Arc::default(), evictable }
    }

    /// Results that are released before a tenant is refused memory.
    pub(super) fn evictable(&self) -> &EvictableResults {
        &self.evictable
    }

    /// Returns a charge of zero bytes on that tenant's account.
    pub(super) fn charge(&self, owner: &str) -> Charge {
        Charge {
            ledger: self.clone(),
            owner: owner.into(),
            payer: Mutex::new(Payer { name: owner.into(), tables: 0, holders: BTreeMap::new() }),
            bytes: 0,
            as_result: None,
            heap: None,
        }
    }

    pub(super) fn bytes(&self, owner: &str) -> u64 {
        self.bytes.lock().get(owner).copied().unwrap_or(0)
    }

    /// Returns the bytes that a tenant may still add; `None` for no limit.
    pub(super) fn room(&self, owner: &str) -> Option<u64> {
        Some(self.bytes_limit?.saturating_sub(self.bytes(owner)))
    }

    /// Returns the bytes that a tenant may still add, if evictable results give back theirs.
    pub(super) fn room_with_evictable(&self, owner: &str) -> Option<u64> {
        let kept = self.bytes(owner).saturating_sub(self.evictable.bytes_of(owner));
        Some(self.bytes_limit?.saturating_sub(kept))
    }

    /// Releases evictable results of a tenant that holds more than its limit. Streams may add bytes
    /// beyond it ([`Charge::grow`]).
    pub(super) fn relieve(&self, owner: &str) {
        let over = self.bytes_limit.map_or(0, |limit| self.bytes(owner).saturating_sub(limit));
        if over > 0 {
            self.evictable.give_back_of(owner, over);
        }
    }

    pub(super) fn owners(&self) -> Vec<String> {
        self.bytes.lock().keys().cloned().collect()
    }

    /// Moves bytes from one account to another, whatever the limits: the memory is taken already.
    fn transfer(&self, bytes: u64, from: &str, to: &str) {
        if bytes == 0 || from == to {
            return;
        }
        let mut all = self.bytes.lock();
        subtract(&mut all, from, bytes);
        *all.entry(to.into()).or_default() += bytes;
    }

    fn refusal(&self, owner: &str, held_bytes: u64, bytes: u64, limit_bytes: u64) -> Error {
        let (held, more, limit) = (human_bytes(held_bytes), human_bytes(bytes), human_bytes(limit_bytes));
        Error::Exhausted(match self.counted {
            Counted::All => format!(
                "tenant {owner:?} holds {held} of tables, uploads and results, and {more} more would exceed its limit of \
                 {limit}; drop a table, release a result, or raise the server's --tenant-memory"
            ),
            Counted::Results => format!(
                "tenant {owner:?} holds {held} of results, and {more} more would exceed its limit of {limit}; release a \
                 result, fetch it as it is made with retain_seconds 0 (--retain-seconds 0), or raise the server's \
                 --tenant-results"
            ),
        })
    }
}

fn subtract(all: &mut HashMap<String, u64>, owner: &str, bytes: u64) {
    if let Some(held) = all.get_mut(owner) {
        *held -= bytes;
        if *held == 0 {
            all.remove(owner);
        }
    }
}

/// Returns about the memory outside the arena of a batch with that number of arrays, in bytes.
/// Arrays inside of others count.
pub(super) fn batch_heap_bytes(arrays: u64) -> u64 {
    /// Memory of a batch and of its place in the arena.
    const BATCH_BYTES: u64 = 512;
    /// Memory of an array without its buffers.
    const ARRAY_BYTES: u64 = 192;
    BATCH_BYTES + arrays * ARRAY_BYTES
}

/// Refusal: the tenant's account has no room.
struct Full {
    held_bytes: u64,
    limit_bytes: u64,
}

/// Bytes on a tenant's account. Dropping the charge subtracts them.
#[derive(Debug)]
pub struct Charge {
    ledger: Ledger,
    owner: String,
    payer: Mutex<Payer>,
    bytes: u64,
    /// Same bytes in the ledger of results.
    as_result: Option<Box<Charge>>,
    /// Host memory outside the arena.
    heap: Option<Reservation>,
}

/// Tenant that pays for a charge, and those that may have to.
#[derive(Debug)]
struct Payer {
    name: String,
    /// Tables in the catalog that have these rows.
    tables: usize,
    /// Tenants that hold the rows, with the number of their holders.
    holders: BTreeMap<String, usize>,
}

impl Charge {
    /// Adds memory outside the arena to the charge, and reserves it in the host memory.
    ///
    /// # Errors
    /// [`Error::Exhausted`] when the tenant's limit or the budget is exceeded.
    pub(super) fn try_grow_heap(&mut self, bytes: u64, host_memory: &Budget, purpose: &str) -> Result<()> {
        self.try_grow(bytes)?;
        let reserved = match &mut self.heap {
            Some(heap) => heap.try_grow(bytes, purpose),
            None => host_memory.reserve(bytes, purpose).map(|heap| self.heap = Some(heap)),
        };
        reserved.inspect_err(|_| self.shrink(bytes))
    }

    /// Counts later bytes in the ledger of results too.
    pub(super) fn with_result_in(mut self, results: &Ledger) -> Self {
        self.as_result = Some(Box::new(results.charge(&self.owner)));
        self
    }

    /// Ends the counting as a result: the result has become a table.
    pub(super) fn becomes_table(&mut self) {
        self.as_result = None;
    }

    /// Returns the tenant whose tables, uploads or results are charged.
    pub fn owner(&self) -> &str {
        &self.owner
    }

    /// Adds `bytes` to the charge.
    ///
    /// # Errors
    /// [`Error::Exhausted`] when a limit of the tenant is exceeded; nothing is added then.
    pub fn try_grow(&mut self, bytes: u64) -> Result<()> {
        while let Err(Full { held_bytes, limit_bytes }) = self.try_add(bytes) {
            let missing = held_bytes.saturating_add(bytes) - limit_bytes;
            if bytes > limit_bytes || self.ledger.evictable.give_back_of(&self.owner, missing) == 0 {
                return Err(self.ledger.refusal(&self.owner, held_bytes, bytes, limit_bytes));
            }
        }
        let grown = self.as_result.as_mut().map_or(Ok(()), |as_result| as_result.try_grow(bytes));
        grown.inspect_err(|_| self.shrink_own(bytes))
    }

    /// Adds `bytes` to the charge, whatever the limits: the memory is taken already, or must be for
    /// a stream to go on. Releases no result. So callers may hold locks.
    pub fn grow(&mut self, bytes: u64) {
        if let Some(as_result) = &mut self.as_result {
            as_result.grow(bytes);
        }
        if bytes > 0 {
            let payer = &self.payer.get_mut().name;
            *self.ledger.bytes.lock().entry(payer.clone()).or_default() += bytes;
            self.bytes += bytes;
        }
    }

    fn try_add(&mut self, bytes: u64) -> std::result::Result<(), Full> {
        if bytes == 0 {
            return Ok(());
        }
        let payer = &self.payer.get_mut().name;
        let mut all = self.ledger.bytes.lock();
        let held_bytes = all.get(payer).copied().unwrap_or(0);
        let total = held_bytes.saturating_add(bytes);
        match self.ledger.bytes_limit {
            Some(limit_bytes) if total > limit_bytes => return Err(Full { held_bytes, limit_bytes }),
            _ => all.insert(payer.clone(), total),
        };
        self.bytes += bytes;
        Ok(())
    }

    /// Subtracts `bytes`, or all bytes of this charge if it holds fewer.
    pub fn shrink(&mut self, bytes: u64) {
        if let Some(as_result) = &mut self.as_result {
            as_result.shrink(bytes);
        }
        self.shrink_own(bytes);
    }

    fn shrink_own(&mut self, bytes: u64) {
        let bytes = bytes.min(self.bytes);
        if bytes > 0 {
            subtract(&mut self.ledger.bytes.lock(), &self.payer.get_mut().name, bytes);
            self.bytes -= bytes;
        }
    }

    /// Bytes that this charge holds.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Records that a table with these rows has appeared in the catalog.
    pub(super) fn was_listed(&self) {
        self.change_payer(|payer| payer.tables += 1);
    }

    /// Records that a table with these rows has left the catalog.
    pub(super) fn was_unlisted(&self) {
        self.change_payer(|payer| payer.tables -= 1);
    }

    fn change_payer(&self, change: impl FnOnce(&mut Payer)) {
        let mut payer = self.payer.lock();
        change(&mut payer);
        let holder = payer.holders.keys().next().filter(|_| payer.tables == 0);
        let due = holder.unwrap_or(&self.owner).clone();
        self.ledger.transfer(self.bytes, &payer.name, &due);
        payer.name = due;
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.shrink_own(self.bytes);
    }
}

/// Rows that a tenant holds, whether their table is in the catalog or not.
#[derive(Debug)]
pub struct ChargeHold {
    charge: Arc<Charge>,
    tenant: String,
}

impl ChargeHold {
    pub(super) fn new(charge: Arc<Charge>, tenant: &str) -> Self {
        charge.change_payer(|payer| *payer.holders.entry(tenant.into()).or_default() += 1);
        Self { charge, tenant: tenant.into() }
    }

    pub(super) fn charge(&self) -> &Arc<Charge> {
        &self.charge
    }
}

impl Drop for ChargeHold {
    fn drop(&mut self) {
        self.charge.change_payer(|payer| {
            if let Some(count) = payer.holders.get_mut(&self.tenant) {
                *count -= 1;
                if *count == 0 {
                    payer.holders.remove(&self.tenant);
                }
            }
        });
    }
}
