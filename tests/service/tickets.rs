//! Tickets: owner, lifetime and rows.

use std::time::Duration;

use arrow_flight::{Action, FlightEndpoint, RenewFlightEndpointRequest};
use dovetail::scheduler::JobId;
use futures::TryStreamExt;
use prost::Message;
use tonic::Code;

use crate::harness::*;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_renewed_ticket_expires_later_and_both_tickets_are_valid() {
    let server = TestServer::start(&[]).await;
    let mut client = server.client().await;
    put(&mut client, "t", keyed(10, 10)).await.unwrap();
    let info = client.get_flight_info(path("t")).await.unwrap().into_inner();
    let endpoint = info.endpoint[0].clone();
    // The server reports times with a resolution of a millisecond or better.
    tokio::time::sleep(Duration::from_millis(5)).await;
    let renewed = renew(&mut client, endpoint.clone()).await.unwrap();
    let expiry = |endpoint: &FlightEndpoint| {
        let time = endpoint.expiration_time.as_ref().expect("an endpoint of ours expires");
        (time.seconds, time.nanos)
    };
    assert!(expiry(&renewed) > expiry(&endpoint), "{renewed:?} is no later than {endpoint:?}");
    for endpoint in [endpoint, renewed] {
        assert_eq!(rows(&read(&mut client, endpoint.ticket.unwrap()).await.unwrap()), 10);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn renewing_an_endpoint_of_a_result_extends_its_lease() {
    let server = TestServer::start(&[]).await;
    let mut client = server.client().await;
    put(&mut client, "t", keyed(1000, 100)).await.unwrap();
    let join = r#"{"join": {"left": "t", "right": "t", "on": [{"left": "k", "right": "k"}], "retain_seconds": 100}}"#;
    let info = client.get_flight_info(command(join)).await.unwrap().into_inner();
    assert_eq!(rows(&read_all(&mut client, &info).await.unwrap()), 1000);
    let said: serde_json::Value = serde_json::from_slice(&info.app_metadata).unwrap();
    let job = server.shared.scheduler.job(JobId(said["job"].as_u64().unwrap())).unwrap();
    // The result is complete, or will be soon, because it was read to its end.
    eventually("the lease has begun", async || job.result.expires().is_some()).await;
    let before = job.result.expires().unwrap();
    tokio::time::sleep(Duration::from_millis(5)).await;
    let renewed = renew(&mut client, info.endpoint[0].clone()).await.unwrap();
    let after = job.result.expires().unwrap();
    assert!(after > before, "the lease ended at {before:?}, and ends at {after:?} now");
    let told = std::time::SystemTime::try_from(renewed.expiration_time.unwrap()).unwrap();
    assert_eq!(told, after, "what is told is when the lease ends");
    assert!(!read(&mut client, renewed.ticket.unwrap()).await.unwrap().is_empty());
    // The lease of a released result cannot be renewed.
    act(&mut client, "cancel_job", &format!(r#"{{"job": {}}}"#, said["job"])).await.unwrap();
    refused(renew(&mut client, info.endpoint[0].clone()).await, Code::NotFound, "job");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_expired_ticket_is_not_found() {
    let server = TestServer::start(&["--ticket-seconds=1"]).await;
    let mut client = server.client().await;
    put(&mut client, "t", keyed(10, 10)).await.unwrap();
    let info = client.get_flight_info(path("t")).await.unwrap().into_inner();
    tokio::time::sleep(Duration::from_millis(1100)).await;
    refused(read_all(&mut client, &info).await, Code::NotFound, "expired");
}

async fn renew(client: &mut Client, endpoint: FlightEndpoint) -> Result<FlightEndpoint, tonic::Status> {
    let request = RenewFlightEndpointRequest::new(endpoint);
    let action = Action::new("RenewFlightEndpoint", request.encode_to_vec());
    let results: Vec<_> = client.do_action(action).await?.into_inner().try_collect().await?;
    Ok(FlightEndpoint::decode(&*results[0].body).unwrap())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_ticket_of_a_table_that_was_replaced_is_refused() {
    let server = TestServer::start(&[]).await;
    let mut client = server.client().await;
    put(&mut client, "t", keyed(10, 10)).await.unwrap();
    let info = client.get_flight_info(path("t")).await.unwrap().into_inner();
    put_with(&mut client, "t", keyed(20, 10), r#"{"mode": "replace"}"#).await.unwrap();
    refused(read_all(&mut client, &info).await, Code::FailedPrecondition, "GetFlightInfo again");
    let request = RenewFlightEndpointRequest::new(info.endpoint[0].clone());
    let renewal = Action::new("RenewFlightEndpoint", request.encode_to_vec());
    refused(client.do_action(renewal).await.map(|_| ()), Code::FailedPrecondition, "GetFlightInfo again");
    assert_eq!(rows(&get(&mut client, path("t")).await.unwrap()), 20);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_ticket_of_another_server_is_refused() {
    let (one, other) = (TestServer::start(&[]).await, TestServer::start(&[]).await);
    let (mut client, mut other_client) = (one.client().await, other.client().await);
    put(&mut client, "t", keyed(10, 10)).await.unwrap();
    put(&mut other_client, "t", keyed(10, 10)).await.unwrap();
    let info = client.get_flight_info(path("t")).await.unwrap().into_inner();
    refused(read_all(&mut other_client, &info).await, Code::InvalidArgument, "not a ticket of this server");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn endpoints_spread_over_the_public_locations() {
    let server = TestServer::start(&["--endpoints=4", "--public-locations=grpc://a:1,grpc://b:1"]).await;
    let mut client = server.client().await;
    put(&mut client, "t", keyed(1000, 100)).await.unwrap();
    let info = client.get_flight_info(path("t")).await.unwrap().into_inner();
    let uris: Vec<_> = info.endpoint.iter().map(|endpoint| endpoint.location[0].uri.as_str()).collect();
    assert_eq!(uris, ["grpc://a:1", "grpc://b:1", "grpc://a:1", "grpc://b:1"]);
    assert!(info.endpoint.iter().all(|endpoint| endpoint.expiration_time.is_some()));
}
