//! Tests of the predicted number of rows of a join.

use std::collections::HashMap;
use std::time::Duration;

use arrow::array::{Array, ArrayRef, Int32Array, Int64Array, RecordBatch, StringArray};
use arrow::compute::cast;
use arrow::util::display::array_value_to_string;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};

use super::*;
use crate::catalog::{UploadOptions, Uploads, UploadsLimits};
use crate::memory::Interrupt;

#[test]
fn rows_are_estimated_from_distinct_keys_nulls_and_ranges() {
    let estimates = |left: &TableSpec, right: &TableSpec, how| {
        Estimates::of(&bound(left, right, how), &Interrupt::default()).unwrap()
    };
    let orders = TableSpec::primary(1000, 1);
    let lines = TableSpec { rows: 4000, ..TableSpec::primary(1000, 1) };
    assert_eq!(estimates(&orders, &lines, JoinKind::Inner).rows, 4000.0);
    assert_eq!(estimates(&orders, &lines, JoinKind::LeftSemi).rows, 1000.0);
    assert_eq!(estimates(&orders, &lines, JoinKind::LeftAnti).rows, 0.0);

    let nulls = TableSpec { nulls: 1000, ..TableSpec { rows: 4000, ..TableSpec::primary(1000, 1) } };
    assert_eq!(estimates(&orders, &nulls, JoinKind::Inner).rows, 3000.0);
    assert_eq!(estimates(&orders, &nulls, JoinKind::Right).rows, 4000.0);
    assert_eq!(estimates(&orders, &nulls, JoinKind::RightAnti).rows, 1000.0);

    // Half of the customers have orders.
    let half = TableSpec { rows: 4000, distinct: 500.0, ..TableSpec::primary(1000, 1) };
    assert_eq!(estimates(&orders, &half, JoinKind::Inner).rows, 4000.0);
    assert_eq!(estimates(&orders, &half, JoinKind::LeftAnti).rows, 500.0);
    assert_eq!(estimates(&orders, &half, JoinKind::Full).rows, 4500.0);

    let disjoint = TableSpec { range: (5000, 5999), ..TableSpec::primary(1000, 1) };
    assert_eq!(estimates(&orders, &disjoint, JoinKind::Inner).rows, 0.0);
    assert_eq!(estimates(&orders, &disjoint, JoinKind::Full).rows, 2000.0);

    // 1000 rows of 10 distinct keys on each side: 10 * 100 * 100 pairs.
    let many = TableSpec { distinct: 10.0, range: (0, 9), ..TableSpec::primary(1000, 1) };
    assert_eq!(estimates(&many, &many, JoinKind::Inner).rows, 100_000.0);

    // A tenth of the clicks have one user. Each user has two sessions.
    let sessions = TableSpec { rows: 200, ..TableSpec::primary(100, 1) };
    let clicks = TableSpec { rows: 10_000, distinct: 9000.0, ..TableSpec::primary(9000, 1) };
    let skewed = TableSpec { heaviest_share: Some(0.1), ..TableSpec { range: (0, 99), ..clicks } };
    // A hundred of the other clicks belong to the hundred users, and meet two sessions each.
    assert_eq!(estimates(&sessions, &skewed, JoinKind::Inner).pairs.round(), 2200.0);
    assert_eq!(estimates(&skewed, &sessions, JoinKind::Inner).pairs.round(), 2200.0);
    assert_eq!(estimates(&skewed, &sessions, JoinKind::LeftSemi).rows.round(), 1100.0);
    let elsewhere = TableSpec { range: (5000, 5999), ..TableSpec::primary(1000, 1) };
    assert_eq!(estimates(&skewed, &elsewhere, JoinKind::Inner).pairs, 0.0);

    let empty = TableSpec { rows: 0, distinct: 0.0, ..TableSpec::primary(1, 1) };
    for how in JoinKind::ALL {
        let rows = estimates(&empty, &orders, how).rows;
        assert!(rows.is_finite() && rows >= 0.0, "{how}: {rows}");
    }
}

#[test]
fn distinct_keys_and_keys_of_both_sides_are_counted() {
    let random = &mut StdRng::seed_from_u64(3);
    let (users, clicks) = (400_000i64, 800_000);
    let mut ids: Vec<i64> = (0..users).collect();
    ids.shuffle(random);
    let users: ArrayRef = Arc::new(Int64Array::from(ids));
    // Clicks of all users, of a tenth of them, and of a range in which a tenth are users.
    for (of, spread) in [(400_000, 1), (40_000, 1), (400_000, 10)] {
        let clicks = Int64Array::from_iter_values((0..clicks).map(|_| random.random_range(0..of) * spread));
        let clicks: ArrayRef = Arc::new(clicks);
        for how in [JoinKind::Inner, JoinKind::LeftSemi, JoinKind::LeftAnti, JoinKind::RightAnti, JoinKind::Full] {
            let found = Estimates::of(&join_of(&users, &clicks, how, false), &Interrupt::default()).unwrap().rows;
            let rows = naive_rows(&users, &clicks, how, false) as f64;
            assert!((found - rows).abs() <= 0.1 * rows + 10_000.0, "{how} with {of} users: {found} of {rows} rows");
        }
    }
}

#[test]
fn probe_rows_all_match_if_all_their_values_are_build_keys_despite_rough_counts() {
    let mut random = StdRng::seed_from_u64(7);
    for build in [30_000, 50_000, 80_000] {
        for probe in [20_000, 60_000] {
            let spread = |value: i64| value.wrapping_mul(0x5851_f42d_4c95_7f2d);
            let keys = shuffled((0..build).map(spread), &mut random);
            let drawn = numbers((0..probe).map(|_| spread(random.random_range(0..build))));
            let estimates =
                Estimates::of(&join_of(&keys, &drawn, JoinKind::Inner, false), &Interrupt::default()).unwrap();
            assert_eq!(estimates.right_matched, probe as f64, "{probe} rows of {build} keys");
            assert!(estimates.left_matched < build as f64);
        }
    }
}

#[test]
fn a_few_repeated_keys_are_detected() {
    let random = &mut StdRng::seed_from_u64(14);
    let repeats = |left: &ArrayRef, nulls_equal: bool| {
        Estimates::of(&join_of(left, &numbers(0..10), JoinKind::Inner, nulls_equal), &Interrupt::default())
            .unwrap()
            .repeats(Side::Left)
    };
    for ascending in [false, true] {
        for (twice, expected) in [(0, false), (2000, true)] {
            let mut values: Vec<i64> = (0..100_000).chain(0..twice).collect();
            if ascending {
                values.sort_unstable()
            } else {
                values.shuffle(random)
            }
            let found = repeats(&numbers(values), false);
            assert_eq!(found, expected, "{twice} of 100000 keys are on two rows; ascending {ascending}");
        }
    }
    // One key on a tenth of the rows, among others that a sample hardly shows twice.
    let heavy = shuffled((0..400_000).map(|row| if row % 10 == 0 { -1 } else { row }), random);
    assert!(repeats(&heavy, false));
    // Nulls are a key if nulls match.
    let with_nulls: ArrayRef =
        Arc::new(Int64Array::from_iter((0..5000).rev().map(|row| (row % 100 > 0).then_some(row))));
    assert_eq!([false, true].map(|nulls_equal| repeats(&with_nulls, nulls_equal)), [false, true]);
}

/// Returns a join by two columns of tables with the given keys.
fn join_by_two(left: &[(i64, i64)], right: &[(i64, i64)]) -> BoundJoin {
    let catalog = Catalog::new(Arena::new(Budget::new("host memory", "--host-memory", 1 << 20)));
    for (name, keys) in [("r", left), ("s", right)] {
        let columns = [
            ("k", numbers(keys.iter().map(|(first, _)| *first))),
            ("l", numbers(keys.iter().map(|(_, second)| *second))),
        ];
        let batch = RecordBatch::try_from_iter(columns).unwrap();
        catalog.create(Table::from_batches(name, batch.schema(), vec![batch]).unwrap()).unwrap();
    }
    bind(&JoinSpec::inner("r", "s", vec![KeyPair::new("k", "k"), KeyPair::new("l", "l")]), &catalog).unwrap()
}

#[test]
fn keys_of_several_columns_are_counted_together() {
    let random = &mut StdRng::seed_from_u64(15);
    // Ten thousand keys, one per row, of two columns with 100 and 199 values. Some combinations are
    // not used.
    let key = |number: i64| (number % 100, number / 100 + number % 100);
    let mut keys: Vec<(i64, i64)> = (0..10_000).map(key).collect();
    keys.shuffle(random);
    let drawn: Vec<(i64, i64)> = (0..10_000).map(|_| key(random.random_range(0..20_000))).collect();
    let estimates = Estimates::of(&join_by_two(&keys, &drawn), &Interrupt::default()).unwrap();
    assert_eq!([Side::Left, Side::Right].map(|side| estimates.repeats(side)), [false, true]);
    // Half of the drawn keys have one partner each.
    assert!((estimates.pairs - 5000.0).abs() < 700.0, "{}", estimates.pairs);

    // A tenth of the rows have one key.
    let skewed: Vec<(i64, i64)> =
        drawn.iter().enumerate().map(|(at, &k)| if at % 10 == 0 { (7, 9) } else { k }).collect();
    let join = join_by_two(&keys, &skewed);
    let estimates = Estimates::of(&join, &Interrupt::default()).unwrap();
    let (_, rows) = estimates.heavy(&join, Side::Right).next().unwrap();
    assert!((700.0..1300.0).contains(&rows), "{rows}");
    let explanation = Explanation::new(&plan(join, None).unwrap(), "host:0", String::new(), None);
    assert_eq!(explanation.right.heavy_keys[0].key, "7, 9");
}

/// Returns a join of two tables with the given key columns, in batches of 4000 rows.
fn join_of(left: &ArrayRef, right: &ArrayRef, how: JoinKind, nulls_equal: bool) -> BoundJoin {
    let catalog = Catalog::new(Arena::new(Budget::new("host memory", "--host-memory", 1 << 20)));
    for (name, keys) in [("r", left), ("s", right)] {
        let whole = RecordBatch::try_from_iter_with_nullable([("k", keys.clone(), true)]).unwrap();
        let cut = |start| whole.slice(start, 4000.min(keys.len() - start));
        let batches = (0..keys.len()).step_by(4000).map(cut).collect();
        catalog.create(Table::from_batches(name, whole.schema(), batches).unwrap()).unwrap();
    }
    let spec = JoinSpec { how, nulls_equal, ..JoinSpec::inner("r", "s", vec![KeyPair::new("k", "k")]) };
    bind(&spec, &catalog).unwrap()
}

/// Rows of the join, counted value by value.
fn naive_rows(left: &ArrayRef, right: &ArrayRef, how: JoinKind, nulls_equal: bool) -> u64 {
    let count = |keys: &ArrayRef| {
        let mut counts: HashMap<Option<String>, u64> = HashMap::new();
        for row in 0..keys.len() {
            let value = (!keys.is_null(row)).then(|| array_value_to_string(keys, row).unwrap());
            *counts.entry(value).or_default() += 1;
        }
        counts
    };
    let (left, right) = (count(left), count(right));
    let in_other = |value: &Option<String>, other: &HashMap<Option<String>, u64>| match value {
        None if !nulls_equal => 0,
        value => other.get(value).copied().unwrap_or(0),
    };
    let pairs: u64 = left.iter().map(|(value, rows)| rows * in_other(value, &right)).sum();
    let matched = |of: &HashMap<Option<String>, u64>, other| -> u64 {
        of.iter().filter(|(value, _)| in_other(value, other) > 0).map(|(_, rows)| rows).sum()
    };
    let all = |of: &HashMap<Option<String>, u64>| of.values().sum::<u64>();
    let (left_matched, right_matched) = (matched(&left, &right), matched(&right, &left));
    let (left_unmatched, right_unmatched) = (all(&left) - left_matched, all(&right) - right_matched);
    match how {
        JoinKind::Inner => pairs,
        JoinKind::Left => pairs + left_unmatched,
        JoinKind::Right => pairs + right_unmatched,
        JoinKind::Full => pairs + left_unmatched + right_unmatched,
        JoinKind::LeftSemi => left_matched,
        JoinKind::LeftAnti => left_unmatched,
        JoinKind::RightSemi => right_matched,
        JoinKind::RightAnti => right_unmatched,
    }
}

fn numbers(values: impl IntoIterator<Item = i64>) -> ArrayRef {
    Arc::new(Int64Array::from_iter_values(values))
}

fn shuffled(values: impl IntoIterator<Item = i64>, random: &mut StdRng) -> ArrayRef {
    let mut values: Vec<i64> = values.into_iter().collect();
    values.shuffle(random);
    numbers(values)
}

/// Draws values from 0 to `distinct`, value n in proportion to 1 / (n + 1).
fn zipf(rows: usize, distinct: usize, random: &mut StdRng) -> ArrayRef {
    let mut sum = 0.0;
    let mut bound = |at: usize| {
        sum += 1.0 / (at + 1) as f64;
        sum
    };
    let bounds: Vec<f64> = (0..distinct).map(&mut bound).collect();
    numbers((0..rows).map(|_| {
        let drawn = random.random_range(0.0..bounds[distinct - 1]);
        bounds.partition_point(|&bound| bound <= drawn) as i64
    }))
}

/// Predicted rows over counted rows, for an inner join.
fn error_of(left: &ArrayRef, right: &ArrayRef, nulls_equal: bool) -> f64 {
    let estimates = Estimates::of(&join_of(left, right, JoinKind::Inner, nulls_equal), &Interrupt::default()).unwrap();
    estimates.rows / naive_rows(left, right, JoinKind::Inner, nulls_equal) as f64
}

#[test]
fn values_that_are_heavy_on_both_sides_multiply() {
    let random = &mut StdRng::seed_from_u64(5);
    let (left, right) = (zipf(100_000, 10_000, random), zipf(50_000, 10_000, random));
    let error = error_of(&left, &right, false);
    assert!((0.75..1.33).contains(&error), "two Zipf distributions: {error}");
    // Assuming equally frequent values predicted a seventieth of that.
    let evenly = 100_000.0 * 50_000.0 / 10_000.0;
    assert!(naive_rows(&left, &right, JoinKind::Inner, false) as f64 > 50.0 * evenly);

    // One value is on every hundredth row, among others that do not repeat.
    let one_heavy = |rows: i64| (0..rows).map(|row| if row % 100 == 0 { -1 } else { row });
    let (left, right) = (shuffled(one_heavy(200_000), random), shuffled(one_heavy(300_000), random));
    let error = error_of(&left, &right, false);
    assert!((0.6..1.6).contains(&error), "one heavy value: {error}");
}

#[test]
fn values_that_are_heavy_on_one_side_match_few_rows_of_the_other() {
    let random = &mut StdRng::seed_from_u64(6);
    // A fifth of each side's rows have one value, which one row of the other side has.
    let heavy = |value: i64| (0..100_000).chain((0..25_000).map(move |_| value));
    let error = error_of(&shuffled(heavy(7), random), &shuffled(heavy(70_000), random), false);
    assert!((0.7..1.4).contains(&error), "heavy on disjoint values: {error}");
    // Only heavy values, none of them on both sides.
    let few = |first: i64| (0..30_000).map(move |row| first + 2 * (row % 5));
    let join = join_of(&numbers(few(0)), &numbers(few(1)), JoinKind::Inner, false);
    assert_eq!(Estimates::of(&join, &Interrupt::default()).unwrap().rows, 0.0);
    // A dimension of few keys, and facts that mostly have one of these keys.
    let dimension = numbers(0..10);
    let facts = shuffled((0..50_000).map(|row| if row % 10 < 7 { 3 } else { row % 10 }), random);
    let error = error_of(&dimension, &facts, false);
    assert!((0.99..1.01).contains(&error), "each fact has one row of the dimension: {error}");
}

/// Clicks by Zipf's law on known articles, and as many or many more on other articles, with few
/// rows each.
#[test]
fn matching_frequent_values_are_distinguished_from_unmatched_rare_values() {
    let random = &mut StdRng::seed_from_u64(16);
    let articles = 100_000i64;
    let known = shuffled(0..articles, random);
    for one_in in [2, 16] {
        let strangers = articles * (one_in - 1);
        let clicks = zipf(400_000, articles as usize, random);
        let clicks = clicks.as_any().downcast_ref::<Int64Array>().unwrap();
        let mut click = |&article: &i64| match random.random_range(0..one_in) {
            0 => article.wrapping_mul(7919) % articles,
            _ => articles + random.random_range(0..strangers),
        };
        let clicks = numbers(clicks.values().iter().map(&mut click).collect::<Vec<_>>());
        for (left, right) in [(&known, &clicks), (&clicks, &known)] {
            let error = error_of(left, right, false);
            assert!((0.8..1.25).contains(&error), "one click in {one_in} has an article: {error}");
        }
        // The reverse: the values on many rows are the ones without a partner.
        let others = numbers(articles..articles + strangers);
        let error = error_of(&others, &clicks, false);
        assert!((0.8..1.25).contains(&error), "all but one click in {one_in} have another article: {error}");
    }
}

/// Orders, their items, and notes on orders. Their batches are dealt out to four streams in turn.
/// Each stream's keys were in order, but the tables' keys are not.
#[test]
fn tables_filled_by_several_streams_are_estimated_as_well_as_by_one() {
    let random = &mut StdRng::seed_from_u64(13);
    let mut repeated = |repeats: std::ops::RangeInclusive<usize>| -> Vec<i64> {
        (0..30_000).flat_map(|order| std::iter::repeat_n(4 * order, random.random_range(repeats.clone()))).collect()
    };
    let (orders, items, notes) = (repeated(1..=1), repeated(1..=7), repeated(0..=3));
    for streams in [1, 4] {
        let catalog = Catalog::new(Arena::new(Budget::new("host memory", "--host-memory", 64 << 20)));
        let uploads = Uploads::new(
            catalog.clone(),
            UploadsLimits { under_way: 4, of_tenant: None, idle: Duration::from_secs(600) },
        );
        for (name, keys) in [("orders", &orders), ("items", &items), ("notes", &notes)] {
            let batches: Vec<RecordBatch> = keys
                .chunks(2000)
                .map(|keys| RecordBatch::try_from_iter([("k", numbers(keys.to_vec()))]).unwrap())
                .collect();
            let options = UploadOptions { upload: Some(name.into()), ..UploadOptions::default() };
            let open = || uploads.open("", name, batches[0].schema(), options.clone()).unwrap();
            let mut parts: Vec<_> = (0..streams).map(|_| open()).collect();
            for (at, batch) in batches.into_iter().enumerate() {
                parts[at % streams].append(batch).unwrap();
            }
            for part in parts {
                part.finish(&Interrupt::default()).unwrap();
            }
            uploads.commit("", name, &Interrupt::default()).unwrap();
        }
        for (left, left_keys, right, right_keys) in [
            ("orders", &orders, "items", &items),
            ("items", &items, "orders", &orders),
            ("notes", &notes, "items", &items),
        ] {
            let spec = JoinSpec::inner(left, right, vec![KeyPair::new("k", "k")]);
            let estimates = Estimates::of(&bind(&spec, &catalog).unwrap(), &Interrupt::default()).unwrap();
            let rows = naive_rows(&numbers(left_keys.clone()), &numbers(right_keys.clone()), JoinKind::Inner, false);
            let error = estimates.rows / rows as f64;
            assert!((0.75..1.35).contains(&error), "{left} with {right}, {streams} streams: {error}");
        }
    }
}

#[test]
fn matching_nulls_count_as_one_more_value() {
    let random = &mut StdRng::seed_from_u64(7);
    let mut with_nulls = |rows: i32, null_share: f64| -> ArrayRef {
        Arc::new(Int32Array::from_iter((0..rows).map(|row| (!random.random_bool(null_share)).then_some(row))))
    };
    let (left, right) = (with_nulls(20_000, 0.3), with_nulls(30_000, 0.1));
    for (nulls_equal, most) in [(true, 30_000), (false, 20_000)] {
        let rows = naive_rows(&left, &right, JoinKind::Inner, nulls_equal);
        assert_eq!(rows > most, nulls_equal);
        let error = error_of(&left, &right, nulls_equal);
        assert!((0.8..1.25).contains(&error), "nulls equal {nulls_equal}: {error}");
    }
    let join = join_of(&left, &right, JoinKind::Inner, true);
    let nulls = left.null_count() as f64;
    assert!(estimate::heaviest_rows_max(&join, Side::Left) >= nulls, "{nulls} rows have no value, and match");
}

#[test]
fn heavy_values_are_equal_across_key_types() {
    let random = &mut StdRng::seed_from_u64(8);
    let wide = zipf(50_000, 1000, random);
    let text: ArrayRef = {
        let values = wide.as_any().downcast_ref::<Int64Array>().unwrap();
        Arc::new(StringArray::from_iter_values(values.values().iter().map(|value| format!("number {value}"))))
    };
    let dictionary = DataType::Dictionary(Box::new(DataType::UInt16), Box::new(DataType::Utf8));
    for (values, other_type) in [
        (&wide, DataType::Int32),
        (&wide, DataType::UInt16),
        (&text, DataType::Utf8View),
        (&text, DataType::LargeUtf8),
        (&text, dictionary),
    ] {
        let other = cast(values, &other_type).unwrap();
        let rows = naive_rows(values, values, JoinKind::Inner, false);
        let join = join_of(values, &other, JoinKind::Inner, false);
        let error = Estimates::of(&join, &Interrupt::default()).unwrap().rows / rows as f64;
        assert!((0.8..1.25).contains(&error), "{} and {other_type}: {error}", values.data_type());
    }
}

#[test]
fn heavy_keys_are_explained_by_their_values() {
    let random = &mut StdRng::seed_from_u64(9);
    let skewed = shuffled((0..50_000).map(|row| if row % 10 == 0 { 77 } else { row }), random);
    let join = join_of(&skewed, &numbers(0..50_000), JoinKind::Inner, false);
    let explanation = Explanation::new(&plan(join, None).unwrap(), "host:0", String::new(), None);
    let [heavy] = &explanation.left.heavy_keys[..] else { panic!("{:?}", explanation.left.heavy_keys) };
    assert_eq!(heavy.key, "77");
    assert!((4000..6000).contains(&heavy.rows), "{heavy:?}");
    assert_eq!(explanation.right.heavy_keys, []);
    assert!(explanation.to_string().contains("heavy keys: \"77\" on "), "{explanation}");
}

#[test]
fn a_chain_is_planned_with_the_rows_and_bytes_of_all_its_joins() {
    let catalog = Catalog::new(Arena::new(Budget::new("host memory", "--host-memory", 1 << 20)));
    let of_keys = |rows, payload| TableSpec { range: (0, 999), distinct: 1000.0, ..TableSpec::primary(rows, payload) };
    for (name, spec) in [("r", of_keys(1000, 1)), ("s", of_keys(1 << 20, 1)), ("u", of_keys(3000, 2))] {
        catalog.create(spec.build(name)).unwrap();
    }
    let on = || vec![KeyPair::new("k", "k")];
    let then = ThenSpec { table: "u".into(), label: None, on: on(), how: JoinKind::Inner };
    let alone = JoinSpec::inner("r", "s", on());
    let of = |spec: &JoinSpec| plan(bind(spec, &catalog).unwrap(), Some(Strategy::Hash)).unwrap();
    let (first, chain) = (of(&alone), of(&JoinSpec { then: vec![then], ..alone.clone() }));
    // Each row has a row of `r`, and three of `u`.
    let rows = f64::from(1 << 20);
    assert!((first.estimates.rows / rows - 1.0).abs() < 0.01, "{}", first.estimates.rows);
    assert!((chain.estimates.rows / rows - 3.0).abs() < 0.01, "{}", chain.estimates.rows);
    assert_eq!((first.row_bytes, chain.row_bytes), (12.0, 20.0));
    assert_eq!(chain.result_bytes, (20.0 * chain.estimates.rows) as u64);
    let task = chain.task().unwrap();
    let of_joins = task.then.iter().flat_map(|then| &then.joins).map(|task| task.expected.row_bytes);
    assert_eq!((task.expected.row_bytes, of_joins.collect::<Vec<_>>()), (12.0, vec![8.0]));
}
