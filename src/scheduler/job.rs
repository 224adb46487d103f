//! One join, from submission to the release of its result.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::SystemTime;

use parking_lot::Mutex;

use super::admission::Admitted;
use crate::catalog::{NameReservation, ResultSpool, SpoolState, Table};
use crate::device::{CancelFlag, DeviceId};
use crate::join::{Monitor, PhaseRecord};
use crate::memory::ReservedPool;
use crate::planner::{BoundJoin, Explanation, Measured, Plan};
use crate::{Error, Result};

/// A job's number, unique in the life of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct JobId(pub u64);

impl fmt::Display for JobId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// Where a job is in its life.
#[derive(Clone, Debug, PartialEq)]
pub enum JobState {
    /// Waiting for a device.
    Queued,
    /// On a device.
    Running(DeviceId),
    /// All rows are in the spool.
    Complete,
    /// It failed.
    Failed(Error),
    /// Somebody stopped it.
    Cancelled,
}

impl JobState {
    /// Whether nothing more will happen to it.
    pub fn is_final(&self) -> bool {
        !matches!(self, Self::Queued | Self::Running(_))
    }
}

/// What can be told about a job at a moment.
#[derive(Clone, Debug)]
pub struct JobStatus {
    /// Where it is.
    pub state: JobState,
    /// The share of its work that is done, 0 to 1. It never falls: a job that begins again elsewhere stays where it was until it
    /// has come as far.
    pub progress: f64,
    /// Jobs that will start before it, when queued.
    pub queue_position: Option<usize>,
    /// What keeps it from starting, when queued.
    pub waiting_for: Option<String>,
    /// When it is expected to start, when queued.
    pub predicted_start: Option<SystemTime>,
    /// The device that it runs or ran on.
    pub device: Option<DeviceId>,
    /// When it started.
    pub started: Option<SystemTime>,
    /// When it completed, failed or was cancelled.
    pub finished: Option<SystemTime>,
    /// Rows in the spool so far.
    pub rows: u64,
    /// Bytes that were put in the spool so far.
    pub bytes: u64,
    /// Whether the result is gone: its lease ended, somebody let go of it, or it never came to its end.
    pub released: bool,
    /// Measured phases so far.
    pub phases: Vec<PhaseRecord>,
}

/// A join that was submitted.
#[derive(Debug)]
pub struct Job {
    /// Its number.
    pub id: JobId,
    /// Who submitted it: a tenant's name, empty for anonymous.
    pub owner: String,
    /// What it was admitted with: the plan on the device that was predicted to be the fastest. [`Job::planned`] is the one that
    /// runs. Tables have no rows here, so that a job which is remembered keeps no table alive.
    pub plan: Arc<Plan>,
    /// Where its rows go.
    pub result: ResultSpool,
    /// When it was submitted.
    pub submitted: SystemTime,
    /// Host memory for its result and what it makes on the way; open while it runs.
    pub(super) host_memory: ReservedPool,
    pub(super) cancel: CancelFlag,
    /// Whether others wait for the device that it runs on.
    pub(super) is_device_wanted: Arc<AtomicBool>,
    pub(super) life: Mutex<Life>,
}

/// A job's place in the queue.
#[derive(Clone, Debug)]
pub(super) struct QueueTurn {
    /// Jobs before it.
    pub(super) position: usize,
    /// When it is expected to start.
    pub(super) start: SystemTime,
    /// What keeps it from starting.
    pub(super) waiting_for: String,
}

/// What changes about a job.
#[derive(Debug)]
pub(super) struct Life {
    pub(super) state: JobState,
    /// The plan on each device that may run it, without rows.
    pub(super) plans: BTreeMap<usize, Arc<Plan>>,
    /// The tables that are joined; let go, with the plans, when nothing will run any more.
    pub(super) tables: Option<Tables>,
    /// The plan that runs or ran, or the fastest, without rows.
    planned: Arc<Plan>,
    pub(super) monitor: Arc<Monitor>,
    /// The most progress that was told.
    progress_max: f64,
    /// `None` when it does not wait.
    pub(super) turn: Option<QueueTurn>,
    pub(super) device: Option<DeviceId>,
    pub(super) device_reason: String,
    /// Whether it was put back in the queue after a failure that may pass.
    pub(super) tried_again: bool,
    /// Whether a device was lost while it ran there, by which or by whatever else.
    pub(super) lost_a_device: bool,
    pub(super) started: Option<SystemTime>,
    pub(super) finished: Option<SystemTime>,
    /// Why it should stop.
    pub(super) stop: Option<Error>,
    /// Whether its work is done and it comes to a good end, whoever still wants to stop it.
    pub(super) is_done: bool,
    /// The name that its result will have as a table.
    pub(super) into: Option<NameReservation>,
}

/// A join that was admitted, as its job keeps it.
#[derive(Debug)]
pub(super) struct JobPlans {
    /// The plan on each device that may run it, without rows.
    plans: BTreeMap<usize, Arc<Plan>>,
    fastest: usize,
    tables: Tables,
}

impl JobPlans {
    pub(super) fn of(admitted: Admitted) -> Self {
        let tables = Tables::of(&admitted.plan().join);
        let rowless = tables.without_rows();
        let plans = admitted.plans.into_iter().map(|(device, plan)| (device, Arc::new(rowless.planned(plan))));
        Self { plans: plans.collect(), fastest: admitted.fastest, tables }
    }

    /// The plan on the device that is predicted to be the fastest.
    pub(super) fn plan(&self) -> &Arc<Plan> {
        &self.plans[&self.fastest]
    }

    pub(super) fn tables(&self) -> [&Arc<Table>; 2] {
        [&self.tables.left, &self.tables.right]
    }
}

/// The tables that a job joins.
#[derive(Clone, Debug)]
pub(super) struct Tables {
    left: Arc<Table>,
    right: Arc<Table>,
}

impl Tables {
    /// The tables of a join.
    fn of(join: &BoundJoin) -> Self {
        Self { left: join.left.clone(), right: join.right.clone() }
    }

    /// The same schemas, statistics and sizes, and no rows.
    fn without_rows(&self) -> Self {
        Self { left: without_rows(&self.left), right: without_rows(&self.right) }
    }

    /// A plan that reads these tables.
    fn planned(&self, plan: Plan) -> Plan {
        let Self { left, right } = self.clone();
        Plan { join: BoundJoin { left, right, ..plan.join }, ..plan }
    }
}

impl Job {
    #[allow(clippy::too_many_arguments)]
    pub(super) fn new(
        id: JobId,
        owner: String,
        planned: JobPlans,
        result: ResultSpool,
        host_memory: ReservedPool,
        cancel: CancelFlag,
        is_device_wanted: Arc<AtomicBool>,
        into: Option<NameReservation>,
    ) -> Self {
        let plan = planned.plan().clone();
        let JobPlans { plans, tables, .. } = planned;
        let life = Life {
            state: JobState::Queued,
            plans,
            tables: Some(tables),
            planned: plan.clone(),
            monitor: Arc::new(Monitor::new(cancel.clone())),
            progress_max: 0.0,
            turn: None,
            device: None,
            device_reason: "not placed yet".into(),
            tried_again: false,
            lost_a_device: false,
            started: None,
            finished: None,
            stop: None,
            is_done: false,
            into,
        };
        let (submitted, life) = (SystemTime::now(), Mutex::new(life));
        Self { id, owner, plan, result, submitted, host_memory, cancel, is_device_wanted, life }
    }

    /// What runs or ran, and why: the plan on its device. Before it is placed, the one that is predicted to be the fastest.
    /// Tables have no rows here.
    pub fn planned(&self) -> Arc<Plan> {
        self.life.lock().planned.clone()
    }

    /// The plan on a device, with the tables that it reads. It is copied without a lock: a join may have thousands of columns.
    pub(super) fn runnable(&self, device: usize) -> Option<Plan> {
        let (plan, tables) = {
            let life = self.life.lock();
            (life.plans.get(&device)?.clone(), life.tables.clone()?)
        };
        Some(tables.planned(Plan::clone(&plan)))
    }

    /// What can be told now.
    pub fn status(&self) -> JobStatus {
        let mut life = self.life.lock();
        life.progress_max = life.progress_max.max(life.monitor.progress());
        let turn = life.turn.as_ref().filter(|_| life.state == JobState::Queued);
        JobStatus {
            state: life.state.clone(),
            progress: if life.state == JobState::Complete { 1.0 } else { life.progress_max },
            queue_position: turn.map(|turn| turn.position),
            waiting_for: turn.map(|turn| turn.waiting_for.clone()),
            predicted_start: turn.map(|turn| turn.start),
            device: life.device,
            started: life.started,
            finished: life.finished,
            rows: self.result.pushed_rows(),
            bytes: self.result.pushed_bytes(),
            // What there was of a result that failed went at once.
            released: matches!(self.result.progress().1, SpoolState::Released | SpoolState::Failed(_)),
            phases: life.monitor.phases(),
        }
    }

    /// The plan with what was measured so far beside what was predicted, and the alternatives.
    pub fn explanation(&self) -> Explanation {
        let status = self.status();
        let (plan, device, reason) = {
            let life = self.life.lock();
            let name = life.device.map_or_else(|| life.planned.target.name.clone(), |device| device.to_string());
            (life.planned.clone(), name, life.device_reason.clone())
        };
        let measured = status.started.map(|started| {
            let end = status.finished.unwrap_or_else(SystemTime::now);
            let seconds = end.duration_since(started).unwrap_or_default().as_secs_f64();
            Measured { phases: status.phases, seconds, rows: status.rows }
        });
        Explanation::new(&plan, &device, reason, measured.as_ref())
    }

    /// What its work comes to. Whoever stopped it has said why; what the work answered after that is a consequence. Work that
    /// succeeded before is done, and cannot be stopped any more.
    ///
    /// # Errors
    /// Why it was stopped, or the work's own.
    pub(super) fn settle(&self, outcome: Result<()>) -> Result<()> {
        let mut life = self.life.lock();
        if let Some(reason) = &life.stop {
            return Err(reason.clone());
        }
        life.is_done = outcome.is_ok();
        outcome
    }

    /// # Errors
    /// Why it should stop, once it should.
    pub(super) fn check_stop(&self) -> Result<()> {
        self.life.lock().stop.clone().map_or(Ok(()), Err)
    }
}

impl Life {
    /// Says that it is in the queue again, and why.
    pub(super) fn wait_again(&mut self, reason: String) {
        self.state = JobState::Queued;
        self.device = None;
        self.started = None;
        self.device_reason = reason;
    }

    /// Says on which device it runs, by index.
    pub(super) fn place_on(&mut self, device: usize) {
        if let Some(plan) = self.plans.get(&device) {
            self.planned = plan.clone();
        }
    }
}

/// A table that has schema, statistics and sizes, and no rows.
fn without_rows(table: &Table) -> Arc<Table> {
    let mut described = Table::from_batches(&table.name, table.schema.clone(), Vec::new())
        .expect("no batch can have another schema when there is none");
    described.owner.clone_from(&table.owner);
    described.rows = table.rows;
    described.bytes = table.bytes;
    described.statistics.clone_from(&table.statistics);
    described.sorted_by.clone_from(&table.sorted_by);
    described.unique.clone_from(&table.unique);
    described.created = table.created;
    Arc::new(described)
}
