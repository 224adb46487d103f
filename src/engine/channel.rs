//! Messages over a socket between two processes of one host, some with a file.
//!
//! A message is its length in 8 bytes, followed by its `postcard` encoding. A file is sent with the
//! first byte of its message, so that messages and files arrive in the same order.

use std::collections::VecDeque;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use parking_lot::Mutex;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    recvmsg, sendmsg,
};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Fewest bytes to ask of the socket at once. A read asks for all bytes that the message lacks, if
/// those are more.
const READ_BYTES: usize = 16 << 10;

/// Most bytes to ask of the socket at once. The socket holds no more, and clearing a larger buffer
/// is wasted work.
const READ_BYTES_MAX: usize = 1 << 20;

const LENGTH_BYTES: usize = 8;

/// Sending end of a socket, for any thread.
#[derive(Debug)]
pub(super) struct Sender {
    socket: UnixStream,
    /// Held while a message is written.
    sending: Mutex<()>,
}

impl Sender {
    pub(super) fn new(socket: UnixStream) -> Self {
        Self { socket, sending: Mutex::default() }
    }

    /// Closes the socket in both directions.
    pub(super) fn hang_up(&self) {
        // An error means that the socket is closed already.
        let _ = self.socket.shutdown(Shutdown::Both);
    }

    /// Sends a message, and optionally a file with it. Returns when the socket has taken both,
    /// which may wait for a slow reader.
    pub(super) fn send(&self, message: &impl Serialize, file: Option<BorrowedFd<'_>>) -> io::Result<()> {
        let mut frame = postcard::to_extend(message, vec![0; LENGTH_BYTES]).map_err(io::Error::other)?;
        let length = (frame.len() - LENGTH_BYTES) as u64;
        frame[..LENGTH_BYTES].copy_from_slice(&length.to_le_bytes());
        let files = file.as_slice();
        let _sending = self.sending.lock();
        // A message cut in half cannot be decoded, so close the socket.
        self.put(&frame, files).inspect_err(|_| self.hang_up())
    }

    fn put(&self, frame: &[u8], files: &[BorrowedFd<'_>]) -> io::Result<()> {
        let mut sent = 0;
        while sent < frame.len() {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut ancillary = SendAncillaryBuffer::new(&mut space);
            if sent == 0 && !files.is_empty() {
                ancillary.push(SendAncillaryMessage::ScmRights(files));
            }
            match sendmsg(&self.socket, &[IoSlice::new(&frame[sent..])], &mut ancillary, SendFlags::NOSIGNAL) {
                Ok(bytes) => sent += bytes,
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }
}

/// Receiving end of a socket.
#[derive(Debug)]
pub(super) struct Receiver {
    socket: UnixStream,
    bytes: Vec<u8>,
    /// Bytes of `bytes` that earlier messages have used.
    taken: usize,
    files: VecDeque<OwnedFd>,
    idle_reads: u32,
}

impl Receiver {
    pub(super) fn new(socket: UnixStream) -> Self {
        Self { socket, bytes: Vec::new(), taken: 0, files: VecDeque::new(), idle_reads: 0 }
    }

    /// Waits for the next message and returns it; `None` if the other end is closed. If the socket
    /// has a read timeout, the error `WouldBlock` ends an idle read. The next call goes on.
    pub(super) fn receive<T: DeserializeOwned>(&mut self) -> io::Result<Option<T>> {
        if !self.fill(LENGTH_BYTES)? {
            return Ok(None);
        }
        let length = self.bytes[self.taken..][..LENGTH_BYTES].try_into().expect("the bytes of the length were read");
        let length = usize::try_from(u64::from_le_bytes(length)).map_err(io::Error::other)?;
        if !self.fill(LENGTH_BYTES + length)? {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let message = postcard::from_bytes(&self.bytes[self.taken + LENGTH_BYTES..][..length]);
        self.taken += LENGTH_BYTES + length;
        message.map(Some).map_err(io::Error::other)
    }

    /// Returns the number of reads in a row that have ended without a byte, at the socket's read
    /// timeout.
    pub(super) fn idle_reads(&self) -> u32 {
        self.idle_reads
    }

    /// Returns the file that came with the last message.
    pub(super) fn file(&mut self) -> io::Result<OwnedFd> {
        self.files.pop_front().ok_or_else(|| io::Error::other("a message arrived without its file"))
    }

    /// Reads until `wanted` bytes are available. Returns `false` if the other end is closed before
    /// the first byte of a message.
    fn fill(&mut self, wanted: usize) -> io::Result<bool> {
        while self.bytes.len() - self.taken < wanted {
            self.bytes.drain(..std::mem::take(&mut self.taken));
            let filled = self.bytes.len();
            self.bytes.resize(filled + (wanted - filled).clamp(READ_BYTES, READ_BYTES_MAX), 0);
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(16))];
            let mut ancillary = RecvAncillaryBuffer::new(&mut space);
            let into = &mut [IoSliceMut::new(&mut self.bytes[filled..])];
            let received = recvmsg(&self.socket, into, &mut ancillary, RecvFlags::CMSG_CLOEXEC);
            let count = received.as_ref().map_or(0, |received| received.bytes);
            self.bytes.truncate(filled + count);
            for message in ancillary.drain() {
                if let RecvAncillaryMessage::ScmRights(files) = message {
                    self.files.extend(files);
                }
            }
            match received {
                Ok(_) if count > 0 => self.idle_reads = 0,
                Ok(_) if filled == 0 => return Ok(false),
                Ok(_) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => {
                    self.idle_reads += u32::from(error == rustix::io::Errno::AGAIN);
                    return Err(error.into());
                }
            }
        }
        Ok(true)
    }
}
