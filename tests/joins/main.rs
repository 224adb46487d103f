//! Every kind of join by every strategy on host devices, against a naive join written in another way.

mod data;
mod memory;
mod merges;
mod naive;

use std::sync::Arc;

use arrow::array::RecordBatch;
use data::{Case, KeyKind};
use dovetail::catalog::{Catalog, Upload, UploadOptions};
use dovetail::device::host::HostDevice;
use dovetail::device::{CancelFlag, Device};
use dovetail::join::{self, BatchSink, Monitor};
use dovetail::memory::{Arena, Budget};
use dovetail::planner::{self, DeviceRequest, JoinKind, JoinSpec, KeyPair, Side, Strategy};
use parking_lot::Mutex;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

/// A device and a catalog, with the memory of each.
struct Bench {
    catalog: Catalog,
    device: Arc<dyn Device>,
}

impl Bench {
    fn new(threads: usize, device_memory: u64) -> Self {
        let arena = Arena::new(Budget::new("host memory", "--host-memory", 4 << 30));
        let memory = Budget::new("memory of device host:0", "--device-memory", device_memory);
        let device = Arc::new(HostDevice::new(0, threads, memory, None).unwrap());
        Self { catalog: Catalog::new(arena), device }
    }

    fn put(&self, name: &str, batches: &[RecordBatch]) {
        let options = UploadOptions { mode: dovetail::catalog::UploadMode::Replace, ..UploadOptions::default() };
        let mut upload = Upload::begin(&self.catalog, name, batches[0].schema(), options).unwrap();
        for batch in batches {
            upload.append(batch.clone()).unwrap();
        }
        upload.commit().unwrap();
    }

    fn join(&self, spec: JoinSpec, build_side: Option<Side>) -> dovetail::Result<Vec<RecordBatch>> {
        let strategy = spec.strategy;
        let mut plan = planner::plan(planner::bind(spec, &self.catalog)?, strategy)?;
        plan.build_side = build_side.unwrap_or(plan.build_side);
        let sink = Collect::default();
        join::run(&plan, &*self.device, self.catalog.arena(), &sink, &Monitor::new(CancelFlag::new()))?;
        assert_eq!(self.device.memory().used_bytes(), 0, "a join left device memory behind");
        Ok(sink.batches.into_inner())
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

fn spec(keys: usize, how: JoinKind, strategy: Strategy) -> JoinSpec {
    JoinSpec {
        left: "l".into(),
        right: "r".into(),
        on: (0..keys)
            .map(|key| KeyPair { left: format!("k{key}"), right: format!("k{key}"), nulls_equal: None })
            .collect(),
        how,
        columns: Vec::new(),
        strategy: Some(strategy),
        nulls_equal: false,
        devices: DeviceRequest::Any,
        batch_rows: None,
        priority: 0,
        retain_seconds: None,
        into: None,
    }
}

/// Runs all kinds and strategies on one pair of tables.
fn check_all(case: &Case, threads: usize, device_memory: u64, nulls_equal: bool, rng: &mut StdRng) {
    let bench = Bench::new(threads, device_memory);
    bench.put("l", &case.left.batches);
    bench.put("r", &case.right.batches);
    for how in JoinKind::ALL {
        let expected = naive::join(case, how, nulls_equal);
        for strategy in Strategy::ALL {
            let mut spec = spec(case.key_kinds.len(), how, strategy);
            spec.nulls_equal = nulls_equal;
            spec.batch_rows = [None, Some(1), Some(100)][rng.random_range(0..3)].filter(|_| expected.len() < 5000);
            let build_side = if rng.random() { Side::Left } else { Side::Right };
            let label =
                format!("{how} by {strategy}, build {build_side}, {threads} threads, {device_memory} B, {case}");
            let actual = bench.join(spec, Some(build_side)).unwrap_or_else(|error| panic!("{label}: {error}"));
            naive::assert_same_rows(&actual, &expected, &label);
        }
    }
}

/// The seed of this run: `DOVETAIL_SEED`, or a fixed one. Printed, so that a failure can be repeated.
fn seed() -> u64 {
    let seed = std::env::var("DOVETAIL_SEED").ok().and_then(|text| text.parse().ok()).unwrap_or(20_261_121);
    println!("DOVETAIL_SEED={seed}");
    seed
}

#[test]
fn random_joins_agree_with_the_naive_join() {
    let mut rng = StdRng::seed_from_u64(seed());
    for _ in 0..40 {
        let case = Case::random(&mut rng);
        let threads = rng.random_range(1..=3);
        let memory = [1 << 20, 8 << 20, 1 << 30][rng.random_range(0..3)];
        let nulls_equal = rng.random_bool(0.3);
        check_all(&case, threads, memory, nulls_equal, &mut rng);
    }
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
    // Two keys, so that every row matches about half of the other side: a million pairs from three thousand rows.
    let case = Case::with(&mut rng, &[KeyKind::Int32], 1500, 1500, 2);
    let bench = Bench::new(2, 16 << 20);
    bench.put("l", &case.left.batches);
    bench.put("r", &case.right.batches);
    let expected = naive::join(&case, JoinKind::Full, false);
    assert!(expected.len() > 500_000);
    for strategy in Strategy::ALL {
        let actual = bench.join(spec(1, JoinKind::Full, strategy), None).unwrap();
        naive::assert_same_rows(&actual, &expected, &format!("many to many by {strategy}"));
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
            planner::plan(planner::bind(spec(1, JoinKind::Inner, strategy), &bench.catalog).unwrap(), Some(strategy))
                .unwrap();
        let cancel = CancelFlag::new();
        cancel.raise();
        let stopped =
            join::run(&plan, &*bench.device, bench.catalog.arena(), &Collect::default(), &Monitor::new(cancel));
        assert!(matches!(stopped, Err(dovetail::Error::Cancelled(_))), "{strategy}: {stopped:?}");
        assert_eq!(bench.device.memory().used_bytes(), 0);
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
        let refused = bench.join(spec(1, JoinKind::Inner, strategy), None).unwrap_err();
        assert!(
            matches!(&refused, dovetail::Error::Exhausted(text) if text.contains("--device-memory")),
            "{strategy}: {refused}"
        );
        assert_eq!(bench.device.memory().used_bytes(), 0);
    }
}
