//! Joins in this process, without a server: the time of the engine alone.
//!
//! ```sh
//! cargo bench -p dovetail-bench --bench joins -- --build 16M --probe 32M --width 4 \
//!     --strategy radix-hash --threads 2 --runs 5
//! ```
//!
//! Prints one JSON line per strategy: rows, bytes, seconds (median and minimum of the runs), rows
//! per second of both sides together, the phases of the median run, and the planner's predictions.
//! Every run is checked by its number of rows. Unless the join only counts, the run is also checked
//! by the sum of the keys and by sums of products of payload columns. Each product takes one column
//! of each side. Payload is independent of the keys.

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use arrow::array::{ArrayRef, AsArray, Decimal128Array, Int32Array, Int64Array, RecordBatch, StringArray};
use arrow::buffer::OffsetBuffer;
use arrow::datatypes::{DataType, Decimal128Type, Int32Type, Int64Type};
use clap::Parser;
use dovetail::catalog::{Catalog, Upload, UploadOptions};
use dovetail::device::{CancelFlag, DeviceId, open_device, parse_device};
use dovetail::join::{self, BatchSink, Monitor, PhaseRecord};
use dovetail::memory::{Arena, Budget, parse_bytes};
use dovetail::planner::{self, JoinSpec, KeyPair, PlanOverrides, Strategy, Target};
use parking_lot::Mutex;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};
use rayon::prelude::*;
use serde_json::json;

mod arguments;
mod at_once;
mod record;
use arguments::count;
use at_once::at_once;
use record::Recorder;

#[derive(Parser)]
struct Options {
    /// Rows of the build side
    #[arg(long, default_value = "16M", value_parser = count)]
    build: usize,
    /// Rows of the probe side
    #[arg(long, default_value = "32M", value_parser = count)]
    probe: usize,
    /// Bytes of the key and of each payload column: 4, 8, or 16 (decimals)
    #[arg(long, default_value_t = 4)]
    width: usize,
    /// Strategies, or all of them; `auto` is the planner's choice
    #[arg(long, value_delimiter = ',')]
    strategy: Vec<String>,
    /// Payload columns of each side
    #[arg(long, default_value_t = 1)]
    payloads: usize,
    /// Bits of random payload, at most 30 for columns of 4 bytes
    #[arg(long, default_value_t = 30, value_parser = clap::value_parser!(u32).range(1..=62))]
    payload_bits: u32,
    /// Length of text payload, at least 10 bytes. Batches then have 2^24 rows unless --batch is
    /// given
    #[arg(long, value_parser = clap::value_parser!(u8).range(10..))]
    text: Option<u8>,
    /// Where text of the result is gathered, one run after the other: host, device, or auto for the
    /// choice of the planner
    #[arg(long, value_delimiter = ',', default_value = "auto", value_parser = ["auto", "host", "device"])]
    text_by: Vec<String>,
    /// Ratio of probe key values to build keys: one probe row in N has a match
    #[arg(long, default_value_t = 1)]
    match_every: usize,
    /// Share of build rows with one common key, 0 to 1. The other keys are distinct
    #[arg(long, default_value_t = 0.0)]
    heavy: f64,
    /// Device: host, or cuda:N
    #[arg(long, default_value = "host", value_parser = parse_device)]
    device: DeviceId,
    #[arg(long, default_value_t = 2)]
    threads: usize,
    /// Memory for the tables and one result
    #[arg(long, default_value = "16GiB")]
    host_memory: String,
    #[arg(long, default_value_t = 5)]
    runs: usize,
    /// Rows per uploaded batch; 0 for one batch
    #[arg(long, default_value_t = 0, value_parser = count)]
    batch: usize,
    /// Multiply keys by an odd constant, so that they are sparse over the whole range
    #[arg(long)]
    sparse: bool,
    /// Count the rows instead of making them
    #[arg(long)]
    count: bool,
    /// Give the result its own memory, like a result that becomes a table. It then shares no
    /// columns with the tables
    #[arg(long)]
    own: bool,
    /// Transfer the payload of the build side after the probe side, one run after the other: true,
    /// false, or auto for the choice of the planner
    #[arg(long, value_delimiter = ',', default_value = "auto", value_parser = ["auto", "true", "false"])]
    defer_build_payload: Vec<String>,
    /// Cache columns on the device between runs. An untimed first run fills the cache
    #[arg(long)]
    cached: bool,
    /// Number of joins that run at once, each several times without a break. The result is the time
    /// of the device per join
    #[arg(long, default_value_t = 1)]
    at_once: usize,
    /// Append the measurements to benches/results
    #[arg(long)]
    record: bool,
    /// Option that cargo passes; no effect
    #[arg(long, hide = true)]
    bench: bool,
}

#[derive(Default)]
struct Keep(Mutex<Vec<RecordBatch>>);

impl BatchSink for Keep {
    fn push(&self, batch: RecordBatch) -> dovetail::Result<()> {
        self.0.lock().push(batch);
        Ok(())
    }
}

fn column(width: usize, values: impl Iterator<Item = i64>) -> ArrayRef {
    match width {
        4 => Arc::new(Int32Array::from_iter_values(values.map(|value| value as i32))),
        8 => Arc::new(Int64Array::from_iter_values(values)),
        16 => Arc::new(Decimal128Array::from_iter_values(values.map(i128::from))),
        other => panic!("--width {other}: write 4, 8 or 16"),
    }
}

/// Formats numbers in decimal digits, with leading zeros, to the given width in bytes.
fn text(bytes: usize, values: &[i64]) -> ArrayRef {
    let mut digits = vec![b'0'; values.len() * bytes];
    digits.par_chunks_mut(bytes).zip(values).for_each(|(digits, &value)| {
        let mut left = value;
        for digit in digits.iter_mut().rev() {
            (*digit, left) = (b'0' + (left % 10) as u8, left / 10);
        }
        assert_eq!(left, 0, "{value} in {bytes} digits");
    });
    let offsets = OffsetBuffer::from_repeated_length(bytes, values.len());
    Arc::new(StringArray::new(offsets, digits.into(), None))
}

fn numbers(array: &ArrayRef) -> Vec<i64> {
    let number = |digits: &[u8]| digits.iter().fold(0, |number, digit| 10 * number + i64::from(digit - b'0'));
    match array.data_type() {
        DataType::Utf8 => array.as_string::<i32>().iter().map(|text| number(text.unwrap().as_bytes())).collect(),
        DataType::Int32 => array.as_primitive::<Int32Type>().values().iter().map(|&value| value.into()).collect(),
        DataType::Int64 => array.as_primitive::<Int64Type>().values().to_vec(),
        _ => array.as_primitive::<Decimal128Type>().values().iter().map(|&value| value as i64).collect(),
    }
}

/// Checksums of a result: the sum of its keys and, for each pair of payload columns of both sides,
/// the sum of their products. A row with another row's payload changes a sum.
#[derive(Debug, PartialEq)]
struct Sums {
    keys: i64,
    products: Vec<i64>,
}

impl Sums {
    fn of(batches: &[RecordBatch], payloads: usize) -> Self {
        let sum = |of_batch: &(dyn Fn(&RecordBatch) -> i64 + Sync)| {
            batches.par_iter().map(of_batch).reduce(|| 0, i64::wrapping_add)
        };
        let column = |batch: &RecordBatch, name: String| numbers(batch.column_by_name(&name).unwrap());
        let keys = sum(&|batch| column(batch, "k".into()).into_iter().fold(0, i64::wrapping_add));
        let products = (0..payloads).map(|at| {
            sum(&|batch| {
                let both = column(batch, format!("b{at}")).into_iter().zip(column(batch, format!("p{at}")));
                both.fold(0, |sum: i64, (build, probe)| sum.wrapping_add(build.wrapping_mul(probe)))
            })
        });
        Self { keys, products: products.collect() }
    }
}

fn microseconds(seconds: f64) -> f64 {
    (seconds * 1e6).round() / 1e6
}

fn main() {
    let options = Options::parse();
    assert!(
        options.width > 4 || options.payload_bits <= 30,
        "--payload-bits {}: write at most 30 for columns of 4 bytes",
        options.payload_bits
    );
    let mut rng = StdRng::seed_from_u64(20_261_121);
    let scatter = |key: i64| match (options.sparse, options.width) {
        (false, _) => key,
        (true, 4) => i64::from((key as i32).wrapping_mul(0x9e37_79b1_u32 as i32)),
        (true, _) => key.wrapping_mul(0x9e37_79b9_7f4a_7c15_u64 as i64),
    };
    // Every N-th key is on the build side, so that both sides have similar ranges.
    let every = options.match_every as i64;
    let heavy_rows = (options.build as f64 * options.heavy) as i64;
    let mut build_keys: Vec<i64> = (0..options.build as i64).map(|at| every * (at - heavy_rows).max(0)).collect();
    build_keys.shuffle(&mut rng);
    let distinct_keys = (options.build as i64 - heavy_rows).max(1);
    let payloads = |rng: &mut StdRng, rows: usize| -> Vec<i64> {
        (0..rows).map(|_| rng.random_range(0..1 << options.payload_bits)).collect()
    };
    let build_payload = payloads(&mut rng, options.build);
    let probe_keys: Vec<i64> = (0..options.probe).map(|_| rng.random_range(0..every * distinct_keys)).collect();
    let probe_payload = payloads(&mut rng, options.probe);
    // Build rows of each key, and the sum of their payload.
    let mut of_key = vec![(0usize, 0i64); distinct_keys as usize];
    for (&key, &payload) in build_keys.iter().zip(&build_payload) {
        let of_key = &mut of_key[(key / every) as usize];
        *of_key = (of_key.0 + 1, of_key.1.wrapping_add(payload));
    }
    let mut expected_rows = 0;
    let mut expected = Sums { keys: 0, products: vec![0; options.payloads] };
    for (&key, &payload) in probe_keys.iter().zip(&probe_payload).filter(|(key, _)| *key % every == 0) {
        let (rows, sum) = of_key[(key / every) as usize];
        expected_rows += rows;
        expected.keys = expected.keys.wrapping_add(scatter(key).wrapping_mul(rows as i64));
        for (at, products) in (0..).zip(&mut expected.products) {
            let product = (payload + at).wrapping_mul(sum.wrapping_add(at * rows as i64));
            *products = products.wrapping_add(product);
        }
    }

    let arena = Arena::new(Budget::new("host memory", "--host-memory", parse_bytes(&options.host_memory).unwrap()));
    let catalog = Catalog::new(arena.clone());
    let put = |name: &str, payload: &str, keys: &[i64], values: &[i64]| {
        let batch_of = |rows: Range<usize>| {
            let values = &values[rows.clone()];
            let payloads = |at: i64| match options.text {
                Some(bytes) => text(bytes.into(), &values.iter().map(|value| value + at).collect::<Vec<_>>()),
                None => column(options.width, values.iter().map(|value| value + at)),
            };
            let key = column(options.width, keys[rows].iter().map(|&key| scatter(key)));
            let columns = (0..options.payloads).map(|at| (format!("{payload}{at}"), payloads(at as i64)));
            RecordBatch::try_from_iter([("k".to_string(), key)].into_iter().chain(columns)).unwrap()
        };
        let mut upload = Upload::begin(&catalog, name, batch_of(0..0).schema(), UploadOptions::default()).unwrap();
        let whole = if options.text.is_some() { 1 << 24 } else { keys.len().max(1) };
        let step = if options.batch == 0 { whole } else { options.batch };
        for start in (0..keys.len()).step_by(step) {
            upload.append(batch_of(start..keys.len().min(start + step))).unwrap();
        }
        upload.commit().unwrap();
    };
    put("build", "b", &build_keys, &build_payload);
    put("probe", "p", &probe_keys, &probe_payload);
    drop((build_keys, build_payload, probe_keys, probe_payload, of_key));

    let memory = |free: Option<u64>| Budget::new("device memory", "--device-memory", free.unwrap_or(8 << 30));
    let device = open_device(options.device, options.threads, memory).unwrap();
    // As in a server.
    arena.pin_by(device.pin());
    let device = &*device;
    if options.cached {
        let cache = device.cache();
        let cache =
            cache.unwrap_or_else(|| panic!("{} reads host memory in place, and caches no columns", device.id()));
        cache.enable_cache(device.memory().limit_bytes() / 2).unwrap();
    }
    let strategy = |name: &String| match name.as_str() {
        "auto" => None,
        name => Some(name.parse().unwrap_or_else(|error| panic!("{error}"))),
    };
    let strategies: Vec<Option<Strategy>> = match options.strategy.is_empty() {
        true => Strategy::ALL.map(Some).to_vec(),
        false => options.strategy.iter().map(strategy).collect(),
    };
    let target = Target::of(device, planner::calibrate(device));
    let mut recorder = Recorder::new("joins", options.record);
    let gatherer = |name: &String| (name != "auto").then(|| name == "device");
    let gatherers: Vec<Option<bool>> = options.text_by.iter().map(gatherer).collect();
    let orders: Vec<Option<bool>> = options.defer_build_payload.iter().map(|last| last.parse().ok()).collect();
    let decisions: Vec<_> = orders.iter().flat_map(|&last| gatherers.iter().map(move |&by| (last, by))).collect();
    let cases = strategies.iter().flat_map(|strategy| decisions.iter().map(move |decision| (*strategy, *decision)));
    let mut is_first = true;
    for (strategy, (defer_build_payload, device_gathers_text)) in cases {
        let (mut predicted, mut predicted_seconds, mut name) = (json!(null), 0.0, "auto".to_string());
        let (mut columns_last, mut text_by) = (false, "host");
        let mut runs: Vec<(f64, Vec<PhaseRecord>)> = Vec::new();
        for run in 0..options.runs + usize::from(options.cached) {
            let on = vec![KeyPair::new("k", "k")];
            let spec = JoinSpec { count: options.count, ..JoinSpec::inner("build", "probe", on) };
            let mut join = planner::bind(&spec, &catalog).unwrap();
            join.result_is_stored = options.own;
            let kept =
                [&join.left, &join.right].into_iter().flat_map(|table| Target::cached_rows(device, table)).collect();
            let overrides =
                PlanOverrides { defer_build_payload, device_gathers_text, ..PlanOverrides::named(strategy) };
            let plan = planner::plan_with_overrides(join, &overrides, &Target { kept, ..target.clone() }).unwrap();
            name = plan.strategy().name().to_string();
            columns_last = plan.composition.defers_build_payload();
            text_by = if plan.composition.device_gathers_text { "device" } else { "host" };
            predicted =
                plan.phases.iter().map(|phase| (phase.phase.to_string(), json!(microseconds(phase.seconds)))).collect();
            predicted_seconds = plan.seconds;
            let task = Arc::new(plan.task().unwrap());
            let join = || {
                let (sink, monitor) = (Keep::default(), Monitor::new(CancelFlag::new()));
                join::run(&task, device, &arena, &sink, &monitor).unwrap();
                (sink.0.into_inner(), monitor.phases())
            };
            let start = Instant::now();
            let (seconds, joined) = match options.at_once {
                1 => {
                    let joined = join();
                    (start.elapsed().as_secs_f64(), vec![joined])
                }
                threads => at_once(threads, join),
            };
            for (batches, _) in &joined {
                let rows = match options.count {
                    true => numbers(batches[0].column(0))[0] as usize,
                    false => batches.iter().map(RecordBatch::num_rows).sum(),
                };
                assert_eq!(rows, expected_rows);
                if !options.count {
                    assert_eq!(Sums::of(batches, options.payloads), expected, "what {name} has joined");
                }
            }
            if run > 0 || !options.cached {
                runs.extend(joined.into_iter().next_back().map(|(_, phases)| (seconds, phases)));
            }
        }
        runs.sort_by(|a, b| a.0.total_cmp(&b.0));
        let (median, phases) = &runs[runs.len() / 2];
        // Only the first run of all finds memory that was never used. A median of one or two runs
        // may be that run.
        let memory = if is_first && !options.cached && runs.len() < 3 { "virgin" } else { "used before" };
        is_first = false;
        let phases: serde_json::Map<_, _> =
            phases.iter().map(|phase| (phase.phase.to_string(), json!(microseconds(phase.seconds)))).collect();
        let rows = options.build + options.probe;
        let line = json!({
            "device": device.facts().name, "strategy": name, "auto": strategy.is_none(), "build_rows": options.build, "probe_rows": options.probe,
            "width": options.width, "sparse": options.sparse, "payloads": options.payloads, "payload_bits": options.payload_bits,
            "text": options.text, "text_by": text_by, "auto_text": device_gathers_text.is_none(),
            "match_every": options.match_every, "cached": options.cached, "memory": memory, "at_once": options.at_once, "count": options.count, "own": options.own, "defer_build_payload": columns_last, "heavy": options.heavy, "result_rows": expected_rows, "batch": options.batch, "threads": options.threads, "runs": runs.len(),
            "seconds_median": median, "seconds_min": runs[0].0, "rows_per_second": rows as f64 / median,
            "device_memory_max_bytes": device.memory().used_bytes_max(), "phases_seconds": phases,
            "predicted_phases_seconds": predicted, "predicted_seconds": microseconds(predicted_seconds),
        });
        recorder.write(line);
    }
}
