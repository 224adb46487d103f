//! Deliberate failures of a host device. `device/fault.rs` says how a test asks for one.
//!
//! * `launch-error`: of any primitive.
//! * `copy-error`: of any copy.
//! * `copy-out-error`: of a copy to host memory.
//! * `out-of-memory`: as when the system lacks memory that the budget promises.
//! * `lost-push`: bytes that are written to a peer do not arrive.
//! * `transient`: the next attempt may succeed.
//! * `lost`: every later call on the device fails.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::device::DeviceId;
use crate::device::fault::Trigger;
use crate::device::loss::remedy;
use crate::{Error, Result};

/// Failures of one device. Each job's view of the device has a clone. All clones are lost together.
#[derive(Clone, Debug)]
pub(super) struct Faults {
    device: DeviceId,
    trigger: Trigger,
    lost: Arc<AtomicBool>,
}

impl Faults {
    /// Returns the failures that the trigger asks for.
    pub(super) fn of(device: DeviceId, trigger: Trigger) -> Self {
        Self { device, trigger, lost: Arc::default() }
    }

    /// Fails if a failure of any primitive is due.
    pub(super) fn before_primitive(&self) -> Result<()> {
        let device = self.device;
        if self.trigger.is_due("lost") {
            self.lost.store(true, Ordering::Relaxed);
        }
        self.check()?;
        if self.trigger.is_due("transient") {
            return Err(Error::Unavailable(format!(
                "starting a primitive on device {device} failed, and the device still answers; try again"
            )));
        }
        if self.trigger.is_due("launch-error") {
            return Err(Error::Internal(format!("starting a primitive on device {device}: a deliberate failure")));
        }
        if self.trigger.is_due("out-of-memory") {
            return Err(Error::Exhausted(format!(
                "the system refused memory to device {device}: a deliberate failure"
            )));
        }
        Ok(())
    }

    /// Fails once the device is lost.
    pub(super) fn check(&self) -> Result<()> {
        match self.lost.load(Ordering::Relaxed) {
            true => {
                let remedy = remedy(false);
                Err(Error::Unavailable(format!("device {} was lost by a deliberate failure; {remedy}", self.device)))
            }
            false => Ok(()),
        }
    }

    /// Fails if a failure of a copy is due.
    pub(super) fn before_copy(&self) -> Result<()> {
        match self.trigger.is_due("copy-error") {
            true => Err(Error::Internal(format!("a copy to or from device {}: a deliberate failure", self.device))),
            false => Ok(()),
        }
    }

    /// True if the bytes of a push should not arrive.
    pub(super) fn loses_push(&self) -> bool {
        self.trigger.is_due("lost-push")
    }

    /// Fails if a failure of a finished copy to host memory is due. The copy's result exists then,
    /// and must be freed.
    pub(super) fn after_copy_out(&self) -> Result<()> {
        match self.trigger.is_due("copy-out-error") {
            true => Err(Error::Internal(format!("a copy from device {}: a deliberate failure", self.device))),
            false => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::DeviceKind;

    #[test]
    fn a_fault_file_fails_one_call_of_the_device_that_it_names() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("fault");
        let [one, other] = [0, 1].map(|index| {
            let device = DeviceId { kind: DeviceKind::Host, index };
            Faults::of(device, Trigger::at(device, Some(file.clone())))
        });
        let ask = |text: &str| std::fs::write(&file, text).unwrap();
        assert!(one.before_primitive().is_ok() && one.before_copy().is_ok());
        ask("launch-error\n");
        assert!(one.before_copy().is_ok(), "it is not a failure of a copy");
        assert!(matches!(one.before_primitive(), Err(Error::Internal(_))));
        assert!(one.before_primitive().is_ok(), "one call fails");
        ask("host:1 out-of-memory");
        assert!(one.before_primitive().is_ok());
        assert!(matches!(other.before_primitive(), Err(Error::Exhausted(_))));
        ask("copy-error");
        assert!(matches!(other.before_copy(), Err(Error::Internal(_))));
        ask("host:0 copy-out-error");
        assert!(one.before_copy().is_ok(), "it is a failure of copies out alone");
        assert!(other.after_copy_out().is_ok(), "it is another device's");
        assert!(matches!(one.after_copy_out(), Err(Error::Internal(text)) if text.contains("host:0")));
        assert!(one.after_copy_out().is_ok(), "one call fails");
        ask("transient");
        assert!(matches!(one.before_primitive(), Err(Error::Unavailable(_))));
        assert!(one.check().is_ok() && one.before_primitive().is_ok(), "it still answers");
        // A lost device stays lost, for every job, and other devices do not.
        ask("host:0 lost");
        let for_job = one.clone();
        assert!(matches!(for_job.before_primitive(), Err(Error::Unavailable(text)) if text.contains("host:0")));
        assert!(matches!(one.before_primitive(), Err(Error::Unavailable(_))));
        assert!(!file.exists() && other.before_primitive().is_ok());
    }
}
