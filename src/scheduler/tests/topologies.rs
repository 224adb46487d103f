//! Tests of the devices that are chosen for a join on machines that topology files describe. All
//! use the same cost model. Copies and exchanges have the rates of the file, and each device works
//! at the rates of an H200, or at a part of them.

use super::*;
use crate::catalog::ColumnStatistics;
use crate::engine::SimulatedDevice;
use crate::planner::{Distribution, Resource};
use crate::topology::{SharedLinks, Topology};

/// Scheduler of a machine that plans, and runs no join.
struct Machine {
    scheduler: Scheduler,
    catalog: Catalog,
}

impl Machine {
    fn explain(&self, spec: &JoinSpec, options: &JobOptions) -> Explanation {
        explain(&self.scheduler, &self.catalog, spec, options)
    }
}

/// Returns a machine whose devices work at a share of an H200's rates.
fn machine(fixture: &str, share: f64) -> Machine {
    let devices = SimulatedDevice::all_of(&Arc::new(SharedLinks::new(Topology::fixture(fixture))), share, 1 << 30);
    let devices = devices.into_iter().map(|device| device as Arc<dyn Engine>).collect();
    let catalog = Catalog::new(Arena::new(Budget::new("host memory", "--host-memory", 64 << 20)));
    let options = SchedulerOptions { workers: false, timer: false, ..SchedulerOptions::default() };
    Machine { scheduler: Scheduler::new(catalog.clone(), devices, options), catalog }
}

/// Creates tables `a` and `b` with distinct keys of 8 bytes over the whole range, and a column of 8
/// bytes.
fn create(stage: &Machine, build_rows: u64, probe_rows: u64) -> JoinSpec {
    for (name, rows) in [("a", build_rows), ("b", probe_rows)] {
        let fields = vec![Field::new("k", DataType::Int64, false), Field::new(name, DataType::Int64, false)];
        let mut table = Table::from_batches(name, Arc::new(Schema::new(fields)), Vec::new()).unwrap();
        (table.rows, table.bytes) = (rows, 16 * rows);
        let distinct = Some(build_rows.min(rows) as f64);
        table.statistics = vec![ColumnStatistics { distinct, ..ColumnStatistics::default() }; 2];
        stage.catalog.create(table).unwrap();
    }
    JoinSpec::inner("a", "b", vec![KeyPair::new("k", "k")])
}

fn counted(spec: &JoinSpec) -> JoinSpec {
    JoinSpec { count: true, ..spec.clone() }
}

fn exactly(devices: usize) -> JobOptions {
    JobOptions { devices: DeviceRequest::Count(devices), ..JobOptions::default() }
}

/// Returns the indices of the chosen devices.
fn chosen(explained: &Explanation) -> Vec<usize> {
    explained.device.name.split(", ").map(|name| name.trim_start_matches("host:").parse().unwrap()).collect()
}

const BILLION: u64 = 1_000_000_000;

#[test]
fn two_devices_under_different_switches_come_before_two_that_share_an_uplink() {
    let stage = machine("dgx-a100", 0.45);
    let spec = counted(&create(&stage, BILLION, BILLION));
    let two = stage.explain(&spec, &exactly(2));
    assert_eq!(chosen(&two), [0, 2], "{two}");
    let pairs: Vec<(&str, usize)> = two.sets.iter().map(|set| (set.devices.as_str(), set.sets)).collect();
    assert!(pairs.contains(&("host:0, host:1", 4)), "the pairs of one switch are a class: {pairs:?}");
    let seconds = |devices: &str| two.sets.iter().find(|set| set.devices == devices).unwrap().predicted_seconds;
    assert!(seconds("host:0, host:1") > 1.5 * seconds("host:0, host:2"), "{two}");
    // One of each pair of GPUs is nearly as good as all eight, whose uplinks are the same, and as
    // good as any five to seven.
    let any = stage.explain(&spec, &JobOptions::default());
    let one_of_each = any.sets.iter().find(|set| set.devices == "host:0, host:2, host:4, host:6").unwrap();
    let least = |ranks: usize| {
        let seconds = any.sets.iter().filter(|set| set.ranks == ranks).map(|set| set.predicted_seconds);
        seconds.fold(f64::INFINITY, f64::min)
    };
    assert_eq!((one_of_each.predicted_seconds, one_of_each.bound), (least(4), Resource::LinkIn), "{any}");
    assert!((5..8).all(|ranks| least(ranks) > 0.98 * least(4)) && least(8) > 0.85 * least(4), "{any}");
}

#[test]
fn a_pair_with_a_link_of_its_own_comes_before_a_pair_across_sockets() {
    for fixture in ["h100-nvl", "ac922", "dgx-1v"] {
        let stage = machine(fixture, 0.3);
        let spec = counted(&create(&stage, BILLION / 5, BILLION / 5));
        let hash = JobOptions { distribution: Some(Distribution::Hash), ..exactly(2) };
        let two = chosen(&stage.explain(&spec, &hash));
        let direct: &[[usize; 2]] = match fixture {
            // Links of two bricks, between devices whose links to the host are separate.
            "dgx-1v" => &[[0, 3], [0, 4], [1, 2], [1, 5]],
            _ => &[[0, 1], [2, 3]],
        };
        assert!(direct.iter().any(|pair| two == pair), "{fixture}: {two:?}");
    }
}

#[test]
fn devices_without_fast_links_between_them_each_take_the_whole_build_side() {
    let stage = machine("pcie-two-sockets", 0.2);
    let spec = counted(&create(&stage, BILLION / 10, BILLION));
    let any = stage.explain(&spec, &JobOptions::default());
    assert_eq!((any.device.distribution, any.device.ranks > 1), ("broadcast", true), "{any}");
}

#[test]
fn three_gpus_return_rows_to_the_host_about_as_fast_as_four() {
    let stage = machine("h200-x4", 1.0);
    let spec = create(&stage, BILLION, BILLION);
    let any = stage.explain(&spec, &JobOptions::default());
    assert_eq!((any.device.ranks, any.device.distribution), (3, "broadcast"), "{any}");
    let four = any.sets.iter().find(|set| set.ranks == 4).unwrap();
    assert_eq!((four.bound, four.rejected.is_some()), (Resource::HostMemory, true), "{any}");
    // By hash, rows leave their table, so that the result cannot share its columns.
    let hash = JobOptions { distribution: Some(Distribution::Hash), ..exactly(4) };
    let bytes = |explained: &Explanation| explained.result.predicted_bytes / explained.device.ranks as u64;
    let hashed = stage.explain(&spec, &hash);
    let gathered = hashed.phases.iter().find(|phase| phase.phase.name() == "gather").unwrap().predicted_bytes.unwrap();
    assert!(gathered >= 2 * bytes(&hashed), "{hashed}");
    // Rows that are only counted come in faster with each.
    let count = stage.explain(&counted(&spec), &JobOptions::default());
    assert_eq!(count.device.ranks, 4, "{count}");
}

#[test]
fn large_counts_take_all_devices_and_small_joins_take_one() {
    let stage = machine("dgx-h100", 0.8);
    let spec = counted(&create(&stage, 2 * BILLION, 2 * BILLION));
    let all = stage.explain(&spec, &JobOptions::default());
    assert_eq!(all.device.ranks, 8, "{all}");
    let small = machine("dgx-h100", 0.8);
    let spec = counted(&create(&small, 1 << 20, 1 << 22));
    assert_eq!(small.explain(&spec, &JobOptions::default()).device.ranks, 1);
}

#[test]
fn gpus_without_a_path_between_them_still_divide_rows_that_each_reads_itself() {
    let stage = machine("gh200-x2", 1.0);
    let spec = counted(&create(&stage, BILLION / 10, BILLION));
    let any = stage.explain(&spec, &JobOptions::default());
    assert_eq!((any.device.ranks, any.device.distribution), (2, "broadcast"), "{any}");
}

#[test]
fn all_gpus_of_a_board_join_a_large_table() {
    let stage = machine("gb200-nvl4", 2.0);
    let spec = counted(&create(&stage, 2 * BILLION, 2 * BILLION));
    let any = stage.explain(&spec, &JobOptions::default());
    assert_eq!(any.device.ranks, 4, "{any}");
}

#[test]
fn a_join_that_fits_on_no_device_takes_several() {
    let stage = machine("dgx-1v", 0.3);
    let alone = |spec: &JoinSpec| {
        let bound = bind(spec, &stage.catalog).unwrap();
        stage.scheduler.explain(bound, &exactly(1), "", &Interrupt::default()).map(|explained| explained.refusal)
    };
    let spec = create(&stage, 2 * BILLION, 2 * BILLION);
    assert!(matches!(alone(&spec), Ok(Some(_))), "a side does not fit");
    let any = stage.explain(&spec, &JobOptions::default());
    assert_eq!((any.device.ranks > 1, any.device.distribution), (true, "hash"), "{any}");
    assert!(any.sets[0].rejected.as_ref().is_some_and(|why| why.contains("of memory on each")), "{any}");
    for name in ["a", "b"] {
        stage.catalog.drop_table(name, &Editor { tenant: String::new(), is_admin: true }).unwrap();
    }
    let spec = counted(&create(&stage, 5 * BILLION, 5 * BILLION));
    assert!(matches!(alone(&spec), Err(Error::Unsupported(_))), "no device can index either side");
    let any = stage.explain(&spec, &JobOptions::default());
    assert_eq!((any.device.ranks > 1, any.device.distribution), (true, "hash"), "{any}");
}
