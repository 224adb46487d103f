//! The least time that a join can take: its bytes, over the rates of what they must cross.

use std::time::Instant;

use super::engine::Measured;
use dovetail::device::{CancelFlag, Device, DeviceKind};
use dovetail::memory::{Arena, Budget};
use dovetail::{Context, Result};

/// Bytes that are copied at a time where memory allows: far beyond all caches, and so many that calls cost nothing beside them.
const BYTES: u64 = 1 << 30;

/// However little memory there is.
const BYTES_MIN: u64 = 64 << 10;

/// How often each is measured. The first time finds memory that was never touched, and the best counts.
const ROUNDS: usize = 4;

/// Copies that are queued at once on a GPU, which is through with one in half a millisecond.
const GPU_COPIES: usize = 8;

/// What bytes cross, each at its best. The planner's rates are those of primitives with as many rows as joins have in a chunk,
/// which a floor must not be reckoned by: the floor would be too high, and all that is compared with it look too good.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Boundaries {
    /// Bytes per second of the device's memory, read and written, when a large buffer is copied there.
    pub memory: f64,
    /// The link to a device with memory of its own.
    pub link: Option<LinkRates>,
}

/// Bytes per second that cross a link.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LinkRates {
    /// To the device, while nothing goes the other way.
    pub into: f64,
    /// From the device, while nothing goes the other way.
    pub out: f64,
    /// Both directions at the same time, together.
    pub both: f64,
}

impl Boundaries {
    /// Measures a device, with at most a part of so much host memory.
    ///
    /// # Errors
    /// What the device answers, above all [`Error::Exhausted`](dovetail::Error::Exhausted) when it has hardly any memory.
    pub fn measure(device: &dyn Device, host_memory: u64) -> Result<Self> {
        Self::measure_with(device, host_memory).context(|| format!("measuring how fast {} copies", device.id()))
    }

    fn measure_with(device: &dyn Device, host_memory: u64) -> Result<Self> {
        const PURPOSE: &str = "measuring copies";
        // Original and copy are on the device, what comes in and what goes out in host memory.
        let bytes = BYTES.min(device.memory().free_bytes() / 3).min(host_memory / 4).max(BYTES_MIN);
        let len = usize::try_from(bytes).unwrap_or(usize::MAX);
        let arena = Arena::new(Budget::new("host memory", "--host-memory", host_memory));
        arena.pin_by(device.pin());
        let (stream, other) = (device.stream(CancelFlag::new())?, device.stream(CancelFlag::new())?);
        let mut piece = arena.allocate(len, PURPOSE)?;
        // Pages that nobody has written to are one and the same.
        piece.fill(1);
        let host = [piece.freeze()];
        let original = device.copy_in(&host, &stream)?;
        device.synchronize(&stream)?;

        let copies = if device.id().kind == DeviceKind::Cuda { GPU_COPIES } else { 1 };
        let seconds = best_of_rounds(|| {
            let start = Instant::now();
            for _ in 0..copies {
                // The next one takes its memory.
                drop(device.copy(&original, &stream)?);
            }
            device.synchronize(&stream)?;
            Ok(start.elapsed().as_secs_f64())
        })?;
        let memory = 2.0 * copies as f64 * bytes as f64 / seconds;

        // Bytes per second in those directions at the same time.
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

/// The least time that a join can take, by bytes and measured rates.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Floor {
    /// In which the device's memory gives the tables and takes the result, each once.
    pub memory_seconds: f64,
    /// In which they cross the link to a device that has memory of its own, if neither direction slows the other down.
    pub link_seconds: Option<f64>,
    /// The same where both directions together carry no more than they were seen to.
    pub link_both_seconds: Option<f64>,
}

impl Floor {
    /// Of what was measured. Columns that the device had kept cross no link.
    pub fn of(boundaries: &Boundaries, measured: &Measured) -> Self {
        let (bytes_in, bytes_out) = (measured.bytes_in as f64, measured.bytes_out as f64);
        let spared: u64 = measured.phases.iter().map(|phase| phase.kept_bytes).sum();
        let crossing = measured.bytes_in.saturating_sub(spared) as f64;
        let link = boundaries.link;
        Self {
            memory_seconds: (bytes_in + bytes_out) / boundaries.memory,
            link_seconds: link.map(|link| (crossing / link.into).max(bytes_out / link.out)),
            link_both_seconds: link.map(|link| (crossing + bytes_out) / link.both),
        }
    }

    /// Tables and results live in host memory: the link counts where there is one.
    pub fn seconds(self) -> f64 {
        let links = [self.link_seconds, self.link_both_seconds];
        links.into_iter().flatten().fold(self.memory_seconds, f64::max)
    }
}

#[cfg(test)]
mod tests {
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
    fn both_directions_of_a_link_bound_what_neither_does_alone() {
        let measured = Measured { bytes_in: 1000, bytes_out: 1000, ..Measured::default() };
        let link = Some(LinkRates { into: 10.0, out: 10.0, both: 16.0 });
        let floor = Floor::of(&Boundaries { memory: 100.0, link }, &measured);
        assert_eq!((floor.link_seconds, floor.link_both_seconds), (Some(100.0), Some(125.0)));
        assert_eq!(floor.seconds(), 125.0);
    }

    #[test]
    fn what_the_device_has_kept_crosses_no_link() {
        let phase =
            |kept_bytes| PhaseRecord { name: "copy in".into(), seconds: 0.0, bytes: 0, kept_bytes, in_place_bytes: 0 };
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
