//! Limits on the memory that front-ends may map into this process.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use virtqueue::{MappingBudget, MappingRules, MemoryFiles};

use crate::process::cgroup;

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
    #[must_use]
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
        self.compare(cgroup::memory_limit)
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

#[cfg(test)]
mod tests {
    use std::fs::File;

    use rustix::fs::{MemfdFlags, memfd_create};
    use virtqueue::{GuestMemory, RegionConfig};

    use super::*;

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
}
