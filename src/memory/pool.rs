//! Pools: bytes of a budget that are promised to one user and drawn piece by piece.

use std::ops::RangeInclusive;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use super::{Budget, Reservation};
use crate::Result;

/// Reservation that pieces are drawn from, and go back to while the pool is open. Clones share it.
///
/// ```text
///   open(100 B)    promised 100: free 100
///   reserve(30)    promised 100: free  70, drawn 30          the budget sees 100 used all the time
///   reserve(90)    promised 100: free   0, drawn 100, and 20 more that are taken from the budget
///   drop of both   promised 100: free 100                    and the 20 are the budget's again
///   close          nothing is promised; drawn bytes go back to the budget when dropped
/// ```
///
/// A user that was promised too little takes what the budget has free. A user that was promised too
/// much gives the rest back at the end.
#[derive(Clone, Debug)]
pub struct ReservedPool {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    budget: Budget,
    /// Bytes that are promised and not drawn. `None` while the pool is closed.
    free: Mutex<Option<Reservation>>,
    /// Bytes that are promised, drawn or not. Zero while the pool is closed.
    promised_bytes: AtomicU64,
}

impl ReservedPool {
    /// Creates a closed pool, which takes reservations from the budget.
    pub fn new(budget: Budget) -> Self {
        Self { inner: Arc::new(Inner { budget, free: Mutex::default(), promised_bytes: AtomicU64::new(0) }) }
    }

    /// Opens the pool with `reservation`, and gives back what is left of the previous promise.
    pub fn open(&self, reservation: Reservation) {
        self.inner.promised_bytes.store(reservation.bytes, Ordering::Relaxed);
        let before = self.inner.free.lock().replace(reservation);
        drop(before);
    }

    /// Closes the pool, and gives back the bytes that are not drawn.
    pub fn close(&self) {
        self.inner.promised_bytes.store(0, Ordering::Relaxed);
        let unused = self.inner.free.lock().take();
        drop(unused);
    }

    /// Bytes that are promised, drawn or not.
    pub fn promised_bytes(&self) -> u64 {
        self.inner.promised_bytes.load(Ordering::Relaxed)
    }

    /// Bytes that are promised and not drawn.
    pub fn free_bytes(&self) -> u64 {
        self.inner.free.lock().as_ref().map_or(0, Reservation::bytes)
    }

    /// Draws bytes. The budget supplies those that the pool lacks.
    ///
    /// # Errors
    /// The errors of [`Budget::reserve`], for the bytes that the pool lacks. Nothing is drawn then.
    pub fn reserve(&self, bytes: u64, purpose: &str) -> Result<Reservation> {
        let mut free = self.inner.free.lock();
        let drawn_bytes = free.as_ref().map_or(0, |free| free.bytes.min(bytes));
        self.inner.budget.take(bytes - drawn_bytes, purpose)?;
        if let Some(free) = &mut *free {
            free.bytes -= drawn_bytes;
        }
        let pool = (drawn_bytes > 0).then(|| self.clone());
        Ok(Reservation { budget: self.inner.budget.clone(), bytes, drawn_bytes, pool })
    }

    /// Draws promised bytes only: as many of `bytes` as are left. Returns `None` when fewer than
    /// its start are left.
    pub fn reserve_promised(&self, bytes: RangeInclusive<u64>) -> Option<Reservation> {
        let mut free = self.inner.free.lock();
        let free = free.as_mut().filter(|free| free.bytes >= *bytes.start())?;
        let bytes = free.bytes.min(*bytes.end());
        free.bytes -= bytes;
        let (budget, pool) = (self.inner.budget.clone(), Some(self.clone()));
        Some(Reservation { budget, bytes, drawn_bytes: bytes, pool })
    }

    /// Takes back bytes that were drawn.
    pub(super) fn give_back(&self, bytes: u64) {
        match &mut *self.inner.free.lock() {
            Some(free) => free.bytes += bytes,
            None => self.inner.budget.give_back(bytes),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn opened(limit: u64, promised: u64) -> (Budget, ReservedPool) {
        let budget = Budget::new("test memory", "--test-memory", limit);
        let pool = ReservedPool::new(budget.clone());
        pool.open(budget.reserve(promised, "a job").unwrap());
        (budget, pool)
    }

    #[test]
    fn reserved_bytes_are_available_when_the_rest_of_the_budget_is_used() {
        let (budget, pool) = opened(100, 60);
        let _others = budget.reserve(40, "others").unwrap();
        let drawn = pool.reserve(60, "a piece").unwrap();
        assert_eq!((budget.used_bytes(), pool.free_bytes()), (100, 0));
        let refusal = pool.reserve(1, "one more").unwrap_err();
        assert!(refusal.message().contains("one more needs 1 B of test memory"), "{refusal}");
        drop(drawn);
        assert_eq!((budget.used_bytes(), pool.free_bytes()), (100, 60), "a piece goes back to where it was drawn");
    }

    #[test]
    fn only_reserved_bytes_are_available_without_the_budget() {
        let (budget, pool) = opened(100, 60);
        let first = pool.reserve_promised(10..=20).unwrap();
        assert_eq!((first.bytes(), budget.used_bytes(), pool.free_bytes()), (20, 60, 40));
        assert_eq!(pool.promised_bytes(), 60);
        let rest = pool.reserve_promised(10..=60).unwrap();
        assert_eq!((rest.bytes(), budget.used_bytes(), pool.free_bytes()), (40, 60, 0));
        assert!(pool.reserve_promised(1..=1).is_none(), "the budget has 40 that were not promised");
        drop((first, rest));
        assert_eq!((budget.used_bytes(), pool.free_bytes()), (60, 60));
        assert!(pool.reserve_promised(61..=70).is_none());
        pool.close();
        assert_eq!(pool.promised_bytes(), 0);
        assert!(pool.reserve_promised(1..=1).is_none());
    }

    #[test]
    fn bytes_beyond_the_reservation_come_from_the_budget_and_are_returned_to_it_first() {
        let (budget, pool) = opened(100, 50);
        let mut piece = pool.reserve(70, "a piece").unwrap();
        assert_eq!((budget.used_bytes(), pool.free_bytes()), (70, 0));
        let half = piece.split(35);
        assert_eq!((piece.bytes(), half.bytes(), budget.used_bytes()), (35, 35, 70));
        drop(half);
        assert_eq!((budget.used_bytes(), pool.free_bytes()), (50, 15));
        piece.shrink_to(5);
        assert_eq!((budget.used_bytes(), pool.free_bytes()), (50, 45));
        drop(piece);
        assert_eq!((budget.used_bytes(), pool.free_bytes()), (50, 50));
        pool.close();
        assert_eq!(budget.used_bytes(), 0);
    }

    #[test]
    fn pieces_outlive_the_reservation_and_return_their_bytes_to_the_budget() {
        let (budget, pool) = opened(100, 50);
        let piece = pool.reserve(20, "a result").unwrap();
        pool.close();
        assert_eq!((budget.used_bytes(), pool.free_bytes()), (20, 0));
        let after = pool.reserve(30, "a late piece").unwrap();
        assert_eq!(budget.used_bytes(), 50);
        drop((piece, after));
        assert_eq!(budget.used_bytes(), 0);
    }

    #[test]
    fn a_refused_piece_draws_no_bytes() {
        let (budget, pool) = opened(100, 50);
        assert!(pool.reserve(101, "too much").is_err());
        assert_eq!((budget.used_bytes(), pool.free_bytes()), (50, 50));
    }
}
