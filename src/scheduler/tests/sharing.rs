//! Tests of several jobs on a device.

use std::collections::HashSet;
use std::sync::atomic::Ordering;

use super::*;
use crate::memory::{Reclaim, Reservation};

/// Creates a device that runs `jobs` short jobs at a time.
fn stage(jobs: usize) -> Stage {
    let stage = Stage::with_jobs(1, jobs, SchedulerOptions::default());
    // With this many rows, the join does not fit into a part of the device's memory in one chunk,
    // whichever side is indexed.
    stage.catalog.create(rows_of("large", 160_000)).unwrap();
    stage
}

/// Join that takes its device alone.
fn large(label: &str) -> JoinSpec {
    JoinSpec { columns: vec!["k".into(), label.into()], ..JoinSpec::inner("r", "large", vec![KeyPair::new("k", "k")]) }
}

fn reserved(stage: &Stage) -> u64 {
    stage.memory[0].used_bytes()
}

fn labels(stage: &Stage, count: usize) -> Vec<String> {
    let mut labels: Vec<String> = (0..count).map(|_| stage.next().1).collect();
    labels.sort_unstable();
    labels
}

#[test]
fn short_jobs_run_concurrently_in_parts_of_the_memory() {
    let stage = stage(2);
    let orders = ["r0", "r1", "r2"].map(|label| stage.direct(label));
    let jobs = ["r0", "r1", "r2"].map(|label| stage.submit(label));
    assert_eq!(labels(&stage, 2), ["r0", "r1"]);
    stage.nothing_begins();
    let two_parts = reserved(&stage);
    assert!(two_parts > 0 && two_parts <= stage.memory[0].limit_bytes());
    assert_eq!(stage.scheduler.stats().devices[0].running, 2);
    assert_eq!(jobs[2].status().state, JobState::Queued);
    assert_eq!(jobs[2].status().waiting_for.as_deref(), Some("host:0"));
    assert!(jobs[1].explanation().device.reason.contains("next to 1 more"), "{:?}", jobs[1].explanation().device);
    // One of the jobs ends. The third takes its slot, and the other stays.
    orders[1].send(Box::new(|_, _| Ok(()))).unwrap();
    assert_eq!(stage.next().1, "r2");
    assert_eq!(stage.ended(&jobs[1]), JobState::Complete);
    assert_eq!(reserved(&stage), two_parts);
    assert!(matches!(jobs[0].status().state, JobState::Running));
    for order in [&orders[0], &orders[2]] {
        order.send(Box::new(|_, _| Ok(()))).unwrap();
    }
    stage.idle();
    assert_eq!(reserved(&stage), 0);
    assert_eq!(stage.scheduler.stats().completed_total, 3);
}

#[test]
fn sequential_jobs_do_not_rotate_through_all_threads() {
    let stage = stage(4);
    let thread = || {
        stage.submit("r0");
        stage.next();
        let thread = stage.ask(0, |_, _| (std::thread::current().id(), Ok(())));
        stage.idle();
        thread
    };
    let threads: HashSet<_> = (0..12).map(|_| thread()).collect();
    // The last worker may not be back yet when the next job comes.
    assert!(threads.len() < 4, "{} threads", threads.len());
}

#[test]
fn a_large_job_waits_for_all_running_jobs_and_then_runs_alone() {
    let stage = stage(2);
    let orders = ["r0", "r1", "r2"].map(|label| stage.direct(label));
    let short = ["r0", "r1"].map(|label| stage.submit(label));
    assert_eq!(labels(&stage, 2), ["r0", "r1"]);
    let large = stage.submit_join(&large("large0"), JobOptions::default(), "").unwrap();
    let later = stage.submit("r2");
    assert_eq!((large.status().queue_position, later.status().queue_position), (Some(0), Some(1)));
    assert!(large.status().predicted_start <= later.status().predicted_start);
    orders[0].send(Box::new(|_, _| Ok(()))).unwrap();
    assert_eq!(stage.ended(&short[0]), JobState::Complete);
    // A slot for a short job is free now, but the large job was first.
    stage.scheduler.tick(SystemTime::now());
    stage.nothing_begins();
    orders[1].send(Box::new(|_, _| Ok(()))).unwrap();
    assert_eq!(stage.next().1, "large0");
    stage.scheduler.tick(SystemTime::now());
    stage.nothing_begins();
    assert_eq!(later.status().state, JobState::Queued);
    stage.finish(0);
    assert_eq!(stage.ended(&large), JobState::Complete);
    assert_eq!(stage.next().1, "r2");
    orders[2].send(Box::new(|_, _| Ok(()))).unwrap();
    stage.idle();
}

#[test]
fn the_end_of_one_job_does_not_affect_the_other() {
    let stage = stage(2);
    let orders = ["r0", "r1", "r2"].map(|label| stage.direct(label));
    let jobs = ["r0", "r1"].map(|label| stage.submit(label));
    assert_eq!(labels(&stage, 2), ["r0", "r1"]);
    stage.scheduler.cancel(jobs[0].id).unwrap();
    orders[0].send(Box::new(|_, monitor| monitor.cancel().check())).unwrap();
    assert_eq!(stage.ended(&jobs[0]), JobState::Cancelled);
    let panicked = stage.submit("r2");
    assert_eq!(stage.next().1, "r2");
    orders[2].send(Box::new(|_, _| panic!("this is a test's own panic"))).unwrap();
    assert!(matches!(stage.ended(&panicked), JobState::Failed(Error::Internal(_))));
    orders[1]
        .send(Box::new(|sink, monitor| {
            monitor.cancel().check()?;
            sink.push(batch_of("r1", 5))
        }))
        .unwrap();
    assert_eq!(stage.ended(&jobs[1]), JobState::Complete);
    assert_eq!(jobs[1].status().rows, 5);
    stage.idle();
    assert_eq!(reserved(&stage), 0);
}

#[test]
fn concurrent_jobs_share_the_devices_time() {
    let stage = stage(2);
    let orders = ["r0", "r1"].map(|label| stage.direct(label));
    let jobs = [("r0", "a"), ("r1", "b")]
        .map(|(label, owner)| stage.submit_join(&spec(label), JobOptions::default(), owner).unwrap());
    assert_eq!(labels(&stage, 2), ["r0", "r1"]);
    stage.clock.advance(Duration::from_secs(4));
    orders[0].send(Box::new(|_, _| Ok(()))).unwrap();
    stage.ended(&jobs[0]);
    stage.clock.advance(Duration::from_secs(3));
    orders[1].send(Box::new(|_, _| Ok(()))).unwrap();
    stage.idle();
    let device = &stage.scheduler.stats().devices[0];
    assert!((device.busy_seconds_total - 7.0).abs() < 1e-6, "{device:?}");
    assert_eq!(device.jobs_total, 2);
}

#[test]
fn a_job_that_waits_for_a_part_of_the_memory_takes_none_of_it() {
    let stage = stage(2);
    let held = stage.memory[0].reserve(stage.memory[0].free_bytes() - 1000, "a test").unwrap();
    let job = stage.submit("r0");
    let waiting_for = job.status().waiting_for.unwrap();
    assert!(waiting_for.contains("of the memory of host:0, and 1000 B are free"), "{waiting_for}");
    assert_eq!(stage.memory[0].free_bytes(), 1000);
    drop(held);
    stage.scheduler.tick(SystemTime::now());
    stage.next();
    stage.finish(0);
    assert_eq!(stage.ended(&job), JobState::Complete);
}

#[test]
fn a_device_that_takes_one_job_at_a_time_is_never_given_two() {
    let options = SchedulerOptions { jobs_per_device: 8, ..SchedulerOptions::default() };
    let stage = Stage::with_jobs(1, 1, options);
    stage.submit("r0");
    stage.submit("r1");
    stage.next();
    assert_eq!(reserved(&stage), 0, "a job alone on its device takes the memory that it needs");
    stage.nothing_begins();
    stage.finish(0);
    stage.next();
    stage.finish(0);
    stage.idle();
}

#[test]
fn a_running_job_is_told_whether_others_wait_for_its_device() {
    let stage = Stage::new(2);
    let on = |device: &str, label: &str| stage.submit_join(&spec(label), on(&[device]), "").unwrap();
    let (one, other) = (on("host:0", "r0"), on("host:1", "r1"));
    stage.next();
    stage.next();
    let wanted = || [&one, &other].map(|job| job.is_device_wanted.load(Ordering::Relaxed));
    assert_eq!(wanted(), [false, false]);
    let waiting = on("host:0", "r2");
    assert_eq!(wanted(), [true, false]);
    stage.scheduler.cancel(waiting.id).unwrap();
    assert_eq!(wanted(), [false, false]);
    stage.finish(0);
    stage.finish(1);
    stage.idle();
}

/// Holds memory of a device as cached columns do, and gives it back on demand.
#[derive(Debug)]
struct Keeper {
    kept: Mutex<Option<Reservation>>,
    asked: Mutex<Sender<()>>,
    /// True if the keeper gives back the requested memory.
    gives: Mutex<Receiver<bool>>,
}

impl Reclaim for Keeper {
    fn reclaimable_bytes(&self) -> u64 {
        self.kept.lock().as_ref().map_or(0, Reservation::bytes)
    }

    fn reclaim(&self, _bytes: u64) -> u64 {
        self.asked.lock().send(()).unwrap();
        match self.gives.lock().recv_timeout(PATIENCE) {
            Ok(true) => self.kept.lock().take().map_or(0, |kept| kept.bytes()),
            _ => 0,
        }
    }
}

/// Creates a keeper of the given bytes of the first device's memory. Also returns the channel on
/// which it reports requests, and the channel that lets it give back.
fn keeper(stage: &Stage, bytes: u64) -> (Arc<Keeper>, Receiver<()>, Sender<bool>) {
    let ((asked, is_asked), (give, gives)) = (channel(), channel());
    let kept = Mutex::new(Some(stage.memory[0].reserve(bytes, "cached columns").unwrap()));
    let keeper = Arc::new(Keeper { kept, asked: Mutex::new(asked), gives: Mutex::new(gives) });
    let reclaim: Weak<dyn Reclaim> = Arc::downgrade(&(keeper.clone() as Arc<dyn Reclaim>));
    stage.memory[0].reclaim_from(reclaim);
    (keeper, is_asked, give)
}

/// Runs `work` in a thread of its own, because it may not come back.
fn in_time<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    let (done, outcome) = channel();
    std::thread::spawn(move || done.send(work()));
    outcome.recv_timeout(PATIENCE / 3).expect("the scheduler answers while a device makes room")
}

/// On a GPU, columns that are evicted for a job are freed once all work there is done. The
/// scheduler's lock used to be held during that wait.
#[test]
fn other_jobs_do_not_wait_while_a_device_frees_memory_for_a_job() {
    let stage = Stage::with_jobs(2, 2, SchedulerOptions::default());
    let (_keeper, is_asked, give) = keeper(&stage, stage.memory[0].free_bytes());
    let on = |device: &str, label: &str| {
        let (scheduler, catalog, spec, options) =
            (stage.scheduler.clone(), stage.catalog.clone(), spec(label), on(&[device]));
        in_time(move || submit(&scheduler, &catalog, &spec, options, "").unwrap())
    };
    let first = on("host:0", "r0");
    is_asked.recv_timeout(PATIENCE).unwrap();
    let elsewhere = on("host:1", "r1");
    assert_eq!(stage.next(), (1, "r1".into()));
    stage.nothing_begins();
    give.send(true).unwrap();
    assert_eq!(stage.next(), (0, "r0".into()));
    assert!(reserved(&stage) > 0);
    stage.finish(0);
    stage.finish(1);
    assert_eq!([&first, &elsewhere].map(|job| stage.ended(job)), [JobState::Complete, JobState::Complete]);
    stage.idle();
    assert_eq!(reserved(&stage), 0);
}

#[test]
fn memory_that_a_job_is_about_to_reserve_is_promised_to_no_other_job() {
    let stage = stage(2);
    let first = stage.submit("r0");
    stage.next();
    let part = reserved(&stage);
    stage.finish(0);
    stage.ended(&first);
    stage.idle();
    let _others = stage.memory[0].reserve(stage.memory[0].free_bytes() - part - part / 2, "others").unwrap();
    let (_keeper, is_asked, give) = keeper(&stage, part + part / 2);
    let orders = ["r1", "r2"].map(|label| stage.direct(label));
    let jobs = ["r1", "r2"].map(|label| stage.submit(label));
    is_asked.recv_timeout(PATIENCE).unwrap();
    let waiting_for = jobs[1].status().waiting_for.expect("there is no memory for both");
    assert!(waiting_for.contains("of the memory of host:0"), "{waiting_for}");
    give.send(true).unwrap();
    assert_eq!(stage.next().1, "r1");
    stage.scheduler.tick(SystemTime::now());
    stage.nothing_begins();
    orders[0].send(Box::new(|_, _| Ok(()))).unwrap();
    assert_eq!(stage.next().1, "r2");
    orders[1].send(Box::new(|_, _| Ok(()))).unwrap();
    stage.idle();
}

#[test]
fn a_job_whose_memory_was_taken_waits_again_and_reserves_none() {
    let stage = stage(2);
    let host = stage.catalog.arena().budget().clone();
    let (keeper, is_asked, give) = keeper(&stage, stage.memory[0].free_bytes());
    let job = stage.submit("r0");
    is_asked.recv_timeout(PATIENCE).unwrap();
    give.send(false).unwrap();
    let end = std::time::Instant::now() + PATIENCE;
    while job.status().state != JobState::Queued {
        assert!(std::time::Instant::now() < end, "the job is not put back: {:?}", job.status());
        std::thread::yield_now();
    }
    let status = job.status();
    assert!(status.waiting_for.is_some_and(|text| text.contains("memory of host:0")));
    assert_eq!((status.devices, status.started), (Vec::new(), None));
    let kept = keeper.kept.lock().take();
    drop(kept);
    assert_eq!((host.used_bytes(), reserved(&stage)), (0, 0));
    stage.nothing_begins();
    stage.clock.advance(Duration::from_secs(3));
    stage.scheduler.tick(SystemTime::now());
    stage.next();
    stage.finish(0);
    assert_eq!(stage.ended(&job), JobState::Complete);
    stage.idle();
    let stats = stage.scheduler.stats();
    assert_eq!((stats.devices[0].jobs_total, stats.completed_total), (1, 1));
    assert!((stats.waited_seconds_total - 3.0).abs() < 1e-6, "{stats:?}");
}

#[test]
fn a_job_stopped_while_a_device_frees_memory_for_it_returns_all_memory() {
    for gives in [true, false] {
        let stage = stage(2);
        let host = stage.catalog.arena().budget().clone();
        let (_keeper, is_asked, give) = keeper(&stage, stage.memory[0].free_bytes());
        let job = stage.submit("r0");
        is_asked.recv_timeout(PATIENCE).unwrap();
        stage.scheduler.cancel(job.id).unwrap();
        give.send(gives).unwrap();
        assert_eq!(stage.ended(&job), JobState::Cancelled);
        stage.idle();
        stage.nothing_begins();
        assert_eq!(host.used_bytes(), 0);
        assert_eq!(stage.scheduler.stats().cancelled_total, 1);
    }
}
