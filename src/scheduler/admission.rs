//! Admission: from a request to a plan and the devices that may run it, or to a refusal before anything is queued.

use std::collections::BTreeMap;

use super::executor::Executor;
use super::queue::Place;
use crate::catalog::Catalog;
use crate::memory::human_bytes;
use crate::planner::{self, BoundJoin, DeviceRequest, JoinSpec, Plan, Side};
use crate::{Error, Result};

/// What was admitted.
#[derive(Debug)]
pub(super) struct Admitted {
    /// The plan of each device that may run it, by index.
    pub(super) plans: BTreeMap<usize, Plan>,
    /// The device that is predicted to be the fastest.
    pub(super) fastest: usize,
}

impl Admitted {
    /// The plan on the device that is predicted to be the fastest.
    pub(super) fn plan(&self) -> &Plan {
        &self.plans[&self.fastest]
    }

    /// The devices that may run it, each with what its own plan takes.
    pub(super) fn places(&self) -> Vec<Place> {
        self.plans.iter().map(|(&device, plan)| place(device, plan)).collect()
    }
}

/// Binds a join, and plans it for each of the devices that it asks for and fits on: sizes and rates decide how it is best
/// composed, and they differ between devices.
///
/// # Errors
/// What is wrong with the request; [`Error::Exhausted`] when it fits no device, or its result cannot fit in host memory.
pub(super) fn admit(
    spec: JoinSpec,
    catalog: &Catalog,
    executors: &[Executor],
    in_service: impl Fn(usize) -> bool,
) -> Result<Admitted> {
    let candidates = candidates(&spec.devices, executors)?;
    let strategy = spec.strategy;
    let join = planner::bind(spec, catalog)?;
    let candidates: Vec<usize> = candidates.into_iter().filter(|device| in_service(*device)).collect();
    if candidates.is_empty() {
        return Err(Error::Unavailable(
            "no device that may run this join is in service; see the topology, and the server's log".into(),
        ));
    }
    let mut plans = BTreeMap::new();
    let mut refusal: Option<Error> = None;
    for device in candidates {
        match planner::plan_on(join.clone(), strategy, &executors[device].target) {
            Ok(plan) => {
                plans.insert(device, plan);
            }
            Err(error) => refusal = Some(refusal.unwrap_or(error)),
        }
    }
    let fastest = plans.iter().min_by(|(_, a), (_, b)| a.seconds.total_cmp(&b.seconds)).map(|(&device, _)| device);
    let Some(fastest) = fastest else {
        return Err(refusal.expect("every candidate was planned or refused"));
    };
    let admitted = Admitted { plans, fastest };
    check_host_memory(admitted.plan(), catalog)?;
    Ok(admitted)
}

fn place(device: usize, plan: &Plan) -> Place {
    Place { device, seconds: plan.seconds, memory_bytes: plan.memory.minimum_bytes }
}

/// The devices that a request allows, by index.
fn candidates(request: &DeviceRequest, executors: &[Executor]) -> Result<Vec<usize>> {
    let all = || executors.iter().map(|executor| executor.id.to_string()).collect::<Vec<_>>().join(", ");
    match request {
        DeviceRequest::Any | DeviceRequest::Count(1) => Ok((0..executors.len()).collect()),
        DeviceRequest::Count(0) => {
            Err(Error::Invalid("a join needs at least one device; leave \"devices\" out".into()))
        }
        DeviceRequest::Count(count) => Err(Error::Unsupported(format!(
            "\"devices\": {count} asks for a join over several devices, which this version has no strategy for; ask for 1, or \
             leave it out"
        ))),
        DeviceRequest::Named(names) if names.is_empty() => {
            Err(Error::Invalid(format!("\"devices\" is an empty list; name some of {}, or leave it out", all())))
        }
        DeviceRequest::Named(names) => {
            let mut found = Vec::new();
            for name in names {
                let at = executors.iter().position(|executor| executor.id.to_string() == *name);
                let at =
                    at.ok_or_else(|| Error::Invalid(format!("there is no device {name:?}; devices are {}", all())))?;
                if !found.contains(&at) {
                    found.push(at);
                }
            }
            Ok(found)
        }
    }
}

/// Refuses a result that is predicted to be larger than all of host memory. Predictions err, so there is a margin, and a
/// prediction that rests on no statistics refuses nothing.
fn check_host_memory(plan: &Plan, catalog: &Catalog) -> Result<()> {
    const MARGIN: u64 = 2;
    if plan.join.spec.retain_seconds == Some(0) || !has_statistics(&plan.join) {
        return Ok(());
    }
    let limit_bytes = catalog.arena().budget().limit_bytes();
    if plan.host_bytes / MARGIN <= limit_bytes {
        return Ok(());
    }
    Err(Error::Exhausted(format!(
        "the result of this join is predicted to have {} rows of {} in all, and host memory is {}; ask for fewer columns, raise \
         --host-memory, or fetch it as it is made with retain_seconds 0",
        plan.estimates.rows.round(),
        human_bytes(plan.host_bytes),
        human_bytes(limit_bytes)
    )))
}

fn has_statistics(join: &BoundJoin) -> bool {
    [Side::Left, Side::Right]
        .into_iter()
        .all(|side| join.keys.iter().all(|key| join.table(side).statistics[key.column(side)].distinct.is_some()))
}
