//! The one loop that every strategy runs: arrange the build side, then chunk by chunk arrange the probe side, match it in
//! waves, and emit.
//!
//! ```text
//!   build side ─► arrange ─► index ─► (hashed keys: compare runs; hash again if two differ) ─► (filter)
//!   probe side ─► chunk ─► (filter) ─► arrange ─► wave ─► match ─► (hashed keys: compare) ─► pairs ─► batches
//!                   ▲                              │                                            │
//!                   └───────── next chunk ─────────┴──── next wave ◄────────────────────────────┘
//!   at the end: build rows that the kind of join keeps for having a match, or for having none
//! ```
//!
//! Chunks, and who works on them, are in `probe.rs`. A chunk is what fits in device memory beside the build side; on a device
//! with one stream most often all of the probe side. A wave is what keeps
//! the intermediate results of matching small: in cache on a host device.

use std::sync::Arc;

use parking_lot::Mutex;

use super::arrange::{Arranged, Workshop, arrange};
use super::emit::{BatchSizes, Emitter, SideRows};
use super::inputs::{SideInput, check_build_rows};
use super::matching::BuildSide;
use super::monitor::Monitor;
use super::probe::{ProbeProgress, Probing};
use super::progress::{Progress, Stretch};
use super::verify::build_runs_are_exact;
use super::{BatchSink, Task};
use crate::columns::{KeyLayout, Role};
use crate::device::{Device, DeviceBuffer, Filter, Matches, Unmatched, Which};
use crate::memory::Arena;
use crate::{Error, Result};

/// Rows of the smallest chunk that probe sides are divided into: fewer would cost more in calls than they save in memory.
pub(crate) const CHUNK_ROWS_MIN: u64 = 1024;

/// Runs a join on one device, pushing the result batch by batch.
///
/// # Errors
/// [`Exhausted`](crate::Error::Exhausted) when the device, or host memory, is too small; [`Cancelled`](crate::Error::Cancelled) soon
/// after the monitor's flag is raised; [`Unavailable`](crate::Error::Unavailable) when the device is lost; and whatever the sink
/// answers.
pub fn run(task: &Task, device: &dyn Device, arena: &Arena, sink: &dyn BatchSink, monitor: &Monitor) -> Result<()> {
    let build = SideInput::new(task, Role::Build);
    let probe = SideInput::new(task, Role::Probe);
    let layout = KeyLayout::new(task.key_facts.clone(), rand::random());
    run_with_layout(task, layout, &build, &probe, device, arena, sink, monitor)
}

/// As [`run`], with a layout of the caller's: tests make its hashes collide.
#[allow(clippy::too_many_arguments)]
fn run_with_layout(
    task: &Task,
    mut layout: KeyLayout,
    build: &SideInput,
    probe: &SideInput,
    device: &dyn Device,
    arena: &Arena,
    sink: &dyn BatchSink,
    monitor: &Monitor,
) -> Result<()> {
    check_build_rows(build)?;
    let stream = device.stream(monitor.cancel().clone())?;
    let shop = Workshop { device, stream: &stream, arena, monitor };
    let outcome = Outcome::new(task, build, probe);
    let mut progress = Progress::new(&task.expected.stretches, monitor);

    let built = beside(device, || {
        loop {
            let rows = build.rows(0..build.table.rows);
            let unkeyed = outcome.keeps_build_without_key();
            let arranged = arrange(&shop, build, rows, &layout, task.arrangement, unkeyed, None)?;
            progress.reach(Stretch::ArrangeBuild, 1.0);
            let ahead = layout.is_hashed() || outcome.build_rows_kept.is_some() || task.expected.build_keys_repeat;
            let built = BuildSide::new(arranged, task.dense_range, &layout, ahead, &shop)?;
            if !layout.is_hashed()
                || monitor.phase("compare keys", 0, || build_runs_are_exact(&built, &layout, &shop))?
            {
                return Ok(built);
            }
            layout = layout.clone().with_another_seed(rand::random());
        }
    })?;
    progress.reach(Stretch::IndexBuild, 1.0);
    let filter = match task.filter && task.how.drops_unmatched(probe.side) {
        true => build_filter(&built, &shop)?,
        false => None,
    };

    let sizes = BatchSizes::new(task.batch_rows, task.expected.row_bytes, device.info().gather_bytes);
    let emitter = Emitter { shop: &shop, task, layout: &layout, build, probe, sink, sizes };
    let flags = match outcome.build_rows_kept {
        Some(_) => Some(device.new_flags(built.arranged.len(), &stream)?),
        None => None,
    };
    if let Some(unkeyed) = &built.arranged.unkeyed {
        let rows = SideRows::Numbered(&built.arranged, unkeyed.clone());
        beside(device, || emitter.emit(&rows, &SideRows::Missing, unkeyed.len(), &mut |_| {}))?;
    }
    let probing = Probing {
        task,
        layout: &layout,
        outcome: &outcome,
        build,
        probe,
        sink,
        sizes,
        flags,
        filter,
        built: Mutex::new(Arc::new(built)),
        next_row: Mutex::new(0),
        progress: Mutex::new(ProbeProgress { inner: progress, arranged_rows: 0.0, emitted_rows: 0.0 }),
    };
    probing.run(&shop)?;
    let Probing { built, flags, progress, .. } = probing;
    let (built, mut progress) = (built.into_inner(), progress.into_inner().inner);
    if let (Some(which), Some(flags)) = (outcome.build_rows_kept, flags) {
        let positions =
            monitor.phase("match", 0, || device.select_flags(&flags, built.arranged.len(), which, &stream))?;
        let rows = positions.len();
        let emit = || {
            emitter.emit(&SideRows::Arranged(&built.arranged, positions), &SideRows::Missing, rows, &mut |emitted| {
                progress.reach(Stretch::KeptBuild, emitted as f64 / rows as f64);
            })
        };
        beside(device, emit)?;
    }
    device.synchronize(&stream)?;
    progress.finish();
    Ok(())
}

/// Runs `work` on the CPU threads that belong to the device.
pub(super) fn beside<T: Send>(device: &dyn Device, work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    let (mut work, mut outcome) = (Some(work), None);
    device.beside(&mut || outcome = work.take().map(|work| work()));
    outcome.expect("a device does what it is given")
}

/// A filter of the build keys; `None` from a device that has no filters, or no memory for one, because a join is right
/// without.
fn build_filter(built: &BuildSide, shop: &Workshop<'_>) -> Result<Option<Filter>> {
    let keys = built.arranged.arranged_keys();
    let bytes = (keys.rows * keys.width.bytes()) as u64;
    match shop.monitor.phase("filter", bytes, || shop.device.build_filter(keys, shop.stream)) {
        Err(Error::Exhausted(_)) => Ok(None),
        outcome => outcome,
    }
}

/// Pairs that are expanded at once, a whole number of batches if they fit in half of what is free: two positions, the row
/// numbers of both, and as much again while they are made.
fn expanded_pairs(device: &dyn Device, batch_rows: usize) -> usize {
    /// Each call finds its first pair by counting the wave's: small batches share one.
    const PAIRS_MIN: usize = 64 << 10;
    let fit = ((device.memory().free_bytes() / 2 / 32) as usize).max(256);
    (batch_rows * (PAIRS_MIN / batch_rows).max(1)).min(fit)
}

/// Which rows the kind of join emits, in terms of build and probe side.
pub(super) struct Outcome {
    /// `Some`: a semi or anti join, whose rows are of that side only.
    only: Option<Role>,
    /// Whether rows of the side in `only` survive for having a match, or for having none.
    only_which: Which,
    keeps_unmatched_build: bool,
    keeps_unmatched_probe: bool,
    /// Which build rows are emitted at the end.
    build_rows_kept: Option<Which>,
}

impl Outcome {
    fn new(task: &Task, build: &SideInput, probe: &SideInput) -> Self {
        let how = task.how;
        let role = |side| if side == build.side { Role::Build } else { Role::Probe };
        Self {
            only: how.only_side().map(role),
            only_which: if how.is_anti() { Which::Unmatched } else { Which::Matched },
            keeps_unmatched_build: how.keeps_unmatched(build.side),
            keeps_unmatched_probe: how.keeps_unmatched(probe.side),
            build_rows_kept: how.build_rows_kept(build.side),
        }
    }

    fn keeps_build_without_key(&self) -> bool {
        self.keeps_unmatched_build || (self.only == Some(Role::Build) && self.only_which == Which::Unmatched)
    }

    pub(super) fn keeps_probe_without_key(&self) -> bool {
        self.keeps_unmatched_probe || (self.only == Some(Role::Probe) && self.only_which == Which::Unmatched)
    }

    /// Emits what one wave of matches gives, and tells `done` which share of it has left.
    pub(super) fn emit_wave(
        &self,
        emitter: &Emitter<'_>,
        build: &BuildSide,
        probe: &Arranged,
        matches: &Matches,
        flags: Option<&DeviceBuffer>,
        done: &mut dyn FnMut(f64),
    ) -> Result<()> {
        let Workshop { device, stream, monitor, .. } = *emitter.shop;
        let match_bytes = 8 * matches.rows.len() as u64;
        if let Some(flags) = flags {
            monitor.phase("match", match_bytes, || device.mark_build(matches, flags, stream))?;
        }
        match self.only {
            Some(Role::Build) => Ok(()),
            Some(Role::Probe) => {
                let select = || device.select_matches(matches, self.only_which, stream);
                let positions = monitor.phase("match", match_bytes, select)?;
                let rows = positions.len();
                emitter.emit(&SideRows::Missing, &SideRows::Arranged(probe, positions), rows, &mut |emitted| {
                    done(emitted as f64 / rows as f64);
                })
            }
            None => {
                let unmatched = if self.keeps_unmatched_probe { Unmatched::Emit } else { Unmatched::Skip };
                let pairs_total = matches.pair_count(unmatched);
                let at_once = expanded_pairs(device, emitter.sizes.gather_rows);
                for start in (0..pairs_total).step_by(at_once) {
                    let range = start..pairs_total.min(start + at_once as u64);
                    let rows = (range.end - range.start) as usize;
                    let pairs = monitor
                        .phase("expand", 12 * rows as u64, || device.expand(matches, range, unmatched, stream))?;
                    debug_assert_eq!((pairs.build.len(), pairs.probe.len()), (rows, rows));
                    let build = SideRows::Arranged(&build.arranged, pairs.build);
                    let probe = SideRows::Arranged(probe, pairs.probe);
                    emitter.emit(&build, &probe, rows, &mut |emitted| {
                        done((start + emitted as u64) as f64 / pairs_total as f64);
                    })?;
                }
                Ok(())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::ops::Range;
    use std::sync::Arc;

    use arrow::array::{Int32Array, RecordBatch, StringArray};
    use arrow::datatypes::{DataType, Field, Schema};
    use parking_lot::Mutex;

    use super::*;
    use crate::catalog::{Catalog, Upload, UploadOptions};
    use crate::device::CancelFlag;
    use crate::device::host::HostDevice;
    use crate::join::{JoinKind, Strategy};
    use crate::memory::Budget;
    use crate::planner::{self, JoinSpec, KeyPair};

    #[derive(Default)]
    struct CountRows(Mutex<usize>);

    impl BatchSink for CountRows {
        fn push(&self, batch: RecordBatch) -> Result<()> {
            *self.0.lock() += batch.num_rows();
            Ok(())
        }
    }

    fn catalog_of(tables: &[(&str, Range<i32>)]) -> Catalog {
        let catalog = Catalog::new(Arena::new(Budget::new("host memory", "--host-memory", 1 << 30)));
        for (name, range) in tables {
            let schema = Arc::new(Schema::new(vec![
                Field::new("k", DataType::Utf8, false),
                Field::new("v", DataType::Int32, false),
            ]));
            let keys = StringArray::from_iter_values(
                range.clone().map(|number| format!("key number {number} of a long list")),
            );
            let values = Int32Array::from_iter_values(range.clone());
            let batch = RecordBatch::try_new(schema.clone(), vec![Arc::new(keys), Arc::new(values)]).unwrap();
            let mut upload = Upload::begin(&catalog, name, schema, UploadOptions::default()).unwrap();
            upload.append(batch).unwrap();
            upload.commit().unwrap();
        }
        catalog
    }

    /// Joins tables of long string keys whose hashes keep only the bits of `mask`; the number of rows found.
    fn join_with_collisions(catalog: &Catalog, how: JoinKind, strategy: Strategy, mask: u128) -> usize {
        let spec = JoinSpec {
            how,
            strategy: Some(strategy),
            ..JoinSpec::inner("build", "probe", vec![KeyPair::new("k", "k")])
        };
        let plan = planner::plan(planner::bind(spec, catalog).unwrap(), Some(strategy)).unwrap();
        let device = HostDevice::new(0, 2, Budget::new("device memory", "--device-memory", 64 << 20), None).unwrap();
        let task = plan.task().unwrap();
        let (build, probe) = (SideInput::new(&task, Role::Build), SideInput::new(&task, Role::Probe));
        let layout = KeyLayout::with_colliding_hashes(task.key_facts.clone(), mask);
        let (sink, monitor) = (CountRows::default(), Monitor::new(CancelFlag::new()));
        run_with_layout(&task, layout, &build, &probe, &device, catalog.arena(), &sink, &monitor).unwrap();
        sink.0.into_inner()
    }

    #[test]
    fn probe_rows_that_only_share_a_hash_are_not_matched() {
        // One build row, and hashes of one bit: half of the probe rows find it, one of them rightly.
        let catalog = catalog_of(&[("build", 7..8), ("probe", 0..500)]);
        for strategy in Strategy::ALL {
            for (how, rows) in
                [(JoinKind::Inner, 1), (JoinKind::Right, 500), (JoinKind::RightAnti, 499), (JoinKind::LeftSemi, 1)]
            {
                assert_eq!(join_with_collisions(&catalog, how, strategy, 1), rows, "{how} by {strategy}");
            }
        }
    }

    #[test]
    fn build_rows_that_only_share_a_hash_are_hashed_again() {
        let catalog = catalog_of(&[("build", 0..200), ("probe", 100..400)]);
        for strategy in Strategy::ALL {
            for (how, rows) in [(JoinKind::Inner, 100), (JoinKind::Full, 400), (JoinKind::LeftAnti, 100)] {
                assert_eq!(join_with_collisions(&catalog, how, strategy, 0xff), rows, "{how} by {strategy}");
            }
        }
    }
}
