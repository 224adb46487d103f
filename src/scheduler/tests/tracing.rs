//! Tests of the trace that a server writes of its jobs.

use super::*;
use crate::planner::Distribution;

#[test]
fn each_job_is_a_line_that_can_be_read_again() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("jobs.jsonl");
    let trace = Some(JobTrace::open(&file).unwrap());
    let stage = Stage::with(2, SchedulerOptions { trace, ..SchedulerOptions::default() });
    stage.scheduler.set_weight("a", 2.5).unwrap();
    let of_two = JobOptions { priority: 7, distribution: Some(Distribution::Broadcast), ..on(&["host:0", "host:1"]) };
    stage.submit_join(&spec("r3"), of_two, "a").unwrap();
    let count = JoinSpec { count: true, columns: Vec::new(), how: JoinKind::LeftSemi, ..spec("r0") };
    let terms = Submission { client: Some(3), ..Submission::default() };
    stage.scheduler.submit(bind(&count, &stage.catalog).unwrap(), JobOptions::default(), terms).unwrap();
    drop(stage);
    let text = std::fs::read_to_string(&file).unwrap();
    let mut lines: Vec<TracedJob> = text.lines().map(|line| TracedJob::parse(line).unwrap()).collect();
    lines.sort_by(|a, b| a.at.total_cmp(&b.at));
    let side = |payload_bytes: &[f64]| TracedTable {
        rows: 100,
        key_bytes: vec![4.0],
        payload_bytes: payload_bytes.to_vec(),
        distinct: Some(100.0),
    };
    let expected = [
        TracedJob {
            at: lines[0].at,
            tenant: "a".into(),
            client: None,
            weight: 2.5,
            priority: 7,
            how: "inner".into(),
            left: side(&[4.0]),
            right: side(&[]),
            count: false,
            devices: TracedDevices::Named(vec!["host:0".into(), "host:1".into()]),
            distribution: Some("broadcast".into()),
            measured: None,
        },
        TracedJob {
            at: lines[1].at,
            tenant: String::new(),
            client: Some(3),
            weight: 1.0,
            priority: 0,
            how: "left_semi".into(),
            left: side(&[]),
            right: side(&[]),
            count: true,
            devices: TracedDevices::default(),
            distribution: None,
            measured: None,
        },
    ];
    assert_eq!(lines, expected);
    assert!(lines[0].at > 1.7e9 && lines[1].at >= lines[0].at, "{lines:?}");
    assert!(text.contains(r#""devices":"any""#), "{text}");
    let asks = text.lines().find(|line| line.contains("broadcast")).unwrap();
    let wrong = TracedJob::parse(&asks.replace("broadcast", "brodcast")).unwrap_err();
    assert!(wrong.message().contains("did you mean \"broadcast\"?"), "{wrong}");
}

#[test]
fn a_job_that_completes_has_its_times() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("jobs.jsonl");
    let trace = Some(JobTrace::open(&file).unwrap());
    let stage = Stage::with(1, SchedulerOptions { trace, ..SchedulerOptions::default() });
    let job = stage.submit("r0");
    let (device, _) = stage.next();
    stage.finish(device);
    assert_eq!(stage.ended(&job), JobState::Complete);
    drop(stage);
    let line = TracedJob::parse(std::fs::read_to_string(&file).unwrap().trim()).unwrap();
    let TracedTimes { waited, ran } = line.measured.unwrap();
    assert!((0.0..60.0).contains(&waited) && (0.0..60.0).contains(&ran), "{waited} {ran}");
    let wrong = serde_json::to_string(&line).unwrap().replace("\"ran\":", "\"ran\":-1");
    assert!(TracedJob::parse(&wrong).is_err(), "{wrong}");
}

#[test]
fn a_file_that_cannot_be_opened_is_refused_by_its_name() {
    let refused = JobTrace::open(std::path::Path::new("/no/such/folder/jobs.jsonl")).unwrap_err();
    assert!(refused.message().contains("--job-trace /no/such/folder/jobs.jsonl: there is no folder /no"), "{refused}");
}
