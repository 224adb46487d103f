//! Observers, which are notified of each piece of work that is queued on a GPU.
//!
//! `DOVETAIL_GPU_OBSERVER` chooses one when a GPU is opened:
//!
//! * `silent`, the default. It adds times up like `times` while a caller has turned that on:
//!   `dovetail-bench` does so in an extra run of each join, which it does not time otherwise;
//! * `trace`: launches, copies and fills are events of the log, at level TRACE;
//! * `nvtx`: they are ranges of NVTX, by whose names Nsight Systems shows them and
//!   `ncu --nvtx --nvtx-include` chooses them;
//! * `times`: each launch, copy and fill is timed by events of its stream. Times are added up by
//!   name and by phase of the join; `dovetail-bench` then reports the sums of the run it times;
//! * `timeline:FILE`: each launch, copy and fill is timed by events of its stream. They are written
//!   to the file in the trace format of Chromium, which <https://ui.perfetto.dev> and
//!   `chrome://tracing` draw: a row for each stream, in microseconds since the GPU was opened.
//!
//! Events cost some microseconds per call, so a timed join is a little slower.

use std::ffi::CString;
use std::fmt;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use cudarc::driver::result::DriverError;
use cudarc::driver::{result, sys};
use parking_lot::Mutex;

use super::abi;
use super::driver::Queue;
use crate::device::{Phase, WorkTime, phase};
use crate::{Error, Result};

const VARIABLE: &str = "DOVETAIL_GPU_OBSERVER";

/// Returns the name of the observer that the environment chooses.
pub(super) fn asked_for() -> String {
    std::env::var(VARIABLE).unwrap_or_default()
}

/// An observer of all work of a GPU.
#[derive(Debug)]
pub(super) enum Observer {
    Silent(Occasional),
    Trace,
    Nvtx,
    Timed(Timed),
}

impl Observer {
    /// Makes the observer of the given name. The GPU's context must be current on the calling
    /// thread.
    ///
    /// # Errors
    /// [`Error::Invalid`] for an unknown name, [`Error::Unsupported`] if the file cannot be written
    /// or the driver makes no events.
    pub(super) fn named(chosen: &str, ordinal: u16) -> Result<Self> {
        match chosen {
            "" | "silent" => Ok(Self::Silent(Occasional::default())),
            "trace" => Ok(Self::Trace),
            "nvtx" => Ok(Self::Nvtx),
            "times" => Ok(Self::Timed(Timed::new(ordinal, Report::Sums(Vec::new()))?)),
            other => match other.strip_prefix("timeline:") {
                Some(path) => Ok(Self::Timed(Timed::new(ordinal, Report::timeline(path)?)?)),
                None => Err(Error::Invalid(format!(
                    "{VARIABLE}={other:?} is not an observer; write silent, trace, nvtx, times or timeline:FILE"
                ))),
            },
        }
    }

    /// Observes work that is queued while the returned value lives. `what` names the work.
    pub(super) fn watch<'a>(&'a self, queue: &'a Queue, what: &'static str, bytes: u64) -> Watched<'a> {
        let started = match self {
            Self::Silent(occasional) => occasional.is_on.load(Ordering::Relaxed).then(|| record(queue).ok()).flatten(),
            Self::Trace => {
                tracing::trace!(what, bytes, "queued");
                None
            }
            Self::Nvtx => {
                let name = CString::new(what).expect("names of work have no zero bytes");
                // SAFETY: the name ends with a zero byte, and is read during the call.
                unsafe { abi::dovetail_range_begin(name.as_ptr()) };
                None
            }
            Self::Timed(_) => record(queue).ok(),
        };
        Watched { observer: self, queue, what, bytes, started }
    }

    /// Returns the timer, if this observer times work.
    fn timed(&self) -> Option<&Timed> {
        match self {
            Self::Timed(timed) => Some(timed),
            Self::Silent(occasional) => occasional.timed.get(),
            Self::Trace | Self::Nvtx => None,
        }
    }

    /// Turns adding up the times of later work on or off. Has no effect on any observer except
    /// `silent`. The GPU's context must be current on the calling thread.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the driver makes no events.
    pub(super) fn add_up(&self, on: bool, ordinal: u16) -> Result<()> {
        let Self::Silent(Occasional { is_on, timed }) = self else { return Ok(()) };
        if on && timed.get().is_none() {
            // Another thread may have set an equivalent timer first.
            let _ = timed.set(Timed::new(ordinal, Report::Sums(Vec::new()))?);
        }
        is_on.store(on, Ordering::Relaxed);
        Ok(())
    }

    /// Takes in the times of `queue`. All its work must be done, and no more may follow.
    pub(super) fn settle(&self, queue: &Queue) {
        if let Some(timed) = self.timed() {
            timed.settle(queue);
        }
    }

    /// Takes the times of work settled since the last call. Returns none if times are not added up.
    pub(super) fn take_times(&self) -> Vec<WorkTime> {
        let Some(timed) = self.timed() else { return Vec::new() };
        match &mut timed.inner.lock().report {
            Report::Sums(sums) => std::mem::take(sums),
            Report::Timeline(_) => Vec::new(),
        }
    }
}

/// Times work while that is turned on.
#[derive(Debug, Default)]
pub(super) struct Occasional {
    is_on: AtomicBool,
    timed: OnceLock<Timed>,
}

/// Work that is being queued.
pub(super) struct Watched<'a> {
    observer: &'a Observer,
    queue: &'a Queue,
    what: &'static str,
    bytes: u64,
    started: Option<sys::CUevent>,
}

impl Drop for Watched<'_> {
    fn drop(&mut self) {
        if matches!(self.observer, Observer::Nvtx) {
            // SAFETY: the same thread began the range, because a `Watched` is not sent to another
            // thread.
            unsafe { abi::dovetail_range_end() };
        }
        let (Some(timed), Some(started)) = (self.observer.timed(), self.started) else { return };
        match record(self.queue) {
            Ok(ended) => {
                let (stream, phase) = (self.queue.raw() as usize, phase::current());
                let (what, bytes) = (self.what, self.bytes);
                timed.inner.lock().pending.push(Pending { stream, phase, what, bytes, started, ended });
            }
            Err(_) => destroy(started),
        }
    }
}

/// Times work by events.
pub(super) struct Timed {
    ordinal: u16,
    inner: Mutex<Inner>,
}

struct Inner {
    report: Report,
    /// Event recorded when the GPU was opened.
    origin: sys::CUevent,
    pending: Vec<Pending>,
}

/// Destination of times.
enum Report {
    /// Times added up until they are taken.
    Sums(Vec<WorkTime>),
    /// A line for each piece of work.
    Timeline(BufWriter<File>),
}

/// Queued work that may still be pending.
struct Pending {
    stream: usize,
    phase: Option<Phase>,
    what: &'static str,
    bytes: u64,
    started: sys::CUevent,
    ended: sys::CUevent,
}

// SAFETY: the driver's events may be used by any thread.
unsafe impl Send for Inner {}

impl fmt::Debug for Timed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Timed(cuda:{})", self.ordinal)
    }
}

impl Report {
    fn timeline(path: &str) -> Result<Self> {
        let file = File::create(path).and_then(|mut file| file.write_all(b"[\n").map(|()| file)).map_err(|error| {
            Error::Unsupported(format!("writing the timeline {path:?} that {VARIABLE} names: {error}"))
        })?;
        Ok(Self::Timeline(BufWriter::new(file)))
    }

    /// Adds a piece of work that began `start` seconds after the GPU was opened.
    fn add(&mut self, ordinal: u16, work: &Pending, start: f64, seconds: f64) {
        match self {
            Self::Sums(sums) => {
                let known = sums.iter_mut().find(|sum| (sum.phase, sum.work) == (work.phase, work.what));
                match known {
                    Some(sum) => sum.seconds += seconds,
                    None => sums.push(WorkTime { phase: work.phase, work: work.what, seconds }),
                }
            }
            Self::Timeline(file) => {
                let line = serde_json::json!({
                    "name": work.what, "cat": work.phase.map_or("", Phase::name), "ph": "X", "pid": ordinal, "tid": work.stream % 1_000_000_007,
                    "ts": start * 1e6, "dur": seconds * 1e6, "args": { "bytes": work.bytes },
                });
                // A failed write loses a line of the timeline, but must not fail the join.
                let _ = writeln!(file, "{line},");
            }
        }
    }
}

impl Timed {
    fn new(ordinal: u16, report: Report) -> Result<Self> {
        let driver = |error: DriverError| Error::Unsupported(format!("timing the work of GPU {ordinal}: {error}"));
        let origin = result::event::create(sys::CUevent_flags::CU_EVENT_DEFAULT).map_err(driver)?;
        // SAFETY: the event was just made; the null stream is the context's own.
        unsafe { result::event::record(origin, std::ptr::null_mut()).map_err(driver)? };
        Ok(Self { ordinal, inner: Mutex::new(Inner { report, origin, pending: Vec::new() }) })
    }

    fn settle(&self, queue: &Queue) {
        let stream = queue.raw() as usize;
        let mut inner = self.inner.lock();
        let (done, pending) = std::mem::take(&mut inner.pending).into_iter().partition(|work| work.stream == stream);
        inner.pending = pending;
        let done: Vec<Pending> = done;
        for work in done {
            // SAFETY: all three events were recorded, and their work is done.
            let times = unsafe {
                result::event::elapsed(inner.origin, work.started)
                    .and_then(|start| Ok((start, result::event::elapsed(work.started, work.ended)?)))
            };
            destroy(work.started);
            destroy(work.ended);
            // Events are measured in milliseconds.
            if let Ok((start, taken)) = times {
                inner.report.add(self.ordinal, &work, f64::from(start) / 1e3, f64::from(taken) / 1e3);
            }
        }
        if let Report::Timeline(file) = &mut inner.report {
            let _ = file.flush();
        }
    }
}

fn record(queue: &Queue) -> Result<sys::CUevent, DriverError> {
    let event = result::event::create(sys::CUevent_flags::CU_EVENT_DEFAULT)?;
    // SAFETY: the event was just made, and the stream lives.
    match unsafe { result::event::record(event, queue.raw()) } {
        Ok(()) => Ok(event),
        Err(error) => {
            destroy(event);
            Err(error)
        }
    }
}

fn destroy(event: sys::CUevent) {
    // SAFETY: the event has no other user, and the driver keeps it until pending work has passed
    // it.
    let _ = unsafe { result::event::destroy(event) };
}
