//! The watch of IoThreads: hanging calls, stuck threads, and turns on request.

use std::sync::{Arc, mpsc};

use anyhow::Result;
use device::CallWatch;

use super::Daemon;
use crate::threads::engines::Threads;

impl Daemon {
    /// Watches for hanging calls and IoThreads until the returned watch is dropped. A process has
    /// one watch. It must outlive the queues, because a hanging call keeps them from stopping.
    ///
    /// # Errors
    ///
    /// When the kernel refuses a signal handler or a thread.
    pub fn watch(&self) -> Result<CallWatch> {
        let threads = Arc::clone(&self.thread_watch);
        let check = move |now| threads.lock().check(now);
        Ok(CallWatch::start(check)?)
    }

    /// Asks every IoThread for a turn. The receiver is disconnected when all have turned.
    pub(crate) fn ask_for_turns(&self) -> mpsc::Receiver<()> {
        let pool = self.pool.lock();
        pool.threads.as_ref().map_or_else(|| mpsc::channel().1, Threads::ask_for_turns)
    }
}
