//! A line of results with the planner's view of a join, and the time of every way to compose it.
//!
//! A test can ask the planner for its choice again, without the rows and without the device
//! (`src/planner/tests/recorded.rs`).

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::engine::{Measured, PlannedJoin};
use dovetail::catalog::{self, ColumnStatistics, Table};
use dovetail::columns::{are_bytes, value_bytes};
use dovetail::device::ColumnRows;
use dovetail::planner::Target;

/// Returns the join, and the seconds of each composition.
pub fn line(planned: &PlannedJoin<'_>, measured: &[Measured]) -> Value {
    let PlannedJoin { join, plan, target } = planned;
    // One of several measurements with the same plan may have been timed again.
    let mut ways: BTreeMap<&str, f64> = BTreeMap::new();
    for of in measured {
        let seconds = ways.entry(&of.plan).or_insert_with(|| of.median());
        *seconds = of.median_again().unwrap_or(*seconds);
    }
    let ways: Vec<(&str, f64)> = ways.into_iter().collect();
    json!({
        "on": join.on,
        "columns": join.columns,
        "shares": !plan.join.result_is_stored,
        "left": table(&plan.join.left, target),
        "right": table(&plan.join.right, target),
        "estimates": plan.estimates,
        "target": device(target),
        "ways": ways,
    })
}

/// Returns the device properties that plans depend on, except the cached columns.
fn device(target: &Target) -> Value {
    json!({
        "memory_bytes": target.memory_bytes,
        "parallelism": target.parallelism,
        "morsel_rows": target.tuning.morsel_rows,
        "partition_rows": target.tuning.partition_rows,
        "pass_bits_max": target.tuning.pass_bits_max,
        "streams": target.tuning.streams,
        "probe_batch_rows": target.tuning.probe_batch_rows,
        "row_scratch_bytes": target.tuning.row_scratch_bytes,
        "supports_text": target.capabilities.strings,
        "rates": target.rates,
    })
}

fn table(table: &Table, target: &Target) -> Value {
    let columns: Vec<Value> = (0..table.statistics.len()).map(|index| column(table, index, target)).collect();
    json!({"rows": table.rows, "bytes": table.bytes, "batches": table.batches.len(), "columns": columns})
}

fn column(table: &Table, index: usize, target: &Target) -> Value {
    let (field, statistics) = (table.schema.field(index), &table.statistics[index]);
    let ColumnStatistics { nulls, distinct, ascending, unique_ascending, heaviest_share, max_value_bytes, .. } =
        statistics;
    let integer = |value: &Option<catalog::Value>| match value {
        Some(catalog::Value::Integer(value)) => i64::try_from(*value).ok(),
        _ => None,
    };
    let is_text = are_bytes(field.data_type()).is_some();
    let text_bytes = || table.batches.iter().map(|batch| value_bytes(batch.column(index))).sum::<u64>();
    let is_of_table = |kept: &ColumnRows| kept.column == index && std::ptr::addr_eq(kept.table.as_ptr(), table);
    let kept: Vec<[u64; 2]> =
        target.kept.iter().filter(|kept| is_of_table(kept)).map(|kept| [kept.rows.start, kept.rows.end]).collect();
    json!({
        "name": field.name(),
        "type": field.data_type().to_string(),
        "nullable": field.is_nullable(),
        "nulls": nulls,
        "min": integer(&statistics.min),
        "max": integer(&statistics.max),
        "distinct": distinct,
        "ascending": ascending,
        "unique_ascending": unique_ascending,
        "heaviest_share": heaviest_share,
        "max_value_bytes": max_value_bytes,
        "value_bytes": is_text.then(text_bytes),
        "kept": kept,
    })
}
