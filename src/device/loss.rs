//! Remedies after the loss of a device. They depend on the process in which it is lost.

use std::sync::atomic::{AtomicBool, Ordering};

/// True if this process serves one device and nothing else.
static SERVES_ONE_DEVICE: AtomicBool = AtomicBool::new(false);

/// Declares that this process serves one device. The server ends the process when the device is
/// lost.
pub fn set_process_of_one_device() {
    SERVES_ONE_DEVICE.store(true, Ordering::Relaxed);
}

/// Returns the consequences for the device and for joins on it. `all`: no other device of its kind
/// works in this process any more.
pub(super) fn remedy(all: bool) -> &'static str {
    match (SERVES_ONE_DEVICE.load(Ordering::Relaxed), all) {
        (true, _) => "its process is ended; joins on other devices go on",
        (false, true) => "CUDA no longer works in this process, on any GPU; restart the server",
        (false, false) => "joins run on the other devices, and restarting the server brings it back",
    }
}
