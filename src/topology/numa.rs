//! NUMA nodes of this machine, from the system's files, and the nodes of its GPUs.
//!
//! A node is a CPU with the memory attached to it. Where there are several, a GPU copies fastest
//! from and to the memory of its own node, and threads that serve it run best on the CPUs there.

use std::collections::BTreeSet;
use std::path::Path;

use super::{DeviceNode, NodeKind, Socket, Topology};

/// A NUMA node with CPUs. Nodes without CPUs are the memory of devices.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NumaNode {
    pub index: u32,
    pub cpus: BTreeSet<u32>,
    pub memory_bytes: Option<u64>,
}

/// NUMA nodes of a machine, and what this process may use of them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NumaNodes {
    pub nodes: Vec<NumaNode>,
    /// CPUs on which this process may run.
    pub allowed_cpus: BTreeSet<u32>,
    /// Nodes whose memory this process may take.
    pub allowed_nodes: BTreeSet<u32>,
}

/// Reads a list of numbers such as `0-3,8`, the form of the system's files.
pub fn number_list(list: &str) -> BTreeSet<u32> {
    let range = |part: &str| -> Option<std::ops::RangeInclusive<u32>> {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        Some(first.trim().parse().ok()?..=last.trim().parse().ok()?)
    };
    list.split(',').filter_map(range).flatten().collect()
}

/// Returns the text of a file under `root`. `None` if it cannot be read.
pub(super) fn text(root: &Path, path: &str) -> Option<String> {
    Some(std::fs::read_to_string(root.join(path)).ok()?.trim().to_owned())
}

impl NumaNodes {
    /// Reads the files under `root`, which is `/` except in tests.
    pub fn read(root: &Path) -> Self {
        let folder = "sys/devices/system/node";
        let node = |name: String| {
            let index = name.strip_prefix("node")?.parse().ok()?;
            let cpus = number_list(&text(root, &format!("{folder}/{name}/cpulist"))?);
            let facts = text(root, &format!("{folder}/{name}/meminfo")).unwrap_or_default();
            let total = facts.lines().find_map(|line| line.split_once("MemTotal:"));
            let kibibytes = total.and_then(|(_, rest)| rest.split_whitespace().next()?.parse::<u64>().ok());
            Some(NumaNode { index, cpus, memory_bytes: kibibytes.map(|kibibytes| kibibytes << 10) })
        };
        let entries = std::fs::read_dir(root.join(folder)).into_iter().flatten();
        let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
        let mut nodes: Vec<NumaNode> = names.filter_map(node).filter(|node| !node.cpus.is_empty()).collect();
        nodes.sort_by_key(|node| node.index);
        let status = text(root, "proc/self/status").unwrap_or_default();
        let list = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).map(number_list);
        let all_nodes = || nodes.iter().map(|node| node.index).collect();
        Self {
            allowed_cpus: list("Cpus_allowed_list:").unwrap_or_default(),
            allowed_nodes: list("Mems_allowed_list:").unwrap_or_else(all_nodes),
            nodes,
        }
    }

    /// Returns the node of a device on the PCI bus, by its address. Virtual machines often do not
    /// say.
    pub fn of_pci_device(root: &Path, address: &str) -> Option<u32> {
        text(root, &format!("sys/bus/pci/devices/{address}/numa_node"))?.parse().ok()
    }
}

impl Topology {
    /// Describes the nodes of the machine as sockets, with each GPU at the socket of its node,
    /// which `node_of` returns. Does nothing for a machine of one node.
    pub fn place_on_nodes(&mut self, machine: &NumaNodes, node_of: impl Fn(&DeviceNode) -> Option<u32>) {
        if machine.nodes.len() < 2 {
            return;
        }
        let socket = |node: &NumaNode| Socket {
            name: format!("cpu{}", node.index),
            memory_bytes: node.memory_bytes,
            memory_rate: None,
            numa_node: Some(node.index),
            cpus: node.cpus.intersection(&machine.allowed_cpus).copied().collect(),
            gives_memory: machine.allowed_nodes.contains(&node.index),
        };
        self.sockets = machine.nodes.iter().map(socket).collect();
        for device in self.devices.iter_mut().filter(|device| device.kind == NodeKind::Cuda) {
            let node = node_of(device).filter(|&index| machine.nodes.iter().any(|node| node.index == index));
            device.socket = node.map(|index| format!("cpu{index}"));
        }
    }

    /// Returns the socket of a GPU's NUMA node. `None` if the machine has one node, or does not
    /// say.
    pub fn node_of_gpu(&self, gpu: &DeviceNode) -> Option<&Socket> {
        let name = gpu.socket.as_ref().filter(|_| gpu.kind == NodeKind::Cuda)?;
        self.sockets.iter().find(|socket| socket.name == *name && socket.numa_node.is_some())
    }

    /// Returns the NUMA nodes of all GPUs whose memory this process may take, in order.
    pub fn memory_nodes_of_gpus(&self) -> Vec<u32> {
        let sockets = self.devices.iter().filter_map(|device| self.node_of_gpu(device));
        let nodes: BTreeSet<u32> = sockets.filter(|socket| socket.gives_memory).filter_map(|s| s.numa_node).collect();
        nodes.into_iter().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Files of a host of two sockets, seen by a process that may use half of the CPUs of each.
    const FILES: &[(&str, &str)] = &[
        ("sys/devices/system/node/node0/cpulist", "0-55\n"),
        ("sys/devices/system/node/node0/meminfo", "Node 0 MemTotal:  1048576 kB\nNode 0 MemFree:  1024 kB\n"),
        ("sys/devices/system/node/node1/cpulist", "56-111\n"),
        ("sys/devices/system/node/node2/cpulist", "\n"),
        ("proc/self/status", "Cpus_allowed_list:\t0-27,56-83\nMems_allowed_list:\t1-2\n"),
        ("sys/bus/pci/devices/0000:9a:00.0/numa_node", "1\n"),
        ("sys/bus/pci/devices/0000:00:06.0/numa_node", "-1\n"),
    ];

    fn machine() -> (tempfile::TempDir, NumaNodes) {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in FILES {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        let nodes = NumaNodes::read(root.path());
        (root, nodes)
    }

    #[test]
    fn nodes_are_read_with_what_the_process_may_use() {
        let (root, machine) = machine();
        let found: Vec<_> = machine.nodes.iter().map(|node| (node.index, node.cpus.len(), node.memory_bytes)).collect();
        // The last node is the memory of a device.
        assert_eq!(found, [(0, 56, Some(1 << 30)), (1, 56, None)]);
        assert_eq!((machine.allowed_cpus.len(), machine.allowed_nodes), (56, BTreeSet::from([1, 2])));
        let of = |address| NumaNodes::of_pci_device(root.path(), address);
        assert_eq!([of("0000:9a:00.0"), of("0000:00:06.0"), of("0000:ff:00.0")], [Some(1), None, None]);
        assert_eq!(NumaNodes::read(Path::new("/nowhere")), NumaNodes::default());
    }

    #[test]
    fn gpus_are_at_the_socket_of_their_node() {
        let (_root, machine) = machine();
        let mut topology = Topology::of(&[(NodeKind::Cuda, 3), (NodeKind::Host, 1)]);
        topology.place_on_nodes(&machine, |gpu| [Some(1), Some(0), None][usize::from(gpu.index)]);
        let nodes: Vec<Option<u32>> =
            topology.devices.iter().map(|device| topology.node_of_gpu(device)?.numa_node).collect();
        assert_eq!(nodes, [Some(1), Some(0), None, None]);
        assert_eq!(topology.sockets[1].cpus, (56..84).collect::<Vec<u32>>());
        // The process may take no memory of the first node.
        assert_eq!(topology.memory_nodes_of_gpus(), [1]);
        let text = topology.to_string();
        assert!(
            text.contains("cpu1, NUMA node 1\n├─ cuda:0") || text.contains("cpu1, NUMA node 1\n└─ cuda:0"),
            "{text}"
        );
    }

    #[test]
    fn a_machine_of_one_node_stays_as_it_is() {
        let mut topology = Topology::cuda(2);
        let one = NumaNodes { nodes: vec![NumaNode::default()], ..NumaNodes::default() };
        topology.place_on_nodes(&one, |_| Some(0));
        assert_eq!(topology, Topology::cuda(2));
        assert!(topology.memory_nodes_of_gpus().is_empty());
    }
}
