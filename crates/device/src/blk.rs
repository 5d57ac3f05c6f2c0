//! virtio-blk (virtio 1.3, section 5.2): the negotiated state of a device and its configuration
//! space.

use std::io;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Instant;

use blockio::{DiskSource, Io};
use virtqueue::AnswerPlace;

use crate::access::task_set::{WaitGroup, WaitToken};
use crate::access::{DiskAccess, DiskUser};
use crate::device_core::DeviceCore;
use crate::events::Events;
use crate::queue::Queue;
use crate::queue::per_thread::PerThread;
use config::BlkOptions;

pub mod config;
pub(crate) mod request;

/// A virtio-blk device: the part beside the state that both kinds of device have.
#[derive(Clone)]
pub struct BlkDevice {
    shared: Arc<BlkState>,
}

struct BlkState {
    core: DeviceCore,
    source: DiskSource,
    options: BlkOptions,
    /// The access state that other devices on the disk share.
    access: Arc<DiskAccess>,
    queues: Arc<PerThread<Queue>>,
    /// The `writeback` byte of the configuration space.
    writeback: AtomicBool,
}

impl BlkDevice {
    pub(crate) fn new(
        source: DiskSource,
        options: BlkOptions,
        access: Arc<DiskAccess>,
        events: Arc<dyn Events>,
    ) -> Self {
        let (tuning, in_order) = (options.tuning, options.in_order);
        let core = DeviceCore::new(tuning, in_order, AnswerPlace::LastByte, events);
        let writeback = AtomicBool::new(options.write_cache);
        let queues = Arc::default();
        let shared = BlkState { core, source, options, access, queues, writeback };
        let shared = Arc::new(shared);
        shared.access.add_disk_user(Arc::new(BlkDiskUser {
            queues: Arc::downgrade(&shared.queues),
            device: Arc::downgrade(&shared),
        }));
        Self { shared }
    }

    /// Registers a queue that starts on this IoThread.
    pub(crate) fn start_queue(&self, index: u16, io: &Io, queue: &Rc<Queue>) {
        self.shared.queues.insert(index, io, queue);
        // The queue is registered first, so a barrier that is raised from now on finds it.
        queue.barrier.checks_access.set(self.access().has_barrier());
    }

    /// The access state that other devices on the disk share.
    pub fn access(&self) -> &Arc<DiskAccess> {
        &self.shared.access
    }

    pub(crate) fn core(&self) -> &DeviceCore {
        &self.shared.core
    }

    pub(crate) fn stalled_since(&self) -> Option<Instant> {
        self.shared.source.stalled_since()
    }

    pub(crate) fn num_queues(&self) -> u16 {
        self.shared.options.num_queues
    }

    pub(crate) fn features(&self) -> u64 {
        config::features(&self.shared.source.info(), &self.shared.options)
    }

    /// Notes that the driver has negotiated `features`; `before` are the previous ones.
    ///
    /// Features that differ from the previous ones restore the initial write cache. The cache is
    /// off if the driver cannot flush (virtio 1.3, section 5.2.5.2).
    pub(crate) fn negotiated(&self, before: u64, features: u64) {
        // Without previous features there was no driver, so `writeback` is the choice of this one.
        if before != 0 && before != features {
            self.shared.writeback.store(self.shared.options.write_cache, Ordering::Relaxed);
        }
        if self.has(config::F_CONFIG_WCE) && !self.has(config::F_FLUSH) {
            self.shared.writeback.store(false, Ordering::Relaxed);
        }
    }

    /// Restores the choices in this configuration space.
    pub(crate) fn restore(&self, space: &[u8]) {
        let writeback = space.get(config::WRITEBACK_OFFSET).is_some_and(|byte| *byte != 0);
        self.shared.writeback.store(writeback, Ordering::Relaxed);
    }

    pub(crate) fn reset(&self) {
        self.shared.writeback.store(self.shared.options.write_cache, Ordering::Relaxed);
    }

    pub(crate) fn config_space(&self) -> Vec<u8> {
        let writeback = self.shared.writeback.load(Ordering::Relaxed);
        let source = &self.shared.source;
        let hints =
            config::Hints { optimal: source.optimal_bytes(), discard: source.discard_bytes() };
        config::space(&source.info(), hints, &self.shared.options, writeback).into()
    }

    /// Takes a write to the configuration space. Only `writeback` can be written; any value but 0
    /// is 1. The cache is switched on only if the device was set up with one and the driver can
    /// flush it: a device without a cache keeps its promise in any case.
    ///
    /// # Errors
    ///
    /// When any other field is written.
    pub(crate) fn write_config(&self, offset: usize, data: &[u8]) -> io::Result<()> {
        match data {
            [value] if offset == config::WRITEBACK_OFFSET => {
                // A write before the features are known is corrected with them.
                let may_flush = self.has(config::F_FLUSH) || self.core().features() == 0;
                let can_be_on = self.shared.options.write_cache && may_flush;
                self.shared.writeback.store(*value != 0 && can_be_on, Ordering::Relaxed);
                Ok(())
            }
            _ => Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!(
                    "the driver wrote {} bytes at offset {offset} of the configuration space",
                    data.len()
                ),
            )),
        }
    }

    /// The disk of the device.
    pub(crate) fn source(&self) -> &DiskSource {
        &self.shared.source
    }

    fn serial(&self) -> &str {
        &self.shared.options.serial
    }

    fn has(&self, feature: u32) -> bool {
        self.core().has(feature)
    }

    /// True if writes must be on stable storage before they are answered. False if the driver
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

/// The device, for initiators that need the disk alone, reserve it or resize it.
struct BlkDiskUser {
    /// Weak, because IoThreads use a disk user, which must not keep the disk open.
    queues: Weak<PerThread<Queue>>,
    device: Weak<BlkState>,
}

impl DiskUser for BlkDiskUser {
    fn is_gone(&self) -> bool {
        self.queues.strong_count() == 0
    }

    fn raise_barrier(&self) -> WaitGroup {
        let (waiting, token) = WaitGroup::new();
        if let Some(queues) = self.queues.upgrade() {
            queues.post_each(|_| {
                let token: WaitToken = token.clone();
                Box::new(move |queue| {
                    if let Some(queue) = queue {
                        queue.raise_barrier(Box::new(token));
                    }
                })
            });
        }
        waiting
    }

    fn cut_off(&self, size_bytes: u64) {
        if let Some(device) = self.device.upgrade() {
            device.source.cut_off(size_bytes);
        }
    }

    fn refresh(&self) {
        if let Some(device) = self.device.upgrade() {
            // After a failure the disk keeps its size.
            let _ = device.source.refresh();
        }
    }
}

#[cfg(test)]
mod tests {
    use blockio::DiskOptions;

    use super::*;
    use crate::device::{Device, QueueRole};
    use crate::events::LogEvents;
    use crate::queue::queue_setup::StartError;
    use crate::testing::Scene;

    fn device() -> Device {
        let source = DiskSource::null(1 << 20, &DiskOptions::default()).unwrap();
        Device::blk(source, BlkOptions::default(), Arc::new(LogEvents::new("test")))
    }

    /// A front-end passes on writes of the driver at once, and its features when it is ready.
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

    #[test]
    fn only_the_write_cache_can_be_written_and_the_rest_must_be_as_it_is() {
        let device = device();
        device.set_features(1 << config::F_CONFIG_WCE | 1 << config::F_FLUSH).unwrap();
        let space = device.config_space();
        for offset in 0..space.len() + 4 {
            let written = device.write_config(offset, &[0]);
            assert_eq!(written.is_ok(), offset == config::WRITEBACK_OFFSET, "{offset}");
        }
        assert!(device.write_config(config::WRITEBACK_OFFSET, &[0, 0]).is_err());
        assert_eq!(device.read_config(config::WRITEBACK_OFFSET, 2), [0, 0]);
        // A migration writes the whole space.
        device.restore_config(0, &space).unwrap();
        assert_eq!(device.config_space(), space);
        let mut other = space.clone();
        other[0] ^= 1;
        other[config::WRITEBACK_OFFSET] = 0;
        assert!(device.restore_config(0, &other).is_err());
        assert_eq!(device.config_space(), space, "half of it was taken");
    }

    #[test]
    fn negotiated_features_can_be_taken_again() {
        let device = device();
        let wanted = 1 << config::F_CONFIG_WCE | 1 << config::F_FLUSH;
        device.set_features(wanted).unwrap();
        device.write_config(config::WRITEBACK_OFFSET, &[0]).unwrap();
        let before = device.negotiated();
        device.reset();
        assert_eq!(device.config_space()[config::WRITEBACK_OFFSET], 1);
        device.restore(&before);
        assert_eq!(device.config_space()[config::WRITEBACK_OFFSET], 0);
        assert!(device.set_features(1 << 63).is_err());
    }

    #[test]
    fn a_driver_continues_with_the_device_of_another_process() {
        let wanted = 1 << config::F_CONFIG_WCE | 1 << config::F_FLUSH;
        let before = device();
        before.set_features(wanted).unwrap();
        before.write_config(config::WRITEBACK_OFFSET, &[0]).unwrap();
        let text = serde_json::to_string(&before.negotiated()).unwrap();
        let negotiated = serde_json::from_str(&text).unwrap();
        let after = device();
        assert!(!after.take_over(&negotiated).unwrap());
        assert_eq!(after.negotiated(), before.negotiated());
        let larger = DiskSource::null(1 << 21, &DiskOptions::default()).unwrap();
        let events = Arc::new(LogEvents::new("test"));
        let larger = Device::blk(larger, BlkOptions::default(), events.clone());
        assert!(larger.take_over(&negotiated).unwrap(), "the driver does not know of its size");
        let options = BlkOptions { num_queues: 3, ..BlkOptions::default() };
        let source = DiskSource::null(1 << 20, &DiskOptions::default()).unwrap();
        let other = Device::blk(source, options, events);
        let as_made = other.negotiated();
        assert!(other.take_over(&negotiated).is_err());
        assert_eq!(other.negotiated(), as_made);
    }

    #[test]
    fn each_queue_has_its_role_and_others_do_not_start() {
        let device = device();
        assert_eq!(device.queue_role(0), Some(QueueRole::Request));
        assert_eq!(device.queue_role(1), None);
        assert!(device.queue_stats(0).is_none());
        let scene = Scene::new();
        let handle = scene.start_queue_of(&device, 0);
        assert!(device.queue_stats(0).is_some());
        assert_eq!(scene.wait(&handle.begin_final_stop()), 0);
        let none = scene.begin_start_queue_of(&device, 1);
        assert!(matches!(scene.wait(&none), Err(StartError::NoSuchQueue { index: 1, count: 1 })));
    }

    /// Its answers would wait for ever: a packed ring does not keep the order of its chains.
    #[test]
    fn a_device_that_answers_in_order_has_no_packed_rings() {
        let packed = 1 << config::F_RING_PACKED;
        let device = |in_order| {
            let source = DiskSource::null(1 << 20, &DiskOptions::default()).unwrap();
            let options = BlkOptions { in_order, ..BlkOptions::default() };
            Device::blk(source, options, Arc::new(LogEvents::new("test")))
        };
        let (plain, ordered) = (device(false), device(true));
        assert!(ordered.set_features(packed).is_err());
        plain.set_features(packed).unwrap();
        assert!(ordered.take_over(&plain.negotiated()).is_err());
        // A caller that restores the state of another device.
        ordered.restore(&plain.negotiated());
        let scene = Scene::new();
        let started = scene.wait(&scene.begin_start_queue_of(&ordered, 0));
        assert!(matches!(started, Err(StartError::PackedInOrder)));
    }

    #[test]
    fn a_queue_with_an_unknown_account_is_reported() {
        let mut scene = Scene::new();
        let mut heard = |in_order, next_avail, is_handed_over| {
            scene.next_avail = next_avail;
            scene.driver.ring().put_avail_idx(next_avail);
            let options = BlkOptions { in_order, ..BlkOptions::default() };
            let source = DiskSource::null(1 << 20, &DiskOptions::default()).unwrap();
            let events = Arc::clone(&scene.events);
            let device = Device::blk(source, options, events);
            if is_handed_over {
                let (state, files) = device.hand_over().unwrap();
                device.resume(state, files).unwrap();
            }
            for _ in 0..2 {
                let handle = scene.start_queue_of(&device, 0);
                let _ = scene.wait(&handle.begin_final_stop());
            }
            scene.events.take()
        };
        // At the second start, this process has stopped the queue.
        assert_eq!(heard(false, 7, false), ["queue 0 continues at 7"]);
        assert!(heard(false, 0, false).is_empty());
        assert!(heard(true, 7, false).is_empty());
        assert!(heard(false, 7, true).is_empty(), "another process has stopped it");
    }
}
