//! Emulated links between host memory and a host device, which give transfers the cost of a GPU's
//! bus.
//!
//! A transfer passes over one or more lanes at once, as packets do on the links and switches of a
//! route. It ends when the slowest lane has had the time for its bytes. Devices whose routes share
//! a link share its lane, and so its rate.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::device::CancelFlag;
use crate::{Error, Result};

/// The rates of an emulated link of a single device, in bytes per second for each direction.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct EmulatedLink {
    pub to_device_bytes_per_second: f64,
    pub from_device_bytes_per_second: f64,
}

/// The lanes between host memory and a device. Other devices may share some lanes.
#[derive(Clone, Debug)]
pub struct EmulatedRoute {
    pub to_device: Vec<Lane>,
    pub from_device: Vec<Lane>,
}

impl EmulatedRoute {
    /// Returns the route over one unshared link.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a link without a rate.
    pub fn of(link: EmulatedLink) -> Result<Self> {
        let lanes = |rate| Ok::<_, Error>(vec![Lane::new(rate)?]);
        Ok(Self {
            to_device: lanes(link.to_device_bytes_per_second)?,
            from_device: lanes(link.from_device_bytes_per_second)?,
        })
    }
}

/// A mover of bytes at a bounded rate: one direction of a link, or both together. Transfers take
/// turns, so that two at once share the rate, as they do on a bus. Clones are the same lane.
#[derive(Clone, Debug)]
pub struct Lane {
    bytes_per_second: f64,
    free_at: Arc<Mutex<Instant>>,
}

/// Time between two checks of the cancel flag during a sleeping transfer.
const NAP: Duration = Duration::from_millis(10);

impl Lane {
    /// Creates a lane of the given rate.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a rate that is below 1 byte per second or not finite.
    pub fn new(bytes_per_second: f64) -> Result<Self> {
        if !(bytes_per_second >= 1.0 && bytes_per_second.is_finite()) {
            return Err(Error::Invalid(format!(
                "a link has a rate of {bytes_per_second} bytes per second; give it one of at least 1"
            )));
        }
        Ok(Self { bytes_per_second, free_at: Arc::new(Mutex::new(Instant::now())) })
    }

    /// Time of a transfer of `bytes`.
    fn time(&self, bytes: usize) -> Duration {
        Duration::from_secs_f64(bytes as f64 / self.bytes_per_second)
    }

    /// Queues a transfer and returns its end.
    fn queue(&self, bytes: usize) -> Instant {
        let mut free_at = self.free_at.lock();
        *free_at = (*free_at).max(Instant::now()) + self.time(bytes);
        *free_at
    }
}

/// A transfer in progress. If dropped early, because it was cancelled or its copy failed, it leaves
/// the rest of its time to others.
#[derive(Debug)]
pub(super) struct Transfer<'a> {
    /// The lanes, each with the end of the transfer on it.
    lanes: Vec<(&'a Lane, Instant)>,
    bytes: usize,
}

impl<'a> Transfer<'a> {
    /// Queues a transfer of `bytes` on all lanes.
    pub(super) fn begin(lanes: &'a [Lane], bytes: usize) -> Self {
        Self { lanes: lanes.iter().map(|lane| (lane, lane.queue(bytes))).collect(), bytes }
    }

    /// Sleeps until the transfer ends.
    ///
    /// # Errors
    /// [`Cancelled`](Error::Cancelled) when the flag is raised first.
    pub(super) fn wait(self, cancel: &CancelFlag) -> Result<()> {
        let end = self.lanes.iter().map(|(_, end)| *end).max();
        loop {
            cancel.check()?;
            let left = end.map_or(Duration::ZERO, |end| end.saturating_duration_since(Instant::now()));
            if left.is_zero() {
                return Ok(());
            }
            std::thread::sleep(left.min(NAP));
        }
    }
}

impl Drop for Transfer<'_> {
    fn drop(&mut self) {
        let now = Instant::now();
        for (lane, end) in &self.lanes {
            // Transfers queued behind this one keep their announced end. The next transfer starts
            // earlier.
            let left = end.saturating_duration_since(now).min(lane.time(self.bytes));
            *lane.free_at.lock() -= left;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cancelled_transfer_frees_its_time_on_the_link() {
        let lanes = [Lane::new(1.0).unwrap(), Lane::new(10.0).unwrap()];
        let hour = Duration::from_secs(3600);
        let busy = |lane: &Lane| lane.free_at.lock().saturating_duration_since(Instant::now());
        let cancel = CancelFlag::new();
        cancel.raise();
        let transfer = Transfer::begin(&lanes, 1_000_000);
        assert!(busy(&lanes[0]) > 24 * hour && busy(&lanes[1]) > 24 * hour);
        assert!(matches!(transfer.wait(&cancel), Err(Error::Cancelled(_))));
        assert!(busy(&lanes[0]) < hour && busy(&lanes[1]) < hour);

        // A transfer that waits behind another gives back its own time and not the other's.
        let first = Transfer::begin(&lanes, 100_000);
        drop(Transfer::begin(&lanes, 1_000_000));
        assert!((24 * hour..30 * hour).contains(&busy(&lanes[0])));
        drop(first);
        assert!(busy(&lanes[0]) < hour);
    }

    #[test]
    fn lanes_without_a_rate_are_refused() {
        for rate in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            assert!(matches!(Lane::new(rate), Err(Error::Invalid(_))), "{rate}");
        }
    }
}
