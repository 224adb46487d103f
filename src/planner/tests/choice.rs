//! Tests of the chosen strategy, build side, passes, moved columns, and the gatherer of text.

use std::collections::BTreeSet;

use arrow::array::{ArrayRef, Int32Array, RecordBatch, StringArray};

use super::*;
use crate::catalog::{Catalog, Upload, UploadOptions};
use crate::device::{Capabilities, KeyWidth, Phase};
use crate::join::TaskSide;
use crate::memory::{Arena, Budget, Interrupt};
use crate::planner::{JoinSpec, KeyPair, bind};

#[test]
fn text_is_gathered_by_the_faster_of_device_and_host() {
    let catalog = Catalog::new(Arena::new(Budget::new("host memory", "--host-memory", 1 << 30)));
    for name in ["l", "r"] {
        let key: ArrayRef = Arc::new(Int32Array::from_iter_values(0..10_000));
        let text = |length: usize| -> ArrayRef {
            Arc::new(StringArray::from_iter_values((0..10_000).map(|row| format!("{row:0length$}"))))
        };
        let columns = [("k", key), ("text", text(10)), ("too_long", text(5_000))];
        let batch = RecordBatch::try_from_iter(columns).unwrap();
        let mut upload = Upload::begin(&catalog, name, batch.schema(), UploadOptions::default()).unwrap();
        upload.append(batch).unwrap();
        upload.commit().unwrap();
    }
    let planned = |count: bool, strings: bool, rates: Rates, device_gathers_text: Option<bool>| {
        let spec = JoinSpec { count, ..JoinSpec::inner("l", "r", vec![KeyPair::new("k", "k")]) };
        let target =
            Target { capabilities: Capabilities { strings, exchanges: true, forms_gangs: true }, rates, ..a100() };
        let overrides = PlanOverrides { device_gathers_text, ..PlanOverrides::default() };
        plan_with_overrides(bind(&spec, &catalog).unwrap(), &overrides, &target)
    };
    let slow_host = || Rates { host_values: 1e6, ..a100().rates };
    let slow_link = || Rates { copy_in: 1e7, copy_out: 1e7, host_values: 1e12, ..a100().rates };
    let by_device = planned(false, true, slow_host(), None).unwrap();
    assert!(by_device.composition.device_gathers_text);
    let task = by_device.task().unwrap();
    for side in [&task.build, &task.probe] {
        assert_eq!(side.device_text, BTreeSet::from([1]), "the host gathers values of more than 4 KiB");
    }
    let by_host = planned(false, true, slow_link(), None).unwrap();
    assert!(!by_host.composition.device_gathers_text);
    assert!(by_host.task().unwrap().build.device_text.is_empty());
    assert!(!planned(false, true, slow_host(), Some(false)).unwrap().composition.device_gathers_text);
    assert!(planned(false, true, slow_link(), Some(true)).unwrap().composition.device_gathers_text);
    for (count, strings) in [(true, true), (false, false)] {
        let plan = planned(count, strings, slow_host(), None).unwrap();
        assert!(!plan.composition.device_gathers_text);
        let refused = planned(count, strings, slow_host(), Some(true)).unwrap_err();
        assert!(matches!(&refused, Error::Unsupported(text) if text.contains("gathers text")), "{refused}");
    }
}

#[test]
fn several_devices_that_cannot_exchange_rows_say_why() {
    let planned = |join, forms_gangs, exchanges| {
        let capabilities = Capabilities { exchanges, forms_gangs, ..a100().capabilities };
        let target = Target { ranks: 2, capabilities, ..a100() };
        plan_with_overrides(join, &PlanOverrides::default(), &target).unwrap()
    };
    let numbers = |how| bound(&sparse(1 << 24, 2), &sparse(1 << 25, 2), how);
    let words = |how| {
        let catalog = Catalog::new(Arena::new(Budget::new("host memory", "--host-memory", 1 << 20)));
        let words: ArrayRef = Arc::new(StringArray::from_iter_values((0..100).map(|row| format!("{row:0100}"))));
        catalog.create(table_of("r", &words)).unwrap();
        catalog.create(table_of("s", &words)).unwrap();
        bind(&JoinSpec { how, ..JoinSpec::inner("r", "s", vec![KeyPair::new("k", "k")]) }, &catalog).unwrap()
    };
    use Distribution::{Alone, Broadcast, Hash};
    for (join, forms_gangs, exchanges, distribution, why) in [
        (numbers(JoinKind::Inner), false, false, Alone, "one device runs it, because GPUs run a join together only if"),
        (numbers(JoinKind::Full), true, false, Alone, "one device runs it, because these devices share no memory"),
        (
            numbers(JoinKind::Inner),
            true,
            false,
            Broadcast,
            "each device has the whole build side, because these devices",
        ),
        (
            words(JoinKind::Full),
            true,
            true,
            Alone,
            "one device runs it, because rows are not exchanged by keys that are",
        ),
        (words(JoinKind::Inner), true, true, Broadcast, "the whole build side, because rows are not exchanged by keys"),
        (numbers(JoinKind::Full), true, true, Hash, ""),
    ] {
        let plan = planned(join, forms_gangs, exchanges);
        assert_eq!(plan.composition.distribution, distribution, "{why}");
        assert_eq!(plan.target.ranks, if distribution == Alone { 1 } else { 2 });
        let said = Explanation::new(&plan, "cuda:0", "named in the request".into(), None).device.reason;
        match why {
            "" => assert_eq!(said, "named in the request"),
            why => assert!(said.starts_with("named in the request; ") && said.contains(why), "{said}"),
        }
    }
}

/// Makes a table of one column `k`.
fn table_of(name: &str, column: &ArrayRef) -> Table {
    let batch = RecordBatch::try_from_iter([("k", column.clone())]).unwrap();
    Table::from_batches(name, batch.schema(), vec![batch]).unwrap()
}

#[test]
fn sorted_inputs_are_merged_without_sorting() {
    let sorted = |spec: TableSpec| TableSpec { ascending: true, ..spec };
    let join = bound(&sorted(sparse(1 << 24, 2)), &sorted(sparse(1 << 25, 2)), JoinKind::Inner);
    let target = Target::default();
    let plan = plan_on(join, None, &target).unwrap();
    assert!(matches!(plan.strategy(), Strategy::SortMerge | Strategy::SortMergeGfur), "{}", plan.strategy());
    assert!(plan.build_sorted && plan.probe_sorted);
    // A declared order is as good as a detected one.
    let unsorted = bound(&sparse(1 << 24, 2), &sparse(1 << 25, 2), JoinKind::Inner);
    let plan = plan_on(unsorted.clone(), None, &target).unwrap();
    assert!(matches!(plan.strategy(), Strategy::RadixHash | Strategy::RadixHashGfur), "{}", plan.strategy());
    let declare = |table: &Table, spec: TableSpec| {
        let mut table = spec.build(&table.name);
        table.sorted_by = vec![0];
        Arc::new(table)
    };
    let declared = BoundJoin {
        left: declare(&unsorted.left, sparse(1 << 24, 2)),
        right: declare(&unsorted.right, sparse(1 << 25, 2)),
        ..unsorted
    };
    let plan = plan_on(declared, None, &target).unwrap();
    assert!(plan.build_sorted && plan.probe_sorted);
    assert!(matches!(plan.strategy(), Strategy::SortMerge | Strategy::SortMergeGfur), "{}", plan.strategy());
}

#[test]
fn dense_distinct_keys_take_the_perfect_hash_path() {
    let target = Target::default();
    let probe = TableSpec { distinct: 1e4, ..TableSpec::primary(1 << 22, 1) };
    let dense = plan_on(bound(&TableSpec::primary(10_000, 1), &probe, JoinKind::Inner), None, &target).unwrap();
    assert!(dense.composition.dense);
    assert_eq!((dense.strategy(), dense.composition.build_side), (Strategy::Hash, Side::Left));
    let gaps = TableSpec { range: (0, 1 << 30), ..TableSpec::primary(10_000, 1) };
    assert!(!plan_on(bound(&gaps, &probe, JoinKind::Inner), None, &target).unwrap().composition.dense);
    let repeated = TableSpec { distinct: 5e3, ..TableSpec::primary(10_000, 1) };
    assert!(!plan_on(bound(&repeated, &probe, JoinKind::Inner), None, &target).unwrap().composition.dense);
    let negative = TableSpec { range: (-5, 9_994), ..TableSpec::primary(10_000, 1) };
    assert!(!plan_on(bound(&negative, &probe, JoinKind::Inner), None, &target).unwrap().composition.dense);
}

/// A join that is prepared before its rows are known makes keys for all values of their types.
#[test]
fn keys_of_unknown_rows_are_planned_for_all_values() {
    let spec =
        |key: DataType, rows| TableSpec { key, range: (0, 999), distinct: 1000.0, ..TableSpec::primary(rows, 1) };
    let (build, probe) = (spec(DataType::Int64, 1000), spec(DataType::Int32, 1 << 20));
    let inputs = |probe: &TableSpec, unknown_rows| {
        let join = BoundJoin { unknown_rows, ..bound(&build, probe, JoinKind::Inner) };
        let estimates = Estimates::of(&join, &Interrupt::default()).unwrap();
        inputs::Inputs::new(&join, Side::Left, &estimates, inputs::TextWork::default()).unwrap()
    };
    assert_eq!(inputs(&probe, None).key_width, KeyWidth::W4);
    assert_eq!(inputs(&probe, Some(Side::Right)).key_width, KeyWidth::W8);
    // Keys as stored need no statistics of the probe side, and neither does a table of dense keys.
    let alike = inputs(&spec(DataType::Int64, 1 << 20), Some(Side::Right));
    assert!(alike.raw && alike.dense_slots == Some(1000.0));
    // No order is worth a pass over the keys of all rows that come.
    let ordered = TableSpec { range: (-500, 499), ascending: true, ..spec(DataType::Int64, 1 << 20) };
    assert!(!inputs(&ordered, None).raw && inputs(&ordered, Some(Side::Right)).raw);
}

/// One build key in fifty is on two rows. A table of distinct keys does not hold such keys, so keys
/// are sorted first.
#[test]
fn a_build_side_with_few_repeated_keys_is_priced_like_one_with_many() {
    let target = a100();
    let seconds = |repeats: bool| {
        let build = TableSpec { distinct: 9_800.0, ..TableSpec::primary(10_000, 1) };
        let mut estimates =
            Estimates::of(&bound(&build, &TableSpec::primary(1 << 20, 1), JoinKind::Inner), &Interrupt::default())
                .unwrap();
        assert!(!estimates.left_repeats, "a sample of rows cannot tell");
        estimates.left_repeats = repeats;
        let join = bound(&build, &TableSpec::primary(1 << 20, 1), JoinKind::Inner);
        let inputs = inputs::Inputs::new(&join, Side::Left, &estimates, inputs::TextWork::default()).unwrap();
        assert_eq!(inputs.dense_slots.is_some(), !repeats);
        let overrides = PlanOverrides::named(Some(Strategy::Hash));
        let costed = crate::planner::cost::Costed::new(&join, Strategy::Hash, &overrides, &inputs, &estimates, &target);
        costed.phases.iter().find(|phase| phase.phase == Phase::BuildTable).unwrap().seconds
    };
    assert!(seconds(false) < 2.0 * target.rates.call_seconds);
    assert!(seconds(true) >= target.rates.build_repeated_call_seconds[0]);
}

/// Threads take morsels. One thread has all rows of a small side, whatever the others can do.
#[test]
fn a_side_of_one_morsel_is_not_predicted_faster_with_more_threads() {
    let seconds = |threads: usize, rows: u64, phase: Phase| {
        let target = Target { parallelism: threads, rates: Rates::host(threads), ..Target::default() };
        let join = bound(&TableSpec::primary(rows, 1), &TableSpec::primary(rows, 1), JoinKind::Inner);
        let plan = plan_on(join, Some(Strategy::Hash), &target).unwrap();
        let calls = 2.0 * target.rates.call_seconds;
        plan.phases.iter().find(|found| found.phase == phase).unwrap().seconds - calls
    };
    for phase in [Phase::BuildTable, Phase::Match] {
        let times = |rows: u64| (seconds(1, rows, phase) + 1e-5) / (seconds(16, rows, phase) + 1e-5);
        assert!((times(10_000) - 1.0).abs() < 0.2, "{phase}: {}", times(10_000));
        assert!(times(1 << 22) > 10.0, "{phase}: {}", times(1 << 22));
    }
}

#[test]
fn every_kind_of_join_builds_on_the_smaller_side() {
    let (small, large) = (sparse(1 << 16, 1), sparse(1 << 22, 1));
    for how in JoinKind::ALL {
        let plan = plan_on(bound(&small, &large, how), None, &Target::default()).unwrap();
        assert_eq!(plan.composition.build_side, Side::Left, "{how}");
        let plan = plan_on(bound(&large, &small, how), None, &Target::default()).unwrap();
        assert_eq!(plan.composition.build_side, Side::Right, "{how}");
    }
}

#[test]
fn a_requested_strategy_is_used() {
    for strategy in Strategy::ALL {
        let join = bound(&sparse(1 << 16, 1), &sparse(1 << 20, 1), JoinKind::Inner);
        let plan = plan_on(join, Some(strategy), &Target::default()).unwrap();
        assert_eq!(plan.strategy(), strategy);
        assert!(plan.reason.contains("asked for"), "{}", plan.reason);
        let chosen = (strategy, plan.composition.build_side);
        assert!(plan.alternatives.iter().all(|other| (other.strategy, other.build_side) != chosen));
        for other in &plan.alternatives {
            let reason = other.reason("host:0", plan.target.memory_bytes);
            assert_eq!(reason.contains("asked for"), other.strategy != strategy, "{other:?}");
        }
    }
}

/// Keys of `s`. Every sixteenth key is a key of `r`.
fn one_in_sixteen(how: JoinKind) -> BoundJoin {
    let r = TableSpec { distinct: f64::from(1u32 << 20), ..sparse(1 << 20, 2) };
    let s = TableSpec { distinct: f64::from(1u32 << 24), ..sparse(1 << 25, 2) };
    bound(&r, &s, how)
}

#[test]
fn a_filter_is_used_if_few_probe_rows_match_and_unmatched_rows_are_dropped() {
    let target = Target::default();
    let few = plan_on(one_in_sixteen(JoinKind::Inner), None, &target).unwrap();
    let passing = few.filtered_rows.expect("one row in sixteen matches");
    let probe_rows = f64::from(1u32 << 25);
    assert!((0.06..0.09).contains(&(passing / probe_rows)), "{passing}");
    assert!(few.phases.iter().any(|phase| phase.phase == Phase::Filter && phase.seconds > 0.0 && phase.bytes > 0));
    let explanation = Explanation::new(&few, "host:0", String::new(), None);
    assert_eq!(explanation.right.filtered_rows, Some(passing.round() as u64));
    assert_eq!(explanation.left.filtered_rows, None);
    assert!(explanation.to_string().contains("probe: filter by the build keys, 8 % pass; "), "{explanation}");
    // The filter is no strategy of its own: strategies asked for by name use it as well.
    for strategy in Strategy::ALL {
        let plan = plan_on(one_in_sixteen(JoinKind::Inner), Some(strategy), &target).unwrap();
        assert!(plan.filtered_rows.is_some(), "{strategy}");
    }
    for how in JoinKind::ALL {
        let plan = plan_on(one_in_sixteen(how), Some(Strategy::RadixHash), &target).unwrap();
        let drops = !matches!(how, JoinKind::Right | JoinKind::Full | JoinKind::RightAnti);
        assert_eq!(plan.filtered_rows.is_some(), drops && plan.composition.build_side == Side::Left, "{how}");
        assert_eq!(plan.task().unwrap().composition.filter, plan.filtered_rows.is_some());
    }

    let all_match = plan_on(bound(&sparse(1 << 20, 2), &sparse(1 << 20, 2), JoinKind::Inner), None, &target).unwrap();
    assert_eq!(all_match.filtered_rows, None);
    // The number of distinct keys is unknown.
    let mut unknown = one_in_sixteen(JoinKind::Inner);
    let mut table = sparse(1 << 25, 2).build("s");
    table.statistics[0].distinct = None;
    unknown.right = Arc::new(table);
    assert_eq!(plan_on(unknown, None, &target).unwrap().filtered_rows, None);
}

#[test]
fn plan_overrides_are_combined_with_the_best_of_all_other_choices() {
    let target = Target::default();
    let of =
        |overrides: PlanOverrides| plan_with_overrides(one_in_sixteen(JoinKind::Inner), &overrides, &target).unwrap();
    let chosen = of(PlanOverrides::default());
    assert!(chosen.filtered_rows.is_some());
    let (strategy, build_side) = (Some(chosen.strategy()), Some(chosen.composition.build_side));
    let as_chosen = PlanOverrides { strategy, build_side, filter: Some(true), ..PlanOverrides::default() };
    let same = of(as_chosen);
    assert_eq!(
        (same.seconds, &same.composition.moved_payload, same.composition.radix_bits()),
        (chosen.seconds, &chosen.composition.moved_payload, chosen.composition.radix_bits())
    );

    let unfiltered = of(PlanOverrides { filter: Some(false), ..as_chosen });
    assert_eq!(
        (unfiltered.strategy(), unfiltered.composition.build_side),
        (chosen.strategy(), chosen.composition.build_side)
    );
    assert!(!unfiltered.task().unwrap().composition.filter && unfiltered.seconds > chosen.seconds);
    assert!(unfiltered.phases.iter().all(|phase| phase.phase != Phase::Filter));
    assert!(unfiltered.reason.starts_with("it was asked for"), "{}", unfiltered.reason);

    let other =
        of(PlanOverrides { build_side: Some(chosen.composition.build_side.other()), ..PlanOverrides::default() });
    assert_eq!(other.task().unwrap().build.side, chosen.composition.build_side.other());
    assert!(other.seconds > chosen.seconds);
    let of_chosen_side =
        |plan: &Plan| plan.alternatives.iter().find(|other| other.build_side == chosen.composition.build_side).cloned();
    let reason = of_chosen_side(&other).unwrap().reason(&target.name, target.memory_bytes);
    assert!(reason.starts_with("another was asked for; "), "{reason}");

    // A filter without benefit, and a filter that is impossible.
    let all_match = || bound(&sparse(1 << 20, 2), &sparse(1 << 20, 2), JoinKind::Inner);
    let filtered =
        plan_with_overrides(all_match(), &PlanOverrides { filter: Some(true), ..PlanOverrides::default() }, &target)
            .unwrap();
    assert!(filtered.task().unwrap().composition.filter);
    assert!(filtered.seconds > plan_on(all_match(), None, &target).unwrap().seconds);
    let on_the_left = PlanOverrides { build_side: Some(Side::Left), filter: Some(true), ..PlanOverrides::default() };
    let refusal = plan_with_overrides(one_in_sixteen(JoinKind::Full), &on_the_left, &target).unwrap_err();
    let Error::Unsupported(text) = &refusal else { panic!("{refusal}") };
    assert!(text.contains("built on the left side, with a filter"), "{text}");
}

#[test]
fn payload_is_moved_only_on_the_side_where_that_is_faster() {
    // Few rows of s match, but moving its columns with the keys would move all of them. Each row of
    // r matches one row of s.
    let (r, s) = (sparse(1 << 24, 2), sparse(1 << 28, 2));
    let mut target = two_pass(a100());
    target.memory_bytes = u64::MAX;
    // A filter would leave hardly any rows of s to move.
    let plan = |strategy| {
        let overrides = PlanOverrides { filter: Some(false), ..PlanOverrides::named(strategy) };
        plan_with_overrides(bound(&r, &s, JoinKind::Inner), &overrides, &target).unwrap()
    };
    let chosen = plan(None);
    assert_eq!(
        (chosen.strategy(), chosen.composition.build_side),
        (Strategy::RadixHash, Side::Left),
        "{}",
        chosen.reason
    );
    let MovedPayload::Columns { left, right } = &chosen.composition.moved_payload else {
        panic!("{:?}", chosen.composition.moved_payload)
    };
    assert_eq!((left.iter().copied().collect::<Vec<_>>(), right.len()), (vec![1, 2], 0));
    let task = chosen.task().unwrap();
    let moved = |side: &TaskSide| chosen.composition.moved_payload.of_side(side.side, &side.output_columns).len();
    assert_eq!((moved(&task.build), moved(&task.probe)), (2, 0));

    // The chosen mix is cheaper than both named strategies, which move all columns or nothing.
    let (all, none) = (plan(Some(Strategy::RadixHash)), plan(Some(Strategy::RadixHashGfur)));
    assert_eq!(
        (&all.composition.moved_payload, &none.composition.moved_payload),
        (&MovedPayload::Everything, &MovedPayload::Nothing)
    );
    assert!(chosen.seconds < all.seconds && chosen.seconds < none.seconds);

    let explanation = Explanation::new(&chosen, "cuda:0", String::new(), None);
    assert_eq!((explanation.left.carried, explanation.right.carried), (vec!["r0".into(), "r1".into()], vec![]));
    let tree = explanation.tree.join("\n");
    for part in
        ["build: partition keys with r0, r1", "probe: partition keys and row numbers", "the others by row number"]
    {
        assert!(tree.contains(part), "{part:?} is missing in\n{tree}");
    }
    let explanation = Explanation::new(&all, "cuda:0", String::new(), None);
    assert_eq!((explanation.left.carried.len(), explanation.right.carried.len()), (2, 2));
    assert!(Explanation::new(&none, "cuda:0", String::new(), None).right.carried.is_empty());
}

#[test]
fn a_second_pass_is_planned_if_partitions_exceed_the_cache() {
    let bits = |build_rows: u64, target: &Target| {
        let join = bound(&sparse(build_rows, 1), &sparse(2 * build_rows, 1), JoinKind::Inner);
        plan_on(join, Some(Strategy::RadixHash), target).unwrap().composition.radix_bits().unwrap()
    };
    let mut target = Target::default();
    target.tuning.pass_bits_max = 8;
    let rows = |bits: u32| (target.tuning.partition_rows as u64) << bits;
    assert_eq!(bits(rows(7), &target), 7);
    assert_eq!(bits(rows(8), &target), 8);
    // Partitions of twice the preferred size do not justify moving everything once more.
    assert_eq!(bits(rows(9), &target), 8);
    assert_eq!(bits(rows(13), &target), 13);
    // Two passes give at most twice the bits of one.
    let mut small = target.clone();
    (small.tuning.pass_bits_max, small.rates.partition) = (2, 30e9);
    assert_eq!(bits(rows(8), &small), 4);
}

#[test]
fn a_plan_is_made_without_statistics() {
    let mut join = bound(&sparse(1 << 16, 1), &sparse(1 << 20, 1), JoinKind::Inner);
    for table in [&mut join.left, &mut join.right] {
        let spec = if table.name == "r" { sparse(1 << 16, 1) } else { sparse(1 << 20, 1) };
        let mut blank = spec.build(&table.name);
        blank.statistics.fill(ColumnStatistics::default());
        *table = Arc::new(blank);
    }
    let plan = plan_on(join, None, &Target::default()).unwrap();
    assert_eq!(plan.composition.build_side, Side::Left);
    assert!(!plan.composition.dense);
}
