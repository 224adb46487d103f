//! Gangs of devices behind sockets, whose processes are threads of the test.

use std::collections::BTreeSet;

use super::*;
use crate::device::host::HostDevice;
use crate::device::{PeerOps, gpu_count};
use crate::join::{Distribution, GangBoard, NearRows, RowNodes, TaskSide};
use crate::planner::{Plan, PlanOverrides, plan_with_overrides};

/// Distribution, and true if ranks read the build side in shares.
type Way = (Distribution, bool);

const BROADCAST: Way = (Distribution::Broadcast, false);
const SHARED_READ: Way = (Distribution::Broadcast, true);
const HASH: Way = (Distribution::Hash, false);

/// Engines of a gang, over the same tables.
struct Gang {
    catalog: Catalog,
    engines: Vec<Arc<dyn Engine>>,
    /// Process ends of the sockets, which tests cut.
    lines: Vec<UnixStream>,
    used_before: u64,
}

fn opening_of(index: usize) -> Opening {
    let id = DeviceId { kind: DeviceKind::Host, index: index as u16 };
    Opening { id, memory_bytes: Some(64 << 20), memory_name: format!("memory of device {id}"), ..opening() }
}

impl Gang {
    /// Starts processes, and opens as many further devices in this process.
    fn new(processes: usize, here: usize) -> Self {
        let (catalog, slabs) = tables();
        let (mut engines, mut lines): (Vec<Arc<dyn Engine>>, _) = (Vec::new(), Vec::new());
        for index in 0..processes {
            let (engine, line, _) = process_that_opens(&opening_of(index), &catalog, &slabs);
            engines.push(Arc::new(engine));
            lines.push(line);
        }
        for index in processes..processes + here {
            let device = opening_of(index).open().unwrap();
            engines.push(Arc::new(InProcess::new(device, catalog.arena().clone())));
        }
        let used_before = catalog.arena().budget().used_bytes();
        Self { catalog, engines, lines, used_before }
    }

    fn plan(&self, spec: &JoinSpec, strategy: Strategy, (distribution, shares_build_read): Way) -> Plan {
        let engine = &self.engines[0];
        let target = Target::new(engine.id(), engine.info(), engine.memory(), Rates::host(2));
        let target = Target { ranks: self.engines.len(), ..target };
        let (distribution, shares_build_read) = (Some(distribution), Some(shares_build_read));
        let overrides = PlanOverrides { distribution, shares_build_read, ..PlanOverrides::named(Some(strategy)) };
        plan_with_overrides(bind(spec, &self.catalog).unwrap(), &overrides, &target).unwrap()
    }

    /// Returns a task of small chunks, so that every rank has its turn.
    fn task(&self, how: JoinKind, strategy: Strategy) -> Task {
        self.task_of(how, strategy, BROADCAST)
    }

    fn task_of(&self, how: JoinKind, strategy: Strategy, way: Way) -> Task {
        let spec = JoinSpec { how, ..JoinSpec::inner("r", "s", vec![KeyPair::new("k", "k")]) };
        Task { chunk_rows_min: Some(500), ..self.plan(&spec, strategy, way).task().unwrap() }
    }

    fn run(&self, task: &Task, sink: &dyn BatchSink, monitor: &Monitor) -> Result<()> {
        self.run_within(&grant_of(&self.catalog).host_memory, task, sink, monitor)
    }

    fn run_within(&self, memory: &ReservedPool, task: &Task, sink: &dyn BatchSink, monitor: &Monitor) -> Result<()> {
        let grant = |_: &Arc<dyn Engine>| Grant { device_memory: None, host_memory: memory.clone() };
        let grants: Vec<Grant> = self.engines.iter().map(grant).collect();
        run_gang(&self.engines, task.clone(), &grants, sink, monitor)
    }

    fn rows(&self, task: &Task) -> Vec<Vec<u8>> {
        let sink = Batches::default();
        self.run(task, &sink, &Monitor::default()).unwrap();
        sorted(task, &sink.0.into_inner())
    }

    /// Returns the rows that one device in this process gives.
    fn expected(&self, task: &Task) -> Vec<Vec<u8>> {
        let one = InProcess::new(opening().open().unwrap(), self.catalog.arena().clone());
        sorted(task, &run_on(&one, &self.catalog, task).unwrap())
    }

    /// Waits until host memory and the memory of all devices are as before the first gang.
    fn wait_for_all_memory(&self) {
        // Returned memory may still be on its way when a gang has ended.
        wait_until("all host memory", || self.catalog.arena().budget().used_bytes() == self.used_before);
        let is_free = |engine: &Arc<dyn Engine>| engine.memory_use().used_bytes == 0;
        wait_until("all device memory", || self.engines.iter().all(is_free));
    }
}

/// Kinds of join that a gang divides.
fn divided_kinds() -> impl Iterator<Item = JoinKind> {
    JoinKind::ALL.into_iter().filter(|&how| how != JoinKind::Full)
}

/// True in the thread that serves the first rank of a gang, which is a process.
fn serves_first_rank() -> bool {
    std::thread::current().name() == Some("gang/0")
}

/// Sink that keeps the first batch waiting until another rank pushes too. The first rank has to be
/// a process.
#[derive(Default)]
struct Meeting {
    batches: Batches,
    has_pushed: Mutex<BTreeSet<bool>>,
}

impl BatchSink for Meeting {
    fn push(&self, batch: RecordBatch) -> Result<()> {
        self.has_pushed.lock().insert(serves_first_rank());
        wait_until("a batch of another rank", || self.has_pushed.lock().len() == 2);
        self.batches.push(batch)
    }
}

/// Meeting that calls a function once both ranks have pushed, and is slow from then on.
struct AfterMeeting<'a> {
    meeting: Meeting,
    then: &'a (dyn Fn() -> Result<()> + Sync),
}

impl BatchSink for AfterMeeting<'_> {
    fn push(&self, batch: RecordBatch) -> Result<()> {
        self.meeting.push(batch)?;
        (self.then)()?;
        std::thread::sleep(Duration::from_millis(1));
        Ok(())
    }
}

/// Sink that calls a function with each batch.
struct AfterPush<'a> {
    batches: Batches,
    then: &'a (dyn Fn() -> Result<()> + Sync),
}

impl BatchSink for AfterPush<'_> {
    fn push(&self, batch: RecordBatch) -> Result<()> {
        self.batches.push(batch)?;
        (self.then)()
    }
}

fn after_meeting(then: &(dyn Fn() -> Result<()> + Sync)) -> AfterMeeting<'_> {
    AfterMeeting { meeting: Meeting::default(), then }
}

impl AfterMeeting<'_> {
    fn pushed_rows(&self) -> usize {
        self.meeting.batches.0.lock().iter().map(RecordBatch::num_rows).sum()
    }
}

#[test]
fn gangs_of_processes_give_the_rows_of_one_device_and_return_all_memory() {
    for gang in [Gang::new(2, 0), Gang::new(3, 0), Gang::new(1, 1)] {
        for how in divided_kinds() {
            let expected = gang.expected(&gang.task(how, Strategy::Hash));
            for strategy in Strategy::ALL {
                for distribution in [BROADCAST, HASH] {
                    let rows = gang.rows(&gang.task_of(how, strategy, distribution));
                    assert_eq!(rows, expected, "{how} by {strategy}, {distribution:?}, {} ranks", gang.engines.len());
                }
            }
        }
        gang.wait_for_all_memory();
    }
}

/// Does nothing without a GPU, real or emulated.
#[test]
fn a_gpu_and_the_cpu_divide_a_join() {
    if gpu_count().unwrap() == 0 {
        return;
    }
    let mut gang = Gang::new(1, 1);
    let id = DeviceId { kind: DeviceKind::Cuda, index: 0 };
    let gpu = Opening { id, memory_name: "memory of a GPU".into(), ..opening_of(0) }.open().unwrap();
    gang.engines.insert(0, Arc::new(InProcess::new(gpu, gang.catalog.arena().clone())));
    for how in divided_kinds() {
        let expected = gang.expected(&gang.task(how, Strategy::Hash));
        for strategy in Strategy::ALL {
            // The host devices leave tables of few chunks to the GPU.
            let task = Task { chunk_rows_min: Some(100), ..gang.task(how, strategy) };
            let (sink, monitor) = (Batches::default(), Monitor::default());
            gang.run(&task, &sink, &monitor).unwrap();
            assert_eq!(sorted(&task, &sink.0.into_inner()), expected, "{how} by {strategy}");
            assert_eq!(monitor.report().probed_rows, task.probe.table.rows);
        }
    }
    gang.wait_for_all_memory();
}

#[test]
fn a_gang_counts_the_rows_of_all_ranks() {
    for gang in [Gang::new(3, 0), Gang::new(1, 2)] {
        for how in divided_kinds() {
            let spec = JoinSpec { how, count: true, ..JoinSpec::inner("r", "s", vec![KeyPair::new("k", "k")]) };
            let task = |distribution| {
                let plan = gang.plan(&spec, Strategy::RadixHash, distribution);
                Task { chunk_rows_min: Some(500), ..plan.task().unwrap() }
            };
            let expected = gang.expected(&task(BROADCAST));
            for distribution in [BROADCAST, SHARED_READ, HASH] {
                assert_eq!(gang.rows(&task(distribution)), expected, "{how}, {distribution:?}");
            }
        }
    }
}

#[test]
fn every_rank_of_a_gang_takes_rows() {
    for gang in [Gang::new(2, 0), Gang::new(1, 1)] {
        let task = Task { batch_rows: Some(10), ..gang.task(JoinKind::Inner, Strategy::Hash) };
        let sink = Meeting::default();
        gang.run(&task, &sink, &Monitor::default()).unwrap();
        assert_eq!(sorted(&task, &sink.batches.0.into_inner()), gang.expected(&task));
    }
}

/// The second device loses the bytes of its first push. The first device is a process or not.
#[test]
fn a_pair_whose_bytes_do_not_arrive_exchanges_rows_through_host_memory() {
    for first in [Gang::new(1, 0), Gang::new(0, 1)] {
        let folder = tempfile::tempdir().unwrap();
        let fault = folder.path().join("fault");
        let budget = Budget::new("memory of device host:1", "--device-memory", 64 << 20);
        let device = HostDevice::new(1, 2, budget, None).unwrap().with_fault_file(fault.clone());
        device.open_window(opening().window_bytes).unwrap();
        let second: Arc<dyn Engine> = Arc::new(InProcess::new(Arc::new(device), first.catalog.arena().clone()));
        let gang = Gang { engines: vec![first.engines[0].clone(), second], ..first };
        let [there, back] = [(0, 1), (1, 0)];
        let access = |(from, to): (usize, usize)| peer_access(&*gang.engines[from], &*gang.engines[to]).unwrap();
        assert_eq!((access(there), access(back)), (None, None));

        std::fs::write(&fault, "lost-push").unwrap();
        let expected = gang.expected(&gang.task(JoinKind::Inner, Strategy::Hash));
        let task = gang.task_of(JoinKind::Inner, Strategy::Hash, HASH);
        for _ in 0..2 {
            assert_eq!(gang.rows(&task), expected);
            assert_eq!(access(there), Some(PeerAccess::Direct));
            let found = access(back);
            let says = "bytes that host:1 writes to host:0 do not arrive";
            assert!(matches!(&found, Some(PeerAccess::ThroughHost { why }) if why.contains(says)), "{found:?}");
        }
        let held = || gang.catalog.arena().budget().used_bytes() - gang.used_before;
        wait_until("only the window in host memory", || held() == opening().window_bytes as u64);
    }
}

#[test]
fn a_device_that_is_started_again_is_checked_again() {
    let (gang, slabs) = (Gang::new(0, 1), Arc::new(SharedSlabs::default()));
    gang.catalog.arena().pin_by(Some(slabs.clone()));
    let start = || {
        let (process, _, _) = process_that_opens(&opening_of(1), &gang.catalog, &slabs);
        let engines = vec![gang.engines[0].clone(), Arc::new(process) as Arc<dyn Engine>];
        windows::connect_all(&engines.iter().map(|engine| &**engine).collect::<Vec<_>>(), &CancelFlag::new()).unwrap();
        engines
    };
    let (before, after) = (start(), start());
    let (first, earlier, later) = (&*before[0], &*before[1], &*after[1]);
    assert_eq!(
        [peer_access(first, later), peer_access(later, first)],
        [Ok(Some(PeerAccess::Direct)), Ok(Some(PeerAccess::Direct))]
    );
    assert_eq!(peer_access(earlier, first), Ok(None), "the later process writes there now");
}

#[test]
fn all_links_of_devices_are_measured_wherever_the_devices_are() {
    let gang = Gang::new(2, 1);
    let engines: Vec<&dyn Engine> = gang.engines.iter().map(|engine| &**engine).collect();
    windows::connect_all(&engines, &CancelFlag::new()).unwrap();
    let used = || engines.iter().map(|engine| engine.memory().used_bytes()).collect::<Vec<_>>();
    let used_before = used();
    let rates = gang_rates::measured(&engines).unwrap();
    for pair in [[0, 1], [1, 2], [2, 0]] {
        let of_pair = rates.of_set(&pair).unwrap();
        assert!(of_pair.peers > 1e6 && of_pair.host_memory > 1e6, "{rates:?}");
    }
    assert_eq!(used(), used_before);
    let expected = gang.expected(&gang.task(JoinKind::Inner, Strategy::Hash));
    assert_eq!(gang.rows(&gang.task_of(JoinKind::Inner, Strategy::Hash, HASH)), expected);
    gang.lines[1].shutdown(Shutdown::Both).unwrap();
    assert!(gang_rates::measured(&engines).is_err(), "a process has ended");
}

#[test]
fn devices_without_windows_exchange_no_rows() {
    let gang = Gang::new(0, 1);
    let device = Opening { window_bytes: 0, ..opening_of(1) }.open().unwrap();
    let closed = InProcess::new(device, gang.catalog.arena().clone());
    for pair in [peer_access(&closed, &*gang.engines[0]), peer_access(&*gang.engines[0], &closed)] {
        assert!(
            matches!(&pair, Err(Error::Unavailable(words)) if words.contains("host:1 shares no memory")),
            "{pair:?}"
        );
    }
}

/// Broadcast cannot run a full join on several ranks.
#[test]
fn ranks_that_exchange_rows_run_a_full_join() {
    let gang = Gang::new(3, 0);
    let alone = gang.task_of(JoinKind::Full, Strategy::Hash, (Distribution::Alone, false));
    let task = gang.task_of(JoinKind::Full, Strategy::RadixHash, HASH);
    assert_eq!(gang.rows(&task), gang.expected(&alone));
    gang.wait_for_all_memory();
}

/// One process ends while rows cross. The others fail too, and a gang of the others works.
#[test]
fn a_process_that_ends_in_an_exchange_fails_its_gang_and_no_later_one() {
    let gang = Gang::new(3, 0);
    let task = gang.task_of(JoinKind::Inner, Strategy::Hash, HASH);
    let expected = gang.expected(&gang.task(JoinKind::Inner, Strategy::Hash));
    let cut = || Ok(gang.lines[0].shutdown(Shutdown::Both)?);
    let sink = AfterPush { batches: Batches::default(), then: &cut };
    let failed = gang.run(&task, &sink, &Monitor::default()).unwrap_err();
    assert!(matches!(&failed, Error::Unavailable(message) if message.contains("host:0")), "{failed}");
    drop(sink);
    let others = Gang { engines: gang.engines[1..].to_vec(), ..gang };
    let task = others.task_of(JoinKind::Inner, Strategy::Hash, HASH);
    assert_eq!(others.rows(&task), expected);
    others.wait_for_all_memory();
}

#[test]
fn a_process_that_ends_fails_its_gang_and_stops_the_other_rank() {
    for gang in [Gang::new(2, 0), Gang::new(1, 1)] {
        let task = Task { batch_rows: Some(10), ..gang.task(JoinKind::Inner, Strategy::Hash) };
        let all = gang.expected(&task).len();
        let lost = gang.lines.len() - 1;
        let cut = || {
            // Later batches find it cut already.
            drop(gang.lines[lost].shutdown(Shutdown::Both));
            Ok(())
        };
        let sink = after_meeting(&cut);
        let outcome = gang.run(&task, &sink, &Monitor::default());
        let words = format!("rank {lost} on host:{lost}: the process of host:{lost} has ended");
        assert!(matches!(&outcome, Err(Error::Unavailable(why)) if why.contains(&words)), "{outcome:?}");
        assert!(sink.pushed_rows() < all, "the other rank was stopped");
        drop(sink);
        gang.wait_for_all_memory();
        let left = &gang.engines[1 - lost];
        assert_eq!(sorted(&task, &run_on(&**left, &gang.catalog, &task).unwrap()).len(), all, "{} goes on", left.id());
    }
}

#[test]
fn a_process_that_ends_fails_its_gang_while_all_ranks_wait_for_a_reader() {
    for gang in [Gang::new(2, 0), Gang::new(1, 1)] {
        let gang = Arc::new(gang);
        let task = Task { batch_rows: Some(10), ..gang.task(JoinKind::Inner, Strategy::Hash) };
        let spool = unread(&task);
        let run = {
            let (gang, task, spool) = (gang.clone(), task.clone(), spool.clone());
            std::thread::spawn(move || gang.run(&task, &spool, &Monitor::default()))
        };
        wait_until("the first batch", || spool.progress().0 == 1);
        let lost = gang.lines.len() - 1;
        gang.lines[lost].shutdown(Shutdown::Both).unwrap();
        wait_until("the end of the gang", || run.is_finished());
        let outcome = run.join().unwrap();
        let words = format!("the process of host:{lost} has ended");
        assert!(matches!(&outcome, Err(Error::Unavailable(why)) if why.contains(&words)), "{outcome:?}");
        assert_eq!(spool.progress().0, 1, "no reader has made room");
        drop(spool);
        gang.wait_for_all_memory();
    }
}

/// A rank that waits for a reader may fail before the loss of another rank is noticed.
#[test]
fn the_loss_of_a_device_is_the_reason_why_another_rank_failed_earlier() {
    let gang = Gang::new(2, 0);
    let task = Task { batch_rows: Some(10), ..gang.task(JoinKind::Inner, Strategy::Hash) };
    let has_failed = AtomicUsize::new(0);
    let fails_late = || {
        if serves_first_rank() {
            drop(gang.lines[1].shutdown(Shutdown::Both));
            has_failed.store(1, Ordering::Relaxed);
            return Err(Error::Exhausted("the reader took nothing".into()));
        }
        wait_until("the failure of the first rank", || has_failed.load(Ordering::Relaxed) == 1);
        std::thread::sleep(Duration::from_millis(20));
        Ok(())
    };
    let outcome = gang.run(&task, &after_meeting(&fails_late), &Monitor::default());
    assert!(matches!(&outcome, Err(Error::Unavailable(why)) if why.contains("rank 1 on host:1")), "{outcome:?}");
    gang.wait_for_all_memory();
}

#[test]
fn a_gang_whose_process_has_ended_before_fails() {
    let gang = Gang::new(2, 0);
    let task = gang.task(JoinKind::Inner, Strategy::Hash);
    gang.lines[1].shutdown(Shutdown::Both).unwrap();
    wait_until("the loss", || gang.engines[1].check().is_err());
    let outcome = gang.run(&task, &Batches::default(), &Monitor::default());
    assert!(matches!(&outcome, Err(Error::Unavailable(why)) if why.contains("rank 1 on host:1")), "{outcome:?}");
    gang.wait_for_all_memory();
}

#[test]
fn a_cancelled_gang_stops_all_ranks() {
    for gang in [Gang::new(2, 0), Gang::new(1, 1)] {
        let task = Task { batch_rows: Some(10), ..gang.task(JoinKind::Inner, Strategy::RadixHash) };
        let cancel = CancelFlag::new();
        let raise = || {
            cancel.raise();
            Ok(())
        };
        let sink = after_meeting(&raise);
        let outcome = gang.run(&task, &sink, &Monitor::new(cancel.clone()));
        assert!(matches!(outcome, Err(Error::Cancelled(_))), "{outcome:?}");
        let all = gang.expected(&task);
        assert!(sink.pushed_rows() < all.len());
        drop(sink);
        gang.wait_for_all_memory();
        assert_eq!(gang.rows(&task), all, "the next gang is not affected");
    }
}

#[test]
fn a_refused_batch_of_one_rank_ends_the_gang_with_that_error() {
    for gang in [Gang::new(2, 0), Gang::new(1, 1)] {
        let task = Task { batch_rows: Some(10), ..gang.task(JoinKind::Inner, Strategy::Hash) };
        let refuse = || match serves_first_rank() {
            true => Err(Error::Precondition("no reader wants it".into())),
            false => Ok(()),
        };
        let sink = after_meeting(&refuse);
        let outcome = gang.run(&task, &sink, &Monitor::default());
        assert_eq!(outcome, Err(Error::Precondition("rank 0 on host:0: no reader wants it".into())));
        let all = gang.expected(&task);
        assert!(sink.pushed_rows() < all.len(), "the other rank was stopped");
        drop(sink);
        gang.wait_for_all_memory();
        assert_eq!(gang.rows(&task), all, "the next gang is not affected");
    }
}

#[test]
fn a_panic_of_one_rank_s_sink_fails_only_its_gang() {
    let gang = Gang::new(2, 0);
    let task = Task { batch_rows: Some(10), ..gang.task(JoinKind::Inner, Strategy::Hash) };
    let panics = || match serves_first_rank() {
        true => panic!("on purpose"),
        false => Ok(()),
    };
    let failed = gang.run(&task, &after_meeting(&panics), &Monitor::default()).unwrap_err();
    assert!(matches!(&failed, Error::Internal(message) if message.contains("on purpose")), "{failed:?}");
    gang.wait_for_all_memory();
    assert_eq!(gang.rows(&task), gang.expected(&task));
}

#[test]
fn progress_of_a_gang_never_goes_back_and_ends_at_1() {
    for gang in [Gang::new(3, 0), Gang::new(1, 1)] {
        let task = Task { batch_rows: Some(100), ..gang.task(JoinKind::Inner, Strategy::RadixHash) };
        let monitor = Monitor::default();
        let seen = Mutex::new(Vec::new());
        let look = || {
            let mut seen = seen.lock();
            seen.push((monitor.progress(), monitor.probed_rows()));
            Ok(())
        };
        gang.run(&task, &after_meeting(&look), &monitor).unwrap();
        look().unwrap();
        let seen = seen.into_inner();
        assert!(seen.is_sorted(), "{seen:?}");
        assert_eq!(monitor.progress(), 1.0);
        assert_eq!(monitor.probed_rows(), task.probe.table.rows);
        let gathers = |phase: Phase| monitor.phases().iter().filter(|record| record.phase == phase).count();
        assert_eq!(gathers(Phase::Gather), 1, "{:?}", monitor.phases());
    }
}

#[test]
fn a_gang_reports_the_part_of_each_rank() {
    for gang in [Gang::new(2, 0), Gang::new(1, 1), Gang::new(0, 3)] {
        for way in [BROADCAST, HASH] {
            let task = gang.task_of(JoinKind::Inner, Strategy::RadixHash, way);
            let monitor = Monitor::default();
            gang.run(&task, &Batches::default(), &monitor).unwrap();
            let report = monitor.report();
            let devices: Vec<_> = gang.engines.iter().map(|engine| engine.id().to_string()).collect();
            assert_eq!(report.ranks.iter().map(|rank| rank.device.clone()).collect::<Vec<_>>(), devices);
            assert_eq!(report.probed_rows, report.ranks.iter().map(|rank| rank.probe_rows).sum::<u64>());
            assert!(report.ranks.iter().all(|rank| rank.work_seconds > 0.0), "{report:?}");
            let (build, probe) = (&task.build, &task.probe);
            if way == BROADCAST {
                assert_eq!(report.probed_rows, probe.table.rows);
                assert!(report.ranks.iter().all(|rank| (rank.build_rows, rank.sent_bytes) == (build.table.rows, 0)));
                continue;
            }
            // A row without a key crosses nothing, and has no owner.
            assert_eq!((report.build_rows, report.probed_rows), (keyed_rows(build), keyed_rows(probe)));
            assert!(report.ranks.iter().all(|rank| rank.build_rows > 0), "{report:?}");
            // A rank that begins late may find no chunk left to read.
            assert!(report.ranks.iter().any(|rank| rank.sent_bytes > 0 && rank.sending_seconds > 0.0), "{report:?}");
        }
    }
}

fn keyed_rows(side: &TaskSide) -> u64 {
    let keys = side.table.batches.iter().map(|batch| batch.column(side.key_columns[0]));
    keys.map(|keys| (keys.len() - keys.null_count()) as u64).sum()
}

#[test]
fn a_gang_that_fits_in_its_promise_here_fits_in_it_on_processes() {
    let (here, there) = (Gang::new(0, 2), Gang::new(3, 0));
    let run = |gang: &Gang, promised: u64| {
        let budget = gang.catalog.arena().budget();
        let memory = ReservedPool::new(budget.clone());
        memory.open(budget.reserve(promised, "a job").unwrap());
        let others = budget.reserve(budget.unused_bytes(), "others").unwrap();
        let task = Task { batch_rows: Some(1000), ..gang.task(JoinKind::Inner, Strategy::Hash) };
        let sink = Batches::default();
        let outcome = gang.run_within(&memory, &task, &sink, &Monitor::default());
        drop(others);
        memory.close();
        outcome.map(|()| (sorted(&task, &sink.0.lock()), budget.used_bytes() - gang.used_before))
    };
    let (expected, result_bytes) = run(&here, 8 << 20).unwrap();
    // The result, and a half of it for keys and positions.
    let promised = result_bytes / 2 * 3;
    assert_eq!(run(&here, promised).unwrap().0, expected);
    for _ in 0..5 {
        assert_eq!(run(&there, promised).unwrap().0, expected);
    }
    for gang in [&here, &there] {
        let refused = run(gang, result_bytes / 2).unwrap_err();
        assert!(matches!(refused, Error::Exhausted(_)), "{refused:?}");
        gang.wait_for_all_memory();
    }
}

/// Makes ranks on two NUMA nodes, of which each has half of the rows of both sides.
#[test]
fn ranks_on_two_nodes_join_each_row_once() {
    let gang = Gang::new(2, 1);
    for (strategy, way) in [(Strategy::Hash, BROADCAST), (Strategy::RadixHash, HASH)] {
        let task = gang.task_of(JoinKind::Left, strategy, way);
        let devices: Vec<DeviceId> = gang.engines.iter().map(|engine| engine.id()).collect();
        let rows = |table: &Table| Arc::new(RowNodes::of_two_nodes(table.rows));
        let near = NearRows { node: None, build: rows(&task.build.table), probe: rows(&task.probe.table) };
        assert_ne!((&near.build, &near.probe), (&Arc::default(), &Arc::default()));
        if task.composition.exchanges_rows() {
            let engines: Vec<&dyn Engine> = gang.engines.iter().map(|engine| &**engine).collect();
            windows::connect_all(&engines, &CancelFlag::new()).unwrap();
        }
        let (board, sink) = (GangBoard::new(&devices).unwrap(), Batches::default());
        std::thread::scope(|scope| {
            for (number, engine) in gang.engines.iter().enumerate() {
                let near = NearRows { node: [Some(0), Some(1), None][number], ..near.clone() };
                let rank = Rank::of_gang(number, board.clone()).on_node(near);
                let (task, sink, grant) = (task.clone(), &sink, grant_of(&gang.catalog));
                scope.spawn(move || engine.run_rank(task, &rank, &grant, sink, &Monitor::default()).unwrap());
            }
        });
        // A device alone exchanges no rows.
        let alone = gang.task(JoinKind::Left, strategy);
        assert_eq!(sorted(&task, &sink.0.into_inner()), gang.expected(&alone));
    }
}
