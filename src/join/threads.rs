//! Threads that a join's work runs on: the calling thread, or the device's own CPU threads.

use crate::Result;
use crate::columns::KeyLayout;
use crate::device::Device;

/// Runs `work`, all work of one stream, on the device's CPU threads if primitives run there. Each
/// switch to these threads takes tens of microseconds. A GPU's work is queued from the calling
/// thread, and work with parallel parts goes to the CPU threads on its own.
pub(super) fn run_on_device_pool<T: Send>(device: &dyn Device, work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    if device.tuning().streams > 1 { work() } else { on_device_pool(device, work) }
}

/// Runs `work` on the device's own CPU threads. Either only one stream at a time may do such work,
/// or `work` has parallel parts and waits for no other stream.
pub(super) fn on_device_pool<T: Send>(device: &dyn Device, work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    let (mut work, mut outcome) = (Some(work), None);
    device.install(&mut || outcome = work.take().map(|work| work()));
    outcome.expect("a device runs the work that it is given")
}

/// Compares keys by their values, on the device's CPU threads if the host has the values.
pub(super) fn compare_where_values_are<T: Send>(
    layout: &KeyLayout,
    device: &dyn Device,
    compare: impl FnOnce() -> Result<T> + Send,
) -> Result<T> {
    if layout.is_hashed_by_device() { compare() } else { on_device_pool(device, compare) }
}
