//! What a strategy costs: roofline arithmetic on a device's measured rates.
//!
//! Each phase takes the longer of the bytes it moves over the rate of their boundary, and the rows it treats over the rate
//! of its primitive; random reads beyond the cache come on top. Phases add up, except that copies which run beside
//! primitives count only where they are longer (the roofline of Williams et al. 2009, with one roof per boundary).
//!
//! The names of phases are those under which a running join records its time.

use serde::Serialize;

use super::carried::Carried;
use super::filter;
use super::inputs::{FixedColumn, Input, Inputs};
use super::{BoundJoin, Estimates, OutputSource, Rates, Side, Strategy, Target};
use crate::columns::Role;
use crate::device::host::{FilterBytes, TableBytes, sort_scratch_bytes};
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
    /// Which columns move with the keys.
    pub(super) carried: Carried,
    /// With a filter of the build keys, the probe rows that are predicted to pass it.
    pub(super) filtered_rows: Option<f64>,
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
    /// The cheapest way to compose a strategy. `by_name`: it was asked for by name, which says what is carried.
    pub(super) fn new(
        join: &BoundJoin,
        strategy: Strategy,
        by_name: bool,
        inputs: &Inputs,
        estimates: &Estimates,
        target: &Target,
    ) -> Self {
        let cheapest = |inputs: &Inputs, filtered_rows: Option<f64>| {
            radix_bits(strategy, inputs, target)
                .into_iter()
                .map(|radix_bits| {
                    let choice = Choice { join, strategy, estimates, target, radix_bits, filtered_rows };
                    choice.price(inputs.clone(), by_name)
                })
                .min_by(|a, b| a.seconds.total_cmp(&b.seconds))
                .expect("every strategy can be composed in one way at least")
        };
        let unfiltered = cheapest(inputs, None);
        match filter::passing_rows(join, inputs, &target.rates) {
            Some(rows) => {
                let filtered = cheapest(inputs, Some(rows));
                let pays = filtered.seconds < filter::WORTH * unfiltered.seconds;
                if pays { filtered } else { unfiltered }
            }
            None => unfiltered,
        }
    }
}

/// Everything about a strategy that is decided, but for what is carried.
struct Choice<'a> {
    join: &'a BoundJoin,
    strategy: Strategy,
    estimates: &'a Estimates,
    target: &'a Target,
    radix_bits: Option<u32>,
    filtered_rows: Option<f64>,
}

impl Choice<'_> {
    /// Prices the strategy with all columns carried that can be, or none, as its name says. Where the choice is the
    /// planner's, a strategy that carries does so with the columns that are worth it.
    fn price(&self, mut inputs: Inputs, by_name: bool) -> Costed {
        let all = self.strategy.carries_payload();
        for input in [&mut inputs.build, &mut inputs.probe] {
            input.columns.iter_mut().for_each(|column| column.carried = all && column.can_be_carried());
        }
        let everything = self.costed(&inputs);
        if by_name || !all {
            return everything;
        }
        let mut best = everything;
        for side in [Role::Build, Role::Probe] {
            let now = inputs.clone();
            for chosen in [carry_what_is_worth_it, carry_nothing] {
                let mut tried = now.clone();
                chosen(&self.model(&now), side, tried.of_mut(side));
                let costed = self.costed(&tried);
                if costed.seconds < best.seconds {
                    (best, inputs) = (costed, tried);
                }
            }
        }
        // With nothing carried it would be the strategy of another name.
        if inputs.carries_something() { best } else { self.price(inputs, true) }
    }

    fn model<'a>(&'a self, inputs: &'a Inputs) -> Model<'a> {
        let passes = self.radix_bits.map_or(0.0, |bits| f64::from(bits.div_ceil(self.target.pass_bits_max).max(1)));
        let partitions = self.radix_bits.map_or(1.0, |bits| f64::from(1u32 << bits));
        let Self { join, strategy, estimates, target, .. } = *self;
        let filter = self.filtered_rows.map(|rows| {
            let bytes = FilterBytes::new(inputs.key_width, inputs.build.rows as u64, target.parallelism);
            Filter { passing: rows.min(inputs.probe.keyed), bytes }
        });
        Model { join, strategy, inputs, estimates, target, rates: &target.rates, passes, partitions, filter }
    }

    fn costed(&self, inputs: &Inputs) -> Costed {
        let model = self.model(inputs);
        let memory = model.memory();
        let phases = model.phases(probe_chunks(&memory, inputs.probe.rows, self.target));
        Costed {
            strategy: self.strategy,
            seconds: total_seconds(&phases, &self.target.rates),
            phases,
            memory,
            radix_bits: self.radix_bits,
            carried: Carried::of(self.strategy, inputs),
            filtered_rows: self.filtered_rows,
        }
    }
}

/// Carries the columns of a side whose reads at random places would take longer than moving them.
fn carry_what_is_worth_it(model: &Model<'_>, role: Role, input: &mut Input) {
    for column in &mut input.columns {
        column.carried = column.can_be_carried() && model.is_worth_carrying(role, column);
    }
}

fn carry_nothing(_: &Model<'_>, _: Role, input: &mut Input) {
    input.columns.iter_mut().for_each(|column| column.carried = false);
}

/// In how many chunks the probe side comes: each takes half of what the build side leaves free.
pub(super) fn probe_chunks(memory: &MemoryNeed, probe_rows: f64, target: &Target) -> f64 {
    let whole_chunk = memory.whole_bytes.saturating_sub(memory.resident_bytes) as f64;
    let free = target.memory_bytes.saturating_sub(memory.resident_bytes).max(1) as f64;
    (whole_chunk / free).ceil().clamp(1.0, (probe_rows / CHUNK_ROWS_MIN as f64).ceil().max(1.0))
}

/// So many partitions that one has about as many build rows as the device likes: in one pass, and if that gives too few of
/// them, in two. `None` for strategies without.
fn radix_bits(strategy: Strategy, inputs: &Inputs, target: &Target) -> Vec<Option<u32>> {
    if !strategy.is_partitioned() {
        return vec![None];
    }
    let partitions = (inputs.build.rows as u64).div_ceil(target.partition_rows.max(1) as u64).max(1);
    let wanted = partitions.next_power_of_two().trailing_zeros();
    let one_pass = wanted.min(target.pass_bits_max);
    let two_passes = wanted.min(2 * target.pass_bits_max).min(8 * inputs.key_width.bytes() as u32);
    if one_pass == two_passes { vec![Some(one_pass)] } else { vec![Some(one_pass), Some(two_passes)] }
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
    filter: Option<Filter>,
}

/// A filter of the build keys, over which probe rows pass before they are arranged.
struct Filter {
    /// Probe rows that it lets through.
    passing: f64,
    bytes: FilterBytes,
}

/// Partitions of distinct keys are of nearly one size; keys that repeat a few times make them differ.
const PARTITION_SPREAD: f64 = 1.5;

/// The most rows of one key for which a table reserves room ahead: it grows by distinct keys beyond that.
const HEAVY_TABLE_ROWS: f64 = (1 << 16) as f64;

impl Model<'_> {
    fn phases(&self, chunks: f64) -> Vec<PredictedPhase> {
        let mut phases = vec![self.pack_keys(), self.copy_in()];
        phases.extend(self.filter());
        match self.strategy {
            Strategy::Hash => phases.push(self.build_table()),
            Strategy::RadixHash | Strategy::RadixHashGfur => {
                phases.push(self.partition("partition build", Role::Build));
                phases.push(self.partition("partition probe", Role::Probe));
                if self.inputs.build.repeats || self.inputs.hashed {
                    phases.push(self.group());
                }
            }
            Strategy::SortMerge | Strategy::SortMergeGfur => {
                for (role, check, sort) in
                    [(Role::Build, "check build order", "sort build"), (Role::Probe, "check probe order", "sort probe")]
                {
                    phases.push(self.check_order(check, role));
                    if !self.inputs.of(role).sorted {
                        phases.push(self.sort(sort, role));
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
        for role in [Role::Build, Role::Probe] {
            let input = self.inputs.of(role);
            let column_bytes = input.rows * input.copied_row_bytes();
            bytes += column_bytes;
            seconds += self.copy_seconds(input, column_bytes);
            // Rows that take no part are left out of columns before these are carried.
            if moved && self.arranged(role) < input.rows {
                let gathered = 2.0 * self.arranged(role) * input.carried_row_bytes();
                bytes += gathered;
                seconds += gathered / self.rates.stream;
            }
        }
        phase("copy in", bytes, seconds)
    }

    /// What lies in one piece is not copied by a device that reads host memory.
    fn copy_seconds(&self, input: &Input, bytes: f64) -> f64 {
        if self.rates.reads_host_memory && input.one_piece { 0.0 } else { bytes / self.rates.copy_in }
    }

    /// Keys enter the filter once, and are looked up in it once; those that pass are written with their row numbers.
    fn filter(&self) -> Option<PredictedPhase> {
        let Filter { passing, bytes: FilterBytes { stays, building } } = self.filter.as_ref()?;
        let (build, probe) = (self.inputs.build.keyed, self.inputs.probe.keyed);
        let key_bytes = self.inputs.key_bytes();
        let entering = build * key_bytes + *stays as f64;
        let looking_up = probe * key_bytes + 2.0 * passing * (key_bytes + 4.0);
        let seconds = (build + probe) / self.rates.filter_rows
            + 3.0 * *building as f64 / self.rates.partition
            + self.rates.miss_seconds(probe, *stays as f64)
            + 2.0 * passing * (key_bytes + 4.0) / self.rates.stream;
        Some(phase("filter", entering + looking_up, seconds))
    }

    /// Rows of a side that are arranged and matched: those that have a key, and of the probe side those that pass the
    /// filter.
    fn arranged(&self, role: Role) -> f64 {
        match (role, &self.filter) {
            (Role::Probe, Some(filter)) => filter.passing,
            _ => self.inputs.of(role).keyed,
        }
    }

    /// Bytes per row that move with the key.
    fn carried(&self, input: &Input) -> f64 {
        if self.strategy == Strategy::Hash {
            return 0.0;
        }
        input.carried_row_bytes() + if input.needs_row_numbers() || self.inputs.hashed { 4.0 } else { 0.0 }
    }

    /// Whether reading a column at random places when the result is gathered takes longer than moving it with the keys.
    fn is_worth_carrying(&self, role: Role, column: &FixedColumn) -> bool {
        let input = self.inputs.of(role);
        let bytes = 2.0 * column.bytes * self.arranged(role);
        let mut moving = match self.strategy.is_sorted() {
            true => bytes / self.rates.sort_carry,
            false => bytes * self.passes / self.rates.partition,
        };
        if self.arranged(role) < input.rows {
            moving += bytes / self.rates.stream;
        }
        if role == Role::Build && self.strategy.is_partitioned() && (input.repeats || self.inputs.hashed) {
            moving += bytes / self.rates.stream;
        }
        self.rates.miss_seconds(self.rows_with(input), column.bytes * input.rows) > moving
    }

    /// Rows of the result in which a side has a row.
    fn rows_with(&self, input: &Input) -> f64 {
        let how = self.join.spec.how;
        let unmatched = if how.keeps_unmatched(input.side) { input.rows - input.matched } else { 0.0 };
        match how.only_side() {
            Some(side) if side == input.side => self.estimates.rows,
            Some(_) => 0.0,
            None => self.estimates.pairs + unmatched,
        }
    }

    fn partition(&self, name: &'static str, role: Role) -> PredictedPhase {
        let key_bytes = self.inputs.key_bytes();
        // Read and write everything, and read the keys once more for the histogram.
        let row_bytes = 2.0 * (key_bytes + self.carried(self.inputs.of(role))) + key_bytes;
        let bytes = self.arranged(role) * row_bytes * self.passes;
        phase(name, bytes, bytes / self.rates.partition)
    }

    /// Makes equal build keys adjacent, one partition in cache after the other.
    fn group(&self) -> PredictedPhase {
        let build = &self.inputs.build;
        let bytes = build.keyed * 2.0 * (self.inputs.key_bytes() + self.carried(build));
        phase("group build", bytes, (build.keyed / self.rates.build_rows).max(bytes / self.rates.stream))
    }

    /// Whether rows are sorted is found by reading the keys: all of them when they are, the first few when they are not.
    fn check_order(&self, name: &'static str, role: Role) -> PredictedPhase {
        let sorted = self.inputs.of(role).sorted;
        let bytes = if sorted { self.arranged(role) * self.inputs.key_bytes() } else { 0.0 };
        phase(name, bytes, bytes / self.rates.stream)
    }

    fn sort(&self, name: &'static str, role: Role) -> PredictedPhase {
        let (key_bytes, rows) = (self.inputs.key_bytes(), self.arranged(role));
        let carried = self.carried(self.inputs.of(role));
        let bytes = 2.0 * rows * (key_bytes + carried);
        let extra = 2.0 * rows * (carried - 4.0).max(0.0);
        let seconds = rows / self.rates.sort_rows_of(self.inputs.key_width) + extra / self.rates.sort_carry;
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
        let (key_bytes, probe_rows) = (self.inputs.key_bytes(), self.arranged(Role::Probe));
        let bytes = probe_rows * (2.0 * key_bytes + 8.0);
        let rows = build.keyed * chunks + probe_rows;
        let seconds = match self.strategy {
            Strategy::Hash => match self.inputs.dense_slots {
                Some(slots) => {
                    let misses = if probe.sorted { 0.0 } else { self.rates.miss_seconds(probe_rows, 4.0 * slots) };
                    probe_rows / self.rates.dense_rows + misses
                }
                None => {
                    let extent = self.table(build.keyed, build.repeats).stays as f64;
                    probe_rows / self.rates.probe_rows + self.rates.miss_seconds(probe_rows, extent)
                }
            },
            Strategy::RadixHash | Strategy::RadixHashGfur => {
                // Partitions that outgrow the cache are built and probed at random places of memory.
                let extent = self.table(build.keyed / self.partitions, build.repeats).stays as f64;
                rows / self.rates.match_rows + self.rates.miss_seconds(rows, extent)
            }
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
            let rows = self.rows_with(input);
            let Some(column) = input.columns.iter().find(|column| column.index == index) else {
                // Read and written once, at random places unless rows come in order.
                seconds += rows / self.rates.host_values;
                continue;
            };
            let width = column.bytes;
            let value_bytes = 2.0 * width * rows;
            bytes += value_bytes;
            out_bytes += width * rows;
            seconds += (rows / self.rates.gather_values).max(value_bytes / self.rates.stream);
            if self.gather_order(input, column) == Order::Random {
                seconds += self.rates.miss_seconds(rows, width * input.rows);
            }
        }
        phase("gather", bytes, seconds.max(out_bytes / self.rates.copy_out))
    }

    fn gather_order(&self, input: &Input, column: &FixedColumn) -> Order {
        let both_sorted = self.inputs.build.sorted && self.inputs.probe.sorted;
        let is_build = input.side == self.inputs.build.side;
        let moved = column.raw_key || column.carried;
        let clustered = match self.strategy {
            // The probe side is read as it lies, and finds build rows in order when both sides are sorted.
            Strategy::Hash => !is_build || both_sorted,
            Strategy::RadixHash | Strategy::RadixHashGfur => moved,
            Strategy::SortMerge | Strategy::SortMergeGfur => moved || input.sorted,
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
                let carried_columns = build.carried_row_bytes();
                let gathered = if build.is_partly_keyed() { carried_columns } else { 0.0 };
                let scratch = match self.strategy.is_sorted() {
                    true => {
                        let widest = build.columns.iter().map(|column| column.bytes).fold(4.0, f64::max) as u64;
                        let threads = self.target.parallelism;
                        sort_scratch_bytes(self.inputs.key_width, rows as u64, widest, threads) as f64
                    }
                    // The first of two passes gives what the second reads.
                    false if self.passes > 1.0 => rows * row,
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
        let filter = self.filter.as_ref().map_or(FilterBytes::default(), |filter| filter.bytes);
        let (filter_stays, filter_building) = (filter.stays as f64, filter.building as f64);
        let arranging = arranging.max(stays + filter_building) + filter_stays;
        let resident = stays + filter_stays + if needs_flags { rows } else { 0.0 };
        // Build rows that are kept at the end: their positions, and their row numbers.
        let ending = if needs_flags { 8.0 * rows } else { 0.0 };
        let minimum = packing.max(flagging).max(arranging).max(resident + (matching + smallest_chunk).max(ending));
        let minimum = minimum + SMALL_BYTES + self.scratch(build, build.rows);
        let whole = resident + matching + whole_chunk + self.scratch(probe, probe.rows);
        MemoryNeed {
            minimum_bytes: minimum as u64,
            whole_bytes: minimum.max(whole) as u64,
            resident_bytes: resident as u64,
        }
    }

    /// What arranging that many rows of a side takes on a device whose primitives need more than a host device's.
    fn scratch(&self, input: &Input, rows: f64) -> f64 {
        /// For the fixed scratch memory of some streams.
        const STREAMS_BYTES: f64 = (16 << 20) as f64;
        match self.target.row_scratch_bytes {
            Some(bytes) => STREAMS_BYTES + rows * (bytes as f64 + self.inputs.key_bytes() + self.carried(input)),
            None => 0.0,
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
        let columns = input.copied_row_bytes();
        let nullable = input.columns.iter().filter(|column| column.nullable).count();
        self.charged(input, columns) + nullable as f64 / 8.0
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
