//! Limits and time-outs of connections, on both ports.

use std::io::ErrorKind;

use rcgen::KeyPair;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tonic::Code;

use crate::harness::*;

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// Frame that follows the preface: settings, and all of them as they are by default.
const NO_SETTINGS: &[u8] = &[0, 0, 0, 4, 0, 0, 0, 0, 0];

/// Flag that makes the steps of a connection until its first request time out soon.
const SOON: &str = "--test-handshake-seconds=1";

async fn open(address: &str) -> TcpStream {
    TcpStream::connect(address.strip_prefix("http://").unwrap_or(address)).await.unwrap()
}

/// Waits until the server closes a connection. Returns the bytes that it has sent.
async fn until_closed(stream: &mut TcpStream) -> Vec<u8> {
    let mut received = Vec::new();
    let closed = tokio::time::timeout(WAIT_LIMIT, stream.read_to_end(&mut received)).await;
    match closed.expect("the server closes the connection") {
        Ok(_) => received,
        // Bytes that the server has not read make its end of the connection a reset.
        Err(error) if error.kind() == ErrorKind::ConnectionReset => received,
        Err(error) => panic!("{error}"),
    }
}

async fn is_counted(server: &TestServer, metric: &str) -> bool {
    server.http_get("/metrics").await.1.lines().any(|line| line == metric)
}

async fn counted(server: &TestServer, metric: &str) {
    eventually(metric, async || is_counted(server, metric).await).await;
}

/// Regression test: clients that answered pings held their connections for 15 minutes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_connection_without_an_accepted_call_is_closed_in_time() {
    let server = TestServer::start(&[SOON]).await;
    let mut silent = open(&server.address).await;
    silent.write_all(PREFACE).await.unwrap();
    silent.write_all(NO_SETTINGS).await.unwrap();
    let mut probed = tonic_health::pb::health_client::HealthClient::new(server.channel().await);
    probed.check(tonic_health::pb::HealthCheckRequest::default()).await.unwrap();
    let mut client = server.client().await;
    refused(client.get_flight_info(path("t")).await, Code::NotFound, "\"t\"");
    until_closed(&mut silent).await;
    counted(&server, "dovetail_connections_closed_total{reason=\"no_call\"} 1").await;
    counted(&server, "dovetail_connections 2").await;
}

/// Regression test: such connections were held for good.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_connection_without_a_whole_preface_or_head_is_closed() {
    let server = TestServer::start(&[SOON]).await;
    let mut opened = Vec::new();
    for sent in [&b""[..], &PREFACE[..12], &PREFACE[..23], b"G", b"GET / HTTP/1.1\r\nHost: a-name-of-some-length\r\n"] {
        let mut stream = open(&server.address).await;
        stream.write_all(sent).await.unwrap();
        opened.push(stream);
    }
    for sent in [&b""[..], b"GET /healthz HTTP/1.1\r\nHost: a-name-of-some-length\r\n"] {
        let mut stream = open(&server.admin).await;
        stream.write_all(sent).await.unwrap();
        opened.push(stream);
    }
    for stream in &mut opened {
        until_closed(stream).await;
    }
    counted(&server, "dovetail_connections_closed_total{reason=\"silent\"} 5").await;
    // A client that has sent its preface may wait for its first call.
    let mut client = server.client().await;
    tokio::time::sleep(std::time::Duration::from_secs(2)).await;
    refused(client.get_flight_info(path("t")).await, Code::NotFound, "\"t\"");
    counted(&server, "dovetail_connections 1").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_tls_handshake_that_stalls_is_closed_and_delays_no_other_client() {
    let folder = tempfile::tempdir().unwrap();
    let key = KeyPair::generate().unwrap();
    let certificate = rcgen::CertificateParams::new(vec!["localhost".to_owned()]).unwrap().self_signed(&key).unwrap();
    let write = |name: &str, text: String| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.display().to_string()
    };
    let cert = format!("--tls-cert={}", write("cert.pem", certificate.pem()));
    let key = format!("--tls-key={}", write("key.pem", key.serialize_pem()));
    let server = TestServer::start(&[&cert, &key, SOON]).await;
    let mut stalled = Vec::new();
    // The last two begin a record of a handshake.
    for sent in [&b""[..], &[0x16, 3, 1], &[0x16, 3, 1, 0, 200, 1, 0]] {
        let mut stream = open(&server.address).await;
        stream.write_all(sent).await.unwrap();
        stalled.push(stream);
    }
    let tls = tonic::transport::ClientTlsConfig::new()
        .ca_certificate(tonic::transport::Certificate::from_pem(certificate.pem()))
        .domain_name("localhost");
    let endpoint = tonic::transport::Endpoint::from_shared(server.address.replace("http:", "https:")).unwrap();
    let mut client = connect(endpoint.tls_config(tls).unwrap()).await;
    refused(client.get_flight_info(path("t")).await, Code::NotFound, "\"t\"");
    for mut stream in stalled {
        until_closed(&mut stream).await;
    }
    counted(&server, "dovetail_connections_closed_total{reason=\"tls_timeout\"} 3").await;
    let mut plain = open(&server.address).await;
    plain.write_all(PREFACE).await.unwrap();
    until_closed(&mut plain).await;
    counted(&server, "dovetail_connections_closed_total{reason=\"tls_failed\"} 1").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connections_beyond_a_limit_are_closed_at_once() {
    for (flags, reason) in [
        (["--connection-limit=3", "--address-connection-limit=9"], "limit"),
        (["--connection-limit=9", "--address-connection-limit=3"], "address_limit"),
    ] {
        let server = TestServer::start(&flags).await;
        let mut client = server.client().await;
        let mut others = [server.client().await, server.client().await];
        for client in [&mut client].into_iter().chain(&mut others) {
            refused(client.get_flight_info(path("t")).await, Code::NotFound, "\"t\"");
        }
        counted(&server, "dovetail_connections 3").await;
        assert_eq!(until_closed(&mut open(&server.address).await).await, b"");
        counted(&server, &format!("dovetail_connections_closed_total{{reason=\"{reason}\"}} 1")).await;
        // Open connections and the admin port are as before, and a closed one makes room.
        refused(client.get_flight_info(path("t")).await, Code::NotFound, "\"t\"");
        assert_eq!(server.http_get("/healthz").await.0, 200);
        drop(others);
        counted(&server, "dovetail_connections 1").await;
        refused(server.client().await.get_flight_info(path("t")).await, Code::NotFound, "\"t\"");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_idle_connection_is_closed_and_the_next_call_opens_another() {
    let server = TestServer::start(&["--connection-idle-seconds=1", SOON]).await;
    let mut client = server.client().await;
    let mut watching = tonic_health::pb::health_client::HealthClient::new(server.channel().await);
    let request = tonic_health::pb::HealthCheckRequest::default();
    let mut watch = watching.watch(request).await.unwrap().into_inner();
    assert!(watch.message().await.unwrap().is_some());
    // The other connection has a call under way.
    counted(&server, "dovetail_connections_closed_total{reason=\"idle\"} 1").await;
    counted(&server, "dovetail_connections 1").await;
    refused(client.get_flight_info(path("t")).await, Code::NotFound, "\"t\"");
    // A client that leaves its side open is closed all the same.
    let mut stream = open(&server.address).await;
    stream.write_all(PREFACE).await.unwrap();
    stream.write_all(NO_SETTINGS).await.unwrap();
    until_closed(&mut stream).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_admin_port_serves_the_newest_connection() {
    let server = TestServer::start(&[]).await;
    let mut idle = Vec::new();
    for _ in 0..100 {
        idle.push(open(&server.admin).await);
    }
    assert_eq!(server.http_get("/healthz").await.0, 200);
    until_closed(&mut idle[0]).await;
    // At least the 36 connections before the newest 64, and perhaps those of the requests here.
    let text = server.http_get("/metrics").await.1;
    let line =
        text.lines().find_map(|line| line.strip_prefix("dovetail_connections_closed_total{reason=\"admin_limit\"} "));
    assert!(line.is_some_and(|count| count.parse::<u32>().unwrap() >= 36), "{line:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_limit_beyond_the_limit_of_open_files_is_refused() {
    let limit = format!("--connection-limit={}", u32::MAX);
    let refusal = dovetail::service::Server::start(&settings(&[&limit])).await.unwrap_err();
    let words = ["--connection-limit is 4294967295, and the limit of open files", "ulimit -n"];
    assert!(words.iter().all(|words| refusal.message().contains(words)), "{refusal}");
}
