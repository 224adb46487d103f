//! Joins in the process, without a server: what the engine itself takes.
//!
//! ```sh
//! cargo bench --bench joins -- --build 16M --probe 32M --width 4 --strategy radix-hash --threads 2 --runs 5
//! ```
//!
//! Prints one JSON line per strategy: rows, bytes, seconds (median and minimum of the runs), rows per second of both sides
//! together, the phases of the median run, and what the planner predicted of them. Every run is checked: the number of rows, and the sum of each payload column,
//! which are independent of the keys.

use std::sync::Arc;
use std::time::Instant;

use arrow::array::{ArrayRef, AsArray, Int32Array, Int64Array, RecordBatch};
use arrow::datatypes::{DataType, Int32Type, Int64Type};
use clap::Parser;
use dovetail::catalog::{Catalog, Upload, UploadOptions};
use dovetail::device::host::HostDevice;
use dovetail::device::{CancelFlag, Device};
use dovetail::join::{self, BatchSink, Monitor, PhaseRecord};
use dovetail::memory::{Arena, Budget, parse_bytes};
use dovetail::planner::{self, JoinSpec, KeyPair, Strategy, Target};
use parking_lot::Mutex;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};
use serde_json::json;

mod record;
use record::Recorder;

#[derive(Parser)]
struct Options {
    /// Rows of the build side
    #[arg(long, default_value = "16M", value_parser = count)]
    build: usize,
    /// Rows of the probe side
    #[arg(long, default_value = "32M", value_parser = count)]
    probe: usize,
    /// Bytes of the key and of each payload column: 4 or 8
    #[arg(long, default_value_t = 4)]
    width: usize,
    /// Strategies, or all of them
    #[arg(long, value_delimiter = ',')]
    strategy: Vec<String>,
    #[arg(long, default_value_t = 2)]
    threads: usize,
    #[arg(long, default_value_t = 5)]
    runs: usize,
    /// Rows per uploaded batch; 0 for one batch
    #[arg(long, default_value_t = 0, value_parser = count)]
    batch: usize,
    /// Keys multiplied by an odd constant: sparse over the whole range
    #[arg(long)]
    sparse: bool,
    /// Append the measurements to benches/results
    #[arg(long)]
    record: bool,
    /// Given by cargo
    #[arg(long, hide = true)]
    bench: bool,
}

/// Rows with a binary unit: 16M is 2^24.
fn count(text: &str) -> Result<usize, String> {
    parse_bytes(text).map(|number| number as usize).map_err(|error| error.to_string())
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
        other => panic!("--width {other}: 4 or 8"),
    }
}

fn sum(array: &ArrayRef) -> i64 {
    match array.data_type() {
        DataType::Int32 => array.as_primitive::<Int32Type>().values().iter().map(|&value| i64::from(value)).sum(),
        _ => array.as_primitive::<Int64Type>().values().iter().fold(0, |sum, &value| sum.wrapping_add(value)),
    }
}

fn main() {
    let options = Options::parse();
    let mut rng = StdRng::seed_from_u64(20_261_121);
    let scatter = |key: i64| match (options.sparse, options.width) {
        (false, _) => key,
        (true, 4) => i64::from((key as i32).wrapping_mul(0x9e37_79b1_u32 as i32)),
        (true, _) => key.wrapping_mul(0x9e37_79b9_7f4a_7c15_u64 as i64),
    };
    let mut build_keys: Vec<i64> = (0..options.build as i64).collect();
    build_keys.shuffle(&mut rng);
    let build_payload: Vec<i64> = (0..options.build).map(|_| rng.random_range(0..1 << 30)).collect();
    let probe_keys: Vec<i64> = (0..options.probe).map(|_| rng.random_range(0..options.build as i64)).collect();
    let probe_payload: Vec<i64> = (0..options.probe).map(|_| rng.random_range(0..1 << 30)).collect();
    let mut payload_of_key = vec![0; options.build];
    for (&key, &payload) in build_keys.iter().zip(&build_payload) {
        payload_of_key[key as usize] = payload;
    }
    let expected_build: i64 = probe_keys.iter().map(|&key| payload_of_key[key as usize]).sum();
    let expected_probe: i64 = probe_payload.iter().sum();

    let arena = Arena::new(Budget::new("host memory", "--host-memory", 16 << 30));
    let catalog = Catalog::new(arena.clone());
    let put = |name: &str, payload: &str, keys: &[i64], values: &[i64]| {
        let keys = column(options.width, keys.iter().map(|&key| scatter(key)));
        let values = column(options.width, values.iter().copied());
        let batch = RecordBatch::try_from_iter([("k", keys), (payload, values)]).unwrap();
        let mut upload = Upload::begin(&catalog, name, batch.schema(), UploadOptions::default()).unwrap();
        let step = if options.batch == 0 { batch.num_rows().max(1) } else { options.batch };
        for start in (0..batch.num_rows()).step_by(step) {
            upload.append(batch.slice(start, step.min(batch.num_rows() - start))).unwrap();
        }
        upload.commit().unwrap();
    };
    put("build", "b", &build_keys, &build_payload);
    put("probe", "p", &probe_keys, &probe_payload);
    drop((build_keys, build_payload, probe_keys, probe_payload, payload_of_key));

    let memory = Budget::new("device memory", "--device-memory", 8 << 30);
    let device = HostDevice::new(0, options.threads, memory, None).unwrap();
    let strategies: Vec<Strategy> = match options.strategy.is_empty() {
        true => Strategy::ALL.to_vec(),
        false => options.strategy.iter().map(|name| name.parse().unwrap_or_else(|error| panic!("{error}"))).collect(),
    };
    let target = Target::of(&device, planner::calibrate(&device));
    let mut recorder = Recorder::new("joins", options.record);
    for strategy in strategies {
        let mut predicted = json!(null);
        let mut runs: Vec<(f64, Vec<PhaseRecord>)> = Vec::new();
        for _ in 0..options.runs {
            let spec = JoinSpec {
                strategy: Some(strategy),
                ..JoinSpec::inner("build", "probe", vec![KeyPair::new("k", "k")])
            };
            let plan = planner::plan_on(planner::bind(spec, &catalog).unwrap(), Some(strategy), &target).unwrap();
            predicted = plan
                .phases
                .iter()
                .map(|phase| (phase.name.to_string(), json!((phase.seconds * 1e3).round() / 1e3)))
                .collect();
            let (sink, monitor) = (Keep::default(), Monitor::new(CancelFlag::new()));
            let start = Instant::now();
            join::run(&plan, &device, &arena, &sink, &monitor).unwrap();
            let seconds = start.elapsed().as_secs_f64();
            let batches = sink.0.into_inner();
            assert_eq!(batches.iter().map(RecordBatch::num_rows).sum::<usize>(), options.probe);
            let total = |at: usize| batches.iter().map(|batch| sum(batch.column(at))).fold(0, i64::wrapping_add);
            assert_eq!((total(1), total(2)), (expected_build, expected_probe), "payload of {strategy}");
            runs.push((seconds, monitor.phases()));
        }
        runs.sort_by(|a, b| a.0.total_cmp(&b.0));
        let (median, phases) = &runs[runs.len() / 2];
        let phases: serde_json::Map<_, _> =
            phases.iter().map(|phase| (phase.name.into(), json!((phase.seconds * 1e3).round() / 1e3))).collect();
        let rows = options.build + options.probe;
        let line = json!({
            "strategy": strategy.name(), "build_rows": options.build, "probe_rows": options.probe,
            "width": options.width, "sparse": options.sparse, "batch": options.batch, "threads": options.threads, "runs": runs.len(),
            "seconds_median": median, "seconds_min": runs[0].0, "rows_per_second": rows as f64 / median,
            "device_memory_max_bytes": device.memory().used_bytes_max(), "phases_seconds": phases,
            "predicted_phases_seconds": predicted,
        });
        recorder.write(line);
    }
}
