//! Clients that disconnect, and servers that shut down.

use std::sync::Arc;
use std::time::Duration;

use arrow_flight::encode::FlightDataEncoderBuilder;
use arrow_flight::{FlightData, FlightInfo};
use dovetail::scheduler::{Job, JobId, JobState};
use futures::{StreamExt, TryStreamExt};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Endpoint;
use tonic::{Code, Request};

use crate::harness::*;

/// Opens an upload whose messages are sent one by one.
async fn open_upload(
    client: &mut Client,
    name: &str,
) -> (Vec<FlightData>, mpsc::Sender<FlightData>, tonic::Streaming<arrow_flight::PutResult>) {
    open_upload_with(client, name, "").await
}

async fn open_upload_with(
    client: &mut Client,
    name: &str,
    options: &str,
) -> (Vec<FlightData>, mpsc::Sender<FlightData>, tonic::Streaming<arrow_flight::PutResult>) {
    let messages = FlightDataEncoderBuilder::new()
        .with_flight_descriptor(Some(path(name)))
        .with_metadata(options.to_owned().into())
        .build(futures::stream::iter(keyed(10_000, 1000)).map(Ok));
    let mut messages: Vec<_> = messages.try_collect().await.unwrap();
    let (sender, receiver) = mpsc::channel(1);
    sender.send(messages.remove(0)).await.unwrap();
    let acks = client.do_put(ReceiverStream::new(receiver)).await.unwrap().into_inner();
    (messages, sender, acks)
}

/// Reads the rest of a call. Returns its outcome.
async fn to_the_end(mut acks: tonic::Streaming<arrow_flight::PutResult>) -> Result<(), tonic::Status> {
    while acks.message().await?.is_some() {}
    Ok(())
}

/// Runs a client on a separate runtime and ends the runtime midway. Its sockets close like those of
/// a killed process.
fn in_a_client_that_dies<F: Future<Output = ()>>(client: impl FnOnce() -> F + Send + 'static) {
    let thread = std::thread::spawn(|| {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        runtime.block_on(client());
        runtime.shutdown_background();
    });
    thread.join().expect("the client gets to where it dies");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_upload_whose_client_dies_leaves_nothing() {
    let server = TestServer::start(&[]).await;
    let (address, shared) = (server.address.clone(), server.shared.clone());
    in_a_client_that_dies(move || async move {
        let mut client = connect(Endpoint::from_shared(address).unwrap()).await;
        let (messages, sender, mut acks) = open_upload(&mut client, "t").await;
        for message in messages.into_iter().take(5) {
            sender.send(message).await.unwrap();
        }
        assert!(acks.message().await.unwrap().is_some());
        assert!(shared.catalog.arena().budget().used_bytes() > 0);
    });
    server.expect_used_bytes(0).await;
    let mut client = server.client().await;
    refused(client.get_flight_info(path("t")).await, Code::NotFound, "\"t\"");
    put(&mut client, "t", keyed(10, 10)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_upload_of_several_streams_is_forgotten_in_whole_after_its_client_dies() {
    let server = TestServer::start(&["--upload-idle-seconds=5"]).await;
    let (address, shared) = (server.address.clone(), server.shared.clone());
    in_a_client_that_dies(move || async move {
        let mut client = connect(Endpoint::from_shared(address).unwrap()).await;
        put_with(&mut client, "t", keyed(1000, 100), r#"{"upload": "id", "part": 0}"#).await.unwrap();
        let (messages, sender, mut acks) = open_upload_with(&mut client, "t", r#"{"upload": "id", "part": 1}"#).await;
        for message in messages.into_iter().take(5) {
            sender.send(message).await.unwrap();
        }
        assert!(acks.message().await.unwrap().is_some());
        assert!(shared.catalog.arena().budget().used_bytes() > 0);
    });
    // The rows of the stream that ended normally are freed, too.
    server.expect_used_bytes(0).await;
    let mut client = server.client().await;
    let committed = act(&mut client, "commit_upload", r#"{"upload": "id"}"#).await;
    refused(committed, Code::NotFound, "\"id\" was dropped with its rows, because no rows arrived for it within 5 s");
    let again = put_with(&mut client, "t", keyed(10, 10), r#"{"upload": "id", "part": 1}"#).await;
    refused(again, Code::AlreadyExists, "start another under a new ID");
    put(&mut client, "t", keyed(10, 10)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stalled_upload_is_given_up_after_a_while() {
    let server = TestServer::start(&["--upload-idle-seconds=2"]).await;
    let mut client = server.client().await;
    for (table, options) in [("s", "{}"), ("t", r#"{"upload": "id", "part": 1}"#)] {
        let (messages, sender, mut acks) = open_upload_with(&mut client, table, options).await;
        for message in messages.into_iter().take(5) {
            sender.send(message).await.unwrap();
        }
        // The call stays open, and its connection stays alive.
        let ended = loop {
            match acks.message().await {
                Ok(ack) => assert!(ack.is_some(), "the upload ended well"),
                Err(status) => break status,
            }
        };
        refused::<()>(Err(ended), Code::DeadlineExceeded, "no rows arrived within 2 s");
        server.expect_used_bytes(0).await;
        drop(sender);
    }
    put(&mut client, "s", keyed(10, 10)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn messages_without_rows_do_not_keep_an_upload_open() {
    let server = TestServer::start(&["--upload-idle-seconds=2"]).await;
    let mut client = server.client().await;
    let empty = FlightDataEncoderBuilder::new().build(futures::stream::iter(keyed(0, 1)).map(Ok));
    let empty: Vec<FlightData> = empty.try_collect().await.unwrap();
    let (messages, sender, acks) = open_upload(&mut client, "t").await;
    let feed = tokio::spawn(async move {
        sender.send(messages[0].clone()).await.unwrap();
        // The schema once more, metadata alone, and a batch without rows.
        let kinds = [empty[0].clone(), FlightData::default(), empty.last().unwrap().clone()];
        for message in kinds.iter().cycle() {
            if sender.send(message.clone()).await.is_err() {
                break;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    });
    refused(to_the_end(acks).await, Code::DeadlineExceeded, "no rows arrived within 2 s");
    server.expect_used_bytes(0).await;
    feed.await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_may_write_everything_before_it_reads_an_acknowledgement() {
    let server = TestServer::start(&[]).await;
    let mut client = server.client().await;
    // An acknowledgement for each of the 10,000 batches would exceed the flow-control window.
    let acks = put(&mut client, "t", keyed(200_000, 20)).await.unwrap();
    let last: serde_json::Value = serde_json::from_slice(&acks.last().unwrap().app_metadata).unwrap();
    assert_eq!(last["rows"], 200_000);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_ends_at_its_deadline() {
    let server = TestServer::start(&[]).await;
    let mut client = server.client().await;
    let messages = FlightDataEncoderBuilder::new()
        .with_flight_descriptor(Some(path("slow")))
        .build(futures::stream::iter(keyed(10_000, 1000)).map(Ok));
    let messages: Vec<_> = messages.try_collect().await.unwrap();
    let mut request = Request::new(futures::stream::iter(messages).chain(futures::stream::pending()));
    request.metadata_mut().insert("grpc-timeout", "3S".parse().unwrap());
    // On a busy machine, the deadline may pass before the first answer, so the call itself may
    // fail.
    let outcome = match server.client_without_deadlines().do_put(request).await {
        Ok(answer) => to_the_end(answer.into_inner()).await,
        Err(status) => Err(status),
    };
    refused(outcome, Code::DeadlineExceeded, "deadline");
    server.expect_used_bytes(0).await;
    refused(client.get_flight_info(path("slow")).await, Code::NotFound, "\"slow\"");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_fetch_ends_at_its_deadline_and_cancels_the_join() {
    let server = TestServer::start(&["--devices=host:1", "--endpoints=1"]).await;
    let mut client = server.client().await;
    put(&mut client, "t", vec![few_keys(100_000)]).await.unwrap();
    let used = server.used_bytes().await;
    let join = r#"{"join": {"left": "t", "right": "t", "on": [{"left": "k", "right": "k"}], "retain_seconds": 0}}"#;
    let info = client.get_flight_info(command(join)).await.unwrap().into_inner();
    let mut request = Request::new(info.endpoint[0].ticket.clone().unwrap());
    request.metadata_mut().insert("grpc-timeout", "3S".parse().unwrap());
    // 3 billion rows cannot be read in 3 seconds.
    let outcome = match server.client_without_deadlines().do_get(request).await {
        Ok(answer) => answer.into_inner().try_for_each(|_| std::future::ready(Ok(()))).await,
        Err(status) => Err(status),
    };
    refused(outcome, Code::DeadlineExceeded, "deadline");
    let said: serde_json::Value = serde_json::from_slice(&info.app_metadata).unwrap();
    let job = server.shared.scheduler.job(JobId(said["job"].as_u64().unwrap())).unwrap();
    eventually("the job ends with its only reader", async || job.status().state == JobState::Cancelled).await;
    server.expect_used_bytes(used).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_fetch_whose_client_has_stalled_ends_at_its_deadline() {
    let server = TestServer::start(&["--devices=host:1", "--endpoints=1"]).await;
    let mut client = server.client().await;
    put(&mut client, "t", vec![few_keys(100_000)]).await.unwrap();
    let used = server.used_bytes().await;
    let (job, info) = submit(&server, &mut client, r#""retain_seconds": 0"#).await;
    let mut request = Request::new(info.endpoint[0].ticket.clone().unwrap());
    request.metadata_mut().insert("grpc-timeout", "2S".parse().unwrap());
    // On a busy machine, the deadline may pass before the answer.
    let stalled = server.client_without_deadlines().do_get(request).await;
    eventually("the job ends with its only reader, which reads nothing", async || {
        job.status().state == JobState::Cancelled
    })
    .await;
    // Only a message or two are still on their way to the client.
    eventually("the result is let go of", async || server.used_bytes().await < used + (32 << 20)).await;
    drop(stalled);
    server.expect_used_bytes(used).await;
}

/// Submits a join of table `t` with itself, with the given options.
async fn submit(server: &TestServer, client: &mut Client, options: &str) -> (Arc<Job>, FlightInfo) {
    let comma = if options.is_empty() { "" } else { ", " };
    let join =
        format!(r#"{{"join": {{"left": "t", "right": "t", "on": [{{"left": "k", "right": "k"}}]{comma}{options}}}}}"#);
    let info = client.get_flight_info(command(&join)).await.unwrap().into_inner();
    let said: serde_json::Value = serde_json::from_slice(&info.app_metadata).unwrap();
    (server.shared.scheduler.job(JobId(said["job"].as_u64().unwrap())).unwrap(), info)
}

/// Starts a server whose only device moves 4 MB per second and is held by a join. Later jobs wait
/// until that join is cancelled. It gives way only after most of a minute, when it has filled the
/// memory.
async fn with_a_held_device() -> (TestServer, Client, Arc<Job>) {
    let folder = tempfile::tempdir().unwrap();
    let topology = slow_devices(folder.path(), 1, 4_000_000);
    let server = TestServer::start(&[&topology, "--endpoints=2"]).await;
    let mut client = server.client().await;
    put(&mut client, "t", vec![few_keys(100_000)]).await.unwrap();
    let (holder, _) = submit(&server, &mut client, r#""retain_seconds": 0"#).await;
    eventually("the device is held", async || matches!(holder.status().state, JobState::Running)).await;
    (server, client, holder)
}

/// Begins to read an endpoint. The stream waits for the job.
async fn begin_to_read(client: &mut Client, info: &FlightInfo, endpoint: usize) -> tonic::Streaming<FlightData> {
    let ticket = info.endpoint[endpoint].ticket.clone().unwrap();
    let mut stream = client.do_get(ticket).await.unwrap().into_inner();
    assert!(stream.message().await.unwrap().is_some(), "the schema comes at once");
    stream
}

const SEMI: &str = r#""how": "left_semi""#;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_job_is_cancelled_with_the_last_stream_that_waits_for_it() {
    let (server, mut client, _holder) = with_a_held_device().await;
    let (job, info) = submit(&server, &mut client, SEMI).await;
    let one = begin_to_read(&mut client, &info, 0).await;
    let other = begin_to_read(&mut client, &info, 1).await;
    let (alone, alone_info) = submit(&server, &mut client, SEMI).await;
    drop(one);
    drop(begin_to_read(&mut client, &alone_info, 0).await);
    eventually("the job without other readers is cancelled", async || alone.status().state == JobState::Cancelled)
        .await;
    assert_eq!(job.status().state, JobState::Queued, "it has another reader");
    drop(other);
    eventually("the other job goes with its last reader", async || job.status().state == JobState::Cancelled).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_job_that_may_still_be_read_survives_a_reset_stream() {
    let (server, mut client, holder) = with_a_held_device().await;
    let (_, unread) = submit(&server, &mut client, SEMI).await;
    let (polled_job, polled) = submit(&server, &mut client, SEMI).await;
    let into = format!(r#"{SEMI}, "into": "kept""#);
    let (into_job, into) = submit(&server, &mut client, &into).await;
    act(&mut client, "job", &format!(r#"{{"job": {}}}"#, polled_job.id)).await.unwrap();
    drop(begin_to_read(&mut client, &polled, 0).await);
    drop(begin_to_read(&mut client, &into, 0).await);
    // Once this job is cancelled, the server has also seen the earlier resets of streams.
    let (last, last_info) = submit(&server, &mut client, SEMI).await;
    drop(begin_to_read(&mut client, &last_info, 0).await);
    eventually("a job that nobody wants is cancelled", async || last.status().state == JobState::Cancelled).await;
    server.shared.scheduler.cancel(holder.id).unwrap();
    for info in [&unread, &polled] {
        assert_eq!(rows(&read_all(&mut client, info).await.unwrap()), 100_000);
    }
    eventually("the table appears", async || into_job.status().state == JobState::Complete).await;
    assert_eq!(server.shared.catalog.table("kept").unwrap().rows, 100_000);
    assert_eq!(polled_job.status().state, JobState::Complete);
    // A reader of a complete result may stop and read again.
    drop(begin_to_read(&mut client, &unread, 0).await);
    assert_eq!(rows(&read_all(&mut client, &unread).await.unwrap()), 100_000);
}

/// Regression test: a join without a reader held its device for half a minute while others waited.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_join_without_a_reader_fails_if_others_wait_for_its_device() {
    let server = TestServer::start(&["--devices=host:1", "--host-memory=64MiB"]).await;
    let mut client = server.client().await;
    put(&mut client, "t", vec![few_keys(100_000)]).await.unwrap();
    // 3 billion rows fill the memory for results, and the join then waits for a reader.
    let (unread, _) = submit(&server, &mut client, r#""retain_seconds": 0"#).await;
    eventually("the device is held", async || unread.result.held_bytes() > (16 << 20)).await;
    let (_, info) = submit(&server, &mut client, SEMI).await;
    assert_eq!(rows(&read_all(&mut client, &info).await.unwrap()), 100_000);
    eventually("the unread join has ended", async || unread.status().state.is_final()).await;
    let JobState::Failed(error) = unread.status().state else { panic!("{:?}", unread.status().state) };
    let expected = ["took nothing for", "other joins waited for its device", "retain_seconds"];
    assert!(expected.iter().all(|words| error.message().contains(words)), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_drain_lets_calls_finish_and_accepts_no_new_ones() {
    let mut server = TestServer::start(&["--drain-seconds=60"]).await;
    let mut client = server.client().await;
    let (messages, sender, mut acks) = open_upload(&mut client, "t").await;
    let shared = server.shared.clone();
    eventually("the upload begins", async || shared.uploads.under_way() == 1).await;
    server.drain();
    eventually("the drain begins", async || shared.is_draining()).await;
    assert_eq!(server.http_get("/readyz").await.0, 503);
    assert_eq!(server.http_get("/healthz").await.0, 200);
    assert!(client.get_flight_info(path("t")).await.is_err());
    // The server completes the upload under way.
    for message in messages {
        sender.send(message).await.unwrap();
    }
    drop(sender);
    while acks.message().await.unwrap().is_some() {}
    assert_eq!(shared.catalog.table("t").unwrap().rows, 10_000);
    drop((acks, client));
    server.join().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_second_signal_ends_the_calls_that_a_drain_waits_for() {
    let mut server = TestServer::start(&["--drain-seconds=3600"]).await;
    let mut client = server.client().await;
    let (_messages, _sender, acks) = open_upload(&mut client, "t").await;
    let shared = server.shared.clone();
    eventually("the upload begins", async || shared.uploads.under_way() == 1).await;
    server.drain();
    server.end();
    server.join().await.unwrap();
    refused(to_the_end(acks).await, Code::Unavailable, "");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_drain_limit_ends_calls_that_do_not_end() {
    let mut server = TestServer::start(&["--drain-seconds=0"]).await;
    let mut client = server.client().await;
    let (_messages, _sender, acks) = open_upload(&mut client, "t").await;
    let shared = server.shared.clone();
    eventually("the upload begins", async || shared.uploads.under_way() == 1).await;
    server.drain();
    server.join().await.unwrap();
    drop(acks);
}

async fn wait_for_drain(server: &TestServer) {
    while !server.shared.is_draining() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_drain_waits_for_results_to_be_fetched_and_for_uploads_to_be_committed() {
    let mut server = TestServer::start(&["--drain-seconds=3600"]).await;
    let mut client = server.client().await;
    put(&mut client, "t", keyed(1000, 100)).await.unwrap();
    put_with(&mut client, "u", keyed(70, 10), r#"{"upload": "id"}"#).await.unwrap();
    let join = command(r#"{"join": {"left": "t", "right": "t", "on": [{"left": "k", "right": "k"}]}}"#);
    let info = client.get_flight_info(join.clone()).await.unwrap().into_inner();
    server.drain();
    wait_for_drain(&server).await;
    // These calls use a new connection, because clients open one for each endpoint.
    let mut client = server.client().await;
    refused(client.get_flight_info(join.clone()).await, Code::Unavailable, "shutting down");
    refused(client.poll_flight_info(join).await, Code::Unavailable, "shutting down");
    refused(put(&mut client, "v", keyed(10, 10)).await, Code::Unavailable, "shutting down");
    refused(act(&mut client, "drop_table", r#"{"name": "t"}"#).await, Code::Unavailable, "shutting down");
    let polled = client.poll_flight_info(info.flight_descriptor.clone().unwrap()).await;
    refused(polled, Code::Unavailable, "shutting down");
    let request = arrow_flight::RenewFlightEndpointRequest::new(info.endpoint[0].clone());
    let renewal = arrow_flight::Action::new("RenewFlightEndpoint", prost::Message::encode_to_vec(&request));
    client.do_action(renewal).await.unwrap();
    assert_eq!(act(&mut client, "list_jobs", "").await.unwrap().len(), 1);
    assert_eq!(rows(&read_all(&mut client, &info).await.unwrap()), 1000);
    let shared = server.shared.clone();
    assert!(shared.work_left().is_some_and(|left| left == "1 upload"), "{:?}", shared.work_left());
    // The upload under way gets its missing stream. The server refuses to begin another upload.
    let begun = put_with(&mut client, "w", keyed(10, 10), r#"{"upload": "other"}"#).await;
    refused(begun, Code::Unavailable, "shutting down");
    put_with(&mut client, "u", keyed(30, 10), r#"{"upload": "id"}"#).await.unwrap();
    act(&mut client, "commit_upload", r#"{"upload": "id"}"#).await.unwrap();
    assert_eq!(shared.catalog.table("u").unwrap().rows, 100);
    server.join().await.unwrap();
}

/// Regression test: a complete result delayed shutdown to the drain's limit, although no client was
/// connected.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_drain_does_not_wait_for_results_without_a_connected_reader() {
    let mut server = TestServer::start(&["--drain-seconds=3600", "--endpoints=4"]).await;
    let mut client = server.client().await;
    put(&mut client, "t", vec![few_keys(1000)]).await.unwrap();
    let (unread, _) = submit(&server, &mut client, SEMI).await;
    let (broken_off, info) = submit(&server, &mut client, SEMI).await;
    for job in [&unread, &broken_off] {
        eventually("the job is complete", async || job.status().state == JobState::Complete).await;
    }
    drop(begin_to_read(&mut client, &info, 0).await);
    drop(client);
    let shared = server.shared.clone();
    assert_eq!(shared.work_left().as_deref(), Some("2 results that a client may fetch"));
    server.drain();
    server.join().await.unwrap();
    assert_eq!((shared.work_left(), shared.unclaimed_results()), (None, 2));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_drain_lets_a_job_be_polled_to_its_end() {
    let mut server = TestServer::start(&["--drain-seconds=3600"]).await;
    let mut client = server.client().await;
    put(&mut client, "t", keyed(1000, 100)).await.unwrap();
    let join = command(r#"{"join": {"left": "t", "right": "t", "on": [{"left": "k", "right": "k"}], "into": "kept"}}"#);
    let mut poll = client.poll_flight_info(join).await.unwrap().into_inner();
    server.drain();
    wait_for_drain(&server).await;
    while let Some(next) = poll.flight_descriptor {
        poll = client.poll_flight_info(next).await.unwrap().into_inner();
    }
    server.join().await.unwrap();
    assert_eq!(server.shared.catalog.table("kept").unwrap().rows, 1000);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_health_watch_does_not_delay_a_drain() {
    let mut server = TestServer::start(&["--drain-seconds=3600"]).await;
    let mut health = tonic_health::pb::health_client::HealthClient::new(server.channel().await);
    let request = tonic_health::pb::HealthCheckRequest { service: String::new() };
    let mut watched = health.watch(request).await.unwrap().into_inner();
    assert_eq!(watched.message().await.unwrap().unwrap().status, 1);
    server.drain();
    server.join().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rates_are_measured_at_the_first_start_and_saved_for_the_next() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("rates.json");
    let flag = format!("--rates-file={}", file.display());
    for (flags, origin) in
        [(vec![&*flag], "measured"), (vec![&flag], "kept"), (vec![&flag, "--recalibrate"], "measured")]
    {
        let server = TestServer::start(&flags).await;
        let mut client = server.client().await;
        for action in ["server_info", "topology"] {
            let told: serde_json::Value =
                serde_json::from_str(&act(&mut client, action, "").await.unwrap()[0]).unwrap();
            for device in told["devices"].as_array().unwrap() {
                assert_eq!(device["rates"]["origin"], origin, "{action} with {flags:?}");
                assert!(device["rates"]["values"]["copy_in"].as_f64().unwrap() > 0.0, "{device}");
                assert_eq!(device["rates"]["file"].is_string(), origin == "kept", "{device}");
            }
        }
        assert!(file.exists());
    }
}
