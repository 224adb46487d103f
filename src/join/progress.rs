//! How far a join is, by the seconds that each stretch of it was predicted to take.

use super::Stretches;
use super::monitor::Monitor;

/// A part of a join that comes after the one before it is done, as [`Stretches`] has their seconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stretch {
    /// The build side is brought in and arranged.
    ArrangeBuild,
    /// Tables are built on it, or its keys are grouped and compared.
    IndexBuild,
    /// The probe side is brought in and arranged, a chunk at a time.
    ArrangeProbe,
    /// Probe rows are matched, and the result leaves.
    Results,
    /// Build rows that the kind of join keeps leave at the end.
    KeptBuild,
}

const STRETCHES: usize = 5;

/// Advances a monitor as stretches get on. What was told once is never taken back, and the last step is [`finish`](Self::finish)'s.
#[derive(Debug)]
pub(super) struct Progress<'a> {
    monitor: &'a Monitor,
    /// Steps of each stretch.
    steps: [u64; STRETCHES],
    /// Steps that the monitor was told of.
    told: [u64; STRETCHES],
}

impl<'a> Progress<'a> {
    /// Nothing is done yet.
    pub(super) fn new(expected: &Stretches, monitor: &'a Monitor) -> Self {
        /// More than anybody can see.
        const STEPS: f64 = 1e6;
        let Stretches { arrange_build, index_build, arrange_probe, results, kept_build } = *expected;
        let weights: [f64; STRETCHES] = [arrange_build, index_build, arrange_probe, results, kept_build];
        let sum: f64 = weights.iter().sum();
        // Empty tables are predicted to take no time.
        let share = |weight: f64| if sum > 0.0 && sum.is_finite() { weight / sum } else { 1.0 / STRETCHES as f64 };
        let steps = weights.map(|weight| (STEPS * share(weight)) as u64);
        monitor.expect_work(steps.iter().sum::<u64>() + 1);
        Self { monitor, steps, told: [0; STRETCHES] }
    }

    /// That share of a stretch is done, from 0 to 1.
    pub(super) fn reach(&mut self, stretch: Stretch, share: f64) {
        let at = stretch as usize;
        let reached = (self.steps[at] as f64 * share.clamp(0.0, 1.0)) as u64;
        self.monitor.advance(reached.saturating_sub(self.told[at]));
        self.told[at] = self.told[at].max(reached);
    }

    /// All is done.
    pub(super) fn finish(self) {
        let left = self.steps.iter().sum::<u64>() + 1 - self.told.iter().sum::<u64>();
        self.monitor.advance(left);
    }
}
