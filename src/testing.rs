//! What the unit tests of all rooms share.

use std::time::{Duration, Instant};

/// How long a test waits for what must come: far longer than it takes, since the machine may be busy with other things.
const WAIT_LIMIT: Duration = Duration::from_secs(60);

/// The seed of this run's random tests: `DOVETAIL_SEED`, or a fixed one, so that nobody's change fails by chance.
/// Printed, and shown when the test fails.
pub fn seed() -> u64 {
    let seed = std::env::var("DOVETAIL_SEED").ok().and_then(|text| text.parse().ok()).unwrap_or(20_261_121);
    println!("seed {seed} (repeat with DOVETAIL_SEED={seed})");
    seed
}

/// Waits until a condition holds that another thread makes true.
#[track_caller]
pub fn wait_until(what: &str, condition: impl Fn() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < WAIT_LIMIT, "waited {WAIT_LIMIT:?} for {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Waits until a condition holds that another task makes true.
pub async fn wait_in_task_until(what: &str, condition: impl Fn() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < WAIT_LIMIT, "waited {WAIT_LIMIT:?} for {what}");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}
