//! Tests of two kinds of devices: one is quick with much work, the other with little.

use super::*;

/// Device 0 is a GPU whose calls take long, even with little work. Device 1 is a CPU whose rows
/// take long.
fn stage() -> Stage {
    const CALL: f64 = 3e-4;
    const ROWS: f64 = 5e5;
    let gpu = Rates {
        call_seconds: CALL,
        partition_call_seconds: CALL,
        sort_call_seconds: [CALL; 3],
        build_repeated_call_seconds: [CALL; 3],
        ..Rates::host(64)
    };
    let cpu = Rates { build_repeated_rows: [ROWS; 3], probe_rows: ROWS, dense_rows: ROWS, ..Rates::host(1) };
    let id = |kind| DeviceId { kind, index: 0 };
    let devices = vec![(id(DeviceKind::Cuda), gpu), (id(DeviceKind::Host), cpu)];
    let stage = Stage::of(devices, 1, SchedulerOptions::default());
    stage.catalog.create(rows_of("large", 160_000)).unwrap();
    stage
}

/// Join of many rows.
fn large(label: &str) -> JoinSpec {
    JoinSpec { columns: vec!["k".into(), label.into()], ..JoinSpec::inner("r", "large", vec![KeyPair::new("k", "k")]) }
}

#[test]
fn each_job_is_placed_on_the_device_that_runs_it_fastest() {
    let stage = stage();
    let told = |spec: JoinSpec, options: JobOptions| {
        let explanation = stage.explain(&spec, &options);
        (explanation.device.name, explanation.device.reason)
    };
    let reason = "predicted to run it fastest, of 2; when it is submitted, queues count as well";
    assert_eq!(told(spec("r0"), JobOptions::default()), ("host:0".into(), reason.into()));
    assert_eq!(told(large("large0"), JobOptions::default()), ("cuda:0".into(), reason.into()));
    assert_eq!(told(spec("r0"), on(&["cuda:0"])).0, "cuda:0");

    let jobs = [stage.submit("r0"), stage.submit_join(&large("large0"), JobOptions::default(), "").unwrap()];
    let mut begun = [stage.next(), stage.next()];
    begun.sort();
    assert_eq!(begun, [(0, "large0".to_string()), (1, "r0".to_string())]);
    for (job, device) in jobs.iter().zip(["host:0", "cuda:0"]) {
        assert_eq!(job.planned().target.name, device, "it runs by the plan for its device");
        assert_eq!(job.status().devices[0].to_string(), device);
    }
    stage.finish(0);
    stage.finish(1);
    stage.idle();
}

#[test]
fn plans_for_a_device_use_its_own_rates() {
    let stage = stage();
    let seconds = |device: &str| {
        let job = stage.submit_join(&spec("r0"), on(&[device]), "").unwrap();
        let at = stage.next().0;
        stage.finish(at);
        stage.ended(&job);
        job.planned().seconds
    };
    let (gpu, cpu) = (seconds("cuda:0"), seconds("host:0"));
    assert!(gpu > cpu, "{gpu} s, {cpu} s");
    // A job that may run on both devices has both plans.
    stage.devices_are_free();
    let job = stage.submit("r0");
    assert_eq!(stage.next().0, 1);
    assert_eq!(job.planned().seconds, cpu);
    stage.tell(1, |_, _| Err(context_lost()));
    assert_eq!(stage.next().0, 0);
    assert_eq!((job.planned().seconds, job.planned().target.name.as_str()), (gpu, "cuda:0"));
    stage.finish(0);
    assert_eq!(stage.ended(&job), JobState::Complete);
}

#[test]
fn jobs_of_a_lost_gpu_that_delivered_nothing_move_to_the_cpu() {
    let stage = stage();
    let jobs = ["large0", "large1"].map(|label| stage.submit_join(&large(label), JobOptions::default(), "").unwrap());
    assert_eq!(stage.next(), (0, "large0".into()));
    assert_eq!(jobs[1].status().waiting_for.as_deref(), Some("cuda:0"), "waiting for the GPU is faster than the CPU");
    let only_there = stage.submit_join(&spec("r0"), on(&["cuda:0"]), "").unwrap();
    stage.tell(0, |_, _| Err(context_lost()));
    for job in &jobs {
        assert_eq!(stage.next().0, 1);
        stage.finish(1);
        assert_eq!(stage.ended(job), JobState::Complete);
        assert_eq!(job.planned().target.name, "host:0");
    }
    assert!(matches!(stage.ended(&only_there), JobState::Failed(Error::Unavailable(_))));
    let refused = stage.submit_join(&spec("r1"), on(&["cuda:0"]), "").unwrap_err();
    assert!(matches!(refused, Error::Unavailable(_)), "{refused}");
    let lost: Vec<bool> = stage.scheduler.stats().devices.iter().map(|device| device.lost.is_some()).collect();
    assert_eq!(lost, [true, false]);
    // A later job is planned for the devices that are left.
    let explanation = stage.explain(&large("large2"), &JobOptions::default());
    assert_eq!(explanation.device.name, "host:0");
    assert_eq!(explanation.device.reason, "the only device that may run it");
    stage.idle();
}
