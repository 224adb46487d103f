//! Files that are read.

use std::fs::File;
use std::io::{BufReader, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use arrow::array::{RecordBatch, RecordBatchReader};
use arrow::csv;
use arrow::datatypes::{DataType, FieldRef, Schema, SchemaRef};
use arrow::error::ArrowError;
use arrow::ipc::reader::{FileReaderBuilder, StreamReader};
use futures::StreamExt;
use futures::stream::BoxStream;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use tokio::sync::mpsc;

use super::{BATCHES_AHEAD, CsvArgs, Format};
use crate::{Context, Error, Result};

/// Rows read at a time: some megabytes for tables of ordinary width.
pub(super) const ROWS_PER_BATCH: usize = 64 * 1024;

/// Bytes read at a time where a format's reader asks for less.
const BUFFER_BYTES: usize = 1 << 20;

/// A file that is open for reading.
pub struct Source {
    /// Columns and their types.
    pub schema: SchemaRef,
    /// Size of the file; the pieces add up to it, or to a little less where the format has something behind the rows.
    pub file_bytes: u64,
    batches: Box<dyn Iterator<Item = Result<RecordBatch, ArrowError>> + Send>,
    measure: Measure,
    path: PathBuf,
}

/// Rows of a file, and how many of its bytes they took.
#[derive(Clone, Debug)]
pub struct Piece {
    /// The rows.
    pub batch: RecordBatch,
    /// The file's bytes since the piece before.
    pub file_bytes: u64,
}

/// How the bytes of a file are shared out among its batches.
enum Measure {
    /// By rows, of which the file says how many it has: a Parquet file is read column by column, back and forth.
    Rows { total: u64 },
    /// By what was read from it.
    Read(Arc<AtomicU64>),
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

    /// The rows, read on a thread of their own.
    pub fn into_stream(self) -> BoxStream<'static, Result<Piece>> {
        let (pieces, incoming) = mpsc::channel(BATCHES_AHEAD);
        tokio::task::spawn_blocking(move || {
            let (mut rows, mut told) = (0, 0);
            for batch in self.batches {
                let piece =
                    batch.map_err(reading).context(|| format!("reading {}", self.path.display())).map(|batch| {
                        rows += batch.num_rows() as u64;
                        let done = self.measure.done(rows, self.file_bytes);
                        let file_bytes = done - told;
                        told = done;
                        Piece { batch, file_bytes }
                    });
                let last = piece.is_err();
                if pieces.blocking_send(piece).is_err() || last {
                    break;
                }
            }
        });
        tokio_stream::wrappers::ReceiverStream::new(incoming).boxed()
    }
}

impl Measure {
    /// Bytes of the file that are done with when so many rows are; never fewer than before, and never more than all.
    fn done(&self, rows: u64, file_bytes: u64) -> u64 {
        match self {
            Self::Rows { total } => {
                (u128::from(file_bytes) * u128::from(rows.min(*total)) / u128::from((*total).max(1))) as u64
            }
            Self::Read(read) => read.load(Ordering::Relaxed).min(file_bytes),
        }
    }
}

/// A file that counts what is read from it.
struct Counted {
    file: File,
    read: Arc<AtomicU64>,
}

impl Counted {
    fn new(file: File) -> Self {
        Self { file, read: Arc::default() }
    }
}

impl Read for Counted {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let read = self.file.read(buffer)?;
        self.read.fetch_add(read as u64, Ordering::Relaxed);
        Ok(read)
    }
}

impl Seek for Counted {
    fn seek(&mut self, to: SeekFrom) -> std::io::Result<u64> {
        self.file.seek(to)
    }
}

fn open(path: &Path, format: Option<Format>, csv: &CsvArgs) -> Result<Source> {
    let mut file = File::open(path).map_err(|error| match error.kind() {
        std::io::ErrorKind::NotFound => Error::NotFound("there is no such file".into()),
        _ => Error::Invalid(error.to_string()),
    })?;
    let about = file.metadata()?;
    if about.is_dir() {
        return Err(Error::Invalid(
            "it is a folder; name the files in it, with --table to put them into one table".into(),
        ));
    }
    let format = match format {
        Some(format) => format,
        None => Format::of_file(path, &mut file)?,
    };
    let (path, file_bytes) = (path.to_owned(), about.len());
    Ok(match format {
        Format::Parquet => {
            let builder =
                ParquetRecordBatchReaderBuilder::try_new(file).map_err(|error| broken("a Parquet file", &error))?;
            let total = u64::try_from(builder.metadata().file_metadata().num_rows()).unwrap_or(0);
            let reader =
                builder.with_batch_size(ROWS_PER_BATCH).build().map_err(|error| Error::Invalid(error.to_string()))?;
            let measure = Measure::Rows { total };
            Source { schema: reader.schema(), file_bytes, batches: Box::new(reader), measure, path }
        }
        Format::Arrow => {
            let file = Counted::new(file);
            let read = file.read.clone();
            let file = BufReader::with_capacity(BUFFER_BYTES, file);
            let reader = FileReaderBuilder::new().build(file).map_err(|error| broken("an Arrow IPC file", &error))?;
            // The reader began with the footer.
            read.store(0, Ordering::Relaxed);
            Source {
                schema: reader.schema(),
                file_bytes,
                batches: Box::new(reader),
                measure: Measure::Read(read),
                path,
            }
        }
        Format::ArrowStream => {
            let file = Counted::new(file);
            let measure = Measure::Read(file.read.clone());
            let file = BufReader::with_capacity(BUFFER_BYTES, file);
            let reader = StreamReader::try_new(file, None).map_err(|error| broken("an Arrow IPC stream", &error))?;
            Source { schema: reader.schema(), file_bytes, batches: Box::new(reader), measure, path }
        }
        Format::Csv => open_csv(file, path, file_bytes, csv)?,
    })
}

/// The libraries say what they miss, and not what they took the file for.
fn broken(kind: &str, error: &dyn std::fmt::Display) -> Error {
    Error::Invalid(format!("it is not {kind}, or cut short: {error}"))
}

fn open_csv(mut file: File, path: PathBuf, file_bytes: u64, args: &CsvArgs) -> Result<Source> {
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
    let file = Counted::new(file);
    let measure = Measure::Read(file.read.clone());
    let reader = csv::ReaderBuilder::new(schema.clone())
        .with_format(format)
        .with_batch_size(ROWS_PER_BATCH)
        .build(BufReader::with_capacity(BUFFER_BYTES, file))?;
    Ok(Source { schema, file_bytes, batches: Box::new(reader), measure, path })
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
