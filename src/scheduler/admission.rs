//! Admission: turns a bound join into plans and the devices that may run it, or refuses it before
//! it is queued.

use std::sync::Arc;

use super::device_class::DeviceClass;
use super::device_set::{DeviceSet, sets_of_several};
use super::job_options::{DeviceRequest, JobOptions};
use super::placing::{HostNeed, Place};
use crate::catalog::Catalog;
use crate::device::DeviceId;
use crate::engine::Engine;
use crate::memory::{Interrupt, human_bytes};
use crate::planner::{self, BoundJoin, ExplainedSet, Plan, Side};
use crate::{Error, Result};

/// Plans and places of a join that was admitted.
#[derive(Debug)]
pub(super) struct Admitted {
    /// Plan of each class of devices that may run the join.
    pub(super) plans: Vec<Plan>,
    /// Index of the plan with the shortest predicted time.
    pub(super) fastest: usize,
    pub(super) places: Vec<Place>,
    /// Sets of devices that were considered.
    pub(super) sets: Vec<ExplainedSet>,
}

/// Limits of jobs and results, and the interrupt of an admission.
#[derive(Clone, Copy, Debug)]
pub(super) struct Terms<'a> {
    pub(super) jobs_per_device: usize,
    pub(super) window_bytes: u64,
    pub(super) interrupt: &'a Interrupt,
}

/// Longest predicted time of a join that shares its device. A longer join keeps the device busy on
/// its own, so later jobs gain nothing by sharing with it. A tenth of a second still feels
/// immediate, and a quick join that waits this long is still quick. A join that shares the device
/// with three others answers in less than half a second.
const SHARED_SECONDS_MAX: f64 = 0.1;

impl Admitted {
    /// Returns the plan with the shortest predicted time.
    pub(super) fn plan(&self) -> &Plan {
        &self.plans[self.fastest]
    }
}

/// Plan that a join would run with, for a request that only asks.
#[derive(Debug)]
pub(super) struct Proposed {
    pub(super) plan: Plan,
    pub(super) device_reason: String,
    /// Sets of devices that were considered.
    pub(super) sets: Vec<ExplainedSet>,
    /// Reason why the join would be refused now; `None` if it would not be.
    pub(super) refusal: Option<Error>,
}

/// Plans a join as [`admit`] does, but without the queue. A join that does not fit has a plan as
/// well: the plan of the device that lacks the least memory. If only host memory is too small for
/// its keys, it has the plan of the fastest device.
///
/// # Errors
/// Returns the error in the request.
pub(super) fn propose(
    join: BoundJoin,
    options: &JobOptions,
    catalog: &Catalog,
    engines: &[Arc<dyn Engine>],
    terms: Terms<'_>,
    in_service: impl Fn(usize) -> bool,
) -> Result<Proposed> {
    let planned = plan_classes(join, options, engines, terms.interrupt, in_service)?;
    let candidates = planned.explained(engines);
    let Planned { mut fitting, refused, .. } = planned;
    // Like `admit`, prefer devices whose plan fits in host memory.
    let has_room = |(_, plan): &(usize, &Plan)| host_need(plan, options, catalog, terms).is_ok();
    let plans = || fitting.iter().map(|class| &class.plan).enumerate();
    let chosen = fastest(plans().filter(has_room)).or_else(|| fastest(plans()));
    terms.interrupt.check()?;
    if let Some(chosen) = chosen {
        let device_reason = match device_count(&fitting) {
            1 if fitting[chosen].plan.target.ranks > 1 => "the only devices that may run it together".into(),
            1 => "the only device that may run it".into(),
            count if fitting.iter().any(|class| class.plan.target.ranks > 1) => {
                format!(
                    "predicted to run it fastest, of {count} sets of devices; when it is submitted, queues count as well"
                )
            }
            count => format!("predicted to run it fastest, of {count}; when it is submitted, queues count as well"),
        };
        let ClassPlan { mut plan, sets } = fitting.swap_remove(chosen);
        let refusal = host_need(&plan, options, catalog, terms).err();
        if plan.target.ranks > 1 {
            let names: Vec<String> = sets[0].iter().map(|member| engines[member].id().to_string()).collect();
            plan.target.name = names.join(", ");
        }
        return Ok(Proposed { plan, device_reason, sets: candidates, refusal });
    }
    let device_reason = match device_count(refused.iter().map(|(class, _)| class)) {
        1 => "the only device that could run it, with more memory".into(),
        count => format!("of {count} that could run it with more memory, the one that lacks the least"),
    };
    let lacking = |(ClassPlan { plan, .. }, _): &(ClassPlan, Error)| {
        plan.memory.minimum_bytes.saturating_sub(plan.target.memory_bytes)
    };
    let nearest = refused.into_iter().min_by_key(lacking);
    let (ClassPlan { plan, .. }, refusal) = nearest.expect("every candidate was planned or refused");
    Ok(Proposed { plan, device_reason, sets: candidates, refusal: Some(refusal) })
}

/// Plan of a class of devices, with the sets of the class.
#[derive(Debug)]
struct ClassPlan {
    plan: Plan,
    sets: Vec<DeviceSet>,
}

impl ClassPlan {
    /// Takes the sets of a class. A plan for one device runs on the first of each set.
    fn new(plan: Plan, mut sets: Vec<DeviceSet>) -> Self {
        if plan.target.ranks == 1 {
            sets = sets.into_iter().map(|devices| DeviceSet::new([devices.leader()])).collect();
            sets.dedup();
        }
        Self { plan, sets }
    }
}

/// Plans of a join on the devices that it may run on.
#[derive(Debug, Default)]
struct Planned {
    fitting: Vec<ClassPlan>,
    refused: Vec<(ClassPlan, Error)>,
    /// Sets of several devices that end the join hardly sooner than fewer devices do.
    left_out: Vec<ClassPlan>,
}

impl Planned {
    /// Adds sets of several devices that end the join sooner than fewer devices do.
    ///
    /// # Errors
    /// The errors of planning, except those of sets that cannot divide the join.
    fn add_sets_of_several(
        &mut self,
        join: &BoundJoin,
        options: &JobOptions,
        engines: &[Arc<dyn Engine>],
        interrupt: &Interrupt,
        in_service: impl Fn(usize) -> bool,
    ) -> Result<()> {
        if self.least_seconds(2).is_some_and(|alone| alone < SEVERAL_SECONDS_MIN) {
            return Ok(());
        }
        let ids: Vec<DeviceId> = engines.iter().map(|engine| engine.id()).collect();
        let may = |device: usize| in_service(device) && engines[device].info().capabilities.forms_gangs;
        for (class, sets) in DeviceClass::group(sets_of_several(&ids, may), engines, join) {
            let (plan, refusal) = match planner::propose(join.clone(), &options.overrides(), class.target(), interrupt)
            {
                // Other devices may be able to divide the join.
                Err(Error::Invalid(_) | Error::Unsupported(_)) => continue,
                planned => planned?,
            };
            if plan.target.ranks == 1 {
                continue;
            }
            let of_fewer = self.least_seconds(plan.target.ranks);
            let is_worth_it = of_fewer.is_none_or(|of_fewer| plan.seconds * WORTH_MORE_DEVICES <= of_fewer);
            let class = ClassPlan::new(plan, sets);
            match refusal {
                Some(refusal) => self.refused.push((class, refusal)),
                None if is_worth_it => self.fitting.push(class),
                None => self.left_out.push(class),
            }
        }
        Ok(())
    }

    /// Returns the least predicted seconds of sets that fit, with fewer than `ranks` devices.
    fn least_seconds(&self, ranks: usize) -> Option<f64> {
        let smaller = self.fitting.iter().map(|class| &class.plan).filter(|plan| plan.target.ranks < ranks);
        smaller.map(|plan| plan.seconds).reduce(f64::min)
    }

    /// Describes all sets, small sets first.
    fn explained(&self, engines: &[Arc<dyn Engine>]) -> Vec<ExplainedSet> {
        let explained = |ClassPlan { plan, sets }: &ClassPlan, rejected| {
            let names: Vec<String> = sets[0].iter().map(|device| engines[device].id().to_string()).collect();
            ExplainedSet::new(plan, names.join(", "), sets.len(), rejected)
        };
        let lacking = |plan: &Plan| format!("needs {} of memory on each", human_bytes(plan.memory.minimum_bytes));
        let fitting = self.fitting.iter().map(|class| explained(class, None));
        let refused = self.refused.iter().map(|(class, _)| explained(class, Some(lacking(&class.plan))));
        let too_little = || Some("fewer devices take about as long".into());
        let left_out = self.left_out.iter().map(|class| explained(class, too_little()));
        let mut all: Vec<ExplainedSet> = fitting.chain(refused).chain(left_out).collect();
        all.sort_by_key(|set| set.ranks);
        all
    }
}

/// Least predicted seconds, on one device, of a join that may take several devices. Ranks take one
/// to three milliseconds to begin and end together, whatever they join.
const SEVERAL_SECONDS_MIN: f64 = 5e-3;

/// How much longer a join has to take on fewer devices for more of them to be worth it. Other jobs
/// can use the devices, and predictions err by more.
pub(super) const WORTH_MORE_DEVICES: f64 = 1.05;

fn device_count<'a>(classes: impl IntoIterator<Item = &'a ClassPlan>) -> usize {
    classes.into_iter().map(|class| class.sets.len()).sum()
}

/// Returns the index of the plan with the shortest predicted time.
fn fastest<'a>(plans: impl Iterator<Item = (usize, &'a Plan)>) -> Option<usize> {
    plans.min_by(|(_, a), (_, b)| a.seconds.total_cmp(&b.seconds)).map(|(index, _)| index)
}

/// Plans a join once for each class of the requested devices in service. The best composition
/// depends on sizes and rates, which differ between classes.
fn plan_classes(
    join: BoundJoin,
    options: &JobOptions,
    engines: &[Arc<dyn Engine>],
    interrupt: &Interrupt,
    in_service: impl Fn(usize) -> bool,
) -> Result<Planned> {
    let ids: Vec<DeviceId> = engines.iter().map(|engine| engine.id()).collect();
    let mut sets = options.devices.sets(&ids)?;
    if options.devices == DeviceRequest::All {
        sets = sets.iter().filter_map(|all| all.only(&in_service)).collect();
    }
    if let Some(distribution) = options.distribution {
        sets.retain(|devices| devices.len() > 1);
        if sets.is_empty() {
            return Err(planner::needs_several_devices(distribution));
        }
    }
    let lost = sets.iter().flat_map(DeviceSet::iter).find(|&device| !in_service(device));
    let is_gang = sets.iter().all(|devices| devices.len() > 1);
    sets.retain(|devices| devices.iter().all(&in_service));
    if sets.is_empty() {
        let missing = match lost {
            Some(lost) if is_gang => {
                format!("{} is out of service, and this join runs on several devices", ids[lost])
            }
            _ => "no device that may run this join is in service".into(),
        };
        return Err(Error::Unavailable(format!("{missing}; see the topology, and the server's log")));
    }
    let join = BoundJoin { result_is_stored: options.into.is_some(), unknown_rows: options.streamed, ..join };
    let (mut planned, mut impossible) = (Planned::default(), None);
    for (class, sets) in DeviceClass::group(sets, engines, &join) {
        match planner::propose(join.clone(), &options.overrides(), class.target(), interrupt) {
            Ok((plan, None)) => planned.fitting.push(ClassPlan::new(plan, sets)),
            Ok((plan, Some(refusal))) => planned.refused.push((ClassPlan::new(plan, sets), refusal)),
            // Other devices may be able to divide the join as asked, or to index a side together.
            Err(error @ (Error::Invalid(_) | Error::Unsupported(_))) => impossible = Some(error),
            Err(error) => return Err(error),
        }
    }
    if options.devices == DeviceRequest::Any && options.streamed.is_none() {
        planned.add_sets_of_several(&join, options, engines, interrupt, &in_service)?;
    }
    match impossible {
        Some(error) if planned.fitting.is_empty() && planned.refused.is_empty() => Err(error),
        _ => Ok(planned),
    }
}

/// Plans a join for the requested devices that it fits on, and finds its needs on each.
///
/// # Errors
/// Returns the error in the request, or [`Error::Exhausted`] if the join fits no device or its keys
/// do not fit in host memory.
pub(super) fn admit(
    join: BoundJoin,
    options: &JobOptions,
    catalog: &Catalog,
    engines: &[Arc<dyn Engine>],
    terms: Terms<'_>,
    in_service: impl Fn(usize) -> bool,
) -> Result<Admitted> {
    let planned = plan_classes(join, options, engines, terms.interrupt, in_service)?;
    let candidates = planned.explained(engines);
    let Planned { fitting, refused, .. } = planned;
    let Some(fastest_of_all) = fastest(fitting.iter().map(|class| &class.plan).enumerate()) else {
        let (_, refusal) = refused.into_iter().next().expect("every candidate was planned or refused");
        return Err(refusal);
    };
    let (mut plans, mut places, mut refusal) = (Vec::new(), Vec::new(), None);
    for (index, ClassPlan { plan, sets }) in fitting.into_iter().enumerate() {
        match host_need(&plan, options, catalog, terms) {
            Ok(host) => {
                let of_set = |devices| place(devices, plans.len(), &plan, engines, host, terms);
                places.extend(sets.into_iter().map(of_set));
                plans.push(plan);
            }
            Err(error) if index == fastest_of_all => refusal = Some(error),
            // Report only the refusal of the fastest device.
            Err(_) => {}
        }
    }
    // Of devices that finish a job at the same time, the queue takes the first.
    places.sort_by_key(|place: &Place| place.devices.leader());
    terms.interrupt.check()?;
    match (fastest(plans.iter().enumerate()), refusal) {
        (Some(fastest), _) => Ok(Admitted { plans, fastest, places, sets: candidates }),
        (None, refusal) => Err(refusal.expect("the fastest device has room, or was refused")),
    }
}

/// Finds the needs of a plan on devices of its class. A short join runs in parallel with others if
/// it fits into an equal part of the device's memory, with its probe side in one chunk. Such a join
/// gets twice its need, but at most that part, so that its probe batches need not be small.
fn place(
    devices: DeviceSet,
    index: usize,
    plan: &Plan,
    engines: &[Arc<dyn Engine>],
    host: HostNeed,
    terms: Terms<'_>,
) -> Place {
    let engine = &engines[devices.leader()];
    let slots = engine.jobs_max().min(terms.jobs_per_device).max(1) as u64;
    let (part, need) = (engine.memory().limit_bytes() / slots, plan.memory.whole_bytes);
    // Ranks wait for each other, so no rank may have to share its device.
    let is_small = devices.len() == 1 && slots > 1 && plan.seconds <= SHARED_SECONDS_MAX && need <= part;
    let shared_bytes = is_small.then(|| part.min(need.saturating_mul(2)));
    Place {
        devices,
        plan: index,
        seconds: plan.seconds,
        memory_bytes: plan.memory.minimum_bytes,
        shared_bytes,
        is_prepared: false,
        host,
    }
}

/// Returns the host memory that a join is predicted to take: its result, and the keys that the host
/// makes. Of a result that is consumed as it is read, only the window counts. A prediction without
/// statistics asks for at most an eighth of all memory. Any other prediction asks for at most what
/// tables leave. A running join takes more while memory is free.
///
/// # Errors
/// Returns [`Error::Exhausted`] if the keys alone take more memory than tables leave. The result's
/// size never refuses a join, because its prediction errs.
pub(super) fn host_need(plan: &Plan, options: &JobOptions, catalog: &Catalog, terms: Terms<'_>) -> Result<HostNeed> {
    const GUESSED_SHARE: u64 = 8;
    let all = |bytes: u64| Ok(HostNeed { bytes, least_bytes: bytes, takes_less: false });
    let is_kept = !options.is_read_as_made();
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
        return Ok(HostNeed { bytes: there_will_be, least_bytes, takes_less: false });
    }
    Err(Error::Exhausted(format!(
        "the keys that the host makes for this join take {}; host memory is {}, and tables take {} of it; drop tables, or raise \
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
