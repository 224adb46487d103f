//! The engine under measurement: one device, one catalog, and no server.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Instant;

use arrow::array::RecordBatch;
use parking_lot::Mutex;

use super::at_once::at_once;
use super::check::{Join, Prepared, Summary};
use super::floor::Boundaries;
use super::overrides;
use dovetail::catalog::{Catalog, Upload, UploadMode, UploadOptions};
use dovetail::device::{CancelFlag, Device, DeviceId, TimingOps, WorkTime, open_device};
use dovetail::join::{self, BatchSink, Monitor, PhaseRecord};
use dovetail::memory::{Arena, Budget};
use dovetail::planner::{self, JoinSpec, KeyPair, Plan, PlanOverrides, Rates, Strategy, Target};
use dovetail::service::encode::batch_bytes;
use dovetail::{Context, Error, Result};

/// The resources of the engine.
#[derive(Clone, Debug, PartialEq)]
pub struct Machine {
    pub device: DeviceId,
    pub threads: usize,
    /// Maximum bytes of device memory. `None`: all free memory of a GPU, or half of `host_memory`.
    pub device_memory: Option<u64>,
    /// For tables and results, in bytes.
    pub host_memory: u64,
}

/// A machine whose device was opened and measured once.
#[derive(Clone, Debug, PartialEq)]
pub struct Measurable {
    pub machine: Machine,
    pub device_name: String,
    pub device_memory_bytes: u64,
    pub rates: Rates,
    pub boundaries: Boundaries,
    /// True if results may share columns with the tables, as in a server. Published experiments
    /// write every column.
    pub shares: bool,
    pub at_once: usize,
}

/// A device and the tables.
#[derive(Debug)]
pub struct Engine {
    catalog: Catalog,
    device: Arc<dyn Device>,
    /// The device as the planner sees it.
    target: Target,
    joins: Vec<Join>,
    shares: bool,
    /// True if columns stay on the device from run to run.
    keeps: bool,
    at_once: usize,
}

/// The measurements of one strategy on one case.
#[derive(Clone, Debug, Default)]
pub struct Measured {
    /// Request: a strategy, the planner's choice, or a way to compose the join.
    pub asked: PlanOverrides,
    /// True if columns were on the device from earlier runs.
    pub kept: bool,
    /// Seconds of each timed run, ascending.
    pub seconds: Vec<f64>,
    /// Seconds of the runs timed again in turn with the alternative, ascending. Empty if not
    /// needed.
    pub seconds_again: Vec<f64>,
    pub rows: u64,
    pub bytes_in: u64,
    pub bytes_out: u64,
    /// Strategies of the joins, in order.
    pub strategy: String,
    /// Composition of the plans. Joins with the same composition do the same work.
    pub plan: String,
    pub predicted_rows: f64,
    pub predicted_seconds: f64,
    /// Predicted seconds per phase name.
    pub predicted_phases: BTreeMap<&'static str, f64>,
    /// Phases of the median run. The first run differs, because it touches fresh memory.
    pub phases: Vec<PhaseRecord>,
    /// Work times by the device's own clock, if it has one. They are from the median run if the
    /// device always records them. Otherwise they are from the check run, which events slow down a
    /// little.
    pub times: Vec<WorkTime>,
    /// Peak device memory. `None` if columns stay cached, because cached columns take all free
    /// memory.
    pub device_memory_max_bytes: Option<u64>,
}

/// The planner's view of a join on a device.
#[derive(Debug)]
pub struct PlannedJoin<'a> {
    pub join: &'a Join,
    pub plan: Plan,
    /// The device, with its cached columns.
    pub target: &'a Target,
}

/// One timed run.
#[derive(Clone, Debug)]
pub struct Timed {
    pub seconds: f64,
    pub phases: Vec<PhaseRecord>,
    /// Work times by the device's own clock.
    pub times: Vec<WorkTime>,
}

/// One run of all joins of a case.
#[derive(Debug, Default)]
struct Run {
    seconds: f64,
    batches: Vec<RecordBatch>,
    bytes_in: u64,
    bytes_out: u64,
    phases: Vec<PhaseRecord>,
    plans: Vec<Plan>,
}

impl Run {
    /// Returns the number of rows, if the result is the expected one.
    fn verify(&self, prepared: &Prepared) -> Result<u64> {
        let (got, expected) = (Summary::of(&self.batches, &prepared.products)?, prepared.expected);
        match got == expected {
            true => Ok(got.rows),
            false => Err(Error::Internal(format!(
                "the result is wrong: {} rows with checksum {:x}, and {} with {:x} were expected",
                got.rows, got.checksum, expected.rows, expected.checksum
            ))),
        }
    }
}

impl Measured {
    /// Stores the results of the timed runs, at least one.
    pub fn set_runs(&mut self, mut runs: Vec<Timed>) {
        runs.sort_by(|a, b| a.seconds.total_cmp(&b.seconds));
        self.seconds = runs.iter().map(|run| run.seconds).collect();
        let middle = runs.swap_remove(runs.len() / 2);
        self.phases = middle.phases;
        if !middle.times.is_empty() {
            self.times = middle.times;
        }
    }

    /// Stores the times of the runs repeated in turn with the alternative.
    pub fn set_runs_again(&mut self, runs: &[Timed]) {
        self.seconds_again = runs.iter().map(|run| run.seconds).collect();
        self.seconds_again.sort_by(f64::total_cmp);
    }

    /// Returns the median time of the runs.
    pub fn median(&self) -> f64 {
        self.seconds[self.seconds.len() / 2]
    }

    /// Returns the median time of the repeated runs, or `None` without any.
    pub fn median_again(&self) -> Option<f64> {
        self.seconds_again.get(self.seconds_again.len() / 2).copied()
    }
}

/// Keeps all batches: the result is materialized, and freed after the clock has stopped.
#[derive(Default)]
struct Keep {
    batches: Mutex<Vec<RecordBatch>>,
}

impl BatchSink for Keep {
    fn push(&self, batch: RecordBatch) -> Result<()> {
        self.batches.lock().push(batch);
        Ok(())
    }
}

impl Machine {
    /// Opens the device, with its memory.
    ///
    /// # Errors
    /// Errors of opening the device.
    pub fn open(&self) -> Result<Arc<dyn Device>> {
        open_device(self.device, self.threads, |free| {
            let bytes = match (self.device_memory, free) {
                (Some(asked), free) => asked.min(free.unwrap_or(asked)),
                (None, free) => free.unwrap_or(self.host_memory / 2),
            };
            Budget::new(format!("memory of device {}", self.device), "--device-memory", bytes)
        })
    }
}

impl Measurable {
    /// Makes a machine whose device has the given rates.
    pub fn new(machine: Machine, device: &dyn Device, rates: Rates, boundaries: Boundaries) -> Self {
        let (device_name, device_memory_bytes) = (device.facts().name.clone(), device.memory().limit_bytes());
        Self { machine, device_name, device_memory_bytes, rates, boundaries, shares: false, at_once: 1 }
    }
}

impl Engine {
    /// Makes an engine with the tables of a case. The expected result stays with the caller.
    ///
    /// # Errors
    /// Errors of opening the device; [`Error::Exhausted`] when the tables do not fit.
    pub fn new(on: &Measurable, prepared: &mut Prepared) -> Result<Self> {
        Self::on_device(on.machine.open()?, on, prepared)
    }

    /// Makes an engine with the tables of a case on an open device.
    ///
    /// # Errors
    /// [`Error::Exhausted`] when the tables do not fit.
    pub fn on_device(device: Arc<dyn Device>, on: &Measurable, prepared: &mut Prepared) -> Result<Self> {
        let Measurable { machine, rates, shares, at_once, .. } = on;
        let arena = Arena::new(Budget::new("host memory", "--host-memory", machine.host_memory));
        arena.pin_by(device.pin());
        let target = Target::of(&*device, rates.clone());
        let joins = prepared.joins.clone();
        let (shares, at_once) = (*shares, *at_once);
        let engine = Self { catalog: Catalog::new(arena), device, target, joins, shares, keeps: false, at_once };
        for (name, batches) in std::mem::take(&mut prepared.tables) {
            engine.put(&name, batches)?;
        }
        Ok(engine)
    }

    /// Uploads a table like a client's: into the arena, with statistics.
    fn put(&self, name: &str, batches: Vec<RecordBatch>) -> Result<()> {
        let schema = batches.first().map(RecordBatch::schema);
        let schema = schema.ok_or_else(|| Error::Internal(format!("table {name} has no batches")))?;
        let options = UploadOptions { mode: UploadMode::Replace, ..UploadOptions::default() };
        let mut upload = Upload::begin(&self.catalog, name, schema, options)?;
        for batch in batches {
            upload.append(batch)?;
        }
        upload.commit().map(drop).context(|| format!("uploading table {name}"))
    }

    /// Keeps columns on the device from now on, as in a server, and shows them to the planner.
    ///
    /// Runs each strategy once, so that the device has all columns that any strategy needs. Returns
    /// false, and changes nothing, if the device caches no columns because it reads host memory in
    /// place.
    ///
    /// # Errors
    /// Errors of the engine.
    pub fn enable_cache(&mut self) -> Result<bool> {
        let Some(cache) = self.device.cache() else { return Ok(false) };
        cache.enable_cache(self.device.memory().limit_bytes() / 2)?;
        self.keeps = true;
        for strategy in Strategy::ALL {
            match self.run(&PlanOverrides::named(Some(strategy)), &*self.device) {
                // Another strategy may need less memory.
                Ok(_) | Err(Error::Exhausted(_)) => {}
                Err(error) => return Err(error),
            }
        }
        let mut kept = Vec::new();
        for join in &self.joins {
            for name in [&join.left, &join.right] {
                kept.extend(Target::cached_rows(&*self.device, &self.catalog.table(name)?));
            }
        }
        // Fixed for all later plans, so that columns copied in by one run do not change another
        // plan.
        self.target.kept = kept;
        Ok(true)
    }

    /// Returns one way to compose the join for each plan that is possible on this device, except
    /// the plans of the `known` ways. Empty for several joins.
    ///
    /// # Errors
    /// Errors of the planner.
    pub fn ways(&self, known: &[PlanOverrides]) -> Result<Vec<PlanOverrides>> {
        // Each join of a sequence would have its own ways.
        let [join] = &self.joins[..] else { return Ok(Vec::new()) };
        let mut plans: BTreeSet<String> =
            known.iter().filter_map(|way| Some(self.plan(join, way).ok()?.composition.to_string())).collect();
        let mut ways = Vec::new();
        for way in overrides::every_way() {
            match self.plan(join, &way) {
                Ok(plan) if plans.insert(plan.composition.to_string()) => ways.push(way),
                // This composition is impossible, or does not fit memory.
                Ok(_) | Err(Error::Unsupported(_) | Error::Exhausted(_)) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(ways)
    }

    /// Returns the planner's view of the join, or `None` for several joins.
    ///
    /// # Errors
    /// Errors of the planner.
    pub fn planned(&self) -> Result<Option<PlannedJoin<'_>>> {
        let [join] = &self.joins[..] else { return Ok(None) };
        let plan = self.plan(join, &PlanOverrides::default())?;
        Ok(Some(PlannedJoin { join, plan, target: &self.target }))
    }

    /// Runs once without timing and checks the result. Returns everything except times and phases.
    ///
    /// # Errors
    /// [`Error::Internal`] when the result is not the expected one; errors of the engine.
    pub fn check(&self, asked: &PlanOverrides, prepared: &Prepared) -> Result<Measured> {
        self.add_up_times(true)?;
        drop(self.take_times());
        let outcome = self.run_and_see_memory(asked);
        self.add_up_times(false)?;
        let (run, device_memory_max_bytes) = outcome?;
        let times = self.take_times();
        let rows = run.verify(prepared)?;
        let mut strategies: Vec<&str> = run.plans.iter().map(|plan| plan.strategy().name()).collect();
        strategies.dedup();
        Ok(Measured {
            asked: *asked,
            kept: self.keeps,
            seconds: Vec::new(),
            seconds_again: Vec::new(),
            rows,
            bytes_in: run.bytes_in,
            bytes_out: run.bytes_out,
            strategy: strategies.join(", "),
            plan: run.plans.iter().map(|plan| plan.composition.to_string()).collect::<Vec<_>>().join("; "),
            predicted_rows: run.plans.last().map_or(0.0, |plan| plan.estimates.rows),
            predicted_seconds: run.plans.iter().map(|plan| plan.seconds).sum(),
            predicted_phases: run.plans.iter().flat_map(|plan| &plan.phases).fold(BTreeMap::new(), |mut all, phase| {
                *all.entry(phase.phase.name()).or_default() += phase.seconds;
                all
            }),
            phases: Vec::new(),
            times,
            device_memory_max_bytes,
        })
    }

    /// Turns sums of work times on or off, on a device that measures them.
    fn add_up_times(&self, on: bool) -> Result<()> {
        self.device.timing().map_or(Ok(()), |timing| timing.add_up_times(on))
    }

    /// Returns the work times since the last call. None from a device that does not measure them.
    fn take_times(&self) -> Vec<WorkTime> {
        self.device.timing().map_or_else(Vec::new, TimingOps::take_times)
    }

    /// Runs once. Returns the run and its peak device memory.
    fn run_and_see_memory(&self, asked: &PlanOverrides) -> Result<(Run, Option<u64>)> {
        if self.keeps {
            // A job with all memory would evict the cached columns.
            return Ok((self.run(asked, &*self.device)?, None));
        }
        // A separate budget shows the peak of this strategy alone, not of an earlier one.
        let all = self.device.memory().reserve(self.device.memory().free_bytes(), "the join")?;
        let memory = Budget::within(all);
        let device = self.device.for_job(memory.clone())?;
        Ok((self.run(asked, &*device)?, Some(memory.used_bytes_max())))
    }

    /// Times one run. Checks its result after the clock has stopped, and frees it before the next
    /// run.
    ///
    /// # Errors
    /// [`Error::Internal`] when the result is not the expected one; errors of the engine.
    pub fn time(&self, asked: &PlanOverrides, prepared: &Prepared) -> Result<Timed> {
        if self.at_once > 1 {
            return self.time_at_once(asked, prepared);
        }
        drop(self.take_times());
        let run = self.run(asked, &*self.device)?;
        let times = self.take_times();
        run.verify(prepared)?;
        Ok(Timed { seconds: run.seconds, phases: run.phases, times })
    }

    /// Times several runs at once on the same device. Checks the last run of each thread. Reports
    /// no phases or work times, because they cannot be assigned to a run.
    fn time_at_once(&self, asked: &PlanOverrides, prepared: &Prepared) -> Result<Timed> {
        let (seconds, last) = at_once(self.at_once, || self.run(asked, &*self.device));
        last.into_iter().try_for_each(|run| run?.verify(prepared).map(drop))?;
        Ok(Timed { seconds, phases: Vec::new(), times: Vec::new() })
    }

    /// Runs all joins of the case. The clock runs from the first primitive to the last batch of
    /// each join. Planning is not timed, nor is turning a result into the table of the next join.
    fn run(&self, asked: &PlanOverrides, device: &dyn Device) -> Result<Run> {
        let mut run = Run::default();
        for join in &self.joins {
            let plan = self.plan(join, asked)?;
            let (sink, monitor) = (Keep::default(), Monitor::new(CancelFlag::new()));
            let task = Arc::new(plan.task()?);
            let start = Instant::now();
            join::run(&task, device, self.catalog.arena(), &sink, &monitor)?;
            run.seconds += start.elapsed().as_secs_f64();
            run.bytes_in += self.catalog.table(&join.left)?.bytes + self.catalog.table(&join.right)?.bytes;
            let batches = sink.batches.into_inner();
            run.bytes_out += batches.iter().map(batch_bytes).sum::<u64>();
            run.plans.push(plan);
            merge(&mut run.phases, monitor.phases());
            match &join.into {
                Some(name) => self.put(name, batches)?,
                None => run.batches = batches,
            }
        }
        Ok(run)
    }

    fn plan(&self, join: &Join, asked: &PlanOverrides) -> Result<Plan> {
        let keys = join.on.iter().map(|(left, right)| KeyPair::new(left, right)).collect();
        let spec = JoinSpec {
            columns: join.columns.clone(),
            ..JoinSpec::inner(join.left.as_str(), join.right.as_str(), keys)
        };
        let mut bound = planner::bind(&spec, &self.catalog)?;
        bound.result_is_stored = !self.shares;
        planner::plan_with_overrides(bound, asked, &self.target)
    }
}

/// Adds the phases of a join to the phases of earlier joins.
fn merge(all: &mut Vec<PhaseRecord>, more: Vec<PhaseRecord>) {
    for phase in more {
        match all.iter_mut().find(|known| known.phase == phase.phase) {
            Some(known) => {
                known.seconds += phase.seconds;
                known.bytes += phase.bytes;
                known.kept_bytes += phase.kept_bytes;
                known.in_place_bytes += phase.in_place_bytes;
            }
            None => all.push(phase),
        }
    }
}
