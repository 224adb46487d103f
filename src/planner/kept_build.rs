//! Plans of joins whose build side is on the device already.

use std::fmt;
use std::time::SystemTime;

use super::Plan;
use super::cost::PredictedPhase;
use crate::columns::Role;
use crate::device::Phase;
use crate::human;

/// Build side that an earlier join has prepared on a device.
#[derive(Clone, Debug, PartialEq)]
pub struct KeptBuild {
    /// Number of the prepared build side.
    pub number: u64,
    /// Time at which it was prepared.
    pub since: SystemTime,
    /// Predicted seconds that a join need not spend on it again.
    pub saved_seconds: f64,
    /// Phases without that work: they are left out, or touch the probe side only.
    pub saved_phases: Vec<Phase>,
}

impl KeptBuild {
    /// Describes a build side, before a plan tells what it saves.
    pub fn new(number: u64, since: SystemTime) -> Self {
        Self { number, since, saved_seconds: 0.0, saved_phases: Vec::new() }
    }

    /// Returns the time at which it was prepared, as RFC 3339 in UTC.
    pub fn since(&self) -> String {
        humantime::format_rfc3339_millis(self.since).to_string()
    }
}

/// Part of a sentence: `kept on the device since 2026-01-01T00:00:00.000Z, prepared 3`.
impl fmt::Display for KeptBuild {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "kept on the device since {}, prepared {}", self.since(), self.number)
    }
}

impl Plan {
    /// Returns the plan without the work on the build side, which is on the device already.
    /// Alternatives are left out: their predicted times include that work.
    #[must_use]
    pub fn on_kept_build(self, kept: KeptBuild) -> Self {
        let (mut of_build, mut whole) = (0.0, 0.0);
        let mut saved_phases = Vec::new();
        for plan in std::iter::once(&self).chain(&self.then) {
            let stages = plan.stage_seconds();
            let build = stages.transform_build + stages.index_build;
            of_build += build;
            whole += build + stages.transform_probe + stages.results + stages.kept_build;
            for PredictedPhase { phase, .. } in &plan.phases {
                if plan.share_left(*phase) < 1.0 && !saved_phases.contains(phase) {
                    saved_phases.push(*phase);
                }
            }
        }
        let seconds = self.seconds * if whole > 0.0 { (1.0 - of_build / whole).max(0.0) } else { 1.0 };
        let predicted = format!("predicted to take {}", human::seconds(seconds));
        let reason = match self.then.is_empty() {
            true => format!("its build side is on the device already; {predicted}"),
            false => format!("{}; with the tables on the device already, {predicted}", self.reason),
        };
        let kept = KeptBuild { saved_seconds: self.seconds - seconds, saved_phases, ..kept };
        let of_further =
            |plan: &Self| Self { phases: plan.phases_on_kept_build(), kept_build: Some(kept.clone()), ..plan.clone() };
        let (phases, then) = (self.phases_on_kept_build(), self.then.iter().map(of_further).collect());
        Self { phases, seconds, reason, then, alternatives: Vec::new(), kept_build: Some(kept), ..self }
    }

    fn phases_on_kept_build(&self) -> Vec<PredictedPhase> {
        let left = |phase: &PredictedPhase| {
            let left = self.share_left(phase.phase);
            let (seconds, bytes) = (phase.seconds * left, (phase.bytes as f64 * left) as u64);
            (left > 0.0).then(|| PredictedPhase { seconds, bytes, ..phase.clone() })
        };
        self.phases.iter().filter_map(left).collect()
    }

    /// Returns the share of a phase that is left without the work on the build side.
    fn share_left(&self, phase: Phase) -> f64 {
        let rows = |role: Role| self.join.table(self.side(role)).rows as f64;
        let keyed = self.estimates.keyed(self.composition.build_side);
        match phase {
            Phase::PartitionBuild
            | Phase::CheckBuildOrder
            | Phase::SortBuild
            | Phase::BuildTable
            | Phase::GroupBuild => 0.0,
            Phase::PackKeys | Phase::CopyIn => rows(Role::Probe) / (rows(Role::Build) + rows(Role::Probe)).max(1.0),
            Phase::CompareKeys => self.estimates.pairs / (keyed + self.estimates.pairs).max(1.0),
            _ => 1.0,
        }
    }
}
