//! Results of benchmarks: a table for people, JSON lines for files and machines.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::Path;
use std::time::SystemTime;

use serde_json::{Map, Value, json};

use super::super::VERSION;
use super::super::output::{self, Align};
use super::case::Case;
use super::engine::{Machine, Measurable, Measured};
use super::suite::Suite;
use crate::device::{DeviceKind, WorkTime};
use crate::join::PhaseRecord;
use crate::memory::process_memory_limit;
use crate::planner::Rates;
use crate::{Context, Result};

/// The least time that a join can take, by bytes and measured rates.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Floor {
    /// In which the device's memory gives the tables and takes the result, each once.
    memory_seconds: f64,
    /// In which they cross the link to a device that has memory of its own, both ways at once.
    link_seconds: Option<f64>,
}

/// Writes results as they come.
#[derive(Debug)]
pub struct Report {
    /// What all lines begin with.
    head: Map<String, Value>,
    device: DeviceKind,
    rates: Rates,
    out: Option<File>,
    /// Whether results go to stdout beside the file.
    on_stdout: bool,
    /// Of the first column of the table.
    label_width: usize,
    /// Whether the heading of the table is out.
    begun: bool,
}

/// Columns of the table after the first, and their widths, which are fixed because rows come one by one.
const COLUMNS: [(&str, Align, usize); 7] = [
    ("build", Align::Right, 7),
    ("probe", Align::Right, 7),
    ("result", Align::Right, 7),
    ("strategy", Align::Left, 22),
    ("median", Align::Right, 8),
    ("rows/s", Align::Right, 7),
    ("x floor", Align::Right, 7),
];

impl Floor {
    fn of(device: DeviceKind, rates: &Rates, measured: &Measured) -> Self {
        let (bytes_in, bytes_out) = (measured.bytes_in as f64, measured.bytes_out as f64);
        let link = (bytes_in / rates.copy_in).max(bytes_out / rates.copy_out);
        Self {
            memory_seconds: (bytes_in + bytes_out) / rates.stream,
            link_seconds: (device == DeviceKind::Cuda).then_some(link),
        }
    }

    /// Tables and results live in host memory: the link counts where there is one.
    fn seconds(self) -> f64 {
        self.link_seconds.map_or(self.memory_seconds, |link| link.max(self.memory_seconds))
    }
}

impl Report {
    /// Opens the file. `cases` are those to come; `on_stdout` says whether results are shown, too.
    ///
    /// # Errors
    /// [`Error::Internal`](crate::Error::Internal) when the file cannot be opened.
    pub fn begin(
        suite: &Suite,
        scale: f64,
        cases: &[Case],
        on: &Measurable,
        out: Option<&Path>,
        on_stdout: bool,
    ) -> Result<Self> {
        let open = |path: &Path| {
            let opened = OpenOptions::new().create(true).append(true).open(path);
            opened.context(|| format!("opening {}, to which results are appended", path.display()))
        };
        let command = std::env::args().skip(1).collect::<Vec<_>>().join(" ");
        let head = json!({
            "date": humantime::format_rfc3339_seconds(SystemTime::now()).to_string(),
            "version": VERSION,
            "machine": describe(&on.machine),
            "command": format!("dovetail {command}"),
            "suite": suite.name,
            "about": suite.about,
            "axis": suite.axis(),
            "scale": scale,
            "device": on.device_name,
            "device_memory_bytes": on.device_memory_bytes,
        });
        let widths = cases.iter().map(|case| case.label().chars().count());
        Ok(Self {
            head: head.as_object().cloned().unwrap_or_default(),
            device: on.machine.device.kind,
            rates: on.rates.clone(),
            on_stdout,
            out: out.map(open).transpose()?,
            label_width: widths.max().unwrap_or(0).max("join".len()),
            begun: false,
        })
    }

    /// Writes what was measured of a case.
    ///
    /// # Errors
    /// [`Error::Internal`](crate::Error::Internal) when the file cannot be written.
    pub fn add(&mut self, case: &Case, rows: [u64; 2], measured: &[Measured]) -> Result<()> {
        for measured in measured {
            let floor = Floor::of(self.device, &self.rates, measured);
            self.write(&self.line(case, rows, measured, floor))?;
            if self.is_table() {
                self.show(case, rows, measured, floor);
            }
        }
        Ok(())
    }

    /// Writes a line about the suite as a whole.
    ///
    /// # Errors
    /// [`Error::Internal`](crate::Error::Internal) when the file cannot be written.
    pub fn summarize(&mut self, summary: Value) -> Result<()> {
        let mut line = self.head.clone();
        line.insert("summary".into(), summary);
        self.write(&Value::Object(line))
    }

    /// Whether people read along.
    pub fn is_table(&self) -> bool {
        self.on_stdout && !output::is_json()
    }

    fn write(&mut self, line: &Value) -> Result<()> {
        if let Some(file) = &mut self.out {
            writeln!(file, "{line}").context(|| "writing the results")?;
        }
        if self.on_stdout && output::is_json() {
            output::json(line);
        }
        Ok(())
    }

    fn show(&mut self, case: &Case, rows: [u64; 2], measured: &Measured, floor: Floor) {
        if !self.begun {
            output::line(self.row("join", COLUMNS.map(|(name, _, _)| name.to_owned())));
            self.begun = true;
        }
        let strategy = match measured.asked {
            "auto" => format!("{} (auto)", measured.strategy),
            name => name.to_owned(),
        };
        let median = measured.median();
        let [build_rows, probe_rows] = rows.map(|rows| output::short(rows as f64));
        let cells = [
            build_rows,
            probe_rows,
            output::short(measured.rows as f64),
            strategy,
            output::seconds(median),
            output::short((rows[0] + rows[1]) as f64 / median),
            format!("{:.1}", median / floor.seconds()),
        ];
        output::line(self.row(&case.label(), cells));
    }

    fn row(&self, label: &str, cells: [String; COLUMNS.len()]) -> String {
        let pad = |(cell, (_, align, width)): (&String, (&str, Align, usize))| match align {
            Align::Left => format!("  {cell:<width$}"),
            Align::Right => format!("  {cell:>width$}"),
        };
        let cells: String = cells.iter().zip(COLUMNS).map(pad).collect();
        format!("{label:<width$}{cells}", width = self.label_width).trim_end().to_owned()
    }

    fn line(&self, case: &Case, rows: [u64; 2], measured: &Measured, floor: Floor) -> Value {
        let by_name = |value: fn(&PhaseRecord) -> Value| {
            let phases = measured.phases.iter().map(|phase| (phase.name.to_owned(), value(phase)));
            Value::Object(phases.collect())
        };
        let median = measured.median();
        let measurements = json!({
            "asked": measured.asked,
            "strategy": measured.strategy,
            "build_rows": rows[0],
            "probe_rows": rows[1],
            "result_rows": measured.rows,
            "verified": true,
            "seconds": median,
            "seconds_min": measured.seconds.first(),
            "seconds_max": measured.seconds.last(),
            "runs": measured.seconds.len(),
            "predicted_seconds": measured.predicted_seconds,
            "rows_per_second": (rows[0] + rows[1]) as f64 / median,
            "bytes_in": measured.bytes_in,
            "bytes_out": measured.bytes_out,
            "floor_seconds": floor.seconds(),
            "floor_memory_seconds": floor.memory_seconds,
            "floor_link_seconds": floor.link_seconds,
            "rates": {"memory": self.rates.stream, "copy_in": self.rates.copy_in, "copy_out": self.rates.copy_out},
            "device_memory_max_bytes": measured.device_memory_max_bytes,
            "phase_seconds": by_name(|phase| json!(phase.seconds)),
            "predicted_phase_seconds": measured.predicted_phases,
            "phase_bytes": by_name(|phase| json!(phase.bytes)),
        });
        let mut line = self.head.clone();
        if !measured.times.is_empty() {
            line.insert("device_seconds".into(), device_seconds(&measured.times));
        }
        line.extend(case.axes().into_iter().map(|(name, value)| (name.to_owned(), value)));
        line.extend(measurements.as_object().cloned().unwrap_or_default());
        Value::Object(line)
    }
}

/// What the device's work took by its own clock: by phase, and in each by kernel or copy.
fn device_seconds(times: &[WorkTime]) -> Value {
    let mut phases: BTreeMap<&str, BTreeMap<&str, f64>> = BTreeMap::new();
    for time in times {
        *phases.entry(time.phase).or_default().entry(time.work).or_default() += time.seconds;
    }
    json!(phases)
}

fn describe(machine: &Machine) -> Value {
    let cpu = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model =
        cpu.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':').map(|(_, name)| name.trim()));
    json!({
        "cpu": model.unwrap_or("unknown"),
        "cores": std::thread::available_parallelism().map_or(0, usize::from),
        "threads": machine.threads,
        "memory_bytes": process_memory_limit().ok(),
        "host_memory_bytes": machine.host_memory,
        "os": std::env::consts::OS,
        "architecture": std::env::consts::ARCH,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gpu_is_bound_by_its_link_and_the_cpu_by_its_memory() {
        let rates = Rates { copy_in: 10.0, copy_out: 5.0, stream: 100.0, ..Rates::h200() };
        let measured = Measured { bytes_in: 1000, bytes_out: 1000, ..Measured::default() };
        let gpu = Floor::of(DeviceKind::Cuda, &rates, &measured);
        assert_eq!((gpu.memory_seconds, gpu.link_seconds, gpu.seconds()), (20.0, Some(200.0), 200.0));
        let host = Floor::of(DeviceKind::Host, &rates, &measured);
        assert_eq!((host.link_seconds, host.seconds()), (None, 20.0));
    }
}
