//! NVLink connections of this machine's GPUs, as NVML reports them.
//!
//! ```text
//!   GPU ═══ GPU          links between two GPUs, often through a bridge
//!   GPU ═══ nvswitch     links to switches; all switches of a host are one node
//! ```
//!
//! NVML counts GPUs in another order than CUDA, so they are matched by UUID. A virtual machine
//! often hides what is at the other end of a link. Such a link is not described.

use super::{DeviceNode, Link, NodeKind, Switch, Topology};

/// Origin of these links, for people.
const ORIGIN: &str = "NVML";

/// Name of the node of all switches.
const SWITCH: &str = "nvswitch";

/// Share of the raw rate that copies reach: 397 of 450 GB/s between two H200.
const COPY_SHARE: f64 = 0.88;

/// A GPU as NVML describes it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NvmlGpu {
    pub uuid: String,
    /// Address on the PCI bus, in any form: `00000000:1B:00.0`.
    pub pci_address: String,
    /// Active links.
    pub links: Vec<NvmlLink>,
}

/// An active NVLink of a GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NvmlLink {
    /// NVML's number of the version, which is not that of the generation.
    pub version: u32,
    pub remote: NvmlRemote,
}

/// Device at the other end of a link.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NvmlRemote {
    /// A GPU, by its address on the PCI bus.
    Gpu(String),
    Switch,
    /// NVML does not say, or it is another kind of device.
    Unknown,
}

/// Active links of a GPU to one neighbour.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Bundle {
    version: u32,
    links: u32,
}

impl Bundle {
    /// `None` for no links.
    fn of<'a>(links: impl Iterator<Item = &'a NvmlLink>) -> Option<Self> {
        let versions: Vec<u32> = links.map(|link| link.version).collect();
        Some(Self { version: *versions.iter().min()?, links: versions.len() as u32 })
    }

    /// Returns the generation, and the raw bytes per second of a link in each direction. A version
    /// that is not known is newer than the others, and at least as fast.
    fn generation(self) -> (Option<u32>, f64) {
        match self.version {
            1 => (Some(1), 20e9),
            2 | 3 => (Some(2), 25e9),
            4 | 5 => (Some(3), 25e9),
            6 => (Some(4), 25e9),
            7 => (Some(5), 50e9),
            _ => (None, 50e9),
        }
    }

    fn between(self, first: &str, second: &str) -> Link {
        let (generation, raw) = self.generation();
        let generation = generation.map(|generation| format!(" {generation}")).unwrap_or_default();
        let count = if self.links > 1 { format!(", {} links", self.links) } else { String::new() };
        let rate = raw * f64::from(self.links) * COPY_SHARE;
        Link {
            between: [first.into(), second.into()],
            kind: format!("NVLink{generation}{count}"),
            forward_rate: rate,
            backward_rate: rate,
            total_rate: None,
        }
    }
}

/// Returns domain, bus, device and function of an address. The tools write the domain with four or
/// eight digits.
fn parts(address: &str) -> Option<[u32; 4]> {
    let parts = address.split([':', '.']).map(|part| u32::from_str_radix(part, 16));
    parts.collect::<Result<Vec<u32>, _>>().ok()?.try_into().ok()
}

impl Topology {
    /// Adds the NVLinks of the machine's GPUs, from the description of all GPUs that NVML shows.
    pub fn add_nvlinks(&mut self, seen: &[NvmlGpu]) {
        let of = |device: &DeviceNode| {
            let uuid = device.uuid.as_ref().filter(|_| device.kind == NodeKind::Cuda)?;
            Some((device.name.clone(), seen.iter().find(|gpu| gpu.uuid == *uuid)?))
        };
        let gpus: Vec<(String, &NvmlGpu)> = self.devices.iter().filter_map(of).collect();
        let mut links: Vec<Link> = Vec::new();
        for (name, gpu) in &gpus {
            let to_switch = gpu.links.iter().filter(|link| link.remote == NvmlRemote::Switch);
            links.extend(Bundle::of(to_switch).map(|bundle| bundle.between(name, SWITCH)));
        }
        if !links.is_empty() {
            self.switches.push(Switch { name: SWITCH.into(), kind: "NVSwitch".into() });
        }
        for (at, (name, gpu)) in gpus.iter().enumerate() {
            for (other_name, other) in &gpus[at + 1..] {
                let found = bundle(gpu, other).or_else(|| bundle(other, gpu)).filter(|_| gpu.uuid != other.uuid);
                links.extend(found.map(|bundle| bundle.between(name, other_name)));
            }
        }
        if !links.is_empty() {
            self.links.extend(links);
            self.add_origin(ORIGIN);
        }
    }

    /// True if two devices have an NVLink between them, or to the same switch.
    pub(super) fn are_joined(&self, one: &str, other: &str) -> bool {
        let has = |ends: [&str; 2]| {
            self.links.iter().any(|link| ends.iter().all(|end| link.between.iter().any(|e| e == end)))
        };
        has([one, other]) || has([one, SWITCH]) && has([other, SWITCH])
    }
}

/// Returns the links from one GPU to another. `None` if NVML shows none.
fn bundle(from: &NvmlGpu, to: &NvmlGpu) -> Option<Bundle> {
    let address = parts(&to.pci_address)?;
    let is_to = |link: &&NvmlLink| matches!(&link.remote, NvmlRemote::Gpu(remote) if parts(remote) == Some(address));
    Bundle::of(from.links.iter().filter(is_to))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Returns GPUs in NVML's order, the reverse of CUDA's, each with the links that `links_of`
    /// gives.
    pub(crate) fn seen(count: u16, links_of: impl Fn(u16) -> Vec<NvmlLink>) -> Vec<NvmlGpu> {
        let gpu = |index: u16| NvmlGpu {
            uuid: format!("GPU-{index}"),
            pci_address: format!("00000000:{:02X}:00.0", 16 + index),
            links: links_of(index),
        };
        (0..count).rev().map(gpu).collect()
    }

    pub(crate) fn links(count: usize, version: u32, remote: NvmlRemote) -> Vec<NvmlLink> {
        vec![NvmlLink { version, remote }; count]
    }

    pub(crate) fn to_gpu(index: u16) -> NvmlRemote {
        NvmlRemote::Gpu(format!("0000:{:02x}:00.0", 16 + index))
    }

    /// Describes the GPUs of CUDA with what NVML says.
    pub(crate) fn described(count: u16, seen: &[NvmlGpu]) -> Topology {
        let mut topology = Topology::cuda(count);
        for device in &mut topology.devices {
            device.uuid = Some(format!("GPU-{}", device.index));
        }
        topology.add_nvlinks(seen);
        topology
    }

    /// Compares NVLinks with those of a topology file by their ends, and by their rates to within a
    /// share.
    fn assert_like_file(found: &Topology, file: &str, share: f64) {
        let nvlinks = |topology: &Topology| {
            let ends = |link: &Link| {
                let mut ends = link.between.clone().map(|name| name.replace("cuda", "host"));
                ends.sort();
                (ends, link.forward_rate)
            };
            let links = topology.links.iter().filter(|link| link.kind.starts_with("NVLink"));
            let mut found: Vec<([String; 2], f64)> = links.map(ends).collect();
            found.sort_by(|a, b| a.0.cmp(&b.0));
            found
        };
        let (found, file) = (nvlinks(found), nvlinks(&Topology::fixture(file)));
        let ends = |links: &[([String; 2], f64)]| links.iter().map(|(ends, _)| ends.clone()).collect::<Vec<_>>();
        assert_eq!(ends(&found), ends(&file));
        for ((ends, rate), (_, in_file)) in found.iter().zip(&file) {
            assert!((rate / in_file - 1.0).abs() < share, "{ends:?}: {rate}, and {in_file} in the file");
        }
    }

    #[test]
    fn bridges_and_switches_give_the_graph_of_the_topology_file() {
        let switched = described(8, &seen(8, |_| links(18, 6, NvmlRemote::Switch)));
        // The file has the raw rate.
        assert_like_file(&switched, "dgx-h100", 0.13);
        assert_eq!(switched.links[3].kind, "NVLink 4, 18 links");
        assert_eq!(switched.route("cuda:1", "cuda:6").unwrap().rate, 396e9);
        assert!(switched.is_whole() && switched.links_from == ["NVML"]);
        assert!(switched.to_svg().contains("nvswitch"));
        assert_like_file(&described(8, &seen(8, |_| links(12, 4, NvmlRemote::Switch))), "dgx-a100", 0.13);
        let bridged = described(4, &seen(4, |gpu| links(12, 6, to_gpu(gpu ^ 1))));
        assert_like_file(&bridged, "h100-nvl", 0.05);
        assert_eq!((bridged.switches.len(), bridged.route("cuda:0", "cuda:2")), (0, None));
    }

    #[test]
    fn a_mesh_of_one_and_two_links_gives_the_graph_of_the_topology_file() {
        let two = [(0, 3), (0, 4), (1, 2), (1, 5), (2, 3), (4, 7), (5, 6), (6, 7)];
        let one = [(0, 1), (0, 2), (1, 3), (2, 6), (3, 7), (4, 5), (4, 6), (5, 7)];
        let mesh = seen(8, |gpu| {
            let to =
                |&(a, b): &(u16, u16)| [(a, b), (b, a)].into_iter().find(|(from, _)| *from == gpu).map(|(_, to)| to);
            let doubled = two.iter().filter_map(to).flat_map(|peer| links(2, 2, to_gpu(peer)));
            doubled.chain(one.iter().filter_map(to).flat_map(|peer| links(1, 2, to_gpu(peer)))).collect()
        });
        let found = described(8, &mesh);
        assert_like_file(&found, "dgx-1v", 0.1);
        let kind = |one: &str, other: &str| {
            let link = found.links.iter().find(|link| link.between == [one, other]);
            link.unwrap().kind.clone()
        };
        assert_eq!([kind("cuda:0", "cuda:1"), kind("cuda:0", "cuda:3")], ["NVLink 2", "NVLink 2, 2 links"]);
    }

    #[test]
    fn links_to_unknown_devices_are_not_described() {
        let without = described(2, &[]);
        assert!(without.links.is_empty() && without.links_from.is_empty());
        // A virtual machine shows active links, but not what they lead to.
        assert_eq!(described(2, &seen(2, |_| links(18, 6, NvmlRemote::Unknown))), without);
        // The GPU at the other end is not one of this process, or NVML names the GPU itself.
        assert_eq!(described(2, &seen(2, |gpu| links(4, 4, to_gpu(gpu + 2)))), without);
        assert_eq!(described(2, &seen(2, |gpu| links(4, 4, to_gpu(gpu)))), without);
        assert_eq!(described(2, &seen(2, |_| links(4, 4, NvmlRemote::Gpu(String::new())))), without);
        // One of two ends is enough.
        let one_sided = described(2, &seen(2, |gpu| if gpu == 1 { links(4, 9, to_gpu(0)) } else { Vec::new() }));
        assert_eq!((one_sided.links.len(), &*one_sided.links[0].kind), (1, "NVLink, 4 links"));
        // NVML shows other GPUs than CUDA.
        let mut others = seen(2, |gpu| links(4, 4, to_gpu(gpu ^ 1)));
        others[0].uuid = "GPU-x".into();
        assert_eq!(described(2, &others), without);
        let unnamed = Topology::cuda(2);
        let mut found = unnamed.clone();
        found.add_nvlinks(&seen(2, |gpu| links(4, 4, to_gpu(gpu ^ 1))));
        assert_eq!(found, unnamed, "GPUs are matched by UUID only");
    }
}
