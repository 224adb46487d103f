//! Uploads: one stream, or several that fill one table and appear together.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use arrow::array::RecordBatch;
use arrow::datatypes::SchemaRef;
use arrow_flight::FlightData;
use futures::stream::BoxStream;
use futures::{FutureExt, StreamExt, TryStreamExt};
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::sync::{Notify, mpsc};

use super::fetch::BatchStream;
use super::{Client, command_descriptor, from_status, table_descriptor};
use crate::service::JOB_HEADER;
use crate::service::encode::Encoder;
use crate::{Error, Result};

/// Encoded messages that may wait for the socket. 8 messages keep the socket busy and bound memory
/// at about 16 MB per stream.
const MESSAGES_AHEAD: usize = 8;

/// Options of an upload.
#[derive(Clone, Debug, Default)]
pub struct PutOptions {
    /// `create`, `replace`, `append` or `create_if_missing`; `None` is the server's default,
    /// `create`.
    pub mode: Option<String>,
    pub sorted_by: Vec<String>,
    pub unique: Vec<Vec<String>>,
    /// Streams, each over its own connection; 0 counts as 1.
    pub streams: usize,
}

/// Amount of data that was uploaded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Uploaded {
    pub rows: u64,
    /// Bytes of Arrow buffers sent.
    pub bytes: u64,
}

/// Rows and bytes sent so far, counted by all streams of an upload.
#[derive(Debug, Default)]
struct Sent {
    rows: AtomicU64,
    bytes: AtomicU64,
}

type Batches = BoxStream<'static, Result<RecordBatch>>;

impl Client {
    /// Uploads a table, which is complete on the server when this returns. Calls `advance` with the
    /// bytes of each message. Aborts the upload if `stop` completes first.
    ///
    /// # Errors
    /// The errors of `batches`, of the server and of `stop`. After an error the server has no part
    /// of the table.
    pub async fn put(
        &self,
        table: &str,
        options: &PutOptions,
        schema: SchemaRef,
        batches: Batches,
        advance: impl Fn(u64) + Send + Sync + Clone + 'static,
        stop: impl Future<Output = Error>,
    ) -> Result<Uploaded> {
        let sent = Arc::new(Sent::default());
        let said = options_json(options);
        if options.streams <= 1 {
            let stream = self.put_stream(table, &said, schema, batches, sent.clone(), advance);
            tokio::select! {
                outcome = stream => outcome?,
                error = stop => return Err(error),
            }
            return Ok(sent.total());
        }
        let upload = uuid::Uuid::new_v4().to_string();
        let mut said = said;
        said["upload"] = upload.clone().into();
        let shares = share(batches, options.streams);
        let streams = shares.into_iter().enumerate().map(|(at, share)| {
            let (said, schema, sent, advance) = (&said, schema.clone(), sent.clone(), advance.clone());
            async move {
                let client = if at == 0 { self.clone() } else { self.fresh().await? };
                client.put_stream(table, said, schema, share, sent, advance).await
            }
        });
        let name = json!({ "upload": upload });
        let outcome = tokio::select! {
            outcome = futures::future::try_join_all(streams) => outcome,
            error = stop => Err(error),
        };
        match outcome {
            Ok(_) => {
                self.action("commit_upload", &name).await?;
                Ok(sent.total())
            }
            Err(error) => {
                // Return the first failure, and ignore a failed abort: the upload expires on the
                // server.
                let _ = self.action("abort_upload", &name).await;
                Err(error)
            }
        }
    }

    /// Runs one DoPut, from the descriptor to the last acknowledgement.
    async fn put_stream(
        &self,
        table: &str,
        options: &Value,
        schema: SchemaRef,
        batches: Batches,
        sent: Arc<Sent>,
        advance: impl Fn(u64) + Send + Sync + 'static,
    ) -> Result<()> {
        let describe = |first: &mut FlightData| {
            first.flight_descriptor = Some(table_descriptor(table));
            first.app_metadata = options.to_string().into();
        };
        let (request, failure) = self.request(schema, batches, describe, sent, advance)?;
        let rpc = async {
            let answers = self.service().do_put(request).await.map_err(from_status)?.into_inner();
            // Acknowledgements count the rows accepted so far. Only the end of the stream confirms
            // all rows.
            answers.try_for_each(|_| async { Ok(()) }).await.map_err(from_status)
        };
        tokio::select! {
            outcome = rpc => outcome,
            error = failure.wait() => Err(error),
        }
    }
}

impl Client {
    /// Joins rows while they are sent. Returns the number of the job, if the server says it, and the
    /// batches of the result. `command` says which side the rows are.
    ///
    /// # Errors
    /// The server's. Later errors, and those of `batches`, come with the result.
    pub async fn exchange(
        &self,
        command: &Value,
        schema: SchemaRef,
        batches: Batches,
    ) -> Result<(Option<u64>, BatchStream)> {
        let describe = |first: &mut FlightData| first.flight_descriptor = Some(command_descriptor(command));
        let (request, failure) = self.request(schema, batches, describe, Arc::default(), |_| {})?;
        let mut service = self.service();
        let answers = tokio::select! {
            answers = service.do_exchange(request) => answers.map_err(from_status)?,
            error = failure.wait() => return Err(error),
        };
        let job = answers.metadata().get(JOB_HEADER).and_then(|job| job.to_str().ok()?.parse().ok());
        let failed = async move { failure.wait().await };
        Ok((job, BatchStream::of_call(answers.into_inner(), failed.boxed()).await?))
    }

    /// Returns the messages of a call that sends rows: the schema, which `describe` completes, and
    /// the batches. A failure of the batches does not end the messages.
    fn request(
        &self,
        schema: SchemaRef,
        batches: Batches,
        describe: impl FnOnce(&mut FlightData),
        sent: Arc<Sent>,
        advance: impl Fn(u64) + Send + Sync + 'static,
    ) -> Result<(BoxStream<'static, FlightData>, Arc<Failure>)> {
        let (encoder, first) = Encoder::new(schema)?;
        let mut encoder = encoder.with_limit(self.message_limit);
        let mut first = FlightData::from(first);
        describe(&mut first);
        // Encode in a separate task, so that encoding overlaps with the socket.
        let (messages, outgoing) = mpsc::channel::<Result<FlightData>>(MESSAGES_AHEAD);
        tokio::spawn(async move {
            let encoded = encode_all(&mut encoder, first, batches, &messages, &sent, &advance).await;
            if let Err(Some(error)) = encoded {
                let _ = messages.send(Err(error)).await;
            }
        });
        let failure = Arc::new(Failure::default());
        Ok((request_stream(outgoing, failure.clone()), failure))
    }
}

impl Sent {
    fn total(&self) -> Uploaded {
        Uploaded { rows: self.rows.load(Ordering::Relaxed), bytes: self.bytes.load(Ordering::Relaxed) }
    }
}

fn options_json(options: &PutOptions) -> Value {
    let mut said = json!({});
    if let Some(mode) = &options.mode {
        said["mode"] = mode.clone().into();
    }
    if !options.sorted_by.is_empty() {
        said["sorted_by"] = options.sorted_by.clone().into();
    }
    if !options.unique.is_empty() {
        said["unique"] = json!(options.unique);
    }
    said
}

/// Encodes all batches. Returns `Err(None)` if the receiver is gone; the DoPut call then reports a
/// better error.
async fn encode_all(
    encoder: &mut Encoder,
    first: FlightData,
    mut batches: Batches,
    messages: &mpsc::Sender<Result<FlightData>>,
    sent: &Sent,
    advance: &impl Fn(u64),
) -> Result<(), Option<Error>> {
    messages.send(Ok(first)).await.map_err(|_| None)?;
    while let Some(batch) = batches.next().await {
        let batch = batch.map_err(Some)?;
        let rows = batch.num_rows() as u64;
        encoder.begin(batch);
        while let Some(message) = encoder.next_message().map_err(Some)? {
            let bytes = message.body_bytes() as u64;
            messages.send(Ok(message.into())).await.map_err(|_| None)?;
            sent.bytes.fetch_add(bytes, Ordering::Relaxed);
            advance(bytes);
        }
        sent.rows.fetch_add(rows, Ordering::Relaxed);
    }
    Ok(())
}

/// Client-side failure of an upload.
#[derive(Debug, Default)]
struct Failure {
    error: Mutex<Option<Error>>,
    raised: Notify,
}

impl Failure {
    fn raise(&self, error: Error) {
        *self.error.lock() = Some(error);
        self.raised.notify_one();
    }

    async fn wait(&self) -> Error {
        self.raised.notified().await;
        self.error.lock().take().unwrap_or_else(|| Error::Internal("an upload failed without a reason".into()))
    }
}

/// Returns the request body. The server publishes the table when the body ends, so a failure must
/// not end the body. After a failure the body stays pending until the call is dropped, which resets
/// the stream.
fn request_stream(
    outgoing: mpsc::Receiver<Result<FlightData>>,
    failure: Arc<Failure>,
) -> BoxStream<'static, FlightData> {
    let next = |(mut outgoing, failure): (mpsc::Receiver<Result<FlightData>>, Arc<Failure>)| async move {
        match outgoing.recv().await? {
            Ok(message) => Some((message, (outgoing, failure))),
            Err(error) => {
                failure.raise(error);
                std::future::pending().await
            }
        }
    };
    futures::stream::unfold((outgoing, failure), next).boxed()
}

/// Splits a stream of batches into `takers` streams. Each batch goes to the stream that asks next.
fn share(batches: Batches, takers: usize) -> Vec<Batches> {
    let source = Arc::new(tokio::sync::Mutex::new(Some(batches)));
    let taker = |_| {
        let next = |source: Arc<tokio::sync::Mutex<Option<Batches>>>| async move {
            let mut guard = source.lock().await;
            let batch = guard.as_mut()?.next().await;
            // After an error or the end, no taker may poll the source again.
            if !matches!(batch, Some(Ok(_))) {
                *guard = None;
            }
            drop(guard);
            batch.map(|batch| (batch, source))
        };
        futures::stream::unfold(source.clone(), next).boxed()
    };
    (0..takers).map(taker).collect()
}

#[cfg(test)]
mod tests {
    use arrow::array::Int32Array;

    use super::*;

    fn batches(count: i32, fail_at: Option<i32>) -> Batches {
        let batch = move |at: i32| {
            if Some(at) == fail_at {
                return Err(Error::Invalid("the file ends too early".into()));
            }
            let column = Arc::new(Int32Array::from(vec![at])) as _;
            Ok(RecordBatch::try_from_iter([("k", column)]).unwrap())
        };
        futures::stream::iter((0..count).map(batch)).boxed()
    }

    #[tokio::test]
    async fn shares_are_disjoint_and_complete() {
        for takers in [1, 2, 7] {
            let all = futures::future::join_all(
                share(batches(20, None), takers).into_iter().map(StreamExt::collect::<Vec<_>>),
            )
            .await;
            let mut values: Vec<i32> = all
                .into_iter()
                .flatten()
                .map(|batch| batch.unwrap().column(0).as_any().downcast_ref::<Int32Array>().unwrap().value(0))
                .collect();
            values.sort_unstable();
            assert_eq!(values, (0..20).collect::<Vec<_>>(), "{takers} takers");
        }
    }

    #[tokio::test]
    async fn one_stream_receives_an_error_and_the_others_end() {
        let shares = share(batches(20, Some(5)), 3);
        let all = futures::future::join_all(shares.into_iter().map(StreamExt::collect::<Vec<_>>)).await;
        let errors = all.iter().flatten().filter(|batch| batch.is_err()).count();
        assert_eq!(errors, 1);
        assert_eq!(all.iter().flatten().count(), 6);
    }

    #[tokio::test]
    async fn a_failed_request_body_never_ends() {
        let (messages, outgoing) = mpsc::channel(2);
        messages.send(Ok(FlightData::default())).await.unwrap();
        messages.send(Err(Error::Invalid("torn".into()))).await.unwrap();
        drop(messages);
        let failure = Arc::new(Failure::default());
        let mut body = request_stream(outgoing, failure.clone());
        assert!(body.next().await.is_some());
        tokio::select! {
            _ = body.next() => panic!("the body ended as if all was sent"),
            error = failure.wait() => assert_eq!(error, Error::Invalid("torn".into())),
        }
    }
}
