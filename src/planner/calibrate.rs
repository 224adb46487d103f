//! Measures a device: runs each primitive on small data, once.

use std::sync::Arc;
use std::time::Instant;

use arrow::array::{ArrayRef, RecordBatch, StringArray};
use arrow::buffer::Buffer;

use super::Rates;
use super::rates::{FAR_BYTES, HOST_ROWS_MAX};
use crate::Result;
use crate::columns::{Rows, gather_on_host};
use crate::device::{
    CancelFlag, Column, Device, DeviceKind, KeyWidth, Keys, Payload, Positions, RadixBits, Stream, Wanted, Width,
};
use crate::memory::{Arena, Budget};

/// Rows for measuring a GPU. A GPU finishes [`HOST_ROWS_MAX`] rows in less time than a launch
/// takes.
const GPU_ROWS_MAX: usize = 1 << 22;

/// Fewer rows than these measure the cost of a call, not a rate.
const ROWS_MIN: usize = 1 << 10;

/// Rows of a call with next to nothing to do, and number of its repetitions.
const CALL_ROWS: usize = 64;
const CALLS: usize = 10;

/// Rows for measuring the cost of a call that sorts on a GPU. One block sorts far fewer rows at
/// once. These rows take as many passes as millions of rows do, and each pass takes as long as its
/// launch.
const GPU_SORTED_ROWS: usize = 1 << 15;

/// Data written between timed calls: bytes of host memory, as many as a processor's own caches
/// hold, and flags on the device.
const OTHER_BYTES: usize = 2 << 20;
const OTHER_FLAGS: usize = 1 << 20;

/// Maximum bytes of device memory that measuring takes per row.
const ROW_BYTES: u64 = 256;

/// Number of measuring rounds. Other work on the machine comes in bursts, longer than one
/// measurement.
const ROUNDS: usize = 3;

/// Rows of 8 bytes for random reads from a CPU's memory, beyond its caches.
const SPREAD_ROWS: usize = FAR_BYTES as usize / 8;

/// Rows of 8 bytes for random reads from a GPU's memory, whose second-level cache is larger.
const GPU_SPREAD_ROWS: usize = 1 << 25;

/// Rows of a hash table that stays in the second-level cache of a CPU core.
const TABLE_ROWS: usize = 1 << 13;

/// Rows of a hash table that stays in the cache shared by the whole GPU.
const GPU_TABLE_ROWS: usize = 1 << 20;

/// Measures a device's rates, or returns the defaults if it cannot be measured.
pub fn calibrate(device: &dyn Device) -> Rates {
    calibrate_telling(device, &|_| ())
}

/// Calibrates as [`calibrate`] does. Calls `tell` with the share that is done.
pub fn calibrate_telling(device: &dyn Device, tell: &dyn Fn(f64)) -> Rates {
    measure_rates(device, tell).unwrap_or_else(|| Rates::defaults(device.id().kind, device.facts().parallelism))
}

/// Measures a device's rates, in a second or two. Returns `None` for a device with too little
/// memory to measure with, and for a device that refuses, which is logged. Calls `tell` with the
/// share that is done. Any change to the measurements must raise the version in `saved_rates`.
pub fn measure_rates(device: &dyn Device, tell: &dyn Fn(f64)) -> Option<Rates> {
    let fit = device.memory().free_bytes() / ROW_BYTES;
    let (rows_max, _, _) = sizes(device);
    let rows = rows_max.min(usize::try_from(fit).unwrap_or(rows_max));
    if rows < ROWS_MIN {
        return None;
    }
    tracing::info!(device = %device.id(), "measuring the rates of the device, for one or two seconds");
    let round = |at: usize| measure(device, rows).inspect(|_| tell((at + 1) as f64 / ROUNDS as f64));
    let measured: Result<Vec<Rates>> = (0..ROUNDS).map(round).collect();
    measured
        .map(|rounds| Rates::best_of(&rounds))
        .inspect_err(|error| {
            tracing::warn!(device = %device.id(), %error, "rates could not be measured; planning with defaults");
        })
        .ok()
}

/// Returns the rows to measure, the rows of a table that stays in cache, and the rows of one that
/// does not.
fn sizes(device: &dyn Device) -> (usize, usize, usize) {
    match device.id().kind {
        DeviceKind::Host => (HOST_ROWS_MAX, TABLE_ROWS, SPREAD_ROWS),
        DeviceKind::Cuda => (GPU_ROWS_MAX, GPU_TABLE_ROWS, GPU_SPREAD_ROWS),
    }
}

fn measure(device: &dyn Device, rows_max: usize) -> Result<Rates> {
    let (_, table_rows, spread_rows) = sizes(device);
    let mut rates = Rates::defaults(device.id().kind, device.facts().parallelism);
    let stream = device.stream(CancelFlag::new())?;
    let arena = Arena::new(Budget::new("calibration memory", "--host-memory", 512 << 20));
    arena.pin_by(device.pin());
    // Tables are stored in an arena, and copies of its memory may be faster than those of any
    // other.
    let in_arena = |values: Buffer| -> Result<Buffer> {
        let mut piece = arena.allocate(values.len(), "calibration")?;
        piece.copy_from_slice(&values);
        Ok(piece.freeze())
    };
    let bench = Bench { device, stream: &stream };

    let column = |rows: usize| -> Result<Column> {
        let data = device.copy_in(&[ascending_keys(rows)], &stream)?;
        Ok(Column { data, width: Width::W8, rows, validity: None })
    };

    // Limits the data that has to cross a slow link.
    const LINK_SECONDS: f64 = 10e-3;
    let parts = |rows: usize| -> Result<Vec<Buffer>> {
        let host = in_arena(shuffled_keys(rows))?;
        let middle = host.len() / 2;
        Ok(vec![host.slice_with_length(0, middle), host.slice(middle)])
    };
    // Enough rows that a GPU's fixed cost of a copy, a few microseconds, does not look like a slow
    // link.
    let probed = rows_max.min(ROWS_MIN.max(rows_max >> 8));
    let few = parts(probed)?;
    let (_, seconds) = bench.time(|| device.copy_in(&few, &stream))?;
    let in_time = probed as f64 * LINK_SECONDS / seconds;
    let row_count = rows_max.min(in_time as usize).max(ROWS_MIN);
    let is_slow = row_count < rows_max;

    let used = device.memory().used_bytes();
    let host = shuffled_keys(row_count);
    let in_one_piece = device.copy_in(std::slice::from_ref(&host), &stream)?;
    rates.reads_host_memory = device.memory().used_bytes() == used;
    drop(in_one_piece);
    // Two pieces are put together, so any device copies them.
    let halves = parts(row_count)?;
    let (copied, seconds) = bench.time(|| device.copy_in(&halves, &stream))?;
    rates.copy_in = host.len() as f64 / seconds;
    let (_, seconds) = bench.time(|| device.copy_out(&copied, host.len(), &arena, &stream))?;
    rates.copy_out = host.len() as f64 / seconds;

    let rows = row_count as f64;
    let near = column(row_count)?;
    // All rows except the first, because a range that is the whole column would not be copied at
    // all.
    let in_order = Positions::Range(1..row_count);
    let (_, seconds) = bench.time(|| device.gather(&near, &in_order, &stream))?;
    rates.stream = 2.0 * 8.0 * rows / seconds;

    let keys = Keys { data: copied, width: KeyWidth::W8, rows: row_count };
    let payload = [Payload::RowNumber];
    let device_keys = |width, pick: &dyn Fn(usize) -> usize| -> Result<Keys> {
        let host = keys_of(width, (0..row_count).map(pick));
        Ok(Keys { data: device.copy_in(&[host], &stream)?, width, rows: row_count })
    };
    let bits = RadixBits { skip: 0, bits: partition_bits(device, row_count) };
    for (at, width) in [KeyWidth::W4, KeyWidth::W8, KeyWidth::W16].into_iter().enumerate() {
        // Distinct build keys, and probe keys that each equal one of them, as a foreign key meets a
        // primary key.
        let build = device_keys(width, &|at| at)?;
        let probe = device_keys(width, &|at| mixed(at) % row_count)?;
        let (partitioned, seconds) = bench.time(|| device.partition(&build, &payload, bits, &stream))?;
        if width == KeyWidth::W8 {
            rates.partition = rows * (3.0 * 8.0 + 2.0 * 4.0) / seconds;
        }
        let probe_partitioned = device.partition(&probe, &payload, bits, &stream)?;
        rates.join_rows[at] = 0.0;
        if device.tuning().fuses_partition_join {
            let join = || {
                device.join_partitions(
                    &partitioned,
                    &probe_partitioned,
                    0..partitioned.bounds.partitions(),
                    Wanted::Count,
                    &stream,
                )
            };
            rates.join_rows[at] = 2.0 * rows / bench.time(join)?.1;
        }
        drop((partitioned, probe_partitioned));
        let (_, seconds) = bench.time(|| device.sort(&build, &payload, &stream))?;
        rates.sort_rows[at] = rows / seconds;
        if width == KeyWidth::W8 {
            let wide = [Payload::RowNumber, Payload::Column(build.as_column())];
            let extra = bench.time(|| device.sort(&build, &wide, &stream))?.1 - seconds;
            // The difference of two short measurements can vanish. Moving a column is never faster
            // than reading and writing it.
            rates.sort_carry = (2.0 * 8.0 * rows / extra.max(1e-9)).min(rates.stream);
        }
    }

    let few_rows = CALL_ROWS.min(row_count);
    let few = Positions::Range(1..few_rows);
    rates.call_seconds = bench.call_seconds(|| device.gather(&near, &few, &stream).map(drop))?;
    let sorted_rows = match device.id().kind {
        DeviceKind::Host => few_rows,
        DeviceKind::Cuda => GPU_SORTED_ROWS.min(row_count),
    };
    let pass = RadixBits { skip: 0, bits: partition_bits(device, few_rows) };
    // Two rows of each key.
    let twice = |width: KeyWidth, rows: usize| -> Result<Keys> {
        let host = keys_of(width, (0..rows).map(|at| at / 2));
        Ok(Keys { data: device.copy_in(&[host], &stream)?, width, rows })
    };
    for (at, width) in [KeyWidth::W4, KeyWidth::W8, KeyWidth::W16].into_iter().enumerate() {
        let sorted = twice(width, sorted_rows)?;
        rates.sort_call_seconds[at] = bench.call_seconds(|| device.sort(&sorted, &payload, &stream).map(drop))?;
        rates.sort_rows[at] = beyond(rates.sort_call_seconds[at], rows, rows / rates.sort_rows[at]);
        rates.build_repeated_call_seconds[at] =
            bench.call_seconds(|| device.build_table(&sorted, true, &stream).map(drop))?;
    }
    let few_keys = twice(KeyWidth::W8, few_rows)?;
    rates.partition_call_seconds =
        bench.call_seconds(|| device.partition(&few_keys, &payload, pass, &stream).map(drop))?;

    // A table and columns that fit in cache, then others that do not.
    let small = Keys { data: keys.data.clone(), width: KeyWidth::W8, rows: row_count.min(table_rows) };
    let table = device.build_table(&small, false, &stream)?;
    for (at, width) in [KeyWidth::W4, KeyWidth::W8, KeyWidth::W16].into_iter().enumerate() {
        let keys = twice(width, small.rows)?;
        let (_, seconds) = bench.time(|| device.build_table(&keys, true, &stream))?;
        rates.build_repeated_rows[at] = beyond(rates.build_repeated_call_seconds[at], small.rows as f64, seconds);
    }
    // Probes with all rows, so that sharing them out among threads does not dominate the time.
    let probe = device_keys(KeyWidth::W8, &|at| mixed(at) % small.rows)?;
    let (_, seconds) = bench.time(|| device.probe_table(&table, &probe, 0..row_count, &stream))?;
    rates.probe_rows = beyond(rates.call_seconds, rows, seconds);
    let dense =
        Keys { data: device.copy_in(&[ascending_keys(row_count)], &stream)?, width: KeyWidth::W8, rows: row_count };
    let (table, seconds) = bench.time(|| device.build_dense_table(&dense, 0, row_count as u128 - 1, &stream))?;
    if let Some(table) = table {
        let (_, probe_seconds) = bench.time(|| device.probe_table(&table, &dense, 0..row_count, &stream))?;
        rates.dense_rows = 2.0 * rows / (seconds + probe_seconds);
    }

    let list = |numbers: Vec<u32>| -> Result<Positions> {
        let rows = numbers.len();
        Ok(Positions::List { data: device.copy_in(&[Buffer::from_vec(numbers)], &stream)?, rows, nullable: false })
    };
    let in_cache = list((0..row_count).map(|at| (mixed(at) % row_count.min(4096)) as u32).collect())?;
    let (_, cached_seconds) = bench.time(|| device.gather(&near, &in_cache, &stream))?;
    if rates.reads_host_memory || (!is_slow && device.memory().free_bytes() > 4 * 8 * spread_rows as u64) {
        let extent = column(spread_rows)?;
        let anywhere = list((0..row_count).map(|at| (mixed(at) % spread_rows) as u32).collect())?;
        let (_, seconds) = bench.time(|| device.gather(&extent, &anywhere, &stream))?;
        let missing = 1.0 - rates.cache_bytes as f64 / (8.0 * spread_rows as f64);
        let beyond = seconds - cached_seconds;
        if beyond > 0.0 && missing > 0.0 {
            rates.random_reads = rows * missing / beyond;
        }
    }

    // Work that the host does for the device: gathering strings of 16 bytes each.
    let host_rows = row_count.min(HOST_ROWS_MAX);
    let text = StringArray::from_iter_values((0..host_rows).map(|at| format!("{:016x}", mixed(at))));
    let batch = RecordBatch::try_from_iter([("text", Arc::new(text) as ArrayRef)])?;
    let strings = Rows::of(&batch.schema(), std::slice::from_ref(&batch), 0..host_rows as u64);
    let anywhere: Vec<u32> = (0..host_rows).map(|at| (mixed(at) % host_rows) as u32).collect();
    let (_, seconds) = bench.time_beside(|| gather_on_host(&strings, 0, &anywhere, &arena).map(drop))?;
    rates.host_values = host_rows as f64 / seconds;
    Ok(rates)
}

/// Rows per second of a call, excluding the time of a call with next to no rows. That time is
/// priced separately, and on a GPU it is a good part of the time for a million rows.
fn beyond(call_seconds: f64, rows: f64, seconds: f64) -> f64 {
    /// Minimum share of the time that remains, because both times are measured and may err.
    const LEAST: f64 = 0.25;
    rows / (seconds - call_seconds).max(LEAST * seconds)
}

struct Bench<'a> {
    device: &'a dyn Device,
    stream: &'a Stream,
}

impl Bench<'_> {
    /// Runs the work to completion three times and returns the last result with the shortest time.
    /// The first run warms up, and other work on the machine only adds time.
    fn time<T>(&self, work: impl Fn() -> Result<T>) -> Result<(T, f64)> {
        let mut seconds = f64::INFINITY;
        let mut last = None;
        for _ in 0..3 {
            let start = Instant::now();
            let done = work()?;
            self.device.synchronize(self.stream)?;
            seconds = seconds.min(start.elapsed().as_secs_f64());
            last = Some(done);
        }
        Ok((last.expect("the work ran three times"), seconds.max(1e-9)))
    }

    /// Seconds of a call with next to nothing to do, between other calls as in a join. Takes the
    /// median of calls. Before each call the device does something else, and other data fills the
    /// processor's caches.
    fn call_seconds(&self, call: impl Fn() -> Result<()>) -> Result<f64> {
        let mut others = vec![0u64; OTHER_BYTES / 8];
        let mut timed = |at: usize| {
            others.iter_mut().for_each(|value| *value = value.wrapping_add(at as u64));
            std::hint::black_box(&mut others);
            drop(self.device.new_flags(OTHER_FLAGS, self.stream)?);
            self.device.synchronize(self.stream)?;
            let start = Instant::now();
            call()?;
            self.device.synchronize(self.stream)?;
            Ok(start.elapsed().as_secs_f64())
        };
        // The first call may have something to set up.
        let mut seconds = (0..=CALLS).map(&mut timed).skip(1).collect::<Result<Vec<f64>>>()?;
        seconds.sort_unstable_by(f64::total_cmp);
        Ok(seconds[CALLS / 2].max(1e-9))
    }

    /// Measures host work as [`time`](Self::time) does, on the CPU threads that a join on this
    /// device has for it.
    fn time_beside(&self, work: impl Fn() -> Result<()> + Sync) -> Result<((), f64)> {
        self.time(|| {
            let mut outcome = Ok(());
            self.device.install(&mut || outcome = work());
            outcome
        })
    }
}

/// Returns the fewest bits that give partitions of the device's preferred size, but enough for a
/// realistic pass.
fn partition_bits(device: &dyn Device, rows: usize) -> u32 {
    const BITS_MIN: u32 = 6;
    let partitions = rows.div_ceil(device.tuning().partition_rows.max(1)).next_power_of_two();
    partitions.trailing_zeros().max(BITS_MIN).min(device.tuning().pass_bits_max)
}

/// Distinct 64-bit keys without order.
fn shuffled_keys(rows: usize) -> Buffer {
    Buffer::from_vec((0..rows).map(|at| mixed(at) as u64).collect::<Vec<u64>>())
}

/// Returns the keys with the given numbers. Distinct numbers give distinct keys, without order,
/// over all bits of the width.
fn keys_of(width: KeyWidth, numbers: impl Iterator<Item = usize>) -> Buffer {
    match width {
        KeyWidth::W4 => Buffer::from_vec(numbers.map(|at| (at as u32).wrapping_mul(0x9e37_79b1)).collect::<Vec<u32>>()),
        KeyWidth::W8 => Buffer::from_vec(numbers.map(|at| mixed(at) as u64).collect::<Vec<u64>>()),
        KeyWidth::W16 => {
            let wide = |at: usize| (mixed(at) as u128) << 64 | mixed(!at) as u128;
            Buffer::from_vec(numbers.map(wide).collect::<Vec<u128>>())
        }
    }
}

fn ascending_keys(rows: usize) -> Buffer {
    Buffer::from_vec((0..rows as u64).collect::<Vec<u64>>())
}

/// A bijection of 64-bit numbers: the finalizer of SplitMix64 (Steele et al. 2014).
fn mixed(at: usize) -> usize {
    let mut x = (at as u64).wrapping_add(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    (x ^ (x >> 31)) as usize
}
