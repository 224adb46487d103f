//! CPU work of calls that does not go through the queue of jobs. It reads commands, binds, plans
//! and explains joins, checks the rows of uploads and takes their statistics, encodes rows that
//! must be copied, and writes schemas of thousands of columns.
//!
//! ```text
//!   call ─► waits for a slot, without a thread ─► works, on a thread of its own ─► answer
//!    └─ given up (client gone, deadline passed, server ends) ─► the work stops at its next check
//! ```
//!
//! There are as many slots as processors. Streams of rows take all but one of them at the same
//! time, so a small join is planned beside any number of uploads. The other calls of one tenant
//! take all but one, too, and wait for each other before they wait in the common line. So another
//! tenant's small join is planned beside any number of explanations. The threads that serve
//! connections only wait for the answer. So those threads stay available for other calls, for
//! deadlines and for the end of the server, whatever the work is.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use tokio::sync::Semaphore;
use tokio::task::{AbortHandle, JoinError};

use crate::memory::Interrupt;
use crate::{Error, Result, panics};

/// Work on fewer bytes runs inline, on the thread that serves the connection. It takes a few
/// hundred microseconds, too short to delay other calls. On two cores, a change of threads for each
/// message of 4 MiB costs a quarter of the processor time of an upload, because the bytes leave the
/// processor's cache.
const INLINE_BYTES_MAX: usize = 4 << 20;

/// Slots for the CPU work of a server's calls, and counts of these calls. Clones share them. Calls
/// of a tenant use the clone [of the tenant](Self::of).
#[derive(Clone, Debug)]
pub struct CpuWork {
    slots: Arc<Semaphore>,
    /// Slots that streams of rows may take.
    stream_slots: Arc<Semaphore>,
    /// Slots that calls of a tenant may take, without streams. Tenants without calls are left out.
    slots_of_tenants: Arc<Mutex<HashMap<String, Weak<Semaphore>>>>,
    /// Slots of this clone's tenant; `None` for work of the server itself.
    own_slots: Option<Arc<Semaphore>>,
    slots_max: usize,
    calls: Arc<AtomicUsize>,
    interrupted: Arc<AtomicUsize>,
}

impl CpuWork {
    /// Creates as many slots as there are processors.
    pub fn new() -> Self {
        Self::with_slots(std::thread::available_parallelism().map_or(1, usize::from))
    }

    fn with_slots(slots_max: usize) -> Self {
        let slots = Arc::new(Semaphore::new(slots_max));
        let stream_slots = Arc::new(Semaphore::new(all_but_one(slots_max)));
        Self {
            slots,
            stream_slots,
            slots_of_tenants: Arc::default(),
            own_slots: None,
            slots_max,
            calls: Arc::default(),
            interrupted: Arc::default(),
        }
    }

    /// Returns a clone for calls of a tenant. Callers without a name share a server with no others,
    /// and may take all slots.
    pub fn of(&self, tenant: &str) -> Self {
        if tenant.is_empty() {
            return self.clone();
        }
        let mut of_tenants = self.slots_of_tenants.lock();
        let known = of_tenants.get(tenant).and_then(Weak::upgrade);
        let own_slots = known.unwrap_or_else(|| {
            of_tenants.retain(|_, slots| slots.strong_count() > 0);
            let slots = Arc::new(Semaphore::new(all_but_one(self.slots_max)));
            of_tenants.insert(tenant.to_owned(), Arc::downgrade(&slots));
            slots
        });
        Self { own_slots: Some(own_slots), ..self.clone() }
    }

    /// Returns the number of calls that wait for a slot, or for their work.
    pub fn calls(&self) -> usize {
        self.calls.load(Ordering::Relaxed)
    }

    /// Returns the number of slots in use, including those whose call was given up while the work
    /// still runs.
    pub fn slots_taken(&self) -> usize {
        self.slots_max - self.slots.available_permits()
    }

    /// Returns how often work was stopped because its call was given up.
    pub fn interrupted(&self) -> usize {
        self.interrupted.load(Ordering::Relaxed)
    }

    /// Runs work for the call that awaits it. The work should check its interrupt every few
    /// milliseconds.
    ///
    /// # Errors
    /// The work's own; [`Error::Internal`] when it panics.
    pub async fn run<T, W>(&self, work: W) -> Result<T>
    where
        T: Send + 'static,
        W: FnOnce(&Interrupt) -> Result<T> + Send + 'static,
    {
        let kinds: Vec<&Arc<Semaphore>> = self.own_slots.iter().chain([&self.slots]).collect();
        self.run_in_slot(&kinds, work).await
    }

    /// Runs work that has a slot of each kind.
    ///
    /// A task of its own waits for them. A client that reads no more of its answer keeps its call
    /// from being polled. If that call were in the line for a slot, it would be given one, and
    /// would keep it without working.
    async fn run_in_slot<T, W>(&self, kinds: &[&Arc<Semaphore>], work: W) -> Result<T>
    where
        T: Send + 'static,
        W: FnOnce(&Interrupt) -> Result<T> + Send + 'static,
    {
        let _counted = Counted::new(&self.calls);
        let mut call = Call::default();
        let (interrupt, interrupted) = (call.interrupt(), self.interrupted.clone());
        let slots: Vec<Arc<Semaphore>> = kinds.iter().copied().cloned().collect();
        let working = tokio::spawn(async move {
            let mut taken = Vec::with_capacity(slots.len());
            for kind in slots {
                taken.push(kind.acquire_owned().await.expect("the slots are never closed"));
            }
            let working = tokio::task::spawn_blocking(move || {
                let _taken = taken;
                let outcome = work(&interrupt);
                if outcome.is_err() && interrupt.check().is_err() {
                    interrupted.fetch_add(1, Ordering::Relaxed);
                }
                outcome
            });
            working.await.unwrap_or_else(|error| Err(broken_off(error)))
        });
        call.waiting = Some(working.abort_handle());
        working.await.unwrap_or_else(|error| Err(broken_off(error)))
    }

    /// Runs work of a stream of rows that reads or writes `bytes` bytes. Work on few bytes runs
    /// inline. Callers count the bytes that the work touches, which may be more than its client
    /// sent. Streams leave a slot to other calls, if there are several.
    ///
    /// # Errors
    /// As [`CpuWork::run`].
    pub async fn run_on<T, W>(&self, bytes: usize, work: W) -> Result<T>
    where
        T: Send + 'static,
        W: FnOnce(&Interrupt) -> Result<T> + Send + 'static,
    {
        match bytes < INLINE_BYTES_MAX {
            true => work(&Interrupt::default()),
            false => self.run_in_slot(&[&self.stream_slots, &self.slots], work).await,
        }
    }
}

fn all_but_one(slots: usize) -> usize {
    slots.saturating_sub(1).max(1)
}

impl Default for CpuWork {
    fn default() -> Self {
        Self::new()
    }
}

/// Call that waits for its work. Dropping it interrupts the work, or the wait for a slot.
#[derive(Debug, Default)]
struct Call {
    is_given_up: Arc<AtomicBool>,
    waiting: Option<AbortHandle>,
}

impl Call {
    fn interrupt(&self) -> Interrupt {
        let is_given_up = self.is_given_up.clone();
        Interrupt::by(move || match is_given_up.load(Ordering::Relaxed) {
            true => Err(Error::Cancelled("the call was cancelled before it was done".into())),
            false => Ok(()),
        })
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        self.is_given_up.store(true, Ordering::Relaxed);
        self.waiting.iter().for_each(AbortHandle::abort);
    }
}

/// Counts one call until it is dropped.
struct Counted(Arc<AtomicUsize>);

impl Counted {
    fn new(calls: &Arc<AtomicUsize>) -> Self {
        calls.fetch_add(1, Ordering::Relaxed);
        Self(calls.clone())
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

fn broken_off(error: JoinError) -> Error {
    match error.try_into_panic() {
        Ok(panic) => Error::Internal(format!("working on the call panicked: {}", panics::message(&*panic))),
        // The runtime ends.
        Err(_) => Error::Unavailable("the server ended before the call was done; try again on another server".into()),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    async fn eventually(mut holds: impl FnMut() -> bool) {
        while !holds() {
            tokio::time::sleep(std::time::Duration::from_millis(1)).await;
        }
    }

    /// Works until it is interrupted.
    fn until_interrupted(interrupt: &Interrupt) -> Result<()> {
        loop {
            interrupt.check()?;
            std::thread::yield_now();
        }
    }

    #[tokio::test]
    async fn work_stops_when_its_call_is_cancelled_and_the_next_call_gets_the_slot() {
        let work = Arc::new(CpuWork::with_slots(1));
        let call = |work: &Arc<CpuWork>| {
            let work = work.clone();
            tokio::spawn(async move { work.run(until_interrupted).await })
        };
        let (first, second) = (call(&work), call(&work));
        eventually(|| work.calls() == 2 && work.slots_taken() == 1).await;
        second.abort();
        eventually(|| work.calls() == 1).await;
        first.abort();
        eventually(|| work.calls() == 0 && work.slots_taken() == 0).await;
        assert_eq!(work.interrupted(), 1, "the second call never had the slot");
        assert_eq!(work.run(|_| Ok(7)).await, Ok(7));
    }

    #[tokio::test]
    async fn a_call_that_waits_for_a_slot_takes_no_thread_and_leaves_when_cancelled() {
        let work = Arc::new(CpuWork::with_slots(1));
        let (end, ended) = mpsc::channel::<()>();
        let long = tokio::spawn({
            let work = work.clone();
            async move { work.run(move |_| Ok(ended.recv().is_err())).await }
        });
        eventually(|| work.slots_taken() == 1).await;
        let waiting = tokio::time::timeout(std::time::Duration::from_millis(20), work.run(|_| Ok(())));
        assert!(waiting.await.is_err(), "the slot is taken");
        assert_eq!((work.calls(), work.slots_taken()), (1, 1));
        drop(end);
        assert_eq!(long.await.unwrap(), Ok(true));
        assert_eq!(work.slots_taken(), 0);
    }

    #[tokio::test]
    async fn a_call_that_is_not_polled_keeps_no_slot() {
        let work = Arc::new(CpuWork::with_slots(1));
        let (end, ended) = mpsc::channel::<()>();
        let long = tokio::spawn({
            let work = work.clone();
            async move { work.run(move |_| Ok(ended.recv().is_err())).await }
        });
        eventually(|| work.slots_taken() == 1).await;
        // They get into the line for the slot, and are then left alone.
        let mut stream = Box::pin(work.run_on(usize::MAX, |_| Ok(6)));
        assert!(futures::poll!(&mut stream).is_pending());
        let mut unread = Box::pin(work.run(|_| Ok(7)));
        assert!(futures::poll!(&mut unread).is_pending());
        drop(end);
        assert_eq!(long.await.unwrap(), Ok(true));
        assert_eq!(work.run(|_| Ok(8)).await, Ok(8));
        assert_eq!((stream.await, unread.await), (Ok(6), Ok(7)), "their work was done meanwhile");
        eventually(|| work.calls() == 0 && work.slots_taken() == 0).await;
    }

    #[tokio::test]
    async fn work_on_few_bytes_runs_inline_and_work_on_many_does_not() {
        let work = CpuWork::with_slots(1);
        let inline = std::thread::current().id();
        let on = |bytes| work.run_on(bytes, |_| Ok(std::thread::current().id()));
        assert_eq!(on(INLINE_BYTES_MAX - 1).await, Ok(inline));
        assert_ne!(on(INLINE_BYTES_MAX).await, Ok(inline));
        assert_ne!(on(usize::MAX).await, Ok(inline));
    }

    #[tokio::test]
    async fn streams_of_rows_leave_a_slot_to_other_calls() {
        let work = CpuWork::with_slots(2);
        let streams: Vec<_> = (0..3)
            .map(|_| {
                let work = work.clone();
                tokio::spawn(async move { work.run_on(usize::MAX, until_interrupted).await })
            })
            .collect();
        eventually(|| work.calls() == 3 && work.slots_taken() == 1).await;
        assert_eq!(work.run(|_| Ok(7)).await, Ok(7));
        streams.iter().for_each(tokio::task::JoinHandle::abort);
        eventually(|| work.calls() == 0 && work.slots_taken() == 0).await;
        assert_eq!(work.run_on(usize::MAX, |_| Ok(8)).await, Ok(8));
    }

    #[tokio::test]
    async fn calls_of_a_tenant_leave_a_slot_to_other_tenants() {
        let work = CpuWork::with_slots(2);
        let calls: Vec<_> = (0..3)
            .map(|_| {
                let of_one = work.of("one");
                tokio::spawn(async move { of_one.run(until_interrupted).await })
            })
            .collect();
        eventually(|| work.calls() == 3 && work.slots_taken() == 1).await;
        assert_eq!(work.of("other").run(|_| Ok(7)).await, Ok(7));
        assert_eq!(work.of("other").run_on(usize::MAX, |_| Ok(8)).await, Ok(8));
        calls.iter().for_each(tokio::task::JoinHandle::abort);
        eventually(|| work.calls() == 0 && work.slots_taken() == 0).await;
        assert_eq!(work.of("one").run(|_| Ok(9)).await, Ok(9));
        let unnamed: Vec<_> = (0..2)
            .map(|_| {
                let unnamed = work.of("");
                tokio::spawn(async move { unnamed.run(until_interrupted).await })
            })
            .collect();
        eventually(|| work.slots_taken() == 2).await;
        unnamed.iter().for_each(tokio::task::JoinHandle::abort);
        eventually(|| work.calls() == 0 && work.slots_taken() == 0).await;
        // Its streams take none of the slots for its other calls.
        let (one, streaming) = (work.of("one"), work.of("one"));
        let stopped = tokio::spawn(async move { streaming.run_on(usize::MAX, until_interrupted).await });
        eventually(|| work.slots_taken() == 1).await;
        assert_eq!(one.run(|_| Ok(10)).await, Ok(10));
        stopped.abort();
        eventually(|| work.calls() == 0 && work.slots_taken() == 0).await;
        drop(one);
        work.of("new");
        let tenants: Vec<String> = work.slots_of_tenants.lock().keys().cloned().collect();
        assert_eq!(tenants, ["new"], "the others have no calls");
    }

    #[tokio::test]
    async fn a_panic_fails_its_call_and_frees_the_slot() {
        let work = CpuWork::with_slots(1);
        let outcome: Result<()> = work.run(|_| panic!("no such column")).await;
        assert_eq!(outcome, Err(Error::Internal("working on the call panicked: no such column".into())));
        assert_eq!((work.calls(), work.slots_taken()), (0, 0));
        assert_eq!(work.run(|_| Ok(7)).await, Ok(7));
    }
}
