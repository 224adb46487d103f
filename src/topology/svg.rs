//! The topology as a picture in SVG, which needs no script and no font of its own.
//!
//! ```text
//!   sockets          ┌─── cpu0 ───┐ ═══════ ┌─── cpu1 ───┐
//!   PCIe switches    └┬─ plx0 ──┬─┘         └┬─ plx1 ──┬─┘
//!   devices          [0]       [1]          [2]       [3]
//!   peer links        ╰─────────╯            ╰─────────╯      curves
//!   NVSwitch         └┴──────────── nvswitch ───────────┴┘
//!   legend           ── PCIe 5 x16, 55 GB/s each way
//!                    links from sysfs, measured rates
//! ```
//!
//! Each device has a column. The columns of a socket, and of a switch, are adjacent, so boxes do
//! not overlap and few lines cross. The thickness of a line grows with the square root of its rate,
//! and its colour shows its kind. A label is left out where it would cover another one: the legend
//! has the rates of each kind, and every line shows its name to the pointer.

mod layout;
#[cfg(test)]
mod tests;

use std::fmt::Write as _;

use self::layout::{LINE, Layout, MARGIN, Offsets, Rect, Row, SWITCH_HEIGHT, device_lines, whole_bytes};
use super::render::counted;
use super::{Link, Topology};

const LEGEND_LINE: f64 = 22.0;
const WIDTH_OF_LEGEND_MAX: f64 = 900.0;
const FONT: f64 = 12.0;
/// Widest mean of a character in fonts without serifs, for texts that have to fit.
const CHARACTER: f64 = 7.0;

impl Topology {
    /// Draws the topology as a picture in SVG.
    pub fn to_svg(&self) -> String {
        Picture::of(&Layout::of(self)).text
    }
}

/// Kind of a line, by its colour.
fn colour(topology: &Topology, link: &Link) -> &'static str {
    let is_socket = |name: &String| topology.sockets.iter().any(|socket| socket.name == *name);
    match link.kind.to_lowercase() {
        _ if link.between.iter().all(is_socket) => "#d9480f",
        kind if ["nvlink", "nvswitch", "c2c"].iter().any(|part| kind.contains(part)) => "#2b8a3e",
        kind if kind.starts_with("pci") => "#1864ab",
        _ => "#5f3dc4",
    }
}

/// Thickness of a line. The square root keeps 25 GB/s and 900 GB/s apart, and both visible.
fn thickness(rate: f64) -> f64 {
    (rate / 1e9).max(0.0).sqrt().mul_add(0.45, 0.6).clamp(1.0, 14.0)
}

/// Text of a rate that is short: `55.6 GB/s`, `450 GB/s`.
fn short_rate(rate: f64) -> String {
    const UNITS: [(&str, f64); 4] = [("TB/s", 1e12), ("GB/s", 1e9), ("MB/s", 1e6), ("kB/s", 1e3)];
    let (unit, scale) = UNITS.into_iter().find(|(_, scale)| rate >= *scale).unwrap_or(("B/s", 1.0));
    let value = rate / scale;
    let is_whole = value >= 100.0 || (value - value.round()).abs() < 0.05;
    if is_whole { format!("{value:.0} {unit}") } else { format!("{value:.1} {unit}") }
}

/// Rates of a link as a label: one for both ways, or both with their arrows.
fn label(link: &Link, is_downwards: bool) -> String {
    if short_rate(link.forward_rate) == short_rate(link.backward_rate) {
        return short_rate(link.forward_rate);
    }
    let (down, up) = match is_downwards {
        true => (link.forward_rate, link.backward_rate),
        false => (link.backward_rate, link.forward_rate),
    };
    let (down, up) = (short_rate(down), short_rate(up));
    match (down.split_once(' '), up.split_once(' ')) {
        (Some((number, unit)), Some((_, other))) if unit == other => format!("↓{number} ↑{up}"),
        _ => format!("↓{down} ↑{up}"),
    }
}

/// Text of XML. Characters that XML cannot contain are replaced.
fn escaped(text: &str) -> String {
    let mut escaped = String::new();
    for character in text.chars() {
        match character {
            '&' => escaped += "&amp;",
            '<' => escaped += "&lt;",
            '>' => escaped += "&gt;",
            '"' => escaped += "&quot;",
            c if c.is_control() || matches!(c, '\u{fffe}' | '\u{ffff}') => escaped.push('\u{fffd}'),
            c => escaped.push(c),
        }
    }
    escaped
}

/// Shortens a text to a width.
fn fitted(text: &str, width: f64, size: f64) -> String {
    let characters = (width / (CHARACTER * size / FONT)) as usize;
    match text.chars().count() > characters {
        true => text.chars().take(characters.saturating_sub(1)).chain(['…']).collect(),
        false => text.into(),
    }
}

/// The text of the picture, while it is written.
struct Picture<'a> {
    layout: &'a Layout<'a>,
    text: String,
    /// Places that no label may cover.
    taken: Vec<Rect>,
    labels: Vec<(Rect, String)>,
}

impl<'a> Picture<'a> {
    fn of(layout: &'a Layout<'a>) -> Self {
        let topology = layout.topology;
        let (legend, origins) = (legend(topology), origins(topology));
        let lines = legend.len() + usize::from(origins.is_some());
        let height = layout.height + lines as f64 * LEGEND_LINE + if lines == 0 { 0.0 } else { 12.0 };
        let taken = layout.nodes.values().map(|node| node.at).collect();
        let mut picture = Self { layout, text: String::new(), taken, labels: Vec::new() };
        let width_of = |text: &String| text.chars().count() as f64 * CHARACTER;
        let of_legend = legend.iter().map(|(_, text)| width_of(text) + 50.0).fold(0.0, f64::max);
        let of_legend = origins.iter().map(width_of).fold(of_legend, f64::max);
        let width = layout.width.max((of_legend + 2.0 * MARGIN).min(WIDTH_OF_LEGEND_MAX));
        let name = escaped(&topology.name);
        let counts =
            format!("{}, {}", counted(topology.sockets.len(), "socket"), counted(topology.devices.len(), "device"));
        picture.line(&format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width:.0} {height:.0}\" width=\"{width:.0}\" \
             height=\"{height:.0}\" font-family=\"Helvetica, Arial, sans-serif\" font-size=\"{FONT}\" role=\"img\">"
        ));
        picture.line(&format!("<title>{name}: {counts}</title>"));
        picture.line(&format!("<rect width=\"{width:.0}\" height=\"{height:.0}\" fill=\"#ffffff\"/>"));
        let title = escaped(&fitted(&topology.name, width - 2.0 * MARGIN, 18.0));
        picture.line(&format!(
            "<text x=\"{MARGIN}\" y=\"{:.0}\" font-size=\"18\" font-weight=\"bold\" fill=\"#212529\">{title}</text>",
            MARGIN + 14.0
        ));
        picture.line(&format!("<text x=\"{MARGIN}\" y=\"{:.0}\" fill=\"#495057\">{counts}</text>", MARGIN + 32.0));
        picture.draw_links();
        picture.draw_nodes();
        picture.draw_labels();
        for (at, (line, text)) in legend.iter().enumerate() {
            let y = layout.height + 6.0 + at as f64 * LEGEND_LINE;
            let (colour, thick) = (colour(topology, line), thickness(line.forward_rate.max(line.backward_rate)));
            picture.line(&format!(
                "<line x1=\"{MARGIN}\" y1=\"{y:.1}\" x2=\"{:.1}\" y2=\"{y:.1}\" stroke=\"{colour}\" \
                 stroke-width=\"{thick:.1}\"/>",
                MARGIN + 40.0
            ));
            let text = escaped(&fitted(text, width - 2.0 * MARGIN - 50.0, FONT));
            picture.line(&format!(
                "<text x=\"{:.1}\" y=\"{:.1}\" fill=\"#212529\">{text}</text>",
                MARGIN + 50.0,
                y + 4.0
            ));
        }
        if let Some(origins) = origins {
            let text = escaped(&fitted(&origins, width - 2.0 * MARGIN, FONT));
            let y = layout.height + 10.0 + legend.len() as f64 * LEGEND_LINE;
            picture.line(&format!("<text x=\"{MARGIN}\" y=\"{y:.1}\" fill=\"#495057\">{text}</text>"));
        }
        picture.line("</svg>");
        picture
    }

    fn line(&mut self, text: &str) {
        self.text += text;
        self.text.push('\n');
    }

    /// Draws the lines of all links, with their names for the pointer.
    fn draw_links(&mut self) {
        let topology = self.layout.topology;
        let offsets = Offsets::of(self.layout);
        for (at, link) in topology.links.iter().enumerate() {
            let [a, b] = self.layout.ends(link);
            let [from, to] = offsets.of_link(at);
            let (path, label_at, is_downwards) = match self.layout.curve(link) {
                Some((row, depth)) => {
                    let (y, sign) = if row == Row::Socket { (a.at.y, -1.0) } else { (a.at.bottom(), 1.0) };
                    let (x1, x2) = (a.at.centre() + from, b.at.centre() + to);
                    let bend = y + sign * depth;
                    let path = format!("M{x1:.1} {y:.1}C{x1:.1} {bend:.1} {x2:.1} {bend:.1} {x2:.1} {y:.1}");
                    (path, (x1.midpoint(x2), y + sign * depth * 0.75), x1 < x2)
                }
                None if a.row == b.row => {
                    let (left, right) = if a.at.x < b.at.x { (a, b) } else { (b, a) };
                    let y = left.at.y + left.at.height / 2.0 + from;
                    let path = format!("M{:.1} {y:.1}H{:.1}", left.at.right(), right.at.x);
                    let kind = fitted(&link.kind, right.at.x - left.at.right() - 8.0, FONT);
                    let middle = left.at.right().midpoint(right.at.x);
                    self.label((middle, y - thickness(link.forward_rate) / 2.0 - 10.0), &kind);
                    (path, (middle, y + thickness(link.forward_rate) / 2.0 + 10.0), a.at.x < b.at.x)
                }
                None => {
                    let (upper, lower) = if a.at.y < b.at.y { (a, b) } else { (b, a) };
                    let (up, down) = if a.at.y < b.at.y { (from, to) } else { (to, from) };
                    let narrow = if upper.at.width < lower.at.width { upper } else { lower };
                    let within = |at: &Rect, x: f64| x.clamp(at.x + 6.0, at.right() - 6.0);
                    let wanted = narrow.at.centre() + if narrow.at == upper.at { up } else { down };
                    let (x1, x2) = (within(&upper.at, wanted), within(&lower.at, wanted));
                    let (y1, y2) = (upper.at.bottom(), lower.at.y);
                    // Next to the device, where lines are apart.
                    let y = if upper.row == Row::Device { y2 - 16.0 } else { y2 - 18.0 };
                    let path = format!("M{x1:.1} {y1:.1}L{x2:.1} {y2:.1}");
                    let text = label(link, a.at.y < b.at.y);
                    let room = text.chars().count() as f64 * CHARACTER / 2.0 + thickness(link.forward_rate) / 2.0 + 5.0;
                    (path, (x2 + room, y), a.at.y < b.at.y)
                }
            };
            let (colour, thick) = (colour(topology, link), thickness(link.forward_rate.max(link.backward_rate)));
            let name = escaped(&format!("{} – {}: {}", link.between[0], link.between[1], described(link)));
            self.line(&format!(
                "<path d=\"{path}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"{thick:.1}\"><title>{name}</title></path>"
            ));
            self.label(label_at, &label(link, is_downwards));
        }
    }

    /// Adds a label around a point, unless it would cover another one or a box.
    fn label(&mut self, (x, y): (f64, f64), text: &str) {
        let width = text.chars().count() as f64 * CHARACTER;
        let at = Rect { x: x - width / 2.0, y: y - 8.0, width, height: 16.0 };
        if !text.is_empty() && !self.taken.iter().any(|other| other.overlaps(&at)) {
            self.taken.push(at);
            self.labels.push((at, text.into()));
        }
    }

    fn draw_labels(&mut self) {
        for (at, text) in std::mem::take(&mut self.labels) {
            let Rect { x, y, width, height } = at;
            self.line(&format!(
                "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"{height:.1}\" \
                 fill=\"#ffffff\"/><text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\" fill=\"#343a40\">{}</text>",
                at.centre(),
                y + 12.0,
                escaped(&text)
            ));
        }
    }

    fn draw_nodes(&mut self) {
        let topology = self.layout.topology;
        for socket in &topology.sockets {
            let memory = socket.memory_bytes.map(whole_bytes);
            let rate = socket.memory_rate.map(|rate| format!("memory {}", short_rate(rate)));
            let node = socket.numa_node.map(|node| format!("NUMA node {node}"));
            let lines: Vec<String> = node.into_iter().chain(memory).chain(rate).collect();
            self.draw_node(&socket.name, &lines.join(", "), ["#fff4e6", "#d9480f"]);
        }
        for switch in &topology.switches {
            self.draw_node(&switch.name, &switch.kind, ["#f1f3f5", "#495057"]);
        }
        for device in &topology.devices {
            self.draw_node(&device.name, &device_lines(device)[1..].join("\n"), ["#e6fcf5", "#087f5b"]);
        }
    }

    /// Draws a box with a name and more lines of text. A low box has all in one line.
    fn draw_node(&mut self, name: &str, more: &str, [fill, stroke]: [&str; 2]) {
        let Rect { x, y, width, height } = self.layout.nodes[name].at;
        let title = if more.is_empty() { name.to_string() } else { format!("{name}: {}", more.replace('\n', ", ")) };
        self.line(&format!(
            "<g><title>{}</title><rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"{height:.1}\" rx=\"6\" \
             fill=\"{fill}\" stroke=\"{stroke}\" stroke-width=\"1.5\"/>",
            escaped(&title)
        ));
        let mut lines: Vec<String> = vec![name.to_string()];
        match height <= SWITCH_HEIGHT {
            // The type says more than the name.
            true if !more.is_empty() => lines = vec![format!("{name}, {more}")],
            true => {}
            false => lines.extend(more.lines().map(String::from)),
        }
        let first = y + height / 2.0 + 4.0 - (lines.len() as f64 - 1.0) * LINE / 2.0;
        for (at, line) in lines.iter().enumerate() {
            let weight = if at == 0 { " font-weight=\"bold\"" } else { "" };
            let line = escaped(&fitted(line, width - 8.0, FONT));
            self.line(&format!(
                "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\" fill=\"#212529\"{weight}>{line}</text>",
                x + width / 2.0,
                first + at as f64 * LINE
            ));
        }
        self.line("</g>");
    }
}

/// Returns a line of the legend for each kind of link and its rates, with a link of the kind.
fn legend(topology: &Topology) -> Vec<(&Link, String)> {
    let mut kinds: Vec<(&str, Vec<&Link>)> = Vec::new();
    for link in &topology.links {
        match kinds
            .iter_mut()
            .find(|(kind, of_kind)| *kind == link.kind && colour(topology, of_kind[0]) == colour(topology, link))
        {
            Some((_, of_kind)) => of_kind.push(link),
            None => kinds.push((&link.kind, vec![link])),
        }
    }
    kinds.into_iter().map(|(kind, links)| (links[0], legend_line(kind, &links))).collect()
}

/// Returns the line that says where the links come from; `None` without links or origins.
fn origins(topology: &Topology) -> Option<String> {
    let is_known = !topology.links.is_empty() && !topology.links_from.is_empty();
    is_known.then(|| format!("links from {}", topology.links_from.join(", ")))
}

fn legend_line(kind: &str, links: &[&Link]) -> String {
    let range = |rates: &dyn Fn(&Link) -> f64| {
        let rates = || links.iter().map(|link| rates(link));
        let (low, high) = (short_rate(rates().fold(f64::INFINITY, f64::min)), short_rate(rates().fold(0.0, f64::max)));
        if low == high { high } else { format!("{low} to {high}") }
    };
    let (forward, backward) = (range(&|link| link.forward_rate), range(&|link| link.backward_rate));
    let mut text = if kind.is_empty() { String::new() } else { format!("{kind}: ") };
    match forward == backward {
        true => write!(text, "{forward} each way"),
        false => write!(text, "{forward} one way, {backward} back"),
    }
    .expect("text takes all that is written");
    if links.iter().any(|link| link.total_rate.is_some()) {
        let total = range(&|link| link.total_rate.unwrap_or(link.forward_rate + link.backward_rate));
        write!(text, ", {total} both ways").expect("text takes all that is written");
    }
    if links.len() > 1 {
        write!(text, " ({} links)", links.len()).expect("text takes all that is written");
    }
    text
}

/// Describes a link, for the pointer.
fn described(link: &Link) -> String {
    super::render::link_rates(link)
}
