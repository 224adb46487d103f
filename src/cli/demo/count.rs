//! Counts the rows of a join on the client with a plain hash map: slow, simple, and independent of
//! the engine.

use std::collections::HashMap;

use arrow::array::{Array, ArrayRef};
use arrow::row::{RowConverter, SortField};
use serde_json::Value;

use super::tables::{Local, Tables};
use crate::Result;
use crate::cli::progress::Progress;

/// Counts the rows of an inner or a left anti join of tables whose keys have no nulls. Reports the
/// bytes of the keys to `progress`.
///
/// # Errors
/// Arrow's, for a missing column.
pub fn rows(join: &Value, tables: &Tables, progress: &Progress) -> Result<u64> {
    let is_anti = join["how"] == "left_anti";
    let (counted, looked_up) = if is_anti { ("right", "left") } else { ("left", "right") };
    let mut frequencies: HashMap<Box<[u8]>, u64> = HashMap::new();
    for_each_key(join, counted, tables, progress, |key| match frequencies.get_mut(key) {
        Some(frequency) => *frequency += 1,
        None => drop(frequencies.insert(key.into(), 1)),
    })?;
    let mut rows = 0;
    for_each_key(join, looked_up, tables, progress, |key| {
        let found = frequencies.get(key).copied().unwrap_or(0);
        rows += if is_anti { u64::from(found == 0) } else { found };
    })?;
    Ok(rows)
}

/// Returns the bytes of the keys of both sides.
pub fn bytes(join: &Value, tables: &Tables) -> u64 {
    let of_side = |side: &str| {
        let table = table_of(join, side, tables);
        key_columns(join, side).flat_map(|name| table.column(name)).map(bytes_of).sum::<u64>()
    };
    of_side("left") + of_side("right")
}

/// Calls `each` with the key of every row of a side, as bytes. Equal keys have equal bytes.
fn for_each_key(
    join: &Value,
    side: &str,
    tables: &Tables,
    progress: &Progress,
    mut each: impl FnMut(&[u8]),
) -> Result<()> {
    let table = table_of(join, side, tables);
    let fields = key_columns(join, side).map(|name| table.schema.field_with_name(name));
    let fields = fields.map(|field| Ok(SortField::new(field?.data_type().clone()))).collect::<Result<_>>()?;
    let converter = RowConverter::new(fields)?;
    for batch in &table.batches {
        let keys: Vec<ArrayRef> =
            key_columns(join, side).filter_map(|name| batch.column_by_name(name)).cloned().collect();
        converter.convert_columns(&keys)?.iter().for_each(|key| each(key.as_ref()));
        progress.moved(keys.iter().map(bytes_of).sum());
    }
    Ok(())
}

fn table_of<'a>(join: &Value, side: &str, tables: &'a Tables) -> &'a Local {
    tables.get(join[side].as_str().unwrap_or_default())
}

fn key_columns<'a>(join: &'a Value, side: &'a str) -> impl Iterator<Item = &'a str> {
    join["on"].as_array().into_iter().flatten().filter_map(move |pair| pair[side].as_str())
}

fn bytes_of(values: &ArrayRef) -> u64 {
    values.get_array_memory_size() as u64
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use arrow::array::{Int64Array, RecordBatch};
    use serde_json::json;

    use super::super::joins::STEPS;
    use super::*;
    use crate::cli::join::command_of;

    #[test]
    fn counts_follow_the_definition_of_a_join() {
        let (few, many) = ([1, 1, 2, 3], [1, 1, 1, 3, 4]);
        let table = |name, keys: &[i64]| {
            let batch = RecordBatch::try_from_iter([("k", Arc::new(Int64Array::from(keys.to_vec())) as ArrayRef)]);
            Local::of(name, vec![batch.unwrap()]).unwrap()
        };
        let tables = Tables::of(vec![table("few", &few), table("many", &many), table("none", &[])]);
        let count = |left: &str, how: &str, right: &str| {
            let join = json!({"left": left, "right": right, "how": how, "on": [{"left": "k", "right": "k"}]});
            rows(&join, &tables, &Progress::of("counting", None)).unwrap()
        };
        assert_eq!(count("few", "inner", "many"), 7);
        assert_eq!(count("few", "left_anti", "many"), 1);
        assert_eq!(count("many", "left_anti", "few"), 1);
        assert_eq!(count("few", "inner", "none"), 0);
        assert_eq!(count("few", "left_anti", "none"), 4);
    }

    /// Checks that the progress bar ends at the announced total.
    #[test]
    fn the_progress_of_counting_ends_at_the_announced_total() {
        let tables = Tables::generate(0.01, &Progress::of("generating", None)).unwrap();
        for step in STEPS {
            let join = &command_of(step.words).unwrap()["join"];
            let total = bytes(join, &tables);
            let progress = Progress::transfer("counting", Some(total));
            assert!(rows(join, &tables, &progress).unwrap() > 0, "{}", step.title);
            assert_eq!((progress.moved_bytes(), progress.done()), (total, Some(1.0)), "{}", step.title);
        }
    }
}
