//! Windows of devices: memory that the ranks of a gang write into each other's devices.
//!
//! ```text
//!   server              writer                              owner of the window
//!   connect ──────────► maps the window, writes a pattern
//!   verify ───────────────────────────────────────────────► reads the pattern back
//!                  └─ otherwise: both again, with a window in host memory
//! ```
//!
//! Each engine shows its device's window as a file. Before a gang starts, each pair of its devices
//! is connected, unless it is already. A device that was started again has a new window, and is
//! connected anew. A gang has its devices alone, so no rows are in a window meanwhile. If a gang is
//! cancelled, a process may write the pattern later. The next gang waits for that (`Trial`).

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::Engine;
use crate::device::{CancelFlag, Device, DeviceId, Pattern, PeerWindow, peers, shares_no_memory};
use crate::memory::{Budget, Reservation, SharedWindow};
use crate::{Context, Error, Result};

/// Time that a process may take to map a window and to write or read a few megabytes there.
const WINDOW_WAIT: Duration = Duration::from_secs(60);

/// Time between two looks at the writers of a window.
const LOOK_INTERVAL: Duration = Duration::from_millis(1);

/// Attempt of a device to write into the window of another. It lives until the device writes no
/// more for it, even if the job that waits for the outcome has ended.
#[derive(Debug)]
pub struct Trial {
    pub(super) pattern: Pattern,
    /// Flag of the job that waits for the outcome.
    pub(super) cancel: CancelFlag,
    /// Device whose process was asked last to do its part, and the time then.
    asked: Mutex<(DeviceId, Instant)>,
}

impl Trial {
    /// Notes that the process of a device is asked now. It has [`WINDOW_WAIT`] to answer.
    pub(super) fn ask(&self, device: DeviceId) {
        *self.asked.lock() = (device, Instant::now());
    }

    /// Returns the error for a process that was asked and has not answered in time.
    ///
    /// # Errors
    /// [`Unavailable`](Error::Unavailable) when its time is over.
    pub(super) fn check_time(&self) -> Result<()> {
        match *self.asked.lock() {
            (_, since) if since.elapsed() < WINDOW_WAIT => Ok(()),
            (device, _) => Err(Error::Unavailable(format!("the process of {device} does not answer"))),
        }
    }
}

/// Access of a device to the memory of a peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PeerAccess {
    /// Rows go straight into the peer's memory.
    Direct,
    /// Rows go through host memory, because the peer's memory cannot be written.
    ThroughHost { why: String },
}

/// Window of a device. Another window of the same device is another object.
#[derive(Debug)]
pub struct Window {
    file: OwnedFd,
    bytes: usize,
    /// Budget of the window in host memory.
    host_memory: Budget,
    /// Window in host memory, once a writer needs it.
    in_host: Mutex<Option<(SharedWindow, Reservation)>>,
    /// Access of other devices, each with the window that the other had then.
    writers: Mutex<HashMap<DeviceId, (Weak<Self>, PeerAccess)>>,
    /// Attempts to write here.
    trials: Mutex<Vec<Weak<Trial>>>,
}

impl Window {
    pub(super) fn new(file: OwnedFd, bytes: usize, host_memory: Budget) -> Self {
        let (in_host, writers, trials) = (Mutex::default(), Mutex::default(), Mutex::default());
        Self { file, bytes, host_memory, in_host, writers, trials }
    }

    /// Returns the window of a device of this process; `None` if it is not open.
    ///
    /// # Errors
    /// Errors of the system.
    pub(super) fn of(device: &dyn Device, host_memory: &Budget) -> Result<Option<Arc<Self>>> {
        let Some(peers) = device.peers() else { return Ok(None) };
        let Some(file) = peers.window_file() else { return Ok(None) };
        Ok(Some(Arc::new(Self::new(file.try_clone_to_owned()?, peers.window_bytes(), host_memory.clone()))))
    }

    /// Returns the window in host memory that stands for this one.
    fn in_host(&self) -> Result<SharedWindow> {
        let mut in_host = self.in_host.lock();
        if let Some((window, _)) = &*in_host {
            return Ok(window.clone());
        }
        let held = self.host_memory.reserve(self.bytes as u64, "rows between devices")?;
        let window = SharedWindow::new(self.bytes)?;
        *in_host = Some((window.clone(), held));
        Ok(window)
    }

    /// Returns an attempt of a device to write here.
    fn trial_of(&self, writer: DeviceId, cancel: &CancelFlag) -> Arc<Trial> {
        let (pattern, cancel, asked) = (Pattern::unused(), cancel.clone(), Mutex::new((writer, Instant::now())));
        let trial = Arc::new(Trial { pattern, cancel, asked });
        self.trials.lock().push(Arc::downgrade(&trial));
        trial
    }

    /// Waits until no device writes a pattern here. Otherwise it could replace rows of a gang. The
    /// time of a process counts from when it was asked, and not from the call, so a process that is
    /// known not to answer is not waited for again.
    fn wait_for_trials(&self, cancel: &CancelFlag) -> Result<()> {
        loop {
            let under_way: Vec<Arc<Trial>> = {
                let mut trials = self.trials.lock();
                trials.retain(|trial| trial.strong_count() > 0);
                trials.iter().filter_map(Weak::upgrade).collect()
            };
            if under_way.is_empty() {
                return Ok(());
            }
            cancel.check()?;
            under_way.iter().try_for_each(|trial| trial.check_time())?;
            // Other gangs that wait would take a clone for a trial.
            drop(under_way);
            std::thread::sleep(LOOK_INTERVAL);
        }
    }

    /// Returns the access of a device that has the given window now.
    fn access_of(&self, writer: DeviceId, window: &Arc<Self>) -> Option<PeerAccess> {
        let writers = self.writers.lock();
        let (of_then, access) = writers.get(&writer)?;
        std::ptr::eq(of_then.as_ptr(), Arc::as_ptr(window)).then(|| access.clone())
    }
}

/// Returns the access of one device to the memory of another; `None` if no join has connected them
/// yet.
///
/// # Errors
/// [`Unavailable`](crate::Error::Unavailable) if one of them shares no memory.
pub fn peer_access(writer: &dyn Engine, owner: &dyn Engine) -> Result<Option<PeerAccess>> {
    Ok(window_of(owner)?.access_of(writer.id(), &window_of(writer)?))
}

fn window_of(engine: &dyn Engine) -> Result<Arc<Window>> {
    engine.window().ok_or_else(|| shares_no_memory(engine.id()))
}

/// Lets all engines write rows to each other. Returns true if all of them write straight into the
/// windows of the others.
///
/// # Errors
/// [`Cancelled`](crate::Error::Cancelled) once the flag is raised.
/// [`Unavailable`](crate::Error::Unavailable) if a device shares no memory or is lost. The errors
/// of [`Engine::connect`] and [`Engine::verify`] for a pair that cannot even use host memory.
/// [`Internal`](crate::Error::Internal) for windows of unlike sizes, which ranks would not divide
/// alike.
pub(super) fn connect_all(engines: &[&dyn Engine], cancel: &CancelFlag) -> Result<bool> {
    let windows = engines.iter().map(|&engine| window_of(engine)).collect::<Result<Vec<_>>>()?;
    if windows.windows(2).any(|pair| pair[0].bytes != pair[1].bytes) {
        let sizes: Vec<String> = windows.iter().map(|window| window.bytes.to_string()).collect();
        return Err(Error::Internal(format!("the windows of a gang's devices have {} bytes", sizes.join(", "))));
    }
    windows.iter().try_for_each(|window| window.wait_for_trials(cancel))?;
    let ends = || engines.iter().zip(&windows);
    let mut are_direct = true;
    for (writer, owner) in ends().flat_map(|writer| ends().map(move |owner| (writer, owner))) {
        if writer.0.id() != owner.0.id() {
            cancel.check()?;
            are_direct &= connect((*writer.0, writer.1), (*owner.0, owner.1), cancel)? == PeerAccess::Direct;
        }
    }
    Ok(are_direct)
}

/// Finds out how one device accesses the memory of another, unless that is known.
fn connect(
    (writer, of_writer): (&dyn Engine, &Arc<Window>),
    (owner, window): (&dyn Engine, &Arc<Window>),
    cancel: &CancelFlag,
) -> Result<PeerAccess> {
    if let Some(known) = window.access_of(writer.id(), of_writer) {
        return Ok(known);
    }
    let try_with = |in_host| try_window(writer, owner, window, in_host, cancel);
    let access = match try_with(None) {
        Ok(()) => PeerAccess::Direct,
        // Memory that is short now says nothing of the pair.
        Err(error @ (Error::Exhausted(_) | Error::Cancelled(_))) => return Err(error),
        Err(error) => {
            writer.check()?;
            owner.check()?;
            tracing::warn!("rows from {} to {} go through host memory: {error}", writer.id(), owner.id());
            let through_host = || {
                window.wait_for_trials(cancel)?;
                try_with(Some(window.in_host()?))
            };
            through_host().context(|| format!("sending rows from {} to {}", writer.id(), owner.id()))?;
            PeerAccess::ThroughHost { why: error.message().into() }
        }
    };
    window.writers.lock().insert(writer.id(), (Arc::downgrade(of_writer), access.clone()));
    Ok(access)
}

/// Connects two devices by the owner's window or the given one, and checks that bytes arrive.
fn try_window(
    writer: &dyn Engine,
    owner: &dyn Engine,
    window: &Window,
    in_host: Option<SharedWindow>,
    cancel: &CancelFlag,
) -> Result<()> {
    let trial = window.trial_of(writer.id(), cancel);
    let mapped = match &in_host {
        Some(in_host) => PeerWindow::Host(in_host.clone()),
        None => PeerWindow::Device { file: window.file.try_clone()?, bytes: window.bytes },
    };
    writer.connect(owner.id(), mapped, &trial)?;
    owner.verify(writer.id(), in_host, &trial)
}

/// Maps the window of a peer in a device of this process, and writes the pattern there.
pub(super) fn map_and_write(device: &dyn Device, peer: DeviceId, window: PeerWindow, pattern: Pattern) -> Result<()> {
    let bytes = window.bytes();
    peers(device)?.map_window(peer, window).context(|| format!("mapping the memory of {peer}"))?;
    pattern.write(device, peer, bytes)
}

/// Takes what a peer writes from its own window or the given one, and checks the pattern there.
pub(super) fn take_and_check(
    device: &dyn Device,
    writer: DeviceId,
    in_host: Option<SharedWindow>,
    pattern: Pattern,
) -> Result<()> {
    let own = peers(device)?;
    own.take_from_host(writer, in_host);
    pattern.check(device, writer, own.window_bytes())
}

/// Unmaps the windows of devices that are lost, so that their memory can be freed. No rank may be
/// at work.
pub(super) fn disconnect_lost(engines: &[Arc<dyn Engine>]) {
    for lost in engines.iter().filter(|engine| engine.check().is_err()) {
        engines.iter().filter(|engine| engine.id() != lost.id()).for_each(|engine| engine.disconnect(lost.id()));
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;
    use crate::device::DeviceKind;

    #[test]
    fn a_process_that_does_not_answer_is_waited_for_once() {
        let file = File::open("/dev/null").unwrap();
        let window = Window::new(file.into(), 0, Budget::new("host memory", "--host-memory", 0));
        let [writer, owner] = [0, 1].map(|index| DeviceId { kind: DeviceKind::Host, index });
        let (running, stopped) = (CancelFlag::new(), CancelFlag::new());
        stopped.raise();
        window.wait_for_trials(&stopped).unwrap();
        let trial = window.trial_of(writer, &running);
        assert!(matches!(window.wait_for_trials(&stopped), Err(Error::Cancelled(_))), "it has time left");
        trial.check_time().unwrap();
        let long_ago = Instant::now().checked_sub(WINDOW_WAIT).expect("the machine runs for a minute");
        *trial.asked.lock() = (owner, long_ago);
        let late = window.wait_for_trials(&running).unwrap_err();
        assert_eq!(late, Error::Unavailable("the process of host:1 does not answer".into()));
        trial.ask(writer);
        assert!(matches!(window.wait_for_trials(&stopped), Err(Error::Cancelled(_))));
        drop(trial);
        window.wait_for_trials(&running).unwrap();
    }
}
