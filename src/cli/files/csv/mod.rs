//! CSV. Arrow's reader splits the text into columns of text; the kernels of Arrow then cast each
//! column to its type.
//!
//! The Python client reads CSV by the same rules (`clients/python/src/dovetail/_csv.py`), and
//! `tests/csv/cases.json` tests both:
//!
//! * Text is UTF-8, with or without a byte order mark, and may be compressed by gzip.
//! * An empty field is null, quoted or not, and so are the words of `--null-values`.
//! * A column has the type that `--types` gives it, or else the first of [`types::INFERRED`] that
//!   fits all of its first rows.
//! * A value has the form that `form` in `types.rs` defines. Arrow and pyarrow would each read
//!   other forms, too.

mod records;
mod types;

use std::io::{Cursor, Read};
use std::sync::Arc;

use arrow::compute::concat_batches;
use arrow::csv::reader::Format;
use arrow::datatypes::{DataType, FieldRef, Schema, SchemaRef};
use flate2::read::MultiGzDecoder;

use self::records::{Records, not_utf8};
pub use self::types::ColumnTypes;
pub(super) use self::types::is_read_as;

use super::source::{BUFFER_BYTES, Batches, Begin, ROWS_PER_BATCH, check_names, empty};
use crate::human::{did_you_mean, listed};
use crate::{Error, Result};

/// First bytes of a gzip file.
pub(super) const GZIP_MAGIC: [u8; 2] = [0x1f, 0x8b];

/// Default number of rows that types are inferred from.
const INFER_ROWS: usize = 10_000;

/// How CSV is read.
#[derive(Clone, Debug, Default, clap::Args)]
#[command(next_help_heading = "CSV")]
pub struct CsvArgs {
    /// Character between fields. The default is a comma, and a tab in files named .tsv. "\t" is a
    /// tab
    #[arg(long, value_name = "CHAR", value_parser = delimiter)]
    pub delimiter: Option<char>,

    /// Read the first line as a row and not as a header. Columns are then named column_1, column_2,
    /// ...
    #[arg(long)]
    pub no_header: bool,

    /// Number of rows from which the types of columns are inferred, 10000 by default
    #[arg(long, value_name = "ROWS")]
    pub infer_rows: Option<usize>,

    /// Types of columns, instead of inferred ones. They are int8 to int64, uint8 to uint64,
    /// float16, float32, float64, decimal(P,S), bool, string, large_string, string_view, date,
    /// date64, "time32(s)" or ms, "time64(us)" or ns, timestamp (in microseconds), "timestamp(s)"
    /// or ms, us, ns, and "timestamp(us, UTC)" with a zone. A name with a comma or an equals sign
    /// needs double quotes. The option may be repeated
    #[arg(long, value_name = "COLUMN=TYPE,...")]
    pub types: Vec<ColumnTypes>,

    /// Words that mean null, in addition to the empty field
    #[arg(long, value_delimiter = ',', value_name = "WORD,...")]
    pub null_values: Vec<String>,
}

impl CsvArgs {
    /// Returns the flags that were given, as the command line writes them.
    pub fn given(&self) -> Vec<&'static str> {
        let Self { delimiter, no_header, infer_rows, types, null_values } = self;
        let all = [
            ("--delimiter", delimiter.is_some()),
            ("--no-header", *no_header),
            ("--infer-rows", infer_rows.is_some()),
            ("--types", !types.is_empty()),
            ("--null-values", !null_values.is_empty()),
        ];
        all.into_iter().filter_map(|(flag, is_given)| is_given.then_some(flag)).collect()
    }

    fn format(&self, is_tsv: bool) -> Result<Format> {
        // The argument's parser accepts ASCII only.
        let delimiter = self.delimiter.map_or(if is_tsv { b'\t' } else { b',' }, |delimiter| delimiter as u8);
        let words: String = self.null_values.iter().map(|word| format!("|{}", regex::escape(word))).collect();
        let nulls = regex::Regex::new(&format!("^(?:{words})$"));
        let nulls = nulls.map_err(|error| Error::Invalid(format!("--null-values: {error}")))?;
        Ok(Format::default().with_header(!self.no_header).with_delimiter(delimiter).with_null_regex(nulls))
    }
}

fn delimiter(text: &str) -> Result<char, String> {
    let text = if text == "\\t" { "\t" } else { text };
    match text.as_bytes() {
        [byte] if byte.is_ascii() && !b"\"\n\r".contains(byte) => Ok(char::from(*byte)),
        _ => {
            Err("it takes one ASCII character, such as ';', that is not a quote or a line end; \"\\t\" is a tab".into())
        }
    }
}

/// CSV input with its first rows read.
pub(super) struct Opened {
    pub schema: SchemaRef,
    /// Columns without a value in the first rows and without a type from `--types`.
    pub untyped: Vec<usize>,
    pub begin: Begin,
}

/// Opens CSV and reads its first rows. Reads the input once, from start to end, so the input may be
/// a pipe.
pub(super) fn open(input: impl Read + Send + 'static, is_tsv: bool, args: &CsvArgs) -> Result<Opened> {
    let (start, input) = peek(input, GZIP_MAGIC.len())?;
    match start == GZIP_MAGIC {
        true => open_plain(Gunzip(MultiGzDecoder::new(input)), is_tsv, args),
        false => open_plain(input, is_tsv, args),
    }
}

struct Gunzip<R>(MultiGzDecoder<R>);

impl<R: Read> Read for Gunzip<R> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        self.0.read(buffer).map_err(|error| match error.raw_os_error() {
            Some(_) => error,
            None => std::io::Error::other(Error::Invalid(format!(
                "its gzip data is damaged or cut short ({error}); check that it was written and copied in full"
            ))),
        })
    }
}

fn open_plain(input: impl Read + Send + 'static, is_tsv: bool, args: &CsvArgs) -> Result<Opened> {
    let (start, input) = peek(input, BUFFER_BYTES)?;
    if start.is_empty() {
        return Err(empty());
    }
    let format = args.format(is_tsv)?;
    let (names, _) = format.infer_schema(start.as_slice(), Some(0)).map_err(|_| not_utf8(&start, 1, false))?;
    if names.fields().is_empty() {
        return Err(Error::Invalid("the file has no columns".into()));
    }
    check_names(&names)?;
    let said = ColumnTypes::together(&args.types)?;
    check_said(&names, &said)?;
    let text = with_types(&names, |_, _| DataType::Utf8);
    let infer_rows = args.infer_rows.unwrap_or(INFER_ROWS);
    // Limit the memory: each of many open files holds its first rows.
    let first_rows = infer_rows.clamp(1, ROWS_PER_BATCH);
    let mut records = Records::new(input, text.clone(), format, !args.no_header, first_rows);
    let (mut first, mut rows) = (Vec::new(), 0);
    while rows < infer_rows
        && let Some(read) = records.next().transpose()?
    {
        rows += read.batch.num_rows();
        first.push(read);
    }
    let looked_at = concat_batches(&text, first.iter().map(|read| &read.batch))?.slice(0, rows.min(infer_rows));
    let inferred = looked_at.columns().iter().map(types::infer).collect::<Result<Vec<_>>>()?;
    let said_of = |field: &FieldRef| said.iter().find(|(name, _)| name == field.name());
    let is_untyped = |&at: &usize| said_of(&names.fields()[at]).is_none() && inferred[at].is_none();
    let untyped = (0..inferred.len()).filter(is_untyped).collect();
    let schema = with_types(&names, |at, field| match (said_of(field), &inferred[at]) {
        (Some((_, data_type)), _) | (None, Some(data_type)) => data_type.clone(),
        (None, None) => DataType::Utf8,
    });
    let begin = move |schema: SchemaRef| {
        let all = first.into_iter().map(Ok).chain(records);
        Box::new(all.map(move |rows| rows?.typed(&schema))) as Batches
    };
    Ok(Opened { schema, untyped, begin: Box::new(begin) })
}

/// Returns the first bytes of an input, and a reader of the whole input.
pub(super) fn peek<R: Read>(mut input: R, count: usize) -> std::io::Result<(Vec<u8>, impl Read)> {
    let mut start = Vec::with_capacity(count);
    input.by_ref().take(count as u64).read_to_end(&mut start)?;
    Ok((start.clone(), Cursor::new(start).chain(input)))
}

fn with_types(schema: &Schema, data_type: impl Fn(usize, &FieldRef) -> DataType) -> SchemaRef {
    let fields = schema.fields().iter().enumerate();
    let fields = fields.map(|(at, field)| field.as_ref().clone().with_data_type(data_type(at, field)));
    Arc::new(Schema::new(fields.collect::<Vec<_>>()))
}

/// Refuses types for missing columns.
fn check_said(schema: &Schema, types: &[(String, DataType)]) -> Result<()> {
    let Some((name, _)) = types.iter().find(|(name, _)| schema.index_of(name).is_err()) else { return Ok(()) };
    let known = || schema.fields().iter().map(|field| field.name().as_str());
    let (names, meant) = (listed(known()), did_you_mean(name, known()));
    Err(Error::Invalid(format!("--types names a column {name:?}, but the columns are {names}{meant}")))
}
