//! Writes and reads back every format, and checks the errors for bad files.

use std::fs::File;
use std::sync::Arc;

use arrow::array::{
    Array, ArrayData, ArrayRef, BooleanArray, Date32Array, Date64Array, DictionaryArray, FixedSizeBinaryArray,
    FixedSizeListArray, Float64Array, Int8Array, Int32Array, Int64Array, ListArray, MapArray, NullArray, RecordBatch,
    RunArray, StringArray, StringViewArray, StructArray, Time32MillisecondArray, Time32SecondArray,
    TimestampMillisecondArray, TimestampSecondArray, UnionArray, make_array,
};
use arrow::buffer::{NullBuffer, OffsetBuffer};
use arrow::compute::{cast, take};
use arrow::datatypes::{DataType, Field, FieldRef, IntervalUnit, Schema, SchemaRef, TimeUnit, UnionFields, UnionMode};
use futures::StreamExt;

use super::sink::Sink;
use super::source::ROWS_PER_BATCH;
use super::*;

fn csv_args() -> CsvArgs {
    CsvArgs::default()
}

fn sample(rows: i64) -> RecordBatch {
    let text: StringArray = (0..rows).map(|at| (at % 7 != 0).then(|| format!("name \"{at}\", né"))).collect();
    RecordBatch::try_from_iter_with_nullable([
        ("k", Arc::new(Int64Array::from_iter_values(0..rows)) as _, true),
        ("x", Arc::new(Float64Array::from_iter_values((0..rows).map(|at| at as f64 + 0.5))) as _, true),
        ("name", Arc::new(text) as _, true),
    ])
    .unwrap()
}

fn create(path: &Path, schema: &SchemaRef) -> Sink {
    Target::create(path, None).unwrap().begin(schema).unwrap()
}

#[tokio::test]
async fn every_format_reads_back_the_written_rows() {
    let folder = tempfile::tempdir().unwrap();
    for rows in [1, 100, ROWS_PER_BATCH as i64 + 1] {
        let batch = sample(rows);
        for name in ["t.parquet", "t.arrow", "t.arrows", "t.csv", "t.tsv"] {
            let path = folder.path().join(name);
            let mut sink = create(&path, &batch.schema());
            sink.write(&batch).unwrap();
            sink.finish().unwrap();
            let source = Source::open(&path, None, &csv_args()).unwrap();
            let schema = source.schema.clone();
            let read: Vec<RecordBatch> = source.into_stream().map(|piece| piece.unwrap().batch).collect().await;
            assert_eq!(arrow::compute::concat_batches(&schema, &read).unwrap().columns(), batch.columns(), "{name}");
        }
    }
}

/// Checks the bytes that a progress bar is told: they grow towards the size of the file, and reach
/// it.
#[tokio::test]
async fn the_reported_progress_adds_up_to_the_size_of_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let batch = sample(5 * ROWS_PER_BATCH as i64 + 17);
    for name in ["t.parquet", "t.arrow", "t.arrows", "t.csv"] {
        let path = folder.path().join(name);
        let mut sink = create(&path, &batch.schema());
        for at in 0..6 {
            let begin = at * ROWS_PER_BATCH;
            sink.write(&batch.slice(begin, ROWS_PER_BATCH.min(batch.num_rows() - begin))).unwrap();
        }
        sink.finish().unwrap();
        let source = Source::open(&path, None, &csv_args()).unwrap();
        let file_bytes = std::fs::metadata(&path).unwrap().len();
        assert_eq!(source.file_bytes, file_bytes, "{name}");
        let pieces: Vec<u64> = source.into_stream().map(|piece| piece.unwrap().file_bytes).collect().await;
        // The first rows of CSV are in three pieces.
        assert_eq!(pieces.len(), if name == "t.csv" { 8 } else { 6 }, "{name}");
        let sum: u64 = pieces.iter().sum();
        // An IPC file ends with a footer of several hundred bytes, which is not read twice.
        assert!((file_bytes - 4096..=file_bytes).contains(&sum), "{name}: {pieces:?} of {file_bytes}");
        // Readers read at most one buffer ahead: halfway through the rows, about half of the file
        // is done.
        let half = pieces[..pieces.len() - 3].iter().sum::<u64>() as f64 / file_bytes as f64;
        assert!((0.4..0.8).contains(&half), "{name}: {pieces:?} of {file_bytes}");
    }
}

#[test]
fn a_path_that_is_not_a_regular_file_is_written_to_and_not_replaced() {
    use std::os::unix::fs::FileTypeExt;
    let null = Path::new("/dev/null");
    let mut sink = Target::create(null, Some(Format::Csv)).unwrap().begin(&sample(1).schema()).unwrap();
    sink.write(&sample(10)).unwrap();
    sink.finish().unwrap();
    assert!(std::fs::metadata(null).unwrap().file_type().is_char_device());
}

#[test]
fn an_overwritten_file_keeps_its_mode_and_the_links_to_it() {
    use std::os::unix::fs::{PermissionsExt, symlink};
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    std::fs::create_dir(at("real")).unwrap();
    symlink("real/data.csv", at("near.csv")).unwrap();
    symlink(at("near.csv"), at("far.csv")).unwrap();
    symlink("circle.csv", at("circle.csv")).unwrap();
    // First the links lead nowhere, then to a file with restricted permissions.
    for mode in [None, Some(0o600), Some(0o666)] {
        if let Some(mode) = mode {
            std::fs::set_permissions(at("real/data.csv"), std::fs::Permissions::from_mode(mode)).unwrap();
        }
        let mut sink = create(&at("far.csv"), &sample(1).schema());
        sink.write(&sample(2)).unwrap();
        let mut begun = std::fs::read_dir(at("real")).unwrap().map(|entry| entry.unwrap());
        let begun = begun.find(|entry| entry.file_name().to_string_lossy().ends_with(".part")).unwrap();
        sink.finish().unwrap();
        assert!(at("far.csv").is_symlink() && at("near.csv").is_symlink(), "{mode:?}");
        let written = std::fs::metadata(at("real/data.csv")).unwrap();
        assert!(written.len() > 0 && !begun.path().exists(), "{mode:?}");
        assert!(mode.is_none_or(|mode| written.permissions().mode() & 0o777 == mode), "{mode:?}: {written:?}");
    }
    let error = Target::create(&at("circle.csv"), None).unwrap_err();
    assert!(error.message().contains("circle.csv: its name is a circular link"), "{error}");
}

#[test]
fn an_unwritable_path_is_refused_before_the_first_row() {
    let folder = tempfile::tempdir().unwrap();
    for wrong in ["no/such/folder.csv", "name.without-format", "folder.csv"] {
        std::fs::create_dir_all(folder.path().join("folder.csv")).unwrap();
        let path = folder.path().join(wrong);
        let error = Target::create(&path, None).unwrap_err();
        assert!(matches!(&error, Error::Invalid(text) if text.contains(wrong)), "{error}");
    }
    let untouched: Vec<_> = std::fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(untouched, ["folder.csv"]);
}

#[test]
fn columns_that_a_format_does_not_support_are_refused_before_the_first_row() {
    let folder = tempfile::tempdir().unwrap();
    let list = DataType::List(Arc::new(Field::new("item", DataType::Int64, true)));
    let schema = Arc::new(Schema::new(vec![Field::new("k", DataType::Int64, true), Field::new("l", list, true)]));
    let begin = |name: &str| Target::create(&folder.path().join(name), None).unwrap().begin(&schema).map(Sink::finish);
    for name in ["t.csv", "t.tsv"] {
        let Err(error) = begin(name) else { panic!("{name} was begun") };
        assert!(error.message().contains(": column \"l\" is list(int64), which cannot be written as CSV"), "{error}");
    }
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    begin("t.json").unwrap().unwrap();
}

/// Parquet has no times in whole seconds; other readers find numbers in a file that has them
/// anyway. The Parquet library does not read dictionaries of booleans, and panics over dictionaries
/// of views.
#[tokio::test]
async fn types_that_parquet_does_not_support_are_converted() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("times.parquet");
    let day = 86_400_000;
    let bools: ArrayRef = Arc::new(BooleanArray::from(vec![Some(true), None]));
    let keys = Int8Array::from(vec![Some(0), None]);
    let days: ArrayRef = Arc::new(Date64Array::from(vec![Some(9 * day), None]));
    let columns: [(&str, ArrayRef); 5] = [
        ("t", Arc::new(TimestampSecondArray::from(vec![Some(7), None]).with_timezone("UTC"))),
        ("c", Arc::new(Time32SecondArray::from(vec![Some(8), None]))),
        ("d", days.clone()),
        ("b", Arc::new(DictionaryArray::new(keys.clone(), bools.clone()))),
        ("dd", Arc::new(DictionaryArray::new(keys, days.clone()))),
    ];
    let batch = RecordBatch::try_from_iter(columns).unwrap();
    let mut sink = create(&path, &batch.schema());
    sink.write(&batch).unwrap();
    sink.finish().unwrap();
    let mut pieces = Source::open(&path, None, &csv_args()).unwrap().into_stream();
    let read = pieces.next().await.unwrap().unwrap().batch;
    let expected: [ArrayRef; 5] = [
        Arc::new(TimestampMillisecondArray::from(vec![Some(7000), None]).with_timezone("UTC")),
        Arc::new(Time32MillisecondArray::from(vec![Some(8000), None])),
        Arc::new(Date32Array::from(vec![Some(9), None])),
        bools.clone(),
        Arc::new(Date32Array::from(vec![Some(9), None])),
    ];
    assert_eq!(read.columns(), expected);
    for unknown in [
        DataType::FixedSizeBinary(0),
        DataType::Interval(IntervalUnit::MonthDayNano),
        DataType::Decimal128(5, -2),
        DataType::Union(UnionFields::from_fields(vec![Field::new("a", DataType::Int32, true)]), UnionMode::Sparse),
    ] {
        let schema = Arc::new(Schema::new(vec![Field::new("u", unknown, true)]));
        let refused = Target::create(&path, None).unwrap().begin(&schema).err().unwrap();
        let expected = "which cannot be written as Parquet; write Arrow";
        assert!(refused.message().contains("column \"u\" is ") && refused.message().contains(expected), "{refused}");
    }
}

/// Returns a field that is nullable only if a value of `array` is null.
fn item(array: &ArrayRef) -> FieldRef {
    Arc::new(Field::new("item", array.data_type().clone(), array.is_nullable()))
}

/// Makes structs of one column. Every second struct is null, if `has_nulls`.
fn structs(has_nulls: bool, column: ArrayRef) -> ArrayRef {
    let nulls = has_nulls.then(|| (0..column.len()).map(|row| row % 2 == 0).collect::<NullBuffer>());
    Arc::new(StructArray::new(vec![item(&column)].into(), vec![column], nulls))
}

/// Makes lists of two values each, of fixed size.
fn pairs(values: ArrayRef) -> ArrayRef {
    Arc::new(FixedSizeListArray::new(item(&values), 2, values, None))
}

/// Makes lists of two values each, of variable size.
fn lists(values: ArrayRef) -> ArrayRef {
    let offsets = OffsetBuffer::from_repeated_length(2, values.len() / 2);
    Arc::new(ListArray::new(item(&values), offsets, values, None))
}

/// Makes maps of two values each, with numbers as keys.
fn maps(values: ArrayRef) -> ArrayRef {
    let keys: ArrayRef = Arc::new(Int32Array::from_iter_values(0..values.len() as i32));
    let offsets = OffsetBuffer::from_repeated_length(2, values.len() / 2);
    let fields = vec![item(&keys).as_ref().clone().with_name("key"), item(&values).as_ref().clone()];
    let entries = StructArray::new(fields.into(), vec![keys, values], None);
    let field = Arc::new(Field::new("entries", entries.data_type().clone(), false));
    Arc::new(MapArray::new(field, offsets, entries, None, false))
}

/// Parquet's reader makes nulls for the rows of a null struct, also in fields that may not be null.
#[tokio::test]
async fn parquet_keeps_non_nullable_fields_of_null_structs() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("t.parquet");
    let ints = || Arc::new(Int32Array::from_iter_values(0..32)) as ArrayRef;
    let words = Arc::new((0..32).map(|at| Some(format!("the text of value {at}"))).collect::<StringViewArray>());
    let bytes = FixedSizeBinaryArray::try_from_iter((0..32u8).map(|at| [at, at, at])).unwrap();
    for column in [
        structs(true, pairs(ints())),
        structs(true, pairs(words)),
        structs(true, pairs(Arc::new(bytes))),
        structs(true, pairs(lists(ints()))),
        structs(true, pairs(pairs(ints()))),
        structs(true, pairs(structs(false, ints()))),
        structs(true, structs(false, pairs(ints()))),
        structs(true, pairs(structs(true, pairs(ints())))),
        lists(structs(true, pairs(ints()))),
        pairs(structs(true, pairs(ints()))),
        maps(structs(true, pairs(ints()))),
        lists(structs(true, structs(false, ints()))),
        pairs(structs(true, structs(false, ints()))),
        maps(structs(true, structs(false, structs(false, ints())))),
    ] {
        let kind = column.data_type().to_string();
        let batch = RecordBatch::try_from_iter([("c", column)]).unwrap();
        let schema = batch.schema();
        let mut sink = create(&path, &schema);
        sink.write(&batch).unwrap();
        sink.finish().unwrap();
        let source = Source::open(&path, None, &csv_args()).unwrap();
        assert_eq!(source.schema.fields(), schema.fields());
        let read = source.into_stream().next().await.unwrap().unwrap().batch;
        assert_eq!(read.columns(), batch.columns(), "{kind}");
        read.column(0).to_data().validate_full().unwrap_or_else(|error| panic!("{kind}: {error}"));
    }
}

#[test]
fn a_table_without_rows_keeps_its_columns() {
    let folder = tempfile::tempdir().unwrap();
    let schema = sample(1).schema();
    for name in ["t.parquet", "t.arrow", "t.arrows"] {
        let path = folder.path().join(name);
        create(&path, &schema).finish().unwrap();
        assert_eq!(Source::open(&path, None, &csv_args()).unwrap().schema.fields(), schema.fields(), "{name}");
    }
}

#[test]
fn an_unfinished_write_leaves_no_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("t.parquet");
    let mut sink = create(&path, &sample(1).schema());
    sink.write(&sample(10)).unwrap();
    drop(sink);
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn the_first_bytes_of_a_file_override_its_extension() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("t.parquet");
    create(&path, &sample(1).schema()).finish().unwrap();
    let renamed = folder.path().join("t.data");
    std::fs::rename(&path, &renamed).unwrap();
    assert!(Source::open(&renamed, None, &csv_args()).is_ok());
}

#[test]
fn unreadable_files_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let missing = Source::open(&folder.path().join("none.csv"), None, &csv_args()).unwrap_err();
    assert!(matches!(&missing, Error::NotFound(text) if text.contains("none.csv")), "{missing}");
    let path = folder.path().join("notes.doc");
    std::fs::write(&path, "hello").unwrap();
    let unknown = Source::open(&path, None, &csv_args()).unwrap_err();
    let all =
        ".parquet, .pq, .arrow, .ipc, .feather, .arrows, .arrow_stream, .stream, .csv, .tsv, .txt, or add --format";
    assert!(unknown.message().contains(all), "{unknown}");
    let unknown = Target::create(&path, None).unwrap_err();
    assert!(unknown.message().contains(".txt, .json, .jsonl, .ndjson, or add --format"), "{unknown}");
    let torn = folder.path().join("torn.parquet");
    std::fs::write(&torn, "PAR1 and nothing more").unwrap();
    assert!(matches!(Source::open(&torn, None, &csv_args()), Err(Error::Invalid(_))));
}

#[test]
fn files_that_no_type_of_arrow_fits_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("t.parquet");
    let column = extremes(&DataType::Interval(IntervalUnit::DayTime));
    let batch = RecordBatch::try_from_iter([("c", column)]).unwrap();
    let mut sink = create(&path, &batch.schema());
    sink.write(&batch).unwrap();
    sink.finish().unwrap();
    let error = Source::open(&path, None, &csv_args()).unwrap_err();
    let expected = "column \"c\" is an INTERVAL of Parquet, for which there is no type; write a duration";
    assert!(error.message().contains(expected), "{error}");
    let path = folder.path().join("t.orc");
    std::fs::write(&path, "ORC").unwrap();
    let error = Source::open(&path, None, &csv_args()).unwrap_err();
    assert!(error.message().contains("upload it with the Python client"), "{error}");
}

/// Reads a CSV file to its end, and returns the number of rows or the error.
async fn read_csv(text: impl AsRef<[u8]>, args: &CsvArgs) -> Result<usize> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("t.csv");
    std::fs::write(&path, text).unwrap();
    let read: Vec<_> = Source::open(&path, None, args)?.into_stream().collect().await;
    let rows = read.into_iter().map(|piece| Ok(piece?.batch.num_rows())).collect::<Result<Vec<_>>>()?;
    Ok(rows.iter().sum())
}

/// Arrow's reader counts records instead of lines.
#[tokio::test]
async fn errors_after_the_first_batch_name_their_line() {
    let rows = ROWS_PER_BATCH + 100;
    let text = "k\r\n\n".to_owned() + &"7\r\n".repeat(rows);
    assert_eq!(read_csv(&text, &csv_args()).await.unwrap(), rows);
    let line = rows + 4;
    for (wrong, words) in [
        (&b"x\n"[..], format!("line {line}, column \"k\": \"x\" is not a valid int64; use --types k=string to")),
        (b"8,9\n", format!("line {line} has 2 fields, but there are 1 columns")),
        (b"\xe9\n", format!("line {line} is not UTF-8")),
    ] {
        let bytes = [text.as_bytes(), b"\n", wrong].concat();
        let error = read_csv(&bytes, &csv_args()).await.unwrap_err();
        assert!(error.message().contains(&words), "{error}");
    }
    let args = CsvArgs { types: vec!["k=string".parse().unwrap()], ..csv_args() };
    assert_eq!(read_csv(text + "x\n", &args).await.unwrap(), rows + 1);
}

#[test]
fn csv_options_are_refused_for_other_formats() {
    let folder = tempfile::tempdir().unwrap();
    let said = [
        CsvArgs { delimiter: Some(';'), ..csv_args() },
        CsvArgs { types: vec!["k=int8".parse().unwrap()], ..csv_args() },
        CsvArgs { null_values: vec!["NA".into()], ..csv_args() },
        CsvArgs { no_header: true, ..csv_args() },
        CsvArgs { infer_rows: Some(1), ..csv_args() },
    ];
    for name in ["t.parquet", "t.arrow", "t.arrows"] {
        let path = folder.path().join(name);
        create(&path, &sample(1).schema()).finish().unwrap();
        for args in &said {
            let error = Source::open(&path, None, args).unwrap_err();
            let flag = args.given()[0];
            assert!(error.message().contains(&format!("{flag} applies to CSV only, and this is")), "{error}");
            assert!(!error.message().contains("  "), "{error}");
        }
    }
}

fn opened(path: &Path, args: &CsvArgs) -> Result<Vec<String>> {
    let source = Source::open(path, None, args)?;
    Ok(source.schema.fields().iter().map(|field| format!("{} {}", field.name(), field.data_type())).collect())
}

#[test]
fn columns_have_the_types_that_are_given_for_them() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("t.csv");
    std::fs::write(&path, "k,zip,price,day\n1,01234,7.5,2026-01-31\n").unwrap();
    let typed = |types: &str| opened(&path, &CsvArgs { types: vec![types.parse().unwrap()], ..csv_args() });
    assert_eq!(opened(&path, &csv_args()).unwrap(), ["k Int64", "zip Int64", "price Float64", "day Date32"]);
    let expected = ["k Int16", "zip Utf8", "price Decimal128(9, 2)", "day Date32"];
    assert_eq!(typed("price=decimal(9,2),zip=string,k=int16").unwrap(), expected);
    let error = typed("zipcode=string").unwrap_err();
    assert!(error.message().contains("\"zipcode\", but the columns are k, zip, price, day"), "{error}");
}

#[tokio::test]
async fn gzip_compressed_csv_is_read() {
    use std::io::Write;
    let folder = tempfile::tempdir().unwrap();
    let rows = 20_000;
    let text = "k,name\n".to_owned() + &(0..rows).map(|at| format!("{at},name {at}\n")).collect::<String>();
    for name in ["t.csv.gz", "t.csv"] {
        let path = folder.path().join(name);
        // Write two gzip members, as in concatenated files.
        let mut file = File::create(&path).unwrap();
        for half in [&text[..1000], &text[1000..]] {
            let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
            gzip.write_all(half.as_bytes()).unwrap();
            file.write_all(&gzip.finish().unwrap()).unwrap();
        }
        let source = Source::open(&path, None, &csv_args()).unwrap();
        assert_eq!(source.file_bytes, std::fs::metadata(&path).unwrap().len());
        let read: Vec<Piece> = source.into_stream().map(Result::unwrap).collect().await;
        assert_eq!(read.iter().map(|piece| piece.batch.num_rows()).sum::<usize>(), rows, "{name}");
    }
    let path = folder.path().join("t.parquet.gz");
    std::fs::copy(folder.path().join("t.csv.gz"), &path).unwrap();
    let error = Source::open(&path, None, &csv_args()).unwrap_err();
    assert!(error.message().contains("decompress it first"), "{error}");
}

#[test]
fn a_delimiter_is_one_character_without_another_meaning() {
    use clap::Parser;
    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        csv: CsvArgs,
    }
    let parsed = |delimiter: &str| Line::try_parse_from(["put", "--delimiter", delimiter]);
    for (said, expected) in [(";", ';'), ("\\t", '\t'), ("\t", '\t'), ("|", '|')] {
        assert_eq!(parsed(said).unwrap().csv.delimiter, Some(expected));
    }
    for wrong in ["é", "\n", "\r", "\"", "||", "", "\\n"] {
        let error = parsed(wrong).unwrap_err().to_string();
        assert!(error.contains("one ASCII character, such as ';', that is not a quote or a line end"), "{error}");
    }
}

/// Makes an array of the least and the greatest values that the bits of a type allow, zero and a
/// null. Bits of decimals stay within their digits.
fn extremes(data_type: &DataType) -> ArrayRef {
    let width = data_type.primitive_width().unwrap_or(0);
    let all = |first: u8, rest: u8, last: u8| {
        let mut bytes = vec![rest; width];
        bytes[0] = first;
        bytes[width - 1] = last;
        bytes
    };
    let zero = vec![0; width];
    let (least, greatest) = match data_type.is_decimal() {
        true => (vec![0xff; width], [vec![7], vec![0; width - 1]].concat()),
        false => (all(0, 0, 0x80), all(0xff, 0xff, 0x7f)),
    };
    let values = [least, greatest, zero.clone(), zero].concat();
    let nulls = NullBuffer::from(vec![true, true, true, false]);
    let data = ArrayData::builder(data_type.clone()).len(4).add_buffer(values.into()).nulls(Some(nulls));
    make_array(data.build().unwrap())
}

/// Makes columns of all types that are not nested, of four rows each.
fn leaves() -> Vec<ArrayRef> {
    use DataType as T;
    let units = [TimeUnit::Second, TimeUnit::Millisecond, TimeUnit::Microsecond, TimeUnit::Nanosecond];
    let zones = [None, Some("UTC"), Some("+14:00"), Some("-12:00"), Some("Europe/Berlin"), Some("Nowhere/There")];
    let mut types = vec![
        T::Int8,
        T::Int16,
        T::Int32,
        T::Int64,
        T::UInt8,
        T::UInt16,
        T::UInt32,
        T::UInt64,
        T::Float16,
        T::Float32,
        T::Float64,
        T::Date32,
        T::Date64,
        T::Time32(units[0]),
        T::Time32(units[1]),
        T::Time64(units[2]),
        T::Time64(units[3]),
        T::Interval(IntervalUnit::YearMonth),
        T::Interval(IntervalUnit::DayTime),
        T::Interval(IntervalUnit::MonthDayNano),
        T::Decimal32(9, 2),
        T::Decimal64(18, 2),
        T::Decimal128(38, 2),
        T::Decimal128(5, 2),
        T::Decimal128(5, -2),
        T::Decimal256(76, 2),
    ];
    types.extend(units.map(T::Duration));
    types.extend(zones.iter().flat_map(|zone| units.map(|unit| T::Timestamp(unit, zone.map(Into::into)))));
    let mut columns: Vec<ArrayRef> = types.iter().map(extremes).collect();
    let words = StringArray::from(vec![Some(""), Some("né, \"x\"\n"), Some("a longer text, not inlined"), None]);
    let words: ArrayRef = Arc::new(words);
    for text in [T::Utf8, T::LargeUtf8, T::Utf8View, T::Binary, T::LargeBinary, T::BinaryView] {
        columns.push(cast(&words, &text).unwrap());
    }
    columns.push(Arc::new(BooleanArray::from(vec![Some(true), Some(false), Some(true), None])));
    columns.push(Arc::new(NullArray::new(4)));
    for width in [0, 3, 16] {
        let values = vec![b'x'; 4 * width];
        let nulls = Some(NullBuffer::from(vec![true, true, true, false]));
        columns.push(Arc::new(FixedSizeBinaryArray::try_new_with_len(width as i32, values.into(), nulls, 4).unwrap()));
    }
    columns
}

/// Makes columns with the values of a column inside of others.
fn nested(column: &ArrayRef) -> Vec<ArrayRef> {
    let keys = Int8Array::from(vec![Some(1), Some(0), None, Some(2)]);
    let twice = take(column, &Int32Array::from(vec![0, 1, 2, 3, 3, 2, 1, 0]), None).unwrap();
    let dictionary: ArrayRef = Arc::new(DictionaryArray::new(keys, column.clone()));
    let view = DataType::ListView(item(column));
    let union = UnionFields::from_fields([item(column).as_ref().clone()]);
    let runs = Int32Array::from(vec![1, 2, 3, 4]);
    vec![
        structs(true, column.clone()),
        lists(twice.clone()),
        pairs(twice.clone()),
        maps(twice.clone()),
        lists(structs(false, twice.clone())),
        structs(false, dictionary.clone()),
        dictionary,
        cast(&lists(twice), &view).unwrap(),
        Arc::new(RunArray::try_new(&runs, column).unwrap()),
        Arc::new(UnionArray::try_new(union, vec![0; 4].into(), None, vec![column.clone()]).unwrap()),
    ]
}

/// Writes a batch, whose column `c` is of interest, and reads it back. Returns whether the format
/// holds it.
async fn write_and_read(path: &Path, batch: &RecordBatch) -> Result<bool, String> {
    let column = batch.column(1);
    let (is_parquet, is_text) = (path.ends_with("t.parquet"), path.ends_with("t.csv") || path.ends_with("t.json"));
    let sink = Target::create(path, None).unwrap().begin(&batch.schema());
    if let Err(error) = sink.and_then(|mut sink| sink.write(batch).and_then(|()| sink.finish())) {
        let said = error.message();
        let has_advice = said.contains("select other columns with --columns");
        let has_wrong_advice = !is_parquet && !is_text && said.contains("write Arrow");
        let is_sentence = said.contains(": column \"c\" ") && has_advice && !has_wrong_advice;
        return if is_sentence { Ok(false) } else { Err(said.into()) };
    }
    if is_text {
        let text = std::fs::read_to_string(path).unwrap();
        let is_plain = !text.contains("ERROR") && !text.contains("<invalid>");
        return if is_plain { Ok(true) } else { Err(text) };
    }
    // Parquet's intervals are written, but not read.
    if is_parquet && column.data_type().to_string().contains("Interval") {
        return Ok(true);
    }
    let source = Source::open(path, None, &csv_args()).map_err(|error| error.to_string())?;
    let piece = source.into_stream().next().await.unwrap().map_err(|error| error.to_string())?;
    let read = piece.batch.column(1);
    let back = cast(read, column.data_type()).is_ok_and(|back| &back == column);
    let is_same = back || cast(column, read.data_type()).is_ok_and(|written| &written == read);
    if is_same { Ok(true) } else { Err(format!("read as {read:?}")) }
}

/// Every type with its extreme values is written in every format: either in full, or the error says
/// which column the format does not hold, and what to do. No library's panic gets through.
#[tokio::test]
async fn every_type_is_written_in_every_format_or_refused_with_its_column() {
    let folder = tempfile::tempdir().unwrap();
    let leaves = leaves();
    let (mut written, mut refused, mut faults) = ([0; 5], [0; 5], Vec::new());
    for column in leaves.iter().flat_map(nested).chain(leaves.iter().cloned()) {
        let numbers: ArrayRef = Arc::new(Int64Array::from_iter_values(0..column.len() as i64));
        let columns = [("k", numbers, false), ("c", column.clone(), true)];
        let batch = RecordBatch::try_from_iter_with_nullable(columns).unwrap();
        let shown = crate::cli::rows::render(&batch.schema(), std::slice::from_ref(&batch));
        if shown.contains("(no text)") {
            faults.push(format!("{} is shown as {shown}", column.data_type()));
        }
        for (at, name) in ["t.parquet", "t.arrow", "t.arrows", "t.csv", "t.json"].into_iter().enumerate() {
            match write_and_read(&folder.path().join(name), &batch).await {
                Ok(true) => written[at] += 1,
                Ok(false) => refused[at] += 1,
                Err(fault) => faults.push(format!("{} in {name}: {fault}", column.data_type())),
            }
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
    assert!(written.iter().chain(&refused[3..]).all(|count| *count > 50), "{written:?} {refused:?}");
}
