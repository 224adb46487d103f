//! A host device that helps a GPU with a join. The GPU is a host device, too, but the board of the
//! gang has it as a GPU.

use super::*;
use crate::device::{DeviceId, DeviceInfo, DeviceKind};
use crate::join::{Distribution, GangBoard, Rank, Report, Task, run_rank};
use crate::planner::{PlanOverrides, Rates, Target, plan_with_overrides};
use crate::turns::Turns;

const BUILD_ROWS: i32 = 1000;
const PROBE_ROWS: i32 = 20_000;

/// Fewest rows of a chunk of the host device. Its first chunk is at most a 64th of the rows left.
const CHUNK_ROWS_MIN: u64 = 64;

/// Numbers of the ranks.
const GPU: usize = 0;
const HOST: usize = 1;

/// Rows and report of a rank.
struct Ended {
    rows: Vec<String>,
    report: Report,
}

/// Returns a table of keys, some of them null, and row numbers.
fn table_of(rows: i32, number: &str, key: impl Fn(i32) -> i32) -> RecordBatch {
    let keys: Int32Array = (0..rows).map(|row| (row % 11 > 0).then(|| key(row))).collect();
    batch(vec![("k", Arc::new(keys)), (number, numbers(0..rows))])
}

fn bench() -> Bench {
    let left = table_of(BUILD_ROWS, "a", |row| row * 7919 % 900);
    Bench::new(64 << 20, left, table_of(PROBE_ROWS, "b", |row| row * 104_729 % 1300))
}

/// Kinds of join of which each rank may have the whole build side.
fn divided_kinds() -> impl Iterator<Item = JoinKind> {
    JoinKind::ALL.into_iter().filter(|&how| how != JoinKind::Full)
}

fn task(bench: &Bench, how: JoinKind, strategy: Strategy, count: bool) -> Arc<Task> {
    let device = &bench.device;
    let target = Target::new(device.id(), &DeviceInfo::of(device), device.memory(), Rates::host(1));
    let distribution = Some(Distribution::Broadcast);
    let overrides = PlanOverrides { distribution, ..PlanOverrides::named(Some(strategy)) };
    let join = planner::bind(&JoinSpec { count, ..spec(how) }, &bench.catalog).unwrap();
    let plan = plan_with_overrides(join, &overrides, &Target { ranks: 2, ..target }).unwrap();
    Arc::new(Task { chunk_rows_min: Some(CHUNK_ROWS_MIN), ..plan.task().unwrap() })
}

fn board() -> GangBoard {
    let device = |kind| DeviceId { kind, index: 0 };
    GangBoard::new(&[device(DeviceKind::Cuda), device(DeviceKind::Host)]).unwrap()
}

fn run_as(rank: &Rank, task: &Arc<Task>, bench: &Bench, monitor: &Monitor) -> Result<Ended> {
    let own = device(64 << 20);
    // The view works on the calling thread.
    let view = own.for_job(own.memory().clone()).unwrap();
    let outcome = run_on(&*view, rank, task, bench, monitor);
    drop(view);
    assert_eq!(own.memory().used_bytes(), 0, "the join left device memory in use");
    outcome
}

fn run_on(device: &dyn Device, rank: &Rank, task: &Arc<Task>, bench: &Bench, monitor: &Monitor) -> Result<Ended> {
    let rows = Mutex::new(Vec::new());
    let sink = Each(|batch: RecordBatch| {
        let value = |row: usize| move |column: &ArrayRef| array_value_to_string(column, row).unwrap();
        let row = |row: usize| batch.columns().iter().map(value(row)).collect::<Vec<_>>().join(" ");
        rows.lock().extend((0..batch.num_rows()).map(row));
        Ok(())
    });
    let outcome = run_rank(task, rank, device, bench.catalog.arena(), &sink, monitor);
    let mut rows = rows.into_inner();
    rows.sort_unstable();
    outcome.map(|()| Ended { rows, report: monitor.report() })
}

fn rows_of_both(one: Ended, other: Ended) -> Vec<String> {
    let mut rows = [one.rows, other.rows].concat();
    rows.sort_unstable();
    rows
}

#[test]
fn a_host_device_that_comes_too_late_leaves_without_rows() {
    let bench = bench();
    for how in divided_kinds() {
        for (strategy, count) in Strategy::ALL.into_iter().flat_map(|strategy| [(strategy, false), (strategy, true)]) {
            let label = format!("{how} by {strategy}, counted: {count}");
            let (task, board) = (task(&bench, how, strategy, count), board());
            let alone = run_as(&Rank::alone(), &task, &bench, &Monitor::default()).unwrap();
            let run = |number| {
                let monitor = Monitor::default();
                let ended = run_as(&Rank::of_gang(number, board.clone()), &task, &bench, &monitor).unwrap();
                assert_eq!(monitor.progress(), 1.0, "{label}");
                ended
            };
            let (gpu, host) = (run(GPU), run(HOST));
            let of_task = (task.probe.table.rows, task.build.table.rows);
            assert_eq!((gpu.report.probed_rows, gpu.report.build_rows), of_task, "{label}");
            assert_eq!((host.report.probed_rows, host.report.build_rows), (0, 0), "{label}");
            assert!(host.report.phases.len() <= 1, "{label}: {:?}", host.report.phases);
            assert_eq!(rows_of_both(gpu, host), alone.rows, "{label}");
        }
    }
}

/// The GPU takes its rows while the host device prepares, or while it joins its rows, in an order
/// that a seed decides.
#[test]
fn a_host_device_joins_rows_or_leaves_at_any_step() {
    const SEEDS: u64 = 30;
    let bench = bench();
    let [mut left, mut helped] = [0, 0];
    for how in [JoinKind::Inner, JoinKind::Right, JoinKind::RightAnti] {
        let task = task(&bench, how, Strategy::Hash, false);
        let alone = run_as(&Rank::alone(), &task, &bench, &Monitor::default()).unwrap();
        for seed in 0..SEEDS {
            let (turns, board) = (Turns::new(seed, |_, _| false), board());
            let run = |number: usize| {
                let rank = Rank::of_gang(number, board.clone());
                let (task, bench) = (&task, &bench);
                turns.clone().task(number, move || run_as(&rank, task, bench, &Monitor::default()).unwrap())
            };
            let [gpu, host] = [GPU, HOST].map(run);
            let (gpu, host) = std::thread::scope(|scope| {
                let (gpu, host) = (scope.spawn(gpu), scope.spawn(host));
                turns.start();
                (gpu.join().unwrap(), host.join().unwrap())
            });
            left += u64::from(host.report.build_rows == 0);
            helped += u64::from(host.report.probed_rows > 0);
            assert_eq!(gpu.report.probed_rows + host.report.probed_rows, task.probe.table.rows, "{how}, seed {seed}");
            assert_eq!(rows_of_both(gpu, host), alone.rows, "{how}, seed {seed}");
        }
    }
    assert!(left > 0 && helped > 0, "of {} runs, the host device left {left}, and joined rows in {helped}", 3 * SEEDS);
}

/// The GPU takes chunks on several streams, and the first of them ahead.
#[test]
fn a_host_device_and_a_gpu_with_several_streams_join_each_row_once() {
    let (bench, gpu) = (bench(), device(64 << 20).with_streams(3));
    for (strategy, how) in Strategy::ALL.into_iter().flat_map(|by| [(by, JoinKind::Inner), (by, JoinKind::Right)]) {
        let task = task(&bench, how, strategy, false);
        let alone = run_as(&Rank::alone(), &task, &bench, &Monitor::default()).unwrap();
        for _ in 0..5 {
            let board = board();
            let [first, second] = [GPU, HOST].map(|number| Rank::of_gang(number, board.clone()));
            let (gpu, host) = std::thread::scope(|scope| {
                let host = scope.spawn(|| run_as(&second, &task, &bench, &Monitor::default()).unwrap());
                (run_on(&gpu, &first, &task, &bench, &Monitor::default()).unwrap(), host.join().unwrap())
            });
            assert_eq!(gpu.report.probed_rows + host.report.probed_rows, task.probe.table.rows, "{how} by {strategy}");
            assert_eq!(rows_of_both(gpu, host), alone.rows, "{how} by {strategy}");
        }
    }
}

#[test]
fn a_host_device_whose_job_is_stopped_fails() {
    let bench = bench();
    let task = task(&bench, JoinKind::Inner, Strategy::Hash, false);
    for look in 1..20 {
        let monitor = Monitor::new(CancelFlag::raised_at_look(look));
        let outcome = run_as(&Rank::of_gang(HOST, board()), &task, &bench, &monitor);
        assert!(matches!(outcome, Err(Error::Cancelled(_))), "look {look}");
    }
}
