//! A naive join by a map of plain numbers, and the comparison of results as multisets of rows.

use std::collections::HashMap;
use std::sync::Arc;

use arrow::array::{Array, ArrayRef, AsArray, Float32Array, Float64Array, RecordBatch, UInt32Array};
use arrow::compute::{concat_batches, take};
use arrow::datatypes::{DataType, Field, Float32Type, Float64Type, Schema};
use arrow::row::{RowConverter, SortField};
use dovetail::planner::JoinKind;

use crate::data::{Case, Key};

/// The rows of a result, in a form for sorting and comparing.
pub struct Rows {
    schema: Arc<Schema>,
    rows: Vec<Vec<u8>>,
}

impl Rows {
    pub fn len(&self) -> usize {
        self.rows.len()
    }
}

/// The keys whose nulls match nulls.
#[derive(Clone, Debug, Default)]
pub struct NullsEqual {
    /// Default for keys without their own setting.
    pub whole: bool,
    /// Settings by key. `None`, and keys beyond the end, use the default.
    pub by_key: Vec<Option<bool>>,
}

impl From<bool> for NullsEqual {
    fn from(whole: bool) -> Self {
        Self { whole, by_key: Vec::new() }
    }
}

impl NullsEqual {
    pub fn of(&self, key: usize) -> Option<bool> {
        self.by_key.get(key).copied().flatten()
    }
}

/// Returns the rows of a batch, to compare others with.
pub fn rows_of(batch: &RecordBatch) -> Rows {
    Rows { rows: sorted_rows(&batch.schema(), std::slice::from_ref(batch)), schema: batch.schema() }
}

/// Joins a case. The columns are the keys once, the rest of left, the rest of right.
pub fn join(case: &Case, how: JoinKind, nulls_equal: &NullsEqual) -> Rows {
    let (left_rows, right_rows) = pairs(case, how, nulls_equal);
    let left = concat_batches(&case.left.batches[0].schema(), &case.left.batches).unwrap();
    let right = concat_batches(&case.right.batches[0].schema(), &case.right.batches).unwrap();
    let gather = |array: &ArrayRef, rows: &[Option<u32>]| take(array, &UInt32Array::from(rows.to_vec()), None).unwrap();
    let keys = case.key_kinds.len();
    let mut fields: Vec<Field> = Vec::new();
    let mut columns: Vec<ArrayRef> = Vec::new();
    let mut add = |name: String, array: ArrayRef| {
        fields.push(Field::new(name, array.data_type().clone(), true));
        columns.push(array);
    };
    let only_left = matches!(how, JoinKind::LeftSemi | JoinKind::LeftAnti);
    let only_right = matches!(how, JoinKind::RightSemi | JoinKind::RightAnti);
    for index in 0..keys {
        let array = match (only_left, only_right) {
            (true, _) => gather(left.column(index), &left_rows),
            (_, true) => gather(right.column(index), &right_rows),
            _ => {
                let both = arrow::compute::concat(&[
                    &gather(left.column(index), &left_rows),
                    &gather(right.column(index), &right_rows),
                ])
                .unwrap();
                let count = left_rows.len() as u32;
                let coalesced: UInt32Array =
                    (0..count).map(|at| if left_rows[at as usize].is_some() { at } else { at + count }).collect();
                take(&both, &coalesced, None).unwrap()
            }
        };
        add(format!("k{index}"), array);
    }
    if !only_right {
        for index in keys..left.num_columns() {
            add(left.schema().field(index).name().clone(), gather(left.column(index), &left_rows));
        }
    }
    if !only_left {
        for index in keys..right.num_columns() {
            let name = right.schema().field(index).name().clone();
            let name = if only_right { name } else { name + "_right" };
            add(name, gather(right.column(index), &right_rows));
        }
    }
    let schema = Arc::new(Schema::new(fields));
    let batch = RecordBatch::try_new(schema.clone(), columns).unwrap();
    Rows { rows: sorted_rows(&schema, &[batch]), schema }
}

/// Returns pairs of row numbers. `None`: the side has no row in that pair.
fn pairs(case: &Case, how: JoinKind, nulls_equal: &NullsEqual) -> (Vec<Option<u32>>, Vec<Option<u32>>) {
    let has_key = |key: &Key| {
        let may_match =
            |(at, number): (usize, &Option<u32>)| number.is_some() || nulls_equal.of(at).unwrap_or(nulls_equal.whole);
        key.iter().enumerate().all(may_match)
    };
    let normal = |key: &Key| -> Key {
        // Numbers that agree modulo two are the same boolean.
        key.iter()
            .zip(&case.key_kinds)
            .map(|(number, kind)| number.map(|n| if *kind == crate::data::KeyKind::Boolean { n % 2 } else { n }))
            .collect()
    };
    let mut by_key: HashMap<Key, Vec<u32>> = HashMap::new();
    for (row, key) in case.right.keys.iter().enumerate() {
        if has_key(key) {
            by_key.entry(normal(key)).or_default().push(row as u32);
        }
    }
    let mut right_matched = vec![false; case.right.keys.len()];
    let mut out: Vec<(Option<u32>, Option<u32>)> = Vec::new();
    for (row, key) in case.left.keys.iter().enumerate() {
        let row = row as u32;
        let matches = if has_key(key) { by_key.get(&normal(key)).map_or(&[][..], |rows| rows) } else { &[] };
        for &right in matches {
            right_matched[right as usize] = true;
        }
        match how {
            JoinKind::LeftSemi if !matches.is_empty() => out.push((Some(row), None)),
            JoinKind::LeftAnti if matches.is_empty() => out.push((Some(row), None)),
            JoinKind::Left | JoinKind::Full if matches.is_empty() => out.push((Some(row), None)),
            JoinKind::Inner | JoinKind::Left | JoinKind::Right | JoinKind::Full => {
                out.extend(matches.iter().map(|&right| (Some(row), Some(right))))
            }
            _ => {}
        }
    }
    for (row, matched) in right_matched.into_iter().enumerate() {
        let wanted = match how {
            JoinKind::Right | JoinKind::Full | JoinKind::RightAnti => !matched,
            JoinKind::RightSemi => matched,
            _ => false,
        };
        if wanted {
            out.push((None, Some(row as u32)));
        }
    }
    out.into_iter().unzip()
}

/// Fails unless both have the same rows, as multisets. Shows the first difference.
pub fn assert_same_rows(actual: &[RecordBatch], expected: &Rows, label: &str) {
    for batch in actual {
        let names = |schema: &Schema| {
            schema.fields().iter().map(|field| (field.name().clone(), field.data_type().clone())).collect::<Vec<_>>()
        };
        assert_eq!(names(&batch.schema()), names(&expected.schema), "columns of {label}");
    }
    let rows = sorted_rows(&expected.schema, actual);
    assert_eq!(rows.len(), expected.rows.len(), "number of rows of {label}");
    let differing: Vec<_> = rows.iter().zip(&expected.rows).filter(|(a, b)| a != b).collect();
    assert!(
        differing.is_empty(),
        "{} of {} rows differ in {label}, for one (found, expected): {:?}",
        differing.len(),
        rows.len(),
        differing[0]
    );
}

/// Fails unless both have the same rows, as multisets.
pub fn assert_same_batches(actual: &[RecordBatch], expected: &[RecordBatch], label: &str) {
    match expected.first().or(actual.first()) {
        Some(batch) => {
            let schema = batch.schema();
            let rows = sorted_rows(&schema, expected);
            assert_same_rows(actual, &Rows { rows, schema }, label);
        }
        None => assert!(actual.is_empty() && expected.is_empty()),
    }
}

fn sorted_rows(schema: &Schema, batches: &[RecordBatch]) -> Vec<Vec<u8>> {
    let fields = schema.fields().iter().map(|field| SortField::new(field.data_type().clone())).collect();
    let converter = RowConverter::new(fields).unwrap();
    let mut all = Vec::new();
    for batch in batches {
        let columns: Vec<ArrayRef> = batch.columns().iter().map(canonical_floats).collect();
        let rows = converter.convert_columns(&columns).unwrap();
        all.extend(rows.iter().map(|row| row.as_ref().to_vec()));
    }
    all.sort_unstable();
    all
}

/// Replaces -0 by 0, and every NaN by one NaN. Keys that differ only in this are equal, and a
/// result may show any of them.
fn canonical_floats(array: &ArrayRef) -> ArrayRef {
    match array.data_type() {
        DataType::Float32 => {
            let canonical = |value: f32| if value.is_nan() { f32::NAN } else { value + 0.0 };
            Arc::new(array.as_primitive::<Float32Type>().unary::<_, Float32Type>(canonical)) as Arc<Float32Array>
        }
        DataType::Float64 => {
            let canonical = |value: f64| if value.is_nan() { f64::NAN } else { value + 0.0 };
            Arc::new(array.as_primitive::<Float64Type>().unary::<_, Float64Type>(canonical)) as Arc<Float64Array>
        }
        _ => array.clone(),
    }
}
