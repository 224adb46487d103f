//! Encoders of all formats, as their libraries offer them.

use std::io::Write;
use std::sync::Arc;

use arrow::array::RecordBatch;
use arrow::csv;
use arrow::datatypes::Schema;
use arrow::ipc::writer::{FileWriter, StreamWriter};
use arrow::json::{LineDelimitedWriter, WriterBuilder};
use parquet::arrow::ArrowWriter;
use parquet::basic::{Compression, ZstdLevel};
use parquet::file::properties::WriterProperties;

use super::Format;
use crate::panics;

/// Encoder of a format. Its errors are the words of a library, also of a panic in it.
pub(super) enum Encoder<W: Write + Send> {
    Parquet(Box<ArrowWriter<W>>),
    Arrow(FileWriter<W>),
    ArrowStream(StreamWriter<W>),
    Csv(csv::Writer<W>),
    Json(LineDelimitedWriter<W>),
}

impl<W: Write + Send> Encoder<W> {
    /// Begins to write. `delimiter` is for CSV.
    pub(super) fn new(format: Format, delimiter: u8, schema: &Schema, to: W) -> Result<Self, String> {
        words(|| {
            Ok(match format {
                Format::Parquet => {
                    let compression = Compression::ZSTD(ZstdLevel::try_new(1).map_err(|error| error.to_string())?);
                    let properties = WriterProperties::builder().set_compression(compression).build();
                    let writer = ArrowWriter::try_new(to, Arc::new(schema.clone()), Some(properties));
                    Self::Parquet(Box::new(writer.map_err(|error| error.to_string())?))
                }
                Format::Arrow => Self::Arrow(FileWriter::try_new(to, schema).map_err(|error| error.to_string())?),
                Format::ArrowStream => {
                    Self::ArrowStream(StreamWriter::try_new(to, schema).map_err(|error| error.to_string())?)
                }
                Format::Csv => {
                    let mut writer = csv::WriterBuilder::new().with_delimiter(delimiter).build(to);
                    // Write the heading, also for a table without rows.
                    let no_rows = RecordBatch::new_empty(Arc::new(schema.clone()));
                    writer.write(&no_rows).map_err(|error| error.to_string())?;
                    Self::Csv(writer)
                }
                // JSON has no NaN and no infinities, so they become null, too.
                Format::Json => Self::Json(WriterBuilder::new().with_explicit_nulls(true).build(to)),
            })
        })
    }

    pub(super) fn write(&mut self, batch: &RecordBatch) -> Result<(), String> {
        words(|| match self {
            Self::Parquet(writer) => writer.write(batch).map_err(|error| error.to_string()),
            Self::Arrow(writer) => writer.write(batch).map_err(|error| error.to_string()),
            Self::ArrowStream(writer) => writer.write(batch).map_err(|error| error.to_string()),
            Self::Csv(writer) => writer.write(batch).map_err(|error| error.to_string()),
            Self::Json(writer) => writer.write(batch).map_err(|error| error.to_string()),
        })
    }

    /// Hands on what has been written, as far as the format can be read before its end.
    pub(super) fn flush(&mut self) -> std::io::Result<()> {
        match self {
            // A Parquet file is read from its end, and the encoder of CSV flushes each batch.
            Self::Parquet(_) | Self::Csv(_) => Ok(()),
            Self::Arrow(writer) => writer.get_mut().flush(),
            Self::ArrowStream(writer) => writer.get_mut().flush(),
            Self::Json(writer) => writer.get_mut().flush(),
        }
    }

    /// Writes the end, and returns the output.
    pub(super) fn finish(self) -> Result<W, String> {
        words(|| match self {
            Self::Parquet(writer) => writer.into_inner().map_err(|error| error.to_string()),
            Self::Arrow(writer) => writer.into_inner().map_err(|error| error.to_string()),
            Self::ArrowStream(writer) => writer.into_inner().map_err(|error| error.to_string()),
            Self::Csv(writer) => Ok(writer.into_inner()),
            Self::Json(mut writer) => {
                writer.finish().map_err(|error| error.to_string())?;
                Ok(writer.into_inner())
            }
        })
    }
}

fn words<T>(work: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    panics::caught(work).unwrap_or_else(Err)
}
