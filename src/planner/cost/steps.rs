//! Steps of a run and their times: as separate phases, and in total where copies run in parallel
//! with primitives.

use serde::Serialize;

use super::super::Rates;
use super::memory::Chunks;
use crate::columns::Role;
use crate::device::Phase;
use crate::join::TransferOrder;

/// A predicted phase.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PredictedPhase {
    /// The phase that a running join records.
    #[serde(rename = "name")]
    pub phase: Phase,
    /// Bytes read and written.
    pub bytes: u64,
    /// Seconds.
    pub seconds: f64,
}

/// A part of a phase, for one side.
#[derive(Clone, Copy, Debug)]
pub(super) struct Step {
    pub(super) phase: Phase,
    pub(super) role: Role,
    /// Bytes read and written.
    pub(super) bytes: f64,
    /// Seconds of the link to the device.
    pub(super) copy_in: f64,
    /// Part of `copy_in` for columns that are needed only once the result is gathered from them.
    pub(super) beside: f64,
    /// Seconds of the device.
    pub(super) work: f64,
    /// Seconds of the link from the device, in parallel with the work that makes the bytes.
    pub(super) copy_out: f64,
    /// Minimum seconds of the step's calls of primitives.
    pub(super) calls: f64,
    /// Number of calls of primitives.
    pub(super) call_count: f64,
    /// Rows that are shared out by morsels; `None` if the step does not use morsels.
    pub(super) morsel_rows: Option<f64>,
}

impl Step {
    /// Returns a step of the device alone. Its calls are added later.
    pub(super) fn new(phase: Phase, role: Role, bytes: f64, work: f64) -> Self {
        Self {
            phase,
            role,
            bytes,
            copy_in: 0.0,
            beside: 0.0,
            work,
            copy_out: 0.0,
            calls: 0.0,
            call_count: 0.0,
            morsel_rows: None,
        }
    }

    /// Adds the given number of calls of `seconds` each.
    pub(super) fn calling(self, calls: f64, seconds: f64) -> Self {
        Self { calls: self.calls + calls * seconds, call_count: self.call_count + calls, ..self }
    }

    /// Marks the step's rows as shared out by morsels.
    pub(super) fn by_morsels_of(self, rows: f64) -> Self {
        Self { morsel_rows: Some(rows), ..self }
    }

    fn seconds(&self) -> f64 {
        self.copy_in + self.work.max(self.copy_out) + self.calls
    }
}

/// Sums the steps of each phase, in the order of first appearance.
pub(super) fn phases_of(steps: &[Step]) -> Vec<PredictedPhase> {
    let mut phases: Vec<PredictedPhase> = Vec::new();
    for step in steps {
        let (bytes, seconds) = (step.bytes as u64, step.seconds());
        match phases.iter_mut().find(|phase| phase.phase == step.phase) {
            Some(phase) => (phase.bytes, phase.seconds) = (phase.bytes + bytes, phase.seconds + seconds),
            None => phases.push(PredictedPhase { phase: step.phase, bytes, seconds }),
        }
    }
    phases
}

/// Calls that begin and end a join on a GPU, in addition to those of its steps. (60 small joins
/// took 0.26 ms more than their steps on an H100, whose calls took 13 µs: `mix.py --draw 60` at
/// e736af3.)
const JOB_CALLS: f64 = 20.0;

/// Total seconds of all steps.
///
/// Without overlap, that is their sum. If copies run in parallel with primitives, the transformed
/// columns of the build side must arrive before transforming begins. Its other columns arrive
/// meanwhile, or after the probe side.
///
/// Chunks of the probe side go round between link in, device and link out, several at a time.
/// Closed queueing networks bound the time. It is at least the time of the busiest of the three
/// (the roofline). It is at most the time for which each chunk would find all others waiting at the
/// busiest one (Zahorjan et al. 1982, "Balanced job bound analysis of queueing networks"). The
/// upper bound is used. With one chunk at a time it is the sum of the three times, and with many it
/// is the busiest one's time.
///
/// One driver takes the calls one by one. Streams begin together, so nothing else is done during
/// the calls of each stream's first chunk.
pub(super) fn total_seconds(steps: &[Step], chunks: Chunks, rates: &Rates) -> f64 {
    if !rates.copies_overlap {
        return steps.iter().map(Step::seconds).sum();
    }
    let of = |role: Role, seconds: &dyn Fn(&Step) -> f64| -> f64 {
        steps.iter().filter(|step| step.role == role).map(seconds).sum()
    };
    let of_build = |seconds: &dyn Fn(&Step) -> f64| of(Role::Build, seconds);
    let of_probe = |seconds: &dyn Fn(&Step) -> f64| of(Role::Probe, seconds);
    let beside = of_build(&|step| step.beside);
    let (meanwhile, later) = match chunks.transfer_order {
        TransferOrder::DeferBuildPayload => (0.0, beside),
        TransferOrder::Chunks | TransferOrder::ProbeAtOnce => (beside, 0.0),
    };
    let build = of_build(&|step| step.copy_in - step.beside)
        + of_build(&|step| step.work).max(meanwhile)
        + of_build(&|step| step.calls);
    let copy_in = of_probe(&|step| step.copy_in) + later;
    let (work, copy_out) = (of_probe(&|step| step.work), of_probe(&|step| step.copy_out));
    let (alone, calls) = (copy_in + work + copy_out, of_probe(&|step| step.calls));
    let others = (chunks.at_once - 1.0) * copy_in.max(work).max(copy_out);
    let of_first_chunks = calls * chunks.at_once / chunks.count;
    let overlapped = (alone + others) / chunks.at_once + of_first_chunks;
    JOB_CALLS * rates.call_seconds + build + overlapped.max(alone / chunks.at_once + calls)
}
