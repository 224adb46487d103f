//! Writes tables into files.

use std::fs::File;
use std::io::{BufWriter, ErrorKind, IsTerminal, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use arrow::array::RecordBatch;
use arrow::datatypes::SchemaRef;
use clap::ValueEnum;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use super::{BATCHES_AHEAD, Format, Writer, is_tsv};
use crate::cli::output;
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
    pub fn begin(mut self, schema: &SchemaRef) -> Result<Sink> {
        let file = self.file.take().ok_or_else(|| Error::Internal("the file has already been started".into()))?;
        let opened = Opened { file, path: self.path.clone(), failure: self.failure.clone() };
        let delimiter = if is_tsv(&self.path) { b'\t' } else { b',' };
        let writer = Writer::new(self.format, delimiter, schema, BufWriter::with_capacity(1 << 20, opened));
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
    pub fn start(self, schema: &SchemaRef) -> Result<Writing> {
        let path = self.path.clone();
        let mut sink = self.begin(schema)?;
        let (batches, mut queued) = mpsc::channel::<Option<RecordBatch>>(BATCHES_AHEAD);
        let writer = tokio::task::spawn_blocking(move || {
            // The reader of a pipe has the columns then.
            sink.flush()?;
            while let Some(Some(batch)) = queued.blocking_recv() {
                // The caller keeps its sender while it waits for the file. A dropped sender means
                // that the file will be removed, so stop early.
                if queued.is_closed() {
                    break;
                }
                sink.write(&batch)?;
                // Rows that arrive slowly do not wait for others to fill the buffer.
                if queued.is_empty() {
                    sink.flush()?;
                }
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
    writer: Writer<BufWriter<Opened>>,
    target: Target,
}

impl Sink {
    /// Writes a batch.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the format cannot hold the batch, [`Error::Exhausted`] if the disk is
    /// full.
    pub fn write(&mut self, batch: &RecordBatch) -> Result<()> {
        self.writer.write(batch).map_err(|error| self.target.failed(error))
    }

    /// Hands on what has been written so far.
    ///
    /// # Errors
    /// [`Error::Exhausted`] if the disk is full.
    fn flush(&mut self) -> Result<()> {
        self.writer.flush().map_err(|error| self.target.failed(error))
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
    pub fn complete(self) -> Result<Complete> {
        let Self { writer, target } = self;
        let flushed = writer.finish().and_then(|mut file| file.flush().map_err(Error::from));
        match flushed {
            Ok(()) => Ok(Complete(target)),
            Err(error) => Err(target.failed(error)),
        }
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
