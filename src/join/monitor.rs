//! Monitor of a running join: reports progress and phases, and takes the request to stop.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use super::ChainReport;
use crate::Result;
use crate::device::{CancelFlag, DeviceId, Phase, in_phase};

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
    /// Build rows that the ranks have, whether or not they have a key.
    pub build_rows: u64,
    /// Bytes sent to other ranks.
    pub sent_bytes: u64,
    /// Seconds in which rows were sent to other ranks, or waited for room there.
    pub sending_seconds: f64,
    /// In the order in which they first ran.
    pub phases: Vec<PhaseRecord>,
    /// Rows that passed through the joins of a chain. Empty for any other join.
    pub chain: ChainReport,
    /// Ranks of a gang, by number. Empty for a rank, and for a join on one device.
    pub ranks: Vec<RankReport>,
}

impl Report {
    /// Returns the report of a call that follows others of the same job: their rows, times and
    /// bytes are added. The progress is that of the call.
    #[must_use]
    pub fn following(mut self, before: &Self) -> Self {
        self.probed_rows += before.probed_rows;
        self.build_rows += before.build_rows;
        self.sent_bytes += before.sent_bytes;
        self.sending_seconds += before.sending_seconds;
        let (mut phases, mut chain) = (before.phases.clone(), before.chain.clone());
        add_phases(&mut phases, self.phases);
        chain.extend(&self.chain);
        Self { phases, chain, ..self }
    }
}

/// Adds times and bytes to those of the same phases, and appends other phases.
pub fn add_phases(phases: &mut Vec<PhaseRecord>, further: impl IntoIterator<Item = PhaseRecord>) {
    for phase in further {
        match phases.iter_mut().find(|known| known.phase == phase.phase) {
            Some(known) => known.add(&phase),
            None => phases.push(phase),
        }
    }
}

/// Part of a rank in the work of its gang.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RankReport {
    /// Name of the rank's device.
    pub device: String,
    /// Build rows that the rank has. Rows without a key cross to no other rank.
    pub build_rows: u64,
    /// Rows of the probe side that the rank has joined.
    pub probe_rows: u64,
    /// Bytes sent to other ranks.
    pub sent_bytes: u64,
    /// Seconds in which the rank sent rows, or waited for room to send them.
    pub sending_seconds: f64,
    /// Seconds of all phases, summed over the rank's threads.
    pub work_seconds: f64,
}

impl RankReport {
    /// Returns the part of a rank that has reported this.
    pub fn of(device: DeviceId, report: &Report) -> Self {
        Self {
            device: device.to_string(),
            build_rows: report.build_rows,
            probe_rows: report.probed_rows,
            sent_bytes: report.sent_bytes,
            sending_seconds: report.sending_seconds,
            work_seconds: report.phases.iter().map(|phase| phase.seconds).sum(),
        }
    }
}

/// Time during which at least one thread sends rows to other ranks.
#[derive(Debug, Default)]
struct Sending {
    bytes: u64,
    seconds: f64,
    threads: usize,
    /// Start of the time that is not counted yet.
    since: Option<Instant>,
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
    build_rows: AtomicU64,
    sending: Mutex<Sending>,
    phases: Mutex<Vec<PhaseRecord>>,
    chain: Mutex<ChainReport>,
    ranks: Mutex<Vec<RankReport>>,
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

    /// Adds rows that passed through the joins of a chain.
    pub(super) fn add_chain_rows(&self, rows: &ChainReport) {
        self.chain.lock().extend(rows);
    }

    /// Sets the number of build rows.
    pub(super) fn set_build_rows(&self, rows: u64) {
        self.build_rows.store(rows, Ordering::Relaxed);
    }

    /// Sends bytes to another rank. Any number of threads may send.
    ///
    /// # Errors
    /// The errors of `send`.
    pub(super) fn sending(&self, bytes: u64, send: impl FnOnce() -> Result<()>) -> Result<()> {
        {
            let mut sending = self.sending.lock();
            sending.threads += 1;
            sending.since.get_or_insert_with(Instant::now);
        }
        let outcome = send();
        let mut sending = self.sending.lock();
        sending.threads -= 1;
        if outcome.is_ok() {
            sending.bytes += bytes;
        }
        if sending.threads == 0 {
            sending.seconds += sending.since.take().map_or(0.0, |since| since.elapsed().as_secs_f64());
        }
        outcome
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
        add_phases(&mut self.phases.lock(), [piece]);
        outcome
    }

    /// Replaces progress and phases by the latest report of a join that runs elsewhere.
    pub fn take_over(&self, report: Report) {
        self.work_done.store(report.work_done, Ordering::Relaxed);
        self.work_total.store(report.work_total, Ordering::Relaxed);
        self.probed_rows.store(report.probed_rows, Ordering::Relaxed);
        self.build_rows.store(report.build_rows, Ordering::Relaxed);
        *self.sending.lock() =
            Sending { bytes: report.sent_bytes, seconds: report.sending_seconds, ..Sending::default() };
        *self.phases.lock() = report.phases;
        *self.chain.lock() = report.chain;
        *self.ranks.lock() = report.ranks;
    }

    /// Returns the progress and phases so far.
    pub fn report(&self) -> Report {
        let (sent_bytes, sending_seconds) = {
            let sending = self.sending.lock();
            (sending.bytes, sending.seconds)
        };
        Report {
            work_done: self.work_done.load(Ordering::Relaxed),
            work_total: self.work_total.load(Ordering::Relaxed),
            probed_rows: self.probed_rows(),
            build_rows: self.build_rows.load(Ordering::Relaxed),
            sent_bytes,
            sending_seconds,
            phases: self.phases(),
            chain: self.chain(),
            ranks: self.ranks(),
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

    /// Returns the rows that passed through the joins of a chain so far.
    pub fn chain(&self) -> ChainReport {
        self.chain.lock().clone()
    }

    /// Returns the parts of a gang's ranks so far; empty for a join on one device.
    pub fn ranks(&self) -> Vec<RankReport> {
        self.ranks.lock().clone()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::Error;
    use crate::join::PassedRows;

    #[test]
    fn the_report_of_a_later_call_adds_to_those_before_it() {
        let of = |phase, seconds, rows| Report {
            work_done: 1,
            work_total: 2,
            probed_rows: rows,
            phases: vec![PhaseRecord { phase, seconds, bytes: 8, kept_bytes: 1, in_place_bytes: 0 }],
            chain: ChainReport::of(vec![0], vec![PassedRows { rows, kept: 1 }]),
            ..Report::default()
        };
        let monitor = Monitor::default();
        monitor.take_over(of(Phase::Match, 0.5, 10));
        let before = monitor.report();
        // Each report of the call stands for the whole call so far.
        monitor.take_over(of(Phase::Match, 0.25, 3).following(&before));
        monitor.take_over(of(Phase::Match, 1.0, 5).following(&before));
        let report = monitor.report();
        assert_eq!((report.probed_rows, report.work_done, report.work_total), (15, 1, 2));
        assert_eq!((report.phases.len(), report.phases[0].seconds, report.phases[0].bytes), (1, 1.5, 16));
        assert_eq!(report.chain.joins, [PassedRows { rows: 15, kept: 2 }]);
        monitor.take_over(of(Phase::Gather, 1.0, 0).following(&report));
        assert_eq!(monitor.phases().iter().map(|phase| phase.phase).collect::<Vec<_>>(), [Phase::Match, Phase::Gather]);
    }

    #[test]
    fn time_in_which_several_threads_send_counts_once() {
        let monitor = Monitor::default();
        let pause = Duration::from_millis(20);
        let start = Instant::now();
        // Both threads send at the same time: each waits for the other.
        let both = std::sync::Barrier::new(2);
        let send = || {
            monitor.sending(5, || {
                both.wait();
                std::thread::sleep(pause);
                both.wait();
                Ok(())
            })
        };
        std::thread::scope(|scope| {
            scope.spawn(|| send().unwrap());
            send().unwrap();
        });
        assert_eq!(monitor.sending(7, || Err(Error::Cancelled("no".into()))), Err(Error::Cancelled("no".into())));
        let (report, elapsed) = (monitor.report(), start.elapsed().as_secs_f64());
        assert_eq!(report.sent_bytes, 10, "only bytes that were sent count");
        assert!(report.sending_seconds >= pause.as_secs_f64(), "{report:?}");
        assert!(report.sending_seconds <= elapsed, "{report:?} in {elapsed} s");
    }
}
