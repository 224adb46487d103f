//! What runs jobs: a device with its rates, behind a seam that tests take the place of.

use std::fmt::Debug;
use std::sync::Arc;

use crate::Result;
use crate::device::{Device, DeviceId};
use crate::join::{self, BatchSink, Monitor};
use crate::memory::{Arena, Budget};
use crate::planner::{Plan, Rates, Target};

/// Runs one job at a time.
pub trait Runner: Send + Sync + Debug {
    /// Runs a plan to its end, pushing the result batch by batch.
    ///
    /// # Errors
    /// [`Unavailable`](crate::Error::Unavailable) when the device is lost, so that it is taken out of service; everything
    /// else is the job's own failure.
    fn run(&self, plan: &Plan, sink: &dyn BatchSink, monitor: &Monitor) -> Result<()>;
}

/// A device as the scheduler sees it.
#[derive(Debug)]
pub struct Executor {
    /// Which device.
    pub id: DeviceId,
    /// Its memory. Jobs take what they need while they run; the scheduler only looks whether enough is free.
    pub memory: Budget,
    /// Its sizes and rates.
    pub target: Target,
    /// What runs the jobs.
    pub runner: Box<dyn Runner>,
}

impl Executor {
    /// A device that joins run on, with rates that were measured or are assumed.
    pub fn new(device: Arc<dyn Device>, rates: Rates, arena: Arena) -> Self {
        Self {
            id: device.id(),
            memory: device.memory().clone(),
            target: Target::of(&*device, rates),
            runner: Box::new(JoinRunner { device, arena }),
        }
    }
}

/// Runs joins.
#[derive(Debug)]
struct JoinRunner {
    device: Arc<dyn Device>,
    arena: Arena,
}

impl Runner for JoinRunner {
    fn run(&self, plan: &Plan, sink: &dyn BatchSink, monitor: &Monitor) -> Result<()> {
        join::run(&plan.task()?, &*self.device, &self.arena, sink, monitor)
    }
}
