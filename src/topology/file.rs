//! The format of topology files.

use serde::Deserialize;
use toml::Spanned;

use super::{DeviceNode, Link, NodeKind, Socket, Switch, Topology};
use crate::memory::parse_bytes;
use crate::{Error, Result, listed};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    name: String,
    #[serde(default)]
    socket: Vec<FileSocket>,
    #[serde(default)]
    switch: Vec<FileSwitch>,
    #[serde(default)]
    device: Vec<FileDevice>,
    #[serde(default)]
    link: Vec<FileLink>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FileSocket {
    name: Spanned<String>,
    memory: Option<Spanned<String>>,
    memory_rate: Option<Spanned<String>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FileSwitch {
    name: Spanned<String>,
    #[serde(default)]
    kind: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FileDevice {
    name: Spanned<String>,
    threads: Option<Spanned<usize>>,
    memory: Option<Spanned<String>>,
    socket: Option<Spanned<String>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FileLink {
    between: Spanned<Vec<Spanned<String>>>,
    #[serde(default)]
    kind: String,
    rate: Option<Spanned<String>>,
    forward: Option<Spanned<String>>,
    backward: Option<Spanned<String>>,
    total: Option<Spanned<String>>,
}

impl Topology {
    /// Reads a topology from the text of a TOML file:
    ///
    /// ```
    /// let topology = dovetail::topology::Topology::parse(
    ///     r#"
    ///     name = "two small devices"       # name of the machine
    ///
    ///     [[socket]]                       # at least one: a CPU and its memory
    ///     name = "cpu0"
    ///     memory = "64GiB"                 # optional
    ///     memory_rate = "170GB/s"          # optional
    ///
    ///     [[switch]]                       # optional: links devices without computing
    ///     name = "plx0"
    ///     kind = "PCIe 4"                  # optional, for people
    ///
    ///     [[device]]                       # at least one; "host:N", each N once
    ///     name = "host:0"
    ///     threads = 2                      # optional; default: an equal share of the machine's
    ///     memory = "256MiB"                # optional; default: the setting --device-memory
    ///     socket = "cpu0"                  # optional; default: the first socket
    ///
    ///     [[device]]
    ///     name = "host:1"
    ///
    ///     [[link]]                         # between any two nodes
    ///     between = ["cpu0", "plx0"]
    ///     kind = "PCIe 4 x16"              # optional, for people
    ///     rate = "25GB/s"                  # each way; or forward and backward from the first node
    ///     total = "40GB/s"                 # optional: both ways at once
    ///
    ///     [[link]]
    ///     between = ["plx0", "host:0"]
    ///     rate = "25GB/s"
    ///     "#,
    /// )?;
    /// let link = topology.host_link(&topology.devices[0]).unwrap();
    /// assert_eq!(link.to_device_rate, 25e9);
    /// assert!(
    ///     topology.host_link(&topology.devices[1]).is_none(),
    ///     "not linked: nothing to emulate"
    /// );
    /// # Ok::<(), dovetail::Error>(())
    /// ```
    ///
    /// Unknown keys are refused. Rates are decimal (`GB/s` is 10^9 bytes per second), memory sizes
    /// are binary.
    ///
    /// # Errors
    /// [`Error::Invalid`] with the line and the correct form.
    pub fn parse(text: &str) -> Result<Self> {
        let file: File = toml::from_str(text).map_err(|error| {
            let line = error.span().map_or(1, |span| line_of(text, span.start));
            Error::Invalid(format!("topology, line {line}: {}", error.message()))
        })?;
        Reader { text }.topology(file)
    }
}

/// Converts the parsed file to a topology. Every refusal names its line.
struct Reader<'a> {
    text: &'a str,
}

impl Reader<'_> {
    fn topology(&self, file: File) -> Result<Topology> {
        let mut names: Vec<&Spanned<String>> = Vec::new();
        let sockets = file.socket.iter().map(|socket| &socket.name);
        for name in sockets
            .chain(file.switch.iter().map(|switch| &switch.name))
            .chain(file.device.iter().map(|device| &device.name))
        {
            if names.iter().any(|other| other.get_ref() == name.get_ref()) {
                return Err(
                    self.refuse(name, format!("two nodes are named {:?}; names must be unique", name.get_ref()))
                );
            }
            names.push(name);
        }
        if file.socket.is_empty() || file.device.is_empty() {
            let missing = if file.socket.is_empty() { "[[socket]]" } else { "[[device]]" };
            return Err(Error::Invalid(format!("topology: there is no {missing}; write at least one")));
        }
        let sockets = file.socket.iter().map(|socket| self.socket(socket)).collect::<Result<Vec<_>>>()?;
        let devices = file.device.iter().map(|device| self.device(device, &sockets)).collect::<Result<_>>()?;
        let node_names: Vec<&str> = names.iter().map(|name| name.get_ref().as_str()).collect();
        let links: Vec<Link> = file.link.iter().map(|link| self.link(link, &node_names)).collect::<Result<_>>()?;
        let switch = |switch: &FileSwitch| Switch { name: switch.name.get_ref().clone(), kind: switch.kind.clone() };
        let links_from = if links.is_empty() { Vec::new() } else { vec!["topology file".into()] };
        let switches = file.switch.iter().map(switch).collect();
        Ok(Topology { name: file.name, sockets, switches, devices, links, links_from })
    }

    fn socket(&self, socket: &FileSocket) -> Result<Socket> {
        Ok(Socket {
            name: socket.name.get_ref().clone(),
            memory_bytes: socket.memory.as_ref().map(|memory| self.bytes(memory)).transpose()?,
            memory_rate: socket.memory_rate.as_ref().map(|rate| self.rate(rate)).transpose()?,
            ..Socket::default()
        })
    }

    fn device(&self, device: &FileDevice, sockets: &[Socket]) -> Result<DeviceNode> {
        let name = device.name.get_ref();
        let index = name.strip_prefix("host:").and_then(|index| index.parse().ok());
        // Jobs name devices as they are written: "host:00" would be another name for "host:0".
        let index = index.filter(|index| *name == format!("host:{index}")).ok_or_else(|| {
            let reason = match name.starts_with("cuda:") {
                true => "a file describes host devices only, not the machine's own GPUs",
                false => "devices are named \"host:0\", \"host:1\" and so on",
            };
            self.refuse(&device.name, format!("{name:?} is not a device name: {reason}"))
        })?;
        let threads = device.threads.as_ref();
        if let Some(threads) = threads.filter(|threads| *threads.get_ref() == 0) {
            return Err(self.refuse(threads, "a device needs at least one thread".into()));
        }
        if let Some(socket) = &device.socket
            && !sockets.iter().any(|known| known.name == *socket.get_ref())
        {
            let known = sockets.iter().map(|socket| &socket.name);
            let message = format!("there is no socket {:?}; sockets are {}", socket.get_ref(), listed(known));
            return Err(self.refuse(socket, message));
        }
        Ok(DeviceNode {
            name: name.clone(),
            kind: NodeKind::Host,
            index,
            model: None,
            uuid: None,
            threads: threads.map(|threads| *threads.get_ref()),
            memory_bytes: device.memory.as_ref().map(|memory| self.bytes(memory)).transpose()?,
            socket: device.socket.as_ref().map(|socket| socket.get_ref().clone()),
        })
    }

    fn link(&self, link: &FileLink, nodes: &[&str]) -> Result<Link> {
        let [from, to] = link.between.get_ref().as_slice() else {
            return Err(
                self.refuse(&link.between, "a link is between two nodes: between = [\"cpu0\", \"host:0\"]".into())
            );
        };
        for end in [from, to] {
            if !nodes.contains(&end.get_ref().as_str()) {
                let message = format!("there is no node {:?}; nodes are {}", end.get_ref(), listed(nodes.iter()));
                return Err(self.refuse(end, message));
            }
        }
        if from.get_ref() == to.get_ref() {
            return Err(
                self.refuse(to, format!("a link from {:?} to itself; a link is between two nodes", to.get_ref()))
            );
        }
        let (forward_rate, backward_rate) = match (&link.rate, &link.forward, &link.backward) {
            (Some(rate), None, None) => (self.rate(rate)?, self.rate(rate)?),
            (None, Some(forward), Some(backward)) => (self.rate(forward)?, self.rate(backward)?),
            _ => {
                let message = "a link has either rate (each way), or forward and backward: rate = \"25GB/s\"";
                return Err(self.refuse(&link.between, message.into()));
            }
        };
        Ok(Link {
            between: [from.get_ref().clone(), to.get_ref().clone()],
            kind: link.kind.clone(),
            forward_rate,
            backward_rate,
            total_rate: link.total.as_ref().map(|rate| self.rate(rate)).transpose()?,
        })
    }

    fn bytes(&self, text: &Spanned<String>) -> Result<u64> {
        match parse_bytes(text.get_ref()) {
            Ok(0) => Err(self.refuse(text, "the memory has 0 bytes; write a size such as 64MiB".into())),
            Ok(bytes) => Ok(bytes),
            Err(error) => Err(self.refuse(text, error.message().into())),
        }
    }

    fn rate(&self, text: &Spanned<String>) -> Result<f64> {
        parse_rate(text.get_ref()).ok_or_else(|| {
            let message =
                format!("{:?} is not a rate; write a number above 0 with kB/s, MB/s, GB/s or TB/s", text.get_ref());
            self.refuse(text, message)
        })
    }

    fn refuse<T>(&self, at: &Spanned<T>, message: String) -> Error {
        Error::Invalid(format!("topology, line {}: {message}", line_of(self.text, at.span().start)))
    }
}

/// Line of a byte, counted from 1.
fn line_of(text: &str, offset: usize) -> usize {
    text.bytes().take(offset).filter(|&byte| byte == b'\n').count() + 1
}

/// Parses bytes per second; decimal units.
fn parse_rate(text: &str) -> Option<f64> {
    let trimmed = text.trim();
    let digits_end = trimmed.find(|c: char| !c.is_ascii_digit() && c != '.')?;
    let (number, unit) = trimmed.split_at(digits_end);
    let scale = match unit.trim() {
        "B/s" => 1.0,
        "kB/s" | "KB/s" => 1e3,
        "MB/s" => 1e6,
        "GB/s" => 1e9,
        "TB/s" => 1e12,
        _ => return None,
    };
    number.parse::<f64>().ok().map(|value| value * scale).filter(|rate| rate.is_finite() && *rate > 0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = "name = \"m\"\n[[socket]]\nname = \"cpu0\"\n[[device]]\nname = \"host:0\"\n";

    fn refusal(text: &str) -> String {
        match Topology::parse(text) {
            Err(Error::Invalid(message)) => message,
            other => panic!("{text:?} gave {other:?}"),
        }
    }

    #[test]
    fn refusals_name_the_line_and_the_remedy() {
        let cases: [(&str, &[&str]); 12] = [
            ("colour = \"red\"\n", &["line 6", "colour"]),
            ("memory = \"12 parsecs\"\n", &["line 6", "64MiB"]),
            ("memory = \"0\"\n", &["line 6", "0 bytes"]),
            ("threads = 0\n", &["line 6", "at least one thread"]),
            ("threads = \"many\"\n", &["line 6"]),
            ("socket = \"cpu7\"\n", &["line 6", "cpu7", "cpu0"]),
            ("[[device]]\nname = \"host:0\"\n", &["line 7", "unique"]),
            ("[[device]]\nname = \"cuda:0\"\n", &["line 7", "GPUs"]),
            ("[[device]]\nname = \"gpu\"\n", &["line 7", "host:0"]),
            ("[[link]]\nbetween = [\"cpu0\", \"host:9\"]\nrate = \"1GB/s\"\n", &["line 7", "host:9", "cpu0, host:0"]),
            ("[[link]]\nbetween = [\"cpu0\", \"host:0\"]\nrate = \"fast\"\n", &["line 8", "GB/s"]),
            ("[[link]]\nbetween = [\"cpu0\", \"host:0\"]\nforward = \"1GB/s\"\n", &["line 7", "backward"]),
        ];
        assert!(Topology::parse(GOOD).is_ok());
        for (extra, expected) in cases {
            let message = refusal(&format!("{GOOD}{extra}"));
            for part in expected {
                assert!(message.contains(part), "{extra:?}: {message:?} does not say {part:?}");
            }
        }
    }

    #[test]
    fn a_machine_has_a_socket_and_a_device() {
        assert!(refusal("name = \"m\"\n").contains("[[socket]]"));
        assert!(refusal("name = \"m\"\n[[socket]]\nname = \"cpu0\"\n").contains("[[device]]"));
        assert!(refusal("[[socket]]\nname = \"cpu0\"\n").contains("name"));
        assert!(refusal("name = \n").contains("line 1"));
    }

    #[test]
    fn rates_are_decimal_and_above_zero() {
        assert_eq!(parse_rate("55.6 GB/s"), Some(55.6e9));
        assert_eq!(parse_rate("1TB/s"), Some(1e12));
        for wrong in ["", "GB/s", "0GB/s", "-1GB/s", "5", "5 GB", "5Gb/s", "1.2.3GB/s"] {
            assert_eq!(parse_rate(wrong), None, "{wrong:?} was taken for a rate");
        }
    }

    #[test]
    fn the_fixtures_describe_the_machines_they_are_named_for() {
        let read = Topology::fixture;
        let rates = |topology: &Topology, from: &str, to: &str| topology.route(from, to).unwrap().rate;

        let ac922 = read("ac922");
        assert_eq!((ac922.sockets.len(), ac922.devices.len()), (2, 4));
        // Peers on one socket have a link of their own. Across sockets, all traffic uses the X-Bus.
        assert_eq!(rates(&ac922, "host:0", "host:1"), 75e9);
        assert_eq!(rates(&ac922, "host:0", "host:2"), 64e9);

        let dgx = read("dgx-h100");
        assert_eq!(dgx.devices.len(), 8);
        for peer in &dgx.devices[1..] {
            assert_eq!(rates(&dgx, "host:0", &peer.name), 450e9);
        }
        assert_eq!(rates(&dgx, "cpu0", "host:7"), 55e9);

        let pcie = read("pcie-two-sockets");
        assert_eq!(rates(&pcie, "host:0", "host:1"), 25e9);
        assert_eq!(rates(&pcie, "host:0", "host:2"), 20e9);

        let laptop = read("laptop");
        assert_eq!(laptop.devices.len(), 1);
        assert!(laptop.host_link(&laptop.devices[0]).is_none());
    }
}
