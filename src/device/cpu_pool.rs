//! CPU threads of a device, which do a host device's work and the work that a GPU cannot do. The
//! device has one pool, and each job that runs in parallel with others has its own. A GPU has
//! further pools, whose threads drive the streams of a join.
//!
//! Jobs do not share a pool. A thread that waits for a part of its own work, or for a GPU, takes up
//! any other work of its pool. If that were another job's work, the thread's own job would wait
//! until the other job's work is done, stopped or read.
//!
//! A thread that runs jobs of a host device, one after the other, is itself part of a pool. A small
//! join then never changes threads, because a change would take longer than the work on its rows.

use std::cell::OnceCell;
use std::ops::Deref;
use std::sync::Arc;

use parking_lot::Mutex;
use rayon::{ThreadPool, ThreadPoolBuilder};

use super::{DeviceId, bind_thread};
use crate::{Error, Result};

thread_local! {
    /// The pool that includes this thread. A thread keeps its pool until the thread ends.
    static OWN: OnceCell<Option<Own>> = const { OnceCell::new() };
}

/// A pool that is reserved for one of its threads.
struct Own {
    threads: Arc<ThreadPool>,
    home: Arc<CpuPools>,
}

/// Pools of one device, with `threads` threads each.
#[derive(Debug)]
pub(super) struct CpuPools {
    id: DeviceId,
    /// Prefix of the thread names, which end with the thread's number.
    name: String,
    threads: usize,
    /// CPUs to which the threads are bound; none: all.
    cpus: Arc<[u32]>,
    /// Advice for the error when the system refuses threads.
    remedy: &'static str,
    /// Unused pools, kept because threads take longer to start than a small join to run.
    idle: Mutex<Vec<Arc<ThreadPool>>>,
}

impl CpuPools {
    pub(super) fn new(id: DeviceId, threads: usize, cpus: &[u32]) -> Arc<Self> {
        Self::of_name(id, id.to_string(), threads, cpus, "use fewer")
    }

    /// Returns pools with one thread per stream.
    #[cfg(dovetail_cuda)]
    pub(super) fn of_streams(id: DeviceId, streams: usize, cpus: &[u32]) -> Arc<Self> {
        Self::of_name(id, format!("{id}-stream"), streams, cpus, "allow this process more threads")
    }

    fn of_name(id: DeviceId, name: String, threads: usize, cpus: &[u32], remedy: &'static str) -> Arc<Self> {
        Arc::new(Self { id, name, threads: threads.max(1), cpus: cpus.into(), remedy, idle: Mutex::default() })
    }

    /// Takes a pool for the caller alone, until the pool is dropped.
    ///
    /// # Errors
    /// [`Error::Exhausted`] when the system refuses threads.
    pub(super) fn cpu_pool(self: &Arc<Self>) -> Result<CpuPool> {
        let idle = self.idle.lock().pop();
        let threads = match idle {
            Some(threads) => threads,
            None => Arc::new(self.start(false)?),
        };
        Ok(CpuPool { threads, home: self.clone(), is_of_caller: false })
    }

    /// Takes a pool that includes the calling thread. If that thread already has a pool of another
    /// device, takes a pool without it. The caller works on the tasks that it shares out, and runs
    /// small tasks without a change of threads. Other threads must not give work to this pool while
    /// its caller does not work.
    ///
    /// # Errors
    /// [`Error::Exhausted`] when the system refuses threads.
    pub(super) fn cpu_pool_of_caller(self: &Arc<Self>) -> Result<CpuPool> {
        let own = OWN.with(|own| {
            let start = || self.start(true).ok().map(|threads| Own { threads: Arc::new(threads), home: self.clone() });
            let own = own.get_or_init(start).as_ref()?;
            Arc::ptr_eq(&own.home, self).then(|| own.threads.clone())
        });
        match own {
            Some(threads) => Ok(CpuPool { threads, home: self.clone(), is_of_caller: true }),
            None => self.cpu_pool(),
        }
    }

    /// Starts threads. `with_caller`: the calling thread is the first of them.
    fn start(&self, with_caller: bool) -> Result<ThreadPool> {
        let (id, name, threads, remedy) = (self.id, self.name.clone(), self.threads, self.remedy);
        let builder =
            ThreadPoolBuilder::new().num_threads(threads).thread_name(move |thread| format!("{name}-{thread}"));
        let cpus = self.cpus.clone();
        let builder = builder.start_handler(move |_| bind_thread(&cpus));
        let builder = if with_caller { builder.use_current_thread() } else { builder };
        builder
            .build()
            .map_err(|cause| Error::Exhausted(format!("starting {threads} threads for device {id}: {cause}; {remedy}")))
    }
}

/// Threads that go back to their device on drop.
#[derive(Debug)]
pub(super) struct CpuPool {
    threads: Arc<ThreadPool>,
    home: Arc<CpuPools>,
    /// True for a pool that includes the calling thread. The thread keeps the pool.
    is_of_caller: bool,
}

impl CpuPool {
    /// Takes another pool of the same device.
    ///
    /// # Errors
    /// [`Error::Exhausted`] when the system refuses threads.
    pub(super) fn another(&self) -> Result<Self> {
        self.home.cpu_pool()
    }

    /// Takes another pool of the same device, like [`CpuPools::cpu_pool_of_caller`].
    ///
    /// # Errors
    /// [`Error::Exhausted`] when the system refuses threads.
    pub(super) fn of_caller(&self) -> Result<Self> {
        self.home.cpu_pool_of_caller()
    }
}

impl Deref for CpuPool {
    type Target = ThreadPool;

    fn deref(&self) -> &ThreadPool {
        &self.threads
    }
}

impl Drop for CpuPool {
    fn drop(&mut self) {
        if !self.is_of_caller {
            self.home.idle.lock().push(self.threads.clone());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;
    use std::sync::mpsc::channel;

    use super::*;
    use crate::device::DeviceKind;

    #[test]
    fn a_blocked_cpu_pool_does_not_block_another_and_is_reused() {
        let id = DeviceId { kind: DeviceKind::Host, index: 0 };
        let device = CpuPools::new(id, 1, &[]).cpu_pool().unwrap();
        let job = device.another().unwrap();
        let (let_go, held) = channel::<()>();
        std::thread::scope(|scope| {
            scope.spawn(|| job.install(move || held.recv().unwrap()));
            assert_eq!(device.install(|| 1 + 1), 2);
            let_go.send(()).unwrap();
        });
        drop(job);
        let _again = device.another().unwrap();
        assert!(device.home.idle.lock().is_empty(), "a pool was idle, and another was started");
    }

    #[test]
    fn a_thread_keeps_the_cpu_pool_that_it_belongs_to() {
        let cpu_pools = |index| CpuPools::new(DeviceId { kind: DeviceKind::Host, index }, 2, &[]);
        let who = || std::thread::current().id();
        // The spawned thread stays in that pool for its life. The test's own thread should not.
        let ended = std::thread::spawn(move || {
            let (device, caller) = (cpu_pools(0), who());
            let cpu_pool = device.cpu_pool_of_caller().unwrap();
            assert_eq!(cpu_pool.install(who), caller);
            let both = Barrier::new(2);
            cpu_pool.install(|| rayon::join(|| both.wait(), || both.wait()));
            drop(cpu_pool);
            assert_eq!(device.cpu_pool_of_caller().unwrap().install(who), caller, "the same pool again");
            assert!(device.idle.lock().is_empty(), "no other thread may use the pool");
            assert_ne!(cpu_pools(1).cpu_pool_of_caller().unwrap().install(who), caller, "a thread is in one pool");
        });
        ended.join().unwrap();
    }
}
