//! Renders rows of a table: for people as a table, for machines as one JSON object per row.

use std::io::Write;

use arrow::array::{RecordBatch, new_empty_array, new_null_array};
use arrow::datatypes::{DataType, FieldRef, Schema};
use arrow::json::writer::{EncoderOptions, make_encoder};
use arrow::json::{LineDelimitedWriter, WriterBuilder};
use arrow::util::display::{ArrayFormatter, FormatOptions};
use bytes::Bytes;
use parquet::arrow::ArrowWriter;
use parquet::arrow::arrow_reader::ParquetRecordBatchReader;

use super::output::{self, Align};
use crate::columns::any_part;
use crate::human::{quoted, type_name};
use crate::{Error, Result, panics};

/// Maximum length of one value's text; longer text is cut.
const CELL_WIDTH_MAX: usize = 32;

/// Width to use if stdout is not a terminal, or does not report its width.
const WIDTH: usize = 100;

/// Renders the rows under their column names. Columns that do not fit the terminal are named below
/// instead.
///
/// # Errors
/// Arrow's, for a type that has no text.
pub fn render(schema: &Schema, batches: &[RecordBatch]) -> Result<String> {
    render_in(schema, batches, width())
}

fn render_in(schema: &Schema, batches: &[RecordBatch], width: usize) -> Result<String> {
    let mut columns = Vec::with_capacity(schema.fields().len());
    for at in 0..schema.fields().len() {
        columns.push(cells(batches, at)?);
    }
    let column_width = |at: usize| {
        let name = schema.field(at).name().chars().count();
        columns[at].iter().map(|cell| cell.chars().count()).chain([name]).max().unwrap_or(0)
    };
    let mut used = 0;
    let mut shown = 0;
    while shown < columns.len() {
        let gap = if shown == 0 { 0 } else { 2 };
        if shown > 0 && used + gap + column_width(shown) > width {
            break;
        }
        used += gap + column_width(shown);
        shown += 1;
    }
    let heading: Vec<(&str, Align)> =
        (0..shown).map(|at| (schema.field(at).name().as_str(), align(schema.field(at).data_type()))).collect();
    let rows = columns.first().map_or(0, Vec::len);
    let rows: Vec<Vec<String>> =
        (0..rows).map(|row| columns[..shown].iter().map(|column| column[row].clone()).collect()).collect();
    let mut text = output::table(&heading, &rows);
    if shown < columns.len() {
        let rest: Vec<String> = schema.fields()[shown..].iter().map(|field| quoted(field.name())).collect();
        let rest =
            wrap(&format!("and {}: {}", output::counted(rest.len() as u64, "more column"), rest.join(", ")), width);
        text.push('\n');
        text.push_str(&output::styled(&rest, output::Style::Dim));
    }
    Ok(text)
}

/// Refuses columns whose values cannot be written as CSV fields.
///
/// # Errors
/// [`Error::Invalid`] with the column, its type and advice.
pub fn check_has_csv(schema: &Schema) -> Result<()> {
    let options = FormatOptions::default();
    check_columns(schema, "CSV", "write Parquet, Arrow or JSON instead", |field| {
        let values = new_empty_array(field.data_type());
        !field.data_type().is_nested() && ArrayFormatter::try_new(&values, &options).is_ok()
    })
}

/// Refuses columns whose values cannot be written as JSON.
///
/// # Errors
/// [`Error::Invalid`] with the column, its type and advice.
pub fn check_has_json(schema: &Schema) -> Result<()> {
    let options = EncoderOptions::default();
    check_columns(schema, "JSON", "write Parquet or Arrow instead", |field| {
        make_encoder(field, &new_empty_array(field.data_type()), &options).is_ok()
    })
}

/// Refuses columns that Parquet does not hold, or that its library does not write or read.
///
/// # Errors
/// [`Error::Invalid`] with the column, its type and advice.
pub fn check_has_parquet(schema: &Schema) -> Result<()> {
    check_columns(schema, "Parquet", "write Arrow instead", |field| has_parquet(field.data_type()))
}

/// True if Parquet's library writes and reads the type; tested with one null. For other types, the
/// library returns an error or panics. For some types it does so only when it writes a batch, and
/// for some only when it reads.
pub fn has_parquet(data_type: &DataType) -> bool {
    let read_back = || -> parquet::errors::Result<bool> {
        let batch = RecordBatch::try_from_iter([("c", new_null_array(data_type, 1))])?;
        let mut writer = ArrowWriter::try_new(Vec::new(), batch.schema(), None)?;
        writer.write(&batch)?;
        let mut reader = ParquetRecordBatchReader::try_new(Bytes::from(writer.into_inner()?), 1)?;
        Ok(reader.next().is_some_and(|read| read.is_ok()))
    };
    panics::caught(|| read_back().unwrap_or(false)).unwrap_or(false)
}

fn check_columns(schema: &Schema, format: &str, advice: &str, has: impl Fn(&FieldRef) -> bool) -> Result<()> {
    match schema.fields().iter().find(|field| !has(field)) {
        None => Ok(()),
        Some(field) => Err(Error::Invalid(format!(
            "column {:?} is {}, which cannot be written as {format}; {advice}, for example with -o FILE.arrow, or \
             select other columns with --columns",
            field.name(),
            type_name(field.data_type())
        ))),
    }
}

/// Refuses dates and times that have no text. Arrow's JSON writer would write an error message
/// instead.
///
/// # Errors
/// [`Error::Invalid`] with the column, the row and advice.
pub fn check_has_text(batch: &RecordBatch) -> Result<()> {
    let options = FormatOptions::default().with_display_error(false);
    let is_time = |part: &DataType| matches!(part, DataType::Timestamp(..) | DataType::Date32 | DataType::Date64);
    let mut text = String::new();
    for (field, column) in batch.schema().fields().iter().zip(batch.columns()) {
        if !any_part(field.data_type(), &is_time) {
            continue;
        }
        let values = ArrayFormatter::try_new(column, &options)?;
        for row in 0..batch.num_rows() {
            text.clear();
            values.value(row).write(&mut text).map_err(|_| {
                Error::Invalid(format!(
                    "column {:?} has a value, in row {} of a batch of {} rows, whose date or zone cannot be written \
                     as text; write Parquet or Arrow instead, for example with -o FILE.arrow",
                    field.name(),
                    row + 1,
                    batch.num_rows()
                ))
            })?;
        }
    }
    Ok(())
}

/// Creates a writer of one JSON object per row and line, with all columns. JSON has no NaN and no
/// infinities, so they become null, too.
pub fn json_writer<W: Write>(to: W) -> LineDelimitedWriter<W> {
    WriterBuilder::new().with_explicit_nulls(true).build(to)
}

/// Prints rows as [`json_writer`] writes them.
///
/// # Errors
/// Arrow's, for a type that has no JSON, and the errors of standard output.
pub fn print_json(batch: &RecordBatch) -> Result<()> {
    check_has_json(batch.schema_ref())?;
    check_has_text(batch)?;
    let mut lines = json_writer(Vec::new());
    lines.write(batch)?;
    lines.finish()?;
    let text = String::from_utf8_lossy(&lines.into_inner()).into_owned();
    if text.is_empty() { Ok(()) } else { output::write_line(text.trim_end_matches('\n')) }
}

fn cells(batches: &[RecordBatch], at: usize) -> Result<Vec<String>> {
    let options = FormatOptions::default().with_null("null");
    let mut cells = Vec::new();
    for batch in batches {
        let values = ArrayFormatter::try_new(batch.column(at), &options)?;
        for row in 0..batch.num_rows() {
            cells.push(cut(&values.value(row).try_to_string()?));
        }
    }
    Ok(cells)
}

/// Cuts text to one line of limited length. Replaces control characters, which would break the
/// table.
fn cut(text: &str) -> String {
    let clean = |c: char| if c.is_control() { ' ' } else { c };
    match text.chars().count() > CELL_WIDTH_MAX {
        true => text.chars().take(CELL_WIDTH_MAX - 1).map(clean).chain(['…']).collect(),
        false => text.chars().map(clean).collect(),
    }
}

fn align(data_type: &DataType) -> Align {
    if data_type.is_numeric() { Align::Right } else { Align::Left }
}

/// Breaks a line at spaces. Continuation lines keep the line's indentation.
pub fn wrap(text: &str, width: usize) -> String {
    let indent = &text[..text.len() - text.trim_start_matches(' ').len()];
    let mut lines = Vec::new();
    let mut line = String::new();
    for word in text.trim_start_matches(' ').split(' ') {
        if line.is_empty() {
            line = format!("{indent}{word}");
        } else if line.chars().count() + 1 + word.chars().count() > width {
            lines.push(std::mem::replace(&mut line, format!("{indent}{word}")));
        } else {
            line.push(' ');
            line.push_str(word);
        }
    }
    lines.push(line);
    lines.join("\n")
}

fn width() -> usize {
    let told = std::env::var("COLUMNS").ok().and_then(|columns| columns.parse().ok());
    let measured = || terminal_size::terminal_size_of(std::io::stdout()).map(|(width, _)| usize::from(width.0));
    told.or_else(measured).filter(|columns| *columns > 0).unwrap_or(WIDTH)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use arrow::array::{Float64Array, Int64Array, StringArray, TimestampMillisecondArray};

    use super::*;

    #[test]
    fn long_lines_break_at_spaces_and_stay_indented() {
        assert_eq!(wrap("", 10), "");
        assert_eq!(wrap("one two", 7), "one two");
        assert_eq!(wrap("  one two three", 9), "  one two\n  three");
        assert_eq!(wrap("immeasurable", 5), "immeasurable");
    }

    #[test]
    fn a_row_of_json_has_all_columns() {
        let batch = RecordBatch::try_from_iter_with_nullable([
            ("k", Arc::new(Int64Array::from(vec![Some(1), None])) as _, true),
            ("x", Arc::new(Float64Array::from(vec![f64::NAN, 0.5])) as _, true),
        ])
        .unwrap();
        let mut lines = json_writer(Vec::new());
        lines.write(&batch).unwrap();
        lines.finish().unwrap();
        let text = String::from_utf8(lines.into_inner()).unwrap();
        assert_eq!(text, "{\"k\":1,\"x\":null}\n{\"k\":null,\"x\":0.5}\n");
    }

    #[test]
    fn columns_that_a_format_does_not_support_are_named_with_their_types() {
        use arrow::datatypes::{Field, UnionFields, UnionMode};
        let number = Field::new("item", DataType::Int64, true);
        let list = Field::new("l", DataType::List(Arc::new(number.clone())), true);
        let of_either = DataType::Union(UnionFields::from_fields([number]), UnionMode::Dense);
        let union = Field::new("u", DataType::List(Arc::new(Field::new("item", of_either, true))), true);
        let schema = |field: &Field| Schema::new(vec![Field::new("k", DataType::Int64, true), field.clone()]);
        check_has_json(&schema(&list)).unwrap();
        let error = check_has_csv(&schema(&list)).unwrap_err();
        assert!(
            error.message().starts_with("column \"l\" is list(int64), which cannot be written as CSV; "),
            "{error}"
        );
        assert!(error.message().contains("-o FILE.arrow") && error.message().contains("--columns"), "{error}");
        let error = check_has_json(&schema(&union)).unwrap_err();
        assert!(error.message().starts_with("column \"u\" is list(dense_union(item: int64)), which"), "{error}");
    }

    #[test]
    fn times_in_named_zones_are_shown_and_times_beyond_the_calendar_are_errors() {
        let times = |zone: &str, values: Vec<i64>| {
            let times = TimestampMillisecondArray::from(values).with_timezone(zone);
            RecordBatch::try_from_iter([("at", Arc::new(times) as _)]).unwrap()
        };
        for zone in ["UTC", "GMT", "Europe/Berlin", "+02:00"] {
            let batch = times(zone, vec![0]);
            check_has_text(&batch).unwrap();
            assert!(render_in(&batch.schema(), &[batch], 100).unwrap().contains("1970-01-01T0"), "{zone}");
        }
        let error = check_has_text(&times("UTC", vec![0, 1 << 62])).unwrap_err();
        assert!(error.message().starts_with("column \"at\" has a value, in row 2 of"), "{error}");
    }

    #[test]
    fn columns_too_wide_for_the_line_are_cut_or_named() {
        let batch = RecordBatch::try_from_iter_with_nullable([
            ("key", Arc::new(Int64Array::from(vec![1, 20])) as _, true),
            ("text", Arc::new(StringArray::from(vec![Some("a\nb"), None])) as _, true),
            ("long", Arc::new(StringArray::from(vec!["x".repeat(40), "y".into()])) as _, true),
        ])
        .unwrap();
        let wide = render_in(&batch.schema(), std::slice::from_ref(&batch), 100).unwrap();
        assert_eq!(wide, format!("key  text  long\n  1  a b   {}…\n 20  null  y", "x".repeat(31)));
        let narrow = render_in(&batch.schema(), &[batch], 20).unwrap();
        assert_eq!(narrow, "key  text\n  1  a b\n 20  null\nand 1 more column:\nlong");
    }
}
