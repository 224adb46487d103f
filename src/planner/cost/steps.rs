//! Steps of a run and their times: as separate phases, and in total where copies run in parallel
//! with primitives.

use serde::Serialize;

use super::super::Rates;
use super::memory::Chunks;
use super::resource::{Demand, Resource};
use crate::columns::Role;
use crate::device::Phase;
use crate::join::TransferOrder;

/// A predicted phase.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PredictedPhase {
    #[serde(rename = "name")]
    pub phase: Phase,
    /// Bytes read and written.
    pub bytes: u64,
    pub seconds: f64,
}

/// A part of a phase, for one side.
#[derive(Clone, Copy, Debug)]
pub(super) struct Step {
    pub(super) phase: Phase,
    pub(super) role: Role,
    /// Bytes read and written.
    pub(super) bytes: f64,
    /// Seconds of each resource, except `deferrable`.
    pub(super) demand: Demand,
    /// Seconds of each resource for columns that are needed only once the result is gathered from
    /// them.
    pub(super) deferrable: Demand,
    /// Minimum seconds of the step's calls of primitives.
    pub(super) calls: f64,
    pub(super) call_count: f64,
    /// Rows that are shared out by morsels; `None` if the step does not use morsels.
    pub(super) morsel_rows: Option<f64>,
}

impl Step {
    /// Returns a step that keeps the device busy for `work` seconds. Its calls are added later.
    pub(super) fn new(phase: Phase, role: Role, bytes: f64, work: f64) -> Self {
        Self {
            phase,
            role,
            bytes,
            demand: Demand::of(Resource::Device, work),
            deferrable: Demand::default(),
            calls: 0.0,
            call_count: 0.0,
            morsel_rows: None,
        }
    }

    /// Adds the demand of copies.
    pub(super) fn copying(self, demand: Demand) -> Self {
        Self { demand: self.demand + demand, ..self }
    }

    /// Adds the demand of copies that may come after the probe side.
    pub(super) fn deferring(self, demand: Demand) -> Self {
        Self { deferrable: self.deferrable + demand, ..self }
    }

    /// Adds the given number of calls of `seconds` each.
    pub(super) fn calling(self, calls: f64, seconds: f64) -> Self {
        Self { calls: self.calls + calls * seconds, call_count: self.call_count + calls, ..self }
    }

    /// Marks the step's rows as shared out by morsels.
    pub(super) fn by_morsels_of(self, rows: f64) -> Self {
        Self { morsel_rows: Some(rows), ..self }
    }

    /// True if the step reads, writes and copies nothing.
    pub(super) fn is_idle(&self) -> bool {
        self.bytes <= 0.0 && self.busy().sum() <= 0.0
    }

    fn busy(&self) -> Demand {
        self.demand + self.deferrable
    }

    /// Seconds of the step alone. Its rows are copied out in parallel with the work that makes
    /// them.
    fn seconds(&self) -> f64 {
        self.busy().after_arrival(Demand::default()) + self.calls
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

/// A rank's share of the memory of the host.
#[derive(Clone, Copy, Debug)]
pub(super) struct HostShare {
    /// Bytes per second.
    pub(super) rate: f64,
    /// Bytes that ranks copy out on average, over those of the priced rank.
    pub(super) mean_out: f64,
}

/// Total seconds of all steps, and the resource that is busy for longest.
///
/// Without overlap, that is their sum. With overlap, the steps of each role add up by resource, and
/// copies run in parallel with primitives.
///
/// The columns of the build side that are transformed must arrive before transforming begins. Its
/// deferrable columns arrive meanwhile, or after the probe side. Chunks of the probe side then go
/// round between the resources, as [`Demand::in_chunks`] says.
///
/// One driver takes the calls one by one. Streams begin together, so nothing else is done during
/// the calls of each stream's first chunk.
///
/// The links of all devices of a gang share the memory of the host.
pub(super) fn total_seconds(steps: &[Step], chunks: Chunks, rates: &Rates, host: HostShare) -> (f64, Demand) {
    let busy: Demand = steps.iter().map(|step| step.busy()).sum();
    if !rates.copies_overlap {
        return (steps.iter().map(Step::seconds).sum(), busy);
    }
    let of = |role: Role| steps.iter().filter(move |step| step.role == role);
    let demand = |role: Role| -> Demand { of(role).map(|step| step.demand).sum() };
    let deferrable = |role: Role| -> Demand { of(role).map(|step| step.deferrable).sum() };
    let calls = |role: Role| -> f64 { of(role).map(|step| step.calls).sum() };
    let (meanwhile, later) = match chunks.transfer_order {
        TransferOrder::DeferBuildPayload => (Demand::default(), deferrable(Role::Build)),
        TransferOrder::Chunks | TransferOrder::ProbeAtOnce => (deferrable(Role::Build), Demand::default()),
    };
    let of_build = demand(Role::Build);
    let build = of_build.after_arrival(meanwhile) + calls(Role::Build);
    let probe = demand(Role::Probe) + deferrable(Role::Probe) + later;
    let calls = calls(Role::Probe);
    let overlapped = probe.in_chunks(chunks.at_once) + calls * chunks.at_once / chunks.count;
    let of_driver = probe.sum() / chunks.at_once + calls;
    let crossing = |demand: Demand| {
        demand[Resource::LinkIn] * rates.copy_in + host.mean_out * demand[Resource::LinkOut] * rates.copy_out
    };
    let of_host = |demand: Demand| crossing(demand) / host.rate;
    let build = build.max(of_host(of_build + meanwhile));
    let seconds = JOB_CALLS * rates.call_seconds + build + overlapped.max(of_driver).max(of_host(probe));
    (seconds, busy.with(Resource::HostMemory, of_host(busy)))
}
