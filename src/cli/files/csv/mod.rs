//! CSV: what its columns are is in no file, so it is inferred from the first rows, or said.
//!
//! The Python client reads CSV by the same rules (`clients/python/src/dovetail/_csv.py`), and `tests/csv/cases.json` holds both
//! to them:
//!
//! * Text is UTF-8, with or without a byte order mark; gzip may have compressed it.
//! * An empty field is null, in columns of text too and quoted or not, and so are the words that `--null-values` gives.
//! * Types are inferred from the first rows: int64, float64, bool, date, timestamp, and text for all else; for a column of
//!   nulls too, and for whole numbers that int64 has no room for.
//!   So is a column in whose first rows something only looks like its type, as 2026-02-30 does.
//! * Of a column without a value in the first rows, the table that the rows are added to knows the type (`put`; the Python client
//!   does not ask).
//! * Timestamps are of microseconds, so that those of two files match; of nanoseconds where a row has more than six digits.
//! * Times with a zone and times without are not of one column.
//! * Types have the same names, and the same are read. Of a time of day the seconds may be left out.
//! * A value that is not of its column's type is an error, wherever it stands, and so is a quote without its other one.

mod quotes;
mod records;
mod types;

use std::io::{BufRead, BufReader, Cursor, ErrorKind, Read};
use std::sync::Arc;

use arrow::csv::reader::Format;
use arrow::datatypes::{DataType, FieldRef, Schema, SchemaRef, TimeUnit};
use arrow::error::ArrowError;
use flate2::bufread::GzDecoder;

use self::quotes::{Checked, Quotes};
use self::records::{Reason, Records, Rules, newlines, not_utf8};
pub use self::types::ColumnTypes;
pub(super) use self::types::is_read_as;

use super::source::{BUFFER_BYTES, Batches, Begin, ROWS_PER_BATCH, empty};
use crate::human::{did_you_mean, listed};
use crate::{Error, Result};

/// What a file that gzip has compressed begins with.
pub(super) const GZIP_MAGIC: [u8; 2] = [0x1f, 0x8b];

/// How CSV is read.
#[derive(Clone, Debug, Default, clap::Args)]
#[command(next_help_heading = "CSV")]
pub struct CsvArgs {
    /// Character between fields; by default a comma, and a tab in files named .tsv. "\t" is a tab
    #[arg(long, value_name = "CHAR", value_parser = delimiter)]
    pub delimiter: Option<char>,

    /// The first line is a row and not a heading; columns are named column_1, column_2, ...
    #[arg(long)]
    pub no_header: bool,

    /// Rows from which the types of columns are inferred; 10000 by default
    #[arg(long, value_name = "ROWS")]
    pub infer_rows: Option<usize>,

    /// Types of columns, in place of those that are inferred: int8 to int64, uint8 to uint64, float16, float32, float64,
    /// decimal(P,S), bool, string, large_string, string_view, date, date64, "time32(s)" or ms, "time64(us)" or ns, timestamp (of
    /// microseconds; or "timestamp(s)", ms, us, ns), "timestamp(us, UTC)" with a zone, or as Arrow writes them; `put` and `tables`
    /// print them so. Double quotes stand around a name with a comma or an equals sign. It may be given several times
    #[arg(long, value_name = "COLUMN=TYPE,...")]
    pub types: Vec<ColumnTypes>,

    /// Words that stand for null, beside the empty field
    #[arg(long, value_delimiter = ',', value_name = "WORD,...")]
    pub null_values: Vec<String>,
}

impl CsvArgs {
    /// Those that were given, as the command line writes them.
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

    fn format(&self, delimiter: u8) -> Result<Format> {
        let format = Format::default().with_delimiter(delimiter);
        if self.null_values.is_empty() {
            return Ok(format);
        }
        let words = self.null_values.iter().map(|word| regex::escape(word)).collect::<Vec<_>>().join("|");
        let nulls = regex::Regex::new(&format!("^(?:|{words})$"));
        Ok(format.with_null_regex(nulls.map_err(|error| Error::Invalid(format!("--null-values: {error}")))?))
    }
}

fn delimiter(text: &str) -> Result<char, String> {
    let text = if text == "\\t" { "\t" } else { text };
    match text.as_bytes() {
        [byte] if byte.is_ascii() && !b"\"\n\r".contains(byte) => Ok(char::from(*byte)),
        _ => {
            Err("it takes one ASCII character, such as ';', that is no quote and no line end; \"\\t\" is a tab".into())
        }
    }
}

/// CSV whose first rows were looked at, and none was read.
pub(super) struct Opened {
    /// Columns and their types.
    pub schema: SchemaRef,
    /// Those without a value in the first rows, of which nobody says the type either.
    pub untyped: Vec<usize>,
    /// Reads the rows.
    pub begin: Begin,
}

/// Begins to read CSV, also what gzip has compressed. It is read once, from its start to its end, so it may be a pipe.
pub(super) fn open(input: impl Read + Send + 'static, is_tsv: bool, args: &CsvArgs) -> Result<Opened> {
    let (start, input) = peek(input, GZIP_MAGIC.len())?;
    match start == GZIP_MAGIC {
        true => open_plain(Gunzip::new(input), is_tsv, args),
        false => open_plain(input, is_tsv, args),
    }
}

/// What gzip has compressed, in one part or several. A failure stays one, and says what is wrong with the file.
struct Gunzip<R> {
    /// There is one at all times but while the next takes its place.
    part: Option<GzDecoder<BufReader<R>>>,
    failure: Option<Error>,
}

impl<R: Read> Gunzip<R> {
    fn new(input: R) -> Self {
        Self { part: Some(GzDecoder::new(BufReader::new(input))), failure: None }
    }

    fn read_on(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        while let Some(part) = &mut self.part {
            let read = part.read(buffer)?;
            if read > 0 || buffer.is_empty() {
                return Ok(read);
            }
            let rest = part.get_mut().fill_buf()?;
            if rest.is_empty() {
                break;
            }
            // The decoder would take a few other bytes for a part that is cut short.
            if !rest.iter().zip(&GZIP_MAGIC).all(|(byte, of_gzip)| byte == of_gzip) {
                return Err(std::io::Error::new(ErrorKind::InvalidData, "there are other bytes behind its end"));
            }
            self.part = self.part.take().map(|part| GzDecoder::new(part.into_inner()));
        }
        Ok(0)
    }
}

impl<R: Read> Read for Gunzip<R> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        if let Some(failure) = &self.failure {
            return Err(std::io::Error::other(failure.clone()));
        }
        self.read_on(buffer).map_err(|error| {
            // What the system has against the file is another matter.
            if error.raw_os_error().is_some() || error.kind() == ErrorKind::Interrupted {
                return error;
            }
            let failure = Error::Invalid(match error.kind() {
                ErrorKind::UnexpectedEof => {
                    "its gzip data ends too early: the file is cut short; see whether whatever wrote or copied it was done".into()
                }
                _ => format!("its gzip data is damaged, or some of it is none ({error}); see whether it was copied as it is"),
            });
            self.failure = Some(failure.clone());
            std::io::Error::other(failure)
        })
    }
}

fn open_plain(input: impl Read + Send + 'static, is_tsv: bool, args: &CsvArgs) -> Result<Opened> {
    // Spreadsheets begin UTF-8 with a mark, which is not of the first column's name.
    let (start, mut input) = peek(input, BYTE_ORDER_MARK.len())?;
    if start.is_empty() {
        return Err(empty());
    }
    if start == BYTE_ORDER_MARK {
        input.read_exact(&mut [0; BYTE_ORDER_MARK.len()])?;
    }
    if UTF16_MARKS.iter().any(|mark| start.starts_with(mark)) {
        return Err(Error::Invalid(
            "its text is UTF-16; convert the file first, as with: iconv -f UTF-16 -t UTF-8 FILE".into(),
        ));
    }
    let delimiter = match args.delimiter {
        // The parser of the argument takes no others.
        Some(delimiter) => delimiter as u8,
        None if is_tsv => b'\t',
        None => b',',
    };
    let format = args.format(delimiter)?;
    let with_header = format.clone().with_header(!args.no_header);
    let mut looked_at = Recorded { input: &mut input, bytes: Vec::new(), is_whole: false, failure: None };
    let infer_rows = args.infer_rows.unwrap_or(INFER_ROWS);
    let inferred = with_header.infer_schema(BufReader::new(&mut looked_at), Some(infer_rows));
    let Recorded { bytes: looked_at, is_whole, failure: unread, .. } = looked_at;
    let (schema, rows, failure) = match inferred {
        Ok((schema, rows)) => (schema, rows, None),
        // The reader says better what is wrong; it only needs to know how many columns there are.
        Err(error) => match with_header.infer_schema(looked_at.as_slice(), Some(0)) {
            Ok((schema, _)) => (schema, 0, Some(error)),
            Err(_) => return Err(unread.unwrap_or_else(|| heading_failure(&looked_at, &error))),
        },
    };
    if schema.fields().is_empty() || (rows == 0 && args.no_header && failure.is_none()) {
        return Err(Error::Invalid("the file has no columns".into()));
    }
    if args.delimiter.is_none() && schema.fields().len() == 1 {
        check_delimiter(&looked_at, delimiter)?;
    }
    let mut quotes = Quotes::new(delimiter);
    quotes.check(&looked_at)?;
    if is_whole {
        quotes.finish()?;
    }
    check_names(&schema)?;
    let said = ColumnTypes::together(&args.types)?;
    let types = with_types(&settled(&schema), &said)?;
    let reason = |field: &FieldRef| match said.iter().any(|(name, _)| name == field.name()) {
        true => Reason::Said,
        false => Reason::Inferred,
    };
    let reasons: Vec<Reason> = schema.fields().iter().map(reason).collect();
    let is_untyped = |&at: &usize| *schema.field(at).data_type() == DataType::Null && reasons[at] != Reason::Said;
    let untyped = (0..reasons.len()).filter(is_untyped).collect();
    let schema = Arc::new(types);
    let mut rules = Rules { schema, format, has_header: !args.no_header, reasons, inferred_rows: rows };
    rules.take_for_text(&looked_at);
    let schema = rules.schema.clone();
    let input = Cursor::new(looked_at).chain(Checked { input, quotes });
    let input = BufReader::with_capacity(BUFFER_BYTES, input);
    if let Some(failure) = failure {
        // It fails on the way to the rows that inference has seen.
        let error = Records::new(input, rules, ROWS_PER_BATCH).find_map(Result::err);
        return Err(error.unwrap_or_else(|| Error::Invalid(failure.to_string())));
    }
    let begin = move |schema| Box::new(Records::new(input, rules.with_given(schema), ROWS_PER_BATCH)) as Batches;
    Ok(Opened { schema, untyped, begin: Box::new(begin) })
}

/// What is wrong with a heading that cannot be read.
fn heading_failure(looked_at: &[u8], error: &ArrowError) -> Error {
    match std::str::from_utf8(looked_at) {
        Err(wrong) if wrong.error_len().is_some() => not_utf8(1 + newlines(&looked_at[..wrong.valid_up_to()])),
        _ => Error::Invalid(error.to_string()),
    }
}

const BYTE_ORDER_MARK: &[u8] = "\u{feff}".as_bytes();

/// The same mark in UTF-16, in both orders.
const UTF16_MARKS: [&[u8]; 2] = [&[0xff, 0xfe], &[0xfe, 0xff]];

/// Rows that are looked at where nobody says how many.
const INFER_ROWS: usize = 10_000;

/// The first bytes of what is read, and all of it.
pub(super) fn peek<R: Read>(mut input: R, count: usize) -> std::io::Result<(Vec<u8>, impl Read)> {
    let mut start = Vec::with_capacity(count);
    input.by_ref().take(count as u64).read_to_end(&mut start)?;
    Ok((start.clone(), Cursor::new(start).chain(input)))
}

/// Keeps what is read, so that it can be read again.
struct Recorded<R> {
    input: R,
    bytes: Vec<u8>,
    /// Whether that is all there is.
    is_whole: bool,
    /// Why no more could be read.
    failure: Option<Error>,
}

impl<R: Read> Read for Recorded<R> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let read = self.input.read(buffer).map_err(|error| {
            let failure = Error::from(error);
            self.failure = Some(failure.clone());
            std::io::Error::other(failure)
        })?;
        self.bytes.extend_from_slice(&buffer[..read]);
        self.is_whole = read == 0 && !buffer.is_empty();
        Ok(read)
    }
}

/// Refuses what is likely to have several columns and came out as one: its first line has none of the delimiters that were
/// looked for, and some of another kind.
fn check_delimiter(text: &[u8], delimiter: u8) -> Result<()> {
    let line = text.split(|byte| *byte == b'\n').next().unwrap_or_default();
    if line.contains(&delimiter) {
        return Ok(());
    }
    let found = [b',', b';', b'\t', b'|'].into_iter().find(|other| line.contains(other));
    let Some(found) = found else { return Ok(()) };
    let (delimiter, found) = (char::from(delimiter), char::from(found));
    // A shell takes some of these for its own.
    let flag = if found == '\t' { "'\\t'".to_owned() } else { format!("'{found}'") };
    Err(Error::Invalid(format!(
        "its first line has no {delimiter:?} and is one column, but has {found:?}; if that is between the fields, say \
         --delimiter {flag}, and if it is one column indeed, --delimiter '{delimiter}'"
    )))
}

/// Refuses a heading without names. That two columns share one is said of any file.
fn check_names(schema: &Schema) -> Result<()> {
    let fields = schema.fields();
    if let Some(at) = fields.iter().position(|field| field.name().trim().is_empty()) {
        return Err(Error::Invalid(format!(
            "column {} has no name in the heading; write one there, or say --no-header if the first line is a row",
            at + 1
        )));
    }
    Ok(())
}

/// What inference leaves open. A column without a single value in the rows that were looked at is taken for text, which
/// whatever follows fits; and timestamps have one unit, whether or not those rows have fractions of a second.
fn settled(schema: &Schema) -> Schema {
    let field = |field: &FieldRef| {
        let data_type = match field.data_type() {
            DataType::Null => DataType::Utf8,
            DataType::Timestamp(TimeUnit::Second | TimeUnit::Millisecond, None) => {
                DataType::Timestamp(TimeUnit::Microsecond, None)
            }
            other => other.clone(),
        };
        field.as_ref().clone().with_data_type(data_type)
    };
    Schema::new(schema.fields().iter().map(field).collect::<Vec<_>>())
}

fn with_types(schema: &Schema, types: &[(String, DataType)]) -> Result<Schema> {
    if let Some((name, _)) = types.iter().find(|(name, _)| schema.index_of(name).is_err()) {
        let known = || schema.fields().iter().map(|field| field.name().as_str());
        let (names, meant) = (listed(known()), did_you_mean(name, known()));
        return Err(Error::Invalid(format!("--types names a column {name:?}, and the columns are {names}{meant}")));
    }
    let field = |field: &FieldRef| match types.iter().find(|(name, _)| name == field.name()) {
        Some((_, data_type)) => field.as_ref().clone().with_data_type(data_type.clone()),
        None => field.as_ref().clone(),
    };
    Ok(Schema::new(schema.fields().iter().map(field).collect::<Vec<_>>()))
}
