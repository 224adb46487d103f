//! Tests of turns: when and where jobs run, and what is refused before.

use super::*;
use crate::planner::Strategy;

#[test]
fn a_device_runs_one_job_at_a_time_and_the_next_one_follows() {
    let stage = Stage::new(1);
    let (first, second) = (stage.submit("r0"), stage.submit("r1"));
    assert_eq!(stage.next(), (0, "r0".into()));
    stage.nothing_begins();
    assert_eq!(second.status().state, JobState::Queued);
    assert_eq!(second.status().queue_position, Some(0));
    assert!(second.status().predicted_start.is_some());
    stage.finish(0);
    assert_eq!(stage.ended(&first), JobState::Complete);
    assert_eq!(stage.next(), (0, "r1".into()));
    assert_eq!(second.status().queue_position, None);
    stage.finish(0);
    stage.idle();
    let stats = stage.scheduler.stats();
    assert_eq!((stats.queued, stats.running, stats.completed_total), (0, 0, 2));
    assert_eq!(stage.scheduler.jobs().len(), 2);
}

#[test]
fn as_many_jobs_run_at_once_as_there_are_devices() {
    let stage = Stage::new(3);
    let jobs: Vec<_> = ["r0", "r1", "r2", "r3"].map(|label| stage.submit(label)).into();
    let mut devices: Vec<u16> = (0..3).map(|_| stage.next().0).collect();
    devices.sort_unstable();
    assert_eq!(devices, [0, 1, 2]);
    stage.nothing_begins();
    stage.finish(1);
    assert_eq!(stage.next(), (1, "r3".into()));
    for device in 0..3 {
        stage.finish(device);
    }
    assert!(jobs.iter().all(|job| stage.ended(job) == JobState::Complete));
}

#[test]
fn priorities_and_positions_show_in_the_queue() {
    let stage = Stage::new(1);
    stage.submit("r0");
    stage.next();
    let low = stage.submit_join(&spec("r1"), JobOptions { priority: -10, ..JobOptions::default() }, "").unwrap();
    let high = stage.submit_join(&spec("r2"), JobOptions { priority: 10, ..JobOptions::default() }, "").unwrap();
    assert_eq!((high.status().queue_position, low.status().queue_position), (Some(0), Some(1)));
    assert!(high.status().predicted_start <= low.status().predicted_start);
    stage.finish(0);
    assert_eq!(stage.next().1, "r2");
    stage.finish(0);
    assert_eq!(stage.next().1, "r1");
    stage.finish(0);
    stage.idle();
}

#[test]
fn jobs_that_cannot_start_are_placed_when_their_status_is_asked() {
    let stage = Stage::new(2);
    let running: Vec<_> = ["r0", "r1"].map(|label| stage.submit(label)).into();
    running.iter().for_each(|_| _ = stage.next());
    let waiting: Vec<_> = (0..50).map(|_| stage.submit("r2")).collect();
    let placed = || waiting.iter().filter(|job| job.life.lock().forecast.is_some()).count();
    assert_eq!(placed(), 0, "both devices are busy, so no event has to look at a waiting job");
    let positions: Vec<_> = waiting.iter().map(|job| job.status().queue_position).collect();
    assert_eq!(positions, (0..50).map(Some).collect::<Vec<_>>());
    assert!(waiting.is_sorted_by_key(|job| job.status().predicted_start));
    assert!(waiting[49].status().waiting_for.is_some_and(|device| device.starts_with("host:")));
    // The device is given to the first in line, and the forecasts of the others follow.
    stage.finish(1);
    stage.next();
    assert_eq!((waiting[0].state(), waiting[1].status().queue_position), (JobState::Running, Some(0)));
    assert!(stage.scheduler.handle.shared.state.lock().devices.iter().all(|device_state| {
        device_state.running.iter().all(|running| running.job.is_device_wanted.load(Ordering::Relaxed))
    }));
}

#[test]
fn many_jobs_of_one_tenant_do_not_delay_another_tenant() {
    let stage = Stage::new(1);
    for label in ["r0", "r1", "r2", "r3"] {
        stage.submit_join(&spec(label), JobOptions::default(), "flood").unwrap();
    }
    stage.submit_join(&spec("r9"), JobOptions::default(), "calm").unwrap();
    let order: Vec<String> = (0..5)
        .map(|_| {
            let (device, label) = stage.next();
            stage.clock.advance(Duration::from_secs(1));
            stage.finish(device);
            label
        })
        .collect();
    assert_eq!(order[..2], ["r0", "r9"], "{order:?}");
}

#[test]
fn a_job_starts_when_its_memory_is_free_and_not_before() {
    let stage = Stage::new(1);
    let held = stage.memory[0].reserve(1 << 20, "a test").unwrap();
    let job = stage.submit("r0");
    assert_eq!(job.status().state, JobState::Queued);
    assert_eq!(job.status().queue_position, Some(0));
    stage.nothing_begins();
    drop(held);
    stage.scheduler.tick(SystemTime::now());
    stage.next();
    stage.finish(0);
    assert_eq!(stage.ended(&job), JobState::Complete);
}

#[test]
fn devices_are_requested_by_name() {
    let stage = Stage::new(3);
    let submit = |options: JobOptions| stage.submit_join(&spec("r0"), options, "");
    submit(on(&["host:2"])).unwrap();
    assert_eq!(stage.next().0, 2);
    let second = submit(on(&["host:2"])).unwrap();
    assert_eq!(second.status().state, JobState::Queued);
    let any = submit(JobOptions::default()).unwrap();
    assert_eq!(stage.next().0, 0);
    assert!(any.explanation().device.reason.contains("of the 3"), "{:?}", any.explanation().device);
    let refusal = |options: JobOptions| submit(options).unwrap_err();
    let unknown = refusal(on(&["host:7"]));
    assert!(matches!(&unknown, Error::Invalid(text) if text.contains("host:0, host:1, host:2")), "{unknown}");
    assert!(matches!(refusal(on(&[])), Error::Invalid(_)));
    let count = |count| JobOptions { devices: DeviceRequest::Count(count), ..JobOptions::default() };
    assert!(matches!(refusal(count(0)), Error::Invalid(_)));
    assert!(matches!(refusal(count(4)), Error::Invalid(_)));
    assert_eq!(stage.scheduler.stats().refused_total, 4);
    for device in [0, 2, 2] {
        stage.finish(device);
    }
    stage.idle();
}

#[test]
fn jobs_over_a_limit_are_refused_and_leave_no_trace() {
    let options = SchedulerOptions { queue_limit: 2, tenant_jobs: 2, ..SchedulerOptions::default() };
    let stage = Stage::with(1, options);
    let submit = |owner: &str| {
        stage.submit_join(&spec("r0"), JobOptions { into: Some(format!("t{owner}")), ..JobOptions::default() }, owner)
    };
    stage.submit("r0");
    stage.next();
    stage.submit("r1");
    let refusal = stage.submit_join(&spec("r2"), JobOptions::default(), "").unwrap_err();
    assert!(matches!(&refusal, Error::Exhausted(text) if text.contains("--tenant-jobs")), "{refusal}");
    // The same is known before the join is bound.
    assert_eq!(stage.scheduler.check_room(""), Err(refusal));
    assert_eq!(stage.scheduler.check_room("a"), Ok(()));
    let queued = submit("a").unwrap();
    let refusal = submit("b").unwrap_err();
    assert!(matches!(&refusal, Error::Exhausted(text) if text.contains("--queue-limit")), "{refusal}");
    assert_eq!(stage.scheduler.check_room("b"), Err(refusal));
    assert_eq!(stage.scheduler.jobs().len(), 3);
    // The refused job's name is free. The waiting job's name is taken until that job is cancelled.
    assert!(stage.catalog.reserve("tb", "", "a test").is_ok());
    assert!(matches!(stage.catalog.reserve("ta", "", "a test"), Err(Error::AlreadyExists(_))));
    stage.scheduler.cancel(queued.id).unwrap();
    assert!(stage.catalog.reserve("ta", "", "a test").is_ok());
    stage.finish(0);
    stage.next();
    stage.finish(0);
    stage.idle();
}

#[test]
fn a_request_that_cannot_be_planned_is_refused_before_it_is_queued() {
    let stage = Stage::new(1);
    let refusal = |spec: JoinSpec| stage.submit_join(&spec, JobOptions::default(), "").unwrap_err();
    assert!(matches!(refusal(JoinSpec { left: "nowhere".into(), ..spec("r0") }), Error::NotFound(_)));
    assert!(matches!(refusal(JoinSpec { columns: vec!["nothing".into()], ..spec("r0") }), Error::Invalid(_)));
    stage.catalog.create(rows_of("large", 400_000)).unwrap();
    let too_large = JoinSpec::inner("large", "large", vec![KeyPair::new("k", "k")]);
    let hashed = JobOptions { strategy: Some(Strategy::Hash), ..JobOptions::default() };
    let refused = stage.submit_join(&too_large, hashed, "").map(|job| job.id).unwrap_err();
    assert!(matches!(&refused, Error::Exhausted(text) if text.contains("--device-memory")), "{refused}");
    assert!(stage.scheduler.jobs().is_empty());
    assert!(matches!(stage.scheduler.set_weight("a", 0.0), Err(Error::Invalid(_))));
    assert!(stage.scheduler.set_weight("a", 2.0).is_ok());
}
