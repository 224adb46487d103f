//! Random tables, made from plain Rust values so that the naive join does not read Arrow.

use std::fmt;
use std::sync::Arc;

use arrow::array::{
    ArrayRef, BinaryArray, BooleanArray, Date32Array, Decimal128Array, Decimal256Array, DictionaryArray,
    FixedSizeBinaryBuilder, Float32Array, Float64Array, Int8Array, Int32Array, Int32Builder, Int64Array,
    LargeStringArray, ListBuilder, RecordBatch, StringArray, StringViewArray, TimestampMicrosecondArray, UInt64Array,
};
use arrow::datatypes::{Field, Int16Type, Schema, i256};
use rand::Rng;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;

/// A key type. It determines how a small number becomes a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyKind {
    Int8,
    Int32,
    /// Multiples of 2^16, so that the low bits are all zero.
    PatternedInt32,
    Int64,
    UInt64,
    Float32,
    Float64,
    Boolean,
    Date32,
    Timestamp,
    Decimal128,
    Decimal256,
    ShortString,
    LongString,
    LargeString,
    StringView,
    Binary,
    FixedBinary,
    Dictionary,
}

impl KeyKind {
    pub const ALL: [Self; 19] = [
        Self::Int8,
        Self::Int32,
        Self::PatternedInt32,
        Self::Int64,
        Self::UInt64,
        Self::Float32,
        Self::Float64,
        Self::Boolean,
        Self::Date32,
        Self::Timestamp,
        Self::Decimal128,
        Self::Decimal256,
        Self::ShortString,
        Self::LongString,
        Self::LargeString,
        Self::StringView,
        Self::Binary,
        Self::FixedBinary,
        Self::Dictionary,
    ];
}

/// One row's key: a small number per key column, or null. Equal numbers are equal values.
pub type Key = Vec<Option<u32>>;

/// One side: its keys as numbers, and as Arrow batches with payload.
pub struct TableData {
    pub keys: Vec<Key>,
    pub batches: Vec<RecordBatch>,
}

/// Two tables to be joined.
pub struct Case {
    pub key_kinds: Vec<KeyKind>,
    pub left: TableData,
    pub right: TableData,
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "keys {:?}, {} left rows, {} right rows", self.key_kinds, self.left.keys.len(), self.right.keys.len())
    }
}

impl Case {
    pub fn random(rng: &mut StdRng) -> Self {
        let kinds: Vec<KeyKind> = (0..rng.random_range(1..=3)).map(|_| *KeyKind::ALL.choose(rng).unwrap()).collect();
        let mut rows = || [0, 1, 5, 64, 65, 500, 2000][rng.random_range(0..7)];
        let (left, right) = (rows(), rows());
        let distinct = [1, 3, 50, 3000][rng.random_range(0..4)];
        // Few keys on many rows give large results, too large for the naive join.
        let (left, right) = if distinct < 50 { (left.min(200), right.min(200)) } else { (left, right) };
        Self::with(rng, &kinds, left, right, distinct)
    }

    /// Makes tables with the given numbers of rows. Each key column has at most `distinct` values,
    /// and perhaps nulls.
    pub fn with(rng: &mut StdRng, kinds: &[KeyKind], left: usize, right: usize, distinct: usize) -> Self {
        let left = TableData::random(rng, kinds, left, distinct);
        let right = TableData::random(rng, kinds, right, distinct);
        Self { key_kinds: kinds.to_vec(), left, right }
    }

    /// Makes tables of one key column with exactly these keys, in this order.
    pub fn of(rng: &mut StdRng, kind: KeyKind, left: Vec<Option<u32>>, right: Vec<Option<u32>>) -> Self {
        let mut side =
            |keys: Vec<Option<u32>>| TableData::of(rng, &[kind], keys.into_iter().map(|number| vec![number]).collect());
        Self { key_kinds: vec![kind], left: side(left), right: side(right) }
    }
}

impl TableData {
    /// Draws keys from `distinct` values per column.
    pub fn random(rng: &mut StdRng, kinds: &[KeyKind], rows: usize, distinct: usize) -> Self {
        let null_share = *[0.0, 0.0, 0.1, 0.5].choose(rng).unwrap();
        let skewed = rng.random_bool(0.3);
        let number = |rng: &mut StdRng, kind: KeyKind| {
            if rng.random_bool(null_share) {
                return None;
            }
            // Some types have few values.
            let distinct = match kind {
                KeyKind::Boolean => 2,
                KeyKind::Int8 => distinct.min(200),
                _ => distinct,
            } as f64;
            let uniform: f64 = rng.random();
            let share = if skewed { uniform.powi(6) } else { uniform };
            Some((share * distinct) as u32)
        };
        let keys: Vec<Key> = (0..rows).map(|_| kinds.iter().map(|&kind| number(rng, kind)).collect()).collect();
        Self::of(rng, kinds, keys)
    }

    /// Makes a side with exactly these keys, in this order.
    fn of(rng: &mut StdRng, kinds: &[KeyKind], keys: Vec<Key>) -> Self {
        let rows = keys.len();
        let mut columns: Vec<(String, ArrayRef)> = Vec::new();
        for (at, &kind) in kinds.iter().enumerate() {
            let numbers: Vec<Option<u32>> = keys.iter().map(|key| key[at]).collect();
            columns.push((format!("k{at}"), key_column(rng, kind, &numbers)));
        }
        columns.extend(payload_columns(rng, rows));
        let fields: Vec<Field> =
            columns.iter().map(|(name, array)| Field::new(name, array.data_type().clone(), true)).collect();
        let schema = Arc::new(Schema::new(fields));
        let whole = RecordBatch::try_new(schema, columns.into_iter().map(|(_, array)| array).collect()).unwrap();
        Self { keys, batches: cut(rng, &whole) }
    }
}

/// Cuts a batch into one or several batches of uneven lengths, some empty. The parts are slices
/// with offsets.
fn cut(rng: &mut StdRng, whole: &RecordBatch) -> Vec<RecordBatch> {
    let mut batches = Vec::new();
    let mut start = 0;
    let cuts = rng.random_range(0..4);
    for _ in 0..cuts {
        let length = rng.random_range(0..=whole.num_rows() - start);
        batches.push(whole.slice(start, length));
        start += length;
    }
    batches.push(whole.slice(start, whole.num_rows() - start));
    batches
}

fn key_column(rng: &mut StdRng, kind: KeyKind, numbers: &[Option<u32>]) -> ArrayRef {
    fn map<T>(numbers: &[Option<u32>], value: impl Fn(u32) -> T) -> Vec<Option<T>> {
        numbers.iter().map(|number| number.map(&value)).collect()
    }
    let short = |number: u32| format!("{number:x}");
    let long = |number: u32| format!("a key that does not fit in sixteen bytes, number {number}");
    match kind {
        KeyKind::Int8 => Arc::new(Int8Array::from(map(numbers, |number| (number as i32 - 100) as i8))),
        KeyKind::Int32 => Arc::new(Int32Array::from(map(numbers, |number| number as i32 - 7))),
        KeyKind::PatternedInt32 => Arc::new(Int32Array::from(map(numbers, |number| (number << 16) as i32))),
        KeyKind::Int64 => Arc::new(Int64Array::from(map(numbers, |number| {
            (i64::from(number) - 3).wrapping_mul(0x9e37_79b9_7f4a_7c15_u64 as i64)
        }))),
        KeyKind::UInt64 => Arc::new(UInt64Array::from(map(numbers, |number| u64::MAX - u64::from(number)))),
        // Numbers 0 to 2 become a zero, a NaN and an infinity, which compare unlike their bits.
        // Signs vary between columns.
        KeyKind::Float32 => {
            let float = |number: u32| match number {
                0 => [0.0, -0.0][(number as usize + numbers.len()) % 2],
                1 => f32::NAN,
                2 => f32::NEG_INFINITY,
                _ => number as f32 * -0.5,
            };
            Arc::new(Float32Array::from(map(numbers, float)))
        }
        KeyKind::Float64 => {
            let flip: bool = rng.random();
            let float = |number: u32| match number {
                0 => {
                    if flip {
                        -0.0
                    } else {
                        0.0
                    }
                }
                1 => {
                    if flip {
                        -f64::NAN
                    } else {
                        f64::NAN
                    }
                }
                2 => f64::INFINITY,
                _ => f64::from(number) * 0.1,
            };
            Arc::new(Float64Array::from(map(numbers, float)))
        }
        KeyKind::Boolean => Arc::new(BooleanArray::from(map(numbers, |number| number % 2 == 1))),
        KeyKind::Date32 => Arc::new(Date32Array::from(map(numbers, |number| number as i32 * 30 - 1000))),
        KeyKind::Timestamp => Arc::new(TimestampMicrosecondArray::from(map(numbers, |number| i64::from(number) << 32))),
        KeyKind::Decimal128 => {
            let values = map(numbers, |number| (i128::from(number) - 2) << 70);
            Arc::new(Decimal128Array::from(values).with_precision_and_scale(38, 2).unwrap())
        }
        KeyKind::Decimal256 => {
            let values = map(numbers, |number| i256::from_parts(u128::from(number), i128::from(number) - 2));
            Arc::new(Decimal256Array::from(values).with_precision_and_scale(70, 2).unwrap())
        }
        KeyKind::ShortString => Arc::new(StringArray::from(map(numbers, short))),
        KeyKind::LongString => Arc::new(StringArray::from(map(numbers, long))),
        KeyKind::LargeString => Arc::new(LargeStringArray::from(map(numbers, long))),
        KeyKind::StringView => {
            Arc::new(StringViewArray::from(map(
                numbers,
                |number| if number % 2 == 0 { short(number) } else { long(number) },
            )))
        }
        KeyKind::Binary => {
            let values = map(numbers, |number| {
                vec![0; (number % 40) as usize].into_iter().chain(number.to_le_bytes()).collect::<Vec<u8>>()
            });
            Arc::new(values.iter().map(|value| value.as_deref()).collect::<BinaryArray>())
        }
        KeyKind::FixedBinary => {
            let mut builder = FixedSizeBinaryBuilder::new(7);
            for number in numbers {
                match number {
                    Some(number) => builder.append_value([&number.to_be_bytes()[..], &[0; 3]].concat()).unwrap(),
                    None => builder.append_null(),
                }
            }
            Arc::new(builder.finish())
        }
        KeyKind::Dictionary => {
            let values = map(numbers, long);
            Arc::new(values.iter().map(|value| value.as_deref()).collect::<DictionaryArray<Int16Type>>())
        }
    }
}

/// Makes a column of row numbers, and columns for every way of gathering: fixed width with nulls,
/// bits, strings, lists.
fn payload_columns(rng: &mut StdRng, rows: usize) -> Vec<(String, ArrayRef)> {
    let mut maybe = |row: usize| (!rng.random_bool(0.2)).then_some(row);
    let nullable: Vec<Option<i64>> = (0..rows).map(|row| maybe(row).map(|row| row as i64 * 1_000_003)).collect();
    let bits: Vec<Option<bool>> = (0..rows).map(|row| maybe(row).map(|row| row % 3 == 0)).collect();
    let strings: Vec<Option<String>> =
        (0..rows).map(|row| maybe(row).map(|row| "payload ".repeat(row % 4) + &row.to_string())).collect();
    let mut lists = ListBuilder::new(Int32Builder::new());
    for row in 0..rows {
        match maybe(row) {
            Some(row) => {
                lists.values().append_slice(&[row as i32; 3][..row % 4 % 3]);
                lists.append(true);
            }
            None => lists.append(false),
        }
    }
    vec![
        ("row".into(), Arc::new(Int32Array::from_iter_values(0..rows as i32))),
        ("nullable".into(), Arc::new(Int64Array::from(nullable))),
        ("bits".into(), Arc::new(BooleanArray::from(bits))),
        ("strings".into(), Arc::new(StringArray::from(strings))),
        ("lists".into(), Arc::new(lists.finish())),
    ]
}
