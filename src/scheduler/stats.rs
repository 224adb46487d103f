//! Statistics of the scheduler, for metrics.

use crate::device::DeviceId;

/// Counters since the start, and current gauges.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SchedulerStats {
    /// Jobs that wait.
    pub queued: usize,
    /// Jobs on devices. For a moment this counts jobs that have ended, even those whose result is
    /// released already.
    pub running: usize,
    /// Jobs that were admitted.
    pub submitted_total: u64,
    /// Requests that were refused before they were queued.
    pub refused_total: u64,
    /// Jobs that completed.
    pub completed_total: u64,
    /// Jobs that failed.
    pub failed_total: u64,
    /// Jobs that were stopped.
    pub cancelled_total: u64,
    /// Seconds that jobs have waited before they started.
    pub waited_seconds_total: f64,
    /// Rows of completed results.
    pub rows_total: u64,
    /// Bytes of completed results.
    pub bytes_total: u64,
    /// Statistics of each device.
    pub devices: Vec<DeviceStats>,
}

/// Statistics of a device.
#[derive(Clone, Debug, PartialEq)]
pub struct DeviceStats {
    /// Id of the device.
    pub id: DeviceId,
    /// Reason why the device is out of service; `None` if it serves.
    pub lost: Option<String>,
    /// Jobs on the device.
    pub running: usize,
    /// Jobs that ended on the device, including runs that are tried again.
    pub jobs_total: u64,
    /// Seconds during which the device had at least one job.
    pub busy_seconds_total: f64,
}
