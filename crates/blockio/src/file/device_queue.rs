//! The request queue under a file: the number of requests that it takes before a submit waits.

use iomem::fits;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Weak};

use crate::executor::sync::Lock;

/// The request queue shared by all users of the disk, of its partitions, and of files on them.
#[derive(Debug)]
pub(crate) struct Device {
    queue: Queue,
    /// IoThreads that have something open on it.
    users: AtomicU32,
}

/// A request queue as sysfs shows it.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Queue {
    /// The folder of the whole disk, without symbolic links: the name of the queue.
    disk: PathBuf,
    /// The number of requests for which it has room (`nr_requests`).
    requests: u32,
    limits: RequestLimits,
}

/// The limits beyond which the kernel cuts an op into several requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RequestLimits {
    /// The most bytes of a request.
    bytes: usize,
    /// The most segments of a request. In the worst case each page of memory is one.
    segments: usize,
    /// Bits that are zero in both addresses where two ranges meet in a request.
    boundary: usize,
}

const PAGE_BYTES: usize = 4096;
/// The most segments that the kernel puts into one piece, regardless of the device.
const SEGMENTS_MAX: usize = 256;

/// The least share of an IoThread. If equal shares would be smaller, a hanging device may block
/// submits: few IoThreads are busy with one device at a time.
const SHARE_MIN: u32 = 16;

/// All devices in use, so that each has one object.
static DEVICES: Lock<Vec<Weak<Device>>> = Lock::new(Vec::new());

impl Device {
    /// Finds the device that `file` is or lies on. `None` if no bound of it is known.
    pub(crate) fn for_file(file: &File) -> Option<Arc<Self>> {
        let metadata = file.metadata().ok()?;
        if metadata.file_type().is_block_device() {
            return Self::for_number(metadata.rdev());
        }
        // The number of a file system over several devices (btrfs) names none of them.
        Self::for_number(metadata.dev()).or_else(|| Self::for_number(mounted_device(file)?))
    }

    fn for_number(number: u64) -> Option<Arc<Self>> {
        let (major, minor) = (rustix::fs::major(number), rustix::fs::minor(number));
        let folder = PathBuf::from(format!("/sys/dev/block/{major}:{minor}"));
        let queue = queue_below(&folder, 0)?;
        let mut devices = DEVICES.lock();
        devices.retain(|device| device.strong_count() > 0);
        let mut all = devices.iter().filter_map(Weak::upgrade);
        if let Some(known) = all.find(|known| known.queue.disk == queue.disk) {
            return Some(known);
        }
        let device = Arc::new(Self { queue, users: AtomicU32::new(0) });
        devices.push(Arc::downgrade(&device));
        Some(device)
    }

    #[cfg(test)]
    pub(crate) fn with(requests: u32, request_bytes: usize) -> Arc<Self> {
        let limits = RequestLimits { bytes: request_bytes, segments: usize::MAX, boundary: 0 };
        Self::with_limits(requests, limits)
    }

    #[cfg(test)]
    pub(crate) fn with_limits(requests: u32, limits: RequestLimits) -> Arc<Self> {
        let queue = Queue { disk: PathBuf::new(), requests, limits };
        Arc::new(Self { queue, users: AtomicU32::new(0) })
    }

    /// The limits of one request.
    pub(crate) fn limits(&self) -> RequestLimits {
        self.queue.limits
    }

    /// The requests that one IoThread may have in the queue. A quarter is left for other programs.
    pub(crate) fn share(&self) -> u32 {
        let (users, all) = (self.users.load(Ordering::Relaxed).max(1), self.queue.requests * 3 / 4);
        (all / users).max(SHARE_MIN).min(all).max(1)
    }

    pub(crate) fn add_user(&self) {
        self.users.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn remove_user(&self) {
        self.users.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Finds the queue that takes the requests of a device in sysfs. A device without its own queue
/// (device-mapper, md) passes requests on, and the queue with the least room below it counts.
fn queue_below(folder: &Path, depth: u32) -> Option<Queue> {
    const DEPTH_MAX: u32 = 8;
    let own = folder.canonicalize().ok()?;
    // A partition uses the queue of its disk, whose folder contains the partition's.
    let disk = if own.join("partition").exists() { own.parent()? } else { &own };
    if disk.join("mq").exists()
        && let Some(queue) = Queue::for_disk(disk)
    {
        return Some(queue);
    }
    if depth == DEPTH_MAX {
        return None;
    }
    let below = std::fs::read_dir(disk.join("slaves")).ok()?;
    let all = below.flatten().filter_map(|entry| queue_below(&entry.path(), depth + 1));
    all.reduce(|a, b| {
        let limits = a.limits.both(b.limits);
        // Devices over the same disks must agree on one, regardless of the order.
        let least = if (a.requests, &a.disk) <= (b.requests, &b.disk) { a } else { b };
        Queue { limits, ..least }
    })
}

impl Queue {
    fn for_disk(disk: &Path) -> Option<Self> {
        let number = |name: &str| -> Option<usize> {
            let text = std::fs::read_to_string(disk.join("queue").join(name)).ok()?;
            text.trim().parse().ok()
        };
        let requests = number("nr_requests").filter(|&requests| requests > 0)?;
        let segments = number("max_segments").unwrap_or(SEGMENTS_MAX);
        let limits = RequestLimits {
            bytes: number("max_sectors_kb").map_or(usize::MAX, |kib| kib << 10).max(PAGE_BYTES),
            segments: segments.clamp(1, SEGMENTS_MAX),
            boundary: number("virt_boundary_mask").unwrap_or(0),
        };
        let requests = u32::try_from(requests).unwrap_or(u32::MAX / 4);
        Some(Self { disk: disk.to_owned(), requests, limits })
    }
}

impl RequestLimits {
    #[cfg(test)]
    pub(crate) fn with_segments(segments: usize) -> Self {
        Self { bytes: usize::MAX, segments, boundary: 0 }
    }

    /// Combines the limits of two devices that an op passes.
    fn both(self, other: Self) -> Self {
        Self {
            bytes: self.bytes.min(other.bytes),
            segments: self.segments.min(other.segments),
            boundary: self.boundary | other.boundary,
        }
    }

    /// The most requests that the kernel makes of an op with these ranges of memory. (If its place
    /// on the device is fragmented, a file system may make more.)
    pub(crate) fn requests_of(&self, ranges: &[libc::iovec]) -> u32 {
        if let [range] = ranges
            && range.iov_len < PAGE_BYTES
        {
            return 1;
        }
        let (mut bytes, mut pages, mut gaps, mut end) = (0usize, 0, 0, 0);
        for range in ranges {
            let (start, len) = (range.iov_base as usize, range.iov_len);
            gaps += usize::from(bytes > 0 && (start | end) & self.boundary != 0);
            pages += (start % PAGE_BYTES + len).div_ceil(PAGE_BYTES);
            bytes += len;
            end = start.wrapping_add(len);
        }
        // A request ends when it is full of bytes or of segments, or at a gap.
        let cuts = |all: usize, most: usize| all.saturating_sub(1) / most;
        let requests = 1 + cuts(bytes, self.bytes) + cuts(pages, self.segments) + gaps;
        fits(requests, "a count of requests")
    }
}

/// The number of the block device that the file system of `file` was mounted from, if it is one.
fn mounted_device(file: &File) -> Option<u64> {
    let of_file = format!("/proc/self/fdinfo/{}", file.as_raw_fd());
    let of_file = std::fs::read_to_string(of_file).ok()?;
    let mount = of_file.lines().find_map(|line| line.strip_prefix("mnt_id:"))?.trim().to_owned();
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").ok()?;
    let source = mounts.lines().find_map(|line| source_of_mount(line, &mount))?;
    let metadata = std::fs::metadata(source).ok()?;
    metadata.file_type().is_block_device().then(|| metadata.rdev())
}

/// Returns the source in a line of mountinfo, if the line is about the mount of this number.
fn source_of_mount<'a>(line: &'a str, mount: &str) -> Option<&'a str> {
    let (of_mount, of_file_system) = line.split_once(" - ")?;
    let is_it = of_mount.split(' ').next() == Some(mount);
    is_it.then(|| of_file_system.split(' ').nth(1)).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn the_threads_of_a_device_share_its_requests() {
        let device = Device::with(128, 4096);
        assert_eq!(device.share(), 96);
        for _ in 0..4 {
            device.add_user();
        }
        assert_eq!(device.share(), 24);
        (0..1000).for_each(|_| device.add_user());
        assert_eq!(device.share(), SHARE_MIN);
        assert_eq!(Device::with(2, 4096).share(), 1);
    }

    #[test]
    #[cfg_attr(miri, ignore = "asks the system")]
    fn queues_are_found_below_devices_that_hand_on() {
        let root = tempfile::tempdir().unwrap();
        let root = root.path().canonicalize().unwrap();
        let disk = |name: &str, requests: u32| {
            std::fs::create_dir_all(root.join(name).join("mq")).unwrap();
            std::fs::create_dir_all(root.join(name).join("queue")).unwrap();
            let write = |file: &str, value: u32| {
                std::fs::write(root.join(name).join(file), format!("{value}\n")).unwrap();
            };
            write("queue/nr_requests", requests);
            write("queue/max_sectors_kb", 1280);
            write("queue/max_segments", 128);
        };
        let hands_on = |name: &str, to: &[&str]| {
            let slaves = root.join(name).join("slaves");
            std::fs::create_dir_all(&slaves).unwrap();
            for (number, below) in to.iter().enumerate() {
                let link = slaves.join(number.to_string());
                std::os::unix::fs::symlink(root.join(below), link).unwrap();
            }
        };
        disk("a", 256);
        disk("b", 64);
        disk("c", 64);
        for partition in ["a/a1", "a/a2"] {
            std::fs::create_dir_all(root.join(partition)).unwrap();
            std::fs::write(root.join(partition).join("partition"), "1\n").unwrap();
        }
        hands_on("dm-0", &["a/a1", "c", "b"]);
        hands_on("dm-1", &["b", "c"]);
        hands_on("dm-2", &["dm-0"]);
        let found = |name: &str| {
            let queue = queue_below(&root.join(name), 0)?;
            let disk = queue.disk.strip_prefix(&root).unwrap().to_str().unwrap().to_owned();
            Some((disk, queue.requests, queue.limits))
        };
        let limits = RequestLimits { bytes: 1280 << 10, segments: 128, boundary: 0 };
        for (name, disk, requests) in [
            ("a", "a", 256),
            ("a/a1", "a", 256),
            ("a/a2", "a", 256),
            ("dm-0", "b", 64),
            ("dm-1", "b", 64),
            ("dm-2", "b", 64),
        ] {
            assert_eq!(found(name), Some((disk.to_owned(), requests, limits)), "{name}");
        }
        assert_eq!(found("nothing"), None);
    }

    /// A range of memory that is never accessed.
    fn range(start: usize, iov_len: usize) -> libc::iovec {
        libc::iovec { iov_base: std::ptr::without_provenance_mut(start), iov_len }
    }

    #[test]
    fn an_op_counts_as_many_requests_as_the_kernel_makes_of_it() {
        let limits = RequestLimits { bytes: 1 << 20, segments: 128, boundary: 0 };
        let pages = |count, len| -> Vec<_> { (0..count).map(|i| range(i << 20, len)).collect() };
        for (ranges, requests) in [
            (vec![], 1),
            (vec![range(0, 4096)], 1),
            (vec![range(0, 512 << 10)], 1),
            // Not aligned to a page: one request more.
            (vec![range(512, 512 << 10)], 2),
            (vec![range(0, 4 << 20)], 1 + 3 + 7),
            (pages(128, 512), 1),
            (pages(129, 512), 2),
            (pages(256, 4096), 2),
        ] {
            assert_eq!(limits.requests_of(&ranges), requests, "{} ranges", ranges.len());
        }
        // With such a boundary, ranges share a request only if they meet at page borders.
        let limits = RequestLimits { boundary: 4095, ..limits };
        assert_eq!(limits.requests_of(&pages(16, 4096)), 1);
        assert_eq!(limits.requests_of(&pages(16, 512)), 16);
        let ends = [range(512, 3584), range(8192, 4096), range(16_384, 512)];
        assert_eq!(limits.requests_of(&ends), 1);
    }

    #[test]
    fn the_source_of_a_mount_is_found_by_its_number() {
        let line = "36 35 0:38 /sub /mnt rw,noatime shared:1 - btrfs /dev/sda3 rw,subvol=/sub";
        assert_eq!(source_of_mount(line, "36"), Some("/dev/sda3"));
        assert_eq!(source_of_mount(line, "35"), None);
        let without = "40 35 0:40 / /tmp rw - tmpfs tmpfs rw";
        assert_eq!(source_of_mount(without, "40"), Some("tmpfs"));
    }

    /// Returns the output of a program that succeeds.
    fn run(program: &str, arguments: &[&str]) -> Option<String> {
        let output = Command::new(program).args(arguments).output().ok()?;
        output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
    }

    /// A loop device over a file of 256 MiB, with two partitions. Dropping it removes the device.
    struct Loop {
        path: String,
        _file: tempfile::NamedTempFile,
    }

    impl Loop {
        fn new() -> Option<Self> {
            if !rustix::process::geteuid().is_root() {
                eprintln!("skipped: only root can make loop devices");
                return None;
            }
            let file = tempfile::NamedTempFile::new_in(crate::testing::disk_folder()).unwrap();
            file.as_file().set_len(256 << 20).unwrap();
            let Some(path) = run("losetup", &["--find", "--show", file.path().to_str().unwrap()])
            else {
                eprintln!("skipped: no loop device is available");
                return None;
            };
            Some(Self { path, _file: file })
        }

        fn name(&self) -> &str {
            self.path.rsplit('/').next().unwrap()
        }

        /// Adds a partition and returns its device number.
        fn add_partition(&self, number: u32) -> u64 {
            let start = (number * 8192).to_string();
            run("addpart", &[&self.path, &number.to_string(), &start, "8192"]).unwrap();
            let name = self.name();
            let path = format!("/sys/block/{name}/{name}p{number}/dev");
            let text = std::fs::read_to_string(path).unwrap();
            let (major, minor) = text.trim().split_once(':').unwrap();
            rustix::fs::makedev(major.parse().unwrap(), minor.parse().unwrap())
        }
    }

    impl Drop for Loop {
        fn drop(&mut self) {
            for number in ["1", "2"] {
                run("delpart", &[&self.path, number]);
            }
            run("losetup", &["--detach", &self.path]);
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn partitions_of_a_disk_are_one_device() {
        let Some(disk) = Loop::new() else { return };
        let whole =
            Device::for_file(&File::open(&disk.path).unwrap()).expect("a loop device has a bound");
        for number in [1, 2] {
            let partition = Device::for_number(disk.add_partition(number)).unwrap();
            assert!(Arc::ptr_eq(&whole, &partition), "partition {number} counts for itself");
        }
        if let Some(other) = Loop::new() {
            let other = Device::for_file(&File::open(&other.path).unwrap()).unwrap();
            assert!(!Arc::ptr_eq(&whole, &other), "two disks count as one");
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn a_file_on_btrfs_lies_on_the_device_of_its_mount() {
        let Some(disk) = Loop::new() else { return };
        let place = tempfile::tempdir().unwrap();
        let folder = place.path().to_str().unwrap();
        if run("mkfs.btrfs", &["--quiet", &disk.path]).is_none()
            || run("mount", &[&disk.path, folder]).is_none()
        {
            eprintln!("skipped: there is no btrfs, or no mkfs.btrfs");
            return;
        }
        let found = File::create(place.path().join("disk")).map(|file| Device::for_file(&file));
        run("umount", &[folder]).unwrap();
        let whole = Device::for_file(&File::open(&disk.path).unwrap()).unwrap();
        let found = found.unwrap().expect("a file on btrfs has no bound");
        assert!(Arc::ptr_eq(&whole, &found));
    }
}
