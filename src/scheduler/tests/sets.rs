//! Tests of jobs that run on several devices together.

use super::*;
use crate::planner::Distribution;
use crate::scheduler::device_set::DeviceSet;
use crate::scheduler::placing::Place;

/// Bytes of each device's memory that a job of several devices is promised.
const PART_BYTES: u64 = 4096;

/// Makes a waiting job run on all of the given devices, in a part of their memory.
fn place_on(stage: &Stage, job: &Job, devices: [usize; 2]) {
    let mut state = stage.scheduler.handle.shared.state.lock();
    let mut waiting = state.queue.remove(job.id).expect("the job waits");
    let place = Place { devices: DeviceSet::new(devices), shared_bytes: Some(PART_BYTES), ..waiting.places[0].clone() };
    waiting.places = vec![place];
    state.queue.push(waiting);
}

fn used_bytes(stage: &Stage) -> Vec<u64> {
    stage.memory.iter().map(Budget::used_bytes).collect()
}

/// Returns the bytes that devices have promised to jobs and not reserved yet.
fn promised_bytes(stage: &Stage) -> u64 {
    let state = stage.scheduler.handle.shared.state.lock();
    state.devices.iter().flat_map(|device| &device.running).map(|running| running.promised_bytes).sum()
}

#[test]
fn a_job_of_two_devices_has_a_slot_and_its_memory_on_both_until_it_ends() {
    let stage = Stage::new(3);
    let first: Vec<_> = ["r0", "r1", "r2"].map(|label| stage.submit(label)).into();
    (0..3).for_each(|_| drop(stage.next()));
    let on_both = stage.submit("r3");
    place_on(&stage, &on_both, [2, 0]);
    stage.finish(0);
    assert_eq!(stage.ended(&first[0]), JobState::Complete);
    stage.nothing_begins();
    stage.finish(2);
    assert_eq!(stage.next_gang(2), ([0, 2].into(), "r3".into()), "a rank on each device");
    assert_eq!(used_bytes(&stage), [PART_BYTES, 0, PART_BYTES]);
    assert_eq!(on_both.status().devices.iter().map(|id| id.index).collect::<Vec<_>>(), [0, 2]);
    assert_eq!(promised_bytes(&stage), 0, "what is reserved is promised no more");
    let later = stage.submit("r4");
    stage.nothing_begins();
    stage.finish(1);
    assert_eq!(stage.next(), (1, "r4".into()), "the other devices are taken");
    stage.finish(0);
    stage.nothing_begins();
    assert_eq!(on_both.status().state, JobState::Running, "one rank of two has ended");
    stage.finish(2);
    assert_eq!(stage.ended(&on_both), JobState::Complete);
    stage.finish(1);
    assert_eq!(stage.ended(&later), JobState::Complete);
    stage.idle();
    assert_eq!(used_bytes(&stage), [0, 0, 0]);
}

#[test]
fn a_job_whose_memory_is_short_on_one_device_of_two_takes_none_and_waits() {
    let stage = Stage::new(2);
    let first: Vec<_> = ["r0", "r1"].map(|label| stage.submit(label)).into();
    (0..2).for_each(|_| drop(stage.next()));
    let on_both = stage.submit("r2");
    place_on(&stage, &on_both, [0, 1]);
    let held = stage.memory[1].reserve(1 << 20, "a column that is read").unwrap();
    (0..2).for_each(|device| stage.finish(device));
    assert!(first.iter().all(|job| stage.ended(job) == JobState::Complete));
    stage.nothing_begins();
    assert_eq!((used_bytes(&stage), on_both.status().state), (vec![0, 1 << 20], JobState::Queued));
    drop(held);
    stage.clock.advance(Duration::from_secs(2));
    stage.scheduler.tick(SystemTime::now());
    assert_eq!(stage.next_gang(2), ([0, 1].into(), "r2".into()));
    assert_eq!(used_bytes(&stage), [PART_BYTES, PART_BYTES]);
    (0..2).for_each(|device| stage.finish(device));
    assert_eq!(stage.ended(&on_both), JobState::Complete);
}

fn count(devices: usize) -> JobOptions {
    JobOptions { devices: DeviceRequest::Count(devices), ..JobOptions::default() }
}

#[test]
fn a_count_of_devices_makes_a_gang_of_the_first_devices_that_are_free() {
    let stage = Stage::new(3);
    stage.submit("r0");
    let (busy, _) = stage.next();
    let gang = stage.submit_join(&spec("r1"), count(2), "").unwrap();
    let free: BTreeSet<u16> = (0..3).filter(|&device| device != busy).collect();
    assert_eq!(stage.next_gang(2), (free.clone(), "r1".into()));
    let explained = gang.explanation().device;
    assert_eq!((explained.ranks, explained.distribution), (2, "broadcast"));
    assert_eq!(explained.name, free.iter().map(|device| format!("host:{device}")).collect::<Vec<_>>().join(", "));
    let refused = stage.submit_join(&spec("r2"), count(4), "").unwrap_err();
    assert!(matches!(&refused, Error::Invalid(message) if message.contains("3 devices of one kind")), "{refused}");
    free.iter().for_each(|&device| stage.finish(device));
    stage.finish(busy);
    assert_eq!(stage.ended(&gang), JobState::Complete);
    stage.idle();
}

#[test]
fn the_cpu_helps_a_gpu_where_a_job_names_both() {
    let device = |kind, memory_bytes| (DeviceId { kind, index: 0 }, memory_bytes, Rates::host(1));
    let devices = vec![device(DeviceKind::Host, 1 << 20), device(DeviceKind::Cuda, 2 << 20)];
    let stage = Stage::of_sizes(devices, 1, SchedulerOptions::default());
    let named = ["cuda:0", "host:0"].map(String::from).to_vec();
    let both = JobOptions { devices: DeviceRequest::Named(named), ..JobOptions::default() };
    let job = stage.submit_join(&spec("r0"), both, "").unwrap();
    let (begun, _) = stage.next_gang(2);
    let explained = job.explanation().device;
    assert_eq!((explained.ranks, explained.distribution, &*explained.name), (2, "broadcast", "host:0, cuda:0"));
    begun.into_iter().for_each(|device| stage.finish(device));
    assert_eq!(stage.ended(&job), JobState::Complete);
    stage.idle();
}

/// Devices whose rows take long, and which exchange rows.
fn slow_devices(count: u16) -> Stage {
    const ROWS: f64 = 1e6;
    let rates = || Rates { build_repeated_rows: [ROWS; 3], probe_rows: ROWS, dense_rows: ROWS, ..Rates::host(1) };
    let device = |index| (DeviceId { kind: DeviceKind::Host, index }, 1 << 20, DeviceRates::measured_now(rates()));
    let exchanging = |info: &mut DeviceInfo| info.capabilities.exchanges = true;
    let stage = Stage::of_rates((0..count).map(device).collect(), &exchanging, 1, SchedulerOptions::default());
    stage.catalog.create(rows_of("large", 160_000)).unwrap();
    stage
}

#[test]
fn a_long_join_takes_as_many_devices_as_end_it_soonest() {
    let stage = slow_devices(3);
    let large = JoinSpec {
        columns: vec!["k".into(), "large0".into()],
        ..JoinSpec::inner("r", "large", vec![KeyPair::new("k", "k")])
    };
    let explained = stage.explain(&large, &JobOptions::default());
    let sets: Vec<(usize, usize)> = explained.sets.iter().map(|set| (set.ranks, set.sets)).collect();
    assert_eq!(sets, [(1, 3), (2, 3), (3, 1)]);
    assert_eq!((explained.device.ranks, explained.sets[2].devices.as_str()), (3, "host:0, host:1, host:2"));
    let seconds: Vec<f64> = explained.sets.iter().map(|set| set.predicted_seconds).collect();
    assert!(seconds[1] < 0.6 * seconds[0] && seconds[2] < 0.75 * seconds[1], "{seconds:?}");
    let text = explained.to_string();
    assert!(text.contains("  host:0, host:1 (3 such sets): hash, broadcast; "), "{text}");

    let job = stage.submit_join(&large, JobOptions::default(), "").unwrap();
    assert_eq!(stage.next_gang(3), ([0, 1, 2].into(), "large0".into()));
    assert_eq!(
        job.explanation().device.reason,
        "predicted to finish it first, of the 7 sets of devices that may run it"
    );
    assert_eq!(job.explanation().sets.len(), 3);
    (0..3).for_each(|device| stage.finish(device));
    assert_eq!(stage.ended(&job), JobState::Complete);
    // A short join takes one, and is not told of others.
    let short = stage.submit("r0");
    let (device, _) = stage.next();
    assert_eq!(short.explanation().sets, []);
    stage.finish(device);
    stage.idle();
}

#[test]
fn a_distribution_is_only_for_joins_on_several_devices() {
    let stage = Stage::new(2);
    let hashed = |devices| JobOptions { distribution: Some(Distribution::Hash), devices, ..JobOptions::default() };
    for devices in [DeviceRequest::Any, DeviceRequest::Count(1), DeviceRequest::Named(vec!["host:1".into()])] {
        let refused = stage.submit_join(&spec("r0"), hashed(devices), "").unwrap_err();
        assert!(matches!(&refused, Error::Invalid(message) if message.contains("\"devices\": 2")), "{refused}");
    }
}

#[test]
fn a_failed_rank_stops_the_others_and_its_error_is_the_job_s() {
    let stage = Stage::new(2);
    let gang = stage.submit_join(&spec("r0"), count(2), "").unwrap();
    stage.next_gang(2);
    stage.tell(0, |_, _| Err(Error::Internal("a defect".into())));
    // The other rank works until it sees the request to stop.
    stage.tell(1, |_, monitor| {
        while monitor.cancel().check().is_ok() {
            std::thread::yield_now();
        }
        monitor.cancel().check()
    });
    assert!(matches!(stage.ended(&gang), JobState::Failed(Error::Internal(message)) if message.contains("a defect")));
    assert!(!gang.cancel.is_raised(), "the job itself was not stopped");
    stage.idle();
}

#[test]
fn a_gang_whose_device_is_lost_is_tried_again_without_it() {
    let stage = Stage::new(3);
    let gang = stage.submit_join(&spec("r0"), count(2), "").unwrap();
    let (first, _) = stage.next_gang(2);
    assert_eq!(first, [0, 1].into());
    stage.tell(1, |_, _| Err(context_lost()));
    stage.finish(0);
    assert_eq!(stage.next_gang(2), ([0, 2].into(), "r0".into()));
    [0, 2].into_iter().for_each(|device| stage.finish(device));
    assert_eq!(stage.ended(&gang), JobState::Complete);
    stage.idle();
}

#[test]
fn all_devices_are_those_in_service() {
    let stage = Stage::new(3);
    let all = || JobOptions { devices: DeviceRequest::All, ..JobOptions::default() };
    let complete = |label, devices: &[u16]| {
        let job = stage.submit_join(&spec(label), all(), "").unwrap();
        assert_eq!(stage.next_gang(devices.len()).0, devices.iter().copied().collect());
        devices.iter().for_each(|&device| stage.finish(device));
        assert_eq!(stage.ended(&job), JobState::Complete);
        stage.idle();
    };
    complete("r0", &[0, 1, 2]);
    stage.lost[1].store(true, Ordering::Relaxed);
    (0..2).for_each(|_| stage.scheduler.tick(SystemTime::now()));
    complete("r1", &[0, 2]);
    stage.lost[1].store(false, Ordering::Relaxed);
    stage.scheduler.tick(SystemTime::now());
    complete("r2", &[0, 1, 2]);
}

#[test]
fn the_window_of_a_lost_device_is_unmapped_by_the_others_once() {
    let stage = Stage::new(3);
    let lost = DeviceId { kind: DeviceKind::Host, index: 1 };
    for times in 1..3 {
        stage.lost[1].store(true, Ordering::Relaxed);
        (0..3).for_each(|_| stage.scheduler.tick(SystemTime::now()));
        let unmapped = stage.unmapped.iter().map(|peers| peers.lock().clone()).collect::<Vec<_>>();
        assert_eq!(unmapped, [vec![lost; times], vec![], vec![lost; times]]);
        stage.lost[1].store(false, Ordering::Relaxed);
        stage.scheduler.tick(SystemTime::now());
    }
}
