//! Tests of the scheduler, with devices that follow the test's orders, and a clock that stands
//! still.

mod classes;
mod failing;
mod giving_back;
mod kept;
mod marking;
mod memory;
mod real;
mod results;
mod sets;
mod shared_turns;
mod sharing;
mod stopping;
mod taking;
mod topologies;
mod tracing;
mod turns;
mod unlike;

use std::collections::{BTreeSet, HashMap};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Weak};
use std::time::{Duration, SystemTime};

use arrow::array::{Int32Array, RecordBatch};
use arrow::datatypes::{DataType, Field, Schema};
use parking_lot::Mutex;

use super::clock::ManualClock;
use super::*;
use crate::catalog::{Catalog, Editor, SpoolState, Table};
use crate::device::host::HostDevice;
use crate::device::{CacheStats, ColumnRows, DeviceId, DeviceInfo, DeviceKind};
use crate::engine::{DeviceRates, Engine, Grant, MemoryUse, Prepared};
use crate::join::{BatchSink, Monitor, Rank, RowSource, Task};
use crate::memory::{Arena, Budget, Interrupt};
use crate::planner::{Explanation, JoinKind, JoinSpec, KeyPair, Rates, bind};
use crate::{Error, Result};

/// Action of a device on its job.
type Order = Box<dyn FnOnce(&dyn BatchSink, &Monitor) -> Result<()> + Send>;

/// Device that announces each job by the column that the join asks for, and then follows its order.
#[derive(Debug)]
struct Puppet {
    device: u16,
    begun: Mutex<Sender<(u16, String)>>,
    orders: Mutex<Receiver<Order>>,
    own_orders: OwnOrders,
    lost: Arc<AtomicBool>,
    id: DeviceId,
    info: DeviceInfo,
    memory: Budget,
    jobs_max: usize,
    rates: DeviceRates,
    /// Rows of the first column of every table that the device has cached.
    cached: Arc<Mutex<Range<u64>>>,
    /// Peers whose windows it was told to unmap.
    unmapped: Arc<Mutex<Vec<DeviceId>>>,
}

fn context_lost() -> Error {
    Error::Unavailable("the context is lost".into())
}

/// Orders of jobs that have a channel of their own, by label. Used when a device has several jobs.
type OwnOrders = Arc<Mutex<HashMap<String, Receiver<Order>>>>;

impl Engine for Puppet {
    fn id(&self) -> DeviceId {
        self.id
    }

    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn memory(&self) -> &Budget {
        &self.memory
    }

    fn memory_use(&self) -> MemoryUse {
        MemoryUse::default()
    }

    fn jobs_max(&self) -> usize {
        self.jobs_max
    }

    fn rates(&self) -> &DeviceRates {
        &self.rates
    }

    fn set_rates(&mut self, rates: DeviceRates) {
        self.rates = rates;
    }

    fn cached_rows(&self, table: &Arc<Table>) -> Vec<ColumnRows> {
        let rows = self.cached.lock().clone();
        let table: Weak<Table> = Arc::downgrade(table);
        if rows.is_empty() { Vec::new() } else { vec![ColumnRows { table, column: 0, rows }] }
    }

    fn cache_stats(&self) -> Option<CacheStats> {
        None
    }

    fn measure_rates(&self, _tell: &dyn Fn(f64)) -> Option<Rates> {
        None
    }

    fn run_rank(&self, task: Task, _: &Rank, _: &Grant, sink: &dyn BatchSink, monitor: &Monitor) -> Result<()> {
        assert!(!task.build.table.batches.is_empty(), "a job that runs has its tables");
        let label = task.output.last().unwrap().name.clone();
        let own = self.own_orders.lock().remove(&label);
        self.begun.lock().send((self.device, label)).unwrap();
        let order = match own {
            Some(own) => own.recv(),
            None => self.orders.lock().recv(),
        };
        let order = order.map_err(|_| Error::Internal("the test is over".into()))?;
        let outcome = order(sink, monitor);
        self.lost.fetch_or(outcome.as_ref().is_err_and(|error| *error == context_lost()), Ordering::Relaxed);
        outcome
    }

    fn prepare(&self, _: Task, _: &dyn RowSource, _: &Grant, _: &Monitor) -> Result<Box<dyn Prepared>> {
        unreachable!("the scheduler prepares no joins")
    }

    fn disconnect(&self, peer: DeviceId) {
        self.unmapped.lock().push(peer);
    }

    fn check(&self) -> Result<()> {
        if self.lost.load(Ordering::Relaxed) { Err(context_lost()) } else { Ok(()) }
    }
}

struct Stage {
    /// Dropped first: without orders to wait for, jobs end. Then the threads end that the scheduler
    /// waits for.
    orders: Vec<Sender<Order>>,
    scheduler: Scheduler,
    catalog: Catalog,
    clock: Arc<ManualClock>,
    memory: Vec<Budget>,
    begun: Receiver<(u16, String)>,
    own_orders: OwnOrders,
    lost: Vec<Arc<AtomicBool>>,
    /// True for each device that has the first column of every table cached.
    cached: Vec<Arc<Mutex<Range<u64>>>>,
    unmapped: Vec<Arc<Mutex<Vec<DeviceId>>>>,
}

/// Longer than any step takes, so that a wrong test fails instead of hanging.
const PATIENCE: Duration = Duration::from_secs(30);

impl Stage {
    fn new(devices: u16) -> Self {
        Self::with(devices, SchedulerOptions::default())
    }

    fn with(devices: u16, options: SchedulerOptions) -> Self {
        Self::with_jobs(devices, 1, options)
    }

    /// Creates devices that run up to `jobs_max` jobs at a time.
    fn with_jobs(devices: u16, jobs_max: usize, options: SchedulerOptions) -> Self {
        let host = |index| (DeviceId { kind: DeviceKind::Host, index }, Rates::host(1));
        Self::of((0..devices).map(host).collect(), jobs_max, options)
    }

    /// Creates devices with the given rates, and 1 MiB of memory each.
    fn of(devices: Vec<(DeviceId, Rates)>, jobs_max: usize, options: SchedulerOptions) -> Self {
        let sized = |(id, rates)| (id, 1 << 20, rates);
        Self::of_sizes(devices.into_iter().map(sized).collect(), jobs_max, options)
    }

    /// Creates devices with the given bytes of memory and rates.
    fn of_sizes(devices: Vec<(DeviceId, u64, Rates)>, jobs_max: usize, options: SchedulerOptions) -> Self {
        let measured = |(id, memory_bytes, rates)| (id, memory_bytes, DeviceRates::measured_now(rates));
        Self::of_rates(devices.into_iter().map(measured).collect(), &|_| (), jobs_max, options)
    }

    /// Creates devices with the given bytes of memory and rates. `change` changes their
    /// description.
    fn of_rates(
        devices: Vec<(DeviceId, u64, DeviceRates)>,
        change: &dyn Fn(&mut DeviceInfo),
        jobs_max: usize,
        options: SchedulerOptions,
    ) -> Self {
        let catalog = Catalog::new(Arena::new(Budget::new("host memory", "--host-memory", 64 << 20)));
        for name in ["r", "s"] {
            catalog.create(table(name)).unwrap();
        }
        let (begin, begun) = channel();
        let own_orders = OwnOrders::default();
        let (mut engines, mut orders, mut memory) = (Vec::<Arc<dyn Engine>>::new(), Vec::new(), Vec::new());
        let (mut lost, mut cached, mut unmapped) =
            (Vec::new(), Vec::<Arc<Mutex<_>>>::new(), Vec::<Arc<Mutex<_>>>::new());
        for (device, (id, memory_bytes, rates)) in (0..).zip(devices) {
            let (order, receive) = channel();
            let budget = Budget::new(format!("memory of {id}"), "--device-memory", memory_bytes);
            let mut info = DeviceInfo::of(&HostDevice::new(0, 1, budget.clone(), None).unwrap());
            change(&mut info);
            memory.push(budget.clone());
            orders.push(order);
            lost.push(Arc::new(AtomicBool::default()));
            cached.push(Arc::new(Mutex::new(0..0)));
            unmapped.push(Arc::new(Mutex::new(Vec::new())));
            engines.push(Arc::new(Puppet {
                device,
                begun: Mutex::new(begin.clone()),
                orders: Mutex::new(receive),
                own_orders: own_orders.clone(),
                lost: lost[device as usize].clone(),
                id,
                info,
                memory: budget,
                jobs_max,
                rates,
                cached: cached[device as usize].clone(),
                unmapped: unmapped[device as usize].clone(),
            }));
        }
        let clock = Arc::new(ManualClock::default());
        let options = SchedulerOptions { timer: false, ..options };
        let scheduler = Scheduler::with_clock(catalog.clone(), engines, options, clock.clone());
        Self { scheduler, catalog, clock, memory, begun, orders, own_orders, lost, cached, unmapped }
    }

    /// Gives the next job with that label a channel of its own for orders.
    fn direct(&self, label: &str) -> Sender<Order> {
        let (order, receive) = channel();
        self.own_orders.lock().insert(label.into(), receive);
        order
    }

    /// Submits a join whose last column is `label` (one of `r0` to `r9`).
    fn submit(&self, label: &str) -> Arc<Job> {
        self.submit_join(&spec(label), JobOptions::default(), "").unwrap()
    }

    fn submit_join(&self, spec: &JoinSpec, options: JobOptions, owner: &str) -> Result<Arc<Job>> {
        submit(&self.scheduler, &self.catalog, spec, options, owner)
    }

    fn explain(&self, spec: &JoinSpec, options: &JobOptions) -> Explanation {
        explain(&self.scheduler, &self.catalog, spec, options)
    }

    /// Returns the next job that a device begins.
    fn next(&self) -> (u16, String) {
        self.begun.recv_timeout(PATIENCE).expect("a device begins a job")
    }

    /// Returns the devices of the next gang, and the label of its job.
    fn next_gang(&self, ranks: usize) -> (BTreeSet<u16>, String) {
        let begun: Vec<_> = (0..ranks).map(|_| self.next()).collect();
        assert!(begun.iter().all(|(_, label)| *label == begun[0].1), "{begun:?}");
        (begun.iter().map(|(device, _)| *device).collect(), begun[0].1.clone())
    }

    fn nothing_begins(&self) {
        assert!(self.begun.try_recv().is_err(), "a job began too early");
    }

    fn tell(&self, device: u16, order: impl FnOnce(&dyn BatchSink, &Monitor) -> Result<()> + Send + 'static) {
        self.orders[device as usize].send(Box::new(order)).unwrap();
    }

    /// Returns the answer of a running job. Assertions belong to the test's thread: on the device's
    /// thread they would be the job's panic.
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

    /// Waits until a job has ended.
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

    /// Waits until no device has a job, and each has looked for the next one.
    fn devices_are_free(&self) {
        let end = std::time::Instant::now() + PATIENCE;
        while self.scheduler.stats().running > 0 {
            assert!(std::time::Instant::now() < end, "a device keeps its job");
            std::thread::yield_now();
        }
    }

    fn idle(&self) {
        assert!(self.scheduler.wait_idle(PATIENCE), "the scheduler does not become idle");
    }
}

/// Binds and submits a join.
fn submit(
    scheduler: &Scheduler,
    catalog: &Catalog,
    spec: &JoinSpec,
    options: JobOptions,
    owner: &str,
) -> Result<Arc<Job>> {
    scheduler.submit(bind(spec, catalog)?, options, Submission { owner: owner.into(), ..Submission::default() })
}

fn explain(scheduler: &Scheduler, catalog: &Catalog, spec: &JoinSpec, options: &JobOptions) -> Explanation {
    scheduler.explain(bind(spec, catalog).unwrap(), options, "", &Interrupt::default()).unwrap()
}

fn on(devices: &[&str]) -> JobOptions {
    let named = devices.iter().map(ToString::to_string).collect();
    JobOptions { devices: DeviceRequest::Named(named), ..JobOptions::default() }
}

/// Rows with columns `k` and `r0` to `r9` (or `s0` to `s9`).
fn table(name: &str) -> Table {
    rows_of(name, 100)
}

fn rows_of(name: &str, rows: i32) -> Table {
    table_with(name, 0..rows)
}

/// Rows with the given keys.
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

/// Batch of the result of `spec("r0")`.
fn batch(rows: i32) -> RecordBatch {
    batch_of("r0", rows)
}

/// Batch of the result of a join whose last column is `label`.
fn batch_of(label: &str, rows: i32) -> RecordBatch {
    let fields = ["k", label].map(|name| Field::new(name, DataType::Int32, false));
    let column = || Arc::new(Int32Array::from_iter_values(0..rows)) as _;
    RecordBatch::try_new(Arc::new(Schema::new(fields.to_vec())), vec![column(), column()]).unwrap()
}
