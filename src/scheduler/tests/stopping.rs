//! Tests of jobs that are stopped by a client, the clock, or the server's end.

use super::*;

#[test]
fn a_queued_job_is_cancelled_at_once() {
    let stage = Stage::new(1);
    stage.submit("r0");
    stage.next();
    let waiting = stage.submit("r1");
    stage.scheduler.cancel(waiting.id).unwrap();
    assert_eq!(waiting.status().state, JobState::Cancelled);
    assert!(matches!(waiting.result.progress().1, SpoolState::Failed(Error::Cancelled(_))));
    stage.finish(0);
    stage.idle();
    stage.nothing_begins();
    assert_eq!(stage.scheduler.stats().cancelled_total, 1);
}

#[test]
fn cancelling_a_running_job_stops_it_and_ends_its_readers_at_once() {
    let stage = Stage::new(1);
    let job = stage.submit("r0");
    stage.next();
    stage.scheduler.cancel(job.id).unwrap();
    // The device has not noticed yet.
    assert!(matches!(job.result.progress().1, SpoolState::Failed(Error::Cancelled(_))));
    assert!(matches!(job.status().state, JobState::Running));
    let (is_raised, pushed) =
        stage.ask(0, |sink, monitor| ((monitor.cancel().is_raised(), sink.push(batch(1))), monitor.cancel().check()));
    assert!(is_raised, "the device was not told");
    assert!(matches!(pushed, Err(Error::Cancelled(_))), "a stopped job can still push: {pushed:?}");
    assert_eq!(stage.ended(&job), JobState::Cancelled);
    // A stopped job stays stopped, even if its device then reports success.
    let job = stage.submit("r0");
    stage.next();
    stage.scheduler.cancel(job.id).unwrap();
    stage.finish(0);
    assert_eq!(stage.ended(&job), JobState::Cancelled);
}

/// Regression test: a job that was stopped while its device reported success became complete,
/// although its readers got an error.
#[test]
fn a_job_that_is_stopped_as_it_ends_is_either_stopped_or_complete() {
    let stage = Stage::new(1);
    for attempt in 0..150 {
        let into = format!("kept{attempt}");
        let job = stage
            .submit_join(&spec("r0"), JobOptions { into: Some(into.clone()), ..JobOptions::default() }, "")
            .unwrap();
        stage.next();
        // Statistics of this many rows take a while when the result becomes a table.
        stage.ask(0, |sink, _| (sink.push(batch(20_000)), Ok(()))).unwrap();
        // The stop comes anywhere between before and after the end.
        (0..attempt * 100).for_each(|_| std::hint::spin_loop());
        stage.scheduler.cancel(job.id).unwrap();
        let told_readers = matches!(job.result.progress().1, SpoolState::Failed(_));
        stage.idle();
        let (state, spool) = (job.status().state, job.result.progress().1);
        let is_table = stage.catalog.table(&into).is_ok();
        match state {
            JobState::Complete => {
                assert!(!told_readers, "readers were told that a complete job was stopped");
                assert!(spool == SpoolState::Released && is_table, "{spool:?}, table: {is_table}");
            }
            JobState::Cancelled => {
                assert!(matches!(spool, SpoolState::Failed(Error::Cancelled(_))) && !is_table, "{spool:?}, {is_table}");
            }
            other => panic!("{other:?}"),
        }
        assert_eq!(job.result.held_bytes(), 0);
    }
}

/// Tests the same without timing: the earlier event, the work's end or the stop, decides.
#[test]
fn a_complete_job_cannot_be_stopped_and_a_stopped_job_cannot_complete() {
    let stage = Stage::new(1);
    let job = stage.submit("r0");
    stage.next();
    // Settle the job like a worker whose work has succeeded, before the worker reports that.
    assert_eq!(job.settle(Ok(())), Ok(()));
    stage.scheduler.cancel(job.id).unwrap();
    assert_eq!(job.result.progress().1, SpoolState::Open, "readers were told that a job which is done was stopped");
    let is_raised = stage.ask(0, |_, monitor| (monitor.cancel().is_raised(), Ok(())));
    assert!(!is_raised, "a job that is done was told to stop");
    stage.idle();

    let job = stage.submit("r0");
    stage.next();
    stage.scheduler.cancel(job.id).unwrap();
    assert!(matches!(job.settle(Ok(())), Err(Error::Cancelled(_))));
    stage.finish(0);
    assert_eq!(stage.ended(&job), JobState::Cancelled);
}

#[test]
fn a_job_that_was_stopped_does_not_count_against_its_tenants_limit() {
    let stage = Stage::with(1, SchedulerOptions { tenant_jobs: 1, ..SchedulerOptions::default() });
    let submit = |label: &str| stage.submit_join(&spec(label), JobOptions::default(), "ann");
    let stopped = submit("r0").unwrap();
    stage.next();
    assert!(matches!(submit("r1"), Err(Error::Exhausted(text)) if text.contains("1 job waiting or running")));
    stage.scheduler.cancel(stopped.id).unwrap();
    // The device has not noticed yet.
    assert!(matches!(stopped.status().state, JobState::Running));
    let next = submit("r1").unwrap();
    assert!(matches!(submit("r2"), Err(Error::Exhausted(_))), "the job that replaced it counts");
    stage.finish(0);
    assert_eq!(stage.ended(&stopped), JobState::Cancelled);
    stage.next();
    assert!(matches!(submit("r2"), Err(Error::Exhausted(_))));
    stage.finish(0);
    assert_eq!(stage.ended(&next), JobState::Complete);
    stage.idle();
    submit("r2").unwrap();
}

#[test]
fn cancelling_a_complete_job_releases_its_result() {
    let stage = Stage::new(1);
    let job = stage.submit("r0");
    stage.next();
    stage.tell(0, |sink, _| sink.push(batch(1000)));
    stage.idle();
    assert_eq!(stage.ended(&job), JobState::Complete);
    assert!(job.result.held_bytes() > 0);
    stage.scheduler.cancel(job.id).unwrap();
    assert_eq!(job.result.held_bytes(), 0);
    assert!(job.status().released);
    assert!(stage.scheduler.jobs().is_empty());
    // The job is remembered with its state. Cancelling it again changes nothing.
    assert_eq!(stage.scheduler.job(job.id).unwrap().status().state, JobState::Complete);
    assert_eq!(stage.scheduler.job(job.id).unwrap().status().rows, 1000);
    stage.scheduler.cancel(job.id).unwrap();
    assert!(matches!(stage.scheduler.cancel(JobId(99)), Err(Error::NotFound(_))));
}

#[test]
fn draining_refuses_new_jobs_and_finishes_admitted_ones() {
    let stage = Stage::new(1);
    let (running, waiting) = (stage.submit("r0"), stage.submit("r1"));
    stage.next();
    stage.scheduler.drain();
    assert!(matches!(stage.submit_join(&spec("r2"), JobOptions::default(), ""), Err(Error::Unavailable(_))));
    assert!(matches!(stage.scheduler.check_room(""), Err(Error::Unavailable(_))));
    assert!(!stage.scheduler.wait_idle(Duration::ZERO));
    stage.finish(0);
    stage.next();
    stage.finish(0);
    stage.idle();
    assert_eq!((stage.ended(&running), stage.ended(&waiting)), (JobState::Complete, JobState::Complete));
}

#[test]
fn aborting_ends_all_jobs() {
    let stage = Stage::new(1);
    let (running, waiting) = (stage.submit("r0"), stage.submit("r1"));
    stage.next();
    stage.scheduler.abort_all("the drain limit has passed");
    assert_eq!(waiting.status().state, JobState::Cancelled);
    assert!(stage.ask(0, |_, monitor| (monitor.cancel().is_raised(), monitor.cancel().check())));
    assert_eq!(stage.ended(&running), JobState::Cancelled);
    let SpoolState::Failed(error) = running.result.progress().1 else { panic!("the result did not fail") };
    assert!(error.message().contains("the drain limit has passed"), "{error}");
    stage.idle();
}

#[test]
fn dropping_the_scheduler_ends_its_jobs_and_threads() {
    let mut stage = Stage::new(2);
    let jobs = [stage.submit("r0"), stage.submit("r1"), stage.submit("r2")];
    stage.next();
    stage.next();
    for device in 0..2 {
        stage.tell(device, |_, monitor| {
            while !monitor.cancel().is_raised() {
                std::thread::yield_now();
            }
            monitor.cancel().check()
        });
    }
    stage.orders.clear();
    drop(stage.scheduler);
    assert!(jobs.iter().all(|job| job.status().state == JobState::Cancelled));
}

/// Regression test: such jobs made a count of retained results negative, and the scrape failed.
#[test]
fn statistics_can_be_read_while_a_device_has_a_job_whose_result_is_released() {
    let stage = Stage::new(1);
    for _ in 0..300 {
        let job = stage.submit("r0");
        stage.next();
        stage.finish(0);
        stage.ended(&job);
        stage.scheduler.cancel(job.id).unwrap();
        assert!(stage.scheduler.stats().running <= 1);
        stage.devices_are_free();
    }
}
