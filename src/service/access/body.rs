//! Bodies of requests and responses that apply the limits of their call and record its outcome.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures::future::BoxFuture;
use http::HeaderMap;
use http_body::{Body as _, Frame, SizeHint};
use parking_lot::Mutex;
use tokio::task::AbortHandle;
use tokio::time::{Sleep, sleep_until};
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};
use tonic::body::Body;
use tonic::{Code, Status};

use super::messages::{Messages, Rules};
use super::{Call, ONLY_ROWS, outcome};
use crate::Error;
use crate::memory::{Interrupt, human_bytes};
use crate::service::cpu_work::CpuWork;

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
    body: Arc<Mutex<Option<Answer>>>,
    limits: CallLimits,
    _expiry: Option<Expiry>,
    call: Call,
}

/// Rest of an answer.
struct Answer {
    /// Frame that was taken from the body before the client had room for it. Its memory is counted.
    first: Option<Frame<Bytes>>,
    body: Body,
}

/// Drops a response at its deadline, even if the client does not read, in which case the body is
/// not polled. Data that HTTP/2 has already taken (parts of a message or two) stays until the
/// client reads on or goes away.
struct Expiry(AbortHandle);

impl Expiry {
    fn start(deadline: Instant, body: &Arc<Mutex<Option<Answer>>>) -> Self {
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
    /// Creates the response body of `call`: `first`, then the rest of `body`.
    pub(super) fn new(first: Option<Frame<Bytes>>, body: Body, limits: CallLimits, call: Call) -> Self {
        let has_ended = first.is_none() && body.is_end_stream();
        let body = Arc::new(Mutex::new(Some(Answer { first, body })));
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
        let polled = this.body.lock().as_mut().map(|answer| match answer.first.take() {
            Some(first) => Poll::Ready((true, Some(Ok(first)))),
            None => Pin::new(&mut answer.body).poll_frame(cx).map(|frame| (false, frame)),
        });
        // A missing body means that the deadline has just passed.
        let Some(polled) = polled else { return this.end(&deadline_passed().into()) };
        let frame = match std::task::ready!(polled) {
            (false, Some(Ok(frame))) => match this.call.counted(frame) {
                Ok(frame) => Some(Ok(frame)),
                Err(full) => return this.end(&full.into()),
            },
            (_, frame) => frame,
        };
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
        let has_ended = |answer: &Answer| answer.first.is_none() && answer.body.is_end_stream();
        self.call.outcome.is_some() || self.body.lock().as_ref().is_some_and(has_ended)
    }

    fn size_hint(&self) -> SizeHint {
        match &*self.body.lock() {
            Some(Answer { first: None, body }) => body.size_hint(),
            _ => SizeHint::default(),
        }
    }
}

/// Time in which a request must have arrived in whole. A client that stops in the middle would
/// otherwise hold memory while its connection lives.
const ARRIVAL: Duration = Duration::from_secs(60);

/// Request body that counts bytes, fails above its limit, and passes on whole messages.
pub(super) struct RequestBody {
    body: Body,
    bytes: Arc<AtomicU64>,
    limit: u64,
    /// `None` if bytes pass as they arrive.
    messages: Option<Messages>,
    /// Decompression of a message, in the slots of CPU work if it may take long.
    finishing: Option<BoxFuture<'static, crate::Result<Bytes>>>,
    cpu_work: CpuWork,
    /// Limit of the time that the request takes to arrive.
    arrives_within: Option<Duration>,
    arrival: Option<Pin<Box<Sleep>>>,
}

impl RequestBody {
    /// Creates a body whose bytes pass as they arrive.
    pub(super) fn passing(body: Body, bytes: Arc<AtomicU64>, cpu_work: CpuWork) -> Self {
        let limit = u64::MAX;
        Self { body, bytes, limit, messages: None, finishing: None, cpu_work, arrives_within: None, arrival: None }
    }

    /// Creates a body of whole messages.
    pub(super) fn of_messages(body: Body, bytes: Arc<AtomicU64>, cpu_work: CpuWork, rules: Rules) -> Self {
        Self { messages: Some(Messages::new(rules)), ..Self::passing(body, bytes, cpu_work) }
    }

    /// Limits the size of the request in bytes.
    pub(super) fn at_most(self, limit: u64) -> Self {
        Self { limit, ..self }
    }

    /// Limits the time that the request takes to arrive.
    pub(super) fn in_time(self) -> Self {
        Self { arrives_within: Some(ARRIVAL), ..self }
    }

    fn count(&self, bytes: usize) -> Result<(), Error> {
        let received = self.bytes.fetch_add(bytes as u64, Ordering::Relaxed) + bytes as u64;
        match received > self.limit {
            false => Ok(()),
            true => {
                Err(Error::Exhausted(format!("the request is larger than {}; {ONLY_ROWS}", human_bytes(self.limit))))
            }
        }
    }

    /// Polls the next frame, within the time that the request may take.
    fn poll_arriving(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let polled = Pin::new(&mut self.body).poll_frame(cx);
        let (Poll::Pending, Some(limit)) = (&polled, self.arrives_within) else { return polled };
        let arrival = self.arrival.get_or_insert_with(|| Box::pin(tokio::time::sleep(limit)));
        std::task::ready!(arrival.as_mut().poll(cx));
        let late = format!("the request did not arrive in whole within {} s", limit.as_secs());
        Poll::Ready(Some(Err(Error::DeadlineExceeded(late).into())))
    }
}

impl http_body::Body for RequestBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let this = &mut *self;
        loop {
            if let Some(finishing) = &mut this.finishing {
                let finished = std::task::ready!(finishing.as_mut().poll(cx));
                this.finishing = None;
                return Poll::Ready(Some(finished.map(Frame::data).map_err(Status::from)));
            }
            if let Some(messages) = &mut this.messages
                && let Some(message) = messages.next()?
            {
                let rules = messages.rules();
                let effort = rules.effort(&message);
                if effort == 0 {
                    let message = rules.finish(message, &Interrupt::default())?;
                    return Poll::Ready(Some(Ok(Frame::data(message))));
                }
                let (rules, cpu_work) = (rules.clone(), this.cpu_work.clone());
                let finish = move |interrupt: &Interrupt| rules.finish(message, interrupt);
                this.finishing = Some(Box::pin(async move { cpu_work.run_on(effort, finish).await }));
                continue;
            }
            let frame = match std::task::ready!(this.poll_arriving(cx)) {
                None if this.messages.as_ref().is_some_and(Messages::is_inside) => {
                    let torn = Error::Invalid("the request ended inside a message".into());
                    return Poll::Ready(Some(Err(torn.into())));
                }
                None => return Poll::Ready(None),
                Some(frame) => frame?,
            };
            let bytes = match frame.into_data() {
                Ok(bytes) => bytes,
                Err(trailers) => return Poll::Ready(Some(Ok(trailers))),
            };
            this.count(bytes.len())?;
            match &mut this.messages {
                None => return Poll::Ready(Some(Ok(Frame::data(bytes)))),
                Some(messages) => messages.push(bytes),
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.finishing.is_none() && self.messages.as_ref().is_none_or(Messages::is_empty) && self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        match &self.messages {
            None => self.body.size_hint(),
            Some(_) => SizeHint::default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use futures::{StreamExt, stream};
    use http_body_util::{BodyExt, StreamBody};

    use super::*;
    use crate::memory::Bounds;
    use crate::service::access::messages::Owner;
    use crate::service::call_memory::CallShare;

    fn body(chunks: Vec<&'static [u8]>) -> RequestBody {
        let frames = stream::iter(chunks).map(|chunk| Ok::<_, Status>(Frame::data(Bytes::from_static(chunk))));
        let memory = CallShare::within(Bounds::default());
        let rules = Rules { memory, owner: Owner::Call, encoding: None, limit: 1000, advice: "send less" };
        let body = Body::new(StreamBody::new(frames.chain(stream::pending())));
        RequestBody::of_messages(body, Arc::default(), CpuWork::new(), rules)
    }

    #[tokio::test]
    async fn a_request_must_arrive_in_time() {
        for chunks in [vec![], vec![&b"\0\0\0\0\x05te"[..]], vec![&b"\0\0\0\0\x04text"[..]]] {
            let is_whole = chunks.first().is_some_and(|chunk| chunk.ends_with(b"text"));
            let mut body = RequestBody { arrives_within: Some(Duration::from_millis(20)), ..body(chunks) };
            if is_whole {
                assert_eq!(&body.frame().await.unwrap().unwrap().into_data().unwrap()[5..], b"text");
            }
            let late = body.frame().await.unwrap().unwrap_err();
            assert_eq!(late.code(), Code::DeadlineExceeded, "{late:?}");
            assert!(late.message().contains("did not arrive in whole"), "{late:?}");
        }
    }

    #[tokio::test]
    async fn a_request_has_a_maximum_size() {
        let mut body = body(vec![b"\0\0\0\0\x04text", b"\0\0\0\0\x04more"]).at_most(10);
        assert!(body.frame().await.unwrap().is_ok());
        let over = body.frame().await.unwrap().unwrap_err();
        assert_eq!(over.code(), Code::ResourceExhausted, "{over:?}");
        assert_eq!(body.bytes.load(Ordering::Relaxed), 18);
    }
}
