//! Health, reflection and metrics, for orchestrators and tools.

use futures::StreamExt;
use tonic::Code;
use tonic_health::pb::health_client::HealthClient;
use tonic_health::pb::{HealthCheckRequest, HealthCheckResponse};
use tonic_reflection::pb::v1::server_reflection_client::ServerReflectionClient;
use tonic_reflection::pb::v1::server_reflection_request::MessageRequest;
use tonic_reflection::pb::v1::server_reflection_response::MessageResponse;
use tonic_reflection::pb::v1::{ServerReflectionRequest, ServerReflectionResponse};

use crate::harness::*;

pub async fn health(server: &TestServer, service: &str) -> Result<i32, tonic::Status> {
    let mut client = HealthClient::new(server.channel().await);
    let request = HealthCheckRequest { service: service.into() };
    client.check(request).await.map(|response: tonic::Response<HealthCheckResponse>| response.into_inner().status)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn health_answers_by_name_and_without_a_token() {
    let folder = tempfile::tempdir().unwrap();
    let tokens = folder.path().join("tokens");
    std::fs::write(&tokens, "t ann writer").unwrap();
    let server = TestServer::start(&[&format!("--token-file={}", tokens.display())]).await;
    for service in ["", "arrow.flight.protocol.FlightService", "readiness", "liveness"] {
        assert_eq!(health(&server, service).await.unwrap(), 1, "{service:?}");
    }
    refused(health(&server, "nobody").await, Code::NotFound, "");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reflection_lists_and_describes_flight() {
    let server = TestServer::start(&[]).await;
    let mut client = ServerReflectionClient::new(server.channel().await);
    let ask = |request| ServerReflectionRequest { host: String::new(), message_request: Some(request) };
    let requests = [
        ask(MessageRequest::ListServices(String::new())),
        ask(MessageRequest::FileContainingSymbol("arrow.flight.protocol.FlightService".into())),
        ask(MessageRequest::FileContainingSymbol("dovetail.v1.Join".into())),
    ];
    let answers = client.server_reflection_info(futures::stream::iter(requests)).await.unwrap().into_inner();
    let answers: Vec<ServerReflectionResponse> = answers.map(Result::unwrap).collect().await;
    let Some(MessageResponse::ListServicesResponse(list)) = &answers[0].message_response else { panic!("no list") };
    let names: Vec<_> = list.service.iter().map(|service| service.name.as_str()).collect();
    assert!(
        names.contains(&"arrow.flight.protocol.FlightService") && names.contains(&"grpc.health.v1.Health"),
        "{names:?}"
    );
    for answer in &answers[1..] {
        assert!(matches!(answer.message_response, Some(MessageResponse::FileDescriptorResponse(_))), "{answer:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn metrics_count_calls_bytes_and_memory() {
    let server = TestServer::start(&["--endpoints=1"]).await;
    let mut client = server.client().await;
    put(&mut client, "t", keyed(1000, 100)).await.unwrap();
    get(&mut client, path("t")).await.unwrap();
    refused(client.get_flight_info(path("nobody")).await, Code::NotFound, "");
    // The server counts a call after its last byte, perhaps after the client has received it.
    let calls = [
        "{code=\"OK\",rpc=\"DoPut\"} 1",
        "{code=\"OK\",rpc=\"DoGet\"} 1",
        "{code=\"NOT_FOUND\",rpc=\"GetFlightInfo\"} 1",
    ];
    let mut text = String::new();
    eventually("the calls are counted", async || {
        let (status, metrics) = server.http_get("/metrics").await;
        assert_eq!(status, 200);
        text = metrics;
        calls.iter().all(|call| text.contains(&format!("dovetail_calls_total{call}\n")))
    })
    .await;
    let value = |name: &str| -> f64 {
        let line = text.lines().find(|line| line.starts_with(name)).unwrap_or_else(|| panic!("no {name} in {text}"));
        line.rsplit(' ').next().unwrap().parse().unwrap()
    };
    assert_eq!(value("dovetail_received_rows_total"), 1000.0);
    assert_eq!(value("dovetail_sent_rows_total"), 1000.0);
    assert!(value("dovetail_received_bytes_total{rpc=\"DoPut\"}") > 8000.0);
    assert!(value("dovetail_sent_bytes_total{rpc=\"DoGet\"}") > 8000.0);
    assert_eq!(value("dovetail_arena_bytes{kind=\"used\"}"), server.used_bytes().await as f64);
    assert_eq!(value("dovetail_arena_bytes{kind=\"limit\"}"), f64::from(256 << 20));
    assert_eq!(value("dovetail_tables"), 1.0);
    assert!(text.contains("dovetail_build_info{"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_admin_port_reports_liveness_and_readiness() {
    let server = TestServer::start(&[]).await;
    assert_eq!(server.http_get("/healthz").await.0, 200);
    let (status, text) = server.http_get("/readyz").await;
    let host_memory = text.strip_prefix("ready\nhost memory is ");
    assert!(status == 200 && host_memory.is_some_and(|words| words.contains(", in pages of ")), "{status}: {text}");
    let (status, text) = server.http_get("/").await;
    assert_eq!(status, 200);
    let (status, picture) = server.http_get("/topology.svg").await;
    assert!(status == 200 && picture.starts_with("<svg ") && picture.contains(">host:0<"), "{status}: {picture}");
    for path in ["/metrics", "/healthz", "/readyz", "/topology.svg", "Arrow Flight port"] {
        assert!(text.contains(path), "{path}: {text}");
    }
    assert_eq!(server.http_get("/tables").await, (404, text.clone()));
    assert_eq!(
        http(&server.admin, "POST /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").await,
        (405, text)
    );
}

/// Sends the head of a request by hand. Returns the status and the body of the answer.
async fn http(address: &str, head: &str) -> (u16, String) {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let mut stream = tokio::net::TcpStream::connect(address).await.unwrap();
    stream.write_all(head.as_bytes()).await.unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).await.unwrap();
    let (head, body) = text.split_once("\r\n\r\n").unwrap();
    assert!(head.to_lowercase().contains("content-type: text/plain"), "{head}");
    (head.split(' ').nth(1).unwrap().parse().unwrap(), body.to_owned())
}

/// Regression test: the connection was closed without an answer.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_of_http1_on_the_flight_port_is_answered_with_a_sentence() {
    let folder = tempfile::tempdir().unwrap();
    let tokens = folder.path().join("tokens");
    std::fs::write(&tokens, "t ann writer").unwrap();
    let mut server = TestServer::start(&[&format!("--token-file={}", tokens.display())]).await;
    let address = server.address.strip_prefix("http://").unwrap();
    // Without "Connection: close": the server closes the connection itself.
    for (head, status, words) in [
        ("GET / HTTP/1.1\r\nHost: x\r\n\r\n", 415, "This is the Arrow Flight port of a Dovetail server."),
        ("GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n", 415, "Metrics and health are on the admin port"),
        (
            "POST /arrow.flight.protocol.FlightService/DoGet HTTP/1.1\r\nHost: x\r\nContent-Type: application/grpc\r\n\
             Content-Length: 5\r\n\r\n\0\0\0\0\0",
            505,
            "gRPC needs HTTP/2, and this request came over HTTP/1.1",
        ),
    ] {
        let (answered, text) = http(address, head).await;
        assert!(answered == status && text.contains(words), "{answered} {text}");
    }
    // Such a connection does not delay the end of the server.
    let _idle = tokio::net::TcpStream::connect(address).await.unwrap();
    let (_, metrics) = server.http_get("/metrics").await;
    assert!(metrics.contains("dovetail_calls_total{code=\"UNIMPLEMENTED\",rpc=\"unknown\"} 2"), "{metrics}");
    server.drain();
    server.join().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_of_http2_that_is_not_grpc_is_answered_with_a_sentence() {
    use http_body_util::BodyExt;
    let server = TestServer::start(&[]).await;
    let client = hyper_util::client::legacy::Client::builder(hyper_util::rt::TokioExecutor::new())
        .http2_only(true)
        .build_http::<tonic::body::Body>();
    let answer = client.get(server.address.parse().unwrap()).await.unwrap();
    assert_eq!(answer.status(), 415);
    let text = answer.into_body().collect().await.unwrap().to_bytes();
    assert!(text.starts_with(b"This is the Arrow Flight port"), "{text:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unknown_paths_share_one_label_whatever_their_status() {
    let folder = tempfile::tempdir().unwrap();
    let tokens = folder.path().join("tokens");
    std::fs::write(&tokens, "t ann writer").unwrap();
    let server = TestServer::start(&[&format!("--token-file={}", tokens.display())]).await;
    let service = "/arrow.flight.protocol.FlightService";
    for made_up in ["/x/A1".to_owned(), "/x/A2".to_owned(), format!("{service}/A3"), format!("{service}x/DoGet")] {
        let mut grpc = tonic::client::Grpc::new(server.channel().await);
        grpc.ready().await.unwrap();
        let request = tonic::Request::new(arrow_flight::Empty {});
        let codec = tonic_prost::ProstCodec::<_, arrow_flight::Empty>::default();
        assert!(grpc.unary(request, made_up.parse().unwrap(), codec).await.is_err());
    }
    let (_, text) = server.http_get("/metrics").await;
    let calls: Vec<_> = text.lines().filter(|line| line.starts_with("dovetail_calls_total{")).collect();
    assert!(!calls.is_empty() && calls.iter().all(|line| line.contains("rpc=\"unknown\"")), "{calls:?}");
}
