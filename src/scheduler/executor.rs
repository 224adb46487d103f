//! What runs jobs: a device with its rates, behind a seam that tests take the place of.

use std::fmt::Debug;
use std::sync::Arc;

use crate::Result;
use crate::catalog::Table;
use crate::device::{ColumnRows, DeviceId};
use crate::engine::{Engine, Grant};
use crate::join::{BatchSink, Monitor};
use crate::memory::Budget;
use crate::planner::{BoundJoin, Plan, Rates, Target};

/// Runs jobs: one at a time, or as many as its [`Executor::jobs_max`] says.
pub trait Runner: Send + Sync + Debug {
    /// Runs a plan to its end in the memory that was granted, pushing the result batch by batch.
    ///
    /// # Errors
    /// [`Unavailable`](crate::Error::Unavailable) when the device is lost, which [`Runner::check`] says as well, so that it is taken out of
    /// service, or when it failed in a way that may pass; everything else is the job's own failure.
    fn run(&self, plan: &Plan, grant: &Grant, sink: &dyn BatchSink, monitor: &Monitor) -> Result<()>;

    /// Whether the device can still work.
    ///
    /// # Errors
    /// [`Unavailable`](crate::Error::Unavailable) when it is lost.
    fn check(&self) -> Result<()> {
        Ok(())
    }

    /// What of a table is on the device from earlier jobs.
    fn kept_rows(&self, _table: &Arc<Table>) -> Vec<ColumnRows> {
        Vec::new()
    }
}

/// A device as the scheduler sees it.
#[derive(Debug)]
pub struct Executor {
    /// Which device.
    pub id: DeviceId,
    /// Its memory. A job that runs beside others has a part of it reserved; one that has the device alone takes what it needs.
    pub memory: Budget,
    /// Jobs that it can run at a time.
    pub jobs_max: usize,
    /// Its sizes and rates.
    pub target: Target,
    /// What runs the jobs.
    pub runner: Box<dyn Runner>,
}

impl Executor {
    /// A device that joins run on, with rates that were measured or are assumed.
    pub fn new(engine: Arc<dyn Engine>, rates: Rates) -> Self {
        Self {
            id: engine.id(),
            memory: engine.memory().clone(),
            jobs_max: engine.jobs_max().max(1),
            target: Target::new(engine.id(), engine.info(), engine.memory(), rates),
            runner: Box::new(JoinRunner { engine }),
        }
    }
}

impl Executor {
    /// The device as the planner sees it for a join of those tables now.
    pub fn target_for(&self, join: &BoundJoin) -> Target {
        let kept = [&join.left, &join.right].into_iter().flat_map(|table| self.runner.kept_rows(table)).collect();
        Target { kept, ..self.target.clone() }
    }
}

/// Runs joins.
#[derive(Debug)]
struct JoinRunner {
    engine: Arc<dyn Engine>,
}

impl Runner for JoinRunner {
    fn run(&self, plan: &Plan, grant: &Grant, sink: &dyn BatchSink, monitor: &Monitor) -> Result<()> {
        self.engine.run(&plan.task()?, grant, sink, monitor)
    }

    fn check(&self) -> Result<()> {
        self.engine.check()
    }

    fn kept_rows(&self, table: &Arc<Table>) -> Vec<ColumnRows> {
        self.engine.kept_rows(table)
    }
}
