//! Lines that a server or a device's child process writes to standard error and standard output.
//!
//! ```text
//!   log, panics, last errors ─► queue of a bounded size ─► thread ─► standard error
//!   the addresses ────────────► a second queue ──────────► thread ─► standard output
//! ```
//!
//! Logging a line never blocks on the reader of the file, and never fails. A line is dropped and
//! counted if the queue is full or the write fails. As soon as writing works again, one line
//! reports the number of dropped lines. Only the threads may block. At its end, the process waits
//! for the threads for a bounded time.
//!
//! The crate tracing-appender has a similar queue, but does not count lines that cannot be written.
//! That queue is limited by a number of lines of any length, and the crate's shutdown prints to
//! standard output.

use std::collections::VecDeque;
use std::fmt::Display;
use std::fs::File;
use std::io::{self, ErrorKind, Write};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use serde_json::json;
use tracing_subscriber::fmt::format;
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};

use crate::human::{counted_as, system_words};
use crate::{Error, Result};

/// Maximum bytes in the queue: several thousand lines.
const QUEUE_BYTES: usize = 1 << 20;

/// Time between attempts to write to a full non-blocking file.
const RETRY_INTERVAL: Duration = Duration::from_millis(10);

/// How long a process waits, at its end, for its lines to be written. A device's child process that
/// is told to end has twice that time.
const FLUSH_MAX: Duration = Duration::from_millis(500);

/// How long a panic waits for its line to be written, because the process may be about to abort.
const LAST_WORDS_MAX: Duration = Duration::from_millis(50);

static STANDARD_ERROR: OnceLock<Arc<Lines>> = OnceLock::new();
static STANDARD_OUTPUT: OnceLock<Arc<Lines>> = OnceLock::new();

/// True if lines of the log are JSON.
static JSON: AtomicBool = AtomicBool::new(false);

/// Starts the queues of standard error and standard output, once per process.
///
/// # Errors
/// [`Error::Exhausted`] when the system has no thread or no file descriptor.
pub fn start() -> Result<Flush> {
    let begin = || {
        let error = File::from(io::stderr().as_fd().try_clone_to_owned()?);
        let output = File::from(io::stdout().as_fd().try_clone_to_owned()?);
        Ok((Lines::to(error, "stderr", gap)?, Lines::to(output, "stdout", gap)?))
    };
    let (error, output) = begin().map_err(|failure: io::Error| {
        Error::Exhausted(format!("starting the threads that write the log: {}", system_words(&failure)))
    })?;
    STANDARD_ERROR.get_or_init(|| error);
    STANDARD_OUTPUT.get_or_init(|| output);
    Ok(Flush)
}

/// Guard whose drop waits for lines to be written, for a bounded time.
#[derive(Debug)]
pub struct Flush;

impl Drop for Flush {
    fn drop(&mut self) {
        settle(FLUSH_MAX);
    }
}

/// Sets the format of the log's lines: JSON if true, else text for people.
pub fn set_json(json: bool) {
    JSON.store(json, Ordering::Relaxed);
}

/// Writes a line to standard error. The write is synchronous in a process that has not called
/// [`start`].
pub fn log(line: impl Display) {
    send(&STANDARD_ERROR, io::stderr(), format!("{line}\n").into_bytes());
}

/// Writes a line to standard output. The write is synchronous in a process that has not called
/// [`start`].
pub fn print(line: impl Display) {
    send(&STANDARD_OUTPUT, io::stdout(), format!("{line}\n").into_bytes());
}

fn send(queue: &OnceLock<Arc<Lines>>, mut file: impl Write, line: Vec<u8>) {
    match queue.get() {
        Some(lines) => lines.offer(line),
        None => _ = file.write_all(&line),
    }
}

/// Logs an event that may be the last of the process, and waits briefly until its line is written.
/// Never panics.
pub fn log_last_words(level: &str, target: &str, message: &str) {
    log(event(level, target, message));
    settle(LAST_WORDS_MAX);
}

/// Number of dropped lines of this process.
pub fn dropped() -> u64 {
    started().map(|lines| lines.dropped.load(Ordering::Relaxed)).sum()
}

fn started() -> impl Iterator<Item = &'static Arc<Lines>> {
    [&STANDARD_ERROR, &STANDARD_OUTPUT].into_iter().filter_map(OnceLock::get)
}

/// Waits until all lines of both queues are written or dropped, for `at_most` in total.
fn settle(at_most: Duration) {
    let since = Instant::now();
    started().for_each(|lines| lines.settle(at_most.saturating_sub(since.elapsed())));
}

/// Formats an event like the log does. It avoids `tracing`, whose thread-local buffers may be gone
/// in a panic.
fn event(level: &str, target: &str, message: &str) -> String {
    let mut time = String::new();
    let _ = SystemTime.format_time(&mut format::Writer::new(&mut time));
    match JSON.load(Ordering::Relaxed) {
        true => json!({ "timestamp": time, "level": level, "message": message, "target": target }).to_string(),
        false => format!("{time} {level:>5} {target}: {message}"),
    }
}

/// Treats each write as one line of the log, because `tracing_subscriber` writes whole lines.
#[derive(Debug)]
pub struct LogWriter;

impl Write for LogWriter {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        send(&STANDARD_ERROR, io::stderr(), line.to_vec());
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A queue of lines for one file, with a thread that writes them. It lives as long as the process.
#[derive(Debug, Default)]
pub struct Lines {
    queue: Mutex<Queue>,
    /// Notified when a line arrives or is dropped.
    arrived: Condvar,
    /// Notified when all lines are written or dropped.
    settled: Condvar,
    dropped: AtomicU64,
}

#[derive(Debug, Default)]
struct Queue {
    lines: VecDeque<Vec<u8>>,
    bytes: usize,
    /// Number of lines dropped since the queue was full. The queue takes no new lines until the
    /// earlier lines are written. The report of the gap therefore appears where lines are missing.
    missed: u64,
    is_writing: bool,
}

impl Queue {
    fn is_empty(&self) -> bool {
        self.lines.is_empty() && self.missed == 0
    }
}

impl Lines {
    /// Starts the thread that writes to `file`. `gap` formats the line that reports dropped lines.
    ///
    /// # Errors
    /// The system's, if it starts no thread.
    pub fn to(file: impl Write + Send + 'static, name: &str, gap: fn(u64) -> String) -> io::Result<Arc<Self>> {
        let lines = Arc::new(Self::default());
        let taken = lines.clone();
        thread::Builder::new().name(name.into()).spawn(move || taken.write_to(Writer { file, is_cut: false }, gap))?;
        Ok(lines)
    }

    /// Queues a line, or drops and counts it if the queue is full.
    pub fn offer(&self, line: Vec<u8>) {
        let mut queue = self.queue.lock();
        if queue.missed > 0 || queue.bytes.saturating_add(line.len()) > QUEUE_BYTES {
            queue.missed += 1;
            self.dropped.fetch_add(1, Ordering::Relaxed);
        } else {
            queue.bytes += line.len();
            queue.lines.push_back(line);
        }
        self.arrived.notify_one();
    }

    /// Waits until all lines are written or dropped, for `at_most`.
    pub fn settle(&self, at_most: Duration) {
        let mut queue = self.queue.lock();
        self.settled.wait_while_for(&mut queue, |queue| queue.is_writing || !queue.is_empty(), at_most);
    }

    /// Waits for the next line, and returns it with 0. Returns `None` and the number of dropped
    /// lines if the queue was full.
    fn next(&self) -> (Option<Vec<u8>>, u64) {
        let mut queue = self.queue.lock();
        queue.is_writing = false;
        if queue.is_empty() {
            self.settled.notify_all();
        }
        self.arrived.wait_while(&mut queue, |queue| queue.is_empty());
        queue.is_writing = true;
        let Some(line) = queue.lines.pop_front() else { return (None, std::mem::take(&mut queue.missed)) };
        queue.bytes -= line.len();
        (Some(line), 0)
    }

    /// Runs the writing thread.
    fn write_to(&self, mut writer: Writer<impl Write>, gap: fn(u64) -> String) {
        // Dropped lines that are not yet reported.
        let mut untold = 0;
        loop {
            let (line, missed) = self.next();
            untold += missed;
            if untold > 0 && writer.put(gap(untold).as_bytes()) {
                untold = 0;
            }
            let Some(line) = line else { continue };
            if untold > 0 || !writer.put(&line) {
                untold += 1;
                self.dropped.fetch_add(1, Ordering::Relaxed);
            }
        }
    }
}

/// Formats the line that reports dropped lines.
fn gap(lines: u64) -> String {
    let words = counted_as(lines, "line of the log was", "lines of the log were");
    format!("{}\n", event("WARN", module_path!(), &format!("{words} dropped here")))
}

/// A file, and the state that a failed write left it in.
struct Writer<W> {
    file: W,
    /// True if the last line was cut off.
    is_cut: bool,
}

impl<W: Write> Writer<W> {
    /// Writes a line, after a line break if the last line was cut off. False if not all of it was
    /// written.
    fn put(&mut self, line: &[u8]) -> bool {
        if self.is_cut && self.write(b"\n") == 0 {
            return false;
        }
        let written = self.write(line);
        self.is_cut = (1..line.len()).contains(&written);
        written == line.len()
    }

    /// Writes until the file takes no more. Returns the number of bytes written.
    fn write(&mut self, bytes: &[u8]) -> usize {
        let mut written = 0;
        while written < bytes.len() {
            match self.file.write(&bytes[written..]) {
                Ok(taken) if taken > 0 => written += taken,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                // Another process has set the file to non-blocking.
                Err(error) if error.kind() == ErrorKind::WouldBlock => thread::sleep(RETRY_INTERVAL),
                _ => break,
            }
        }
        written
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;
    use std::fs::OpenOptions;
    use std::io::{BufRead, BufReader};
    use std::os::fd::OwnedFd;

    use super::*;

    /// Generous, because the machine may be busy.
    const LONG: Duration = Duration::from_secs(60);

    fn dropped(lines: &Lines) -> u64 {
        lines.dropped.load(Ordering::Relaxed)
    }

    #[test]
    fn lines_dropped_by_a_full_queue_are_counted_and_reported_where_they_are_missing() {
        let (reader, writer) = io::pipe().unwrap();
        let lines = Lines::to(File::from(OwnedFd::from(writer)), "test", gap).unwrap();
        let line = |number: usize| format!("{number:0>99}\n").into_bytes();
        // More than the queue and the pipe hold together.
        let offered = 2 * QUEUE_BYTES / 100;
        (0..offered).for_each(|number| lines.offer(line(number)));
        let lost = dropped(&lines) as usize;
        assert!(lost > 0 && lost < offered, "{lost} of {offered}");
        lines.settle(Duration::from_millis(1));
        let mut read = BufReader::new(reader).lines().map(Result::unwrap);
        for number in 0..offered - lost {
            assert_eq!(read.next().unwrap().as_bytes(), line(number).trim_ascii_end());
        }
        let told = read.next().unwrap();
        assert!(told.contains(" WARN dovetail::lines: "), "{told}");
        assert!(
            told.ends_with(&format!(" {} lines of the log were dropped here", crate::human::count(lost as u64))),
            "{told}"
        );
        lines.settle(LONG);
        lines.offer(b"after\n".to_vec());
        assert_eq!(read.next().unwrap(), "after");
        assert_eq!(dropped(&lines), lost as u64);
    }

    #[test]
    fn a_line_longer_than_the_queue_is_dropped() {
        let (reader, writer) = io::pipe().unwrap();
        let lines = Lines::to(File::from(OwnedFd::from(writer)), "test", gap).unwrap();
        lines.offer(vec![b'x'; QUEUE_BYTES + 1]);
        let told = BufReader::new(reader).lines().next().unwrap().unwrap();
        assert!(told.ends_with(" 1 line of the log was dropped here"), "{told}");
        assert_eq!(dropped(&lines), 1);
    }

    #[test]
    fn lines_that_cannot_be_written_are_counted() {
        let (_, gone) = io::pipe().unwrap();
        let full = OpenOptions::new().write(true).open("/dev/full").unwrap();
        for file in [File::from(OwnedFd::from(gone)), full] {
            let lines = Lines::to(file, "test", gap).unwrap();
            (0..1000).for_each(|_| lines.offer(b"line\n".to_vec()));
            lines.settle(LONG);
            assert_eq!(dropped(&lines), 1000);
        }
    }

    /// Answers each write as told, then takes everything.
    struct Scripted {
        answers: VecDeque<io::Result<usize>>,
        written: Arc<Mutex<Vec<u8>>>,
    }

    impl Write for Scripted {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let taken = self.answers.pop_front().unwrap_or(Ok(bytes.len()))?;
            self.written.lock().extend(&bytes[..taken]);
            Ok(taken)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_truncated_line_is_reported_on_a_separate_line() {
        let fails = |kind: ErrorKind| Err(kind.into());
        let answers = [
            fails(ErrorKind::Interrupted),
            fails(ErrorKind::WouldBlock),
            Ok(2),
            // One line is cut off, and the disk is still full for the next.
            fails(ErrorKind::StorageFull),
            fails(ErrorKind::StorageFull),
        ];
        let written = Arc::<Mutex<Vec<u8>>>::default();
        let lines = Lines::to(Scripted { answers: answers.into(), written: written.clone() }, "test", gap).unwrap();
        ["one\n", "two\n", "three\n"].iter().for_each(|line| lines.offer(line.as_bytes().to_vec()));
        lines.settle(LONG);
        let text = String::from_utf8(written.lock().clone()).unwrap();
        let [cut, told, three] = text.lines().collect::<Vec<_>>()[..] else { panic!("{text}") };
        assert_eq!((cut, three), ("on", "three"));
        assert!(told.ends_with(" 2 lines of the log were dropped here"), "{told}");
        assert_eq!(dropped(&lines), 2);
    }
}
