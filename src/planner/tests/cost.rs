//! Tests of predicted seconds and bytes, their explanations, and the rates that they use.

use std::any::Any;
use std::ops::Range;
use std::sync::Weak;

use super::*;
use crate::device::{ColumnRows, Phase};
use crate::join::PhaseRecord;

#[test]
fn a_join_that_fits_no_device_is_refused_with_what_would_help() {
    let join = bound(&sparse(1 << 24, 2), &sparse(1 << 26, 2), JoinKind::Inner);
    let tiny = Target { memory_bytes: 1 << 20, ..two_pass(a100()) };
    let Err(Error::Exhausted(message)) = plan_on(join.clone(), None, &tiny) else { panic!("the join was planned") };
    for part in ["\"r\"", "16,777,216 rows", "1.0 MiB", "--device-memory", "cuda:0"] {
        assert!(message.contains(part), "{message:?} does not say {part:?}");
    }
    // Enough memory for the narrower strategies only. The requested one is refused, and the refusal
    // names a fitting one.
    let whole = plan_on(join.clone(), None, &two_pass(a100())).unwrap();
    let need =
        |strategy: Strategy| plan_on(join.clone(), Some(strategy), &two_pass(a100())).unwrap().memory.minimum_bytes;
    let (least, most) = (
        Strategy::ALL.into_iter().min_by_key(|strategy| need(*strategy)).unwrap(),
        Strategy::ALL.into_iter().max_by_key(|strategy| need(*strategy)).unwrap(),
    );
    assert_ne!(need(least), need(most));
    let between = Target { memory_bytes: need(most) - 1, ..two_pass(a100()) };
    let Err(Error::Exhausted(message)) = plan_on(join.clone(), Some(most), &between) else {
        panic!("{most} was planned")
    };
    assert!(message.contains(most.name()) && message.contains("fits"), "{message}");
    let free = plan_on(join, None, &between).unwrap();
    assert_ne!(free.strategy(), most);
    assert_eq!(whole.alternatives.len(), 2 * Strategy::ALL.len() - 1, "each strategy on each side");
}

#[test]
fn each_chunk_of_the_probe_side_is_priced_with_a_pass_over_the_build_side() {
    let join = bound(&sparse(1 << 22, 2), &sparse(1 << 26, 2), JoinKind::Inner);
    let match_seconds = |strategy, memory_bytes| {
        let target = Target { memory_bytes, ..Target::default() };
        let plan = plan_on(join.clone(), Some(strategy), &target).unwrap();
        plan.phases.iter().find(|phase| phase.phase == Phase::Match).unwrap().seconds
    };
    for strategy in [Strategy::RadixHash, Strategy::SortMerge] {
        let whole = plan_on(join.clone(), Some(strategy), &Target::default()).unwrap().memory;
        assert_eq!(match_seconds(strategy, whole.whole_bytes), match_seconds(strategy, u64::MAX), "{strategy}");
        // A hundredth of the probe side fits at a time. So the build side, a sixteenth of the probe
        // side, is passed over a hundred times.
        let hundredth = whole.resident_bytes + (whole.whole_bytes - whole.resident_bytes) / 100;
        let hundredth = hundredth.max(whole.minimum_bytes);
        assert!(match_seconds(strategy, hundredth) > 2.0 * match_seconds(strategy, u64::MAX), "{strategy}");
    }
    let hash = plan_on(join.clone(), Some(Strategy::Hash), &Target::default()).unwrap().memory;
    // Except for the calls of that many chunks, a table that stays costs no more.
    let ratio = match_seconds(Strategy::Hash, hash.minimum_bytes) / match_seconds(Strategy::Hash, u64::MAX);
    let chunk_calls = f64::from(1u32 << 26) / 1024.0 * Target::default().rates.call_seconds;
    assert!(ratio < 1.0 + chunk_calls / match_seconds(Strategy::Hash, u64::MAX), "{ratio}");
}

#[test]
fn dictionary_columns_move_like_numbers_if_batches_share_the_dictionary() {
    let payload = DataType::Dictionary(Box::new(DataType::Int16), Box::new(DataType::Utf8));
    let side = |payload: DataType| TableSpec { payload: vec![payload], ..sparse(1 << 20, 0) };
    let gather = |payload: DataType| {
        let join = bound(&side(payload.clone()), &side(payload), JoinKind::Inner);
        let plan = plan_on(join, Some(Strategy::RadixHash), &Target::default()).unwrap();
        plan.phases.iter().find(|phase| phase.phase == Phase::Gather).unwrap().seconds
    };
    // Tables without batches do not have two dictionaries.
    assert_eq!(gather(payload), gather(DataType::Int16));
    assert!(gather(DataType::Utf8) > gather(DataType::Int16));
}

#[test]
fn predictions_are_finite_and_grow_with_the_tables() {
    for strategy in Strategy::ALL {
        let mut last = 0.0;
        for rows in [0, 1, 1000, 1 << 20, 1 << 30] {
            let join = bound(&sparse(rows, 2), &sparse(rows, 2), JoinKind::Full);
            let plan = plan_on(join, Some(strategy), &Target::default()).unwrap();
            let sum: f64 = plan.phases.iter().map(|phase| phase.seconds).sum();
            assert!(plan.seconds.is_finite() && plan.seconds >= last, "{strategy} at {rows} rows: {}", plan.seconds);
            assert!((plan.seconds - sum).abs() <= 1e-9 + 1e-6 * sum, "host phases add up");
            last = plan.seconds;
        }
        assert!(last > 0.0);
    }
}

#[test]
fn more_chunks_in_progress_overlap_copies_better_with_primitives() {
    let mut join = bound(&sparse(1 << 24, 2), &sparse(1 << 24, 2), JoinKind::Inner);
    // The result becomes a table with memory of its own. Otherwise it would share the columns of
    // the probe side.
    join.result_is_stored = true;
    let planned = |streams| {
        let mut target = two_pass(a100());
        target.tuning.streams = streams;
        target.rates.copy_in = 1e9;
        target.rates.copy_out = 2e9;
        plan_on(join.clone(), Some(Strategy::Hash), &target).unwrap()
    };
    // Keys and two columns of both sides come in, and five columns go out.
    let rows = f64::from(1u32 << 24);
    let (side_in, out) = (12.0 * rows / 1e9, 20.0 * rows / 2e9);
    let one_by_one = planned(1).seconds;
    assert!(one_by_one > 2.0 * side_in + out);
    let mut last = one_by_one;
    for streams in [2, 4, 8, 16] {
        let seconds = planned(streams).seconds;
        // The build side arrives before anything leaves. From then on the busier direction bounds
        // the time.
        assert!(seconds > side_in + side_in.max(out), "{streams} streams: {seconds}");
        assert!(seconds < last, "{streams} streams: {seconds} after {last}");
        last = seconds;
    }
    assert!(last < side_in + 1.15 * side_in.max(out), "{last}");
}

#[test]
fn each_chunk_is_priced_with_one_more_pass_over_partitions_and_sorted_rows() {
    let join = bound(&sparse(1 << 26, 1), &sparse(1 << 26, 1), JoinKind::Inner);
    let match_seconds = |strategy, streams| {
        let mut target = two_pass(a100());
        target.tuning.streams = streams;
        // Slow enough that overlapping copies outweighs everything else.
        (target.rates.copy_in, target.rates.copy_out) = (2e9, 2e9);
        let plan = plan_on(join.clone(), Some(strategy), &target).unwrap();
        plan.phases.iter().find(|phase| phase.phase == Phase::Match).unwrap().seconds
    };
    for strategy in [Strategy::RadixHash, Strategy::SortMerge] {
        // Five chunks for each of five streams: 26 times as many rows instead of twice as many.
        let ratio = match_seconds(strategy, 5) / match_seconds(strategy, 1);
        assert!((8.0..14.0).contains(&ratio), "{strategy}: {ratio}");
    }
    let hash = match_seconds(Strategy::Hash, 5) / match_seconds(Strategy::Hash, 1);
    assert!((0.99..1.3).contains(&hash), "more chunks do not read the one hash table more often: {hash}");
}

#[test]
fn chunks_are_planned_if_their_overlap_saves_more_than_their_calls_cost() {
    let is_at_once = |rows, call_seconds| {
        let mut join = bound(&sparse(1 << 20, 1), &sparse(rows, 1), JoinKind::Inner);
        join.result_is_stored = true;
        let mut target = two_pass(a100());
        target.tuning.streams = 5;
        (target.rates.copy_in, target.rates.copy_out) = (20e9, 20e9);
        target.rates.call_seconds = call_seconds;
        let overrides = PlanOverrides { build_side: Some(Side::Left), ..PlanOverrides::named(Some(Strategy::Hash)) };
        plan_with_overrides(join, &overrides, &target).unwrap().composition.transfer_order == TransferOrder::ProbeAtOnce
    };
    assert!(is_at_once(3 << 20, 100e-6), "the calls of three chunks take longer than the work they hide");
    assert!(!is_at_once(3 << 20, 1e-6), "calls take almost no time");
    assert!(!is_at_once(1 << 27, 50e-6), "there is much to overlap");
}

#[test]
fn host_memory_is_planned_for_the_host_made_keys_of_the_chunks_in_progress() {
    const ROWS: u64 = 8 << 20;
    // Text keys become hashes of 16 bytes, with a validity bit each.
    let side = TableSpec { key: DataType::Utf8, ..sparse(ROWS, 1) };
    let mut join = bound(&side, &side, JoinKind::Inner);
    join.result_is_stored = true;
    let keys = |rows: u64| 16 * rows + rows / 8;
    // Eight chunks, five of them in progress.
    for (call_seconds, is_at_once, probe_rows) in [(10e-3, true, ROWS), (1e-6, false, ROWS / 8 * 5)] {
        let mut target = two_pass(a100());
        target.tuning.streams = 5;
        (target.rates.copy_in, target.rates.copy_out) = (1e9, 1e9);
        target.rates.call_seconds = call_seconds;
        let plan = plan_on(join.clone(), Some(Strategy::Hash), &target).unwrap();
        assert_eq!(plan.composition.transfer_order == TransferOrder::ProbeAtOnce, is_at_once);
        assert_eq!(plan.host_scratch_bytes, keys(ROWS) + keys(probe_rows));
    }
}

#[test]
fn the_transform_overlaps_only_with_copies_that_it_does_not_wait_for() {
    // The columns of `r` take longer to copy than its keys to partition, and no result shares the
    // probe side's.
    let mut join = bound(&sparse(1 << 22, 4), &sparse(1 << 23, 0), JoinKind::Inner);
    join.result_is_stored = true;
    let planned = |strategy, partition: f64| {
        let mut target = a100();
        (target.rates.copy_in, target.rates.partition) = (1e9, partition);
        plan_on(join.clone(), Some(strategy), &target).unwrap()
    };
    let phase = |plan: &Plan, name: Phase| plan.phases.iter().find(|phase| phase.phase == name).unwrap().seconds;
    for (strategy, is_hidden) in [(Strategy::RadixHash, false), (Strategy::RadixHashGfur, true)] {
        let [fast, slow] = [100e9, 50e9].map(|partition| planned(strategy, partition));
        assert_eq!(fast.composition.build_side, slow.composition.build_side);
        let longer = |name: Phase| phase(&slow, name) - phase(&fast, name);
        let (build, probe) = (longer(Phase::PartitionBuild), longer(Phase::PartitionProbe));
        assert!(build > 0.0 && probe > 0.0);
        let expected = if is_hidden { probe } else { build + probe };
        let found = slow.seconds - fast.seconds;
        assert!((found - expected).abs() < 1e-6 * expected, "{strategy}: {found} against {expected}");
    }
}

#[test]
fn calls_of_several_steps_are_priced_even_for_few_rows() {
    // Text keys are joined as hashes of 16 bytes.
    for (key, width) in [(DataType::Int32, 0), (DataType::Int64, 1), (DataType::Utf8, 2)] {
        // Keys repeat on both sides, so that neither side avoids grouping.
        let side =
            |rows| TableSpec { key: key.clone(), distinct: 500.0, range: (0, i64::MAX.into()), ..sparse(rows, 1) };
        let side = |rows| match width {
            0 => TableSpec { range: (0, i32::MAX.into()), ..side(rows) },
            _ => side(rows),
        };
        let join = bound(&side(1000), &side(2000), JoinKind::Inner);
        let seconds = |strategy, change: &dyn Fn(&mut Rates)| {
            let mut target = a100();
            change(&mut target.rates);
            let plan = plan_on(join.clone(), Some(strategy), &target).unwrap();
            (plan.seconds, plan.composition.build_side)
        };
        const LONGER: f64 = 1e-3;
        type Change<'a> = &'a dyn Fn(&mut Rates);
        let cases: [(Strategy, Change<'_>, f64); 4] = [
            (Strategy::SortMerge, &|rates| rates.sort_call_seconds[width] += LONGER, 2.0),
            // Grouping sorts.
            (Strategy::RadixHash, &|rates| rates.sort_call_seconds[width] += LONGER, 1.0),
            (Strategy::RadixHash, &|rates| rates.partition_call_seconds += LONGER, 2.0),
            (Strategy::Hash, &|rates| rates.build_repeated_call_seconds[width] += LONGER, 1.0),
        ];
        for (strategy, change, calls) in cases {
            let ((before, side), (after, same)) = (seconds(strategy, &|_| {}), seconds(strategy, change));
            assert_eq!(side, same);
            let longer = after - before;
            assert!((longer - calls * LONGER).abs() < 1e-9, "{strategy}, {key}: {longer}");
        }
    }
}

#[test]
fn keys_on_many_rows_each_are_grouped_and_matched() {
    let mut target = a100();
    target.rates.join_rows = [40e9; 3];
    for (rows_of_key, in_one_go) in [(1, true), (8, true), (64, false)] {
        let side = |rows: u64| TableSpec { distinct: rows as f64 / f64::from(rows_of_key), ..sparse(rows, 1) };
        let join = bound(&side(1 << 20), &side(1 << 24), JoinKind::Inner);
        let plan = plan_on(join, Some(Strategy::RadixHash), &target).unwrap();
        let has = |name: Phase| plan.phases.iter().any(|phase| phase.phase == name);
        assert_eq!(
            (has(Phase::Join), has(Phase::GroupBuild)),
            (in_one_go, !in_one_go),
            "{rows_of_key} rows of each key"
        );
    }
}

/// Equal keys are entered one after the other, so random reads spread over one slot per key.
#[test]
fn the_size_of_a_hash_table_follows_its_distinct_keys() {
    let seconds = |rows_of_key: u64| {
        let build = TableSpec { distinct: (1 << 26) as f64 / rows_of_key as f64, ..sparse(1 << 26, 1) };
        let join = bound(&build, &sparse(1 << 24, 1), JoinKind::Inner);
        let overrides = PlanOverrides { build_side: Some(Side::Left), ..PlanOverrides::named(Some(Strategy::Hash)) };
        let plan = plan_with_overrides(join, &overrides, &Target { memory_bytes: u64::MAX, ..a100() }).unwrap();
        [Phase::BuildTable, Phase::Match]
            .map(|name| plan.phases.iter().find(|phase| phase.phase == name).unwrap().seconds)
    };
    let ([build_few, match_few], [build_many, match_many]) = (seconds(64), seconds(4));
    assert!(build_few < build_many && match_few < match_many, "a million slots fit in cache, and 16 million do not");
}

#[test]
fn columns_cached_on_a_device_are_priced_without_a_copy() {
    let join = bound(&sparse(1 << 20, 1), &sparse(1 << 24, 1), JoinKind::Inner);
    let seconds = |copy_in: f64, kept: &[ColumnRows]| {
        let mut target = Target { kept: kept.to_vec(), ..two_pass(a100()) };
        // Calls that copy cost nothing either.
        (target.rates.copy_in, target.rates.call_seconds) = (copy_in, 0.0);
        plan_on(join.clone(), Some(Strategy::Hash), &target).unwrap().seconds
    };
    let rows_of = |table: &Arc<Table>, column: usize, rows: Range<u64>| {
        let table: Weak<Table> = Arc::downgrade(table);
        ColumnRows { table: table as Weak<dyn Any + Send + Sync>, column, rows }
    };
    let whole = |table: &Arc<Table>| (0..2).map(|column| rows_of(table, column, 0..table.rows)).collect::<Vec<_>>();
    let (left, both) = (whole(&join.left), [whole(&join.left), whole(&join.right)].concat());
    let none = seconds(1e9, &[]);
    assert!(seconds(1e9, &left) < none && seconds(1e9, &both) < seconds(1e9, &left));
    assert_eq!(seconds(1e9, &both), seconds(f64::INFINITY, &[]));
    // Two halves are put together for a reader of all rows at once. One half alone does not help
    // it.
    let half = join.right.rows / 2;
    let halves = [rows_of(&join.right, 0, 0..half), rows_of(&join.right, 0, half..join.right.rows)];
    assert_eq!(seconds(1e9, &halves), seconds(1e9, &[rows_of(&join.right, 0, 0..join.right.rows)]));
    assert_eq!(seconds(1e9, &halves[..1]), none);
    // Another table with the same rows counts as a different table.
    let other = bound(&sparse(1 << 20, 1), &sparse(1 << 24, 1), JoinKind::Inner);
    assert_eq!(seconds(1e9, &whole(&other.left)), none);
}

#[test]
fn columns_that_the_result_shares_are_neither_copied_nor_gathered() {
    let bytes =
        |plan: &Plan, name: Phase| plan.phases.iter().find(|phase| phase.phase == name).map_or(0, |phase| phase.bytes);
    let (small, large) = (sparse(1 << 10, 1), sparse(1 << 16, 1));
    let plan_of = |how, strategy| plan_on(bound(&small, &large, how), Some(strategy), &two_pass(a100())).unwrap();
    let left_payload = 4 << 10;
    // Each row of the right table is in the result once, matched or not.
    let shared = plan_of(JoinKind::Right, Strategy::Hash);
    assert_eq!(bytes(&shared, Phase::CopyIn), left_payload);
    // The left table has a row in one of 64 rows of the result.
    assert!((1..=8 << 10).contains(&bytes(&shared, Phase::Gather)), "{}", bytes(&shared, Phase::Gather));
    let moved = plan_of(JoinKind::Right, Strategy::RadixHash);
    assert_eq!(bytes(&moved, Phase::CopyIn), left_payload + (4 << 16), "partitions change the row order");
    let into = |join: &BoundJoin| {
        let mut join = join.clone();
        join.result_is_stored = true;
        plan_on(join, Some(Strategy::Hash), &two_pass(a100())).unwrap()
    };
    assert_eq!(
        bytes(&into(&shared.join), Phase::CopyIn),
        left_payload + (4 << 16),
        "a result table has its own memory"
    );
}

#[test]
fn a_count_is_planned_with_keys_alone() {
    let mut join = bound(&sparse(1 << 10, 1), &sparse(1 << 16, 1), JoinKind::Inner);
    let names = |join: &BoundJoin| -> Vec<Phase> {
        let plan = plan_on(join.clone(), Some(Strategy::Hash), &two_pass(a100())).unwrap();
        plan.phases.iter().map(|phase| phase.phase).collect()
    };
    assert_eq!(
        names(&join),
        [Phase::PackKeys, Phase::CopyIn, Phase::BuildTable, Phase::Match, Phase::Expand, Phase::Gather]
    );
    (join.counts_rows, join.output) = (true, Vec::new());
    let counted = names(&join);
    assert!(![Phase::CopyIn, Phase::Expand, Phase::Gather].iter().any(|name| counted.contains(name)), "{counted:?}");
}

#[test]
fn small_joins_are_priced_by_their_calls() {
    let seconds = |rows: u64, call_seconds: f64| {
        let mut target = two_pass(a100());
        target.rates.call_seconds = call_seconds;
        let plan = plan_on(bound(&sparse(rows, 1), &sparse(rows, 1), JoinKind::Inner), None, &target).unwrap();
        (plan.seconds, plan.strategy())
    };
    let [quick, slow, slower] = [1e-6, 1e-2, 2e-2].map(|call_seconds| seconds(1000, call_seconds).0);
    assert!((1.98..=2.0).contains(&(slower / slow)), "{slow} and {slower} are calls only");
    assert!(quick < slow / 50.0, "{quick} with fast calls, and {slow}");
    // The work of a join that takes seconds decides its strategy.
    assert_eq!(seconds(1 << 27, 1e-3).1, seconds(1 << 27, 1e-6).1);
}

#[test]
fn an_explanation_shows_predicted_and_measured_values_side_by_side() {
    let join = bound(&sparse(1 << 16, 1), &sparse(1 << 20, 1), JoinKind::Inner);
    let plan = plan_on(join, Some(Strategy::RadixHash), &Target::default()).unwrap();
    let phase = |phase: Phase, seconds, bytes, kept_bytes, in_place_bytes| PhaseRecord {
        phase,
        seconds,
        bytes,
        kept_bytes,
        in_place_bytes,
    };
    let phases = vec![
        phase(Phase::CopyIn, 0.0, 0, 3 << 20, 5 << 20),
        phase(Phase::Match, 0.5, 1000, 0, 0),
        phase(Phase::CompareKeys, 0.25, 10, 0, 0),
    ];
    let measured = Measured { phases, seconds: 0.75, rows: 7, is_complete: true, ..Measured::default() };
    let explanation = Explanation::new(&plan, "host:0", "the only device".into(), Some(&measured));
    let json = serde_json::to_value(&explanation).unwrap();
    assert_eq!(json["strategy"], "radix-hash");
    assert_eq!(json["measured_seconds"], 0.75);
    assert!(json["deviation"].as_str().is_some_and(|text| text.contains("compare keys by 250.0 ms")), "{json}");
    assert_eq!(json["left"]["role"], "build");
    assert_eq!(json["result"]["rows"], 7);
    let phases = json["phases"].as_array().unwrap();
    let named = |name: &str| phases.iter().find(|phase| phase["name"] == name).unwrap();
    assert_eq!(named("match")["measured_seconds"], 0.5);
    assert!(named("match")["predicted_seconds"].as_f64().unwrap() > 0.0);
    assert!(named("partition probe")["measured_seconds"].is_null());
    assert!(named("compare keys")["predicted_seconds"].is_null());
    assert_eq!(json["alternatives"].as_array().unwrap().len(), 9);
    assert_eq!(named("match")["measured_bytes_per_second"], 2000.0);
    assert_eq!(named("match")["boundary_bytes_per_second"], Target::default().rates.stream);
    assert_eq!(named("copy in")["boundary"], "host to device");
    assert_eq!((&named("copy in")["measured_bytes"], &named("copy in")["kept_bytes"]), (&0.into(), &(3 << 20).into()));
    assert!(named("partition probe")["kept_bytes"].is_null());

    let text = explanation.to_string();
    for part in [
        "radix-hash: it was asked for",
        "on host:0: the only device",
        "build: partition",
        "2.0 KiB/s of",
        "0 B  3.0 MiB cached on the device; 5.0 MiB read in place\n",
        "not chosen",
        "sort-merge-gfur",
        "as long as predicted: 750.0 ms instead of ",
        "Longer than predicted: match by ",
    ] {
        assert!(text.contains(part), "{part:?} is missing in\n{text}");
    }
}

#[test]
fn calibration_measures_every_rate_and_leaves_no_memory_behind() {
    for (threads, memory, link) in [
        (1, 64 << 20, None),
        (2, 64 << 20, Some(EmulatedLink { to_device_bytes_per_second: 5e9, from_device_bytes_per_second: 2e9 })),
        (1, 64 << 20, Some(EmulatedLink { to_device_bytes_per_second: 20e6, from_device_bytes_per_second: 20e6 })),
        (1, 1 << 20, None),
        (1, 4 << 10, None),
    ] {
        let budget = Budget::new("device memory", "--device-memory", memory);
        let device = HostDevice::new(0, threads, budget.clone(), link).unwrap();
        let rates = calibrate(&device);
        assert_eq!(budget.used_bytes(), 0, "calibration left memory in use");
        println!("{threads} threads, {memory} bytes, {link:?}: {rates:?}");
        let json = serde_json::to_value(&rates).unwrap();
        for (name, value) in json.as_object().unwrap() {
            let numbers: Vec<f64> = value.as_array().map_or_else(
                || value.as_f64().into_iter().collect(),
                |list| list.iter().filter_map(serde_json::Value::as_f64).collect(),
            );
            // Only an emulated GPU joins partitions in one go, and only such a device has a link.
            if name == "join_rows" && link.is_none() {
                assert_eq!(numbers, [0.0; 3]);
                continue;
            }
            assert!(numbers.iter().all(|rate| rate.is_finite() && *rate > 0.0), "{name} is {value}");
        }
        if memory >= 1 << 20 {
            assert_eq!(rates.reads_host_memory, link.is_none());
        }
        // An emulated link takes the time of the real one, so measured rates are never faster.
        if let Some(link) = link {
            assert!(rates.copy_in <= 1.1 * link.to_device_bytes_per_second, "{}", rates.copy_in);
            assert!(rates.copy_out <= 1.1 * link.from_device_bytes_per_second, "{}", rates.copy_out);
        }
    }
}

#[test]
fn calibration_takes_the_best_of_several_rounds_and_the_median_of_differences() {
    let round = |factor: f64| Rates {
        partition: 1e9 * factor,
        sort_rows: [1e6 * factor, 2e6, 3e6 / factor],
        random_reads: 1e8 * factor,
        call_seconds: 1e-6 * factor,
        ..Rates::host(1)
    };
    let rates = Rates::best_of(&[round(2.0), round(0.5), round(1.0)]);
    assert_eq!((rates.partition, rates.sort_rows), (2e9, [2e6, 2e6, 6e6]));
    assert_eq!((rates.random_reads, rates.call_seconds), (1e8, 0.5e-6));
}
