//! Limits on the memory that this process may use.

use std::path::{Path, PathBuf};

use super::{human_bytes, parse_bytes};
use crate::{Error, Result};

/// Returns the bytes that this process may use: the least of its control groups' limits and the
/// machine's memory.
///
/// # Errors
/// [`Error::Unavailable`] when the system reports neither.
pub fn process_memory_limit() -> Result<u64> {
    memory_limit(Path::new("/")).ok_or_else(|| {
        Error::Unavailable(
            "the memory of this machine cannot be read from /proc/meminfo; give --host-memory as a size, such as 8GiB"
                .into(),
        )
    })
}

/// Reads a share of the memory that this process may use (`60%`), or a size (`64GiB`).
///
/// # Errors
/// [`Error::Invalid`] names the accepted forms. It also refuses more than the process may use,
/// since the system would kill the process.
pub fn parse_memory_setting(text: &str, process_limit: u64) -> Result<u64> {
    let bytes = match text.trim().strip_suffix('%') {
        None => parse_bytes(text).map_err(|error| error.context("a share such as 60% is also accepted"))?,
        Some(share) => match share.trim().parse::<f64>() {
            Ok(share) if share > 0.0 && share <= 100.0 => (process_limit as f64 * share / 100.0) as u64,
            _ => {
                return Err(Error::Invalid(format!(
                    "{text:?} is not a share of memory; write a number above 0 and up to 100 with %"
                )));
            }
        },
    };
    if bytes == 0 {
        return Err(Error::Invalid(format!("{text:?} is 0 bytes, and tables need memory; give more")));
    }
    if bytes > process_limit {
        return Err(Error::Invalid(format!(
            "{text} is more than the {} that this process may use; ask for less, or raise the container's limit",
            human_bytes(process_limit)
        )));
    }
    Ok(bytes)
}

/// Returns the bytes that this process may use in addition to what is in use now: the least that
/// its control groups and the machine have left. Caches of files that can be dropped count as free.
/// `None` if the system reports neither.
pub fn process_memory_free() -> Option<u64> {
    memory_free(Path::new("/"))
}

/// Reads [`process_memory_limit`] from the system files under `root`.
pub fn memory_limit(root: &Path) -> Option<u64> {
    groups(root).iter().filter_map(Group::limit).chain(machine_memory(root, "MemTotal:")).min()
}

/// Reads [`process_memory_free`] from the system files under `root`.
pub fn memory_free(root: &Path) -> Option<u64> {
    groups(root).iter().filter_map(Group::free).chain(machine_memory(root, "MemAvailable:")).min()
}

/// Reads the memory of the machine, in bytes, from the system files under `root`.
pub fn machine_memory_bytes(root: &Path) -> Option<u64> {
    machine_memory(root, "MemTotal:")
}

/// Control group of this process, or a group around it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ControlGroup {
    pub folder: PathBuf,
    /// True in the first version of control groups, whose files have other names.
    pub is_first_version: bool,
}

/// Control group that may bound the memory of this process.
struct Group {
    folder: PathBuf,
    files: &'static GroupFiles,
}

/// Names of a control group's files.
struct GroupFiles {
    limit: &'static str,
    used: &'static str,
    /// Line of `memory.stat` with the bytes of caches that can be dropped.
    droppable: &'static str,
}

const SECOND_VERSION: GroupFiles =
    GroupFiles { limit: "memory.max", used: "memory.current", droppable: "inactive_file " };

const FIRST_VERSION: GroupFiles =
    GroupFiles { limit: "memory.limit_in_bytes", used: "memory.usage_in_bytes", droppable: "total_inactive_file " };

/// Lists the control groups of this process that have a controller, and all groups around them,
/// from the system files under `root`. Inside a container the path of a group may be the host's,
/// and only the files of the root group are visible.
pub fn control_groups(root: &Path, controller: &str) -> Vec<ControlGroup> {
    let lines = std::fs::read_to_string(root.join("proc/self/cgroup")).unwrap_or_default();
    lines.lines().flat_map(|line| groups_of(root, line, controller)).collect()
}

/// Lists the groups of a line of `/proc/self/cgroup` (`id:controllers:path`).
fn groups_of(root: &Path, line: &str, controller: &str) -> Vec<ControlGroup> {
    let mut parts = line.splitn(3, ':');
    let (Some(_), Some(controllers), Some(path)) = (parts.next(), parts.next(), parts.next()) else {
        return Vec::new();
    };
    let mount = root.join("sys/fs/cgroup");
    let (mount, is_first_version) = match controllers {
        "" => (mount, false),
        _ if controllers.split(',').any(|name| name == controller) => (mount.join(controller), true),
        _ => return Vec::new(),
    };
    let group = Path::new(path.trim_start_matches('/'));
    let group_at = |ancestor: &Path| ControlGroup { folder: mount.join(ancestor), is_first_version };
    group.ancestors().map(group_at).collect()
}

/// Lists the control groups that may bound the memory of this process.
fn groups(root: &Path) -> Vec<Group> {
    let group = |group: ControlGroup| Group {
        folder: group.folder,
        files: if group.is_first_version { &FIRST_VERSION } else { &SECOND_VERSION },
    };
    control_groups(root, "memory").into_iter().map(group).collect()
}

impl Group {
    /// Reads the limit. `max` gives `None`. A huge number, which also means no limit, is returned.
    /// The machine's memory is less.
    fn limit(&self) -> Option<u64> {
        self.read(self.files.limit)
    }

    fn free(&self) -> Option<u64> {
        let stat = std::fs::read_to_string(self.folder.join("memory.stat")).unwrap_or_default();
        let droppable = stat.lines().find_map(|line| line.strip_prefix(self.files.droppable)?.trim().parse().ok());
        let used = self.read(self.files.used)?.saturating_sub(droppable.unwrap_or(0));
        Some(self.limit()?.saturating_sub(used))
    }

    fn read(&self, file: &str) -> Option<u64> {
        std::fs::read_to_string(self.folder.join(file)).ok()?.trim().parse().ok()
    }
}

/// Reads a line of `/proc/meminfo`, in bytes.
fn machine_memory(root: &Path, name: &str) -> Option<u64> {
    let text = std::fs::read_to_string(root.join("proc/meminfo")).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    Some(line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? << 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    /// A system with 16 GiB, 12 of them available, and the given files.
    fn system(files: &[(&str, &str)]) -> tempfile::TempDir {
        const MACHINE: &str = "MemTotal:       16777216 kB\nMemFree: 5 kB\nMemAvailable:   12582912 kB\n";
        let root = tempfile::tempdir().unwrap();
        for (path, text) in [("proc/meminfo", MACHINE)].iter().chain(files) {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        root
    }

    fn limit_with(files: &[(&str, &str)]) -> Option<u64> {
        memory_limit(system(files).path())
    }

    #[test]
    fn the_group_or_machine_with_the_least_memory_left_decides_what_is_free() {
        let free_with = |files: &[(&str, &str)]| memory_free(system(files).path());
        assert_eq!(free_with(&[]), Some(12 * GIB));
        let group = ("proc/self/cgroup", "0::/pod\n");
        let limit = ("sys/fs/cgroup/pod/memory.max", "8589934592\n");
        assert_eq!(free_with(&[group, limit]), Some(12 * GIB), "a group that does not tell its use");
        let used = ("sys/fs/cgroup/pod/memory.current", "6442450944\n");
        assert_eq!(free_with(&[group, limit, used]), Some(2 * GIB));
        let stat = ("sys/fs/cgroup/pod/memory.stat", "anon 5\ninactive_file 1073741824\nactive_file 9\n");
        assert_eq!(free_with(&[group, limit, used, stat]), Some(3 * GIB));
        assert_eq!(free_with(&[group, ("sys/fs/cgroup/pod/memory.max", "max\n"), used]), Some(12 * GIB));
        let first = [
            ("proc/self/cgroup", "4:memory:/docker/abc\n"),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "4294967296\n"),
            ("sys/fs/cgroup/memory/memory.usage_in_bytes", "4294967296\n"),
            ("sys/fs/cgroup/memory/memory.stat", "inactive_file 1\ntotal_inactive_file 1073741824\n"),
        ];
        assert_eq!(free_with(&first), Some(GIB));
    }

    #[test]
    fn without_control_groups_the_machine_is_the_limit() {
        assert_eq!(limit_with(&[]), Some(16 * GIB));
        assert_eq!(
            limit_with(&[("proc/self/cgroup", "0::/\n"), ("sys/fs/cgroup/memory.max", "max\n")]),
            Some(16 * GIB)
        );
    }

    #[test]
    fn the_tightest_group_around_the_process_is_the_limit() {
        let group = ("proc/self/cgroup", "0::/pod/container\n");
        let outer = ("sys/fs/cgroup/pod/memory.max", "4294967296\n");
        assert_eq!(limit_with(&[group, outer]), Some(4 * GIB));
        assert_eq!(
            limit_with(&[group, outer, ("sys/fs/cgroup/pod/container/memory.max", "2147483648\n")]),
            Some(2 * GIB)
        );
    }

    #[test]
    fn the_first_version_of_control_groups_is_read() {
        let group = ("proc/self/cgroup", "5:cpu,cpuacct:/x\n4:memory:/docker/abc\n0::/\n");
        let visible = ("sys/fs/cgroup/memory/memory.limit_in_bytes", "1073741824\n");
        assert_eq!(limit_with(&[group, visible]), Some(GIB));
        let unlimited = ("sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes", "9223372036854771712\n");
        assert_eq!(limit_with(&[group, unlimited]), Some(16 * GIB));
    }

    #[test]
    fn the_memory_limit_of_this_process_is_above_zero() {
        assert!(process_memory_limit().unwrap() > 1 << 20);
    }

    #[test]
    fn memory_settings_are_shares_or_sizes_that_fit() {
        assert_eq!(parse_memory_setting("50%", 1000).unwrap(), 500);
        assert_eq!(parse_memory_setting(" 12.5 % ", 1000).unwrap(), 125);
        assert_eq!(parse_memory_setting("100%", 1000).unwrap(), 1000);
        assert_eq!(parse_memory_setting("2KiB", 4096).unwrap(), 2048);
        for wrong in ["0%", "101%", "-5%", "%", "NaN%", "0", "much", "8KiB"] {
            assert!(matches!(parse_memory_setting(wrong, 4096), Err(Error::Invalid(_))), "{wrong:?} was accepted");
        }
    }
}
