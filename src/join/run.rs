//! Runs a join of two tables on one device: prepares the build side, probes it with all rows, and
//! finishes.
//!
//! Chunks of the probe side, and the streams that work on them, are in `probe.rs`. A chunk fits in
//! device memory next to the build side. On a device with one stream, a chunk is most often all of
//! the probe side. A probe batch is small enough to keep the intermediate results of matching
//! small: in cache on a host device.

use std::sync::Arc;

use super::chunks::ProbeRows;
use super::context::CallStreams;
use super::count::{RowCount, batch_of_count};
use super::deferred::DeferredPayload;
use super::exchange::run_exchanged;
use super::helping::Leaving;
use super::inputs::SideInput;
use super::monitor::Monitor;
use super::prefetch::{Prefetch, Probes};
use super::prepared::{Preparation, PreparedJoin};
use super::probe::Probing;
use super::progress::{Progress, Stage};
use super::rank::Rank;
use super::source::TableRows;
use super::transform::CopyIn;
use super::{BatchSink, Task};
use crate::columns::Role;
use crate::device::Device;
use crate::memory::Arena;
use crate::{Error, Result};

/// Runs a join on one device, and pushes the result batch by batch.
///
/// # Errors
/// The errors of [`run_rank`].
pub fn run(
    task: &Arc<Task>,
    device: &dyn Device,
    arena: &Arena,
    sink: &dyn BatchSink,
    monitor: &Monitor,
) -> Result<()> {
    run_rank(task, &Rank::alone(), device, arena, sink, monitor)
}

/// Runs one rank of a join on its device, and pushes the rank's share of the result batch by batch.
/// If rows are counted, the last rank to count pushes the sum of all ranks.
///
/// # Errors
/// [`Exhausted`](crate::Error::Exhausted) when the device, or host memory, is too small.
/// [`Cancelled`](crate::Error::Cancelled) soon after the monitor's flag is raised.
/// [`Unavailable`](crate::Error::Unavailable) when the device is lost. Errors of the sink.
pub fn run_rank(
    task: &Arc<Task>,
    rank: &Rank,
    device: &dyn Device,
    arena: &Arena,
    sink: &dyn BatchSink,
    monitor: &Monitor,
) -> Result<()> {
    let run = |sink: &dyn BatchSink| {
        if task.composition.exchanges_rows() {
            return run_exchanged(task, rank, device, arena, sink, monitor);
        }
        let input = |role| Arc::new(SideInput::of_task(task, role, device.strings().is_some()));
        let preparation = Preparation::new(task.clone(), input(Role::Build), input(Role::Probe), device);
        run_prepared(preparation, rank, device, arena, sink, monitor)
    };
    if !task.counts_rows {
        return run(sink);
    }
    let counted = RowCount::default();
    run(&counted)?;
    match rank.sum(counted.rows()) {
        Some(rows) => sink.push(batch_of_count(rows, task.schema.clone())?),
        None => Ok(()),
    }
}

/// Prepares, probes and finishes. Tests pass preparations with layouts whose hashes collide.
fn run_prepared(
    preparation: Preparation,
    rank: &Rank,
    device: &dyn Device,
    arena: &Arena,
    sink: &dyn BatchSink,
    monitor: &Monitor,
) -> Result<()> {
    let Preparation { task, build, probe_shape: probe, sizes, .. } = &preparation;
    let (task, build, probe, sizes) = (task.clone(), build.clone(), probe.clone(), *sizes);
    let streams = CallStreams::new(device, monitor)?;
    let cx = streams.context(device, arena, monitor);
    let mut progress = Progress::new(&task.expected.stage_seconds, monitor);

    let deferred = DeferredPayload::of(&task, &build, &probe, sizes, &cx);
    let copy_in = if !probe.shares || deferred.is_some() { CopyIn::Prefetch } else { CopyIn::WhenNeeded };
    let source = TableRows::new(task.probe.table.clone());
    let rows = ProbeRows::new(&source, &task, &probe, device).of_rank(rank);
    let mut prefetch = Prefetch::default();
    let preparation = Preparation { defers_payload: deferred.is_some(), ..preparation };
    // A rank that helps prepares on streams that end when no rows are left for it.
    let leaving = rank.helps_gpus().then(|| Leaving::new(rank, &task));
    let until_leaving = match &leaving {
        Some(leaving) => Some(CallStreams::stopped_by(&monitor.cancel().or(leaving.interrupt()), device)?),
        None => None,
    };
    let preparing = until_leaving.as_ref().unwrap_or(&streams).context(device, arena, monitor);
    // The device indexes the build side's keys while its other columns still cross the link.
    let join = PreparedJoin::prepare_with(preparation, &preparing, &mut |layout| {
        let probes = Probes { task: &task, build: &build, probe: &probe, layout, copy_in };
        let held_back = deferred.as_ref().map_or(0, DeferredPayload::bytes_to_come);
        prefetch = Prefetch::queue(&probes, &preparing, &rows, held_back)?;
        progress.reach(Stage::TransformBuild, 1.0);
        Ok(())
    });
    let join = match join {
        Err(Error::Cancelled(_)) if leaving.is_some_and(|leaving| leaving.is_due()) => {
            progress.finish();
            return Ok(());
        }
        join => join?,
    };
    progress.reach(Stage::IndexBuild, 1.0);
    monitor.set_build_rows(build.table.rows);

    let probing = Probing::new(&join, rows, sink, progress).continuing(prefetch, deferred);
    let mut progress = probing.run(&cx)?;
    join.finish_with(&cx, sink, &mut |share| progress.reach(Stage::KeptBuild, share))?;
    progress.finish();
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::ops::Range;
    use std::sync::Arc;

    use arrow::array::{Array, ArrayRef, AsArray, Int32Array, RecordBatch, StringArray};
    use arrow::datatypes::{DataType, Field, Int32Type, Schema};
    use parking_lot::Mutex;

    use super::*;
    use crate::catalog::{Catalog, Upload, UploadOptions};
    use crate::columns::KeyLayout;
    use crate::device::host::HostDevice;
    use crate::device::{CancelFlag, Phase, gpu_count, open_gpu};
    use crate::join::{JoinKind, Strategy, TransferOrder};
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

    /// Makes tables of the given columns, of one batch each.
    fn catalog_with(build: Vec<(&str, ArrayRef)>, probe: Vec<(&str, ArrayRef)>) -> Catalog {
        let catalog = Catalog::new(Arena::new(Budget::new("host memory", "--host-memory", 1 << 30)));
        for (name, columns) in [("build", build), ("probe", probe)] {
            let batch = RecordBatch::try_from_iter(columns).unwrap();
            let mut upload = Upload::begin(&catalog, name, batch.schema(), UploadOptions::default()).unwrap();
            upload.append(batch).unwrap();
            upload.commit().unwrap();
        }
        catalog
    }

    /// Joins tables of long string keys whose hashes keep only the bits of `mask`. Returns the
    /// number of rows found.
    fn join_with_collisions(catalog: &Catalog, how: JoinKind, strategy: Strategy, mask: u128) -> usize {
        let made = rows_with_collisions(catalog, how, strategy, mask, false);
        assert_eq!(rows_with_collisions(catalog, how, strategy, mask, true), made, "{how} by {strategy}, counted");
        made
    }

    fn rows_with_collisions(catalog: &Catalog, how: JoinKind, strategy: Strategy, mask: u128, count: bool) -> usize {
        let memory = |name| Budget::new(name, "--device-memory", 64 << 20);
        let host: Arc<dyn Device> = Arc::new(HostDevice::new(0, 2, memory("device memory"), None).unwrap());
        let gpu = (gpu_count().unwrap() > 0).then(|| open_gpu(0, 2, |_| memory("memory of a GPU")).unwrap());
        let found = |device: &Arc<dyn Device>| rows_on(&**device, catalog, how, strategy, mask, count);
        let rows = found(&host);
        gpu.iter().for_each(|gpu| assert_eq!(found(gpu), rows, "{how} by {strategy} on a GPU"));
        rows
    }

    fn rows_on(
        device: &dyn Device,
        catalog: &Catalog,
        how: JoinKind,
        strategy: Strategy,
        mask: u128,
        count: bool,
    ) -> usize {
        let spec = JoinSpec { how, count, ..JoinSpec::inner("build", "probe", vec![KeyPair::new("k", "k")]) };
        let plan = planner::plan(planner::bind(&spec, catalog).unwrap(), Some(strategy)).unwrap();
        let task = Arc::new(plan.task().unwrap());
        let layout = KeyLayout::with_colliding_hashes(task.key_facts.clone(), mask);
        let layout = if device.strings().is_some() { layout.made_by_device() } else { layout };
        assert_eq!(layout.is_hashed_by_device(), device.strings().is_some());
        let (sink, monitor) = (CountRows::default(), Monitor::new(CancelFlag::new()));
        let input = |role| Arc::new(SideInput::of_task(&task, role, device.strings().is_some()));
        let preparation = Preparation::new(task.clone(), input(Role::Build), input(Role::Probe), device);
        let preparation = Preparation { layout, ..preparation };
        run_prepared(preparation, &Rank::alone(), device, catalog.arena(), &sink, &monitor).unwrap();
        sink.0.into_inner()
    }

    #[derive(Default)]
    struct Keep(Mutex<Vec<RecordBatch>>);

    impl BatchSink for Keep {
        fn push(&self, batch: RecordBatch) -> Result<()> {
            self.0.lock().push(batch);
            Ok(())
        }
    }

    /// One build row has far longer text than the others, and all probe rows match it.
    #[test]
    fn text_far_longer_than_the_mean_is_gathered_in_smaller_slices() {
        const ROWS: usize = 500;
        if gpu_count().unwrap() == 0 {
            println!("no GPU: nothing was tested");
            return;
        }
        let long = "long text ".repeat(300);
        let key = |keys: Vec<i32>| Arc::new(Int32Array::from(keys)) as ArrayRef;
        let text = (0..200).map(|row| if row == 7 { long.clone() } else { row.to_string() });
        let text: ArrayRef = Arc::new(StringArray::from_iter_values(text));
        let build = vec![("k", key((0..200).collect())), ("text", text)];
        let catalog = catalog_with(build, vec![("k", key(vec![7; ROWS])), ("row", key((0..ROWS as i32).collect()))]);
        let budget = |_| Budget::new("memory of a GPU", "--device-memory", 64 << 20);
        let gpu = open_gpu(0, 2, budget).unwrap();
        for strategy in Strategy::ALL {
            let spec = JoinSpec::inner("build", "probe", vec![KeyPair::new("k", "k")]);
            let mut plan = planner::plan(planner::bind(&spec, &catalog).unwrap(), Some(strategy)).unwrap();
            (plan.composition.build_side, plan.composition.dense, plan.composition.device_gathers_text) =
                (crate::join::Side::Left, false, true);
            let (sink, monitor) = (Keep::default(), Monitor::new(CancelFlag::new()));
            run(&Arc::new(plan.task().unwrap()), &*gpu, catalog.arena(), &sink, &monitor).unwrap();
            let batches = sink.0.into_inner();
            assert!(batches.len() > 10, "{strategy}: {} batches", batches.len());
            let mut rows: Vec<i32> = Vec::new();
            for batch in batches {
                batch.columns().iter().for_each(|column| column.to_data().validate_full().unwrap());
                assert!(batch["text"].as_string::<i32>().iter().all(|text| text == Some(&long)), "{strategy}");
                rows.extend(batch["row"].as_primitive::<Int32Type>().values());
            }
            rows.sort_unstable();
            assert_eq!(rows, (0..ROWS as i32).collect::<Vec<_>>(), "{strategy}");
        }
    }

    /// Text of the build side arrives part by part, with and without columns of a fixed width.
    #[test]
    fn text_of_the_build_side_is_deferred_like_other_columns() {
        const ROWS: i32 = 3000;
        if gpu_count().unwrap() == 0 {
            println!("no GPU: nothing was tested");
            return;
        }
        let text_of = |key: i32| (key % 7 > 0).then(|| "text".repeat(key as usize % 50) + &key.to_string());
        let text: ArrayRef = Arc::new((0..ROWS).map(text_of).collect::<StringArray>());
        let numbers = |numbers: Vec<i32>| Arc::new(Int32Array::from(numbers)) as ArrayRef;
        let keys: Vec<i32> = (0..4 * ROWS).map(|row| row.wrapping_mul(7919) % ROWS).collect();
        let build = vec![("k", numbers((0..ROWS).collect())), ("text", text), ("a", numbers((0..ROWS).collect()))];
        let probe = vec![("k", numbers(keys)), ("row", numbers((0..4 * ROWS).collect()))];
        let catalog = catalog_with(build, probe);
        let gpu = open_gpu(0, 2, |_| Budget::new("memory of a GPU", "--device-memory", 64 << 20)).unwrap();
        for columns in [&["k", "text", "row"][..], &["k", "text", "row", "a"]] {
            let mut divided = Vec::new();
            for defer_build_payload in [false, true] {
                let columns = columns.iter().map(|&column| column.into()).collect();
                let spec = JoinSpec { columns, ..JoinSpec::inner("build", "probe", vec![KeyPair::new("k", "k")]) };
                let mut plan = planner::plan(planner::bind(&spec, &catalog).unwrap(), Some(Strategy::Hash)).unwrap();
                (plan.composition.build_side, plan.composition.device_gathers_text) = (crate::join::Side::Left, true);
                if defer_build_payload {
                    plan.composition.transfer_order = TransferOrder::DeferBuildPayload;
                }
                let task = Arc::new(Task { chunk_rows_min: Some(500), ..plan.task().unwrap() });
                let (sink, monitor) = (Keep::default(), Monitor::new(CancelFlag::new()));
                run(&task, &*gpu, catalog.arena(), &sink, &monitor).unwrap();
                let mut rows: Vec<i32> = Vec::new();
                for batch in sink.0.into_inner() {
                    batch.columns().iter().for_each(|column| column.to_data().validate_full().unwrap());
                    let (keys, text) = (batch["k"].as_primitive::<Int32Type>(), batch["text"].as_string::<i32>());
                    assert!(keys.values().iter().zip(text).all(|(&key, text)| text == text_of(key).as_deref()));
                    let other = batch.column_by_name("a").map(|other| other.as_primitive::<Int32Type>().values());
                    assert!(other.is_none_or(|other| other == keys.values()));
                    rows.extend(batch["row"].as_primitive::<Int32Type>().values());
                }
                rows.sort_unstable();
                assert!(rows == (0..4 * ROWS).collect::<Vec<_>>(), "last {defer_build_payload}");
                let phases = monitor.phases();
                divided.push(phases.iter().find(|phase| phase.phase == Phase::Expand).map_or(0, |phase| phase.bytes));
            }
            assert!(divided[1] > divided[0], "pairs are divided by parts of the build side: {divided:?}");
        }
    }

    #[test]
    fn probe_rows_that_only_share_a_hash_are_not_matched() {
        // One build row, and hashes of one bit: half of the probe rows find it, but only one is a
        // real match.
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
