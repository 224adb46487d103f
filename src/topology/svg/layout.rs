//! Places of a picture's boxes: rows from sockets to what joins devices, and a column for each
//! device.

use std::collections::BTreeMap;

use crate::memory::human_bytes;
use crate::topology::{DeviceNode, Link, Topology};

/// Sizes in pixels of an SVG that is not scaled.
pub(super) const MARGIN: f64 = 24.0;
pub(super) const TITLE: f64 = 44.0;
const COLUMN: f64 = 122.0;
const DEVICE_WIDTH: f64 = 104.0;
const SOCKET_HEIGHT: f64 = 48.0;
const SOCKET_WIDTH_MIN: f64 = 210.0;
pub(super) const SWITCH_HEIGHT: f64 = 30.0;
/// Between two rows with lines between them: room for a label.
const ROW_GAP: f64 = 46.0;
/// Between two sockets: room for the label of their link.
const SOCKET_GAP: f64 = 150.0;
/// Between two rows of devices without links.
const GRID_GAP: f64 = 14.0;
/// Devices in a row, if they have no links.
const GRID_COLUMNS: usize = 8;
const WIDTH_MIN: f64 = 460.0;
/// Part of a label that is beyond the last column.
const LABEL_OVERHANG: f64 = 30.0;
/// Height of a line of text.
pub(super) const LINE: f64 = 16.0;

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Rect {
    pub(super) x: f64,
    pub(super) y: f64,
    pub(super) width: f64,
    pub(super) height: f64,
}

impl Rect {
    pub(super) fn right(&self) -> f64 {
        self.x + self.width
    }

    pub(super) fn bottom(&self) -> f64 {
        self.y + self.height
    }

    pub(super) fn centre(&self) -> f64 {
        self.x + self.width / 2.0
    }

    pub(super) fn overlaps(&self, other: &Self) -> bool {
        self.x < other.right() && other.x < self.right() && self.y < other.bottom() && other.y < self.bottom()
    }
}

/// Row of a node, from top to bottom.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Row {
    Socket,
    /// Between sockets and devices, by the number of the row.
    Switch(usize),
    Device,
    /// Below the devices, by the number of the row.
    Fabric(usize),
}

#[derive(Clone, Debug)]
pub(super) struct Node {
    pub(super) row: Row,
    pub(super) at: Rect,
}

/// Places of all nodes, and the size of the picture without its legend.
#[derive(Debug)]
pub(super) struct Layout<'a> {
    pub(super) topology: &'a Topology,
    pub(super) nodes: BTreeMap<&'a str, Node>,
    pub(super) width: f64,
    pub(super) height: f64,
}

/// Switches between sockets and devices, with the switch or socket above each.
struct Tree<'a> {
    above: BTreeMap<&'a str, &'a str>,
}

impl Topology {
    fn neighbours<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a str> {
        self.links.iter().filter_map(move |link| match &link.between {
            [a, b] if a == name => Some(b.as_str()),
            [a, b] if b == name => Some(a.as_str()),
            _ => None,
        })
    }

    fn is_switch(&self, name: &str) -> bool {
        self.switches.iter().any(|switch| switch.name == name)
    }
}

impl<'a> Tree<'a> {
    /// Follows links from the sockets through switches.
    fn of(topology: &'a Topology) -> Self {
        let mut above = BTreeMap::new();
        let mut open: Vec<&str> = topology.sockets.iter().map(|socket| socket.name.as_str()).collect();
        let mut at = 0;
        while at < open.len() {
            let node = open[at];
            for next in topology.neighbours(node) {
                if topology.is_switch(next) && !above.contains_key(next) {
                    above.insert(next, node);
                    open.push(next);
                }
            }
            at += 1;
        }
        Self { above }
    }

    /// Returns the switches above a node, from top to bottom, and the socket above them.
    fn chain(&self, mut node: &'a str) -> (Option<&'a str>, Vec<&'a str>) {
        let mut chain = Vec::new();
        while let Some(&above) = self.above.get(node) {
            chain.push(node);
            node = above;
        }
        chain.reverse();
        ((!chain.is_empty()).then_some(node), chain)
    }

    fn contains(&self, switch: &str) -> bool {
        self.above.contains_key(switch)
    }
}

impl<'a> Layout<'a> {
    pub(super) fn of(topology: &'a Topology) -> Self {
        let tree = Tree::of(topology);
        let mut layout = Self { topology, nodes: BTreeMap::new(), width: 0.0, height: 0.0 };
        layout.place_columns(&tree);
        layout.place_switches(&tree);
        layout.place_rows();
        layout
    }

    /// Places sockets and devices from left to right, and switches without devices among these.
    fn place_columns(&mut self, tree: &Tree<'a>) {
        let topology = self.topology;
        let is_on =
            |socket: &str, device: &DeviceNode| topology.socket_of(device).is_some_and(|own| own.name == socket);
        let switch_of = |device: &'a str| topology.neighbours(device).find(|&other| tree.contains(other));
        let lines = topology.devices.iter().map(|device| device_lines(device).len()).max();
        let device_height = 24.0 + LINE * lines.unwrap_or(1) as f64;
        let mut x = MARGIN;
        for socket in &topology.sockets {
            let devices = topology.devices.iter().filter(|device| is_on(&socket.name, device));
            let mut columns: Vec<(Vec<usize>, &str)> = Vec::new();
            let order = |chain: Vec<&str>| -> Vec<usize> {
                let place = |name: &&str| topology.switches.iter().position(|switch| switch.name == **name);
                chain.iter().filter_map(place).collect()
            };
            for device in devices {
                let chain = switch_of(&device.name).map(|switch| tree.chain(switch).1).unwrap_or_default();
                columns.push((order(chain), &device.name));
            }
            for switch in &topology.switches {
                let (root, chain) = tree.chain(&switch.name);
                let has_devices = |(own, _): &(Vec<usize>, &str)| own.starts_with(&order(chain.clone()));
                if root == Some(&socket.name) && !columns.iter().any(has_devices) {
                    columns.push((order(chain), &switch.name));
                }
            }
            columns.sort_by(|a, b| a.0.cmp(&b.0));
            let is_grid = columns.iter().all(|(_, name)| topology.neighbours(name).next().is_none());
            let row_columns = if is_grid { GRID_COLUMNS.min(columns.len()) } else { columns.len() };
            let width = (row_columns as f64 * COLUMN).max(SOCKET_WIDTH_MIN);
            let first = x + (width - row_columns as f64 * COLUMN) / 2.0;
            for (at, (_, name)) in columns.iter().enumerate() {
                let (row, column) = (at / row_columns, at % row_columns);
                let left = first + column as f64 * COLUMN + (COLUMN - DEVICE_WIDTH) / 2.0;
                let y = row as f64 * (device_height + GRID_GAP);
                let (kind, height) = if topology.is_switch(name) {
                    (Row::Switch(0), SWITCH_HEIGHT)
                } else {
                    (Row::Device, device_height)
                };
                self.insert(name, kind, Rect { x: left, y, width: DEVICE_WIDTH, height });
            }
            let inset = (COLUMN - DEVICE_WIDTH) / 2.0;
            let at = Rect { x: x + inset, y: 0.0, width: width - 2.0 * inset, height: SOCKET_HEIGHT };
            self.insert(&socket.name, Row::Socket, at);
            x += width + SOCKET_GAP;
        }
        self.width = x - SOCKET_GAP + MARGIN + LABEL_OVERHANG;
    }

    fn insert(&mut self, name: &'a str, row: Row, at: Rect) {
        self.nodes.insert(name, Node { row, at });
    }

    /// Places switches over the columns that they link, each in the first row where it fits.
    fn place_switches(&mut self, tree: &Tree<'a>) {
        let topology = self.topology;
        let mut waiting: Vec<&str> = topology.switches.iter().map(|switch| switch.name.as_str()).collect();
        // Switches of the tree first, those near the sockets before those below.
        waiting.sort_by_key(|name| (!tree.contains(name), tree.chain(name).1.len()));
        for name in waiting {
            let is_above = tree.contains(name);
            let below = |device: &&'a DeviceNode| match is_above {
                true => {
                    let switches = topology.neighbours(&device.name).filter(|other| tree.contains(other));
                    switches.into_iter().any(|other| tree.chain(other).1.contains(&name))
                }
                false => reaches(topology, name, &device.name),
            };
            let spans: Vec<Rect> =
                topology.devices.iter().filter(below).map(|d| self.nodes[d.name.as_str()].at).collect();
            let left = spans.iter().map(|at| at.x).fold(f64::INFINITY, f64::min);
            let right = spans.iter().map(Rect::right).fold(0.0, f64::max);
            let own = self.nodes.get(name).map(|node| node.at);
            let (x, width) = match (own, spans.is_empty()) {
                (Some(own), _) => (own.x, own.width),
                (None, false) => (left, right - left),
                // A switch that links no device.
                (None, true) => {
                    let x = self.width - MARGIN - LABEL_OVERHANG + (COLUMN - DEVICE_WIDTH) / 2.0;
                    self.width += COLUMN;
                    (x, DEVICE_WIDTH)
                }
            };
            let at = Rect { x, y: 0.0, width, height: SWITCH_HEIGHT };
            let first = match tree.above.get(name).and_then(|above| self.nodes.get(above)) {
                Some(Node { row: Row::Switch(row), .. }) => row + 1,
                _ => 0,
            };
            let row_of = |row: usize| if is_above { Row::Switch(row) } else { Row::Fabric(row) };
            let taken = |row: usize| {
                let others = self.nodes.iter().filter(|(other, node)| **other != name && node.row == row_of(row));
                others.into_iter().any(|(_, node)| node.at.overlaps(&at))
            };
            let row = (first..).find(|&row| !taken(row)).expect("a row with room");
            self.insert(name, row_of(row), at);
        }
    }

    /// Gives each row its height, now that all nodes have theirs.
    fn place_rows(&mut self) {
        let has_links = !self.topology.links.is_empty();
        let rows = |is_it: fn(Row) -> Option<usize>| {
            self.nodes.values().filter_map(|node| is_it(node.row)).map(|row| row + 1).max().unwrap_or(0)
        };
        let switch_rows = rows(|row| if let Row::Switch(at) = row { Some(at) } else { None });
        let fabric_rows = rows(|row| if let Row::Fabric(at) = row { Some(at) } else { None });
        let depth = |row: Row| {
            let curved = self.topology.links.iter().filter_map(|link| self.curve(link)).filter(|(of, _)| *of == row);
            curved.map(|(_, depth)| depth * 0.75 + 14.0).fold(0.0, f64::max)
        };
        let (above_sockets, below_devices) = (depth(Row::Socket), depth(Row::Device));
        let sockets = MARGIN + TITLE + above_sockets;
        let gap = if has_links { ROW_GAP } else { GRID_GAP };
        let switches = sockets + SOCKET_HEIGHT + gap;
        let devices = switches + switch_rows as f64 * (SWITCH_HEIGHT + ROW_GAP);
        let grid = self.nodes.values().filter(|node| node.row == Row::Device).map(|node| node.at.bottom());
        let below = devices + grid.fold(0.0, f64::max);
        let fabrics = below + below_devices + if fabric_rows > 0 { ROW_GAP } else { 0.0 };
        for node in self.nodes.values_mut() {
            node.at.y += match node.row {
                Row::Socket => sockets,
                Row::Switch(row) => switches + row as f64 * (SWITCH_HEIGHT + ROW_GAP),
                Row::Device => devices,
                Row::Fabric(row) => fabrics + row as f64 * (SWITCH_HEIGHT + ROW_GAP),
            };
        }
        let end = self.nodes.values().map(|node| node.at.bottom()).fold(0.0, f64::max);
        self.height = end.max(below + below_devices) + MARGIN;
        self.width = self.width.max(WIDTH_MIN);
    }

    pub(super) fn ends(&self, link: &Link) -> [&Node; 2] {
        [&self.nodes[link.between[0].as_str()], &self.nodes[link.between[1].as_str()]]
    }

    /// Returns the row of a link that is drawn as a curve within one row, and the depth of the
    /// curve. `None` for a straight line.
    pub(super) fn curve(&self, link: &Link) -> Option<(Row, f64)> {
        let [a, b] = self.ends(link);
        if a.row != b.row {
            return None;
        }
        let distance = (a.at.centre() - b.at.centre()).abs();
        let is_between = |node: &&Node| {
            let (low, high) = (a.at.centre().min(b.at.centre()), a.at.centre().max(b.at.centre()));
            node.row == a.row && low < node.at.centre() && node.at.centre() < high
        };
        // Neighbours in a row of sockets or switches have room for a line.
        let is_curve = a.row == Row::Device || self.nodes.values().any(|node| is_between(&node));
        is_curve.then(|| (a.row, (26.0 + 0.16 * distance).min(220.0)))
    }
}

/// Returns the lines of text of a device: name, model, memory, and as much of a UUID as tells the
/// GPUs of a host apart.
pub(super) fn device_lines(device: &DeviceNode) -> Vec<String> {
    let model = device.model.as_ref().map(|model| model.trim_start_matches("NVIDIA ").to_string());
    let memory = device.memory_bytes.map(whole_bytes);
    let uuid = device.uuid.as_ref().and_then(|uuid| uuid.get(..12)).map(String::from);
    [Some(device.name.clone()), model, memory, uuid].into_iter().flatten().collect()
}

/// Returns bytes as text: `40 GiB`, `94.5 GiB`.
pub(super) fn whole_bytes(bytes: u64) -> String {
    human_bytes(bytes).replace(".0 ", " ")
}

/// True if links lead from a switch to a device through other switches of no socket.
fn reaches(topology: &Topology, switch: &str, device: &str) -> bool {
    let mut open = vec![switch];
    let mut at = 0;
    while at < open.len() {
        let node = open[at];
        for next in topology.neighbours(node) {
            if next == device {
                return true;
            }
            if topology.is_switch(next) && !open.contains(&next) {
                open.push(next);
            }
        }
        at += 1;
    }
    false
}

/// Distances from the middle of a node at which its links end, so that they do not end at one
/// point.
pub(super) struct Offsets {
    of_links: Vec<[f64; 2]>,
}

/// End of a link at a node, and the middle of the node at its other end.
struct End {
    leads_to: f64,
    link: usize,
    end: usize,
}

impl Offsets {
    pub(super) fn of(layout: &Layout<'_>) -> Self {
        let links = &layout.topology.links;
        let mut of_links = vec![[0.0; 2]; links.len()];
        // The ends at each side of a node, with the place that each leads to.
        let mut sides: BTreeMap<(&str, &str), Vec<End>> = BTreeMap::new();
        for (at, link) in links.iter().enumerate() {
            let nodes = layout.ends(link);
            let is_beside = nodes[0].row == nodes[1].row && layout.curve(link).is_none();
            for end in 0..2 {
                let (own, other) = (nodes[end], nodes[1 - end]);
                let side = match (is_beside, own.row == other.row, own.at.y < other.at.y) {
                    (true, ..) => link.between[1 - end].as_str(),
                    (false, true, _) if own.row == Row::Socket => "above",
                    (false, true, _) | (false, false, true) => "below",
                    (false, false, false) => "above",
                };
                let ends = sides.entry((&link.between[end], side)).or_default();
                ends.push(End { leads_to: other.at.centre(), link: at, end });
            }
        }
        for ((node, side), mut ends) in sides {
            let at = layout.nodes[node].at;
            ends.sort_by(|a, b| a.leads_to.total_cmp(&b.leads_to).then(a.link.cmp(&b.link)));
            let room = if ["above", "below"].contains(&side) { at.width } else { at.height } - 16.0;
            let step = (room / ends.len() as f64).min(22.0);
            for (number, &End { link, end, .. }) in ends.iter().enumerate() {
                of_links[link][end] = (number as f64 - (ends.len() as f64 - 1.0) / 2.0) * step;
            }
        }
        Self { of_links }
    }

    pub(super) fn of_link(&self, link: usize) -> [f64; 2] {
        self.of_links[link]
    }
}
