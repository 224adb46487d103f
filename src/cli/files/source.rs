//! Reads tables from files.

use std::collections::HashSet;
use std::fs::{File, Metadata};
use std::io::{BufRead, BufReader, Cursor, ErrorKind, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use arrow::array::RecordBatch;
use arrow::datatypes::{Field, Schema, SchemaRef};
use arrow::error::ArrowError;
use arrow::ipc::reader::{FileReaderBuilder, StreamReader};
use arrow::ipc::{MetadataVersion, root_as_message};
use bytes::Bytes;
use futures::StreamExt;
use futures::stream::BoxStream;
use parquet::arrow::arrow_reader::{ArrowReaderMetadata, ArrowReaderOptions, ParquetRecordBatchReaderBuilder};
use parquet::errors::ParquetError;
use parquet::file::reader::ChunkReader;
use tokio::sync::mpsc;

use super::padding::{has_padding, hide_padding};
use super::read_types::{check_intervals, read_schema};
use super::{BATCHES_AHEAD, CsvArgs, Format, MAGIC_BYTES, csv, is_tsv};
use crate::human::file_failure;
use crate::{Context, Error, Result, panics};

/// Rows read at a time: some megabytes for tables of ordinary width.
pub(super) const ROWS_PER_BATCH: usize = 64 * 1024;

/// Minimum number of bytes read at a time, for readers that ask for less.
pub(super) const BUFFER_BYTES: usize = 1 << 20;

/// File name that stands for standard input.
pub const STDIN: &str = "-";

/// End of the error about standard input that may be CSV. A command without `--format` for its
/// input replaces it.
pub const ADVICE_FOR_CSV: &str = "if it is CSV, add --format csv";

/// Iterator over the batches of a file, for the readers of all formats.
pub(super) type Batches = Box<dyn Iterator<Item = Result<RecordBatch>> + Send>;

/// Starts reading the rows of a file, cast to the types of a schema: the file's own, or one that
/// the caller gives.
pub(super) type Begin = Box<dyn FnOnce(SchemaRef) -> Batches + Send>;

/// File that is open for reading.
pub struct Source {
    pub schema: SchemaRef,
    /// Size of the file in bytes; 0 if unknown. The bytes of all pieces add up to this size, or to
    /// a little less if the format stores something after the rows.
    pub file_bytes: u64,
    /// True if the types were inferred from the first rows.
    pub is_inferred: bool,
    /// Columns of CSV without a value in the first rows. They are text, unless the caller supplies
    /// types.
    untyped: Vec<usize>,
    begin: Begin,
    measure: Measure,
    path: PathBuf,
}

/// Rows of a file, with the number of file bytes that they took.
#[derive(Clone, Debug)]
pub struct Piece {
    pub batch: RecordBatch,
    /// Bytes of the file since the previous piece.
    pub file_bytes: u64,
}

/// Method to divide the bytes of a file among its batches.
enum Measure {
    /// By rows, with the total from the file: a Parquet file is read column by column, back and
    /// forth.
    Rows { total: u64 },
    /// By the bytes read so far.
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
    /// [`Error::NotFound`] if the file does not exist, [`Error::Invalid`] if it is not what it
    /// seems. Both name the path.
    pub fn open(path: &Path, format: Option<Format>, csv: &CsvArgs) -> Result<Self> {
        let open = || {
            let source = open(path, format, csv)?;
            check_names(&source.schema).map(|()| source)
        };
        unless_it_panics(open).context(|| format!("reading {}", name_of(path)))
    }

    /// True if there are columns without a type.
    pub fn has_untyped_columns(&self) -> bool {
        !self.untyped.is_empty()
    }

    /// Gives each column without a type the type of the same column in `table`, if CSV is read as
    /// that type.
    pub fn take_types(&mut self, table: &Schema) {
        let mut fields = self.schema.fields().to_vec();
        for at in std::mem::take(&mut self.untyped) {
            let same = table.field_with_name(fields[at].name()).map(Field::data_type);
            if let Some(data_type) = same.ok().filter(|data_type| csv::is_read_as(data_type)) {
                fields[at] = Arc::new(fields[at].as_ref().clone().with_data_type(data_type.clone()));
            }
        }
        self.schema = Arc::new(Schema::new(fields));
    }

    /// Returns a stream of the rows, which a separate thread reads.
    pub fn into_stream(self) -> BoxStream<'static, Result<Piece>> {
        let (pieces, incoming) = mpsc::channel(BATCHES_AHEAD);
        tokio::task::spawn_blocking(move || {
            let Self { begin, schema, .. } = self;
            let mut batches = begin(schema);
            let (mut rows, mut told) = (0, 0);
            // Without the check, a reader that panicked would look finished, and half of a file
            // would look like a whole file.
            while let Some(batch) = unless_it_panics(|| batches.next().transpose()).transpose() {
                let piece = batch.context(|| format!("reading {}", name_of(&self.path))).map(|batch| {
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

/// Returns the reader's answer. Turns a panic, which the contents of the file caused, into an
/// error.
fn unless_it_panics<T>(read: impl FnOnce() -> Result<T>) -> Result<T> {
    panics::caught(read)
        .unwrap_or_else(|said| Err(Error::Invalid(format!("it is damaged or has unreadable contents: {said}"))))
}

impl Measure {
    /// Returns the bytes of the file that `rows` rows account for. The value never decreases and
    /// never exceeds `file_bytes`.
    fn done(&self, rows: u64, file_bytes: u64) -> u64 {
        match self {
            Self::Rows { total } => {
                (u128::from(file_bytes) * u128::from(rows.min(*total)) / u128::from((*total).max(1))) as u64
            }
            Self::Read(read) => read.load(Ordering::Relaxed).min(file_bytes),
        }
    }
}

/// File that counts the bytes read from it.
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

fn open(path: &Path, format: Option<Format>, args: &CsvArgs) -> Result<Source> {
    if path == Path::new(STDIN) {
        return open_stdin(format, args);
    }
    let mut file = File::open(path).map_err(|error| match error.kind() {
        ErrorKind::NotFound => Error::NotFound(file_failure(path, &error)),
        _ => Error::Invalid(file_failure(path, &error)),
    })?;
    let about = file.metadata()?;
    if about.is_dir() {
        return Err(folder());
    }
    let (start, file_bytes) = (first_bytes(&mut file, &about)?, about.len());
    if about.is_file() && start.is_empty() {
        return Err(empty());
    }
    let format = match format {
        Some(format) => format.check_said(&start).map(|()| format)?,
        None => Format::of_file(path, &start)?,
    };
    check_args(format, args)?;
    let mut untyped = Vec::new();
    let (schema, begin, measure) = match format {
        Format::Parquet => {
            check_end(&mut file, b"PAR1", "a Parquet file")?;
            open_parquet(file)?
        }
        Format::Arrow => {
            let file = Counted::new(file);
            let read = file.read.clone();
            let (schema, begin) = open_arrow(BufReader::with_capacity(BUFFER_BYTES, file))?;
            // The reader began with the footer, so restart the count.
            read.store(0, Ordering::Relaxed);
            (schema, begin, Measure::Read(read))
        }
        Format::ArrowStream => {
            let file = Counted::new(file);
            let measure = Measure::Read(file.read.clone());
            let (schema, begin) = open_stream(file)?;
            (schema, begin, measure)
        }
        Format::Json => return Err(no_json()),
        Format::Csv => {
            let file = Counted::new(file);
            let measure = Measure::Read(file.read.clone());
            let csv = csv::open(file, is_tsv(path), args)?;
            untyped = csv.untyped;
            (csv.schema, csv.begin, measure)
        }
    };
    let is_inferred = format == Format::Csv;
    Ok(Source { schema, file_bytes, is_inferred, untyped, begin, measure, path: path.to_owned() })
}

/// Returns the first bytes of a file; none for a pipe, which can be read only once.
fn first_bytes(file: &mut File, about: &Metadata) -> Result<Vec<u8>> {
    let mut start = Vec::with_capacity(MAGIC_BYTES);
    if about.is_file() {
        file.by_ref().take(MAGIC_BYTES as u64).read_to_end(&mut start)?;
        file.rewind()?;
    }
    Ok(start)
}

/// Returns the error for a folder given instead of a file.
pub fn folder() -> Error {
    Error::Invalid("it is a folder; name the files in it, and add --table to upload them into one table".into())
}

/// Returns the error for an empty file.
pub(super) fn empty() -> Error {
    Error::Invalid("it is empty, and a table needs columns".into())
}

/// Refuses columns that share a name. The server would refuse them too, but does not know the file.
pub(super) fn check_names(schema: &Schema) -> Result<()> {
    let mut names = HashSet::new();
    match schema.fields().iter().find(|field| !names.insert(field.name())) {
        None => Ok(()),
        Some(twice) => Err(Error::Invalid(format!(
            "two columns are named {:?}; rename one, because joins refer to columns by name",
            twice.name()
        ))),
    }
}

fn no_json() -> Error {
    Error::Invalid("JSON can be written but not read; upload it as Parquet, Arrow IPC or CSV".into())
}

/// Refuses CSV options for other formats, because the user expects them to take effect.
fn check_args(format: Format, args: &CsvArgs) -> Result<()> {
    match args.given().first() {
        _ if matches!(format, Format::Csv | Format::Json) => Ok(()),
        None => Ok(()),
        Some(flag) => Err(Error::Invalid(format!(
            "{flag} applies to CSV only, and this is {}; remove {flag}, or upload the files in separate commands",
            format.kind()
        ))),
    }
}

/// Opens standard input. A pipe has no known length and cannot seek, so formats with their index at
/// the end are read into memory first.
fn open_stdin(format: Option<Format>, args: &CsvArgs) -> Result<Source> {
    let (start, mut input) = csv::peek(std::io::stdin(), MAGIC_BYTES)?;
    if start.is_empty() {
        return Err(empty());
    }
    if let Some(format) = format {
        format.check_said(&start)?;
    }
    let format = format.or_else(|| Format::of_magic(&start)).ok_or_else(|| {
        Error::Invalid(format!("the input is neither Arrow IPC nor Parquet by its first bytes; {ADVICE_FOR_CSV}"))
    })?;
    check_args(format, args)?;
    let mut whole = || -> Result<Bytes> {
        let mut bytes = Vec::new();
        input.read_to_end(&mut bytes)?;
        Ok(bytes.into())
    };
    let measure = || Measure::Read(Arc::default());
    let mut untyped = Vec::new();
    let (schema, begin, measure) = match format {
        Format::Parquet => {
            let bytes = whole()?;
            check_end(&mut Cursor::new(&bytes), b"PAR1", "a Parquet file")?;
            open_parquet(bytes)?
        }
        Format::Arrow => {
            let (schema, begin) = open_arrow(Cursor::new(whole()?))?;
            (schema, begin, measure())
        }
        Format::ArrowStream => {
            let (schema, begin) = open_stream(input)?;
            (schema, begin, measure())
        }
        Format::Json => return Err(no_json()),
        Format::Csv => {
            let csv = csv::open(input, false, args)?;
            untyped = csv.untyped;
            (csv.schema, csv.begin, measure())
        }
    };
    let is_inferred = format == Format::Csv;
    Ok(Source { schema, file_bytes: 0, is_inferred, untyped, begin, measure, path: STDIN.into() })
}

fn open_parquet(input: impl ChunkReader + 'static) -> Result<(SchemaRef, Begin, Measure)> {
    let damaged = |error: ParquetError| broken("a Parquet file", &error);
    let mut metadata = ArrowReaderMetadata::load(&input, ArrowReaderOptions::default()).map_err(damaged)?;
    check_intervals(&metadata)?;
    if let Some(schema) = read_schema(&metadata) {
        let options = ArrowReaderOptions::new().with_schema(schema);
        metadata = ArrowReaderMetadata::try_new(metadata.metadata().clone(), options).map_err(damaged)?;
    }
    let builder = ParquetRecordBatchReaderBuilder::new_with_metadata(input, metadata);
    let total = u64::try_from(builder.metadata().file_metadata().num_rows()).unwrap_or(0);
    // The reader's own schema lacks the metadata of the file.
    let schema = builder.schema().clone();
    let reader = builder.with_batch_size(ROWS_PER_BATCH).build().map_err(|error| Error::Invalid(error.to_string()))?;
    let is_padded = schema.fields().iter().any(|field| has_padding(field.data_type()));
    let of_file = schema.clone();
    let read = reader.map(move |batch| match is_padded {
        true => hide_padding(&batch?).and_then(|batch| batch.with_schema(of_file.clone())),
        false => batch.and_then(|batch| batch.with_schema(of_file.clone())),
    });
    let begin = batches(read, "a Parquet file");
    Ok((schema, begin, Measure::Rows { total }))
}

fn open_arrow(mut input: impl Read + Seek + Send + 'static) -> Result<(SchemaRef, Begin)> {
    check_end(&mut input, b"ARROW1", "an Arrow IPC file")?;
    if first_version(&mut input)? == Some(MetadataVersion::V4) {
        // pyarrow writes such a file with a footer of version 5, which the library refuses. Between
        // its marks, a file is a stream.
        input.seek(SeekFrom::Start(FILE_MARK_BYTES))?;
        let reader = StreamReader::try_new(input, None).map_err(|error| broken("an Arrow IPC file", &error))?;
        return Ok((reader.schema(), batches(reader, "an Arrow IPC file")));
    }
    let reader = FileReaderBuilder::new().build(input).map_err(|error| broken("an Arrow IPC file", &error))?;
    Ok((reader.schema(), batches(reader, "an Arrow IPC file")))
}

/// Bytes of the mark at the start of an Arrow IPC file, with its padding.
const FILE_MARK_BYTES: u64 = 8;

/// Maximum bytes of a schema that is looked at before its file is read.
const SCHEMA_BYTES_MAX: u64 = 64 << 20;

/// Returns the version of a file's first message; `None` if the file has no such message. Leaves
/// the input at its start.
fn first_version(input: &mut (impl Read + Seek)) -> Result<Option<MetadataVersion>> {
    let mut word = [0; 4];
    let mut message = Vec::new();
    input.seek(SeekFrom::Start(FILE_MARK_BYTES))?;
    let mut read = || -> std::io::Result<()> {
        input.read_exact(&mut word)?;
        // Writers before Arrow 0.15 begin with the length.
        if word == CONTINUATION {
            input.read_exact(&mut word)?;
        }
        input.take(u64::from(u32::from_le_bytes(word)).min(SCHEMA_BYTES_MAX)).read_to_end(&mut message).map(drop)
    };
    let is_read = read().is_ok();
    input.rewind()?;
    Ok(root_as_message(&message).ok().filter(|_| is_read).map(|message| message.version()))
}

/// First bytes of each message of a stream.
const CONTINUATION: [u8; 4] = [0xff; 4];

fn open_stream(input: impl Read + Send + 'static) -> Result<(SchemaRef, Begin)> {
    let mut input = BufReader::with_capacity(BUFFER_BYTES, input);
    let begins_well = input.fill_buf()?.starts_with(&CONTINUATION);
    let mut reader = StreamReader::try_new(input, None).map_err(|error| match &error {
        ArrowError::IoError(_, cause) if begins_well && cause.kind() == ErrorKind::UnexpectedEof => {
            cut_short("an Arrow IPC stream")
        }
        error => broken("an Arrow IPC stream", error),
    })?;
    let (schema, mut has_ended) = (reader.schema(), false);
    let read = std::iter::from_fn(move || {
        if has_ended {
            return None;
        }
        if let Some(batch) = reader.next() {
            return Some(batch.map_err(|error| failure(&error, "an Arrow IPC stream")));
        }
        has_ended = true;
        match reader.get_mut().fill_buf() {
            Ok([]) => None,
            Ok(_) => Some(Err(Error::Invalid(
                "there is data after the end of the Arrow IPC stream, such as a second stream; write the \
                 rows as one stream, or give each stream on its own"
                    .into(),
            ))),
            Err(error) => Some(Err(error.into())),
        }
    });
    Ok((schema, Box::new(|_| Box::new(read))))
}

/// Returns the name of the file for messages.
fn name_of(path: &Path) -> String {
    if path == Path::new(STDIN) { "standard input".into() } else { path.display().to_string() }
}

/// Refuses a file that begins with the mark of its kind and does not end with it. The index of the
/// rows is at the end, and the libraries' messages for a missing index are unclear.
fn check_end(input: &mut (impl Read + Seek), mark: &[u8], kind: &str) -> Result<()> {
    let mut found = [vec![0; mark.len()], vec![0; mark.len()]];
    let length = input.seek(SeekFrom::End(0))?;
    input.rewind()?;
    if length < mark.len() as u64 {
        return Ok(());
    }
    input.read_exact(&mut found[0])?;
    input.seek(SeekFrom::End(-(mark.len() as i64)))?;
    input.read_exact(&mut found[1])?;
    input.rewind()?;
    match found.each_ref().map(|found| found == mark) {
        [true, false] => Err(cut_short(kind)),
        _ => Ok(()),
    }
}

fn cut_short(kind: &str) -> Error {
    Error::Invalid(format!(
        "it is cut short: it begins as {kind}, but its end is missing; check that it was written and copied in full"
    ))
}

/// Returns the error for a damaged file. The libraries name the missing part, but not the format
/// that they expected.
fn broken(kind: &str, error: &dyn std::fmt::Display) -> Error {
    Error::Invalid(format!("it is not {kind}, or is damaged: {}", first_words(error)))
}

/// Returns a library's message without the fields that a verifier of flatbuffers appends: offsets,
/// and a trace.
fn first_words(error: &dyn std::fmt::Display) -> String {
    let said = error.to_string();
    match said.split_once(" { ") {
        Some((words, fields)) if fields.contains("error_trace: ") => words.to_owned(),
        _ => said,
    }
}

/// Returns the batches of a library's reader, in the types of the file.
fn batches(
    reader: impl Iterator<Item = Result<RecordBatch, ArrowError>> + Send + 'static,
    kind: &'static str,
) -> Begin {
    Box::new(move |_| Box::new(reader.map(move |batch| batch.map_err(|error| failure(&error, kind)))))
}

fn failure(error: &ArrowError, kind: &str) -> Error {
    match error {
        ArrowError::IoError(_, cause) if cause.kind() == ErrorKind::UnexpectedEof => cut_short(kind),
        error => Error::Invalid(format!("the rest of it is damaged: {}", first_words(error))),
    }
}

#[cfg(test)]
mod tests {
    use arrow::array::{ArrayRef, Int64Array};

    use super::*;

    #[test]
    fn a_damaged_header_is_reported_without_the_trace_of_the_verifier() {
        let column: ArrayRef = Arc::new(Int64Array::from_iter_values([1]));
        let batch = RecordBatch::try_from_iter([("k", column)]).unwrap();
        let mut writer = arrow::ipc::writer::StreamWriter::try_new(Vec::new(), &batch.schema()).unwrap();
        writer.write(&batch).unwrap();
        let whole = writer.into_inner().unwrap();
        // Damage the offset of the root table, after the mark and the length of the message. One
        // value is odd, and one points outside the message.
        for (at, flipped, words) in [(8, 0x01, "Unaligned"), (10, 0xff, "RangeOutOfBounds")] {
            let mut damaged = whole.clone();
            damaged[at] ^= flipped;
            let error = open_stream(Cursor::new(damaged)).map(drop).unwrap_err();
            assert!(error.message().ends_with(&format!("Unable to get root as message: {words}")), "{error}");
        }
    }

    #[tokio::test]
    async fn a_panic_of_a_reader_is_not_taken_for_the_end_of_its_file() {
        let column: ArrayRef = Arc::new(Int64Array::from_iter_values([1]));
        let batch = RecordBatch::try_from_iter([("k", column)]).unwrap();
        let (schema, mut is_first) = (batch.schema(), true);
        let batches = std::iter::from_fn(move || {
            assert!(std::mem::take(&mut is_first), "the second batch is too much");
            Some(Ok(batch.clone()))
        });
        let source = Source {
            schema,
            file_bytes: 8,
            is_inferred: false,
            untyped: Vec::new(),
            begin: Box::new(|_| Box::new(batches)),
            measure: Measure::Rows { total: 2 },
            path: "half.arrow".into(),
        };
        let mut pieces = source.into_stream();
        assert!(pieces.next().await.unwrap().is_ok());
        let error = pieces.next().await.unwrap().unwrap_err();
        let expected = "reading half.arrow: it is damaged or has unreadable contents: the second batch is too much";
        assert_eq!(error.message(), expected);
        assert!(pieces.next().await.is_none());
    }
}
