//! Tests of complete jobs: their result, a table, their status.

use super::*;
use crate::device::Phase;

#[test]
fn a_result_becomes_a_table_before_readers_see_its_end() {
    let stage = Stage::new(1);
    let job = stage
        .submit_join(&spec("r0"), JobOptions { into: Some("kept".into()), ..JobOptions::default() }, "me")
        .unwrap();
    stage.next();
    stage.tell(0, |sink, _| sink.push(batch(7)));
    crate::testing::wait_until("the result to be complete", || matches!(job.result.progress().1, SpoolState::Complete));
    let table = stage.catalog.table("kept").unwrap();
    assert_eq!((table.rows, table.owner.as_str()), (7, "me"));
    stage.idle();
    let refusal = stage
        .submit_join(&spec("r0"), JobOptions { into: Some("kept".into()), ..JobOptions::default() }, "me")
        .unwrap_err();
    assert!(matches!(refusal, Error::AlreadyExists(_)), "{refusal}");
    // A job that fails leaves no table, and the name is free.
    let job = stage
        .submit_join(&spec("r0"), JobOptions { into: Some("other".into()), ..JobOptions::default() }, "me")
        .unwrap();
    stage.next();
    stage.tell(0, |_, _| Err(Error::Internal("a test".into())));
    assert!(matches!(stage.ended(&job), JobState::Failed(_)));
    stage.idle();
    assert!(stage.catalog.reserve("other", "", "a test").is_ok());
}

#[test]
fn a_result_is_released_when_its_lease_ends_and_then_remembered() {
    let stage = Stage::with(1, SchedulerOptions { history: 2, ..SchedulerOptions::default() });
    let mut jobs = Vec::new();
    for _ in 0..3 {
        let job = stage
            .submit_join(&spec("r0"), JobOptions { retain_seconds: Some(60), ..JobOptions::default() }, "")
            .unwrap();
        stage.next();
        stage.tell(0, |sink, _| sink.push(batch(5)));
        stage.idle();
        jobs.push(job);
    }
    stage.scheduler.tick(SystemTime::now() + Duration::from_secs(50));
    assert_eq!(stage.scheduler.jobs().len(), 3);
    stage.scheduler.tick(SystemTime::now() + Duration::from_secs(61));
    assert!(stage.scheduler.jobs().is_empty());
    assert!(jobs.iter().all(|job| job.result.held_bytes() == 0));
    assert_eq!(stage.scheduler.history().len(), 2);
    assert!(matches!(stage.scheduler.job(jobs[0].id), Err(Error::NotFound(_))));
    assert_eq!(stage.scheduler.job(jobs[2].id).unwrap().status().rows, 5);
}

#[test]
fn a_finished_job_keeps_no_table_alive() {
    let stage = Stage::new(1);
    let job = stage.submit("r0");
    let table = stage.catalog.drop_table("r", &Editor::admin("")).unwrap();
    stage.next();
    assert!(Arc::strong_count(&table) > 1);
    stage.finish(0);
    stage.idle();
    assert_eq!(Arc::strong_count(&table), 1);
    assert_eq!(job.plan.join.left.rows, 100);
}

#[test]
fn a_running_jobs_explanation_has_the_phases_that_ran() {
    let stage = Stage::new(1);
    let job = stage.submit("r0");
    let before = stage.explain(&spec("r0"), &JobOptions::default());
    assert_eq!(before.measured_seconds, None);
    stage.next();
    stage.tell(0, |sink, monitor| {
        monitor.expect_work(10);
        monitor.phase(Phase::Match, 42, || sink.push(batch(3)))?;
        monitor.advance(10);
        Ok(())
    });
    stage.idle();
    let after = stage.scheduler.job(job.id).unwrap().explanation();
    let matched = after.phases.iter().find(|phase| phase.phase == Phase::Match).unwrap();
    assert_eq!(matched.measured_bytes, Some(42));
    assert!(matched.predicted_bytes.is_some() && matched.measured_seconds.is_some());
    assert_eq!((after.device.name.as_str(), after.result.rows), ("host:0", Some(3)));
    assert_eq!(after.strategy, before.strategy);
}
