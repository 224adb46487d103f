//! Joins that an engine has prepared, probed by streams of batches, in this process and in another.

use std::ops::Deref;
use std::sync::mpsc;
use std::thread::{Scope, ScopedJoinHandle};

use arrow::array::{BooleanArray, DictionaryArray, UInt32Array};
use arrow::buffer::Buffer;
use arrow::compute::filter_record_batch;
use arrow::datatypes::{Int32Type, UInt32Type};

use super::super::channel::{Receiver, Sender};
use super::super::messages::{BatchParts, FromChild, HostRequest, HostResponse, Opened, State, ToChild, Work};
use super::*;
use crate::catalog::Adopter;
use crate::columns::Role;
use crate::join::{IncomingBatches, Report, TableRows, with_number};
use crate::memory::Place;

/// Rows of the table that builds, and of the table whose rows arrive.
const BUILD_ROWS: i64 = 2_000;
const PROBE_ROWS: i64 = 6_000;

/// Bytes of a queue that takes one batch of these tests, rarely two.
const QUEUE_BYTES: usize = 4096;

/// Two engines over one catalog.
struct Engines {
    catalog: Catalog,
    here: InProcess,
    child: ChildEngine,
    /// Process end of the child's socket.
    line: UnixStream,
}

/// Returns rows with repeated keys, null keys, texts and words of a dictionary.
fn rows_of(name: &str, rows: i64) -> RecordBatch {
    let keys: Int64Array = (0..rows).map(|at| (at % 11 > 0).then_some(at % 1_500 * 2)).collect();
    let texts: StringArray = (0..rows).map(|at| (at % 7 > 0).then(|| format!("{name} {at}"))).collect();
    let words: DictionaryArray<Int32Type> = (0..rows).map(|at| Some(["one", "two", "many"][at as usize % 3])).collect();
    let columns: [(&str, ArrayRef); 3] =
        [("k", Arc::new(keys)), (&format!("{name}_text"), Arc::new(texts)), (&format!("{name}_word"), Arc::new(words))];
    RecordBatch::try_from_iter_with_nullable(columns.map(|(name, column)| (name, column, true))).unwrap()
}

fn in_arena(arena: &Arena, batch: &RecordBatch) -> RecordBatch {
    Adopter::new(arena.clone()).adopt(batch.clone()).unwrap()
}

impl Engines {
    fn new() -> Self {
        let (catalog, slabs) = tables();
        let create = |name: &str, batch: RecordBatch| {
            let batch = in_arena(catalog.arena(), &batch);
            catalog.create(Table::from_batches(name, batch.schema(), vec![batch]).unwrap()).unwrap();
        };
        create("b", rows_of("b", BUILD_ROWS));
        create("p", rows_of("p", PROBE_ROWS));
        let (child, line, _) = process_of_a_thread(&catalog, &slabs);
        let here = InProcess::new(opening().open().unwrap(), catalog.arena().clone());
        Self { catalog, here, child, line }
    }

    fn both(&self) -> [&dyn Engine; 2] {
        [&self.here, &self.child]
    }

    /// Returns a join of `b`, which builds, with `p`.
    fn task(&self, how: JoinKind, strategy: Strategy) -> Task {
        let spec = JoinSpec { how, ..JoinSpec::inner("b", "p", vec![KeyPair::new("k", "k")]) };
        let target = Target::new(self.child.id(), self.child.info(), self.child.memory(), Rates::host(2));
        let plan = plan_on(bind(&spec, &self.catalog).unwrap(), Some(strategy), &target).unwrap();
        let task = plan.task().unwrap();
        assert_eq!((task.build.table.rows, task.probe.table.rows), (BUILD_ROWS as u64, PROBE_ROWS as u64));
        task
    }

    fn grant(&self) -> Grant {
        grant_of(&self.catalog)
    }

    fn used_bytes(&self) -> u64 {
        self.catalog.arena().budget().used_bytes()
    }

    fn prepare(&self, engine: &dyn Engine, task: &Task) -> Box<dyn Prepared> {
        let rows = TableRows::new(self.catalog.table("b").unwrap());
        engine.prepare(task.clone(), &rows, &self.grant(), &Monitor::default()).unwrap()
    }
}

fn of_unknown_rows(task: &Task) -> Task {
    task.clone().with_unknown_rows(Role::Build).with_unknown_rows(Role::Probe)
}

/// Cuts rows into batches of `rows` rows.
fn cut(batch: &RecordBatch, rows: usize) -> Vec<RecordBatch> {
    let starts = (0..batch.num_rows()).step_by(rows);
    starts.map(|start| batch.slice(start, rows.min(batch.num_rows() - start))).collect()
}

/// Source that is stopped on drop, so that no thread waits for it after a failed assertion.
struct TestSource(Arc<IncomingBatches>);

impl TestSource {
    fn of(batch: &RecordBatch) -> Self {
        Self(Arc::new(IncomingBatches::new("stream", batch.schema(), QUEUE_BYTES)))
    }

    fn of_unbounded(batch: &RecordBatch) -> Self {
        Self(Arc::new(IncomingBatches::new("stream", batch.schema(), usize::MAX)))
    }
}

impl Deref for TestSource {
    type Target = IncomingBatches;

    fn deref(&self) -> &IncomingBatches {
        &self.0
    }
}

impl Drop for TestSource {
    fn drop(&mut self) {
        self.0.stop(&Error::Cancelled("the test has ended".into()));
    }
}

/// Creates a source, and a thread that writes batches to it.
fn written<'s>(scope: &'s Scope<'s, '_>, batches: Vec<RecordBatch>) -> (TestSource, ScopedJoinHandle<'s, Result<()>>) {
    let source = TestSource::of(&batches[0]);
    let into = source.0.clone();
    let write = move || {
        batches.into_iter().try_for_each(|batch| into.push(batch, &CancelFlag::new()))?;
        into.finish();
        Ok(())
    };
    (source, scope.spawn(write))
}

#[test]
fn two_streams_probe_one_build_side_like_a_table() {
    let engines = Engines::new();
    // One stream is in the arena, and one is not.
    let all = rows_of("p", PROBE_ROWS);
    let first = cut(&in_arena(engines.catalog.arena(), &all.slice(0, 2_500)), 300);
    let streams = [first, cut(&all.slice(2_500, PROBE_ROWS as usize - 2_500), 700)];
    let before = engines.used_bytes();
    for (how, strategy) in [
        (JoinKind::Inner, Strategy::Hash),
        (JoinKind::Full, Strategy::RadixHash),
        (JoinKind::Right, Strategy::Hash),
        (JoinKind::Full, Strategy::SortMerge),
    ] {
        let task = engines.task(how, strategy);
        let expected = sorted(&task, &run_on(&engines.here, &engines.catalog, &task).unwrap());
        let task = of_unknown_rows(&task);
        for engine in engines.both() {
            for build_arrives in [false, true] {
                let sink = Batches::default();
                std::thread::scope(|scope| {
                    let (arriving, _) = written(scope, cut(&rows_of("b", BUILD_ROWS), 900));
                    let stored = TableRows::new(engines.catalog.table("b").unwrap());
                    let build: &dyn RowSource = if build_arrives { &*arriving } else { &stored };
                    let join = engine.prepare(task.clone(), build, &engines.grant(), &Monitor::default()).unwrap();
                    let probe = |batches: &Vec<RecordBatch>| {
                        let (source, _) = written(scope, batches.clone());
                        let (monitor, memory) = (Monitor::default(), engines.grant().host_memory);
                        join.probe(&*source, &memory, &sink, &monitor).unwrap();
                        let rows: usize = batches.iter().map(RecordBatch::num_rows).sum();
                        assert_eq!((monitor.probed_rows(), monitor.progress()), (rows as u64, 1.0));
                    };
                    std::thread::scope(|probes| {
                        streams.iter().for_each(|batches| drop(probes.spawn(|| probe(batches))));
                    });
                    join.finish(&engines.grant().host_memory, &sink, &Monitor::default()).unwrap();
                    assert!(engine.memory_use().used_bytes_max > 0);
                    drop(join);
                });
                assert_eq!(engine.memory_use().used_bytes, 0, "memory of a dropped join");
                let found = sorted(&task, &sink.0.into_inner());
                assert!(found == expected, "{how} by {strategy}: {} rows, not {}", found.len(), expected.len());
            }
        }
    }
    wait_until("all memory", || engines.used_bytes() == before);
}

#[test]
fn a_table_that_is_probed_is_not_sent_again() {
    let engines = Engines::new();
    let task = engines.task(JoinKind::Inner, Strategy::Hash);
    let expected = sorted(&task, &run_on(&engines.here, &engines.catalog, &task).unwrap());
    let (join, probe) = (engines.prepare(&engines.child, &task), engines.catalog.table("p").unwrap());
    let (sink, monitor) = (Batches::default(), Monitor::default());
    join.probe(&TableRows::new(probe.clone()), &engines.grant().host_memory, &sink, &monitor).unwrap();
    assert_eq!((monitor.probed_rows(), monitor.progress()), (PROBE_ROWS as u64, 1.0));
    assert_eq!(sorted(&task, &sink.0.into_inner()), expected);
    assert_eq!(engines.child.known_tables(), 2);
}

#[test]
fn a_segment_is_freed_while_its_probe_goes_on() {
    /// Gives segments, each after the one before it was freed.
    struct OneByOne {
        state: Mutex<Segments>,
        arena: Arena,
    }
    #[derive(Default)]
    struct Segments {
        left: usize,
        /// Buffer of the last segment. All its other buffers are in the same memory.
        last: Option<Buffer>,
    }
    impl RowSource for OneByOne {
        fn total_rows(&self) -> Option<u64> {
            None
        }

        fn is_stored(&self) -> bool {
            false
        }

        fn next_segment(&self, _: &CancelFlag) -> Result<Option<Arc<Table>>> {
            let mut state = self.state.lock();
            // A failed wait leaves no segment, so that the other streams of the device end.
            let Segments { left, last } = std::mem::take(&mut *state);
            wait_until("the segment", || last.as_ref().is_none_or(|last| last.strong_count() == 1));
            if left == 0 {
                return Ok(None);
            }
            let batch = in_arena(&self.arena, &rows_of("p", 100));
            let last = batch.column(0).to_data().buffers().first().cloned();
            *state = Segments { left: left - 1, last };
            Ok(Some(Arc::new(Table::from_batches("p", batch.schema(), vec![batch])?)))
        }

        fn stop(&self, _: &Error) {}
    }
    let engines = Engines::new();
    let task = of_unknown_rows(&engines.task(JoinKind::Right, Strategy::Hash));
    for engine in engines.both() {
        let join = engines.prepare(engine, &task);
        let state = Mutex::new(Segments { left: 5, last: None });
        let source = OneByOne { state, arena: engines.catalog.arena().clone() };
        // Drops all batches, because they may share buffers with a segment.
        let sink = Tells(mpsc::channel().0);
        let monitor = Monitor::default();
        join.probe(&source, &engines.grant().host_memory, &sink, &monitor).unwrap();
        assert_eq!(monitor.probed_rows(), 500);
    }
}

/// Rows of a stream stay allocated until the last batch of the result that shares them is dropped.
#[test]
fn a_segment_goes_back_when_no_batch_shares_its_buffers() {
    let engines = Engines::new();
    // A right join keeps the order of `p`, so that its result shares columns with the segments.
    let task = of_unknown_rows(&engines.task(JoinKind::Right, Strategy::Hash));
    for engine in engines.both() {
        let join = engines.prepare(engine, &task);
        let before = engines.used_bytes();
        let sink = Batches::default();
        std::thread::scope(|scope| {
            let all = rows_of("p", PROBE_ROWS);
            let batches = cut(&all, 1_000).iter().map(|batch| in_arena(engines.catalog.arena(), batch)).collect();
            let (source, _) = written(scope, batches);
            join.probe(&*source, &engines.grant().host_memory, &sink, &Monitor::default()).unwrap();
        });
        let batches = sink.0.into_inner();
        assert!(engines.used_bytes() > before);
        // Free memory is overwritten.
        let mut others = engines.catalog.arena().allocate(64 << 20, "others").unwrap();
        others.fill(0xff);
        drop(others);
        let texts = batches.iter().flat_map(|batch| {
            let column = batch.schema().index_of("p_text").unwrap();
            batch.column(column).as_string::<i32>().iter().flatten().map(str::to_owned).collect::<Vec<_>>()
        });
        assert!(texts.into_iter().all(|text| text.starts_with("p ")));
        drop(batches);
        wait_until("the segments", || engines.used_bytes() == before);
    }
}

#[test]
fn a_sink_that_does_not_take_batches_holds_the_writer_back() {
    /// Waits at the first batch.
    struct Waits {
        reached: mpsc::SyncSender<()>,
        go_on: Mutex<Option<mpsc::Receiver<()>>>,
    }
    impl BatchSink for Waits {
        fn push(&self, _: RecordBatch) -> Result<()> {
            if let Some(go_on) = self.go_on.lock().take() {
                self.reached.send(()).unwrap();
                // After a failed assertion, nothing is sent.
                let _ = go_on.recv();
            }
            Ok(())
        }
    }
    const BATCHES: usize = 2_000;
    // The queue holds a batch or two, and a segment is what the queue held. Few segments are on
    // their way in the join and in batches that are not pushed.
    const HELD_BATCHES_MAX: usize = 100;
    let engines = Engines::new();
    let task = of_unknown_rows(&engines.task(JoinKind::Inner, Strategy::Hash));
    for engine in engines.both() {
        let join = engines.prepare(engine, &task);
        let memory = engines.grant().host_memory;
        let (batch, written) = (rows_of("p", 100), AtomicUsize::new(0));
        std::thread::scope(|scope| {
            // These are dropped here or by the probe, so that no thread waits after a failed
            // assertion.
            let source = TestSource::of(&batch);
            let (reached, at_first) = mpsc::sync_channel(1);
            let (release, go_on) = mpsc::channel();
            let sink = Waits { reached, go_on: Mutex::new(Some(go_on)) };
            let (into, batch, written) = (source.0.clone(), &batch, &written);
            scope.spawn(move || {
                for _ in 0..BATCHES {
                    into.push(batch.clone(), &CancelFlag::new()).unwrap();
                    written.fetch_add(1, Ordering::Relaxed);
                }
                into.finish();
            });
            let (rows, join, memory) = (source.0.clone(), &*join, &memory);
            let probe = scope.spawn(move || join.probe(&*rows, memory, &sink, &Monitor::default()));
            at_first.recv().unwrap();
            // A writer that is not held back is done by then.
            std::thread::sleep(Duration::from_millis(100));
            let held = written.load(Ordering::Relaxed);
            assert!(held <= HELD_BATCHES_MAX, "{held} batches were written while the sink took none");
            release.send(()).unwrap();
            probe.join().unwrap().unwrap();
        });
        assert_eq!(written.into_inner(), BATCHES);
    }
}

/// Sink that tells of each batch.
struct Tells(mpsc::Sender<()>);

impl BatchSink for Tells {
    fn push(&self, _: RecordBatch) -> Result<()> {
        // The test waits for the first only.
        let _ = self.0.send(());
        Ok(())
    }
}

/// Probe that has joined one batch and waits for more rows.
struct Waiting<'s> {
    source: TestSource,
    cancel: CancelFlag,
    probe: ScopedJoinHandle<'s, Result<()>>,
}

impl<'s> Waiting<'s> {
    fn begin<'e>(scope: &'s Scope<'s, 'e>, engines: &'e Engines, join: &'e dyn Prepared) -> Self {
        let batch = rows_of("p", 100);
        let source = TestSource::of(&batch);
        source.push(batch, &CancelFlag::new()).unwrap();
        let (tell, told) = mpsc::channel();
        let (cancel, rows) = (CancelFlag::new(), source.0.clone());
        let monitor = Monitor::new(cancel.clone());
        let memory = engines.grant().host_memory;
        let probe = scope.spawn(move || join.probe(&*rows, &memory, &Tells(tell), &monitor));
        told.recv().unwrap();
        Self { source, cancel, probe }
    }

    /// Expects the probe to fail, and its writer with it.
    fn failure(self) -> Error {
        let failure = self.probe.join().unwrap().unwrap_err();
        assert_eq!(self.source.push(rows_of("p", 1), &CancelFlag::new()), Err(failure.clone()));
        failure
    }
}

#[test]
fn a_cancelled_probe_leaves_the_others_undisturbed() {
    let engines = Engines::new();
    let task = of_unknown_rows(&engines.task(JoinKind::Inner, Strategy::RadixHash));
    for engine in engines.both() {
        let join = engines.prepare(engine, &task);
        std::thread::scope(|scope| {
            let (stopped, other) = (Waiting::begin(scope, &engines, &*join), Waiting::begin(scope, &engines, &*join));
            stopped.cancel.raise();
            assert!(matches!(stopped.failure(), Error::Cancelled(_)));
            other.source.push(rows_of("p", 100), &CancelFlag::new()).unwrap();
            other.source.finish();
            other.probe.join().unwrap().unwrap();
        });
    }
}

#[test]
fn a_sink_that_refuses_a_batch_ends_the_probe_and_its_writer() {
    struct Refuses;
    impl BatchSink for Refuses {
        fn push(&self, _: RecordBatch) -> Result<()> {
            Err(Error::Precondition("no reader wants it".into()))
        }
    }
    let engines = Engines::new();
    let task = of_unknown_rows(&engines.task(JoinKind::Inner, Strategy::Hash));
    for engine in engines.both() {
        let join = engines.prepare(engine, &task);
        std::thread::scope(|scope| {
            let (source, writer) = written(scope, cut(&rows_of("p", PROBE_ROWS), 10));
            let refused = join.probe(&*source, &engines.grant().host_memory, &Refuses, &Monitor::default());
            assert_eq!(refused, Err(Error::Precondition("no reader wants it".into())));
            assert_eq!(writer.join().unwrap(), refused);
        });
    }
}

#[test]
fn more_calls_than_the_device_has_slots_are_refused() {
    let engines = Engines::new();
    let task = of_unknown_rows(&engines.task(JoinKind::Inner, Strategy::Hash));
    let join = engines.prepare(&engines.child, &task);
    let before = engines.used_bytes();
    std::thread::scope(|scope| {
        let running: Vec<_> = (0..engines.child.jobs_max()).map(|_| Waiting::begin(scope, &engines, &*join)).collect();
        let (source, writer) = written(scope, cut(&rows_of("p", PROBE_ROWS), 10));
        let refused = join.probe(&*source, &engines.grant().host_memory, &Batches::default(), &Monitor::default());
        assert!(
            matches!(&refused, Err(Error::Exhausted(why)) if why.contains(&format!("runs {} jobs", engines.child.jobs_max()))),
            "{refused:?}"
        );
        assert_eq!(writer.join().unwrap(), refused);
        let whole = engines.task(JoinKind::Inner, Strategy::Hash);
        let refused = run_on(&engines.child, &engines.catalog, &whole);
        assert!(matches!(refused, Err(Error::Exhausted(_))));
        running.iter().for_each(|waiting| waiting.source.finish());
        running.into_iter().for_each(|waiting| waiting.probe.join().unwrap().unwrap());
    });
    join.finish(&engines.grant().host_memory, &Batches::default(), &Monitor::default()).unwrap();
    wait_until("all memory", || engines.used_bytes() == before);
}

#[test]
fn a_child_that_ends_fails_all_calls_and_returns_all_memory() {
    let engines = Engines::new();
    let task = of_unknown_rows(&engines.task(JoinKind::Full, Strategy::RadixHash));
    let before = engines.used_bytes();
    let join = engines.prepare(&engines.child, &task);
    let is_lost = |outcome: &Result<()>| matches!(outcome, Err(Error::Unavailable(_)));
    std::thread::scope(|scope| {
        let probes = [(); 2].map(|()| Waiting::begin(scope, &engines, &*join));
        engines.line.shutdown(Shutdown::Both).unwrap();
        for probe in probes {
            let failure = probe.failure();
            assert!(is_lost(&Err(failure.clone())), "{failure}");
        }
    });
    let (memory, source) = (engines.grant().host_memory, TableRows::new(engines.catalog.table("p").unwrap()));
    let again = join.probe(&source, &memory, &Batches::default(), &Monitor::default());
    assert!(is_lost(&again), "{again:?}");
    let finished = join.finish(&memory, &Batches::default(), &Monitor::default());
    assert!(is_lost(&finished), "{finished:?}");
    let build = TableRows::new(engines.catalog.table("b").unwrap());
    let prepared = engines.child.prepare(task, &build, &engines.grant(), &Monitor::default()).map(drop);
    assert!(is_lost(&prepared), "{prepared:?}");
    drop(join);
    wait_until("all memory", || engines.used_bytes() == before);
}

#[test]
fn a_prepared_join_ends_with_the_process_that_made_it() {
    let (catalog, slabs) = tables();
    let starts = Starts::default();
    let engine = SupervisedEngine::new(starts.of(&catalog, &slabs), Some(Duration::from_millis(1))).unwrap();
    let task = task_on(&engine, &catalog, JoinKind::Inner, Strategy::Hash);
    let probe = |join: &dyn Prepared, sink: &Batches| {
        let (rows, memory) = (TableRows::new(task.probe.table.clone()), grant_of(&catalog).host_memory);
        join.probe(&rows, &memory, sink, &Monitor::default())
    };
    let prepare = || {
        let build = TableRows::new(task.build.table.clone());
        engine.prepare(task.clone(), &build, &grant_of(&catalog), &Monitor::default()).unwrap()
    };
    let (join, sink) = (prepare(), Batches::default());
    probe(&*join, &sink).unwrap();
    starts.cut();
    wait_until("another process", || engine.check().is_ok() && engine.restarts() == 1);
    let lost = probe(&*join, &Batches::default());
    assert!(matches!(lost, Err(Error::Unavailable(_))), "{lost:?}");
    let again = Batches::default();
    probe(&*prepare(), &again).unwrap();
    assert_eq!(sorted(&task, &again.0.into_inner()), sorted(&task, &sink.0.into_inner()));
}

/// Process whose messages a test sends and receives itself.
struct Script {
    sender: Sender,
    messages: Receiver,
}

impl Script {
    fn opened(socket: UnixStream) -> Self {
        let mut script = Self { sender: Sender::new(socket.try_clone().unwrap()), messages: Receiver::new(socket) };
        let device = opening().open().unwrap();
        let (info, memory_bytes) = (DeviceInfo::of(&*device), device.memory().limit_bytes());
        script.receive(|message| matches!(message, ToChild::Open(_)).then_some(()));
        script.send(&FromChild::Opened(Ok(Opened {
            info,
            memory_bytes,
            jobs_max: device.jobs_max(),
            window_bytes: 0,
        })));
        script
    }

    fn send(&self, message: &FromChild) {
        self.sender.send(message, None).unwrap();
    }

    /// Receives messages up to the first that `wanted` takes.
    fn receive<T>(&mut self, wanted: impl Fn(ToChild) -> Option<T>) -> T {
        loop {
            if let Some(taken) = wanted(self.messages.receive().unwrap().unwrap()) {
                return taken;
            }
        }
    }

    fn call(&self, call: u64, job: u64, want: HostRequest) {
        self.send(&FromChild::Call { call, job, unused: Vec::new(), want });
    }

    fn answer(&mut self) -> (u64, Result<HostResponse>) {
        self.receive(|message| match message {
            ToChild::HostResponse { call, answer } => Some((call, answer)),
            _ => None,
        })
    }

    fn end(&self, job: u64, outcome: Result<()>) {
        self.send(&FromChild::Ended { job, outcome, report: Report::default(), state: State::default(), lost: None });
    }
}

/// Steps of a probe on a device with several streams: one waits for rows, another pushes a batch
/// and fails.
#[test]
fn a_job_that_waits_for_rows_takes_batches_and_a_stop() {
    let (catalog, slabs) = tables();
    let (here, there) = UnixStream::pair().unwrap();
    let task = of_unknown_rows(&task_on(
        &InProcess::new(opening().open().unwrap(), catalog.arena().clone()),
        &catalog,
        JoinKind::Inner,
        Strategy::Hash,
    ));
    let result = RecordBatch::new_empty(task.schema.clone());
    let failed = || Error::Unavailable("a stream has failed".into());
    std::thread::scope(|scope| {
        let script = scope.spawn(|| {
            let mut script = Script::opened(there);
            let next_job = |script: &mut Script| {
                script.receive(|message| match message {
                    ToChild::Job(job) => Some((job.number, job.work)),
                    _ => None,
                })
            };
            let (prepare, _) = next_job(&mut script);
            script.end(prepare, Ok(()));
            let (probe, work) = next_job(&mut script);
            assert!(matches!(work, Work::Probe { prepared, .. } if prepared == prepare));
            script.call(1, probe, HostRequest::NextSegment);
            let batch = BatchParts::of(&result, &|buffer| Place::Bytes(buffer.to_vec()));
            script.call(2, probe, HostRequest::Push { batch, pieces: Vec::new(), shared: None });
            let (call, answer) = script.answer();
            assert!(call == 2 && matches!(answer, Ok(HostResponse::Pushed)), "{call}: {answer:?}");
            script.send(&FromChild::StopRows { job: probe, error: failed() });
            let (call, answer) = script.answer();
            assert!(call == 1 && answer.as_ref().is_err_and(|error| *error == failed()), "{call}: {answer:?}");
            script.end(probe, Err(failed()));
            let question = script.receive(|message| match message {
                ToChild::DropPrepared { question, prepared } => Some((question, prepared)),
                _ => None,
            });
            assert_eq!(question.1, prepare);
            script.send(&FromChild::Dropped { question: question.0, state: State::default() });
        });
        let engine = ChildEngine::over(&opening(), catalog.arena().clone(), &slabs, here, None).unwrap();
        let build = TableRows::new(catalog.table("r").unwrap());
        let join = engine.prepare(task.clone(), &build, &grant_of(&catalog), &Monitor::default()).unwrap();
        let (rows, sink) = (IncomingBatches::new("s", task.probe.table.schema.clone(), 1), Batches::default());
        let outcome = join.probe(&rows, &grant_of(&catalog).host_memory, &sink, &Monitor::default());
        assert_eq!((outcome, sink.0.lock().len()), (Err(failed()), 1));
        drop(join);
        script.join().unwrap();
    });
}

#[test]
fn numbered_rows_get_the_answers_that_they_get_alone() {
    let engines = Engines::new();
    let (rows, before) = (rows_of("p", PROBE_ROWS), engines.used_bytes());
    let questions = cut(&rows, 1_700);
    let numbered: Vec<RecordBatch> = (0..)
        .zip(&questions)
        .map(|(number, question)| {
            let numbers: ArrayRef = Arc::new(UInt32Array::from(vec![number; question.num_rows()]));
            let columns = question.columns().iter().cloned().chain([numbers]).collect();
            let batch = RecordBatch::try_new(with_number(question.schema_ref()), columns).unwrap();
            in_arena(engines.catalog.arena(), &batch)
        })
        .collect();
    for how in [JoinKind::Inner, JoinKind::Right, JoinKind::RightSemi, JoinKind::RightAnti, JoinKind::Full] {
        for strategy in Strategy::ALL {
            let task = of_unknown_rows(&engines.task(how, strategy));
            for engine in engines.both() {
                let (join, monitor, memory) =
                    (engines.prepare(engine, &task), Monitor::default(), engines.grant().host_memory);
                let probe_numbered = |sink: &Batches| {
                    let source = IncomingBatches::new("stream", numbered[0].schema(), usize::MAX).numbered();
                    numbered.iter().for_each(|batch| source.push(batch.clone(), &CancelFlag::new()).unwrap());
                    source.finish();
                    join.probe(&source, &memory, sink, &monitor)
                };
                let together = Batches::default();
                if how == JoinKind::Full {
                    // It marks rows of the build side.
                    let refused = probe_numbered(&together).unwrap_err();
                    assert!(matches!(refused, Error::Unsupported(_)), "{refused}");
                    continue;
                }
                probe_numbered(&together).unwrap();
                let together = concat_batches(&with_number(&task.schema), &together.0.into_inner()).unwrap();
                let numbers = together.column(task.schema.fields().len()).as_primitive::<UInt32Type>().clone();
                for (number, question) in (0..).zip(&questions) {
                    let alone = Batches::default();
                    let source = TestSource::of_unbounded(question);
                    source.push(question.clone(), &CancelFlag::new()).unwrap();
                    source.finish();
                    join.probe(&*source, &memory, &alone, &monitor).unwrap();
                    let is_of = BooleanArray::from_unary(&numbers, |of| of == number);
                    let of_question = filter_record_batch(&together, &is_of).unwrap();
                    let (columns, _) = of_question.columns().split_at(task.schema.fields().len());
                    let of_question = RecordBatch::try_new(task.schema.clone(), columns.to_vec()).unwrap();
                    let (found, expected) = (sorted(&task, &[of_question]), sorted(&task, &alone.0.into_inner()));
                    assert!(!expected.is_empty());
                    assert!(found == expected, "{how} by {strategy}, question {number}: {} rows", found.len());
                }
            }
        }
    }
    drop(numbered);
    wait_until("all memory", || engines.used_bytes() == before);
}
