//! `dovetail arena-tmpfs`: mounts a tmpfs for the host memory of a server. The server starts it.

use crate::{Result, engine};

/// Arguments of `dovetail arena-tmpfs`; the server waits for the answer at standard input.
#[derive(Debug, clap::Args)]
pub struct ArenaTmpfsArgs {}

/// Mounts the tmpfs and hands it to the server.
///
/// # Errors
/// The errors of [`engine::run_tmpfs_process`].
pub fn run(_args: &ArenaTmpfsArgs) -> Result<()> {
    engine::run_tmpfs_process()
}
