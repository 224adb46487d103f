//! Layer in front of tonic's Flight service. It takes the DoPut calls that it can serve with one
//! copy.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use arrow_flight::FlightDescriptor;
use arrow_flight::flight_descriptor::DescriptorType;
use bytes::Bytes;
use http::{HeaderMap, Request, Response};
use http_body::Frame;
use tonic::Status;
use tonic::body::Body;
use tonic::server::NamedService;
use tower::{Layer, Service};

use super::decoder::read_descriptor;
use super::respond::ResponseBody;
use super::upload::{IdleLimit, RequestBody, Wire, spawn, timeout};
use super::wire::{DESCRIPTOR_BYTES_MAX, Event, HEADER_BYTES_MAX, METADATA_BYTES_MAX, Parser};
use super::{Limits, UploadHandler};
use crate::memory::{Arena, Bounds, CountedBytes, Held};
use crate::service::cpu_work::CpuWork;
use crate::{Error, Result};

const DO_PUT: &str = "/arrow.flight.protocol.FlightService/DoPut";

/// Puts [`DoPut`] in front of a Flight service.
#[derive(Clone)]
pub struct DoPutLayer {
    uploads: Arc<Uploads>,
}

struct Uploads {
    handler: Arc<dyn UploadHandler>,
    arena: Arena,
    limits: Limits,
    cpu_work: CpuWork,
}

impl DoPutLayer {
    /// Creates a layer. Its uploads go to `arena` and from there to `handler`. Their long work runs
    /// in `cpu_work`, or in the tenant's, if an earlier layer has put that into the extensions.
    pub fn new(handler: Arc<dyn UploadHandler>, arena: Arena, limits: Limits, cpu_work: CpuWork) -> Self {
        Self { uploads: Arc::new(Uploads { handler, arena, limits, cpu_work }) }
    }
}

impl<S> Layer<S> for DoPutLayer {
    type Service = DoPut<S>;

    fn layer(&self, inner: S) -> DoPut<S> {
        DoPut { inner, uploads: self.uploads.clone() }
    }
}

/// Flight service that serves DoPut to a path, with one copy. It leaves all other calls to `S`:
/// other methods, other descriptors (commands), and calls whose messages are compressed by gRPC.
#[derive(Clone)]
pub struct DoPut<S> {
    inner: S,
    uploads: Arc<Uploads>,
}

impl<S: NamedService> NamedService for DoPut<S> {
    const NAME: &'static str = S::NAME;
}

type ResponseFuture = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

impl<S> Service<Request<Body>> for DoPut<S>
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Infallible> + Clone + Send + 'static,
    S::Future: Send,
{
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = ResponseFuture;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<Body>) -> ResponseFuture {
        if request.uri().path() != DO_PUT || is_compressed(request.headers()) || !is_grpc(request.headers()) {
            return Box::pin(self.inner.call(request));
        }
        // The service that was polled ready must serve this call. A clone of it takes its place for
        // the next.
        let clone = self.inner.clone();
        let inner = std::mem::replace(&mut self.inner, clone);
        Box::pin(serve(request, inner, self.uploads.clone()))
    }
}

async fn serve<S>(request: Request<Body>, mut inner: S, uploads: Arc<Uploads>) -> Result<Response<Body>, Infallible>
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Infallible>,
{
    let (parts, rest) = request.into_parts();
    let bounds = parts.extensions.get::<Bounds>().cloned().unwrap_or_default();
    let mut body = RequestBody { ahead: VecDeque::new(), rest };
    let read_ahead = read_ahead(&mut body, uploads.limits, &bounds);
    let descriptor = match timeout(&parts.headers) {
        None => read_ahead.await,
        Some(after) => tokio::time::timeout(after, read_ahead).await.unwrap_or_else(|_| {
            Err(Error::DeadlineExceeded(format!(
                "the call's deadline passed: no complete first message of the upload came within {after:?}"
            )))
        }),
    };
    match descriptor {
        Ok(descriptor) if descriptor.r#type() == DescriptorType::Path => {
            let cpu_work = parts.extensions.get::<CpuWork>().unwrap_or(&uploads.cpu_work).clone();
            let source = Wire::new(body, uploads.arena.clone(), uploads.limits, cpu_work.clone(), bounds);
            Ok(ResponseBody::response(spawn(uploads.handler.clone(), parts, source, cpu_work)))
        }
        Ok(_) => inner.call(Request::from_parts(parts, Body::new(Replay { body, bounds, held: Vec::new() }))).await,
        Err(error) => Ok(Status::from(error).into_http()),
    }
}

/// Reads up to the descriptor, and keeps the read bytes in `body.ahead`. Senders put the descriptor
/// first. If the descriptor comes later, the bytes of the first message (its schema) are held here
/// until then.
async fn read_ahead(body: &mut RequestBody, limits: Limits, bounds: &Bounds) -> Result<FlightDescriptor> {
    /// More bytes before the descriptor cannot be a schema message.
    const AHEAD_BYTES_MAX: usize = HEADER_BYTES_MAX + METADATA_BYTES_MAX + DESCRIPTOR_BYTES_MAX;
    let mut parser = Parser::new(limits.message_bytes, bounds.clone());
    let idle = IdleLimit::new(limits);
    let mut ahead = VecDeque::new();
    let mut ahead_bytes = 0;
    let descriptor = loop {
        let Some(chunk) = idle.arriving(body.chunk()).await?? else {
            parser.end()?;
            return Err(Error::Invalid("the upload ended before its first message".into()));
        };
        ahead_bytes += chunk.len();
        let found = find_descriptor(&mut parser, &chunk)?;
        ahead.push_back(own(chunk, bounds)?);
        if let Some(descriptor) = found {
            break descriptor;
        }
        if ahead_bytes > AHEAD_BYTES_MAX {
            return Err(Error::Invalid(
                "the first message of an upload starts with data instead of a descriptor".into(),
            ));
        }
    };
    body.ahead = ahead;
    read_descriptor(&descriptor)
}

/// Returns a chunk with its memory. A chunk is a part of a buffer of its connection, which may be
/// many times as large. So small chunks are copied.
fn own(chunk: Bytes, bounds: &Bounds) -> Result<(Bytes, Held)> {
    const SMALL: usize = 64 << 10;
    let held = match chunk.len() {
        small if small <= CountedBytes::FREE => Held::default(),
        len => bounds.reserve(len as u64, "the first message of an upload")?,
    };
    let chunk = if chunk.len() <= SMALL { Bytes::copy_from_slice(&chunk) } else { chunk };
    Ok((chunk, held))
}

fn find_descriptor(parser: &mut Parser, mut chunk: &[u8]) -> Result<Option<Vec<u8>>> {
    while let Some(event) = parser.next(&mut chunk)? {
        if let Some(descriptor) = &parser.fields().descriptor {
            return Ok(Some(descriptor.clone()));
        }
        if event == Event::MessageEnds {
            return Err(Error::Invalid(
                "the first message of an upload has no flight descriptor, which names the table".into(),
            ));
        }
    }
    Ok(None)
}

fn is_compressed(headers: &HeaderMap) -> bool {
    headers.get("grpc-encoding").is_some_and(|encoding| encoding != "identity")
}

fn is_grpc(headers: &HeaderMap) -> bool {
    let content_type = headers.get(http::header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
    content_type.is_some_and(|value| value.starts_with("application/grpc"))
}

/// Request body that first repeats the bytes that were read ahead. Its bytes stay counted until it
/// is dropped, because the service inside collects them to messages.
struct Replay {
    body: RequestBody,
    bounds: Bounds,
    held: Vec<Held>,
}

impl http_body::Body for Replay {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let this = &mut *self;
        if let Some((chunk, held)) = this.body.ahead.pop_front() {
            this.held.push(held);
            return Poll::Ready(Some(Ok(Frame::data(chunk))));
        }
        let frame = std::task::ready!(Pin::new(&mut this.body.rest).poll_frame(context));
        if let Some(data) = frame.as_ref().and_then(|frame| frame.as_ref().ok()).and_then(Frame::data_ref) {
            this.held.push(this.bounds.reserve(data.len() as u64, "the upload")?);
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.ahead.is_empty() && self.body.rest.is_end_stream()
    }
}
