//! Deliberate failures, for tests of what becomes of jobs and of the server when a device fails.
//!
//! `DOVETAIL_TEST_FAULT` names a file. Whenever that file exists, the next call that its text applies to removes it and fails
//! in that way: `launch-error`, `copy-error`, `out-of-memory` (as when the system has not what the budget promises), or
//! `lost`, after which the device answers every call with its loss. The text may begin with the device that it is for:
//! `host:1 lost`. Without the variable nothing is looked at. (A GPU's own failures are in `cuda/fault.rs`.)

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::device::DeviceId;
use crate::{Error, Result};

/// The failures of one device. Clones, which are that device for several jobs, are lost together.
#[derive(Clone, Debug)]
pub(super) struct Faults {
    device: DeviceId,
    /// The file that asks for failures; `None`: nothing fails.
    trigger: Option<Arc<PathBuf>>,
    lost: Arc<AtomicBool>,
}

impl Faults {
    /// As the environment says.
    pub(super) fn of(device: DeviceId) -> Self {
        Self::at(device, std::env::var_os("DOVETAIL_TEST_FAULT").map(PathBuf::from))
    }

    fn at(device: DeviceId, trigger: Option<PathBuf>) -> Self {
        Self { device, trigger: trigger.map(Arc::new), lost: Arc::default() }
    }

    /// The failures of any primitive.
    pub(super) fn before_primitive(&self) -> Result<()> {
        if self.trigger.is_none() {
            return Ok(());
        }
        let device = self.device;
        if self.is_due("lost") {
            self.lost.store(true, Ordering::Relaxed);
        }
        if self.lost.load(Ordering::Relaxed) {
            return Err(Error::Unavailable(format!(
                "device {device} was lost by a deliberate failure; joins run on the other devices, and restarting the server \
                 brings it back"
            )));
        }
        if self.is_due("launch-error") {
            return Err(Error::Internal(format!("starting a primitive on device {device}: a deliberate failure")));
        }
        if self.is_due("out-of-memory") {
            return Err(Error::Exhausted(format!(
                "the system refused memory to device {device}: a deliberate failure"
            )));
        }
        Ok(())
    }

    /// The failures of a copy.
    pub(super) fn before_copy(&self) -> Result<()> {
        match self.is_due("copy-error") {
            true => Err(Error::Internal(format!("a copy to or from device {}: a deliberate failure", self.device))),
            false => Ok(()),
        }
    }

    /// Whether this call is to fail in that way. Of several calls at a time, the one that removes the file.
    fn is_due(&self, fault: &str) -> bool {
        let Some(trigger) = self.trigger.as_deref() else { return false };
        let Ok(text) = std::fs::read_to_string(trigger) else { return false };
        let is_for_this = match text.trim().split_once(' ') {
            Some((device, asked)) => device == self.device.to_string() && asked == fault,
            None => text.trim() == fault,
        };
        is_for_this && std::fs::remove_file(trigger).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::DeviceKind;

    #[test]
    fn a_file_makes_one_call_of_the_device_that_it_names_fail() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("fault");
        let [one, other] =
            [0, 1].map(|index| Faults::at(DeviceId { kind: DeviceKind::Host, index }, Some(file.clone())));
        let ask = |text: &str| std::fs::write(&file, text).unwrap();
        assert!(one.before_primitive().is_ok() && one.before_copy().is_ok());
        ask("launch-error\n");
        assert!(one.before_copy().is_ok(), "it is no failure of a copy");
        assert!(matches!(one.before_primitive(), Err(Error::Internal(_))));
        assert!(one.before_primitive().is_ok(), "one call fails");
        ask("host:1 out-of-memory");
        assert!(one.before_primitive().is_ok());
        assert!(matches!(other.before_primitive(), Err(Error::Exhausted(_))));
        ask("copy-error");
        assert!(matches!(other.before_copy(), Err(Error::Internal(_))));
        // What is lost stays so, for every job, and only it.
        ask("host:0 lost");
        let for_job = one.clone();
        assert!(matches!(for_job.before_primitive(), Err(Error::Unavailable(text)) if text.contains("host:0")));
        assert!(matches!(one.before_primitive(), Err(Error::Unavailable(_))));
        assert!(!file.exists() && other.before_primitive().is_ok());
    }
}
