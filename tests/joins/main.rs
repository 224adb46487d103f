//! Every kind of join by every strategy on host devices, compared with an independent naive join.

mod chains;
mod data;
mod gangs;
mod memory;
mod merges;
mod naive;

use std::any::Any;
use std::fmt;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

use arrow::array::{ArrayRef, AsArray, Int32Array, Int64Array, RecordBatch};
use arrow::buffer::Buffer;
use arrow::datatypes::Int64Type;
use data::{Case, KeyKind};
use dovetail::catalog::{Catalog, Upload, UploadOptions};
use dovetail::device::host::{EmulatedLink, HostDevice};
use dovetail::device::{CacheStats, CancelFlag, ColumnRows, Device, open_gpu};
use dovetail::join::{self, BatchSink, Monitor, RowLayout, Task, TransferOrder};
use dovetail::memory::{Arena, Budget};
use dovetail::planner::{self, JoinKind, JoinSpec, KeyPair, MovedPayload, Plan, Side, Strategy};
use naive::NullsEqual;
use parking_lot::Mutex;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};

/// A device and a catalog, with the memory of each.
struct Bench {
    catalog: Catalog,
    device: Arc<dyn Device>,
    threads: usize,
}

/// Opens a host device, or the first GPU with `DOVETAIL_TEST_DEVICE=cuda`.
fn device(threads: usize, memory: u64) -> Arc<dyn Device> {
    let budget = |name: &str| Budget::new(format!("memory of device {name}"), "--device-memory", memory);
    match std::env::var("DOVETAIL_TEST_DEVICE").as_deref() {
        Ok("cuda") => open_gpu(0, threads, |_| budget("cuda:0")).unwrap(),
        Err(_) | Ok("host") => {
            // Several streams have work if a task allows small chunks.
            let device = HostDevice::new(0, threads, budget("host:0"), None).unwrap().with_streams(3);
            Arc::new(device.joining_partitions(threads.is_multiple_of(2)))
        }
        Ok(other) => panic!("DOVETAIL_TEST_DEVICE is {other:?}; use host or cuda"),
    }
}

impl fmt::Display for Bench {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} threads, {} B", self.threads, self.device.memory().limit_bytes())
    }
}

impl Bench {
    fn new(threads: usize, device_memory: u64) -> Self {
        let arena = Arena::new(Budget::new("host memory", "--host-memory", 4 << 30));
        Self { catalog: Catalog::new(arena), device: device(threads, device_memory), threads }
    }

    fn put(&self, name: &str, batches: &[RecordBatch]) {
        self.put_with(name, batches, UploadOptions::default());
    }

    fn put_with(&self, name: &str, batches: &[RecordBatch], options: UploadOptions) {
        let options = UploadOptions { mode: dovetail::catalog::UploadMode::Replace, ..options };
        let mut upload = Upload::begin(&self.catalog, name, batches[0].schema(), options).unwrap();
        for batch in batches {
            upload.append(batch.clone()).unwrap();
        }
        upload.commit().unwrap();
    }

    fn join(&self, spec: &JoinSpec, strategy: Strategy) -> dovetail::Result<Vec<RecordBatch>> {
        self.join_as(spec, strategy, None, |_| ())
    }

    /// Plans a join, applies `change` to the plan, and runs it. On several streams, chunks may have
    /// as few rows as `chunk_rows_min`.
    fn join_as(
        &self,
        spec: &JoinSpec,
        strategy: Strategy,
        chunk_rows_min: Option<u64>,
        change: impl FnOnce(&mut Plan),
    ) -> dovetail::Result<Vec<RecordBatch>> {
        let mut plan = planner::plan(planner::bind(spec, &self.catalog)?, Some(strategy))?;
        let planned = plan.composition.build_side;
        // A device that supports text also hashes keys and gathers text.
        plan.composition.device_makes_keys = self.device.strings().is_some();
        plan.composition.device_gathers_text = plan.composition.device_makes_keys;
        change(&mut plan);
        let sink = Collect::default();
        let mut task = Task { chunk_rows_min, ..plan.task()? };
        if plan.composition.build_side != planned {
            // The keys of the other side may not be dense, and the plan has not checked that a
            // dense table of them fits.
            task.dense_range = None;
        }
        join::run(&Arc::new(task), &*self.device, self.catalog.arena(), &sink, &Monitor::new(CancelFlag::new()))?;
        let kept = cache_stats(&*self.device).unwrap_or_default().bytes;
        assert_eq!(self.device.memory().used_bytes(), kept, "a join left device memory in use");
        Ok(sink.batches.into_inner())
    }
}

/// Returns the statistics of a device that caches columns.
fn cache_stats(device: &dyn Device) -> Option<CacheStats> {
    device.cache()?.cache_stats()
}

/// The decisions of a plan that do not change the rows of the result.
#[derive(Clone, Debug)]
struct Composed {
    build_side: Side,
    /// True if a filter drops probe rows, where the kind of join allows it.
    filter: bool,
    /// Columns to move instead of all, if the strategy moves payload. Each bit is a column: the low
    /// 32 of the left table, the others of the right.
    moved_columns: Option<u64>,
    /// Radix bits for two passes, instead of the planned bits.
    radix_bits: Option<u32>,
    /// Minimum rows of a chunk on several streams, and of a part of the build side. A small minimum
    /// gives many of both.
    chunk_rows_min: Option<u64>,
    /// True if the build payload is deferred, where possible.
    defer_build_payload: bool,
    /// True if the device instead of the host hashes keys that are too wide to pack, where
    /// possible.
    device_makes_keys: bool,
    /// True if the device gathers text of the result.
    device_gathers_text: bool,
}

impl Composed {
    fn random(rng: &mut StdRng) -> Self {
        Self {
            build_side: if rng.random() { Side::Left } else { Side::Right },
            filter: rng.random(),
            moved_columns: rng.random::<bool>().then(|| rng.random()),
            radix_bits: rng.random_bool(0.1).then_some(13),
            chunk_rows_min: rng.random::<bool>().then(|| rng.random_range(1..300)),
            defer_build_payload: rng.random(),
            device_makes_keys: rng.random_bool(0.75),
            device_gathers_text: rng.random_bool(0.75),
        }
    }

    fn change(&self, plan: &mut Plan) {
        plan.composition.build_side = self.build_side;
        if self.defer_build_payload {
            plan.composition.transfer_order = TransferOrder::DeferBuildPayload;
        }
        plan.composition.device_makes_keys = self.device_makes_keys;
        plan.composition.device_gathers_text = self.device_gathers_text;
        plan.composition.filter = self.filter;
        if let (Some(bits), MovedPayload::Everything) = (self.moved_columns, &plan.composition.moved_payload) {
            let some = |bits: u64| (0..32).filter(move |column| bits >> column & 1 == 1).collect();
            plan.composition.moved_payload = MovedPayload::Columns { left: some(bits), right: some(bits >> 32) };
        }
        if let (RowLayout::Partitioned(bits), Some(wanted)) = (&mut plan.composition.row_layout, self.radix_bits) {
            bits.bits = wanted;
        }
    }
}

#[derive(Default)]
struct Collect {
    batches: Mutex<Vec<RecordBatch>>,
}

impl BatchSink for Collect {
    fn push(&self, batch: RecordBatch) -> dovetail::Result<()> {
        self.batches.lock().push(batch);
        Ok(())
    }
}

fn spec(keys: usize, how: JoinKind) -> JoinSpec {
    JoinSpec {
        how,
        ..JoinSpec::inner("l", "r", (0..keys).map(|key| KeyPair::new(&format!("k{key}"), &format!("k{key}"))).collect())
    }
}

/// True if the next join should run, in the sequence of all kinds and strategies.
/// `DOVETAIL_TEST_JOINS_EVERY=N` runs one in N, for slow sanitizers. An N without a common factor
/// with the forty joins of a case, such as seven, reaches all of them in turn.
fn is_wanted() -> bool {
    static EVERY: LazyLock<usize> = LazyLock::new(|| {
        let every = std::env::var("DOVETAIL_TEST_JOINS_EVERY").map_or(1, |every| every.parse().unwrap_or(0));
        assert!(every > 0, "DOVETAIL_TEST_JOINS_EVERY is a number from 1 on");
        every
    });
    static JOINS: AtomicUsize = AtomicUsize::new(0);
    JOINS.fetch_add(1, Ordering::Relaxed).is_multiple_of(*EVERY)
}

/// Checks all kinds and strategies on one pair of tables.
fn check_all(case: &Case, threads: usize, device_memory: u64, nulls_equal: impl Into<NullsEqual>, rng: &mut StdRng) {
    let bench = Bench::new(threads, device_memory);
    bench.put("l", &case.left.batches);
    bench.put("r", &case.right.batches);
    check_all_on(&bench, case, nulls_equal, rng, "");
}

/// Like [`check_all`], on tables that are already uploaded.
fn check_all_on(bench: &Bench, case: &Case, nulls_equal: impl Into<NullsEqual>, rng: &mut StdRng, story: &str) {
    let nulls_equal = nulls_equal.into();
    for how in JoinKind::ALL {
        let wanted: Vec<Strategy> = Strategy::ALL.into_iter().filter(|_| is_wanted()).collect();
        if wanted.is_empty() {
            continue;
        }
        let expected = naive::join(case, how, &nulls_equal);
        for strategy in wanted {
            let mut spec = spec(case.key_kinds.len(), how);
            spec.nulls_equal = nulls_equal.whole;
            for (at, pair) in spec.on.iter_mut().enumerate() {
                pair.nulls_equal = nulls_equal.of(at);
            }
            spec.batch_rows = [None, Some(1), Some(100)][rng.random_range(0..3)].filter(|_| expected.len() < 5000);
            let composed = Composed::random(rng);
            let label = format!("{how} by {strategy}, {composed:?}, {nulls_equal:?}, on {bench}, {case}{story}");
            let run = |spec: &JoinSpec| {
                bench
                    .join_as(spec, strategy, composed.chunk_rows_min, |plan| composed.change(plan))
                    .unwrap_or_else(|error| panic!("{label}: {error}"))
            };
            naive::assert_same_rows(&run(&spec), &expected, &label);
            let counted = run(&JoinSpec { count: true, ..spec });
            let count = counted[0].column(0).as_primitive::<Int64Type>();
            assert_eq!(
                (counted.len(), count.values()[..].to_vec()),
                (1, vec![expected.len() as i64]),
                "{label}, counted"
            );
        }
    }
}

/// Returns the seed of this run: `DOVETAIL_SEED`, or a fixed one. Prints it, so that a failure can
/// be repeated.
fn seed() -> u64 {
    let seed = std::env::var("DOVETAIL_SEED").ok().and_then(|text| text.parse().ok()).unwrap_or(20_261_121);
    println!("DOVETAIL_SEED={seed}");
    seed
}

#[test]
fn random_joins_agree_with_the_naive_join() {
    let mut rng = StdRng::seed_from_u64(seed());
    // A fixed number, so that every machine runs the same cases. DOVETAIL_LONG runs many more.
    let cases = if std::env::var_os("DOVETAIL_LONG").is_some() { 2000 } else { 40 };
    for _ in 0..cases {
        let case = Case::random(&mut rng);
        let threads = rng.random_range(1..=3);
        let memory = [1 << 20, 8 << 20, 1 << 30][rng.random_range(0..3)];
        let mut nulls_equal = NullsEqual::from(rng.random_bool(0.3));
        if rng.random_bool(0.4) {
            nulls_equal.by_key =
                case.key_kinds.iter().map(|_| [None, Some(false), Some(true)][rng.random_range(0..3)]).collect();
        }
        check_all(&case, threads, memory, nulls_equal, &mut rng);
    }
}

/// Opens a device of 4 MiB of memory, with `bytes` of it for cached columns.
fn device_that_keeps(bytes: u64) -> Arc<dyn Device> {
    let memory = 4 << 20;
    let device = match std::env::var("DOVETAIL_TEST_DEVICE").as_deref() {
        Ok("cuda") => device(2, memory),
        // Devices cache only columns that cross a link.
        _ => {
            let link = EmulatedLink { to_device_bytes_per_second: 1e10, from_device_bytes_per_second: 1e10 };
            let budget = Budget::new("memory of device host:0", "--device-memory", memory);
            Arc::new(HostDevice::new(0, 2, budget, Some(link)).unwrap().with_streams(3))
        }
    };
    device.cache().unwrap().enable_cache(bytes).unwrap();
    device
}

/// Once all rows of a column are on the device, a read of any part comes from the device, not over
/// the link.
#[test]
fn a_cached_column_is_read_whole_and_in_any_part() {
    const ROWS: u64 = 3000;
    let values: Vec<u32> = (0..ROWS as u32).map(|row| row.wrapping_mul(0x9e37_79b9)).collect();
    let (host, table) = (Buffer::from_slice_ref(&values), Arc::new(String::from("t")));
    let arena = Arena::new(Budget::new("host memory", "--host-memory", 1 << 20));
    let device = device_that_keeps(256 << 10);
    let stream = device.stream(CancelFlag::new()).unwrap();
    let cache = device.cache().unwrap();
    let check = |rows: Range<u64>, crosses: bool, keeps_more: bool| {
        let before = cache.cache_stats().unwrap();
        let bytes = 4 * rows.start as usize..4 * rows.end as usize;
        let part = host.slice_with_length(bytes.start, bytes.len());
        let asked: Arc<dyn Any + Send + Sync> = table.clone();
        let asked = ColumnRows { table: Arc::downgrade(&asked), column: 0, rows: rows.clone() };
        let buffer = cache.copy_in_column(&asked, std::slice::from_ref(&part), &stream).unwrap();
        assert_eq!(buffer.size_bytes(), bytes.len(), "{rows:?}");
        let found = device.copy_out(&buffer, bytes.len(), &arena, &stream).unwrap();
        assert!(found.as_slice() == part.as_slice(), "{rows:?}");
        let after = cache.cache_stats().unwrap();
        assert_eq!((after.misses > before.misses, after.bytes > before.bytes), (crosses, keeps_more), "{rows:?}");
    };
    for (rows, crosses, keeps_more) in [
        (0..1024, true, true),
        (1024..2048, true, true),
        // The first read of both parts merges them. Later reads use the merged buffer.
        (0..2048, false, true),
        (0..2048, false, false),
        (1024..2048, false, false),
        // From the middle, at aligned and unaligned offsets of a buffer.
        (64..200, false, false),
        (67..68, false, false),
        (1000..2047, false, false),
        (2000..2500, true, true),
        (2048..ROWS, true, true),
        (0..ROWS, false, true),
        (1..ROWS, false, false),
    ] {
        check(rows, crosses, keeps_more);
    }
    let kept = cache.cache_stats().unwrap();
    assert_eq!((device.memory().used_bytes(), kept.evictions), (kept.bytes, 0), "only cached columns are left");
    // A job needs most of the memory. The most recently used columns stay.
    let job = device.memory().reserve(device.memory().limit_bytes() - 20_000, "a job").unwrap();
    check(0..ROWS, false, false);
    check(1024..2048, false, false);
    drop(job);
}

#[test]
fn cached_columns_are_used_only_for_the_table_that_they_belong_to() {
    let mut rng = StdRng::seed_from_u64(seed() ^ 7);
    let arena = Arena::new(Budget::new("host memory", "--host-memory", 1 << 30));
    // The cache has room for the columns of some tables, so that others are evicted.
    let device = device_that_keeps(64 << 10);
    let bench = Bench { catalog: Catalog::new(arena), device, threads: 2 };
    let mut hits = 0;
    for round in 0..6 {
        let case = Case::with(&mut rng, &[KeyKind::Int32], 400 + round, 500, 200);
        // The same names, with a similar number of rows.
        bench.put("l", &case.left.batches);
        bench.put("r", &case.right.batches);
        check_all_on(&bench, &case, false, &mut rng, ", with cached columns");
        let stats = cache_stats(&*bench.device).unwrap();
        assert!(stats.hits > hits, "the second join of two tables found nothing on the device: {stats:?}");
        assert!(stats.bytes <= stats.limit_bytes, "{stats:?}");
        hits = stats.hits;
    }
    assert!(cache_stats(&*bench.device).unwrap().evictions > 0, "{:?}", cache_stats(&*bench.device));
}

#[test]
fn every_key_type_joins() {
    let mut rng = StdRng::seed_from_u64(seed() ^ 1);
    for kind in KeyKind::ALL {
        let case = Case::with(&mut rng, &[kind], 300, 500, 100);
        check_all(&case, 2, 64 << 20, false, &mut rng);
        check_all(&case, 2, 64 << 20, true, &mut rng);
    }
}

#[test]
fn composite_keys_join_whether_packed_or_hashed() {
    let mut rng = StdRng::seed_from_u64(seed() ^ 2);
    let composites: [&[KeyKind]; 5] = [
        &[KeyKind::Int32, KeyKind::Int32],
        &[KeyKind::Int64, KeyKind::ShortString],
        &[KeyKind::LongString, KeyKind::Int32],
        &[KeyKind::Decimal256, KeyKind::Boolean],
        &[KeyKind::Int64, KeyKind::Int64, KeyKind::Float64, KeyKind::LongString],
    ];
    for kinds in composites {
        let case = Case::with(&mut rng, kinds, 400, 300, 12);
        check_all(&case, 2, 64 << 20, false, &mut rng);
        check_all(&case, 1, 64 << 20, true, &mut rng);
        // Nulls match in the first key only, or in all keys except the first.
        let first = |said: bool| NullsEqual { whole: !said, by_key: vec![Some(said)] };
        check_all(&case, 2, 64 << 20, first(true), &mut rng);
        check_all(&case, 2, 64 << 20, first(false), &mut rng);
    }
}

#[test]
fn empty_sides_join() {
    let mut rng = StdRng::seed_from_u64(seed() ^ 3);
    for (left, right) in [(0, 0), (0, 10), (10, 0)] {
        for kind in [KeyKind::Int32, KeyKind::LongString] {
            let case = Case::with(&mut rng, &[kind], left, right, 5);
            check_all(&case, 2, 1 << 20, false, &mut rng);
        }
    }
}

#[test]
fn sizes_around_boundaries_join() {
    let mut rng = StdRng::seed_from_u64(seed() ^ 4);
    for rows in [1, 2, 15, 16, 17, 1023, 1024, 1025, 4097] {
        let case = Case::with(&mut rng, &[KeyKind::Int32], rows, rows + 1, rows.max(2));
        check_all(&case, 2, 1 << 20, false, &mut rng);
    }
}

#[test]
fn many_to_many_results_are_far_larger_than_their_inputs() {
    let mut rng = StdRng::seed_from_u64(seed() ^ 5);
    // Two keys, so that every row matches half of the other side: a million pairs from 3000 rows.
    let keys = || (0..1500).map(|row| Some(row % 2)).collect();
    let case = Case::of(&mut rng, KeyKind::Int32, keys(), keys());
    let bench = Bench::new(2, 16 << 20);
    bench.put("l", &case.left.batches);
    bench.put("r", &case.right.batches);
    let expected = naive::join(&case, JoinKind::Full, &NullsEqual::default());
    assert_eq!(expected.len(), 1500 * 750);
    for strategy in Strategy::ALL {
        let actual = bench.join(&spec(1, JoinKind::Full), strategy).unwrap();
        naive::assert_same_rows(&actual, &expected, &format!("many to many by {strategy}"));
    }
}

#[test]
fn counts_go_beyond_32_bits() {
    const ROWS: i64 = 70_000;
    let bench = Bench::new(2, 64 << 20);
    let sevens: ArrayRef = Arc::new(Int32Array::from_iter_values((0..ROWS).map(|_| 7)));
    let batch = RecordBatch::try_from_iter([("k0", sevens)]).unwrap();
    bench.put("l", std::slice::from_ref(&batch));
    bench.put("r", &[batch]);
    for strategy in Strategy::ALL {
        for (how, rows) in [(JoinKind::Inner, ROWS * ROWS), (JoinKind::Full, ROWS * ROWS), (JoinKind::LeftSemi, ROWS)] {
            let counted = bench.join(&JoinSpec { count: true, ..spec(1, how) }, strategy).unwrap();
            assert_eq!(counted[0].column(0).as_primitive::<Int64Type>().value(0), rows, "{how} by {strategy}");
        }
    }
}

#[test]
fn a_raised_flag_stops_a_join_and_frees_its_memory() {
    let mut rng = StdRng::seed_from_u64(seed() ^ 6);
    let case = Case::with(&mut rng, &[KeyKind::Int32], 1000, 1000, 50);
    let bench = Bench::new(2, 64 << 20);
    bench.put("l", &case.left.batches);
    bench.put("r", &case.right.batches);
    for strategy in Strategy::ALL {
        let plan =
            planner::plan(planner::bind(&spec(1, JoinKind::Inner), &bench.catalog).unwrap(), Some(strategy)).unwrap();
        let cancel = CancelFlag::new();
        cancel.raise();
        let stopped = join::run(
            &Arc::new(plan.task().unwrap()),
            &*bench.device,
            bench.catalog.arena(),
            &Collect::default(),
            &Monitor::new(cancel),
        );
        assert!(matches!(stopped, Err(dovetail::Error::Cancelled(_))), "{strategy}: {stopped:?}");
        assert_eq!(bench.device.memory().used_bytes(), 0);
    }
}

/// Checks the inputs for which the planner and the join have shortcuts: sorted rows, declared or
/// detected, and distinct keys without gaps.
#[test]
fn sorted_and_dense_unique_keys_join_declared_or_not() {
    let mut rng = StdRng::seed_from_u64(seed() ^ 8);
    let dense = |rows: u32| (0..rows).map(Some).collect::<Vec<_>>();
    let repeated = |rows: u32| (0..rows).map(|row| Some(row / 3)).collect::<Vec<_>>();
    let with_nulls = |rows: u32| (0..rows).map(|row| (row >= 10).then_some(row / 2)).collect::<Vec<_>>();
    let reversed = |keys: Vec<Option<u32>>| keys.into_iter().rev().collect::<Vec<_>>();
    let shuffled = |mut keys: Vec<Option<u32>>, rng: &mut StdRng| {
        keys.shuffle(rng);
        keys
    };
    // In these types, greater numbers are greater values, so that a table may be declared sorted.
    for kind in [KeyKind::Int32, KeyKind::Timestamp, KeyKind::Decimal128] {
        let cases = [
            ("dense, sorted; repeated, sorted", dense(200), repeated(450), true),
            ("repeated, sorted; repeated, sorted", repeated(260), repeated(330), true),
            ("nulls first, sorted", with_nulls(180), with_nulls(250), true),
            (
                "dense, shuffled; repeated, shuffled",
                shuffled(dense(200), &mut rng),
                shuffled(repeated(450), &mut rng),
                false,
            ),
            ("dense, reversed; repeated, sorted", reversed(dense(256)), repeated(600), false),
        ];
        for (story, left, right, is_sorted) in cases {
            let is_unique = story.starts_with("dense");
            let case = Case::of(&mut rng, kind, left, right);
            let key = || vec!["k0".to_owned()];
            let declared = |is_unique: bool| UploadOptions {
                sorted_by: if is_sorted { key() } else { Vec::new() },
                unique: if is_unique { vec![key()] } else { Vec::new() },
                ..UploadOptions::default()
            };
            let bench = Bench::new(2, 64 << 20);
            for says in [false, true] {
                let (left, right) = match says {
                    false => (UploadOptions::default(), UploadOptions::default()),
                    true => (declared(is_unique), declared(false)),
                };
                bench.put_with("l", &case.left.batches, left);
                bench.put_with("r", &case.right.batches, right);
                let story = format!("; {story}, {}", if says { "declared" } else { "not declared" });
                check_all_on(&bench, &case, rng.random::<bool>(), &mut rng, &story);
            }
        }
    }
}

/// A sink that drops all batches, so that a long join does not fill the memory.
struct Discard;

impl BatchSink for Discard {
    fn push(&self, _: RecordBatch) -> dovetail::Result<()> {
        Ok(())
    }
}

/// The guarantee is 100 ms from raising the flag to the end of the job, at any stage of the join. A
/// busy test machine may delay threads for longer, so each stage has several attempts.
#[test]
fn a_join_under_way_stops_within_100_ms_of_its_flag() {
    const BEST: Duration = Duration::from_millis(100);
    const WORST: Duration = Duration::from_secs(5);
    const ATTEMPTS: usize = 6;
    let mut rng = StdRng::seed_from_u64(seed() ^ 9);
    let bench = Bench::new(2, 1 << 30);
    for (name, rows) in [("l", 3_000_000), ("r", 6_000_000)] {
        let keys = Int64Array::from_iter_values((0..rows).map(|_| rng.random_range(0..3_000_000)));
        let payload = Int64Array::from_iter_values(0..rows);
        let columns: [(&str, ArrayRef); 2] = [("k0", Arc::new(keys)), ("payload", Arc::new(payload))];
        bench.put(name, &[RecordBatch::try_from_iter(columns).unwrap()]);
    }
    for strategy in Strategy::ALL {
        let bound = planner::bind(&spec(1, JoinKind::Inner), &bench.catalog).unwrap();
        let plan = planner::plan(bound, Some(strategy)).unwrap();
        let run = |cancel: CancelFlag| {
            join::run(
                &Arc::new(plan.task().unwrap()),
                &*bench.device,
                bench.catalog.arena(),
                &Discard,
                &Monitor::new(cancel),
            )
        };
        let start = Instant::now();
        run(CancelFlag::new()).unwrap();
        let mut whole = start.elapsed();
        let mut stop_at = |share: f64| {
            let cancel = CancelFlag::new();
            let start = Instant::now();
            let (outcome, ended, raised) = std::thread::scope(|scope| {
                let join = scope.spawn(|| (run(cancel.clone()), Instant::now()));
                std::thread::sleep(whole.mul_f64(share));
                let raised = Instant::now();
                cancel.raise();
                let (outcome, ended) = join.join().unwrap();
                (outcome, ended, raised)
            });
            let taken = ended.saturating_duration_since(raised);
            assert!(taken < WORST, "{strategy} stopped after {taken:?}");
            assert_eq!(bench.device.memory().used_bytes(), 0, "{strategy}");
            match outcome {
                Err(dovetail::Error::Cancelled(_)) => Some(taken),
                // The machine was less busy than before, and the join had already finished.
                Ok(()) => {
                    whole = whole.min(ended - start);
                    None
                }
                Err(other) => panic!("{strategy}: {other}"),
            }
        };
        for share in [0.02, 0.2, 0.4, 0.6, 0.8] {
            let mut taken = Vec::new();
            while taken.len() < ATTEMPTS && !taken.iter().flatten().any(|&time| time < BEST) {
                taken.push(stop_at(share));
            }
            println!("{strategy}: at {share} of its time, stopped after {taken:?}");
            let best = taken.iter().flatten().min();
            assert!(
                best.is_none_or(|&best| best < BEST),
                "{strategy}, at {share} of its time, stopped after {taken:?}"
            );
            // Near its end, the join may have finished at each attempt.
            assert!(share > 0.5 || best.is_some(), "{strategy} was never stopped under way, at {share} of its time");
        }
    }
}

#[test]
fn a_device_that_is_too_small_refuses_and_stays_empty() {
    let mut rng = StdRng::seed_from_u64(seed() ^ 7);
    let case = Case::with(&mut rng, &[KeyKind::Int64], 100_000, 100_000, 100_000);
    let bench = Bench::new(2, 4096);
    bench.put("l", &case.left.batches);
    bench.put("r", &case.right.batches);
    for strategy in Strategy::ALL {
        let refused = bench.join(&spec(1, JoinKind::Inner), strategy).unwrap_err();
        assert!(
            matches!(&refused, dovetail::Error::Exhausted(text) if text.contains("--device-memory")),
            "{strategy}: {refused}"
        );
        assert_eq!(bench.device.memory().used_bytes(), 0);
    }
}
