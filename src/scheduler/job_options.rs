//! Options of a job: the way a join is run, and the use of its result.

use std::time::Duration;

use crate::catalog::IntoMode;
use crate::join::Side;
use crate::planner::{Distribution, PlanOverrides, Strategy};

/// Options of a job. They change no row of its result.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct JobOptions {
    /// `None`: the planner chooses.
    pub strategy: Option<Strategy>,
    /// Division of the join among several devices. `None`: the planner chooses.
    pub distribution: Option<Distribution>,
    pub devices: DeviceRequest,
    /// From -100 to 100; higher starts first.
    pub priority: i32,
    /// Seconds to keep the result after it is complete. `Some(0)`: released as the first reader
    /// reads it. `None`: the server's setting.
    pub retain_seconds: Option<u32>,
    /// Name of the table that keeps the result.
    pub into: Option<String>,
    pub into_mode: IntoMode,
    /// Time from the appearance of that table until the catalog drops it. `None`: it stays.
    pub into_life: Option<Duration>,
    /// Side whose rows arrive while the job runs ([`Scheduler::feed`](super::Scheduler::feed)). The
    /// other side is the build side.
    pub streamed: Option<Side>,
    /// Seconds for which the build side stays on its device after the last job that uses it. Only
    /// with `streamed`.
    pub keep_seconds: u32,
}

impl JobOptions {
    /// Returns the decisions that the caller takes instead of the planner.
    pub fn overrides(&self) -> PlanOverrides {
        PlanOverrides {
            distribution: self.distribution,
            build_side: self.streamed.map(Side::other),
            defer_build_payload: self.streamed.map(|_| false),
            ..PlanOverrides::named(self.strategy)
        }
    }

    /// True if the result is consumed while it is read, and is never stored in whole. A result that
    /// becomes a table is stored in whole.
    pub fn is_read_as_made(&self) -> bool {
        self.retain_seconds == Some(0) && self.into.is_none()
    }

    /// Returns advice for a join whose result does not fit in host memory.
    pub fn room_advice(&self) -> &'static str {
        match (&self.into, self.retain_seconds) {
            (Some(_), _) => {
                "ask for fewer columns, drop tables, or raise the server's --host-memory: a result that becomes a table has to fit in whole"
            }
            (None, Some(0)) => "drop tables, or raise the server's --host-memory",
            (None, _) => {
                "ask for fewer columns, drop tables, raise the server's --host-memory, or fetch it as it is made with retain_seconds 0 (--retain-seconds 0)"
            }
        }
    }
}

/// Devices that a job may use.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum DeviceRequest {
    /// Any device, or several of one kind if they end the job sooner.
    #[default]
    Any,
    /// A gang of this many devices of one kind.
    Count(usize),
    /// A gang of the named devices. One name: that device.
    Named(Vec<String>),
    /// A gang of all GPUs, or of all devices of a host without GPUs.
    All,
}
