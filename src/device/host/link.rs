//! An emulated link between host memory and a host device, so that transfers cost what they would on a GPU's bus.

use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::Result;
use crate::device::CancelFlag;

/// The rates of an emulated link, in bytes per second for each direction.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct EmulatedLink {
    /// From host memory to the device.
    pub to_device_bytes_per_second: f64,
    /// From the device to host memory.
    pub from_device_bytes_per_second: f64,
}

/// One direction of a link. Transfers take turns: two at once share the rate, as they do on a bus.
#[derive(Debug)]
pub(super) struct Direction {
    bytes_per_second: f64,
    /// When the last transfer that was queued will be over.
    free_at: Mutex<Instant>,
}

/// How long a sleeping transfer goes without looking at its cancel flag.
const NAP: Duration = Duration::from_millis(10);

impl Direction {
    pub(super) fn new(bytes_per_second: f64) -> Self {
        Self { bytes_per_second, free_at: Mutex::new(Instant::now()) }
    }

    /// Queues a transfer of `bytes` and returns when it will be over.
    pub(super) fn begin(&self, bytes: usize) -> Instant {
        let mut free_at = self.free_at.lock();
        *free_at = (*free_at).max(Instant::now()) + Duration::from_secs_f64(bytes as f64 / self.bytes_per_second);
        *free_at
    }

    /// Sleeps until `end`.
    ///
    /// # Errors
    /// [`Cancelled`](crate::Error::Cancelled) when the flag is raised first.
    pub(super) fn wait(&self, end: Instant, cancel: &CancelFlag) -> Result<()> {
        loop {
            cancel.check()?;
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(());
            }
            std::thread::sleep(left.min(NAP));
        }
    }
}
