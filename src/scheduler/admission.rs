//! Admission: from a request to a plan and the devices that may run it, or to a refusal before anything is queued.

use std::collections::BTreeMap;

use super::executor::Executor;
use super::placing::Place;
use crate::catalog::Catalog;
use crate::human;
use crate::memory::{Interrupt, human_bytes};
use crate::planner::{self, BoundJoin, DeviceRequest, JoinSpec, Plan, Side};
use crate::{Error, Result};

/// What was admitted.
#[derive(Debug)]
pub(super) struct Admitted {
    /// The plan of each device that may run it, by index.
    pub(super) plans: BTreeMap<usize, Plan>,
    /// The device that is predicted to be the fastest.
    pub(super) fastest: usize,
    /// Where it may run, each device with what its own plan takes.
    pub(super) places: Vec<Place>,
}

/// Host memory that a job takes on a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct HostNeed {
    /// Bytes that it is predicted to take; no more than there will ever be, as far as could be told when it was admitted.
    pub(super) bytes: u64,
    /// Bytes that must be there when no more ever will: all, unless it was predicted to take more than there is. Then a job that
    /// waited for what nobody gives back would wait in vain, and the prediction may be wrong.
    pub(super) least_bytes: u64,
}

/// How many jobs share what, and what ends an admission.
#[derive(Clone, Copy, Debug)]
pub(super) struct Terms<'a> {
    /// Jobs that a device runs at a time, at the most.
    pub(super) jobs_per_device: usize,
    /// What a result that is consumed as it is read may pile up, in bytes.
    pub(super) window_bytes: u64,
    /// Ends the admission where nothing waits for it any more.
    pub(super) interrupt: &'a Interrupt,
}

/// A join that is predicted to take longer has its device alone: it fills the device by itself, and whoever comes after it
/// waits no longer for the device than for it. A tenth of a second is what a person still takes for at once: a join that would
/// have been quick is quick behind such a one too, and one beside three others still answers in less than half a second.
const SHARED_SECONDS_MAX: f64 = 0.1;

impl Admitted {
    /// The plan on the device that is predicted to be the fastest.
    pub(super) fn plan(&self) -> &Plan {
        &self.plans[&self.fastest]
    }
}

/// What would run, for those who only want to know.
#[derive(Debug)]
pub(super) struct Proposed {
    pub(super) plan: Plan,
    /// Why it was planned for this device.
    pub(super) device_reason: String,
    /// Why the join is refused as things are; `None` when it is not.
    pub(super) refusal: Option<Error>,
}

/// As [`admit`], without a queue in mind. A join that does not fit has a plan all the same: that of the device that lacks the least
/// for it, or the fastest where only host memory is too small for its keys.
///
/// # Errors
/// What is wrong with the request.
pub(super) fn propose(
    spec: JoinSpec,
    catalog: &Catalog,
    executors: &[Executor],
    terms: Terms<'_>,
    in_service: impl Fn(usize) -> bool,
) -> Result<Proposed> {
    let Planned { mut fitting, refused } = plan_for_each(spec, catalog, executors, terms.interrupt, in_service)?;
    let (fitting_count, refused_count) = (fitting.len(), refused.len());
    // As when it is submitted, a device where host memory is too small does not count beside one where it is not.
    let with_room = fitting.iter().filter(|(_, plan)| host_need(plan, catalog, terms).is_ok());
    let device = fastest(with_room).or_else(|| fastest(&fitting));
    terms.interrupt.check()?;
    if let Some(plan) = device.and_then(|device| fitting.remove(&device)) {
        let device_reason = match fitting_count {
            1 => "the only device that may run it".into(),
            _ => format!("predicted to run it fastest, of {fitting_count}; when it is submitted, queues count as well"),
        };
        let refusal = host_need(&plan, catalog, terms).err();
        return Ok(Proposed { plan, device_reason, refusal });
    }
    let lacking = |(plan, _): &(Plan, Error)| plan.memory.minimum_bytes.saturating_sub(plan.target.memory_bytes);
    let (plan, refusal) = refused.into_iter().min_by_key(lacking).expect("every candidate was planned or refused");
    let device_reason = match refused_count {
        1 => "the only device that might run it, with more memory".into(),
        _ => format!("of {refused_count} that might run it with more memory, the one that lacks the least"),
    };
    Ok(Proposed { plan, device_reason, refusal: Some(refusal) })
}

/// The plans of a join on the devices that it may run on.
#[derive(Debug, Default)]
struct Planned {
    /// Of the devices that it fits on, by index.
    fitting: BTreeMap<usize, Plan>,
    /// Of the others, in the order in which they were asked for, with what is too small.
    refused: Vec<(Plan, Error)>,
}

/// The device whose plan is predicted to take the least time.
fn fastest<'a>(plans: impl IntoIterator<Item = (&'a usize, &'a Plan)>) -> Option<usize> {
    plans.into_iter().min_by(|(_, a), (_, b)| a.seconds.total_cmp(&b.seconds)).map(|(&device, _)| device)
}

/// Binds a join, and plans it for each of the devices in service that it asks for: sizes and rates decide how it is best composed,
/// and they differ between devices.
fn plan_for_each(
    spec: JoinSpec,
    catalog: &Catalog,
    executors: &[Executor],
    interrupt: &Interrupt,
    in_service: impl Fn(usize) -> bool,
) -> Result<Planned> {
    let strategy = spec.strategy;
    let candidates = candidates(&spec.devices, executors)?;
    let join = planner::bind_interruptible(spec, catalog, interrupt)?;
    let candidates: Vec<usize> = candidates.into_iter().filter(|device| in_service(*device)).collect();
    if candidates.is_empty() {
        return Err(Error::Unavailable(
            "no device that may run this join is in service; see the topology, and the server's log".into(),
        ));
    }
    let mut planned = Planned::default();
    for device in candidates {
        match planner::propose(join.clone(), strategy, &executors[device].target_for(&join), interrupt)? {
            (plan, None) => {
                planned.fitting.insert(device, plan);
            }
            (plan, Some(refusal)) => planned.refused.push((plan, refusal)),
        }
    }
    Ok(planned)
}

/// Plans a join for the devices that it asks for and fits on, and finds what it takes where.
///
/// # Errors
/// What is wrong with the request; [`Error::Exhausted`] when it fits no device, or its keys do not fit in host memory.
pub(super) fn admit(
    spec: JoinSpec,
    catalog: &Catalog,
    executors: &[Executor],
    terms: Terms<'_>,
    in_service: impl Fn(usize) -> bool,
) -> Result<Admitted> {
    let Planned { fitting, refused } = plan_for_each(spec, catalog, executors, terms.interrupt, in_service)?;
    let Some(fastest_of_all) = fastest(&fitting) else {
        let (_, refusal) = refused.into_iter().next().expect("every candidate was planned or refused");
        return Err(refusal);
    };
    let (mut plans, mut places, mut refusal) = (BTreeMap::new(), Vec::new(), None);
    for (device, plan) in fitting {
        match host_need(&plan, catalog, terms) {
            Ok(host) => {
                places.push(place(device, &plan, &executors[device], host, terms));
                plans.insert(device, plan);
            }
            Err(error) if device == fastest_of_all => refusal = Some(error),
            // Who is refused is told of the fastest.
            Err(_) => {}
        }
    }
    terms.interrupt.check()?;
    match (fastest(&plans), refusal) {
        (Some(fastest), _) => Ok(Admitted { plans, fastest, places }),
        (None, refusal) => Err(refusal.expect("the fastest device has room, or was refused")),
    }
}

/// A short join that fits into an equal part of the device's memory, its probe side in one chunk, runs beside others in such
/// a part. It is given twice what it needs if there is as much, so that its waves need not be small.
fn place(device: usize, plan: &Plan, executor: &Executor, host: HostNeed, terms: Terms<'_>) -> Place {
    let seats = executor.jobs_max.min(terms.jobs_per_device).max(1) as u64;
    let (part, need) = (executor.memory.limit_bytes() / seats, plan.memory.whole_bytes);
    let is_small = seats > 1 && plan.seconds <= SHARED_SECONDS_MAX && need <= part;
    let shared_bytes = is_small.then(|| part.min(need.saturating_mul(2)));
    Place { device, seconds: plan.seconds, memory_bytes: plan.memory.minimum_bytes, shared_bytes, host }
}

/// The devices that a request allows, by index.
fn candidates(request: &DeviceRequest, executors: &[Executor]) -> Result<Vec<usize>> {
    let all = || executors.iter().map(|executor| executor.id.to_string()).collect::<Vec<_>>().join(", ");
    match request {
        DeviceRequest::Any | DeviceRequest::Count(1) => Ok((0..executors.len()).collect()),
        DeviceRequest::Count(0) => Err(Error::Invalid(format!(
            "\"devices\" is 0, and a join needs one; name some of {}, ask for 1, or leave it out",
            all()
        ))),
        DeviceRequest::Count(count) => Err(Error::Unsupported(format!(
            "\"devices\": {count} asks for a join over several devices, which this version has no strategy for; name some of {}, \
             one of which runs it, ask for 1, or leave it out",
            all()
        ))),
        DeviceRequest::Named(names) if names.is_empty() => {
            Err(Error::Invalid(format!("\"devices\" is an empty list; name some of {}, or leave it out", all())))
        }
        DeviceRequest::Named(names) => {
            let mut found = Vec::new();
            for name in names {
                let at = executors.iter().position(|executor| executor.id.to_string() == *name);
                let at = at.ok_or_else(|| {
                    Error::Invalid(format!(
                        "there is no device {}; name some of {}, or leave \"devices\" out for any of them",
                        human::asked(name),
                        all()
                    ))
                })?;
                if !found.contains(&at) {
                    found.push(at);
                }
            }
            Ok(found)
        }
    }
}

/// The host memory that a join is predicted to take: its result, or the part of it that may pile up
/// when it is consumed as it is read, and the keys that the host makes. A prediction that rests on no
/// statistics asks for at most an eighth of all memory, and any other one for at most what there will
/// ever be. The join takes more while there is some.
///
/// # Errors
/// [`Error::Exhausted`] for a join whose keys alone take more than there will be, however many jobs
/// and leases end: the memory of tables stays taken. The size of the result refuses nothing, because
/// its prediction errs.
fn host_need(plan: &Plan, catalog: &Catalog, terms: Terms<'_>) -> Result<HostNeed> {
    const GUESSED_SHARE: u64 = 8;
    let all = |bytes: u64| Ok(HostNeed { bytes, least_bytes: bytes });
    let is_kept = !plan.join.spec.is_read_as_made();
    let result_bytes = if is_kept { plan.result_bytes } else { plan.result_bytes.min(terms.window_bytes) };
    let bytes = result_bytes.saturating_add(plan.host_scratch_bytes);
    let budget = catalog.arena().budget();
    if !has_statistics(&plan.join) {
        return all(bytes.min(budget.limit_bytes() / GUESSED_SHARE));
    }
    let table_bytes = catalog.table_bytes().min(budget.used_bytes());
    let there_will_be = budget.limit_bytes().saturating_sub(table_bytes);
    if bytes <= there_will_be {
        return all(bytes);
    }
    let least_bytes = plan.host_scratch_bytes;
    if least_bytes <= there_will_be {
        return Ok(HostNeed { bytes: there_will_be, least_bytes });
    }
    Err(Error::Exhausted(format!(
        "the keys that the host makes for this join take {}; host memory is {}, of which tables take {}; drop tables, or raise \
         the server's --host-memory",
        human_bytes(least_bytes),
        human_bytes(budget.limit_bytes()),
        human_bytes(table_bytes),
    )))
}

fn has_statistics(join: &BoundJoin) -> bool {
    [Side::Left, Side::Right]
        .into_iter()
        .all(|side| join.keys.iter().all(|key| join.table(side).statistics[key.column(side)].distinct.is_some()))
}
