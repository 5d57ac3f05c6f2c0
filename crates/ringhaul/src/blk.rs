//! virtio-blk (virtio 1.3, section 5.2).
//!
//! [`BlkDevice`] needs nothing of vhost-user: it works on a memory map, rings and eventfds, so a
//! VMM can run it with an IoThread of its own process (see `examples/embed.rs`).

pub mod config;
pub(crate) mod request;

use std::io;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use blockio::io_thread::RegisteredMemory;
use blockio::{Disk, DiskSource, Io, Remote};

use crate::call_watch::CallTrust;
use crate::log_limit::LogLimit;
use crate::pending::Pending;
use crate::queue::{Queue, QueueHandle, QueueOptions, QueueSetup, StartError};
use crate::queue_task;
use config::{BlkOptions, ConfigSpace};

/// A virtio-blk device, shared by all its queues and whoever controls it.
#[derive(Clone)]
pub struct BlkDevice {
    shared: Arc<Shared>,
}

struct Shared {
    source: DiskSource,
    options: BlkOptions,
    /// What the driver negotiated.
    features: AtomicU64,
    /// The `writeback` byte of the configuration space.
    writeback: AtomicBool,
    /// For lines on errors that the guest or the front-end can cause.
    log: LogLimit,
    /// For lines on front-ends that come and go.
    sessions: LogLimit,
    /// Whether calls may be made in the way that can hang.
    trust: Arc<CallTrust>,
}

impl BlkDevice {
    /// A device for `source`.
    #[must_use]
    pub fn new(source: DiskSource, options: BlkOptions) -> Self {
        let writeback = AtomicBool::new(options.write_cache);
        let features = AtomicU64::new(0);
        let trust = Arc::new(CallTrust::new(&options.name));
        let (log, sessions) = (LogLimit::default(), LogLimit::default());
        let shared = Shared { source, options, features, writeback, log, sessions, trust };
        Self { shared: Arc::new(shared) }
    }

    /// What the log calls the device.
    pub(crate) fn name(&self) -> &str {
        &self.shared.options.name
    }

    /// The limit on lines that tell of front-ends which come and go.
    pub(crate) fn sessions(&self) -> &LogLimit {
        &self.shared.sessions
    }

    /// The limit on lines on errors that the guest or the front-end can cause.
    pub(crate) fn log(&self) -> &LogLimit {
        &self.shared.log
    }

    /// Since when its disk has not answered, if that is some seconds ago.
    pub(crate) fn late_since(&self) -> Option<Instant> {
        self.shared.source.late_since()
    }

    /// The most queues that a driver may use.
    #[must_use]
    pub fn num_queues(&self) -> u16 {
        self.shared.options.num_queues
    }

    /// The features that the device offers: bits of virtio 1.3, sections 5.2.3 and 6.
    #[must_use]
    pub fn features(&self) -> u64 {
        config::features(self.shared.source.info(), &self.shared.options)
    }

    /// Takes what the driver negotiated. Call it while no queue runs.
    ///
    /// A driver that negotiates something else than the one before finds the write cache as it was
    /// set up, or off if it cannot flush (virtio 1.3, section 5.2.5.2). The same features may be
    /// those of the same driver, which goes on after a pause and relies on what it chose; who knows
    /// that it is another calls [`reset`](Self::reset).
    ///
    /// # Errors
    ///
    /// When a bit was never offered.
    pub fn set_features(&self, features: u64) -> io::Result<()> {
        let unknown = features & !self.features();
        if unknown != 0 {
            let text = format!("the driver negotiated features that are not offered: {unknown:#x}");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        let before = self.shared.features.swap(features, Ordering::Relaxed);
        // Without features there was no driver, and what was written is this one's choice.
        if before != 0 && before != features {
            self.shared.writeback.store(self.shared.options.write_cache, Ordering::Relaxed);
        }
        if self.has(config::F_CONFIG_WCE) && !self.has(config::F_FLUSH) {
            self.shared.writeback.store(false, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Back to the state before any driver: call it when a driver goes away.
    pub fn reset(&self) {
        self.shared.features.store(0, Ordering::Relaxed);
        self.shared.writeback.store(self.shared.options.write_cache, Ordering::Relaxed);
    }

    /// The configuration space as it is now.
    #[must_use]
    pub fn config_space(&self) -> ConfigSpace {
        let writeback = self.shared.writeback.load(Ordering::Relaxed);
        config::space(self.shared.source.info(), &self.shared.options, writeback)
    }

    /// Takes a write to the configuration space. Only `writeback` can be written; any value but 0
    /// is 1. The cache is switched on only where the device was set up with one, and for a driver
    /// that can flush it: a device without a cache keeps its promise whatever the driver asks.
    ///
    /// # Errors
    ///
    /// When any other field is written.
    pub fn write_config(&self, offset: usize, data: &[u8]) -> io::Result<()> {
        match data {
            [value] if offset == config::WRITEBACK_OFFSET => {
                // What is written before the features are known is settled with them.
                let may_flush = self.has(config::F_FLUSH) || self.features_taken() == 0;
                let can_be_on = self.shared.options.write_cache && may_flush;
                self.shared.writeback.store(*value != 0 && can_be_on, Ordering::Relaxed);
                Ok(())
            }
            _ => Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("the driver wrote {} bytes at {offset} of the configuration", data.len()),
            )),
        }
    }

    /// Starts a queue on the IoThread behind `thread`. It is processed once unasked, and calls the
    /// driver once.
    ///
    /// # Errors
    ///
    /// When the rings are not as the specification demands, the kick cannot be watched, or the
    /// IoThread has ended.
    pub fn start_queue(
        &self,
        thread: &Remote,
        setup: QueueSetup,
    ) -> Result<QueueHandle, StartError> {
        self.begin_start_queue(thread, setup).wait().unwrap_or(Err(StartError::ThreadEnded))
    }

    /// As [`start_queue`](Self::start_queue), for who cannot wait, such as a program that runs the
    /// IoThread's turns itself.
    #[must_use]
    pub fn begin_start_queue(
        &self,
        thread: &Remote,
        setup: QueueSetup,
    ) -> Pending<Result<QueueHandle, StartError>> {
        let device = self.clone();
        Pending::call(thread, move |io| {
            let trust = Arc::clone(&device.shared.trust);
            let (queue, handle) = Queue::new(setup, io, &device.queue_options(), trust)?;
            let blk = Blk::new(io, &device);
            let memory = device.register_memory(io, &queue);
            let task = queue_task::serve(Rc::clone(io), Rc::new(queue), Rc::new(blk));
            io.spawn(async move {
                let stopped = task.await;
                drop(memory);
                stopped.tell();
            });
            Ok(handle)
        })
    }

    fn features_taken(&self) -> u64 {
        self.shared.features.load(Ordering::Relaxed)
    }

    fn has(&self, feature: u32) -> bool {
        self.features_taken() & (1 << feature) != 0
    }

    fn queue_options(&self) -> QueueOptions {
        QueueOptions {
            event_idx: self.has(config::F_EVENT_IDX),
            indirect: self.has(config::F_INDIRECT_DESC),
            notify_batch: self.shared.options.notify_batch,
        }
    }

    fn register_memory(&self, io: &Rc<Io>, queue: &Queue) -> Option<RegisteredMemory> {
        if !self.shared.options.fixed_buffers {
            return None;
        }
        match queue.register_memory(io) {
            Ok(memory) => Some(memory),
            Err(error) => {
                if let Some(left_out) = self.shared.log.permit() {
                    tracing::warn!(
                        export = self.name(),
                        left_out,
                        "cannot register the guest's memory with io_uring: {error}; going on \
                         without (the usual reason is the limit on locked memory, ulimit -l)"
                    );
                }
                None
            }
        }
    }

    /// Whether writes must be on stable storage before they are answered: unless the driver
    /// negotiated a write cache, which it can flush (virtio 1.3, section 5.2.5.2).
    fn write_through(&self) -> bool {
        let cached = if self.has(config::F_CONFIG_WCE) {
            self.shared.writeback.load(Ordering::Relaxed)
        } else {
            self.has(config::F_FLUSH) && self.shared.options.write_cache
        };
        !cached
    }
}

/// The device on one IoThread.
pub(crate) struct Blk {
    disk: Disk,
    device: BlkDevice,
}

impl Blk {
    fn new(io: &Rc<Io>, device: &BlkDevice) -> Self {
        let disk = device.shared.source.attach(io);
        Self { disk, device: device.clone() }
    }

    pub(crate) fn log(&self) -> &LogLimit {
        self.device.log()
    }

    pub(crate) fn name(&self) -> &str {
        self.device.name()
    }
}

#[cfg(test)]
mod tests {
    use blockio::DiskOptions;

    use super::*;

    fn device() -> BlkDevice {
        let source = DiskSource::null(1 << 20, &DiskOptions::default()).unwrap();
        BlkDevice::new(source, BlkOptions::default())
    }

    /// A front-end passes on what the driver writes at once, and its features when it is ready.
    #[test]
    fn a_driver_may_choose_its_cache_before_its_features_are_known() {
        let flush = 1 << config::F_CONFIG_WCE | 1 << config::F_FLUSH;
        for (features, written, expected) in
            [(flush, 0, 0), (flush, 1, 1), (1 << config::F_CONFIG_WCE, 1, 0)]
        {
            let device = device();
            device.write_config(config::WRITEBACK_OFFSET, &[written]).unwrap();
            device.set_features(features).unwrap();
            assert_eq!(device.config_space()[config::WRITEBACK_OFFSET], expected);
            device.reset();
            assert_eq!(device.config_space()[config::WRITEBACK_OFFSET], 1);
        }
    }
}
