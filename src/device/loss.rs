//! What is to be done about a device that is lost, which depends on whose process this is.

use std::sync::atomic::{AtomicBool, Ordering};

/// Whether this process serves one device and nothing else.
static SERVES_ONE_DEVICE: AtomicBool = AtomicBool::new(false);

/// Says that this process is that of one device, which the server ends when the device is lost.
pub fn set_process_of_one_device() {
    SERVES_ONE_DEVICE.store(true, Ordering::Relaxed);
}

/// What follows for the device and for those who joined on it. `all`: no other device of its kind works in this process any more.
pub(super) fn remedy(all: bool) -> &'static str {
    match (SERVES_ONE_DEVICE.load(Ordering::Relaxed), all) {
        (true, _) => "its process is ended; joins on other devices go on",
        (false, true) => "CUDA does nothing more in this process, on any GPU; restart the server",
        (false, false) => "joins run on the other devices, and restarting the server brings it back",
    }
}
