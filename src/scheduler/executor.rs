//! Executors: engines with the rates of their devices.

use std::sync::Arc;

use crate::device::DeviceId;
use crate::engine::Engine;
use crate::memory::Budget;
use crate::planner::{BoundJoin, Rates, Target};

/// Device as the scheduler sees it.
#[derive(Debug)]
pub struct Executor {
    pub engine: Arc<dyn Engine>,
    pub target: Target,
}

impl Executor {
    /// Creates an executor for a device that joins run on, with measured or assumed rates.
    pub fn new(engine: Arc<dyn Engine>, rates: Rates) -> Self {
        let target = Target::new(engine.id(), engine.info(), engine.memory(), rates);
        Self { engine, target }
    }

    /// Returns the id of the device.
    pub fn id(&self) -> DeviceId {
        self.engine.id()
    }

    /// Returns the memory of the device. A job that runs in parallel with others has a part of it
    /// reserved. A job that runs alone takes what it needs.
    pub fn memory(&self) -> &Budget {
        self.engine.memory()
    }

    /// Returns the number of jobs that the device can run at a time.
    pub fn jobs_max(&self) -> usize {
        self.engine.jobs_max().max(1)
    }

    /// Returns the planner's view of the device, for a join of the given tables now.
    pub fn target_for(&self, join: &BoundJoin) -> Target {
        let kept = [&join.left, &join.right].into_iter().flat_map(|table| self.engine.cached_rows(table)).collect();
        Target { kept, ..self.target.clone() }
    }
}
