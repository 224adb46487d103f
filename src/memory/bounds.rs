//! Bounds: several budgets that bound the same bytes, such as those of a peer and those of all.

use super::{Budget, Reservation};
use crate::Result;

/// Budgets that each count the same bytes. Clones share them. Without budgets, nothing is bounded.
#[derive(Clone, Debug, Default)]
pub struct Bounds(Vec<Budget>);

impl Bounds {
    /// Creates bounds of these budgets. The first one that has no room is named in the error, so
    /// the narrowest comes first.
    pub fn new(budgets: impl IntoIterator<Item = Budget>) -> Self {
        Self(budgets.into_iter().collect())
    }

    /// Takes `bytes` out of every budget until they are dropped.
    ///
    /// # Errors
    /// As [`Budget::reserve`], of the first budget with less free. Nothing is taken then.
    pub fn reserve(&self, bytes: u64, purpose: &str) -> Result<Held> {
        let reserved = self.0.iter().map(|budget| budget.reserve(bytes, purpose));
        reserved.collect::<Result<_>>().map(|parts| Held { parts, bytes })
    }
}

/// Bytes that are taken out of every budget of some [`Bounds`]. Dropping them gives them back.
#[derive(Debug, Default)]
pub struct Held {
    parts: Vec<Reservation>,
    bytes: u64,
}

impl Held {
    /// Number of bytes held.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Takes `bytes` more.
    ///
    /// # Errors
    /// As [`Bounds::reserve`]. Bytes that are already held stay held.
    pub fn try_grow(&mut self, bytes: u64, purpose: &str) -> Result<()> {
        for at in 0..self.parts.len() {
            if let Err(error) = self.parts[at].try_grow(bytes, purpose) {
                self.parts[..at].iter_mut().for_each(|part| part.shrink_to(self.bytes));
                return Err(error);
            }
        }
        self.bytes += bytes;
        Ok(())
    }

    /// Splits off `bytes` of the bytes, or all if fewer are held.
    pub fn split(&mut self, bytes: u64) -> Self {
        let bytes = bytes.min(self.bytes);
        self.bytes -= bytes;
        Self { parts: self.parts.iter_mut().map(|part| part.split(bytes)).collect(), bytes }
    }

    /// Gives back all bytes except `bytes`. Holding less already is no error.
    pub fn shrink_to(&mut self, bytes: u64) {
        self.parts.iter_mut().for_each(|part| part.shrink_to(bytes));
        self.bytes = self.bytes.min(bytes);
    }
}

/// Bytes on the heap that arrive in parts. Their memory is counted before it is taken, except for
/// the first [`CountedBytes::FREE`].
#[derive(Debug, Default)]
pub struct CountedBytes {
    bytes: Vec<u8>,
    held: Held,
}

impl CountedBytes {
    /// Bytes that are not counted. Those who collect bytes count them otherwise.
    pub const FREE: usize = 4 << 10;

    /// Adds bytes. `wanted` bytes are expected in all: the memory grows with the bytes, by at most
    /// twice, and not beyond `wanted`.
    ///
    /// # Errors
    /// As [`Bounds::reserve`]. Nothing is added then.
    pub fn extend(&mut self, part: &[u8], wanted: usize, bounds: &Bounds, purpose: &str) -> Result<()> {
        let (needed, before) = (self.bytes.len() + part.len(), self.bytes.capacity());
        if needed > before {
            let capacity = needed.max(2 * before).max(Self::FREE).min(wanted.max(needed));
            match capacity.saturating_sub(before.max(Self::FREE)) as u64 {
                0 => (),
                more if self.held.bytes() == 0 => self.held = bounds.reserve(more, purpose)?,
                more => self.held.try_grow(more, purpose)?,
            }
            self.bytes.reserve_exact(capacity - self.bytes.len());
        }
        self.bytes.extend_from_slice(part);
        Ok(())
    }

    /// Returns the bytes, and what is taken for them.
    pub fn into_parts(self) -> (Vec<u8>, Held) {
        (self.bytes, self.held)
    }
}

impl std::ops::Deref for CountedBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes
    }
}

impl std::ops::DerefMut for CountedBytes {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_count_in_every_budget_and_a_refusal_takes_from_none() {
        let [narrow, wide] =
            [("a peer's share", 60), ("the whole", 100)].map(|(name, bytes)| Budget::new(name, "--test-memory", bytes));
        let used = || (narrow.used_bytes(), wide.used_bytes());
        let bounds = Bounds::new([narrow.clone(), wide.clone()]);
        let mut held = bounds.reserve(50, "a request").unwrap();
        assert_eq!((held.bytes(), used()), (50, (50, 50)));
        let refusal = held.try_grow(11, "a request").unwrap_err();
        assert!(refusal.message().contains("a request needs 11 B of a peer's share"), "{refusal}");
        let other = wide.reserve(45, "another peer").unwrap();
        let refusal = held.try_grow(6, "a request").unwrap_err();
        assert!(refusal.message().contains("6 B of the whole"), "{refusal}");
        assert_eq!((held.bytes(), used()), (50, (50, 95)), "nothing stays taken in the first budget");
        assert!(bounds.reserve(6, "a request").is_err());
        assert_eq!(used(), (50, 95));
        held.shrink_to(20);
        assert_eq!((held.bytes(), used()), (20, (20, 65)));
        drop((held, other));
        assert_eq!(used(), (0, 0));
    }

    #[test]
    fn nothing_is_refused_without_budgets() {
        let mut held = Bounds::default().reserve(u64::MAX / 2, "a test").unwrap();
        held.try_grow(1, "a test").unwrap();
        assert_eq!(held.bytes(), u64::MAX / 2 + 1);
    }

    #[test]
    fn bytes_are_counted_as_they_arrive_and_not_as_they_are_expected() {
        let budget = Budget::new("test memory", "--test-memory", 100_000);
        let bounds = Bounds::new([budget.clone()]);
        let mut bytes = CountedBytes::default();
        bytes.extend(&[1; CountedBytes::FREE], usize::MAX, &bounds, "a test").unwrap();
        assert_eq!(budget.used_bytes(), 0);
        for _ in 0..30 {
            bytes.extend(&[2; 1000], 40_000, &bounds, "a test").unwrap();
            let held = budget.used_bytes() as usize;
            assert!((bytes.len() - CountedBytes::FREE..2 * bytes.len()).contains(&held), "{held}");
        }
        let refusal = bytes.extend(&[3; 100_000], 200_000, &bounds, "a test").unwrap_err();
        assert!(refusal.message().contains("a test needs"), "{refusal}");
        assert_eq!(bytes.len(), CountedBytes::FREE + 30_000);
        let (all, held) = bytes.into_parts();
        assert!(all.capacity() <= 40_000 && budget.used_bytes() == held.bytes());
        drop(held);
        assert_eq!(budget.used_bytes(), 0);
    }
}
