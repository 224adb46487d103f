//! CSV: what its columns are is in no file, so it is inferred from the first rows, or said.

use std::io::{BufReader, Cursor, Read};
use std::str::FromStr;
use std::sync::Arc;

use arrow::csv;
use arrow::datatypes::{DataType, FieldRef, Schema, SchemaRef, TimeUnit};
use flate2::read::MultiGzDecoder;

use super::source::{BUFFER_BYTES, Batches, ROWS_PER_BATCH};
use crate::{Error, Result, listed};

/// What a file that gzip has compressed begins with.
pub(super) const GZIP_MAGIC: [u8; 2] = [0x1f, 0x8b];

/// How CSV is read.
#[derive(Clone, Debug, Default, clap::Args)]
#[command(next_help_heading = "CSV")]
pub struct CsvArgs {
    /// Character between fields; by default a comma, and a tab in files named .tsv
    #[arg(long, value_name = "CHAR")]
    pub delimiter: Option<char>,

    /// The first line is a row and not a heading; columns are named column_1, column_2, ...
    #[arg(long)]
    pub no_header: bool,

    /// Rows from which the types of columns are inferred; 10000 by default
    #[arg(long, value_name = "ROWS")]
    pub infer_rows: Option<usize>,

    /// Types of columns, in place of those that are inferred: int8 to int64, uint8 to uint64, float32, float64, decimal(P,S),
    /// bool, string, date, timestamp (of microseconds; or "timestamp(s)", ms, us, ns), or as Arrow writes them
    #[arg(long, value_name = "COLUMN=TYPE,...")]
    pub types: Option<ColumnTypes>,
}

/// Types by the names of columns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ColumnTypes(Vec<(String, DataType)>);

impl FromStr for ColumnTypes {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut depth = 0;
        // Types may have commas of their own, in parentheses.
        let parts = text.split(|c: char| {
            depth += i32::from(c == '(') - i32::from(c == ')');
            c == ',' && depth == 0
        });
        let column = |part: &str| -> Result<(String, DataType), String> {
            let (name, text) = part.split_once('=').ok_or("write COLUMN=TYPE, such as id=int64,name=string")?;
            let data_type = parse_type(text.trim()).ok_or_else(|| {
                format!(
                    "{:?} is no type; write one such as int64, float64, decimal(15,2), bool, string, date or timestamp",
                    text.trim()
                )
            })?;
            Ok((name.trim().to_owned(), data_type))
        };
        parts.map(column).collect::<Result<_, String>>().map(Self)
    }
}

/// A type by the name that people give it, or by Arrow's own.
fn parse_type(text: &str) -> Option<DataType> {
    let lower = text.to_ascii_lowercase();
    let (name, inside) = match lower.strip_suffix(')').and_then(|text| text.split_once('(')) {
        Some((name, inside)) => (name.trim(), Some(inside.trim())),
        None => (lower.as_str(), None),
    };
    let known = match (name, inside) {
        ("int8", None) => DataType::Int8,
        ("int16", None) => DataType::Int16,
        ("int32" | "int", None) => DataType::Int32,
        ("int64" | "bigint", None) => DataType::Int64,
        ("uint8", None) => DataType::UInt8,
        ("uint16", None) => DataType::UInt16,
        ("uint32", None) => DataType::UInt32,
        ("uint64", None) => DataType::UInt64,
        ("float32" | "float", None) => DataType::Float32,
        ("float64" | "double", None) => DataType::Float64,
        ("bool" | "boolean", None) => DataType::Boolean,
        ("string" | "utf8" | "text", None) => DataType::Utf8,
        ("date" | "date32", None) => DataType::Date32,
        ("timestamp", None | Some("us")) => DataType::Timestamp(TimeUnit::Microsecond, None),
        ("timestamp", Some("s")) => DataType::Timestamp(TimeUnit::Second, None),
        ("timestamp", Some("ms")) => DataType::Timestamp(TimeUnit::Millisecond, None),
        ("timestamp", Some("ns")) => DataType::Timestamp(TimeUnit::Nanosecond, None),
        ("decimal", Some(digits)) => {
            let (precision, scale) = digits.split_once(',')?;
            let (precision, scale) = (precision.trim().parse().ok()?, scale.trim().parse().ok()?);
            let is_sound = (1..=38).contains(&precision) && (0..=i8::try_from(precision).ok()?).contains(&scale);
            return is_sound.then_some(DataType::Decimal128(precision, scale));
        }
        _ => return text.parse().ok(),
    };
    Some(known)
}

/// Begins to read CSV, also what gzip has compressed. It is read once, from its start to its end, so it may be a pipe.
pub(super) fn open(input: impl Read + Send + 'static, is_tsv: bool, args: &CsvArgs) -> Result<(SchemaRef, Batches)> {
    let (start, input) = peek(input, GZIP_MAGIC.len())?;
    match start == GZIP_MAGIC {
        true => open_plain(MultiGzDecoder::new(input), is_tsv, args),
        false => open_plain(input, is_tsv, args),
    }
}

fn open_plain(input: impl Read + Send + 'static, is_tsv: bool, args: &CsvArgs) -> Result<(SchemaRef, Batches)> {
    // Spreadsheets begin UTF-8 with a mark, which is not of the first column's name.
    let (start, mut input) = peek(input, BYTE_ORDER_MARK.len())?;
    if start == BYTE_ORDER_MARK {
        input.read_exact(&mut [0; BYTE_ORDER_MARK.len()])?;
    }
    let delimiter = match (args.delimiter, is_tsv) {
        (None, true) => b'\t',
        (None, false) => b',',
        (Some(delimiter), _) => u8::try_from(delimiter).map_err(|_| {
            Error::Invalid(format!("delimiter {delimiter:?} is not a single byte; use one such as ';'"))
        })?,
    };
    let format = csv::reader::Format::default().with_header(!args.no_header).with_delimiter(delimiter);
    let mut looked_at = Recorded { input: &mut input, bytes: Vec::new() };
    let infer_rows = args.infer_rows.unwrap_or(INFER_ROWS);
    let (schema, rows) = format.infer_schema(BufReader::new(&mut looked_at), Some(infer_rows))?;
    let looked_at = looked_at.bytes;
    if schema.fields().is_empty() || (rows == 0 && args.no_header) {
        return Err(Error::Invalid("the file has no columns".into()));
    }
    if args.delimiter.is_none() && schema.fields().len() == 1 {
        check_delimiter(&looked_at, delimiter)?;
    }
    let schema = Arc::new(with_types(&text_where_nothing_was_seen(&schema), args.types.as_ref())?);
    let reader = csv::ReaderBuilder::new(schema.clone())
        .with_format(format)
        .with_batch_size(ROWS_PER_BATCH)
        .build(BufReader::with_capacity(BUFFER_BYTES, Cursor::new(looked_at).chain(input)))?;
    Ok((schema, Box::new(reader)))
}

const BYTE_ORDER_MARK: &[u8] = "\u{feff}".as_bytes();

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
}

impl<R: Read> Read for Recorded<R> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let read = self.input.read(buffer)?;
        self.bytes.extend_from_slice(&buffer[..read]);
        Ok(read)
    }
}

/// Refuses what is likely to have several columns and came out as one: its first line has none of the delimiters that were
/// looked for, and some of another kind.
fn check_delimiter(text: &[u8], delimiter: u8) -> Result<()> {
    let line = text.split(|byte| *byte == b'\n').next().unwrap_or_default();
    let found = [b',', b';', b'\t', b'|'].into_iter().find(|other| *other != delimiter && line.contains(other));
    let Some(found) = found else { return Ok(()) };
    let (delimiter, found) = (char::from(delimiter), char::from(found));
    // A shell takes some of these for its own.
    let flag = if found == '\t' { "$'\\t'".to_owned() } else { format!("'{found}'") };
    Err(Error::Invalid(format!(
        "its first line has no {delimiter:?} and is one column, but has {found:?}; if that is between the fields, say \
         --delimiter {flag}, and if it is one column indeed, --delimiter '{delimiter}'"
    )))
}

/// A column without a single value in the rows that were looked at is taken for text, which whatever follows fits.
fn text_where_nothing_was_seen(schema: &Schema) -> Schema {
    let field = |field: &FieldRef| match field.data_type() {
        DataType::Null => field.as_ref().clone().with_data_type(DataType::Utf8),
        _ => field.as_ref().clone(),
    };
    Schema::new(schema.fields().iter().map(field).collect::<Vec<_>>())
}

fn with_types(schema: &Schema, types: Option<&ColumnTypes>) -> Result<Schema> {
    let types = types.map_or(&[][..], |types| &types.0);
    if let Some((name, _)) = types.iter().find(|(name, _)| schema.index_of(name).is_err()) {
        let names = listed(schema.fields().iter().map(|field| field.name()));
        return Err(Error::Invalid(format!("--types names a column {name:?}, and there are {names}")));
    }
    let field = |field: &FieldRef| match types.iter().find(|(name, _)| name == field.name()) {
        Some((_, data_type)) => field.as_ref().clone().with_data_type(data_type.clone()),
        None => field.as_ref().clone(),
    };
    Ok(Schema::new(schema.fields().iter().map(field).collect::<Vec<_>>()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn types_are_read_as_people_and_as_arrow_write_them() {
        let types: ColumnTypes =
            "a=int64, b=decimal(15, 2),c=Timestamp,d=timestamp(ns),e=Utf8,f=LargeUtf8".parse().unwrap();
        let names: Vec<_> = types.0.iter().map(|(name, data_type)| format!("{name} {data_type:?}")).collect();
        let expected = [
            "a Int64",
            "b Decimal128(15, 2)",
            "c Timestamp(Microsecond, None)",
            "d Timestamp(Nanosecond, None)",
            "e Utf8",
            "f LargeUtf8",
        ];
        assert_eq!(names, expected);
        for (wrong, words) in [
            ("a", "COLUMN=TYPE"),
            ("a=", "is no type"),
            ("a=integerish", "\"integerish\""),
            ("a=decimal(2,5)", "decimal"),
        ] {
            let error = wrong.parse::<ColumnTypes>().unwrap_err();
            assert!(error.contains(words), "{wrong}: {error}");
        }
    }
}
