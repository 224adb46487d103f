//! Renders rows of a table: for people as a table, for machines as one JSON object per row.

use arrow::array::RecordBatch;
use arrow::datatypes::{DataType, Schema, SchemaRef};
use arrow::util::display::FormatOptions;

use super::files::{Format, Writer};
use super::output::{self, Align};
use super::times::Times;
use crate::human::quoted;
use crate::{Result, panics};

/// Maximum length of one value's text; longer text is cut.
const CELL_WIDTH_MAX: usize = 32;

/// Width to use if stdout is not a terminal, or does not report its width.
const WIDTH: usize = 100;

/// Text of a value that Arrow cannot format.
const NO_TEXT: &str = "(no text)";

/// Renders the rows under their column names. Columns that do not fit the terminal are named below
/// instead.
pub fn render(schema: &SchemaRef, batches: &[RecordBatch]) -> String {
    render_in(schema, batches, width())
}

fn render_in(schema: &SchemaRef, batches: &[RecordBatch], width: usize) -> String {
    let mut table = Pieces::in_width(schema.clone(), width);
    let rows = table.next(batches);
    rows.into_iter().chain(table.rest()).collect::<Vec<_>>().join("\n")
}

/// Table that is rendered piece by piece, as its rows arrive. The first piece decides which columns
/// have room, and how wide they are.
#[derive(Debug)]
pub struct Pieces {
    schema: SchemaRef,
    width: usize,
    /// Widths of the columns that have room, once there is a piece.
    widths: Option<Vec<usize>>,
}

impl Pieces {
    /// Begins a table with these columns.
    pub fn new(schema: SchemaRef) -> Self {
        Self::in_width(schema, width())
    }

    fn in_width(schema: SchemaRef, width: usize) -> Self {
        Self { schema, width, widths: None }
    }

    /// Renders the next rows, below the names of the columns if they are the first; `None` if there
    /// is nothing to add.
    pub fn next(&mut self, batches: &[RecordBatch]) -> Option<String> {
        let is_first = self.widths.is_none();
        let columns: Vec<_> = (0..self.schema.fields().len()).map(|at| cells(batches, at)).collect();
        let widths = self.widths.get_or_insert_with(|| fitting(&self.schema, &columns, self.width));
        let headed: Vec<(&str, Align)> = self.schema.fields()[..widths.len()]
            .iter()
            .map(|field| (field.name().as_str(), align(field.data_type())))
            .collect();
        let count = columns.first().map_or(0, Vec::len);
        let rows: Vec<Vec<String>> =
            (0..count).map(|row| columns[..widths.len()].iter().map(|column| column[row].clone()).collect()).collect();
        let heading = is_first.then(|| output::heading(&headed, widths));
        let lines: Vec<String> = heading.into_iter().chain(output::lines(&headed, widths, &rows)).collect();
        (!lines.is_empty()).then(|| lines.join("\n"))
    }

    /// Names the columns that have no room.
    pub fn rest(&self) -> Option<String> {
        let fields = self.schema.fields();
        let shown = self.widths.as_ref().map_or(0, Vec::len);
        let rest: Vec<String> = fields[shown..].iter().map(|field| quoted(field.name())).collect();
        if rest.is_empty() {
            return None;
        }
        let words = format!("and {}: {}", output::counted(rest.len() as u64, "more column"), rest.join(", "));
        Some(output::styled(&wrap(&words, self.width), output::Style::Dim))
    }
}

/// Returns the widths of the first columns that fit the line, at least of one.
fn fitting(schema: &Schema, columns: &[Vec<String>], width: usize) -> Vec<usize> {
    let (mut widths, mut used) = (Vec::new(), 0);
    for (field, cells) in schema.fields().iter().zip(columns) {
        let name = field.name().chars().count();
        let needed = cells.iter().map(|cell| cell.chars().count()).chain([name]).max().unwrap_or(0);
        let gap = if widths.is_empty() { 0 } else { 2 };
        if !widths.is_empty() && used + gap + needed > width {
            break;
        }
        used += gap + needed;
        widths.push(needed);
    }
    widths
}

/// Prints rows: one JSON object per row and line, with all columns.
///
/// # Errors
/// The errors of [`Writer`] and of standard output.
pub fn print_json(batch: &RecordBatch) -> Result<()> {
    let mut lines = Writer::new(Format::Json, b',', &batch.schema(), Vec::new())?;
    lines.write(batch)?;
    let text = String::from_utf8_lossy(&lines.finish()?).into_owned();
    if text.is_empty() { Ok(()) } else { output::write_line(text.trim_end_matches('\n')) }
}

/// Returns the texts of a column. A value without text must not hide the others.
fn cells(batches: &[RecordBatch], at: usize) -> Vec<String> {
    let (times, options) = (Times::Shown, FormatOptions::default().with_null("null"));
    let mut cells = Vec::new();
    for batch in batches {
        let formatter = panics::caught(|| times.formatter(batch.column(at), &options));
        let text = |row: usize| {
            let formatter = formatter.as_ref().ok()?.as_ref().ok()?;
            panics::caught(|| formatter.value(row).try_to_string()).ok()?.ok()
        };
        cells.extend((0..batch.num_rows()).map(|row| text(row).map_or_else(|| NO_TEXT.into(), |text| cut(&text))));
    }
    cells
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

    use arrow::array::{Float64Array, Int64Array, StringArray, TimestampSecondArray};

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
        let mut lines = Writer::new(Format::Json, b',', &batch.schema(), Vec::new()).unwrap();
        lines.write(&batch).unwrap();
        let text = String::from_utf8(lines.finish().unwrap()).unwrap();
        assert_eq!(text, "{\"k\":1,\"x\":null}\n{\"k\":null,\"x\":0.5}\n");
    }

    #[test]
    fn times_beyond_the_calendar_and_in_unknown_zones_hide_no_others() {
        let times = |zone: Option<&str>| {
            let times = TimestampSecondArray::from(vec![Some(0), Some(1 << 62), None]).with_timezone_opt(zone);
            RecordBatch::try_from_iter([("at", Arc::new(times) as _)]).unwrap()
        };
        for (zone, first) in [
            (None, "1970-01-01T00:00:00"),
            (Some("UTC"), "1970-01-01T00:00:00Z"),
            (Some("Europe/Berlin"), "1970-01-01T01:00:00+01:00"),
            (Some("+02:00"), "1970-01-01T02:00:00+02:00"),
            (Some("Nowhere/There"), "1970-01-01T00:00:00Z"),
        ] {
            let batch = times(zone);
            let text = render_in(&batch.schema(), &[batch], 100);
            assert_eq!(text, format!("at\n{first}\n4611686018427387904 s\nnull"), "{zone:?}");
        }
    }

    #[test]
    fn columns_too_wide_for_the_line_are_cut_or_named() {
        let batch = RecordBatch::try_from_iter_with_nullable([
            ("key", Arc::new(Int64Array::from(vec![1, 20])) as _, true),
            ("text", Arc::new(StringArray::from(vec![Some("a\nb"), None])) as _, true),
            ("long", Arc::new(StringArray::from(vec!["x".repeat(40), "y".into()])) as _, true),
        ])
        .unwrap();
        let wide = render_in(&batch.schema(), std::slice::from_ref(&batch), 100);
        assert_eq!(wide, format!("key  text  long\n  1  a b   {}…\n 20  null  y", "x".repeat(31)));
        let narrow = render_in(&batch.schema(), std::slice::from_ref(&batch), 20);
        assert_eq!(narrow, "key  text\n  1  a b\n 20  null\nand 1 more column:\nlong");
        // Later rows keep the columns of the first ones.
        let mut table = Pieces::in_width(batch.schema(), 20);
        assert_eq!(table.next(&[batch.slice(1, 1)]).unwrap(), "key  text  long\n 20  null  y");
        assert_eq!(table.next(&[batch.slice(0, 1)]).unwrap(), format!("  1  a b   {}…", "x".repeat(31)));
        assert_eq!((table.next(&[]), table.rest()), (None, None));
    }
}
