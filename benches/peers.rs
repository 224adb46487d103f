//! Bytes that cross between several devices at once, and between each of them and host memory.
//!
//! ```sh
//! cargo bench -p dovetail-bench --bench peers -- --devices cuda:2
//! ```
//!
//! ```text
//!   in, out, both   host memory ─► device, back, and both ways: all devices at the same time
//!   push            device ─► windows of all others, as in an exchange: all devices at the same time
//! ```
//!
//! Prints a JSON line per measurement, with the bytes per second of each device: the median and the
//! best of the runs. A run lasts until the last device is done. `push` moves a number of bytes out
//! of each device, an equal part to each other device, in pieces as large as the slots of an
//! exchange. What arrives is checked after the clock has stopped. Host devices use host memory in
//! place, so that only `push` says something about them.

use std::sync::{Arc, Barrier};
use std::time::Instant;

use arrow::buffer::Buffer;
use clap::Parser;
use dovetail::device::{CancelFlag, Device, DeviceBuffer, DeviceId, DeviceKind, PeerOps, PeerWindow, open_device};
use dovetail::memory::{Arena, Budget, parse_bytes};
use dovetail::{Context, Error, Result};
use serde_json::json;

mod record;
use record::Recorder;

/// Slots of each sender in a window, as in an exchange.
const SLOTS: usize = 3;

#[derive(Parser)]
struct Options {
    /// Devices: cuda:N for the first N GPUs, or host:N
    #[arg(long, default_value = "host:2", value_parser = devices)]
    devices: Named,
    /// Bytes that each device pushes to the others
    #[arg(long, value_delimiter = ',', default_value = "64MiB,1GiB,4GiB", value_parser = size)]
    push: Vec<u64>,
    /// Bytes of each device's window. The server's are as large
    #[arg(long, default_value = "256MiB", value_parser = size)]
    window: u64,
    /// Bytes that cross the link of each device in one direction; 0 leaves out the links
    #[arg(long, default_value = "1GiB", value_parser = size)]
    link: u64,
    #[arg(long, default_value_t = 5)]
    runs: usize,
    /// Append the measurements to benches/results
    #[arg(long)]
    record: bool,
    /// Option that cargo passes; no effect
    #[arg(long, hide = true)]
    bench: bool,
}

fn size(text: &str) -> Result<u64, String> {
    parse_bytes(text).map_err(|error| error.to_string())
}

/// Devices of one kind.
#[derive(Clone)]
struct Named(Vec<DeviceId>);

fn devices(text: &str) -> Result<Named, String> {
    let parsed = text.split_once(':').and_then(|(kind, count)| {
        let kind = [DeviceKind::Cuda, DeviceKind::Host].into_iter().find(|of| of.to_string() == kind)?;
        Some((0..count.parse().ok()?).map(|index| DeviceId { kind, index }).collect::<Vec<_>>())
    });
    let devices = parsed.filter(|devices| !devices.is_empty());
    devices.map(Named).ok_or_else(|| format!("{text} names no devices; write cuda:N or host:N"))
}

/// Work of a run, prepared.
type Timed = Box<dyn FnMut() -> Result<()>>;

/// Devices that have mapped each other's windows.
struct Bench {
    devices: Vec<Arc<dyn Device>>,
    arena: Arena,
    window_bytes: usize,
}

impl Bench {
    fn open(options: &Options) -> Result<Self> {
        let count = options.devices.0.len();
        let threads = (std::thread::available_parallelism().map_or(1, usize::from) / count).max(1);
        let needed = 2 * options.window.max(options.link);
        let open = |id: &DeviceId| {
            let budget = |_| Budget::new(format!("memory of {id}"), "--window", needed + (256 << 20));
            open_device(*id, threads, budget).context(|| format!("opening {id}"))
        };
        let devices = options.devices.0.iter().map(open).collect::<Result<Vec<_>>>()?;
        // Each device copies from one piece, to another, and the windows are checked.
        let host_bytes = 2 * needed * count as u64 + (256 << 20);
        let arena = Arena::new(Budget::new("host memory", "the machine's memory", host_bytes));
        arena.pin_by(devices[0].pin());
        for device in &devices {
            peers(&**device)?.open_window(options.window as usize)?;
        }
        let window_bytes = peers(&*devices[0])?.window_bytes();
        for (device, peer) in devices.iter().flat_map(|device| devices.iter().map(move |peer| (device, peer))) {
            if device.id() != peer.id() {
                let file = peers(&**peer)?.window_file().expect("the window is open").try_clone_to_owned()?;
                peers(&**device)?.map_window(peer.id(), PeerWindow::Device { file, bytes: window_bytes })?;
            }
        }
        Ok(Self { devices, arena, window_bytes })
    }

    /// Runs `work` for each device and each of `lanes` numbers at the same time, `runs` times.
    /// Returns the seconds until the last is done, in ascending order.
    fn at_once(
        &self,
        runs: usize,
        lanes: usize,
        work: &(dyn Fn(usize, usize) -> Result<Timed> + Sync),
    ) -> Result<Vec<f64>> {
        let meeting = Barrier::new(self.devices.len() * lanes + 1);
        let mut seconds = std::thread::scope(|scope| {
            let lane = |device: usize, lane: usize| {
                let meeting = &meeting;
                scope.spawn(move || -> Result<()> {
                    let mut ready = work(device, lane);
                    // The first run touches fresh memory, and is not timed.
                    for _ in 0..=runs {
                        meeting.wait();
                        let ran = ready.as_mut().map_or(Ok(()), |work| work());
                        meeting.wait();
                        if let Err(error) = ran {
                            ready = Err(error);
                        }
                    }
                    ready.map(drop)
                })
            };
            let lanes: Vec<_> =
                (0..self.devices.len()).flat_map(|of| (0..lanes).map(move |number| (of, number))).collect();
            let spawned: Vec<_> = lanes.into_iter().map(|(of, number)| lane(of, number)).collect();
            let mut seconds = Vec::new();
            for _ in 0..=runs {
                meeting.wait();
                let start = Instant::now();
                meeting.wait();
                seconds.push(start.elapsed().as_secs_f64());
            }
            for lane in spawned {
                lane.join().map_err(|_| Error::Internal("a lane panicked".into()))??;
            }
            Ok::<_, Error>(seconds.split_off(1))
        })?;
        seconds.sort_by(f64::total_cmp);
        Ok(seconds)
    }

    /// Times copies over the links of all devices, in one direction or in both.
    fn links(&self, options: &Options, is_coming: bool, is_going: bool) -> Result<Vec<f64>> {
        let bytes = options.link as usize;
        // Lane 0 copies in, and lane 1 copies out.
        let directions: Vec<bool> = [(is_coming, true), (is_going, false)]
            .into_iter()
            .filter_map(|(is_wanted, comes)| is_wanted.then_some(comes))
            .collect();
        self.at_once(options.runs, directions.len(), &|of, lane| {
            let (device, arena) = (self.devices[of].clone(), self.arena.clone());
            let stream = device.stream(CancelFlag::new())?;
            let mut piece = arena.allocate(bytes, "measuring links")?;
            piece.fill(1);
            let host = piece.freeze();
            if directions[lane] {
                return Ok(Box::new(move || {
                    let copied = device.copy_in(std::slice::from_ref(&host), &stream)?;
                    device.synchronize(&stream)?;
                    drop(copied);
                    Ok(())
                }));
            }
            let original = device.copy_in(std::slice::from_ref(&host), &stream)?;
            device.synchronize(&stream)?;
            drop(host);
            Ok(Box::new(move || device.copy_out(&original, bytes, &arena, &stream).map(drop)))
        })
    }

    /// Bytes of a window that one sender fills.
    fn part_bytes(&self) -> usize {
        self.slot_bytes() * SLOTS
    }

    fn slot_bytes(&self) -> usize {
        self.window_bytes / (self.devices.len() - 1) / SLOTS / 256 * 256
    }

    /// First byte in the window of device `to` that device `from` fills.
    fn part_start(&self, from: usize, to: usize) -> usize {
        self.part_bytes() * if from < to { from } else { from - 1 }
    }

    /// Times pushes of `bytes` out of each device to all others, and checks what has arrived.
    fn push(&self, options: &Options, bytes: u64) -> Result<Vec<f64>> {
        let others = self.devices.len() - 1;
        let (part, slot) = (self.part_bytes(), self.slot_bytes());
        let to_each = (bytes / others as u64) as usize;
        let sent = self.devices.iter().enumerate().map(|(from, device)| {
            let stream = device.stream(CancelFlag::new())?;
            let sent = device.copy_in(&[pattern(from, part)], &stream)?;
            device.synchronize(&stream)?;
            Ok(sent)
        });
        let sent = sent.collect::<Result<Vec<DeviceBuffer>>>()?;
        let seconds = self.at_once(options.runs, others, &|from, lane| {
            let to = (from + 1 + lane) % self.devices.len();
            // The view of a host device runs on its calling thread.
            let device = self.devices[from].for_job(self.devices[from].memory().clone())?;
            let (stream, sent, start) =
                (device.stream(CancelFlag::new())?, sent[from].clone(), self.part_start(from, to));
            let peer = self.devices[to].id();
            Ok(Box::new(move || {
                for at in (0..to_each).step_by(slot) {
                    let (place, len) = (at % part, slot.min(to_each - at));
                    peers(&*device)?.push(peer, start + place, &sent, place..place + len, &stream)?;
                }
                device.synchronize(&stream)
            }))
        })?;
        for (from, to) in (0..=others).flat_map(|from| (0..=others).map(move |to| (from, to))) {
            if from != to {
                self.check_part(from, to, to_each.min(part))?;
            }
        }
        Ok(seconds)
    }

    fn check_part(&self, from: usize, to: usize, bytes: usize) -> Result<()> {
        let (device, start) = (&self.devices[to], self.part_start(from, to));
        let stream = device.stream(CancelFlag::new())?;
        let taken = peers(&**device)?.take(self.devices[from].id(), start..start + bytes, &stream)?;
        let found = device.copy_out(&taken, bytes, &self.arena, &stream)?;
        match found.as_slice() == &pattern(from, bytes).as_slice()[..bytes] {
            true => Ok(()),
            false => Err(Error::Internal(format!("the bytes that device {from} pushed to device {to} are wrong"))),
        }
    }
}

fn peers(device: &dyn Device) -> Result<&dyn PeerOps> {
    device.peers().ok_or_else(|| Error::Unsupported(format!("{} shares no memory", device.id())))
}

/// Bytes that differ by place and by sender.
fn pattern(from: usize, bytes: usize) -> Buffer {
    (0..bytes).map(|at| (at ^ (at >> 8) ^ (at >> 16)).wrapping_add(37 * from) as u8).collect::<Vec<u8>>().into()
}

fn main() -> Result<()> {
    let options = Options::parse();
    let bench = Bench::open(&options)?;
    let mut recorder = Recorder::new("peers", options.record);
    let is_gpus = options.devices.0[0].kind == DeviceKind::Cuda;
    let names: Vec<String> = options.devices.0.iter().map(ToString::to_string).collect();
    let mut write = |case: &str, bytes: u64, seconds: &[f64]| {
        let rate = |seconds: f64| bytes as f64 / seconds;
        recorder.write(json!({
            "case": case,
            "devices": names,
            // Of each device, and in both directions together.
            "bytes": bytes,
            "window_bytes": bench.window_bytes,
            "runs": seconds.len(),
            "seconds": seconds[seconds.len() / 2],
            "bytes_per_second": rate(seconds[seconds.len() / 2]),
            "bytes_per_second_max": rate(seconds[0]),
        }));
    };
    if is_gpus && options.link > 0 {
        write("in", options.link, &bench.links(&options, true, false)?);
        write("out", options.link, &bench.links(&options, false, true)?);
        write("both", 2 * options.link, &bench.links(&options, true, true)?);
    }
    if bench.devices.len() > 1 {
        for &bytes in &options.push {
            write("push", bytes, &bench.push(&options, bytes)?);
        }
    }
    Ok(())
}
