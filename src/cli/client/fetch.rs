//! Fetching: the batches of a table or a result, from all of its endpoints at once.

use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;

use arrow::array::RecordBatch;
use arrow::datatypes::{Schema, SchemaRef};
use arrow_flight::decode::FlightRecordBatchStream;
use arrow_flight::error::FlightError;
use arrow_flight::{FlightData, FlightInfo, Ticket};
use futures::future::BoxFuture;
use futures::stream::BoxStream;
use futures::{FutureExt, Stream, StreamExt, TryStreamExt};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tonic::Streaming;

use super::{Client, batch_bytes, from_status};
use crate::{Error, Result, panics};

/// Decoded batches of one endpoint that wait for the consumer.
const BATCHES_AHEAD: usize = 4;

/// Stream of batches from a server. Dropping it ends the streams that feed it.
pub struct BatchStream {
    schema: SchemaRef,
    batches: BoxStream<'static, Result<RecordBatch>>,
    streams: usize,
    /// Reader tasks, which end when the stream is dropped.
    _readers: JoinSet<()>,
}

impl BatchStream {
    /// Columns and their types.
    pub fn schema(&self) -> SchemaRef {
        self.schema.clone()
    }

    /// Number of streams that are read in parallel, each over its own connection.
    pub fn streams(&self) -> usize {
        self.streams
    }

    /// Reads the answers of one call. The first answer has the schema. If `failed` completes, its
    /// error ends the batches.
    ///
    /// # Errors
    /// The server's, and that of `failed`.
    pub(super) async fn of_call(
        mut answers: Streaming<FlightData>,
        mut failed: BoxFuture<'static, Error>,
    ) -> Result<Self> {
        let first = tokio::select! {
            first = answers.message() => first.map_err(from_status)?,
            error = &mut failed => return Err(error),
        };
        let first = first.ok_or_else(|| Error::Internal("the server answered without a schema".into()))?;
        let schema = Arc::new(Schema::try_from(&first)?);
        let answers = answers.map_err(|status| FlightError::Tonic(Box::new(status)));
        let messages = futures::stream::iter([Ok(first)]).chain(answers);
        let decoded = FlightRecordBatchStream::new_from_flight_data(messages);
        let next = |state: Option<(FlightRecordBatchStream, BoxFuture<'static, Error>)>| async move {
            let (mut decoded, mut failed) = state?;
            loop {
                let batch = tokio::select! {
                    batch = decoded.next() => batch?.map_err(from_flight),
                    error = &mut failed => Err(error),
                };
                match batch {
                    // An empty batch only says that the job is still running.
                    Ok(batch) if batch.num_rows() == 0 => {}
                    Ok(batch) => return Some((Ok(batch), Some((decoded, failed)))),
                    Err(error) => return Some((Err(error), None)),
                }
            }
        };
        let batches = futures::stream::unfold(Some((decoded, failed)), next).boxed();
        Ok(Self { schema, batches, streams: 1, _readers: JoinSet::new() })
    }

    /// Keeps the columns at `places`. Calls `left_out` with the bytes of the other columns of each
    /// batch.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a place that has no column.
    pub fn project(self, places: Vec<usize>, left_out: impl Fn(u64) + Send + 'static) -> Result<Self> {
        let schema = Arc::new(self.schema.project(&places)?);
        let project = move |batch: RecordBatch| {
            let chosen = batch.project(&places)?;
            left_out(batch_bytes(&batch).saturating_sub(batch_bytes(&chosen)));
            Ok(chosen)
        };
        Ok(Self { schema, batches: self.batches.map(move |batch| batch.and_then(&project)).boxed(), ..self })
    }
}

impl Stream for BatchStream {
    type Item = Result<RecordBatch>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut std::task::Context<'_>) -> Poll<Option<Self::Item>> {
        self.batches.poll_next_unpin(cx)
    }
}

impl std::fmt::Debug for BatchStream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("BatchStream").field("schema", &self.schema).finish_non_exhaustive()
    }
}

impl Client {
    /// Reads all endpoints of a flight at once, each over its own connection. Batches of an ordered
    /// flight arrive in order. Other batches arrive as soon as they are ready.
    ///
    /// # Errors
    /// [`Error::Internal`] if the server's answer makes no sense. Later errors come with the
    /// batches.
    pub fn fetch(&self, info: &FlightInfo) -> Result<BatchStream> {
        let schema = Arc::new(info.clone().try_decode_schema()?);
        let mut readers = JoinSet::new();
        let mut streams = Vec::with_capacity(info.endpoint.len());
        for (at, endpoint) in info.endpoint.iter().enumerate() {
            let ticket = endpoint.ticket.clone();
            let ticket =
                ticket.ok_or_else(|| Error::Internal("the server gave an endpoint without a ticket".into()))?;
            let (batches, incoming) = mpsc::channel(BATCHES_AHEAD);
            let client = self.clone();
            readers.spawn(async move {
                // Without the check, a reader that panicked would look finished, and half of a
                // table would look like a whole table.
                let read = AssertUnwindSafe(client.read_endpoint(at, ticket, &batches)).catch_unwind().await;
                let read = read.unwrap_or_else(|panic| {
                    let said = panics::message(&*panic);
                    Err(Error::Internal(format!("decoding the rows: {said}")))
                });
                if let Err(error) = read {
                    let _ = batches.send(Err(error)).await;
                }
            });
            streams.push(tokio_stream::wrappers::ReceiverStream::new(incoming));
        }
        let count = streams.len();
        let batches = match info.ordered {
            true => futures::stream::iter(streams).flatten().boxed(),
            false => futures::stream::select_all(streams).boxed(),
        };
        Ok(BatchStream { schema, batches, streams: count, _readers: readers })
    }

    async fn read_endpoint(
        &self,
        at: usize,
        ticket: Ticket,
        batches: &mpsc::Sender<Result<RecordBatch>>,
    ) -> Result<()> {
        let client = if at == 0 { self.clone() } else { self.fresh().await? };
        let messages = client.service().do_get(ticket).await.map_err(from_status)?.into_inner();
        let messages = messages.map_err(|status| FlightError::Tonic(Box::new(status)));
        let mut decoded = FlightRecordBatchStream::new_from_flight_data(messages);
        while let Some(batch) = decoded.next().await {
            let batch = batch.map_err(from_flight)?;
            // An empty batch only says that the job is still running.
            if batch.num_rows() > 0 && batches.send(Ok(batch)).await.is_err() {
                break;
            }
        }
        Ok(())
    }
}

fn from_flight(error: FlightError) -> Error {
    match error {
        FlightError::Tonic(status) => from_status(*status),
        FlightError::Arrow(error) => error.into(),
        other => Error::Internal(other.to_string()),
    }
}
