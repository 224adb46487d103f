//! Tests of a scheduler whose caller runs the jobs.

use super::*;
use crate::engine::SimulatedDevice;
use crate::topology::{SharedLinks, Topology};

const MIB: u64 = 1 << 20;

struct Taking {
    scheduler: Scheduler,
    catalog: Catalog,
    devices: Vec<Arc<SimulatedDevice>>,
    clock: Arc<ManualClock>,
}

impl Taking {
    fn new() -> Self {
        let devices = SimulatedDevice::all_of(&Arc::new(SharedLinks::new(Topology::fixture("h200-x4"))), 1.0, MIB);
        let engines = devices.iter().map(|device| device.clone() as Arc<dyn Engine>).collect();
        let catalog = Catalog::new(Arena::new(Budget::new("host memory", "--host-memory", 64 * MIB)));
        for name in ["r", "s"] {
            catalog.create(table(name)).unwrap();
        }
        let clock = Arc::new(ManualClock::default());
        let options =
            SchedulerOptions { workers: false, publishers: 0, timer: false, history: 0, ..SchedulerOptions::default() };
        let scheduler = Scheduler::with_clock(catalog.clone(), engines, options, clock.clone());
        Self { scheduler, catalog, devices, clock }
    }

    fn submit(&self, label: &str, options: JobOptions) -> Arc<Job> {
        submit(&self.scheduler, &self.catalog, &spec(label), options, "").unwrap()
    }

    fn used(&self) -> u64 {
        let of_devices: u64 = self.devices.iter().map(|device| device.memory().used_bytes()).sum();
        of_devices + self.catalog.arena().budget().used_bytes()
    }
}

#[test]
fn a_job_has_its_devices_until_its_caller_ends_it() {
    let taking = Taking::new();
    let jobs = ["r0", "r1", "r2", "r3", "r4"].map(|label| taking.submit(label, on(&["host:1"])));
    let placed: Vec<PlacedJob> = std::iter::from_fn(|| taking.scheduler.take_placed()).collect();
    assert_eq!(
        placed.iter().map(|placed| placed.job().id).collect::<Vec<_>>(),
        jobs[..4].iter().map(|job| job.id).collect::<Vec<_>>()
    );
    assert!(placed.iter().all(|placed| !placed.is_alone() && placed.devices().eq([1])));
    taking.clock.advance(Duration::from_secs(8));
    let mut kept: Vec<KeptResult> = placed.into_iter().filter_map(|placed| placed.end(Ok(()), MIB)).collect();
    assert_eq!((kept.len(), jobs[0].status().state), (4, JobState::Complete));
    let busy = taking.scheduler.stats().devices[1].busy_seconds_total;
    assert!((busy - 8.0).abs() < 1e-9, "{busy} s");
    let last = taking.scheduler.take_placed().unwrap();
    assert_eq!(last.job().id, jobs[4].id);
    assert!(last.end(Err(Error::Internal("a failure".into())), MIB).is_none());
    assert!(matches!(jobs[4].status().state, JobState::Failed(_)));
    assert_eq!(kept.iter().map(KeptResult::bytes).sum::<u64>(), taking.used());
    kept.drain(..).for_each(KeptResult::release);
    assert_eq!((taking.used(), taking.scheduler.jobs().len()), (0, 1), "the failed job is remembered");
}

#[test]
fn a_job_of_a_lost_device_is_taken_again_elsewhere() {
    let taking = Taking::new();
    let job = taking.submit("r0", JobOptions::default());
    let placed = taking.scheduler.take_placed().unwrap();
    let first = placed.devices().next().unwrap();
    taking.devices[first].set_lost(true);
    assert!(placed.end(Err(Error::Unavailable("lost".into())), MIB).is_none());
    let again = taking.scheduler.take_placed().unwrap();
    assert_eq!((again.job().id, again.devices().any(|device| device == first)), (job.id, false));
    let kept = again.end(Ok(()), MIB).unwrap();
    assert_eq!(job.status().state, JobState::Complete);
    kept.release();
    assert_eq!(taking.used(), 0);
}

#[test]
fn a_result_that_is_larger_than_free_memory_fails_its_job() {
    let taking = Taking::new();
    let job = taking.submit("r0", JobOptions::default());
    let placed = taking.scheduler.take_placed().unwrap();
    assert!(placed.end(Ok(()), 65 * MIB).is_none());
    let JobState::Failed(error) = job.status().state else { panic!("65 MiB fit into 64 MiB") };
    assert!(matches!(&error, Error::Exhausted(text) if text.contains("65.0 MiB")), "{error}");
    assert_eq!(taking.used(), 0);
}
