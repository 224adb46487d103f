//! The topology as text, for people.

use std::fmt;

use super::{DeviceNode, Link, NodeKind, Topology};
use crate::memory::human_bytes;

/// Prints sockets with their devices and their links to host memory, then all links, and a matrix
/// of the rates that they give.
impl fmt::Display for Topology {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{}: {}, {}, {}",
            self.name,
            counted(self.sockets.len(), "socket"),
            counted(self.devices.len(), "device"),
            counted(self.links.len(), "link")
        )?;
        for socket in &self.sockets {
            write!(f, "{}", socket.name)?;
            if let Some(node) = socket.numa_node {
                write!(f, ", NUMA node {node}")?;
            }
            if let Some(bytes) = socket.memory_bytes {
                write!(f, "  {}", human_bytes(bytes))?;
            }
            if let Some(rate) = socket.memory_rate {
                write!(f, "  {}", human_rate(rate))?;
            }
            writeln!(f)?;
            let on_socket = |device: &&DeviceNode| self.socket_of(device).is_some_and(|own| own.name == socket.name);
            let devices: Vec<&DeviceNode> = self.devices.iter().filter(on_socket).collect();
            for (at, device) in devices.iter().enumerate() {
                let branch = if at + 1 == devices.len() { "└─" } else { "├─" };
                writeln!(f, "{branch} {}", self.device_line(device))?;
            }
        }
        if !self.links.is_empty() {
            match &*self.links_from {
                [] => writeln!(f, "links")?,
                origins => writeln!(f, "links, from {}", origins.join(", "))?,
            }
            let width = self.links.iter().map(|link| ends(link).chars().count()).max().unwrap_or(0);
            for link in &self.links {
                writeln!(f, "   {:width$}  {}", ends(link), link_rates(link))?;
            }
            write!(f, "{}", self.matrix())?;
        }
        Ok(())
    }
}

impl Topology {
    /// Returns the rates from each device, and from its host memory, to each other device, while no
    /// other device copies. Rows: the devices that send.
    fn matrix(&self) -> String {
        let names: Vec<&str> = self.devices.iter().map(|device| device.name.as_str()).collect();
        let width = names.iter().map(|name| name.len()).max().unwrap_or(0).max("memory".len());
        let gigabytes = |rate: Option<f64>| rate.map_or("-".into(), |rate| format!("{:.1}", rate / 1e9));
        let between = |from: &str, to: &str| self.route(from, to).filter(|_| from != to).map(|route| route.rate);
        let host = |device: &DeviceNode| self.host_link(device);
        let mut rows = vec![("GB/s to".to_string(), names.iter().map(ToString::to_string).collect::<Vec<_>>())];
        rows[0].1.push("memory".into());
        let in_rates = self.devices.iter().map(|to| gigabytes(host(to).map(|link| link.to_device_rate)));
        rows.push(("from memory".into(), in_rates.chain(["-".into()]).collect()));
        for from in &self.devices {
            let out_rate = gigabytes(host(from).map(|link| link.from_device_rate));
            let rates = names.iter().map(|to| gigabytes(between(&from.name, to)));
            rows.push((format!("from {}", from.name), rates.chain([out_rate]).collect()));
        }
        let first = rows.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
        let line = |(name, cells): &(String, Vec<String>)| {
            let cells: String = cells.iter().map(|cell| format!("  {cell:>width$}")).collect();
            format!("   {name:first$}{cells}\n")
        };
        format!("rates\n{}", rows.iter().map(line).collect::<String>())
    }

    fn device_line(&self, device: &DeviceNode) -> String {
        let threads = device.threads.map_or("threads by share".into(), |threads| counted(threads, "thread"));
        let memory = device.memory_bytes.map_or("memory by setting".into(), human_bytes);
        let link = match self.host_link(device) {
            Some(link) => format!(
                "host memory to device {}, back {}",
                human_rate(link.to_device_rate),
                human_rate(link.from_device_rate)
            ),
            None if device.kind == NodeKind::Cuda => "over the machine's own link".into(),
            None => "in host memory".into(),
        };
        let uuid = device.uuid.as_ref().map(|uuid| format!(", {uuid}")).unwrap_or_default();
        format!("{:8} {threads}, {memory}, {link}{uuid}", device.name)
    }
}

fn ends(link: &Link) -> String {
    format!("{} ─ {}", link.between[0], link.between[1])
}

pub(super) fn link_rates(link: &Link) -> String {
    let mut text = if link.kind.is_empty() { String::new() } else { format!("{}, ", link.kind) };
    match link.forward_rate == link.backward_rate {
        true => text += &format!("{} each way", human_rate(link.forward_rate)),
        false => {
            text += &format!("{} forward, {} backward", human_rate(link.forward_rate), human_rate(link.backward_rate));
        }
    }
    if let Some(total) = link.total_rate {
        text += &format!(", {} in total", human_rate(total));
    }
    text
}

pub(super) fn counted(count: usize, what: &str) -> String {
    format!("{count} {what}{}", if count == 1 { "" } else { "s" })
}

/// Bytes per second with a decimal unit: `55.6 GB/s`.
fn human_rate(rate: f64) -> String {
    const UNITS: [(&str, f64); 4] = [("TB/s", 1e12), ("GB/s", 1e9), ("MB/s", 1e6), ("kB/s", 1e3)];
    let found = UNITS.iter().find(|(_, scale)| rate >= *scale);
    found.map_or(format!("{rate:.0} B/s"), |(unit, scale)| format!("{:.1} {unit}", rate / scale))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_node_and_link_is_shown() {
        let topology = Topology::fixture("ac922");
        let text = topology.to_string();
        let nodes = topology.sockets.iter().map(|socket| &socket.name);
        for name in nodes.chain(topology.devices.iter().map(|device| &device.name)) {
            assert!(text.contains(name.as_str()), "{name} is missing in\n{text}");
        }
        assert!(text.contains("cpu0 ─ cpu1      X-Bus, 64.0 GB/s each way"), "{text}");
        assert!(text.starts_with("IBM AC922: 2 sockets, 4 devices, 7 links\n"), "{text}");
        let expected = "rates\n   \
            GB/s to      host:0  host:1  host:2  host:3  memory\n   \
            from memory    75.0    75.0    75.0    75.0       -\n   \
            from host:0       -    75.0    64.0    64.0    75.0\n";
        assert!(text.contains(expected), "{text}");
        assert!(text.contains("links, from topology file\n"), "{text}");
        assert!(!Topology::host(2).to_string().contains("rates"), "no links are described");
    }
}
