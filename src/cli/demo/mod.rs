//! `dovetail demo`: the main job on generated data, in one command.
//!
//! ```text
//!   tpchgen ─► tables on the client ─┬─► put (DoPut) ─► server in this process ─► join ─► rows
//!                                    └─► counted with plain hash maps ─── must be equal ─────┘
//! ```
//!
//! The client half talks to the server half through a loopback socket, as any client would.

mod count;
mod joins;
mod tables;

use std::path::{Path, PathBuf};
use std::time::Instant;

use arrow::array::RecordBatch;
use arrow::datatypes::SchemaRef;
use clap::builder::PossibleValuesParser;
use futures::StreamExt;
use serde_json::{Value, json};

use self::joins::{STEPS, Step};
use self::tables::{Local, TPCH, Tables};
use super::client::{Client, ConnectArgs, PutOptions, batch_bytes, command_descriptor, table_descriptor};
use super::files::{Complete, Target};
use super::interrupt::unless_interrupted;
use super::output::{self, Style};
use super::progress::Progress;
use super::{get, jobs, join, rows, settings};
use crate::memory::{human_bytes, process_memory_limit};
use crate::planner::Strategy;
use crate::service::Server;
use crate::service::settings::Settings;
use crate::{Context, Error, Result};

/// Width of the text next to a label, for terminals of 100 columns.
const TEXT_WIDTH: usize = 88;

/// Arguments of `dovetail demo`.
#[derive(Debug, clap::Args)]
pub struct DemoArgs {
    /// Scale factor of TPC-H, 0.001 to 1000. At 1, lineitem has 6,000,000 rows, and the tables take
    /// about 2 GB
    #[arg(long, default_value_t = 0.1, value_parser = parse_scale)]
    scale: f64,

    /// Parallel streams per table for the upload
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=64))]
    streams: u16,

    /// Devices of the server, as in `dovetail serve`. One of the joins runs on all of them together
    #[arg(long, default_value = "auto")]
    devices: String,

    /// Strategy of all joins, as in `dovetail join`. auto is the choice of the planner
    #[arg(long, default_value = "auto", value_parser = strategies())]
    strategy: String,

    /// Rows of each result to show
    #[arg(long, default_value_t = 5, value_name = "ROWS")]
    sample: usize,

    /// Folder to save the tables in, as Parquet files for other commands. The demo creates a
    /// missing folder, and replaces no files
    #[arg(long, value_name = "FOLDER")]
    save: Option<PathBuf>,

    /// Keep the server running at the end, with all tables, until an interrupt
    #[arg(long)]
    keep: bool,
}

/// Parses the strategies that the server knows. Server and client are this binary.
fn strategies() -> PossibleValuesParser {
    PossibleValuesParser::new(["auto"].into_iter().chain(Strategy::ALL.map(Strategy::name)))
}

fn parse_scale(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(scale) if (0.001..=1000.0).contains(&scale) => Ok(scale),
        _ => Err("write a number from 0.001 to 1000".into()),
    }
}

/// Runs the demo.
///
/// # Errors
/// Any error of a step; [`Error::Internal`] if a join has the wrong number of rows.
pub async fn run(args: DemoArgs) -> Result<()> {
    unless_interrupted(show(&args)).await
}

async fn show(args: &DemoArgs) -> Result<()> {
    let start = Instant::now();
    // Check the folder before the work, which may take minutes.
    if let Some(folder) = &args.save {
        let made = std::fs::create_dir_all(folder).map_err(|error| Error::Invalid(error.to_string()));
        made.context(|| format!("creating the folder {}", folder.display()))?;
        check_free(folder)?;
    }
    let settings = server_settings(args)?;
    Server::check(&settings)?;
    check_memory(args.scale, process_memory_limit()?)?;
    let tables = generate(args.scale).await?;
    if let Some(folder) = &args.save {
        save(&tables, folder).await?;
    }
    let starting = Progress::share("starting a server and measuring the device");
    let server = Server::start_telling(&settings, &|share| starting.set_share(share)).await?;
    starting.finish();
    let address = format!("http://{}", server.flight_address());
    let client = Client::connect(&ConnectArgs::to(address.clone())).await?;
    remark_server(&client, &address).await?;
    upload(&client, &tables, args.streams).await?;
    let mut right = 0;
    for (at, step) in STEPS.iter().enumerate() {
        right += usize::from(show_step(&client, &tables, at + 1, step, args).await.context(|| step.title)?);
    }
    conclude(right, STEPS.len(), start.elapsed().as_secs_f64(), args.keep)?;
    if args.keep {
        people(&format!(
            "
The server runs until it is interrupted. In another terminal:
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
    let rows = output::count(tables.uploads().map(Local::rows).sum());
    let seconds = output::seconds(start.elapsed().as_secs_f64());
    heading(&format!("Generated TPC-H at scale factor {scale}: {rows} rows in {seconds}"));
    Ok(tables)
}

/// Returns the file that a table is saved in.
fn file_of(folder: &Path, table: &str) -> PathBuf {
    folder.join(format!("{table}.parquet"))
}

/// Refuses a folder that already contains a file with the name of a saved table.
fn check_free(folder: &Path) -> Result<()> {
    let mut files = TPCH.iter().map(|table| file_of(folder, table));
    // A dangling link counts as a file, too.
    match files.find(|file| file.symlink_metadata().is_ok()) {
        None => Ok(()),
        Some(file) => Err(Error::AlreadyExists(format!(
            "{} already exists, and the demo replaces no files; move the file, or name another folder with --save",
            file.display()
        ))),
    }
}

/// Writes the TPC-H tables into files whose names are free. All files appear together at the end. A
/// demo that fails or is interrupted earlier leaves no files that would block the next demo.
async fn save(tables: &Tables, folder: &Path) -> Result<()> {
    let rows = TPCH.iter().map(|name| tables.get(name).rows()).sum();
    let progress = Progress::of(&format!("writing files into {}", folder.display()), Some(rows));
    let mut files = Vec::new();
    for table in TPCH.map(|name| tables.get(name)) {
        let mut file = Target::create(&file_of(folder, table.name), None)?.start(&table.schema)?;
        for batch in &table.batches {
            file.write(batch.clone()).await?;
            progress.advance(batch.num_rows() as u64);
            progress.moved(batch_bytes(batch));
        }
        files.push(file.complete().await?);
    }
    // Check again: other processes may have created files during the writing.
    check_free(folder)?;
    files.into_iter().try_for_each(Complete::appear)?;
    progress.finish();
    let (names, folder) = (TPCH.map(|name| format!("{name}.parquet")), folder.display().to_string());
    event(json!({ "event": "save", "folder": folder, "files": names }));
    people(&format!("Wrote {} into {folder}", names.join(", ")));
    Ok(())
}

/// Refuses tables that would not fit into memory. A process over its limit is killed, or makes the
/// system kill others.
fn check_memory(scale: f64, limit: u64) -> Result<()> {
    /// Measured at most 2.4 GB at scale 0.2 and 8.1 GB at 0.8: tables in the client and in the
    /// server, results, and the hash maps that count rows.
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
        "--scale {scale}: the demo needs about {} for its tables and results in client and server, and this process \
         may use {}; write {largest} or less",
        human_bytes(bytes as u64),
        human_bytes(limit)
    )))
}

fn server_settings(args: &DemoArgs) -> Result<Settings> {
    let mut settings = settings::defaults()?;
    settings.listen = std::net::SocketAddr::from(([127, 0, 0, 1], 0));
    settings.admin_listen = "off".into();
    settings.devices = args.devices.clone();
    // The machine may be a laptop, which needs its memory for other work.
    settings.prefault = "none".into();
    Ok(settings)
}

async fn remark_server(client: &Client, address: &str) -> Result<()> {
    let info = client.action("server_info", &Value::Null).await?.pop().unwrap_or_default();
    let device = |device: &Value| {
        let memory = human_bytes(device["memory_bytes"].as_u64().unwrap_or(0));
        format!("{} ({memory})", device["device"].as_str().unwrap_or("?"))
    };
    let devices: Vec<String> = info["devices"].as_array().into_iter().flatten().map(device).collect();
    heading(&format!("Server at {address}, devices: {}", devices.join(", ")));
    Ok(())
}

async fn upload(client: &Client, tables: &Tables, streams: u16) -> Result<()> {
    let options = PutOptions { streams: streams.into(), ..PutOptions::default() };
    heading(&format!("Uploading {} tables through Flight", tables.uploads().count()));
    for table in tables.uploads() {
        let start = Instant::now();
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
        let seconds = start.elapsed().as_secs_f64();
        event(json!({ "event": "upload", "table": table.name, "rows": uploaded.rows,
                      "bytes": uploaded.bytes, "seconds": seconds }));
        people(&indented(&output::transfer(table.name, uploaded.rows, uploaded.bytes, "sent in", seconds)));
    }
    Ok(())
}

/// Runs a join, counts its rows independently, and prints both counts. Returns true if they agree.
async fn show_step(client: &Client, tables: &Tables, number: usize, step: &Step, args: &DemoArgs) -> Result<bool> {
    let command = join::command_of(step.words)?;
    let join = &command["join"];
    let done = run_step(client, step.title, join.clone(), args).await?;
    let counting = format!("counting independently: {}", step.title);
    let counting = Progress::transfer(&counting, Some(count::bytes(join, tables)));
    let expected = count::rows(join, tables, &counting)?;
    counting.finish();
    let is_right = done.rows == expected;
    let rows_of = |side: &str| join[side].as_str().map_or(0, |table| tables.get(table).rows());
    let rows_in = rows_of("left") + rows_of("right");
    event(json!({
        "event": "join", "title": step.title, "command": command, "rows": done.rows, "expected": expected,
        "ok": is_right, "rows_in": rows_in, "bytes": done.bytes, "seconds": done.seconds,
        "job": done.job, "plan": done.plan,
    }));
    let count = output::count(expected);
    let verdict = match is_right {
        true => output::styled(&format!("= independent count {count}"), Style::Good),
        false => output::styled(&format!("WRONG: the independent count is {count}"), Style::Error),
    };
    heading(&format!("{number}  {}", step.title));
    people(&indented(&output::styled(step.why, Style::Dim)));
    labelled("join", &format!("dovetail join {}", step.words));
    labelled("plan", &plan_of(&done));
    labelled("rows", &format!("{}  {verdict}", output::count(done.rows)));
    labelled("time", &time_of(&done, rows_in));
    people(&indented(&rows::render(&done.schema, &done.sample)));
    Ok(is_right)
}

/// Outcome of a join.
struct Done {
    /// Rows received, or rows of the table that keeps the result.
    rows: u64,
    bytes: u64,
    sample: Vec<RecordBatch>,
    schema: SchemaRef,
    /// Job as the server describes it.
    job: Value,
    /// Plan as the server describes it, with measured times.
    plan: Value,
    /// Time from the request to the last row.
    seconds: f64,
}

async fn run_step(client: &Client, title: &str, mut join: Value, args: &DemoArgs) -> Result<Done> {
    let start = Instant::now();
    join["strategy"] = args.strategy.clone().into();
    let mut info = client.info(command_descriptor(&json!({ "join": join }))).await?;
    let job = jobs::id_of(&info)?;
    if let Some(into) = join["into"].as_str() {
        // The table exists once the job is complete.
        jobs::wait(client, job, title).await?;
        info = client.info(table_descriptor(into)).await?;
    }
    let mut batches = client.fetch(&info)?;
    let schema = batches.schema();
    let progress = get::progress_of(title, &info);
    let (mut rows, mut sample) = (0, Vec::new());
    let taken = async {
        while let Some(batch) = batches.next().await {
            let batch = batch?;
            let wanted = args.sample.saturating_sub(rows).min(batch.num_rows());
            sample.extend((wanted > 0).then(|| batch.slice(0, wanted)));
            rows += batch.num_rows();
            progress.moved(batch_bytes(&batch));
        }
        Ok::<_, Error>(())
    };
    tokio::select! {
        taken = taken => taken?,
        never = get::follow(client, title, &info, &progress) => match never {},
    }
    progress.finish();
    let seconds = start.elapsed().as_secs_f64();
    let plan = client.action("explain", &json!({ "job": job })).await?.pop().unwrap_or_default();
    let job = jobs::status(client, job).await?;
    Ok(Done { rows: rows as u64, bytes: progress.moved_bytes(), sample, schema, job, plan, seconds })
}

/// Renders the strategy with its reason and the tree of steps, in the server's words, and the
/// phases with their times. The reason has the predicted time, so the end explains a measured time
/// that is far from the prediction.
fn plan_of(done: &Done) -> String {
    let chosen = done.plan["text"].as_str().and_then(|text| text.split("\n\nresult:").next()).unwrap_or("?");
    let phases = phases(&done.job).map(|(name, seconds)| format!("{name} {}", output::seconds(seconds)));
    let deviation = done.plan["deviation"].as_str().map(|text| format!("\n{text}")).unwrap_or_default();
    format!("{}\n{}{deviation}", chosen.replace("\n\n", "\n"), phases.collect::<Vec<_>>().join(", "))
}

fn phases(job: &Value) -> impl Iterator<Item = (&str, f64)> {
    let phases = job["phases"].as_array().into_iter().flatten();
    phases.filter_map(|phase| Some((phase["name"].as_str()?, phase["seconds"].as_f64()?)))
}

/// Renders the time and the rate. The rate counts input and output rows: an anti join may output
/// hardly any rows, and a many-to-many join spends its time on output.
fn time_of(done: &Done, rows_in: u64) -> String {
    let engine = done.job["run_seconds"].as_f64().unwrap_or(0.0);
    format!(
        "{} rows in, {} out, in {}: {} rows/s\nwith submitting and fetching {} in {}: {}/s",
        output::count(rows_in),
        output::count(done.rows),
        output::seconds(engine),
        output::short((rows_in + done.rows) as f64 / engine.max(1e-9)),
        human_bytes(done.bytes),
        output::seconds(done.seconds),
        human_bytes((done.bytes as f64 / done.seconds) as u64)
    )
}

fn conclude(right: usize, steps: usize, seconds: f64, keep: bool) -> Result<()> {
    event(json!({ "event": "done", "joins": steps, "right": right, "seconds": seconds }));
    if right < steps {
        return Err(Error::Internal(format!("{} of {steps} joins have the wrong number of rows", steps - right)));
    }
    heading(&format!("All {steps} joins have the expected number of rows; the demo took {}", output::seconds(seconds)));
    if !keep {
        people(
            "
What to try next
  dovetail demo --keep                       the same, and the server keeps running
  dovetail demo --devices host:2             the same on two devices, one join on both together
  dovetail demo --save .                     its tables as files: orders.parquet, lineitem.parquet, ...
  dovetail serve                             your own server; then, in another terminal:
  dovetail put orders.parquet lineitem.parquet
                                             uploads these files as tables
  dovetail join orders lineitem --on o_orderkey=l_orderkey -o joined.parquet
  dovetail explain orders lineitem --on o_orderkey=l_orderkey
                                             the reasons for this plan, and the predictions for others",
        );
    }
    Ok(())
}

fn heading(text: &str) {
    people(&format!("\n{}", output::styled(text, Style::Heading)));
}

/// Prints text for people; with `--json` the demo prints events instead.
fn people(text: &str) {
    if !output::is_json() {
        output::line(text);
    }
}

fn event(value: Value) {
    if output::is_json() {
        output::json(&value);
    }
}

/// Prints a label in the margin with its text next to it.
fn labelled(label: &str, text: &str) {
    let lines = text.lines().map(|line| rows::wrap(line, TEXT_WIDTH)).collect::<Vec<_>>().join("\n");
    for (at, line) in lines.lines().enumerate() {
        people(&format!("   {:6}  {line}", if at == 0 { label } else { "" }));
    }
}

fn indented(text: &str) -> String {
    text.lines().map(|line| format!("   {line}")).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::check_memory;

    #[test]
    fn a_scale_that_does_not_fit_is_refused_with_a_scale_that_fits() {
        assert!(check_memory(0.1, 2 << 30).is_ok());
        let told = check_memory(20.0, 24 << 30).unwrap_err().to_string();
        assert!(told.starts_with("--scale 20: the demo needs about 177.4 GiB"), "{told}");
        assert!(told.ends_with("may use 24.0 GiB; write 2.6 or less"), "{told}");
        assert!(check_memory(2.6, 24 << 30).is_ok());
        let told = check_memory(0.1, 1 << 30).unwrap_err().to_string();
        assert!(told.ends_with("write 0.06 or less"), "{told}");
        assert!(check_memory(0.06, 1 << 30).is_ok());
    }
}
