//! `dovetail device-process`: the process of one device, which the server starts by itself.

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
    engine::run_process()
}
