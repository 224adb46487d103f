//! A slice of the CPU as a device: threads, a memory budget, and every primitive of joins, written
//! for caches.
//!
//! ```text
//!   mod.rs        the device itself: threads, streams; hands each call to the file named for it
//!   transfer.rs   host memory in and out, through an emulated link if there is one (link.rs)
//!   pack.rs       key columns to keys of one width            hash.rs    keys as numbers, mixing
//!   partition.rs  by bits of the mixed key                    slots.rs   the open-addressing table
//!   group.rs      equal keys of partitions made adjacent
//!   sort.rs       by key                                      buffer.rs  charged, pooled memory
//!   table.rs      one table over all keys, hashed or dense    raw.rs     the only unsafe code
//!   filter.rs     which keys cannot match
//!   match_partitions.rs, match_sorted.rs    matching within partitions, and of sorted keys
//!   join_partitions.rs                      matching and gathering, composed of the others
//!   expand.rs, select.rs, gather.rs                           from matches to positions to rows
//!   peers.rs      windows that other devices write
//!   fault.rs      deliberate failures, for tests
//! ```
//!
//! Every call runs on the device's own threads and is finished when it returns. It works in morsels
//! of [`MORSEL_ROWS`] and checks the stream's cancel flag before each. Memory that lives longer
//! than a morsel is charged to the budget. The exception is small bookkeeping per thread and
//! partition (counters, line buffers).
//!
//! This room knows nothing of other kinds of device.

mod buffer;
mod expand;
mod fault;
mod filter;
mod gather;
mod group;
mod hash;
mod join_partitions;
mod link;
mod match_partitions;
mod match_sorted;
mod pack;
mod partition;
mod peers;
#[allow(unsafe_code)]
mod raw;
mod select;
mod slots;
mod sort;
mod split;
mod table;
#[cfg(test)]
pub(super) mod testing;
#[cfg(test)]
mod tests;
mod transfer;

use std::any::Any;
use std::ops::Range;
use std::sync::{Arc, OnceLock, Weak};

use arrow::buffer::Buffer;
use bytemuck::Pod;
pub use filter::{FILTER_FALSE_POSITIVES, FilterBytes};
pub use link::{EmulatedLink, EmulatedRoute, Lane};
use rayon::prelude::*;
pub use sort::sort_scratch_bytes;
pub use table::TableBytes;

use self::buffer::{HostBuffer, Pool, Values};
use self::fault::Faults;
use self::hash::with_key;
use self::link::Transfer;
use self::peers::Windows;
use super::cache::{ColumnCache, CopyFrom};
use super::cpu_pool::{CpuPool, CpuPools};
use super::fault::Trigger;
use super::{
    BitSlice, CacheOps, CacheStats, CancelFlag, Column, ColumnRows, Device, DeviceBuffer, DeviceFacts, DeviceHandle,
    DeviceId, DeviceKind, Event, Filter, HostColumn, JoinedPartitions, KeyField, KeyWidth, Keys, Matches, PackedKeys,
    Pairs, PartitionMatches, Partitions, Payload, PeerOps, Positions, RadixBits, Sorted, Stream, Table, Tuning,
    Unmatched, Wanted, Which,
};
use crate::memory::{Arena, Budget};
use crate::{Context, Error, Result};

/// Rows that a thread takes at a time. Long enough that the cost of taking them does not matter,
/// short enough that a cancelled job stops at once and threads finish together. A multiple of 64,
/// so that morsels never share a word of a bitmap.
const MORSEL_ROWS: usize = 1 << 14;

/// A slice of the CPU as a device.
#[derive(Debug)]
pub struct HostDevice {
    id: DeviceId,
    facts: DeviceFacts,
    tuning: Tuning,
    pool: Pool,
    threads: CpuPool,
    route: Option<EmulatedRoute>,
    /// Columns that stay from join to join, shared by the views of all jobs. Used only with a link.
    kept: Arc<OnceLock<Arc<ColumnCache>>>,
    windows: Arc<Windows>,
    faults: Faults,
}

impl HostDevice {
    /// Creates device number `index` with `threads` threads of its own and `memory`. With a link,
    /// transfers are copies that take the time of a bus with the link's rates. Without a link, they
    /// run at memory speed.
    ///
    /// # Errors
    /// [`Error::Invalid`] for no threads or a link without a rate, [`Error::Exhausted`] when the
    /// system refuses threads.
    pub fn new(index: u16, threads: usize, memory: Budget, link: Option<EmulatedLink>) -> Result<Self> {
        let route = link.map(EmulatedRoute::of).transpose().context(|| format!("linking device host:{index}"))?;
        Self::with_route(index, threads, memory, route)
    }

    /// Creates a device like [`new`](Self::new), with a route of lanes that other devices may
    /// share.
    ///
    /// # Errors
    /// [`Error::Invalid`] for no threads, [`Error::Exhausted`] when the system refuses threads.
    pub fn with_route(index: u16, threads: usize, memory: Budget, route: Option<EmulatedRoute>) -> Result<Self> {
        if threads == 0 {
            return Err(Error::Invalid(format!("device host:{index} has no threads; give it at least one")));
        }
        let id = DeviceId { kind: DeviceKind::Host, index };
        Ok(Self {
            id,
            // A GPU behind such a link would also join partitions in one step.
            tuning: Tuning { fuses_partition_join: route.is_some(), ..tuning(threads) },
            facts: facts(threads),
            pool: Pool::new(memory),
            threads: CpuPools::new(id, threads, &[]).cpu_pool()?,
            route,
            kept: Default::default(),
            windows: Arc::default(),
            faults: Faults::of(id, Trigger::of(id)),
        })
    }

    /// Returns the device with deliberate failures that the given file asks for.
    #[cfg(test)]
    #[must_use]
    pub(crate) fn with_fault_file(mut self, file: std::path::PathBuf) -> Self {
        self.faults = Faults::of(self.id, Trigger::at(self.id, Some(file)));
        self
    }

    /// Returns the device with several streams per job, like a device whose copies overlap with its
    /// primitives. All streams use the same threads, so this only serves to test the joins that
    /// such devices run.
    #[must_use]
    pub fn with_streams(mut self, streams: usize) -> Self {
        self.tuning.streams = streams.max(1);
        self
    }

    /// Returns the device with a fixed choice of joining partitions in one step or not. The host
    /// gains nothing, because a probe batch stays in cache between primitives. It serves to test
    /// the joins of other devices.
    #[must_use]
    pub fn joining_partitions(mut self, joins: bool) -> Self {
        self.tuning.fuses_partition_join = joins;
        self
    }

    fn copy_in_to(&self, pool: &Pool, parts: &[Buffer], stream: &Stream) -> Result<DeviceBuffer> {
        let bytes = parts.iter().map(Buffer::len).sum();
        if let ([part], None) = (parts, &self.route) {
            stream.savings.add_in_place(part.len() as u64);
        }
        let copy = |run: &Run<'_>| transfer::copy_in(run, parts, self.route.is_some());
        self.pass_in(stream, bytes, || self.run_in(pool, stream, copy))
    }

    /// Runs one primitive on the device's threads.
    fn run<R: Send>(&self, stream: &Stream, primitive: impl FnOnce(&Run<'_>) -> Result<R> + Send) -> Result<R> {
        self.run_in(&self.pool, stream, primitive)
    }

    /// Runs one primitive with memory of the given pool.
    fn run_in<R: Send>(
        &self,
        pool: &Pool,
        stream: &Stream,
        primitive: impl FnOnce(&Run<'_>) -> Result<R> + Send,
    ) -> Result<R> {
        let run = Run { pool, cancel: &stream.cancel, threads: self.facts.parallelism, tuning: &self.tuning };
        run.cancel.check()?;
        self.faults.before_primitive()?;
        self.threads.install(|| primitive(&run))
    }
}

fn facts(threads: usize) -> DeviceFacts {
    let cpu = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = cpu.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": ").map(|(_, name)| name));
    let unit = if threads == 1 { "thread" } else { "threads" };
    DeviceFacts {
        name: format!("{threads} {unit} of {}", model.unwrap_or("a CPU").trim()),
        uuid: None,
        compute_capability: None,
        parallelism: threads,
        cpu_threads: threads,
    }
}

/// Returns sizes that fit caches of today's servers: 1–2 MiB of second level per core, 32–48 KiB of
/// first.
fn tuning(threads: usize) -> Tuning {
    Tuning {
        streams: 1,
        morsel_rows: MORSEL_ROWS,
        probe_batch_rows: (1 << 18) * threads.next_power_of_two().min(16),
        gather_bytes: 4 << 20,
        row_scratch_bytes: None,
        partition_rows: 1 << 15,
        pass_bits_max: 11,
        fuses_partition_join: false,
    }
}

/// Resources of a primitive, on a thread of the device.
struct Run<'a> {
    pool: &'a Pool,
    cancel: &'a CancelFlag,
    threads: usize,
    tuning: &'a Tuning,
}

impl Run<'_> {
    /// Takes room for `rows` values with unspecified contents.
    fn values<T: Pod>(&self, rows: usize, purpose: &str) -> Result<Values<T>> {
        self.pool.values(rows, purpose)
    }

    /// Calls `work` for each morsel of `out`, in parallel, with the number of its first row and its
    /// rows.
    fn fill<T: Send>(&self, out: &mut [T], work: impl Fn(usize, &mut [T]) + Sync) -> Result<()> {
        out.par_chunks_mut(MORSEL_ROWS).enumerate().try_for_each(|(morsel, chunk)| {
            self.cancel.check()?;
            work(morsel * MORSEL_ROWS, chunk);
            Ok(())
        })
    }

    /// Calls `work` for each morsel of `rows`, in parallel, and returns the results in order.
    fn map<R: Send>(&self, rows: Range<usize>, work: impl Fn(Range<usize>) -> R + Sync) -> Result<Vec<R>> {
        (0..rows.len().div_ceil(MORSEL_ROWS))
            .into_par_iter()
            .map(|morsel| {
                self.cancel.check()?;
                let start = rows.start + morsel * MORSEL_ROWS;
                Ok(work(start..rows.end.min(start + MORSEL_ROWS)))
            })
            .collect()
    }

    /// Copies in parallel.
    fn copy<T: Pod + Send + Sync>(&self, from: &[T], to: &mut [T]) -> Result<()> {
        self.fill(to, |start, to| to.copy_from_slice(&from[start..start + to.len()]))
    }
}

/// Stateless handle of streams and events, because calls are finished when they return.
#[derive(Debug)]
struct Done;

impl DeviceHandle for Done {
    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Device for HostDevice {
    fn id(&self) -> DeviceId {
        self.id
    }

    fn facts(&self) -> &DeviceFacts {
        &self.facts
    }

    fn tuning(&self) -> &Tuning {
        &self.tuning
    }

    fn check(&self) -> Result<()> {
        self.faults.check()
    }

    fn memory(&self) -> &Budget {
        &self.pool.budget
    }

    fn install(&self, work: &mut (dyn FnMut() + Send)) {
        self.threads.install(work);
    }

    /// Jobs take turns on the CPU. More jobs than threads would only wait for each other.
    fn jobs_max(&self) -> usize {
        self.facts.parallelism
    }

    fn for_job(&self, memory: Budget) -> Result<Arc<dyn Device>> {
        Ok(Arc::new(Self {
            id: self.id,
            facts: self.facts.clone(),
            tuning: self.tuning,
            pool: self.pool.charged_to(memory),
            // Streams have their own threads. A pool that includes the caller must not wait for
            // them.
            threads: if self.tuning.streams == 1 { self.threads.of_caller()? } else { self.threads.another()? },
            route: self.route.clone(),
            kept: self.kept.clone(),
            windows: self.windows.clone(),
            faults: self.faults.clone(),
        }))
    }

    fn stream(&self, cancel: CancelFlag) -> Result<Stream> {
        Ok(Stream { handle: Arc::new(Done), cancel, savings: Arc::default() })
    }

    fn record_event(&self, _stream: &Stream) -> Result<Event> {
        Ok(Event { handle: Arc::new(Done) })
    }

    fn wait_event(&self, _event: &Event, _stream: &Stream) -> Result<()> {
        Ok(())
    }

    fn wait(&self, _event: &Event, stream: &Stream) -> Result<()> {
        stream.cancel.check()
    }

    fn synchronize(&self, stream: &Stream) -> Result<()> {
        stream.cancel.check()
    }

    fn copy_in(&self, parts: &[Buffer], stream: &Stream) -> Result<DeviceBuffer> {
        self.copy_in_to(&self.pool, parts, stream)
    }

    fn copy_in_bits(&self, parts: &[BitSlice], stream: &Stream) -> Result<DeviceBuffer> {
        let bits: usize = parts.iter().map(BitSlice::len).sum();
        self.pass_in(stream, bits.div_ceil(8), || self.run(stream, |run| transfer::copy_in_bits(run, parts)))
    }

    fn copy_out(&self, buffer: &DeviceBuffer, len: usize, arena: &Arena, stream: &Stream) -> Result<Buffer> {
        self.pass_out(stream, len, || self.run(stream, |run| transfer::copy_out(run, buffer, len, arena)))
    }

    fn copy(&self, buffer: &DeviceBuffer, stream: &Stream) -> Result<DeviceBuffer> {
        self.run(stream, |run| transfer::copy(run, buffer))
    }

    fn pack_keys(&self, fields: &[KeyField], width: KeyWidth, stream: &Stream) -> Result<PackedKeys> {
        self.run(stream, |run| with_key!(width, K => pack::pack_keys::<K>(run, fields, width)))
    }

    fn build_filter(&self, keys: &Keys, stream: &Stream) -> Result<Filter> {
        self.run(stream, |run| with_key!(keys.width, K => filter::build::<K>(run, keys)))
    }

    fn filter_keys(&self, filter: &Filter, keys: &PackedKeys, stream: &Stream) -> Result<PackedKeys> {
        self.run(stream, |run| with_key!(keys.keys.width, K => filter::filter_keys::<K>(run, filter, keys)))
    }

    fn partition(&self, keys: &Keys, payload: &[Payload], bits: RadixBits, stream: &Stream) -> Result<Partitions> {
        self.run(stream, |run| with_key!(keys.width, K => partition::partition::<K>(run, keys, payload, bits)))
    }

    fn group_partitions(&self, partitions: Partitions, stream: &Stream) -> Result<Partitions> {
        self.run(stream, |run| with_key!(partitions.keys.width, K => group::group::<K>(run, partitions)))
    }

    fn sort(&self, keys: &Keys, payload: &[Payload], stream: &Stream) -> Result<Sorted> {
        self.run(stream, |run| with_key!(keys.width, K => sort::sort::<K>(run, keys, payload)))
    }

    fn is_sorted(&self, keys: &Keys, stream: &Stream) -> Result<bool> {
        self.run(stream, |run| with_key!(keys.width, K => sort::is_sorted::<K>(run, keys)))
    }

    fn build_table(&self, keys: &Keys, _repeats: bool, stream: &Stream) -> Result<Table> {
        self.run(stream, |run| with_key!(keys.width, K => table::build::<K>(run, keys)))
    }

    fn build_dense_table(&self, keys: &Keys, key_min: u128, key_max: u128, stream: &Stream) -> Result<Option<Table>> {
        self.run(stream, |run| with_key!(keys.width, K => table::build_dense::<K>(run, keys, key_min, key_max)))
    }

    fn probe_table(&self, table: &Table, probe: &Keys, rows: Range<usize>, stream: &Stream) -> Result<Matches> {
        self.run(stream, |run| with_key!(probe.width, K => table::probe::<K>(run, table, probe, rows)))
    }

    fn match_partitions(
        &self,
        build: &Partitions,
        probe: &Partitions,
        partitions: Range<usize>,
        stream: &Stream,
    ) -> Result<PartitionMatches> {
        assert_eq!(build.keys.width, probe.keys.width, "both sides of a match have keys of one width");
        assert_eq!(
            build.bounds.partitions(),
            probe.bounds.partitions(),
            "both sides of a match have the same number of partitions"
        );
        self.run(stream, |run| {
            with_key!(probe.keys.width, K => match_partitions::match_partitions::<K>(run, build, probe, partitions))
        })
    }

    fn join_partitions(
        &self,
        build: &Partitions,
        probe: &Partitions,
        partitions: Range<usize>,
        wanted: Wanted,
        stream: &Stream,
    ) -> Result<Option<JoinedPartitions>> {
        join_partitions::join(self, build, probe, partitions, wanted, stream)
    }

    fn match_sorted(&self, build: &Keys, probe: &Keys, rows: Range<usize>, stream: &Stream) -> Result<Matches> {
        assert_eq!(build.width, probe.width, "both sides of a match have keys of one width");
        self.run(stream, |run| with_key!(probe.width, K => match_sorted::match_sorted::<K>(run, build, probe, rows)))
    }

    fn expand(&self, matches: &Matches, pairs: Range<u64>, unmatched: Unmatched, stream: &Stream) -> Result<Pairs> {
        self.run(stream, |run| expand::expand(run, matches, pairs, unmatched))
    }

    fn split_pairs(&self, pairs: &Pairs, part_bits: u32, parts: usize, stream: &Stream) -> Result<(Pairs, Vec<usize>)> {
        self.run(stream, |run| split::split_pairs(run, pairs, part_bits, parts))
    }

    fn select_matches(&self, matches: &Matches, which: Which, stream: &Stream) -> Result<Positions> {
        self.run(stream, |run| select::matches(run, matches, which))
    }

    fn new_flags(&self, rows: usize, stream: &Stream) -> Result<DeviceBuffer> {
        self.run(stream, |run| HostBuffer::flags(rows, run.pool))
    }

    fn mark_build(&self, matches: &Matches, flags: &DeviceBuffer, stream: &Stream) -> Result<()> {
        self.run(stream, |run| select::mark_build(run, matches, flags))
    }

    fn mark(&self, positions: &Positions, flags: &DeviceBuffer, stream: &Stream) -> Result<()> {
        self.run(stream, |run| select::mark(run, positions, flags))
    }

    fn select_flags(&self, flags: &DeviceBuffer, rows: usize, which: Which, stream: &Stream) -> Result<Positions> {
        self.run(stream, |run| select::flags(run, flags, rows, which))
    }

    fn compose(&self, map: &Positions, positions: &Positions, stream: &Stream) -> Result<Positions> {
        self.run(stream, |run| gather::compose(run, map, positions))
    }

    fn concat(&self, lists: &[(&Positions, Range<usize>)], stream: &Stream) -> Result<Positions> {
        self.run(stream, |run| gather::concat(run, lists))
    }

    fn gather(&self, column: &Column, positions: &Positions, stream: &Stream) -> Result<Column> {
        self.run(stream, |run| gather::gather(run, column, positions))
    }

    fn gather_to_host(
        &self,
        column: &Column,
        positions: &Positions,
        arena: &Arena,
        stream: &Stream,
    ) -> Result<HostColumn> {
        let bytes = positions.len() * column.width.bytes();
        self.pass_out(stream, bytes, || self.run(stream, |run| gather::gather_to_host(run, column, positions, arena)))
    }

    fn positions_to_host(&self, positions: &Positions, arena: &Arena, stream: &Stream) -> Result<Buffer> {
        let bytes = positions.len() * size_of::<u32>();
        self.pass_out(stream, bytes, || self.run(stream, |run| transfer::positions_to_host(run, positions, arena)))
    }

    fn cache(&self) -> Option<&dyn CacheOps> {
        self.route.is_some().then_some(self)
    }

    fn peers(&self) -> Option<&dyn PeerOps> {
        Some(self)
    }
}

impl CacheOps for HostDevice {
    fn copy_in_column(&self, rows: &ColumnRows, parts: &[Buffer], stream: &Stream) -> Result<DeviceBuffer> {
        let Some(cache) = self.kept.get() else { return self.copy_in(parts, stream) };
        let charged = |memory: Option<&Budget>| match memory {
            Some(memory) => self.pool.charged_to(memory.clone()),
            None => self.pool.clone(),
        };
        let copy = |from: CopyFrom<'_>| match from {
            CopyFrom::Host(memory) => self.copy_in_to(&charged(memory), parts, stream),
            CopyFrom::Cached(kept, memory) => {
                self.run_in(&charged(memory), stream, |run| transfer::put_together(run, kept))
            }
        };
        let bytes = parts.iter().map(Buffer::len).sum::<usize>() as u64;
        cache.copy_in(rows, bytes, self, stream, copy, |_| ())
    }

    fn enable_cache(&self, limit_bytes: u64) -> Result<()> {
        // Calls are finished when they return, so there is no work to wait for.
        self.kept.get_or_init(|| ColumnCache::new(self.memory(), limit_bytes, Box::new(|| ())));
        Ok(())
    }

    fn cached_rows(&self, table: &Weak<dyn Any + Send + Sync>) -> Vec<ColumnRows> {
        self.kept.get().map_or_else(Vec::new, |cache| cache.cached_rows(table))
    }

    fn cache_stats(&self) -> Option<CacheStats> {
        self.kept.get().map(|cache| cache.stats())
    }
}

impl HostDevice {
    /// Runs a copy to the device, which takes at least the route's time for its bytes.
    fn pass_in<R>(&self, stream: &Stream, bytes: usize, copy: impl FnOnce() -> Result<R>) -> Result<R> {
        self.faults.before_copy()?;
        pass(self.route.as_ref().map(|route| &route.to_device[..]), stream, bytes, copy)
    }

    /// Runs a copy from the device, which takes at least the route's time for its bytes.
    fn pass_out<R>(&self, stream: &Stream, bytes: usize, copy: impl FnOnce() -> Result<R>) -> Result<R> {
        self.faults.before_copy()?;
        let copied = pass(self.route.as_ref().map(|route| &route.from_device[..]), stream, bytes, copy)?;
        self.faults.after_copy_out()?;
        Ok(copied)
    }
}

/// Copies while the bytes pass over the lanes, so the time of the copy counts as part of the
/// transfer.
fn pass<R>(lanes: Option<&[Lane]>, stream: &Stream, bytes: usize, copy: impl FnOnce() -> Result<R>) -> Result<R> {
    let Some(lanes) = lanes else {
        return copy();
    };
    let transfer = Transfer::begin(lanes, bytes);
    let copied = copy()?;
    transfer.wait(&stream.cancel)?;
    Ok(copied)
}
