//! Results of benchmarks: a table for people, JSON lines for files and machines.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::Path;
use std::time::SystemTime;

use serde_json::{Map, Value, json};

use super::case::Case;
use super::engine::{Machine, Measurable, Measured};
use super::floor::{Boundaries, Floor};
use super::suite::Suite;
use super::{OfCase, overrides};
use dovetail::cli::VERSION;
use dovetail::cli::output::{self, Align};
use dovetail::device::{Phase, WorkTime};
use dovetail::join::PhaseRecord;
use dovetail::memory::process_memory_limit;
use dovetail::planner::Rates;
use dovetail::{Context, Result};

/// Writes results as they arrive.
#[derive(Debug)]
pub struct Report {
    /// Fields that all lines begin with.
    head: Map<String, Value>,
    rates: Rates,
    boundaries: Boundaries,
    out: Option<File>,
    /// True if results also go to stdout.
    on_stdout: bool,
    label_width: usize,
    /// True if the heading of the table is written.
    begun: bool,
}

/// Suffix of the label of a join that finds columns on the device.
const KEPT: &str = ", columns cached";

/// Columns of the table after the first. Their widths are fixed because rows arrive one by one.
const COLUMNS: [(&str, Align, usize); 7] = [
    ("build", Align::Right, 7),
    ("probe", Align::Right, 7),
    ("result", Align::Right, 7),
    ("strategy", Align::Left, 22),
    ("median", Align::Right, 8),
    ("rows/s", Align::Right, 7),
    ("x floor", Align::Right, 7),
];

impl Report {
    /// Opens the file for the results of `cases`. `exhaustive`: each case also runs with cached
    /// columns. `on_stdout`: results are also shown.
    ///
    /// # Errors
    /// [`Error::Internal`](dovetail::Error::Internal) when the file cannot be opened.
    pub fn begin(
        suite: &Suite,
        scale: f64,
        cases: &[Case],
        exhaustive: bool,
        on: &Measurable,
        out: Option<&Path>,
        on_stdout: bool,
    ) -> Result<Self> {
        let open = |path: &Path| {
            let opened = OpenOptions::new().create(true).append(true).open(path);
            opened.context(|| format!("opening {} to append results", path.display()))
        };
        let command = std::env::args().skip(1).map(portable).collect::<Vec<_>>().join(" ");
        let head = json!({
            "date": humantime::format_rfc3339_seconds(SystemTime::now()).to_string(),
            "version": VERSION,
            "machine": describe(&on.machine),
            "at_once": on.at_once,
            "shares": on.shares,
            "command": format!("dovetail-bench {command}"),
            "suite": suite.name,
            "about": suite.about,
            "axis": suite.axis(),
            "scale": scale,
            "device": on.device_name,
            "device_memory_bytes": on.device_memory_bytes,
        });
        let widths = cases.iter().map(|case| case.label().chars().count());
        let kept_width = if exhaustive { KEPT.len() } else { 0 };
        Ok(Self {
            head: head.as_object().cloned().unwrap_or_default(),
            rates: on.rates.clone(),
            boundaries: on.boundaries,
            on_stdout,
            out: out.map(open).transpose()?,
            label_width: widths.max().unwrap_or(0).max("join".len()) + kept_width,
            begun: false,
        })
    }

    /// Writes the measurements of a case.
    ///
    /// # Errors
    /// [`Error::Internal`](dovetail::Error::Internal) when the file cannot be written.
    pub fn add(&mut self, case: &Case, of_case: &OfCase) -> Result<()> {
        let OfCase { rows, measured, planned } = of_case;
        let rows = *rows;
        for line in planned {
            self.write(&self.with_head(&json!({"planned": line})))?;
        }
        for measured in measured.iter().filter(|measured| overrides::name(&measured.asked) != "forced") {
            let floor = Floor::of(&self.boundaries, measured);
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
    /// [`Error::Internal`](dovetail::Error::Internal) when the file cannot be written.
    pub fn summarize(&mut self, summary: Value) -> Result<()> {
        self.write(&self.with_head(&json!({"summary": summary})))
    }

    /// True if results are shown as a table for people.
    pub fn is_table(&self) -> bool {
        self.on_stdout && !output::is_json()
    }

    /// Makes a line of results with the head's fields.
    fn with_head(&self, more: &Value) -> Value {
        let mut line = self.head.clone();
        line.extend(more.as_object().cloned().unwrap_or_default());
        Value::Object(line)
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
        let strategy = match overrides::name(&measured.asked) {
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
        let kept = if measured.kept { KEPT } else { "" };
        output::line(self.row(&format!("{}{kept}", case.label()), cells));
    }

    fn row(&self, label: &str, cells: [String; COLUMNS.len()]) -> String {
        let pad = |(cell, (_, align, width)): (&String, (&str, Align, usize))| match align {
            // Only the strategy is aligned left.
            Align::Left => format!("  {cell:<width$}"),
            Align::Right => format!("  {cell:>width$}"),
        };
        let cells: String = cells.iter().zip(COLUMNS).map(pad).collect();
        format!("{label:<width$}{cells}", width = self.label_width).trim_end().to_owned()
    }

    fn line(&self, case: &Case, rows: [u64; 2], measured: &Measured, floor: Floor) -> Value {
        let by_name = |value: fn(&PhaseRecord) -> Value| {
            let phases = measured.phases.iter().map(|phase| (phase.phase.to_string(), value(phase)));
            Value::Object(phases.collect())
        };
        let median = measured.median();
        let measurements = json!({
            "asked": overrides::name(&measured.asked),
            "kept": measured.kept,
            // A first run, which is not timed, has used the memory.
            "memory": "used before",
            "strategy": measured.strategy,
            "plan": measured.plan,
            "build_rows": rows[0],
            "probe_rows": rows[1],
            "result_rows": measured.rows,
            "predicted_rows": measured.predicted_rows,
            "verified": true,
            "seconds": median,
            "seconds_min": measured.seconds.first(),
            "seconds_max": measured.seconds.last(),
            "runs": measured.seconds.len(),
            "seconds_again": measured.median_again(),
            "predicted_seconds": measured.predicted_seconds,
            "rows_per_second": (rows[0] + rows[1]) as f64 / median,
            "bytes_in": measured.bytes_in,
            "bytes_out": measured.bytes_out,
            "floor_seconds": floor.seconds(),
            "floor_memory_seconds": floor.memory_seconds,
            "floor_link_seconds": floor.link_seconds,
            "floor_link_both_seconds": floor.link_both_seconds,
            "rates": {
                "memory": self.boundaries.memory,
                "stream": self.rates.stream,
                "copy_in": self.rates.copy_in,
                "copy_out": self.rates.copy_out,
                "link_in": self.boundaries.link.map(|link| link.into),
                "link_out": self.boundaries.link.map(|link| link.out),
                "link_both": self.boundaries.link.map(|link| link.both),
            },
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

/// Returns the work times by the device's own clock: by phase, then by kernel or copy.
fn device_seconds(times: &[WorkTime]) -> Value {
    let mut phases: BTreeMap<&str, BTreeMap<&str, f64>> = BTreeMap::new();
    for time in times {
        *phases.entry(time.phase.map_or("", Phase::name)).or_default().entry(time.work).or_default() += time.seconds;
    }
    json!(phases)
}

/// Returns an argument of the command. A path on this machine becomes its name.
fn portable(argument: String) -> String {
    let path = Path::new(&argument);
    let name = path.is_absolute().then(|| path.file_name()).flatten();
    name.map_or_else(|| argument.clone(), |name| name.to_string_lossy().into_owned())
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
