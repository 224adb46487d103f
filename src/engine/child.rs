//! Child process of a device: the server ends it and waits for it, even if the server's own side
//! fails.

use std::io;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::process::{Child, ExitStatus};
use std::time::{Duration, Instant};

use super::Opening;
use crate::device::DeviceId;
use crate::{Error, human};

/// Time that the child has to end on its own after the server hangs up.
const ENDING_WAIT: Duration = Duration::from_secs(1);

/// Time that the kernel may take to reap a killed child and its CUDA contexts.
pub(super) const KILLED_WAIT: Duration = Duration::from_secs(10);

/// Number of idle reads in a row after which a process counts as stalled. Each read waits for its
/// share of the stall limit. While the server itself is suspended, it reads nothing, so at most one
/// read ends without a byte.
const STALL_READS: u32 = 10;

/// Ends its child process when it is dropped.
#[derive(Debug)]
pub(super) struct ChildGuard {
    pub(super) id: DeviceId,
    pub(super) socket: UnixStream,
    child: Option<Child>,
    /// `None`: the process is not killed, however long it sends nothing.
    stall_limit: Option<Duration>,
    status: Option<ExitStatus>,
}

impl ChildGuard {
    /// Creates a guard of the process that opens a device. Without a child, another owner ends the
    /// process at the other end of the socket.
    pub(super) fn new(opening: &Opening, socket: UnixStream, child: Option<Child>) -> Self {
        Self { id: opening.id, socket, child, stall_limit: opening.stall_limit, status: None }
    }

    /// Sets the read timeout of the socket, by which a stalled process is found.
    pub(super) fn watch(&self) -> io::Result<()> {
        self.socket.set_read_timeout(self.stall_limit.map(|limit| limit / STALL_READS))
    }

    /// Kills the process if it is stalled, after `idle_reads` reads of the socket in a row. Returns
    /// the error of calls to the killed process.
    pub(super) fn kill_if_stalled(&mut self, idle_reads: u32) -> Option<Error> {
        let limit = self.stall_limit.filter(|_| idle_reads >= STALL_READS)?;
        self.kill();
        let limit = human::whole_seconds(limit.as_secs());
        Some(Error::Unavailable(format!(
            "the process of {} has not answered for {limit}, and was killed; joins on other devices go on",
            self.id
        )))
    }

    /// Hangs up, and kills the child if it does not end on its own. True if it has ended.
    pub(super) fn end(&mut self) -> bool {
        // The child may have hung up first.
        let _ = self.socket.shutdown(Shutdown::Both);
        self.has_ended(ENDING_WAIT) || {
            self.kill();
            self.has_ended(KILLED_WAIT)
        }
    }

    fn kill(&mut self) {
        if let Some(child) = &mut self.child {
            // The child may have ended on its own.
            let _ = child.kill();
        }
    }

    /// True if the child ends within `wait`.
    fn has_ended(&mut self, wait: Duration) -> bool {
        let Some(child) = &mut self.child else { return true };
        let since = Instant::now();
        loop {
            match child.try_wait() {
                Ok(Some(status)) => {
                    (self.status, self.child) = (Some(status), None);
                    return true;
                }
                Ok(None) if since.elapsed() < wait => std::thread::sleep(Duration::from_millis(1)),
                _ => return false,
            }
        }
    }

    /// Waits without a limit until the child has ended.
    pub(super) fn wait(&mut self) {
        if let Some(mut child) = self.child.take() {
            self.status = child.wait().ok();
        }
    }

    /// Returns the error of calls to a child that has ended.
    pub(super) fn failure(&self) -> Error {
        let how = self.status.map(|status| format!(" ({status})")).unwrap_or_default();
        Error::Unavailable(format!("the process of {} has ended{how}; joins on other devices go on", self.id))
    }
}

impl Drop for ChildGuard {
    fn drop(&mut self) {
        self.end();
    }
}
