//! Budgets: bounded numbers of bytes, and the reservations taken from them.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use parking_lot::Mutex;

use super::{ReservedPool, human_bytes};
use crate::{Error, Result};

/// Holder of a budget's memory that is not needed now. It gives memory back when another user needs
/// it.
pub trait Reclaim: fmt::Debug + Send + Sync {
    /// Bytes that the holder could give back now.
    fn reclaimable_bytes(&self) -> u64;

    /// Gives back `bytes`, or as many as possible. Returns the number of bytes given back.
    fn reclaim(&self, bytes: u64) -> u64;
}

/// Reporter of what holds a budget's memory, for the error message of a refused reservation.
pub trait Holders: fmt::Debug + Send + Sync {
    /// Describes what holds how much, and how to free it. Empty when nothing is known. The budget
    /// calls this while it holds locks, so an implementation must not wait long for a lock.
    fn named(&self) -> String;
}

/// A bounded amount of memory of one kind. Clones share the same bound.
#[derive(Clone, Debug)]
pub struct Budget {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    /// Name of the bounded memory in messages: `host memory`, `memory of device host:0`.
    name: String,
    /// Setting that raises the bound: `--host-memory`.
    setting: String,
    limit_bytes: u64,
    used_bytes: AtomicU64,
    used_bytes_max: AtomicU64,
    reclaim: OnceLock<Weak<dyn Reclaim>>,
    /// Lets one thread reclaim at a time. Without it, a second thread would find nothing left to
    /// reclaim, and would not wait until the first has freed memory.
    reclaiming: Mutex<()>,
    holders: Mutex<Option<Weak<dyn Holders>>>,
    /// Reservation in the larger budget that this budget is a part of. It is given back with the
    /// last clone.
    _part_of: Option<Reservation>,
}

impl Budget {
    /// Creates a budget of `limit_bytes`. `setting` is the setting that raises it, for the error
    /// message.
    pub fn new(name: impl Into<String>, setting: impl Into<String>, limit_bytes: u64) -> Self {
        Self::with_limit(name.into(), setting.into(), limit_bytes, None)
    }

    /// Creates a budget over bytes that were reserved in another budget. The bytes go back there
    /// when the last clone, and the last reservation in this budget, are dropped.
    pub fn within(reservation: Reservation) -> Self {
        let whole = &reservation.budget.inner;
        let name = format!("the job's share of {}", whole.name);
        Self::with_limit(name, whole.setting.clone(), reservation.bytes, Some(reservation))
    }

    fn with_limit(name: String, setting: String, limit_bytes: u64, part_of: Option<Reservation>) -> Self {
        let (used_bytes, used_bytes_max) = (AtomicU64::new(0), AtomicU64::new(0));
        let (reclaim, reclaiming, holders) = (OnceLock::new(), Mutex::default(), Mutex::default());
        Self {
            inner: Arc::new(Inner {
                name,
                setting,
                limit_bytes,
                used_bytes,
                used_bytes_max,
                reclaim,
                reclaiming,
                holders,
                _part_of: part_of,
            }),
        }
    }

    /// Takes `bytes` out of the budget until the reservation is dropped.
    ///
    /// # Errors
    /// [`Error::Exhausted`] when less is free. The message names the purpose, the bytes, and the
    /// setting that raises the bound.
    pub fn reserve(&self, bytes: u64, purpose: &str) -> Result<Reservation> {
        self.take(bytes, purpose)?;
        Ok(Reservation { budget: self.clone(), bytes, drawn_bytes: 0, pool: None })
    }

    /// Setting that raises the bound.
    pub fn setting(&self) -> &str {
        &self.inner.setting
    }

    /// The bound, in bytes.
    pub fn limit_bytes(&self) -> u64 {
        self.inner.limit_bytes
    }

    /// Bytes that are reserved now.
    pub fn used_bytes(&self) -> u64 {
        self.inner.used_bytes.load(Ordering::Acquire)
    }

    /// Most bytes that were ever reserved at once.
    pub fn used_bytes_max(&self) -> u64 {
        self.inner.used_bytes_max.load(Ordering::Relaxed)
    }

    /// Bytes that could be reserved now, including those that a [`Reclaim`] would give back.
    pub fn free_bytes(&self) -> u64 {
        let reclaimable = self.reclaimer().map_or(0, |reclaim| reclaim.reclaimable_bytes());
        self.limit_bytes().saturating_sub(self.used_bytes().saturating_sub(reclaimable))
    }

    /// Bytes that are not reserved now.
    pub fn unused_bytes(&self) -> u64 {
        self.limit_bytes().saturating_sub(self.used_bytes())
    }

    /// Registers `reclaim` to give memory back when too little is free. Only the first call counts.
    pub fn reclaim_from(&self, reclaim: Weak<dyn Reclaim>) {
        let _ = self.inner.reclaim.set(reclaim);
    }

    /// Registers `holders` to describe what holds the memory when too little is free. The last call
    /// counts.
    pub fn held_by(&self, holders: Weak<dyn Holders>) {
        *self.inner.holders.lock() = Some(holders);
    }

    /// Describes what holds the memory, for the end of a sentence: begins with a semicolon, or is
    /// empty.
    fn holders(&self) -> String {
        let holders = self.inner.holders.lock().as_ref().and_then(Weak::upgrade);
        match holders.map(|holders| holders.named()) {
            Some(named) if !named.is_empty() => format!("; {named}"),
            _ => String::new(),
        }
    }

    /// Asks the reclaimer for memory, even if the budget has free bytes. Returns the number of
    /// bytes given back.
    pub(super) fn reclaim(&self, bytes: u64) -> u64 {
        let _one_at_a_time = self.inner.reclaiming.lock();
        self.reclaimer().map_or(0, |reclaim| reclaim.reclaim(bytes))
    }

    fn reclaimer(&self) -> Option<Arc<dyn Reclaim>> {
        self.inner.reclaim.get()?.upgrade()
    }

    /// Reserves bytes for a caller that writes its own error message.
    ///
    /// # Errors
    /// If too little is free, the number of bytes that are reserved now.
    pub fn try_reserve(&self, bytes: u64) -> std::result::Result<Reservation, u64> {
        self.try_take(bytes)?;
        Ok(Reservation { budget: self.clone(), bytes, drawn_bytes: 0, pool: None })
    }

    /// Takes bytes without a reservation. The caller must give them back.
    pub(super) fn take(&self, bytes: u64, purpose: &str) -> Result<()> {
        let inner = &*self.inner;
        self.try_take(bytes).map_err(|used| {
            Error::Exhausted(format!(
                "{purpose} needs {} of {}, and {} of {} are free{}; ask for less, drop what is no longer needed, or \
                 raise {}",
                human_bytes(bytes),
                inner.name,
                human_bytes(inner.limit_bytes.saturating_sub(used)),
                human_bytes(inner.limit_bytes),
                self.holders(),
                inner.setting,
            ))
        })
    }

    /// Takes bytes like [`Budget::take`]. The error is the number of bytes in use.
    fn try_take(&self, bytes: u64) -> std::result::Result<(), u64> {
        let inner = &*self.inner;
        let take = || {
            inner.used_bytes.fetch_update(Ordering::AcqRel, Ordering::Acquire, |used| {
                used.checked_add(bytes).filter(|&total| total <= inner.limit_bytes)
            })
        };
        let taken = take().or_else(|used| match self.reclaimer() {
            Some(reclaim) if bytes <= inner.limit_bytes => {
                let _one_at_a_time = inner.reclaiming.lock();
                let mut outcome = take();
                // Do not reclaim if free and reclaimed bytes together would be too few.
                while let Err(used) = outcome
                    && bytes <= self.free_bytes()
                    && reclaim.reclaim(bytes.saturating_sub(inner.limit_bytes - used)) > 0
                {
                    outcome = take();
                }
                outcome
            }
            _ => Err(used),
        });
        let before = taken?;
        inner.used_bytes_max.fetch_max(before + bytes, Ordering::Relaxed);
        Ok(())
    }

    /// Gives back bytes that were taken.
    pub(super) fn give_back(&self, bytes: u64) {
        self.inner.used_bytes.fetch_sub(bytes, Ordering::AcqRel);
    }
}

/// Bytes taken out of a [`Budget`]; dropping it gives them back.
#[derive(Debug)]
pub struct Reservation {
    pub(super) budget: Budget,
    pub(super) bytes: u64,
    /// The part of `bytes` that was drawn from `pool`, and goes back there.
    pub(super) drawn_bytes: u64,
    pub(super) pool: Option<ReservedPool>,
}

impl Reservation {
    /// Number of bytes held.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Takes `bytes` more.
    ///
    /// # Errors
    /// The errors of [`Budget::reserve`]. Bytes that are already held stay held.
    pub fn try_grow(&mut self, bytes: u64, purpose: &str) -> Result<()> {
        self.budget.take(bytes, purpose)?;
        self.bytes += bytes;
        Ok(())
    }

    /// Gives back all bytes except `bytes`. Holding less already is no error.
    pub fn shrink_to(&mut self, bytes: u64) {
        let surplus = self.bytes.saturating_sub(bytes);
        let taken = surplus.min(self.bytes - self.drawn_bytes);
        self.budget.give_back(taken);
        if let Some(pool) = &self.pool {
            pool.give_back(surplus - taken);
        }
        self.drawn_bytes -= surplus - taken;
        self.bytes -= surplus;
    }

    /// Splits `bytes` off into a separate reservation.
    ///
    /// # Panics
    /// When fewer bytes are held, which is a mistake in the caller's arithmetic.
    pub fn split(&mut self, bytes: u64) -> Reservation {
        assert!(bytes <= self.bytes, "splitting {bytes} bytes off a reservation of {}", self.bytes);
        let taken = bytes.min(self.bytes - self.drawn_bytes);
        let drawn_bytes = bytes - taken;
        self.bytes -= bytes;
        self.drawn_bytes -= drawn_bytes;
        Reservation { budget: self.budget.clone(), bytes, drawn_bytes, pool: self.pool.clone() }
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.shrink_to(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dropped_reservation_gives_back_every_byte() {
        let budget = Budget::new("test memory", "--test-memory", 100);
        let mut first = budget.reserve(60, "a").unwrap();
        let split = first.split(20);
        assert_eq!(budget.used_bytes(), 60);
        drop(first);
        assert_eq!(budget.used_bytes(), 20);
        drop(split);
        assert_eq!((budget.used_bytes(), budget.used_bytes_max()), (0, 60));
    }

    #[test]
    fn a_refused_reservation_takes_no_bytes_and_names_the_setting() {
        let budget = Budget::new("test memory", "--test-memory", 100);
        let _held = budget.reserve(60, "a").unwrap();
        let refusal = budget.reserve(41, "the probe side").unwrap_err();
        assert_eq!(budget.used_bytes(), 60);
        assert!(
            matches!(&refusal, Error::Exhausted(text) if text.contains("the probe side") && text.contains("--test-memory"))
        );
    }

    #[derive(Debug)]
    struct Ann;

    impl Holders for Ann {
        fn named(&self) -> String {
            "Ann holds 60 B".into()
        }
    }

    #[test]
    fn a_refusal_names_the_holders_of_the_memory_if_they_are_known() {
        let budget = Budget::new("test memory", "--test-memory", 100);
        let _held = budget.reserve(60, "a").unwrap();
        let refused = || budget.reserve(41, "b").unwrap_err().message().to_owned();
        assert!(refused().contains("and 40 B of 100 B are free; ask for less"), "{}", refused());
        let ann: Arc<dyn Holders> = Arc::new(Ann);
        budget.held_by(Arc::downgrade(&ann));
        assert!(refused().contains("and 40 B of 100 B are free; Ann holds 60 B; ask for less"), "{}", refused());
        drop(ann);
        assert!(!refused().contains("Ann"), "{}", refused());
    }

    #[test]
    fn a_part_of_a_budget_has_its_own_limit_and_is_returned_by_its_last_user() {
        let whole = Budget::new("test memory", "--test-memory", 100);
        let part = Budget::within(whole.reserve(60, "a job").unwrap());
        assert_eq!((part.limit_bytes(), part.free_bytes(), whole.used_bytes()), (60, 60, 60));
        let held = part.reserve(50, "a table").unwrap();
        assert_eq!(whole.used_bytes(), 60, "memory used in a part is not charged twice");
        let refusal = part.reserve(11, "a chunk").unwrap_err();
        assert!(refusal.message().contains("the job's share of test memory"), "{refusal}");
        assert!(refusal.message().contains("--test-memory"), "{refusal}");
        drop(part);
        assert_eq!(whole.used_bytes(), 60, "a buffer still uses the part");
        drop(held);
        assert_eq!(whole.used_bytes(), 0);
    }

    #[test]
    fn overflowing_requests_are_refused() {
        let budget = Budget::new("test memory", "--test-memory", u64::MAX - 1);
        let _held = budget.reserve(10, "a").unwrap();
        assert!(budget.reserve(u64::MAX, "b").is_err());
    }
}
