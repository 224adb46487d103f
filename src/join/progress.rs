//! Progress of a join, measured by the predicted seconds of each stage.

use super::StageSeconds;
use super::monitor::Monitor;

/// Part of a join that starts when the part before it is done. [`StageSeconds`] has the seconds of
/// each part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    TransformBuild,
    /// Builds tables on the build side, or groups and compares its keys.
    IndexBuild,
    /// Copies in and transforms the probe side, a chunk at a time.
    TransformProbe,
    /// Matches probe rows, while the result leaves.
    Results,
    /// Emits the build rows that the kind of join keeps, at the end.
    KeptBuild,
}

const STAGES: usize = 5;

/// Advances a monitor as stages advance. Reported progress never goes back. Only
/// [`finish`](Self::finish) reports the last step.
#[derive(Debug)]
pub(super) struct Progress<'a> {
    monitor: &'a Monitor,
    steps: [u64; STAGES],
    /// Steps reported to the monitor.
    told: [u64; STAGES],
}

impl<'a> Progress<'a> {
    /// Starts with nothing done.
    pub(super) fn new(expected: &StageSeconds, monitor: &'a Monitor) -> Self {
        /// Number of steps, finer than a user can see.
        const STEPS: f64 = 1e6;
        let StageSeconds { transform_build, index_build, transform_probe, results, kept_build } = *expected;
        let weights: [f64; STAGES] = [transform_build, index_build, transform_probe, results, kept_build];
        let sum: f64 = weights.iter().sum();
        // Empty tables are predicted to take no time.
        let share = |weight: f64| if sum > 0.0 && sum.is_finite() { weight / sum } else { 1.0 / STAGES as f64 };
        let steps = weights.map(|weight| (STEPS * share(weight)) as u64);
        monitor.expect_work(steps.iter().sum::<u64>() + 1);
        Self { monitor, steps, told: [0; STAGES] }
    }

    /// Starts with nothing done, for a join whose rows are not counted in advance. Such a join
    /// reports no progress before its end.
    pub(super) fn of_unknown_total(monitor: &'a Monitor) -> Self {
        monitor.expect_work(1);
        Self { monitor, steps: [0; STAGES], told: [0; STAGES] }
    }

    /// Reports that a share of a stage is done, from 0 to 1.
    pub(super) fn reach(&mut self, stage: Stage, share: f64) {
        let at = stage as usize;
        let reached = (self.steps[at] as f64 * share.clamp(0.0, 1.0)) as u64;
        self.monitor.advance(reached.saturating_sub(self.told[at]));
        self.told[at] = self.told[at].max(reached);
    }

    /// Reports that everything is done.
    pub(super) fn finish(self) {
        let left = self.steps.iter().sum::<u64>() + 1 - self.told.iter().sum::<u64>();
        self.monitor.advance(left);
    }
}
