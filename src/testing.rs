//! Helpers that the unit tests of all rooms share.

use std::time::{Duration, Instant};

/// How long a test waits for an event that must come: far longer than needed, because the machine
/// may be busy.
const WAIT_LIMIT: Duration = Duration::from_secs(60);

/// Returns the seed of this run's random tests: `DOVETAIL_SEED`, or a fixed one, so that no change
/// fails by chance. Prints the seed, so that a failing test shows it.
pub fn seed() -> u64 {
    let seed = std::env::var("DOVETAIL_SEED").ok().and_then(|text| text.parse().ok()).unwrap_or(20_261_121);
    println!("seed {seed} (repeat with DOVETAIL_SEED={seed})");
    seed
}

/// Waits until another thread makes `condition` true.
#[track_caller]
pub fn wait_until(what: &str, condition: impl Fn() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < WAIT_LIMIT, "waited {WAIT_LIMIT:?} for {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Waits until another task makes `condition` true.
pub async fn wait_in_task_until(what: &str, condition: impl Fn() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < WAIT_LIMIT, "waited {WAIT_LIMIT:?} for {what}");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}
