//! Limits that exports share: on the memory that front-ends map, with the limit of the cgroup, on
//! the size of files, and on open files (`RLIMIT_NOFILE`).

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::{fs, io};

use iomem::fits;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use virtqueue::{MappingBudget, MappingRules, MemoryFiles};

/// Limits on the mapped memory of each front-end and of all together; clones share the count.
#[derive(Clone)]
pub struct MemoryLimits {
    all: MappingBudget,
    each_bytes: u64,
    files: MemoryFiles,
    watch: Arc<Watch>,
}

/// The last comparison with the limit of the cgroup.
#[derive(Default)]
struct Watch {
    mapped_bytes: AtomicU64,
    is_warned: AtomicBool,
}

impl MemoryLimits {
    /// Creates the limits: bytes for each front-end, bytes for the process, and the kinds of files
    /// that may be memory.
    pub fn new(each_bytes: u64, of_all_bytes: u64, files: MemoryFiles) -> Self {
        let all = "the memory of all front-ends (--max-mapped-memory)";
        let all = MappingBudget::new(all, of_all_bytes);
        Self { all, each_bytes, files, watch: Arc::default() }
    }

    /// The mapping rules of a front-end that connects now.
    pub(crate) fn front_end_rules(&self) -> MappingRules {
        let each = "the memory of a front-end (--max-guest-memory)";
        let budget = self.all.child(each, self.each_bytes);
        let advice = "; to allow other file systems, use --memory-files any";
        MappingRules { files: self.files, advice, budget }
    }

    /// Returns a warning when front-ends have more memory mapped than the cgroup of this process
    /// may use, once until that changes. Reads the cgroup's limit only after the mapped size has
    /// changed.
    pub(crate) fn check(&self) -> Option<String> {
        self.compare(cgroup_limit)
    }

    /// The memory in bytes that front-ends share now.
    pub(crate) fn mapped_bytes(&self) -> u64 {
        self.all.mapped_bytes()
    }

    fn compare(&self, limit_bytes: impl FnOnce() -> Option<u64>) -> Option<String> {
        let mapped = self.all.mapped_bytes();
        if self.watch.mapped_bytes.swap(mapped, Ordering::Relaxed) == mapped {
            return None;
        }
        let limit = limit_bytes().filter(|limit| mapped > *limit);
        let was_warned = self.watch.is_warned.swap(limit.is_some(), Ordering::Relaxed);
        let limit = limit.filter(|_| !was_warned)?;
        Some(format!(
            "front-ends share {} MiB of memory, and the cgroup of this daemon is limited to {} \
             MiB: guest memory that the daemon touches first counts as its own, and the kernel may \
             kill the daemon; remove the limit (MemoryMax=infinity), or raise it above the memory \
             of all guests",
            mapped >> 20,
            limit >> 20
        ))
    }
}

/// The lowest memory limit in bytes of this process's cgroup and its ancestors. `None` if there is
/// no limit or the kernel does not report it.
pub(crate) fn cgroup_limit() -> Option<u64> {
    let own = fs::read_to_string("/proc/self/cgroup").ok()?;
    limit_in(Path::new("/sys/fs/cgroup"), &own)
}

/// The lowest limit of the cgroups below `root` that `own` lists in the format of
/// `/proc/self/cgroup` (cgroups(7)): version 2 as `0::PATH`, the memory controller of version 1 as
/// `N:memory:PATH`.
fn limit_in(root: &Path, own: &str) -> Option<u64> {
    let limits = own.lines().flat_map(|line| {
        let [_, controllers, path] = line.splitn(3, ':').collect::<Vec<_>>()[..] else {
            return Vec::new();
        };
        if controllers.is_empty() {
            // Where both versions are mounted, version 2 has a folder of its own.
            let unified = root.join("unified");
            let root = if unified.is_dir() { unified } else { root.to_owned() };
            limits_of(&root, path, "memory.max")
        } else if controllers.split(',').any(|name| name == "memory") {
            limits_of(&root.join("memory"), path, "memory.limit_in_bytes")
        } else {
            Vec::new()
        }
    });
    // Version 1 represents "no limit" by the largest number of whole pages.
    limits.filter(|bytes| *bytes < 1 << 62).min()
}

/// The limits of a cgroup and of its ancestors. A container may see no ancestor.
fn limits_of(root: &Path, path: &str, file: &str) -> Vec<u64> {
    let own: PathBuf = root.join(path.trim_start_matches('/'));
    let up_to_root = own.ancestors().take_while(|folder| folder.starts_with(root));
    let read = |folder: &Path| fs::read_to_string(folder.join(file)).ok()?.trim().parse().ok();
    up_to_root.filter_map(read).collect()
}

/// Descriptors set aside: the most that one message brings, which are open before they are counted,
/// and descriptors that the system's libraries and engines may still open.
const RESERVED: usize = 253 + 64;

/// Descriptors set aside for each export: the connection of its next front-end and one that is
/// being closed.
const RESERVED_EACH: usize = 2;

/// The smallest share: enough for a front-end with some queues if the limit is unreasonably low.
const SHARE_MIN: usize = 32;

/// Makes a write beyond the limit on the size of files (`RLIMIT_FSIZE`) fail with EFBIG, an error
/// of one request. By default the write also raises SIGXFSZ, which ends the process and all its
/// exports. Applies to the whole process.
///
/// # Errors
///
/// When the kernel refuses.
pub fn survive_size_limit() -> io::Result<()> {
    // SAFETY: no handler is installed. Only the default action of a signal is replaced, which
    // nothing else in this process handles.
    let previous = unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
    if previous == libc::SIG_ERR { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Raises the limit on open files as far as the system allows. A front-end may bring three
/// descriptors for each of 256 queues, and their IoThreads duplicate them: more than the usual soft
/// limit of 1024.
pub(crate) fn raise_file_limit() {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: limit.maximum, maximum: limit.maximum };
    if let Err(error) = setrlimit(Resource::Nofile, raised) {
        tracing::debug!("cannot raise the limit on open files: {error}");
    }
}

/// Returns the number of descriptors that each export's front-end may have open, so that no
/// front-end starves another. The limit minus all other descriptors is divided equally. Front-ends
/// have `of_front_ends` open now.
pub(crate) fn descriptor_share(exports: usize, of_front_ends: usize) -> usize {
    let limit = getrlimit(Resource::Nofile).current;
    let open = std::fs::read_dir("/proc/self/fd").map_or(0, Iterator::count);
    // Other threads open and close descriptors during the count, so it may fall short.
    let open = open.saturating_sub(of_front_ends);
    limit.map_or(usize::MAX, |limit| part_of(fits(limit, "the limit on open files"), open, exports))
}

fn part_of(limit: usize, open: usize, exports: usize) -> usize {
    let reserved = open + RESERVED + RESERVED_EACH * exports;
    (limit.saturating_sub(reserved) / exports.max(1)).max(SHARE_MIN)
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use rustix::fs::{MemfdFlags, memfd_create};
    use virtqueue::{GuestMemory, RegionConfig};

    use super::*;

    /// The signal would end the process.
    #[test]
    fn a_write_beyond_the_limit_on_sizes_raises_no_signal() {
        let ignored = || {
            let status = std::fs::read_to_string("/proc/self/status").unwrap();
            let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:")).unwrap();
            u64::from_str_radix(mask.trim(), 16).unwrap() & 1 << (libc::SIGXFSZ - 1) != 0
        };
        survive_size_limit().unwrap();
        assert!(ignored());
    }

    #[test]
    fn memory_beyond_the_limit_of_the_cgroup_is_told_once() {
        let limits = MemoryLimits::new(1 << 40, 1 << 40, MemoryFiles::default());
        let map = || {
            let size = 2 << 20;
            let file = File::from(memfd_create("memory", MemfdFlags::CLOEXEC).unwrap());
            file.set_len(size).unwrap();
            let (file, guest_addr, user_addr) = (Arc::new(file), 0, 0);
            let region = RegionConfig { guest_addr, size, user_addr, file, file_offset: 0 };
            GuestMemory::new(&[region], &limits.front_end_rules()).unwrap()
        };
        let limit = || limits.compare(|| Some(3 << 20));
        assert_eq!(limit(), None);
        let first = map();
        assert_eq!(limit(), None);
        let second = map();
        let message = limit().unwrap();
        assert!(message.contains("share 4 MiB") && message.contains("limited to 3 MiB"));
        assert_eq!(limits.compare(|| unreachable!("nothing has changed")), None);
        let third = map();
        assert_eq!(limit(), None, "it is told");
        drop((second, third));
        assert_eq!(limit(), None);
        let _second = map();
        assert!(limit().is_some(), "again");
        drop(first);
        assert_eq!(limits.compare(|| None), None);
    }

    #[test]
    fn the_least_limit_on_the_way_to_the_root_counts() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        let write = |path: &str, text: &str| {
            let path = root.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        assert_eq!(limit_in(root, "0::/system.slice/a.service\n"), None);
        write("system.slice/a.service/memory.max", "max\n");
        assert_eq!(limit_in(root, "0::/system.slice/a.service\n"), None);
        write("system.slice/memory.max", "1048576\n");
        assert_eq!(limit_in(root, "0::/system.slice/a.service\n"), Some(1 << 20));
        write("system.slice/a.service/memory.max", "4096\n");
        assert_eq!(limit_in(root, "0::/system.slice/a.service\n"), Some(4096));
        assert_eq!(limit_in(root, "0::/\n"), None);

        let both = "4:cpu,memory:/pod\n1:name=systemd:/pod\n0::/\n";
        write("memory/pod/memory.limit_in_bytes", "9223372036854771712\n");
        assert_eq!(limit_in(root, both), None);
        write("memory/memory.limit_in_bytes", "8192\n");
        assert_eq!(limit_in(root, both), Some(8192));
        write("unified/memory.max", "4096\n");
        assert_eq!(limit_in(root, both), Some(4096));
        assert_eq!(limit_in(root, "nonsense"), None);
    }
}

#[cfg(test)]
mod file_limits_tests {
    use super::*;

    #[test]
    fn all_shares_together_leave_room() {
        for exports in 1..100 {
            let share = part_of(1 << 16, 300, exports);
            assert!(300 + RESERVED + exports * (share + RESERVED_EACH) <= 1 << 16);
        }
        assert_eq!(part_of(100, 90, 4), SHARE_MIN);
        assert_eq!(part_of(1024, 20, 0), 1024 - 20 - RESERVED);
    }
}
