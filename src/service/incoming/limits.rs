//! Limits of open connections, in all and per client address, and of concurrent TLS handshakes.
//!
//! The limit of all connections is well below the limit of open files. So the admin port, uploads
//! and devices find descriptors even when clients open as many connections as they can.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::process::{Resource, getrlimit};
use tokio::sync::Semaphore;

use crate::service::settings::Settings;
use crate::{Error, Result};

/// Maximum number of connections, unless the settings say another number. Each takes some ten
/// kilobytes of memory before its first call.
const CONNECTIONS_MAX: usize = 10_000;

/// Part of all connections that one address may have, unless the settings say another number.
const ADDRESS_SHARE: usize = 4;

/// Maximum number of concurrent TLS handshakes with one address. Others of the address wait, so a
/// client that stalls its handshakes delays only itself.
const HANDSHAKES_PER_ADDRESS: usize = 64;

/// Descriptors that are kept for anything other than connections, tables and devices: files that a
/// reload reads, lookups, and the log.
const SPARE_FILES: usize = 64;

/// Descriptors that a device may use: its process, its channels, and the driver's files.
const FILES_PER_DEVICE: usize = 32;

/// Fewest connections that a server with a low limit of open files admits.
const CONNECTIONS_MIN: usize = 16;

/// Shortest time between two log lines of one kind.
const SAID_EVERY: Duration = Duration::from_secs(10);

/// Limits of open connections, and the connections that are open.
#[derive(Debug)]
pub struct ConnectionLimits {
    all: usize,
    /// Connections of one address. `None` stands for no limit.
    per_address: Option<usize>,
    /// True if the limit of an address was given, so that it applies to this host too.
    covers_this_host: bool,
    open: Mutex<Open>,
    said: Throttle,
}

#[derive(Debug, Default)]
struct Open {
    all: usize,
    by_address: HashMap<IpAddr, Address>,
}

#[derive(Debug)]
struct Address {
    open: usize,
    handshakes: Arc<Semaphore>,
}

/// Right to a connection, until it is dropped.
#[derive(Debug)]
pub struct Permit {
    limits: Arc<ConnectionLimits>,
    address: IpAddr,
    /// Slots for TLS handshakes with the address.
    pub handshakes: Arc<Semaphore>,
}

/// Reason why a connection is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    All,
    Address,
}

impl Refusal {
    /// Returns the reason's name in metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::All => "limit",
            Self::Address => "address_limit",
        }
    }
}

/// Descriptors that the server needs for anything other than connections to the Flight port.
#[derive(Clone, Copy, Debug)]
pub struct OtherFiles {
    /// Slabs of host memory.
    pub slabs: u64,
    pub devices: usize,
    /// Connections to the admin port.
    pub admin: usize,
}

impl OtherFiles {
    fn count(self) -> usize {
        // Those that are open already include some of the slabs and devices. Counting these twice
        // only makes the reserve larger.
        let open = std::fs::read_dir("/proc/self/fd").map_or(0, Iterator::count);
        let slabs = usize::try_from(self.slabs).unwrap_or(usize::MAX);
        [open, self.devices.saturating_mul(FILES_PER_DEVICE), self.admin, SPARE_FILES]
            .into_iter()
            .fold(slabs, usize::saturating_add)
    }
}

impl ConnectionLimits {
    /// Creates the limits of a server that needs `other` descriptors.
    ///
    /// # Errors
    /// [`Error::Invalid`] when the settings allow more connections than the limit of open files.
    pub fn new(settings: &Settings, other: OtherFiles) -> Result<Self> {
        let files = getrlimit(Resource::Nofile).current.and_then(|files| usize::try_from(files).ok());
        let room = files.map_or(usize::MAX, |files| files.saturating_sub(other.count()));
        let all = connections(settings.connection_limit, room, files)?;
        let per_address = settings.address_connection_limit;
        Ok(Self {
            all,
            per_address: Some(per_address.unwrap_or_else(|| all.div_ceil(ADDRESS_SHARE))),
            covers_this_host: per_address.is_some(),
            open: Mutex::default(),
            said: Throttle::default(),
        })
    }

    /// Returns the number of open connections.
    pub fn open(&self) -> usize {
        self.open.lock().all
    }

    /// Admits a connection from an address.
    ///
    /// # Errors
    /// The limit that is reached. A line of the log tells, unless one has told recently.
    pub fn admit(self: &Arc<Self>, peer: IpAddr) -> Result<Permit, Refusal> {
        let address = group(peer);
        let per_address = self.per_address.filter(|_| self.covers_this_host || !address.is_loopback());
        let mut open = self.open.lock();
        let of_address = open.by_address.get(&address).map_or(0, |known| known.open);
        let refusal = match per_address {
            _ if open.all >= self.all => Refusal::All,
            Some(limit) if of_address >= limit => Refusal::Address,
            _ => {
                open.all += 1;
                let new = || Address { open: 0, handshakes: Arc::new(Semaphore::new(HANDSHAKES_PER_ADDRESS)) };
                let known = open.by_address.entry(address).or_insert_with(new);
                known.open += 1;
                return Ok(Permit { limits: self.clone(), address, handshakes: known.handshakes.clone() });
            }
        };
        drop(open);
        if self.said.has_turn() {
            let (limit, flag, whose) = match refusal {
                Refusal::All => (self.all, "--connection-limit", "all clients"),
                Refusal::Address => (of_address, "--address-connection-limit", "this address"),
            };
            tracing::warn!(%peer, "a connection is refused, because {whose} may have {limit} ({flag})");
        }
        Err(refusal)
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let mut open = self.limits.open.lock();
        open.all -= 1;
        if let Entry::Occupied(mut known) = open.by_address.entry(self.address) {
            known.get_mut().open -= 1;
            if known.get().open == 0 {
                known.remove();
            }
        }
    }
}

/// Returns the limit of all connections, where the limit of open `files` leaves `room` for them.
fn connections(given: Option<usize>, room: usize, files: Option<usize>) -> Result<usize> {
    let files = files.map_or_else(|| "no number".into(), |files| files.to_string());
    match given {
        Some(given) if given > room.max(CONNECTIONS_MIN) => Err(Error::Invalid(format!(
            "--connection-limit is {given}, and the limit of open files, {files}, leaves {room} for connections: give less, or \
             raise that limit (ulimit -n, or LimitNOFILE of systemd)"
        ))),
        Some(given) => Ok(given),
        None if room < CONNECTIONS_MIN => {
            tracing::warn!(
                "the limit of open files, {files}, leaves {room} for connections, and {CONNECTIONS_MIN} are admitted all the \
                 same: raise that limit (ulimit -n, or LimitNOFILE of systemd)"
            );
            Ok(CONNECTIONS_MIN)
        }
        None => Ok(room.min(CONNECTIONS_MAX)),
    }
}

/// Returns the address under which a connection counts. A client usually has a whole /64 network of
/// IPv6, so all its addresses count as one.
fn group(peer: IpAddr) -> IpAddr {
    match peer.to_canonical() {
        IpAddr::V6(address) if !address.is_loopback() => IpAddr::V6(Ipv6Addr::from_bits(address.to_bits() >> 64 << 64)),
        address => address,
    }
}

/// Lets a log line through if none of its kind has been written recently.
#[derive(Debug, Default)]
pub struct Throttle {
    last: Mutex<Option<Instant>>,
}

impl Throttle {
    /// True if a line may be written now.
    pub fn has_turn(&self) -> bool {
        let mut last = self.last.lock();
        let has_turn = last.is_none_or(|last| last.elapsed() >= SAID_EVERY);
        if has_turn {
            *last = Some(Instant::now());
        }
        has_turn
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limits(all: usize, per_address: Option<usize>, covers_this_host: bool) -> Arc<ConnectionLimits> {
        let (open, said) = (Mutex::default(), Throttle::default());
        Arc::new(ConnectionLimits { all, per_address, covers_this_host, open, said })
    }

    fn admit(limits: &Arc<ConnectionLimits>, peer: &str) -> Result<Permit, Refusal> {
        limits.admit(peer.parse().unwrap())
    }

    #[test]
    fn an_address_has_its_own_limit_and_all_have_one_together() {
        let limits = limits(4, Some(2), false);
        let mut first = vec![admit(&limits, "10.0.0.1").unwrap(), admit(&limits, "::ffff:10.0.0.1").unwrap()];
        assert_eq!(admit(&limits, "10.0.0.1").unwrap_err(), Refusal::Address);
        let second = [admit(&limits, "10.0.0.2").unwrap(), admit(&limits, "10.0.0.3").unwrap()];
        assert_eq!(admit(&limits, "10.0.0.4").unwrap_err(), Refusal::All);
        first.pop();
        assert_eq!(limits.open(), 3);
        let again = admit(&limits, "10.0.0.1").unwrap();
        drop((first, second, again));
        assert_eq!(limits.open(), 0);
        assert!(limits.open.lock().by_address.is_empty(), "an address without connections takes no memory");
    }

    #[test]
    fn addresses_of_one_network_of_ipv6_count_as_one() {
        let limits = limits(10, Some(1), false);
        let _one = admit(&limits, "2001:db8::1").unwrap();
        assert_eq!(admit(&limits, "2001:db8::ffff:1").unwrap_err(), Refusal::Address);
        assert!(admit(&limits, "2001:db8:0:1::1").is_ok());
    }

    #[test]
    fn this_host_has_a_limit_only_if_one_is_given() {
        for peer in ["127.0.0.1", "::1"] {
            let unlimited = limits(3, Some(1), false);
            let _permits = [admit(&unlimited, peer).unwrap(), admit(&unlimited, peer).unwrap()];
            let limited = limits(3, Some(1), true);
            let _permit = admit(&limited, peer).unwrap();
            assert_eq!(admit(&limited, peer).unwrap_err(), Refusal::Address);
        }
    }

    #[test]
    fn the_limit_of_open_files_bounds_the_connections() {
        assert_eq!(connections(None, usize::MAX, None), Ok(CONNECTIONS_MAX));
        assert_eq!(connections(None, 700, Some(1024)), Ok(700));
        assert_eq!(connections(None, 3, Some(256)), Ok(CONNECTIONS_MIN));
        assert_eq!(connections(Some(20_000), 30_000, Some(32_000)), Ok(20_000));
        let refusal = connections(Some(5000), 700, Some(1024)).unwrap_err();
        let words = "--connection-limit is 5000, and the limit of open files, 1024, leaves 700 for connections";
        assert!(refusal.message().contains(words), "{refusal}");
    }

    #[test]
    fn one_line_of_a_kind_is_let_through_at_a_time() {
        let throttle = Throttle::default();
        assert!(throttle.has_turn() && !throttle.has_turn());
        *throttle.last.lock() = Instant::now().checked_sub(SAID_EVERY);
        assert!(throttle.has_turn());
    }
}
