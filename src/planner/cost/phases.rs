//! The phases of a run, each with its bytes and seconds.
//!
//! A phase is made of steps. A step is the work for one side. It has the seconds for which it keeps
//! each resource busy, and the seconds of its calls. Phases are shown as if nothing overlapped;
//! [`total_seconds`](super::steps::total_seconds) gives their total with overlap.

use super::super::inputs::{Input, Place};
use super::super::rates::{HOST_ROWS_MAX, of_width};
use super::super::{Distribution, Strategy};
use super::links::Link;
use super::memory::Chunks;
use super::resource::{Demand, Resource};
use super::steps::Step;
use super::{Filter, Model};
use crate::columns::Role;
use crate::device::Phase;
use crate::device::host::FilterBytes;

/// Seconds that each CPU thread beyond the first adds to a call that it takes part in. (A fit to
/// 120 joins of 2 to 16 morsels on sixteen threads of an H200's host, 77851dd. Waking threads with
/// no other work takes 1.3 µs each on an H100's host. That value predicts small joins at half their
/// time. A server with both devices then puts 36 of 180 joins on the slower one:
/// `mix.py --draw 60`.)
const WAKING_SECONDS: f64 = 7.5e-6;

/// Bytes of two positions, and of the first match of a row.
const PAIR_BYTES: f64 = 12.0;

/// Seconds until the threads of an exchange have streams, and the last rows have crossed. (Two
/// H200s exchanged a side of 2^22 rows in 1 to 2 ms more than its bytes explain.)
const EXCHANGE_SECONDS: f64 = 1.5e-3;

/// Source order of the rows of a gather.
#[derive(Clone, Copy, PartialEq)]
enum Order {
    /// One row after another, or within a partition that is in cache.
    Clustered,
    /// From anywhere in the column.
    Random,
}

impl Model<'_> {
    pub(super) fn steps(&self, chunks: Chunks) -> Vec<Step> {
        let mut steps = Vec::new();
        for role in [Role::Build, Role::Probe] {
            steps.push(self.pack_keys(role, chunks));
        }
        for role in [Role::Build, Role::Probe] {
            steps.push(self.copy_in(role, chunks));
        }
        if self.inputs.distribution == Distribution::Hash {
            steps.extend([Role::Build, Role::Probe].map(|role| self.exchange(role, chunks)));
        } else if self.inputs.shares_build_read {
            steps.push(self.send_to_all(chunks));
        }
        steps.extend(self.filter(chunks));
        match self.strategy {
            Strategy::Hash => steps.push(self.build_table()),
            Strategy::RadixHash | Strategy::RadixHashGfur => {
                steps.push(self.partition(Phase::PartitionBuild, Role::Build, chunks));
                steps.push(self.partition(Phase::PartitionProbe, Role::Probe, chunks));
                if (self.inputs.build.repeats || self.inputs.hashed) && !self.fuses_partition_join() {
                    steps.push(self.group());
                }
            }
            Strategy::SortMerge | Strategy::SortMergeGfur => {
                for (role, check, sort) in [
                    (Role::Build, Phase::CheckBuildOrder, Phase::SortBuild),
                    (Role::Probe, Phase::CheckProbeOrder, Phase::SortProbe),
                ] {
                    steps.push(self.check_order(check, role, chunks));
                    if !self.inputs.of(role).sorted {
                        steps.push(self.sort(sort, role, chunks));
                    }
                }
            }
        }
        let fuses_partition_join = self.fuses_partition_join();
        steps.push(if fuses_partition_join { self.join_partitions(chunks) } else { self.match_rows(chunks) });
        if self.inputs.hashed {
            steps.push(self.compare(chunks));
        }
        // A count is known once rows are matched.
        if self.join.how.only_side().is_none() && !self.join.counts_rows && !fuses_partition_join {
            let bytes = PAIR_BYTES * self.estimates.pairs;
            let step = Step::new(Phase::Expand, Role::Probe, bytes, bytes / self.rates.stream);
            let step = step.by_morsels_of(self.estimates.pairs);
            steps.push(step.calling(self.probe_batches(chunks), self.rates.call_seconds));
        }
        steps.push(self.gather(chunks));
        steps.retain(|step| !step.is_idle());
        if self.target.tuning.morsel_rows > 1 {
            steps.iter_mut().for_each(|step| *step = self.on_threads(*step));
        }
        steps
    }

    /// Adjusts a step for the threads of a CPU. Its work was priced at rates of all threads
    /// together, and takes longer if its rows are fewer morsels than threads. Only threads that had
    /// a morsel during calibration count. Each call wakes the threads that have a morsel.
    fn on_threads(&self, step: Step) -> Step {
        let (morsel_rows, threads) = (self.target.tuning.morsel_rows as f64, self.target.parallelism as f64);
        let at_work = |rows: f64, threads: f64| (rows / morsel_rows).ceil().clamp(1.0, threads.max(1.0));
        let measured = threads.min(HOST_ROWS_MAX as f64 / morsel_rows).max(1.0);
        let slower = step.morsel_rows.map_or(1.0, |rows| measured / at_work(rows, measured));
        let rows = step.morsel_rows.unwrap_or_else(|| self.inputs.of(step.role).rows);
        let waking = step.call_count * (at_work(rows, threads) - 1.0) * WAKING_SECONDS;
        let demand = step.demand.with(Resource::Device, slower * step.demand[Resource::Device]);
        Step { demand, calls: step.calls + waking, ..step }
    }

    /// Repetitions of the work on a side: once for the build side, once per chunk for the probe
    /// side.
    fn times(&self, role: Role, chunks: Chunks) -> f64 {
        if role == Role::Build { 1.0 } else { chunks.count }
    }

    /// Probe batches of all chunks together.
    fn probe_batches(&self, chunks: Chunks) -> f64 {
        let of_chunk = self.transformed(Role::Probe) / chunks.count / self.target.tuning.probe_batch_rows as f64;
        chunks.count * of_chunk.ceil().max(1.0)
    }

    /// Packs keys. The copy of the key columns belongs to this step.
    fn pack_keys(&self, role: Role, chunks: Chunks) -> Step {
        let input = self.inputs.of(role);
        let rows = self.rows_read(role);
        let source = rows * input.key_source_bytes;
        let packed = rows * self.inputs.key_bytes();
        let mut work = 0.0;
        if input.host_keys {
            work += rows / self.rates.host_values;
        }
        let is_packed = !self.inputs.raw || input.keyed < input.rows;
        if is_packed {
            work += (source + input.values.arriving + packed) / self.rates.stream;
        }
        let key_columns = if source > 0.0 { &self.links.of(role).keys[..] } else { &[] };
        let copied = key_columns.iter().map(|link| {
            let bytes = link.bytes * self.copied_rows(role, link, chunks);
            self.crossing_seconds(input, bytes)
        });
        let link_in = copied.sum::<f64>() + input.values.crossing / self.rates.copy_in;
        let calls = self.copy_calls(input, input.key_columns as f64) + f64::from(u8::from(is_packed));
        let times = self.times(role, chunks);
        let step = Step::new(Phase::PackKeys, role, source + input.values.arriving + packed, work);
        let step = step.by_morsels_of(input.rows).calling(calls * times, self.rates.call_seconds);
        step.copying(Demand::of(Resource::LinkIn, link_in))
    }

    fn copy_in(&self, role: Role, chunks: Chunks) -> Step {
        let input = self.inputs.of(role);
        let is_shared = role == Role::Probe && self.is_probe_shared();
        // Columns that move with the keys are needed before the transform, the others after it.
        let (mut bytes, mut link_in, mut deferrable, mut copied) = (0.0, 0.0, 0.0, 0.0);
        let columns = input.columns.iter().zip(&self.links.of(role).columns);
        for (column, link) in columns.filter(|(column, _)| !column.came_as_key && !is_shared) {
            let lying = column.bytes * self.copied_rows(role, link, chunks);
            let seconds = self.crossing_seconds(input, lying);
            bytes += lying;
            match column.is_moved {
                true => link_in += seconds,
                false => deferrable += seconds,
            }
            copied += 1.0;
        }
        let mut calls = self.copy_calls(input, copied);
        for text in input.text_columns.iter().filter(|text| !text.came_as_key && !is_shared) {
            let crossing = text.crossing_bytes(input.rows);
            bytes += crossing;
            deferrable += crossing / self.rates.copy_in;
            calls += 1.0;
        }
        let mut work = 0.0;
        // Rows that take no part are removed from columns before these move.
        if self.strategy != Strategy::Hash && self.transformed(role) < input.rows {
            let gathered = 2.0 * self.transformed(role) * input.moved_row_bytes();
            bytes += gathered;
            work += gathered / self.rates.stream;
            calls += input.columns.iter().filter(|column| column.is_moved).count() as f64;
        }
        Step::new(Phase::CopyIn, role, bytes, work)
            .copying(Demand::of(Resource::LinkIn, link_in))
            .deferring(Demand::of(Resource::LinkIn, deferrable))
            .calling(calls * self.times(role, chunks), self.rates.call_seconds)
    }

    /// Rows of a column that are copied because the device has not cached them.
    fn copied_rows(&self, role: Role, link: &Link, chunks: Chunks) -> f64 {
        let at_once = chunks.count <= 1.0 || (role == Role::Build && !self.inputs.shares_build_read);
        let kept_share = if at_once { link.kept_share_at_once } else { link.kept_share };
        self.rows_read(role) * (1.0 - kept_share)
    }

    /// Rows of a side that this device reads from the host.
    fn rows_read(&self, role: Role) -> f64 {
        let is_shared = role == Role::Build && self.inputs.shares_build_read;
        self.inputs.of(role).rows_read / if is_shared { self.target.ranks as f64 } else { 1.0 }
    }

    /// Seconds in which bytes of a column cross the link. A device that reads host memory copies no
    /// table stored in one piece.
    fn crossing_seconds(&self, input: &Input, bytes: f64) -> f64 {
        if self.is_read_in_place(input) { 0.0 } else { bytes / self.rates.copy_in }
    }

    fn copy_calls(&self, input: &Input, columns: f64) -> f64 {
        if self.is_read_in_place(input) { 0.0 } else { columns }
    }

    fn is_read_in_place(&self, input: &Input) -> bool {
        self.rates.reads_host_memory && input.one_piece
    }

    /// Partitions the rows that were read by bucket, sends most of them to other ranks, and copies
    /// those that arrive out of the window.
    fn exchange(&self, role: Role, chunks: Chunks) -> Step {
        let row_bytes = self.exchanged_row_bytes(self.inputs.of(role));
        let (read, arriving) = (self.keyed_read(role), self.transformed(role) * row_bytes);
        // Reads and writes everything, and reads the keys once more for the histogram.
        let partitioned = read * (2.0 * row_bytes + self.inputs.key_bytes());
        // A rank that owns more rows than others receives more than it sends.
        let crossing = self.leaving_bytes(role).max(self.of_others(arriving));
        let work = partitioned / self.rates.partition + 2.0 * arriving / self.rates.stream;
        let calls = chunks.count * self.target.ranks as f64;
        Step::new(Phase::Exchange, role, partitioned + 2.0 * arriving, work)
            .copying(Demand::of(Resource::Peers, crossing / self.target.gang.peers))
            .calling(calls, self.rates.partition_call_seconds)
            .calling(1.0, EXCHANGE_SECONDS)
    }

    /// Sends the build rows that this device reads to all others, and copies those that arrive out
    /// of the window and together.
    fn send_to_all(&self, chunks: Chunks) -> Step {
        let bytes = self.transformed(Role::Build) * self.exchanged_row_bytes(&self.inputs.build);
        Step::new(Phase::Exchange, Role::Build, 4.0 * bytes, 4.0 * bytes / self.rates.stream)
            .copying(Demand::of(Resource::Peers, self.leaving_bytes(Role::Build) / self.target.gang.peers))
            .calling(chunks.count * self.target.ranks as f64, self.rates.call_seconds)
            .calling(1.0, EXCHANGE_SECONDS)
    }

    /// Rows with a key that this device reads from the host.
    fn keyed_read(&self, role: Role) -> f64 {
        let input = self.inputs.of(role);
        input.rows_read - (input.rows - input.keyed)
    }

    /// Part of bytes that are of all other ranks.
    fn of_others(&self, bytes: f64) -> f64 {
        let ranks = self.target.ranks as f64;
        bytes * (ranks - 1.0) / ranks
    }

    /// Bytes of a side that leave a rank for others.
    fn leaving_bytes(&self, role: Role) -> f64 {
        self.of_others(self.keyed_read(role) * self.exchanged_row_bytes(self.inputs.of(role)))
    }

    /// Bytes that a rank sends to the others.
    pub(super) fn sent_bytes(&self) -> f64 {
        match self.inputs.distribution {
            Distribution::Hash => self.leaving_bytes(Role::Build) + self.leaving_bytes(Role::Probe),
            Distribution::Broadcast if self.inputs.shares_build_read => self.leaving_bytes(Role::Build),
            Distribution::Alone | Distribution::Broadcast => 0.0,
        }
    }

    /// Enters keys in the filter once and looks them up once. Rows that pass are written with their
    /// row numbers.
    fn filter(&self, chunks: Chunks) -> Option<Step> {
        let Filter { passing, bytes: FilterBytes { stays, building } } = self.filter.as_ref()?;
        let (build, probe) = (self.inputs.build.keyed, self.inputs.probe.keyed);
        let key_bytes = self.inputs.key_bytes();
        let entering = build * key_bytes + *stays as f64;
        let looking_up = probe * key_bytes + 2.0 * passing * (key_bytes + 4.0);
        let seconds = (build + probe) / self.rates.dense_rows
            + 3.0 * *building as f64 / self.rates.partition
            + self.rates.miss_seconds(probe, *stays as f64)
            + 2.0 * passing * (key_bytes + 4.0) / self.rates.stream;
        let step = Step::new(Phase::Filter, Role::Probe, entering + looking_up, seconds);
        Some(step.calling(1.0 + chunks.count, self.rates.call_seconds))
    }

    fn partition(&self, phase: Phase, role: Role, chunks: Chunks) -> Step {
        let key_bytes = self.inputs.key_bytes();
        // Reads and writes everything, and reads the keys once more for the histogram.
        let row_bytes = 2.0 * (key_bytes + self.payload_bytes(self.inputs.of(role))) + key_bytes;
        let bytes = self.transformed(role) * row_bytes * self.passes;
        let calls = self.passes * self.times(role, chunks);
        let step = Step::new(phase, role, bytes, bytes / self.rates.partition);
        step.calling(calls, self.rates.partition_call_seconds)
    }

    /// Makes equal build keys adjacent, one partition after the other, each in cache.
    fn group(&self) -> Step {
        let build = &self.inputs.build;
        let payload_bytes = self.payload_bytes(build);
        let bytes = build.keyed * 2.0 * (self.inputs.key_bytes() + payload_bytes);
        let work = build.keyed / of_width(self.rates.sort_rows, self.inputs.key_width);
        let call_seconds = of_width(self.rates.sort_call_seconds, self.inputs.key_width);
        Step::new(Phase::GroupBuild, Role::Build, bytes, work).calling(1.0, call_seconds)
    }

    /// Reads keys to check if they are sorted: all keys if they are, the first few if not.
    fn check_order(&self, phase: Phase, role: Role, chunks: Chunks) -> Step {
        /// Rows read of keys without order.
        const FIRST_ROWS: f64 = 1024.0;
        let rows = match self.inputs.of(role).sorted {
            true => self.transformed(role),
            false => self.transformed(role).min(FIRST_ROWS * self.times(role, chunks)),
        };
        let bytes = rows * self.inputs.key_bytes();
        let step = Step::new(phase, role, bytes, bytes / self.rates.stream);
        step.calling(self.times(role, chunks), self.rates.call_seconds)
    }

    fn sort(&self, phase: Phase, role: Role, chunks: Chunks) -> Step {
        let (key_bytes, rows) = (self.inputs.key_bytes(), self.transformed(role));
        let payload_bytes = self.payload_bytes(self.inputs.of(role));
        let bytes = 2.0 * rows * (key_bytes + payload_bytes);
        let extra = 2.0 * rows * (payload_bytes - 4.0).max(0.0);
        let seconds = rows / of_width(self.rates.sort_rows, self.inputs.key_width) + extra / self.rates.sort_carry;
        let call_seconds = of_width(self.rates.sort_call_seconds, self.inputs.key_width);
        Step::new(phase, role, bytes, seconds).calling(self.times(role, chunks), call_seconds)
    }

    fn build_table(&self) -> Step {
        let build = &self.inputs.build;
        if let Some(slots) = self.inputs.dense_slots {
            let bytes = build.keyed * self.inputs.key_bytes() + 4.0 * slots;
            let misses = if build.sorted { 0.0 } else { self.rates.miss_seconds(build.keyed, 4.0 * slots) };
            let step = Step::new(Phase::BuildTable, Role::Build, bytes, build.keyed / self.rates.dense_rows + misses);
            return step.by_morsels_of(build.keyed).calling(1.0, self.rates.call_seconds);
        }
        let (keys, extent) = self.table_keys();
        // A slot is found, then written. If keys repeat, the list of rows is written as well.
        let (rate, reads, call_seconds) = match build.repeats {
            true => {
                let width = self.inputs.key_width;
                (
                    of_width(self.rates.build_repeated_rows, width),
                    3.0,
                    of_width(self.rates.build_repeated_call_seconds, width),
                )
            }
            false => (self.rates.probe_rows, 2.0, self.rates.call_seconds),
        };
        let seconds = build.keyed / rate + self.rates.miss_seconds(reads * keys, extent);
        Step::new(Phase::BuildTable, Role::Build, build.keyed * self.inputs.key_bytes() + extent, seconds)
            .calling(1.0, call_seconds)
    }

    /// Distinct keys of the build side, and the bytes of their table, which has a slot for each.
    /// Equal keys are entered one after the other, and meet in the cache.
    fn table_keys(&self) -> (f64, f64) {
        let build = &self.inputs.build;
        let rows_each = if build.repeats { self.estimates.rows_of_key(build.side).max(1.0) } else { 1.0 };
        let keys = build.keyed / rows_each;
        (keys, self.table(keys, build.repeats).stays as f64)
    }

    /// Matches rows. Each chunk of the probe side passes over the whole build side once more,
    /// unless the hash table stays from chunk to chunk.
    fn match_rows(&self, chunks: Chunks) -> Step {
        let (build, probe) = (&self.inputs.build, &self.inputs.probe);
        let (key_bytes, probe_rows) = (self.inputs.key_bytes(), self.transformed(Role::Probe));
        let cold_rows = probe_rows * (1.0 - probe.hot);
        let bytes = probe_rows * (2.0 * key_bytes + 8.0);
        let rows = build.keyed * chunks.count + probe_rows;
        let seconds = match self.strategy {
            Strategy::Hash => match self.inputs.dense_slots {
                Some(slots) => {
                    let misses = if probe.sorted { 0.0 } else { self.rates.miss_seconds(cold_rows, 4.0 * slots) };
                    probe_rows / self.rates.dense_rows + misses
                }
                None => {
                    let (_, extent) = self.table_keys();
                    probe_rows / self.rates.probe_rows + self.rates.miss_seconds(cold_rows, extent)
                }
            },
            Strategy::RadixHash | Strategy::RadixHashGfur => {
                // Partitions that outgrow the cache are built and probed at random places in
                // memory.
                let extent = self.table(build.keyed / self.partitions, build.repeats).stays as f64;
                rows / self.rates.probe_rows + self.rates.miss_seconds(rows, extent)
            }
            Strategy::SortMerge | Strategy::SortMergeGfur => rows / self.rates.probe_rows,
        };
        let work = seconds.max(bytes / self.rates.stream);
        let step = Step::new(Phase::Match, Role::Probe, bytes, work);
        // Other strategies share out matching by partitions or merge ranges.
        let step = if self.strategy == Strategy::Hash { step.by_morsels_of(probe_rows) } else { step };
        step.calling(self.probe_batches(chunks), self.rates.call_seconds)
    }

    /// Joins partitions in one go. Each chunk of the probe side meets the whole build side once
    /// more. Moved columns are written side by side.
    fn join_partitions(&self, chunks: Chunks) -> Step {
        let (build, probe) = (&self.inputs.build, &self.inputs.probe);
        let rows = self.transformed(Role::Probe) + chunks.count * build.keyed;
        let written = match self.join.counts_rows {
            true => 0.0,
            false => self.inputs.key_bytes() + self.payload_bytes(build) + self.payload_bytes(probe),
        };
        let keys = rows * self.inputs.key_bytes();
        let columns = 2.0 * self.estimates.pairs * written;
        let counted = of_width(self.rates.join_rows, self.inputs.key_width);
        let work = rows / counted + columns / self.rates.stream;
        Step::new(Phase::Join, Role::Probe, keys + columns, work)
            .calling(self.probe_batches(chunks), self.rates.call_seconds)
    }

    /// Compares values behind equal hashes, at random places of both sides. Compares each probe row
    /// with the first build row that it matches. If keys repeat, also compares each build row with
    /// the one before. If the host compares, row numbers are copied out for it. Hashes of the build
    /// side are copied too, unless a table has shown that none repeats.
    fn compare(&self, chunks: Chunks) -> Step {
        let (build, probe) = (&self.inputs.build, &self.inputs.probe);
        let repeated =
            if build.repeats { build.keyed - build.keyed / self.estimates.rows_of_key(build.side) } else { 0.0 };
        let matched = probe.matched.min(self.transformed(Role::Probe));
        if self.inputs.device_makes_keys {
            // The start of a value and the value itself are read at random places: on the build
            // side, and on both sides if rows have moved.
            let bytes = build.values.stays + probe.values.stays;
            let of_build = self.rates.miss_seconds(2.0 * (matched + repeated), build.values.stays);
            let of_probe = self.rates.miss_seconds(2.0 * matched, probe.values.stays / chunks.count);
            let reads = if self.strategy == Strategy::Hash { of_build } else { of_build + of_probe };
            let seconds = bytes / self.rates.stream + reads;
            let step = Step::new(Phase::CompareKeys, Role::Probe, bytes, seconds);
            return step.calling(2.0 * self.probe_batches(chunks), self.rates.call_seconds);
        }
        let looked_at = if build.repeats || self.strategy != Strategy::Hash { build.keyed } else { 0.0 };
        let copied = looked_at * (self.inputs.key_bytes() + 4.0) + 8.0 * matched;
        let seconds = (matched + repeated) / self.rates.host_values + copied / self.rates.copy_out;
        Step::new(Phase::CompareKeys, Role::Probe, 0.0, seconds)
            .calling(self.probe_batches(chunks), self.rates.call_seconds)
    }

    /// Gathers rows of the result, in batches of the device's preferred size, with one call per
    /// column, and waits for the copy out.
    fn gather(&self, chunks: Chunks) -> Step {
        let (mut bytes, mut seconds, mut out_bytes) = (0.0, 0.0, 0.0);
        let mut gathered = 0;
        let (is_probe_shared, fuses_partition_join) = (self.is_probe_shared(), self.fuses_partition_join());
        for given in self.inputs.given.iter() {
            let input = self.inputs.of(given.role);
            if given.role == Role::Probe && is_probe_shared {
                continue;
            }
            gathered += 1;
            let rows = self.rows_with(input);
            match given.place {
                Place::Fixed(at) => {
                    let column = &input.columns[at];
                    let width = column.bytes;
                    let value_bytes = 2.0 * width * rows;
                    bytes += value_bytes;
                    out_bytes += width * rows;
                    // Joined partitions have these columns side by side already, and they are
                    // copied out from there.
                    if !(fuses_partition_join && (column.raw_key || column.is_moved)) {
                        seconds += value_bytes / self.rates.stream;
                    }
                    if self.gather_order(input, column.raw_key || column.is_moved) == Order::Random {
                        seconds += self.reading_anywhere(input, width);
                    }
                }
                Place::Text(at) => {
                    let text = &input.text_columns[at];
                    let value_bytes = text.bytes / input.rows.max(1.0);
                    let moved = 2.0 * (value_bytes + text.offset_bytes) * rows;
                    bytes += moved;
                    out_bytes += moved / 2.0;
                    seconds += moved / self.rates.stream;
                    if self.gather_order(input, false) == Order::Random {
                        seconds += self.reading_anywhere(input, value_bytes);
                    }
                }
                Place::Host => seconds += rows / self.rates.host_values,
            }
        }
        let calls = self.probe_batches(chunks) * (gathered + 1) as f64;
        let step = Step::new(Phase::Gather, Role::Probe, bytes, seconds).by_morsels_of(self.estimates.rows);
        let step = step.copying(Demand::of(Resource::LinkOut, out_bytes / self.rates.copy_out));
        step.calling(calls, self.rates.call_seconds)
    }

    /// True if the result is expected to share the columns of the probe side with its table. Each
    /// probe row must be in the result once, and stay in its place (`join/materialize.rs`). Rows
    /// that cross to another rank leave it.
    pub(super) fn is_probe_shared(&self) -> bool {
        /// Share of matched rows that counts as all of them. If a sketch finds all values of one
        /// side in the other, the share is 1. One unmatched row in a thousand would leave hardly a
        /// probe batch whole.
        const ALL: f64 = 0.999;
        let (build, probe) = (&self.inputs.build, &self.inputs.probe);
        let how = self.join.how;
        let is_once = match how.only_side() {
            Some(side) => side == probe.side && self.estimates.rows >= ALL * probe.rows,
            None => !build.repeats && (how.keeps_unmatched(probe.side) || probe.matched >= ALL * probe.rows),
        };
        let stays = match self.strategy {
            _ if self.inputs.distribution == Distribution::Hash => false,
            Strategy::Hash => true,
            Strategy::RadixHash | Strategy::RadixHashGfur => false,
            Strategy::SortMerge | Strategy::SortMergeGfur => probe.sorted,
        };
        is_once
            && stays
            && self.filter.is_none()
            && probe.keyed >= probe.rows
            && probe.long_batches
            && probe.may_be_shared
    }

    /// Extra seconds for reading the result's rows at random places of a column of the given side.
    /// Rows that meet the other side's heavy keys are few, and are read repeatedly.
    fn reading_anywhere(&self, input: &Input, width: f64) -> f64 {
        let other = if input.side == self.inputs.build.side { &self.inputs.probe } else { &self.inputs.build };
        self.rates.miss_seconds(self.rows_with(input) * (1.0 - other.hot), width * input.rows)
    }

    /// Order of a gather. `moved`: the column is in the order of the keys.
    fn gather_order(&self, input: &Input, moved: bool) -> Order {
        let both_sorted = self.inputs.build.sorted && self.inputs.probe.sorted;
        let is_build = input.side == self.inputs.build.side;
        let clustered = match self.strategy {
            // The probe side is read in table order, and finds build rows in order if both sides
            // are sorted.
            Strategy::Hash => !is_build || both_sorted,
            Strategy::RadixHash | Strategy::RadixHashGfur => moved,
            Strategy::SortMerge | Strategy::SortMergeGfur => moved || input.sorted,
        };
        if clustered { Order::Clustered } else { Order::Random }
    }
}
