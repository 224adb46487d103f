//! Tenants that share a server: none can take all, and none learns of the jobs of others.

use std::sync::Arc;

use arrow::array::{ArrayRef, Int64Array, RecordBatch};
use arrow_flight::encode::FlightDataEncoderBuilder;
use arrow_flight::{
    Action, CancelFlightInfoRequest, FlightDescriptor, FlightInfo, PutResult, RenewFlightEndpointRequest,
};
use futures::{StreamExt, TryStreamExt, stream};
use prost::Message;
use tokio::io::AsyncReadExt;
use tonic::metadata::MetadataValue;
use tonic::{Code, Request, Status, Streaming};

use crate::harness::*;

/// A server that knows the writers `ann` and `bob` by their names as tokens.
pub async fn server(flags: &[&str]) -> (TestServer, Client) {
    let tokens = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(tokens.path(), "ann ann writer\nbob bob writer\n").unwrap();
    let token_file = format!("--token-file={}", tokens.path().display());
    let server = TestServer::start(&[&[token_file.as_str()], flags].concat()).await;
    let client = server.client().await;
    (server, client)
}

pub fn by<T>(tenant: &str, message: T) -> Request<T> {
    let mut request = Request::new(message);
    request.metadata_mut().insert("authorization", format!("Bearer {tenant}").parse::<MetadataValue<_>>().unwrap());
    request
}

pub async fn put_by(client: &mut Client, tenant: &str, name: &str, batches: Vec<RecordBatch>) -> Result<(), Status> {
    let mode = r#"{"mode": "replace"}"#;
    let messages = FlightDataEncoderBuilder::new()
        .with_flight_descriptor(Some(path(name)))
        .with_metadata(mode.into())
        .build(stream::iter(batches).map(Ok));
    let messages: Vec<_> = messages.try_collect().await.unwrap();
    let acks = client.do_put(by(tenant, stream::iter(messages))).await?.into_inner();
    acks.try_collect::<Vec<_>>().await.map(drop)
}

async fn act_by(client: &mut Client, tenant: &str, action: Action) -> Result<Vec<arrow_flight::Result>, Status> {
    client.do_action(by(tenant, action)).await?.into_inner().try_collect().await
}

/// Begins an upload that stays open while its client lives. Returns its error if it is refused.
async fn keep_open(client: &mut Client, tenant: &str, name: &str) -> Result<Streaming<PutResult>, Status> {
    let messages = FlightDataEncoderBuilder::new()
        .with_flight_descriptor(Some(path(name)))
        .build(stream::iter(keyed(10, 5)).map(Ok));
    let messages: Vec<_> = messages.try_collect().await.unwrap();
    let open = stream::iter(messages).chain(stream::pending());
    let mut acks = client.do_put(by(tenant, open)).await?.into_inner();
    acks.message().await.map(|ack| assert!(ack.is_some()))?;
    Ok(acks)
}

const JOIN: &str = r#"{"join": {"left": "t", "right": "t", "on": [{"left": "k", "right": "k"}]}}"#;

fn join_kept_for(seconds: u64) -> FlightDescriptor {
    command(&JOIN.replace("}]}}", &format!("}}], \"retain_seconds\": {seconds}}}}}")))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_tenant_takes_half_of_the_uploads_at_most_unless_the_settings_say_another_number() {
    let (_server, mut client) = server(&["--upload-limit=4"]).await;
    let mut open = Vec::new();
    for name in ["a", "b"] {
        open.push(keep_open(&mut client, "ann", name).await.unwrap());
    }
    refused(keep_open(&mut client, "ann", "c").await, Code::ResourceExhausted, "--tenant-uploads");
    open.push(keep_open(&mut client, "bob", "c").await.unwrap());
    let (_server, mut client) = server(&["--upload-limit=4", "--tenant-uploads=1"]).await;
    let _open = keep_open(&mut client, "ann", "a").await.unwrap();
    refused(keep_open(&mut client, "ann", "b").await, Code::ResourceExhausted, "--tenant-uploads");
    // Without names of callers, there is one tenant, and it may take all.
    let server = TestServer::start(&["--upload-limit=2"]).await;
    let mut client = server.client().await;
    let mut open = Vec::new();
    for name in ["a", "b"] {
        open.push(keep_open(&mut client, "", name).await.unwrap());
    }
    refused(keep_open(&mut client, "", "c").await, Code::ResourceExhausted, "--upload-limit");
}

/// Asks for a table that does not exist, over a connection of its own, which the result keeps open.
async fn call_by(server: &TestServer, tenant: &str) -> (Client, Status) {
    let mut client = server.client().await;
    let status = client.get_flight_info(by(tenant, path("missing"))).await.unwrap_err();
    (client, status)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_tenant_takes_half_of_the_connections_at_most_unless_the_settings_say_another_number() {
    for (flags, limit) in [(&["--connection-limit=5"][..], 3), (&["--connection-limit=5", "--tenant-connections=1"], 1)]
    {
        let (server, idle) = server(flags).await;
        drop(idle);
        let mut open = Vec::new();
        for _ in 0..limit {
            let (client, status) = call_by(&server, "ann").await;
            assert_eq!(status.code(), Code::NotFound, "{status}");
            open.push(client);
        }
        let (mut beyond, status) = call_by(&server, "ann").await;
        for words in [&*format!("tenant \"ann\" has {limit} connection"), "--tenant-connections"] {
            refused(Err::<(), _>(status.clone()), Code::ResourceExhausted, words);
        }
        // Those that are open stay as they are, and another tenant may call on the one beyond.
        refused(open[0].get_flight_info(by("ann", path("t"))).await, Code::NotFound, "\"t\"");
        refused(beyond.get_flight_info(by("bob", path("t"))).await, Code::NotFound, "\"t\"");
        let metrics = server.http_get("/metrics").await.1;
        for line in [format!("{{tenant=\"ann\"}} {limit}"), "{tenant=\"bob\"} 1".into()] {
            assert!(metrics.contains(&format!("dovetail_tenant_connections{line}\n")), "{line}: {metrics}");
        }
        drop(open);
        eventually("the tenant's places are free", async || call_by(&server, "ann").await.1.code() == Code::NotFound)
            .await;
    }
    // Without names of callers, there is one tenant, and it may take all.
    let server = TestServer::start(&["--connection-limit=2"]).await;
    let mut open = [server.client().await, server.client().await];
    for client in &mut open {
        refused(client.get_flight_info(path("t")).await, Code::NotFound, "\"t\"");
    }
}

/// Regression test: they held every place for 15 minutes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn strangers_keep_no_tenant_out() {
    let (server, mut refused_client) = server(&["--connection-limit=6"]).await;
    // Connections without a call, with a call that was refused, and with a health probe that lasts.
    let mut strangers = vec![server.client().await, server.client().await];
    refused(refused_client.get_flight_info(by("eve", path("t"))).await, Code::Unauthenticated, "not known");
    strangers.push(refused_client);
    let mut watches = Vec::new();
    for _ in 0..3 {
        let mut probe = tonic_health::pb::health_client::HealthClient::new(server.channel().await);
        let request = tonic_health::pb::HealthCheckRequest::default();
        let mut watch = probe.watch(request).await.unwrap().into_inner();
        assert!(watch.message().await.unwrap().is_some());
        watches.push(watch);
    }
    let mut open = Vec::new();
    for tenant in ["ann", "ann", "ann", "bob", "bob", "bob"] {
        let (client, status) = call_by(&server, tenant).await;
        assert_eq!(status.code(), Code::NotFound, "{status}");
        open.push(client);
    }
    for watch in &mut watches {
        assert!(watch.message().await.is_err(), "its connection was replaced");
    }
    let replaced = "dovetail_connections_closed_total{reason=\"replaced\"} 6\n";
    eventually(replaced, async || server.http_get("/metrics").await.1.contains(replaced)).await;
    // The places of tenants are not for a new connection.
    let address = server.address.strip_prefix("http://").unwrap();
    let mut stream = tokio::net::TcpStream::connect(address).await.unwrap();
    let mut received = Vec::new();
    tokio::time::timeout(WAIT_LIMIT, stream.read_to_end(&mut received)).await.unwrap().unwrap();
    assert_eq!(received, b"");
    for (client, tenant) in open.iter_mut().zip(["ann", "ann", "ann", "bob", "bob", "bob"]) {
        refused(client.get_flight_info(by(tenant, path("t"))).await, Code::NotFound, "\"t\"");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_tenant_takes_half_of_the_queue_at_most() {
    let folder = tempfile::tempdir().unwrap();
    let (server, mut client) = server(&[&slow_devices(folder.path(), 1, 1_000_000), "--queue-limit=4"]).await;
    put_by(&mut client, "ann", "t", vec![few_keys(3000)]).await.unwrap();
    let mut submit = async |tenant| client.get_flight_info(by(tenant, join_kept_for(0))).await;
    for _ in 0..2 {
        submit("ann").await.unwrap();
    }
    refused(submit("ann").await, Code::ResourceExhausted, "--tenant-jobs");
    for _ in 0..2 {
        submit("bob").await.unwrap();
    }
    server.shared.scheduler.abort_all("the test is over");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_result_is_kept_as_long_as_the_operator_allows_at_most() {
    let (_server, mut client) = server(&["--retain-seconds-max=1000"]).await;
    put_by(&mut client, "ann", "t", vec![few_keys(30)]).await.unwrap();
    for seconds in [1001, u32::MAX.into()] {
        let asked = join_kept_for(seconds);
        let words = "at most 1000 s";
        refused(client.get_flight_info(by("ann", asked.clone())).await, Code::InvalidArgument, words);
        refused(client.poll_flight_info(by("ann", asked)).await, Code::InvalidArgument, "--retain-seconds-max");
    }
    client.get_flight_info(by("ann", join_kept_for(1000))).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn results_of_a_tenant_take_half_of_the_memory_at_most() {
    let (_server, mut client) = server(&["--host-memory=24MiB", "--device-memory=16MiB"]).await;
    put_by(&mut client, "ann", "t", vec![few_keys(900)]).await.unwrap();
    // A result has 270,000 keys of 8 bytes.
    let mut last = Ok(());
    for _ in 0..8 {
        let info = client.get_flight_info(by("ann", join_kept_for(1000))).await.unwrap().into_inner();
        let ticket = info.endpoint[0].ticket.clone().unwrap();
        let read = client.do_get(by("ann", ticket)).await.unwrap().into_inner();
        last = read.try_collect::<Vec<_>>().await.map(drop);
    }
    refused(last, Code::ResourceExhausted, "--tenant-results");
    let info = client.get_flight_info(by("bob", join_kept_for(1000))).await.unwrap().into_inner();
    let read = client.do_get(by("bob", info.endpoint[0].ticket.clone().unwrap())).await.unwrap().into_inner();
    read.try_collect::<Vec<_>>().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stalled_read_of_a_replaced_table_is_charged_to_its_reader() {
    let (server, mut client) = server(&[]).await;
    // More than the window of a connection.
    let wide = || (0..24).map(|at| Arc::new(Int64Array::from_iter_values(at..at + 100_000)) as ArrayRef);
    let batches =
        || (0..4).map(|_| RecordBatch::try_from_iter(wide().enumerate().map(|(at, c)| (format!("c{at}"), c))).unwrap());
    put_by(&mut client, "ann", "t", batches().collect()).await.unwrap();
    let bytes = |tenant: &str| server.shared.catalog.usage(tenant).bytes;
    let of_table = bytes("ann");
    // What is not read fills the window of this connection.
    let mut reader = server.client().await;
    let info = reader.get_flight_info(by("bob", path("t"))).await.unwrap().into_inner();
    let mut reads = Vec::new();
    for endpoint in &info.endpoint {
        let ticket = endpoint.ticket.clone().unwrap();
        reads.push(reader.do_get(by("bob", ticket)).await.unwrap().into_inner());
    }
    assert_eq!((bytes("ann"), bytes("bob")), (of_table, 0));
    put_by(&mut client, "ann", "t", keyed(10, 10)).await.unwrap();
    assert!(bytes("ann") < of_table / 100, "{}", bytes("ann"));
    assert_eq!(bytes("bob"), of_table);
    drop(reads);
    eventually("the memory of the replaced table is free", async || bytes("bob") == 0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_job_of_another_tenant_cannot_be_told_from_none() {
    let (server, mut client) = server(&[]).await;
    put_by(&mut client, "ann", "t", vec![few_keys(30)]).await.unwrap();
    let info = client.get_flight_info(by("ann", join_kept_for(1000))).await.unwrap().into_inner();
    let job = server.shared.scheduler.jobs()[0].id;
    let missing = |id: &str| format!("there is no job {id}, or it was forgotten");
    for (action, more) in [("job", ""), ("job", ", \"wait_seconds\": 1"), ("cancel_job", ""), ("explain", "")] {
        for id in [job.to_string(), "4711".to_owned()] {
            let action = Action::new(action, format!("{{\"job\": {id}{more}}}"));
            let status = act_by(&mut client, "bob", action).await.unwrap_err();
            assert_eq!((status.code(), status.message()), (Code::NotFound, &*missing(&id)));
        }
    }
    // Tokens and tickets of the job that have come to another tenant.
    let poll = client.poll_flight_info(by("ann", join_kept_for(1000))).await.unwrap().into_inner();
    let poll_info: FlightInfo = poll.info.unwrap();
    let descriptor = poll_info.flight_descriptor.clone().unwrap();
    let (ticket, endpoint) = (info.endpoint[0].ticket.clone().unwrap(), info.endpoint[0].clone());
    let cancel = Action::new("CancelFlightInfo", CancelFlightInfoRequest::new(info).encode_to_vec());
    let renew = Action::new("RenewFlightEndpoint", RenewFlightEndpointRequest::new(endpoint).encode_to_vec());
    let answers = [
        client.get_flight_info(by("bob", descriptor.clone())).await.map(drop),
        client.poll_flight_info(by("bob", descriptor.clone())).await.map(drop),
        client.get_schema(by("bob", descriptor)).await.map(drop),
        client.do_get(by("bob", ticket)).await.map(drop),
        act_by(&mut client, "bob", cancel).await.map(drop),
        act_by(&mut client, "bob", renew).await.map(drop),
    ];
    for (at, answer) in answers.into_iter().enumerate() {
        let said = answer.unwrap_err();
        assert_eq!(said.code(), Code::NotFound, "{at}: {said}");
        assert!(
            said.message().contains("there is no job ") && said.message().ends_with(", or it was forgotten"),
            "{said}"
        );
    }
    assert_eq!(act_by(&mut client, "bob", Action::new("list_jobs", "")).await.unwrap().len(), 0);
    // The name of a table that a job makes.
    let name = server.shared.catalog.reserve("made", "ann", &format!("the result of job {job}")).unwrap();
    let upload = keep_open(&mut client, "bob", "made").await.map(drop);
    refused(upload, Code::AlreadyExists, "it is being made by another tenant");
    let upload = keep_open(&mut client, "ann", "made").await.map(drop);
    refused(upload, Code::AlreadyExists, "it is the result of job");
    drop(name);
}
