//! Tests of a prepared join that is probed several times.

use super::super::batch_sizes::BatchSizes;
use super::super::copy_order::CopyOrder;
use super::super::inputs::SideInput;
use super::super::prefetch::Prefetch;
use super::super::prepared::{Preparation, PreparedJoin};
use super::super::probe::Probing;
use super::super::progress::Progress;
use super::super::transform::JoinContext;
use super::super::{StageSeconds, Task};
use super::*;
use crate::columns::{KeyLayout, Role};

/// Returns the rows of a batch as text.
fn rows_of(batch: &RecordBatch) -> Vec<String> {
    let cell = |column: &ArrayRef, row| array_value_to_string(column, row).unwrap();
    let row = |row| batch.columns().iter().map(|column| cell(column, row)).collect::<Vec<_>>().join(",");
    (0..batch.num_rows()).map(row).collect()
}

/// Rows that a sink has received, sorted.
#[derive(Default)]
struct Rows(Mutex<Vec<String>>);

impl BatchSink for Rows {
    fn push(&self, batch: RecordBatch) -> Result<()> {
        self.0.lock().extend(rows_of(&batch));
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

/// Prepares a join once, probes it with two tables at once, on a thread each, and finishes it.
fn probed_twice(bench: &Bench, task: Task, tables: [&str; 2]) -> Vec<String> {
    let (device, arena, monitor) = (&bench.device, bench.catalog.arena(), Monitor::default());
    let task = Arc::new(task);
    let side = |role| Arc::new(SideInput::of_task(&task, role, false));
    let stream = device.stream(CancelFlag::new()).unwrap();
    let cx = JoinContext { device, stream: &stream, copies: &stream, arena, monitor: &monitor };
    let of = Preparation {
        task: task.clone(),
        layout: KeyLayout::new(task.key_facts.clone(), 7),
        build: side(Role::Build),
        probe_shape: side(Role::Probe),
        sizes: BatchSizes::new(Some(100), 16.0, 1 << 20),
        defers_payload: false,
    };
    let join = PreparedJoin::prepare(of, &cx, &mut |_| Ok(())).unwrap();
    let sink = Rows::default();
    std::thread::scope(|scope| {
        for name in tables {
            let (join, sink, task) = (&join, &sink, &task);
            scope.spawn(move || {
                let probe = SideInput::new(task, Role::Probe, bench.catalog.table(name).unwrap(), false);
                let (stream, monitor) = (device.stream(CancelFlag::new()).unwrap(), Monitor::default());
                let cx = JoinContext { device, stream: &stream, copies: &stream, arena, monitor: &monitor };
                let progress = Progress::new(&StageSeconds::default(), &monitor);
                let (prefetch, order) = (Prefetch::default(), CopyOrder::default());
                Probing::new(join, &probe, sink, None, prefetch, order, true, progress).run(&cx).unwrap();
            });
        }
    });
    join.finish(&cx, &sink, &mut |_| {}).unwrap();
    drop(join);
    assert_eq!(device.memory().used_bytes(), 0, "the join left device memory in use");
    sink.sorted()
}

#[test]
fn one_build_side_serves_two_probes_at_once_in_every_kind_of_join() {
    const ROWS: i32 = 3000;
    // Keys repeat on both sides, some match nothing, and some are null.
    let keys = |rows: std::ops::Range<i32>, of: fn(i32) -> i32| -> ArrayRef {
        Arc::new(rows.map(|row| (row % 13 > 0).then_some(of(row))).collect::<Int32Array>())
    };
    let left = batch(vec![("k", keys(0..ROWS, |row| row / 2)), ("a", numbers(0..ROWS))]);
    let right =
        |rows: std::ops::Range<i32>| batch(vec![("k", keys(rows.clone(), |row| row / 3 * 2)), ("b", numbers(rows))]);
    let bench = Bench::new(64 << 20, left, right(0..2 * ROWS));
    for (name, rows) in [("first", 0..ROWS / 2), ("second", ROWS / 2..2 * ROWS)] {
        let mut upload = Upload::begin(&bench.catalog, name, right(0..1).schema(), UploadOptions::default()).unwrap();
        upload.append(right(rows)).unwrap();
        upload.commit().unwrap();
    }
    for how in JoinKind::ALL {
        for strategy in Strategy::ALL {
            let plan = bench.plan(spec(how), strategy, Side::Left);
            let whole = Rows::default();
            bench.run(&plan, &whole, &Monitor::default()).unwrap();
            let (whole, found) = (whole.sorted(), probed_twice(&bench, plan.task().unwrap(), ["first", "second"]));
            assert!(found == whole, "{how} by {strategy}: {} rows instead of {}", found.len(), whole.len());
        }
    }
}
