//! What a strategy costs: roofline arithmetic on a device's measured rates.
//!
//! Each phase takes the longer of the bytes it moves over the rate of their boundary, and the rows it treats over the rate
//! of its primitive; random reads beyond the cache come on top. Phases add up, except that copies which run beside
//! primitives count only where they are longer (the roofline of Williams et al. 2009, with one roof per boundary).
//!
//! The names of phases are those under which a running join records its time.

use serde::Serialize;

use super::inputs::{Input, Inputs};
use super::{BoundJoin, Estimates, OutputSource, Rates, Strategy, Target};
use crate::columns::fixed_width;

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
    /// At the least: the build side as it stays, and the smallest chunk of the probe side. Below this the join cannot run.
    pub minimum_bytes: u64,
    /// The most while the build side is arranged, beside the smallest chunk of the probe side.
    pub build_peak_bytes: u64,
    /// With the whole probe side in one chunk; what is missing of this makes more and smaller chunks.
    pub whole_bytes: u64,
}

/// Rows of the smallest chunk that probe sides are divided into.
const CHUNK_ROWS_MIN: f64 = 1024.0;

/// Bytes per probe row of row numbers, matches and pairs.
const MATCH_ROW_BYTES: f64 = 32.0;

/// Bytes per slot of a hash table: key, first position and run, at half load.
fn table_row_bytes(key_bytes: f64, repeats: bool) -> f64 {
    2.0 * (key_bytes + 4.0) + if repeats { 12.0 } else { 0.0 }
}

impl Costed {
    pub(super) fn new(
        join: &BoundJoin,
        strategy: Strategy,
        inputs: &Inputs,
        estimates: &Estimates,
        target: &Target,
    ) -> Self {
        let radix_bits = is_partitioned(strategy).then(|| radix_bits(inputs.build.rows, target));
        let passes = radix_bits.map_or(0.0, |bits| f64::from(bits.div_ceil(target.pass_bits_max).max(1)));
        let model = Model { join, strategy, inputs, estimates, rates: &target.rates, passes };
        let phases = model.phases();
        let seconds = total_seconds(&phases, &target.rates);
        Self { strategy, phases, seconds, memory: model.memory(), radix_bits }
    }
}

/// So many partitions that one has about as many build rows as the device likes, within one pass.
pub(super) fn radix_bits(build_rows: f64, target: &Target) -> u32 {
    let partitions = (build_rows as u64).div_ceil(target.partition_rows.max(1) as u64).max(1);
    partitions.next_power_of_two().trailing_zeros().min(target.pass_bits_max)
}

fn is_partitioned(strategy: Strategy) -> bool {
    matches!(strategy, Strategy::RadixHash | Strategy::RadixHashGfur)
}

fn is_sorted(strategy: Strategy) -> bool {
    matches!(strategy, Strategy::SortMerge | Strategy::SortMergeGfur)
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
    rates: &'a Rates,
    passes: f64,
}

/// Build rows that are grouped at one time on a device: a few partitions, or a skewed one.
const GROUPED_AT_ONCE_ROWS: f64 = (1 << 20) as f64;

impl Model<'_> {
    fn phases(&self) -> Vec<PredictedPhase> {
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
                phases.push(self.sort("sort build", &self.inputs.build));
                phases.push(self.sort("sort probe", &self.inputs.probe));
            }
        }
        phases.push(self.match_rows());
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

    fn sort(&self, name: &'static str, input: &Input) -> PredictedPhase {
        let key_bytes = self.inputs.key_bytes();
        if input.sorted {
            // Found by reading the keys once.
            let bytes = input.keyed * key_bytes;
            return phase(name, bytes, bytes / self.rates.stream);
        }
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
        let extent = build.keyed * table_row_bytes(self.inputs.key_bytes(), build.repeats);
        // A place is found, then written; where keys repeat, the list of rows is written as well.
        let reads = build.keyed * if build.repeats { 3.0 } else { 2.0 };
        let seconds = build.keyed / self.rates.build_rows + self.rates.miss_seconds(reads, extent);
        phase("build table", build.keyed * self.inputs.key_bytes() + extent, seconds)
    }

    fn match_rows(&self) -> PredictedPhase {
        let (build, probe) = (&self.inputs.build, &self.inputs.probe);
        let key_bytes = self.inputs.key_bytes();
        let bytes = probe.keyed * (2.0 * key_bytes + 8.0);
        let rows = build.keyed + probe.keyed;
        let seconds = match self.strategy {
            Strategy::Hash => match self.inputs.dense_slots {
                Some(slots) => {
                    let misses = if probe.sorted { 0.0 } else { self.rates.miss_seconds(probe.keyed, 4.0 * slots) };
                    probe.keyed / self.rates.dense_rows + misses
                }
                None => {
                    let extent = build.keyed * table_row_bytes(key_bytes, build.repeats);
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
            // The probe side gives keys where it has rows, because its rows lie in order.
            let (input, index) = match output.source {
                OutputSource::Column { side, index } => (if side == build.side { build } else { probe }, index),
                OutputSource::Key { index } => (probe, self.join.keys[index].column(probe.side)),
            };
            let rows = rows_with(input);
            let Some(width) = fixed_width(self.join.table(input.side).schema.field(index).data_type()) else {
                // Read and written once, at random places unless rows come in order.
                seconds += rows / self.rates.host_values;
                continue;
            };
            let width = width.bytes() as f64;
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

    /// What making equal keys adjacent takes per build row beyond the copy: a place, and in the partitions that are being
    /// grouped a hash table with slots of a key and a run, between two and four for each row. A side of up to
    /// [`GROUPED_AT_ONCE_ROWS`] may be one partition as a whole.
    fn grouping_row_bytes(&self) -> f64 {
        let at_once = (GROUPED_AT_ONCE_ROWS / self.inputs.build.rows.max(1.0)).min(1.0);
        at_once * (4.0 + 4.0 * (self.inputs.key_bytes() + 8.0).max(12.0))
    }

    /// What the device must hold. Copies that a device which reads host memory may save are left out of the minimum.
    fn memory(&self) -> MemoryNeed {
        let (build, probe) = (&self.inputs.build, &self.inputs.probe);
        let key_bytes = self.inputs.key_bytes();
        let moved = self.strategy != Strategy::Hash;
        let copied = |input: &Input| {
            if self.rates.reads_host_memory && input.one_piece { 0.0 } else { input.copied_row_bytes(moved) }
        };
        let packed = |input: &Input| {
            let as_it_lies = self.inputs.raw && input.keyed >= input.rows;
            if as_it_lies && self.rates.reads_host_memory && input.one_piece { 0.0 } else { key_bytes }
        };
        let carries = matches!(self.strategy, Strategy::RadixHash | Strategy::SortMerge);
        let (arranged, scratch) = match self.strategy {
            Strategy::Hash => match self.inputs.dense_slots {
                Some(slots) => (4.0 * slots / build.keyed.max(1.0), 0.0),
                None => (table_row_bytes(key_bytes, build.repeats), 0.0),
            },
            _ if is_sorted(self.strategy) && build.sorted => (0.0, 0.0),
            _ => {
                let row = key_bytes + self.carried(build);
                (row, if is_sorted(self.strategy) { row } else { row + self.grouping_row_bytes() })
            }
        };
        // Carried columns replace those that were copied in, once they are arranged.
        let stays = if carries { 0.0 } else { copied(build) };
        let resident = build.rows * (packed(build) + arranged + stays);
        let peak = build.rows * (packed(build) + arranged + scratch + copied(build));
        let probe_row = packed(probe)
            + copied(probe)
            + MATCH_ROW_BYTES
            + if moved { 2.0 * (key_bytes + self.carried(probe)) } else { 0.0 };
        // Chunks take half of what is free, so that the other half is there for what they are turned into.
        let chunk = 2.0 * CHUNK_ROWS_MIN.min(probe.rows) * probe_row;
        let build_peak = peak.max(resident) + chunk;
        // Copies in are an upper bound that a device may undercut; grouping partitions is not.
        let is_partitioned = matches!(self.strategy, Strategy::RadixHash | Strategy::RadixHashGfur);
        MemoryNeed {
            minimum_bytes: if is_partitioned { build_peak } else { resident + chunk } as u64,
            build_peak_bytes: build_peak as u64,
            whole_bytes: (peak.max(resident + 2.0 * probe.rows * probe_row).max(resident + chunk)) as u64,
        }
    }
}

fn phase(name: &'static str, bytes: f64, seconds: f64) -> PredictedPhase {
    PredictedPhase { name, bytes: bytes as u64, seconds }
}
