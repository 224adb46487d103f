//! Traces of jobs: read from a file, or drawn.

use std::path::Path;
use std::str::FromStr;

use dovetail::scheduler::{DevicesWord, TracedDevices, TracedJob, TracedTable};
use dovetail::{Context, Error, Result};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

use crate::random::hash;

/// Reads the jobs of a file, and counts the jobs that the server could not write.
///
/// # Errors
/// [`Error::Invalid`] with the line that is wrong; the errors of reading.
pub fn read(path: &Path) -> Result<(Vec<TracedJob>, u64)> {
    let text = std::fs::read_to_string(path).context(|| format!("reading {}", path.display()))?;
    let (mut jobs, mut dropped) = (Vec::new(), 0);
    for (number, line) in (1..).zip(text.lines()).filter(|(_, line)| !line.trim().is_empty()) {
        let of_dropped = serde_json::from_str::<serde_json::Value>(line).ok();
        match of_dropped.as_ref().and_then(|value| value["dropped"].as_u64()) {
            Some(more) => dropped += more,
            None => jobs.push(TracedJob::parse(line).context(|| format!("{}, line {number}", path.display()))?),
        }
    }
    if jobs.is_empty() {
        return Err(Error::Invalid(format!("{} has no job; write one JSON line for each", path.display())));
    }
    Ok((jobs, dropped))
}

/// Kinds of drawn joins, each with its share of the jobs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Mix {
    small: f64,
    large: f64,
    gang: f64,
}

impl Default for Mix {
    fn default() -> Self {
        Self { small: 0.9, large: 0.07, gang: 0.03 }
    }
}

impl FromStr for Mix {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let mut mix = Self { small: 0.0, large: 0.0, gang: 0.0 };
        for part in text.split(',') {
            let (name, share) = part.split_once('=').unwrap_or((part, ""));
            let share = share.parse::<f64>().ok().filter(|share| share.is_finite() && *share >= 0.0);
            let of_kind = match name {
                "small" => &mut mix.small,
                "large" => &mut mix.large,
                "gang" => &mut mix.gang,
                _ => return Err(Error::Invalid(format!("there is no kind {name:?}; kinds are small, large and gang"))),
            };
            *of_kind = share.ok_or_else(|| Error::Invalid(format!("{part:?} has no share; write {name}=0.5")))?;
        }
        match mix.small + mix.large + mix.gang > 0.0 {
            true => Ok(mix),
            false => Err(Error::Invalid("all shares of the mix are 0".into())),
        }
    }
}

/// Inputs of a drawn trace.
#[derive(Clone, Debug)]
pub struct Drawing<'a> {
    pub jobs: usize,
    pub mix: Mix,
    /// Weight of each tenant.
    pub weights: &'a [f64],
    /// True if each kind of join is of one tenant. Otherwise tenants draw from the same mix.
    pub by_kind: bool,
    /// Devices of the machine.
    pub devices: usize,
    pub seed: u64,
}

impl Drawing<'_> {
    /// Draws the jobs. Their times are from 0 to 1, as of a Poisson process.
    pub fn draw(&self) -> Vec<TracedJob> {
        let mut random = SmallRng::seed_from_u64(hash(self.seed).wrapping_add(2));
        let mut times: Vec<f64> = (0..self.jobs).map(|_| random.random()).collect();
        times.sort_by(f64::total_cmp);
        times.into_iter().map(|at| self.job(at, &mut random)).collect()
    }

    fn job(&self, at: f64, random: &mut SmallRng) -> TracedJob {
        let Mix { small, large, gang } = self.mix;
        let kind = random.random_range(0.0..small + large + gang);
        // Powers of two of the build side's rows.
        let (kind, build, devices) = match kind {
            kind if kind < small => (0, 14.0..20.0, TracedDevices::default()),
            kind if kind < small + large => (1, 24.0..28.0, TracedDevices::default()),
            _ => (2, 26.0..29.0, self.of_gang(random)),
        };
        let build_rows = 2f64.powf(random.random_range(build));
        let tenant = random.random_range(0..self.weights.len());
        let tenant = if self.by_kind { kind.min(self.weights.len() - 1) } else { tenant };
        let side = |rows: f64, columns: usize| TracedTable {
            rows: rows as u64,
            key_bytes: vec![8.0],
            payload_bytes: vec![8.0; columns],
            distinct: Some(build_rows.floor()),
        };
        let probe_rows = build_rows * random.random_range(1.0..4.0);
        TracedJob {
            at,
            tenant: format!("tenant-{tenant}"),
            client: None,
            weight: self.weights[tenant],
            priority: 0,
            how: "inner".into(),
            left: side(build_rows, random.random_range(1..=2)),
            right: side(probe_rows, random.random_range(1..=2)),
            count: random.random_bool(0.3),
            devices,
            distribution: None,
            measured: None,
        }
    }

    /// Half of the gangs ask for two devices, and the others for all.
    fn of_gang(&self, random: &mut SmallRng) -> TracedDevices {
        match random.random_bool(0.5) {
            _ if self.devices == 1 => TracedDevices::default(),
            true => TracedDevices::Count(2),
            false => TracedDevices::Word(DevicesWord::All),
        }
    }
}
