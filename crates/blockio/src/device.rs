//! The block device under a file: how many requests it takes before a submit waits for it.

use std::fs::File;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// One block device, shared by all that have it or files on it open.
#[derive(Debug)]
pub(crate) struct Device {
    number: u64,
    /// Requests that it has room for (`nr_requests`).
    requests: u32,
    /// Bytes of an op that are one request to it at most.
    request_bytes: usize,
    /// IoThreads that have something open on it.
    users: AtomicU32,
}

/// With so many IoThreads that each would get less, a device that hangs may hold submits up: few
/// of them are busy with one device at a time.
const SHARE_MIN: u32 = 16;

/// So that each device is known once.
static DEVICES: Mutex<Vec<Weak<Device>>> = Mutex::new(Vec::new());

impl Device {
    /// The device that `file` is or lies on. `None`: it has no bound that is known.
    pub(crate) fn of(file: &File) -> Option<Arc<Self>> {
        let metadata = file.metadata().ok()?;
        let is_device = metadata.file_type().is_block_device();
        let number = if is_device { metadata.rdev() } else { metadata.dev() };
        let mut devices = DEVICES.lock().unwrap_or_else(PoisonError::into_inner);
        devices.retain(|device| device.strong_count() > 0);
        let known = devices.iter().filter_map(Weak::upgrade).find(|known| known.number == number);
        if known.is_some() {
            return known;
        }
        let (major, minor) = (rustix::fs::major(number), rustix::fs::minor(number));
        let folder = PathBuf::from(format!("/sys/dev/block/{major}:{minor}"));
        let (requests, request_bytes) = limits(&folder, 0)?;
        let device = Arc::new(Self { number, requests, request_bytes, users: AtomicU32::new(0) });
        devices.push(Arc::downgrade(&device));
        Some(device)
    }

    #[cfg(test)]
    pub(crate) fn with(requests: u32, request_bytes: usize) -> Arc<Self> {
        Arc::new(Self { number: 0, requests, request_bytes, users: AtomicU32::new(0) })
    }

    /// Bytes of an op that are one request at most.
    pub(crate) fn request_bytes(&self) -> usize {
        self.request_bytes
    }

    /// The requests that one IoThread may have there. A quarter is left for others of the machine.
    pub(crate) fn share(&self) -> u32 {
        let (users, all) = (self.users.load(Ordering::Relaxed).max(1), self.requests * 3 / 4);
        (all / users).max(SHARE_MIN).min(all).max(1)
    }

    pub(crate) fn add_user(&self) {
        self.users.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn remove_user(&self) {
        self.users.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Requests, and bytes of one, that a device in sysfs takes. A device without a queue of its own
/// (device-mapper, md) hands on to others, and the one with the least room counts.
fn limits(folder: &Path, depth: u32) -> Option<(u32, usize)> {
    const DEPTH_MAX: u32 = 8;
    let number = |name: &str| -> Option<usize> {
        // A partition has the queue of its disk, in whose folder its own lies.
        [format!("queue/{name}"), format!("../queue/{name}")]
            .iter()
            .find_map(|path| std::fs::read_to_string(folder.join(path)).ok()?.trim().parse().ok())
    };
    let has_queue = folder.join("mq").exists() || folder.join("../mq").exists();
    if has_queue && let Some(requests) = number("nr_requests").filter(|&requests| requests > 0) {
        // In the worst case each page of memory is a segment of its own.
        let of_segments = number("max_segments").map_or(usize::MAX, |count| count << 12);
        let bytes = number("max_sectors_kb").map_or(usize::MAX, |kib| kib << 10).min(of_segments);
        return Some((u32::try_from(requests).unwrap_or(u32::MAX / 4), bytes.max(4096)));
    }
    if depth == DEPTH_MAX {
        return None;
    }
    let below = std::fs::read_dir(folder.join("slaves")).ok()?;
    let all = below.flatten().filter_map(|entry| limits(&entry.path(), depth + 1));
    all.reduce(|a, b| (a.0.min(b.0), a.1.min(b.1)))
}

#[cfg(test)]
mod tests {
    use super::*;

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
    fn limits_are_found_below_devices_that_hand_on() {
        let root = tempfile::tempdir().unwrap();
        let disk = |name: &str, requests: u32| {
            std::fs::create_dir_all(root.path().join(name).join("mq")).unwrap();
            std::fs::create_dir_all(root.path().join(name).join("queue")).unwrap();
            let write = |file: &str, value: u32| {
                std::fs::write(root.path().join(name).join(file), format!("{value}\n")).unwrap();
            };
            write("queue/nr_requests", requests);
            write("queue/max_sectors_kb", 1280);
            write("queue/max_segments", 128);
        };
        disk("a", 256);
        disk("b", 64);
        let slaves = root.path().join("dm/slaves");
        std::fs::create_dir_all(&slaves).unwrap();
        for name in ["a", "b"] {
            std::os::unix::fs::symlink(root.path().join(name), slaves.join(name)).unwrap();
        }
        std::fs::create_dir_all(root.path().join("a/a1")).unwrap();
        assert_eq!(limits(&root.path().join("a"), 0), Some((256, 512 << 10)));
        assert_eq!(limits(&root.path().join("a/a1"), 0), Some((256, 512 << 10)));
        assert_eq!(limits(&root.path().join("dm"), 0), Some((64, 512 << 10)));
        assert_eq!(limits(&root.path().join("nothing"), 0), None);
    }
}
