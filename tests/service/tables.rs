//! Tables: upload, list, describe, download, drop.

use arrow::compute::concat_batches;
use arrow::datatypes::Schema;
use arrow_flight::{Criteria, PutResult};
use futures::TryStreamExt;
use serde_json::Value;
use tonic::Code;

use crate::harness::*;

fn ack(result: &PutResult) -> (u64, u64) {
    let json: Value = serde_json::from_slice(&result.app_metadata).unwrap();
    (json["rows"].as_u64().unwrap(), json["bytes"].as_u64().unwrap())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_table_is_uploaded_and_fetched_unchanged() {
    let server = TestServer::start(&[]).await;
    let mut client = server.client().await;
    for (name, rows, batch_rows) in [("none", 0, 1), ("one", 1, 1), ("few", 10, 3), ("many", 500_000, 100_000)] {
        let batches = keyed(rows, batch_rows);
        let acks = put(&mut client, name, batches.clone()).await.unwrap();
        assert_eq!(ack(acks.last().unwrap()).0, rows as u64, "{name}");
        let schema = batches[0].schema();
        let back = get(&mut client, path(name)).await.unwrap();
        assert_eq!(concat_batches(&schema, &back).unwrap(), concat_batches(&schema, &batches).unwrap(), "{name}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_table_is_listed_and_described_until_it_is_dropped() {
    let server = TestServer::start(&["--endpoints=3"]).await;
    let mut client = server.client().await;
    put(&mut client, "people", keyed(1000, 100)).await.unwrap();
    put(&mut client, "places", keyed(10, 100)).await.unwrap();

    let all = Criteria::default();
    let infos: Vec<_> = client.list_flights(all.clone()).await.unwrap().into_inner().try_collect().await.unwrap();
    let names: Vec<_> = infos.iter().map(|info| info.flight_descriptor.clone().unwrap().path[0].clone()).collect();
    assert_eq!(names, ["people", "places"]);
    assert_eq!((infos[0].total_records, infos[0].endpoint.len(), infos[0].ordered), (1000, 3, true));
    assert!(infos[0].total_bytes > 8000);
    let prefixed = Criteria { expression: "pl".into() };
    let infos: Vec<_> = client.list_flights(prefixed).await.unwrap().into_inner().try_collect().await.unwrap();
    assert_eq!(infos.len(), 1);

    let schema = client.get_schema(path("people")).await.unwrap().into_inner();
    assert_eq!(Schema::try_from(schema).unwrap(), *keyed(0, 1)[0].schema());

    assert!(act(&mut client, "drop_table", r#"{"name": "people"}"#).await.unwrap()[0].contains("people"));
    refused(get(&mut client, path("people")).await, Code::NotFound, "people");
    refused(act(&mut client, "drop_table", r#"{"name": "people"}"#).await, Code::NotFound, "people");
    let infos: Vec<_> = client.list_flights(all).await.unwrap().into_inner().try_collect().await.unwrap();
    assert_eq!(infos.len(), 1);
}
