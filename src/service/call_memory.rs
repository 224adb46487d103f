//! Memory of calls: bytes that a peer makes the server hold outside of tables and results.
//!
//! ```text
//!   all calls (--call-memory): their messages at most three quarters
//!     ├─ a tenant's calls: at most half; their messages at most three eighths
//!     ├─ a connection's calls: at most a quarter
//!     └─ calls of unknown callers: at most an eighth
//!
//!   request ─ bytes as they arrive ─┐
//!   answer ── bytes not sent yet ───┴─► Held, until the bytes are dropped
//! ```
//!
//! Bytes are counted before they are held. A call that needs more than is left is refused, and
//! calls under way keep what they have. So the bytes that all peers together make the server hold
//! are bounded, and no peer can take the memory of the others. Messages leave room for calls that
//! need little more than what every call takes: to poll a job, to cancel it, to fetch its result.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::time::{Instant, sleep};

use crate::memory::{Bounds, Budget, Held, check_at_least, parse_memory_setting, process_memory_limit};
use crate::{Context, Result};

/// Setting that bounds the memory of calls.
const SETTING: &str = "the server's --call-memory";

/// Share of the memory that the process may use, by default: one of this many parts.
const AUTO_PART: u64 = 16;

/// Least default, in bytes: a few large requests, and a thousand small calls.
const AUTO_MIN: u64 = 64 << 20;

/// Largest default, in bytes. Many thousands of calls need no more.
const AUTO_MAX: u64 = 4 << 30;

/// Smallest valid setting, in bytes. A client's few calls fit into its quarter.
const MIN: u64 = 1 << 20;

/// Largest share of the messages of all calls, of a tenant, of the messages of its calls, of a
/// connection, and of all unknown callers: in eighths.
const MESSAGES: u64 = 6;
const TENANT: u64 = 4;
const TENANT_MESSAGES: u64 = 3;
const CONNECTION: u64 = 2;
const STRANGERS: u64 = 1;

/// Memory that every call takes, in bytes: its task, its headers, and the first bytes of its
/// request and its answer.
const CALL_BYTES: u64 = 16 << 10;

/// Room that an answer of many parts takes ahead for the next part, in bytes. tonic hands parts on
/// when it has 32 KiB of them, and a part is seldom larger than that.
pub(super) const LISTED_BYTES: u64 = 64 << 10;

/// Time between attempts to take memory for an answer.
const RETRY: Duration = Duration::from_millis(20);

/// Time after which an answer that finds no memory is refused.
const WAIT: Duration = Duration::from_secs(30);

/// The memory of all calls of a server.
#[derive(Debug)]
pub struct CallMemory {
    whole: Budget,
    messages: Budget,
    /// Shares of tenants, by name. Names come from the token file or from signed certificates.
    tenants: Mutex<HashMap<String, TenantShare>>,
    strangers: Budget,
}

/// The share of a tenant.
#[derive(Clone, Debug)]
struct TenantShare {
    calls: Budget,
    messages: Budget,
}

impl CallMemory {
    /// Creates the memory of a server's calls, of `bytes` bytes.
    pub fn new(bytes: u64) -> Self {
        Self {
            whole: Budget::new("memory of calls", SETTING, bytes),
            messages: part(bytes, MESSAGES, "the share of messages"),
            tenants: Mutex::default(),
            strangers: part(bytes, STRANGERS, "the share of unknown callers"),
        }
    }

    /// Returns the memory of all calls.
    pub fn whole(&self) -> &Budget {
        &self.whole
    }

    /// Returns the share of a new connection.
    pub fn connection(&self) -> Budget {
        part(self.whole.limit_bytes(), CONNECTION, "this connection's share")
    }

    /// Returns the memory of a call of `tenant`; `None`: of an unknown caller. It has what every
    /// call takes.
    ///
    /// # Errors
    /// [`Error::Exhausted`](crate::Error::Exhausted) when no call fits.
    pub fn call(&self, connection: Option<Budget>, tenant: Option<&str>) -> Result<CallShare> {
        let (caller, its_messages) = match tenant {
            None => (self.strangers.clone(), None),
            Some(tenant) => {
                let TenantShare { calls, messages } = self.tenant(tenant);
                (calls, Some(messages))
            }
        };
        let of_call = || connection.clone().into_iter().chain([caller.clone()]);
        let held = Bounds::new(of_call().chain([self.whole.clone()])).reserve(CALL_BYTES, "the call")?;
        let of_messages = of_call().chain(its_messages).chain([self.messages.clone(), self.whole.clone()]);
        let share = CallShare::within(Bounds::new(of_messages));
        share.keep(held);
        Ok(share)
    }

    fn tenant(&self, name: &str) -> TenantShare {
        let bytes = self.whole.limit_bytes();
        // Without tokens, all callers are one tenant without a name.
        let of = if name.is_empty() { "one tenant".to_owned() } else { format!("tenant {name:?}") };
        let share = || TenantShare {
            calls: part(bytes, TENANT, &format!("the share of {of}")),
            messages: part(bytes, TENANT_MESSAGES, &format!("the share of messages of {of}")),
        };
        self.tenants.lock().entry(name.into()).or_insert_with(share).clone()
    }
}

/// The memory of one call. Clones share it. It is given back with the last of them.
#[derive(Clone, Debug)]
pub struct CallShare {
    bounds: Bounds,
    held: Arc<Mutex<Vec<Held>>>,
    /// Taken for parts of the answer that are yet to be made.
    ahead: Arc<Mutex<Option<Held>>>,
}

impl CallShare {
    /// Returns the memory of a call that holds nothing yet.
    pub(super) fn within(bounds: Bounds) -> Self {
        Self { bounds, held: Arc::default(), ahead: Arc::default() }
    }

    /// Keeps what was taken until the end of the call.
    pub(super) fn keep(&self, held: Held) {
        if held.bytes() > 0 {
            self.held.lock().push(held);
        }
    }

    /// Takes `bytes` until the end of the call.
    ///
    /// # Errors
    /// [`Error::Exhausted`](crate::Error::Exhausted) when less is free.
    pub fn hold(&self, bytes: u64, purpose: &str) -> Result<()> {
        self.keep(self.bounds.reserve(bytes, purpose)?);
        Ok(())
    }

    /// Returns the bounds of the call, for bytes with another life than the call's.
    pub fn bounds(&self) -> &Bounds {
        &self.bounds
    }

    /// Waits for room for the next parts of an answer: takes memory ahead, up to `bytes` in all,
    /// which [`counted`](Self::counted) uses first. So an answer of any length waits until the
    /// client has received enough of its earlier parts.
    ///
    /// # Errors
    /// [`Error::Exhausted`](crate::Error::Exhausted) when there was none for half a minute.
    pub async fn room(&self, bytes: u64) -> Result<()> {
        let take = || {
            let mut ahead = self.ahead.lock();
            match &mut *ahead {
                Some(held) => held.try_grow(bytes.saturating_sub(held.bytes()), "the answer")?,
                none => *none = Some(self.bounds.reserve(bytes, "the answer")?),
            }
            Ok(())
        };
        when_free(take).await
    }

    /// Returns the same bytes. Their memory is counted until they are dropped, which is after the
    /// client has received them if they are part of an answer.
    ///
    /// # Errors
    /// As [`CallShare::hold`].
    pub fn counted(&self, bytes: Bytes, purpose: &str) -> Result<Bytes> {
        let len = bytes.len() as u64;
        let ahead = self.ahead.lock().as_mut().map(|ahead| ahead.split(len));
        let held = match ahead {
            Some(mut held) => {
                held.try_grow(len - held.bytes(), purpose)?;
                held
            }
            None => self.bounds.reserve(len, purpose)?,
        };
        Ok(Bytes::from_owner(Counted { bytes, _held: held }))
    }
}

/// Attempts to take memory for an answer until there is some.
///
/// # Errors
/// That of the last attempt, after half a minute.
pub(super) async fn when_free<T>(take: impl Fn() -> Result<T>) -> Result<T> {
    let end = Instant::now() + WAIT;
    loop {
        match take() {
            Err(_) if Instant::now() < end => sleep(RETRY).await,
            taken => return taken,
        }
    }
}

/// Bytes with their share of the memory of calls, which other bytes may have a part in.
#[derive(Debug)]
pub(super) struct Counted<B, H = Held> {
    pub(super) bytes: B,
    pub(super) _held: H,
}

impl<B: AsRef<[u8]>, H> AsRef<[u8]> for Counted<B, H> {
    fn as_ref(&self) -> &[u8] {
        self.bytes.as_ref()
    }
}

fn part(bytes: u64, eighths: u64, whose: &str) -> Budget {
    Budget::new(format!("{whose} of the memory of calls"), SETTING, bytes / 8 * eighths)
}

/// Returns the bytes that a setting gives to calls: "auto", a size, or a share of the memory that
/// the process may use.
///
/// # Errors
/// [`Error::Invalid`](crate::Error::Invalid) with the accepted forms, and for less than the least.
pub fn call_memory_bytes(setting: &str) -> Result<u64> {
    let bytes = match setting.trim() {
        "auto" => process_memory_limit().map(|limit| (limit / AUTO_PART).clamp(AUTO_MIN, AUTO_MAX)),
        given => process_memory_limit().and_then(|limit| parse_memory_setting(given, limit)),
    };
    let bytes = bytes.and_then(|bytes| check_at_least(setting, bytes, MIN).map(|()| bytes));
    bytes.context(|| "--call-memory takes a size, a percentage, or \"auto\"")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn an_answer_waits_for_room_until_its_earlier_parts_are_sent() {
        let memory = CallMemory::new(1 << 20);
        let call = memory.call(Some(memory.connection()), Some("ann")).unwrap();
        let of_call = memory.whole().used_bytes();
        let used = || memory.whole().used_bytes() - of_call;
        let part = || call.counted(vec![0; 100 << 10].into(), "the answer");
        call.room(64 << 10).await.unwrap();
        assert_eq!(used(), 64 << 10);
        let first = part().unwrap();
        assert_eq!(used(), 100 << 10, "the room counts towards the part");
        call.room(64 << 10).await.unwrap();
        let second = part().unwrap();
        assert_eq!(used(), 200 << 10);
        // A connection has a quarter of the memory.
        let mut room = Box::pin(call.room(64 << 10));
        assert!(futures::poll!(&mut room).is_pending());
        assert!(part().is_err());
        drop(first);
        room.await.unwrap();
        assert_eq!(used(), 164 << 10);
        drop(second);
        drop(call);
        assert_eq!(memory.whole().used_bytes(), 0);
    }

    #[test]
    fn no_peer_takes_the_memory_of_the_others() {
        const PART: u64 = 16 * CALL_BYTES;
        let memory = CallMemory::new(8 * PART);
        let [first, second, third] = [0; 3].map(|_| memory.connection());
        let call = |connection: &Budget, tenant: &str| memory.call(Some(connection.clone()), Some(tenant)).unwrap();
        let refused = |call: &CallShare, bytes: u64, share: &str| {
            let refusal = call.hold(bytes, "the request").unwrap_err();
            assert!(refusal.message().contains(share) && refusal.message().contains(SETTING), "{refusal}");
        };
        let ann = [&first, &second].map(|connection| call(connection, "ann"));
        ann[0].hold(2 * PART - CALL_BYTES, "the request").unwrap();
        refused(&ann[0], 1, "this connection's share of the memory of calls");
        ann[1].hold(PART + CALL_BYTES, "the request").unwrap();
        refused(&ann[1], 1, "the share of messages of tenant \"ann\"");
        // Many small calls fit beside the messages, and no more than the tenant's share.
        let small: Vec<_> = std::iter::from_fn(|| memory.call(None, Some("ann")).ok()).take(100).collect();
        assert_eq!(small.len(), 14);
        let bob = call(&third, "bob");
        bob.hold(PART, "the request").unwrap();
        let stranger = memory.call(None, None).unwrap();
        refused(&stranger, PART, "the share of unknown callers");
        let cid = memory.call(None, Some("cid")).unwrap();
        refused(&cid, 3 * PART, "the share of messages of the memory of calls");
        drop((ann, small, bob, stranger, cid));
        assert_eq!(memory.whole().used_bytes(), 0);
    }

    #[test]
    fn a_call_holds_its_memory_until_its_end_and_an_answer_until_it_is_sent() {
        let memory = CallMemory::new(1 << 20);
        let used = || memory.whole().used_bytes();
        let call = memory.call(None, Some("ann")).unwrap();
        call.hold(1000, "the request").unwrap();
        let answer = call.counted(Bytes::from_static(b"rows"), "the answer").unwrap();
        assert_eq!((&answer[..], used()), (&b"rows"[..], CALL_BYTES + 1004));
        drop(call);
        assert_eq!(used(), 4);
        drop(answer.slice(1..2));
        assert_eq!(used(), 4);
        drop(answer);
        assert_eq!(used(), 0);
        assert!(memory.call(None, Some("ann")).unwrap().hold(1 << 19, "the request").is_err());
        assert_eq!(used(), 0);
    }

    #[test]
    fn the_setting_is_a_size_a_share_or_automatic() {
        assert_eq!(call_memory_bytes("2MiB"), Ok(2 << 20));
        let limit = process_memory_limit().unwrap();
        assert_eq!(call_memory_bytes("auto"), Ok((limit / 16).clamp(64 << 20, 4 << 30)));
        for wrong in ["much", "64KiB", "0%", "101%"] {
            let refusal = call_memory_bytes(wrong).unwrap_err();
            assert!(refusal.message().contains("--call-memory takes a size, a percentage, or \"auto\""), "{refusal}");
        }
    }
}
