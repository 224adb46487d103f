//! Rows that a kind of join emits, and the steps from a chunk of the probe side to these rows.

use std::ops::Range;

use super::Task;
use super::column_gather::SideRows;
use super::context::JoinContext;
use super::deferred::{DeferredChunk, pairs_at_once};
use super::fused::Fused;
use super::inputs::SideInput;
use super::matching::{BuildSide, SharedBuild, probe_batches};
use super::materialize::Materializer;
use super::threads::compare_where_values_are;
use super::transform::TransformedSide;
use super::verify::exact_matches;
use crate::Result;
use crate::columns::{KeyLayout, Role};
use crate::device::{Device, DeviceBuffer, Matches, Phase, Positions, Unmatched, Which};

/// Returns the pairs to expand at once: a whole number of batches, if they fit in half of free
/// memory. A pair takes two positions, two row numbers, and as much again while they are made.
pub(super) fn expanded_pairs(device: &dyn Device, batch_rows: usize) -> usize {
    /// Least number of pairs per call. Each call counts the probe batch's pairs to find its first
    /// pair, so small batches share a call.
    const PAIRS_MIN: usize = 64 << 10;
    let fit = ((device.memory().free_bytes() / 2 / 32) as usize).max(256);
    (batch_rows * (PAIRS_MIN / batch_rows).max(1)).min(fit)
}

/// Matches one probe batch of a probe chunk, and drops matches whose values differ. Returns `None`
/// if build keys repeat, and must be [grouped](BuildSide::grouped) first.
pub(super) fn match_exactly(
    build: &BuildSide,
    probe: &TransformedSide,
    probe_batch: Range<usize>,
    layout: &KeyLayout,
    cx: &JoinContext<'_>,
) -> Result<Option<Matches>> {
    let Some(matches) = build.match_probe_batch(probe, probe_batch, cx)? else { return Ok(None) };
    if !layout.is_hashed() {
        return Ok(Some(matches));
    }
    let compare = || exact_matches(matches, build, probe, layout, cx);
    let compare = || cx.monitor.phase(Phase::CompareKeys, 0, compare);
    compare_where_values_are(layout, cx.device, compare).map(Some)
}

/// Destination of the rows of a probe chunk.
pub(super) struct ChunkOutput<'a> {
    pub(super) materializer: &'a Materializer<'a>,
    /// Flags of the build rows that have a match, if they decide which rows are emitted at the end.
    pub(super) flags: Option<&'a DeviceBuffer>,
    /// Rows of the chunk that wait for deferred columns of the build side.
    pub(super) deferred: Option<&'a DeferredChunk<'a>>,
}

/// Rows that the kind of join emits, in terms of build and probe side.
pub(super) struct JoinSemantics {
    /// Side of all emitted rows, for a semi or anti join.
    only: Option<Role>,
    /// Selects whether rows of the side in `only` survive for having a match, or for having none.
    only_which: Which,
    keeps_unmatched_build: bool,
    keeps_unmatched_probe: bool,
    /// Selects the build rows that are emitted at the end.
    pub(super) build_rows_kept: Option<Which>,
    fused: Option<Fused>,
}

impl JoinSemantics {
    pub(super) fn new(task: &Task, build: &SideInput, probe: &SideInput, fused: Option<Fused>) -> Self {
        let how = task.how;
        let role = |side| if side == build.side { Role::Build } else { Role::Probe };
        Self {
            only: how.only_side().map(role),
            only_which: if how.is_anti() { Which::Unmatched } else { Which::Matched },
            keeps_unmatched_build: how.keeps_unmatched(build.side),
            keeps_unmatched_probe: how.keeps_unmatched(probe.side),
            build_rows_kept: how.build_rows_kept(build.side),
            fused,
        }
    }

    pub(super) fn keeps_build_without_key(&self) -> bool {
        self.keeps_unmatched_build || (self.only == Some(Role::Build) && self.only_which == Which::Unmatched)
    }

    pub(super) fn keeps_probe_without_key(&self) -> bool {
        self.keeps_unmatched_probe || (self.only == Some(Role::Probe) && self.only_which == Which::Unmatched)
    }

    /// Emits the build rows that the kind of join keeps for having a match, or for having none, as
    /// `flags` say. Calls `done` with the share of the rows that has left.
    pub(super) fn emit_kept_build(
        &self,
        materializer: &Materializer<'_>,
        build: &TransformedSide,
        flags: &DeviceBuffer,
        done: &mut dyn FnMut(f64),
    ) -> Result<()> {
        let JoinContext { device, stream, monitor, .. } = *materializer.cx;
        let Some(which) = self.build_rows_kept else { return Ok(()) };
        let positions = monitor.phase(Phase::Match, 0, || device.select_flags(flags, build.len(), which, stream))?;
        let rows = positions.len();
        // A list of all positions is the same as their range.
        let positions = if rows == build.len() { Positions::Range(0..rows) } else { positions };
        materializer.emit(&SideRows::Transformed(build, positions), &SideRows::Missing, rows, &mut |emitted| {
            done(emitted as f64 / rows as f64);
        })
    }

    /// Joins a chunk of the probe side with a build side, in probe batches of about
    /// `probe_batch_rows` probe rows. Calls `emitted` after each batch with the number of further
    /// probe rows that are done.
    pub(super) fn join_chunk(
        &self,
        output: &ChunkOutput<'_>,
        build: &SharedBuild,
        probe: &TransformedSide,
        probe_batch_rows: usize,
        emitted: &mut dyn FnMut(f64),
    ) -> Result<()> {
        let materializer = output.materializer;
        let cx = materializer.cx;
        let mut built = build.current();
        let mut join_probe_batch = |probe_batch: Range<usize>| -> Result<()> {
            if let Some(fused) = &self.fused
                && fused.join_probe_batch(materializer, &built, probe, probe_batch.clone(), emitted)?
            {
                return Ok(());
            }
            let matches = loop {
                match match_exactly(&built, probe, probe_batch.clone(), materializer.layout, cx)? {
                    Some(matches) => break matches,
                    None => built = build.grouped(&built, cx)?,
                }
            };
            let rows = matches.rows.len() as f64;
            let mut of_probe_batch = 0.0;
            self.emit_probe_batch(output, &built, probe, &matches, &mut |share| {
                emitted(share * rows - of_probe_batch);
                of_probe_batch = share * rows;
            })?;
            emitted(rows - of_probe_batch);
            Ok(())
        };
        let outcome = probe_batches(probe, probe_batch_rows)
            .and_then(|probe_batches| probe_batches.into_iter().try_for_each(&mut join_probe_batch));
        // If another stream has replaced this build side with a grouped one, this stream may hold
        // the last reference to it. This stream's queued work still reads it, even if the last
        // probe batch failed or the job was stopped.
        let settled = cx.device.synchronize(&cx.stream.uncancelled());
        drop(built);
        outcome.and(settled)
    }

    /// True if the result has rows of the probe side alone: a semi or anti join of that side.
    pub(super) fn only_keeps_probe(&self) -> bool {
        self.only == Some(Role::Probe)
    }

    /// Returns the treatment of probe rows without a match.
    pub(super) fn unmatched(&self) -> Unmatched {
        if self.keeps_unmatched_probe { Unmatched::Emit } else { Unmatched::Skip }
    }

    /// Returns the number of probe rows of the probe batch that a semi or anti join of the probe
    /// side keeps.
    fn only_which_rows(&self, matches: &Matches) -> usize {
        match self.only_which {
            Which::Matched => matches.matched_rows,
            Which::Unmatched => matches.rows.len() - matches.matched_rows,
        }
    }

    /// Returns the positions of the probe rows of the probe batch that a semi or anti join of the
    /// probe side keeps.
    pub(super) fn kept_probe_rows(&self, matches: &Matches, cx: &JoinContext<'_>) -> Result<Positions> {
        if self.only_which_rows(matches) == matches.rows.len() {
            return Ok(Positions::Range(matches.rows.clone()));
        }
        let select = || cx.device.select_matches(matches, self.only_which, cx.stream);
        cx.monitor.phase(Phase::Match, 8 * matches.rows.len() as u64, select)
    }

    /// Emits the rows of a matched probe batch. Calls `done` with the share of the probe batch that
    /// has left.
    fn emit_probe_batch(
        &self,
        output: &ChunkOutput<'_>,
        build: &BuildSide,
        probe: &TransformedSide,
        matches: &Matches,
        done: &mut dyn FnMut(f64),
    ) -> Result<()> {
        let ChunkOutput { materializer, flags, deferred } = *output;
        let JoinContext { device, stream, monitor, .. } = *materializer.cx;
        let match_bytes = 8 * matches.rows.len() as u64;
        if let Some(flags) = flags {
            monitor.phase(Phase::Match, match_bytes, || device.mark_build(matches, flags, stream))?;
        }
        match self.only {
            Some(Role::Build) => Ok(()),
            Some(Role::Probe) if materializer.task.counts_rows => {
                materializer.count(self.only_which_rows(matches), &mut |_| done(1.0))
            }
            None if materializer.task.counts_rows => {
                materializer.count(matches.pair_count(self.unmatched()) as usize, &mut |_| done(1.0))
            }
            Some(Role::Probe) => {
                let positions = self.kept_probe_rows(matches, materializer.cx)?;
                let rows = positions.len();
                materializer.emit(&SideRows::Missing, &SideRows::Transformed(probe, positions), rows, &mut |emitted| {
                    done(emitted as f64 / rows as f64);
                })
            }
            None => {
                let unmatched = self.unmatched();
                let pairs_total = matches.pair_count(unmatched);
                let pairs_min = match deferred {
                    Some(_) => pairs_at_once(materializer.probe.text_mean_bytes(), device.tuning().gather_bytes),
                    None => 0,
                };
                let at_once = expanded_pairs(device, materializer.sizes.gather_rows.max(pairs_min));
                for start in (0..pairs_total).step_by(at_once) {
                    let range = start..pairs_total.min(start + at_once as u64);
                    let rows = (range.end - range.start) as usize;
                    let pairs = monitor
                        .phase(Phase::Expand, 12 * rows as u64, || device.expand(matches, range, unmatched, stream))?;
                    debug_assert_eq!((pairs.build.len(), pairs.probe.len()), (rows, rows));
                    if let Some(deferred) = deferred
                        && deferred.defer(materializer, &build.transformed, probe, &pairs)?
                    {
                        continue;
                    }
                    let build = SideRows::Transformed(&build.transformed, pairs.build);
                    let probe = SideRows::Transformed(probe, pairs.probe);
                    materializer.emit(&build, &probe, rows, &mut |emitted| {
                        done((start + emitted as u64) as f64 / pairs_total as f64);
                    })?;
                }
                Ok(())
            }
        }
    }
}
