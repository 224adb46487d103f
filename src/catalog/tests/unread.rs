//! Tests of streams whose clients do not read, and whose memory others need.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use super::*;
use crate::catalog::{ArrivingRows, BackpressureLimits, EvictionPermit, ResultSpool, SpoolOptions};

/// Rows that wait to be joined, of that many bytes.
#[derive(Debug, Default)]
struct Arriving(AtomicU64);

impl ArrivingRows for Arriving {
    fn bytes(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    fn drop_all(&self) {
        self.0.store(0, Ordering::Relaxed);
    }
}

/// Stream of `ada`, whose client may read nothing for as long as `stall`.
fn stream(catalog: &Catalog, stall: Duration) -> (ResultSpool, Arc<Arriving>) {
    let arriving = Arc::new(Arriving::default());
    let is_wanted = Arc::new(AtomicBool::new(false));
    let options = SpoolOptions {
        retain: Duration::ZERO,
        arena: Some(catalog.arena().clone()),
        charge: Some(catalog.charge("ada")),
        arriving: Some(arriving.clone()),
        when_wanted: Some(BackpressureLimits { is_wanted, stall, wait_max: stall }),
        eviction: Some(EvictionPermit { results: catalog.evictable_results().clone(), owner: "ada".into() }),
        ..SpoolOptions::default()
    };
    (ResultSpool::with_options(schema(), options), arriving)
}

#[tokio::test]
async fn the_stream_that_is_left_unread_ends_when_others_need_its_memory() {
    let catalog = catalog();
    let budget = catalog.arena().budget();
    let (unread, arriving) = stream(&catalog, Duration::ZERO);
    let (read, _) = stream(&catalog, Duration::from_secs(600));
    for spool in [&unread, &read] {
        spool.push(batch(0..10_000)).unwrap();
    }
    arriving.0.store(1000, Ordering::Relaxed);
    assert!(budget.reserve(budget.unused_bytes() + 1, "others").is_err(), "no tick has listed it yet");
    [&unread, &read].into_iter().for_each(ResultSpool::list_if_unread);
    assert!(budget.free_bytes() > budget.unused_bytes(), "its memory counts as free");
    let free = budget.unused_bytes();
    drop(budget.reserve(free + 1, "others").unwrap());
    let words = ["its client read nothing for", "1000 B of rows to be joined", "read the joined rows while sending"];
    assert_refused(unread.batch(0).await, is!(Exhausted), &words);
    assert_refused(unread.push(batch(0..1)), is!(Exhausted), &words[..1]);
    assert_eq!((unread.held_bytes(), arriving.bytes()), (0, 0));
    assert_eq!(read.batch(0).await.unwrap().unwrap().num_rows(), 10_000);
    read.push(batch(0..1)).unwrap();
}

#[tokio::test]
async fn a_stream_that_is_read_again_stays() {
    let catalog = catalog();
    let budget = catalog.arena().budget();
    let (spool, _) = stream(&catalog, Duration::ZERO);
    spool.push(batch(0..10_000)).unwrap();
    spool.list_if_unread();
    assert!(budget.free_bytes() > budget.unused_bytes());
    let first = spool.batch(0).await.unwrap();
    assert_eq!(budget.free_bytes(), budget.unused_bytes());
    spool.list_if_unread();
    drop(first);
    spool.push(batch(0..1)).unwrap();
}

#[tokio::test]
async fn a_stream_may_exceed_the_limit_of_its_tenant_until_it_is_left_unread() {
    let catalog = limited(Some(1000), None);
    let (spool, _) = stream(&catalog, Duration::ZERO);
    spool.push(batch(0..1000)).unwrap();
    let held = catalog.usage("ada").bytes;
    assert!(held > 1000, "{held} bytes");
    assert_eq!((catalog.room_of("ada"), catalog.room_with_evictable("ada")), (Some(0), Some(0)));
    catalog.relieve("ada");
    assert_eq!(catalog.usage("ada").bytes, held);
    spool.list_if_unread();
    assert_eq!(catalog.room_with_evictable("ada"), Some(1000));
    catalog.relieve("ada");
    assert_eq!(catalog.usage("ada").bytes, 0);
    assert_refused(spool.batch(0).await, is!(Exhausted), &["its client read nothing for", "--tenant-memory"]);
}
