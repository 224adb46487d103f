//! Writes batches in a format. Every failure is a sentence that names the column.

use std::io::{Write, sink};

use arrow::array::RecordBatch;
use arrow::datatypes::{Schema, SchemaRef};

use super::Format;
use super::encoder::Encoder;
use super::parquet_types::{in_parquet, parquet_schema};
use super::supported::{advice, check_columns, check_values};
use crate::human::type_name;
use crate::{Error, Result};

/// Writer of batches.
pub struct Writer<W: Write + Send> {
    format: Format,
    encoder: Encoder<W>,
    /// Columns of the batches.
    schema: SchemaRef,
    /// Columns as the encoder takes them.
    written: SchemaRef,
    /// The last batch, whose columns the end may be made of.
    last: Option<RecordBatch>,
}

impl<W: Write + Send> Writer<W> {
    /// Begins to write a table with the columns of `schema`. `delimiter` is for CSV.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the format cannot hold the columns.
    pub fn new(format: Format, delimiter: u8, schema: &SchemaRef, to: W) -> Result<Self> {
        let written = if format == Format::Parquet { parquet_schema(schema) } else { schema.clone() };
        check_columns(format, schema, &written)?;
        let encoder = Encoder::new(format, delimiter, &written, to).map_err(|words| refused(format, None, &words))?;
        Ok(Self { format, encoder, schema: schema.clone(), written, last: None })
    }

    /// Writes a batch.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the format cannot hold the batch. Nothing can be written after an
    /// error.
    pub fn write(&mut self, batch: &RecordBatch) -> Result<()> {
        check_values(self.format, batch)?;
        let batch = if self.format == Format::Parquet { in_parquet(batch, &self.written)? } else { batch.clone() };
        let written = self.encoder.write(&batch);
        written.map_err(|words| explained(self.format, &self.schema, Some(&batch), words))?;
        self.last = Some(batch);
        Ok(())
    }

    /// Hands on what has been written so far.
    ///
    /// # Errors
    /// Those of the output.
    pub fn flush(&mut self) -> Result<()> {
        self.encoder.flush().map_err(Error::from)
    }

    /// Writes the end of the table, and returns the output.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the format cannot hold the table.
    pub fn finish(self) -> Result<W> {
        let Self { format, encoder, schema, last, .. } = self;
        encoder.finish().map_err(|words| explained(format, &schema, last.as_ref(), words))
    }
}

/// Returns the sentence for a library's error, with the column of the batch that causes it.
fn explained(format: Format, schema: &Schema, batch: Option<&RecordBatch>, words: String) -> Error {
    if words.contains("Dictionary replacement") {
        return Error::Invalid(
            "an Arrow IPC file has one dictionary per column, but this table has several; write .arrows (a stream) \
             or .parquet"
                .into(),
        );
    }
    let column = batch.and_then(|batch| {
        (0..batch.num_columns()).find_map(|at| Some((at, refused_alone(format, &batch.project(&[at]).ok()?)?)))
    });
    match column {
        Some((at, words)) => {
            let field = schema.field(at);
            refused(format, Some((field.name(), &type_name(field.data_type()))), &words)
        }
        None => refused(format, None, &words),
    }
}

/// Returns the library's words if it does not write the batch.
fn refused_alone(format: Format, batch: &RecordBatch) -> Option<String> {
    let written = || {
        let mut encoder = Encoder::new(format, b',', &batch.schema(), sink())?;
        encoder.write(batch)?;
        encoder.finish()
    };
    written().err()
}

fn refused(format: Format, column: Option<(&str, &str)>, words: &str) -> Error {
    let subject = match column {
        Some((name, kind)) => format!("column {name:?} is {kind}, and its values"),
        None => "the rows".into(),
    };
    let others = [Format::Parquet, Format::Arrow].into_iter();
    let advice = advice(others.filter(|other| *other != format && format != Format::Arrow));
    Error::Invalid(format!("{subject} cannot be written as {}: {words}; {advice}", format.word()))
}
