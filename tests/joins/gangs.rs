//! Joins on gangs of host devices, compared with the naive join.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, LazyLock};

use arrow::array::AsArray;
use arrow::datatypes::Int64Type;
use dovetail::device::host::HostDevice;
use dovetail::device::{Device, TestOptions, gpu_count, open_gpu};
use dovetail::engine::{Engine, Grant, InProcess, PeerAccess, peer_access, run_gang};
use dovetail::join::{Composition, Distribution, Monitor, Task};
use dovetail::memory::{Budget, ReservedPool};
use dovetail::planner::{self, JoinKind, JoinSpec, PlanOverrides, Rates, Strategy, Target};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::data::Case;
use crate::naive::NullsEqual;
use crate::{Bench, Collect, is_wanted, naive, seed, spec};

/// Most ranks of a gang in these tests.
const RANKS_MAX: usize = 8;

/// File by which a test makes a device lose what it writes to a peer.
static FAULT_FILE: LazyLock<PathBuf> =
    LazyLock::new(|| std::env::temp_dir().join(format!("dovetail-gangs-{}", std::process::id())));

fn is_on_gpus() -> bool {
    std::env::var("DOVETAIL_TEST_DEVICE").as_deref() == Ok("cuda")
}

/// Opens the device of a rank: a host device, or with `DOVETAIL_TEST_DEVICE=cuda` a GPU. Several
/// ranks share a GPU if there are fewer GPUs.
fn device(rank: usize, memory: u64) -> Arc<dyn Device> {
    static GPUS: LazyLock<usize> = LazyLock::new(|| {
        let gpus = if is_on_gpus() { usize::from(gpu_count().unwrap()) } else { 1 };
        let gpus_of_one = Some(RANKS_MAX.div_ceil(gpus) as u16);
        TestOptions { gpus_of_one, fault_file: Some(FAULT_FILE.clone()) }.set();
        gpus
    });
    let gpus = *GPUS;
    let budget = |_| Budget::new(format!("memory of rank {rank}"), "--device-memory", memory);
    if !is_on_gpus() {
        // Unlike numbers of threads and streams, so that ranks take unlike chunks.
        let device = HostDevice::new(rank as u16, 1 + rank % 2, budget(0), None).unwrap();
        return Arc::new(device.with_streams(1 + rank % 3));
    }
    // Neighbours are on different GPUs, if there are several.
    let index = rank % gpus * RANKS_MAX.div_ceil(gpus) + rank / gpus;
    open_gpu(index as u16, 1 + rank % 2, budget).unwrap()
}

/// Engines of a gang, with the tables of a bench.
struct Gang {
    bench: Bench,
    devices: Vec<Arc<dyn Device>>,
    engines: Vec<Arc<dyn Engine>>,
}

impl Gang {
    /// Opens devices whose windows have the given bytes.
    fn new(ranks: usize, device_memory: u64, window_bytes: usize) -> Self {
        let bench = Bench::new(1, device_memory);
        let devices: Vec<_> = (0..ranks).map(|rank| device(rank, device_memory)).collect();
        for device in &devices {
            device.peers().unwrap().open_window(window_bytes).unwrap();
        }
        let engine = |device: &Arc<dyn Device>| -> Arc<dyn Engine> {
            Arc::new(InProcess::new(device.clone(), bench.catalog.arena().clone()))
        };
        let engines = devices.iter().map(engine).collect();
        Self { bench, devices, engines }
    }

    /// Makes one of the devices lose the next bytes that it writes to a peer.
    fn lose_push(&self, rank: usize) {
        std::fs::write(&*FAULT_FILE, format!("{} lost-push", self.devices[rank].id())).unwrap();
    }

    /// Returns the number of pairs of devices that exchange rows through host memory.
    fn pairs_through_host(&self) -> usize {
        let pairs = self.engines.iter().flat_map(|from| self.engines.iter().map(move |to| (from, to)));
        let access = pairs.map(|(from, to)| peer_access(&**from, &**to).unwrap());
        access.filter(|access| matches!(access, Some(PeerAccess::ThroughHost { .. }))).count()
    }

    /// Runs a join, and returns the distribution that the planner chose or was asked for.
    fn join(
        &self,
        spec: &JoinSpec,
        overrides: &PlanOverrides,
        chunk_rows_min: u64,
    ) -> dovetail::Result<(Composition, Vec<arrow::array::RecordBatch>)> {
        let first = &self.engines[0];
        let target = Target::new(first.id(), first.info(), first.memory(), Rates::host(2));
        let target = Target { ranks: self.engines.len(), ..target };
        let join = planner::bind(spec, &self.bench.catalog)?;
        let plan = planner::plan_with_overrides(join, overrides, &target)?;
        let ranks = plan.target.ranks;
        let task = Task { chunk_rows_min: Some(chunk_rows_min), ..plan.task()? };
        let host_memory = ReservedPool::new(self.bench.catalog.arena().budget().clone());
        let grant = || Grant { device_memory: None, host_memory: host_memory.clone() };
        let grants: Vec<Grant> = (0..ranks).map(|_| grant()).collect();
        let sink = Collect::default();
        run_gang(&self.engines[..ranks], task, &grants, &sink, &Monitor::default())?;
        for device in &self.devices {
            assert_eq!(device.memory().used_bytes(), 0, "a gang left memory of {} in use", device.id());
        }
        Ok((plan.composition, sink.batches.into_inner()))
    }
}

/// Checks all kinds and strategies on one pair of tables. Counts the distributions.
fn check_all(
    gang: &Gang,
    case: &Case,
    nulls_equal: &NullsEqual,
    rng: &mut StdRng,
    tried: &mut BTreeMap<&'static str, usize>,
) {
    gang.bench.put("l", &case.left.batches);
    gang.bench.put("r", &case.right.batches);
    for how in JoinKind::ALL {
        let wanted: Vec<Strategy> = Strategy::ALL.into_iter().filter(|_| is_wanted()).collect();
        let expected = naive::join(case, how, nulls_equal);
        for strategy in wanted {
            let spec = JoinSpec { nulls_equal: nulls_equal.whole, ..spec(case.key_kinds.len(), how) };
            let asked = [Distribution::Broadcast, Distribution::Hash][rng.random_range(0..2)];
            let shares_build_read = (asked == Distribution::Broadcast).then(|| rng.random());
            let overrides = PlanOverrides { by_name: rng.random(), ..PlanOverrides::named(Some(strategy)) };
            let overrides = PlanOverrides { distribution: Some(asked), shares_build_read, ..overrides };
            let chunk_rows_min = rng.random_range(1..300);
            let label = format!(
                "{how} by {strategy}, {asked:?} ({shares_build_read:?}) on {} ranks, {chunk_rows_min} rows, {case}",
                gang.engines.len()
            );
            // Some joins cannot be divided as asked.
            let without = PlanOverrides { shares_build_read: None, distribution: None, ..overrides };
            let run = |spec: &JoinSpec| match gang.join(spec, &overrides, chunk_rows_min) {
                Err(dovetail::Error::Invalid(_) | dovetail::Error::Unsupported(_)) => {
                    gang.join(spec, &without, chunk_rows_min)
                }
                outcome => outcome,
            };
            let run = |spec: &JoinSpec| run(spec).unwrap_or_else(|error| panic!("{label}: {error}"));
            let (composition, rows) = run(&spec);
            naive::assert_same_rows(&rows, &expected, &label);
            let (of_count, counted) = run(&JoinSpec { count: true, ..spec });
            for composition in [composition, of_count] {
                let way = if composition.shares_build_read { "shared read" } else { composition.distribution.name() };
                *tried.entry(way).or_default() += 1;
            }
            let counts: Vec<i64> = counted
                .iter()
                .flat_map(|batch| batch.column(0).as_primitive::<Int64Type>().values().to_vec())
                .collect();
            assert_eq!(counts, [expected.len() as i64], "{label}, counted");
        }
    }
}

#[test]
fn gangs_agree_with_the_naive_join() {
    let mut rng = StdRng::seed_from_u64(seed());
    let cases = if std::env::var_os("DOVETAIL_LONG").is_some() { 500 } else { 12 };
    let ranks: &[usize] = if std::env::var_os("DOVETAIL_LONG").is_some() { &[2, 3, 4, 5, RANKS_MAX] } else { &[2, 3] };
    let mut tried = BTreeMap::new();
    let mut through_host = 0;
    for _ in 0..cases {
        let case = Case::random(&mut rng);
        let memory = [8 << 20, 32 << 20, 1 << 30][rng.random_range(0..3)];
        // The streams of a GPU take 16 MiB.
        let memory = if is_on_gpus() { memory.max(64 << 20) } else { memory };
        let ranks = ranks[rng.random_range(0..ranks.len())];
        let window_bytes = ranks * [24 << 10, 100 << 10, 2 << 20][rng.random_range(0..3)];
        let gang = Gang::new(ranks, memory, window_bytes);
        let nulls_equal = NullsEqual::from(rng.random_bool(0.3));
        let is_lost = rng.random_bool(0.5);
        if is_lost {
            gang.lose_push(rng.random_range(0..ranks));
        }
        check_all(&gang, &case, &nulls_equal, &mut rng, &mut tried);
        // The file is still there if no join exchanged rows.
        let was_lost = is_lost && std::fs::remove_file(&*FAULT_FILE).is_err();
        assert_eq!(gang.pairs_through_host(), usize::from(was_lost), "one pair lost bytes");
        through_host += usize::from(was_lost);
    }
    println!("{tried:?}, {through_host} gangs with a pair through host memory");
    // Slow sanitizers run a few of the joins.
    let few = std::env::var_os("DOVETAIL_TEST_JOINS_EVERY").is_some();
    let are_tried = ["hash", "broadcast", "shared read"].iter().all(|way| tried[way] > 20);
    assert!(few || (are_tried && through_host > 0), "{tried:?}");
}
