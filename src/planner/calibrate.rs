//! Measuring a device: each primitive on small data, once.

use std::sync::Arc;
use std::time::Instant;

use arrow::array::{ArrayRef, RecordBatch, StringArray};
use arrow::buffer::Buffer;

use super::Rates;
use super::rates::{FAR_BYTES, HOST_ROWS_MAX};
use crate::Result;
use crate::columns::{Rows, gather_on_host};
use crate::device::{
    CancelFlag, Carry, Column, Device, DeviceKind, KeyWidth, Keys, Positions, RadixBits, Stream, Wanted, Width,
};
use crate::memory::{Arena, Budget};

/// Rows that a GPU is measured with, which is through with as few as a CPU's ([`HOST_ROWS_MAX`]) before they are launched.
const GPU_ROWS_MAX: usize = 1 << 22;

/// Fewer rows than these measure the cost of a call, not a rate.
const ROWS_MIN: usize = 1 << 10;

/// Rows of a call that has next to nothing to do, and how often it is repeated.
const CALL_ROWS: usize = 64;
const CALLS: usize = 10;

/// Rows of a call that sorts on a GPU. Far fewer are sorted by one block at once, and these in as many passes as millions, each
/// of which takes what its launch takes.
const GPU_SORTED_ROWS: usize = 1 << 15;

/// What is written between calls: host memory, as much as a processor's own caches hold, and flags on the device.
const OTHER_BYTES: usize = 2 << 20;
const OTHER_FLAGS: usize = 1 << 20;

/// Bytes of device memory that measuring takes per row, at the most.
const ROW_BYTES: u64 = 256;

/// How often all of it is measured. What else the machine does comes in bursts, longer than one measurement.
const ROUNDS: usize = 3;

/// Rows of 8 bytes whose random reads go to memory.
const SPREAD_ROWS: usize = FAR_BYTES as usize / 8;

/// The same for a GPU, whose second-level cache is larger.
const GPU_SPREAD_ROWS: usize = 1 << 25;

/// Rows of a hash table that stays in the second cache of a CPU's thread.
const TABLE_ROWS: usize = 1 << 13;

/// The same for a GPU, in the cache that all of it shares.
const GPU_TABLE_ROWS: usize = 1 << 20;

/// A device's rates as they are measured, or the defaults when they cannot be.
pub fn calibrate(device: &dyn Device) -> Rates {
    calibrate_telling(device, &|_| ())
}

/// As [`calibrate`]; `tell` is told the share that is done.
pub fn calibrate_telling(device: &dyn Device, tell: &dyn Fn(f64)) -> Rates {
    measure_rates(device, tell).unwrap_or_else(|| Rates::defaults(device.id().kind, device.info().parallelism))
}

/// Measures a device's rates, in a second or two. `None` for a device with too little memory to measure with, and for one
/// that refuses, which is logged. `tell` is told the share that is done. Whoever changes what is measured, or how, counts it in
/// `kept_rates`.
pub fn measure_rates(device: &dyn Device, tell: &dyn Fn(f64)) -> Option<Rates> {
    let fit = device.memory().free_bytes() / ROW_BYTES;
    let (rows_max, _, _) = sizes(device);
    let rows = rows_max.min(usize::try_from(fit).unwrap_or(rows_max));
    if rows < ROWS_MIN {
        return None;
    }
    tracing::info!(device = %device.id(), "measuring what it can do, for a second or two");
    let round = |at: usize| measure(device, rows).inspect(|_| tell((at + 1) as f64 / ROUNDS as f64));
    let measured: Result<Vec<Rates>> = (0..ROUNDS).map(round).collect();
    measured
        .map(|rounds| Rates::best_of(&rounds))
        .inspect_err(|error| {
            tracing::warn!(device = %device.id(), %error, "rates could not be measured; planning with defaults");
        })
        .ok()
}

/// Rows that are measured, rows of a table that stays in cache, and rows that do not.
fn sizes(device: &dyn Device) -> (usize, usize, usize) {
    match device.id().kind {
        DeviceKind::Host => (HOST_ROWS_MAX, TABLE_ROWS, SPREAD_ROWS),
        DeviceKind::Cuda => (GPU_ROWS_MAX, GPU_TABLE_ROWS, GPU_SPREAD_ROWS),
    }
}

fn measure(device: &dyn Device, rows_max: usize) -> Result<Rates> {
    let (_, table_rows, spread_rows) = sizes(device);
    let mut rates = Rates::defaults(device.id().kind, device.info().parallelism);
    let stream = device.stream(CancelFlag::new())?;
    let arena = Arena::new(Budget::new("calibration memory", "--host-memory", 512 << 20));
    arena.pin_by(device.pin());
    // Tables lie in an arena, and copies of its memory may be quicker than those of any other.
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

    // Over a slow link, what has to cross it is kept small.
    const LINK_SECONDS: f64 = 10e-3;
    let parts = |rows: usize| -> Result<Vec<Buffer>> {
        let host = in_arena(shuffled_keys(rows))?;
        let middle = host.len() / 2;
        Ok(vec![host.slice_with_length(0, middle), host.slice(middle)])
    };
    // So many that a GPU's fixed cost of a copy, some microseconds, does not look like a slow link.
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
    // Two pieces are put together, so they are copied on any device.
    let halves = parts(row_count)?;
    let (copied, seconds) = bench.time(|| device.copy_in(&halves, &stream))?;
    rates.copy_in = host.len() as f64 / seconds;
    let (_, seconds) = bench.time(|| device.copy_out(&copied, host.len(), &arena, &stream))?;
    rates.copy_out = host.len() as f64 / seconds;

    let rows = row_count as f64;
    let near = column(row_count)?;
    // All rows but the first: a range that is the whole column would not be copied at all.
    let in_order = Positions::Range(1..row_count);
    let (_, seconds) = bench.time(|| device.gather(&near, &in_order, &stream))?;
    rates.stream = 2.0 * 8.0 * rows / seconds;

    let keys = Keys { data: copied, width: KeyWidth::W8, rows: row_count };
    let carry = [Carry::RowNumber];
    let device_keys = |width, pick: &dyn Fn(usize) -> usize| -> Result<Keys> {
        let host = keys_of(width, (0..row_count).map(pick));
        Ok(Keys { data: device.copy_in(&[host], &stream)?, width, rows: row_count })
    };
    let bits = RadixBits { skip: 0, bits: partition_bits(device, row_count) };
    for (at, width) in [KeyWidth::W4, KeyWidth::W8, KeyWidth::W16].into_iter().enumerate() {
        // Distinct keys, and others that each are one of these: so a foreign key meets a primary key.
        let build = device_keys(width, &|at| at)?;
        let probe = device_keys(width, &|at| mixed(at) % row_count)?;
        let (partitioned, seconds) = bench.time(|| device.partition(&build, &carry, bits, &stream))?;
        if width == KeyWidth::W8 {
            rates.partition = rows * (3.0 * 8.0 + 2.0 * 4.0) / seconds;
        }
        let probe_partitioned = device.partition(&probe, &carry, bits, &stream)?;
        rates.join_rows[at] = 0.0;
        if device.info().joins_partitions {
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
        let (_, seconds) = bench.time(|| device.sort(&build, &carry, &stream))?;
        rates.sort_rows[at] = rows / seconds;
        if width == KeyWidth::W8 {
            let wide = [Carry::RowNumber, Carry::Column(build.as_column())];
            let extra = bench.time(|| device.sort(&build, &wide, &stream))?.1 - seconds;
            // The difference of two short measurements can vanish; moving a column is never faster than reading and
            // writing it.
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
        rates.sort_call_seconds[at] = bench.call_seconds(|| device.sort(&sorted, &carry, &stream).map(drop))?;
        rates.sort_rows[at] = beyond(rates.sort_call_seconds[at], rows, rows / rates.sort_rows[at]);
        rates.build_repeated_call_seconds[at] =
            bench.call_seconds(|| device.build_table(&sorted, true, &stream).map(drop))?;
    }
    let few_keys = twice(KeyWidth::W8, few_rows)?;
    rates.partition_call_seconds =
        bench.call_seconds(|| device.partition(&few_keys, &carry, pass, &stream).map(drop))?;

    // A table and columns that fit in cache, then ones that do not.
    let small = Keys { data: keys.data.clone(), width: KeyWidth::W8, rows: row_count.min(table_rows) };
    let table = device.build_table(&small, false, &stream)?;
    for (at, width) in [KeyWidth::W4, KeyWidth::W8, KeyWidth::W16].into_iter().enumerate() {
        let keys = twice(width, small.rows)?;
        let (_, seconds) = bench.time(|| device.build_table(&keys, true, &stream))?;
        rates.build_repeated_rows[at] = beyond(rates.build_repeated_call_seconds[at], small.rows as f64, seconds);
    }
    // With all rows, so that sharing them out among threads is not what takes the time.
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
        Ok(Positions::List { data: device.copy_in(&[Buffer::from_vec(numbers)], &stream)?, rows, may_miss: false })
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

    // What the host does for the device: strings gathered, of 16 bytes each.
    let host_rows = row_count.min(HOST_ROWS_MAX);
    let text = StringArray::from_iter_values((0..host_rows).map(|at| format!("{:016x}", mixed(at))));
    let batch = RecordBatch::try_from_iter([("text", Arc::new(text) as ArrayRef)])?;
    let strings = Rows::of(&batch.schema(), std::slice::from_ref(&batch), 0..host_rows as u64);
    let anywhere: Vec<u32> = (0..host_rows).map(|at| (mixed(at) % host_rows) as u32).collect();
    let (_, seconds) = bench.time_beside(|| gather_on_host(&strings, 0, &anywhere, &arena).map(drop))?;
    rates.host_values = host_rows as f64 / seconds;
    Ok(rates)
}

/// Rows per second of a call with so many, beyond what a call takes with next to none: that is priced apart, and on a GPU it is a good part of
/// the time for a million rows.
fn beyond(call_seconds: f64, rows: f64, seconds: f64) -> f64 {
    /// Both are measured, and so may err.
    const LEAST: f64 = 0.25;
    rows / (seconds - call_seconds).max(LEAST * seconds)
}

struct Bench<'a> {
    device: &'a dyn Device,
    stream: &'a Stream,
}

impl Bench<'_> {
    /// Runs a piece of work until it is done, three times, and answers the shortest time: the first one warms up, and
    /// whatever else the machine does only ever adds.
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
        Ok((last.expect("it ran three times"), seconds.max(1e-9)))
    }

    /// What a call with next to nothing to do takes among others, as in a join: the median of calls before each of which the device did
    /// something else, and the processor's caches were filled with it.
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
        // The first one may have something to set up.
        let mut seconds = (0..=CALLS).map(&mut timed).skip(1).collect::<Result<Vec<f64>>>()?;
        seconds.sort_unstable_by(f64::total_cmp);
        Ok(seconds[CALLS / 2].max(1e-9))
    }

    /// As [`time`](Self::time), for work of the host's, on the CPU threads that a join on this device has for it.
    fn time_beside(&self, work: impl Fn() -> Result<()> + Sync) -> Result<((), f64)> {
        self.time(|| {
            let mut outcome = Ok(());
            self.device.beside(&mut || outcome = work());
            outcome
        })
    }
}

/// As few bits as give partitions of a size that the device likes, but enough for a pass to be one.
fn partition_bits(device: &dyn Device, rows: usize) -> u32 {
    const BITS_MIN: u32 = 6;
    let partitions = rows.div_ceil(device.info().partition_rows.max(1)).next_power_of_two();
    partitions.trailing_zeros().max(BITS_MIN).min(device.info().pass_bits_max)
}

/// Distinct 64-bit keys without order.
fn shuffled_keys(rows: usize) -> Buffer {
    Buffer::from_vec((0..rows).map(|at| mixed(at) as u64).collect::<Vec<u64>>())
}

/// The keys with those numbers: distinct numbers have distinct keys, without order, over all bits of the width.
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
