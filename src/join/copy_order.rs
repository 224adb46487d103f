//! Copies that cross the link one after the other, whatever their streams. In parallel they would
//! share the link, and all arrive late.

use parking_lot::Mutex;

use crate::Result;
use crate::device::{Device, Event, Stream};

/// Event of the last queued copies.
#[derive(Debug, Default)]
pub(super) struct CopyOrder(Mutex<Option<Event>>);

impl CopyOrder {
    /// Queues copies on a stream, to run after all copies queued here earlier. Returns an event for
    /// the arrival of the new copies. `queue` must queue only copies, because other callers wait
    /// until it returns. Parallel work in it could deadlock: a device's thread that waits for its
    /// parts takes up other work, perhaps of a caller that waits here.
    ///
    /// # Errors
    /// Errors of the device and of `queue`.
    pub(super) fn take<T>(
        &self,
        device: &dyn Device,
        stream: &Stream,
        queue: impl FnOnce() -> Result<T>,
    ) -> Result<(T, Event)> {
        let mut last = self.0.lock();
        if let Some(last) = &*last {
            device.wait_event(last, stream)?;
        }
        let queued = queue()?;
        let there = device.record_event(stream)?;
        *last = Some(there.clone());
        Ok((queued, there))
    }

    /// Returns the event of the last queued copies.
    pub(super) fn last(&self) -> Option<Event> {
        self.0.lock().clone()
    }
}
