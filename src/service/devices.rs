//! From the settings to the devices that joins run on, and the host memory that everything lives in.

use std::sync::Arc;

use super::settings::Settings;
use crate::device::Device;
use crate::device::host::{EmulatedLink, HostDevice};
use crate::memory::{Budget, parse_bytes, parse_memory_setting, process_memory_limit};
use crate::topology::{DeviceNode, NodeKind, Topology};
use crate::{Context, Error, Result};

/// The bytes of host memory that a setting allows: a size, or a share of what this process may use.
///
/// # Errors
/// [`Error::Invalid`] with the accepted forms.
pub fn host_memory_bytes(setting: &str) -> Result<u64> {
    parse_memory_setting(setting, process_memory_limit()?).context(|| "host_memory")
}

/// What the settings say the host is made of: a topology file, or the CPU in slices.
///
/// # Errors
/// [`Error::Invalid`] for a setting that names no devices, or a file that describes none.
pub fn topology(settings: &Settings) -> Result<Topology> {
    if let Some(path) = &settings.topology {
        let text = std::fs::read_to_string(path)
            .map_err(|error| Error::Invalid(format!("reading the topology file {}: {error}", path.display())))?;
        return Topology::parse(&text).context(|| format!("the topology file {}", path.display()));
    }
    let count = match settings.devices.as_str() {
        // Without a GPU the whole CPU is one device: a join gets all cores, and the queue decides who is next.
        "auto" => Some(1),
        other => other.strip_prefix("host:").and_then(|count| count.parse().ok()).filter(|&count| count > 0),
    };
    let count = count.ok_or_else(|| {
        Error::Invalid(format!("devices is {:?}; write auto, or host:N for the CPU in N slices", settings.devices))
    })?;
    Ok(Topology::host(count))
}

/// Opens the devices of a topology. What it does not say comes from the settings: an equal share of the CPU's threads, and
/// for memory the setting, or an equal share of a quarter of host memory.
///
/// # Errors
/// [`Error::Invalid`] for a setting that cannot be met; [`Error::Unsupported`] for a kind of device that this build has
/// not; what opening a device answers.
pub fn open_devices(settings: &Settings, topology: &Topology, host_memory_bytes: u64) -> Result<Vec<Arc<dyn Device>>> {
    let count = topology.devices.len();
    if count == 0 {
        return Err(Error::Invalid("the topology describes no device that joins could run on".into()));
    }
    let memory_share = match settings.device_memory.as_str() {
        "auto" => host_memory_bytes / 4 / count as u64,
        size => parse_bytes(size).context(|| "device_memory")?,
    };
    let cpu_threads = std::thread::available_parallelism().map_or(1, usize::from);
    let open = |node: &DeviceNode| -> Result<Arc<dyn Device>> {
        if node.kind != NodeKind::Host {
            return Err(Error::Unsupported(format!(
                "device {} of the topology is a GPU, which this build cannot use; describe it as a host device to emulate it",
                node.name
            )));
        }
        let threads = node.threads.unwrap_or((cpu_threads / count).max(1));
        let memory = Budget::new(
            format!("memory of device {}", node.name),
            "--device-memory",
            node.memory_bytes.unwrap_or(memory_share),
        );
        let link = topology.host_link(node).map(|link| EmulatedLink {
            to_device_bytes_per_second: link.to_device_rate,
            from_device_bytes_per_second: link.from_device_rate,
        });
        let device =
            HostDevice::new(node.index, threads, memory, link).context(|| format!("opening device {}", node.name))?;
        Ok(Arc::new(device))
    };
    topology.devices.iter().map(open).collect()
}
