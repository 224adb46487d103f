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

/// Reads [`process_memory_limit`] from the system files under `root`.
fn memory_limit(root: &Path) -> Option<u64> {
    let groups = std::fs::read_to_string(root.join("proc/self/cgroup")).unwrap_or_default();
    let group_limits =
        groups.lines().flat_map(|line| group_limit_files(root, line)).filter_map(|file| read_limit(&file));
    group_limits.chain(machine_memory(root)).min()
}

/// Lists the files that may bound a control group, given its line of `/proc/self/cgroup`
/// (`id:controllers:path`). They belong to the group and to all groups around it. Inside a
/// container the path may be the host's, and only the files of the root group are visible.
fn group_limit_files(root: &Path, line: &str) -> Vec<PathBuf> {
    let mut parts = line.splitn(3, ':');
    let (Some(_), Some(controllers), Some(path)) = (parts.next(), parts.next(), parts.next()) else {
        return Vec::new();
    };
    let (mount, file) = match controllers {
        "" => ("sys/fs/cgroup", "memory.max"),
        _ if controllers.split(',').any(|name| name == "memory") => ("sys/fs/cgroup/memory", "memory.limit_in_bytes"),
        _ => return Vec::new(),
    };
    let group = Path::new(path.trim_start_matches('/'));
    group.ancestors().map(|ancestor| root.join(mount).join(ancestor).join(file)).collect()
}

/// Reads a limit. `max` gives `None`. A huge number, which also means no limit, is returned. The
/// machine's memory is less.
fn read_limit(file: &Path) -> Option<u64> {
    std::fs::read_to_string(file).ok()?.trim().parse().ok()
}

fn machine_memory(root: &Path) -> Option<u64> {
    let text = std::fs::read_to_string(root.join("proc/meminfo")).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    Some(line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? << 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    /// Limit of a system with 16 GiB and the given files.
    fn limit_with(files: &[(&str, &str)]) -> Option<u64> {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in [("proc/meminfo", "MemTotal:       16777216 kB\nMemFree: 5 kB\n")].iter().chain(files) {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        memory_limit(root.path())
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
