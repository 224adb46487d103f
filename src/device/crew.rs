//! The CPU threads of a device, which do a host device's work and what a GPU cannot: one crew for the device, and one for each job
//! that runs beside others. A GPU has more of them, whose threads drive the streams of a join.
//!
//! Jobs do not share a crew. A thread that waits for a part of its own work, or for a GPU, takes up whatever else lies there, and
//! with another job's work it would hold up its own until that is done, or stopped, or read.
//!
//! A thread that runs jobs of a host device, one after the other, is itself one of a crew: a small join then changes threads nowhere,
//! which would take it longer than its rows.

use std::cell::OnceCell;
use std::ops::Deref;
use std::sync::Arc;

use parking_lot::Mutex;
use rayon::{ThreadPool, ThreadPoolBuilder};

use super::DeviceId;
use crate::{Error, Result};

thread_local! {
    /// The crew that this thread is one of. It stays that until it ends.
    static OWN: OnceCell<Option<Own>> = const { OnceCell::new() };
}

/// A crew that one of its threads has for itself.
struct Own {
    threads: Arc<ThreadPool>,
    home: Arc<Crews>,
}

/// Crews of one device, of as many threads each.
#[derive(Debug)]
pub(super) struct Crews {
    id: DeviceId,
    /// What threads are called, each with its number.
    name: String,
    threads: usize,
    /// What helps when the system refuses them.
    remedy: &'static str,
    /// Those that nobody uses: threads take longer to start than a small join to run.
    idle: Mutex<Vec<Arc<ThreadPool>>>,
}

impl Crews {
    pub(super) fn new(id: DeviceId, threads: usize) -> Arc<Self> {
        Self::of_name(id, id.to_string(), threads, "use fewer")
    }

    /// Crews of so many streams.
    #[cfg(dovetail_cuda)]
    pub(super) fn of_streams(id: DeviceId, streams: usize) -> Arc<Self> {
        Self::of_name(id, format!("{id}-stream"), streams, "allow this process more threads")
    }

    fn of_name(id: DeviceId, name: String, threads: usize, remedy: &'static str) -> Arc<Self> {
        Arc::new(Self { id, name, threads: threads.max(1), remedy, idle: Mutex::default() })
    }

    /// A crew that nobody else uses, until it is dropped.
    ///
    /// # Errors
    /// [`Error::Exhausted`] when the system refuses threads.
    pub(super) fn crew(self: &Arc<Self>) -> Result<Crew> {
        let idle = self.idle.lock().pop();
        let threads = match idle {
            Some(threads) => threads,
            None => Arc::new(self.start(false)?),
        };
        Ok(Crew { threads, home: self.clone(), is_of_caller: false })
    }

    /// A crew that the calling thread is one of, where it has none of another device: what it then shares out, it also works on, and what is
    /// not worth that is done without a change of threads. Others may give such a crew nothing to do while its caller does not work.
    ///
    /// # Errors
    /// [`Error::Exhausted`] when the system refuses threads.
    pub(super) fn crew_of_caller(self: &Arc<Self>) -> Result<Crew> {
        let own = OWN.with(|own| {
            let start = || self.start(true).ok().map(|threads| Own { threads: Arc::new(threads), home: self.clone() });
            let own = own.get_or_init(start).as_ref()?;
            Arc::ptr_eq(&own.home, self).then(|| own.threads.clone())
        });
        match own {
            Some(threads) => Ok(Crew { threads, home: self.clone(), is_of_caller: true }),
            None => self.crew(),
        }
    }

    /// `with_caller`: the calling thread is the first of them.
    fn start(&self, with_caller: bool) -> Result<ThreadPool> {
        let (id, name, threads, remedy) = (self.id, self.name.clone(), self.threads, self.remedy);
        let builder =
            ThreadPoolBuilder::new().num_threads(threads).thread_name(move |thread| format!("{name}-{thread}"));
        let builder = if with_caller { builder.use_current_thread() } else { builder };
        builder
            .build()
            .map_err(|cause| Error::Exhausted(format!("starting {threads} threads for device {id}: {cause}; {remedy}")))
    }
}

/// Threads that go back to their device on drop.
#[derive(Debug)]
pub(super) struct Crew {
    threads: Arc<ThreadPool>,
    home: Arc<Crews>,
    /// Such a one stays its caller's.
    is_of_caller: bool,
}

impl Crew {
    /// Another crew of the same device.
    ///
    /// # Errors
    /// [`Error::Exhausted`] when the system refuses threads.
    pub(super) fn another(&self) -> Result<Self> {
        self.home.crew()
    }

    /// Another crew of the same device, as [`Crews::crew_of_caller`].
    ///
    /// # Errors
    /// [`Error::Exhausted`] when the system refuses threads.
    pub(super) fn of_caller(&self) -> Result<Self> {
        self.home.crew_of_caller()
    }
}

impl Deref for Crew {
    type Target = ThreadPool;

    fn deref(&self) -> &ThreadPool {
        &self.threads
    }
}

impl Drop for Crew {
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
    fn a_crew_works_on_while_another_is_held_up_and_is_used_again() {
        let id = DeviceId { kind: DeviceKind::Host, index: 0 };
        let device = Crews::new(id, 1).crew().unwrap();
        let job = device.another().unwrap();
        let (let_go, held) = channel::<()>();
        std::thread::scope(|scope| {
            scope.spawn(|| job.install(move || held.recv().unwrap()));
            assert_eq!(device.install(|| 1 + 1), 2);
            let_go.send(()).unwrap();
        });
        drop(job);
        let _again = device.another().unwrap();
        assert!(device.home.idle.lock().is_empty(), "a crew was idle, and another was started");
    }

    #[test]
    fn a_thread_keeps_a_crew_that_it_is_one_of() {
        let crews = |index| Crews::new(DeviceId { kind: DeviceKind::Host, index }, 2);
        let who = || std::thread::current().id();
        // It stays in that crew, which the test's own thread need not.
        let ended = std::thread::spawn(move || {
            let (device, caller) = (crews(0), who());
            let crew = device.crew_of_caller().unwrap();
            assert_eq!(crew.install(who), caller);
            let both = Barrier::new(2);
            crew.install(|| rayon::join(|| both.wait(), || both.wait()));
            drop(crew);
            assert_eq!(device.crew_of_caller().unwrap().install(who), caller, "the same once more");
            assert!(device.idle.lock().is_empty(), "nobody else may have it");
            assert_ne!(crews(1).crew_of_caller().unwrap().install(who), caller, "a thread is of one crew");
        });
        ended.join().unwrap();
    }
}
