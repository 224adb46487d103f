//! Joins with rows that arrive in the call: DoExchange.

use std::sync::Arc;
use std::time::Duration;

use arrow::array::{ArrayRef, DictionaryArray, Int64Array, RecordBatch, StringArray};
use arrow::datatypes::Int8Type;
use arrow::util::display::{ArrayFormatter, FormatOptions};
use arrow_flight::FlightData;
use arrow_flight::decode::FlightRecordBatchStream;
use arrow_flight::encode::{DictionaryHandling, FlightDataEncoderBuilder};
use arrow_flight::error::FlightError;
use futures::{StreamExt, TryStreamExt, stream};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Status};

use crate::harness::*;

const KINDS: [&str; 8] = ["inner", "left", "right", "full", "left_semi", "left_anti", "right_semi", "right_anti"];

/// Rows with a key, which may be null, a number and a word. `words`: each batch has a dictionary of its
/// own.
fn facts(random: &mut StdRng, rows: usize, keys: i64, words: &str) -> RecordBatch {
    let key = |random: &mut StdRng| (!random.random_ratio(1, 9)).then(|| random.random_range(0..keys));
    let columns: [(&str, ArrayRef); 3] = [
        ("k", Arc::new(Int64Array::from_iter((0..rows).map(|_| key(random))))),
        ("v", Arc::new(Int64Array::from_iter_values((0..rows as i64).map(|row| row * 7)))),
        (
            "word",
            Arc::new(
                (0..rows)
                    .map(|row| Some(format!("{words}{}", row % 3)))
                    .collect::<Vec<_>>()
                    .iter()
                    .map(|word| word.as_deref())
                    .collect::<DictionaryArray<Int8Type>>(),
            ),
        ),
    ];
    RecordBatch::try_from_iter_with_nullable(columns.map(|(name, column)| (name, column, true))).unwrap()
}

/// Rows with a key and a name.
fn named(random: &mut StdRng, rows: usize, keys: i64) -> RecordBatch {
    let key = |random: &mut StdRng| (!random.random_ratio(1, 9)).then(|| random.random_range(0..keys));
    let columns: [(&str, ArrayRef); 2] = [
        ("k", Arc::new(Int64Array::from_iter((0..rows).map(|_| key(random))))),
        ("name", Arc::new(StringArray::from_iter((0..rows).map(|row| (row % 4 > 0).then(|| format!("name {row}")))))),
    ];
    RecordBatch::try_from_iter_with_nullable(columns.map(|(name, column)| (name, column, true))).unwrap()
}

/// The rows as text, in an order of their own.
fn sorted(batches: &[RecordBatch]) -> Vec<String> {
    let options = FormatOptions::default().with_null("null");
    let mut rows = Vec::new();
    for batch in batches {
        let columns: Vec<_> =
            batch.columns().iter().map(|column| ArrayFormatter::try_new(column, &options).unwrap()).collect();
        rows.extend(
            (0..batch.num_rows())
                .map(|row| columns.iter().map(|column| column.value(row).to_string()).collect::<Vec<_>>().join("|")),
        );
    }
    rows.sort_unstable();
    rows
}

/// The messages of a call: command and schema, then batches.
pub async fn messages(command: &str, batches: &[RecordBatch]) -> Vec<FlightData> {
    let encoder = FlightDataEncoderBuilder::new()
        .with_flight_descriptor(Some(crate::harness::command(command)))
        .with_schema(batches[0].schema())
        .with_dictionary_handling(DictionaryHandling::Resend);
    encoder.build(stream::iter(batches.to_vec()).map(Ok)).try_collect().await.unwrap()
}

pub async fn exchange(client: &mut Client, messages: Vec<FlightData>) -> Result<Vec<RecordBatch>, Status> {
    received(client.do_exchange(stream::iter(messages)).await?.into_inner()).await
}

/// Begins a call with its first message. Returns the sender of the others, and the answers.
async fn begin(client: &mut Client, first: &FlightData) -> (mpsc::Sender<FlightData>, tonic::Streaming<FlightData>) {
    let (send, receive) = mpsc::channel(1);
    send.send(first.clone()).await.unwrap();
    let answers = client.do_exchange(ReceiverStream::new(receive)).await.unwrap().into_inner();
    (send, answers)
}

pub fn batches_of(answers: tonic::Streaming<FlightData>) -> FlightRecordBatchStream {
    FlightRecordBatchStream::new_from_flight_data(answers.map_err(FlightError::from))
}

pub async fn received(messages: tonic::Streaming<FlightData>) -> Result<Vec<RecordBatch>, Status> {
    batches_of(messages).try_collect().await.map_err(|error| match error {
        FlightError::Tonic(status) => *status,
        other => panic!("the server sent what cannot be decoded: {other}"),
    })
}

pub fn join(left: &str, right: &str, more: &str) -> String {
    format!(r#"{{"join": {{"left": "{left}", "right": "{right}", "on": [{{"left": "k", "right": "k"}}]{more}}}}}"#)
}

pub async fn expect_nothing_left(server: &TestServer, used: u64) {
    let scheduler = &server.shared.scheduler;
    eventually("no job is left", async || scheduler.stats().running == 0 && scheduler.stats().queued == 0).await;
    server.expect_used_bytes(used).await;
    for device in &server.shared.devices {
        eventually("the device's memory is free", async || device.memory().used_bytes() == 0).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rows_that_arrive_are_joined_as_those_of_a_table() {
    let server = TestServer::start(&["--device-cache=0"]).await;
    let mut client = server.client().await;
    let mut random = StdRng::seed_from_u64(dovetail_seed());
    put(&mut client, "names", vec![named(&mut random, 700, 500), named(&mut random, 300, 500)]).await.unwrap();
    let sizes = [0, 1, 999, 0, 20_000, 3, 4_000];
    let batches: Vec<_> =
        sizes.iter().enumerate().map(|(at, &rows)| facts(&mut random, rows, 600, &format!("w{}", at / 3))).collect();
    put(&mut client, "facts", batches.clone()).await.unwrap();
    let used = server.used_bytes().await;
    for how in KINDS {
        for (left, right, side) in [("names", "facts", "right"), ("facts", "names", "left")] {
            let more = format!(r#", "how": "{how}""#);
            let expected = sorted(
                &get(&mut client, command(&join(left, right, &format!("{more}, \"retain_seconds\": 0"))))
                    .await
                    .unwrap(),
            );
            let streamed = join(left, right, &format!(r#"{more}, "stream": "{side}""#));
            let found = exchange(&mut client, messages(&streamed, &batches).await).await.unwrap();
            assert!(
                sorted(&found) == expected,
                "{how}, {side} side streamed: {} rows, not {}",
                rows(&found),
                expected.len()
            );
        }
    }
    expect_nothing_left(&server, used).await;
}

fn dovetail_seed() -> u64 {
    std::env::var("DOVETAIL_SEED").map_or(5, |seed| seed.parse().expect("DOVETAIL_SEED is a number"))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rows_come_back_before_the_next_are_sent() {
    let server = TestServer::start(&[]).await;
    let mut client = server.client().await;
    put(&mut client, "names", keyed(100, 100)).await.unwrap();
    let used = server.used_bytes().await;
    let sent = messages(&join("names", "facts", r#", "stream": "right""#), &keyed(100, 10)).await;
    let (send, answers) = begin(&mut client, &sent[0]).await;
    let mut batches = batches_of(answers);
    for message in &sent[1..] {
        send.send(message.clone()).await.unwrap();
        let mut found = 0;
        while found < 10 {
            found += batches.next().await.unwrap().unwrap().num_rows();
        }
        assert_eq!(found, 10);
        assert_eq!(server.shared.scheduler.stats().running, 1, "the stream is a job that runs");
    }
    drop(send);
    assert!(batches.all(async |batch| batch.unwrap().num_rows() == 0).await);
    expect_nothing_left(&server, used).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_streams_share_a_device_with_other_joins() {
    const STREAMS: usize = 16;
    let server = TestServer::start(&["--devices=host:1"]).await;
    let mut client = server.client().await;
    put(&mut client, "names", keyed(1000, 1000)).await.unwrap();
    let used = server.used_bytes().await;
    let sent = messages(&join("names", "facts", r#", "stream": "right""#), &keyed(1000, 100)).await;
    let mut open = Vec::new();
    for _ in 0..STREAMS {
        let (send, answers) = begin(&mut server.client().await, &sent[0]).await;
        open.push((send, tokio::spawn(received(answers))));
    }
    // Quiet streams hold no slot.
    let found = get(&mut client, command(&join("names", "names", r#", "retain_seconds": 0"#))).await.unwrap();
    assert_eq!(rows(&found), 1000);
    for message in &sent[1..] {
        for (send, _) in &open {
            send.send(message.clone()).await.unwrap();
        }
    }
    for (send, answers) in open {
        drop(send);
        assert_eq!(rows(&answers.await.unwrap().unwrap()), 1000);
    }
    expect_nothing_left(&server, used).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_quiet_stream_leaves_its_device_memory_to_other_joins() {
    let server = TestServer::start(&["--devices=host:1", "--device-memory=4MiB", "--device-cache=0"]).await;
    let mut client = server.client().await;
    put(&mut client, "names", keyed(10_000, 10_000)).await.unwrap();
    put(&mut client, "large", keyed(150_000, 50_000)).await.unwrap();
    let used = server.used_bytes().await;
    let sent = messages(&join("names", "facts", r#", "stream": "right""#), &keyed(100, 50)).await;
    let (send, answers) = begin(&mut client, &sent[0]).await;
    let mut batches = batches_of(answers);
    send.send(sent[1].clone()).await.unwrap();
    while batches.next().await.unwrap().unwrap().num_rows() == 0 {}
    let memory = server.shared.devices[0].memory();
    assert!(memory.used_bytes() > 0, "the build side stays on the device");
    let found = get(&mut client, command(&join("large", "large", r#", "retain_seconds": 0"#))).await.unwrap();
    assert_eq!(rows(&found), 150_000);
    send.send(sent[2].clone()).await.unwrap();
    while batches.next().await.unwrap().unwrap().num_rows() == 0 {}
    drop(send);
    assert!(batches.all(async |batch| batch.unwrap().num_rows() == 0).await);
    expect_nothing_left(&server, used).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_goes_away_or_sends_garbage_leaves_nothing() {
    let server = TestServer::start(&[]).await;
    let mut client = server.client().await;
    put(&mut client, "names", keyed(1000, 1000)).await.unwrap();
    let used = server.used_bytes().await;
    let sent = messages(&join("names", "facts", r#", "stream": "right""#), &keyed(1000, 100)).await;
    // The client goes away, at each message.
    for count in 1..sent.len() {
        let (send, receive) = mpsc::channel(sent.len());
        for message in &sent[..count] {
            send.send(message.clone()).await.unwrap();
        }
        let answers = client.do_exchange(ReceiverStream::new(receive)).await.unwrap().into_inner();
        drop(answers);
    }
    expect_nothing_left(&server, used).await;
    // Garbage in place of each message.
    for at in 1..sent.len() {
        let mut sent = sent.clone();
        sent[at].data_body = vec![1, 2, 3].into();
        refused(exchange(&mut client, sent).await, Code::InvalidArgument, "the rows of \"facts\"");
    }
    let other = messages(&join("names", "facts", ""), &[few_keys(10)]).await;
    let mixed = [sent[..2].to_vec(), other[1..].to_vec()].concat();
    refused(exchange(&mut client, mixed).await, Code::InvalidArgument, "the rows of \"facts\"");
    let mut described = sent.clone();
    described[0].app_metadata = "7".into();
    refused(exchange(&mut client, described).await, Code::InvalidArgument, "app_metadata");
    // A message of a dictionary, before its batch.
    let command = join("names", "facts", r#", "stream": "right", "columns": ["k", "word"]"#);
    let sent = messages(&command, &[facts(&mut StdRng::seed_from_u64(7), 100, 100, "word")]).await;
    assert_eq!(sent.len(), 3);
    let mut of_dictionary = sent.clone();
    of_dictionary[1].app_metadata = "7".into();
    refused(exchange(&mut client, of_dictionary.clone()).await, Code::InvalidArgument, "app_metadata");
    of_dictionary.truncate(2);
    refused(exchange(&mut client, of_dictionary).await, Code::InvalidArgument, "app_metadata");
    // The schema and the dictionary may repeat what their batch has.
    let mut repeated = sent.clone();
    repeated[..3].iter_mut().for_each(|message| message.app_metadata = "7".into());
    let answers = client.do_exchange(stream::iter(repeated)).await.unwrap().into_inner();
    let answers: Vec<FlightData> = answers.try_collect().await.unwrap();
    assert_eq!(answers.iter().filter(|message| message.app_metadata == "7").count(), 1);
    drop(answers);
    expect_nothing_left(&server, used).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_command_that_cannot_be_streamed_is_refused() {
    let server = TestServer::start(&["--devices=host:2"]).await;
    let mut client = server.client().await;
    put(&mut client, "names", keyed(10, 10)).await.unwrap();
    let used = server.used_bytes().await;
    for (more, code, words) in [
        ("", Code::InvalidArgument, "which side arrives"),
        (r#", "stream": "both""#, Code::InvalidArgument, "\"left\" or \"right\""),
        (r#", "stream": "left""#, Code::NotFound, "there is no table \"facts\""),
        (r#", "stream": "right", "into": "x""#, Code::Unimplemented, "\"into\""),
        (r#", "stream": "right", "count": true"#, Code::Unimplemented, "\"count\""),
        (r#", "stream": "right", "retain_seconds": 5"#, Code::Unimplemented, "\"retain_seconds\""),
        (r#", "stream": "right", "devices": 2"#, Code::Unimplemented, "one device"),
        (r#", "stream": "right", "columns": ["no"]"#, Code::InvalidArgument, "neither table has a column"),
    ] {
        let sent = messages(&join("names", "facts", more), &keyed(10, 10)).await;
        refused(exchange(&mut client, sent).await, code, words);
    }
    let streamed = join("names", "facts", r#", "stream": "right""#);
    let not_here = client.get_flight_info(command(&streamed)).await;
    refused(not_here, Code::InvalidArgument, "DoExchange");
    let explained = act(&mut client, "explain", &streamed).await;
    refused(explained, Code::NotFound, "columns from the table of that name");
    refused(exchange(&mut client, Vec::new()).await, Code::InvalidArgument, "before the schema");
    let mut no_command = messages(&streamed, &keyed(10, 10)).await;
    no_command[0].flight_descriptor = Some(path("names"));
    refused(exchange(&mut client, no_command).await, Code::InvalidArgument, "takes a join command");
    expect_nothing_left(&server, used).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_message_is_limited_and_a_stream_is_not() {
    let server = TestServer::start(&["--message-limit=1MiB", "--call-memory=16MiB"]).await;
    let mut client = server.client().await;
    put(&mut client, "names", keyed(1000, 1000)).await.unwrap();
    let used = server.used_bytes().await;
    let streamed = join("names", "facts", r#", "stream": "right""#);
    let sent = messages(&streamed, &keyed(1000, 1000)).await;
    let many: Vec<_> = sent[1..].iter().cycle().take(2000).cloned().collect();
    let bytes: usize = many.iter().map(|message| message.data_body.len()).sum();
    assert!(bytes > 16 << 20, "{bytes} bytes are no more than a request may have");
    let found = exchange(&mut client, [&sent[..1], &many].concat()).await.unwrap();
    assert_eq!(rows(&found), many.len() * 1000);
    let mut large = sent.clone();
    large[1].data_body = vec![0; 2 << 20].into();
    refused(exchange(&mut client, large).await, Code::ResourceExhausted, "--message-limit");
    expect_nothing_left(&server, used).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_may_pause_between_messages() {
    let server = TestServer::start(&["--upload-idle-seconds=1"]).await;
    let mut client = server.client().await;
    put(&mut client, "names", keyed(1000, 1000)).await.unwrap();
    let used = server.used_bytes().await;
    let sent = messages(&join("names", "facts", r#", "stream": "right""#), &keyed(1000, 1000)).await;
    let (send, answers) = begin(&mut client, &sent[0]).await;
    let reading = tokio::spawn(received(answers));
    for message in &sent[1..] {
        tokio::time::sleep(Duration::from_millis(1500)).await;
        send.send(message.clone()).await.unwrap();
    }
    drop(send);
    assert_eq!(rows(&reading.await.unwrap().unwrap()), 1000 * (sent.len() - 1));
    expect_nothing_left(&server, used).await;
}
