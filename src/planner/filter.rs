//! Decides if a filter of the build keys is worth its pass over the probe keys.

use super::inputs::Inputs;
use super::{BoundJoin, Estimates};
use crate::device::host::FILTER_FALSE_POSITIVES;

/// A filter has to save a tenth of the time, because the number of matching rows is less certain
/// than the cost of a pass.
pub(super) const WORTH: f64 = 0.9;

/// True if the statistics of both sides' keys suffice to tell what a filter is worth.
pub(super) fn is_predictable(inputs: &Inputs, estimates: &Estimates) -> bool {
    // With several key columns, the product of their distinct counts makes matches look rarer than
    // they are.
    [&inputs.build, &inputs.probe].into_iter().all(|input| estimates.are_counted(input.side))
}

/// Probe rows that pass a filter of the build keys; `None` if a filter is not possible.
pub(super) fn passing_rows(join: &BoundJoin, inputs: &Inputs) -> Option<f64> {
    let probe = &inputs.probe;
    if !join.how.drops_unmatched(probe.side) {
        return None;
    }
    let matched = probe.matched.min(probe.keyed);
    Some(matched + FILTER_FALSE_POSITIVES * (probe.keyed - matched))
}
