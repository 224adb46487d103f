//! Joins within a device's memory: the tables start there, and the result stays there.
//!
//! ```sh
//! cargo bench -p dovetail-bench --bench resident -- --device cuda:0 --build 128M --probe 128M \
//!     --payloads 2
//! ```
//!
//! Measures what the papers measure. It calls the primitives of the strategy `radix-hash` on a GPU
//! as the strategy does. Nothing crosses the link except the bounds of partitions.
//!
//! Prints one JSON line: seconds (median and minimum of the runs), the seconds of the three steps,
//! and the bytes to read the tables and write the result once. Separate runs, which wait after each
//! step, measure the steps. An untimed run precedes each timed run. The result is checked after the
//! clock has stopped: its number of rows, the build payload of each row's key, and the sum of the
//! probe side's payload. Payloads are independent of keys.

use std::time::Instant;

use arrow::buffer::Buffer;
use clap::Parser;
use dovetail::device::{
    CancelFlag, Column, Device, DeviceId, JoinedPartitions, JoinedRows, KeyWidth, Keys, Partitions, Payload, RadixBits,
    Stream, Wanted, Width, open_device, parse_device,
};
use dovetail::memory::{Arena, Budget};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use rand_distr::{Distribution, Zipf};
use rayon::prelude::*;
use serde_json::json;

mod arguments;
mod record;
use arguments::count;
use record::Recorder;

#[derive(Parser)]
struct Options {
    /// Rows of the build side, with distinct keys. A power of two
    #[arg(long, default_value = "1M", value_parser = count)]
    build: usize,
    /// Rows of the probe side, each with one match
    #[arg(long, default_value = "1M", value_parser = count)]
    probe: usize,
    /// Bytes of the key and of each payload column: 4 or 8
    #[arg(long, default_value_t = 4)]
    width: usize,
    /// Payload columns of each side
    #[arg(long, default_value_t = 1)]
    payloads: usize,
    /// Multiply keys by an odd constant, so that they are sparse over the whole range
    #[arg(long)]
    sparse: bool,
    /// Exponent of Zipf's law for the probe keys. 0 is uniform
    #[arg(long, default_value_t = 0.0)]
    zipf: f64,
    /// Count the rows instead of making them
    #[arg(long)]
    count: bool,
    /// Device: host, or cuda:N
    #[arg(long, default_value = "host", value_parser = parse_device)]
    device: DeviceId,
    #[arg(long, default_value_t = 2)]
    threads: usize,
    #[arg(long, default_value_t = 7)]
    runs: usize,
    /// Append the measurement to benches/results
    #[arg(long)]
    record: bool,
    /// Option that cargo passes; no effect
    #[arg(long, hide = true)]
    bench: bool,
}

/// Numbers of a side's rows. Keys are below the number of build rows, and payloads are random.
struct Side {
    keys: Vec<u32>,
    payloads: Vec<Vec<u32>>,
}

impl Side {
    fn new(options: &Options, rows: usize, seed: u64, key: impl Fn(usize, &mut SmallRng) -> u32 + Sync) -> Self {
        const PART: usize = 1 << 20;
        let numbers = |seed: u64, number: &(dyn Fn(usize, &mut SmallRng) -> u32 + Sync)| -> Vec<u32> {
            let mut numbers = vec![0; rows];
            numbers.par_chunks_mut(PART).enumerate().for_each(|(part, numbers)| {
                let mut random = SmallRng::seed_from_u64(seed << 32 | part as u64);
                numbers.iter_mut().enumerate().for_each(|(at, to)| *to = number(part * PART + at, &mut random));
            });
            numbers
        };
        let payloads = (1..=options.payloads as u64).map(|at| numbers(seed + at, &|_, random| random.random()));
        let payloads = payloads.collect();
        Self { keys: numbers(seed, &key), payloads }
    }
}

/// Permutes the numbers below `count`, a power of two. Each step is a bijection.
fn shuffled(at: usize, count: usize) -> u32 {
    let (mask, half) = (count - 1, count.trailing_zeros() / 2);
    let mut at = at.wrapping_mul(0x9e37_79b1) & mask;
    at ^= at >> half.max(1);
    at = at.wrapping_mul(0x85eb_ca6b) & mask;
    (at ^ (at >> half.max(1))) as u32
}

const SCATTER: u64 = 0x9e37_79b9_7f4a_7c15;

struct Bench<'a> {
    options: &'a Options,
    device: &'a dyn Device,
    stream: Stream,
    /// Memory that results are copied to for the check.
    arena: Arena,
}

/// The expected result.
struct Expected<'a> {
    build: &'a Side,
    probe_rows: usize,
    /// Build row of each key.
    row_of: Vec<u32>,
    /// [`Expected::sum`] of each payload column of the probe side.
    probe_sums: Vec<u128>,
}

impl<'a> Expected<'a> {
    fn new(build: &'a Side, probe: &Side) -> Self {
        let mut row_of = vec![0u32; build.keys.len()];
        build.keys.iter().enumerate().for_each(|(row, &key)| row_of[key as usize] = row as u32);
        let probe_sums = probe.payloads.iter().map(|payload| Self::sum(&probe.keys, payload)).collect();
        Self { build, probe_rows: probe.keys.len(), row_of, probe_sums }
    }

    /// Sums the values, each multiplied by its key plus one, so that swapped values change the sum.
    fn sum(keys: &[u32], payload: &[u32]) -> u128 {
        keys.par_iter().zip(payload).map(|(&key, &value)| (u128::from(key) + 1) * u128::from(value)).sum()
    }
}

impl Bench<'_> {
    /// Copies numbers to the device as values of `--width` bytes.
    fn column(&self, numbers: &[u32], scattered: bool) -> Column {
        let scatter = if scattered { SCATTER | 1 } else { 1 };
        let buffer = match self.options.width {
            4 => Buffer::from_vec(numbers.par_iter().map(|&n| n.wrapping_mul(scatter as u32)).collect::<Vec<u32>>()),
            8 => {
                Buffer::from_vec(numbers.par_iter().map(|&n| u64::from(n).wrapping_mul(scatter)).collect::<Vec<u64>>())
            }
            other => panic!("--width {other}: write 4 or 8"),
        };
        let data = self.device.copy_in(&[buffer], &self.stream).unwrap();
        self.device.synchronize(&self.stream).unwrap();
        Column { data, width: Width::from_bytes(self.options.width).unwrap(), rows: numbers.len(), validity: None }
    }

    fn stored(&self, side: &Side) -> (Keys, Vec<Payload>) {
        let width = if self.options.width == 4 { KeyWidth::W4 } else { KeyWidth::W8 };
        let column = self.column(&side.keys, self.options.sparse);
        let payloads = if self.options.count { &[][..] } else { &side.payloads };
        let payload = payloads.iter().map(|payload| Payload::Column(self.column(payload, false))).collect();
        (Keys { data: column.data, width, rows: column.rows }, payload)
    }

    fn partition(&self, (keys, payload): &(Keys, Vec<Payload>), bits: u32) -> Partitions {
        self.device.partition(keys, payload, RadixBits { skip: 0, bits }, &self.stream).unwrap()
    }

    /// Returns the numbers that a column's values were made from.
    fn numbers(&self, column: &Column, scattered: bool) -> Vec<u32> {
        // Newton's iteration for the inverse of an odd number.
        let inverse = (0..6).fold(1u64, |x, _| x.wrapping_mul(2u64.wrapping_sub((SCATTER | 1).wrapping_mul(x))));
        let gather = if scattered { inverse } else { 1 };
        let bytes = column.rows * column.width.bytes();
        let host = self.device.copy_out(&column.data, bytes, &self.arena, &self.stream).unwrap();
        match self.options.width {
            4 => host.typed_data::<u32>().par_iter().map(|&value| value.wrapping_mul(gather as u32)).collect(),
            _ => host.typed_data::<u64>().par_iter().map(|&value| value.wrapping_mul(gather) as u32).collect(),
        }
    }

    fn check(&self, joined: &JoinedPartitions, expected: &Expected<'_>) {
        assert_eq!(joined.pairs, expected.probe_rows as u64, "every probe row has one match");
        let Some(JoinedRows { keys, build: of_build, probe: of_probe }) = &joined.rows else {
            assert!(self.options.count, "there was no room for the rows");
            return;
        };
        let keys = self.numbers(&keys.as_ref().unwrap().as_column(), self.options.sparse);
        for (column, payload) in of_build.iter().zip(&expected.build.payloads) {
            let found = self.numbers(column, false);
            let right = |(&key, &found): (&u32, &u32)| payload[expected.row_of[key as usize] as usize] == found;
            assert!(keys.par_iter().zip(&found).all(right), "a row has the payload of another key");
        }
        for (column, &sum) in of_probe.iter().zip(&expected.probe_sums) {
            assert_eq!(
                Expected::sum(&keys, &self.numbers(column, false)),
                sum,
                "the payload of the probe side has changed"
            );
        }
    }
}

fn main() {
    let options = Options::parse();
    let Options { build, probe, width, payloads, .. } = options;
    assert!(build.is_power_of_two(), "--build {build}: write a power of two");
    let zipf = (options.zipf > 0.0).then(|| Zipf::new(build as f64, options.zipf).unwrap());
    let build_side = Side::new(&options, build, 100, |at, _| shuffled(at, build));
    let probe_side = Side::new(&options, probe, 200, |_, random| match &zipf {
        // Shuffled, so that frequent keys are spread among the others.
        Some(zipf) => shuffled(zipf.sample(random) as usize - 1, build),
        None => random.random_range(0..build as u32),
    });
    let memory = |free: Option<u64>| Budget::new("device memory", "--device-memory", free.unwrap_or(8 << 30));
    let device = open_device(options.device, options.threads, memory).unwrap();
    let stream = device.stream(CancelFlag::new()).unwrap();
    let arena = Arena::new(Budget::new("host memory", "--host-memory", 16 << 30));
    arena.pin_by(device.pin());
    let bench = Bench { options: &options, device: &*device, stream, arena };
    let expected = Expected::new(&build_side, &probe_side);
    let (build_rows, probe_rows) = (bench.stored(&build_side), bench.stored(&probe_side));
    let bits = build.div_ceil(device.tuning().partition_rows).next_power_of_two().trailing_zeros();
    let wanted = if options.count { Wanted::Count } else { Wanted::Rows { room: probe, keys: true } };

    // Returns the seconds of a join, the seconds of each step if `by_step`, and the result.
    let run = |by_step: bool| {
        device.synchronize(&bench.stream).unwrap();
        let mut steps = [0.0; 3];
        let start = Instant::now();
        let mut lap = |step: usize| {
            if by_step {
                device.synchronize(&bench.stream).unwrap();
                steps[step] = start.elapsed().as_secs_f64() - steps.iter().sum::<f64>();
            }
        };
        let build_parts = bench.partition(&build_rows, bits);
        lap(0);
        let probe_parts = bench.partition(&probe_rows, bits);
        lap(1);
        let joined = device.join_partitions(&build_parts, &probe_parts, 0..1 << bits, wanted, &bench.stream).unwrap();
        lap(2);
        device.synchronize(&bench.stream).unwrap();
        (start.elapsed().as_secs_f64(), steps, joined.expect("no partition is oversized"))
    };
    let (mut runs, mut steps_of) = (Vec::new(), Vec::new());
    for number in 0..2 * options.runs {
        let by_step = number % 2 == 1;
        // A GPU slows its clock while the CPU checks a result.
        drop(run(false));
        let (seconds, steps, joined) = run(by_step);
        if by_step {
            steps_of.push(steps)
        } else {
            runs.push(seconds)
        }
        bench.check(&joined, &expected);
    }
    let median_of = |mut seconds: Vec<f64>| {
        seconds.sort_by(f64::total_cmp);
        seconds[seconds.len() / 2]
    };
    let steps: [f64; 3] = std::array::from_fn(|step| median_of(steps_of.iter().map(|steps| steps[step]).collect()));
    let fastest = runs.iter().copied().fold(f64::INFINITY, f64::min);
    let (run_count, median) = (runs.len(), median_of(runs));
    let read = if options.count { width * (build + probe) } else { width * (1 + payloads) * (build + probe) };
    let written = if options.count { 0 } else { width * (1 + 2 * payloads) * probe };
    Recorder::new("resident", options.record).write(json!({
        "device": device.facts().name, "build_rows": build, "probe_rows": probe, "width": width, "payloads": payloads,
        "sparse": options.sparse, "zipf": options.zipf, "count": options.count, "runs": run_count, "radix_bits": bits,
        "seconds_median": median, "seconds_min": fastest, "partition_build_seconds": steps[0],
        "partition_probe_seconds": steps[1], "join_seconds": steps[2], "bytes_once": read + written,
        "rows_per_second": (build + probe) as f64 / median,
    }));
}
