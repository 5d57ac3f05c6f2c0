//! What can be seen of a queue from other threads.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU32, AtomicU64, Ordering};

/// What other threads see of a queue.
#[derive(Default)]
pub(crate) struct Shown {
    /// Commands that the IoThread has not carried out yet.
    pub(crate) unheard: AtomicU32,
    /// Requests that were taken and are not answered, as of the last run.
    pub(crate) requests: AtomicU32,
    /// Bytes of the large ones of them.
    pub(crate) bytes: AtomicU64,
    /// The avail entry that is popped next, as of the last run.
    pub(crate) next_avail: AtomicU16,
    /// There was no room for another chain in the last run.
    pub(crate) is_full: AtomicBool,
}

/// A command on its way, until it is carried out or dropped.
pub(crate) struct Unheard(pub(crate) Arc<Shown>);

impl Drop for Unheard {
    fn drop(&mut self) {
        self.0.unheard.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A queue, seen without the help of its IoThread.
#[derive(Clone)]
pub struct QueueWatch {
    pub(crate) shown: Arc<Shown>,
}

impl QueueWatch {
    /// Requests that were taken and are not answered yet, as of the queue's last run.
    #[must_use]
    pub fn requests(&self) -> u32 {
        self.shown.requests.load(Ordering::Relaxed)
    }

    /// Bytes of the large ones among those requests: longer than [`SMALL_REQUEST_BYTES`], or zeroes
    /// that are written.
    ///
    /// [`SMALL_REQUEST_BYTES`]: crate::SMALL_REQUEST_BYTES
    #[must_use]
    pub fn large_bytes(&self) -> u64 {
        self.shown.bytes.load(Ordering::Relaxed)
    }

    /// Whether the IoThread has seen all commands for the queue, such as to stop.
    #[must_use]
    pub fn has_heard(&self) -> bool {
        self.shown.unheard.load(Ordering::Relaxed) == 0
    }
}
