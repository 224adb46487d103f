//! The scheduler with runners that do what a test tells them, and a clock that stands still.

mod memory;
mod real;
mod sharing;

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, SystemTime};

use arrow::array::{Int32Array, RecordBatch};
use arrow::datatypes::{DataType, Field, Schema};
use parking_lot::Mutex;

use super::clock::ManualClock;
use super::*;
use crate::catalog::{Catalog, Editor, SpoolState, Table};
use crate::device::{DeviceId, DeviceKind};
use crate::join::{BatchSink, Monitor};
use crate::memory::{Arena, Budget};
use crate::planner::{DeviceRequest, JoinKind, JoinSpec, KeyPair, Plan, Target};
use crate::{Error, Result};

/// What a runner is told to do with the job that it was given.
type Order = Box<dyn FnOnce(&dyn BatchSink, &Monitor) -> Result<()> + Send>;

/// A device that announces each job it is given, by the column that the join asks for, and then does what it is told.
#[derive(Debug)]
struct Puppet {
    device: u16,
    begun: Mutex<Sender<(u16, String)>>,
    orders: Mutex<Receiver<Order>>,
    own_orders: OwnOrders,
}

/// The orders of jobs that have a channel of their own, by label, where several are on a device.
type OwnOrders = Arc<Mutex<HashMap<String, Receiver<Order>>>>;

impl Runner for Puppet {
    fn run(&self, plan: &Plan, _grant: &Grant, sink: &dyn BatchSink, monitor: &Monitor) -> Result<()> {
        assert!(!plan.join.left.batches.is_empty(), "a job that runs has its tables");
        let label = plan.join.output.last().unwrap().name.clone();
        let own = self.own_orders.lock().remove(&label);
        self.begun.lock().send((self.device, label)).unwrap();
        let order = match own {
            Some(own) => own.recv(),
            None => self.orders.lock().recv(),
        };
        let order = order.map_err(|_| Error::Internal("the test is over".into()))?;
        order(sink, monitor)
    }
}

struct Stage {
    /// Dropped first: without orders to wait for, jobs end, and with them the threads that the scheduler waits for.
    orders: Vec<Sender<Order>>,
    scheduler: Scheduler,
    catalog: Catalog,
    clock: Arc<ManualClock>,
    memory: Vec<Budget>,
    begun: Receiver<(u16, String)>,
    own_orders: OwnOrders,
}

/// Longer than anything takes, so that a test that is wrong fails instead of hanging.
const PATIENCE: Duration = Duration::from_secs(30);

impl Stage {
    fn new(devices: u16) -> Self {
        Self::with(devices, SchedulerOptions::default())
    }

    fn with(devices: u16, options: SchedulerOptions) -> Self {
        Self::with_jobs(devices, 1, options)
    }

    /// Devices that run up to `jobs_max` jobs at a time.
    fn with_jobs(devices: u16, jobs_max: usize, options: SchedulerOptions) -> Self {
        let catalog = Catalog::new(Arena::new(Budget::new("host memory", "--host-memory", 64 << 20)));
        for name in ["r", "s"] {
            catalog.create(table(name)).unwrap();
        }
        let (begin, begun) = channel();
        let own_orders = OwnOrders::default();
        let (mut executors, mut orders, mut memory) = (Vec::new(), Vec::new(), Vec::new());
        for device in 0..devices {
            let (order, receive) = channel();
            let budget = Budget::new(format!("memory of host:{device}"), "--device-memory", 1 << 20);
            memory.push(budget.clone());
            orders.push(order);
            executors.push(Executor {
                id: DeviceId { kind: DeviceKind::Host, index: device },
                memory: budget,
                jobs_max,
                target: Target { name: format!("host:{device}"), memory_bytes: 1 << 20, ..Target::default() },
                runner: Box::new(Puppet {
                    device,
                    begun: Mutex::new(begin.clone()),
                    orders: Mutex::new(receive),
                    own_orders: own_orders.clone(),
                }),
            });
        }
        let clock = Arc::new(ManualClock::default());
        let options = SchedulerOptions { timer: false, ..options };
        let scheduler = Scheduler::over(catalog.clone(), executors, options, clock.clone());
        Self { scheduler, catalog, clock, memory, begun, orders, own_orders }
    }

    /// Gives the next job with that label a channel of its own for orders.
    fn direct(&self, label: &str) -> Sender<Order> {
        let (order, receive) = channel();
        self.own_orders.lock().insert(label.into(), receive);
        order
    }

    /// Submits a join whose last column is `label` (one of `r0` to `r9`).
    fn submit(&self, label: &str) -> Arc<Job> {
        self.scheduler.submit(spec(label), "").unwrap()
    }

    /// The next job that a device begins.
    fn next(&self) -> (u16, String) {
        self.begun.recv_timeout(PATIENCE).expect("a device begins a job")
    }

    fn nothing_begins(&self) {
        assert!(self.begun.try_recv().is_err(), "a job began too early");
    }

    fn tell(&self, device: u16, order: impl FnOnce(&dyn BatchSink, &Monitor) -> Result<()> + Send + 'static) {
        self.orders[device as usize].send(Box::new(order)).unwrap();
    }

    /// What a running job answers. An assertion about it belongs to the test: on the device's thread it would be the job's panic.
    fn ask<T: Send + 'static>(
        &self,
        device: u16,
        question: impl FnOnce(&dyn BatchSink, &Monitor) -> (T, Result<()>) + Send + 'static,
    ) -> T {
        let (answer, receive) = channel();
        self.tell(device, move |sink, monitor| {
            let (told, outcome) = question(sink, monitor);
            let _ = answer.send(told);
            outcome
        });
        receive.recv_timeout(PATIENCE).expect("a running job answers")
    }

    fn finish(&self, device: u16) {
        self.tell(device, |_, _| Ok(()));
    }

    /// Waits until a job is over.
    fn ended(&self, job: &Job) -> JobState {
        let end = std::time::Instant::now() + PATIENCE;
        loop {
            let state = job.status().state;
            if state.is_final() {
                return state;
            }
            assert!(std::time::Instant::now() < end, "job {} does not end: {state:?}", job.id);
            std::thread::yield_now();
        }
    }

    fn idle(&self) {
        assert!(self.scheduler.wait_idle(PATIENCE), "the scheduler does not become idle");
    }
}

/// Rows of columns `k` and `r0` to `r9` (or `s0` to `s9`).
fn table(name: &str) -> Table {
    rows_of(name, 100)
}

/// As many rows as one likes.
fn rows_of(name: &str, rows: i32) -> Table {
    table_with(name, 0..rows)
}

/// Rows with those keys.
fn table_with(name: &str, keys: impl Iterator<Item = i32>) -> Table {
    let keys: Vec<i32> = keys.collect();
    let mut fields = vec![Field::new("k", DataType::Int32, false)];
    fields.extend((0..10).map(|at| Field::new(format!("{name}{at}"), DataType::Int32, false)));
    let schema = Arc::new(Schema::new(fields));
    let column = |at: i32| match at {
        0 => Arc::new(Int32Array::from(keys.clone())) as _,
        _ => Arc::new(Int32Array::from_iter_values(0..keys.len() as i32)) as _,
    };
    let batch = RecordBatch::try_new(schema.clone(), (0..11).map(column).collect()).unwrap();
    Table::from_batches(name, schema, vec![batch]).unwrap()
}

fn spec(label: &str) -> JoinSpec {
    JoinSpec { columns: vec!["k".into(), label.into()], ..JoinSpec::inner("r", "s", vec![KeyPair::new("k", "k")]) }
}

/// A batch of the result of `spec("r0")`.
fn batch(rows: i32) -> RecordBatch {
    batch_of("r0", rows)
}

/// A batch of the result of a join whose last column is `label`.
fn batch_of(label: &str, rows: i32) -> RecordBatch {
    let fields = ["k", label].map(|name| Field::new(name, DataType::Int32, false));
    let column = || Arc::new(Int32Array::from_iter_values(0..rows)) as _;
    RecordBatch::try_new(Arc::new(Schema::new(fields.to_vec())), vec![column(), column()]).unwrap()
}

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
    assert_eq!((stats.queued, stats.running, stats.retained, stats.completed_total), (0, 0, 2, 2));
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
    let low = stage.scheduler.submit(JoinSpec { priority: -10, ..spec("r1") }, "").unwrap();
    let high = stage.scheduler.submit(JoinSpec { priority: 10, ..spec("r2") }, "").unwrap();
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
fn one_tenants_flood_does_not_hold_up_another() {
    let stage = Stage::new(1);
    for label in ["r0", "r1", "r2", "r3"] {
        stage.scheduler.submit(spec(label), "flood").unwrap();
    }
    stage.scheduler.submit(spec("r9"), "calm").unwrap();
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
fn a_running_job_is_told_to_stop_and_its_readers_at_once() {
    let stage = Stage::new(1);
    let job = stage.submit("r0");
    stage.next();
    stage.scheduler.cancel(job.id).unwrap();
    // The device has not noticed yet.
    assert!(matches!(job.result.progress().1, SpoolState::Failed(Error::Cancelled(_))));
    assert!(matches!(job.status().state, JobState::Running(_)));
    let (is_raised, pushed) =
        stage.ask(0, |sink, monitor| ((monitor.cancel().is_raised(), sink.push(batch(1))), monitor.cancel().check()));
    assert!(is_raised, "the device was not told");
    assert!(matches!(pushed, Err(Error::Cancelled(_))), "a stopped job can still push: {pushed:?}");
    assert_eq!(stage.ended(&job), JobState::Cancelled);
    // Whatever a stopped job answers, it was stopped.
    let job = stage.submit("r0");
    stage.next();
    stage.scheduler.cancel(job.id).unwrap();
    stage.finish(0);
    assert_eq!(stage.ended(&job), JobState::Cancelled);
}

/// A job that was stopped while its device said that all was well once was complete, with readers who were told otherwise.
#[test]
fn a_job_that_is_stopped_as_it_ends_is_either_stopped_or_complete() {
    let stage = Stage::new(1);
    for attempt in 0..150 {
        let into = format!("kept{attempt}");
        let job = stage.scheduler.submit(JoinSpec { into: Some(into.clone()), ..spec("r0") }, "").unwrap();
        stage.next();
        // Enough rows for their statistics to take a while, as the result becomes a table.
        stage.ask(0, |sink, _| (sink.push(batch(20_000)), Ok(()))).unwrap();
        // Anywhere between before and after.
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

/// The same without luck: whoever comes first, the work's end or the one who stops it, decides.
#[test]
fn what_is_done_cannot_be_stopped_and_what_is_stopped_cannot_be_done() {
    let stage = Stage::new(1);
    let job = stage.submit("r0");
    stage.next();
    // As a worker does whose work has come to a good end, and before it says so to anybody.
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
    // It is remembered, with what it was, and cancelling it again changes nothing.
    assert_eq!(stage.scheduler.job(job.id).unwrap().status().state, JobState::Complete);
    assert_eq!(stage.scheduler.job(job.id).unwrap().status().rows, 1000);
    stage.scheduler.cancel(job.id).unwrap();
    assert!(matches!(stage.scheduler.cancel(JobId(99)), Err(Error::NotFound(_))));
}

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
fn a_lost_device_is_taken_out_of_service_and_its_job_goes_elsewhere() {
    let stage = Stage::new(2);
    let job = stage.submit("r0");
    let (lost, _) = stage.next();
    stage.tell(lost, |_, _| Err(Error::Unavailable("the context is lost".into())));
    let (other, label) = stage.next();
    assert_eq!((other, label.as_str()), (1 - lost, "r0"));
    stage.finish(other);
    assert_eq!(stage.ended(&job), JobState::Complete);
    stage.idle();
    let stats = stage.scheduler.stats();
    let lost_devices: Vec<bool> = stats.devices.iter().map(|device| device.lost.is_some()).collect();
    assert_eq!(lost_devices, [lost == 0, lost == 1]);
    assert_eq!(job.status().device.unwrap().index, other);

    // When the other one is lost too, whoever runs or waits fails, and newcomers are refused.
    let (running, waiting) = (stage.submit("r1"), stage.submit("r2"));
    assert_eq!(stage.next(), (other, "r1".into()));
    stage.tell(other, |_, _| Err(Error::Unavailable("the context is lost".into())));
    assert!(matches!(stage.ended(&running), JobState::Failed(Error::Unavailable(_))));
    assert!(matches!(stage.ended(&waiting), JobState::Failed(Error::Unavailable(_))));
    assert!(matches!(stage.scheduler.submit(spec("r3"), ""), Err(Error::Unavailable(_))));
}

#[test]
fn a_job_that_delivered_rows_is_not_run_twice() {
    let stage = Stage::new(2);
    let job = stage.submit("r0");
    let (lost, _) = stage.next();
    stage.tell(lost, |sink, _| {
        sink.push(batch(10))?;
        Err(Error::Unavailable("the context is lost".into()))
    });
    assert!(matches!(stage.ended(&job), JobState::Failed(Error::Unavailable(_))));
    stage.idle();
    stage.nothing_begins();
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
fn devices_are_asked_for_by_name() {
    let stage = Stage::new(3);
    let on = |names: &[&str]| JoinSpec {
        devices: DeviceRequest::Named(names.iter().map(ToString::to_string).collect()),
        ..spec("r0")
    };
    stage.scheduler.submit(on(&["host:2"]), "").unwrap();
    assert_eq!(stage.next().0, 2);
    let second = stage.scheduler.submit(on(&["host:2"]), "").unwrap();
    assert_eq!(second.status().state, JobState::Queued);
    let either = stage.scheduler.submit(on(&["host:1", "host:2"]), "").unwrap();
    assert_eq!(stage.next().0, 1);
    assert!(either.explanation().device.reason.contains("of the 2"), "{:?}", either.explanation().device);
    let refusal = |spec: JoinSpec| stage.scheduler.submit(spec, "").unwrap_err();
    let unknown = refusal(on(&["host:7"]));
    assert!(matches!(&unknown, Error::Invalid(text) if text.contains("host:0, host:1, host:2")), "{unknown}");
    assert!(matches!(refusal(on(&[])), Error::Invalid(_)));
    let count = |count| JoinSpec { devices: DeviceRequest::Count(count), ..spec("r0") };
    assert!(matches!(refusal(count(0)), Error::Invalid(_)));
    assert!(matches!(refusal(count(2)), Error::Unsupported(_)));
    assert_eq!(stage.scheduler.stats().refused_total, 4);
    for device in [1, 2, 2] {
        stage.finish(device);
    }
    stage.idle();
}

#[test]
fn limits_refuse_and_leave_no_trace() {
    let options = SchedulerOptions { queue_limit: 2, tenant_jobs: 2, ..SchedulerOptions::default() };
    let stage = Stage::with(1, options);
    let submit =
        |owner: &str| stage.scheduler.submit(JoinSpec { into: Some(format!("t{owner}")), ..spec("r0") }, owner);
    stage.submit("r0");
    stage.next();
    stage.submit("r1");
    let refusal = stage.scheduler.submit(spec("r2"), "").unwrap_err();
    assert!(matches!(&refusal, Error::Exhausted(text) if text.contains("--tenant-jobs")), "{refusal}");
    let queued = submit("a").unwrap();
    let refusal = submit("b").unwrap_err();
    assert!(matches!(&refusal, Error::Exhausted(text) if text.contains("--queue-limit")), "{refusal}");
    assert_eq!(stage.scheduler.jobs().len(), 3);
    // The refused one's name is free, the waiting one's is not until it is cancelled.
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
fn a_result_becomes_a_table_before_anybody_sees_its_end() {
    let stage = Stage::new(1);
    let job = stage.scheduler.submit(JoinSpec { into: Some("kept".into()), ..spec("r0") }, "me").unwrap();
    stage.next();
    stage.tell(0, |sink, _| sink.push(batch(7)));
    crate::testing::wait_until("the result to be complete", || matches!(job.result.progress().1, SpoolState::Complete));
    let table = stage.catalog.table("kept").unwrap();
    assert_eq!((table.rows, table.owner.as_str()), (7, "me"));
    stage.idle();
    let refusal = stage.scheduler.submit(JoinSpec { into: Some("kept".into()), ..spec("r0") }, "me").unwrap_err();
    assert!(matches!(refusal, Error::AlreadyExists(_)), "{refusal}");
    // A job that fails leaves no table, and the name free.
    let job = stage.scheduler.submit(JoinSpec { into: Some("other".into()), ..spec("r0") }, "me").unwrap();
    stage.next();
    stage.tell(0, |_, _| Err(Error::Internal("a test".into())));
    assert!(matches!(stage.ended(&job), JobState::Failed(_)));
    stage.idle();
    assert!(stage.catalog.reserve("other", "", "a test").is_ok());
}

#[test]
fn deadlines_end_jobs_that_wait_and_jobs_that_run() {
    let stage = Stage::new(1);
    let terms = || Submission { owner: String::new(), timeout: Some(Duration::from_secs(5)) };
    let running = stage.scheduler.submit_with(spec("r0"), terms()).unwrap();
    let waiting = stage.scheduler.submit_with(spec("r1"), terms()).unwrap();
    let patient = stage.submit("r2");
    stage.next();
    stage.clock.advance(Duration::from_millis(4_999));
    stage.scheduler.tick(SystemTime::now());
    assert_eq!(waiting.status().state, JobState::Queued);
    stage.clock.advance(Duration::from_millis(1));
    stage.scheduler.tick(SystemTime::now());
    assert!(matches!(waiting.status().state, JobState::Failed(Error::DeadlineExceeded(_))));
    assert!(stage.ask(0, |_, monitor| (monitor.cancel().is_raised(), monitor.cancel().check())));
    assert!(matches!(stage.ended(&running), JobState::Failed(Error::DeadlineExceeded(_))));
    assert_eq!(stage.next().1, "r2");
    stage.finish(0);
    assert_eq!(stage.ended(&patient), JobState::Complete);
}

#[test]
fn a_result_is_released_when_its_lease_ends_and_then_remembered() {
    let stage = Stage::with(1, SchedulerOptions { history: 2, ..SchedulerOptions::default() });
    let mut jobs = Vec::new();
    for _ in 0..3 {
        let job = stage.scheduler.submit(JoinSpec { retain_seconds: Some(60), ..spec("r0") }, "").unwrap();
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
fn a_job_that_is_over_keeps_no_table_alive() {
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
fn draining_refuses_newcomers_and_ends_what_was_admitted() {
    let stage = Stage::new(1);
    let (running, waiting) = (stage.submit("r0"), stage.submit("r1"));
    stage.next();
    stage.scheduler.drain();
    assert!(matches!(stage.scheduler.submit(spec("r2"), ""), Err(Error::Unavailable(_))));
    assert!(!stage.scheduler.wait_idle(Duration::ZERO));
    stage.finish(0);
    stage.next();
    stage.finish(0);
    stage.idle();
    assert_eq!((stage.ended(&running), stage.ended(&waiting)), (JobState::Complete, JobState::Complete));
}

#[test]
fn aborting_ends_everything() {
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

#[test]
fn a_running_jobs_explanation_has_the_phases_that_ran() {
    let stage = Stage::new(1);
    let job = stage.submit("r0");
    let before = stage.scheduler.explain(spec("r0")).unwrap();
    assert_eq!(before.measured_seconds, None);
    stage.next();
    stage.tell(0, |sink, monitor| {
        monitor.expect_work(10);
        monitor.phase("match", 42, || sink.push(batch(3)))?;
        monitor.advance(10);
        Ok(())
    });
    stage.idle();
    let after = stage.scheduler.job(job.id).unwrap().explanation();
    let matched = after.phases.iter().find(|phase| phase.name == "match").unwrap();
    assert_eq!(matched.measured_bytes, Some(42));
    assert!(matched.predicted_bytes.is_some() && matched.measured_seconds.is_some());
    assert_eq!((after.device.name.as_str(), after.result.rows), ("host:0", Some(3)));
    assert_eq!(after.strategy, before.strategy);
}

#[test]
fn a_request_that_cannot_be_planned_is_refused_before_it_is_queued() {
    let stage = Stage::new(1);
    let refusal = |spec: JoinSpec| stage.scheduler.submit(spec, "").unwrap_err();
    assert!(matches!(refusal(JoinSpec { left: "nowhere".into(), ..spec("r0") }), Error::NotFound(_)));
    assert!(matches!(refusal(JoinSpec { columns: vec!["nothing".into()], ..spec("r0") }), Error::Invalid(_)));
    assert!(stage.scheduler.jobs().is_empty());
    assert!(matches!(stage.scheduler.set_weight("a", 0.0), Err(Error::Invalid(_))));
    assert!(stage.scheduler.set_weight("a", 2.0).is_ok());
}
