//! Tests that jobs, whatever becomes of them, keep no table and no result in memory.

use super::*;
use crate::catalog::IntoMode;

/// Puts a table into the arena.
fn store(stage: &Stage, name: &str) {
    let Table { schema, batches, .. } = rows_of(name, 1000);
    let batches = batches.into_iter().map(|batch| stage.catalog.adopt(batch).unwrap()).collect();
    let table = Table::from_batches(name, schema, batches).unwrap();
    stage.catalog.replace(table, &Editor::admin("")).unwrap();
}

fn into_kept() -> JobOptions {
    JobOptions { into: Some("kept".into()), into_mode: IntoMode::Replace, ..JobOptions::default() }
}

/// Runs a job to its end.
fn run(stage: &Stage, options: JobOptions, outcome: Result<()>) -> Arc<Job> {
    let job = stage.submit_join(&spec("r0"), options, "").unwrap();
    stage.next();
    stage.tell(0, |sink, _| sink.push(batch(1000)).and(outcome));
    stage.idle();
    job
}

fn used_bytes(stage: &Stage) -> u64 {
    stage.catalog.arena().budget().used_bytes()
}

/// Drops all tables, and asserts that all memory is free though the jobs are remembered.
#[track_caller]
fn assert_all_comes_back(stage: &Stage, jobs: usize, what: &str) {
    for table in stage.catalog.tables() {
        stage.catalog.drop_table(&table.name, &Editor::admin("")).unwrap();
    }
    assert_eq!(used_bytes(stage), 0, "{what}");
    assert_eq!(stage.scheduler.jobs().len() + stage.scheduler.history().len(), jobs, "{what}");
}

/// Creates a device, and the tables `r` and `s` in the arena.
fn stage() -> Stage {
    let stage = Stage::new(1);
    ["r", "s"].into_iter().for_each(|name| store(&stage, name));
    stage
}

/// Regression test: five results of the same name held the memory of five tables for 300 s.
#[test]
fn a_table_that_a_job_replaces_is_freed_at_once() {
    let stage = stage();
    let mut jobs = vec![run(&stage, into_kept(), Ok(()))];
    let with_one = used_bytes(&stage);
    jobs.extend((0..4).map(|_| run(&stage, into_kept(), Ok(()))));
    assert!(jobs.iter().all(|job| job.status().state == JobState::Complete));
    assert_eq!(used_bytes(&stage), with_one, "of five tables of the same name, one is there");
    let released: Vec<bool> = jobs.iter().map(|job| job.status().released).collect();
    assert_eq!(released, [true, true, true, true, false]);
    // An upload of the same name frees the result as well.
    store(&stage, "kept");
    assert!(jobs[4].status().released);
    assert_all_comes_back(&stage, 5, "tables that were replaced");
}

#[test]
fn a_table_that_jobs_have_joined_is_freed_when_it_is_dropped() {
    let stage = stage();
    run(&stage, JobOptions { retain_seconds: Some(0), ..JobOptions::default() }, Err(Error::Internal("a test".into())));
    assert_all_comes_back(&stage, 1, "tables of a failed job");
    let stage = self::stage();
    let explanation = stage.explain(&spec("r0"), &JobOptions::default());
    assert_all_comes_back(&stage, 0, "tables of a join that was explained");
    drop(explanation);
    let stage = self::stage();
    let job = run(&stage, into_kept(), Ok(()));
    let (explanation, planned) = (job.explanation(), job.planned());
    assert_all_comes_back(&stage, 1, "tables of a job whose plan and explanation are in use");
    drop((explanation, planned));
}

#[test]
fn a_result_that_is_released_or_expired_is_freed_and_its_job_is_remembered() {
    let stage = stage();
    let released = run(&stage, JobOptions::default(), Ok(()));
    stage.scheduler.cancel(released.id).unwrap();
    let expired = run(&stage, JobOptions { retain_seconds: Some(1), ..JobOptions::default() }, Ok(()));
    assert!(expired.result.held_bytes() > 0);
    stage.scheduler.tick(SystemTime::now() + Duration::from_secs(2));
    assert_eq!(stage.scheduler.history().len(), 2);
    assert_all_comes_back(&stage, 2, "results that were released");
}

#[test]
fn a_job_that_is_stopped_while_it_runs_gives_all_memory_back_at_its_end() {
    for options in [JobOptions::default(), into_kept()] {
        let stage = stage();
        let job = stage.submit_join(&spec("r0"), options, "").unwrap();
        stage.next();
        stage.tell(0, |sink, monitor| {
            sink.push(batch(1000))?;
            crate::testing::wait_until("the job to be stopped", || monitor.cancel().is_raised());
            monitor.cancel().check()
        });
        crate::testing::wait_until("the job to push rows", || job.result.held_bytes() > 0);
        stage.scheduler.cancel(job.id).unwrap();
        assert_eq!(job.result.held_bytes(), 0, "rows of a stopped job are of no use");
        stage.idle();
        assert_all_comes_back(&stage, 1, "a job that was stopped");
    }
}

#[test]
fn tables_of_a_queued_job_are_freed_when_it_is_cancelled() {
    let stage = stage();
    let running = stage.submit("r0");
    stage.next();
    let before = used_bytes(&stage);
    for name in ["u", "v"] {
        store(&stage, name);
    }
    let spec = JoinSpec { columns: Vec::new(), ..JoinSpec::inner("u", "v", vec![KeyPair::new("k", "k")]) };
    let queued = stage.submit_join(&spec, into_kept(), "").unwrap();
    for name in ["u", "v"] {
        stage.catalog.drop_table(name, &Editor::admin("")).unwrap();
    }
    assert!(used_bytes(&stage) > before, "the queued job will read the tables");
    stage.scheduler.cancel(queued.id).unwrap();
    assert_eq!(used_bytes(&stage), before);
    stage.finish(0);
    assert_eq!(stage.ended(&running), JobState::Complete);
    stage.idle();
    assert_all_comes_back(&stage, 2, "a queued job that was cancelled");
}
