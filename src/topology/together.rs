//! Rates of devices that copy at the same time, and share links.
//!
//! ```text
//!            ┌─ host:0        host:0 and host:1 share the link to the switch: each gets half of it
//!   cpu0 ─ plx0
//!            └─ host:1        host:0 and host:2 share none
//!   cpu0 ─ plx1 ─ host:2
//! ```
//!
//! Every device moves as many bytes as the others, so the most crowded link bounds all of them.

use super::{DeviceNode, Hop, Topology};

/// Bytes per second of each device while all devices of a set copy.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Together {
    /// From host memory.
    pub into_each: f64,
    /// To host memory.
    pub out_of_each: f64,
    /// From and to host memory, both together.
    pub both_of_each: f64,
    /// To the other devices of the set, to one of them at a time. `None` for one device, and if two
    /// devices have no route.
    pub to_others: Option<f64>,
}

impl Topology {
    /// Returns the rates of the named devices while all of them copy from and to the memory of
    /// their own sockets, or write to each other. `None` if the topology does not describe the
    /// links of all of them to host memory.
    pub fn together(&self, devices: &[String]) -> Option<Together> {
        let nodes = devices.iter().map(|name| self.device(name)).collect::<Option<Vec<_>>>()?;
        let routes = nodes.iter().map(|node| self.host_route(node)).collect::<Option<Vec<_>>>()?;
        let mut into = Crowd::new(self);
        let mut out = Crowd::new(self);
        let mut both = Crowd::new(self);
        for route in &routes {
            into.add(&route.to_device);
            out.add(&route.from_device);
            both.add(&route.to_device);
            both.add(&route.from_device);
        }
        let of_memory = self.memory_of_each(&nodes);
        Some(Together {
            into_each: into.rate_of_each().min(of_memory),
            out_of_each: out.rate_of_each().min(of_memory),
            both_of_each: (2.0 * both.rate_of_each()).min(of_memory),
            to_others: self.to_others(&nodes),
        })
    }

    /// Returns each device's part of its socket's memory, of the socket with the least for each.
    fn memory_of_each(&self, nodes: &[&DeviceNode]) -> f64 {
        let of_node = |node: &&DeviceNode| {
            let socket = self.socket_of(node)?;
            let users = nodes.iter().filter(|other| self.socket_of(other) == Some(socket)).count();
            Some(socket.memory_rate? / users as f64)
        };
        nodes.iter().filter_map(of_node).fold(f64::INFINITY, f64::min)
    }

    /// Returns the rate out of each device. In each round, every device writes to another one.
    fn to_others(&self, nodes: &[&DeviceNode]) -> Option<f64> {
        let count = nodes.len();
        let round = |step: usize| {
            let mut crowd = Crowd::new(self);
            for (at, from) in nodes.iter().enumerate() {
                let to = nodes[(at + step) % count];
                crowd.add(&self.hops(&from.name, &to.name)?);
            }
            Some(crowd.rate_of_each())
        };
        let rates = (1..count).map(round).collect::<Option<Vec<f64>>>()?;
        let seconds: f64 = rates.iter().map(|rate| 1.0 / rate).sum();
        (count > 1).then(|| rates.len() as f64 / seconds)
    }
}

/// Transfers of one rate that cross links at the same time.
struct Crowd<'a> {
    topology: &'a Topology,
    /// Transfers that cross each link, forward and backward.
    crossing: Vec<[usize; 2]>,
}

impl<'a> Crowd<'a> {
    fn new(topology: &'a Topology) -> Self {
        Self { topology, crossing: vec![[0; 2]; topology.links.len()] }
    }

    fn add(&mut self, hops: &[Hop]) {
        hops.iter().for_each(|hop| self.crossing[hop.link][usize::from(!hop.forward)] += 1);
    }

    /// Returns the rate of each transfer.
    fn rate_of_each(&self) -> f64 {
        let of_link = |(link, [forward, backward]): (&super::Link, &[usize; 2])| {
            let share = |rate: f64, count: usize| if count == 0 { f64::INFINITY } else { rate / count as f64 };
            let total = link.total_rate.map_or(f64::INFINITY, |total| share(total, forward + backward));
            share(link.forward_rate, *forward).min(share(link.backward_rate, *backward)).min(total)
        };
        self.topology.links.iter().zip(&self.crossing).map(of_link).fold(f64::INFINITY, f64::min)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(topology: &Topology, devices: &[u16]) -> Together {
        let names: Vec<String> = devices.iter().map(|index| format!("host:{index}")).collect();
        topology.together(&names).unwrap()
    }

    fn assert_close(found: Option<f64>, expected: f64) {
        assert!(found.is_some_and(|found| (found / expected - 1.0).abs() < 1e-9), "{found:?}, not {expected}");
    }

    fn fixture(name: &str) -> Topology {
        let path = format!("{}/tests/fixtures/topology/{name}.toml", env!("CARGO_MANIFEST_DIR"));
        Topology::parse(&std::fs::read_to_string(path).unwrap()).unwrap()
    }

    #[test]
    fn devices_behind_one_switch_share_its_link() {
        let topology = fixture("pcie-two-sockets");
        assert_eq!(of(&topology, &[0]).into_each, 25e9);
        let (near, far) = (of(&topology, &[0, 1]), of(&topology, &[0, 2]));
        assert_eq!((near.into_each, near.out_of_each, near.both_of_each), (12.5e9, 12.5e9, 20e9));
        assert_eq!((far.into_each, far.both_of_each), (25e9, 40e9));
        // Writes between two devices of a switch do not leave it.
        assert_close(near.to_others, 25e9);
        assert_close(far.to_others, 20e9);
        assert_eq!(of(&topology, &[0, 1, 2, 3]).into_each, 12.5e9);
    }

    #[test]
    fn the_memory_of_a_socket_is_shared_by_its_devices() {
        let topology = fixture("dgx-h100");
        assert_eq!(of(&topology, &[0, 1, 2, 3]).both_of_each, 307e9 / 4.0);
        assert_eq!(of(&topology, &[0, 4]).both_of_each, 110e9);
        assert_close(of(&topology, &[0, 1, 2, 3, 4, 5, 6, 7]).to_others, 450e9);
        assert_eq!(of(&topology, &[3]).to_others, None);
    }

    #[test]
    fn pairs_across_a_slow_link_bound_an_exchange() {
        let topology = fixture("ac922");
        assert_close(of(&topology, &[0, 1]).to_others, 75e9);
        assert_close(of(&topology, &[0, 2]).to_others, 64e9);
        // In two rounds, one device crosses the bus in each direction. In the third, two do.
        assert_close(of(&topology, &[0, 1, 2, 3]).to_others, 48e9);
    }

    #[test]
    fn links_that_are_not_described_have_no_rates() {
        assert_eq!(Topology::host(2).together(&["host:0".into(), "host:1".into()]), None);
        assert_eq!(fixture("ac922").together(&["host:9".into()]), None);
    }
}
