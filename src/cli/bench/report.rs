//! Results of benchmarks: a table for people, JSON lines for files and machines.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::Path;
use std::time::{Instant, SystemTime};

use rayon::prelude::*;
use serde_json::{Value, json};

use super::super::VERSION;
use super::super::output::{self, Align};
use super::engine::Measured;
use super::generate::Workload;
use crate::{Context, Result};

/// Bytes that are copied to learn how fast this machine's memory is: more than any cache holds.
const COPY_BYTES: usize = 256 << 20;

/// Writes results as they come.
#[derive(Debug)]
pub struct Report {
    suite: String,
    machine: Value,
    command: String,
    /// Bytes read and written per second.
    memory_rate: f64,
    out: Option<File>,
    /// Whether the heading of the table is out.
    begun: bool,
}

/// Columns of the table and their widths, which are fixed because rows come one by one.
const COLUMNS: [(&str, Align, usize); 10] = [
    ("keys", Align::Left, 9),
    ("width", Align::Right, 5),
    ("cols", Align::Right, 4),
    ("build", Align::Right, 7),
    ("probe", Align::Right, 7),
    ("result", Align::Right, 7),
    ("strategy", Align::Left, 15),
    ("median", Align::Right, 8),
    ("rows/s", Align::Right, 7),
    ("x floor", Align::Right, 7),
];

impl Report {
    /// Learns what the machine is, and opens the file. `memory_rate` is that of [`memory_rate`].
    ///
    /// # Errors
    /// [`Error::Internal`](crate::Error::Internal) when the file cannot be written.
    pub fn begin(suite: &str, out: Option<&Path>, memory_rate: f64) -> Result<Self> {
        let open = |path: &Path| {
            OpenOptions::new().create(true).append(true).open(path).context(|| format!("opening {}", path.display()))
        };
        let command = std::env::args().skip(1).collect::<Vec<_>>().join(" ");
        Ok(Self {
            suite: suite.into(),
            machine: machine(),
            command: format!("dovetail {command}"),
            memory_rate,
            out: out.map(open).transpose()?,
            begun: false,
        })
    }

    /// Writes one result.
    ///
    /// # Errors
    /// [`Error::Internal`](crate::Error::Internal) when the file cannot be written.
    pub fn add(&mut self, workload: &Workload, asked: &str, measured: &Measured) -> Result<()> {
        let floor = (measured.bytes_in + measured.bytes_out) as f64 / self.memory_rate;
        let line = self.line(workload, asked, measured, floor);
        if let Some(file) = &mut self.out {
            writeln!(file, "{line}").context(|| "writing the results")?;
        }
        if output::is_json() {
            output::json(&line);
            return Ok(());
        }
        if !self.begun {
            output::line(row(COLUMNS.map(|(name, _, _)| name.to_owned())));
            self.begun = true;
        }
        let strategy = match asked {
            "auto" => format!("{} (auto)", measured.strategy),
            name => name.to_owned(),
        };
        let median = measured.median();
        output::line(row([
            workload.keys.to_string(),
            workload.width.to_string(),
            workload.payloads.to_string(),
            output::short(workload.build_rows as f64),
            output::short(workload.probe_rows as f64),
            output::short(measured.rows as f64),
            strategy,
            output::seconds(median),
            output::short((workload.build_rows + workload.probe_rows) as f64 / median),
            format!("{:.1}", median / floor),
        ]));
        Ok(())
    }

    fn line(&self, workload: &Workload, asked: &str, measured: &Measured, floor: f64) -> Value {
        let phase = |phase: &crate::join::PhaseRecord| (phase.name.to_string(), phase.seconds.into());
        let phases: serde_json::Map<String, Value> = measured.phases.iter().map(phase).collect();
        let median = measured.median();
        json!({
            "date": humantime::format_rfc3339_seconds(SystemTime::now()).to_string(),
            "version": VERSION,
            "machine": self.machine,
            "command": self.command,
            "suite": self.suite,
            "keys": workload.keys.to_string(),
            "width": workload.width,
            "payloads": workload.payloads,
            "build_rows": workload.build_rows,
            "probe_rows": workload.probe_rows,
            "match_ratio": workload.match_ratio,
            "copies": workload.copies,
            "seed": workload.seed,
            "asked": asked,
            "strategy": measured.strategy.name(),
            "device": measured.device,
            "threads": measured.threads,
            "result_rows": measured.rows,
            "verified": true,
            "seconds": median,
            "seconds_min": measured.seconds.first(),
            "seconds_max": measured.seconds.last(),
            "runs": measured.seconds.len(),
            "rows_per_second": (workload.build_rows + workload.probe_rows) as f64 / median,
            "bytes_in": measured.bytes_in,
            "bytes_out": measured.bytes_out,
            "memory_bytes_per_second": self.memory_rate,
            "floor_seconds": floor,
            "device_memory_max_bytes": measured.device_memory_max_bytes,
            "phase_seconds": phases,
        })
    }
}

fn row(cells: [String; COLUMNS.len()]) -> String {
    let pad = |(cell, (_, align, width)): (&String, (&str, Align, usize))| match align {
        Align::Left => format!("{cell:<width$}"),
        Align::Right => format!("{cell:>width$}"),
    };
    cells.iter().zip(COLUMNS).map(pad).collect::<Vec<_>>().join("  ").trim_end().to_owned()
}

fn machine() -> Value {
    let cpu = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model =
        cpu.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':').map(|(_, name)| name.trim()));
    let memory = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let kib = |line: &str| line.strip_prefix("MemTotal:")?.trim().strip_suffix("kB")?.trim().parse::<u64>().ok();
    json!({
        "cpu": model.unwrap_or("unknown"),
        "cores": std::thread::available_parallelism().map_or(0, usize::from),
        "memory_bytes": memory.lines().find_map(kib).map(|kib| kib << 10),
        "os": std::env::consts::OS,
        "architecture": std::env::consts::ARCH,
    })
}

/// Bytes per second that all threads read and write together when they copy; the best of three.
pub fn memory_rate() -> f64 {
    let source = vec![1u8; COPY_BYTES];
    let mut target = vec![0u8; COPY_BYTES];
    let piece = COPY_BYTES / rayon::current_num_threads().max(1);
    let mut copy = || {
        let start = Instant::now();
        let pieces = target.par_chunks_mut(piece).zip(source.par_chunks(piece));
        pieces.for_each(|(target, source)| target.copy_from_slice(source));
        start.elapsed().as_secs_f64()
    };
    // The first copy touches the pages, and does not count.
    copy();
    let best = (0..3).map(|_| copy()).fold(f64::INFINITY, f64::min);
    std::hint::black_box(&target);
    2.0 * COPY_BYTES as f64 / best
}
