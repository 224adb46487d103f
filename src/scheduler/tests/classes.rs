//! Tests of plans for classes of devices: equal devices share one.

use super::*;

fn host(index: u16) -> DeviceId {
    DeviceId { kind: DeviceKind::Host, index }
}

/// Returns the number of plans that were made for a job.
fn plan_count(job: &Job) -> usize {
    job.life.lock().plans.len()
}

#[test]
fn equal_devices_share_one_plan_and_each_is_named_by_what_it_runs() {
    let stage = Stage::new(8);
    let jobs: Vec<Arc<Job>> = (0..8).map(|at| stage.submit(&format!("r{at}"))).collect();
    jobs.iter().for_each(|_| _ = stage.next());
    for (at, job) in jobs.iter().enumerate() {
        assert_eq!(plan_count(job), 1);
        assert_eq!(job.explanation().device.name, format!("host:{at}"));
        assert!(job.explanation().device.reason.contains("of the 8 that may run it"));
    }
    let explained = stage.explain(&spec("r0"), &JobOptions::default()).device;
    assert!(explained.name == "host:0" && explained.reason.contains("fastest, of 8"), "{explained:?}");
    (0..8).for_each(|device| stage.finish(device));
    stage.idle();
}

#[test]
fn an_alternative_that_does_not_fit_is_explained_with_the_device_that_runs_the_job() {
    let stage = Stage::new(2);
    stage.catalog.create(rows_of("large", 400_000)).unwrap();
    let spec = JoinSpec::inner("r", "large", vec![KeyPair::new("k", "k")]);
    let jobs = [(); 2].map(|()| stage.submit_join(&spec, JobOptions::default(), "").unwrap());
    jobs.iter().for_each(|_| _ = stage.next());
    for (job, (own, other)) in jobs.iter().zip([("host:0", "host:1"), ("host:1", "host:0")]) {
        assert_eq!(plan_count(job), 1);
        let reasons: Vec<String> = job.explanation().alternatives.into_iter().map(|lost| lost.reason).collect();
        let has_not_room = format!("and {own} has 1.0 MiB");
        assert!(reasons.iter().any(|reason| reason.ends_with(&has_not_room)), "{reasons:?}");
        assert!(!reasons.iter().any(|reason| reason.contains(other)), "{reasons:?}");
    }
    (0..2).for_each(|device| stage.finish(device));
    stage.idle();
}

#[test]
fn a_device_of_other_memory_or_rates_has_a_plan_of_its_own() {
    let usual = Rates::host(1);
    let slower = Rates { probe_rows: usual.probe_rows / 2.0, ..usual.clone() };
    let devices = [(1 << 20, usual.clone()), (2 << 20, usual.clone()), (1 << 20, usual), (1 << 20, slower)];
    let devices = (0..).zip(devices).map(|(index, (memory_bytes, rates))| (host(index), memory_bytes, rates)).collect();
    let stage = Stage::of_sizes(devices, 1, SchedulerOptions::default());
    let job = stage.submit("r0");
    assert_eq!(plan_count(&job), 3);
    stage.next();
    stage.finish(0);
    // A gang is planned for its device with the least memory.
    let two = JobOptions { devices: DeviceRequest::Count(2), ..JobOptions::default() };
    let gang = stage.submit_join(&spec("r1"), two, "").unwrap();
    assert_eq!(plan_count(&gang), 2);
    let (devices, _) = stage.next_gang(2);
    devices.into_iter().for_each(|device| stage.finish(device));
    stage.idle();
}

#[test]
fn a_device_with_cached_columns_has_a_plan_of_its_own() {
    let stage = Stage::new(4);
    let plans_made = |label| {
        let job = stage.submit(label);
        let made = plan_count(&job);
        let (device, _) = stage.next();
        stage.finish(device);
        assert_eq!(stage.ended(&job), JobState::Complete);
        stage.idle();
        made
    };
    assert_eq!(plans_made("r0"), 1);
    *stage.cached[1].lock() = 0..2;
    assert_eq!(plans_made("r1"), 2);
    *stage.cached[2].lock() = 0..2;
    assert_eq!(plans_made("r2"), 3, "two devices may have cached different rows");
}

#[test]
fn a_set_has_cached_what_all_its_devices_have() {
    let stage = Stage::new(4);
    let two = || JobOptions { devices: DeviceRequest::Count(2), ..JobOptions::default() };
    let plans_made = |label| {
        let job = stage.submit_join(&spec(label), two(), "").unwrap();
        let made = plan_count(&job);
        let (devices, _) = stage.next_gang(2);
        devices.into_iter().for_each(|device| stage.finish(device));
        assert_eq!(stage.ended(&job), JobState::Complete);
        stage.idle();
        made
    };
    *stage.cached[0].lock() = 0..2;
    assert_eq!(plans_made("r0"), 1, "another device of each set copies these rows");
    *stage.cached[1].lock() = 2..3;
    assert_eq!(plans_made("r1"), 1, "no row is cached on two devices");
    *stage.cached[3].lock() = 1..3;
    assert_eq!(plans_made("r2"), 3, "of 0 and 3, of 1 and 3, and of all other sets");
}
