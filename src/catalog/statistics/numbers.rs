//! Summaries of numbers: minimum, maximum and order at the speed of memory.
//!
//! The loops are written for the compiler's vectoriser and compiled for several instruction sets.
//! The best set of the machine is used, because the baseline of x86-64 has no 64-bit comparison of
//! vectors.

use arrow::buffer::NullBuffer;
use half::f16;
use multiversion::multiversion;

use super::Value;
use super::summary::Summary;

/// A number as it is stored, and an integer of the same width that orders it.
pub(super) trait Number: Copy {
    /// Integer with the same order as the numbers: NaN is greatest, -0 equals 0.
    type Key: Copy + Ord;
    /// The greatest key.
    const KEY_MAX: Self::Key;
    /// The smallest key.
    const KEY_MIN: Self::Key;

    fn key(self) -> Self::Key;
    fn value(key: Self::Key) -> Value;
}

macro_rules! integer {
    ($($native:ty),*) => {$(
        impl Number for $native {
            type Key = $native;
            const KEY_MAX: $native = <$native>::MAX;
            const KEY_MIN: $native = <$native>::MIN;

            #[inline(always)]
            fn key(self) -> $native {
                self
            }

            fn value(key: $native) -> Value {
                Value::Integer(key as i128)
            }
        }
    )*};
}

integer!(i8, i16, i32, i64, i128, u8, u16, u32, u64);

/// Orders floats by their bits. All bits of a negative number except the sign are flipped, so that
/// larger magnitudes come first. Adding zero turns -0 into 0.
macro_rules! float {
    ($native:ty, $bits:ty, $widen:expr) => {
        impl Number for $native {
            type Key = $bits;
            const KEY_MAX: $bits = <$bits>::MAX;
            const KEY_MIN: $bits = <$bits>::MIN;

            #[inline(always)]
            fn key(self) -> $bits {
                let zero: $native = <$native>::from_bits(0);
                let bits = (self + zero).to_bits() as $bits;
                let ordered = bits ^ ((bits >> (<$bits>::BITS - 1)) & <$bits>::MAX);
                if self.is_nan() { <$bits>::MAX } else { ordered }
            }

            fn value(key: $bits) -> Value {
                if key == <$bits>::MAX {
                    return Value::Float(f64::NAN);
                }
                let bits = key ^ ((key >> (<$bits>::BITS - 1)) & <$bits>::MAX);
                Value::Float($widen(<$native>::from_bits(bits as _)))
            }
        }
    };
}

float!(f16, i16, f16::to_f64);
float!(f32, i32, f64::from);
float!(f64, i64, std::convert::identity);

/// Summarises values that are not all null. Checks the order if `order_wanted`; nulls come first
/// then.
pub(super) fn summarize<T: Number>(values: &[T], nulls: Option<&NullBuffer>, order_wanted: bool) -> Summary {
    let mut summary = Summary { range_known: true, ..Summary::default() };
    if order_wanted {
        let dense = &values[nulls.map_or(0, NullBuffer::null_count)..];
        summary.strict = is_strictly_ascending(dense);
        let runs = if summary.strict { Some(dense.len() as u64) } else { ascending_runs(dense) };
        if let (Some(runs), [first, .., last] | [first @ last]) = (runs, dense) {
            summary.ascending = true;
            summary.runs = runs;
            summary.range = Some((T::value(first.key()), T::value(last.key())));
            return summary;
        }
    }
    let (min, max) = match nulls.filter(|nulls| nulls.null_count() > 0) {
        None => min_max(values),
        Some(nulls) => valid_min_max(values, nulls),
    };
    summary.range = Some((T::value(min), T::value(max)));
    summary
}

/// Rows that are compared between two checks for a row out of order.
const ORDER_CHUNK: usize = 512;

#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
fn is_strictly_ascending<T: Number>(values: &[T]) -> bool {
    let later = values.get(1..).unwrap_or_default();
    values
        .chunks(ORDER_CHUNK)
        .zip(later.chunks(ORDER_CHUNK))
        .all(|(before, after)| before.iter().zip(after).fold(true, |ordered, (a, b)| ordered & (a.key() < b.key())))
}

/// Returns the number of different values; `None` unless the values are in ascending order.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
fn ascending_runs<T: Number>(values: &[T]) -> Option<u64> {
    let later = values.get(1..).unwrap_or_default();
    let mut runs = 1;
    for (before, after) in values.chunks(ORDER_CHUNK).zip(later.chunks(ORDER_CHUNK)) {
        let mut ordered = true;
        let mut changes = 0u16;
        for (a, b) in before.iter().zip(after) {
            ordered &= a.key() <= b.key();
            changes += u16::from(a.key() != b.key());
        }
        if !ordered {
            return None;
        }
        runs += u64::from(changes);
    }
    Some(runs)
}

#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
fn min_max<T: Number>(values: &[T]) -> (T::Key, T::Key) {
    let (mut min, mut max) = (T::KEY_MAX, T::KEY_MIN);
    for value in values {
        min = min.min(value.key());
        max = max.max(value.key());
    }
    (min, max)
}

/// The bit of each lane in a word of validity. It is a table, because the vectoriser cannot handle
/// `word >> lane`, which is ten times as slow.
const LANE_BIT: [u64; 64] = {
    let mut bits = [0; 64];
    let mut lane = 0;
    while lane < 64 {
        bits[lane] = 1 << lane;
        lane += 1;
    }
    bits
};

/// Same as [`min_max`], ignoring nulls. A key that changes nothing replaces the key of a null. Each
/// lane has a minimum and a maximum of its own, so that one word of validity decides over 64 of
/// them.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
fn valid_min_max<T: Number>(values: &[T], nulls: &NullBuffer) -> (T::Key, T::Key) {
    let (mut min, mut max) = ([T::KEY_MAX; 64], [T::KEY_MIN; 64]);
    let words = nulls.inner().bit_chunks();
    let (chunks, rest) = values.as_chunks::<64>();
    for (chunk, word) in chunks.iter().zip(words.iter()) {
        for lane in 0..64 {
            let valid = word & LANE_BIT[lane] != 0;
            let key = chunk[lane].key();
            let (low, high) = if valid { (key, key) } else { (T::KEY_MAX, T::KEY_MIN) };
            min[lane] = if low < min[lane] { low } else { min[lane] };
            max[lane] = if high > max[lane] { high } else { max[lane] };
        }
    }
    for (lane, value) in rest.iter().enumerate() {
        if words.remainder_bits() & LANE_BIT[lane] != 0 {
            min[lane] = min[lane].min(value.key());
            max[lane] = max[lane].max(value.key());
        }
    }
    let fold = |a: (T::Key, T::Key), b: (T::Key, T::Key)| (a.0.min(b.0), a.1.max(b.1));
    min.into_iter().zip(max).fold((T::KEY_MAX, T::KEY_MIN), fold)
}
