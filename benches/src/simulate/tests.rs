//! Tests of the simulator, and by it of the scheduler: seeded runs in which devices are lost, jobs
//! are cancelled and predictions are wrong.

use std::collections::BTreeMap;
use std::path::PathBuf;

use dovetail::scheduler::{DevicesWord, JobState, TracedDevices, TracedTable, TracedTimes};

use super::report::Share;
use super::simulation::Record;
use super::*;

fn setup(fixture: &str) -> Setup {
    let path = format!("{}/../tests/fixtures/topology/{fixture}.toml", env!("CARGO_MANIFEST_DIR"));
    Setup {
        topology: topology_of(&PathBuf::from(path)).unwrap(),
        policy: Policy::Fair,
        speed: 1.0,
        device_memory: 16 << 30,
        host_memory: 64 << 30,
        closed_loop: false,
        read_rate: 3e9,
        spread: 0.2,
        faults: Faults::default(),
        seed: 1,
    }
}

fn greedy(setup: &Setup) -> Setup {
    Setup { policy: Policy::Greedy, ..setup.clone() }
}

fn draw(setup: &Setup, jobs: usize, load: f64, weights: &[f64], mix: &str) -> Vec<TracedJob> {
    let (mix, devices) = (mix.parse().unwrap(), setup.topology.devices.len());
    drawn(&Drawing { jobs, mix, weights, by_kind: false, devices, seed: setup.seed }, load, setup).unwrap()
}

/// Join of two tables with as many rows each, submitted at a time.
fn join(at: f64, rows: u64, devices: TracedDevices) -> TracedJob {
    let side = || TracedTable { rows, key_bytes: vec![8.0], payload_bytes: vec![8.0], distinct: Some(rows as f64) };
    TracedJob {
        at,
        tenant: "a".into(),
        client: None,
        weight: 1.0,
        priority: 0,
        how: "inner".into(),
        left: side(),
        right: side(),
        count: true,
        devices,
        distribution: None,
        measured: None,
    }
}

/// Notes in a trace when its jobs arrived, and how long they took.
fn record(trace: &mut [TracedJob], outcome: &Outcome) {
    for (traced, job) in trace.iter_mut().zip(&outcome.records) {
        let (started, ended) = (job.started.unwrap(), job.ended.unwrap());
        traced.at = job.arrived;
        traced.measured = Some(TracedTimes { waited: started - job.arrived, ran: ended - started });
    }
}

fn on(device: &str) -> TracedDevices {
    TracedDevices::Named(vec![device.into()])
}

#[test]
fn simulated_times_are_compared_with_those_of_the_trace() {
    let setup = setup("h200-x4");
    let mut trace = draw(&setup, 50, 0.8, &[1.0], "small=0.7,large=0.3");
    let unmeasured = simulate(&setup, trace.clone()).unwrap();
    assert!(Report::of(&unmeasured).compared.is_none());
    record(&mut trace, &unmeasured);
    let same = Report::of(&simulate(&setup, trace.clone()).unwrap());
    let compared = same.compared.as_ref().unwrap();
    assert_eq!((compared.jobs, compared.close, compared.close_runs, compared.close_waits), (50, 1.0, 1.0, 1.0));
    let ratios = || compared.ratio.iter().chain(&compared.ratio_of_runs);
    assert!(ratios().all(|ratio| (ratio - 1.0).abs() < 1e-6), "{compared:?}");
    let [waited, measured] = compared.waited;
    assert!(waited > 0.0 && (waited - measured).abs() < 1e-6, "{compared:?}");
    assert_eq!(same.json(&json!({}))["compared"]["close"], 1.0);
    let mut waiting = trace.clone();
    waiting.iter_mut().step_by(2).for_each(|traced| {
        let times = traced.measured.as_mut().unwrap();
        times.waited = 2.0 * times.waited + times.ran;
    });
    let waits = Report::of(&simulate(&setup, waiting).unwrap()).compared.unwrap();
    assert_eq!((waits.close, waits.close_runs, waits.close_waits), (0.5, 1.0, 0.5), "only the queue deviates");
    for (at, traced) in trace.iter_mut().enumerate() {
        let times = traced.measured.as_mut().unwrap();
        if at % 2 == 0 {
            (times.waited, times.ran) = (2.0 * times.waited, 2.0 * times.ran);
        }
    }
    let half = Report::of(&simulate(&setup, trace).unwrap()).compared.unwrap();
    assert_eq!((half.close, half.close_runs), (0.5, 0.5));
}

#[test]
fn each_job_tells_of_the_distribution_that_it_asked_for() {
    let setup = Setup { spread: 0.0, ..setup("dgx-h100") };
    let asked = |at: f64, rows: u64, distribution: &str| TracedJob {
        distribution: Some(distribution.into()),
        ..join(at, rows, TracedDevices::Count(4))
    };
    let trace = vec![asked(0.0, 1 << 28, "broadcast"), asked(100.0, 1 << 28, "hash"), asked(200.0, 1 << 36, "hash")];
    let each = report::each(&simulate(&setup, trace).unwrap().records);
    for (at, distribution) in ["broadcast", "hash"].into_iter().enumerate() {
        let job = &each[at];
        assert_eq!((&job["distribution"], &job["devices"]), (&json!(distribution), &json!(4)), "{job}");
        let [predicted, ran] = ["predicted_seconds", "seconds"].map(|name| job[name].as_f64().unwrap());
        assert!(predicted > 0.0 && (ran / predicted - 1.0).abs() < 1e-6, "{job}");
        assert_eq!((&job["is_complete"], &job["refused"]), (&json!(true), &Value::Null));
        assert_eq!(job["waited_seconds"], 0.0, "{job}");
    }
    let refused = &each[2];
    assert!(refused["refused"].as_str().unwrap().contains("ask for more devices"), "{refused}");
    assert_eq!((&refused["seconds"], &refused["predicted_seconds"]), (&Value::Null, &Value::Null));
}

/// Trace of a server whose clients ask for one join after the other, with pauses between them. Also
/// returns the setup in which it is run again, exactly.
fn of_clients(clients: u64) -> (Setup, Vec<TracedJob>) {
    let setup = Setup { closed_loop: true, spread: 0.0, ..setup("h200-x4") };
    let of_client = |number: u64| TracedJob {
        client: Some(number % clients),
        // As if the server had needed no time: all the time to the next join is a pause.
        measured: Some(TracedTimes { waited: 0.0, ran: 0.0 }),
        ..join(1e-3 * number as f64, (1 << 26) + number * 7919 % 1000 * 20_000, TracedDevices::Count(1))
    };
    let mut trace: Vec<TracedJob> = (0..10 * clients).map(of_client).collect();
    let outcome = simulate(&setup, trace.clone()).unwrap();
    record(&mut trace, &outcome);
    (setup, trace)
}

/// Longest time from submission to end.
fn longest(outcome: &Outcome) -> f64 {
    outcome.records.iter().map(|job| job.ended.unwrap() - job.arrived).fold(0.0, f64::max)
}

#[test]
fn a_closed_loop_reproduces_the_times_of_its_trace_if_predictions_are_right() {
    let (setup, trace) = of_clients(24);
    let outcome = simulate(&setup, trace.clone()).unwrap();
    let mut arrived: Vec<f64> = trace.iter().map(|traced| traced.at).collect();
    arrived.sort_by(f64::total_cmp);
    for (job, at) in outcome.records.iter().zip(arrived) {
        assert!((job.arrived - at).abs() < 1e-6, "{job:?} arrived at {at}");
    }
    let compared = Report::of(&outcome).compared.unwrap();
    assert_eq!((compared.jobs, compared.close_runs, compared.close_waits), (240, 1.0, 1.0));
    assert!(compared.ratio.iter().all(|ratio| (ratio - 1.0).abs() < 1e-5), "{compared:?}");
    assert!(compared.waited[0] > 0.0, "jobs waited: {compared:?}");
}

#[test]
fn slower_runs_pile_up_at_fixed_times_and_not_in_a_closed_loop() {
    let (setup, trace) = of_clients(24);
    let measured = longest(&simulate(&setup, trace.clone()).unwrap());
    // Twice the rows take about twice the time.
    let slower = |traced: &TracedJob| TracedJob {
        client: traced.client,
        measured: traced.measured,
        ..join(traced.at, 2 * traced.left.rows, TracedDevices::Count(1))
    };
    let trace: Vec<TracedJob> = trace.iter().map(slower).collect();
    let mut most_open = 0;
    let mut observe = |simulation: &Simulation| {
        most_open = most_open.max(simulation.records().iter().filter(|job| job.is_open()).count());
        Ok(())
    };
    let closed = Simulation::new(setup.clone(), trace.clone()).unwrap().run(&mut observe).unwrap();
    assert!(most_open <= 24, "a client has one job at a time, and {most_open} were open");
    let fixed = simulate(&Setup { closed_loop: false, ..setup }, trace).unwrap();
    let (closed, fixed) = (longest(&closed), longest(&fixed));
    assert!(closed < 3.0 * measured && 3.0 * closed < fixed, "{measured} s measured, {closed} s and {fixed} s");
}

#[test]
fn a_client_has_a_loop_for_each_join_that_it_waits_for() {
    let job = |at: f64, client: Option<u64>, ran: Option<f64>| TracedJob {
        client,
        measured: ran.map(|ran| TracedTimes { waited: 0.5, ran }),
        ..join(at, 1, TracedDevices::default())
    };
    let trace = [
        job(0.0, Some(1), Some(1.0)),
        // It is asked for while the first one runs, which ends at 1.5.
        job(1.0, Some(1), Some(3.5)),
        job(1.0, Some(2), None),
        job(2.0, Some(1), Some(1.0)),
        job(2.0, None, Some(1.0)),
        // Nothing says when the one before ended.
        job(4.0, Some(2), Some(1.0)),
        // Joins ended at 5.0 and 3.5, and the later one tells the client to go on.
        job(5.25, Some(1), None),
        // The client was told before the server noted it.
        job(4.9996 + 0.5, Some(2), None),
    ];
    let follows = |job: usize, pause: f64| Some(clients::Next { job, pause });
    let next = clients::loops(&trace);
    assert_eq!(next, [follows(3, 0.5), follows(6, 0.25), follows(5, 3.0), None, None, follows(7, 0.0), None, None]);
}

#[test]
fn a_job_that_ends_without_a_result_lets_its_client_go_on() {
    let lines = [
        (0.0, 1 << 10, Some(TracedTimes { waited: 0.0, ran: 1.0 })),
        // Its tables fit on no device.
        (1.5, 1 << 40, Some(TracedTimes { waited: 0.0, ran: 1.0 })),
        (3.0, 1 << 10, None),
        (5.0, 1 << 10, Some(TracedTimes { waited: 0.0, ran: 1.0 })),
    ];
    let of_client = |&(at, rows, measured): &(f64, u64, Option<TracedTimes>)| TracedJob {
        client: Some(7),
        measured,
        ..join(at, rows, TracedDevices::Count(1))
    };
    let trace: Vec<TracedJob> = lines.iter().map(of_client).collect();
    let setup = Setup { closed_loop: true, ..setup("h200-x4") };
    let outcome = simulate(&setup, trace).unwrap();
    let records = &outcome.records;
    let (end, arrived) = (records[0].ended.unwrap(), |job: usize| records[job].arrived);
    assert!((arrived(1) - end - 0.5).abs() < 1e-9 && records[1].state.is_none(), "{records:?}");
    assert!((arrived(2) - arrived(1) - 0.5).abs() < 1e-9, "{records:?}");
    assert!((arrived(3) - arrived(2) - 2.0).abs() < 1e-9, "{records:?}");
}

fn waited(job: &Record) -> f64 {
    job.started.unwrap() - job.arrived
}

#[test]
fn every_job_ends_and_no_memory_is_given_twice_whatever_fails() {
    for (fixture, jobs, load) in [("dgx-h100", 60, 1.2), ("pcie-two-sockets", 150, 0.9), ("h200-x4", 100, 1.5)] {
        for seed in 1..=2 {
            // Slow devices, so that some are lost and come back while jobs run.
            let faults = "lost=20,cancelled=0.1,failed=0.1,wrong=0.1".parse().unwrap();
            let setup = Setup { seed, faults, host_memory: 12 << 30, speed: 0.02, ..setup(fixture) };
            let trace = draw(&setup, jobs, load, &[1.0, 2.0], "small=0.7,large=0.2,gang=0.1");
            let mut observe = |simulation: &Simulation| {
                let (given, used) = simulation.host_bytes();
                assert!(given == used && used <= 12 << 30, "{fixture}: {given} B were given, and {used} B are used");
                Ok(())
            };
            let outcome = Simulation::new(setup, trace).unwrap().run(&mut observe).unwrap();
            let states = outcome.records.iter().filter_map(|job| job.state.as_ref());
            let mut counts = BTreeMap::new();
            for state in states {
                let name = match state {
                    JobState::Failed(Error::Unavailable(_) | Error::Exhausted(_)) => "failed",
                    JobState::Complete => "done",
                    JobState::Cancelled => "cancelled",
                    other => panic!("{fixture}: {other:?}"),
                };
                *counts.entry(name).or_insert(0) += 1;
            }
            assert!(counts["done"] > jobs / 2 && counts["cancelled"] > 0, "{fixture}: {counts:?}");
            let tried_again = outcome.records.iter().filter(|job| job.runs > 1).count();
            assert!(tried_again > 0, "{fixture}: no fault met a job");
        }
    }
}

#[test]
fn a_seed_always_gives_the_same_outcome() {
    let ends = |seed: u64| {
        let faults = "lost=1,cancelled=0.1,failed=0.1,wrong=0.1".parse().unwrap();
        let setup = Setup { seed, faults, ..setup("h200-x4") };
        let trace = draw(&setup, 80, 1.0, &[1.0, 1.0], "small=0.8,large=0.2");
        let outcome = simulate(&setup, trace).unwrap();
        outcome.records.iter().map(|job| (job.started, job.ended, job.device_seconds)).collect::<Vec<_>>()
    };
    assert_eq!(ends(3), ends(3));
    assert_ne!(ends(3), ends(4));
}

/// Least device time that a tenant with jobs waiting had at any event, over its share by weight.
fn least_of_share(setup: &Setup, trace: Vec<TracedJob>, weights: &[f64]) -> f64 {
    let sum: f64 = weights.iter().sum();
    let mut least = f64::INFINITY;
    let mut observe = |simulation: &Simulation| {
        let of = |tenant: usize| {
            let name = format!("tenant-{tenant}");
            simulation.records().iter().filter(move |job| job.tenant == name)
        };
        let all_wait = (0..weights.len()).all(|tenant| of(tenant).any(|job| job.is_open() && job.started.is_none()));
        let given: Vec<f64> = (0..weights.len()).map(|tenant| of(tenant).map(|job| job.device_seconds).sum()).collect();
        let all: f64 = given.iter().sum();
        let longest = simulation.records().iter().map(|job| job.predicted * job.fate.time).fold(0.0, f64::max);
        // The time of a job is charged when it begins.
        if all_wait && all > 10.0 * longest {
            let part = |(tenant, weight): (usize, &f64)| (given[tenant] + longest) / (all * weight / sum);
            least = weights.iter().enumerate().map(part).fold(least, f64::min);
        }
        Ok(())
    };
    Simulation::new(setup.clone(), trace).unwrap().run(&mut observe).unwrap();
    least
}

#[test]
fn a_tenant_with_jobs_waiting_gets_most_of_its_share() {
    let (setup, weights) = (setup("h200-x4"), [1.0, 2.0, 4.0]);
    let of_one_device = |at: u32| TracedJob {
        tenant: format!("tenant-{}", at % 3),
        weight: weights[at as usize % 3],
        ..join(0.0, 1 << (22 + at / 3 % 3), TracedDevices::Count(1))
    };
    let trace: Vec<TracedJob> = (0..450).map(of_one_device).collect();
    let fair = least_of_share(&setup, trace.clone(), &weights);
    assert!(fair > 0.9 && fair.is_finite(), "{fair:.3} of its share");
    let greedy = least_of_share(&greedy(&setup), trace, &weights);
    assert!(greedy < 0.7, "{greedy:.3} without shares, so this test sees no unfair policy");
}

#[test]
fn small_joins_do_not_starve_a_gang() {
    let setup = setup("h200-x4");
    // Small joins at once are done about 1.6 times as fast as one after the other.
    let mut trace = draw(&setup, 2500, 2.0, &[1.0], "small=1");
    let last = trace.last().unwrap().at;
    let gangs = 5;
    let all = TracedDevices::Word(DevicesWord::All);
    trace.extend((0..gangs).map(|at| join(last * 0.1 * f64::from(at), 1 << 26, all.clone())));
    let longest = |setup: &Setup| {
        let outcome = simulate(setup, trace.clone()).unwrap();
        let waits = outcome.records.iter().filter(|job| job.is_gang).map(waited);
        waits.fold(0.0, f64::max) / last
    };
    let fair = longest(&setup);
    assert!(fair < 0.1, "a gang waited for {fair:.2} of the time in which small joins came");
    let greedy = longest(&greedy(&setup));
    assert!(greedy > 0.5, "{greedy:.2} without limits, so this test sees no starving policy");
}

#[test]
fn jobs_behind_one_switch_slow_each_other_down() {
    let setup = Setup { spread: 0.0, ..setup("dgx-a100") };
    let seconds = |devices: [&str; 2]| {
        let trace = devices.map(|device| join(0.0, 1 << 28, on(device)));
        simulate(&setup, trace.to_vec()).unwrap().seconds
    };
    // A trace of a server with GPUs names these.
    let alone = simulate(&setup, vec![join(0.0, 1 << 28, on("cuda:0"))]).unwrap().seconds;
    let (behind_one, behind_two) = (seconds(["host:0", "host:1"]), seconds(["host:0", "host:2"]));
    assert!((behind_two / alone - 1.0).abs() < 1e-6, "{behind_two} s, {alone} s");
    assert!(behind_one > 1.3 * alone, "{behind_one} s, {alone} s");
}

#[test]
fn a_device_is_shared_by_short_jobs_and_its_time_is_counted_once() {
    let setup = Setup { spread: 0.0, ..setup("h200-x4") };
    let two = simulate(&setup, vec![join(0.0, 1 << 20, on("host:0")); 2]).unwrap();
    let given: f64 = two.records.iter().map(|job| job.device_seconds).sum();
    assert!((given - two.seconds).abs() < 1e-9 && two.records[1].started == Some(0.0), "{two:?}");
    assert_eq!(two.devices.iter().map(|(_, busy)| *busy).collect::<Vec<_>>(), [1.0, 0.0, 0.0, 0.0]);
}

#[test]
fn joins_at_once_share_what_their_copies_take_and_wait_together_for_the_host() {
    let setup = Setup { spread: 0.0, ..setup("h200-x4") };
    let seconds = |rows: u64, joins: usize| {
        let outcome = simulate(&setup, vec![join(0.0, rows, on("host:0")); joins]).unwrap();
        assert!(outcome.records.iter().all(|job| job.started == Some(0.0)), "all run at once");
        outcome.seconds
    };
    let times = |rows: u64, joins: usize| seconds(rows, joins) / seconds(rows, 1);
    let (small, large) = (times(1 << 12, 4), times(1 << 25, 4));
    assert!(small < 1.01, "four small joins take {small:.2} times as long as one");
    assert!((3.0..4.0).contains(&large), "four large joins take {large:.2} times as long as one");
}

#[test]
fn a_small_join_waits_for_the_copies_of_large_ones() {
    let setup = Setup { spread: 0.0, ..setup("h200-x4") };
    let ran = |beside: usize| {
        let mut trace = vec![join(0.0, 1 << 25, on("host:0")); beside];
        trace.push(join(1e-6, 1 << 16, on("host:0")));
        let outcome = simulate(&setup, trace).unwrap();
        outcome.records.last().map(|job| job.ended.unwrap() - job.started.unwrap()).unwrap()
    };
    let (alone, beside) = (ran(0), ran(3));
    // An equal share of the device would make it four times as long.
    assert!((6.0..30.0).contains(&(beside / alone)), "{beside} s beside large joins, {alone} s alone");
}

#[test]
fn lines_of_a_trace_are_read_and_wrong_ones_are_named() {
    let line = r#"{"at": 5, "left": {"rows": 10, "key_bytes": [8]}, "right": {"rows": 20, "key_bytes": [4]}}"#;
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("trace.jsonl");
    let with = |more: &str| {
        std::fs::write(&file, format!("{line}\n{more}\n")).unwrap();
        trace::read(&file)
    };
    let (jobs, dropped) = with(r#"{"dropped": 3}"#).unwrap();
    assert_eq!((jobs.len(), dropped, jobs[0].weight, jobs[0].how.as_str()), (1, 3, 1.0, "inner"));
    for (wrong, words) in [("{}", "missing field"), (&line.replace("[4]", "[]"), "the same number of"), ("1", "line 2")]
    {
        let refused = with(wrong).unwrap_err();
        assert!(refused.message().contains(words) && refused.message().contains("line 2"), "{refused}");
    }
}

#[test]
fn wrong_options_are_refused() {
    for wrong in ["lost", "lost=-1", "wrong=2", "slow=1"] {
        assert!(wrong.parse::<Faults>().is_err(), "{wrong}");
    }
    for wrong in ["small", "small=0", "huge=1", "gang=-1"] {
        assert!(wrong.parse::<Mix>().is_err(), "{wrong}");
    }
}

#[test]
fn fair_shares_go_by_weight_among_those_that_want_more() {
    let record = |tenant: &str, weight: f64, in_window: f64, after: f64| {
        let traced = TracedJob { tenant: tenant.into(), weight, ..join(0.0, 1, TracedDevices::default()) };
        Record::of_device_seconds(&traced, in_window, in_window + after)
    };
    // Ten seconds: "a" asks for one, and the others share nine by their weights.
    let records = [record("a", 4.0, 1.0, 0.0), record("b", 1.0, 6.0, 9.0), record("c", 2.0, 3.0, 9.0)];
    let shares = report::shares(&records);
    let fair: Vec<f64> = shares.iter().map(|share| share.fair_seconds).collect();
    assert_eq!(fair, [1.0, 3.0, 6.0]);
    assert_eq!(shares.iter().map(Share::of_fair).collect::<Vec<_>>(), [1.0, 2.0, 0.5]);
}
