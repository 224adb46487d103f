//! Executors: devices with their rates, behind a trait that tests implement too.

use std::fmt::Debug;
use std::sync::Arc;

use crate::Result;
use crate::catalog::Table;
use crate::device::{ColumnRows, DeviceId};
use crate::engine::{Engine, Grant};
use crate::join::{BatchSink, Monitor};
use crate::memory::Budget;
use crate::planner::{BoundJoin, Plan, Rates, Target};

/// Runs jobs: one at a time, or up to [`Executor::jobs_max`].
pub trait Runner: Send + Sync + Debug {
    /// Runs a plan to its end in the granted memory, and pushes the result batch by batch.
    ///
    /// # Errors
    /// Returns [`Unavailable`](crate::Error::Unavailable) if the device is lost, or failed in a way
    /// that may pass. [`Runner::check`] reports a lost device too, so that it is taken out of
    /// service. Any other error is the job's own failure.
    fn run(&self, plan: &Plan, grant: &Grant, sink: &dyn BatchSink, monitor: &Monitor) -> Result<()>;

    /// Checks that the device can still work.
    ///
    /// # Errors
    /// Returns [`Unavailable`](crate::Error::Unavailable) if the device is lost.
    fn check(&self) -> Result<()> {
        Ok(())
    }

    /// Returns the rows of a table that are on the device from earlier jobs.
    fn cached_rows(&self, _table: &Arc<Table>) -> Vec<ColumnRows> {
        Vec::new()
    }
}

/// Device for the scheduler.
#[derive(Debug)]
pub struct Executor {
    /// Id of the device.
    pub id: DeviceId,
    /// Memory of the device. A job that runs in parallel with others has a part of it reserved. A
    /// job that runs alone takes what it needs.
    pub memory: Budget,
    /// Jobs that the device can run at a time.
    pub jobs_max: usize,
    /// Sizes and rates of the device.
    pub target: Target,
    /// Runner of the jobs.
    pub runner: Box<dyn Runner>,
}

impl Executor {
    /// Creates an executor for a device that joins run on, with measured or assumed rates.
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
    /// Returns the planner's view of the device, for a join of the given tables now.
    pub fn target_for(&self, join: &BoundJoin) -> Target {
        let kept = [&join.left, &join.right].into_iter().flat_map(|table| self.runner.cached_rows(table)).collect();
        Target { kept, ..self.target.clone() }
    }
}

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

    fn cached_rows(&self, table: &Arc<Table>) -> Vec<ColumnRows> {
        self.engine.cached_rows(table)
    }
}
