//! `dovetail demo`: the main job on generated data, in one command.
//!
//! ```text
//!   tpchgen ─► tables on the client ─┬─► put (DoPut over loopback) ─► server in this process ─► join ─► rows
//!                                    └─► counted with plain hash maps ────────────── must be equal ──────┘
//! ```
//!
//! The client half talks to the server half through a socket, as any client would.

mod count;
mod joins;
mod tables;

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::time::Instant;

use arrow::array::RecordBatch;
use clap::builder::PossibleValuesParser;
use futures::StreamExt;
use serde_json::{Value, json};

use self::count::Counted;
use self::joins::Step;
use self::tables::{Local, Tables};
use super::client::{Client, ConnectArgs, PutOptions, batch_bytes, command_descriptor, table_descriptor};
use super::files::{Complete, Target};
use super::interrupt::unless_interrupted;
use super::output::{self, Align, Style};
use super::progress::Progress;
use super::{get, jobs, rows, settings};
use crate::memory::{human_bytes, process_memory_limit};
use crate::planner::Strategy;
use crate::service::Server;
use crate::service::settings::Settings;
use crate::{Context, Error, Result};

/// Width of text beside a label, for terminals of 100 columns.
const TEXT_WIDTH: usize = 88;

/// Arguments of `dovetail demo`.
#[derive(Debug, clap::Args)]
pub struct DemoArgs {
    /// Scale factor of TPC-H: at 1 there are 6,000,000 lines, and the tables take about 2 GB
    #[arg(long, default_value_t = 0.1, value_parser = parse_scale)]
    scale: f64,

    /// Streams that each table is uploaded in
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=64))]
    streams: u16,

    /// Devices of the server, as in `dovetail serve`
    #[arg(long, default_value = "auto")]
    devices: String,

    /// How joins are done, in place of the planner's choice: a strategy as in `dovetail join`
    #[arg(long, default_value = "auto", value_parser = strategies())]
    strategy: String,

    /// Rows shown of each result
    #[arg(long, default_value_t = 5, value_name = "ROWS")]
    sample: usize,

    /// Write the tables into this folder too, as Parquet files to try other commands with; it is made where there is none, and
    /// no file in it is replaced
    #[arg(long, value_name = "FOLDER")]
    save: Option<PathBuf>,

    /// Leave the server running at the end, with all tables, until it is interrupted
    #[arg(long)]
    keep: bool,
}

/// Those that the server knows, which is of this binary.
fn strategies() -> PossibleValuesParser {
    PossibleValuesParser::new(["auto"].into_iter().chain(Strategy::ALL.map(Strategy::name)))
}

fn parse_scale(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(scale) if (0.001..=1000.0).contains(&scale) => Ok(scale),
        _ => Err("write a number from 0.001 to 1000".into()),
    }
}

/// Shows everything.
///
/// # Errors
/// Whatever fails on the way; [`Error::Internal`] when a join has not the rows that it must have.
pub async fn run(args: DemoArgs) -> Result<()> {
    unless_interrupted(show(&args)).await
}

async fn show(args: &DemoArgs) -> Result<()> {
    let start = Instant::now();
    if let Some(folder) = &args.save {
        // Before the work, which may take minutes.
        let made = std::fs::create_dir_all(folder).map_err(|error| Error::Invalid(error.to_string()));
        made.context(|| format!("making the folder {}", folder.display()))?;
        check_free(folder)?;
    }
    let settings = server_settings(args)?;
    // Before the work, too: opening the devices tells whether there are such.
    Server::check(&settings)?;
    check_memory(args.scale, process_memory_limit()?)?;
    let tables = generate(args.scale).await?;
    if let Some(folder) = &args.save {
        save(&tables, folder).await?;
    }
    let starting = Progress::share("starting a server, which measures the device once");
    let server = Server::start_telling(&settings, &|share| starting.set_share(share)).await?;
    starting.finish();
    let address = format!("http://{}", server.flight_address());
    let client = Client::connect(&ConnectArgs::to(address.clone())).await?;
    remark_server(&client, &address).await?;
    upload(&client, &tables, args).await?;

    let steps = joins::steps();
    let mut right = 0;
    let mut table_rows: HashMap<String, u64> =
        tables.iter().map(|table| (table.name.to_owned(), table.rows())).collect();
    for (at, step) in steps.iter().enumerate() {
        let join = &step.command["join"];
        let rows_of = |side: &str| join[side].as_str().and_then(|table| table_rows.get(table)).copied().unwrap_or(0);
        let rows_in = rows_of("left") + rows_of("right");
        let outcome = run_step(&client, step, rows_in, args).await.context(|| step.title.to_owned())?;
        if let Some(into) = join["into"].as_str() {
            table_rows.insert(into.to_owned(), outcome.rows);
        }
        let what = format!("counting independently: {}", step.title);
        let counting = Progress::transfer(&what, Some(count::bytes(&tables, step.counted)));
        let expected = (step.expected)(&Counted::new(&tables, &counting));
        counting.finish();
        report(at + 1, step, &outcome, expected)?;
        right += usize::from(outcome.rows == expected);
    }
    conclude(right, steps.len(), start.elapsed().as_secs_f64(), args)?;
    if args.keep {
        people(&format!(
            "
The server stays until it is interrupted. In another terminal:
  export DOVETAIL_SERVER={address}
  dovetail tables
  dovetail explain orders lineitem --on o_orderkey=l_orderkey
  dovetail join orders lineitem --on o_orderkey=l_orderkey -o joined.parquet"
        ));
        std::future::pending::<()>().await;
    }
    drop(server);
    Ok(())
}

async fn generate(scale: f64) -> Result<Tables> {
    let start = Instant::now();
    let what = format!("generating TPC-H at scale factor {scale}");
    let progress = Progress::of(&what, Some(tables::rows_to_generate(scale)));
    let tables = tokio::task::spawn_blocking(move || Tables::generate(scale, &progress)).await;
    let tables = tables.map_err(|error| Error::Internal(format!("the generator: {error}")))??;
    let rows: u64 = tables.iter().map(Local::rows).sum();
    heading(&format!(
        "Generated TPC-H at scale factor {scale}: {} rows in {}",
        output::count(rows),
        output::seconds(start.elapsed().as_secs_f64())
    ));
    Ok(tables)
}

/// The file of a table that is saved.
fn file_of(folder: &Path, table: &str) -> PathBuf {
    folder.join(format!("{table}.parquet"))
}

/// Refuses a folder that has a file of a name that a table would be saved under.
fn check_free(folder: &Path) -> Result<()> {
    let mut files = tables::TPCH.iter().map(|table| file_of(folder, table));
    // A link to nowhere is there, too.
    match files.find(|file| file.symlink_metadata().is_ok()) {
        None => Ok(()),
        Some(file) => Err(Error::AlreadyExists(format!(
            "{} exists already, and the demo replaces no files; move it away, or name another folder with --save",
            file.display()
        ))),
    }
}

/// Writes the tables of TPC-H, whose names are free. Their files appear together at the end: a demo that fails or is interrupted
/// before leaves none of them in the way of the next.
async fn save(tables: &Tables, folder: &Path) -> Result<()> {
    let tables: Vec<&Local> = tables.iter().filter(|table| table.is_of_tpch()).collect();
    let rows = tables.iter().map(|table| table.rows()).sum();
    let progress = Progress::of(&format!("writing files into {}", folder.display()), Some(rows));
    let (mut names, mut files) = (Vec::with_capacity(tables.len()), Vec::with_capacity(tables.len()));
    for table in tables {
        let path = file_of(folder, table.name);
        let mut file = Target::create(&path, None)?.start(&table.schema)?;
        for batch in &table.batches {
            file.write(batch.clone()).await?;
            progress.advance(batch.num_rows() as u64);
            progress.moved(batch_bytes(batch));
        }
        files.push(file.complete().await?);
        names.extend(path.file_name().map(|name| name.to_string_lossy().into_owned()));
    }
    // That took a while, in which others may have put files there.
    check_free(folder)?;
    files.into_iter().try_for_each(Complete::appear)?;
    progress.finish();
    if output::is_json() {
        output::json(&json!({ "event": "save", "folder": folder.display().to_string(), "files": names }));
    }
    people(&format!("Wrote {} into {}", names.join(", "), folder.display()));
    Ok(())
}

/// Refuses tables that would not fit: a process that takes more than its limit is ended, or makes the system end others.
fn check_memory(scale: f64, limit: u64) -> Result<()> {
    /// At the most 2.4 GB were taken at scale 0.2, and 8.1 at 0.8: tables in the client and in the server, results, and what counts rows.
    const FIXED_BYTES: f64 = 0.5e9;
    const SCALE_BYTES: f64 = 9.5e9;
    let (bytes, limit_bytes) = (FIXED_BYTES + scale * SCALE_BYTES, limit as f64);
    if bytes <= limit_bytes {
        return Ok(());
    }
    let largest = ((limit_bytes - FIXED_BYTES) / SCALE_BYTES).max(0.001);
    let per_unit = if largest < 1.0 { 1000.0 } else { 10.0 };
    let largest = (per_unit * largest).floor() / per_unit;
    Err(Error::Invalid(format!(
        "--scale {scale}: the demo takes about {} for its tables, in the client and in the server, and results, and this process may \
         use {}; write {largest} or less",
        human_bytes(bytes as u64),
        human_bytes(limit)
    )))
}

fn server_settings(args: &DemoArgs) -> Result<Settings> {
    let mut settings = settings::defaults()?;
    settings.listen = std::net::SocketAddr::from(([127, 0, 0, 1], 0));
    settings.admin_listen = "off".into();
    settings.devices = args.devices.clone();
    Ok(settings)
}

async fn remark_server(client: &Client, address: &str) -> Result<()> {
    let mut answers = client.action("server_info", &Value::Null).await?;
    let info = answers.pop().unwrap_or(Value::Null);
    let devices = info["devices"].as_array().map(Vec::as_slice).unwrap_or_default();
    let device = |device: &Value| {
        let name = device["device"].as_str().or(device.as_str()).unwrap_or("?");
        let memory = device["memory_bytes"].as_u64().map(|bytes| format!(" ({})", human_bytes(bytes)));
        format!("{name}{}", memory.unwrap_or_default())
    };
    let devices = devices.iter().map(device).collect::<Vec<_>>().join(", ");
    heading(&format!("Server at {address}, devices: {devices}"));
    Ok(())
}

async fn upload(client: &Client, tables: &Tables, args: &DemoArgs) -> Result<()> {
    let start = Instant::now();
    let options = PutOptions { streams: args.streams.into(), ..PutOptions::default() };
    let mut lines = Vec::new();
    let mut total = 0;
    for table in tables.iter() {
        let started = Instant::now();
        let progress = Progress::of(&format!("uploading {}", table.name), Some(table.rows()));
        let (reading, sending) = (progress.clone(), progress.clone());
        let batches = futures::stream::iter(table.batches.clone()).map(move |batch| {
            reading.advance(batch.num_rows() as u64);
            Ok(batch)
        });
        let (schema, moved) = (table.schema.clone(), move |bytes| sending.moved(bytes));
        let put = client.put(table.name, &options, schema, batches.boxed(), moved, std::future::pending());
        let uploaded = put.await?;
        progress.finish();
        let seconds = started.elapsed().as_secs_f64();
        total += uploaded.bytes;
        if output::is_json() {
            output::json(&json!({ "event": "upload", "table": table.name, "rows": uploaded.rows,
                                  "bytes": uploaded.bytes, "seconds": seconds }));
        }
        lines.push(vec![
            table.name.to_owned(),
            output::count(uploaded.rows),
            human_bytes(uploaded.bytes),
            output::seconds(seconds),
            format!("{}/s", human_bytes((uploaded.bytes as f64 / seconds) as u64)),
        ]);
    }
    heading(&format!(
        "Uploaded {} tables through Flight: {} in {}",
        lines.len(),
        human_bytes(total),
        output::seconds(start.elapsed().as_secs_f64())
    ));
    let columns = ["table", "rows", "size", "time", "rate"];
    let align = |at| if at == 0 { Align::Left } else { Align::Right };
    let columns: Vec<_> = columns.into_iter().enumerate().map(|(at, name)| (name, align(at))).collect();
    people(&indented(&output::table(&columns, &lines)));
    Ok(())
}

/// What a join did.
struct Outcome {
    /// Rows of both sides.
    rows_in: u64,
    /// Rows that came back, or that are in the table it was kept as.
    rows: u64,
    /// Bytes of them.
    bytes: u64,
    /// The first of them.
    sample: Vec<RecordBatch>,
    schema: arrow::datatypes::SchemaRef,
    /// What the server tells of the job.
    job: Value,
    /// What it tells of the plan, and how it went.
    plan: Value,
    /// From the request to the last row.
    seconds: f64,
}

async fn run_step(client: &Client, step: &Step, rows_in: u64, args: &DemoArgs) -> Result<Outcome> {
    let mut command = step.command.clone();
    command["join"]["strategy"] = args.strategy.clone().into();
    let start = Instant::now();
    let info = client.info(command_descriptor(&command)).await?;
    let job = jobs::id_of(&info)?;
    let mut info = info;
    if let Some(into) = command["join"]["into"].as_str() {
        // The table is there when the job is complete.
        jobs::wait(client, job, step.title).await?;
        info = client.info(table_descriptor(into)).await?;
    }
    let mut batches = client.fetch(&info)?;
    let schema = batches.schema();
    let progress = get::progress_of(step.title, &info);
    let taken = async {
        let (mut rows, mut sample) = (0, Vec::new());
        while let Some(batch) = batches.next().await {
            let batch = batch?;
            if rows < args.sample as u64 {
                sample.push(batch.slice(0, batch.num_rows().min(args.sample - rows as usize)));
            }
            rows += batch.num_rows() as u64;
            progress.moved(batch_bytes(&batch));
        }
        Ok::<_, Error>((rows, sample))
    };
    let (rows, sample) = tokio::select! {
        taken = taken => taken?,
        never = get::follow(client, step.title, &info, &progress) => match never {},
    };
    progress.finish();
    let (bytes, seconds) = (progress.moved_bytes(), start.elapsed().as_secs_f64());
    let plan = client.action("explain", &json!({ "job": job })).await?.pop().unwrap_or(Value::Null);
    let job = jobs::status(client, job).await?;
    Ok(Outcome { rows_in, rows, bytes, sample, schema, job, plan, seconds })
}

fn report(number: usize, step: &Step, outcome: &Outcome, expected: u64) -> Result<()> {
    let (rows, right) = (outcome.rows, outcome.rows == expected);
    if output::is_json() {
        output::json(&json!({
            "event": "join", "title": step.title, "command": step.command, "rows": rows, "expected": expected,
            "ok": right, "rows_in": outcome.rows_in, "bytes": outcome.bytes, "seconds": outcome.seconds,
            "job": outcome.job, "plan": outcome.plan,
        }));
        return Ok(());
    }
    heading(&format!("{number}  {}", step.title));
    people(&indented(&output::styled(step.why, Style::Dim)));
    let verdict = match right {
        true => output::styled(&format!("= independent count {}", output::count(expected)), Style::Good),
        false => output::styled(&format!("WRONG: the independent count is {}", output::count(expected)), Style::Error),
    };
    labelled("join", &in_words(&step.command["join"]));
    labelled("plan", &plan_of(&outcome.job, &outcome.plan));
    labelled("rows", &format!("{}  {verdict}", output::count(rows)));
    labelled("time", &time_of(outcome));
    people(&indented(&rows::render(&outcome.schema, &outcome.sample)?));
    Ok(())
}

/// `customer left_anti orders on c_custkey = o_custkey`.
fn in_words(join: &Value) -> String {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let pair = |pair: &Value| format!("{} = {}", text(&pair["left"]), text(&pair["right"]));
    let on: Vec<String> = join["on"].as_array().map(|pairs| pairs.iter().map(pair).collect()).unwrap_or_default();
    let how = join["how"].as_str().map_or_else(|| "⋈".into(), |how| format!("({how})"));
    let into = join["into"].as_str().map(|into| format!(" -> {into}")).unwrap_or_default();
    format!("{} {how} {} on {}{into}", text(&join["left"]), text(&join["right"]), on.join(", "))
}

/// The strategy and why, the steps as a tree, and the phases with their times.
fn plan_of(job: &Value, plan: &Value) -> String {
    let text = |value: &Value| value.as_str().map(str::to_owned);
    let mut lines = Vec::new();
    let strategy = text(&job["strategy"]).unwrap_or_else(|| "?".into());
    let on = text(&plan["device"]["name"]).or_else(|| text(&job["device"])).map(|device| format!(" on {device}"));
    let why = text(&plan["reason"]).map(|reason| format!(": {reason}"));
    lines.push(format!("{strategy}{}{}", on.unwrap_or_default(), why.unwrap_or_default()));
    match plan["tree"].as_array() {
        Some(tree) => lines.extend(tree.iter().filter_map(text)),
        None => lines.extend(text(&job["build_side"]).map(|side| format!("built on the {side} side"))),
    }
    let phase = |phase: &Value| {
        let seconds = output::seconds(phase["seconds"].as_f64().unwrap_or(0.0));
        format!("{} {seconds}", phase["name"].as_str().unwrap_or("?"))
    };
    let phases: Vec<String> =
        job["phases"].as_array().map(|phases| phases.iter().map(phase).collect()).unwrap_or_default();
    if !phases.is_empty() {
        lines.push(phases.join(", "));
    }
    lines.join("\n")
}

/// Rates count the rows that go in and those that come out: an anti join may give hardly any, and a join of many to many
/// takes its time for what it gives.
fn time_of(outcome: &Outcome) -> String {
    let phases = outcome.job["phases"].as_array().map(Vec::as_slice).unwrap_or_default();
    let engine: f64 = phases.iter().filter_map(|phase| phase["seconds"].as_f64()).sum();
    let mut lines = Vec::new();
    if engine > 0.0 {
        let rate = output::short((outcome.rows_in + outcome.rows) as f64 / engine);
        let (rows_in, rows_out) = (output::count(outcome.rows_in), output::count(outcome.rows));
        lines.push(format!("{rows_in} rows in, {rows_out} out, in {}: {rate} rows/s", output::seconds(engine)));
    }
    lines.push(format!(
        "with submitting and fetching {} in {}: {}/s",
        human_bytes(outcome.bytes),
        output::seconds(outcome.seconds),
        human_bytes((outcome.bytes as f64 / outcome.seconds) as u64)
    ));
    lines.join("\n")
}

fn conclude(right: usize, steps: usize, seconds: f64, args: &DemoArgs) -> Result<()> {
    if output::is_json() {
        output::json(&json!({ "event": "done", "joins": steps, "right": right, "seconds": seconds }));
    }
    if right < steps {
        return Err(Error::Internal(format!("{} of {steps} joins have a wrong number of rows", steps - right)));
    }
    heading(&format!("All {steps} joins have the rows they must have; the demo took {}", output::seconds(seconds)));
    if !args.keep {
        people(
            "
What to try next
  dovetail demo --keep                       the same; the server stays, to look around in
  dovetail demo --save .                     its tables as files: orders.parquet, lineitem.parquet, ...
  dovetail serve                             a server of your own; then, in another terminal:
  dovetail put orders.parquet lineitem.parquet
                                             the tables of these files
  dovetail join orders lineitem --on o_orderkey=l_orderkey -o joined.parquet
  dovetail explain orders lineitem --on o_orderkey=l_orderkey
                                             why this plan, and what the others would have taken",
        );
    }
    Ok(())
}

fn heading(text: &str) {
    people(&format!("\n{}", output::styled(text, Style::Heading)));
}

/// Text for people; machines get events.
fn people(text: &str) {
    if !output::is_json() {
        output::line(text);
    }
}

/// A word in the margin, and what it says beside it.
fn labelled(label: &str, text: &str) {
    let wrapped = text.lines().map(|line| rows::wrap(line, TEXT_WIDTH)).collect::<Vec<_>>().join("\n");
    for (at, line) in wrapped.lines().enumerate() {
        let label = if at == 0 { label } else { "" };
        people(&format!("   {label:6}  {line}"));
    }
}

fn indented(text: &str) -> String {
    text.lines().map(|line| format!("   {line}")).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::check_memory;

    #[test]
    fn a_scale_that_does_not_fit_is_refused_with_one_that_does() {
        assert!(check_memory(0.1, 2 << 30).is_ok());
        let told = check_memory(20.0, 24 << 30).unwrap_err().to_string();
        assert!(told.starts_with("--scale 20: the demo takes about 177.4 GiB"), "{told}");
        assert!(told.ends_with("may use 24.0 GiB; write 2.6 or less"), "{told}");
        assert!(check_memory(2.6, 24 << 30).is_ok());
        let told = check_memory(0.1, 1 << 30).unwrap_err().to_string();
        assert!(told.ends_with("write 0.06 or less"), "{told}");
        assert!(check_memory(0.06, 1 << 30).is_ok());
    }
}
