//! Trees of files that stand for the system's own.

use std::path::Path;

/// A machine of two cores and 16 GiB without GPUs, as it is usually set up.
pub const LAPTOP: &[(&str, &str)] = &[
    ("proc/meminfo", "MemTotal:       16777216 kB\nMemAvailable:   12582912 kB\n"),
    ("proc/self/status", "Name:\tdovetail\nCapEff:\t0000000000000000\nCpus_allowed_list:\t0-1\n"),
    ("sys/devices/system/cpu/online", "0-1\n"),
    ("sys/devices/system/node/node0/cpulist", "0-1\n"),
    ("sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n"),
    ("sys/kernel/mm/transparent_hugepage/shmem_enabled", "always within_size advise [never] deny force\n"),
];

/// A host with two GPUs on two sockets, in full width, and all rights.
pub const DGX: &[(&str, &str)] = &[
    ("proc/meminfo", "MemTotal:       2147483648 kB\nMemAvailable:   2040109465 kB\n"),
    ("proc/self/status", "Name:\tdovetail\nCapEff:\t000001ffffffffff\nCpus_allowed_list:\t0-111\n"),
    (
        "proc/driver/nvidia/version",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\n",
    ),
    ("sys/devices/system/cpu/online", "0-111\n"),
    ("sys/devices/system/node/node0/cpulist", "0-55\n"),
    ("sys/devices/system/node/node1/cpulist", "56-111\n"),
    ("sys/bus/pci/devices/0000:1b:00.0/vendor", "0x10de\n"),
    ("sys/bus/pci/devices/0000:1b:00.0/class", "0x030200\n"),
    ("sys/bus/pci/devices/0000:1b:00.0/numa_node", "0\n"),
    ("sys/bus/pci/devices/0000:1b:00.0/max_link_speed", "32.0 GT/s PCIe\n"),
    ("sys/bus/pci/devices/0000:1b:00.0/max_link_width", "16\n"),
    ("sys/bus/pci/devices/0000:1b:00.0/current_link_width", "16\n"),
    ("sys/bus/pci/devices/0000:9a:00.0/vendor", "0x10de\n"),
    ("sys/bus/pci/devices/0000:9a:00.0/class", "0x030200\n"),
    ("sys/bus/pci/devices/0000:9a:00.0/numa_node", "1\n"),
    ("sys/bus/pci/devices/0000:9a:00.0/max_link_speed", "32.0 GT/s PCIe\n"),
    ("sys/bus/pci/devices/0000:9a:00.0/max_link_width", "16\n"),
    ("sys/bus/pci/devices/0000:9a:00.0/current_link_width", "16\n"),
    // An NVSwitch, and a network card.
    ("sys/bus/pci/devices/0000:05:00.0/vendor", "0x10de\n"),
    ("sys/bus/pci/devices/0000:05:00.0/class", "0x068000\n"),
    ("sys/bus/pci/devices/0000:18:00.0/vendor", "0x15b3\n"),
    ("sys/bus/pci/devices/0000:18:00.0/class", "0x020700\n"),
    ("sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n"),
    ("sys/kernel/mm/transparent_hugepage/shmem_enabled", "always within_size advise [never] deny force\n"),
];

/// Writes files under a new root. A later file of a path replaces an earlier one.
pub fn tree(files: &[(&str, &str)]) -> tempfile::TempDir {
    let root = tempfile::tempdir().unwrap();
    for (path, text) in files {
        write(root.path(), path, text);
    }
    root
}

fn write(root: &Path, path: &str, text: &str) {
    let path = root.join(path);
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::write(path, text).unwrap();
}
