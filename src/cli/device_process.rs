//! `dovetail device-process`: the child process of one device. The server starts it.

use tokio::signal::unix::{SignalKind, signal};

use super::logging;
use crate::{Result, engine};

/// Arguments of `dovetail device-process`; all else comes from the server, over standard input.
#[derive(Debug, clap::Args)]
pub struct DeviceProcessArgs {
    /// Log filter, as for the server
    #[arg(long, default_value = "info")]
    log: String,

    /// Format of the log, as for the server
    #[arg(long, default_value = "text")]
    log_format: String,
}

/// Runs joins until the server closes the connection.
///
/// # Errors
/// The errors of [`engine::run_process`].
pub fn run(args: &DeviceProcessArgs) -> Result<()> {
    logging::start_as(&args.log, &args.log_format)?;
    // A signal to the server may reach all its processes. Ignore it here: this process ends
    // when the server no longer needs it, after running jobs have finished.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build()?;
    let _entered = runtime.enter();
    logging::outlive_full_files()?;
    let _deaf = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?, signal(SignalKind::hangup())?);
    engine::run_process()
}
