//! Transfers: the times of the streams that send a result to its clients, and what bounds them.
//!
//! ```text
//!   a stream's time   │ join │ encode │ write │ client │ join │ encode │ write │ client │
//!                       │      │        │       └ the rest: sent bytes wait until the client
//!                       │      │        │         reads, or until the network takes them
//!                       │      │        └ in system calls that write to the socket
//!                       │      └ encoding a message
//!                       └ the next rows are not made yet
//! ```
//!
//! Times are sums over the streams of a result. The largest of the four bounds the transfer. The
//! calls that write are counted per connection, because HTTP/2 mixes the streams of a connection.
//! So streams that share a connection count each other's writes. With TLS, encryption counts as
//! `client`.

use std::collections::BTreeSet;
use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use dashmap::DashMap;
use futures::Stream;
use parking_lot::Mutex;
use serde::Serialize;

use super::answer_memory::Answer;
use crate::Result;
use crate::human;
use crate::memory::human_bytes;
use crate::scheduler::{JobId, Scheduler};

/// Time that a connection has spent in system calls that write to its socket. Clones share it.
#[derive(Clone, Debug, Default)]
pub struct WriteTime(Arc<AtomicU64>);

impl WriteTime {
    /// Adds the time since `start`.
    pub fn add_since(&self, start: Instant) {
        self.0.fetch_add(start.elapsed().as_nanos() as u64, Ordering::Relaxed);
    }

    fn get(&self) -> Duration {
        Duration::from_nanos(self.0.load(Ordering::Relaxed))
    }
}

/// True while a stream's message is encoded on another thread. Clones share it.
#[derive(Clone, Debug, Default)]
pub struct Encoding(Arc<AtomicBool>);

impl Encoding {
    /// Records that another thread begins or ends to encode.
    pub fn set(&self, is_encoding: bool) {
        self.0.store(is_encoding, Ordering::Relaxed);
    }

    fn get(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// Transfers of all jobs that have been read.
#[derive(Debug, Default)]
pub struct Transfers {
    by_job: DashMap<JobId, Arc<Mutex<State>>>,
}

impl Transfers {
    /// Measures a stream of messages that sends a part of the result of a job. `writing` is of the
    /// stream's connection, if known. The stream sets `encoding` while another thread encodes.
    pub fn measure<S>(&self, job: JobId, writing: Option<WriteTime>, encoding: Encoding, messages: S) -> Measured<S> {
        let state = self.by_job.entry(job).or_default().clone();
        state.lock().stream_opened(Instant::now());
        let writing = writing.unwrap_or_default();
        let written = writing.get();
        let (phase, since) = (Phase::Encode, Instant::now());
        Measured { messages: Box::pin(messages), state, writing, written, encoding, phase, since }
    }

    /// Returns the transfer of a job's result so far; `None` if no client has read it.
    pub fn of(&self, job: JobId) -> Option<Transfer> {
        let state = self.by_job.get(&job)?.value().clone();
        let transfer = state.lock().transfer(Instant::now());
        Some(transfer)
    }

    /// Forgets jobs that the scheduler has forgotten.
    pub fn sweep(&self, scheduler: &Scheduler) {
        let known: BTreeSet<JobId> = scheduler.jobs().iter().chain(&scheduler.history()).map(|job| job.id).collect();
        self.by_job.retain(|job, _| known.contains(job));
    }
}

/// Transfer of a result to its clients.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Transfer {
    /// Bytes of all messages.
    pub bytes: u64,
    /// Time during which at least one stream was open.
    pub seconds: f64,
    pub bytes_per_second: f64,
    pub streams: u64,
    /// Largest number of streams that were open at a time.
    pub streams_max: u64,
    /// Sums over the streams; see the head of this file.
    pub join_seconds: f64,
    pub encode_seconds: f64,
    pub write_seconds: f64,
    pub client_seconds: f64,
    /// The one with the largest time: `join`, `encode`, `write` or `client`.
    pub bound: &'static str,
}

/// Activity of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Join,
    Encode,
    /// Writing, or waiting for the client.
    Send,
}

#[derive(Debug, Default)]
struct State {
    bytes: u64,
    /// Time with an open stream, without the time since `opened`.
    passed: Duration,
    /// Time since which at least one stream has been open.
    opened: Option<Instant>,
    open: u64,
    streams: u64,
    streams_max: u64,
    join: Duration,
    encode: Duration,
    write: Duration,
    client: Duration,
}

impl State {
    fn stream_opened(&mut self, now: Instant) {
        self.open += 1;
        self.streams += 1;
        self.streams_max = self.streams_max.max(self.open);
        self.opened.get_or_insert(now);
    }

    fn stream_closed(&mut self, now: Instant) {
        self.open -= 1;
        if self.open == 0 {
            self.passed += self.opened.take().map_or(Duration::ZERO, |opened| now.saturating_duration_since(opened));
        }
    }

    fn transfer(&self, now: Instant) -> Transfer {
        let open = self.opened.map_or(Duration::ZERO, |opened| now.saturating_duration_since(opened));
        let seconds = (self.passed + open).as_secs_f64();
        let parts = [("join", self.join), ("encode", self.encode), ("write", self.write), ("client", self.client)];
        let (bound, _) = parts.into_iter().max_by_key(|(_, time)| *time).expect("there are four");
        Transfer {
            bytes: self.bytes,
            seconds,
            bytes_per_second: self.bytes as f64 / seconds.max(1e-9),
            streams: self.streams,
            streams_max: self.streams_max,
            join_seconds: self.join.as_secs_f64(),
            encode_seconds: self.encode.as_secs_f64(),
            write_seconds: self.write.as_secs_f64(),
            client_seconds: self.client.as_secs_f64(),
            bound,
        }
    }
}

impl fmt::Display for Transfer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { bytes, seconds, bytes_per_second, streams, streams_max, .. } = self;
        write!(
            f,
            "fetched: {} in {} by {}",
            human_bytes(*bytes),
            human::seconds(*seconds),
            human::counted(*streams, "stream")
        )?;
        if streams_max < streams {
            write!(f, ", at most {streams_max} at a time")?;
        }
        write!(f, ", {}/s", human_bytes(*bytes_per_second as u64))?;
        let bound = match self.bound {
            "join" => "the join, which had made no more rows",
            "encode" => "encoding on the server",
            "write" => "writing to the sockets of the server",
            _ => "the client or the network",
        };
        writeln!(f, "; bound by {bound}")?;
        let times = [self.join_seconds, self.encode_seconds, self.write_seconds, self.client_seconds];
        let [join, encode, write, client] = times.map(|time| 100.0 * time / times.iter().sum::<f64>().max(1e-9));
        writeln!(
            f,
            "time of the streams: {client:.0} % waiting for the client or the network, {write:.0} % writing, \
             {encode:.0} % encoding, {join:.0} % waiting for the join"
        )
    }
}

/// Stream of messages that measures itself.
pub struct Measured<S> {
    messages: Pin<Box<S>>,
    state: Arc<Mutex<State>>,
    writing: WriteTime,
    /// Part of `writing` that was counted.
    written: Duration,
    encoding: Encoding,
    phase: Phase,
    /// Start of the phase.
    since: Instant,
}

impl<S> Measured<S> {
    /// Ends the current phase, and starts the next.
    fn begin(&mut self, phase: Phase, bytes: u64) {
        let now = Instant::now();
        let passed = now.saturating_duration_since(self.since);
        let mut state = self.state.lock();
        state.bytes += bytes;
        match self.phase {
            Phase::Join => state.join += passed,
            Phase::Encode => state.encode += passed,
            Phase::Send => {
                let written = self.writing.get();
                let write = written.saturating_sub(self.written).min(passed);
                state.write += write;
                state.client += passed - write;
                self.written = written;
            }
        }
        (self.phase, self.since) = (phase, now);
    }
}

impl<S: Stream<Item = Result<Answer>>> Stream for Measured<S> {
    type Item = Result<Answer>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.begin(Phase::Encode, 0);
        let polled = self.messages.as_mut().poll_next(cx);
        match &polled {
            Poll::Pending if self.encoding.get() => self.begin(Phase::Encode, 0),
            Poll::Pending => self.begin(Phase::Join, 0),
            Poll::Ready(Some(Ok(answer))) => self.begin(Phase::Send, answer.bytes() as u64),
            Poll::Ready(_) => self.begin(Phase::Encode, 0),
        }
        polled
    }
}

impl<S> Drop for Measured<S> {
    fn drop(&mut self) {
        self.begin(Phase::Encode, 0);
        self.state.lock().stream_closed(Instant::now());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_time_bounds_a_transfer_and_its_time_is_that_of_open_streams() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut state = State::default();
        // Two streams at a time, a pause of three seconds, and another stream, which is still open.
        state.stream_opened(at(0));
        state.stream_opened(at(1));
        state.stream_closed(at(2));
        state.stream_closed(at(4));
        state.stream_opened(at(7));
        state.bytes = 12 << 30;
        let second = Duration::from_secs(1);
        let bounds = [
            (State { join: second, ..State::default() }, "join", "bound by the join"),
            (State { encode: second, ..State::default() }, "encode", "bound by encoding"),
            (State { write: second, ..State::default() }, "write", "bound by writing"),
            (State { client: second, ..State::default() }, "client", "bound by the client"),
        ];
        for (State { join, encode, write, client, .. }, bound, words) in bounds {
            (state.join, state.encode, state.write, state.client) = (join, encode, write, client);
            let transfer = state.transfer(at(9));
            assert_eq!((transfer.streams, transfer.streams_max, transfer.seconds), (3, 2, 6.0));
            let text = transfer.to_string();
            let start = "fetched: 12.0 GiB in 6.00 s by 3 streams, at most 2 at a time, 2.0 GiB/s; ";
            assert_eq!(transfer.bound, bound);
            assert!(text.starts_with(&format!("{start}{words}")) && text.contains("100 % "), "{text}");
        }
    }
}
