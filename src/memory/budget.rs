//! A number of bytes that may be used, and the shares of it that are promised.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use parking_lot::Mutex;

use super::{ReservedPool, human_bytes};
use crate::{Error, Result};

/// Whoever holds memory of a budget that nobody needs, and gives it back when somebody does.
pub trait Reclaim: fmt::Debug + Send + Sync {
    /// Bytes that it could give back now.
    fn reclaimable_bytes(&self) -> u64;

    /// Gives back so many bytes, or what it can; how many it were.
    fn reclaim(&self, bytes: u64) -> u64;
}

/// Whoever knows what holds memory of a budget, for those who are refused some.
pub trait Holders: fmt::Debug + Send + Sync {
    /// What holds how much, and who can let go of it; empty when nothing is known. It is asked while locks are held, so it may
    /// wait for none for long.
    fn named(&self) -> String;
}

/// A bounded amount of memory of one kind. Clones share the same bound.
#[derive(Clone, Debug)]
pub struct Budget {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    /// What is bounded, as a person would say it: `host memory`, `memory of device host:0`.
    name: String,
    /// How the operator raises the bound: `--host-memory`.
    knob: String,
    limit_bytes: u64,
    used_bytes: AtomicU64,
    used_bytes_max: AtomicU64,
    /// Who gives back what nobody needs.
    reclaim: OnceLock<Weak<dyn Reclaim>>,
    /// One at a time asks for it: another would find nothing left, and not wait until that is free.
    reclaiming: Mutex<()>,
    /// Who knows what holds it.
    holders: Mutex<Option<Weak<dyn Holders>>>,
    /// What this one is a part of; given back with its last clone.
    _part_of: Option<Reservation>,
}

impl Budget {
    /// A budget of `limit_bytes`; `knob` is the setting that raises it, for the error message.
    pub fn new(name: impl Into<String>, knob: impl Into<String>, limit_bytes: u64) -> Self {
        Self::with_limit(name.into(), knob.into(), limit_bytes, None)
    }

    /// A budget over bytes that were reserved in another one; they go back there when its last clone, and the last
    /// reservation in it, are dropped.
    pub fn within(reservation: Reservation) -> Self {
        let whole = &reservation.budget.inner;
        let name = format!("the job's share of {}", whole.name);
        Self::with_limit(name, whole.knob.clone(), reservation.bytes, Some(reservation))
    }

    fn with_limit(name: String, knob: String, limit_bytes: u64, part_of: Option<Reservation>) -> Self {
        let (used_bytes, used_bytes_max) = (AtomicU64::new(0), AtomicU64::new(0));
        let (reclaim, reclaiming, holders) = (OnceLock::new(), Mutex::default(), Mutex::default());
        Self {
            inner: Arc::new(Inner {
                name,
                knob,
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
    /// [`Error::Exhausted`] when less is free, naming what for, how much, and the setting that raises the bound.
    pub fn reserve(&self, bytes: u64, purpose: &str) -> Result<Reservation> {
        self.take(bytes, purpose)?;
        Ok(Reservation { budget: self.clone(), bytes, drawn_bytes: 0, pool: None })
    }

    /// How the operator raises the bound.
    pub fn knob(&self) -> &str {
        &self.inner.knob
    }

    /// The bound, in bytes.
    pub fn limit_bytes(&self) -> u64 {
        self.inner.limit_bytes
    }

    /// What is reserved now, in bytes.
    pub fn used_bytes(&self) -> u64 {
        self.inner.used_bytes.load(Ordering::Acquire)
    }

    /// The most that was ever reserved at once, in bytes.
    pub fn used_bytes_max(&self) -> u64 {
        self.inner.used_bytes_max.load(Ordering::Relaxed)
    }

    /// What could be reserved now, in bytes, with what would be given back for it.
    pub fn free_bytes(&self) -> u64 {
        let reclaimable = self.reclaimer().map_or(0, |reclaim| reclaim.reclaimable_bytes());
        self.limit_bytes().saturating_sub(self.used_bytes().saturating_sub(reclaimable))
    }

    /// What is not reserved now, in bytes.
    pub fn unused_bytes(&self) -> u64 {
        self.limit_bytes().saturating_sub(self.used_bytes())
    }

    /// From now on, `reclaim` is asked to give memory back when there is too little; the first one that was named stays.
    pub fn reclaim_from(&self, reclaim: Weak<dyn Reclaim>) {
        let _ = self.inner.reclaim.set(reclaim);
    }

    /// From now on, `holders` is asked what holds the memory when there is too little.
    pub fn held_by(&self, holders: Weak<dyn Holders>) {
        *self.inner.holders.lock() = Some(holders);
    }

    /// What holds the memory, to be put behind how much of it is free: begins with a semicolon, or is empty.
    fn holders(&self) -> String {
        let holders = self.inner.holders.lock().as_ref().and_then(Weak::upgrade);
        match holders.map(|holders| holders.named()) {
            Some(named) if !named.is_empty() => format!("; {named}"),
            _ => String::new(),
        }
    }

    /// Asks for memory to be given back although the budget has some; how many bytes it were.
    pub(super) fn reclaim(&self, bytes: u64) -> u64 {
        let _one_at_a_time = self.inner.reclaiming.lock();
        self.reclaimer().map_or(0, |reclaim| reclaim.reclaim(bytes))
    }

    fn reclaimer(&self) -> Option<Arc<dyn Reclaim>> {
        self.inner.reclaim.get()?.upgrade()
    }

    /// Reserves bytes for one who knows what to say where they are not to be had; the error is how many bytes are in use.
    ///
    /// # Errors
    /// What is reserved of the budget.
    pub fn try_reserve(&self, bytes: u64) -> std::result::Result<Reservation, u64> {
        self.try_take(bytes)?;
        Ok(Reservation { budget: self.clone(), bytes, drawn_bytes: 0, pool: None })
    }

    /// Takes bytes for whoever calls this to account for.
    pub(super) fn take(&self, bytes: u64, purpose: &str) -> Result<()> {
        let inner = &*self.inner;
        self.try_take(bytes).map_err(|used| {
            Error::Exhausted(format!(
                "{purpose} needs {} of {}, of which {} of {} are free{}; ask for less, drop what is no longer needed, or \
                 raise {}",
                human_bytes(bytes),
                inner.name,
                human_bytes(inner.limit_bytes.saturating_sub(used)),
                human_bytes(inner.limit_bytes),
                self.holders(),
                inner.knob,
            ))
        })
    }

    /// As [`Budget::take`]; the error is how many bytes are in use.
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
                // Nobody gives anything back for what would be too little.
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

    /// Gives back what was taken.
    pub(super) fn give_back(&self, bytes: u64) {
        self.inner.used_bytes.fetch_sub(bytes, Ordering::AcqRel);
    }
}

/// Bytes taken out of a [`Budget`]; dropping it gives them back.
#[derive(Debug)]
pub struct Reservation {
    pub(super) budget: Budget,
    pub(super) bytes: u64,
    /// Of these, what came out of `pool`, where it goes back to.
    pub(super) drawn_bytes: u64,
    pub(super) pool: Option<ReservedPool>,
}

impl Reservation {
    /// How many bytes are held.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Takes `bytes` more.
    ///
    /// # Errors
    /// As [`Budget::reserve`]; what is held already stays held.
    pub fn try_grow(&mut self, bytes: u64, purpose: &str) -> Result<()> {
        self.budget.take(bytes, purpose)?;
        self.bytes += bytes;
        Ok(())
    }

    /// Gives back all but `bytes`; holding less already is no error.
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

    /// Splits `bytes` off into a reservation of their own.
    ///
    /// # Panics
    /// When fewer are held: that is a mistake of the caller's arithmetic.
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
    fn a_refusal_takes_nothing_and_names_the_knob() {
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
    fn a_refusal_says_what_holds_the_memory_where_somebody_knows() {
        let budget = Budget::new("test memory", "--test-memory", 100);
        let _held = budget.reserve(60, "a").unwrap();
        let refused = || budget.reserve(41, "b").unwrap_err().message().to_owned();
        assert!(refused().contains("of which 40 B of 100 B are free; ask for less"), "{}", refused());
        let ann: Arc<dyn Holders> = Arc::new(Ann);
        budget.held_by(Arc::downgrade(&ann));
        assert!(refused().contains("of which 40 B of 100 B are free; Ann holds 60 B; ask for less"), "{}", refused());
        drop(ann);
        assert!(!refused().contains("Ann"), "{}", refused());
    }

    #[test]
    fn a_part_of_a_budget_is_bounded_by_itself_and_goes_back_with_its_last_user() {
        let whole = Budget::new("test memory", "--test-memory", 100);
        let part = Budget::within(whole.reserve(60, "a job").unwrap());
        assert_eq!((part.limit_bytes(), part.free_bytes(), whole.used_bytes()), (60, 60, 60));
        let held = part.reserve(50, "a table").unwrap();
        assert_eq!(whole.used_bytes(), 60, "what is used of a part is not charged twice");
        let refusal = part.reserve(11, "a chunk").unwrap_err();
        assert!(refusal.message().contains("the job's share of test memory"), "{refusal}");
        assert!(refusal.message().contains("--test-memory"), "{refusal}");
        drop(part);
        assert_eq!(whole.used_bytes(), 60, "a buffer still lies in the part");
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
