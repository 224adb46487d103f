//! Output to stdout and stderr, for people or for machines.

use std::io::{ErrorKind, IsTerminal, Write};
use std::sync::atomic::{AtomicBool, Ordering};

pub use crate::human::{count, counted, seconds};

use crate::human::system_words;
use crate::memory::human_bytes;
use crate::{Error, Result, lines};

/// True with `--json`. Set once from the command line, before any output.
static JSON: AtomicBool = AtomicBool::new(false);

/// Describes a transfer with its rate: `orders: 1,500 rows, 1.2 MiB sent in 10.0 ms (120.0 MiB/s)`,
/// with `sent in` for `how`.
pub fn transfer(what: &str, rows: u64, bytes: u64, how: &str, taken: f64) -> String {
    let (rows, size, rate) = (counted(rows, "row"), human_bytes(bytes), human_bytes((bytes as f64 / taken) as u64));
    format!("{what}: {rows}, {size} {how} {} ({rate}/s)", seconds(taken))
}

/// Turns JSON output on or off.
pub fn set_json(json: bool) {
    JSON.store(json, Ordering::Relaxed);
}

/// True if `--json` was given.
pub fn is_json() -> bool {
    JSON.load(Ordering::Relaxed)
}

/// True once standard output has no reader any more.
static READER_LEFT: AtomicBool = AtomicBool::new(false);

/// True if the reader of standard output has left (`dovetail tables | head -1`). An error after
/// that is no failure, because the reader has all the rows that it wanted.
pub fn reader_left() -> bool {
    READER_LEFT.load(Ordering::Relaxed)
}

/// Converts a failure to write to standard output into an [`Error`], and records a reader that has
/// left.
pub fn stdout_failure(failure: &std::io::Error) -> Error {
    if failure.kind() == ErrorKind::BrokenPipe {
        READER_LEFT.store(true, Ordering::Relaxed);
    }
    Error::Exhausted(format!("cannot write to standard output: {}", system_words(failure)))
}

/// Writes a line on stdout, for commands that clean up if writing fails.
///
/// # Errors
/// [`Error::Exhausted`].
pub fn write_line(text: impl AsRef<str>) -> Result<()> {
    let mut stdout = std::io::stdout().lock();
    writeln!(stdout, "{}", text.as_ref()).and_then(|()| stdout.flush()).map_err(|failure| stdout_failure(&failure))
}

/// Makes and writes possibly long text on a separate thread. The caller can stop waiting at any
/// time, even if standard output has no active reader.
///
/// # Errors
/// The errors of `work`, and [`Error::Exhausted`] if the system has no thread.
pub async fn on_a_thread(work: impl FnOnce() -> Result<()> + Send + 'static) -> Result<()> {
    let (done, outcome) = tokio::sync::oneshot::channel();
    // Use a plain thread, because the process waits for the runtime's threads at its end.
    let begun = std::thread::Builder::new().spawn(move || done.send(work()));
    begun.map_err(|error| Error::Exhausted(format!("starting a thread that prints: {}", system_words(&error))))?;
    outcome.await.unwrap_or_else(|_| Err(Error::Internal("writing to standard output: its thread panicked".into())))
}

/// Writes a line on stdout. Exits with status 0 if the reader has left. Exits with an error for any
/// other failure, because output would be lost.
pub fn line(text: impl AsRef<str>) {
    if let Err(failure) = write_line(text) {
        if reader_left() {
            std::process::exit(0);
        }
        error(&failure);
        std::process::exit(1);
    }
}

/// Writes a JSON value as a line on stdout.
pub fn json(value: &serde_json::Value) {
    line(value.to_string());
}

/// Writes a remark for people on stderr, except with `--json`.
pub fn remark(text: impl AsRef<str>) {
    if !is_json() {
        lines::log(text.as_ref());
    }
}

/// Writes a failure on stderr: a sentence, or with `--json` an object with its kind.
pub fn error(error: &Error) {
    if is_json() {
        lines::log(serde_json::json!({ "error": { "kind": kind(error), "message": error.message() } }));
    } else {
        lines::log(format_args!("{} {error}", style("error:", Style::Error, std::io::stderr().is_terminal())));
    }
}

/// Returns the name of an error's kind for machines, which is the name of its gRPC status.
fn kind(error: &Error) -> &'static str {
    match error {
        Error::Invalid(_) | Error::TooLong(_) => "invalid_argument",
        Error::NotFound(_) => "not_found",
        Error::AlreadyExists(_) => "already_exists",
        Error::Precondition(_) => "failed_precondition",
        Error::Unauthenticated(_) => "unauthenticated",
        Error::Denied(_) => "permission_denied",
        Error::Exhausted(_) => "resource_exhausted",
        Error::Unavailable(_) => "unavailable",
        Error::Cancelled(_) => "cancelled",
        Error::DeadlineExceeded(_) => "deadline_exceeded",
        Error::Unsupported(_) => "unimplemented",
        Error::Internal(_) => "internal",
    }
}

/// Style of a piece of text on a terminal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Style {
    Heading,
    /// Side information.
    Dim,
    Good,
    Error,
}

/// Colours text for stdout, only on a terminal and only if `NO_COLOR` is not set.
pub fn styled(text: &str, how: Style) -> String {
    style(text, how, std::io::stdout().is_terminal())
}

fn style(text: &str, how: Style, terminal: bool) -> String {
    if !terminal || std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty()) {
        return text.into();
    }
    let code = match how {
        Style::Heading => "1",
        Style::Dim => "2",
        Style::Good => "32",
        Style::Error => "1;31",
    };
    format!("\x1b[{code}m{text}\x1b[0m")
}

/// Formats a count or a rate with three digits: `950`, `12.3 M`, `1.20 G`.
pub fn short(number: f64) -> String {
    let (value, unit) = match number {
        n if n >= 1e9 => (n / 1e9, " G"),
        n if n >= 1e6 => (n / 1e6, " M"),
        n if n >= 1e4 => (n / 1e3, " k"),
        n => (n, ""),
    };
    match value {
        v if unit.is_empty() => format!("{v:.0}"),
        v if v >= 100.0 => format!("{v:.0}{unit}"),
        v if v >= 10.0 => format!("{v:.1}{unit}"),
        v => format!("{v:.2}{unit}"),
    }
}

/// Alignment of a column's text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Align {
    Left,
    Right,
}

/// Renders rows under a heading. Columns are as wide as their text, two spaces apart.
pub fn table(columns: &[(&str, Align)], rows: &[Vec<String>]) -> String {
    let widths: Vec<usize> = (0..columns.len())
        .map(|at| rows.iter().map(|row| width(&row[at])).chain([width(columns[at].0)]).max().unwrap_or(0))
        .collect();
    [heading(columns, &widths)].into_iter().chain(lines(columns, &widths, rows)).collect::<Vec<_>>().join("\n")
}

/// Renders the heading of columns of these widths.
pub fn heading(columns: &[(&str, Align)], widths: &[usize]) -> String {
    let names: Vec<String> = columns.iter().map(|(name, _)| (*name).to_owned()).collect();
    styled(&aligned(columns, widths, &names), Style::Dim)
}

/// Renders rows, a line each. Wider text moves the rest of its line.
pub fn lines(columns: &[(&str, Align)], widths: &[usize], rows: &[Vec<String>]) -> Vec<String> {
    rows.iter().map(|row| aligned(columns, widths, row)).collect()
}

fn aligned(columns: &[(&str, Align)], widths: &[usize], cells: &[String]) -> String {
    let mut text = String::new();
    for (at, cell) in cells.iter().enumerate() {
        let padding = " ".repeat(widths[at].saturating_sub(width(cell)));
        let gap = if at == 0 { "" } else { "  " };
        match columns[at].1 {
            Align::Left => text.extend([gap, cell, &padding]),
            Align::Right => text.extend([gap, &padding, cell]),
        }
    }
    text.trim_end().to_owned()
}

fn width(text: &str) -> usize {
    text.chars().count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_have_three_digits() {
        assert_eq!(short(950.0), "950");
        assert_eq!(short(9_999.0), "9999");
        assert_eq!(short(12_345_678.0), "12.3 M");
        assert_eq!(short(1.2e9), "1.20 G");
    }

    #[test]
    fn columns_are_as_wide_as_they_need() {
        let rows = vec![vec!["orders".into(), "15".into()], vec!["né".into(), "1,500".into()]];
        let text = table(&[("table", Align::Left), ("rows", Align::Right)], &rows);
        assert_eq!(text, "table    rows\norders     15\nné      1,500");
    }
}
