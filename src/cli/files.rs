//! Tables in files: Parquet, Arrow IPC (file and stream) and CSV, read and written batch by batch.

use std::fs::File;
use std::io::{BufReader, BufWriter, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow::array::{RecordBatch, RecordBatchReader};
use arrow::csv;
use arrow::datatypes::{DataType, FieldRef, Schema, SchemaRef};
use arrow::error::ArrowError;
use arrow::ipc::reader::{FileReaderBuilder, StreamReader};
use arrow::ipc::writer::{FileWriter, StreamWriter};
use futures::StreamExt;
use futures::stream::BoxStream;
use parquet::arrow::ArrowWriter;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use parquet::basic::{Compression, ZstdLevel};
use parquet::file::properties::WriterProperties;
use tokio::sync::mpsc;

use crate::{Context, Error, Result};

/// Rows read at a time: some megabytes for tables of ordinary width.
const ROWS_PER_BATCH: usize = 64 * 1024;

/// Batches read ahead of whoever takes them.
const BATCHES_AHEAD: usize = 4;

/// What a file is written in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Format {
    /// Apache Parquet
    Parquet,
    /// Arrow IPC file (also called Feather)
    Arrow,
    /// Arrow IPC stream
    ArrowStream,
    /// Comma-separated values with a heading
    Csv,
}

/// How CSV is read.
#[derive(Clone, Debug, clap::Args)]
#[command(next_help_heading = "CSV")]
pub struct CsvArgs {
    /// Character between fields
    #[arg(long, default_value_t = ',', value_name = "CHAR")]
    pub delimiter: char,

    /// The first line is a row and not a heading; columns are named column_1, column_2, ...
    #[arg(long)]
    pub no_header: bool,

    /// Rows from which the types of columns are inferred
    #[arg(long, default_value_t = 10_000, value_name = "ROWS")]
    pub infer_rows: usize,
}

impl Format {
    /// The format that a file's name stands for.
    ///
    /// # Errors
    /// [`Error::Invalid`] lists the names that stand for one.
    pub fn of_name(path: &Path) -> Result<Self> {
        let extension = path.extension().map(|extension| extension.to_string_lossy().to_ascii_lowercase());
        match extension.as_deref() {
            Some("parquet" | "pq") => Ok(Self::Parquet),
            Some("arrow" | "ipc" | "feather") => Ok(Self::Arrow),
            Some("arrows" | "arrow_stream" | "stream") => Ok(Self::ArrowStream),
            Some("csv" | "tsv" | "txt") => Ok(Self::Csv),
            _ => Err(Error::Invalid(format!(
                "{}: the name does not say the format; use .parquet, .arrow, .arrows (stream) or .csv, or say --format",
                path.display()
            ))),
        }
    }

    /// As [`Format::of_name`], corrected by the first bytes of the file, which know better.
    fn of_file(path: &Path, file: &mut File) -> Result<Self> {
        let mut magic = [0; 6];
        let read = file.read(&mut magic).and_then(|read| file.rewind().map(|()| read))?;
        match &magic[..read] {
            [b'P', b'A', b'R', b'1', ..] => Ok(Self::Parquet),
            b"ARROW1" => Ok(Self::Arrow),
            [0xff, 0xff, 0xff, 0xff, ..] => Ok(Self::ArrowStream),
            _ => Self::of_name(path),
        }
    }
}

/// A file that is open for reading.
pub struct Source {
    /// Columns and their types.
    pub schema: SchemaRef,
    batches: Box<dyn Iterator<Item = Result<RecordBatch, ArrowError>> + Send>,
    path: PathBuf,
}

impl std::fmt::Debug for Source {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Source").field("path", &self.path).field("schema", &self.schema).finish_non_exhaustive()
    }
}

impl Source {
    /// Opens a file and reads its schema.
    ///
    /// # Errors
    /// [`Error::NotFound`] when it is not there, [`Error::Invalid`] when it is not what it seems; with the path.
    pub fn open(path: &Path, format: Option<Format>, csv: &CsvArgs) -> Result<Self> {
        open(path, format, csv).context(|| format!("reading {}", path.display()))
    }

    /// The batches, read on a thread of their own.
    pub fn into_stream(self) -> BoxStream<'static, Result<RecordBatch>> {
        let (batches, incoming) = mpsc::channel(BATCHES_AHEAD);
        tokio::task::spawn_blocking(move || {
            for batch in self.batches {
                let batch = batch.map_err(reading).context(|| format!("reading {}", self.path.display()));
                let last = batch.is_err();
                if batches.blocking_send(batch).is_err() || last {
                    break;
                }
            }
        });
        tokio_stream::wrappers::ReceiverStream::new(incoming).boxed()
    }
}

fn open(path: &Path, format: Option<Format>, csv: &CsvArgs) -> Result<Source> {
    let mut file = File::open(path).map_err(|error| match error.kind() {
        std::io::ErrorKind::NotFound => Error::NotFound("there is no such file".into()),
        _ => Error::Invalid(error.to_string()),
    })?;
    let format = match format {
        Some(format) => format,
        None => Format::of_file(path, &mut file)?,
    };
    let path = path.to_owned();
    Ok(match format {
        Format::Parquet => {
            let reader = ParquetRecordBatchReaderBuilder::try_new(file)
                .and_then(|builder| builder.with_batch_size(ROWS_PER_BATCH).build())
                .map_err(|error| Error::Invalid(error.to_string()))?;
            Source { schema: reader.schema(), batches: Box::new(reader), path }
        }
        Format::Arrow => {
            let reader = FileReaderBuilder::new().build(BufReader::with_capacity(1 << 20, file))?;
            Source { schema: reader.schema(), batches: Box::new(reader), path }
        }
        Format::ArrowStream => {
            let reader = StreamReader::try_new_buffered(file, None)?;
            Source { schema: reader.schema(), batches: Box::new(reader), path }
        }
        Format::Csv => open_csv(file, path, csv)?,
    })
}

fn open_csv(mut file: File, path: PathBuf, args: &CsvArgs) -> Result<Source> {
    let delimiter = match (args.delimiter, path.extension()) {
        (',', Some(extension)) if extension.eq_ignore_ascii_case("tsv") => b'\t',
        (delimiter, _) => u8::try_from(delimiter).map_err(|_| {
            Error::Invalid(format!("delimiter {delimiter:?} is not a single byte; use one such as ';'"))
        })?,
    };
    let format = csv::reader::Format::default().with_header(!args.no_header).with_delimiter(delimiter);
    let (schema, rows) = format.infer_schema(BufReader::new(&mut file), Some(args.infer_rows))?;
    if schema.fields().is_empty() || (rows == 0 && args.no_header) {
        return Err(Error::Invalid("the file has no columns".into()));
    }
    file.seek(SeekFrom::Start(0))?;
    let schema = Arc::new(text_where_nothing_was_seen(&schema));
    let reader = csv::ReaderBuilder::new(schema.clone())
        .with_format(format)
        .with_batch_size(ROWS_PER_BATCH)
        .build(BufReader::with_capacity(1 << 20, file))?;
    Ok(Source { schema, batches: Box::new(reader), path })
}

/// A column without a single value in the rows that were looked at is taken for text, which whatever follows fits.
fn text_where_nothing_was_seen(schema: &Schema) -> Schema {
    let field = |field: &FieldRef| match field.data_type() {
        DataType::Null => field.as_ref().clone().with_data_type(DataType::Utf8),
        _ => field.as_ref().clone(),
    };
    Schema::new(schema.fields().iter().map(field).collect::<Vec<_>>())
}

fn reading(error: ArrowError) -> Error {
    match error {
        ArrowError::ParseError(message) => Error::Invalid(format!(
            "{message}; the type comes from the first rows, so --infer-rows with a larger number may help"
        )),
        other => Error::Invalid(other.to_string()),
    }
}

/// A file that is being written. It appears under its name when it is finished, and not before.
pub struct Sink {
    writer: Writer,
    path: PathBuf,
    /// What is being written, next to the file that it will be.
    aside: PathBuf,
    finished: bool,
}

enum Writer {
    Parquet(Box<ArrowWriter<BufWriter<File>>>),
    Arrow(FileWriter<BufWriter<File>>),
    ArrowStream(StreamWriter<BufWriter<File>>),
    Csv(csv::Writer<BufWriter<File>>),
}

impl Sink {
    /// Creates the file next to where it will be.
    ///
    /// # Errors
    /// [`Error::Invalid`] when the place cannot be written, or the format cannot hold the columns.
    pub fn create(path: &Path, format: Option<Format>, schema: &Schema) -> Result<Self> {
        let context = || format!("writing {}", path.display());
        let format = match format {
            Some(format) => format,
            None => Format::of_name(path)?,
        };
        let mut aside = path.as_os_str().to_owned();
        aside.push(format!(".{}.part", std::process::id()));
        let aside = PathBuf::from(aside);
        let file = File::create(&aside).map_err(|error| Error::Invalid(error.to_string())).context(context)?;
        let file = BufWriter::with_capacity(1 << 20, file);
        let writer = Writer::new(format, file, schema).inspect_err(|_| drop(std::fs::remove_file(&aside)));
        Ok(Self { writer: writer.context(context)?, path: path.into(), aside, finished: false })
    }

    /// Writes a batch.
    ///
    /// # Errors
    /// [`Error::Invalid`] when the format cannot hold it, or the disk is full.
    pub fn write(&mut self, batch: &RecordBatch) -> Result<()> {
        let written = match &mut self.writer {
            Writer::Parquet(writer) => writer.write(batch).map_err(|error| Error::Invalid(error.to_string())),
            Writer::Arrow(writer) => writer.write(batch).map_err(Error::from),
            Writer::ArrowStream(writer) => writer.write(batch).map_err(Error::from),
            Writer::Csv(writer) => writer.write(batch).map_err(Error::from),
        };
        written
            .map_err(|error| match error.message().contains("Dictionary replacement") {
                true => Error::Invalid(
                    "an Arrow IPC file holds one dictionary per column, and this table has several; write .arrows (a \
                     stream) or .parquet"
                        .into(),
                ),
                false => error,
            })
            .context(|| format!("writing {}", self.path.display()))
    }

    /// Completes the file and gives it its name. Returns its size in bytes.
    ///
    /// # Errors
    /// [`Error::Invalid`] when the disk is full.
    pub fn finish(mut self) -> Result<u64> {
        let finished = match &mut self.writer {
            Writer::Parquet(writer) => writer.finish().map(drop).map_err(|error| Error::Invalid(error.to_string())),
            Writer::Arrow(writer) => writer.finish().map_err(Error::from),
            Writer::ArrowStream(writer) => writer.finish().map_err(Error::from),
            Writer::Csv(_) => Ok(()),
        };
        let flushed = finished.and_then(|()| {
            let file = match &mut self.writer {
                Writer::Parquet(writer) => writer.inner_mut(),
                Writer::Arrow(writer) => writer.get_mut(),
                Writer::ArrowStream(writer) => writer.get_mut(),
                // It flushes after each batch.
                Writer::Csv(_) => return Ok(()),
            };
            file.flush().map_err(Error::from)
        });
        let context = || format!("writing {}", self.path.display());
        flushed.context(context)?;
        std::fs::rename(&self.aside, &self.path).context(context)?;
        self.finished = true;
        Ok(std::fs::metadata(&self.path).context(context)?.len())
    }
}

impl Drop for Sink {
    fn drop(&mut self) {
        if !self.finished {
            // The error that led here matters more than one about the remains.
            let _ = std::fs::remove_file(&self.aside);
        }
    }
}

impl Writer {
    fn new(format: Format, file: BufWriter<File>, schema: &Schema) -> Result<Self> {
        Ok(match format {
            Format::Parquet => {
                let level = ZstdLevel::try_new(1).map_err(|error| Error::Internal(error.to_string()))?;
                let properties = WriterProperties::builder().set_compression(Compression::ZSTD(level)).build();
                let writer = ArrowWriter::try_new(file, Arc::new(schema.clone()), Some(properties));
                Self::Parquet(Box::new(writer.map_err(|error| Error::Invalid(error.to_string()))?))
            }
            Format::Arrow => Self::Arrow(FileWriter::try_new(file, schema)?),
            Format::ArrowStream => Self::ArrowStream(StreamWriter::try_new(file, schema)?),
            Format::Csv => {
                let mut writer = csv::Writer::new(file);
                // Writes the heading, which a table without rows has too.
                writer.write(&RecordBatch::new_empty(Arc::new(schema.clone())))?;
                Self::Csv(writer)
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use arrow::array::{Float64Array, Int64Array, StringArray};

    use super::*;

    fn csv_args() -> CsvArgs {
        CsvArgs { delimiter: ',', no_header: false, infer_rows: 1000 }
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

    #[tokio::test]
    async fn every_format_reads_back_what_was_written() {
        let folder = tempfile::tempdir().unwrap();
        for rows in [1, 100, ROWS_PER_BATCH as i64 + 1] {
            let batch = sample(rows);
            for name in ["t.parquet", "t.arrow", "t.arrows", "t.csv"] {
                let path = folder.path().join(name);
                let mut sink = Sink::create(&path, None, &batch.schema()).unwrap();
                sink.write(&batch).unwrap();
                assert!(sink.finish().unwrap() > 0);
                let source = Source::open(&path, None, &csv_args()).unwrap();
                let schema = source.schema.clone();
                let read: Vec<RecordBatch> = source.into_stream().map(Result::unwrap).collect().await;
                assert_eq!(
                    arrow::compute::concat_batches(&schema, &read).unwrap().columns(),
                    batch.columns(),
                    "{name}"
                );
            }
        }
    }

    #[test]
    fn a_table_without_rows_keeps_its_columns() {
        let folder = tempfile::tempdir().unwrap();
        let schema = sample(1).schema();
        for name in ["t.parquet", "t.arrow", "t.arrows"] {
            let path = folder.path().join(name);
            Sink::create(&path, None, &schema).unwrap().finish().unwrap();
            assert_eq!(Source::open(&path, None, &csv_args()).unwrap().schema.fields(), schema.fields(), "{name}");
        }
    }

    #[test]
    fn what_is_not_finished_leaves_no_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("t.parquet");
        let mut sink = Sink::create(&path, None, &sample(1).schema()).unwrap();
        sink.write(&sample(10)).unwrap();
        drop(sink);
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    #[test]
    fn the_first_bytes_know_better_than_the_name() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("t.parquet");
        Sink::create(&path, None, &sample(1).schema()).unwrap().finish().unwrap();
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
        assert!(unknown.message().contains(".parquet"), "{unknown}");
        let torn = folder.path().join("torn.parquet");
        std::fs::write(&torn, "PAR1 and nothing more").unwrap();
        assert!(matches!(Source::open(&torn, None, &csv_args()), Err(Error::Invalid(_))));
    }

    #[tokio::test]
    async fn a_value_that_does_not_fit_the_inferred_type_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("t.csv");
        std::fs::write(&path, "k\n1\n2\nthree\n").unwrap();
        let args = CsvArgs { infer_rows: 2, ..csv_args() };
        let read: Vec<_> = Source::open(&path, None, &args).unwrap().into_stream().collect().await;
        let error = read[0].as_ref().unwrap_err();
        assert!(error.message().contains("three") && error.message().contains("--infer-rows"), "{error}");
    }
}
