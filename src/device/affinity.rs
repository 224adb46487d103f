//! CPUs to which a device's threads are bound: those of the NUMA node of their GPU.

use std::sync::Once;

use rustix::thread::{CpuSet, sched_setaffinity};

/// Binds the calling thread, and the threads that it will start, to the given CPUs. None: all stay
/// allowed. If the system refuses, the log says so once, and the thread runs on any CPU.
pub fn bind_thread(cpus: &[u32]) {
    static TOLD: Once = Once::new();
    if cpus.is_empty() {
        return;
    }
    let mut set = CpuSet::new();
    let known = cpus.iter().map(|&cpu| cpu as usize).filter(|&cpu| cpu < CpuSet::MAX_CPU);
    known.for_each(|cpu| set.set(cpu));
    if let Err(error) = sched_setaffinity(None, &set) {
        TOLD.call_once(|| {
            let error = std::io::Error::from(error);
            tracing::warn!("threads are not bound to the CPUs of their GPU's NUMA node: {error}");
        });
    }
}

#[cfg(test)]
mod tests {
    use rustix::thread::sched_getaffinity;

    use super::*;

    fn allowed() -> Vec<u32> {
        let set = sched_getaffinity(None).unwrap();
        (0..CpuSet::MAX_CPU as u32).filter(|&cpu| set.is_set(cpu as usize)).collect()
    }

    #[test]
    fn a_bound_thread_and_those_that_it_starts_run_on_its_cpus() {
        let before = allowed();
        let last = *before.last().unwrap();
        let (own, inherited) = std::thread::spawn(move || {
            bind_thread(&[]);
            assert_eq!(allowed(), before);
            bind_thread(&[last]);
            (allowed(), std::thread::spawn(allowed).join().unwrap())
        })
        .join()
        .unwrap();
        assert_eq!((own, inherited), (vec![last], vec![last]));
    }

    #[test]
    fn cpus_that_are_not_there_leave_a_thread_where_it_is() {
        let (before, after) = std::thread::spawn(|| {
            let before = allowed();
            bind_thread(&[1022, 1023, 5000]);
            (before, allowed())
        })
        .join()
        .unwrap();
        assert_eq!(before, after);
    }
}
