//! Checks of the host: what was found, what it means for the server, and what to change.
//!
//! ```text
//!   /proc, /sys ──────► System ──┐
//!   driver, rates file ─────────►├─► Facts ──► findings ──► the table of `dovetail doctor`
//!   limits of the process ──────►┘                     └─► lines of the server's log
//! ```
//!
//! Facts are gathered first, so that tests can make the facts of any host. This room knows the
//! system's files, the driver and the saved rates. It knows no settings and no server.

mod checks;
mod system;
#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;

use std::path::Path;

pub use checks::{Finding, Verdict};
pub use system::{PciGpu, System};

use rustix::process::{Resource, getrlimit};

use crate::Result;
use crate::device::{DeviceKind, GpuSeen, VISIBLE_GPUS, gpus_seen, why_no_gpu};
use crate::memory::check_choice_of_node;
use crate::planner::RatesFile;

/// Facts that the checks need.
#[derive(Clone, Debug)]
pub struct Facts {
    pub system: System,
    /// GPUs that the driver shows to this process.
    pub gpus: Result<Vec<GpuSeen>>,
    /// Setting that chooses these GPUs ([`VISIBLE_GPUS`]), if it is set.
    pub visible_gpus: Option<String>,
    /// Reason why there are no GPUs, if there are none.
    pub why_no_gpu: String,
    /// Measured bytes per second to and from each model of GPU, with its name.
    pub host_rates: Vec<(String, f64, f64)>,
    /// Least measured bytes per second from one GPU to another while all write.
    pub peer_rate: Option<f64>,
    /// The reason if the server may not mount a tmpfs with huge pages for itself.
    pub own_tmpfs: Result<()>,
    /// The reason if this process may not choose the NUMA nodes of its memory.
    pub choice_of_node: Result<()>,
    /// Limit of locked memory; `None`: no limit.
    pub memlock_bytes: Option<u64>,
    /// Maximum of open files to which the server may raise its limit; `None`: no limit.
    pub open_files: Option<u64>,
}

impl Facts {
    /// Gathers the facts of this host, with the system's files under `root`. `rates_file` is the
    /// file of saved rates, if rates are saved. `own_tmpfs` has the outcome of a mount for the
    /// server. Without `with_gpus` the host counts as one without GPUs, and the driver is not
    /// started.
    pub fn gather(root: &Path, rates_file: Option<&Path>, own_tmpfs: Result<()>, with_gpus: bool) -> Self {
        let mut system = System::read(root);
        if !with_gpus {
            (system.driver, system.gpu_slices) = (None, 0);
            system.gpus.clear();
        }
        let gpus = if with_gpus { gpus_seen() } else { Ok(Vec::new()) };
        let models: Vec<GpuSeen> = gpus.iter().flatten().cloned().collect();
        let file = rates_file.filter(|path| !models.is_empty() && path.exists()).map(RatesFile::open);
        let mut host_rates: Vec<(String, f64, f64)> = Vec::new();
        for GpuSeen { name, .. } in &models {
            let saved = file.as_ref().and_then(|file| file.latest(DeviceKind::Cuda, name));
            if let Some(saved) = saved.filter(|_| host_rates.iter().all(|(other, _, _)| other != name)) {
                host_rates.push((name.clone(), saved.rates.copy_in, saved.rates.copy_out));
            }
        }
        let links = file.as_ref().and_then(|file| file.latest_links(DeviceKind::Cuda, models.len()));
        let all: Vec<usize> = (0..models.len()).collect();
        let choice_of_node = match &*system.nodes {
            [first, _, ..] => check_choice_of_node(first.index),
            _ => Ok(()),
        };
        Self {
            system,
            gpus,
            visible_gpus: std::env::var(VISIBLE_GPUS).ok().filter(|_| with_gpus),
            why_no_gpu: why_no_gpu().into(),
            host_rates,
            peer_rate: links.and_then(|links| Some(links.rates.of_set(&all)?.peers)),
            own_tmpfs,
            choice_of_node,
            memlock_bytes: getrlimit(Resource::Memlock).current,
            open_files: getrlimit(Resource::Nofile).maximum,
        }
    }

    /// Returns the outcomes of all checks that apply to this host.
    pub fn findings(&self) -> Vec<Finding> {
        checks::findings(self)
    }
}

/// Returns the worst verdict.
pub fn verdict(findings: &[Finding]) -> Verdict {
    findings.iter().map(|finding| finding.verdict).max().unwrap_or(Verdict::Good)
}

/// Returns the lines of the server's log: the findings that deserve attention. Those of huge pages
/// and free memory are not among them: the server knows its settings and logs what its host memory
/// consists of.
pub fn log_lines(findings: &[Finding]) -> Vec<String> {
    let of_settings = [checks::HUGE_PAGES, checks::FREE_MEMORY];
    let is_told = |finding: &&Finding| finding.verdict > Verdict::Good && !of_settings.contains(&finding.check);
    let line = |finding: &Finding| {
        let Finding { check, found, means, change, .. } = finding;
        format!("{check}: {found}: {means}; {change}")
    };
    findings.iter().filter(is_told).map(line).collect()
}
