//! Tables in files: Parquet, Arrow IPC (file and stream) and CSV, read and written batch by batch.

mod sink;
mod source;
#[cfg(test)]
mod tests;

use std::fs::File;
use std::io::{Read, Seek};
use std::path::Path;

pub use sink::Target;
pub use source::{Piece, Source};

use crate::{Error, Result};

/// Batches that wait between the thread that reads or writes a file and whoever takes or gives them.
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
            _ => Err(Error::Invalid(
                "the name does not say the format; use .parquet, .arrow, .arrows (stream) or .csv, or say --format"
                    .into(),
            )),
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
