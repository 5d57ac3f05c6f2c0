//! IoThreads: their engines, their watch, and the events that end them.

pub(crate) mod engines;
pub(crate) mod ownership;
pub mod shutdown;
pub(crate) mod thread_watch;

use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;

use anyhow::{Context, Result};
use blockio::executor::start_thread;
use blockio::{IoThread, IoThreadConfig, Remote};

/// IoThreads that run until they are dropped.
pub struct IoThreads {
    remotes: Vec<Remote>,
    handles: Vec<JoinHandle<()>>,
}

impl IoThreads {
    /// Starts `count` threads, each with a loop and an engine. A thread that ends with an error
    /// calls `failed`.
    ///
    /// # Errors
    ///
    /// An error of [`IoThread::new`], or that the kernel has no thread left.
    pub fn start<F: Fn() + Send + Sync + 'static>(
        count: usize,
        config: &IoThreadConfig,
        failed: &Arc<F>,
    ) -> Result<Self> {
        let mut threads = Self { remotes: Vec::new(), handles: Vec::new() };
        for index in 0..count {
            let (sender, receiver) = mpsc::sync_channel(1);
            let (config, failed) = (config.clone(), Arc::clone(failed));
            let run = move || run(index, &config, &sender, &*failed);
            let handle = start_thread(&format!("iothread-{index}"), run)
                .context("cannot start an IoThread")?;
            threads.handles.push(handle);
            let remote = receiver.recv().context("an IoThread ended while it started")??;
            threads.remotes.push(remote);
        }
        Ok(threads)
    }

    /// Prepares each thread's shared state for calls, and warns if that fails.
    pub fn prepare_calls(&self) {
        for (index, remote) in self.remotes.iter().enumerate() {
            if let Some(Err(error)) = remote.call(|_| device::prepare_calls()) {
                tracing::warn!(
                    "iothread-{index} cannot set up Linux AIO for calls: {error}; a full eventfd \
                     of a front-end may block it"
                );
            }
        }
    }

    /// Handles to call into the threads.
    pub fn remotes(&self) -> &[Remote] {
        &self.remotes
    }
}

fn run(
    index: usize,
    config: &IoThreadConfig,
    started: &mpsc::SyncSender<Result<Remote, blockio::Error>>,
    failed: &dyn Fn(),
) {
    let thread = match IoThread::new(config) {
        Ok(thread) => thread,
        Err(error) => {
            let _ = started.send(Err(error));
            return;
        }
    };
    let _ = started.send(Ok(thread.remote()));
    if let Err(error) = thread.run() {
        tracing::error!("iothread-{index} has ended: {error}; its queues are lost");
        failed();
    }
}

impl Drop for IoThreads {
    fn drop(&mut self) {
        for remote in &self.remotes {
            remote.post(|io| io.stop());
        }
        for handle in self.handles.drain(..) {
            let _ = handle.join();
        }
    }
}
