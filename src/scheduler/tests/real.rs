//! Tests with real devices and real joins.

use super::*;
use crate::device::host::{EmulatedLink, HostDevice};
use crate::device::{Device, Phase};
use crate::engine::InProcess;
use crate::planner::{Explanation, Strategy};

/// Creates a scheduler over devices of this process, and measures their rates.
fn schedule_on(catalog: &Catalog, devices: Vec<Arc<dyn Device>>, options: SchedulerOptions) -> Scheduler {
    schedule_by(catalog, devices, options, Arc::new(SystemClock::default()))
}

fn schedule_by(
    catalog: &Catalog,
    devices: Vec<Arc<dyn Device>>,
    options: SchedulerOptions,
    clock: Arc<dyn Clock>,
) -> Scheduler {
    let measured = |device| {
        let mut engine = InProcess::new(device, catalog.arena().clone());
        let values = engine.measure_rates(&|_| ()).expect("the device has memory to measure its rates");
        engine.set_rates(DeviceRates::measured_now(values));
        Arc::new(engine) as Arc<dyn Engine>
    };
    Scheduler::with_clock(catalog.clone(), devices.into_iter().map(measured).collect(), options, clock)
}

fn start(devices: u16) -> (Scheduler, Vec<Budget>, Catalog) {
    start_with(devices, SchedulerOptions::default())
}

pub(super) fn start_with(devices: u16, options: SchedulerOptions) -> (Scheduler, Vec<Budget>, Catalog) {
    start_by(devices, options, Arc::new(SystemClock::default()))
}

pub(super) fn start_by(
    devices: u16,
    options: SchedulerOptions,
    clock: Arc<dyn Clock>,
) -> (Scheduler, Vec<Budget>, Catalog) {
    let catalog = Catalog::new(Arena::new(Budget::new("host memory", "--host-memory", 64 << 20)));
    for name in ["r", "s"] {
        catalog.create(table(name)).unwrap();
    }
    let budgets: Vec<Budget> =
        (0..devices).map(|at| Budget::new(format!("memory of host:{at}"), "--device-memory", 16 << 20)).collect();
    let device = |(index, budget): (usize, &Budget)| -> Arc<dyn Device> {
        Arc::new(HostDevice::new(index as u16, 1, budget.clone(), None).unwrap())
    };
    let devices = budgets.iter().enumerate().map(device).collect();
    (schedule_by(&catalog, devices, options, clock), budgets, catalog)
}

fn by(strategy: Strategy) -> JobOptions {
    JobOptions { strategy: Some(strategy), ..JobOptions::default() }
}

#[test]
fn every_strategy_runs_with_the_predicted_phases() {
    let (scheduler, budgets, catalog) = start(1);
    for strategy in Strategy::ALL {
        let spec = JoinSpec { columns: Vec::new(), ..spec("r0") };
        let job = submit(&scheduler, &catalog, &spec, by(strategy), "").unwrap();
        assert!(scheduler.wait_idle(PATIENCE));
        let status = job.status();
        assert_eq!((status.state, status.rows), (JobState::Complete, 100), "{strategy}");
        let explanation: Explanation = job.explanation();
        for phase in &explanation.phases {
            let predicted = phase.predicted_seconds.is_some();
            assert!(predicted, "{strategy}: phase {:?} ran and was not predicted:\n{explanation}", phase.phase);
        }
        assert_eq!(budgets[0].used_bytes(), 0, "{strategy} keeps device memory");
        println!("{explanation}");
    }
}

#[test]
fn many_jobs_on_many_devices_all_complete_and_return_all_memory() {
    let (scheduler, budgets, catalog) = start(4);
    let empty = catalog.arena().budget().used_bytes();
    let submit = |at: usize| {
        let strategy = Strategy::ALL[at % Strategy::ALL.len()];
        let spec = JoinSpec { how: JoinKind::ALL[at % 8], columns: Vec::new(), ..spec("r0") };
        submit(&scheduler, &catalog, &spec, by(strategy), ["a", "b", "c"][at % 3]).unwrap()
    };
    let jobs: Vec<Arc<Job>> = (0..120).map(submit).collect();
    assert!(scheduler.wait_idle(PATIENCE));
    for job in &jobs {
        let rows = if job.plan.join.how.is_anti() { 0 } else { 100 };
        assert_eq!((job.status().state, job.status().rows), (JobState::Complete, rows));
        scheduler.cancel(job.id).unwrap();
    }
    drop(jobs);
    assert_eq!(catalog.arena().budget().used_bytes(), empty, "results that were released take memory");
    assert!(budgets.iter().all(|budget| budget.used_bytes() == 0));
    assert_eq!(scheduler.stats().completed_total, 120);
}

#[test]
fn a_join_of_cached_columns_is_planned_without_copying_them() {
    let catalog = Catalog::new(Arena::new(Budget::new("host memory", "--host-memory", 64 << 20)));
    for name in ["r", "s"] {
        catalog.create(table(name)).unwrap();
    }
    let memory = Budget::new("memory of host:0", "--device-memory", 16 << 20);
    let link = EmulatedLink { to_device_bytes_per_second: 1e9, from_device_bytes_per_second: 1e9 };
    let device = HostDevice::new(0, 1, memory, Some(link)).unwrap();
    device.cache().unwrap().enable_cache(1 << 20).unwrap();
    let scheduler = schedule_on(&catalog, vec![Arc::new(device)], SchedulerOptions::default());
    let bytes = |explanation: Explanation, phase: Phase| {
        let phase = explanation.phases.iter().find(|found| found.phase == phase);
        phase.and_then(|phase| phase.predicted_bytes).unwrap_or(0)
    };
    let spec = JoinSpec { columns: Vec::new(), ..spec("r0") };
    let first = explain(&scheduler, &catalog, &spec, &by(Strategy::Hash));
    let job = submit(&scheduler, &catalog, &spec, by(Strategy::Hash), "").unwrap();
    assert!(scheduler.wait_idle(PATIENCE));
    assert_eq!(job.status().state, JobState::Complete);
    let second = explain(&scheduler, &catalog, &spec, &by(Strategy::Hash));
    assert!(bytes(first, Phase::CopyIn) > 0);
    assert_eq!(bytes(second, Phase::CopyIn), 0);
}
