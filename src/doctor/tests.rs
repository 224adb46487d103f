//! Verdicts on hosts that stand in fixtures.

use super::testing::{DGX, LAPTOP, tree};
use super::*;
use crate::Error;
use Verdict::{Attention, Fault, Good};

const H200: &str = "NVIDIA H200";

fn gpu(name: &str, address: &str, peers: &[bool]) -> GpuSeen {
    GpuSeen {
        name: name.into(),
        uuid: Some(format!("GPU-of-{address}")),
        pci_address: address.into(),
        memory_bytes: 141 << 30,
        peers: peers.into(),
    }
}

fn both() -> Vec<GpuSeen> {
    vec![gpu(H200, "0000:1b:00.0", &[true, true]), gpu(H200, "0000:9a:00.0", &[true, true])]
}

/// Facts of a host of files, with GPUs, and with nothing else to be said against it.
fn facts(files: &[(&str, &str)], gpus: Vec<GpuSeen>) -> Facts {
    Facts {
        system: System::read(tree(files).path()),
        gpus: Ok(gpus),
        visible_gpus: None,
        why_no_gpu: "the CUDA driver shows it no GPU".into(),
        host_rates: vec![],
        peer_rate: None,
        own_tmpfs: Ok(()),
        choice_of_node: Ok(()),
        memlock_bytes: None,
        open_files: Some(1 << 20),
    }
}

fn with<'a>(base: &[(&'a str, &'a str)], more: &[(&'a str, &'a str)]) -> Vec<(&'a str, &'a str)> {
    [base, more].concat()
}

fn finding(facts: &Facts, check: &str) -> Finding {
    let findings = facts.findings();
    findings.iter().find(|finding| finding.check == check).unwrap_or_else(|| panic!("{check}: {findings:?}")).clone()
}

/// Checks the verdict and a part of what is found, meant and advised.
fn expect(facts: &Facts, check: &str, verdict: Verdict, parts: &[&str]) {
    let finding = finding(facts, check);
    assert_eq!(finding.verdict, verdict, "{finding:?}");
    let text = format!("{}; {}; {}", finding.found, finding.means, finding.change);
    for part in parts {
        assert!(text.contains(part), "{part}: {text}");
    }
    assert_eq!(finding.change.is_empty(), verdict == Good, "{finding:?}");
    let is_told = verdict > Good && !["huge pages", "free memory"].contains(&check);
    assert_eq!(log_lines(&[finding]).len(), usize::from(is_told));
}

#[test]
fn a_machine_without_gpus_is_good() {
    let facts = facts(LAPTOP, vec![]);
    assert_eq!(verdict(&facts.findings()), Good, "{:?}", facts.findings());
    expect(&facts, "driver", Good, &["no NVIDIA driver", "joins run on the CPU"]);
    expect(&facts, "memory", Good, &["16.0 GiB", "9.6 GiB by default"]);
    let checks: Vec<&str> = facts.findings().iter().map(|finding| finding.check).collect();
    assert_eq!(checks, ["driver", "memory", "free memory", "cpus", "numa", "huge pages", "files"]);
    assert!(log_lines(&facts.findings()).is_empty());
}

#[test]
fn a_host_whose_gpus_are_all_used_is_good() {
    let mut facts = facts(DGX, both());
    facts.host_rates = vec![(H200.into(), 55.6e9, 55.4e9)];
    facts.peer_rate = Some(389e9);
    assert_eq!(verdict(&facts.findings()), Good, "{:?}", facts.findings());
    expect(&facts, "gpus", Good, &["2 × NVIDIA H200, 282.0 GiB"]);
    expect(&facts, "peer access", Good, &["2 of 2 pairs"]);
    expect(&facts, "host links", Good, &["55.6 GB/s to it, 55.4 GB/s from it, links carry 63.0 GB/s"]);
    expect(&facts, "peer links", Good, &["389.0 GB/s out of each GPU, NVLink carries 450.0 GB/s"]);
    expect(&facts, "numa", Good, &["2 nodes, GPUs on 0, 1"]);
}

#[test]
fn a_driver_that_is_missing_old_or_shows_no_gpu_is_a_fault() {
    let without: Vec<(&str, &str)> = DGX.iter().filter(|(path, _)| !path.contains("driver/nvidia")).copied().collect();
    expect(&facts(&without, vec![]), "driver", Fault, &["2 NVIDIA GPUs of this host cannot be used", "--gpus all"]);
    let old = ("proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun\n");
    expect(&facts(&with(DGX, &[old]), both()), "driver", Fault, &["535.183.01", "580 or later"]);
    expect(&facts(DGX, vec![]), "driver", Fault, &["the CUDA driver shows it no GPU", "NVIDIA_DRIVER_CAPABILITIES"]);
    let mut broken = facts(DGX, vec![]);
    broken.gpus = Err(Error::Unsupported("asking the CUDA driver for its GPUs: code 802".into()));
    expect(&broken, "driver", Fault, &["code 802"]);
    assert_eq!(verdict(&broken.findings()), Fault);
}

#[test]
fn a_container_with_one_gpu_of_several_is_told() {
    let one = facts(DGX, vec![gpu(H200, "0000:9a:00.0", &[true])]);
    expect(&one, "gpus", Attention, &["this process sees 1 of 2 GPUs", "--gpus all"]);
    assert!(one.findings().iter().all(|finding| finding.check != "peer access"));
}

#[test]
fn the_uuid_of_each_gpu_is_told() {
    let expected = "cuda:0 is GPU-of-0000:1b:00.0, cuda:1 is GPU-of-0000:9a:00.0";
    expect(&facts(DGX, both()), "uuids of gpus", Good, &[expected]);
}

#[test]
fn an_entry_of_the_setting_that_hides_gpus_is_named() {
    let mut cut = facts(DGX, both());
    cut.visible_gpus = Some("1,0".into());
    expect(&cut, "gpus", Good, &[]);
    cut.gpus = Ok(vec![gpu(H200, "0000:9a:00.0", &[true])]);
    cut.visible_gpus = Some("GPU-of-0000:9a:00.0,GPU-gone,0".into());
    expect(
        &cut,
        "gpus",
        Attention,
        &["sees 1 of 2 GPUs", "\"GPU-gone\" in CUDA_VISIBLE_DEVICES names no GPU", "all after it"],
    );
    cut.gpus = Ok(vec![]);
    cut.visible_gpus = Some("9".into());
    expect(&cut, "driver", Fault, &["\"9\" in CUDA_VISIBLE_DEVICES names no GPU"]);
}

#[test]
fn slices_of_gpus_are_told_by_name_and_by_the_drivers_files() {
    let slice = gpu("NVIDIA H200 MIG 1g.18gb", "0000:1b:00.0", &[true]);
    expect(&facts(DGX, vec![slice]), "slices of gpus", Attention, &["1 MIG slice", "nvidia-smi -mig 0"]);
    let file = [("proc/driver/nvidia/capabilities/gpu0/mig/gi1/access", "")];
    expect(&facts(&with(DGX, &file), both()), "slices of gpus", Attention, &["1 MIG slice"]);
}

#[test]
fn gpus_that_cannot_access_each_other_are_named() {
    let mut gpus = both();
    gpus[1].peers[0] = false;
    expect(&facts(DGX, gpus), "peer access", Attention, &["1 of 2 pairs", "1→0", "fabric manager"]);
}

#[test]
fn links_are_compared_with_their_raw_rates() {
    let mut slow = facts(DGX, both());
    expect(&slow, "host links", Good, &["not measured yet, links carry 63.0 GB/s"]);
    slow.host_rates = vec![(H200.into(), 26.1e9, 25.0e9)];
    slow.peer_rate = Some(44e9);
    expect(&slow, "host links", Attention, &["should reach 53.6 GB/s"]);
    expect(&slow, "peer links", Attention, &["44.0 GB/s out of each GPU", "should reach 382.5 GB/s"]);
    let narrow = [("sys/bus/pci/devices/0000:9a:00.0/current_link_width", "8\n")];
    expect(&facts(&with(DGX, &narrow), both()), "host links", Attention, &["0000:9a:00.0: 8 of 16 lanes"]);
    // Virtual machines do not show the link, and an unknown GPU has no known rate.
    let hidden: Vec<(&str, &str)> = DGX.iter().filter(|(path, _)| !path.contains("link_")).copied().collect();
    let mut unknown = facts(&hidden, both());
    assert!(unknown.findings().iter().all(|finding| finding.check != "host links"));
    unknown.host_rates = vec![("NVIDIA X1".into(), 20e9, 20e9)];
    unknown.peer_rate = Some(10e9);
    unknown.gpus.as_mut().unwrap()[0].name = "NVIDIA X1".into();
    expect(&unknown, "host links", Good, &["does not say what its links carry"]);
    expect(&unknown, "peer links", Good, &["it is not known what such GPUs reach"]);
}

#[test]
fn limits_of_memory_are_told() {
    let group = ("proc/self/cgroup", "0::/\n");
    let small = with(LAPTOP, &[group, ("sys/fs/cgroup/memory.max", "536870912\n")]);
    expect(&facts(&small, vec![]), "memory", Attention, &["512.0 MiB of 16.0 GiB", "docker run --memory"]);
    let roomy = with(LAPTOP, &[group, ("sys/fs/cgroup/memory.max", "8589934592\n")]);
    expect(&facts(&roomy, vec![]), "memory", Good, &["8.0 GiB of 16.0 GiB", "4.8 GiB by default"]);
    let full = ("proc/meminfo", "MemTotal:       16777216 kB\nMemAvailable:   2097152 kB\n");
    expect(&facts(&with(LAPTOP, &[full]), vec![]), "free memory", Attention, &["2.0 GiB", "--host-memory"]);
}

#[test]
fn limits_of_cpus_are_told() {
    let quota = [("proc/self/cgroup", "0::/\n"), ("sys/fs/cgroup/cpu.max", "150000 100000\n")];
    expect(&facts(&with(LAPTOP, &quota), vec![]), "cpus", Attention, &["2 CPUs, and the time of 1.5", "--cpuset-cpus"]);
    let roomy = [("proc/self/cgroup", "0::/\n"), ("sys/fs/cgroup/cpu.max", "400000 100000\n")];
    expect(&facts(&with(LAPTOP, &roomy), vec![]), "cpus", Good, &["2 CPUs"]);
    let set = ("proc/self/status", "CapEff:\t000001ffffffffff\nCpus_allowed_list:\t0-1,56-57\n");
    expect(&facts(&with(DGX, &[set]), both()), "cpus", Attention, &["4 of 112 CPUs", "about 4 for each GPU"]);
}

#[test]
fn memory_that_is_far_from_gpus_is_told() {
    let one_node = ("proc/self/status", "CapEff:\t000001ffffffffff\nCpus_allowed_list:\t0-55\n");
    expect(
        &facts(&with(DGX, &[one_node]), both()),
        "numa",
        Attention,
        &["no CPU on node 1", "every node that has a GPU"],
    );
    let mut refused = facts(DGX, both());
    expect(&refused, "numa", Good, &["threads of a GPU run on its node"]);
    refused.choice_of_node = Err(Error::Unavailable("choosing NUMA node 0 for memory: permission denied".into()));
    expect(&refused, "numa", Attention, &["may not choose: choosing NUMA node 0", "--cap-add SYS_NICE"]);
}

#[test]
fn small_pages_are_told_where_the_server_can_mount_nothing() {
    let refused = Err(Error::Unavailable("mounting a tmpfs with huge pages: permission denied".into()));
    // One process finds huge pages in anonymous memory.
    let mut alone = facts(LAPTOP, vec![]);
    alone.own_tmpfs = refused.clone();
    expect(&alone, "huge pages", Good, &["transparent: madvise, for shared memory: never"]);
    let never = [("sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]\n")];
    alone = facts(&with(LAPTOP, &never), vec![]);
    alone.own_tmpfs = refused.clone();
    expect(&alone, "huge pages", Attention, &["permission denied", "--arena-directory"]);
    // Processes of several GPUs share their memory.
    let mut shared = facts(DGX, both());
    expect(&shared, "huge pages", Good, &["pages of 2 MiB"]);
    shared.own_tmpfs = refused;
    expect(&shared, "huge pages", Attention, &["pages of 4 KiB", "huge=always"]);
}

#[test]
fn limits_of_the_process_are_told() {
    let mut limited = facts(DGX, both());
    // NVIDIA's driver does not count what it pins.
    limited.memlock_bytes = Some(8 << 20);
    limited.open_files = Some(1024);
    expect(&limited, "locked memory", Good, &["8.0 MiB", "--ulimit memlock=-1"]);
    expect(&limited, "files", Attention, &["1,024 open files", "--ulimit nofile"]);
    assert_eq!(verdict(&limited.findings()), Attention);
    let lines = log_lines(&limited.findings());
    assert_eq!(lines.len(), 1, "{lines:?}");
    assert!(lines[0].starts_with("files: 1,024 open files: the server admits"), "{lines:?}");
}

#[test]
fn rates_that_were_saved_for_other_gpus_are_not_shown() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("rates.json");
    // This host has no GPU, or its GPUs have no rates in a file that is not there.
    let facts = Facts::gather(Path::new("/"), Some(&file), Ok(()), true);
    assert_eq!((facts.host_rates, facts.peer_rate), (vec![], None));
}

#[test]
fn a_server_of_the_cpu_alone_has_no_findings_of_gpus() {
    let facts = Facts::gather(tree(DGX).path(), None, Ok(()), false);
    let findings = facts.findings();
    assert!(findings.iter().all(|finding| finding.verdict < Fault && finding.check != "gpus"), "{findings:?}");
}
