//! Tests of a prepared join that several streams of rows probe at once.

use std::time::Duration;

use super::super::{IncomingBatches, PreparedJoin, RowSource, TableRows, Task};
use super::*;
use arrow::array::{Int64Array, UInt64Array};

use crate::catalog::Table;
use crate::columns::Role;
use crate::device::{ROWS_MAX, gpu_count, open_gpu};
use crate::planner::{BoundJoin, PlanOverrides};

/// Rows that a sink has received, as text.
#[derive(Default)]
struct Rows(Mutex<Vec<String>>);

impl BatchSink for Rows {
    fn push(&self, batch: RecordBatch) -> Result<()> {
        let columns: Vec<Vec<String>> = batch.columns().iter().map(shown).collect();
        let row = |row: usize| columns.iter().map(|column| column[row].as_str()).collect::<Vec<_>>().join(",");
        self.0.lock().extend((0..batch.num_rows()).map(row));
        Ok(())
    }
}

impl Rows {
    fn sorted(self) -> Vec<String> {
        let mut rows = self.0.into_inner();
        rows.sort_unstable();
        rows
    }
}

/// Returns the task of a plan for rows of both sides that nothing is known of except their columns.
fn task_of_unknown_rows(plan: &Plan) -> Arc<Task> {
    Arc::new(plan.task().unwrap().with_unknown_rows(Role::Probe).with_unknown_rows(Role::Build))
}

/// Prepares a join, probes it with the given streams of batches at once, and finishes it. Each
/// stream has a thread that writes to it and one that probes.
fn probed_by_streams(
    device: &dyn Device,
    arena: &Arena,
    task: &Arc<Task>,
    build: &dyn RowSource,
    streams: &[&[RecordBatch]],
) -> Rows {
    let monitor = Monitor::default();
    let join = PreparedJoin::prepare(task.clone(), build, device, arena, &monitor).unwrap();
    let sink = Rows::default();
    std::thread::scope(|scope| {
        for &batches in streams {
            // The queue takes one batch, rarely two.
            let source = Arc::new(IncomingBatches::new("stream", batches[0].schema(), 4096));
            let writer = source.clone();
            scope.spawn(move || {
                let cancel = CancelFlag::new();
                batches.iter().for_each(|batch| writer.push(batch.clone(), &cancel).unwrap());
                writer.finish();
            });
            let (join, sink) = (&join, &sink);
            scope.spawn(move || {
                let monitor = Monitor::default();
                join.probe(&*source, device, arena, sink, &monitor).unwrap();
                let rows = batches.iter().map(|batch| batch.num_rows() as u64).sum::<u64>();
                assert_eq!((monitor.probed_rows(), monitor.progress()), (rows, 1.0));
            });
        }
    });
    join.finish(device, arena, &sink, &monitor).unwrap();
    drop(join);
    assert_eq!(device.memory().used_bytes(), 0, "the join left device memory in use");
    sink
}

/// Returns rows of one side. Keys repeat, some match nothing, and some are null.
fn side(rows: std::ops::Range<i32>, payload: &str, key_of: fn(i32) -> i32) -> RecordBatch {
    let key = |row: i32| (row % 13 > 0).then_some(key_of(row));
    let keys: ArrayRef = Arc::new(rows.clone().map(key).collect::<Int32Array>());
    let texts: ArrayRef =
        Arc::new(rows.clone().map(|row| (row % 7 > 0).then(|| format!("text {row}"))).collect::<StringArray>());
    let words: ArrayRef = Arc::new(
        rows.clone().map(|row| Some(["one", "two", "many"][row as usize % 3])).collect::<DictionaryArray<_>>()
            as DictionaryArray<arrow::datatypes::Int8Type>,
    );
    batch(vec![("k", keys), (payload, numbers(rows)), ("text", texts), ("word", words)])
}

const ROWS: i32 = 3000;

fn build_rows(rows: std::ops::Range<i32>) -> RecordBatch {
    side(rows, "a", |row| row / 2)
}

fn probe_rows(rows: std::ops::Range<i32>) -> RecordBatch {
    side(rows, "b", |row| row / 3 * 2)
}

/// Joins streams of batches with a build side from a table and with one from batches, and compares
/// the rows with those of a join of two tables.
fn streams_join_like_tables(bench: &Bench, device: &dyn Device, how: JoinKind, strategy: Strategy) {
    // Batches of all sizes. Each has a dictionary of its own, on both sides.
    let cuts = [0, 0, 1, 2, 700, 701, 2000, 2 * ROWS];
    let batches: Vec<RecordBatch> = cuts.windows(2).map(|cut| probe_rows(cut[0]..cut[1])).collect();
    let plan = bench.plan(JoinSpec { batch_rows: Some(100), ..spec(how) }, strategy, Side::Left);
    let expected = Rows::default();
    bench.run(&plan, &expected, &Monitor::default()).unwrap();
    let expected = expected.sorted();
    let task = task_of_unknown_rows(&plan);
    let table = TableRows::new(bench.catalog.table("l").unwrap());
    let arriving = IncomingBatches::new("build", build_rows(0..1).schema(), 0);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let parts = [build_rows(0..1000), build_rows(1000..ROWS)];
            parts.into_iter().for_each(|part| arriving.push(part, &CancelFlag::new()).unwrap());
            arriving.finish();
        });
        for (source, name) in [(&table as &dyn RowSource, "a table"), (&arriving, "batches")] {
            let streams = [&batches[..4], &batches[4..]];
            let found = probed_by_streams(device, bench.catalog.arena(), &task, source, &streams).sorted();
            let label = format!("{how} by {strategy} on {}, build side from {name}", device.id());
            assert!(found == expected, "{label}: {} rows instead of {}", found.len(), expected.len());
        }
    });
}

#[test]
fn one_build_side_serves_two_streams_at_once_in_every_kind_of_join() {
    for streams in [1, 3] {
        let bench = Bench::new(64 << 20, build_rows(0..ROWS), probe_rows(0..2 * ROWS));
        let bench = Bench { device: bench.device.with_streams(streams), ..bench };
        for how in JoinKind::ALL {
            for strategy in Strategy::ALL {
                streams_join_like_tables(&bench, &bench.device, how, strategy);
            }
        }
    }
}

/// The table of dense keys takes a fraction of the memory of a general one. The plan of a join
/// whose rows arrive counts on it.
#[test]
fn a_build_side_of_dense_keys_stays_within_its_plan_while_rows_arrive() {
    let signed = |keys: Vec<i64>| Arc::new(Int64Array::from(keys)) as ArrayRef;
    let unsigned = |keys: Vec<i64>| Arc::new(keys.iter().map(|&key| Some(key as u64)).collect::<UInt64Array>()) as _;
    for keys in [&signed as &dyn Fn(Vec<i64>) -> ArrayRef, &unsigned] {
        let build = batch(vec![("k", keys((1000..5000).collect())), ("a", numbers(0..4000))]);
        // As unsigned numbers, the negative keys are the largest.
        let sent = [-1, i64::MIN, 0, 999, 1000, 2000, 4999, 5000, i64::MAX, 2000].to_vec();
        let sent = batch(vec![("k", keys(sent)), ("b", numbers(0..10))]);
        let bench = Bench::new(64 << 20, build, sent.clone());
        let arriving = Arc::new(Table::to_arrive("r", sent.schema(), 1 << 20, 12));
        let spec = JoinSpec { right: arriving.into(), ..spec(JoinKind::Inner) };
        let join = planner::bind(&spec, &bench.catalog).unwrap();
        let join = BoundJoin { unknown_rows: Some(Side::Right), ..join };
        let overrides = PlanOverrides { build_side: Some(Side::Left), ..PlanOverrides::named(Some(Strategy::Hash)) };
        let plan = planner::plan_with_overrides(join, &overrides, &planner::Target::default()).unwrap();
        assert!(plan.composition.dense);
        let task = Arc::new(plan.task().unwrap().with_unknown_rows(Role::Probe));
        let (build, monitor) = (TableRows::new(bench.catalog.table("l").unwrap()), Monitor::default());
        let join = PreparedJoin::prepare(task.clone(), &build, &bench.device, bench.catalog.arena(), &monitor).unwrap();
        let (used, planned) = (bench.device.memory().used_bytes(), plan.memory.resident_bytes);
        assert!(used <= planned, "{used} B are in use, and {planned} B were planned");
        drop(join);
        let build = TableRows::new(bench.catalog.table("l").unwrap());
        let found = probed_by_streams(&bench.device, bench.catalog.arena(), &task, &build, &[&[sent]]);
        assert_eq!(found.sorted(), ["1000,0,4", "2000,1000,5", "2000,1000,9", "4999,3999,6"]);
    }
}

#[test]
fn streams_are_joined_on_a_gpu() {
    if gpu_count().unwrap() == 0 {
        println!("no GPU: nothing was tested");
        return;
    }
    let bench = Bench::new(64 << 20, build_rows(0..ROWS), probe_rows(0..2 * ROWS));
    let gpu = open_gpu(0, 2, |_| Budget::new("memory of a GPU", "--device-memory", 256 << 20)).unwrap();
    for how in [JoinKind::Inner, JoinKind::Full] {
        for strategy in [Strategy::Hash, Strategy::RadixHash, Strategy::SortMergeGfur] {
            streams_join_like_tables(&bench, &*gpu, how, strategy);
        }
    }
}

#[test]
fn rows_outside_of_the_statistics_of_a_task_are_refused() {
    let (bench, batch) = bench_of(1);
    let task = Arc::new(bench.plan(spec(JoinKind::Inner), Strategy::Hash, Side::Left).task().unwrap());
    let (device, arena, monitor) = (&bench.device, bench.catalog.arena(), Monitor::default());
    let other = || {
        let source = IncomingBatches::new("other rows", batch.schema(), 1 << 20);
        source.push(batch.clone(), &CancelFlag::new()).unwrap();
        source
    };
    let is_refused = |outcome: Result<()>, source: &IncomingBatches| {
        assert!(matches!(&outcome, Err(Error::Internal(why)) if why.contains("unknown rows")), "{outcome:?}");
        assert_eq!(source.push(batch.clone(), &CancelFlag::new()), outcome, "the writer gets the error");
    };
    let arriving = other();
    arriving.finish();
    let refused = PreparedJoin::prepare(task.clone(), &arriving, device, arena, &monitor).map(drop);
    assert!(matches!(&refused, Err(Error::Internal(why)) if why.contains("unknown rows")), "{refused:?}");
    let build = TableRows::new(task.build.table.clone());
    let join = PreparedJoin::prepare(task, &build, device, arena, &monitor).unwrap();
    let arriving = other();
    is_refused(join.probe(&arriving, device, arena, &Rows::default(), &monitor), &arriving);
}

#[test]
fn a_table_is_probed_like_a_stream_and_reports_progress() {
    let bench = Bench::new(64 << 20, side(0..500, "a", |row| row), side(0..3000, "b", |row| row / 2));
    let plan = bench.plan(spec(JoinKind::Full), Strategy::RadixHash, Side::Left);
    let (expected, found) = (Rows::default(), Rows::default());
    bench.run(&plan, &expected, &Monitor::default()).unwrap();
    let task = Arc::new(plan.task().unwrap());
    let (device, arena, monitor) = (&bench.device, bench.catalog.arena(), Monitor::default());
    let build = TableRows::new(task.build.table.clone());
    let join = PreparedJoin::prepare(task.clone(), &build, device, arena, &monitor).unwrap();
    join.probe(&TableRows::new(task.probe.table.clone()), device, arena, &found, &monitor).unwrap();
    assert_eq!((monitor.probed_rows(), monitor.progress()), (3000, 1.0));
    join.finish(device, arena, &found, &monitor).unwrap();
    assert_eq!(found.sorted(), expected.sorted());
}

/// Returns a join that is prepared with a build side of a hundred keys.
fn prepared(bench: &Bench) -> PreparedJoin {
    let plan = bench.plan(spec(JoinKind::Inner), Strategy::Hash, Side::Left);
    let (task, monitor) = (task_of_unknown_rows(&plan), Monitor::default());
    let build = TableRows::new(bench.catalog.table("l").unwrap());
    PreparedJoin::prepare(task, &build, &bench.device, bench.catalog.arena(), &monitor).unwrap()
}

fn bench_of(streams: usize) -> (Bench, RecordBatch) {
    let (build, probe) = (side(0..100, "a", |row| row), side(0..100, "b", |row| row));
    let bench = Bench::new(64 << 20, build, probe.clone());
    (Bench { device: bench.device.with_streams(streams), ..bench }, probe)
}

#[test]
fn a_stream_that_panics_ends_the_wait_of_the_others_for_rows() {
    let (bench, batch) = bench_of(3);
    let (join, source) = (prepared(&bench), IncomingBatches::new("stream", batch.schema(), 1));
    source.push(batch.clone(), &CancelFlag::new()).unwrap();
    let panics = Each(|_| panic!("no room on the page"));
    let probed = join.probe(&source, &bench.device, bench.catalog.arena(), &panics, &Monitor::default());
    assert!(matches!(&probed, Err(Error::Internal(why)) if why.contains("no room on the page")), "{probed:?}");
    assert_eq!(source.push(batch, &CancelFlag::new()), probed);
}

#[test]
fn a_probe_that_fails_stops_the_writer_of_its_rows() {
    for streams in [1, 3] {
        let (bench, batch) = bench_of(streams);
        let (join, source) = (prepared(&bench), IncomingBatches::new("stream", batch.schema(), 1));
        let failing = Each(|_| Err(Error::Unavailable("the reader has gone".into())));
        std::thread::scope(|scope| {
            let writer = scope.spawn(|| {
                let cancel = CancelFlag::new();
                // Most of these do not fit in the queue.
                (0..1000).try_for_each(|_| source.push(batch.clone(), &cancel))
            });
            let probed = join.probe(&source, &bench.device, bench.catalog.arena(), &failing, &Monitor::default());
            assert_eq!(probed, Err(Error::Unavailable("the reader has gone".into())));
            assert_eq!(writer.join().unwrap(), probed);
        });
    }
}

#[test]
fn streams_that_wait_for_rows_hold_no_thread_that_other_joins_need() {
    for streams in [1, 3] {
        let (bench, batch) = bench_of(streams);
        let join = prepared(&bench);
        let (device, arena) = (&bench.device, bench.catalog.arena());
        let sources: Vec<_> = (0..4).map(|_| IncomingBatches::new("stream", batch.schema(), 1)).collect();
        std::thread::scope(|scope| {
            // As many streams as the device has threads, and more.
            let probes: Vec<_> = sources
                .iter()
                .map(|source| {
                    let (join, monitor) = (&join, Monitor::default());
                    scope.spawn(move || join.probe(source, device, arena, &Each(|_| Ok(())), &monitor))
                })
                .collect();
            let plan = bench.plan(spec(JoinKind::Inner), Strategy::Hash, Side::Left);
            let sink = Rows::default();
            run(&Arc::new(plan.task().unwrap()), device, arena, &sink, &Monitor::default()).unwrap();
            assert_eq!(sink.sorted().len(), 92);
            sources.iter().for_each(IncomingBatches::finish);
            probes.into_iter().for_each(|probe| probe.join().unwrap().unwrap());
        });
    }
}

#[test]
fn a_probe_that_waits_for_rows_ends_when_its_job_is_stopped() {
    for streams in [1, 3] {
        let (bench, batch) = bench_of(streams);
        let (join, source) = (prepared(&bench), IncomingBatches::new("stream", batch.schema(), 1));
        let monitor = Monitor::new(CancelFlag::new());
        std::thread::scope(|scope| {
            let probe =
                scope.spawn(|| join.probe(&source, &bench.device, bench.catalog.arena(), &Each(|_| Ok(())), &monitor));
            std::thread::sleep(Duration::from_millis(20));
            monitor.cancel().raise();
            assert!(matches!(probe.join().unwrap(), Err(Error::Cancelled(_))));
        });
        let late = source.push(batch, &CancelFlag::new());
        assert!(matches!(late, Err(Error::Cancelled(_))), "{late:?}");
    }
}

#[test]
fn a_build_side_that_positions_cannot_address_is_refused_before_its_last_row() {
    /// Gives the same segment again and again.
    struct Endless(Arc<Table>, Mutex<Vec<Error>>);

    impl RowSource for Endless {
        fn total_rows(&self) -> Option<u64> {
            None
        }

        fn is_stored(&self) -> bool {
            false
        }

        fn next_segment(&self, _: &CancelFlag) -> Result<Option<Arc<Table>>> {
            Ok(Some(self.0.clone()))
        }

        fn stop(&self, error: &Error) {
            self.1.lock().push(error.clone());
        }
    }

    let (bench, batch) = bench_of(1);
    let plan = bench.plan(spec(JoinKind::Inner), Strategy::Hash, Side::Left);
    let mut table = Table::unknown("arriving".into(), batch.schema(), Vec::new());
    table.rows = ROWS_MAX as u64 / 3 + 1;
    let endless = Endless(Arc::new(table), Mutex::default());
    let (task, monitor) = (task_of_unknown_rows(&plan), Monitor::default());
    let refused = PreparedJoin::prepare(task, &endless, &bench.device, bench.catalog.arena(), &monitor).err();
    assert_eq!(endless.1.into_inner(), refused.iter().cloned().collect::<Vec<_>>(), "the source is stopped");
    let Some(Error::Unsupported(message)) = refused else { panic!("{refused:?}") };
    assert!(message.starts_with("table \"l\" has 4294901763 rows"), "{message}");
}
