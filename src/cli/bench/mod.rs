//! `dovetail bench`: what the engine takes on this machine, in this process, without a server.
//!
//! ```text
//!   suite (axes with defaults) ─► workloads ─► generate ─► catalog ─► plan, run, time ─► table, JSON lines
//!                                                  └─ expected rows and checksum ──► checked in an untimed run
//! ```
//!
//! Each line of results keeps the date, the commit, the machine and the command beside the numbers, and the floor: the
//! time in which this machine's memory could read the inputs and write the result once.

mod engine;
mod generate;
mod random;
mod report;
mod zipf;

use std::path::PathBuf;
use std::str::FromStr;

use self::engine::Engine;
use self::generate::{Keys, Workload};
use self::report::Report;
use super::output::{self, Align};
use super::progress::Progress;
use crate::device::{DeviceId, parse_device};
use crate::memory::parse_bytes;
use crate::planner::Strategy;
use crate::{Context, Error, Result};

/// Arguments of `dovetail bench`.
#[derive(Clone, Debug, clap::Args)]
pub struct BenchArgs {
    /// Suite to run; without one, the suites are listed
    suite: Option<String>,

    /// Rows of the build side; K, M and G are binary
    #[arg(long, value_delimiter = ',', value_parser = parse_rows)]
    rows: Vec<u64>,

    /// Rows of the probe side for each of the build side
    #[arg(long, value_delimiter = ',')]
    ratio: Vec<u64>,

    /// Bytes of a key and of each payload column: 4, 8
    #[arg(long, value_delimiter = ',', value_parser = parse_width)]
    width: Vec<usize>,

    /// What keys look like: dense, sparse, multiples (of 2^16), zipf:EXPONENT, text
    #[arg(long, value_delimiter = ',')]
    keys: Vec<Keys>,

    /// Payload columns of each side
    #[arg(long, value_delimiter = ',')]
    payloads: Vec<usize>,

    /// Share of probe rows that have a partner
    #[arg(long, value_delimiter = ',', value_parser = parse_share)]
    match_ratio: Vec<f64>,

    /// Build rows with the same key
    #[arg(long, value_delimiter = ',', value_parser = clap::value_parser!(u64).range(1..))]
    copies: Vec<u64>,

    /// Strategies, all, or auto for the planner's choice
    #[arg(long, value_delimiter = ',', default_value = "all")]
    strategies: Vec<String>,

    /// Timed runs of each; the median is shown
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    runs: u32,

    /// Device to measure: host, or cuda:N for GPU number N
    #[arg(long, default_value = "host", value_parser = parse_device)]
    device: DeviceId,

    /// CPU threads of the device; all of the machine's by default
    #[arg(long)]
    threads: Option<usize>,

    /// Memory of the device
    #[arg(long, default_value = "8GiB", value_parser = parse_size)]
    device_memory: u64,

    /// Memory for tables and results
    #[arg(long, default_value = "16GiB", value_parser = parse_size)]
    host_memory: u64,

    /// Everything random follows from it
    #[arg(long, default_value_t = 1)]
    seed: u64,

    /// File to which results are appended, as JSON lines
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

/// A named set of workloads: what is not said on the command line.
struct Suite {
    name: &'static str,
    about: &'static str,
    rows: &'static [u64],
    ratio: &'static [u64],
    width: &'static [usize],
    keys: &'static [Keys],
    payloads: &'static [usize],
    match_ratio: &'static [f64],
    copies: &'static [u64],
}

const JOINS: Suite = Suite {
    name: "joins",
    about: "foreign key to primary key, dense uniform keys: the baseline of the literature",
    rows: &[1 << 20, 1 << 24],
    ratio: &[2],
    width: &[4, 8],
    keys: &[Keys::Dense],
    payloads: &[1],
    match_ratio: &[1.0],
    copies: &[1],
};

/// All suites.
const SUITES: [Suite; 5] = [
    JOINS,
    Suite {
        name: "keys",
        about: "the same join with keys that are sparse, patterned, skewed, or text",
        rows: &[1 << 22],
        width: &[8],
        keys: &[
            Keys::Dense,
            Keys::Sparse,
            Keys::Multiples,
            Keys::Zipf(0.75),
            Keys::Zipf(1.25),
            Keys::Zipf(1.75),
            Keys::Text,
        ],
        ..JOINS
    },
    Suite {
        name: "matches",
        about: "fewer and fewer probe rows find a partner",
        rows: &[1 << 22],
        width: &[4],
        keys: &[Keys::Sparse],
        match_ratio: &[1.0, 0.5, 0.25, 0.125, 0.0625],
        ..JOINS
    },
    Suite {
        name: "duplicates",
        about: "build keys repeat: results grow beyond the probe side",
        rows: &[1 << 20],
        width: &[4],
        keys: &[Keys::Sparse],
        copies: &[1, 4, 16],
        ..JOINS
    },
    Suite {
        name: "payloads",
        about: "wider rows: gathering comes to dominate",
        rows: &[1 << 22],
        width: &[4],
        payloads: &[1, 2, 4, 8],
        ..JOINS
    },
];

impl FromStr for Keys {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once(':').unwrap_or((text, "1")) {
            ("dense", _) => Ok(Self::Dense),
            ("sparse", _) => Ok(Self::Sparse),
            ("multiples", _) => Ok(Self::Multiples),
            ("text", _) => Ok(Self::Text),
            ("zipf", exponent) => match exponent.parse() {
                Ok(exponent) if (0.0..=10.0).contains(&exponent) => Ok(Self::Zipf(exponent)),
                _ => Err(format!("{exponent:?} is not an exponent from 0 to 10")),
            },
            _ => Err("write dense, sparse, multiples, zipf:EXPONENT or text".into()),
        }
    }
}

impl std::fmt::Display for Keys {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Dense => f.write_str("dense"),
            Self::Sparse => f.write_str("sparse"),
            Self::Multiples => f.write_str("multiples"),
            Self::Zipf(exponent) => write!(f, "zipf:{exponent}"),
            Self::Text => f.write_str("text"),
        }
    }
}

fn parse_rows(text: &str) -> Result<u64, String> {
    let rows = parse_bytes(text).ok().filter(|rows| (1..=1 << 31).contains(rows));
    rows.ok_or_else(|| "write a number of rows such as 500000, 64K or 16M".into())
}

fn parse_size(text: &str) -> Result<u64, String> {
    parse_bytes(text).map_err(|error| error.to_string())
}

fn parse_width(text: &str) -> Result<usize, String> {
    text.parse().ok().filter(|width| matches!(width, 4 | 8)).ok_or_else(|| "write 4 or 8".into())
}

fn parse_share(text: &str) -> Result<f64, String> {
    text.parse().ok().filter(|share| (0.0..=1.0).contains(share)).ok_or_else(|| "write a number from 0 to 1".into())
}

/// Runs a suite, or lists them.
///
/// # Errors
/// [`Error::Invalid`] for an unknown suite; [`Error::Internal`] when a result is wrong; what the engine answers.
pub fn run(args: &BenchArgs) -> Result<()> {
    let Some(name) = &args.suite else {
        list();
        return Ok(());
    };
    let suite = SUITES.iter().find(|suite| suite.name == name).ok_or_else(|| {
        let names: Vec<&str> = SUITES.iter().map(|suite| suite.name).collect();
        Error::Invalid(format!("there is no suite {name:?}; there are {}", names.join(", ")))
    })?;
    let strategies = strategies(&args.strategies)?;
    let mut report = Report::begin(suite.name, args.out.as_deref(), report::memory_rate())?;
    for workload in workloads(suite, args) {
        if let Some(reason) = workload.impossible() {
            output::remark(format!("skipped {}: {reason}", describe(&workload)));
            continue;
        }
        measure(&workload, &strategies, args, &mut report).context(|| describe(&workload))?;
    }
    Ok(())
}

/// All strategies on one workload. The engine ends with it, so that each workload finds the same memory.
fn measure(workload: &Workload, strategies: &[Option<Strategy>], args: &BenchArgs, report: &mut Report) -> Result<()> {
    let progress = Progress::spinner(&format!("generating {}", describe(workload)));
    let engine = Engine::new(args.device, args.threads, args.device_memory, args.host_memory)?;
    let generated = workload.generate()?;
    let expected = generated.expected;
    engine.put("build", generated.build)?;
    engine.put("probe", generated.probe)?;
    progress.finish();
    for strategy in strategies {
        let name = strategy.map_or("auto", Strategy::name);
        // One run to warm up and check, and those that are timed.
        let progress = Progress::of(&format!("{name} on {}", describe(workload)), Some(u64::from(args.runs) + 1));
        let ran = || progress.advance(1);
        let measured = engine.measure(workload, *strategy, expected, args.runs, &ran).context(|| name.to_owned())?;
        progress.finish();
        report.add(workload, name, &measured)?;
    }
    Ok(())
}

fn list() {
    let axes = |suite: &Suite| {
        let rows: Vec<String> = suite.rows.iter().map(|rows| output::count(*rows)).collect();
        vec![suite.name.to_owned(), suite.about.to_owned(), rows.join("; ")]
    };
    if output::is_json() {
        SUITES.iter().for_each(|suite| output::json(&serde_json::json!({ "suite": suite.name, "about": suite.about })));
        return;
    }
    let columns = [("suite", Align::Left), ("what it varies", Align::Left), ("build rows", Align::Left)];
    output::line(output::table(&columns, &SUITES.iter().map(axes).collect::<Vec<_>>()));
    output::line("\n`dovetail bench SUITE` runs one; --rows, --width, --keys and the others change what it varies");
}

/// All combinations of the axes; what the command line says replaces the suite's own.
fn workloads(suite: &Suite, args: &BenchArgs) -> Vec<Workload> {
    fn or<T: Clone>(given: &[T], default: &[T]) -> Vec<T> {
        if given.is_empty() { default.to_vec() } else { given.to_vec() }
    }
    let mut all = vec![Workload {
        keys: Keys::Dense,
        width: 4,
        build_rows: 1,
        probe_rows: 1,
        payloads: 1,
        match_ratio: 1.0,
        copies: 1,
        seed: args.seed,
    }];
    let mut vary = |set: &mut dyn FnMut(&mut Workload, usize), values: usize| {
        let varied = all.iter().flat_map(|workload| (0..values).map(|at| (workload.clone(), at)).collect::<Vec<_>>());
        all = varied
            .collect::<Vec<_>>()
            .into_iter()
            .map(|(mut workload, at)| {
                set(&mut workload, at);
                workload
            })
            .collect();
    };
    let (keys, width) = (or(&args.keys, suite.keys), or(&args.width, suite.width));
    let (rows, ratio) = (or(&args.rows, suite.rows), or(&args.ratio, suite.ratio));
    let (payloads, copies) = (or(&args.payloads, suite.payloads), or(&args.copies, suite.copies));
    let match_ratio = or(&args.match_ratio, suite.match_ratio);
    vary(&mut |workload, at| workload.width = width[at], width.len());
    vary(&mut |workload, at| workload.build_rows = rows[at], rows.len());
    vary(&mut |workload, at| workload.probe_rows = workload.build_rows * ratio[at], ratio.len());
    vary(&mut |workload, at| workload.keys = keys[at], keys.len());
    vary(&mut |workload, at| workload.payloads = payloads[at], payloads.len());
    vary(&mut |workload, at| workload.match_ratio = match_ratio[at], match_ratio.len());
    vary(&mut |workload, at| workload.copies = copies[at], copies.len());
    all
}

fn strategies(names: &[String]) -> Result<Vec<Option<Strategy>>> {
    let mut strategies = Vec::new();
    for name in names {
        match name.as_str() {
            "all" => strategies.extend(Strategy::ALL.map(Some)),
            "auto" => strategies.push(None),
            name => strategies.push(Some(name.parse()?)),
        }
    }
    Ok(strategies)
}

fn describe(workload: &Workload) -> String {
    format!(
        "{} ⋈ {} rows, {} keys of {} bytes",
        output::count(workload.build_rows),
        output::count(workload.probe_rows),
        workload.keys,
        workload.width
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args() -> BenchArgs {
        use clap::{Args, Command, FromArgMatches};
        let matches = BenchArgs::augment_args(Command::new("bench")).try_get_matches_from(["bench"]).unwrap();
        BenchArgs::from_arg_matches(&matches).unwrap()
    }

    #[test]
    fn axes_multiply_and_the_command_line_replaces_them() {
        assert_eq!(workloads(&JOINS, &args()).len(), 4);
        let given = BenchArgs { rows: vec![10, 20, 30], keys: vec![Keys::Sparse], ..args() };
        let all = workloads(&JOINS, &given);
        assert_eq!(all.len(), 6);
        assert!(
            all.iter().all(|workload| workload.keys == Keys::Sparse && workload.probe_rows == 2 * workload.build_rows)
        );
    }

    #[test]
    fn keys_read_back_what_is_written() {
        for keys in SUITES.iter().flat_map(|suite| suite.keys) {
            assert_eq!(keys.to_string().parse::<Keys>().as_ref(), Ok(keys));
        }
        assert!("zipf:-1".parse::<Keys>().is_err());
        assert!("random".parse::<Keys>().is_err());
    }

    #[test]
    fn every_suite_runs_small_and_is_verified() {
        for suite in &SUITES {
            let args =
                BenchArgs { rows: vec![1000], runs: 1, device_memory: 64 << 20, host_memory: 256 << 20, ..args() };
            let mut report = Report::begin(suite.name, None, 1e10).unwrap();
            for workload in workloads(suite, &args).iter().filter(|workload| workload.impossible().is_none()) {
                measure(workload, &strategies(&["all".into(), "auto".into()]).unwrap(), &args, &mut report).unwrap();
            }
        }
    }
}
