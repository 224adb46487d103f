//! Monitor of a running join: reports progress and phases, and takes the request to stop.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use crate::Result;
use crate::device::{CancelFlag, Phase, in_phase};

/// Record of one phase of a join.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PhaseRecord {
    pub phase: Phase,
    /// Wall-clock seconds, all probe batches together.
    pub seconds: f64,
    /// Bytes that had to be read and written.
    pub bytes: u64,
    /// Bytes that were asked for and not copied, because the device had cached them.
    pub kept_bytes: u64,
    /// Bytes that were not copied, because the device reads them in place.
    pub in_place_bytes: u64,
}

impl PhaseRecord {
    /// Adds the time and bytes of the same phase elsewhere.
    pub fn add(&mut self, other: &Self) {
        self.seconds += other.seconds;
        self.bytes += other.bytes;
        self.kept_bytes += other.kept_bytes;
        self.in_place_bytes += other.in_place_bytes;
    }

    /// Returns an equal share of the time and bytes.
    #[must_use]
    pub fn of_each(&self, shares: usize) -> Self {
        let of = |bytes: u64| bytes / shares as u64;
        Self {
            phase: self.phase,
            seconds: self.seconds / shares as f64,
            bytes: of(self.bytes),
            kept_bytes: of(self.kept_bytes),
            in_place_bytes: of(self.in_place_bytes),
        }
    }
}

/// Progress and phases that a join has reported.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Report {
    pub work_done: u64,
    pub work_total: u64,
    pub probed_rows: u64,
    /// In the order in which they first ran.
    pub phases: Vec<PhaseRecord>,
}

/// Bytes moved by a piece of a phase that counts its own bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Moved {
    pub(super) bytes: u64,
    pub(super) kept_bytes: u64,
    pub(super) in_place_bytes: u64,
}

/// Connects a join with its observers: progress and phases come out, and the request to stop goes
/// in.
#[derive(Debug, Default)]
pub struct Monitor {
    cancel: CancelFlag,
    work_done: AtomicU64,
    work_total: AtomicU64,
    probed_rows: AtomicU64,
    phases: Mutex<Vec<PhaseRecord>>,
    /// Number of looks at the cancel flag in each phase.
    #[cfg(test)]
    looks: Mutex<std::collections::BTreeMap<Phase, u64>>,
}

impl Monitor {
    /// Makes a monitor whose job stops when `cancel` is raised.
    pub fn new(cancel: CancelFlag) -> Self {
        Self { cancel, ..Self::default() }
    }

    /// Returns the flag that stops the job.
    pub fn cancel(&self) -> &CancelFlag {
        &self.cancel
    }

    /// Sets the work of the join, in the unit of [`advance`](Self::advance). For a join, the unit
    /// is a share of its predicted seconds.
    pub fn expect_work(&self, total: u64) {
        self.work_total.store(total, Ordering::Relaxed);
    }

    /// Adds work that is done.
    pub fn advance(&self, work: u64) {
        self.work_done.fetch_add(work, Ordering::Relaxed);
    }

    /// Adds probe rows that are joined.
    pub(super) fn add_probed_rows(&self, rows: u64) {
        self.probed_rows.fetch_add(rows, Ordering::Relaxed);
    }

    /// Returns the number of probe rows that are joined. It grows while the join runs, even if
    /// their total is unknown and [`progress`](Self::progress) is 0 until the end.
    pub fn probed_rows(&self) -> u64 {
        self.probed_rows.load(Ordering::Relaxed)
    }

    /// Returns the share of the work that is done, 0 to 1.
    pub fn progress(&self) -> f64 {
        match self.work_total.load(Ordering::Relaxed) {
            0 => 0.0,
            total => (self.work_done.load(Ordering::Relaxed) as f64 / total as f64).min(1.0),
        }
    }

    /// Runs a piece of a phase, and adds its time and bytes to the phase's record. Runs nothing if
    /// the job was stopped.
    ///
    /// # Errors
    /// [`Cancelled`](crate::Error::Cancelled), and the errors of `work`.
    pub fn phase<T>(&self, phase: Phase, bytes: u64, work: impl FnOnce() -> Result<T>) -> Result<T> {
        self.counted_phase(phase, |moved| {
            moved.bytes = bytes;
            work()
        })
    }

    /// Runs a piece of a phase like [`phase`](Self::phase), for work that counts its own bytes.
    ///
    /// # Errors
    /// The errors of [`phase`](Self::phase).
    pub(super) fn counted_phase<T>(&self, phase: Phase, work: impl FnOnce(&mut Moved) -> Result<T>) -> Result<T> {
        self.cancel.check()?;
        #[cfg(test)]
        let looks_before = self.cancel.looks();
        let start = Instant::now();
        let mut moved = Moved::default();
        let outcome = in_phase(phase, || work(&mut moved));
        let seconds = start.elapsed().as_secs_f64();
        #[cfg(test)]
        {
            *self.looks.lock().entry(phase).or_default() += self.cancel.looks() - looks_before;
        }
        let Moved { bytes, kept_bytes, in_place_bytes } = moved;
        let piece = PhaseRecord { phase, seconds, bytes, kept_bytes, in_place_bytes };
        let mut phases = self.phases.lock();
        match phases.iter_mut().find(|record| record.phase == phase) {
            Some(record) => record.add(&piece),
            None => phases.push(piece),
        }
        outcome
    }

    /// Replaces progress and phases by the latest report of a join that runs elsewhere.
    pub fn take_over(&self, report: Report) {
        self.work_done.store(report.work_done, Ordering::Relaxed);
        self.work_total.store(report.work_total, Ordering::Relaxed);
        self.probed_rows.store(report.probed_rows, Ordering::Relaxed);
        *self.phases.lock() = report.phases;
    }

    /// Returns the progress and phases so far.
    pub fn report(&self) -> Report {
        Report {
            work_done: self.work_done.load(Ordering::Relaxed),
            work_total: self.work_total.load(Ordering::Relaxed),
            probed_rows: self.probed_rows(),
            phases: self.phases(),
        }
    }

    /// Returns the number of looks at the flag in each phase so far.
    #[cfg(test)]
    pub(super) fn looks(&self) -> std::collections::BTreeMap<Phase, u64> {
        self.looks.lock().clone()
    }

    /// Returns the phases so far, in the order they first ran.
    pub fn phases(&self) -> Vec<PhaseRecord> {
        self.phases.lock().clone()
    }
}
