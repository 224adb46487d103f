//! One upload from its first message to its last, on both decoding paths.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use arrow::array::{ArrayRef, RecordBatch};
use arrow_flight::{FlightData, FlightDescriptor};
use bytes::Bytes;
use futures::{Stream, StreamExt};
use http::{Extensions, HeaderMap};
use http_body_util::BodyExt;
use tonic::{Code, Status};

use super::decoder::{Content, Received, StreamDecoder, WireDecoder};
use super::respond::{AckSender, Acks};
use super::{Limits, UploadHandler, UploadSink};
use crate::human::asked;
use crate::memory::Arena;
use crate::service::blocking::heavy;
use crate::service::encode::array_bytes;
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
) -> Acks
where
    S: Stream<Item = Result<FlightData, Status>> + Send + Unpin + 'static,
{
    let source = Messages { messages, decoder: StreamDecoder::new(arena, limits), limits };
    spawn(handler, request, source)
}

/// Runs an upload in a task of its own, within the deadline of its request.
pub(super) fn spawn(
    handler: Arc<dyn UploadHandler>,
    request: http::request::Parts,
    source: impl Source + 'static,
) -> Acks {
    let deadline = timeout(&request.headers);
    Acks::spawn(|acks| async move {
        let upload = run(&*handler, &request.extensions, source, &acks);
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

/// Source of an upload's messages.
pub(super) trait Source: Send {
    /// Returns the next message; `None` when the client has sent all its data.
    fn next(&mut self) -> impl Future<Output = Result<Option<Received>>> + Send;
}

async fn run(
    handler: &dyn UploadHandler,
    extensions: &Extensions,
    mut source: impl Source,
    acks: &AckSender,
) -> Result<()> {
    let Begun { mut sink, descriptor } = begin(handler, extensions, &mut source).await?;
    let attempt = || format!("uploading {}", target(&descriptor));
    while let Some(message) = source.next().await.context(attempt)? {
        check_later(&message, &descriptor).context(attempt)?;
        if let Content::Batch(batch) = message.content {
            acks.send(heavy(effort_bytes(&batch), || sink.append(batch))?);
        }
    }
    acks.send(sink.finish().await?);
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
///
/// A call that declares heavy work to the runtime may lose its processor, whose cache has the
/// bytes, to other calls of the worker. On two cores, this costs a quarter of the processor time of
/// an upload in batches of 4 MiB.
fn effort_bytes(batch: &RecordBatch) -> usize {
    /// Statistics of numbers run at memory speed, this many times faster than text.
    const FASTER: usize = 8;
    let effort = |column: &ArrayRef| match column.data_type().is_primitive() {
        true => array_bytes(column) / FASTER,
        false => array_bytes(column),
    };
    batch.columns().iter().map(effort).sum()
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

/// Waits for the client's next message, up to the idle limit. Without this limit, a client that
/// neither sends nor ends a call would occupy memory, and the name of a table, while its connection
/// lives.
pub(super) async fn arriving<T>(next: impl Future<Output = T>, limits: Limits) -> Result<T> {
    tokio::time::timeout(limits.idle, next).await.map_err(|_| {
        Error::DeadlineExceeded(format!(
            "nothing arrived for this upload within {} s (the server's --upload-idle-seconds), so it was dropped with its rows; send it again",
            limits.idle.as_secs()
        ))
    })
}

/// Bytes of a request, as they arrive.
pub(super) struct RequestBody {
    /// Chunks that were read ahead to find the destination of the request.
    pub ahead: VecDeque<Bytes>,
    pub rest: tonic::body::Body,
}

impl RequestBody {
    /// Returns the next chunk of bytes; `None` at the end of the request.
    ///
    /// # Errors
    /// As [`from_transport`].
    pub async fn chunk(&mut self) -> Result<Option<Bytes>> {
        if let Some(chunk) = self.ahead.pop_front() {
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
pub(super) struct Wire {
    body: RequestBody,
    decoder: WireDecoder,
    /// Part of the last chunk that is not decoded yet.
    chunk: Bytes,
    limits: Limits,
}

impl Wire {
    pub(super) fn new(body: RequestBody, arena: Arena, limits: Limits) -> Self {
        Self { body, decoder: WireDecoder::new(arena, limits), chunk: Bytes::new(), limits }
    }
}

impl Source for Wire {
    async fn next(&mut self) -> Result<Option<Received>> {
        loop {
            let mut input = &self.chunk[..];
            let received = self.decoder.next(&mut input)?;
            let taken = self.chunk.len() - input.len();
            bytes::Buf::advance(&mut self.chunk, taken);
            if received.is_some() {
                return Ok(received);
            }
            match arriving(self.body.chunk(), self.limits).await?? {
                Some(chunk) => self.chunk = chunk,
                None => return self.decoder.end().map(|()| None),
            }
        }
    }
}

/// Messages that tonic parses.
struct Messages<S> {
    messages: S,
    decoder: StreamDecoder,
    limits: Limits,
}

impl<S> Source for Messages<S>
where
    S: Stream<Item = Result<FlightData, Status>> + Send + Unpin,
{
    async fn next(&mut self) -> Result<Option<Received>> {
        match arriving(self.messages.next(), self.limits).await? {
            None => Ok(None),
            Some(message) => self.decoder.decode(message.map_err(from_transport)?).map(Some),
        }
    }
}

/// Converts a status that the transport made while it read a request.
pub(in crate::service) fn from_transport(status: Status) -> Error {
    let message = status.message();
    match status.code() {
        // tonic reports a message above its size limit with this code.
        Code::OutOfRange => {
            Error::Exhausted(format!("{message}; send smaller batches, or raise the server's --message-limit"))
        }
        Code::Unimplemented => Error::Unsupported(message.into()),
        Code::DeadlineExceeded => Error::DeadlineExceeded(message.into()),
        Code::InvalidArgument | Code::Internal => Error::Invalid(format!("the request could not be read: {message}")),
        _ => Error::Cancelled(format!("the client ended the call before the upload was complete: {message}")),
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
