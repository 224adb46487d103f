//! Uploads in modes, in several streams, and within limits.

use std::sync::{Arc, mpsc};
use std::thread::ThreadId;
use std::time::SystemTime;

use arrow::array::{ArrayRef, Int64Array, RecordBatch, UInt8Array};
use arrow::buffer::{Buffer, ScalarBuffer};
use bytes::Bytes;
use dovetail::catalog::Table;
use tonic::Code;
use tonic::codec::CompressionEncoding;

use crate::harness::*;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn modes_create_replace_and_append() {
    let server = TestServer::start(&[]).await;
    let mut client = server.client().await;
    let count = async |client: &mut Client| rows(&get(client, path("t")).await.unwrap());
    put_with(&mut client, "t", keyed(10, 10), r#"{"mode": "create_if_missing"}"#).await.unwrap();
    put_with(&mut client, "t", keyed(10, 10), r#"{"mode": "create_if_missing"}"#).await.unwrap();
    assert_eq!(count(&mut client).await, 20);
    put_with(&mut client, "t", keyed(5, 10), r#"{"mode": "append"}"#).await.unwrap();
    assert_eq!(count(&mut client).await, 25);
    put_with(&mut client, "t", keyed(7, 10), r#"{"mode": "replace"}"#).await.unwrap();
    assert_eq!(count(&mut client).await, 7);
    refused(put(&mut client, "t", keyed(7, 10)).await, Code::AlreadyExists, "\"t\"");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn several_streams_make_one_table_at_the_commit_or_none_at_the_abort() {
    let server = TestServer::start(&[]).await;
    let mut client = server.client().await;
    for id in ["kept", "thrown"] {
        let streams = (0..4).map(|part| {
            let mut client = client.clone();
            async move {
                let options = format!(r#"{{"upload": "{id}", "part": {part}}}"#);
                put_with(&mut client, id, keyed(1000, 100), &options).await
            }
        });
        for outcome in futures::future::join_all(streams).await {
            outcome.unwrap();
        }
        refused(client.get_flight_info(path(id)).await, Code::NotFound, id);
    }
    act(&mut client, "abort_upload", r#"{"upload": "thrown"}"#).await.unwrap();
    let committed = act(&mut client, "commit_upload", r#"{"upload": "kept"}"#).await.unwrap();
    assert!(committed[0].contains("\"rows\":4000"), "{committed:?}");
    assert_eq!(rows(&get(&mut client, path("kept")).await.unwrap()), 4000);
    refused(client.get_flight_info(path("thrown")).await, Code::NotFound, "thrown");
    act(&mut client, "drop_table", r#"{"name": "kept"}"#).await.unwrap();
    server.expect_used_bytes(0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn quotas_of_a_tenant_are_enforced() {
    let server = TestServer::start(&["--tenant-memory=1MiB", "--tenant-tables=2", "--upload-limit=8"]).await;
    let mut client = server.client().await;
    refused(put(&mut client, "big", keyed(1_000_000, 50_000)).await, Code::ResourceExhausted, "tenant");
    server.expect_used_bytes(0).await;
    put(&mut client, "one", keyed(10, 10)).await.unwrap();
    put(&mut client, "two", keyed(10, 10)).await.unwrap();
    refused(put(&mut client, "three", keyed(10, 10)).await, Code::ResourceExhausted, "table");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_tenant_with_a_small_quota_reads_results_of_any_size() {
    let server = TestServer::start(&["--tenant-memory=2MiB"]).await;
    let mut client = server.client().await;
    put(&mut client, "t", vec![few_keys(2000)]).await.unwrap();
    let join = |more: &str| {
        command(&format!(r#"{{"join": {{"left": "t", "right": "t", "on": [{{"left": "k", "right": "k"}}]{more}}}}}"#))
    };
    // One and a third million rows of 8 bytes exceed the tenant's memory and the size of a message.
    assert_eq!(rows(&get(&mut client, join(r#", "retain_seconds": 0"#)).await.unwrap()), 1_333_334);
    refused(get(&mut client, join("")).await, Code::ResourceExhausted, "--tenant-memory");
    // A small result is retained.
    put(&mut client, "u", vec![few_keys(30)]).await.unwrap();
    let small = r#"{"join": {"left": "u", "right": "u", "on": [{"left": "k", "right": "k"}]}}"#;
    assert_eq!(rows(&get(&mut client, command(small)).await.unwrap()), 300);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn messages_compressed_by_grpc_are_accepted() {
    let server = TestServer::start(&[]).await;
    for (name, encoding) in [("g", CompressionEncoding::Gzip), ("z", CompressionEncoding::Zstd)] {
        let mut client = server.client().await.send_compressed(encoding);
        put(&mut client, name, keyed(1000, 100)).await.unwrap();
        assert_eq!(rows(&get(&mut server.client().await, path(name)).await.unwrap()), 1000);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn acknowledgements_count_the_bytes_of_the_rows_once() {
    let server = TestServer::start(&[]).await;
    let mut client = server.client().await;
    let (columns, row_count, batch_count) = (200, 1000, 3);
    let column: ArrayRef = Arc::new(Int64Array::from_iter_values(0..row_count));
    let batch = RecordBatch::try_from_iter((0..columns).map(|index| (format!("c{index}"), column.clone()))).unwrap();
    let acks = put(&mut client, "wide", vec![batch; batch_count]).await.unwrap();
    let last: serde_json::Value = serde_json::from_slice(&acks.last().unwrap().app_metadata).unwrap();
    assert_eq!(last["bytes"], columns * row_count * 8 * batch_count as i64);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_temporary_table_of_several_streams_is_limited_as_one() {
    let server = TestServer::start(&["--devices=host:1", "--device-memory=256KiB"]).await;
    let mut client = server.client().await;
    for (life, takes_both) in [("", true), (r#", "temporary_seconds": 60"#, false)] {
        // A part takes about 90 KiB, and a build side may take 128.
        let mut parts = Vec::new();
        for part in 0..2 {
            let options = format!(r#"{{"upload": "of{takes_both}", "part": {part}{life}}}"#);
            parts.push(put_with(&mut client, &format!("t{takes_both}"), keyed(4000, 1000), &options).await);
        }
        let [first, second] = parts.try_into().unwrap();
        first.unwrap();
        match takes_both {
            true => drop(second.unwrap()),
            false => refused(second, Code::ResourceExhausted, "the rows of temporary table"),
        }
    }
}

/// Value of a column, which tells the thread that drops it.
struct Told(mpsc::Sender<ThreadId>);

impl AsRef<[u8]> for Told {
    fn as_ref(&self) -> &[u8] {
        &[7]
    }
}

impl Drop for Told {
    fn drop(&mut self) {
        let _ = self.0.send(std::thread::current().id());
    }
}

/// The calls of this server have one thread, which must not do long work.
#[tokio::test]
async fn a_table_whose_time_is_over_is_freed_on_a_thread_without_calls() {
    let server = TestServer::start(&[]).await;
    let (tell, told) = mpsc::channel();
    let values = ScalarBuffer::<u8>::from(Buffer::from(Bytes::from_owner(Told(tell))));
    let column: ArrayRef = Arc::new(UInt8Array::new(values, None));
    let batch = RecordBatch::try_from_iter([("v", column)]).unwrap();
    let mut table = Table::from_batches("t", batch.schema(), vec![batch]).unwrap();
    table.expires = Some(SystemTime::now());
    server.shared.catalog.create(table).unwrap();
    let mut freed_by = None;
    eventually("the table is freed", async || {
        freed_by = told.try_recv().ok();
        freed_by.is_some()
    })
    .await;
    assert_ne!(freed_by, Some(std::thread::current().id()));
}
