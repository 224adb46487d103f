//! Memory and tables that each tenant holds, and the limits on both.

use std::collections::HashMap;
use std::sync::Arc;

use arrow::datatypes::{Field, Schema};
use parking_lot::Mutex;

use super::EvictableResults;
use crate::memory::{Budget, Reservation, human_bytes};
use crate::{Error, Result};

/// Limits on the holdings of a tenant. All tenants have the same limits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TenantLimits {
    /// Bytes of tables, uploads under way and results; `None` for no limit.
    pub bytes: Option<u64>,
    /// `None` for no limit.
    pub tables: Option<usize>,
}

/// Current holdings of a tenant.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TenantUsage {
    /// Bytes of tables, uploads under way and results. A table that was dropped or replaced counts
    /// until its last reader is done with it.
    pub bytes: u64,
    pub tables: usize,
}

/// The bytes of every tenant. Clones share them.
#[derive(Clone, Debug, Default)]
pub(super) struct Ledger {
    bytes_limit: Option<u64>,
    bytes: Arc<Mutex<HashMap<String, u64>>>,
    evictable: EvictableResults,
}

impl Ledger {
    /// Returns an empty ledger. Results in `evictable` are released before a tenant is refused
    /// memory.
    pub(super) fn new(limits: TenantLimits, evictable: EvictableResults) -> Self {
        Self { bytes_limit: limits.bytes, bytes: Arc::default(), evictable }
    }

    /// Results that are released before a tenant is refused memory.
    pub(super) fn evictable(&self) -> &EvictableResults {
        &self.evictable
    }

    /// Returns a charge of zero bytes on that tenant's account.
    pub(super) fn charge(&self, owner: &str) -> Charge {
        Charge { ledger: self.clone(), owner: owner.into(), bytes: 0, _host_memory: None }
    }

    pub(super) fn bytes(&self, owner: &str) -> u64 {
        self.bytes.lock().get(owner).copied().unwrap_or(0)
    }

    /// Returns the bytes that a tenant may still add; `None` for no limit.
    pub(super) fn room(&self, owner: &str) -> Option<u64> {
        Some(self.bytes_limit?.saturating_sub(self.bytes(owner)))
    }

    pub(super) fn owners(&self) -> Vec<String> {
        self.bytes.lock().keys().cloned().collect()
    }
}

/// Returns the bytes of a schema's metadata: of the schema, and of its columns at any depth.
fn metadata_bytes(schema: &Schema) -> u64 {
    /// Memory of an entry in addition to its text, about.
    const ENTRY_BYTES: usize = 64;
    let of_fields = schema.flattened_fields().into_iter().flat_map(Field::metadata);
    let entries = schema.metadata().iter().chain(of_fields);
    entries.map(|(key, value)| (key.len() + value.len() + ENTRY_BYTES) as u64).sum()
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
    bytes: u64,
    /// Host memory outside the arena.
    _host_memory: Option<Reservation>,
}

impl Charge {
    /// Adds the metadata of a schema to the charge, and reserves host memory for it.
    ///
    /// # Errors
    /// [`Error::Exhausted`] when the tenant's limit or the budget is exceeded.
    pub(super) fn with_metadata(mut self, schema: &Schema, host_memory: &Budget) -> Result<Self> {
        let bytes = metadata_bytes(schema);
        if bytes > 0 {
            self.try_grow(bytes)?;
            self._host_memory = Some(host_memory.reserve(bytes, "the metadata of a schema")?);
        }
        Ok(self)
    }

    /// Adds `bytes` to the charge.
    ///
    /// # Errors
    /// [`Error::Exhausted`] when the tenant's limit is exceeded; nothing is added then.
    pub fn try_grow(&mut self, bytes: u64) -> Result<()> {
        while let Err(Full { held_bytes, limit_bytes }) = self.try_add(bytes) {
            let missing = held_bytes.saturating_add(bytes) - limit_bytes;
            if bytes > limit_bytes || self.ledger.evictable.give_back_of(&self.owner, missing) == 0 {
                return Err(Error::Exhausted(format!(
                    "tenant {:?} holds {} of tables, uploads and results, and {} more would exceed its limit of {}; drop a table, \
                     release a result, or raise the server's --tenant-memory",
                    self.owner,
                    human_bytes(held_bytes),
                    human_bytes(bytes),
                    human_bytes(limit_bytes),
                )));
            }
        }
        Ok(())
    }

    fn try_add(&mut self, bytes: u64) -> std::result::Result<(), Full> {
        if bytes == 0 {
            return Ok(());
        }
        let mut all = self.ledger.bytes.lock();
        let held_bytes = all.get(&self.owner).copied().unwrap_or(0);
        let total = held_bytes.saturating_add(bytes);
        match self.ledger.bytes_limit {
            Some(limit_bytes) if total > limit_bytes => return Err(Full { held_bytes, limit_bytes }),
            _ => all.insert(self.owner.clone(), total),
        };
        self.bytes += bytes;
        Ok(())
    }

    /// Subtracts `bytes`, or all bytes of this charge if it holds fewer.
    pub fn shrink(&mut self, bytes: u64) {
        let bytes = bytes.min(self.bytes);
        if bytes == 0 {
            return;
        }
        let mut all = self.ledger.bytes.lock();
        if let Some(held) = all.get_mut(&self.owner) {
            *held -= bytes;
            if *held == 0 {
                all.remove(&self.owner);
            }
        }
        self.bytes -= bytes;
    }

    /// Bytes that this charge holds.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.shrink(self.bytes);
    }
}
