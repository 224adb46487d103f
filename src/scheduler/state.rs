//! State that the threads of a scheduler share.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use super::clock::Clock;
use super::device_set::DeviceSet;
use super::feeds::Open;
use super::job::{Job, JobId, Tables};
use super::options::SchedulerOptions;
use super::placing::Waiting;
use super::queue::Queue;
use super::residents::{Built, Resident};
use super::stats::SchedulerStats;
use crate::Error;
use crate::catalog::{Catalog, ChargeHold, NameReservation};
use crate::engine::{Engine, Prepared};
use crate::planner::Plan;

#[derive(Debug)]
pub(super) struct Shared {
    pub(super) catalog: Catalog,
    pub(super) engines: Vec<Arc<dyn Engine>>,
    pub(super) options: SchedulerOptions,
    pub(super) clock: Arc<dyn Clock>,
    pub(super) state: Mutex<State>,
    /// Wakes each worker of each device.
    pub(super) work: Vec<Vec<Condvar>>,
    /// Wakes the threads that make tables of results.
    pub(super) publish: Condvar,
    pub(super) ended: Condvar,
    pub(super) timer: Condvar,
}

#[derive(Debug)]
pub(super) struct State {
    pub(super) queue: Queue,
    pub(super) devices: Vec<DeviceState>,
    /// Jobs that have left their devices and whose result is becoming a table, oldest first.
    pub(super) publishing: Vec<Publishing>,
    /// Jobs with a feed, before their first turn or between two turns.
    pub(super) open: BTreeMap<JobId, Open>,
    /// Build sides of jobs with a feed.
    pub(super) residents: Vec<Arc<Resident>>,
    /// Jobs that wait, run, or have a result that is not released.
    pub(super) live: BTreeMap<JobId, Arc<Job>>,
    /// Jobs that are over, oldest first.
    pub(super) history: VecDeque<Arc<Job>>,
    pub(super) last_id: u64,
    pub(super) last_resident: u64,
    pub(super) draining: bool,
    pub(super) shutdown: bool,
    pub(super) totals: SchedulerStats,
    pub(super) forecasts: Forecasts,
}

/// Age of the predicted starts of waiting jobs.
#[derive(Debug, Default)]
pub(super) struct Forecasts {
    /// True if the last event may have changed some that it did not update.
    pub(super) are_stale: bool,
    /// Time on the scheduler's clock before which they are not updated again.
    pub(super) due: Duration,
}

impl State {
    /// Takes a job that was placed on a device, to run it. `None` if there is none.
    pub(super) fn take_placed(&mut self, device: usize) -> Option<Taken> {
        let running = self.devices[device].running.iter_mut().find(|running| !running.is_taken)?;
        running.is_taken = true;
        Some(Taken {
            devices: running.devices.clone(),
            job: running.job.clone(),
            entry: running.entry.clone(),
            started: running.started,
            predicted_seconds: running.predicted_seconds,
            shared_bytes: running.shared_bytes,
        })
    }
}

/// Jobs, workers and counters of a device.
#[derive(Debug, Default)]
pub(super) struct DeviceState {
    pub(super) running: Vec<Running>,
    /// Workers that wait for a job. The last worker to come is the first to get one: its data is
    /// still in caches. Jobs in sequence then need no more threads than one job does.
    pub(super) idle: Vec<usize>,
    pub(super) lost: Option<Error>,
    /// True if the other devices have unmapped the window of this lost device.
    pub(super) is_unmapped: bool,
    pub(super) jobs_total: u64,
    pub(super) busy_seconds_total: f64,
    /// Time on the scheduler's clock up to which the device time of jobs has been counted.
    pub(super) counted: Duration,
}

impl DeviceState {
    /// Counts the time until now. Jobs that run in parallel share it equally.
    pub(super) fn count_time(&mut self, now: Duration) {
        let seconds = now.saturating_sub(self.counted).as_secs_f64();
        self.counted = now;
        let jobs = self.running.len();
        if jobs > 0 {
            self.busy_seconds_total += seconds;
            self.running.iter_mut().for_each(|running| running.device_seconds += seconds / jobs as f64);
        }
    }
}

/// Holdings of an ended job: tables that may have been dropped meanwhile, the name kept for its
/// result, and a prepared join. Freeing them may take long, so it is done without the scheduler's
/// lock.
#[derive(Default)]
#[must_use = "leftovers must be dropped without the scheduler's lock"]
pub(super) struct Leftovers {
    pub(super) _plans: Vec<Arc<Plan>>,
    pub(super) _tables: Option<Tables>,
    pub(super) _table_holds: Vec<ChargeHold>,
    pub(super) _into: Option<NameReservation>,
    pub(super) _prepared: Option<Arc<dyn Prepared>>,
}

impl Leftovers {
    pub(super) fn of_build(built: Built) -> Self {
        Self { _prepared: Some(built.join), ..Self::default() }
    }
}

#[derive(Debug)]
pub(super) struct Running {
    pub(super) job: Arc<Job>,
    /// All devices of the job. Each device lists the job among its running jobs.
    pub(super) devices: DeviceSet,
    pub(super) entry: Waiting,
    pub(super) started: Duration,
    pub(super) predicted_seconds: f64,
    pub(super) device_seconds: f64,
    /// Bytes of device memory that are the job's part. `None`: it has the device alone.
    pub(super) shared_bytes: Option<u64>,
    /// Bytes of that part that the worker has yet to reserve.
    pub(super) promised_bytes: u64,
    /// True if a worker has taken the job, or another device leads.
    pub(super) is_taken: bool,
}

/// Job whose result is becoming a table.
#[derive(Debug)]
pub(super) struct Publishing {
    pub(super) job: Arc<Job>,
    /// True if a thread has taken the job.
    pub(super) is_taken: bool,
}

/// Job that a worker has taken.
#[derive(Debug)]
pub(super) struct Taken {
    pub(super) devices: DeviceSet,
    pub(super) job: Arc<Job>,
    pub(super) entry: Waiting,
    pub(super) started: Duration,
    pub(super) predicted_seconds: f64,
    pub(super) shared_bytes: Option<u64>,
}

impl Taken {
    /// Returns the seconds of device time that the job's tenant was charged at its start.
    pub(super) fn charged_seconds(&self) -> f64 {
        self.predicted_seconds * self.devices.len() as f64
    }
}
