//! An NVIDIA GPU as a device: its memory, its streams, and every primitive of joins as kernels.
//!
//! ```text
//!   mod.rs              the device; passes each call to the file named for it
//!   driver.rs           context, streams, events, and the meaning of errors
//!   tuning.rs           sizes that a GPU works best with, by its architecture
//!   buffer.rs           charged memory
//!   abi.rs              the interface of the kernels (kernels/)
//!   work.rs             all launches and fills
//!   transfer.rs         copies of host memory in and out
//!   pack.rs             key columns to keys of one width
//!   values.rs           keys of text: packing, hashes, comparison
//!   filter.rs           filter of keys that cannot match
//!   partition.rs        partitioning by bits of the mixed key
//!   group.rs            equal keys of partitions made adjacent
//!   sort.rs             sorting by key
//!   table.rs            one table over all keys
//!   match_partitions.rs, match_sorted.rs
//!                       matching within partitions, and of sorted keys
//!   join_partitions.rs  rows of both sides in one call
//!   expand.rs           from matches to pairs
//!   split.rs            pairs divided by parts of the build side
//!   select.rs           rows that satisfy a condition, and flags of matched rows
//!   gather.rs           from positions to rows
//!   gather_bytes.rs     text at positions
//!   nvml.rs             NVLinks, as the driver's library for management shows them
//!   fault.rs            deliberate failures, for tests
//!   observe.rs          observers of launches, copies and fills: none, the log, a profiler,
//!                       a timeline, or sums of times
//! ```
//!
//! The files of a primitive have the same name here, in `kernels/` and in `src/device/host/`.
//!
//! Calls queue work on the job's stream and return; calls that return a number wait for it. Memory
//! is stream-ordered: later work of the same stream may reuse a dropped buffer at once. A stream
//! keeps alive all host memory that its pending copies read or write.
//!
//! Only this room and its kernels call CUDA.

mod abi;
mod buffer;
mod driver;
mod expand;
mod fault;
mod filter;
mod gather;
mod gather_bytes;
mod group;
mod join_partitions;
mod match_partitions;
mod match_sorted;
mod observe;
mod pack;
mod partition;
mod peers;
mod select;
mod sort;
mod split;
mod table;
#[cfg(test)]
mod tests;
mod transfer;
mod tuning;
mod values;
mod work;

use std::any::Any;
use std::ops::Range;
use std::sync::{Arc, OnceLock, Weak};

use arrow::buffer::Buffer;

use self::driver::{Gpu, Mark, Queue};
use self::expand::KnownPairs;
use self::peers::Windows;
use self::work::Work;
use super::cache::{ColumnCache, CopyFrom};
use super::cpu_pool::{CpuPool, CpuPools};
use super::{
    BitSlice, BytesColumn, BytesPart, CacheOps, CacheStats, CancelFlag, Column, ColumnRows, Device, DeviceBuffer,
    DeviceFacts, DeviceId, DeviceKind, Event, Filter, GpuIdentity, GpuPlace, GpuSeen, Hashing, HostBytes, HostColumn,
    JoinedPartitions, KeyField, KeyWidth, Keys, Matches, PackedKeys, Pairs, PartitionMatches, Partitions, Payload,
    PeerOps, Positions, RadixBits, Sorted, Stream, StringOps, Table, TimingOps, Tuning, Unmatched, ValueField, Wanted,
    Which, Width, WorkTime,
};
use crate::Result;
use crate::memory::{Arena, Budget, Pin};

/// Returns the number of GPUs that this process can use, or 0 without a driver.
///
/// # Errors
/// [`Unsupported`](crate::Error::Unsupported) if a driver is installed but does not work.
pub fn device_count() -> Result<u16> {
    driver::gpu_count()
}

/// Returns the identity of each GPU that this process can use.
///
/// # Errors
/// [`Unsupported`](crate::Error::Unsupported) if a driver is installed but does not work.
pub fn gpu_identities() -> Result<Vec<GpuIdentity>> {
    driver::gpu_identities()
}

/// Returns the GPUs that the driver shows to this process.
///
/// # Errors
/// [`Unsupported`](crate::Error::Unsupported) if a driver is installed but does not work.
pub fn gpus_seen() -> Result<Vec<GpuSeen>> {
    driver::gpus_seen()
}

/// True if this machine has a CUDA driver.
pub fn has_driver() -> bool {
    driver::is_driver_present()
}

/// Jobs that run on one GPU at a time: while one waits for its copies, another's kernels run.
const JOBS_MAX: usize = 4;

/// A GPU as a device.
#[derive(Debug)]
pub struct CudaDevice {
    id: DeviceId,
    facts: DeviceFacts,
    tuning: Tuning,
    memory: Budget,
    gpu: Arc<Gpu>,
    threads: CpuPool,
    /// Threads that drive streams, one per stream that a join uses. They are kept because starting
    /// them takes longer than a small join.
    stream_threads: Arc<CpuPools>,
    /// Shared by the views of all jobs.
    kept: Arc<OnceLock<Cached>>,
    windows: Arc<Windows>,
}

/// Columns that stay from join to join.
#[derive(Debug)]
struct Cached {
    cache: Arc<ColumnCache>,
    /// Stream on which the columns' memory is freed. The streams of the joins that copied them in
    /// have ended by then.
    queue: Arc<Queue>,
}

impl CudaDevice {
    /// Opens the GPU of the given place, or else GPU number `index`, with `threads` CPU threads for
    /// work in parallel with it. `budget` makes the memory budget from the number of free bytes.
    ///
    /// # Errors
    /// [`Unsupported`](crate::Error::Unsupported) if there is no such GPU, it cannot be used, or
    /// its limits are too small for the kernels, [`Exhausted`](crate::Error::Exhausted) if the
    /// system refuses threads, [`Unavailable`](crate::Error::Unavailable) if CUDA does not show the
    /// GPU with this UUID.
    pub fn open(index: u16, place: &GpuPlace, threads: usize, budget: impl FnOnce(u64) -> Budget) -> Result<Self> {
        Self::open_observed(index, place, threads, &observe::asked_for(), budget)
    }

    /// Opens a GPU as [`Self::open`] does, with the observer of the given name.
    fn open_observed(
        index: u16,
        place: &GpuPlace,
        threads: usize,
        observer: &str,
        budget: impl FnOnce(u64) -> Budget,
    ) -> Result<Self> {
        let gpu = Arc::new(Gpu::open(index, place.uuid.as_deref(), observer)?);
        let limits = gpu.limits()?;
        limits.check()?;
        let tuning = tuning::tuning_of(&limits);
        let facts = DeviceFacts {
            name: limits.name,
            uuid: gpu.uuid(),
            compute_capability: Some(limits.capability),
            parallelism: gpu.multiprocessors()?,
            cpu_threads: threads,
        };
        let id = DeviceId { kind: DeviceKind::Cuda, index };
        Ok(Self {
            id,
            memory: budget(gpu.free_bytes()?),
            gpu,
            threads: CpuPools::new(id, threads, &place.cpus).cpu_pool()?,
            stream_threads: CpuPools::of_streams(id, tuning.streams, &place.cpus),
            facts,
            tuning,
            kept: Default::default(),
            windows: Arc::default(),
        })
    }

    /// Starts a primitive. Fails if its job was cancelled.
    fn work<'a>(&'a self, stream: &'a Stream) -> Result<Work<'a>> {
        stream.cancel.check()?;
        self.gpu.bind()?;
        let own = cuda_stream(stream);
        Ok(Work { memory: &self.memory, stream: own, queue: &own.queue, cancel: &stream.cancel })
    }
}

fn bytes_of(parts: &[Buffer]) -> u64 {
    parts.iter().map(Buffer::len).sum::<usize>() as u64
}

/// A stream, with state that is kept from call to call.
#[derive(Debug)]
struct CudaStream {
    queue: Arc<Queue>,
    /// Pairs of the last matches, kept because they are expanded in several calls.
    known_pairs: parking_lot::Mutex<Option<KnownPairs>>,
}

impl CudaStream {
    fn new(gpu: Arc<Gpu>) -> Result<Self> {
        Ok(Self { queue: Arc::new(Queue::new(gpu)?), known_pairs: Default::default() })
    }
}

fn cuda_stream(stream: &Stream) -> &CudaStream {
    stream.handle.as_any().downcast_ref().expect("a stream that a GPU gets is a GPU stream")
}

impl Device for CudaDevice {
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
        self.gpu.check_not_lost()
    }

    fn memory(&self) -> &Budget {
        &self.memory
    }

    fn install(&self, work: &mut (dyn FnMut() + Send)) {
        self.threads.install(work);
    }

    fn on_stream_threads(&self, threads: usize, work: &(dyn Fn() + Sync)) -> Result<()> {
        assert!(threads <= self.tuning.streams, "at most one thread for each stream");
        // Each thread of the pool runs the closure once, and the pool has no other work.
        self.stream_threads.cpu_pool()?.broadcast(|thread| {
            if thread.index() < threads {
                work()
            }
        });
        Ok(())
    }

    fn pin(&self) -> Option<Arc<dyn Pin>> {
        Some(Arc::new(driver::PinForGpus { gpu: self.gpu.clone() }))
    }

    fn jobs_max(&self) -> usize {
        JOBS_MAX
    }

    fn for_job(&self, memory: Budget) -> Result<Arc<dyn Device>> {
        let (gpu, kept, threads) = (self.gpu.clone(), self.kept.clone(), self.threads.another()?);
        let (stream_threads, facts, tuning) = (self.stream_threads.clone(), self.facts.clone(), self.tuning);
        let (id, windows) = (self.id, self.windows.clone());
        Ok(Arc::new(Self { id, facts, tuning, memory, gpu, threads, stream_threads, kept, windows }))
    }

    fn stream(&self, cancel: CancelFlag) -> Result<Stream> {
        let handle = Arc::new(CudaStream::new(self.gpu.clone())?);
        Ok(Stream { handle, cancel, savings: Arc::default() })
    }

    fn record_event(&self, stream: &Stream) -> Result<Event> {
        Ok(Event { handle: Arc::new(Mark::record(&cuda_stream(stream).queue)?) })
    }

    fn wait_event(&self, event: &Event, stream: &Stream) -> Result<()> {
        let mark: &Mark = event.handle.as_any().downcast_ref().expect("an event that a GPU gets is a GPU event");
        mark.hold_back(&cuda_stream(stream).queue)
    }

    fn wait(&self, event: &Event, stream: &Stream) -> Result<()> {
        stream.cancel.check()?;
        let mark: &Mark = event.handle.as_any().downcast_ref().expect("an event that a GPU gets is a GPU event");
        mark.wait(&cuda_stream(stream).queue, "waiting for part of the work")
    }

    fn synchronize(&self, stream: &Stream) -> Result<()> {
        stream.cancel.check()?;
        cuda_stream(stream).queue.synchronize("waiting for work")
    }

    fn record_stream(&self, buffer: &DeviceBuffer, stream: &Stream) {
        let kept_on = self.kept.get().map(|kept| &kept.queue);
        buffer::cuda(buffer).record_stream(&cuda_stream(stream).queue, kept_on);
    }

    fn copy_in(&self, parts: &[Buffer], stream: &Stream) -> Result<DeviceBuffer> {
        transfer::copy_in(&self.work(stream)?, parts)
    }

    fn copy_in_bits(&self, parts: &[BitSlice], stream: &Stream) -> Result<DeviceBuffer> {
        transfer::copy_in_bits(&self.work(stream)?, parts)
    }

    fn copy_out(&self, buffer: &DeviceBuffer, len: usize, arena: &Arena, stream: &Stream) -> Result<Buffer> {
        transfer::copy_out(&self.work(stream)?, buffer, len, arena)
    }

    fn copy(&self, buffer: &DeviceBuffer, stream: &Stream) -> Result<DeviceBuffer> {
        transfer::copy(&self.work(stream)?, buffer)
    }

    fn pack_keys(&self, fields: &[KeyField], width: KeyWidth, stream: &Stream) -> Result<PackedKeys> {
        pack::pack(&self.work(stream)?, fields, width)
    }

    fn build_filter(&self, keys: &Keys, stream: &Stream) -> Result<Filter> {
        filter::build(&self.work(stream)?, keys)
    }

    fn filter_keys(&self, filter: &Filter, keys: &PackedKeys, stream: &Stream) -> Result<PackedKeys> {
        filter::filter_keys(&self.work(stream)?, filter, keys)
    }

    fn partition(&self, keys: &Keys, payload: &[Payload], bits: RadixBits, stream: &Stream) -> Result<Partitions> {
        partition::partition(&self.work(stream)?, keys, payload, bits)
    }

    fn group_partitions(&self, partitions: Partitions, stream: &Stream) -> Result<Partitions> {
        group::group(&self.work(stream)?, &partitions)
    }

    fn sort(&self, keys: &Keys, payload: &[Payload], stream: &Stream) -> Result<Sorted> {
        sort::sort(&self.work(stream)?, keys, payload)
    }

    fn is_sorted(&self, keys: &Keys, stream: &Stream) -> Result<bool> {
        sort::is_sorted(&self.work(stream)?, keys)
    }

    fn build_table(&self, keys: &Keys, repeats: bool, stream: &Stream) -> Result<Table> {
        table::build(&self.work(stream)?, keys, repeats)
    }

    fn build_dense_table(&self, keys: &Keys, key_min: u128, key_max: u128, stream: &Stream) -> Result<Option<Table>> {
        table::build_dense(&self.work(stream)?, keys, key_min, key_max)
    }

    fn probe_table(&self, table: &Table, probe: &Keys, rows: Range<usize>, stream: &Stream) -> Result<Matches> {
        table::probe(&self.work(stream)?, table, probe, rows)
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
        match_partitions::match_partitions(&self.work(stream)?, build, probe, partitions)
    }

    fn join_partitions(
        &self,
        build: &Partitions,
        probe: &Partitions,
        partitions: Range<usize>,
        wanted: Wanted,
        stream: &Stream,
    ) -> Result<Option<JoinedPartitions>> {
        assert_eq!(build.keys.width, probe.keys.width, "both sides of a join have keys of one width");
        assert_eq!(
            build.bounds.partitions(),
            probe.bounds.partitions(),
            "both sides of a join have the same number of partitions"
        );
        join_partitions::join(&self.work(stream)?, build, probe, partitions, wanted)
    }

    fn match_sorted(&self, build: &Keys, probe: &Keys, rows: Range<usize>, stream: &Stream) -> Result<Matches> {
        assert_eq!(build.width, probe.width, "both sides of a match have keys of one width");
        match_sorted::match_sorted(&self.work(stream)?, build, probe, rows)
    }

    fn expand(&self, matches: &Matches, pairs: Range<u64>, unmatched: Unmatched, stream: &Stream) -> Result<Pairs> {
        expand::expand(&self.work(stream)?, matches, pairs, unmatched)
    }

    fn split_pairs(&self, pairs: &Pairs, part_bits: u32, parts: usize, stream: &Stream) -> Result<(Pairs, Vec<usize>)> {
        split::split_pairs(&self.work(stream)?, pairs, part_bits, parts)
    }

    fn select_matches(&self, matches: &Matches, which: Which, stream: &Stream) -> Result<Positions> {
        select::select_matches(&self.work(stream)?, matches, which)
    }

    fn new_flags(&self, rows: usize, stream: &Stream) -> Result<DeviceBuffer> {
        Ok(Arc::new(select::new_flags(&self.work(stream)?, rows, "flags of matched rows")?))
    }

    fn mark_build(&self, matches: &Matches, flags: &DeviceBuffer, stream: &Stream) -> Result<()> {
        select::mark_build(&self.work(stream)?, matches, flags)
    }

    fn mark(&self, positions: &Positions, flags: &DeviceBuffer, stream: &Stream) -> Result<()> {
        select::mark(&self.work(stream)?, positions, flags)
    }

    fn select_flags(&self, flags: &DeviceBuffer, rows: usize, which: Which, stream: &Stream) -> Result<Positions> {
        select::select_flags(&self.work(stream)?, flags, rows, which)
    }

    fn compose(&self, map: &Positions, positions: &Positions, stream: &Stream) -> Result<Positions> {
        gather::compose(&self.work(stream)?, map, positions)
    }

    fn concat(&self, lists: &[(&Positions, Range<usize>)], stream: &Stream) -> Result<Positions> {
        gather::concat(&self.work(stream)?, lists)
    }

    fn gather(&self, column: &Column, positions: &Positions, stream: &Stream) -> Result<Column> {
        gather::gather(&self.work(stream)?, column, positions)
    }

    fn gather_to_host(
        &self,
        column: &Column,
        positions: &Positions,
        arena: &Arena,
        stream: &Stream,
    ) -> Result<HostColumn> {
        gather::gather_to_host(&self.work(stream)?, column, positions, arena)
    }

    fn gather_all_to_host(
        &self,
        columns: &[(&Column, &Positions)],
        arena: &Arena,
        stream: &Stream,
    ) -> Result<Vec<HostColumn>> {
        gather::gather_all_to_host(&self.work(stream)?, columns, arena)
    }

    fn positions_to_host(&self, positions: &Positions, arena: &Arena, stream: &Stream) -> Result<Buffer> {
        transfer::positions_to_host(&self.work(stream)?, positions, arena)
    }

    fn strings(&self) -> Option<&dyn StringOps> {
        Some(self)
    }

    fn peers(&self) -> Option<&dyn PeerOps> {
        Some(self)
    }

    fn cache(&self) -> Option<&dyn CacheOps> {
        Some(self)
    }

    fn timing(&self) -> Option<&dyn TimingOps> {
        Some(self)
    }
}

impl CacheOps for CudaDevice {
    fn copy_in_column(&self, rows: &ColumnRows, parts: &[Buffer], stream: &Stream) -> Result<DeviceBuffer> {
        let bytes = bytes_of(parts);
        let copy = |from: CopyFrom<'_>| {
            let work = self.work(stream)?;
            let charged = |memory: Option<&Budget>, copy: &dyn Fn(&Work<'_>) -> Result<DeviceBuffer>| match memory {
                Some(memory) => copy(&Work { memory, ..work }),
                None => copy(&work),
            };
            match from {
                CopyFrom::Host(memory) => charged(memory, &|work| transfer::copy_in(work, parts)),
                CopyFrom::Cached(kept, memory) => charged(memory, &|work| transfer::put_together(work, kept)),
            }
        };
        let Some(kept) = self.kept.get() else { return copy(CopyFrom::Host(None)) };
        stream.cancel.check()?;
        let stays = |buffer: &DeviceBuffer| buffer::cuda(buffer).record_stream(&kept.queue, None);
        kept.cache.copy_in(rows, bytes, self, stream, copy, stays)
    }

    fn enable_cache(&self, limit_bytes: u64) -> Result<()> {
        let queue = Arc::new(Queue::new(self.gpu.clone())?);
        let gpu = self.gpu.clone();
        let settle = Box::new(move || gpu.settle("dropping cached columns"));
        self.kept.get_or_init(|| Cached { cache: ColumnCache::new(&self.memory, limit_bytes, settle), queue });
        Ok(())
    }

    fn cached_rows(&self, table: &Weak<dyn Any + Send + Sync>) -> Vec<ColumnRows> {
        self.kept.get().map_or_else(Vec::new, |kept| kept.cache.cached_rows(table))
    }

    fn cache_stats(&self) -> Option<CacheStats> {
        self.kept.get().map(|kept| kept.cache.stats())
    }
}

impl TimingOps for CudaDevice {
    fn add_up_times(&self, on: bool) -> Result<()> {
        self.gpu.add_up_times(on)
    }

    fn take_times(&self) -> Vec<WorkTime> {
        self.gpu.observer.take_times()
    }
}

impl StringOps for CudaDevice {
    fn copy_in_bytes(&self, parts: &[BytesPart], offset_width: Width, stream: &Stream) -> Result<BytesColumn> {
        values::copy_in(&self.work(stream)?, parts, offset_width)
    }

    fn short_values(&self, bytes: &BytesColumn, bytes_max: usize, stream: &Stream) -> Result<Column> {
        values::short(&self.work(stream)?, bytes, bytes_max)
    }

    fn hash_keys(&self, fields: &[ValueField], hashing: Hashing, stream: &Stream) -> Result<PackedKeys> {
        values::hash(&self.work(stream)?, fields, hashing)
    }

    fn differing_pairs(
        &self,
        build: &[ValueField],
        probe: &[ValueField],
        pairs: &Pairs,
        stream: &Stream,
    ) -> Result<Positions> {
        values::differing(&self.work(stream)?, build, probe, pairs)
    }

    fn are_runs_uniform(&self, fields: &[ValueField], rows: &Positions, keys: &Keys, stream: &Stream) -> Result<bool> {
        values::are_runs_uniform(&self.work(stream)?, fields, rows, keys)
    }

    fn gather_bytes_to_host(
        &self,
        column: &BytesColumn,
        positions: &Positions,
        offset_width: Width,
        bytes_max: u64,
        arena: &Arena,
        stream: &Stream,
    ) -> Result<HostBytes> {
        gather_bytes::gather_to_host(&self.work(stream)?, column, positions, offset_width, bytes_max, arena)
    }
}
