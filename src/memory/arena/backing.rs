//! Kinds of memory that slabs are made of.
//!
//! | backing | pages, with the usual settings of Linux | other processes can map it |
//! |---|---|---|
//! | files in a tmpfs of the server, mounted with `huge=always` | 2 MiB | yes |
//! | files in a directory that the operator names | as it was mounted | yes |
//! | `memfd`s | 4 KiB | yes |
//! | anonymous memory | 2 MiB | no |
//!
//! Pages of 2 MiB are called huge. Eight threads populate 31 GB/s of huge pages, and 4.3 GB/s of
//! pages of 4 KiB (measured on a host with an H100). One read of 8 bytes out of 1 GiB takes 10.5 ns
//! with huge pages, and 16.4 ns without.
//!
//! The tmpfs of the server is mounted nowhere: only its file descriptor exists. It ends with the
//! last file in it. The mount needs the capability `CAP_SYS_ADMIN`, in the system's user namespace
//! or in one that the process has made itself.

use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;

use rustix::fs::{AtFlags, Mode, OFlags};
use rustix::io::Errno;
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags};
use rustix::thread::UnshareFlags;

use super::mapping::{Populating, prefer_node};
use crate::memory::{Interrupt, human_bytes};
use crate::{Error, Result};

/// Size of a huge page, in bytes. Slabs start and end at multiples of it.
pub(super) const HUGE_PAGE_BYTES: usize = 2 << 20;

/// Types of file systems that memory can come from, as `statfs` reports them.
const TMPFS_MAGIC: i64 = 0x0102_1994;
const HUGETLBFS_MAGIC: i64 = 0x9584_58f6;

/// Kind of memory that slabs are made of. Clones share the directory.
#[derive(Clone, Debug)]
pub enum Backing {
    /// Files without a name in a directory, which another process can map.
    Files(Arc<SlabDirectory>),
    /// Memory of a `memfd`, which another process can map.
    Memfd,
    /// Memory of this process alone.
    Anonymous,
}

/// Directory of a file system in memory.
#[derive(Debug)]
pub struct SlabDirectory {
    directory: OwnedFd,
    /// Name of the directory in messages.
    name: String,
    page_bytes: usize,
    /// Bytes that were free when the directory was opened; `None`: the system's memory is the
    /// limit.
    free_bytes: Option<u64>,
    /// True if the system has set pages aside for this file system, so that they are free for
    /// nothing else.
    is_set_aside: bool,
}

impl Backing {
    /// Returns the kind without a directory that gets huge pages on this system. Returns `Memfd` if
    /// both kinds do, or neither.
    pub fn best() -> Self {
        let memfd_is_small = Self::Memfd.page_bytes() < HUGE_PAGE_BYTES;
        if memfd_is_small && Self::Anonymous.page_bytes() >= HUGE_PAGE_BYTES { Self::Anonymous } else { Self::Memfd }
    }

    /// Mounts a tmpfs for the server, and returns files in it as the backing.
    ///
    /// # Errors
    /// [`Error::Unavailable`] if the system does not allow the mount, or gives it no huge pages.
    pub fn own_tmpfs() -> Result<Self> {
        Self::in_tmpfs(mount_tmpfs()?)
    }

    /// Returns files in a tmpfs as the backing. The tmpfs is a mount of [`mount_tmpfs`], possibly
    /// of another process.
    ///
    /// # Errors
    /// [`Error::Unavailable`] if the tmpfs has no huge pages or takes no files.
    pub fn in_tmpfs(mount: OwnedFd) -> Result<Self> {
        let name = "a tmpfs of the server".into();
        let (page_bytes, free_bytes, is_set_aside) = (0, None, false);
        let mut directory = SlabDirectory { directory: mount, name, page_bytes, free_bytes, is_set_aside };
        let probe = directory.unnamed_file().map_err(|error| refused("making a file in a tmpfs", error))?;
        directory.page_bytes = page_bytes_of(&probe);
        match directory.page_bytes >= HUGE_PAGE_BYTES {
            true => Ok(Self::Files(Arc::new(directory))),
            false => Err(Error::Unavailable("the system gives a tmpfs no huge pages".into())),
        }
    }

    /// Returns files in a directory as the backing of an arena of `arena_bytes`.
    ///
    /// # Errors
    /// [`Error::Invalid`] unless the directory is in a tmpfs or hugetlbfs, takes files of this
    /// process, and has room for the arena.
    pub fn in_directory(path: &Path, arena_bytes: u64) -> Result<Self> {
        SlabDirectory::open(path, arena_bytes).map(|directory| Self::Files(Arc::new(directory)))
    }

    /// Size of the pages that the system should give, in bytes.
    pub fn page_bytes(&self) -> usize {
        let is_huge = match self {
            Self::Files(directory) => return directory.page_bytes,
            Self::Memfd => ["always", "within_size", "advise", "force"].contains(&chosen("shmem_enabled").as_str()),
            Self::Anonymous => ["always", "madvise"].contains(&chosen("enabled").as_str()),
        };
        if is_huge { HUGE_PAGE_BYTES } else { small_page_bytes() }
    }

    /// Bytes that slabs start and end at multiples of.
    pub(super) fn granule_bytes(&self) -> usize {
        match self {
            Self::Files(directory) => directory.page_bytes.max(HUGE_PAGE_BYTES),
            Self::Memfd | Self::Anonymous => HUGE_PAGE_BYTES,
        }
    }

    /// Bytes that slabs can take; `None`: the system's memory is the limit.
    pub(super) fn capacity_bytes(&self) -> Option<u64> {
        match self {
            Self::Files(directory) => directory.free_bytes,
            Self::Memfd | Self::Anonymous => None,
        }
    }

    /// True if slabs are files in a directory.
    pub fn is_in_files(&self) -> bool {
        matches!(self, Self::Files(_))
    }

    /// True if the pages are free for nothing else, even if no slab has them.
    pub(super) fn is_set_aside(&self) -> bool {
        matches!(self, Self::Files(directory) if directory.is_set_aside)
    }

    /// Makes the file of a slab; `None` for anonymous memory.
    pub(super) fn file(&self, len: usize) -> Result<Option<OwnedFd>> {
        let (call, file) = match self {
            Self::Anonymous => return Ok(None),
            Self::Files(directory) => ("open", directory.unnamed_file()),
            Self::Memfd => {
                ("memfd_create", rustix::fs::memfd_create("dovetail-arena", rustix::fs::MemfdFlags::CLOEXEC))
            }
        };
        let file = file.map_err(|error| out_of_memory(call, error))?;
        rustix::fs::ftruncate(&file, len as u64).map_err(|error| out_of_memory("ftruncate", error))?;
        Ok(Some(file))
    }

    /// Name of the kind, for metrics.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Files(_) => "files",
            Self::Memfd => "memfd",
            Self::Anonymous => "anonymous",
        }
    }

    /// Describes the backing, for the log.
    pub fn describe(&self) -> String {
        let kind = match self {
            Self::Files(directory) => format!("files in {}", directory.name),
            Self::Memfd => "memfds".into(),
            Self::Anonymous => "anonymous memory".into(),
        };
        format!("{kind}, in pages of {}", human_bytes(self.page_bytes() as u64).replace(".0", ""))
    }

    /// Describes the cost of small pages, as a clause; `None` with huge pages.
    pub fn cost(&self) -> Option<&'static str> {
        let is_small = self.page_bytes() < HUGE_PAGE_BYTES;
        is_small.then_some("fresh memory takes about five times as long as with huge pages")
    }
}

impl SlabDirectory {
    fn open(path: &Path, arena_bytes: u64) -> Result<Self> {
        let shown = path.display();
        let refuse = |why: String| Error::Invalid(format!("{shown} {why}"));
        let opened = rustix::fs::open(path, OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty());
        let directory = opened.map_err(|error| {
            refuse(match error {
                Errno::NOENT => "does not exist".into(),
                Errno::NOTDIR => "is not a directory".into(),
                other => format!("cannot be opened: {}", words(other)),
            })
        })?;
        let facts = rustix::fs::fstatfs(&directory).map_err(|error| refuse(words(error)))?;
        let (kind, is_hugetlbfs) = match facts.f_type as i64 {
            TMPFS_MAGIC => ("tmpfs", false),
            HUGETLBFS_MAGIC => ("hugetlbfs", true),
            _ => {
                return Err(refuse(format!(
                    "is on a disk or another file system that is not memory; mount a tmpfs there, as with: mount -t \
                     tmpfs -o huge=always,size={} tmpfs {shown}",
                    arena_bytes.next_multiple_of(1 << 20)
                )));
            }
        };
        let name = format!("{shown} ({kind})");
        let mut directory = Self { directory, name, page_bytes: 0, free_bytes: None, is_set_aside: is_hugetlbfs };
        let probe = directory.unnamed_file().map_err(|error| {
            refuse(format!("takes no files of this server: {}; its user needs the right to write there", words(error)))
        })?;
        let block_bytes = facts.f_bsize as u64;
        // A file system without a size of its own reports no blocks.
        let in_blocks = (facts.f_blocks > 0).then(|| facts.f_bavail.saturating_mul(block_bytes));
        if is_hugetlbfs {
            directory.page_bytes = facts.f_bsize as usize;
            let free = reserved_huge_pages(block_bytes).map(|pages| pages.saturating_mul(block_bytes));
            directory.free_bytes = [in_blocks, free].into_iter().flatten().min();
        } else {
            directory.page_bytes = match gives_huge_pages_on_advice(&directory.directory) {
                true => HUGE_PAGE_BYTES,
                false => page_bytes_of(&probe),
            };
            directory.free_bytes = in_blocks;
        }
        match directory.free_bytes.filter(|&free| free < arena_bytes) {
            None => Ok(directory),
            Some(free) => Err(refuse(format!(
                "has room for {}, and --host-memory is {}; {}, or lower --host-memory",
                human_bytes(free),
                human_bytes(arena_bytes),
                if is_hugetlbfs { "reserve more huge pages (vm.nr_hugepages)" } else { "mount it with a larger size" },
            ))),
        }
    }

    fn unnamed_file(&self) -> rustix::io::Result<OwnedFd> {
        let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
        rustix::fs::openat(&self.directory, ".", flags, Mode::RUSR | Mode::WUSR)
    }
}

/// Mounts a tmpfs with huge pages nowhere, and returns its root. Files in it are bounded by the
/// system's memory only, because the arena has a bound of its own.
///
/// # Errors
/// [`Error::Unavailable`] if the system does not allow it.
pub fn mount_tmpfs() -> Result<OwnedFd> {
    let mount = || {
        let tmpfs = rustix::mount::fsopen("tmpfs", FsOpenFlags::FSOPEN_CLOEXEC)?;
        for (key, value) in [("huge", "always"), ("size", "0"), ("nr_inodes", "0")] {
            rustix::mount::fsconfig_set_string(tmpfs.as_fd(), key, value)?;
        }
        rustix::mount::fsconfig_create(tmpfs.as_fd())?;
        let attributes =
            MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NODEV | MountAttrFlags::MOUNT_ATTR_NOEXEC;
        rustix::mount::fsmount(tmpfs.as_fd(), FsMountFlags::FSMOUNT_CLOEXEC, attributes)
    };
    mount().map_err(|error| refused("mounting a tmpfs with huge pages", error))
}

/// Moves this process into a user namespace of its own, where it may mount, and mounts a tmpfs as
/// [`mount_tmpfs`] does. Only for a process that has one thread and does nothing else. The user and
/// the group keep their numbers, so that other processes of the user can make files in the tmpfs.
///
/// # Errors
/// [`Error::Unavailable`] if the system does not allow one of the steps.
pub fn mount_tmpfs_in_namespace() -> Result<OwnedFd> {
    let (user, group) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    // SAFETY: the files of the process stay shared by its threads.
    let unshared = unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWUSER | UnshareFlags::NEWNS) };
    unshared.map_err(|error| refused("making a user namespace", error))?;
    let maps = [
        ("setgroups", "deny".into()),
        ("uid_map", format!("{user} {user} 1")),
        ("gid_map", format!("{group} {group} 1")),
    ];
    for (file, text) in maps {
        let written = std::fs::write(format!("/proc/self/{file}"), text);
        written.map_err(|error| {
            Error::Unavailable(format!("making a user namespace: {file}: {}", crate::human::system_words(&error)))
        })?;
    }
    mount_tmpfs()
}

/// Checks that this process may choose the NUMA node of its memory.
///
/// # Errors
/// [`Error::Unavailable`] with the reason.
pub fn check_choice_of_node(node: u32) -> Result<()> {
    let page = super::Mapping::new(HUGE_PAGE_BYTES, &Backing::Anonymous, &Interrupt::default(), Populating::Urgent)?;
    // SAFETY: the range is mapped, and nothing points into it.
    let asked = unsafe { prefer_node(page.start.as_ptr(), page.len, node) };
    asked.map_err(|error| refused(&format!("choosing NUMA node {node} for memory"), error))
}

fn refused(attempt: &str, error: Errno) -> Error {
    Error::Unavailable(format!("{attempt}: {}", words(error)))
}

fn words(error: Errno) -> String {
    crate::human::system_words(std::io::Error::from(error))
}

/// Returns the error of a system call that found no memory.
pub(super) fn out_of_memory(call: &str, error: Errno) -> Error {
    let cause = match error {
        // The answer of `madvise` where a touch would raise a signal.
        Errno::FAULT => "no page is free".into(),
        other => words(other),
    };
    Error::Exhausted(format!(
        "{call} failed: {cause}; the system has less memory than the server's --host-memory promises"
    ))
}

/// Returns the option that is chosen in a file of the settings of huge pages.
fn chosen(file: &str) -> String {
    let text = std::fs::read_to_string(format!("/sys/kernel/mm/transparent_hugepage/{file}")).unwrap_or_default();
    text.split_once('[').and_then(|(_, rest)| Some(rest.split_once(']')?.0.to_string())).unwrap_or_default()
}

fn small_page_bytes() -> usize {
    // SAFETY: reads a constant of the system.
    let bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(bytes).unwrap_or(4096)
}

/// Returns the size of a file's pages. The system reports it as the file's block size.
pub(super) fn page_bytes_of(file: &OwnedFd) -> usize {
    rustix::fs::fstat(file).map_or(0, |facts| facts.st_blksize as usize).max(small_page_bytes())
}

/// True if a tmpfs gives huge pages to ranges that ask for them, as slabs do.
fn gives_huge_pages_on_advice(directory: &OwnedFd) -> bool {
    let Ok(facts) = rustix::fs::statx(directory, "", AtFlags::EMPTY_PATH, rustix::fs::StatxFlags::empty()) else {
        return false;
    };
    let device = format!("{}:{}", facts.stx_dev_major, facts.stx_dev_minor);
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    chosen("shmem_enabled") != "deny" && mount_options(&mounts, &device).is_some_and(is_advised)
}

/// Finds the options of a file system in the lines of `mountinfo`, by the number of its device.
fn mount_options<'a>(mounts: &'a str, device: &str) -> Option<&'a str> {
    let line = mounts.lines().find(|line| line.split(' ').nth(2) == Some(device))?;
    line.rsplit(' ').next()
}

fn is_advised(options: &str) -> bool {
    options.split(',').any(|option| ["huge=always", "huge=advise", "huge=within_size"].contains(&option))
}

/// Returns the number of reserved huge pages of a size that are free, including those that the
/// system may add.
fn reserved_huge_pages(page_bytes: u64) -> Option<u64> {
    let folder = format!("/sys/kernel/mm/hugepages/hugepages-{}kB", page_bytes >> 10);
    let read = |file: &str| std::fs::read_to_string(format!("{folder}/{file}")).ok()?.trim().parse::<u64>().ok();
    let promised = read("resv_hugepages")?;
    Some((read("free_hugepages")? + read("nr_overcommit_hugepages")?).saturating_sub(promised))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::{Arena, Budget};

    /// Writes a piece of each backing, and reads it through a second mapping if there is a file.
    fn check(backing: Backing, arena_bytes: u64) {
        let arena = Arena::with_backing(Budget::new("host memory", "--host-memory", arena_bytes), backing.clone());
        let mut piece = arena.allocate(3 << 20, "a test").unwrap();
        piece.fill(7);
        assert_eq!(piece.as_ptr() as usize % HUGE_PAGE_BYTES, 0, "{}", backing.describe());
        assert!(arena.mapped_bytes() >= 4 << 20 && arena.mapped_bytes().is_multiple_of(HUGE_PAGE_BYTES as u64));
        let Some(file) = backing.file(4 << 20).unwrap() else { return };
        let (one, other) = (super::super::Mapping::of_file(file.try_clone().unwrap(), 4 << 20).unwrap(), file);
        let other = super::super::Mapping::of_file(other, 4 << 20).unwrap();
        // SAFETY: both ranges are mapped, and no reference points into them.
        unsafe {
            one.start.as_ptr().add(3 << 20).write(9);
            assert_eq!(other.start.as_ptr().add(3 << 20).read(), 9);
        }
    }

    #[test]
    fn every_backing_of_this_system_gives_memory_that_can_be_written_and_shared() {
        check(Backing::Anonymous, 64 << 20);
        check(Backing::Memfd, 64 << 20);
        match Backing::own_tmpfs() {
            Ok(backing) => {
                assert_eq!(backing.page_bytes(), HUGE_PAGE_BYTES);
                assert_eq!(backing.describe(), "files in a tmpfs of the server, in pages of 2 MiB");
                assert_eq!((backing.cost(), backing.capacity_bytes()), (None, None));
                check(backing, 64 << 20);
            }
            Err(Error::Unavailable(why)) => assert!(why.contains("tmpfs"), "{why}"),
            Err(other) => panic!("{other}"),
        }
    }

    #[test]
    fn a_directory_in_memory_is_a_backing() {
        // Most systems mount a tmpfs here.
        let path = Path::new("/dev/shm");
        let Ok(backing) = Backing::in_directory(path, 16 << 20) else { return };
        assert!(backing.describe().starts_with("files in /dev/shm (tmpfs), in pages of "), "{}", backing.describe());
        assert_eq!(backing.cost().is_some(), backing.page_bytes() < HUGE_PAGE_BYTES);
        check(backing.clone(), 16 << 20);
        let Some(free) = backing.capacity_bytes() else { return };
        let refused = Backing::in_directory(path, free * 2).unwrap_err();
        let Error::Invalid(text) = &refused else { panic!("{refused:?}") };
        assert!(text.contains("/dev/shm has room for") && text.contains("larger size"), "{text}");
    }

    #[test]
    fn directories_that_are_not_memory_or_not_there_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        std::fs::write(&file, "text").unwrap();
        let refused = |path: &Path| Backing::in_directory(path, 16 << 20).unwrap_err();
        let shown = |path: &Path| path.display().to_string();
        assert_eq!(refused(&file), Error::Invalid(format!("{} is not a directory", shown(&file))));
        let gone = folder.path().join("gone");
        assert_eq!(refused(&gone), Error::Invalid(format!("{} does not exist", shown(&gone))));
        // The kernel's tables of processes are in a file system that takes no files.
        let Error::Invalid(text) = refused(Path::new("/proc")) else { panic!("another kind of error") };
        assert!(
            text.starts_with("/proc is on ") && text.contains("-o huge=always,size=16777216 tmpfs /proc"),
            "{text}"
        );
    }

    #[test]
    fn mount_options_are_found_by_the_number_of_the_device() {
        let mounts = "27 1 254:0 / / rw,relatime - ext4 /dev/vda rw\n42 27 0:39 / /mnt/a rw shared:3 - tmpfs none \
                      rw,size=102400k,huge=advise\n43 27 0:40 / /mnt/b rw - tmpfs none rw,size=1k\n";
        assert!(mount_options(mounts, "0:39").is_some_and(is_advised));
        assert!(!mount_options(mounts, "0:40").is_some_and(is_advised));
        assert_eq!(mount_options(mounts, "0:3"), None);
    }
}
