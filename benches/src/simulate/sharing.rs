//! How joins that run at once share a device.
//!
//! A join keeps two engines of its device busy: copies, and kernels. The rest of its time is latency
//! of the host, in which other joins work. Joins slow each other down only if they want more of an
//! engine than there is. So small joins hardly do.
//!
//! Copies cross the link in the order in which they were queued, whichever join queued them. So a
//! join moves bytes in proportion to those that it has queued. A small join queues all of its
//! bytes, and a large one those of the chunks in progress. (A small join waited for as long as the
//! build sides that others had queued took, and half of their chunks.)

use dovetail::columns::Role;
use dovetail::planner::{Plan, Resource};

/// Bytes that joins at once move in both directions together, over those that the link moves in one.
/// (Joins of 4 and of 16 clients moved 60 and 56 GB/s in and out of an H200 while several ran, and
/// its link moves 55.5 one way: 22496bb. A join alone copies in and out in parallel. With copies in
/// alone at a lower rate, joins that count would be too slow, and those with results too fast.)
const BOTH_WAYS: f64 = 1.05;

/// Chunks of a large probe side for each stream, and rows of the smallest chunk, as a server
/// divides it.
const CHUNKS_PER_STREAM: f64 = 5.0;
const CHUNK_ROWS_MIN: f64 = (1u64 << 20) as f64;

/// What a join takes of a device.
#[derive(Clone, Copy, Debug)]
pub struct Use {
    /// Share of the time of each engine, while the join runs at full speed.
    engines: [f64; 2],
    /// Seconds of the join alone, in as much of it as is queued ahead. Where joins wait for each
    /// other, their speeds are in this proportion.
    queued: f64,
}

impl Use {
    /// Returns what a join takes that runs for `seconds` alone.
    pub fn of(plan: &Plan, seconds: f64) -> Self {
        let copies = (plan.demand[Resource::LinkIn] + plan.demand[Resource::LinkOut]) / BOTH_WAYS;
        let kernels = plan.demand[Resource::Device];
        let probe_rows = plan.join.table(plan.side(Role::Probe)).rows as f64;
        let streams = plan.target.tuning.streams as f64;
        let chunks = (probe_rows / CHUNK_ROWS_MIN).ceil().clamp(1.0, CHUNKS_PER_STREAM * streams);
        Self { engines: [copies / seconds, kernels / seconds], queued: seconds * (streams / chunks).min(1.0) }
    }
}

/// Returns the speed of each join on a device, where 1 is that of a join alone.
pub fn speeds(uses: &[Use]) -> Vec<f64> {
    let mut speeds = vec![1.0; uses.len()];
    // The prediction of a join alone counts with the engine that it has to itself.
    if uses.len() > 1 {
        for engine in 0..2 {
            share(uses, engine, &mut speeds);
        }
    }
    speeds
}

/// Lowers the speeds of joins that want more of an engine than there is. No join is faster than
/// alone, and what it leaves goes to the others.
fn share(uses: &[Use], engine: usize, speeds: &mut [f64]) {
    let mut left = 1.0;
    let mut open: Vec<usize> = (0..uses.len()).filter(|&at| uses[at].engines[engine] > 0.0).collect();
    loop {
        let queued: f64 = open.iter().map(|&at| uses[at].engines[engine] * uses[at].queued).sum();
        let speed = |at: usize| left * uses[at].queued / queued;
        let (full, slower): (Vec<usize>, Vec<usize>) = open.iter().partition(|&&at| speed(at) >= 1.0);
        if full.is_empty() {
            slower.into_iter().for_each(|at| speeds[at] = f64::min(speeds[at], speed(at)));
            return;
        }
        left -= full.iter().map(|&at| uses[at].engines[engine]).sum::<f64>();
        open = slower;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(copies: f64, kernels: f64, queued: f64) -> Use {
        Use { engines: [copies, kernels], queued }
    }

    #[test]
    fn joins_that_want_less_than_there_is_run_as_fast_as_alone() {
        assert_eq!(speeds(&[of(0.1, 0.2, 1e-3); 4]), [1.0; 4]);
        assert_eq!(speeds(&[of(1.2, 0.9, 1.0)]), [1.0], "the prediction counts with it");
        assert_eq!(speeds(&[of(0.9, 0.0, 1.0), of(0.0, 0.9, 1.0)]), [1.0; 2], "each has an engine");
    }

    #[test]
    fn the_busier_engine_bounds_joins_that_run_at_once() {
        assert_eq!(speeds(&[of(0.8, 0.1, 1.0); 2]), [0.625; 2]);
        assert_eq!(speeds(&[of(0.1, 0.8, 1.0); 2]), [0.625; 2]);
    }

    #[test]
    fn an_engine_is_shared_in_proportion_to_what_is_queued_and_used_in_full() {
        let uses = [of(1.0, 0.0, 3.0), of(0.5, 0.0, 1.0), of(0.02, 0.0, 100.0)];
        let [large, small, urgent] = speeds(&uses)[..] else { panic!("a speed for each") };
        assert_eq!(urgent, 1.0, "no join is faster than alone");
        assert!((large / small - 3.0).abs() < 1e-9, "{large} and {small}");
        assert!((large + 0.5 * small - 0.98).abs() < 1e-9, "what one leaves goes to the others: {large} and {small}");
    }
}
