use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime};

use super::*;
use crate::catalog::{BackpressureLimits, EvictionPermit, ResultSpool, SpoolOptions, SpoolState, Upload};

/// Returns the bytes that a batch of `rows` rows counts for.
fn bytes_of(rows: i64) -> u64 {
    let spool = ResultSpool::new(schema());
    spool.push(batch(0..rows)).unwrap();
    spool.held_bytes()
}

fn consumed(bytes_max: u64, stall: Duration) -> SpoolOptions {
    SpoolOptions { retain: Duration::ZERO, bytes_max, stall, ..SpoolOptions::default() }
}

async fn read(spool: &ResultSpool, endpoint: usize, endpoints: usize) -> Result<Vec<i64>> {
    let mut reader = spool.reader(endpoint, endpoints);
    let mut found = Vec::new();
    while let Some(batch) = reader.next().await? {
        found.extend(keys(&[batch]));
    }
    Ok(found)
}

#[tokio::test]
async fn endpoints_share_the_batches_and_can_be_read_again() {
    let spool = ResultSpool::new(schema());
    (0..7).for_each(|key| spool.push(batch([key])).unwrap());
    spool.push(batch([])).unwrap();
    spool.finish(Ok(()));
    for _ in 0..2 {
        assert_eq!(read(&spool, 0, 3).await.unwrap(), [0, 3, 6]);
        assert_eq!(read(&spool, 1, 3).await.unwrap(), [1, 4]);
        assert_eq!(read(&spool, 2, 3).await.unwrap(), [2, 5]);
    }
    assert_eq!((spool.pushed_rows(), spool.progress()), (7, (7, SpoolState::Complete)));
    assert_eq!(spool.pushed_bytes(), spool.held_bytes());
}

#[tokio::test]
async fn readers_wait_for_the_writer_and_a_failure_replaces_all_batches() {
    let spool = ResultSpool::new(schema());
    let (delivered, arrived) = tokio::sync::oneshot::channel();
    let reader = tokio::spawn({
        let spool = spool.clone();
        async move {
            delivered.send(spool.batch(0).await).unwrap();
            spool.batch(1).await
        }
    });
    tokio::task::yield_now().await;
    spool.push(batch([1])).unwrap();
    assert_eq!(keys(&[arrived.await.unwrap().unwrap().unwrap()]), [1]);
    spool.finish(Err(Error::Unavailable("the device is lost".into())));
    assert_refused(reader.await.unwrap(), is!(Unavailable), &["the device is lost"]);
    assert_refused(spool.batch(0).await, is!(Unavailable), &["the device is lost"]);
    assert_eq!(spool.held_bytes(), 0, "part of a result is good for nothing");
}

#[tokio::test]
async fn a_released_result_is_gone_for_readers_and_stops_its_writer() {
    let catalog = limited(Some(1 << 20), None);
    let arena = catalog.arena().clone();
    let options =
        SpoolOptions { arena: Some(arena.clone()), charge: Some(catalog.charge("ada")), ..Default::default() };
    let spool = ResultSpool::with_options(schema(), options);
    spool.push(batch(0..1000)).unwrap();
    assert!(arena.budget().used_bytes() > 0 && catalog.usage("ada").bytes == spool.held_bytes());
    let waiting = tokio::spawn({
        let spool = spool.clone();
        async move { spool.batch(1).await }
    });
    tokio::task::yield_now().await;
    spool.release();
    assert_refused(waiting.await.unwrap(), is!(NotFound), &["gone"]);
    assert_refused(spool.batch(0).await, is!(NotFound), &["gone", "run the join again"]);
    assert_refused(spool.push(batch([1])), is!(Cancelled), &["released"]);
    spool.finish(Ok(()));
    assert_eq!(spool.progress().1, SpoolState::Released);
    assert_eq!((arena.budget().used_bytes(), catalog.usage("ada").bytes), (0, 0));
    assert!(spool.is_expired(SystemTime::now()));
}

#[test]
fn shared_columns_are_charged_to_the_tables_owner_while_the_table_exists() {
    let catalog = limited(Some(1 << 20), None);
    let mut upload = Upload::begin_for(&catalog, "grace", "t", schema(), UploadOptions::default()).unwrap();
    upload.append(batch(0..1000)).unwrap();
    let table = upload.commit().unwrap();
    let options = SpoolOptions {
        arena: Some(catalog.arena().clone()),
        charge: Some(catalog.charge("ada")),
        tables: vec![Arc::downgrade(&table)],
        ..SpoolOptions::default()
    };
    let spool = ResultSpool::with_options(schema(), options);
    let columns = vec![table.batches[0].column(0).clone(), batch(0..1000).column(1).clone()];
    spool.push_sharing(RecordBatch::try_new(schema(), columns).unwrap(), &[true, false]).unwrap();
    // A key takes eight bytes, and there are no nulls.
    assert_eq!((spool.pushed_bytes(), spool.held_bytes()), (bytes_of(1000), bytes_of(1000) - 8000));
    assert_eq!(catalog.usage("ada").bytes, spool.held_bytes());

    let of_table = catalog.usage("grace").bytes;
    assert!(of_table > table.bytes);
    drop(table);
    catalog.drop_table("t", &"grace".into()).unwrap();
    let own_bytes = spool.held_bytes();
    let charged = (catalog.usage("grace").bytes, catalog.usage("ada").bytes);
    assert_eq!(charged, (0, own_bytes + of_table), "only the result holds the rows");
    spool.finish(Ok(()));
    spool.release();
    assert_eq!((catalog.usage("grace").bytes, catalog.usage("ada").bytes), (0, 0));
    assert_eq!(catalog.arena().budget().used_bytes(), 0);
}

#[test]
fn a_retained_result_that_grows_too_large_is_refused() {
    let spool =
        ResultSpool::with_options(schema(), SpoolOptions { bytes_max: bytes_of(100) * 2, ..SpoolOptions::default() });
    spool.push(batch(0..100)).unwrap();
    spool.push(batch(0..100)).unwrap();
    let refused = spool.push(batch(0..100));
    assert_refused(refused, is!(Exhausted), &["too large"]);
    let arena = SpoolOptions { arena: Some(arena_of(1024)), ..SpoolOptions::default() };
    let refused = ResultSpool::with_options(schema(), arena).push(batch(0..1000));
    assert_refused(refused, is!(Exhausted), &["--host-memory"]);
}

#[tokio::test]
async fn a_lease_begins_when_the_result_ends_and_is_extended_by_renewal_and_by_reading() {
    let spool = ResultSpool::new(schema());
    spool.push(batch([1])).unwrap();
    assert_eq!((spool.expires(), spool.renew(Duration::from_secs(9)).unwrap()), (None, None));
    assert!(!spool.is_expired(SystemTime::now() + Duration::from_secs(1 << 30)), "a join under way has no lease");
    let finished = SystemTime::now();
    spool.finish(Ok(()));
    let first = spool.expires().unwrap();
    assert!(first >= finished + Duration::from_secs(300) && first < finished + Duration::from_secs(400));
    assert!(!spool.is_expired(first - Duration::from_secs(1)) && spool.is_expired(first));
    assert_eq!(spool.renew(Duration::from_secs(1)).unwrap(), Some(first), "a lease is never cut short");
    let renewed = spool.renew(Duration::from_secs(1000)).unwrap().unwrap();
    assert!(renewed > first && !spool.is_expired(first));
    let short = ResultSpool::with_options(
        schema(),
        SpoolOptions { retain: Duration::from_millis(50), ..SpoolOptions::default() },
    );
    short.push(batch([1])).unwrap();
    short.finish(Ok(()));
    let before = short.expires().unwrap();
    std::thread::sleep(Duration::from_millis(5));
    short.batch(0).await.unwrap();
    assert!(short.expires().unwrap() > before);
    short.release();
    assert_refused(short.renew(Duration::from_secs(1)), is!(NotFound), &["gone"]);
}

#[test]
fn a_failed_result_is_forgotten_when_its_lease_ends() {
    let spool = ResultSpool::new(schema());
    spool.finish(Err(Error::Cancelled("stop".into())));
    assert!(!spool.is_expired(SystemTime::now()));
    assert!(spool.is_expired(SystemTime::now() + Duration::from_secs(301)));
}

#[tokio::test]
async fn a_consumed_batch_is_freed_by_reading_and_cannot_be_read_twice() {
    let arena = arena_of(1 << 20);
    let options = SpoolOptions { arena: Some(arena.clone()), ..consumed(u64::MAX, Duration::from_secs(60)) };
    let spool = ResultSpool::with_options(schema(), options);
    (0..3).for_each(|key| spool.push(batch([key])).unwrap());
    spool.finish(Ok(()));
    assert_eq!(keys(&[spool.batch(1).await.unwrap().unwrap()]), [1]);
    assert_refused(spool.batch(1).await, is!(Precondition), &["read already", "retain_seconds"]);
    assert!(!spool.is_gone() && !spool.is_expired(SystemTime::now()), "there is more to read");
    assert_eq!(read(&spool, 0, 1).await.unwrap(), [0, 2]);
    assert!(spool.is_gone());
    assert_refused(spool.batch(0).await, is!(Precondition), &["read already"]);
    assert_eq!((arena.budget().used_bytes(), spool.held_bytes(), spool.pushed_rows()), (0, 0, 3));
    assert!(!spool.is_expired(SystemTime::now()), "a client may still ask for its next endpoint");
    assert!(read(&spool, 1, 2).await.unwrap().is_empty());
    assert!(spool.is_expired(SystemTime::now() + Duration::from_secs(61)));
    let empty = ResultSpool::with_options(schema(), consumed(u64::MAX, Duration::from_secs(60)));
    empty.finish(Ok(()));
    assert!(!empty.is_gone(), "nobody has seen that it has no rows");
    assert!(read(&empty, 0, 1).await.unwrap().is_empty());
    assert!(empty.is_gone());
}

/// A batch that a reader has taken is freed, and the next batch may get the same address.
/// Regression test: that next batch was taken for the one already counted, and was not charged.
#[tokio::test]
async fn each_batch_with_its_own_dictionary_is_counted_even_at_a_reused_address() {
    use arrow::array::{DictionaryArray, Int8Array, StringViewArray};
    const BATCHES: usize = 20;
    let text = |at: usize| format!("{at:0>4000}");
    let of_dictionary = |at: usize| -> ArrayRef {
        let values = StringArray::from_iter_values([text(at)]);
        Arc::new(DictionaryArray::new(Int8Array::from_iter_values([0, 0, 0]), Arc::new(values)))
    };
    let of_views = |at: usize| -> ArrayRef { Arc::new(StringViewArray::from_iter_values([text(at)])) };
    let batches = |column: &dyn Fn(usize) -> ArrayRef| -> Vec<RecordBatch> {
        (0..BATCHES).map(|at| RecordBatch::try_from_iter([("d", column(at))]).unwrap()).collect()
    };
    for batches in [batches(&of_dictionary), batches(&of_views)] {
        let arena = arena_of(1 << 20);
        let options = SpoolOptions { arena: Some(arena.clone()), ..consumed(u64::MAX, Duration::from_secs(60)) };
        let spool = ResultSpool::with_options(batches[0].schema(), options);
        for (at, batch) in batches.into_iter().enumerate() {
            spool.push(batch).unwrap();
            assert_eq!(spool.pushed_bytes() % (at as u64 + 1), 0, "batch {at} counts as those before it do");
            assert!(spool.pushed_bytes() > 4000 * (at as u64 + 1), "batch {at}");
            drop(spool.batch(at).await.unwrap());
            assert!(arena.budget().used_bytes() < 4 * 4096, "what was read is freed, and not held to be counted");
        }
        spool.finish(Ok(()));
        spool.release();
        assert_eq!(arena.budget().used_bytes(), 0);
    }
}

#[tokio::test]
async fn notes_come_after_the_batches_before_them() {
    let spool = ResultSpool::with_options(schema(), consumed(u64::MAX, Duration::from_secs(30)));
    spool.push(batch([1])).unwrap();
    spool.push_note("one".into()).unwrap();
    spool.push_note("two".into()).unwrap();
    spool.push(batch([2])).unwrap();
    spool.finish(Ok(()));
    let (mut reader, mut found) = (spool.reader(0, 1), Vec::new());
    while let Some((batch, note)) = reader.next_noted().await.unwrap() {
        found.push((keys(&[batch]), note.map(|note| String::from_utf8(note.to_vec()).unwrap())));
    }
    let noted = |note: &str| (Vec::new(), Some(note.to_owned()));
    assert_eq!(found, [(vec![1], None), noted("one"), noted("two"), (vec![2], None)]);
    assert_eq!((spool.held_bytes(), spool.pushed_rows()), (0, 2));
    let kept = ResultSpool::new(schema());
    assert_refused(kept.push_note("one".into()), is!(Internal), &["kept"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_consumed_result_of_any_size_stays_within_a_small_memory_bound() {
    let bound = bytes_of(10) * 3;
    let spool = ResultSpool::with_options(schema(), consumed(bound, Duration::from_secs(60)));
    let writer = std::thread::spawn({
        let spool = spool.clone();
        move || {
            for key in 0..200 {
                spool.push(batch(key * 10..key * 10 + 10)).unwrap();
                assert!(spool.held_bytes() <= bound);
            }
            spool.finish(Ok(()));
        }
    });
    let readers = (0..4).map(|endpoint| {
        let spool = spool.clone();
        tokio::spawn(async move { read(&spool, endpoint, 4).await.unwrap() })
    });
    let mut found = Vec::new();
    for reader in readers.collect::<Vec<_>>() {
        found.extend(reader.await.unwrap());
    }
    writer.join().unwrap();
    found.sort();
    assert_eq!(found, (0..2000).collect::<Vec<_>>());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_reads_consumed_endpoints_in_turn_gets_everything() {
    let spool = ResultSpool::with_options(schema(), consumed(bytes_of(1), Duration::from_secs(60)));
    let writer = std::thread::spawn({
        let spool = spool.clone();
        move || {
            (0..50).for_each(|key| spool.push(batch([key])).unwrap());
            spool.finish(Ok(()));
        }
    });
    let mut found = Vec::new();
    for endpoint in 0..3 {
        found.extend(read(&spool, endpoint, 3).await.unwrap());
    }
    writer.join().unwrap();
    assert_eq!(found, (0..50).collect::<Vec<_>>());
    let again = read(&spool, 1, 3).await.unwrap_err();
    assert!(matches!(&again, Error::Precondition(text) if text.contains("read already")), "{again}");
}

#[test]
fn a_writer_whose_readers_read_nothing_fails_with_the_reason() {
    let spool = ResultSpool::with_options(schema(), consumed(bytes_of(1), Duration::from_millis(50)));
    spool.push(batch([1])).unwrap();
    assert_refused(spool.push(batch([2])), is!(Exhausted), &["reader", "took nothing", "retain_seconds"]);
    assert_eq!(spool.pushed_rows(), 1);
}

#[test]
fn a_writer_without_readers_continues_while_memory_is_free() {
    let arena = arena_of(1 << 20);
    let options = SpoolOptions { arena: Some(arena.clone()), ..consumed(1, Duration::from_millis(50)) };
    let spool = ResultSpool::with_options(schema(), options);
    let outcome = (0..1000).try_for_each(|key| spool.push(batch(key * 1000..key * 1000 + 1000)));
    assert_refused(outcome, is!(Exhausted), &["took nothing", "memory was full", "retain_seconds", "--host-memory"]);
    let (used, limit) = (arena.budget().used_bytes(), arena.budget().limit_bytes());
    assert!(used > limit / 2, "{used} of {limit} bytes were used");
    assert!(used < limit, "others have room");
}

#[test]
fn a_tenant_quota_makes_the_writer_wait_as_full_memory_does() {
    let catalog = limited(Some(bytes_of(100) * 3), None);
    let options = SpoolOptions { charge: Some(catalog.charge("ada")), ..consumed(u64::MAX, Duration::from_millis(50)) };
    let spool = ResultSpool::with_options(schema(), options);
    let outcome = (0..10).try_for_each(|_| spool.push(batch(0..100)));
    assert_refused(outcome, is!(Exhausted), &["took nothing"]);
    assert_eq!(spool.pushed_rows(), 300);
    assert_refused(spool.push(batch(0..1000)), is!(Exhausted), &["took nothing"]);
}

#[test]
fn a_slow_reader_makes_the_writer_wait_for_a_limited_total_time() {
    let options = SpoolOptions { wait_max: Duration::from_millis(300), ..consumed(1, Duration::from_secs(600)) };
    let spool = ResultSpool::with_options(schema(), options);
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| (0..).try_for_each(|key| spool.push(batch([key]))));
        let mut reader = spool.reader(0, 1);
        // The reader takes a batch now and then, so that it is never idle for long.
        while !writer.is_finished() {
            std::thread::sleep(Duration::from_millis(10));
            let _ = futures::FutureExt::now_or_never(reader.next());
        }
        assert_refused(writer.join().unwrap(), is!(Exhausted), &["in all", "retain_seconds"]);
    });
}

#[test]
fn a_writer_fails_sooner_only_while_other_jobs_wait_for_its_device() {
    let is_wanted = Arc::new(AtomicBool::new(false));
    let soon = Duration::from_millis(50);
    let never = Duration::from_secs(600);
    let way = |stall, wait_max| SpoolOptions {
        when_wanted: Some(BackpressureLimits { is_wanted: is_wanted.clone(), stall, wait_max }),
        ..consumed(1, never)
    };
    let idle = ResultSpool::with_options(schema(), way(soon, never));
    let slow = ResultSpool::with_options(schema(), way(never, soon));
    std::thread::scope(|scope| {
        let writers = [&idle, &slow].map(|spool| scope.spawn(|| (0..).try_for_each(|key| spool.push(batch([key])))));
        // No other join wants the device, so both writers wait for much longer than `soon`.
        std::thread::sleep(4 * soon);
        assert!(writers.iter().all(|writer| !writer.is_finished()), "nobody waits for the device");
        is_wanted.store(true, Ordering::Relaxed);
        let [idle, slow] = writers.map(|writer| writer.join().unwrap());
        assert_refused(idle, is!(Exhausted), &["took nothing", "other joins waited for its device"]);
        assert_refused(slow, is!(Exhausted), &["in all", "other joins waited for its device"]);
    });
}

#[test]
fn a_batch_larger_than_the_bound_is_accepted_by_an_empty_spool() {
    let spool = ResultSpool::with_options(schema(), consumed(1, Duration::from_millis(50)));
    spool.push(batch(0..100)).unwrap();
    assert!(spool.held_bytes() > 1);
}

#[test]
fn a_waiting_writer_ends_with_its_interrupt_or_with_the_release() {
    let stop = Arc::new(AtomicBool::new(false));
    let interrupt = {
        let stop = stop.clone();
        move || match stop.load(Ordering::Acquire) {
            true => Err(Error::Cancelled("the job was cancelled".into())),
            false => Ok(()),
        }
    };
    let options = SpoolOptions { interrupt: Interrupt::by(interrupt), ..consumed(1, Duration::from_secs(600)) };
    let spool = ResultSpool::with_options(schema(), options);
    spool.push(batch([1])).unwrap();
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| spool.push(batch([2])));
        stop.store(true, Ordering::Release);
        assert_refused(writer.join().unwrap(), is!(Cancelled), &["the job was cancelled"]);
    });
    let of_one_rank = spool.interrupted_by(Interrupt::default());
    assert_refused(of_one_rank.push(batch([2])), is!(Cancelled), &["the job was cancelled"]);
    stop.store(false, Ordering::Release);
    let of_one_rank = spool.interrupted_by(Interrupt::by(|| Err(Error::Cancelled("the rank was stopped".into()))));
    assert_refused(of_one_rank.push(batch([2])), is!(Cancelled), &["the rank was stopped"]);
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| spool.push(batch([2])));
        spool.release();
        assert_refused(writer.join().unwrap(), is!(Cancelled), &["released"]);
    });
}

#[tokio::test]
async fn a_reader_dropped_while_it_waits_loses_no_batch() {
    let spool = ResultSpool::with_options(schema(), consumed(u64::MAX, Duration::from_secs(60)));
    let mut reader = spool.reader(0, 1);
    for key in 0..20 {
        let waited = tokio::time::timeout(Duration::from_millis(1), reader.next()).await;
        assert!(waited.is_err(), "there is nothing to read yet");
        spool.push(batch([key])).unwrap();
        assert_eq!(keys(&[reader.next().await.unwrap().unwrap()]), [key]);
    }
}

/// Bytes of 1024 keys, a size that an arena does not round up.
const KEPT_BYTES: u64 = 8 * 1024;

/// Makes a result of `KEPT_BYTES` bytes.
fn kept_in(catalog: &Catalog, owner: &str) -> ResultSpool {
    let eviction = EvictionPermit { results: catalog.evictable_results().clone(), owner: owner.into() };
    let options = SpoolOptions {
        arena: Some(catalog.arena().clone()),
        charge: Some(catalog.charge(owner)),
        eviction: Some(eviction),
        ..SpoolOptions::default()
    };
    let keys: ArrayRef = Arc::new(Int64Array::from_iter_values(0..1024));
    let batch = RecordBatch::try_from_iter([("k", keys)]).unwrap();
    let spool = ResultSpool::with_options(batch.schema(), options);
    spool.push(batch).unwrap();
    spool.finish(Ok(()));
    spool
}

#[tokio::test]
async fn only_results_that_were_read_are_evicted_and_the_oldest_first() {
    let catalog = Catalog::new(arena_of(4 * KEPT_BYTES));
    let budget = catalog.arena().budget().clone();
    let [unread, first, second, renewed] = [(); 4].map(|()| kept_in(&catalog, ""));
    assert!(budget.reserve(1, "one more").is_err(), "nothing was read");
    [&first, &renewed, &second].into_iter().for_each(ResultSpool::was_read);
    renewed.renew(Duration::from_secs(1)).unwrap();
    assert_eq!((budget.free_bytes(), budget.unused_bytes()), (2 * KEPT_BYTES, 0));
    let open = first.reader(0, 1);
    assert_eq!(budget.free_bytes(), KEPT_BYTES, "somebody reads it again");
    let table = budget.reserve(KEPT_BYTES, "a table").unwrap();
    assert_refused(second.batch(0).await, is!(NotFound), &["its memory was needed", "retain_seconds"]);
    assert_eq!(read(&first, 0, 1).await.unwrap().len(), 1024);
    assert!(budget.reserve(1, "one more").is_err());
    drop(open);
    assert!(first.is_evictable());
    assert!(budget.reserve(2 * KEPT_BYTES, "two tables").is_err());
    assert!(first.is_evictable(), "it would have been too little");
    drop(budget.reserve(KEPT_BYTES, "another table").unwrap());
    assert!(!first.is_evictable());
    drop(table);
    assert_eq!(budget.free_bytes(), 2 * KEPT_BYTES);
    for kept in [&unread, &renewed] {
        assert_eq!(read(kept, 0, 1).await.unwrap().len(), 1024);
    }
    drop(catalog);
    assert_eq!(budget.free_bytes(), 2 * KEPT_BYTES);
}

#[tokio::test]
async fn evicting_read_results_frees_the_memory_that_they_share_with_dropped_tables() {
    let keys: ArrayRef = Arc::new(Int64Array::from_iter_values(0..1024));
    let rows = RecordBatch::try_from_iter([("k", keys)]).unwrap();
    let put_in = |catalog: &Catalog, mode| {
        let options = UploadOptions { mode, ..UploadOptions::default() };
        let mut upload = Upload::begin(catalog, "t", rows.schema(), options).unwrap();
        upload.append(rows.clone()).unwrap();
        upload.commit().unwrap()
    };
    let alone = Catalog::new(arena_of(1 << 20));
    put_in(&alone, UploadMode::Create);
    let table_bytes = alone.arena().budget().used_bytes();
    let catalog = Catalog::new(arena_of(3 * table_bytes));
    let budget = catalog.arena().budget().clone();
    let put = |mode| put_in(&catalog, mode);
    let table = put(UploadMode::Create);
    // Two results that share all their memory with tables: they have no bytes of their own.
    let sharing = || {
        let options = SpoolOptions {
            arena: Some(catalog.arena().clone()),
            charge: Some(catalog.charge("")),
            tables: [&table, &table].map(Arc::downgrade).to_vec(),
            eviction: Some(EvictionPermit { results: catalog.evictable_results().clone(), owner: String::new() }),
            ..SpoolOptions::default()
        };
        let spool = ResultSpool::with_options(rows.schema(), options);
        spool.push_sharing(table.batches[0].clone(), &[true]).unwrap();
        spool.finish(Ok(()));
        spool.was_read();
        spool
    };
    let [first, second] = [sharing(), sharing()];
    assert_eq!((first.held_bytes(), first.returning_bytes()), (0, 0));
    assert!(budget.reserve(2 * table_bytes + 1, "more").is_err());
    assert!(first.is_evictable() && second.is_evictable(), "they free nothing: the table is there");
    drop(table);
    put(UploadMode::Replace);
    assert_eq!(first.returning_bytes(), table_bytes);
    assert_eq!((budget.free_bytes(), budget.unused_bytes()), (2 * table_bytes, table_bytes));
    // The reservation takes the memory of both results.
    let reserved = budget.reserve(2 * table_bytes, "two tables").unwrap();
    assert!(!first.is_evictable() && !second.is_evictable());
    assert_refused(second.batch(0).await, is!(NotFound), &["its memory was needed"]);
    drop(reserved);
}

#[test]
fn a_tenants_read_results_are_evicted_before_it_is_refused_memory() {
    let catalog = limited(Some(2 * KEPT_BYTES), None);
    let [mine, theirs] = ["me", "them"].map(|owner| kept_in(&catalog, owner));
    [&mine, &theirs].into_iter().for_each(ResultSpool::was_read);
    let mut charge = catalog.charge("me");
    charge.try_grow(KEPT_BYTES).unwrap();
    assert!(mine.is_evictable(), "there is room beside it");
    assert_refused(charge.try_grow(2 * KEPT_BYTES + 1), is!(Exhausted), &["--tenant-memory"]);
    assert!(mine.is_evictable(), "so much there will never be");
    charge.try_grow(KEPT_BYTES).unwrap();
    assert!(!mine.is_evictable() && theirs.is_evictable());
    assert_refused(charge.try_grow(1), is!(Exhausted), &["--tenant-memory"]);
}

#[test]
fn a_tenants_results_have_a_limit_of_their_own() {
    let limits = TenantLimits { results_bytes: Some(2 * KEPT_BYTES), ..TenantLimits::default() };
    let catalog = Catalog::with_limits(arena_of(64 << 20), limits);
    let result = |retain| {
        let keys: ArrayRef = Arc::new(Int64Array::from_iter_values(0..1024));
        let batch = RecordBatch::try_from_iter([("k", keys)]).unwrap();
        let options = SpoolOptions {
            retain,
            stall: Duration::ZERO,
            arena: Some(catalog.arena().clone()),
            charge: Some(catalog.count_as_result(catalog.charge("me"))),
            ..SpoolOptions::default()
        };
        (ResultSpool::with_options(batch.schema(), options), batch)
    };
    let kept = [(); 2].map(|()| {
        let (spool, batch) = result(Duration::from_secs(60));
        spool.push(batch).unwrap();
        spool
    });
    assert_eq!((catalog.usage("me").bytes, catalog.room_of("me")), (2 * KEPT_BYTES, Some(0)));
    for retain in [Duration::from_secs(60), Duration::ZERO] {
        let (spool, batch) = result(retain);
        assert_refused(spool.push(batch), is!(Exhausted), &["\"me\"", "of results", "--tenant-results"]);
    }
    assert_eq!(catalog.usage("me").bytes, 2 * KEPT_BYTES, "a refusal charges nothing");
    // Tables are not results.
    catalog.charge("me").try_grow(1 << 20).unwrap();
    assert!(catalog.count_as_result(catalog.charge("them")).try_grow(KEPT_BYTES).is_ok());
    kept[0].release();
    let (spool, batch) = result(Duration::from_secs(60));
    spool.push(batch).unwrap();
    drop((kept, spool));
    assert_eq!((catalog.usage("me").bytes, catalog.room_of("me")), (0, Some(2 * KEPT_BYTES)));
}
