//! `dovetail-bench simulate`: the server's scheduler on a simulated machine and clock.
//!
//! ```text
//!   trace (a file, or drawn) ─┐                                 ┌─► waiting, slowdown
//!   topology file ─► machine ─┴─► simulation ─► outcome, report ┼─► use of devices and links
//!                                    └─ dovetail::scheduler     └─► shares of tenants
//! ```
//!
//! Plans and predicted times come from the server's planner, places and turns from its scheduler.
//! Only the work itself is simulated: it takes the predicted time, times a drawn factor.

mod clients;
mod faults;
mod machine;
mod report;
mod sharing;
mod simulation;
mod tables;
#[cfg(test)]
mod tests;
mod trace;

use std::path::{Path, PathBuf};

use clap::Args;
use dovetail::cli::output;
use dovetail::scheduler::{Policy, TracedJob};
use dovetail::topology::Topology;
use dovetail::{Context, Error, Result};
use serde_json::{Value, json};

use self::faults::Faults;
use self::report::Report;
use self::simulation::{Outcome, Setup, Simulation};
use self::trace::{Drawing, Mix};
use super::parse_size;

/// Host memory for results, if the topology does not say how much there is.
const HOST_MEMORY: u64 = 1 << 40;

/// Run the server's scheduler on a simulated machine and clock
#[derive(Clone, Debug, Args)]
#[command(after_help = "A trace has one JSON line for each job:
  {\"at\": 0.25, \"tenant\": \"a\", \"client\": 7, \"weight\": 2, \"priority\": 0, \"how\": \"inner\",
   \"left\": {\"rows\": 1000000, \"key_bytes\": [8], \"payload_bytes\": [8, 4], \"distinct\": 1000000},
   \"right\": {\"rows\": 4000000, \"key_bytes\": [8], \"payload_bytes\": [8]}, \"count\": false, \"devices\": 2,
   \"distribution\": \"hash\"}
\"at\" is in seconds, \"devices\" is \"any\", \"all\", a number or a list of names, and \"distribution\"
is \"broadcast\" or \"hash\". Only \"at\" and the two tables are needed. `dovetail serve --job-trace FILE`
records one. Examples:
  dovetail-bench simulate --topology tests/fixtures/topology/dgx-h100.toml --load 0.9
  dovetail-bench simulate --topology FILE --trace jobs.jsonl --policy greedy
  dovetail-bench simulate --topology FILE --trace jobs.jsonl --closed-loop
  dovetail-bench simulate --topology FILE --load 1.2 --tenants 1,1,2 --faults lost=60,wrong=0.05 --json")]
pub struct SimulateArgs {
    /// Topology file of the machine
    #[arg(long, value_name = "FILE")]
    topology: PathBuf,

    /// Trace to run. Without one, --jobs are drawn
    #[arg(long, value_name = "FILE", conflicts_with_all = ["jobs", "load", "mix", "tenants", "tenant_by_kind"])]
    trace: Option<PathBuf>,

    /// Let each client of the trace ask for its next join after the end of its last one, with the
    /// pause between both that the trace has. Otherwise joins arrive at the times of the trace
    #[arg(long, requires = "trace")]
    closed_loop: bool,

    /// Number of drawn jobs
    #[arg(long, default_value_t = 2000, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    jobs: u32,

    /// Device time that drawn jobs need on the devices where they need least, over the device time
    /// that there is while they arrive
    #[arg(long, default_value_t = 0.7)]
    load: f64,

    /// Shares of drawn jobs: small joins of a millisecond, large joins, and gangs that ask for two
    /// devices or all. The default is small=0.9,large=0.07,gang=0.03
    #[arg(long, value_name = "LIST")]
    mix: Option<Mix>,

    /// Weights of the tenants that drawn jobs belong to, such as 1,1,2
    #[arg(long, value_delimiter = ',', default_value = "1")]
    tenants: Vec<f64>,

    /// Let all small joins belong to the first tenant, large ones to the second, and gangs to the
    /// third. Otherwise the jobs of each tenant are a mix
    #[arg(long)]
    tenant_by_kind: bool,

    /// Rules for the order of jobs and for their places: fair, as in a server, or greedy, where
    /// each job in turn takes the devices on which it ends first
    #[arg(long, default_value = "fair", value_parser = ["fair", "greedy"])]
    policy: String,

    /// Standard deviation of the logarithm of run times over predicted times
    #[arg(long, default_value_t = 0.1)]
    spread: f64,

    /// Faults: lost=SECONDS until a device is lost, on average, and shares of jobs that are
    /// cancelled=, that have failed= once, or whose prediction is wrong= by a factor of ten
    #[arg(long, value_name = "LIST", default_value = "", hide_default_value = true)]
    faults: Faults,

    /// Speed of each device, as a multiple of an H200's
    #[arg(long, default_value_t = 1.0)]
    speed: f64,

    /// Host memory for results; tables do not count. The default is that of the topology's
    /// sockets, or 1 TiB
    #[arg(long, value_parser = parse_size)]
    host_memory: Option<u64>,

    /// Memory of a device that the topology does not tell
    #[arg(long, default_value = "80GiB", value_parser = parse_size)]
    device_memory: u64,

    /// Rate at which a client reads a result, in bytes per second
    #[arg(long, default_value = "3GB", value_parser = parse_size)]
    read_rate: u64,

    /// Also report each job: its predicted and simulated seconds, its wait, its devices, strategy
    /// and distribution, or why it was refused
    #[arg(long)]
    each: bool,

    /// Seed of all random values
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

/// Runs a trace, and prints the report.
///
/// # Errors
/// [`Error::Invalid`] for a wrong topology, trace or option; [`Error::Internal`] if the scheduler
/// breaks a promise.
pub fn run(args: &SimulateArgs) -> Result<()> {
    let setup = setup_of(args)?;
    let trace = trace_of(args, &setup)?;
    let jobs = trace.len();
    let outcome = simulate(&setup, trace)?;
    let report = Report::of(&outcome);
    match output::is_json() {
        true => {
            let mut line = report.json(&head(args, &setup, jobs));
            if args.each {
                line["each"] = report::each(&outcome.records);
            }
            output::json(&line);
        }
        false => {
            report.show();
            if args.each {
                report::show_each(&outcome.records);
            }
        }
    }
    Ok(())
}

/// Runs a trace to its end.
///
/// # Errors
/// The errors of [`Simulation::run`].
fn simulate(setup: &Setup, trace: Vec<TracedJob>) -> Result<Outcome> {
    Simulation::new(setup.clone(), trace)?.run(&mut |_| Ok(()))
}

fn setup_of(args: &SimulateArgs) -> Result<Setup> {
    let positive = [("--load", args.load), ("--speed", args.speed), ("--read-rate", args.read_rate as f64)];
    let weights = args.tenants.iter().map(|&weight| ("--tenants", weight));
    for (name, value) in positive.into_iter().chain(weights) {
        if !(value.is_finite() && value > 0.0) {
            return Err(Error::Invalid(format!("{name} is {value}; use a number above 0")));
        }
    }
    if !(args.spread.is_finite() && args.spread >= 0.0) {
        return Err(Error::Invalid(format!("--spread is {}; use 0 or more", args.spread)));
    }
    let topology = topology_of(&args.topology)?;
    let of_sockets: u64 = topology.sockets.iter().filter_map(|socket| socket.memory_bytes).sum();
    let host_memory = args.host_memory.unwrap_or(if of_sockets > 0 { of_sockets } else { HOST_MEMORY });
    Ok(Setup {
        topology,
        policy: if args.policy == "greedy" { Policy::Greedy } else { Policy::Fair },
        speed: args.speed,
        device_memory: args.device_memory,
        host_memory,
        closed_loop: args.closed_loop,
        read_rate: args.read_rate as f64,
        spread: args.spread,
        faults: args.faults,
        seed: args.seed,
    })
}

fn topology_of(path: &Path) -> Result<Topology> {
    let text = std::fs::read_to_string(path).context(|| format!("reading {}", path.display()))?;
    Topology::parse(&text).context(|| path.display().to_string())
}

fn trace_of(args: &SimulateArgs, setup: &Setup) -> Result<Vec<TracedJob>> {
    let Some(path) = &args.trace else {
        let devices = setup.topology.devices.len();
        let mix = args.mix.unwrap_or_default();
        let drawing = Drawing {
            jobs: args.jobs as usize,
            mix,
            weights: &args.tenants,
            by_kind: args.tenant_by_kind,
            devices,
            seed: args.seed,
        };
        return drawn(&drawing, args.load, setup);
    };
    let (trace, dropped) = trace::read(path)?;
    if dropped > 0 {
        output::remark(format!("the server dropped {dropped} jobs of the trace"));
    }
    if args.closed_loop && trace.iter().all(|job| job.client.is_none()) {
        return Err(Error::Invalid(format!(
            "{} names no client, so --closed-loop has no loops; record it again with a server of this version, or add \
             \"client\" to its lines",
            path.display()
        )));
    }
    Ok(trace)
}

/// Draws a trace whose jobs arrive at the given load.
///
/// # Errors
/// The errors of planning.
fn drawn(drawing: &Drawing<'_>, load: f64, setup: &Setup) -> Result<Vec<TracedJob>> {
    let mut trace = drawing.draw();
    let needed = simulation::device_seconds(setup, &trace)?;
    let seconds = needed / (load * drawing.devices as f64);
    trace.iter_mut().for_each(|job| job.at *= seconds);
    Ok(trace)
}

/// Returns the inputs of a run, for its line of JSON.
fn head(args: &SimulateArgs, setup: &Setup, jobs: usize) -> Value {
    let name = |path: &Path| path.file_stem().map(|stem| stem.to_string_lossy().into_owned());
    let load = args.trace.is_none().then_some(args.load);
    json!({
        "topology": name(&args.topology),
        "trace": args.trace.as_deref().and_then(name),
        "jobs": jobs,
        "load": load,
        "policy": args.policy,
        "closed_loop": args.closed_loop,
        "spread": args.spread,
        "speed": args.speed,
        "host_memory_bytes": setup.host_memory,
        "seed": args.seed,
    })
}
