//! Queues of work on a device, marks in them, and what was counted of them.

use std::any::Any;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::CancelFlag;

/// A queue of work on a device, for one job.
#[derive(Clone, Debug)]
pub struct Stream {
    /// The device's own handle.
    pub handle: Arc<dyn DeviceHandle>,
    /// Raised when the job should stop.
    pub cancel: CancelFlag,
    /// What copies on this stream were asked for, and did not have to move.
    pub spared: Arc<SparedBytes>,
}

/// Bytes that copies to a device did not have to move.
#[derive(Debug, Default)]
pub struct SparedBytes {
    kept: AtomicU64,
    in_place: AtomicU64,
}

/// What [`SparedBytes`] have come to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Spared {
    /// Bytes that the device had kept.
    pub kept: u64,
    /// Bytes that it reads where they lie.
    pub in_place: u64,
}

impl Spared {
    /// All of them.
    pub fn bytes(&self) -> u64 {
        self.kept + self.in_place
    }

    /// What came since `before`.
    #[must_use]
    pub fn since(self, before: Self) -> Self {
        Self { kept: self.kept - before.kept, in_place: self.in_place - before.in_place }
    }
}

impl SparedBytes {
    /// Counts bytes that were asked for and that the device had kept.
    pub(super) fn add_kept(&self, bytes: u64) {
        self.kept.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Counts bytes that the device reads in place.
    pub(super) fn add_in_place(&self, bytes: u64) {
        self.in_place.fetch_add(bytes, Ordering::Relaxed);
    }

    /// What has been spared so far.
    pub fn so_far(&self) -> Spared {
        Spared { kept: self.kept.load(Ordering::Relaxed), in_place: self.in_place.load(Ordering::Relaxed) }
    }
}

impl Stream {
    /// The same queue for what has to be done whether or not the job is stopped, such as to wait before memory is let go of
    /// that queued work still reads.
    #[must_use]
    pub fn uncancelled(&self) -> Self {
        Self { cancel: CancelFlag::new(), ..self.clone() }
    }
}

/// A mark in a stream.
#[derive(Clone, Debug)]
pub struct Event {
    /// The device's own handle.
    pub handle: Arc<dyn DeviceHandle>,
}

/// A device's own handle of something that is not memory.
pub trait DeviceHandle: Any + Send + Sync + fmt::Debug {
    /// For the owning device, which knows the concrete type.
    fn as_any(&self) -> &dyn Any;
}

/// What the pieces of work of one name took in one phase of joins, by the device's own clock.
#[derive(Clone, Debug, PartialEq)]
pub struct WorkTime {
    /// The phase of the join; empty for work that belongs to none.
    pub phase: &'static str,
    /// A kernel or a copy.
    pub work: &'static str,
    /// From the beginning of each piece to its end, added up: streams that work at the same time count each for itself.
    pub seconds: f64,
}
