//! Process that mounts a tmpfs for the server's slabs, in a user namespace of its own.
//!
//! ```text
//!   server ── spawns `arena-tmpfs`, with a socket as standard input ──► unshare, mount
//!          ◄─ the root of the mount, or the reason why there is none ── exits
//! ```
//!
//! Only a process with one thread can enter a user namespace, and the server has several. The mount
//! outlives the process and its namespaces, because the server has its root open.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};
use std::time::Duration;

use super::channel::{Receiver, Sender};
use crate::human::system_words;
use crate::memory::mount_tmpfs_in_namespace;
use crate::{Error, Result};

/// Time that the process may take. It takes a few milliseconds on an idle machine.
const ANSWER_WAIT: Duration = Duration::from_secs(5);

/// Starts the process, and returns the root of its mount.
///
/// # Errors
/// [`Error::Unavailable`] if the system allows no user namespace or no mount there, or the process
/// does not answer.
pub(super) fn mounted_by_process() -> Result<OwnedFd> {
    let (here, there) = UnixStream::pair()?;
    let mut command = Command::new("/proc/self/exe");
    command.arg("arena-tmpfs").stdin(OwnedFd::from(there)).stdout(Stdio::null()).stderr(Stdio::null());
    let unavailable =
        |error: io::Error| Error::Unavailable(format!("the process that mounts a tmpfs: {}", system_words(&error)));
    let mut child = command.spawn().map_err(unavailable)?;
    // The command holds the other end of the socket, which must close with the child.
    drop(command);
    let answer = receive(here);
    if answer.is_err() {
        // The child may have ended on its own.
        let _ = child.kill();
    }
    child.wait().map_err(unavailable)?;
    answer
}

fn receive(socket: UnixStream) -> Result<OwnedFd> {
    socket.set_read_timeout(Some(ANSWER_WAIT))?;
    let mut messages = Receiver::new(socket);
    match messages.receive::<Result<()>>() {
        Ok(Some(outcome)) => {
            outcome?;
            Ok(messages.file()?)
        }
        Ok(None) | Err(_) => Err(Error::Unavailable("the process that mounts a tmpfs has not answered".into())),
    }
}

/// Runs the process that [`mounted_by_process`] starts. Standard input is its socket.
///
/// # Errors
/// [`Error::Invalid`] if the server did not start this process.
pub fn run() -> Result<()> {
    let socket = UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?);
    if socket.peer_addr().is_err() {
        return Err(Error::Invalid("this command is only for the server, which starts it to mount a tmpfs".into()));
    }
    answer(socket, mount_tmpfs_in_namespace())
}

fn answer(socket: UnixStream, mounted: Result<OwnedFd>) -> Result<()> {
    let file = mounted.as_ref().ok().map(AsFd::as_fd);
    let outcome = mounted.as_ref().map(drop).map_err(Clone::clone);
    Ok(Sender::new(socket).send(&outcome, file)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_a_file_or_the_reason_for_none() {
        let answered = |mounted| {
            let (here, there) = UnixStream::pair().unwrap();
            answer(there, mounted).unwrap();
            receive(here)
        };
        let file: OwnedFd = std::fs::File::open("/proc/self/status").unwrap().into();
        let mut text = String::new();
        io::Read::read_to_string(&mut std::fs::File::from(answered(Ok(file)).unwrap()), &mut text).unwrap();
        assert!(text.starts_with("Name:"), "{text}");
        let refused = Error::Unavailable("making a user namespace: no".into());
        assert_eq!(answered(Err(refused.clone())).unwrap_err(), refused);
        let (here, there) = UnixStream::pair().unwrap();
        drop(there);
        assert!(receive(here).unwrap_err().message().contains("has not answered"));
    }
}
