//! One line of a suite: something to prepare, join and check.

use serde_json::Value;

use super::check::Prepared;
use super::sequence::Sequence;
use super::tpc::TpcJoin;
use super::workload::Workload;
use dovetail::Result;

/// What a suite is made of.
#[derive(Clone, Debug, PartialEq)]
pub enum Case {
    /// A synthetic join.
    Synthetic(Workload),
    /// Joins that follow on each other.
    Sequence(Sequence),
    /// A join of a standard benchmark.
    Tpc(TpcJoin),
}

impl Case {
    /// Why it cannot be made; `None` when it can.
    pub fn impossible(&self) -> Option<String> {
        match self {
            Self::Synthetic(workload) => workload.impossible(),
            Self::Sequence(_) | Self::Tpc(_) => None,
        }
    }

    /// Bytes of its tables and results, as far as they are known beforehand.
    pub fn bytes(&self) -> u64 {
        match self {
            Self::Synthetic(workload) => workload.bytes(),
            Self::Sequence(sequence) => sequence.bytes(),
            Self::Tpc(join) => join.bytes(),
        }
    }

    /// Bytes of its tables alone.
    pub fn table_bytes(&self) -> u64 {
        match self {
            Self::Synthetic(workload) => workload.table_bytes(),
            Self::Sequence(sequence) => sequence.table_bytes(),
            Self::Tpc(join) => join.table_bytes(),
        }
    }

    /// What it is, without its sizes.
    pub fn label(&self) -> String {
        match self {
            Self::Synthetic(workload) => workload.label(),
            Self::Sequence(sequence) => sequence.label(),
            Self::Tpc(join) => join.label(),
        }
    }

    /// Its axes, for a line of results.
    pub fn axes(&self) -> Vec<(&'static str, Value)> {
        match self {
            Self::Synthetic(workload) => workload.axes(),
            Self::Sequence(sequence) => sequence.axes(),
            Self::Tpc(join) => join.axes(),
        }
    }

    /// Makes its tables, and works out what their join must be.
    ///
    /// # Errors
    /// [`Error::Invalid`](dovetail::Error::Invalid) when they cannot be made.
    pub fn prepare(&self) -> Result<Prepared> {
        match self {
            Self::Synthetic(workload) => workload.prepare(),
            Self::Sequence(sequence) => sequence.prepare(),
            Self::Tpc(join) => join.prepare(),
        }
    }
}
