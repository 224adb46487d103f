//! The planner's choices, with fixed rates, on tables that exist as statistics only.

use std::sync::Arc;

use arrow::datatypes::{DataType, Field, Schema};

use super::*;
use crate::Error;
use crate::catalog::{Catalog, ColumnStatistics, Table, Value};
use crate::device::host::{EmulatedLink, HostDevice};
use crate::memory::{Arena, Budget};

/// A table of that many rows whose first column is the key.
struct TableSpec {
    rows: u64,
    key: DataType,
    /// Smallest and largest key.
    range: (i128, i128),
    distinct: f64,
    ascending: bool,
    /// `None`: as without skew.
    heaviest_share: Option<f64>,
    nulls: u64,
    payload: Vec<DataType>,
}

impl TableSpec {
    /// Distinct keys `0..rows` in no order, with `payload` columns of 4 bytes.
    fn primary(rows: u64, payload: usize) -> Self {
        Self {
            rows,
            key: DataType::Int32,
            range: (0, i128::from(rows) - 1),
            distinct: rows as f64,
            ascending: false,
            heaviest_share: None,
            nulls: 0,
            payload: vec![DataType::Int32; payload],
        }
    }

    fn build(&self, name: &str) -> Table {
        let mut fields = vec![Field::new("k", self.key.clone(), self.nulls > 0)];
        let payload = self.payload.iter().enumerate();
        fields.extend(payload.map(|(at, data_type)| Field::new(format!("{name}{at}"), data_type.clone(), false)));
        let key_statistics = ColumnStatistics {
            nulls: self.nulls,
            min: Some(Value::Integer(self.range.0)),
            max: Some(Value::Integer(self.range.1)),
            distinct: Some(self.distinct),
            ascending: self.ascending,
            heaviest_share: self.heaviest_share.unwrap_or(1.0 / self.distinct),
            ..ColumnStatistics::default()
        };
        let mut statistics = vec![ColumnStatistics::default(); fields.len()];
        statistics[0] = key_statistics;
        let row_bytes: usize = fields.iter().map(|field| field.data_type().primitive_width().unwrap_or(32)).sum();
        let mut table = Table::from_batches(name, Arc::new(Schema::new(fields)), Vec::new()).unwrap();
        table.rows = self.rows;
        table.bytes = self.rows * row_bytes as u64;
        table.statistics = statistics;
        table.sorted_by = Vec::new();
        table
    }
}

fn bound(left: &TableSpec, right: &TableSpec, how: JoinKind) -> BoundJoin {
    let catalog = Catalog::new(Arena::new(Budget::new("host memory", "--host-memory", 1 << 20)));
    catalog.create(left.build("r")).unwrap();
    catalog.create(right.build("s")).unwrap();
    let spec = JoinSpec { how, ..JoinSpec::inner("r", "s", vec![KeyPair::new("k", "k")]) };
    bind(spec, &catalog).unwrap()
}

/// An A100 with tables in its own memory, from Wu et al. 2024: table 4 (a gather of 2^27 values of 4 bytes takes 12.05 M
/// cycles unclustered and 1.41 M clustered, at 1.41 GHz), figure 7 (partitioning and gathering clustered is 1.79 times as fast
/// as gathering unclustered, sorting 1.23 times) and section 5.2.2 (cuDF's hash join is 4 times slower than partitioned
/// ones). Two passes of 8 bits partition.
fn a100() -> Target {
    let rows = f64::from(1u32 << 27);
    let (clustered, unclustered) = (1.41e6 / 1.41e9, 12.05e6 / 1.41e9);
    let partition_seconds = unclustered / 1.79 - clustered;
    let sort_seconds = unclustered / 1.23 - clustered;
    let pair_bytes = 2.0 * 8.0 + 4.0;
    let rates = Rates {
        copy_in: 1e15,
        copy_out: 1e15,
        reads_host_memory: false,
        copies_overlap: true,
        stream: 1.4e12,
        partition: 2.0 * pair_bytes * rows / partition_seconds,
        sort_rows: [rows / sort_seconds, 0.35 * rows / sort_seconds, 0.17 * rows / sort_seconds],
        sort_carry: 2.0 * 4.0 * rows / sort_seconds,
        build_rows: 20e9,
        probe_rows: 40e9,
        filter_rows: 0.0,
        dense_rows: 40e9,
        match_rows: 40e9,
        merge_rows: 40e9,
        expand_pairs: 150e9,
        gather_values: rows / clustered,
        random_reads: rows / (unclustered - clustered),
        cache_bytes: 40 << 20,
        host_values: 1e9,
        host_keys: 1e9,
    };
    Target {
        name: "cuda:0".into(),
        memory_bytes: 40 << 30,
        memory_knob: "--device-memory".into(),
        parallelism: 108,
        partition_rows: 4096,
        pass_bits_max: 8,
        row_scratch_bytes: None,
        rates,
    }
}

/// As [`a100`], with two passes for the partitions that 2^27 rows need.
fn two_pass(mut target: Target) -> Target {
    target.rates.partition /= 2.0;
    target
}

/// Keys of the whole 31-bit range, so that no perfect hashing applies.
fn sparse(rows: u64, payload: usize) -> TableSpec {
    TableSpec { range: (0, i128::from(i32::MAX)), ..TableSpec::primary(rows, payload) }
}

fn seconds_of(plan: &Plan, strategy: Strategy) -> f64 {
    if plan.strategy == strategy {
        return plan.seconds;
    }
    plan.alternatives.iter().find(|other| other.strategy == strategy).expect("every strategy is priced").seconds
}

mod wu_2024 {
    //! Section 5 and the decision trees of figure 18. PHJ-OM is `radix-hash`, PHJ-UM `radix-hash-gfur`, SMJ-OM `sort-merge` and
    //! SMJ-UM `sort-merge-gfur`.

    use super::*;

    const ROWS: u64 = 1 << 27;

    fn wide(payload: DataType, key: DataType, match_ratio: f64) -> BoundJoin {
        let columns = vec![payload; 2];
        let r = TableSpec { payload: columns.clone(), key: key.clone(), ..sparse(ROWS, 0) };
        // Keys of s that r has not: they make more different values than r has.
        let s = TableSpec { payload: columns, key, distinct: ROWS as f64, ..sparse(ROWS, 0) };
        let r = TableSpec { rows: (ROWS as f64 * match_ratio) as u64, distinct: ROWS as f64 * match_ratio, ..r };
        bound(&r, &s, JoinKind::Inner)
    }

    fn planned(join: BoundJoin) -> Plan {
        plan_on(join, None, &two_pass(a100())).unwrap()
    }

    #[test]
    fn wide_joins_with_many_matches_carry_their_payload() {
        let plan = planned(wide(DataType::Int32, DataType::Int32, 1.0));
        assert_eq!(plan.strategy, Strategy::RadixHash);
        // Figure 10: about 2.3 times PHJ-UM, 1.4 times SMJ-OM; SMJ-OM 1.6 times both SMJ-UM and PHJ-UM.
        let against = |other: Strategy| seconds_of(&plan, other) / plan.seconds;
        assert!((1.6..3.2).contains(&against(Strategy::RadixHashGfur)), "{}", against(Strategy::RadixHashGfur));
        assert!((1.1..2.0).contains(&against(Strategy::SortMerge)), "{}", against(Strategy::SortMerge));
        assert!(against(Strategy::SortMergeGfur) > against(Strategy::SortMerge));
    }

    #[test]
    fn wide_joins_with_few_matches_gather_from_where_columns_lie() {
        // Figure 13: below a quarter, PHJ-UM wins. The rows of r that match nothing are there all the same.
        let few = |ratio: f64| {
            let r = sparse(ROWS, 2);
            // s reaches into the range of r by that much.
            let low = (f64::from(i32::MAX) * (1.0 - ratio)) as i128;
            let s = TableSpec { range: (low, low + i128::from(i32::MAX)), key: DataType::UInt32, ..sparse(ROWS, 2) };
            let r = TableSpec { key: DataType::UInt32, ..r };
            planned(bound(&r, &s, JoinKind::Inner))
        };
        assert_eq!(few(0.02).strategy, Strategy::RadixHashGfur);
        assert_eq!(few(0.75).strategy, Strategy::RadixHash);
        // The advantage of carrying grows with the share of matches, and changes sign once.
        let advantage = |ratio: f64| {
            let plan = few(ratio);
            seconds_of(&plan, Strategy::RadixHashGfur) / seconds_of(&plan, Strategy::RadixHash)
        };
        let series: Vec<f64> = [0.01, 0.03, 0.1, 0.25, 0.5, 1.0].map(advantage).into();
        assert!(series.is_sorted(), "{series:?}");
    }

    #[test]
    fn narrow_joins_prefer_partitioning_to_sorting() {
        let plan = planned(bound(&sparse(ROWS, 1), &sparse(2 * ROWS, 1), JoinKind::Inner));
        assert!(matches!(plan.strategy, Strategy::RadixHash | Strategy::RadixHashGfur), "{}", plan.strategy);
        for sorting in [Strategy::SortMerge, Strategy::SortMergeGfur] {
            assert!(seconds_of(&plan, sorting) > plan.seconds);
        }
        // Figure 8: the join with one global table is several times slower.
        assert!(seconds_of(&plan, Strategy::Hash) > 1.5 * plan.seconds, "{plan:?}");
    }

    #[test]
    fn sorting_carries_payload_only_when_values_are_narrow() {
        // Figure 18b. With 8-byte keys and payloads SMJ-OM loses its advantage; PHJ-OM keeps its own (figure 15).
        let narrow = planned(wide(DataType::Int32, DataType::Int32, 1.0));
        assert!(seconds_of(&narrow, Strategy::SortMerge) < seconds_of(&narrow, Strategy::SortMergeGfur));
        let wide_values = planned(wide(DataType::Int64, DataType::Int64, 1.0));
        let ratio = seconds_of(&wide_values, Strategy::SortMerge) / seconds_of(&wide_values, Strategy::SortMergeGfur);
        assert!(ratio > 0.9, "{ratio}");
        assert_eq!(wide_values.strategy, Strategy::RadixHash);
    }

    #[test]
    fn small_inputs_gather_as_fast_from_where_they_lie() {
        // Section 5.3, J3: with columns in the second-level cache, carrying gains nothing.
        let plan = planned(bound(&sparse(1 << 20, 2), &sparse(1 << 20, 2), JoinKind::Inner));
        let ratio = seconds_of(&plan, Strategy::RadixHashGfur) / seconds_of(&plan, Strategy::RadixHash);
        assert!(ratio < 1.0, "{ratio}");
    }
}

#[test]
fn sorted_inputs_are_merged_without_sorting() {
    let sorted = |spec: TableSpec| TableSpec { ascending: true, ..spec };
    let join = bound(&sorted(sparse(1 << 24, 2)), &sorted(sparse(1 << 25, 2)), JoinKind::Inner);
    let target = Target::default();
    let plan = plan_on(join, None, &target).unwrap();
    assert!(matches!(plan.strategy, Strategy::SortMerge | Strategy::SortMergeGfur), "{}", plan.strategy);
    assert!(plan.build_sorted && plan.probe_sorted);
    // Declared is as good as detected.
    let unsorted = bound(&sparse(1 << 24, 2), &sparse(1 << 25, 2), JoinKind::Inner);
    let plan = plan_on(unsorted.clone(), None, &target).unwrap();
    assert!(matches!(plan.strategy, Strategy::RadixHash | Strategy::RadixHashGfur), "{}", plan.strategy);
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
    assert!(matches!(plan.strategy, Strategy::SortMerge | Strategy::SortMergeGfur), "{}", plan.strategy);
}

#[test]
fn dense_distinct_keys_take_the_perfect_hash_path() {
    let target = Target::default();
    let probe = TableSpec { distinct: 1e4, ..TableSpec::primary(1 << 22, 1) };
    let dense = plan_on(bound(&TableSpec::primary(10_000, 1), &probe, JoinKind::Inner), None, &target).unwrap();
    assert!(dense.dense);
    assert_eq!((dense.strategy, dense.build_side), (Strategy::Hash, Side::Left));
    let gaps = TableSpec { range: (0, 1 << 30), ..TableSpec::primary(10_000, 1) };
    assert!(!plan_on(bound(&gaps, &probe, JoinKind::Inner), None, &target).unwrap().dense);
    let repeated = TableSpec { distinct: 5e3, ..TableSpec::primary(10_000, 1) };
    assert!(!plan_on(bound(&repeated, &probe, JoinKind::Inner), None, &target).unwrap().dense);
    let negative = TableSpec { range: (-5, 9_994), ..TableSpec::primary(10_000, 1) };
    assert!(!plan_on(bound(&negative, &probe, JoinKind::Inner), None, &target).unwrap().dense);
}

#[test]
fn every_kind_of_join_builds_on_the_smaller_side() {
    let (small, large) = (sparse(1 << 16, 1), sparse(1 << 22, 1));
    for how in JoinKind::ALL {
        let plan = plan_on(bound(&small, &large, how), None, &Target::default()).unwrap();
        assert_eq!(plan.build_side, Side::Left, "{how}");
        let plan = plan_on(bound(&large, &small, how), None, &Target::default()).unwrap();
        assert_eq!(plan.build_side, Side::Right, "{how}");
    }
}

#[test]
fn rows_are_estimated_from_distinct_keys_nulls_and_ranges() {
    let estimates = |left: &TableSpec, right: &TableSpec, how| Estimates::of(&bound(left, right, how));
    let orders = TableSpec::primary(1000, 1);
    let lines = TableSpec { rows: 4000, ..TableSpec::primary(1000, 1) };
    assert_eq!(estimates(&orders, &lines, JoinKind::Inner).rows, 4000.0);
    assert_eq!(estimates(&orders, &lines, JoinKind::LeftSemi).rows, 1000.0);
    assert_eq!(estimates(&orders, &lines, JoinKind::LeftAnti).rows, 0.0);

    let nulls = TableSpec { nulls: 1000, ..TableSpec { rows: 4000, ..TableSpec::primary(1000, 1) } };
    assert_eq!(estimates(&orders, &nulls, JoinKind::Inner).rows, 3000.0);
    assert_eq!(estimates(&orders, &nulls, JoinKind::Right).rows, 4000.0);
    assert_eq!(estimates(&orders, &nulls, JoinKind::RightAnti).rows, 1000.0);

    // Half of the customers have orders.
    let half = TableSpec { rows: 4000, distinct: 500.0, ..TableSpec::primary(1000, 1) };
    assert_eq!(estimates(&orders, &half, JoinKind::Inner).rows, 4000.0);
    assert_eq!(estimates(&orders, &half, JoinKind::LeftAnti).rows, 500.0);
    assert_eq!(estimates(&orders, &half, JoinKind::Full).rows, 4500.0);

    let disjoint = TableSpec { range: (5000, 5999), ..TableSpec::primary(1000, 1) };
    assert_eq!(estimates(&orders, &disjoint, JoinKind::Inner).rows, 0.0);
    assert_eq!(estimates(&orders, &disjoint, JoinKind::Full).rows, 2000.0);

    // 1000 rows of 10 different keys on each side: 10 * 100 * 100 pairs.
    let many = TableSpec { distinct: 10.0, range: (0, 9), ..TableSpec::primary(1000, 1) };
    assert_eq!(estimates(&many, &many, JoinKind::Inner).rows, 100_000.0);

    // A tenth of the clicks have one user, who has two sessions as every user does.
    let sessions = TableSpec { rows: 200, ..TableSpec::primary(100, 1) };
    let clicks = TableSpec { rows: 10_000, distinct: 9000.0, ..TableSpec::primary(9000, 1) };
    let skewed = TableSpec { heaviest_share: Some(0.1), ..TableSpec { range: (0, 99), ..clicks } };
    assert_eq!(estimates(&sessions, &skewed, JoinKind::Inner).pairs, 2000.0);
    assert_eq!(estimates(&skewed, &sessions, JoinKind::Inner).pairs, 2000.0);
    assert_eq!(estimates(&skewed, &sessions, JoinKind::LeftSemi).rows, 1000.0);
    let elsewhere = TableSpec { range: (5000, 5999), ..TableSpec::primary(1000, 1) };
    assert_eq!(estimates(&skewed, &elsewhere, JoinKind::Inner).pairs, 0.0);

    let empty = TableSpec { rows: 0, distinct: 0.0, ..TableSpec::primary(1, 1) };
    for how in JoinKind::ALL {
        let rows = estimates(&empty, &orders, how).rows;
        assert!(rows.is_finite() && rows >= 0.0, "{how}: {rows}");
    }
}

#[test]
fn a_join_that_fits_no_device_is_refused_with_what_would_help() {
    let join = bound(&sparse(1 << 24, 2), &sparse(1 << 26, 2), JoinKind::Inner);
    let tiny = Target { memory_bytes: 1 << 20, ..two_pass(a100()) };
    let Err(Error::Exhausted(message)) = plan_on(join.clone(), None, &tiny) else { panic!("it was planned") };
    for part in ["\"r\"", "16777216 rows", "1.0 MiB", "--device-memory", "cuda:0"] {
        assert!(message.contains(part), "{message:?} does not say {part:?}");
    }
    // Enough for the narrower strategies only: the one that was asked for is refused, and a fitting one is named.
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
    assert_ne!(free.strategy, most);
    assert_eq!(whole.alternatives.len(), 2 * Strategy::ALL.len() - 1, "each strategy on each side");
}

#[test]
fn a_probe_side_in_chunks_passes_over_the_build_side_once_for_each() {
    let join = bound(&sparse(1 << 22, 2), &sparse(1 << 26, 2), JoinKind::Inner);
    let match_seconds = |strategy, memory_bytes| {
        let target = Target { memory_bytes, ..Target::default() };
        let plan = plan_on(join.clone(), Some(strategy), &target).unwrap();
        plan.phases.iter().find(|phase| phase.name == "match").unwrap().seconds
    };
    for strategy in [Strategy::RadixHash, Strategy::SortMerge] {
        let whole = plan_on(join.clone(), Some(strategy), &Target::default()).unwrap().memory;
        assert_eq!(match_seconds(strategy, whole.whole_bytes), match_seconds(strategy, u64::MAX), "{strategy}");
        // A hundredth of the probe side fits at a time: the build side, a sixteenth of it, is passed over a hundred times.
        let hundredth = whole.resident_bytes + (whole.whole_bytes - whole.resident_bytes) / 100;
        let hundredth = hundredth.max(whole.minimum_bytes);
        assert!(match_seconds(strategy, hundredth) > 2.0 * match_seconds(strategy, u64::MAX), "{strategy}");
    }
    let hash = plan_on(join.clone(), Some(Strategy::Hash), &Target::default()).unwrap().memory;
    assert_eq!(match_seconds(Strategy::Hash, hash.minimum_bytes), match_seconds(Strategy::Hash, u64::MAX));
}

#[test]
fn dictionary_columns_move_like_numbers_where_batches_share_the_dictionary() {
    let payload = DataType::Dictionary(Box::new(DataType::Int16), Box::new(DataType::Utf8));
    let side = |payload: DataType| TableSpec { payload: vec![payload], ..sparse(1 << 20, 0) };
    let gather = |payload: DataType| {
        let join = bound(&side(payload.clone()), &side(payload), JoinKind::Inner);
        let plan = plan_on(join, Some(Strategy::RadixHash), &Target::default()).unwrap();
        plan.phases.iter().find(|phase| phase.name == "gather").unwrap().seconds
    };
    // Tables without batches have no two dictionaries.
    assert_eq!(gather(payload), gather(DataType::Int16));
    assert!(gather(DataType::Utf8) > gather(DataType::Int16));
}

#[test]
fn a_strategy_that_is_asked_for_is_taken() {
    for strategy in Strategy::ALL {
        let join = bound(&sparse(1 << 16, 1), &sparse(1 << 20, 1), JoinKind::Inner);
        let plan = plan_on(join, Some(strategy), &Target::default()).unwrap();
        assert_eq!(plan.strategy, strategy);
        assert!(plan.reason.contains("asked for"), "{}", plan.reason);
        let chosen = (strategy, plan.build_side);
        assert!(plan.alternatives.iter().all(|other| (other.strategy, other.build_side) != chosen));
        for other in &plan.alternatives {
            assert_eq!(other.reason.contains("asked for"), other.strategy != strategy, "{other:?}");
        }
    }
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
fn copies_that_run_beside_primitives_count_where_they_are_longer() {
    let join = bound(&sparse(1 << 24, 2), &sparse(1 << 24, 2), JoinKind::Inner);
    let mut target = two_pass(a100());
    target.rates.copy_in = 1e9;
    let plan = plan_on(join, None, &target).unwrap();
    let copy = plan.phases.iter().find(|phase| phase.name == "copy in").unwrap().seconds;
    let sum: f64 = plan.phases.iter().map(|phase| phase.seconds).sum();
    assert!((plan.seconds - copy).abs() < 1e-9, "{} is not {copy}", plan.seconds);
    assert!(sum > copy);
}

#[test]
fn an_explanation_lines_up_what_was_predicted_with_what_was_measured() {
    let join = bound(&sparse(1 << 16, 1), &sparse(1 << 20, 1), JoinKind::Inner);
    let plan = plan_on(join, Some(Strategy::RadixHash), &Target::default()).unwrap();
    let measured =
        Measured { phases: vec![("match".into(), 0.5, 1000), ("verify".into(), 0.25, 10)], seconds: 0.75, rows: 7 };
    let explanation = Explanation::new(&plan, "host:0", "the only device".into(), Some(&measured));
    let json = serde_json::to_value(&explanation).unwrap();
    assert_eq!(json["strategy"], "radix-hash");
    assert_eq!(json["measured_seconds"], 0.75);
    assert_eq!(json["left"]["role"], "build");
    assert_eq!(json["result"]["rows"], 7);
    let phases = json["phases"].as_array().unwrap();
    let named = |name: &str| phases.iter().find(|phase| phase["name"] == name).unwrap();
    assert_eq!(named("match")["measured_seconds"], 0.5);
    assert!(named("match")["predicted_seconds"].as_f64().unwrap() > 0.0);
    assert!(named("partition probe")["measured_seconds"].is_null());
    assert!(named("verify")["predicted_seconds"].is_null());
    assert_eq!(json["alternatives"].as_array().unwrap().len(), 9);
    assert_eq!(named("match")["measured_bytes_per_second"], 2000.0);
    assert_eq!(named("match")["boundary_bytes_per_second"], Target::default().rates.stream);
    assert_eq!(named("copy in")["boundary"], "host to device");

    let text = explanation.to_string();
    for part in [
        "radix-hash: it was asked for",
        "on host:0: the only device",
        "build: partition",
        "2.0 KiB/s of",
        "not chosen",
        "sort-merge-gfur",
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
        assert_eq!(budget.used_bytes(), 0, "calibration keeps memory");
        println!("{threads} threads, {memory} bytes, {link:?}: {rates:?}");
        let json = serde_json::to_value(&rates).unwrap();
        for (name, value) in json.as_object().unwrap() {
            let numbers: Vec<f64> = value.as_array().map_or_else(
                || value.as_f64().into_iter().collect(),
                |list| list.iter().filter_map(serde_json::Value::as_f64).collect(),
            );
            assert!(numbers.iter().all(|rate| rate.is_finite() && *rate > 0.0), "{name} is {value}");
        }
        if memory >= 1 << 20 {
            assert_eq!(rates.reads_host_memory, link.is_none());
        }
        // An emulated link takes the time that it would take, so what is measured is never faster.
        if let Some(link) = link {
            assert!(rates.copy_in <= 1.1 * link.to_device_bytes_per_second, "{}", rates.copy_in);
            assert!(rates.copy_out <= 1.1 * link.from_device_bytes_per_second, "{}", rates.copy_out);
        }
    }
}

/// Keys of `s` of which every sixteenth is one of `r`.
fn one_in_sixteen(how: JoinKind) -> BoundJoin {
    let r = TableSpec { distinct: f64::from(1u32 << 20), ..sparse(1 << 20, 2) };
    let s = TableSpec { distinct: f64::from(1u32 << 24), ..sparse(1 << 25, 2) };
    bound(&r, &s, how)
}

#[test]
fn a_filter_is_used_where_few_probe_rows_match_and_the_others_are_dropped() {
    let target = Target::default();
    let few = plan_on(one_in_sixteen(JoinKind::Inner), None, &target).unwrap();
    let passing = few.filtered_rows.expect("one row in sixteen matches");
    let probe_rows = f64::from(1u32 << 25);
    assert!((0.06..0.09).contains(&(passing / probe_rows)), "{passing}");
    assert!(few.phases.iter().any(|phase| phase.name == "filter" && phase.seconds > 0.0 && phase.bytes > 0));
    let explanation = Explanation::new(&few, "host:0", String::new(), None);
    assert_eq!(explanation.right.filtered_rows, Some(passing.round() as u64));
    assert_eq!(explanation.left.filtered_rows, None);
    assert!(explanation.to_string().contains("probe: filter by the build keys, 8 % pass; "), "{explanation}");
    // It is no strategy of its own: those that are asked for by name use it as well.
    for strategy in Strategy::ALL {
        let plan = plan_on(one_in_sixteen(JoinKind::Inner), Some(strategy), &target).unwrap();
        assert!(plan.filtered_rows.is_some(), "{strategy}");
    }
    for how in JoinKind::ALL {
        let plan = plan_on(one_in_sixteen(how), Some(Strategy::RadixHash), &target).unwrap();
        let drops = !matches!(how, JoinKind::Right | JoinKind::Full | JoinKind::RightAnti);
        assert_eq!(plan.filtered_rows.is_some(), drops && plan.build_side == Side::Left, "{how}");
        assert_eq!(plan.task().unwrap().filter, plan.filtered_rows.is_some());
    }

    let all_match = plan_on(bound(&sparse(1 << 20, 2), &sparse(1 << 20, 2), JoinKind::Inner), None, &target).unwrap();
    assert_eq!(all_match.filtered_rows, None);
    let no_filters = Target { rates: Rates { filter_rows: 0.0, ..target.rates.clone() }, ..target.clone() };
    assert_eq!(plan_on(one_in_sixteen(JoinKind::Inner), None, &no_filters).unwrap().filtered_rows, None);
    // Nothing is known of how many keys there are.
    let mut unknown = one_in_sixteen(JoinKind::Inner);
    let mut table = sparse(1 << 25, 2).build("s");
    table.statistics[0].distinct = None;
    unknown.right = Arc::new(table);
    assert_eq!(plan_on(unknown, None, &target).unwrap().filtered_rows, None);
}

#[test]
fn columns_are_carried_by_the_side_where_that_is_worth_it() {
    // Few rows of s match: moving its columns with the keys would move all of them. Each row of r matches one of them.
    let (r, s) = (sparse(1 << 24, 2), sparse(1 << 28, 2));
    let mut target = two_pass(a100());
    target.memory_bytes = u64::MAX;
    let plan = |strategy| plan_on(bound(&r, &s, JoinKind::Inner), strategy, &target).unwrap();
    let chosen = plan(None);
    assert_eq!((chosen.strategy, chosen.build_side), (Strategy::RadixHash, Side::Left), "{}", chosen.reason);
    let Carried::Columns { left, right } = &chosen.carried else { panic!("{:?}", chosen.carried) };
    assert_eq!((left.iter().copied().collect::<Vec<_>>(), right.len()), (vec![1, 2], 0));
    let task = chosen.task().unwrap();
    assert_eq!((task.build.carried.len(), task.probe.carried.len()), (2, 0));

    // It is cheaper than what the names stand for, which are all or nothing.
    let (all, none) = (plan(Some(Strategy::RadixHash)), plan(Some(Strategy::RadixHashGfur)));
    assert_eq!((&all.carried, &none.carried), (&Carried::Everything, &Carried::Nothing));
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
fn a_second_pass_is_made_where_partitions_outgrow_the_cache() {
    let bits = |build_rows: u64, target: &Target| {
        let join = bound(&sparse(build_rows, 1), &sparse(2 * build_rows, 1), JoinKind::Inner);
        plan_on(join, Some(Strategy::RadixHash), target).unwrap().radix_bits.unwrap()
    };
    let target = Target { pass_bits_max: 8, ..Target::default() };
    let rows = |bits: u32| (target.partition_rows as u64) << bits;
    assert_eq!(bits(rows(7), &target), 7);
    assert_eq!(bits(rows(8), &target), 8);
    // Partitions twice as large as they should be are no reason to move everything once more.
    assert_eq!(bits(rows(9), &target), 8);
    assert_eq!(bits(rows(13), &target), 13);
    // Two passes give no more than twice the bits of one.
    let rates = Rates { partition: 30e9, ..target.rates.clone() };
    assert_eq!(bits(rows(8), &Target { pass_bits_max: 2, rates, ..target.clone() }), 4);
}

#[test]
fn without_statistics_a_plan_is_made_all_the_same() {
    let mut join = bound(&sparse(1 << 16, 1), &sparse(1 << 20, 1), JoinKind::Inner);
    for table in [&mut join.left, &mut join.right] {
        let spec = if table.name == "r" { sparse(1 << 16, 1) } else { sparse(1 << 20, 1) };
        let mut blank = spec.build(&table.name);
        blank.statistics.fill(ColumnStatistics::default());
        *table = Arc::new(blank);
    }
    let plan = plan_on(join, None, &Target::default()).unwrap();
    assert_eq!(plan.build_side, Side::Left);
    assert!(!plan.dense);
}
