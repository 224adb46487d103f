//! Clients in closed loops: each asks for its next join some time after the end of its last one.
//!
//! A trace has the client of each job. A client that asks for several joins at a time has as many
//! loops as it has joins that wait or run.

use std::collections::HashMap;

use dovetail::scheduler::TracedJob;

/// A client may read its last rows before the server notes the end of the join. Up to this many
/// seconds between both, the next join still follows.
const NOTED_LATE: f64 = 1e-3;

/// Job that a client asks for after another one.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Next {
    /// Number in the trace.
    pub job: usize,
    /// Seconds between both. They begin at the end of the earlier job, or at its submission if the
    /// trace has no times of it.
    pub pause: f64,
}

/// Returns the job that follows each job of a trace, in the order of the trace, which is by time.
/// Jobs without a client follow none.
pub fn loops(trace: &[TracedJob]) -> Vec<Option<Next>> {
    let mut next = vec![None; trace.len()];
    // The last job of each loop of a client, and its end.
    let mut last: HashMap<u64, Vec<(usize, f64)>> = HashMap::new();
    for (job, traced) in trace.iter().enumerate() {
        let Some(client) = traced.client else { continue };
        let end = traced.at + traced.measured.map_or(0.0, |times| times.waited + times.ran);
        let of_client = last.entry(client).or_default();
        let has_ended = of_client.iter_mut().filter(|(_, end)| *end <= traced.at + NOTED_LATE);
        match has_ended.max_by(|(_, a), (_, b)| a.total_cmp(b)) {
            Some(before) => {
                next[before.0] = Some(Next { job, pause: (traced.at - before.1).max(0.0) });
                *before = (job, end);
            }
            None => of_client.push((job, end)),
        }
    }
    next
}
