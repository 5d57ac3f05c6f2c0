//! What may change of a disk while it is in use, for all who have it.

use std::sync::atomic::{AtomicU64, Ordering};

use super::info::DiskInfo;

/// Written by whoever controls the disk, read by its IoThreads with each request. Nothing else
/// depends on a value, so no order is needed: a request is checked by the old size or the new one.
#[derive(Debug)]
pub(super) struct Shared {
    size_bytes: AtomicU64,
}

impl Shared {
    pub(super) fn new(size_bytes: u64) -> Self {
        Self { size_bytes: AtomicU64::new(size_bytes) }
    }

    #[inline]
    pub(super) fn size_bytes(&self) -> u64 {
        self.size_bytes.load(Ordering::Relaxed)
    }

    pub(super) fn set_size_bytes(&self, size_bytes: u64) {
        self.size_bytes.store(size_bytes, Ordering::Relaxed);
    }

    /// What a disk is like now that was like this when it was opened.
    pub(super) fn info(&self, opened: &DiskInfo) -> DiskInfo {
        DiskInfo { size_bytes: self.size_bytes(), ..*opened }
    }
}
