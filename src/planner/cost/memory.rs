//! The device memory that a strategy takes, and the resulting chunks of the probe side.

use serde::Serialize;

use super::super::inputs::{Input, Inputs};
use super::super::{JoinKind, Strategy, Target};
use super::Model;
use crate::device::host::{FilterBytes, TableBytes, sort_scratch_bytes};
use crate::join::{CHUNK_ROWS_MIN, Distribution, OVERLAPPED_CHUNK_ROWS_MIN, TransferOrder, chunks_per_stream};

/// Bytes of device memory that a strategy takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct MemoryNeed {
    /// Minimum bytes, for any key values: the maximum over all steps with the probe side in the
    /// smallest chunks.
    pub minimum_bytes: u64,
    /// Bytes with the whole probe side in one chunk. With less memory, chunks are smaller and more
    /// numerous.
    pub whole_bytes: u64,
    /// Part of `whole_bytes` that the build side takes while it is probed.
    pub resident_bytes: u64,
}

/// Bytes per probe row of row numbers, matches and pairs.
const MATCH_ROW_BYTES: f64 = 32.0;

/// Memory is allocated in cache lines, and the smallest probe batch and the smallest batch of pairs
/// have to fit somewhere.
const SMALL_BYTES: f64 = (32 << 10) as f64;

/// Partitions of distinct keys have nearly one size. Keys that repeat a few times make the sizes
/// differ.
const PARTITION_SPREAD: f64 = 1.5;

/// Maximum rows of one key for which a table reserves room. Beyond that, the table grows with the
/// number of distinct keys.
const HEAVY_TABLE_ROWS: f64 = (1 << 16) as f64;

/// Division of the probe side into chunks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(in crate::planner) struct Chunks {
    pub(in crate::planner) count: f64,
    /// Chunks in progress at a time.
    pub(in crate::planner) at_once: f64,
    pub(in crate::planner) transfer_order: TransferOrder,
}

impl Chunks {
    /// Divides the probe side as `join::probe` does. Each chunk takes half of what the build side
    /// leaves free to its stream. Each stream has several chunks, unless a single stream is used.
    pub(in crate::planner) fn new(
        strategy: Strategy,
        memory: &MemoryNeed,
        inputs: &Inputs,
        target: &Target,
        transfer_order: TransferOrder,
    ) -> Self {
        let probe_rows = inputs.probe.rows;
        let streams_max = match transfer_order {
            TransferOrder::ProbeAtOnce => 1.0,
            TransferOrder::Chunks | TransferOrder::DeferBuildPayload => target.tuning.streams as f64,
        };
        let streams = (probe_rows / OVERLAPPED_CHUNK_ROWS_MIN as f64).ceil().clamp(1.0, streams_max);
        let whole_chunk = memory.whole_bytes.saturating_sub(memory.resident_bytes) as f64;
        let free = target.memory_bytes.saturating_sub(memory.resident_bytes).max(1) as f64 / streams;
        let by_memory = (whole_chunk / free).ceil().clamp(1.0, (probe_rows / CHUNK_ROWS_MIN as f64).ceil().max(1.0));
        let by_streams = match streams > 1.0 {
            true => {
                let is_looked_up = strategy == Strategy::Hash;
                let key_bytes = inputs.key_width.bytes();
                let of_each = chunks_per_stream(probe_rows as u64, key_bytes, streams as u64, is_looked_up);
                (probe_rows / OVERLAPPED_CHUNK_ROWS_MIN as f64).ceil().min(of_each as f64 * streams)
            }
            false => 1.0,
        };
        let count = by_memory.max(by_streams);
        Self { count, at_once: streams.min(count), transfer_order }
    }
}

impl Model<'_> {
    /// Computes the device memory, step by step as the run uses it (`join::run`). The sizes of a
    /// side are exact, and nothing depends on guesses about keys, because a run must not run out of
    /// memory.
    pub(super) fn memory(&self) -> MemoryNeed {
        let (build, probe) = (&self.inputs.build, &self.inputs.probe);
        let rows = build.rows;
        let repeats = !build.seen_unique;
        // Row numbers of the rows with a key, and of the rows without one.
        let numbers = if build.is_partly_keyed() { 4.0 } else { 0.0 };
        let lying = rows * (self.packed_row_bytes(build) + self.copied_row_bytes(build) + numbers) + build.values.stays;
        let lying = lying + build.text_held_bytes();
        let packing = build.rows_read * (self.source_row_bytes(build) + self.packed_row_bytes(build) + numbers);
        let packing = packing + build.values.arriving;
        // Finding the rows without a key takes a flag per row.
        let flagging = if build.is_partly_keyed() { lying + rows } else { 0.0 };
        let composed = if build.is_partly_keyed() { 4.0 * rows } else { 0.0 };
        let how = self.join.how;
        let needs_flags = how.keeps_unmatched(build.side) || how.only_side() == Some(build.side);
        let probe_row = self.probe_row_bytes();
        // All values may have the maximum length, in the chunks of all streams. Apart from such
        // values, chunks of other streams take next to nothing.
        let least_rows = (CHUNK_ROWS_MIN as f64).min(probe.rows);
        // Text is stored twice: as it arrived, and as gathered.
        let text_max: f64 = probe.text_columns.iter().chain(&build.text_columns).map(|text| text.row_max()).sum();
        let longest = (self.target.tuning.streams as f64).max(2.0) * (probe.values.row_max + 2.0 * text_max);
        let smallest_chunk = least_rows * (2.0 * probe_row + longest);
        let whole_chunk = 2.0 * (probe.rows * probe_row + probe.values.arriving + probe.text_held_bytes());

        // Maximum while the build side is transformed and indexed, memory that stays, and extra
        // memory for matching.
        let (transforming, stays, matching) = match self.strategy {
            Strategy::Hash => {
                let table = match self.inputs.dense_slots {
                    // If a key repeats after all, the general table replaces the dense one.
                    Some(slots) if !repeats => TableBytes { stays: 4 * slots as u64, building: 0 },
                    _ => self.table(rows, repeats),
                };
                let (table, building) = (table.stays as f64, table.building as f64);
                let composed = if repeats { composed } else { 0.0 };
                // The values behind equal hashes are compared in the order of the table.
                let ordered_keys = if self.inputs.hashed && repeats { composed + 16.0 * rows } else { 0.0 };
                (lying + table + building.max(composed).max(ordered_keys), lying + table + composed, 0.0)
            }
            _ if self.strategy.is_sorted() && build.sorted => (lying, lying, 0.0),
            _ => {
                let payload_bytes = self.payload_bytes(build);
                let row = self.inputs.key_bytes() + payload_bytes;
                let composed = if payload_bytes > 0.0 { composed } else { 0.0 };
                // Rows without a key are removed from columns before these move.
                let moved_bytes = build.moved_row_bytes();
                let gathered = if build.is_partly_keyed() { moved_bytes } else { 0.0 };
                let scratch = match self.strategy.is_sorted() {
                    true => {
                        let widest = build.columns.iter().map(|column| column.bytes).fold(4.0, f64::max) as u64;
                        let threads = self.target.parallelism;
                        sort_scratch_bytes(self.inputs.key_width, rows as u64, widest, threads) as f64
                    }
                    // The first of two passes writes what the second reads.
                    false if self.passes > 1.0 => rows * row,
                    false => 0.0,
                };
                let transformed = lying + rows * (gathered + row) + scratch.max(composed);
                // Once transformed, moved columns replace the copied ones.
                let replaced = if build.is_partly_keyed() { 0.0 } else { rows * self.charged(build, moved_bytes) };
                let stays = lying - replaced + rows * row + composed;
                let (places, tables) = if self.passes > 0.0 { self.tables_at_once() } else { (0.0, 0.0) };
                let grouping = match self.passes > 0.0 && repeats {
                    true => rows * row + composed + places + tables,
                    false => 0.0,
                };
                // If a join finds only during the probe that keys repeat, it groups them while a
                // chunk is in memory. That chunk took half of the memory that was free.
                let ahead = self.inputs.hashed || needs_flags;
                let beside = if ahead { 0.0 } else { (whole_chunk / 2.0).min(smallest_chunk.max(grouping)) };
                (transformed.max(stays + grouping + beside), stays, tables)
            }
        };
        let filter = self.filter.as_ref().map_or(FilterBytes::default(), |filter| filter.bytes);
        let (filter_stays, filter_building) = (filter.stays as f64, filter.building as f64);
        let transforming = transforming.max(stays + filter_building) + filter_stays;
        let resident = stays + filter_stays + if needs_flags { rows } else { 0.0 };
        // Build rows kept for the end: their positions and their row numbers.
        let ending = if needs_flags { 8.0 * rows } else { 0.0 };
        // Rows that were read and wait for their owner, rows that have arrived, and one more copy
        // of a column while pieces are joined together.
        let exchanging = match self.inputs.distribution {
            Distribution::Hash => (build.rows_read + 1.5 * rows) * self.exchanged_row_bytes(build),
            _ if self.inputs.shares_build_read => 2.5 * rows * self.exchanged_row_bytes(build),
            Distribution::Alone | Distribution::Broadcast => 0.0,
        };
        let minimum = packing
            .max(flagging)
            .max(exchanging)
            .max(transforming)
            .max(resident + (matching + smallest_chunk).max(ending));
        let minimum = minimum + SMALL_BYTES + self.scratch(build, build.rows);
        let whole = resident + matching + whole_chunk + self.scratch(probe, probe.rows);
        MemoryNeed {
            minimum_bytes: minimum as u64,
            whole_bytes: minimum.max(whole) as u64,
            resident_bytes: resident as u64,
        }
    }

    /// Returns the memory if the build payload is deferred: in addition, a row number per row of
    /// the result. `None` if it cannot be deferred. Unless the caller asks for it, also `None` if
    /// deferring does not pay or memory is short.
    pub(super) fn memory_with_deferred_payload(
        &self,
        memory: MemoryNeed,
        asked_for: Option<bool>,
    ) -> Option<MemoryNeed> {
        let build = &self.inputs.build;
        let moves_some = (!build.columns.is_empty() || !build.text_columns.is_empty())
            && build.columns.iter().all(|column| !column.came_as_key)
            && build.text_columns.iter().all(|text| !text.came_as_key);
        let is_plain = self.strategy == Strategy::Hash
            && self.join.how == JoinKind::Inner
            && !self.join.counts_rows
            && self.inputs.distribution != Distribution::Hash
            && !self.inputs.shares_build_read;
        if asked_for == Some(false) || !is_plain || !moves_some {
            return None;
        }
        let whole_bytes = memory.whole_bytes + (4.0 * self.estimates.pairs) as u64;
        let pays = self.rates.copies_overlap && !self.is_probe_shared() && 2 * whole_bytes <= self.target.memory_bytes;
        (pays || asked_for == Some(true)).then_some(MemoryNeed { whole_bytes, ..memory })
    }

    /// Memory for transforming the given rows of a side, on a device whose primitives need more
    /// than a host device's.
    fn scratch(&self, input: &Input, rows: f64) -> f64 {
        /// Fixed scratch memory of some streams.
        const STREAMS_BYTES: f64 = (16 << 20) as f64;
        match self.target.tuning.row_scratch_bytes {
            Some(bytes) => STREAMS_BYTES + rows * (bytes as f64 + self.inputs.key_bytes() + self.payload_bytes(input)),
            None => 0.0,
        }
    }

    /// Bytes per row that are copied in, or 0 if the device reads them in place.
    fn charged(&self, input: &Input, row_bytes: f64) -> f64 {
        if self.rates.reads_host_memory && input.one_piece { 0.0 } else { row_bytes }
    }

    /// Bytes per row of key columns on the device until they are packed, with their validity.
    fn source_row_bytes(&self, input: &Input) -> f64 {
        let columns = input.key_columns as f64;
        let made_by_host = match input.host_keys && !self.rates.reads_host_memory {
            true => self.inputs.key_bytes() + 4.0 * columns,
            false => 0.0,
        };
        self.charged(input, input.key_source_bytes) + made_by_host + columns / 8.0
    }

    /// Bytes per row of packed keys, except for keys that are the column itself, read in place.
    fn packed_row_bytes(&self, input: &Input) -> f64 {
        let as_it_lies = self.inputs.raw && !input.is_partly_keyed();
        if as_it_lies { self.charged(input, self.inputs.key_bytes()) } else { self.inputs.key_bytes() }
    }

    /// Bytes per row of the result's columns as copied in, with their validity, which is always
    /// copied.
    fn copied_row_bytes(&self, input: &Input) -> f64 {
        let columns = input.copied_row_bytes();
        let nullable = input.columns.iter().filter(|column| column.nullable).count();
        self.charged(input, columns) + nullable as f64 / 8.0
    }

    /// Bytes per probe row by which the run sizes its chunks. Counts keys three times: packed,
    /// transformed, and while sorted. Counts columns three times: copied in, moved, and while
    /// sorted. Adds row numbers, matches and pairs.
    fn probe_row_bytes(&self) -> f64 {
        let columns: f64 = self.inputs.probe.columns.iter().map(|column| column.bytes).sum();
        3.0 * self.inputs.key_bytes() + 3.0 * columns + MATCH_ROW_BYTES
    }

    /// Memory of the partitions that are in progress at one time: positions of their rows while
    /// equal keys are made adjacent, and their tables.
    fn tables_at_once(&self) -> (f64, f64) {
        let rows = self.inputs.build.rows;
        if self.partitions <= 1.0 {
            return (4.0 * rows, self.table(rows, true).stays as f64);
        }
        let at_once = (self.target.parallelism as f64).min(self.partitions);
        let ordinary = (PARTITION_SPREAD * rows / self.partitions).min(rows);
        let heavy = self.inputs.build.heaviest_rows.min(rows);
        let places = 4.0 * (at_once * ordinary + heavy).min(rows);
        let tables = at_once * self.table(ordinary, true).stays as f64;
        // A growing table is stored twice for a moment.
        let growing = if ordinary > HEAVY_TABLE_ROWS { 0.5 * tables } else { 0.0 };
        let heavy_table = if heavy > ordinary { self.table(heavy.min(HEAVY_TABLE_ROWS), true).stays } else { 0 };
        (places, tables + growing + heavy_table as f64)
    }
}
