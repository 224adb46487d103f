//! Tickets: whose, for how long, and for which rows.

use arrow_flight::{Action, FlightEndpoint, RenewFlightEndpointRequest};
use futures::TryStreamExt;
use prost::Message;
use tonic::Code;

use crate::harness::*;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_expired_ticket_is_not_found_and_a_renewed_one_reads() {
    let server = TestServer::start(&["--ticket-seconds=1"]).await;
    let mut client = server.client().await;
    put(&mut client, "t", keyed(10, 10)).await.unwrap();
    let info = client.get_flight_info(path("t")).await.unwrap().into_inner();
    let endpoint = info.endpoint[0].clone();
    let ticket = endpoint.ticket.clone().unwrap();
    assert_eq!(rows(&read(&mut client, ticket.clone()).await.unwrap()), 10);
    // Renewed before it expires, which is a second from the request.
    let renewed = renew(&mut client, endpoint).await.unwrap();
    assert_eq!(rows(&read(&mut client, renewed.ticket.unwrap()).await.unwrap()), 10);
    tokio::time::sleep(std::time::Duration::from_millis(1100)).await;
    refused(read(&mut client, ticket).await, Code::NotFound, "expired");
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
