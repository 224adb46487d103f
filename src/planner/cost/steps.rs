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
    /// Of these, for what is done to keys as they arrive.
    pub(super) on_arrival: f64,
    /// Seconds of the link from the device; they run beside the work that makes the bytes.
    pub(super) copy_out: f64,
    /// Calls of primitives, each of which takes a while however little it does.
    pub(super) calls: f64,
    /// Seconds of calls that are made of several.
    pub(super) long_calls: f64,
    /// True if its calls are not waited for, so that they are made while what they work on crosses the link.
    pub(super) is_queued: bool,
    /// Seconds that it takes beyond its work, because a part of the device does most of that while others have none.
    pub(super) idle: f64,
    /// Rows that are shared out by morsels, where that is how it is done.
    pub(super) morsel_rows: Option<f64>,
}

impl Step {
    /// Of the device alone, by one call.
    pub(super) fn new(name: &'static str, role: Role, bytes: f64, work: f64) -> Self {
        Self {
            name,
            role,
            bytes,
            copy_in: 0.0,
            beside: 0.0,
            work,
            on_arrival: 0.0,
            copy_out: 0.0,
            calls: 1.0,
            long_calls: 0.0,
            is_queued: false,
            idle: 0.0,
            morsel_rows: None,
        }
    }

    pub(super) fn copying_in(self, copy_in: f64) -> Self {
        Self { copy_in, ..self }
    }

    pub(super) fn calling(self, calls: f64) -> Self {
        Self { calls, ..self }
    }

    /// The same step, with calls that take that many seconds each.
    pub(super) fn calling_for(self, calls: f64, seconds: f64) -> Self {
        Self { calls: 0.0, long_calls: calls * seconds, ..self }
    }

    /// That is queued, and not waited for.
    pub(super) fn queued(self) -> Self {
        Self { is_queued: true, ..self }
    }

    /// The same step, with rows that are shared out by morsels.
    pub(super) fn by_morsels_of(self, rows: f64) -> Self {
        Self { morsel_rows: Some(rows), ..self }
    }

    /// That leaves most of the device idle for so long.
    pub(super) fn idling(self, seconds: f64) -> Self {
        Self { idle: seconds, ..self }
    }

    /// Seconds that its calls take however little they do.
    fn calling_seconds(&self, rates: &Rates) -> f64 {
        self.calls * rates.call_seconds + self.long_calls
    }

    fn seconds(&self, rates: &Rates) -> f64 {
        self.copy_in + self.work.max(self.copy_out) + self.calling_seconds(rates) + self.idle
    }
}

/// Steps of one name together, in the order of the first of each.
pub(super) fn phases_of(steps: &[Step], rates: &Rates) -> Vec<PredictedPhase> {
    let mut phases: Vec<PredictedPhase> = Vec::new();
    for step in steps {
        let (bytes, seconds) = (step.bytes as u64, step.seconds(rates));
        match phases.iter_mut().find(|phase| phase.name == step.name) {
            Some(phase) => (phase.bytes, phase.seconds) = (phase.bytes + bytes, phase.seconds + seconds),
            None => phases.push(PredictedPhase { name: step.name, bytes, seconds }),
        }
    }
    phases
}

/// What all steps take together.
///
/// Where nothing overlaps, that is their sum. Where copies run beside primitives, what is arranged of the build side must have
/// arrived before that begins, but for keys that are entered into a table as they come; its other columns arrive meanwhile, or after the
/// probe side; chunks of the probe side go round between
/// link in, device and link out, several at a time. How long that takes is known from
/// closed queueing networks: no less than the busiest of the three is needed (the roofline), and at most so long as if each
/// chunk found all others waiting at that one (Zahorjan et al. 1982, "Balanced job bound analysis of queueing networks"), which is
/// what is taken: with one chunk at a time it is the sum, with many it is the busiest. Calls are made through one driver, which takes
/// them one by one; streams begin together, so that nothing else is done during the calls of each one's first chunk. With one chunk, calls
/// that nobody waits for are made while the rows cross the link.
pub(super) fn total_seconds(steps: &[Step], chunks: Chunks, rates: &Rates) -> f64 {
    if !rates.copies_overlap {
        return steps.iter().map(|step| step.seconds(rates)).sum();
    }
    let of = |role: Role, seconds: &dyn Fn(&Step) -> f64| -> f64 {
        steps.iter().filter(|step| step.role == role).map(seconds).sum()
    };
    let of_build = |seconds: &dyn Fn(&Step) -> f64| of(Role::Build, seconds);
    let of_probe = |seconds: &dyn Fn(&Step) -> f64| of(Role::Probe, seconds);
    let (copy_in, work, idle) =
        (of_build(&|step| step.copy_in), of_build(&|step| step.work), of_build(&|step| step.idle));
    let beside = of_build(&|step| step.beside);
    let (while_indexed, later) = if chunks.build_columns_last { (0.0, beside) } else { (beside, 0.0) };
    let arriving = copy_in - beside;
    // Keys that are there already are entered at once.
    let on_arrival = if arriving > 0.0 { of_build(&|step| step.on_arrival) } else { 0.0 };
    let calls_of = |role: Role, copy_in: f64| {
        let queued = of(role, &|step| if step.is_queued { step.calling_seconds(rates) } else { 0.0 });
        of(role, &|step| step.calling_seconds(rates)) - queued.min(copy_in)
    };
    let calls = calls_of(Role::Build, arriving + while_indexed);
    let build = arriving.max(on_arrival) + (work - on_arrival).max(while_indexed) + calls + idle;
    let of_own = of_probe(&|step| step.copy_in);
    let (copy_in, work, copy_out) = (of_own + later, of_probe(&|step| step.work), of_probe(&|step| step.copy_out));
    let (calls, idle) = (of_probe(&|step| step.calling_seconds(rates)), of_probe(&|step| step.idle));
    let before = JOB_SECONDS + build;
    if chunks.at_once <= 1.0 {
        return before + copy_in + work + copy_out / LINK_OUT_BUSY + idle + calls_of(Role::Probe, of_own);
    }
    let others = (chunks.at_once - 1.0) * copy_in.max(work).max(copy_out);
    let overlapped = (copy_in + work + copy_out + idle + others) / chunks.at_once;
    let of_first_chunks = calls * chunks.at_once / chunks.count;
    before + (overlapped + of_first_chunks).max((copy_in + work + copy_out + idle) / chunks.at_once + calls)
}

/// What a join takes on a GPU beside its steps and more than on the CPU, which has less to begin and to end. (An H200, 77851dd: joins of up to
/// 2^14 rows without text, `mix.py --draw 60`, take 0.20 ms more than their steps on the GPU and 0.04 on the CPU.)
const JOB_SECONDS: f64 = 160e-6;

/// The share of the time in which the link has something to carry while one stream gathers and sends, piece by piece. (An H200, 739e7d0: 81
/// joins of 3 to 12 ms in one chunk take 1.08 to 1.12 times what is predicted without it, and 54 in several 1.03 to 1.05.)
const LINK_OUT_BUSY: f64 = 0.92;
