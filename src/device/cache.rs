//! Cache of columns that stay on a device after a join, in memory that no job needs. The next join
//! on their table does not copy them again.
//!
//! A range of consecutive rows of a column is cached as it was copied. The key is the table itself
//! and not its name, so a table that replaces another has its own entries.
//!
//! Joins ask for different ranges of one column. A build side asks for all rows, and a probe side
//! for chunks. Once the columns of a probe side are cached, the planner may prefer one chunk to
//! many. So a range is also read out of a larger cached range. Or the device puts the range
//! together from several cached ranges, and caches the result.
//!
//! Cached columns are charged to the device's memory, and are evicted when a job needs memory.
//! Columns of dropped tables are evicted first, then the least recently used.

use std::any::Any;
use std::collections::{HashMap, hash_map};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use arrow::buffer::Buffer;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use super::{Device, DeviceBuffer, DeviceMemory, Event, Stream};
use crate::memory::{Budget, Reclaim};
use crate::{Error, Result};

/// Consecutive rows of a column of a table. A device uses them to recognize data that it copied
/// before.
#[derive(Clone, Debug)]
pub struct ColumnRows {
    /// Its address is not reused while this handle lives.
    pub table: Weak<dyn Any + Send + Sync>,
    pub column: usize,
    pub rows: Range<u64>,
}

impl ColumnRows {
    /// Returns the rows that are in `self` and in `other`. `None` if there are none.
    pub fn overlap(&self, other: &Self) -> Option<Self> {
        let is_of_column = std::ptr::addr_eq(self.table.as_ptr(), other.table.as_ptr()) && self.column == other.column;
        let rows = self.rows.start.max(other.rows.start)..self.rows.end.min(other.rows.end);
        (is_of_column && !rows.is_empty()).then(|| Self { rows, ..self.clone() })
    }
}

/// Counters and sizes of a cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CacheStats {
    pub limit_bytes: u64,
    pub bytes: u64,
    /// Requests for a column, or a range of it, that were served from the cache.
    pub hits: u64,
    pub hit_bytes: u64,
    pub misses: u64,
    pub evictions: u64,
}

impl CacheStats {
    /// Adds the counters of an earlier cache whose contents are gone.
    #[must_use]
    pub fn after(self, before: &Self) -> Self {
        Self {
            hits: before.hits + self.hits,
            hit_bytes: before.hit_bytes + self.hit_bytes,
            misses: before.misses + self.misses,
            evictions: before.evictions + self.evictions,
            ..self
        }
    }
}

/// Operations on columns that stay on a [device that caches them](Device::cache).
pub trait CacheOps {
    /// Makes later copied columns stay on the device, in up to `limit_bytes` of memory that no job
    /// needs. No effect on a device that already caches columns.
    fn enable_cache(&self, limit_bytes: u64) -> Result<()>;

    /// Brings the values of the given rows in, like [`Device::copy_in`], unless the device has
    /// cached them. The result is read-only.
    fn copy_in_column(&self, rows: &ColumnRows, parts: &[Buffer], stream: &Stream) -> Result<DeviceBuffer>;

    /// Rows of a table that the device has cached.
    fn cached_rows(&self, table: &Weak<dyn Any + Send + Sync>) -> Vec<ColumnRows>;

    /// Statistics of the cached columns. `None` until caching is enabled.
    fn cache_stats(&self) -> Option<CacheStats>;
}

/// Cached columns of one device.
pub(super) struct ColumnCache {
    memory: Budget,
    limit_bytes: u64,
    /// Waits until all work queued on the device is done.
    settle: Box<dyn Fn() + Send + Sync>,
    inner: Mutex<Inner>,
    /// Totals of `inner` without its lock, because every chunk of every join reads them.
    totals: Arc<Totals>,
}

/// Bytes of columns.
#[derive(Debug, Default)]
struct Totals {
    kept: AtomicU64,
    /// Bytes that are cached and in use.
    lent: AtomicU64,
}

#[derive(Default)]
struct Inner {
    entries: HashMap<Key, Entry>,
    /// Number of uses so far, which orders them.
    clock: u64,
    /// Bytes that are being copied in, with room reserved for them.
    coming_bytes: u64,
    stats: CacheStats,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Key {
    table: usize,
    column: usize,
    start: u64,
    end: u64,
}

impl Key {
    fn of(rows: &ColumnRows) -> Self {
        let table = rows.table.as_ptr().cast::<()>() as usize;
        Self { table, column: rows.column, start: rows.rows.start, end: rows.rows.end }
    }
}

struct Entry {
    table: Weak<dyn Any + Send + Sync>,
    buffer: DeviceBuffer,
    /// Marks the end of the copy.
    ready: Event,
    last_used: u64,
    /// The handle that all current users share.
    lent: Weak<Lent>,
}

impl Entry {
    fn bytes(&self) -> u64 {
        self.buffer.charged_bytes()
    }

    fn is_in_use(&self) -> bool {
        Arc::strong_count(&self.buffer) > 1
    }

    /// Returns the buffer for one more user, and counts its bytes as lent.
    fn lend(&mut self, totals: &Arc<Totals>) -> DeviceBuffer {
        if let Some(lent) = self.lent.upgrade() {
            return lent;
        }
        totals.lent.fetch_add(self.bytes(), Ordering::Relaxed);
        let lent = Arc::new(Lent { buffer: Some(self.buffer.clone()), totals: totals.clone() });
        self.lent = Arc::downgrade(&lent);
        lent
    }
}

/// Some bytes of a cached buffer.
#[derive(Debug)]
pub(super) struct CachedPart {
    pub(super) buffer: DeviceBuffer,
    pub(super) bytes: Range<usize>,
    ready: Event,
}

/// Source of rows that a device copies.
pub(super) enum CopyFrom<'a> {
    /// Host memory. The copy is charged to the given budget, or to the job if no budget is given.
    Host(Option<&'a Budget>),
    /// Cached parts, one after the other, charged in the same way. A single part need not be
    /// copied.
    Cached(&'a [CachedPart], Option<&'a Budget>),
}

/// A cached buffer in the hands of its users. It behaves like the buffer. When dropped, it
/// counts the buffer's bytes as no longer lent.
#[derive(Debug)]
struct Lent {
    /// `Some` until dropped.
    buffer: Option<DeviceBuffer>,
    totals: Arc<Totals>,
}

impl Lent {
    fn buffer(&self) -> &DeviceBuffer {
        self.buffer.as_ref().expect("present until dropped")
    }
}

impl DeviceMemory for Lent {
    fn size_bytes(&self) -> usize {
        self.buffer().size_bytes()
    }

    fn charged_bytes(&self) -> u64 {
        self.buffer().charged_bytes()
    }

    fn as_any(&self) -> &dyn Any {
        self.buffer().as_any()
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        let bytes = self.charged_bytes();
        // Release the buffer first, so that bytes counted as out of use really are out of use.
        self.buffer = None;
        self.totals.lent.fetch_sub(bytes, Ordering::Relaxed);
    }
}

/// Reserved room for a column that is being copied. Returned on drop.
struct Room {
    cache: Arc<ColumnCache>,
    bytes: u64,
}

impl Drop for Room {
    fn drop(&mut self) {
        self.cache.inner.lock().coming_bytes -= self.bytes;
    }
}

impl std::fmt::Debug for ColumnCache {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ColumnCache").field("stats", &self.stats()).finish_non_exhaustive()
    }
}

impl ColumnCache {
    /// Creates a cache of at most `limit_bytes` of a device's memory. The memory's budget may
    /// reclaim them.
    pub(super) fn new(memory: &Budget, limit_bytes: u64, settle: Box<dyn Fn() + Send + Sync>) -> Arc<Self> {
        let (inner, totals) = (Mutex::default(), Arc::default());
        let cache = Arc::new(Self { memory: memory.clone(), limit_bytes, settle, inner, totals });
        let reclaim: Weak<dyn Reclaim> = Arc::downgrade(&(cache.clone() as Arc<dyn Reclaim>));
        memory.reclaim_from(reclaim);
        cache
    }

    /// Returns the given rows on the device, `bytes` in all, from the cache if possible. Otherwise
    /// copies them there, and caches the copy if there is room. `stays` receives each newly cached
    /// buffer.
    ///
    /// # Errors
    /// The device's error.
    pub(super) fn copy_in(
        self: &Arc<Self>,
        rows: &ColumnRows,
        bytes: u64,
        device: &dyn Device,
        stream: &Stream,
        copy: impl Fn(CopyFrom<'_>) -> Result<DeviceBuffer>,
        stays: impl FnOnce(&DeviceBuffer),
    ) -> Result<DeviceBuffer> {
        if let Some((buffer, ready)) = self.find(rows) {
            device.wait_event(&ready, stream)?;
            stream.savings.add_kept(bytes);
            return Ok(buffer);
        }
        let parts = self.find_parts(rows, bytes);
        if let Some(parts) = &parts {
            parts.iter().try_for_each(|part| device.wait_event(&part.ready, stream))?;
            stream.savings.add_kept(bytes);
        }
        let copy = |charged: Option<&Budget>| match &parts {
            Some(parts) => copy(CopyFrom::Cached(parts, charged)),
            None => copy(CopyFrom::Host(charged)),
        };
        let is_in_one_part = parts.as_ref().is_some_and(|parts| parts.len() == 1);
        let stays_there = bytes > 0 && !is_in_one_part;
        let Some(room) = stays_there.then(|| self.room(bytes)).flatten() else { return copy(None) };
        // Charged to the device and not to the job, because the column stays.
        let buffer = match copy(Some(&self.memory)) {
            Ok(buffer) => buffer,
            // Another reservation took the memory first.
            Err(Error::Exhausted(_)) => return copy(None),
            Err(error) => return Err(error),
        };
        let (kept, first_ready) = self.keep(room, rows, &buffer, device.record_event(stream)?);
        match first_ready {
            None => stays(&buffer),
            // Another stream has copied the same rows meanwhile.
            Some(ready) => device.wait_event(&ready, stream)?,
        }
        Ok(kept)
    }

    /// Returns the rows if they are cached, with the event after which they may be read.
    fn find(&self, rows: &ColumnRows) -> Option<(DeviceBuffer, Event)> {
        let mut inner = self.inner.lock();
        inner.clock += 1;
        let Inner { entries, clock, stats, .. } = &mut *inner;
        let Some(entry) = entries.get_mut(&Key::of(rows)) else {
            stats.misses += 1;
            return None;
        };
        entry.last_used = *clock;
        stats.hits += 1;
        stats.hit_bytes += entry.bytes();
        Some((entry.lend(&self.totals), entry.ready.clone()))
    }

    /// Returns the rows as parts of other cached ranges, if these cover all of them.
    fn find_parts(&self, rows: &ColumnRows, bytes: u64) -> Option<Vec<CachedPart>> {
        let wanted = Key::of(rows);
        let row_bytes = bytes.checked_div(wanted.end - wanted.start)?;
        let mut inner = self.inner.lock();
        let Inner { entries, clock, stats, .. } = &mut *inner;
        let overlaps = |key: &&Key| {
            (key.table, key.column) == (wanted.table, wanted.column) && key.start < wanted.end && wanted.start < key.end
        };
        let mut keys: Vec<Key> = entries.keys().filter(overlaps).copied().collect();
        keys.sort_unstable_by_key(|key| (key.start, key.end));
        let mut parts: Vec<(Key, Range<u64>)> = Vec::new();
        let mut end = wanted.start;
        while end < wanted.end {
            let key = *keys.iter().filter(|key| key.start <= end).max_by_key(|key| key.end)?;
            if key.end <= end {
                return None;
            }
            parts.push((key, end..key.end.min(wanted.end)));
            end = key.end;
        }
        stats.misses -= 1;
        stats.hits += 1;
        stats.hit_bytes += bytes;
        let is_one = parts.len() == 1;
        let mut lent = |(key, rows): (Key, Range<u64>)| {
            let entry = entries.get_mut(&key)?;
            if is_one {
                // Several parts are copied into one range, which is cached. The parts may then be
                // evicted.
                entry.last_used = *clock;
            }
            let byte = |row: u64| ((row - key.start) * row_bytes) as usize;
            let (bytes, ready) = (byte(rows.start)..byte(rows.end), entry.ready.clone());
            Some(CachedPart { buffer: entry.lend(&self.totals), bytes, ready })
        };
        parts.into_iter().map(&mut lent).collect()
    }

    /// Reserves room for `bytes` more, after evictions if needed. `None` when there is no room.
    /// Takes only memory that no job has reserved.
    fn room(self: &Arc<Self>, bytes: u64) -> Option<Room> {
        /// Upper bound of the granule in which devices charge memory.
        const GRANULE_BYTES: u64 = 256;
        let bytes = bytes.checked_next_multiple_of(GRANULE_BYTES)?;
        if bytes > self.limit_bytes {
            return None;
        }
        let surplus = {
            let inner = self.inner.lock();
            (inner.stats.bytes + inner.coming_bytes + bytes).saturating_sub(self.limit_bytes)
        };
        if surplus > 0 {
            // Evict several at once, because each eviction waits for all work on the device.
            self.evict(surplus.max(self.limit_bytes / 16));
        }
        let mut inner = self.inner.lock();
        let fits = inner.stats.bytes + inner.coming_bytes + bytes <= self.limit_bytes;
        if !fits || self.memory.unused_bytes() < bytes {
            return None;
        }
        inner.coming_bytes += bytes;
        Some(Room { cache: self.clone(), bytes })
    }

    /// Caches the copied rows, readable after `ready`, and returns the cached buffer. If the same
    /// rows are already cached, returns those and the event after which they may be read.
    fn keep(
        &self,
        _room: Room,
        rows: &ColumnRows,
        buffer: &DeviceBuffer,
        ready: Event,
    ) -> (DeviceBuffer, Option<Event>) {
        let mut inner = self.inner.lock();
        inner.clock += 1;
        let last_used = inner.clock;
        match inner.entries.entry(Key::of(rows)) {
            hash_map::Entry::Occupied(mut kept) => {
                let kept = kept.get_mut();
                (kept.lend(&self.totals), Some(kept.ready.clone()))
            }
            hash_map::Entry::Vacant(place) => {
                let (table, buffer) = (rows.table.clone(), buffer.clone());
                let lent = Weak::new();
                let entry = place.insert(Entry { table, buffer, ready, last_used, lent });
                let (kept, bytes) = (entry.lend(&self.totals), entry.bytes());
                inner.stats.bytes += bytes;
                self.totals.kept.store(inner.stats.bytes, Ordering::Relaxed);
                (kept, None)
            }
        }
    }

    /// Cached rows of a table.
    pub(super) fn cached_rows(&self, table: &Weak<dyn Any + Send + Sync>) -> Vec<ColumnRows> {
        let address = table.as_ptr().cast::<()>() as usize;
        let inner = self.inner.lock();
        let of_table = inner.entries.keys().filter(|key| key.table == address);
        of_table.map(|key| ColumnRows { table: table.clone(), column: key.column, rows: key.start..key.end }).collect()
    }

    /// Counters and sizes of the cache.
    pub(super) fn stats(&self) -> CacheStats {
        CacheStats { limit_bytes: self.limit_bytes, ..self.inner.lock().stats }
    }

    /// Evicts columns that no job uses, until `bytes` are free or no such column is left. All
    /// columns of dropped tables are evicted. Returns the bytes that became free.
    fn evict(&self, bytes: u64) -> u64 {
        let mut inner = self.inner.lock();
        let unused = inner.entries.iter().filter(|(_, entry)| !entry.is_in_use());
        let mut victims: Vec<_> =
            unused.map(|(&key, entry)| (entry.table.strong_count() > 0, entry.last_used, key)).collect();
        victims.sort_unstable_by_key(|&(has_table, last_used, _)| (has_table, last_used));
        let mut gone = Vec::new();
        let mut free = 0;
        for (has_table, _, key) in victims {
            if free >= bytes && has_table {
                break;
            }
            let Some(entry) = inner.entries.remove(&key) else { continue };
            free += entry.bytes();
            gone.push(entry);
        }
        inner.stats.bytes -= free;
        self.totals.kept.store(inner.stats.bytes, Ordering::Relaxed);
        inner.stats.evictions += gone.len() as u64;
        drop(inner);
        if !gone.is_empty() {
            // Work that reads the columns may be under way on any stream. No new work on them can
            // be queued.
            (self.settle)();
        }
        free
    }
}

impl Reclaim for ColumnCache {
    fn reclaimable_bytes(&self) -> u64 {
        let Totals { kept, lent } = &*self.totals;
        kept.load(Ordering::Relaxed).saturating_sub(lent.load(Ordering::Relaxed))
    }

    fn reclaim(&self, bytes: u64) -> u64 {
        self.evict(bytes)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use crate::device::{DeviceHandle, DeviceMemory};
    use crate::memory::Reservation;

    #[derive(Debug)]
    struct Piece(usize, #[allow(dead_code)] Reservation);

    impl DeviceMemory for Piece {
        fn size_bytes(&self) -> usize {
            self.0
        }

        fn as_any(&self) -> &dyn Any {
            self
        }
    }

    #[derive(Debug)]
    struct Done;

    impl DeviceHandle for Done {
        fn as_any(&self) -> &dyn Any {
            self
        }
    }

    /// Granule in which devices charge memory.
    const PIECE: u64 = 256;

    /// A cache on a budget. All sizes in these tests are in pieces.
    struct Bench {
        memory: Budget,
        cache: Arc<ColumnCache>,
        settled: Arc<AtomicUsize>,
    }

    fn bench(memory: u64, limit: u64) -> Bench {
        let memory = Budget::new("device memory", "--device-memory", memory * PIECE);
        let settled = Arc::new(AtomicUsize::new(0));
        let counter = settled.clone();
        let settle = Box::new(move || {
            std::thread::sleep(std::time::Duration::from_micros(200));
            counter.fetch_add(1, Ordering::Relaxed);
        });
        Bench { cache: ColumnCache::new(&memory, limit * PIECE, settle), memory, settled }
    }

    fn rows(table: &Arc<String>, column: usize, rows: Range<u64>) -> ColumnRows {
        let table: Arc<dyn Any + Send + Sync> = table.clone();
        ColumnRows { table: Arc::downgrade(&table), column, rows }
    }

    impl Bench {
        /// Copies as a device does: missing rows are copied, and cached if there is room.
        fn copy_in(&self, rows: &ColumnRows, pieces: u64) -> DeviceBuffer {
            let bytes = pieces * PIECE;
            if let Some((buffer, _)) = self.cache.find(rows) {
                return buffer;
            }
            let room = self.cache.room(bytes);
            let buffer: DeviceBuffer = Arc::new(Piece(bytes as usize, self.memory.reserve(bytes, "a column").unwrap()));
            let Some(room) = room else { return buffer };
            let (kept, first_ready) = self.cache.keep(room, rows, &buffer, Event { handle: Arc::new(Done) });
            assert!(first_ready.is_none());
            kept
        }
    }

    #[test]
    fn the_same_rows_of_the_same_table_are_copied_once() {
        let bench = bench(1000, 500);
        let (one, other) = (Arc::new("t".to_string()), Arc::new("t".to_string()));
        let first = bench.copy_in(&rows(&one, 0, 0..10), 100);
        assert!(Arc::ptr_eq(&first, &bench.copy_in(&rows(&one, 0, 0..10), 100)));
        for different in [rows(&one, 1, 0..10), rows(&one, 0, 0..9), rows(&other, 0, 0..10)] {
            assert!(!Arc::ptr_eq(&first, &bench.copy_in(&different, 100)));
        }
        let stats = bench.cache.stats();
        assert_eq!((stats.hits, stats.hit_bytes, stats.misses, stats.bytes), (1, 100 * PIECE, 4, 400 * PIECE));
    }

    #[test]
    fn other_row_ranges_are_assembled_from_cached_parts() {
        let bench = bench(1000, 500);
        let table = Arc::new("t".to_string());
        // Ten bytes a row.
        for range in [0..10, 10..30, 5..25, 40..50] {
            bench.copy_in(&rows(&table, 0, range), 50);
        }
        let parts = |range: Range<u64>| {
            let bytes = 10 * (range.end - range.start);
            let parts = bench.cache.find_parts(&rows(&table, 0, range), bytes)?;
            Some(parts.into_iter().map(|part| (part.bytes.start, part.bytes.end)).collect::<Vec<_>>())
        };
        let misses = bench.cache.stats().misses;
        assert_eq!(parts(0..30), Some(vec![(0, 100), (0, 200)]), "5..25 is not needed");
        assert_eq!(parts(3..9), Some(vec![(30, 90)]));
        assert_eq!(parts(12..30), Some(vec![(20, 200)]));
        for missing in [20..45, 30..40, 35..50, 45..55] {
            assert_eq!(parts(missing), None);
        }
        assert!(bench.cache.find_parts(&rows(&table, 1, 0..10), 100).is_none(), "another column");
        assert_eq!(bench.cache.stats().misses, misses - 3);
    }

    #[test]
    fn assembled_parts_are_evicted_before_the_whole() {
        let bench = bench(1000, 500);
        let table = Arc::new("t".to_string());
        for range in [0..10, 10..20] {
            bench.copy_in(&rows(&table, 0, range), 100);
        }
        bench.copy_in(&rows(&table, 1, 0..10), 100);
        let whole = rows(&table, 0, 0..20);
        assert_eq!(bench.cache.find_parts(&whole, 200 * PIECE).unwrap().len(), 2);
        bench.copy_in(&whole, 200);
        bench.copy_in(&rows(&table, 2, 0..10), 200);
        for (column, part, stays) in [(0, 0..10, false), (0, 10..20, false), (0, 0..20, true), (1, 0..10, true)] {
            assert_eq!(bench.cache.find(&rows(&table, column, part.clone())).is_some(), stays, "{column} {part:?}");
        }
    }

    #[test]
    fn a_column_counts_as_used_when_a_part_of_it_is_read() {
        let bench = bench(1000, 200);
        let table = Arc::new("t".to_string());
        for column in 0..2 {
            bench.copy_in(&rows(&table, column, 0..10), 100);
        }
        let part = rows(&table, 0, 3..9);
        assert!(bench.cache.find(&part).is_none());
        assert_eq!(bench.cache.find_parts(&part, 60 * PIECE).unwrap().len(), 1);
        bench.copy_in(&rows(&table, 2, 0..10), 100);
        for (column, stays) in [(0, true), (1, false), (2, true)] {
            assert_eq!(bench.cache.find(&rows(&table, column, 0..10)).is_some(), stays, "column {column}");
        }
    }

    #[test]
    fn the_least_recently_used_columns_are_evicted_except_those_in_use() {
        let bench = bench(1000, 300);
        let table = Arc::new("t".to_string());
        let column = |at: usize| rows(&table, at, 0..10);
        let used = bench.copy_in(&column(0), 100);
        bench.copy_in(&column(1), 100);
        bench.copy_in(&column(2), 100);
        bench.copy_in(&column(1), 100);
        bench.copy_in(&column(3), 100);
        assert!(bench.cache.find(&column(2)).is_none(), "the oldest unused column is evicted");
        for stays in [0, 1, 3] {
            assert!(bench.cache.find(&column(stays)).is_some(), "{stays}");
        }
        assert_eq!(bench.settled.load(Ordering::Relaxed), 1);
        drop(used);
        assert_eq!(bench.cache.stats().evictions, 1);
    }

    #[test]
    fn jobs_get_the_memory_of_cached_columns() {
        let bench = bench(1000, 900);
        let table = Arc::new("t".to_string());
        let held = bench.copy_in(&rows(&table, 0, 0..10), 300);
        bench.copy_in(&rows(&table, 1, 0..10), 300);
        assert_eq!((bench.memory.used_bytes(), bench.memory.free_bytes()), (600 * PIECE, 700 * PIECE));
        let job = bench.memory.reserve(700 * PIECE, "a job").unwrap();
        assert_eq!(bench.cache.stats().bytes, 300 * PIECE);
        assert!(bench.memory.reserve(1, "another job").is_err(), "what is in use cannot be evicted");
        drop((job, held));
        assert_eq!(bench.memory.free_bytes(), 1000 * PIECE);
        assert!(bench.memory.reserve(1000 * PIECE, "a large job").is_ok());
        assert_eq!(bench.cache.stats().bytes, 0);
    }

    #[test]
    fn concurrent_jobs_all_get_the_memory_of_cached_columns() {
        for _ in 0..20 {
            let bench = bench(1000, 1000);
            let table = Arc::new("t".to_string());
            for column in 0..8 {
                bench.copy_in(&rows(&table, column, 0..10), 125);
            }
            assert_eq!(bench.memory.unused_bytes(), 0);
            std::thread::scope(|scope| {
                let job = || bench.memory.reserve(125 * PIECE, "a job");
                let jobs: Vec<_> = (0..8).map(|_| scope.spawn(job)).collect();
                let held: Vec<_> = jobs.into_iter().map(|job| job.join().unwrap().unwrap()).collect();
                assert_eq!(held.len(), 8);
            });
        }
    }

    #[test]
    fn columns_of_a_dropped_table_are_evicted_first() {
        let bench = bench(1000, 300);
        let (stays, goes) = (Arc::new("t".to_string()), Arc::new("t".to_string()));
        bench.copy_in(&rows(&stays, 0, 0..10), 100);
        bench.copy_in(&rows(&goes, 0, 0..10), 100);
        let gone = rows(&goes, 0, 0..10);
        drop(goes);
        bench.copy_in(&rows(&stays, 1, 0..10), 100);
        bench.copy_in(&rows(&stays, 2, 0..10), 100);
        assert!(bench.cache.find(&gone).is_none());
        assert!(bench.cache.find(&rows(&stays, 0, 0..10)).is_some());
    }

    #[test]
    fn reclaimable_bytes_exclude_columns_with_any_user() {
        let bench = bench(1000, 900);
        let table = Arc::new("t".to_string());
        let column = |at: usize| rows(&table, at, 0..10);
        let reclaimable = || bench.cache.reclaimable_bytes() / PIECE;
        let first = bench.copy_in(&column(0), 100);
        assert_eq!(reclaimable(), 0);
        let again = bench.copy_in(&column(0), 100);
        let other = bench.copy_in(&column(1), 300);
        drop(first);
        assert_eq!(reclaimable(), 0, "another job uses the column");
        drop(again);
        assert_eq!(reclaimable(), 100);
        drop(other);
        assert_eq!(reclaimable(), 400);
        bench.cache.evict(100 * PIECE);
        assert_eq!(reclaimable(), 300, "the other one was used later");
        let other = bench.copy_in(&column(1), 300);
        assert_eq!((reclaimable(), other.size_bytes() as u64), (0, 300 * PIECE));
    }

    #[test]
    fn columns_larger_than_the_cache_are_not_cached() {
        let bench = bench(1000, 300);
        let table = Arc::new("t".to_string());
        bench.copy_in(&rows(&table, 0, 0..10), 100);
        bench.copy_in(&rows(&table, 1, 0..10), 400);
        assert_eq!((bench.cache.stats().bytes, bench.memory.used_bytes()), (100 * PIECE, 100 * PIECE));
    }
}
