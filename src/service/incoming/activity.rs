//! Activity of a connection: whether it has begun, whether a call was accepted on it, and since
//! when it has had no call.

use std::future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

/// Length of the bytes that begin each connection of HTTP/2 (RFC 9113, section 3.4).
const PREFACE_BYTES: usize = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".len();

/// Activity of a connection.
#[derive(Debug)]
pub struct Activity {
    received_bytes: AtomicUsize,
    has_accepted_call: AtomicBool,
    calls: Mutex<Calls>,
}

#[derive(Debug)]
struct Calls {
    under_way: usize,
    /// Time when the last call ended, or the connection began.
    last_end: Instant,
}

/// Call that is under way on a connection.
#[derive(Debug)]
pub struct CallUnderWay(Arc<Activity>);

impl Default for Activity {
    fn default() -> Self {
        let calls = Calls { under_way: 0, last_end: Instant::now() };
        Self {
            received_bytes: AtomicUsize::new(0),
            has_accepted_call: AtomicBool::new(false),
            calls: Mutex::new(calls),
        }
    }
}

impl Activity {
    /// Counts received bytes.
    pub(super) fn add_received(&self, bytes: usize) {
        self.received_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Counts a call until the result is dropped.
    pub fn start_call(self: &Arc<Self>) -> CallUnderWay {
        self.calls.lock().under_way += 1;
        CallUnderWay(self.clone())
    }

    /// Notes that a call was accepted: that of a health probe, or of a known caller.
    pub fn accept_call(&self) {
        self.has_accepted_call.store(true, Ordering::Relaxed);
    }

    /// True if no call is under way. Calls count only after one was accepted.
    pub fn is_idle(&self) -> bool {
        !self.has_accepted_call.load(Ordering::Relaxed) || self.calls.lock().under_way == 0
    }

    /// Waits until `limit` has passed without enough bytes for a preface of HTTP/2. Never returns
    /// if they came in time. A connection of HTTP/1.1 that has sent less is as late.
    pub async fn preface_overdue(&self, limit: Duration) {
        tokio::time::sleep(limit).await;
        if self.received_bytes.load(Ordering::Relaxed) >= PREFACE_BYTES {
            future::pending().await
        }
    }

    /// Waits until `limit` has passed without an accepted call. Never returns if one came in time.
    pub async fn call_overdue(&self, limit: Duration) {
        tokio::time::sleep(limit).await;
        if self.has_accepted_call.load(Ordering::Relaxed) {
            future::pending().await
        }
    }

    /// Waits until no call has been under way for `limit`.
    pub async fn idle_for(&self, limit: Duration) {
        loop {
            let now = Instant::now();
            let since = {
                let calls = self.calls.lock();
                if calls.under_way == 0 { calls.last_end } else { now }
            };
            let Some(due) = since.checked_add(limit) else { return future::pending().await };
            if due <= now {
                return;
            }
            tokio::time::sleep_until(due).await;
        }
    }
}

impl Drop for CallUnderWay {
    fn drop(&mut self) {
        let mut calls = self.0.calls.lock();
        calls.under_way -= 1;
        calls.last_end = Instant::now();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHORT: Duration = Duration::from_millis(5);

    #[tokio::test]
    async fn a_connection_is_idle_only_after_its_last_call() {
        let activity = Arc::new(Activity::default());
        activity.idle_for(SHORT).await;
        activity.accept_call();
        let calls = [activity.start_call(), activity.start_call()];
        for call in calls {
            let ended = tokio::time::timeout(4 * SHORT, activity.idle_for(SHORT)).await;
            assert!(ended.is_err() && !activity.is_idle(), "a call is under way");
            drop(call);
        }
        assert!(activity.is_idle());
        activity.idle_for(SHORT).await;
        assert!(tokio::time::timeout(4 * SHORT, activity.idle_for(Duration::MAX)).await.is_err());
    }

    #[tokio::test]
    async fn only_an_accepted_call_is_in_time() {
        let activity = Arc::new(Activity::default());
        let _refused = activity.start_call();
        activity.call_overdue(SHORT).await;
        assert!(activity.is_idle());
        activity.accept_call();
        assert!(tokio::time::timeout(4 * SHORT, activity.call_overdue(SHORT)).await.is_err());
        assert!(!activity.is_idle());
    }

    #[tokio::test]
    async fn only_a_whole_preface_is_in_time() {
        for (bytes, is_late) in [(0, true), (PREFACE_BYTES - 1, true), (PREFACE_BYTES, false)] {
            let activity = Activity::default();
            activity.add_received(bytes);
            match is_late {
                true => activity.preface_overdue(SHORT).await,
                false => assert!(tokio::time::timeout(4 * SHORT, activity.preface_overdue(SHORT)).await.is_err()),
            }
        }
    }
}
