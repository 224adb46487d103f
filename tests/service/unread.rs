//! Streams whose clients send rows and read none of the result.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use arrow::array::RecordBatch;
use arrow_flight::FlightData;
use arrow_flight::encode::FlightDataEncoderBuilder;
use arrow_flight::error::FlightError;
use futures::{TryStreamExt, stream};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Streaming};

use crate::exchange::{batches_of, expect_nothing_left, join, received};
use crate::harness::*;
use crate::tenants::{by, put_by, server};

/// A stream of a tenant, over a connection of its own.
struct Stream {
    send: mpsc::Sender<FlightData>,
    answers: Streaming<FlightData>,
}

impl Stream {
    async fn begin(server: &TestServer, tenant: &str, first: &FlightData) -> Self {
        let (send, receive) = mpsc::channel(1);
        send.send(first.clone()).await.unwrap();
        let opened = server.client().await.do_exchange(by(tenant, ReceiverStream::new(receive))).await;
        Self { send, answers: opened.unwrap().into_inner() }
    }

    /// Asks a question, and waits for the end of its answer.
    async fn ask(&mut self, rows: &FlightData) {
        self.send.send(FlightData { app_metadata: "?".into(), ..rows.clone() }).await.expect("the stream goes on");
        loop {
            let answer = timeout(WAIT_LIMIT, self.answers.message()).await.expect("an answer comes");
            if answer.expect("the stream goes on").expect("the stream goes on").app_metadata == "?" {
                return;
            }
        }
    }
}

/// A stream whose client sends as much as the server takes, and reads nothing.
struct Silent {
    answers: Streaming<FlightData>,
    sending: JoinHandle<()>,
}

impl Silent {
    async fn begin(server: &TestServer, tenant: &str, first: &FlightData, rows: &FlightData) -> Self {
        let Stream { send, answers } = Stream::begin(server, tenant, first).await;
        let rows = rows.clone();
        let sending = tokio::spawn(async move { while send.send(rows.clone()).await.is_ok() {} });
        Self { answers, sending }
    }
}

async fn count_rows(answers: Streaming<FlightData>) -> Result<usize, FlightError> {
    batches_of(answers).try_fold(0, async |count, batch| Ok(count + batch.num_rows())).await
}

/// The first message of a stream, and one of `rows` rows, which each match a row of `keyed(1000, _)`.
async fn message_of(rows: usize) -> Vec<FlightData> {
    let thousand: Vec<RecordBatch> = keyed(1000, 1000).iter().cycle().take(rows / 1000).cloned().collect();
    let batch = arrow::compute::concat_batches(thousand[0].schema_ref(), &thousand).unwrap();
    let joined = join("names", "facts", r#", "stream": "right", "columns": ["k", "right.name"]"#);
    let encoder = FlightDataEncoderBuilder::new()
        .with_flight_descriptor(Some(command(&joined)))
        .with_schema(batch.schema())
        // The batch stays in one message.
        .with_max_flight_data_size(usize::MAX);
    encoder.build(stream::iter([Ok(batch)])).try_collect().await.unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_reads_nothing_is_held_back_and_holds_no_device() {
    /// An eighth of the host memory.
    const WINDOW: u64 = 32 << 20;
    /// Joined rows in messages that are on the way to the client.
    const ON_THE_WAY: u64 = 24 << 20;
    for batch_rows in [10_000, 50_000, 500_000] {
        let server = TestServer::start(&["--devices=host:1", "--host-memory=256MiB"]).await;
        let mut client = server.client().await;
        put(&mut client, "names", keyed(1000, 1000)).await.unwrap();
        let used = server.used_bytes().await;
        let sent = message_of(batch_rows).await;
        // A joined row takes about as much as the row that was sent.
        let message = sent[1].data_body.len() as u64;
        let most = WINDOW.max(message) + (WINDOW / 2).max(message * 5 / 4) + ON_THE_WAY;
        let (send, receive) = mpsc::channel(1);
        send.send(sent[0].clone()).await.unwrap();
        let answers = client.do_exchange(ReceiverStream::new(receive)).await.unwrap().into_inner();
        // Until the server takes no more for a second.
        let mut taken = 0;
        while timeout(Duration::from_secs(1), send.send(sent[1].clone())).await.is_ok() {
            taken += 1;
            let held = server.used_bytes().await - used;
            assert!(held < most, "{held} bytes are held after {taken} batches of {message} bytes, {most} at most");
            assert!(taken < 10_000, "the server takes rows whose results are not read");
        }
        let of_tenant = server.shared.catalog.usage("").bytes;
        let held = server.used_bytes().await;
        assert!(of_tenant + ON_THE_WAY >= held, "{of_tenant} of {held} bytes are charged");
        let found = get(&mut client, command(&join("names", "names", r#", "retain_seconds": 0"#))).await.unwrap();
        assert_eq!(rows(&found), 1000, "the device is free for others");
        let reading = tokio::spawn(received(answers));
        drop(send);
        assert_eq!(rows(&reading.await.unwrap().unwrap()) % batch_rows, 0);
        expect_nothing_left(&server, used).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_that_read_nothing_keep_no_one_waiting_and_lose_their_streams() {
    const SILENT: usize = 12;
    let (server, mut client) = server(&["--devices=host:1", "--host-memory=256MiB"]).await;
    put_by(&mut client, "ann", "names", keyed(1000, 1000)).await.unwrap();
    let used = server.used_bytes().await;
    let (bulk, question) = (message_of(100_000).await, message_of(1000).await);
    let mut ann = Stream::begin(&server, "ann", &bulk[0]).await;
    let mut bob = Stream::begin(&server, "bob", &bulk[0]).await;
    let mut silent = Vec::new();
    for _ in 0..SILENT {
        silent.push(Silent::begin(&server, "ann", &bulk[0], &bulk[1]).await);
    }
    // A stream of ann that sends as much as it can, and reads, beside them.
    let is_over = Arc::new(AtomicBool::new(false));
    let Stream { send, answers } = Stream::begin(&server, "ann", &bulk[0]).await;
    let sending = tokio::spawn({
        let (is_over, rows) = (is_over.clone(), bulk[1].clone());
        async move {
            let mut count = 0;
            while !is_over.load(Ordering::Relaxed) {
                send.send(rows.clone()).await.expect("a stream that reads goes on");
                count += 1;
            }
            count
        }
    });
    let reading = tokio::spawn(count_rows(answers));
    // Tables of bob need the memory of those that read nothing, until one of them has ended.
    let large: Vec<RecordBatch> = keyed(100_000, 100_000).iter().cycle().take(12).cloned().collect();
    let (mut held_max, mut charged_max, mut tables) = (0, 0, Vec::new());
    while server.shared.scheduler.stats().failed_total == 0 {
        ann.ask(&question[1]).await;
        bob.ask(&question[1]).await;
        let joined = join("names", "names", r#", "retain_seconds": 0"#);
        let info = timeout(WAIT_LIMIT, client.get_flight_info(by("bob", command(&joined)))).await;
        let info = info.expect("a join of bob is planned").unwrap().into_inner();
        let mut found = 0;
        for endpoint in info.endpoint {
            let answers = client.do_get(by("bob", endpoint.ticket.unwrap())).await.unwrap().into_inner();
            found += rows(&timeout(WAIT_LIMIT, received(answers)).await.expect("a join of bob runs").unwrap());
        }
        assert_eq!(found, 1000);
        let of_bob = server.shared.catalog.usage("bob").bytes;
        held_max = held_max.max((server.used_bytes().await - used).saturating_sub(of_bob));
        charged_max = charged_max.max(server.shared.catalog.usage("ann").bytes);
        // With the memory of all that have ended, the tables of bob may be too large.
        let (name, mut is_there) = (format!("large{}", tables.len()), false);
        eventually("bob gets the memory", async || {
            is_there = put_by(&mut client, "bob", &name, large.clone()).await.is_ok();
            is_there || server.shared.scheduler.stats().failed_total > 0
        })
        .await;
        tables.extend(is_there.then_some(name));
    }
    assert!(charged_max > held_max / 2, "{charged_max} bytes of {held_max} were charged to ann");
    ann.ask(&question[1]).await;
    bob.ask(&question[1]).await;
    is_over.store(true, Ordering::Relaxed);
    let count: usize = sending.await.unwrap();
    assert_eq!(reading.await.unwrap().unwrap(), count * 100_000);
    let mut ended = 0;
    for Silent { answers, sending } in silent {
        sending.abort();
        if let Err(FlightError::Tonic(status)) = count_rows(answers).await {
            assert_eq!(status.code(), Code::ResourceExhausted, "{status}");
            assert!(status.message().contains("its client read nothing for"), "{status}");
            ended += 1;
        }
    }
    assert!(ended > 0);
    drop((ann, bob));
    for name in tables {
        let dropped = arrow_flight::Action::new("drop_table", format!(r#"{{"name": "{name}"}}"#));
        client.do_action(by("bob", dropped)).await.unwrap();
    }
    expect_nothing_left(&server, used).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rows_that_wait_are_bounded_by_the_limit_of_the_tenant() {
    const LIMIT: u64 = 32 << 20;
    /// Messages and joined rows beyond the limit: one message of each stream, and its result.
    const BEYOND: u64 = 4 * 3 * (3 << 20);
    let (server, mut client) = server(&["--devices=host:1", "--tenant-results=32MiB"]).await;
    put_by(&mut client, "ann", "names", keyed(1000, 1000)).await.unwrap();
    let used = server.used_bytes().await;
    let (bulk, question) = (message_of(100_000).await, message_of(1000).await);
    let message = bulk[1].data_body.len() as u64;
    assert!(message < 3 << 20);
    let mut ann = Stream::begin(&server, "ann", &bulk[0]).await;
    let mut silent = Vec::new();
    for _ in 0..4 {
        silent.push(Silent::begin(&server, "ann", &bulk[0], &bulk[1]).await);
    }
    let (mut is_charged, mut rounds) = (false, 0);
    eventually("their rows are charged to ann", async || {
        ann.ask(&question[1]).await;
        let held = server.used_bytes().await - used;
        assert!(held < LIMIT + BEYOND, "{held} bytes");
        // Each holds the joined rows of a message at least.
        is_charged |= server.shared.catalog.usage("ann").bytes > 2 * message;
        rounds += 1;
        is_charged && rounds >= 50
    })
    .await;
    drop(ann);
    for Silent { answers, sending } in silent {
        sending.abort();
        // A client that only drops the call sends no sign of that while the server takes no rows.
        let _ended = count_rows(answers).await;
    }
    expect_nothing_left(&server, used).await;
}
