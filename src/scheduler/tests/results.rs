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

/// Options of a join whose result becomes the table `kept`.
fn into_kept() -> JobOptions {
    JobOptions { into: Some("kept".into()), ..JobOptions::default() }
}

/// Creates one device, and tables of results appear only when the test calls `publish`.
fn without_publishers(options: SchedulerOptions) -> Stage {
    Stage::with(1, SchedulerOptions { publishers: 0, ..options })
}

/// Runs a join into the table `kept`, up to its last row.
fn written(stage: &Stage) -> Arc<Job> {
    let job = stage.submit_join(&spec("r0"), into_kept(), "me").unwrap();
    stage.next();
    stage.tell(0, |sink, _| sink.push(batch(7)));
    crate::testing::wait_until("the device to be free", || stage.scheduler.stats().devices[0].running == 0);
    job
}

#[test]
fn a_device_is_free_while_a_result_becomes_a_table() {
    let stage = without_publishers(SchedulerOptions::default());
    let first = written(&stage);
    stage.clock.advance(Duration::from_secs(5));
    let second = stage.submit("r1");
    assert_eq!(stage.next(), (0, "r1".into()), "the device waits for statistics");
    let stats = stage.scheduler.stats();
    assert_eq!((stats.running, stats.devices[0].running, stats.completed_total), (2, 1, 0));
    assert_eq!(stats.devices[0].busy_seconds_total, 0.0, "statistics count as device time");
    stage.finish(0);
    assert_eq!(stage.ended(&second), JobState::Complete);
    assert_eq!((first.status().state, first.result.progress().1), (JobState::Running, SpoolState::Open));
    assert!(stage.catalog.table("kept").is_err());
    assert!(!stage.scheduler.wait_idle(Duration::ZERO), "a draining server would not wait for the table");
    stage.scheduler.publish();
    assert_eq!((first.status().state, first.result.progress().1), (JobState::Complete, SpoolState::Complete));
    assert_eq!(stage.catalog.table("kept").unwrap().rows, 7);
    stage.idle();
    assert_eq!((stage.scheduler.stats().running, stage.scheduler.stats().completed_total), (0, 2));
}

#[test]
fn a_job_that_is_stopped_before_its_table_appears_leaves_none() {
    let stage = without_publishers(SchedulerOptions::default());
    let used = stage.catalog.arena().budget().used_bytes();
    let job = written(&stage);
    assert!(stage.catalog.arena().budget().used_bytes() > used);
    stage.scheduler.cancel(job.id).unwrap();
    // Readers need not wait for statistics that are stopped.
    assert!(matches!(job.result.progress().1, SpoolState::Failed(Error::Cancelled(_))));
    stage.scheduler.publish();
    assert_eq!(job.status().state, JobState::Cancelled);
    assert!(stage.catalog.reserve("kept", "", "a test").is_ok(), "the name is taken");
    assert_eq!(stage.catalog.arena().budget().used_bytes(), used);
    assert_eq!(stage.catalog.usage("me").bytes, 0);
    let stats = stage.scheduler.stats();
    assert_eq!((stats.running, stats.cancelled_total, stats.completed_total), (0, 1, 0));
}

#[test]
fn a_job_whose_result_becomes_a_table_counts_for_its_tenant() {
    let stage = without_publishers(SchedulerOptions { tenant_jobs: 1, ..SchedulerOptions::default() });
    let job = written(&stage);
    let refusal = stage.submit_join(&spec("r1"), JobOptions::default(), "me").unwrap_err();
    assert!(matches!(&refusal, Error::Exhausted(text) if text.contains("--tenant-jobs")), "{refusal}");
    stage.scheduler.cancel(job.id).unwrap();
    assert_eq!(stage.scheduler.check_room("me"), Ok(()), "a stopped job counts");
    stage.scheduler.publish();
    assert_eq!(stage.scheduler.check_room("me"), Ok(()));
}

#[test]
fn a_scheduler_that_ends_ends_jobs_whose_result_becomes_a_table() {
    for delay in 0..20 {
        let stage = Stage::new(1);
        let job = stage.submit_join(&spec("r0"), into_kept(), "").unwrap();
        stage.next();
        stage.ask(0, |sink, _| (sink.push(batch(5000)), Ok(()))).unwrap();
        // The end comes anywhere between before and after the table.
        (0..delay * 1000).for_each(|_| std::hint::spin_loop());
        let Stage { scheduler, catalog, .. } = stage;
        drop(scheduler);
        let state = job.status().state;
        assert!(matches!(state, JobState::Complete | JobState::Cancelled), "{state:?}");
        assert_eq!(catalog.table("kept").is_ok(), state == JobState::Complete);
    }
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
