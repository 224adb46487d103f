//! The process of a device, as its parent sees it: ended and waited for, whatever becomes of the server's side.

use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::process::{Child, ExitStatus};
use std::time::{Duration, Instant};

use crate::Error;
use crate::device::DeviceId;

/// How long a process that was hung up on has to end by itself.
const ENDING_WAIT: Duration = Duration::from_secs(1);

/// How long the system may take to end a process that was killed, with the contexts of its GPU.
pub(super) const KILLED_WAIT: Duration = Duration::from_secs(10);

/// Ends its process when it is dropped.
#[derive(Debug)]
pub(super) struct ChildGuard {
    pub(super) id: DeviceId,
    pub(super) socket: UnixStream,
    child: Option<Child>,
    /// What the system said when it had ended.
    status: Option<ExitStatus>,
}

impl ChildGuard {
    /// Without a child, the process at the other end of the socket is another's.
    pub(super) fn new(id: DeviceId, socket: UnixStream, child: Option<Child>) -> Self {
        Self { id, socket, child, status: None }
    }

    /// Hangs up, and kills the process if it does not end by itself. True if it has ended.
    pub(super) fn end(&mut self) -> bool {
        // It may have hung up first.
        let _ = self.socket.shutdown(Shutdown::Both);
        self.has_ended(ENDING_WAIT) || {
            if let Some(child) = &mut self.child {
                let _ = child.kill();
            }
            self.has_ended(KILLED_WAIT)
        }
    }

    /// Whether the process ends within that time.
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

    /// Waits for as long as it takes.
    pub(super) fn wait(&mut self) {
        if let Some(mut child) = self.child.take() {
            self.status = child.wait().ok();
        }
    }

    /// The error of calls to a process that has ended.
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
