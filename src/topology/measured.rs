//! Links of this machine's GPUs, as far as the rates that were measured show them.
//!
//! ```text
//!   copies from and to host memory     a link between the GPU's socket and the GPU
//!   copies between two GPUs            a link between the two
//!   as fast between all of three       a switch that links all
//! ```
//!
//! A virtual machine hides the buses and switches of its host, but not how fast they are. Links
//! that the machine describes stay, and take the measured rates.

use super::pcie::COPY_SHARE;
use super::{DeviceNode, Link, NodeKind, Switch, Topology};

/// Origin of these rates, for people.
const ORIGIN: &str = "measured rates";

/// End of the kind of a link whose rates were measured.
const MEASURED: &str = ", measured";

/// Least bytes per second that only NVLink carries. PCI Express 6 with 16 lanes carries 121 GB/s.
const NVLINK_RATE_MIN: f64 = 130e9;

/// Difference between the rates of two pairs of GPUs that one switch links.
const SWITCH_RATES_RATIO_MAX: f64 = 1.5;

impl Topology {
    /// Gives the described links between GPUs and host memory the rates that were measured.
    /// `of_host` returns bytes per second from host memory to a GPU, and back, while no other GPU
    /// copies. `of_all` is the sum of both ways of all GPUs while all of them copy.
    ///
    /// No link on a GPU's route is slower than the GPU alone. The rates of the links of a route
    /// keep their proportion, so a link that several GPUs share gets the rate that copies of one of
    /// them show it to have. If all GPUs together copied more than their links to the sockets would
    /// allow, the description is wrong, as that of a virtual machine may be. Shared links then get
    /// the rates that explain the sum.
    pub fn with_measured_host_rates(
        &self,
        of_host: &dyn Fn(&DeviceNode) -> Option<[f64; 2]>,
        of_all: Option<f64>,
    ) -> Self {
        let gpus = self.gpus();
        let mut on_routes = vec![false; self.links.len()];
        // By link: forward and backward.
        let mut rates: Vec<[Option<f64>; 2]> = vec![[None; 2]; self.links.len()];
        let mut all_have_routes = true;
        for gpu in &gpus {
            let (Some(route), Some(link)) = (self.host_route(gpu), self.host_link(gpu)) else {
                all_have_routes = false;
                continue;
            };
            route.to_device.iter().for_each(|hop| on_routes[hop.link] = true);
            let Some([to_gpu, from_gpu]) = of_host(gpu) else { continue };
            let ways =
                [(route.to_device, to_gpu, link.to_device_rate), (route.from_device, from_gpu, link.from_device_rate)];
            for (hops, measured, described) in ways {
                for hop in hops {
                    let link = &self.links[hop.link];
                    let rate = if hop.forward { link.forward_rate } else { link.backward_rate };
                    let found = &mut rates[hop.link][usize::from(!hop.forward)];
                    *found = Some((rate / described * measured).max(measured).max(found.unwrap_or(0.0)));
                }
            }
        }
        let mut measured = self.clone();
        for (link, [forward, backward]) in measured.links.iter_mut().zip(rates) {
            let (Some(forward), Some(backward)) = (forward, backward) else { continue };
            let is_of_gpu = gpus.iter().any(|gpu| link.between.contains(&gpu.name));
            // No copy is faster than its link. So the description is not that of the real link.
            if forward.max(backward) * COPY_SHARE > link.forward_rate {
                link.kind = "host link".into();
            }
            if is_of_gpu {
                link.kind += MEASURED;
            }
            (link.forward_rate, link.backward_rate) = (forward, backward);
            link.total_rate = None;
        }
        if measured.links != self.links {
            measured.add_origin(ORIGIN);
        }
        if let Some(all) = of_all.filter(|_| all_have_routes && !gpus.is_empty()) {
            measured.widen_shared_links(&on_routes, all);
        }
        measured
    }

    /// Widens the links between sockets and switches if all GPUs together copied more than their
    /// links to the sockets would allow.
    fn widen_shared_links(&mut self, on_routes: &[bool], measured: f64) {
        let is_socket = |end: &String| self.sockets.iter().any(|socket| socket.name == *end);
        let is_device = |end: &String| self.devices.iter().any(|device| device.name == *end);
        let on_routes = self.links.iter().zip(on_routes).filter(|(_, is_on)| **is_on).map(|(link, _)| link);
        let at_sockets = on_routes.filter(|link| link.between.iter().any(is_socket));
        let allowed: f64 = at_sockets.map(|link| link.forward_rate + link.backward_rate).sum();
        if measured <= allowed {
            return;
        }
        for link in self.links.iter_mut().filter(|link| !link.between.iter().any(is_device)) {
            link.forward_rate *= measured / allowed;
            link.backward_rate *= measured / allowed;
        }
    }

    fn gpus(&self) -> Vec<&DeviceNode> {
        self.devices.iter().filter(|device| device.kind == NodeKind::Cuda).collect()
    }

    /// Adds links with measured rates, for people, where no links of GPUs are described, and gives
    /// measured rates to described NVLinks. `of_host` returns bytes per second from host memory to
    /// a GPU, and back; `of_pair` those from one GPU to another that it reaches without host
    /// memory.
    pub fn with_measured_links(
        &self,
        of_host: &dyn Fn(&DeviceNode) -> Option<[f64; 2]>,
        of_pair: &dyn Fn(&DeviceNode, &DeviceNode) -> Option<f64>,
    ) -> Self {
        let mut shown = self.clone();
        let gpus = self.gpus();
        shown.set_nvlink_rates(of_pair);
        for gpu in gpus.iter().filter(|gpu| self.host_link(gpu).is_none()) {
            if let (Some([to_gpu, from_gpu]), Some(socket)) = (of_host(gpu), self.socket_of(gpu)) {
                shown.links.push(measured("host link", [&socket.name, &gpu.name], [to_gpu, from_gpu]));
            }
        }
        let pairs = gpus.iter().enumerate().flat_map(|(at, a)| gpus[at + 1..].iter().map(move |b| (*a, *b)));
        let pairs: Vec<Link> = pairs
            .filter(|(a, b)| !self.are_joined(&a.name, &b.name))
            .filter_map(|(a, b)| {
                let rates = [of_pair(a, b)?, of_pair(b, a)?];
                let kind = if rates[0].min(rates[1]) >= NVLINK_RATE_MIN { "NVLink" } else { "peer link" };
                Some(measured(kind, [&a.name, &b.name], rates))
            })
            .collect();
        match switch_of(&gpus, &pairs) {
            None => shown.links.extend(pairs),
            Some((switch, links)) => {
                shown.switches.push(switch);
                shown.links.extend(links);
            }
        }
        if shown.links != self.links {
            shown.add_origin(ORIGIN);
        }
        shown
    }

    /// Sets the rates of NVLinks that NVML describes: those of a pair, or the means of a GPU with
    /// all others of its switch.
    fn set_nvlink_rates(&mut self, of_pair: &dyn Fn(&DeviceNode, &DeviceNode) -> Option<f64>) {
        let described = self.clone();
        let gpus = described.gpus();
        let gpu_of = |end: &String| gpus.iter().copied().find(|gpu| gpu.name == *end);
        for link in &mut self.links {
            // Links of PCIe have the GPU as their second end.
            let Some(gpu) = gpu_of(&link.between[0]) else { continue };
            let others: Vec<&DeviceNode> = match gpu_of(&link.between[1]) {
                Some(peer) => vec![peer],
                None => {
                    let on_switch = described.links.iter().filter(|other| other.between[1] == link.between[1]);
                    on_switch.filter_map(|other| gpu_of(&other.between[0])).filter(|other| *other != gpu).collect()
                }
            };
            let forward = mean(others.iter().filter_map(|other| of_pair(gpu, other)));
            let backward = mean(others.iter().filter_map(|other| of_pair(other, gpu)));
            if let (Some(forward), Some(backward)) = (forward, backward) {
                (link.forward_rate, link.backward_rate) = (forward, backward);
                link.kind += MEASURED;
            }
        }
    }
}

fn mean(rates: impl Iterator<Item = f64>) -> Option<f64> {
    let rates: Vec<f64> = rates.collect();
    (!rates.is_empty()).then(|| rates.iter().sum::<f64>() / rates.len() as f64)
}

fn measured(kind: &str, [first, second]: [&String; 2], [forward_rate, backward_rate]: [f64; 2]) -> Link {
    let kind = format!("{kind}{MEASURED}");
    Link { between: [first.clone(), second.clone()], kind, forward_rate, backward_rate, total_rate: None }
}

/// Returns a switch with a link to each GPU, if all pairs of at least three GPUs are about as fast.
fn switch_of(gpus: &[&DeviceNode], pairs: &[Link]) -> Option<(Switch, Vec<Link>)> {
    let rates = || pairs.iter().flat_map(|pair| [pair.forward_rate, pair.backward_rate]);
    let (low, high) = (rates().fold(f64::INFINITY, f64::min), rates().fold(0.0, f64::max));
    let is_whole = gpus.len() > 2 && pairs.len() == gpus.len() * (gpus.len() - 1) / 2;
    if !is_whole || high > SWITCH_RATES_RATIO_MAX * low {
        return None;
    }
    let (name, kind) = if low >= NVLINK_RATE_MIN { ("nvlink", "NVLink") } else { ("peers", "peer link") };
    let link = |gpu: &&DeviceNode| {
        let mean = |end: usize| {
            let rates: Vec<f64> = pairs
                .iter()
                .filter_map(|pair| match &pair.between {
                    between if between[end] == gpu.name => Some(pair.forward_rate),
                    between if between[1 - end] == gpu.name => Some(pair.backward_rate),
                    _ => None,
                })
                .collect();
            rates.iter().sum::<f64>() / rates.len() as f64
        };
        measured(kind, [&gpu.name, &name.to_string()], [mean(0), mean(1)])
    };
    Some((Switch { name: name.into(), kind: format!("{kind} between all GPUs") }, gpus.iter().map(link).collect()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::topology::NvmlRemote;
    use crate::topology::SharedLinks;
    use crate::topology::nvlink::tests::{described, links, seen, to_gpu};
    use crate::topology::pcie::tests::{DGX_A100, tree};

    fn shown(gpus: u16, of_pair: &dyn Fn(u16, u16) -> Option<f64>) -> Topology {
        let of_host = |gpu: &DeviceNode| (gpu.index != 9).then_some([55e9 + f64::from(gpu.index), 54e9]);
        Topology::cuda(gpus).with_measured_links(&of_host, &|a, b| of_pair(a.index, b.index))
    }

    #[test]
    fn gpus_that_reach_each_other_as_fast_hang_on_one_switch() {
        let four = shown(4, &|from, to| Some(380e9 + f64::from(from) + f64::from(10 * to)));
        assert_eq!((four.switches.len(), four.links.len()), (1, 8));
        assert_eq!(four.route("cuda:1", "cuda:2").unwrap().links, [5, 6]);
        // The first GPU sends to three, and three send to it.
        assert_eq!((four.links[4].forward_rate, four.links[4].backward_rate), (380e9 + 20.0, 380e9 + 2.0));
        assert_eq!(four.links[4].kind, "NVLink, measured");
        assert_eq!(four.host_link(&four.devices[3]).unwrap().to_device_rate, 55e9 + 3.0);
        assert_eq!(shown(3, &|_, _| Some(40e9)).switches[0].name, "peers");
    }

    #[test]
    fn other_pairs_have_links_of_their_own() {
        let bridged = |from: u16, to: u16| (from / 2 == to / 2).then_some(270e9);
        let pairs = shown(4, &bridged);
        assert_eq!((pairs.switches.len(), pairs.links.len()), (0, 6));
        assert_eq!(pairs.links[5].between, ["cuda:2", "cuda:3"]);
        let mixed = |from: u16, to: u16| Some(bridged(from, to).unwrap_or(20e9));
        let kinds: Vec<String> = shown(4, &mixed).links[4..].iter().map(|link| link.kind.clone()).collect();
        assert_eq!(kinds.iter().filter(|kind| *kind == "NVLink, measured").count(), 2);
        assert_eq!(kinds.iter().filter(|kind| *kind == "peer link, measured").count(), 4);
        assert_eq!(shown(2, &|_, _| Some(380e9)).links.len(), 3);
    }

    /// The graph that the files of a DGX A100 give, with two GPUs behind each switch.
    fn dgx_a100() -> Topology {
        let root = tree(&DGX_A100, "16.0 GT/s PCIe\n", "16\n");
        super::super::pcie::tests::described(root.path(), &DGX_A100)
    }

    fn into_each(topology: &Topology, gpus: &[u16]) -> f64 {
        let names: Vec<String> = gpus.iter().map(|index| format!("cuda:{index}")).collect();
        SharedLinks::new(topology.clone()).together(&names).unwrap().into_each
    }

    #[test]
    fn described_links_take_the_rates_that_were_measured() {
        let described = dgx_a100();
        let found = described.with_measured_host_rates(&|_| Some([24e9, 23e9]), Some(150e9));
        for gpu in &found.devices {
            let link = found.host_link(gpu).unwrap();
            assert_eq!((link.to_device_rate, link.from_device_rate), (24e9, 23e9));
        }
        // The link of a switch carries what one of its GPUs copies alone.
        assert_eq!([&[0, 1][..], &[0, 2], &[0, 1, 2, 3]].map(|gpus| into_each(&found, gpus)), [12e9, 24e9, 12e9]);
        let kinds: Vec<&str> = found.links.iter().take(2).map(|link| link.kind.as_str()).collect();
        assert_eq!(kinds, ["PCIe 4 x16", "PCIe 4 x16, measured"]);
        assert_eq!(found.links_from, ["sysfs", "measured rates"]);
        // A GPU that was not measured keeps what its link should reach.
        let found = described.with_measured_host_rates(&|gpu| (gpu.index == 0).then_some([24e9, 23e9]), None);
        assert_eq!(found.host_link(&found.devices[5]), described.host_link(&described.devices[5]));
        assert_eq!(described.with_measured_host_rates(&|_| None, None), described);
        let file = Topology::fixture("ac922");
        assert_eq!(file.with_measured_host_rates(&|_| Some([1e9; 2]), Some(9e9)), file);
    }

    #[test]
    fn measured_rates_win_against_a_description_that_is_wrong() {
        let described = dgx_a100();
        // All GPUs together copy as if none shared a link.
        let found = described.with_measured_host_rates(&|_| Some([24e9; 2]), Some(384e9));
        assert_eq!(into_each(&found, &[0, 1]), 24e9);
        // Links that a virtual machine describes may be slower than any real ones.
        let found = described.with_measured_host_rates(&|_| Some([55e9, 54e9]), None);
        assert_eq!(into_each(&found, &[0]), 55e9);
        assert_eq!((&*found.links[0].kind, &*found.links[1].kind), ("host link", "host link, measured"));
    }

    #[test]
    fn measured_pairs_are_added_to_described_links() {
        let found = dgx_a100().with_measured_links(&|_| Some([24e9; 2]), &|_, _| Some(260e9));
        let of_kind = |kind: &str| found.links.iter().filter(|link| link.kind.starts_with(kind)).count();
        assert_eq!((of_kind("PCIe"), of_kind("NVLink, measured"), of_kind("host link")), (12, 8, 0));
        assert_eq!(found.route("cuda:1", "cuda:6").unwrap().rate, 260e9);
        assert!(found.is_whole() && found.to_svg().contains("nvlink"));
    }

    #[test]
    fn described_nvlinks_take_the_rates_of_their_pairs() {
        let switched = described(4, &seen(4, |_| links(18, 6, NvmlRemote::Switch)));
        let of_pair = |a: &DeviceNode, b: &DeviceNode| Some(380e9 + f64::from(a.index) + f64::from(10 * b.index));
        let found = switched.with_measured_links(&|_| None, &of_pair);
        assert_eq!((found.switches.len(), found.links.len()), (1, 4), "no link is shown twice");
        let first = &found.links[0];
        assert_eq!((first.forward_rate, first.backward_rate), (380e9 + 20.0, 380e9 + 2.0));
        assert_eq!(first.kind, "NVLink 4, 18 links, measured");
        assert_eq!(found.links_from, ["NVML", "measured rates"]);

        // The two pairs reach each other without a bridge.
        let bridged = described(4, &seen(4, |gpu| links(12, 6, to_gpu(gpu ^ 1))));
        let of_pair = |a: &DeviceNode, b: &DeviceNode| Some(if a.index / 2 == b.index / 2 { 271e9 } else { 20e9 });
        let found = bridged.with_measured_links(&|_| None, &of_pair);
        let kinds = |kind: &str| found.links.iter().filter(|link| link.kind == kind).count();
        assert_eq!((kinds("NVLink 4, 12 links, measured"), kinds("peer link, measured"), found.links.len()), (2, 4, 6));
        assert_eq!(found.links[0].forward_rate, 271e9);
        // Pairs without peer access have no measured rate, and keep what NVML says.
        assert_eq!(bridged.with_measured_links(&|_| None, &|_, _| None), bridged);
    }

    #[test]
    fn described_links_stay_as_they_are() {
        let described = Topology::fixture("ac922");
        assert_eq!(described.with_measured_links(&|_| Some([1e9; 2]), &|_, _| Some(1e9)), described);
        assert!(Topology::host(2).with_measured_links(&|_| Some([1e9; 2]), &|_, _| Some(1e9)).links.is_empty());
    }
}
