use super::*;
use crate::catalog::{Editor, IntoMode, Table, TenantUsage, Upload};

fn table(name: &str, owner: &str) -> Table {
    let mut table = Table::from_batches(name, schema(), vec![batch([1, 2])]).unwrap();
    table.owner = owner.into();
    table
}

fn upload(catalog: &Catalog, editor: impl Into<Editor>, name: &str, mode: UploadMode, rows: i64) -> Result<()> {
    let mut upload = Upload::begin_for(catalog, editor, name, schema(), options(mode))?;
    upload.append(batch(0..rows))?;
    upload.commit().map(|_| ())
}

#[test]
fn a_reserved_name_is_taken_until_the_reservation_is_used_or_dropped() {
    let catalog = catalog();
    let mut reservation = catalog.reserve("t", "ada", "the result of job 7").unwrap();
    assert_refused(catalog.reserve("t", "ada", "x"), is!(AlreadyExists), &["\"t\"", "the result of job 7"]);
    // Other tenants must not learn of the job.
    assert_refused(
        catalog.reserve("t", "eve", "x"),
        is!(AlreadyExists),
        &["\"t\"", "it is being made by another tenant"],
    );
    assert_refused(catalog.create(table("t", "")), is!(AlreadyExists), &["another tenant"]);
    assert_refused(catalog.replace(table("t", ""), &Editor::admin("")), is!(AlreadyExists), &["job 7"]);
    assert!(catalog.table("t").is_err());
    reservation.publish(table("another name", "ada")).unwrap();
    assert_eq!(catalog.table("t").unwrap().name, "t");
    // Dropping a used reservation does not affect a later reservation of the name.
    catalog.drop_table("t", &Editor::admin("")).unwrap();
    let second = catalog.reserve("t", "ada", "job 8").unwrap();
    drop(reservation);
    assert_refused(catalog.reserve("t", "ada", "x"), is!(AlreadyExists), &["job 8"]);
    drop(second);
    catalog.create(table("t", "")).unwrap();
}

#[test]
fn tables_are_listed_by_name_and_dropped_once() {
    let catalog = catalog();
    for name in ["b", "c", "a"] {
        catalog.create(table(name, "")).unwrap();
    }
    let names: Vec<_> = catalog.tables().iter().map(|table| table.name.clone()).collect();
    assert_eq!(names, ["a", "b", "c"]);
    catalog.drop_table("b", &Editor::admin("")).unwrap();
    assert_refused(catalog.drop_table("b", &Editor::admin("")), is!(NotFound), &["\"b\""]);
}

#[test]
fn the_number_of_tables_of_a_tenant_is_limited() {
    let catalog = limited(None, Some(2));
    upload(&catalog, "ada", "a", UploadMode::Create, 1).unwrap();
    let reserved = catalog.reserve("r", "ada", "job 1").unwrap();
    assert_refused(
        upload(&catalog, "ada", "b", UploadMode::Create, 1),
        is!(Exhausted),
        &["\"ada\"", "1 table and 1 being created", "its limit is 2", "--tenant-tables"],
    );
    upload(&catalog, "eve", "b", UploadMode::Create, 1).unwrap();
    drop(reserved);
    upload(&catalog, "ada", "c", UploadMode::Create, 1).unwrap();
    upload(&catalog, "ada", "c", UploadMode::Replace, 1).unwrap();
    assert_eq!(catalog.usage("ada").tables, 2);
    assert_refused(upload(&catalog, "ada", "d", UploadMode::Replace, 1), is!(Exhausted), &["its limit is 2"]);
    assert!(catalog.table("d").is_err());
}

/// Checks the name before, during and after a reservation that replaces its table.
#[test]
fn a_result_replaces_a_table_only_if_its_owner_may_change_the_table() {
    let catalog = limited(None, Some(2));
    upload(&catalog, "ada", "a", UploadMode::Create, 5).unwrap();
    let reserve = |tenant: &Editor, mode| catalog.reserve_for_result("a", tenant, mode, "the result of job 7");
    let (ada, eve) = (Editor::from("ada"), Editor::from("eve"));
    assert_refused(reserve(&ada, IntoMode::Create), is!(AlreadyExists), &["\"a\" exists already", "into_mode replace"]);
    assert_refused(reserve(&eve, IntoMode::Replace), is!(Denied), &["\"ada\""]);
    let mut reserved = reserve(&ada, IntoMode::Replace).unwrap();
    assert_eq!(catalog.table("a").unwrap().rows, 5);
    for mode in [UploadMode::Replace, UploadMode::Append] {
        assert_refused(upload(&catalog, "ada", "a", mode, 1), is!(AlreadyExists), &["the result of job 7"]);
    }
    // The reservation does not count as another table of its owner.
    upload(&catalog, "ada", "b", UploadMode::Create, 1).unwrap();
    reserved.publish(table("", "ada")).unwrap();
    assert_eq!(catalog.table("a").unwrap().rows, 2);
    drop(reserved);
    // A dropped reservation leaves the table as it was. The place of a table that was dropped
    // meanwhile stays reserved.
    drop(reserve(&ada, IntoMode::Replace).unwrap());
    let mut reserved = reserve(&Editor::admin("root"), IntoMode::Replace).unwrap();
    reserved.publish(table("", "root")).unwrap();
    assert_eq!(catalog.table("a").unwrap().owner, "ada", "a table stays its owner's");
    let mut reserved = reserve(&ada, IntoMode::Replace).unwrap();
    catalog.drop_table("a", &ada).unwrap();
    assert_refused(
        upload(&catalog, "ada", "c", UploadMode::Create, 1),
        is!(Exhausted),
        &["1 table and 1 being created"],
    );
    reserved.publish(table("", "ada")).unwrap();
    assert_eq!(catalog.usage("ada").tables, 2);
}

#[test]
fn the_bytes_of_a_tenant_are_limited() {
    let catalog = limited(Some(250_000), None);
    upload(&catalog, "ada", "a", UploadMode::Create, 2000).unwrap();
    let held = catalog.usage("ada").bytes;
    assert!((catalog.table("a").unwrap().bytes..250_000).contains(&held), "{held} bytes");
    let refused = upload(&catalog, "ada", "b", UploadMode::Create, 4000);
    assert_refused(refused, is!(Exhausted), &["\"ada\"", "--tenant-memory"]);
    assert_eq!(catalog.usage("ada").bytes, held);
    upload(&catalog, "eve", "b", UploadMode::Create, 3000).unwrap();
    // A reader keeps a dropped table's memory, and its charge.
    let reader = catalog.drop_table("a", &Editor::admin("")).unwrap();
    assert_eq!(catalog.usage("ada"), TenantUsage { bytes: held, tables: 0 });
    drop(reader);
    assert_eq!(catalog.usage("ada"), TenantUsage::default());
    assert_eq!(catalog.usage_of_all().into_keys().collect::<Vec<_>>(), ["eve"]);
}

#[test]
fn the_metadata_of_a_table_is_kept_and_charged_until_its_last_reader_is_done() {
    let catalog = limited(Some(100_000), None);
    let text = |bytes: usize| [("origin".to_string(), "x".repeat(bytes))].into();
    let with_metadata = |of_table: usize, of_column: usize| {
        let k = Field::new("k", DataType::Int64, true).with_metadata(text(of_column));
        Arc::new(Schema::new_with_metadata(vec![k, schema().field(1).clone()], text(of_table)))
    };
    let begin =
        |name: &str, schema: &SchemaRef, mode| Upload::begin_for(&catalog, "ada", name, schema.clone(), options(mode));
    let schema = with_metadata(1000, 2000);
    let mut one = begin("t", &schema, UploadMode::Create).unwrap();
    assert!((3000..4000).contains(&catalog.usage("ada").bytes), "an upload under way is charged");
    let rows = batch([1, 2]);
    one.append(RecordBatch::try_new(schema.clone(), rows.columns().to_vec()).unwrap()).unwrap();
    let table = one.commit().unwrap();
    assert_eq!((&table.schema, table.batches[0].schema_ref()), (&schema, &schema));
    let held = catalog.usage("ada").bytes;
    assert!((3000 + table.bytes..7000 + table.bytes).contains(&held), "{held} B with {} B of rows", table.bytes);
    assert!(catalog.arena().budget().used_bytes() > 3000);
    // Appended rows take the schema of the table, and their own metadata is dropped.
    begin("t", &with_metadata(5000, 0), UploadMode::Append).unwrap().commit().unwrap();
    assert_eq!((catalog.usage("ada").bytes, &catalog.table("t").unwrap().schema), (held, &schema));
    let refused = begin("u", &with_metadata(50_000, 50_000), UploadMode::Create);
    assert_refused(refused, is!(Exhausted), &["\"ada\"", "--tenant-memory"]);
    assert_eq!(catalog.usage("ada").bytes, held);
    assert!(catalog.table("u").is_err() && catalog.reserve("u", "eve", "x").is_ok());
    catalog.drop_table("t", &"ada".into()).unwrap();
    assert_eq!(catalog.usage("ada").bytes, held, "a reader has it");
    drop(table);
    assert!(catalog.usage_of_all().is_empty());
    assert_eq!(catalog.arena().budget().used_bytes(), 0);
}

/// Regression test: every batch kept the schema that its own stream had read.
#[test]
fn the_rows_of_all_streams_of_an_upload_share_one_schema() {
    use crate::catalog::{Finished, Uploads, UploadsLimits};
    let limits = UploadsLimits { under_way: 4, of_tenant: None, idle: std::time::Duration::from_secs(60) };
    let uploads = Uploads::new(catalog(), limits);
    let options = UploadOptions { upload: Some("id".into()), ..UploadOptions::default() };
    for _ in 0..2 {
        let mut stream = uploads.open("ada", "t", schema(), options.clone()).unwrap();
        stream.append(batch([1, 2])).unwrap();
        assert!(matches!(stream.finish(&Interrupt::default()).unwrap(), Finished::Part { .. }));
    }
    let table = uploads.commit("ada", "id", &Interrupt::default()).unwrap();
    assert_eq!(table.batches.len(), 2);
    assert!(table.batches.iter().all(|batch| Arc::ptr_eq(batch.schema_ref(), &table.schema)));
}

#[test]
fn appended_bytes_are_charged_to_the_appending_tenant() {
    let catalog = limited(Some(100_000), None);
    upload(&catalog, "ada", "t", UploadMode::Create, 10).unwrap();
    let before = catalog.usage("ada").bytes;
    upload(&catalog, Editor::admin("eve"), "t", UploadMode::Append, 20).unwrap();
    let table = catalog.table("t").unwrap();
    assert_eq!((table.owner.as_str(), catalog.usage("ada").bytes), ("ada", before));
    assert!(before + catalog.usage("eve").bytes > table.bytes);
    drop(table);
    catalog.drop_table("t", &Editor::admin("")).unwrap();
    assert!(catalog.usage_of_all().is_empty());
}

#[test]
fn a_table_is_changed_only_by_its_owner_and_admins() {
    let catalog = catalog();
    upload(&catalog, "ada", "t", UploadMode::Create, 10).unwrap();
    for mode in [UploadMode::Replace, UploadMode::Append, UploadMode::CreateIfMissing] {
        let begun = Upload::begin_for(&catalog, "eve", "t", schema(), options(mode));
        assert_refused(begun, is!(Denied), &["\"t\"", "\"ada\"", "an admin"]);
    }
    assert_refused(catalog.drop_table("t", &"eve".into()), is!(Denied), &["\"t\"", "\"ada\"", "dropped"]);
    upload(&catalog, Editor::admin("root"), "t", UploadMode::Replace, 20).unwrap();
    let table = catalog.table("t").unwrap();
    assert_eq!((table.owner.as_str(), table.rows), ("ada", 20), "it stays its owner's");
    upload(&catalog, "ada", "t", UploadMode::Append, 5).unwrap();
    catalog.drop_table("t", &"ada".into()).unwrap();
}

#[test]
fn a_table_that_appears_during_an_upload_is_not_overwritten_by_another_tenant() {
    for mode in [UploadMode::Replace, UploadMode::CreateIfMissing] {
        let catalog = catalog();
        let mut begun_before = Upload::begin_for(&catalog, "eve", "t", schema(), options(mode)).unwrap();
        begun_before.append(batch([7])).unwrap();
        upload(&catalog, "ada", "t", UploadMode::Create, 10).unwrap();
        assert_refused(begun_before.commit(), is!(Denied), &["\"t\"", "\"ada\""]);
        let table = catalog.table("t").unwrap();
        assert_eq!((table.owner.as_str(), table.rows), ("ada", 10));
    }
}
