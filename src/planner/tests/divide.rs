//! Tests of distributions that a caller asks for.

use super::super::inputs::{Inputs, TextWork};
use super::super::rank_parts::RankParts;
use super::*;
use crate::device::ROWS_MAX;
use crate::join::RankReport;
use crate::memory::Interrupt;

/// Tables `r` and `s` with an integer `k` and a text `t`.
fn join(how: JoinKind, key: &str) -> BoundJoin {
    join_of_rows(how, key, 1 << 20)
}

fn join_of_rows(how: JoinKind, key: &str, rows: u64) -> BoundJoin {
    let catalog = Catalog::new(Arena::new(Budget::new("host memory", "--host-memory", 1 << 20)));
    let fields = vec![Field::new("k", DataType::Int32, false), Field::new("t", DataType::Utf8, false)];
    for name in ["r", "s"] {
        let mut table = Table::from_batches(name, Arc::new(Schema::new(fields.clone())), Vec::new()).unwrap();
        (table.rows, table.bytes) = (rows, 24 * rows);
        table.statistics = vec![ColumnStatistics { distinct: Some(1e6), ..ColumnStatistics::default() }; 2];
        catalog.create(table).unwrap();
    }
    bind(&JoinSpec { how, ..JoinSpec::inner("r", "s", vec![KeyPair::new(key, key)]) }, &catalog).unwrap()
}

fn planned(how: JoinKind, key: &str, wanted: Distribution, target: &Target) -> crate::Result<Plan> {
    let overrides = PlanOverrides { distribution: Some(wanted), ..PlanOverrides::default() };
    plan_with_overrides(join(how, key), &overrides, target)
}

fn gang() -> Target {
    Target { ranks: 2, ..Target::default() }
}

/// A GPU and a host device.
fn helped() -> Target {
    let alone = Target::default();
    let capabilities = Capabilities { exchanges: false, ..alone.capabilities };
    Target { ranks: 2, helping_hosts: 1, capabilities, ..alone }
}

#[test]
fn nothing_is_expected_of_a_host_device_beside_a_gpu() {
    let alone = plan_on(join(JoinKind::Inner, "k"), None, &Target::default()).unwrap();
    let plan = plan_on(join(JoinKind::Inner, "k"), None, &helped()).unwrap();
    assert_eq!((plan.composition.distribution, plan.target.ranks), (Distribution::Broadcast, 2));
    assert_eq!(plan.seconds, alone.seconds);
    let why = plan.undivided.unwrap();
    assert!(why.contains("whole build side") && why.contains("GPUs and the CPU exchange no rows"), "{why}");
    // A full join keeps build rows, so one device runs it.
    let full = plan_on(join(JoinKind::Full, "k"), None, &helped()).unwrap();
    assert_eq!((full.composition.distribution, full.target.ranks), (Distribution::Alone, 1));
}

#[test]
fn a_distribution_that_is_asked_for_is_taken() {
    for wanted in Distribution::ALL {
        let plan = planned(JoinKind::Inner, "k", wanted, &gang()).unwrap();
        assert_eq!((plan.composition.distribution, plan.target.ranks), (wanted, 2));
        assert!(plan.alternatives.iter().all(|other| other.distribution == wanted && !other.is_overridden));
        assert!(plan.reason.contains("the shortest predicted time"), "{}", plan.reason);
    }
    let chosen = plan_on(join(JoinKind::Inner, "k"), None, &gang()).unwrap();
    let others: Vec<_> = chosen.alternatives.iter().map(|other| other.distribution).collect();
    assert!(Distribution::ALL.iter().all(|distribution| others.contains(distribution)), "{others:?}");
}

#[test]
fn an_explanation_shows_the_part_of_each_rank_and_the_rate_of_the_exchange() {
    let plan = planned(JoinKind::Inner, "k", Distribution::Hash, &gang()).unwrap();
    assert!(plan.sent_bytes >= 4 << 20, "half of its rows, with keys of 4 bytes and the row numbers of text");
    let rank = |index: u16, probe_rows: u64, work_seconds: f64| RankReport {
        device: format!("host:{index}"),
        build_rows: 500,
        probe_rows,
        sent_bytes: 4 << 20,
        sending_seconds: 0.5,
        work_seconds,
    };
    let ranks = vec![rank(0, 300, 1.0), rank(1, 100, 1.0)];
    let measured = Measured { ranks, seconds: 1.0, ..Measured::default() };
    let explanation = Explanation::new(&plan, "host:0, host:1", String::new(), Some(&measured));
    let expected = Skew { build_rows: 1.0, probe_rows: 1.5, sent_bytes: 1.0, work_seconds: 1.0 };
    assert_eq!(explanation.skew, Some(expected));
    let exchange = explanation.exchange.clone().unwrap();
    assert_eq!((exchange.measured_bytes, exchange.measured_bytes_per_second), (Some(4 << 20), Some((8 << 20) as f64)));
    assert_eq!(exchange.predicted_seconds, plan.sent_bytes as f64 / exchange.boundary_bytes_per_second);
    let text = explanation.to_string();
    assert!(text.contains("4.0 MiB measured, 500.0 ms; 8.0 MiB/s of "), "{text}");
    assert!(text.contains("host:0                       500            300     4.0 MiB"), "{text}");
    assert!(text.contains("largest / mean              1.00           1.50        1.00"), "{text}");

    let plan = planned(JoinKind::Inner, "k", Distribution::Broadcast, &gang()).unwrap();
    let broadcast = Explanation::new(&plan, "host:0, host:1", String::new(), None);
    assert_eq!((plan.sent_bytes, broadcast.exchange, broadcast.skew), (0, None, None));
}

#[test]
fn a_distribution_that_is_impossible_is_refused_with_what_would_be_right() {
    use Distribution::{Broadcast, Hash};
    let with = |capabilities| Target { capabilities, ..gang() };
    let over_links = with(Capabilities { exchanges: false, strings: false, forms_gangs: true });
    let in_one_process = with(Capabilities { exchanges: false, strings: false, forms_gangs: false });
    for (how, key, wanted, target, words) in [
        (JoinKind::Inner, "k", Hash, Target::default(), "\"devices\": 2"),
        (JoinKind::Inner, "k", Broadcast, Target::default(), "\"devices\": 2"),
        (JoinKind::Full, "k", Broadcast, gang(), "ask for \"hash\" or \"auto\""),
        (JoinKind::Inner, "t", Hash, gang(), "these keys are wider; ask for \"broadcast\""),
        (JoinKind::Inner, "k", Hash, over_links, "because a topology file emulates its links; ask for \"broadcast\""),
        (JoinKind::Inner, "k", Broadcast, in_one_process, "--device-processes"),
        (JoinKind::Inner, "k", Hash, helped(), "GPUs and the CPU exchange no rows; ask for \"broadcast\""),
    ] {
        let refused = planned(how, key, wanted, &target).unwrap_err();
        assert!(matches!(&refused, Error::Invalid(message) if message.contains(words)), "{refused}");
    }
}

/// Plans a broadcast of a build side with this many rows, and this many nulls beside the keys.
fn reads_in_shares(build_rows: u64, exchanges: bool, nulls: u64) -> bool {
    let catalog = Catalog::new(Arena::new(Budget::new("host memory", "--host-memory", 1 << 20)));
    for (name, rows) in [("r", build_rows), ("s", 1 << 28)] {
        let fields = vec![Field::new("k", DataType::Int64, false), Field::new(name, DataType::Int64, true)];
        let mut table = Table::from_batches(name, Arc::new(Schema::new(fields)), Vec::new()).unwrap();
        (table.rows, table.bytes) = (rows, 16 * rows);
        table.statistics = vec![ColumnStatistics { distinct: Some(rows as f64), ..ColumnStatistics::default() }; 2];
        table.statistics[1].nulls = nulls;
        catalog.create(table).unwrap();
    }
    let join = bind(&JoinSpec::inner("r", "s", vec![KeyPair::new("k", "k")]), &catalog).unwrap();
    let overrides = PlanOverrides { distribution: Some(Distribution::Broadcast), ..PlanOverrides::default() };
    let rates = Rates::h200();
    let target = Target { gang: GangRates::assumed(&rates), rates, ranks: 2, ..Target::default() };
    let target =
        Target { capabilities: Capabilities { exchanges, ..target.capabilities }, memory_bytes: 100 << 30, ..target };
    let plan = plan_with_overrides(join, &overrides, &target).unwrap();
    let shares = plan.composition.shares_build_read;
    assert_eq!(shares, plan.sent_bytes > 0, "only build rows that are read in shares cross");
    shares
}

#[test]
fn a_large_build_side_is_read_in_shares_where_whole_rows_can_cross() {
    assert!(reads_in_shares(1 << 27, true, 0));
    assert!(!reads_in_shares(1 << 27, false, 0), "the devices share no memory");
    assert!(!reads_in_shares(1 << 27, true, 5), "a column with nulls does not cross");
    assert!(!reads_in_shares(1 << 10, true, 0), "sending costs more than reading");
}

#[test]
fn the_limit_of_build_rows_holds_for_each_rank() {
    use Distribution::{Broadcast, Hash};
    let rows = 3 * ROWS_MAX as u64 / 2;
    let plan = |ranks: usize, wanted: Option<Distribution>| {
        let overrides = PlanOverrides { distribution: wanted, ..PlanOverrides::default() };
        let target = Target { ranks, memory_bytes: 1 << 50, ..Target::default() };
        plan_with_overrides(join_of_rows(JoinKind::Inner, "k", rows), &overrides, &target)
    };
    assert!(matches!(plan(1, None), Err(Error::Unsupported(words)) if words.contains("on one device")));
    assert_eq!(plan(2, None).unwrap().composition.distribution, Hash);
    let refused = plan(2, Some(Broadcast)).unwrap_err();
    assert!(refused.message().contains("the most that a device can index; ask for \"hash\""), "{refused}");
}

/// Rows with one key that has a share of them, and `rows / 4` other keys that have the rest evenly.
fn skewed(rows: u64, heaviest_share: Option<f64>) -> TableSpec {
    TableSpec { distinct: rows as f64 / 4.0, heaviest_share, ..sparse(rows, 2) }
}

/// Inputs and estimates of the fullest of four ranks that divide keys by hash.
fn of_fullest_rank(join: &BoundJoin) -> (Inputs, Estimates) {
    let estimates = Estimates::of(join, &Interrupt::default()).unwrap();
    let inputs = Inputs::new(join, Side::Left, &estimates, TextWork::default()).unwrap();
    let parts = RankParts::of(Distribution::Hash, 4, &inputs.build, &inputs.probe, &estimates);
    (inputs.of_rank(Distribution::Hash, parts), estimates.of_rank(join, Side::Left, parts))
}

#[test]
fn a_rank_owns_all_rows_of_a_heavy_key() {
    let (rows, probe_rows) = (1u64 << 24, 1u64 << 25);
    let (build, probe) = (rows as f64, probe_rows as f64);
    let near = |found: f64, expected: f64| (found / expected - 1.0).abs() < 1e-4;
    let of = |build_share, probe_share| {
        let join = bound(&skewed(rows, build_share), &skewed(probe_rows, probe_share), JoinKind::Inner);
        let whole = Estimates::of(&join, &Interrupt::default()).unwrap();
        let (inputs, estimates) = of_fullest_rank(&join);
        let read = [inputs.build.rows_read, inputs.probe.rows_read];
        assert_eq!(read, [build / 4.0, probe / 4.0], "ranks read equal parts");
        (inputs, estimates.pairs, whole.pairs)
    };
    let (uniform, pairs, all_pairs) = of(None, None);
    assert!(near(uniform.build.rows, build / 4.0) && near(uniform.probe.rows, probe / 4.0), "{uniform:?}");
    assert!(near(pairs, all_pairs / 4.0), "{pairs} of {all_pairs}");

    let (heavy_build, ..) = of(Some(0.5), None);
    assert!(near(heavy_build.build.rows, build * 5.0 / 8.0), "{heavy_build:?}");
    assert_eq!(heavy_build.build.heaviest_rows, build / 2.0, "no rank has a part of it");
    assert!(near(heavy_build.probe.rows, probe / 2.0), "other ranks have more of the other keys: {heavy_build:?}");

    let (heavy_probe, ..) = of(None, Some(0.5));
    assert!(near(heavy_probe.build.rows, build / 4.0), "{heavy_probe:?}");
    assert!(near(heavy_probe.probe.rows, probe * 5.0 / 8.0), "{heavy_probe:?}");

    let (heavy_both, pairs, all_pairs) = of(Some(0.5), Some(0.5));
    assert!(near(heavy_both.build.rows, build * 5.0 / 8.0) && near(heavy_both.probe.rows, probe * 5.0 / 8.0));
    let product = build / 2.0 * (probe / 2.0);
    assert!(pairs >= product && pairs <= all_pairs, "one rank makes the product: {pairs} of {all_pairs}");
}

#[test]
fn a_rank_that_would_have_nearly_all_rows_is_avoided() {
    // Tables are in device memory, so the work of the devices decides.
    let gang = GangRates { peers: 390e9, host_memory: 1e15 };
    let target = Target { gang, ranks: 4, ..a100() };
    let planned = |share, wanted| {
        let join = bound(&skewed(1 << 28, share), &skewed(1 << 28, None), JoinKind::Inner);
        let build_side = Some(Side::Left);
        let overrides = PlanOverrides { distribution: wanted, build_side, ..PlanOverrides::default() };
        plan_with_overrides(join, &overrides, &target).unwrap()
    };
    let (even, heavy) = (planned(None, None), planned(Some(0.95), None));
    assert_eq!(even.composition.distribution, Distribution::Hash);
    assert_eq!(heavy.composition.distribution, Distribution::Broadcast);
    let [even, heavy] = [None, Some(0.95)].map(|share| planned(share, Some(Distribution::Hash)));
    assert!(heavy.seconds > 1.5 * even.seconds, "{} s, {} s", heavy.seconds, even.seconds);
    assert!(heavy.memory.minimum_bytes > 2 * even.memory.minimum_bytes, "{:?}, {:?}", heavy.memory, even.memory);
}
