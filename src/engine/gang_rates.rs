//! Rates of devices that work at the same time: read from the file of saved rates, or measured at
//! the start.
//!
//! ```text
//!   all devices: host memory ⇄ device                 the sum is the rate of host memory
//!   step k:      device i ──► window of device i + k  one rate per pair, for k = 1, 2, ...
//! ```

use std::sync::Arc;
use std::time::SystemTime;

use super::device_rates::model_of;
use super::windows::connect_all;
use super::{Engine, spawn_in};
use crate::device::{CancelFlag, Copies, DeviceId, DeviceKind};
use crate::planner::{DeviceModel, GangRates, LinkRates, RatesFile, SavedLinkRates};
use crate::topology::Topology;
use crate::{Error, Result};

/// Maximum devices whose pairs are connected and measured at the start. There are GPU hosts with
/// sixteen. Only a server of many slices of a CPU has more.
const DEVICES_MAX: usize = 16;

/// Rates of all devices of a kind at the same time.
#[derive(Debug)]
pub(super) struct Links {
    devices: Vec<DeviceId>,
    rates: LinkRates,
}

impl Links {
    /// Returns the rates of a set of these devices. `None` for one device, or an unknown one.
    pub(super) fn of_set(&self, devices: impl Iterator<Item = DeviceId>) -> Option<GangRates> {
        self.rates.of_set(&devices.map(|device| self.index(device)).collect::<Option<Vec<_>>>()?)
    }

    pub(super) fn of_pair(&self, from: DeviceId, to: DeviceId) -> Option<f64> {
        Some(self.rates.of_pair(self.index(from)?, self.index(to)?))
    }

    fn index(&self, device: DeviceId) -> Option<usize> {
        self.devices.iter().position(|&other| other == device)
    }
}

/// Connects the devices of each kind that form gangs, and sets their rates together: those of the
/// file, or else measured now. Rates that cannot be measured are assumed. Returns true if the file
/// has new rates.
pub(super) fn set_link_rates(
    mut file: Option<&mut RatesFile>,
    measures_again: bool,
    topology: &Topology,
    devices: &mut [Box<dyn Engine>],
) -> bool {
    let mut is_new = false;
    for kind in [DeviceKind::Cuda, DeviceKind::Host] {
        let of_kind: Vec<&dyn Engine> =
            devices.iter().map(|device| &**device).filter(|d| d.id().kind == kind).collect();
        let form_gangs = of_kind.iter().all(|device| device.window().is_some());
        if !form_gangs || !(2..=DEVICES_MAX).contains(&of_kind.len()) {
            continue;
        }
        let models: Vec<DeviceModel> = of_kind.iter().map(|&device| model_of(device, topology)).collect();
        let rates = connect_all(&of_kind, &CancelFlag::new()).and_then(|are_direct| {
            // The file has rates of pairs with direct access only. At the next start, a pair
            // without it may have it.
            let kept = file.as_deref().filter(|_| are_direct && !measures_again);
            match kept.and_then(|file| file.find_links(&models)) {
                Some(kept) => Ok((kept.rates.clone(), false)),
                None => Ok((measured(&of_kind)?, are_direct)),
            }
        });
        let ids: Vec<DeviceId> = of_kind.iter().map(|device| device.id()).collect();
        let (rates, is_kept_now) = match rates {
            Ok(rates) => rates,
            Err(error) => {
                tracing::warn!(%error, "the links between devices cannot be measured; planning with assumed rates");
                continue;
            }
        };
        if let Some(file) = file.as_deref_mut().filter(|_| is_kept_now) {
            file.add_links(SavedLinkRates { devices: models, measured: SystemTime::now(), rates: rates.clone() });
            is_new = true;
        }
        let links = Arc::new(Links { devices: ids, rates });
        for device in devices.iter_mut().filter(|device| device.id().kind == kind) {
            let rates = device.rates().clone();
            device.set_rates(super::DeviceRates { links: Some(links.clone()), ..rates });
        }
    }
    is_new
}

/// Measures all links of connected devices.
pub(super) fn measured(engines: &[&dyn Engine]) -> Result<LinkRates> {
    tracing::info!(devices = engines.len(), "measuring the links between devices, for less than a second");
    let count = engines.len();
    let host_memory = all_at_once(engines, &|_| Copies::HostMemory)?.into_iter().sum();
    let mut pairs = vec![vec![0.0; count]; count];
    for step in 1..count {
        let (owner, writer) = (|at: usize| (at + step) % count, |at: usize| (at + count - step) % count);
        let copies = |at: usize| Copies::Peers { to: engines[owner(at)].id(), from: engines[writer(at)].id() };
        for (at, rate) in all_at_once(engines, &copies)?.into_iter().enumerate() {
            pairs[at][owner(at)] = rate;
        }
    }
    Ok(LinkRates::new(engines[0].id().kind, host_memory, pairs))
}

/// Lets all devices make copies at the same time. Returns the bytes per second of each.
fn all_at_once(engines: &[&dyn Engine], copies_of: &(dyn Fn(usize) -> Copies + Sync)) -> Result<Vec<f64>> {
    std::thread::scope(|scope| {
        let mut threads = Vec::new();
        for (at, &engine) in engines.iter().enumerate() {
            let measure = move || engine.measure_copies(copies_of(at));
            threads.push(spawn_in(scope, format!("links-{}", engine.id()), measure)?);
        }
        let panicked = |_| Err(Error::Internal("a thread that measures links panicked".into()));
        threads.into_iter().map(|thread| thread.join().unwrap_or_else(panicked)).collect()
    })
}
