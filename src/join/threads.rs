//! Threads that a join's work runs on: the calling thread, or the device's own CPU threads.

use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;

use crate::columns::KeyLayout;
use crate::device::Device;
use crate::{Error, Result, panics};

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

/// Runs `work` on `threads` threads at once, until it is done on all, or has failed on one. The
/// flag is set once it has failed. `stop` gets the error, because other threads may wait for rows.
///
/// # Errors
/// The first error of any thread. A panic of `work` is an error, too.
pub(super) fn on_stream_threads(
    device: &dyn Device,
    threads: usize,
    work: &(dyn Fn(&AtomicBool) -> Result<()> + Sync),
    stop: &(dyn Fn(&Error) + Sync),
) -> Result<()> {
    let (failed, failure) = (AtomicBool::new(false), Mutex::new(None));
    // Do not run this on the device's CPU threads: a thread that waits for its parts takes up
    // other work. That work may be another stream's, and wait for something that this stream
    // holds.
    device.on_stream_threads(threads, &|| {
        let said = |panic: &str| format!("a stream of the probe panicked: {panic}");
        if let Err(error) = panics::as_error(said, || work(&failed)) {
            failed.store(true, Ordering::Relaxed);
            stop(&error);
            failure.lock().get_or_insert(error);
        }
    })?;
    failure.into_inner().map_or(Ok(()), Err)
}
