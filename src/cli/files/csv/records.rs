//! Reads CSV records as batches of text, with the line number of each record.

use std::io::{BufRead, BufReader, Read};

use arrow::array::{AsArray, RecordBatch};
use arrow::csv::ReaderBuilder;
use arrow::csv::reader::{Decoder, Format};
use arrow::datatypes::SchemaRef;
use arrow::error::ArrowError;

use super::types::convert;
use crate::cli::files::source::{BUFFER_BYTES, ROWS_PER_BATCH};
use crate::cli::names::assignment;
use crate::human::type_name;
use crate::memory::human_bytes;
use crate::{Error, Result};

/// Upper limit of the bytes of a batch's records. An unclosed quote puts the rest of the file into
/// one record, which would fill memory before the end of a long file.
const BATCH_BYTES_MAX: usize = 1 << 30;

/// Rows of the first batch, which shows how long rows are.
const FIRST_BATCH_ROWS: usize = 64;

/// Target for the bytes of a batch's records.
const BATCH_BYTES: usize = 64 << 20;

/// Reads records in batches.
pub(super) struct Records<R> {
    input: BufReader<R>,
    decoder: Decoder,
    /// Maximum number of rows of the next batch.
    rows: usize,
    /// First rows that are still unread. They get batches of their own.
    first_rows: usize,
    lines: Lines,
    bytes_max: usize,
}

/// Records of a batch, with all columns as text.
pub(super) struct Rows {
    pub batch: RecordBatch,
    lines: Lines,
}

/// Maps a record of a batch to its line, because Arrow's reader counts records.
struct Lines {
    text: SchemaRef,
    format: Format,
    bytes: Vec<u8>,
    /// Line number where `bytes` begins; the first line is 1.
    first: usize,
    /// True if a carriage return precedes `bytes`, which may then begin with the rest of a line end.
    after_return: bool,
    /// 1 if `bytes` begins with the heading, else 0.
    headings: usize,
}

impl<R: Read> Records<R> {
    /// Creates a reader. A batch ends after `first_rows` rows.
    pub(super) fn new(input: R, text: SchemaRef, format: Format, has_header: bool, first_rows: usize) -> Self {
        let (bytes, first, after_return, headings) = (Vec::new(), 1, false, has_header.into());
        let lines = Lines { text, format, bytes, first, after_return, headings };
        let rows = first_rows.min(FIRST_BATCH_ROWS);
        let (decoder, input) = (lines.decoder(has_header, rows), BufReader::with_capacity(BUFFER_BYTES, input));
        Self { input, decoder, rows, first_rows, lines, bytes_max: BATCH_BYTES_MAX }
    }

    fn read(&mut self) -> Result<Option<Rows>> {
        let lines = &mut self.lines;
        let is_end = loop {
            let buffer = self.input.fill_buf()?;
            let used = self.decoder.decode(buffer);
            lines.bytes.extend_from_slice(&buffer[..*used.as_ref().unwrap_or(&buffer.len())]);
            let used = used.map_err(|error| lines.ragged(&error, self.rows - self.decoder.capacity()))?;
            self.input.consume(used);
            if used == 0 || self.decoder.capacity() == 0 {
                break used == 0;
            }
            lines.check_length(self.bytes_max)?;
        };
        // Arrow's reader checks all fields of a batch together, so halves of a character in two
        // fields would pass. Check the input itself.
        std::str::from_utf8(&lines.bytes).map_err(|_| not_utf8(&lines.bytes, lines.first, lines.after_return))?;
        let batch = self.decoder.flush()?;
        if is_end {
            lines.check_last_quote(batch.as_ref())?;
        }
        let next = Lines {
            bytes: Vec::new(),
            first: lines.first + line_ends(&lines.bytes, lines.after_return),
            after_return: lines.bytes.last().map_or(lines.after_return, |last| *last == b'\r'),
            headings: 0,
            text: lines.text.clone(),
            format: lines.format.clone(),
        };
        self.first_rows = self.first_rows.saturating_sub(self.rows);
        let rows_max = if self.first_rows > 0 { self.first_rows } else { ROWS_PER_BATCH };
        let rows = next_rows(self.rows, lines.bytes.len()).min(rows_max);
        if rows != self.rows {
            self.rows = rows;
            self.decoder = next.decoder(false, rows);
            // A decoder removes a byte order mark only from the start of its input. Feed it an
            // empty line first, which it skips. The decoder then keeps a mark within a value.
            self.decoder.decode(b"\n")?;
        }
        let lines = std::mem::replace(lines, next);
        Ok(batch.map(|batch| Rows { batch, lines }))
    }
}

impl<R: Read> Iterator for Records<R> {
    type Item = Result<Rows>;

    fn next(&mut self) -> Option<Self::Item> {
        self.read().transpose()
    }
}

impl Rows {
    /// Casts the rows to the types of a schema.
    pub(super) fn typed(&self, schema: &SchemaRef) -> Result<RecordBatch> {
        let fields = schema.fields().iter().zip(self.batch.columns());
        let columns = fields.map(|(field, text)| convert(text, field.data_type())).collect::<Result<Vec<_>>>()?;
        let unfit = columns.iter().enumerate().filter_map(|(at, (_, row))| row.map(|row| (row, at))).min();
        match unfit {
            Some((row, at)) => Err(self.unfit(schema, row, at)),
            None => Ok(RecordBatch::try_new(schema.clone(), columns.into_iter().map(|(values, _)| values).collect())?),
        }
    }

    fn unfit(&self, schema: &SchemaRef, row: usize, at: usize) -> Error {
        let (field, line) = (schema.field(at), self.lines.of(row));
        let value = self.batch.column(at).as_string::<i32>().value(row);
        let (expected, said) = (type_name(field.data_type()), assignment(field.name(), "string"));
        Error::Invalid(format!(
            "line {line}, column {:?}: {value:?} is not a valid {expected}; use --types {said} to read the column as \
             text, or --null-values {value:?} if the value means null",
            field.name()
        ))
    }
}

impl Lines {
    fn decoder(&self, has_header: bool, rows: usize) -> Decoder {
        let builder = ReaderBuilder::new(self.text.clone()).with_format(self.format.clone());
        builder.with_header(has_header).with_batch_size(rows).build_decoder()
    }

    /// Returns the line of the record with `row` records before it.
    fn of(&self, row: usize) -> usize {
        let before = self.decoder(false, self.headings + row).decode(&self.bytes);
        let read = before.unwrap_or(0);
        let blank = self.bytes[read..].iter().take_while(|byte| matches!(byte, b'\n' | b'\r')).count();
        self.first + line_ends(&self.bytes[..read + blank], self.after_return)
    }

    /// Returns the error for a record with too many or too few fields.
    fn ragged(&self, error: &ArrowError, row: usize) -> Error {
        let error = error.to_string();
        let found = error.rsplit_once("got ").map_or("another number of", |(_, found)| found);
        Error::Invalid(format!(
            "line {} has {found} fields, but there are {} columns; quote the fields that contain a delimiter or a \
             quote, or correct the line",
            self.of(row),
            self.text.fields().len()
        ))
    }

    /// Refuses a quote that is still open at the end of the file, because Arrow's reader takes the
    /// rest of the file as one value.
    fn check_last_quote(&self, batch: Option<&RecordBatch>) -> Result<()> {
        let row = batch.map(|batch| batch.num_rows() - 1);
        let last = match (batch, row) {
            (Some(batch), Some(row)) => {
                batch.columns().last().map_or("", |column| column.as_string::<i32>().value(row))
            }
            // The file ends with its heading.
            _ if self.headings > 0 => self.text.fields().last().map_or("", |field| field.name()),
            _ => return Ok(()),
        };
        // Only a quoted value contains a line end, and a quote within it is doubled.
        let quotes = self.bytes.trim_ascii_end().iter().rev().take_while(|byte| **byte == b'"').count();
        if !last.contains(['\n', '\r']) || !quotes.is_multiple_of(2) {
            return Ok(());
        }
        Err(Error::Invalid(format!(
            "a quote opens on line {} or after it and does not close before the end of the file; close it, or double \
             the quotes within quoted values",
            row.map_or(self.first, |row| self.of(row))
        )))
    }

    fn check_length(&self, max: usize) -> Result<()> {
        if self.bytes.len() <= max {
            return Ok(());
        }
        Err(Error::Invalid(format!(
            "the rows from line {} on are longer than {}; check for a quote that does not close",
            self.first,
            human_bytes(max as u64)
        )))
    }
}

/// Returns the rows of the next batch, given the rows and bytes of the previous one.
fn next_rows(rows: usize, bytes: usize) -> usize {
    const GROWTH: usize = 64;
    let fitting = BATCH_BYTES / bytes.div_ceil(rows).max(1);
    fitting.clamp(1, ROWS_PER_BATCH.min(GROWTH * rows))
}

/// Returns the error for bytes that are not UTF-8. The bytes begin on line `first`.
pub(super) fn not_utf8(bytes: &[u8], first: usize, after_return: bool) -> Error {
    let valid = std::str::from_utf8(bytes).map_or_else(|error| error.valid_up_to(), str::len);
    let line = first + line_ends(&bytes[..valid], after_return);
    Error::Invalid(format!(
        "line {line} is not UTF-8; convert the file first, for example with: iconv -f LATIN1 -t UTF-8 FILE"
    ))
}

/// Counts line ends: `\n`, `\r` or both. `after_return` is true if a `\r` precedes the bytes, which
/// has been counted.
fn line_ends(bytes: &[u8], after_return: bool) -> usize {
    let mut is_after = after_return;
    let is_end = |byte: &&u8| {
        let is_counted = std::mem::replace(&mut is_after, **byte == b'\r');
        **byte == b'\r' || (**byte == b'\n' && !is_counted)
    };
    bytes.iter().filter(is_end).count()
}

#[cfg(test)]
mod tests {
    use std::io::{Cursor, repeat};
    use std::sync::Arc;

    use arrow::datatypes::{DataType, Field, Schema};

    use super::*;

    #[test]
    fn batches_have_as_many_rows_as_fit() {
        assert_eq!(next_rows(64, 64 * 100), 4096, "it grows step by step");
        assert_eq!(next_rows(4096, 4096 * 100), ROWS_PER_BATCH);
        assert_eq!(next_rows(64, 64 << 20), 64, "rows of a MiB");
        assert_eq!(next_rows(64, 64 << 27), 1, "rows that are larger than a batch should be");
    }

    #[test]
    fn line_ends_of_all_systems_are_counted_once() {
        for (text, after_return, count) in
            [("a\nb\rc\r\nd", false, 3), ("\n\n", true, 1), ("\r\r\n", true, 2), ("a", true, 0)]
        {
            assert_eq!(line_ends(text.as_bytes(), after_return), count, "{text:?}");
        }
    }

    #[test]
    fn an_unclosed_quote_does_not_load_a_long_file_into_memory() {
        let text = Arc::new(Schema::new(vec![Field::new("k", DataType::Utf8, true)]));
        let input = Cursor::new(b"k\n1\n\"two\n").chain(repeat(b'\n').take(1 << 40));
        let records = Records::new(input, text, Format::default(), true, 10);
        let error = Records { bytes_max: 1 << 20, ..records }.read().err().unwrap();
        let expected = "the rows from line 1 on are longer than 1.0 MiB; check for a quote that does not close";
        assert_eq!(error.message(), expected);
    }
}
