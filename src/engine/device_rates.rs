//! Rates of devices: read from the file of saved rates, or measured at the start.

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::SystemTime;

use super::Engine;
use super::devices::DeviceSettings;
use crate::planner::{DeviceModel, Rates, RatesFile, SavedRates};
use crate::topology::{Hop, Topology};

/// Rates that the planner uses for a device.
#[derive(Clone, Debug)]
pub struct DeviceRates {
    pub rates: Rates,
    /// Time of the measurement; `None`: the rates could not be measured, and are assumed.
    pub measured: Option<SystemTime>,
    /// File that the rates were read from. `None`: no file had them at this start.
    pub kept_in: Option<PathBuf>,
}

/// Returns the rates of devices, in the order of the devices. Rates that are saved for a model are
/// used. Otherwise they are measured now, once for all devices that are alike, and saved. A file
/// that cannot be written is a warning. `tell` receives the finished share.
pub fn device_rates(
    settings: &DeviceSettings,
    topology: &Topology,
    devices: &[Arc<dyn Engine>],
    tell: &dyn Fn(f64),
) -> Vec<DeviceRates> {
    let mut file = rates_file(&settings.rates_file).map(|path| RatesFile::open(&path));
    let mut known: Vec<(DeviceModel, DeviceRates)> = Vec::new();
    let mut is_new = false;
    let mut rates_of = |(at, device): (usize, &Arc<dyn Engine>)| {
        let tell = |share: f64| tell((at as f64 + share) / devices.len() as f64);
        let id = device.id();
        let model =
            DeviceModel::of(id.kind, &device.info().facts, device.memory(), link_rates(topology, &id.to_string()));
        if let Some((_, rates)) = known.iter().find(|(other, _)| *other == model) {
            return rates.clone();
        }
        let kept = file.as_ref().filter(|_| !settings.recalibrate).and_then(|file| Some((file, file.find(&model)?)));
        let rates = match kept {
            Some((file, kept)) => DeviceRates {
                rates: kept.rates.clone(),
                measured: Some(kept.measured),
                kept_in: Some(file.path().into()),
            },
            None => match device.measure_rates(&tell) {
                Some(rates) => {
                    let measured = SystemTime::now();
                    if let Some(file) = &mut file {
                        file.add(SavedRates { model: model.clone(), measured, rates: rates.clone() });
                        is_new = true;
                    }
                    DeviceRates { rates, measured: Some(measured), kept_in: None }
                }
                None => {
                    let rates = Rates::defaults(id.kind, device.info().facts.parallelism);
                    DeviceRates { rates, measured: None, kept_in: None }
                }
            },
        };
        known.push((model, rates.clone()));
        rates
    };
    let rates = devices.iter().enumerate().map(&mut rates_of).collect();
    if let Some(file) = file.filter(|_| is_new)
        && let Err(error) = file.save()
    {
        tracing::warn!(%error, "the rates cannot be saved, so the next start measures them again; name another --rates-file, or none");
    }
    rates
}

/// Returns the path of the file of rates; `None`: rates are not saved.
pub(super) fn rates_file(setting: &str) -> Option<PathBuf> {
    match setting {
        "none" => None,
        "auto" => cache_folder(std::env::var_os("XDG_CACHE_HOME"), std::env::var_os("HOME"))
            .map(|folder| folder.join("dovetail").join("rates.json")),
        path => Some(path.into()),
    }
}

/// Returns the user's cache folder, by the XDG base directory specification: relative paths do not
/// count.
pub(super) fn cache_folder(cache_home: Option<OsString>, home: Option<OsString>) -> Option<PathBuf> {
    let absolute = |path: OsString| Some(PathBuf::from(path)).filter(|path| path.is_absolute());
    cache_home.and_then(absolute).or_else(|| Some(home.and_then(absolute)?.join(".cache")))
}

/// Returns the rates of the links between a device and host memory, in both directions; empty if no
/// links are emulated.
fn link_rates(topology: &Topology, device: &str) -> Vec<f64> {
    let node = topology.devices.iter().find(|node| node.name == device);
    let Some(route) = node.and_then(|node| topology.host_route(node)) else { return Vec::new() };
    let rates_of = |hop: &Hop| {
        let link = &topology.links[hop.link];
        let one_way = if hop.forward { link.forward_rate } else { link.backward_rate };
        [one_way].into_iter().chain(link.total_rate)
    };
    route.to_device.iter().chain(&route.from_device).flat_map(rates_of).collect()
}
