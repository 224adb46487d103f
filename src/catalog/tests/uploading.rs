use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use arrow::array::{ArrayRef, Float64Array, Int64Array, RecordBatch};
use arrow::datatypes::{DataType, Field, Schema};

use super::*;
use crate::catalog::{Editor, Finished, Table, Upload, UploadStream, Uploads, UploadsLimits, Value};
use crate::memory::Interrupt;

fn uploads(catalog: &Catalog) -> Uploads {
    Uploads::new(catalog.clone(), UploadsLimits { under_way: 8, of_tenant: None, idle: Duration::from_secs(60) })
}

fn upload(catalog: &Catalog, mode: UploadMode, batches: &[RecordBatch]) -> Result<Arc<Table>> {
    upload_with(catalog, options(mode), batches)
}

fn upload_with(catalog: &Catalog, options: UploadOptions, batches: &[RecordBatch]) -> Result<Arc<Table>> {
    let mut upload = Upload::begin(catalog, "t", schema(), options)?;
    for batch in batches {
        upload.append(batch.clone())?;
    }
    upload.commit()
}

#[test]
fn a_table_appears_with_the_commit_and_not_before() {
    let catalog = catalog();
    let mut upload = Upload::begin(&catalog, "t", schema(), UploadOptions::default()).unwrap();
    upload.append(batch([3, 1])).unwrap();
    assert!(catalog.table("t").is_err());
    assert!(catalog.tables().is_empty());
    upload.append(batch([])).unwrap();
    upload.append(batch([2])).unwrap();
    assert_eq!(upload.rows(), 3);
    let table = upload.commit().unwrap();
    assert_eq!((table.rows, table.batches.len()), (3, 2));
    assert_eq!(keys(&catalog.table("t").unwrap().batches), [3, 1, 2]);
    assert_eq!(table.statistics[0].max, Some(Value::Integer(3)));
}

#[test]
fn a_dropped_upload_leaves_neither_memory_nor_name() {
    let catalog = catalog();
    let mut upload = Upload::begin_for(&catalog, "ada", "t", schema(), UploadOptions::default()).unwrap();
    upload.append(batch(0..1000)).unwrap();
    assert!(catalog.arena().budget().used_bytes() > 0);
    assert!(catalog.usage("ada").bytes > 0);
    drop(upload);
    assert_eq!(catalog.arena().budget().used_bytes(), 0);
    assert_eq!(catalog.usage("ada"), Default::default());
    Upload::begin(&catalog, "t", schema(), UploadOptions::default()).unwrap();
}

#[test]
fn create_reserves_its_name_from_the_beginning() {
    let catalog = catalog();
    let first = Upload::begin(&catalog, "t", schema(), UploadOptions::default()).unwrap();
    for mode in [UploadMode::Create, UploadMode::Replace, UploadMode::CreateIfMissing] {
        let second = Upload::begin(&catalog, "t", schema(), options(mode));
        assert_refused(second, is!(AlreadyExists), &["\"t\"", "being uploaded"]);
    }
    first.commit().unwrap();
    assert_refused(upload(&catalog, UploadMode::Create, &[]), is!(AlreadyExists), &["replace or append"]);
}

#[test]
fn replace_publishes_the_new_table_and_readers_keep_the_old_one() {
    let catalog = catalog();
    let old = upload(&catalog, UploadMode::Replace, &[batch([1])]).unwrap();
    upload(&catalog, UploadMode::Replace, &[batch([2])]).unwrap();
    assert_eq!(keys(&catalog.table("t").unwrap().batches), [2]);
    assert_eq!(keys(&old.batches), [1]);
}

#[test]
fn append_shares_the_old_batches_and_merges_the_statistics() {
    let catalog = catalog();
    assert_refused(upload(&catalog, UploadMode::Append, &[]), is!(NotFound), &["\"t\""]);
    let old = upload(&catalog, UploadMode::Create, &[batch([1, 2])]).unwrap();
    assert_eq!(old.sketch(0, &Interrupt::default()).unwrap().unwrap().distinct(), 2.0);
    let together = |table: &Table| {
        let combination = table.combination(&[(0, false), (1, false)], &Interrupt::default()).unwrap().unwrap();
        (combination.sketch().distinct(), combination.sketch().repeats())
    };
    assert_eq!(
        (together(&old), old.sketch(0, &Interrupt::default()).unwrap().unwrap().repeats()),
        ((2.0, false), false)
    );
    let new = upload(&catalog, UploadMode::Append, &[batch([2, 5])]).unwrap();
    assert_eq!(new.sketch(0, &Interrupt::default()).unwrap().unwrap().distinct(), 3.0);
    assert!(new.sketch(0, &Interrupt::default()).unwrap().unwrap().repeats(), "2 is in both parts");
    assert_eq!(together(&new), together(&Table::from_batches("t", new.schema.clone(), new.batches.clone()).unwrap()));
    assert_eq!((old.rows, new.rows, keys(&new.batches)), (2, 4, vec![1, 2, 2, 5]));
    assert!(old.batches[0].column(0).to_data().ptr_eq(&new.batches[0].column(0).to_data()));
    let k = &new.statistics[0];
    assert_eq!((&k.min, &k.max, k.distinct), (&Some(Value::Integer(1)), &Some(Value::Integer(5)), Some(3.0)));
    assert!(k.ascending && !k.unique_ascending);
    assert_eq!(new.bytes, old.bytes + 2 * 8 + 3 * 4 + 12);
}

#[test]
fn create_if_missing_creates_the_table_once_and_then_appends() {
    let catalog = catalog();
    upload(&catalog, UploadMode::CreateIfMissing, &[batch([1])]).unwrap();
    upload(&catalog, UploadMode::CreateIfMissing, &[batch([2])]).unwrap();
    assert_eq!(keys(&catalog.table("t").unwrap().batches), [1, 2]);
}

#[test]
fn appended_rows_must_have_the_tables_columns() {
    let catalog = catalog();
    upload(&catalog, UploadMode::Create, &[batch([1])]).unwrap();
    let begin = |fields: Vec<Field>| {
        Upload::begin(&catalog, "t", Arc::new(Schema::new(fields)), options(UploadMode::Append)).map(|_| ())
    };
    let (k, name) = (Field::new("k", DataType::Int64, true), Field::new("name", DataType::Utf8, true));
    assert_refused(begin(vec![k.clone()]), is!(Invalid), &["2 columns", "1"]);
    let renamed = Field::new("nom", DataType::Utf8, true);
    assert_refused(begin(vec![k.clone(), renamed]), is!(Invalid), &["column 2", "\"name\"", "\"nom\""]);
    let narrow = Field::new("k", DataType::Int32, true);
    assert_refused(begin(vec![narrow, name.clone()]), is!(Invalid), &["of type int64 and is", "int32"]);
    let strict = k.with_nullable(false).with_metadata([("origin".to_string(), "test".to_string())].into());
    begin(vec![strict, name]).unwrap();
}

#[test]
fn types_that_differ_only_beyond_their_short_names_are_shown_in_full() {
    let catalog = catalog();
    let list = |has_nulls| {
        let field = Field::new("l", DataType::new_list(DataType::Int64, has_nulls), true);
        Arc::new(Schema::new(vec![field]))
    };
    Upload::begin(&catalog, "t", list(true), UploadOptions::default()).unwrap().commit().unwrap();
    let begun = Upload::begin(&catalog, "t", list(false), options(UploadMode::Append)).map(|_| ());
    assert_refused(begun, is!(Invalid), &["column 1 was \"l\" of type List(", "non-null"]);
}

#[test]
fn non_nullable_rows_are_appended_to_a_nullable_table() {
    let catalog = catalog();
    upload(&catalog, UploadMode::Create, &[batch([1])]).unwrap();
    let fields: Vec<Field> = schema().fields().iter().map(|field| (**field).clone().with_nullable(false)).collect();
    let strict = Arc::new(Schema::new(fields));
    let mut upload = Upload::begin(&catalog, "t", strict.clone(), options(UploadMode::Append)).unwrap();
    upload.append(RecordBatch::try_new(strict, batch([2]).columns().to_vec()).unwrap()).unwrap();
    let table = upload.commit().unwrap();
    assert_eq!(keys(&table.batches), [1, 2]);
    assert!(table.batches.iter().all(|batch| batch.schema() == table.schema));
}

#[test]
fn nullable_rows_without_nulls_are_appended_to_a_non_nullable_table() {
    let catalog = catalog();
    let fields: Vec<Field> = schema().fields().iter().map(|field| (**field).clone().with_nullable(false)).collect();
    let strict = Arc::new(Schema::new(fields));
    let mut created = Upload::begin(&catalog, "t", strict.clone(), options(UploadMode::Create)).unwrap();
    created.append(RecordBatch::try_new(strict.clone(), batch([1]).columns().to_vec()).unwrap()).unwrap();
    created.commit().unwrap();
    let table = upload(&catalog, UploadMode::Append, &[batch([2]), batch([3])]).unwrap();
    assert_eq!((keys(&table.batches), &table.schema), (vec![1, 2, 3], &strict));
    assert!(table.batches.iter().all(|batch| batch.schema() == strict));
    // The error names the row of the null, and no rows are added.
    let columns: Vec<ArrayRef> = vec![Arc::new(Int64Array::from(vec![Some(5), None])), batch([5, 6]).column(1).clone()];
    let with_null = RecordBatch::try_new(schema(), columns).unwrap();
    let refused = upload(&catalog, UploadMode::CreateIfMissing, &[batch([4]), with_null]);
    assert_refused(refused, is!(Invalid), &["\"t\"", "column \"k\" is declared not null", "row 3 has a null"]);
    assert_eq!(keys(&catalog.table("t").unwrap().batches), [1, 2, 3]);
    // The error for a schema that does not fit does not mention nullability.
    let fields = vec![Field::new("k", DataType::Int64, true), Field::new("name", DataType::Binary, true)];
    let begun = Upload::begin(&catalog, "t", Arc::new(Schema::new(fields)), options(UploadMode::Append)).map(|_| ());
    assert_refused(begun, is!(Invalid), &["column 2 was \"name\" of type string not null and is", "binary not null"]);
}

#[test]
fn a_schema_that_changes_in_mid_stream_is_refused_with_the_changed_column() {
    let catalog = catalog();
    let mut upload = Upload::begin(&catalog, "t", schema(), UploadOptions::default()).unwrap();
    upload.append(batch([1])).unwrap();
    let fields = vec![Field::new("k", DataType::Float64, true), Field::new("name", DataType::Utf8, true)];
    let columns: Vec<ArrayRef> = vec![Arc::new(Float64Array::from(vec![1.0])), batch([1]).column(1).clone()];
    let other = RecordBatch::try_new(Arc::new(Schema::new(fields)), columns).unwrap();
    assert_refused(upload.append(other), is!(Invalid), &["during the stream", "after 1 rows", "int64", "float64"]);
}

#[test]
fn schemas_without_columns_or_with_duplicate_names_are_refused() {
    let catalog = catalog();
    let begin = |fields: Vec<Field>| {
        Upload::begin(&catalog, "t", Arc::new(Schema::new(fields)), UploadOptions::default()).map(|_| ())
    };
    assert_refused(begin(vec![]), is!(Invalid), &["no columns"]);
    let twice = vec![Field::new("a", DataType::Int8, true), Field::new("a", DataType::Int8, true)];
    assert_refused(begin(twice), is!(Invalid), &["two columns", "\"a\""]);
}

#[test]
fn invalid_table_names_are_refused() {
    let catalog = catalog();
    let begin = |name: &str| Upload::begin(&catalog, name, schema(), UploadOptions::default()).map(|_| ());
    assert_refused(begin(""), is!(Invalid), &["empty"]);
    assert_refused(begin("line\nbreak"), is!(Invalid), &["control character"]);
    assert_refused(begin(&"x".repeat(256)), is!(Invalid), &["256 bytes", "255"]);
    begin(&"ü".repeat(127)).unwrap();
    begin("a name with spaces, and \"quotes\"").unwrap();
    let told = catalog.table(&"x".repeat(1 << 20)).unwrap_err();
    assert!(told.message().ends_with("xxx...\" (1,048,576 bytes)") && told.message().len() < 100, "{told}");
}

#[test]
fn unknown_columns_in_options_are_refused_at_the_beginning() {
    let catalog = catalog();
    let sorted = UploadOptions { sorted_by: vec!["key".into()], ..UploadOptions::default() };
    assert_refused(upload_with(&catalog, sorted, &[]), is!(Invalid), &["sorted_by", "\"key\"", "k, name"]);
    let unique = UploadOptions { unique: vec![vec!["k".into(), "id".into()]], ..UploadOptions::default() };
    assert_refused(upload_with(&catalog, unique, &[]), is!(Invalid), &["unique", "\"id\"", "k, name"]);
    let empty = UploadOptions { unique: vec![vec![]], ..UploadOptions::default() };
    assert_refused(upload_with(&catalog, empty, &[]), is!(Invalid), &["unique"]);
    upload(&catalog, UploadMode::Create, &[]).unwrap();
}

#[test]
fn a_declared_order_is_checked_and_the_first_row_that_breaks_it_is_named() {
    let catalog = catalog();
    let sorted = |columns: &[&str]| UploadOptions {
        sorted_by: columns.iter().map(|column| column.to_string()).collect(),
        ..UploadOptions::default()
    };
    let within = upload_with(&catalog, sorted(&["k"]), &[batch([1, 2]), batch([3, 2, 1])]);
    assert_refused(within, is!(Invalid), &["sorted by k", "row 4 (2)", "before it (3)"]);
    let across = upload_with(&catalog, sorted(&["k", "name"]), &[batch([1, 2]), batch([1])]);
    assert_refused(across, is!(Invalid), &["sorted by k, name", "row 3 (1, name 1)", "(2, name 2)"]);
    // By text, "name 10" comes before "name 9".
    let second = upload_with(&catalog, sorted(&["name"]), &[batch([9, 10])]);
    assert_refused(second, is!(Invalid), &["row 2 (name 10)"]);
    assert_eq!(catalog.arena().budget().used_bytes(), 0);
    let table = upload_with(&catalog, sorted(&["k", "name"]), &[batch([1, 1]), batch([1, 2])]).unwrap();
    assert_eq!(table.sorted_by, [0, 1]);
}

#[test]
fn the_order_of_floats_treats_both_zeros_as_equal_and_ends_with_every_nan() {
    let catalog = catalog();
    let fields = vec![Field::new("a", DataType::Float64, true), Field::new("b", DataType::Int64, true)];
    let schema = Arc::new(Schema::new(fields));
    let sorted = UploadOptions { sorted_by: vec!["a".into(), "b".into()], ..UploadOptions::default() };
    let upload = |name: &str, a: Vec<Option<f64>>, b: Vec<i64>| {
        let columns: Vec<ArrayRef> = vec![Arc::new(Float64Array::from(a)), Arc::new(Int64Array::from(b))];
        let mut upload = Upload::begin(&catalog, name, schema.clone(), sorted.clone()).unwrap();
        upload.append(RecordBatch::try_new(schema.clone(), columns).unwrap()).unwrap();
        upload.commit()
    };
    let nan = f64::NAN;
    upload("in order", vec![None, Some(0.0), Some(-0.0), Some(1.0), Some(nan), Some(-nan)], vec![9, 1, 2, 0, 1, 2])
        .unwrap();
    assert_refused(upload("zeros", vec![Some(0.0), Some(-0.0)], vec![2, 1]), is!(Invalid), &["row 2"]);
    assert_refused(upload("nulls", vec![Some(0.0), None], vec![1, 1]), is!(Invalid), &["row 2 (null, 1)"]);
}

#[test]
fn an_undeclared_order_is_detected() {
    let catalog = catalog();
    let create = |keys: Vec<i64>| upload(&catalog, UploadMode::Replace, &[batch(keys)]).unwrap().sorted_by.clone();
    assert_eq!(create(vec![1, 2, 2]), [0]);
    assert_eq!(create(vec![12, 2]), [1], "by text, names are in order");
    assert!(create(vec![2, 12, 1]).is_empty());
    assert!(create(vec![7, 7, 7]).is_empty(), "a column that never changes orders nothing");
}

#[test]
fn a_table_stays_sorted_if_the_appended_rows_continue_its_order() {
    let catalog = catalog();
    let sorted = |mode| UploadOptions { mode, sorted_by: vec!["k".into(), "name".into()], ..UploadOptions::default() };
    let create = || upload_with(&catalog, sorted(UploadMode::Replace), &[batch([5, 5])]).unwrap();
    create();
    let table = upload_with(&catalog, sorted(UploadMode::Append), &[batch([5, 6])]).unwrap();
    assert_eq!(table.sorted_by, [0, 1]);
    create();
    let table = upload_with(&catalog, sorted(UploadMode::Append), &[batch([4, 6])]).unwrap();
    assert!(table.sorted_by.is_empty(), "{:?}", table.sorted_by);
    assert!(!table.statistics[0].ascending);
}

#[test]
fn appends_from_many_threads_all_survive() {
    let catalog = catalog();
    upload(&catalog, UploadMode::Create, &[]).unwrap();
    let threads = 16;
    let start = Barrier::new(threads);
    std::thread::scope(|scope| {
        for thread in 0..threads as i64 {
            let (catalog, start) = (&catalog, &start);
            scope.spawn(move || {
                start.wait();
                for round in 0..20 {
                    upload(catalog, UploadMode::Append, &[batch([thread * 100 + round])]).unwrap();
                }
            });
        }
    });
    let table = catalog.table("t").unwrap();
    let mut found = keys(&table.batches);
    found.sort();
    let expected: Vec<i64> = (0..threads as i64).flat_map(|t| (0..20).map(move |round| t * 100 + round)).collect();
    assert_eq!(found, expected);
    assert_eq!((table.rows, table.statistics[0].distinct), (320, Some(320.0)));
}

#[test]
fn one_of_many_concurrent_creators_succeeds_and_the_others_are_refused() {
    for _ in 0..50 {
        let catalog = catalog();
        let start = Barrier::new(8);
        let wins: usize = std::thread::scope(|scope| {
            let create = |key| {
                let (catalog, start) = (&catalog, &start);
                scope.spawn(move || {
                    start.wait();
                    match upload(catalog, UploadMode::Create, &[batch([key])]) {
                        Ok(_) => 1,
                        Err(Error::AlreadyExists(_)) => 0,
                        Err(error) => panic!("{error:?}"),
                    }
                })
            };
            let threads: Vec<_> = (0..8).map(create).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).sum()
        });
        assert_eq!((wins, catalog.table("t").unwrap().rows), (1, 1));
    }
}

#[test]
fn concurrent_create_if_missing_uploads_lose_no_row() {
    for _ in 0..20 {
        let catalog = catalog();
        let start = Barrier::new(8);
        std::thread::scope(|scope| {
            for key in 0..8 {
                let (catalog, start) = (&catalog, &start);
                scope.spawn(move || {
                    start.wait();
                    upload(catalog, UploadMode::CreateIfMissing, &[batch([key])]).unwrap();
                });
            }
        });
        let mut found = keys(&catalog.table("t").unwrap().batches);
        found.sort();
        assert_eq!(found, (0..8).collect::<Vec<_>>());
    }
}

// ---- Several streams -------------------------------------------------------------------------

fn shared(part: Option<u64>) -> UploadOptions {
    UploadOptions { upload: Some("id".into()), part, ..UploadOptions::default() }
}

fn open(uploads: &Uploads, options: UploadOptions) -> Result<UploadStream> {
    uploads.open("ada", "t", schema(), options)
}

fn send(uploads: &Uploads, options: UploadOptions, keys: impl IntoIterator<Item = i64>) {
    let mut stream = open(uploads, options).unwrap();
    stream.append(batch(keys)).unwrap();
    assert!(matches!(stream.finish(&Interrupt::default()).unwrap(), Finished::Part { .. }));
}

#[test]
fn a_single_stream_is_an_upload_by_itself() {
    let catalog = catalog();
    let uploads = uploads(&catalog);
    let mut stream = open(&uploads, UploadOptions::default()).unwrap();
    assert_eq!(uploads.under_way(), 1);
    stream.append(batch([1])).unwrap();
    let Finished::Table(table) = stream.finish(&Interrupt::default()).unwrap() else { panic!("it was a part") };
    assert_eq!((table.rows, table.owner.as_str(), uploads.under_way()), (1, "ada", 0));
}

#[test]
fn several_streams_fill_one_table_that_appears_with_the_commit() {
    let catalog = catalog();
    let uploads = uploads(&catalog);
    send(&uploads, shared(Some(2)), [30, 31]);
    send(&uploads, shared(None), [40]);
    send(&uploads, shared(Some(1)), [10, 20]);
    assert!(catalog.table("t").is_err());
    assert_eq!(uploads.under_way(), 1);
    let table = uploads.commit("ada", "id", &Interrupt::default()).unwrap();
    assert_eq!(keys(&table.batches), [10, 20, 30, 31, 40], "numbered parts by number, then the others");
    assert_eq!(table.sorted_by, [0]);
    assert_eq!(uploads.under_way(), 0);
    assert!(
        Arc::ptr_eq(&table, &uploads.commit("ada", "id", &Interrupt::default()).unwrap()),
        "a repeated commit gives the same table"
    );
    assert_refused(open(&uploads, shared(None)), is!(AlreadyExists), &["\"id\"", "was committed"]);
}

#[test]
fn streams_of_one_upload_agree_on_table_schema_and_options() {
    let catalog = catalog();
    let uploads = uploads(&catalog);
    send(&uploads, shared(None), [1]);
    let elsewhere = uploads.open("ada", "u", schema(), shared(None));
    assert_refused(elsewhere, is!(Invalid), &["\"id\"", "table's name", "\"t\""]);
    let narrow = Arc::new(schema().project(&[0]).unwrap());
    assert_refused(uploads.open("ada", "t", narrow, shared(None)), is!(Invalid), &["the schema"]);
    let replace = UploadOptions { mode: UploadMode::Replace, ..shared(None) };
    assert_refused(open(&uploads, replace), is!(Invalid), &["the options"]);
    assert_eq!(uploads.commit("ada", "id", &Interrupt::default()).unwrap().rows, 1);
}

#[test]
fn an_upload_id_is_not_found_by_another_tenant() {
    let catalog = catalog();
    let uploads = uploads(&catalog);
    send(&uploads, shared(None), [1]);
    assert_refused(uploads.commit("eve", "id", &Interrupt::default()), is!(NotFound), &["\"id\""]);
    assert_refused(uploads.abort("eve", "id"), is!(NotFound), &["\"id\""]);
    assert_refused(uploads.open("eve", "t", schema(), shared(None)), is!(AlreadyExists), &["\"t\""]);
    uploads.commit("ada", "id", &Interrupt::default()).unwrap();
}

#[test]
fn a_broken_stream_discards_its_rows_and_leaves_the_upload_open() {
    let catalog = catalog();
    let uploads = uploads(&catalog);
    send(&uploads, shared(None), [1]);
    let mut killed = open(&uploads, shared(None)).unwrap();
    killed.append(batch([2])).unwrap();
    assert_refused(uploads.commit("ada", "id", &Interrupt::default()), is!(Precondition), &["1 of its streams"]);
    drop(killed);
    assert_eq!(keys(&uploads.commit("ada", "id", &Interrupt::default()).unwrap().batches), [1]);
}

#[test]
fn a_broken_numbered_part_must_be_sent_again() {
    let catalog = catalog();
    let uploads = uploads(&catalog);
    send(&uploads, shared(Some(0)), [1]);
    let killed = open(&uploads, shared(Some(1))).unwrap();
    assert_refused(open(&uploads, shared(Some(1))), is!(AlreadyExists), &["that part"]);
    drop(killed);
    assert_refused(uploads.commit("ada", "id", &Interrupt::default()), is!(Precondition), &["part 1", "again"]);
    send(&uploads, shared(Some(1)), [2]);
    assert_refused(open(&uploads, shared(Some(0))), is!(AlreadyExists), &["that part"]);
    assert_eq!(keys(&uploads.commit("ada", "id", &Interrupt::default()).unwrap().batches), [1, 2]);
}

#[test]
fn a_refused_commit_is_reported_as_refused_when_it_is_repeated() {
    let catalog = catalog();
    let uploads = uploads(&catalog);
    let sorted = UploadOptions { sorted_by: vec!["k".into()], ..shared(None) };
    send(&uploads, sorted, [2, 1]);
    assert_refused(uploads.commit("ada", "id", &Interrupt::default()), is!(Invalid), &["sorted by k"]);
    assert_refused(uploads.commit("ada", "id", &Interrupt::default()), is!(NotFound), &["was refused", "sorted by k"]);
}

#[test]
fn an_aborted_upload_leaves_neither_memory_nor_name() {
    let catalog = catalog();
    let uploads = uploads(&catalog);
    send(&uploads, shared(None), 0..1000);
    let mut open_still = open(&uploads, shared(None)).unwrap();
    uploads.abort("ada", "id").unwrap();
    assert_refused(open_still.append(batch([1])), is!(NotFound), &["was aborted"]);
    assert_refused(open_still.finish(&Interrupt::default()), is!(NotFound), &["was aborted"]);
    assert_refused(uploads.commit("ada", "id", &Interrupt::default()), is!(NotFound), &["was aborted"]);
    assert_refused(uploads.abort("ada", "never"), is!(NotFound), &["there is no upload"]);
    assert_eq!(catalog.arena().budget().used_bytes(), 0);
    assert_eq!(catalog.usage("ada"), Default::default());
    upload(&catalog, UploadMode::Create, &[]).unwrap();
}

#[test]
fn an_idle_upload_is_forgotten() {
    let catalog = catalog();
    let uploads = uploads(&catalog);
    send(&uploads, shared(None), 0..1000);
    assert!(uploads.forget_idle(Instant::now() + Duration::from_secs(59)).is_empty());
    let forgotten = uploads.forget_idle(Instant::now() + Duration::from_secs(61));
    assert_eq!(forgotten, [("ada".to_string(), "id".to_string())]);
    assert_refused(
        uploads.commit("ada", "id", &Interrupt::default()),
        is!(NotFound),
        &["dropped with its rows", "60 s"],
    );
    assert_eq!(catalog.arena().budget().used_bytes(), 0);
}

#[test]
fn rows_out_of_their_declared_order_end_the_upload_at_its_commit() {
    let catalog = catalog();
    let uploads = uploads(&catalog);
    let sorted = |part| UploadOptions { sorted_by: vec!["k".into()], ..shared(Some(part)) };
    send(&uploads, sorted(0), [2, 3]);
    send(&uploads, sorted(1), [1, 2]);
    assert_refused(uploads.commit("ada", "id", &Interrupt::default()), is!(Invalid), &["\"t\"", "row 3 (1)"]);
    assert_eq!((catalog.arena().budget().used_bytes(), uploads.under_way()), (0, 0));
}

#[test]
fn a_commit_refused_by_the_table_limit_can_be_repeated() {
    let catalog = limited(None, Some(1));
    let uploads = uploads(&catalog);
    let replace = UploadOptions { mode: UploadMode::Replace, ..shared(None) };
    send(&uploads, replace, [1]);
    Upload::begin_for(&catalog, "ada", "other", schema(), UploadOptions::default()).unwrap().commit().unwrap();
    assert_refused(uploads.commit("ada", "id", &Interrupt::default()), is!(Exhausted), &["--tenant-tables"]);
    catalog.drop_table("other", &Editor::admin("")).unwrap();
    assert_eq!(keys(&uploads.commit("ada", "id", &Interrupt::default()).unwrap().batches), [1]);
}

#[test]
fn uploads_over_the_limit_are_refused() {
    let catalog = catalog();
    let uploads = uploads(&catalog);
    let name = |index: usize| format!("t{index}");
    let begin = |index: usize| uploads.open("ada", &name(index), schema(), UploadOptions::default());
    let mut streams: Vec<_> = (0..7).map(|index| begin(index).unwrap()).collect();
    send(&uploads, shared(None), [1]);
    send(&uploads, shared(None), [2]);
    assert_refused(begin(9), is!(Exhausted), &["8 uploads", "--upload-limit"]);
    streams.pop();
    begin(9).unwrap();
}

#[test]
fn a_tenant_leaves_uploads_to_the_others() {
    let catalog = catalog();
    let limits = UploadsLimits { under_way: 3, of_tenant: Some(2), idle: Duration::from_secs(60) };
    let uploads = Uploads::new(catalog.clone(), limits);
    let open = |tenant: &str, name: &str, id: Option<&str>| {
        let options = UploadOptions { upload: id.map(Into::into), ..UploadOptions::default() };
        uploads.open(tenant, name, schema(), options)
    };
    let single = open("ann", "a", None).unwrap();
    let shared = open("ann", "b", Some("id")).unwrap();
    for id in [None, Some("other")] {
        assert_refused(open("ann", "c", id), is!(Exhausted), &["\"ann\" has 2 uploads", "--tenant-uploads"]);
    }
    let more = open("ann", "b", Some("id")).unwrap();
    let of_bob = open("bob", "c", None).unwrap();
    assert_refused(open("bob", "d", None), is!(Exhausted), &["3 uploads", "--upload-limit"]);
    // Each way in which an upload ends makes room.
    drop(single);
    let single = open("ann", "a", None).unwrap();
    assert!(matches!(single.finish(&Interrupt::default()).unwrap(), Finished::Table(_)));
    drop((shared, more));
    uploads.abort("ann", "id").unwrap();
    assert_refused(open("ann", "a", None), is!(AlreadyExists), &["\"a\""]);
    let both = ["d", "e"].map(|name| open("ann", name, None).unwrap());
    assert_eq!(uploads.under_way(), 3);
    drop((both, of_bob));
    assert_eq!(uploads.under_way(), 0);
}

#[test]
fn the_bytes_of_an_upload_are_those_of_all_its_streams() {
    let uploads =
        Uploads::new(catalog(), UploadsLimits { under_way: 8, of_tenant: None, idle: Duration::from_secs(60) });
    let mut single = uploads.open("ada", "alone", schema(), UploadOptions::default()).unwrap();
    single.append(batch([1, 2])).unwrap();
    assert!(single.bytes() > 0);
    assert_eq!(single.upload_bytes(), single.bytes());
    let of_two_rows = single.bytes();
    send(&uploads, shared(None), 0..2);
    let [mut first, mut second] = [(); 2].map(|()| open(&uploads, shared(None)).unwrap());
    first.append(batch([3, 4])).unwrap();
    second.append(batch([5, 6])).unwrap();
    assert_eq!((second.bytes(), second.upload_bytes()), (of_two_rows, 3 * of_two_rows));
    drop(second);
    assert_eq!(first.upload_bytes(), 2 * of_two_rows, "the rows of a stream that broke off are gone");
}

#[test]
fn streams_without_rows_do_not_keep_an_upload() {
    let uploads =
        Uploads::new(catalog(), UploadsLimits { under_way: 8, of_tenant: None, idle: Duration::from_millis(300) });
    send(&uploads, shared(None), 0..3);
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_secs(60) {
        if let Ok(mut empty) = open(&uploads, shared(None)) {
            let _ = empty.append(batch([]));
            let _ = empty.finish(&Interrupt::default());
        }
        if !uploads.forget_idle(Instant::now()).is_empty() {
            return;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    panic!("empty batches kept the upload");
}

#[test]
fn parallel_streams_from_many_threads_lose_no_row() {
    let catalog = catalog();
    let uploads = uploads(&catalog);
    std::thread::scope(|scope| {
        for part in 0..8 {
            let uploads = &uploads;
            scope.spawn(move || {
                let mut stream = open(uploads, shared(Some(part))).unwrap();
                (0..50).for_each(|row| stream.append(batch([part as i64 * 50 + row])).unwrap());
                stream.finish(&Interrupt::default()).unwrap();
            });
        }
    });
    let table = uploads.commit("ada", "id", &Interrupt::default()).unwrap();
    assert_eq!(keys(&table.batches), (0..400).collect::<Vec<_>>());
    assert!(table.statistics[0].unique_ascending);
}

#[test]
fn a_temporary_table_is_dropped_when_its_time_is_over() {
    let catalog = catalog();
    let temporary = |mode, seconds| UploadOptions { temporary_seconds: Some(seconds), ..options(mode) };
    let begin = |options| Upload::begin(&catalog, "t", schema(), options);
    assert_refused(begin(temporary(UploadMode::Create, 0)).map(|_| ()), is!(Invalid), &["from 1 to 86400"]);
    assert_refused(begin(temporary(UploadMode::Create, 86_401)).map(|_| ()), is!(Invalid), &["86401"]);
    for mode in [UploadMode::Append, UploadMode::CreateIfMissing] {
        assert_refused(begin(temporary(mode, 9)).map(|_| ()), is!(Invalid), &["temporary_seconds", "leave it out"]);
    }
    let used = catalog.arena().budget().used_bytes();
    let made = upload_with(&catalog, temporary(UploadMode::Create, 60), &[batch([1, 2])]).unwrap();
    let expires = made.expires.unwrap();
    drop(made);
    upload(&catalog, UploadMode::Append, &[batch([3])]).unwrap();
    Upload::begin(&catalog, "other", schema(), options(UploadMode::Create)).unwrap().commit().unwrap();
    assert_eq!(catalog.table("t").unwrap().expires, Some(expires));
    let moment = Duration::from_millis(1);
    assert!(catalog.drop_expired(expires - moment).is_empty());
    let over: Vec<String> = catalog.drop_expired(expires).iter().map(|table| table.name.clone()).collect();
    assert_eq!(over, ["t"]);
    assert!(catalog.table("t").is_err() && catalog.table("other").is_ok());
    catalog.drop_table("other", &Editor::from("")).unwrap();
    assert_eq!(catalog.arena().budget().used_bytes(), used);
}
