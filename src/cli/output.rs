//! What goes to stdout and stderr, for people or for machines.

use std::io::{ErrorKind, IsTerminal, Write};
use std::sync::atomic::{AtomicBool, Ordering};

pub use crate::human::{count, counted, seconds};

use crate::human::system_words;
use crate::memory::human_bytes;
use crate::{Error, Result, lines};

/// Set once, from the command line, before anything is printed.
static JSON: AtomicBool = AtomicBool::new(false);

/// What was moved and how fast: `orders: 1,500 rows, 1.2 MiB sent in 10.0 ms (120.0 MiB/s)`, with `sent in` for `how`.
pub fn transfer(what: &str, rows: u64, bytes: u64, how: &str, taken: f64) -> String {
    let (rows, size, rate) = (counted(rows, "row"), human_bytes(bytes), human_bytes((bytes as f64 / taken) as u64));
    format!("{what}: {rows}, {size} {how} {} ({rate}/s)", seconds(taken))
}

/// Says whether machines read along.
pub fn set_json(json: bool) {
    JSON.store(json, Ordering::Relaxed);
}

/// Whether `--json` was given.
pub fn is_json() -> bool {
    JSON.load(Ordering::Relaxed)
}

/// Set when standard output has no reader any more.
static READER_LEFT: AtomicBool = AtomicBool::new(false);

/// Whether whoever read standard output has left (`dovetail tables | head -1`). What fails for that is no failure: they had
/// what they wanted.
pub fn reader_left() -> bool {
    READER_LEFT.load(Ordering::Relaxed)
}

/// Makes of a failure to write to standard output what it is, and remembers whether the reader has left.
pub fn stdout_failure(failure: &std::io::Error) -> Error {
    if failure.kind() == ErrorKind::BrokenPipe {
        READER_LEFT.store(true, Ordering::Relaxed);
    }
    Error::Exhausted(format!("cannot write to standard output: {}", system_words(failure)))
}

/// A line on stdout, for commands that have something to put away when it cannot be written.
///
/// # Errors
/// [`Error::Exhausted`].
pub fn write_line(text: impl AsRef<str>) -> Result<()> {
    let mut stdout = std::io::stdout().lock();
    writeln!(stdout, "{}", text.as_ref()).and_then(|()| stdout.flush()).map_err(|failure| stdout_failure(&failure))
}

/// Makes and writes what may be a lot of text on a thread of its own: whoever waits for this can stop waiting, however long making it takes,
/// and even if nobody reads standard output any more.
///
/// # Errors
/// Those of `work`, and [`Error::Exhausted`] where the system has no thread.
pub async fn on_a_thread(work: impl FnOnce() -> Result<()> + Send + 'static) -> Result<()> {
    let (done, outcome) = tokio::sync::oneshot::channel();
    // Not one of the runtime's: those are waited for when the process ends.
    let begun = std::thread::Builder::new().spawn(move || done.send(work()));
    begun.map_err(|error| Error::Exhausted(format!("starting a thread that prints: {}", system_words(&error))))?;
    outcome.await.unwrap_or_else(|_| Err(Error::Internal("writing to standard output: its thread panicked".into())))
}

/// A line on stdout. Ends the process quietly when nobody reads any more, and with an error when it cannot be written for
/// another reason: what was asked for would be lost.
pub fn line(text: impl AsRef<str>) {
    if let Err(failure) = write_line(text) {
        if reader_left() {
            std::process::exit(0);
        }
        error(&failure);
        std::process::exit(1);
    }
}

/// A JSON value on a line of stdout.
pub fn json(value: &serde_json::Value) {
    line(value.to_string());
}

/// A remark for people, on stderr; machines do not get it.
pub fn remark(text: impl AsRef<str>) {
    if !is_json() {
        lines::log(text.as_ref());
    }
}

/// A failure, on stderr: the sentence alone, or an object with its kind.
pub fn error(error: &Error) {
    if is_json() {
        lines::log(serde_json::json!({ "error": { "kind": kind(error), "message": error.message() } }));
    } else {
        lines::log(format_args!("{} {error}", style("error:", Style::Error, std::io::stderr().is_terminal())));
    }
}

/// The name of an error's kind, for machines; the gRPC status's own name.
fn kind(error: &Error) -> &'static str {
    match error {
        Error::Invalid(_) => "invalid_argument",
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

/// How a piece of text stands out on a terminal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Style {
    /// Headings.
    Heading,
    /// Side information.
    Dim,
    /// It is right.
    Good,
    /// It is wrong.
    Error,
}

/// Colours for stdout: only on a terminal, and not where `NO_COLOR` is set.
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

/// A count or a rate in three digits: `950`, `12.3 M`, `1.20 G`.
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

/// Where a column's text stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Align {
    /// Words.
    Left,
    /// Numbers.
    Right,
}

/// Rows under a heading, in columns as wide as they need, two spaces apart.
pub fn table(columns: &[(&str, Align)], rows: &[Vec<String>]) -> String {
    let width = |text: &str| text.chars().count();
    let widths: Vec<usize> = (0..columns.len())
        .map(|at| rows.iter().map(|row| width(&row[at])).chain([width(columns[at].0)]).max().unwrap_or(0))
        .collect();
    let render = |cells: &[String]| {
        let mut text = String::new();
        for (at, cell) in cells.iter().enumerate() {
            let padding = " ".repeat(widths[at] - width(cell));
            let gap = if at == 0 { "" } else { "  " };
            match columns[at].1 {
                Align::Left => text.extend([gap, cell, &padding]),
                Align::Right => text.extend([gap, &padding, cell]),
            }
        }
        text.trim_end().to_owned()
    };
    let heading = render(&columns.iter().map(|(name, _)| (*name).to_owned()).collect::<Vec<_>>());
    let lines = std::iter::once(styled(&heading, Style::Dim)).chain(rows.iter().map(|row| render(row)));
    lines.collect::<Vec<_>>().join("\n")
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
