//! `dovetail get`: a table or a result goes into a file, or onto the terminal.

use std::path::{Path, PathBuf};
use std::time::Instant;

use arrow::array::RecordBatch;
use arrow_flight::FlightInfo;
use futures::StreamExt;
use serde_json::json;

use super::client::{BatchStream, Client, ConnectArgs, batch_bytes, table_descriptor};
use super::files::{Format, Sink};
use super::progress::Progress;
use super::{jobs, output, rows};
use crate::memory::human_bytes;
use crate::{Error, Result};

/// Arguments of `dovetail get`.
#[derive(Debug, clap::Args)]
pub struct GetArgs {
    /// Name of the table
    #[arg(required_unless_present = "job", conflicts_with = "job")]
    table: Option<String>,

    /// Number of the job whose result to fetch
    #[arg(long, value_name = "ID")]
    job: Option<u64>,

    #[command(flatten)]
    to: OutputArgs,

    #[command(flatten)]
    connect: ConnectArgs,
}

/// Where rows go; shared by `get` and `join`.
#[derive(Clone, Debug, clap::Args)]
#[command(next_help_heading = "Output")]
pub struct OutputArgs {
    /// File to write: .parquet, .arrow, .arrows (stream) or .csv
    #[arg(long, short, value_name = "FILE")]
    pub output: Option<PathBuf>,

    /// Format of the file, where its name does not tell
    #[arg(long, value_enum, requires = "output")]
    pub format: Option<Format>,

    /// Rows to print when there is no file; all of them with 0
    #[arg(long, default_value_t = 20, value_name = "ROWS")]
    pub limit: usize,
}

/// What was received.
#[derive(Clone, Copy, Debug, Default)]
pub struct Received {
    /// Rows.
    pub rows: u64,
    /// Bytes of Arrow buffers.
    pub bytes: u64,
    /// From the first request to the last row.
    pub seconds: f64,
}

/// Fetches.
///
/// # Errors
/// The server's, and those of the file.
pub async fn run(args: GetArgs) -> Result<()> {
    if let Some(path) = &args.to.output {
        check_format(path, args.to.format)?;
    }
    let client = Client::connect(&args.connect).await?;
    let (what, info) = match (&args.table, &args.job) {
        (Some(table), _) => (table.clone(), client.info(table_descriptor(table)).await?),
        (None, Some(job)) => (format!("job {job}"), jobs::find(&client, *job).await?),
        (None, None) => return Err(Error::Invalid("name a table, or a job with --job".into())),
    };
    receive(&client, &what, &info, &args.to, Instant::now()).await?;
    Ok(())
}

/// A file whose name says no format is refused before a job is started for it.
pub fn check_format(path: &Path, format: Option<Format>) -> Result<()> {
    format.map_or_else(|| Format::of_name(path).map(drop), |_| Ok(()))
}

/// Takes all rows of a flight to where they should go, and reports.
///
/// # Errors
/// The server's, and those of the file.
pub async fn receive(
    client: &Client,
    what: &str,
    info: &FlightInfo,
    to: &OutputArgs,
    start: Instant,
) -> Result<Received> {
    let batches = client.fetch(info)?;
    match &to.output {
        Some(path) => {
            let total = u64::try_from(info.total_bytes).ok().filter(|bytes| *bytes > 0);
            let received = to_file(batches, what, total, path, to.format, start).await?;
            report_file(what, received, path);
            Ok(received)
        }
        None => print(batches, to.limit, start).await,
    }
}

/// Writing has a thread of its own: compression must not hold up the sockets.
async fn to_file(
    mut batches: BatchStream,
    what: &str,
    total: Option<u64>,
    path: &Path,
    format: Option<Format>,
    start: Instant,
) -> Result<Received> {
    let mut sink = Sink::create(path, format, &batches.schema())?;
    let (queue, mut queued) = tokio::sync::mpsc::channel::<RecordBatch>(4);
    let writer = tokio::task::spawn_blocking(move || {
        while let Some(batch) = queued.blocking_recv() {
            sink.write(&batch)?;
        }
        Ok::<Sink, Error>(sink)
    });
    let progress = Progress::bytes(&format!("fetching {what}"), total);
    let mut received = Received::default();
    let mut failure = None;
    while let Some(batch) = batches.next().await {
        let batch = match batch {
            Ok(batch) => batch,
            Err(error) => {
                failure = Some(error);
                break;
            }
        };
        let bytes = batch_bytes(&batch);
        received.rows += batch.num_rows() as u64;
        received.bytes += bytes;
        progress.advance(bytes);
        // The writer is gone when it failed; its own error follows.
        if queue.send(batch).await.is_err() {
            break;
        }
    }
    drop(queue);
    let sink = writer.await.map_err(|error| Error::Internal(format!("the writer of {}: {error}", path.display())))?;
    progress.finish();
    match (failure, sink) {
        (Some(error), _) | (None, Err(error)) => Err(error),
        (None, Ok(sink)) => {
            tokio::task::spawn_blocking(move || sink.finish())
                .await
                .map_err(|error| Error::Internal(error.to_string()))??;
            received.seconds = start.elapsed().as_secs_f64();
            Ok(received)
        }
    }
}

fn report_file(what: &str, received: Received, path: &Path) {
    let Received { rows, bytes, seconds } = received;
    if output::is_json() {
        let path = path.display().to_string();
        output::json(&json!({ "source": what, "rows": rows, "bytes": bytes, "seconds": seconds, "file": path }));
    } else {
        output::line(format!(
            "{what}: {} rows, {} in {} ({}/s) -> {}",
            output::count(rows),
            human_bytes(bytes),
            output::seconds(seconds),
            human_bytes((bytes as f64 / seconds) as u64),
            path.display()
        ));
    }
}

/// Prints the first rows. Machines get each as a JSON object, on a line.
async fn print(mut batches: BatchStream, limit: usize, start: Instant) -> Result<Received> {
    let limit = if limit == 0 { usize::MAX } else { limit };
    let schema = batches.schema();
    let (mut kept, mut received) = (Vec::new(), Received::default());
    let mut more = false;
    while let Some(batch) = batches.next().await {
        let mut batch = batch?;
        let room = limit.saturating_sub(received.rows as usize);
        if batch.num_rows() > room {
            more = true;
            batch = batch.slice(0, room);
        }
        received.rows += batch.num_rows() as u64;
        received.bytes += batch_bytes(&batch);
        match output::is_json() {
            true => rows::print_json(&batch)?,
            false => kept.push(batch),
        }
        if more {
            break;
        }
    }
    received.seconds = start.elapsed().as_secs_f64();
    if !output::is_json() {
        output::line(rows::render(&schema, &kept)?);
        if more {
            output::remark(format!(
                "the first {} rows; --limit 0 prints all, -o FILE writes them to a file",
                received.rows
            ));
        }
    }
    Ok(received)
}
