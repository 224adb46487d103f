//! How fast a device does what joins are made of.

use serde::{Deserialize, Serialize};

use crate::device::{DeviceKind, KeyWidth};

/// Rows that a host device is measured with: enough that fixed costs vanish and all threads of sixteen have their share, few enough that a
/// round takes a fifth of a second.
pub(super) const HOST_ROWS_MAX: usize = 1 << 18;

/// What random reads of [`Rates::random_reads`] spread over, at the least: more than the caches of most CPUs, shared ones included. With
/// less, hash tables of tens of megabytes look twice as fast as they are.
pub(super) const FAR_BYTES: u64 = 64 << 20;

/// Measured rates of one device, all of its threads or multiprocessors working. The cost model knows a device by these
/// numbers only.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Rates {
    /// Bytes per second from host memory to the device.
    pub copy_in: f64,
    /// Bytes per second from the device to host memory.
    pub copy_out: f64,
    /// Whether host memory in one piece is used where it lies, without a copy.
    pub reads_host_memory: bool,
    /// Whether copies run beside primitives, so that a join takes the longer of both.
    pub copies_overlap: bool,
    /// Bytes per second of sequential device memory traffic, read and written.
    pub stream: f64,
    /// Bytes per second that one partition pass reads and writes.
    pub partition: f64,
    /// Rows per second that are sorted by keys of 4, 8 and 16 bytes, with 4 bytes carried, or whose equal keys are made adjacent.
    pub sort_rows: [f64; 3],
    /// Bytes per second, read and written, of what a sort carries beyond the first 4 bytes of a row.
    pub sort_carry: f64,
    /// Rows per second put into a hash table that fits in cache, by keys of 4, 8 and 16 bytes that are on two rows each, beyond what a call
    /// takes. Keys on one row each are put in as fast as they are looked up.
    pub build_repeated_rows: [f64; 3],
    /// Rows per second looked up in a hash table that fits in cache, merged, matched partition by partition, or put into a table of keys
    /// that do not repeat.
    pub probe_rows: f64,
    /// Rows per second put into, or looked up in, a perfect-hash array or a filter that fits in cache.
    pub dense_rows: f64,
    /// Rows per second of both sides, by keys of 4, 8 and 16 bytes, of partitions that are joined in one go and counted; zero for a
    /// device that does not.
    pub join_rows: [f64; 3],
    /// Independent reads per second from random places of [`FAR_BYTES`] and more.
    pub random_reads: f64,
    /// Bytes that random reads may spread over before they miss the cache.
    pub cache_bytes: u64,
    /// Values of variable length per second that the host gathers by row number, or makes keys of.
    pub host_values: f64,
    /// Seconds that a call of a primitive takes however little it has to do, until the CPU knows that it is done.
    pub call_seconds: f64,
    /// Seconds that a call takes that partitions in one pass, however little it has to do.
    pub partition_call_seconds: f64,
    /// The same of sorting by keys of 4, 8 and 16 bytes, which takes more passes the wider they are.
    pub sort_call_seconds: [f64; 3],
    /// The same of building a hash table of keys of 4, 8 and 16 bytes that repeat.
    pub build_repeated_call_seconds: [f64; 3],
}

impl Rates {
    /// A host device of that many threads, before anything is measured. Assumptions, not measurements: round numbers of
    /// the order that a server's core shows. [`calibrate`](super::calibrate()) replaces all but the size of the cache.
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

    /// An NVIDIA H200 over PCIe 5 x16. Copies, the memory's rate, partition and sort of 4- and 8-byte pairs were measured on
    /// one; the rest are assumptions, from the published joins of Wu et al. 2024 by the ratio of memory bandwidths.
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

    /// Where calibration starts from, and what holds when it cannot run.
    pub fn defaults(kind: DeviceKind, parallelism: usize) -> Self {
        match kind {
            DeviceKind::Host => Self::host(parallelism),
            DeviceKind::Cuda => Self::h200(),
        }
    }

    /// True if all of them are positive numbers. `join_rows` is zero for devices that do without.
    pub(super) fn are_sound(&self) -> bool {
        // All of them by name, so that a new one is not forgotten.
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

    /// What several rounds of measuring say together: of what was timed by itself the best, because whatever else the machine did
    /// only made it longer; of what is the difference of two times the middle, because that errs both ways.
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
        let last = rounds.last().expect("there is a round");
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

    /// Seconds that `reads` random reads spread over `extent_bytes` cost beyond what they cost in cache: the share of them
    /// that misses, as if the cache held a random part of the extent.
    pub(super) fn miss_seconds(&self, reads: f64, extent_bytes: f64) -> f64 {
        let missing = (1.0 - self.cache_bytes as f64 / extent_bytes.max(1.0)).max(0.0);
        reads * missing / self.random_reads
    }
}

/// Of rates by keys of 4, 8 and 16 bytes, the one by keys of that width.
pub(super) fn of_width(rates: [f64; 3], width: KeyWidth) -> f64 {
    match width {
        KeyWidth::W4 => rates[0],
        KeyWidth::W8 => rates[1],
        KeyWidth::W16 => rates[2],
    }
}
