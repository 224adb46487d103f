//! Tests of the queue without threads: order and places of jobs.

use super::super::device_set::DeviceSet;
use super::super::placing::{CLAIM_AFTER, RETRY, RunningJob, Wait};
use super::super::placing::{HostNeed, Place};
use super::*;

const IDLE: Load = Load::InService { slots: 1, free_bytes: 1 << 30, running: Vec::new() };

/// Idle device of one slot with the given free memory.
fn idle(free_bytes: u64) -> Load {
    Load::InService { slots: 1, free_bytes, running: Vec::new() }
}

/// Device of one slot that is taken.
fn busy(until: f64) -> Load {
    Load::InService {
        slots: 1,
        free_bytes: 1 << 30,
        running: vec![RunningJob { until: seconds(until), alone: true, is_leader: true }],
    }
}

/// More than any job asks for.
fn ample() -> HostMemory<'static> {
    host_memory(u64::MAX)
}

/// Free host memory, and none that becomes free on its own.
fn host_memory(free_bytes: u64) -> HostMemory<'static> {
    HostMemory { free_bytes, returns: &Vec::new }
}

fn seconds(seconds: f64) -> Duration {
    Duration::from_secs_f64(seconds)
}

/// Job of `run` seconds that may run on any one of the first `devices` devices.
fn job(id: u64, tenant: &str, priority: i32, run: f64, devices: usize) -> Waiting {
    let place = |device| place(device, run, None);
    Waiting {
        id: JobId(id),
        tenant: tenant.into(),
        priority,
        submitted: Duration::ZERO,
        places: (0..devices).map(place).collect(),
        starved_since: None,
        unsatisfiable_since: None,
        turn_wait: None,
    }
}

fn place(device: usize, seconds: f64, shared_bytes: Option<u64>) -> Place {
    let devices = DeviceSet::new([device]);
    Place { devices, plan: 0, seconds, memory_bytes: 1, shared_bytes, is_prepared: false, host: HostNeed::default() }
}

fn need(bytes: u64) -> HostNeed {
    HostNeed { bytes, least_bytes: bytes, takes_less: false }
}

/// Job that takes the given host memory, and one second on the first device.
fn taking(id: u64, bytes: u64) -> Waiting {
    Waiting { places: vec![Place { host: need(bytes), ..place(0, 1.0, None) }], ..job(id, "a", 0, 1.0, 1) }
}

/// Schedules all jobs.
fn schedule_all(queue: &Queue, now: Duration, loads: &[Load], host: HostMemory<'_>) -> Vec<ScheduledStart> {
    queue.schedule(now, loads, host, Extent::All).starts
}

fn order(queue: &Queue, now: Duration, loads: &[Load]) -> Vec<u64> {
    schedule_all(queue, now, loads, ample()).iter().map(|scheduled| scheduled.id.0).collect()
}

/// Runs all jobs on one device, one after the other, and returns their order.
fn run_all(queue: &mut Queue, mut now: Duration) -> Vec<u64> {
    let mut order = Vec::new();
    while let Some(scheduled) = schedule_all(queue, now, &[IDLE], ample()).first().cloned() {
        assert!(scheduled.wait.is_none(), "the first scheduled starts on an idle device");
        let job = queue.start(scheduled.id, scheduled.place.seconds).unwrap();
        now += seconds(scheduled.place.seconds);
        queue.end(&job.tenant, scheduled.place.seconds, scheduled.place.seconds);
        order.push(job.id.0);
    }
    order
}

#[test]
fn a_tenants_jobs_run_by_priority_and_then_by_age() {
    let mut queue = Queue::default();
    for (id, priority) in [(1, 0), (2, 5), (3, -5), (4, 5)] {
        queue.push(job(id, "a", priority, 1.0, 1));
    }
    assert_eq!(order(&queue, Duration::ZERO, &[IDLE]), [2, 4, 1, 3]);
}

#[test]
fn waiting_time_eventually_outweighs_priority() {
    let mut queue = Queue::default();
    queue.push(job(1, "a", -100, 1.0, 1));
    // Jobs of the highest priority keep coming. Each is younger than the waiting job.
    let mut now = Duration::ZERO;
    let mut id = 1;
    loop {
        id += 1;
        queue.push(Waiting { submitted: now, ..job(id, "a", 100, 1.0, 1) });
        let first = schedule_all(&queue, now, &[IDLE], ample())[0].clone();
        queue.start(first.id, 1.0).unwrap();
        queue.end("a", 1.0, 1.0);
        if first.id == JobId(1) {
            break;
        }
        now += seconds(1.0);
        assert!(now < seconds(300.0), "the job of low priority starves");
    }
    assert!(now >= seconds(199.0), "200 points of priority were worth only {now:?}");
}

#[test]
fn tenants_take_turns_however_many_jobs_each_has_submitted() {
    let mut queue = Queue::default();
    for id in 1..=6 {
        queue.push(job(id, "flood", 100, 1.0, 1));
    }
    queue.push(job(7, "calm", -100, 1.0, 1));
    queue.push(job(8, "calm", -100, 1.0, 1));
    assert_eq!(run_all(&mut queue, Duration::ZERO), [1, 7, 2, 8, 3, 4, 5, 6]);
}

#[test]
fn shares_of_device_time_follow_weights() {
    let mut queue = Queue::default();
    queue.set_weight("heavy", 3.0);
    for id in 1..=40 {
        queue.push(job(id, "heavy", 0, 1.0, 1));
        queue.push(job(100 + id, "light", 0, 1.0, 1));
    }
    let first_16 = &run_all(&mut queue, Duration::ZERO)[..16];
    assert_eq!(first_16.iter().filter(|id| **id < 100).count(), 12, "{first_16:?}");
}

#[test]
fn shares_count_time_and_not_jobs() {
    let mut queue = Queue::default();
    for id in 1..=8 {
        queue.push(job(id, "long", 0, 4.0, 1));
    }
    for id in 101..=132 {
        queue.push(job(id, "short", 0, 1.0, 1));
    }
    let order = run_all(&mut queue, Duration::ZERO);
    // By the time half of the long jobs are done, half of the short ones are done too.
    let fourth = order.iter().position(|id| *id == 4).unwrap();
    let short = order[..=fourth].iter().filter(|id| **id > 100).count();
    assert!((12..=20).contains(&short), "{short} of 32 short jobs ran with 4 of 8 long ones: {order:?}");
}

#[test]
fn an_idle_tenant_saves_up_no_turns() {
    let mut queue = Queue::default();
    for id in 1..=20 {
        queue.push(job(id, "always", 0, 1.0, 1));
    }
    for _ in 0..10 {
        let scheduled = schedule_all(&queue, Duration::ZERO, &[IDLE], ample())[0].clone();
        queue.start(scheduled.id, 1.0).unwrap();
        queue.end("always", 1.0, 1.0);
    }
    for id in 101..=110 {
        queue.push(job(id, "late", 0, 1.0, 1));
    }
    let order = run_all(&mut queue, Duration::ZERO);
    let late_among_first_six = order[..6].iter().filter(|id| **id > 100).count();
    assert_eq!(late_among_first_six, 3, "{order:?}");
}

#[test]
fn time_beyond_the_prediction_of_a_job_is_charged_to_its_tenant() {
    let mut queue = Queue::default();
    for id in 1..=4 {
        queue.push(job(id, "liar", 0, 1.0, 1));
    }
    for id in 101..=112 {
        queue.push(job(id, "honest", 0, 1.0, 1));
    }
    queue.start(JobId(1), 1.0).unwrap();
    queue.end("liar", 1.0, 8.0);
    let order = run_all(&mut queue, Duration::ZERO);
    assert!(order[..7].iter().all(|id| *id > 100), "{order:?}");
}

#[test]
fn jobs_spread_over_idle_devices_and_their_starts_are_predicted() {
    let mut queue = Queue::default();
    for id in 1..=5 {
        queue.push(job(id, "a", 0, 2.0, 2));
    }
    let schedule = schedule_all(&queue, seconds(10.0), &[IDLE, IDLE], ample());
    let starts: Vec<f64> = schedule.iter().map(|scheduled| scheduled.start.as_secs_f64()).collect();
    assert_eq!(starts, [10.0, 10.0, 12.0, 12.0, 14.0]);
    let now: Vec<bool> = schedule.iter().map(|scheduled| scheduled.wait.is_none()).collect();
    assert_eq!(now, [true, true, false, false, false]);
    assert_ne!(schedule[0].place.devices.leader(), schedule[1].place.devices.leader());
}

#[test]
fn a_job_waits_for_a_fast_device_when_that_is_predicted_to_be_sooner() {
    let slow_and_fast =
        |id: u64| Waiting { places: vec![place(0, 10.0, None), place(1, 1.0, None)], ..job(id, "a", 0, 0.0, 0) };
    let mut queue = Queue::default();
    queue.push(slow_and_fast(1));
    let schedule = schedule_all(&queue, Duration::ZERO, &[IDLE, busy(3.0)], ample());
    assert_eq!(
        (schedule[0].place.devices.leader(), schedule[0].start, schedule[0].wait.is_none()),
        (1, seconds(3.0), false)
    );
    // A later job that only the slow device can run does not have to wait for the first.
    queue.push(job(2, "a", 0, 5.0, 1));
    let schedule = schedule_all(&queue, Duration::ZERO, &[IDLE, busy(3.0)], ample());
    assert_eq!((schedule[1].id, schedule[1].place.devices.leader(), schedule[1].wait.is_none()), (JobId(2), 0, true));
    // The longer the fast device is taken, the better the slow one looks.
    let schedule = schedule_all(&queue, Duration::ZERO, &[IDLE, busy(30.0)], ample());
    assert_eq!((schedule[0].place.devices.leader(), schedule[0].wait.is_none()), (0, true));
}

/// Job that takes 1 s on any of the devices, and the given seconds on the given numbers of the
/// first devices.
fn divisible(id: u64, devices: usize, of_several: &[(usize, f64)]) -> Waiting {
    let alone = job(id, "a", 0, 1.0, devices);
    let several = of_several
        .iter()
        .map(|&(count, seconds)| Place { devices: DeviceSet::new(0..count), ..place(0, seconds, None) });
    Waiting { places: alone.places.iter().cloned().chain(several).collect(), ..alone }
}

/// Returns the number of devices of each waiting job, and its start.
fn devices_and_starts(queue: &Queue, loads: &[Load]) -> Vec<(usize, f64)> {
    let schedule = schedule_all(queue, Duration::ZERO, loads, ample());
    schedule.iter().map(|scheduled| (scheduled.place.devices.len(), scheduled.start.as_secs_f64())).collect()
}

#[test]
fn a_job_takes_the_fewest_devices_that_finish_it_about_as_soon_as_any() {
    let of_one_job = |of_several: &[(usize, f64)]| {
        let mut queue = Queue::default();
        queue.push(divisible(1, 4, of_several));
        devices_and_starts(&queue, &[IDLE, IDLE, IDLE, IDLE])[0].0
    };
    assert_eq!(of_one_job(&[(2, 0.55), (3, 0.42), (4, 0.4)]), 3);
    assert_eq!(of_one_job(&[(2, 0.55), (3, 0.43), (4, 0.4)]), 4);
    assert_eq!(of_one_job(&[(2, 0.97), (4, 0.96)]), 1);
}

#[test]
fn jobs_that_several_devices_speed_up_little_take_a_device_each_while_there_are_others() {
    let four = [IDLE, IDLE, IDLE, IDLE];
    let wasteful = &[(2, 0.8), (4, 0.6)];
    let mut queue = Queue::default();
    queue.push(divisible(1, 4, wasteful));
    assert_eq!(devices_and_starts(&queue, &four), [(4, 0.0)]);
    queue.push(divisible(2, 4, wasteful));
    assert_eq!(devices_and_starts(&queue, &four)[0], (2, 0.0), "half of the devices each");
    queue.push(divisible(3, 4, wasteful));
    assert_eq!(devices_and_starts(&queue, &four), [(1, 0.0), (1, 0.0), (1, 0.0)]);
    // A running job counts as well.
    let mut queue = Queue::default();
    queue.push(divisible(1, 2, &[(2, 0.8)]));
    assert_eq!(devices_and_starts(&queue, &[busy(0.1), IDLE]), [(1, 0.0)]);
}

#[test]
fn jobs_that_several_devices_divide_well_take_all_in_turn() {
    let mut queue = Queue::default();
    for id in 1..=3 {
        queue.push(divisible(id, 4, &[(4, 0.3)]));
    }
    assert_eq!(devices_and_starts(&queue, &[IDLE, IDLE, IDLE, IDLE]), [(4, 0.0), (4, 0.3), (4, 0.6)]);
}

#[test]
fn jobs_take_a_device_each_if_many_would_wait_for_what_several_waste() {
    let devices_of_first = |jobs: u64| {
        let mut queue = Queue::default();
        for id in 1..=jobs {
            queue.push(divisible(id, 2, &[(2, 0.6)]));
        }
        devices_and_starts(&queue, &[IDLE, IDLE])[0].0
    };
    // A job gains 0.4 s, and the others wait for half of the 0.2 s that two devices waste.
    assert_eq!((devices_of_first(5), devices_of_first(6)), (2, 1));
}

#[test]
fn devices_that_wait_for_a_large_job_run_short_ones_that_end_before_it() {
    let on_both = |id: u64, run: f64| Waiting {
        places: vec![Place { devices: DeviceSet::new([0, 1]), ..place(0, run, None) }],
        ..job(id, "a", 0, run, 0)
    };
    let first_only = |id: u64, run: f64| job(id, "a", 0, run, 1);
    let mut queue = Queue::default();
    queue.push(on_both(1, 4.0));
    queue.push(first_only(2, 7.0));
    queue.push(first_only(3, 6.0));
    queue.push(first_only(4, 1.0));
    let schedule = schedule_all(&queue, Duration::ZERO, &[IDLE, busy(10.0)], ample());
    let starts: Vec<(u64, f64)> =
        schedule.iter().map(|scheduled| (scheduled.id.0, scheduled.start.as_secs_f64())).collect();
    // Job 2 would end too close to the start of job 1. Job 3 takes the slot, so that job 4 cannot.
    assert_eq!(starts, [(1, 10.0), (2, 14.0), (3, 0.0), (4, 21.0)]);
    assert_eq!(schedule[2].wait, None);

    // A job that lacks only memory keeps its idle slots for itself.
    let mut queue = Queue::default();
    let mut large = on_both(1, 4.0);
    large.places[0].memory_bytes = 100;
    queue.push(large);
    queue.push(first_only(2, 0.01));
    let schedule = schedule_all(&queue, Duration::ZERO, &[idle(50), IDLE], ample());
    assert!(schedule[1].wait.is_some(), "a job overtook one that waits for memory");
}

#[test]
fn short_jobs_share_a_device_that_waits_for_a_large_job() {
    // One of two slots is taken, and the large job needs both.
    let mut queue = Queue::default();
    queue.push(job(1, "a", 0, 4.0, 1));
    for id in 2..=3 {
        queue.push(Waiting { places: vec![place(0, 1.0, Some(1))], ..job(id, "a", 0, 1.0, 1) });
    }
    let schedule = schedule_all(&queue, Duration::ZERO, &[two_slots(&[(10.0, false)])], ample());
    let starts: Vec<f64> = schedule.iter().map(|scheduled| scheduled.start.as_secs_f64()).collect();
    assert_eq!(starts, [10.0, 0.0, 14.0], "there is one idle slot");
}

#[test]
fn a_job_that_fits_on_no_single_device_takes_several_whatever_waits() {
    let mut queue = Queue::default();
    for id in 1..=2 {
        let mut large = divisible(id, 2, &[(2, 5.0)]);
        large.places.retain(|place| place.devices.len() > 1);
        queue.push(large);
    }
    assert_eq!(devices_and_starts(&queue, &[IDLE, IDLE]), [(2, 0.0), (2, 5.0)]);
}

#[test]
fn a_large_job_is_not_overtaken_on_its_device_while_it_waits_for_memory() {
    let mut queue = Queue::default();
    let mut large = job(1, "a", 0, 1.0, 1);
    large.places[0].memory_bytes = 100;
    queue.push(large);
    queue.push(job(2, "a", 0, 1.0, 1));
    let schedule = schedule_all(&queue, Duration::ZERO, &[idle(50)], ample());
    assert_eq!((schedule[0].id, schedule[0].wait.is_none()), (JobId(1), false));
    assert!(schedule[1].wait.is_some(), "a small job overtook a large one on its device");
    let schedule = schedule_all(&queue, Duration::ZERO, &[idle(100)], ample());
    assert_eq!((schedule[0].id, schedule[0].wait.is_none()), (JobId(1), true));
}

#[test]
fn jobs_of_a_lost_device_move_and_jobs_without_a_device_are_reported() {
    let mut queue = Queue::default();
    queue.push(job(1, "a", 0, 1.0, 2));
    queue.push(job(2, "b", 0, 1.0, 1));
    let loads = [Load::Lost, IDLE];
    let unplaceable: Vec<u64> = queue.remove_unplaceable(&loads).iter().map(|job| job.id.0).collect();
    assert_eq!(unplaceable, [2]);
    let schedule = schedule_all(&queue, Duration::ZERO, &loads, ample());
    assert_eq!((schedule.len(), schedule[0].place.devices.leader()), (1, 1));
    assert_eq!((queue.active("b"), queue.active("a")), (0, 1));
}

#[test]
fn tenants_are_forgotten_once_they_owe_nothing() {
    let mut queue = Queue::default();
    // A tenant that had more device time than an active tenant is remembered. Otherwise leaving and
    // coming back would pay.
    queue.push(job(2001, "waits", 0, 1.0, 1));
    queue.push(job(2002, "leaves", 0, 1.0, 1));
    queue.start(JobId(2002), 1.0).unwrap();
    queue.end("leaves", 1.0, 1.0);
    queue.push(job(2003, "leaves", 0, 1.0, 1));
    assert_eq!(run_all(&mut queue, Duration::ZERO), [2001, 2003]);
    for id in 0..1000 {
        let tenant = format!("tenant {id}");
        queue.push(job(id, &tenant, 0, 1.0, 1));
        queue.start(JobId(id), 1.0).unwrap();
        queue.end(&tenant, 1.0, 1.0);
    }
    assert!(queue.tenants.is_empty(), "{} tenants are remembered", queue.tenants.len());
}

/// Device of two slots, with the given jobs on it.
fn two_slots(running: &[(f64, bool)]) -> Load {
    let running =
        running.iter().map(|&(until, alone)| RunningJob { until: seconds(until), alone, is_leader: true }).collect();
    Load::InService { slots: 2, free_bytes: 100, running }
}

/// Short job that takes 50 bytes of a device in parallel with others.
fn short(id: u64, run: f64) -> Waiting {
    Waiting { places: vec![place(0, run, Some(50))], ..job(id, "a", 0, run, 1) }
}

#[test]
fn short_jobs_share_a_device_and_slow_each_other_down() {
    let mut queue = Queue::default();
    for id in 1..=3 {
        queue.push(short(id, 1.0));
    }
    let schedule = schedule_all(&queue, seconds(10.0), &[two_slots(&[])], ample());
    let waits: Vec<_> = schedule.iter().map(|scheduled| scheduled.wait).collect();
    assert_eq!(waits, [None, None, Some(Wait::Device)]);
    // The first job is placed on the empty slot. The second shares the device and takes twice as
    // long.
    assert_eq!(schedule[2].start, seconds(11.0));
    let schedule = schedule_all(&queue, seconds(10.0), &[two_slots(&[(14.0, false)])], ample());
    assert_eq!(schedule[0].wait, None);
    assert_eq!(schedule[1].start, seconds(12.0), "the first shares the device and frees its slot after 2 s");
    let schedule = schedule_all(&queue, seconds(10.0), &[two_slots(&[(14.0, true)])], ample());
    assert_eq!(
        (schedule[0].start, schedule[1].start),
        (seconds(14.0), seconds(14.0)),
        "no job runs in parallel with a large job"
    );
}

#[test]
fn a_large_job_takes_all_slots_and_is_not_overtaken() {
    let mut queue = Queue::default();
    queue.push(Waiting { submitted: Duration::ZERO, ..job(1, "a", 0, 5.0, 1) });
    queue.push(short(2, 1.0));
    let schedule = schedule_all(&queue, seconds(10.0), &[two_slots(&[(11.0, false), (13.0, false)])], ample());
    assert_eq!((schedule[0].id, schedule[0].start, schedule[0].wait), (JobId(1), seconds(13.0), Some(Wait::Device)));
    assert_eq!((schedule[1].id, schedule[1].start), (JobId(2), seconds(18.0)));
    // One slot is free already; it is kept.
    let schedule = schedule_all(&queue, seconds(12.0), &[two_slots(&[(13.0, false)])], ample());
    assert!(schedule.iter().all(|scheduled| scheduled.wait == Some(Wait::Device)), "{schedule:?}");
}

#[test]
fn a_short_job_prefers_an_idle_device() {
    let mut queue = Queue::default();
    let place = |device| place(device, 1.0, Some(50));
    queue.push(Waiting { places: vec![place(0), place(1)], ..job(1, "a", 0, 1.0, 1) });
    let schedule = schedule_all(&queue, Duration::ZERO, &[two_slots(&[(9.0, false)]), two_slots(&[])], ample());
    assert_eq!((schedule[0].place.devices.leader(), schedule[0].wait), (1, None));
    let schedule =
        schedule_all(&queue, Duration::ZERO, &[two_slots(&[(9.0, false)]), two_slots(&[(9.0, true)])], ample());
    assert_eq!((schedule[0].place.devices.leader(), schedule[0].wait), (0, None));
}

#[test]
fn each_part_of_a_devices_memory_is_given_to_one_job() {
    let mut queue = Queue::default();
    for id in 1..=2 {
        queue.push(short(id, 1.0));
    }
    let load = Load::InService { slots: 2, free_bytes: 99, running: Vec::new() };
    let schedule = schedule_all(&queue, seconds(1.0), &[load], ample());
    assert_eq!(schedule[0].wait, None);
    assert_eq!(schedule[1].wait, Some(Wait::DeviceMemory { needed_bytes: 50, free_bytes: 49 }));
    assert_eq!(schedule[1].start, seconds(1.0) + RETRY);
}

#[test]
fn a_job_that_waits_for_host_memory_delays_other_jobs_only_after_a_while() {
    let mut queue = Queue::default();
    queue.push(taking(1, 80));
    queue.push(taking(2, 10));
    let returns = || vec![(seconds(70.0), 20), (seconds(60.0), 20), (seconds(90.0), 9)];
    let host = HostMemory { free_bytes: 50, returns: &returns };
    let schedule = schedule_all(&queue, Duration::ZERO, &[IDLE], host);
    let wait = Wait::HostMemory { needed_bytes: 80, free_bytes: 50, comes_back: true };
    assert_eq!((schedule[0].id, schedule[0].wait, schedule[0].start), (JobId(1), Some(wait), seconds(70.0)));
    assert_eq!((schedule[1].id, schedule[1].wait), (JobId(2), None), "a job that waits for memory books no device");
    // After a while, free memory is kept for the job.
    queue.note_starved(JobId(1), Duration::ZERO, true);
    assert_eq!(queue.note_starved(JobId(1), CLAIM_AFTER, true).map(|short| short.waited), Some(CLAIM_AFTER));
    let schedule = schedule_all(&queue, CLAIM_AFTER, &[IDLE], host);
    assert!(matches!(schedule[1].wait, Some(Wait::HostMemory { free_bytes: 0, .. })), "{schedule:?}");
    // A return that would not be enough is reported.
    let host = HostMemory { free_bytes: 50, returns: &|| vec![(seconds(60.0), 29)] };
    let schedule = schedule_all(&queue, Duration::ZERO, &[IDLE], host);
    assert!(matches!(schedule[0].wait, Some(Wait::HostMemory { comes_back: false, .. })), "{schedule:?}");
}

#[test]
fn a_turn_of_a_stream_waits_for_no_host_memory_and_keeps_none() {
    let mut queue = Queue::default();
    let turn = |id, bytes| {
        let host = HostNeed { bytes, least_bytes: 0, takes_less: true };
        Waiting { places: vec![Place { host, ..place(0, 1.0, Some(1)) }], ..job(id, "a", 0, 1.0, 1) }
    };
    queue.push(Waiting { starved_since: Some(Duration::ZERO), ..turn(1, 1000) });
    queue.push(turn(2, 60));
    let loads = [Load::InService { slots: 2, free_bytes: 1 << 30, running: Vec::new() }];
    let schedule = schedule_all(&queue, CLAIM_AFTER, &loads, host_memory(100));
    let found: Vec<_> = schedule.iter().map(|start| (start.id.0, start.host_bytes, start.wait)).collect();
    assert_eq!(found, [(1, 0, None), (2, 60, None)]);
}

#[test]
fn a_job_takes_the_host_memory_of_the_device_that_it_is_placed_on() {
    let mut queue = Queue::default();
    let places = [(0, 1.0, 10), (1, 2.0, 70)];
    let places = places.map(|(device, seconds, bytes)| Place { host: need(bytes), ..place(device, seconds, None) });
    queue.push(Waiting { places: places.to_vec(), ..job(1, "a", 0, 1.0, 1) });
    assert_eq!(queue.next_host_bytes(5), 10, "on the faster device");
    let host = host_memory(50);
    let schedule = schedule_all(&queue, Duration::ZERO, &[IDLE, IDLE], host);
    assert_eq!((schedule[0].place.devices.leader(), schedule[0].host_bytes, schedule[0].wait), (0, 10, None));
    let schedule = schedule_all(&queue, Duration::ZERO, &[Load::Lost, IDLE], host);
    assert_eq!((schedule[0].place.devices.leader(), schedule[0].host_bytes), (1, 70));
    assert!(
        matches!(schedule[0].wait, Some(Wait::HostMemory { needed_bytes: 70, free_bytes: 50, .. })),
        "{schedule:?}"
    );
}

#[test]
fn unsatisfiable_time_is_counted_separately_from_waiting_time() {
    let mut queue = Queue::default();
    queue.push(job(1, "a", 0, 1.0, 1));
    let mut note = |at: f64, comes_back| {
        let short = queue.note_starved(JobId(1), seconds(at), comes_back).unwrap();
        (short.waited.as_secs_f64(), short.unsatisfiable.as_secs_f64())
    };
    assert_eq!(note(10.0, true), (0.0, 0.0));
    // A lease has ended, and a client still reads its result.
    assert_eq!(note(50.0, false), (40.0, 0.0));
    assert_eq!(note(52.0, false), (42.0, 2.0));
    assert_eq!(note(53.0, true), (43.0, 0.0));
    assert_eq!(note(60.0, false), (50.0, 0.0));
    assert_eq!(queue.note_starved(JobId(2), Duration::ZERO, true), None);
}

/// Job of two seconds on devices 0 and 1 together.
fn on_both(id: u64, shared_bytes: Option<u64>) -> Waiting {
    let place = Place { devices: DeviceSet::new([1, 0]), memory_bytes: 100, ..place(0, 2.0, shared_bytes) };
    Waiting { places: vec![place], ..job(id, "a", 0, 2.0, 1) }
}

#[test]
fn a_job_on_several_devices_starts_when_all_are_free_and_books_them_all() {
    let mut queue = Queue::default();
    queue.push(on_both(1, None));
    // Too long to end before the first job starts.
    queue.push(job(2, "a", 0, 4.0, 3));
    let schedule = schedule_all(&queue, Duration::ZERO, &[IDLE, busy(5.0), busy(9.0)], ample());
    assert_eq!((schedule[0].start, schedule[0].wait), (seconds(5.0), Some(Wait::Device)));
    // Device 0 is kept for the first job until it starts there, and until it ends.
    assert_eq!((schedule[1].place.devices.leader(), schedule[1].start), (0, seconds(7.0)));
    let schedule = schedule_all(&queue, Duration::ZERO, &[IDLE, IDLE, IDLE], ample());
    assert_eq!((schedule[0].wait, schedule[1].wait), (None, None));
    assert_eq!(schedule[1].place.devices.leader(), 2, "the free device");
}

#[test]
fn a_job_on_several_devices_needs_memory_on_each_and_none_of_them_lost() {
    let mut queue = Queue::default();
    queue.push(on_both(1, None));
    let schedule = schedule_all(&queue, Duration::ZERO, &[idle(200), idle(99)], ample());
    assert_eq!(schedule[0].wait, Some(Wait::DeviceMemory { needed_bytes: 100, free_bytes: 99 }));
    assert!(schedule_all(&queue, Duration::ZERO, &[IDLE, Load::Lost], ample()).is_empty());
    let unplaceable = queue.remove_unplaceable(&[IDLE, Load::Lost]);
    assert_eq!(unplaceable.iter().map(|job| job.id).collect::<Vec<_>>(), [JobId(1)]);
}

#[test]
fn a_short_job_on_several_devices_takes_as_long_as_on_the_fullest() {
    let mut queue = Queue::default();
    queue.push(on_both(1, Some(50)));
    queue.push(Waiting { places: vec![place(0, 10.0, None)], ..job(2, "a", 0, 10.0, 1) });
    let schedule = schedule_all(&queue, Duration::ZERO, &[two_slots(&[]), two_slots(&[(9.0, false)])], ample());
    assert_eq!((schedule[0].start, schedule[0].wait), (Duration::ZERO, None));
    assert_eq!(schedule[1].start, seconds(4.0), "two jobs on device 1 take twice as long");
}

#[test]
fn the_greedy_policy_knows_no_shares_and_lets_later_jobs_take_idle_devices() {
    let mut queue = Queue::new(Policy::Greedy);
    queue.set_weight("b", 100.0);
    queue.push(job(1, "a", 0, 4.0, 1));
    queue.push(job(2, "b", 100, 4.0, 1));
    assert_eq!(run_all(&mut queue, Duration::ZERO), [1, 2], "the first to come is first");
    queue.push(on_both(1, None));
    queue.push(job(2, "a", 0, 1000.0, 1));
    let schedule = |queue: &Queue| schedule_all(queue, Duration::ZERO, &[IDLE, busy(5.0)], ample());
    let waits: Vec<bool> = schedule(&queue).iter().map(|scheduled| scheduled.wait.is_some()).collect();
    assert_eq!(waits, [true, false], "the later job delays the earlier one");
    queue.policy = Policy::Fair;
    assert!(schedule(&queue).iter().all(|scheduled| scheduled.wait.is_some()));
}

#[test]
fn the_greedy_policy_takes_more_devices_for_any_gain() {
    let places = || vec![place(0, 10.0, None), Place { devices: DeviceSet::new([0, 1]), ..place(0, 9.9, None) }];
    for (policy, devices) in [(Policy::Fair, 1), (Policy::Greedy, 2)] {
        let mut queue = Queue::new(policy);
        queue.push(Waiting { places: places(), ..job(1, "a", 0, 10.0, 1) });
        let schedule = schedule_all(&queue, Duration::ZERO, &[IDLE, IDLE], ample());
        assert_eq!(schedule[0].place.devices.len(), devices, "{policy:?}");
    }
}

#[test]
fn a_walk_looks_at_no_job_behind_the_last_that_may_start() {
    let starts = |queue: &Queue, loads: &[Load]| {
        let schedule = queue.schedule(Duration::ZERO, loads, ample(), Extent::MayStart);
        assert_eq!(schedule.is_whole, schedule.starts.len() == queue.len());
        schedule.starts.iter().map(|scheduled| (scheduled.id.0, scheduled.wait.is_none())).collect::<Vec<_>>()
    };
    let mut queue = Queue::default();
    for id in 1..=1000 {
        queue.push(job(id, ["a", "b"][id as usize % 2], 0, 1.0, 2));
    }
    assert_eq!(starts(&queue, &[busy(1.0), busy(2.0)]), [], "no slot is idle");
    assert_eq!(starts(&queue, &[busy(1.0), IDLE]), [(1, true)]);
    assert_eq!(starts(&queue, &[IDLE, IDLE]), [(1, true), (2, true)]);
    // A device that no job may use keeps no walk going.
    assert_eq!(starts(&queue, &[busy(1.0), busy(2.0), IDLE]), []);
    // A later job on such a device is found, and jobs before it keep their turns.
    queue.push(Waiting { places: vec![place(2, 1.0, None)], ..job(1001, "c", -5, 1.0, 0) });
    let found = starts(&queue, &[busy(1.0), busy(2.0), IDLE]);
    assert_eq!(found.last(), Some(&(1001, true)));
    assert!(found.len() < 10, "the tenants have had no device time, so their first jobs are next: {found:?}");
    // Slots that a large job has booked stay idle for too short a time.
    let mut queue = Queue::default();
    queue.push(on_both(1, None));
    for id in 2..=1000 {
        queue.push(job(id, "a", 0, 4.0, 2));
    }
    assert_eq!(starts(&queue, &[IDLE, busy(5.0)]), [(1, false)]);
    queue.push(job(1001, "a", 0, 3.0, 1));
    assert_eq!(starts(&queue, &[IDLE, busy(5.0)]).len(), 1001, "the last job ends before the large one starts");
}

#[test]
fn a_job_that_awaits_its_turn_books_no_slot() {
    let mut queue = Queue::default();
    let prepared = Place { is_prepared: true, ..place(0, 1.0, Some(0)) };
    queue.push(Waiting { places: vec![prepared], ..job(1, "a", 0, 1.0, 1) });
    queue.set_turns_ahead(JobId(1), Some(1));
    queue.push(job(2, "a", 0, 1.0, 1));
    let waits = |queue: &Queue| -> Vec<_> {
        schedule_all(queue, Duration::ZERO, &[IDLE], ample()).iter().map(|start| (start.id.0, start.wait)).collect()
    };
    assert_eq!(waits(&queue), [(1, Some(Wait::Turn)), (2, None)]);
    queue.set_turns_ahead(JobId(1), None);
    assert_eq!(waits(&queue), [(1, None), (2, Some(Wait::Device))]);
}

#[test]
fn a_job_starts_elsewhere_rather_than_after_many_turns() {
    let mut queue = Queue::default();
    let (prepared, usual) = (Place { is_prepared: true, ..place(0, 1.0, Some(0)) }, place(1, 3.5, Some(0)));
    queue.push(Waiting { places: vec![prepared, usual], ..job(1, "a", 0, 1.0, 1) });
    let start = |queue: &Queue| {
        let start = schedule_all(queue, Duration::ZERO, &[IDLE, IDLE], ample())[0].clone();
        (start.place.devices.leader(), start.start.as_secs_f64(), start.wait)
    };
    assert_eq!(start(&queue), (0, 0.0, None));
    for (ahead, expected) in [(2, (0, 2.0, Some(Wait::Turn))), (3, (1, 0.0, None))] {
        queue.set_turns_ahead(JobId(1), Some(ahead));
        assert_eq!(start(&queue), expected, "{ahead} turns ahead");
    }
}

#[test]
fn a_job_that_takes_no_time_needs_a_slot_too() {
    let mut queue = Queue::default();
    queue.push(Waiting { places: vec![place(0, 0.0, Some(0))], ..job(1, "a", 0, 0.0, 0) });
    let wait = |load: Load| schedule_all(&queue, Duration::ZERO, &[load], ample())[0].wait;
    assert_eq!(wait(busy(1.0)), Some(Wait::Device));
    assert_eq!(wait(two_slots(&[(1.0, false)])), None);
}

#[test]
fn a_walk_that_ends_early_makes_the_same_decisions() {
    use rand::rngs::SmallRng;
    use rand::{Rng, SeedableRng};
    let mut ended_early = 0;
    for seed in 0..300 {
        let random = &mut SmallRng::seed_from_u64(seed);
        let mut queue = Queue::new(if random.random_bool(0.2) { Policy::Greedy } else { Policy::Fair });
        for id in 1..=random.random_range(1..40) {
            let mut of_devices = |_| {
                let (first, count) = (random.random_range(0..4), random.random_range(1..=2));
                let devices = DeviceSet::new((first..first + count).map(|device| device % 4));
                let shared_bytes = random.random_bool(0.5).then_some(20);
                let host = need(random.random_range(0..30));
                Place { devices, memory_bytes: 60, host, ..place(0, random.random_range(0.0..4.0), shared_bytes) }
            };
            let places = (0..3).map(&mut of_devices).collect();
            let tenant = ["a", "b", "c"][random.random_range(0..3)];
            let starved_since = random.random_bool(0.2).then_some(Duration::ZERO);
            let priority = random.random_range(-3..3);
            queue.push(Waiting { places, starved_since, ..job(id, tenant, priority, 1.0, 0) });
        }
        let mut load = |_| match random.random_range(0..6) {
            0 => Load::Lost,
            1 => two_slots(&[(random.random_range(100.0..110.0), true)]),
            2 => two_slots(&[(101.0, false), (random.random_range(99.0..110.0), false)]),
            3 => two_slots(&[(random.random_range(100.0..110.0), false)]),
            4 => Load::InService { slots: 2, free_bytes: random.random_range(0..100), running: Vec::new() },
            _ => busy(103.0),
        };
        let loads: Vec<Load> = (0..4).map(&mut load).collect();
        let host = HostMemory { free_bytes: 50, returns: &|| vec![(seconds(120.0), 10)] };
        let of = |extent| queue.schedule(seconds(100.0), &loads, host, extent);
        let (all, early) = (of(Extent::All), of(Extent::MayStart));
        let (same, behind) = all.starts.split_at(early.starts.len());
        assert_eq!(same, early.starts, "seed {seed}");
        assert!(behind.iter().all(|scheduled| scheduled.wait == Some(Wait::Device)), "seed {seed}: {behind:?}");
        ended_early += usize::from(!behind.is_empty());
    }
    assert!(ended_early > 100, "{ended_early} of 300 walks ended early");
}
