//! Queues of work on a device, marks in them, and counts of their work.

use std::any::Any;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::CancelFlag;
use super::phase::Phase;
use crate::Result;

/// A queue of work on a device, for one job.
#[derive(Clone, Debug)]
pub struct Stream {
    pub handle: Arc<dyn DeviceHandle>,
    pub cancel: CancelFlag,
    pub savings: Arc<TransferSavingsCounter>,
}

/// Bytes that copies to a device did not have to move.
#[derive(Debug, Default)]
pub struct TransferSavingsCounter {
    kept: AtomicU64,
    in_place: AtomicU64,
}

/// Totals of [`TransferSavingsCounter`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TransferSavings {
    /// Bytes that the device had cached.
    pub kept: u64,
    /// Bytes that the device reads in place.
    pub in_place: u64,
}

impl TransferSavings {
    /// Sum of both kinds.
    pub fn bytes(&self) -> u64 {
        self.kept + self.in_place
    }

    /// Returns the bytes that were saved since `before`.
    #[must_use]
    pub fn since(self, before: Self) -> Self {
        Self { kept: self.kept - before.kept, in_place: self.in_place - before.in_place }
    }
}

impl TransferSavingsCounter {
    /// Counts requested bytes that the device had cached.
    pub(super) fn add_kept(&self, bytes: u64) {
        self.kept.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Counts bytes that the device reads in place.
    pub(super) fn add_in_place(&self, bytes: u64) {
        self.in_place.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Returns the bytes saved so far.
    pub fn so_far(&self) -> TransferSavings {
        TransferSavings { kept: self.kept.load(Ordering::Relaxed), in_place: self.in_place.load(Ordering::Relaxed) }
    }
}

impl Stream {
    /// Returns the same queue for work that must be done even if the job is stopped. For example,
    /// memory that queued work reads is freed only after a wait for that work.
    #[must_use]
    pub fn uncancelled(&self) -> Self {
        Self { cancel: CancelFlag::new(), ..self.clone() }
    }
}

/// A mark in a stream.
#[derive(Clone, Debug)]
pub struct Event {
    pub handle: Arc<dyn DeviceHandle>,
}

/// A device's own handle of something that is not memory.
pub trait DeviceHandle: Any + Send + Sync + fmt::Debug {
    /// Gives the owning device the concrete type.
    fn as_any(&self) -> &dyn Any;
}

/// Time that work of one name took in one phase of joins, by the device's own clock.
#[derive(Clone, Debug, PartialEq)]
pub struct WorkTime {
    /// `None`: the work belongs to no phase.
    pub phase: Option<Phase>,
    /// A kernel or a copy.
    pub work: &'static str,
    /// Sum of the durations of all pieces. Streams that work at the same time each count in full.
    pub seconds: f64,
}

/// Measurement of work times by a [device's own clock](super::Device::timing).
pub trait TimingOps {
    /// Turns sums of work times on or off. Costs some microseconds for each piece of work.
    ///
    /// # Errors
    /// [`Unsupported`](crate::Error::Unsupported) when the device cannot measure times.
    fn add_up_times(&self, on: bool) -> Result<()>;

    /// Returns the times of work since the last call, for streams that are no longer used. Times
    /// are added up after [`TimingOps::add_up_times`], or always with
    /// `DOVETAIL_GPU_OBSERVER=times`.
    fn take_times(&self) -> Vec<WorkTime>;
}
