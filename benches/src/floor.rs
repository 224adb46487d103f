//! The minimum time of a join: its bytes, divided by the rates of memory and link.

use std::time::Instant;

use super::engine::Measured;
use dovetail::device::{CancelFlag, Device, DeviceKind};
use dovetail::memory::{Arena, Budget};
use dovetail::{Context, Result};

/// Bytes per copy, if memory allows: far beyond all caches, and enough that call overhead is
/// negligible.
const BYTES: u64 = 1 << 30;

/// Minimum bytes per copy, however little memory there is.
const BYTES_MIN: u64 = 64 << 10;

/// Rounds per measurement. The best round counts, because the first round touches fresh memory.
const ROUNDS: usize = 4;

/// Copies queued at once on a GPU, because one copy takes only half a millisecond.
const GPU_COPIES: usize = 8;

/// Peak rates of memory and link. The planner's rates are unsuitable for a floor, because they are
/// measured with primitives on chunks of a join's size. These lower rates would make the floor too
/// high, and results would look too good.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Boundaries {
    /// Bytes per second of the device's memory, reads plus writes, during a copy of a large buffer.
    pub memory: f64,
    /// Rates of the link to a device with its own memory.
    pub link: Option<LinkRates>,
}

/// Bytes per second that cross a link.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LinkRates {
    /// Rate to the device, with no traffic in the other direction.
    pub into: f64,
    /// Rate from the device, with no traffic in the other direction.
    pub out: f64,
    /// Total rate of both directions at the same time.
    pub both: f64,
}

impl Boundaries {
    /// Measures a device, with part of the given host memory.
    ///
    /// # Errors
    /// Errors of the device, mainly [`Error::Exhausted`](dovetail::Error::Exhausted) when it has
    /// hardly any memory.
    pub fn measure(device: &dyn Device, host_memory: u64) -> Result<Self> {
        Self::measure_with(device, host_memory).context(|| format!("measuring the copy rate of {}", device.id()))
    }

    fn measure_with(device: &dyn Device, host_memory: u64) -> Result<Self> {
        const PURPOSE: &str = "measuring copies";
        // Original and copy are on the device. The source and target of transfers are in host
        // memory.
        let bytes = BYTES.min(device.memory().free_bytes() / 3).min(host_memory / 4).max(BYTES_MIN);
        let len = usize::try_from(bytes).unwrap_or(usize::MAX);
        let arena = Arena::new(Budget::new("host memory", "--host-memory", host_memory));
        arena.pin_by(device.pin());
        let (stream, other) = (device.stream(CancelFlag::new())?, device.stream(CancelFlag::new())?);
        let mut piece = arena.allocate(len, PURPOSE)?;
        // Unwritten pages all map to the same zero page.
        piece.fill(1);
        let host = [piece.freeze()];
        let original = device.copy_in(&host, &stream)?;
        device.synchronize(&stream)?;

        let copies = if device.id().kind == DeviceKind::Cuda { GPU_COPIES } else { 1 };
        let seconds = best_of_rounds(|| {
            let start = Instant::now();
            for _ in 0..copies {
                // The next copy reuses the memory.
                drop(device.copy(&original, &stream)?);
            }
            device.synchronize(&stream)?;
            Ok(start.elapsed().as_secs_f64())
        })?;
        let memory = 2.0 * copies as f64 * bytes as f64 / seconds;

        // Total bytes per second of the given directions at the same time.
        let rate = |is_coming: bool, is_going: bool| -> Result<f64> {
            let seconds = best_of_rounds(|| {
                let start = Instant::now();
                let coming = is_coming.then(|| device.copy_in(&host, &stream)).transpose()?;
                let gone = is_going.then(|| device.copy_out(&original, len, &arena, &other)).transpose()?;
                device.synchronize(&stream)?;
                device.synchronize(&other)?;
                let seconds = start.elapsed().as_secs_f64();
                drop((coming, gone));
                Ok(seconds)
            })?;
            Ok((u8::from(is_coming) + u8::from(is_going)) as f64 * bytes as f64 / seconds)
        };
        let link = match device.id().kind {
            DeviceKind::Host => None,
            DeviceKind::Cuda => {
                Some(LinkRates { into: rate(true, false)?, out: rate(false, true)?, both: rate(true, true)? })
            }
        };
        Ok(Self { memory, link })
    }
}

fn best_of_rounds(seconds: impl Fn() -> Result<f64>) -> Result<f64> {
    let rounds = (0..ROUNDS).map(|_| seconds()).collect::<Result<Vec<f64>>>()?;
    Ok(rounds.into_iter().fold(f64::INFINITY, f64::min).max(1e-9))
}

/// The minimum time of a join, by bytes and measured rates.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Floor {
    /// Seconds to read the tables and write the result in device memory, once each.
    pub memory_seconds: f64,
    /// Seconds to cross the link to a device with its own memory, if neither direction slows the
    /// other.
    pub link_seconds: Option<f64>,
    /// Seconds to cross the link at the measured total rate of both directions.
    pub link_both_seconds: Option<f64>,
}

impl Floor {
    /// Computes the floor of a measurement. Columns kept on the device do not cross the link.
    pub fn of(boundaries: &Boundaries, measured: &Measured) -> Self {
        let (bytes_in, bytes_out) = (measured.bytes_in as f64, measured.bytes_out as f64);
        let saved: u64 = measured.phases.iter().map(|phase| phase.kept_bytes).sum();
        let crossing = measured.bytes_in.saturating_sub(saved) as f64;
        let link = boundaries.link;
        Self {
            memory_seconds: (bytes_in + bytes_out) / boundaries.memory,
            link_seconds: link.map(|link| (crossing / link.into).max(bytes_out / link.out)),
            link_both_seconds: link.map(|link| (crossing + bytes_out) / link.both),
        }
    }

    /// Returns the largest bound. The link counts if there is one, because tables and results are
    /// in host memory.
    pub fn seconds(self) -> f64 {
        let links = [self.link_seconds, self.link_both_seconds];
        links.into_iter().flatten().fold(self.memory_seconds, f64::max)
    }
}

#[cfg(test)]
mod tests {
    use dovetail::device::Phase;

    use super::*;
    use dovetail::device::host::HostDevice;
    use dovetail::join::PhaseRecord;

    #[test]
    fn a_gpu_is_bound_by_its_link_and_the_cpu_by_its_memory() {
        let measured = Measured { bytes_in: 1000, bytes_out: 1000, ..Measured::default() };
        let gpu = Boundaries { memory: 100.0, link: Some(LinkRates { into: 10.0, out: 5.0, both: 14.0 }) };
        let floor = Floor::of(&gpu, &measured);
        assert_eq!((floor.memory_seconds, floor.link_seconds, floor.seconds()), (20.0, Some(200.0), 200.0));
        assert_eq!(floor.link_both_seconds, Some(2000.0 / 14.0));
        let host = Floor::of(&Boundaries { link: None, ..gpu }, &measured);
        assert_eq!((host.link_seconds, host.link_both_seconds, host.seconds()), (None, None, 20.0));
    }

    #[test]
    fn the_combined_rate_of_a_link_bounds_copies_in_both_directions() {
        let measured = Measured { bytes_in: 1000, bytes_out: 1000, ..Measured::default() };
        let link = Some(LinkRates { into: 10.0, out: 10.0, both: 16.0 });
        let floor = Floor::of(&Boundaries { memory: 100.0, link }, &measured);
        assert_eq!((floor.link_seconds, floor.link_both_seconds), (Some(100.0), Some(125.0)));
        assert_eq!(floor.seconds(), 125.0);
    }

    #[test]
    fn columns_cached_on_the_device_cross_no_link() {
        let phase =
            |kept_bytes| PhaseRecord { phase: Phase::CopyIn, seconds: 0.0, bytes: 0, kept_bytes, in_place_bytes: 0 };
        let phases = vec![phase(700), phase(200)];
        let measured = Measured { bytes_in: 1000, bytes_out: 200, phases, ..Measured::default() };
        let link = Some(LinkRates { into: 10.0, out: 10.0, both: 15.0 });
        let floor = Floor::of(&Boundaries { memory: 100.0, link }, &measured);
        assert_eq!((floor.memory_seconds, floor.link_seconds), (12.0, Some(20.0)));
        assert_eq!(floor.link_both_seconds, Some(20.0));
    }

    #[test]
    fn a_device_with_little_memory_is_measured_too() {
        let memory = Budget::new("device memory", "--device-memory", 1 << 20);
        let device = HostDevice::new(0, 2, memory, None).unwrap();
        let boundaries = Boundaries::measure(&device, 64 << 20).unwrap();
        assert!(boundaries.memory > 0.0 && boundaries.link.is_none(), "{boundaries:?}");
        assert_eq!(device.memory().used_bytes(), 0);
    }
}
