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

use super::{DeviceNode, Hop, HostRoute, Topology};

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

/// The links of a machine's devices, with every route between them, and between them and host
/// memory. Routes are found once, because a join may have hundreds of sets as candidates.
#[derive(Clone, Debug)]
pub struct SharedLinks {
    topology: Topology,
    /// By device; `None` for one without a link.
    to_host: Vec<Option<HostRoute>>,
    /// By the device that writes, and the one whose memory it is.
    between: Vec<Vec<Option<Vec<Hop>>>>,
}

impl SharedLinks {
    /// Finds the routes of a topology.
    pub fn new(topology: Topology) -> Self {
        let devices = &topology.devices;
        let to_all = |from: &DeviceNode| devices.iter().map(|to| topology.hops(&from.name, &to.name)).collect();
        let to_host = devices.iter().map(|node| topology.host_route(node)).collect();
        Self { to_host, between: devices.iter().map(to_all).collect(), topology }
    }

    /// Returns the machine that the routes were found in.
    pub fn topology(&self) -> &Topology {
        &self.topology
    }

    /// Returns the route between a device, by index, and the memory of its socket. `None` if the
    /// topology does not describe it.
    pub fn host_route(&self, device: usize) -> Option<&HostRoute> {
        self.to_host[device].as_ref()
    }

    /// Returns the links from one device to another, by index. `None` if there is no route.
    pub fn hops(&self, from: usize, to: usize) -> Option<&[Hop]> {
        self.between[from][to].as_deref()
    }

    /// Returns the rates of the named devices while all of them copy from and to the memory of
    /// their own sockets, or write to each other. `None` if the topology does not describe the
    /// links of all of them to host memory.
    pub fn together(&self, devices: &[String]) -> Option<Together> {
        let index = |name: &String| self.topology.devices.iter().position(|node| node.name == *name);
        let members = devices.iter().map(index).collect::<Option<Vec<_>>>()?;
        let routes = members.iter().map(|&member| self.host_route(member)).collect::<Option<Vec<_>>>()?;
        let crowd = || Crowd::new(&self.topology);
        let (mut into, mut out, mut both) = (crowd(), crowd(), crowd());
        for route in routes {
            into.add(&route.to_device);
            out.add(&route.from_device);
            both.add(&route.to_device);
            both.add(&route.from_device);
        }
        let of_memory = self.memory_of_each(&members);
        Some(Together {
            into_each: into.rate_of_each().min(of_memory),
            out_of_each: out.rate_of_each().min(of_memory),
            both_of_each: (2.0 * both.rate_of_each()).min(of_memory),
            to_others: self.to_others(&members),
        })
    }

    /// Returns each device's part of its socket's memory, of the socket with the least for each.
    fn memory_of_each(&self, members: &[usize]) -> f64 {
        let socket = |&member: &usize| self.topology.socket_of(&self.topology.devices[member]);
        let of_member = |member: &usize| {
            let own = socket(member)?;
            let users = members.iter().filter(|other| socket(other) == Some(own)).count();
            Some(own.memory_rate? / users as f64)
        };
        members.iter().filter_map(of_member).fold(f64::INFINITY, f64::min)
    }

    /// Returns the rate out of each device. In each round, every device writes to another one.
    fn to_others(&self, members: &[usize]) -> Option<f64> {
        let count = members.len();
        let round = |step: usize| {
            let mut crowd = Crowd::new(&self.topology);
            for (at, &from) in members.iter().enumerate() {
                crowd.add(self.hops(from, members[(at + step) % count])?);
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

    fn of(links: &SharedLinks, devices: &[u16]) -> Together {
        let names: Vec<String> = devices.iter().map(|index| format!("host:{index}")).collect();
        links.together(&names).unwrap()
    }

    fn assert_close(found: Option<f64>, expected: f64) {
        assert!(found.is_some_and(|found| (found / expected - 1.0).abs() < 1e-9), "{found:?}, not {expected}");
    }

    fn fixture(name: &str) -> SharedLinks {
        SharedLinks::new(Topology::fixture(name))
    }

    #[test]
    fn devices_behind_one_switch_share_its_link() {
        let links = fixture("pcie-two-sockets");
        assert_eq!(of(&links, &[0]).into_each, 25e9);
        let (near, far) = (of(&links, &[0, 1]), of(&links, &[0, 2]));
        assert_eq!((near.into_each, near.out_of_each, near.both_of_each), (12.5e9, 12.5e9, 20e9));
        assert_eq!((far.into_each, far.both_of_each), (25e9, 40e9));
        // Writes between two devices of a switch do not leave it.
        assert_close(near.to_others, 25e9);
        assert_close(far.to_others, 20e9);
        assert_eq!(of(&links, &[0, 1, 2, 3]).into_each, 12.5e9);
    }

    #[test]
    fn the_memory_of_a_socket_is_shared_by_its_devices() {
        let links = fixture("dgx-h100");
        assert_eq!(of(&links, &[0, 1, 2, 3]).both_of_each, 307e9 / 4.0);
        assert_eq!(of(&links, &[0, 4]).both_of_each, 110e9);
        assert_close(of(&links, &[0, 1, 2, 3, 4, 5, 6, 7]).to_others, 450e9);
        assert_eq!(of(&links, &[3]).to_others, None);
    }

    #[test]
    fn pairs_across_a_slow_link_bound_an_exchange() {
        let links = fixture("ac922");
        assert_close(of(&links, &[0, 1]).to_others, 75e9);
        assert_close(of(&links, &[0, 2]).to_others, 64e9);
        // In two rounds, one device crosses the bus in each direction. In the third, two do.
        assert_close(of(&links, &[0, 1, 2, 3]).to_others, 48e9);
    }

    #[test]
    fn links_that_are_not_described_have_no_rates() {
        assert_eq!(SharedLinks::new(Topology::host(2)).together(&["host:0".into(), "host:1".into()]), None);
        assert_eq!(fixture("ac922").together(&["host:9".into()]), None);
    }
}
