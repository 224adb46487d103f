//! Sorted tables are merged in place, for every packing of their keys.

use std::sync::Arc;

use arrow::array::{ArrayRef, Float32Array, Int32Array, Int64Array, RecordBatch, StringArray};
use dovetail::catalog::{Catalog, Upload, UploadOptions};
use dovetail::device::host::HostDevice;
use dovetail::device::{CancelFlag, Phase};
use dovetail::join::{self, Monitor};
use dovetail::memory::{Arena, Budget};
use dovetail::planner::{self, JoinKind, Strategy};

use crate::{Collect, naive, spec};

/// Uploads key columns and a row number as a table that is declared sorted by all key columns.
fn put_sorted(catalog: &Catalog, name: &str, columns: Vec<ArrayRef>) {
    let keys = columns.len();
    let rows = Arc::new(Int32Array::from_iter_values(0..columns[0].len() as i32)) as ArrayRef;
    let named = columns.into_iter().enumerate().map(|(at, column)| (format!("k{at}"), column));
    let batch = RecordBatch::try_from_iter_with_nullable(
        named.chain([("row".into(), rows)]).map(|(name, array)| (name, array, true)),
    )
    .unwrap();
    let sorted_by = (0..keys).map(|key| format!("k{key}")).collect();
    let options = UploadOptions { sorted_by, ..UploadOptions::default() };
    let mut upload = Upload::begin(catalog, name, batch.schema(), options).unwrap();
    // Two batches, so that the order continues across their boundary.
    let half = batch.num_rows() / 2;
    upload.append(batch.slice(0, half)).unwrap();
    upload.append(batch.slice(half, batch.num_rows() - half)).unwrap();
    upload.commit().unwrap();
}

/// Joins two sorted tables. Checks that the plan and the join merge them without sorting.
fn merges_without_sorting(label: &str, left: Vec<ArrayRef>, right: Vec<ArrayRef>) {
    let catalog = Catalog::new(Arena::new(Budget::new("host memory", "--host-memory", 1 << 30)));
    let keys = left.len();
    put_sorted(&catalog, "l", left);
    put_sorted(&catalog, "r", right);
    let memory = Budget::new("memory of device host:0", "--device-memory", 64 << 20);
    let device = HostDevice::new(0, 2, memory, None).unwrap();
    let run = |how, strategy| {
        let plan = planner::plan(planner::bind(&spec(keys, how), &catalog).unwrap(), Some(strategy)).unwrap();
        let (sink, monitor) = (Collect::default(), Monitor::new(CancelFlag::new()));
        join::run(&Arc::new(plan.task().unwrap()), &device, catalog.arena(), &sink, &monitor).unwrap();
        let phases = monitor.phases();
        (plan.build_sorted && plan.probe_sorted, phases, sink.batches.into_inner())
    };
    for how in [JoinKind::Inner, JoinKind::Full, JoinKind::RightAnti] {
        let (_, _, expected) = run(how, Strategy::Hash);
        for strategy in [Strategy::SortMerge, Strategy::SortMergeGfur] {
            let (planned_sorted, phases, found) = run(how, strategy);
            assert!(planned_sorted, "{label}: the plan of {strategy} sorts");
            assert!(
                !phases.iter().any(|phase| matches!(phase.phase, Phase::SortBuild | Phase::SortProbe)),
                "{label}: {strategy} went through {phases:?}"
            );
            naive::assert_same_batches(&found, &expected, &format!("{label}: {how} by {strategy}"));
        }
    }
}

fn integers(values: impl IntoIterator<Item = i32>) -> ArrayRef {
    Arc::new(Int32Array::from_iter_values(values))
}

#[test]
fn sorted_tables_are_merged_without_sorting() {
    merges_without_sorting("negative numbers", vec![integers(-900..1100)], vec![integers((-500..700).map(|n| n * 3))]);
    let words = |from: i32, to: i32| {
        let mut words: Vec<String> =
            (from..to).map(|n| "ab".repeat(n as usize % 4) + &format!("{:x}", n / 3)).collect();
        words.sort();
        Arc::new(StringArray::from_iter_values(words)) as ArrayRef
    };
    merges_without_sorting("short strings", vec![words(0, 700)], vec![words(300, 900)]);
    let composite = |rows: i32, step: i32| {
        let mut keys: Vec<(i32, String)> = (0..rows).map(|n| (n * step % 97 - 50, format!("{}", n % 13))).collect();
        keys.sort();
        let strings = StringArray::from_iter_values(keys.iter().map(|key| &key.1));
        vec![integers(keys.iter().map(|key| key.0)), Arc::new(strings) as ArrayRef]
    };
    merges_without_sorting("composite keys", composite(900, 7), composite(600, 11));
    let floats = |rows: i32, scale: f32| {
        let values = (-rows..rows).map(|n| n as f32 * scale).chain([f32::INFINITY, f32::NAN]);
        Arc::new(Float32Array::from_iter_values([f32::NEG_INFINITY].into_iter().chain(values))) as ArrayRef
    };
    merges_without_sorting("floats", vec![floats(400, 0.5)], vec![floats(300, 1.0)]);
    let nulls_first = |from: i64| {
        let values = (0..20).map(|_| None).chain((from..from + 500).map(Some));
        Arc::new(values.collect::<Int64Array>()) as ArrayRef
    };
    merges_without_sorting("nulls that match nothing", vec![nulls_first(-100)], vec![nulls_first(50)]);
}
