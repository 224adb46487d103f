//! Tests of the catalog through its public interface.

mod adopting;
mod giving_back;
mod naming;
mod result_tables;
mod results;
mod unread;
mod uploading;

use std::sync::Arc;

use arrow::array::{ArrayRef, Int64Array, RecordBatch, StringArray};
use arrow::datatypes::{DataType, Field, Schema, SchemaRef};

use super::{Catalog, TenantLimits, UploadMode, UploadOptions};
use crate::memory::{Arena, Budget, Interrupt};
use crate::{Error, Result};

fn arena_of(bytes: u64) -> Arena {
    Arena::new(Budget::new("host memory", "--host-memory", bytes))
}

fn catalog() -> Catalog {
    Catalog::new(arena_of(64 << 20))
}

fn limited(bytes: Option<u64>, tables: Option<usize>) -> Catalog {
    Catalog::with_limits(arena_of(64 << 20), TenantLimits { bytes, tables, ..TenantLimits::default() })
}

/// Columns `k` and `name`.
fn schema() -> SchemaRef {
    let fields = vec![Field::new("k", DataType::Int64, true), Field::new("name", DataType::Utf8, true)];
    Arc::new(Schema::new(fields))
}

/// Makes a row for each key, named after the key.
fn batch(keys: impl IntoIterator<Item = i64>) -> RecordBatch {
    let keys: Vec<i64> = keys.into_iter().collect();
    let names: StringArray = keys.iter().map(|key| Some(format!("name {key}"))).collect();
    let columns: Vec<ArrayRef> = vec![Arc::new(Int64Array::from(keys)), Arc::new(names)];
    RecordBatch::try_new(schema(), columns).unwrap()
}

/// Returns the keys of all rows, in order.
fn keys(batches: &[RecordBatch]) -> Vec<i64> {
    use arrow::array::AsArray;
    use arrow::datatypes::Int64Type;
    batches.iter().flat_map(|batch| batch.column(0).as_primitive::<Int64Type>().values().to_vec()).collect()
}

fn options(mode: UploadMode) -> UploadOptions {
    UploadOptions { mode, ..UploadOptions::default() }
}

/// Asserts the variant of the error, and words of its message.
#[track_caller]
fn assert_refused<T: std::fmt::Debug>(result: Result<T>, is_kind: impl Fn(&Error) -> bool, words: &[&str]) {
    let error = result.expect_err("this should have been refused");
    assert!(is_kind(&error), "another kind of error: {error:?}");
    for word in words {
        assert!(error.message().contains(word), "{word:?} is not in {:?}", error.message());
    }
}

macro_rules! is {
    ($variant:ident) => {
        |error: &crate::Error| matches!(error, crate::Error::$variant(_))
    };
}
use is;
