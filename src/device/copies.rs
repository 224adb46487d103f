//! Copies that a device makes only to measure links, at the same time as others.

use std::ops::Range;
use std::time::{Duration, Instant};

use arrow::buffer::Buffer;
use serde::{Deserialize, Serialize};

use super::{CancelFlag, Device, DeviceBuffer, DeviceId, Stream, peers};
use crate::memory::{Arena, Budget};
use crate::{Error, Result};

/// Time during which copies count. Devices that start together mostly copy together.
const MEASURED: Duration = Duration::from_millis(20);

/// Time after which a copy is large enough that a call costs little beside it.
const LONG_COPY: Duration = Duration::from_millis(1);

/// Bytes of the first copy, which a slow link ends in time, and of the largest.
const FIRST_BYTES: usize = 64 << 10;
const LARGEST_BYTES: usize = 32 << 20;

/// Share of the free device memory that copies may take.
const MEMORY_SHARE: u64 = 8;

/// Copies between a device and its surroundings, in two directions at once.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub enum Copies {
    /// From host memory to the device, and back.
    HostMemory,
    /// Into the window of the peer `to`, and out of the window that the peer `from` writes to, as
    /// an exchange copies.
    Peers { to: DeviceId, from: DeviceId },
}

impl Copies {
    /// Makes these copies for a short time. Returns the bytes per second: of both directions
    /// together for host memory, of the slower direction for peers.
    ///
    /// # Errors
    /// [`Exhausted`](Error::Exhausted) for a device with too little memory. The errors of every
    /// call of [`Device`] and [`PeerOps`](super::PeerOps).
    pub fn bytes_per_second(self, device: &dyn Device) -> Result<f64> {
        let free = usize::try_from(device.memory().free_bytes() / MEMORY_SHARE).unwrap_or(usize::MAX);
        let window = peers(device).map_or(usize::MAX, |peers| peers.window_bytes());
        let most = match self {
            Self::HostMemory => LARGEST_BYTES.min(free),
            Self::Peers { .. } => LARGEST_BYTES.min(free).min(window),
        };
        if most < FIRST_BYTES {
            return Err(Error::Exhausted(format!("{} has too little memory to measure its links", device.id())));
        }
        let stream = device.stream(CancelFlag::new())?;
        let copied_in = |bytes: usize| -> Result<(DeviceBuffer, Duration)> {
            let start = Instant::now();
            let zeros = device.copy_in(&[Buffer::from_vec(vec![0_u8; bytes])], &stream)?;
            device.synchronize(&stream)?;
            Ok((zeros, start.elapsed()))
        };
        // A slow link brings fewer bytes in.
        let (_, seconds) = copied_in(FIRST_BYTES)?;
        let most = if seconds < LONG_COPY { most } else { FIRST_BYTES };
        let (zeros, _) = copied_in(most)?;
        match self {
            Self::HostMemory => {
                let arena = Arena::new(Budget::new("calibration memory", "--host-memory", 4 * LARGEST_BYTES as u64));
                arena.pin_by(device.pin());
                let mut piece = arena.allocate(most, "calibration")?;
                piece.fill(0);
                let host = piece.freeze();
                let copy_in = |bytes: Range<usize>, stream: &Stream| {
                    let parts =
                        [host.slice_with_length(0, bytes.len() / 2), host.slice_with_length(0, bytes.len() / 2)];
                    device.copy_in(&parts, stream).map(drop)
                };
                let copy_out = |bytes: Range<usize>, stream: &Stream| {
                    device.copy_out(&zeros, bytes.len(), &arena, stream).map(drop)
                };
                both(device, most, &copy_in, &copy_out).map(|(one, other)| one + other)
            }
            Self::Peers { to, from } => {
                let own = peers(device)?;
                let push = |bytes: Range<usize>, stream: &Stream| own.push(to, 0, &zeros, bytes, stream);
                let take = |bytes: Range<usize>, stream: &Stream| own.take(from, bytes, stream).map(drop);
                both(device, most, &push, &take).map(|(one, other)| one.min(other))
            }
        }
    }
}

/// Copies the first bytes of something, as many as the range has.
type Copy<'a> = &'a (dyn Fn(Range<usize>, &Stream) -> Result<()> + Sync);

/// Makes both copies again and again at the same time. Returns the bytes per second of each.
fn both(device: &dyn Device, most: usize, one: Copy<'_>, other: Copy<'_>) -> Result<(f64, f64)> {
    std::thread::scope(|scope| {
        let other = scope.spawn(|| again_and_again(device, most, other));
        let one = again_and_again(device, most, one);
        let other = other.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        Ok((one?, other?))
    })
}

/// Makes copies of up to `most` bytes, and returns the bytes per second of the large ones.
fn again_and_again(device: &dyn Device, most: usize, copy: Copy<'_>) -> Result<f64> {
    let stream = device.stream(CancelFlag::new())?;
    let timed = |bytes: usize| -> Result<Duration> {
        let start = Instant::now();
        copy(0..bytes, &stream)?;
        device.synchronize(&stream)?;
        Ok(start.elapsed())
    };
    let mut bytes = FIRST_BYTES;
    while timed(bytes)? < LONG_COPY && bytes < most {
        bytes = most.min(2 * bytes);
    }
    let (start, mut copied) = (Instant::now(), 0);
    while copied == 0 || start.elapsed() < MEASURED {
        timed(bytes)?;
        copied += bytes;
    }
    Ok(copied as f64 / start.elapsed().as_secs_f64())
}
