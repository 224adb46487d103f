//! Counters in memory that several processes map.
//!
//! A counter is a number of 64 bits. Any thread of any process that has the file may change it, and
//! wait until it changes. A waiting thread sleeps in the kernel.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::backing::Backing;
use super::mapping::{Mapping, Populating};
use crate::Result;
use crate::memory::Interrupt;

/// Longest sleep between two looks at a counter and at the reasons to stop waiting.
const WAIT_INTERVAL: Duration = Duration::from_millis(5);

const PAGE_BYTES: usize = 4 << 10;

/// Numbers of 64 bits that start at zero. Clones share them.
#[derive(Clone, Debug)]
pub struct SharedCounters {
    mapping: Arc<Mapping>,
    file: Arc<OwnedFd>,
    count: usize,
}

impl SharedCounters {
    /// Makes `count` counters.
    ///
    /// # Errors
    /// [`Exhausted`](crate::Error::Exhausted) when the system has no memory for them.
    pub fn new(count: usize) -> Result<Self> {
        let mapping = Mapping::new(bytes_of(count), &Backing::Memfd, &Interrupt::default(), Populating::Urgent)?;
        let file = mapping.file().expect("memory of a memfd has a file").clone();
        Ok(Self { mapping: Arc::new(mapping), file, count })
    }

    /// Maps the counters of another process.
    ///
    /// # Errors
    /// [`Exhausted`](crate::Error::Exhausted) when the system has no addresses for them, and the
    /// error of the system for a file that is too short.
    pub fn of_file(file: OwnedFd, count: usize) -> Result<Self> {
        let bytes = std::fs::File::from(file.try_clone()?).metadata()?.len();
        if bytes < bytes_of(count) as u64 {
            return Err(crate::Error::Internal(format!("a file of {bytes} bytes has no {count} counters")));
        }
        let mapping = Mapping::of_file(file.try_clone()?, bytes_of(count))?;
        Ok(Self { mapping: Arc::new(mapping), file: Arc::new(file), count })
    }

    /// Returns the file of the counters, for another process.
    pub fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Returns a counter.
    ///
    /// # Panics
    /// If there is none with this number.
    pub fn counter(&self, at: usize) -> &AtomicU64 {
        assert!(at < self.count, "counter {at} of {}", self.count);
        // SAFETY: the mapping has this many aligned numbers, lives as long as `self`, and is only
        // ever used as atomic numbers, also by other processes.
        unsafe { &*self.mapping.start.as_ptr().cast::<AtomicU64>().add(at) }
    }

    /// Returns the value of a counter, with all that its writer did before.
    pub fn get(&self, at: usize) -> u64 {
        #[cfg(test)]
        crate::turns::step();
        self.counter(at).load(Ordering::Acquire)
    }

    /// Adds to a counter, and wakes the threads that wait for it.
    pub fn add(&self, at: usize, more: u64) {
        #[cfg(test)]
        crate::turns::step();
        self.counter(at).fetch_add(more, Ordering::Release);
        futex(self.counter(at), libc::FUTEX_WAKE, i32::MAX as u32, None);
        #[cfg(test)]
        crate::turns::wake();
    }

    /// Waits until a counter is at least `least`. Calls `check` before each sleep of at most a few
    /// milliseconds.
    ///
    /// # Errors
    /// The error of `check`.
    pub fn wait(&self, at: usize, least: u64, check: &dyn Fn() -> Result<()>) -> Result<()> {
        loop {
            let value = self.get(at);
            if value >= least {
                return Ok(());
            }
            check()?;
            #[cfg(test)]
            if crate::turns::sleep() {
                continue;
            }
            futex(self.counter(at), libc::FUTEX_WAIT, value as u32, Some(WAIT_INTERVAL));
        }
    }
}

fn bytes_of(count: usize) -> usize {
    (count * size_of::<u64>()).next_multiple_of(PAGE_BYTES)
}

/// Sleeps while the low half of a counter has the given value, or wakes sleepers. Returns early for
/// any reason; callers look at the counter again.
fn futex(counter: &AtomicU64, operation: libc::c_int, value: u32, timeout: Option<Duration>) {
    const { assert!(cfg!(target_endian = "little"), "the low half of a counter comes first") };
    let timeout = timeout.map(|wait| libc::timespec { tv_sec: 0, tv_nsec: i64::from(wait.subsec_nanos()) });
    let timeout = timeout.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
    // SAFETY: the address is of a live counter, and the timeout lives until the call returns.
    unsafe { libc::syscall(libc::SYS_futex, counter.as_ptr(), operation, value, timeout, 0, 0) };
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Error;

    #[test]
    fn all_mappings_of_a_file_count_together() {
        let here = SharedCounters::new(600).unwrap();
        let there = SharedCounters::of_file(here.file().try_clone_to_owned().unwrap(), 600).unwrap();
        std::thread::scope(|scope| {
            for counters in [&here, &there, &here, &there] {
                scope.spawn(|| (0..1000).for_each(|_| counters.add(599, 1)));
            }
            there.wait(599, 4000, &|| Ok(())).unwrap();
        });
        assert_eq!([here.get(599), there.get(599), here.get(598)], [4000, 4000, 0]);
    }

    #[test]
    fn a_wait_ends_with_the_error_of_its_check() {
        let counters = SharedCounters::new(1).unwrap();
        let stopped = || Err(Error::Cancelled("stopped".into()));
        assert_eq!(counters.wait(0, 1, &stopped), stopped());
        counters.add(0, 1);
        assert_eq!(counters.wait(0, 1, &stopped), Ok(()), "a counter that is there needs no wait");
    }

    #[test]
    fn a_file_that_is_too_short_is_refused() {
        let few = SharedCounters::new(1).unwrap();
        let of = SharedCounters::of_file(few.file().try_clone_to_owned().unwrap(), 1000);
        assert!(matches!(of, Err(Error::Internal(message)) if message.contains("1000 counters")));
    }
}
