//! Devices: where joins run, behind one trait.
//!
//! A device is memory with a budget, and a set of primitives over it. There are two kinds: a slice of the CPU
//! ([`host`]), and an NVIDIA GPU (`cuda`, where an nvcc was found at build time). A strategy in [`join`](crate::join) is written once, against
//! [`Device`], and runs unchanged on either.
//!
//! ```text
//!   host memory ── copy_in ──►  columns ─ pack_keys ─► keys ─┬─ (as they lie) ── build_table ── probe_table ─┐
//!                                                            ├─ partition ────── match_partitions ───────────┤
//!                                                            └─ sort ─────────── match_sorted ───────────────┤
//!   host memory ◄─ gather_to_host ── positions ◄─ expand / select_matches / select_flags ◄──── matches ◄─────┘
//! ```
//!
//! [`join_partitions`](Device::join_partitions) goes from partitions to joined rows in one step, for devices that gain by it.
//!
//! # Vocabulary
//! * *Position*: the place of a row in an arrangement (original, partitioned or sorted), 32 bits. A device is never given
//!   more than [`ROWS_MAX`] rows of one side at a time.
//! * *Arrangement*: rows in some order, with what was carried along: original row numbers, or payload columns.
//! * *Matches*: for each probe row of a range, the run of build positions that have its key: `first` and `count`. All
//!   three ways of matching give this same shape, because each keeps equal build keys adjacent.
//!
//! # Execution model
//! Work is queued on a [`Stream`] and done in order; two streams may overlap. A call may return before its work is done;
//! what it returns can be given to later calls on the same stream at once, to another stream after an [`Event`], and
//! to the CPU after [`Device::wait`] or [`Device::synchronize`]. Calls whose result is a number or has a data-dependent size wait by
//! themselves. (On host devices every call is finished when it returns.) A stream carries its job's [`CancelFlag`]:
//! once raised, a primitive returns [`Error::Cancelled`](crate::Error::Cancelled) at the next morsel.
//!
//! This room knows nothing of Arrow types beyond buffers, nor of tables, jobs or the wire.

mod cache;
mod cancel;
mod crew;
#[cfg(dovetail_cuda)]
#[allow(unsafe_code)]
pub mod cuda;
mod fault;
pub mod host;
mod loss;
mod open;
mod phase;
mod stream;
mod types;
mod values;

use std::any::Any;
use std::fmt::Debug;
use std::ops::Range;
use std::sync::{Arc, Weak};

use arrow::buffer::Buffer;

pub use cache::{CacheStats, ColumnRows};
pub use cancel::CancelFlag;
pub use loss::set_process_of_one_device;
pub use open::{gpu_count, open_device, open_gpu, parse_device, why_no_gpu};
pub use phase::in_phase;
pub use stream::{DeviceHandle, Event, Spared, SparedBytes, Stream, WorkTime};
pub use types::{
    BitSlice, Bounds, BoundsOnDevice, Carry, Column, DeviceBuffer, DeviceId, DeviceInfo, DeviceKind, DeviceMemory,
    Filter, Grouping, HostColumn, JoinedPartitions, JoinedRows, KeyEncoding, KeyField, KeyWidth, Keys, Matches, NO_ROW,
    PARTS_MAX, PackedKeys, Pairs, PartitionMatches, Partitions, Positions, ROWS_MAX, RadixBits, Runs, Sorted, Table,
    Unmatched, Wanted, Which, Width,
};
pub use values::{
    BytesColumn, BytesPart, Hashing, HostBytes, KeyValues, SHORT_BYTES_MAX, VALUE_FIELDS_MAX, ValueField, length_bits,
};

use crate::Result;
use crate::memory::{Arena, Budget, Pin};

/// Memory with a budget and the primitives of joins over it.
///
/// Row counts are in rows and sizes in bytes. Errors, for every call: [`Exhausted`](crate::Error::Exhausted) when the
/// device's budget refuses, [`Cancelled`](crate::Error::Cancelled) when the stream's job was stopped,
/// [`Unavailable`](crate::Error::Unavailable) when the device is lost, [`Internal`](crate::Error::Internal) for a defect
/// of ours. Arguments that contradict each other (columns of unequal length, a buffer of another device) are our
/// mistakes, and panic.
pub trait Device: Send + Sync + Debug {
    /// Which device this is.
    fn id(&self) -> DeviceId;

    /// What it is made of, and the sizes it works best with.
    fn info(&self) -> &DeviceInfo;

    /// The memory that its buffers are taken from.
    fn memory(&self) -> &Budget;

    /// Whether it can still work, as far as is known without asking it for anything.
    ///
    /// # Errors
    /// [`Unavailable`](crate::Error::Unavailable) when it is lost, maybe by what was done on another device.
    fn check(&self) -> Result<()> {
        Ok(())
    }

    /// Whether from now on it adds up what its work takes by its own clock, where it has one: that costs some microseconds for each piece
    /// of work.
    ///
    /// # Errors
    /// [`Unsupported`](crate::Error::Unsupported) when it cannot.
    fn add_up_times(&self, _on: bool) -> Result<()> {
        Ok(())
    }

    /// What its work took by its own clock since this was last asked, where that is added up ([`Device::add_up_times`], or always with
    /// `DOVETAIL_GPU_OBSERVER=times`): of the streams that are no longer used.
    fn take_times(&self) -> Vec<WorkTime> {
        Vec::new()
    }

    /// Runs `work` where its parallel parts, such as gathering strings, use the CPU threads that belong to this device: its
    /// own threads, for a host device. Returns when it is done. A thread of theirs that waits for its parts takes up whatever else it was
    /// given: where several streams are at work, no work may be given to it that waits for what another stream holds.
    fn beside(&self, work: &mut (dyn FnMut() + Send));

    /// Runs `work` on so many threads at once, no more than there are [`streams`](DeviceInfo::streams), which do nothing else until it is
    /// done on all: it may wait for what another of them holds.
    ///
    /// # Errors
    /// [`Exhausted`](crate::Error::Exhausted) when the system refuses threads.
    fn on_stream_threads(&self, threads: usize, work: &(dyn Fn() + Sync)) -> Result<()> {
        std::thread::scope(|scope| (0..threads).for_each(|_| drop(scope.spawn(work))));
        Ok(())
    }

    /// What keeps host memory in place, so that this and all other devices of its kind copy it by themselves. `None` where copies
    /// need nothing of the sort.
    fn pin(&self) -> Option<Arc<dyn Pin>> {
        None
    }

    // ---- Several jobs at a time ----------------------------------------------------------------------------------

    /// How many jobs it can run at a time, with a view of itself for each ([`Device::for_job`]).
    fn jobs_max(&self) -> usize {
        1
    }

    /// This device for one job, which the calling thread runs: the same in all but its CPU threads, and its memory, which is
    /// [`Device::memory`] or a part of that which was reserved for the job. What one job does, or that it is stopped, is nothing to others
    /// beside it.
    ///
    /// # Errors
    /// [`Error::Exhausted`] when the system refuses threads.
    fn for_job(&self, memory: Budget) -> Result<Arc<dyn Device>>;

    // ---- Streams -------------------------------------------------------------------------------------------------

    /// A new queue of work for a job.
    fn stream(&self, cancel: CancelFlag) -> Result<Stream>;

    /// Marks the work queued on `stream` so far.
    fn record_event(&self, stream: &Stream) -> Result<Event>;

    /// Makes later work on `stream` wait for `event`, which may be of another stream.
    fn wait_event(&self, event: &Event, stream: &Stream) -> Result<()>;

    /// Waits on the CPU until the work of `stream` that `event` marks is done, and reports its first failure. Later work of the
    /// stream goes on.
    fn wait(&self, event: &Event, stream: &Stream) -> Result<()>;

    /// Waits on the CPU until all work queued on `stream` is done, and reports its first failure.
    fn synchronize(&self, stream: &Stream) -> Result<()>;

    /// From now on a buffer is given back in the order of that stream's work, which waits for all that other streams do with it: who drops it
    /// need not know what is still queued there. A column that the device keeps is given back by whoever keeps it, all the same.
    fn hand_over(&self, _buffer: &DeviceBuffer, _stream: &Stream) {}

    // ---- Transfers -----------------------------------------------------------------------------------------------

    /// Brings byte ranges of host memory to the device, one after the other in one buffer. Without an emulated link a
    /// host device takes a single part as it is, without copying.
    fn copy_in(&self, parts: &[Buffer], stream: &Stream) -> Result<DeviceBuffer>;

    /// As [`Device::copy_in`], for the values of those rows: a device that keeps columns may have them already. What it answers is read
    /// only.
    fn copy_in_column(&self, _rows: &ColumnRows, parts: &[Buffer], stream: &Stream) -> Result<DeviceBuffer> {
        self.copy_in(parts, stream)
    }

    /// From now on, columns that were copied in stay in up to so many bytes of memory that no job needs. A device that reads
    /// host memory as it lies, or keeps columns already, changes nothing.
    fn keep_columns(&self, _limit_bytes: u64) -> Result<()> {
        Ok(())
    }

    /// What of a table it keeps.
    fn kept_rows(&self, _table: &Weak<dyn Any + Send + Sync>) -> Vec<ColumnRows> {
        Vec::new()
    }

    /// How much it keeps; `None` from a device that keeps nothing.
    fn cache_stats(&self) -> Option<CacheStats> {
        None
    }

    /// Brings bit ranges (validity, booleans) to the device, one after the other in one bitmap that starts at bit 0.
    fn copy_in_bits(&self, parts: &[BitSlice], stream: &Stream) -> Result<DeviceBuffer>;

    /// Brings a buffer's first `len` bytes back to host memory, into a piece of the arena. Waits.
    fn copy_out(&self, buffer: &DeviceBuffer, len: usize, arena: &Arena, stream: &Stream) -> Result<Buffer>;

    /// All of a buffer once more, on the device. No join does this: it shows what the device's memory can do at its best.
    fn copy(&self, buffer: &DeviceBuffer, stream: &Stream) -> Result<DeviceBuffer>;

    // ---- Keys and arrangements -------------------------------------------------------------------------------------

    /// Packs one or several key columns into one key of fixed width per row, such that keys are equal exactly when all
    /// fields are. Rows with a null in a field that does not match nulls are left out, and the row numbers of those that
    /// stay are returned beside the keys.
    fn pack_keys(&self, fields: &[KeyField], width: KeyWidth, stream: &Stream) -> Result<PackedKeys>;

    /// Brings values of variable length to the device, those of all parts one after the other, without their validity. For a device that
    /// [works on them](DeviceInfo::works_on_text), and so are the four that follow. `offset_width`: [`Width::W4`] or [`Width::W8`].
    fn copy_in_bytes(&self, _parts: &[BytesPart], _offset_width: Width, _stream: &Stream) -> Result<BytesColumn> {
        unreachable!("the host makes keys for this device")
    }

    /// Values of at most `bytes_max` bytes, which are no more than [`SHORT_BYTES_MAX`], as numbers of the narrowest key width: the first byte on
    /// top, zeros up to `bytes_max` bytes below the last, and then the length, in as few bits as that many need. So equal numbers are
    /// equal values, and less is less.
    fn short_values(&self, _bytes: &BytesColumn, _bytes_max: usize, _stream: &Stream) -> Result<Column> {
        unreachable!("the host makes keys for this device")
    }

    /// Hashes one or several key columns, of which there are no more than [`VALUE_FIELDS_MAX`], into one key of 16 bytes per row: rows whose
    /// values are equal have equal keys, and others only by an accident that nobody who does not know the seed can bring about. Rows
    /// without a key are left out as by [`pack_keys`](Self::pack_keys).
    fn hash_keys(&self, _fields: &[ValueField], _hashing: Hashing, _stream: &Stream) -> Result<PackedKeys> {
        unreachable!("the host makes keys for this device")
    }

    /// Which of the pairs, by their places in ascending order, are of rows whose values differ, of those that have a row of both sides.
    /// Waits.
    fn differing_pairs(
        &self,
        _build: &[ValueField],
        _probe: &[ValueField],
        _pairs: &Pairs,
        _stream: &Stream,
    ) -> Result<Positions> {
        unreachable!("the host makes keys for this device")
    }

    /// Whether all rows of each run of equal keys have equal values: `keys` are the hashes of `rows`, of which there are as many. Waits.
    fn are_runs_uniform(
        &self,
        _fields: &[ValueField],
        _rows: &Positions,
        _keys: &Keys,
        _stream: &Stream,
    ) -> Result<bool> {
        unreachable!("the host makes keys for this device")
    }

    /// A filter of build keys, over which probe keys pass before their rows are arranged.
    fn build_filter(&self, keys: &Keys, stream: &Stream) -> Result<Filter>;

    /// The keys that may be among those of the filter, in their order, and which rows they are of. All that are among them
    /// pass, and few others. Waits.
    fn filter_keys(&self, filter: &Filter, keys: &PackedKeys, stream: &Stream) -> Result<PackedKeys>;

    /// Partitions rows by `bits` of the mixed key, and everything carried with them. Order within a partition is
    /// unspecified but the same for the keys and all that is carried. Where there are more bits than one pass resolves
    /// ([`DeviceInfo::pass_bits_max`]), the device makes several.
    fn partition(&self, keys: &Keys, carry: &[Carry], bits: RadixBits, stream: &Stream) -> Result<Partitions>;

    /// Makes equal keys adjacent within each partition, moving everything carried with them.
    fn group_partitions(&self, partitions: Partitions, stream: &Stream) -> Result<Partitions>;

    /// Sorts rows by key (as unsigned integers) and everything carried with them.
    fn sort(&self, keys: &Keys, carry: &[Carry], stream: &Stream) -> Result<Sorted>;

    /// Whether the keys are in ascending order (as unsigned integers) already. Waits.
    fn is_sorted(&self, keys: &Keys, stream: &Stream) -> Result<bool>;

    // ---- Matching ----------------------------------------------------------------------------------------------------

    /// One hash table over all keys, as they lie. Where keys repeat, [`Table::order`] lists rows with equal keys adjacent,
    /// and matches are positions in that list; where all are distinct it is `None`, and matches are row positions.
    ///
    /// `repeats`: some key is expected to be there twice. A device that tries first whether all are distinct then need not.
    fn build_table(&self, keys: &Keys, repeats: bool, stream: &Stream) -> Result<Table>;

    /// The perfect-hash table of distinct keys in `key_min..=key_max`: an array indexed by `key - key_min`. `None` when a
    /// key repeats or lies outside. Waits.
    fn build_dense_table(&self, keys: &Keys, key_min: u128, key_max: u128, stream: &Stream) -> Result<Option<Table>>;

    /// Matches probe rows `rows` against a table.
    fn probe_table(&self, table: &Table, probe: &Keys, rows: Range<usize>, stream: &Stream) -> Result<Matches>;

    /// Matches the probe rows of `partitions` against the build rows of the same partitions, with a table per partition
    /// that lives no longer than it is needed. Answers [`PartitionMatches::RepeatedBuildKeys`], and no matches, when
    /// `build` was not grouped and a key of it repeats.
    fn match_partitions(
        &self,
        build: &Partitions,
        probe: &Partitions,
        partitions: Range<usize>,
        stream: &Stream,
    ) -> Result<PartitionMatches>;

    /// Joins the rows of those partitions in one go, whatever repeats: matching, expanding and gathering of what was carried.
    /// `None`, and nothing done, where a partition has so many build rows that grouping and [matching](Self::match_partitions) them
    /// is the better way. Waits.
    fn join_partitions(
        &self,
        build: &Partitions,
        probe: &Partitions,
        partitions: Range<usize>,
        wanted: Wanted,
        stream: &Stream,
    ) -> Result<Option<JoinedPartitions>>;

    /// Matches probe rows `rows` of sorted keys against sorted build keys: by merge path, or by tiles of probe rows, each with its bounds in
    /// the build side.
    fn match_sorted(&self, build: &Keys, probe: &Keys, rows: Range<usize>, stream: &Stream) -> Result<Matches>;

    // ---- From matches to rows ----------------------------------------------------------------------------------------

    /// The pairs number `pairs` (of [`Matches::pair_count`] for that `unmatched`) in order of probe position. With
    /// [`Unmatched::Emit`], a probe row without a match gives one pair whose build position is [`NO_ROW`].
    fn expand(&self, matches: &Matches, pairs: Range<u64>, unmatched: Unmatched, stream: &Stream) -> Result<Pairs>;

    /// Pairs, none of which lacks a build row, by the part of the build side that they refer to: those of the first `1 << part_bits` build
    /// positions, then those of the next ones, and so on, within a part in no order; and where the pairs of each of `parts` parts
    /// start and the last end. Build positions then count from the start of their part. There are at most [`PARTS_MAX`] parts. Waits.
    fn split_pairs(&self, pairs: &Pairs, part_bits: u32, parts: usize, stream: &Stream) -> Result<(Pairs, Vec<usize>)>;

    /// The positions of the probe rows of `matches` that have a match, or that have none.
    fn select_matches(&self, matches: &Matches, which: Which, stream: &Stream) -> Result<Positions>;

    /// A byte per row, all zero: which rows have been matched so far.
    fn new_flags(&self, rows: usize, stream: &Stream) -> Result<DeviceBuffer>;

    /// Sets the flag of every build position that `matches` refers to.
    fn mark_build(&self, matches: &Matches, flags: &DeviceBuffer, stream: &Stream) -> Result<()>;

    /// Sets the flag at every position listed; [`NO_ROW`] is passed over.
    fn mark(&self, positions: &Positions, flags: &DeviceBuffer, stream: &Stream) -> Result<()>;

    /// The positions whose flag is set, or is not set, in ascending order.
    fn select_flags(&self, flags: &DeviceBuffer, rows: usize, which: Which, stream: &Stream) -> Result<Positions>;

    /// Looks positions up in a list of positions: `map[positions[i]]`, [`NO_ROW`] staying as it is. Composes arrangements.
    fn compose(&self, map: &Positions, positions: &Positions, stream: &Stream) -> Result<Positions>;

    /// Those entries of each list, one list after the other in one. None of them is [`NO_ROW`].
    fn concat(&self, lists: &[(&Positions, Range<usize>)], stream: &Stream) -> Result<Positions>;

    /// The rows of `column` at `positions`, on the device. [`NO_ROW`] gives a null.
    fn gather(&self, column: &Column, positions: &Positions, stream: &Stream) -> Result<Column>;

    /// The rows of `column` at `positions`, written straight to host memory. [`NO_ROW`] gives a null. The buffers are
    /// complete after a [`Device::wait`] for an event that is recorded later, or the next [`Device::synchronize`]; do not read them
    /// earlier.
    fn gather_to_host(
        &self,
        column: &Column,
        positions: &Positions,
        arena: &Arena,
        stream: &Stream,
    ) -> Result<HostColumn>;

    /// The same of several columns, each at positions of its own. Columns may share a piece of the arena.
    fn gather_all_to_host(
        &self,
        columns: &[(&Column, &Positions)],
        arena: &Arena,
        stream: &Stream,
    ) -> Result<Vec<HostColumn>> {
        columns.iter().map(|(column, positions)| self.gather_to_host(column, positions, arena, stream)).collect()
    }

    /// The same of values of variable length, for a device that [works on them](DeviceInfo::works_on_text), with offsets of that width,
    /// [`Width::W4`] or [`Width::W8`]. Waits for how many bytes they have.
    ///
    /// # Errors
    /// [`Invalid`](crate::Error::Invalid) where these are more than `bytes_max`, or than the offsets can say.
    fn gather_bytes_to_host(
        &self,
        _column: &BytesColumn,
        _positions: &Positions,
        _offset_width: Width,
        _bytes_max: u64,
        _arena: &Arena,
        _stream: &Stream,
    ) -> Result<HostBytes> {
        unreachable!("the host gathers text for this device")
    }

    /// Positions as 32-bit numbers in host memory. Waits.
    fn positions_to_host(&self, positions: &Positions, arena: &Arena, stream: &Stream) -> Result<Buffer>;
}
