//! Connections that the server accepts.
//!
//! A client on the same host gets a small send buffer. Sent bytes wait in the socket until the
//! client reads them, and the kernel lets this buffer grow to megabytes. By the time that the
//! client reads these bytes, they have left the processor's cache. The kernel's pages for the next
//! bytes are not in the cache either. With a buffer of a few hundred kilobytes, the same pages stay
//! in the cache and are reused. Client and server then spend far fewer cycles on a copy.
//!
//! Over a network, more bytes than that are in flight at a time. So connections from other hosts
//! keep the kernel's sizing. For the same reasons, remote clients have a larger HTTP/2 window for
//! what they send (`windows.rs`).

mod activity;
mod limits;

use std::io::{self, IoSlice};
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use socket2::{SockRef, TcpKeepalive};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::server::TlsStream;

pub(super) use activity::{Activity, CallUnderWay};
pub(super) use limits::{ConnectionLimits, OtherFiles, Permit, Place, Throttle};

use super::transfers::WriteTime;
use crate::memory::Budget;
use crate::{Error, Result};

/// Send buffer of a connection from the same host, in bytes. Its content and the source of the copy
/// together fit into a core's second-level cache. It is large enough to keep the client busy until
/// the server's thread runs again. Linux counts this size as payload, and allows the same size
/// again for its own records.
const SAME_HOST_SEND_BUFFER_BYTES: usize = 384 << 10;

/// Time between the kernel's probes of an idle connection.
const KEEP_ALIVE: Duration = Duration::from_secs(60);

/// Pause after the system refused to accept a connection. It usually has no descriptor left, so the
/// next attempt at once would fail as well.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Connection of a client, plain or over TLS.
#[derive(Debug)]
pub(super) struct Connection {
    io: Io,
    activity: Arc<Activity>,
}

#[derive(Debug)]
enum Io {
    Plain(Socket),
    Tls(Box<TlsStream<Socket>>),
}

/// Socket that measures the time of its writes.
#[derive(Debug)]
pub(super) struct Socket {
    stream: TcpStream,
    pub(super) is_same_host: bool,
    pub(super) writing: WriteTime,
}

/// Facts about a connection, for its calls.
#[derive(Clone, Debug)]
pub(super) struct ConnectionInfo {
    /// Number among the connections of this process. It names a client without its address.
    pub number: u64,
    pub peer: SocketAddr,
    /// Certificate of the client (DER), checked by TLS.
    pub certificate: Option<Arc<[u8]>>,
    pub writing: WriteTime,
    pub activity: Arc<Activity>,
    pub place: Arc<Place>,
    /// The connection's share of the memory of calls, from its first call on.
    pub memory: Arc<OnceLock<Budget>>,
}

impl Socket {
    /// Sets the options of an accepted connection. If that fails, the connection is only slower, or
    /// has ended already.
    pub(super) fn new(stream: TcpStream) -> Self {
        let is_same_host = is_from_same_host(&stream);
        let socket = SockRef::from(&stream);
        let mut set = stream.set_nodelay(true);
        set = set.and(socket.set_tcp_keepalive(&TcpKeepalive::new().with_time(KEEP_ALIVE)));
        if is_same_host {
            set = set.and(socket.set_send_buffer_size(SAME_HOST_SEND_BUFFER_BYTES));
        }
        if let Err(error) = set {
            tracing::debug!(?stream, %error, "a connection keeps the system's options");
        }
        Self { stream, is_same_host, writing: WriteTime::default() }
    }
}

impl Connection {
    /// Creates a connection without TLS.
    pub(super) fn plain(socket: Socket) -> Self {
        Self { io: Io::Plain(socket), activity: Arc::default() }
    }

    /// Creates a connection whose TLS handshake is done.
    pub(super) fn over_tls(stream: TlsStream<Socket>) -> Self {
        Self { io: Io::Tls(Box::new(stream)), activity: Arc::default() }
    }

    /// Returns the facts about the connection with `peer`, which has a place.
    pub(super) fn info(&self, peer: SocketAddr, place: Arc<Place>) -> ConnectionInfo {
        static LAST: AtomicU64 = AtomicU64::new(0);
        let (socket, certificates) = match &self.io {
            Io::Plain(socket) => (socket, None),
            Io::Tls(stream) => {
                let (socket, session) = stream.get_ref();
                (socket, session.peer_certificates())
            }
        };
        // The client's own certificate is first; those of its signers follow.
        let certificate = certificates.and_then(|chain| chain.first()).map(|own| Arc::from(own.as_ref()));
        ConnectionInfo {
            number: LAST.fetch_add(1, Ordering::Relaxed) + 1,
            peer,
            certificate,
            writing: socket.writing.clone(),
            activity: self.activity.clone(),
            place,
            memory: Arc::default(),
        }
    }
}

/// Calls a method of the stream inside, whatever its kind.
macro_rules! inner {
    ($self:ident, $io:ident => $call:expr) => {
        match &mut $self.get_mut().io {
            Io::Plain($io) => {
                let $io = Pin::new($io);
                $call
            }
            Io::Tls($io) => {
                let $io = Pin::new($io.as_mut());
                $call
            }
        }
    };
}

impl AsyncRead for Connection {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let activity = self.activity.clone();
        let before = buffer.filled().len();
        let read = inner!(self, io => io.poll_read(cx, buffer));
        activity.add_received(buffer.filled().len() - before);
        read
    }
}

impl AsyncWrite for Connection {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        inner!(self, io => io.poll_write(cx, bytes))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        pieces: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        inner!(self, io => io.poll_write_vectored(cx, pieces))
    }

    fn is_write_vectored(&self) -> bool {
        match &self.io {
            Io::Plain(socket) => socket.is_write_vectored(),
            Io::Tls(stream) => stream.is_write_vectored(),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        inner!(self, io => io.poll_flush(cx))
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        inner!(self, io => io.poll_shutdown(cx))
    }
}

impl AsyncRead for Socket {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buffer)
    }
}

impl AsyncWrite for Socket {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let start = Instant::now();
        let written = Pin::new(&mut self.stream).poll_write(cx, bytes);
        self.writing.add_since(start);
        written
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        pieces: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let start = Instant::now();
        let written = Pin::new(&mut self.stream).poll_write_vectored(cx, pieces);
        self.writing.add_since(start);
        written
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

/// Listens. The port of `address` may be 0.
///
/// # Errors
/// [`Error::Unavailable`] when the address cannot be listened on.
pub(super) async fn listen(address: SocketAddr, flag: &str) -> Result<TcpListener> {
    TcpListener::bind(address).await.map_err(|error| cannot_listen(address, flag, &error))
}

/// Checks early that [`listen`] will succeed, without listening. The port does not listen yet, so a
/// client that connects early is refused, instead of waiting while the server measures its devices.
///
/// # Errors
/// [`Error::Unavailable`] when the address cannot be listened on.
pub(super) fn can_listen(address: SocketAddr, flag: &str) -> Result<()> {
    let listener = std::net::TcpListener::bind(address);
    listener.map(drop).map_err(|error| cannot_listen(address, flag, &error))
}

/// Accepts the next connection. Pauses while the system gives none, for example because the process
/// has no descriptor left.
pub(super) async fn accept(listener: &TcpListener, flag: &str, said: &Throttle) -> (TcpStream, SocketAddr) {
    loop {
        let error = match listener.accept().await {
            Ok(accepted) => return accepted,
            Err(error) => error,
        };
        // Such a connection has ended before it was accepted.
        if matches!(error.kind(), io::ErrorKind::ConnectionAborted | io::ErrorKind::Interrupted) {
            continue;
        }
        if said.has_turn() {
            tracing::warn!(
                "connections to {flag} wait, because the system gives the server none: {error}; raise the limit of open \
                 files (ulimit -n, or LimitNOFILE of systemd) if that is the reason"
            );
        }
        tokio::time::sleep(ACCEPT_PAUSE).await;
    }
}

/// Returns the error of an address that cannot be listened on, with its remedy.
fn cannot_listen(address: SocketAddr, flag: &str, error: &io::Error) -> Error {
    let advice = match error.kind() {
        io::ErrorKind::AddrInUse => {
            format!(
                "; another process, perhaps another dovetail, listens there; give {flag} another port, or 0 for a free one"
            )
        }
        io::ErrorKind::AddrNotAvailable => {
            format!("; no network interface of this machine has that address; give {flag} another")
        }
        io::ErrorKind::PermissionDenied => format!("; give {flag} a port of 1024 or above"),
        _ => String::new(),
    };
    Error::Unavailable(format!("listening on {address} ({flag}): {error}{advice}"))
}

/// True if the peer is on this host. False for a connection that has ended already.
fn is_from_same_host(stream: &TcpStream) -> bool {
    let (Ok(local), Ok(peer)) = (stream.local_addr(), stream.peer_addr()) else { return false };
    is_same_host(local.ip(), peer.ip())
}

/// True if sent bytes stay on this host: they go to the loopback interface, or to the address that
/// they come from.
fn is_same_host(local: IpAddr, peer: IpAddr) -> bool {
    peer.to_canonical().is_loopback() || peer == local
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_peers_on_this_host_are_treated_as_local() {
        let host = |local: &str, peer: &str| is_same_host(local.parse().unwrap(), peer.parse().unwrap());
        assert!(host("127.0.0.1", "127.0.0.1"));
        assert!(host("::1", "::1"));
        assert!(host("::ffff:127.0.0.1", "::ffff:127.0.0.1"));
        assert!(host("10.0.0.5", "10.0.0.5"), "an interface of this host that is not loopback");
        assert!(!host("10.0.0.5", "10.0.0.6"));
        assert!(!host("2001:db8::1", "2001:db8::2"));
    }

    #[tokio::test]
    async fn a_connection_from_this_host_has_a_small_send_buffer() {
        let listener = listen("127.0.0.1:0".parse().unwrap(), "--listen").await.unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (accepted, _) = accept(&listener, "--listen", &Throttle::default()).await;
        let accepted = Socket::new(accepted);
        assert!(accepted.is_same_host && accepted.stream.nodelay().unwrap());
        let bytes = SockRef::from(&accepted.stream).send_buffer_size().unwrap();
        // Linux reports twice the given size. The kernel may allow less than the given size.
        assert!(bytes <= 2 * SAME_HOST_SEND_BUFFER_BYTES, "{bytes} bytes");
        // The size was set, so the buffer does not grow any more. A buffer that the kernel sizes
        // would start at another size.
        assert_ne!(bytes, SockRef::from(&client).send_buffer_size().unwrap());
    }
}
