//! A join completes in the memory that its plan requests, without running out midway.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use arrow::array::{ArrayRef, BinaryArray, Int32Array, Int64Array, RecordBatch, StringArray};
use dovetail::catalog::{Catalog, Upload, UploadOptions};
use dovetail::device::host::{EmulatedLink, HostDevice};
use dovetail::device::{CancelFlag, Device, open_gpu};
use dovetail::join::{self, BatchSink, Monitor, Task, TransferOrder};
use dovetail::memory::{Arena, Budget};
use dovetail::planner::{self, JoinKind, JoinSpec, Plan, PlanOverrides, Rates, Side, Strategy, Target};

use crate::{Collect, spec};

/// Distribution of the numbers behind the keys of a side.
#[derive(Clone, Copy, Debug)]
enum Spread {
    /// All distinct, unordered.
    Distinct,
    /// Each number on four rows.
    InFours,
    /// One key on a fifth of the rows, distinct keys on the others.
    Heavy,
    /// Like `InFours`, with null keys on a quarter of the rows.
    SomeNull,
}

fn number(spread: Spread, row: usize, rows: usize) -> Option<u32> {
    let shuffled = (row * 7919 % rows) as u32;
    match spread {
        Spread::Distinct => Some(shuffled),
        Spread::InFours => Some(shuffled / 4),
        Spread::Heavy => Some(if row.is_multiple_of(5) { 3 } else { shuffled }),
        Spread::SomeNull => (!row.is_multiple_of(4)).then_some(shuffled / 4),
    }
}

/// Types of keys, by their columns and their packing.
#[derive(Clone, Copy, Debug)]
enum Kind {
    /// Four bytes, in place.
    Int32,
    /// Eight bytes, in place, and too sparse for a dense table.
    Int64,
    /// Two columns, packed into sixteen bytes.
    Composite,
    /// Too wide to pack, so hashed.
    LongString,
}

fn table(kind: Kind, spread: Spread, rows: usize, batches: usize) -> Vec<RecordBatch> {
    let numbers: Vec<Option<u32>> = (0..rows).map(|row| number(spread, row, rows)).collect();
    let int64 = || {
        let value = |number: u32| i64::from(number).wrapping_mul(0x9e37_79b9_7f4a_7c15_u64 as i64);
        Arc::new(numbers.iter().map(|number| number.map(value)).collect::<Int64Array>()) as ArrayRef
    };
    let strings = |prefix: &str| {
        let value = |number: u32| format!("{prefix}{number}");
        Arc::new(numbers.iter().map(|number| number.map(value)).collect::<StringArray>()) as ArrayRef
    };
    let keys: Vec<ArrayRef> = match kind {
        Kind::Int32 => vec![Arc::new(numbers.iter().map(|n| n.map(|n| n as i32 * 3001)).collect::<Int32Array>())],
        Kind::Int64 => vec![int64()],
        Kind::Composite => vec![int64(), strings("")],
        Kind::LongString => vec![strings("a key that does not fit in sixteen bytes, number ")],
    };
    let mut columns: Vec<(String, ArrayRef)> =
        keys.into_iter().enumerate().map(|(at, key)| (format!("k{at}"), key)).collect();
    columns.push(("row".into(), Arc::new(Int32Array::from_iter_values(0..rows as i32))));
    columns.push((
        "nullable".into(),
        Arc::new((0..rows as i64).map(|n| (n % 3 > 0).then_some(n)).collect::<Int64Array>()),
    ));
    columns.push(("text".into(), Arc::new(StringArray::from_iter_values((0..rows).map(|row| row.to_string())))));
    let whole = RecordBatch::try_from_iter_with_nullable(columns.into_iter().map(|(name, array)| (name, array, true)));
    let whole = whole.unwrap();
    let step = rows.div_ceil(batches);
    (0..rows).step_by(step).map(|start| whole.slice(start, step.min(rows - start))).collect()
}

fn put(catalog: &Catalog, name: &str, batches: &[RecordBatch]) {
    let mut upload = Upload::begin(catalog, name, batches[0].schema(), UploadOptions::default()).unwrap();
    for batch in batches {
        upload.append(batch.clone()).unwrap();
    }
    upload.commit().unwrap();
}

/// Opens devices of one kind, with any amount of memory.
trait Devices {
    fn open(&self, bytes: u64) -> Arc<dyn Device>;
    fn rates(&self) -> Rates;
    /// True if the device must gather text, however little. `None`: the planner chooses.
    fn gathers_text(&self) -> Option<bool> {
        None
    }
}

/// Host devices with `threads` threads, with or without an emulated link.
struct HostDevices {
    threads: usize,
    link: Option<EmulatedLink>,
}

impl Devices for HostDevices {
    fn open(&self, bytes: u64) -> Arc<dyn Device> {
        let memory = Budget::new("memory of device host:0", "--device-memory", bytes);
        Arc::new(HostDevice::new(0, self.threads, memory, self.link).unwrap())
    }

    fn rates(&self) -> Rates {
        Rates { reads_host_memory: self.link.is_none(), ..Rates::host(self.threads) }
    }
}

/// The first GPU.
struct Gpu;

impl Devices for Gpu {
    fn open(&self, bytes: u64) -> Arc<dyn Device> {
        open_gpu(0, 2, |_| Budget::new("memory of device cuda:0", "--device-memory", bytes)).unwrap()
    }

    fn rates(&self) -> Rates {
        Rates::h200()
    }

    fn gathers_text(&self) -> Option<bool> {
        Some(true)
    }
}

/// Plans and runs all strategies with exactly the memory that each plan requests. `retarget` may
/// lead the planner to a rare choice, and `is_so` checks that choice.
fn run_in_exact_memory(
    catalog: &Catalog,
    keys: usize,
    devices: &dyn Devices,
    label: &str,
    retarget: impl Fn(Target) -> Target,
    is_so: impl Fn(&Plan) -> bool,
) {
    for how in JoinKind::ALL {
        let mut rows = None;
        for strategy in Strategy::ALL {
            let target = retarget(Target::of(&*devices.open(1 << 30), devices.rates()));
            let bound = planner::bind(&spec(keys, how), catalog).unwrap();
            let overrides =
                PlanOverrides { device_gathers_text: devices.gathers_text(), ..PlanOverrides::named(Some(strategy)) };
            let plan = planner::plan_with_overrides(bound, &overrides, &target).unwrap();
            assert!(is_so(&plan), "{how} by {strategy}, {label}: {}", plan.reason);
            let may_come_last = how == JoinKind::Inner && strategy == Strategy::Hash;
            let columns_last: &[bool] = if may_come_last { &[false, true] } else { &[false] };
            let needs = [plan.memory.minimum_bytes, plan.memory.whole_bytes];
            for (bytes, defer_build_payload) in
                needs.into_iter().flat_map(|bytes| columns_last.iter().map(move |&last| (bytes, last)))
            {
                let label = format!(
                    "{how} by {strategy}, build {}, its columns last {defer_build_payload}, {bytes} B, {label}",
                    plan.composition.build_side
                );
                let device = devices.open(bytes);
                let sink = Collect::default();
                let task = task_that_defers(&plan, defer_build_payload);
                join::run(&Arc::new(task), &*device, catalog.arena(), &sink, &Monitor::new(CancelFlag::new()))
                    .unwrap_or_else(|error| panic!("{label}: {error}"));
                let found: usize = sink.batches.into_inner().iter().map(RecordBatch::num_rows).sum();
                assert_eq!(*rows.get_or_insert(found), found, "rows of {label}");
            }
        }
    }
}

/// Returns the plan's task. Its build payload is deferred, or comes in with the build keys.
fn task_that_defers(plan: &Plan, defer_build_payload: bool) -> Task {
    let mut task = plan.task().unwrap();
    if defer_build_payload {
        task.composition.transfer_order = TransferOrder::DeferBuildPayload;
    }
    task
}

#[test]
fn joins_run_in_the_memory_that_their_plans_request() {
    let fast = EmulatedLink { to_device_bytes_per_second: 1e12, from_device_bytes_per_second: 1e12 };
    let spreads = [Spread::Distinct, Spread::InFours, Spread::Heavy, Spread::SomeNull];
    let kinds = [(Kind::Int32, 1), (Kind::Int64, 1), (Kind::Composite, 2), (Kind::LongString, 1)];
    for (at, (kind, keys)) in kinds.into_iter().enumerate() {
        for (build_at, build) in spreads.into_iter().enumerate() {
            // Threads, batches and links take turns, because every combination would take minutes.
            let turn = at + build_at;
            let (threads, batches) = ([1, 2, 4][turn % 3], [1, 3][turn % 2]);
            let link = (turn % 4 == 3).then_some(fast);
            // Sizes on both sides of a power of two, because tables grow by powers of two.
            let rows = [4000, 4200, 17_000, 33_000][build_at];
            let catalog = Catalog::new(Arena::new(Budget::new("host memory", "--host-memory", 1 << 30)));
            put(&catalog, "l", &table(kind, build, rows, batches));
            put(&catalog, "r", &table(kind, Spread::InFours, rows + rows / 3, batches));
            let label = format!(
                "{kind:?} {build:?}, {rows} rows in {batches} batches, {threads} threads, link {}",
                link.is_some()
            );
            run_in_exact_memory(&catalog, keys, &HostDevices { threads, link }, &label, |target| target, |_| true);
        }
    }
}

/// Checks keys that a GPU makes from text, and text that a GPU gathers for the result. The GPU
/// holds all of the key text while it makes keys, or until it has compared them.
#[test]
fn joins_with_text_run_in_the_gpu_memory_that_their_plans_request() {
    if !std::env::var("DOVETAIL_TEST_DEVICE").is_ok_and(|device| device == "cuda") {
        println!("no GPU: nothing was tested");
        return;
    }
    let cases = [
        (Kind::LongString, 1, Spread::Distinct),
        (Kind::LongString, 1, Spread::InFours),
        (Kind::LongString, 1, Spread::SomeNull),
        (Kind::Composite, 2, Spread::InFours),
        (Kind::Int32, 1, Spread::SomeNull),
    ];
    for (at, (kind, keys, spread)) in cases.into_iter().enumerate() {
        let (rows, batches) = ([4000, 4200, 6000, 4000, 5000][at], [1, 3, 100, 3, 2][at]);
        let catalog = Catalog::new(Arena::new(Budget::new("host memory", "--host-memory", 1 << 30)));
        put(&catalog, "l", &table(kind, spread, rows, batches));
        put(&catalog, "r", &table(kind, Spread::InFours, rows + rows / 3, batches));
        let label = format!("{kind:?} {spread:?}, {rows} rows in {batches} batches, a GPU");
        // With the usual rates, the planner would choose the host for so few rows.
        let slow_host = |target: Target| {
            let rates = Rates { host_values: 1e6, ..target.rates };
            Target { rates, ..target }
        };
        let makes_keys = matches!(kind, Kind::LongString | Kind::Composite);
        run_in_exact_memory(&catalog, keys, &Gpu, &label, slow_host, |plan| {
            plan.composition.device_makes_keys == makes_keys && plan.composition.device_gathers_text
        });
    }
}

#[test]
fn filters_and_second_passes_take_the_predicted_memory() {
    let fast = EmulatedLink { to_device_bytes_per_second: 1e12, from_device_bytes_per_second: 1e12 };
    for (at, (kind, spread)) in
        [(Kind::Int32, Spread::Distinct), (Kind::Int64, Spread::SomeNull)].into_iter().enumerate()
    {
        let (threads, link, batches) = [(1, None, 3), (3, Some(fast), 1)][at];
        let catalog = Catalog::new(Arena::new(Budget::new("host memory", "--host-memory", 1 << 30)));
        put(&catalog, "l", &table(kind, spread, 33_000, batches));
        put(&catalog, "r", &table(kind, Spread::Distinct, 400_000, batches));
        let drops = |plan: &Plan| plan.join.how.drops_unmatched(plan.composition.build_side.other());
        // Hash tables are slow, so that a filter pays.
        let filter = |target: Target| {
            let rates = Rates { probe_rows: 1e6, ..target.rates };
            Target { rates, ..target }
        };
        let devices = HostDevices { threads, link };
        let label = format!("{kind:?} {spread:?}, {threads} threads, with filters");
        run_in_exact_memory(&catalog, 1, &devices, &label, filter, |plan| {
            plan.composition.build_side == Side::Right || plan.filtered_rows.is_some() == drops(plan)
        });
        // Only tiny partitions fit in the cache. Random reads, dense tables and filters are slow.
        let two_passes = |target: Target| {
            let rates = Rates { cache_bytes: 200, random_reads: 1e3, dense_rows: 1e3, ..target.rates };
            let mut target = Target { rates, ..target };
            target.tuning.partition_rows = 1;
            target
        };
        let label = format!("{kind:?} {spread:?}, {threads} threads, in two passes");
        run_in_exact_memory(&catalog, 1, &devices, &label, two_passes, |plan| {
            plan.composition.radix_bits().is_none_or(|bits| bits > plan.target.tuning.pass_bits_max)
        });
    }
}

/// Counts rows and drops them.
#[derive(Default)]
struct CountRows(AtomicUsize);

impl BatchSink for CountRows {
    fn push(&self, batch: RecordBatch) -> dovetail::Result<()> {
        self.0.fetch_add(batch.num_rows(), Ordering::Relaxed);
        Ok(())
    }

    /// Waits for the join's other streams. Only they hold memory, because this sink drops rows at
    /// once.
    fn wait_for_readers(&self, since: Instant) -> dovetail::Result<bool> {
        std::thread::sleep(Duration::from_millis(1));
        Ok(since.elapsed() < Duration::from_secs(20))
    }
}

/// Forty rows of 64 MiB overflow the offsets of one batch, but each row alone fits.
#[test]
fn text_too_long_for_one_batch_is_split_also_with_deferred_payload() {
    const ROWS: usize = 40;
    let catalog = Catalog::new(Arena::new(Budget::new("host memory", "--host-memory", 16 << 30)));
    let of = |name: &str, columns: Vec<(&str, ArrayRef)>| {
        put(&catalog, name, &[RecordBatch::try_from_iter(columns).unwrap()]);
    };
    let key = |rows: usize| Arc::new(Int32Array::from_iter_values(std::iter::repeat_n(7, rows))) as ArrayRef;
    of("l", vec![("k0", key(ROWS)), ("row", Arc::new(Int32Array::from_iter_values(0..ROWS as i32)))]);
    let long = vec![b'x'; 64 << 20];
    of("r", vec![("k0", key(1)), ("text", Arc::new(BinaryArray::from_vec(vec![&long])))]);
    let spec = spec(1, JoinKind::Inner);
    let mut plan = planner::plan(planner::bind(&spec, &catalog).unwrap(), Some(Strategy::Hash)).unwrap();
    // The side with many rows is built, so that the single probe row matches all of them.
    plan.composition.build_side = Side::Left;
    for defer_build_payload in [false, true] {
        let task = Task { dense_range: None, ..task_that_defers(&plan, defer_build_payload) };
        let budget = Budget::new("memory of device host:0", "--device-memory", 1 << 30);
        let device = HostDevice::new(0, 2, budget, None).unwrap().with_streams(3);
        let (sink, monitor) = (CountRows::default(), Monitor::new(CancelFlag::new()));
        join::run(&Arc::new(task), &device, catalog.arena(), &sink, &monitor)
            .unwrap_or_else(|error| panic!("last {defer_build_payload}: {error}"));
        assert_eq!(sink.0.into_inner(), ROWS, "last {defer_build_payload}");
    }
}

#[test]
fn a_result_larger_than_memory_is_delivered_also_with_deferred_payload() {
    let rows = 20_000;
    // Each build row matches four probe rows.
    for (host_bytes, device_bytes) in [(64 << 20, 64 << 20), (4 << 20, 64 << 20), (64 << 20, 3 << 20)] {
        let catalog = Catalog::new(Arena::new(Budget::new("host memory", "--host-memory", host_bytes)));
        put(&catalog, "l", &table(Kind::Int32, Spread::InFours, rows, 3));
        put(&catalog, "r", &table(Kind::Int32, Spread::InFours, rows * 4, 5));
        let spec = JoinSpec { batch_rows: Some(200), ..spec(1, JoinKind::Inner) };
        let mut plan = planner::plan(planner::bind(&spec, &catalog).unwrap(), Some(Strategy::Hash)).unwrap();
        // The plan may build on the other side at equal predicted time, but that side does not fit.
        (plan.composition.build_side, plan.composition.dense) = (Side::Left, false);
        let budget = Budget::new("memory of device host:0", "--device-memory", device_bytes);
        let device = HostDevice::new(0, 2, budget, None).unwrap().with_streams(3);
        // Build payload is deferred in all cases except the first. The last case underestimates the
        // result, so rows begin to wait although the whole result does not fit.
        let found = [(false, 4.0), (true, 4.0), (true, 0.01)].map(|(defer_build_payload, pairs_per_row)| {
            let mut task = Task { chunk_rows_min: Some(1000), ..task_that_defers(&plan, defer_build_payload) };
            task.expected.pairs_per_row = pairs_per_row;
            let (sink, monitor) = (CountRows::default(), Monitor::new(CancelFlag::new()));
            join::run(&Arc::new(task), &device, catalog.arena(), &sink, &monitor).unwrap_or_else(|error| {
                panic!("{host_bytes} and {device_bytes} B, last {defer_build_payload}, {pairs_per_row} pairs: {error}")
            });
            assert_eq!(device.memory().used_bytes(), 0, "a join left device memory in use");
            sink.0.into_inner()
        });
        assert_eq!(found, [4 * rows; 3], "{host_bytes} B of host memory, {device_bytes} B of the device");
    }
}
