//! Limits of open connections, in all, per client address and per tenant, and of concurrent TLS
//! handshakes.
//!
//! The limit of all connections is well below the limit of open files. So the admin port, uploads
//! and devices find descriptors even when clients open as many connections as they can.
//!
//! A connection keeps its place from the first accepted call of a tenant on, and counts for that
//! tenant. When all places are taken, a new connection takes the place of the oldest one without
//! such a call. So strangers cannot keep a tenant out, and neither can another tenant, which has
//! half of all places at most. Health probes have no tenant. They are answered on any connection,
//! and it may lose its place all the same.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::net::{IpAddr, Ipv6Addr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::process::{Resource, getrlimit};
use tokio::sync::{Notify, Semaphore};
use tokio_util::sync::CancellationToken;

use crate::human;
use crate::service::settings::Settings;
use crate::service::shared::tenant_share;
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
    /// Connections with calls of one tenant. `None` stands for no limit.
    per_tenant: Option<usize>,
    open: Mutex<Open>,
    /// Notified when a connection has ended.
    freed: Notify,
    said: Throttle,
}

#[derive(Debug, Default)]
struct Open {
    all: usize,
    by_address: HashMap<IpAddr, Address>,
    /// Connections on which a tenant's call was accepted. One that several tenants share, as behind
    /// a proxy, counts for each of them.
    by_tenant: HashMap<String, usize>,
    /// Connections without an accepted call of a tenant, the oldest first. Cancelling a token
    /// closes the connection.
    without_call: BTreeMap<u64, CancellationToken>,
    /// Number of the next connection.
    next: u64,
}

#[derive(Debug)]
struct Address {
    open: usize,
    handshakes: Arc<Semaphore>,
}

/// Right to a connection, until it is dropped.
#[derive(Debug)]
pub struct Permit {
    address: IpAddr,
    /// Slots for TLS handshakes with the address.
    pub handshakes: Arc<Semaphore>,
    pub place: Arc<Place>,
}

/// Place of a connection among those that are open, for its calls.
#[derive(Debug)]
pub struct Place {
    limits: Arc<ConnectionLimits>,
    number: u64,
    /// Cancelled when a newer connection takes the place.
    pub lost: CancellationToken,
    /// Tenants for which the connection counts; `None` when it has ended.
    tenants: Mutex<Option<Vec<String>>>,
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

    /// Returns the setting of the limit, and those who share it.
    fn told(self) -> (&'static str, &'static str) {
        match self {
            Self::All => ("--connection-limit", "all clients"),
            Self::Address => ("--address-connection-limit", "this address"),
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
            per_tenant: tenant_share(settings, settings.tenant_connections, all),
            open: Mutex::default(),
            freed: Notify::new(),
            said: Throttle::default(),
        })
    }

    /// Returns the number of open connections.
    pub fn open(&self) -> usize {
        self.open.lock().all
    }

    /// Returns the number of connections of each tenant.
    pub fn by_tenant(&self) -> Vec<(String, usize)> {
        self.open.lock().by_tenant.iter().map(|(tenant, count)| (tenant.clone(), *count)).collect()
    }

    /// Admits a connection from an address. When all places are taken, it closes the oldest
    /// connection without an accepted call, and waits until that is done.
    ///
    /// # Errors
    /// The limit that is reached. A line of the log tells, unless one has told recently.
    pub async fn admit(self: &Arc<Self>, peer: IpAddr) -> Result<Permit, Refusal> {
        let address = group(peer);
        let per_address = self.per_address.filter(|_| self.covers_this_host || !address.is_loopback());
        let mut has_made_room = false;
        loop {
            let a_place_is_free = self.freed.notified();
            let refusal = {
                let mut open = self.open.lock();
                let of_address = open.by_address.get(&address).map_or(0, |known| known.open);
                match per_address {
                    Some(limit) if of_address >= limit => Some((Refusal::Address, limit)),
                    _ if open.all < self.all => return Ok(self.permit(&mut open, address)),
                    _ if has_made_room || open.close_oldest_without_call() => None,
                    _ => Some((Refusal::All, self.all)),
                }
            };
            if let Some((refusal, limit)) = refusal {
                if self.said.has_turn() {
                    let (flag, whose) = refusal.told();
                    tracing::warn!(%peer, "a connection is refused, because {whose} may have {limit} ({flag})");
                }
                return Err(refusal);
            }
            if !has_made_room && self.said.has_turn() {
                let limit = self.all;
                tracing::warn!(
                    %peer,
                    "a connection takes the place of an older one without a call, because all clients may have {limit} \
                     (--connection-limit)"
                );
            }
            has_made_room = true;
            a_place_is_free.await;
        }
    }

    fn permit(self: &Arc<Self>, open: &mut Open, address: IpAddr) -> Permit {
        let (number, lost) = (open.next, CancellationToken::new());
        open.next += 1;
        open.all += 1;
        open.without_call.insert(number, lost.clone());
        let new = || Address { open: 0, handshakes: Arc::new(Semaphore::new(HANDSHAKES_PER_ADDRESS)) };
        let known = open.by_address.entry(address).or_insert_with(new);
        known.open += 1;
        let place = Place { limits: self.clone(), number, lost, tenants: Mutex::new(Some(Vec::new())) };
        Permit { address, handshakes: known.handshakes.clone(), place: Arc::new(place) }
    }
}

impl Open {
    /// False if a call of a tenant was accepted on every connection.
    fn close_oldest_without_call(&mut self) -> bool {
        let oldest = self.without_call.pop_first();
        oldest.map(|(_, lost)| lost.cancel()).is_some()
    }
}

impl Place {
    /// Counts the connection for a tenant whose call it brings. It keeps its place from now on.
    ///
    /// # Errors
    /// [`Error::Exhausted`] when the tenant has as many connections as it may have.
    pub fn take(&self, tenant: &str) -> Result<()> {
        let mut tenants = self.tenants.lock();
        let Some(tenants) = tenants.as_mut() else { return Ok(()) };
        if tenants.iter().any(|known| known == tenant) {
            return Ok(());
        }
        let mut open = self.limits.open.lock();
        // A connection that is about to be closed counts for no tenant.
        if self.lost.is_cancelled() {
            return Ok(());
        }
        let of_tenant = open.by_tenant.get(tenant).copied().unwrap_or(0);
        if self.limits.per_tenant.is_some_and(|limit| of_tenant >= limit) {
            return Err(Error::Exhausted(format!(
                "tenant {tenant:?} has {}, and may have no more; close one, or raise the server's --tenant-connections",
                human::counted(of_tenant as u64, "connection")
            )));
        }
        *open.by_tenant.entry(tenant.into()).or_default() += 1;
        open.without_call.remove(&self.number);
        tenants.push(tenant.into());
        Ok(())
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let tenants = self.place.tenants.lock().take().unwrap_or_default();
        let mut open = self.place.limits.open.lock();
        open.all -= 1;
        open.without_call.remove(&self.place.number);
        if let Entry::Occupied(mut known) = open.by_address.entry(self.address) {
            known.get_mut().open -= 1;
            if known.get().open == 0 {
                known.remove();
            }
        }
        for tenant in tenants {
            if let Entry::Occupied(mut count) = open.by_tenant.entry(tenant) {
                *count.get_mut() -= 1;
                if *count.get() == 0 {
                    count.remove();
                }
            }
        }
        drop(open);
        self.place.limits.freed.notify_waiters();
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
    use futures::FutureExt;

    use super::*;

    fn limits(all: usize, per_address: Option<usize>, covers_this_host: bool) -> Arc<ConnectionLimits> {
        let (open, freed, said) = (Mutex::default(), Notify::new(), Throttle::default());
        Arc::new(ConnectionLimits { all, per_address, covers_this_host, per_tenant: None, open, freed, said })
    }

    /// Limits of all connections and of each tenant's.
    fn tenants(all: usize, per_tenant: Option<usize>) -> Arc<ConnectionLimits> {
        Arc::new(ConnectionLimits { per_tenant, ..Arc::into_inner(limits(all, None, false)).unwrap() })
    }

    /// Admits a connection that need not wait.
    fn admit(limits: &Arc<ConnectionLimits>, peer: &str) -> Result<Permit, Refusal> {
        limits.admit(peer.parse().unwrap()).now_or_never().expect("no other connection is closed for it")
    }

    #[test]
    fn an_address_has_its_own_limit_and_all_have_one_together() {
        let limits = limits(4, Some(2), false);
        let with_call = |peer: &str| {
            let permit = admit(&limits, peer).unwrap();
            permit.place.take("").unwrap();
            permit
        };
        let mut first = vec![with_call("10.0.0.1"), with_call("::ffff:10.0.0.1")];
        assert_eq!(admit(&limits, "10.0.0.1").unwrap_err(), Refusal::Address);
        let second = [with_call("10.0.0.2"), with_call("10.0.0.3")];
        assert_eq!(admit(&limits, "10.0.0.4").unwrap_err(), Refusal::All);
        first.pop();
        assert_eq!(limits.open(), 3);
        let again = with_call("10.0.0.1");
        drop((first, second, again));
        assert_eq!(limits.open(), 0);
        let open = limits.open.lock();
        assert!(open.by_address.is_empty(), "an address without connections takes no memory");
        assert!(open.by_tenant.is_empty() && open.without_call.is_empty());
    }

    #[test]
    fn the_oldest_connection_without_a_call_gives_its_place_to_a_new_one() {
        let limits = tenants(3, None);
        let [oldest, called, newest] = [0; 3].map(|_| admit(&limits, "::1").unwrap());
        called.place.take("ann").unwrap();
        let mut waiting = Box::pin(limits.admit("::1".parse().unwrap()));
        for _ in 0..2 {
            assert!(waiting.as_mut().now_or_never().is_none(), "it waits until the other is closed");
            assert!(oldest.place.lost.is_cancelled() && !called.place.lost.is_cancelled());
            assert!(!newest.place.lost.is_cancelled());
        }
        // A call that comes at this moment gets no place back.
        oldest.place.take("ann").unwrap();
        assert_eq!(limits.by_tenant(), [("ann".to_owned(), 1)]);
        drop(oldest);
        let admitted = waiting.now_or_never().unwrap().unwrap();
        for permit in [&newest, &admitted] {
            permit.place.take("bob").unwrap();
        }
        assert_eq!(admit(&limits, "::1").unwrap_err(), Refusal::All);
        drop(called);
        assert!(admit(&limits, "::1").is_ok());
        assert!(!newest.place.lost.is_cancelled() && !admitted.place.lost.is_cancelled());
    }

    #[test]
    fn a_connection_counts_once_for_each_tenant_that_calls_on_it() {
        let limits = tenants(10, Some(2));
        let [first, second, third] = [0; 3].map(|_| admit(&limits, "::1").unwrap());
        for place in [&first.place, &first.place, &second.place] {
            place.take("ann").unwrap();
        }
        let refusal = third.place.take("ann").unwrap_err();
        let words = ["tenant \"ann\" has 2 connections, and may have no more", "--tenant-connections"];
        assert!(words.iter().all(|words| refusal.message().contains(words)), "{refusal}");
        assert!(limits.open.lock().without_call.contains_key(&third.place.number));
        // As behind a proxy.
        first.place.take("bob").unwrap();
        third.place.take("bob").unwrap();
        let mut counts = limits.by_tenant();
        counts.sort();
        assert_eq!(counts, [("ann".to_owned(), 2), ("bob".to_owned(), 2)]);
        drop(first);
        third.place.take("ann").unwrap();
        let last = third.place.clone();
        drop((second, third));
        last.take("ann").unwrap();
        assert_eq!(limits.by_tenant(), []);
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
