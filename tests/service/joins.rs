//! Joins by command: submitted, polled, read, cancelled, retained.

use std::sync::Arc;

use arrow::array::{ArrayRef, AsArray, ListArray, RecordBatch};
use arrow::compute::concat_batches;
use arrow::datatypes::{DataType, Int32Type, Int64Type};
use arrow_flight::decode::FlightRecordBatchStream;
use arrow_flight::error::FlightError;
use arrow_flight::{Action, CancelFlightInfoRequest, CancelFlightInfoResult, Criteria, FlightInfo};
use futures::{StreamExt, TryStreamExt};
use prost::Message;
use serde_json::Value;
use tonic::Code;

use crate::harness::*;

fn join(more: &str) -> arrow_flight::FlightDescriptor {
    command(&format!(
        r#"{{"join": {{"left": "left", "right": "right", "on": [{{"left": "k", "right": "k"}}]{more}}}}}"#
    ))
}

/// Starts a server with keys 0..1000 on the left and 0..400 on the right.
async fn server(flags: &[&str]) -> (TestServer, Client) {
    let server = TestServer::start(flags).await;
    let mut client = server.client().await;
    put(&mut client, "left", keyed(1000, 300)).await.unwrap();
    put(&mut client, "right", keyed(400, 300)).await.unwrap();
    (server, client)
}

/// Uploads two tables. Their join has 3000 × 3000 rows for each of three keys.
async fn put_many_to_many(client: &mut Client) {
    for name in ["left", "right"] {
        put(client, name, vec![few_keys(9000)]).await.unwrap();
    }
}

fn said(info: &FlightInfo) -> Value {
    serde_json::from_slice(&info.app_metadata).unwrap()
}

async fn job(client: &mut Client, id: &Value) -> Value {
    serde_json::from_str(&act(client, "job", &format!(r#"{{"job": {id}}}"#)).await.unwrap()[0]).unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_join_is_answered_at_once_and_read_from_its_endpoints() {
    let (_server, mut client) = server(&["--endpoints=3"]).await;
    for (how, expected) in [("inner", 400), ("left", 1000), ("full", 1000), ("left_anti", 600), ("right_semi", 400)] {
        let info = client.get_flight_info(join(&format!(r#", "how": "{how}""#))).await.unwrap().into_inner();
        assert_eq!(info.endpoint.len(), 3);
        assert!(info.endpoint.iter().all(|endpoint| endpoint.expiration_time.is_some()));
        let told = said(&info);
        assert_eq!((told["how"].as_str(), told["left"].as_str()), (Some(how), Some("left")));
        assert!(told["predicted_seconds"].as_f64().unwrap() > 0.0 && told["strategy"].is_string());
        let batches = read_all(&mut client, &info).await.unwrap();
        assert_eq!(rows(&batches), expected, "{how}");
        // The server retains the result, so clients can read it again and in any order.
        assert_eq!(rows(&read_all(&mut client, &info).await.unwrap()), expected, "{how} again");
        let done = job(&mut client, &told["job"]).await;
        assert_eq!((done["state"].as_str(), done["rows"].as_u64()), (Some("complete"), Some(expected as u64)));
    }
    assert_eq!(act(&mut client, "list_jobs", "").await.unwrap().len(), 5);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn schema_and_explain_run_no_job() {
    let (server, mut client) = server(&[]).await;
    let used = server.used_bytes().await;
    let schema = client.get_schema(join("")).await.unwrap().into_inner();
    let schema = arrow::datatypes::Schema::try_from(schema).unwrap();
    let names: Vec<_> = schema.fields().iter().map(|field| field.name().as_str()).collect();
    assert_eq!(names, ["k", "name", "name_right"]);
    let body = r#"{"join": {"left": "left", "right": "right", "on": [{"left": "k", "right": "k"}]}}"#;
    let plan: Value = serde_json::from_str(&act(&mut client, "explain", body).await.unwrap()[0]).unwrap();
    assert!(plan["strategy"].is_string() && plan["text"].as_str().unwrap().contains("left"), "{plan}");
    assert!(act(&mut client, "list_jobs", "").await.unwrap().is_empty());
    assert_eq!(server.used_bytes().await, used);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_join_that_does_not_fit_is_explained_and_refused_when_it_is_run() {
    let server = TestServer::start(&["--devices=host:1", "--device-memory=64KiB"]).await;
    let mut client = server.client().await;
    for name in ["left", "right"] {
        put(&mut client, name, vec![few_keys(100_000)]).await.unwrap();
    }
    let body = r#"{"join": {"left": "left", "right": "right", "on": [{"left": "k", "right": "k"}]}}"#;
    let plan: Value = serde_json::from_str(&act(&mut client, "explain", body).await.unwrap()[0]).unwrap();
    let (refusal, text) = (plan["refusal"].as_str().unwrap(), plan["text"].as_str().unwrap());
    for needed in ["of device memory, with table", "has 64.0 KiB", "--device-memory"] {
        assert!(refusal.contains(needed), "{refusal}");
    }
    assert!(plan["strategy"].is_string() && !plan["phases"].as_array().unwrap().is_empty(), "{plan}");
    assert!(text.contains(refusal), "{text}");
    assert!(plan["memory"]["minimum_bytes"].as_u64().unwrap() > 64 << 10, "{plan}");
    refused(client.get_flight_info(join("")).await, Code::ResourceExhausted, "of device memory, with table");
    // A join that fits has no refusal.
    put(&mut client, "few", keyed(10, 10)).await.unwrap();
    let body = r#"{"join": {"left": "few", "right": "few", "on": [{"left": "k", "right": "k"}]}}"#;
    let plan: Value = serde_json::from_str(&act(&mut client, "explain", body).await.unwrap()[0]).unwrap();
    assert!(plan["refusal"].is_null() && !plan["text"].as_str().unwrap().contains("refused"), "{plan}");
}

/// Returns all flights that the server lists.
async fn listed(client: &mut Client) -> Vec<FlightInfo> {
    client.list_flights(Criteria::default()).await.unwrap().into_inner().try_collect().await.unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_result_is_listed_until_it_is_cancelled() {
    let (server, mut client) = server(&[]).await;
    let used = server.used_bytes().await;
    let info = client.get_flight_info(join("")).await.unwrap().into_inner();
    read_all(&mut client, &info).await.unwrap();
    let all = listed(&mut client).await;
    assert_eq!(all.len(), 3, "two tables and a result");
    assert_eq!(rows(&read_all(&mut client, &all[2]).await.unwrap()), 400);
    let again = client.get_flight_info(all[2].flight_descriptor.clone().unwrap()).await.unwrap().into_inner();
    assert_eq!(said(&again)["job"], said(&info)["job"]);

    let action = Action::new("CancelFlightInfo", CancelFlightInfoRequest::new(info.clone()).encode_to_vec());
    let results: Vec<_> = client.do_action(action).await.unwrap().into_inner().try_collect().await.unwrap();
    assert_eq!(CancelFlightInfoResult::decode(&*results[0].body).unwrap().status, 1);
    assert!(read_all(&mut client, &info).await.is_err());
    server.expect_used_bytes(used).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_result_that_is_not_retained_is_released_when_it_was_read() {
    let (server, mut client) = server(&[]).await;
    let used = server.used_bytes().await;
    let info = client.get_flight_info(join(r#", "retain_seconds": 0"#)).await.unwrap().into_inner();
    assert_eq!(listed(&mut client).await.len(), 3, "two tables and a result");
    assert_eq!(rows(&read_all(&mut client, &info).await.unwrap()), 400);
    // Regression test: the result stayed listed while its reader might ask for another endpoint.
    assert_eq!(listed(&mut client).await.len(), 2);
    assert!(read_all(&mut client, &info).await.is_err());
    server.expect_used_bytes(used).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_job_whose_result_is_not_retained_ends_with_its_last_reader() {
    let server = TestServer::start(&["--devices=host:1"]).await;
    let mut client = server.client().await;
    put_many_to_many(&mut client).await;
    let used = server.used_bytes().await;
    let info = client.get_flight_info(join(r#", "retain_seconds": 0"#)).await.unwrap().into_inner();
    let ticket = info.endpoint[0].ticket.clone().unwrap();
    let mut stream = client.do_get(ticket).await.unwrap().into_inner();
    assert!(stream.message().await.unwrap().is_some());
    drop(stream);
    let id = said(&info)["job"].clone();
    eventually("the job ends", async || job(&mut client, &id).await["state"] != "running").await;
    server.expect_used_bytes(used).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_result_is_stored_as_a_table() {
    let (_server, mut client) = server(&[]).await;
    let info = client.get_flight_info(join(r#", "into": "both""#)).await.unwrap().into_inner();
    read_all(&mut client, &info).await.unwrap();
    let id = said(&info)["job"].clone();
    eventually("the job is complete", async || job(&mut client, &id).await["state"] == "complete").await;
    assert_eq!(rows(&get(&mut client, path("both")).await.unwrap()), 400);
    refused(client.get_flight_info(join(r#", "into": "both""#)).await, Code::AlreadyExists, "both");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_result_too_large_for_memory_fails_and_frees_its_memory() {
    let server = TestServer::start(&["--host-memory=32MiB", "--devices=host:1", "--device-memory=32MiB"]).await;
    let mut client = server.client().await;
    put_many_to_many(&mut client).await;
    let used = server.used_bytes().await;
    refused(get(&mut client, join("")).await, Code::ResourceExhausted, "");
    server.expect_used_bytes(used).await;
    assert_eq!(rows(&get(&mut client, path("left")).await.unwrap()), 9000);
}

/// Empty batches keep the connection alive, because clients and proxies close idle connections.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reader_of_a_waiting_job_gets_empty_batches() {
    let folder = tempfile::tempdir().unwrap();
    let topology = slow_devices(folder.path(), 1, 4_000_000);
    let server = TestServer::start(&[&topology, "--keep-alive-seconds=1", "--endpoints=1"]).await;
    let mut client = server.client().await;
    put(&mut client, "left", vec![few_keys(100_000)]).await.unwrap();
    put(&mut client, "right", vec![few_keys(100_000)]).await.unwrap();
    // 3 billion rows at 4 MB per second keep the only device busy until the join is cancelled.
    let busy = client.get_flight_info(join(r#", "retain_seconds": 0"#)).await.unwrap().into_inner();
    put(&mut client, "few", keyed(10, 10)).await.unwrap();
    let small = r#"{"join": {"left": "few", "right": "few", "on": [{"left": "k", "right": "k"}]}}"#;
    let waiting = client.get_flight_info(command(small)).await.unwrap().into_inner();
    let messages = client.do_get(waiting.endpoint[0].ticket.clone().unwrap()).await.unwrap().into_inner();
    let mut batches = FlightRecordBatchStream::new_from_flight_data(messages.map_err(FlightError::from));
    for _ in 0..2 {
        let batch = batches.next().await.unwrap().unwrap();
        assert_eq!((batch.num_rows(), batch.num_columns()), (0, 3));
    }
    act(&mut client, "cancel_job", &format!(r#"{{"job": {}}}"#, said(&busy)["job"])).await.unwrap();
    let rest: Vec<_> = batches.try_collect().await.unwrap();
    assert_eq!(rows(&rest), 10);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_small_batches_are_sent_together() {
    let server = TestServer::start(&[]).await;
    let mut client = server.client().await;
    put(&mut client, "small", keyed(20_000, 10)).await.unwrap();
    let info = client.get_flight_info(path("small")).await.unwrap().into_inner();
    let mut messages = 0;
    for endpoint in &info.endpoint {
        let stream = client.do_get(endpoint.ticket.clone().unwrap()).await.unwrap().into_inner();
        messages += stream.try_collect::<Vec<_>>().await.unwrap().len();
    }
    assert!(messages <= 3 * info.endpoint.len(), "{messages} messages for 2000 batches");
    assert_eq!(rows(&read_all(&mut client, &info).await.unwrap()), 20_000);
    // Batches are not merged beyond the requested `batch_rows`.
    let few =
        r#"{"join": {"left": "small", "right": "small", "on": [{"left": "k", "right": "k"}], "batch_rows": 100}}"#;
    let batches = get(&mut client, command(few)).await.unwrap();
    assert!(batches.iter().all(|batch| batch.num_rows() <= 100) && rows(&batches) == 20_000);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_count_is_one_row_and_its_plan_says_so() {
    let server = TestServer::start(&[]).await;
    let mut client = server.client().await;
    put(&mut client, "few", keyed(100, 100)).await.unwrap();
    put(&mut client, "many", keyed(5000, 1000)).await.unwrap();
    let join = |how: &str, more: &str| {
        let on = r#"[{"left": "k", "right": "k"}]"#;
        format!(r#"{{"join": {{"left": "few", "right": "many", "on": {on}, "how": "{how}", "count": true{more}}}}}"#)
    };
    for (how, expected) in [("inner", 100), ("right", 5000), ("left_anti", 0), ("right_anti", 4900)] {
        let batches = get(&mut client, command(&join(how, ""))).await.unwrap();
        assert_eq!(batches.len(), 1, "{how}");
        let schema = batches[0].schema();
        let field = (schema.field(0).name().as_str(), schema.field(0).data_type(), schema.field(0).is_nullable());
        assert_eq!((schema.fields().len(), field), (1, ("count", &DataType::Int64, false)), "{how}");
        assert_eq!(batches[0].column(0).as_primitive::<Int64Type>().values()[..], [expected], "{how}");
    }
    let refused = get(&mut client, command(&join("inner", r#", "columns": ["k"]"#))).await.unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument);
    assert!(refused.message().contains("leave one of them out"), "{}", refused.message());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn small_batches_of_lists_are_sent_together() {
    let server = TestServer::start(&["--endpoints=1"]).await;
    let mut client = server.client().await;
    let lists = |at: i32| {
        let lists = ListArray::from_iter_primitive::<Int32Type, _, _>([Some(vec![Some(at)]), None]);
        RecordBatch::try_from_iter_with_nullable([("lists", Arc::new(lists) as ArrayRef, true)]).unwrap()
    };
    put(&mut client, "lists", (0..1000).map(lists).collect()).await.unwrap();
    let batches = get(&mut client, path("lists")).await.unwrap();
    assert!(batches.len() <= 3, "{} messages for 1000 batches", batches.len());
    let read = concat_batches(&batches[0].schema(), &batches).unwrap();
    assert_eq!(read, concat_batches(&batches[0].schema(), &(0..1000).map(lists).collect::<Vec<_>>()).unwrap());
}

/// Regression test: joins whose results did not fit together ran anyway, and failed in the middle.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_join_waits_for_the_memory_of_its_result_and_reports_it() {
    let server = TestServer::start(&["--host-memory=40MiB", "--devices=host:2"]).await;
    let mut client = server.client().await;
    for name in ["left", "right"] {
        put(&mut client, name, vec![few_keys(3000)]).await.unwrap();
    }
    let used = server.used_bytes().await;
    // A result has 3 million rows of 8 bytes: one result fits, two do not.
    let first = client.get_flight_info(join("")).await.unwrap().into_inner();
    let first_job = said(&first)["job"].clone();
    eventually("the first is complete", async || job(&mut client, &first_job).await["state"] == "complete").await;
    let poll = client.poll_flight_info(join("")).await.unwrap().into_inner();
    let told = said(poll.info.as_ref().unwrap());
    assert_eq!(told["state"], "queued", "{told}");
    let waiting_for = told["waiting_for"].as_str().unwrap();
    assert!(waiting_for.contains("MiB of host memory for its result"), "{waiting_for}");
    // A join that fits does not wait behind the waiting join.
    put(&mut client, "few", keyed(10, 10)).await.unwrap();
    let small = r#"{"join": {"left": "few", "right": "few", "on": [{"left": "k", "right": "k"}]}}"#;
    assert_eq!(rows(&get(&mut client, command(small)).await.unwrap()), 10);
    assert_eq!(job(&mut client, &told["job"]).await["state"], "queued");
    act(&mut client, "cancel_job", &format!(r#"{{"job": {first_job}}}"#)).await.unwrap();
    let descriptor = poll.flight_descriptor.unwrap();
    assert_eq!(rows(&get(&mut client, descriptor).await.unwrap()), 3_000_000);
    for live in act(&mut client, "list_jobs", "").await.unwrap() {
        let id = serde_json::from_str::<Value>(&live).unwrap()["job"].clone();
        act(&mut client, "cancel_job", &format!(r#"{{"job": {id}}}"#)).await.unwrap();
    }
    act(&mut client, "drop_table", r#"{"name": "few"}"#).await.unwrap();
    server.expect_used_bytes(used).await;
}
