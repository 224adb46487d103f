//! Rates of devices: read from the file of saved rates, or measured at the start.

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::SystemTime;

use super::Engine;
use super::devices::DeviceSettings;
use super::gang_rates::{Links, set_link_rates};
use crate::device::{DeviceId, DeviceInfo, DeviceKind};
use crate::planner::{DeviceModel, GangRates, Rates, RatesFile, SavedRates};
use crate::topology::{DeviceNode, Hop, NodeKind, SharedLinks, Topology};

/// Rates that the planner uses for a device, and their origin.
#[derive(Clone, Debug)]
pub struct DeviceRates {
    pub values: Rates,
    /// Time of the measurement; `None`: the rates could not be measured, and are assumed.
    pub measured: Option<SystemTime>,
    /// File that the rates were read from. `None`: no file had them at this start.
    pub kept_in: Option<PathBuf>,
    /// Rates of the device and others of its kind at the same time; `None`: they are assumed.
    pub(super) links: Option<Arc<Links>>,
    /// Links that devices share; `None`: they are not described.
    pub(super) shared: Option<Arc<SharedLinks>>,
}

impl DeviceRates {
    /// Returns the rates that are assumed for a device of the given description.
    pub(super) fn assumed(id: DeviceId, info: &DeviceInfo) -> Self {
        let values = Rates::defaults(id.kind, info.facts.parallelism);
        Self { values, measured: None, kept_in: None, links: None, shared: None }
    }

    /// Returns measured rates, of this start.
    pub fn measured_now(values: Rates) -> Self {
        Self { values, measured: Some(SystemTime::now()), kept_in: None, links: None, shared: None }
    }

    /// Adds the links that devices share.
    #[must_use]
    pub fn linked_by(self, links: Arc<SharedLinks>) -> Self {
        Self { shared: Some(links), ..self }
    }

    /// Returns the measured bytes per second from host memory to the device, and back; `None` if
    /// they were not measured.
    pub fn of_host_memory(&self) -> Option<[f64; 2]> {
        self.measured.is_some().then_some([self.values.copy_in, self.values.copy_out])
    }

    /// Returns the topology whose links bound the rates of sets of devices; `None` if it describes
    /// no links.
    pub fn topology(&self) -> Option<&Topology> {
        Some(self.shared.as_ref()?.topology())
    }

    /// Returns the measured bytes per second from one device to another of its kind while all write
    /// to each other; `None` if they were not measured.
    pub fn of_pair(&self, from: DeviceId, to: DeviceId) -> Option<f64> {
        self.links.as_ref()?.of_pair(from, to)
    }

    /// Returns the rates of each of a set of equal devices while all of them work, and of the
    /// devices together. The links that devices share bound both. Rates that were not measured
    /// follow from these links, or are assumed.
    pub fn of_set(&self, devices: &[DeviceId]) -> (Rates, GangRates) {
        let values = self.values.clone();
        let measured = self.links.as_ref().and_then(|links| links.of_set(devices.iter().copied()));
        let or_assumed = || measured.unwrap_or_else(|| GangRates::assumed(&self.values));
        let names: Vec<String> = devices.iter().map(ToString::to_string).collect();
        let Some(shared) = self.shared.as_ref().and_then(|links| links.together(&names)) else {
            return (values, or_assumed());
        };
        let of_links = shared.both_of_each * devices.len() as f64;
        let gang = match (measured, shared.to_others) {
            (Some(measured), _) => GangRates { host_memory: measured.host_memory.min(of_links), ..measured },
            (None, Some(peers)) => GangRates { peers, host_memory: of_links },
            (None, None) => GangRates { host_memory: of_links, ..or_assumed() },
        };
        let (copy_in, copy_out) = (values.copy_in.min(shared.into_each), values.copy_out.min(shared.out_of_each));
        (Rates { copy_in, copy_out, ..values }, gang)
    }
}

/// Sets the rates of devices. Rates that are saved for a model are used. Otherwise they are
/// measured now, once for all devices that are alike, and saved. Rates that cannot be measured are
/// assumed. A file that cannot be written is a warning. `tell` receives the finished share.
pub fn set_rates(settings: &DeviceSettings, topology: &Topology, devices: &mut [Box<dyn Engine>], tell: &dyn Fn(f64)) {
    let mut file = rates_file(&settings.rates_file).map(|path| RatesFile::open(&path));
    let mut known: Vec<(DeviceModel, DeviceRates)> = Vec::new();
    let mut is_new = false;
    let count = devices.len() as f64;
    for (at, device) in devices.iter_mut().enumerate() {
        let model = model_of(&**device, topology);
        if let Some((_, rates)) = known.iter().find(|(other, _)| *other == model) {
            device.set_rates(rates.clone());
            continue;
        }
        let kept = file.as_ref().filter(|_| !settings.recalibrate).and_then(|file| kept_rates(file, &model));
        let rates = kept.unwrap_or_else(|| measured_rates(&**device, &|share| tell((at as f64 + share) / count)));
        if let (Some(file), Some(measured), None) = (&mut file, rates.measured, &rates.kept_in) {
            file.add(SavedRates { model: model.clone(), measured, rates: rates.values.clone() });
            is_new = true;
        }
        device.set_rates(rates.clone());
        known.push((model, rates));
    }
    is_new |= set_link_rates(file.as_mut(), settings.recalibrate, topology, devices);
    if !topology.links.is_empty() {
        let links = Arc::new(SharedLinks::new(with_measured_host_rates(topology, devices)));
        for device in devices.iter_mut() {
            device.set_rates(device.rates().clone().linked_by(links.clone()));
        }
    }
    if let Some(file) = file.filter(|_| is_new)
        && let Err(error) = file.save()
    {
        tracing::warn!(%error, "the rates cannot be saved, so the next start measures them again; name another --rates-file, or none");
    }
}

/// Returns the topology with the measured rates of GPUs in place of described ones.
fn with_measured_host_rates(topology: &Topology, devices: &[Box<dyn Engine>]) -> Topology {
    let of_host = |node: &DeviceNode| {
        let device = devices.iter().find(|device| device.id().to_string() == node.name)?;
        device.rates().of_host_memory()
    };
    let gpus: Vec<&dyn Engine> =
        devices.iter().map(|device| &**device).filter(|device| device.id().kind == DeviceKind::Cuda).collect();
    let ids = gpus.iter().map(|gpu| gpu.id());
    let of_all = gpus.first().and_then(|gpu| Some(gpu.rates().links.as_ref()?.of_set(ids)?.host_memory));
    topology.with_measured_host_rates(&of_host, of_all)
}

pub(super) fn model_of(device: &dyn Engine, topology: &Topology) -> DeviceModel {
    let id = device.id();
    DeviceModel::of(id.kind, &device.info().facts, device.memory(), link_rates(topology, &id.to_string()))
}

/// Returns the rates that a file has for a model; `None` if it has none.
fn kept_rates(file: &RatesFile, model: &DeviceModel) -> Option<DeviceRates> {
    let kept = file.find(model)?;
    let (values, measured) = (kept.rates.clone(), Some(kept.measured));
    Some(DeviceRates { values, measured, kept_in: Some(file.path().into()), links: None, shared: None })
}

/// Measures the rates of a device, or returns assumed ones if it cannot be measured.
fn measured_rates(device: &dyn Engine, tell: &dyn Fn(f64)) -> DeviceRates {
    match device.measure_rates(tell) {
        Some(values) => DeviceRates::measured_now(values),
        None => DeviceRates::assumed(device.id(), device.info()),
    }
}

/// Returns the path of the file of rates; `None`: rates are not saved.
pub fn rates_file(setting: &str) -> Option<PathBuf> {
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

/// Returns the emulated rates of the links between a device and host memory, in both directions.
/// Empty if there are none, and for a GPU.
fn link_rates(topology: &Topology, device: &str) -> Vec<f64> {
    let node = topology.device(device).filter(|node| node.kind == NodeKind::Host);
    let Some(route) = node.and_then(|node| topology.host_route(node)) else { return Vec::new() };
    let rates_of = |hop: &Hop| {
        let link = &topology.links[hop.link];
        let one_way = if hop.forward { link.forward_rate } else { link.backward_rate };
        [one_way].into_iter().chain(link.total_rate)
    };
    route.to_device.iter().chain(&route.from_device).flat_map(rates_of).collect()
}
