//! Records of CSV as batches. One that cannot be read is looked for again in the bytes of its batch, so that the error tells
//! the line, the column and the value: Arrow's reader counts records, and does not always say which it means.

use std::io::BufRead;
use std::sync::{Arc, LazyLock};

use arrow::array::{ArrayRef, ArrowPrimitiveType, AsArray, Decimal128Array, PrimitiveArray, RecordBatch, StringArray};
use arrow::compute::kernels::cast_utils::{Parser, parse_decimal};
use arrow::compute::{CastOptions, cast_with_options};
use arrow::csv::ReaderBuilder;
use arrow::csv::reader::{Decoder, Format};
use arrow::datatypes::{
    DataType, Decimal128Type, FieldRef, Float16Type, Float32Type, Float64Type, Schema, SchemaRef, TimeUnit,
    TimestampNanosecondType,
};
use arrow::error::ArrowError;
use regex::Regex;

use super::types::taking;
use crate::cli::names::assignment;
use crate::human::{counted, system_words, type_name};
use crate::{Error, Result};

/// What a record is read as, and why.
pub(super) struct Rules {
    /// The columns of the table.
    pub schema: SchemaRef,
    /// How fields are told apart, and which are null. Whether there is a heading stands beside it.
    pub format: Format,
    /// Whether the first record names the columns.
    pub has_header: bool,
    /// For each column why it has its type.
    pub reasons: Vec<Reason>,
    /// Rows from which types were inferred.
    pub inferred_rows: usize,
}

/// Why a column has its type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reason {
    /// The first rows look so.
    Inferred,
    /// `--types` says so.
    Said,
    /// The table has it so that the rows are added to.
    OfTable,
}

/// For each column whether the first of its times says how far it is from UTC, as all others then do; `None` where there was no
/// time yet.
type Zones = Vec<Option<bool>>;

/// Reads records in batches.
pub(super) struct Records<R> {
    input: R,
    rules: Rules,
    decoder: Decoder,
    /// The bytes of the batch that is being read.
    bytes: Vec<u8>,
    /// The line on which they begin; the first is 1.
    line: usize,
    /// What the batches before say.
    zones: Zones,
    /// Whether the first record of `bytes` is the heading.
    begins_with_header: bool,
    has_failed: bool,
}

impl<R: BufRead> Records<R> {
    pub(super) fn new(input: R, rules: Rules, rows_per_batch: usize) -> Self {
        let format = rules.format.clone().with_header(rules.has_header);
        let decoder = rules.decoder(format, rows_per_batch, None);
        let (begins_with_header, zones) = (rules.has_header, rules.no_zones());
        Self { input, rules, decoder, bytes: Vec::new(), line: 1, zones, begins_with_header, has_failed: false }
    }

    fn read(&mut self) -> Result<Option<RecordBatch>> {
        self.line += newlines(&self.bytes);
        self.bytes.clear();
        loop {
            let buffer = self.input.fill_buf().map_err(|error| match error.downcast::<Error>() {
                Ok(error) => error,
                Err(error) => Error::Invalid(format!("cannot read on: {}", system_words(error))),
            })?;
            match self.decoder.decode(buffer) {
                Ok(used) => {
                    self.bytes.extend_from_slice(&buffer[..used]);
                    self.input.consume(used);
                    if used == 0 || self.decoder.capacity() == 0 {
                        break;
                    }
                }
                Err(error) => {
                    self.bytes.extend_from_slice(buffer);
                    return Err(self.located(&error));
                }
            }
        }
        let mut zones = self.zones.clone();
        let read = self.decoder.flush();
        let read = read.and_then(|batch| batch.map(|batch| self.rules.typed(&batch, None, &mut zones)).transpose());
        let batch = read.map_err(|error| self.located(&error))?;
        self.zones = zones;
        self.begins_with_header = false;
        Ok(batch)
    }

    /// What is wrong with the first record that cannot be read by itself.
    fn located(&self, error: &ArrowError) -> Error {
        let (mut rest, mut line, mut is_header) = (self.bytes.as_slice(), self.line, self.begins_with_header);
        let mut zones = self.zones.clone();
        while !rest.is_empty() {
            // The reader passes over empty lines.
            let blank = rest.iter().take_while(|byte| matches!(byte, b'\n' | b'\r')).count();
            line += newlines(&rest[..blank]);
            rest = &rest[blank..];
            match self.rules.check(rest, line, is_header, &mut zones) {
                Ok(0) => break,
                Ok(used) => {
                    line += newlines(&rest[..used]);
                    rest = &rest[used..];
                }
                Err(error) => return error,
            }
            is_header = false;
        }
        Error::Invalid(error.to_string())
    }
}

impl<R: BufRead> Iterator for Records<R> {
    type Item = Result<RecordBatch>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.has_failed {
            return None;
        }
        let batch = self.read().transpose();
        self.has_failed = matches!(batch, Some(Err(_)));
        batch
    }
}

impl Rules {
    /// A reader of records: all columns as they come from the reader, or one of them.
    fn decoder(&self, format: Format, rows: usize, column: Option<usize>) -> Decoder {
        let builder = ReaderBuilder::new(self.decoded()).with_format(format).with_batch_size(rows);
        match column {
            Some(at) => builder.with_projection(vec![at]),
            None => builder,
        }
        .build_decoder()
    }

    /// The columns as Arrow's reader makes them.
    fn decoded(&self) -> SchemaRef {
        with_types(&self.schema, |data_type| match is_made_of_text(data_type) {
            true => DataType::Utf8,
            false => data_type.clone(),
        })
    }

    /// The same for columns of these types, of which some may be a table's by now.
    pub(super) fn with_given(mut self, schema: SchemaRef) -> Self {
        for (at, reason) in self.reasons.iter_mut().enumerate() {
            if schema.field(at) != self.schema.field(at) {
                *reason = Reason::OfTable;
            }
        }
        Self { schema, ..self }
    }

    /// What is known of the zones of times before there are any.
    fn no_zones(&self) -> Zones {
        vec![None; self.schema.fields().len()]
    }

    /// The batch with the types of the table: all of its columns, or the one that was projected.
    fn typed(&self, batch: &RecordBatch, column: Option<usize>, zones: &mut Zones) -> Result<RecordBatch, ArrowError> {
        let (schema, zones) = match column {
            Some(at) => (Arc::new(self.schema.project(&[at])?), &mut zones[at..=at]),
            None => (self.schema.clone(), zones.as_mut_slice()),
        };
        let typed = |((field, column), zone): ((&FieldRef, &ArrayRef), &mut Option<bool>)| {
            if !is_made_of_text(field.data_type()) {
                return Ok(column.clone());
            }
            if matches!(field.data_type(), DataType::Timestamp(..)) {
                check_zones(column, zone)?;
            }
            made_of_text(column, field.data_type())
        };
        let columns = schema.fields().iter().zip(batch.columns()).zip(zones).map(typed);
        let columns = columns.collect::<Result<_, _>>()?;
        RecordBatch::try_new(schema, columns)
    }

    /// Makes columns text that were inferred to be something else, and in whose first rows something is that only looks so.
    pub(super) fn take_for_text(&mut self, first_rows: &[u8]) {
        let (rows, format) = (self.inferred_rows, self.format.clone().with_header(self.has_header));
        let can_read = |column| self.can_read(first_rows, &format, rows, column, &mut self.no_zones());
        if rows == 0 || can_read(None) {
            return;
        }
        let field = |(at, field): (usize, &FieldRef)| {
            let is_text = self.reasons[at] != Reason::Said && !can_read(Some(at));
            if is_text { Arc::new(field.as_ref().clone().with_data_type(DataType::Utf8)) } else { field.clone() }
        };
        let fields = self.schema.fields().iter().enumerate().map(field).collect::<Vec<_>>();
        self.schema = Arc::new(Schema::new(fields));
    }

    /// Whether the first rows are of the types of their columns: of all, or of one. `zones` are those before them, and then with
    /// theirs.
    fn can_read(&self, bytes: &[u8], format: &Format, rows: usize, column: Option<usize>, zones: &mut Zones) -> bool {
        let (mut decoder, mut rest) = (self.decoder(format.clone(), rows, column), bytes);
        loop {
            match decoder.decode(rest) {
                // It has its rows, or was told by an empty buffer that the last record is at its end.
                Ok(0) => break,
                // The heading, or the rows.
                Ok(used) => rest = &rest[used..],
                Err(_) => return false,
            }
        }
        let batch = decoder.flush();
        batch.and_then(|batch| batch.map(|batch| self.typed(&batch, column, zones)).transpose()).is_ok()
    }

    /// Reads one record by itself, and returns how many bytes it is long; says what is wrong with it. `zones` are those before
    /// it, and then with its own.
    fn check(&self, bytes: &[u8], line: usize, is_header: bool, zones: &mut Zones) -> Result<usize> {
        let columns = self.schema.fields().len();
        let text = with_types(&self.schema, |_| DataType::Utf8);
        let mut decoder = ReaderBuilder::new(text).with_format(self.format.clone()).with_batch_size(1).build_decoder();
        let used = decoder.decode(bytes).and_then(|used| decoder.decode(&[]).map(|_| used)).map_err(|error| {
            let error = error.to_string();
            let found = error.rsplit_once("got ").map_or("another number", |(_, found)| found);
            Error::Invalid(format!(
                "line {line} has {found} fields where there are {columns} columns; quote the fields that have a delimiter or \
                 a quote of their own, or correct the line"
            ))
        })?;
        if is_header {
            return Ok(used);
        }
        let record = decoder.flush().map_err(|_| not_utf8(line))?;
        let Some(record) = record else { return Ok(used) };
        let is_sound = |column: Option<usize>, zones: &mut Zones| self.can_read(bytes, &self.format, 1, column, zones);
        let before = zones.clone();
        if is_sound(None, zones) {
            return Ok(used);
        }
        for (at, field) in self.schema.fields().iter().enumerate() {
            if !is_sound(Some(at), &mut before.clone()) {
                let value = record.column(at).as_string::<i32>().value(0);
                return Err(match before[at] {
                    Some(zone) if is_sound(Some(at), &mut self.no_zones()) => self.mixed(field, value, line, zone),
                    _ => self.unfit(at, field, value, line),
                });
            }
        }
        Ok(used)
    }

    /// A time with a zone among others without, or the other way round: they are not of one kind.
    fn mixed(&self, field: &FieldRef, value: &str, line: usize, zone: bool) -> Error {
        let name = field.name();
        let said = assignment(name, "string");
        let (has, had) = if zone { ("no zone", "one") } else { ("a zone", "none") };
        Error::Invalid(format!(
            "line {line}, column {name:?}: {value:?} has {has}, and those before it in the column have {had}; write all of them \
             with a zone or all without, or say --types {said}"
        ))
    }

    /// A value that is not of its column's type.
    fn unfit(&self, at: usize, field: &FieldRef, value: &str, line: usize) -> Error {
        let (name, expected) = (field.name(), type_name(field.data_type()));
        let said = |wanted: &str| format!("--types {}", assignment(name, wanted));
        let text: ArrayRef = Arc::new(StringArray::from(vec![value]));
        let wider = taking(field.data_type(), value).into_iter().filter(|wider| made_of_text(&text, wider).is_ok());
        let wider: Vec<String> = wider.map(|wider| said(&type_name(&wider))).collect();
        let (wider, text) = (wider.join(" or "), said("string"));
        let advice = match (self.reasons[at], wider.as_str()) {
            (Reason::OfTable, _) => "which the column is in the table that the rows are added to; correct it".into(),
            (Reason::Said, "") => {
                format!("which --types says; correct it, or say another type: {text} takes all values")
            }
            (Reason::Said, wider) => format!(
                "which --types says; correct it, or say another type: {wider} takes it, and {text} takes all values"
            ),
            (Reason::Inferred, wider) => format!(
                "which the column is by its first {}; say {}{text}, or have more rows looked at with --infer-rows",
                counted(self.inferred_rows as u64, "row"),
                if wider.is_empty() { String::new() } else { format!("{wider}, or for any text ") }
            ),
        };
        let missing = match MISSING.iter().find(|word| value.trim().eq_ignore_ascii_case(word)) {
            Some(_) => format!("; if it stands for a null, say --null-values {:?}", value),
            None => String::new(),
        };
        let forms = match field.data_type() {
            DataType::Timestamp(..) if missing.is_empty() && !TIMESTAMP.is_match(value) => {
                "; a timestamp is written with its seconds, as in 2026-01-31 10:11:12.5, or is a date alone"
            }
            _ => "",
        };
        Error::Invalid(format!("line {line}, column {name:?}: {value:?} is no {expected}, {advice}{missing}{forms}"))
    }
}

/// What people write for a value that is missing.
const MISSING: [&str; 8] = ["NA", "N/A", "NULL", "NONE", "NIL", "NAN", "-", "\\N"];

/// Bytes that are no text.
pub(super) fn not_utf8(line: usize) -> Error {
    Error::Invalid(format!("line {line} is not UTF-8; convert the file first, as with: iconv -f LATIN1 -t UTF-8 FILE"))
}

/// Whether values are made of their text here: Arrow's reader cuts off what a decimal or a time has no digits for, reads
/// dates and times that other readers do not, takes numbers that are too large for infinity, and has no long strings.
fn is_made_of_text(data_type: &DataType) -> bool {
    use DataType as T;
    match data_type {
        T::Decimal128(..) | T::Timestamp(..) | T::LargeUtf8 => true,
        _ => data_type.is_floating() || matches!(data_type, T::Date32 | T::Date64 | T::Time32(_) | T::Time64(_)),
    }
}

/// Whether a time says how far it is from UTC.
pub(super) fn is_zoned(time: &str) -> bool {
    // Behind the day, these are of a zone.
    time.get("2026-01-31".len()..).is_some_and(|time| time.contains(['z', 'Z', '+', '-']))
}

/// Refuses times with a zone beside times without: nobody knows how far these are from UTC.
fn check_zones(text: &ArrayRef, zone: &mut Option<bool>) -> Result<(), ArrowError> {
    for value in text.as_string::<i32>().iter().flatten() {
        if *zone.get_or_insert(is_zoned(value)) != is_zoned(value) {
            return Err(ArrowError::ParseError(format!("{value} and others differ in whether they have a zone")));
        }
    }
    Ok(())
}

/// What is read as a timestamp. Arrow reads more, and other readers read other things: a second that is none, minutes of a zone
/// beyond 59.
static TIMESTAMP: LazyLock<Regex> = LazyLock::new(|| {
    let time = r"[0-9]{2}:[0-9]{2}:[0-5][0-9](?:\.[0-9]{1,9})?";
    let zone = r"(?:[zZ]| ?[+-](?:[01][0-9]|2[0-3])(?::?[0-5][0-9])?)";
    Regex::new(&format!("^[0-9]{{4}}-[0-9]{{2}}-[0-9]{{2}}(?:[T ]{time}{zone}?)?$")).expect("it is written above")
});

/// What is read as a time of day. Arrow reads more: a second that is none, half days, bare numbers.
static TIME: LazyLock<Regex> = LazyLock::new(|| {
    Regex::new(r"^(?:[01][0-9]|2[0-3]):[0-5][0-9](?::[0-5][0-9](?:\.[0-9]{1,9})?)?$").expect("it is written above")
});

/// What is read as a decimal. Arrow reads more, and cuts off what it has an exponent for.
static DECIMAL: LazyLock<Regex> = LazyLock::new(|| {
    Regex::new(r"^[ \t]*([+-]?)([0-9]*)(?:\.([0-9]*))?(?:[eE]([+-]?[0-9]+))?[ \t]*$").expect("it is written above")
});

/// More than the digits that a decimal has on either side of its point.
const DIGITS_MAX: i64 = 80;

/// A decimal without its exponent, spaces and needless zeros; `None` for what is none.
pub(super) fn plain_decimal(text: &str) -> Option<String> {
    let parts = DECIMAL.captures(text)?;
    let part = |index| parts.get(index).map_or("", |part| part.as_str());
    let (whole, fraction) = (part(2), part(3));
    let digits = format!("{whole}{fraction}");
    if digits.is_empty() {
        return None;
    }
    let zeros = digits.len() - digits.trim_start_matches('0').len();
    if zeros == digits.len() {
        return Some(format!("{}0.", part(1)));
    }
    let exponent = if part(4).is_empty() { 0 } else { part(4).parse::<i64>().ok()? };
    // Where the point is, counted from the first digit. No decimal has room where it is far from the digits that count.
    let point = i64::try_from(whole.len()).ok()?.checked_add(exponent)?;
    let from_first = point.checked_sub(i64::try_from(zeros).ok()?)?;
    if from_first.abs() > DIGITS_MAX {
        return None;
    }
    let point = i32::try_from(point).ok()?;
    let digits = match point {
        ..0 => "0".repeat(point.unsigned_abs() as usize) + &digits,
        _ => format!("{digits:0<width$}", width = point as usize),
    };
    let (whole, fraction) = digits.split_at(point.max(0) as usize);
    let whole = whole.trim_start_matches('0');
    Some(format!("{}{}.{}", part(1), if whole.is_empty() { "0" } else { whole }, fraction.trim_end_matches('0')))
}

/// Whether a time has more digits behind the point of its seconds than the unit has room for.
fn has_finer(time: &str, unit: TimeUnit) -> bool {
    let digits = match unit {
        TimeUnit::Second => 0,
        TimeUnit::Millisecond => 3,
        TimeUnit::Microsecond => 6,
        TimeUnit::Nanosecond => 9,
    };
    let fraction = time.split_once('.').map_or("", |(_, fraction)| fraction);
    fraction.bytes().take_while(u8::is_ascii_digit).count() > digits
}

/// The values of a text, each in whole or not at all.
fn made_of_text(text: &ArrayRef, data_type: &DataType) -> Result<ArrayRef, ArrowError> {
    match data_type {
        DataType::Float16 => return floats::<Float16Type>(text, |float| float.is_infinite()),
        DataType::Float32 => return floats::<Float32Type>(text, f32::is_infinite),
        DataType::Float64 => return floats::<Float64Type>(text, f64::is_infinite),
        _ => {}
    }
    let lost = |text: &str| match data_type {
        DataType::Decimal128(_, scale) => plain_decimal(text).is_none_or(|plain| {
            let fraction = plain.split_once('.').map_or("", |(_, fraction)| fraction);
            fraction.len() > usize::from(scale.unsigned_abs())
        }),
        DataType::Timestamp(unit, _) => has_finer(text, *unit) || !TIMESTAMP.is_match(text),
        DataType::Time32(unit) | DataType::Time64(unit) => has_finer(text, *unit) || !TIME.is_match(text),
        DataType::Date32 | DataType::Date64 => text.len() != "2026-01-31".len(),
        _ => false,
    };
    let strings = text.as_string::<i32>();
    if let Some(value) = strings.iter().flatten().find(|value| lost(value)) {
        return Err(ArrowError::ParseError(format!("{value} is not in whole a {data_type}")));
    }
    let DataType::Decimal128(precision, scale) = *data_type else {
        let values = cast_with_options(text, data_type, &CastOptions { safe: false, ..CastOptions::default() })?;
        if let DataType::Timestamp(TimeUnit::Nanosecond, _) = data_type {
            check_nanoseconds(&values)?;
        }
        return Ok(values);
    };
    let value = |text: &str| {
        let plain = plain_decimal(text).expect("what is no decimal was refused");
        parse_decimal::<Decimal128Type>(plain.trim_end_matches('.'), precision, scale)
    };
    let values = strings.iter().map(|text| text.map(value).transpose());
    let values = values.collect::<Result<Decimal128Array, ArrowError>>()?.with_precision_and_scale(precision, scale)?;
    values.validate_decimal_precision(precision)?;
    Ok(Arc::new(values))
}

/// Refuses the times of the last second that nanoseconds reach back to, which not all readers have.
fn check_nanoseconds(values: &ArrayRef) -> Result<(), ArrowError> {
    const EARLIEST: i64 = i64::MIN / 1_000_000_000 * 1_000_000_000;
    match arrow::compute::min(values.as_primitive::<TimestampNanosecondType>()) {
        Some(earliest) if earliest < EARLIEST => {
            Err(ArrowError::ParseError("a time is before those that nanoseconds reach".into()))
        }
        _ => Ok(()),
    }
}

/// The floats of a text. A number that has no room is none, and infinity is written in letters.
fn floats<T: ArrowPrimitiveType + Parser>(
    text: &ArrayRef,
    is_infinite: impl Fn(T::Native) -> bool,
) -> Result<ArrayRef, ArrowError> {
    let value = |text: &str| {
        let value = T::parse(text).filter(|value| !is_infinite(*value) || text.contains(['n', 'N']));
        value.ok_or_else(|| ArrowError::ParseError(format!("{text} is no {}", T::DATA_TYPE)))
    };
    let values = text.as_string::<i32>().iter().map(|text| text.map(value).transpose());
    Ok(Arc::new(values.collect::<Result<PrimitiveArray<T>, ArrowError>>()?))
}

fn with_types(schema: &Schema, wanted: impl Fn(&DataType) -> DataType) -> SchemaRef {
    let field = |field: &FieldRef| field.as_ref().clone().with_data_type(wanted(field.data_type()));
    Arc::new(Schema::new(schema.fields().iter().map(field).collect::<Vec<_>>()))
}

pub(super) fn newlines(bytes: &[u8]) -> usize {
    bytes.iter().filter(|byte| **byte == b'\n').count()
}
