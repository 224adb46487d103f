//! Tests of a prepared join that several streams of rows probe at once.

use std::time::Duration;

use super::super::{IncomingBatches, PreparedJoin, RowSource, TableRows, Task};
use super::*;
use crate::catalog::Table;
use crate::device::ROWS_MAX;

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

/// Returns the task of a plan for probe rows that nothing is known of except their columns.
fn task_without_probe_rows(plan: &Plan) -> Arc<Task> {
    let mut task = plan.task().unwrap();
    for facts in &mut task.key_facts {
        (facts.range, facts.bytes_max, facts.sorted) = (None, None, false);
    }
    (task.dense_range, task.composition.dense) = (None, false);
    let probe = &task.probe.table;
    task.probe.table = Arc::new(Table::unknown(probe.name.clone(), probe.schema.clone(), Vec::new()));
    Arc::new(task)
}

/// Prepares a join, probes it with the given streams of batches at once, and finishes it. Each
/// stream has a thread that writes to it and one that probes.
fn probed_by_streams(bench: &Bench, task: &Arc<Task>, build: &dyn RowSource, streams: &[&[RecordBatch]]) -> Rows {
    let (device, arena, monitor) = (&bench.device, bench.catalog.arena(), Monitor::default());
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

#[test]
fn one_build_side_serves_two_streams_at_once_in_every_kind_of_join() {
    const ROWS: i32 = 3000;
    let build = side(0..ROWS, "a", |row| row / 2);
    let probe = |rows| side(rows, "b", |row| row / 3 * 2);
    // Batches of all sizes. Each has a dictionary of its own.
    let cuts = [0, 0, 1, 2, 700, 701, 2000, 2 * ROWS];
    let batches: Vec<RecordBatch> = cuts.windows(2).map(|cut| probe(cut[0]..cut[1])).collect();
    let bench = |streams| {
        let bench = Bench::new(64 << 20, build.clone(), probe(0..2 * ROWS));
        Bench { device: bench.device.with_streams(streams), ..bench }
    };
    for streams in [1, 3] {
        let bench = bench(streams);
        for how in JoinKind::ALL {
            for strategy in Strategy::ALL {
                let plan = bench.plan(JoinSpec { batch_rows: Some(100), ..spec(how) }, strategy, Side::Left);
                let expected = Rows::default();
                bench.run(&plan, &expected, &Monitor::default()).unwrap();
                let expected = expected.sorted();
                let task = task_without_probe_rows(&plan);
                let table = TableRows::new(task.build.table.clone());
                let arriving = IncomingBatches::new("build", build.schema(), 0);
                std::thread::scope(|scope| {
                    scope.spawn(|| {
                        let halves = [build.slice(0, 1000), build.slice(1000, ROWS as usize - 1000)];
                        halves.into_iter().for_each(|half| arriving.push(half, &CancelFlag::new()).unwrap());
                        arriving.finish();
                    });
                    for (source, name) in [(&table as &dyn RowSource, "a table"), (&arriving, "batches")] {
                        let found = probed_by_streams(&bench, &task, source, &[&batches[..4], &batches[4..]]).sorted();
                        let label = format!("{how} by {strategy} on {streams} streams, build side from {name}");
                        assert!(found == expected, "{label}: {} rows instead of {}", found.len(), expected.len());
                    }
                });
            }
        }
    }
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
    let (task, monitor) = (task_without_probe_rows(&plan), Monitor::default());
    let build = TableRows::new(task.build.table.clone());
    PreparedJoin::prepare(task, &build, &bench.device, bench.catalog.arena(), &monitor).unwrap()
}

fn bench_of(streams: usize) -> (Bench, RecordBatch) {
    let (build, probe) = (side(0..100, "a", |row| row), side(0..100, "b", |row| row));
    let bench = Bench::new(64 << 20, build, probe.clone());
    (Bench { device: bench.device.with_streams(streams), ..bench }, probe)
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
    struct Endless(Arc<Table>);

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

        fn stop(&self, _: &Error) {}
    }

    let (bench, batch) = bench_of(1);
    let plan = bench.plan(spec(JoinKind::Inner), Strategy::Hash, Side::Left);
    let mut table = Table::unknown("arriving".into(), batch.schema(), Vec::new());
    table.rows = ROWS_MAX as u64 / 3 + 1;
    let endless = Endless(Arc::new(table));
    let (task, monitor) = (task_without_probe_rows(&plan), Monitor::default());
    let refused = PreparedJoin::prepare(task, &endless, &bench.device, bench.catalog.arena(), &monitor).err();
    let Some(Error::Unsupported(message)) = refused else { panic!("{refused:?}") };
    assert!(message.starts_with("table \"l\" has 4294901763 rows"), "{message}");
}
