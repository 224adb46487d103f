//! Devices: where joins run, behind one trait.
//!
//! A device is memory with a budget, and a set of primitives over it. There are two kinds: a slice
//! of the CPU ([`host`]), and an NVIDIA GPU (`cuda`, where an nvcc was found at build time). A
//! strategy in [`join`](crate::join) is written once, against [`Device`], and runs unchanged on
//! either.
//!
//! ```text
//!   host memory ── copy_in ──► columns ── pack_keys ──► keys, then one of
//!     (in their given order) ── build_table ── probe_table ──► matches
//!     partition ── match_partitions ─────────────────────────► matches
//!     sort ── match_sorted ──────────────────────────────────► matches
//!   matches ── expand / select_matches / select_flags ──► positions
//!   positions ── gather_to_host ──► host memory
//! ```
//!
//! [`join_partitions`](Device::join_partitions) goes from partitions to joined rows in one step,
//! for devices that gain by it.
//!
//! # Vocabulary
//! * *Position*: the place of a row in a layout (original, partitioned or sorted), 32 bits. A
//!   device is never given more than [`ROWS_MAX`] rows of one side at a time.
//! * *Layout*: rows in some order, and their payload: the data that moves with the keys, which
//!   is original row numbers or columns.
//! * *Matches*: for each probe row of a range, the run of build positions that have its key:
//!   `first` and `count`. All three ways of matching return this shape, because each keeps equal
//!   build keys adjacent.
//!
//! # Execution model
//! Work is queued on a [`Stream`] and done in order. Two streams may overlap. A call may return
//! before its work is done. Later calls on the same stream may use its result at once, another
//! stream after an [`Event`], and the CPU after [`Device::wait`] or [`Device::synchronize`]. Calls
//! that return a number, or a result of data-dependent size, wait for their own work. On host
//! devices every call is finished when it returns. A stream carries its job's [`CancelFlag`]: once
//! the flag is raised, a primitive returns [`Error::Cancelled`](crate::Error::Cancelled) at the
//! next morsel.
//!
//! This room knows nothing of Arrow types beyond buffers, nor of tables, jobs or the wire.

mod affinity;
mod cache;
mod cancel;
mod copies;
mod cpu_pool;
#[cfg(dovetail_cuda)]
#[allow(unsafe_code)]
pub mod cuda;
mod fault;
mod gpu_uuid;
pub mod host;
mod info;
mod loss;
// NVML needs no kernels, so a build without them has it too.
#[allow(unsafe_code)]
#[path = "cuda/nvml.rs"]
mod nvml;
mod open;
mod options;
mod pattern;
mod peers;
mod phase;
mod stream;
mod strings;
mod types;
mod values;

use std::fmt::Debug;
use std::ops::Range;
use std::sync::Arc;

use arrow::buffer::Buffer;

pub use affinity::bind_thread;
pub use cache::{CacheOps, CacheStats, ColumnRows};
pub use cancel::CancelFlag;
pub use copies::Copies;
pub use gpu_uuid::{VISIBLE_GPUS, is_slice, unknown_visible_gpu, visible_to_process_of};
pub use info::{Capabilities, ComputeCapability, DeviceFacts, DeviceInfo, Tuning};
pub use loss::set_process_of_one_device;
pub use nvml::nvml_gpus;
pub use open::{
    GpuIdentity, GpuPlace, GpuSeen, gpu_count, gpu_identities, gpus_seen, open_device, open_device_at, open_gpu,
    parse_device, why_no_gpu,
};
pub use options::TestOptions;
pub use pattern::Pattern;
pub use peers::{PeerOps, PeerWindow, peers, shares_no_memory};
pub use phase::{Phase, in_phase};
pub use stream::{DeviceHandle, Event, Stream, TimingOps, TransferSavings, TransferSavingsCounter, WorkTime};
pub use strings::{StringOps, strings};
pub use types::{
    BitSlice, Bounds, BoundsOnDevice, Column, DeviceBuffer, DeviceId, DeviceKind, DeviceMemory, Filter, Grouping,
    HostColumn, JoinedPartitions, JoinedRows, KeyEncoding, KeyField, KeyWidth, Keys, Matches, NO_ROW, PARTS_MAX,
    PackedKeys, Pairs, PartitionMatches, Partitions, Payload, Positions, ROWS_MAX, RadixBits, Runs, Sorted, Table,
    Unmatched, Wanted, Which, Width,
};
pub use values::{
    BytesColumn, BytesPart, Hashing, HostBytes, KeyValues, SHORT_BYTES_MAX, VALUE_FIELDS_MAX, ValueField, length_bits,
};

use crate::Result;
use crate::memory::{Arena, Budget, Pin};

/// Memory with a budget and the primitives of joins over it.
///
/// Row counts are in rows and sizes in bytes. Errors, for every call:
/// [`Exhausted`](crate::Error::Exhausted) when the device's budget refuses,
/// [`Cancelled`](crate::Error::Cancelled) when the stream's job was stopped,
/// [`Unavailable`](crate::Error::Unavailable) when the device is lost,
/// [`Internal`](crate::Error::Internal) for a defect of ours. Arguments that contradict each other
/// (columns of unequal length, a buffer of another device) are our mistakes, and panic.
pub trait Device: Send + Sync + Debug {
    /// The device's kind and number.
    fn id(&self) -> DeviceId;

    /// Hardware of the device.
    fn facts(&self) -> &DeviceFacts;

    /// Sizes that the device works best with.
    fn tuning(&self) -> &Tuning;

    /// The memory that its buffers are taken from.
    fn memory(&self) -> &Budget;

    /// Returns an error if the device is known to be lost. Asks nothing of the device.
    ///
    /// # Errors
    /// [`Unavailable`](crate::Error::Unavailable) when the device is lost, possibly through work on
    /// another device.
    fn check(&self) -> Result<()> {
        Ok(())
    }

    /// Runs `work` so that its parallel parts, such as gathering strings, use the CPU threads of
    /// this device. On a host device these are its own threads. Returns when `work` is done. A
    /// thread that waits for parts of `work` takes up any other work of these threads. If several
    /// streams are at work, `work` must not wait for a thing that another stream holds.
    fn install(&self, work: &mut (dyn FnMut() + Send));

    /// Runs `work` on `threads` threads at once, at most [`streams`](Tuning::streams). The
    /// threads do nothing else until `work` is done on all, so it may wait for a thing that another
    /// of them holds.
    ///
    /// # Errors
    /// [`Exhausted`](crate::Error::Exhausted) when the system refuses threads.
    fn on_stream_threads(&self, threads: usize, work: &(dyn Fn() + Sync)) -> Result<()> {
        std::thread::scope(|scope| (0..threads).for_each(|_| drop(scope.spawn(work))));
        Ok(())
    }

    /// Returns the pinner that keeps host memory in place, so that all devices of this kind can
    /// copy it without the CPU. `None` where copies need no pinning.
    fn pin(&self) -> Option<Arc<dyn Pin>> {
        None
    }

    // ---- Several jobs at a time -----------------------------------------------------------------

    /// Maximum number of concurrent jobs, each with its own view of the device
    /// ([`Device::for_job`]).
    fn jobs_max(&self) -> usize {
        1
    }

    /// Returns a view of this device for one job, which the calling thread runs. The view has its
    /// own CPU threads. Its memory is [`Device::memory`] or a part of it that was reserved for the
    /// job. The work of one job, or its stop, does not affect other jobs.
    ///
    /// # Errors
    /// [`Exhausted`](crate::Error::Exhausted) when the system refuses threads.
    fn for_job(&self, memory: Budget) -> Result<Arc<dyn Device>>;

    // ---- Streams --------------------------------------------------------------------------------

    /// Creates a queue of work for a job.
    fn stream(&self, cancel: CancelFlag) -> Result<Stream>;

    /// Marks the work queued on `stream` so far.
    fn record_event(&self, stream: &Stream) -> Result<Event>;

    /// Makes later work on `stream` wait for `event`, which may belong to another stream.
    fn wait_event(&self, event: &Event, stream: &Stream) -> Result<()>;

    /// Waits on the CPU until the work of `stream` that `event` marks is done. Reports the first
    /// failure of that work. Later work of the stream goes on.
    fn wait(&self, event: &Event, stream: &Stream) -> Result<()>;

    /// Waits on the CPU until all work queued on `stream` is done. Reports the first failure of
    /// that work.
    fn synchronize(&self, stream: &Stream) -> Result<()>;

    /// Makes `stream` the stream in whose order the buffer is freed. `stream` must wait for other
    /// streams' work on the buffer. Callers may drop the buffer while work on it is queued. A
    /// cached column is still freed by its cache.
    fn record_stream(&self, _buffer: &DeviceBuffer, _stream: &Stream) {}

    // ---- Transfers ------------------------------------------------------------------------------

    /// Brings byte ranges of host memory to the device, one after the other in one buffer. Without
    /// an emulated link, a host device uses a single part in place, without copying.
    fn copy_in(&self, parts: &[Buffer], stream: &Stream) -> Result<DeviceBuffer>;

    /// Brings bit ranges (validity, booleans) to the device, one after the other in one bitmap that
    /// starts at bit 0.
    fn copy_in_bits(&self, parts: &[BitSlice], stream: &Stream) -> Result<DeviceBuffer>;

    /// Copies a buffer's first `len` bytes to host memory, into a piece of the arena. Waits.
    fn copy_out(&self, buffer: &DeviceBuffer, len: usize, arena: &Arena, stream: &Stream) -> Result<Buffer>;

    /// Copies a whole buffer on the device. No join does this: it measures the best rate of the
    /// device's memory.
    fn copy(&self, buffer: &DeviceBuffer, stream: &Stream) -> Result<DeviceBuffer>;

    // ---- Keys and layouts ------------------------------------------------------------------

    /// Packs one or several key columns into one key of fixed width per row. Keys are equal exactly
    /// when all fields are equal. Rows with a null in a field that does not match nulls are left
    /// out. The result then includes the row numbers of the other rows.
    fn pack_keys(&self, fields: &[KeyField], width: KeyWidth, stream: &Stream) -> Result<PackedKeys>;

    /// Builds a filter from build keys. Probe keys pass it before their rows are transformed.
    fn build_filter(&self, keys: &Keys, stream: &Stream) -> Result<Filter>;

    /// Returns the keys that the filter may contain, in their order, with their row numbers. All
    /// keys that the filter was built from pass, and few others. Waits.
    fn filter_keys(&self, filter: &Filter, keys: &PackedKeys, stream: &Stream) -> Result<PackedKeys>;

    /// Partitions rows by `bits` of the mixed key, and their payload. Order within a
    /// partition is unspecified but the same for the keys and the payload. If there are
    /// more bits than one pass resolves ([`Tuning::pass_bits_max`]), the device makes several
    /// passes.
    fn partition(&self, keys: &Keys, payload: &[Payload], bits: RadixBits, stream: &Stream) -> Result<Partitions>;

    /// Makes equal keys adjacent within each partition, and moves their payload.
    fn group_partitions(&self, partitions: Partitions, stream: &Stream) -> Result<Partitions>;

    /// Sorts rows by key (as unsigned integers) and their payload.
    fn sort(&self, keys: &Keys, payload: &[Payload], stream: &Stream) -> Result<Sorted>;

    /// True if the keys are in ascending order (as unsigned integers) already. Waits.
    fn is_sorted(&self, keys: &Keys, stream: &Stream) -> Result<bool>;

    // ---- Matching -------------------------------------------------------------------------------

    /// Builds one hash table over all keys, in their given order. If keys repeat, [`Table::order`]
    /// lists rows with equal keys adjacent, and matches are positions in that list. If all keys are
    /// distinct, it is `None`, and matches are row positions.
    ///
    /// `repeats`: some key is expected to repeat. A device then skips its first attempt with
    /// distinct keys, if it makes one.
    fn build_table(&self, keys: &Keys, repeats: bool, stream: &Stream) -> Result<Table>;

    /// Builds the perfect-hash table of distinct keys in `key_min..=key_max`: an array indexed by
    /// `key - key_min`. `None` when a key repeats or is out of range. Waits.
    fn build_dense_table(&self, keys: &Keys, key_min: u128, key_max: u128, stream: &Stream) -> Result<Option<Table>>;

    /// Matches probe rows `rows` against a table.
    fn probe_table(&self, table: &Table, probe: &Keys, rows: Range<usize>, stream: &Stream) -> Result<Matches>;

    /// Matches the probe rows of `partitions` against the build rows of the same partitions. Each
    /// partition has its own table, freed as soon as it is no longer needed. Returns
    /// [`PartitionMatches::RepeatedBuildKeys`], and no matches, when `build` was not grouped and
    /// one of its keys repeats.
    fn match_partitions(
        &self,
        build: &Partitions,
        probe: &Partitions,
        partitions: Range<usize>,
        stream: &Stream,
    ) -> Result<PartitionMatches>;

    /// Joins the rows of the given partitions in one step, also with repeated keys: matches,
    /// expands and gathers the payload columns. Returns `None` without any work if a partition has
    /// too many build rows. It is better to group such partitions and then
    /// [match](Self::match_partitions) them. Waits.
    fn join_partitions(
        &self,
        build: &Partitions,
        probe: &Partitions,
        partitions: Range<usize>,
        wanted: Wanted,
        stream: &Stream,
    ) -> Result<Option<JoinedPartitions>>;

    /// Matches probe rows `rows` of sorted keys against sorted build keys. Devices use merge path,
    /// or tiles of probe rows, each with its bounds in the build side.
    fn match_sorted(&self, build: &Keys, probe: &Keys, rows: Range<usize>, stream: &Stream) -> Result<Matches>;

    // ---- From matches to rows -------------------------------------------------------------------

    /// Returns the pairs with indices `pairs`, out of [`Matches::pair_count`] for this `unmatched`,
    /// in order of probe position. With [`Unmatched::Emit`], a probe row without a match gives one
    /// pair whose build position is [`NO_ROW`].
    fn expand(&self, matches: &Matches, pairs: Range<u64>, unmatched: Unmatched, stream: &Stream) -> Result<Pairs>;

    /// Groups pairs by the part of the build side that they refer to. Every pair must have a build
    /// row. Part `p` has the `p`-th `1 << part_bits` build positions. Pairs within a part are in no
    /// order, and their build positions count from the start of the part. Also returns the start of
    /// each of the `parts` parts in the pairs, and the end of the last. There are at most
    /// [`PARTS_MAX`] parts. Waits.
    fn split_pairs(&self, pairs: &Pairs, part_bits: u32, parts: usize, stream: &Stream) -> Result<(Pairs, Vec<usize>)>;

    /// Returns the positions of the probe rows of `matches` that have a match, or that have none.
    fn select_matches(&self, matches: &Matches, which: Which, stream: &Stream) -> Result<Positions>;

    /// Returns one byte per row, all zero, to mark the rows that have been matched.
    fn new_flags(&self, rows: usize, stream: &Stream) -> Result<DeviceBuffer>;

    /// Sets the flag of every build position that `matches` refers to.
    fn mark_build(&self, matches: &Matches, flags: &DeviceBuffer, stream: &Stream) -> Result<()>;

    /// Sets the flag at every listed position, except [`NO_ROW`].
    fn mark(&self, positions: &Positions, flags: &DeviceBuffer, stream: &Stream) -> Result<()>;

    /// Returns the positions whose flag is set, or is not set, in ascending order.
    fn select_flags(&self, flags: &DeviceBuffer, rows: usize, which: Which, stream: &Stream) -> Result<Positions>;

    /// Looks positions up in a list of positions: `map[positions[i]]`. [`NO_ROW`] stays as it is.
    /// Composes row layouts.
    fn compose(&self, map: &Positions, positions: &Positions, stream: &Stream) -> Result<Positions>;

    /// Concatenates the given range of each list. None of the entries is [`NO_ROW`].
    fn concat(&self, lists: &[(&Positions, Range<usize>)], stream: &Stream) -> Result<Positions>;

    /// Returns the rows of `column` at `positions`, on the device. [`NO_ROW`] gives a null.
    fn gather(&self, column: &Column, positions: &Positions, stream: &Stream) -> Result<Column>;

    /// Writes the rows of `column` at `positions` straight to host memory. [`NO_ROW`] gives a null.
    /// The buffers are complete after a [`Device::wait`] for an event that is recorded later, or
    /// the next [`Device::synchronize`]. Do not read them earlier.
    fn gather_to_host(
        &self,
        column: &Column,
        positions: &Positions,
        arena: &Arena,
        stream: &Stream,
    ) -> Result<HostColumn>;

    /// Gathers several columns like [`Device::gather_to_host`], each at its own positions. Columns
    /// may share a piece of the arena.
    fn gather_all_to_host(
        &self,
        columns: &[(&Column, &Positions)],
        arena: &Arena,
        stream: &Stream,
    ) -> Result<Vec<HostColumn>> {
        columns.iter().map(|(column, positions)| self.gather_to_host(column, positions, arena, stream)).collect()
    }

    /// Copies positions as 32-bit numbers to host memory. Waits.
    fn positions_to_host(&self, positions: &Positions, arena: &Arena, stream: &Stream) -> Result<Buffer>;

    // ---- Capabilities ---------------------------------------------------------------------------
    //
    // Operations that only some devices have, each as a trait of its own. What the planner or
    // another process must know about them is a value in `Capabilities`.

    /// Returns the device's work on values of variable length. `None`: the host does it.
    fn strings(&self) -> Option<&dyn StringOps> {
        None
    }

    /// Returns the device's cache of columns. `None` from a device that reads host memory in place.
    fn cache(&self) -> Option<&dyn CacheOps> {
        None
    }

    /// Returns the device's access to the memory of others. `None` from a device that forms no
    /// gangs.
    fn peers(&self) -> Option<&dyn PeerOps> {
        None
    }

    /// Returns the device's measurement of work times. `None` from a device without a clock of its
    /// own.
    fn timing(&self) -> Option<&dyn TimingOps> {
        None
    }
}
