//! Return of freed heap to the system.
//!
//! mimalloc keeps freed memory for later allocations. It returns what was free for a second, but
//! only when a thread needs new pages or ends. In an idle server no thread does so, and the memory
//! of the last burst of calls would stay. So a thread ends here every few seconds.

use std::thread;
use std::time::Duration;

use crate::{Context, Result};

/// Time between two returns of memory. It is long enough that a busy server does not take the same
/// memory again and again, and short enough that an operator sees the memory come back.
const INTERVAL: Duration = Duration::from_secs(10);

/// Returns freed heap to the system at intervals, until the process ends.
///
/// # Errors
/// [`Error::Unavailable`](crate::Error::Unavailable) if the system gives no thread.
pub fn return_at_intervals() -> Result<()> {
    let thread = |name: &str| thread::Builder::new().name(name.into());
    let keep_returning = move || {
        loop {
            thread::sleep(INTERVAL);
            // Without memory for a thread, the next try may have it.
            if let Ok(ending) = thread("heap end").spawn(|| ()) {
                let _ = ending.join();
            }
        }
    };
    thread("heap").spawn(keep_returning).map(drop).context(|| "starting the thread \"heap\"")
}
