//! Logs of the server: to stderr, as text for people or JSON for machines.

use std::io::IsTerminal;

use tracing_subscriber::EnvFilter;

use crate::service::settings::Settings;
use crate::{Error, Result};

/// Starts logging as the settings say. Once per process; a second call changes nothing.
///
/// # Errors
/// [`Error::Invalid`] when the filter cannot be read.
pub fn start(settings: &Settings) -> Result<()> {
    let filter = EnvFilter::try_new(&settings.log).map_err(|error| {
        Error::Invalid(format!("log filter {:?}: {error}; write a level, or target=level pairs", settings.log))
    })?;
    let logs = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    let started = match settings.log_format.as_str() {
        "json" => logs.json().flatten_event(true).with_current_span(false).try_init(),
        _ => logs.with_ansi(std::io::stderr().is_terminal()).try_init(),
    };
    // Only tests, which share a process, get here twice.
    let _ = started;
    Ok(())
}
