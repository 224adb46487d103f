use std::sync::Arc;

use arrow::array::*;
use arrow::buffer::NullBuffer;
use arrow::compute::take;
use arrow::datatypes::*;
use half::f16;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};

use super::*;

fn collect(batches: &[ArrayRef]) -> ColumnStatistics {
    let mut collector = StatisticsCollector::new(batches[0].data_type());
    batches.iter().for_each(|batch| collector.update(batch));
    collector.finish()
}

/// Cuts an array at random places, so that batch boundaries fall anywhere.
fn cut(array: &ArrayRef, random: &mut StdRng) -> Vec<ArrayRef> {
    let mut batches = Vec::new();
    let mut start = 0;
    while start < array.len() {
        let len = random.random_range(0..=array.len() - start);
        batches.push(array.slice(start, len));
        start += len;
    }
    batches.push(array.slice(start, 0));
    batches
}

/// Returns one value as the collector should see it.
fn value_at(array: &ArrayRef, row: usize) -> Option<Value> {
    if array.logical_nulls().is_some_and(|nulls| nulls.is_null(row)) {
        return None;
    }
    macro_rules! integers {
        ($($pattern:pat => $primitive:ty),*) => {
            match array.data_type() {
                $($pattern => Value::Integer(array.as_primitive::<$primitive>().value(row).into()),)*
                DataType::Boolean => Value::Integer(array.as_boolean().value(row).into()),
                DataType::Float16 => Value::Float(array.as_primitive::<Float16Type>().value(row).into()),
                DataType::Float32 => Value::Float(array.as_primitive::<Float32Type>().value(row).into()),
                DataType::Float64 => Value::Float(array.as_primitive::<Float64Type>().value(row)),
                DataType::Decimal256(..) => {
                    Value::Integer(array.as_primitive::<Decimal256Type>().value(row).to_i128().unwrap())
                }
                DataType::Utf8 => Value::Bytes(array.as_string::<i32>().value(row).into()),
                DataType::LargeUtf8 => Value::Bytes(array.as_string::<i64>().value(row).into()),
                DataType::Utf8View => Value::Bytes(array.as_string_view().value(row).into()),
                DataType::Binary => Value::Bytes(array.as_binary::<i32>().value(row).into()),
                DataType::BinaryView => Value::Bytes(array.as_binary_view().value(row).into()),
                DataType::FixedSizeBinary(_) => Value::Bytes(array.as_fixed_size_binary().value(row).into()),
                DataType::Dictionary(..) => {
                    let dictionary = array.as_any_dictionary();
                    return value_at(dictionary.values(), dictionary.normalized_keys()[row]);
                }
                other => panic!("no value of {other}"),
            }
        };
    }
    Some(integers! {
        DataType::Int8 => Int8Type, DataType::Int16 => Int16Type, DataType::Int32 => Int32Type,
        DataType::Int64 => Int64Type, DataType::UInt8 => UInt8Type, DataType::UInt16 => UInt16Type,
        DataType::UInt32 => UInt32Type, DataType::UInt64 => UInt64Type, DataType::Decimal32(..) => Decimal32Type,
        DataType::Decimal128(..) => Decimal128Type, DataType::Date32 => Date32Type,
        DataType::Timestamp(TimeUnit::Microsecond, _) => TimestampMicrosecondType,
        DataType::Duration(TimeUnit::Second) => DurationSecondType
    })
}

/// Checks all exact statistics against a scan of the values.
fn check_exact(what: &str, batches: &[ArrayRef]) {
    let rows: Vec<Option<Value>> =
        batches.iter().flat_map(|batch| (0..batch.len()).map(|row| value_at(batch, row))).collect();
    let values: Vec<&Value> = rows.iter().flatten().collect();
    let found = collect(batches);
    assert_eq!(found.nulls, (rows.len() - values.len()) as u64, "{what}: nulls");
    assert_eq!(found.min.as_ref(), values.iter().min().copied(), "{what}: min");
    assert_eq!(found.max.as_ref(), values.iter().max().copied(), "{what}: max");
    let is_float_dictionary = matches!(batches[0].data_type(), DataType::Dictionary(_, v) if v.is_floating());
    if !is_float_dictionary {
        assert_eq!(found.ascending, rows.is_sorted(), "{what}: ascending");
        let strict = rows.is_sorted_by(|a, b| a < b);
        assert_eq!(found.unique_ascending, strict, "{what}: unique_ascending");
    }
    let mut distinct = values.clone();
    distinct.sort();
    distinct.dedup();
    if rows.len() < 8192 || found.ascending {
        assert_eq!(found.distinct, Some(distinct.len() as f64), "{what}: distinct");
    }
    let longest = values.iter().filter_map(|value| match value {
        Value::Bytes(bytes) => Some(bytes.len() as u64),
        _ => None,
    });
    let is_bytes = summary::has_value_bytes(batches[0].data_type());
    assert_eq!(found.max_value_bytes, is_bytes.then(|| longest.max().unwrap_or(0)), "{what}: max_value_bytes");
}

/// Makes columns of many ordered types from the same random numbers.
fn columns(numbers: &[Option<i64>]) -> Vec<ArrayRef> {
    let narrow = |number: &Option<i64>| number.map(|n| n.rem_euclid(100));
    let float = |number: &Option<i64>| {
        number.map(|n| match n.rem_euclid(50) {
            0 => -0.0,
            1 => 0.0,
            2 => f64::NAN,
            3 => -f64::NAN,
            4 => f64::NEG_INFINITY,
            5 => f64::INFINITY,
            _ => n as f64 / 3.0,
        })
    };
    let text = |number: &Option<i64>| {
        number.map(|n| match n.rem_euclid(4) {
            0 => format!("{n}"),
            1 => format!("a common beginning and {n}"),
            2 => String::new(),
            _ => format!("\0{}", n.rem_euclid(7)),
        })
    };
    let texts: Vec<Option<String>> = numbers.iter().map(text).collect();
    let strings = StringArray::from_iter(texts.iter().map(|text| text.as_deref()));
    let fixed = numbers.iter().map(|n| n.map(|n| n.to_be_bytes()));
    let dictionary: DictionaryArray<Int32Type> = texts.iter().map(|text| text.as_deref()).collect();
    let days = Int32Array::from_iter(numbers.iter().map(|n| n.map(|n| n as i32)));
    let wide = |n: &Option<i64>| n.map(|n| i256::from_i128(i128::from(n) << 40));
    vec![
        Arc::new(Int8Array::from_iter(numbers.iter().map(|n| narrow(n).map(|n| n as i8 - 50)))),
        Arc::new(Int16Array::from_iter(numbers.iter().map(|n| narrow(n).map(|n| n as i16)))),
        Arc::new(days.clone()),
        Arc::new(Int64Array::from_iter(numbers.iter().copied())),
        Arc::new(UInt8Array::from_iter(numbers.iter().map(|n| narrow(n).map(|n| n as u8)))),
        Arc::new(UInt16Array::from_iter(numbers.iter().map(|n| n.map(|n| n as u16)))),
        Arc::new(UInt32Array::from_iter(numbers.iter().map(|n| n.map(|n| n as u32)))),
        Arc::new(UInt64Array::from_iter(numbers.iter().map(|n| n.map(|n| n as u64)))),
        Arc::new(BooleanArray::from_iter(numbers.iter().map(|n| n.map(|n| n % 2 == 0)))),
        Arc::new(Float16Array::from_iter(numbers.iter().map(|n| float(n).map(f16::from_f64)))),
        Arc::new(Float32Array::from_iter(numbers.iter().map(|n| float(n).map(|f| f as f32)))),
        Arc::new(Float64Array::from_iter(numbers.iter().map(float))),
        Arc::new(Decimal128Array::from_iter(numbers.iter().map(|n| n.map(|n| i128::from(n) << 50)))),
        Arc::new(Decimal256Array::from_iter(numbers.iter().map(wide))),
        Arc::new(Date32Array::from_iter(numbers.iter().map(|n| n.map(|n| n as i32)))),
        Arc::new(TimestampMicrosecondArray::from_iter(numbers.iter().copied()).with_timezone("Europe/Berlin")),
        Arc::new(DurationSecondArray::from_iter(numbers.iter().copied())),
        Arc::new(strings.clone()),
        Arc::new(LargeStringArray::from_iter(texts.iter().map(|text| text.as_deref()))),
        Arc::new(StringViewArray::from_iter(texts.iter().map(|text| text.as_deref()))),
        Arc::new(BinaryArray::from_iter(texts.iter().map(|text| text.as_ref().map(|text| text.as_bytes())))),
        Arc::new(BinaryViewArray::from_iter(texts.iter().map(|text| text.as_ref().map(|text| text.as_bytes())))),
        Arc::new(FixedSizeBinaryArray::try_from_sparse_iter_with_size(fixed, 8).unwrap()),
        Arc::new(dictionary),
    ]
}

#[test]
fn exact_statistics_are_exact_for_every_type_and_any_batch_boundaries() {
    let mut random = StdRng::seed_from_u64(crate::testing::seed());
    for round in 0..60 {
        let len = [0, 1, 2, 31, 32, 33, 63, 64, 65, 511, 512, 513, 1500][round % 13];
        let null_share = [0.0, 0.1, 1.0][round % 3];
        let spread = [3, 1 << 40][round % 2];
        let number = |random: &mut StdRng| {
            let null = random.random_bool(null_share);
            (!null).then(|| random.random_range(-spread..spread))
        };
        let numbers: Vec<_> = (0..len).map(|_| number(&mut random)).collect();
        for column in columns(&numbers) {
            let sorted = arrow::compute::sort(&column, None).unwrap();
            for (order, array) in [("as they come", column), ("sorted", sorted)] {
                let what = format!("round {round}, {} of {len} rows {order}", array.data_type());
                check_exact(&what, &cut(&array, &mut random));
            }
        }
    }
}

#[test]
fn nulls_after_values_are_out_of_order_within_and_across_batches() {
    let array = |values: Vec<Option<i32>>| -> ArrayRef { Arc::new(Int32Array::from(values)) };
    assert!(collect(&[array(vec![None, None, Some(1)]), array(vec![Some(1)])]).ascending);
    assert!(!collect(&[array(vec![Some(1), None])]).ascending);
    assert!(!collect(&[array(vec![Some(1)]), array(vec![None])]).ascending);
    assert!(collect(&[array(vec![None]), array(vec![None, Some(7)])]).ascending);
    assert!(collect(&[array(vec![None, Some(1)]), array(vec![Some(2)])]).unique_ascending);
    assert!(!collect(&[array(vec![None, None, Some(1)])]).unique_ascending);
}

#[test]
fn values_under_nulls_are_never_seen() {
    let nulls = NullBuffer::from_iter([true, false, true].into_iter().cycle().take(300));
    let values: Vec<i64> = (0..300).map(|row| if row % 3 == 1 { i64::MAX - row } else { row }).collect();
    let array: ArrayRef = Arc::new(Int64Array::new(values.into(), Some(nulls)));
    let found = collect(&[array]);
    assert_eq!((found.min, found.max), (Some(Value::Integer(0)), Some(Value::Integer(299))));
}

#[test]
fn dictionary_entries_that_no_row_uses_do_not_count() {
    let values: ArrayRef = Arc::new(StringArray::from(vec![Some("zz unused"), Some("b"), None, Some("a"), Some("b")]));
    let keys = Int8Array::from(vec![Some(3), None, Some(1), Some(2), Some(4)]);
    let array: ArrayRef = Arc::new(DictionaryArray::new(keys, values));
    let found = collect(&[array]);
    assert_eq!(found.min, Some(Value::Bytes(b"a".into())));
    assert_eq!(found.max, Some(Value::Bytes(b"b".into())));
    assert_eq!((found.nulls, found.distinct, found.max_value_bytes), (2, Some(2.0), Some(1)));
}

#[test]
fn decimals_beyond_128_bits_have_no_range_and_no_order() {
    let big = i256::from_i128(i128::MAX).wrapping_add(i256::ONE);
    let fits: ArrayRef = Arc::new(Decimal256Array::from(vec![i256::ONE]));
    let exceeds: ArrayRef = Arc::new(Decimal256Array::from(vec![big]));
    let found = collect(&[fits.clone(), exceeds, fits]);
    assert_eq!((found.min, found.max, found.ascending), (None, None, false));
}

#[test]
fn types_without_order_have_their_nulls_counted() {
    let list: ArrayRef = Arc::new(ListArray::from_iter_primitive::<Int32Type, _, _>([Some(vec![Some(1)]), None]));
    let found = collect(&[list]);
    assert_eq!(found, ColumnStatistics { nulls: 1, ..ColumnStatistics::default() });
}

#[test]
fn merged_collectors_give_the_same_statistics_as_one_collector() {
    let mut random = StdRng::seed_from_u64(crate::testing::seed());
    for round in 0..30 {
        let mut numbers: Vec<Option<i64>> =
            (0..random.random_range(0..200)).map(|_| Some(random.random_range(0..60))).collect();
        match round % 3 {
            0 => numbers.sort(),
            1 => (0..3).for_each(|_| numbers.insert(0, None)),
            _ => (),
        }
        for array in columns(&numbers) {
            let at = random.random_range(0..=array.len());
            let mut merged = StatisticsCollector::new(array.data_type());
            for part in [array.slice(0, at), array.slice(at, array.len() - at)] {
                let mut collector = StatisticsCollector::new(array.data_type());
                collector.update(&part);
                merged.merge(&collector);
            }
            assert_eq!(
                merged.finish(),
                collect(std::slice::from_ref(&array)),
                "round {round}, {}, cut at {at}",
                array.data_type()
            );
        }
    }
}

/// Deals the batches out to `parts` collectors in turn, and merges these in a random order.
fn collect_in_parts(batches: &[ArrayRef], parts: usize, random: &mut StdRng) -> ColumnStatistics {
    let data_type = batches[0].data_type();
    let mut collectors: Vec<_> =
        (0..parts).map(|part| StatisticsCollector::seeded(data_type, part as u64 + 1)).collect();
    for (at, batch) in batches.iter().enumerate() {
        collectors[at % parts].update(batch);
    }
    collectors.shuffle(random);
    let mut merged = StatisticsCollector::new(data_type);
    collectors.iter().for_each(|collector| merged.merge(collector));
    merged.finish()
}

/// The items of an order are stored next to each other. A sample of at most one row per stretch of
/// a column never sees two of them. With such a sample, 30000 orders were estimated as 78689. A
/// join of orders and items was therefore predicted at 45946 rows instead of 120515.
#[test]
fn adjacent_equal_values_are_counted_however_the_rows_are_divided_into_parts() {
    let mut random = StdRng::seed_from_u64(10);
    let mut orders: Vec<i64> = (0..150_000).map(|order| 1_000_003 * order).collect();
    for (order_known, what) in [(true, "in order"), (false, "in no order")] {
        if !order_known {
            orders.shuffle(&mut random);
        }
        let items: Vec<i64> =
            orders.iter().flat_map(|&order| std::iter::repeat_n(order, random.random_range(1..=7))).collect();
        let batches: Vec<ArrayRef> = items.chunks(4096).map(|c| Arc::new(Int64Array::from(c.to_vec())) as _).collect();
        let one_pass = collect(&batches);
        for parts in [1, 2, 4, 7] {
            let found = collect_in_parts(&batches, parts, &mut random);
            assert_eq!((&found.min, &found.max, found.nulls), (&one_pass.min, &one_pass.max, 0));
            let distinct = found.distinct.unwrap() / 150_000.0;
            let situation = format!("{parts} parts of rows {what}");
            // The estimator assumes that all orders have equally many items, so it finds only 4 of
            // 5 orders.
            assert!((0.6..1.3).contains(&distinct), "{distinct} times as many as there are, {situation}");
            // Ordered pieces have few more runs than values: an order may begin in one piece and
            // end in the next.
            assert!(!order_known || distinct <= 1.01, "{distinct} times as many as there are, {situation}");
        }
    }
}

/// With one seed, the samples of all four parts had the same rows. Every sampled value then
/// occurred four times, so the estimate of the 65536 values was too low.
#[test]
fn parts_with_the_same_values_are_sampled_at_different_rows() {
    let mut random = StdRng::seed_from_u64(11);
    let mut values: Vec<i64> = (0..65_536).map(|value| 1_000_003 * value).collect();
    values.shuffle(&mut random);
    let batches = vec![Arc::new(Int64Array::from(values)) as ArrayRef; 4];
    let distinct = collect_in_parts(&batches, 4, &mut random).distinct.unwrap();
    assert!((0.75..1.35).contains(&(distinct / 65_536.0)), "65536 distinct values, estimated {distinct}");
}

#[test]
fn a_merged_sample_represents_each_part_by_its_share_of_the_rows() {
    let mut random = StdRng::seed_from_u64(12);
    let batch = |random: &mut StdRng, rows: usize| -> ArrayRef {
        Arc::new(Int64Array::from_iter_values((0..rows).map(|row| match row % 10 {
            0..3 => -1,
            3 => -2,
            _ => random.random(),
        })))
    };
    // Parts of very different sizes, and rows after a merge, are each represented by their share.
    let mut merged = StatisticsCollector::seeded(&DataType::Int64, 1);
    merged.update(&batch(&mut random, 500_000));
    let mut small = StatisticsCollector::seeded(&DataType::Int64, 2);
    small.update(&batch(&mut random, 100));
    merged.merge(&small);
    small.merge(&merged);
    small.update(&batch(&mut random, 1_000_000));
    let found = small.finish();
    assert_eq!(found.heavy.len(), 2, "{:?}", found.heavy);
    for (heavy, share) in found.heavy.iter().zip([0.3, 0.1]) {
        assert!((heavy.share - share).abs() < 0.03, "{:?}", found.heavy);
    }
}

/// A factor of two is enough to size a hash table. A sample of 8192 rows guarantees it if all
/// values are equally frequent.
#[test]
fn distinct_values_are_estimated_within_a_factor_of_two() {
    let mut random = StdRng::seed_from_u64(1);
    let rows = 300_000i64;
    for distinct in [1, 2, 100, 5_000, 100_000, rows] {
        let mut values: Vec<i64> = (0..rows).map(|row| row % distinct * 1_000_003).collect();
        values.shuffle(&mut random);
        let batches: Vec<ArrayRef> =
            values.chunks(65_536).map(|c| Arc::new(Int64Array::from(c.to_vec())) as _).collect();
        let found = collect(&batches).distinct.unwrap();
        let ratio = found / distinct as f64;
        assert!((0.5..2.0).contains(&ratio), "{distinct} distinct values, estimated {found}");
    }
}

/// Sketches a column that was uploaded in those batches.
fn sketch(batches: &[ArrayRef]) -> Sketch {
    StatisticsCollector::new(batches[0].data_type()).sketch(batches.iter()).unwrap()
}

#[test]
fn sketches_count_distinct_values_however_often_each_occurs() {
    let mut random = StdRng::seed_from_u64(4);
    for (rows, distinct) in [(1 << 21, 1i64 << 20), (1 << 20, 1 << 12), (1 << 20, i64::MAX), (100_000, 1), (0, 1)] {
        // A quarter of the rows has one value.
        let mut value = |row| if row % 4 == 0 { 0 } else { random.random_range(0..distinct).wrapping_mul(1_000_003) };
        let values: Vec<i64> = (0..rows).map(&mut value).collect();
        let expected = values.iter().collect::<std::collections::HashSet<_>>().len() as f64;
        let batches: Vec<ArrayRef> =
            values.chunks(30_000).map(|c| Arc::new(Int64Array::from(c.to_vec())) as _).collect();
        let found = if batches.is_empty() { Sketch::default() } else { sketch(&batches) }.distinct();
        assert!((found - expected).abs() <= 0.06 * expected, "{expected} values in {rows} rows, {found} found");
    }
}

#[test]
fn few_distinct_values_are_counted_exactly_and_nulls_are_not_counted() {
    let numbers: Vec<Option<i64>> = (0..40_000).map(|row| (row % 3 != 0).then_some(row % 100)).collect();
    for array in columns(&numbers) {
        let one = sketch(std::slice::from_ref(&array));
        let distinct = hash::hashes(&array).into_iter().filter(|&hash| hash != hash::NULL);
        let distinct = distinct.collect::<std::collections::HashSet<_>>().len() as f64;
        assert_eq!(one.distinct(), distinct, "{}", array.data_type());
        assert_eq!(one.shares_in_common(&one), Some((1.0, 1.0)));
        let other = sketch(&[array.slice(20_000, 10), array.slice(39_000, 0)]);
        assert!(other.distinct() <= 7.0, "of ten rows, three or four are null");
        let share = other.distinct() / distinct;
        assert_eq!(one.shares_in_common(&other), Some((share, 1.0)));
    }
    let lists: ArrayRef = Arc::new(ListArray::from_iter_primitive::<Int32Type, _, _>([Some(vec![Some(1)]), None]));
    assert!(StatisticsCollector::new(lists.data_type()).sketch([&lists].into_iter()).is_none());
}

#[test]
fn sketches_count_the_values_that_two_columns_share() {
    let column = |range: std::ops::Range<i32>| -> ArrayRef { Arc::new(Int32Array::from_iter_values(range.rev())) };
    let wide = |array: &ArrayRef| arrow::compute::cast(array, &DataType::Int64).unwrap();
    let left = sketch(&[column(0..1_000_000)]);
    for (range, own_share, other_share) in
        [(900_000..1_600_000, 0.1, 1.0 / 7.0), (2_000_000..3_000_000, 0.0, 0.0), (-50_000..2_000_000, 1.0, 1.0 / 2.05)]
    {
        let right = sketch(&[wide(&column(range.clone()))]);
        let (own, other) = left.shares_in_common(&right).unwrap();
        assert_eq!(right.shares_in_common(&left), Some((other, own)));
        for (found, expected) in [(own, own_share), (other, other_share)] {
            assert!((found - expected).abs() <= 0.15 * expected + 0.001, "{range:?}: {found}, not {expected}");
        }
        // The sample's error cannot hide whether all values are in the other column.
        assert_eq!(own == 1.0, own_share == 1.0, "{range:?}");
    }
    // A few values of a million fall into no sample.
    assert_eq!(left.shares_in_common(&sketch(&[column(5..15)])), None);
}

#[test]
fn sketches_detect_a_few_values_on_two_rows() {
    let mut random = StdRng::seed_from_u64(11);
    for distinct in [100, 5_000, 400_000i64] {
        for twice in [0, distinct / 100] {
            let mut values: Vec<i64> = (0..distinct).chain(0..twice).collect();
            values.shuffle(&mut random);
            let batches: Vec<ArrayRef> =
                values.chunks(30_000).map(|values| Arc::new(Int64Array::from(values.to_vec())) as _).collect();
            let found = sketch(&batches);
            assert_eq!(found.repeats(), twice > 0, "{twice} of {distinct} values");
            // Each part may have a value only once.
            let parts = batches.iter().map(|batch| sketch(std::slice::from_ref(batch)));
            let merged = parts.reduce(Sketch::merge).unwrap();
            assert_eq!(merged.repeats(), twice > 0, "{twice} of {distinct} values, in parts");
        }
    }
}

#[test]
fn sketches_estimate_the_overlap_of_frequent_and_of_rare_values() {
    // Every tenth value is on twenty rows. The other column has half of these values, and a quarter
    // of the rest.
    let rows_of = |value: i64| if value % 10 == 0 { 20 } else { 1 };
    for values in [2_000, 400_000] {
        let column: Vec<i64> = (0..values).flat_map(|value| std::iter::repeat_n(value, rows_of(value))).collect();
        let has = |value: i64| if value % 10 == 0 { value % 20 == 0 } else { value / 10 % 4 == 0 };
        let other: Vec<i64> = (0..values).filter(|&value| has(value)).collect();
        let [column, other] = [column, other].map(|values| sketch(&[Arc::new(Int64Array::from(values)) as ArrayRef]));
        let overlap = column.overlap(&other, 4.0, |_| false);
        let expected = Overlap { rare_rows: 0.9 * values as f64, of_rare_rows: 0.25, of_frequent_values: 0.5 };
        let is_near = |found: f64, expected: f64| (found - expected).abs() <= 0.15 * expected;
        assert!(
            is_near(overlap.rare_rows, expected.rare_rows)
                && is_near(overlap.of_rare_rows, expected.of_rare_rows)
                && is_near(overlap.of_frequent_values, expected.of_frequent_values),
            "{values} values: {overlap:?}, not {expected:?}"
        );
        let all = column.overlap(&column, 4.0, |_| false);
        assert_eq!((all.of_rare_rows, all.of_frequent_values), (1.0, 1.0), "{values} values, with themselves");
        let apart = column.overlap(&other, 4.0, |_| true);
        assert_eq!((apart.rare_rows, apart.of_frequent_values > 0.4), (0.0, true));
    }
    let few = sketch(&[Arc::new(Int64Array::from(vec![1, 2, 2])) as ArrayRef]);
    let hash_of = |value: i64| hash::hashes(&(Arc::new(Int64Array::from(vec![value])) as ArrayRef))[0];
    assert_eq!([1, 2, 3].map(|value| few.holds(hash_of(value))), [Some(true), Some(true), Some(false)]);
    let many = sketch(&[Arc::new(Int64Array::from_iter_values(0..400_000)) as ArrayRef]);
    let known = (0..10_000).filter(|&value| many.holds(hash_of(value)) == Some(true)).count();
    assert!((50..500).contains(&known), "a sample holds {known} of 10000 values, and tells nothing of the others");
    assert!((400_000..500_000).all(|value| many.holds(hash_of(value)) != Some(true)));
}

/// Two columns of 300 values each, in the batches of a table.
fn pairs(rows: impl Iterator<Item = (Option<i64>, i64)>, text: bool) -> Vec<RecordBatch> {
    let rows: Vec<(Option<i64>, i64)> = rows.collect();
    let batch = |rows: &[(Option<i64>, i64)]| {
        let first: ArrayRef = Arc::new(Int64Array::from_iter(rows.iter().map(|(first, _)| *first)));
        let second: ArrayRef = Arc::new(Int64Array::from_iter_values(rows.iter().map(|(_, second)| *second)));
        let second = if text { arrow::compute::cast(&second, &DataType::Utf8).unwrap() } else { second };
        RecordBatch::try_from_iter_with_nullable([("a", first, true), ("b", second, false)]).unwrap()
    };
    rows.chunks(7000).map(batch).collect()
}

#[test]
fn distinct_combinations_of_columns_are_counted() {
    const COLUMNS: [(usize, bool); 2] = [(0, false), (1, false)];
    let all = || (0..90_000).map(|row| (Some(row % 300), row / 300));
    for text in [false, true] {
        let each = Combination::of(&pairs(all(), text), &COLUMNS);
        let distinct = each.sketch().distinct();
        assert!((distinct - 90_000.0).abs() < 0.06 * 90_000.0 && !each.sketch().repeats(), "{distinct}");
        assert!(each.heavy().is_empty());
        // Both columns have 300 values, and each value of one occurs with one value of the other.
        let diagonal = Combination::of(&pairs((0..90_000).map(|row| (Some(row % 300), row % 300)), text), &COLUMNS);
        assert_eq!((diagonal.sketch().distinct(), diagonal.sketch().repeats()), (300.0, true));
        // The same pair of values in the other order is another combination.
        let half = Combination::of(&pairs((0..45_000).map(|row| (Some(row / 300), row % 300)), text), &COLUMNS);
        let (of_all, of_half) = each.sketch().shares_in_common(half.sketch()).unwrap();
        assert!((of_all - 0.5).abs() < 0.06 && of_half == 1.0, "{of_all}, {of_half}");
        // One combination on a fifth of the rows. The merged statistics find it, too.
        let heavy = || all().chain((0..22_500).map(|_| (Some(7), 11)));
        let whole = Combination::of(&pairs(heavy(), text), &COLUMNS);
        let [heaviest] = whole.heavy() else { panic!("{:?}", whole.heavy()) };
        assert!((heaviest.share - 0.2).abs() < 0.03, "{heaviest:?}");
        let later = Combination::of(&pairs((0..22_500).map(|_| (Some(7), 11)), text), &COLUMNS);
        let merged = each.merge(&later);
        let [merged] = merged.heavy() else { panic!("one is heavy") };
        assert!(merged.hash == heaviest.hash && (merged.share - 0.2).abs() < 0.03, "{merged:?}");
    }
}

#[test]
fn rows_with_nulls_count_as_combinations_only_if_nulls_are_values() {
    let rows = || (0..1000).map(|row| ((row % 2 == 0).then_some(row), row % 2));
    let distinct = |nulls| Combination::of(&pairs(rows(), false), &[(0, nulls), (1, false)]).sketch().distinct();
    assert_eq!((distinct(false), distinct(true)), (500.0, 501.0));
}

/// One value is on a fifth of the rows. Without separate counting, it would make the other values
/// look four times as frequent as they are.
#[test]
fn a_heavy_value_does_not_distort_the_estimate_of_distinct_values() {
    let mut random = StdRng::seed_from_u64(2);
    let mut values: Vec<i64> = (0..100_000).chain((0..25_000).map(|_| 7)).collect();
    values.shuffle(&mut random);
    let found = collect(&[Arc::new(Int64Array::from(values))]).distinct.unwrap();
    assert!((60_000.0..=125_000.0).contains(&found), "100000 distinct values, estimated {found}");
}

#[test]
fn the_heaviest_value_is_found_in_shuffled_and_in_patterned_columns() {
    let rows = 1_000_000i64;
    let patterned = (0..rows).map(|row| row % 1024);
    let skewed = (0..rows).map(|row| if row % 5 == 0 { -1 } else { row });
    for (column, share) in [(patterned.collect::<Vec<_>>(), 1.0 / 1024.0), (skewed.collect(), 0.2)] {
        let batches: Vec<ArrayRef> = column.chunks(4096).map(|c| Arc::new(Int64Array::from(c.to_vec())) as _).collect();
        let found = collect(&batches).heaviest_share;
        assert!((found - share).abs() < 0.02, "{found} instead of {share}");
    }
}

#[test]
fn heavy_values_are_reported_with_their_share_and_an_example_row() {
    let mut random = StdRng::seed_from_u64(3);
    let mut values: Vec<Option<i64>> = (0..100_000)
        .map(|row| match row % 20 {
            0..5 => Some(-1),
            5..8 => Some(-2),
            8..10 => None,
            _ => Some(row),
        })
        .collect();
    values.shuffle(&mut random);
    let batches: Vec<ArrayRef> = values.chunks(30_000).map(|c| Arc::new(Int64Array::from(c.to_vec())) as _).collect();
    let check = |found: &ColumnStatistics| {
        for (heavy, (value, share)) in found.heavy.iter().zip([(-1, 0.25), (-2, 0.15)]) {
            assert_eq!(values[heavy.row as usize], Some(value), "{heavy:?}");
            assert!((heavy.share - share).abs() < 0.03, "{heavy:?} of {value}");
        }
        assert!(found.heavy.len() >= 2, "{:?}", found.heavy);
        // A value on only one row cannot be sampled four times.
        assert_eq!(found.heavy.len(), 2, "{:?}", found.heavy);
    };
    check(&collect(&batches));
    let mut merged = StatisticsCollector::new(&DataType::Int64);
    for batch in &batches {
        let mut collector = StatisticsCollector::new(&DataType::Int64);
        collector.update(batch);
        merged.merge(&collector);
    }
    check(&merged.finish());
    // All values of a column of few values are listed, however few rows they have.
    let few = collect(&[Arc::new(Int64Array::from(vec![Some(4), None, Some(5), Some(4)]))]).heavy;
    assert_eq!(few.iter().map(|heavy| (heavy.row, heavy.share)).collect::<Vec<_>>(), [(0, 0.5), (2, 0.25)]);
}

#[test]
fn values_that_are_equal_as_keys_have_equal_hashes() {
    let hashes = hash::hashes;
    let cast = |array: &ArrayRef, to: DataType| arrow::compute::cast(array, &to).unwrap();
    let integers: ArrayRef = Arc::new(Int8Array::from(vec![Some(-128), Some(-1), None, Some(0), Some(127)]));
    for to in [DataType::Int16, DataType::Int32, DataType::Int64] {
        assert_eq!(hashes(&integers), hashes(&cast(&integers, to.clone())), "{to}");
    }
    let unsigned: ArrayRef = Arc::new(UInt8Array::from(vec![0, 127, 128, 255]));
    for to in [DataType::Int16, DataType::UInt32, DataType::Int64, DataType::UInt64] {
        assert_eq!(hashes(&unsigned), hashes(&cast(&unsigned, to.clone())), "{to}");
    }
    let signs: [ArrayRef; 2] = [Arc::new(Int64Array::from(vec![-1])), Arc::new(UInt64Array::from(vec![u64::MAX]))];
    assert_ne!(hashes(&signs[0]), hashes(&signs[1]), "-1 and 2^64 - 1 have the same bits");
    let decimals: ArrayRef =
        Arc::new(Decimal128Array::from(vec![-5, 0, 99_999]).with_precision_and_scale(38, 2).unwrap());
    for to in [DataType::Decimal32(9, 2), DataType::Decimal64(18, 2), DataType::Decimal256(60, 2)] {
        assert_eq!(hashes(&decimals), hashes(&cast(&decimals, to.clone())), "{to}");
    }
    let text: ArrayRef =
        Arc::new(StringArray::from(vec![Some("a"), None, Some(""), Some("a longer one than a view holds")]));
    let dictionary = |values: DataType| DataType::Dictionary(Box::new(DataType::Int8), Box::new(values));
    for to in [DataType::LargeUtf8, DataType::Utf8View, dictionary(DataType::Utf8), dictionary(DataType::LargeUtf8)] {
        assert_eq!(hashes(&text), hashes(&cast(&text, to.clone())), "{to}");
    }
    let floats: ArrayRef = Arc::new(Float64Array::from(vec![0.0, -0.0, f64::NAN, -f64::NAN, 1.5]));
    let found = hashes(&floats);
    assert_eq!((found[0], found[2]), (found[1], found[3]));
    assert_eq!(found, hashes(&cast(&floats, dictionary(DataType::Float64))));
}

/// Returns a dictionary array of these keys and values.
fn dictionary(keys: Vec<i32>, values: ArrayRef) -> ArrayRef {
    Arc::new(DictionaryArray::<Int32Type>::try_new(keys.into(), values).unwrap())
}

/// Regression test: the values were copied for each row, which takes more bytes than an offset can
/// count.
#[test]
fn a_large_value_of_a_dictionary_is_not_copied_for_each_row() {
    let large = "x".repeat(8 << 20);
    let texts = std::iter::once(large.as_str()).chain(std::iter::repeat_n("y", 1000));
    let column = dictionary(vec![0; 300], Arc::new(StringArray::from_iter_values(texts)));
    let statistics = collect(&[column]);
    assert_eq!((statistics.distinct, statistics.max_value_bytes), (Some(1.0), Some(8 << 20)));
    assert_eq!((statistics.heavy.len(), statistics.heaviest_share), (1, 1.0));
}

/// Regression test: long values that are equal under different keys were compared at each row.
#[test]
fn equal_values_under_different_keys_are_compared_a_few_times() {
    let large = "x".repeat(8 << 20);
    let values: ArrayRef = Arc::new(StringArray::from(vec![large.clone(), large, "z".into()]));
    let mut keys: Vec<i32> = (0..100_000).map(|row| row % 2).collect();
    keys.push(2);
    let statistics = collect(&[dictionary(keys.clone(), values.clone())]);
    assert!(statistics.ascending && !statistics.unique_ascending);
    assert_eq!(statistics.distinct, Some(2.0));
    keys.push(1);
    assert!(!collect(&[dictionary(keys, values)]).ascending);
}

#[test]
fn a_large_array_is_taken_in_parts_that_an_interrupt_ends() {
    use std::sync::atomic::{AtomicUsize, Ordering};
    let numbers: ArrayRef = Arc::new(Int64Array::from_iter_values(0..2_000_000));
    let text = StringViewArray::from_iter_values(["x".repeat(1 << 20)]);
    let texts = take(&text, &UInt32Array::from(vec![0; 40]), None).unwrap();
    for column in [numbers, texts] {
        let (mut whole, mut parts) = [(); 2].map(|()| StatisticsCollector::new(column.data_type())).into();
        whole.update(&column);
        let checks = Arc::new(AtomicUsize::new(0));
        let counting = checks.clone();
        let count = Interrupt::by(move || {
            counting.fetch_add(1, Ordering::Relaxed);
            Ok(())
        });
        parts.update_interruptible(&column, &count).unwrap();
        assert!((4..20).contains(&checks.load(Ordering::Relaxed)), "{checks:?}");
        assert_eq!(parts.finish(), whole.finish());
        let ended = Interrupt::by(|| Err(crate::Error::Cancelled("ended".into())));
        assert!(parts.update_interruptible(&column, &ended).is_err());
    }
}

#[test]
fn nulls_of_runs_are_counted_without_a_bit_for_each_row() {
    let values: ArrayRef = Arc::new(Int32Array::from(vec![Some(1), None, Some(2), None]));
    let ends = Int32Array::from(vec![3, 1_000_000_003, 1_000_000_004, i32::MAX]);
    let runs: ArrayRef = Arc::new(RunArray::<Int32Type>::try_new(&ends, &values).unwrap());
    assert_eq!(null_count(&runs), 1_000_000_000 + (i32::MAX as u64 - 1_000_000_004));
    assert_eq!(null_count(&runs.slice(1, 10)), 8);
    assert_eq!(null_count(&runs.slice(1_000_000_003, 1)), 0);
}
