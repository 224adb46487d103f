//! The connections that the server takes.
//!
//! A client on the same host gets a small send buffer. What is sent waits in the socket until the client reads it, and
//! the kernel lets that grow to megabytes: the bytes have left the processor's cache by the time that they are read, and
//! the pages for the next ones come from memory too. With a few hundred kilobytes the same pages are used over and over
//! in the cache, and both sides spend far fewer cycles on a copy. Over a network more than that is on its way at a time,
//! so connections from elsewhere keep the kernel's own sizing. For the same reasons the server lets them send more before it
//! has taken any of it, and gets the two kinds of connections apart.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use futures::{Stream, StreamExt};
use socket2::SockRef;
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::server::TcpIncoming;

use crate::{Error, Result};

/// The send buffer of a connection from the same host, in bytes: what is in it fits into a core's second-level cache
/// beside what it was copied from, and still keeps the client busy while the server's thread is scheduled. Linux takes it
/// for the payload, and allows as much again for its own records.
const SAME_HOST_SEND_BUFFER_BYTES: usize = 384 << 10;

/// Time between probes of a connection on which nothing happens.
const KEEP_ALIVE: Duration = Duration::from_secs(60);

/// Connections as they come. Nothing is listened to any more once one of the two is dropped.
#[derive(Debug)]
pub(super) struct Incoming {
    /// From this host.
    pub same_host: Connections,
    /// From anywhere else.
    pub elsewhere: Connections,
}

type Connections = ReceiverStream<io::Result<TcpStream>>;

/// Listens, and says where: the port may have been left open.
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

/// Says early what [`listen`] would say. Nothing is listened to yet: whoever connects is refused, in place of having to wait for a
/// server that still measures its devices.
///
/// # Errors
/// [`Error::Unavailable`] when the address cannot be listened on.
pub(super) fn can_listen(address: SocketAddr, flag: &str) -> Result<()> {
    let listener = std::net::TcpListener::bind(address);
    listener.map(drop).map_err(|error| cannot_listen(address, flag, &error))
}

/// Takes connections from this host and those from elsewhere apart, in a task of its own.
fn by_host(mut incoming: impl Stream<Item = io::Result<TcpStream>> + Send + Unpin + 'static) -> Incoming {
    // Whoever takes them spawns a task for each, and is never long about it.
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
            if to.send(connection).await.is_err() {
                return;
            }
        }
    });
    Incoming { same_host: ReceiverStream::new(near), elsewhere: ReceiverStream::new(far) }
}

/// What keeps an address from being listened on, and what to do about it.
pub(super) fn cannot_listen(address: SocketAddr, flag: &str, error: &io::Error) -> Error {
    let advice = match error.kind() {
        io::ErrorKind::AddrInUse => {
            format!(
                "; another process, perhaps another dovetail, listens there: give {flag} another port, or 0 for a free one"
            )
        }
        io::ErrorKind::AddrNotAvailable => {
            format!("; no network of this machine has that address: give {flag} another")
        }
        io::ErrorKind::PermissionDenied => format!("; give {flag} a port of 1024 or above"),
        _ => String::new(),
    };
    Error::Unavailable(format!("listening on {address} ({flag}): {error}{advice}"))
}

/// Makes the send buffer of a connection from the same host small. One that keeps its size is only slower.
fn size_send_buffer(stream: &TcpStream) {
    if let Err(error) = SockRef::from(stream).set_send_buffer_size(SAME_HOST_SEND_BUFFER_BYTES) {
        tracing::debug!(?stream, %error, "the send buffer of a connection keeps its size");
    }
}

/// A connection that has ended already is from nowhere.
fn is_from_same_host(stream: &TcpStream) -> bool {
    let (Ok(local), Ok(peer)) = (stream.local_addr(), stream.peer_addr()) else { return false };
    is_same_host(local.ip(), peer.ip())
}

/// Whether what is sent stays on this host: to the loopback interface, or to the address that it comes from.
fn is_same_host(local: IpAddr, peer: IpAddr) -> bool {
    peer.to_canonical().is_loopback() || peer == local
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_peers_on_this_host_are_taken_for_such() {
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
        let bytes = SockRef::from(&accepted).send_buffer_size().unwrap();
        // Linux tells twice what it was given. The kernel may allow less than what was asked for.
        assert!(bytes <= 2 * SAME_HOST_SEND_BUFFER_BYTES, "{bytes} bytes");
        // It was set: such a buffer does not grow any more, where one of the kernel's own sizing starts elsewhere.
        assert_ne!(bytes, SockRef::from(&client).send_buffer_size().unwrap());
    }
    #[tokio::test]
    async fn nothing_is_listened_to_once_nobody_takes_connections() {
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
