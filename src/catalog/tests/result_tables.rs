//! Tests of results that become tables.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use arrow::array::{Float64Array, Int32Array};
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};

use super::adopting::every_layout;
use super::*;
use crate::catalog::{ResultSpool, SpoolOptions, Table, Upload};

/// Options of a result that becomes a table.
fn into(catalog: &Catalog) -> SpoolOptions {
    SpoolOptions {
        arena: Some(catalog.arena().clone()),
        becomes_table_in: Some(catalog.clone()),
        ..SpoolOptions::default()
    }
}

/// Cuts rows into batches of random lengths.
fn cut(rows: &RecordBatch, random: &mut StdRng) -> Vec<RecordBatch> {
    let (mut batches, mut start) = (Vec::new(), 0);
    while start < rows.num_rows() {
        let length = random.random_range(1..=rows.num_rows() - start);
        batches.push(rows.slice(start, length));
        start += length;
    }
    batches
}

/// Returns tables of the same batches: one was the result of a join, the other was uploaded.
fn made_and_uploaded(schema: SchemaRef, batches: &[RecordBatch]) -> [Arc<Table>; 2] {
    let catalog = catalog();
    let spool = ResultSpool::with_options(schema.clone(), into(&catalog));
    let mut upload = Upload::begin(&catalog, "uploaded", schema, UploadOptions::default()).unwrap();
    for batch in batches {
        spool.push(batch.clone()).unwrap();
        upload.append(batch.clone()).unwrap();
    }
    spool.wait_for_statistics().unwrap();
    let made = spool.into_table(catalog.reserve("made", "", "a result").unwrap(), "", None).unwrap();
    spool.finish(Ok(()));
    [made, upload.commit().unwrap()]
}

/// Samples of fewer than 8192 rows hold all rows. So even the estimates are equal.
#[test]
fn a_result_of_any_layout_becomes_the_same_table_as_an_upload_of_its_rows() {
    let mut random = StdRng::seed_from_u64(crate::testing::seed());
    for rows in [0, 1, 2, 65, 3000] {
        let all = every_layout(rows, &mut random);
        for _ in 0..4 {
            let batches = cut(&all, &mut random);
            let [made, uploaded] = made_and_uploaded(all.schema(), &batches);
            for (field, pair) in all.schema().fields().iter().zip(made.statistics.iter().zip(&uploaded.statistics)) {
                assert_eq!(pair.0, pair.1, "column {:?} of {rows} rows in {} batches", field.name(), batches.len());
            }
            assert_eq!((made.rows, made.bytes), (uploaded.rows, uploaded.bytes));
            assert_eq!((&made.sorted_by, &made.batches), (&uploaded.sorted_by, &uploaded.batches));
        }
    }
}

/// Columns of an ascending key, of the same keys in no order with nulls, of few values, of floats
/// and of text.
fn many(rows: i32, random: &mut StdRng) -> RecordBatch {
    let mut shuffled: Vec<i32> = (0..rows).collect();
    shuffled.shuffle(random);
    let columns: Vec<(&str, ArrayRef)> = vec![
        ("ascending", Arc::new(Int32Array::from_iter_values(0..rows))),
        ("shuffled", Arc::new(Int32Array::from_iter(shuffled.iter().map(|&n| (n % 7 > 0).then_some(n))))),
        ("few", Arc::new(Int32Array::from_iter_values(shuffled.iter().map(|n| n % 3)))),
        ("float", Arc::new(Float64Array::from_iter_values(shuffled.iter().map(|&n| f64::from(n) / 8.0)))),
        (
            "text",
            Arc::new(StringArray::from_iter_values(
                shuffled.iter().map(|n| format!("{n:0width$}", width = *n as usize % 12)),
            )),
        ),
    ];
    RecordBatch::try_from_iter_with_nullable(columns.into_iter().map(|(name, column)| (name, column, true))).unwrap()
}

#[test]
fn statistics_of_a_large_result_are_exact_where_those_of_an_upload_are() {
    let mut random = StdRng::seed_from_u64(crate::testing::seed());
    // The whole is more than one piece.
    let all = many(250_000, &mut random);
    for batches in [vec![all.clone()], cut(&all, &mut random), (0..50).map(|n| all.slice(n * 5000, 5000)).collect()] {
        let [made, uploaded] = made_and_uploaded(all.schema(), &batches);
        for (field, (made, uploaded)) in
            all.schema().fields().iter().zip(made.statistics.iter().zip(&uploaded.statistics))
        {
            let exact = |of: &crate::catalog::ColumnStatistics| {
                (of.nulls, of.min.clone(), of.max.clone(), of.ascending, of.unique_ascending, of.max_value_bytes)
            };
            assert_eq!(exact(made), exact(uploaded), "column {:?}", field.name());
            let ratio = made.distinct.unwrap() / uploaded.distinct.unwrap();
            assert!((0.7..1.4).contains(&ratio), "column {:?}: {ratio} times as many values", field.name());
            assert_eq!(made.heavy.len(), uploaded.heavy.len(), "column {:?}", field.name());
            let shares = (made.heaviest_share, uploaded.heaviest_share);
            assert!((shares.0 - shares.1).abs() < 0.05, "column {:?}: {shares:?}", field.name());
        }
        assert_eq!(made.sorted_by, [0]);
        assert_eq!(made.statistics[0].distinct, Some(250_000.0));
    }
}

#[test]
fn statistics_of_a_result_do_not_depend_on_threads() {
    let mut random = StdRng::seed_from_u64(3);
    let all = many(60_000, &mut random);
    let batches: Vec<_> = (0..60).map(|n| all.slice(n * 1000, 1000)).collect();
    let made = || made_and_uploaded(all.schema(), &batches)[0].statistics.clone();
    let first = made();
    (0..5).for_each(|_| assert_eq!(made(), first));
}

#[test]
fn an_interrupt_ends_the_statistics_and_no_thread_keeps_rows() {
    let mut random = StdRng::seed_from_u64(4);
    let all = many(2000, &mut random);
    for checks in 1..=5 {
        let catalog = catalog();
        let seen = AtomicUsize::new(0);
        let interrupt = Interrupt::by(move || match seen.fetch_add(1, Ordering::Relaxed) + 1 >= checks {
            true => Err(Error::Cancelled("enough".into())),
            false => Ok(()),
        });
        let spool = ResultSpool::with_options(all.schema(), SpoolOptions { interrupt, ..into(&catalog) });
        (0..100).for_each(|_| spool.push(all.clone()).unwrap());
        let outcome = spool.wait_for_statistics();
        // Other threads may be done before a later check.
        if checks == 1 || outcome.is_err() {
            assert_refused(outcome, is!(Cancelled), &["enough"]);
        }
        spool.finish(Err(Error::Cancelled("enough".into())));
        assert_eq!(catalog.arena().budget().used_bytes(), 0, "stopped at check {checks}");
    }
}

#[test]
fn a_released_result_stops_its_statistics() {
    let mut random = StdRng::seed_from_u64(5);
    let (all, catalog) = (many(2000, &mut random), catalog());
    let spool = ResultSpool::with_options(all.schema(), into(&catalog));
    (0..100).for_each(|_| spool.push(all.clone()).unwrap());
    spool.release();
    assert_refused(spool.wait_for_statistics(), is!(Cancelled), &["stopped"]);
    assert_eq!(catalog.arena().budget().used_bytes(), 0);
    let refused = spool.into_table(catalog.reserve("t", "", "a result").unwrap(), "", None);
    assert_refused(refused, is!(Precondition), &["failed, or is not kept"]);
}

#[test]
fn a_complete_result_becomes_a_table_that_outlives_it() {
    let catalog = limited(Some(1 << 20), None);
    let reservation = catalog.reserve("kept", "ada", "the result of job 1").unwrap();
    let begun = Upload::begin_for(&catalog, "ada", "kept", schema(), UploadOptions::default());
    assert_refused(begun, is!(AlreadyExists), &["the result of job 1"]);
    let options = SpoolOptions { charge: Some(catalog.charge("ada")), ..into(&catalog) };
    let spool = ResultSpool::with_options(schema(), options);
    spool.push(batch([1, 2])).unwrap();
    spool.push(batch([3])).unwrap();
    spool.finish(Ok(()));
    let table = spool.into_table(reservation, "ada", None).unwrap();
    assert_eq!(catalog.usage("ada").bytes, table.bytes, "charged once, though result and table share it");
    spool.release();
    assert_eq!((keys(&table.batches), table.rows, table.sorted_by.clone()), (vec![1, 2, 3], 3, vec![0]));
    assert_eq!(catalog.usage("ada").bytes, table.bytes);
    assert_eq!(catalog.table("kept").unwrap().owner, "ada");
}

#[test]
fn failed_consumed_and_other_results_become_no_table_and_free_the_name() {
    let catalog = catalog();
    let failed = ResultSpool::with_options(schema(), into(&catalog));
    failed.push(batch([1])).unwrap();
    failed.finish(Err(Error::Internal("x".into())));
    let consumed = SpoolOptions { retain: Duration::ZERO, ..into(&catalog) };
    let consumed = ResultSpool::with_options(schema(), consumed);
    consumed.push(batch([1])).unwrap();
    let not_asked_for = ResultSpool::new(schema());
    not_asked_for.push(batch([1])).unwrap();
    for spool in [failed, consumed, not_asked_for] {
        let refused = spool.into_table(catalog.reserve("t", "", "a result").unwrap(), "", None);
        assert_refused(refused, is!(Precondition), &["\"t\"", "failed, or is not kept"]);
    }
    catalog.reserve("t", "", "a result").unwrap();
}
