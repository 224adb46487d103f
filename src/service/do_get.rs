//! Layer in front of tonic's Flight service that answers DoGet and DoExchange without copying the
//! rows.
//!
//! tonic's encoder copies every message into a buffer of its own. [`DoGet`] writes gRPC's frames
//! itself: a few bytes of head for each message, then pieces of the batches' own buffers. The
//! pieces are sent to the socket directly from the arena. Calls in messages whose compression the
//! server does not know go to the service inside, which refuses them.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use arrow_flight::Ticket;
use bytes::{Buf, Bytes, BytesMut};
use futures::StreamExt;
use futures::stream::BoxStream;
use http::{HeaderMap, Request, Response};
use http_body::Frame;
use http_body_util::BodyExt;
use prost::Message as _;
use tonic::Status;
use tonic::body::Body;
use tonic::server::NamedService;
use tower::{Layer, Service};

use super::answer_memory::Answer;
use super::get_info::Asker;
use super::shared::Shared;
use super::status::of_request;
use super::{exchange, get_data};
use crate::{Error, Result};

const DO_GET: &str = "/arrow.flight.protocol.FlightService/DoGet";
const DO_EXCHANGE: &str = "/arrow.flight.protocol.FlightService/DoExchange";

/// Maximum size of a request, in bytes. A ticket is a few hundred bytes.
const REQUEST_BYTES_MAX: usize = 64 << 10;

/// Size of gRPC's head of a message: one byte that says if the message is compressed, and four
/// bytes with its length.
const FRAME_HEAD_BYTES: usize = 5;

/// Puts [`DoGet`] in front of a Flight service.
#[derive(Clone, Debug)]
pub struct DoGetLayer {
    shared: Arc<Shared>,
}

impl DoGetLayer {
    /// Creates the layer of a server.
    pub fn new(shared: Arc<Shared>) -> Self {
        Self { shared }
    }
}

impl<S> Layer<S> for DoGetLayer {
    type Service = DoGet<S>;

    fn layer(&self, inner: S) -> DoGet<S> {
        DoGet { shared: self.shared.clone(), inner }
    }
}

/// Flight service that answers DoGet and DoExchange, and leaves everything else to `S`.
#[derive(Clone, Debug)]
pub struct DoGet<S> {
    shared: Arc<Shared>,
    inner: S,
}

impl<S: NamedService> NamedService for DoGet<S> {
    const NAME: &'static str = S::NAME;
}

impl<S> Service<Request<Body>> for DoGet<S>
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Infallible>,
    S::Future: Send + 'static,
{
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let is_compressed =
            request.headers().get("grpc-encoding").is_some_and(|encoding| encoding.as_bytes() != b"identity");
        let path = request.uri().path();
        if (path != DO_GET && path != DO_EXCHANGE) || is_compressed {
            return Box::pin(self.inner.call(request));
        }
        let shared = self.shared.clone();
        Box::pin(
            async move { Ok(answer(&shared, request).await.unwrap_or_else(|error| Status::from(error).into_http())) },
        )
    }
}

async fn answer(shared: &Arc<Shared>, request: Request<Body>) -> Result<Response<Body>> {
    let (head, body) = request.into_parts();
    let asker = Asker::of(shared, &head.headers, &head.extensions)?;
    let (job, messages) = if head.uri.path() == DO_EXCHANGE {
        let (job, messages) = exchange::join(shared, asker, body).await?;
        (Some(job), messages.boxed())
    } else {
        let ticket = read_ticket(body).await?;
        (None, get_data::read(shared, &asker.caller, &ticket.ticket, asker.record, &asker.memory).await?.boxed())
    };
    let body = WireBody { messages: Some(messages), ready: Vec::new().into_iter() };
    let mut response = Response::new(Body::new(body));
    response.headers_mut().insert(http::header::CONTENT_TYPE, tonic::metadata::GRPC_CONTENT_TYPE);
    if let Some(job) = job {
        response.headers_mut().insert(exchange::JOB_HEADER, job.0.into());
    }
    Ok(response)
}

/// Reads the only message of the request.
async fn read_ticket(mut body: Body) -> Result<Ticket> {
    let mut bytes = BytesMut::new();
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|status| of_request(&status, "the request of DoGet"))?;
        bytes.extend_from_slice(frame.data_ref().map_or(&[], Bytes::as_ref));
        if bytes.len() > REQUEST_BYTES_MAX {
            return Err(Error::Exhausted(format!(
                "the ticket is longer than {REQUEST_BYTES_MAX} bytes, and this server's tickets are shorter"
            )));
        }
    }
    let malformed = || Error::Invalid("the request to DoGet is not one gRPC message with a ticket".into());
    if bytes.len() < FRAME_HEAD_BYTES || bytes.get_u8() != 0 || bytes.get_u32() as usize != bytes.len() {
        return Err(malformed());
    }
    Ticket::decode(bytes).map_err(|_| malformed())
}

/// Body of a gRPC response: messages in pieces, with the status in its trailers. A message is asked
/// for when all pieces of the message before it have been taken.
struct WireBody {
    /// `None` once the trailers were sent.
    messages: Option<BoxStream<'static, Result<Answer>>>,
    /// Remaining pieces of the current message.
    ready: std::vec::IntoIter<Bytes>,
}

impl http_body::Body for WireBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        loop {
            if let Some(piece) = self.ready.next() {
                return Poll::Ready(Some(Ok(Frame::data(piece))));
            }
            let Some(messages) = &mut self.messages else { return Poll::Ready(None) };
            let status = match std::task::ready!(messages.as_mut().poll_next(cx)) {
                Some(Ok(answer)) => {
                    self.ready = answer.into_wire().into_iter();
                    continue;
                }
                Some(Err(error)) => Status::from(error),
                None => Status::ok(""),
            };
            self.messages = None;
            let mut trailers = HeaderMap::new();
            return Poll::Ready(Some(status.add_header(&mut trailers).map(|()| Frame::trailers(trailers))));
        }
    }
}
