//! The CPU threads of a device, which do a host device's work and what a GPU cannot: one crew for the device, and one for each job
//! that runs beside others. A GPU has more of them, whose threads drive the streams of a join.
//!
//! Jobs do not share a crew. A thread that waits for a part of its own work, or for a GPU, takes up whatever else lies there, and
//! with another job's work it would hold up its own until that is done, or stopped, or read.

use std::ops::Deref;
use std::sync::Arc;

use parking_lot::Mutex;
use rayon::{ThreadPool, ThreadPoolBuilder};

use super::DeviceId;
use crate::{Error, Result};

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
    idle: Mutex<Vec<ThreadPool>>,
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
            None => self.start()?,
        };
        Ok(Crew { threads: Some(threads), home: self.clone() })
    }

    fn start(&self) -> Result<ThreadPool> {
        let (id, name, threads, remedy) = (self.id, self.name.clone(), self.threads, self.remedy);
        let name = move |thread| format!("{name}-{thread}");
        ThreadPoolBuilder::new()
            .num_threads(threads)
            .thread_name(name)
            .build()
            .map_err(|cause| Error::Exhausted(format!("starting {threads} threads for device {id}: {cause}; {remedy}")))
    }
}

/// Threads that go back to their device on drop.
#[derive(Debug)]
pub(super) struct Crew {
    /// `Some` until dropped.
    threads: Option<ThreadPool>,
    home: Arc<Crews>,
}

impl Crew {
    /// Another crew of the same device.
    ///
    /// # Errors
    /// [`Error::Exhausted`] when the system refuses threads.
    pub(super) fn another(&self) -> Result<Self> {
        self.home.crew()
    }
}

impl Deref for Crew {
    type Target = ThreadPool;

    fn deref(&self) -> &ThreadPool {
        self.threads.as_ref().expect("present until dropped")
    }
}

impl Drop for Crew {
    fn drop(&mut self) {
        self.home.idle.lock().extend(self.threads.take());
    }
}

#[cfg(test)]
mod tests {
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
}
