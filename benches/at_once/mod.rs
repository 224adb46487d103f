//! Several runs on one device at the same time.

use std::panic::resume_unwind;
use std::time::Instant;

/// Runs of each thread, one after the other: enough for threads to meet in all phases of a run.
const ROUNDS: usize = 4;

/// Runs on `threads` threads, each several times without a break. Returns the device's seconds for each run, and what the last run
/// of each thread returned; earlier results are dropped at once, as a server's are after they were fetched.
pub fn at_once<T: Send>(threads: usize, run: impl Fn() -> T + Sync) -> (f64, Vec<T>) {
    let rounds = || {
        (1..ROUNDS).for_each(|_| drop(run()));
        run()
    };
    let start = Instant::now();
    let last = std::thread::scope(|scope| {
        let spawned: Vec<_> = (0..threads).map(|_| scope.spawn(rounds)).collect();
        spawned.into_iter().map(|thread| thread.join().unwrap_or_else(|panic| resume_unwind(panic))).collect()
    });
    (start.elapsed().as_secs_f64() / (threads * ROUNDS) as f64, last)
}
