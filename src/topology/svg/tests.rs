//! Pictures of known machines, and of odd ones.

use std::collections::BTreeMap;

use super::layout::{Node, TITLE};
use super::*;

const FIXTURES: [&str; 10] = [
    "ac922",
    "dgx-1v",
    "dgx-a100",
    "dgx-h100",
    "gb200-nvl4",
    "gh200-x2",
    "h100-nvl",
    "h200-x4",
    "laptop",
    "pcie-two-sockets",
];

/// Checks that a text is XML with one element around all, and returns the texts of all titles.
fn titles_of(xml: &str) -> Vec<String> {
    let (mut open, mut titles, mut rest): (Vec<&str>, Vec<String>, &str) = (Vec::new(), Vec::new(), xml.trim_end());
    while let Some(start) = rest.find('<') {
        let (text, tag) = rest.split_at(start);
        assert!(!text.contains('>'), "{text:?}");
        for entity in text.split('&').skip(1) {
            let name = entity.split(';').next().unwrap();
            assert!(["amp", "lt", "gt", "quot"].contains(&name), "&{entity}");
        }
        if open.last() == Some(&"title") {
            let text = text.replace("&lt;", "<").replace("&gt;", ">").replace("&quot;", "\"").replace("&amp;", "&");
            titles.push(text);
        }
        let (tag, after) = tag[1..].split_once('>').expect("a tag ends");
        assert!(!tag.contains('<') && tag.matches('"').count().is_multiple_of(2), "{tag:?}");
        match (tag.strip_prefix('/'), tag.ends_with('/')) {
            (Some(name), _) => assert_eq!(open.pop(), Some(name), "{xml}"),
            (None, true) => assert!(!open.is_empty(), "{tag:?}"),
            (None, false) => open.push(tag.split(' ').next().unwrap()),
        }
        rest = after;
        assert!(!open.is_empty() || rest.is_empty(), "{rest:?} follows the end");
    }
    assert!(open.is_empty() && rest.is_empty(), "{open:?} stay open");
    titles
}

/// Checks a picture: it is XML, names all nodes and links, and no two boxes overlap.
fn check(topology: &Topology) {
    let layout = Layout::of(topology);
    let nodes: Vec<(&&str, &Node)> = layout.nodes.iter().collect();
    assert_eq!(nodes.len(), topology.sockets.len() + topology.switches.len() + topology.devices.len());
    let frame = Rect { x: 0.0, y: 0.0, width: layout.width, height: layout.height };
    let is_inside =
        |at: &Rect| at.x >= 0.0 && at.y >= TITLE && at.right() <= frame.right() && at.bottom() <= frame.bottom();
    for (number, (name, node)) in nodes.iter().enumerate() {
        assert!(is_inside(&node.at), "{}: {name} is at {:?} of {frame:?}", topology.name, node.at);
        for (other, beside) in &nodes[number + 1..] {
            assert!(!node.at.overlaps(&beside.at), "{}: {name} covers {other}", topology.name);
        }
    }
    let picture = Picture::of(&layout);
    let titles = titles_of(&picture.text);
    for (name, _) in &nodes {
        let is_named = |title: &String| title == **name || title.starts_with(&format!("{name}: "));
        assert!(titles.iter().any(is_named), "{}: {name} is not named", topology.name);
    }
    for link in &topology.links {
        let name = format!("{} – {}: {}", link.between[0], link.between[1], described(link));
        assert!(titles.contains(&name), "{}: {name} is not drawn", topology.name);
    }
    for (number, at) in picture.taken.iter().enumerate() {
        assert!(
            picture.taken[number + 1..].iter().all(|other| !other.overlaps(at)),
            "{}: a label covers",
            topology.name
        );
    }
}

#[test]
fn known_machines_are_drawn_without_overlaps() {
    for name in FIXTURES {
        check(&Topology::fixture(name));
    }
    let all: Vec<_> =
        std::fs::read_dir(format!("{}/tests/fixtures/topology", env!("CARGO_MANIFEST_DIR"))).unwrap().collect();
    assert_eq!(all.len(), FIXTURES.len(), "every fixture is drawn");
}

fn rows(name: &str) -> Vec<Vec<String>> {
    let topology = Topology::fixture(name);
    let layout = Layout::of(&topology);
    let mut rows: BTreeMap<u64, Vec<(f64, String)>> = BTreeMap::new();
    for (name, node) in &layout.nodes {
        rows.entry(node.at.y as u64).or_default().push((node.at.x, (*name).to_string()));
    }
    let sorted = |mut row: Vec<(f64, String)>| {
        row.sort_by(|a, b| a.0.total_cmp(&b.0));
        row.into_iter().map(|(_, name)| name).collect()
    };
    rows.into_values().map(sorted).collect()
}

#[test]
fn rows_go_from_sockets_to_what_joins_the_devices() {
    let hosts = |count: usize| (0..count).map(|index| format!("host:{index}")).collect::<Vec<_>>();
    let expected = [
        vec!["cpu0".to_string(), "cpu1".into()],
        vec!["plx0".into(), "plx1".into(), "plx2".into(), "plx3".into()],
        hosts(8),
        vec!["nvswitch".into()],
    ];
    assert_eq!(rows("dgx-a100"), expected);
    assert_eq!(rows("gb200-nvl4"), [vec!["cpu0".to_string(), "cpu1".into()], hosts(4), vec!["nvlink".into()]]);
}

#[test]
fn devices_of_a_switch_are_side_by_side_whatever_their_numbers() {
    let device = |index: usize| format!("[[device]]\nname = \"host:{index}\"\n");
    let link = |from: &str, to: &str| format!("[[link]]\nbetween = [\"{from}\", \"{to}\"]\nrate = \"25GB/s\"\n");
    let mut text =
        "name = \"mixed\"\n[[socket]]\nname = \"cpu0\"\n[[switch]]\nname = \"plx0\"\n[[switch]]\nname = \"plx1\"\n"
            .to_string();
    (0..4).for_each(|index| text += &device(index));
    text += &link("cpu0", "plx0");
    text += &link("cpu0", "plx1");
    for index in 0..4 {
        text += &link(&format!("plx{}", index % 2), &format!("host:{index}"));
    }
    let topology = Topology::parse(&text).unwrap();
    check(&topology);
    let layout = Layout::of(&topology);
    let x = |name: &str| layout.nodes[name].at.x;
    assert!(x("host:0") < x("host:2") && x("host:2") < x("host:1") && x("host:1") < x("host:3"));
    assert_eq!(layout.nodes["plx0"].row, layout.nodes["plx1"].row);
}

#[test]
fn odd_machines_are_drawn_too() {
    let link = |from: &str, to: &str| {
        format!("[[link]]\nbetween = [\"{from}\", \"{to}\"]\nforward = \"1GB/s\"\nbackward = \"70GB/s\"\n")
    };
    let sockets = |count: usize| (0..count).map(|at| format!("[[socket]]\nname = \"cpu{at}\"\n")).collect::<String>();
    let named = |kind: &str, names: &[&str]| {
        names.iter().map(|name| format!("[[{kind}]]\nname = \"{name}\"\n")).collect::<String>()
    };
    let cases = [
        // Sockets without devices, linked in a ring.
        sockets(4)
            + &named("device", &["host:0"])
            + &link("cpu0", "cpu1")
            + &link("cpu1", "cpu2")
            + &link("cpu2", "cpu3")
            + &link("cpu3", "cpu0")
            + &link("cpu0", "cpu1"),
        // Switches in a chain, one without a device, and one that links nothing.
        sockets(1)
            + &named("switch", &["a", "b", "c", "d"])
            + &named("device", &["host:0", "host:1"])
            + &link("cpu0", "a")
            + &link("a", "b")
            + &link("b", "host:0")
            + &link("a", "c")
            + &link("a", "host:1"),
        // A switch of two sockets, and a device of both.
        sockets(2)
            + &named("switch", &["a", "b"])
            + &named("device", &["host:0", "host:1"])
            + &link("cpu0", "a")
            + &link("cpu1", "a")
            + &link("a", "host:0")
            + &link("a", "host:1")
            + &link("cpu1", "host:0")
            + &link("b", "host:0")
            + &link("cpu1", "b"),
        // Two planes of switches below the devices, linked to each other.
        sockets(1)
            + &named("switch", &["a", "b"])
            + &named("device", &["host:0", "host:1", "host:2"])
            + &link("host:0", "a")
            + &link("a", "b")
            + &link("host:1", "b")
            + &link("host:2", "b")
            + &link("host:2", "a")
            + &link("host:2", "host:0"),
    ];
    for text in cases {
        check(&Topology::parse(&format!("name = \"odd\"\n{text}")).unwrap());
    }
    let wide = Topology::host(100);
    check(&wide);
    assert!(Layout::of(&wide).width < 1200.0, "slices of the CPU are in several rows");
    check(&Topology { name: "<&\"\u{1}>".into(), ..Topology::host(1) });
}

#[test]
fn labels_give_rates_in_both_directions() {
    let link = |forward_rate, backward_rate| Link {
        between: ["cpu0".into(), "host:0".into()],
        kind: String::new(),
        forward_rate,
        backward_rate,
        total_rate: None,
    };
    assert_eq!(label(&link(55.6e9, 55.61e9), true), "55.6 GB/s");
    assert_eq!(label(&link(200e9, 150e9), true), "↓200 ↑150 GB/s");
    assert_eq!(label(&link(200e9, 150e9), false), "↓150 ↑200 GB/s");
    assert_eq!(label(&link(2e9, 150e6), true), "↓2 GB/s ↑150 MB/s");
    assert_eq!([short_rate(1.8e12), short_rate(450e9), short_rate(0.5)], ["1.8 TB/s", "450 GB/s", "0.5 B/s"]);
}

#[test]
fn the_legend_has_each_kind_of_link_with_the_range_of_its_rates() {
    let lines = |name: &str| legend(&Topology::fixture(name)).into_iter().map(|(_, text)| text).collect::<Vec<_>>();
    assert_eq!(lines("laptop"), Vec::<String>::new());
    let expected = [
        "UPI: 60 GB/s each way",
        "PCIe 5 x16: 55 GB/s each way (4 links)",
        "NVLink bridge: 270 GB/s each way (2 links)",
    ];
    assert_eq!(lines("h100-nvl"), expected);
}

#[test]
fn the_foot_says_where_the_links_come_from() {
    let foot = |topology: &Topology| {
        check(topology);
        let picture = topology.to_svg();
        let (before, text) = picture.split_once(">links from ")?;
        let y: f64 = before.rsplit_once(" y=\"").unwrap().1.split('"').next().unwrap().parse().unwrap();
        let height: f64 = picture.split_once("height=\"").unwrap().1.split('"').next().unwrap().parse().unwrap();
        let legend = picture.rsplit_once("<line ").unwrap().1.split_once("y1=\"").unwrap().1;
        let of_legend: f64 = legend.split('"').next().unwrap().parse().unwrap();
        assert!(of_legend < y - 10.0 && y < height, "it follows the legend: {picture}");
        Some(text.split('<').next().unwrap().to_string())
    };
    let drawn = Topology::fixture("h100-nvl");
    assert_eq!(foot(&drawn).as_deref(), Some("topology file"));
    let measured = Topology::cuda(2).with_measured_links(&|_| Some([55.6e9, 54.1e9]), &|_, _| None);
    assert_eq!(foot(&measured).as_deref(), Some("measured rates"));
    let several = Topology { links_from: vec!["sysfs".into(), "<NVML>".into()], ..drawn.clone() };
    assert_eq!(foot(&several).as_deref(), Some("sysfs, &lt;NVML&gt;"));
    assert_eq!(foot(&Topology { links_from: Vec::new(), ..drawn }), None, "not known");
    assert_eq!(foot(&Topology::host(2)), None, "no links");
}

#[test]
fn a_gpu_shows_its_model_memory_and_uuid() {
    let mut topology = Topology::cuda(4);
    for gpu in &mut topology.devices {
        gpu.model = Some("NVIDIA RTX PRO 6000 Blackwell Server Edition".into());
        gpu.memory_bytes = Some(90 << 30);
        gpu.uuid = Some(format!("GPU-704cafa{}-ba7e-169b-5d7d-88ca4e64f449", gpu.index));
    }
    let topology = topology.with_measured_links(&|_| Some([55.6e9, 54.1e9]), &|_, _| Some(389e9));
    check(&topology);
    let picture = topology.to_svg();
    for expected in [">RTX PRO 6000…<", ">90 GiB<", ">GPU-704cafa3<", ">NVLink, measured: 389 GB/s each way (4 links)<"]
    {
        assert!(picture.contains(expected), "{expected}: {picture}");
    }
    assert!(picture.contains("cuda:3: RTX PRO 6000 Blackwell Server Edition, 90 GiB, GPU-704cafa3"), "{picture}");
}
