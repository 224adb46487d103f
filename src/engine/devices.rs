//! Opens, from the settings, the devices that joins run on and the host memory for all data.

use std::mem::discriminant;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use super::{ChildEngine, Engine, InProcess, Opening, SharedSlabs, SupervisedEngine, tmpfs};
use crate::device::host::{EmulatedRoute, HostDevice, Lane};
use crate::device::{
    Device, DeviceId, DeviceKind, GpuIdentity, GpuPlace, TestOptions, VISIBLE_GPUS, gpu_count, gpu_identities,
    nvml_gpus, visible_to_process_of, why_no_gpu,
};
use crate::human::{counted, counted_as, file_failure};
use crate::memory::{
    Arena, Backing, Budget, check_at_least, human_bytes, parse_bytes, parse_memory_setting, process_memory_limit,
};
use crate::topology::{DeviceNode, Hop, Link, NodeKind, NumaNodes, NvmlGpu, PciPath, Topology};
use crate::{Context, Error, Result};

/// Maximum number of slices of the CPU: each has threads of its own.
const HOST_DEVICES_MAX: u16 = 1024;

/// Minimum host memory: a few batches of a table, and as many of a result.
const HOST_MEMORY_MIN: u64 = 1 << 20;

/// Minimum memory of a device. On a host device, a join of two rows takes 33 KiB, and a join of one
/// probe chunk 240 KiB.
const DEVICE_MEMORY_MIN: u64 = 64 << 10;

/// Settings of the devices, in the words of the operator.
#[derive(Clone, Debug)]
pub struct DeviceSettings {
    /// Devices: `auto`, kinds and counts.
    pub devices: String,
    /// File that describes the devices instead.
    pub topology: Option<PathBuf>,
    /// Directory of the arena's slabs: a path, `auto` or `none`.
    pub arena_directory: String,
    /// Memory of each device, or of each kind of device.
    pub device_memory: String,
    /// Memory of each device for cached columns: a size, or a share of its memory.
    pub device_cache: String,
    /// Processes of their own for devices: `auto`, `on` or `off`.
    pub device_processes: String,
    /// Seconds until a lost device is opened anew; 0: never.
    pub device_restart_seconds: u64,
    /// Seconds without a message after which a device's process is killed; 0: never.
    pub device_stall_seconds: u64,
    /// File of saved rates: a path, `auto` or `none`.
    pub rates_file: String,
    /// True if rates are measured even if the file has them.
    pub recalibrate: bool,
    /// Log filter of child processes.
    pub log: String,
    pub log_format: String,
    pub test_options: TestOptions,
}

/// Returns the bytes of host memory that a setting allows: a size, or a share of what this process
/// may use.
///
/// # Errors
/// [`Error::Invalid`] with the accepted forms, and for less than a server can work with.
pub fn host_memory_bytes(setting: &str) -> Result<u64> {
    let bytes = process_memory_limit().and_then(|limit| parse_memory_setting(setting, limit));
    bytes.and_then(|bytes| check_at_least(setting, bytes, HOST_MEMORY_MIN).map(|()| bytes)).context(|| "--host-memory")
}

/// Returns the bytes of host memory to prepare that a setting asks for, of an arena of
/// `arena_bytes`. `auto` is a quarter of the arena, or as much as the GPUs have if that is less. It
/// is nothing without GPUs: the CPU needs no pinned memory, and the machine may have other uses for
/// its memory.
///
/// # Errors
/// [`Error::Invalid`] with the accepted forms, and for more than the arena has.
pub fn prefault_bytes(setting: &str, arena_bytes: u64, gpus_bytes: u64) -> Result<u64> {
    const AUTO_PART: u64 = 4;
    let bytes = match setting.trim() {
        "auto" => Ok((arena_bytes / AUTO_PART).min(gpus_bytes)),
        "all" => Ok(arena_bytes),
        "none" => Ok(0),
        text => match text.strip_suffix('%') {
            Some(_) => parse_memory_setting(text, arena_bytes),
            None => parse_bytes(text),
        }
        .map_err(|error| error.context("write auto, all, none, a size, or a share of --host-memory such as 50%")),
    };
    match bytes.context(|| "--prefault")? {
        bytes if bytes > arena_bytes => Err(Error::Invalid(format!(
            "--prefault: {} is more than the {} of --host-memory; ask for less, or write all",
            setting.trim(),
            human_bytes(arena_bytes)
        ))),
        bytes => Ok(bytes),
    }
}

/// Returns the memory of all GPUs among the devices.
pub fn gpus_bytes<'a>(devices: impl IntoIterator<Item = &'a dyn Engine>) -> u64 {
    let gpus = devices.into_iter().filter(|device| device.id().kind == DeviceKind::Cuda);
    gpus.map(|gpu| gpu.memory().limit_bytes()).sum()
}

/// Returns the memory of each device of a kind that a setting allows; `None` if the setting leaves
/// it to the device. The setting is one size for all devices, or one for each kind that it names.
///
/// # Errors
/// The errors of [`host_memory_bytes`], for a wrong size of any kind in the setting.
pub fn device_memory_bytes(setting: &str, kind: NodeKind) -> Result<Option<u64>> {
    let size = |text: &str| match text {
        "auto" => Ok(None),
        text => {
            let bytes = parse_bytes(text);
            bytes.and_then(|bytes| check_at_least(text, bytes, DEVICE_MEMORY_MIN).map(|()| Some(bytes)))
        }
    };
    let by_kind = || -> Result<Option<u64>> {
        let mut sizes: Vec<(&str, Option<u64>)> = Vec::new();
        for entry in setting.split(',') {
            let (name, text) = entry.split_once('=').unwrap_or((entry, ""));
            let name = name.trim();
            if !["host", "cuda"].contains(&name) || sizes.iter().any(|(other, _)| *other == name) {
                return Err(Error::Invalid(format!(
                    "{setting:?} is not a size of device memory; write a size for all, or each kind once, as in \
                     cuda=auto,host=8GiB"
                )));
            }
            sizes.push((name, size(text.trim())?));
        }
        let kind = kind.to_string();
        Ok(sizes.into_iter().find(|(name, _)| *name == kind).and_then(|(_, bytes)| bytes))
    };
    let bytes = if setting.contains('=') { by_kind() } else { size(setting) };
    bytes.context(|| "--device-memory")
}

/// Returns the topology that the settings describe: a topology file, the GPUs, or the CPU in
/// slices.
///
/// # Errors
/// [`Error::Invalid`] for a setting that names no devices, or a file that describes none.
pub fn topology(settings: &DeviceSettings) -> Result<Topology> {
    if let Some(path) = &settings.topology {
        if settings.devices != "auto" {
            return Err(Error::Invalid(format!(
                "--devices {} and --topology {} both name the devices; leave one of them out",
                settings.devices,
                path.display()
            )));
        }
        let text = std::fs::read_to_string(path)
            .map_err(|error| Error::Invalid(file_failure(path, &error)))
            .context(|| format!("reading the topology file {}", path.display()))?;
        return Topology::parse(&text).context(|| format!("the topology file {}", path.display()));
    }
    let asked = parse_devices(&settings.devices).map_err(|why| {
        // A setting that names no GPU needs no explanation of missing GPUs.
        let there = match settings.devices.contains("cuda") || settings.devices.contains("gpu") {
            true => gpu_count().map_or_else(
                |error| format!("; the GPUs cannot be counted: {error}"),
                |count| format!("; there {}", gpus_found(count)),
            ),
            false => String::new(),
        };
        Error::Invalid(format!(
            "--devices is {:?}{why}; write auto, cuda for all GPUs, cuda:N for the first N, host:N for the CPU in N slices, N \
             from 1 to {HOST_DEVICES_MAX}, or GPUs and slices with a comma between, as in cuda:1,host:1{there}",
            settings.devices,
        ))
    })?;
    if asked.is_empty() {
        return Ok(match gpu_count()? {
            // Without a GPU the whole CPU is one device: a join gets all cores, and the queue
            // decides the order.
            0 => Topology::host(1),
            gpus => of_machine(Topology::cuda(gpus))?,
        });
    }
    let count_of = |asked: Asked| -> Result<(NodeKind, u16)> {
        match asked {
            Asked::Slices(count) => Ok((NodeKind::Host, count)),
            // Looking for GPUs starts the driver, so a setting for the CPU alone skips it.
            Asked::Gpus(count) => match (gpu_count()?, count) {
                (gpus, None) if gpus > 0 => Ok((NodeKind::Cuda, gpus)),
                (gpus, Some(count)) if count <= gpus => Ok((NodeKind::Cuda, count)),
                (gpus, _) => Err(Error::Invalid(format!(
                    "--devices is {:?}, and there {}; write auto to use the devices found",
                    settings.devices,
                    gpus_found(gpus)
                ))),
            },
        }
    };
    of_machine(Topology::of(&asked.into_iter().map(count_of).collect::<Result<Vec<_>>>()?))
}

/// Describes the GPUs of the topology as the machine does, if it has any.
fn of_machine(mut topology: Topology) -> Result<Topology> {
    if topology.devices.iter().any(|node| node.kind == NodeKind::Cuda) {
        let gpus = gpu_identities()?;
        // One GPU has no pair.
        let nvml = if gpus.len() > 1 { nvml_gpus() } else { Ok(Vec::new()) };
        describe_gpus(&mut topology, Path::new("/"), &gpus, nvml.as_deref().unwrap_or_default());
        tracing::info!("{}{}", origin_of_links(&topology), origin_of_nvlinks(&topology, nvml));
    }
    Ok(topology)
}

/// Names each GPU of the topology by its UUID, and finds its NUMA node and its PCIe links in the
/// files under `root`. Adds the NVLinks that NVML shows.
fn describe_gpus(topology: &mut Topology, root: &Path, gpus: &[GpuIdentity], nvml: &[NvmlGpu]) {
    let of = |node: &DeviceNode| gpus.get(usize::from(node.index));
    for node in topology.devices.iter_mut().filter(|node| node.kind == NodeKind::Cuda) {
        node.uuid = of(node).and_then(|gpu| gpu.uuid.clone());
    }
    topology.place_on_nodes(&NumaNodes::read(root), |node| {
        let gpu = of(node)?;
        gpu.numa_node.or_else(|| NumaNodes::of_pci_device(root, &gpu.pci_address))
    });
    topology.add_pcie_links(|node| PciPath::read(root, &of(node)?.pci_address));
    topology.add_nvlinks(nvml);
}

/// Describes which NVLinks NVML shows, as a further clause. Empty if there is one GPU.
fn origin_of_nvlinks(topology: &Topology, nvml: Result<Vec<NvmlGpu>>) -> String {
    let nvml = match nvml {
        Ok(gpus) if gpus.is_empty() => return String::new(),
        Ok(gpus) => gpus,
        Err(error) => return format!("; NVML cannot be asked for NVLinks: {}", error.message()),
    };
    let active: usize = nvml.iter().map(|gpu| gpu.links.len()).sum();
    match topology.links_from.iter().any(|origin| origin == "NVML") {
        true => "; NVML shows their NVLinks".into(),
        false if active > 0 => "; NVML hides what their NVLinks lead to".into(),
        false => "; NVML shows no NVLink".into(),
    }
}

/// Describes which links of the GPUs the machine shows. A line of the log.
fn origin_of_links(topology: &Topology) -> String {
    let gpus = || topology.devices.iter().filter(|node| node.kind == NodeKind::Cuda);
    let linked = gpus().filter(|node| topology.host_link(node).is_some()).count() as u64;
    if linked == 0 {
        return "the machine does not show the PCIe links of its GPUs: their rates are measured".into();
    }
    let switches = topology.switches.iter().filter(|switch| switch.kind.starts_with("PCIe")).count();
    let shared = match switches as u64 {
        0 => "no two of them share a switch".into(),
        switches => format!("{} with several of them", counted_as(switches, "PCIe switch", "PCIe switches")),
    };
    format!("sysfs shows the PCIe links of {linked} of {}, {shared}", counted(gpus().count() as u64, "GPU"))
}

/// Returns the GPUs that CUDA shows to the process of a GPU. `None`: those that it shows to the
/// server. Numbers in the server's setting would name other GPUs once one is gone.
fn visible_gpus(node: &DeviceNode, topology: &Topology) -> Option<String> {
    std::env::var_os(VISIBLE_GPUS)?;
    let all = topology.devices.iter().filter_map(|node| node.uuid.as_deref());
    Some(visible_to_process_of(node.uuid.as_deref()?, all))
}

/// Devices of one kind, as the setting requests them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Asked {
    /// The first N GPUs; `None`: all.
    Gpus(Option<u16>),
    /// The CPU in N slices.
    Slices(u16),
}

/// Parses `--devices`, in its order. Returns nothing if the setting leaves the choice to the
/// server.
///
/// # Errors
/// The fault, as text that follows the setting; empty if the text is no such setting at all.
fn parse_devices(setting: &str) -> Result<Vec<Asked>, String> {
    if setting == "auto" {
        return Ok(Vec::new());
    }
    let mut asked: Vec<Asked> = Vec::new();
    for entry in setting.split(',').map(str::trim) {
        let found = parse_entry(entry).ok_or_else(|| match entry {
            _ if !setting.contains(',') => String::new(),
            "" => ", with an empty entry".into(),
            "auto" => ", and auto takes no other entry".into(),
            entry => format!(", and its entry {entry:?} names no devices"),
        })?;
        if asked.iter().any(|other| discriminant(other) == discriminant(&found)) {
            let (kind, _) = entry.split_once(':').unwrap_or((entry, ""));
            return Err(format!(", which names {kind} twice"));
        }
        asked.push(found);
    }
    Ok(asked)
}

fn parse_entry(entry: &str) -> Option<Asked> {
    let (kind, count) = match entry.split_once(':') {
        None => (entry, None),
        Some((kind, count)) => (kind, Some(count.parse::<u16>().ok().filter(|&count| count > 0)?)),
    };
    match (kind, count) {
        ("cuda", count) => Some(Asked::Gpus(count)),
        ("host", Some(count)) if count <= HOST_DEVICES_MAX => Some(Asked::Slices(count)),
        _ => None,
    }
}

/// Describes the GPUs that were found and those on which joins run, or why joins use none. A line
/// of the log.
pub fn gpus_used(settings: &DeviceSettings, devices: &[Box<dyn Engine>]) -> String {
    let named = |gpu: &dyn Engine| {
        let memory = human_bytes(gpu.memory().limit_bytes());
        let facts = &gpu.info().facts;
        let uuid = facts.uuid.as_ref().map(|uuid| format!("{uuid}, ")).unwrap_or_default();
        format!("{} ({}, {uuid}{memory} of its memory for joins)", gpu.id(), facts.name)
    };
    let gpus = devices.iter().filter(|device| device.id().kind == DeviceKind::Cuda);
    let used: Vec<String> = gpus.map(|gpu| named(&**gpu)).collect();
    if !used.is_empty() {
        // The GPUs were counted before they were opened.
        let found = gpu_count().map_or(used.len() as u64, u64::from);
        return format!("joins run on {} of {} found: {}", used.len(), counted(found, "GPU"), used.join(", "));
    }
    match &settings.topology {
        Some(path) => format!("joins run on no GPU: {} describes host devices", path.display()),
        None if settings.devices == "auto" => format!("joins run on the CPU: there {}", gpus_found(0)),
        None => format!("joins run on no GPU: --devices {} asks for none", settings.devices),
    }
}

/// Returns the bytes of the window of every device of a kind: a few pieces of a few megabytes from
/// each peer, or of tens of megabytes on a GPU, whose chunks are larger. Less if one of them has
/// little memory. The window comes in addition to the memory for joins.
///
/// Sender and receiver divide a window alike, so all windows have the same size.
///
/// # Errors
/// The errors of `memory_bytes`.
fn window_bytes(kind: DeviceKind, mut memory_bytes: impl Iterator<Item = Result<u64>>) -> Result<usize> {
    const MEMORY_SHARE: u64 = 16;
    let most = if kind == DeviceKind::Cuda { 256 << 20 } else { 16 << 20 };
    let window = memory_bytes.try_fold(most, |window: u64, bytes| Ok(window.min(bytes? / MEMORY_SHARE)));
    window.map(|bytes| bytes as usize)
}

/// Opens the devices of a topology. The settings fill in what the topology omits. A device gets an
/// equal share of the CPU's threads. A slice of the CPU gets the memory in the setting, or else an
/// equal share of a quarter of host memory. If the process may use less than that quarter beyond
/// host memory, the slices share what it may use. A GPU has all of its free memory, except a
/// twentieth. With GPUs, the slabs of `arena` are pinned.
///
/// A device shares threads and memory only with devices of its kind. GPUs seldom need threads, and
/// slices of the CPU that left threads to GPUs would always be slow. So a device is as fast with
/// the other kind as without it, and its saved rates apply.
///
/// # Errors
/// [`Error::Invalid`] for a setting that cannot be met; [`Error::Unsupported`] for a kind of device
/// that this build lacks; errors of opening a device.
pub fn open_devices(settings: &DeviceSettings, topology: &Topology, arena: &Arena) -> Result<Vec<Box<dyn Engine>>> {
    if topology.devices.is_empty() {
        return Err(Error::Invalid("the topology describes no device that joins could run on".into()));
    }
    place_memory(topology, arena);
    let like = |kind: NodeKind| topology.devices.iter().filter(|node| node.kind == kind).count();
    let memory_share = host_device_share(settings, topology, arena.budget().limit_bytes())?;
    let lanes = topology.links.iter().map(LinkLanes::new).collect::<Result<Vec<_>>>()?;
    let cpu_threads = std::thread::available_parallelism().map_or(1, usize::from);
    let slabs = Arc::new(SharedSlabs::default());
    let unless_zero = |seconds: u64| (seconds > 0).then(|| Duration::from_secs(seconds));
    let first_delay = unless_zero(settings.device_restart_seconds);
    let stall_limit = unless_zero(settings.device_stall_seconds);
    let memory_of = |node: &DeviceNode| -> Result<Option<u64>> {
        let memory_bytes = node.memory_bytes.or(device_memory_bytes(&settings.device_memory, node.kind)?);
        Ok(memory_bytes.or((node.kind != NodeKind::Cuda).then_some(memory_share)))
    };
    let open = |node: &DeviceNode| -> Result<Box<dyn Engine>> {
        let threads = node.threads.unwrap_or((cpu_threads / like(node.kind)).max(1));
        let memory_bytes = memory_of(node)?;
        let memory_setting = match node.memory_bytes {
            Some(_) => format!("the memory of {} in the topology file", node.name),
            None => "the server's --device-memory".to_string(),
        };
        let kind = if node.kind == NodeKind::Cuda { DeviceKind::Cuda } else { DeviceKind::Host };
        let memory_name = format!("memory of device {}", node.name);
        let id = DeviceId { kind, index: node.index };
        let test_options = settings.test_options.clone();
        // The GPUs of one process fail together, and form no gangs.
        let own_process = has_own_process(settings, topology, node.kind)?;
        let socket = topology.node_of_gpu(node);
        let place = GpuPlace {
            uuid: node.uuid.clone(),
            numa_node: socket.and_then(|socket| socket.numa_node),
            cpus: socket.map(|socket| socket.cpus.clone()).unwrap_or_default(),
        };
        let exchanges = like(node.kind) > 1 && (kind == DeviceKind::Host || own_process);
        let of_kind = topology.devices.iter().filter(|other| other.kind == node.kind);
        let window_bytes = match exchanges {
            true => window_bytes(kind, of_kind.filter_map(|node| memory_of(node).transpose()))?,
            false => 0,
        };
        let opening = Opening {
            id,
            place,
            visible_gpus: visible_gpus(node, topology),
            threads,
            memory_bytes,
            memory_name,
            memory_setting,
            window_bytes,
            stall_limit,
            test_options,
        };
        if own_process {
            arena.pin_by(Some(slabs.clone()));
            let (settings, arena, slabs) = (settings.clone(), arena.clone(), slabs.clone());
            let start = move |memory_bytes: Option<u64>| {
                let opening = Opening { memory_bytes: memory_bytes.or(opening.memory_bytes), ..opening.clone() };
                let logs = ["--log", &settings.log, "--log-format", &settings.log_format];
                let process = ChildEngine::start(&opening, &logs, arena.clone(), &slabs)?;
                enable_cache(&settings, process.memory(), |limit| process.enable_cache(limit))?;
                Ok(process)
            };
            return Ok(Box::new(SupervisedEngine::new(Box::new(start), first_delay)?));
        }
        let device: Arc<dyn Device> = match topology.host_route(node).filter(|_| kind == DeviceKind::Host) {
            None => opening.open()?,
            Some(route) => {
                let route = EmulatedRoute {
                    to_device: lanes_of(&lanes, &route.to_device),
                    from_device: lanes_of(&lanes, &route.from_device),
                };
                Arc::new(HostDevice::with_route(node.index, threads, opening.budget(None), Some(route))?)
            }
        };
        // Memory that the first device has pinned is pinned for all devices.
        arena.pin_by(device.pin());
        enable_cache(settings, device.memory(), |limit| {
            device.cache().map_or(Ok(()), |cache| cache.enable_cache(limit))
        })?;
        Ok(Box::new(InProcess::new(device, arena.clone())))
    };
    let open = |node: &DeviceNode| open(node).context(|| format!("opening device {}", node.name));
    topology.devices.iter().map(open).collect()
}

/// Spreads the slabs of the arena over the NUMA nodes of the GPUs, and logs where GPUs are. Does
/// nothing on a machine of one node.
fn place_memory(topology: &Topology, arena: &Arena) {
    let nodes = topology.memory_nodes_of_gpus();
    for gpu in &topology.devices {
        let Some(socket) = topology.node_of_gpu(gpu) else { continue };
        let (node, cpus) = (socket.numa_node.unwrap_or_default(), counted(socket.cpus.len() as u64, "CPU"));
        match socket.cpus.is_empty() {
            true => tracing::warn!("{} is on NUMA node {node}, which has no CPU for this process", gpu.name),
            false => tracing::info!("{} is on NUMA node {node}: its threads run on {cpus} there", gpu.name),
        }
    }
    if !nodes.is_empty() && arena.spread_over(&nodes) {
        let nodes: Vec<String> = nodes.iter().map(u32::to_string).collect();
        tracing::info!("host memory is taken in turn from the NUMA nodes of the GPUs: {}", nodes.join(", "));
    }
}

/// Returns the backing of an arena of `arena_bytes`, so that all processes of devices can map it:
/// files in the directory of the setting, or in a tmpfs that the server mounts. Without either, it
/// is memory of a kind that needs no rights. The log says which.
///
/// # Errors
/// [`Error::Invalid`] for a directory that cannot be the backing.
pub fn arena_backing(settings: &DeviceSettings, topology: &Topology, arena_bytes: u64) -> Result<Backing> {
    let mut own = topology.devices.iter().map(|node| has_own_process(settings, topology, node.kind));
    let is_shared = own.try_fold(false, |any, own| own.map(|own| any || own))?;
    let without_files = || if is_shared { Backing::Memfd } else { Backing::best() };
    let (backing, why) = match settings.arena_directory.as_str() {
        "auto" => match own_tmpfs(is_shared) {
            Ok(backing) => (backing, None),
            Err(why) => (without_files(), Some(why)),
        },
        "none" => (without_files(), None),
        path => (Backing::in_directory(Path::new(path), arena_bytes).context(|| "--arena-directory")?, None),
    };
    let memory = backing.describe();
    match (backing.cost(), why) {
        (Some(cost), Some(why)) => tracing::warn!(
            "host memory is {memory}: {cost}. The server may not mount a tmpfs with huge pages ({}); mount one with \
             huge=always, and name it with --arena-directory",
            why.message()
        ),
        (Some(cost), None) => {
            let remedy = if backing.is_in_files() { "; mount it with huge=always" } else { "" };
            tracing::warn!("host memory is {memory}: {cost}{remedy}");
        }
        (None, _) => tracing::info!("host memory is {memory}"),
    }
    Ok(backing)
}

/// Mounts a tmpfs for the arena: in this process, or else in a process with a user namespace. The
/// latter only serves arenas that several processes map, since others find huge pages without.
fn own_tmpfs(is_shared: bool) -> Result<Backing> {
    Backing::own_tmpfs().or_else(|why| match is_shared {
        true => {
            let in_namespace = tmpfs::mounted_by_process().and_then(Backing::in_tmpfs);
            in_namespace.map_err(|error| Error::Unavailable(format!("{}; {}", why.message(), error.message())))
        }
        false => Err(why),
    })
}

/// Checks that the server may mount a tmpfs with huge pages for its host memory.
///
/// # Errors
/// [`Error::Unavailable`] with the reason.
pub fn check_own_tmpfs() -> Result<()> {
    own_tmpfs(true).map(drop)
}

/// True if devices of a kind have processes of their own.
///
/// # Errors
/// [`Error::Invalid`] for an unknown setting, or one that cannot be met.
fn has_own_process(settings: &DeviceSettings, topology: &Topology, kind: NodeKind) -> Result<bool> {
    let gpus = topology.devices.iter().filter(|node| node.kind == NodeKind::Cuda).count();
    match settings.device_processes.as_str() {
        "auto" => Ok(kind == NodeKind::Cuda && gpus > 1),
        "off" => Ok(false),
        "on" if !topology.emulates_links() => Ok(true),
        "on" => Err(Error::Invalid(
            "--device-processes on: the topology file emulates links, which need all devices in one process; leave out the links, or \
             write off"
                .into(),
        )),
        other => Err(Error::Invalid(format!(
            "--device-processes is {other:?}; write on (a process for each device), off, or auto (a process for each of several GPUs)"
        ))),
    }
}

/// Minimum memory of all slices of the CPU, if the setting leaves it to the server. It is the
/// memory for tables and results divided by this number, and is used in addition to that memory.
const HOST_DEVICES_PART: u64 = 16;

/// Returns the memory of a slice of the CPU, if the topology omits it. Refuses memory for slices if
/// its sum with `arena_bytes`, for tables and results, exceeds what this process may use. Otherwise
/// the system would end the process. Memory sizes of a topology file are not counted, because they
/// stand for another machine.
fn host_device_share(settings: &DeviceSettings, topology: &Topology, arena_bytes: u64) -> Result<u64> {
    let is_by_setting = |node: &&DeviceNode| node.kind == NodeKind::Host && node.memory_bytes.is_none();
    let count = topology.devices.iter().filter(is_by_setting).count() as u64;
    if count == 0 {
        return Ok(0);
    }
    let limit = process_memory_limit()?;
    let free = limit.saturating_sub(arena_bytes);
    let refuse = |what: String, less: &str| {
        let limit = human_bytes(limit);
        Err(Error::Invalid(format!(
            "{what} more than the {limit} that this process may use; ask for {less}, or raise the container's limit"
        )))
    };
    let arena = human_bytes(arena_bytes);
    let Some(bytes) = device_memory_bytes(&settings.device_memory, NodeKind::Host)? else {
        if free < arena_bytes / HOST_DEVICES_PART {
            let both = human_bytes(arena_bytes + arena_bytes / HOST_DEVICES_PART);
            let what = format!(
                "--host-memory is {arena}, and joins on the CPU need memory in addition; the sum, at least {both}, is"
            );
            return refuse(what, "less, such as 90%");
        }
        return Ok((arena_bytes / 4).min(free) / count);
    };
    let devices_bytes = bytes.saturating_mul(count);
    if devices_bytes <= free {
        return Ok(bytes);
    }
    let each = if count > 1 { format!(" for each of {count} slices of the CPU") } else { String::new() };
    let bytes = human_bytes(bytes);
    if devices_bytes > limit {
        return refuse(format!("--device-memory: {bytes}{each} is"), "less");
    }
    let all = human_bytes(devices_bytes.saturating_add(arena_bytes));
    let what = format!("--host-memory is {arena}, and --device-memory is {bytes}{each}; the sum, {all}, is");
    refuse(what, "less of one of them")
}

fn enable_cache(settings: &DeviceSettings, memory: &Budget, keep: impl FnOnce(u64) -> Result<()>) -> Result<()> {
    match cache_bytes(&settings.device_cache, memory.limit_bytes())? {
        0 => Ok(()),
        limit => keep(limit),
    }
}

/// Returns the bytes of a device's memory that cached columns may take. The setting is a share of
/// the memory, a size, or 0.
///
/// # Errors
/// [`Error::Invalid`] names the accepted forms.
pub fn cache_bytes(setting: &str, device_bytes: u64) -> Result<u64> {
    let bytes = match setting.trim().strip_suffix('%') {
        Some(share) => share
            .trim()
            .parse::<f64>()
            .ok()
            .filter(|share| (0.0..=100.0).contains(share))
            .map(|share| (device_bytes as f64 * share / 100.0) as u64)
            .ok_or_else(|| Error::Invalid(format!("{setting:?} is not a share of memory, from 0% to 100%"))),
        // A few bytes would never hold any column. The setting for no cache is 0.
        None => parse_bytes(setting).and_then(|bytes| match bytes {
            0 => Ok(0),
            bytes => check_at_least(setting, bytes, DEVICE_MEMORY_MIN).map(|()| bytes),
        }),
    };
    Ok(bytes.context(|| "--device-cache")?.min(device_bytes))
}

/// Lanes that emulate one link of the topology, for all devices whose transfers pass it.
struct LinkLanes {
    forward: Lane,
    backward: Lane,
    /// Lane of both directions together, if that sum is limited.
    total: Option<Lane>,
}

impl LinkLanes {
    fn new(link: &Link) -> Result<Self> {
        let lane = |rate| {
            Lane::new(rate).context(|| format!("the link between {:?} and {:?}", link.between[0], link.between[1]))
        };
        Ok(Self {
            forward: lane(link.forward_rate)?,
            backward: lane(link.backward_rate)?,
            total: link.total_rate.map(lane).transpose()?,
        })
    }
}

/// Returns the lanes that a transfer over the given hops takes.
fn lanes_of(lanes: &[LinkLanes], hops: &[Hop]) -> Vec<Lane> {
    let of_hop = |hop: &Hop| {
        let link = &lanes[hop.link];
        let one_way = if hop.forward { &link.forward } else { &link.backward };
        [one_way.clone()].into_iter().chain(link.total.clone())
    };
    hops.iter().flat_map(of_hop).collect()
}

/// Describes the number of GPUs, to follow "there".
fn gpus_found(count: u16) -> String {
    match count {
        0 => format!("is no GPU that this process can use: {}", why_no_gpu()),
        1 => "is one GPU".into(),
        count => format!("are {count} GPUs"),
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use arrow::buffer::Buffer;
    use clap::Parser;

    use super::super::device_rates::*;
    use super::*;
    use crate::device::CancelFlag;
    use crate::planner::{GangRates, Rates, Target};
    use crate::service::Settings;
    use crate::topology::{NvmlRemote, SharedLinks, nvml_answers, pci_tree};

    #[derive(Parser)]
    struct CommandLine {
        #[command(flatten)]
        settings: Settings,
    }

    fn arena() -> Arena {
        Arena::new(Budget::new("host memory", "--host-memory", 1 << 30))
    }

    #[test]
    fn gpus_of_a_machine_share_the_links_that_its_files_show() {
        let paths = &pci_tree::DGX_A100[2..6];
        let root = pci_tree::tree(paths, "16.0 GT/s PCIe\n", "16\n");
        for (node, cpus) in [("node0", "0-1\n"), ("node1", "2-3\n")] {
            let folder = root.path().join("sys/devices/system/node").join(node);
            std::fs::create_dir_all(&folder).unwrap();
            std::fs::write(folder.join("cpulist"), cpus).unwrap();
        }
        let gpu = |at: usize| GpuIdentity {
            uuid: Some(format!("GPU-{at}")),
            pci_address: paths[at].rsplit('/').next().unwrap().into(),
            numa_node: Some(at as u32 / 2),
        };
        let gpus: Vec<GpuIdentity> = (0..4).map(gpu).collect();
        let mut topology = Topology::cuda(4);
        describe_gpus(&mut topology, root.path(), &gpus, &[]);
        assert_eq!(topology.devices[3].uuid.as_deref(), Some("GPU-3"));
        let ends: Vec<String> = topology.links.iter().map(|link| link.between.join(" ")).collect();
        assert_eq!(ends, ["cpu0 pcie0", "pcie0 cuda:0", "pcie0 cuda:1", "cpu1 pcie1", "pcie1 cuda:2", "pcie1 cuda:3"]);
        let expected = "sysfs shows the PCIe links of 4 of 4 GPUs, 2 PCIe switches with several of them";
        assert_eq!(origin_of_links(&topology), expected);
        let mut hidden = Topology::cuda(4);
        describe_gpus(&mut hidden, Path::new("/nowhere"), &gpus, &[]);
        assert!(hidden.links.is_empty() && origin_of_links(&hidden).contains("does not show"));

        let seen = |remote: NvmlRemote| nvml_answers::seen(4, |_| nvml_answers::links(12, 4, remote.clone()));
        for (remote, links_from, told) in [
            (NvmlRemote::Switch, &["sysfs", "NVML"][..], "; NVML shows their NVLinks"),
            (NvmlRemote::Unknown, &["sysfs"][..], "; NVML hides what their NVLinks lead to"),
        ] {
            let mut topology = Topology::cuda(4);
            describe_gpus(&mut topology, root.path(), &gpus, &seen(remote.clone()));
            assert_eq!(topology.links_from, links_from);
            assert_eq!(origin_of_nvlinks(&topology, Ok(seen(remote))), told);
            assert_eq!(origin_of_links(&topology), expected);
        }
        let without = Err(Error::Unavailable("no library".into()));
        assert_eq!(origin_of_nvlinks(&topology, without), "; NVML cannot be asked for NVLinks: no library");

        // Links that the machine has need no emulation, which would need one process.
        let on = CommandLine::parse_from(["dovetail", "--device-processes=on"]).settings.of_devices();
        assert_eq!(has_own_process(&on, &topology, NodeKind::Cuda), Ok(true));
        assert!(has_own_process(&on, &Topology::fixture("dgx-a100"), NodeKind::Host).is_err());

        // A pair behind one switch shares its link. One GPU has the rate that was measured.
        let measured = Rates { copy_in: 24e9, copy_out: 24e9, ..Rates::host(1) };
        let links = SharedLinks::new(topology.with_measured_host_rates(&|_| Some([24e9; 2]), None));
        let rates = DeviceRates::measured_now(measured).linked_by(Arc::new(links));
        let of = |gpus: &[u16]| {
            let ids: Vec<DeviceId> = gpus.iter().map(|&index| DeviceId { kind: DeviceKind::Cuda, index }).collect();
            let (each, all) = rates.of_set(&ids);
            (each.copy_in, all.host_memory)
        };
        assert_eq!(of(&[0]), (24e9, 48e9));
        assert_eq!(of(&[0, 1]), (12e9, 48e9));
        assert_eq!(of(&[0, 2]), (24e9, 96e9));
    }

    #[test]
    fn windows_of_unlike_devices_have_one_size() {
        let text = r#"
            name = "unlike"
            [[socket]]
            name = "cpu0"
            [[device]]
            name = "host:0"
            memory = "64MiB"
            [[device]]
            name = "host:1"
            memory = "3MiB"
            [[device]]
            name = "host:2"
        "#;
        let settings = CommandLine::parse_from(["dovetail"]).settings.of_devices();
        let topology = Topology::parse(text).unwrap();
        let mut devices = open_devices(&settings, &topology, &arena()).unwrap();
        let device = |engine: &dyn Engine| engine.device().expect("it is in this process");
        let windows = devices.iter().map(|engine| device(&**engine).peers().unwrap().window_bytes());
        assert_eq!(windows.collect::<Vec<_>>(), [(3 << 20) / 16; 3]);
        super::super::gang_rates::set_link_rates(None, true, &topology, &mut devices);
        assert!(devices.iter().all(|engine| engine.rates().links.is_some()), "their links are measured");
    }

    /// Measures the time of copying 100 kB to each of two devices at once, as a lower bound of what
    /// the links allow.
    fn seconds_for_both(link: &str) -> Duration {
        let text = format!(
            r#"
            name = "two behind a switch"
            [[socket]]
            name = "cpu0"
            [[switch]]
            name = "plx"
            [[device]]
            name = "host:0"
            threads = 1
            memory = "3MiB"
            [[device]]
            name = "host:1"
            threads = 1
            [[link]]
            between = ["cpu0", "plx"]
            {link}
            [[link]]
            between = ["plx", "host:0"]
            rate = "10GB/s"
            [[link]]
            between = ["plx", "host:1"]
            rate = "10GB/s"
            "#
        );
        let topology = Topology::parse(&text).unwrap();
        let settings = CommandLine::parse_from(["dovetail"]).settings.of_devices();
        let devices = open_devices(&settings, &topology, &arena()).unwrap();
        let devices: Vec<_> = devices.iter().map(|engine| engine.device().expect("it is in this process")).collect();
        let setting_of = |device: &Arc<dyn Device>| Target::of(&**device, Rates::host(1)).memory_setting;
        assert!(
            setting_of(&devices[0]).contains("topology file"),
            "its memory is in the file, and so is what raises it"
        );
        assert_eq!(setting_of(&devices[1]), "the server's --device-memory");
        let start = Instant::now();
        std::thread::scope(|scope| {
            for device in &devices {
                scope.spawn(|| {
                    let stream = device.stream(CancelFlag::new()).unwrap();
                    device.copy_in(&[Buffer::from_vec(vec![1u8; 100_000])], &stream).unwrap();
                });
            }
        });
        start.elapsed()
    }

    #[test]
    fn devices_behind_one_link_share_its_rates() {
        assert!(seconds_for_both(r#"rate = "1MB/s""#) >= Duration::from_millis(200));
        assert!(seconds_for_both("rate = \"10GB/s\"\ntotal = \"1MB/s\"") >= Duration::from_millis(200));
    }

    #[test]
    fn rates_are_measured_once_saved_and_measured_again_on_request() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("rates.json");
        let flag = format!("--rates-file={}", file.display());
        let start = |flags: &[&str]| {
            let flags = ["dovetail", &flag].into_iter().chain(flags.iter().copied());
            let settings = CommandLine::parse_from(flags).settings.of_devices();
            let topology = topology(&settings).unwrap();
            let mut devices = open_devices(&settings, &topology, &arena()).unwrap();
            set_rates(&settings, &topology, &mut devices, &|_| ());
            devices.iter().map(|device| device.rates().clone()).collect::<Vec<_>>()
        };
        let first = start(&["--devices=host:2"]);
        assert!(first.iter().all(|rates| rates.kept_in.is_none() && rates.measured.is_some()));
        assert_eq!(first[0].values, first[1].values, "devices that are alike are measured once");
        let second = start(&["--devices=host:2"]);
        assert!(second.iter().all(|rates| rates.kept_in.as_ref() == Some(&file)));
        // JSON may round the last digit.
        let apart = second[0].values.copy_in / first[0].values.copy_in - 1.0;
        assert!(apart.abs() < 1e-12, "{:?} was kept as {:?}", first[0].values, second[0].values);
        let of_gang =
            |rates: &DeviceRates| rates.of_set(&[0, 1].map(|index| DeviceId { kind: DeviceKind::Host, index })).1;
        assert_ne!(of_gang(&first[0]), GangRates::assumed(&first[0].values));
        assert!((of_gang(&second[1]).peers / of_gang(&first[0]).peers - 1.0).abs() < 1e-12, "{first:?}, {second:?}");
        assert!(start(&["--devices=host:2", "--device-memory=64MiB"])[0].kept_in.is_none(), "another model");
        assert!(start(&["--devices=host:2", "--recalibrate"])[0].kept_in.is_none());
        let kept = std::fs::read_to_string(&file).unwrap();
        std::fs::write(&file, &kept[..kept.len() / 2]).unwrap();
        assert!(start(&["--devices=host:2"])[0].kept_in.is_none());
        assert!(start(&["--devices=host:2"])[0].kept_in.is_some(), "the file was not written over");
    }

    #[test]
    fn rates_that_cannot_be_measured_are_not_saved() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("rates.json");
        let flags = ["dovetail", "--device-memory=64KiB", &format!("--rates-file={}", file.display())];
        let settings = CommandLine::parse_from(flags).settings.of_devices();
        let topology = topology(&settings).unwrap();
        let mut devices = open_devices(&settings, &topology, &arena()).unwrap();
        set_rates(&settings, &topology, &mut devices, &|_| ());
        assert_eq!(devices[0].rates().measured, None);
        assert!(!file.exists());
    }

    #[test]
    fn the_cache_folder_is_the_users_own_or_none() {
        let folder =
            |cache: Option<&str>, home: Option<&str>| cache_folder(cache.map(Into::into), home.map(Into::into));
        assert_eq!(folder(Some("/c"), Some("/home/a")), Some("/c".into()));
        assert_eq!(folder(Some("relative"), Some("/home/a")), Some("/home/a/.cache".into()));
        assert_eq!(folder(Some(""), None), None);
        assert_eq!(folder(None, Some("")), None);
        assert_eq!(rates_file("none"), None);
        assert_eq!(rates_file("/r.json"), Some("/r.json".into()));
    }

    #[test]
    fn devices_are_named_by_kind_and_number() {
        let of = |devices: &str| {
            topology(&CommandLine::parse_from(["dovetail", "--devices", devices]).settings.of_devices())
        };
        assert_eq!(of("host:3").unwrap().devices.len(), 3);
        let there = format!("there {}", gpus_found(gpu_count().unwrap()));
        for wrong in ["host:0", "host:65535", "host:-1", "host:", "gpu", "gpu:5", "0", "auto:1", "cuda:-1", "cuda:0"] {
            let refused = of(wrong).unwrap_err();
            assert!(refused.message().contains("--devices") && refused.message().contains("1024"), "{refused}");
            let names_gpus = wrong.contains("cuda") || wrong.contains("gpu");
            assert_eq!(refused.message().ends_with(&format!("; {there}")), names_gpus, "{refused}");
        }
        let refused = of("cuda:65535").unwrap_err();
        assert!(refused.message().ends_with(&format!("and {there}; write auto to use the devices found")), "{refused}");
    }

    #[test]
    fn a_list_of_devices_has_each_kind_once() {
        use Asked::{Gpus, Slices};
        let sound: [(&str, &[Asked]); 6] = [
            ("auto", &[]),
            ("cuda", &[Gpus(None)]),
            ("cuda:2", &[Gpus(Some(2))]),
            ("host:3", &[Slices(3)]),
            ("cuda:1,host:1", &[Gpus(Some(1)), Slices(1)]),
            ("host:1024, cuda", &[Slices(1024), Gpus(None)]),
        ];
        for (setting, asked) in sound {
            assert_eq!(parse_devices(setting).as_deref(), Ok(asked), "{setting}");
        }
        for (setting, why) in [
            ("cuda:1,cuda:1", ", which names cuda twice"),
            ("cuda,cuda:1", ", which names cuda twice"),
            ("host:1,cuda:1,host:2", ", which names host twice"),
            ("host:0", ""),
            ("cuda:1,host:0", ", and its entry \"host:0\" names no devices"),
            ("cuda:1,host", ", and its entry \"host\" names no devices"),
            ("auto,host:1", ", and auto takes no other entry"),
            ("host:1,auto", ", and auto takes no other entry"),
            ("cuda:1,", ", with an empty entry"),
            (",", ", with an empty entry"),
            ("", ""),
        ] {
            assert_eq!(parse_devices(setting), Err(why.to_string()), "{setting}");
            let refused =
                topology(&CommandLine::parse_from(["dovetail", &format!("--devices={setting}")]).settings.of_devices());
            let told = refused.unwrap_err().message().to_string();
            assert!(told.starts_with(&format!("--devices is {setting:?}{why}; write auto, cuda")), "{told}");
            assert_eq!(told.contains("as in cuda:1,host:1; there "), setting.contains("cuda"), "{told}");
        }
    }

    #[test]
    fn each_kind_of_device_has_its_own_memory_setting() {
        let (host, cuda) = (NodeKind::Host, NodeKind::Cuda);
        let of = |setting: &str| [host, cuda].map(|kind| device_memory_bytes(setting, kind).unwrap());
        assert_eq!(of("auto"), [None, None]);
        assert_eq!(of("64MiB"), [Some(64 << 20); 2]);
        assert_eq!(of("host=64MiB"), [Some(64 << 20), None]);
        assert_eq!(of("cuda=auto, host=64MiB"), [Some(64 << 20), None]);
        assert_eq!(of("cuda=1GiB,host=64MiB"), [Some(64 << 20), Some(1 << 30)]);
        for (wrong, words) in [
            ("much", "not a size"),
            ("4", "4 B"),
            ("host=much", "not a size"),
            ("host=1GiB,cuda=4", "4 B"),
            ("gpu=1GiB", "as in cuda=auto,host=8GiB"),
            ("host=1GiB,host=2GiB", "each kind once"),
            ("host=1GiB,2GiB", "a size for all, or each kind once"),
        ] {
            let refused = [host, cuda].map(|kind| device_memory_bytes(wrong, kind).unwrap_err());
            assert_eq!(refused[0], refused[1], "what is wrong is wrong for any kind");
            let told = refused[0].message();
            assert!(told.contains("--device-memory") && told.contains(words), "{wrong}: {told}");
        }
    }

    #[test]
    fn slices_of_the_cpu_may_not_exceed_the_memory_of_the_process() {
        let limit = process_memory_limit().unwrap();
        let open = |slices: u64, bytes: u64| {
            let flags = [format!("--devices=host:{slices}"), format!("--device-memory={bytes}B")];
            let settings =
                CommandLine::parse_from(["dovetail".to_string()].into_iter().chain(flags)).settings.of_devices();
            open_devices(&settings, &topology(&settings).unwrap(), &arena()).map(drop)
        };
        let arena_bytes = arena().budget().limit_bytes();
        open(1, limit - arena_bytes).unwrap();
        for (slices, bytes) in [(1, limit + (1 << 30)), (2, limit / 2 + (1 << 30))] {
            let Error::Invalid(told) = open(slices, bytes).unwrap_err() else { panic!("another kind of error") };
            assert!(told.starts_with("--device-memory: ") && told.contains("that this process may use"), "{told}");
        }
        // Each of the two would fit alone.
        let Error::Invalid(told) = open(1, limit).unwrap_err() else { panic!("another kind of error") };
        let [device, both] = [limit, limit + arena_bytes].map(human_bytes);
        let expected = format!(
            "--host-memory is 1.0 GiB, and --device-memory is {device}; the sum, {both}, is more than the {device} "
        );
        assert!(told.starts_with(&expected), "{told}");
        // The memory setting of a kind without devices does not matter.
        let cuda = CommandLine::parse_from(["dovetail", "--devices=host:1", "--device-memory=cuda=9000TiB"])
            .settings
            .of_devices();
        open_devices(&cuda, &topology(&cuda).unwrap(), &arena()).unwrap();
    }

    #[test]
    fn prepared_memory_is_bounded_by_the_arena_and_by_the_gpus() {
        let of = |setting: &str, gpus_bytes: u64| prefault_bytes(setting, 64 << 30, gpus_bytes);
        assert_eq!(of("auto", 0), Ok(0), "nothing on the CPU");
        assert_eq!(of("auto", 8 << 30), Ok(8 << 30));
        assert_eq!(of("auto", 80 << 30), Ok(16 << 30));
        assert_eq!((of("all", 0), of("none", 80 << 30)), (Ok(64 << 30), Ok(0)));
        assert_eq!((of("50%", 0), of(" 3GiB ", 0), of("0", 0)), (Ok(32 << 30), Ok(3 << 30), Ok(0)));
        for (wrong, words) in [
            ("65GiB", "--prefault: 65GiB is more than the 64.0 GiB of --host-memory"),
            ("110%", "--prefault: write auto, all, none, a size, or a share of --host-memory such as 50%: "),
            ("much", "--prefault: write auto, all, none, a size"),
            ("", "--prefault: write auto"),
        ] {
            let Err(Error::Invalid(text)) = of(wrong, 0) else { panic!("{wrong:?} was accepted") };
            assert!(text.starts_with(words), "{text}");
        }
    }

    #[test]
    fn the_log_names_the_gpus_that_run_joins_or_the_reason_for_none() {
        let said = |flags: &[&str]| {
            let flags = ["dovetail"].into_iter().chain(flags.iter().copied());
            let settings = CommandLine::parse_from(flags).settings.of_devices();
            let topology = topology(&settings).unwrap();
            gpus_used(&settings, &open_devices(&settings, &topology, &arena()).unwrap())
        };
        assert_eq!(said(&["--devices=host:2"]), "joins run on no GPU: --devices host:2 asks for none");
        let auto = said(&[]);
        match gpu_count().unwrap() {
            0 => assert_eq!(auto, format!("joins run on the CPU: there {}", gpus_found(0))),
            1 => assert!(auto.starts_with("joins run on 1 of 1 GPU found: cuda:0 ("), "{auto}"),
            gpus => assert!(auto.starts_with(&format!("joins run on {gpus} of {gpus} GPUs found: ")), "{auto}"),
        }
    }

    #[test]
    fn an_unreadable_topology_file_is_reported_in_plain_words() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("topology.toml");
        let refused = || {
            let flag = format!("--topology={}", file.display());
            topology(&CommandLine::parse_from(["dovetail", &flag]).settings.of_devices()).unwrap_err()
        };
        let reading = format!("reading the topology file {}: ", file.display());
        assert_eq!(refused(), Error::Invalid(format!("{reading}there is no such file")));
        std::fs::write(&file, [0xff]).unwrap();
        assert_eq!(refused(), Error::Invalid(format!("{reading}it is not UTF-8 text")));
    }
}
