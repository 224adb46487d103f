//! PCIe links and switches of this machine's GPUs, from the system's files.
//!
//! ```text
//!   /sys/bus/pci/devices/0000:3d:00.0 leads to
//!   /sys/devices/pci0000:3a/0000:3a:00.0/0000:3b:00.0/0000:3c:10.0/0000:3d:00.0
//!                           root port    up           down         GPU
//!                                        └─ ports of a switch ─┘
//! ```
//!
//! GPUs whose paths go through the same bridge below the root port share all links above it. The
//! last bridge that they have in common is their switch. A virtual machine often has its GPUs on
//! the root bus, without a bridge. Such a path has no link with two ends, and nothing is described.

use std::path::Path;

use super::numa::text;
use super::{DeviceNode, Link, NodeKind, Switch, Topology};

/// Origin of these links, for people.
const ORIGIN: &str = "sysfs";

/// Share of a link's raw rate that copies reach. In the machines of `tests/fixtures/topology`,
/// copies over 16 lanes of PCIe 3, 4 and 5 reach 76, 79 and 87 %.
pub(super) const COPY_SHARE: f64 = 0.8;

/// Ports on the path from a root port down to a GPU, which is the last of them.
#[derive(Clone, Debug, PartialEq)]
pub struct PciPath {
    ports: Vec<Port>,
}

/// A bridge or a device. `None`: the system does not say.
#[derive(Clone, Debug, PartialEq)]
struct Port {
    /// Address on the PCI bus.
    name: String,
    /// Most transfers per second of a lane, in 10^9.
    speed: Option<f64>,
    lanes: Option<u32>,
}

impl PciPath {
    /// Reads the path of a device, by its address on the PCI bus, from the files under `root`,
    /// which is `/` except in tests. `None` if the system does not show the device.
    pub fn read(root: &Path, address: &str) -> Option<Self> {
        let folder = root.join("sys/bus/pci/devices").join(address).canonicalize().ok()?;
        let folders = folder.ancestors().map_while(|folder| {
            let name = folder.file_name()?.to_str()?;
            is_address(name).then(|| Port::read(folder, name))
        });
        let mut ports: Vec<Port> = folders.collect();
        ports.reverse();
        (!ports.is_empty()).then_some(Self { ports })
    }

    /// Returns the bridge at a place of the path. `None` for the GPU, and beyond it.
    fn bridge(&self, at: usize) -> Option<&str> {
        let (_, bridges) = self.ports.split_last()?;
        bridges.get(at).map(|port| port.name.as_str())
    }
}

/// True for the name of a PCI device: `0000:3b:00.0`.
fn is_address(name: &str) -> bool {
    let parts: Vec<&str> = name.split([':', '.']).collect();
    let is_number = |part: &&str| !part.is_empty() && part.bytes().all(|digit| digit.is_ascii_hexdigit());
    parts.len() == 4 && parts.iter().all(is_number)
}

impl Port {
    fn read(folder: &Path, name: &str) -> Self {
        // A link without a device behind it has 255 or no lanes.
        let lanes = |file: &str| text(folder, file)?.parse().ok().filter(|lanes| (1..=32).contains(lanes));
        // A link that rests is slow, so the speed of now says nothing. Its width stays.
        Self {
            name: name.into(),
            speed: text(folder, "max_link_speed").and_then(|speed| transfers(&speed)),
            lanes: lanes("max_link_width").into_iter().chain(lanes("current_link_width")).min(),
        }
    }
}

/// Returns the transfers per second of a lane, in 10^9: of `32.0 GT/s PCIe`.
fn transfers(speed: &str) -> Option<f64> {
    speed.split_whitespace().next()?.parse().ok().filter(|transfers| *transfers > 0.0)
}

/// Returns the bytes per second of a PCI Express lane in one direction: of `32.0 GT/s PCIe`.
pub fn lane_rate(speed: &str) -> Option<f64> {
    transfers(speed).map(rate_of_lane)
}

fn rate_of_lane(transfers: f64) -> f64 {
    // Generations 1 and 2 send 10 bits for 8, 3 to 5 send 130 for 128, and 6 sends 256 bytes for
    // 242.
    let share = match transfers {
        t if t < 8.0 => 8.0 / 10.0,
        t if t < 64.0 => 128.0 / 130.0,
        _ => 242.0 / 256.0,
    };
    transfers * 1e9 * share / 8.0
}

/// The narrowest link between ports of a path.
struct Narrowest {
    generation: u32,
    lanes: u32,
    /// Bytes per second that copies reach in each direction.
    rate: f64,
}

impl Narrowest {
    /// Finds the link by the ports at its ends: it is as slow as the slower one, and as narrow as
    /// the narrower one. `None` if no port says how fast or how wide it is.
    fn of(ports: &[Port]) -> Option<Self> {
        let speed = ports.iter().filter_map(|port| port.speed).min_by(f64::total_cmp)?;
        let lanes = ports.iter().filter_map(|port| port.lanes).min()?;
        let generation = match speed {
            s if s < 5.0 => 1,
            s if s < 8.0 => 2,
            s => 3 + (s / 8.0).log2() as u32,
        };
        Some(Self { generation, lanes, rate: rate_of_lane(speed) * f64::from(lanes) * COPY_SHARE })
    }

    fn between(&self, upper: &str, lower: &str) -> Link {
        Link {
            between: [upper.into(), lower.into()],
            kind: format!("PCIe {} x{}", self.generation, self.lanes),
            forward_rate: self.rate,
            backward_rate: self.rate,
            total_rate: None,
        }
    }
}

/// A GPU and its path, of at least two ports.
struct Gpu {
    name: String,
    socket: String,
    path: PciPath,
}

impl Topology {
    /// Adds the PCIe links of the machine's GPUs, and the switches that GPUs share. `path_of`
    /// returns the path of a GPU. A GPU without a path, on the root bus, or behind a link of
    /// unknown rate gets no link.
    pub fn add_pcie_links(&mut self, path_of: impl Fn(&DeviceNode) -> Option<PciPath>) {
        let gpu = |device: &DeviceNode| {
            let path = path_of(device).filter(|path| path.ports.len() > 1)?;
            Some(Gpu { name: device.name.clone(), socket: self.socket_of(device)?.name.clone(), path })
        };
        let gpus: Vec<Gpu> =
            self.devices.iter().filter(|device| device.kind == NodeKind::Cuda).filter_map(gpu).collect();
        let links_before = self.links.len();
        self.hang(None, 0, &gpus.iter().collect::<Vec<_>>());
        if self.links.len() > links_before {
            self.add_origin(ORIGIN);
        }
    }

    /// Links GPUs to the switch `above`, or else to their sockets, through the switches that some
    /// of them share. `start` is the first port of their paths below it.
    fn hang(&mut self, above: Option<&str>, start: usize, gpus: &[&Gpu]) {
        // A root port has one link. GPUs that have only the port in common share that link through
        // a bridge that is no PCIe switch, as virtual machines have them.
        let at = start.max(1);
        let mut groups: Vec<Vec<&Gpu>> = Vec::new();
        for gpu in gpus {
            let bridge = gpu.path.bridge(at);
            let is_with = |group: &&mut Vec<&Gpu>| bridge.is_some() && group[0].path.bridge(at) == bridge;
            match groups.iter_mut().find(is_with) {
                Some(group) => group.push(gpu),
                None => groups.push(vec![gpu]),
            }
        }
        for group in groups {
            let first = group[0];
            let upper = above.unwrap_or(&first.socket).to_string();
            if group.len() == 1 {
                let link = Narrowest::of(&first.path.ports[start..]);
                self.links.extend(link.map(|link| link.between(&upper, &first.name)));
                continue;
            }
            let is_common = |place: &usize| {
                let bridge = first.path.bridge(*place);
                bridge.is_some() && group.iter().all(|gpu| gpu.path.bridge(*place) == bridge)
            };
            let end = (0..).take_while(is_common).count();
            let Some(link) = Narrowest::of(&first.path.ports[start..end]) else { continue };
            let switch = format!("pcie{}", self.switches.len());
            self.switches.push(Switch { name: switch.clone(), kind: format!("PCIe {}", link.generation) });
            self.links.push(link.between(&upper, &switch));
            self.hang(Some(&switch), end, &group);
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::os::unix::fs::symlink;

    use super::*;
    use crate::topology::SharedLinks;

    /// Files of the ports of paths, each from the root down with a GPU as its last port, and the
    /// speed and width of all of them.
    pub(crate) fn tree(paths: &[&str], speed: &str, lanes: &str) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        let devices = root.path().join("sys/bus/pci/devices");
        std::fs::create_dir_all(&devices).unwrap();
        for path in paths {
            let (bus, ports) = path.split_once('/').unwrap();
            let mut folder = format!("sys/devices/{bus}");
            for port in ports.split('/') {
                folder = format!("{folder}/{port}");
                let at = root.path().join(&folder);
                std::fs::create_dir_all(&at).unwrap();
                for (file, text) in
                    [("max_link_speed", speed), ("max_link_width", lanes), ("current_link_width", lanes)]
                {
                    std::fs::write(at.join(file), text).unwrap();
                }
                let link = devices.join(port);
                if !link.exists() {
                    symlink(format!("../../../../{folder}"), link).unwrap();
                }
            }
        }
        root
    }

    /// Paths of a DGX A100: two GPUs behind each switch.
    pub(crate) const DGX_A100: [&str; 8] = [
        "pci0000:00/0000:00:01.1/0000:01:00.0/0000:02:08.0/0000:07:00.0",
        "pci0000:00/0000:00:01.1/0000:01:00.0/0000:02:09.0/0000:0f:00.0",
        "pci0000:40/0000:40:01.1/0000:41:00.0/0000:42:08.0/0000:47:00.0",
        "pci0000:40/0000:40:01.1/0000:41:00.0/0000:42:09.0/0000:4e:00.0",
        "pci0000:80/0000:80:01.1/0000:81:00.0/0000:82:08.0/0000:87:00.0",
        "pci0000:80/0000:80:01.1/0000:81:00.0/0000:82:09.0/0000:90:00.0",
        "pci0000:b0/0000:b0:01.1/0000:b1:00.0/0000:b2:08.0/0000:b7:00.0",
        "pci0000:b0/0000:b0:01.1/0000:b1:00.0/0000:b2:09.0/0000:bd:00.0",
    ];

    /// Describes GPUs by the paths of the tree, half of them at each of two sockets.
    pub(crate) fn described(root: &Path, paths: &[&str]) -> Topology {
        let mut topology = Topology::cuda(paths.len() as u16);
        topology.sockets =
            ["cpu0", "cpu1"].map(|name| super::super::Socket { name: name.into(), ..Default::default() }).into();
        for (at, device) in topology.devices.iter_mut().enumerate() {
            device.socket = Some(if at < paths.len().div_ceil(2) { "cpu0" } else { "cpu1" }.into());
        }
        topology.add_pcie_links(|device| PciPath::read(root, address(paths[usize::from(device.index)])));
        topology
    }

    fn address(path: &str) -> &str {
        path.rsplit('/').next().unwrap()
    }

    /// Returns the links of PCIe by their ends, sorted, with the names that a topology file has.
    fn pcie(topology: &Topology) -> Vec<([String; 2], &str, f64)> {
        let named = |name: &String| name.replace("cuda", "host").replace("pcie", "plx");
        let found = topology.links.iter().filter(|link| link.kind.starts_with("PCIe"));
        let mut links: Vec<_> =
            found.map(|link| (link.between.each_ref().map(named), link.kind.as_str(), link.forward_rate)).collect();
        links.sort_by(|a, b| a.0.cmp(&b.0));
        links
    }

    fn assert_like_file(found: &Topology, file: &Topology) {
        let (found, file) = (pcie(found), pcie(file));
        let shape = |links: &[([String; 2], &str, f64)]| -> Vec<_> {
            links.iter().map(|(between, kind, _)| (between.clone(), kind.to_string())).collect()
        };
        assert_eq!(shape(&found), shape(&file));
        for ((between, _, rate), (_, _, in_file)) in found.iter().zip(&file) {
            assert!((rate / in_file - 1.0).abs() < 0.1, "{between:?}: {rate}, and {in_file} in the file");
        }
    }

    #[test]
    fn gpus_behind_switches_give_the_graph_of_the_topology_file() {
        let root = tree(&DGX_A100, "16.0 GT/s PCIe\n", "16\n");
        let found = described(root.path(), &DGX_A100);
        let file = Topology::fixture("dgx-a100");
        assert_like_file(&found, &file);
        assert_eq!(found.switches.len(), 4);
        assert_eq!(found.switches[0], Switch { name: "pcie0".into(), kind: "PCIe 4".into() });
        assert!(found.is_whole() && found.links_from == ["sysfs"]);
        // Two GPUs of one switch each get half of its link.
        let links = SharedLinks::new(found.clone());
        let into = |gpus: [u16; 2]| links.together(&gpus.map(|index| format!("cuda:{index}"))).unwrap().into_each;
        assert_eq!((into([0, 1]) * 2.0, into([2, 3]) * 2.0), (into([0, 2]), into([1, 6])));
        assert!(found.to_svg().contains("pcie3") && found.to_string().contains("cpu1 ─ pcie3"), "{found}");

        let paths = [DGX_A100[0], DGX_A100[1], DGX_A100[4], DGX_A100[5]];
        let found = described(tree(&paths, "16.0 GT/s PCIe\n", "16\n").path(), &paths);
        assert_like_file(&found, &Topology::fixture("pcie-two-sockets"));
    }

    #[test]
    fn gpus_behind_root_ports_of_their_own_share_no_link() {
        let paths = [
            "pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:00.0/0000:18:00.0",
            "pci0000:37/0000:37:01.0/0000:38:00.0/0000:39:00.0/0000:3a:00.0",
            "pci0000:97/0000:97:01.0/0000:98:00.0",
            "pci0000:b7/0000:b7:01.0/0000:b8:00.0",
        ];
        let found = described(tree(&paths, "32.0 GT/s PCIe\n", "16\n").path(), &paths);
        assert_eq!(found.switches, []);
        assert_like_file(&found, &Topology::fixture("h100-nvl"));
    }

    #[test]
    fn switches_below_a_switch_are_nested() {
        let paths = [
            "pci0000:00/0000:00:01.0/0000:01:00.0/0000:02:00.0/0000:03:00.0/0000:04:00.0/0000:05:00.0",
            "pci0000:00/0000:00:01.0/0000:01:00.0/0000:02:00.0/0000:03:00.0/0000:04:01.0/0000:06:00.0",
            "pci0000:00/0000:00:01.0/0000:01:00.0/0000:02:01.0/0000:07:00.0",
        ];
        let root = tree(&paths, "8.0 GT/s PCIe\n", "16\n");
        // The second switch is in a slot of eight lanes.
        std::fs::write(root.path().join("sys/bus/pci/devices/0000:02:00.0/max_link_width"), "8\n").unwrap();
        let found = described(root.path(), &paths);
        let links: Vec<String> =
            found.links.iter().map(|link| format!("{} {} {}", link.between[0], link.between[1], link.kind)).collect();
        let expected = [
            "cpu0 pcie0 PCIe 3 x16",
            "pcie0 pcie1 PCIe 3 x8",
            "pcie1 cuda:0 PCIe 3 x16",
            "pcie1 cuda:1 PCIe 3 x16",
            "pcie0 cuda:2 PCIe 3 x16",
        ];
        assert_eq!(links, expected);
    }

    #[test]
    fn the_slower_and_the_narrower_end_bound_a_link() {
        let paths = ["pci0000:00/0000:00:01.0/0000:01:00.0"];
        let root = tree(&paths, "32.0 GT/s PCIe\n", "16\n");
        let kind = |files: &[(&str, &str)]| {
            for (file, text) in files {
                std::fs::write(root.path().join("sys/bus/pci/devices").join(file), text).unwrap();
            }
            described(root.path(), &paths).links.first().map(|link| link.kind.clone())
        };
        assert_eq!(kind(&[]).as_deref(), Some("PCIe 5 x16"));
        assert_eq!(kind(&[("0000:00:01.0/max_link_speed", "16.0 GT/s PCIe\n")]).as_deref(), Some("PCIe 4 x16"));
        assert_eq!(kind(&[("0000:01:00.0/current_link_width", "8\n")]).as_deref(), Some("PCIe 4 x8"));
        // The GPU alone says how fast it is.
        assert_eq!(kind(&[("0000:00:01.0/max_link_speed", "Unknown\n")]).as_deref(), Some("PCIe 5 x8"));
        assert_eq!(kind(&[("0000:01:00.0/max_link_speed", "Unknown\n")]), None);
    }

    #[test]
    fn a_machine_that_does_not_show_its_links_is_described_without_them() {
        let flat = ["pci0000:00/0000:00:06.0", "pci0000:00/0000:00:07.0"];
        let without = described(Path::new("/nowhere"), &flat);
        assert_eq!((without.links.len(), without.links_from.len()), (0, 0));
        // A virtual machine has the GPUs on the root bus, in full width.
        let root = tree(&flat, "32.0 GT/s PCIe\n", "16\n");
        assert_eq!(described(root.path(), &flat), without);
        // One bridge that is no PCIe switch.
        let bridged = ["pci0000:00/0000:00:05.0/0000:01:01.0", "pci0000:00/0000:00:05.0/0000:01:02.0"];
        assert_eq!(described(tree(&bridged, "Unknown\n", "0\n").path(), &bridged), without);
        let found = described(tree(&bridged, "8.0 GT/s PCIe\n", "16\n").path(), &bridged);
        assert_eq!((found.switches.len(), found.links.len()), (0, 2));
        // A folder instead of each file stands for files that cannot be read.
        let paths = &DGX_A100[..2];
        let root = tree(paths, "16.0 GT/s PCIe\n", "16\n");
        for port in ["0000:00:01.1", "0000:01:00.0"] {
            for file in ["max_link_speed", "max_link_width", "current_link_width"] {
                let file = root.path().join("sys/bus/pci/devices").join(port).join(file);
                std::fs::remove_file(&file).unwrap();
                std::fs::create_dir(&file).unwrap();
            }
        }
        assert_eq!(described(root.path(), paths).links, [], "the rate of the shared link is unknown");
        std::fs::remove_file(root.path().join("sys/bus/pci/devices/0000:07:00.0")).unwrap();
        std::fs::write(root.path().join("sys/bus/pci/devices/0000:07:00.0"), "").unwrap();
        assert_eq!(PciPath::read(&root.path().join("sys/bus/pci/devices/0000:07:00.0"), "0000:07:00.0"), None);
    }

    #[test]
    fn a_lane_moves_less_than_its_transfers() {
        assert!((lane_rate("32.0 GT/s PCIe").unwrap() * 16.0 - 63.0e9).abs() < 0.1e9);
        assert!((lane_rate("2.5 GT/s PCIe").unwrap() - 0.25e9).abs() < 1.0);
        assert_eq!(lane_rate("Unknown"), None);
    }
}
