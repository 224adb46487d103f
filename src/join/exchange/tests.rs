//! The exchange of a gang whose threads take turns in an order that a seed decides, and whose
//! ranks, threads and server may end at any step.

use std::collections::BTreeMap;

use arrow::array::{AsArray, Int32Array, RecordBatch};
use arrow::datatypes::{DataType, Field, Int32Type, Schema};

use super::*;
use crate::catalog::{Catalog, Table};
use crate::device::host::HostDevice;
use crate::device::{CancelFlag, DeviceInfo, PeerOps, PeerWindow};
use crate::join::inputs::BUILD_ROWS_MAX;
use crate::join::run_rank;
use crate::memory::Budget;
use crate::planner::{JoinSpec, KeyPair, PlanOverrides, Rates, Strategy, Target, bind, plan_with_overrides};
use crate::testing::seed;
use crate::turns::{Turns, sleep};

/// Rows of each side: several chunks, and the last is small.
const BUILD_ROWS: i32 = 1100;
const PROBE_ROWS: i32 = 1300;

/// Bytes of a slot for about a hundred rows: two columns of four bytes, each aligned.
const SLOT_BYTES: usize = 1280;

/// Group of the server's task. The groups of other tasks are their ranks.
const SERVER: usize = usize::MAX;

/// Row of the result: row numbers of both sides.
type Pair = (i32, i32);

/// Event at a step of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Event {
    Nothing,
    /// The thread at this step panics: a source or a receiver.
    ThreadFails(u64),
    /// The process at this step ends with all its threads. The server notices that later.
    ProcessEnds(u64),
    /// The server ends. Each process notices that at a time of its own.
    ServerEnds(u64),
}

/// Run that can be repeated.
#[derive(Clone, Copy, Debug)]
struct Run {
    seed: u64,
    event: Event,
}

/// Gang whose devices have tiny windows, over tables of few rows.
struct Stage {
    catalog: Catalog,
    devices: Vec<HostDevice>,
    task: Arc<Task>,
    pairs: Vec<Pair>,
    /// Most build rows of a rank, if they are fewer than positions can address.
    build_rows_max: Option<u64>,
}

/// Outcome and rows of each rank.
struct Ended {
    ranks: Vec<(Result<()>, Vec<Pair>)>,
    /// Rows of the build side that each rank has indexed.
    build_rows: Vec<u64>,
    steps: u64,
    trace: u64,
}

/// Keeps the rows of a rank.
#[derive(Default)]
struct Pairs(Mutex<Vec<Pair>>);

impl BatchSink for Pairs {
    fn push(&self, batch: RecordBatch) -> Result<()> {
        let numbers = |name: &str| batch.column_by_name(name).unwrap().as_primitive::<Int32Type>().clone();
        let (a, b) = (numbers("a"), numbers("b"));
        self.0.lock().extend(a.values().iter().copied().zip(b.values().iter().copied()));
        Ok(())
    }
}

fn build_key(row: i32) -> i32 {
    row * 7919 % 1000
}

fn probe_key(row: i32) -> i32 {
    row * 104_729 % 1300
}

impl Stage {
    fn new(ranks: usize, distribution: Distribution) -> Self {
        let catalog = Catalog::new(Arena::new(Budget::new("host memory", "--host-memory", 1 << 30)));
        let create = |name: &str, column: &str, rows: i32, key: fn(i32) -> i32| {
            let field = |name: &str| Field::new(name, DataType::Int32, false);
            let schema = Arc::new(Schema::new(vec![field("k"), field(column)]));
            let keys = Arc::new(Int32Array::from_iter_values((0..rows).map(key)));
            let numbers = Arc::new(Int32Array::from_iter_values(0..rows));
            let batch = RecordBatch::try_new(schema.clone(), vec![keys, numbers]).unwrap();
            catalog.create(Table::from_batches(name, schema, vec![batch]).unwrap()).unwrap();
        };
        create("l", "a", BUILD_ROWS, build_key);
        create("r", "b", PROBE_ROWS, probe_key);
        let devices: Vec<HostDevice> = (0..ranks)
            .map(|index| {
                let budget = Budget::new("device memory", "--device-memory", 64 << 20);
                let device = HostDevice::new(index as u16, 1, budget, None).unwrap();
                device.open_window((ranks - 1) * channel::SLOTS * SLOT_BYTES).unwrap();
                device
            })
            .collect();
        for (writer, owner) in devices.iter().flat_map(|writer| devices.iter().map(move |owner| (writer, owner))) {
            if writer.id() != owner.id() {
                let file = owner.window_file().unwrap().try_clone_to_owned().unwrap();
                writer.map_window(owner.id(), PeerWindow::Device { file, bytes: owner.window_bytes() }).unwrap();
            }
        }
        let first = &devices[0];
        let target = Target::new(first.id(), &DeviceInfo::of(first), first.memory(), Rates::host(1));
        let overrides = PlanOverrides {
            distribution: Some(distribution),
            shares_build_read: Some(distribution == Distribution::Broadcast),
            ..PlanOverrides::named(Some(Strategy::Hash))
        };
        let join = bind(&JoinSpec::inner("l", "r", vec![KeyPair::new("k", "k")]), &catalog).unwrap();
        let plan = plan_with_overrides(join, &overrides, &Target { ranks, ..target }).unwrap();
        let task = Task { chunk_rows_min: Some(1), ..plan.task().unwrap() };
        assert!(task.composition.exchanges_rows());
        let mut by_key = BTreeMap::<i32, Vec<i32>>::new();
        (0..BUILD_ROWS).for_each(|row| by_key.entry(build_key(row)).or_default().push(row));
        let of_row = |row: i32| by_key.get(&probe_key(row)).into_iter().flatten().map(move |&build| (build, row));
        let mut pairs: Vec<Pair> = (0..PROBE_ROWS).flat_map(of_row).collect();
        pairs.sort_unstable();
        Self { catalog, devices, task: Arc::new(task), pairs, build_rows_max: None }
    }

    /// Runs the gang to its end, whatever happens. All memory is free then.
    fn run(&self, run: Run) -> Ended {
        let count = self.devices.len();
        let board = GangBoard::new(&self.devices.iter().map(Device::id).collect::<Vec<_>>()).unwrap();
        // Flag of each rank's process.
        let flags: Vec<CancelFlag> = (0..count).map(|_| CancelFlag::new()).collect();
        let (server_acts, killed) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(SERVER)));
        let turns = {
            let (server_acts, killed, mut has_failed) = (server_acts.clone(), killed.clone(), false);
            Turns::new(run.seed, move |step, group| match run.event {
                Event::ThreadFails(at) => group != SERVER && step >= at && !std::mem::replace(&mut has_failed, true),
                Event::ProcessEnds(at) => {
                    if group != SERVER && step >= at && !server_acts.swap(true, Ordering::Relaxed) {
                        killed.store(group, Ordering::Relaxed);
                    }
                    group != SERVER && killed.load(Ordering::Relaxed) == group
                }
                Event::ServerEnds(at) => {
                    server_acts.fetch_or(step >= at, Ordering::Relaxed);
                    false
                }
                Event::Nothing => false,
            })
        };
        let monitors: Vec<Monitor> = flags.iter().map(|flag| Monitor::new(flag.clone())).collect();
        let ended = AtomicUsize::new(0);
        let run_one = |number: usize, sink: &Pairs| {
            let work = || {
                let device = self.devices[number].for_job(self.devices[number].memory().clone())?;
                BUILD_ROWS_MAX.set(self.build_rows_max);
                let rank = Rank::of_gang(number, board.clone());
                run_rank(&self.task, &rank, &*device, self.catalog.arena(), sink, &monitors[number])
            };
            let outcome = panics::as_error(|panic| format!("rank {number} panicked: {panic}"), work);
            // The server stops the others. It learns of the end of a process in another way.
            if outcome.is_err() && killed.load(Ordering::Relaxed) != number {
                flags.iter().for_each(CancelFlag::raise);
            }
            ended.fetch_add(1, Ordering::Relaxed);
            outcome
        };
        let serve = || {
            while ended.load(Ordering::Relaxed) < count {
                sleep();
                if server_acts.load(Ordering::Relaxed) {
                    flags.iter().for_each(|flag| {
                        sleep();
                        flag.raise();
                    });
                }
            }
        };
        let sinks: Vec<Pairs> = (0..count).map(|_| Pairs::default()).collect();
        let outcomes: Vec<Result<()>> = std::thread::scope(|scope| {
            let start = |(number, sink)| {
                let run_one = &run_one;
                scope.spawn(turns.clone().task(number, move || run_one(number, sink)))
            };
            let ranks: Vec<_> = sinks.iter().enumerate().map(start).collect();
            scope.spawn(turns.clone().task(SERVER, serve));
            turns.start();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        });
        assert!(!turns.was_endless(), "{run:?} does not end");
        for device in &self.devices {
            assert_eq!(device.memory().used_bytes(), 0, "{run:?} left memory of {} in use", device.id());
        }
        let ranks = outcomes.into_iter().zip(sinks.into_iter().map(|sink| sink.0.into_inner()));
        let sorted = |(outcome, mut pairs): (_, Vec<Pair>)| {
            pairs.sort_unstable();
            (outcome, pairs)
        };
        let build_rows = monitors.iter().map(|monitor| monitor.report().build_rows).collect();
        Ended { ranks: ranks.map(sorted).collect(), build_rows, steps: turns.steps(), trace: turns.trace() }
    }

    /// Runs the gang undisturbed. Returns its end, with all rows.
    fn run_whole(&self, seed: u64) -> Ended {
        let run = Run { seed, event: Event::Nothing };
        let ended = self.run(run);
        assert!(ended.ranks.iter().all(|(outcome, _)| outcome.is_ok()), "{run:?}: {:?}", ended.outcomes());
        let mut pairs: Vec<Pair> = ended.ranks.iter().flat_map(|(_, pairs)| pairs).copied().collect();
        pairs.sort_unstable();
        assert!(pairs == self.pairs, "{run:?}: {} pairs of {}", pairs.len(), self.pairs.len());
        ended
    }
}

impl Stage {
    /// Runs the gang with an event. `whole` is a run without one.
    fn run_with(&self, run: Run, whole: &Ended) {
        let ended = self.run(run);
        let outcomes = ended.outcomes();
        let has_failed = |outcome: &&&Result<()>| matches!(outcome, Err(Error::Internal(_)));
        let failed = outcomes.iter().filter(has_failed).count();
        let (at, failures) = match run.event {
            Event::Nothing => (u64::MAX, 0),
            Event::ThreadFails(at) | Event::ProcessEnds(at) => (at, 1),
            Event::ServerEnds(at) => (at, 0),
        };
        assert_eq!(failed, failures, "{run:?}: {outcomes:?}");
        // Near the end, the others may have nothing left to wait for.
        if at < whole.steps / 2 {
            assert!(outcomes.iter().all(|outcome| outcome.is_err()), "{run:?}: {outcomes:?}");
        }
        for ((outcome, pairs), (_, of_whole)) in ended.ranks.iter().zip(&whole.ranks) {
            match outcome {
                Ok(()) => assert!(pairs == of_whole, "{run:?}: {} of {}", pairs.len(), of_whole.len()),
                Err(Error::Cancelled(_) | Error::Internal(_)) => {
                    let is_known = |pair: &Pair| of_whole.binary_search(pair).is_ok();
                    let are_known = pairs.is_sorted_by(|one, next| one < next) && pairs.iter().all(is_known);
                    assert!(are_known, "{run:?}: {pairs:?}");
                }
                Err(other) => panic!("{run:?}: {other}"),
            }
        }
    }
}

impl Ended {
    fn outcomes(&self) -> Vec<&Result<()>> {
        self.ranks.iter().map(|(outcome, _)| outcome).collect()
    }
}

#[test]
fn each_row_arrives_once_at_its_owner_in_any_order_of_steps() {
    let seed = seed();
    for ranks in 2..=4 {
        for distribution in [Distribution::Hash, Distribution::Broadcast] {
            let stage = Stage::new(ranks, distribution);
            let first = stage.run_whole(seed);
            assert_eq!((first.steps, first.trace), {
                let again = stage.run_whole(seed);
                (again.steps, again.trace)
            });
            println!("{ranks} ranks, {distribution:?}: {} steps", first.steps);
            for seed in (seed + 1..).take(10) {
                let ended = stage.run_whole(seed);
                assert_ne!(ended.trace, first.trace, "another seed gives another order");
                if distribution == Distribution::Hash {
                    let of_ranks = |ended: &Ended| ended.ranks.iter().map(|rank| rank.1.clone()).collect::<Vec<_>>();
                    assert!(of_ranks(&ended) == of_ranks(&first), "seed {seed}: rows have other owners");
                }
            }
        }
    }
}

#[test]
fn the_end_of_a_thread_a_process_or_the_server_at_any_step_ends_all_ranks() {
    let seed = seed();
    // Runs take time, so most steps have one or two of the events.
    for (ranks, every) in [(2, 3), (3, 10)] {
        let stage = Stage::new(ranks, Distribution::Hash);
        let whole = stage.run_whole(seed);
        for at in 1..=whole.steps {
            let events = [Event::ThreadFails(at), Event::ProcessEnds(at), Event::ServerEnds(at)];
            for (_, event) in events.into_iter().enumerate().filter(|(kind, _)| (at + *kind as u64) % every < 1) {
                stage.run_with(Run { seed, event }, &whole);
            }
        }
    }
}

/// The build side has more rows than each device may index, and each gets fewer.
#[test]
fn the_limit_of_build_rows_holds_for_each_rank() {
    let seed = seed();
    let mut stage = Stage::new(3, Distribution::Hash);
    let most = stage.run_whole(seed).build_rows.into_iter().max().unwrap();
    assert!(most < BUILD_ROWS as u64 / 2);
    stage.build_rows_max = Some(most);
    assert_eq!(stage.run_whole(seed).build_rows.iter().sum::<u64>(), BUILD_ROWS as u64);
    stage.build_rows_max = Some(most - 1);
    let ended = stage.run(Run { seed, event: Event::Nothing });
    let words =
        format!("one of the devices would index {most} rows of table \"l\", and may index at most {}", most - 1);
    let is_refusal = |outcome: &&Result<()>| matches!(outcome, Err(Error::Unsupported(why)) if why.contains(&words));
    assert_eq!(ended.outcomes().into_iter().filter(is_refusal).count(), 1, "{:?}", ended.outcomes());
    assert!(ended.ranks.iter().all(|(outcome, _)| outcome.is_err()), "{:?}", ended.outcomes());

    // By broadcast, each device has all rows.
    let mut stage = Stage::new(2, Distribution::Broadcast);
    stage.build_rows_max = Some(BUILD_ROWS as u64 - 1);
    let ended = stage.run(Run { seed, event: Event::Nothing });
    let refused = |outcome: &Result<()>| matches!(outcome, Err(Error::Unsupported(_) | Error::Cancelled(_)));
    assert!(ended.ranks.iter().all(|(outcome, _)| refused(outcome)), "{:?}", ended.outcomes());
}
