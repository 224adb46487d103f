//! Wrong requests: each gets its code and message, the next request is served, and no memory is
//! held.

use std::sync::Arc;

use arrow::array::{Float64Array, RecordBatch};
use arrow::datatypes::{DataType, Field, Schema};
use arrow_flight::encode::FlightDataEncoderBuilder;
use arrow_flight::{Action, Criteria, FlightData, FlightDescriptor, Ticket};
use futures::{TryStreamExt, stream};
use prost::Message;
use tonic::Code;

use crate::harness::*;

const JOIN: &str = r#"{"join": {"left": "left", "right": "right", "on": [{"left": "k", "right": "k"}]}}"#;

/// Starts a server with two tables. Also returns the bytes that they use.
async fn server() -> (TestServer, Client, u64) {
    let server = TestServer::start(&["--message-limit=1MiB"]).await;
    let mut client = server.client().await;
    put(&mut client, "left", keyed(100, 50)).await.unwrap();
    put(&mut client, "right", keyed(50, 50)).await.unwrap();
    let used = server.used_bytes().await;
    (server, client, used)
}

async fn still_serves(server: &TestServer, client: &mut Client, used: u64) {
    assert_eq!(rows(&get(client, path("left")).await.unwrap()), 100);
    server.expect_used_bytes(used).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wrong_descriptors_and_commands_are_explained() {
    let (server, mut client, used) = server().await;
    let with = |field: &str| command(&format!(r#"{{"join": {{"left": "left", "right": "right", {field}}}}}"#));
    let on = r#""on": [{"left": "k", "right": "k"}]"#;
    let type_url = "type.googleapis.com/arrow.flight.protocol.sql.CommandStatementQuery".to_owned();
    let sql = pbjson_types::Any { type_url, value: Default::default() }.encode_to_vec();
    let cases = [
        (path("nobody"), Code::NotFound, "\"nobody\""),
        (FlightDescriptor::new_path(vec![]), Code::InvalidArgument, "table's name"),
        (FlightDescriptor::new_path(vec!["a".into(), "b".into()]), Code::InvalidArgument, "one part"),
        (FlightDescriptor::default(), Code::InvalidArgument, "neither a path nor a command"),
        (command(""), Code::InvalidArgument, "empty"),
        (command("SELECT 1"), Code::InvalidArgument, "neither a JSON object nor a protobuf"),
        (command("{\"join\": "), Code::InvalidArgument, "JSON"),
        (FlightDescriptor::new_cmd(sql), Code::Unimplemented, "Flight SQL"),
        (with(&format!("{on}, \"hwo\": \"left\"")), Code::InvalidArgument, "hwo"),
        (with(&format!("{on}, \"strategy\": \"quantum\"")), Code::InvalidArgument, "quantum"),
        (with(&format!("{on}, \"columns\": [\"nothing\"]")), Code::InvalidArgument, "nothing"),
        (with(r#""on": [{"left": "k", "right": "name"}]"#), Code::InvalidArgument, "name"),
        (with(r#""on": [{"left": "k", "right": "x"}]"#), Code::InvalidArgument, "\"x\""),
        (with(r#""on": []"#), Code::InvalidArgument, "key columns"),
        (command(&JOIN.replace("left\", \"right\": \"right", "lost\", \"right\": \"right")), Code::NotFound, "lost"),
    ];
    for (descriptor, code, words) in cases {
        refused(client.get_flight_info(descriptor.clone()).await, code, words);
        refused(client.get_schema(descriptor.clone()).await, code, words);
        refused(client.poll_flight_info(descriptor).await, code, words);
        still_serves(&server, &mut client, used).await;
    }
    // The last five are commands that cannot be bound. Two calls submit them, and a schema does
    // not.
    assert_eq!(server.shared.scheduler.stats().refused_total, 2 * 5);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wrong_actions_are_explained() {
    let (server, mut client, used) = server().await;
    let cases = [
        ("fly", "", Code::InvalidArgument, "drop_table"),
        ("drop_table", "", Code::InvalidArgument, "{\"name\""),
        ("drop_table", "left", Code::InvalidArgument, "{\"name\""),
        ("drop_table", r#"{"name": "left", "force": true}"#, Code::InvalidArgument, "force"),
        ("drop_table", r#"{"name": "nobody"}"#, Code::NotFound, "nobody"),
        ("job", r#"{"job": 4711}"#, Code::NotFound, "4711"),
        ("cancel_job", r#"{"job": 4711}"#, Code::NotFound, "4711"),
        ("commit_upload", r#"{"upload": "u"}"#, Code::NotFound, "\"u\""),
        ("abort_upload", r#"{"upload": "u"}"#, Code::NotFound, "\"u\""),
        ("explain", "nonsense", Code::InvalidArgument, "JSON"),
        ("list_jobs", "{\"all\": true}", Code::InvalidArgument, "no body"),
        ("list_prepared", "{\"all\": true}", Code::InvalidArgument, "no body"),
        ("release_prepared", r#"{"prepared": 7}"#, Code::NotFound, "no prepared build side 7"),
        ("CancelFlightInfo", "", Code::InvalidArgument, "flight info"),
        ("CancelFlightInfo", "\u{ff}\u{ff}", Code::InvalidArgument, "CancelFlightInfoRequest"),
        ("RenewFlightEndpoint", "", Code::InvalidArgument, "endpoint"),
        ("GetSessionOptions", "", Code::FailedPrecondition, "session"),
        ("CloseSession", "", Code::FailedPrecondition, "session"),
    ];
    for (name, body, code, words) in cases {
        refused(client.do_action(Action::new(name, body.to_owned())).await, code, words);
        still_serves(&server, &mut client, used).await;
    }
    let criteria = Criteria { expression: vec![0xff].into() };
    refused(client.list_flights(criteria).await, Code::InvalidArgument, "UTF-8");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unsupported_calls_are_refused_with_an_alternative() {
    let (server, mut client, used) = server().await;
    let mut to_command = messages("t", keyed(10, 10)).await;
    to_command[0].flight_descriptor = Some(command(JOIN));
    refused(send(&mut client, to_command).await, Code::Unimplemented, "path");
    still_serves(&server, &mut client, used).await;
}

async fn send(client: &mut Client, messages: Vec<FlightData>) -> Result<usize, tonic::Status> {
    let acks: Vec<_> = client.do_put(stream::iter(messages)).await?.into_inner().try_collect().await?;
    Ok(acks.len())
}

/// Encodes an upload as messages.
async fn messages(name: &str, batches: Vec<RecordBatch>) -> Vec<FlightData> {
    let encoder = FlightDataEncoderBuilder::new()
        .with_flight_descriptor(Some(path(name)))
        .with_schema(batches[0].schema())
        .build(stream::iter(batches).map_ok_like());
    encoder.try_collect().await.unwrap()
}

/// `stream::iter(...).map(Ok)` with an explicit error type.
trait MapOkLike: futures::Stream<Item = RecordBatch> + Sized {
    fn map_ok_like(self) -> impl futures::Stream<Item = Result<RecordBatch, arrow_flight::error::FlightError>>;
}

impl<S: futures::Stream<Item = RecordBatch>> MapOkLike for S {
    fn map_ok_like(self) -> impl futures::Stream<Item = Result<RecordBatch, arrow_flight::error::FlightError>> {
        futures::StreamExt::map(self, Ok)
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wrong_uploads_leave_nothing() {
    let (server, mut client, used) = server().await;
    let good = messages("t", keyed(1000, 100)).await;

    refused(send(&mut client, vec![]).await, Code::InvalidArgument, "before its first message");
    still_serves(&server, &mut client, used).await;

    refused(put(&mut client, "left", keyed(10, 10)).await, Code::AlreadyExists, "\"left\"");
    still_serves(&server, &mut client, used).await;

    let options = put_with(&mut client, "t", keyed(10, 10), r#"{"mood": "create"}"#).await;
    refused(options, Code::InvalidArgument, "mood");
    let options = put_with(&mut client, "t", keyed(10, 10), r#"{"mode": "append"}"#).await;
    refused(options, Code::NotFound, "\"t\"");
    let options = put_with(&mut client, "t", keyed(10, 10), r#"{"sorted_by": ["z"]}"#).await;
    refused(options, Code::InvalidArgument, "\"z\"");
    refused(put(&mut client, "", keyed(10, 10)).await, Code::InvalidArgument, "name");
    still_serves(&server, &mut client, used).await;

    // After the first batches, a schema message and a batch of another schema.
    let other = Schema::new(vec![Field::new("x", DataType::Float64, false)]);
    let other = RecordBatch::try_new(Arc::new(other), vec![Arc::new(Float64Array::from(vec![1.0]))]).unwrap();
    let changed = [good.clone(), messages("t", vec![other]).await].concat();
    refused(send(&mut client, changed).await, Code::InvalidArgument, "schema changed during the stream");
    still_serves(&server, &mut client, used).await;

    // A message over the limit (1 MiB here).
    let large = messages("t", keyed(120_000, 120_000)).await;
    refused(send(&mut client, large).await, Code::ResourceExhausted, "--message-limit");
    still_serves(&server, &mut client, used).await;

    // Bytes that are not an Arrow message.
    let mut garbage = good.clone();
    garbage[2].data_header = vec![7; 100].into();
    assert!(send(&mut client, garbage).await.is_err());
    still_serves(&server, &mut client, used).await;

    refused(client.get_flight_info(path("t")).await, Code::NotFound, "\"t\"");
    assert!(send(&mut client, good).await.is_ok());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_table_that_does_not_fit_is_refused_whole() {
    let server = TestServer::start(&["--host-memory=1MiB"]).await;
    let mut client = server.client().await;
    refused(put(&mut client, "big", keyed(1_000_000, 50_000)).await, Code::ResourceExhausted, "--host-memory");
    server.expect_used_bytes(0).await;
    assert!(put(&mut client, "small", keyed(100, 100)).await.is_ok());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn invalid_tickets_are_refused() {
    let (server, mut client, used) = server().await;
    for wrong in [&b""[..], b"left", b"DVT1", JOIN.as_bytes()] {
        refused(client.do_get(Ticket { ticket: wrong.into() }).await, Code::InvalidArgument, "ticket");
    }
    still_serves(&server, &mut client, used).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_other_than_uploads_are_limited_in_size() {
    let server = TestServer::start(&[]).await;
    let mut client = server.client().await;
    let large = FlightDescriptor::new_cmd(vec![b'{'; 17 << 20]);
    refused(client.get_flight_info(large).await, Code::ResourceExhausted, "2.1 MiB");
    let action = Action::new("job", vec![b' '; 17 << 20]);
    refused(client.do_action(action).await.map(|_| ()), Code::ResourceExhausted, "16.0 MiB");
    put(&mut client, "t", keyed(10, 10)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_that_are_cut_off_are_invalid_arguments() {
    use http_body_util::{BodyExt, Full};
    use hyper_util::client::legacy::Client as HttpClient;

    let (server, mut client, used) = server().await;
    let calls = HttpClient::builder(hyper_util::rt::TokioExecutor::new()).http2_only(true).build_http();
    // A field of bytes that declares more than there is.
    let cut_field = [0, 0, 0, 0, 3, 0x0a, 9, b'x'];
    let cut_body = [&[0, 0, 0, 0, 99][..], &[0x0a; 20]].concat();
    let cuts = [&cut_field[..], &cut_body, &cut_body[..5], &[0, 0, 0], &[7, 0, 0, 0, 0]];
    let methods = [
        "arrow.flight.protocol.FlightService/Handshake",
        "arrow.flight.protocol.FlightService/ListFlights",
        "arrow.flight.protocol.FlightService/GetFlightInfo",
        "arrow.flight.protocol.FlightService/PollFlightInfo",
        "arrow.flight.protocol.FlightService/GetSchema",
        "arrow.flight.protocol.FlightService/DoGet",
        "arrow.flight.protocol.FlightService/DoPut",
        "arrow.flight.protocol.FlightService/DoExchange",
        "arrow.flight.protocol.FlightService/DoAction",
        "arrow.flight.protocol.FlightService/ListActions",
        "grpc.health.v1.Health/Check",
    ];
    for method in methods {
        for cut in cuts {
            // An empty message skips fields that it does not know, and checks them all the same.
            let request = http::Request::post(format!("{}/{method}", server.address))
                .header("content-type", "application/grpc")
                .header("te", "trailers")
                .body(tonic::body::Body::new(Full::new(bytes::Bytes::copy_from_slice(cut))))
                .unwrap();
            let response = calls.request(request).await.unwrap();
            let at_once = tonic::Status::from_header_map(response.headers());
            let body = response.into_body().collect().await.unwrap();
            let status = at_once.or_else(|| tonic::Status::from_header_map(body.trailers()?)).unwrap();
            assert_eq!(status.code(), Code::InvalidArgument, "{method} with {cut:?}: {status}");
        }
    }
    still_serves(&server, &mut client, used).await;
}
