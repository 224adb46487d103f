//! Tests of the pieces that the arena hands out and takes back.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicUsize, Ordering};

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::backing::HUGE_PAGE_BYTES;
use super::*;
use crate::Error;

fn arena(limit: u64) -> Arena {
    Arena::new(Budget::new("host memory", "--host-memory", limit))
}

#[test]
fn pieces_are_aligned_and_do_not_overlap() {
    let arena = arena(1 << 20);
    let mut pieces: Vec<_> =
        [1, 255, 256, 257, 4096, 0].iter().map(|&len| arena.allocate(len, "test").unwrap()).collect();
    for (value, piece) in pieces.iter_mut().enumerate() {
        assert_eq!(piece.as_ptr() as usize % ALIGNMENT, 0);
        piece.fill(value as u8);
    }
    for (value, piece) in pieces.iter().enumerate() {
        assert!(piece.iter().all(|&byte| byte == value as u8));
    }
}

#[test]
fn a_frozen_piece_lives_as_long_as_its_last_slice() {
    let arena = arena(1 << 20);
    let mut piece = arena.allocate(1000, "test").unwrap();
    piece.fill(7);
    let slice = piece.freeze().slice_with_length(500, 10);
    assert_eq!(arena.budget().used_bytes(), 1024);
    assert_eq!(slice.as_slice(), [7; 10]);
    drop(slice);
    assert_eq!(arena.budget().used_bytes(), 0);
}

#[test]
fn freed_neighbours_merge_and_the_slab_is_reused() {
    let arena = arena(1 << 30);
    let thirds: Vec<_> = (0..3).map(|_| arena.allocate(SLAB_BYTES / 4, "test").unwrap()).collect();
    let [first, second, third] = <[_; 3]>::try_from(thirds).unwrap();
    drop(first);
    drop(third);
    drop(second);
    let _whole = arena.allocate(SLAB_BYTES, "test").unwrap();
    assert_eq!(arena.mapped_bytes(), SLAB_BYTES as u64);
}

#[test]
fn a_piece_larger_than_a_slab_gets_one_of_its_own() {
    let arena = arena(1 << 30);
    let piece = arena.allocate(SLAB_BYTES + 1, "test").unwrap();
    assert_eq!(piece.len(), SLAB_BYTES + 1);
    assert_eq!(arena.mapped_bytes(), (SLAB_BYTES + HUGE_PAGE_BYTES) as u64);
}

/// Returns an interrupt whose checks fail from the `looks`th on, and a counter of the checks.
fn interrupt_at(looks: usize) -> (Interrupt, Arc<AtomicUsize>) {
    let asked = Arc::new(AtomicUsize::new(0));
    let count = asked.clone();
    let interrupt = Interrupt::by(move || match count.fetch_add(1, Ordering::Relaxed) + 1 >= looks {
        true => Err(Error::Cancelled("the job was cancelled".into())),
        false => Ok(()),
    });
    (interrupt, asked)
}

#[test]
fn an_interrupt_ends_the_mapping_of_a_slab_and_leaves_no_memory_in_use() {
    let arena = arena(1 << 30);
    for looks in [1, 2, 7] {
        let (interrupt, asked) = interrupt_at(looks);
        let refused = arena.interrupted_by(interrupt).allocate(2 * SLAB_BYTES, "test").unwrap_err();
        assert_eq!(refused, Error::Cancelled("the job was cancelled".into()));
        assert!(asked.load(Ordering::Relaxed) >= looks);
        assert_eq!((arena.mapped_bytes(), arena.budget().used_bytes()), (0, 0));
    }
    // An allocation that finds room does not wait.
    let _piece = arena.allocate(SLAB_BYTES / 4, "test").unwrap();
    let (interrupt, asked) = interrupt_at(1);
    arena.interrupted_by(interrupt).allocate(SLAB_BYTES / 4, "test").unwrap();
    assert_eq!(asked.load(Ordering::Relaxed), 0);
}

#[test]
fn a_truncated_piece_returns_its_end() {
    let arena = arena(1 << 20);
    let mut piece = arena.allocate(10_000, "test").unwrap();
    piece.fill(3);
    piece.truncate(300);
    assert_eq!((piece.len(), arena.budget().used_bytes()), (300, 512));
    let after = arena.allocate(9_000, "test").unwrap();
    assert_eq!(after.as_ptr() as usize - piece.as_ptr() as usize, 512, "the end was not given back");
    assert!(piece.iter().all(|&byte| byte == 3));
    drop((piece, after));
    assert_eq!(arena.budget().used_bytes(), 0);
    assert_eq!(arena.longest_free_bytes(), arena.mapped_bytes());
}

#[test]
fn each_part_of_a_piece_returns_its_own_bytes() {
    let arena = arena(1 << 20);
    let mut first = arena.allocate(1000, "test").unwrap();
    first.fill(1);
    let mut second = first.split_off(512);
    assert_eq!((first.len(), second.len(), arena.budget().used_bytes()), (512, 488, 1024));
    second.fill(2);
    assert!(first.iter().all(|&byte| byte == 1));
    drop(first);
    assert_eq!(arena.budget().used_bytes(), 512);
    assert!(second.iter().all(|&byte| byte == 2));
    second.truncate(10);
    assert_eq!(arena.budget().used_bytes(), 256);
    drop(second);
    assert_eq!(arena.budget().used_bytes(), 0);
    assert_eq!(arena.longest_free_bytes(), arena.mapped_bytes());
}

#[test]
fn a_piece_takes_no_more_of_a_reservation_than_it_needs() {
    let arena = arena(1 << 20);
    let reservation = arena.budget().reserve(100_000, "a join").unwrap();
    let piece = arena.allocate_reserved(1000, reservation).unwrap();
    assert_eq!(arena.budget().used_bytes(), 1024);
    drop(piece);
}

#[test]
fn an_immediate_allocation_takes_only_reserved_bytes_and_no_new_slab() {
    let arena = Arena::new(Budget::new("host memory", "--host-memory", 64 << 20));
    let pool = ReservedPool::new(arena.budget().clone());
    let drawing = arena.drawing_on(pool.clone());
    pool.open(arena.budget().reserve(1 << 20, "a job").unwrap());
    assert!(arena.allocate_at_once(64..=64).is_none(), "nothing was promised to callers that draw on the budget");
    assert!(drawing.allocate_at_once(64..=64).is_none(), "no slab is mapped");
    assert_eq!(pool.free_bytes(), 1 << 20, "the bytes drawn for it are back");
    let first = drawing.allocate(64, "a piece").unwrap();
    let second = drawing.allocate_at_once(100..=100).unwrap();
    assert_eq!((second.len(), pool.free_bytes()), (100, (1 << 20) - 2 * ALIGNMENT as u64));
    assert!(drawing.allocate_at_once(1 << 20..=1 << 20).is_none(), "more than is left of the promise");
    let rest = drawing.allocate_at_once(1..=1 << 20).unwrap();
    assert_eq!((rest.len() as u64, pool.free_bytes()), ((1 << 20) - 2 * ALIGNMENT as u64, 0));
    drop(rest);
    drop((first, second));
    assert_eq!((pool.free_bytes(), arena.budget().used_bytes()), (1 << 20, 1 << 20));
}

#[test]
fn an_immediate_allocation_takes_the_longest_range_of_a_slab() {
    let arena = Arena::new(Budget::new("host memory", "--host-memory", 64 << 20));
    let pool = ReservedPool::new(arena.budget().clone());
    let drawing = arena.drawing_on(pool.clone());
    let thirds: Vec<_> = (0..3).map(|_| arena.allocate(20 << 20, "others").unwrap()).collect();
    let [_first, second, _third] = <[_; 3]>::try_from(thirds).unwrap();
    drop(second);
    pool.open(arena.budget().reserve(24 << 20, "a job").unwrap());
    assert!(drawing.allocate_at_once(22 << 20..=24 << 20).is_none(), "no range is that long");
    assert_eq!(pool.free_bytes(), 24 << 20);
    let longest = drawing.allocate_at_once(1..=usize::MAX / 2).unwrap();
    assert_eq!((longest.len(), pool.free_bytes()), (20 << 20, 4 << 20));
    let exact = drawing.allocate_at_once(1000..=1000).unwrap();
    assert_eq!((exact.len(), pool.free_bytes()), (1000, (4 << 20) - 1024));
}

#[test]
fn an_arena_draws_on_a_reservation_and_its_pieces_outlive_the_reservation() {
    let arena = arena(1 << 20);
    let pool = ReservedPool::new(arena.budget().clone());
    pool.open(arena.budget().reserve(4096, "a join").unwrap());
    let of_job = arena.drawing_on(pool.clone());
    let _others = arena.allocate((1 << 20) - 4096, "others").unwrap();
    let mut piece = of_job.allocate(4096, "a result").unwrap();
    assert!(matches!(of_job.allocate(1, "one more").unwrap_err(), Error::Exhausted(_)));
    piece.truncate(1000);
    assert_eq!((pool.free_bytes(), arena.budget().used_bytes()), (3072, 1 << 20));
    let result = piece.freeze();
    pool.close();
    assert_eq!(arena.budget().free_bytes(), 3072);
    drop(result);
    assert_eq!(arena.budget().free_bytes(), 4096);
}

#[test]
fn empty_slabs_are_unmapped_for_larger_ones_within_the_budget() {
    let limit = 4 * SLAB_BYTES as u64;
    let arena = arena(limit);
    // Take all of the budget in ordinary slabs, then in one piece, twice. An arena that gave no
    // slabs back would map twice the budget.
    for _ in 0..2 {
        drop((0..4).map(|_| arena.allocate(SLAB_BYTES, "test").unwrap()).collect::<Vec<_>>());
        drop(arena.allocate(4 * SLAB_BYTES, "test").unwrap());
        assert!(arena.mapped_bytes() <= limit + slack_bytes(limit), "{} bytes are mapped", arena.mapped_bytes());
    }
}

#[test]
fn memory_lost_to_fragmentation_is_not_mapped_again() {
    let limit = 4 * SLAB_BYTES as u64;
    let arena = arena(limit);
    let mut pieces: Vec<_> = (0..16).map(|_| arena.allocate(SLAB_BYTES / 4, "test").unwrap()).collect();
    // Every slab keeps a piece. Half of the budget is free, in holes of at most half a slab.
    let mut place = 0;
    pieces.retain(|_| {
        place += 1;
        place % 2 == 0
    });
    let first = arena.allocate(SLAB_BYTES, "test").expect("the slack has room for this slab");
    let refused = arena.allocate(SLAB_BYTES, "test").unwrap_err();
    let Error::Exhausted(text) = &refused else { panic!("{refused:?}") };
    assert!(text.contains("only in pieces") && text.contains("--host-memory"), "{text}");
    assert!(arena.mapped_bytes() <= limit + slack_bytes(limit));
    drop((first, pieces));
    assert_eq!(arena.budget().used_bytes(), 0, "a refusal takes nothing");
    arena.allocate(2 * SLAB_BYTES, "test").unwrap();
}

#[test]
fn an_arena_knows_its_own_addresses() {
    let arena = arena(1 << 20);
    let piece = arena.allocate(1000, "test").unwrap();
    let elsewhere = [0u8; 8];
    assert!(arena.owns(piece.as_ptr()) && arena.owns(&piece[999]));
    assert!(!arena.owns(elsewhere.as_ptr()) && !arena.owns(std::ptr::null()));
}

#[test]
fn growth_in_advance_keeps_bytes_free_within_the_budget_and_ends_when_dropped() {
    let arena = arena(160 << 20);
    let growing = arena.grow_ahead(100 << 20);
    // Two slabs supply the wanted bytes; a third would exceed the budget.
    crate::testing::wait_until("two slabs to be mapped ahead", || arena.mapped_bytes() >= 2 * SLAB_BYTES as u64);
    let _piece = arena.allocate(SLAB_BYTES, "test").unwrap();
    drop(growing);
    assert_eq!(arena.mapped_bytes(), 2 * SLAB_BYTES as u64);
}

#[test]
fn slabs_unused_for_a_while_are_unmapped() {
    let limit = 8 * SLAB_BYTES as u64;
    let arena = arena(limit);
    let kept = SLAB_BYTES;
    let use_all = || drop((0..4).map(|_| arena.allocate(SLAB_BYTES, "test").unwrap()).collect::<Vec<_>>());
    let mapped_slabs = || arena.mapped_bytes() as usize / SLAB_BYTES;
    use_all();
    for _ in 0..3 {
        arena.inner.trim(kept);
        assert_eq!(mapped_slabs(), 4, "all slabs were in use since the last trim");
        use_all();
    }
    arena.inner.trim(kept);
    // One slab is needed from here on, and one is kept.
    let piece = arena.allocate(SLAB_BYTES, "test").unwrap();
    arena.inner.trim(kept);
    assert_eq!(mapped_slabs(), 2);
    arena.inner.trim(kept);
    assert_eq!(mapped_slabs(), 2);
    drop(piece);
    assert_eq!(mapped_slabs(), 2);
}

/// Threads allocate, write, check and free. A thread that finds another's bytes has shared a piece
/// with it.
#[test]
fn pieces_of_many_threads_never_overlap_and_are_all_returned() {
    let seed = crate::testing::seed();
    let arena = arena(256 << 20);
    std::thread::scope(|scope| {
        for thread in 0..8u8 {
            let arena = &arena;
            scope.spawn(move || {
                let mut random = StdRng::seed_from_u64(seed.wrapping_add(u64::from(thread)));
                let mut pieces: Vec<ArenaBuffer> = Vec::new();
                for _ in 0..500 {
                    if random.random_bool(0.6) {
                        let exponent = random.random_range(0..20);
                        let mut piece = arena.allocate(random.random_range(0..1 << exponent), "test").unwrap();
                        piece.fill(thread);
                        if random.random_bool(0.2) {
                            piece.truncate(random.random_range(0..=piece.len()));
                        }
                        pieces.push(piece);
                    } else if !pieces.is_empty() {
                        let piece = pieces.swap_remove(random.random_range(0..pieces.len()));
                        assert!(piece.iter().all(|&byte| byte == thread), "another thread wrote here");
                    }
                }
            });
        }
    });
    assert_eq!(arena.budget().used_bytes(), 0);
    let slabs = arena.inner.slabs.lock();
    assert_eq!(slabs.free.empty_slab_bytes(), slabs.mapped_bytes, "all slabs are whole again");
}

#[test]
fn a_refused_piece_leaves_the_budget_as_it_was() {
    let arena = arena(1024);
    assert!(matches!(arena.allocate(4096, "a table").unwrap_err(), Error::Exhausted(_)));
    assert_eq!(arena.budget().used_bytes(), 0);
    assert_eq!(arena.mapped_bytes(), 0);
}

#[derive(Debug, Default)]
struct PinnedSlabs(Mutex<Vec<usize>>);

impl Pin for PinnedSlabs {
    fn pin(&self, start: *mut u8, _len: usize, _file: Option<&Arc<OwnedFd>>) -> bool {
        self.0.lock().push(start as usize);
        true
    }

    fn unpin(&self, start: *mut u8) {
        let mut pinned = self.0.lock();
        let at = pinned.iter().position(|&slab| slab == start as usize).expect("it was pinned");
        pinned.remove(at);
    }
}

#[test]
fn slabs_are_pinned_while_they_are_mapped() {
    let arena = arena(256 << 20);
    let before = arena.allocate(10 << 20, "test").unwrap();
    let pinned = Arc::new(PinnedSlabs::default());
    arena.pin_by(None);
    arena.pin_by(Some(pinned.clone()));
    assert_eq!(pinned.0.lock().len(), 1);
    let after = arena.allocate(100 << 20, "test").unwrap();
    assert_eq!(pinned.0.lock().len(), 2);
    drop((before, after, arena));
    assert!(pinned.0.lock().is_empty());
}

#[test]
fn slabs_come_from_nodes_in_turn_and_know_theirs() {
    let arena = arena(256 << 20);
    let before = arena.allocate(1, "a test").unwrap();
    // Every machine has node 0. A container may forbid the choice.
    let may_choose = arena.spread_over(&[0]);
    assert!(!arena.spread_over(&[1023]), "there is no such node");
    let large: Vec<_> = (0..2).map(|_| arena.allocate(65 << 20, "a test").unwrap()).collect();
    let node = may_choose.then_some(0);
    assert_eq!(arena.node_of(before.as_ptr()), None, "the slab was there before");
    for piece in &large {
        assert_eq!((arena.node_of(piece.as_ptr()), arena.owns(piece.as_ptr())), (node, true));
        assert_eq!(arena.node_of(&piece[piece.len() - 1]), node);
    }
    assert_eq!(arena.node_of([0_u8].as_ptr()), None, "not in a slab");
}

#[test]
fn a_node_that_gives_no_memory_is_passed_over() {
    let arena = arena(256 << 20);
    arena.inner.nodes.set([1021, 1022, 5000].into()).unwrap();
    let turns: Vec<_> = (0..4).map(|_| arena.inner.next_node().unwrap()).collect();
    assert_eq!(turns, [1021, 1022, 5000, 1021]);
    let mut piece = arena.allocate(65 << 20, "a test").unwrap();
    piece.fill(7);
    assert_eq!(arena.node_of(piece.as_ptr()), None);
}
