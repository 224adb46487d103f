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
use std::time::Duration;

use arrow_flight::Ticket;
use bytes::{Buf, Bytes, BytesMut};
use futures::StreamExt;
use futures::stream::BoxStream;
use http::{HeaderMap, Request, Response};
use http_body::Frame;
use http_body_util::BodyExt;
use prost::Message as _;
use tokio::time::{Instant, Sleep, sleep};
use tonic::Status;
use tonic::body::Body;
use tonic::server::NamedService;
use tower::{Layer, Service};

use super::call_memory::{CallShare, Counted};
use super::encode::Message;
use super::get_info::Asker;
use super::shared::Shared;
use super::status::of_request;
use super::{exchange, get_data};
use crate::memory::{Arena, Held};
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
    let memory = asker.memory.clone();
    let messages = if head.uri.path() == DO_EXCHANGE {
        exchange::join(shared, asker, body).await?.boxed()
    } else {
        let ticket = read_ticket(body).await?;
        get_data::read(shared, &asker.caller, &ticket.ticket, asker.record, &memory).await?.boxed()
    };
    let messages = Some(messages);
    let arena = shared.catalog.arena().clone();
    let making_bytes = MAKING_BYTES.min(shared.call_memory.whole().limit_bytes() / MAKING_PART);
    let body = WireBody { messages, ready: Vec::new().into_iter(), arena, memory, making_bytes, waiting: None };
    let mut response = Response::new(Body::new(body));
    response.headers_mut().insert(http::header::CONTENT_TYPE, tonic::metadata::GRPC_CONTENT_TYPE);
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

/// Memory that is taken before a message is made, in bytes: the usual size of a message. Most
/// messages consist of pieces of the arena, and give nearly all of it back.
const MAKING_BYTES: u64 = 2 << 20;

/// Limits [`MAKING_BYTES`] to the memory of calls divided by this number.
const MAKING_PART: u64 = 16;

/// Time between attempts to take that memory.
const MAKING_RETRY: Duration = Duration::from_millis(20);

/// Time after which a reader that finds no memory is refused.
const MAKING_WAIT: Duration = Duration::from_secs(30);

/// Body of a gRPC response: messages in pieces, with the status in its trailers.
///
/// Pieces that are not stored in the arena count as memory of calls until they are sent. A message
/// is made when all pieces of the message before it have been taken.
struct WireBody {
    /// `None` once the trailers were sent.
    messages: Option<BoxStream<'static, Result<Message>>>,
    /// Remaining pieces of the current message.
    ready: std::vec::IntoIter<Bytes>,
    arena: Arena,
    memory: CallShare,
    making_bytes: u64,
    /// Next attempt to take memory, and the time after which there is none.
    waiting: Option<(Pin<Box<Sleep>>, Instant)>,
}

impl WireBody {
    /// Takes the memory of the next message, when there is some.
    fn poll_memory(&mut self, cx: &mut Context<'_>) -> Poll<Result<Held>> {
        loop {
            let refusal = match self.memory.bounds().reserve(self.making_bytes, "the answer") {
                Ok(held) => {
                    self.waiting = None;
                    return Poll::Ready(Ok(held));
                }
                Err(refusal) => refusal,
            };
            let start = || (Box::pin(sleep(MAKING_RETRY)), Instant::now() + MAKING_WAIT);
            let (retry, end) = self.waiting.get_or_insert_with(start);
            if Instant::now() >= *end {
                return Poll::Ready(Err(refusal));
            }
            std::task::ready!(retry.as_mut().poll(cx));
            retry.as_mut().reset(Instant::now() + MAKING_RETRY);
        }
    }

    /// Returns the pieces of a message with their memory. A part of it was taken already: `held`.
    fn pieces(&self, message: Message, mut held: Held) -> Result<Vec<Bytes>> {
        let bytes = message.heap_bytes(&self.arena) as u64;
        held.shrink_to(bytes);
        held.try_grow(bytes - held.bytes(), "the answer")?;
        let held = Arc::new(held);
        let counted = |bytes| Bytes::from_owner(Counted { bytes, _held: held.clone() });
        Ok(message.into_wire().into_iter().map(counted).collect())
    }

    fn poll_pieces(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Vec<Bytes>>>> {
        let held = match std::task::ready!(self.poll_memory(cx)) {
            Ok(held) => held,
            Err(refusal) => return Poll::Ready(Some(Err(refusal))),
        };
        let Some(messages) = &mut self.messages else { return Poll::Ready(None) };
        let message = std::task::ready!(messages.as_mut().poll_next(cx));
        Poll::Ready(message.map(|message| self.pieces(message?, held)))
    }
}

impl http_body::Body for WireBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        loop {
            if let Some(piece) = self.ready.next() {
                return Poll::Ready(Some(Ok(Frame::data(piece))));
            }
            if self.messages.is_none() {
                return Poll::Ready(None);
            }
            let status = match std::task::ready!(self.poll_pieces(cx)) {
                Some(Ok(pieces)) => {
                    self.ready = pieces.into_iter();
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
