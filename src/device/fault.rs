//! Deliberate failures, for tests of what becomes of jobs and of the server when a device fails: when one is due.
//!
//! `DOVETAIL_TEST_FAULT` names a file. Whenever that file exists, the next call that its text applies to removes it and fails
//! in that way. The text may begin with the device that it is for: `host:1 lost`. Without the variable nothing is looked at.
//! Which ways there are, and what each does, is said in `host/fault.rs` and `cuda/fault.rs`.

use std::path::PathBuf;
use std::sync::Arc;

use super::DeviceId;

/// What asks a device for failures.
#[derive(Clone, Debug)]
pub(super) struct Trigger {
    device: DeviceId,
    /// The file that asks; `None`: nothing fails.
    file: Option<Arc<PathBuf>>,
}

impl Trigger {
    /// As the environment says.
    pub(super) fn of(device: DeviceId) -> Self {
        Self::at(device, std::env::var_os("DOVETAIL_TEST_FAULT").map(PathBuf::from))
    }

    /// By that file.
    pub(super) fn at(device: DeviceId, file: Option<PathBuf>) -> Self {
        Self { device, file: file.map(Arc::new) }
    }

    /// Whether this call is to fail in that way. Of several calls at a time, the one that removes the file.
    pub(super) fn is_due(&self, fault: &str) -> bool {
        let Some(file) = self.file.as_deref() else { return false };
        let Ok(text) = std::fs::read_to_string(file) else { return false };
        let is_for_this = match text.trim().split_once(' ') {
            Some((device, asked)) => device == self.device.to_string() && asked == fault,
            None => text.trim() == fault,
        };
        is_for_this && std::fs::remove_file(file).is_ok()
    }
}
