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
//! what they send. That window is set per router (`server.rs`), so the two kinds of connections are
//! separated.

use std::io::{self, IoSlice};
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use futures::{Stream, StreamExt};
use socket2::SockRef;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::server::{Connected, TcpConnectInfo, TcpIncoming};

use super::transfers::WriteTime;
use crate::{Error, Result};

/// Send buffer of a connection from the same host, in bytes. Its content and the source of the copy
/// together fit into a core's second-level cache. It is large enough to keep the client busy until
/// the server's thread runs again. Linux counts this size as payload, and allows the same size
/// again for its own records.
const SAME_HOST_SEND_BUFFER_BYTES: usize = 384 << 10;

/// Time between probes of an idle connection.
const KEEP_ALIVE: Duration = Duration::from_secs(60);

/// Accepted connections. The server stops listening once one of the two streams is dropped.
#[derive(Debug)]
pub(super) struct Incoming {
    pub same_host: Connections,
    pub elsewhere: Connections,
}

type Connections = ReceiverStream<io::Result<Connection>>;

/// Connection of a client. It measures the time of its writes.
#[derive(Debug)]
pub(super) struct Connection {
    stream: TcpStream,
    writing: WriteTime,
}

/// Facts about a connection, for its calls.
#[derive(Clone, Debug)]
pub(super) struct ConnectionInfo {
    pub tcp: TcpConnectInfo,
    pub writing: WriteTime,
}

impl Connected for Connection {
    type ConnectInfo = ConnectionInfo;

    fn connect_info(&self) -> ConnectionInfo {
        ConnectionInfo { tcp: self.stream.connect_info(), writing: self.writing.clone() }
    }
}

impl AsyncRead for Connection {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buffer)
    }
}

impl AsyncWrite for Connection {
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

/// Listens, and returns the bound address: the port of `address` may be 0.
///
/// # Errors
/// [`Error::Unavailable`] when the address cannot be listened on.
pub(super) fn listen(address: SocketAddr) -> Result<(SocketAddr, Incoming)> {
    let failed = |error: io::Error| cannot_listen(address, "--listen", &error);
    let incoming =
        TcpIncoming::bind(address).map_err(failed)?.with_nodelay(Some(true)).with_keepalive(Some(KEEP_ALIVE));
    let bound = incoming.local_addr().map_err(failed)?;
    Ok((bound, by_host(incoming)))
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

/// Separates connections from this host and from other hosts, in a task of its own.
fn by_host(mut incoming: impl Stream<Item = io::Result<TcpStream>> + Send + Unpin + 'static) -> Incoming {
    // One slot is enough, because the transport spawns a task for each connection as soon as it
    // arrives.
    let (to_near, near) = mpsc::channel(1);
    let (to_far, far) = mpsc::channel(1);
    tokio::spawn(async move {
        loop {
            let next = tokio::select! {
                next = incoming.next() => next,
                () = to_near.closed() => return,
                () = to_far.closed() => return,
            };
            let Some(connection) = next else { return };
            let is_near = connection.as_ref().is_ok_and(is_from_same_host);
            if let (Ok(stream), true) = (&connection, is_near) {
                size_send_buffer(stream);
            }
            let to = if is_near { &to_near } else { &to_far };
            let connection = connection.map(|stream| Connection { stream, writing: WriteTime::default() });
            if to.send(connection).await.is_err() {
                return;
            }
        }
    });
    Incoming { same_host: ReceiverStream::new(near), elsewhere: ReceiverStream::new(far) }
}

/// Returns the error of an address that cannot be listened on, with its remedy.
pub(super) fn cannot_listen(address: SocketAddr, flag: &str, error: &io::Error) -> Error {
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

/// Makes the send buffer of a connection from the same host small. If this fails, the connection is
/// only slower.
fn size_send_buffer(stream: &TcpStream) {
    if let Err(error) = SockRef::from(stream).set_send_buffer_size(SAME_HOST_SEND_BUFFER_BYTES) {
        tracing::debug!(?stream, %error, "the send buffer of a connection keeps its size");
    }
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
        let (address, mut incoming) = listen("127.0.0.1:0".parse().unwrap()).unwrap();
        let client = TcpStream::connect(address).await.unwrap();
        let accepted = incoming.same_host.next().await.unwrap().unwrap();
        let bytes = SockRef::from(&accepted.stream).send_buffer_size().unwrap();
        // Linux reports twice the given size. The kernel may allow less than the given size.
        assert!(bytes <= 2 * SAME_HOST_SEND_BUFFER_BYTES, "{bytes} bytes");
        // The size was set, so the buffer does not grow any more. A buffer that the kernel sizes
        // would start at another size.
        assert_ne!(bytes, SockRef::from(&client).send_buffer_size().unwrap());
    }
    #[tokio::test]
    async fn connections_are_refused_once_the_listener_is_dropped() {
        let (address, incoming) = listen("127.0.0.1:0".parse().unwrap()).unwrap();
        drop(incoming);
        let refused = async {
            while TcpStream::connect(address).await.is_ok() {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(30), refused).await.expect("connections to be refused");
    }
}
