//! `dovetail device-process`: the process of one device, which the server starts by itself.

use tokio::signal::unix::{SignalKind, signal};

use super::logging;
use crate::{Result, engine};

/// Arguments of `dovetail device-process`; all else comes from the server, over standard input.
#[derive(Debug, clap::Args)]
pub struct DeviceProcessArgs {
    /// What is logged, as for the server
    #[arg(long, default_value = "info")]
    log: String,

    /// Form of the log, as for the server
    #[arg(long, default_value = "text")]
    log_format: String,
}

/// Runs joins until the server hangs up.
///
/// # Errors
/// As [`engine::run_process`].
pub fn run(args: &DeviceProcessArgs) -> Result<()> {
    logging::start_as(&args.log, &args.log_format)?;
    // Who stops the server may tell all of its processes. This one ends when the server has no use for it any more: jobs that run
    // come to their end first.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build()?;
    let _entered = runtime.enter();
    logging::outlive_full_files()?;
    let _deaf = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    engine::run_process()
}
