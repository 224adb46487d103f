//! Report of a simulated run: what the jobs waited, what the machine did, and what each tenant got.

use std::collections::BTreeMap;

use dovetail::Error;
use dovetail::cli::output::{self, Align};
use dovetail::planner::{Distribution, Strategy};
use dovetail::scheduler::{JobState, TracedTimes};
use serde_json::{Value, json};

use super::simulation::{Outcome, Record};

/// True if the job is over soonest on one device, and soon enough to share it.
fn is_small(job: &Record) -> bool {
    const SECONDS_MAX: f64 = 0.1;
    job.predicted_devices == 1 && job.predicted <= SECONDS_MAX
}

/// Condition for a job to be of a class.
type IsOf = fn(&Record) -> bool;

/// Jobs of a class: how long they waited and took.
#[derive(Debug)]
pub struct Class {
    pub name: &'static str,
    pub jobs: usize,
    /// Seconds from the submission to the first run: the median, and the 99th percentile.
    pub waited: [f64; 2],
    /// Seconds from the submission to the end over the run time on the fastest devices.
    pub slowdown: [f64; 2],
}

/// Device time of a tenant.
#[derive(Debug)]
pub struct Share {
    pub tenant: String,
    pub weight: f64,
    /// Seconds of device time until the last arrival.
    pub device_seconds: f64,
    /// Seconds that it would have had by weights: the weighted max-min share of what its jobs asked
    /// for.
    pub fair_seconds: f64,
}

/// What a run shows.
#[derive(Debug)]
pub struct Report {
    pub done: usize,
    pub failed: usize,
    /// Failures for lack of memory. The others are of devices that were lost.
    pub lacked_memory: usize,
    pub cancelled: usize,
    pub refused: usize,
    pub seconds: f64,
    pub devices: Vec<(String, f64)>,
    pub pipes: Vec<(String, f64)>,
    pub classes: Vec<Class>,
    pub shares: Vec<Share>,
    /// `None` for a trace without times.
    pub compared: Option<Compared>,
}

/// Comparison of simulated times with those of the server that wrote the trace.
#[derive(Debug)]
pub struct Compared {
    pub jobs: usize,
    /// Share of the jobs whose time from submission to end is within [`CLOSE`] of the measured one.
    pub close: f64,
    /// Share of the jobs whose time from start to end is.
    pub close_runs: f64,
    /// Share of the jobs whose time from submission to start differs from the measured one by at
    /// most [`CLOSE`] of the measured time from submission to end. (Many jobs hardly wait.)
    pub close_waits: f64,
    /// Simulated time from submission to end over the measured one: the median, and the 99th
    /// percentile.
    pub ratio: [f64; 2],
    /// Simulated time from start to end over the measured one: the median, and the 99th percentile.
    pub ratio_of_runs: [f64; 2],
    /// Mean seconds from submission to start: simulated, and measured.
    pub waited: [f64; 2],
}

/// Largest difference of a simulated time that is close to the measured one, relative to it.
const CLOSE: f64 = 0.15;

impl Report {
    /// Makes the report of a run.
    pub fn of(outcome: &Outcome) -> Self {
        let records = &outcome.records;
        let count =
            |is: &dyn Fn(&JobState) -> bool| records.iter().filter(|job| job.state.as_ref().is_some_and(is)).count();
        let classes: [(&'static str, IsOf); 3] = [
            ("small", |job| !job.is_gang && is_small(job)),
            ("large", |job| !job.is_gang && !is_small(job)),
            ("gang", |job| job.is_gang),
        ];
        Self {
            done: count(&|state| *state == JobState::Complete),
            failed: count(&|state| matches!(state, JobState::Failed(_))),
            lacked_memory: count(&|state| matches!(state, JobState::Failed(Error::Exhausted(_)))),
            cancelled: count(&|state| *state == JobState::Cancelled),
            refused: records.iter().filter(|job| job.state.is_none()).count(),
            seconds: outcome.seconds,
            devices: outcome.devices.clone(),
            pipes: outcome.pipes.clone(),
            classes: classes.iter().map(|&(name, is)| Class::of(name, records, is)).collect(),
            shares: shares(records),
            compared: Compared::of(records),
        }
    }

    /// Returns Jain's index of the tenants' device time over their fair share: 1 if all have the
    /// same part of it, and 1 / n if one of n has all.
    pub fn jain(&self) -> f64 {
        let parts = || self.shares.iter().filter(|share| share.fair_seconds > 0.0).map(Share::of_fair);
        let (sum, squares) = (parts().sum::<f64>(), parts().map(|part| part * part).sum::<f64>());
        if squares > 0.0 { sum * sum / (parts().count() as f64 * squares) } else { 1.0 }
    }

    /// Returns the mean share of the time in which devices had a job.
    pub fn utilisation(&self) -> f64 {
        self.devices.iter().map(|(_, busy)| busy).sum::<f64>() / self.devices.len().max(1) as f64
    }

    /// Returns a line of JSON: everything that the tables show, and the inputs in `head`.
    pub fn json(&self, head: &Value) -> Value {
        let by_name = |list: &[(String, f64)]| {
            let shares = list.iter().map(|(name, share)| (name.clone(), json!(share)));
            Value::Object(shares.collect())
        };
        let class = |class: &Class| {
            let [p50, p99] = class.waited;
            let [slowdown_p50, slowdown_p99] = class.slowdown;
            let of_class = json!({
                "jobs": class.jobs, "waited_p50": p50, "waited_p99": p99,
                "slowdown_p50": slowdown_p50, "slowdown_p99": slowdown_p99,
            });
            (class.name.to_owned(), of_class)
        };
        let tenant = |share: &Share| {
            let of_tenant = json!({
                "weight": share.weight, "device_seconds": share.device_seconds, "fair_seconds": share.fair_seconds,
            });
            (share.tenant.clone(), of_tenant)
        };
        let mut line = head.as_object().cloned().unwrap_or_default();
        let of_run = json!({
            "done": self.done, "failed": self.failed, "lacked_memory": self.lacked_memory, "cancelled": self.cancelled, "refused": self.refused,
            "seconds": self.seconds, "utilisation": self.utilisation(), "jain": self.jain(),
            "devices": by_name(&self.devices), "links": by_name(&self.pipes),
            "classes": Value::Object(self.classes.iter().map(class).collect()),
            "tenants": Value::Object(self.shares.iter().map(tenant).collect()),
        });
        line.extend(of_run.as_object().cloned().unwrap_or_default());
        if let Some(compared) = &self.compared {
            let Compared { jobs, close, close_runs, close_waits, ratio, ratio_of_runs, waited } = compared;
            let compared = json!({
                "jobs": jobs, "close": close, "close_runs": close_runs, "close_waits": close_waits,
                "ratio_p50": ratio[0], "ratio_p99": ratio[1],
                "ratio_of_runs_p50": ratio_of_runs[0], "ratio_of_runs_p99": ratio_of_runs[1],
                "waited_mean": waited[0], "waited_mean_measured": waited[1],
            });
            line.insert("compared".into(), compared);
        }
        Value::Object(line)
    }

    /// Prints the report for people.
    pub fn show(&self) {
        let Self { done, failed, lacked_memory, cancelled, refused, .. } = self;
        output::line(format!(
            "{done} jobs done, {failed} failed ({lacked_memory} for lack of memory), {cancelled} cancelled, {refused} refused, in {} simulated",
            output::seconds(self.seconds)
        ));
        output::line(self.classes_table());
        if let Some(compared) = &self.compared {
            output::line(format!("\n{}", compared.in_words()));
        }
        output::line(self.shares_table());
        let used = |list: &[(String, f64)]| {
            list.iter().map(|(name, share)| vec![name.clone(), percent(*share)]).collect::<Vec<_>>()
        };
        output::line(format!(
            "\n{}",
            output::table(&[("device", Align::Left), ("busy", Align::Right)], &used(&self.devices))
        ));
        if !self.pipes.is_empty() {
            output::line(format!(
                "\n{}",
                output::table(&[("link or memory", Align::Left), ("used", Align::Right)], &used(&self.pipes))
            ));
        }
    }

    fn classes_table(&self) -> String {
        let columns = [
            ("class", Align::Left),
            ("jobs", Align::Right),
            ("waited p50", Align::Right),
            ("p99", Align::Right),
            ("slowdown p50", Align::Right),
            ("p99", Align::Right),
        ];
        let row = |class: &Class| {
            let [slowdown_p50, slowdown_p99] = class.slowdown.map(|value| format!("{value:.1} x"));
            let [p50, p99] = class.waited.map(output::seconds);
            vec![class.name.into(), class.jobs.to_string(), p50, p99, slowdown_p50, slowdown_p99]
        };
        let rows: Vec<_> = self.classes.iter().filter(|class| class.jobs > 0).map(row).collect();
        format!("\n{}", output::table(&columns, &rows))
    }

    fn shares_table(&self) -> String {
        let columns = [
            ("tenant", Align::Left),
            ("weight", Align::Right),
            ("device time", Align::Right),
            ("share", Align::Right),
            ("fair share", Align::Right),
        ];
        let all: f64 = self.shares.iter().map(|share| share.device_seconds).sum();
        let part = |seconds: f64| percent(if all > 0.0 { seconds / all } else { 0.0 });
        let row = |share: &Share| {
            let Share { tenant, weight, device_seconds, fair_seconds } = share;
            let name = if tenant.is_empty() { "(anonymous)" } else { tenant };
            let seconds = output::seconds(*device_seconds);
            vec![name.into(), weight.to_string(), seconds, part(*device_seconds), part(*fair_seconds)]
        };
        let rows: Vec<_> = self.shares.iter().map(row).collect();
        format!(
            "\n{}\nJain's index of the shares over the fair ones: {:.3}",
            output::table(&columns, &rows),
            self.jain()
        )
    }
}

/// Returns what became of each job, in the order of arrival.
pub fn each(records: &[Record]) -> Value {
    let of_job = |job: &Record| {
        let (strategy, distribution) = job.composed.unzip();
        json!({
            "arrived": job.arrived, "predicted_seconds": (!is_refused(job)).then_some(job.predicted), "seconds": ran(job),
            "waited_seconds": waited(job), "devices": job.devices, "strategy": strategy.map(Strategy::name), "distribution": distribution.map(Distribution::name),
            "is_complete": job.state == Some(JobState::Complete), "refused": job.refusal,
        })
    };
    records.iter().map(of_job).collect()
}

/// Prints what became of each job.
pub fn show_each(records: &[Record]) {
    let columns = [
        ("arrived", Align::Right),
        ("predicted", Align::Right),
        ("waited", Align::Right),
        ("ran", Align::Right),
        ("devices", Align::Right),
        ("plan", Align::Left),
    ];
    let row = |job: &Record| {
        let plan = job.composed.map(|(strategy, distribution)| format!("{strategy}, {}", distribution.name()));
        let seconds = |seconds: Option<f64>| seconds.map(output::seconds).unwrap_or_default();
        vec![
            output::seconds(job.arrived),
            seconds((!is_refused(job)).then_some(job.predicted)),
            seconds(waited(job)),
            seconds(ran(job)),
            job.devices.to_string(),
            job.refusal.clone().or(plan).unwrap_or_default(),
        ]
    };
    let rows: Vec<_> = records.iter().map(row).collect();
    output::line(format!("\n{}", output::table(&columns, &rows)));
}

fn is_refused(job: &Record) -> bool {
    job.refusal.is_some()
}

/// Seconds from the submission of a job to its first run.
fn waited(job: &Record) -> Option<f64> {
    Some(job.started? - job.arrived)
}

/// Seconds from the first run of a job to its end.
fn ran(job: &Record) -> Option<f64> {
    Some(job.ended? - job.started?)
}

impl Compared {
    fn of(records: &[Record]) -> Option<Self> {
        let jobs: Vec<Times> = records.iter().filter_map(Times::of).collect();
        let share_of = |is_close: &dyn Fn(&Times) -> bool| {
            jobs.iter().filter(|&job| is_close(job)).count() as f64 / jobs.len() as f64
        };
        let ratios = |ratio: &dyn Fn(&Times) -> f64| percentiles(jobs.iter().map(ratio).collect());
        let mean = |seconds: &dyn Fn(&Times) -> f64| jobs.iter().map(seconds).sum::<f64>() / jobs.len() as f64;
        let is_close = |ratio: f64| (ratio - 1.0).abs() <= CLOSE;
        (!jobs.is_empty()).then(|| Self {
            jobs: jobs.len(),
            close: share_of(&|job| is_close(job.ratio())),
            close_runs: share_of(&|job| is_close(job.ratio_of_runs())),
            close_waits: share_of(&|job| (job.waited - job.measured.waited).abs() <= CLOSE * job.measured_whole()),
            ratio: ratios(&Times::ratio),
            ratio_of_runs: ratios(&Times::ratio_of_runs),
            waited: [mean(&|job| job.waited), mean(&|job| job.measured.waited)],
        })
    }

    fn in_words(&self) -> String {
        let Self { jobs, close, close_runs, close_waits, ratio, ratio_of_runs, waited } = self;
        let in_words = |[p50, p99]: &[f64; 2]| format!("median {p50:.2}, p99 {p99:.2}");
        let [simulated, measured] = waited.map(output::seconds);
        let close_of = percent(CLOSE);
        format!(
            "of {jobs} jobs that a server has run, {} end within {close_of} of the measured time; simulated over measured: {}\n\
             of their runs, {} take within {close_of} of the measured time; simulated over measured: {}\n\
             of their waits, {} differ by at most {close_of} of the job's measured time; mean: {simulated} simulated, \
             {measured} measured",
            percent(*close),
            in_words(ratio),
            percent(*close_runs),
            in_words(ratio_of_runs),
            percent(*close_waits),
        )
    }
}

/// Simulated times of a job, and those of the server that wrote the trace.
struct Times {
    waited: f64,
    ran: f64,
    measured: TracedTimes,
}

impl Times {
    /// `None` for a job that did not complete, here or on the server.
    fn of(job: &Record) -> Option<Self> {
        let (measured, started, ended) = (job.measured?, job.started?, job.ended?);
        let is_compared = job.state == Some(JobState::Complete) && measured.ran > 0.0;
        is_compared.then_some(Self { waited: started - job.arrived, ran: ended - started, measured })
    }

    fn measured_whole(&self) -> f64 {
        self.measured.waited + self.measured.ran
    }

    fn ratio(&self) -> f64 {
        (self.waited + self.ran) / self.measured_whole()
    }

    fn ratio_of_runs(&self) -> f64 {
        self.ran / self.measured.ran
    }
}

impl Class {
    fn of(name: &'static str, records: &[Record], is_of_class: IsOf) -> Self {
        let of_class = || records.iter().filter(|job| job.state.is_some() && is_of_class(job));
        let waited = of_class().filter_map(waited).collect();
        let slowdown = |job: &Record| {
            let is_done = job.state == Some(JobState::Complete);
            let least = job.predicted * job.fate.time;
            job.ended.filter(|_| is_done && least > 0.0).map(|ended| (ended - job.arrived) / least)
        };
        Self {
            name,
            jobs: of_class().count(),
            waited: percentiles(waited),
            slowdown: percentiles(of_class().filter_map(slowdown).collect()),
        }
    }
}

impl Share {
    /// Device time over the fair share.
    pub fn of_fair(&self) -> f64 {
        self.device_seconds / self.fair_seconds
    }
}

/// Returns the median and the 99th percentile: the least values that so large a part does not
/// exceed.
fn percentiles(mut values: Vec<f64>) -> [f64; 2] {
    values.sort_by(f64::total_cmp);
    [0.5, 0.99].map(|part| {
        let at = (part * values.len() as f64).ceil() as usize;
        values.get(at.saturating_sub(1)).copied().unwrap_or(0.0)
    })
}

/// Returns the device time of each tenant until the last arrival. A fair share is as large as that
/// of others by weight, but no larger than what the tenant's jobs take until the end.
pub fn shares(records: &[Record]) -> Vec<Share> {
    let mut shares: BTreeMap<&str, Share> = BTreeMap::new();
    let mut asked: BTreeMap<&str, f64> = BTreeMap::new();
    for job in records {
        let share = shares.entry(&job.tenant).or_insert_with(|| Share {
            tenant: job.tenant.clone(),
            weight: job.weight,
            device_seconds: 0.0,
            fair_seconds: 0.0,
        });
        share.weight = job.weight;
        share.device_seconds += job.device_seconds_of_window;
        *asked.entry(&job.tenant).or_default() += job.device_seconds;
    }
    let mut left: f64 = shares.values().map(|share| share.device_seconds).sum();
    let mut open: Vec<&str> = shares.keys().copied().collect();
    // Tenants that ask for less than their share get it all, and leave more to the others.
    loop {
        let weights: f64 = open.iter().map(|tenant| shares[tenant].weight).sum();
        let of_weight = |tenant: &str| left * shares[tenant].weight / weights;
        let Some(at) = open.iter().position(|tenant| asked[tenant] <= of_weight(tenant)) else {
            let fair: Vec<f64> = open.iter().map(|tenant| of_weight(tenant)).collect();
            open.iter()
                .zip(fair)
                .for_each(|(tenant, fair)| shares.get_mut(tenant).expect("it is known").fair_seconds = fair);
            break;
        };
        let tenant = open.swap_remove(at);
        left -= asked[tenant];
        shares.get_mut(tenant).expect("it is known").fair_seconds = asked[tenant];
    }
    shares.into_values().collect()
}

fn percent(share: f64) -> String {
    format!("{:.1} %", 100.0 * share)
}
