//! Links of this machine's GPUs, as far as the rates that were measured show them.
//!
//! ```text
//!   copies from and to host memory     a link between the GPU's socket and the GPU
//!   copies between two GPUs            a link between the two
//!   as fast between all of three       a switch that links all
//! ```
//!
//! A virtual machine hides the buses and switches of its host, but not how fast they are.

use super::{DeviceNode, Link, NodeKind, Switch, Topology};

/// Least bytes per second that only NVLink carries. PCI Express 6 with 16 lanes carries 121 GB/s.
const NVLINK_RATE_MIN: f64 = 130e9;

/// Difference between the rates of two pairs of GPUs that one switch links.
const SWITCH_RATES_RATIO_MAX: f64 = 1.5;

impl Topology {
    /// Adds links with measured rates, for people, unless the topology describes links. `of_host`
    /// returns bytes per second from host memory to a GPU, and back; `of_pair` those from one GPU
    /// to another that it reaches without host memory.
    pub fn with_measured_links(
        &self,
        of_host: &dyn Fn(&DeviceNode) -> Option<[f64; 2]>,
        of_pair: &dyn Fn(&DeviceNode, &DeviceNode) -> Option<f64>,
    ) -> Self {
        let mut shown = self.clone();
        if !self.links.is_empty() {
            return shown;
        }
        let gpus: Vec<&DeviceNode> = self.devices.iter().filter(|device| device.kind == NodeKind::Cuda).collect();
        for gpu in &gpus {
            if let (Some([to_gpu, from_gpu]), Some(socket)) = (of_host(gpu), self.socket_of(gpu)) {
                shown.links.push(measured("host link", [&socket.name, &gpu.name], [to_gpu, from_gpu]));
            }
        }
        let pairs = gpus.iter().enumerate().flat_map(|(at, a)| gpus[at + 1..].iter().map(move |b| (*a, *b)));
        let pairs: Vec<Link> = pairs
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
        shown
    }
}

fn measured(kind: &str, [first, second]: [&String; 2], [forward_rate, backward_rate]: [f64; 2]) -> Link {
    let kind = format!("{kind}, measured");
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

    #[test]
    fn described_links_stay_as_they_are() {
        let described = Topology::fixture("ac922");
        assert_eq!(described.with_measured_links(&|_| Some([1e9; 2]), &|_, _| Some(1e9)), described);
        assert!(Topology::host(2).with_measured_links(&|_| Some([1e9; 2]), &|_, _| Some(1e9)).links.is_empty());
    }
}
