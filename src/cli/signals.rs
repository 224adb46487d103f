//! Signals that end the process even if it is busy or stuck. Dedicated threads handle them. They do
//! not wait for a runtime, for work or locks of other threads, or for output.
//!
//! ```text
//!   SIGTERM, SIGINT ─► thread "signals" ─┬─► server: the first drains it, the second ends it
//!                                        └─► thread "last resort": exits if the server is too slow
//! ```
//!
//! The child processes of devices end after the server's process.

use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::{Duration, Instant};

use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use signal_hook::low_level;
use tokio::sync::watch;

use crate::{Context, Error, Result};

/// Number that a shell adds to a signal's number to make an exit status.
pub const STATUS_BASE: u8 = 128;

/// Time limit for the server to tell its clients that it ends, and to end.
pub const END_WITHIN: Duration = Duration::from_secs(1);

/// Time limit for writing the last log line before the exit, because output may block.
const SAID_WITHIN: Duration = Duration::from_millis(100);

/// Minimum time between two distinct signals. `timeout` sends one signal to its command, and then
/// again to the command's group.
const SECOND_AFTER: Duration = Duration::from_millis(200);

/// Signals that the server has received.
pub struct EndSignals {
    numbers: watch::Receiver<Vec<i32>>,
}

impl EndSignals {
    /// Listens until the process ends. The process ends at the latest [`END_WITHIN`] after the
    /// second signal, or [`END_WITHIN`] after the drain limit.
    ///
    /// # Errors
    /// [`Error::Unavailable`] if the system gives no thread or no signals.
    pub fn listen(drain_limit: Duration) -> Result<Self> {
        let mut signals = Signals::new([SIGTERM, SIGINT]).context(|| "listening for SIGTERM and SIGINT")?;
        let (to_last_resort, of_signals) = channel();
        let (told, numbers) = watch::channel(Vec::new());
        spawn("last resort", move || exit_in_time(&of_signals, drain_limit))?;
        spawn("signals", move || {
            for number in signals.forever() {
                let _ = to_last_resort.send(number);
                told.send_modify(|numbers| numbers.push(number));
            }
        })?;
        Ok(Self { numbers })
    }

    /// Waits until `wanted` signals were received.
    pub async fn nth(&self, wanted: usize) {
        let mut numbers = self.numbers.clone();
        // The sending thread lives as long as the process.
        let Ok(received) = numbers.wait_for(|numbers| numbers.len() >= wanted).await else { return };
        let name = low_level::signal_name(received[wanted - 1]).unwrap_or("a signal");
        drop(received);
        tracing::info!("{name} received");
    }
}

/// Exits if the server does not end in time after the drain limit or the second signal. Exits at
/// once at the third signal.
fn exit_in_time(signals: &Receiver<i32>, drain_limit: Duration) {
    let Ok(first) = signals.recv() else { return };
    let number = match signals.recv_timeout(drain_limit.saturating_add(END_WITHIN)) {
        Ok(second) => signals.recv_timeout(END_WITHIN).unwrap_or(second),
        Err(_) => first,
    };
    let _ = spawn("last words", || tracing::error!("the server did not stop in time; the process exits"));
    thread::sleep(SAID_WITHIN);
    exit(number)
}

/// Makes a second signal end a command that the first one interrupts. If the system gives no
/// thread, the process ends only when its work ends.
pub fn exit_by_second() {
    let Ok(mut signals) = Signals::new([SIGINT, SIGTERM]) else { return };
    let _ = spawn("signals", move || {
        let mut signals = signals.forever();
        let first = signals.next().map(|_| Instant::now());
        let is_second = |_: &i32| first.is_some_and(|first| first.elapsed() >= SECOND_AFTER);
        if let Some(number) = signals.find(is_second) {
            exit(number);
        }
    });
}

/// Ends the process without destructors or a flush.
fn exit(number: i32) -> ! {
    low_level::exit(i32::from(STATUS_BASE) + number)
}

fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> Result<()> {
    let spawned = thread::Builder::new().name(name.into()).spawn(body);
    spawned.map(drop).map_err(|error| Error::Unavailable(format!("starting the thread {name:?}: {error}")))
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader};
    use std::process::{Child, Command, Stdio};

    use super::*;

    /// Variable that tells the test process how to get stuck.
    const HOW: &str = "DOVETAIL_STUCK";

    /// Process that reacts to signals only through these threads, and keeps its output locked.
    #[test]
    #[ignore = "the other tests run it, in a process of its own"]
    fn stuck() {
        match std::env::var(HOW).as_deref() {
            Ok("command") => exit_by_second(),
            Ok(drain_seconds) => {
                let drain_limit = Duration::from_secs(drain_seconds.parse().unwrap());
                drop(EndSignals::listen(drain_limit).unwrap());
            }
            Err(_) => panic!("it would run for ever"),
        }
        println!("stuck");
        let _output = (std::io::stdout().lock(), std::io::stderr().lock());
        loop {
            thread::park();
        }
    }

    fn start_stuck(how: &str) -> Child {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "cli::signals::tests::stuck", "--ignored", "--nocapture"])
            .env(HOW, how)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.as_mut().unwrap()).lines();
        assert!(lines.any(|line| line.unwrap().ends_with("stuck")), "it does not start");
        child
    }

    fn send(child: &Child, signal: &str) {
        let sent = Command::new("kill").args([signal, &child.id().to_string()]).status().unwrap();
        assert!(sent.success());
    }

    /// Waits for a process and returns its exit status.
    fn status(mut child: Child) -> Option<i32> {
        let start = Instant::now();
        while child.try_wait().unwrap().is_none() {
            if start.elapsed() > Duration::from_secs(60) {
                child.kill().unwrap();
            }
            thread::sleep(Duration::from_millis(10));
        }
        child.wait().unwrap().code()
    }

    #[test]
    fn a_second_signal_ends_a_server_that_is_stuck() {
        let server = start_stuck("3600");
        send(&server, "-TERM");
        send(&server, "-INT");
        assert_eq!(status(server), Some(130));
    }

    #[test]
    fn the_limit_of_the_drain_ends_a_server_that_is_stuck() {
        let server = start_stuck("0");
        send(&server, "-TERM");
        assert_eq!(status(server), Some(143));
    }

    #[test]
    fn a_second_signal_ends_a_command_that_is_stuck() {
        let mut command = start_stuck("command");
        send(&command, "-TERM");
        thread::sleep(2 * SECOND_AFTER);
        assert!(command.try_wait().unwrap().is_none(), "it undoes what it has begun");
        send(&command, "-INT");
        assert_eq!(status(command), Some(130));
    }
}
