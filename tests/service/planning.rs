//! CPU work outside the queue: joins with very many columns take long to plan, and their planning
//! can be cancelled.

use std::sync::Arc;

use arrow::datatypes::{DataType, Field, Schema};
use arrow_flight::Action;
use dovetail::catalog::Table;
use tokio::task::JoinHandle;
use tonic::{Code, Request, Status};

use crate::harness::*;

/// Columns of a table whose self-join takes long to plan. Unlike devices are planned separately.
const COLUMNS: usize = 50_000;

/// Devices that are enough for planning to take seconds.
const MANY: usize = 8;

const EXPLAIN: &str = r#"{"join": {"left": "wide", "right": "wide", "on": [{"left": "c0", "right": "c0"}]}}"#;

/// Starts a server with `devices` unlike devices, a table of many columns, and a small table.
async fn server(devices: usize, flags: &[&str]) -> TestServer {
    let folder = tempfile::tempdir().unwrap();
    let topology = unlike_devices(folder.path(), devices);
    let server = TestServer::start(&[&[&*topology], flags].concat()).await;
    let fields: Vec<Field> =
        (0..COLUMNS).map(|column| Field::new(format!("c{column}"), DataType::Int32, false)).collect();
    let wide = Table::from_batches("wide", Arc::new(Schema::new(fields)), Vec::new()).unwrap();
    server.shared.catalog.create(wide).unwrap();
    put(&mut server.client().await, "small", keyed(10, 10)).await.unwrap();
    server
}

fn explain(timeout: Option<&str>) -> Request<Action> {
    let mut request = Request::new(Action::new("explain", EXPLAIN));
    if let Some(timeout) = timeout {
        request.metadata_mut().insert("grpc-timeout", timeout.parse().unwrap());
    }
    request
}

/// Explains the join through a separate client.
async fn explaining(server: &TestServer) -> JoinHandle<Result<usize, Status>> {
    let mut client = server.client().await;
    tokio::spawn(async move {
        let mut results = client.do_action(explain(None)).await?.into_inner();
        let explained = results.message().await?.expect("there is one result");
        Ok(explained.body.len())
    })
}

async fn expect_no_work(server: &TestServer, interrupted: usize) {
    let work = &server.shared.cpu_work;
    eventually("all slots are free again", async || work.slots_taken() == 0 && work.calls() == 0).await;
    assert_eq!(work.interrupted(), interrupted, "as often planning was stopped before its end");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn planning_stops_when_its_client_disconnects() {
    let server = server(MANY, &[]).await;
    let call = explaining(&server).await;
    eventually("planning begins", async || server.shared.cpu_work.slots_taken() == 1).await;
    call.abort();
    expect_no_work(&server, 1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn planning_stops_at_its_deadline_and_the_call_fails() {
    let server = server(MANY, &[]).await;
    let outcome = server.client_without_deadlines().do_action(explain(Some("100m"))).await;
    refused(outcome, Code::DeadlineExceeded, "the call's deadline passed before the call was done");
    // The deadline passed while the join was planned, or before planning began.
    let work = &server.shared.cpu_work;
    eventually("all slots are free again", async || work.slots_taken() == 0 && work.calls() == 0).await;
    assert!(work.interrupted() <= 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn other_calls_are_answered_while_every_slot_is_taken() {
    let server = server(MANY, &[]).await;
    let work = &server.shared.cpu_work;
    let slots = std::thread::available_parallelism().unwrap().get();
    let mut calls = Vec::new();
    for _ in 0..slots + 1 {
        calls.push(explaining(&server).await);
    }
    eventually("every slot is taken", async || (work.slots_taken(), work.calls()) == (slots, slots + 1)).await;
    let mut client = server.client().await;
    assert_eq!(rows(&get(&mut client, path("small")).await.unwrap()), 10);
    assert_eq!(server.http_get("/readyz").await.0, 200);
    assert_eq!(act(&mut client, "list_jobs", "").await.unwrap().len(), 0);
    // The last call waits without a slot, and has no work to stop.
    calls.iter().for_each(JoinHandle::abort);
    eventually("all slots are free again", async || work.slots_taken() == 0 && work.calls() == 0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_drain_waits_for_planning_in_progress() {
    let mut server = server(1, &["--drain-seconds=3600"]).await;
    let call = explaining(&server).await;
    let shared = server.shared.clone();
    eventually("planning begins", async || shared.cpu_work.slots_taken() == 1).await;
    server.drain();
    eventually("the drain begins", async || shared.is_draining()).await;
    assert_eq!(shared.work_left().as_deref(), Some("1 call in progress"));
    assert!(call.await.unwrap().unwrap() > COLUMNS, "the explanation names the columns");
    server.join().await.unwrap();
    assert_eq!(shared.cpu_work.interrupted(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn planning_stops_with_the_server() {
    let mut server = server(MANY, &["--drain-seconds=3600"]).await;
    let call = explaining(&server).await;
    eventually("planning begins", async || server.shared.cpu_work.slots_taken() == 1).await;
    server.drain();
    server.end();
    server.join().await.unwrap();
    refused(call.await.unwrap(), Code::Unavailable, "");
    expect_no_work(&server, 1).await;
}
