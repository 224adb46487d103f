//! Writes tables into files.

use std::fs::File;
use std::io::{BufWriter, ErrorKind, IsTerminal, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use arrow::array::{ArrayRef, RecordBatch, RecordBatchOptions};
use arrow::compute::{CastOptions, cast_with_options};
use arrow::csv;
use arrow::datatypes::{DataType, FieldRef, Schema, SchemaRef, TimeUnit};
use arrow::ipc::writer::{FileWriter, StreamWriter};
use arrow::json::LineDelimitedWriter;
use clap::ValueEnum;
use parquet::arrow::ArrowWriter;
use parquet::basic::{Compression, ZstdLevel};
use parquet::file::properties::WriterProperties;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use super::{BATCHES_AHEAD, Format, is_tsv};
use crate::cli::{output, rows};
use crate::human::{file_failure, system_words};
use crate::{Context, Error, Result};

/// File that is about to be written, still empty, under a temporary name next to its final name.
/// Creating it shows early whether the file can be written, before rows or columns are known.
/// Dropping it removes the file.
#[derive(Debug)]
pub struct Target {
    file: Option<File>,
    format: Format,
    path: PathBuf,
    failure: Failure,
    /// `None` for a pipe or a device (`/dev/null`), which exists already and must not be replaced
    /// by a file.
    aside: Option<Aside>,
}

/// Temporary file, next to its final place.
#[derive(Debug)]
struct Aside {
    path: PathBuf,
    /// Final place of the file, with links resolved.
    place: PathBuf,
}

/// Number of links that Linux follows.
const LINKS_MAX: usize = 40;

/// File name that stands for standard output.
pub const STDOUT: &str = "-";

/// File that is open for writing.
#[derive(Debug)]
struct Opened {
    file: File,
    path: PathBuf,
    failure: Failure,
}

/// First error of the system, kept because the libraries wrap the system's message in their own
/// words.
type Failure = Arc<OnceLock<Error>>;

impl Write for Opened {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.file.write(bytes).inspect_err(|failure| {
            // An interrupted write is tried again.
            if failure.kind() != ErrorKind::Interrupted {
                let error = match self.path == Path::new(STDOUT) {
                    true => output::stdout_failure(failure),
                    false => {
                        Error::Exhausted(format!("cannot write {}: {}", self.path.display(), system_words(failure)))
                    }
                };
                let _ = self.failure.set(error);
            }
        })
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.file.flush()
    }
}

impl Target {
    /// Creates the file next to its final place. "-" is standard output, which gets an Arrow IPC
    /// stream unless `format` is given.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the name does not show a format, or the place cannot be written.
    pub fn create(path: &Path, format: Option<Format>) -> Result<Self> {
        if path == Path::new(STDOUT) {
            return Self::stdout(format.unwrap_or(Format::ArrowStream));
        }
        let context = || format!("writing {}", path.display());
        let there = std::fs::metadata(path).ok();
        if there.as_ref().is_some_and(std::fs::Metadata::is_dir) {
            return Err(Error::Invalid("it is a folder; give the name of a file".into())).context(context);
        }
        let format = match format {
            Some(format) => match Format::of_name(path, &[]) {
                Ok(named) if named != format => {
                    let why = format!(
                        "its name says {}, but --format is {}; remove --format, or rename the file",
                        named.name(),
                        format.name()
                    );
                    return Err(Error::Invalid(why)).context(context);
                }
                _ => format,
            },
            None => Format::of_name(path, Format::value_variants()).context(context)?,
        };
        let opened = match there {
            Some(there) if !there.is_file() => File::options().write(true).open(path).map(|file| (file, None)),
            there => create_aside(path, there.map(|there| there.permissions())),
        };
        let (file, aside) = opened.map_err(|error| Error::Invalid(file_failure(path, &error))).context(context)?;
        Ok(Self { file: Some(file), format, path: path.into(), failure: Failure::default(), aside })
    }

    fn stdout(format: Format) -> Result<Self> {
        let stdout = std::io::stdout();
        if stdout.is_terminal() && !matches!(format, Format::Csv | Format::Json) {
            return Err(Error::Invalid(
                "standard output is a terminal, which shows only text; add --format csv or --format json, or \
                 redirect the output, as in: -o - > FILE"
                    .into(),
            ));
        }
        let file = stdout.as_fd().try_clone_to_owned().map_err(|failure| output::stdout_failure(&failure))?;
        let failure = Failure::default();
        Ok(Self { file: Some(file.into()), format, path: STDOUT.into(), failure, aside: None })
    }

    /// True if the target is standard output.
    pub fn is_stdout(&self) -> bool {
        self.path == Path::new(STDOUT)
    }

    /// Begins to write a table with the columns of `schema`.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the format cannot hold the columns.
    pub fn begin(mut self, schema: &Schema) -> Result<Sink> {
        let file = self.file.take().ok_or_else(|| Error::Internal("the file has already been started".into()))?;
        let opened = Opened { file, path: self.path.clone(), failure: self.failure.clone() };
        let writer = Writer::new(self.format, &self.path, BufWriter::with_capacity(1 << 20, opened), schema);
        let writer = writer.map_err(|error| self.failed(error))?;
        Ok(Sink { writer, target: self })
    }

    /// Returns the system's error if a write failed, or else `error`.
    fn failed(&self, error: Error) -> Error {
        match self.failure.get() {
            Some(failure) => failure.clone(),
            None => error.context(format!("writing {}", self.name())),
        }
    }

    /// Returns the name of the file for messages.
    fn name(&self) -> String {
        if self.is_stdout() { "standard output".into() } else { self.path.display().to_string() }
    }

    /// Begins to write on a separate thread, because compression must not delay the sockets.
    ///
    /// # Errors
    /// The errors of [`Target::begin`].
    pub fn start(self, schema: &Schema) -> Result<Writing> {
        let path = self.path.clone();
        let mut sink = self.begin(schema)?;
        let (batches, mut queued) = mpsc::channel::<Option<RecordBatch>>(BATCHES_AHEAD);
        let writer = tokio::task::spawn_blocking(move || {
            while let Some(Some(batch)) = queued.blocking_recv() {
                // The caller keeps its sender while it waits for the file. A dropped sender means
                // that the file will be removed, so stop early.
                if queued.is_closed() {
                    break;
                }
                sink.write(&batch)?;
            }
            Ok(sink)
        });
        Ok(Writing { batches, writer, path })
    }

    /// Returns the final path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        if let Some(aside) = &self.aside {
            // Ignore errors of the removal: the error that led here matters more.
            let _ = std::fs::remove_file(&aside.path);
        }
    }
}

/// Creates a file next to its final place, with the permissions of the file that it will replace.
fn create_aside(path: &Path, there: Option<std::fs::Permissions>) -> std::io::Result<(File, Option<Aside>)> {
    let place = behind_links(path)?;
    let mut aside = place.as_os_str().to_owned();
    aside.push(format!(".{}.part", std::process::id()));
    let aside = Aside { path: aside.into(), place };
    let mut options = File::options();
    options.write(true).create(true).truncate(true);
    if let Some(there) = &there {
        options.mode(there.mode() & 0o777);
    }
    let file = options.open(&aside.path)?;
    if let Some(there) = there {
        // The process's umask removed permissions when the file was created. Restore them.
        file.set_permissions(there).inspect_err(|_| drop(std::fs::remove_file(&aside.path)))?;
    }
    Ok((file, Some(aside)))
}

/// Resolves a link, and the links behind it, even if no file exists at the end.
fn behind_links(path: &Path) -> std::io::Result<PathBuf> {
    let mut path = path.to_owned();
    for _ in 0..LINKS_MAX {
        match std::fs::read_link(&path) {
            // A relative target starts at the link's folder. `join` replaces the path if the target
            // is absolute.
            Ok(target) => path = path.parent().unwrap_or(Path::new("")).join(target),
            Err(_) => return Ok(path),
        }
    }
    Err(std::io::Error::other("its name is a circular link"))
}

/// File that a thread writes. Dropping it removes the file, once the thread has written its current
/// batch.
pub struct Writing {
    /// Queue of batches; `None` follows the last batch.
    batches: mpsc::Sender<Option<RecordBatch>>,
    writer: JoinHandle<Result<Sink>>,
    path: PathBuf,
}

impl Writing {
    /// Queues a batch for the thread, and waits while the queue is full.
    ///
    /// # Errors
    /// The errors of [`Sink::write`], for this batch or an earlier one. Nothing can be written
    /// after an error.
    pub async fn write(&mut self, batch: RecordBatch) -> Result<()> {
        match self.batches.send(Some(batch)).await {
            Ok(()) => Ok(()),
            // The thread ends before its last batch only after a failure.
            Err(_) => match written(&mut self.writer, &self.path).await {
                Err(error) => Err(error),
                Ok(_) => Err(Error::Internal(format!("the writer of {} ended early", self.path.display()))),
            },
        }
    }

    /// Completes the file and gives it its name.
    ///
    /// # Errors
    /// The errors of [`Writing::complete`] and [`Complete::appear`].
    pub async fn finish(self) -> Result<()> {
        self.complete().await?.appear()
    }

    /// Completes the file.
    ///
    /// # Errors
    /// The errors of [`Sink::write`] for the last batches, and of [`Sink::complete`].
    pub async fn complete(self) -> Result<Complete> {
        let Self { batches, mut writer, path } = self;
        // Ignore a failed send: the thread has failed, and its own error is better.
        let _ = batches.send(None).await;
        let sink = written(&mut writer, &path).await?;
        written(&mut tokio::task::spawn_blocking(move || sink.complete()), &path).await
    }
}

async fn written<T>(writer: &mut JoinHandle<Result<T>>, path: &Path) -> Result<T> {
    writer.await.map_err(|error| Error::Internal(format!("the writer of {}: {error}", path.display())))?
}

/// File that is being written. It appears under its name only when it is finished.
pub struct Sink {
    writer: Writer,
    target: Target,
}

enum Writer {
    Parquet(Box<ArrowWriter<BufWriter<Opened>>>, SchemaRef),
    Arrow(FileWriter<BufWriter<Opened>>),
    ArrowStream(StreamWriter<BufWriter<Opened>>),
    Csv(csv::Writer<BufWriter<Opened>>),
    Json(LineDelimitedWriter<BufWriter<Opened>>),
}

impl Sink {
    /// Writes a batch.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the format cannot hold the batch, [`Error::Exhausted`] if the disk is
    /// full.
    pub fn write(&mut self, batch: &RecordBatch) -> Result<()> {
        let written = match &mut self.writer {
            Writer::Parquet(writer, schema) => {
                writer.write(&in_parquet(batch, schema)?).map_err(|error| Error::Invalid(error.to_string()))
            }
            Writer::Arrow(writer) => writer.write(batch).map_err(Error::from),
            Writer::ArrowStream(writer) => writer.write(batch).map_err(Error::from),
            Writer::Csv(writer) => rows::check_has_text(batch).and_then(|()| writer.write(batch).map_err(Error::from)),
            Writer::Json(writer) => rows::check_has_text(batch).and_then(|()| writer.write(batch).map_err(Error::from)),
        };
        written
            .map_err(|error| match error.message().contains("Dictionary replacement") {
                true => Error::Invalid(
                    "an Arrow IPC file has one dictionary per column, but this table has several; write .arrows (a \
                     stream) or .parquet"
                        .into(),
                ),
                false => error,
            })
            .map_err(|error| self.target.failed(error))
    }

    /// Completes the file and gives it its name.
    ///
    /// # Errors
    /// [`Error::Exhausted`] if the disk is full.
    #[cfg(test)]
    pub fn finish(self) -> Result<()> {
        self.complete()?.appear()
    }

    /// Completes the file.
    ///
    /// # Errors
    /// [`Error::Exhausted`] if the disk is full.
    pub fn complete(mut self) -> Result<Complete> {
        let finished = match &mut self.writer {
            Writer::Parquet(writer, _) => writer.finish().map(drop).map_err(|error| Error::Invalid(error.to_string())),
            Writer::Arrow(writer) => writer.finish().map_err(Error::from),
            Writer::ArrowStream(writer) => writer.finish().map_err(Error::from),
            Writer::Csv(_) => Ok(()),
            Writer::Json(writer) => writer.finish().map_err(Error::from),
        };
        let flushed = finished.and_then(|()| {
            let file = match &mut self.writer {
                Writer::Parquet(writer, _) => writer.inner_mut(),
                Writer::Arrow(writer) => writer.get_mut(),
                Writer::ArrowStream(writer) => writer.get_mut(),
                Writer::Json(writer) => writer.get_mut(),
                // The CSV writer flushes after each batch.
                Writer::Csv(_) => return Ok(()),
            };
            file.flush().map_err(Error::from)
        });
        flushed.map_err(|error| self.target.failed(error))?;
        Ok(Complete(self.target))
    }
}

/// Complete file that does not have its name yet. Dropping it removes the file.
#[derive(Debug)]
pub struct Complete(Target);

impl Complete {
    /// Gives the file its name.
    ///
    /// # Errors
    /// [`Error::Exhausted`] if the disk is full.
    pub fn appear(self) -> Result<()> {
        let Self(mut target) = self;
        if let Some(aside) = &target.aside {
            std::fs::rename(&aside.path, &aside.place).map_err(|error| target.failed(error.into()))?;
            target.aside = None;
        }
        Ok(())
    }
}

/// Returns the schema with types that Parquet has. Parquet has no times in whole seconds and no
/// days in milliseconds; other readers would find numbers instead. The Parquet library has no
/// dictionaries of some types.
fn parquet_schema(schema: &Schema) -> SchemaRef {
    let field = |field: &FieldRef| Arc::new(field.as_ref().clone().with_data_type(parquet_type(field.data_type())));
    let fields: Vec<FieldRef> = schema.fields().iter().map(field).collect();
    Arc::new(Schema::new_with_metadata(fields, schema.metadata().clone()))
}

fn parquet_type(data_type: &DataType) -> DataType {
    match data_type {
        DataType::Timestamp(TimeUnit::Second, zone) => DataType::Timestamp(TimeUnit::Millisecond, zone.clone()),
        DataType::Time32(TimeUnit::Second) => DataType::Time32(TimeUnit::Millisecond),
        DataType::Date64 => DataType::Date32,
        DataType::Dictionary(_, values) => {
            let values_type = parquet_type(values);
            let is_dictionary = values_type == **values && rows::has_parquet(data_type);
            if is_dictionary { data_type.clone() } else { values_type }
        }
        other => other.clone(),
    }
}

/// Casts the batch to the types of [`parquet_schema`].
fn in_parquet(batch: &RecordBatch, schema: &SchemaRef) -> Result<RecordBatch> {
    let options = CastOptions { safe: false, ..CastOptions::default() };
    let column = |(column, field): (&ArrayRef, &FieldRef)| match column.data_type() == field.data_type() {
        true => Ok(column.clone()),
        false => cast_with_options(column, field.data_type(), &options),
    };
    let columns = batch.columns().iter().zip(schema.fields()).map(column).collect::<Result<Vec<_>, _>>()?;
    let rows = RecordBatchOptions::new().with_row_count(Some(batch.num_rows()));
    Ok(RecordBatch::try_new_with_options(schema.clone(), columns, &rows)?)
}

impl Writer {
    fn new(format: Format, path: &Path, file: BufWriter<Opened>, schema: &Schema) -> Result<Self> {
        Ok(match format {
            Format::Parquet => {
                let level = ZstdLevel::try_new(1).map_err(|error| Error::Internal(error.to_string()))?;
                let properties = WriterProperties::builder().set_compression(Compression::ZSTD(level)).build();
                let schema = parquet_schema(schema);
                rows::check_has_parquet(&schema)?;
                let writer = ArrowWriter::try_new(file, schema.clone(), Some(properties));
                Self::Parquet(Box::new(writer.map_err(|error| Error::Invalid(error.to_string()))?), schema)
            }
            Format::Arrow => Self::Arrow(FileWriter::try_new(file, schema)?),
            Format::ArrowStream => Self::ArrowStream(StreamWriter::try_new(file, schema)?),
            Format::Json => {
                rows::check_has_json(schema)?;
                Self::Json(rows::json_writer(file))
            }
            Format::Csv => {
                rows::check_has_csv(schema)?;
                let delimiter = if is_tsv(path) { b'\t' } else { b',' };
                let mut writer = csv::WriterBuilder::new().with_delimiter(delimiter).build(file);
                // Write the heading, also for a table without rows.
                writer.write(&RecordBatch::new_empty(Arc::new(schema.clone())))?;
                Self::Csv(writer)
            }
        })
    }
}
