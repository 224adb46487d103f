//! Tests of joins of two tables whose build side is on a device already.

use std::time::Instant;

use arrow::array::{ArrayRef, StringArray};

use super::real::start_with;
use super::*;
use crate::device::Phase;
use crate::join::Side;
use crate::memory::Reservation;
use crate::testing::wait_until;

/// Submits a join of the left table with rows that arrive and have the columns of the right one.
fn submit_stream(scheduler: &Scheduler, catalog: &Catalog, spec: &JoinSpec, owner: &str) -> Arc<Job> {
    let options = JobOptions {
        streamed: Some(Side::Right),
        keep_seconds: 3600,
        retain_seconds: Some(0),
        ..JobOptions::default()
    };
    let schema = catalog.table(spec.table_name(Side::Right)).unwrap().schema.clone();
    let arriving = Table::to_arrive("stream", schema, 1 << 20, 44);
    let spec = JoinSpec { right: Arc::new(arriving).into(), ..spec.clone() };
    submit(scheduler, catalog, &spec, options, owner).unwrap()
}

/// Prepares the left table for the joins of `spec` of a tenant. Returns its number.
fn prepare(scheduler: &Scheduler, catalog: &Catalog, spec: &JoinSpec, owner: &str) -> u64 {
    let job = submit_stream(scheduler, catalog, spec, owner);
    scheduler.end_rows(&job).unwrap();
    assert!(scheduler.wait_idle(PATIENCE));
    assert_eq!(job.state(), JobState::Complete);
    let prepared = scheduler.prepared();
    let number = prepared.iter().map(|build| build.number).max().unwrap();
    assert!(prepared.iter().all(|build| build.device.is_some()), "{prepared:?}");
    number
}

/// Runs a join, and returns the number of the build side that it probed, or `None` if it prepared
/// its own.
fn probed(scheduler: &Scheduler, job: &Job) -> Option<u64> {
    assert!(scheduler.wait_idle(PATIENCE));
    let status = job.status();
    assert_eq!((status.state.clone(), status.rows), (JobState::Complete, 100));
    let explanation = job.explanation();
    let builds = status.phases.iter().any(|phase| phase.phase == Phase::BuildTable);
    assert_eq!(builds, explanation.prepared.is_none(), "{explanation}");
    for phase in &explanation.phases {
        assert!(phase.predicted_seconds.is_some(), "phase {:?} was not predicted:\n{explanation}", phase.phase);
    }
    explanation.prepared
}

#[test]
fn a_join_of_tables_probes_the_build_side_that_a_stream_left() {
    let (scheduler, budgets, catalog) = start_with(1, SchedulerOptions::default());
    let spec = JoinSpec { columns: Vec::new(), ..spec("r0") };
    let run = |spec: &JoinSpec, options: JobOptions, owner: &str| {
        let job = submit(&scheduler, &catalog, spec, options, owner).unwrap();
        probed(&scheduler, &job)
    };
    assert_eq!(run(&spec, JobOptions::default(), "a"), None);
    let kept = prepare(&scheduler, &catalog, &spec, "a");
    let used = budgets[0].used_bytes();
    assert_eq!(run(&spec, JobOptions::default(), "a"), Some(kept));
    assert_eq!(run(&spec, JobOptions { retain_seconds: Some(60), ..JobOptions::default() }, "a"), Some(kept));
    assert_eq!(budgets[0].used_bytes(), used);
    let explained = |owner: &str| {
        let bound = bind(&spec, &catalog).unwrap();
        scheduler.explain(bound, &JobOptions::default(), owner, &Interrupt::default()).unwrap()
    };
    assert_eq!(explained("a").prepared, Some(kept));
    let text = explained("a").to_string();
    assert!(text.contains(&format!("prepared {kept}")) && text.contains("kept on the device since"), "{text}");

    // Another tenant, other columns, a table of the result, and a count.
    assert_eq!(run(&spec, JobOptions::default(), "b"), None);
    assert_eq!(explained("b").prepared, None);
    assert_eq!(run(&JoinSpec { columns: vec!["k".into()], ..spec.clone() }, JobOptions::default(), "a"), None);
    assert_eq!(run(&JoinSpec { how: JoinKind::Left, ..spec.clone() }, JobOptions::default(), "a"), None);
    assert_eq!(run(&spec, JobOptions { into: Some("joined".into()), ..JobOptions::default() }, "a"), None);
    let count = submit(&scheduler, &catalog, &JoinSpec { count: true, ..spec.clone() }, JobOptions::default(), "a");
    assert!(scheduler.wait_idle(PATIENCE));
    assert_eq!(count.unwrap().explanation().prepared, None);

    // A table of the same name is another one.
    catalog.drop_table("r", &Editor { tenant: String::new(), is_admin: true }).unwrap();
    catalog.create(table("r")).unwrap();
    assert_eq!(run(&spec, JobOptions::default(), "a"), None);
    scheduler.tick(SystemTime::now());
    assert_eq!(scheduler.prepared().len(), 0);
    assert_eq!(budgets[0].used_bytes(), 0);
}

/// Short text is packed if the text of both sides is known to be short, and hashed if any text may
/// arrive.
#[test]
fn a_build_side_is_priced_as_it_was_prepared() {
    let (scheduler, _, catalog) = start_with(1, SchedulerOptions::default());
    for name in ["few", "more"] {
        let keys: ArrayRef = Arc::new((0..100).map(|key| Some(format!("key {key}"))).collect::<StringArray>());
        let numbers: ArrayRef = Arc::new(Int32Array::from_iter_values(0..100));
        let batch = RecordBatch::try_from_iter([("k", keys), ("v", numbers)]).unwrap();
        catalog.create(Table::from_batches(name, batch.schema(), vec![batch]).unwrap()).unwrap();
    }
    let spec = JoinSpec::inner("few", "more", vec![KeyPair::new("k", "k")]);
    let explained = || {
        let bound = bind(&spec, &catalog).unwrap();
        scheduler.explain(bound, &JobOptions::default(), "", &Interrupt::default()).unwrap()
    };
    let hashed = "keys hashed and compared by the CPU";
    assert!(!explained().to_string().contains(hashed));
    let kept = prepare(&scheduler, &catalog, &spec, "");
    assert_eq!(explained().prepared, Some(kept));
    assert!(explained().to_string().contains(hashed), "{}", explained());
    let job = submit(&scheduler, &catalog, &spec, JobOptions::default(), "").unwrap();
    assert_eq!(probed(&scheduler, &job), Some(kept));
    assert!(job.status().phases.iter().any(|phase| phase.phase == Phase::CompareKeys));
}

/// Creates two tables. Returns a join that gives each of their rows ten times. So the result shares
/// no columns with them, and waits for its reader.
fn with_many_rows(catalog: &Catalog) -> JoinSpec {
    for name in ["m", "n"] {
        catalog.create(table_with(name, (0..100).map(|row| row % 10))).unwrap();
    }
    JoinSpec { batch_rows: Some(10), ..JoinSpec::inner("m", "n", vec![KeyPair::new("k", "k")]) }
}

/// Takes most of the host memory. Then a result with more than its window waits for its reader.
fn take_most_memory(catalog: &Catalog) -> Reservation {
    let budget = catalog.arena().budget();
    budget.reserve(budget.free_bytes() - (4 << 20), "a test").unwrap()
}

/// Takes the build side of the only resident away from its device. Jobs that wait are told, unless
/// the job is just being submitted or put back.
fn take_away(scheduler: &Scheduler, tells_jobs: bool) {
    let shared = &scheduler.handle.shared;
    let mut state = shared.state.lock();
    let resident = state.residents[0].clone();
    let leftovers = tells_jobs.then(|| state::Shared::unbuild(&mut state, &resident));
    let built = resident.take_built();
    drop(state);
    drop((leftovers, built));
}

#[test]
fn a_join_whose_build_side_leaves_while_it_waits_runs_as_usual() {
    for tells_jobs in [true, false] {
        joins_run_as_usual_after_the_build_side_has_left(tells_jobs);
    }
}

fn joins_run_as_usual_after_the_build_side_has_left(tells_jobs: bool) {
    let options = SchedulerOptions { jobs_per_device: 1, window_bytes: 100, ..SchedulerOptions::default() };
    let (scheduler, budgets, catalog) = start_with(1, options);
    let spec = JoinSpec { columns: Vec::new(), ..spec("r0") };
    let number = prepare(&scheduler, &catalog, &spec, "");
    // A result that no client reads keeps the device.
    let most = take_most_memory(&catalog);
    let unread = JobOptions { retain_seconds: Some(0), ..JobOptions::default() };
    let blocking = submit(&scheduler, &catalog, &with_many_rows(&catalog), unread, "").unwrap();
    let submitted = || submit(&scheduler, &catalog, &spec, JobOptions::default(), "").unwrap();
    let jobs = [submitted(), submitted()];
    assert_eq!(jobs[0].planned().kept_build.as_ref().map(|kept| kept.number), Some(number));
    assert!(jobs.iter().all(|job| job.state() == JobState::Queued));
    take_away(&scheduler, tells_jobs);
    assert_eq!(scheduler.prepared()[0].device, None);
    scheduler.cancel(blocking.id).unwrap();
    drop(most);
    assert!(jobs.iter().all(|job| probed(&scheduler, job).is_none()));
    scheduler.release_prepared(number).unwrap();
    assert_eq!((scheduler.prepared().len(), budgets[0].used_bytes()), (0, 0));
}

/// Waits until a job runs. It does not end before its result is read.
fn wait_until_it_runs(job: &Job) {
    let end = Instant::now() + PATIENCE;
    while job.state() == JobState::Queued {
        assert!(Instant::now() < end, "it did not start");
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(job.state(), JobState::Running);
}

#[test]
fn a_join_that_starts_elsewhere_leaves_the_build_side() {
    let options = SchedulerOptions { jobs_per_device: 1, window_bytes: 100, ..SchedulerOptions::default() };
    let (scheduler, budgets, catalog) = start_with(2, options);
    let spec = with_many_rows(&catalog);
    let number = prepare(&scheduler, &catalog, &spec, "");
    let device = scheduler.prepared()[0].device.unwrap();
    // Results that no client reads keep their devices.
    let _most = take_most_memory(&catalog);
    let unread = || JobOptions { retain_seconds: Some(0), ..JobOptions::default() };
    let there = JobOptions { devices: DeviceRequest::Named(vec![device.to_string()]), ..unread() };
    let blocking = submit(&scheduler, &catalog, &JoinSpec { how: JoinKind::Left, ..spec.clone() }, there, "").unwrap();
    wait_until_it_runs(&blocking);
    let job = submit(&scheduler, &catalog, &spec, unread(), "").unwrap();
    wait_until_it_runs(&job);
    assert!(job.status().devices.iter().all(|&other| other != device), "{:?}", job.status().devices);
    let prepared = &scheduler.prepared()[0];
    assert_eq!((prepared.streams, prepared.device), (0, Some(device)));
    assert!(prepared.expires.is_some());
    scheduler.cancel(blocking.id).unwrap();
    scheduler.release_prepared(number).unwrap();
    let end = Instant::now() + PATIENCE;
    while budgets[usize::from(device.index)].used_bytes() > 0 {
        assert!(Instant::now() < end, "the build side stays until the end of the other job");
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(job.state(), JobState::Running);
}

#[test]
fn joins_of_tables_and_streams_take_turns() {
    let (scheduler, _, catalog) = start_with(1, SchedulerOptions { jobs_per_device: 2, ..SchedulerOptions::default() });
    let spec = JoinSpec { columns: Vec::new(), ..spec("r0") };
    let number = prepare(&scheduler, &catalog, &spec, "");
    let stream = submit_stream(&scheduler, &catalog, &spec, "");
    // The first join finds the build side without a turn.
    wait_until("the first turn of the stream", || {
        scheduler.handle.shared.state.lock().open.contains_key(&stream.id) && stream.state() == JobState::Running
    });
    let batch = table("s").batches[0].clone();
    let mut jobs = Vec::new();
    for _ in 0..20 {
        jobs.push(submit(&scheduler, &catalog, &spec, JobOptions::default(), "").unwrap());
        futures::executor::block_on(scheduler.feed(&stream, batch.clone(), None)).unwrap();
    }
    scheduler.end_rows(&stream).unwrap();
    // A join does not wait for many turns if it can index the table again sooner.
    let kept = jobs.iter().filter(|job| probed(&scheduler, job) == Some(number)).count();
    assert!(kept > 0, "no join has probed the build side that is kept");
    assert_eq!((stream.state(), stream.status().rows), (JobState::Complete, 2000));
    assert_eq!(scheduler.prepared()[0].streams, 0);
}
