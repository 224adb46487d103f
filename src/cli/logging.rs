//! Logs of the server: to stderr, as text for people or JSON for machines.

use std::io::IsTerminal;

use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::LevelFilter;

use crate::service::settings::Settings;
use crate::{Error, Result, panics};

/// Starts logging as the settings say.
///
/// # Errors
/// As [`filter`].
pub fn start(settings: &Settings) -> Result<()> {
    start_as(&settings.log, &settings.log_format)
}

/// Starts logging what `what` lets through, as text or JSON. Once per process; a second call changes nothing.
///
/// # Errors
/// As [`filter`].
pub fn start_as(what: &str, format: &str) -> Result<()> {
    let logs = tracing_subscriber::fmt().with_env_filter(filter(what)?).with_writer(std::io::stderr);
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

/// What of the log is written: a level, or pairs of target and level, with commas between them. `EnvFilter` takes any other
/// word for a target, of which everything is logged, and of all others nothing: a level that is misspelt would turn the log
/// off.
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
        // The library takes numbers too, and nothing at all for everything.
        if level.is_empty() || level.parse::<u8>().is_ok() || level.parse::<LevelFilter>().is_err() {
            return Err(refuse(format!("{level:?} is no level")));
        }
        if part.contains('=') && target.is_empty() {
            return Err(refuse(format!("{part:?} has no target")));
        }
    }
    EnvFilter::try_new(text).map_err(|error| refuse(error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

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
