//! Checks of facts: what was found, what it means, and what to change.

use std::collections::BTreeSet;

use serde::Serialize;

use super::Facts;
use super::system::PciGpu;
use crate::device::{GpuSeen, VISIBLE_GPUS, is_slice, unknown_visible_gpu};
use crate::human::{counted, first_of};
use crate::memory::human_bytes;

/// Oldest driver branch with CUDA 13, which the kernels are compiled for.
const DRIVER_MIN: u32 = 580;

/// Memory below which a server holds little more than the tables of the demo.
const MEMORY_MIN: u64 = 1 << 30;

/// Share of a link's raw rate that copies should reach. 80 to 88% were measured with PCI Express 5,
/// and 72 to 87% with NVLink 4, whose rate is measured while all GPUs write.
const HOST_SHARE_MIN: f64 = 0.7;
const PEER_SHARE_MIN: f64 = 0.6;

/// CPU threads per GPU that uploads, readers and the GPU's helpers keep busy.
const CPUS_PER_GPU_MIN: usize = 4;

/// Open files that the server can use: as many connections as its default limit, and some more.
const FILES_MIN: u64 = 12_000;

/// Locked memory below which some drivers refuse to pin.
const MEMLOCK_MIN: u64 = 1 << 30;

/// Name of the check of huge pages.
pub(super) const HUGE_PAGES: &str = "huge pages";

/// Name of the check of free memory.
pub(super) const FREE_MEMORY: &str = "free memory";

/// NVLink rates out of a GPU in each direction, in bytes per second, by a part of the GPU's name.
/// Boards of these models for PCI Express have other names.
const NVLINK: &[(&str, f64)] = &[
    ("A100-SXM", 300e9),
    ("H100 80GB HBM3", 450e9),
    ("H100 SXM", 450e9),
    ("H200", 450e9),
    ("H20", 450e9),
    ("B200", 900e9),
    ("GB200", 900e9),
    ("B300", 900e9),
];

/// Verdict of a check, from the best.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// Nothing to change.
    Good,
    /// The server works, but slower, or with less, than the host could give.
    Attention,
    /// Something that the host has cannot be used.
    Fault,
}

/// Outcome of a check.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Finding {
    /// Name of the check: `memory`, `driver`.
    pub check: &'static str,
    pub verdict: Verdict,
    pub found: String,
    pub means: String,
    /// Empty if nothing is to be changed.
    pub change: String,
}

impl Finding {
    fn good(check: &'static str, found: impl Into<String>, means: impl Into<String>) -> Self {
        Self { check, verdict: Verdict::Good, found: found.into(), means: means.into(), change: String::new() }
    }

    fn unless_good(self, verdict: Verdict, means: impl Into<String>, change: impl Into<String>) -> Self {
        Self { verdict, means: means.into(), change: change.into(), ..self }
    }

    fn attention(self, means: impl Into<String>, change: impl Into<String>) -> Self {
        self.unless_good(Verdict::Attention, means, change)
    }

    fn fault(self, means: impl Into<String>, change: impl Into<String>) -> Self {
        self.unless_good(Verdict::Fault, means, change)
    }
}

/// Runs all checks, in the order of the table.
pub(super) fn findings(facts: &Facts) -> Vec<Finding> {
    let checks = [
        driver(facts),
        gpus(facts),
        uuids(facts),
        slices(facts),
        peers(facts),
        host_links(facts),
        peer_links(facts),
        memory(facts),
        free_memory(facts),
        cpus(facts),
        numa(facts),
        huge_pages(facts),
        memlock(facts),
        files(facts),
    ];
    checks.into_iter().flatten().collect()
}

fn driver(facts: &Facts) -> Option<Finding> {
    let on_bus = facts.system.gpus.len() as u64;
    let has_gpu = on_bus > 0;
    let Some(version) = &facts.system.driver else {
        let found = Finding::good("driver", "no NVIDIA driver", "joins run on the CPU");
        return Some(match has_gpu {
            true => found.fault(
                format!("the {} of this host cannot be used", counted(on_bus, "NVIDIA GPU")),
                format!("install NVIDIA's driver, {DRIVER_MIN} or later; in a container, start it with --gpus all"),
            ),
            false => found,
        });
    };
    let found = Finding::good("driver", format!("NVIDIA driver {version}"), "the server can use GPUs");
    let major = version.split('.').next().and_then(|major| major.parse::<u32>().ok());
    if major.is_some_and(|major| major < DRIVER_MIN) {
        let change = format!("install driver {DRIVER_MIN} or later");
        return Some(found.fault("the kernels need CUDA 13, which this driver does not have", change));
    }
    Some(match &facts.gpus {
        Err(why) => found.fault(
            format!("the driver does not work: {}", why.message()),
            "restart the driver, or the host; in a container, start it with --gpus all",
        ),
        Ok(gpus) if gpus.is_empty() && has_gpu => found.fault(
            format!("the GPUs cannot be used: {}{}", facts.why_no_gpu, hidden(facts)),
            "in a container, start it with --gpus all, and NVIDIA_DRIVER_CAPABILITIES=compute,utility; elsewhere, look at \
             CUDA_VISIBLE_DEVICES",
        ),
        Ok(_) => found,
    })
}

fn gpus(facts: &Facts) -> Option<Finding> {
    let seen = facts.gpus.as_ref().ok().filter(|gpus| !gpus.is_empty())?;
    let mut names: Vec<(&str, u64)> = Vec::new();
    for gpu in seen {
        match names.iter_mut().find(|(name, _)| *name == gpu.name) {
            Some((_, count)) => *count += 1,
            None => names.push((&gpu.name, 1)),
        }
    }
    let names: Vec<String> = names.into_iter().map(|(name, count)| format!("{count} × {name}")).collect();
    let memory: u64 = seen.iter().map(|gpu| gpu.memory_bytes).sum();
    let found = format!("{}, {}", names.join(", "), human_bytes(memory));
    let found = Finding::good("gpus", found, "joins run on them");
    let used: BTreeSet<&str> = seen.iter().map(|gpu| gpu.pci_address.as_str()).collect();
    let on_bus = facts.system.gpus.len();
    Some(match used.len() < on_bus {
        true => found.attention(
            format!(
                "this process sees {} of {} of the host{}",
                used.len(),
                counted(on_bus as u64, "GPU"),
                hidden(facts)
            ),
            "give the container the others too (--gpus all), unless they are meant for other programs; one server with \
             all GPUs joins larger tables than a server for each",
        ),
        false => found,
    })
}

/// Describes the entry of the setting at which CUDA stops, as a clause; empty if there is none.
fn hidden(facts: &Facts) -> String {
    let shown = facts.gpus.as_ref().map_or(0, Vec::len);
    let unknown = facts.visible_gpus.as_deref().and_then(|setting| unknown_visible_gpu(setting, shown));
    let clause = |entry| format!("; {entry:?} in {VISIBLE_GPUS} names no GPU, so CUDA ignores it and all after it");
    unknown.map(clause).unwrap_or_default()
}

fn uuids(facts: &Facts) -> Option<Finding> {
    let named = |(number, gpu): (usize, &GpuSeen)| Some(format!("cuda:{number} is {}", gpu.uuid.as_ref()?));
    let found: Vec<String> = facts.gpus.iter().flatten().enumerate().filter_map(named).collect();
    (!found.is_empty()).then(|| {
        Finding::good("uuids of gpus", found.join(", "), "nvidia-smi may number the same GPUs in another order")
    })
}

fn slices(facts: &Facts) -> Option<Finding> {
    let named = facts.gpus.iter().flatten().filter(|gpu| is_slice(&gpu.name)).count();
    let slices = named.max(facts.system.gpu_slices) as u64;
    (slices > 0).then(|| {
        Finding::good("slices of gpus", counted(slices, "MIG slice"), "").attention(
            "a slice shares no memory with another, so each join runs on one slice; CUDA shows a process one slice only",
            "turn MIG off for large joins (nvidia-smi -mig 0), or run a server for each slice",
        )
    })
}

fn peers(facts: &Facts) -> Option<Finding> {
    let gpus = facts.gpus.as_ref().ok().filter(|gpus| gpus.len() > 1)?;
    let pairs = |can: bool| -> Vec<String> {
        let of = |(at, gpu): (usize, &GpuSeen)| -> Vec<String> {
            let others = gpu.peers.iter().enumerate().filter(|&(peer, &is)| peer != at && is == can);
            others.map(|(peer, _)| format!("{at}→{peer}")).collect()
        };
        gpus.iter().enumerate().flat_map(of).collect()
    };
    let (with, without) = (pairs(true), pairs(false));
    let found = format!("{} of {} pairs of GPUs", with.len(), with.len() + without.len());
    let found = Finding::good("peer access", found, "rows go straight from GPU to GPU");
    Some(match without.is_empty() {
        true => found,
        false => found.attention(
            format!("without it, rows go through host memory ({})", first_of(without.iter().take(4))),
            "check NVLink and the fabric manager (nvidia-smi topo -m); PCI Express needs ACS turned off",
        ),
    })
}

fn gigabytes(rate: f64) -> String {
    format!("{:.1} GB/s", rate / 1e9)
}

/// Copies between host memory and each model of GPU, beside the raw rate of its link.
fn host_links(facts: &Facts) -> Option<Finding> {
    let gpus = facts.gpus.as_ref().ok().filter(|gpus| !gpus.is_empty())?;
    let on_bus = |address: &str| facts.system.gpus.iter().find(|gpu| gpu.address == address);
    let pci: Vec<&PciGpu> = gpus.iter().filter_map(|gpu| on_bus(&gpu.pci_address)).collect();
    let narrow: Vec<String> = pci
        .iter()
        .filter_map(|gpu| Some((gpu, gpu.width?, gpu.width_max?)).filter(|(_, now, most)| now < most))
        .map(|(gpu, now, most)| format!("{}: {now} of {most} lanes", gpu.address))
        .collect();
    if !narrow.is_empty() {
        return Some(Finding::good("host links", narrow.join(", "), "").attention(
            "copies to and from this GPU take longer than they need to",
            "seat the GPU again, or look for a slot or a riser with fewer lanes",
        ));
    }
    let raw = pci.iter().filter_map(|gpu| gpu.link_rate).min_by(f64::total_cmp);
    let shown = raw.map(|rate| format!(", links carry {}", gigabytes(rate))).unwrap_or_default();
    let Some((name, to_gpu, from_gpu)) = facts.host_rates.first().cloned() else {
        return raw.map(|_| {
            let found = format!("not measured yet{shown}");
            Finding::good("host links", found, "the server measures them at its first start")
        });
    };
    let found = format!("{name}: {} to it, {} from it{shown}", gigabytes(to_gpu), gigabytes(from_gpu));
    let found = Finding::good("host links", found, "copies are as fast as such links allow");
    Some(match raw {
        Some(rate) if to_gpu.min(from_gpu) < HOST_SHARE_MIN * rate => found.attention(
            format!("such a link should reach {} each way", gigabytes(0.85 * rate)),
            "measure on an idle host (serve --recalibrate); then check the slot, power saving and the NUMA node of memory",
        ),
        Some(_) => found,
        None => Finding { means: "this host does not say what its links carry".into(), ..found },
    })
}

/// Copies between GPUs, beside the raw rate of its NVLink.
fn peer_links(facts: &Facts) -> Option<Finding> {
    let gpus = facts.gpus.as_ref().ok().filter(|gpus| gpus.len() > 1)?;
    let least = facts.peer_rate?;
    let raw = NVLINK.iter().filter(|(part, _)| gpus[0].name.contains(part)).map(|(_, rate)| *rate).next();
    let shown = raw.map(|rate| format!(", NVLink carries {}", gigabytes(rate))).unwrap_or_default();
    let found = format!("{} out of each GPU{shown}", gigabytes(least));
    let found = Finding::good("peer links", found, "rows cross as fast as such links allow");
    Some(match raw {
        Some(rate) if least < PEER_SHARE_MIN * rate => found.attention(
            format!("such GPUs should reach {}", gigabytes(0.85 * rate)),
            "check nvidia-smi nvlink -s and the fabric manager; measure again with serve --recalibrate",
        ),
        Some(_) => found,
        None => Finding { means: "rows cross at this rate; it is not known what such GPUs reach".into(), ..found },
    })
}

fn memory(facts: &Facts) -> Option<Finding> {
    let system = &facts.system;
    let limit = system.memory_limit_bytes?;
    let machine = system.machine_memory_bytes.unwrap_or(limit);
    let bounded = if limit < machine { format!("{} of ", human_bytes(limit)) } else { String::new() };
    let found = format!("{bounded}{}", human_bytes(machine));
    let means = format!("tables and results may take {} by default", human_bytes(limit / 10 * 6));
    let found = Finding::good("memory", found, means);
    if limit < MEMORY_MIN {
        return Some(found.attention(
            "the container's limit leaves little more than the tables of the demo",
            "raise the limit (docker run --memory), or give --host-memory a size that fits your tables",
        ));
    }
    Some(found)
}

/// Memory that other programs leave. Only a server knows how much its own settings take.
fn free_memory(facts: &Facts) -> Option<Finding> {
    let (limit, free) = (facts.system.memory_limit_bytes?, facts.system.memory_free_bytes?);
    let found = Finding::good(FREE_MEMORY, human_bytes(free), "enough for the default of --host-memory, 60%");
    Some(match free < limit / 10 * 6 {
        true => found.attention(
            "less than tables and results may take by default",
            "end other programs, or give --host-memory a size below this",
        ),
        false => found,
    })
}

fn cpus(facts: &Facts) -> Option<Finding> {
    let system = &facts.system;
    let allowed = system.allowed_cpus.len();
    if allowed == 0 {
        return None;
    }
    let machine = system.machine_cpus.len().max(allowed);
    let bounded = if allowed < machine { format!("{allowed} of ") } else { String::new() };
    let quota = system.cpu_quota.filter(|quota| *quota < allowed as f64);
    let time = quota.map(|quota| format!(", and the time of {quota:.1}")).unwrap_or_default();
    let found = format!("{bounded}{}{time}", counted(machine as u64, "CPU"));
    let found = Finding::good("cpus", found, "uploads, readers and joins on the CPU share them");
    let gpus = facts.gpus.as_ref().map_or(0, Vec::len);
    if quota.is_some() {
        return Some(found.attention(
            "the system stops all threads for the rest of each period once this time is used up",
            "give whole CPUs instead (--cpuset-cpus 0-7 instead of --cpus)",
        ));
    }
    Some(match allowed < CPUS_PER_GPU_MIN * gpus {
        true => found.attention(
            format!("uploads and readers need about {CPUS_PER_GPU_MIN} for each GPU, or GPUs wait for them"),
            "give the container more CPUs (--cpuset-cpus)",
        ),
        false => found,
    })
}

fn numa(facts: &Facts) -> Option<Finding> {
    let system = &facts.system;
    if system.nodes.is_empty() {
        return None;
    }
    let of_gpus: BTreeSet<u32> = system.gpus.iter().filter_map(|gpu| gpu.numa_node).collect();
    let count = counted(system.nodes.len() as u64, "node");
    let placed = match of_gpus.is_empty() {
        true => String::new(),
        false => format!(", GPUs on {}", first_of(of_gpus.iter().map(u32::to_string).collect::<Vec<_>>().iter())),
    };
    let found =
        Finding::good("numa", format!("{count}{placed}"), "host memory is as near to every CPU and GPU as it can be");
    if system.nodes.len() == 1 {
        return Some(found);
    }
    let usable = |node: u32| {
        let node = system.nodes.iter().find(|other| other.index == node);
        node.is_some_and(|node| node.cpus.is_empty() || !node.cpus.is_disjoint(&system.allowed_cpus))
    };
    let far: Vec<String> = of_gpus.iter().filter(|&&node| !usable(node)).map(u32::to_string).collect();
    if !far.is_empty() {
        return Some(found.attention(
            format!(
                "this process has no CPU on node {}, so copies to the GPUs there cross the sockets",
                first_of(far.iter())
            ),
            "give the container CPUs of every node that has a GPU (--cpuset-cpus), or the GPUs of its own node only",
        ));
    }
    Some(match &facts.choice_of_node {
        Ok(()) if of_gpus.is_empty() => {
            Finding { means: "memory is on the node whose thread touches it first".into(), ..found }
        }
        Ok(()) => Finding {
            means: "threads of a GPU run on its node, and host memory comes from the GPUs' nodes in turn".into(),
            ..found
        },
        Err(why) => found.attention(
            format!(
                "memory is on the node whose thread touches it first, as the server may not choose: {}",
                why.message()
            ),
            "start the container with --cap-add SYS_NICE",
        ),
    })
}

fn huge_pages(facts: &Facts) -> Option<Finding> {
    let system = &facts.system;
    let modes = match (&system.huge_pages, &system.shared_huge_pages) {
        (Some(own), Some(shared)) => format!("transparent: {own}, for shared memory: {shared}"),
        _ => return None,
    };
    let gives = |mode: &Option<String>, modes: &[&str]| mode.as_deref().is_some_and(|mode| modes.contains(&mode));
    let own = gives(&system.huge_pages, &["always", "madvise"]);
    let shared = gives(&system.shared_huge_pages, &["always", "within_size", "advise", "force"]);
    let found = Finding::good(HUGE_PAGES, modes, "host memory is mapped in pages of 2 MiB");
    // Several GPUs have processes of their own, which need memory that they can share.
    let needs_shared = facts.gpus.as_ref().is_ok_and(|gpus| gpus.len() > 1);
    let why = match &facts.own_tmpfs {
        Ok(()) => return Some(found),
        Err(why) => why.message(),
    };
    Some(match shared || (own && !needs_shared) {
        true => found,
        false => found.attention(
            format!(
                "memory is mapped in pages of 4 KiB, which takes about five times as long; the server may not mount a \
                 tmpfs of its own ({why})"
            ),
            "mount a tmpfs with huge=always and name it with --arena-directory, or write advise to \
             /sys/kernel/mm/transparent_hugepage/shmem_enabled",
        ),
    })
}

fn memlock(facts: &Facts) -> Option<Finding> {
    let has_gpu = facts.gpus.as_ref().is_ok_and(|gpus| !gpus.is_empty());
    let limit = facts.memlock_bytes;
    let found = limit.map_or_else(|| "unlimited".into(), human_bytes);
    let found = Finding::good("locked memory", found, "host memory for GPUs can be pinned");
    match (has_gpu, limit) {
        // Only GPUs need pinned memory.
        (false, _) => None,
        // On a host with driver 580 and a limit of 64 MiB, 38 GiB were pinned.
        (true, Some(bytes)) if bytes < MEMLOCK_MIN => Some(Finding {
            means:
                "driver 580 pins more than this; if pinning is refused, start the container with --ulimit memlock=-1"
                    .into(),
            ..found
        }),
        _ => Some(found),
    }
}

fn files(facts: &Facts) -> Option<Finding> {
    let found = facts.open_files.map_or_else(|| "unlimited".into(), |files| counted(files, "open file"));
    let found = Finding::good("files", found, "as many as the server's limit of connections needs");
    Some(match facts.open_files {
        Some(files) if files < FILES_MIN => found.attention(
            "the server admits fewer connections than its default of 10,000",
            "raise the limit (docker run --ulimit nofile=65536, LimitNOFILE= in systemd), if that many clients come",
        ),
        _ => found,
    })
}
