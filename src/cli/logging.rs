//! Logs of the server: to stderr, as text for people or JSON for machines.

use std::io::IsTerminal;

use tokio::signal::unix::{SignalKind, signal};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::LevelFilter;

use crate::service::settings::Settings;
use crate::{Error, Result, lines, panics};

/// Starts logging with the level and format of the settings.
///
/// # Errors
/// The errors of [`filter`].
pub fn start(settings: &Settings) -> Result<()> {
    start_as(&settings.log, &settings.log_format)
}

/// Starts logging the messages that pass the filter `what`, as text or JSON. A second call in a
/// process changes nothing.
///
/// # Errors
/// The errors of [`filter`].
pub fn start_as(what: &str, format: &str) -> Result<()> {
    lines::set_json(format == "json");
    let logs = tracing_subscriber::fmt().with_env_filter(filter(what)?).with_writer(|| lines::LogWriter);
    // Otherwise the library prints its internal errors, and panics if printing fails.
    let logs = logs.log_internal_errors(false);
    let started = match format {
        "json" => logs.json().flatten_event(true).with_current_span(false).try_init(),
        _ => logs.with_ansi(std::io::stderr().is_terminal()).try_init(),
    };
    // Only tests, which share a process, get here twice.
    if started.is_ok() {
        panics::log();
    }
    Ok(())
}

/// Makes writes beyond the limit of `ulimit -f` fail. By default the system would end the process.
/// Needs a runtime.
///
/// # Errors
/// An I/O error if the signal handler cannot be installed.
pub fn outlive_full_files() -> Result<()> {
    Ok(signal(SignalKind::from_raw(libc::SIGXFSZ)).map(drop)?)
}

/// Parses a log filter: a level, or pairs of target and level, separated by commas. `EnvFilter`
/// reads any other word as a target, and then logs only the messages of that target. A misspelt
/// level would thus turn the log off.
///
/// # Errors
/// [`Error::Invalid`] with the accepted forms.
pub fn filter(text: &str) -> Result<EnvFilter> {
    let refuse = |what: String| {
        Error::Invalid(format!(
            "--log {text:?}: {what}; write off, error, warn, info, debug or trace, or a filter of targets and levels such as \
             \"info,dovetail::scheduler=debug\""
        ))
    };
    for part in text.split(',').map(str::trim) {
        let (target, level) = part.split_once('=').map_or(("", part), |(target, level)| (target.trim(), level.trim()));
        // The library also accepts numbers, and an empty level for everything.
        if level.is_empty() || level.parse::<u8>().is_ok() || level.parse::<LevelFilter>().is_err() {
            return Err(refuse(format!("{level:?} is not a level")));
        }
        if part.contains('=') && target.is_empty() {
            return Err(refuse(format!("{part:?} has no target")));
        }
    }
    EnvFilter::try_new(text).map_err(|error| refuse(error.to_string()))
}

#[cfg(test)]
mod tests {
    use std::fs::OpenOptions;
    use std::io;
    use std::process::{Command, Output, Stdio};

    use super::*;

    /// Variable with the number of panics for the test process.
    const PANICS: &str = "DOVETAIL_TEST_PANICS";

    /// Process that the tests below start.
    #[test]
    fn panicking() {
        let Ok(times) = std::env::var(PANICS) else { return };
        let _flush = lines::start().unwrap();
        start_as("info", "text").unwrap();
        for _ in 0..times.parse().unwrap() {
            // Several such lines fill a pipe.
            std::thread::spawn(|| panic!("for a test{}", " ".repeat(10_000))).join().unwrap_err();
        }
        println!("all panicked");
        std::process::abort();
    }

    /// Runs a process that panics `times` times, and then aborts.
    fn panics(times: usize, log: impl Into<Stdio>) -> Output {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "cli::logging::tests::panicking", "--nocapture"]).env(PANICS, times.to_string());
        command.stderr(log).output().unwrap()
    }

    #[test]
    fn panics_that_cannot_be_logged_end_no_process() {
        let full = OpenOptions::new().write(true).open("/dev/full").unwrap();
        let (_, gone) = io::pipe().unwrap();
        let (_reader, unread) = io::pipe().unwrap();
        for log in [Stdio::from(full), gone.into(), unread.into()] {
            let said = String::from_utf8(panics(20, log).stdout).unwrap();
            assert!(said.contains("all panicked\n"), "{said}");
        }
    }

    #[test]
    fn a_panic_is_logged_even_if_the_process_aborts() {
        let output = panics(1, Stdio::piped());
        let log = String::from_utf8(output.stderr).unwrap();
        assert!(
            log.contains(" ERROR dovetail::panics: thread without a name panicked at src/cli/logging.rs:"),
            "{log}"
        );
        assert!(log.contains(": for a test  "), "{log}");
    }

    #[test]
    fn a_filter_is_levels_and_targets_with_levels() {
        let sound =
            ["off", "error", "WARN", "info", "debug", "trace", "info,dovetail::scheduler=debug", "h2=warn, info"];
        for text in sound {
            assert!(filter(text).is_ok(), "{text}");
        }
        for text in
            ["verbose", "inof", "", "info,", "dovetail::scheduler", "h2=loud", "h2=", "=info", "info;debug", "3"]
        {
            let error = filter(text).unwrap_err();
            assert!(matches!(error, Error::Invalid(_)), "{text}: {error:?}");
            let expected = [&format!("--log {text:?}: "), "write off, error, warn, info, debug or trace", "=debug"];
            assert!(expected.iter().all(|words| error.message().contains(words)), "{text}: {error}");
        }
    }
}
