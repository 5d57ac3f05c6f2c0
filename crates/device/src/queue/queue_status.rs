//! A view of a queue for other threads.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

/// The state of a queue that other threads see.
#[derive(Default)]
pub(crate) struct QueueStatus {
    /// Commands that the IoThread has not yet carried out.
    pub(crate) pending_commands: AtomicU32,
    /// Requests taken and not answered, as of the last run.
    pub(crate) requests: AtomicU32,
    /// Bytes of the large requests among them.
    pub(crate) bytes: AtomicU64,
    /// The place at which the next start of the ring continues, as of the last run.
    pub(crate) base: AtomicU32,
    /// True if the last run had no room for another chain.
    pub(crate) is_full: AtomicBool,
}

/// A command on its way, until it is carried out or dropped.
pub(crate) struct PendingCommand(pub(crate) Arc<QueueStatus>);

impl Drop for PendingCommand {
    fn drop(&mut self) {
        self.0.pending_commands.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A view of a queue that needs no help of its IoThread.
#[derive(Clone)]
pub struct QueueView {
    pub(crate) status: Arc<QueueStatus>,
}

impl QueueView {
    /// Requests taken and not answered, as of the queue's last run.
    pub fn requests(&self) -> u32 {
        self.status.requests.load(Ordering::Relaxed)
    }

    /// Bytes of the large requests among [`requests`](Self::requests): longer than
    /// [`SMALL_REQUEST_BYTES`], or zeroes to be written.
    ///
    /// [`SMALL_REQUEST_BYTES`]: crate::SMALL_REQUEST_BYTES
    pub fn large_bytes(&self) -> u64 {
        self.status.bytes.load(Ordering::Relaxed)
    }

    /// True if the IoThread has seen all commands for the queue, such as a stop.
    pub fn has_taken_commands(&self) -> bool {
        self.status.pending_commands.load(Ordering::Relaxed) == 0
    }
}
