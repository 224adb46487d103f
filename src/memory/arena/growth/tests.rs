//! Tests of growth: who waits for a slab, and what is mapped ahead of need.

use std::os::fd::OwnedFd;
use std::sync::atomic::AtomicUsize;

use parking_lot::{Condvar, Mutex};

use super::super::{Backing, Pin, SLAB_BYTES};
use super::*;
use crate::memory::Budget;
use crate::testing::wait_until;

const MIB: usize = 1 << 20;

fn arena(limit: usize) -> Arena {
    Arena::new(Budget::new("host memory", "--host-memory", limit as u64))
}

/// Pins slabs when the gate is open. Until then, a slab stays in the state of being mapped.
#[derive(Debug, Default)]
struct Gate {
    is_open: Mutex<bool>,
    opened: Condvar,
    came: AtomicUsize,
    pinned: AtomicUsize,
}

impl Gate {
    /// Returns the gate of an arena whose first slab is mapped already.
    fn before(arena: &Arena) -> Arc<Self> {
        let gate = Arc::new(Self::default());
        arena.pin_by(Some(gate.clone()));
        gate
    }

    fn open(&self) {
        *self.is_open.lock() = true;
        self.opened.notify_all();
    }

    fn close(&self) {
        *self.is_open.lock() = false;
    }

    fn wait_for(&self, slabs: usize) {
        wait_until("slabs to be mapped as far as the gate", || self.came.load(Ordering::SeqCst) == slabs);
    }
}

impl Pin for Gate {
    fn pin(&self, _start: *mut u8, _len: usize, _file: Option<&Arc<OwnedFd>>) -> bool {
        self.came.fetch_add(1, Ordering::SeqCst);
        self.opened.wait_while(&mut self.is_open.lock(), |is_open| !*is_open);
        self.pinned.fetch_add(1, Ordering::SeqCst);
        true
    }

    fn unpin(&self, _start: *mut u8) {
        self.pinned.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Waits until a number of bytes are waited for.
fn wait_for_waiting(arena: &Arena, bytes: usize) {
    // A thread looks for room from time to time. It does not count as waiting then.
    wait_until("threads to wait for a slab", || arena.inner.slabs.lock().growth.waiting_bytes == bytes);
}

#[test]
fn an_allocation_that_finds_room_does_not_wait_for_a_slab_that_is_being_mapped() {
    let arena = arena(1 << 30);
    let first = arena.allocate(MIB, "the first slab").unwrap();
    let gate = Arc::new(Gate::default());
    gate.open();
    arena.pin_by(Some(gate.clone()));
    gate.close();
    std::thread::scope(|scope| {
        let large = scope.spawn(|| arena.allocate(SLAB_BYTES, "a second slab").unwrap());
        gate.wait_for(2);
        // All of these return while the gate is closed.
        let pieces: Vec<_> = (0..8).map(|_| arena.allocate(7 * MIB, "room in the first slab").unwrap()).collect();
        assert_eq!(arena.mapped_bytes(), SLAB_BYTES as u64);
        drop(pieces);
        gate.open();
        drop(large.join().unwrap());
    });
    assert_eq!(arena.mapped_bytes(), 2 * SLAB_BYTES as u64);
    drop(first);
    assert_eq!(arena.budget().used_bytes(), 0);
}

#[test]
fn threads_without_room_wait_for_one_slab_as_long_as_it_has_room_for_all_of_them() {
    let arena = arena(1 << 30);
    let gate = Gate::before(&arena);
    std::thread::scope(|scope| {
        let allocate = |len: usize| {
            let arena = arena.clone();
            scope.spawn(move || arena.allocate(len, "a piece").unwrap())
        };
        let mut threads = vec![allocate(4 * MIB)];
        gate.wait_for(1);
        // The slab has room for 60 MiB more.
        threads.extend((0..3).map(|_| allocate(20 * MIB)));
        wait_for_waiting(&arena, 60 * MIB);
        assert_eq!(gate.came.load(Ordering::SeqCst), 1);
        threads.push(allocate(MIB));
        gate.wait_for(2);
        assert_eq!(arena.mapped_bytes(), 0, "nothing is there before it is pinned");
        gate.open();
        let pieces: Vec<_> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
        assert_eq!((arena.mapped_bytes(), arena.budget().used_bytes()), (2 * SLAB_BYTES as u64, 65 * MIB as u64));
        drop(pieces);
    });
    assert!(arena.waited() > Duration::ZERO);
    assert_eq!((arena.budget().used_bytes(), gate.pinned.load(Ordering::SeqCst)), (0, 2));
}

#[test]
fn an_interrupt_ends_the_wait_for_a_slab_that_another_thread_maps() {
    let arena = arena(1 << 30);
    arena.inner.slabs.lock().growth.coming.push(Coming { len: SLAB_BYTES, own: 0, room: SLAB_BYTES });
    let asked = Arc::new(AtomicUsize::new(0));
    let count = asked.clone();
    let interrupt = Interrupt::by(move || match count.fetch_add(1, Ordering::SeqCst) {
        0 | 1 => Ok(()),
        _ => Err(Error::Cancelled("the job was cancelled".into())),
    });
    let refused = arena.interrupted_by(interrupt).allocate(1, "test").unwrap_err();
    assert_eq!(refused, Error::Cancelled("the job was cancelled".into()));
    assert_eq!((asked.load(Ordering::SeqCst), arena.budget().used_bytes()), (3, 0));
    assert_eq!(arena.inner.slabs.lock().growth.waiting_bytes, 0);
}

#[test]
fn threads_that_wait_for_a_slab_map_one_themselves_if_it_fails() {
    let arena = arena(1 << 30);
    let gate = Arc::new(Gate::default());
    std::thread::scope(|scope| {
        let (interrupted, held) = (arena.clone(), gate.clone());
        let interrupt = Interrupt::by(move || {
            // The thread has found no room, and maps a slab.
            if interrupted.inner.slabs.lock().growth.coming.is_empty() {
                return Ok(());
            }
            held.pin(std::ptr::null_mut(), 0, None);
            Err(Error::Cancelled("the job was cancelled".into()))
        });
        let first = scope.spawn(|| arena.interrupted_by(interrupt).allocate(MIB, "a job that is cancelled"));
        wait_until("the slab to be mapped", || gate.came.load(Ordering::SeqCst) > 0);
        let second = scope.spawn(|| arena.allocate(MIB, "a job that waits for it").unwrap());
        wait_for_waiting(&arena, MIB);
        gate.open();
        assert!(matches!(first.join().unwrap(), Err(Error::Cancelled(_))));
        drop(second.join().unwrap());
    });
    let slabs = arena.inner.slabs.lock();
    assert_eq!((slabs.mapped_bytes, slabs.growth.coming.len()), (SLAB_BYTES, 0));
}

#[test]
fn many_threads_without_room_get_pieces_within_the_limit() {
    let limit = 6 * SLAB_BYTES;
    let arena = arena(limit);
    std::thread::scope(|scope| {
        for thread in 0..12 {
            let arena = &arena;
            scope.spawn(move || {
                for round in 0..6 {
                    // At most a half of the budget, so that holes refuse no piece.
                    let mut piece = arena.allocate(MIB * (1 + (thread + round) % 16), "a piece").unwrap();
                    piece.fill(thread as u8);
                    assert!(piece.iter().all(|&byte| byte == thread as u8), "another thread wrote here");
                }
            });
        }
    });
    assert_eq!(arena.budget().used_bytes(), 0);
    let slabs = arena.inner.slabs.lock();
    assert!(slabs.mapped_bytes as u64 <= limit as u64 + slack_bytes(limit as u64));
    assert_eq!((slabs.growth.coming.len(), slabs.growth.waiting_bytes), (0, 0));
}

#[test]
fn memory_is_prepared_within_the_budget_kept_and_not_in_use() {
    let limit = 4 * SLAB_BYTES;
    let arena = arena(limit);
    let growing = arena.grow_ahead(0);
    growing.prepare(u64::MAX);
    wait_until("all memory to be prepared", || arena.mapped_bytes() == limit as u64);
    assert_eq!((arena.prepared_bytes_wanted(), arena.budget().used_bytes()), (limit as u64, 0));
    assert_eq!(arena.inner.kept_max().min(limit), limit, "trimming leaves all of it");
    let pieces: Vec<_> = (0..4).map(|_| arena.allocate(SLAB_BYTES, "a piece").unwrap()).collect();
    assert_eq!((arena.mapped_bytes(), arena.waited()), (limit as u64, Duration::ZERO), "no piece has waited");
    drop(pieces);
    for _ in 0..3 {
        arena.inner.trim(arena.inner.kept_max());
    }
    assert_eq!((arena.mapped_bytes(), arena.budget().used_bytes()), (limit as u64, 0));
    // A piece that is too long for every hole takes empty slabs.
    drop(arena.allocate(3 * SLAB_BYTES, "a long piece").unwrap());
    assert!(arena.mapped_bytes() <= limit as u64 + slack_bytes(limit as u64));
}

#[test]
fn preparing_stops_at_once_and_growth_for_jobs_goes_on() {
    let arena = arena(8 * SLAB_BYTES);
    let gate = Gate::before(&arena);
    let growing = arena.grow_ahead(0);
    growing.prepare(8 * SLAB_BYTES as u64);
    gate.wait_for(GROWTH_THREADS);
    growing.stop_preparing();
    gate.open();
    wait_until("slabs under way to be there", || arena.mapped_bytes() == (GROWTH_THREADS * SLAB_BYTES) as u64);
    assert_eq!(arena.prepared_bytes_wanted(), 0);
    assert!(arena.inner.slabs.lock().ahead(&arena.inner).is_none());
    arena.expect(3 * SLAB_BYTES as u64, false);
    wait_until("the need of jobs to be mapped", || arena.mapped_bytes() == 3 * SLAB_BYTES as u64);
}

#[test]
fn preparing_pauses_while_jobs_run_and_their_needs_are_still_mapped() {
    let arena = arena(8 * SLAB_BYTES);
    let growing = arena.grow_ahead(0);
    arena.expect(0, true);
    growing.prepare(8 * SLAB_BYTES as u64);
    assert!(arena.inner.slabs.lock().ahead(&arena.inner).is_none());
    arena.expect(2 * SLAB_BYTES as u64, true);
    wait_until("the need of jobs to be mapped", || arena.mapped_bytes() == 2 * SLAB_BYTES as u64);
    assert!(arena.inner.slabs.lock().ahead(&arena.inner).is_none());
    arena.expect(0, false);
    wait_until("the rest to be prepared", || arena.mapped_bytes() == 8 * SLAB_BYTES as u64);
}

#[test]
fn a_server_that_ends_does_not_wait_for_the_rest_of_a_slab() {
    let arena = arena(8 * SLAB_BYTES);
    let growing = arena.grow_ahead(0);
    let interrupt = growing.stops.interrupt(Ahead { len: SLAB_BYTES, is_urgent: true });
    let preparing = growing.stops.interrupt(Ahead { len: SLAB_BYTES, is_urgent: false });
    assert_eq!((interrupt.check(), preparing.check()), (Ok(()), Ok(())));
    growing.stop_preparing();
    assert!(interrupt.check().is_ok() && preparing.check().is_err());
    growing.prepare(8 * SLAB_BYTES as u64);
    drop(growing);
    assert!(interrupt.check().is_err());
    assert_eq!(arena.mapped_bytes(), 0, "preparing was stopped before it began");
}

#[test]
fn the_needs_of_jobs_are_mapped_ahead_only_where_memory_is_prepared() {
    let arena = arena(8 * SLAB_BYTES);
    let growing = arena.grow_ahead(0);
    let _job = arena.budget().reserve(SLAB_BYTES as u64 + 1, "a job that runs").unwrap();
    arena.expect(SLAB_BYTES as u64, false);
    assert!(arena.inner.slabs.lock().ahead(&arena.inner).is_none());
    growing.prepare(1);
    // Three slabs for two jobs, since the first needs a byte of the second slab.
    wait_until("both needs to be mapped", || arena.mapped_bytes() == 3 * SLAB_BYTES as u64);
    arena.expect(0, false);
    assert!(arena.inner.slabs.lock().ahead(&arena.inner).is_none());
    arena.expect(u64::MAX, false);
    wait_until("no more than the budget to be mapped", || arena.mapped_bytes() == 8 * SLAB_BYTES as u64);
}

#[test]
fn preparing_leaves_memory_to_everything_else() {
    let arena = Arena::with_backing(Budget::new("host memory", "--host-memory", 1 << 60), Backing::Memfd);
    assert!(arena.inner.check_that_memory_is_left(MIB).is_ok());
    let Err(Error::Exhausted(text)) = arena.inner.check_that_memory_is_left(1 << 60) else { panic!("it was allowed") };
    assert!(text.contains("the process may use") && text.contains("preparing leaves"), "{text}");
}

#[test]
fn the_log_tells_each_quarter_of_what_is_prepared_once() {
    let arena = arena(4 * SLAB_BYTES);
    let mut slabs = arena.inner.slabs.lock();
    slabs.growth.prepared_bytes = 4 * SLAB_BYTES;
    slabs.growth.progress = Some(Progress { since: Instant::now(), mapped_bytes: 0, quarters: 0 });
    assert_eq!(slabs.tell_progress(), None);
    slabs.mapped_bytes = 2 * SLAB_BYTES;
    assert_eq!(slabs.tell_progress().unwrap(), "prepared 128.0 MiB of 256.0 MiB of host memory");
    assert_eq!(slabs.tell_progress(), None);
    slabs.mapped_bytes = 5 * SLAB_BYTES;
    let said = slabs.tell_progress().unwrap();
    assert!(said.starts_with("prepared 256.0 MiB of host memory in ") && said.ends_with(" GB/s"), "{said}");
    assert_eq!(slabs.tell_progress(), None);
    slabs.mapped_bytes = 0;
}
