//! Response of an upload: acknowledgements while it runs, and its status at the end.
//!
//! The upload runs in a task of its own in parallel with the response. Many clients need this: they
//! send all their data before they read the first acknowledgement. Acknowledgements wait in a short
//! queue for such a client. When the queue is full, the newest acknowledgement replaces the one
//! before it. No information is lost, because each acknowledgement counts from the beginning of the
//! upload.

use std::collections::VecDeque;
use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use arrow_flight::PutResult;
use bytes::{BufMut, Bytes, BytesMut};
use futures::task::AtomicWaker;
use futures::{FutureExt, Stream};
use http::HeaderMap;
use http_body::Frame;
use parking_lot::Mutex;
use prost::Message;
use tokio::task::AbortHandle;
use tonic::{Code, Status};

use super::Ack;
use crate::{Error, Result};

/// Maximum number of acknowledgements that wait for a client. A client that writes this many
/// batches, and then reads one acknowledgement for each, gets all of them.
const WAITING_MAX: usize = 1024;

/// Acknowledgements of an upload, then its error if it failed. Dropping it ends the upload.
#[derive(Debug)]
pub struct Acks {
    shared: Arc<Shared>,
    upload: AbortHandle,
}

/// Sender side of the queue.
#[derive(Debug)]
pub(super) struct AckSender {
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    waker: AtomicWaker,
}

#[derive(Debug, Default)]
struct State {
    waiting: VecDeque<Ack>,
    /// `None` while the upload runs.
    outcome: Option<Result<()>>,
}

impl Acks {
    /// Runs an upload, on the current runtime.
    pub(super) fn spawn<F>(upload: impl FnOnce(AckSender) -> F) -> Self
    where
        F: Future<Output = Result<()>> + Send + 'static,
    {
        let shared = Arc::new(Shared::default());
        let end = EndOnDrop(shared.clone());
        let upload = upload(AckSender { shared: shared.clone() });
        let task = tokio::spawn(async move {
            let outcome = AssertUnwindSafe(upload).catch_unwind().await;
            end.0.end(outcome.unwrap_or_else(|_| {
                Err(Error::Internal("the upload failed because of a defect in the server".into()))
            }));
        });
        Self { shared, upload: task.abort_handle() }
    }
}

impl Drop for Acks {
    fn drop(&mut self) {
        self.upload.abort();
    }
}

impl Stream for Acks {
    type Item = Result<Ack>;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Ack>>> {
        self.shared.waker.register(context.waker());
        let mut state = self.shared.state.lock();
        match (state.waiting.pop_front(), &mut state.outcome) {
            (Some(ack), _) => Poll::Ready(Some(Ok(ack))),
            (None, None) => Poll::Pending,
            (None, Some(outcome)) => Poll::Ready(std::mem::replace(outcome, Ok(())).err().map(Err)),
        }
    }
}

impl AckSender {
    /// Queues an acknowledgement.
    pub fn send(&self, ack: Ack) {
        let mut state = self.shared.state.lock();
        if state.waiting.len() == WAITING_MAX {
            state.waiting.pop_back();
        }
        state.waiting.push_back(ack);
        drop(state);
        self.shared.waker.wake();
    }
}

impl Shared {
    fn end(&self, outcome: Result<()>) {
        self.state.lock().outcome.get_or_insert(outcome);
        self.waker.wake();
    }
}

/// Ends the response even if the upload's task is dropped early, as a runtime does when it shuts
/// down.
struct EndOnDrop(Arc<Shared>);

impl Drop for EndOnDrop {
    fn drop(&mut self) {
        self.0.end(Err(Error::Unavailable("the server is shutting down; send the upload again later".into())));
    }
}

/// Body of a gRPC response: `PutResult` messages, with the status in its trailers.
#[derive(Debug)]
pub(super) struct ResponseBody {
    /// `None` once the trailers were sent.
    acks: Option<Acks>,
}

impl ResponseBody {
    /// Returns the HTTP response with the given acknowledgements.
    pub fn response(acks: Acks) -> http::Response<tonic::body::Body> {
        let mut response = http::Response::new(tonic::body::Body::new(Self { acks: Some(acks) }));
        response.headers_mut().insert(http::header::CONTENT_TYPE, tonic::metadata::GRPC_CONTENT_TYPE);
        response
    }
}

impl http_body::Body for ResponseBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let Some(acks) = &mut self.acks else { return Poll::Ready(None) };
        let next = std::task::ready!(Pin::new(acks).poll_next(context));
        let status = match next {
            Some(Ok(ack)) => return Poll::Ready(Some(Ok(Frame::data(encode(ack))))),
            Some(Err(error)) => Status::from(error),
            None => Status::new(Code::Ok, ""),
        };
        self.acks = None;
        let mut trailers = HeaderMap::new();
        Poll::Ready(Some(status.add_header(&mut trailers).map(|()| Frame::trailers(trailers))))
    }

    fn is_end_stream(&self) -> bool {
        self.acks.is_none()
    }
}

/// Encodes one gRPC message: flag, length, protobuf.
fn encode(ack: Ack) -> Bytes {
    let message = PutResult { app_metadata: ack.to_json().into() };
    let len = message.encoded_len();
    let mut frame = BytesMut::with_capacity(5 + len);
    frame.put_u8(0);
    frame.put_u32(u32::try_from(len).expect("an acknowledgement has tens of bytes"));
    message.encode(&mut frame).expect("a BytesMut grows as it needs to");
    frame.freeze()
}
