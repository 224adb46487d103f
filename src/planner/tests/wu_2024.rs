//! Tests choices against section 5 of Wu et al. 2024, and against its summary, the decision trees
//! of figure 18 in section 5.4. One tree gives the best of all four strategies, and one the better
//! of the two that sort. PHJ-OM is `radix-hash`, PHJ-UM `radix-hash-gfur`, SMJ-OM `sort-merge` and
//! SMJ-UM `sort-merge-gfur`.

use super::*;

const ROWS: u64 = 1 << 27;

fn wide(payload: DataType, key: DataType, match_ratio: f64) -> BoundJoin {
    let columns = vec![payload; 2];
    let r = TableSpec { payload: columns.clone(), key: key.clone(), ..sparse(ROWS, 0) };
    // Some keys of s are missing in r, so s has more distinct values than r.
    let s = TableSpec { payload: columns, key, distinct: ROWS as f64, ..sparse(ROWS, 0) };
    let r = TableSpec { rows: (ROWS as f64 * match_ratio) as u64, distinct: ROWS as f64 * match_ratio, ..r };
    bound(&r, &s, JoinKind::Inner)
}

fn planned(join: BoundJoin) -> Plan {
    plan_on(join, None, &two_pass(a100())).unwrap()
}

#[test]
fn wide_joins_with_many_matches_move_their_payload() {
    let plan = planned(wide(DataType::Int32, DataType::Int32, 1.0));
    assert_eq!(plan.strategy(), Strategy::RadixHash);
    // Figure 10: PHJ-OM is about 2.3 times as fast as PHJ-UM, and 1.4 times as fast as SMJ-OM.
    // SMJ-OM is 1.6 times as fast as SMJ-UM and PHJ-UM.
    let against = |other: Strategy| seconds_of(&plan, other) / plan.seconds;
    assert!((1.6..3.2).contains(&against(Strategy::RadixHashGfur)), "{}", against(Strategy::RadixHashGfur));
    assert!((1.1..2.0).contains(&against(Strategy::SortMerge)), "{}", against(Strategy::SortMerge));
    assert!(against(Strategy::SortMergeGfur) > against(Strategy::SortMerge));
}

#[test]
fn wide_joins_with_few_matches_gather_payload_by_row_number() {
    // Figure 13: PHJ-UM wins if fewer than a quarter of the rows match. Unmatched rows of r remain
    // in r.
    let few = |ratio: f64| {
        let r = sparse(ROWS, 2);
        // The range of s overlaps the range of r by `ratio`.
        let low = (f64::from(i32::MAX) * (1.0 - ratio)) as i128;
        let s = TableSpec { range: (low, low + i128::from(i32::MAX)), key: DataType::UInt32, ..sparse(ROWS, 2) };
        let r = TableSpec { key: DataType::UInt32, ..r };
        planned(bound(&r, &s, JoinKind::Inner))
    };
    assert_eq!(few(0.02).strategy(), Strategy::RadixHashGfur);
    assert_eq!(few(0.75).strategy(), Strategy::RadixHash);
    // The advantage of moving payload grows with the share of matches, and changes sign once.
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
    assert!(matches!(plan.strategy(), Strategy::RadixHash | Strategy::RadixHashGfur), "{}", plan.strategy());
    for sorting in [Strategy::SortMerge, Strategy::SortMergeGfur] {
        assert!(seconds_of(&plan, sorting) > plan.seconds);
    }
    // Figure 8: the join with one global table is several times slower.
    assert!(seconds_of(&plan, Strategy::Hash) > 1.5 * plan.seconds, "{plan:?}");
}

#[test]
fn sorting_moves_payload_only_when_values_are_narrow() {
    // Figure 18b. With 8-byte keys and payloads SMJ-OM loses its advantage. PHJ-OM keeps its own
    // (figure 15).
    let narrow = planned(wide(DataType::Int32, DataType::Int32, 1.0));
    assert!(seconds_of(&narrow, Strategy::SortMerge) < seconds_of(&narrow, Strategy::SortMergeGfur));
    let wide_values = planned(wide(DataType::Int64, DataType::Int64, 1.0));
    let ratio = seconds_of(&wide_values, Strategy::SortMerge) / seconds_of(&wide_values, Strategy::SortMergeGfur);
    assert!(ratio > 0.9, "{ratio}");
    assert_eq!(wide_values.strategy(), Strategy::RadixHash);
}

#[test]
fn small_inputs_are_gathered_by_row_number_as_fast_as_with_moved_payload() {
    // Section 5.3, J3: with columns in the second-level cache, moving payload gains nothing.
    let plan = planned(bound(&sparse(1 << 20, 2), &sparse(1 << 20, 2), JoinKind::Inner));
    let ratio = seconds_of(&plan, Strategy::RadixHashGfur) / seconds_of(&plan, Strategy::RadixHash);
    // Calls take most of the time, and looking row numbers up needs a few more calls.
    assert!(ratio < 1.05, "{ratio}");
}

#[test]
fn a_smaller_primary_key_side_does_not_change_the_best_strategy() {
    // Figure 11: |R| / |S| from 1 to 1/16, though gathering from a small R is cheaper. (Section 5.3
    // has one side in cache.)
    for shift in 0..=2 {
        let r = sparse(ROWS >> shift, 2);
        let s = TableSpec { distinct: (ROWS >> shift) as f64, ..sparse(ROWS, 2) };
        let plan = planned(bound(&r, &s, JoinKind::Inner));
        assert_eq!(
            (plan.strategy(), plan.composition.build_side),
            (Strategy::RadixHash, Side::Left),
            "1/{}",
            1 << shift
        );
        assert!(
            seconds_of(&plan, Strategy::SortMerge) < seconds_of(&plan, Strategy::SortMergeGfur),
            "1/{}",
            1 << shift
        );
    }
}

#[test]
fn more_payload_columns_keep_the_advantage_of_moving_payload() {
    // Figure 12: from two columns on, PHJ-OM is about 2 times as fast as PHJ-UM, and SMJ-OM 1.3
    // times.
    let ratios = |payload: usize| {
        let plan = planned(bound(&sparse(ROWS, payload), &sparse(ROWS, payload), JoinKind::Inner));
        assert_eq!(plan.strategy(), Strategy::RadixHash, "{payload} columns");
        let against = |strategy| seconds_of(&plan, Strategy::RadixHashGfur) / seconds_of(&plan, strategy);
        (against(Strategy::RadixHash), against(Strategy::SortMerge))
    };
    for payload in [2, 4, 6, 8] {
        let (partitioned, sorted) = ratios(payload);
        assert!((1.6..3.2).contains(&partitioned), "{payload} columns: {partitioned}");
        assert!((0.9..2.2).contains(&sorted), "{payload} columns: {sorted}");
    }
}

#[test]
fn skewed_foreign_keys_keep_radix_hash_best_and_make_sort_merge_gfur_competitive() {
    // Figure 14: gathering from few rows is cheap, so SMJ-UM catches up with SMJ-OM when the Zipf
    // factor exceeds 1.
    let skewed = |share: Option<f64>| {
        let distinct = share.map_or(ROWS as f64, |share| ROWS as f64 * (1.0 - share));
        planned(bound(
            &sparse(ROWS, 2),
            &TableSpec { heaviest_share: share, distinct, ..sparse(ROWS, 2) },
            JoinKind::Inner,
        ))
    };
    let shares = [None, Some(0.2), Some(0.4), Some(0.6)];
    let advantage = |share| {
        let plan = skewed(share);
        assert!(
            matches!(plan.strategy(), Strategy::RadixHash | Strategy::RadixHashGfur),
            "{share:?}: {}",
            plan.strategy()
        );
        seconds_of(&plan, Strategy::SortMergeGfur) / seconds_of(&plan, Strategy::SortMerge)
    };
    let series: Vec<f64> = shares.into_iter().map(advantage).collect();
    assert!(series.is_sorted_by(|a, b| a > b), "{series:?}");
    assert!(series[0] > 1.1 && series[3] < series[0] - 0.2, "{series:?}");
    assert_eq!(skewed(Some(0.2)).strategy(), Strategy::RadixHash);
}

#[test]
fn joins_of_tpc_queries_are_partitioned() {
    // Table 6 and figure 17, with keys of 4 bytes and other values of 8: (rows of R and S, result,
    // columns of R and S).
    let columns = |keys: usize, others: usize| [vec![DataType::Int32; keys], vec![DataType::Int64; others]].concat();
    for (name, r_rows, s_rows, matched, r_columns, s_columns) in [
        ("J1", 15e6, 18.2e6, 15e6, columns(1, 3), columns(0, 1)),
        ("J2", 15e6, 60e6, 15e6, columns(1, 2), columns(0, 1)),
        ("J3", 2e6, 2.1e6, 2e6, columns(0, 3), columns(0, 3)),
        ("J4", 1.9e6, 58e6, 1.9e6, columns(0, 1), columns(3, 7)),
        // Each of six million orders has twelve lines on both sides.
        ("J5", 72e6, 72e6, 6e6, columns(0, 1), columns(0, 1)),
    ] {
        let r = TableSpec { payload: r_columns, distinct: f64::min(r_rows, matched), ..sparse(r_rows as u64, 0) };
        let s = TableSpec { payload: s_columns, distinct: matched, ..sparse(s_rows as u64, 0) };
        let plan = planned(bound(&r, &s, JoinKind::Inner));
        let partitioned = seconds_of(&plan, Strategy::RadixHash).min(seconds_of(&plan, Strategy::RadixHashGfur));
        for sorting in [Strategy::SortMerge, Strategy::SortMergeGfur] {
            assert!(partitioned < seconds_of(&plan, sorting), "{name}: {sorting} is no slower");
        }
        if name == "J2" {
            // The largest join: moving payload pays with partitioning and with sorting, and most
            // with partitioning.
            assert!(seconds_of(&plan, Strategy::RadixHash) < seconds_of(&plan, Strategy::RadixHashGfur), "{name}");
        }
    }
}
