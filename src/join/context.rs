//! Context of a call: the device, streams and memory that the steps of a join work with.

use super::Monitor;
use crate::Result;
use crate::device::{CancelFlag, Device, Stream};
use crate::memory::Arena;

/// Everything that the steps of a join need, except rows and decisions.
#[derive(Clone, Copy)]
pub(super) struct JoinContext<'a> {
    pub(super) device: &'a dyn Device,
    pub(super) stream: &'a Stream,
    /// Stream that copies in columns that are not needed yet, in parallel with `stream`. It may be
    /// the same stream.
    pub(super) copies: &'a Stream,
    pub(super) arena: &'a Arena,
    pub(super) monitor: &'a Monitor,
}

/// Streams of one call.
pub(super) struct CallStreams {
    main: Stream,
    copies: Stream,
}

impl CallStreams {
    /// Creates the streams of a call that `monitor` may stop. Copies get a stream of their own if
    /// the device overlaps streams.
    ///
    /// # Errors
    /// Errors of the device.
    pub(super) fn new(device: &dyn Device, monitor: &Monitor) -> Result<Self> {
        Self::stopped_by(monitor.cancel(), device)
    }

    /// Creates the streams of work that `cancel` may stop.
    ///
    /// # Errors
    /// Errors of the device.
    pub(super) fn stopped_by(cancel: &CancelFlag, device: &dyn Device) -> Result<Self> {
        let main = device.stream(cancel.clone())?;
        let copies = if device.tuning().streams > 1 { device.stream(cancel.clone())? } else { main.clone() };
        Ok(Self { main, copies })
    }

    pub(super) fn context<'a>(
        &'a self,
        device: &'a dyn Device,
        arena: &'a Arena,
        monitor: &'a Monitor,
    ) -> JoinContext<'a> {
        JoinContext { device, stream: &self.main, copies: &self.copies, arena, monitor }
    }
}
