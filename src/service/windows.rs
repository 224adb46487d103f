//! HTTP/2 windows: bytes that a client may send before the server takes them.
//!
//! A connection holds as many unread bytes as its window allows. So the windows of all connections
//! are under a budget, and a connection keeps its window until it ends. Connections that come when
//! many have wide windows get narrower ones. They are served like all others, and only an upload
//! over a long distance is slower.

use crate::memory::{Budget, Reservation};

/// Bytes that a connection may hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    /// Unread bytes of a stream.
    pub stream_bytes: u32,
    /// Unread bytes of all streams.
    pub connection_bytes: u32,
    /// Largest frame. A frame is held until all of it has arrived.
    pub frame_bytes: u32,
}

/// Frame size of most connections, in bytes. With the default of 16 KiB, each frame costs a system
/// call and a wake-up. An upload then takes a quarter to a third more CPU.
const FRAME_BYTES: u32 = 1 << 20;

/// For a client on another host. The window of a stream is the bandwidth-delay product of a 10 Gb/s
/// link of 13 ms.
pub const ELSEWHERE: Window = Window { stream_bytes: 16 << 20, connection_bytes: 64 << 20, frame_bytes: FRAME_BYTES };

/// For a client on the same host, where latency is negligible. Received bytes that wait for the
/// server stay in the processor's cache until they are copied. An upload in several streams takes a
/// sixth less CPU with this window than with [`ELSEWHERE`].
pub const SAME_HOST: Window = Window { stream_bytes: 2 << 20, connection_bytes: 16 << 20, frame_bytes: FRAME_BYTES };

/// For any client, when half of the budget is taken.
pub const NARROW: Window = Window { stream_bytes: 1 << 20, connection_bytes: 2 << 20, frame_bytes: 256 << 10 };

/// For any client, when all of the budget is taken. No connection can have less (RFC 9113, 6.9.2).
pub const LEAST: Window = Window { stream_bytes: 65_535, connection_bytes: 65_535, frame_bytes: 16_384 };

/// All windows.
pub const KINDS: [Window; 4] = [SAME_HOST, ELSEWHERE, NARROW, LEAST];

impl Window {
    /// Returns the most bytes that a connection with this window holds.
    fn bytes(self) -> u64 {
        u64::from(self.connection_bytes) + u64::from(self.frame_bytes)
    }
}

/// Windows of a server's connections.
#[derive(Debug)]
pub struct Windows {
    budget: Budget,
}

impl Windows {
    /// Creates the windows of a server, of `bytes` bytes in all, except those of [`LEAST`].
    pub fn new(bytes: u64) -> Self {
        Self { budget: Budget::new("memory of windows", "the server's --call-memory", bytes) }
    }

    /// Returns the window of a new connection, and its bytes, which the connection keeps.
    pub fn open(&self, is_same_host: bool) -> (Window, Option<Reservation>) {
        let wide = if is_same_host { SAME_HOST } else { ELSEWHERE };
        let has_room = self.budget.used_bytes() + wide.bytes() <= self.budget.limit_bytes() / 2;
        let wanted = if has_room { wide } else { NARROW };
        match self.budget.try_reserve(wanted.bytes()) {
            Ok(held) => (wanted, Some(held)),
            Err(_) => (LEAST, None),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_narrow_as_connections_come_and_widen_as_they_go() {
        let windows = Windows::new(256 << 20);
        let mut open: Vec<_> = (0..200).map(|at| windows.open(at > 0)).collect();
        let count = |open: &[(Window, _)], kind: Window| open.iter().filter(|(window, _)| *window == kind).count();
        let counts = [ELSEWHERE, SAME_HOST, NARROW, LEAST].map(|kind| count(&open, kind));
        assert_eq!((counts[0], counts[1], counts.iter().sum::<usize>()), (1, 3, 200));
        assert!((50..70).contains(&counts[2]), "{counts:?}");
        assert!(windows.budget.used_bytes() <= 256 << 20);
        assert_eq!(windows.open(true).0, LEAST);
        open.drain(..100);
        assert_eq!(windows.open(true).0, SAME_HOST);
        drop(open);
        assert_eq!(windows.budget.used_bytes(), 0);
    }
}
