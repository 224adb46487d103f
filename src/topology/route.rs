//! Routes through the graph: the widest path between two nodes.

use serde::Serialize;

use super::Topology;

/// A route from one node to another.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Route {
    /// The links, in order, as indices into [`Topology::links`].
    pub links: Vec<usize>,
    /// Bytes per second: the rate of the narrowest link in this direction.
    pub rate: f64,
}

impl Topology {
    /// Returns the widest route from one node to another, and the shortest among equally wide ones.
    /// `None` if there is no route. Only the ends may be devices, because devices do not forward.
    pub fn route(&self, from: &str, to: &str) -> Option<Route> {
        // Dijkstra's algorithm, with a path's narrowest link instead of its length. Hosts have tens
        // of nodes, so a scan is enough.
        let mut open = vec![(from, Route { links: Vec::new(), rate: f64::INFINITY })];
        let mut closed: Vec<&str> = Vec::new();
        loop {
            let wider = |a: &Route, b: &Route| a.rate > b.rate || (a.rate == b.rate && a.links.len() < b.links.len());
            let mut best = None;
            for (at, (_, route)) in open.iter().enumerate() {
                if best.is_none_or(|best: usize| wider(route, &open[best].1)) {
                    best = Some(at);
                }
            }
            let (node, route) = open.swap_remove(best?);
            if node == to {
                return Some(route);
            }
            if closed.contains(&node) {
                continue;
            }
            closed.push(node);
            if node != from && self.device(node).is_some() {
                continue;
            }
            for (at, link) in self.links.iter().enumerate() {
                let (next, rate) = match &link.between {
                    [a, b] if a == node => (b.as_str(), link.forward_rate),
                    [a, b] if b == node => (a.as_str(), link.backward_rate),
                    _ => continue,
                };
                if !closed.contains(&next) {
                    let mut links = route.links.clone();
                    links.push(at);
                    open.push((next, Route { links, rate: route.rate.min(rate) }));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::topology::Hop;

    fn fixture(text: &str) -> Topology {
        Topology::parse(text).unwrap()
    }

    #[test]
    fn the_narrowest_link_bounds_a_route_in_each_direction() {
        let topology = fixture(
            r#"
            name = "asymmetric"
            [[socket]]
            name = "cpu0"
            [[switch]]
            name = "plx"
            [[device]]
            name = "host:0"
            [[link]]
            between = ["cpu0", "plx"]
            forward = "10GB/s"
            backward = "3GB/s"
            [[link]]
            between = ["plx", "host:0"]
            rate = "5GB/s"
            "#,
        );
        let link = topology.host_link(&topology.devices[0]).unwrap();
        assert_eq!((link.to_device_rate, link.from_device_rate), (5e9, 3e9));
    }

    #[test]
    fn the_route_to_host_memory_passes_each_link_in_its_direction() {
        let topology = fixture(
            r#"
            name = "a switch"
            [[socket]]
            name = "cpu0"
            [[switch]]
            name = "plx"
            [[device]]
            name = "host:0"
            [[link]]
            between = ["plx", "cpu0"]
            rate = "10GB/s"
            [[link]]
            between = ["plx", "host:0"]
            rate = "5GB/s"
            "#,
        );
        let hop = |link, forward| Hop { link, forward };
        let route = topology.host_route(&topology.devices[0]).unwrap();
        assert_eq!(route.to_device, [hop(0, false), hop(1, true)]);
        assert_eq!(route.from_device, [hop(1, false), hop(0, true)]);
        assert_eq!(Topology::host(1).host_route(&Topology::host(1).devices[0]), None);
    }

    #[test]
    fn a_route_takes_the_wider_detour_and_passes_through_no_device() {
        let text = r#"
            name = "detour"
            [[socket]]
            name = "cpu0"
            [[switch]]
            name = "fast"
            [[device]]
            name = "host:0"
            [[device]]
            name = "host:1"
            [[device]]
            name = "host:2"
            [[link]]
            between = ["host:0", "host:1"]
            rate = "1GB/s"
            [[link]]
            between = ["host:0", "host:2"]
            rate = "100GB/s"
            [[link]]
            between = ["host:2", "host:1"]
            rate = "100GB/s"
            [[link]]
            between = ["host:0", "fast"]
            rate = "7GB/s"
            [[link]]
            between = ["fast", "host:1"]
            rate = "7GB/s"
        "#;
        let topology = fixture(text);
        let route = topology.route("host:0", "host:1").unwrap();
        assert_eq!((route.rate, route.links), (7e9, vec![3, 4]));
        assert_eq!(topology.route("cpu0", "host:0"), None);
    }
}
