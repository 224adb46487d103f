//! The topology: the nodes of the host, and their links.
//!
//! ```text
//!            ┌─ host:0 ─┐                      nodes:  sockets, switches, devices
//!   cpu0 ────┤          ├──── (peer link)      edges:  links, with bytes per second each way
//!    │       └─ host:1 ─┘
//!   (X-Bus)
//!    │       ┌─ host:2 ─┐
//!   cpu1 ────┤          ├──── (peer link)
//!            └─ host:3 ─┘
//! ```
//!
//! A topology is read from a TOML file ([`Topology::parse`] documents the form), or made for the
//! CPU and the GPUs of the machine ([`Topology::of`]). It only describes. The code that opens
//! devices gives them the memory, threads and link rates of the topology. So host devices can
//! behave like the GPUs of another machine. [`Topology::add_pcie_links`] and
//! [`Topology::add_nvlinks`] add the links and switches of a machine's own GPUs. Measured rates
//! take the place of described ones ([`Topology::with_measured_host_rates`]), and show the links
//! that the machine hides ([`Topology::with_measured_links`]). [`Topology::to_svg`] draws a
//! topology.
//!
//! This room knows nothing of devices, joins or tables.

mod file;
mod measured;
mod numa;
mod nvlink;
mod pcie;
mod render;
mod route;
mod svg;
mod together;

use std::fmt;

use serde::{Deserialize, Serialize};

pub use numa::{NumaNode, NumaNodes, number_list};
pub use nvlink::{NvmlGpu, NvmlLink, NvmlRemote};
pub use pcie::{PciPath, lane_rate};
pub use route::Route;
pub use together::{SharedLinks, Together};

/// The nodes and links of one host.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Topology {
    pub name: String,
    /// In the order given.
    pub sockets: Vec<Socket>,
    /// Nodes that link devices without computing, such as PCIe switches and NVSwitch.
    pub switches: Vec<Switch>,
    pub devices: Vec<DeviceNode>,
    pub links: Vec<Link>,
    /// Origins of the links: `topology file`, or `sysfs`, `NVML` and `measured rates`. Empty if
    /// there are none.
    #[serde(default)]
    pub links_from: Vec<String>,
}

/// A CPU with the memory attached to it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Socket {
    /// Unique among all nodes.
    pub name: String,
    /// `None` when it is not known.
    pub memory_bytes: Option<u64>,
    /// Bytes per second; `None` when it is not known.
    pub memory_rate: Option<f64>,
    /// Number of the NUMA node, on a machine of several nodes.
    pub numa_node: Option<u32>,
    /// CPUs of the NUMA node on which this process may run.
    #[serde(skip)]
    pub cpus: Vec<u32>,
    /// True if this process may take memory of the NUMA node.
    #[serde(skip)]
    pub gives_memory: bool,
}

/// A switch.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Switch {
    /// Unique among all nodes.
    pub name: String,
    /// Model: `PCIe 5`, `NVSwitch 3`.
    pub kind: String,
}

/// A device, as the topology describes it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DeviceNode {
    /// Kind and number, as requests name it: `host:0`.
    pub name: String,
    pub kind: NodeKind,
    /// Number among the devices of its kind.
    pub index: u16,
    /// Model of a GPU, such as `NVIDIA H200`. `None` if it is not known yet, and for a host device.
    pub model: Option<String>,
    /// UUID of a GPU, which names it in every process. `None` for a host device.
    pub uuid: Option<String>,
    /// CPU threads of a host device; `None`: an equal share of the machine's threads.
    pub threads: Option<usize>,
    /// `None`: set by the server's settings.
    pub memory_bytes: Option<u64>,
    /// Name of the socket whose host memory the device uses. `None`: the first socket.
    pub socket: Option<String>,
}

/// The kinds of device that a topology can name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NodeKind {
    /// A slice of the CPU.
    Host,
    Cuda,
}

/// A link between two nodes. Each direction has its rate; both together may be limited as well.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Link {
    /// The two nodes, by name.
    pub between: [String; 2],
    /// Kind of link: `NVLink 2`, `PCIe 5 x16`.
    pub kind: String,
    /// Bytes per second from the first node to the second.
    pub forward_rate: f64,
    /// Bytes per second from the second node to the first.
    pub backward_rate: f64,
    /// Bytes per second in both directions at once. `None`: the sum of both rates.
    pub total_rate: Option<f64>,
}

/// The link of a device to host memory: the narrowest rates on the route.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct HostLink {
    /// Bytes per second from host memory to the device.
    pub to_device_rate: f64,
    /// Bytes per second from the device to host memory.
    pub from_device_rate: f64,
    /// Bytes per second in both directions at once. `None`: the sum of both rates.
    pub total_rate: Option<f64>,
}

/// A link of a route, with the direction of travel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hop {
    /// Index in [`Topology::links`].
    pub link: usize,
    /// True if the hop goes from the link's first node to its second node.
    pub forward: bool,
}

/// The links between host memory and a device, both ways.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostRoute {
    pub to_device: Vec<Hop>,
    pub from_device: Vec<Hop>,
}

impl Topology {
    /// Describes the CPU of this machine in `count` equal slices, without links to emulate.
    pub fn host(count: u16) -> Self {
        Self::of(&[(NodeKind::Host, count)])
    }

    /// Describes the first `count` GPUs of this machine.
    pub fn cuda(count: u16) -> Self {
        Self::of(&[(NodeKind::Cuda, count)])
    }

    /// Describes the given number of devices of each kind of this machine, each kind numbered from
    /// 0: the first GPUs, and the CPU in equal slices.
    pub fn of(kinds: &[(NodeKind, u16)]) -> Self {
        let device = |kind: NodeKind, index: u16| DeviceNode {
            name: format!("{kind}:{index}"),
            kind,
            index,
            model: None,
            uuid: None,
            threads: None,
            memory_bytes: None,
            socket: None,
        };
        Self {
            name: "this machine".into(),
            sockets: vec![Socket { name: "cpu0".into(), ..Socket::default() }],
            devices: kinds.iter().flat_map(|&(kind, count)| (0..count).map(move |index| device(kind, index))).collect(),
            ..Self::default()
        }
    }

    /// True if all nodes have names of their own, and all links are between these nodes.
    pub fn is_whole(&self) -> bool {
        let sockets = self.sockets.iter().map(|socket| &socket.name);
        let nodes = sockets.chain(self.switches.iter().map(|switch| &switch.name));
        let names: Vec<&String> = nodes.chain(self.devices.iter().map(|device| &device.name)).collect();
        let is_known = |name: &String| names.iter().filter(|known| **known == name).count() == 1;
        let has_ends = |link: &Link| link.between[0] != link.between[1] && link.between.iter().all(is_known);
        names.iter().all(|name| is_known(name)) && self.links.iter().all(has_ends)
    }

    /// True if there are links of host devices, which the devices emulate. Links of GPUs are those
    /// of the machine.
    pub fn emulates_links(&self) -> bool {
        let is_emulated = |name: &String| self.device(name).is_some_and(|device| device.kind == NodeKind::Host);
        self.links.iter().flat_map(|link| &link.between).any(is_emulated)
    }

    /// Adds an origin of links, once.
    fn add_origin(&mut self, origin: &str) {
        if !self.links_from.iter().any(|known| known == origin) {
            self.links_from.push(origin.into());
        }
    }

    /// Returns the device with the given name.
    pub fn device(&self, name: &str) -> Option<&DeviceNode> {
        self.devices.iter().find(|device| device.name == name)
    }

    /// Returns the socket that a device belongs to.
    pub fn socket_of(&self, device: &DeviceNode) -> Option<&Socket> {
        match &device.socket {
            Some(name) => self.sockets.iter().find(|socket| socket.name == *name),
            None => self.sockets.first(),
        }
    }

    /// Returns the link from a device's socket to the device. `None` if no link is described, so
    /// that none is emulated.
    pub fn host_link(&self, device: &DeviceNode) -> Option<HostLink> {
        let socket = self.socket_of(device)?;
        let to_device = self.route(&socket.name, &device.name)?;
        let from_device = self.route(&device.name, &socket.name)?;
        let totals = to_device.links.iter().filter_map(|&link| self.links[link].total_rate);
        let total_rate = totals.min_by(f64::total_cmp);
        Some(HostLink { to_device_rate: to_device.rate, from_device_rate: from_device.rate, total_rate })
    }
}

impl Topology {
    /// Returns the links that a device's transfers pass, for emulation. Devices whose routes have a
    /// link in common share its rates. `None` as for [`host_link`](Self::host_link).
    pub fn host_route(&self, device: &DeviceNode) -> Option<HostRoute> {
        let socket = self.socket_of(device)?;
        Some(HostRoute {
            to_device: self.hops(&socket.name, &device.name)?,
            from_device: self.hops(&device.name, &socket.name)?,
        })
    }

    /// Returns the links from one node to another, with the direction of travel. `None` if there is
    /// no route.
    fn hops(&self, from: &str, to: &str) -> Option<Vec<Hop>> {
        let mut node = from;
        let route = self.route(from, to)?;
        let hop = |link: usize| {
            let [first, second] = &self.links[link].between;
            let forward = first == node;
            node = if forward { second } else { first };
            Hop { link, forward }
        };
        Some(route.links.into_iter().map(hop).collect())
    }
}

impl fmt::Display for NodeKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Host => "host",
            Self::Cuda => "cuda",
        })
    }
}

#[cfg(test)]
pub(crate) use nvlink::tests as nvml_answers;
#[cfg(test)]
pub(crate) use pcie::tests as pci_tree;

#[cfg(test)]
impl Topology {
    /// Reads one of the machines in `tests/fixtures/topology`.
    pub(crate) fn fixture(name: &str) -> Self {
        let path = format!("{}/tests/fixtures/topology/{name}.toml", env!("CARGO_MANIFEST_DIR"));
        Self::parse(&std::fs::read_to_string(path).unwrap()).unwrap()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_topology_of_the_machine_itself_has_devices_and_no_emulated_link() {
        let topology = Topology::host(3);
        let names: Vec<&str> = topology.devices.iter().map(|device| device.name.as_str()).collect();
        assert_eq!(names, ["host:0", "host:1", "host:2"]);
        for device in &topology.devices {
            assert_eq!(topology.host_link(device), None);
            assert_eq!(topology.socket_of(device).unwrap().name, "cpu0");
        }
    }

    #[test]
    fn each_kind_is_numbered_from_0_in_the_order_given() {
        let names = |kinds: &[(NodeKind, u16)]| -> Vec<String> {
            Topology::of(kinds).devices.into_iter().map(|device| device.name).collect()
        };
        assert_eq!(names(&[(NodeKind::Cuda, 2), (NodeKind::Host, 1)]), ["cuda:0", "cuda:1", "host:0"]);
        assert_eq!(names(&[(NodeKind::Host, 2), (NodeKind::Cuda, 1)]), ["host:0", "host:1", "cuda:0"]);
        let text = Topology::of(&[(NodeKind::Cuda, 1), (NodeKind::Host, 1)]).to_string();
        assert!(text.contains("├─ cuda:0") && text.contains("└─ host:0"), "{text}");
        assert!(!text.lines().any(|line| line.contains("cuda:0") && line.contains("in host memory")), "{text}");
    }
}
