//! Tests of an upload's life: the calls to its sink, the answers to its client, and its end.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use futures::StreamExt;
use http::{Extensions, HeaderMap, HeaderValue};
use parking_lot::Mutex;
use tonic::Status;

use super::*;
use crate::Error;
use crate::service::ingest::respond::Acks;
use crate::service::ingest::upload::timeout;
use crate::service::ingest::{Ack, UploadHandler, UploadSink, upload_messages};
use crate::testing::wait_in_task_until;

/// Stores uploaded batches, and counts live sinks.
#[derive(Debug, Default)]
pub struct Keeper {
    pub tables: Mutex<Vec<(String, Vec<RecordBatch>)>>,
    pub sinks: Arc<AtomicUsize>,
}

struct KeeperSink {
    keeper: Arc<Keeper>,
    name: String,
    /// Options of the upload, which say how its second batch fails.
    options: Bytes,
    batches: Vec<RecordBatch>,
    rows: u64,
    bytes: u64,
}

/// Handler over the keeper. It is a type of its own so that its sinks can share the keeper.
#[derive(Debug, Default, Clone)]
pub struct KeeperHandler(pub Arc<Keeper>);

#[tonic::async_trait]
impl UploadHandler for KeeperHandler {
    async fn begin(
        &self,
        _extensions: &Extensions,
        descriptor: FlightDescriptor,
        _schema: SchemaRef,
        app_metadata: Bytes,
    ) -> Result<Box<dyn UploadSink>> {
        if &app_metadata[..] == b"refuse" {
            return Err(Error::AlreadyExists("die Tabelle „größer“ gibt es schon: 100 %".into()));
        }
        self.0.sinks.fetch_add(1, Ordering::SeqCst);
        Ok(Box::new(KeeperSink {
            keeper: self.0.clone(),
            name: descriptor.path.join("/"),
            options: app_metadata,
            batches: Vec::new(),
            rows: 0,
            bytes: 0,
        }))
    }
}

#[tonic::async_trait]
impl UploadSink for KeeperSink {
    fn append(&mut self, batch: RecordBatch, interrupt: &Interrupt) -> Result<Ack> {
        match &self.options[..] {
            b"long" => loop {
                interrupt.check()?;
                std::thread::yield_now();
            },
            b"panic" if !self.batches.is_empty() => panic!("a defect"),
            b"full" if !self.batches.is_empty() => return Err(Error::Exhausted("the quota is used up".into())),
            _ => {}
        }
        self.rows += batch.num_rows() as u64;
        self.bytes +=
            batch.columns().iter().map(|column| column.to_data().get_slice_memory_size().unwrap() as u64).sum::<u64>();
        self.batches.push(batch);
        Ok(Ack { rows: self.rows, bytes: self.bytes })
    }

    async fn finish(mut self: Box<Self>) -> Result<Ack> {
        let batches = std::mem::take(&mut self.batches);
        self.keeper.tables.lock().push((self.name.clone(), batches));
        Ok(Ack { rows: self.rows, bytes: self.bytes })
    }
}

impl Drop for KeeperSink {
    fn drop(&mut self) {
        self.keeper.sinks.fetch_sub(1, Ordering::SeqCst);
    }
}

fn request() -> http::request::Parts {
    http::Request::new(()).into_parts().0
}

fn numbers(rows: i64) -> RecordBatch {
    let column: ArrayRef = Arc::new(Int64Array::from_iter_values(0..rows));
    RecordBatch::try_from_iter([("n", column)]).unwrap()
}

async fn upload(handler: &KeeperHandler, messages: Vec<FlightData>, arena: &Arena) -> Vec<Result<Ack>> {
    let messages = futures::stream::iter(messages.into_iter().map(Ok));
    upload_messages(Arc::new(handler.clone()), request(), messages, arena.clone(), LIMITS, CpuWork::new())
        .collect()
        .await
}

#[tokio::test]
async fn each_batch_and_the_end_are_acknowledged_with_totals() {
    let (handler, arena) = (KeeperHandler::default(), arena());
    let messages = messages(&numbers(0).schema(), &[numbers(3), numbers(0), numbers(5)], &like_pyarrow());
    let acks: Vec<_> = upload(&handler, messages, &arena).await.into_iter().map(Result::unwrap).collect();
    let ack = |rows| Ack { rows, bytes: rows * 8 };
    assert_eq!(acks, [ack(3), ack(3), ack(8), ack(8)]);
    assert_eq!(acks[3].to_json(), r#"{"rows":8,"bytes":64}"#);
    assert_eq!(handler.0.tables.lock()[0].0, "t");
}

#[tokio::test]
async fn an_upload_that_fails_in_any_way_drops_its_sink_and_its_memory() {
    let (handler, arena) = (KeeperHandler::default(), arena());
    let good = messages(&numbers(0).schema(), &[numbers(3), numbers(4)], &like_pyarrow());
    let with_metadata = |at: usize, text: &str| {
        let mut messages = good.clone();
        messages[at].app_metadata = text.to_owned().into();
        messages
    };
    let mut no_descriptor = good.clone();
    no_descriptor[0].flight_descriptor = None;
    let mut metadata_alone = good.clone();
    metadata_alone.insert(2, FlightData::new().with_app_metadata("{}"));
    let mut another_table = good.clone();
    another_table[1].flight_descriptor = Some(FlightDescriptor::new_path(vec!["u".into()]));
    let mut corrupt = good.clone();
    corrupt[2].data_header = vec![1; 30].into();
    let cases = [
        (with_metadata(0, "refuse"), "gibt es schon"),
        (with_metadata(0, "full"), "the quota is used up"),
        (with_metadata(0, "panic"), "a defect in the server"),
        (
            with_metadata(1, "{\"mode\": \"replace\"}"),
            "uploading table \"t\": a message after the schema has app_metadata",
        ),
        (
            with_metadata(2, "x"),
            "send them as app_metadata of the first message, or in the header dovetail-upload-options",
        ),
        (metadata_alone, "a message after the schema has app_metadata"),
        (another_table, "the descriptor of table \"u\"; one call of DoPut uploads one table"),
        (no_descriptor, "no flight descriptor"),
        (corrupt, "not an Arrow IPC flatbuffer"),
        (Vec::new(), "ended before its schema"),
    ];
    for (messages, part) in cases {
        let acks = upload(&handler, messages, &arena).await;
        let error = acks.last().unwrap().as_ref().expect_err(part);
        assert!(error.message().contains(part), "{error:?}");
        assert_eq!(handler.0.sinks.load(Ordering::SeqCst), 0);
        assert_eq!(arena.budget().used_bytes(), 0);
    }
    assert!(handler.0.tables.lock().is_empty());
}

#[tokio::test]
async fn a_sender_may_repeat_the_descriptor() {
    let (handler, arena) = (KeeperHandler::default(), arena());
    let mut messages = messages(&numbers(0).schema(), &[numbers(3), numbers(4)], &like_pyarrow());
    for at in 1..messages.len() {
        messages[at].flight_descriptor = messages[0].flight_descriptor.clone();
    }
    let acks = upload(&handler, messages, &arena).await;
    assert_eq!(acks.last().unwrap().as_ref().unwrap().rows, 7);
}

#[tokio::test]
async fn a_broken_stream_is_a_cancelled_upload() {
    let (handler, arena) = (KeeperHandler::default(), arena());
    let mut messages: Vec<Result<FlightData, Status>> =
        messages(&numbers(0).schema(), &[numbers(3)], &like_pyarrow()).into_iter().map(Ok).collect();
    messages.push(Err(Status::cancelled("reset")));
    let stream = futures::stream::iter(messages);
    let acks = upload_messages(Arc::new(handler.clone()), request(), stream, arena.clone(), LIMITS, CpuWork::new());
    let outcome = acks.collect::<Vec<_>>().await;
    assert!(matches!(outcome.last(), Some(Err(Error::Cancelled(_)))), "{outcome:?}");
    assert!(handler.0.tables.lock().is_empty());
    assert_eq!(arena.budget().used_bytes(), 0);
}

#[tokio::test]
async fn dropping_the_acknowledgements_forgets_the_upload() {
    let (handler, arena) = (KeeperHandler::default(), arena());
    let messages = messages(&numbers(0).schema(), &[numbers(1000)], &like_pyarrow());
    let stream = futures::stream::iter(messages.into_iter().map(Ok)).chain(futures::stream::pending());
    let mut acks = upload_messages(Arc::new(handler.clone()), request(), stream, arena.clone(), LIMITS, CpuWork::new());
    acks.next().await.unwrap().unwrap();
    assert_eq!(handler.0.sinks.load(Ordering::SeqCst), 1);
    drop(acks);
    wait_in_task_until("the upload to be forgotten", || handler.0.sinks.load(Ordering::SeqCst) == 0).await;
    assert_eq!(arena.budget().used_bytes(), 0);
}

#[tokio::test]
async fn an_upload_ends_at_the_deadline_of_its_call() {
    let (handler, arena) = (KeeperHandler::default(), arena());
    let mut request = request();
    request.headers.insert("grpc-timeout", HeaderValue::from_static("20m"));
    let messages = messages(&numbers(0).schema(), &[numbers(1000)], &like_pyarrow());
    let stream = futures::stream::iter(messages.into_iter().map(Ok)).chain(futures::stream::pending());
    let acks = upload_messages(Arc::new(handler.clone()), request, stream, arena.clone(), LIMITS, CpuWork::new());
    let outcome = acks.collect::<Vec<_>>().await;
    let last = outcome.last().unwrap();
    assert!(matches!(last, Err(Error::DeadlineExceeded(text)) if text.contains("20ms")), "{outcome:?}");
    // The deadline may pass while the rows are checked on another thread.
    wait_in_task_until("the memory to be free", || arena.budget().used_bytes() == 0).await;
}

#[tokio::test]
async fn long_work_runs_beside_the_calls_and_ends_with_its_upload() {
    let (handler, arena, work) = (KeeperHandler::default(), arena(), CpuWork::new());
    let text: ArrayRef = Arc::new(StringArray::from(vec!["x".repeat(5 << 20)]));
    let batch = RecordBatch::try_from_iter([("t", text)]).unwrap();
    let mut messages = messages(&batch.schema(), &[batch], &like_pyarrow());
    messages[0].app_metadata = "long".into();
    let stream = futures::stream::iter(messages.into_iter().map(Ok)).chain(futures::stream::pending());
    let acks = upload_messages(Arc::new(handler.clone()), request(), stream, arena.clone(), LIMITS, work.clone());
    // The only thread of this runtime is not blocked by the work.
    wait_in_task_until("the sink to work", || handler.0.sinks.load(Ordering::SeqCst) == 1 && work.calls() == 1).await;
    drop(acks);
    wait_in_task_until("the upload to be forgotten", || handler.0.sinks.load(Ordering::SeqCst) == 0).await;
    wait_in_task_until("the slot", || work.slots_taken() == 0).await;
    assert_eq!((work.interrupted(), arena.budget().used_bytes()), (1, 0));
}

#[tokio::test]
async fn unread_acknowledgements_are_bounded_and_the_last_one_has_the_final_totals() {
    const SENT: u64 = 5000;
    let acks = Acks::spawn(|sender| async move {
        (1..=SENT).for_each(|rows| sender.send(Ack { rows, bytes: 0 }));
        Ok(())
    });
    let read: Vec<_> = acks.map(|ack| ack.unwrap().rows).collect().await;
    assert_eq!(read.len(), 1024);
    assert_eq!((read[0], read[1022], read[1023]), (1, 1023, SENT));
}

#[test]
fn grpc_timeouts_are_parsed_as_the_protocol_defines_them() {
    let read = |text: &'static str| {
        let mut headers = HeaderMap::new();
        headers.insert("grpc-timeout", HeaderValue::from_static(text));
        timeout(&headers)
    };
    assert_eq!(read("2H"), Some(Duration::from_secs(7200)));
    assert_eq!(read("3M"), Some(Duration::from_secs(180)));
    assert_eq!(read("99999999S"), Some(Duration::from_secs(99_999_999)));
    assert_eq!(read("5m"), Some(Duration::from_millis(5)));
    assert_eq!(read("6u"), Some(Duration::from_micros(6)));
    assert_eq!(read("7n"), Some(Duration::from_nanos(7)));
    for wrong in ["", "S", "5", "-5S", "+5S", "123456789S", "5 S", "5s", "5x"] {
        assert_eq!(read(wrong), None, "{wrong:?}");
    }
    assert_eq!(timeout(&HeaderMap::new()), None);
}
