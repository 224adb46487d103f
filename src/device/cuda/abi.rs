//! The whole interface between Rust and the kernels: argument structs and entry points.
//!
//! This file is its one definition. `kernels/dovetail_kernels.h` is generated from it (`cargo test` says when it is out of date,
//! and how to renew it), so that both sides agree on every field.
//!
//! Every entry point queues work on a stream and returns CUDA's error code for the launch; errors of running kernels come
//! with a later call. Pointers are to device memory, and buffers are disjoint. Where a pointer may be null, its comment says
//! so. Scratch is memory whose contents mean nothing before and after; the entry point with `_scratch_bytes` in its name says
//! how much is needed.

use std::ffi::{c_char, c_int, c_void};

/// A CUDA stream, as the driver and the runtime both know it.
pub type DovetailStream = *mut c_void;

/// The most key fields that one call packs, and bitmaps that one call combines.
pub const DOVETAIL_FIELDS_MAX: usize = 8;

/// The most columns that one call moves.
pub const DOVETAIL_MOVES_MAX: usize = 64;

/// The most parts of a build side that pairs are divided by.
pub const DOVETAIL_PARTS_MAX: usize = 32;

/// The most words that one call writes.
pub const DOVETAIL_WORDS_MAX: usize = 32;

/// The most lists that one call puts together.
pub const DOVETAIL_LISTS_MAX: usize = 64;

/// The most rows that one selection looks at. CUB up to 3.0 writes out of bounds where nearly all of 2^31 - 1 rows are selected: its places
/// in the last tile are numbers of 32 bits, and wrap around (NVIDIA/cccl, issue 6584).
pub const DOVETAIL_SELECT_ROWS_MAX: usize = 1 << 30;

/// The most bits that one partition pass resolves.
pub const DOVETAIL_PASS_BITS_MAX: u32 = 8;

/// The most distinct build keys of a partition whose table is built in one round.
pub const DOVETAIL_TABLE_ROWS: u32 = 4096;

/// The most build rows of a partition that are joined in one round.
pub const DOVETAIL_JOIN_ROWS: u32 = 2560;

/// The bytes of shared memory that every kernel fits in. GPUs of compute capability 8.6, 8.9 and 12.0 have no more for a block. A
/// kernel that would use more asks for the GPU's limit first.
pub const DOVETAIL_SHARED_BYTES_MAX: u32 = 99 << 10;

/// A run of equal keys that is longer is listed, and marked by a whole block.
pub const DOVETAIL_LONG_RUN: u32 = 256;

/// Bits as they are, zero-extended.
pub const DOVETAIL_UNSIGNED: u32 = 0;
/// A two's-complement integer, minus the minimum.
pub const DOVETAIL_SIGNED: u32 = 1;
/// An unsigned integer, minus the minimum.
pub const DOVETAIL_OFFSET: u32 = 2;
/// IEEE 754, mapped so that order is kept.
pub const DOVETAIL_FLOAT: u32 = 3;

/// Select rows whose flag is set.
pub const DOVETAIL_FLAG_SET: u32 = 0;
/// Select rows whose flag is not set.
pub const DOVETAIL_FLAG_CLEAR: u32 = 1;
/// Select rows with a match.
pub const DOVETAIL_MATCHED: u32 = 2;
/// Select rows without one.
pub const DOVETAIL_UNMATCHED: u32 = 3;
/// Select rows that are valid in all bitmaps.
pub const DOVETAIL_VALID: u32 = 4;
/// Select rows that are not valid in one of the bitmaps.
pub const DOVETAIL_INVALID: u32 = 6;
/// Select rows whose key passes a filter.
pub const DOVETAIL_PASSES_FILTER: u32 = 7;
/// Select rows whose key differs from the one before: heads of runs.
pub const DOVETAIL_RUN_HEADS: u32 = 5;

/// One key column and its place in the packed key.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct DovetailKeyField {
    /// Values.
    pub data: *const c_void,
    /// A bit per row, or null when all rows are valid.
    pub validity: *const u8,
    /// The minimum that is taken off, as 128 bits.
    pub min_low: u64,
    /// Its upper half.
    pub min_high: u64,
    /// Bytes per value.
    pub width: u32,
    /// `DOVETAIL_UNSIGNED` and so on.
    pub encoding: u32,
    /// Where the lowest bit goes.
    pub shift: u32,
    /// Bits that the encoded value takes; may be 0.
    pub bits: u32,
    /// The bit that a null sets, or -1.
    pub null_bit: i32,
}

/// Packs key columns into keys.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct DovetailPackKeys {
    /// Inputs: the key columns.
    pub fields: [DovetailKeyField; DOVETAIL_FIELDS_MAX],
    /// How many there are.
    pub field_count: u32,
    /// Bytes per key: 4, 8 or 16.
    pub key_bytes: u32,
    /// Rows that have a key; null when all have.
    pub kept: *const u32,
    /// Number of keys.
    pub rows: u64,
    /// Whether the fields are added to what the keys hold already.
    pub accumulate: u32,
    /// Output: `rows` keys.
    pub keys: *mut c_void,
}

/// One key column that is too wide, or beside one that is, and so is hashed and compared.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct DovetailValueField {
    /// Values of fixed width; or the bytes of values of variable length, one after the other, at a multiple of 8 bytes and in whole words
    /// of 8 bytes.
    pub data: *const c_void,
    /// Where each value begins and, one more entry than rows, the last one ends; null for values of fixed width.
    pub begins: *const u64,
    /// A bit per row, or null when all rows are valid.
    pub validity: *const u8,
    /// Bytes per value of fixed width.
    pub width: u32,
    /// `DOVETAIL_UNSIGNED` and so on, with nothing taken off.
    pub encoding: u32,
    /// Whether null is equal to null.
    pub nulls_equal: u32,
}

/// Says where values of variable length begin, of the offsets that each part of a column came with.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct DovetailValueBegins {
    /// Inputs: the offsets of all parts, one more than rows of each.
    pub offsets: *const c_void,
    /// Bytes per offset: 4 or 8.
    pub offset_bytes: u32,
    /// How many parts, at least one; none of them is empty.
    pub parts: u32,
    /// The first row of each part.
    pub part_rows: *const u64,
    /// What is added to the offsets of each part, wrapping.
    pub part_bases: *const u64,
    /// Rows of all parts.
    pub rows: u64,
    /// Output: `rows + 1` numbers.
    pub begins: *mut u64,
}

/// Makes numbers of short values of variable length: the first byte on top, and below the last of `bytes_max` the length.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct DovetailShortValues {
    /// Inputs: the bytes of all values, one after the other, at a multiple of 8 bytes and in whole words of 8 bytes.
    pub data: *const c_void,
    /// Where each value begins and, one more entry than rows, the last one ends.
    pub begins: *const u64,
    /// Number of values.
    pub rows: u64,
    /// What no value is longer than: 15 at the most. What is longer, under a null, becomes zero.
    pub bytes_max: u32,
    /// Bits for the length.
    pub length_bits: u32,
    /// Bytes per number: 4, 8 or 16.
    pub number_bytes: u32,
    /// Output: `rows` numbers.
    pub numbers: *mut c_void,
}

/// Hashes key columns to keys of 16 bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct DovetailHashKeys {
    /// Inputs: the key columns.
    pub fields: [DovetailValueField; DOVETAIL_FIELDS_MAX],
    /// How many there are.
    pub field_count: u32,
    /// Rows that have a key; null when all have.
    pub kept: *const u32,
    /// Number of keys.
    pub rows: u64,
    /// Of the hash.
    pub seed: u64,
    /// Which bits of the hash are kept; the lower half.
    pub mask_low: u64,
    /// The upper half.
    pub mask_high: u64,
    /// Output: `rows` keys.
    pub keys: *mut c_void,
}

/// Counts pairs of rows whose values differ, and flags them.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct DovetailCompareValues {
    /// Inputs: the key columns of one row of each pair.
    pub a: [DovetailValueField; DOVETAIL_FIELDS_MAX],
    /// Those of the other, of the same kinds.
    pub b: [DovetailValueField; DOVETAIL_FIELDS_MAX],
    /// How many there are.
    pub field_count: u32,
    /// One row of each pair, or null for consecutive rows. `NO_ROW` is equal to everything.
    pub a_rows: *const u32,
    /// The first of consecutive rows.
    pub a_start: u32,
    /// The other one, or null.
    pub b_rows: *const u32,
    /// The first of consecutive rows.
    pub b_start: u32,
    /// Keys of 16 bytes, one more than pairs, or null: a pair counts only if its key is the next one's.
    pub keys: *const c_void,
    /// How many pairs.
    pub pairs: u64,
    /// Output: a byte for each pair; may be null.
    pub flags: *mut u8,
    /// Output: how many differ, added to what is there.
    pub differing: *mut u32,
}

/// Lists rows that satisfy a condition, in ascending order.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct DovetailSelect {
    /// `DOVETAIL_FLAG_SET` and so on.
    pub condition: u32,
    /// What is added to every row that is listed.
    pub base: u32,
    /// The first row to look at.
    pub start: u32,
    /// How many rows to look at: [`DOVETAIL_SELECT_ROWS_MAX`] at the most.
    pub rows: u64,
    /// Inputs, one kind of which each condition reads. A byte per row.
    pub flags: *const u8,
    /// Matches: `NO_ROW` where there is none.
    pub first: *const u32,
    /// Bitmaps.
    pub bitmaps: [*const u8; DOVETAIL_FIELDS_MAX],
    /// How many there are.
    pub bitmap_count: u32,
    /// Bytes per key.
    pub key_bytes: u32,
    /// Keys; for heads of runs, equal ones adjacent.
    pub keys: *const c_void,
    /// A filter.
    pub filter_words: *const u64,
    /// Its words less one.
    pub filter_mask: u64,
    /// State.
    pub scratch: *mut c_void,
    /// Its size.
    pub scratch_bytes: u64,
    /// Outputs: room for `rows` positions.
    pub positions: *mut u32,
    /// How many were selected.
    pub selected: *mut u64,
}

/// A column that moves with the keys.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct DovetailMove {
    /// Where from; null for the number of the row itself.
    pub from: *const c_void,
    /// Where to.
    pub to: *mut c_void,
    /// Bytes per value.
    pub width: u32,
}

/// Partitions rows, each parent partition on its own, by bits of the mixed key.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct DovetailPartition {
    /// Inputs: keys.
    pub keys: *const c_void,
    /// Where each parent starts, and at the end the number of rows.
    pub parent_bounds: *const u32,
    /// Number of keys.
    pub rows: u64,
    /// Bytes per key.
    pub key_bytes: u32,
    /// Number of parents.
    pub parents: u32,
    /// Bits of the mixed key that are passed over.
    pub skip: u32,
    /// Bits of this pass, 1 to `DOVETAIL_PASS_BITS_MAX`.
    pub bits: u32,
    /// Whether `bounds` are there already: 1, or 0.
    pub is_counted: u32,
    /// Tiles that a block has on average, from which on a first pass writes nothing but whole sectors.
    pub combined_tiles_min: u32,
    /// What moves. The first is that of the keys.
    pub moves: [DovetailMove; DOVETAIL_MOVES_MAX],
    /// How many columns move.
    pub move_count: u32,
    /// State.
    pub scratch: *mut c_void,
    /// Its size.
    pub scratch_bytes: u64,
    /// Outputs: where each of `parents << bits` partitions starts, and at the end the number of rows.
    pub bounds: *mut u32,
    /// The number of rows of the largest partition; null where nobody asks.
    pub largest: *mut u32,
}

/// Counts what two passes of partitioning find.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct DovetailCountPartitions {
    /// Inputs: keys.
    pub keys: *const c_void,
    /// Number of keys.
    pub rows: u64,
    /// Bytes per key.
    pub key_bytes: u32,
    /// Bits of the mixed key that are passed over.
    pub skip: u32,
    /// Bits of both passes, 1 to `2 * DOVETAIL_PASS_BITS_MAX`.
    pub bits: u32,
    /// Bits of the first pass.
    pub coarse_bits: u32,
    /// State.
    pub scratch: *mut c_void,
    /// Its size.
    pub scratch_bytes: u64,
    /// Outputs: where each of `1 << bits` partitions starts, and at the end the number of rows.
    pub bounds: *mut u32,
    /// The same of the first pass.
    pub coarse_bounds: *mut u32,
}

/// Sorts unsigned integers and the row numbers beside them by some of their bits. Stable.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct DovetailSort {
    /// Inputs: keys of `width` bytes.
    pub keys_in: *const c_void,
    /// Row numbers.
    pub values_in: *const u32,
    /// Number of keys.
    pub rows: u64,
    /// 4 or 8.
    pub width: u32,
    /// The lowest bit that counts.
    pub begin_bit: u32,
    /// The bit after the highest that counts.
    pub end_bit: u32,
    /// State.
    pub scratch: *mut c_void,
    /// Its size.
    pub scratch_bytes: u64,
    /// Outputs: sorted keys.
    pub keys_out: *mut c_void,
    /// Their row numbers.
    pub values_out: *mut u32,
}

/// Makes of each key the integer that it is sorted by.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct DovetailSortImage {
    /// Inputs: keys.
    pub keys: *const c_void,
    /// The row whose image goes to each place; null when they are the same.
    pub order: *const u32,
    /// Number of keys.
    pub rows: u64,
    /// Bytes per key.
    pub key_bytes: u32,
    /// Whether the key is mixed first, and turned left by `skip` bits.
    pub mixed: u32,
    /// See `mixed`.
    pub skip: u32,
    /// For keys of 16 bytes: whether the upper half is wanted.
    pub upper: u32,
    /// Output: images of 4 bytes for keys of 4, else of 8.
    pub images: *mut c_void,
}

/// Whether keys ascend.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct DovetailIsSorted {
    /// Inputs: keys.
    pub keys: *const c_void,
    /// Number of keys.
    pub rows: u64,
    /// Bytes per key.
    pub key_bytes: u32,
    /// Output: set to 1 when a key is smaller than the one before.
    pub unsorted: *mut u32,
}

/// What matching counts, added to what is there.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, bytemuck::Pod, bytemuck::Zeroable)]
pub struct DovetailMatchTotals {
    /// The sum of all run lengths.
    pub total: u64,
    /// Rows with a match.
    pub matched_rows: u64,
    /// The longest run.
    pub longest: u32,
    /// Set to 1 when a build key repeats that must not, or lies outside its range.
    pub unsound: u32,
}

/// Enters keys into one hash table.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct DovetailTableInsert {
    /// Inputs: build keys, in the order of `heads`.
    pub keys: *const c_void,
    /// Where each run of equal keys starts; null when every key is a run.
    pub heads: *const u32,
    /// The first run that is entered.
    pub first: u64,
    /// How many are.
    pub runs: u64,
    /// Bytes per key.
    pub key_bytes: u32,
    /// Slots less one; their number is a power of two.
    pub slot_mask: u64,
    /// Outputs: slots, all bits set where empty.
    pub slots: *mut u64,
    /// `unsound` when a key repeats.
    pub totals: *mut DovetailMatchTotals,
}

/// Looks keys up in a hash table.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct DovetailTableProbe {
    /// Inputs: the table.
    pub slots: *const u64,
    /// Its slots less one.
    pub slot_mask: u64,
    /// Its keys.
    pub build_keys: *const c_void,
    /// Where each of its runs starts, and at the end the number of rows; null when every key is a run.
    pub heads: *const u32,
    /// Probe keys.
    pub probe_keys: *const c_void,
    /// How many.
    pub rows: u64,
    /// Bytes per key.
    pub key_bytes: u32,
    /// Outputs: a position per probe row.
    pub first: *mut u32,
    /// Run lengths; null without `heads`.
    pub count: *mut u32,
    /// Totals.
    pub totals: *mut DovetailMatchTotals,
}

/// Enters distinct keys of a dense range into an array.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct DovetailDenseInsert {
    /// Inputs: build keys.
    pub keys: *const c_void,
    /// The first row that is entered.
    pub first: u64,
    /// How many are.
    pub rows: u64,
    /// The smallest key, as 128 bits.
    pub min_low: u64,
    /// Its upper half.
    pub min_high: u64,
    /// Length of the array.
    pub span: u64,
    /// Bytes per key.
    pub key_bytes: u32,
    /// The row of each key; null when they are as they lie.
    pub row_numbers: *const u32,
    /// Outputs: the position of each key, `NO_ROW` before the call.
    pub positions: *mut u32,
    /// `unsound` when a key repeats or lies outside.
    pub totals: *mut DovetailMatchTotals,
}

/// Looks keys up in an array.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct DovetailDenseProbe {
    /// Inputs: the array.
    pub positions: *const u32,
    /// Its length.
    pub span: u64,
    /// The smallest key, as 128 bits.
    pub min_low: u64,
    /// Its upper half.
    pub min_high: u64,
    /// Probe keys.
    pub probe_keys: *const c_void,
    /// How many.
    pub rows: u64,
    /// Bytes per key.
    pub key_bytes: u32,
    /// Outputs: a position per probe row.
    pub first: *mut u32,
    /// Totals.
    pub totals: *mut DovetailMatchTotals,
}

/// Probe rows of one partition that one block matches.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct DovetailMatchUnit {
    /// The partition.
    pub partition: u32,
    /// The first probe row.
    pub start: u32,
    /// The end of the probe rows.
    pub end: u32,
}

/// Lists what blocks do that match or join partitions: each partition has a block, or one for so many of its probe rows.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct DovetailListUnits {
    /// Inputs: where the probe rows of each partition start, and at the end where they end.
    pub probe_bounds: *const u32,
    /// How many partitions.
    pub partitions: u32,
    /// Probe rows of a partition that a block has to itself, at the most; no fewer than the next.
    pub whole_rows: u32,
    /// Probe rows of a block of partitions that have more.
    pub unit_rows: u32,
    /// State.
    pub scratch: *mut c_void,
    /// Its size, at least [`dovetail_list_units_scratch_bytes`].
    pub scratch_bytes: u64,
    /// Output: units by partition, and after the last those that do nothing.
    pub units: *mut DovetailMatchUnit,
    /// Room for units: at least as many as there are.
    pub unit_count: u32,
}

/// Matches partitions, each with a table in shared memory.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct DovetailMatchPartitions {
    /// Inputs: build keys by partition.
    pub build_keys: *const c_void,
    /// Where each run of equal keys starts, and at the end the number of rows; null when every key is a run.
    pub heads: *const u32,
    /// Where the runs of each partition start: in runs.
    pub build_bounds: *const u32,
    /// Probe keys by partition.
    pub probe_keys: *const c_void,
    /// What each block does; nothing where a unit has no rows.
    pub units: *const DovetailMatchUnit,
    /// How many blocks.
    pub unit_count: u32,
    /// Bytes per key.
    pub key_bytes: u32,
    /// The probe row whose match comes first in the outputs.
    pub first_row: u32,
    /// Outputs: a position per probe row.
    pub first: *mut u32,
    /// Run lengths; null without `heads`.
    pub count: *mut u32,
    /// Totals; `unsound` when a key repeats.
    pub totals: *mut DovetailMatchTotals,
}

/// A column of joined rows.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct DovetailJoinColumn {
    /// Values of a side's rows by partition; null for the numbers of the rows themselves, 32 bits each.
    pub from: *const c_void,
    /// Values of the joined rows.
    pub to: *mut c_void,
    /// Bytes per value: 1, 2, 4, 8, 16 or 32.
    pub width: u32,
    /// Whether it is the probe side's: 1, or 0 for the build side's.
    pub of_probe: u32,
}

/// Joins partitions, each with a table in shared memory, and writes the joined rows.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct DovetailJoinPartitions {
    /// Inputs: build keys by partition.
    pub build_keys: *const c_void,
    /// Where the build rows of each partition start, and at the end where they end.
    pub build_bounds: *const u32,
    /// Probe keys by partition.
    pub probe_keys: *const c_void,
    /// Where the probe rows of each partition start, and at the end where they end; null with `units`.
    pub probe_bounds: *const u32,
    /// What each block does; null when each has a partition.
    pub units: *const DovetailMatchUnit,
    /// How many blocks.
    pub unit_count: u32,
    /// Bytes per key.
    pub key_bytes: u32,
    /// What is written.
    pub columns: [DovetailJoinColumn; DOVETAIL_MOVES_MAX],
    /// How many; with none, pairs are counted.
    pub column_count: u32,
    /// Rows for which there is room in the columns.
    pub room: u64,
    /// Whether to join what is simple, and leave the rest over: 1, or 0. Of columns of 4 bytes there may be two of each side then, of 8 one,
    /// and no others; keys come first, then the build side's.
    pub is_direct: u32,
    /// State, of a direct call: room for `unit_count` units, the `left_over` first of which are to be done by another call.
    pub left_over: *mut DovetailMatchUnit,
    /// Output: added to what is there.
    pub totals: *mut DovetailJoinTotals,
}

/// What a join of partitions found.
#[repr(C)]
#[derive(Clone, Copy, Debug, bytemuck::Pod, bytemuck::Zeroable)]
pub struct DovetailJoinTotals {
    /// Pairs. Those beyond the room are counted and not written.
    pub pairs: u64,
    /// Not zero when so many build rows share a bucket that the rest means nothing.
    pub long_chains: u64,
    /// Units that a direct call left over.
    pub left_over: u64,
}

/// Finds in a list of ascending positions the first that is not below each bound.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct DovetailLowerBounds {
    /// Inputs: ascending positions.
    pub positions: *const u32,
    /// How many.
    pub position_count: u64,
    /// Bounds.
    pub bounds: *const u32,
    /// How many.
    pub bound_count: u64,
    /// Output: an index per bound.
    pub indices: *mut u32,
}

/// Matches sorted probe keys against sorted build keys.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct DovetailMatchSorted {
    /// Inputs: build keys, ascending.
    pub build_keys: *const c_void,
    /// How many.
    pub build_rows: u64,
    /// Probe keys, ascending.
    pub probe_keys: *const c_void,
    /// How many.
    pub rows: u64,
    /// Bytes per key.
    pub key_bytes: u32,
    /// Outputs: a position per probe row.
    pub first: *mut u32,
    /// Run lengths.
    pub count: *mut u32,
    /// Totals.
    pub totals: *mut DovetailMatchTotals,
}

/// Counts the pairs before each probe row.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct DovetailPairStarts {
    /// Inputs: matches.
    pub first: *const u32,
    /// Run lengths; null when none is longer than one.
    pub count: *const u32,
    /// Probe rows.
    pub rows: u64,
    /// Whether a row without a match gives a pair.
    pub emit_unmatched: u32,
    /// State.
    pub scratch: *mut c_void,
    /// Its size.
    pub scratch_bytes: u64,
    /// Output: `rows` numbers of pairs.
    pub starts: *mut u64,
}

/// Lists pairs.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct DovetailExpand {
    /// Inputs: matches.
    pub first: *const u32,
    /// Pairs before each probe row.
    pub starts: *const u64,
    /// Probe rows.
    pub rows: u64,
    /// The position of the first probe row.
    pub first_row: u32,
    /// The first pair.
    pub first_pair: u64,
    /// How many pairs.
    pub pairs: u64,
    /// Outputs: build positions.
    pub build: *mut u32,
    /// Probe positions.
    pub probe: *mut u32,
}

/// Sets the flags of all build rows that matches refer to.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct DovetailMarkRuns {
    /// Inputs: matches.
    pub first: *const u32,
    /// Run lengths; null when none is longer than one.
    pub count: *const u32,
    /// Probe rows.
    pub rows: u64,
    /// State: room for long runs, two numbers each.
    pub long_runs: *mut u32,
    /// How many there are; zero before the call.
    pub long_run_count: *mut u32,
    /// Output: a byte per build row, in a buffer of whole words.
    pub flags: *mut u8,
}

/// Sets the flags at positions.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct DovetailMark {
    /// Inputs: positions, `NO_ROW` among them; null for consecutive ones.
    pub positions: *const u32,
    /// The first of consecutive ones.
    pub start: u32,
    /// How many.
    pub rows: u64,
    /// Output: a byte per row, in a buffer of whole words.
    pub flags: *mut u8,
}

/// Divides pairs by the part of the build side that they refer to.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct DovetailSplit {
    /// Inputs: build positions, none of them `NO_ROW`.
    pub build: *const u32,
    /// Probe positions; null for consecutive ones.
    pub probe: *const u32,
    /// The first of consecutive ones.
    pub probe_start: u32,
    /// Number of pairs, less than 2^32.
    pub pairs: u64,
    /// A part is so many bits of consecutive build positions; there are `DOVETAIL_PARTS_MAX` of them at most.
    pub part_bits: u32,
    /// State: how many pairs of each of `DOVETAIL_PARTS_MAX` parts have a place, which starts as zeros.
    pub taken: *mut u32,
    /// Outputs: how many pairs each of `DOVETAIL_PARTS_MAX` parts has, which starts as zeros.
    pub counts: *mut u32,
    /// Build positions, part by part, each from the start of its part.
    pub build_split: *mut u32,
    /// Probe positions beside them.
    pub probe_split: *mut u32,
}

/// Gathers values.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct DovetailGather {
    /// Inputs: values; null for consecutive numbers of 4 bytes from `data_start` on.
    pub data: *const c_void,
    /// See `data`.
    pub data_start: u32,
    /// Bytes per value.
    pub width: u32,
    /// Positions, `NO_ROW` among them; null for consecutive ones.
    pub positions: *const u32,
    /// The first of consecutive ones.
    pub start: u32,
    /// How many.
    pub rows: u64,
    /// Places for values, of which those behind so many of `data` become zero.
    pub places: u64,
    /// The byte that fills the place of a missing row.
    pub missing: u8,
    /// Output: values.
    pub out: *mut c_void,
}

/// Gathers validity.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct DovetailGatherBits {
    /// Inputs: a bit per row; null when all are set.
    pub bits: *const u8,
    /// Positions, `NO_ROW` among them; null for consecutive ones.
    pub positions: *const u32,
    /// The first of consecutive ones.
    pub start: u32,
    /// How many.
    pub rows: u64,
    /// Outputs: a bit per position, in whole words.
    pub out: *mut u32,
    /// Bits that are not set, added to what is there.
    pub cleared: *mut u64,
}

/// Says where values of variable length begin that are gathered, one after the other.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct DovetailGatheredBegins {
    /// Inputs: where each value of the column begins and, one more entry than rows, the last one ends.
    pub begins: *const u64,
    /// A bit per row of the column; null when all are valid.
    pub validity: *const u8,
    /// Positions, `NO_ROW` among them; null for consecutive ones.
    pub positions: *const u32,
    /// The first of consecutive ones.
    pub start: u32,
    /// How many.
    pub rows: u64,
    /// State: scratch memory.
    pub scratch: *mut c_void,
    /// Its size.
    pub scratch_bytes: u64,
    /// Output: `rows + 1` numbers, the last of them how many bytes there are in all. Missing rows and nulls have none.
    pub gathered: *mut u64,
}

/// Gathers values of variable length.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct DovetailGatherBytes {
    /// Inputs: the bytes of all values, one after the other, at a multiple of 8 bytes and in whole words of 8 bytes.
    pub data: *const c_void,
    /// Where each begins.
    pub begins: *const u64,
    /// Positions, of which `NO_ROW` has no bytes; null for consecutive ones.
    pub positions: *const u32,
    /// The first of consecutive ones.
    pub start: u32,
    /// How many.
    pub rows: u64,
    /// Where each begins among those that are gathered, and the last one ends.
    pub gathered: *const u64,
    /// How many bytes these are.
    pub bytes: u64,
    /// Outputs: `gathered` in 32 bits each; null where that is not wanted.
    pub offsets: *mut u32,
    /// Values, one after the other, in whole words of 8 bytes, with zeros beyond the last.
    pub out: *mut u64,
}

/// Enters keys into a filter.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct DovetailFilterBuild {
    /// Inputs: keys.
    pub keys: *const c_void,
    /// How many.
    pub rows: u64,
    /// Words of the filter less one; their number is a power of two.
    pub word_mask: u64,
    /// Bytes per key.
    pub key_bytes: u32,
    /// Output: the filter's words, zero before the call.
    pub words: *mut u64,
}

/// Reads a few bytes back.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct DovetailReadBack {
    /// Input: bytes.
    pub from: *const c_void,
    /// How many.
    pub bytes: u64,
    /// Output: the same in host memory that is pinned.
    pub to: *mut c_void,
}

/// Writes a few words that come with the call.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct DovetailWriteWords {
    /// Inputs: words.
    pub words: [u32; DOVETAIL_WORDS_MAX],
    /// How many.
    pub count: u32,
    /// Output: where.
    pub to: *mut u32,
}

/// Some of the entries of a list.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct DovetailList {
    /// The first.
    pub from: *const u32,
    /// How many.
    pub count: u64,
    /// Where they begin among those of all lists.
    pub start: u64,
}

/// Puts lists together.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct DovetailConcat {
    /// Inputs: lists.
    pub lists: [DovetailList; DOVETAIL_LISTS_MAX],
    /// How many.
    pub list_count: u32,
    /// Output: their entries.
    pub to: *mut u32,
}

/// Writes where no memory is.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct DovetailIllegalAccess {
    /// Where.
    pub address: u64,
}

unsafe extern "C" {
    pub fn dovetail_pack_keys(args: *const DovetailPackKeys, stream: DovetailStream) -> c_int;
    pub fn dovetail_value_begins(args: *const DovetailValueBegins, stream: DovetailStream) -> c_int;
    pub fn dovetail_short_values(args: *const DovetailShortValues, stream: DovetailStream) -> c_int;
    pub fn dovetail_hash_keys(args: *const DovetailHashKeys, stream: DovetailStream) -> c_int;
    pub fn dovetail_compare_values(args: *const DovetailCompareValues, stream: DovetailStream) -> c_int;
    pub fn dovetail_select(args: *const DovetailSelect, stream: DovetailStream) -> c_int;
    pub fn dovetail_select_scratch_bytes(rows: u64) -> u64;
    pub fn dovetail_partition(args: *const DovetailPartition, stream: DovetailStream) -> c_int;
    pub fn dovetail_partition_scratch_bytes(parents: u32, bits: u32) -> u64;
    pub fn dovetail_count_partitions(args: *const DovetailCountPartitions, stream: DovetailStream) -> c_int;
    pub fn dovetail_count_partitions_scratch_bytes(rows: u64, bits: u32) -> u64;
    pub fn dovetail_sort(args: *const DovetailSort, stream: DovetailStream) -> c_int;
    pub fn dovetail_sort_scratch_bytes(width: u32, rows: u64) -> u64;
    pub fn dovetail_sort_image(args: *const DovetailSortImage, stream: DovetailStream) -> c_int;
    pub fn dovetail_is_sorted(args: *const DovetailIsSorted, stream: DovetailStream) -> c_int;
    pub fn dovetail_table_insert(args: *const DovetailTableInsert, stream: DovetailStream) -> c_int;
    pub fn dovetail_table_probe(args: *const DovetailTableProbe, stream: DovetailStream) -> c_int;
    pub fn dovetail_dense_insert(args: *const DovetailDenseInsert, stream: DovetailStream) -> c_int;
    pub fn dovetail_dense_probe(args: *const DovetailDenseProbe, stream: DovetailStream) -> c_int;
    pub fn dovetail_list_units(args: *const DovetailListUnits, stream: DovetailStream) -> c_int;
    pub fn dovetail_list_units_scratch_bytes(partitions: u32) -> u64;
    pub fn dovetail_match_partitions(args: *const DovetailMatchPartitions, stream: DovetailStream) -> c_int;
    pub fn dovetail_join_partitions(args: *const DovetailJoinPartitions, stream: DovetailStream) -> c_int;
    pub fn dovetail_lower_bounds(args: *const DovetailLowerBounds, stream: DovetailStream) -> c_int;
    pub fn dovetail_match_sorted(args: *const DovetailMatchSorted, stream: DovetailStream) -> c_int;
    pub fn dovetail_pair_starts(args: *const DovetailPairStarts, stream: DovetailStream) -> c_int;
    pub fn dovetail_pair_starts_scratch_bytes(rows: u64) -> u64;
    pub fn dovetail_expand(args: *const DovetailExpand, stream: DovetailStream) -> c_int;
    pub fn dovetail_mark_runs(args: *const DovetailMarkRuns, stream: DovetailStream) -> c_int;
    pub fn dovetail_mark(args: *const DovetailMark, stream: DovetailStream) -> c_int;
    pub fn dovetail_split(args: *const DovetailSplit, stream: DovetailStream) -> c_int;
    pub fn dovetail_gather(args: *const DovetailGather, stream: DovetailStream) -> c_int;
    pub fn dovetail_gather_bits(args: *const DovetailGatherBits, stream: DovetailStream) -> c_int;
    pub fn dovetail_gathered_begins(args: *const DovetailGatheredBegins, stream: DovetailStream) -> c_int;
    pub fn dovetail_gathered_begins_scratch_bytes(rows: u64) -> u64;
    pub fn dovetail_gather_bytes(args: *const DovetailGatherBytes, stream: DovetailStream) -> c_int;
    pub fn dovetail_filter_build(args: *const DovetailFilterBuild, stream: DovetailStream) -> c_int;
    pub fn dovetail_read_back(args: *const DovetailReadBack, stream: DovetailStream) -> c_int;
    pub fn dovetail_write_words(args: *const DovetailWriteWords, stream: DovetailStream) -> c_int;
    pub fn dovetail_concat(args: *const DovetailConcat, stream: DovetailStream) -> c_int;
    pub fn dovetail_illegal_access(args: *const DovetailIllegalAccess, stream: DovetailStream) -> c_int;
    pub fn dovetail_range_begin(name: *const c_char);
    pub fn dovetail_range_end();
}
