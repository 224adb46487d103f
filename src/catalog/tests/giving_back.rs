//! Tests that memory comes back at once when what held it is gone.

use std::time::Duration;

use arrow::array::{DictionaryArray, Int8Array};
use tokio::runtime::Runtime;

use super::*;
use crate::catalog::{
    Editor, IntoMode, ResultReader, ResultSpool, SpoolOptions, Table, Upload, Uploads, UploadsLimits,
};

/// Catalog whose arena starts empty.
struct Memory(Catalog);

impl Memory {
    fn new() -> Self {
        Self(Catalog::with_limits(
            arena_of(64 << 20),
            TenantLimits { bytes: Some(64 << 20), results_bytes: None, tables: None },
        ))
    }

    /// Asserts the bytes in use of the arena and on the account of the tenant `ada`.
    #[track_caller]
    fn assert_holds(&self, bytes: u64, what: &str) {
        let used = (self.0.arena().budget().used_bytes(), self.0.usage("ada").bytes);
        assert_eq!(used, (bytes, bytes), "{what}");
    }

    #[track_caller]
    fn assert_empty(&self, what: &str) {
        self.assert_holds(0, what);
    }

    /// Makes the result of a join that becomes table `kept`. Its batches have a size that an arena
    /// does not round up.
    fn result(&self) -> ResultSpool {
        let options = SpoolOptions {
            arena: Some(self.0.arena().clone()),
            charge: Some(self.0.charge("ada")),
            becomes_table_in: Some(self.0.clone()),
            ..SpoolOptions::default()
        };
        let spool = ResultSpool::with_options(keys_of(0).schema(), options);
        (0..BATCHES).for_each(|_| spool.push(keys_of(1024)).unwrap());
        spool
    }

    fn keep(&self, spool: &ResultSpool) -> Arc<Table> {
        let name = self.0.reserve_for_result("kept", &"ada".into(), IntoMode::Replace, "a result").unwrap();
        let table = spool.into_table(name, "ada", None).unwrap();
        spool.finish(Ok(()));
        table
    }

    fn drop_kept(&self) {
        self.0.drop_table("kept", &"ada".into()).unwrap();
    }
}

const BATCHES: usize = 4;
const BATCH_BYTES: u64 = 8 * 1024;
const RESULT_BYTES: u64 = BATCHES as u64 * BATCH_BYTES;

fn keys_of(rows: i64) -> RecordBatch {
    let keys: ArrayRef = Arc::new(Int64Array::from_iter_values(0..rows));
    RecordBatch::try_from_iter([("k", keys)]).unwrap()
}

fn next(reader: &mut ResultReader) -> Result<Option<RecordBatch>> {
    Runtime::new().unwrap().block_on(reader.next())
}

/// Regression test: each replaced table stayed in memory until the lease of its join ended.
#[test]
fn a_result_that_became_a_table_holds_nothing_beside_it() {
    let memory = Memory::new();
    let mut results = Vec::new();
    for _ in 0..5 {
        let spool = memory.result();
        drop(memory.keep(&spool));
        memory.assert_holds(RESULT_BYTES, "of all results, only the last table is held");
        assert_eq!((spool.held_bytes(), spool.returning_bytes(), spool.waiting_bytes()), (0, 0, 0));
        results.push(spool);
    }
    let [replaced @ .., last] = &results[..] else { panic!("there are five results") };
    assert!(replaced.iter().all(|spool| spool.is_gone() && spool.is_released()));
    assert!(!last.is_gone() && !last.is_released());
    let refused = next(&mut replaced[0].reader(0, 1));
    assert_refused(refused, is!(NotFound), &["table \"kept\"", "dropped or replaced", "run the join again"]);
    assert_refused(replaced[0].renew(Duration::from_secs(9)), is!(NotFound), &["table \"kept\""]);
    // The table can be read as the result that it was.
    let mut reader = last.reader(1, 2);
    assert_eq!([(); 3].map(|()| next(&mut reader).unwrap().is_some()), [true, true, false]);
    drop(reader);
    memory.drop_kept();
    memory.assert_empty("the table was dropped");
    assert!(last.is_gone());
}

#[test]
fn an_open_reader_keeps_the_table_that_its_result_became() {
    let memory = Memory::new();
    let spool = memory.result();
    let mut before = spool.reader(0, 1);
    next(&mut before).unwrap().unwrap();
    drop(memory.keep(&spool));
    let mut after = spool.reader(0, 1);
    memory.drop_kept();
    memory.assert_holds(RESULT_BYTES, "two readers are open");
    for (reader, left) in [(&mut before, BATCHES - 1), (&mut after, BATCHES)] {
        (0..left).for_each(|_| assert!(next(reader).unwrap().is_some()));
        assert!(next(reader).unwrap().is_none());
    }
    drop(before);
    memory.assert_holds(RESULT_BYTES, "a reader is open");
    drop(after);
    memory.assert_empty("the last reader has gone");
}

#[test]
fn a_result_that_is_released_leaves_the_table_that_it_became() {
    let memory = Memory::new();
    let spool = memory.result();
    let reader = spool.reader(0, 1);
    drop(memory.keep(&spool));
    spool.release();
    assert_refused(next(&mut spool.reader(0, 1)), is!(NotFound), &["the result is gone"]);
    memory.assert_holds(RESULT_BYTES, "the table is in the catalog");
    memory.drop_kept();
    memory.assert_empty("the table was dropped, and the open reader was told that the result is gone");
    drop(reader);
}

/// Regression test: the last dictionary stayed until the result was forgotten, half a minute later.
#[test]
fn a_result_that_was_read_keeps_no_dictionary() {
    let memory = Memory::new();
    let values = StringArray::from_iter_values((0..100).map(|value| format!("value {value}")));
    let column: ArrayRef = Arc::new(DictionaryArray::new(Int8Array::from_iter_values(0..100), Arc::new(values)));
    let batch = RecordBatch::try_from_iter([("d", column)]).unwrap();
    let options = SpoolOptions {
        arena: Some(memory.0.arena().clone()),
        charge: Some(memory.0.charge("ada")),
        retain: Duration::ZERO,
        ..SpoolOptions::default()
    };
    let spool = ResultSpool::with_options(batch.schema(), options);
    spool.push(batch).unwrap();
    spool.finish(Ok(()));
    assert!(memory.0.arena().budget().used_bytes() > 0);
    let mut reader = spool.reader(0, 1);
    assert!(next(&mut reader).unwrap().is_some());
    memory.assert_empty("all rows were read");
}

#[test]
fn uploads_hold_nothing_once_their_table_or_their_client_is_gone() {
    let memory = Memory::new();
    let ada = || Editor::from("ada");
    let limits = UploadsLimits { under_way: 8, of_tenant: None, idle: Duration::from_secs(60) };
    let uploads = Uploads::new(memory.0.clone(), limits);
    let send = |id: Option<&str>, mode: UploadMode| {
        let options = UploadOptions { upload: id.map(str::to_owned), ..options(mode) };
        let mut stream = uploads.open(ada(), "t", schema(), options).unwrap();
        stream.append(batch(0..1000)).unwrap();
        stream
    };
    let is_in_use = || assert!(memory.0.arena().budget().used_bytes() > 0 && memory.0.usage("ada").bytes > 0);
    drop(send(None, UploadMode::Replace));
    memory.assert_empty("the only stream broke off");
    drop(send(Some("broken"), UploadMode::Replace));
    assert!(memory.0.usage("ada").bytes < 1024, "of an upload whose stream broke off, only the schema is held");
    uploads.abort("ada", "broken").unwrap();
    memory.assert_empty("the upload was aborted after a stream broke off");
    send(Some("aborted"), UploadMode::Replace).finish(&Interrupt::default()).unwrap();
    is_in_use();
    uploads.abort("ada", "aborted").unwrap();
    memory.assert_empty("the upload was aborted");
    for (name, mode) in [("whole", UploadMode::Replace), ("more", UploadMode::Append), ("new", UploadMode::Replace)] {
        send(Some(name), mode).finish(&Interrupt::default()).unwrap();
        uploads.commit("ada", name, &Interrupt::default()).unwrap();
        is_in_use();
    }
    memory.0.drop_table("t", &ada()).unwrap();
    memory.assert_empty("the table was dropped");
}

#[test]
fn rows_of_a_table_that_is_gone_are_charged_to_those_who_hold_them() {
    let memory = Memory::new();
    let catalog = &memory.0;
    let put = |mode| {
        let mut upload = Upload::begin_for(catalog, "ada", "t", keys_of(0).schema(), options(mode)).unwrap();
        upload.append(keys_of(1024)).unwrap();
        upload.commit().unwrap()
    };
    let table = put(UploadMode::Create);
    // With its schema, statistics and array structures.
    let table_bytes = catalog.usage("ada").bytes;
    assert!(table_bytes >= BATCH_BYTES);
    let bytes = || ["ada", "ben", "cy"].map(|tenant| (catalog.usage(tenant).bytes + table_bytes / 2) / table_bytes);
    let of_ben = [table.hold("ben"), table.hold("ben")];
    assert_eq!(bytes(), [1, 0, 0], "the table is in the catalog");
    // The appended table has the same rows, so they stay with the owner.
    put(UploadMode::Append);
    assert_eq!(bytes(), [2, 0, 0]);
    put(UploadMode::Replace);
    assert_eq!(bytes(), [1, 1, 0], "the first batch is held, the second is free");
    let of_cy = table.hold("cy");
    let [first, second] = of_ben;
    drop(first);
    assert_eq!(bytes(), [1, 1, 0]);
    drop(second);
    assert_eq!(bytes(), [1, 0, 1]);
    drop(table);
    drop(of_cy);
    assert_eq!(bytes(), [1, 0, 0]);
    // A result that shares the rows of a table holds them for its own tenant.
    let table = catalog.table("t").unwrap();
    let shared = SpoolOptions {
        charge: Some(catalog.charge("cy")),
        tables: vec![Arc::downgrade(&table)],
        ..SpoolOptions::default()
    };
    let spool = ResultSpool::with_options(table.schema.clone(), shared);
    spool.push_sharing(table.batches[0].clone(), &[true]).unwrap();
    drop(table);
    catalog.drop_table("t", &"ada".into()).unwrap();
    assert_eq!(bytes(), [0, 0, 1]);
    spool.release();
    assert_eq!(bytes(), [0, 0, 0]);
}
