//! `dovetail get`: fetches a table or a result into a file, or onto the terminal.

use std::convert::Infallible;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use arrow::array::RecordBatch;
use arrow::datatypes::Schema;
use arrow_flight::FlightInfo;
use futures::StreamExt;
use parking_lot::Mutex;
use serde_json::json;

use super::client::{BatchStream, Client, ConnectArgs, batch_bytes, table_descriptor};
use super::files::{Format, STDOUT, Target};
use super::interrupt::unless_interrupted;
use super::names::Names;
use super::progress::Progress;
use super::{jobs, output, rows};
use crate::human::{did_you_mean, listed};
use crate::{Error, Result};

/// Arguments of `dovetail get`.
#[derive(Debug, clap::Args)]
#[command(group(clap::ArgGroup::new("what").args(["table", "job"]).required(true)))]
pub struct GetArgs {
    /// Name of the table
    table: Option<String>,

    /// Number of the job whose result to fetch
    #[arg(long, value_name = "ID")]
    job: Option<u64>,

    /// Columns to write or print, in this order. The server sends all columns. A name with a comma
    /// needs double quotes: "a,b"
    #[arg(long, value_name = "COLUMNS")]
    columns: Vec<Names>,

    #[command(flatten)]
    to: OutputArgs,

    #[command(flatten)]
    connect: ConnectArgs,
}

/// Where rows go; shared by `get` and `join`.
#[derive(Clone, Debug, clap::Args)]
#[command(next_help_heading = "Output")]
pub struct OutputArgs {
    /// File to write: .parquet, .arrow, .arrows (stream), .csv, .tsv or .json (lines). "-" is
    /// standard output, as an Arrow IPC stream or in the format of --format
    #[arg(long, short, value_name = "FILE")]
    pub output: Option<PathBuf>,

    /// Format of the file, if its name does not show it. CSV writes a null and an empty text as the
    /// same empty field, which is read as null. The other formats keep them apart
    #[arg(long, value_enum)]
    pub format: Option<Format>,

    /// Maximum number of rows to print without a file, 20 by default. 0 prints all rows. With a
    /// limit of N rows, a join ends after N rows. Otherwise it makes the whole result and reports
    /// its number of rows
    #[arg(long, value_name = "ROWS", conflicts_with = "output")]
    pub limit: Option<usize>,
}

/// Time for which rows that have arrived wait for others, to be printed together.
const PRINTED_AFTER: Duration = Duration::from_millis(100);

/// Default number of rows to print.
const ROWS_PRINTED: usize = 20;

/// Place that received rows go to.
#[derive(Debug)]
pub enum Destination {
    /// Open file.
    File(Target),
    /// Standard output, with at most `limit` rows printed: all together, or those that have arrived
    /// whenever no others follow at once.
    Terminal { limit: usize, as_they_come: bool },
}

impl OutputArgs {
    /// True if rows go to standard output in a file format. No other text may then go there.
    pub fn is_stdout(&self) -> bool {
        self.output.as_deref() == Some(Path::new(STDOUT))
    }

    /// Refuses a format without a file. clap does not refuse it if --limit is given.
    ///
    /// # Errors
    /// [`Error::Invalid`].
    pub fn check(&self) -> Result<()> {
        match (self.format, &self.output) {
            (Some(_), None) => {
                Err(Error::Invalid("--format needs an output; add -o FILE, or -o - for standard output".into()))
            }
            _ => Ok(()),
        }
    }

    /// Opens the file, if rows go into one. The command thus reports an error of the file before a
    /// job starts.
    ///
    /// # Errors
    /// The errors of [`OutputArgs::check`] and [`Target::create`].
    pub fn open(&self) -> Result<Destination> {
        self.check()?;
        Ok(match &self.output {
            Some(path) => Destination::File(Target::create(path, self.format)?),
            None => Destination::Terminal {
                limit: match self.limit {
                    None => ROWS_PRINTED,
                    Some(0) => usize::MAX,
                    Some(limit) => limit,
                },
                as_they_come: false,
            },
        })
    }
}

/// Amount of data received.
#[derive(Clone, Copy, Debug, Default)]
pub struct Received {
    pub rows: u64,
    /// Bytes of Arrow buffers.
    pub bytes: u64,
    /// Time from the first request to the last row.
    pub seconds: f64,
    /// Parallel streams, each over its own connection.
    pub streams: usize,
    pub whole: bool,
}

/// Fetches a table or a result.
///
/// # Errors
/// The server's and the file's.
pub async fn run(args: GetArgs) -> Result<()> {
    let to = args.to.open()?;
    unless_interrupted(fetch(args, to)).await
}

async fn fetch(args: GetArgs, to: Destination) -> Result<()> {
    let client = Client::connect(&args.connect).await?;
    let (what, info) = match (&args.table, &args.job) {
        (Some(table), _) => (table.clone(), client.info(table_descriptor(table)).await?),
        (None, Some(job)) => (format!("job {job}"), jobs::find(&client, *job).await?),
        (None, None) => {
            return Err(Error::Invalid("give the name of a table, or the number of a job with --job".into()));
        }
    };
    let received = receive(&client, &what, &info, &Names::together(&args.columns), to, Instant::now()).await;
    received.map(drop).map_err(|error| match error {
        // The table was replaced meanwhile. The server's advice names an RPC, which a user of the
        // command does not call.
        Error::Precondition(text) => Error::Precondition(text.replace("call GetFlightInfo again", "run this again")),
        error => error,
    })
}

/// Returns the indices of the named columns.
fn places(columns: &[String], schema: &Schema, what: &str) -> Result<Vec<usize>> {
    let place = |(at, name): (usize, &String)| {
        if columns[..at].contains(name) {
            return Err(Error::Invalid(format!("--columns names {name:?} twice; name it once")));
        }
        schema.index_of(name).map_err(|_| {
            let known = || schema.fields().iter().map(|field| field.name().as_str());
            let (names, meant) = (listed(known()), did_you_mean(name, known()));
            Error::Invalid(format!("{what} has no column {name:?}, which --columns names; it has {names}{meant}"))
        })
    };
    columns.iter().enumerate().map(place).collect()
}

/// Sends all rows of a flight to their destination, and reports them. Keeps only the named columns,
/// or all if `columns` is empty.
///
/// # Errors
/// The server's and the file's.
pub async fn receive(
    client: &Client,
    what: &str,
    info: &FlightInfo,
    columns: &[String],
    to: Destination,
    start: Instant,
) -> Result<Received> {
    let progress = progress_of(what, info);
    let mut batches = client.fetch(info)?;
    if !columns.is_empty() {
        let places = places(columns, &batches.schema(), what)?;
        let left_out = progress.clone();
        batches = batches.project(places, move |bytes| left_out.moved(bytes))?;
    }
    let taken = deliver(what, jobs::id_of(info).ok(), batches, to, start, &progress);
    tokio::select! {
        received = taken => received,
        never = follow(client, what, info, &progress) => match never {},
    }
}

/// Sends all rows to their destination, and reports them.
///
/// # Errors
/// Those of the batches, and the file's.
pub async fn deliver(
    what: &str,
    job: Option<u64>,
    batches: BatchStream,
    to: Destination,
    start: Instant,
    progress: &Progress,
) -> Result<Received> {
    match to {
        Destination::File(target) => {
            let (path, is_stdout) = (target.path().to_owned(), target.is_stdout());
            let received = to_file(batches, target, start, progress).await?;
            progress.finish();
            match is_stdout {
                true => remark_received(what, received),
                false => report_file(what, received, &path, job)?,
            }
            Ok(received)
        }
        Destination::Terminal { limit, as_they_come } => print(batches, limit, as_they_come, start, progress).await,
    }
}

/// Returns the progress bar of a flight. It shows the job's progress until the total bytes are
/// known, and then counts bytes.
pub fn progress_of(what: &str, info: &FlightInfo) -> Progress {
    match (u64::try_from(info.total_bytes), jobs::id_of(info)) {
        (Err(_), Ok(_)) => Progress::share(what),
        (total, _) => Progress::transfer(&format!("fetching {what}"), total.ok()),
    }
}

/// Updates a bar with the job's progress until the job ends, and then with the total bytes. Never
/// returns, because the streams report a failed job.
pub async fn follow(client: &Client, what: &str, info: &FlightInfo, progress: &Progress) -> Infallible {
    if let (Err(_), Ok(job)) = (u64::try_from(info.total_bytes), jobs::id_of(info)) {
        loop {
            tokio::time::sleep(jobs::POLL_INTERVAL).await;
            match jobs::status(client, job).await {
                Ok(status) if jobs::is_under_way(&status) => jobs::show(progress, what, &status),
                Ok(status) => {
                    if let Some(bytes) = status["bytes"].as_u64() {
                        progress.set_message(format!("fetching {what}"));
                        progress.set_total_bytes(bytes);
                    }
                    break;
                }
                Err(_) => break,
            }
        }
    }
    std::future::pending().await
}

/// Writes all rows into a file.
pub(super) async fn to_file(
    mut batches: BatchStream,
    target: Target,
    start: Instant,
    progress: &Progress,
) -> Result<Received> {
    let mut file = target.start(&batches.schema())?;
    let mut received = Received { whole: true, streams: batches.streams(), ..Received::default() };
    while let Some(batch) = batches.next().await {
        let batch = batch?;
        let bytes = batch_bytes(&batch);
        received.rows += batch.num_rows() as u64;
        received.bytes += bytes;
        progress.moved(bytes);
        file.write(batch).await?;
    }
    file.finish().await?;
    received.seconds = start.elapsed().as_secs_f64();
    Ok(received)
}

fn report_file(what: &str, received: Received, path: &Path, job: Option<u64>) -> Result<()> {
    if output::is_json() {
        let Received { rows, bytes, seconds, streams, .. } = received;
        let path = path.display().to_string();
        let said = json!({
            "source": what, "job": job, "rows": rows, "bytes": bytes, "seconds": seconds, "streams": streams, "file": path
        });
        output::write_line(said.to_string())
    } else {
        output::write_line(format!("{} -> {}", describe(what, received), path.display()))
    }
}

/// Prints the summary to stderr, because standard output is for the rows.
fn remark_received(what: &str, received: Received) {
    output::remark(describe(what, received));
}

fn describe(what: &str, received: Received) -> String {
    let Received { rows, bytes, seconds, streams, .. } = received;
    let by = output::counted(streams as u64, "stream");
    format!("{} by {by}", output::transfer(what, rows, bytes, "in", seconds))
}

/// Says that rows that were printed are not all.
fn first(rows: u64) -> String {
    match rows {
        1 => "this is the first row".into(),
        rows => format!("these are the first {}", output::counted(rows, "row")),
    }
}

/// Prints the first rows: as a table, or with `--json` as one JSON object per line.
async fn print(
    mut batches: BatchStream,
    limit: usize,
    as_they_come: bool,
    start: Instant,
    progress: &Progress,
) -> Result<Received> {
    let table = Arc::new(Mutex::new(rows::Pieces::new(batches.schema())));
    let (mut kept, mut received) = (Vec::new(), Received { streams: batches.streams(), ..Received::default() });
    let mut more = false;
    loop {
        let next = match as_they_come && !kept.is_empty() {
            true => tokio::time::timeout(PRINTED_AFTER, batches.next()).await,
            false => Ok(batches.next().await),
        };
        let mut batch = match next {
            Ok(Some(batch)) => batch?,
            Ok(None) => break,
            Err(_) => {
                progress.finish();
                print_piece(&table, std::mem::take(&mut kept), false).await?;
                continue;
            }
        };
        let room = limit.saturating_sub(received.rows as usize);
        if batch.num_rows() > room {
            more = true;
            batch = batch.slice(0, room);
        }
        received.rows += batch.num_rows() as u64;
        received.bytes += batch_bytes(&batch);
        progress.moved(batch_bytes(&batch));
        match output::is_json() {
            true => output::on_a_thread(move || rows::print_json(&batch)).await?,
            false => kept.push(batch),
        }
        if more {
            break;
        }
    }
    progress.finish();
    received.seconds = start.elapsed().as_secs_f64();
    received.whole = !more;
    if !output::is_json() {
        print_piece(&table, kept, true).await?;
        if more {
            output::remark(format!(
                "{}; --limit 0 prints all rows, and -o FILE writes them to a file",
                first(received.rows)
            ));
        }
    }
    Ok(received)
}

/// Prints rows of a table, and after the last of them the columns that have no room.
async fn print_piece(table: &Arc<Mutex<rows::Pieces>>, batches: Vec<RecordBatch>, is_last: bool) -> Result<()> {
    let table = table.clone();
    output::on_a_thread(move || {
        let mut table = table.lock();
        let (rows, rest) = (table.next(&batches), table.rest().filter(|_| is_last));
        rows.into_iter().chain(rest).try_for_each(output::write_line)
    })
    .await
}
