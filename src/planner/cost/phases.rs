//! The phases of a run, each with the bytes that it moves and the seconds that it takes.

use serde::Serialize;

use super::super::inputs::{FixedColumn, Input};
use super::super::{OutputSource, Side, Strategy};
use super::{Filter, Model};
use crate::columns::Role;
use crate::device::host::FilterBytes;

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

/// Where the rows of a gather come from.
#[derive(Clone, Copy, PartialEq)]
enum Order {
    /// One after the other, or within a partition that is in cache.
    Clustered,
    /// From anywhere in the column.
    Random,
}

impl Model<'_> {
    pub(super) fn phases(&self, chunks: f64) -> Vec<PredictedPhase> {
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

    /// Whether reading a column at random places when the result is gathered takes longer than moving it with the keys.
    pub(super) fn is_worth_carrying(&self, role: Role, column: &FixedColumn) -> bool {
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
}

fn phase(name: &'static str, bytes: f64, seconds: f64) -> PredictedPhase {
    PredictedPhase { name, bytes: bytes as u64, seconds }
}
