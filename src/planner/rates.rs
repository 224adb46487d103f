//! Rates at which a device does the parts of a join.

use serde::{Deserialize, Serialize};

use crate::device::{DeviceKind, KeyWidth};

/// Rows for measuring a host device. They are enough that fixed costs vanish and each of sixteen
/// threads has a share. They are few enough that a round takes a fifth of a second.
pub(super) const HOST_ROWS_MAX: usize = 1 << 18;

/// Minimum bytes that the random reads of [`Rates::random_reads`] spread over: more than the caches
/// of most CPUs, shared ones included. With less, hash tables of tens of megabytes look twice as
/// fast as they are.
pub(super) const FAR_BYTES: u64 = 64 << 20;

/// Measured rates of one device, with all of its threads or multiprocessors at work. The cost model
/// knows a device by these numbers only.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Rates {
    /// Bytes per second from host memory to the device.
    pub copy_in: f64,
    /// Bytes per second from the device to host memory.
    pub copy_out: f64,
    /// True if the device uses contiguous host memory in place, without a copy.
    pub reads_host_memory: bool,
    /// True if copies run in parallel with primitives, so that a join takes the longer of both.
    pub copies_overlap: bool,
    /// Bytes per second of sequential device memory traffic, counting reads and writes.
    pub stream: f64,
    /// Bytes per second of one partition pass, counting reads and writes.
    pub partition: f64,
    /// Rows per second sorted, or grouped by equal keys, for keys of 4, 8 and 16 bytes with 4 bytes
    /// of payload.
    pub sort_rows: [f64; 3],
    /// Bytes per second, counting reads and writes, that a sort moves beyond the first 4 bytes of
    /// a row.
    pub sort_carry: f64,
    /// Rows per second built into a hash table that fits in cache, for keys of 4, 8 and 16 bytes on
    /// two rows each. Excludes the cost of a call. Keys on one row each are built at the rate of
    /// `probe_rows`.
    pub build_repeated_rows: [f64; 3],
    /// Rows per second looked up in a hash table that fits in cache. The rate also applies to
    /// merging, matching by partition, and building a table of keys that do not repeat.
    pub probe_rows: f64,
    /// Rows per second built into, or looked up in, a perfect-hash array or a filter that fits in
    /// cache.
    pub dense_rows: f64,
    /// Fused partition join, count only: rows per second of both sides, for keys of 4, 8 and 16
    /// bytes. 0 if unsupported.
    pub join_rows: [f64; 3],
    /// Independent reads per second from random places of at least [`FAR_BYTES`].
    pub random_reads: f64,
    /// Bytes that random reads may spread over before they miss the cache.
    pub cache_bytes: u64,
    /// Variable-length values per second that the host gathers by row number, or makes keys of.
    pub host_values: f64,
    /// Minimum seconds of a primitive's call, until the CPU knows that it is done.
    pub call_seconds: f64,
    /// Minimum seconds of a call that partitions in one pass.
    pub partition_call_seconds: f64,
    /// Minimum seconds of a call that sorts by keys of 4, 8 and 16 bytes. Wider keys take more
    /// passes.
    pub sort_call_seconds: [f64; 3],
    /// Minimum seconds of a call that builds a hash table of repeated keys of 4, 8 and 16 bytes.
    pub build_repeated_call_seconds: [f64; 3],
}

impl Rates {
    /// Rates of a host device with the given threads, before measurement. They are assumptions:
    /// round numbers of the order of a server's core. [`calibrate`](super::calibrate()) replaces
    /// all except the cache size.
    pub fn host(threads: usize) -> Self {
        let threads = threads.max(1) as f64;
        Self {
            copy_in: 4e9 * threads,
            copy_out: 4e9 * threads,
            reads_host_memory: true,
            copies_overlap: false,
            stream: 8e9 * threads,
            partition: 3e9 * threads,
            sort_rows: [40e6 * threads, 20e6 * threads, 8e6 * threads],
            sort_carry: 1.5e9 * threads,
            build_repeated_rows: [60e6 * threads; 3],
            probe_rows: 150e6 * threads,
            dense_rows: 400e6 * threads,
            join_rows: [0.0; 3],
            random_reads: 60e6 * threads,
            cache_bytes: 2 << 20,
            host_values: 30e6 * threads,
            call_seconds: 5e-6,
            partition_call_seconds: 10e-6,
            sort_call_seconds: [10e-6; 3],
            build_repeated_call_seconds: [10e-6; 3],
        }
    }

    /// Rates of an NVIDIA H200 over PCIe 5 x16. Copies, the memory's rate, and partition and sort
    /// of 4- and 8-byte pairs were measured on one. The rest are assumptions, scaled from the
    /// published joins of Wu et al. 2024 by the ratio of memory bandwidths.
    pub fn h200() -> Self {
        Self {
            copy_in: 55.6e9,
            copy_out: 55.4e9,
            reads_host_memory: false,
            copies_overlap: true,
            stream: 4.28e12,
            // 62.5 G pairs/s of 8 bytes, read twice and written once in each of two passes.
            partition: 3.0e12,
            sort_rows: [31.6e9, 13.0e9, 5.4e9],
            sort_carry: 2.5e11,
            build_repeated_rows: [4e9, 4e9, 2e9],
            probe_rows: 60e9,
            dense_rows: 120e9,
            join_rows: [100e9, 80e9, 50e9],
            random_reads: 43e9,
            cache_bytes: 60 << 20,
            host_values: 30e6 * 16.0,
            call_seconds: 20e-6,
            partition_call_seconds: 60e-6,
            sort_call_seconds: [60e-6, 60e-6, 120e-6],
            build_repeated_call_seconds: [200e-6, 200e-6, 300e-6],
        }
    }

    /// Returns the rates of a device that is as many times as fast. Links and calls stay as they
    /// are.
    #[must_use]
    pub fn of_faster_device(self, times: f64) -> Self {
        let all = |rates: [f64; 3]| rates.map(|rate| rate * times);
        Self {
            stream: self.stream * times,
            partition: self.partition * times,
            sort_rows: all(self.sort_rows),
            sort_carry: self.sort_carry * times,
            build_repeated_rows: all(self.build_repeated_rows),
            probe_rows: self.probe_rows * times,
            dense_rows: self.dense_rows * times,
            join_rows: all(self.join_rows),
            random_reads: self.random_reads * times,
            ..self
        }
    }

    /// Returns the rates that calibration starts from, also used if it cannot run.
    pub fn defaults(kind: DeviceKind, parallelism: usize) -> Self {
        match kind {
            DeviceKind::Host => Self::host(parallelism),
            DeviceKind::Cuda => Self::h200(),
        }
    }

    /// True if all rates are positive numbers. `join_rows` may be zero, for devices without a fused
    /// join.
    pub(super) fn are_sound(&self) -> bool {
        // All fields are named, so that a new one is not forgotten.
        let Self {
            copy_in,
            copy_out,
            reads_host_memory: _,
            copies_overlap: _,
            stream,
            partition,
            sort_rows,
            sort_carry,
            build_repeated_rows,
            probe_rows,
            dense_rows,
            join_rows: [join_4, join_8, join_16],
            random_reads,
            cache_bytes: _,
            host_values,
            call_seconds,
            partition_call_seconds,
            sort_call_seconds,
            build_repeated_call_seconds,
        } = *self;
        let bytes = [copy_in, copy_out, stream, partition, sort_carry];
        let rows = [probe_rows, dense_rows, random_reads, host_values];
        let calls = [call_seconds, partition_call_seconds];
        let by_width = [sort_rows, build_repeated_rows, sort_call_seconds, build_repeated_call_seconds];
        [join_4, join_8, join_16].into_iter().all(|value| value.is_finite() && value >= 0.0)
            && bytes
                .into_iter()
                .chain(rows)
                .chain(calls)
                .chain(by_width.into_iter().flatten())
                .all(|value| value.is_finite() && value > 0.0)
    }

    /// Combines several rounds of measuring. Directly timed rates take the best round, because
    /// other work on the machine only adds time. Rates from a difference of two times take the
    /// median, because differences err both ways.
    pub(super) fn best_of(rounds: &[Self]) -> Self {
        let best = |of: &dyn Fn(&Self) -> f64| rounds.iter().map(of).fold(f64::NEG_INFINITY, f64::max);
        let least = |of: &dyn Fn(&Self) -> f64| rounds.iter().map(of).fold(f64::INFINITY, f64::min);
        let middle = |of: &dyn Fn(&Self) -> f64| {
            let mut values: Vec<f64> = rounds.iter().map(of).collect();
            values.sort_by(f64::total_cmp);
            values[values.len() / 2]
        };
        let each = |of: &dyn Fn(&Self) -> [f64; 3]| [0, 1, 2].map(|at| best(&|rates| of(rates)[at]));
        let least_each = |of: &dyn Fn(&Self) -> [f64; 3]| [0, 1, 2].map(|at| least(&|rates| of(rates)[at]));
        let last = rounds.last().expect("there is at least one round");
        Self {
            copy_in: best(&|rates| rates.copy_in),
            copy_out: best(&|rates| rates.copy_out),
            stream: best(&|rates| rates.stream),
            partition: best(&|rates| rates.partition),
            sort_rows: each(&|rates| rates.sort_rows),
            sort_carry: middle(&|rates| rates.sort_carry),
            build_repeated_rows: each(&|rates| rates.build_repeated_rows),
            probe_rows: best(&|rates| rates.probe_rows),
            dense_rows: best(&|rates| rates.dense_rows),
            join_rows: each(&|rates| rates.join_rows),
            random_reads: middle(&|rates| rates.random_reads),
            host_values: best(&|rates| rates.host_values),
            call_seconds: least(&|rates| rates.call_seconds),
            partition_call_seconds: least(&|rates| rates.partition_call_seconds),
            sort_call_seconds: least_each(&|rates| rates.sort_call_seconds),
            build_repeated_call_seconds: least_each(&|rates| rates.build_repeated_call_seconds),
            ..last.clone()
        }
    }

    /// Seconds that `reads` random reads spread over `extent_bytes` cost beyond their cost in
    /// cache. Counts the share of reads that miss, assuming that the cache holds a random part of
    /// the extent.
    pub(super) fn miss_seconds(&self, reads: f64, extent_bytes: f64) -> f64 {
        let missing = (1.0 - self.cache_bytes as f64 / extent_bytes.max(1.0)).max(0.0);
        reads * missing / self.random_reads
    }
}

/// Selects the rate for the given key width from rates for 4, 8 and 16 bytes.
pub(super) fn of_width(rates: [f64; 3], width: KeyWidth) -> f64 {
    match width {
        KeyWidth::W4 => rates[0],
        KeyWidth::W8 => rates[1],
        KeyWidth::W16 => rates[2],
    }
}
