//! Summaries of one batch's values, by type.

use arrow::array::{Array, ArrayRef, AsArray, BooleanArray, Decimal256Array};
use arrow::compute::{max_boolean, min_boolean};
use arrow::datatypes::*;

use super::{Value, dictionary, numbers, strings};

/// A summary of the non-null values of some rows.
#[derive(Clone, Debug, Default)]
pub(super) struct Summary {
    /// Smallest and largest value; `None` without values.
    pub range: Option<(Value, Value)>,
    /// False if a value does not fit [`Value`].
    pub range_known: bool,
    /// True if the rows are in ascending order, nulls first. False if the order was not checked.
    pub ascending: bool,
    /// True if `ascending`, and no value repeats.
    pub strict: bool,
    /// Number of different values, given that the rows are in ascending order.
    pub runs: u64,
    /// Bytes of the longest value, for strings and binaries.
    pub max_value_bytes: Option<u64>,
}

impl Summary {
    /// Returns the summary of rows that are all null.
    fn of_nulls(data_type: &DataType) -> Self {
        let max_value_bytes = has_value_bytes(data_type).then_some(0);
        Self { range_known: true, ascending: true, strict: true, max_value_bytes, ..Self::default() }
    }
}

/// True if columns of that type have minima, order and samples.
pub(super) fn has_order(data_type: &DataType) -> bool {
    match data_type {
        DataType::Dictionary(_, values) => has_order(values) && !matches!(**values, DataType::Dictionary(..)),
        DataType::Interval(_) => false,
        _ => data_type.is_primitive() || *data_type == DataType::Boolean || has_value_bytes(data_type),
    }
}

/// True if values of that type have lengths worth knowing.
pub(super) fn has_value_bytes(data_type: &DataType) -> bool {
    match data_type {
        DataType::Dictionary(_, values) => has_value_bytes(values),
        DataType::Utf8 | DataType::LargeUtf8 | DataType::Utf8View => true,
        DataType::Binary | DataType::LargeBinary | DataType::BinaryView | DataType::FixedSizeBinary(_) => true,
        _ => false,
    }
}

/// Summarises an array of an ordered type with `null_count` null rows. Checks the order only if
/// `order_wanted`, since a column that is out of order stays so.
pub(super) fn summarize(array: &ArrayRef, null_count: usize, order_wanted: bool) -> Summary {
    let data_type = array.data_type();
    if null_count == array.len() {
        return Summary::of_nulls(data_type);
    }
    let order_wanted = order_wanted && nulls_lead(array, null_count);
    macro_rules! numbers {
        ($($pattern:pat => $primitive:ty),* $(,)?) => {
            match data_type {
                $($pattern => {
                    let array = array.as_primitive::<$primitive>();
                    numbers::summarize(array.values(), array.nulls(), order_wanted)
                })*
                DataType::Boolean => booleans(array.as_boolean(), order_wanted),
                DataType::Decimal256(..) => wide_decimals(array.as_primitive(), order_wanted),
                DataType::Dictionary(..) => dictionary::summarize(array.as_any_dictionary(), order_wanted),
                DataType::Utf8 => strings::summarize(&array.as_string::<i32>(), order_wanted),
                DataType::LargeUtf8 => strings::summarize(&array.as_string::<i64>(), order_wanted),
                DataType::Utf8View => strings::summarize(&array.as_string_view(), order_wanted),
                DataType::Binary => strings::summarize(&array.as_binary::<i32>(), order_wanted),
                DataType::LargeBinary => strings::summarize(&array.as_binary::<i64>(), order_wanted),
                DataType::BinaryView => strings::summarize(&array.as_binary_view(), order_wanted),
                DataType::FixedSizeBinary(_) => strings::summarize(&array.as_fixed_size_binary(), order_wanted),
                other => unreachable!("{other} has no order"),
            }
        };
    }
    numbers! {
        DataType::Int8 => Int8Type,
        DataType::Int16 => Int16Type,
        DataType::Int32 => Int32Type,
        DataType::Int64 => Int64Type,
        DataType::UInt8 => UInt8Type,
        DataType::UInt16 => UInt16Type,
        DataType::UInt32 => UInt32Type,
        DataType::UInt64 => UInt64Type,
        DataType::Float16 => Float16Type,
        DataType::Float32 => Float32Type,
        DataType::Float64 => Float64Type,
        DataType::Decimal32(..) => Decimal32Type,
        DataType::Decimal64(..) => Decimal64Type,
        DataType::Decimal128(..) => Decimal128Type,
        DataType::Date32 => Date32Type,
        DataType::Date64 => Date64Type,
        DataType::Time32(TimeUnit::Second) => Time32SecondType,
        DataType::Time32(_) => Time32MillisecondType,
        DataType::Time64(TimeUnit::Microsecond) => Time64MicrosecondType,
        DataType::Time64(_) => Time64NanosecondType,
        DataType::Timestamp(TimeUnit::Second, _) => TimestampSecondType,
        DataType::Timestamp(TimeUnit::Millisecond, _) => TimestampMillisecondType,
        DataType::Timestamp(TimeUnit::Microsecond, _) => TimestampMicrosecondType,
        DataType::Timestamp(TimeUnit::Nanosecond, _) => TimestampNanosecondType,
        DataType::Duration(TimeUnit::Second) => DurationSecondType,
        DataType::Duration(TimeUnit::Millisecond) => DurationMillisecondType,
        DataType::Duration(TimeUnit::Microsecond) => DurationMicrosecondType,
        DataType::Duration(TimeUnit::Nanosecond) => DurationNanosecondType,
    }
}

/// True if all nulls come before all values.
fn nulls_lead(array: &ArrayRef, null_count: usize) -> bool {
    match array.logical_nulls() {
        Some(nulls) if null_count > 0 => nulls.slice(0, null_count).null_count() == null_count,
        _ => true,
    }
}

fn booleans(array: &BooleanArray, order_wanted: bool) -> Summary {
    let values = min_boolean(array).zip(max_boolean(array));
    let mut summary = Summary { range_known: true, ..Summary::default() };
    summary.range = values.map(|(min, max)| (Value::Integer(min.into()), Value::Integer(max.into())));
    if order_wanted {
        let dense = array.values().slice(array.null_count(), array.len() - array.null_count());
        let trues = dense.count_set_bits();
        let first_true = dense.set_indices().next().unwrap_or(dense.len());
        summary.ascending = dense.len() - first_true == trues;
        summary.runs = u64::from(first_true > 0) + u64::from(trues > 0);
        summary.strict = summary.ascending && summary.runs == dense.len() as u64;
    }
    summary
}

/// Summarises decimals stored in 256 bits. The summary is unknown if a value does not fit 128 bits.
fn wide_decimals(array: &Decimal256Array, order_wanted: bool) -> Summary {
    let narrow = |row: usize| if array.is_null(row) { Some(0) } else { array.value(row).to_i128() };
    match (0..array.len()).map(narrow).collect::<Option<Vec<i128>>>() {
        Some(values) => numbers::summarize(&values, array.nulls(), order_wanted),
        None => Summary::default(),
    }
}
