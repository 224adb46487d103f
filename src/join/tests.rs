//! Joins at the edges: little memory, small batches, jobs that are stopped, keys that look
//! different on both sides.

mod helping;
mod prepared;
mod shared;

use std::sync::Arc;

use arrow::array::{
    Array, ArrayRef, AsArray, BinaryViewArray, BooleanArray, DictionaryArray, DurationSecondArray,
    FixedSizeBinaryArray, Float64Array, Int8Array, Int16Array, Int32Array, RecordBatch, StringArray,
};
use arrow::buffer::NullBuffer;
use arrow::datatypes::{DataType, Field, Float64Type, Schema};
use arrow::util::display::array_value_to_string;
use parking_lot::Mutex;

use super::{BatchSink, Monitor, RowLayout, run};
use crate::catalog::{Catalog, Upload, UploadOptions};
use crate::device::host::{EmulatedLink, HostDevice};
use crate::device::{CancelFlag, Device, Phase, RadixBits};
use crate::memory::{Arena, Budget};
use crate::planner::{self, JoinKind, JoinSpec, KeyPair, Plan, Side, Strategy};
use crate::{Error, Result};

struct Bench {
    catalog: Catalog,
    device: HostDevice,
}

impl Bench {
    fn new(device_memory: u64, left: RecordBatch, right: RecordBatch) -> Self {
        Self::of_batches(device_memory, &[left], &[right])
    }

    fn of_batches(device_memory: u64, left: &[RecordBatch], right: &[RecordBatch]) -> Self {
        let catalog = Catalog::new(Arena::new(Budget::new("host memory", "--host-memory", 1 << 30)));
        for (name, batches) in [("l", left), ("r", right)] {
            let mut upload = Upload::begin(&catalog, name, batches[0].schema(), UploadOptions::default()).unwrap();
            batches.iter().for_each(|batch| upload.append(batch.clone()).unwrap());
            upload.commit().unwrap();
        }
        Self { catalog, device: device(device_memory) }
    }

    fn plan(&self, spec: JoinSpec, strategy: Strategy, build_side: Side) -> Plan {
        let mut plan = planner::plan(planner::bind(&spec, &self.catalog).unwrap(), Some(strategy)).unwrap();
        plan.composition.build_side = build_side;
        plan
    }

    fn run(&self, plan: &Plan, sink: &dyn BatchSink, monitor: &Monitor) -> Result<()> {
        let outcome = run(&Arc::new(plan.task().unwrap()), &self.device, self.catalog.arena(), sink, monitor);
        assert_eq!(self.device.memory().used_bytes(), 0, "the join left device memory in use");
        outcome
    }
}

fn device(memory: u64) -> HostDevice {
    HostDevice::new(0, 2, Budget::new("memory of device host:0", "--device-memory", memory), None).unwrap()
}

fn spec(how: JoinKind) -> JoinSpec {
    JoinSpec { how, ..JoinSpec::inner("l", "r", vec![KeyPair::new("k", "k")]) }
}

fn batch(columns: Vec<(&str, ArrayRef)>) -> RecordBatch {
    let field = |(name, array): &(&str, ArrayRef)| Field::new(*name, array.data_type().clone(), true);
    let schema = Arc::new(Schema::new(columns.iter().map(field).collect::<Vec<_>>()));
    RecordBatch::try_new(schema, columns.into_iter().map(|(_, array)| array).collect()).unwrap()
}

fn numbers(keys: impl IntoIterator<Item = i32>) -> ArrayRef {
    Arc::new(Int32Array::from_iter_values(keys))
}

/// Hands each batch to a closure, and keeps none.
struct Each<F>(F);

impl<F: Fn(RecordBatch) -> Result<()> + Sync> BatchSink for Each<F> {
    fn push(&self, batch: RecordBatch) -> Result<()> {
        (self.0)(batch)
    }
}

#[test]
fn results_of_any_size_are_delivered_with_little_memory() {
    const ROWS: i32 = 20_000;
    let text = |row: i32| format!("{row:0>1000}");
    let texts: ArrayRef = Arc::new(StringArray::from_iter_values((0..ROWS).map(text)));
    let left = batch(vec![("k", numbers(0..ROWS)), ("text", texts)]);
    let right = batch(vec![("k", numbers(ROWS..2 * ROWS))]);
    let bench = Bench::new(4 << 20, left, right);
    // 20 MB of text do not fit at once next to the tables, whichever way the text leaves.
    let host = bench.catalog.arena().budget();
    let _held = host.reserve(host.free_bytes() - (12 << 20), "a test").unwrap();
    for how in [JoinKind::LeftAnti, JoinKind::Left, JoinKind::Full] {
        for build_side in [Side::Left, Side::Right] {
            for strategy in Strategy::ALL {
                let label = format!("{how} by {strategy}, build {build_side}");
                let seen = Mutex::new((0, 0));
                let sink = Each(|batch: RecordBatch| {
                    let mut seen = seen.lock();
                    seen.0 += batch.num_rows();
                    seen.1 = seen.1.max(batch.num_rows());
                    Ok(())
                });
                let spec = JoinSpec { batch_rows: Some(1000), ..spec(how) };
                let plan = bench.plan(spec, strategy, build_side);
                bench.run(&plan, &sink, &Monitor::default()).unwrap_or_else(|error| panic!("{label}: {error}"));
                let expected = if how == JoinKind::Full { 2 * ROWS } else { ROWS };
                assert_eq!(seen.into_inner(), (expected as usize, 1000), "{label}");
            }
        }
    }
}

#[test]
fn a_join_that_is_stopped_pushes_no_further_batch() {
    let keys: Int32Array = (0..5000).map(|row| (row % 2 == 0).then_some(row)).collect();
    let left = batch(vec![("k", Arc::new(keys)), ("row", numbers(0..5000))]);
    let bench = Bench::new(64 << 20, left, batch(vec![("k", numbers(0..10))]));
    for how in [JoinKind::LeftAnti, JoinKind::Left] {
        for build_side in [Side::Left, Side::Right] {
            for strategy in Strategy::ALL {
                let monitor = Monitor::new(CancelFlag::new());
                let pushed = Mutex::new(0);
                let sink = Each(|_| {
                    *pushed.lock() += 1;
                    monitor.cancel().raise();
                    Ok(())
                });
                let plan = bench.plan(JoinSpec { batch_rows: Some(10), ..spec(how) }, strategy, build_side);
                let outcome = bench.run(&plan, &sink, &monitor);
                assert!(matches!(outcome, Err(Error::Cancelled(_))), "{how} by {strategy}: {outcome:?}");
                assert_eq!(pushed.into_inner(), 1, "{how} by {strategy}, build {build_side}");
            }
        }
    }
}

/// Returns a join for each way of making keys: one number (raw), two numbers (packed), a long text
/// (hashed and compared).
fn joins_of_every_kind_of_key(rows: i32) -> Vec<(&'static str, Bench, JoinSpec)> {
    let key = |row: i32, factor: i32| (i64::from(row) * i64::from(factor) % i64::from(rows)) as i32;
    let text = |number: i32| format!("key number {number} of a long list");
    let side = |factor: i32, mask: i32| {
        let keys = || (0..rows).map(move |row| key(row, factor) & mask);
        let texts: ArrayRef = Arc::new(StringArray::from_iter_values(keys().map(text)));
        batch(vec![("k", numbers(keys())), ("l", numbers(keys())), ("t", texts), ("v", numbers(0..rows))])
    };
    let spec = |keys: &[&str]| JoinSpec {
        columns: vec!["left.v".into(), "right.v".into()],
        ..JoinSpec::inner("l", "r", keys.iter().map(|key| KeyPair::new(key, key)).collect())
    };
    // The factors have no divisor in common with the number of rows. Each even key occurs twice on
    // the left, so that no stage ends early because keys are distinct.
    let bench = || Bench::new(1 << 30, side(7919, !1), side(104_729, !0));
    vec![
        ("a number", bench(), spec(&["k"])),
        ("two numbers", bench(), spec(&["k", "l"])),
        ("a text", bench(), spec(&["t"])),
    ]
}

/// Counts looks at the cancel flag. The counts show on any machine which stage ignores the flag.
/// Times would show only stages that take long, and only on an idle machine.
#[test]
fn every_stage_of_every_strategy_checks_the_cancel_flag_regularly() {
    const ROWS: i32 = 1 << 20;
    /// A few morsels.
    const ROWS_PER_LOOK: i32 = 1 << 16;
    for (keys, bench, spec) in joins_of_every_kind_of_key(ROWS) {
        for strategy in Strategy::ALL {
            let monitor = Monitor::default();
            let plan = bench.plan(spec.clone(), strategy, Side::Left);
            bench.run(&plan, &Each(|_| Ok(())), &monitor).unwrap();
            let looks = monitor.looks();
            println!("{strategy} on {keys}: {looks:?}");
            // These stages end at the first row that decides, or have nothing to do if nothing has
            // to be copied.
            let is_brief = |phase: &Phase| match phase {
                Phase::CopyIn | Phase::CheckBuildOrder | Phase::CheckProbeOrder => true,
                Phase::PackKeys => keys == "a number",
                _ => false,
            };
            for (phase, looks) in looks.into_iter().filter(|(phase, _)| !is_brief(phase)) {
                let expected = (ROWS / ROWS_PER_LOOK) as u64;
                assert!(looks >= expected, "{strategy} on {keys}: {looks} checks in {phase:?}, fewer than {expected}");
            }
        }
    }
}

#[test]
fn a_join_stopped_at_any_point_does_almost_no_further_work() {
    const ROWS: i32 = 1 << 19;
    /// Number of points at which the join is stopped.
    const PLACES: u64 = 8;
    /// Looks allowed after the stop: by threads that have begun a task, and by threads that learn
    /// of the stop from them.
    const LOOKS_AFTER: u64 = 16;
    for (keys, bench, spec) in joins_of_every_kind_of_key(ROWS) {
        for strategy in Strategy::ALL {
            let plan = bench.plan(spec.clone(), strategy, Side::Left);
            let run = |monitor: &Monitor| bench.run(&plan, &Each(|_| Ok(())), monitor);
            let whole = Monitor::default();
            run(&whole).unwrap();
            let looks = whole.cancel().looks();
            let mut after = Vec::new();
            for place in 0..PLACES {
                let look = 1 + (looks - 1) * place / PLACES;
                let monitor = Monitor::new(CancelFlag::raised_at_look(look));
                let outcome = run(&monitor);
                assert!(matches!(outcome, Err(Error::Cancelled(_))), "{strategy} on {keys}, check {look}: {outcome:?}");
                after.push(monitor.cancel().looks() - look);
            }
            println!("{strategy} on {keys}: {looks} checks in total; {after:?} after the flag was raised");
            assert!(after.iter().all(|&looks| looks <= LOOKS_AFTER), "{strategy} on {keys} went on: {after:?}");
        }
    }
}

/// Returns the values of a column as text, and floats as their bits.
fn shown(array: &ArrayRef) -> Vec<String> {
    let value = |row: usize| match array.data_type() {
        DataType::Float64 => format!("{:x}", array.as_primitive::<Float64Type>().value(row).to_bits()),
        _ => array_value_to_string(array, row).unwrap(),
    };
    (0..array.len()).map(value).collect()
}

/// Joins on two key columns of distinct values. The first `common` values of both are equal in
/// pairs.
fn keys_show_the_left_value(left: ArrayRef, right: ArrayRef, common: usize) {
    let what = format!("{} and {}", left.data_type(), right.data_type());
    let (left_shown, right_shown) = (shown(&left), shown(&right));
    let row = |keys: &ArrayRef| numbers(0..keys.len() as i32);
    let bench = Bench::new(
        64 << 20,
        batch(vec![("k", left.clone()), ("a", row(&left))]),
        batch(vec![("k", right.clone()), ("b", row(&right))]),
    );
    for how in [JoinKind::Inner, JoinKind::Left, JoinKind::Right, JoinKind::Full] {
        let mut expected = left_shown[..common].to_vec();
        if how.keeps_unmatched(Side::Left) {
            expected.extend_from_slice(&left_shown[common..]);
        }
        if how.keeps_unmatched(Side::Right) {
            expected.extend_from_slice(&right_shown[common..]);
        }
        expected.sort_unstable();
        for build_side in [Side::Left, Side::Right] {
            for strategy in Strategy::ALL {
                let label = format!("{how} on {what} by {strategy}, build {build_side}");
                let found = Mutex::new(Vec::new());
                let sink = Each(|batch: RecordBatch| {
                    found.lock().extend(shown(batch.column(0)));
                    Ok(())
                });
                let plan = bench.plan(spec(how), strategy, build_side);
                bench.run(&plan, &sink, &Monitor::default()).unwrap_or_else(|error| panic!("{label}: {error}"));
                let mut found = found.into_inner();
                found.sort_unstable();
                assert_eq!(found, expected, "{label}");
            }
        }
    }
}

#[test]
fn keys_of_dictionaries_with_different_indices_join() {
    let text = |number: i16| format!("value {number}");
    let values = |count: i16| StringArray::from_iter_values((0..count).map(text));
    let left = DictionaryArray::new(Int8Array::from_iter_values(0..100), Arc::new(values(100)));
    let right = DictionaryArray::new(Int16Array::from_iter_values(0..300), Arc::new(values(300)));
    keys_show_the_left_value(Arc::new(left.clone()), Arc::new(right.clone()), 100);
    keys_show_the_left_value(Arc::new(right), Arc::new(left), 100);
}

#[test]
fn keys_of_different_binary_layouts_join() {
    let bytes = |number: u32| number.to_be_bytes();
    let fixed = FixedSizeBinaryArray::try_from_iter((0..50).map(bytes)).unwrap();
    let view = BinaryViewArray::from_iter_values((0..80).map(bytes));
    keys_show_the_left_value(Arc::new(fixed.clone()), Arc::new(view.clone()), 50);
    keys_show_the_left_value(Arc::new(view), Arc::new(fixed), 50);
}

#[test]
fn keys_of_dictionaries_and_plain_values_join() {
    let plain: ArrayRef = Arc::new(BooleanArray::from(vec![true, false]));
    let encoded = |values: &ArrayRef| -> ArrayRef {
        Arc::new(DictionaryArray::new(Int8Array::from_iter_values(0..values.len() as i8), values.clone()))
    };
    keys_show_the_left_value(encoded(&plain), plain.clone(), 2);
    keys_show_the_left_value(plain.clone(), encoded(&plain), 2);
    let plain: ArrayRef = Arc::new(DurationSecondArray::from_iter_values(0..30));
    let fewer: ArrayRef = Arc::new(DurationSecondArray::from_iter_values(0..20));
    keys_show_the_left_value(encoded(&plain), fewer.clone(), 20);
    keys_show_the_left_value(fewer, encoded(&plain), 20);
}

#[test]
fn float_keys_in_the_result_have_the_bits_of_the_left_side() {
    let other_nan = f64::from_bits(f64::NAN.to_bits() | 5 | 1 << 63);
    let left: ArrayRef = Arc::new(Float64Array::from(vec![-0.0, f64::NAN, 1.5, 7.0]));
    let right: ArrayRef = Arc::new(Float64Array::from(vec![0.0, other_nan, 1.5, 8.0, 9.0]));
    keys_show_the_left_value(left.clone(), right.clone(), 3);
    keys_show_the_left_value(right, left, 3);
}

#[test]
fn progress_never_decreases_and_is_complete_only_at_the_end() {
    let left = batch(vec![("k", numbers((0..3000).map(|row| row % 2500))), ("a", numbers(0..3000))]);
    let right = batch(vec![("k", numbers(1000..9000)), ("b", numbers(0..8000))]);
    let bench = Bench::new(64 << 20, left, right);
    for how in JoinKind::ALL {
        for build_side in [Side::Left, Side::Right] {
            for strategy in Strategy::ALL {
                let label = format!("{how} by {strategy}, build {build_side}");
                let monitor = Monitor::default();
                assert_eq!(monitor.progress(), 0.0);
                let seen = Mutex::new(Vec::new());
                let sink = Each(|_| {
                    seen.lock().push(monitor.progress());
                    Ok(())
                });
                let plan = bench.plan(JoinSpec { batch_rows: Some(100), ..spec(how) }, strategy, build_side);
                bench.run(&plan, &sink, &monitor).unwrap();
                let seen = seen.into_inner();
                assert!(seen.is_sorted(), "{label}: {seen:?}");
                // The build side is done before the first batch, and the last batch sees work left.
                assert!(seen[0] > 0.0 && seen[seen.len() - 1] < 1.0, "{label}: {seen:?}");
                assert!(seen.windows(2).all(|pair| pair[0] < pair[1]), "{label}: {seen:?}");
                assert_eq!(monitor.progress(), 1.0, "{label}");
            }
        }
    }
}

#[test]
fn a_filter_changes_no_row_of_any_join_and_is_used_only_if_unmatched_rows_are_dropped() {
    // One probe row in ten matches; keys repeat on both sides, and some are null.
    let keys = |rows: i32, of: fn(i32) -> i32| -> ArrayRef {
        Arc::new((0..rows).map(|row| (row % 17 > 0).then_some(of(row))).collect::<Int32Array>())
    };
    let left = batch(vec![("k", keys(600, |row| row / 2 * 10)), ("a", numbers(0..600))]);
    let right = batch(vec![("k", keys(9000, |row| row / 3)), ("b", numbers(0..9000))]);
    let bench = Bench::new(64 << 20, left, right);
    for how in JoinKind::ALL {
        for build_side in [Side::Left, Side::Right] {
            for strategy in Strategy::ALL {
                let label = format!("{how} by {strategy}, build {build_side}");
                let rows_and_phases = |filter: bool| {
                    let rows = Mutex::new(Vec::new());
                    let sink = Each(|batch: RecordBatch| {
                        let columns: Vec<_> = batch.columns().iter().map(shown).collect();
                        let row = |at: usize| columns.iter().map(|column| column[at].clone()).collect::<Vec<_>>();
                        rows.lock().extend((0..batch.num_rows()).map(row));
                        Ok(())
                    });
                    let monitor = Monitor::default();
                    let mut plan = bench.plan(spec(how), strategy, build_side);
                    plan.composition.filter = filter;
                    bench.run(&plan, &sink, &monitor).unwrap_or_else(|error| panic!("{label}: {error}"));
                    let mut rows = rows.into_inner();
                    rows.sort_unstable();
                    (rows, monitor.phases())
                };
                let (expected, phases) = rows_and_phases(false);
                assert!(phases.iter().all(|phase| phase.phase != Phase::Filter), "{label}");
                let (rows, phases) = rows_and_phases(true);
                assert!(rows == expected, "{label}: {} rows and {}", rows.len(), expected.len());
                let is_used = phases.iter().any(|phase| phase.phase == Phase::Filter);
                assert_eq!(is_used, how.drops_unmatched(build_side.other()), "{label}");
            }
        }
    }
}

/// Regression test: cached columns were reported as copied, in no time.
#[test]
fn cached_columns_and_columns_read_in_place_are_not_reported_as_copied() {
    const ROWS: i32 = 4000;
    let left = batch(vec![("k", numbers(0..ROWS)), ("a", numbers(0..ROWS))]);
    // One row has no match. Otherwise the result would share the columns of the right table.
    let right = batch(vec![("k", numbers((0..ROWS + 1).rev())), ("b", numbers(0..ROWS + 1))]);
    let mut bench = Bench::new(64 << 20, left, right);
    let copied = |bench: &Bench| {
        let monitor = Monitor::default();
        let task = bench.plan(spec(JoinKind::Inner), Strategy::Hash, Side::Left).task().unwrap();
        run(&Arc::new(task), &bench.device, bench.catalog.arena(), &Each(|_| Ok(())), &monitor).unwrap();
        let phases = monitor.phases();
        let phase = phases.iter().find(|phase| phase.phase == Phase::CopyIn).unwrap();
        (phase.bytes, phase.kept_bytes, phase.in_place_bytes)
    };
    // Bytes of the columns a and b. The keys are copied in another phase, to be packed.
    let bytes = 4 * (2 * ROWS + 1) as u64;
    assert_eq!(copied(&bench), (0, 0, bytes), "a host device without a link reads contiguous columns in place");

    let link = EmulatedLink { to_device_bytes_per_second: 1e12, from_device_bytes_per_second: 1e12 };
    let budget = Budget::new("memory of device host:0", "--device-memory", 64 << 20);
    bench.device = HostDevice::new(0, 2, budget, Some(link)).unwrap();
    assert_eq!(copied(&bench), (bytes, 0, 0));
    bench.device.cache().unwrap().enable_cache(16 << 20).unwrap();
    assert_eq!(copied(&bench), (bytes, 0, 0), "nothing was cached before");
    assert_eq!(copied(&bench), (0, bytes, 0));
}

/// A null that matches nothing is in no matched row, so that no code has to look for nulls there.
#[test]
fn keys_of_matched_rows_have_no_bitmap_unless_nulls_match() {
    let some = |rows: i32, null: i32| -> ArrayRef {
        Arc::new((0..rows).map(|row| (row % null > 0).then_some(row / 2)).collect::<Int32Array>())
    };
    let payload =
        |rows: i32| -> ArrayRef { Arc::new((0..rows).map(|row| (row % 3 > 0).then_some(row)).collect::<Int32Array>()) };
    let left = batch(vec![("k", some(600, 7)), ("a", payload(600))]);
    let bench = Bench::new(64 << 20, left, batch(vec![("k", some(900, 5)), ("b", payload(900))]));
    let cases = [(JoinKind::Inner, false, true), (JoinKind::Inner, true, false), (JoinKind::Full, false, false)];
    for (how, nulls_equal, are_all_there) in cases {
        for build_side in [Side::Left, Side::Right] {
            for strategy in Strategy::ALL {
                let label = format!("{how} by {strategy}, build {build_side}, nulls match: {nulls_equal}");
                let plan = bench.plan(JoinSpec { nulls_equal, ..spec(how) }, strategy, build_side);
                let nulls = Mutex::new(Vec::new());
                let sink = Each(|batch: RecordBatch| {
                    let of = |name: &str| batch.column_by_name(name).unwrap().nulls().map(NullBuffer::null_count);
                    nulls.lock().push([of("k"), of("a"), of("b")]);
                    Ok(())
                });
                bench.run(&plan, &sink, &Monitor::default()).unwrap();
                let nulls = nulls.into_inner();
                let sum = |column: usize| nulls.iter().filter_map(|nulls| nulls[column]).sum::<usize>();
                assert!(sum(1) > 0 && sum(2) > 0, "{label}: payload keeps its nulls, {nulls:?}");
                match are_all_there {
                    true => assert!(nulls.iter().all(|nulls| nulls[0].is_none()), "{label}: {nulls:?}"),
                    false => assert!(sum(0) > 0, "{label}: {nulls:?}"),
                }
            }
        }
    }
}

/// Build keys that look distinct but repeat are grouped while a chunk of the probe side is in
/// memory. A large probe side once left no room for grouping.
///
/// The test allows slightly more memory than the same join takes with a probe side of one small
/// chunk. Grouping takes by far the most of it: with two partitions, its table covers half of the
/// keys. Without memory held back for grouping, a chunk takes half of free memory and leaves too
/// little. The device has one thread, so that memory use is the same in every run.
#[test]
fn a_build_side_can_be_grouped_late_with_a_probe_side_of_any_size() {
    // One key in a hundred repeats.
    const ROWS: i32 = 40_000;
    let left_keys = numbers((0..ROWS).map(|row| row - i32::from(row % 100 == 99)));
    let left = batch(vec![("k", left_keys), ("a", numbers(0..ROWS))]);
    let right = |rows: i32| {
        let payload = || numbers(0..rows);
        let keys = numbers((0..rows).map(|row| row % ROWS));
        batch(vec![("k", keys), ("b", payload()), ("c", payload()), ("d", payload()), ("e", payload())])
    };
    let mut small = Bench::new(0, left.clone(), right(1000));
    let mut large = Bench::new(0, left, right(8 * ROWS));
    for strategy in [Strategy::RadixHash, Strategy::RadixHashGfur] {
        let join = |bench: &mut Bench, memory: u64| {
            // The device has a link, so that its input is copied and takes memory.
            let link = EmulatedLink { to_device_bytes_per_second: 1e12, from_device_bytes_per_second: 1e12 };
            let budget = Budget::new("memory of device host:0", "--device-memory", memory);
            bench.device = HostDevice::new(0, 1, budget, Some(link)).unwrap().joining_partitions(false);
            let mut plan = bench.plan(spec(JoinKind::Inner), strategy, Side::Left);
            // The planner is not told of the repeats, as if so few keys repeat that no sample has
            // any.
            plan.estimates.left_repeats = false;
            plan.composition.row_layout = RowLayout::Partitioned(RadixBits { skip: 0, bits: 1 });
            let rows = Mutex::new(0);
            let sink = Each(|batch: RecordBatch| {
                *rows.lock() += batch.num_rows();
                Ok(())
            });
            let monitor = Monitor::default();
            bench.run(&plan, &sink, &monitor)?;
            let phases = monitor.phases();
            let first = |wanted: Phase| phases.iter().position(|phase| phase.phase == wanted);
            assert!(
                first(Phase::Match).is_some() && first(Phase::Match) < first(Phase::GroupBuild),
                "{strategy}: {phases:?}"
            );
            Ok(rows.into_inner())
        };
        let mut memory = 256 << 10;
        while let Err(error) = join(&mut small, memory) {
            assert!(matches!(error, Error::Exhausted(_)) && memory < 64 << 20, "{error}");
            memory += memory / 100;
        }
        let rows = join(&mut large, memory + memory / 50).unwrap_or_else(|error| panic!("{strategy}: {error}"));
        // Every build row matches the 8 probe rows of its key.
        assert_eq!(rows, 8 * ROWS as usize);
    }
}
