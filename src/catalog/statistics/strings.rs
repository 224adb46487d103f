//! Summaries of strings and binaries.
//!
//! Values are compared by their first eight bytes as one number, and in full only if those bytes
//! are equal. Most values are neither a new minimum nor a new maximum, and their first bytes prove
//! it.

use std::cmp::Ordering;

use arrow::array::{Array, BinaryViewArray, FixedSizeBinaryArray, GenericByteArray, StringViewArray};
use arrow::datatypes::{ArrowNativeType, ByteArrayType};

use super::Value;
use super::summary::Summary;

/// An array of bytes. The value of a null is unspecified.
pub(super) trait Bytes: Array {
    /// Returns a row's value.
    fn bytes(&self, row: usize) -> &[u8];

    /// Returns the first eight bytes of a row's value as a number that orders them as bytes are. A
    /// shorter value is padded with zeros.
    #[inline(always)]
    fn prefix(&self, row: usize) -> u64 {
        prefix(self.bytes(row))
    }
}

impl<T: ByteArrayType> Bytes for &GenericByteArray<T> {
    #[inline(always)]
    fn bytes(&self, row: usize) -> &[u8] {
        self.value(row).as_ref()
    }

    /// Reads eight bytes whatever the value's length, if the buffer has them. Then zeros the bytes
    /// that belong to the next value.
    #[inline(always)]
    fn prefix(&self, row: usize) -> u64 {
        let offsets = self.value_offsets();
        let (start, end) = (offsets[row].as_usize(), offsets[row + 1].as_usize());
        match self.value_data().get(start..).and_then(|rest| rest.first_chunk()) {
            Some(eight) => {
                let blank = 64 - 8 * (end - start).min(8) as u32;
                u64::from_be_bytes(*eight) & u64::MAX.checked_shl(blank).unwrap_or(0)
            }
            None => prefix(self.bytes(row)),
        }
    }
}

impl Bytes for &StringViewArray {
    #[inline(always)]
    fn bytes(&self, row: usize) -> &[u8] {
        self.value(row).as_bytes()
    }
}

impl Bytes for &BinaryViewArray {
    #[inline(always)]
    fn bytes(&self, row: usize) -> &[u8] {
        self.value(row)
    }
}

impl Bytes for &FixedSizeBinaryArray {
    #[inline(always)]
    fn bytes(&self, row: usize) -> &[u8] {
        self.value(row)
    }
}

/// Summarises an array in which at least one row is not null. Checks the order if `order_wanted`;
/// nulls come first then.
pub(super) fn summarize<A: Bytes>(array: &A, order_wanted: bool) -> Summary {
    let nulls = array.nulls().filter(|nulls| nulls.null_count() > 0);
    let null_count = array.null_count();
    if order_wanted && let Some((runs, strict)) = ascending_runs(array, null_count) {
        let rows = null_count..array.len();
        let longest = rows.clone().map(|row| array.bytes(row).len()).max().unwrap_or(0);
        let range = Some((value(array, rows.start), value(array, rows.end - 1)));
        let max_value_bytes = Some(longest as u64);
        return Summary { range, range_known: true, ascending: true, strict, runs, max_value_bytes };
    }
    match nulls {
        None => extremes(array, 0..array.len()),
        Some(nulls) => extremes(array, nulls.valid_indices()),
    }
}

fn extremes<A: Bytes>(array: &A, mut rows: impl Iterator<Item = usize>) -> Summary {
    let Some(first) = rows.next() else { return Summary::default() };
    let mut longest = array.bytes(first).len();
    let (mut min, mut max) = ((array.prefix(first), first), (array.prefix(first), first));
    for row in rows {
        longest = longest.max(array.bytes(row).len());
        let start = array.prefix(row);
        if start <= min.0 && compare(array, (start, row), min).is_lt() {
            min = (start, row);
        } else if start >= max.0 && compare(array, (start, row), max).is_gt() {
            max = (start, row);
        }
    }
    let range = Some((value(array, min.1), value(array, max.1)));
    Summary { range, range_known: true, max_value_bytes: Some(longest as u64), ..Summary::default() }
}

/// Returns the number of different values from row `start` on, and true if no value repeats. `None`
/// unless the values are in ascending order.
fn ascending_runs<A: Bytes>(array: &A, start: usize) -> Option<(u64, bool)> {
    let mut before = (array.prefix(start), start);
    let mut runs = 1;
    for row in start + 1..array.len() {
        let after = (array.prefix(row), row);
        match compare(array, before, after) {
            Ordering::Less => runs += 1,
            Ordering::Equal => (),
            Ordering::Greater => return None,
        }
        before = after;
    }
    Some((runs, runs == (array.len() - start) as u64))
}

/// Compares two rows, given as prefix and row index.
#[inline(always)]
fn compare<A: Bytes>(array: &A, a: (u64, usize), b: (u64, usize)) -> Ordering {
    a.0.cmp(&b.0).then_with(|| {
        let (a, b) = (array.bytes(a.1), array.bytes(b.1));
        // If the prefixes hold both values, the one with more padding is smaller.
        if a.len() <= 8 && b.len() <= 8 { a.len().cmp(&b.len()) } else { a.cmp(b) }
    })
}

fn value<A: Bytes>(array: &A, row: usize) -> Value {
    Value::Bytes(array.bytes(row).to_vec())
}

#[inline(always)]
fn prefix(value: &[u8]) -> u64 {
    match value.first_chunk() {
        Some(eight) => u64::from_be_bytes(*eight),
        None => value.iter().fold(0, |prefix, &byte| prefix << 8 | u64::from(byte)) << (64 - 8 * value.len().max(1)),
    }
}
