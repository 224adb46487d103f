//! Steps of a run, and what they take: as phases by themselves, and all together where copies run beside primitives.

use serde::Serialize;

use super::super::Rates;
use super::memory::Chunks;
use crate::columns::Role;

/// A phase as it is predicted.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PredictedPhase {
    /// As a running join calls it.
    pub name: &'static str,
    /// Bytes read and written.
    pub bytes: u64,
    /// Seconds.
    pub seconds: f64,
}

/// A part of a phase, for one side.
#[derive(Clone, Copy, Debug)]
pub(super) struct Step {
    pub(super) name: &'static str,
    pub(super) role: Role,
    /// Bytes read and written.
    pub(super) bytes: f64,
    /// Seconds of the link to the device.
    pub(super) copy_in: f64,
    /// Of these, for columns that nothing waits for before the result is gathered from them.
    pub(super) beside: f64,
    /// Seconds of the device.
    pub(super) work: f64,
    /// Seconds of the link from the device; they run beside the work that makes the bytes.
    pub(super) copy_out: f64,
    /// Seconds that its calls of primitives take, however little they do.
    pub(super) calls: f64,
    /// How many these are.
    pub(super) call_count: f64,
    /// Rows that are shared out by morsels, where that is how it is done.
    pub(super) morsel_rows: Option<f64>,
}

impl Step {
    /// Of the device alone. Its calls are still to be added.
    pub(super) fn new(name: &'static str, role: Role, bytes: f64, work: f64) -> Self {
        Self {
            name,
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

    /// The same step, with that many calls of so many seconds each.
    pub(super) fn calling(self, calls: f64, seconds: f64) -> Self {
        Self { calls: self.calls + calls * seconds, call_count: self.call_count + calls, ..self }
    }

    /// The same step, with rows that are shared out by morsels.
    pub(super) fn by_morsels_of(self, rows: f64) -> Self {
        Self { morsel_rows: Some(rows), ..self }
    }

    fn seconds(&self) -> f64 {
        self.copy_in + self.work.max(self.copy_out) + self.calls
    }
}

/// Steps of one name together, in the order of the first of each.
pub(super) fn phases_of(steps: &[Step]) -> Vec<PredictedPhase> {
    let mut phases: Vec<PredictedPhase> = Vec::new();
    for step in steps {
        let (bytes, seconds) = (step.bytes as u64, step.seconds());
        match phases.iter_mut().find(|phase| phase.name == step.name) {
            Some(phase) => (phase.bytes, phase.seconds) = (phase.bytes + bytes, phase.seconds + seconds),
            None => phases.push(PredictedPhase { name: step.name, bytes, seconds }),
        }
    }
    phases
}

/// Calls that begin and end a join on a GPU, beside those of its steps. (60 small joins took 0.26 ms more than their steps on an H100,
/// whose calls took 13 µs: `mix.py --draw 60` at e736af3.)
const JOB_CALLS: f64 = 20.0;

/// What all steps take together.
///
/// Where nothing overlaps, that is their sum. Where copies run beside primitives, what is arranged of the build side must have arrived
/// before that begins; its other columns arrive meanwhile, or after the probe side. Chunks of the probe side go round between link in,
/// device and link out, several at a time. How long that takes is known from closed queueing networks: no less than the busiest of the
/// three is needed (the roofline), and at most so long as if each chunk found all others waiting at that one (Zahorjan et al. 1982,
/// "Balanced job bound analysis of queueing networks"), which is what is taken: with one chunk at a time it is the sum, with many it is the
/// busiest. Calls are made through one driver, which takes them one by one; streams begin together, so that nothing else is done during the
/// calls of each one's first chunk.
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
    let (meanwhile, later) = if chunks.build_columns_last { (0.0, beside) } else { (beside, 0.0) };
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
