//! Child process of a device: the server ends it and waits for it, even if the server's own side
//! fails.

use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::process::{Child, ExitStatus};
use std::time::{Duration, Instant};

use crate::Error;
use crate::device::DeviceId;

/// Time that the child has to end on its own after the server hangs up.
const ENDING_WAIT: Duration = Duration::from_secs(1);

/// Time that the kernel may take to reap a killed child and its CUDA contexts.
pub(super) const KILLED_WAIT: Duration = Duration::from_secs(10);

/// Ends its child process when it is dropped.
#[derive(Debug)]
pub(super) struct ChildGuard {
    pub(super) id: DeviceId,
    pub(super) socket: UnixStream,
    child: Option<Child>,
    status: Option<ExitStatus>,
}

impl ChildGuard {
    /// Creates a guard. Without a child, another owner ends the process at the other end of the
    /// socket.
    pub(super) fn new(id: DeviceId, socket: UnixStream, child: Option<Child>) -> Self {
        Self { id, socket, child, status: None }
    }

    /// Hangs up, and kills the child if it does not end on its own. True if it has ended.
    pub(super) fn end(&mut self) -> bool {
        // The child may have hung up first.
        let _ = self.socket.shutdown(Shutdown::Both);
        self.has_ended(ENDING_WAIT) || {
            if let Some(child) = &mut self.child {
                let _ = child.kill();
            }
            self.has_ended(KILLED_WAIT)
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
