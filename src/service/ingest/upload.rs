//! One upload from its first message to its last, on both decoding paths.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use arrow::array::{Array, ArrayRef, AsArray, GenericByteViewArray, RecordBatch};
use arrow::datatypes::{ByteViewType, DataType};
use arrow_flight::{FlightData, FlightDescriptor};
use bytes::Bytes;
use futures::{Stream, StreamExt};
use http::{Extensions, HeaderMap};
use http_body_util::BodyExt;
use tonic::{Code, Status};

use super::decoder::{Content, Received, StreamDecoder, WireDecoder};
use super::plan::VIEW_BYTES;
use super::respond::{AckSender, Acks};
use super::{Limits, UploadHandler, UploadSink};
use crate::human::asked;
use crate::memory::{Arena, Bounds, Held, Interrupt};
use crate::service::cpu_work::CpuWork;
use crate::service::encode::array_bytes;
use crate::service::status::of_request;
use crate::{Context, Error, Result};

/// Runs an upload whose messages tonic has received: the ordinary path, with a second copy.
///
/// The upload runs in a task of its own; dropping the acknowledgements ends it.
pub fn upload_messages<S>(
    handler: Arc<dyn UploadHandler>,
    request: http::request::Parts,
    messages: S,
    arena: Arena,
    limits: Limits,
    cpu_work: CpuWork,
) -> Acks
where
    S: Stream<Item = Result<FlightData, Status>> + Send + Unpin + 'static,
{
    let decoder = Working::new(StreamDecoder::new(arena, limits), cpu_work.clone());
    spawn(handler, request, Messages { messages, decoder, idle: IdleLimit::new(limits) }, cpu_work)
}

/// Runs an upload in a task of its own, within the deadline of its request.
pub(super) fn spawn(
    handler: Arc<dyn UploadHandler>,
    request: http::request::Parts,
    source: impl Source + 'static,
    cpu_work: CpuWork,
) -> Acks {
    let deadline = timeout(&request.headers);
    Acks::spawn(|acks| async move {
        let upload = run(&*handler, &request.extensions, source, &acks, &cpu_work);
        match deadline {
            None => upload.await,
            Some(after) => tokio::time::timeout(after, upload).await.unwrap_or_else(|_| {
                Err(Error::DeadlineExceeded(format!(
                    "the call's deadline passed: the upload was not done within {after:?}; send it in several parts, or allow \
                     it more time"
                )))
            }),
        }
    })
}

/// Source of the messages of a stream of rows.
pub(in crate::service) trait Source: Send {
    /// Returns the next message; `None` when the client has sent all its data.
    fn next(&mut self) -> impl Future<Output = Result<Option<Received>>> + Send;
}

async fn run(
    handler: &dyn UploadHandler,
    extensions: &Extensions,
    mut source: impl Source,
    acks: &AckSender,
    cpu_work: &CpuWork,
) -> Result<()> {
    let Begun { sink, descriptor } = begin(handler, extensions, &mut source).await?;
    let mut sink = Working::new(sink, cpu_work.clone());
    let attempt = || format!("uploading {}", target(&descriptor));
    while let Some(message) = source.next().await.context(attempt)? {
        check_later(&message, &descriptor).context(attempt)?;
        if let Content::Batch(batch) = message.content {
            acks.send(sink.work(effort_bytes(&batch), move |sink, interrupt| sink.append(batch, interrupt)).await?);
        }
    }
    acks.send(sink.into_inner()?.finish().await?);
    Ok(())
}

/// Refuses what only the first message of an upload may have. It would otherwise be ignored.
fn check_later(message: &Received, descriptor: &FlightDescriptor) -> Result<()> {
    if !message.app_metadata.is_empty() {
        return Err(Error::Invalid(
            "a message after the schema has app_metadata, where options come too late; send them as app_metadata of the \
             first message, or in the header dovetail-upload-options"
                .into(),
        ));
    }
    match &message.descriptor {
        Some(other) if other != descriptor => Err(Error::Invalid(format!(
            "a message after the schema has the descriptor of {}; one call of DoPut uploads one table",
            target(other)
        ))),
        _ => Ok(()),
    }
}

/// Returns the effort of taking a batch's statistics, as the bytes of text that take the same time.
fn effort_bytes(batch: &RecordBatch) -> usize {
    /// Statistics of numbers run at memory speed, this many times faster than text.
    const FASTER: usize = 8;
    let effort = |column: &ArrayRef| match column.data_type() {
        numbers if numbers.is_primitive() => array_bytes(column) / FASTER,
        DataType::Utf8View => viewed_bytes_max(column.as_string_view()),
        DataType::BinaryView => viewed_bytes_max(column.as_binary_view()),
        _ => array_bytes(column),
    };
    batch.columns().iter().map(effort).fold(0, usize::saturating_add)
}

/// Returns the bytes to which views refer, at most. Views that share text are compared and hashed
/// like views that do not.
fn viewed_bytes_max<T: ByteViewType>(views: &GenericByteViewArray<T>) -> usize {
    let longest = views.data_buffers().iter().map(|buffer| buffer.len()).max().unwrap_or(0);
    views.len().saturating_mul(VIEW_BYTES + longest)
}

/// Value that long work takes along to another thread. If the work fails or is given up, the value
/// is dropped where the work ends.
pub(super) struct Working<T> {
    value: Option<T>,
    cpu_work: CpuWork,
}

impl<T: Send + 'static> Working<T> {
    fn new(value: T, cpu_work: CpuWork) -> Self {
        Self { value: Some(value), cpu_work }
    }

    /// Works on the value, on a thread that fits the effort in bytes.
    ///
    /// # Errors
    /// The work's. The value is gone then.
    async fn work<R, W>(&mut self, effort_bytes: usize, work: W) -> Result<R>
    where
        R: Send + 'static,
        W: FnOnce(&mut T, &Interrupt) -> Result<R> + Send + 'static,
    {
        let mut value = self.value.take().ok_or_else(gone)?;
        let worked = move |interrupt: &Interrupt| work(&mut value, interrupt).map(|result| (value, result));
        let (value, result) = self.cpu_work.run_on(effort_bytes, worked).await?;
        self.value = Some(value);
        Ok(result)
    }

    fn get(&mut self) -> Result<&mut T> {
        self.value.as_mut().ok_or_else(gone)
    }

    fn into_inner(self) -> Result<T> {
        self.value.ok_or_else(gone)
    }
}

impl Working<StreamDecoder> {
    /// Decodes a message that tonic has received, on a thread that fits its effort.
    ///
    /// # Errors
    /// As [`from_transport`] and [`StreamDecoder::decode`].
    async fn decode(&mut self, message: Result<FlightData, Status>) -> Result<Received> {
        let message = message.map_err(from_transport)?;
        let effort = self.get()?.effort_of(&message);
        self.work(effort, |decoder, interrupt| decoder.decode(message, interrupt)).await
    }
}

fn gone() -> Error {
    Error::Internal("a call went on after an error".into())
}

/// Upload whose schema has arrived.
struct Begun {
    sink: Box<dyn UploadSink>,
    descriptor: FlightDescriptor,
}

/// Names the target of an upload, for messages.
fn target(descriptor: &FlightDescriptor) -> String {
    match &descriptor.path[..] {
        [table] => format!("table {}", asked(table)),
        path => format!("{path:?}"),
    }
}

/// Reads messages up to the schema, and begins the upload. Descriptor and options are those of the
/// first message that has any, which is usually the schema message.
async fn begin(handler: &dyn UploadHandler, extensions: &Extensions, source: &mut impl Source) -> Result<Begun> {
    let (mut descriptor, mut app_metadata) = (None, Bytes::new());
    while let Some(message) = source.next().await? {
        descriptor = descriptor.or(message.descriptor);
        if app_metadata.is_empty() {
            app_metadata = message.app_metadata;
        }
        if let Content::Schema(schema) = message.content {
            let descriptor = descriptor.ok_or_else(|| {
                Error::Invalid("the first message of an upload has no flight descriptor, which names the table".into())
            })?;
            let sink = handler.begin(extensions, descriptor.clone(), schema, app_metadata).await?;
            return Ok(Begun { sink, descriptor });
        }
    }
    Err(Error::Invalid("the upload ended before its schema arrived".into()))
}

/// Time limit on a stream without rows. Without it, a client that neither sends rows nor ends a
/// call would occupy memory, a place among the uploads, and the name of a table, while its
/// connection lives. Messages without rows do not extend the limit.
#[derive(Debug)]
pub(super) struct IdleLimit {
    limit: Duration,
    /// Time when rows arrived last.
    since: Instant,
}

impl IdleLimit {
    pub(super) fn new(limits: Limits) -> Self {
        Self { limit: limits.idle, since: Instant::now() }
    }

    /// Waits for something from the client.
    ///
    /// # Errors
    /// [`Error::DeadlineExceeded`] when the limit has passed.
    pub(super) async fn arriving<T>(&self, next: impl Future<Output = T>) -> Result<T> {
        let left = self.limit.saturating_sub(self.since.elapsed());
        tokio::time::timeout(left, next).await.map_err(|_| {
            Error::DeadlineExceeded(format!(
                "no rows arrived within {} s (the server's --upload-idle-seconds), so the call ended and its rows were dropped; \
                 send them again",
                self.limit.as_secs()
            ))
        })
    }

    /// Records that rows have arrived, or a part of them.
    fn rows_arrived(&mut self) {
        self.since = Instant::now();
    }
}

/// Bytes of a request, as they arrive.
pub(super) struct RequestBody {
    /// Chunks that were read ahead to find the destination of the request, with their memory.
    pub ahead: VecDeque<(Bytes, Held)>,
    pub rest: tonic::body::Body,
}

impl RequestBody {
    /// Returns the next chunk of bytes; `None` at the end of the request.
    ///
    /// # Errors
    /// As [`from_transport`].
    pub async fn chunk(&mut self) -> Result<Option<Bytes>> {
        // The chunk is decoded at once, which takes its memory within other bounds.
        if let Some((chunk, _)) = self.ahead.pop_front() {
            return Ok(Some(chunk));
        }
        while let Some(frame) = self.rest.frame().await {
            // Other frames are trailers. A gRPC request has no trailers that matter.
            if let Ok(chunk) = frame.map_err(from_transport)?.into_data() {
                return Ok(Some(chunk));
            }
        }
        Ok(None)
    }
}

/// Messages that [`WireDecoder`] parses: the one-copy path.
pub(in crate::service) struct Wire {
    body: RequestBody,
    decoder: Working<WireDecoder>,
    /// Part of the last chunk that is not decoded yet.
    chunk: Bytes,
    idle: IdleLimit,
    /// Bytes of rows that had arrived when the limit began anew.
    row_bytes: u64,
    /// True if the limit does not run between messages.
    may_pause: bool,
}

impl Wire {
    /// Creates the messages of a stream whose client may pause as long as it likes between two
    /// messages, and not inside of one.
    pub(in crate::service) fn with_pauses(
        rest: tonic::body::Body,
        arena: Arena,
        limits: Limits,
        cpu_work: CpuWork,
        bounds: Bounds,
    ) -> Self {
        let body = RequestBody { ahead: VecDeque::new(), rest };
        Self { may_pause: true, ..Self::new(body, arena, limits, cpu_work, bounds) }
    }

    pub(super) fn new(body: RequestBody, arena: Arena, limits: Limits, cpu_work: CpuWork, bounds: Bounds) -> Self {
        let decoder = Working::new(WireDecoder::new(arena, limits, bounds), cpu_work);
        Self { body, decoder, chunk: Bytes::new(), idle: IdleLimit::new(limits), row_bytes: 0, may_pause: false }
    }

    /// Waits for the next chunk of bytes; `None` at the end of the request.
    async fn chunk(&mut self) -> Result<Option<Bytes>> {
        if self.may_pause && !self.decoder.get()?.is_inside_message() {
            let chunk = self.body.chunk().await;
            self.idle.rows_arrived();
            return chunk;
        }
        self.idle.arriving(self.body.chunk()).await?
    }
}

impl Source for Wire {
    async fn next(&mut self) -> Result<Option<Received>> {
        loop {
            let mut input = &self.chunk[..];
            let decoder = self.decoder.get()?;
            let effort = decoder.next(&mut input)?;
            if decoder.row_bytes() > self.row_bytes {
                self.row_bytes = decoder.row_bytes();
                self.idle.rows_arrived();
            }
            let taken = self.chunk.len() - input.len();
            bytes::Buf::advance(&mut self.chunk, taken);
            if let Some(effort) = effort {
                match self.decoder.work(effort, WireDecoder::work).await? {
                    None => continue,
                    Some(received) => {
                        if received.has_rows {
                            self.idle.rows_arrived();
                        }
                        return Ok(Some(received));
                    }
                }
            }
            // An empty chunk would keep the memory of its frame while the client is idle.
            self.chunk = Bytes::new();
            match self.chunk().await? {
                Some(chunk) => self.chunk = chunk,
                None => return self.decoder.get()?.end().map(|()| None),
            }
        }
    }
}

/// Messages that tonic parses.
struct Messages<S> {
    messages: S,
    decoder: Working<StreamDecoder>,
    idle: IdleLimit,
}

impl<S> Source for Messages<S>
where
    S: Stream<Item = Result<FlightData, Status>> + Send + Unpin,
{
    async fn next(&mut self) -> Result<Option<Received>> {
        let Some(message) = self.idle.arriving(self.messages.next()).await? else { return Ok(None) };
        let received = self.decoder.decode(message).await?;
        if received.has_rows {
            self.idle.rows_arrived();
        }
        Ok(Some(received))
    }
}

/// Converts a status that the transport made while it read a request.
fn from_transport(status: Status) -> Error {
    match status.code() {
        // tonic reports a message above its size limit with this code.
        Code::OutOfRange => Error::Exhausted(format!(
            "{}; send smaller batches, or raise the server's --message-limit",
            status.message()
        )),
        _ => of_request(&status, "the stream of rows"),
    }
}

/// Returns the time limit of a call from its `grpc-timeout`: up to eight digits and a unit (gRPC
/// over HTTP/2, "Requests"). An unreadable value is no deadline, as in other gRPC servers.
pub(in crate::service) fn timeout(headers: &HeaderMap) -> Option<Duration> {
    let text = headers.get("grpc-timeout")?.to_str().ok()?;
    let (digits, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    if digits.is_empty() || digits.len() > 8 || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let amount: u64 = digits.parse().ok()?;
    match unit {
        "H" => Some(Duration::from_secs(amount * 3600)),
        "M" => Some(Duration::from_secs(amount * 60)),
        "S" => Some(Duration::from_secs(amount)),
        "m" => Some(Duration::from_millis(amount)),
        "u" => Some(Duration::from_micros(amount)),
        "n" => Some(Duration::from_nanos(amount)),
        _ => None,
    }
}
