//! Memory of calls: requests that arrive in part, messages that grow, answers that are not read.

use std::convert::Infallible;
use std::time::Duration;

use bytes::Bytes;
use futures::{StreamExt, stream};
use http_body::Frame;
use http_body_util::{BodyExt, StreamBody};
use hyper_util::client::legacy::Client as HttpClient;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use tokio::sync::oneshot;
use tokio_util::task::AbortOnDropHandle;
use tonic::body::Body;
use tonic::{Code, Status};

use crate::harness::{Client, TestServer, act, command, eventually, keyed, put};

const MIB: usize = 1 << 20;

/// Memory of calls in these tests, and the flag for it.
const CALL_MEMORY: u64 = 16 << 20;
const FLAG: &str = "--call-memory=16MiB";

/// Call that the test sends byte by byte, on a connection of its own.
type RawCall = AbortOnDropHandle<Option<Status>>;

/// Sends `bytes`, and then nothing more, while the call lives. Ends with the status.
fn stopped(server: &TestServer, method: &str, bytes: Vec<u8>, encoding: &str, window: u32) -> RawCall {
    let chunks: Vec<_> = bytes.chunks(64 << 10).map(Bytes::copy_from_slice).collect();
    // Dropping the call ends the request. Otherwise the client would keep its stream open.
    let (open, ended) = oneshot::channel::<()>();
    let frames = stream::iter(chunks).map(|chunk| Ok::<_, Infallible>(Frame::data(chunk)));
    let frames = frames.chain(stream::pending()).take_until(ended);
    let request = http::Request::post(format!("{}/arrow.flight.protocol.FlightService/{method}", server.address))
        .header("content-type", "application/grpc")
        .header("te", "trailers")
        .header("grpc-encoding", encoding)
        .body(Body::new(StreamBody::new(frames)))
        .unwrap();
    AbortOnDropHandle::new(tokio::spawn(async move {
        let _open = open;
        let mut builder = HttpClient::builder(TokioExecutor::new());
        builder.http2_only(true).http2_initial_stream_window_size(window);
        let client: HttpClient<HttpConnector, Body> = builder.build_http();
        let response = client.request(request).await.ok()?;
        if let Some(status) = Status::from_header_map(response.headers()) {
            return Some(status);
        }
        let collected = response.into_body().collect().await.ok()?;
        collected.trailers().and_then(Status::from_header_map)
    }))
}

const WINDOW: u32 = 64 << 10;

fn message(flag: u8, declared: usize, bytes: &[u8]) -> Vec<u8> {
    [&[flag], &u32::try_from(declared).unwrap().to_be_bytes()[..], bytes].concat()
}

/// Protobuf field of bytes.
fn field(tag: u32, declared: usize) -> Vec<u8> {
    let mut head = Vec::new();
    prost::encoding::encode_key(tag, prost::encoding::WireType::LengthDelimited, &mut head);
    prost::encoding::encode_varint(declared as u64, &mut head);
    head
}

/// Sends `bytes` in each of several calls, which offer several times the memory of calls. Checks
/// that the memory is bounded, that the server refuses what does not fit, that it serves others,
/// and that the memory goes back.
async fn check_bounded(method: &str, bytes: Vec<u8>, calls: usize) {
    assert!((calls * bytes.len()) as u64 > 2 * CALL_MEMORY);
    let server = TestServer::start(&[FLAG]).await;
    let memory = server.shared.call_memory.whole();
    let calls: Vec<_> = (0..calls).map(|_| stopped(&server, method, bytes.clone(), "identity", WINDOW)).collect();
    eventually("the memory is taken, and calls are refused", async || {
        memory.used_bytes() > CALL_MEMORY / 4
            && calls.iter().filter(|call| call.is_finished()).count() > calls.len() / 2
    })
    .await;
    assert!(memory.used_bytes_max() <= CALL_MEMORY);
    act(&mut server.client().await, "server_info", "").await.unwrap();
    for call in calls {
        if call.is_finished() {
            let status = call.await.unwrap().expect("a refusal has a status");
            assert_eq!(status.code(), Code::ResourceExhausted, "{status:?}");
            assert!(status.message().contains("--call-memory"), "{status:?}");
        }
    }
    eventually("all memory of calls is free", async || memory.used_bytes() == 0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_list_waits_for_room() {
    const JOBS: usize = 100;
    let server = TestServer::start(&["--call-memory=1MiB"]).await;
    let mut client = server.client().await;
    put(&mut client, "t", keyed(10, 10)).await.unwrap();
    let join = command(r#"{"join": {"left": "t", "right": "t", "on": [{"left": "k", "right": "k"}]}}"#);
    for _ in 0..JOBS {
        client.get_flight_info(join.clone()).await.unwrap();
    }
    let memory = server.shared.call_memory.whole();
    eventually("the memory of the calls so far is free", async || memory.used_bytes() == 0).await;
    // Enough for a call, and not for a part of the list.
    let taken = memory.try_reserve(memory.free_bytes() - (30 << 10)).unwrap();
    let used = memory.used_bytes();
    let mut lister = client.clone();
    let listed = tokio::spawn(async move { act(&mut lister, "list_jobs", "").await });
    eventually("the call is under way", async || memory.used_bytes() > used).await;
    // A list that does not wait is refused within this time.
    tokio::time::sleep(Duration::from_millis(200)).await;
    drop(taken);
    let listed = listed.await.unwrap().unwrap();
    assert!(listed.iter().map(String::len).sum::<usize>() > 60 << 10);
    assert_eq!(listed.len(), JOBS);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn actions_that_stop_hold_bounded_memory() {
    check_bounded("DoAction", message(0, 15 * MIB, &vec![0; 3 * MIB / 2]), 30).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn uploads_with_a_long_field_before_the_descriptor_hold_bounded_memory() {
    let unknown = [field(7, 10 * MIB), vec![0; 3 * MIB / 2]].concat();
    check_bounded("DoPut", message(0, 11 * MIB, &unknown), 30).await;
    let header = [field(2, 10 * MIB), vec![0; 3 * MIB / 2]].concat();
    check_bounded("DoPut", message(0, 11 * MIB, &header), 30).await;
    check_bounded("DoExchange", message(0, 11 * MIB, &header), 30).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn uploads_to_a_command_hold_bounded_memory() {
    let descriptor = [field(1, 5), vec![0x08, 2, 0x12, 1, b'x']].concat();
    let header = [field(2, 10 * MIB), vec![0; 3 * MIB / 2]].concat();
    check_bounded("DoPut", message(0, 11 * MIB, &[descriptor, header].concat()), 30).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_declared_length_takes_no_memory() {
    let server = TestServer::start(&[FLAG]).await;
    let memory = server.shared.call_memory.whole();
    let action = message(0, 15 * MIB, &[]);
    let path = [field(1, 5), vec![0x08, 1, 0x1a, 1, b't']].concat();
    let body_first = message(0, 200 * MIB, &[path, field(1000, 199 * MIB)].concat());
    let calls: Vec<_> = (0..40)
        .map(|at| match at % 2 {
            0 => stopped(&server, "DoAction", action.clone(), "identity", WINDOW),
            _ => stopped(&server, "DoPut", body_first.clone(), "identity", WINDOW),
        })
        .collect();
    eventually("all calls are under way", async || memory.used_bytes() >= 40 << 14).await;
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert!(memory.used_bytes() < 2 << 20 && calls.iter().all(|call| !call.is_finished()));
    assert_eq!(server.shared.catalog.arena().budget().used_bytes(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn messages_that_grow_are_refused_at_the_limit() {
    let server = TestServer::start(&[FLAG]).await;
    let bomb = zstd::bulk::compress(&vec![0; 200 * MIB], 3).unwrap();
    assert!(bomb.len() < 64 << 10);
    for method in ["DoAction", "GetFlightInfo", "DoPut", "DoExchange", "DoGet", "Handshake"] {
        let call = stopped(&server, method, message(1, bomb.len(), &bomb), "zstd", WINDOW);
        let status = call.await.unwrap().expect("a refusal has a status");
        assert_eq!(status.code(), Code::ResourceExhausted, "{method}: {status:?}");
    }
    let memory = server.shared.call_memory.whole();
    assert!(memory.used_bytes_max() <= CALL_MEMORY);
    eventually("all memory of calls is free", async || memory.used_bytes() == 0).await;
    let mut client: Client = server.client().await;
    put(&mut client, "t", keyed(10, 10)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_that_ends_inside_a_message_is_invalid() {
    let server = TestServer::start(&[]).await;
    let uri = format!("{}/arrow.flight.protocol.FlightService/DoAction", server.address);
    let client: HttpClient<HttpConnector, Body> =
        HttpClient::builder(TokioExecutor::new()).http2_only(true).build_http();
    let body = http_body_util::Full::new(Bytes::from(message(0, 100, &[0; 50])));
    let request = http::Request::post(uri).header("content-type", "application/grpc").body(Body::new(body)).unwrap();
    let response = client.request(request).await.unwrap();
    let status = Status::from_header_map(response.headers()).unwrap();
    assert_eq!(status.code(), Code::InvalidArgument, "{status:?}");
    assert!(status.message().contains("ended inside a message"), "{status:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_of_rows_that_stops_inside_a_message_ends() {
    let server = TestServer::start(&["--upload-idle-seconds=1"]).await;
    for method in ["DoPut", "DoExchange"] {
        let status = stopped(&server, method, message(0, 100, &[0x0a]), "identity", WINDOW).await.unwrap();
        let status = status.expect("a refusal has a status");
        assert_eq!(status.code(), Code::DeadlineExceeded, "{method}: {status:?}");
        assert!(status.message().contains("no rows arrived within 1 s"), "{method}: {status:?}");
    }
}
