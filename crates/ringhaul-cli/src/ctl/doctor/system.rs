//! Files of the system: command lines, threads of virtual CPUs, and counters of block devices.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

/// A thread that runs a virtual CPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct VcpuThread {
    /// The CPUs that it may run on.
    pub(super) cpus: String,
}

/// The counters of a block device since the start of the system.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(super) struct BlockDevice {
    /// Reads and writes.
    pub(super) requests: u64,
    /// The time in milliseconds that these requests have taken, all together.
    pub(super) request_ms: u64,
    /// The time in milliseconds for which the device had requests.
    pub(super) busy_ms: u64,
}

/// The words of the command line of the process in this folder of `/proc`. Empty if it cannot be
/// read.
pub(super) fn command_line(process: &Path) -> Vec<String> {
    let text = fs::read(process.join("cmdline")).unwrap_or_default();
    let words = text.split(|byte| *byte == 0).filter(|word| !word.is_empty());
    words.map(|word| String::from_utf8_lossy(word).into_owned()).collect()
}

/// The vCPUs of the process in this folder of `/proc`: QEMU names their threads `CPU 0/KVM`, Cloud
/// Hypervisor `vcpu0`, and Firecracker `fc_vcpu 0`.
pub(super) fn vcpu_threads(process: &Path) -> Vec<VcpuThread> {
    let threads = fs::read_dir(process.join("task")).into_iter().flatten().flatten();
    let vcpu = |thread: fs::DirEntry| {
        let name = fs::read_to_string(thread.path().join("comm")).ok()?;
        let is_vcpu = ["CPU ", "vcpu", "fc_vcpu"].iter().any(|start| name.starts_with(start));
        let status = fs::read_to_string(thread.path().join("status")).ok()?;
        let cpus = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?;
        is_vcpu.then(|| VcpuThread { cpus: cpus.trim().to_owned() })
    };
    threads.filter_map(vcpu).collect()
}

/// The counters of the block device with this number, below `/sys/dev/block` in `folder`. `None`
/// for a file system without one block device, such as btrfs or NFS.
pub(super) fn block_device(folder: &Path, number: &str) -> Option<BlockDevice> {
    // Documentation/block/stat.rst of the kernel.
    let text = fs::read_to_string(folder.join(number).join("stat")).ok()?;
    let numbers: Vec<u64> = text.split_ascii_whitespace().flat_map(str::parse).collect();
    let [reads, _, _, read_ms, writes, _, _, write_ms, _, busy_ms, ..] = numbers[..] else {
        return None;
    };
    Some(BlockDevice { requests: reads + writes, request_ms: read_ms + write_ms, busy_ms })
}

/// The CPUs of the host, from its folder of `/sys`.
pub(super) fn online_cpus(folder: &Path) -> BTreeSet<u32> {
    cpu_set(&fs::read_to_string(folder.join("online")).unwrap_or_default())
}

/// The CPUs of a list such as `0-3,8`.
pub(super) fn cpu_set(list: &str) -> BTreeSet<u32> {
    let range = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        Some(first.trim().parse().ok()?..=last.trim().parse().ok()?)
    };
    list.split(',').filter_map(range).flatten().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_cpus_are_sets() {
        assert_eq!(cpu_set("0-2,8,10-11\n"), BTreeSet::from([0, 1, 2, 8, 10, 11]));
        assert!(cpu_set("").is_empty());
    }

    #[test]
    fn a_process_is_described_by_its_files() {
        let process = tempfile::tempdir().unwrap();
        assert!(command_line(process.path()).is_empty() && vcpu_threads(process.path()).is_empty());
        fs::write(process.path().join("cmdline"), b"qemu\0-h\0vm\0").unwrap();
        assert_eq!(command_line(process.path()), ["qemu", "-h", "vm"]);
        for (thread, name, cpus) in [
            ("7", "qemu\n", "0-3"),
            ("8", "CPU 0/KVM\n", "2"),
            ("9", "vcpu1\n", "3"),
            ("10", "fc_vcpu 0\n", "4"),
            ("11", "not vcpu\n", "5"),
        ] {
            let folder = process.path().join("task").join(thread);
            fs::create_dir_all(&folder).unwrap();
            fs::write(folder.join("comm"), name).unwrap();
            let status = format!("Name:\tx\nCpus_allowed_list:\t{cpus}\n");
            fs::write(folder.join("status"), status).unwrap();
        }
        let mut cpus: Vec<_> = vcpu_threads(process.path()).into_iter().map(|it| it.cpus).collect();
        cpus.sort();
        assert_eq!(cpus, ["2", "3", "4"]);
    }

    #[test]
    fn counters_of_a_device_are_those_of_the_kernel() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(block_device(folder.path(), "8:0"), None);
        fs::create_dir(folder.path().join("8:0")).unwrap();
        let line = "  10 1 80 20   5 2 40 30   0 45 50   0 0 0 0 0 0\n";
        fs::write(folder.path().join("8:0/stat"), line).unwrap();
        let expected = BlockDevice { requests: 15, request_ms: 50, busy_ms: 45 };
        assert_eq!(block_device(folder.path(), "8:0"), Some(expected));
        fs::write(folder.path().join("8:0/stat"), "1 2 3").unwrap();
        assert_eq!(block_device(folder.path(), "8:0"), None);
    }
}
