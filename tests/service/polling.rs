//! PollFlightInfo: its answers while a job waits, runs and ends, and the endpoints that it lists. The
//! action `job`, which waits for the end of a job.

use std::collections::BTreeSet;
use std::time::{Duration, SystemTime};

use arrow_flight::{Action, CancelFlightInfoRequest, CancelFlightInfoResult, FlightDescriptor, PollInfo};
use dovetail::scheduler::JobId;
use prost::Message;
use serde_json::Value;
use tokio::task::JoinHandle;
use tonic::{Code, Status};

use crate::harness::*;

/// Describes a join of `table` with itself.
fn join(table: &str, more: &str) -> FlightDescriptor {
    let on = r#""on": [{"left": "k", "right": "k"}]"#;
    command(&format!(r#"{{"join": {{"left": "{table}", "right": "{table}", {on}{more}}}}}"#))
}

async fn poll(client: &mut Client, descriptor: FlightDescriptor) -> PollInfo {
    client.poll_flight_info(descriptor).await.unwrap().into_inner()
}

fn said(poll: &PollInfo) -> Value {
    serde_json::from_slice(&poll.info.as_ref().unwrap().app_metadata).unwrap()
}

fn endpoints(poll: &PollInfo) -> usize {
    poll.info.as_ref().unwrap().endpoint.len()
}

/// Starts a server whose device moves the given bytes per second. The self-join of its table `many`
/// has 12 million rows of 8 bytes: 96 MB.
async fn slow_server(bytes_per_second: u64, flags: &[&str]) -> (TestServer, Client, tempfile::TempDir) {
    let folder = tempfile::tempdir().unwrap();
    let topology = slow_devices(folder.path(), 1, bytes_per_second);
    let server = TestServer::start(&[&[&*topology, "--host-memory=512MiB"], flags].concat()).await;
    let mut client = server.client().await;
    put(&mut client, "many", vec![few_keys(6000)]).await.unwrap();
    (server, client, folder)
}

const MANY_ROWS: usize = 12_000_000;

/// Bytes per second at which the join runs for four seconds, for tests that read it to its end.
const SECONDS: u64 = 24_000_000;

/// Bytes per second at which the join runs for most of a minute.
const MINUTE: u64 = 2_000_000;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn polling_ends_with_the_result() {
    let server = TestServer::start(&["--endpoints=3"]).await;
    let mut client = server.client().await;
    put(&mut client, "t", keyed(400, 100)).await.unwrap();
    let mut answer = poll(&mut client, join("t", "")).await;
    let mut polls = 0;
    while let Some(descriptor) = answer.flight_descriptor.clone() {
        let progress = answer.progress.unwrap();
        assert!((0.0..=1.0).contains(&progress), "{progress}");
        assert!(answer.expiration_time.is_some());
        assert_eq!(endpoints(&answer), 0, "so few rows are read when all are there");
        answer = poll(&mut client, descriptor).await;
        polls += 1;
        assert!(polls < 1000, "the job does not end");
    }
    assert_eq!(answer.progress, Some(1.0));
    let info = answer.info.unwrap();
    assert_eq!(info.total_records, 400);
    assert!((1..=3).contains(&info.endpoint.len()), "{} endpoints", info.endpoint.len());
    assert_eq!(rows(&read_all(&mut client, &info).await.unwrap()), 400);
    // After an endpoint is renewed, another poll still lists all endpoints.
    let request = arrow_flight::RenewFlightEndpointRequest::new(info.endpoint[0].clone());
    client.do_action(Action::new("RenewFlightEndpoint", request.encode_to_vec())).await.unwrap();
    let again = poll(&mut client, info.flight_descriptor.unwrap()).await;
    assert_eq!(endpoints(&again), info.endpoint.len());
    assert!(again.flight_descriptor.is_none());
    // A table is complete from the start. A join without rows has an endpoint for its schema.
    assert!(poll(&mut client, path("t")).await.flight_descriptor.is_none());
    let mut empty = poll(&mut client, join("t", r#", "how": "left_anti""#)).await;
    while let Some(descriptor) = empty.flight_descriptor.clone() {
        empty = poll(&mut client, descriptor).await;
    }
    assert_eq!(endpoints(&empty), 1);
    assert_eq!(rows(&read_all(&mut client, &empty.info.unwrap()).await.unwrap()), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn endpoints_are_listed_as_they_are_completed() {
    let (server, mut client, _folder) = slow_server(SECONDS, &["--endpoints=4"]).await;
    let mut answer = poll(&mut client, join("many", "")).await;
    assert_eq!(endpoints(&answer), 0);
    let job = server.shared.scheduler.job(JobId(said(&answer)["job"].as_u64().unwrap())).unwrap();
    let (mut read_rows, mut read_endpoints, mut read_early) = (0, 0, 0);
    loop {
        let info = answer.info.clone().unwrap();
        assert!(info.endpoint.len() >= read_endpoints, "endpoints were taken back");
        for endpoint in &info.endpoint[read_endpoints..] {
            // Reads the endpoint to its end, without waiting for the end of the join.
            read_rows += rows(&read(&mut client, endpoint.ticket.clone().unwrap()).await.unwrap());
            read_early += usize::from(!job.status().state.is_final());
        }
        read_endpoints = info.endpoint.len();
        let Some(descriptor) = answer.flight_descriptor else { break };
        answer = poll(&mut client, descriptor).await;
    }
    assert_eq!(read_rows, MANY_ROWS);
    assert!(read_early > 0, "96 MB have parts before the last");
    assert!(read_endpoints >= 4, "{read_endpoints} endpoints at the end");
    // GetFlightInfo lists all endpoints at once, regardless of earlier polls.
    let info = answer.info.unwrap();
    let all = client.get_flight_info(info.flight_descriptor.clone().unwrap()).await.unwrap().into_inner();
    assert_eq!(all.endpoint.len(), 4);
    assert_eq!(rows(&read_all(&mut client, &all).await.unwrap()), MANY_ROWS);
    // Endpoints that were listed early still have the same rows at the end.
    assert_eq!(rows(&read_all(&mut client, &info).await.unwrap()), MANY_ROWS);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_consumed_result_is_read_while_it_is_made() {
    let (_server, mut client, _folder) = slow_server(SECONDS, &["--endpoints=2"]).await;
    let answer = poll(&mut client, join("many", r#", "retain_seconds": 0"#)).await;
    assert!(answer.flight_descriptor.is_some(), "it has hardly begun");
    assert_eq!(endpoints(&answer), 2);
    assert_eq!(rows(&read_all(&mut client, &answer.info.unwrap()).await.unwrap()), MANY_ROWS);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn progress_grows_and_never_falls() {
    let (_server, mut client, _folder) = slow_server(SECONDS, &[]).await;
    let mut answer = poll(&mut client, join("many", "")).await;
    let mut told = vec![answer.progress.unwrap()];
    while let Some(descriptor) = answer.flight_descriptor {
        answer = poll(&mut client, descriptor).await;
        told.push(answer.progress.unwrap());
    }
    assert!(told.is_sorted(), "{told:?}");
    assert_eq!(told[told.len() - 1], 1.0);
    let between: BTreeSet<u64> =
        told.iter().filter(|told| (0.01..0.99).contains(*told)).map(|told| told.to_bits()).collect();
    assert!(between.len() >= 2, "it was told how far the join is: {told:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_waiting_job_reports_its_position_the_reason_and_its_predicted_start() {
    let (server, mut client, _folder) = slow_server(MINUTE, &[]).await;
    let before = SystemTime::now() - Duration::from_secs(1);
    let first = poll(&mut client, join("many", "")).await;
    eventually("the first runs", async || !server.shared.scheduler.stats().devices[0].running.eq(&0)).await;
    let mut second = poll(&mut client, join("many", "")).await;
    let third = poll(&mut client, join("many", "")).await;
    let start_of = |told: &Value| {
        let text = told["predicted_start"].as_str().unwrap_or_else(|| panic!("no start is predicted: {told}"));
        humantime::parse_rfc3339(text).unwrap()
    };
    let (told_second, told_third) = (said(&second), said(&third));
    for (told, position) in [(&told_second, 0), (&told_third, 1)] {
        assert_eq!(told["state"], "queued", "{told}");
        assert_eq!(told["queue_position"], position, "{told}");
        assert_eq!(told["waiting_for"], "host:0", "{told}");
        assert_eq!(told["progress"], 0.0, "{told}");
        let ahead = start_of(told).duration_since(before).expect("it starts in the future").as_secs();
        assert!(ahead < 600, "a start in {ahead} s is predicted for a join of seconds");
    }
    assert!(start_of(&told_third) > start_of(&told_second), "{told_second} {told_third}");
    // A client can cancel a job by the info of a poll, before any endpoint is listed. The jobs
    // behind it move up.
    let request = CancelFlightInfoRequest::new(first.info.unwrap()).encode_to_vec();
    let mut results = client.do_action(Action::new("CancelFlightInfo", request)).await.unwrap().into_inner();
    let result = results.message().await.unwrap().unwrap();
    assert_eq!(CancelFlightInfoResult::decode(&*result.body).unwrap().status, 1);
    while said(&second)["state"] == "queued" {
        second = poll(&mut client, second.flight_descriptor.unwrap()).await;
    }
    let told = said(&second);
    assert_eq!(told["state"], "running", "{told}");
    for nothing in ["queue_position", "waiting_for", "predicted_start"] {
        assert!(told[nothing].is_null(), "it waits no more: {told}");
    }
    let told = said(&poll(&mut client, third.flight_descriptor.unwrap()).await);
    assert_eq!((&told["state"], &told["queue_position"]), (&"queued".into(), &0.into()), "{told}");
}

/// Starts a job that runs for most of a minute, and returns its number.
async fn start_long_job(client: &mut Client) -> u64 {
    said(&poll(client, join("many", "")).await)["job"].as_u64().unwrap()
}

/// Sends the action `job` with a wait, in a task of its own.
fn wait_for(client: &Client, job: u64, seconds: f64) -> JoinHandle<Result<Value, Status>> {
    let mut client = client.clone();
    tokio::spawn(async move {
        let answers = act(&mut client, "job", &format!(r#"{{"job": {job}, "wait_seconds": {seconds}}}"#)).await?;
        Ok(serde_json::from_str(&answers[0]).unwrap())
    })
}

/// Returns the number of calls that the server is serving.
async fn calls_in_flight(server: &TestServer) -> usize {
    let (_, metrics) = server.http_get("/metrics").await;
    let line = metrics.lines().find_map(|line| line.strip_prefix("dovetail_calls_in_flight "));
    line.expect("the metric exists").parse().unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wait_is_answered_at_the_end_of_the_job_or_after_its_limit() {
    let (server, mut client, _folder) = slow_server(MINUTE, &[]).await;
    let job = start_long_job(&mut client).await;
    let answer = wait_for(&client, job, 0.02).await.unwrap().unwrap();
    assert!(["queued", "running"].contains(&answer["state"].as_str().unwrap()), "{answer}");
    for wrong in ["-1", "1e30", "\"soon\""] {
        let body = format!(r#"{{"job": {job}, "wait_seconds": {wrong}}}"#);
        refused(act(&mut client, "job", &body).await, Code::InvalidArgument, "wait_seconds");
    }
    // Waiting calls take no slot for work of the CPU, and hence no thread.
    let waits: Vec<_> = (0..50).map(|_| wait_for(&client, job, 9.5)).collect();
    eventually("all calls wait", async || calls_in_flight(&server).await == waits.len()).await;
    assert_eq!((server.shared.cpu_work.calls(), server.shared.cpu_work.slots_taken()), (0, 0));
    act(&mut client, "cancel_job", &format!(r#"{{"job": {job}}}"#)).await.unwrap();
    for wait in waits {
        assert_eq!(wait.await.unwrap().unwrap()["state"], "cancelled");
    }
    // The end of a job is not waited for twice.
    assert_eq!(wait_for(&client, job, 9.5).await.unwrap().unwrap()["state"], "cancelled");
    put(&mut client, "few", keyed(10, 10)).await.unwrap();
    let quick = said(&poll(&mut client, join("few", "")).await)["job"].as_u64().unwrap();
    let answer = wait_for(&client, quick, 9.5).await.unwrap().unwrap();
    assert_eq!((answer["state"].as_str(), answer["rows"].as_u64()), (Some("complete"), Some(10)));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wait_ends_with_its_connection_and_with_the_server() {
    let (mut server, mut client, _folder) = slow_server(MINUTE, &[]).await;
    let job = start_long_job(&mut client).await;
    let leaving = server.client().await;
    let waits: Vec<_> = (0..3).map(|_| wait_for(&leaving, job, 9.5)).collect();
    eventually("all calls wait", async || calls_in_flight(&server).await == 3).await;
    waits.iter().for_each(JoinHandle::abort);
    drop(leaving);
    eventually("no call waits", async || calls_in_flight(&server).await == 0).await;
    assert_eq!(server.shared.scheduler.stats().cancelled_total, 0, "the job has other clients");
    let wait = wait_for(&client, job, 9.5);
    eventually("a call waits", async || calls_in_flight(&server).await == 1).await;
    server.drain();
    server.end();
    // The call gets a status of the server's end, or learns that its job ended with the server.
    let told = wait.await.unwrap();
    assert!(told.as_ref().map_or(true, |answer| answer["state"] == "cancelled"), "{told:?}");
    server.join().await.unwrap();
}
