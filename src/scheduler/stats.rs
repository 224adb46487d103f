//! Statistics of the scheduler, for metrics.

use crate::device::DeviceId;

/// Counters since the start, and current gauges.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SchedulerStats {
    pub queued: usize,
    /// Jobs on devices, and jobs whose result is becoming a table. For a moment this counts jobs
    /// that have ended, even those whose result is released already.
    pub running: usize,
    pub submitted_total: u64,
    pub refused_total: u64,
    pub completed_total: u64,
    pub failed_total: u64,
    pub cancelled_total: u64,
    pub waited_seconds_total: f64,
    pub rows_total: u64,
    pub bytes_total: u64,
    /// Questions of streams that were answered in one pass with others.
    pub shared_questions_total: u64,
    pub devices: Vec<DeviceStats>,
}

/// Statistics of a device.
#[derive(Clone, Debug, PartialEq)]
pub struct DeviceStats {
    pub id: DeviceId,
    /// Reason why the device is out of service; `None` if it serves.
    pub lost: Option<String>,
    pub running: usize,
    /// Jobs that ended on the device, including runs that are tried again.
    pub jobs_total: u64,
    pub busy_seconds_total: f64,
}
