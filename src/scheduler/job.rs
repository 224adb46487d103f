//! Job: one join, from submission to the release of its result.

use std::fmt;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Weak};
use std::time::SystemTime;

use parking_lot::Mutex;
use tokio::sync::watch;

use super::admission::Admitted;
use super::feeds::Feed;
use super::job_options::JobOptions;
use super::residents::ResidentUse;
use super::state::Shared;
use super::trace::TracedJob;
use crate::catalog::{ChargeHold, NameReservation, ResultSpool, Table};
use crate::device::{CancelFlag, DeviceId};
use crate::join::{ChainReport, Monitor, PhaseRecord, RankReport, Side};
use crate::memory::ReservedPool;
use crate::planner::{BoundJoin, ExplainedSet, Explanation, Measured, Plan};
use crate::{Error, Result};

/// Number of a job, unique in the life of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct JobId(pub u64);

impl fmt::Display for JobId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// State of a job.
#[derive(Clone, Debug, PartialEq)]
pub enum JobState {
    Queued,
    Running,
    /// All rows are in the spool.
    Complete,
    Failed(Error),
    Cancelled,
}

impl JobState {
    /// True if the state will not change any more.
    pub fn is_final(&self) -> bool {
        !matches!(self, Self::Queued | Self::Running)
    }
}

/// Status of a job at a moment.
#[derive(Clone, Debug)]
pub struct JobStatus {
    pub state: JobState,
    /// Share of the work that is done, 0 to 1. It never falls: a job that begins again elsewhere
    /// keeps its value until the new run has come as far.
    pub progress: f64,
    /// Jobs that will start before this one, if queued.
    pub queue_position: Option<usize>,
    pub waiting_for: Option<String>,
    pub predicted_start: Option<SystemTime>,
    /// Devices that the job runs or ran on, the leader first; none before its start.
    pub devices: Vec<DeviceId>,
    pub started: Option<SystemTime>,
    pub finished: Option<SystemTime>,
    pub rows: u64,
    pub bytes: u64,
    /// True if the result is gone: its lease ended, it was released, the job failed, or the table
    /// that the result became was dropped or replaced.
    pub released: bool,
    pub phases: Vec<PhaseRecord>,
    /// Part of each device; empty for a job on one device.
    pub ranks: Vec<RankReport>,
    /// Rows that passed through the joins of a chain. Empty for any other join.
    pub chain: ChainReport,
    /// True if the rows of one side arrive while the job runs.
    pub rows_arrive: bool,
    /// Host memory that the server took from the system while the job ran.
    pub new_memory_bytes: u64,
}

impl JobStatus {
    /// Returns the measurements of a job that has started.
    pub fn measured(&self) -> Option<Measured> {
        let started = self.started?;
        let end = self.finished.unwrap_or_else(SystemTime::now);
        Some(Measured {
            phases: self.phases.clone(),
            ranks: self.ranks.clone(),
            chain: self.chain.clone(),
            rows_arrive: self.rows_arrive,
            seconds: end.duration_since(started).unwrap_or_default().as_secs_f64(),
            rows: self.rows,
            is_complete: self.state == JobState::Complete,
            new_memory_bytes: self.new_memory_bytes,
        })
    }
}

/// Join that was submitted.
#[derive(Debug)]
pub struct Job {
    pub id: JobId,
    /// Empty for anonymous callers.
    pub owner: String,
    pub options: JobOptions,
    /// Plan at admission, on the device with the shortest predicted time. [`Job::planned`] returns
    /// the plan that runs. Tables have no rows here, so that a remembered job keeps no table alive.
    pub plan: Arc<Plan>,
    /// Sets of devices that were considered at admission.
    sets: Vec<ExplainedSet>,
    pub result: ResultSpool,
    pub submitted: SystemTime,
    /// Host memory for the result and intermediate data. Open while the job runs.
    pub(super) host_memory: ReservedPool,
    pub(super) cancel: CancelFlag,
    pub(super) is_device_wanted: Arc<AtomicBool>,
    /// Side whose rows arrive while the job runs, if it has one.
    pub(super) feed: Option<Feed>,
    /// Build side on a device that a join of two tables may probe.
    pub(super) kept: Option<ResidentUse>,
    pub(super) life: Mutex<Life>,
    /// Set to true at the job's end, after its state and its result.
    pub(super) has_ended: watch::Sender<bool>,
    /// Scheduler that forecasts the job's start.
    shared: Weak<Shared>,
}

/// Place of a job in the queue.
#[derive(Clone, Debug)]
pub(super) struct QueueForecast {
    pub(super) position: usize,
    pub(super) start: SystemTime,
    pub(super) waiting_for: String,
}

/// Host memory that the server had from the system at the start of a job, and at its end.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct NewMemory {
    pub(super) at_start_bytes: u64,
    pub(super) at_end_bytes: u64,
}

impl NewMemory {
    fn bytes(self) -> u64 {
        self.at_end_bytes.saturating_sub(self.at_start_bytes)
    }
}

/// Mutable state of a job.
#[derive(Debug)]
pub(super) struct Life {
    pub(super) state: JobState,
    /// Plan of each class of devices that may run the job, without rows.
    pub(super) plans: Vec<Arc<Plan>>,
    /// Tables to join. Dropped, with the plans, when the job will not run again.
    pub(super) tables: Option<Tables>,
    /// Charges of the tables' rows, which the job's tenant holds.
    pub(super) table_holds: Vec<ChargeHold>,
    /// Plan that runs or ran, without rows. Before the job is placed, the fastest plan.
    planned: Arc<Plan>,
    pub(super) monitor: Arc<Monitor>,
    progress_max: f64,
    /// `None` if the job does not wait.
    pub(super) forecast: Option<QueueForecast>,
    pub(super) devices: Vec<DeviceId>,
    pub(super) device_reason: String,
    /// True if the job was put back in the queue after a failure that may pass.
    pub(super) tried_again: bool,
    pub(super) lost_a_device: bool,
    pub(super) started: Option<SystemTime>,
    pub(super) finished: Option<SystemTime>,
    pub(super) memory: NewMemory,
    /// Line of the server's trace, to be written at the end.
    pub(super) traced: Option<Box<TracedJob>>,
    pub(super) stop: Option<Error>,
    /// True if the work has succeeded. The job then completes, even if a client still wants to stop
    /// it.
    pub(super) is_done: bool,
    pub(super) into: Option<NameReservation>,
}

/// Plans and tables of an admitted join, for its job.
#[derive(Debug)]
pub(super) struct JobPlans {
    /// Plan of each class of devices that may run the job, without rows.
    plans: Vec<Arc<Plan>>,
    fastest: usize,
    sets: Vec<ExplainedSet>,
    tables: Tables,
}

impl JobPlans {
    pub(super) fn of(admitted: Admitted) -> Self {
        let tables = Tables::of(admitted.plan());
        let rowless = tables.without_rows();
        let Admitted { plans, fastest, sets, .. } = admitted;
        let plans = plans.into_iter().map(|plan| Arc::new(rowless.planned(plan)));
        Self { plans: plans.collect(), fastest, sets, tables }
    }

    /// Returns the plan on the device with the shortest predicted time.
    pub(super) fn plan(&self) -> &Arc<Plan> {
        &self.plans[self.fastest]
    }

    pub(super) fn tables(&self) -> [&Arc<Table>; 2] {
        [&self.tables.left, &self.tables.right]
    }

    /// Returns the tables of the further joins of a chain.
    pub(super) fn further_tables(&self) -> &[Arc<Table>] {
        &self.tables.further
    }
}

/// Tables that a job joins.
#[derive(Clone, Debug)]
pub(super) struct Tables {
    left: Arc<Table>,
    right: Arc<Table>,
    /// Build sides of the further joins of a chain.
    further: Vec<Arc<Table>>,
}

impl Tables {
    fn of(plan: &Plan) -> Self {
        let build_side = |plan: &Plan| plan.join.table(plan.composition.build_side).clone();
        let BoundJoin { left, right, .. } = &plan.join;
        Self { left: left.clone(), right: right.clone(), further: plan.then.iter().map(build_side).collect() }
    }

    /// Returns tables with the same schemas, statistics and sizes, and no rows.
    fn without_rows(&self) -> Self {
        let further = self.further.iter().map(|table| without_rows(table)).collect();
        Self { left: without_rows(&self.left), right: without_rows(&self.right), further }
    }

    /// Returns the plan with these tables.
    fn planned(&self, plan: Plan) -> Plan {
        let Self { left, right, further } = self.clone();
        let mut plan = Plan { join: BoundJoin { left, right, ..plan.join }, ..plan };
        for (then, table) in plan.then.iter_mut().zip(further) {
            let side = then.composition.build_side;
            *(if side == Side::Left { &mut then.join.left } else { &mut then.join.right }) = table;
        }
        plan
    }
}

impl Job {
    #[allow(clippy::too_many_arguments)]
    pub(super) fn new(
        id: JobId,
        owner: String,
        options: JobOptions,
        planned: JobPlans,
        result: ResultSpool,
        host_memory: ReservedPool,
        cancel: CancelFlag,
        is_device_wanted: Arc<AtomicBool>,
        feed: Option<Feed>,
        kept: Option<ResidentUse>,
        into: Option<NameReservation>,
        shared: Weak<Shared>,
    ) -> Self {
        let plan = planned.plan().clone();
        let tables = planned.tables().into_iter().chain(planned.further_tables());
        let table_holds = tables.flat_map(|table| table.hold(&owner)).collect();
        let JobPlans { plans, sets, tables, .. } = planned;
        let life = Life {
            state: JobState::Queued,
            plans,
            tables: Some(tables),
            table_holds,
            planned: plan.clone(),
            monitor: Arc::new(Monitor::new(cancel.clone())),
            progress_max: 0.0,
            forecast: None,
            devices: Vec::new(),
            device_reason: "not placed yet".into(),
            tried_again: false,
            lost_a_device: false,
            started: None,
            finished: None,
            memory: NewMemory::default(),
            traced: None,
            stop: None,
            is_done: false,
            into,
        };
        let (submitted, life, has_ended) = (SystemTime::now(), Mutex::new(life), watch::Sender::new(false));
        Self {
            id,
            owner,
            options,
            plan,
            sets,
            result,
            submitted,
            host_memory,
            cancel,
            is_device_wanted,
            feed,
            kept,
            life,
            has_ended,
            shared,
        }
    }

    /// Waits until the job has ended. Its state is final then, and its result is complete or has
    /// failed. The wait takes no thread.
    pub async fn ended(&self) {
        // The sender lives as long as `self`, so the wait cannot fail.
        let _ = self.has_ended.subscribe().wait_for(|has_ended| *has_ended).await;
    }

    /// Returns the plan that runs or ran, on the job's device. Before the job is placed, returns
    /// the plan with the shortest predicted time. Tables have no rows here.
    pub fn planned(&self) -> Arc<Plan> {
        let on_kept = self.feed.as_ref().and_then(Feed::plan_on_kept);
        on_kept.unwrap_or_else(|| self.life.lock().planned.clone())
    }

    /// Returns the plan that a placed job runs, with the tables that it reads. The plan is copied
    /// without a lock, because a join may have thousands of columns.
    pub(super) fn runnable(&self) -> Option<Plan> {
        let (plan, tables) = {
            let life = self.life.lock();
            (life.planned.clone(), life.tables.clone()?)
        };
        Some(tables.planned(Plan::clone(&plan)))
    }

    /// Returns the state of the job now.
    pub fn state(&self) -> JobState {
        self.life.lock().state.clone()
    }

    /// Returns the status of the job now. With many jobs waiting, a forecast may be older by ten
    /// times as long as the forecasts of all jobs take, and a new job may have none yet.
    pub fn status(&self) -> JobStatus {
        if let (JobState::Queued, Some(shared)) = (self.state(), self.shared.upgrade()) {
            shared.update_forecasts();
        }
        let mut life = self.life.lock();
        life.progress_max = life.progress_max.max(life.monitor.progress());
        let forecast = life.forecast.as_ref().filter(|_| life.state == JobState::Queued);
        JobStatus {
            state: life.state.clone(),
            progress: match life.state {
                JobState::Complete => 1.0,
                // The number of rows that will arrive is not known.
                _ if self.feed.is_some() => 0.0,
                _ => life.progress_max,
            },
            queue_position: forecast.map(|forecast| forecast.position),
            waiting_for: forecast.map(|forecast| forecast.waiting_for.clone()),
            predicted_start: forecast.map(|forecast| forecast.start),
            devices: life.devices.clone(),
            started: life.started,
            finished: life.finished,
            rows: self.result.pushed_rows(),
            bytes: self.result.pushed_bytes(),
            released: self.result.is_released(),
            phases: life.monitor.phases(),
            ranks: life.monitor.ranks(),
            chain: life.monitor.chain(),
            rows_arrive: self.feed.is_some(),
            new_memory_bytes: life.memory.bytes(),
        }
    }

    /// Explains the plan: what was predicted, what was measured so far, and the alternatives.
    pub fn explanation(&self) -> Explanation {
        let status = self.status();
        let plan = self.planned();
        let (device, reason) = {
            let life = self.life.lock();
            let names: Vec<String> = life.devices.iter().map(ToString::to_string).collect();
            let name = if names.is_empty() { plan.target.name.clone() } else { names.join(", ") };
            (name, life.device_reason.clone())
        };
        Explanation::new(&plan, &device, reason, status.measured().as_ref()).among(self.sets.clone())
    }

    /// Settles the outcome of the job's work. If the job was stopped, the reason is the outcome,
    /// because any later error is only a consequence. Work that succeeded before the stop is done,
    /// and cannot be stopped any more. The exception is a job whose result becomes a table. It can
    /// be stopped until [`Job::settle_table`].
    ///
    /// # Errors
    /// Returns the reason for the stop, or else the error of the work.
    pub(super) fn settle(&self, outcome: Result<()>) -> Result<()> {
        let mut life = self.life.lock();
        if let Some(reason) = &life.stop {
            return Err(reason.clone());
        }
        life.is_done = outcome.is_ok() && life.into.is_none();
        outcome
    }

    /// Settles the outcome of a job whose result becomes a table, once all except its appearance is
    /// done. Returns the table's name.
    ///
    /// # Errors
    /// See [`Job::settle`].
    pub(super) fn settle_table(&self, outcome: Result<()>) -> Result<NameReservation> {
        let mut life = self.life.lock();
        if let Some(reason) = &life.stop {
            return Err(reason.clone());
        }
        outcome?;
        let Life { is_done, into, .. } = &mut *life;
        *is_done = true;
        into.take().ok_or_else(|| Error::Internal(format!("the result of job {} becomes no table", self.id)))
    }

    /// True if the result is to become a table and has not yet.
    pub(super) fn becomes_table(&self) -> bool {
        self.life.lock().into.is_some()
    }

    /// # Errors
    /// Returns the reason to stop, if there is one.
    pub(super) fn check_stop(&self) -> Result<()> {
        self.life.lock().stop.clone().map_or(Ok(()), Err)
    }
}

impl Life {
    /// Records that the job is in the queue again, and why.
    pub(super) fn wait_again(&mut self, reason: String) {
        self.state = JobState::Queued;
        self.devices.clear();
        self.started = None;
        self.device_reason = reason;
    }

    /// Records the host memory at the start of a run. Returns the monitor of the run.
    pub(super) fn begin(&mut self, mapped_bytes: u64) -> Arc<Monitor> {
        self.memory = NewMemory { at_start_bytes: mapped_bytes, at_end_bytes: mapped_bytes };
        self.monitor.clone()
    }

    /// Returns the plan that runs, without rows.
    pub(super) fn planned(&self) -> Arc<Plan> {
        self.planned.clone()
    }

    /// Returns the index of the plan that runs.
    pub(super) fn plan_number(&self) -> usize {
        self.plans.iter().position(|plan| Arc::ptr_eq(plan, &self.planned)).unwrap_or(0)
    }

    /// Records the plan that the job runs, by index.
    pub(super) fn run_by(&mut self, plan: usize) {
        if let Some(plan) = self.plans.get(plan) {
            self.planned = plan.clone();
        }
    }
}

/// Returns a table with the same schema, statistics and sizes, and no rows.
fn without_rows(table: &Table) -> Arc<Table> {
    let mut described = Table::from_batches(&table.name, table.schema.clone(), Vec::new())
        .expect("a table without batches has no batch of another schema");
    described.owner.clone_from(&table.owner);
    described.rows = table.rows;
    described.bytes = table.bytes;
    described.statistics.clone_from(&table.statistics);
    described.sorted_by.clone_from(&table.sorted_by);
    described.unique.clone_from(&table.unique);
    described.created = table.created;
    described.arrives = table.arrives;
    Arc::new(described)
}
