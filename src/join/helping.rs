//! Help of a host device for GPUs: the chunks that it takes, and the time at which it leaves.
//!
//! ```text
//!   GPUs ──► chunk │ chunk │ chunk │      rows that are left      │chunk│chunk│ch ◄── host device
//! ```
//!
//! GPUs are many times as fast. The host device takes rows from the end, so that GPUs take the same
//! chunks as without it, and find their columns in the cache. Its first chunk is small. The sizes
//! of later chunks follow its share of the rows taken since then. The host device ends when GPUs
//! would join the rows that are left sooner than it would join its least chunk. If this is so
//! before its build side is ready, it leaves without rows.

use std::ops::Range;

use super::Task;
use super::rank::Rank;
use crate::Error;
use crate::columns::Role;
use crate::memory::Interrupt;

/// Rows of the largest chunk: about a millisecond of work.
const CHUNK_ROWS_MAX: u64 = 1 << 18;

/// Rows of the least chunk if the task sets no number. Fewer rows cost more calls than they save.
const CHUNK_ROWS_MIN: u64 = 1 << 12;

/// Part of the rows left that the first chunk may be. GPUs are rarely this many times as fast.
const FIRST_PART: u64 = 64;

/// Part of the chunk that would end together with the GPUs. The rest is for shares that are wrong.
const SAFE_PART: u64 = 2;

/// Returns the fewest rows that a host device takes beside GPUs.
pub(super) fn helping_rows_min(task: &Task) -> u64 {
    task.chunk_rows_min.unwrap_or(CHUNK_ROWS_MIN).max(1)
}

/// Rows that a rank that helps has taken.
#[derive(Debug, Default)]
pub(super) struct HelpedRows {
    /// Rows that were left before the first chunk.
    left_at_first: Option<u64>,
    taken: u64,
    last_chunk: u64,
}

impl HelpedRows {
    /// Takes a chunk of the rows `left` of a table. `take` gets the most rows that it may take.
    /// Returns `None` if the rows are left for GPUs.
    pub(super) fn take(
        &mut self,
        left: u64,
        least: u64,
        take: impl FnOnce(u64) -> Option<Range<u64>>,
    ) -> Option<Range<u64>> {
        let most = self.chunk_rows(left, least);
        let rows = if most > 0 { take(most) } else { None }?;
        self.left_at_first.get_or_insert(left);
        self.last_chunk = rows.end - rows.start;
        self.taken += self.last_chunk;
        Some(rows)
    }

    /// Returns the rows of the next chunk, and 0 if there should be none.
    fn chunk_rows(&self, left: u64, least: u64) -> u64 {
        let rows = match self.left_at_first {
            None if left / FIRST_PART < least => 0,
            None => least,
            Some(at_first) => {
                let by_all = at_first.saturating_sub(left).max(self.taken);
                let even = u128::from(left) * u128::from(self.taken) / u128::from(by_all);
                (even as u64 / SAFE_PART).min(2 * self.last_chunk)
            }
        };
        if rows < least { 0 } else { rows.min(CHUNK_ROWS_MAX) }
    }
}

/// Early end of a rank that helps: it prepares its build side as long as rows are left for it.
#[derive(Clone)]
pub(super) struct Leaving {
    rank: Rank,
    probe_rows: u64,
    least: u64,
}

impl Leaving {
    pub(super) fn new(rank: &Rank, task: &Task) -> Self {
        Self { rank: rank.clone(), probe_rows: task.probe.table.rows, least: helping_rows_min(task) }
    }

    /// True if the rank would take no first chunk.
    pub(super) fn is_due(&self) -> bool {
        HelpedRows::default().chunk_rows(self.rank.left_rows(Role::Probe, self.probe_rows), self.least) == 0
    }

    /// Returns the interrupt that ends the rank's preparation.
    pub(super) fn interrupt(&self) -> Interrupt {
        let leaving = self.clone();
        Interrupt::by(move || match leaving.is_due() {
            true => Err(Error::Cancelled("no rows are left for a host device that helps GPUs".into())),
            false => Ok(()),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Lets a host device help a GPU that is `speed` times as fast, and takes `gpu_chunk` rows at a
    /// time. Returns the rows of each chunk of the host device, and the times at which both end, in
    /// rows of the GPU.
    fn run(total: u64, speed: u64, gpu_chunk: u64) -> (Vec<u64>, u64, u64) {
        let (mut helped, mut chunks) = (HelpedRows::default(), Vec::new());
        let (mut left, mut gpu, mut host) = (total, 0, 0);
        loop {
            if host < gpu {
                let taken = helped.take(left, CHUNK_ROWS_MIN, |most| Some(0..most.min(left)));
                let Some(rows) = taken else { break };
                let rows = rows.end - rows.start;
                (left, host) = (left - rows, host + rows * speed);
                chunks.push(rows);
            } else {
                let rows = gpu_chunk.min(left);
                (left, gpu) = (left - rows, gpu + rows.max(1));
            }
        }
        (chunks, gpu + left, host)
    }

    #[test]
    fn the_host_device_ends_before_the_gpu_and_takes_about_its_share() {
        for speed in [2, 5, 10, 40] {
            for gpu_chunk in [1 << 18, 1 << 22] {
                const ROWS: u64 = 1 << 28;
                let (chunks, gpu, host) = run(ROWS, speed, gpu_chunk);
                assert_eq!(chunks[0], CHUNK_ROWS_MIN);
                assert!(chunks.windows(2).all(|pair| pair[1] <= 2 * pair[0]), "{chunks:?}");
                assert!(chunks.iter().all(|rows| (CHUNK_ROWS_MIN..=CHUNK_ROWS_MAX).contains(rows)), "{chunks:?}");
                // The last chunk is the only one for which the GPU could wait.
                assert!(host <= gpu + CHUNK_ROWS_MIN * speed, "{speed} times as fast: {host} after {gpu}");
                let (taken, share) = (chunks.iter().sum::<u64>(), ROWS / (speed + 1));
                assert!(taken <= share && taken > share / 10 * 9, "{taken} of {share} rows");
            }
        }
    }

    #[test]
    fn a_gpu_that_is_faster_than_any_waits_for_no_more_than_the_least_chunk() {
        let (chunks, gpu, host) = run(1 << 28, 1000, 1 << 22);
        assert!(host <= gpu + CHUNK_ROWS_MIN * 1000, "{chunks:?}: {host} after {gpu}");
    }

    #[test]
    fn few_rows_are_left_for_gpus() {
        let first = |left| HelpedRows::default().chunk_rows(left, 100);
        assert_eq!([first(0), first(6399), first(6400)], [0, 0, 100]);
    }
}
