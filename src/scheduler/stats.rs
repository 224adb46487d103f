//! The scheduler in numbers, for metrics.

use crate::device::DeviceId;

/// Counters since the start, and gauges of now.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SchedulerStats {
    /// Jobs that wait.
    pub queued: usize,
    /// Jobs on devices.
    pub running: usize,
    /// Jobs that ended and whose result is not released yet.
    pub retained: usize,
    /// Jobs that were admitted.
    pub submitted_total: u64,
    /// Requests that were refused before they were queued.
    pub refused_total: u64,
    /// Jobs that completed.
    pub completed_total: u64,
    /// Jobs that failed.
    pub failed_total: u64,
    /// Jobs that somebody stopped.
    pub cancelled_total: u64,
    /// Seconds that jobs have waited before they started.
    pub waited_seconds_total: f64,
    /// Rows of completed results.
    pub rows_total: u64,
    /// Bytes of completed results.
    pub bytes_total: u64,
    /// Every device.
    pub devices: Vec<DeviceStats>,
}

/// A device in numbers.
#[derive(Clone, Debug, PartialEq)]
pub struct DeviceStats {
    /// Which.
    pub id: DeviceId,
    /// `None` when it serves; else why it does not.
    pub lost: Option<String>,
    /// Jobs on it.
    pub running: usize,
    /// Jobs that it has ended.
    pub jobs_total: u64,
    /// Seconds that it has had a job, or several.
    pub busy_seconds_total: f64,
}
