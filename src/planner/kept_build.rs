//! Plans of joins whose build side is on the device already.

use std::fmt;
use std::time::SystemTime;

use super::{Composition, Plan};
use crate::columns::Role;
use crate::device::Phase;
use crate::human;

/// Build side that an earlier join has prepared on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeptBuild {
    /// Number of the prepared build side.
    pub number: u64,
    /// Time at which it was prepared.
    pub since: SystemTime,
}

impl KeptBuild {
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
    /// Returns the plan without the work on the build side, which is on the device already. It was
    /// prepared with the given composition. Alternatives are left out: their predicted times
    /// include that work.
    #[must_use]
    pub fn on_kept_build(self, kept: KeptBuild, composition: Composition) -> Self {
        let stages = self.stage_seconds();
        let of_build = stages.transform_build + stages.index_build;
        let whole = of_build + stages.transform_probe + stages.results + stages.kept_build;
        let seconds = self.seconds * if whole > 0.0 { (1.0 - of_build / whole).max(0.0) } else { 1.0 };
        let rows = |role: Role| self.join.table(self.side(role)).rows as f64;
        let keyed = self.estimates.keyed(self.composition.build_side);
        let left = |phase: Phase| match phase {
            Phase::PartitionBuild
            | Phase::CheckBuildOrder
            | Phase::SortBuild
            | Phase::BuildTable
            | Phase::GroupBuild => 0.0,
            Phase::PackKeys | Phase::CopyIn => rows(Role::Probe) / (rows(Role::Build) + rows(Role::Probe)).max(1.0),
            Phase::CompareKeys => self.estimates.pairs / (keyed + self.estimates.pairs).max(1.0),
            _ => 1.0,
        };
        let mut phases = self.phases.clone();
        for phase in &mut phases {
            let left = left(phase.phase);
            (phase.seconds, phase.bytes) = (phase.seconds * left, (phase.bytes as f64 * left) as u64);
        }
        phases.retain(|phase| left(phase.phase) > 0.0);
        let reason = format!("its build side is on the device already; predicted to take {}", human::seconds(seconds));
        let alternatives = Vec::new();
        Self { composition, phases, seconds, reason, alternatives, kept_build: Some(kept), ..self }
    }
}
