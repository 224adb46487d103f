//! Tests of memory that one process lends to another. Both are this process, with two views of each
//! slab.

use std::os::fd::OwnedFd;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::*;
use crate::Error;

const PURPOSE: &str = "a test";

/// Longest region that is lent if less is asked for.
const LOAN_BYTES_MAX: usize = 64 << 10;

/// Shows each slab to the borrower.
#[derive(Debug)]
struct Shows(Arc<SlabViews>);

impl Pin for Shows {
    fn pin(&self, start: *mut u8, len: usize, file: Option<&Arc<OwnedFd>>) -> bool {
        self.0.add(start as u64, len, file.unwrap().try_clone().unwrap()).unwrap();
        true
    }

    fn unpin(&self, start: *mut u8) {
        self.0.remove(start as u64);
    }
}

/// Owner of the slabs, and its loans to one borrower.
#[derive(Clone, Debug)]
struct Owner {
    arena: Arena,
    pool: ReservedPool,
    views: Arc<SlabViews>,
    loans: Arc<Mutex<Loans>>,
    /// Lengths of the regions that were asked for.
    asked: Arc<Mutex<Vec<usize>>>,
}

impl Owner {
    /// Creates an owner whose budget has only the `promised` bytes left.
    fn new(promised: u64) -> Self {
        let whole = Arena::with_backing(Budget::new("host memory", "--host-memory", promised), Backing::Memfd);
        let pool = ReservedPool::new(whole.budget().clone());
        pool.open(whole.budget().reserve(promised, "a job").unwrap());
        let views = Arc::new(SlabViews::default());
        whole.pin_by(Some(Arc::new(Shows(views.clone()))));
        // With a slab that is mapped, regions are available at once.
        drop(whole.drawing_on(pool.clone()).allocate(1, PURPOSE).unwrap());
        let arena = whole.drawing_on(pool.clone());
        Self { arena, pool, views, loans: Arc::default(), asked: Arc::default() }
    }

    /// Returns an arena that borrows from the owner.
    fn borrower(&self) -> (Arena, Arc<Borrower>) {
        let borrower = Arc::new(Borrower::new(Box::new(self.clone()), self.views.clone(), None));
        (Arena::borrowed(borrower.clone()), borrower)
    }

    /// Sends a batch that consists of `buffers`. Returns its pieces as the owner sees them.
    fn push(&self, borrower: &Borrower, buffers: &[&Buffer]) -> BTreeMap<u64, Buffer> {
        let places: Vec<Place> = buffers.iter().map(|buffer| self.views.place_of(buffer)).collect();
        let (pieces, unused) = borrower.pieces_of(&places);
        self.take_back(unused);
        self.loans.lock().cut_out(&pieces)
    }

    fn used_bytes(&self) -> u64 {
        self.arena.budget().used_bytes() - self.pool.free_bytes()
    }

    fn requests(&self) -> usize {
        self.asked.lock().len()
    }
}

impl Lender for Owner {
    fn lend(&self, len: usize, purpose: &str, unused: Vec<Span>) -> Result<Span> {
        self.take_back(unused);
        self.asked.lock().push(len);
        let at_once = self.arena.allocate_at_once(len..=len.max(LOAN_BYTES_MAX));
        let region = at_once.map_or_else(|| self.arena.allocate(len, purpose), Ok)?;
        Ok(self.loans.lock().lend(region))
    }

    fn reserve(&self, bytes: u64, purpose: &str, unused: Vec<Span>) -> Result<u64> {
        self.take_back(unused);
        let reserved = self.arena.draw(bytes, purpose)?;
        std::mem::forget(reserved);
        Ok(bytes)
    }

    fn release(&self, held: u64) {
        self.pool.give_back(held);
    }

    fn take_back(&self, unused: Vec<Span>) {
        drop(self.loans.lock().take_back(&unused));
    }

    fn free_bytes(&self) -> u64 {
        self.arena.free_bytes()
    }
}

fn filled(arena: &Arena, len: usize, value: u8) -> Buffer {
    let mut piece = arena.allocate(len, PURPOSE).unwrap();
    piece.fill(value);
    piece.freeze()
}

#[test]
fn pieces_are_allocated_shortened_and_freed_in_a_region_without_a_request() {
    let owner = Owner::new(1 << 20);
    let (arena, _) = owner.borrower();
    let first = arena.allocate(1000, PURPOSE).unwrap();
    assert_eq!((owner.requests(), owner.used_bytes()), (1, LOAN_BYTES_MAX as u64));
    for _ in 0..100 {
        let mut scratch = arena.allocate(LOAN_BYTES_MAX - 1024, PURPOSE).unwrap();
        scratch.truncate(100);
        let rest = arena.allocate(LOAN_BYTES_MAX - 1024 - 256, PURPOSE).unwrap();
        assert_eq!(rest.as_ptr() as usize - scratch.as_ptr() as usize, 256, "the end was not given back");
    }
    assert_eq!((owner.requests(), arena.free_bytes()), (1, (1 << 20) - 1024));
    drop(first);
    assert_eq!(arena.free_bytes(), 1 << 20);
}

#[test]
fn a_first_region_is_used_before_a_request() {
    let owner = Owner::new(1 << 20);
    let region = owner.loans.lock().lend(owner.arena.allocate(4096, PURPOSE).unwrap());
    let borrower = Borrower::new(Box::new(owner.clone()), owner.views.clone(), Some(region));
    let arena = Arena::borrowed(Arc::new(borrower));
    let _first = arena.allocate(4096, PURPOSE).unwrap();
    assert_eq!(owner.requests(), 0);
    let _second = arena.allocate(1, PURPOSE).unwrap();
    assert_eq!(owner.requests(), 1);
}

#[test]
fn a_job_can_use_all_that_it_was_promised() {
    let owner = Owner::new(1 << 20);
    let (arena, _) = owner.borrower();
    // Every second piece is freed, so each region has holes that are too short for the last piece.
    let mut pieces: Vec<_> = (0..1024).map(|_| arena.allocate(1024, PURPOSE).unwrap()).collect();
    assert!(matches!(arena.allocate(1, PURPOSE).unwrap_err(), Error::Exhausted(_)));
    let mut number = 0;
    pieces.retain(|_| {
        number += 1;
        number % 2 == 0
    });
    let last = arena.allocate(512 << 10, PURPOSE).unwrap();
    assert_eq!(owner.asked.lock().last(), Some(&last.len()));
    assert_eq!(owner.used_bytes(), 1 << 20, "the holes went back before the last piece was lent");
    assert!(matches!(arena.allocate(1, PURPOSE).unwrap_err(), Error::Exhausted(_)));
    drop(last);
    let held = arena.reserve(512 << 10, PURPOSE).expect("the region of the last piece went back first");
    assert!(matches!(arena.allocate(1, PURPOSE).unwrap_err(), Error::Exhausted(_)));
    drop(held);
    arena.allocate(512 << 10, PURPOSE).unwrap();
}

/// Makes each allocation directly and by a borrower.
#[test]
fn a_borrower_is_refused_nothing_that_its_owner_would_be_given() {
    const PROMISED: u64 = 256 << 10;
    let mut random = StdRng::seed_from_u64(crate::testing::seed());
    for _ in 0..20 {
        let (direct, owner) = (Owner::new(PROMISED), Owner::new(PROMISED));
        let (borrowed, _) = owner.borrower();
        let mut pieces: Vec<(ArenaBuffer, ArenaBuffer)> = Vec::new();
        for _ in 0..300 {
            let longest = 1 << random.random_range(4..17);
            let len = random.random_range(0..longest);
            match (direct.arena.allocate(len, PURPOSE), borrowed.allocate(len, PURPOSE)) {
                (Ok(mut direct), Ok(mut borrowed)) => {
                    let kept = if random.random_bool(0.3) { random.random_range(0..=len) } else { len };
                    direct.truncate(kept);
                    borrowed.truncate(kept);
                    pieces.push((direct, borrowed));
                }
                (Err(_), Err(_)) => {}
                (direct, borrowed) => panic!("{len} bytes: {direct:?} directly, {borrowed:?} borrowed"),
            }
            assert_eq!(borrowed.free_bytes(), direct.pool.free_bytes());
            if pieces.len() > 4 && random.random_bool(0.5) {
                pieces.swap_remove(random.random_range(0..pieces.len()));
            }
        }
    }
}

#[test]
fn a_piece_of_a_result_is_not_handed_out_again_and_outlives_the_loan() {
    let owner = Owner::new(1 << 20);
    let (arena, borrower) = owner.borrower();
    let before = arena.allocate(500, PURPOSE).unwrap();
    let made = filled(&arena, 1000, 7);
    let after = arena.allocate(500, PURPOSE).unwrap();
    let pieces = owner.push(&borrower, &[&made.slice_with_length(100, 300)]);
    assert_eq!(pieces.len(), 1);
    drop((before, made, after));
    // The job overwrites all memory that it can get.
    let mut overwritten = Vec::new();
    while let Ok(mut piece) = arena.allocate(256, PURPOSE) {
        piece.fill(9);
        overwritten.push(piece);
    }
    assert_eq!(overwritten.len(), ((1 << 20) - 1024) / 256, "all except the piece of the result");
    drop((overwritten, arena, borrower));
    let piece = pieces.into_values().next().unwrap();
    assert!(piece.iter().take(1000).all(|&byte| byte == 7));
    drop(std::mem::take(&mut *owner.loans.lock()));
    assert_eq!(owner.used_bytes(), 1024, "the result keeps only its own bytes in use");
    assert!(piece.iter().take(1000).all(|&byte| byte == 7));
    drop(piece);
    assert_eq!(owner.used_bytes(), 0);
    assert_eq!(owner.arena.longest_free_bytes(), owner.arena.mapped_bytes());
}

#[test]
fn a_piece_of_two_batches_goes_back_when_the_job_and_both_readers_are_done_with_it() {
    let owner = Owner::new(1 << 20);
    let (arena, borrower) = owner.borrower();
    let dictionary = filled(&arena, 1000, 1);
    let (first_keys, second_keys) = (filled(&arena, 300, 2), filled(&arena, 300, 3));
    let first = owner.push(&borrower, &[&first_keys, &dictionary]);
    drop(first_keys);
    let second = owner.push(&borrower, &[&dictionary, &second_keys]);
    let address = *first.keys().find(|address| second.contains_key(address)).unwrap();
    assert_eq!(first[&address].as_ptr(), second[&address].as_ptr(), "both batches have the same bytes");
    drop((first, second, second_keys));
    drop(arena.allocate(1 << 19, PURPOSE).unwrap());
    assert!(owner.loans.lock().cut_out(&[Span { address, len: 1024 }]).contains_key(&address), "the job has it yet");
    drop(dictionary);
    drop(arena.allocate((1 << 20) - 1024, PURPOSE).unwrap());
    assert!(arena.allocate(1 << 20, PURPOSE).is_ok(), "all bytes are free again");
}

#[test]
fn many_bytes_of_results_go_back_without_a_request() {
    let owner = Owner::new(8 << 20);
    let (arena, borrower) = owner.borrower();
    let (large, small) = (filled(&arena, 2 << 20, 1), filled(&arena, 300, 2));
    let pieces = owner.push(&borrower, &[&large, &small]);
    drop(pieces);
    let free_before = owner.pool.free_bytes();
    drop(small);
    assert_eq!(owner.pool.free_bytes(), free_before, "few bytes wait for the next request");
    drop(large);
    assert_eq!(owner.pool.free_bytes() - free_before, (2 << 20) + 512);
}

#[test]
fn bytes_that_are_not_lent_are_neither_cut_out_nor_taken_back() {
    let owner = Owner::new(1 << 20);
    let others = owner.arena.allocate(1024, PURPOSE).unwrap();
    let mut loans = Loans::default();
    let first = loans.lend(owner.arena.allocate(1024, PURPOSE).unwrap());
    let second = loans.lend(owner.arena.allocate(1024, PURPOSE).unwrap());
    assert_eq!(second.address, first.address + 1024, "the regions are adjacent");
    let at = |address: u64, len: usize| Span { address, len };
    let refused = [
        at(others.as_ptr() as u64, 1024),
        at(first.address - 256, 512),
        at(first.address + 1, 100),
        at(first.address + 512, 1024),
        at(second.address + 512, 513),
        at(second.address + 1024, 0),
        at(second.address, usize::MAX),
        at(u64::MAX, 1),
        at(0, 256),
    ];
    let used = owner.used_bytes();
    for span in refused {
        assert!(loans.cut_out(&[span]).is_empty(), "{span:?}");
        assert!(loans.take_back(&[span]).is_empty(), "{span:?}");
        assert_eq!(owner.used_bytes(), used, "{span:?}");
    }
    drop(loans.take_back(&[at(first.address + 256, 200)]));
    assert_eq!(owner.used_bytes(), used - 256);
    assert!(loans.take_back(&[at(first.address, 1024)]).is_empty(), "a part was taken back already");
    assert_eq!(loans.cut_out(&[at(first.address, 256), at(first.address + 512, 512)]).len(), 2);
    drop(loans);
    assert_eq!(owner.used_bytes(), 1024);
}

/// Threads of a job allocate, write, push, check and free. Each byte tells the thread that wrote
/// it, so shared bytes would be noticed.
#[test]
fn pieces_of_the_threads_of_a_job_never_overlap_and_are_all_returned() {
    let seed = crate::testing::seed();
    let owner = Owner::new(64 << 20);
    let (arena, borrower) = owner.borrower();
    std::thread::scope(|scope| {
        for thread in 0..4u8 {
            let (owner, arena, borrower) = (&owner, &arena, &borrower);
            scope.spawn(move || {
                let mut random = StdRng::seed_from_u64(seed.wrapping_add(u64::from(thread)));
                let (mut pieces, mut results): (Vec<ArenaBuffer>, Vec<Buffer>) = (Vec::new(), Vec::new());
                let is_own = |bytes: &[u8], len: usize| bytes.iter().take(len).all(|&byte| byte == thread);
                for _ in 0..500 {
                    match random.random_range(0..4) {
                        0 | 1 => {
                            let mut piece = arena.allocate(1 << random.random_range(0..17), PURPOSE).unwrap();
                            piece.fill(thread);
                            piece.truncate(random.random_range(1..=piece.len()));
                            pieces.push(piece);
                        }
                        2 if !pieces.is_empty() => {
                            let made = pieces.swap_remove(random.random_range(0..pieces.len())).freeze();
                            let pushed = owner.push(borrower, &[&made]).into_values().next().unwrap();
                            results.push(pushed.slice_with_length(0, made.len()));
                        }
                        _ if !pieces.is_empty() => {
                            let piece = pieces.swap_remove(random.random_range(0..pieces.len()));
                            assert!(is_own(&piece, piece.len()), "another thread wrote here");
                        }
                        _ => {}
                    }
                }
                assert!(results.iter().all(|result| is_own(result, result.len())), "a result was overwritten");
            });
        }
    });
    assert_eq!(arena.free_bytes() as usize + borrower_unsent_bytes(&borrower), 64 << 20);
    drop((arena, borrower));
    drop(std::mem::take(&mut *owner.loans.lock()));
    assert_eq!(owner.used_bytes(), 0);
}

/// Bytes of results that no reader has any more, and that have not gone back yet.
fn borrower_unsent_bytes(borrower: &Borrower) -> usize {
    let (pieces, unused) = borrower.pieces_of([]);
    assert!(pieces.is_empty());
    unused.iter().map(|span| span.len).sum()
}

#[test]
fn a_thread_that_looks_for_bytes_of_an_announced_slab_waits_until_it_is_added() {
    const LEN: usize = 2 << 20;
    let memfd = || Backing::Memfd.file(LEN).unwrap().unwrap();
    let views = Arc::new(SlabViews::default());
    let place = Place::Slab { address: 4096 + 100, len: 3 };
    assert!(views.buffer(&place).is_err(), "nothing is known of the slab");
    views.announce(4096, LEN);
    let elsewhere = Place::Slab { address: 4096 + LEN as u64, len: 1 };
    assert!(views.buffer(&elsewhere).is_err(), "other bytes are not waited for");
    let (asks, asked) = std::sync::mpsc::channel();
    let reader = std::thread::spawn({
        let (views, place) = (views.clone(), place.clone());
        move || {
            asks.send(()).unwrap();
            views.buffer(&place).map(|buffer| buffer.len())
        }
    });
    asked.recv().unwrap();
    std::thread::sleep(std::time::Duration::from_millis(10));
    views.add(4096, LEN, memfd()).unwrap();
    assert_eq!(reader.join().unwrap(), Ok(3));
    // The owner has unmapped the slab and mapped another at its address.
    views.remove(4096);
    views.announce(4096, LEN);
    views.announce(1 << 40, LEN);
    let short = std::fs::File::open("/proc/self/status").unwrap();
    assert!(views.add(4096, LEN, short.into()).is_err());
    assert!(views.buffer(&place).is_err(), "the slab could not be mapped");
    views.add(1 << 40, LEN, memfd()).unwrap();
    assert_eq!(views.buffer(&Place::Slab { address: 1 << 40, len: 5 }).unwrap().len(), 5);
}
