//! What a strategy costs: roofline arithmetic on a device's measured rates.
//!
//! Each phase takes the longer of the bytes it moves over the rate of their boundary, and the rows it treats over the rate
//! of its primitive; random reads beyond the cache come on top. Phases add up, except that copies which run beside
//! primitives count only where they are longer (the roofline of Williams et al. 2009, with one roof per boundary).
//!
//! The names of phases are those under which a running join records its time.

use serde::Serialize;

use super::inputs::{Input, Inputs};
use super::{BoundJoin, Estimates, OutputSource, Rates, Side, Strategy, Target};
use crate::columns::movable;
use crate::device::host::{TableBytes, sort_scratch_bytes};
use crate::join::CHUNK_ROWS_MIN;

/// A phase as it is predicted.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PredictedPhase {
    /// As a running join calls it.
    pub name: &'static str,
    /// Bytes read and written.
    pub bytes: u64,
    /// Seconds.
    pub seconds: f64,
}

/// A strategy with its price.
#[derive(Debug)]
pub(super) struct Costed {
    pub(super) strategy: Strategy,
    pub(super) phases: Vec<PredictedPhase>,
    /// All phases, overlapping copies counted once.
    pub(super) seconds: f64,
    pub(super) memory: MemoryNeed,
    pub(super) radix_bits: Option<u32>,
}

/// Bytes of device memory that a strategy takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct MemoryNeed {
    /// At the least, whatever the keys turn out to be: the most that any step takes with the probe side in the smallest chunks.
    pub minimum_bytes: u64,
    /// With the whole probe side in one chunk; what is missing of this makes more and smaller chunks.
    pub whole_bytes: u64,
    /// Of this, what the build side takes for as long as it is probed.
    pub resident_bytes: u64,
}

/// Bytes per probe row of row numbers, matches and pairs.
const MATCH_ROW_BYTES: f64 = 32.0;

/// Memory is taken in cache lines, and the smallest wave and the smallest batch of pairs have to fit somewhere.
const SMALL_BYTES: f64 = (32 << 10) as f64;

impl Costed {
    pub(super) fn new(
        join: &BoundJoin,
        strategy: Strategy,
        inputs: &Inputs,
        estimates: &Estimates,
        target: &Target,
    ) -> Self {
        let radix_bits = strategy.is_partitioned().then(|| radix_bits(inputs.build.rows, target));
        let passes = radix_bits.map_or(0.0, |bits| f64::from(bits.div_ceil(target.pass_bits_max).max(1)));
        let partitions = radix_bits.map_or(1.0, |bits| f64::from(1u32 << bits));
        let model = Model { join, strategy, inputs, estimates, target, rates: &target.rates, passes, partitions };
        let memory = model.memory();
        let phases = model.phases(probe_chunks(&memory, inputs.probe.rows, target));
        let seconds = total_seconds(&phases, &target.rates);
        Self { strategy, phases, seconds, memory, radix_bits }
    }
}

/// In how many chunks the probe side comes: each takes half of what the build side leaves free.
fn probe_chunks(memory: &MemoryNeed, probe_rows: f64, target: &Target) -> f64 {
    let whole_chunk = memory.whole_bytes.saturating_sub(memory.resident_bytes) as f64;
    let free = target.memory_bytes.saturating_sub(memory.resident_bytes).max(1) as f64;
    (whole_chunk / free).ceil().clamp(1.0, (probe_rows / CHUNK_ROWS_MIN as f64).ceil().max(1.0))
}

/// So many partitions that one has about as many build rows as the device likes, within one pass.
pub(super) fn radix_bits(build_rows: f64, target: &Target) -> u32 {
    let partitions = (build_rows as u64).div_ceil(target.partition_rows.max(1) as u64).max(1);
    partitions.next_power_of_two().trailing_zeros().min(target.pass_bits_max)
}

fn total_seconds(phases: &[PredictedPhase], rates: &Rates) -> f64 {
    let total: f64 = phases.iter().map(|phase| phase.seconds).sum();
    if !rates.copies_overlap {
        return total;
    }
    let copies: f64 = phases.iter().filter(|phase| phase.name == "copy in").map(|phase| phase.seconds).sum();
    copies.max(total - copies)
}

/// Where the rows of a gather come from.
#[derive(Clone, Copy, PartialEq)]
enum Order {
    /// One after the other, or within a partition that is in cache.
    Clustered,
    /// From anywhere in the column.
    Random,
}

struct Model<'a> {
    join: &'a BoundJoin,
    strategy: Strategy,
    inputs: &'a Inputs,
    estimates: &'a Estimates,
    target: &'a Target,
    rates: &'a Rates,
    passes: f64,
    partitions: f64,
}

/// Partitions of distinct keys are of nearly one size; keys that repeat a few times make them differ.
const PARTITION_SPREAD: f64 = 1.5;

/// The most rows of one key for which a table reserves room ahead: it grows by distinct keys beyond that.
const HEAVY_TABLE_ROWS: f64 = (1 << 16) as f64;

impl Model<'_> {
    fn phases(&self, chunks: f64) -> Vec<PredictedPhase> {
        let mut phases = vec![self.pack_keys(), self.copy_in()];
        match self.strategy {
            Strategy::Hash => phases.push(self.build_table()),
            Strategy::RadixHash | Strategy::RadixHashGfur => {
                phases.push(self.partition("partition build", &self.inputs.build));
                phases.push(self.partition("partition probe", &self.inputs.probe));
                if self.inputs.build.repeats || self.inputs.hashed {
                    phases.push(self.group());
                }
            }
            Strategy::SortMerge | Strategy::SortMergeGfur => {
                for (input, check, sort) in [
                    (&self.inputs.build, "check build order", "sort build"),
                    (&self.inputs.probe, "check probe order", "sort probe"),
                ] {
                    phases.push(self.check_order(check, input));
                    if !input.sorted {
                        phases.push(self.sort(sort, input));
                    }
                }
            }
        }
        phases.push(self.match_rows(chunks));
        if self.inputs.hashed {
            phases.push(self.compare());
        }
        if self.join.spec.how.only_side().is_none() {
            let pairs = self.estimates.pairs;
            phases.push(phase("expand", 12.0 * pairs, pairs / self.rates.expand_pairs));
        }
        phases.push(self.gather());
        phases.retain(|phase| phase.bytes > 0 || phase.seconds > 0.0);
        phases
    }

    /// Keys are brought in where they are packed.
    fn pack_keys(&self) -> PredictedPhase {
        let (mut bytes, mut seconds) = (0.0, 0.0);
        for input in [&self.inputs.build, &self.inputs.probe] {
            let source = input.rows * input.key_source_bytes;
            let packed = input.rows * self.inputs.key_bytes();
            seconds += self.copy_seconds(input, source);
            if input.host_keys {
                seconds += input.rows / self.rates.host_keys;
            }
            if !self.inputs.raw || input.keyed < input.rows {
                seconds += (source + packed) / self.rates.stream;
            }
            bytes += source + packed;
        }
        phase("pack keys", bytes, seconds)
    }

    fn copy_in(&self) -> PredictedPhase {
        let moved = self.strategy != Strategy::Hash;
        let (mut bytes, mut seconds) = (0.0, 0.0);
        for input in [&self.inputs.build, &self.inputs.probe] {
            let column_bytes = input.rows * input.copied_row_bytes(moved);
            bytes += column_bytes;
            seconds += self.copy_seconds(input, column_bytes);
        }
        phase("copy in", bytes, seconds)
    }

    /// What lies in one piece is not copied by a device that reads host memory.
    fn copy_seconds(&self, input: &Input, bytes: f64) -> f64 {
        if self.rates.reads_host_memory && input.one_piece { 0.0 } else { bytes / self.rates.copy_in }
    }

    /// Bytes per row that move with the key.
    fn carried(&self, input: &Input) -> f64 {
        match self.strategy {
            Strategy::Hash => 0.0,
            Strategy::RadixHash | Strategy::SortMerge => {
                input.carried_row_bytes() + if input.needs_row_numbers() || self.inputs.hashed { 4.0 } else { 0.0 }
            }
            Strategy::RadixHashGfur | Strategy::SortMergeGfur => {
                let something = input.columns.iter().any(|column| !column.raw_key) || input.host_columns > 0;
                if something || self.inputs.hashed { 4.0 } else { 0.0 }
            }
        }
    }

    fn partition(&self, name: &'static str, input: &Input) -> PredictedPhase {
        let key_bytes = self.inputs.key_bytes();
        // Read and write everything, and read the keys once more for the histogram.
        let bytes = input.keyed * (2.0 * (key_bytes + self.carried(input)) + key_bytes) * self.passes;
        phase(name, bytes, bytes / self.rates.partition)
    }

    /// Makes equal build keys adjacent, one partition in cache after the other.
    fn group(&self) -> PredictedPhase {
        let build = &self.inputs.build;
        let bytes = build.keyed * 2.0 * (self.inputs.key_bytes() + self.carried(build));
        phase("group build", bytes, (build.keyed / self.rates.build_rows).max(bytes / self.rates.stream))
    }

    /// Whether rows are sorted is found by reading the keys: all of them when they are, the first few when they are not.
    fn check_order(&self, name: &'static str, input: &Input) -> PredictedPhase {
        let bytes = if input.sorted { input.keyed * self.inputs.key_bytes() } else { 0.0 };
        phase(name, bytes, bytes / self.rates.stream)
    }

    fn sort(&self, name: &'static str, input: &Input) -> PredictedPhase {
        let key_bytes = self.inputs.key_bytes();
        let carried = self.carried(input);
        let bytes = 2.0 * input.keyed * (key_bytes + carried);
        let extra = 2.0 * input.keyed * (carried - 4.0).max(0.0);
        let seconds = input.keyed / self.rates.sort_rows_of(self.inputs.key_width) + extra / self.rates.sort_carry;
        phase(name, bytes, seconds)
    }

    fn build_table(&self) -> PredictedPhase {
        let build = &self.inputs.build;
        if let Some(slots) = self.inputs.dense_slots {
            let bytes = build.keyed * self.inputs.key_bytes() + 4.0 * slots;
            let misses = if build.sorted { 0.0 } else { self.rates.miss_seconds(build.keyed, 4.0 * slots) };
            return phase("build table", bytes, build.keyed / self.rates.dense_rows + misses);
        }
        let extent = self.table(build.keyed, build.repeats).stays as f64;
        // A place is found, then written; where keys repeat, the list of rows is written as well.
        let reads = build.keyed * if build.repeats { 3.0 } else { 2.0 };
        let seconds = build.keyed / self.rates.build_rows + self.rates.miss_seconds(reads, extent);
        phase("build table", build.keyed * self.inputs.key_bytes() + extent, seconds)
    }

    fn table(&self, rows: f64, repeats: bool) -> TableBytes {
        TableBytes::new(self.inputs.key_width, rows as u64, repeats)
    }

    /// Each chunk of the probe side passes over all of the build side once more, but for a table that stays.
    fn match_rows(&self, chunks: f64) -> PredictedPhase {
        let (build, probe) = (&self.inputs.build, &self.inputs.probe);
        let key_bytes = self.inputs.key_bytes();
        let bytes = probe.keyed * (2.0 * key_bytes + 8.0);
        let rows = build.keyed * chunks + probe.keyed;
        let seconds = match self.strategy {
            Strategy::Hash => match self.inputs.dense_slots {
                Some(slots) => {
                    let misses = if probe.sorted { 0.0 } else { self.rates.miss_seconds(probe.keyed, 4.0 * slots) };
                    probe.keyed / self.rates.dense_rows + misses
                }
                None => {
                    let extent = self.table(build.keyed, build.repeats).stays as f64;
                    probe.keyed / self.rates.probe_rows + self.rates.miss_seconds(probe.keyed, extent)
                }
            },
            Strategy::RadixHash | Strategy::RadixHashGfur => rows / self.rates.match_rows,
            Strategy::SortMerge | Strategy::SortMergeGfur => rows / self.rates.merge_rows,
        };
        phase("match", bytes, seconds.max(bytes / self.rates.stream))
    }

    /// Values behind equal hashes are compared on the host, at random places of both sides.
    fn compare(&self) -> PredictedPhase {
        let rows = self.estimates.pairs + self.inputs.build.keyed;
        phase("compare keys", 0.0, rows / self.rates.host_values)
    }

    fn gather(&self) -> PredictedPhase {
        let (build, probe) = (&self.inputs.build, &self.inputs.probe);
        let (mut bytes, mut seconds, mut out_bytes) = (0.0, 0.0, 0.0);
        // Rows of the result in which each side has a row.
        let how = self.join.spec.how;
        let rows_with = |input: &Input| {
            let unmatched = if how.keeps_unmatched(input.side) { input.rows - input.matched } else { 0.0 };
            match how.only_side() {
                Some(side) if side == input.side => self.estimates.rows,
                Some(_) => 0.0,
                None => self.estimates.pairs + unmatched,
            }
        };
        for output in &self.join.output {
            let (giver, index) = match output.source {
                OutputSource::Column { side, index } => (side, index),
                // The probe side gives keys where both sides' values are alike, because its rows lie in order.
                OutputSource::Key { index } => {
                    let key = &self.join.keys[index];
                    let giver = if key.alike { probe.side } else { Side::Left };
                    (giver, key.column(giver))
                }
            };
            let input = if giver == build.side { build } else { probe };
            let rows = rows_with(input);
            let table = self.join.table(input.side);
            let Some(movable) = movable(&table.schema, &table.batches, index) else {
                // Read and written once, at random places unless rows come in order.
                seconds += rows / self.rates.host_values;
                continue;
            };
            let width = movable.width.bytes() as f64;
            let value_bytes = 2.0 * width * rows;
            bytes += value_bytes;
            out_bytes += width * rows;
            seconds += (rows / self.rates.gather_values).max(value_bytes / self.rates.stream);
            if self.gather_order(input, index) == Order::Random {
                seconds += self.rates.miss_seconds(rows, width * input.rows);
            }
        }
        phase("gather", bytes, seconds.max(out_bytes / self.rates.copy_out))
    }

    fn gather_order(&self, input: &Input, index: usize) -> Order {
        let both_sorted = self.inputs.build.sorted && self.inputs.probe.sorted;
        let is_build = input.side == self.inputs.build.side;
        let column = input.columns.iter().find(|column| column.index == index);
        let moved = column.is_some_and(|column| column.raw_key || !column.nullable);
        let clustered = match self.strategy {
            // The probe side is read as it lies, and finds build rows in order when both sides are sorted.
            Strategy::Hash => !is_build || both_sorted,
            Strategy::RadixHash => moved,
            Strategy::RadixHashGfur => column.is_some_and(|column| column.raw_key),
            Strategy::SortMerge => moved || input.sorted,
            Strategy::SortMergeGfur => column.is_some_and(|column| column.raw_key) || input.sorted,
        };
        if clustered { Order::Clustered } else { Order::Random }
    }

    /// What the device must hold, step by step as the run does it (`join::run`): the sizes of the side are exact, and nothing is
    /// left to guesses about keys, because running out of memory in the middle is the one thing that must not happen.
    fn memory(&self) -> MemoryNeed {
        let (build, probe) = (&self.inputs.build, &self.inputs.probe);
        let rows = build.rows;
        let repeats = !build.seen_unique;
        // Row numbers of the rows that have a key, and of those that have none.
        let numbers = if build.is_partly_keyed() { 4.0 } else { 0.0 };
        let lying = rows * (self.packed_row_bytes(build) + self.copied_row_bytes(build) + numbers);
        let packing = rows * (self.source_row_bytes(build) + self.packed_row_bytes(build) + numbers);
        // Finding the rows without a key takes a flag for each row.
        let flagging = if build.is_partly_keyed() { lying + rows } else { 0.0 };
        let composed = if build.is_partly_keyed() { 4.0 * rows } else { 0.0 };
        let how = self.join.spec.how;
        let needs_flags = how.keeps_unmatched(build.side) || how.only_side() == Some(build.side);
        let probe_row = self.probe_row_bytes();
        let smallest_chunk = 2.0 * (CHUNK_ROWS_MIN as f64).min(probe.rows) * probe_row;
        let whole_chunk = 2.0 * probe.rows * probe_row;

        // The most while the build side is arranged and indexed, what stays, and what matching takes beside that.
        let (arranging, stays, matching) = match self.strategy {
            Strategy::Hash => {
                let table = match self.inputs.dense_slots {
                    // Where a key repeats after all, the general table takes the place of the dense one.
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
                let carried = self.carried(build);
                let row = self.inputs.key_bytes() + carried;
                let composed = if carried > 0.0 { composed } else { 0.0 };
                // Rows without a key are left out of columns before these are carried.
                let carried_columns = if self.carries_columns() { build.carried_row_bytes() } else { 0.0 };
                let gathered = if build.is_partly_keyed() { carried_columns } else { 0.0 };
                let scratch = match self.strategy.is_sorted() {
                    true => {
                        let widest = build.columns.iter().map(|column| column.bytes).fold(4.0, f64::max) as u64;
                        let threads = self.target.parallelism;
                        sort_scratch_bytes(self.inputs.key_width, rows as u64, widest, threads) as f64
                    }
                    false => 0.0,
                };
                let arranged = lying + rows * (gathered + row) + scratch.max(composed);
                // Carried columns replace those that were copied in, once they are arranged.
                let replaced = if build.is_partly_keyed() { 0.0 } else { rows * self.charged(build, carried_columns) };
                let stays = lying - replaced + rows * row + composed;
                let (places, tables) = if self.passes > 0.0 { self.tables_at_once() } else { (0.0, 0.0) };
                let grouping = match self.passes > 0.0 && repeats {
                    true => rows * row + composed + places + tables,
                    false => 0.0,
                };
                // Keys that are found to repeat only when they are probed are grouped beside a chunk, which was given half of
                // what was free then.
                let ahead = self.inputs.hashed || needs_flags;
                let beside = if ahead { 0.0 } else { (whole_chunk / 2.0).min(smallest_chunk.max(grouping)) };
                (arranged.max(stays + grouping + beside), stays, tables)
            }
        };
        let resident = stays + if needs_flags { rows } else { 0.0 };
        // Build rows that are kept at the end: their positions, and their row numbers.
        let ending = if needs_flags { 8.0 * rows } else { 0.0 };
        let minimum = packing.max(flagging).max(arranging).max(resident + (matching + smallest_chunk).max(ending));
        let minimum = minimum + SMALL_BYTES;
        MemoryNeed {
            minimum_bytes: minimum as u64,
            whole_bytes: minimum.max(resident + matching + whole_chunk) as u64,
            resident_bytes: resident as u64,
        }
    }

    /// Bytes per row of what is copied in, unless the device reads it where it lies.
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

    /// Bytes per row of packed keys, as far as they are not the column itself where it lies.
    fn packed_row_bytes(&self, input: &Input) -> f64 {
        let as_it_lies = self.inputs.raw && !input.is_partly_keyed();
        if as_it_lies { self.charged(input, self.inputs.key_bytes()) } else { self.inputs.key_bytes() }
    }

    /// Bytes per row of the columns of the result as they are copied in, with their validity, which always is.
    fn copied_row_bytes(&self, input: &Input) -> f64 {
        let columns = input.copied_row_bytes(self.strategy != Strategy::Hash);
        let nullable = input.columns.iter().filter(|column| column.nullable).count();
        self.charged(input, columns) + nullable as f64 / 8.0
    }

    fn carries_columns(&self) -> bool {
        self.strategy.carries_payload()
    }

    /// Bytes per probe row by which the run chooses its chunks: keys packed, arranged and once more while they are sorted, columns
    /// copied in, carried and sorted, and what becomes of them.
    fn probe_row_bytes(&self) -> f64 {
        let columns: f64 = self.inputs.probe.columns.iter().map(|column| column.bytes).sum();
        3.0 * self.inputs.key_bytes() + 3.0 * columns + MATCH_ROW_BYTES
    }

    /// What the partitions take that are worked on at one time: the places of their rows while equal keys are made
    /// adjacent, and their tables.
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
        // A table that grows is held twice for a moment.
        let growing = if ordinary > HEAVY_TABLE_ROWS { 0.5 * tables } else { 0.0 };
        let heavy_table = if heavy > ordinary { self.table(heavy.min(HEAVY_TABLE_ROWS), true).stays } else { 0 };
        (places, tables + growing + heavy_table as f64)
    }
}

fn phase(name: &'static str, bytes: f64, seconds: f64) -> PredictedPhase {
    PredictedPhase { name, bytes: bytes as u64, seconds }
}
