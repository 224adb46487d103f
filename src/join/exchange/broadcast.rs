//! Broadcast of a build side that ranks read in shares.
//!
//! ```text
//!   build   chunk ─► own piece ──────────────────┐
//!             └────► channels to all others      ├─► lay out ─► index
//!           channels from all others ─► pieces ──┘
//!   probe   as on one device; ranks take chunks in turn
//! ```
//!
//! Each build row crosses the link of one device, and then the links between devices, which are
//! faster.

use super::channel::{Outgoing, Piece};
use super::{Exchange, run_on_device_pool};
use crate::Result;
use crate::join::chunks::ProbeRows;
use crate::join::context::JoinContext;
use crate::join::prefetch::{Prefetch, Probes};
use crate::join::probe::Probing;
use crate::join::progress::{Progress, Stage};
use crate::join::source::TableRows;
use crate::join::transform::CopyIn;

impl Exchange<'_> {
    /// Gathers the whole build side from all ranks, and joins a share of the probe side.
    pub(super) fn join_by_broadcast(&self, cx: &JoinContext<'_>, mut progress: Progress<'_>) -> Result<()> {
        let pieces = self.gather_build()?;
        progress.reach(Stage::TransformBuild, 1.0);
        let (task, build, probe) = (self.task, &*self.build.input, &self.probe.input);
        let source = TableRows::new(task.probe.table.clone());
        let rows = ProbeRows::new(&source, task, probe, self.device).of_rank(self.rank);
        let copy_in = if probe.shares { CopyIn::WhenNeeded } else { CopyIn::Prefetch };
        let mut prefetch = Prefetch::default();
        let join = self.prepare(pieces, cx, &mut |layout| {
            prefetch = Prefetch::queue(&Probes { task, build, probe, layout, copy_in }, cx, &rows, 0)?;
            Ok(())
        })?;
        progress.reach(Stage::IndexBuild, 1.0);
        let probing = Probing::new(&join, rows, self.sink, progress).continuing(prefetch, None);
        probing.run(cx)?.finish();
        Ok(())
    }

    /// Reads this rank's share of the build side, sends it to all other ranks, and receives theirs.
    fn gather_build(&self) -> Result<Vec<Piece>> {
        self.collect_build(|cx, keep| {
            while let Some(rows) = self.next_chunk(&self.build) {
                self.check()?;
                let piece = run_on_device_pool(cx.device, || self.build.read_whole(cx, self.layout(), rows))?;
                for to in self.others() {
                    let rows = 0..piece.rows;
                    let outgoing = Outgoing { columns: &piece.columns, rows, chunk_start: piece.chunk_start };
                    self.send(cx, &self.build, to, &outgoing)?;
                }
                // The rows are there, because sending waits for them.
                keep(piece);
            }
            Ok(())
        })
    }
}
