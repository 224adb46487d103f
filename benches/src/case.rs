//! A case: one entry of a suite, to prepare, join and check.

use serde_json::Value;

use super::check::Prepared;
use super::sequence::Sequence;
use super::tpc::TpcJoin;
use super::workload::Workload;
use dovetail::Result;

/// One case of a suite.
#[derive(Clone, Debug, PartialEq)]
pub enum Case {
    Synthetic(Workload),
    Sequence(Sequence),
    Tpc(TpcJoin),
}

impl Case {
    /// Returns the reason why the case cannot be made, or `None` if it can.
    pub fn impossible(&self) -> Option<String> {
        match self {
            Self::Synthetic(workload) => workload.impossible(),
            Self::Sequence(_) | Self::Tpc(_) => None,
        }
    }

    /// Returns the expected bytes of the case's tables and results.
    pub fn bytes(&self) -> u64 {
        match self {
            Self::Synthetic(workload) => workload.bytes(),
            Self::Sequence(sequence) => sequence.bytes(),
            Self::Tpc(join) => join.bytes(),
        }
    }

    /// Returns the bytes of the case's tables alone.
    pub fn table_bytes(&self) -> u64 {
        match self {
            Self::Synthetic(workload) => workload.table_bytes(),
            Self::Sequence(sequence) => sequence.table_bytes(),
            Self::Tpc(join) => join.table_bytes(),
        }
    }

    /// Describes the case, without its sizes.
    pub fn label(&self) -> String {
        match self {
            Self::Synthetic(workload) => workload.label(),
            Self::Sequence(sequence) => sequence.label(),
            Self::Tpc(join) => join.label(),
        }
    }

    /// Returns the case's axes, for a line of results.
    pub fn axes(&self) -> Vec<(&'static str, Value)> {
        match self {
            Self::Synthetic(workload) => workload.axes(),
            Self::Sequence(sequence) => sequence.axes(),
            Self::Tpc(join) => join.axes(),
        }
    }

    /// Makes the case's tables, and computes the expected result.
    ///
    /// # Errors
    /// [`Error::Invalid`](dovetail::Error::Invalid) when the tables cannot be made.
    pub fn prepare(&self) -> Result<Prepared> {
        match self {
            Self::Synthetic(workload) => workload.prepare(),
            Self::Sequence(sequence) => sequence.prepare(),
            Self::Tpc(join) => join.prepare(),
        }
    }
}
