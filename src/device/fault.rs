//! Trigger of deliberate failures, for tests of jobs and of the server when a device fails.

use std::path::PathBuf;
use std::sync::Arc;

use super::{DeviceId, TestOptions};

/// Request for failures of one device.
#[derive(Clone, Debug)]
pub(super) struct Trigger {
    device: DeviceId,
    /// The file with the request. `None`: no call fails.
    file: Option<Arc<PathBuf>>,
}

impl Trigger {
    /// Takes requests from the file that the [options](TestOptions) name.
    pub(super) fn of(device: DeviceId) -> Self {
        Self::at(device, TestOptions::get().fault_file)
    }

    /// Takes requests from the given file.
    pub(super) fn at(device: DeviceId, file: Option<PathBuf>) -> Self {
        Self { device, file: file.map(Arc::new) }
    }

    /// True if this call should fail in the given way. Among concurrent calls, only the call that
    /// removes the file fails.
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
