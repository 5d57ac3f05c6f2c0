//! A thread that ends with its owner.

use std::thread::JoinHandle;

/// Owns a thread. Dropping it stops the thread and waits for its end.
pub(crate) struct ThreadGuard {
    stop: Option<Box<dyn FnOnce() + Send + Sync>>,
    thread: Option<JoinHandle<()>>,
}

impl ThreadGuard {
    /// Owns `thread`, which ends soon after a call of `stop`.
    pub(crate) fn new(thread: JoinHandle<()>, stop: impl FnOnce() + Send + Sync + 'static) -> Self {
        Self { stop: Some(Box::new(stop)), thread: Some(thread) }
    }
}

impl Drop for ThreadGuard {
    fn drop(&mut self) {
        self.stop.take().into_iter().for_each(|stop| stop());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
