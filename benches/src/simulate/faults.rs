//! Faults of a simulated run: lost devices, cancelled jobs, failures that pass, wrong predictions.

use std::str::FromStr;

use dovetail::{Error, Result};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use rand_distr::{Distribution, Exp1, StandardNormal};

use crate::random::hash;

/// Faults of a run. The default is none.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Faults {
    /// Mean seconds until a device is lost; 0: never.
    pub lost_after: f64,
    /// Share of jobs that are cancelled about when they would run.
    pub cancelled: f64,
    /// Share of jobs whose first run fails for a reason that passes.
    pub failed: f64,
    /// Share of jobs that take ten times the predicted time and result, or a tenth.
    pub wrong: f64,
}

/// Mean seconds until a lost device is back.
const BACK_AFTER: f64 = 3.0;

impl FromStr for Faults {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let mut faults = Self::default();
        for part in text.split(',').filter(|part| !part.is_empty()) {
            let (name, value) = part.split_once('=').unwrap_or((part, ""));
            let value = value.parse::<f64>().ok().filter(|value| value.is_finite() && *value >= 0.0);
            let is_share = name != "lost";
            let value = value.filter(|value| !is_share || *value <= 1.0).ok_or_else(|| {
                Error::Invalid(format!(
                    "{part:?} is no fault; write lost=SECONDS, or cancelled=, failed= or wrong= with a share from 0 to 1"
                ))
            })?;
            match name {
                "lost" => faults.lost_after = value,
                "cancelled" => faults.cancelled = value,
                "failed" => faults.failed = value,
                "wrong" => faults.wrong = value,
                _ => {
                    return Err(Error::Invalid(format!(
                        "there is no fault {name:?}; faults are lost, cancelled, failed and wrong"
                    )));
                }
            }
        }
        Ok(faults)
    }
}

/// Fate of a job, the same under every policy.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Fate {
    /// Run time over the predicted one.
    pub time: f64,
    /// Bytes of the result over the predicted ones.
    pub bytes: f64,
    /// Time from the submission to the client's request to cancel it, over its run time.
    pub cancelled_after: Option<f64>,
    /// True if the first run fails for a reason that passes.
    pub fails_once: bool,
}

impl Fate {
    /// Draws the fate of a job by its number. `spread` is the standard deviation of the logarithm
    /// of run times over predicted ones.
    pub fn draw(seed: u64, job: usize, spread: f64, faults: &Faults) -> Self {
        let mut random = SmallRng::seed_from_u64(hash(seed ^ hash(job as u64)));
        let normal: f64 = StandardNormal.sample(&mut random);
        let (is_wrong, is_slow) = (random.random_bool(faults.wrong), random.random_bool(0.5));
        let wrong = match (is_wrong, is_slow) {
            (false, _) => 1.0,
            (true, true) => 10.0,
            (true, false) => 0.1,
        };
        let after: f64 = Exp1.sample(&mut random);
        Self {
            time: (spread * normal).exp() * wrong,
            bytes: wrong,
            cancelled_after: random.random_bool(faults.cancelled).then_some(after),
            fails_once: random.random_bool(faults.failed),
        }
    }
}

/// Losses of devices, in the order of time.
#[derive(Debug)]
pub struct Losses {
    random: SmallRng,
    lost_after: f64,
}

impl Losses {
    /// Makes the losses of a run.
    pub fn new(seed: u64, faults: &Faults) -> Self {
        Self { random: SmallRng::seed_from_u64(hash(seed).wrapping_add(1)), lost_after: faults.lost_after }
    }

    /// Draws the seconds until a device is lost; `None` if devices are never lost.
    pub fn next_loss(&mut self) -> Option<f64> {
        let drawn: f64 = Exp1.sample(&mut self.random);
        (self.lost_after > 0.0).then_some(drawn * self.lost_after)
    }

    /// Draws the seconds until a lost device is back.
    pub fn back_after(&mut self) -> f64 {
        let drawn: f64 = Exp1.sample(&mut self.random);
        drawn * BACK_AFTER
    }
}
