//! Random nested arrays, from client to client: up, down, through joins, and through files of the
//! command line. Each array returns with the same rows, however it was sliced.
//!
//! `DOVETAIL_NESTED_ARRAYS` sets the number of arrays, 500 by default and 10,000 in the long form.
//! `DOVETAIL_TEST_DEVICE=cuda` runs the joins on the first GPU. `DOVETAIL_TEST_BINARY` names a
//! server that was built elsewhere.

mod arrays;
#[path = "../cli/harness.rs"]
#[allow(dead_code)]
mod harness;
mod values;

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

use arrow::array::{Array, ArrayRef, AsArray, Int64Array, RecordBatch};
use arrow::datatypes::{DataType, Field, Int64Type, Schema, SchemaRef, TimeUnit};
use arrow::ipc::reader::{FileReader, StreamReader};
use arrow_flight::decode::FlightRecordBatchStream;
use arrow_flight::error::FlightError;
use arrow_flight::flight_service_client::FlightServiceClient;
use arrow_flight::{Action, FlightData, FlightDescriptor};
use dovetail::service::encode::Encoder;
use futures::{TryStreamExt, stream};
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use rand::rngs::StdRng;
use rand::seq::{IndexedRandom, SliceRandom};
use rand::{Rng, SeedableRng};
use tonic::transport::Channel;

use arrays::{has_null_rows, leaf_types, random_batch, random_type, random_type_of};
use harness::Server;
use values::{value, values};

/// Columns of a table in addition to its key.
const COLUMNS: usize = 10;

const DEPTH: usize = 3;

type Client = FlightServiceClient<Channel>;

/// A server and its client.
struct Side {
    name: &'static str,
    server: Server,
    client: Client,
}

impl Side {
    async fn start(name: &'static str, arguments: &[&str]) -> Self {
        let devices = match std::env::var("DOVETAIL_TEST_DEVICE").as_deref() {
            Ok("cuda") => "cuda:1",
            _ => "host:2",
        };
        let defaults = ["--devices", devices, "--rates-file", "none"];
        let server = Server::start(&[&defaults, arguments].concat());
        let channel = Channel::from_shared(server.flight.clone()).unwrap().connect().await.unwrap();
        Self { name, server, client: FlightServiceClient::new(channel).max_decoding_message_size(usize::MAX) }
    }

    /// Uploads batches in messages of at most `message_bytes`, or of one row.
    async fn put(&mut self, name: &str, batches: &[RecordBatch], message_bytes: usize) {
        let (encoder, schema) = Encoder::new(batches[0].schema()).unwrap();
        let mut encoder = encoder.with_limit(message_bytes);
        let mut messages =
            vec![FlightData::from(schema).with_descriptor(FlightDescriptor::new_path(vec![name.into()]))];
        for batch in batches {
            encoder.begin(batch.clone());
            messages.extend(std::iter::from_fn(|| encoder.next_message().unwrap()).map(FlightData::from));
        }
        let answers = self.client.do_put(stream::iter(messages)).await;
        let answers: Result<Vec<_>, _> = match answers {
            Ok(answers) => answers.into_inner().try_collect().await,
            Err(status) => Err(status),
        };
        answers.unwrap_or_else(|status| panic!("{}: put {name}: {status}\n{}", self.name, batches[0].schema()));
    }

    async fn get(&mut self, descriptor: FlightDescriptor) -> Vec<RecordBatch> {
        let info = self.client.get_flight_info(descriptor).await.unwrap().into_inner();
        let mut batches = Vec::new();
        for endpoint in info.endpoint {
            let messages = self.client.do_get(endpoint.ticket.unwrap()).await.unwrap().into_inner();
            let stream = FlightRecordBatchStream::new_from_flight_data(messages.map_err(FlightError::from));
            let read: Result<Vec<RecordBatch>, _> = stream.try_collect().await;
            batches.extend(read.unwrap_or_else(|error| panic!("{}: {error}", self.name)));
        }
        batches
    }

    async fn drop_table(&mut self, name: &str) {
        let action = Action::new("drop_table", format!("{{\"name\": {name:?}}}"));
        let answers: Vec<_> = self.client.do_action(action).await.unwrap().into_inner().try_collect().await.unwrap();
        assert_eq!(answers.len(), 1);
    }
}

/// Rows of a table by key, as the values of their columns.
type RowsByKey = HashMap<i64, Vec<String>>;

fn rows_by_key(batches: &[RecordBatch], key: usize) -> RowsByKey {
    let rows = batches.iter().flat_map(|batch| {
        let keys = batch.column(key).as_primitive::<Int64Type>();
        let columns: Vec<_> =
            (0..batch.num_columns()).filter(|at| *at != key).map(|at| values(batch.column(at))).collect();
        (0..batch.num_rows())
            .map(move |row| (keys.value(row), columns.iter().map(|column| column[row].clone()).collect()))
    });
    rows.collect()
}

/// Returns the values of each column, in row order.
fn columns_of(batches: &[RecordBatch]) -> Vec<Vec<String>> {
    let columns = batches.first().map_or(0, RecordBatch::num_columns);
    let rows = |at: usize| batches.iter().flat_map(|batch| values(batch.column(at))).collect();
    (0..columns).map(rows).collect()
}

#[track_caller]
fn assert_same(what: &str, came: &[RecordBatch], sent: &[RecordBatch]) {
    let schema = sent[0].schema();
    for (at, (came, sent)) in columns_of(came).iter().zip(columns_of(sent)).enumerate() {
        assert_eq!(came.len(), sent.len(), "{what}: rows of column {at}");
        let wrong = (0..sent.len()).filter(|&row| came[row] != sent[row]).collect::<Vec<_>>();
        if let Some(&row) = wrong.first() {
            panic!(
                "{what}: {} wrong rows in column {at} of {}; row {row} is {} and was {}",
                wrong.len(),
                schema.field(at).data_type(),
                came[row],
                sent[row]
            );
        }
    }
}

/// Makes a table of random columns, in up to three batches. `keys` is its key column.
fn random_table(rng: &mut StdRng, fields: &[Field], keys: &[i64]) -> Vec<RecordBatch> {
    let schema: SchemaRef = Arc::new(Schema::new(fields.to_vec()));
    let with_key: SchemaRef = Arc::new(Schema::new([&[Field::new("k", DataType::Int64, false)], fields].concat()));
    let batch_rows = keys.len().div_ceil(rng.random_range(1..4)).max(1);
    let batches = keys.chunks(batch_rows).map(|keys| {
        let columns = random_batch(rng, &schema, keys.len()).columns().to_vec();
        let keys: ArrayRef = Arc::new(Int64Array::from(keys.to_vec()));
        RecordBatch::try_new(with_key.clone(), [vec![keys], columns].concat()).unwrap()
    });
    batches.collect()
}

fn random_fields(rng: &mut StdRng, prefix: &str) -> Vec<Field> {
    let field = |at| {
        let data_type = random_type(rng, DEPTH);
        let is_nullable = has_null_rows(&data_type) || rng.random_bool(0.8);
        Field::new(format!("{prefix}{at}"), data_type, is_nullable)
    };
    (0..COLUMNS).map(field).collect()
}

/// Total number of arrays to test.
fn array_count() -> usize {
    std::env::var("DOVETAIL_NESTED_ARRAYS").ok().and_then(|text| text.parse().ok()).unwrap_or(500)
}

fn seed() -> u64 {
    let seed = std::env::var("DOVETAIL_SEED").ok().and_then(|text| text.parse().ok()).unwrap_or(20_261_121);
    println!("seed {seed} (repeat with DOVETAIL_SEED={seed})");
    seed
}

/// Checks that each row of a join's result has the values of the input rows with its key. Checks
/// the number of rows, too.
fn check_join(what: &str, how: &str, result: &[RecordBatch], left: &RowsByKey, right: &RowsByKey, columns: usize) {
    let mut seen = 0;
    for batch in result {
        let keys = batch.column(0).as_primitive::<Int64Type>();
        for row in 0..batch.num_rows() {
            seen += 1;
            let key = keys.value(row);
            for (side, rows, first) in [("left", left, 1), ("right", right, 1 + columns)] {
                for at in 0..columns {
                    let column = batch.column(first + at);
                    let came = value(column, row);
                    let data_type = batch.schema().field(first + at).data_type().to_string();
                    match rows.get(&key) {
                        Some(sent) => {
                            assert_eq!(came, sent[at], "{what}, {how}: key {key}, {side} column {at} of {data_type}")
                        }
                        // A union has no nulls of its own. Nor do runs whose values are unions.
                        None if data_type.contains("Union") => {}
                        None => assert_eq!(came, "null", "{what}, {how}: key {key}, {side} column {at} of {data_type}"),
                    }
                }
            }
        }
    }
    let both = left.keys().filter(|key| right.contains_key(key)).count();
    let expected = match how {
        "inner" => both,
        "left" => left.len(),
        "right" => right.len(),
        _ => left.len() + right.len() - both,
    };
    assert_eq!(seen, expected, "{what}, {how}: rows");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nested_arrays_of_all_types_keep_their_rows() {
    let mut sides = [
        Side::start("devices in the server", &["--device-memory", "64MiB"]).await,
        Side::start("a process for each device", &["--device-memory", "64MiB", "--device-processes", "on"]).await,
    ];
    let seed = seed();
    for (round, first) in (0..array_count()).step_by(2 * COLUMNS).enumerate() {
        let seed = seed.wrapping_add(first as u64);
        let mut rng = StdRng::seed_from_u64(seed);
        let rng = &mut rng;
        // Only some tables are long enough for several messages of the usual size.
        let rows = if round % 8 == 7 { 6000 } else { rng.random_range(1..120) };
        let fields = ["l", "r"].map(|prefix| random_fields(rng, prefix));
        let mut keys: Vec<i64> = (0..rows as i64 * 4 / 3 + 1).collect();
        let tables = fields.map(|fields| {
            keys.shuffle(rng);
            random_table(rng, &fields, &keys[..rows])
        });
        let by_key = tables.each_ref().map(|table| rows_by_key(table, 0));
        let message_bytes = *[2 << 10, 16 << 10, 1 << 20].choose(rng).unwrap();
        for side in &mut sides {
            let what = format!("seed {seed}, {}", side.name);
            for (name, table) in ["left", "right"].iter().zip(&tables) {
                side.put(name, table, message_bytes).await;
                let came = side.get(FlightDescriptor::new_path(vec![(*name).into()])).await;
                assert_same(&format!("{what}: {name} read back"), &came, table);
            }
            for how in ["inner", "left", "right", "full"] {
                let strategy = *["auto", "hash", "radix-hash", "radix-hash-gfur", "sort-merge"].choose(rng).unwrap();
                let batch_rows = *[7, 64, 1 << 16].choose(rng).unwrap();
                let command = format!(
                    r#"{{"join": {{"left": "left", "right": "right", "on": [{{"left": "k", "right": "k"}}], "how": "{how}",
                        "strategy": "{strategy}", "batch_rows": {batch_rows}, "retain_seconds": 0}}}}"#
                );
                let result = side.get(FlightDescriptor::new_cmd(command)).await;
                check_join(
                    &format!("{what}, {strategy}, {batch_rows} rows"),
                    how,
                    &result,
                    &by_key[0],
                    &by_key[1],
                    COLUMNS,
                );
            }
        }
        check_files(&mut sides[0], &format!("seed {seed}"), &tables[0]).await;
        for side in &mut sides {
            side.drop_table("left").await;
            side.drop_table("right").await;
        }
    }
}

/// Checks table "left" through the file formats that hold any type: written by `get`, read by
/// `put`.
async fn check_files(side: &mut Side, what: &str, table: &[RecordBatch]) {
    let types = table[0].schema().fields().iter().map(|field| field.data_type().to_string()).collect::<String>();
    for file in ["t.arrows", "t.arrow"] {
        let path = side.server.path().join(file);
        let written = side.server.run(&["get", "left", "-o", file]);
        if !written.status.success() {
            let words = harness::stderr(&written);
            let is_refused =
                file == "t.arrow" && types.contains("Dictionary") && words.contains("one dictionary per column");
            assert!(is_refused, "{what}: {file} of {types}: {words}");
            continue;
        }
        assert_same(&format!("{what}: {file} written"), &read_file(&path), table);
        side.server.ok(&["put", file, "--table", "again"]);
        let came = side.get(FlightDescriptor::new_path(vec!["again".into()])).await;
        assert_same(&format!("{what}: {file} read"), &came, table);
        side.drop_table("again").await;
        std::fs::remove_file(path).unwrap();
    }
}

fn read_file(path: &Path) -> Vec<RecordBatch> {
    let file = std::fs::File::open(path).unwrap();
    match path.extension().and_then(|extension| extension.to_str()) {
        Some("arrow") => FileReader::try_new(file, None).unwrap().collect::<Result<_, _>>().unwrap(),
        Some("arrows") => StreamReader::try_new(file, None).unwrap().collect::<Result<_, _>>().unwrap(),
        _ => {
            ParquetRecordBatchReaderBuilder::try_new(file).unwrap().build().unwrap().collect::<Result<_, _>>().unwrap()
        }
    }
}

/// True for types that Parquet files keep unchanged.
fn is_in_parquet(data_type: &DataType) -> bool {
    use DataType as T;
    match data_type {
        T::List(field) | T::LargeList(field) | T::Map(field, _) => is_in_parquet(field.data_type()),
        T::ListView(field) | T::LargeListView(field) => is_in_parquet(field.data_type()),
        T::FixedSizeList(field, size) => *size > 0 && is_in_parquet(field.data_type()),
        T::Struct(fields) => !fields.is_empty() && fields.iter().all(|field| is_in_parquet(field.data_type())),
        // Some times, runs, and dictionaries of other values are read back as another type.
        T::Timestamp(TimeUnit::Second, _) | T::Time32(TimeUnit::Second) | T::Date64 | T::RunEndEncoded(..) => false,
        T::Dictionary(_, values) => matches!(**values, T::Utf8 | T::Binary),
        // Intervals are written, and read by no client.
        T::FixedSizeBinary(0) | T::Decimal64(..) | T::Interval(_) => false,
        leaf => !leaf.is_nested() && !matches!(leaf, T::Null),
    }
}

/// True for types that all writers of JSON lines write in the same way.
fn is_in_json(data_type: &DataType) -> bool {
    use DataType as T;
    match data_type {
        T::Boolean | T::Int8 | T::Int16 | T::Int32 | T::Int64 | T::Utf8 | T::LargeUtf8 => true,
        T::List(field) | T::LargeList(field) => is_in_json(field.data_type()),
        T::Struct(fields) => !fields.is_empty() && fields.iter().all(|field| is_in_json(field.data_type())),
        _ => false,
    }
}

/// Makes fields of random types that `is_accepted` accepts.
fn chosen_fields(rng: &mut StdRng, is_accepted: fn(&DataType) -> bool, columns: usize) -> Vec<Field> {
    let leaves: Vec<DataType> = leaf_types().into_iter().filter(is_accepted).collect();
    let mut fields = Vec::new();
    while fields.len() < columns {
        let data_type = random_type_of(rng, DEPTH, &leaves);
        if is_accepted(&data_type) {
            fields.push(Field::new(format!("c{}", fields.len()), data_type, rng.random_bool(0.8)));
        }
    }
    fields
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nested_arrays_keep_their_rows_in_parquet_and_json() {
    let mut side = Side::start("devices in the server", &[]).await;
    let seed = seed();
    for first in (0..array_count() / 2).step_by(COLUMNS) {
        let seed = seed.wrapping_add(first as u64);
        let mut rng = StdRng::seed_from_u64(seed);
        let rows = rng.random_range(1..400);
        let keys: Vec<i64> = (0..rows).collect();
        let what = format!("seed {seed}");

        let fields = chosen_fields(&mut rng, is_in_parquet, COLUMNS);
        let table = random_table(&mut rng, &fields, &keys);
        side.put("t", &table, 16 << 10).await;
        side.server.ok(&["get", "t", "-o", "t.parquet"]);
        assert_same(&format!("{what}: t.parquet written"), &read_file(&side.server.path().join("t.parquet")), &table);
        side.server.ok(&["put", "t.parquet", "--table", "again"]);
        let came = side.get(FlightDescriptor::new_path(vec!["again".into()])).await;
        assert_same(&format!("{what}: t.parquet read"), &came, &table);
        assert_eq!(came[0].schema(), table[0].schema(), "{what}");
        side.drop_table("again").await;
        side.drop_table("t").await;

        let fields = chosen_fields(&mut rng, is_in_json, COLUMNS);
        let table = random_table(&mut rng, &fields, &keys);
        side.put("t", &table, 16 << 10).await;
        let lines = side.server.ok(&["get", "t", "-o", "-", "--format", "json"]);
        let lines = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect::<Vec<serde_json::Value>>();
        let sent = table.iter().flat_map(|batch| (0..batch.num_rows()).map(move |row| json_row(batch, row)));
        for (row, (came, sent)) in lines.iter().zip(sent).enumerate() {
            assert_eq!(*came, sent, "{what}: row {row} in JSON");
        }
        assert_eq!(lines.len() as i64, rows);
        side.drop_table("t").await;
    }
}

fn json_row(batch: &RecordBatch, row: usize) -> serde_json::Value {
    let field = |(field, column): (&Arc<Field>, &ArrayRef)| (field.name().clone(), json_value(column, row));
    serde_json::Value::Object(batch.schema().fields().iter().zip(batch.columns()).map(field).collect())
}

fn json_value(array: &dyn Array, row: usize) -> serde_json::Value {
    use DataType as T;
    let of_list = |list: ArrayRef| (0..list.len()).map(|at| json_value(&list, at)).collect();
    match array.data_type() {
        _ if array.is_null(row) => serde_json::Value::Null,
        T::Boolean => array.as_boolean().value(row).into(),
        T::Utf8 => array.as_string::<i32>().value(row).into(),
        T::LargeUtf8 => array.as_string::<i64>().value(row).into(),
        T::List(_) => of_list(array.as_list::<i32>().value(row)),
        T::LargeList(_) => of_list(array.as_list::<i64>().value(row)),
        T::Struct(fields) => {
            let columns = array.as_struct().columns();
            let field = |(field, column): (&Arc<Field>, &ArrayRef)| (field.name().clone(), json_value(column, row));
            serde_json::Value::Object(fields.iter().zip(columns).map(field).collect())
        }
        _ => {
            let number = arrow::compute::cast(&array.slice(row, 1), &T::Int64).unwrap();
            number.as_primitive::<Int64Type>().value(0).into()
        }
    }
}
