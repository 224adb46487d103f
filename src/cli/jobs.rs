//! `dovetail jobs` and `dovetail cancel`, and helpers of other commands that follow jobs.

use std::time::{Duration, SystemTime};

use arrow_flight::FlightInfo;
use serde_json::{Value, json};
use tonic::{Code, Status};

use super::client::{Client, ConnectArgs, from_status};
use super::describe;
use super::output::{self, Align};
use super::progress::Progress;
use crate::human;
use crate::service::code_named;
use crate::{Error, Result};

/// Interval between requests for a running job's progress.
pub const POLL_INTERVAL: Duration = Duration::from_millis(200);

/// Arguments of `dovetail jobs`.
#[derive(Debug, clap::Args)]
pub struct JobsArgs {
    /// Number of the job to show in full
    job: Option<u64>,

    #[command(flatten)]
    connect: ConnectArgs,
}

/// Arguments of `dovetail cancel`.
#[derive(Debug, clap::Args)]
pub struct CancelArgs {
    /// Numbers of the jobs
    #[arg(required = true)]
    jobs: Vec<u64>,

    #[command(flatten)]
    connect: ConnectArgs,
}

/// Lists jobs, or shows one.
///
/// # Errors
/// The server's.
pub async fn run_jobs(args: JobsArgs) -> Result<()> {
    let client = Client::connect(&args.connect).await?;
    if let Some(job) = args.job {
        let status = status(&client, job).await?;
        match output::is_json() {
            true => output::json(&status),
            false => output::line(describe::value(&status)),
        }
        return Ok(());
    }
    let jobs = client.action("list_jobs", &Value::Null).await?;
    if output::is_json() {
        jobs.iter().for_each(output::json);
    } else if jobs.is_empty() {
        output::line("no jobs");
    } else {
        output::line(render(&jobs));
    }
    Ok(())
}

fn render(jobs: &[Value]) -> String {
    let row = |job: &Value| {
        let text = |key: &str| job[key].as_str().unwrap_or("").to_owned();
        let progress = format!("{:.0} %", job["progress"].as_f64().unwrap_or(0.0) * 100.0);
        vec![
            job["job"].to_string(),
            text("state"),
            if job["state"] == "complete" { "100 %".into() } else { progress },
            what(job),
            text("strategy"),
            devices(job),
            job["rows"].as_u64().filter(|_| !counts(job)).map(output::count).unwrap_or_default(),
            text("submitted"),
        ]
    };
    let waits = |job: &Value| {
        let waits = Waits::of(job);
        vec![
            waits.as_ref().and_then(|waits| waits.behind).map(output::count).unwrap_or_default(),
            waits.as_ref().and_then(|waits| waits.start_seconds).map(human::whole_seconds).unwrap_or_default(),
            waits.and_then(|waits| waits.for_what).unwrap_or_default(),
        ]
    };
    let mut columns = vec![
        ("job", Align::Right),
        ("state", Align::Left),
        ("done", Align::Right),
        ("join", Align::Left),
        ("strategy", Align::Left),
        ("devices", Align::Left),
        ("rows", Align::Right),
        ("submitted", Align::Left),
    ];
    if !jobs.iter().any(|job| Waits::of(job).is_some()) {
        return output::table(&columns, &jobs.iter().map(row).collect::<Vec<_>>());
    }
    columns.extend([("behind", Align::Right), ("starts in", Align::Right), ("waiting for", Align::Left)]);
    output::table(&columns, &jobs.iter().map(|job| [row(job), waits(job)].concat()).collect::<Vec<_>>())
}

/// Returns the names of the devices that run or ran a job, separated by commas.
pub fn devices(job: &Value) -> String {
    let names = job["devices"].as_array().into_iter().flatten();
    names.filter_map(Value::as_str).collect::<Vec<_>>().join(", ")
}

/// True if a job counts rows instead of making them. The job's one row is then the count.
fn counts(job: &Value) -> bool {
    job["count"].as_bool().unwrap_or(false)
}

/// Describes the join of a job: `orders inner lineitem`, or `count of orders inner lineitem`.
pub fn what(job: &Value) -> String {
    let text = |key: &str| job[key].as_str().unwrap_or("");
    let count = if counts(job) { "count of " } else { "" };
    format!("{count}{} {} {}", text("left"), text("how"), text("right"))
}

/// Reasons why a queued job waits, as far as the server tells.
struct Waits {
    /// Number of jobs that start before this job.
    behind: Option<u64>,
    /// Seconds from now until the expected start.
    start_seconds: Option<u64>,
    /// Resource that the job waits for: a device, or memory.
    for_what: Option<String>,
}

impl Waits {
    fn of(job: &Value) -> Option<Self> {
        let start = job["predicted_start"].as_str().and_then(|time| humantime::parse_rfc3339(time).ok());
        let from_now =
            |start: SystemTime| start.duration_since(SystemTime::now()).unwrap_or_default().as_secs_f64().ceil() as u64;
        (job["state"] == "queued").then(|| Self {
            behind: job["queue_position"].as_u64(),
            start_seconds: start.map(from_now),
            for_what: job["waiting_for"].as_str().map(str::to_owned),
        })
    }

    /// Renders one line: `queued behind 2, waits for host:0, starts in about 4 s`.
    fn in_words(&self) -> String {
        let mut words = match self.behind {
            Some(0) => "next in the queue".to_owned(),
            Some(before) => format!("queued behind {}", output::count(before)),
            None => "queued".to_owned(),
        };
        if let Some(what) = &self.for_what {
            words += &format!(", waits for {what}");
        }
        match self.start_seconds {
            // The jobs before this one take longer than predicted.
            Some(0) => words += ", starts soon",
            Some(seconds) => words += &format!(", starts in about {}", human::whole_seconds(seconds)),
            None => {}
        }
        words
    }
}

/// Cancels jobs.
///
/// # Errors
/// The server's, for the first job that cannot be cancelled. The jobs before that one are
/// cancelled.
pub async fn run_cancel(args: CancelArgs) -> Result<()> {
    let client = Client::connect(&args.connect).await?;
    for job in args.jobs {
        let answers = client.action("cancel_job", &json!({ "job": job })).await?;
        let state = answers.first().and_then(|job| job["state"].as_str()).unwrap_or("cancelled");
        match (output::is_json(), state) {
            (true, _) => output::json(&json!({ "job": job, "cancelled": true })),
            (false, "failed") => output::line(format!("job {job} had already failed; its partial result is released")),
            (false, "complete") => output::line(format!("job {job} was already complete; its result is released")),
            (false, _) => output::line(format!("job {job} is cancelled, and its result is released")),
        }
    }
    Ok(())
}

/// Returns the server's description of a job.
///
/// # Errors
/// The server's.
pub async fn status(client: &Client, job: u64) -> Result<Value> {
    one(client.action("job", &json!({ "job": job })).await?, job)
}

fn one(mut answers: Vec<Value>, job: u64) -> Result<Value> {
    answers.pop().ok_or_else(|| Error::Internal(format!("the server did not describe job {job}")))
}

/// Waits for the end of a job and shows its progress. The server answers as soon as the job has
/// ended. Returns the server's description of the ended job.
///
/// # Errors
/// The job's, and the server's.
pub async fn wait(client: &Client, job: u64, what: &str) -> Result<Value> {
    let progress = Progress::share(what);
    loop {
        let body = json!({ "job": job, "wait_seconds": POLL_INTERVAL.as_secs_f64() });
        let status = one(client.action("job", &body).await?, job)?;
        match status["state"].as_str() {
            _ if is_under_way(&status) => {
                show(&progress, what, &status);
                progress.set_moved(passed_bytes(&status));
            }
            Some("complete") | None => return Ok(status),
            Some(_) => return Err(failure(&status)),
        }
    }
}

/// Returns the bytes to show for a job whose rows are not being fetched. For a count: the bytes of
/// all its phases. Otherwise: the bytes of its result so far.
fn passed_bytes(status: &Value) -> u64 {
    if !counts(status) {
        return status["bytes"].as_u64().unwrap_or(0);
    }
    let phases = status["phases"].as_array().into_iter().flatten();
    phases.filter_map(|phase| phase["bytes"].as_u64()).sum()
}

/// True if a job is queued or running.
pub fn is_under_way(status: &Value) -> bool {
    matches!(status["state"].as_str(), Some("queued" | "running"))
}

/// Shows a job's progress on a bar.
pub fn show(progress: &Progress, what: &str, status: &Value) {
    progress.set_share(status["progress"].as_f64().unwrap_or(0.0));
    progress.set_message(match Waits::of(status) {
        Some(waits) => format!("{what}: {}", waits.in_words()),
        None => format!("joining {what}"),
    });
}

/// Returns the number of the job behind a flight.
///
/// # Errors
/// [`Error::Internal`] if the flight has no job.
pub fn id_of(info: &FlightInfo) -> Result<u64> {
    let said: Option<Value> = serde_json::from_slice(&info.app_metadata).ok();
    let job = said.as_ref().and_then(|said| said["job"].as_u64());
    job.ok_or_else(|| Error::Internal("the server did not name the job that it started".into()))
}

/// Returns the flight of a job whose result is live.
///
/// # Errors
/// The server's; [`Error::NotFound`] if there is no such result.
pub async fn find(client: &Client, job: u64) -> Result<FlightInfo> {
    let flights = client.list().await?;
    match flights.into_iter().find(|info| id_of(info).is_ok_and(|id| id == job)) {
        Some(info) => Ok(info),
        None => {
            // Ask the server for the reason: the job does not exist, or it failed.
            let status = status(client, job).await?;
            Err(match status["state"].as_str() {
                Some("failed" | "cancelled") => failure(&status),
                _ => Error::NotFound(format!(
                    "the result of job {job} is no longer on the server; `dovetail join --retain-seconds SECONDS` \
                     keeps a result for later"
                )),
            })
        }
    }
}

/// Returns the error of a job that did not complete.
pub fn failure(status: &Value) -> Error {
    match status["error"]["message"].as_str() {
        Some(message) => {
            let name = status["error"]["code"].as_str().unwrap_or_default();
            let code = code_named(name).unwrap_or(Code::Internal);
            from_status(Status::new(code, format!("job {} failed: {message}", status["job"])))
        }
        None => Error::Cancelled(format!("job {} is {}", status["job"], status["state"].as_str().unwrap_or("gone"))),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_count_reports_the_bytes_that_it_has_read() {
        let phases = json!([{"name": "pack keys", "bytes": 300}, {"name": "match", "bytes": 40}]);
        let job = |count: bool| json!({"count": count, "bytes": 7, "phases": phases});
        assert_eq!((passed_bytes(&job(true)), passed_bytes(&job(false))), (340, 7));
        assert_eq!(passed_bytes(&json!({"count": true})), 0);
    }

    #[test]
    fn a_counting_job_is_shown_as_a_count() {
        let job = |count: bool| {
            json!({"job": 7, "state": "complete", "left": "a", "how": "inner", "right": "b", "rows": 1, "strategy": "hash",
            "count": count, "submitted": "now"})
        };
        let row = |count: bool| render(&[job(count)]).lines().last().map(str::to_owned).unwrap_or_default();
        let words = |count: bool| row(count).split_whitespace().map(str::to_owned).collect::<Vec<_>>().join(" ");
        assert_eq!(words(true), "7 complete 100 % count of a inner b hash now");
        assert_eq!(words(false), "7 complete 100 % a inner b hash 1 now");
    }

    #[test]
    fn a_job_is_shown_with_all_its_devices() {
        let gang = json!({"job": 7, "state": "running", "device": "host:0", "devices": ["host:0", "host:2"]});
        let shown = render(&[gang, json!({"job": 8, "state": "queued", "device": null, "devices": []})]);
        let (title, lines) = shown.split_once('\n').unwrap();
        assert!(title.contains("devices") && lines.lines().next().unwrap().contains("host:0, host:2"), "{shown}");
        assert!(!lines.lines().nth(1).unwrap().contains("host"), "{shown}");
    }

    #[test]
    fn a_waiting_job_shows_the_reason_and_its_predicted_start() {
        let start = SystemTime::now() + Duration::from_secs(3599);
        let queued = json!({"job": 8, "state": "queued", "progress": 0.0, "left": "a", "how": "inner", "right": "b",
            "queue_position": 2, "waiting_for": "host:0", "predicted_start": humantime::format_rfc3339_millis(start).to_string()});
        let running = json!({"job": 7, "state": "running", "progress": 0.25, "left": "a", "how": "left", "right": "b"});
        let shown = render(&[running.clone(), queued.clone()]);
        let lines: Vec<&str> = shown.lines().collect();
        assert!(lines[0].ends_with("behind    starts in  waiting for"), "{shown}");
        assert!(lines[2].contains(" 2  59 min ") && lines[2].ends_with(" host:0"), "{shown}");
        assert!(!render(std::slice::from_ref(&running)).contains("waiting"), "nothing waits");
        let words = Waits::of(&queued).unwrap().in_words();
        assert!(words.starts_with("queued behind 2, waits for host:0, starts in about 59 min"), "{words}");
        assert!(Waits::of(&running).is_none());
        let late = json!({"state": "queued", "queue_position": 0, "predicted_start": "2026-01-01T00:00:00Z"});
        assert_eq!(Waits::of(&late).unwrap().in_words(), "next in the queue, starts soon");
        assert_eq!(
            Waits::of(&json!({"state": "queued", "queue_position": 0})).unwrap().in_words(),
            "next in the queue"
        );
    }

    #[test]
    fn a_failed_job_fails_the_command_with_the_same_error() {
        let failed = |code: &str| failure(&json!({"job": 7, "error": {"code": code, "message": "too large"}}));
        assert_eq!(failed("RESOURCE_EXHAUSTED"), Error::Exhausted("job 7 failed: too large".into()));
        assert_eq!(failed("UNAVAILABLE"), Error::Unavailable("job 7 failed: too large".into()));
        let cancelled = failure(&json!({"job": 7, "state": "cancelled", "error": null}));
        assert!(matches!(cancelled, Error::Cancelled(_)));
    }
}
