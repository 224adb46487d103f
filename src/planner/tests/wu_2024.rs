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
