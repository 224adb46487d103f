//! Facts about the host and the limits of this process, from the system's files under a root.
//!
//! | fact | files |
//! |---|---|
//! | memory | `/proc/meminfo`, `memory.max` or `memory.limit_in_bytes` of the control groups |
//! | CPUs | `/proc/self/status`, `/sys/devices/system/cpu/`, `cpu.max` or `cpu.cfs_quota_us` |
//! | driver and GPUs | `/proc/driver/nvidia/`, `/sys/bus/pci/devices/` |
//! | NUMA nodes | `/sys/devices/system/node/` |
//! | huge pages | `/sys/kernel/mm/transparent_hugepage/` |

use std::collections::BTreeSet;
use std::path::Path;

use crate::memory::{ControlGroup, control_groups, machine_memory_bytes, memory_free, memory_limit};
use crate::topology::{NumaNode, NumaNodes, lane_rate, number_list};

/// PCI vendor of NVIDIA.
const NVIDIA: &str = "0x10de";

/// PCI classes of GPUs: with and without a display.
const GPU_CLASSES: [&str; 2] = ["0x0300", "0x0302"];

/// Facts from the system's files. `None` and empty: the system does not say.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct System {
    pub machine_memory_bytes: Option<u64>,
    /// Bytes that this process may use: the least of its control groups' limits and the machine's.
    pub memory_limit_bytes: Option<u64>,
    /// Bytes that this process may use in addition to those in use.
    pub memory_free_bytes: Option<u64>,
    /// CPUs that the machine has online.
    pub machine_cpus: BTreeSet<u32>,
    /// CPUs on which this process may run.
    pub allowed_cpus: BTreeSet<u32>,
    /// CPUs whose time the control groups give to this process.
    pub cpu_quota: Option<f64>,
    /// Version of the kernel's NVIDIA driver.
    pub driver: Option<String>,
    /// NVIDIA GPUs on the PCI bus, of this process or not.
    pub gpus: Vec<PciGpu>,
    /// Slices of GPUs (MIG) that the driver has made.
    pub gpu_slices: usize,
    pub nodes: Vec<NumaNode>,
    /// Chosen mode of transparent huge pages, for anonymous memory and for files in memory.
    pub huge_pages: Option<String>,
    pub shared_huge_pages: Option<String>,
}

/// A GPU on the PCI bus.
#[derive(Clone, Debug, PartialEq)]
pub struct PciGpu {
    /// Address in lower case, such as `0000:1b:00.0`.
    pub address: String,
    pub numa_node: Option<u32>,
    /// Lanes of the link, and the lanes that GPU and slot could have.
    pub width: Option<u32>,
    pub width_max: Option<u32>,
    /// Bytes per second that the link carries in each direction at the GPU's best speed.
    pub link_rate: Option<f64>,
}

impl System {
    /// Reads the facts from the files under `root`, which is `/` except in tests.
    pub fn read(root: &Path) -> Self {
        let status = text(root, "proc/self/status").unwrap_or_default();
        let of_status = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
        let thp = |file: &str| chosen(&text(root, &format!("sys/kernel/mm/transparent_hugepage/{file}"))?);
        Self {
            machine_memory_bytes: machine_memory_bytes(root),
            memory_limit_bytes: memory_limit(root),
            memory_free_bytes: memory_free(root),
            machine_cpus: text(root, "sys/devices/system/cpu/online")
                .map(|text| number_list(&text))
                .unwrap_or_default(),
            allowed_cpus: of_status("Cpus_allowed_list:").map(number_list).unwrap_or_default(),
            cpu_quota: cpu_quota(root),
            driver: text(root, "proc/driver/nvidia/version").and_then(|text| driver_version(&text)),
            gpus: gpus(root),
            gpu_slices: gpu_slices(root),
            nodes: NumaNodes::read(root).nodes,
            huge_pages: thp("enabled"),
            shared_huge_pages: thp("shmem_enabled"),
        }
    }
}

fn text(root: &Path, path: &str) -> Option<String> {
    Some(std::fs::read_to_string(root.join(path)).ok()?.trim().to_owned())
}

/// Returns the names in a folder, in order; none if there is no such folder.
fn names(root: &Path, folder: &str) -> Vec<String> {
    let entries = std::fs::read_dir(root.join(folder)).into_iter().flatten();
    let mut names: Vec<String> = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok()).collect();
    names.sort();
    names
}

/// Returns the option in brackets: `always` of `[always] madvise never`.
fn chosen(options: &str) -> Option<String> {
    Some(options.split_once('[')?.1.split_once(']')?.0.to_owned())
}

/// Returns the least quota of the process's control groups, in CPUs.
fn cpu_quota(root: &Path) -> Option<f64> {
    let quota = |group: ControlGroup| {
        let read = |file: &str| text(&group.folder, file);
        let (quota, period) = match group.is_first_version {
            true => (read("cpu.cfs_quota_us")?, read("cpu.cfs_period_us")?),
            false => {
                let both = read("cpu.max")?;
                let (quota, period) = both.split_once(' ')?;
                (quota.to_owned(), period.to_owned())
            }
        };
        // No quota is `max`, or -1 in the first version.
        let (quota, period): (f64, f64) = (quota.parse().ok()?, period.parse().ok()?);
        (quota > 0.0 && period > 0.0).then(|| quota / period)
    };
    control_groups(root, "cpu").into_iter().filter_map(quota).min_by(f64::total_cmp)
}

/// Finds the version in the driver's description of itself, the first word that is numbers and
/// dots.
fn driver_version(text: &str) -> Option<String> {
    let is_version = |word: &&str| word.contains('.') && word.split('.').all(|part| part.parse::<u32>().is_ok());
    Some(text.lines().next()?.split_whitespace().find(is_version)?.to_owned())
}

fn gpus(root: &Path) -> Vec<PciGpu> {
    let devices = "sys/bus/pci/devices";
    let read = |address: &str, file: &str| text(root, &format!("{devices}/{address}/{file}"));
    let is_gpu = |address: &String| {
        let class = read(address, "class").unwrap_or_default();
        read(address, "vendor").as_deref() == Some(NVIDIA) && GPU_CLASSES.iter().any(|known| class.starts_with(known))
    };
    let gpu = |address: String| {
        let number = |file: &str| read(&address, file)?.parse::<u32>().ok();
        // A link without a device behind it has 255 or no lanes.
        let lanes = |file: &str| number(file).filter(|lanes| (1..=32).contains(lanes));
        let width_max = lanes("max_link_width");
        // A link that rests is slow, so the speed of now says nothing.
        let lane_rate = read(&address, "max_link_speed").and_then(|speed| lane_rate(&speed));
        PciGpu {
            numa_node: number("numa_node"),
            width: lanes("current_link_width"),
            width_max,
            link_rate: lane_rate.zip(width_max).map(|(rate, lanes)| rate * f64::from(lanes)),
            address,
        }
    };
    names(root, devices).into_iter().filter(is_gpu).map(gpu).collect()
}

/// Counts the slices of all GPUs: `capabilities/gpu0/mig/gi3/access`.
fn gpu_slices(root: &Path) -> usize {
    let folder = "proc/driver/nvidia/capabilities";
    let of_gpu = |gpu: String| {
        let slices = names(root, &format!("{folder}/{gpu}/mig"));
        slices.into_iter().filter(|name| name.starts_with("gi")).count()
    };
    names(root, folder).into_iter().filter(|name| name.starts_with("gpu")).map(of_gpu).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::testing::{DGX, LAPTOP, tree};

    #[test]
    fn the_files_of_a_host_with_gpus_are_read() {
        let system = System::read(tree(DGX).path());
        assert_eq!(system.driver.as_deref(), Some("580.95.05"));
        assert_eq!(system.gpus.len(), 2, "the NVSwitch and the network card are no GPUs");
        let gpu = &system.gpus[0];
        assert_eq!(
            (&*gpu.address, gpu.numa_node, gpu.width, gpu.width_max),
            ("0000:1b:00.0", Some(0), Some(16), Some(16))
        );
        assert!((63.0e9..63.1e9).contains(&gpu.link_rate.unwrap()), "{gpu:?}");
        assert_eq!(
            system.nodes.iter().map(|node| (node.index, node.cpus.len())).collect::<Vec<_>>(),
            [(0, 56), (1, 56)]
        );
        assert_eq!((system.machine_cpus.len(), system.allowed_cpus.len(), system.cpu_quota), (112, 112, None));
        assert_eq!(system.memory_limit_bytes, Some(2 << 40));
        assert_eq!(
            (system.huge_pages.as_deref(), system.shared_huge_pages.as_deref()),
            (Some("madvise"), Some("never"))
        );
    }

    #[test]
    fn the_limits_of_a_container_are_read_in_both_versions_of_control_groups() {
        let second = [
            ("proc/self/cgroup", "0::/\n"),
            ("sys/fs/cgroup/memory.max", "4294967296\n"),
            ("sys/fs/cgroup/cpu.max", "150000 100000\n"),
        ];
        let first = [
            ("proc/self/cgroup", "5:cpu,cpuacct:/docker/a\n4:memory:/docker/a\n"),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "4294967296\n"),
            ("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "150000\n"),
            ("sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n"),
        ];
        for files in [&second[..], &first[..]] {
            let system = System::read(tree(&[LAPTOP, files].concat()).path());
            assert_eq!(system.cpu_quota, Some(1.5), "{files:?}");
            assert_eq!(system.memory_limit_bytes, Some(4 << 30), "{files:?}");
            assert_eq!(system.machine_memory_bytes, Some(16 << 30), "{files:?}");
        }
        let none = [("proc/self/cgroup", "0::/\n"), ("sys/fs/cgroup/cpu.max", "max 100000\n")];
        assert_eq!(System::read(tree(&[LAPTOP, &none].concat()).path()).cpu_quota, None);
    }

    #[test]
    fn slices_of_gpus_are_counted() {
        let slices = [
            ("proc/driver/nvidia/capabilities/gpu0/mig/gi1/access", ""),
            ("proc/driver/nvidia/capabilities/gpu0/mig/gi2/access", ""),
            ("proc/driver/nvidia/capabilities/gpu1/mig/gi1/access", ""),
            ("proc/driver/nvidia/capabilities/mig/config", ""),
        ];
        assert_eq!(System::read(tree(&[DGX, &slices].concat()).path()).gpu_slices, 3);
    }

    #[test]
    fn an_empty_root_says_nothing() {
        assert_eq!(System::read(tree(&[]).path()), System::default());
    }

    #[test]
    fn this_machine_has_cpus_and_memory() {
        let system = System::read(Path::new("/"));
        assert!(!system.allowed_cpus.is_empty() && system.memory_limit_bytes.is_some(), "{system:?}");
    }
}
