//! Copies that cross the link one after the other, whatever streams they are on. At once they would share it, and all arrive late.

use parking_lot::Mutex;

use crate::Result;
use crate::device::{Device, Event, Stream};

/// When what was queued last will be there.
#[derive(Debug, Default)]
pub(super) struct Turns(Mutex<Option<Event>>);

impl Turns {
    /// Queues copies on a stream, behind those that were queued here before, and says when they are there. Nothing but copies: others wait
    /// until they are queued, and a thread of a device that waits for its parts takes up other work, which may be that of one who waits
    /// here.
    ///
    /// # Errors
    /// The device's, and those of `queue`.
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

    /// When the last copies that were queued are there.
    pub(super) fn last(&self) -> Option<Event> {
        self.0.lock().clone()
    }
}
