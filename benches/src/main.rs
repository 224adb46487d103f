//! `dovetail-bench`: measures the engine on this machine, in this process, without a server.
//!
//! ```text
//!   suite × scale ─► cases ─► prepare: tables, joins ─► engine: catalog, plan, run, time
//!                                │                        └─► table, JSON lines ─► plot.py
//!                                └─ expected rows and checksum ─► checked after each run, untimed
//! ```
//!
//! A suite is a named set of cases: synthetic joins along axes, sequences of joins, joins of TPC-H
//! and TPC-DS, or joins drawn at random. The suites `wu-N` and `rui-N` have the workloads of figure
//! N in
//!
//! * B. Wu, D. Koutsoukos and G. Alonso, Efficiently Processing Large Relational Joins on GPUs,
//!   2024;
//! * R. Rui and Y.-C. Tu, Fast Equi-Join Algorithms on GPUs: Design and Implementation, SSDBM 2017;
//!
//! at the published sizes times a scale. The algorithms that the papers compare are strategies
//! here: `sort-merge-gfur`, `sort-merge`, `radix-hash-gfur` and `radix-hash` are SMJ-UM, SMJ-OM,
//! PHJ-UM and PHJ-OM of Wu et al., and `hash` is a join without partitioning. When the clock
//! starts, the papers' tables are in GPU memory, and ours in host memory.
//!
//! Each line of results has the numbers, the date, the commit, the machine and the command. It also
//! has the floor: the time to read the tables and write the result once in the device's memory or,
//! for a GPU, to send them over the link. The floor uses the measured rates of plain copies
//! (`floor.rs`).

#[path = "../at_once/mod.rs"]
mod at_once;
mod axes;
mod case;
mod check;
mod choices;
mod engine;
mod floor;
mod overrides;
mod planned;
mod random;
mod report;
mod sequence;
mod simulate;
mod suite;
mod suites;
mod tpc;
mod workload;
mod zipf;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::parser::ValueSource;
use clap::{Arg, ArgMatches, CommandFactory, Parser, Subcommand};
use serde_json::Value;

use self::axes::{parse_scale, show_scale};
use self::case::Case;
use self::check::Prepared;
use self::choices::Choices;
use self::engine::{Engine, Machine, Measurable, Measured, Timed};
use self::floor::Boundaries;
use self::report::Report;
use self::simulate::SimulateArgs;
use self::suite::{AxisArgs, Size, Suite};
use self::suites::SUITES;
use dovetail::cli::VERSION;
use dovetail::cli::output::{self, Align};
use dovetail::cli::progress::Progress;
use dovetail::device::{DeviceId, DeviceKind, parse_device};
use dovetail::memory::{human_bytes, parse_bytes, process_memory_limit};
use dovetail::planner::{self, PlanOverrides, Strategy};
use dovetail::{Context, Error, Result};

/// Bytes of tables and result of the largest case on a CPU, without `--scale`: more than caches
/// hold, and small enough that a suite takes minutes.
const CPU_CASE_BYTES: u64 = 256 << 20;

/// Minimum total time of the timed runs of a case. Shorter cases have up to `SHORT_RUNS` times the
/// runs. Other work on the machine changes the time of a join of one or two milliseconds by more
/// than strategies differ.
const SHORT: Duration = Duration::from_millis(250);
const SHORT_RUNS: u32 = 8;

/// Default number of joins that suite choices draws.
const CASES: u16 = 40;

/// Minimum device memory after scaling, because pieces of work have a fixed size.
const DEVICE_MEMORY_MIN: u64 = 8 << 20;

/// The server's allocator, because the benchmark measures the server's engine.
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

/// Measure the engine on this machine, without a server
#[derive(Clone, Debug, Parser)]
#[command(name = "dovetail-bench", version = VERSION, max_term_width = 120)]
#[command(after_help = "Without a suite, lists all suites. Examples:
  dovetail-bench wu-12 --scale 1/16 --out results.jsonl
  dovetail-bench rui-7 --device cuda:0 --scale 1 --strategies radix-hash,sort-merge
  dovetail-bench joins --rows 16M:64M --key-bytes 8 --payloads 1x4+2x8
  dovetail-bench choices --cases 100
  dovetail-bench choices --exhaustive --device cuda:0 --scale 1/8
  dovetail-bench simulate --topology tests/fixtures/topology/dgx-h100.toml
benches/plot.py draws the figure of each suite from a file of results.")]
struct BenchArgs {
    #[command(subcommand)]
    command: Option<BenchCommand>,

    /// Suite to run. Without one, the suites are listed
    suite: Option<String>,

    /// Scale of the sizes of the suite, such as 1/16. The default is the largest scale that fits,
    /// and on a CPU at most 256 MiB of tables and result per join
    #[arg(long, value_parser = parse_scale)]
    scale: Option<f64>,

    /// Strategies to measure: names, "all", or "auto" for the choice of the planner. The default is
    /// all, and for suite choices also auto
    #[arg(long, value_delimiter = ',')]
    strategies: Vec<String>,

    /// Timed runs of each strategy, and more if they take milliseconds. The median is shown
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    runs: u32,

    /// Number of joins that suite choices draws, 40 by default
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=10_000))]
    cases: Option<u16>,

    /// Compare each choice of the planner with every way to compose the join: build side, filter,
    /// and payload that moves with the keys. On a GPU, repeat this with columns on the device from
    /// earlier runs. --out stores all times, with the inputs of the planner
    #[arg(long)]
    exhaustive: bool,

    /// Number of runs of a join that are timed at once, on the same device. The result is the time
    /// of the device per run
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=64))]
    at_once: u16,

    /// Let results share columns with the tables, as on a server: true or false. The default is
    /// true for suite choices only
    #[arg(long)]
    shares: Option<bool>,

    /// Device to measure: host, or cuda:N for GPU number N
    #[arg(long, default_value = "host", value_parser = parse_device)]
    device: DeviceId,

    /// CPU threads of the device. The default is all threads of the machine
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,

    /// Memory of the device, such as 4GiB. The default is all free memory of a GPU, and half of
    /// --host-memory for the CPU
    #[arg(long, value_parser = parse_size)]
    device_memory: Option<u64>,

    /// Memory for tables and results, such as 16GiB. The default is 60 % of the memory of the
    /// machine
    #[arg(long, value_parser = parse_size)]
    host_memory: Option<u64>,

    /// Seed of all random values
    #[arg(long, default_value_t = 1)]
    seed: u64,

    /// File to append results to, as JSON lines
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,

    /// Print JSON, one value per line
    #[arg(long, global = true)]
    json: bool,

    // Keep these options last: later options would appear under their heading.
    #[command(flatten)]
    axes: AxisArgs,
}

#[derive(Clone, Debug, Subcommand)]
enum BenchCommand {
    Simulate(Box<SimulateArgs>),
}

fn parse_size(text: &str) -> Result<u64, String> {
    parse_bytes(text).map_err(|error| error.to_string())
}

fn main() -> ExitCode {
    dovetail::cli::run_program(run)
}

/// Runs a suite, or lists all suites. `matches` tells which options the caller gave.
///
/// # Errors
/// [`Error::Invalid`] for an unknown suite, for axes or options that the suite lacks, and for
/// options without a suite; [`Error::Internal`] when a result is wrong; errors of the engine.
fn run(args: &BenchArgs, matches: &ArgMatches) -> Result<()> {
    if let Some(BenchCommand::Simulate(simulated)) = &args.command {
        return simulate::run(simulated);
    }
    let Some(name) = &args.suite else {
        refuse_given(matches)?;
        list();
        return Ok(());
    };
    let suite = suites::find(name)?;
    if args.exhaustive && !suite.is_of_choices() && !args.strategies.iter().any(|name| name == "auto") {
        return Err(Error::Invalid(format!(
            "--exhaustive compares the choices of the planner, and suite {name} compares strategies; add \
             --strategies auto, or run suite choices"
        )));
    }
    if args.cases.is_some() && !suite.is_of_choices() {
        return Err(Error::Invalid(format!(
            "--cases sets the number of random joins, and suite {name} has fixed joins; remove --cases, or run suite \
             choices"
        )));
    }
    let mut machine = machine(args)?;
    let bytes_max = match machine.device.kind {
        DeviceKind::Host => CPU_CASE_BYTES.min(machine.host_memory / 4),
        // Tables are in memory twice during the upload.
        DeviceKind::Cuda => machine.host_memory / 2,
    };
    let scale = match args.scale {
        Some(scale) => scale,
        None => suite.fitting_scale(&args.axes, args.seed, bytes_max)?,
    };
    tables_fit(&cases_of(suite, scale, args)?, machine.host_memory)?;
    // Measure with all memory: caches would hold copies in a small part of it.
    let boundaries = Boundaries::measure(&*machine.open()?, machine.host_memory)?;
    if args.device_memory.is_none() {
        machine.device_memory = device_memory(suite, scale);
    }
    let device = machine.open()?;
    let progress = Progress::share(&format!("measuring the rates of {}", device.id()));
    let rates = planner::calibrate_telling(&*device, &|share| progress.set_share(share));
    let on = Measurable::new(machine, &*device, rates, boundaries);
    progress.finish();
    drop(device);
    run_suite(suite, scale, args, &on, true)
}

fn cases_of(suite: &Suite, scale: f64, args: &BenchArgs) -> Result<Vec<Case>> {
    suite.cases(&args.axes, Size { scale, seed: args.seed, cases: args.cases.unwrap_or(CASES).into() })
}

/// Refuses tables that do not fit memory, before minutes are spent on generating them.
fn tables_fit(cases: &[Case], host_memory: u64) -> Result<()> {
    let possible = cases.iter().filter(|case| case.impossible().is_none());
    let Some(largest) = possible.max_by_key(|case| case.table_bytes()) else { return Ok(()) };
    match largest.table_bytes() > host_memory {
        false => Ok(()),
        true => Err(Error::Exhausted(format!(
            "the tables of {} need {}, and --host-memory is {}; use a smaller --scale or a larger --host-memory",
            largest.label(),
            human_bytes(largest.table_bytes()),
            human_bytes(host_memory)
        ))),
    }
}

fn machine(args: &BenchArgs) -> Result<Machine> {
    let host_memory = match args.host_memory {
        Some(bytes) => bytes,
        None => process_memory_limit()? / 10 * 6,
    };
    Ok(Machine {
        device: args.device,
        threads: match args.threads {
            Some(threads) => threads.into(),
            None => std::thread::available_parallelism().map_or(1, usize::from),
        },
        device_memory: args.device_memory,
        host_memory,
    })
}

/// Returns the scaled device memory of a suite that sets it.
fn device_memory(suite: &Suite, scale: f64) -> Option<u64> {
    suite.device_memory.map(|bytes| ((bytes as f64 * scale) as u64).max(DEVICE_MEMORY_MIN))
}

fn run_suite(suite: &Suite, scale: f64, args: &BenchArgs, on: &Measurable, on_stdout: bool) -> Result<()> {
    let cases = cases_of(suite, scale, args)?;
    let strategies = strategies(suite, &args.strategies)?;
    // The planner's choices are measured as in a server.
    let on = &Measurable {
        shares: args.shares.unwrap_or(suite.is_of_choices()),
        at_once: args.at_once.into(),
        ..on.clone()
    };
    let mut report = Report::begin(suite, scale, &cases, args.exhaustive, on, args.out.as_deref(), on_stdout)?;
    if on_stdout {
        output::remark(format!("{}: {}; scale {}", suite.name, suite.about, show_scale(scale)));
    }
    let mut choices = Choices::default();
    let asking = Asking {
        strategies: &strategies,
        runs: args.runs,
        exhaustive: args.exhaustive,
        compares: suite.is_of_choices(),
    };
    let progress = Progress::of(suite.name, Some(cases.len() as u64));
    for case in &cases {
        progress.advance(1);
        if let Some(reason) = case.impossible() {
            progress.aside(|| output::remark(format!("skipped {}: {reason}", case.label())));
            continue;
        }
        let of_case = measure(case, &asking, on, &progress).context(|| case.label())?;
        progress.aside(|| report.add(case, &of_case))?;
        if suite.is_of_choices() {
            let [build, probe] = of_case.rows.map(output::count);
            choices.add(&format!("{build} ⋈ {probe}, {}", case.label()), &of_case.measured);
        }
    }
    progress.finish();
    if let Some(summary) = choices.summary() {
        report.summarize(summary)?;
        if report.is_table() {
            choices.show(args.exhaustive);
        }
    }
    Ok(())
}

/// The requested measurements of each case.
#[derive(Clone, Copy)]
struct Asking<'a> {
    /// `None`: the planner's choice.
    strategies: &'a [Option<Strategy>],
    runs: u32,
    /// True if every way to compose a join is measured, also with columns on the device.
    exhaustive: bool,
    /// True if the planner's choice is compared with the alternatives.
    compares: bool,
}

/// The measurements of one case.
#[derive(Debug, Default)]
struct OfCase {
    rows: [u64; 2],
    measured: Vec<Measured>,
    /// The planner's inputs, with the times of every way to compose the join: a line for columns
    /// copied in, and a line for cached columns.
    planned: Vec<Value>,
}

/// Measures one case. Drops the engine at the end, so that each case finds the same free memory.
fn measure(case: &Case, asking: &Asking<'_>, on: &Measurable, progress: &Progress) -> Result<OfCase> {
    progress.set_message(format!("generating {}", case.label()));
    let mut prepared = case.prepare()?;
    let mut of_case = OfCase { rows: prepared.rows(), ..OfCase::default() };
    let mut engine = Engine::new(on, &mut prepared)?;
    progress.set_message(format!("measuring {}", case.label()));
    measure_group(case, asking, &engine, &prepared, progress, &mut of_case)?;
    if asking.exhaustive && engine.enable_cache().context(|| "caching columns on the device")? {
        progress.set_message(format!("measuring {}, columns cached", case.label()));
        measure_group(case, asking, &engine, &prepared, progress, &mut of_case)?;
    }
    Ok(of_case)
}

/// Adds the requested measurements in the engine's current state.
fn measure_group(
    case: &Case,
    asking: &Asking<'_>,
    engine: &Engine,
    prepared: &Prepared,
    progress: &Progress,
    of_case: &mut OfCase,
) -> Result<()> {
    let runs = asking.runs;
    let mut wanted: Vec<PlanOverrides> =
        asking.strategies.iter().map(|&strategy| PlanOverrides::named(strategy)).collect();
    if asking.exhaustive {
        let ways = engine.ways(&wanted)?;
        wanted.extend(ways);
    }
    let mut measured: Vec<Measured> = Vec::new();
    for asked in wanted {
        let checked = engine.check(&asked, prepared).context(|| overrides::label(&asked));
        match checked {
            Ok(checked) => measured.push(checked),
            // Another strategy may need less memory.
            Err(Error::Exhausted(reason)) => {
                progress.aside(|| {
                    output::remark(format!("skipped {} for {}: {reason}", overrides::label(&asked), case.label()));
                });
            }
            Err(error) => return Err(error),
        }
    }
    // The planner's choice may have the same plan as a listed strategy. Both share one measurement,
    // because two would differ by noise alone.
    let same_plan = |of: usize| (0..of).find(|&earlier| measured[earlier].plan == measured[of].plan);
    let measured_with: Vec<usize> = (0..measured.len()).map(|at| same_plan(at).unwrap_or(at)).collect();
    let own: Vec<usize> = (0..measured.len()).filter(|&at| measured_with[at] == at).collect();
    let time = |at: usize| {
        let Measured { asked, bytes_in, bytes_out, .. } = &measured[at];
        progress.moved(bytes_in + bytes_out);
        engine.time(asked, prepared).context(|| overrides::label(asked))
    };
    let timed = in_turn(&own, runs, time)?;
    for (measured, with) in measured.iter_mut().zip(measured_with) {
        measured.set_runs(timed[&with].clone());
    }
    if asking.compares {
        let time = |at: usize| {
            let asked = &measured[at].asked;
            engine.time(asked, prepared).context(|| overrides::label(asked))
        };
        for (at, again) in in_turn(&choices::to_measure_again(&measured), runs, time)? {
            measured[at].set_runs_again(&again);
        }
    }
    if asking.exhaustive {
        of_case.planned.extend(engine.planned()?.map(|planned| planned::line(&planned, &measured)));
    }
    of_case.measured.extend(measured);
    Ok(())
}

/// Times at least `runs` runs of each item of `which`, and more if they are short. The items take
/// turns, so that other work on the machine disturbs all of them alike. `time` gets the item.
fn in_turn(which: &[usize], runs: u32, time: impl Fn(usize) -> Result<Timed>) -> Result<BTreeMap<usize, Vec<Timed>>> {
    let mut timed: BTreeMap<usize, Vec<Timed>> = BTreeMap::new();
    // Seconds of the runs alone, without the checks of their results.
    let mut timed_seconds = 0.0;
    for round in 0..runs * SHORT_RUNS {
        if round >= runs && timed_seconds >= SHORT.as_secs_f64() {
            break;
        }
        for &at in which {
            let run = time(at)?;
            timed_seconds += run.seconds;
            timed.entry(at).or_default().push(run);
        }
    }
    Ok(timed)
}

/// Refuses options without a suite, because they have no effect and the caller expects one.
fn refuse_given(matches: &ArgMatches) -> Result<()> {
    let command = BenchArgs::command();
    let is_given = |arg: &&Arg| {
        arg.get_id() != "json" && matches.value_source(arg.get_id().as_str()) == Some(ValueSource::CommandLine)
    };
    let given = command.get_arguments().filter(is_given).filter_map(|arg| Some(format!("--{}", arg.get_long()?)));
    let given = given.collect::<Vec<_>>().join(", ");
    if given.is_empty() {
        return Ok(());
    }
    Err(Error::Invalid(format!(
        "{given} without a suite has no effect; name a suite, as in `dovetail-bench joins`, or run `dovetail-bench` \
         alone to list the suites"
    )))
}

fn list() {
    if output::is_json() {
        SUITES.iter().for_each(|suite| output::json(&serde_json::json!({ "suite": suite.name, "about": suite.about })));
        return;
    }
    let columns = [("suite", Align::Left), ("reproduces or varies", Align::Left)];
    let rows: Vec<Vec<String>> =
        SUITES.iter().map(|suite| vec![suite.name.to_owned(), suite.about.to_owned()]).collect();
    output::line(output::table(&columns, &rows));
    output::line(format!(
        "\n`dovetail-bench SUITE` runs a suite, on the CPU with at most {} of tables and result. --scale sets \
         another size,\nand options such as --rows and --keys (see --help) change what the suite varies",
        human_bytes(CPU_CASE_BYTES)
    ));
}

fn strategies(suite: &Suite, names: &[String]) -> Result<Vec<Option<Strategy>>> {
    let all = || Strategy::ALL.map(Some);
    if names.is_empty() {
        let auto = suite.is_of_choices().then_some(None);
        return Ok(all().into_iter().chain(auto).collect());
    }
    let mut strategies = Vec::new();
    for name in names {
        match name.as_str() {
            "all" => strategies.extend(all()),
            "auto" => strategies.push(None),
            name => strategies.push(Some(name.parse()?)),
        }
    }
    Ok(strategies)
}

#[cfg(test)]
mod tests;
