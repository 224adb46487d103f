//! Tests of build sides with marks: of streams that emit rows of their table at the end.

use super::real::{start_by, start_with};
use super::*;
use crate::join::Side;
use crate::scheduler::marking::{IDLE_MAX, WAIT_MAX, names};
use crate::testing::wait_until;

/// Bytes of device memory of `start_with`.
const DEVICE_BYTES: u64 = 16 << 20;

/// Creates a table whose build side takes more than an eighth of a device.
fn with_large_table(catalog: &Catalog) -> JoinSpec {
    catalog.create(rows_of("l", 30_000)).unwrap();
    JoinSpec { how: JoinKind::Full, ..JoinSpec::inner("l", "s", vec![KeyPair::new("k", "k")]) }
}

/// Submits a join of the left table with rows that arrive.
fn open(scheduler: &Scheduler, catalog: &Catalog, spec: &JoinSpec, owner: &str) -> Arc<Job> {
    let options = JobOptions { streamed: Some(Side::Right), retain_seconds: Some(0), ..JobOptions::default() };
    let schema = catalog.table("s").unwrap().schema.clone();
    let right = Arc::new(Table::to_arrive("stream", schema, 1 << 20, 44)).into();
    submit(scheduler, catalog, &JoinSpec { right, ..spec.clone() }, options, owner).unwrap()
}

fn is_open(scheduler: &Scheduler, job: &Job) -> bool {
    scheduler.handle.shared.state.lock().open.contains_key(&job.id) && job.state() == JobState::Running
}

/// Opens streams until one is refused. Returns those that were not, and the refusal.
fn open_all(scheduler: &Scheduler, catalog: &Catalog, spec: &JoinSpec, owner: &str) -> (Vec<Arc<Job>>, Error) {
    let mut opened = Vec::new();
    for _ in 0..16 {
        let job = open(scheduler, catalog, spec, owner);
        wait_until("the first turn", || is_open(scheduler, &job) || job.state().is_final());
        match job.state() {
            JobState::Failed(error) => return (opened, error),
            _ => opened.push(job),
        }
    }
    panic!("{} streams were opened, and none was refused", opened.len());
}

#[test]
fn build_sides_with_marks_take_half_of_a_device_and_a_quarter_for_a_tenant() {
    let (scheduler, budgets, catalog) = start_with(1, SchedulerOptions::default());
    let spec = with_large_table(&catalog);
    let (of_ann, refusal) = open_all(&scheduler, &catalog, &spec, "ann");
    let text = refusal.message();
    assert!(matches!(refusal, Error::Exhausted(_)) && text.contains("tenant \"ann\" may take 4.0 MiB"), "{refusal}");
    assert!(text.contains(&format!("taken by {}", names(of_ann.iter().map(|job| job.id)))), "{refusal}");
    assert!(budgets[0].used_bytes() <= DEVICE_BYTES / 4);
    let (anonymous, refusal) = open_all(&scheduler, &catalog, &spec, "");
    let text = refusal.message();
    assert!(text.contains("all such joins together may take 8.0 MiB"), "{refusal}");
    assert!(text.contains("--device-memory") && text.contains("end one of these streams"), "{refusal}");
    assert!(!anonymous.is_empty());
    assert!(budgets[0].used_bytes() <= DEVICE_BYTES / 2);
    // All are listed, and others go on.
    let listed: Vec<String> = scheduler.prepared().into_iter().map(|build| build.owner).collect();
    assert_eq!(listed.len(), of_ann.len() + anonymous.len());
    assert!(listed.contains(&"ann".into()) && listed.contains(&String::new()));
    let small = submit(&scheduler, &catalog, &super::spec("r0"), JobOptions::default(), "bob").unwrap();
    wait_until("a join of tables", || small.state() == JobState::Complete);
    let inner = open(&scheduler, &catalog, &JoinSpec { how: JoinKind::Inner, ..spec.clone() }, "bob");
    wait_until("a stream without marks", || is_open(&scheduler, &inner));
    // The end of a stream makes room for the next.
    scheduler.cancel(of_ann[0].id).unwrap();
    let again = open(&scheduler, &catalog, &spec, "ann");
    wait_until("the next stream", || is_open(&scheduler, &again));
    scheduler.abort_all("the test is over");
    wait_until("the memory is free", || budgets[0].used_bytes() == 0);
}

/// Starts a device whose memory a stream with marks, and the test, have taken. Returns a join that
/// waits for it, too.
fn start_full() -> (Scheduler, Arc<ManualClock>, Arc<Job>, Arc<Job>, impl Sized) {
    let clock = Arc::new(ManualClock::default());
    let options = SchedulerOptions { timer: false, ..SchedulerOptions::default() };
    let (scheduler, budgets, catalog) = start_by(1, options, clock.clone());
    let spec = with_large_table(&catalog);
    let stream = open(&scheduler, &catalog, &spec, "");
    wait_until("the first turn", || is_open(&scheduler, &stream));
    let taken = budgets[0].reserve(budgets[0].free_bytes(), "a test").unwrap();
    let waiting = submit(&scheduler, &catalog, &super::spec("r0"), JobOptions::default(), "").unwrap();
    (scheduler, clock, stream, waiting, (taken, catalog))
}

#[test]
fn a_stream_with_marks_that_is_idle_ends_for_a_job_that_waits_for_its_memory() {
    let (scheduler, clock, stream, waiting, _held) = start_full();
    let waiting_for = waiting.status().waiting_for.unwrap();
    assert!(waiting_for.contains(&format!("job {} holds memory there", stream.id)), "{waiting_for}");
    clock.advance(IDLE_MAX - Duration::from_secs(1));
    scheduler.tick(SystemTime::now());
    assert_eq!((stream.state(), waiting.state()), (JobState::Running, JobState::Queued));
    clock.advance(Duration::from_secs(1));
    scheduler.tick(SystemTime::now());
    let JobState::Failed(error) = stream.state() else { panic!("it holds the memory on: {:?}", stream.state()) };
    let text = error.message();
    assert!(matches!(error, Error::Exhausted(_)) && text.contains("joined no rows for 30"), "{error}");
    assert!(text.contains("of host:0") && text.contains("start it again"), "{error}");
    wait_until("the join", || waiting.state() == JobState::Complete);
}

#[test]
fn an_idle_stream_with_marks_stays_while_no_job_needs_its_memory() {
    let (scheduler, clock, stream, waiting, _held) = start_full();
    scheduler.cancel(waiting.id).unwrap();
    clock.advance(10 * WAIT_MAX);
    scheduler.tick(SystemTime::now());
    assert_eq!(stream.state(), JobState::Running);
}

#[test]
fn no_stream_with_marks_keeps_a_job_from_its_memory_forever() {
    let (scheduler, clock, stream, waiting, _held) = start_full();
    let batch = table("s").batches[0].clone();
    let step = IDLE_MAX / 2;
    let mut waited = Duration::ZERO;
    while waited + step < WAIT_MAX {
        clock.advance(step);
        waited += step;
        let turns = stream.status().rows;
        futures::executor::block_on(scheduler.feed(&stream, batch.clone(), None)).unwrap();
        wait_until("the turn", || stream.status().rows > turns && is_open(&scheduler, &stream));
        scheduler.tick(SystemTime::now());
        assert_eq!((stream.state(), waiting.state()), (JobState::Running, JobState::Queued));
    }
    clock.advance(step);
    scheduler.tick(SystemTime::now());
    let JobState::Failed(error) = stream.state() else { panic!("it holds the memory on: {:?}", stream.state()) };
    assert!(error.message().contains("another job has waited for"), "{error}");
    wait_until("the join", || waiting.state() == JobState::Complete);
}
