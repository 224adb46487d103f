use std::collections::HashMap;

use arrow::array::{Array, AsArray};
use arrow::datatypes::Int64Type;

use super::*;

fn workload() -> Workload {
    Workload {
        keys: Keys::Dense,
        key_columns: 1,
        key_bytes: 8,
        build_rows: 1_000,
        probe_rows: 3_000,
        payloads: "2".parse().unwrap(),
        match_ratio: 1.0,
        copies: 1,
        probe_keys: ProbeKeys::Uniform,
        nulls: 0.0,
        seed: 7,
    }
}

/// Returns the rows' keys as text, or `None` if a part is null.
fn keys(batches: &[RecordBatch], columns: usize) -> Vec<Option<Vec<String>>> {
    let mut keys = Vec::new();
    for batch in batches {
        let text = |at: usize| arrow::compute::cast(batch.column(at), &DataType::Utf8).unwrap();
        let columns: Vec<ArrayRef> = (0..columns).map(text).collect();
        let part = |column: &ArrayRef, row: usize| {
            let column = column.as_string::<i32>();
            column.is_valid(row).then(|| column.value(row).to_owned())
        };
        keys.extend((0..batch.num_rows()).map(|row| columns.iter().map(|column| part(column, row)).collect()));
    }
    keys
}

fn values(batches: &[RecordBatch], name: &str) -> Vec<u64> {
    let cast =
        |batch: &RecordBatch| arrow::compute::cast(batch.column_by_name(name).unwrap(), &DataType::Int64).unwrap();
    let list =
        |column: ArrayRef| column.as_primitive::<Int64Type>().values().iter().map(|v| *v as u64).collect::<Vec<_>>();
    batches.iter().flat_map(|batch| list(cast(batch))).collect()
}

/// Computes the expected summary by a plain hash join.
fn summary_by_hand(workload: &Workload, prepared: &Prepared) -> Summary {
    let (build, probe) = (&prepared.tables[0].1, &prepared.tables[1].1);
    let mut rows_of: HashMap<Vec<String>, Vec<usize>> = HashMap::new();
    for (row, key) in keys(build, workload.key_columns).into_iter().enumerate() {
        if let Some(key) = key {
            rows_of.entry(key).or_default().push(row);
        }
    }
    let column = |name: &Option<String>, row: (usize, &[String], usize)| {
        let Some(name) = name else { return 1 };
        let (side, at) = (&name[..1], name[1..].parse::<usize>().unwrap());
        match side {
            "b" => values(build, name)[row.0],
            "p" => values(probe, name)[row.2],
            _ if workload.keys == Keys::Text => text_value(&row.1[at]),
            _ => row.1[at].parse::<i64>().unwrap() as u64,
        }
    };
    let mut summary = Summary::default();
    for (probe_row, key) in keys(probe, workload.key_columns).into_iter().enumerate() {
        let Some(key) = key else { continue };
        for &build_row in rows_of.get(&key).into_iter().flatten() {
            summary.rows += 1;
            let row = (build_row, key.as_slice(), probe_row);
            for product in &prepared.products {
                let factors = (column(&Some(product.column.clone()), row), column(&product.by, row));
                summary.checksum = summary.checksum.wrapping_add(factors.0.wrapping_mul(factors.1));
            }
        }
    }
    summary
}

#[test]
fn expected_results_follow_the_definition_of_a_join_on_every_axis() {
    let small = Workload { build_rows: 61, probe_rows: 200, ..workload() };
    let mut all = Vec::new();
    for keys in [Keys::Dense, Keys::Sparse, Keys::Multiples, Keys::Text] {
        for (match_ratio, copies, key_bytes) in [(1.0, 1, 8), (0.25, 1, 8), (1.0, 3, 8), (0.5, 8, 8), (0.5, 2, 4)] {
            all.push(Workload { keys, match_ratio, copies, key_bytes, ..small.clone() });
        }
        all.push(Workload { keys, key_columns: 3, nulls: 0.3, copies: 2, match_ratio: 0.5, ..small.clone() });
    }
    for probe_keys in [ProbeKeys::Each, ProbeKeys::Zipf(1.2)] {
        all.push(Workload { probe_keys, copies: 3, ..small.clone() });
    }
    for payloads in ["0", "0/2", "1x4+2x8/0", "3x4/1x8"] {
        all.push(Workload { payloads: payloads.parse().unwrap(), copies: 2, ..small.clone() });
    }
    for workload in all {
        assert_eq!(workload.impossible(), None, "{workload:?}");
        let prepared = workload.prepare().unwrap();
        assert_eq!(summary_by_hand(&workload, &prepared), prepared.expected, "{workload:?}");
        assert!(prepared.expected.rows > 0, "{workload:?}");
    }
}

#[test]
fn match_and_null_shares_are_the_requested_ones() {
    let workload = Workload { match_ratio: 0.25, nulls: 0.2, probe_rows: 100_000, ..workload() };
    let prepared = workload.prepare().unwrap();
    let nulls: usize = prepared.tables[1].1.iter().map(|batch| batch.column(0).null_count()).sum();
    assert!((nulls as f64 / 100_000.0 - 0.2).abs() < 0.01, "{nulls}");
    let share = prepared.expected.rows as f64 / 100_000.0;
    assert!((share - 0.25 * 0.8 * 0.8).abs() < 0.02, "{share}");
}

#[test]
fn all_keys_are_drawn_equally_often() {
    let workload = Workload { probe_keys: ProbeKeys::Each, ..workload() };
    let mut times = vec![0; 1_000];
    workload.draw().into_iter().for_each(|number| times[number as usize] += 1);
    assert!(times.iter().all(|times| *times == 3));
}

#[test]
fn keys_that_do_not_fit_their_type_are_refused() {
    let narrow = Workload { keys: Keys::Multiples, key_bytes: 4, build_rows: 1 << 20, ..workload() };
    assert!(narrow.impossible().is_some());
    assert!(narrow.prepare().is_err());
    assert!(Workload { key_bytes: 8, ..narrow.clone() }.impossible().is_none());
    assert!(Workload { key_columns: 2, ..narrow }.impossible().is_none());
}
