//! Joins on a device behind a socket, whose process is a thread of the test.

mod gang;
mod prepared;
mod stalled;

use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use arrow::array::{Array, ArrayRef, AsArray, Int64Array, RecordBatch, StringArray};
use arrow::compute::concat_batches;
use arrow::datatypes::{DataType, Field, Schema};
use arrow::row::{RowConverter, SortField};
use parking_lot::Mutex;

use super::*;
use crate::catalog::{Catalog, ResultSpool, SpoolOptions};
use crate::device::{CancelFlag, DeviceKind, Phase, TestOptions};
use crate::join::JoinKind;
use crate::memory::Backing;
use crate::planner::{JoinSpec, KeyPair, Strategy, bind, plan_on};
use crate::testing::wait_until;
use crate::{Error, Result};

struct Stage {
    catalog: Catalog,
    engine: ChildEngine,
    /// Process end of the socket, which tests cut.
    line: UnixStream,
    process: JoinHandle<Result<()>>,
}

/// Opens a host device, or the first GPU with `DOVETAIL_TEST_DEVICE=cuda`.
fn opening() -> Opening {
    let (kind, memory_bytes) = match std::env::var("DOVETAIL_TEST_DEVICE").as_deref() {
        Ok("cuda") => (DeviceKind::Cuda, 1 << 30),
        _ => (DeviceKind::Host, 64 << 20),
    };
    let id = DeviceId { kind, index: 0 };
    Opening {
        id,
        place: GpuPlace::default(),
        visible_gpus: None,
        threads: 2,
        memory_bytes: Some(memory_bytes),
        memory_name: format!("memory of device {id}"),
        memory_setting: "--device-memory".into(),
        window_bytes: 1 << 20,
        stall_limit: None,
        test_options: TestOptions::default(),
    }
}

fn tables() -> (Catalog, Arc<SharedSlabs>) {
    // Joins on a GPU take host memory for their copies.
    let budget = Budget::new("host memory", "--host-memory", 2 << 30);
    let catalog = Catalog::new(Arena::with_backing(budget, Backing::Memfd));
    let slabs = Arc::new(SharedSlabs::default());
    catalog.arena().pin_by(Some(slabs.clone()));
    // One table in the arena, and one outside.
    catalog.create(table("r", 5_000, Some(catalog.arena()))).unwrap();
    catalog.create(table("s", 20_000, None)).unwrap();
    (catalog, slabs)
}

/// Starts a process as a thread. Also returns its end of the socket.
fn process_of_a_thread(catalog: &Catalog, slabs: &SharedSlabs) -> (ChildEngine, UnixStream, JoinHandle<Result<()>>) {
    process_that_opens(&opening(), catalog, slabs)
}

fn process_that_opens(
    opening: &Opening,
    catalog: &Catalog,
    slabs: &SharedSlabs,
) -> (ChildEngine, UnixStream, JoinHandle<Result<()>>) {
    let (here, there) = UnixStream::pair().unwrap();
    let line = there.try_clone().unwrap();
    let process = std::thread::spawn(move || process::serve(there));
    let engine = ChildEngine::over(opening, catalog.arena().clone(), slabs, here, None).unwrap();
    (engine, line, process)
}

fn task_on(engine: &dyn Engine, catalog: &Catalog, how: JoinKind, strategy: Strategy) -> Task {
    let spec = JoinSpec { how, ..JoinSpec::inner("r", "s", vec![KeyPair::new("k", "k")]) };
    let target = Target::new(engine.id(), engine.info(), engine.memory(), Rates::host(2));
    plan_on(bind(&spec, catalog).unwrap(), Some(strategy), &target).unwrap().task().unwrap()
}

fn grant_of(catalog: &Catalog) -> Grant {
    Grant { device_memory: None, host_memory: ReservedPool::new(catalog.arena().budget().clone()) }
}

fn run_on(engine: &dyn Engine, catalog: &Catalog, task: &Task) -> Result<Vec<RecordBatch>> {
    let sink = Batches::default();
    engine.run(task.clone(), &grant_of(catalog), &sink, &Monitor::default())?;
    Ok(sink.0.into_inner())
}

impl Stage {
    fn new() -> Self {
        let (catalog, slabs) = tables();
        let (engine, line, process) = process_of_a_thread(&catalog, &slabs);
        Self { catalog, engine, line, process }
    }

    fn task(&self, how: JoinKind, strategy: Strategy) -> Task {
        task_on(&self.engine, &self.catalog, how, strategy)
    }

    fn grant(&self) -> Grant {
        grant_of(&self.catalog)
    }

    fn run(&self, engine: &dyn Engine, task: &Task) -> Result<Vec<RecordBatch>> {
        run_on(engine, &self.catalog, task)
    }
}

/// Table of keys, with repeats and nulls, and words.
fn table(name: &str, rows: i64, arena: Option<&Arena>) -> Table {
    let keys: Int64Array = (0..rows).map(|at| (at % 11 > 0).then_some(at % 3_000)).collect();
    let words: StringArray = (0..rows).map(|at| (at % 7 > 0).then(|| format!("{name} {at}"))).collect();
    let columns: Vec<ArrayRef> = vec![Arc::new(keys), Arc::new(words)];
    let in_arena = |array: &ArrayRef| -> ArrayRef {
        let Some(arena) = arena else { return array.clone() };
        let piece = |buffer: &arrow::buffer::Buffer| {
            let mut piece = arena.allocate(buffer.len(), "a test").unwrap();
            piece.copy_from_slice(buffer);
            piece.freeze()
        };
        let data = array.to_data();
        let buffers = data.buffers().iter().map(piece).collect();
        arrow::array::make_array(data.into_builder().buffers(buffers).build().unwrap())
    };
    let columns = columns.iter().map(in_arena).collect();
    let fields = vec![Field::new("k", DataType::Int64, true), Field::new(name, DataType::Utf8, true)];
    let schema = Arc::new(Schema::new(fields));
    let batch = RecordBatch::try_new(schema.clone(), columns).unwrap();
    Table::from_batches(name, schema, vec![batch]).unwrap()
}

#[derive(Default)]
struct Batches(Mutex<Vec<RecordBatch>>);

impl BatchSink for Batches {
    fn push(&self, batch: RecordBatch) -> Result<()> {
        self.0.lock().push(batch);
        Ok(())
    }
}

/// Spool of a result that is consumed as it is read. A second batch waits for a reader, and for
/// longer than any test.
fn unread(task: &Task) -> ResultSpool {
    let forever = Duration::from_secs(24 * 3600);
    let options =
        SpoolOptions { retain: Duration::ZERO, bytes_max: 1, stall: forever, wait_max: forever, ..Default::default() };
    ResultSpool::with_options(task.schema.clone(), options)
}

/// Encodes the rows and sorts them.
fn sorted(task: &Task, batches: &[RecordBatch]) -> Vec<Vec<u8>> {
    let batch = concat_batches(&task.schema, batches).unwrap();
    let fields = batch.columns().iter().map(|column| SortField::new(column.data_type().clone()));
    let rows = RowConverter::new(fields.collect()).unwrap().convert_columns(batch.columns()).unwrap();
    let mut rows: Vec<Vec<u8>> = rows.iter().map(|row| row.data().to_vec()).collect();
    rows.sort_unstable();
    rows
}

#[test]
fn joins_in_a_child_process_give_the_same_rows_and_return_all_memory() {
    let stage = Stage::new();
    let here = InProcess::new(opening().open().unwrap(), stage.catalog.arena().clone());
    let before = stage.catalog.arena().budget().used_bytes();
    for how in JoinKind::ALL {
        for strategy in Strategy::ALL {
            let task = stage.task(how, strategy);
            let (apart, here) = (stage.run(&stage.engine, &task).unwrap(), stage.run(&here, &task).unwrap());
            assert_eq!(sorted(&task, &apart), sorted(&task, &here), "{how} by {strategy}");
        }
    }
    // Returned memory may still be on its way when a job has ended.
    wait_until("all memory", || stage.catalog.arena().budget().used_bytes() == before);
}

#[test]
fn no_buffer_of_a_batch_is_sent() {
    let stage = Stage::new();
    // A left join shares columns with the table that is outside the arena.
    for how in [JoinKind::Inner, JoinKind::Left, JoinKind::Right] {
        let task = stage.task(how, Strategy::Hash);
        let batches = stage.run(&stage.engine, &task).unwrap();
        for column in batches.iter().flat_map(|batch| batch.columns()) {
            let data = column.to_data();
            for buffer in data.buffers().iter().chain(data.nulls().map(|nulls| nulls.buffer())) {
                let is_in_arena = buffer.is_empty() || stage.catalog.arena().owns(buffer.as_ptr());
                assert!(is_in_arena, "{} bytes came over the socket ({how})", buffer.len());
            }
        }
        let words = batches.iter().flat_map(|batch| batch.column(1).as_string::<i32>());
        assert!(words.flatten().all(|word| word.starts_with("r ")));
    }
}

#[test]
fn a_job_reports_its_progress_and_stops_when_it_is_cancelled() {
    let stage = Stage::new();
    let task = stage.task(JoinKind::Inner, Strategy::RadixHash);
    let monitor = Monitor::default();
    stage.engine.run(task.clone(), &stage.grant(), &Batches::default(), &monitor).unwrap();
    assert!(monitor.phases().iter().any(|phase| phase.phase == Phase::Gather), "{:?}", monitor.phases());
    assert!((monitor.progress() - 1.0).abs() < 1e-9, "{}", monitor.progress());

    let cancel = CancelFlag::new();
    cancel.raise();
    let outcome = stage.engine.run(task.clone(), &stage.grant(), &Batches::default(), &Monitor::new(cancel));
    assert!(matches!(outcome, Err(Error::Cancelled(_))), "{outcome:?}");
    // The next job is not affected.
    let (again, first) = (stage.run(&stage.engine, &task).unwrap(), Batches::default());
    stage.engine.run(task.clone(), &stage.grant(), &first, &Monitor::default()).unwrap();
    assert_eq!(sorted(&task, &again), sorted(&task, &first.0.into_inner()));
}

#[test]
fn errors_of_the_sink_and_of_memory_reach_the_job_unchanged() {
    struct Refuses;
    impl BatchSink for Refuses {
        fn push(&self, _: RecordBatch) -> Result<()> {
            Err(Error::Precondition("no reader wants it".into()))
        }
    }
    let stage = Stage::new();
    let task = stage.task(JoinKind::Inner, Strategy::Hash);
    let refused = stage.engine.run(task.clone(), &stage.grant(), &Refuses, &Monitor::default()).unwrap_err();
    assert_eq!(refused, Error::Precondition("no reader wants it".into()));

    let budget = stage.catalog.arena().budget();
    let others = budget.reserve(budget.free_bytes(), "others").unwrap();
    let short = stage.run(&stage.engine, &task).unwrap_err();
    assert!(matches!(&short, Error::Exhausted(message) if message.contains("--host-memory")), "{short:?}");
    drop(others);
    stage.run(&stage.engine, &task).unwrap();
}

/// A job sends batches before earlier ones are pushed.
#[test]
fn no_batch_is_pushed_after_a_refused_batch() {
    struct Takes(Mutex<usize>);
    impl BatchSink for Takes {
        fn push(&self, _: RecordBatch) -> Result<()> {
            let mut taken = self.0.lock();
            *taken += 1;
            if *taken < 3 { Ok(()) } else { Err(Error::Precondition(format!("number {taken} is too many"))) }
        }
    }
    let stage = Stage::new();
    let task = Task { batch_rows: Some(10), ..stage.task(JoinKind::Inner, Strategy::Hash) };
    let sink = Takes(Mutex::new(0));
    let refused = stage.engine.run(task.clone(), &stage.grant(), &sink, &Monitor::default()).unwrap_err();
    assert_eq!(refused, Error::Precondition("number 3 is too many".into()));
    assert_eq!(*sink.0.lock(), 3);
    stage.run(&stage.engine, &task).unwrap();
}

#[test]
fn batches_in_a_slow_sink_are_not_overwritten() {
    struct Slow(Batches);
    impl BatchSink for Slow {
        fn push(&self, batch: RecordBatch) -> Result<()> {
            // Meanwhile the job gives back the memory of its batches, and makes the next batch in
            // it.
            std::thread::sleep(Duration::from_millis(1));
            self.0.push(batch)
        }
    }
    let stage = Stage::new();
    let task = Task { batch_rows: Some(1000), ..stage.task(JoinKind::Inner, Strategy::Hash) };
    let sink = Slow(Batches::default());
    // With a promise, pieces are lent without waiting.
    let grant = stage.grant();
    grant.host_memory.open(stage.catalog.arena().budget().reserve(8 << 20, "a job").unwrap());
    stage.engine.run(task.clone(), &grant, &sink, &Monitor::default()).unwrap();
    let here = InProcess::new(opening().open().unwrap(), stage.catalog.arena().clone());
    let expected = stage.run(&here, &task).unwrap();
    assert_eq!(sorted(&task, &sink.0.0.into_inner()), sorted(&task, &expected));
}

#[test]
fn a_kept_result_keeps_only_its_own_bytes_in_use() {
    let stage = Stage::new();
    let budget = stage.catalog.arena().budget();
    let here = InProcess::new(opening().open().unwrap(), stage.catalog.arena().clone());
    let before = budget.used_bytes();
    let task = Task { batch_rows: Some(1000), ..stage.task(JoinKind::Inner, Strategy::RadixHash) };
    let kept_bytes = |engine: &dyn Engine| {
        let (grant, sink) = (stage.grant(), Batches::default());
        grant.host_memory.open(budget.reserve(64 << 20, "a job").unwrap());
        engine.run(task.clone(), &grant, &sink, &Monitor::default()).unwrap();
        grant.host_memory.close();
        assert!(sink.0.lock().len() > 5);
        budget.used_bytes() - before
    };
    let (there, here) = (kept_bytes(&stage.engine), kept_bytes(&here));
    assert!(here > 0 && there <= here + here / 10, "{there} bytes are in use, and {here} of a result made here");
    assert_eq!(budget.used_bytes(), before);
}

#[test]
fn a_job_that_fits_in_its_promise_here_fits_in_it_there() {
    let stage = Stage::new();
    let budget = stage.catalog.arena().budget();
    let here = InProcess::new(opening().open().unwrap(), stage.catalog.arena().clone());
    let task = Task { batch_rows: Some(1000), ..stage.task(JoinKind::Inner, Strategy::Hash) };
    let run = |engine: &dyn Engine, promised: u64| {
        let grant = stage.grant();
        grant.host_memory.open(budget.reserve(promised, "a job").unwrap());
        let others = budget.reserve(budget.unused_bytes(), "others").unwrap();
        let sink = Batches::default();
        let outcome = engine.run(task.clone(), &grant, &sink, &Monitor::default());
        drop(others);
        grant.host_memory.close();
        outcome.map(|()| sink.0.into_inner())
    };
    let before = budget.used_bytes();
    let kept = run(&here, 8 << 20).unwrap();
    let result_bytes = budget.used_bytes() - before;
    drop(kept);
    // The result, and a quarter of it for keys and positions.
    let promised = result_bytes / 4 * 5;
    let expected = sorted(&task, &run(&here, promised).unwrap());
    for _ in 0..5 {
        assert_eq!(sorted(&task, &run(&stage.engine, promised).unwrap()), expected);
    }
    for engine in [&here as &dyn Engine, &stage.engine] {
        let refused = run(engine, result_bytes / 2).unwrap_err();
        assert!(matches!(refused, Error::Exhausted(_)), "{refused:?}");
    }
    assert_eq!(budget.used_bytes(), before);
}

#[test]
fn a_batch_outlives_the_process_that_made_it() {
    struct KeepsFirst<'a>(&'a UnixStream, Batches);
    impl BatchSink for KeepsFirst<'_> {
        fn push(&self, batch: RecordBatch) -> Result<()> {
            self.1.push(batch)?;
            self.0.shutdown(Shutdown::Both).unwrap();
            Ok(())
        }
    }
    let stage = Stage::new();
    let budget = stage.catalog.arena().budget();
    let before = budget.used_bytes();
    let task = Task { batch_rows: Some(10), ..stage.task(JoinKind::Inner, Strategy::Hash) };
    let (grant, sink) = (stage.grant(), KeepsFirst(&stage.line, Batches::default()));
    grant.host_memory.open(budget.reserve(64 << 20, "a job").unwrap());
    stage.engine.run(task.clone(), &grant, &sink, &Monitor::default()).unwrap_err();
    grant.host_memory.close();
    wait_until("the loss", || stage.engine.has_ended());
    let kept = sink.1.0.into_inner();
    let used = budget.used_bytes() - before;
    assert!(used > 0 && used < 1 << 20, "{used} bytes are in use for {} batches of 10 rows", kept.len());
    // Memory of the process that is free again is overwritten.
    let mut others = stage.catalog.arena().allocate(64 << 20, "others").unwrap();
    others.fill(0xff);
    let here = InProcess::new(opening().open().unwrap(), stage.catalog.arena().clone());
    let all = sorted(&task, &stage.run(&here, &task).unwrap());
    assert!(sorted(&task, &kept).iter().all(|row| all.binary_search(row).is_ok()));
    drop((kept, others));
    assert_eq!(budget.used_bytes(), before);
}

#[test]
fn a_process_that_ends_fails_its_jobs_and_returns_its_memory() {
    struct Cuts<'a>(&'a UnixStream);
    impl BatchSink for Cuts<'_> {
        fn push(&self, _: RecordBatch) -> Result<()> {
            self.0.shutdown(Shutdown::Both).unwrap();
            Ok(())
        }
    }
    let stage = Stage::new();
    let before = stage.catalog.arena().budget().used_bytes();
    let task = stage.task(JoinKind::Inner, Strategy::Hash);
    let outcome = stage.engine.run(task.clone(), &stage.grant(), &Cuts(&stage.line), &Monitor::default());
    assert!(
        matches!(&outcome, Err(Error::Unavailable(why)) if why.contains(&format!("the process of {} has ended", opening().id))),
        "{outcome:?}"
    );
    assert!(stage.engine.check().is_err());
    assert!(matches!(stage.run(&stage.engine, &task), Err(Error::Unavailable(_))));
    wait_until("all memory", || stage.catalog.arena().budget().used_bytes() == before);
    // The other end notices and ends.
    assert!(stage.process.join().is_ok());
    assert!(stage.engine.cached_rows(&task.build.table).is_empty());
}

#[test]
fn a_process_that_ends_fails_its_job_while_a_batch_waits_for_a_reader() {
    let stage = Stage::new();
    let task = Task { batch_rows: Some(10), ..stage.task(JoinKind::Inner, Strategy::Hash) };
    let spool = unread(&task);
    let Stage { catalog, engine, line, .. } = stage;
    let run = {
        let (grant, spool) = (grant_of(&catalog), spool.clone());
        std::thread::spawn(move || engine.run(task, &grant, &spool, &Monitor::default()))
    };
    wait_until("the first batch", || spool.progress().0 == 1);
    line.shutdown(Shutdown::Both).unwrap();
    wait_until("the end of the job", || run.is_finished());
    let outcome = run.join().unwrap();
    assert!(
        matches!(&outcome, Err(Error::Unavailable(why)) if why.contains(&format!("{} has ended", opening().id))),
        "{outcome:?}"
    );
}

#[test]
fn the_child_process_sees_new_slabs_and_forgets_dropped_tables() {
    let stage = Stage::new();
    let name = "later";
    for round in 0..3 {
        let rows = 40_000 * (round + 1);
        let spec = JoinSpec::inner(name, "s", vec![KeyPair::new("k", "k")]);
        stage.catalog.create(table(name, rows, Some(stage.catalog.arena()))).unwrap();
        let target = Target::new(stage.engine.id(), stage.engine.info(), stage.engine.memory(), Rates::host(2));
        let task =
            plan_on(bind(&spec, &stage.catalog).unwrap(), Some(Strategy::Hash), &target).unwrap().task().unwrap();
        let here = InProcess::new(opening().open().unwrap(), stage.catalog.arena().clone());
        let (apart, here) = (stage.run(&stage.engine, &task).unwrap(), stage.run(&here, &task).unwrap());
        assert_eq!(sorted(&task, &apart), sorted(&task, &here));
        drop(task);
        stage.catalog.drop_table(name, &"".into()).unwrap();
    }
    assert_eq!(stage.engine.known_tables(), 2, "the process has forgotten two versions of `later`");
}

#[test]
fn a_panic_of_a_sink_fails_only_its_own_job() {
    struct Panics;
    impl BatchSink for Panics {
        fn push(&self, _: RecordBatch) -> Result<()> {
            panic!("on purpose")
        }
    }
    let stage = Stage::new();
    let task = stage.task(JoinKind::Inner, Strategy::Hash);
    let failed = stage.engine.run(task.clone(), &stage.grant(), &Panics, &Monitor::default()).unwrap_err();
    assert!(matches!(&failed, Error::Internal(message) if message.contains("on purpose")), "{failed:?}");
    stage.run(&stage.engine, &task).unwrap();
}

#[test]
fn a_running_job_is_stopped() {
    struct Stops<'a>(&'a CancelFlag);
    impl BatchSink for Stops<'_> {
        fn push(&self, _: RecordBatch) -> Result<()> {
            self.0.raise();
            Ok(())
        }
    }
    let stage = Stage::new();
    let before = stage.catalog.arena().budget().used_bytes();
    let task = Task { batch_rows: Some(10), ..stage.task(JoinKind::Inner, Strategy::Hash) };
    let cancel = CancelFlag::new();
    let outcome = stage.engine.run(task.clone(), &stage.grant(), &Stops(&cancel), &Monitor::new(cancel.clone()));
    assert!(matches!(outcome, Err(Error::Cancelled(_))), "{outcome:?}");
    assert_eq!(
        stage.catalog.arena().budget().used_bytes(),
        before,
        "memory that a job borrowed is back when the job has ended"
    );
}

#[test]
fn an_idle_process_that_ends_is_reported_as_lost() {
    let stage = Stage::new();
    stage.engine.check().unwrap();
    stage.line.shutdown(Shutdown::Both).unwrap();
    wait_until("the loss", || stage.engine.check().is_err());
}

#[test]
fn a_process_that_ends_before_its_device_is_open_is_an_error() {
    let (here, there) = UnixStream::pair().unwrap();
    drop(there);
    let arena = Arena::new(Budget::new("host memory", "--host-memory", 1 << 20));
    let refused = ChildEngine::over(&opening(), arena, &SharedSlabs::default(), here, None).unwrap_err();
    assert!(matches!(&refused, Error::Unavailable(why) if why.contains("did not open its device")), "{refused:?}");
}

#[test]
fn a_buffer_is_found_in_its_table_even_if_another_table_has_a_part_of_it() {
    let stage = Stage::new();
    let mut task = stage.task(JoinKind::Inner, Strategy::Hash);
    let batch = &task.build.table.batches[0];
    let part = Table::from_batches("part", batch.schema(), vec![batch.slice(50, 30)]).unwrap();
    task.probe.table = Arc::new(part);
    let tables = restored::TableBuffers::new(vec![task.build.table.clone(), task.probe.table.clone()]);
    let keys = task.build.table.batches[0].column(0).to_data().buffers()[0].clone();
    let found = tables.find(keys.as_ptr() as u64 + 8 * 100, 8 * 300).unwrap();
    assert_eq!(found.as_slice(), &keys.as_slice()[8 * 100..8 * 400]);
    assert!(tables.find(keys.as_ptr() as u64, keys.len() + 1).is_none());
}

#[test]
fn only_the_slice_of_a_heap_buffer_is_sent() {
    let words: StringArray = (0..10_000).map(|at| Some(format!("word {at}"))).collect();
    let column: ArrayRef = Arc::new(words.slice(5_000, 10));
    let schema = Arc::new(Schema::new(vec![Field::new("w", DataType::Utf8, true)]));
    let batch = RecordBatch::try_new(schema.clone(), vec![column]).unwrap();
    let place_of = |buffer: &arrow::buffer::Buffer| crate::memory::Place::Bytes(buffer.to_vec());
    let parts = messages::BatchParts::of(&batch, &place_of);
    assert!(parts.sent_bytes() < 1_000, "{} bytes are sent", parts.sent_bytes());
    let find = |place: &crate::memory::Place| match place {
        crate::memory::Place::Bytes(bytes) => Ok(crate::memory::Place::aligned(bytes)),
        crate::memory::Place::Slab { .. } => unreachable!("all buffers are sent as bytes"),
    };
    assert_eq!(parts.restore(&schema, &find).unwrap(), batch);
}

#[test]
fn a_device_that_cannot_be_opened_reports_the_reason() {
    let (here, there) = UnixStream::pair().unwrap();
    let process = std::thread::spawn(move || process::serve(there));
    let opening = Opening { id: DeviceId { kind: DeviceKind::Cuda, index: 999 }, ..opening() };
    let arena = Arena::new(Budget::new("host memory", "--host-memory", 1 << 20));
    let refused = ChildEngine::over(&opening, arena, &SharedSlabs::default(), here, None).unwrap_err();
    assert!(matches!(&refused, Error::Unsupported(_)), "{refused:?}");
    process.join().unwrap().unwrap();
}

/// Processes started for a device, and the ends of their sockets. `failing` attempts fail first.
#[derive(Clone, Default)]
struct Starts {
    lines: Arc<Mutex<Vec<UnixStream>>>,
    memory_bytes: Arc<Mutex<Vec<Option<u64>>>>,
    failing: Arc<AtomicUsize>,
}

impl Starts {
    fn of(&self, catalog: &Catalog, slabs: &Arc<SharedSlabs>) -> supervised::Start {
        let (starts, catalog, slabs) = (self.clone(), catalog.clone(), slabs.clone());
        Box::new(move |memory_bytes| {
            starts.memory_bytes.lock().push(memory_bytes);
            let fails = |left: usize| left.checked_sub(1);
            if starts.failing.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fails).is_ok() {
                return Err(Error::Unavailable("the device is not available yet".into()));
            }
            let (process, line, _) = process_of_a_thread(&catalog, &slabs);
            starts.lines.lock().push(line);
            Ok(process)
        })
    }

    /// Ends the last process.
    fn cut(&self) {
        self.lines.lock().last().unwrap().shutdown(Shutdown::Both).unwrap();
    }
}

#[test]
fn a_device_whose_process_has_ended_is_reopened() {
    let (catalog, slabs) = tables();
    let starts = Starts::default();
    let engine = SupervisedEngine::new(starts.of(&catalog, &slabs), Some(Duration::from_millis(1))).unwrap();
    let task = task_on(&engine, &catalog, JoinKind::Full, Strategy::RadixHash);
    let before = catalog.arena().budget().used_bytes();
    let expected = sorted(&task, &run_on(&engine, &catalog, &task).unwrap());
    for round in 1..=3 {
        // The first attempts to start another process fail, except in the first round.
        starts.failing.store(round - 1, Ordering::Relaxed);
        starts.cut();
        wait_until("the loss", || engine.check().is_err() || engine.restarts() == round as u64);
        wait_until("another process", || engine.check().is_ok() && engine.restarts() == round as u64);
        assert_eq!(sorted(&task, &run_on(&engine, &catalog, &task).unwrap()), expected, "round {round}");
        wait_until("all memory", || catalog.arena().budget().used_bytes() == before);
    }
    // Each restart is given the bytes of device memory that the first start reported, because jobs
    // were promised that much.
    let memory_bytes = starts.memory_bytes.lock().clone();
    assert_eq!(memory_bytes[0], None);
    assert_eq!(memory_bytes[1..], vec![opening().memory_bytes; 3 + 1 + 2]);
}

#[test]
fn a_lost_device_reports_whether_it_will_be_reopened() {
    let (catalog, slabs) = tables();
    let starts = Starts::default();
    let engine = SupervisedEngine::new(starts.of(&catalog, &slabs), None).unwrap();
    starts.cut();
    wait_until("the loss", || engine.check().is_err());
    let said = engine.check().unwrap_err();
    assert!(said.message().contains("not started again (--device-restart-seconds is 0); restart the server"), "{said}");
    assert!(matches!(said, Error::Unavailable(_)));

    let starts = Starts::default();
    let engine = SupervisedEngine::new(starts.of(&catalog, &slabs), Some(Duration::from_millis(1))).unwrap();
    starts.failing.store(usize::MAX, Ordering::Relaxed);
    starts.cut();
    let said = || engine.check().err().map(|error| error.message().to_string()).unwrap_or_default();
    wait_until("an attempt to fail", || said().contains("starting it again failed and is tried every"));
    assert!(said().contains("opening the device again: the device is not available yet"), "{}", said());
    // A device that never comes back does not keep the server from ending.
    drop(engine);
}

#[test]
fn a_server_that_ends_does_not_wait_for_the_restart_delay() {
    let (catalog, slabs) = tables();
    let starts = Starts::default();
    let engine = SupervisedEngine::new(starts.of(&catalog, &slabs), Some(Duration::from_secs(3600))).unwrap();
    starts.cut();
    wait_until("the loss", || engine.check().is_err());
    assert!(engine.check().unwrap_err().message().contains("it is started again automatically"));
    // The delay has begun.
    std::thread::sleep(3 * supervised::LOOK_INTERVAL);
    drop(engine);
}

#[test]
fn equal_gpus_get_equal_budgets_although_their_free_bytes_differ() {
    let limit = |free: u64| Opening { memory_bytes: None, ..opening() }.budget(Some(free)).limit_bytes();
    let free = (79 << 30) + (5 << 20);
    assert_eq!((limit(free), limit(free + (100 << 20))), (79 << 30, 79 << 30));
    for free in [0, 1, 511, 513, 1 << 30, (5 << 30) - 1, free, u64::MAX] {
        assert!(limit(free) <= free && free - limit(free) <= free / 128, "{free} bytes become {}", limit(free));
    }
    let set = opening();
    let taken = set.budget(Some(1)).limit_bytes();
    assert_eq!(Some(taken), set.memory_bytes, "an operator's limit is taken as it is");
}
