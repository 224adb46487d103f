//! Tests of host memory: reserved before a job runs, waited for, and given back.

use arrow::array::{ArrayRef, StringArray};

use super::super::placing::CLAIM_AFTER;
use super::*;

const MIB: u64 = 1 << 20;

/// Creates devices, and a table whose join with itself has 4.4 million rows of 8 bytes: more than
/// half of host memory.
fn stage(devices: u16) -> Stage {
    let stage = Stage::new(devices);
    stage.catalog.create(table_with("d", (0..2100).map(|_| 0))).unwrap();
    stage
}

fn over_half(label: &str) -> JoinSpec {
    let columns = vec!["k".into(), format!("left.{label}")];
    JoinSpec { columns, ..JoinSpec::inner("d", "d", vec![KeyPair::new("k", "k")]) }
}

/// Options of a job on one device.
fn alone() -> JobOptions {
    JobOptions { devices: DeviceRequest::Count(1), ..JobOptions::default() }
}

fn budget(stage: &Stage) -> Budget {
    stage.catalog.arena().budget().clone()
}

fn later(stage: &Stage, by: Duration) {
    stage.clock.advance(by);
    stage.scheduler.tick(SystemTime::now());
}

#[test]
fn the_memory_of_a_result_is_reserved_before_the_job_runs_and_drawn_on_as_it_is_written() {
    let stage = stage(1);
    let host = budget(&stage);
    let job = stage.submit_join(&over_half("d0"), alone(), "").unwrap();
    stage.next();
    let reserved = host.used_bytes();
    assert!((30 * MIB..40 * MIB).contains(&reserved), "{reserved} B are reserved for a result of 35 MB");
    // The job has the memory it was promised, whatever others take meanwhile.
    let _others = host.reserve(host.free_bytes(), "others").unwrap();
    stage.ask(0, |sink, _| (sink.push(batch_of("d0", 1_000_000)), Ok(()))).unwrap();
    assert_eq!(stage.ended(&job), JobState::Complete);
    stage.idle();
    // Unused memory is free again; written memory is not.
    let written = job.result.held_bytes();
    assert!(written >= 8_000_000);
    assert!((written..written + 4096).contains(&(reserved - host.free_bytes())), "{} B", host.free_bytes());
    stage.scheduler.cancel(job.id).unwrap();
    assert_eq!(host.free_bytes(), reserved);
}

#[test]
fn the_arena_is_told_the_needs_of_the_jobs_that_run_next() {
    let stage = stage(1);
    let expected = || stage.catalog.arena().expected().0;
    stage.submit_join(&over_half("d0"), alone(), "").unwrap();
    let (device, _) = stage.next();
    assert_eq!(expected(), 0, "a job that runs has reserved its memory");
    let second = stage.submit_join(&over_half("d1"), alone(), "").unwrap();
    let need = expected();
    assert!((30 * MIB..40 * MIB).contains(&need), "{need} B are expected for a result of 35 MB");
    let third = stage.submit_join(&over_half("d2"), alone(), "").unwrap();
    assert_eq!(expected(), need, "the device runs one job at a time");
    stage.scheduler.cancel(second.id).unwrap();
    assert_eq!(expected(), need, "of the third job");
    stage.scheduler.cancel(third.id).unwrap();
    assert_eq!(stage.catalog.arena().expected(), (0, true), "the first job still runs");
    stage.finish(device);
    stage.idle();
    assert_eq!(stage.catalog.arena().expected(), (0, false));
}

#[test]
fn memory_beyond_the_prediction_comes_from_free_memory_and_the_job_fails_without_it() {
    let stage = stage(1);
    let host = budget(&stage);
    let job = stage.submit("r0");
    stage.next();
    let pushed = stage.ask(0, |sink, _| {
        let first = sink.push(batch(1_000_000));
        (first, sink.push(batch(20_000_000)))
    });
    assert_eq!(pushed, Ok(()));
    let JobState::Failed(error) = stage.ended(&job) else { panic!("160 MB fit into 64 MiB") };
    assert!(matches!(&error, Error::Exhausted(text) if text.contains("--host-memory")), "{error}");
    stage.idle();
    assert_eq!(host.used_bytes(), 0);
    assert!(host.used_bytes_max() <= host.limit_bytes());
}

#[test]
fn a_job_that_finds_no_memory_is_told_what_uses_it() {
    let stage = stage(1);
    // The reader has stopped: it has taken nothing of the result.
    let unread = stage
        .submit_join(&over_half("d0"), JobOptions { retain_seconds: Some(0), ..JobOptions::default() }, "")
        .unwrap();
    stage.next();
    stage.ask(0, |sink, _| (sink.push(batch_of("d0", 5_000_000)), Ok(()))).unwrap();
    assert_eq!(stage.ended(&unread), JobState::Complete);
    stage.idle();
    let job = stage.submit("r0");
    stage.next();
    let held = format!(
        "64.0 MiB are free; the result of job {} holds 38.1 MiB until its client cancels it or its lease ends, and tables hold ",
        unread.id
    );
    let pushed = stage.ask(0, |sink, _| {
        let pushed = sink.push(batch(5_000_000));
        (pushed.clone(), pushed)
    });
    let Err(Error::Exhausted(text)) = pushed else { panic!("80 MB fit into 64 MiB: {pushed:?}") };
    assert!(text.contains(&held), "{text}");
    assert!(matches!(stage.ended(&job), JobState::Failed(_)));
    stage.idle();
    // An upload of a table finds just as little free memory.
    let refused = budget(&stage).reserve(40 * MIB, "an upload").unwrap_err();
    assert!(refused.message().contains(&held), "{refused}");
}

#[test]
fn a_job_waits_for_host_memory_and_reports_it_while_others_overtake_it() {
    let stage = stage(3);
    let host = budget(&stage);
    let first = stage.submit_join(&over_half("d0"), alone(), "").unwrap();
    let (device, _) = stage.next();
    let second = stage.submit_join(&over_half("d1"), alone(), "").unwrap();
    assert_eq!(second.status().state, JobState::Queued);
    let waiting_for = second.status().waiting_for.unwrap();
    assert!(waiting_for.contains("of host memory for its result, and"), "{waiting_for}");
    assert_eq!(second.status().queue_position, Some(0));
    // A small job does not have to wait for the large one.
    let small = stage.submit("r0");
    let (other, label) = stage.next();
    assert_eq!(label, "r0");
    stage.finish(other);
    assert_eq!(stage.ended(&small), JobState::Complete);
    stage.nothing_begins();
    // The first job wrote nothing: all that was reserved for it is free again.
    stage.finish(device);
    let (device, label) = stage.next();
    assert_eq!(label, "d1");
    assert_eq!(stage.ended(&first), JobState::Complete);
    assert_eq!(second.status().waiting_for, None);
    stage.finish(device);
    stage.idle();
    assert_eq!(host.used_bytes(), 0);
}

#[test]
fn freed_memory_is_reserved_for_a_job_that_has_waited_long() {
    let stage = stage(2);
    let host = budget(&stage);
    let half_of_host = host.reserve(host.limit_bytes() / 2 + MIB, "a test").unwrap();
    let large = stage.submit_join(&over_half("d0"), alone(), "").unwrap();
    later(&stage, CLAIM_AFTER - Duration::from_secs(26));
    let early = stage.submit("r0");
    let (device, _) = stage.next();
    stage.finish(device);
    assert_eq!(stage.ended(&early), JobState::Complete);
    // An idle worker looks for its next job. It must have looked before there is memory for the
    // large job.
    stage.devices_are_free();
    // Some memory has to be due to come back, or the large job would have failed by now.
    let kept =
        stage.submit_join(&spec("r1"), JobOptions { retain_seconds: Some(3600), ..JobOptions::default() }, "").unwrap();
    let (device, _) = stage.next();
    drop(half_of_host);
    stage.ask(device, |sink, _| (sink.push(batch_of("r1", 5_000_000)), Ok(()))).unwrap();
    assert_eq!(stage.ended(&kept), JobState::Complete);
    assert_eq!(large.status().state, JobState::Queued);
    later(&stage, Duration::from_secs(26));
    let late = stage.submit("r2");
    stage.nothing_begins();
    assert!(late.status().waiting_for.unwrap().contains("and 0 B are free"));
    stage.scheduler.cancel(kept.id).unwrap();
    let mut begun = [stage.next().1, stage.next().1];
    begun.sort_unstable();
    assert_eq!(begun, ["d0", "r2"]);
    stage.finish(0);
    stage.finish(1);
    stage.idle();
}

#[test]
fn a_job_does_not_wait_for_memory_that_will_not_be_freed() {
    let stage = stage(1);
    let host = budget(&stage);
    let held = host.reserve(host.limit_bytes() / 2 + MIB, "a table created meanwhile").unwrap();
    let job = stage.submit_join(&over_half("d0"), alone(), "").unwrap();
    later(&stage, Duration::from_secs(4));
    assert_eq!(job.status().state, JobState::Queued);
    later(&stage, Duration::from_secs(2));
    let JobState::Failed(Error::Exhausted(text)) = job.status().state else { panic!("{:?}", job.status().state) };
    assert!(text.contains("of host memory") && text.contains("64.0 MiB") && text.contains("--host-memory"), "{text}");
    assert_eq!(stage.scheduler.stats().failed_total, 1);
    stage.nothing_begins();
    drop(held);
}

#[test]
fn an_unread_result_is_released_for_a_waiting_job_when_its_lease_ends() {
    let stage = stage(1);
    let keep = JobOptions { retain_seconds: Some(100), ..JobOptions::default() };
    let unread = stage.submit_join(&over_half("d0"), keep, "").unwrap();
    stage.next();
    stage.ask(0, |sink, _| (sink.push(batch_of("d0", 4_400_000)), Ok(()))).unwrap();
    assert_eq!(stage.ended(&unread), JobState::Complete);
    stage.idle();
    let waiting = stage.submit_join(&over_half("d1"), alone(), "").unwrap();
    later(&stage, Duration::from_secs(20));
    assert_eq!(waiting.status().state, JobState::Queued, "the lease ends by itself, so there is something to wait for");
    let predicted = waiting.status().predicted_start.unwrap();
    let expires = unread.result.expires().unwrap();
    let apart = predicted.duration_since(expires).unwrap_or_else(|early| early.duration());
    assert!(apart < Duration::from_secs(5), "it is predicted to start {apart:?} from the end of the lease");
    stage.scheduler.tick(SystemTime::now() + Duration::from_secs(101));
    assert_eq!(stage.next().1, "d1");
    stage.finish(0);
    stage.idle();
}

#[test]
fn a_result_that_was_read_is_evicted_at_once_unless_its_lease_was_requested() {
    let stage = stage(1);
    let run = |label: &'static str, retain_seconds: Option<u32>| {
        let options = JobOptions { retain_seconds, ..JobOptions::default() };
        let job = stage.submit_join(&over_half(label), options, "").unwrap();
        stage.next();
        stage.ask(0, |sink, _| (sink.push(batch_of(label, 4_400_000)), Ok(()))).unwrap();
        assert_eq!(stage.ended(&job), JobState::Complete);
        stage.idle();
        job
    };
    let read = run("d0", None);
    read.result.was_read();
    let asked_for = run("d1", Some(100));
    assert_eq!(read.result.progress().1, SpoolState::Released);
    asked_for.result.was_read();
    let waiting = stage.submit_join(&over_half("d2"), alone(), "").unwrap();
    let waiting_for = waiting.status().waiting_for.unwrap();
    let held = format!("; the result of job {} holds 33.", asked_for.id);
    assert!(waiting_for.contains(&held), "{waiting_for}");
    stage.nothing_begins();
    stage.scheduler.cancel(asked_for.id).unwrap();
    stage.next();
    stage.finish(0);
    stage.idle();
}

#[test]
fn the_wait_for_memory_ends_at_a_limit() {
    let options = SchedulerOptions { memory_wait: Duration::from_secs(60), ..SchedulerOptions::default() };
    let stage = Stage::with(1, options);
    stage.catalog.create(table_with("d", (0..2100).map(|_| 0))).unwrap();
    let keep = JobOptions { retain_seconds: Some(100_000), ..JobOptions::default() };
    let unread = stage.submit_join(&over_half("d0"), keep, "").unwrap();
    stage.next();
    stage.ask(0, |sink, _| (sink.push(batch_of("d0", 4_400_000)), Ok(()))).unwrap();
    stage.ended(&unread);
    stage.idle();
    let waiting = stage.submit_join(&over_half("d1"), alone(), "").unwrap();
    later(&stage, Duration::from_secs(59));
    assert_eq!(waiting.status().state, JobState::Queued);
    later(&stage, Duration::from_secs(1));
    let JobState::Failed(Error::Exhausted(text)) = waiting.status().state else { panic!("the job waits forever") };
    assert!(text.contains("waited 60 s"), "{text}");
}

/// Join of more than 20 million rows by statistics: more than host memory holds.
fn over_all(stage: &Stage) -> JoinSpec {
    for name in ["e", "o"] {
        stage.catalog.create(table_with(name, (0..20_000).map(|row| row % 6))).unwrap();
    }
    let columns = vec!["k".into(), "left.e0".into()];
    JoinSpec { columns, ..JoinSpec::inner("e", "o", vec![KeyPair::new("k", "k")]) }
}

#[test]
fn a_result_that_does_not_fit_fails_with_the_numbers_and_leaves_no_memory_in_use() {
    let stage = stage(1);
    let spec = over_all(&stage);
    let host = budget(&stage);
    let failed = |options: JobOptions| {
        let job = stage.submit_join(&spec, options, "").unwrap();
        stage.next();
        let pushed = stage.ask(0, |sink, _| {
            let pushed = (0..9).try_for_each(|_| sink.push(batch_of("e0", 1_000_000)));
            (pushed.clone(), pushed)
        });
        assert!(pushed.is_err(), "72 MB fit into 64 MiB");
        let JobState::Failed(Error::Exhausted(text)) = stage.ended(&job) else { panic!("the job ended otherwise") };
        stage.idle();
        assert_eq!(host.used_bytes(), 0);
        text
    };
    let text = failed(JobOptions::default());
    for needed in ["ran out of host memory after", "64.0 MiB", "--host-memory", "retain_seconds 0"] {
        assert!(text.contains(needed), "{text}");
    }
    // A result that becomes a table has to fit, even if it is to be kept for no time.
    for retain_seconds in [None, Some(0)] {
        let text = failed(JobOptions { into: Some("t".into()), retain_seconds, ..JobOptions::default() });
        assert!(text.contains("--host-memory") && text.contains("becomes a table"), "{text}");
        assert!(!text.contains("retain_seconds"), "{text}");
    }
    // For a result that is consumed as it is read, only the window is reserved.
    let job = stage.submit_join(&spec, JobOptions { retain_seconds: Some(0), ..JobOptions::default() }, "").unwrap();
    stage.next();
    let reserved = host.used_bytes();
    assert!((1..=8 * MIB).contains(&reserved), "{reserved} B are reserved for a window of an eighth of 64 MiB");
    stage.finish(0);
    assert_eq!(stage.ended(&job), JobState::Complete);
}

#[test]
fn keys_that_fit_no_host_memory_are_refused_with_the_numbers() {
    let stage = stage(1);
    for name in ["t", "u"] {
        let texts = StringArray::from_iter_values((0..5000).map(|row| format!("a text of some length {row}")));
        let batch = RecordBatch::try_from_iter([("k", Arc::new(texts) as ArrayRef)]).unwrap();
        stage.catalog.create(Table::from_batches(name, batch.schema(), vec![batch]).unwrap()).unwrap();
    }
    let spec = JoinSpec::inner("t", "u", vec![KeyPair::new("k", "k")]);
    assert_eq!(stage.explain(&spec, &JobOptions::default()).refusal, None);
    // The table leaves 50 KiB, and two sides of 16-byte hashes take more.
    let _table = budget(&stage).reserve(64 * MIB - (50 << 10), "a table").unwrap();
    stage.catalog.create(table_with("large", 0..1_600_000)).unwrap();
    let refusal = stage.submit_join(&spec, JobOptions::default(), "").unwrap_err();
    let Error::Exhausted(text) = &refusal else { panic!("{refusal:?}") };
    for needed in ["the keys that the host makes", "64.0 MiB", "and tables take", "--host-memory"] {
        assert!(text.contains(needed), "{text}");
    }
    // An explanation has the same error, with the plan that would have run.
    let explained = stage.explain(&spec, &JobOptions::default());
    assert_eq!(explained.refusal.as_deref(), Some(text.as_str()));
    assert!(!explained.phases.is_empty() && explained.to_string().contains(text), "{explained}");
}

#[test]
fn a_result_that_is_only_predicted_not_to_fit_is_not_refused() {
    let stage = stage(1);
    let job = stage.submit_join(&over_all(&stage), JobOptions::default(), "").unwrap();
    assert!(job.planned().result_bytes > 64 * MIB, "{} B are predicted", job.planned().result_bytes);
    stage.next();
    stage.finish(0);
    assert_eq!(stage.ended(&job), JobState::Complete);
}

#[test]
fn a_join_predicted_to_exceed_memory_does_not_wait_for_memory_that_is_never_freed() {
    let stage = stage(1);
    let spec = over_all(&stage);
    let host = budget(&stage);
    // Host memory may be held by something that is no table, such as holes between pieces of the
    // arena.
    let held = host.reserve(4096, "a test").unwrap();
    let job = stage.submit_join(&spec, JobOptions::default(), "").unwrap();
    assert!(job.planned().result_bytes > 64 * MIB, "{} B are predicted", job.planned().result_bytes);
    stage.next();
    assert_eq!(host.free_bytes(), 0, "the job gets all host memory that is free");
    stage.finish(0);
    assert_eq!(stage.ended(&job), JobState::Complete);
    stage.idle();
    drop(held);
}
