//! Parts of a retained result: ranges of batches that can be read in whole while the join still
//! makes more batches.
//!
//! ```text
//!   batches   0 1 2 3 4 5 6 7 8 9 ...      pushed in this order, and never moved
//!   parts     └─ 0 ─┘└── 1 ──┘ (open)      a part ends once its batches are large enough together,
//!                                          and does not change then
//! ```
//!
//! A client that polls a join gets the parts as they become whole. It can read each part to its end
//! without waiting for the join.

use std::ops::Range;

use super::{ResultSpool, SpoolState};

/// Minimum size of a part, in bytes. Clients open a stream for each part, which costs about as much
/// as sending a megabyte.
const PART_BYTES_MIN: u64 = 32 << 20;

/// A part has at least the bytes of all parts before it, divided by this number. It keeps the
/// number of parts of a huge result to a few dozen instead of thousands: 17 at 1 GiB, 38 at 16 GiB.
const GROWTH_SHARE: u64 = 8;

/// Ends and sizes of the parts.
#[derive(Debug, Default)]
pub(super) struct Parts {
    /// Index after the last batch of each part.
    ends: Vec<usize>,
    whole_bytes: u64,
    /// Bytes after the last part.
    open_bytes: u64,
}

impl Parts {
    /// Records that a batch was pushed. `batches` counts all batches so far, including that batch.
    pub(super) fn push(&mut self, batches: usize, bytes: u64) {
        self.open_bytes += bytes;
        if self.open_bytes >= PART_BYTES_MIN.max(self.whole_bytes / GROWTH_SHARE) {
            self.ends.push(batches);
            self.whole_bytes += std::mem::take(&mut self.open_bytes);
        }
    }

    fn whole(&self) -> Vec<Range<usize>> {
        let starts = std::iter::once(0).chain(self.ends.iter().copied());
        starts.zip(&self.ends).map(|(start, &end)| start..end).collect()
    }

    /// Returns the parts of a complete result of `batches`: the whole parts, then the rest. The
    /// rest is cut so that there are `count_min` parts, if there are enough batches. There is at
    /// least one part, so that a client can read the schema.
    fn all(&self, batches: usize, count_min: usize) -> Vec<Range<usize>> {
        let mut parts = self.whole();
        let start = self.ends.last().copied().unwrap_or_default();
        let rest = batches - start;
        let count = count_min.saturating_sub(parts.len()).clamp(1, rest.max(1));
        if rest > 0 || parts.is_empty() {
            parts.extend((0..count).map(|part| start + rest * part / count..start + rest * (part + 1) / count));
        }
        parts
    }
}

impl ResultSpool {
    /// Returns the parts of a retained result that have all their batches, in the order of
    /// completion. A later answer begins with the earlier one. The parts of a complete result cover
    /// it: at least `count_min`, if there are enough batches.
    pub fn parts(&self, count_min: usize) -> Vec<Range<usize>> {
        let held = self.inner.held.lock();
        let (batches, state) = self.progress();
        match state {
            SpoolState::Open => held.parts.whole(),
            _ => held.parts.all(batches, count_min),
        }
    }

    /// Waits until there is another whole part, or the result is finished.
    pub async fn next_part(&self) {
        let mut progress = self.inner.progress.subscribe();
        let known = self.inner.held.lock().parts.ends.len();
        loop {
            // The borrow of the progress ends before `held` is locked, because a writer changes the
            // progress while it holds that lock.
            let is_open = progress.borrow_and_update().1 == SpoolState::Open;
            if !is_open || self.inner.held.lock().parts.ends.len() > known || progress.changed().await.is_err() {
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_end_at_a_minimum_size_and_the_remaining_batches_are_divided_at_the_end() {
        let mut parts = Parts::default();
        let push = |parts: &mut Parts, batches: Range<usize>| {
            batches.for_each(|batch| parts.push(batch + 1, PART_BYTES_MIN / 4));
        };
        assert_eq!(parts.all(0, 4), vec![Range::default()]);
        push(&mut parts, 0..3);
        assert!(parts.whole().is_empty());
        assert_eq!(parts.all(3, 4), [0..1, 1..2, 2..3], "no more than there are batches");
        assert_eq!(parts.all(3, 2), [0..1, 1..3]);
        push(&mut parts, 3..10);
        assert_eq!(parts.whole(), [0..4, 4..8]);
        assert_eq!(parts.all(10, 4), [0..4, 4..8, 8..9, 9..10]);
        assert_eq!(parts.all(10, 1), [0..4, 4..8, 8..10]);
        assert_eq!(parts.all(8, 4), [0..4, 4..8], "nothing is left to be cut");
    }

    #[test]
    fn a_huge_result_has_a_few_dozen_parts() {
        let mut parts = Parts::default();
        let batch_bytes = 4 << 20;
        let batches = (100 << 30) / batch_bytes;
        (0..batches).for_each(|batch| parts.push(batch + 1, batch_bytes as u64));
        let all = parts.all(batches, 4);
        assert!(all.len() < 60, "{} parts", all.len());
        assert!(all.iter().zip(&all[1..]).all(|(one, next)| one.end == next.start && !one.is_empty()));
        assert_eq!((all[0].start, all[all.len() - 1].end), (0, batches));
    }
}
