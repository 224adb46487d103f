//! One upload from its first message to its last, whichever way the messages come in.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use arrow::array::{ArrayRef, RecordBatch};
use arrow_flight::FlightData;
use bytes::Bytes;
use futures::{Stream, StreamExt};
use http::{Extensions, HeaderMap};
use http_body_util::BodyExt;
use tonic::{Code, Status};

use super::decoder::{Content, Received, StreamDecoder, WireDecoder};
use super::respond::{AckSender, Acks};
use super::{Limits, UploadHandler, UploadSink};
use crate::memory::Arena;
use crate::service::blocking::heavy;
use crate::service::encode::array_bytes;
use crate::{Context, Error, Result};

/// Runs an upload whose messages were received by tonic: the ordinary path, with a second copy.
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

/// Runs an upload in a task of its own, within the deadline that its request names.
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

/// Where an upload's messages come from.
pub(super) trait Source: Send {
    /// The next message; `None` when the client has sent everything.
    fn next(&mut self) -> impl Future<Output = Result<Option<Received>>> + Send;
}

async fn run(
    handler: &dyn UploadHandler,
    extensions: &Extensions,
    mut source: impl Source,
    acks: &AckSender,
) -> Result<()> {
    let (mut sink, target) = begin(handler, extensions, &mut source).await?;
    while let Some(message) = source.next().await.context(|| format!("uploading {target}"))? {
        if let Content::Batch(batch) = message.content {
            acks.send(heavy(effort_bytes(&batch), || sink.append(batch, message.app_metadata))?);
        }
    }
    acks.send(sink.finish().await?);
    Ok(())
}

/// Bytes of a batch that take the time of so many bytes of text when its statistics are taken.
///
/// Whoever tells the runtime that work is heavy loses his processor, and the bytes in its cache, to other calls of the same
/// worker: on two cores, a quarter of the processor time of an upload in batches of 4 MiB.
fn effort_bytes(batch: &RecordBatch) -> usize {
    /// Numbers pass by at the speed of memory.
    const FASTER: usize = 8;
    let effort = |column: &ArrayRef| match column.data_type().is_primitive() {
        true => array_bytes(column) / FASTER,
        false => array_bytes(column),
    };
    batch.columns().iter().map(effort).sum()
}

/// Reads up to the schema, and tells what is uploaded to. Descriptor and options are those of the first message that has any: the schema's, usually.
async fn begin(
    handler: &dyn UploadHandler,
    extensions: &Extensions,
    source: &mut impl Source,
) -> Result<(Box<dyn UploadSink>, String)> {
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
            let target = match &descriptor.path[..] {
                [table] => format!("table {table:?}"),
                path => format!("{path:?}"),
            };
            return Ok((handler.begin(extensions, descriptor, schema, app_metadata).await?, target));
        }
    }
    Err(Error::Invalid("the upload ended before its schema came".into()))
}

/// What the client sends next, unless that takes too long: who neither sends nor ends a call would keep rows, and the name of a
/// table, for as long as its connection lives.
pub(super) async fn arriving<T>(next: impl Future<Output = T>, limits: Limits) -> Result<T> {
    tokio::time::timeout(limits.idle, next).await.map_err(|_| {
        Error::DeadlineExceeded(format!(
            "nothing arrived for this upload within {} s (the server's --upload-idle-seconds), and it was given up with its rows; send it again",
            limits.idle.as_secs()
        ))
    })
}

/// The bytes of a request, as they arrive.
pub(super) struct RequestBody {
    /// What was read ahead to find out where the request goes.
    pub ahead: VecDeque<Bytes>,
    pub rest: tonic::body::Body,
}

impl RequestBody {
    /// The next chunk of bytes; `None` at the end of the request.
    ///
    /// # Errors
    /// As [`from_transport`].
    pub async fn chunk(&mut self) -> Result<Option<Bytes>> {
        if let Some(chunk) = self.ahead.pop_front() {
            return Ok(Some(chunk));
        }
        while let Some(frame) = self.rest.frame().await {
            // What is no data is trailers, of which a gRPC request has none that matter.
            if let Ok(chunk) = frame.map_err(from_transport)?.into_data() {
                return Ok(Some(chunk));
            }
        }
        Ok(None)
    }
}

/// Messages taken apart by ourselves: the one-copy path.
pub(super) struct Wire {
    body: RequestBody,
    decoder: WireDecoder,
    /// What of the last chunk was not decoded yet.
    chunk: Bytes,
    limits: Limits,
}

impl Wire {
    pub fn new(body: RequestBody, arena: Arena, limits: Limits) -> Self {
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

/// Messages taken apart by tonic.
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

/// What a status means that the transport made while it read a request.
pub(super) fn from_transport(status: Status) -> Error {
    let message = status.message();
    match status.code() {
        // tonic's own message limit.
        Code::OutOfRange => {
            Error::Exhausted(format!("{message}; send smaller batches, or raise the server's --message-limit"))
        }
        Code::Unimplemented => Error::Unsupported(message.into()),
        Code::DeadlineExceeded => Error::DeadlineExceeded(message.into()),
        Code::InvalidArgument | Code::Internal => Error::Invalid(format!("the request could not be read: {message}")),
        _ => Error::Cancelled(format!("the client ended the call before the upload was complete: {message}")),
    }
}

/// The time that a call may take, from its `grpc-timeout`: up to eight digits and a unit (gRPC over HTTP/2, "Requests").
/// One that cannot be read is no deadline, as in other gRPC servers.
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
