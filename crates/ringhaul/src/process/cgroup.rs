//! The memory limit of this process's cgroup.

use std::fs;
use std::path::{Path, PathBuf};

/// The lowest memory limit in bytes of this process's cgroup and its ancestors. `None` if there is
/// no limit or the kernel does not report it.
pub(crate) fn memory_limit() -> Option<u64> {
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

#[cfg(test)]
mod tests {
    use super::*;

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
