//! Bodies of requests and responses that apply the limits of their call and record its outcome.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::Instant;

use bytes::Bytes;
use http::HeaderMap;
use http_body::{Frame, SizeHint};
use parking_lot::Mutex;
use tokio::task::AbortHandle;
use tokio::time::{Sleep, sleep_until};
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};
use tonic::body::Body;
use tonic::{Code, Status};

use super::{Call, outcome};
use crate::Error;
use crate::memory::human_bytes;

pub(super) fn deadline_passed() -> Error {
    Error::DeadlineExceeded("the call's deadline passed before the call was done".into())
}

pub(super) fn server_ended() -> Error {
    Error::Unavailable("the server ended before the call was done; try again on another server".into())
}

/// Limits that end a call from outside: its deadline, and the end of the server.
pub(super) struct CallLimits {
    deadline: Option<Pin<Box<Sleep>>>,
    ended: Pin<Box<WaitForCancellationFutureOwned>>,
}

impl CallLimits {
    pub(super) fn new(end: &CancellationToken, deadline: Option<Instant>) -> Self {
        let deadline = deadline.map(|deadline| Box::pin(sleep_until(deadline.into())));
        Self { deadline, ended: Box::pin(end.clone().cancelled_owned()) }
    }

    /// Ready when the call must end, with its status.
    pub(super) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Status> {
        if let Some(deadline) = &mut self.deadline
            && deadline.as_mut().poll(cx).is_ready()
        {
            return Poll::Ready(deadline_passed().into());
        }
        self.ended.as_mut().poll(cx).map(|()| server_ended().into())
    }
}

/// Response body that counts bytes, ends at its limits, and records how it ended.
pub(super) struct CallBody {
    /// `None` once the call has ended.
    body: Arc<Mutex<Option<Body>>>,
    limits: CallLimits,
    _expiry: Option<Expiry>,
    call: Call,
}

/// Drops a response at its deadline, even if the client does not read, in which case the body is
/// not polled. Data that HTTP/2 has already taken (parts of a message or two) stays until the
/// client reads on or goes away.
struct Expiry(AbortHandle);

impl Expiry {
    fn start(deadline: Instant, body: &Arc<Mutex<Option<Body>>>) -> Self {
        // The task must not keep a body alive that the client has already given up.
        let body = Arc::downgrade(body);
        let task = tokio::spawn(async move {
            sleep_until(deadline.into()).await;
            let expired = body.upgrade().and_then(|body| body.lock().take());
            drop(expired);
        });
        Self(task.abort_handle())
    }
}

impl Drop for Expiry {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl CallBody {
    /// Creates the response body of `call`.
    pub(super) fn new(body: Body, limits: CallLimits, call: Call) -> Self {
        let has_ended = http_body::Body::is_end_stream(&body);
        let body = Arc::new(Mutex::new(Some(body)));
        let expiry = call.deadline.filter(|_| !has_ended).map(|deadline| Expiry::start(deadline, &body));
        Self { body, limits, _expiry: expiry, call }
    }

    /// Ends the call with a status. Drops the body now, and not when the client has read the
    /// status.
    fn end(&mut self, status: &Status) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        self.call.outcome = Some((status.code(), status.message().to_owned()));
        let ended = self.body.lock().take();
        drop(ended);
        let mut trailers = HeaderMap::new();
        Poll::Ready(Some(status.add_header(&mut trailers).map(|()| Frame::trailers(trailers))))
    }
}

impl http_body::Body for CallBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let this = &mut *self;
        if this.call.outcome.is_some() {
            return Poll::Ready(None);
        }
        if let Poll::Ready(status) = this.limits.poll(cx) {
            return this.end(&status);
        }
        let polled = this.body.lock().as_mut().map(|body| Pin::new(body).poll_frame(cx));
        // A missing body means that the deadline has just passed.
        let Some(polled) = polled else { return this.end(&deadline_passed().into()) };
        let frame = std::task::ready!(polled);
        match &frame {
            Some(Ok(frame)) => {
                if let Some(data) = frame.data_ref() {
                    this.call.sent += data.len() as u64;
                }
                if let Some(trailers) = frame.trailers_ref() {
                    this.call.outcome = outcome(trailers);
                }
            }
            Some(Err(status)) => this.call.outcome = Some((status.code(), status.message().to_owned())),
            None => this.call.outcome = Some((Code::Ok, String::new())),
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.call.outcome.is_some() || self.body.lock().as_ref().is_some_and(Body::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.body.lock().as_ref().map_or_else(SizeHint::default, Body::size_hint)
    }
}

/// Request body that counts bytes, and fails above its limit.
pub(super) struct CountedBody {
    body: Body,
    bytes: Arc<AtomicU64>,
    limit: u64,
}

impl CountedBody {
    pub(super) fn new(body: Body, bytes: Arc<AtomicU64>, limit: u64) -> Self {
        Self { body, bytes, limit }
    }
}

impl http_body::Body for CountedBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let frame = std::task::ready!(Pin::new(&mut self.body).poll_frame(cx));
        if let Some(data) = frame.as_ref().and_then(|frame| frame.as_ref().ok()).and_then(Frame::data_ref) {
            let bytes = self.bytes.fetch_add(data.len() as u64, Ordering::Relaxed) + data.len() as u64;
            if bytes > self.limit {
                let error = Error::Exhausted(format!(
                    "the request is larger than {}; only DoPut takes more",
                    human_bytes(self.limit)
                ));
                return Poll::Ready(Some(Err(error.into())));
            }
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
