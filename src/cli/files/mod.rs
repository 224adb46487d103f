//! Tables in files: Parquet, Arrow IPC (file and stream) and CSV, read and written batch by batch;
//! also read from standard input and written to standard output. JSON lines are written only.

mod csv;
mod encoder;
mod padding;
mod parquet_types;
mod read_types;
mod sink;
mod source;
mod supported;
#[cfg(test)]
mod tests;
mod writer;

use std::path::Path;

use clap::ValueEnum;

pub use csv::CsvArgs;
pub use sink::{Complete, STDOUT, Target};
pub use source::{ADVICE_FOR_CSV, Piece, STDIN, Source, folder};
pub use writer::Writer;

use crate::{Error, Result};

/// Batches that may wait in the queue of a thread that reads or writes a file.
const BATCHES_AHEAD: usize = 4;

/// Bytes at the start of a file that show its format.
const MAGIC_BYTES: usize = 8;

/// What a file is written in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Format {
    /// Apache Parquet
    Parquet,
    /// Arrow IPC file (also called Feather)
    Arrow,
    /// Arrow IPC stream
    ArrowStream,
    /// Comma-separated values with a header line
    Csv,
    /// One JSON object per line and row, with all columns. NaN and infinities become null. For
    /// output only
    Json,
}

/// Formats that can be read.
pub const READABLE: [Format; 4] = [Format::Parquet, Format::Arrow, Format::ArrowStream, Format::Csv];

impl Format {
    /// Returns the file name extensions of the format.
    fn extensions(self) -> &'static [&'static str] {
        match self {
            Self::Parquet => &["parquet", "pq"],
            Self::Arrow => &["arrow", "ipc", "feather"],
            Self::ArrowStream => &["arrows", "arrow_stream", "stream"],
            Self::Csv => &["csv", "tsv", "txt"],
            Self::Json => &["json", "jsonl", "ndjson"],
        }
    }

    /// Returns the format that a file's name stands for.
    ///
    /// # Errors
    /// [`Error::Invalid`] lists the extensions of `formats`, the formats that are possible here.
    pub fn of_name(path: &Path, formats: &[Self]) -> Result<Self> {
        let extension = path.extension().map(|extension| extension.to_string_lossy().to_ascii_lowercase());
        let is_named = |format: &&Self| extension.as_deref().is_some_and(|name| format.extensions().contains(&name));
        Self::value_variants().iter().find(is_named).copied().ok_or_else(|| {
            let extensions = formats.iter().flat_map(|format| format.extensions());
            let extensions = extensions.map(|name| format!(".{name}")).collect::<Vec<_>>().join(", ");
            Error::Invalid(format!("the name does not show the format; use one of {extensions}, or add --format"))
        })
    }

    /// Returns the format that the first bytes of the file show, or else that of
    /// [`Format::of_name`]. The bytes are more reliable than the name. A gzip file must be CSV by
    /// the name before `.gz`.
    fn of_file(path: &Path, start: &[u8]) -> Result<Self> {
        if let Some(format) = Self::of_magic(start) {
            return Ok(format);
        }
        if path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("orc")) {
            return Err(Error::Invalid(
                "the command line does not read ORC; upload it with the Python client, or convert it to Parquet".into(),
            ));
        }
        if !start.starts_with(&csv::GZIP_MAGIC) {
            return match without_gz(path) == path {
                true => Self::of_name(path, &READABLE),
                false => Err(Error::Invalid(
                    "its name ends in .gz, but it is not gzip; rename it without .gz, or add --format".into(),
                )),
            };
        }
        match Self::of_name(without_gz(path), &READABLE) {
            Ok(Self::Csv) => Ok(Self::Csv),
            _ => Err(Error::Invalid(
                "it is compressed by gzip, which only CSV may be; name it .csv.gz or add --format csv if it is CSV, \
                 or else decompress it first"
                    .into(),
            )),
        }
    }

    /// Refuses a `--format` that contradicts the first bytes. A text file may begin with the
    /// letters of a mark by chance. In a file of the marked format, the mark is followed by bytes
    /// that are not text.
    fn check_said(self, start: &[u8]) -> Result<()> {
        let is_text = !start.iter().any(|byte| matches!(byte, 0..b'\t' | 0x0e..b' ' | 0xff));
        match Self::of_magic(start) {
            Some(found) if found != self && !is_text => Err(Error::Invalid(format!(
                "it is {}, but --format is {}; remove --format, or upload the file in a separate command",
                found.kind(),
                self.name()
            ))),
            _ => Ok(()),
        }
    }

    /// Returns the word that `--format` takes.
    fn name(self) -> String {
        self.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
    }

    /// Returns the word for the format in messages about tables that it does not hold.
    fn word(self) -> &'static str {
        match self {
            Self::Parquet => "Parquet",
            Self::Arrow | Self::ArrowStream => "Arrow",
            Self::Csv => "CSV",
            Self::Json => "JSON",
        }
    }

    /// Returns a noun phrase for a file of the format.
    fn kind(self) -> &'static str {
        match self {
            Self::Parquet => "a Parquet file",
            Self::Arrow => "an Arrow IPC file",
            Self::ArrowStream => "an Arrow IPC stream",
            Self::Csv => "CSV",
            Self::Json => "JSON",
        }
    }

    /// Returns the format whose files begin with these bytes. CSV has no such mark.
    fn of_magic(magic: &[u8]) -> Option<Self> {
        match magic {
            [b'P', b'A', b'R', b'1', ..] => Some(Self::Parquet),
            [b'A', b'R', b'R', b'O', b'W', b'1', ..] => Some(Self::Arrow),
            [0xff, 0xff, 0xff, 0xff, ..] => Some(Self::ArrowStream),
            _ => None,
        }
    }
}

/// True if a file's name says that its fields are separated by tabs.
fn is_tsv(path: &Path) -> bool {
    without_gz(path).extension().is_some_and(|extension| extension.eq_ignore_ascii_case("tsv"))
}

/// Returns the name that a file had before gzip compressed it.
pub fn without_gz(path: &Path) -> &Path {
    let is_gz = path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("gz"));
    match (is_gz, path.file_stem()) {
        (true, Some(stem)) => Path::new(stem),
        _ => path,
    }
}
