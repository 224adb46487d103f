//! Free ranges of the arena's slabs.

use std::collections::{BTreeMap, BTreeSet};

/// Number of a slab. Numbers are never used again.
pub(super) type SlabId = u64;

/// Free ranges of numbered slabs, found by length and by place. No two ranges are adjacent.
///
/// The list picks the best fit, and the lowest place among equals. Holes are filled before whole
/// slabs are opened, so a slab that becomes empty stays empty and can be given back. Every
/// operation takes logarithmic time in the number of free ranges.
#[derive(Debug, Default)]
pub(super) struct FreeList {
    /// Length by place.
    by_place: BTreeMap<(SlabId, usize), usize>,
    by_len: BTreeSet<(usize, SlabId, usize)>,
    slab_len: BTreeMap<SlabId, usize>,
    free_bytes: usize,
}

impl FreeList {
    /// Adds a slab that is wholly free.
    pub(super) fn add_slab(&mut self, slab: SlabId, len: usize) {
        self.slab_len.insert(slab, len);
        self.insert(slab, 0, len);
    }

    /// Removes a slab that is wholly free.
    pub(super) fn remove_slab(&mut self, slab: SlabId) {
        let len = self.slab_len.remove(&slab).expect("the slab was added");
        self.remove(slab, 0, len);
    }

    /// Takes `size` bytes. Returns their slab and offset, or `None` if no range is long enough.
    pub(super) fn take(&mut self, size: usize) -> Option<(SlabId, usize)> {
        let &(len, slab, offset) = self.by_len.range((size, 0, 0)..).next()?;
        self.remove(slab, offset, len);
        if len > size {
            self.insert(slab, offset + size, len - size);
        }
        Some((slab, offset))
    }

    /// Takes all free ranges. Returns their slabs, offsets and lengths.
    pub(super) fn take_all(&mut self) -> impl Iterator<Item = (SlabId, usize, usize)> + use<> {
        self.by_len.clear();
        self.free_bytes = 0;
        std::mem::take(&mut self.by_place).into_iter().map(|((slab, offset), len)| (slab, offset, len))
    }

    /// Frees a range that was taken, or a range of a slab that was never added. True if its slab is
    /// now wholly free, which a slab that was never added is not.
    pub(super) fn give_back(&mut self, slab: SlabId, mut offset: usize, mut len: usize) -> bool {
        if let Some(&after) = self.by_place.get(&(slab, offset + len)) {
            self.remove(slab, offset + len, after);
            len += after;
        }
        if let Some((&(_, before), &before_len)) = self.by_place.range((slab, 0)..(slab, offset)).next_back()
            && before + before_len == offset
        {
            self.remove(slab, before, before_len);
            offset = before;
            len += before_len;
        }
        self.insert(slab, offset, len);
        self.slab_len.get(&slab) == Some(&len)
    }

    /// Bytes in all free ranges.
    pub(super) fn free_bytes(&self) -> usize {
        self.free_bytes
    }

    /// Bytes of the slabs that are wholly free.
    pub(super) fn empty_slab_bytes(&self) -> usize {
        let empty = self.slab_len.iter().filter(|&(&slab, len)| self.by_place.get(&(slab, 0)) == Some(len));
        empty.map(|(_, len)| len).sum()
    }

    /// Returns a slab that is wholly free.
    pub(super) fn empty_slab(&self) -> Option<SlabId> {
        let mut slabs = self.slab_len.iter();
        slabs.find(|&(&slab, len)| self.by_place.get(&(slab, 0)) == Some(len)).map(|(&slab, _)| slab)
    }

    /// Length of the longest free range, in bytes.
    pub(super) fn longest(&self) -> usize {
        self.by_len.last().map_or(0, |&(len, ..)| len)
    }

    fn insert(&mut self, slab: SlabId, offset: usize, len: usize) {
        self.by_place.insert((slab, offset), len);
        self.by_len.insert((len, slab, offset));
        self.free_bytes += len;
    }

    fn remove(&mut self, slab: SlabId, offset: usize, len: usize) {
        let found = self.by_place.remove(&(slab, offset));
        debug_assert_eq!(found, Some(len));
        self.by_len.remove(&(len, slab, offset));
        self.free_bytes -= len;
    }
}

#[cfg(test)]
mod tests {
    use rand::rngs::StdRng;
    use rand::{Rng, SeedableRng};

    use super::*;

    /// The model is a flag per unit of each slab: taken or free.
    #[test]
    fn random_allocations_and_frees_agree_with_a_map_of_units() {
        const SLABS: [usize; 3] = [40, 64, 128];
        let mut random = StdRng::seed_from_u64(crate::testing::seed());
        for _ in 0..50 {
            let mut list = FreeList::default();
            let mut taken: Vec<Vec<bool>> = SLABS.iter().map(|&len| vec![false; len]).collect();
            SLABS.iter().enumerate().for_each(|(slab, &len)| list.add_slab(slab as SlabId, len));
            let mut pieces: Vec<(SlabId, usize, usize)> = Vec::new();
            for _ in 0..400 {
                if random.random_bool(0.55) {
                    let size =
                        if random.random_bool(0.1) { random.random_range(1..=130) } else { random.random_range(1..9) };
                    let longest = taken.iter().flat_map(|slab| slab.split(|&taken| taken)).map(<[bool]>::len).max();
                    assert_eq!(list.longest(), longest.unwrap());
                    match list.take(size) {
                        None => assert!(longest < Some(size), "{size} units fit, and were refused"),
                        Some((slab, offset)) => {
                            let units = &mut taken[slab as usize][offset..offset + size];
                            assert!(!units.contains(&true), "overlap at {slab}:{offset}+{size}");
                            units.fill(true);
                            pieces.push((slab, offset, size));
                        }
                    }
                } else if !pieces.is_empty() {
                    let (slab, offset, size) = pieces.swap_remove(random.random_range(0..pieces.len()));
                    taken[slab as usize][offset..offset + size].fill(false);
                    let empty = list.give_back(slab, offset, size);
                    assert_eq!(empty, !taken[slab as usize].contains(&true));
                }
                let free = taken.iter().flatten().filter(|&&taken| !taken).count();
                assert_eq!(list.free_bytes(), free);
                let ranges = taken.iter().flat_map(|slab| slab.split(|&taken| taken)).filter(|range| !range.is_empty());
                assert_eq!(list.by_place.len(), ranges.count(), "adjacent ranges were not merged");
                let empty = taken.iter().filter(|slab| !slab.contains(&true)).map(Vec::len).sum::<usize>();
                assert_eq!(list.empty_slab_bytes(), empty);
            }
            for (slab, offset, size) in pieces {
                list.give_back(slab, offset, size);
            }
            let whole: Vec<_> = list.by_place.iter().map(|(&place, &len)| (place, len)).collect();
            assert_eq!(whole, [((0, 0), 40), ((1, 0), 64), ((2, 0), 128)]);
        }
    }

    #[test]
    fn holes_are_filled_before_whole_slabs_are_opened() {
        let mut list = FreeList::default();
        list.add_slab(0, 100);
        let first = list.take(30).unwrap();
        let second = list.take(30).unwrap();
        list.add_slab(1, 100);
        assert_eq!(list.take(10).unwrap(), (0, 60));
        list.give_back(first.0, first.1, 30);
        assert_eq!(list.take(29).unwrap(), (0, 0), "the lowest of two holes that fit alike");
        assert_eq!(list.take(30).unwrap(), (0, 70), "the tightest hole");
        assert_eq!(list.empty_slab_bytes(), 100);
        assert!(!list.give_back(second.0, second.1, 30));
        list.remove_slab(1);
        assert_eq!(list.take(100), None);
    }

    #[test]
    fn all_ranges_are_taken_at_once_and_can_be_freed_again() {
        let mut list = FreeList::default();
        assert!(!list.give_back(7, 10, 30));
        assert!(!list.give_back(8, 40, 5), "ranges of two slabs are not adjacent");
        assert_eq!(list.take(20), Some((7, 10)));
        assert_eq!(list.take_all().collect::<Vec<_>>(), [(7, 30, 10), (8, 40, 5)]);
        assert_eq!((list.free_bytes(), list.longest(), list.take(1)), (0, 0, None));
        list.give_back(7, 10, 20);
        assert_eq!((list.free_bytes(), list.longest()), (20, 20));
    }
}
