//! Tests of jobs that fail, and of devices that are lost.

use super::*;

#[test]
fn a_job_that_fails_keeps_no_rows() {
    let stage = Stage::new(1);
    let job = stage.submit("r0");
    stage.next();
    stage.tell(0, |sink, _| {
        sink.push(batch(1000))?;
        Err(Error::Exhausted("no more memory".into()))
    });
    assert_eq!(stage.ended(&job), JobState::Failed(Error::Exhausted("no more memory".into())));
    stage.idle();
    assert_eq!(job.result.held_bytes(), 0);
    assert_eq!(stage.scheduler.stats().failed_total, 1);
}

#[test]
fn a_panic_fails_its_job_and_the_device_goes_on() {
    let stage = Stage::new(1);
    let (bad, good) = (stage.submit("r0"), stage.submit("r1"));
    stage.next();
    stage.tell(0, |_, _| panic!("this is a test's own panic"));
    let JobState::Failed(Error::Internal(message)) = stage.ended(&bad) else { panic!("{:?}", bad.status().state) };
    assert!(message.contains("a test's own panic") && message.contains("host:0"), "{message}");
    assert_eq!(stage.next().1, "r1");
    stage.finish(0);
    assert_eq!(stage.ended(&good), JobState::Complete);
}

#[test]
fn a_lost_device_is_taken_out_of_service_and_its_job_moves_to_another_device() {
    let stage = Stage::new(2);
    let job = stage.submit("r0");
    let (lost, _) = stage.next();
    stage.tell(lost, |_, _| Err(context_lost()));
    let (other, label) = stage.next();
    assert_eq!((other, label.as_str()), (1 - lost, "r0"));
    stage.finish(other);
    assert_eq!(stage.ended(&job), JobState::Complete);
    stage.idle();
    let stats = stage.scheduler.stats();
    let lost_devices: Vec<bool> = stats.devices.iter().map(|device| device.lost.is_some()).collect();
    assert_eq!(lost_devices, [lost == 0, lost == 1]);
    assert_eq!(job.status().devices[0].index, other);

    // When the other device is lost too, running and waiting jobs fail, and new ones are refused.
    let (running, waiting) = (stage.submit("r1"), stage.submit("r2"));
    assert_eq!(stage.next(), (other, "r1".into()));
    stage.tell(other, |_, _| Err(context_lost()));
    assert!(matches!(stage.ended(&running), JobState::Failed(Error::Unavailable(_))));
    assert!(matches!(stage.ended(&waiting), JobState::Failed(Error::Unavailable(_))));
    assert!(matches!(stage.submit_join(&spec("r3"), JobOptions::default(), ""), Err(Error::Unavailable(_))));
}

#[test]
fn a_transient_failure_is_retried_once_and_loses_no_device() {
    let busy = || Error::Unavailable("the device is busy; try again".into());
    let stage = Stage::new(1);
    let job = stage.submit("r0");
    for _ in 0..2 {
        assert_eq!(stage.next(), (0, "r0".into()));
        stage.tell(0, move |_, _| Err(busy()));
    }
    assert_eq!(stage.ended(&job), JobState::Failed(busy()));
    let patient = stage.submit("r1");
    stage.next();
    stage.tell(0, move |_, _| Err(busy()));
    assert_eq!(stage.next(), (0, "r1".into()));
    stage.finish(0);
    assert_eq!(stage.ended(&patient), JobState::Complete);
    assert!(stage.scheduler.stats().devices.iter().all(|device| device.lost.is_none()));
}

#[test]
fn a_job_that_delivered_rows_is_not_run_twice() {
    let stage = Stage::new(2);
    let job = stage.submit("r0");
    let (lost, _) = stage.next();
    stage.tell(lost, |sink, _| {
        sink.push(batch(10))?;
        Err(context_lost())
    });
    assert!(matches!(stage.ended(&job), JobState::Failed(Error::Unavailable(_))));
    stage.idle();
    stage.nothing_begins();
}

#[test]
fn the_progress_of_a_job_does_not_decrease_when_it_is_restarted_on_another_device() {
    let stage = Stage::new(2);
    let job = stage.submit("r0");
    let (lost, _) = stage.next();
    let progress = job.clone();
    // The job has reported 0.6 before its device is lost.
    let told = stage.ask(lost, move |_, monitor| {
        monitor.expect_work(10);
        monitor.advance(6);
        (progress.status().progress, Err(context_lost()))
    });
    assert_eq!(told, 0.6);
    let (other, _) = stage.next();
    assert_eq!(job.status().progress, 0.6);
    let progress = job.clone();
    let told = stage.ask(other, move |_, monitor| {
        monitor.expect_work(10);
        let mut told = Vec::new();
        for _ in 0..8 {
            monitor.advance(1);
            told.push(progress.status().progress);
        }
        (told, Ok(()))
    });
    assert_eq!(told, [0.6, 0.6, 0.6, 0.6, 0.6, 0.6, 0.7, 0.8]);
    assert_eq!(stage.ended(&job), JobState::Complete);
    assert_eq!(job.status().progress, 1.0);
}

#[test]
fn a_recovered_device_is_put_back_into_service() {
    let stage = Stage::new(1);
    let job = stage.submit("r0");
    stage.next();
    stage.tell(0, |_, _| Err(context_lost()));
    assert!(matches!(stage.ended(&job), JobState::Failed(Error::Unavailable(_))));
    stage.idle();
    stage.scheduler.tick(SystemTime::now());
    assert!(
        matches!(stage.submit_join(&spec("r1"), JobOptions::default(), ""), Err(Error::Unavailable(_))),
        "it is still lost"
    );
    stage.lost[0].store(false, Ordering::Relaxed);
    stage.scheduler.tick(SystemTime::now());
    assert!(stage.scheduler.stats().devices[0].lost.is_none());
    let job = stage.submit("r1");
    assert_eq!(stage.next(), (0, "r1".into()));
    stage.finish(0);
    assert_eq!(stage.ended(&job), JobState::Complete);
}

#[test]
fn a_job_that_has_lost_two_devices_is_not_given_a_third() {
    let stage = Stage::new(3);
    let job = stage.submit("r0");
    for _ in 0..2 {
        let (device, label) = stage.next();
        assert_eq!(label, "r0");
        stage.tell(device, |_, _| Err(context_lost()));
    }
    assert!(matches!(stage.ended(&job), JobState::Failed(Error::Unavailable(_))));
    stage.idle();
    stage.nothing_begins();
    assert_eq!(stage.scheduler.stats().devices.iter().filter(|device| device.lost.is_none()).count(), 1);
}
