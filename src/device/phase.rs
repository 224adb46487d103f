//! Phases of a join, in which its work is predicted and measured.
//!
//! A thread knows the phase that it works for, so that measurements of a device can name the
//! purpose of its work.

use std::cell::Cell;
use std::fmt;

use serde::{Deserialize, Serialize};

/// Part of a join. The planner predicts its time, and a running join measures it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(into = "&'static str", try_from = "String")]
pub enum Phase {
    /// Packs, hashes or reads the keys of a side.
    PackKeys,
    /// Builds the filter of the build keys, and tests probe keys.
    Filter,
    CopyIn,
    /// Divides rows among the ranks of a gang, and moves them to the rank that joins them.
    Exchange,
    PartitionBuild,
    PartitionProbe,
    CheckBuildOrder,
    CheckProbeOrder,
    SortBuild,
    SortProbe,
    /// Makes equal keys adjacent in each partition of the build side.
    GroupBuild,
    /// Builds the hash table, or the array of dense keys.
    BuildTable,
    Match,
    /// Joins partitions in one step: match, expand and gather.
    Join,
    Expand,
    CompareKeys,
    Gather,
}

impl Phase {
    /// All phases, about in the order in which a join runs them.
    pub const ALL: [Self; 17] = [
        Self::PackKeys,
        Self::Filter,
        Self::CopyIn,
        Self::Exchange,
        Self::PartitionBuild,
        Self::PartitionProbe,
        Self::CheckBuildOrder,
        Self::CheckProbeOrder,
        Self::SortBuild,
        Self::SortProbe,
        Self::GroupBuild,
        Self::BuildTable,
        Self::Match,
        Self::Join,
        Self::Expand,
        Self::CompareKeys,
        Self::Gather,
    ];

    /// Returns the name in explanations and in records.
    pub fn name(self) -> &'static str {
        match self {
            Self::PackKeys => "pack keys",
            Self::Filter => "filter",
            Self::CopyIn => "copy in",
            Self::Exchange => "exchange",
            Self::PartitionBuild => "partition build",
            Self::PartitionProbe => "partition probe",
            Self::CheckBuildOrder => "check build order",
            Self::CheckProbeOrder => "check probe order",
            Self::SortBuild => "sort build",
            Self::SortProbe => "sort probe",
            Self::GroupBuild => "group build",
            Self::BuildTable => "build table",
            Self::Match => "match",
            Self::Join => "join",
            Self::Expand => "expand",
            Self::CompareKeys => "compare keys",
            Self::Gather => "gather",
        }
    }
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl From<Phase> for &'static str {
    fn from(phase: Phase) -> Self {
        phase.name()
    }
}

impl TryFrom<String> for Phase {
    type Error = String;

    fn try_from(name: String) -> Result<Self, String> {
        Self::ALL.into_iter().find(|phase| phase.name() == name).ok_or_else(|| format!("there is no phase {name:?}"))
    }
}

thread_local! {
    static PHASE: Cell<Option<Phase>> = const { Cell::new(None) };
}

/// Restores the thread's previous phase on drop.
struct Outer(Option<Phase>);

impl Drop for Outer {
    fn drop(&mut self) {
        PHASE.set(self.0);
    }
}

/// Runs `work` as part of a phase.
pub fn in_phase<T>(phase: Phase, work: impl FnOnce() -> T) -> T {
    let _outer = Outer(PHASE.replace(Some(phase)));
    work()
}

/// Phase that the calling thread works for.
#[cfg(any(dovetail_cuda, test))]
pub(super) fn current() -> Option<Phase> {
    PHASE.get()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_phase_ends_with_its_work_even_after_a_panic() {
        assert_eq!(current(), None);
        in_phase(Phase::Match, || {
            assert_eq!(in_phase(Phase::Gather, current), Some(Phase::Gather));
            assert!(crate::panics::caught(|| in_phase(Phase::Expand, || panic!("on purpose"))).is_err());
            assert_eq!(current(), Some(Phase::Match));
        });
        assert_eq!(current(), None);
    }

    #[test]
    fn names_read_back() {
        for phase in Phase::ALL {
            assert_eq!(Phase::try_from(phase.name().to_owned()), Ok(phase));
        }
        assert!(Phase::try_from("matching".to_owned()).is_err());
    }
}
