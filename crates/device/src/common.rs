//! What devices of all kinds have.

use std::collections::BTreeMap;
use std::num::NonZeroU16;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};
use virtqueue::AnswerPlace;

use crate::call_watch::CallTrust;
use crate::events::Events;
use crate::load::Load;
use crate::queue_setup::QueueOptions;
use crate::stats::{QueueStats, RequestTotals};

/// A status or a response, which has one byte in the ring and more in the headers of Linux.
pub(crate) const fn byte(number: u32) -> u8 {
    let [byte, 0, 0, 0] = number.to_le_bytes() else { panic!("it is no byte") };
    byte
}

/// How a device works, whatever its kind.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Working {
    pub(crate) notify_batch: bool,
    pub(crate) prefetch: bool,
    pub(crate) in_order: bool,
    pub(crate) run_max: Option<NonZeroU16>,
    pub(crate) fixed_buffers: bool,
    pub(crate) long_lists_bytes: u64,
    /// Where requests are answered whose chains have a fault.
    pub(crate) answer_place: AnswerPlace,
}

/// What a device of any kind keeps for its queues and its controller.
pub(crate) struct Common {
    /// What the driver negotiated.
    features: AtomicU64,
    /// What its queues have taken and not answered.
    load: Arc<Load>,
    pub(crate) events: Arc<dyn Events>,
    /// Whether calls may be made in the way that can hang.
    trust: Arc<CallTrust>,
    pub(crate) working: Working,
    /// By the number of the queue, for those that were started once.
    stats: Mutex<BTreeMap<u16, Arc<QueueStats>>>,
    /// Another process has stopped the queues, and handed them over.
    was_handed_over: AtomicBool,
}

impl Common {
    pub(crate) fn new(working: Working, events: Arc<dyn Events>) -> Self {
        let trust = Arc::new(CallTrust::new(Arc::clone(&events)));
        let (features, stats) = (AtomicU64::new(0), Mutex::default());
        let (load, was_handed_over) = (Arc::default(), AtomicBool::new(false));
        Self { features, load, events, trust, working, stats, was_handed_over }
    }

    /// Queues that start from now on were stopped by another process, in the way of this one.
    pub(crate) fn is_handed_over(&self) {
        self.was_handed_over.store(true, Ordering::Relaxed);
    }

    /// What the driver negotiated; 0 when there is no driver.
    pub(crate) fn features(&self) -> u64 {
        self.features.load(Ordering::Relaxed)
    }

    /// Whether this bit was negotiated.
    pub(crate) fn has(&self, feature: u32) -> bool {
        self.features() & (1 << feature) != 0
    }

    /// Returns what was negotiated before.
    pub(crate) fn set_features(&self, features: u64) -> u64 {
        self.features.swap(features, Ordering::Relaxed)
    }

    /// What a queue starts with.
    pub(crate) fn queue_options(&self, index: u16, takes_requests: bool) -> QueueOptions {
        let mut all = self.stats();
        let is_new = !all.contains_key(&index) && !self.was_handed_over.load(Ordering::Relaxed);
        let stats = Arc::clone(all.entry(index).or_default());
        QueueOptions {
            index,
            takes_requests,
            event_idx: self.has(VIRTIO_RING_F_EVENT_IDX),
            indirect: self.has(VIRTIO_RING_F_INDIRECT_DESC),
            notify_batch: self.working.notify_batch,
            prefetch: self.working.prefetch,
            in_order: self.working.in_order,
            run_max: self.working.run_max,
            long_lists_bytes: self.working.long_lists_bytes,
            load: Arc::clone(&self.load),
            answer_place: self.working.answer_place,
            events: Arc::clone(&self.events),
            trust: Arc::clone(&self.trust),
            stats,
            is_new,
        }
    }

    /// What a queue has served; `None`: it was never started.
    pub(crate) fn queue_stats(&self, index: u16) -> Option<Arc<QueueStats>> {
        self.stats().get(&index).cloned()
    }

    /// What all queues together have served.
    pub(crate) fn totals(&self) -> RequestTotals {
        let mut totals = RequestTotals::default();
        self.stats().values().for_each(|stats| totals += stats.totals());
        totals
    }

    fn stats(&self) -> MutexGuard<'_, BTreeMap<u16, Arc<QueueStats>>> {
        self.stats.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
